"""Sums over the magnitudes that reach any threshold: one pass for a histogram, and each threshold is a look-up."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.arrays import Array, flat_blocks, is_tensor
from gradstats.primitives.backend import device_code
from gradstats.primitives.blocks import map_blocks
from gradstats.primitives.histogram import bin_edges, histogram

__all__ = [
    "BITS",
    "DeviceTails",
    "Tails",
    "first_reaching",
    "middles",
    "part_above",
    "tails",
    "tails_of_block",
]

_SHARE = 1 / 8
"""Share of a tail's number, and of its sum of squares, up to which a cell's middle stands for what lies in it."""
_SUBNORMAL = 2.0**-14
"""The same of all magnitudes, for those that are subnormal, whose cells are wide; a few of 10⁻⁴⁵ move a sum of logs."""
BITS = 9
"""Bits that tell cells apart. With ten, those of a gradient are more than a first-level cache holds."""


class Tails(NamedTuple):
    """What reaches the left end of each of some ascending disjoint cells: its number and its sums.

    Attributes
    ----------
    left, right : ndarray of float64, shape (cells,)
        Ends of each cell, equal where its magnitudes are known.
    sums : float64 array, shape (cells + 1, 4)
        Number, sum and sum of squares of what lies in each cell and above it, taken at the cells' midpoints, and the
        number in the cell; zeros last.
    """

    left: NDArray[np.float64]
    right: NDArray[np.float64]
    sums: Any

    @classmethod
    def of_cells(
        cls, left: NDArray[np.float64], right: NDArray[np.float64], weight: NDArray[np.float64]
    ) -> Tails:
        """Add up cells in memory.

        Parameters
        ----------
        left, right : ndarray of float64, shape (cells,)
            Ends of each cell, ascending.
        weight : ndarray of float64, shape (cells,)
            Number of magnitudes in each cell.
        """
        from gradstats.primitives.loops.sums import tail_sums

        sums = np.zeros((left.size + 1, 4))
        tail_sums(weight, middles(left, right), sums)
        return cls(left, right, sums)

    def tail(self, threshold: float) -> tuple[int, float, float]:
        """Return number, sum and sum of squares of the magnitudes that reach a threshold; compiled as it is, too.

        Parameters
        ----------
        threshold : float
            Magnitude η ≥ 0. Of the cell that it cuts, taken as evenly filled, the part above it counts.
        """
        i = first_reaching(self.right, threshold)
        if i == self.right.size:
            return 0, 0.0, 0.0
        return part_above(self.sums[i], float(self.left[i]), float(self.right[i]), threshold)

    def limit(self, least: int) -> float:
        """Return below which magnitude thresholds may be taken from these sums, in one move from a device.

        That is the left end of the last cell, as the largest may lie below its midpoint, and 0 where midpoints do not
        stand for the magnitudes: many are equal, as after clipping, a few make up the sum of squares, or some are
        subnormal.

        Parameters
        ----------
        least : int
            Number of magnitudes in the shortest tail that is looked up.
        """
        if self.left is self.right or not self.left.size:  # cells are the numbers there are
            return math.inf
        count, squares, inside = (self.sums[:, i] for i in (0, 2, 3))
        normal = count[int(self.left.searchsorted(np.finfo(np.float32).tiny))]
        even = count[0] - normal <= _SUBNORMAL * count[0]
        enough = count[:-1] >= least
        where = sys.modules["torch"].where if is_tensor(count) else np.where
        # no cell may dominate any tail that it is in, and a tail may begin at each cell
        for part, of in ((inside[:-1], count[:-1]), (squares[:-1] - squares[1:], squares[:-1])):
            # the smallest that it is in begins with it, or is the last that is long enough
            smallest = where(enough, of, where(enough, of, math.inf).min())
            even = even & ~(part > _SHARE * smallest).any()
        # one number from the device for both: 0 where middles mislead, else where the last count is
        last = int((count > 0).sum() * even)
        return self.left.item(last - 1) if last else 0.0

    def sum_log(self) -> float:
        """Return the sum of the logarithms of all magnitudes."""
        # no product of BLAS, whose threads keep other ranks' cores busy and decide over the last bits
        return float((self.sums[:-1, 3] * np.log(middles(self.left, self.right))).sum())


class DeviceTails(Tails):
    """The same with the sums on the gradient's device, of which a look-up moves a row.

    Attributes
    ----------
    middle : float64 tensor, shape (cells,)
        Middles of the cells, on the device.
    """

    middle: Any

    def tail(self, threshold: float) -> tuple[int, float, float]:
        """Return number, sum and sum of squares of the magnitudes that reach a threshold.

        Parameters
        ----------
        threshold : float
            Magnitude η ≥ 0.
        """
        i = first_reaching(self.right, threshold)
        if i == self.right.size:
            return 0, 0.0, 0.0
        return part_above(self.sums[i].tolist(), self.left.item(i), self.right.item(i), threshold)

    def sum_log(self) -> float:
        """Return the sum of the logarithms of all magnitudes."""
        # 0 log 0 is 0: the cell of zeros, which half precision has, is empty
        return float(sys.modules["torch"].special.xlogy(self.sums[:-1, 3], self.middle).sum())


def first_reaching(ends: NDArray[np.float64], threshold: float) -> int:
    """Return the place of the first of some ascending numbers that reaches a threshold, or how many there are.

    Parameters
    ----------
    ends : ndarray of float64, shape (n,)
        The numbers.
    threshold : float
        Threshold.
    """
    low, high = 0, ends.size
    while low < high:  # not NumPy's search, which takes a second to compile
        middle = (low + high) // 2
        if ends[middle] < threshold:
            low = middle + 1
        else:
            high = middle
    return low


def part_above(
    row: Sequence[float], left: float, right: float, threshold: float
) -> tuple[int, float, float]:
    """Return number, sum and sum of squares from a threshold on, of those from the left end of its cell on.

    Parameters
    ----------
    row : sequence of 4 float
        Number, sum and sum of squares of what reaches the left end, and the number in the cell, taken as evenly filled.
    left, right : float
        Its ends.
    threshold : float
        Threshold, at most the right end.
    """
    # numbers of Python's, which are faster there than NumPy's
    count, total, squares, inside = float(row[0]), float(row[1]), float(row[2]), float(row[3])
    if inside > 0 and left < threshold:
        # what lies below the threshold is summed at its own middle, as cells are
        under = inside * (threshold - left) / (right - left)
        middle = (left + threshold) / 2
        count -= under
        total -= under * middle
        squares -= under * (middle * middle)
    # a part of an element is none; mean and variance stay as they are, or a threshold's last bits would count
    whole = round(count)
    share = whole / count if count > 0 else 0.0
    return whole, share * total, share * squares


def middles(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the middles of cells; that of one without width is its value, also where twice that is no number.

    Parameters
    ----------
    left, right : ndarray of float64, shape (cells,)
        Ends of each cell.
    """
    return left + (right - left) / 2


