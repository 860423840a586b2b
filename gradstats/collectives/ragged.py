"""An all-gather of messages whose length differs from rank to rank.

A collective takes messages of one length, so they are padded to a capacity that all ranks derive from the counts that
all of them have seen. If a count exceeds it, one more message carries the rest: nothing is ever dropped, and in a
steady state every step takes one message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradstats.collectives.header import (
    HEADER_WORDS,
    Header,
    Kind,
    check_bodies,
    check_kinds,
    damaged,
    read_headers,
)
from gradstats.collectives.plain import all_gather, check_moments
from gradstats.errors import InputError

__all__ = ["GatheredWords", "RaggedAllGather", "check_positions", "damaged"]

_MOST = 2**31 - 1
_TOO_MANY = -1
"""Length of a message that is longer."""


def check_positions(indices: torch.Tensor, numel: int, rank: int) -> None:
    """Check that positions lie in a gradient: one that does not would be written elsewhere, or stop a GPU.

    Parameters
    ----------
    indices : int64 tensor, shape (k̂,)
        Positions that a rank sent.
    numel : int
        Number of elements of the dense gradient.
    rank : int
        Rank that they came from.

    Raises
    ------
    ExchangeError
        If one is negative, or not below `numel`.
    """
    if not indices.numel():
        return
    low, high = torch.stack(indices.aminmax()).tolist()
    if low < 0 or high >= numel:
        raise damaged(rank, f"it has position {low if low < 0 else high} of {numel} elements")


@dataclass(frozen=True, slots=True)
class GatheredWords:
    """The words that every rank sent.

    Attributes
    ----------
    words : list of int32 tensors, shape (n_r,)
        Words, by rank.
    flags : list of int
        The integer that each rank attached.
    bytes_sent : int
        Size of this rank's own messages in bytes, header and padding included.
    messages : int
        Number of collectives that the exchange took, 1 or 2.
    """

    words: list[torch.Tensor]
    flags: list[int]
    bytes_sent: int
    messages: int


class RaggedAllGather:
    """All-gather of `[header | words]`, where each rank's message is decoded by its own length.

    An instance remembers the capacity between calls, and must be called equally often on all ranks.

    Parameters
    ----------
    capacity : int
        Number of words that the first message has room for, equal on all ranks; 0 to take it from the first call.
    kind : Kind
        What the words are.

    Attributes
    ----------
    capacity : int
        Number of words that the next first message has room for; the only state that a checkpoint needs.
    """

    def __init__(self, capacity: int = 0, kind: Kind = Kind.WORDS) -> None:
        self.capacity = capacity
        self._kind = kind

    def __call__(
        self,
        words: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        flag: int = 0,
        expected: int = 1,
        limit: int = _MOST,
    ) -> GatheredWords:
        """Send this rank's words and receive those of all ranks.

        Parameters
        ----------
        words : int32 tensor, shape (n,)
            Words that this rank sends; there may be none.
        group : torch.distributed.ProcessGroup, optional
            The ranks; the default group if None.
        flag : int
            A small integer that every rank learns from every other, such as a count of bad elements.
        expected : int
            Number of words to make room for in the very first call, equal on all ranks.
        limit : int
            Largest number of words that a rank can have sent.

        Returns
        -------
        GatheredWords
            What every rank sent.

        Raises
        ------
        ExchangeError
            If a message is damaged or claims to be longer than `limit`, or a rank is lost.
        InputError
            If another rank exchanges something else, is at another step, or has more than 2³¹ − 1 words to send, on all
            ranks.
        """
        capacity = self.capacity = self.capacity or max(1, expected)
        length = words.numel()
        if length > _MOST:
            # more than a header can say: the others are told, as they would wait for this rank
            words, length = words[:0], _TOO_MANY
        header = Header.now(self._kind, length, flag)
        # the checksum is of all words, also of those that a second message carries
        message = torch.cat([header.words(words), words[:capacity]])
        first = _exchange(message, HEADER_WORDS + capacity, group)
        parts = [first]
        headers = read_headers(first[:, :HEADER_WORDS], header, dist.get_rank(group))
        # first, as differing moments lead to an exchange of texts, which takes ranks of one kind
        check_kinds(headers)
        check_moments(headers, group, words.device)
        counts, flags = [h.length for h in headers], [h.flag for h in headers]
        if _TOO_MANY in counts:
            raise InputError(
                f"rank {counts.index(_TOO_MANY)} has more than {_MOST} words to send at once: keep fewer elements, "
                "or send them layer by layer"
            )
        for rank, count in enumerate(counts):
            # before a second message is made as long as the largest count
            if not 0 <= count <= limit:
                raise damaged(rank, f"it claims {count} words, of {limit} at most")
        # from what all ranks know, so all of them send a second message, or none
        rest = max(counts) - capacity
        if rest > 0:
            parts.append(_exchange(words[capacity:], rest, group))
        bodies = first[:, HEADER_WORDS:]
        if rest > 0:
            bodies = torch.cat([bodies, *parts[1:]], dim=1)
        # each by its own length: padding is never taken for words
        arrived = [bodies[rank, :n] for rank, n in enumerate(counts)]
        check_bodies(arrived, [h.body for h in headers])
        # by what all ranks know, so that their capacities stay equal
        self._adapt(max(counts), flags)
        return GatheredWords(
            words=arrived,
            flags=flags,
            bytes_sent=sum(part.shape[1] * part.element_size() for part in parts),
            messages=len(parts),
        )

    def _adapt(self, largest: int, flags: list[int]) -> None:
        """Leave a quarter of room above the largest count; shrink only if half the message is padding.

        A refused step, whose messages may be empty, says nothing about the next one's size.
        """
        if not any(flags) and (largest > self.capacity or largest < self.capacity // 2):
            self.capacity = max(1, largest + largest // 4)


def _exchange(words: torch.Tensor, length: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather int32 words, padded to `length`, and return them as (ranks, length)."""
    # zeros behind the words change no checksum
    message = torch.zeros(length, dtype=torch.int32, device=words.device)
    message[: words.numel()] = words
    gathered = message.new_empty(dist.get_world_size(group) * length)
    all_gather(gathered, message, group)
    return gathered.view(-1, length)
