"""Steps predicted by `gradstats plan`, compared with measured ones.

    sudo .venv/bin/python benchmarks/validation.py --data-dir DIR [--write]

For each number of workers the lab is measured once at one rate, as `gradstats bench-network --measure` does, and so
is the time of computing. Then real training runs at other rates, to which nothing was fitted. Every run is stored in
docs/results/validation* as soon as it ends, and is not repeated; predictions are made again each time. The interval of
a system's steps has the error that the other systems had. ``--write`` puts the table into docs/network.md.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev, variance
from unittest import mock

from records import (
    RESULTS,
    Row,
    by,
    command,
    complete,
    dump,
    grid,
    keep,
    missing,
    show,
    store,
    stored,
)

from capture.lab.cluster import shaped_network
from capture.lab.run import measure_network, train, train_without_exchange
from capture.workloads import RunConfig, run
from gradstats.network import Network, plan, prediction
from gradstats.network.rates import format_rate, parse_rate
from gradstats.tables import render

WORKLOAD = {"workload": "lstm-ptb", "hidden": 400, "vocab": 10_000, "batch_size": 8}
SYSTEMS = ("none", "dense-bf16", "topk", "sidco-e", "redsync-quantised", "micro", "signsgd", "lags")
ABOVE_K = "redsync-quantised"
"""What sends several times k in the first steps: its output layer's threshold is searched every fifth step alone."""
FITTED_AT = "200mbit"
RATES = ("50mbit", "100mbit", "500mbit")
CURVE = [round(10 ** (7 + i / 6)) for i in range(15)]
"""Rates of the figure, bit/s: 10 Mbit/s to 2 Gbit/s."""
STEPS = 15
HEADS = "workers: | Mbit/s: | system | measured ms: | predicted ms: | 95 % interval: | error:"


def configuration(given: argparse.Namespace, nproc: int, **settings: object) -> RunConfig:
    """Return the settings of a run."""
    return RunConfig(
        **{**WORKLOAD, "steps": STEPS, "data_dir": given.data_dir, "nproc": nproc, **settings}
    )


def measure(options: argparse.Namespace, nproc: int) -> tuple[Network, Row]:
    """Return the network of some workers and their time of computing; measure what is not stored."""
    path = RESULTS / f"validation-{nproc}.json"
    computing = RESULTS / "validation-compute.jsonl"
    known = {row["nproc"]: row for row in stored(computing)}
    if not path.exists() or nproc not in known:
        config = configuration(options, nproc)
        with shaped_network(nproc, parse_rate(FITTED_AT)) as network:
            alone = train_without_exchange(config.replace(steps=40), network)
            select = [name for name in SYSTEMS if name != "none"]
            measure_network(network, alone.numel, config.ratio, select, "network").save(path)
        store(computing, {"nproc": nproc, "seconds": alone.seconds, "numel": alone.numel})
        known = {row["nproc"]: row for row in stored(computing)}
    return Network.load(path), known[nproc]


def measured_steps(options: argparse.Namespace, nproc: int, compute: float) -> list[Row]:
    """Return the steps of every rate and compressor among some workers; run those that are not stored."""
    path = RESULTS / "validation.jsonl"
    key = by("nproc", "rate", "compressor")
    for rate in map(parse_rate, RATES):
        if left := missing(path, key, product([nproc], [rate / 1e6], SYSTEMS)):
            with shaped_network(nproc, rate) as network:

                def one(nproc: int, rate: float, name: str) -> Row:
                    label = f"{nproc} workers, {format_rate(rate)}, {name}"
                    settings = {"compressor": name, "label": label}
                    return train(configuration(options, nproc, **settings), network, compute)[0]

                complete(path, key, left, one)
    return [row for row in stored(path) if row["nproc"] == nproc]


def captured(options: argparse.Namespace, folder: Path) -> Path:
    """Capture the workload over loopback, as a user would, and return the trace."""
    path = folder / "validation.zarr"
    run(configuration(options, 2, compressor="topk", steps=7, out=path, at=(4, 6), label="trace"))
    return path


