"""Local steps predicted by `gradstats plan`, beside what others measured and beside runs in the lab.

    python benchmarks/utilisation.py --write
    sudo .venv/bin/python benchmarks/utilisation.py --lab --write

docs/results/public_local_steps.jsonl holds steps of a public measurement, https://github.com/Adnan082/diloco-measured
at 07b7885: 30,846,720 parameters on four machines with one L40S each, NCCL over TCP, links shaped with tc; first of
three repeats. ``exchange`` is the median of the time that one took, ``seconds`` and ``compute`` are means over all
``steps`` that were counted.

``--lab`` measures the lab once at one rate, as `gradstats bench-network --measure` does, and trains at others. Runs are
stored in docs/results/lab_local_steps*, and are not repeated. ``--write`` puts the tables into docs/network.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from statistics import median

import numpy as np
from records import DOCS, RESULTS, Row, by, command, complete, grid, missing, show, stored

from capture.lab.cluster import Cluster, shaped_network
from capture.lab.run import measure_network, train, train_without_exchange
from capture.workloads import RunConfig
from gradstats.network import Network, plan

PUBLIC, PAGE = RESULTS / "public_local_steps.jsonl", DOCS / "network.md"
NUMEL, WORKERS = 30_846_720, 4
LAB, NETWORK = RESULTS / "lab_local_steps.jsonl", RESULTS / "lab_local_steps.json"
RUN = RunConfig(workload="resnet20-digits", nproc=2, batch_size=16, steps=64)
FITTED_AT, RATES = 50 * 10**6, (20 * 10**6, 100 * 10**6)
LOCAL_STEPS, SYSTEMS = (0, 4, 16), ("none", "dense-bf16", "topk")
ROUNDS = 3
"""Runs of each kind: the machine is now faster, now slower, and a step without an exchange is timed in each round."""


def public() -> list[Row]:
    """Return the public measurement beside what a plan of its links says, which knows no more than their rate."""
    source = np.zeros(NUMEL, np.float32)
    rows = []
    for measured in stored(PUBLIC):
        steps, rate, compute = (measured[name] for name in ("local_steps", "rate", "compute"))
        network = Network.of_link(0, 8e-6 / rate)
        options = {"compressors": ["none"], "local_steps": [steps]}
        planned = plan(source, network, compute, [WORKERS], **options)[-1]
        exchange = max(steps, 1) * (planned["seconds"] - compute)
        # what was counted need not be whole intervals
        counted = compute + measured["exchanges"] / measured["steps"] * exchange
        rows.append(
            {
                **measured,
                "utilisation": compute / measured["seconds"],
                "planned_exchange": exchange,
                "planned_counted": compute / counted,
                "planned": planned["utilisation"],
            }
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return the comparison as Markdown."""
    lines = []
    for r in rows:
        exchange = r["exchange"] or r["seconds"] - r["compute"]
        cells = [
            {"ddp": "DDP", "diloco": "DiLoCo"}[r["system"]],
            f"{r['local_steps'] or '–'}",
            f"{r['rate']:,}",
            f"{exchange:.3g}",
            f"{r['planned_exchange']:.3g}",
            f"{exchange / r['planned_exchange']:.2f}",
            f"{r['exchanges']} in {r['steps']}",
            *(f"{100 * r[n]:.3g}" for n in ("utilisation", "planned_counted", "planned")),
        ]
        lines.append(cells)
    heads = (
        "system | H: | Mbit/s: | exchange s: | predicted s: | measured ÷ predicted: | exchanges in counted steps: | "
        "utilisation %: | predicted %: | in whole intervals %:"
    )
    return grid(heads, lines)


def measure() -> list[Row]:
    """Return the steps measured in the lab; train what is not stored."""
    if not NETWORK.exists():
        with shaped_network(RUN.nproc, FITTED_AT) as cluster:
            alone = train_without_exchange(RUN.replace(steps=40), cluster)
            network = measure_network(cluster, alone.numel, RUN.ratio, SYSTEMS[1:], "network")
            dataclasses.replace(network, about={**network.about, "numel": alone.numel}).save(
                NETWORK
            )
    key = by("round", "rate", "local_steps", "compressor")
    for number, rate in itertools.product(range(ROUNDS), RATES):
        cases = itertools.product([number], [rate / 1e6], LOCAL_STEPS, SYSTEMS)
        if left := missing(LAB, key, cases):
            with shaped_network(RUN.nproc, rate) as cluster:
                alone = train_without_exchange(RUN, cluster).seconds
                complete(LAB, key, left, partial(one, cluster, alone))
    return stored(LAB)


def one(cluster: Cluster, alone: float, number: int, rate: float, steps: int, name: str) -> Row:
    """Train once in a cluster of this rate, and return the row that is stored."""
    run = RUN.replace(compressor=name, local_steps=steps)
    return {"round": number, **train(run, cluster, alone)[0]}


def lab_rows(runs: list[Row]) -> list[Row]:
    """Return what a plan says of each kind of run in the lab, beside the rounds that were measured."""
    network, rows = Network.load(NETWORK), []
    for rate in RATES:
        here = [r for r in runs if r["rate"] == rate / 1e6]
        planned = plan(
            np.zeros(network.about["numel"], np.float32),
            network,
            median(r["compute_alone"] for r in here),
            [RUN.nproc],
            compressors=SYSTEMS[1:],
            rates=[rate],
            local_steps=LOCAL_STEPS,
        )
        for steps, name in itertools.product(LOCAL_STEPS, SYSTEMS):
            key = (steps, name)
            of_plan = next(r for r in planned if (r["local_steps"], r["compressor"]) == key)
            took = [r["seconds"] for r in here if (r["local_steps"], r["compressor"]) == key]
            row = {"rate": rate / 1e6, "local_steps": steps, "compressor": name, "took": took}
            numbers = {end: of_plan[end] for end in ("seconds", "low", "high")}
            rows.append({**row, "measured": median(took), **numbers})
    return rows


def lab_table(rows: list[Row]) -> str:
    """Return the lab's steps and those of a plan as Markdown."""
    lines = []
    for r in rows:
        seconds = (r["measured"], min(r["took"]), max(r["took"]), r["seconds"], r["low"], r["high"])
        middle, least, most, predicted, low, high = (f"{1e3 * each:,.0f}" for each in seconds)
        error = f"{100 * (r['seconds'] / r['measured'] - 1):+.0f}"
        cells = [f"{r['rate']:g}", str(r["local_steps"] or "–"), f"`{r['compressor']}`"]
        cells += [f"{middle}, {least} to {most}", predicted, f"{low} to {high}", error]
        lines.append(cells)
    heads = "Mbit/s: | H: | compressor | measured ms a step, lowest to highest: | predicted ms: | 95 % interval:"
    return grid(f"{heads} | error %:", lines)


def main() -> None:
    """Predict, and compare."""
    parser = command(__doc__, "network.md")
    parser.add_argument("--lab", action="store_true", help="train in the lab, too")
    options = parser.parse_args()
    tables = {"public": table(public())}
    if options.lab:
        tables["lab local steps"] = lab_table(lab_rows(measure()))
    show(tables, options.write, "network.md")


if __name__ == "__main__":
    main()
