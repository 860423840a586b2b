"""The papers' inequalities, both sides measured in runs.

    python benchmarks/theory.py [STUDY ...] [--write]

Every study is a list of cases; what a case gave is stored in docs/results/theory.jsonl as soon as it ends, and no case
is repeated, so the program can be interrupted. Gradients are those of data/ and of small trainings in real processes,
all seeded; nothing depends on the clock. The tables are printed at the end; ``--write`` also puts them into
docs/theory.md. All cases take about half an hour on two cores.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bounds import (
    cascading_bound,
    compensation_bound,
    convergence_bound,
    rate_iterations,
    residual_bound,
    within_tolerance,
)
from numpy.typing import NDArray
from ranks import run_ranks
from rates import Regression, of_layers, of_one_bit
from records import RESULTS, ROOT, Row, by, command, complete, grid, show

import gradstats
from capture.workloads import RunConfig, run
from capture.workloads.launch import RunFailedError
from gradstats.compressors import make_compressor, make_selector
from gradstats.compressors.contraction import contraction, random_ratio
from gradstats.primitives import Selection
from gradstats.primitives.ratio import RATIOS, target_count
from gradstats.statistics.compressibility import CONTROLS
from gradstats.thresholds import ESTIMATORS

PATH = RESULTS / "theory.jsonl"
TRACES = {"gradient": "resnet20.zarr", "corrected": "resnet20-ef.zarr"}
FIGURE_7 = 100_000
"""Last rank of SIDCo's figure 7."""
SIDCO = ("sidco-e", "sidco-gp", "sidco-p")

Case = tuple[str, Callable[[], list[Row]]]
"""Name of a case, and what gives its rows."""


def spread(selection: Selection, numel: int) -> torch.Tensor:
    """Return a selection as a dense vector."""
    vector = torch.zeros(numel)
    vector[selection.indices] = selection.values
    return vector


def captured(kind: str) -> Iterator[torch.Tensor]:
    """Read the shipped gradients of a kind, step by step."""
    trace = gradstats.open_trace(ROOT / "data" / TRACES[kind])
    for step in trace.steps():
        yield torch.from_numpy(trace.read(step, kind=kind))


# The k-contraction, eq. 42 of SIDCo


def contract(kind: str, ratio: float, name: str) -> list[Row]:
    """Compress every shipped gradient as it would be compressed in training: the selector sees each 10 times."""
    selector = make_selector(name, ratio)
    found = []
    for g in captured(kind):
        for _ in range(10):
            found.append(contraction(g, spread(selector.select(g), g.numel()), ratio))
    return [
        {
            "name": name,
            "kind": kind,
            "ratio": ratio,
            "cases": len(found),
            "holds": sum(c.holds for c in found),
            "holds_measured": sum(c.holds_measured for c in found),
            "kept": statistics.fmean(c.kept for c in found) / ratio,
            "left": statistics.fmean(c.left / c.measured_bound for c in found),
        }
    ]


# The rate of convergence, eq. 13 and 43 of SIDCo


@cache
def converge(name: str, ratio: float, iterations: int, seed: int) -> list[Row]:
    """Train a softmax regression with error feedback; its smoothness is known, and its loss at least 0."""
    task = Regression()
    memory = torch.zeros(task.weights.numel(), dtype=task.weights.dtype)
    selector = make_selector(name, ratio)
    generator = torch.Generator().manual_seed(seed)
    rate = 1 / math.sqrt(iterations + 1)
    least, second_moment, kept, left = math.inf, 0.0, [], []
    for i in range(iterations + 1):
        if i % 10 == 0:
            least = min(least, task.moments()[0])
        g = task.drawn(generator)
        second_moment = max(second_moment, float(g.square().sum()))
        corrected = (rate * g + memory).float()
        sent = spread(selector.select(corrected), corrected.numel())
        found = contraction(corrected, sent, ratio)
        kept.append(found.kept)
        left.append(found.left)
        memory = (corrected - sent).double()
        task.weights -= sent.double().view_as(task.weights)
    share = statistics.fmean(kept)
    bound = partial(convergence_bound, math.log(10), task.smoothness, second_moment)
    return [
        {
            "name": name,
            "ratio": ratio,
            "iterations": iterations,
            "seed": seed,
            "numel": memory.numel(),
            "kept": share / ratio,
            "contraction": 1 - max(left),
            "mean_contraction": 1 - statistics.fmean(left),
            "least": least,
            "bound": bound(ratio, iterations),
            "bound_kept": bound(share, iterations),
            "bound_contraction": bound(max(1 - max(left), 1e-12), iterations),
            "iterations_needed": rate_iterations(share) / rate_iterations(ratio),
        }
    ]


