"""Sparse selections packed into words, and their all-gather.

A selection is `[count, number of values | indices | values]` in 32-bit words; a message holds several, one after the
other. Indices take 32 bits where that is enough, values take 32 or 16, or one value stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradstats.collectives.ragged import RaggedAllGather, check_positions, damaged
from gradstats.errors import InputError
from gradstats.primitives import Selection

__all__ = [
    "VALUE_DTYPES",
    "GatheredSelections",
    "SparseAllGather",
    "index_dtype",
    "pack",
    "unpack",
]

VALUE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types that values may travel as."""

_HEADER = 2
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


def pack(selection: Selection, numel: int) -> torch.Tensor:
    """Return a selection as int32 words.

    Parameters
    ----------
    selection : Selection
        Positions below `numel`, and values of the type that they travel as.
    numel : int
        Number of elements of the dense gradient. It decides the width of an index.

    Returns
    -------
    int32 tensor, shape (words,)
        Two counts, the positions and the values.
    """
    indices, values = selection.indices, selection.values
    header = torch.tensor(
        [indices.numel(), values.numel()], dtype=torch.int32, device=indices.device
    )
    if values.itemsize == 2 and values.numel() % 2:
        values = torch.cat([values, values.new_zeros(1)])
    positions = indices.to(index_dtype(numel)).contiguous()
    return torch.cat([header, positions.view(torch.int32), values.contiguous().view(torch.int32)])


def unpack(
    words: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32, rank: int = 0
) -> list[Selection]:
    """Return the selections that :func:`pack` put one after the other.

    Parameters
    ----------
    words : int32 tensor, shape (words,)
        Any number of packed selections.
    numel : int
        Number of elements of the dense gradient.
    dtype : torch.dtype
        The type that values travelled as.
    rank : int
        Rank that sent them.

    Returns
    -------
    list of Selection
        The selections, in order; values are float32.

    Raises
    ------
    ExchangeError
        If no rank can have packed these words. Values carry no checksum of their own: the network's has to do.
    """
    width, selections, start = index_dtype(numel), [], 0

    def take(count: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal start
        length = -(-count * dtype.itemsize // words.itemsize)
        # Cloned, as words may start at an odd offset, which a view as 64-bit integers refuses.
        part = words[start : start + length].clone().view(dtype)[:count]
        start += length
        return part

    while start < words.numel():
        left = 4 * (words.numel() - start - _HEADER)
        if left < 0:
            raise damaged(rank, "it ends in the middle of a header")
        count, number = take(_HEADER, torch.int32).tolist()
        room = count * width.itemsize + number * dtype.itemsize
        if count < 0 or number not in (count, 1) or room > left:
            raise damaged(rank, f"it claims {count} positions and {number} values in {left} bytes")
        indices = take(count, width).long()
        check_positions(indices, numel, rank)
        selections.append(Selection(indices, take(number, dtype).float()))
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
    dtype : torch.dtype
        Type that values travel as, one of :data:`VALUE_DTYPES`.

    Attributes
    ----------
    words : RaggedAllGather
        The exchange underneath. Its ``capacity`` is the only state that a checkpoint needs.

    Raises
    ------
    InputError
        If `dtype` is none of :data:`VALUE_DTYPES`.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in VALUE_DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in VALUE_DTYPES)
            raise InputError(f"values travel as {names}, not {dtype}")
        self.dtype = dtype
        self.words = RaggedAllGather()

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as they will travel.

        Parameters
        ----------
        values : tensor, shape (n,)
            Values of any floating dtype.

        Returns
        -------
        tensor, shape (n,)
            The values in this exchange's dtype. Those too large for it become its largest number.
        """
        if self.dtype == torch.float32 and values.dtype != torch.float64:
            return values.to(torch.float32)
        largest = torch.finfo(self.dtype).max
        return values.clamp(-largest, largest).to(self.dtype)

    def __call__(
        self,
        selections: Sequence[Selection],
        numel: int,
        group: dist.ProcessGroup | None = None,
        flag: int = 0,
        expected: tuple[int, int] = (1, 1),
        device: torch.device | str = "cpu",
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

        Returns
        -------
        GatheredSelections
            What every rank sent.

        Raises
        ------
        ExchangeError
            If a message is damaged, or a rank is lost.
        """
        words = [torch.empty(0, dtype=torch.int32, device=device)]
        words += [pack(selection, numel) for selection in selections]
        positions, values = expected
        room = positions * index_dtype(numel).itemsize + values * self.dtype.itemsize
        # no more selections than elements, and none of them twice
        limit = max(numel, 1) * (2 * _HEADER + index_dtype(numel).itemsize // 4)
        gathered = self.words(torch.cat(words), group, flag, _HEADER + -(-room // 4), limit)
        return GatheredSelections(
            selections=[
                unpack(each, numel, self.dtype, rank) for rank, each in enumerate(gathered.words)
            ],
            flags=gathered.flags,
            bytes_sent=gathered.bytes_sent,
            messages=gathered.messages,
        )
