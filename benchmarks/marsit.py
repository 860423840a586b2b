"""Marsit: how often to average in full precision, and what ring and torus cost.

    .venv/bin/python benchmarks/marsit.py --data-dir DIR [--write]
    .venv/bin/python benchmarks/marsit.py --data-dir DIR --own [--write]
    .venv/bin/python benchmarks/marsit.py --times [--write]
    .venv/bin/python benchmarks/marsit.py --rounds [--write]

Trains as benchmarks/plateau.py does, with a full-precision round every K steps, K from 5 to never, from three seeds.
Each run is stored in docs/results/marsit.jsonl as soon as it ends, and is not repeated, so the program can be
interrupted. ``--own`` trains Marsit, signs and dense with the paper's rate for CIFAR-10, 0.03, and its momentum of the
optimizer; at a third and two thirds of the run Marsit averages in full precision and the rate falls to a tenth, for
all, as it does once more at eight ninths. It stores docs/results/marsit-own.jsonl. ``--times`` exchanges a gradient
between four processes over ring, torus and a dense all-reduce in turns instead. ``--rounds`` trains the paper's
AlexNet for CIFAR-10 in four processes on random inputs, by Marsit over ring and torus and by its baselines in turns,
and splits what a step takes (figure 5). These two want a quiet machine. The tables are printed at the end; ``--write``
also puts them into docs/systems.md.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from parts import on_random_inputs
from plateau import interval, one
from ranks import run_ranks
from records import RESULTS, Row, by, command, complete, dump, grid, processor, show, stored

from capture.workloads import WORKLOADS, RunConfig
from gradstats.compressors import Compressor, DenseCompressor, Marsit
from gradstats.compressors.signs import bits_per_element

FILE, TIMES = RESULTS / "marsit.jsonl", RESULTS / "marsit-times.json"
OWN = RESULTS / "marsit-own.jsonl"
OWN_SYSTEMS = ("none", "marsit", "signsgd", "ef-signsgd")
OWN_RATE, OWN_STEPS = 0.03, 500
RANKS, SEEDS = 4, 3
EVERY = (5, 10, 25, 50, 100, None)
BASELINES = ("none", "dense-bf16")
WORKLOAD, ROUNDS = "alexnet-cifar10", RESULTS / "marsit-rounds.json"
SPLIT = (
    *((system, "") for system in ("dense-bf16", "signsgd", "ef-signsgd", "cascading")),
    *(("marsit", topology) for topology in ("ring", "torus")),
)
"""Systems whose rounds are split, and the topologies that they can choose from. The mean of PyTorch's own all-reduce
has no parts to time."""
PARTS = ("compute", "select", "communicate")


def train(full_every: int | None, seed: int, data_dir: Path | None) -> Row:
    """Train once, and return the row of the table."""
    config = RunConfig(
        workload="resnet8-cifar16",
        data_dir=data_dir,
        nesterov="dgc",
        compressor="marsit",
        options={"full_every": full_every},
        seed=seed,
        label=f"K = {full_every or 'never'}, seed {seed}",
    )
    row = one(config)
    bits = bits_per_element(row["bytes"], config.info.parameters, ring=config.nproc)
    return {"full_every": full_every, "bits": bits, **row}


def train_own(system: str, seed: int, data_dir: Path | None, steps: int = OWN_STEPS) -> Row:
    """Train once as the paper does, and return the row of the table."""
    config = RunConfig(
        workload="resnet8-cifar16",
        data_dir=data_dir,
        compressor=system,
        seed=seed,
        learning_rate=OWN_RATE,
        lr_schedule="thirds",
        lr_warm_up=0,
        steps=steps,
        label=f"{system} at {OWN_RATE}, seed {seed}",
    )
    third = -(-steps // 3)
    return one(config.replace(options={"full_every": third} if system == "marsit" else {}))


def exchange(rank: int, world: int, numel: int, rounds: int) -> dict[str, list[float]]:
    """Average a gradient in each way in turn; return the seconds that each round of each took."""
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    ways: dict[str, Compressor] = {
        "dense": DenseCompressor(),
        "ring": Marsit(None),
        "torus": Marsit(None, topology="torus"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name, way in ways.items():
            corrected = gradient.clone()
            dist.barrier()
            started = time.perf_counter()
            way.reduce(corrected, None)
            if turn >= 2:  # the first two warm up
                seconds[name].append(time.perf_counter() - started)
    return seconds


def measure(rounds: int = 40) -> list[Row]:
    """Return the time of an exchange by ring and by torus, in multiples of the dense one beside it."""
    rows = []
    for numel in (270_000, 4_500_000):
        by_rank = run_ranks(RANKS, exchange, numel, rounds)
        slowest = {
            name: [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)]
            for name in by_rank[0]
        }
        for name in ("ring", "torus"):
            ratios = [a / b for a, b in zip(slowest[name], slowest["dense"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows.append(
                {"topology": name, "elements": numel, "low": low, "ratio": middle, "high": high}
            )
    return rows


def split(rank: int, world: int, steps: int, workload: str = WORKLOAD) -> list[list[list[float]]]:
    """Train by each system in turn; return the seconds of each part of each step."""
    trainings = [
        # weights stay as they are: cascading diverges in a step
        on_random_inputs(
            rank, world, workload, system, rate=0.0,
            compressor_options={"topology": topology} if topology else {},
        )
        for system, topology in SPLIT
    ]  # fmt: skip
    found: list[list[list[float]]] = [[] for _ in trainings]
    for turn in range(steps + 2):
        for training, own in zip(trainings, found, strict=True):
            dist.barrier()
            started = time.perf_counter()
            record = next(training)
            whole = time.perf_counter() - started
            parts = record.select_seconds, record.communicate_seconds
            if turn >= 2:  # the first makes the model, and DDP its buckets
                own.append([whole - sum(parts), *parts])
    return found


def rounds(steps: int = 10) -> list[Row]:
    """Return the seconds of each part of a step by system: the median over the steps of the mean over the ranks."""
    seconds = np.array(run_ranks(RANKS, split, steps, limit_s=1800))  # rank, system, step, part
    middle = np.median(seconds.mean(axis=0), axis=1).round(5).tolist()
    return [
        {
            "system": system,
            "topology": topology,
            **dict(zip(PARTS, parts, strict=True)),
            "processor": processor(),
        }
        for (system, topology), parts in zip(SPLIT, middle, strict=True)
    ]


def dense() -> list[Row]:
    """Return the runs that plateau.py has stored with the same settings, of dense training and of its 16-bit form."""
    info = WORKLOADS["resnet8-cifar16"]
    return [
        {
            "full_every": f"`{row['compressor']}`",
            "bits": bits_per_element(row["bytes"], info.parameters, ring=row["nproc"]),
            **row,
        }
        for row in stored(RESULTS / "plateau-resnet8-cifar16.jsonl")
        if row["compressor"] in BASELINES and row["seed"] < SEEDS
    ]


def table(rows: list[Row]) -> str:
    """Return loss, accuracy and bits by K, with 95 % intervals over the seeds."""
    lines = []
    for full_every in (*EVERY, *(f"`{name}`" for name in BASELINES)):
        own = [row for row in rows if row["full_every"] == full_every and "problem" not in row]
        if len(own) > 1:
            bits = statistics.fmean(row["bits"] for row in own)
            loss, half = interval([row["loss"] for row in own])
            right, around = interval([100 * row["accuracy"] for row in own])
            cells = f"{bits:.2f}", f"{loss:.2f} ± {half:.2f}", f"{right:.1f} ± {around:.1f}"
            lines.append([str(full_every or "never"), *cells])
    return grid("K | bits per element and hop: | training loss: | test accuracy %:", lines)


def own_table(rows: list[Row]) -> str:
    """Return loss and accuracy of each system at the paper's rate, with 95 % intervals over the seeds."""
    lines = []
    for system, steps in dict.fromkeys((r["compressor"], r["steps"]) for r in rows):
        own = [r for r in rows if (r["compressor"], r["steps"]) == (system, steps)]
        mine = [r for r in own if "problem" not in r]
        cells = [f"`{system}`", f"{steps:,}", str(len(mine))]
        for name, factor, digits in (("loss", 1, 2), ("accuracy", 100, 1)):
            mean, half = interval([factor * r[name] for r in mine]) if mine else (math.nan, 0.0)
            cell = f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")
            cells.append(cell if mine else "diverged")
        lines.append(cells)
    return grid("system | steps: | seeds: | training loss: | test accuracy %:", lines)


