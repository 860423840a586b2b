"""Loops over Rice-coded gaps, compiled: they read and write nothing but their own arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.loops.compiled import Written, compiled
from gradstats.primitives.loops.words import lowest

__all__ = ["decode_gaps", "encode_gaps", "gap_sums"]


def _gap_sums(indices: Any, least: Any, sums: Any) -> Any:
    gaps = np.diff(indices) - 1
    sums[:] = [(gaps >> b).sum() for b in range(least, least + 3)]
    return (gaps >= 0).all()


@compiled(_gap_sums, nogil=True)
def gap_sums(indices: NDArray[np.int64], least: int, sums: Written[np.int64]) -> bool:
    """Add gap div 2ᵇ for three parameters from `least` on; return whether the positions ascend.

    Parameters
    ----------
    indices : ndarray of int64, shape (n,)
        Positions.
    least : int
        First parameter b.
    sums : ndarray of int64, shape (3,)
        Receives the sum for each parameter.
    """
    a = b = c = np.int64(0)
    ascending = True
    for j in range(1, indices.size):
        gap = indices[j] - indices[j - 1] - 1
        ascending &= gap >= 0
        # a negative gap makes the sums meaningless: callers look at the result first
        gap >>= least
        a += gap
        b += gap >> 1
        c += gap >> 2
    sums[0], sums[1], sums[2] = a, b, c
    return ascending


def _encode(indices: Any, parameter: Any, words: Any) -> None:
    gaps, bits = np.diff(indices) - 1, np.zeros(32 * words.size, bool)
    bits[: parameter * gaps.size] = (gaps[:, None] >> np.arange(parameter) & 1).ravel()
    bits[parameter * gaps.size - 1 + ((gaps >> parameter) + 1).cumsum()] = True
    words[:] = np.packbits(bits, bitorder="little").view("<u4")


@compiled(_encode, nogil=True)
def encode_gaps(indices: NDArray[np.int64], parameter: int, words: Written[np.uint32]) -> None:
    """Write the gaps of ascending positions.

    Parameters
    ----------
    indices : ndarray of int64, shape (n,)
        Positions.
    parameter : int
        Parameter b.
    words : ndarray of uint32
        Zeros; receives the codes, and has exactly the room for them.
    """
    at, filled = 0, 0
    word = np.uint64(0)
    end = parameter * (indices.size - 1)  # where the high parts begin
    for j in range(1, indices.size):
        gap = indices[j] - indices[j - 1] - 1
        end += gap >> parameter
        words[end >> 5] |= np.uint32(1) << np.uint32(end & 31)
        end += 1
        left = parameter
        while left > 0:  # the low bits, at most 32 at a time
            n = min(left, 32)
            low = np.uint64(gap >> (parameter - left)) & np.uint64((np.int64(1) << n) - 1)
            word |= low << np.uint64(filled)
            filled += n
            left -= n
            if filled >= 32:
                # full of low bits, so no high part was written here
                words[at] = np.uint32(word & np.uint64(0xFFFFFFFF))
                at += 1
                word >>= np.uint64(32)
                filled -= 32
    if filled:  # the first high parts are in the same word
        words[at] |= np.uint32(word & np.uint64(0xFFFFFFFF))


def _decode(words: Any, parameter: Any, numel: Any, indices: Any) -> Any:
    bits, n = np.unpackbits(words.view(np.uint8), bitorder="little"), indices.size - 1
    low = bits[: parameter * n].reshape(n, parameter) @ (1 << np.arange(parameter))
    ends = np.flatnonzero(bits[parameter * n :])[:n]
    gaps = (np.diff(ends, prepend=-1) - 1 << parameter) + low
    indices[1:] = indices[0] + (gaps + 1).cumsum()
    return -(-(parameter * n + ends.max(initial=-1) + 1) // 32)


@compiled(_decode, nogil=True)
def decode_gaps(
    words: NDArray[np.uint32], parameter: int, numel: int, indices: Written[np.int64]
) -> int:
    """Read gaps behind the first position; return the words used, or −1 if they lead out of words or gradient.

    Parameters
    ----------
    words : ndarray of uint32
        The codes, and anything behind them; at least the low bits of all gaps.
    parameter : int
        Parameter b.
    numel : int
        Number of places.
    indices : ndarray of int64, shape (n,)
        The first position; receives the others.
    """
    # high parts begin inside the word in which the low bits end
    start = parameter * (indices.size - 1)
    at, have = start >> 5, 0
    window = np.uint64(0)  # the next bits of high parts, `have` of them
    if at < words.size:
        window = np.uint64(words[at]) >> np.uint64(start & 31)
        have = 32 - (start & 31)
        at += 1
    low_at, low_have = 0, 0
    low = np.uint64(0)
    # more zeros lead out of the gradient; up to here shifts do not overflow
    most = numel >> parameter
    position = indices[0]
    for j in range(1, indices.size):
        zeros = np.int64(0)
        while True:
            # at least 32 bits while there are words, and never more than 63
            if have < 32 and at < words.size:
                window |= np.uint64(words[at]) << np.uint64(have)
                at += 1
                have += 32
            if window != 0:
                break
            zeros += np.int64(have)
            have = 0
            # a message of zeros ends here, however long it is
            if at == words.size or zeros > most:
                return -1
        end = np.int64(lowest(window))
        zeros += end
        # by 63 at most: a shift by 64 is not defined
        window >>= np.uint64(end + 1)
        have -= int(end) + 1
        if zeros > most:
            return -1
        gap = zeros << parameter
        got = 0
        while got < parameter:
            n = min(parameter - got, 32)
            # words are not asked for their end: all low bits are there, as read_head made sure
            if low_have < n:
                low |= np.uint64(words[low_at]) << np.uint64(low_have)
                low_at += 1
                low_have += 32
            gap |= np.int64(low & np.uint64((np.int64(1) << n) - 1)) << got
            low >>= np.uint64(n)
            low_have -= n
            got += n
        position += gap + 1
        if position >= numel:
            return -1
        indices[j] = position
    return at - have // 32  # a whole word may be read ahead
