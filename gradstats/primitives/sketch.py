"""A gradient in a few kilobytes: exact sums and a histogram, from which every fit and distance follows.

A :class:`Sketch` is what reading a gradient leaves; sketches of chunks, ranks and steps add up. The statistics work on
its :class:`Magnitudes`: cells that hold a known number of magnitudes each. An array of up to :data:`EXACT` non-zero
elements keeps them all, as cells without width, so that small samples lose nothing.
"""

# Size: a third of its lines are docstrings; what a sketch knows and how sketches merge are one contract.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import Array, Histogram, Moments, histogram, moments, select
from gradstats.primitives.arrays import as_numpy, check, dot, flat_chunks, wide_dtype
from gradstats.primitives.backend import device_code
from gradstats.primitives.histogram import bin_edges, check_bits
from gradstats.primitives.ratio import check_count, check_magnitude, check_number
from gradstats.primitives.tails import middles
from gradstats.tables import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BITS", "EXACT", "Magnitudes", "Sketch", "merge", "sketch"]

BITS = 10
"""Mantissa bits of the histogram by default: cells 0.05 to 0.1 % wide."""

EXACT = 1 << 15
"""Non-zero elements up to which a sketch keeps every magnitude."""

_NORMAL, _LEAST = float(np.finfo(np.float32).tiny), 2.0**-149
"""Least normal number of float32, and its least denormal one, of which all denormals are multiples."""


