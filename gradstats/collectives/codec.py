"""How positions and values of a selection are written in a message: as they are, or in fewer bits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from gradstats.collectives.ragged import check_positions, damaged
from gradstats.errors import InputError
from gradstats.primitives import codec_operators
from gradstats.primitives.backend import device_code
from gradstats.primitives.codec import rice_decode, rice_encode, rice_words
from gradstats.primitives.codec_operators import LOCAL, chunk_decode, chunk_encode, chunk_words
from gradstats.primitives.ratio import shown

__all__ = [
    "CHUNK",
    "INDICES",
    "PLAIN",
    "SCALED",
    "VALUES",
    "Codec",
    "as_codec",
    "check_codec",
    "index_dtype",
]

INDICES = ("plain", "rice", "chunk")
"""Names of the ways in which positions travel."""
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FP8 = "float8_e4m3fn"
_BITS = {_FP8: 8, "int8": 8, "int4": 4, "int2": 2}
SCALED = tuple(_BITS)
"""Names of the ways in which values travel as multiples of a scale; coding them takes time of its own."""
VALUES = (*_FLOATS, *SCALED)
"""Names of the ways in which values travel."""
CHUNK = 256
"""Values that share a scale."""
_LARGEST_FP8 = 448.0
_WORD = 4
_TINY = 2.0**-100
"""Scale below which a chunk's values are sent as 0: with one near it, dividing would leave the normal numbers."""
_INT32_LIMIT = 2**31


def index_dtype(numel: int) -> torch.dtype:
    """Return the integer type that holds every position of a gradient.

    Parameters
    ----------
    numel : int
        Number of elements of the gradient.

    Returns
    -------
    torch.dtype
        ``torch.int32`` below 2³¹ elements, else ``torch.int64``.
    """
    return torch.int32 if numel < _INT32_LIMIT else torch.int64


