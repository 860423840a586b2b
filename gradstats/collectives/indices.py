"""A ragged all-gather of positions alone, with one number a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradstats.collectives.packed import index_dtype
from gradstats.collectives.ragged import RaggedAllGather

__all__ = ["GatheredIndices", "IndexAllGather"]


@dataclass(frozen=True, slots=True)
class GatheredIndices:
    """What every rank sent.

    Attributes
    ----------
    indices : per rank, int64 tensor (k̂_r,).
    numbers : per rank, the float32 number it attached.
    flags : per rank, the integer it attached.
    bytes_sent : bytes of this rank's own messages, header and padding included.
    """

    indices: list[torch.Tensor]
    numbers: list[float]
    flags: list[int]
    bytes_sent: int


class IndexAllGather:
    """All-gather of `[number | indices]`, of different length on every rank.

    Attributes
    ----------
    words : the exchange below; its ``capacity`` is all there is to checkpoint.
    """

    def __init__(self) -> None:
        self.words = RaggedAllGather()

    def __call__(
        self,
        indices: torch.Tensor,
        numel: int,
        group: dist.ProcessGroup | None = None,
        number: float = 0.0,
        flag: int = 0,
        expected: int = 1,
    ) -> GatheredIndices:
        """Exchange this rank's positions for everybody's.

        Parameters
        ----------
        indices : int64 (k̂,); may be empty.
        numel : elements of the dense gradient; decides the width of an index (32 bits below 2³¹).
        group : of the ranks; the default one if None.
        number : a float32 every rank learns from every other.
        flag : likewise a small integer.
        expected : indices to make room for in the very first call, equal on all ranks.
        """
        dtype = index_dtype(numel)
        attached = torch.tensor([number], device=indices.device).view(torch.int32)
        words = torch.cat([attached, indices.to(dtype).contiguous().view(torch.int32)])
        gathered = self.words(words, group, flag, 1 + expected * dtype.itemsize // 4)
        return GatheredIndices(
            # clone: the index words start at an odd offset that a view of 64-bit integers would refuse
            indices=[each[1:].clone().view(dtype).long() for each in gathered.words],
            numbers=[float(each[:1].view(torch.float32)) for each in gathered.words],
            flags=gathered.flags,
            bytes_sent=gathered.bytes_sent,
        )
