"""SIDCo's stages over one block of float32, and its trial of every number of stages, compiled.

Of some hundred thousand elements the calls from Python cost as much as the passes, and a trial asks for up to two
thousand look-ups. The models are those of :mod:`gradstats.statistics.stages`, compiled from that source.
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from gradstats.primitives.histogram import bin_edges
from gradstats.primitives.loops.compiled import Written, compiled
from gradstats.primitives.loops.counts import block_counts
from gradstats.primitives.loops.selection import block_select, keep_at_least
from gradstats.primitives.loops.sums import block_sum, block_tail, tail_sums
from gradstats.primitives.moments import SHORT
from gradstats.primitives.tails import BITS, part_above
from gradstats.statistics.stages import (
    MOST_STAGES,
    exponential_excess,
    genpareto_by_moments,
    genpareto_excess,
    most_stages,
    split_ratio,
    worth_collecting,
)

__all__ = ["best_stages", "block_stages", "warm_up"]


for _each in (
    exponential_excess,
    genpareto_by_moments,
    genpareto_excess,
    most_stages,
    part_above,
    split_ratio,
    worth_collecting,
):
    register_jitable(_each)


@compiled(nogil=True)
def _excess(
    pareto: bool, count: int, total: float, squares: float, threshold: float, ratio: float
) -> tuple[float, float, float]:
    """Return the excess of a later stage over its threshold, and its one or two parameters."""
    mean = total / count
    if pareto:
        variance = max(squares / count - mean**2, 0.0)
        return genpareto_excess(mean, variance, threshold, ratio)
    excess, scale = exponential_excess(mean, threshold, ratio)
    return excess, scale, 0.0


@compiled(nogil=True)
def _sums(x: NDArray[np.float32], low: np.int32, pareto: bool) -> tuple[int, float, float]:
    """Return the sums that a model needs, as :func:`gradstats.primitives.moments.rounded_sums` and `exceedances` do."""
    if not pareto and x.size >= SHORT:
        count, total = block_sum(x, low)
        if total < np.inf:
            return count, total, np.nan
    found: tuple[int, float, float] = block_tail(x, low)
    return found


@compiled(nogil=True)
def _above(
    left: NDArray[np.float64],
    right: NDArray[np.float64],
    sums: NDArray[np.float64],
    threshold: float,
) -> tuple[int, float, float]:
    """Look up what :meth:`gradstats.primitives.tails.Tails.above` does."""
    i = np.searchsorted(right, threshold)
    if i == right.size:
        return 0, 0.0, 0.0
    count, total, squares, inside = sums[i]
    return part_above(count, total, squares, inside, left[i], right[i], threshold)


@compiled(nogil=True)
def best_stages(
    left: NDArray[np.float64],
    right: NDArray[np.float64],
    sums: NDArray[np.float64],
    whole: int,
    k: int,
    first: float,
    one: float,
    several: float,
    second: tuple[int, float, float],
    pareto: bool,
) -> int:
    """Return the number of stages whose threshold keeps the nearest to k, of those that the authors' program uses.

    Parameters
    ----------
    left, right, sums : ndarray of float64
        Cells, see :class:`gradstats.primitives.tails.Tails`.
    whole : int
        Number of elements that are not zero.
    k : int
        Number of elements to keep.
    first : float
        Share that the first of several stages keeps.
    one, several : float
        Threshold of a first stage that is the only one, and of the first of several.
    second : (int, float, float)
        Number, sum and sum of squares of what reaches `several`, which may be below the first cell.
    pareto : bool
        Whether later stages are a generalized Pareto; otherwise they are exponential.
    """
    best, least = 1, np.inf
    for stages in range(1, most_stages(k / whole) + 1):
        many, _, ratio = split_ratio(k / whole, stages, first)
        threshold = several if many > 1 else one
        count, total, squares = second if many > 1 else _above(left, right, sums, threshold)
        for _ in range(1, many):
            if count == 0:
                break
            threshold += _excess(pareto, count, total, squares, threshold, ratio)[0]
            count, total, squares = _above(left, right, sums, threshold)
        error = abs(math.log(max(count, 0.5) / k))
        if error < least:
            best, least = stages, error
    return best


@compiled(nogil=True)
def _cells(
    x: NDArray[np.float32], least: float, edges: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Add up the magnitudes from above, as :func:`gradstats.primitives.tails.tails` does."""
    shift = 23 - BITS
    first = np.int64(np.float32(least).view(np.int32)) >> shift
    counts = block_counts(x.view(np.uint32), first, shift)
    left, right = edges[first : first + counts.size], edges[first + 1 : first + counts.size + 1]
    sums = np.zeros((counts.size + 1, 4))
    tail_sums(counts.astype(np.float64), left + (right - left) / 2, sums)
    return left, right, sums


