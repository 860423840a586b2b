"""A ragged sparse all-gather in one packed message.

Each rank sends `[count, flag | indices | values]` as one tensor of 32-bit words, and every rank decodes every
message by the sender's own count. All messages of a collective must have the same length, so they are padded to a
capacity that all ranks derive from the counts they have all seen. When a count exceeds it, one more
message carries the rest: nothing is ever dropped, and in a steady state there is one message a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradstats.collectives.plain import all_gather

__all__ = ["GatheredSelections", "Ragged", "SparseAllGather", "index_dtype"]

_HEADER = 2
_INT32_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class GatheredSelections:
    """What every rank sent.

    Attributes
    ----------
    indices : per rank, int64 tensor (k̂_r,).
    values : per rank, float32 tensor (k̂_r,).
    flags : per rank, the integer it attached.
    bytes_sent : bytes of this rank's own messages, padding included.
    messages : collectives it took, 1 or 2.
    """

    indices: list[torch.Tensor]
    values: list[torch.Tensor]
    flags: list[int]
    bytes_sent: int
    messages: int

    def mean(self, numel: int) -> torch.Tensor:
        """Return the dense average over ranks, float32 (numel,); the same bits on every rank."""
        total = torch.zeros(numel, device=self.values[0].device)
        for indices, values in zip(self.indices, self.values, strict=True):
            total.index_add_(0, indices, values)
        return total.div_(len(self.values))


def index_dtype(numel: int) -> torch.dtype:
    """Return the integer that holds every position of a gradient of `numel` elements: 32 bits below 2³¹."""
    return torch.int32 if numel < _INT32_LIMIT else torch.int64


class Ragged:
    """An all-gather of messages of different length, padded to a capacity that it adapts.

    The instance remembers the capacity between calls; it must be called the same number of times on all ranks, with the
    same `numel`.

    Parameters
    ----------
    capacity : elements the first message has room for, equal on all ranks. The target k is a good choice.
    process_group : the group; the default one if None.
    """

    def __init__(self, capacity: int = 1, process_group: dist.ProcessGroup | None = None) -> None:
        self.capacity = max(1, capacity)
        self.process_group = process_group

    def _adapt(self, largest: int, flags: list[int]) -> None:
        """Leave a quarter of room above the largest count; shrink only when half the message is padding.

        A refused step, whose messages may be empty, says nothing about the next one's size.
        """
        if not any(flags) and (largest > self.capacity or largest < self.capacity // 2):
            self.capacity = max(1, largest + largest // 4)

    def _exchange(self, message: torch.Tensor) -> torch.Tensor:
        """All-gather int32 (words,); return (world, words)."""
        world = dist.get_world_size(self.process_group)
        gathered = message.new_empty(world * message.numel())
        all_gather(gathered, message, self.process_group)
        return gathered.view(world, -1)


class SparseAllGather(Ragged):
    """All-gather of (indices, values) of different lengths on every rank.

    Parameters are those of :class:`Ragged`.
    """

    def __call__(
        self, indices: torch.Tensor, values: torch.Tensor, numel: int, flag: int = 0
    ) -> GatheredSelections:
        """Exchange this rank's selection for everybody's.

        Parameters
        ----------
        indices : int64 (k̂,), positions in the flattened gradient; may be empty.
        values : (k̂,), any floating dtype, sent as float32.
        numel : elements of the dense gradient; decides the width of an index (32 bits below 2³¹).
        flag : a small integer every rank learns from every other, such as a count of bad elements.
        """
        count = int(indices.numel())
        words = index_dtype(numel).itemsize // torch.int32.itemsize
        values = values.to(torch.float32)
        capacity = self.capacity
        first = self._gather(indices[:capacity], values[:capacity], capacity, words, count, flag)
        counts = first[:, 0].tolist()
        rest = max(counts) - capacity
        parts = [(first, capacity)]
        if rest > 0:
            more = self._gather(
                indices[capacity:], values[capacity:], rest, words, max(0, count - capacity), flag
            )
            parts.append((more, rest))
        flags = first[:, 1].tolist()
        self._adapt(max(counts), flags)
        gathered = [self._decode(parts, rank, words) for rank in range(len(counts))]
        return GatheredSelections(
            indices=[i for i, _ in gathered],
            values=[v for _, v in gathered],
            flags=flags,
            bytes_sent=sum(part.shape[1] * part.element_size() for part, _ in parts),
            messages=len(parts),
        )

    def _gather(
        self,
        indices: torch.Tensor,
        values: torch.Tensor,
        capacity: int,
        words: int,
        count: int,
        flag: int,
    ) -> torch.Tensor:
        """All-gather one message; return int32 (world, words)."""
        message = torch.zeros(
            _HEADER + capacity * (words + 1), dtype=torch.int32, device=values.device
        )
        message[0], message[1] = count, flag
        width = torch.int32 if words == 1 else torch.int64
        sent = values.numel()
        message[_HEADER : _HEADER + sent * words] = indices.to(width).view(torch.int32)
        offset = _HEADER + capacity * words
        message[offset : offset + sent] = values.contiguous().view(torch.int32)
        return self._exchange(message)

    @staticmethod
    def _decode(
        parts: list[tuple[torch.Tensor, int]], rank: int, words: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indices, values = [], []
        for gathered, capacity in parts:
            row = gathered[rank]
            # clone: the index words start at an odd offset that an int64 view would refuse
            sent = min(int(row[0]), capacity)
            packed = row[_HEADER : _HEADER + sent * words].clone()
            indices.append(packed.view(torch.int32 if words == 1 else torch.int64).long())
            offset = _HEADER + capacity * words
            values.append(row[offset : offset + sent].clone().view(torch.float32))
        return torch.cat(indices), torch.cat(values)
