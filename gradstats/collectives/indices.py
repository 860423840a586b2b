"""A ragged all-gather of positions alone, with one number from every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradstats.collectives.codec import PLAIN, Codec
from gradstats.collectives.header import Kind
from gradstats.collectives.ragged import RaggedAllGather, damaged

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
    """All-gather of `[number | indices]`, whose length may differ from rank to rank; coded ones are counted first.

    Parameters
    ----------
    codec : Codec
        What positions are.

    Attributes
    ----------
    words : RaggedAllGather
        The exchange underneath. Its ``capacity`` is the only state that a checkpoint needs.
    """

    def __init__(self, codec: Codec = PLAIN) -> None:
        self.codec = codec
        self.words = RaggedAllGather(kind=Kind.POSITIONS)

    def __call__(
        self,
        indices: torch.Tensor,
        numel: int,
        group: dist.ProcessGroup | None = None,
        number: float = 0.0,
        flag: int = 0,
        expected: int = 1,
        most: int | None = None,
        span: int | None = None,
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
        span : int, optional
            Number of elements that the positions of the first call are among; `numel` if None.

        Returns
        -------
        GatheredIndices
            What every rank sent.

        Raises
        ------
        ExchangeError
            If a message is damaged, or a rank is lost.
        """
        # the length of a message tells how many plain positions it has, but not how many coded ones
        coded = self.codec != PLAIN
        head = [torch.tensor([number], device=indices.device).view(torch.int32)]
        if coded:
            head.append(head[0].new_tensor([indices.numel()]))
        room = len(head) + self.codec.index_words(expected, span or numel, numel)
        # 4: at most two words of head, and two that a Rice code needs before its gaps
        limit = 4 + PLAIN.index_words(numel if most is None else most, numel)
        words = torch.cat([*head, self.codec.pack_indices(indices, numel)])
        gathered = self.words(words, group, flag, room, limit)
        # a position takes two words from 2³¹ elements on
        width, positions = PLAIN.index_words(1, numel), []
        for rank, each in enumerate(gathered.words):
            rest = each[len(head) :]
            if len(each) < len(head) or (not coded and len(rest) % width):
                raise damaged(rank, "it ends in the middle of a position")
            count = int(each[1]) if coded else len(rest) // width
            rank_positions, used = self.codec.unpack_indices(rest, count, numel, rank)
            if used != len(rest):
                raise damaged(rank, f"its {count} positions end before it does")
            positions.append(rank_positions)
        return GatheredIndices(
            indices=positions,
            numbers=[float(each[:1].view(torch.float32)) for each in gathered.words],
            flags=gathered.flags,
            bytes_sent=gathered.bytes_sent,
        )
