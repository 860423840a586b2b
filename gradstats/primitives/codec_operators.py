"""Ascending positions as Rice-coded gaps or as places within chunks, by torch operators on any device.

Rice streams are those of :mod:`gradstats.primitives.codec`, bit for bit. A stream of chunks is ``[number of chunks,
first chunk | positions in each | 12 bits a position]`` in 32-bit words: each chunk's number of positions takes 16 bits,
and two positions within their chunks of 4,096 elements take three bytes.
"""

from __future__ import annotations

import torch

from gradstats.errors import InputError
from gradstats.primitives.codec import (
    CANDIDATES,
    FIRST_BITS,
    HEAD,
    NOT_ASCENDING,
    OUTSIDE,
    WORD,
    read_head,
    smallest_parameter,
)

__all__ = [
    "LOCAL",
    "chunk_decode",
    "chunk_encode",
    "chunk_words",
    "rice_decode",
    "rice_encode",
]

_LOCAL_BITS = 12
LOCAL = 1 << _LOCAL_BITS
"""Elements of a chunk, within which a position takes 12 bits."""
_LOW = 2**WORD - 1
_PIECE = 1 << 20
"""Words of high parts looked at together: a quarter of a gigabyte of temporaries."""
_PART = 31
"""Low bits written or read together: moved by up to 31 bits, they stay within 62."""


def _as_words(codes: torch.Tensor) -> torch.Tensor:
    """Return numbers below 2³² as int32 with the same bits."""
    # in int32's range first: torch does not say what a conversion from beyond it gives
    return torch.where(codes > _LOW >> 1, codes - _LOW - 1, codes).int()


