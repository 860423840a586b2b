"""Copies of a block: past the caches, and rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.loops.compiled import Written, compiled
from gradstats.primitives.loops.words import INFINITY, LINE, MASK, fence, store_past_caches, view

__all__ = ["block_bfloat16", "copy_past_caches", "mean_of_bfloat16", "round_to_bfloat16"]

_ROW = 1 << 12
"""Elements that lie in the first-level cache between the two passes over them."""


def _copy(target: Any, x: Any, factor: Any) -> None:
    target[:] = x * factor


@compiled(_copy, nogil=True)
def copy_past_caches(
    target: Written[np.float32], x: NDArray[np.float32], factor: np.float32
) -> None:
    """Copy a vector without reading what it overwrites: less time than a copy takes, where no cache could keep it.

    Where it is multiplied, it is written as any other vector.

    Parameters
    ----------
    target : ndarray of float32, shape (n,)
        Written, and not kept in any cache.
    x : ndarray of float32, shape (n,)
        The vector.
    factor : float32
        What the elements are multiplied by.
    """
    n = target.size
    # up to the next cache line, as stores past the caches go to whole ones
    first = min(n, -(target.ctypes.data // target.itemsize) % LINE) if factor == 1 else n
    last = n - (n - first) % LINE
    for i in range(first):
        target[i] = x[i] * factor
    for start in range(first, last, LINE):
        store_past_caches(target, start, x)
    for i in range(last, n):
        target[i] = x[i] * factor
    # the processor keeps no order between such stores and others
    fence()


def _bfloat16(bits: Any, rounded: Any) -> None:
    magnitude, up = bits & MASK, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    up -= (magnitude < INFINITY) & (up & 0x7FFF == 0x7F80)
    rounded[:] = np.where(magnitude > INFINITY, 0x7FC0, up)


@compiled(_bfloat16, nogil=True)
def block_bfloat16(bits: NDArray[np.uint32], rounded: Written[np.uint16]) -> None:
    """Round to bfloat16, nearest even; NaN stays NaN, and what is finite stays finite.

    Parameters
    ----------
    bits : ndarray of uint32, shape (n,)
        Block, as bits.
    rounded : ndarray of uint16, shape (n,)
        Written: the bits of the rounded elements.
    """
    infinity = np.uint32(INFINITY)
    for i in range(bits.size):
        b = bits[i]
        magnitude = b & np.uint32(MASK)
        # half a unit of the 16 bits kept, less one where the last of them is even: ties go to even
        up = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1)))
        # above 3.39e38 nearest is infinity, which would say of a finite gradient that it is not
        reached = magnitude < infinity and (up & np.uint32(0x7F800000)) == infinity
        up = np.uint32(up - (np.uint32(reached) << np.uint32(16)))
        # what is kept of a NaN's bits may be those of infinity
        rounded[i] = np.uint16(0x7FC0) if magnitude > infinity else np.uint16(up >> np.uint32(16))


def _rounding(x: Any, rounded: Any) -> None:
    bits = x.view(np.uint32)
    magnitude, up = bits & MASK, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    up -= (magnitude <= INFINITY) & (up & 0x7FFF == 0x7F80)
    rounded[:] = np.where(magnitude > INFINITY, 0x7FC0, up)
    x -= (rounded.astype(np.uint32) << 16).view(np.float32)


@compiled(_rounding, nogil=True)
def round_to_bfloat16(x: Written[np.float32], rounded: Written[np.uint16]) -> None:
    """Round to bfloat16, nearest even, and leave what rounding took off.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block; afterwards less what it was rounded to.
    rounded : ndarray of uint16, shape (n,)
        Written: the bits of the rounded elements. NaN stays NaN; what is too large, or infinite, becomes the largest
        number.
    """
    infinity, bits = np.uint32(INFINITY), view(x, np.uint32)
    # in an array of its own, or the compiler could not tell that the second pass does not change what the first reads
    back = np.empty(_ROW, np.float32)
    back_bits = view(back, np.uint32)
    for start in range(0, x.size, _ROW):
        row = bits[start : start + _ROW]
        values = x[start : start + _ROW]
        sent = rounded[start : start + _ROW]
        for i in range(row.size):
            b = row[i]
            magnitude = b & np.uint32(MASK)
            up = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1)))
            reached = magnitude <= infinity and (up & np.uint32(0x7F800000)) == infinity
            up = np.uint32(up - (np.uint32(reached) << np.uint32(16)))
            # a NaN of its own, as half its bits may be infinity's; else the upper half
            up = np.uint32(0x7FC00000) if magnitude > infinity else up & np.uint32(0xFFFF0000)
            back_bits[i] = up
            sent[i] = np.uint16(up >> np.uint32(16))
        for i in range(values.size):
            values[i] -= back[i]


def _mean(sums: Any, ranks: Any, mean: Any) -> None:
    mean[:] = (sums.astype(np.uint32) << 16).view(np.float32) / ranks


@compiled(_mean, nogil=True, error_model="numpy")
def mean_of_bfloat16(
    sums: NDArray[np.uint16], ranks: np.float32, mean: Written[np.float32]
) -> None:
    """Divide sums in bfloat16 by the number of summands, in float32.

    Parameters
    ----------
    sums : ndarray of uint16, shape (n,)
        Bits of the sums.
    ranks : float32
        Number of summands.
    mean : ndarray of float32, shape (n,)
        Written.
    """
    back = np.empty(_ROW, np.float32)
    back_bits = view(back, np.uint32)
    for start in range(0, sums.size, _ROW):
        row, out = sums[start : start + _ROW], mean[start : start + _ROW]
        for i in range(row.size):
            back_bits[i] = np.uint32(row[i]) << np.uint32(16)
        for i in range(out.size):
            out[i] = back[i] / ranks