# no ==, which arrays do not answer with one truth value
@dataclass(frozen=True, eq=False)
class Magnitudes:
    """The distribution of n magnitudes, as ascending disjoint cells.

    Attributes
    ----------
    left, right : ndarray of float64, shape (cells,)
        Ends of each cell, in which its magnitudes lie; equal where the magnitude is known.
    weight : ndarray of float64, shape (cells,)
        Number of magnitudes in each cell.
    mean, mean_square, mean_log : float
        Means of |g|, g² and ln|g|, exact where the sums were taken over the elements.
    max : float
        Largest magnitude.
    zero_fraction : float
        Share π₀ of exact zeros, which are not among these magnitudes.
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
        """Take the means from the cells' middles.

        Parameters
        ----------
        left : ndarray of float64, shape (cells,)
            Lower ends of the cells, ascending.
        right : ndarray of float64, shape (cells,)
            Upper ends.
        weight : ndarray of float64, shape (cells,)
            Number of magnitudes in each cell.
        zero_fraction : float
            Share π₀ of exact zeros, which are not among these magnitudes.
        """
        n, middle = float(weight.sum()), middles(left, right)
        nan = float("nan")
        if n == 0:
            return cls(left, right, weight, nan, nan, nan, 0.0, zero_fraction)
        with np.errstate(over="ignore"):  # means beyond float64's range are infinite
            mean, mean_square = float(weight @ middle / n), float(weight @ middle**2 / n)
        return cls(
            left,
            right,
            weight,
            mean=mean,
            mean_square=mean_square,
            mean_log=float(weight @ np.log(middle) / n),
            max=float(right[-1]),
            zero_fraction=zero_fraction,
        )

    @cached_property
    def count(self) -> int:
        """Number of magnitudes, n."""
        return int(self.weight.sum())

    @cached_property
    def middle(self) -> NDArray[np.float64]:
        """Middle of each cell, shape (cells,)."""
        return middles(self.left, self.right)

    @property
    def variance(self) -> float:
        """Population variance."""
        return max(self.mean_square - self.mean**2, 0.0)

    def average(self, values: NDArray[np.float64]) -> float:
        """Return the mean over the magnitudes of a quantity known per cell.

        Parameters
        ----------
        values : ndarray of float64, shape (cells,)
            The quantity at the middle of each cell.
        """
        return dot(self.weight, values) / self.count

    @cached_property
    def cumulative(self) -> NDArray[np.float64]:
        """Number of magnitudes up to and including each cell, shape (cells,)."""
        return np.cumsum(self.weight)

    def exceedances(self, threshold: float) -> float:
        """Return how many magnitudes reach a threshold.

        Parameters
        ----------
        threshold : float
            Magnitude η ≥ 0. Of the cell that it cuts, taken as evenly filled, the part above it counts.
        """
        threshold = check_magnitude(threshold)
        # a cell that ends at the threshold still reaches it
        i = int(np.searchsorted(self.right, threshold))
        if i == self.right.size:
            return 0.0
        above = self.count - self.cumulative[i]
        width = self.right[i] - self.left[i]
        inside = (self.right[i] - threshold) / width if width > 0 else 1.0
        return float(above + self.weight[i] * min(max(inside, 0.0), 1.0))

    def upper_quantile(self, k: float) -> float:
        """Return the k-th largest magnitude, evenly placed inside its cell; 0 if there are fewer.

        Parameters
        ----------
        k : float
            Rank, at least 1.
        """
        k = check_number(k, "k", 0, math.inf, "(]", ", a rank")
        if k > self.count or not self.count:
            return 0.0
        i = int(np.searchsorted(self.cumulative, self.count - k, side="right"))
        i = min(i, self.weight.size - 1)  # a rank below one rounds to none
        under = self.count - k - (self.cumulative[i] - self.weight[i])
        # n magnitudes spread evenly are in the middles of n equal parts
        share = min((under + 0.5) / self.weight[i], 1.0)
        return float(self.left[i] + (self.right[i] - self.left[i]) * share)

    def excesses(self, threshold: float) -> Magnitudes:
        """Return |g| − threshold of the magnitudes above the threshold (peaks over threshold).

        Parameters
        ----------
        threshold : float
            Magnitude η ≥ 0. Of the cell that it cuts, the number above is rounded to a whole one.
        """
        threshold = check_magnitude(threshold)
        # a cell that ends at the threshold has no excess
        i = int(np.searchsorted(self.right, threshold, side="right"))
        left, right, weight = self.left[i:].copy(), self.right[i:], self.weight[i:].copy()
        if left.size and left[0] < threshold:
            weight[0] = np.rint(weight[0] * (right[0] - threshold) / (right[0] - left[0]))
            left[0] = threshold
        some = weight > 0
        return Magnitudes.from_cells(left[some] - threshold, right[some] - threshold, weight[some])

    def scaled(self, factor: float) -> Self:
        """Return the magnitudes times a factor.

        Parameters
        ----------
        factor : float
            Factor above 0.
        """
        factor = check_number(factor, "factor", 0, math.inf)
        # the rest is kept, also what a subclass adds
        return replace(
            self,
            left=self.left * factor,
            right=self.right * factor,
            mean=self.mean * factor,
            mean_square=self.mean_square * factor**2,
            mean_log=self.mean_log + float(np.log(factor)),
            max=self.max * factor,
        )

    def largest(self, count: int) -> NDArray[np.float64]:
        """Return the largest magnitudes, descending, evenly spread inside a cell.

        Parameters
        ----------
        count : int
            How many; all of them if there are fewer.
        """
        count = check_count(count, "count", 0)
        first = int(np.searchsorted(self.cumulative, self.count - count, side="right"))
        weight = np.rint(self.weight[first:]).astype(np.int64)
        place = np.arange(weight.sum()) - np.repeat(np.cumsum(weight) - weight, weight)
        share = (place + 0.5) / np.repeat(weight, weight)
        left, right = (np.repeat(edge[first:], weight) for edge in (self.left, self.right))
        return (left + share * (right - left))[::-1][:count]

    def sample(self, size: int, rng: np.random.Generator) -> Magnitudes:
        """Draw magnitudes without replacement, evenly inside a cell.

        Parameters
        ----------
        size : int
            How many; all of them if there are fewer.
        rng : numpy.random.Generator
            Source of the draws.
        """
        if check_count(size, "size", 0) >= self.count:
            return self
        # magnitudes are put in order anyway, so ranks need not be shuffled
        ranks = rng.choice(self.count, size, replace=False, shuffle=False)
        cells = np.searchsorted(self.cumulative, ranks, side="right")
        width = self.right[cells] - self.left[cells]
        return Magnitudes.from_values(self.left[cells] + rng.random(size) * width)

    @classmethod
    def from_values(cls, values: NDArray[np.float64], zero_fraction: float = 0.0) -> Magnitudes:
        """Take single magnitudes, each a cell without width.

        Parameters
        ----------
        values : ndarray of float64, shape (n,)
            Finite positive magnitudes in any order.
        zero_fraction : float
            Share π₀ of exact zeros, which are not among these magnitudes.
        """
        values = np.sort(values)
        return cls.from_cells(values, values, np.ones(values.size), zero_fraction)


@dataclass(frozen=True, eq=False, repr=False)
class Sketch(Shown):
    """Sums and counts of a gradient's elements; ``a + b`` is the sketch of both together.

    Attributes
    ----------
    moments : Moments
        Exact sums over the finite non-zero elements.
    bins : ndarray of int64, shape (b,)
        Occupied bins of the :class:`gradstats.primitives.Histogram`, ascending.
    counts : ndarray of int64, shape (b,)
        Number of elements in each of them.
    bits : int
        Mantissa bits of the histogram.
    values : ndarray of float64, shape (n,), or None
        Every finite non-zero magnitude, ascending; None if there are more than :data:`EXACT`.
    """

    moments: Moments
    bins: NDArray[np.int64]
    counts: NDArray[np.int64]
    bits: int = BITS
    values: NDArray[np.float64] | None = None

    def _rows(self) -> list[dict[str, Any]]:
        """Return what is known exactly, and the median of the magnitudes, as one record."""
        s = self.moments
        rms = math.sqrt(s.sum_squares / s.count) if s.count else math.nan
        # the mean of the two in the middle, which are one where their number is odd
        low, high = (
            self.magnitudes.upper_quantile(max(k, 1))
            for k in (s.count // 2 + 1, (s.count + 1) // 2)
        )
        median = low + (high - low) / 2
        counts = {"numel": s.numel, "zeros": s.zeros, "nonfinite": s.nonfinite}
        sizes = {"mean": s.mean, "rms": rms, "median": median if s.count else math.nan}
        return [counts | sizes | {"max": s.max, "bits": self.bits}]

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the share of elements above each magnitude: :func:`gradstats.plots.tail`.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; new ones by default.
        **options : object
            Options of the figure, such as ``title``.

        Returns
        -------
        matplotlib.axes.Axes
            The axes.
        """
        return self._draw("tail", self, [], ax=ax, **options)

    @property
    def numel(self) -> int:
        """Number of elements of the gradient, with zeros and non-finite ones."""
        return self.moments.numel

    @property
    def histogram(self) -> Histogram:
        """Histogram of the magnitudes, with its empty bins."""
        dense = np.zeros(bin_edges(self.bits).size - 1, np.int64)
        dense[self.bins] = self.counts
        return Histogram(dense, self.moments.zeros, self.moments.nonfinite, self.bits)

    @cached_property
    def magnitudes(self) -> Magnitudes:
        """Distribution of the magnitudes, as cells."""
        m = self.moments
        if self.values is not None:
            left = right = self.values
            weight = np.ones(left.size)
        else:
            # a merged sketch may have come from few enough magnitudes to need no bins
            _check_range(m.max)
            edges = bin_edges(self.bits)
            # indexed by arrays, these are copies, which _known_maximum writes to
            left, right, weight = _known_maximum(
                edges[self.bins], edges[self.bins + 1], self.counts.astype(np.float64), m.max
            )
        square = m.sum_squares / m.count if m.count else float("nan")
        return Magnitudes(left, right, weight, m.mean, square, m.mean_log, m.max, m.zero_fraction)

    def coarsen(self, bits: int) -> Sketch:
        """Return the sketch with fewer, wider bins and without the single magnitudes.

        Parameters
        ----------
        bits : int
            Mantissa bits to keep, at most the present ones.

        Raises
        ------
        InputError
            If there are not as many bits, or most of the single magnitudes are below float32's range.
        """
        bits = check_count(bits, f"bits coarser than {self.bits} bits", 0, self.bits)
        _check_values([self], self.moments)
        bins, counts = _merged(self.bins >> (self.bits - bits), self.counts)
        return Sketch(self.moments, bins, counts, bits)

    def __add__(self, other: Sketch) -> Sketch:
        return merge([self, other])


