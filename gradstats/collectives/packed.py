"""Sparse selections packed into words, and their all-gather.

A selection is `[count, number of values | indices | values]` in 32-bit words; a message holds several, one after the
other. What indices and values are is the :class:`Codec`'s; or one value stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradstats.collectives.codec import PLAIN, Codec, as_codec
from gradstats.collectives.header import Kind
from gradstats.collectives.ragged import RaggedAllGather, damaged
from gradstats.primitives import Selection

__all__ = ["GatheredSelections", "SparseAllGather", "pack", "unpack"]

_HEADER = 2  # words: the two counts


def pack(selection: Selection, numel: int, codec: Codec = PLAIN) -> torch.Tensor:
    """Return a selection as int32 words.

    Parameters
    ----------
    selection : Selection
        Positions below `numel`, and values as :meth:`Codec.rounded` returns them.
    numel : int
        Number of elements of the dense gradient. It decides the width of an index.
    codec : Codec
        What positions and values are.

    Returns
    -------
    int32 tensor, shape (words,)
        Two counts, the positions and the values.
    """
    indices, values = selection.indices, selection.values
    # both counts are known on the host: nothing waits for a device
    header = torch.tensor(
        [indices.numel(), values.numel()], dtype=torch.int32, device=indices.device
    )
    return torch.cat([header, codec.pack_indices(indices, numel), codec.pack_values(values)])


def unpack(words: torch.Tensor, numel: int, codec: Codec = PLAIN, rank: int = 0) -> list[Selection]:
    """Return the selections that :func:`pack` put one after the other.

    Parameters
    ----------
    words : int32 tensor, shape (words,)
        Any number of packed selections.
    numel : int
        Number of elements of the dense gradient.
    codec : Codec
        What positions and values are.
    rank : int
        Rank that sent them.

    Returns
    -------
    list of Selection
        The selections, in order; values are float32.

    Raises
    ------
    ExchangeError
        If no rank can have packed these words.
    """
    selections, start = [], 0
    while start < words.numel():
        left = words.numel() - start - _HEADER
        if left < 0:
            raise damaged(rank, "it ends in the middle of a header")
        # one transfer from a device for each selection
        count, number = words[start : start + _HEADER].tolist()
        claim = f"it claims {count} positions and {number} values in {4 * left} bytes"
        # a value for each position or one for all; the counts are a claim until this was checked
        if count < 0 or number not in (count, 1) or codec.value_words(number) > left:
            raise damaged(rank, claim)
        start += _HEADER
        indices, used = codec.unpack_indices(words[start:], count, numel, rank)
        start += used
        # once more, as only decoding tells how many words coded positions take
        if codec.value_words(number) > words.numel() - start:
            raise damaged(rank, claim)
        selections.append(Selection(indices, codec.unpack_values(words[start:], number)))
        start += codec.value_words(number)
    return selections


@dataclass(frozen=True, slots=True)
class GatheredSelections:
    """The selections that every rank sent.

    Attributes
    ----------
    selections : list of list of Selection
        The selections of each rank; values are float32.
    flags : list of int
        The integer that each rank attached.
    bytes_sent : int
        Size of this rank's own messages in bytes, header and padding included.
    messages : int
        Number of collectives that the exchange took, 1 or 2.
    """

    selections: list[list[Selection]]
    flags: list[int]
    bytes_sent: int
    messages: int


class SparseAllGather:
    """All-gather of selections, whose size may differ from rank to rank, in one packed message.

    Parameters
    ----------
    codec : Codec or torch.dtype
        What positions and values are; a type for plain positions and values of this type.

    Attributes
    ----------
    words : RaggedAllGather
        The exchange underneath. Its ``capacity`` is the only state that a checkpoint needs.

    Raises
    ------
    InputError
        If values cannot travel as this type.
    """

    def __init__(self, codec: Codec | torch.dtype = PLAIN) -> None:
        self.codec = as_codec(codec)
        self.words = RaggedAllGather(kind=Kind.SELECTIONS)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as they will arrive, see :meth:`Codec.rounded`.

        Parameters
        ----------
        values : tensor, shape (n,)
            Values of any floating dtype.
        """
        return self.codec.rounded(values)

    def __call__(
        self,
        selections: Sequence[Selection],
        numel: int,
        group: dist.ProcessGroup | None = None,
        flag: int = 0,
        expected: tuple[int, int] = (1, 1),
        device: torch.device | str = "cpu",
        span: int | None = None,
    ) -> GatheredSelections:
        """Send this rank's selections and receive those of all ranks.

        Parameters
        ----------
        selections : sequence of Selection
            Positions below `numel`, and values as :meth:`rounded` returns them. There may be none.
        numel : int
            Number of elements of the dense gradient. It decides the width of an index (32 bits below 2³¹).
        group : torch.distributed.ProcessGroup, optional
            The ranks; the default group if None.
        flag : int
            A small integer that every rank learns from every other, such as a count of bad elements.
        expected : tuple of int
            Numbers of positions and values to make room for in the very first call, equal on all ranks.
        device : torch.device or str
            Device of the message.
        span : int, optional
            Number of elements that the positions of the first call are among; `numel` if None.

        Returns
        -------
        GatheredSelections
            What every rank sent.

        Raises
        ------
        ExchangeError
            If a message is damaged, or a rank is lost.
        """
        # without selections the message is empty, and the rank takes part all the same
        words = [torch.empty(0, dtype=torch.int32, device=device)]
        words += [pack(selection, numel, self.codec) for selection in selections]
        positions, values = expected
        # for the first call alone: afterwards the exchange goes by what it has seen
        room = self.codec.index_words(positions, span or numel, numel)
        room += _HEADER + self.codec.value_words(values)
        # no more selections than elements, and none of them twice
        # three headers: the counts, a value with two scales, one word more for a coded position
        limit = max(numel, 1) * (3 * _HEADER + PLAIN.index_words(1, numel))
        gathered = self.words(torch.cat(words), group, flag, room, limit)
        return GatheredSelections(
            selections=[
                unpack(each, numel, self.codec, rank) for rank, each in enumerate(gathered.words)
            ],
            flags=gathered.flags,
            bytes_sent=gathered.bytes_sent,
            messages=gathered.messages,
        )