def model_error(errors: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return what to expect of ln(measured ÷ predicted) of a further system: mean and standard deviation.

    Steps of a system err alike. So the systems are the sample, and a step of another one differs as they do among
    themselves, as their mean may be off, and as the steps of one differ.
    """
    means = [fmean(of_system) for of_system in errors.values()]
    within = fmean(variance(of_system) for of_system in errors.values())
    steps = fmean(map(len, errors.values()))
    between = max(0.0, variance(means) - within / steps)
    return fmean(means), math.sqrt(between * (1 + 1 / len(means)) + within)


def independent(errors: Mapping[str, Sequence[float]]) -> float:
    """Return how many independent steps say as much as these, which err alike within a system."""
    within = fmean(variance(of_system) for of_system in errors.values())
    steps = fmean(map(len, errors.values()))
    between = max(0.0, variance([fmean(e) for e in errors.values()]) - within / steps)
    return steps * len(errors) / (1 + (steps - 1) * between / (between + within))


def by_system(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return ln(measured ÷ predicted) of every step, by system."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["compressor"], []).append(
            math.log(row["measured"] / row["predicted"])
        )
    return errors


def without_itself(
    rows: Sequence[Row], trace: Path, found: Mapping[int, tuple[Network, Row]]
) -> list[Row]:
    """Return rows whose intervals have the error that the other systems had."""
    errors, narrow = by_system(rows), []
    for name in SYSTEMS:
        others = {n: e for n, e in errors.items() if n != name}
        late, error = model_error(others)
        with mock.patch.multiple(prediction, LATE=late, ERROR=error, SYSTEMS=len(others)):
            for nproc, (network, computing) in found.items():
                plans = predicted(trace, network, computing, list(map(parse_rate, RATES)), [name])
                ends = {(r["rate"], r["compressor"]): (r["low"], r["high"]) for r in plans}
                for row in rows:
                    if (row["workers"], row["compressor"]) == (nproc, name):
                        low, high = ends[row["rate"], name]
                        narrow.append(row | {"low": low, "high": high})
    place = {(r["workers"], r["rate"], r["compressor"]): i for i, r in enumerate(rows)}
    return sorted(narrow, key=lambda r: place[r["workers"], r["rate"], r["compressor"]])


def predicted(
    trace: Path,
    network: Network,
    computing: Row,
    rates: Sequence[int],
    names: Sequence[str] = SYSTEMS,
) -> list[Row]:
    """Return the plan of some workers at some rates."""
    systems = [name for name in names if name != "none"] or ["topk"]
    workers = [computing["nproc"]]
    return plan(
        trace, network, computing["seconds"], workers, compressors=systems, rates=list(rates)
    )


def compare(options: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Return rows of predicted and measured steps, and the points of the figure."""
    rows, points = [], []
    with tempfile.TemporaryDirectory() as folder:
        found = {nproc: measure(options, nproc) for nproc in options.workers}
        steps = {n: measured_steps(options, n, c["seconds"]) for n, (_, c) in found.items()}
        trace = captured(options, Path(folder))
        for nproc, (network, computing) in found.items():
            plans = predicted(trace, network, computing, [parse_rate(rate) for rate in RATES])
            by_run = {(r["rate"], r["compressor"]): r for r in plans}
            rows += [
                compared(step, by_run[step["rate"], step["compressor"]]) for step in steps[nproc]
            ]
            for r in predicted(trace, network, computing, CURVE):
                kept = ("compressor", "workers", "rate", "ratio", "seconds", "speedup")
                points.append({k: r[k] for k in (*kept, "speedup_low", "speedup_high")})
            for step in steps[nproc]:
                ratio = {r["compressor"]: r["ratio"] for r in plans}[step["compressor"]]
                kept = ("compressor", "rate", "seconds")
                points.append({**{k: step[k] for k in kept}, "ratio": ratio, "workers": nproc})
        return without_itself(rows, trace, found), points


def compared(step: Row, planned: Row) -> Row:
    """Return one row of the comparison; its parts are pairs of measured and predicted seconds."""
    exchanged = planned["pack"] + planned["latency"] + planned["transfer"]
    return {
        "workers": step["nproc"],
        "rate": step["rate"],
        "compressor": step["compressor"],
        "measured": step["seconds"],
        "predicted": planned["seconds"],
        "low": planned["low"],
        "high": planned["high"],
        "error": planned["seconds"] / step["seconds"] - 1,
        "select": (step["select"], planned["select"]),
        "communicate": (step["communicate"], exchanged),
        "memory": (
            step["seconds"] - step["compute"] - step["select"] - step["communicate"],
            planned["memory"],
        ),
    }


def summary(rows: list[Row]) -> str:
    """Return how far the predictions are off, in words."""
    errors = [abs(row["error"]) for row in rows]
    spread = stdev(math.log1p(row["error"]) for row in rows)
    inside = sum(row["low"] <= row["measured"] <= row["high"] for row in rows)
    return (
        f"{len(rows)} configurations, median error {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %, "
        f"standard deviation of the logarithm {100 * spread:.1f} %; {inside} of the measured steps lie within the "
        "interval of a model whose error was estimated without their system."
    )


def table(rows: list[Row]) -> str:
    """Return the comparison as Markdown."""
    whole = [row for row in rows if row["compressor"] != ABOVE_K]
    lines = []
    for r in rows:
        ends = ("measured", "predicted", "low", "high")
        took, predicted, low, high = (f"{1e3 * r[name]:,.0f}" for name in ends)
        cells = [str(r["workers"]), f"{r['rate']:g}", f"`{r['compressor']}`", took, predicted]
        lines.append([*cells, f"{low} to {high}", f"{100 * r['error']:+.1f} %"])
    without = (
        f"Without `{ABOVE_K}`, which sends more than the k that the plan assumes: {summary(whole)}"
    )
    return f"{summary(rows)}\n\n{without}\n\n{grid(HEADS, lines)}"


def main() -> None:
    """Measure what is not stored yet, predict, and compare."""
    parser = command(__doc__, "network.md")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parts", action="store_true", help="show measured and predicted parts")
    options = parser.parse_args()
    rows, points = compare(options)
    if options.parts:
        parts = [
            {
                **{k: r[k] for k in ("workers", "rate", "compressor", "measured", "predicted")},
                **{
                    f"{name}{end}": r[name][i]
                    for name in ("select", "communicate", "memory")
                    for i, end in enumerate(("", "^"))
                },
            }
            for r in rows
        ]
        print(render([{k: math.nan if v is None else v for k, v in p.items()} for p in parts]))
    show({"validation": table(rows)}, options.write, "network.md")
    late, error = model_error(by_system(rows))
    print(
        f"late {late:.3f}, error {error:.3f}, as good as {independent(by_system(rows)):.0f} steps"
    )
    if options.write:
        kept = ("workers", "rate", "compressor", "measured", "predicted", "low", "high")
        left_out = [{name: row[name] for name in kept} for row in rows]
        keep(RESULTS / "validation-left-out.jsonl", left_out)
        dump(RESULTS / "speedup.json", points)


if __name__ == "__main__":
    main()
