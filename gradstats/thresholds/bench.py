"""The benchmark of threshold estimation with selection, against sorting and against one read of the data."""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradstats.primitives import set_num_threads, warm_up
from gradstats.primitives.ratio import RATIOS, target_count
from gradstats.tables import Records
from gradstats.thresholds import ESTIMATORS, Estimator, make_estimator

__all__ = ["REFERENCES", "bench", "sample_gradient"]

_SETTLE_S = 0.02
"""Pause before a round: torch's threads keep spinning after an operation, on the cores that ours need."""


def sample_gradient(numel: int, seed: int = 0) -> NDArray[np.float32]:
    """Return a synthetic gradient with a heavy tail: fifty Laplace layers of log-normal scales.

    Parameters
    ----------
    numel : int
        Size of the gradient.
    seed : int
        Seed of the draws.

    Returns
    -------
    ndarray of float32, shape (numel,)
        Gradient.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_exponential(numel, np.float32)
    x *= rng.choice(np.array([-1, 1], np.float32), numel)
    for part, scale in zip(np.array_split(x, 50), np.exp(rng.standard_normal(50)), strict=True):
        part *= np.float32(1e-3 * scale)
    return x


def _topk(x: torch.Tensor, k: int) -> int:
    indices = x.abs().topk(k, sorted=False).indices
    return x[indices].numel()


def _kthvalue(x: torch.Tensor, k: int) -> int:
    magnitude = x.abs()
    kept = (magnitude >= magnitude.kthvalue(x.numel() - k + 1).values).nonzero().reshape(-1)
    return x[kept].numel()


def _partition(x: torch.Tensor, k: int) -> int:
    values = x.numpy()
    kept = np.argpartition(np.abs(values), values.size - k)[values.size - k :]
    return int(values[kept].size)


REFERENCES: dict[str, Callable[[torch.Tensor, int], int]] = {
    "torch.topk": _topk,
    "torch.kthvalue": _kthvalue,
    "numpy.argpartition": _partition,
}
"""Exact selection with the usual tools: (gradient, k) → number of elements selected."""


def bench(
    numels: Sequence[int] = (260_000, 2_600_000, 26_000_000),
    ratios: Sequence[float] = RATIOS,
    *,
    estimators: Sequence[str] = tuple(ESTIMATORS),
    threads: Sequence[int] = (1,),
    repeats: int = 7,
    references: bool = True,
    on_progress: Callable[[], None] = lambda: None,
) -> Records:
    """Time every estimator with its selection, interleaved in one run.

    Parameters
    ----------
    numels : sequence of int
        Sizes of the gradients.
    ratios : sequence of float
        Kept fractions k/d, each in (0, 1].
    estimators : sequence of str
        Names of the estimators, by default all.
    threads : sequence of int
        Numbers of threads.
    repeats : int
        Rounds. Each runs everything once on the next of three gradients.
    references : bool
        Time :data:`REFERENCES` too, which take seconds at 26 M elements.
    on_progress : callable
        Called without arguments after every round of every size, ratio and number of threads.

    Returns
    -------
    Records
        One per combination, with ``compressor`` (the estimator or reference), ``numel``, ``ratio``, ``threads``,
        ``seconds`` (median), ``streams`` (median seconds over those of ``torch.sum`` of the same buffer),
        ``streams_mean`` (the same with the mean, for rules that search every few steps), ``quality`` (mean k̂/k),
        ``memory`` (largest extra NumPy memory in one call, as a fraction of the gradient's; NaN for references, whose
        memory torch allocates) and ``speedup`` (over torch.topk; NaN without references).

    Raises
    ------
    InputError
        If a ratio is outside (0, 1] or an estimator is unknown.

    Notes
    -----
    Stateful rules keep their state over the rounds. The three gradients differ in scale by 10 %, so that a warm
    start or a reused threshold is not simply right.
    """
    warm_up()
    records = Records()
    before = torch.get_num_threads()
    try:
        for n_threads in threads:
            torch.set_num_threads(n_threads)
            set_num_threads(n_threads)
            for numel in numels:
                base = torch.from_numpy(sample_gradient(numel))
                gradients = [base, base * 1.1, base.roll(numel // 3) * 0.95]
                for ratio in ratios:
                    records += _bench_one(
                        gradients, ratio, n_threads, estimators, repeats, references, on_progress
                    )
    finally:
        torch.set_num_threads(before)
        set_num_threads(None)
    return records


def _bench_one(
    gradients: Sequence[torch.Tensor],
    ratio: float,
    threads: int,
    estimators: Sequence[str],
    repeats: int,
    references: bool,
    on_progress: Callable[[], None],
) -> list[dict[str, Any]]:
    numel = gradients[0].numel()
    k = target_count(ratio, numel)
    rules: dict[str, Estimator] = {name: make_estimator(name) for name in estimators}
    runs: dict[str, Callable[[torch.Tensor], int]] = {
        name: lambda x, rule=rule: len(rule.select(x, ratio)[1])  # type: ignore[misc]
        for name, rule in rules.items()
    }
    if references:
        runs |= {n: lambda x, f=f: f(x, k) for n, f in REFERENCES.items()}  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in ["stream", *runs]}
    kept: dict[str, list[int]] = {name: [] for name in runs}
    for round_ in range(repeats + 1):
        x = gradients[round_ % len(gradients)]
        time.sleep(_SETTLE_S)
        for name, run in runs.items():
            started = time.perf_counter()
            found = run(x)
            elapsed = time.perf_counter() - started
            if round_:  # the first round warms caches and states
                seconds[name].append(elapsed)
                kept[name].append(found)
        if round_:
            seconds["stream"].append(_timed(lambda x=x: x.sum()))  # type: ignore[misc]
        on_progress()
    one = statistics.median(seconds["stream"])
    sorting = statistics.median(seconds["torch.topk"]) if references else math.nan
    return [
        {
            "compressor": name,
            "numel": numel,
            "ratio": ratio,
            "threads": threads,
            "seconds": statistics.median(seconds[name]),
            "streams": statistics.median(seconds[name]) / one,
            "streams_mean": statistics.fmean(seconds[name]) / one,
            "quality": statistics.fmean(kept[name]) / k,
            "memory": _memory(runs[name], gradients[0]) if name in rules else math.nan,
            "speedup": sorting / statistics.median(seconds[name]),
        }
        for name in runs
    ]


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _memory(run: Callable[[torch.Tensor], int], x: torch.Tensor) -> float:
    """Return the peak of what one call allocates, over the size of the gradient."""
    tracemalloc.start()
    try:
        run(x)
        return tracemalloc.get_traced_memory()[1] / (4 * x.numel())
    finally:
        tracemalloc.stop()
