"""End-to-end training in the network lab: whether compression pays, and how much.

    sudo .venv/bin/python benchmarks/experiment.py WORKLOAD [--data-dir DIR] [--rounds N] [--write]

Dense training first shows how long computing takes. The rate of the links is then chosen so that a dense step spends
the regime's share of its time on communication. Every compressor trains in that network from the same weights for the
same number of steps. Each run is stored in docs/results/network-WORKLOAD.jsonl as soon as it ends, and is not
repeated, so the program can be interrupted. It needs root and a quiet machine. The table is printed at the end;
``--write`` also puts it into docs/network.md.

One run a system does not tell those apart that are close to each other. ``--rounds N`` trains those of ``CLOSE`` in N
rounds, one after the other in each, into docs/results/rounds-WORKLOAD.jsonl, and compares them within rounds.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plateau import interval
from records import RESULTS, Case, Row, by, command, complete, grid, missing, show, store, stored

from capture.lab.cluster import Cluster, shaped_network
from capture.lab.run import check, measure_network, train, train_without_exchange
from capture.workloads import BASELINES, RunConfig, workload_info
from capture.workloads.launch import RunFailedError
from gradstats.compressors import COMPRESSORS
from gradstats.network.rates import format_rate

# topk and exact are the same
SYSTEMS = [name for name in (*COMPRESSORS, *BASELINES) if name != "exact"]
CLOSE = ("sidco-e", "topk", "dgc")
"""Systems that are about as fast as each other, the first compared with the others."""
LAST = 5
"""How many of the last steps the training loss is averaged over."""
BEYOND = 10
"""A training whose loss ends at this many times its first one has diverged."""


HEADS = (
    "system | ms/step: | × dense: | × no exchange: | select ms: | exchange ms: | rest ms: | MB sent: | k̂/k: | loss: | "
    "s to the dense loss:"
)


@dataclass(frozen=True)
class Regime:
    """A workload, and the share of a dense step that is communication in SIDCo's table 1."""

    share: float
    batch_size: int
    steps: int


REGIMES = {
    "lstm-ptb": Regime(0.94, 8, 25),
    "vgg16-cifar10": Regime(0.60, 16, 30),
    "resnet20-cifar10": Regime(0.10, 64, 60),
    "resnet20-digits": Regime(0.10, 32, 20),
}


def rate_for(share: float, compute: float, numel: int, nproc: int) -> int:
    """Return the rate, bit/s to two digits, at which a ring's all-reduce takes that share of a step."""
    seconds = share / (1 - share) * compute
    rate = 8 * 2 * (nproc - 1) / nproc * 4 * numel / seconds
    return int(round(rate, 1 - math.floor(math.log10(rate))))


def steps_to(losses: list[float], goal: float) -> float:
    """Return after how many steps the mean of the last :data:`LAST` losses reaches the goal, or infinity."""
    for step in range(LAST, len(losses) + 1):
        if sum(losses[step - LAST : step]) / LAST <= goal:
            return step
    return math.inf


def step_of(problem: str) -> str:
    """Return the step that an error names, else the error."""
    step = re.search(r"step \d+", problem)
    return step[0] if step else problem


