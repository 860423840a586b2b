"""The benchmark of threshold estimation with selection, against sorting and against one read of the data."""

from __future__ import annotations

import math
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradstats.console import no_progress
from gradstats.errors import InputError, unknown
from gradstats.primitives import set_num_threads
from gradstats.primitives.arrays import as_numpy, is_tensor
from gradstats.primitives.ratio import RATIOS, check_count, target_count
from gradstats.tables import Records
from gradstats.thresholds import ESTIMATORS, EstimatorName, make_estimator, warm_up

__all__ = [
    *("NUMELS", "PUBLISHED", "REFERENCES", "TAILS", "USUAL", "bench", "numbers_of_threads"),
    "sample_gradient",
]

NUMELS = (260_000, 2_600_000, 26_000_000)
"""Sizes of synthetic gradients that are timed by default."""
USUAL = ("layered",)
"""Laws of synthetic gradients that are timed by default."""

_SETTLE_S = 0.02
"""Pause before a round: torch's threads keep spinning after an operation, on the cores that ours need."""

_LOOPS, _ELEMENTS = 50, 1 << 18
"""Most runs in a row, and how many elements they have together."""

_STREAM = "one read"
_EVICTING = 128 * 2**20
"""Bytes that are written to empty the caches: more than the last level of any processor's that trains."""


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


