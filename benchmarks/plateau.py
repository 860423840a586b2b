"""Training to a plateau with every compressor and ratio, over several seeds, relative to dense.

    python benchmarks/plateau.py [WORKLOAD] [--data-dir DIR] [--seeds N] [--others] [--write]
    sudo .venv/bin/python benchmarks/plateau.py [WORKLOAD] [--data-dir DIR] --lab RATE [--write]

Every run of a seed starts from the same weights and sees the same batches, with the same Nesterov momentum: in the
optimizer, or corrected in each rank's memory where the compressor is a system that does that. The learning rate rises
at first and falls to zero, so the loss has settled when a run ends; ``falling`` says by how much it still fell in the
last tenth. ``none`` is PyTorch's DistributedDataParallel without a hook. Each run is stored in
docs/results/plateau-WORKLOAD.jsonl as soon as it ends, and is not repeated, so the program can be interrupted; with
``--checkpoints`` a run that was interrupted goes on, too, and is evaluated on unseen data at every checkpoint;
``--so-far`` stores what such a run has until then, with the steps ``made``, which is dropped when it goes on. Results
do not depend on the clock: LAGS keeps the given ratio in every layer, as in the paper's comparison of convergence, and
RedSync compresses layers from 1,024 elements. Bytes are means over all steps, the warm-up of dgc and redsync included.
Runs with other settings are refused a place in the same file. ``--others`` trains the compressors that are not one of
the papers' systems; differences of one seed have no interval, and stand without one. The table is printed at the end;
``--write`` also puts it into docs/workloads.md, and the table of a choice into docs/choose.md. ``--lab`` repeats the
runs of the first seed between network namespaces whose links have that rate, in bit/s, for the loss against the clock;
it needs root and a quiet machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from pathlib import Path

from convergence import measures
from records import DOCS, RESULTS, Row, by, command, complete, grid, keep, put, show, stored
from scipy.stats import t

from capture.workloads import WORKLOADS, RunConfig, RunResult, run
from capture.workloads.launch import RunFailedError
from capture.workloads.resume import result_so_far
from gradstats.compressors import COMPRESSORS, compressor_class
from gradstats.network.rates import parse_rate
from gradstats.primitives.ratio import RATIOS
from gradstats.trace.record import StepRecord

DENSE = "none"
SYSTEMS = (
    DENSE, "dense-bf16", "topk", "sidco-e", "sidco-gp", "sidco-p", "dgc", "redsync", "micro", "lags", "marsit",
)  # fmt: skip
OTHERS = tuple(n for n in COMPRESSORS if n not in (*SYSTEMS, "exact", "warm-exact"))
"""The others; ``exact`` and ``warm-exact`` select what ``topk`` does."""
ORDER = (*SYSTEMS, *(n for n in COMPRESSORS if n not in SYSTEMS))
"""Rows of the table of times."""
OPTIONS = {
    "lags": {"adaptive": False},
    "redsync": {"dense_below": 1024},
    "redsync-quantised": {"dense_below": 1024},
}
"""RedSync sends layers below 128 kB densely as published, which would be nearly all of a small model."""
TARGETS = {"a quarter": 0.25, "half": 0.5, "all": 1.0}
"""Shares of the dense run's steps; the losses that it then has are what other systems are timed to."""
SETTLED = 0.05
"""Share of the steps, at the end, that the training loss is averaged over."""
POINTS = 50
"""Number of points of every curve that a row holds; each is a mean over as many steps, or one diagnosed step."""
CHARACTER_ERRORS = (0.55, 0.3)
"""Rates of character errors that passes are counted to; SIDCo's target on AN4 is the first."""
CHOICES = {"resnet8-cifar16": "ResNet-8", "lstm-ptb": "LSTM", "gpt-pydoc": "GPT"}
"""Trainings that the page on choosing a compressor compares."""
MEASURES = {"accuracy": 100.0, "perplexity": 1.0, "word_error_rate": 100.0, "loss": 1.0}
"""What is compared, the first that a workload has, and the factor it is shown with."""


