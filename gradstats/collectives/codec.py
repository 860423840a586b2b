"""How positions and values of a selection are written in a message: as they are, or in fewer bits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

import numpy as np
import torch

from gradstats.collectives.ragged import check_positions, damaged
from gradstats.errors import InputError
from gradstats.primitives import codec_operators
from gradstats.primitives.backend import device_code
from gradstats.primitives.codec import rice_decode, rice_encode, rice_words
from gradstats.primitives.codec_operators import LOCAL, chunk_decode, chunk_encode, chunk_words
from gradstats.primitives.formats import FORMATS, Format, Scales
from gradstats.primitives.ratio import shown

__all__ = [
    "CHUNK",
    "INDICES",
    "PLAIN",
    "SCALED",
    "VALUES",
    "Codec",
    "Indices",
    "Values",
    "as_codec",
    "check_codec",
    "index_dtype",
]

Indices: TypeAlias = Literal["plain", "rice", "chunk"]
INDICES: tuple[Indices, ...] = get_args(Indices)
"""Names of the ways in which positions travel."""
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# by torch's names for the types that torch has, by those of FORMATS for the others
_SCALED = {
    "float8_e4m3fn": FORMATS["e4m3"],
    **{
        name: FORMATS[name] for name in ("int8", "int4", "int2", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
    },
    "float8_e5m2": FORMATS["e5m2"],
}
Values: TypeAlias = Literal[
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int8",
    "int4",
    "int2",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
    "float8_e5m2",
]
VALUES: tuple[Values, ...] = get_args(Values)
"""Names of the ways in which values travel."""
SCALED = tuple(name for name in VALUES if name in _SCALED)
"""Names of the ways in which values travel as multiples of a scale; coding them takes time of its own."""
CHUNK = 256
"""Values that share a scale, or, in the formats of shorter blocks, several scales."""
_WORD = 4
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
    values : {"float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "int4", "int2", …}
        Type of the values. Integers are rounded to the nearest of 255, 15 or 3 evenly spaced multiples, zero among
        them, of the largest magnitude among :data:`CHUNK` values in index order, which travels as a float32. 8-bit
        floats have four significant bits (three of ``"float8_e5m2"``), and are scaled so that this magnitude is the
        largest of them, 448 (57,344). ``"mxfp8"``, ``"mxfp6"`` and ``"mxfp4"`` are the formats of the OCP's MX
        specification with a scale of 8 bits for 32 values, ``"nvfp4"`` that of NVIDIA with one for 16 and a float32
        for all (:mod:`gradstats.primitives.formats`).

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

    indices: Indices = "plain"
    values: Values = "float32"

    def __post_init__(self) -> None:
        for field, known in (("indices", INDICES), ("values", VALUES)):
            name = getattr(self, field)
            if name not in known:
                raise InputError(f"{field} travel as {', '.join(known)}, not {shown(name)}")

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
            # before positions as they are goes one word, a reach of 0
            return min(chunk_words(count, reach), 1 + plain)
        return plain

    def value_words(self, count: int) -> int:
        """Return the words that values take.

        Parameters
        ----------
        count : int
            Number of values.
        """
        if self.values in _SCALED:
            form = _SCALED[self.values]
            sizes = [form.blocks(count) * form.scale_bits, count * form.bits]
            # scales and values each begin with a word of their own
            return sum(-(-bits // (8 * _WORD)) for bits in sizes) + _has_tensor_scale(form, count)
        # an odd number of 16-bit values ends in half a word, which is sent
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
        positions = indices if there else indices.cpu()
        words: torch.Tensor | None
        if self.indices == "chunk":
            # not longer than what takes its place: positions as they are, and the word that says so
            words = chunk_encode(positions, 1 + PLAIN.index_words(indices.numel(), numel))
            if words is None:  # a reach of 0 chunks says so
                plain = _plain(indices, numel)
                return torch.cat([plain.new_zeros(1), plain])
        elif there:
            # the bits of the host's coder, so that ranks with different devices can read each other
            words = codec_operators.rice_encode(positions)
        else:
            words = torch.from_numpy(rice_encode(positions.contiguous().numpy()).view(np.int32))
        return words if there else words.to(indices.device)

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
        # no positions are no words, whatever the code
        if self.indices != "plain" and count:
            return self._unpack_coded(words, count, numel, rank)
        used = count * index_dtype(numel).itemsize // _WORD
        # a negative count, which only damage makes, would slice from the other end
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
        # a reach of 0: the sender found chunks to take more words than plain positions
        if self.indices == "chunk" and words.numel() and not words[0]:
            indices, used = PLAIN.unpack_indices(words[1:], count, numel, rank)
            return indices, 1 + used
        there = _by_operators(words)
        codes = words if there else words.cpu()
        try:
            if self.indices == "chunk":
                indices, used = chunk_decode(codes, count, numel)
            elif there:
                indices, used = codec_operators.rice_decode(codes, count, numel)
            else:
                gaps, used = rice_decode(codes.numpy().view(np.uint32), count, numel)
                indices = torch.from_numpy(gaps)
        except ValueError as error:
            # decoders know nothing of ranks, and raise it for words that no encoder makes
            raise damaged(rank, str(error)) from None
        return indices if there else indices.to(words.device), used

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
        if self.values in _SCALED:
            return _packed(values, _SCALED[self.values])
        # exact, as the values were rounded to this type before
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
        if self.values not in _SCALED:
            # a copy: views of float32 would keep the messages of all ranks in memory
            return words.clone().view(_FLOATS[self.values])[:count].float()
        return _unpacked(words, count, _SCALED[self.values])

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
        # `sent` then has another type than `values`, and is a copy that may be clamped in place
        if torch.finfo(values.dtype).max > largest:
            sent.clamp_(-largest, largest)
        elif self.values in _SCALED:  # infinite ones, in a copy: `sent` may be `values`
            sent = sent.clamp(-largest, largest)
        if self.values in _SCALED:
            return _SCALED[self.values].quantised(sent)
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


def _has_tensor_scale(form: Format, count: int) -> int:
    """Return the words of a scale that all values share: 1 or 0."""
    return int(form.scale == "e4m3" and count > 0)


def _packed(values: torch.Tensor, form: Format) -> torch.Tensor:
    """Return the scale of all values, that of each block, and the values' bits, packed from the lowest ones on."""
    if not values.numel():
        return torch.empty(0, dtype=torch.int32, device=values.device)
    # the values are rounded already: their scales come out the same, and rounding again changes nothing
    rows = form.rows(values.float())
    scales = form.scales(rows)
    codes = form.codes(form.rounded(form.scaled(rows, scales))).view(-1)
    # blocks are of a whole number of bytes, and of whole words after the last one
    if form.bits == 6:
        four = codes.view(-1, 4).int()
        together = four[:, 0] | four[:, 1] << 6 | four[:, 2] << 12 | four[:, 3] << 18
        packed = torch.stack([together >> 8 * lane & 255 for lane in range(3)], 1)
        packed = packed.to(torch.uint8).view(-1)
    else:
        # 8, 4 and 2 bits fill bytes evenly; of 8 bits the loop has nothing to add
        per_byte = 8 // form.bits
        packed = codes[::per_byte].clone()
        for i in range(1, per_byte):
            packed |= codes[i::per_byte] << (i * form.bits)
    # without what fills up the last block: the receiver knows the count
    used = _WORD * -(-values.numel() * form.bits // (8 * _WORD))
    # scales first, whose number follows from the count: each part can be found without a table
    parts = [scales.tensor, scales.each, packed[:used]]
    return torch.cat([_whole_words(each.view(torch.uint8)) for each in parts])


def _whole_words(octets: torch.Tensor) -> torch.Tensor:
    """Return bytes as words, the last one filled with zeros."""
    missing = -octets.numel() % _WORD
    if missing:
        octets = torch.cat([octets, octets.new_zeros(missing)])
    return octets.view(torch.int32)


def _unpacked(words: torch.Tensor, count: int, form: Format) -> torch.Tensor:
    """Return the values of what :func:`_packed` returned."""
    if not count:
        return torch.empty(0, device=words.device)
    octets, blocks = words.clone().view(torch.uint8), form.blocks(count)
    start = _WORD * _has_tensor_scale(form, count)
    stop = start + blocks * form.scale_bits // 8
    kinds = {"float32": torch.float32, "e4m3": torch.float8_e4m3fn}
    each = octets[start:stop].view(kinds.get(form.scale, torch.uint8))
    scales = Scales(each, octets[:start].view(torch.float32))
    # scales fill their last word up with zeros
    packed = octets[stop + -stop % _WORD :]
    if form.bits == 6:
        # four values share three bytes, and whole words may end between these
        packed = torch.cat([packed, packed.new_zeros(-packed.numel() % 3)])
        three = packed.view(-1, 3).int()
        together = three[:, 0] | three[:, 1] << 8 | three[:, 2] << 16
        shifts = torch.arange(0, 24, 6, device=words.device)
        codes = ((together[:, None] >> shifts) & 63).to(torch.uint8)
    elif form.bits == 8:
        codes = packed
    else:
        shifts = torch.arange(0, 8, form.bits, dtype=torch.uint8, device=words.device)
        codes = (packed[:, None] >> shifts) & (2**form.bits - 1)
    # what lies behind the last value is padding, and would be taken for a number
    numbers = form.numbers(codes.reshape(-1)[:count].contiguous())
    return form.restored(form.rows(numbers), scales).view(-1)[:count]


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
        # a codec refuses types that it does not have
        return Codec(values=cast("Values", str(codec).removeprefix("torch.")))
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