@dataclass(frozen=True, slots=True)
class Codec:
    """What positions and values are on the wire.

    Attributes
    ----------
    indices : {"plain", "rice", "chunk"}
        ``"plain"`` for 32 bits each (64 from 2³¹ elements on); ``"rice"`` for the Rice codes of the gaps between them,
        whose parameter is chosen for each selection; ``"chunk"`` for 12 bits each, the place within a chunk of 4,096
        elements, and 16 bits for every chunk's number of them. Where that is longer, positions travel as they are.
    values : {"float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "int4", "int2"}
        Type of the values. Integers are rounded to the nearest of 255, 15 or 3 evenly spaced multiples, zero among
        them, of the largest magnitude among :data:`CHUNK` values in index order, which travels as a float32. 8-bit
        floats have four significant bits, and are scaled so that this magnitude is the largest of them, 448.

    Raises
    ------
    InputError
        If a name is none of these.

    Notes
    -----
    Source of the gaps' code: Rice (1979), "Some practical universal noiseless coding techniques". Positions arrive as
    they were sent. What rounding takes off a value is never larger than the value, and unless the value is too large
    for its type, subtracting what was sent is exact: nothing is lost where the difference stays in a residual.

    Examples
    --------
    >>> Codec("rice", "int8").index_words(1000, 1_000_000)
    376
    """

    indices: str = "plain"
    values: str = "float32"

    def __post_init__(self) -> None:
        for field, known in (("indices", INDICES), ("values", VALUES)):
            given = getattr(self, field)
            if given not in known:
                raise InputError(f"{field} travel as {', '.join(known)}, not {shown(given)}")

    def only(self, codecs: Collection[str]) -> Codec:
        """Return the codec of nothing but what may be coded.

        Parameters
        ----------
        codecs : collection of str
            What may be: ``"indices"``, ``"values"``.
        """
        return Codec(**{field: getattr(self, field) for field in codecs})

    def index_words(self, count: int, span: int, numel: int | None = None) -> int:
        """Return the words that positions take: exactly if plain, at most if coded.

        Parameters
        ----------
        count : int
            Number of positions.
        span : int
            Number of places that they are among.
        numel : int, optional
            Elements of the dense gradient, which decide the width of a plain position; `span` if None.
        """
        if self.indices == "rice":
            return rice_words(count, span)
        plain = count * index_dtype(span if numel is None else numel).itemsize // _WORD
        if self.indices == "chunk" and count:
            # a part of the gradient may begin within a chunk
            reach = -(-span // LOCAL) + (numel is not None and span < numel)
            return min(chunk_words(count, reach), 1 + plain)
        return plain

    def value_words(self, count: int) -> int:
        """Return the words that values take.

        Parameters
        ----------
        count : int
            Number of values.
        """
        if self.values in _BITS:
            return -(-count // CHUNK) + -(-count * _BITS[self.values] // (8 * _WORD))
        return -(-count * _FLOATS[self.values].itemsize // _WORD)

    def pack_indices(self, indices: torch.Tensor, numel: int) -> torch.Tensor:
        """Return positions as words.

        Parameters
        ----------
        indices : int64 tensor, shape (k̂,)
            Positions below `numel`; ascending, each once, if they are coded.
        numel : int
            Number of elements of the dense gradient.

        Returns
        -------
        int32 tensor, shape (words,)
            The words, on the same device.

        Raises
        ------
        InputError
            If positions to code are not ascending.
        """
        if self.indices == "plain" or not indices.numel():
            return _plain(indices, numel)
        there = _by_operators(indices)
        own = indices if there else indices.cpu()
        found: torch.Tensor | None
        if self.indices == "chunk":
            found = chunk_encode(own, 1 + PLAIN.index_words(indices.numel(), numel))
            if found is None:  # a reach of 0 chunks says so
                plain = _plain(indices, numel)
                return torch.cat([plain.new_zeros(1), plain])
        elif there:
            found = codec_operators.rice_encode(own)
        else:
            found = torch.from_numpy(rice_encode(own.contiguous().numpy()).view(np.int32))
        return found if there else found.to(indices.device)

    def unpack_indices(
        self, words: torch.Tensor, count: int, numel: int, rank: int = 0
    ) -> tuple[torch.Tensor, int]:
        """Return the positions at the start of some words, and how many words they take.

        Parameters
        ----------
        words : int32 tensor, shape (words,)
            Positions as :meth:`pack_indices` returns them, and anything behind them.
        count : int
            Number of positions.
        numel : int
            Number of elements of the dense gradient.
        rank : int
            Rank that sent them.

        Returns
        -------
        indices : int64 tensor, shape (k̂,)
            Positions below `numel`.
        used : int
            Number of words.

        Raises
        ------
        ExchangeError
            If no rank can have sent them.
        """
        if self.indices != "plain" and count:
            return self._unpack_coded(words, count, numel, rank)
        used = count * index_dtype(numel).itemsize // _WORD
        if not 0 <= used <= words.numel():
            raise damaged(rank, f"it claims {count} positions in {_WORD * words.numel()} bytes")
        # Cloned, as words may start at an odd offset, which a view as 64-bit integers refuses.
        indices = words[:used].clone().view(index_dtype(numel)).long()
        check_positions(indices, numel, rank)
        return indices, used

    def _unpack_coded(
        self, words: torch.Tensor, count: int, numel: int, rank: int
    ) -> tuple[torch.Tensor, int]:
        """Return positions that travelled as gaps, or within chunks if not as they are, and the words they take."""
        if self.indices == "chunk" and words.numel() and not words[0]:
            found, used = PLAIN.unpack_indices(words[1:], count, numel, rank)
            return found, 1 + used
        there = _by_operators(words)
        own = words if there else words.cpu()
        try:
            if self.indices == "chunk":
                found, used = chunk_decode(own, count, numel)
            elif there:
                found, used = codec_operators.rice_decode(own, count, numel)
            else:
                gaps, used = rice_decode(own.numpy().view(np.uint32), count, numel)
                found = torch.from_numpy(gaps)
        except ValueError as error:
            raise damaged(rank, str(error)) from None
        return found if there else found.to(words.device), used

    def pack_values(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as words.

        Parameters
        ----------
        values : float tensor, shape (n,)
            Values as :meth:`rounded` returns them.

        Returns
        -------
        int32 tensor, shape (words,)
            The words.
        """
        if self.values in _BITS:
            return _packed_multiples(values, self.values)
        values = values.to(_FLOATS[self.values])
        # also where there are none: an empty array of NumPy's has a stride of 0, and no view of another type
        if values.itemsize < _WORD:
            values = torch.cat([values, values.new_zeros(values.numel() % 2)])
        return values.contiguous().view(torch.int32)

    def unpack_values(self, words: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values at the start of some words.

        Parameters
        ----------
        words : int32 tensor, shape (words,)
            At least :meth:`value_words` words.
        count : int
            Number of values.

        Returns
        -------
        float32 tensor, shape (count,)
            The values.
        """
        words = words[: self.value_words(count)]
        if self.values not in _BITS:
            return words.clone().view(_FLOATS[self.values])[:count].float()
        bits, scales = _BITS[self.values], words[: -(-count // CHUNK)].clone().view(torch.float32)
        packed = words[scales.numel() :].clone().view(torch.uint8)
        multiples: torch.Tensor
        if self.values == _FP8:
            multiples = packed[:count].view(torch.float8_e4m3fn).float() / _LARGEST_FP8
        else:
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
            codes = ((packed[:, None] >> shifts) & (2**bits - 1)).flatten()[:count]
            half = 2 ** (bits - 1)
            multiples = (codes.float() - half) / (half - 1)
        return multiples.mul_(scales.repeat_interleave(CHUNK)[:count])

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as they will arrive; those too large for their type become its largest number.

        Parameters
        ----------
        values : tensor, shape (n,)
            Values of any floating dtype.

        Returns
        -------
        float tensor, shape (n,)
            The values, of the 16-bit type if they travel as one, else float32. Rounding them again changes nothing.
        """
        wire = _FLOATS.get(self.values, torch.float32)
        largest, sent = torch.finfo(wire).max, values.to(wire)
        if torch.finfo(values.dtype).max > largest:
            sent.clamp_(-largest, largest)
        elif self.values in _BITS:  # infinite ones, in a copy: `sent` may be `values`
            sent = sent.clamp(-largest, largest)
        if self.values in _BITS:
            return self.unpack_values(self.pack_values(sent), sent.numel())
        return sent


def _plain(indices: torch.Tensor, numel: int) -> torch.Tensor:
    """Return positions as they are, as words."""
    # a copy whose stride is 1, even where there are too few positions for a stride to matter
    like = torch.contiguous_format
    return indices.to(index_dtype(numel), copy=True, memory_format=like).view(torch.int32)


def _by_operators(x: torch.Tensor) -> bool:
    """Tell whether torch's operators code a tensor where it is, and not the host."""
    try:
        return device_code(x) is not None
    except InputError:  # what was chosen to read gradients does not run there
        return False


def _packed_multiples(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return a scale for each chunk, and the values as multiples of it, packed from the lowest bits on."""
    if not values.numel():
        return torch.empty(0, dtype=torch.int32, device=values.device)
    bits, chunks = _BITS[name], -(-values.numel() // CHUNK)
    half = 2 ** (bits - 1)
    rows = torch.zeros(chunks * CHUNK, device=values.device)
    rows[: values.numel()] = values
    rows = rows.view(chunks, CHUNK)
    scales = rows.abs().amax(1)
    scales = torch.where(scales >= _TINY, scales, 0)  # also NaN, which no selector selects
    largest = _LARGEST_FP8 if name == _FP8 else half - 1
    rows = rows * torch.where(scales > 0, largest / scales, 0)[:, None]
    if name == _FP8:  # what lies beyond the largest would become NaN
        codes = rows.clamp_(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = rows.round_().add_(half).to(torch.uint8)
    per_byte = 8 // bits
    packed = codes.view(-1)[::per_byte].clone()
    for i in range(1, per_byte):
        packed |= codes.view(-1)[i::per_byte] << (i * bits)
    used = _WORD * -(-values.numel() * bits // (8 * _WORD))
    return torch.cat([scales.view(torch.int32), packed[:used].view(torch.int32)])


PLAIN = Codec()
"""Positions and values as they are: 32 bits each."""


def as_codec(codec: Codec | torch.dtype) -> Codec:
    """Return a codec as it is, and that of values of a floating type for the type.

    Parameters
    ----------
    codec : Codec or torch.dtype
        What a user gives to a compressor.

    Returns
    -------
    Codec
        The same codec, or the one with plain positions and values of this type.

    Raises
    ------
    InputError
        If it is neither, or values cannot travel as this type.
    """
    if isinstance(codec, torch.dtype):
        return Codec(values=str(codec).removeprefix("torch."))
    if not isinstance(codec, Codec):
        raise InputError(f"a codec is needed, such as Codec('rice', 'int8'), not {shown(codec)}")
    return codec


def check_codec(codec: Codec | torch.dtype, name: str, codecs: Collection[str]) -> Codec:
    """Return a codec that a compressor can use.

    Parameters
    ----------
    codec : Codec or torch.dtype
        What a user gives to it.
    name : str
        Name of the compressor.
    codecs : collection of str
        What may be coded: :attr:`gradstats.compressors.Compressor.codecs`.

    Returns
    -------
    Codec
        The codec.

    Raises
    ------
    InputError
        If it changes what the compressor does not send.
    """
    codec = as_codec(codec)
    if codec.indices != PLAIN.indices and "indices" not in codecs:
        raise InputError(f"{name} sends no positions: leave indices out")
    if codec.values != PLAIN.values and "values" not in codecs:
        raise InputError(f"{name} sends no values of its own to code: leave values out")
    return codec
