"""Ranks against each other: how alike their gradients are, and what that says of batches; ``gradstats agreement``."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.over import Spread, shares, subset_of
from gradstats.analysis.pieces import Submit, evaluate
from gradstats.errors import InputError, TraceError
from gradstats.primitives import Array, top_candidates
from gradstats.primitives.arrays import as_numpy, numel_of
from gradstats.primitives.pairs import gram, sign_pairs
from gradstats.primitives.ratio import check_count, check_ratio, target_count
from gradstats.statistics.noise import noise_and_signal
from gradstats.statistics.resampling import mean_interval, ratio_interval
from gradstats.statistics.union import fit_union
from gradstats.tables import Records
from gradstats.trace import Kind
from gradstats.trace.format import WHOLE
from gradstats.trace.sources import Source, Subset, TraceSource, layer_parts, open_source

__all__ = ["agreement", "each_step"]

# noise and signal are not among them: a mean of ratios is biased, so means are taken before the ratio
_OVER_STEPS = ("cosine", "signs", "overlap", "union", "union_low", "union_high", "explained")
_WITH_INTERVAL = {"cosine": (-1.0, 1.0), "overlap": (0.0, 1.0)}
"""What has an interval, and the values that it can have."""


@shares(Spread)
def agreement(
    source: object,
    *,
    ratio: float = 0.001,
    workers: int | None = None,
    batch: int | None = None,
    **over: Unpack[Spread],
) -> Records:
    """Compare the gradients that the ranks of a run had in the same steps.

    Parameters
    ----------
    source : str, Path, Trace or Source
        Trace of at least two ranks, each with its own gradient: captured by a wrapped hook, not after averaging.
    ratio : float, optional
        Kept fraction k/d of the selections compared, in (0, 1].
    workers : int, optional
        Number of workers to predict the union for; by default twice as many as were captured.
    batch : int, optional
        Samples in a rank's batch; by default ``batch_size`` of the trace's metadata. Of a sharded model the
        gradients of ranks that hold its shards are averaged before they are compared: the noise scale counts the
        samples of all of them.
    **over : Unpack[Spread]
        Gradients and layers to look at, as in :class:`gradstats.analysis.over.Spread`.

    Returns
    -------
    Records
        trace, step (None: over all steps), kind, layer; cosine, mean over pairs of ranks; signs, share of elements of
        the same sign, over pairs; overlap, the mean share of a rank's k largest elements that another rank's k largest
        have (ties at the k-th are broken at random, by each rank for itself); cosine_low, cosine_high, overlap_low,
        overlap_high: 95 % intervals of their means over steps, by blocks of steps, from 20 steps on; union, positions
        that `workers` ranks would select together ÷ k, counted if as many were captured, else as modelled by
        :class:`gradstats.network.UnionGrowth`, union_low, union_high: its bounds, which hold without a model;
        explained, share of the ranks' mean squared norm that their mean has (1 ÷ ranks for unrelated gradients);
        noise_scale, low, high: the gradient noise scale tr Σ ÷ ‖G‖², which estimates the critical batch size, and its
        95 % interval; ranks, world (ranks that trained together, those captured where the trace does not say),
        workers, ratio, k, batch; without, steps that the noise scale leaves out, as the gradients are zero or not
        finite; incomplete, steps that are left out altogether, as a rank lacks them; reason, why there is no interval.

    Raises
    ------
    InputError
        If there are fewer than two ranks with a step in common, or an option has a wrong value.
    TraceError
        If the trace holds only sketches, or is damaged.

    Notes
    -----
    The noise scale is that of McCandlish et al. (2018, appendix A.1), from the ranks' norms and their mean's; both
    parts are without bias. It counts samples where `batch` is known, else batches of one rank. One step of a few ranks
    says little: the row of all steps is the ratio of the means over them, with an interval (Fieller's, of blocks of
    steps) from 20 steps on. The interval is about these steps: the noise scale grows as the loss falls. Of a kind other
    than ``gradient`` it describes the vector that is exchanged, and is no batch size. It takes the ranks' samples as
    independent: a part of the noise that ranks share, such as the same samples, an augmentation or the order of the
    data, counts as signal. With a correlation of 0.05 between the noise of ranks the interval covers the truth in none
    of 300 simulations, and nothing in the gradients tells.

    By default it looks at all ranks, and at the steps that all of them have. All ranks' gradients of one step are in
    memory at once.
    """
    opened, k_ratio = open_source(source), check_ratio(ratio)
    predicted = None if workers is None else check_count(workers, "workers")
    if batch is not None:
        batch = check_count(batch, "batch")
    elif isinstance(opened, TraceSource):
        # metadata are whatever the user wrote
        stored = opened.trace.attrs.get("batch_size")
        batch = stored if isinstance(stored, int) and stored > 0 else None
    # 0 where no world size is known: the ranks captured then count
    trained = opened.trace.world_size if isinstance(opened, TraceSource) else 0
    records, subset = Records(), subset_of(over)
    keys = subset.keys(opened)
    held = Counter(kind for kind, _ in {(kind, step) for _, kind, step in keys})
    rank_of = {kind: rank for rank, kind, _ in keys}
    steps = each_step(opened, subset, [k_ratio], predicted, over["client"])
    for kind, of_kind in itertools.groupby(steps, key=lambda one: one[0]):
        samples = (batch or 1) * _sharing(opened, kind, rank_of[kind])
        several: dict[str, list[dict[str, Any]]] = {}
        for _, step, of_layers in of_kind:
            for layer, (comparison,) in of_layers.items():
                labels = {"trace": opened.name, "step": step, "kind": kind, "layer": layer}
                several.setdefault(layer, []).append(comparison)
                records.append(_record(labels, [comparison], batch, samples, trained))
            over["on_progress"]()
        for layer, comparisons in several.items():
            labels = {"trace": opened.name, "step": None, "kind": kind, "layer": layer}
            incomplete = held[kind] - len(comparisons)
            records.append(_record(labels, comparisons, batch, samples, trained, incomplete))
    return records


def _sharing(source: Source, kind: Kind, rank: int) -> int:
    """Return how many ranks' gradients are averaged in one that is compared: those that hold its shards."""
    if not isinstance(source, TraceSource) or kind in WHOLE:
        return 1
    return len(source.trace.shard_ranks(rank))


