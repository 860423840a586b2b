"""An all-gather of messages whose length differs from rank to rank.

A collective takes messages of one length, so they are padded to a capacity that all ranks derive from the counts they
have all seen. When a count exceeds it, one more message carries the rest: nothing is ever dropped, and in a steady
state there is one message a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradstats.collectives.plain import all_gather

__all__ = ["GatheredWords", "RaggedAllGather"]

_HEADER = 2


@dataclass(frozen=True, slots=True)
class GatheredWords:
    """What every rank sent.

    Attributes
    ----------
    words : per rank, int32 (n_r,).
    flags : per rank, the integer it attached.
    bytes_sent : bytes of this rank's own messages, header and padding included.
    messages : collectives it took, 1 or 2.
    """

    words: list[torch.Tensor]
    flags: list[int]
    bytes_sent: int
    messages: int


class RaggedAllGather:
    """All-gather of `[count, flag | words]`, every rank's decoded by its own count.

    The instance remembers the capacity between calls, and must be called equally often on all ranks.

    Attributes
    ----------
    capacity : words the first message has room for, equal on all ranks; 0 before the first call. All there is to
        checkpoint.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity

    def __call__(
        self,
        words: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        flag: int = 0,
        expected: int = 1,
    ) -> GatheredWords:
        """Exchange this rank's words for everybody's.

        Parameters
        ----------
        words : int32 (n,); may be empty.
        group : of the ranks; the default one if None.
        flag : a small integer every rank learns from every other, such as a count of bad elements.
        expected : words to make room for in the very first call, equal on all ranks.
        """
        capacity = self.capacity = self.capacity or max(1, expected)
        header = torch.tensor([words.numel(), flag], dtype=torch.int32, device=words.device)
        first = _exchange(torch.cat([header, words[:capacity]]), _HEADER + capacity, group)
        parts = [first]
        counts, flags = first[:, :_HEADER].t().tolist()
        rest = max(counts) - capacity
        if rest > 0:
            parts.append(_exchange(words[capacity:], rest, group))
        self._adapt(max(counts), flags)
        bodies = torch.cat([first[:, _HEADER:], *parts[1:]], dim=1)
        return GatheredWords(
            words=[bodies[rank, :n] for rank, n in enumerate(counts)],
            flags=flags,
            bytes_sent=sum(part.shape[1] * part.element_size() for part in parts),
            messages=len(parts),
        )

    def _adapt(self, largest: int, flags: list[int]) -> None:
        """Leave a quarter of room above the largest count; shrink only when half the message is padding.

        A refused step, whose messages may be empty, says nothing about the next one's size.
        """
        if not any(flags) and (largest > self.capacity or largest < self.capacity // 2):
            self.capacity = max(1, largest + largest // 4)


def _exchange(words: torch.Tensor, length: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather int32 words, padded to `length`; return (world, length)."""
    message = torch.zeros(length, dtype=torch.int32, device=words.device)
    message[: words.numel()] = words
    gathered = message.new_empty(dist.get_world_size(group) * length)
    all_gather(gathered, message, group)
    return gathered.view(-1, length)