# The tolerance of the number kept, eq. 12, 46 and 47 of SIDCo


def tolerate(name: str, options: dict[str, Any], feedback: bool, ratio: float) -> list[Row]:
    """Train ResNet-20 on digits in two processes and look at k̂ of every step."""
    config = RunConfig(
        workload="resnet20-digits", nproc=2, steps=150, batch_size=16, compressor=name, ratio=ratio,
        options=options, error_feedback=feedback, evaluate=False,
    )  # fmt: skip
    records = run(config).records[50:]
    kept, target = [r["selected"] for r in records], records[0]["target"]
    return [
        {
            "name": name,
            "rule": options.get("stages", ""),
            "feedback": feedback,
            "ratio": ratio,
            "steps": len(kept),
            "kept": statistics.fmean(kept) / target,
            "low": float(np.quantile(kept, 0.05)) / target,
            "high": float(np.quantile(kept, 0.95)) / target,
            "within": within_tolerance(kept, target),
            "within_5": within_tolerance(kept, target, window=5),
            "iterations_needed": 1 / (statistics.fmean(kept) / target) ** 2,
        }
    ]


# Lemma 1, corollary 1 and assumption 1 of LAGS-SGD


def layerwise(nproc: int, ratio: float, steps: int) -> list[Row]:
    """Train with the layer-wise top-k and capture every gradient of every rank; look at both sides afterwards."""
    with tempfile.TemporaryDirectory(prefix="gradstats-") as folder:
        config = RunConfig(
            workload="resnet20-digits", nproc=nproc, steps=steps, batch_size=64 // nproc,
            compressor="lags", ratio=ratio, options={"adaptive": False}, lr_schedule="constant",
            out=Path(folder, "run.zarr"), every=1, evaluate=False,
        )  # fmt: skip
        run(config)
        trace = gradstats.open_trace(config.out or "")
        layers = [
            (layer.name, slice(layer.offset, layer.offset + layer.numel)) for layer in trace.layers
        ]
        generator = torch.Generator().manual_seed(0)
        least = min(target_count(ratio, s.stop - s.start) / (s.stop - s.start) for _, s in layers)
        rows: list[Row] = []
        for step in trace.steps():
            own = [torch.from_numpy(trace.read(step, p, "gradient")) for p in range(nproc)]
            vectors = [torch.from_numpy(trace.read(step, p, "corrected")) for p in range(nproc)]
            sent = torch.zeros(trace.numel)
            for x, (_, s) in product(vectors, layers):
                selection = make_selector("topk", ratio).select(x[s])
                sent[s] += spread(selection, s.stop - s.start)
            total = torch.stack(vectors).sum(0)
            ratios = {"expected": [], "drawn": []}
            for _, s in layers:
                count = target_count(ratio, s.stop - s.start)
                ratios["expected"].append(random_ratio(total[s], sent[s], count))
                ratios["drawn"].append(random_ratio(total[s], sent[s], count, generator))
            mean = torch.stack(own).double().mean(0)
            behind = torch.stack(vectors).double().mean(0) - mean
            rows.append(
                {
                    "step": step,
                    "nproc": nproc,
                    "ratio": ratio,
                    "c_max": 1 / least,
                    "left": contraction(total, sent, least).left,
                    "layers": len(layers),
                    "above_expected": sum(d > 1 for d in ratios["expected"]),
                    "above_drawn": sum(d > 1 for d in ratios["drawn"]),
                    "median_expected": statistics.median(ratios["expected"]),
                    "median_drawn": statistics.median(ratios["drawn"]),
                    "second_moment": float(mean.square().sum()),
                    "distance": float((config.initial_learning_rate * behind).square().sum()),
                    "learning_rate": config.initial_learning_rate,
                }
            )
    return rows