def _places(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the word that each bit is in, and its place there."""
    return bits >> 5, bits & (WORD - 1)


def _low_bits(steps: int, parameter: int, got: int, like: torch.Tensor) -> torch.Tensor:
    """Return where the low bits of each gap begin, without the first `got`."""
    return torch.arange(steps, device=like.device) * parameter + got


def rice_encode(indices: torch.Tensor) -> torch.Tensor:
    """Encode positions where they are; some scalars go to the host.

    Parameters
    ----------
    indices : int64 tensor, shape (n,)
        Positions from 0 up to 2⁵⁶ − 1, each larger than the one before.

    Returns
    -------
    int32 tensor, shape (words,)
        The stream of :func:`gradstats.primitives.codec.rice_encode`.

    Raises
    ------
    InputError
        If the positions are not ascending, occur twice, or are out of range.
    """
    if not indices.numel():
        return indices.new_empty(0, dtype=torch.int32)
    steps, gaps = indices.numel() - 1, indices.diff() - 1
    # stacked, so that the host waits once for all three
    # with the first position among the gaps there is a least one of a single position, too
    first, last, least_gap = torch.stack(
        [indices[0], indices[-1], torch.cat([indices[:1], gaps]).min()]
    ).tolist()
    if first < 0 or last >> FIRST_BITS or least_gap < 0:
        raise InputError(NOT_ASCENDING)
    least = smallest_parameter(steps, max(last - first - steps, 0))
    tried = range(least, least + CANDIDATES)
    sums = torch.stack([(gaps >> b).sum() for b in tried]).tolist()
    bits = [steps * (b + 1) + total for b, total in zip(tried, sums, strict=True)]
    parameter = least + bits.index(min(bits))
    # one more word, for the empty second half of what ends in the last one
    codes = indices.new_zeros(-(-min(bits) // WORD) + 1)
    # bits of different gaps never meet in a word, so that adding sets them
    for got in range(0, parameter, _PART):
        some = (gaps >> got) & ((1 << min(parameter - got, _PART)) - 1)
        word, place = _places(_low_bits(steps, parameter, got, indices))
        some <<= place
        codes.scatter_add_(0, word, some & _LOW).scatter_add_(0, word + 1, some >> WORD)
    ends = steps * parameter + ((gaps >> parameter) + 1).cumsum(0) - 1
    word, place = _places(ends)
    codes.scatter_add_(0, word, torch.ones_like(place) << place)
    head = parameter << FIRST_BITS | first
    return _as_words(torch.cat([codes.new_tensor([head & _LOW, head >> WORD]), codes[:-1]]))


def rice_decode(words: torch.Tensor, count: int, numel: int) -> tuple[torch.Tensor, int]:
    """Decode what :func:`rice_encode` made, all gaps at once; some scalars go to the host.

    Parameters
    ----------
    words : int32 tensor, shape (words,)
        A stream, and anything behind it.
    count : int
        Number of positions in the stream.
    numel : int
        Number of places: all positions are below it.

    Returns
    -------
    indices : int64 tensor, shape (count,)
        Ascending positions, each once.
    used : int
        Number of words that the stream took.

    Raises
    ------
    ValueError
        If this many positions below `numel` are not in the words.
    """
    if not count:
        return words.new_empty(0, dtype=torch.int64), 0
    low, high = words[:HEAD].tolist() if words.numel() >= HEAD else (0, 0)
    # words are signed: masked, they are their 32 bits
    head = (low & _LOW) | (high & _LOW) << WORD
    parameter, first = read_head(head, words.numel(), count, numel)
    steps = count - 1
    # nothing more to read, and the reductions below need a gap
    if not steps:
        return torch.tensor([first], device=words.device), HEAD
    at, skip = divmod(steps * parameter, WORD)
    most = numel >> parameter  # zeros that all high parts together can have
    # no valid stream goes further, however many words lie behind it
    end = min(-(-(steps * (parameter + 1) + most) // WORD), words.numel() - HEAD)
    lanes = torch.arange(8, dtype=torch.uint8, device=words.device)
    parts, missing = [], steps
    for begin in range(at, end, _PIECE):  # not all at once, as bits take 72 times their memory
        octets = words[HEAD + begin : HEAD + min(begin + _PIECE, end)].clone().view(torch.uint8)
        bits = ((octets[:, None] >> lanes) & 1).view(-1)
        if begin == at:
            # the low bits end inside this word
            bits[:skip] = 0
        # ones after the last gap's belong to what lies behind the stream
        part = bits.nonzero().view(-1)[:missing]
        parts.append(part + (WORD * (begin - at) - skip))
        missing -= part.numel()
        if not missing:
            break
    if missing:
        raise ValueError(OUTSIDE.format(numel))
    ends = torch.cat(parts)
    codes = words[HEAD : HEAD + at + 1].long() & _LOW
    # room for `word + 1` where low bits end in the last word
    codes = torch.cat([codes, codes.new_zeros(1)])
    gaps = (ends.diff(prepend=ends.new_tensor([-1])) - 1) << parameter
    for got in range(0, parameter, _PART):
        word, place = _places(_low_bits(steps, parameter, got, words))
        some = (codes[word] | codes[word + 1] << WORD) >> place
        gaps |= (some & ((1 << min(parameter - got, _PART)) - 1)) << got
    indices = torch.cat([gaps.new_tensor([first]), gaps + 1]).cumsum(0)
    # nothing overflows: all high parts together have no more than `most` zeros and those of a word
    last, least, largest = torch.stack([ends[-1], indices.min(), indices.max()]).tolist()
    if least < first or largest >= numel:
        raise ValueError(OUTSIDE.format(numel))
    return indices, HEAD + -(-(steps * parameter + last + 1) // WORD)


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
    # two counts a word, three bytes a pair of positions, the whole in words
    return HEAD + -(-chunks // 2) + -(-3 * -(-count // 2) // 4) if count else 0


def chunk_encode(indices: torch.Tensor, most: int) -> torch.Tensor | None:
    """Encode positions as places within chunks of :data:`LOCAL` elements.

    Parameters
    ----------
    indices : int64 tensor, shape (n,)
        Positions from 0 up to 2⁴³ − 1, each larger than the one before.
    most : int
        Most words that the stream may take.

    Returns
    -------
    int32 tensor, shape (words,), or None
        The stream, of :func:`chunk_words` words; None if it would be longer than `most`.

    Raises
    ------
    InputError
        If the positions are not ascending, occur twice, or are out of range.

    Examples
    --------
    >>> chunk_encode(torch.tensor([7, 9, 5000]), 10).numel()
    5
    """
    count = indices.numel()
    if not count:
        return indices.new_empty(0, dtype=torch.int32)
    chunks = indices >> _LOCAL_BITS
    first, last, least_gap = torch.stack(
        [chunks[0], chunks[-1], torch.cat([indices[:1], indices.diff() - 1]).min()]
    ).tolist()
    # the head has a word for the first chunk
    if least_gap < 0 or last >> (WORD - 1):
        raise InputError("positions to encode must be ascending, each once, from 0 to 2**43 - 1")
    reach = last - first + 1
    # before memory is allocated by `reach`, which two distant positions make large
    if chunk_words(count, reach) > most:
        return None
    counts = indices.new_zeros(reach + reach % 2)
    counts.scatter_add_(0, chunks - first, torch.ones_like(chunks))
    local = indices.new_zeros(count + count % 2)
    local[:count] = indices & (LOCAL - 1)
    pairs = local[::2] | local[1::2] << _LOCAL_BITS
    octets = torch.zeros(-(-3 * pairs.numel() // 4) * 4, dtype=torch.uint8, device=indices.device)
    for lane in range(3):
        octets[lane : 3 * pairs.numel() : 3] = (pairs >> 8 * lane & 255).to(torch.uint8)
    # a count is at most 4,096, so that two make a positive word
    table = torch.cat([counts.new_tensor([reach, first]), counts[::2] | counts[1::2] << 16])
    return torch.cat([_as_words(table), octets.view(torch.int32)])


def chunk_decode(words: torch.Tensor, count: int, numel: int) -> tuple[torch.Tensor, int]:
    """Decode what :func:`chunk_encode` made; other words give other positions or an error, and no more memory.

    Parameters
    ----------
    words : int32 tensor, shape (words,)
        A stream, and anything behind it.
    count : int
        Number of positions in the stream.
    numel : int
        Number of places: all positions are below it.

    Returns
    -------
    indices : int64 tensor, shape (count,)
        Ascending positions, each once.
    used : int
        Number of words that the stream took.

    Raises
    ------
    ValueError
        If this many positions below `numel` are not in the words.
    """
    if not count:
        return words.new_empty(0, dtype=torch.int64), 0
    head = words[:HEAD].tolist() if words.numel() >= HEAD else (0, 0)
    reach, first = (each & _LOW for each in head)
    used = chunk_words(count, reach)
    # both sizes are the message's claims; within its words they allocate no more than it justifies
    if not 0 < count <= numel or not reach or used > words.numel():
        raise ValueError(f"there cannot be {count} positions of {numel} in {words.numel()} words")
    table = HEAD + -(-reach // 2)
    pairs = words[HEAD:table].long()
    # masked, as the shift of a negative word fills with ones
    counts = torch.stack([pairs & 0xFFFF, pairs >> 16 & 0xFFFF], 1).view(-1)[:reach]
    # repeat_interleave takes its output_size on trust
    claimed = int(counts.sum())
    if claimed != count:
        raise ValueError(f"its chunks have {claimed} positions, and it claims {count}")
    octets = words[table:used].clone().view(torch.uint8)[: 3 * -(-count // 2)].long().view(-1, 3)
    both = octets[:, 0] | octets[:, 1] << 8 | octets[:, 2] << 16
    local = torch.stack([both & (LOCAL - 1), both >> _LOCAL_BITS], 1).view(-1)[:count]
    chunks = torch.arange(first, first + reach, device=words.device)
    indices = chunks.repeat_interleave(counts, output_size=count) << _LOCAL_BITS | local
    # a forged chunk may repeat its positions or go back
    gaps = indices.diff(prepend=indices.new_tensor([-1])) - 1
    least_gap, last = torch.stack([gaps.min(), indices[-1]]).tolist()
    if least_gap < 0 or last >= numel:
        raise ValueError(f"its positions do not ascend, or leave the {numel} elements")
    return indices, used