def settings(systems: Sequence[str], ratios: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Return every compressor with every ratio, or once with ratio 1 if it has none."""
    for system in systems:
        has_ratio = compressor_class(system).has_ratio
        yield from product([system], ratios if has_ratio else [1.0])


def shared(config: RunConfig) -> Row:
    """Return the settings that all runs of a table share."""
    optimizer = config.replace(compressor=DENSE).metadata()["optimizer"]
    sizes = {"steps": config.setting("steps"), "batch_size": config.setting("batch_size")}
    return {
        **sizes,
        "nproc": config.nproc,
        "hidden": config.setting("hidden"),
        "optimizer": optimizer,
    }


def curve(values: Sequence[float], points: int = POINTS) -> list[float]:
    """Return the means of as many parts of a series, of lengths as equal as can be, with five digits."""
    return [float(f"{statistics.fmean(values[a:b]):.5g}") for a, b in parts(len(values), points)]


def parts(count: int, points: int = POINTS) -> list[tuple[int, int]]:
    """Return where the parts of a series begin and end."""
    ends = [round(count * i / points) for i in range(points + 1)]
    return [(a, b) for a, b in pairwise(ends) if a < b]


def curves(result: RunResult) -> Row:
    """Return how a run went: the loss, k̂/k, the residual's norm, matching signs, and the largest δ of a layer."""
    records = [StepRecord(**r) for r in result.records]
    found = {
        "loss": curve(result.losses),
        "quality": curve([r.quality for r in records]),
        "build_up": curve([r.build_up for r in records]),
        "bytes": curve([r.bytes_sent for r in records]),
    }
    if result.diagnoses:
        for name in ("residual_norm", "matching_rate"):
            found[name] = [float(f"{d[name]:.5g}") for d in result.diagnoses]
        largest = [
            max((x for x in d["delta"] if x == x), default=math.nan) for d in result.diagnoses
        ]
        found["delta"] = [float(f"{x:.5g}") for x in largest]
        found["diagnosed"] = [d["step"] for d in result.diagnoses]
    return found


def one(config: RunConfig) -> Row:
    """Train once, and return the row that is stored."""
    row = {"compressor": config.compressor, "ratio": config.ratio, "seed": config.seed}
    row |= shared(config)
    try:
        result = run(config)
    except RunFailedError as error:  # a diverging system is a result
        if config.checkpoint is not None and str(config.checkpoint) in str(error):
            raise SystemExit(str(error)) from None  # a checkpoint that cannot be used is none
        return {**row, "problem": str(error)}
    return row | described(result)


def so_far(config: RunConfig) -> Row | None:
    """Return the row of a run that has a checkpoint, with the number of steps ``made``; None for one without."""
    assert config.checkpoint is not None
    found = result_so_far(config.checkpoint)
    if found is None:
        return None
    made, result = found
    for name, value in result.evaluations[-1].items() if result.evaluations else ():
        if name != "step":
            setattr(result, name, value)
    row = {"compressor": config.compressor, "ratio": config.ratio, "seed": config.seed}
    return {**row, **shared(config), "made": made, **described(result)}


def described(result: RunResult) -> Row:
    """Return the fields of a row that are those of its result."""
    tenth = max(1, len(result.losses) // 10)
    before, after = (
        statistics.fmean(result.losses[a:b]) for a, b in ((-2 * tenth, -tenth), (-tenth, None))
    )
    found = measures(result, last=max(1, round(SETTLED * len(result.losses))))
    found |= {"falling": 1 - after / before, "seconds": sum(result.seconds)}
    trials = {"evaluations": result.evaluations} if result.evaluations else {}
    return {**found, **trials, "curves": curves(result)}


def timed(config: RunConfig, rate: int) -> Row:
    """Train once over links of a rate, and return the row that is stored: the loss against the clock."""
    from capture.lab.cluster import shaped_network
    from capture.lab.run import train, train_without_exchange

    row = {"compressor": config.compressor, "ratio": config.ratio, "seed": config.seed}
    row |= shared(config)
    with shaped_network(config.nproc, rate) as network:
        alone = train_without_exchange(config, network)
        try:
            found, losses, seconds = train(config, network, alone.seconds)
        except RunFailedError as error:
            return {**row, "rate": rate, "problem": str(error)}
    clock = list(accumulate(seconds))
    elapsed = [round(clock[b - 1], 3) for _, b in parts(len(clock))]
    fields = ("seconds", "compute_alone", "select", "communicate", "bytes", "utilisation")
    row |= {"rate": rate, **{name: found[name] for name in fields}}
    return {**row, "curves": {"loss": curve(losses), "seconds": elapsed}}


def times(rows: list[Row], rate: int) -> str:
    """Return as Markdown how long each system took to the losses that dense training passed."""
    here = [row for row in rows if row["rate"] == rate and "problem" not in row]
    here.sort(key=lambda row: (ORDER.index(row["compressor"]), -row["ratio"]))
    dense = next(row["curves"] for row in here if row["compressor"] == DENSE)
    at = [max(1, round(share * len(dense["loss"]))) - 1 for share in TARGETS.values()]
    targets = [min(dense["loss"][: i + 1]) for i in at]
    heads = [f"s to {goal:.2f} ({share}):" for share, goal in zip(TARGETS, targets, strict=True)]
    lines = []
    for row in here:
        loss, seconds = row["curves"]["loss"], row["curves"]["seconds"]
        reached = [next((i for i, x in enumerate(loss) if x <= target), None) for target in targets]
        cells = [f"`{row['compressor']}`", "–" if row["ratio"] == 1 else f"{row['ratio']:g}"]
        cells += [f"{1e3 * row['seconds']:.0f}", f"{100 * row['utilisation']:.0f}"]
        cells += ["never" if i is None else f"{seconds[i]:.0f}" for i in reached]
        lines.append([*cells, f"{seconds[-1]:.0f}"])
    heads = ["compressor", "ratio:", "ms/step:", "computing %:", *heads, "s in all:"]
    return grid(" | ".join(heads), lines)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % interval from Student's t; infinite for one value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, float(half)


def told_apart(differences: Sequence[float]) -> float:
    """Return the sign of a mean difference, 0 where its 95 % interval holds 0."""
    mean, half = interval(differences)
    return math.copysign(abs(mean) > half, mean)


def speech(rows: list[Row]) -> str:
    """Return the error rates of transcripts as Markdown, and after how many passes SIDCo's target was reached."""
    lines = []
    for row in rows:
        cells = [f"`{row['compressor']}`", "–" if row["ratio"] == 1 else f"{row['ratio']:g}"]
        if "made" in row:
            cells[0] += f", {row['made']:,} of {row['steps']:,} steps"
        trials = row.get("evaluations", [])
        if "problem" in row or not trials:
            lines.append([*cells, "diverged", *["–"] * 4])
            continue
        cells += [f"{100 * row[f'{name}_error_rate']:.1f}" for name in ("word", "character")]
        for target in CHARACTER_ERRORS:
            passes = (
                i for i, each in enumerate(trials, 1) if each["character_error_rate"] <= target
            )
            cells.append(str(next(passes, "never")))
        quality = row["curves"]["quality"]
        first = quality[: max(1, round(len(quality) / len(trials)))]
        lines.append([*cells, f"{statistics.fmean(first):.2f}" if first else "–"])
    return grid(
        "compressor | ratio: | word errors %: | character errors %: | passes to 55 %: | to 30 %: | k̂/k, first pass:",
        lines,
    )


def measure_of(rows: list[Row]) -> tuple[str, float, str]:
    """Return what a workload's runs are compared by, the factor it is shown with, and its title."""
    done = [row for row in rows if "problem" not in row]
    name = next(m for m in MEASURES if any(not math.isnan(row[m]) for row in done))
    factor = MEASURES[name]
    return name, factor, name.replace("_", " ") + (" %" if factor == 100 else "")


def differences(rows: list[Row], system: str, ratio: float) -> list[float]:
    """Return how far a system's runs end from the dense runs of the same seeds, as they are shown."""
    name, factor, _ = measure_of(rows)
    done = [row for row in rows if "problem" not in row]
    dense = {row["seed"]: row[name] for row in done if row["compressor"] == DENSE}
    return [
        factor * (row[name] - dense[row["seed"]])
        for row in done
        if (row["compressor"], row["ratio"]) == (system, ratio) and row["seed"] in dense
    ]


def choice(runs: dict[str, list[Row]]) -> str:
    """Return a line for each of the papers' systems as Markdown: what it costs in several trainings, at three ratios.

    Parameters
    ----------
    runs : dict of str to list of dict
        Stored runs by workload.
    """
    titles = []
    for workload, rows in runs.items():
        titles.append(f"{CHOICES[workload]}, {rows[0]['optimizer']['name']}: {measure_of(rows)[2]}")
    lines = []
    first = next(iter(runs.values()))
    full = statistics.fmean(row["bytes"] for row in first if row["compressor"] == DENSE)
    for system in SYSTEMS[1:]:
        ratios = [ratio for _, ratio in settings([system], RATIOS)]
        cells = [
            " · ".join(_difference(rows, system, r) for r in ratios)
            if any(row["compressor"] == system for row in rows)
            else "–"
            for rows in runs.values()
        ]
        for field, form in (("bytes", ".2g"), ("quality", ".2f")):
            means = [
                statistics.fmean(
                    row[field] / (full if field == "bytes" else 1)
                    for row in first
                    if (row["compressor"], row["ratio"]) == (system, r)
                )
                for r in ratios
            ]
            shown = ["–" if math.isnan(mean) else format(mean, form) for mean in means]
            cells.append(" · ".join(shown))
        lines.append([f"`{system}`", *cells])
    return grid(" | ".join(["compressor", *titles, "bytes ÷ dense", "k̂/k"]), lines)


def _difference(rows: list[Row], system: str, ratio: float) -> str:
    """Return how far a system ends from dense training, with a star where its interval excludes 0."""
    found = differences(rows, system, ratio)
    star = "\\*" if told_apart(found) else ""
    return f"{interval(found)[0]:+.1f}{star}".replace("-", "−")


def fixed(value: float, form: str) -> str:
    """Return a number with fixed digits; one of a training that went astray with its power of ten."""
    return format(value, form if abs(value) < 1e5 else form[:-2] + "1e")


def table(rows: list[Row]) -> str:
    """Return the runs as Markdown: means over seeds, and paired differences to the dense runs of the same seeds.

    A difference of one seed has no interval; how far seeds differ in the other systems is said below the table.
    """
    name, factor, shown = measure_of(rows)
    dense = [row for row in rows if "problem" not in row and row["compressor"] == DENSE]
    lines = []
    every_difference: list[list[float]] = []
    for system, ratio in dict.fromkeys((row["compressor"], row["ratio"]) for row in rows):
        every = [row for row in rows if (row["compressor"], row["ratio"]) == (system, ratio)]
        mine = [row for row in every if "problem" not in row]
        cells = [f"`{system}`", "–" if ratio == 1 else f"{ratio:g}"]
        if not mine:
            lines.append([*cells, f"0 of {len(every)}", "diverged", *["–"] * 5])
            continue
        loss, value, quality, size, falling = (
            statistics.fmean(row[f] for row in mine)
            for f in ("loss", name, "quality", "bytes", "falling")
        )
        difference = "–"
        if system != DENSE and (paired := differences(rows, system, ratio)):
            every_difference.append(paired)
            mean, half = interval(every_difference[-1])
            difference = fixed(mean, "+.2f")
            if math.isfinite(half):
                difference += f" ± {half:.2f}" + (" *" if abs(mean) > half else "")
        cells += [str(len(mine)) + (f" of {len(every)}" if len(mine) < len(every) else "")]
        cells += [fixed(loss, ".3f"), fixed(factor * value, ".2f"), difference]
        cells += [
            "–" if math.isnan(quality) else f"{quality:.2f}",
            f"{size:,.0f}",
            f"{100 * falling:.1f} %",
        ]
        lines.append(cells)
    heads = f"compressor | ratio: | seeds: | loss: | {shown}: | less dense, 95 %: | k̂/k: | bytes/step: | still falling:"
    text = grid(heads, lines)
    if len(dense) > 1:
        spread = factor * statistics.stdev(row[name] for row in dense)
        text += f"\n\nStandard deviation of dense over its {len(dense)} seeds: {spread:.2f}. "
        text += "* the interval excludes 0."
    several = [values for values in every_difference if len(values) > 1]
    if 0 < len(several) < len(every_difference):
        freedom = sum(len(values) - 1 for values in several)
        squares = sum(statistics.variance(values) * (len(values) - 1) for values in several)
        pooled = math.sqrt(squares / freedom)
        text += (
            f" Pooled over systems of several seeds, a difference has a standard deviation of {pooled:.2f}: "
            f"of one seed, nothing below {t.ppf(0.975, freedom) * pooled:.1f} is told apart."
        )
    return text


def main() -> None:
    """Run what is not stored yet, and print the table."""
    parser = command(__doc__, "workloads.md")
    parser.add_argument(
        "workload", nargs="?", default="resnet8-cifar16", choices=WORKLOADS, metavar="WORKLOAD"
    )
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--ratios", type=float, nargs="*", default=list(RATIOS))
    systems = parser.add_mutually_exclusive_group()
    systems.add_argument("--only", nargs="*", default=SYSTEMS, choices=COMPRESSORS, metavar="NAME")
    systems.add_argument(
        "--others", dest="only", action="store_const", const=OTHERS, help=", ".join(OTHERS)
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--lr-warm-up", type=int)
    parser.add_argument("--momentum", type=float)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--lr-schedule", default="cosine")
    parser.add_argument("--checkpoints", type=Path, help="folder in which runs are kept that go on")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between them")
    parser.add_argument(
        "--so-far",
        action="store_true",
        help="store what runs have until their last checkpoint, and run nothing",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the stored runs")
    parser.add_argument(
        "--lab", type=parse_rate, metavar="RATE", help="time the first seed's runs at this rate"
    )
    options = parser.parse_args()
    if options.so_far and (options.checkpoints is None or options.lab is not None):
        parser.error("--so-far needs --checkpoints, and no --lab")
    common = {
        name: getattr(options, name)
        for name in (
            "workload", "data_dir", "nproc", "steps", "batch_size", "learning_rate", "lr_schedule", "lr_warm_up",
            "hidden", "vocab",
        )
    }  # fmt: skip
    base = RunConfig(**common)
    momentum = base.training().momentum if options.momentum is None else options.momentum
    moving = {"momentum": momentum, "nesterov": "dgc" if momentum else "none"}
    name = f"plateau-{options.workload}"
    path = options.results / f"{name}{'' if options.lab is None else '-lab'}.jsonl"
    wanted = shared(base.replace(**moving))
    for row in stored(path):
        if any(row.get(key) != value for key, value in wanted.items()):
            raise SystemExit(
                f"{path} has runs with other settings; move it away, or name another --results"
            )
    # seed by seed, so that what is there after an interruption can be compared
    runs = product(
        range(options.seeds if options.lab is None else 1), settings(options.only, options.ratios)
    )
    if any("made" in row for row in stored(path)):  # these go on
        keep(path, [row for row in stored(path) if "made" not in row])
    key = by("compressor", "ratio", "seed", "rate")
    cases = [(*system, seed, options.lab) for seed, system in runs]

    def train(system: str, ratio: float, seed: int, rate: int | None) -> Row | list[Row]:
        config = base.replace(
            compressor=system, ratio=ratio, seed=seed, **moving, options=OPTIONS.get(system, {}),
            label=f"{system} {ratio:g} seed {seed}",
        )  # fmt: skip
        if rate is not None:
            return timed(config, rate)
        every = max(1, base.setting("steps") // POINTS)
        if options.checkpoints is not None:
            folder = options.checkpoints / f"{name}-{system}-{ratio:g}-seed{seed}"
            config = config.replace(checkpoint=folder, checkpoint_every=options.checkpoint_every)
        config = config.replace(diagnose_every=0 if system == DENSE else every)
        if options.so_far:
            return list(filter(None, [so_far(config)]))
        return one(config)

    rows = complete(path, key, cases, train)
    text = table(rows) if options.lab is None else times(rows, options.lab)
    tables = {path.stem: text}
    if any(row.get("character_error_rate", math.nan) >= 0 for row in rows):
        tables[f"{path.stem}-speech"] = speech(rows)
    show(tables, options.write, "workloads.md")
    if options.write:
        choices = choice({w: stored(RESULTS / f"plateau-{w}.jsonl") for w in CHOICES})
        put(DOCS / "choose.md", "choice", choices)


if __name__ == "__main__":
    main()