# LAGS-SGD against top-k of the whole gradient, at the same ratio


def equal(name: str, options: dict[str, Any], seed: int) -> list[Row]:
    """Train ResNet-20 on digits in two processes, layer by layer or as a whole, with 0.1 % of the elements."""
    config = RunConfig(
        workload="resnet20-digits", nproc=2, steps=200, compressor=name, ratio=0.001,
        options=options, seed=seed, evaluate=False,
    )  # fmt: skip
    result = run(config)
    sent = [r["selected"] / r["numel"] for r in result.records] or [1.0]
    return [
        {
            "name": name,
            "seed": seed,
            "share": statistics.fmean(sent),
            "loss": statistics.fmean(result.losses[-25:]),
        }
    ]


# Matching signs in training, figure 1b of Marsit


def match(name: str, options: dict[str, Any], steps: int = 40) -> list[Row]:
    """Train in three processes, as the figure does, and compare every update with the dense mean."""
    with tempfile.TemporaryDirectory(prefix="gradstats-") as folder:
        config = RunConfig(
            workload="resnet20-digits", nproc=3, steps=steps, batch_size=20, compressor=name,
            options=options, store="sketches", ranks=(0,), every=1, diagnose_every=1,
            out=Path(folder, "run.zarr"), evaluate=False,
        )  # fmt: skip
        problem = ""
        try:
            run(config)
        except RunFailedError as error:  # a diverging system is a result
            problem = str(error).partition("\n")[0]
        records = gradstats.compression(gradstats.open_trace(config.out or ""))
    rates = [r["matching_rate"] for r in records]
    return [
        {
            "name": name,
            "form": " ".join(f"{k}={v}" for k, v in options.items()),
            "nproc": 3,
            "compared": len(rates),
            "matching_rate": statistics.fmean(rates),
            "low": min(rates),
            "high": max(rates),
            "problem": problem,
        }
    ]


# The compensation, eq. 7 of Marsit


def compensate(nproc: int, every: int, steps: int) -> list[Row]:
    """Train with Marsit and capture every gradient of every rank; look at the mean compensation afterwards."""
    with tempfile.TemporaryDirectory(prefix="gradstats-") as folder:
        config = RunConfig(
            workload="resnet20-digits", nproc=nproc, steps=steps, batch_size=20, compressor="marsit",
            options={"full_every": every}, lr_schedule="constant", out=Path(folder, "run.zarr"),
            every=1, evaluate=False,
        )  # fmt: skip
        run(config)
        trace = gradstats.open_trace(config.out or "")
        means = {
            kind: [
                np.mean([trace.read(step, p, kind) for p in range(nproc)], axis=0, dtype=float)
                for step in trace.steps()
            ]
            for kind in ("gradient", "corrected")
        }
    behind = [c - g for g, c in zip(means["gradient"], means["corrected"], strict=True)]
    rows: list[Row] = []
    gradients: list[float] = []
    updates: list[float] = []
    for step, (g, c) in enumerate(zip(means["gradient"], behind, strict=True)):
        rows.append(
            {
                "step": step,
                "nproc": nproc,
                "every": every,
                "compensation": float(c @ c),
                "bound": compensation_bound(gradients, updates, every),
            }
        )
        if step % every == 0:  # full precision: what was to be compensated is gone
            gradients, updates = [], []
        elif step + 1 < len(behind):
            update = c + g - behind[step + 1]
            gradients.append(float(g @ g))
            updates.append(float(update @ update))
    return rows