@compiled(nogil=True)
def block_stages(
    x: NDArray[np.float32],
    k: int,
    stages: int,
    adapts: bool,
    first: float,
    pareto: bool,
    whole: int,
    one: float,
    several: float,
    edges: NDArray[np.float64],
    fits: Written[np.float64],
    indices: Written[np.int32],
    values: Written[np.float32],
) -> tuple[int, int, int]:
    """Run the stages of a threshold over one block, and select what reaches the last one.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Gradient, of one block.
    k : int
        Number of elements to keep.
    stages : int
        Number of stages M.
    adapts : bool
        Take the number of stages whose threshold keeps the nearest to k.
    first : float
        Share that the first of several stages keeps.
    pareto : bool
        Whether the model is a generalized Pareto; otherwise it is an exponential.
    whole : int
        Number of elements that are not zero, where the first stage has another model; otherwise −1.
    one, several : float
        With `whole`, the threshold of a first stage that is the only one, and of the first of several.
    edges : ndarray of float64
        Edges of a histogram's bins of :data:`gradstats.primitives.tails.BITS` bits.
    fits : ndarray of float64, shape (MOST_STAGES, 5)
        Written: magnitudes modelled, share of them wanted, threshold and the model's one or two parameters of each
        stage; of a first stage with another model no parameters.
    indices : ndarray of int32, shape (n,)
        Written: positions selected.
    values : ndarray of float32, shape (n,)
        Written: values selected.

    Returns
    -------
    (int, int, int)
        Number of stages M, stages run, and elements selected; none are run if no more than k elements are not zero.
    """
    lowest = np.int32(1)
    given = whole >= 0
    total, squares = 0.0, 0.0
    if not given:
        whole, total, squares = _sums(x, lowest, pareto)
    if k >= whole:
        return stages, 0, 0
    ratio = k / whole
    if not given:
        one = _excess(pareto, whole, total, squares, 0.0, ratio)[0]
        several = _excess(pareto, whole, total, squares, 0.0, first)[0]
    second = (np.int64(0), 0.0, 0.0)
    most, _, later = split_ratio(ratio, most_stages(ratio), first)
    if adapts:
        stages = 1
    if adapts and most > 1:
        second = _sums(x, max(np.float32(several).view(np.int32), lowest), pareto)
        least = several  # the more stages, the nearer is the second threshold to the first
        if second[0]:
            least += _excess(pareto, *second, several, later)[0]
        cells = _cells(x, min(one, least), edges)
        stages = best_stages(*cells, whole, k, first, one, several, second, pareto)
    many, own, later = split_ratio(ratio, stages, first)
    threshold = several if many > 1 else one
    fits[0, 0], fits[0, 1], fits[0, 2] = whole, own, threshold
    if not given:
        _, fits[0, 3], fits[0, 4] = _excess(pareto, whole, total, squares, 0.0, own)
    stage, collected = 1, -1
    low = max(np.float32(threshold).view(np.int32), lowest)
    while stage < many:
        share = fits[stage - 1, 0] * fits[stage - 1, 1] / x.size
        if collected < 0 and worth_collecting(share, many - stage):
            collected = block_select(x, low, 0, indices, values, 0)
        if stage == 1 and second[0] and collected < 0:
            count, total, squares = second
        elif collected < 0:
            count, total, squares = _sums(x, low, pareto)
        else:
            count, total, squares = _sums(values[:collected], low, pareto)
        if count == 0:
            break
        excess, fits[stage, 3], fits[stage, 4] = _excess(
            pareto, count, total, squares, threshold, later
        )
        threshold += excess
        fits[stage, 0], fits[stage, 1], fits[stage, 2] = count, later, threshold
        low = max(np.float32(threshold).view(np.int32), lowest)
        stage += 1
    if collected < 0:
        return stages, stage, block_select(x, low, 0, indices, values, 0)
    kept = keep_at_least(indices[:collected], values[:collected], np.float32(threshold))
    return stages, stage, kept


def warm_up() -> None:
    """Compile the loops, or load them from the cache: for arrays that may be written, and for those that may not."""
    x = np.ones(2, np.float32)
    read_only = x.copy()
    read_only.flags.writeable = False
    cell, sums, fits = np.ones(1), np.zeros((2, 4)), np.empty((MOST_STAGES, 5))
    best_stages(cell, cell, sums, 1, 1, 0.25, 1.0, 1.0, (1, 1.0, 1.0), False)
    for each in (x, read_only):
        found = np.empty(x.size, np.int32), np.empty_like(x)
        block_stages(each, 1, 1, False, 0.25, False, -1, 0.0, 0.0, bin_edges(BITS), fits, *found)
