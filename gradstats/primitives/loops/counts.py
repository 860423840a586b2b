"""Counts of magnitudes: from a threshold on, and by their leading bits."""

from __future__ import annotations

from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.loops.compiled import Written, compiled, has
from gradstats.primitives.loops.words import (
    INFINITY,
    LINE,
    MASK,
    SUMMED,
    WORD,
    compress,
    fetch_ahead,
    pair,
    view,
    within,
)

__all__ = [
    "block_count",
    "block_counts",
    "block_histogram",
    "block_tail_histogram",
    "counts_of_all",
    "counts_of_tail",
    "descend",
    "histograms_of_parts",
]

_PAIRS = LINE // 2
"""Pairs of elements of a cache line."""
_ROOM = local()
"""A thread's counters, all 0 between calls: of new memory, every page would be asked for again."""


def _count(x: Any, low: Any) -> Any:
    bits = x.view(np.int32) & MASK
    return np.count_nonzero((low <= bits) & (bits < INFINITY))


@compiled(_count, nogil=True)
def block_count(x: NDArray[np.float32], low: np.int32) -> int:
    """Count the magnitudes whose bits are from `low` to below those of infinity.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    low : int32
        Bits of the least magnitude that is counted, at least 1.
    """
    # or `width` would wrap around
    if low >= INFINITY:
        return 0
    bits = view(x, np.uint32)
    least, width, mask = np.uint32(low), np.uint32(INFINITY - 1 - low), np.uint32(MASK)
    count = 0
    for start in range(0, x.size, SUMMED):
        part = bits[start : start + SUMMED]
        # 32 bits, as the elements have, so that vectors count as many as they compare
        n = np.int32(0)
        for i in range(part.size):
            # one unsigned comparison: what is below `least` wraps around, and is larger than `width`
            n = np.int32(n + np.int32(np.uint32((part[i] & mask) - least) <= width))
        count += n
    return count


def _histogram(bits: Any, shift: Any, counts: Any) -> None:
    counts += np.bincount((bits & MASK) >> shift, minlength=counts.size).astype(counts.dtype)


@compiled(_histogram, nogil=True)
def block_histogram(bits: NDArray[np.uint32], shift: int, counts: Written[np.uint32]) -> None:
    """Count a block's elements by their leading magnitude bits.

    Parameters
    ----------
    bits : ndarray of uint32, shape (n,)
        Block, as bits.
    shift : int
        Trailing bits that do not tell bins apart.
    counts : ndarray of uint32 or uint64
        Added to: one counter per bin.
    """
    # two elements are read at once; an unsigned index needs no test for Python's negative ones
    pairs = bits.size // 2
    low, high = np.uint64(shift), np.uint64(32 + shift)
    # without the sign, and without the other element
    mask = (np.uint64(1) << np.uint64(31 - shift)) - np.uint64(1)
    whole = pairs - pairs % _PAIRS
    for start in range(0, whole, _PAIRS):
        fetch_ahead(bits, 2 * start, 2 * _PAIRS)
        for i in range(start, start + _PAIRS):
            both = pair(bits, 2 * i)
            counts[(both >> low) & mask] += np.uint32(1)
            counts[(both >> high) & mask] += np.uint32(1)
    for i in range(whole, pairs):
        both = pair(bits, 2 * i)
        counts[(both >> low) & mask] += np.uint32(1)
        counts[(both >> high) & mask] += np.uint32(1)
    if bits.size % 2:
        counts[(np.uint64(bits[-1]) >> low) & mask] += np.uint32(1)


@compiled(nogil=True)
def _count_into(
    bits: Written[np.uint32],
    mask: np.uint32,
    shift: int,
    first: np.uint32,
    counts: Written[np.uint32],
    top: np.uint32,
) -> np.uint32:
    """Count magnitudes by their leading bits, from the bin `first` on, and overwrite them by their bins.

    Counters from `top` on are set to 0 when needed; returns where those begin that were not.
    """
    most = np.uint32(0)
    for i in range(bits.size):
        here = ((bits[i] & mask) >> np.uint32(shift)) - first
        most = here if here > most else most
        bits[i] = here
    while bits.size and top <= most:
        counts[top] = 0
        top += np.uint32(1)
    for i in range(bits.size):
        counts[bits[i]] += np.uint32(1)
    return top


