"""Copies of a block: past the caches, and rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.loops.compiled import Written, compiled
from gradstats.primitives.loops.words import INFINITY, LINE, MASK, fence, store_past_caches

__all__ = ["block_bfloat16", "copy_past_caches"]


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
    first = min(n, -(target.ctypes.data // target.itemsize) % LINE) if factor == 1 else n
    last = n - (n - first) % LINE
    for i in range(first):
        target[i] = x[i] * factor
    for start in range(first, last, LINE):
        store_past_caches(target, start, x)
    for i in range(last, n):
        target[i] = x[i] * factor
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
        up = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1)))
        # above 3.39e38 nearest is infinity, which would say of a finite gradient that it is not
        reached = magnitude < infinity and (up & np.uint32(0x7F800000)) == infinity
        up = np.uint32(up - (np.uint32(reached) << np.uint32(16)))
        rounded[i] = np.uint16(0x7FC0) if magnitude > infinity else np.uint16(up >> np.uint32(16))