def _laplace(numel: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return rng.laplace(0, 1e-3, numel).astype(np.float32)


def _student_t(numel: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (1e-3 * rng.standard_t(3, numel)).astype(np.float32)


TAILS: dict[str, Callable[[int], NDArray[np.float32]]] = {
    "layered": sample_gradient,
    "laplace": _laplace,
    "student-t": _student_t,
}
"""Synthetic gradients: fifty layers of different scales, a light tail, and a heavy one of three degrees of freedom."""


def _topk(x: torch.Tensor, k: int) -> int:
    indices = x.abs().topk(k, sorted=False).indices
    return x[indices].numel()


def _kthvalue(x: torch.Tensor, k: int) -> int:
    magnitude = x.abs()
    return _above(x, magnitude, magnitude.kthvalue(x.numel() - k + 1).values)


def _partition(x: torch.Tensor, k: int) -> int:
    values = as_numpy(x)
    indices = np.argpartition(np.abs(values), values.size - k)[values.size - k :]
    return int(values[indices].size)


def _above(x: torch.Tensor, magnitude: torch.Tensor, threshold: float | torch.Tensor) -> int:
    return x[(magnitude >= threshold).nonzero().reshape(-1)].numel()


def _dgc(x: torch.Tensor, k: int) -> int:
    magnitude, n = x.abs(), x.numel()
    # of its own: the user's random state stays as it is
    generator = torch.Generator().manual_seed(n)
    chosen = torch.randint(n, (max(1, n // 100),), generator=generator, device="cpu")
    sample = magnitude[chosen]
    threshold = sample.topk(max(1, round(k / n * len(sample))), sorted=False).values.min()
    return _above(x, magnitude, threshold)


def _redsync(x: torch.Tensor, k: int) -> int:
    magnitude = x.abs()
    mean, largest = magnitude.mean(), magnitude.max()
    share = 0.8
    while True:
        indices = (magnitude >= mean + share * (largest - mean)).nonzero().reshape(-1)
        if indices.numel() >= k or share <= 0:
            break
        share -= 0.2
    if indices.numel() < k:
        return _topk(x, k)
    return x[indices[magnitude[indices].topk(k, sorted=False).indices]].numel()


def _gaussian(x: torch.Tensor, k: int) -> int:
    magnitude, n = x.abs(), x.numel()
    deviation, mean = torch.std_mean(x)
    threshold = float(mean + deviation * torch.special.ndtri(torch.tensor(1 - k / n / 2)))
    for _ in range(4):
        count = int((magnitude > threshold).sum())
        if 2 / 3 <= count / k <= 4 / 3:
            break
        threshold *= 0.5 if count < k else 1.5
    return _above(x, magnitude, threshold)


def _sidco(x: torch.Tensor, k: int) -> int:
    magnitude, ratio, first = x.abs(), k / x.numel(), 0.25
    threshold = -float(magnitude.mean()) * math.log(max(first, ratio))
    if ratio < first:
        excess = magnitude[magnitude > threshold] - threshold
        threshold -= float(excess.mean()) * math.log(ratio / first)
    return _above(x, magnitude, threshold)


REFERENCES: dict[str, Callable[[torch.Tensor, int], int]] = {
    "torch.topk": _topk,
    "torch.kthvalue": _kthvalue,
    "numpy.argpartition": _partition,
}
"""Exact selection with the usual tools: (gradient, k) → number of elements selected."""

PUBLISHED: dict[str, Callable[[torch.Tensor, int], int]] = {
    "torch: dgc": _dgc,
    "torch: redsync": _redsync,
    "torch: gaussiank": _gaussian,
    "torch: sidco-e": _sidco,
}
"""Rules as their papers write them, one torch operation after another: DGC, section 3.1, with a sample of 1 %; RedSync,
algorithm 2; Gaussian-K (Shi et al. 2019, arXiv 1911.08772), algorithm 1; SIDCo, algorithm 1 with two stages."""


@dataclass(frozen=True, slots=True)
class _Case:
    """What is timed together: a gradient in one or several parts, in three versions."""

    gradient: str
    rounds: list[list[torch.Tensor]]

    @property
    def parts(self) -> list[torch.Tensor]:
        return self.rounds[0]

    @property
    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)


def _synthetic(name: str, sizes: Sequence[int], tail: str) -> _Case:
    if tail not in TAILS:
        raise unknown("tail", tail, TAILS)
    if not sizes:
        raise InputError(f"{name} has no layers")
    base = torch.from_numpy(TAILS[tail](sum(sizes)))
    versions = (base, base * 1.1, base.roll(base.numel() // 3) * 0.95)
    return _Case(name, [list(torch.split(x, list(sizes))) for x in versions])


def _case_of(name: str, gradients: Sequence[Sequence[Any]]) -> _Case:
    rounds = [
        [
            x.detach().reshape(-1) if is_tensor(x) else torch.from_numpy(np.ravel(x).copy())
            for x in parts
        ]
        for parts in gradients
    ]
    sizes = [[part.numel() for part in parts] for parts in rounds]
    if not sizes or not sizes[0] or not all(sizes[0]) or any(each != sizes[0] for each in sizes):
        raise InputError(f"{name}: the gradients must have the same parts, and none may be empty")
    return _Case(name, rounds)


def numbers_of_threads() -> list[int]:
    """Return the numbers of threads that rules are timed with by default: 1 and all."""
    return sorted({1, os.cpu_count() or 1})


def bench(
    numels: Sequence[int] = NUMELS,
    ratios: Sequence[float] = RATIOS,
    *,
    estimators: Sequence[EstimatorName | str] | None = None,
    threads: Sequence[int] | None = None,
    repeats: int = 15,
    references: bool = True,
    published: bool = False,
    tails: Sequence[str] = USUAL,
    layouts: Mapping[str, Sequence[int]] | None = None,
    gradients: Mapping[str, Sequence[Sequence[Any]]] | None = None,
    cold: bool = False,
    on_progress: Callable[[], None] = no_progress,
) -> Records:
    """Time every estimator with its selection, interleaved in one run.

    Parameters
    ----------
    numels : sequence of int
        Sizes of synthetic gradients.
    ratios : sequence of float
        Kept fractions k/d, each in (0, 1].
    estimators : sequence of str, optional
        Names of the estimators, by default all.
    threads : sequence of int, optional
        Numbers of threads; by default 1 and as many as there are processors.
    repeats : int
        Rounds. Each runs everything on the next of three gradients: once, or on up to 50 in a row where that is
        below 262,144 elements in all and the caches are warm.
    references : bool
        Time :data:`REFERENCES` too, which take seconds at 26 M elements.
    published : bool
        Time :data:`PUBLISHED` too.
    tails : sequence of str
        Laws of the synthetic gradients, names of :data:`TAILS`.
    layouts : mapping of str to sequence of int, optional
        Sizes of a model's layers, by the model's name: each layer by itself, one after another.
    gradients : mapping of str to sequence of sequence of array, optional
        Gradients by name, such as captured ones: the parts of each, in the same sizes. A round takes the next.
    cold : bool
        Empty the caches of the processor before every run. Else a rule may find in them what the last one read.
    on_progress : callable
        Called without arguments after every round of every gradient, ratio and number of threads.

    Returns
    -------
    Records
        One per combination, with ``compressor`` (the estimator or reference), ``gradient`` (its law, layout or name),
        ``numel``, ``layers`` (parts that are thresholded by themselves), ``ratio``, ``threads``, ``cache``,
        ``seconds`` (median), ``seconds_best`` (least), ``streams`` (median seconds over those of ``torch.sum`` of the
        same parts), ``streams_low`` and ``streams_high`` (the same with the quartiles), ``streams_mean`` (with the
        mean, for rules that search every few steps), ``quality`` (mean k̂/k), ``memory`` (largest extra NumPy memory
        in one call, as a fraction of the gradient's; NaN for references, whose memory torch allocates), ``speedup``
        (over torch.topk; NaN without references), ``repeats`` and ``rounds`` (streams of each round, over the read in
        the same round), by which :func:`gradstats.thresholds.changes.compared` tells two runs apart.

    Raises
    ------
    InputError
        If a ratio is outside (0, 1], repeats or threads are below 1, an estimator or a tail is unknown, or gradients
        differ in their parts.

    Notes
    -----
    Stateful rules keep their state over the rounds, one for each part. The three synthetic gradients differ in scale
    by 10 %, so that a warm start or a reused threshold is not simply right.
    """
    warm_up()
    repeats = check_count(repeats, "repeats")
    threads = [
        check_count(n, "threads") for n in (numbers_of_threads() if threads is None else threads)
    ]
    estimators = list(ESTIMATORS) if estimators is None else estimators
    makers = [
        *(
            partial(_synthetic, tail, [check_count(numel, "numel")], tail)
            for tail in tails
            for numel in numels
        ),
        *(
            partial(_synthetic, name, sizes, tail)
            for name, sizes in (layouts or {}).items()
            for tail in tails
        ),
        *(partial(_case_of, name, several) for name, several in (gradients or {}).items()),
    ]
    references_of = {**(REFERENCES if references else {}), **(PUBLISHED if published else {})}
    records = Records()
    before = torch.get_num_threads()
    try:
        for n_threads in threads:
            torch.set_num_threads(n_threads)
            set_num_threads(n_threads)
            for make in makers:
                # one at a time: all sizes together would need their memory at once
                case = make()
                for ratio in ratios:
                    timings = _bench_one(
                        case, ratio, estimators, repeats, references_of, cold, on_progress
                    )
                    cache = "cold" if cold else "warm"
                    records += [
                        {**record, "threads": n_threads, "cache": cache} for record in timings
                    ]
    finally:
        # the process has its number of threads back, whatever happened
        torch.set_num_threads(before)
        set_num_threads(None)
    return records


def _bench_one(
    case: _Case,
    ratio: float,
    estimators: Sequence[str],
    repeats: int,
    references: Mapping[str, Callable[[torch.Tensor, int], int]],
    cold: bool,
    on_progress: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """Time everything on one gradient."""
    targets = [target_count(ratio, part.numel()) for part in case.parts]
    runs: dict[str, Callable[[Sequence[torch.Tensor]], int]] = {}
    for name in estimators:
        # one for each part, since a rule may learn from what it sees
        rules = [make_estimator(name) for _ in case.parts]
        # bound by a default: a closure would see the last value of the loop
        runs[name] = lambda parts, rules=rules: sum(  # type: ignore[misc]
            len(rule.select(x, ratio)[1]) for rule, x in zip(rules, parts, strict=True)
        )
    for name, select in references.items():
        runs[name] = lambda parts, select=select: sum(  # type: ignore[misc]
            select(x, k) for x, k in zip(parts, targets, strict=True)
        )
    everything: dict[str, Callable[[Sequence[torch.Tensor]], int]] = {
        **runs,
        # as a number: on a device the sum has to be waited for
        _STREAM: lambda parts: sum(float(x.sum()) > 0 for x in parts),
    }
    seconds: dict[str, list[float]] = {name: [] for name in everything}
    counts: dict[str, list[int]] = {name: [] for name in everything}
    evicting = torch.ones(_EVICTING // 4 if cold else 0)
    # what takes microseconds is timed several times in a row, as layers of a model are: a rule's own code is warm then
    loops = 1 if cold else max(1, min(_LOOPS, _ELEMENTS // case.numel))
    for round_ in range(repeats + 1):
        several = [case.rounds[(round_ + i) % len(case.rounds)] for i in range(loops)]
        time.sleep(_SETTLE_S)
        for name, run in everything.items():
            # written in place, which fills the caches with it; nothing where caches stay warm
            evicting += 1
            started = time.perf_counter()
            totals = [run(parts) for parts in several]
            elapsed = (time.perf_counter() - started) / loops
            if round_:  # the first round warms caches and states
                seconds[name].append(elapsed)
                counts[name] += totals
        on_progress()
    reads = seconds.pop(_STREAM)
    # a single denominator, so that rows compare as their seconds do
    one = statistics.median(reads)
    sorting = statistics.median(seconds.get("torch.topk", [math.nan]))
    for name, run in runs.items():
        low, middle, high = np.quantile(seconds[name], (0.25, 0.5, 0.75)).tolist()
        yield {
            "compressor": name,
            "gradient": case.gradient,
            "numel": case.numel,
            "layers": len(case.parts),
            "ratio": ratio,
            "seconds": middle,
            "seconds_best": min(seconds[name]),
            "streams": middle / one,
            "streams_low": low / one,
            "streams_high": high / one,
            "streams_mean": statistics.fmean(seconds[name]) / one,
            "quality": statistics.fmean(counts[name]) / sum(targets),
            # in a call of its own: tracing slows every allocation
            "memory": math.nan if name in references else _memory(run, case),
            "speedup": sorting / middle,
            "repeats": repeats,
            "rounds": [rule / read for rule, read in zip(seconds[name], reads, strict=True)],
        }


def _memory(run: Callable[[Sequence[torch.Tensor]], int], case: _Case) -> float:
    """Return the peak of what one call allocates, over the size of the gradient."""
    tracemalloc.start()
    try:
        run(case.parts)
        size = sum(x.numel() * x.element_size() for x in case.parts)
        return tracemalloc.get_traced_memory()[1] / size
    finally:
        tracemalloc.stop()