def each_step(
    source: Source,
    subset: Subset,
    ratios: Sequence[float],
    workers: int | None = None,
    client: Any = None,
) -> Iterator[tuple[Kind, int, dict[str, list[dict[str, Any]]]]]:
    """Yield what the ranks have in common in each step that all of them have, for several ratios at one reading.

    Parameters
    ----------
    source : Source
        Source to read.
    subset : Subset
        Gradients and layers to look at.
    ratios : sequence of float
        Kept fractions k/d of the selections compared.
    workers : int, optional
        Number of workers to predict the union for; by default twice as many as were captured.
    client : distributed.Client, optional
        Cluster that does the work.

    Yields
    ------
    (Kind, int, dict of list of dict)
        Kind, step, and by layer a record for each ratio: the numbers of :func:`agreement` in one step.
    """
    parameters, all_steps = subset.parameters(source), _together(source, subset)

    def plan(submit: Submit, at: tuple[Kind, int]) -> Any:
        return submit(_layers, source, *at, all_steps[at[0]][at[1]], parameters, ratios, workers)

    every = [(kind, step) for kind, by_step in all_steps.items() for step in by_step]
    for at, of_layers in zip(every, evaluate(plan, every, client, "steps"), strict=True):
        yield *at, of_layers


def _together(source: Source, subset: Subset) -> dict[Kind, dict[int, list[int]]]:
    """Return the ranks of each kind and step, of those steps that all ranks have."""
    ranks: dict[Kind, dict[int, list[int]]] = {}
    for rank, kind, step in subset.keys(source):
        if source.sketched(rank, kind):
            raise TraceError(
                f"{source.name} holds only sketches of {kind}, which have no elements to compare; capture with "
                "--store gradients"
            )
        ranks.setdefault(kind, {}).setdefault(step, []).append(rank)
    common_steps: dict[Kind, dict[int, list[int]]] = {}
    for kind, by_step in ranks.items():
        whole = {rank for those in by_step.values() for rank in those}
        # steps of fewer ranks would mix numbers of different sets of ranks in one mean
        common = {s: sorted(r) for s, r in sorted(by_step.items()) if len(r) == len(whole) > 1}
        if common:
            common_steps[kind] = common
    if not common_steps:
        several = [r for by_step in ranks.values() for r in by_step.values() if len(r) > 1]
        raise InputError(
            f"{source.name} has no step that all ranks hold; name ranks that hold the same steps with --rank"
            if several
            else f"{source.name} has no step that two ranks hold; capture several ranks (gradstats capture without "
            "--rank)"
        )
    return common_steps


def _layers(
    source: Source,
    kind: Kind,
    step: int,
    ranks: Sequence[int],
    parameters: Sequence[str],
    ratios: Sequence[float],
    workers: int | None,
) -> dict[str, list[dict[str, Any]]]:
    """Compare the ranks' gradients of one step, by layer."""
    vectors = [dict(layer_parts(source, source.read(r, kind, step), parameters)) for r in ranks]
    world = 2 * len(ranks) if workers is None else workers
    return {layer: _one([v[layer] for v in vectors], ratios, world) for layer in vectors[0]}


def _one(vectors: Sequence[Array], ratios: Sequence[float], workers: int) -> list[dict[str, Any]]:
    """Compare the ranks' gradients of one layer in one step, at every ratio."""
    n = len(vectors)
    products = gram(vectors)
    # the diagonal has ‖g‖² of each rank
    norms = np.sqrt(np.diag(products))
    # a gradient of zeros has no direction: its cosine is NaN, which means over steps leave out
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (products / np.outer(norms, norms))[np.triu_indices(n, 1)]
    agree, either = sign_pairs(vectors)
    # ‖Σg‖² is the sum of all products
    squares, of_sum = float(np.sum(norms**2)), float(products.sum())
    noise, signal = noise_and_signal(squares, of_sum, n)
    if not norms.all():
        # a rank of zeros is no noisy estimate of the mean gradient: its difference from the others says nothing
        noise = signal = math.nan
    common = {
        "cosine": float(np.mean(cosines)),
        "signs": agree / either if either else math.nan,
        # ‖mean‖² over the mean of ‖g‖²
        "explained": of_sum / (n * squares) if squares else math.nan,
        "noise": noise,
        "signal": signal,
        "ranks": n,
        "workers": workers,
    }
    return [common | _selections(vectors, ratio, workers) for ratio in ratios]