@lru_cache(maxsize=8)
def _middles_there(device: Any, bits: int, known: bool) -> Any:
    """Return the middles of all cells on a device, which takes a megabyte to move."""
    edges = bin_edges(bits)
    middle = edges[:-1] if known else middles(edges[:-1], edges[1:])
    return sys.modules["torch"].from_numpy(middle).to(device)


def tails(x: Array, least: float = 0.0) -> Tails:
    """Add up the magnitudes of a gradient from above, in one pass.

    Parameters
    ----------
    x : array_like
        Checked array of any shape and device, of any floating dtype; float64 is rounded to float32.
    least : float
        Least threshold that will be looked up: cells below its own are left out.

    Returns
    -------
    Tails
        Of float16 and bfloat16 the cells are the numbers there are, and the sums exact. Those of float32 have 9 bits:
        a magnitude is at most 0.1 % from the middle of its cell, a sum of many some 10⁻⁶ from theirs. They are the
        same on every device, but for the order in which cells are added up.
    """
    known = x.dtype.itemsize == 2  # the cells have as many bits as the numbers
    bits = BITS if not known else 7 if "bfloat16" in str(x.dtype) else 10
    edges = bin_edges(bits)
    lowest = max(int(edges.searchsorted(least, side="right")) - 1, 0)
    code = device_code(x)
    if code is not None:
        from gradstats.primitives import operators

        left = edges[lowest:-1]
        right = left if known else edges[lowest + 1 :]
        # the bins behind the last edge are infinity and NaN
        weight = code.counts(x, bits)[0][lowest : lowest + left.size]
        middle = _middles_there(x.device, bits, known)[lowest:]
        device_tails = DeviceTails(left, right, operators.tail_sums(weight, middle))
        device_tails.middle = middle
        return device_tails
    counts = _counts_from(x, bits, lowest)
    if lowest:  # from a threshold on most cells have a count; from zero on few
        return _of_counts(counts, lowest, bits, known)
    bins = np.flatnonzero(counts != 0)
    left, right, counts = edges[bins], edges[bins + 1], counts[bins]
    return Tails.of_cells(left, left if known else right, counts.astype(np.float64))


def tails_of_block(x: NDArray[np.float32], least: float) -> Tails:
    """Return what :func:`tails` does of a block in memory, without the checks for other dtypes and devices.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    least : float
        Least threshold that will be looked up, above 0.
    """
    from gradstats.primitives.loops.counts import block_counts

    lowest = max(int(bin_edges(BITS).searchsorted(least, side="right")) - 1, 0)
    counts = block_counts(x.view(np.uint32), lowest, 23 - BITS)
    return _of_counts(counts, lowest, BITS, known=False)


def _of_counts(counts: NDArray[Any], lowest: int, bits: int, known: bool) -> Tails:
    """Add up the cells of a histogram from one on."""
    edges = bin_edges(bits)
    left, right = (edges[lowest + i : lowest + i + counts.size] for i in (0, 1))
    return Tails.of_cells(left, left if known else right, counts.astype(np.float64))


def _counts_from(x: Array, bits: int, lowest: int) -> NDArray[Any]:
    """Return the counts of a histogram's bins, from one on to the last that has any."""
    from gradstats.primitives.loops import counts as loops

    view = flat_blocks(x, 1)
    if not (lowest and view and view[0].dtype.type is np.float32):
        counts = histogram(x, bits).counts[lowest:]
        some = np.flatnonzero(counts != 0)
        return counts[: some[-1] + 1 if some.size else 0]

    def count(_: int, block: NDArray[Any]) -> NDArray[Any]:
        counts: NDArray[np.uint32] = loops.block_counts(block.view(np.uint32), lowest, 23 - bits)
        return counts

    parts = map_blocks(count, x)
    if len(parts) == 1:
        return parts[0]
    total = np.zeros(max(map(len, parts), default=0), np.int64)
    for each in parts:
        # each block's counts end at its own largest magnitude
        total[: each.size] += each
    return total
