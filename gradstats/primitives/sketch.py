"""A gradient in a few kilobytes: exact sums and a histogram, from which every fit and distance follows.

A :class:`Sketch` is what one pass over the elements leaves; sketches of chunks, ranks and steps add up. Its
:class:`Magnitudes` are what the statistics work on: cells that hold a known number of magnitudes each. An array of
up to :data:`EXACT` non-zero elements keeps them all, as cells of no width, so that small samples lose nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import Array, Histogram, Moments, histogram, moments
from gradstats.primitives.arrays import check, flat_chunks
from gradstats.primitives.histogram import bin_edges

__all__ = ["BITS", "EXACT", "Magnitudes", "Sketch", "merge", "sketch"]

BITS = 10
"""Mantissa bits of the histogram unless asked otherwise: cells 0.05 to 0.1 % wide."""

EXACT = 1 << 15
"""Non-zero elements up to which a sketch keeps every magnitude."""


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """The distribution of n magnitudes, as ascending disjoint cells.

    Attributes
    ----------
    left, right : float64 (cells,), the magnitudes of a cell lie in [left, right]; equal where they are known.
    weight : float64 (cells,), how many.
    mean, mean_square, mean_log : of the magnitudes, exact where sums were taken over the elements.
    max : the largest.
    zero_fraction : π₀, share of exact zeros beside these magnitudes.
    """

    left: NDArray[np.float64]
    right: NDArray[np.float64]
    weight: NDArray[np.float64]
    mean: float
    mean_square: float
    mean_log: float
    max: float
    zero_fraction: float = 0.0

    @classmethod
    def from_cells(
        cls,
        left: NDArray[np.float64],
        right: NDArray[np.float64],
        weight: NDArray[np.float64],
        zero_fraction: float = 0.0,
    ) -> Magnitudes:
        """Take the sums from the cells' middles."""
        n, middle = float(weight.sum()), (left + right) / 2
        nan = float("nan")
        if n == 0:
            return cls(left, right, weight, nan, nan, nan, 0.0, zero_fraction)
        return cls(
            left,
            right,
            weight,
            mean=float(weight @ middle / n),
            mean_square=float(weight @ middle**2 / n),
            mean_log=float(weight @ np.log(middle) / n),
            max=float(right[-1]),
            zero_fraction=zero_fraction,
        )

    @cached_property
    def count(self) -> int:
        """How many magnitudes, n."""
        return int(self.weight.sum())

    @cached_property
    def middle(self) -> NDArray[np.float64]:
        """The cells' middles, (cells,)."""
        return (self.left + self.right) / 2

    @property
    def variance(self) -> float:
        """Population variance."""
        return max(self.mean_square - self.mean**2, 0.0)

    def average(self, values: NDArray[np.float64]) -> float:
        """Return the mean over the elements of something given per cell (at its middle)."""
        return float(self.weight @ values) / self.count

    @cached_property
    def cumulative(self) -> NDArray[np.float64]:
        """Magnitudes up to and including each cell, (cells,)."""
        return np.cumsum(self.weight)

    def exceedances(self, threshold: float) -> float:
        """Return how many magnitudes reach a threshold; inside a cell they are taken as evenly spread."""
        i = int(np.searchsorted(self.right, threshold))
        if i == self.right.size:
            return 0.0
        above = self.count - self.cumulative[i]
        width = self.right[i] - self.left[i]
        inside = (self.right[i] - threshold) / width if width > 0 else 1.0
        return float(above + self.weight[i] * min(max(inside, 0.0), 1.0))

    def upper_quantile(self, k: float) -> float:
        """Return the k-th largest magnitude, k ≥ 1, evenly placed inside its cell; 0 if there are fewer."""
        if k > self.count or not self.count:
            return 0.0
        i = int(np.searchsorted(self.cumulative, self.count - k, side="right"))
        under = self.count - k - (self.cumulative[i] - self.weight[i])
        share = min((under + 0.5) / self.weight[i], 1.0)
        return float(self.left[i] + (self.right[i] - self.left[i]) * share)

    def excesses(self, threshold: float) -> Magnitudes:
        """Return |g| − threshold of the magnitudes above the threshold (peaks over threshold).

        A whole number of them: of a cell that the threshold cuts, the part above is rounded.
        """
        i = int(np.searchsorted(self.right, threshold, side="right"))
        left, right, weight = self.left[i:].copy(), self.right[i:], self.weight[i:].copy()
        if left.size and left[0] < threshold:
            weight[0] = np.rint(weight[0] * (right[0] - threshold) / (right[0] - left[0]))
            left[0] = threshold
        some = weight > 0
        return Magnitudes.from_cells(left[some] - threshold, right[some] - threshold, weight[some])

    def scaled(self, factor: float) -> Magnitudes:
        """Return the magnitudes times a positive factor."""
        return Magnitudes(
            self.left * factor,
            self.right * factor,
            self.weight,
            self.mean * factor,
            self.mean_square * factor**2,
            self.mean_log + float(np.log(factor)),
            self.max * factor,
            self.zero_fraction,
        )

    def largest(self, count: int) -> NDArray[np.float64]:
        """Return the `count` largest magnitudes, descending, evenly spread inside a cell; fewer if there are fewer."""
        first = int(np.searchsorted(self.cumulative, self.count - count, side="right"))
        weight = np.rint(self.weight[first:]).astype(np.int64)
        place = np.arange(weight.sum()) - np.repeat(np.cumsum(weight) - weight, weight)
        share = (place + 0.5) / np.repeat(weight, weight)
        left, right = (np.repeat(edge[first:], weight) for edge in (self.left, self.right))
        return (left + share * (right - left))[::-1][:count]

    def sample(self, size: int, rng: np.random.Generator) -> Magnitudes:
        """Draw `size` of the magnitudes without replacement, evenly inside a cell; all of them if there are fewer."""
        if size >= self.count:
            return self
        ranks = rng.choice(self.count, size, replace=False, shuffle=False)
        cells = np.searchsorted(self.cumulative, ranks, side="right")
        width = self.right[cells] - self.left[cells]
        return Magnitudes.from_values(self.left[cells] + rng.random(size) * width)

    @classmethod
    def from_values(cls, values: NDArray[np.float64], zero_fraction: float = 0.0) -> Magnitudes:
        """Take finite positive magnitudes as they are, float64 (n,)."""
        values = np.sort(values)
        return cls.from_cells(values, values, np.ones(values.size), zero_fraction)


