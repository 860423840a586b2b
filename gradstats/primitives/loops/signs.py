"""Signs of a block as bits, and bits as numbers of one size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.loops.compiled import Written, compiled, inner
from gradstats.primitives.loops.sums import FAST
from gradstats.primitives.loops.words import INFINITY, MASK, PART, WORD, fetch, view, within

__all__ = ["block_signs", "block_spread_signs", "block_stochastic_signs"]

_DRAWN = 128
"""Elements that are drawn before any is looked at, so that one does not wait for the memory of another."""
_GOLDEN, _MIX = (
    np.uint64(0x9E3779B97F4A7C15),
    (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)),
)
"""Constants of splitmix64 (Steele, Lea and Flood 2014)."""


def _signs(x: Any, words: Any, zeros: Any) -> Any:
    for room, marked in ((words, x > 0), (zeros, x == 0)):
        packed = np.packbits(marked, bitorder="little")
        room.view(np.uint8)[:] = np.pad(packed, (0, 8 * room.size - packed.size))
    return (x == 0).any(), np.abs(x).astype(np.float64)


@compiled(_signs, within=1e-12, nogil=True, fastmath=FAST, error_model="numpy")
def block_signs(
    x: NDArray[np.float32], words: Written[np.uint64], zeros: Written[np.uint64]
) -> tuple[bool, float]:
    """Pack x > 0 and x = 0 as bits, the first lowest; return (whether there are zeros, Σ|x|).

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    words : ndarray of uint64, shape (⌈n/64⌉,)
        Where the signs go.
    zeros : ndarray of uint64, shape (⌈n/64⌉,)
        Where the zeros are marked.
    """
    bits = view(x, np.int32)
    # with their signs, the bits of positive numbers are from 1 to infinity's; all others lie outside
    nothing, one, width = np.uint32(0), np.uint32(1), np.uint32(INFINITY - 1)
    magnitude, signed = np.uint32(MASK), np.uint32(0xFFFFFFFF)
    has_zeros = False
    total = 0.0
    for start in range(0, x.size, PART):
        part = bits[start : start + PART]
        least = np.int32(MASK)
        s = 0.0
        for i in range(part.size):
            b = np.int32(part[i] & MASK)
            least = b if b < least else least
            s += np.float64(b.view(np.float32))
        total += s
        stop = start + part.size
        whole = stop - part.size % WORD
        for i in range(start, whole, WORD):
            words[i // WORD] = within(bits, i, signed, one, width)
        # most parts have no zeros, and are not compared again
        if least == 0:
            has_zeros = True
            for i in range(start, whole, WORD):
                zeros[i // WORD] = within(bits, i, magnitude, nothing, nothing)
        else:
            zeros[start // WORD : whole // WORD] = 0
        if whole < stop:
            last = none = np.uint64(0)
            for j in range(whole, stop):
                last |= np.uint64(0 < bits[j] <= INFINITY) << np.uint64(j - whole)
                none |= np.uint64(bits[j] & MASK == 0) << np.uint64(j - whole)
            words[whole // WORD] = last
            zeros[whole // WORD] = none
    return has_zeros, total


def _spread_signs(packed: Any, scale: Any, x: Any, spread: Any) -> None:
    plus = np.unpackbits(packed, count=x.size, bitorder="little")
    spread[:] = np.where(plus, scale, -scale)
    x -= spread


@compiled(_spread_signs, nogil=True)
def block_spread_signs(
    packed: NDArray[np.uint8],
    scale: np.float32,
    x: Written[np.float32],
    spread: Written[np.float32],
) -> None:
    """Make every bit a number of one size, and take it off from an element, in one pass.

    Parameters
    ----------
    packed : ndarray of uint8, shape (⌈n/8⌉,)
        Bits, eight a byte, the first lowest: 1 for +, 0 for −.
    scale : float32
        Size of the numbers.
    x : ndarray of float32, shape (n,)
        Overwritten: what is left.
    spread : ndarray of float32, shape (n,)
        Written: the numbers.
    """
    size = np.int32(np.float32(scale).view(np.int32))
    for start in range(0, x.size, PART):
        part = spread[start : start + PART]
        bits, octets = view(part, np.int32), packed[start // 8 :]
        for i in range(part.size // 8):
            minus = ~np.uint32(octets[i])
            for j in range(8):
                sign = np.int32(((minus >> np.uint32(j)) & np.uint32(1)) << np.uint32(31))
                # flips the sign of the scale where it has one, too
                bits[8 * i + j] = size ^ sign
        for i in range(part.size - part.size % 8, part.size):
            minus = ~np.uint32(octets[i // 8])
            sign = np.int32(((minus >> np.uint32(i % 8)) & np.uint32(1)) << np.uint32(31))
            bits[i] = size ^ sign
        left = x[start : start + PART]
        for i in range(part.size):
            left[i] -= part[i]


@inner()
def _random(state: np.uint64) -> np.uint64:
    """Return the 64 random bits that splitmix64 has for a state."""
    z = (state ^ (state >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return z ^ (z >> np.uint64(31))


@inner()
def _uniform(state: np.uint64) -> float:
    """Return the number in [0, 1) that splitmix64 has for a state."""
    # the upper 53 bits, as many as a float64 below 1 keeps
    return np.float64(_random(state) >> np.uint64(11)) * 2.0**-53


@compiled(nogil=True, error_model="numpy")
def block_stochastic_signs(
    x: NDArray[np.float32],
    norm: float,
    largest: NDArray[np.float32],
    seed: np.uint64,
    words: Written[np.uint64],
) -> None:
    """Throw random signs of expectation x/norm.

    All are fair coins first. Then each is replaced by the sign of its element with the probability |x|/norm. Few are:
    where they are is drawn element by skipped element, with the largest probability of some, and taken back where an
    element's is smaller.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Finite elements.
    norm : float
        Their norm, finite, and 0 if they all are.
    largest : ndarray of float32, shape (⌈n/2048⌉,)
        What :func:`block_norm` found.
    seed : uint64
        Seed of the random numbers.
    words : ndarray of uint64, shape (⌈n/64⌉,)
        Written: the signs, 1 for +, the first lowest, and zeros after the last.
    """
    state = np.uint64(seed)
    for i in range(words.size):
        state += _GOLDEN
        words[i] = _random(state)
    if x.size % WORD:
        # coins beyond the last element are taken back
        words[-1] &= (np.uint64(1) << np.uint64(x.size % WORD)) - np.uint64(1)
    skips = np.empty(largest.size)
    for part in range(largest.size):
        # ⌊ln U / ln(1 − p)⌋ elements are skipped, a geometric number; for p = 1 this is −0, and none is;
        # norms are rounded, so p may come out above 1
        skips[part] = 1 / np.log1p(-min(np.float64(largest[part]) / norm, 1.0))
    places, bars = np.empty(_DRAWN, np.int64), np.empty(_DRAWN)
    n = 0
    for part in range(largest.size):
        top = np.float64(largest[part])
        # no element of it has a sign; its skip may be NaN, where the norm is 0
        if top == 0:
            continue
        # a float, as a skip may be longer than any array
        at = np.float64(part * PART - 1)
        stop = np.float64(min((part + 1) * PART, x.size))
        while True:
            state += _GOLDEN
            # 1 − U is never 0
            at += 1 + np.floor(np.log(1 - _uniform(state)) * skips[part])
            if not at < stop:
                break
            state += _GOLDEN
            places[n] = np.int64(at)
            fetch(x, places[n])
            # below |x| with probability |x| / top: of those drawn with top / norm, |x| / norm are kept
            bars[n] = _uniform(state) * top
            n += 1
            if n == _DRAWN:
                _replace_coins(x, places, bars, n, words)
                n = 0
    _replace_coins(x, places, bars, n, words)


@inner()
def _replace_coins(
    x: NDArray[np.float32],
    places: NDArray[np.int64],
    bars: NDArray[np.float64],
    n: int,
    words: Written[np.uint64],
) -> None:
    """Put the signs of those drawn elements whose magnitude exceeds their bar; without a branch, for no guess helps."""
    for i in range(n):
        place = np.uint64(places[i])
        value = np.float64(x[place])
        at, bit = place // np.uint64(WORD), place % np.uint64(WORD)
        coin = words[at]
        signed = (coin & ~(np.uint64(1) << bit)) | (np.uint64(value > 0) << bit)
        words[at] = signed if bars[i] < abs(value) else coin