# Elias coding of the baselines, section 5 of Marsit


def votes(nproc: int, steps: int) -> list[Row]:
    """Train densely, capture every rank's gradient, and code the sums of signs that a ring would pass on."""
    with tempfile.TemporaryDirectory(prefix="gradstats-") as folder:
        config = RunConfig(
            workload="resnet20-digits", nproc=nproc, steps=steps, batch_size=20, out=Path(folder, "run.zarr"),
            every=1, evaluate=False,
        )  # fmt: skip
        run(config)
        trace = gradstats.open_trace(config.out or "")
        sums = {
            step: np.cumsum([trace.read(step, p, "gradient") >= 0 for p in range(nproc)], axis=0)
            for step in trace.steps()
        }
    rows: list[Row] = []
    for step, each in sums.items():
        # what a rank passes on has one sign more in it than what it got
        for summed, votes_for in enumerate(each, 1):
            counts = np.bincount(votes_for, minlength=summed + 1)
            share = counts[counts > 0] / votes_for.size
            # the nearest to a tie gets the shortest code
            place = 2 * np.abs(np.arange(summed + 1) - summed / 2) + (
                np.arange(summed + 1) > summed / 2
            )
            rank = np.argsort(np.argsort(place, kind="stable")) + 1
            rows.append(
                {
                    "step": step,
                    "summed": summed,
                    "fixed": math.ceil(math.log2(summed + 1)),
                    "elias": float(counts @ elias_gamma(rank)) / votes_for.size,
                    "entropy": float(-share @ np.log2(share)),
                }
            )
    return rows