@dataclass(frozen=True, eq=False)
class Sketch:
    """Sums and counts of a gradient's elements; ``a + b`` is the sketch of both together.

    Attributes
    ----------
    moments : exact sums over the finite non-zero elements.
    bins, counts : int64 (b,), the occupied bins of the :class:`gradstats.primitives.Histogram`, and their counts.
    bits : its mantissa bits.
    values : every finite non-zero magnitude, ascending, up to :data:`EXACT` of them; else None.
    """

    moments: Moments
    bins: NDArray[np.int64]
    counts: NDArray[np.int64]
    bits: int = BITS
    values: NDArray[np.float64] | None = None

    @property
    def numel(self) -> int:
        """Elements of the gradient, zeros and non-finite ones included."""
        return self.moments.numel

    @property
    def histogram(self) -> Histogram:
        """The histogram with its empty bins."""
        dense = np.zeros(bin_edges(self.bits).size - 1, np.int64)
        dense[self.bins] = self.counts
        return Histogram(dense, self.moments.zeros, self.moments.nonfinite, self.bits)

    @cached_property
    def magnitudes(self) -> Magnitudes:
        """The magnitudes as cells."""
        m = self.moments
        if self.values is not None:
            left = right = self.values
            weight = np.ones(left.size)
        else:
            edges = bin_edges(self.bits)
            left, right = edges[self.bins], edges[self.bins + 1]
            weight = self.counts.astype(np.float64)
            if right.size:
                right[-1] = min(right[-1], m.max) if m.max > left[-1] else right[-1]
        square = m.sum_squares / m.count if m.count else float("nan")
        return Magnitudes(left, right, weight, m.mean, square, m.mean_log, m.max, m.zero_fraction)

    def coarsen(self, bits: int) -> Sketch:
        """Return the sketch with fewer, wider bins and without the single magnitudes."""
        if not 0 <= bits <= self.bits:
            raise InputError(f"a sketch of {self.bits} bits cannot be made one of {bits}")
        bins, counts = _merged(self.bins >> (self.bits - bits), self.counts)
        return Sketch(self.moments, bins, counts, bits)

    def __add__(self, other: Sketch) -> Sketch:
        return merge([self, other])


def merge(sketches: Sequence[Sketch]) -> Sketch:
    """Return the sketch of all the elements together; one at least.

    Raises
    ------
    InputError
        If their bits differ.
    """
    first = sketches[0]
    if len(sketches) == 1:
        return first
    if any(s.bits != first.bits for s in sketches):
        raise InputError("sketches of different bits do not add; coarsen the finer ones")
    bins, counts = _merged(
        np.concatenate([s.bins for s in sketches]), np.concatenate([s.counts for s in sketches])
    )
    total = reduce(add, (s.moments for s in sketches))
    known = [s.values for s in sketches if s.values is not None]
    values = None
    if len(known) == len(sketches) and total.count <= EXACT:
        values = np.sort(np.concatenate(known))
    return Sketch(total, bins, counts, first.bits, values)


def _merged(
    bins: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Add up the counts of equal bins; return the bins ascending."""
    distinct, place = np.unique(bins, return_inverse=True)
    merged = np.zeros(distinct.size, np.int64)
    np.add.at(merged, place, counts)
    return distinct, merged


def sketch(x: Array, bits: int = BITS) -> Sketch:
    """Reduce a gradient to its sketch, reading it twice.

    Parameters
    ----------
    x : array of any shape, NumPy or torch, any floating dtype. NaN and infinities are counted and left out.
    bits : mantissa bits of the histogram, 0 to 12; 7 is what traces store.

    Examples
    --------
    >>> import numpy as np
    >>> s = sketch(np.array([1.0, -2.0, 0.0])) + sketch(np.array([4.0]))
    >>> s.numel, s.moments.zeros, s.magnitudes.count, s.magnitudes.mean
    (4, 1, 3, 2.3333333333333335)
    """
    x = check(x)
    sums = moments(x)
    if sums.count > EXACT:
        counts = histogram(x, bits).counts
        bins = np.flatnonzero(counts)
        return Sketch(sums, bins, counts[bins].astype(np.int64), bits)
    parts = []
    for _, chunk in flat_chunks(x):
        magnitude = np.abs(chunk)
        parts.append(magnitude[np.isfinite(magnitude) & (magnitude > 0)].astype(np.float64))
    values = np.sort(np.concatenate(parts)) if parts else np.empty(0)
    with np.errstate(under="ignore"):
        # what float32 cannot hold is in the last bin, so that the bins count everything too
        narrow = np.minimum(values, np.finfo(np.float32).max).astype(np.float32)
    bins, number = np.unique(narrow.view(np.int32) >> (23 - bits), return_counts=True)
    return Sketch(sums, bins.astype(np.int64), number.astype(np.int64), bits, values)