def merge(sketches: Sequence[Sketch]) -> Sketch:
    """Return the sketch of all the elements together.

    Parameters
    ----------
    sketches : sequence of Sketch
        One or more, of the same bits.

    Raises
    ------
    InputError
        If their bits differ, or more than :data:`EXACT` magnitudes are most of them below float32's range.
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
    else:
        _check_values(sketches, total)
    return Sketch(total, bins, counts, first.bits, values)


def _check_range(largest: float) -> None:
    """Check that the bins, which are float32's, hold the largest magnitude."""
    if largest > float(np.finfo(np.float32).max):
        raise InputError(
            f"magnitudes up to {largest:.3g} are beyond float32's range, in which more than {EXACT:,} are counted: "
            "rescale them"
        )


def _check_values(sketches: Sequence[Sketch], sums: Moments) -> None:
    """Check that the bins hold most magnitudes, where no single ones are kept any more."""
    small = 0
    for values in (s.values for s in sketches if s.values is not None):
        low = values[: np.searchsorted(values, _NORMAL)]
        places = low / _LEAST
        # float32's own denormals, which are whole ones, have their bins
        small += int(np.count_nonzero(places != np.rint(places)))
    _check_small(small, sums)


def _check_small(small: int, sums: Moments) -> None:
    """Check that most magnitudes of float64 are not below float32's normal numbers, where its bins are few."""
    if 2 * small > sums.count:
        raise InputError(
            f"magnitudes of {sums.mean:.3g} on the mean are below float32's range, in which bins count them: "
            "rescale them"
        )