def _tail_histogram(bits: Any, low: Any, shift: Any, counts: Any) -> Any:
    magnitude = bits & MASK
    tail = magnitude[(low <= magnitude) & (magnitude < INFINITY)]
    histogram = np.bincount((tail >> shift) - (low >> shift))
    counts[: histogram.size] = histogram
    return histogram.size


@compiled(_tail_histogram, needs="avx512f", nogil=True)
def block_tail_histogram(
    bits: NDArray[np.uint32], low: int, shift: int, counts: Written[np.uint32]
) -> int:
    """Count a block's finite magnitudes from a bin on by their leading bits.

    Of a gradient most are below; they are left out 64 at a time, for counting takes longer than comparing.

    Parameters
    ----------
    bits : ndarray of uint32, shape (n,)
        Block, as bits.
    low : int
        Least bits of the first bin, from 1 on; a multiple of 2^shift but for the lowest bin.
    shift : int
        Trailing bits that do not tell bins apart.
    counts : ndarray of uint32
        Written: one counter per bin, from that of `low` on. Those after the last that is not 0 are left as they are.

    Returns
    -------
    int
        Number of bins up to that one.
    """
    if low >= INFINITY:
        return 0
    mask, least, width = np.uint32(MASK), np.uint32(low), np.uint32(INFINITY - 1 - low)
    first = np.uint32(low) >> np.uint32(shift)
    # a whole word is written each time, whatever of it is kept
    tail = np.empty(SUMMED + WORD, np.uint32)
    n = 0
    top = np.uint32(0)
    whole = bits.size - bits.size % WORD
    for start in range(0, whole, WORD):
        fetch_ahead(bits, start, WORD)
        n = compress(bits, start, within(bits, start, mask, least, width), tail, n)
        if n > SUMMED - WORD:
            top = _count_into(tail[:n], mask, shift, first, counts, top)
            n = 0
    for i in range(whole, bits.size):
        # written in any case, and overwritten if it does not count: no branch to foresee
        tail[n] = bits[i]
        n += np.int64((bits[i] & mask) - least <= width)
    return np.int64(_count_into(tail[:n], mask, shift, first, counts, top))


def _counts(bits: Any, first: Any, shift: Any) -> Any:
    magnitude = bits & MASK
    tail = magnitude[(max(first << shift, 1) <= magnitude) & (magnitude < INFINITY)]
    return np.bincount((tail >> shift) - first)


@compiled(_counts, needs="avx512f", nogil=True)
def counts_of_tail(bits: NDArray[np.uint32], first: int, shift: int) -> NDArray[np.uint32]:
    """Return the counts of a block's bins from one on, to the last that is not empty.

    Parameters
    ----------
    bits : ndarray of uint32, shape (n,)
        Block, as bits.
    first : int
        Number of the first bin; zeros are in none.
    shift : int
        Trailing bits that do not tell bins apart.
    """
    # not cleared: the loop does that up to the largest magnitude
    counts = np.empty((np.int64(INFINITY) >> shift) - first, np.uint32)
    return counts[: block_tail_histogram(bits, max(first << shift, 1), shift, counts)]


def _histograms_of_parts(
    bits: Any, parts: Any, sums: Any, first: Any, shift: Any, bins: Any, counts: Any, used: Any
) -> None:
    for i, (start, stop) in enumerate(parts, first):
        magnitude = bits[start:stop] & MASK
        row = np.bincount(magnitude[magnitude > 0] >> shift, minlength=counts[:, i].size)
        row[bins:] = 0
        row = row.reshape(len(counts), -1)
        some = row.any(axis=1)
        counts[some & ~used] = 0
        counts[some, i] = row[some]
        used |= some