def three_digits(value: float) -> str:
    """Return a number with three significant digits, zeros at its end included."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def visible(compute: float, seconds: float) -> float:
    """Return the share of a dense step that is communication, 0 where noise makes it less."""
    return max(1 - compute / seconds, 0.0)


def table(rows: list[Row], setting: Row) -> str:
    """Return the runs as Markdown, the fastest first."""
    done = {row["compressor"]: row for row in rows if "problem" not in row}
    dense = done["none"]
    bound = setting["compute"]
    goal = sum(dense["losses"][-LAST:]) / LAST
    share = visible(bound, dense["seconds"])
    about = (
        f"{setting['nproc']} workers at {format_rate(setting['rate'] / 1e6)}, {setting['numel']:,} parameters, "
        f"batches of {setting['batch_size']}, ratio {setting['ratio']:g}, {setting['steps']} steps. Computing takes "
        f"{1e3 * bound:,.0f} ms of a step, {100 * share:.0f} % of a dense one is visible communication.\n\n"
    )
    lines = []
    for row in sorted(done.values(), key=lambda r: r["seconds"]):
        rest = row["seconds"] - bound - row["select"] - row["communicate"]
        steps = steps_to(row["losses"], goal)
        loss = sum(row["losses"][-LAST:]) / LAST
        cells = [
            f"`{row['compressor']}`",
            f"{1e3 * row['seconds']:,.0f}",
            f"{dense['seconds'] / row['seconds']:.2f}",
            f"{bound / row['seconds']:.2f}",
            *(f"{1e3 * t:,.1f}" for t in (row["select"], row["communicate"], rest)),
            three_digits(row["bytes"] / 1e6),
            f"{row['quality']:.2f}",
            "diverged" if loss > BEYOND * row["losses"][0] else f"{loss:.2f}",
            f"{steps * row['seconds']:,.0f}",
        ]
        lines.append(["–" if c in ("nan", "inf") else c for c in cells])
    made = [
        f"| `{row['compressor']}` | diverged, {step_of(row['problem'])} |" + " |" * 9
        for row in rows
        if "problem" in row
    ]
    return about + "\n".join([grid(HEADS, lines), *made])


def against(rows: list[Row], name: str) -> tuple[float, float, float]:
    """Return how many times as long another of :data:`CLOSE` takes for a step as the first, within rounds.

    Parameters
    ----------
    rows : list of dict
        Runs in rounds.
    name : str
        The other.

    Returns
    -------
    mean, low, high : float
        Geometric mean over the rounds, and its 95 % interval, of independent rounds.
    """
    first, other = (
        {r["round"]: math.log(r["seconds"]) for r in rows if r["compressor"] == each}
        for each in (CLOSE[0], name)
    )
    # an interrupted program has not come to the end of its round
    mean, half = interval([other[i] - first[i] for i in first.keys() & other.keys()])
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def rounds_table() -> str:
    """Return the stored runs in rounds of all workloads as Markdown."""
    lines = []
    for workload in REGIMES:
        rows = stored(RESULTS / f"rounds-{workload}.jsonl")[1:]
        for name in CLOSE if rows else ():
            mine = [r for r in rows if r["compressor"] == name]
            times = sorted(1e3 * r["seconds"] for r in mine)
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(*against(rows, name))
            cells = [
                workload,
                f"`{name}`",
                str(len(mine)),
                f"{statistics.median(times):,.0f} ({times[0]:,.0f} to {times[-1]:,.0f})",
                "1" if name == CLOSE[0] else ratio,
                three_digits(statistics.fmean(r["bytes"] for r in mine) / 1e6),
                f"{statistics.fmean(r['quality'] for r in mine):.2f}",
            ]
            lines.append(cells)
    heads = f"workload | system | rounds: | ms/step: | × {CLOSE[0]}: | MB sent: | k̂/k:"
    return grid(heads, lines)


def main() -> None:
    """Run what is not stored yet, and print the table."""
    parser = command(__doc__, "network.md")
    parser.add_argument("workload", choices=REGIMES)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--only", nargs="*", default=SYSTEMS, choices=SYSTEMS, metavar="NAME")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the stored runs")
    parser.add_argument(
        "--measure", action="store_true", help="also measure the network, for a plan"
    )
    parser.add_argument("--rounds", type=int, help="train those of CLOSE in so many rounds")
    options = parser.parse_args()
    workload_info(options.workload)
    regime = REGIMES[options.workload]
    config = RunConfig(
        workload=options.workload,
        data_dir=options.data_dir,
        nproc=options.nproc,
        steps=options.steps or regime.steps,
        batch_size=options.batch_size or regime.batch_size,
        ratio=options.ratio,
    )
    path = options.results / f"network-{options.workload}.jsonl"
    if options.rounds is not None:
        path = options.results / f"rounds-{options.workload}.jsonl"
    if not stored(path):
        store(path, setting_of(config, regime))
    setting = stored(path)[0]
    if options.measure:
        with shaped_network(config.nproc, setting["rate"]) as network:
            select = [name for name in options.only if name not in BASELINES]
            measured = measure_network(network, setting["numel"], config.ratio, select, "network")
        measured.save(path.with_suffix(".json"))
    if options.rounds is None:
        run_missing(config, path, ["compressor"], [(name,) for name in options.only])
        made = {options.workload: table(stored(path)[1:], setting)}
    else:
        cases: list[Case] = [(name, i) for i in range(options.rounds) for name in CLOSE]
        run_missing(config, path, ["compressor", "round"], cases)
        made = {"rounds": rounds_table()}
    show(made, options.write, "network.md")


def run_missing(config: RunConfig, path: Path, fields: Sequence[str], cases: list[Case]) -> None:
    """Train what no row is of: a system by its name, or by its name and the number of its round."""
    setting, key = stored(path)[0], by(*fields)

    def measure(name: str, *others: int) -> Row:
        made = one(config, name, network, setting["compute"])
        return dict(zip(fields, (name, *others), strict=True)) | made

    if left := missing(path, key, cases):
        check(config, list(dict.fromkeys(name for name, *_ in left)))
        with shaped_network(config.nproc, setting["rate"]) as network:
            complete(path, key, left, measure)


def one(config: RunConfig, name: str, network: Cluster, compute: float) -> Row:
    """Train once, and return the row that is stored."""
    try:
        record, losses, _ = train(config.replace(compressor=name, label=name), network, compute)
    except RunFailedError as error:  # a diverging system is a result
        return {"compressor": name, "problem": str(error)}
    return {**record, "losses": [round(loss, 4) for loss in losses]}


def setting_of(config: RunConfig, regime: Regime) -> Row:
    """Return the settings that all runs share, with the time of computing and the rate of the links."""
    check(config, ["none"])
    with shaped_network(config.nproc, 10**9) as network:
        computing = train_without_exchange(config, network)
    return {
        "workload": config.workload,
        "nproc": config.nproc,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "ratio": config.ratio,
        "numel": computing.numel,
        "compute": computing.seconds,
        "rate": rate_for(regime.share, computing.seconds, computing.numel, config.nproc),
    }


if __name__ == "__main__":
    main()
