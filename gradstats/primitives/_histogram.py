"""A histogram of |g| over the bits of a float: fixed bins, so that histograms of chunks, ranks and steps add up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives._array import Array, check, flat_chunks

__all__ = ["BINS", "Histogram", "bin_edges", "histogram"]

_SHIFT = 16
BINS = 1 << 15
"""Bins of magnitude: the exponent and the 7 leading mantissa bits, 0.4 to 0.8 % wide."""

_INFINITE = 0xFF << 7
"""First bin of the infinities and NaNs."""


@cache
def bin_edges() -> NDArray[np.float64]:
    """Return the left edges of the finite bins and the right edge of the last, ascending, shape (32,641,)."""
    bits = np.arange(_INFINITE + 1, dtype=np.uint32) << np.uint32(_SHIFT)
    edges = bits.view(np.float32).astype(np.float64)
    edges[-1] = 2.0**128
    return edges


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of |g| per bin; `a + b` is the histogram of both arrays together.

    Attributes
    ----------
    counts : int64 array (32640,), finite non-zero magnitudes between successive :func:`bin_edges`.
    zeros, nonfinite : exact zeros; NaN and infinities.
    """

    counts: NDArray[np.int64]
    zeros: int
    nonfinite: int

    @property
    def numel(self) -> int:
        """Elements counted, zeros and non-finite ones included."""
        return int(self.counts.sum()) + self.zeros + self.nonfinite

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            self.counts + other.counts, self.zeros + other.zeros, self.nonfinite + other.nonfinite
        )

    def exceedances(self) -> NDArray[np.int64]:
        """Return, for each bin's left edge, how many magnitudes lie at or above it, shape (32640,)."""
        return np.cumsum(self.counts[::-1])[::-1]

    def upper_quantile(self, k: float) -> float:
        """Return the magnitude that about k elements reach, by linear interpolation inside its bin.

        0 if no more than k elements are non-zero and finite.
        """
        above = self.exceedances()
        if k >= above[0]:
            return 0.0
        i = int(np.searchsorted(-above, -k, side="right")) - 1
        edges = bin_edges()
        inside = (above[i] - k) / self.counts[i]
        return float(edges[i] + inside * (edges[i + 1] - edges[i]))


def histogram(x: Array) -> Histogram:
    """Count |x| in 32,640 bins of 0.4–0.8 % width, one pass, counters in int64.

    Parameters
    ----------
    x : array of any shape, float16, float32, float64 (rounded to float32) or bfloat16, any device.

    Examples
    --------
    >>> import numpy as np
    >>> h = histogram(np.array([1.0, 2.0, 4.0, 0.0])) + histogram(np.array([8.0, np.inf]))
    >>> h.numel, h.zeros, h.nonfinite
    (6, 1, 1)
    """
    x = check(x)
    counts = np.zeros(BINS, np.int64)
    zeros = 0
    for _, chunk in flat_chunks(x):
        with np.errstate(over="ignore"):  # float64 beyond float32's range counts as infinite
            magnitude = np.abs(chunk).astype(np.float32, copy=False)
        zeros += magnitude.size - int(np.count_nonzero(magnitude))
        counts += np.bincount(magnitude.view(np.uint32) >> np.uint32(_SHIFT), minlength=BINS)
    # Bin 0 holds the zeros beside the smallest denormals.
    counts[0] -= zeros
    return Histogram(counts[:_INFINITE].copy(), zeros, int(counts[_INFINITE:].sum()))