def _selections(vectors: Sequence[Array], ratio: float, workers: int) -> dict[str, Any]:
    """Compare which elements the ranks would select at a ratio."""
    n, numel = len(vectors), numel_of(vectors[0])
    k = target_count(ratio, numel)
    times = np.zeros(numel, np.int64)
    selections = [_largest(vector, k, rank) for rank, vector in enumerate(vectors)]
    for places in selections:
        # a rank's positions are distinct, so += counts each of them once
        times[places] += 1
    if not all(places.size for places in selections):  # of a gradient of zeros nothing is selected
        return dict.fromkeys(("overlap", "union", "union_low", "union_high"), math.nan) | {
            "ratio": ratio,
            "k": k,
        }
    counts = np.bincount(times, minlength=n + 1)
    # of what a rank selects, which is fewer than k where fewer are not zero: the mean over the other ranks
    shares = [float(np.mean(times[places] - 1)) / (n - 1) for places in selections]
    growth = fit_union(counts)
    together = growth(workers)
    # up to the captured ranks the union is counted, so both bounds are it
    low, high = growth.bounds(workers) if workers > n else (together,) * 2
    return {
        "overlap": float(np.mean(shares)),
        "union": together / k,
        "union_low": low / k,
        "union_high": high / k,
        "ratio": ratio,
        "k": k,
    }


def _largest(vector: Array, k: int, rank: int) -> NDArray[np.int64]:
    """Return where the k largest magnitudes lie; of equal ones a random choice that other ranks do not share."""
    # candidates hold all elements tied at the k-th magnitude, so they may be more than k
    candidates = top_candidates(vector, k)[1]
    places = np.asarray(candidates.indices)
    sizes = np.abs(np.asarray(as_numpy(candidates.values), np.float64))
    if places.size <= k:
        return places
    # the k-th largest magnitude
    least = np.partition(sizes, sizes.size - k)[sizes.size - k]
    above, tied = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    # a common order, as by index, would have all ranks choose the same of the tied: an overlap made of ties
    drawn = np.random.default_rng([rank, k]).permutation(tied)[: k - above.size]
    chosen: NDArray[np.int64] = places[np.concatenate([above, drawn])]
    return chosen


def _record(
    labels: dict[str, Any],
    comparisons: Sequence[dict[str, Any]],
    batch: int | None,
    samples: int,
    trained: int,
    incomplete: int = 0,
) -> dict[str, Any]:
    """Return the record of one step or of several: means over them, and the noise scale's ratio of means.

    `samples` are those of a gradient that is compared, in the unit of the noise scale.
    """
    noise, signal = (np.array([f[name] for f in comparisons]) for name in ("noise", "signal"))
    scale, low, high, reason = math.nan, math.nan, math.nan, "one step"
    # NaN of a step in which a rank's gradient is of zeros, or is not finite
    telling = np.isfinite(noise) & np.isfinite(signal)
    noise, signal = noise[telling], signal[telling]
    # equal gradients leave a noise of rounding, of either sign
    equal = noise <= 1e-12 * np.abs(signal)
    if not telling.any():
        reason = "a rank's gradient is zero, or not finite"
    elif equal.any():
        at = "" if equal.all() else f" at {equal.sum()} of {equal.size} steps"
        reason = f"the ranks hold the same gradient{at}: captured after averaging, or of the same samples on every rank"
        noise, signal = noise[~equal], signal[~equal]
    if noise.size:
        # ‖G‖² is estimated without bias, so it may be below zero where there is little signal
        scale = float(noise.mean() / signal.mean()) if signal.mean() > 0 else math.inf
        # a trace that was captured after averaging in part is doubtful in the rest
        if labels["step"] is None and not equal.any():
            low, high, reason = ratio_interval(noise, signal)
    means = {}
    for name in _OVER_STEPS:
        known = [f[name] for f in comparisons if not math.isnan(f[name])]
        means[name] = float(np.mean(known)) if known else math.nan
    for name, ends in _WITH_INTERVAL.items():
        over = mean_interval(np.array([f[name] for f in comparisons]))
        low_, high_ = np.clip([over.low, over.high], *ends).tolist()
        means |= {f"{name}_low": low_, f"{name}_high": high_}
    return {
        **labels,
        **means,
        "noise_scale": samples * scale,
        "low": samples * low,
        "high": samples * high,
        **{name: comparisons[0][name] for name in ("ranks", "workers", "ratio", "k")},
        # a trace that knows no world size had at least the ranks that were captured
        "world": max(trained, comparisons[0]["ranks"]),
        "batch": batch,
        "without": int(np.count_nonzero(~telling)),
        "incomplete": incomplete,
        "reason": reason,
    }