def times_table(rows: list[Row]) -> str:
    """Return what ring and torus take, in multiples of a dense all-reduce."""
    lines = []
    for r in rows:
        middle, low, high = (f"{r[name]:.2f}" for name in ("ratio", "low", "high"))
        lines.append([f"{r['elements']:,}", r["topology"], middle, f"{low} … {high}"])
    return grid("elements: | topology | ÷ dense all-reduce: | quartiles", lines)


def rounds_table(rows: list[Row]) -> str:
    """Return milliseconds of the parts of a step."""
    lines = (
        [f"`{r['system']}`", r["topology"] or "–", *(f"{1e3 * r[part]:,.0f}" for part in PARTS)]
        for r in rows
    )
    return grid("system | topology | compute ms: | compress ms: | communicate ms:", lines)


def main() -> None:
    """Run what is not stored yet, and print the tables."""
    parser = command(__doc__, "systems.md")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds 0 to N - 1 of --own")
    parser.add_argument("--steps", type=int, default=OWN_STEPS, help="steps of --own")
    parser.add_argument("--own", action="store_true", help="train at the paper's rate instead")
    parser.add_argument("--times", action="store_true", help="measure the topologies instead")
    parser.add_argument("--rounds", action="store_true", help="split rounds of AlexNet instead")
    options = parser.parse_args()
    if options.times:
        dump(TIMES, measure())
    elif options.rounds:
        dump(ROUNDS, rounds())
    elif options.own:
        n, key = options.steps, by("compressor", "seed", "steps")
        own = [(name, seed, n) for seed in range(options.seeds) for name in OWN_SYSTEMS]
        complete(OWN, key, own, lambda *case: train_own(*case[:2], options.data_dir, n))
    else:
        key, runs = by("full_every", "seed"), ((k, seed) for seed in range(SEEDS) for k in EVERY)
        complete(FILE, key, runs, lambda *case: train(*case, options.data_dir))
    tables = {"marsit": table([*stored(FILE), *dense()])}
    if OWN.exists():
        tables["marsit-own"] = own_table(stored(OWN))
    if TIMES.exists():
        tables["marsit-times"] = times_table(json.loads(TIMES.read_text()))
    if ROUNDS.exists():
        tables["marsit-rounds"] = rounds_table(json.loads(ROUNDS.read_text()))
    show(tables, options.write, "systems.md")


if __name__ == "__main__":
    main()
