"""Selections: the elements of a block from a threshold on, and the part of them from a higher one on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.loops.compiled import Loop, Written, compiled, has, inner
from gradstats.primitives.loops.words import (
    INFINITY,
    MASK,
    PART,
    WORD,
    compress_places,
    fetch_ahead,
    lowest,
    ones,
    view,
    within,
)

__all__ = ["block_select", "block_under", "keep_at_least", "select_anywhere", "select_compressing"]

_SOME = 4
"""Elements of a word that are selected without asking whether there are so many."""


@inner()
def _put(
    x: NDArray[np.float32],
    start: int,
    word: np.uint64,
    some: int,
    offset: int,
    indices: Written[np.int64],
    values: Written[np.float32],
    n: np.uint64,
) -> np.uint64:
    """Write out the first elements that a word marks, and return the others.

    There may be fewer, and the next ones overwrite the rest: a mispredicted branch would cost more than the stores.
    """
    for i in range(some):
        # of a word without bits the place is 64: masked, an element inside is read, and not counted
        at = np.uint64(start) + (lowest(word) & np.uint64(WORD - 1))
        indices[n + np.uint64(i)] = np.int64(np.uint64(offset) + at)
        values[n + np.uint64(i)] = x[at]
        word &= word - np.uint64(1)
    return word


@inner()
def _put_all(
    bits: NDArray[np.int32],
    start: int,
    word: np.uint64,
    offset: int,
    indices: Written[np.int64],
    values: Written[np.float32],
    n: int,
) -> None:
    """Write out all elements that a word marks, as :func:`compress_places` does."""
    into = view(values, np.int32)
    at = np.uint64(n)
    end = at + ones(word)
    # what the last turn writes too much is overwritten by the next word, or lies behind the result
    while at < end:
        word = _put(bits, start, word, 2 * _SOME, offset, indices, into, at)
        at += np.uint64(2 * _SOME)


def _select(x: Any, low: Any, offset: Any, indices: Any, values: Any, count: Any) -> Any:
    bits = x.view(np.int32) & MASK
    places = np.flatnonzero((low <= bits) & (bits <= INFINITY))
    stop = count + places.size
    indices[count:stop], values[count:stop] = places + offset, x[places]
    return stop


def _selecting(put_many: Any, needs: str = "") -> Loop:
    """Return the loop that selects, with one or another way to write out the many elements of a word."""

    @compiled(_select, counted=True, needs=needs, nogil=True)
    def block_select(
        x: NDArray[np.float32],
        low: np.int32,
        offset: int,
        indices: Written[np.int64],
        values: Written[np.float32],
        count: int,
    ) -> int:
        """Append the elements whose magnitude bits are between `low` and those of infinity; return the new count.

        Parameters
        ----------
        x : ndarray of float32, shape (n,)
            Block.
        low : int32
            Bits of the least magnitude selected.
        offset : int
            Position of the block's first element in the gradient.
        indices : ndarray of int64
            Written: positions in the gradient. It needs room for a whole block beyond `count`.
        values : ndarray of float32
            Written: values, with the same room.
        count : int
            Elements already there.
        """
        bits = view(x, np.int32)
        n = np.uint64(count)
        whole = bits.size - bits.size % WORD
        # one unsigned comparison: below `low` wraps around, NaN is beyond infinity
        mask, least, width = np.uint32(MASK), np.uint32(low), np.uint32(INFINITY - low)
        few = np.uint64(_SOME)
        for part in range(0, whole, PART):
            # elements of the part: how many come next is foreseen from the last ones
            before = n
            for start in range(part, min(part + PART, whole), WORD):
                fetch_ahead(bits, start, WORD)
                word = within(bits, start, mask, least, width)
                left = ones(word)
                if left > few:
                    put_many(bits, start, word, offset, indices, values, np.int64(n))
                elif left > np.uint64(0):
                    _put(x, start, word, _SOME, offset, indices, values, n)
                n += left
            # where many are selected, the next words are not asked how many they have: to write all costs less than
            # mispredicted branches
            selected = n - before
            few = np.uint64(0 if selected > np.uint64(PART // 16) else _SOME)
        for j in range(whole, bits.size):
            if np.uint32((bits[j] & MASK) - low) <= width:
                indices[n] = offset + j
                values[n] = x[j]
                n += np.uint64(1)
        return np.int64(n)

    return block_select


select_anywhere = _selecting(_put_all)
select_compressing = _selecting(compress_places, "avx512f")
block_select = select_compressing if has("avx512f") else select_anywhere


def _under(values: Any, high: Any, magnitudes: Any) -> Any:
    bits = values.view(np.int32) & MASK
    under = bits[bits < high]
    magnitudes[: under.size] = under
    return np.count_nonzero((high <= bits) & (bits < INFINITY)), under.size


@compiled(_under, counted=True, nogil=True)
def block_under(
    values: NDArray[np.float32], high: np.int32, magnitudes: Written[np.int32]
) -> tuple[int, int]:
    """Collect the magnitudes below a bound; return how many finite ones are not, and how many were collected.

    Parameters
    ----------
    values : ndarray of float32, shape (n,)
        Values; infinite ones are left out.
    high : int32
        Bits of the bound, at most those of infinity.
    magnitudes : ndarray of int32, shape (n,)
        Written: the bits of the magnitudes.
    """
    bits = view(values, np.int32)
    n = np.uint64(0)
    infinite = np.int64(0)
    for i in range(bits.size):
        b = np.int32(bits[i] & MASK)
        # written in any case, and overwritten unless it counts: no branch to foresee
        magnitudes[n] = b
        n += np.uint64(b < high)
        infinite += np.int64(b >= INFINITY)
    return bits.size - np.int64(n) - infinite, np.int64(n)


def _keep(indices: Any, values: Any, threshold: Any) -> Any:
    places = np.flatnonzero(np.abs(values) >= threshold)
    indices[: places.size], values[: places.size] = indices[places], values[places]
    return places.size


@compiled(_keep, counted=True, nogil=True)
def keep_at_least(
    indices: Written[np.int64], values: Written[np.float32], threshold: np.float32
) -> int:
    """Move the elements with |value| ≥ threshold to the front, in order, and return how many there are.

    Parameters
    ----------
    indices : ndarray of int64, shape (n,)
        Overwritten: positions.
    values : ndarray of float32, shape (n,)
        Overwritten: values.
    threshold : float32
        Least magnitude kept.
    """
    n = np.uint64(0)
    for i in range(values.size):
        v = values[i]
        # n is at most i, so nothing is overwritten that is not read yet
        indices[n] = indices[i]
        values[n] = v
        n += np.uint64(abs(v) >= threshold)
    return np.int64(n)
