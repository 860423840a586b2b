"""Sparse selections packed into words, and their all-gather.

A selection is `[count, number of values | indices | values]` in 32-bit words, several of them one after the other.
Indices take 32 bits where that is enough, values 32 or 16, or one value stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradstats.collectives.ragged import RaggedAllGather
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
"""What values may travel as."""

_HEADER = 2
_INT32_LIMIT = 2**31


def index_dtype(numel: int) -> torch.dtype:
    """Return the integer that holds every position of a gradient of `numel` elements: 32 bits below 2³¹."""
    return torch.int32 if numel < _INT32_LIMIT else torch.int64


def pack(selection: Selection, numel: int) -> torch.Tensor:
    """Return a selection as int32 words.

    Parameters
    ----------
    selection : Selection
        Positions below `numel`; values of the dtype they travel as.
    numel : int
        Number of elements of the dense gradient. It decides the width of an index.

    Returns
    -------
    int32 tensor, shape (words,)
        Two counts, the positions, the values.
    """
    indices, values = selection.indices, selection.values
    header = torch.tensor(
        [indices.numel(), values.numel()], dtype=torch.int32, device=indices.device
    )
    if values.itemsize == 2 and values.numel() % 2:
        values = torch.cat([values, values.new_zeros(1)])
    positions = indices.to(index_dtype(numel)).contiguous()
    return torch.cat([header, positions.view(torch.int32), values.contiguous().view(torch.int32)])


def unpack(words: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32) -> list[Selection]:
    """Return the selections that :func:`pack` put one after the other.

    Parameters
    ----------
    words : int32 tensor, shape (words,)
        Any number of packed selections.
    numel : int
        Number of elements of the dense gradient.
    dtype : torch.dtype
        The dtype that values travelled as.

    Returns
    -------
    list of Selection
        Values are float32.
    """
    width, selections, start = index_dtype(numel), [], 0

    def take(count: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal start
        length = -(-count * dtype.itemsize // words.itemsize)
        # clone: words may start at an odd offset that a view of 64-bit integers would refuse
        part = words[start : start + length].clone().view(dtype)[:count]
        start += length
        return part

    while start < words.numel():
        count, number = take(_HEADER, torch.int32).tolist()
        indices = take(count, width).long()
        selections.append(Selection(indices, take(number, dtype).float()))
    return selections


@dataclass(frozen=True, slots=True)
class GatheredSelections:
    """What every rank sent.

    Attributes
    ----------
    selections : per rank, its selections; values are float32.
    flags : per rank, the integer it attached.
    bytes_sent : bytes of this rank's own messages, header and padding included.
    messages : collectives it took, 1 or 2.
    """

    selections: list[list[Selection]]
    flags: list[int]
    bytes_sent: int
    messages: int


class SparseAllGather:
    """All-gather of selections of different size on every rank, in one packed message.

    Parameters
    ----------
    dtype : values travel as, one of :data:`VALUE_DTYPES`.

    Attributes
    ----------
    words : the exchange below; its ``capacity`` is all there is to checkpoint.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in VALUE_DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in VALUE_DTYPES)
            raise InputError(f"values travel as {names}, not {dtype}")
        self.dtype = dtype
        self.words = RaggedAllGather()

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as they will travel; those too large for 16 bits become the largest there is."""
        if self.dtype == torch.float32:
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
        """Exchange this rank's selections for everybody's.

        Parameters
        ----------
        selections : positions, below `numel`, and values as :meth:`rounded` returns them. There may be none.
        numel : elements of the dense gradient; decides the width of an index (32 bits below 2³¹).
        group : of the ranks; the default one if None.
        flag : a small integer every rank learns from every other, such as a count of bad elements.
        expected : positions and values to make room for in the very first call, equal on all ranks.
        device : of the message.
        """
        words = [torch.empty(0, dtype=torch.int32, device=device)]
        words += [pack(selection, numel) for selection in selections]
        positions, values = expected
        room = positions * index_dtype(numel).itemsize + values * self.dtype.itemsize
        gathered = self.words(torch.cat(words), group, flag, _HEADER + -(-room // 4))
        return GatheredSelections(
            selections=[unpack(each, numel, self.dtype) for each in gathered.words],
            flags=gathered.flags,
            bytes_sent=gathered.bytes_sent,
            messages=gathered.messages,
        )
