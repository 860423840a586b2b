"""Ascending positions as Rice-coded gaps.

A stream is ``[parameter and first position | gaps]`` in 32-bit words. The gaps between neighbours, less 1, are Rice
codes with parameter b: gap div 2ᵇ zeros, a one, and the b low bits, lowest bit first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError

__all__ = ["rice_decode", "rice_encode", "rice_words"]

_HEAD = 2
"""Words before the gaps: the first position, and the parameter in its highest byte."""
_FIRST_BITS = 56
_CANDIDATES = 3
_WORD = 32


def _smallest_parameter(steps: int, total: int) -> int:
    """Return the least of the parameters worth trying for gaps of this number and sum."""
    return max((total // steps).bit_length() - 2, 0) if steps else 0


def rice_words(count: int, span: int) -> int:
    """Return the most words that a stream of :func:`rice_encode` takes, whatever the positions are.

    Parameters
    ----------
    count : int
        Number of positions.
    span : int
        Number of places that they are among.

    Returns
    -------
    int
        32-bit words; 0 for no positions.
    """
    if not count:
        return 0
    steps, total = count - 1, max(span - count, 0)
    least = _smallest_parameter(steps, total)
    tried = range(least, least + _CANDIDATES)
    return _HEAD + -(-min(steps * (b + 1) + (total >> b) for b in tried) // _WORD)


def rice_encode(indices: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Encode positions, with the parameter that makes the stream shortest.

    Parameters
    ----------
    indices : ndarray of int64, shape (n,)
        Positions from 0 up to 2⁵⁶ − 1, each larger than the one before.

    Returns
    -------
    ndarray of uint32, shape (words,)
        The stream, of at most :func:`rice_words` words; none for no positions.

    Raises
    ------
    InputError
        If the positions are not ascending, occur twice, or are out of range.

    Examples
    --------
    >>> rice_encode(np.array([7, 9, 12])).size
    3
    """
    if not indices.size:
        return np.empty(0, np.uint32)
    from gradstats.primitives.rice import encode_gaps, gap_sums

    first, last = int(indices[0]), int(indices[-1])
    least = _smallest_parameter(indices.size - 1, max(last - first - indices.size + 1, 0))
    sums = np.zeros(_CANDIDATES, np.int64)
    if first < 0 or last >> _FIRST_BITS or not gap_sums(indices, least, sums):
        raise InputError("positions to encode must be ascending, each once, from 0 to 2**56 - 1")
    bits = [(indices.size - 1) * (least + i + 1) + int(s) for i, s in enumerate(sums)]
    parameter = least + bits.index(min(bits))
    words = np.zeros(_HEAD + -(-min(bits) // _WORD), np.uint32)
    words[:_HEAD] = np.array([parameter << _FIRST_BITS | first], "<u8").view("<u4")
    encode_gaps(indices, parameter, words[_HEAD:])
    return words


def rice_decode(words: NDArray[np.uint32], count: int, numel: int) -> tuple[NDArray[np.int64], int]:
    """Decode what :func:`rice_encode` made; other words give other positions or an error, and no more memory.

    Parameters
    ----------
    words : ndarray of uint32, shape (words,)
        A stream, and anything behind it.
    count : int
        Number of positions in the stream.
    numel : int
        Number of places: all positions are below it.

    Returns
    -------
    indices : ndarray of int64, shape (count,)
        Ascending positions, each once.
    used : int
        Number of words that the stream took.

    Raises
    ------
    ValueError
        If this many positions below `numel` are not in the words.
    """
    if not count:
        return np.empty(0, np.int64), 0
    if not 0 < count <= numel or words.size < _HEAD:
        raise ValueError(f"there cannot be {count} positions of {numel} in {words.size} words")
    head = int(words[:_HEAD].astype("<u4").view("<u8")[0])
    parameter, first = head >> _FIRST_BITS, head & ((1 << _FIRST_BITS) - 1)
    room = _WORD * (words.size - _HEAD)
    if parameter >= _FIRST_BITS or first >= numel or (count - 1) * (parameter + 1) > room:
        raise ValueError(f"there cannot be {count} positions of {numel} in {words.size} words")
    from gradstats.primitives.rice import decode_gaps

    indices = np.empty(count, np.int64)  # no larger than 64 times the message
    indices[0] = first
    used = decode_gaps(words[_HEAD:], parameter, numel, indices)
    if used < 0:
        raise ValueError(f"its gaps leave the message, or the {numel} elements")
    return indices, _HEAD + used


def warm_up() -> None:
    """Compile the loops, or load them from the cache: for arrays that may be written, and for those that may not."""
    indices = np.arange(3)
    read_only = rice_encode(indices)
    for writable in (True, False):
        indices.flags.writeable = read_only.flags.writeable = writable
        rice_decode(rice_encode(indices), 3, 3)
        rice_decode(read_only, 3, 3)
