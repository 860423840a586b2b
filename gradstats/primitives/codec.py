"""Ascending positions as Rice-coded gaps: the format, and the compiled coder.

A stream is ``[parameter and first position | low bits | high parts]`` in 32-bit words, lowest bit first. The gaps
between neighbours, less 1, are Rice codes with parameter b: the b low bits of all of them come first, then, from the
next bit on, gap div 2ᵇ zeros and a one of each. So every gap's low bits are at a known place, and its high part ends at
the j-th one: all can be read at once, which :mod:`gradstats.primitives.codec_operators` does on any device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError

__all__ = [
    "CANDIDATES",
    "FIRST_BITS",
    "HEAD",
    "NOT_ASCENDING",
    "OUTSIDE",
    "WORD",
    "read_head",
    "rice_decode",
    "rice_encode",
    "rice_words",
    "smallest_parameter",
]

HEAD = 2
"""Words before the gaps: the first position, and the parameter in its highest byte."""
FIRST_BITS = 56
"""Bits of the first position."""
CANDIDATES = 3
"""Parameters worth trying."""
WORD = 32
"""Bits of a word."""
NOT_ASCENDING = f"positions to encode must be ascending, each once, from 0 to 2**{FIRST_BITS} - 1"
OUTSIDE = "its gaps leave the message, or the {} elements"
"""What both coders, this and that of a device, say of bad positions and of a bad stream."""


def smallest_parameter(steps: int, total: int) -> int:
    """Return the least of the :data:`CANDIDATES` worth trying.

    Parameters
    ----------
    steps : int
        Number of gaps.
    total : int
        Their sum.
    """
    # geometric gaps are shortest at about log₂(mean · ln 2), so from one below ⌊log₂ mean⌋ on
    return max((total // steps).bit_length() - 2, 0) if steps else 0


def read_head(head: int, words: int, count: int, numel: int) -> tuple[int, int]:
    """Return the parameter and the first position of a stream.

    Parameters
    ----------
    head : int
        Its first :data:`HEAD` words as one number.
    words : int
        Number of words, with anything behind the stream.
    count, numel : int
        Number of positions, and of places.

    Raises
    ------
    ValueError
        If this many positions below `numel` cannot be in the words.
    """
    parameter, first = head >> FIRST_BITS, head & ((1 << FIRST_BITS) - 1)
    # count is a claim of the message: every gap takes its low bits and a one, so that no more
    # positions are allocated than the words can hold
    room = WORD * (words - HEAD)
    if (
        not 0 < count <= numel
        or parameter >= FIRST_BITS
        or first >= numel
        or (count - 1) * (parameter + 1) > room
    ):
        raise ValueError(f"there cannot be {count} positions of {numel} in {words} words")
    return parameter, first


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
    # all gaps together are at most the places without a position; one position has none
    steps = count - 1
    total = max(span - count, 0) if steps else 0
    least = smallest_parameter(steps, total)
    tried = range(least, least + CANDIDATES)
    # the sum of ⌊gap / 2ᵇ⌋ is at most ⌊total / 2ᵇ⌋
    return HEAD + -(-min(steps * (b + 1) + (total >> b) for b in tried) // WORD)


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
    from gradstats.primitives.loops.rice import encode_gaps, gap_sums

    first, last = int(indices[0]), int(indices[-1])
    # the sum of gaps is negative only where positions do not ascend, which gap_sums tells
    least = smallest_parameter(indices.size - 1, max(last - first - indices.size + 1, 0))
    sums = np.zeros(CANDIDATES, np.int64)
    # of ascending positions the ends bound all
    if first < 0 or last >> FIRST_BITS or not gap_sums(indices, least, sums):
        raise InputError(NOT_ASCENDING)
    # each gap has its low bits and a closing one; `sums` are the zeros of all
    bits = [(indices.size - 1) * (least + i + 1) + int(s) for i, s in enumerate(sums)]
    parameter = least + bits.index(min(bits))
    # zeros: the loop sets bits and clears none
    words = np.zeros(HEAD + -(-min(bits) // WORD), np.uint32)
    # the lower half first, on machines of either byte order
    words[:HEAD] = np.array([parameter << FIRST_BITS | first], "<u8").view("<u4")
    encode_gaps(indices, parameter, words[HEAD:])
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
    # of fewer words the head does not matter: read_head finds no room in them
    head = int(words[:HEAD].astype("<u4").view("<u8")[0]) if words.size >= HEAD else 0
    parameter, first = read_head(head, words.size, count, numel)
    from gradstats.primitives.loops.rice import decode_gaps

    indices = np.empty(count, np.int64)  # no larger than 64 times the message
    indices[0] = first
    used = decode_gaps(words[HEAD:], parameter, numel, indices)
    if used < 0:
        raise ValueError(OUTSIDE.format(numel))
    return indices, HEAD + used