def elias_gamma(number: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bits of the Elias γ code of numbers from 1 on (Elias 1975): 2⌊log₂ n⌋ + 1."""
    return 2 * np.floor(np.log2(number)).astype(np.int64) + 1


# The bound on cascading compression, theorems 1 and 2 of Marsit's appendix


def ring_error(rank: int, world: int, name: str, numel: int, draws: int) -> tuple[float, float]:
    """Return the mean squared error of a compressed mean, and Σ over the ring's parts of the largest squared norm."""
    if numel:
        drawn = torch.randn(world, numel, generator=torch.Generator().manual_seed(numel))
    else:  # gradients of a training; they only have to differ
        drawn = torch.stack(list(captured("gradient"))[:world])
    vectors = drawn / drawn.norm(dim=1, keepdim=True)
    exact = vectors.double().mean(0)
    parts = sum(
        max(float(v.square().sum()) for v in part.unbind())
        for part in vectors.double().tensor_split(world, dim=1)
    )
    errors = []
    for seed in range(draws):
        compressor = make_compressor(name, 1.0, seed=seed)
        assert compressor is not None
        reduced = compressor.reduce(vectors[rank].clone(), None)
        assert reduced.mean is not None
        errors.append(float((reduced.mean.double() - exact).square().sum()))
    return statistics.fmean(errors), parts


def cascade(world: int, numel: int, draws: int) -> list[Row]:
    """Compress vectors of norm 1 hop by hop, and at once, and compare the squared errors with their bounds."""
    error, parts = run_ranks(world, ring_error, "cascading", numel, draws)[0]
    central, _ = run_ranks(world, ring_error, "ssdm", numel, draws)[0]
    size = numel or next(captured("gradient")).numel()
    return [
        {
            "nproc": world,
            "numel": size,
            "captured": not numel,
            "draws": draws,
            "error": error,
            "bound": cascading_bound(size, world, 1.0),
            "bound_parts": cascading_bound(size, world, math.sqrt(parts), world),
            "central": central,
            "bound_central": float(size),
        }
    ]


# The window of figure 7 of SIDCo


def slope(ranks: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Return how fast values fall with the rank, by the least-squares line through both logarithms."""
    return -float(np.polyfit(ranks, np.log(values[: ranks.size]), 1)[0])


def decay(kind: str, trace: str) -> list[Row]:
    """Fit a line to the logarithms of the largest 10⁵ magnitudes, as figure 7 does, and of controls beside them."""
    opened = gradstats.open_trace(ROOT / "data" / trace)
    gradients = {str(step): opened.read(step, kind=kind) for step in opened.steps()}
    if not trace.endswith("ef.zarr"):
        gradients |= {
            name: law(np.arange(opened.numel, 0, -1) / (opened.numel + 1))
            for name, law in CONTROLS.items()
        }
    ranks = np.log(np.arange(1, FIGURE_7 + 1))
    rows = []
    for name, g in gradients.items():
        magnitudes = np.sort(np.abs(np.asarray(g, float)))[::-1]
        left = np.cumsum(magnitudes[:0:-1] ** 2)[
            ::-1
        ]  # Σ over the ranks after the first, second, …
        ours, theirs = (gradstats.compressibility(g, window=w) for w in (None, (1, FIGURE_7)))
        rows.append(
            {
                "trace": trace,
                "kind": kind,
                "of": name,
                "line": slope(ranks, magnitudes),
                "ends": slope(ranks[[0, -1]], magnitudes[[0, FIGURE_7 - 1]]),
                "sigma_line": slope(ranks, np.sqrt(left)),
                "sigma": theirs.sigma_p,
                "p": ours.p,
                "last": ours.window[1],
                "sigma_ours": ours.sigma_p,
            }
        )
    return rows


def studies() -> dict[str, list[Case]]:
    """Return all cases, by study."""
    return {
        "decay": [
            (f"{trace} {kind}", partial(decay, kind, trace))
            for kind, trace in (
                ("gradient", "resnet20.zarr"),
                ("gradient", "resnet20-ef.zarr"),
                ("corrected", "resnet20-ef.zarr"),
            )
        ],
        "contraction": [
            (f"{kind} {ratio:g} {name}", partial(contract, kind, ratio, name))
            for kind, ratio, name in product(TRACES, RATIOS, ESTIMATORS)
        ],
        "convergence": [
            (f"{name} {ratio:g} {i} {seed}", partial(converge, name, ratio, i, seed))
            for name, ratio, i, seed in product(
                ("topk", *SIDCO, "dgc", "gaussiank"), (0.1, 0.01), (100, 1000), range(2)
            )
        ],
        "tolerance": [
            (f"{name} {rule} {feedback}", partial(tolerate, name, options, feedback, 0.001))
            for name, rule, options, feedback in [
                *(
                    (name, rule, {"stages": rule}, feedback)
                    for name, rule, feedback in product(
                        SIDCO, ("corrected", "paper"), (True, False)
                    )
                ),
                *(
                    (name, "", {}, True)
                    for name in ("threshold:dgc", "gaussiank", "threshold:redsync")
                ),
            ]
        ],
        "layers": [("4 ranks", partial(layerwise, 4, 0.001, 60))],
        "layered rate": [
            (f"{n} ranks, {ratio:g}, {kind}, {t}", partial(of_layers, n, ratio, kind, t))
            for n, ratio, kind, t in (
                *product((2,), (0.1, 0.01), ("constant", "falling"), (100, 1000)),
                (4, 0.01, "constant", 1000),
            )
        ],
        "one-bit rate": [
            (f"{n} ranks, K = {k}, {t}", partial(of_one_bit, n, k, t))
            for n, k, t in (
                *product((2,), (1, 5, 20, 50), (1000,)),
                (4, 5, 1000),
                (2, 5, 10_000),
                (2, 50, 10_000),
            )
        ],
        "equal": [
            (f"{name} {seed}", partial(equal, name, options, seed))
            for (name, options), seed in product(
                (("none", {}), ("topk", {}), ("lags", {"adaptive": False})), range(3)
            )
        ],
        "signs": [
            (
                " ".join([name, *(f"{k}={v}" for k, v in options.items())]),
                partial(match, name, options),
            )
            for name, options in [
                ("marsit", {}),
                ("marsit", {"full_every": None}),
                ("signsgd", {}),
                ("ef-signsgd", {}),
                ("ssdm", {}),
                ("cascading", {}),
                ("cascading", {"stochastic": False}),
            ]
        ],
        "compensation": [("3 ranks", partial(compensate, 3, 10, 31))],
        "votes": [("8 ranks", partial(votes, 8, 20))],
        "cascading": [
            (f"{world} ranks, {numel}", partial(cascade, world, numel, draws))
            for world, (numel, draws) in product((1, 2, 3, 4), ((100, 100), (10_000, 20), (0, 2)))
        ],
    }


# The tables


def table(head: str, lines: list[list[str]]) -> str:
    """Return rows of cells as Markdown; all columns but the first are numbers."""
    first, *numbers = head.split(" | ")
    return grid(" | ".join([first, *(f"{each}:" for each in numbers)]), lines)


def grouped(rows: list[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return rows by the values of some fields, in their order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[f] for f in fields), []).append(row)
    return groups


def mean(rows: list[Row], field: str) -> float:
    """Return the mean of a field."""
    return statistics.fmean(row[field] for row in rows)


def number(value: float) -> str:
    """Return a number with three digits, and a power of ten where it is large."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    superscript = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa}·10{superscript}" if value >= 1e3 else f"{value:.3g}"


def decay_table(rows: list[Row]) -> str:
    """Return the exponents on both windows."""
    lines = []
    for row in rows:
        control = not row["of"].isdigit()
        feedback = "with" if "-ef" in row["trace"] else "without"
        what = f"{row['of']} noise" if control else f"{row['kind']}, {feedback}, step {row['of']}"
        cells = (row[n] for n in ("line", "ends", "sigma_line", "sigma", "p", "sigma_ours"))
        lines.append([what, *(f"{cell:.2f}" for cell in cells)])
    lines.sort(key=lambda cells: "noise" in cells[0])
    last = rows[0]["last"]
    theirs = "p, line | p, ends | σ_k, line | σ_k, ends"
    return table(f"of | {theirs} | p, j ≤ {last:,} | σ_k, k ≤ {last:,}", lines)


def contraction_table(rows: list[Row]) -> str:
    """Return what is left of the bound, and how often it is broken."""
    lines = []
    for (name,), own in grouped(rows, "name").items():
        left = {(row["kind"], row["ratio"]): f"{row['left']:.3f}" for row in own}
        cases = sum(row["cases"] for row in own)
        broken = [cases - sum(row[f] for row in own) for f in ("holds", "holds_measured")]
        lines.append([f"`{name}`", *left.values(), f"{cases}", *map(str, broken)])
    ratios = " | ".join(f"{kind}, {ratio:g}" for kind, ratio in left)
    return table(f"rule | {ratios} | cases | above 1 − δ | above 1 − δ̂", lines)


def convergence_table(rows: list[Row]) -> str:
    """Return the least gradient beside its bounds."""
    lines = []
    for (name, ratio, iterations), own in grouped(rows, "name", "ratio", "iterations").items():
        bounds = [
            number(mean(own, f)) for f in ("least", "bound", "bound_kept", "bound_contraction")
        ]
        worst = min(row["contraction"] for row in own)
        kept, needed = mean(own, "kept"), mean(own, "iterations_needed")
        lines.append(
            [
                f"`{name}`",
                f"{ratio:g}",
                f"{iterations}",
                f"{kept:.2f}",
                f"{worst / ratio:.2f}",
                *bounds,
                f"{needed:.2f}",
            ]
        )
    head = (
        "rule | δ | I | k̂/k | worst contraction ÷ δ | least ‖∇f‖² | bound with δ | with δ̂ | "
        "with the worst contraction | δ²/δ̂²"
    )
    return table(head, lines)


def tolerance_table(rows: list[Row]) -> str:
    """Return how often k̂ was within its tolerance."""
    lines = [
        [
            f"`{row['name']}`" + (f", {row['rule']}" if row["rule"] else ""),
            "with" if row["feedback"] else "without",
            f"{row['kept']:.2f}",
            f"{row['low']:.2f}–{row['high']:.2f}",
            f"{100 * row['within']:.0f} %",
            f"{100 * row['within_5']:.0f} %",
            f"{row['iterations_needed']:.2f}",
        ]
        for row in rows
    ]
    head = "rule, adaptation | error feedback | k̂/k | 5 to 95 % | steps within | means of 5 within | δ²/δ̂²"
    return table(head, lines)


def layers_table(rows: list[Row]) -> str:
    """Return lemma 1, corollary 1 and assumption 1 over a training."""
    moment = max(row["second_moment"] for row in rows)
    lines = []
    for i, row in enumerate(rows):
        if row["step"] not in (0, 1, 2, 5, 10, 20, 40, rows[-1]["step"]):
            continue
        bound = residual_bound([row["learning_rate"]] * i, moment, 1 / row["c_max"]) if i else 0.0
        lines.append(
            [
                f"{row['step']}",
                f"{row['left']:.4f}",
                f"{1 - 1 / row['c_max']:.4f}",
                number(row["distance"]),
                number(bound),
                f"{row['median_expected']:.3f}",
                f"{row['median_drawn']:.3f}",
                f"{row['above_expected']}",
                f"{row['above_drawn']}",
            ]
        )
    cases = sum(row["layers"] for row in rows)
    above = [sum(row[f] for row in rows) for f in ("above_expected", "above_drawn")]
    kept = sum(row["left"] <= 1 - 1 / row["c_max"] for row in rows)
    head = "step | left of the sum | 1 − 1/c_max | ‖v − x‖² | its bound | median δ_l | drawn | δ_l above 1 | drawn"
    return table(head, lines) + (
        f"\n\nOver all {len(rows)} steps: lemma 1 holds in {kept}; δ_l is above 1 in {above[0]} of {cases:,} cases "
        f"by the expectation, and in {above[1]} by one draw; c_max is {rows[0]['c_max']:,.0f}, and M² {number(moment)}."
    )


def equal_table(rows: list[Row]) -> str:
    """Return losses and accuracies at equal ratios."""
    lines = [
        [
            f"`{name}`",
            f"{100 * mean(own, 'share'):.3g} %",
            *(f"{row['loss']:.2f}" for row in own),
            f"{mean(own, 'loss'):.2f}",
        ]
        for (name,), own in grouped(rows, "name").items()
    ]
    head = "system | elements sent | loss, seed 0 | seed 1 | seed 2 | mean loss"
    return table(head, lines)


def signs_table(rows: list[Row]) -> str:
    """Return the shares of matching signs."""
    lines = []
    for row in sorted(rows, key=lambda r: -r["matching_rate"]):
        form = {"full_every=None": ", never in full precision", "stochastic=False": ", ℓ₁ scale"}
        step = (row["problem"].partition("step ")[2].partition(":")[0]) if row["problem"] else ""
        lines.append(
            [
                f"`{row['name']}`{form.get(row['form'], '')}",
                f"{row['compared']}",
                f"{100 * row['matching_rate']:.1f} %",
                f"{100 * row['low']:.1f}–{100 * row['high']:.1f} %",
                f"step {step}" if step else "–",
            ]
        )
    return table("system | steps compared | matching signs | lowest to highest | diverged", lines)


def layered_rate_table(rows: list[Row]) -> str:
    """Return both sides of theorem 1 of LAGS-SGD, and its bound of dense training."""
    lines = []
    for row in rows:
        settings = (str(row["nproc"]), f"{row['ratio']:g}", row["schedule"], f"{row['steps']:,}")
        numbers = (row[n] for n in ("second_moment", "weighted", "bound", "bound_dense"))
        lines.append([*settings, *map(number, numbers)])
    return table("ranks | ratio | α | T | M² | Σα‖∇f‖²/Σα | its bound | the bound if dense", lines)


def one_bit_rate_table(rows: list[Row]) -> str:
    """Return both sides of theorem 1 of Marsit."""
    lines = []
    for row in rows:
        bound = "none" if row["bound"] is None else number(row["bound"])
        settings = (str(row["nproc"]), str(row["every"]), f"{row['steps']:,}")
        needed = f"{row['steps_needed']:,.0f}"
        lines.append([*settings, needed, number(row["least"]), number(row["mean"]), bound])
    return table("ranks | K | T | T needed | least ‖∇F‖² | mean ‖∇F‖² | bound of the mean", lines)


def compensation_table(rows: list[Row]) -> str:
    """Return the compensation beside its bound."""
    shown = [row for row in rows if row["step"] % row["every"] in (1, 2, 5, 0) and row["step"] > 0]
    lines = [[f"{r['step']}", number(r["compensation"]), number(r["bound"])] for r in shown]
    return table("step | ‖c‖² | its bound", lines)


def votes_table(rows: list[Row]) -> str:
    """Return the bits of a sum of signs by the number of signs in it."""
    lines = [
        [f"{summed}", *(f"{mean(own, field):.2f}" for field in ("fixed", "elias", "entropy"))]
        for (summed,), own in grouped(rows, "summed").items()
    ]
    return table("signs in the sum | fixed length | Elias γ | entropy", lines)


def cascading_table(rows: list[Row]) -> str:
    """Return squared errors and their bounds."""
    lines = [
        [
            f"{row['nproc']}",
            f"{row['numel']:,}" + (", captured" if row["captured"] else ""),
            *(
                number(row[f])
                for f in ("error", "bound_parts", "bound", "central", "bound_central")
            ),
        ]
        for row in rows
    ]
    head = "M | D | cascading | bound in parts | (2D)^M/M | SSDM at once | D"
    return table(head, lines)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "decay": decay_table,
    "contraction": contraction_table,
    "convergence": convergence_table,
    "tolerance": tolerance_table,
    "layers": layers_table,
    "layered rate": layered_rate_table,
    "equal": equal_table,
    "signs": signs_table,
    "compensation": compensation_table,
    "one-bit rate": one_bit_rate_table,
    "votes": votes_table,
    "cascading": cascading_table,
}


def blocks(rows: list[Row]) -> dict[str, str]:
    """Return the tables of all studies that have rows, each sorted as the cases are."""
    order = {
        (study, case): i for study, cases in studies().items() for i, (case, _) in enumerate(cases)
    }
    found = sorted(rows, key=lambda r: order.get((r["study"], r["case"]), -1))
    by_study = grouped(found, "study")
    return {name: make(by_study[name,]) for name, make in TABLES.items() if (name,) in by_study}


def main() -> None:
    """Run what is not stored yet, and print the tables."""
    cases = studies()
    parser = command(__doc__, "theory.md")
    parser.add_argument("studies", nargs="*", help=f"some of: {', '.join(cases)}")
    parser.add_argument("--results", type=Path, default=PATH, help="file of the stored cases")
    options = parser.parse_args()
    unknown = set(options.studies) - cases.keys()
    if unknown:
        parser.error(f"no study {', '.join(sorted(unknown))}; there are {', '.join(cases)}")

    def measure(study: str, case: str) -> list[Row]:
        return [
            {"study": study, "case": case, **rounded(row)} for row in dict(cases[study])[case]()
        ]

    wanted = [(study, case) for study in options.studies or cases for case, _ in cases[study]]
    rows = complete(options.results, by("study", "case"), wanted, measure)
    show(blocks(rows), options.write, "theory.md")


def rounded(row: Row) -> Row:
    """Return a row with five digits of every number."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


if __name__ == "__main__":
    main()
