"""A histogram of |g| over the leading bits of a float.

The bins are fixed, so the histograms of chunks, ranks and steps add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives.arrays import Array, check, flat_blocks, numel_of
from gradstats.primitives.backend import device_code
from gradstats.primitives.blocks import map_runs
from gradstats.primitives.ratio import check_count, check_number

__all__ = ["Histogram", "bin_edges", "check_bits", "histogram", "histogram_quantile"]

_MANTISSA = 23
_INFINITE = 0xFF
_FEW = 1 << 15
"""Elements up to which an order statistic costs less than bins to count them in."""


def check_bits(bits: int) -> int:
    """Return a number of mantissa bits if a histogram can have it, from 0 to 12.

    Parameters
    ----------
    bits : int
        Leading mantissa bits that tell bins apart.

    Raises
    ------
    InputError
        If it cannot.
    """
    return check_count(bits, "bits", 0, 12)


@cache
def bin_edges(bits: int = 7) -> NDArray[np.float64]:
    """Return the left edges of the finite bins and the right edge of the last.

    Parameters
    ----------
    bits : int
        Leading mantissa bits that tell bins apart.

    Returns
    -------
    ndarray of float64, shape (255·2^bits + 1,)
        Edges, ascending. Cached: do not write to it.
    """
    patterns = np.arange((_INFINITE << bits) + 1, dtype=np.uint32) << np.uint32(_MANTISSA - bits)
    edges = patterns.view(np.float32).astype(np.float64)
    # the pattern there is that of infinity
    edges[-1] = 2.0**128
    return edges


def _edge(i: int, bits: int) -> float:
    if i == _INFINITE << bits:
        return 2.0**128
    return float(np.uint32(i << (_MANTISSA - bits)).view(np.float32))


# no ==, which arrays do not answer with one truth value
@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Counts of |g| per bin; ``a + b`` is the histogram of both arrays together.

    Attributes
    ----------
    counts : integer array, shape (255·2^bits,)
        Number of finite non-zero magnitudes between successive :func:`bin_edges`.
    zeros : int
        Number of exact zeros.
    nonfinite : int
        Number of NaN and infinities.
    bits : int
        Leading mantissa bits that tell bins apart.
    """

    counts: NDArray[Any]
    zeros: int
    nonfinite: int
    bits: int = 7

    @property
    def numel(self) -> int:
        """Number of elements counted, with zeros and non-finite ones."""
        return int(self.counts.sum()) + self.zeros + self.nonfinite

    def __add__(self, other: Histogram) -> Histogram:
        if self.bits != other.bits:
            raise InputError(
                f"histograms of {self.bits} and {other.bits} bits do not add; coarsen the finer one"
            )
        return Histogram(
            # 32-bit counts of two arrays may not fit 32 bits together
            np.add(self.counts, other.counts, dtype=np.int64),
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.bits,
        )

    def coarsen(self, bits: int) -> Histogram:
        """Return the histogram with fewer, wider bins: the same as having counted with `bits`.

        Parameters
        ----------
        bits : int
            Leading mantissa bits to keep, at most the present ones.

        Raises
        ------
        InputError
            If there are not as many bits.
        """
        bits = check_count(bits, f"bits coarser than {self.bits} bits", 0, self.bits)
        merged = self.counts.reshape(-1, 1 << (self.bits - bits)).sum(axis=1, dtype=np.int64)
        return Histogram(merged, self.zeros, self.nonfinite, bits)

    def exceedances(self) -> NDArray[np.int64]:
        """Return how many magnitudes lie at or above the left edge of each bin, in the shape of `counts`."""
        return np.cumsum(self.counts[::-1], dtype=np.int64)[::-1]

    def upper_quantile(self, k: float) -> float:
        """Return the magnitude that about k elements reach.

        Inside its bin the density is taken as linear, with a slope from the neighbouring bins.

        Parameters
        ----------
        k : float
            Number of elements.

        Returns
        -------
        float
            Magnitude, 0 if no more than k elements are non-zero and finite.

        Raises
        ------
        InputError
            If k is no finite number from 0 on.
        """
        from gradstats.primitives.loops.counts import descend

        k = check_number(k, "k", 0, math.inf, "[)", ", a number of elements")
        i, above = descend(self.counts, k)
        # the outermost bins are their own neighbours; i is −1 where no bin is reached
        ends = max(i - 1, 0), max(i, 0), min(i + 1, self.counts.size - 1)
        before, inside, after = (int(self.counts[j]) for j in ends)
        return _inside_bin(i, above - k, (before, inside, after), self.bits)


def _inside_bin(i: int, under: float, around: tuple[int, int, int], bits: int) -> float:
    """Return the magnitude in bin i below which `under` of its elements lie; 0 for no bin.

    `around` has the numbers of elements in the bin before it, in it, and in the one after it.
    """
    if i < 0:
        return 0.0
    before, n, after = around
    fraction = under / n
    left, right = _edge(i, bits), _edge(i + 1, bits)
    # bins on both sides of a power of two are taken as equally wide
    slope = 0.0
    if 0 < i < (_INFINITE << bits) - 1:
        # density across the bin from 1 - slope to 1 + slope times its mean
        slope = min(max((after - before) / (4 * n), -1.0), 1.0)
    t = fraction
    # the root is 0/0 without a slope; up to here t = fraction is as good
    if abs(slope) > 1e-9:
        # solve (1 - slope) t + slope t² = fraction
        b = 1 - slope
        t = (-b + np.sqrt(b * b + 4 * slope * fraction)) / (2 * slope)
    return float(left + t * (right - left))


