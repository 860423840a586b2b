"""Ascending positions as Rice-coded gaps, or as places within chunks.

A Rice stream is ``[parameter and first position | gaps]`` in 32-bit words. The gaps between neighbours, less 1, are
Rice codes with parameter b: gap div 2ᵇ zeros, a one, and the b low bits, lowest bit first.

A stream of chunks is ``[number of chunks, first chunk | positions in each | 12 bits a position]``. Each chunk's number
of positions takes 16 bits, and two positions within their chunks of 4,096 elements take three bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError

__all__ = [
    "LOCAL",
    "chunk_decode",
    "chunk_encode",
    "chunk_words",
    "rice_decode",
    "rice_encode",
    "rice_words",
]

_LOCAL_BITS = 12
LOCAL = 1 << _LOCAL_BITS
"""Elements of a chunk, within which a position takes 12 bits."""

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


def chunk_words(count: int, chunks: int) -> int:
    """Return the words that a stream of :func:`chunk_encode` takes.

    Parameters
    ----------
    count : int
        Number of positions.
    chunks : int
        Number of chunks from the first position's to the last one's.

    Returns
    -------
    int
        32-bit words; 0 for no positions.
    """
    return _HEAD + -(-chunks // 2) + -(-3 * -(-count // 2) // 4) if count else 0


def chunk_encode(indices: NDArray[np.int64], most: int) -> NDArray[np.uint32] | None:
    """Encode positions as places within chunks of :data:`LOCAL` elements.

    Parameters
    ----------
    indices : ndarray of int64, shape (n,)
        Positions from 0 up to 2⁴³ − 1, each larger than the one before.
    most : int
        Most words that the stream may take.

    Returns
    -------
    ndarray of uint32, shape (words,), or None
        The stream, of :func:`chunk_words` words; None if it would be longer than `most`.

    Raises
    ------
    InputError
        If the positions are not ascending, occur twice, or are negative.

    Examples
    --------
    >>> chunk_encode(np.array([7, 9, 5000]), 10).size
    5
    """
    if not indices.size:
        return np.empty(0, np.uint32)
    if indices[0] < 0 or (np.diff(indices) <= 0).any():
        raise InputError("positions to encode must be ascending, each once, from 0 on")
    chunks = indices >> _LOCAL_BITS
    first = int(chunks[0])
    reach = int(chunks[-1]) - first + 1
    if chunk_words(indices.size, reach) > most:
        return None
    counts = np.bincount(chunks - first, minlength=reach + reach % 2).astype("<u2")
    local = np.zeros((-(-indices.size // 2), 2), np.uint16)
    local.reshape(-1)[: indices.size] = indices & (LOCAL - 1)
    low, high = local.T
    packed = np.zeros((len(local), 3), np.uint8)
    packed[:, 0], packed[:, 1], packed[:, 2] = low & 255, low >> 8 | (high & 15) << 4, high >> 4
    room = np.zeros(-(-packed.size // 4) * 4, np.uint8)
    room[: packed.size] = packed.reshape(-1)
    head = np.array([reach, first], "<u4")
    return np.concatenate([head, counts.view("<u4"), room.view("<u4")]).astype(np.uint32)


def chunk_decode(
    words: NDArray[np.uint32], count: int, numel: int
) -> tuple[NDArray[np.int64], int]:
    """Decode what :func:`chunk_encode` made; other words give other positions or an error, and no more memory.

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
    reach, first = (int(word) for word in words[:_HEAD]) if words.size >= _HEAD else (0, 0)
    used = chunk_words(count, reach)
    if not 0 < count <= numel or not reach or used > words.size:
        raise ValueError(f"there cannot be {count} positions of {numel} in {words.size} words")
    table = _HEAD + -(-reach // 2)
    counts = words[_HEAD:table].astype("<u4").view("<u2")[:reach].astype(np.int64)
    if counts.sum() != count:
        raise ValueError(f"its chunks have {counts.sum()} positions, and it claims {count}")
    pairs = -(-count // 2)
    packed = words[table:used].astype("<u4").view(np.uint8)[: 3 * pairs].reshape(pairs, 3)
    low, middle, high = packed.astype(np.int64).T
    local = np.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], 1).reshape(-1)[:count]
    indices = np.repeat(np.arange(first, first + reach), counts) << _LOCAL_BITS | local
    if indices[-1] >= numel or (np.diff(indices) <= 0).any():
        raise ValueError(f"its positions do not ascend, or leave the {numel} elements")
    return indices, used


def warm_up() -> None:
    """Compile the loops, or load them from the cache: for arrays that may be written, and for those that may not."""
    indices = np.arange(3)
    read_only = rice_encode(indices)
    for writable in (True, False):
        indices.flags.writeable = read_only.flags.writeable = writable
        rice_decode(rice_encode(indices), 3, 3)
        rice_decode(read_only, 3, 3)
