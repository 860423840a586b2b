"""A ragged all-gather of positions alone, with one number from every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradstats.collectives.packed import index_dtype
from gradstats.collectives.ragged import RaggedAllGather, check_positions, damaged

__all__ = ["GatheredIndices", "IndexAllGather"]


@dataclass(frozen=True, slots=True)
class GatheredIndices:
    """The positions that every rank sent.

    Attributes
    ----------
    indices : list of int64 tensors, shape (k̂_r,)
        Positions, by rank.
    numbers : list of float
        The float32 number that each rank attached.
    flags : list of int
        The integer that each rank attached.
    bytes_sent : int
        Size of this rank's own messages in bytes, header and padding included.
    """

    indices: list[torch.Tensor]
    numbers: list[float]
    flags: list[int]
    bytes_sent: int


class IndexAllGather:
    """All-gather of `[number | indices]`, whose length may differ from rank to rank.

    Attributes
    ----------
    words : RaggedAllGather
        The exchange underneath. Its ``capacity`` is the only state that a checkpoint needs.
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
        most: int | None = None,
    ) -> GatheredIndices:
        """Send this rank's positions and receive those of all ranks.

        Parameters
        ----------
        indices : int64 tensor, shape (k̂,)
            Positions that this rank sends; there may be none.
        numel : int
            Number of elements of the dense gradient. It decides the width of an index (32 bits below 2³¹).
        group : torch.distributed.ProcessGroup, optional
            The ranks; the default group if None.
        number : float
            A float32 that every rank learns from every other.
        flag : int
            A small integer that every rank learns from every other.
        expected : int
            Number of indices to make room for in the very first call, equal on all ranks.
        most : int, optional
            Largest number of indices that a rank can have sent; `numel` if None.

        Returns
        -------
        GatheredIndices
            What every rank sent.

        Raises
        ------
        ExchangeError
            If a message is damaged, or a rank is lost.
        """
        dtype = index_dtype(numel)
        attached = torch.tensor([number], device=indices.device).view(torch.int32)
        words = torch.cat([attached, indices.to(dtype).contiguous().view(torch.int32)])
        width = dtype.itemsize // 4
        limit = 1 + (numel if most is None else most) * width
        gathered = self.words(words, group, flag, 1 + expected * width, limit)
        positions = []
        for rank, each in enumerate(gathered.words):
            if not len(each) or (len(each) - 1) % width:
                raise damaged(rank, "it ends in the middle of a position")
            # Cloned, as the indices start at an odd offset, which a view as 64-bit integers refuses.
            positions.append(each[1:].clone().view(dtype).long())
            check_positions(positions[-1], numel, rank)
        return GatheredIndices(
            indices=positions,
            numbers=[float(each[:1].view(torch.float32)) for each in gathered.words],
            flags=gathered.flags,
            bytes_sent=gathered.bytes_sent,
        )