def histogram(x: Array, bits: int = 7) -> Histogram:
    """Count |x| per bin in one pass, with counters that cannot overflow.

    Parameters
    ----------
    x : array_like
        Array of any shape and device, float16, float32, float64 (rounded to float32) or bfloat16.
    bits : int
        Leading mantissa bits that tell bins apart, 0 to 12. A bin is 2^(−bits−1) to 2^−bits of its magnitude wide: 7
        bits (0.4 to 0.8 %, 32,640 bins) are small enough to store and send, 10 resolve quantiles to 0.05 to 0.1 %.

    Returns
    -------
    Histogram
        Counts, which are the same for a NumPy array and a tensor.

    Raises
    ------
    InputError
        If `x` is not a dense floating-point array, or `bits` is outside 0 to 12.

    Examples
    --------
    >>> import numpy as np
    >>> h = histogram(np.array([1.0, 2.0, 4.0, 0.0])) + histogram(np.array([8.0, np.inf]))
    >>> h.numel, h.zeros, h.nonfinite
    (6, 1, 1)
    """
    bits, x = check_bits(bits), check(x)
    finite = _INFINITE << bits
    code = device_code(x)
    if code is not None:
        from gradstats.primitives import operators

        counted, none = code.counts(x, bits)
        occupied, inside = operators.occupied(counted)
        dense = np.zeros(1 << (8 + bits), np.int64)
        dense[occupied] = inside
        return Histogram(dense[:finite], int(none), int(dense[finite:].sum()), bits)
    # 32-bit counters keep twice as many bins in the cache, and cannot overflow below 2³² elements
    dtype = np.uint32 if numel_of(x) < 2**32 else np.uint64
    runs = map_runs(lambda run, _: _count(run, bits, dtype), x)
    total = runs[0][0]
    for counts, _ in runs[1:]:
        total = np.add(total, counts, dtype=np.int64)
    zeros = sum(z for _, z in runs)
    # the lowest bin holds the zeros beside the smallest denormals
    total[0] -= total.dtype.type(zeros)
    return Histogram(total[:finite], zeros, int(total[finite:].sum()), bits)


def histogram_quantile(x: Array, k: float, bits: int) -> tuple[float, int]:
    """Return the magnitude that about k elements reach, by a histogram that stays where the array is.

    Parameters
    ----------
    x : array_like
        Checked array of any shape, floating dtype and device.
    k : float
        Number of elements.
    bits : int
        Leading mantissa bits that tell bins apart, 0 to 12.

    Returns
    -------
    quantile : float
        The same as :meth:`Histogram.upper_quantile`.
    nonfinite : int
        Number of NaN and infinities.
    """
    code = device_code(x)
    if code is None and numel_of(x) <= _FEW and (few := flat_blocks(x, 1)):
        return _quantile_of_few(few[0], k, bits)
    if code is None:
        h = histogram(x, bits)
        return h.upper_quantile(k), h.nonfinite
    from gradstats.primitives import operators

    counted, _ = code.counts(x, bits)
    i, reached, around, nonfinite = operators.descend(counted, k, _INFINITE << bits)
    return _inside_bin(i, reached - k, around, bits), nonfinite


def _quantile_of_few(flat: NDArray[Any], k: float, bits: int) -> tuple[float, int]:
    """Return what :func:`histogram_quantile` does without its bins, which are more than the elements."""
    with np.errstate(over="ignore"):
        narrow = flat.astype(np.float32, copy=False)
    # as whole numbers, magnitudes keep their order, and infinity and NaN come last
    pattern = narrow.view(np.int32) & np.int32(0x7FFFFFFF)
    shift, finite = _MANTISSA - bits, _INFINITE << bits
    nonfinite = int(np.count_nonzero(pattern >= _INFINITE << _MANTISSA))
    # the bin where more than k are reached is that of the element after the k-th, from above
    rank = pattern.size - nonfinite - math.floor(k) - 1
    if rank < 0:
        return 0.0, nonfinite
    reached = int(np.partition(pattern, rank)[rank])
    if reached == 0:  # no more than k that are not zero
        return 0.0, nonfinite
    i = reached >> shift
    edges = [max((i + j) << shift, 1) for j in (-1, 0, 1, 2)]
    up_to = [int(np.count_nonzero(pattern >= edge)) for edge in edges]
    before, inside, after = (a - b for a, b in pairwise(up_to))
    around = inside if i == 0 else before, inside, inside if i == finite - 1 else after
    # all that is not finite lies above every edge, and was counted
    return _inside_bin(i, up_to[1] - nonfinite - k, around, bits), nonfinite


def _count(
    run: Iterable[tuple[int, NDArray[Any]]], bits: int, dtype: type[np.unsignedinteger[Any]]
) -> tuple[NDArray[Any], int]:
    """Return the counts of successive blocks, and their exact zeros."""
    from gradstats.primitives.loops.counts import block_count, block_histogram

    shift = _MANTISSA - bits
    counts = np.zeros(1 << (8 + bits), dtype)
    zeros = lowest = 0
    for _, block in run:
        with np.errstate(over="ignore"):  # float64 beyond float32's range counts as infinite
            narrow = block.astype(np.float32, copy=False)
        block_histogram(narrow.view(np.uint32), shift, counts)
        # zeros go to the lowest bin: a block that adds nothing there has none, and is not read again
        if added := int(counts[0]) - lowest:
            lowest += added
            # by bits: where denormals are flushed, they are zero to a comparison of floats
            denormal = block_count(narrow, np.int32(1)) - block_count(narrow, np.int32(1 << shift))
            zeros += added - int(denormal)
    return counts, zeros