def _known_maximum(
    left: NDArray[np.float64],
    right: NDArray[np.float64],
    weight: NDArray[np.float64],
    largest: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the cells with the last one cut at the largest magnitude, which is a cell without width by itself."""
    if not left.size or not largest <= right[-1]:
        return left, right, weight
    if largest <= left[-1]:  # all of them are there (float64 may lie a rounding lower)
        right[-1] = left[-1]
        return left, right, weight
    right[-1] = largest
    if weight[-1] == 1:
        left[-1] = largest
        return left, right, weight
    weight[-1] -= 1
    return np.append(left, largest), np.append(right, largest), np.append(weight, 1.0)


def _merged(
    bins: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Add up the counts of equal bins; return the bins ascending."""
    # a counter for every bin up to the last, a million at most: to sort the bins takes many times as long
    totals = np.zeros(int(bins.max(initial=-1)) + 1, np.int64)
    np.add.at(totals, bins, counts)
    # of booleans, which takes a tenth of the time
    distinct = np.flatnonzero(totals > 0)
    return distinct, totals[distinct]


def sketch(x: Array, bits: int = BITS) -> Sketch:
    """Reduce a gradient to its sketch, reading it twice.

    Parameters
    ----------
    x : array_like
        Gradient of any shape, NumPy or torch, any floating dtype. NaN and infinities are counted and left out.
    bits : int
        Mantissa bits of the histogram, 0 to 12; traces store 7.

    Returns
    -------
    Sketch
        Sums and counts, which add up over chunks, ranks and steps.

    Raises
    ------
    InputError
        If `x` is not a dense floating-point array, or has more than :data:`EXACT` elements and magnitudes outside
        float32's range.

    Examples
    --------
    >>> import numpy as np
    >>> s = sketch(np.array([1.0, -2.0, 0.0])) + sketch(np.array([4.0]))
    >>> s.numel, s.moments.zeros, s.magnitudes.count, s.magnitudes.mean
    (4, 1, 3, 2.3333333333333335)
    """
    bits, x = check_bits(bits), check(x)
    sums = moments(x)
    if sums.count > EXACT:
        _check_range(sums.max)
        counts = histogram(x, bits).counts
        if wide_dtype(x) == np.float64:
            # bins below 2^bits have exponent 0, that of subnormal numbers
            _check_small(sums.count - int(counts[1 << bits :].sum()), sums)
        # what float32 rounds to zero is not zero; it belongs into the lowest bin, with the smallest denormals
        counts[0] += sums.count - int(counts.sum())
        bins = np.flatnonzero(counts > 0)  # of booleans, which takes a tenth of the time
        return Sketch(sums, bins, counts[bins].astype(np.int64), bits)
    values = np.sort(_finite_magnitudes(x))
    with np.errstate(under="ignore"):
        # what is too large for float32 goes into the last bin, so that the bins count everything
        narrow = np.minimum(values, np.finfo(np.float32).max).astype(np.float32)
    pattern, low = narrow.view(np.int32), int(np.searchsorted(values, _NORMAL))
    # what `narrow` has, but where denormals are flushed
    pattern[:low] = np.rint(values[:low] / _LEAST)
    placed = (pattern >> (23 - bits)).astype(np.int64)  # ascending, as the values are
    changes = np.flatnonzero(placed[1:] != placed[:-1]) + 1
    edges = np.concatenate([[0], changes, [placed.size]]) if placed.size else np.zeros(1, np.int64)
    return Sketch(sums, placed[edges[:-1]], edges[1:] - edges[:-1], bits, values)


def _finite_magnitudes(x: Array) -> NDArray[np.float64]:
    """Return the finite non-zero magnitudes of an array that has few."""
    if device_code(x) is not None:  # its zeros, of which it may have many, stay on the device
        return _positive(as_numpy(select(x, 0.0).values))
    return np.concatenate([np.empty(0), *(_positive(chunk) for _, chunk in flat_chunks(x))])


def _positive(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the finite non-zero magnitudes of float32 or float64 elements."""
    magnitude: NDArray[Any] = np.abs(values)
    positives: NDArray[np.float64]
    if magnitude.dtype == np.float64:
        positives = magnitude[np.isfinite(magnitude) & (magnitude > 0)]
        return positives
    # by bits: where denormals are flushed, they are zero to a comparison of floats
    bits = magnitude.view(np.int32)
    bits = bits[(bits > 0) & (bits < 0x7F800000)]
    positives = bits.view(np.float32).astype(np.float64)
    tiny = positives < _NORMAL
    positives[tiny] = bits[tiny] * _LEAST
    return positives