@compiled(_histograms_of_parts, nogil=True)
def histograms_of_parts(
    bits: NDArray[np.uint32],
    parts: NDArray[np.int64],
    sums: NDArray[np.float64],
    first: int,
    shift: int,
    bins: int,
    counts: Written[np.uint32],
    used: Written[np.bool_],
) -> None:
    """Count the elements of several parts by their leading magnitude bits, each part by itself.

    Parameters
    ----------
    bits : ndarray of uint32, shape (n,)
        Elements, as bits.
    parts : ndarray of int64, shape (some, 2)
        Where each part begins and ends.
    sums : ndarray of float64, shape (some, 7)
        What :func:`moments_of_parts` found: zeros are not counted, and bins are looked at from that of the largest
        down to that of the last element.
    first : int
        Number of the first of them.
    shift : int
        Trailing bits that do not tell bins apart.
    bins : int
        Number of bins, from the lowest on, that are wanted.
    counts : ndarray of uint32, shape (chunks, parts, size)
        Written: the bins of every part, `size` of them in a chunk. A chunk that is not `used` is left as it was.
    used : ndarray of bool, shape (chunks,)
        Written: which chunks have a count of any part, now or before.
    """
    chunks, _, size = counts.shape
    # all 0 again after each part, as every count is moved out
    row = np.zeros(chunks * size, np.uint32)
    for i in range(len(parts)):
        block_histogram(bits[parts[i, 0] : parts[i, 1]], shift, row)
        row[0] -= np.uint32(sums[i, 1])  # they share it with the smallest denormals
        row[bins:] = 0
        # when so many are found, the bins below are empty
        left = np.int64(sums[i, 0])
        chunk = (np.int64(np.float32(sums[i, 6]).view(np.int32)) >> shift) // size
        while left > 0 and chunk >= 0:
            here = row[chunk * size : (chunk + 1) * size]
            some = np.uint32(0)
            for j in range(size):
                some += here[j]
            if some > 0:
                if not used[chunk]:
                    counts[chunk] = 0
                    used[chunk] = True
                for j in range(size):  # an assignment of slices takes seconds to compile
                    counts[chunk, first + i, j] = here[j]
                    here[j] = 0
            left -= np.int64(some)
            chunk -= 1


def _descend(counts: Any, k: Any) -> Any:
    above = counts[::-1].cumsum(dtype=np.int64)
    i = int((above <= k).sum())
    return (counts.size - 1 - i, above[i]) if i < counts.size else (-1, counts.sum())


@compiled(_descend, nogil=True)
def descend(counts: NDArray[np.int64], k: float) -> tuple[int, int]:
    """Go down from the last bin until more than k elements are reached; return the bin and that number.

    Parameters
    ----------
    counts : ndarray of uint32, uint64 or int64, shape (bins,)
        Elements per bin.
    k : float
        Number of elements to exceed.

    Returns
    -------
    (int, int)
        Bin, or −1 if there are no more than k elements, and elements in it and above it.
    """
    above = np.int64(0)
    for i in range(counts.size - 1, -1, -1):
        above += np.int64(counts[i])
        if above > k:
            return i, above
    return -1, above


def counts_of_all(bits: NDArray[np.uint32], first: int, shift: int) -> NDArray[np.uint32]:
    """Return what :func:`counts_of_tail` does, on any processor.

    Parameters
    ----------
    bits, first, shift : object
        The same.
    """
    room: NDArray[np.uint32] | None = getattr(_ROOM, "counts", None)
    # taken, as an interrupt may leave counts in it
    _ROOM.counts = None
    if room is None or room.size != 1 << (31 - shift):
        room = np.zeros(1 << (31 - shift), np.uint32)
    block_histogram(bits, shift, room)
    if first == 0:
        room[0] -= np.uint32(bits.size - np.count_nonzero(bits & np.uint32(MASK)))
    # from the top on, two counters at a time: most of them are beyond any gradient's largest
    above = int(INFINITY) >> shift
    # may begin with the counter before `first`, so `last` may be no more than that
    pairs = room[:above].view(np.uint64)[first // 2 :] != 0
    empty = int(pairs[::-1].argmax()) if pairs.size else 0
    last = above - 2 * empty if pairs[pairs.size - 1 - empty :].any() else first
    last -= last > first and room[last - 1] == 0
    # a copy, as the next call counts here
    counts = room[first : max(last, first)].copy()
    # from there up to infinity all are 0
    room[: max(last, first)] = 0
    room[above:] = 0  # NaN and infinities
    _ROOM.counts = room
    return counts


block_counts = counts_of_tail if has("avx512f") else counts_of_all
"""Return the counts of a block's bins from one on, to the last that is not empty, as fast as the processor can."""
