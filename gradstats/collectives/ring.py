"""Rings of point-to-point messages, and an all-reduce over them that takes one bit per element and hop.

A ring all-reduce cuts the vector into as many parts as there are ranks. In the reduce period every part travels once
around the ring, and each rank merges its own contribution into it; in the gather period the finished parts travel
around.

gloo runs point-to-point messages without the worker thread that :mod:`gradstats.collectives.plain` must wait for: after
`wait` has returned, only the caller holds the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from gradstats.collectives.header import checksum, damaged, words_of
from gradstats.collectives.plain import exchange_errors
from gradstats.primitives.backend import device_code

__all__ = [
    "CHECK",
    "Merge",
    "Ring",
    "one_bit_ring",
    "pack_bits",
    "reduce_bits",
    "split",
    "unpack_bits",
]

CHECK = 4
"""Bytes of the checksum behind each message."""

Merge: TypeAlias = Callable[[torch.Tensor, int, int], Callable[[torch.Tensor], torch.Tensor]]
"""``merge(local, local_count, received_count)`` returns a function that turns the received bits into the merged bits.

All bits are packed, uint8 of equal length; the counts say how many ranks' contributions are in them. `merge` runs while
the message is on its way, so random bits that can be drawn before it arrives should be drawn there.
"""


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack bits, eight a byte.

    Parameters
    ----------
    bits : bool tensor, shape (n,)
        The bits.

    Returns
    -------
    uint8 tensor, shape (⌈n/8⌉,)
        Element i is bit i mod 8, counted from the lowest, of byte i div 8.
    """
    code = device_code(bits)
    if code is not None:
        return code.pack_bits(bits)
    packed = np.packbits(bits.cpu().numpy(), bitorder="little")
    return torch.from_numpy(packed).to(bits.device)


def unpack_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the first bits of what :func:`pack_bits` made.

    Parameters
    ----------
    packed : uint8 tensor, shape (bytes,)
        Packed bits.
    numel : int
        Number of bits wanted.

    Returns
    -------
    bool tensor, shape (numel,)
        The bits.
    """
    code = device_code(packed)
    if code is not None:
        return code.unpack_bits(packed, numel)
    # the order within a byte is part of the message: code for devices packs in the same one
    bits = np.unpackbits(packed.cpu().numpy(), count=numel, bitorder="little")
    # bytes of 0 and 1 are booleans as they are
    return torch.from_numpy(bits.view(np.bool_)).to(packed.device)


class Ring:
    """A rank's place in a ring, and the two periods of a ring all-reduce.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The process group; the default group if None.
    members : sequence of int, optional
        Ranks within the group, in the order of the ring; all of them by default. This rank must be one of them.

    Attributes
    ----------
    size : int
        Number of ranks in the ring.
    position : int
        Position of this rank in the ring, from 0.
    bytes_sent : int
        Number of bytes that this rank has sent so far.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, members: Sequence[int] | None = None
    ) -> None:
        self._group = group
        if members is None:
            members = range(dist.get_world_size(group))
        self.size = len(members)
        self.position = members.index(dist.get_rank(group))
        self._next = members[(self.position + 1) % self.size]
        # index −1, for the first in the ring, is the last
        self._previous = members[self.position - 1]
        self._backends = _backends(group)
        self.bytes_sent = 0

    def reduce_scatter(
        self,
        parts: list[torch.Tensor],
        prepare: Callable[[int, int], Callable[[torch.Tensor], torch.Tensor]],
    ) -> int:
        """Merge every part over the ring, so that each rank ends with one complete part.

        Parameters
        ----------
        parts : list of tensors
            One message for each rank, updated in place. Part i has the same dtype and length on every rank and may be
            empty; nothing then travels. Only the part at this rank's own position is sent as it is; of the others only
            length and dtype matter.
        prepare : callable
            ``prepare(i, m)`` is called while part i is on its way from the previous rank, with the contributions of m
            ranks in it. It returns the function that turns the received message into the next one.

        Returns
        -------
        int
            Index of the part that is complete on this rank.
        """
        for hop in range(self.size - 1):
            # the part that came in at the hop before; at first this rank's own
            outgoing = (self.position - hop) % self.size
            index = (outgoing - 1) % self.size
            incoming, works = self._start(parts[outgoing], parts[index])
            if incoming.numel():
                # before waiting: what needs no message is done while the message travels
                merge = prepare(index, hop + 1)
                _wait(works)
                parts[index] = merge(self._checked(incoming, parts[index]))
            else:
                _wait(works)
        # the part that came in last has been at every other rank before
        return (self.position + 1) % self.size

    def all_gather(self, parts: list[torch.Tensor], complete: int) -> None:
        """Replace all parts by the complete ones.

        Parameters
        ----------
        parts : list of tensors
            One message for each rank, updated in place.
        complete : int
            Index of the part that is complete on this rank.
        """
        for hop in range(self.size - 1):
            outgoing = (complete - hop) % self.size
            index = (outgoing - 1) % self.size
            incoming, works = self._start(parts[outgoing], parts[index])
            _wait(works)
            if incoming.numel():
                parts[index] = self._checked(incoming, parts[index])

    def _start(
        self, part: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, list[dist.Work]]:
        """Send a part with its checksum; return where another comes in, and what to wait for."""
        operations = []
        # gloo sends from the host's memory alone: given a device's it ends the process
        by_host = self._backends.get(part.device.type) == dist.Backend.GLOO
        place = torch.device("cpu") if by_host else part.device
        outgoing = _framed(part).to(place)
        length = like.numel() * like.element_size() + CHECK if like.numel() else 0
        incoming = torch.empty(length, dtype=torch.uint8, device=place)
        # all ranks know which parts are empty, and neither send nor expect them
        if outgoing.numel():
            operations.append(
                dist.P2POp(dist.isend, outgoing, group=self._group, group_peer=self._next)
            )
            self.bytes_sent += outgoing.numel()
        if incoming.numel():
            operations.append(
                dist.P2POp(dist.irecv, incoming, group=self._group, group_peer=self._previous)
            )
        with exchange_errors():
            # in one batch: sends and receives that NCCL is given one by one may wait for each other
            works = dist.batch_isend_irecv(operations) if operations else []
        return incoming, works

    def _checked(self, incoming: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the part in a message, if it has its checksum."""
        # cloned, as the checksum may begin where an int32 may not
        octets, sent = incoming[:-CHECK], incoming[-CHECK:].clone().view(torch.int32)[0]
        if not torch.equal(sent, checksum(words_of(octets))):
            raise damaged(self._previous, "what it carries does not have its checksum")
        return octets.clone().view(like.dtype).view(like.shape).to(like.device)


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend that a group has for each type of device."""
    pairs = (each.partition(":") for each in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def _octets(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(-1).view(torch.uint8)


def _framed(part: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a part with their checksum; nothing of an empty one."""
    octets = _octets(part)
    if not part.numel():
        return octets
    return torch.cat([octets, checksum(words_of(octets))[None].view(torch.uint8)])


def _wait(works: list[dist.Work]) -> None:
    with exchange_errors():
        for work in works:
            work.wait()


def split(words: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut a tensor into views whose lengths differ by one at most.

    Parameters
    ----------
    words : tensor, shape (n,)
        The tensor.
    count : int
        Number of views; some are empty if it exceeds n.

    Returns
    -------
    list of tensors
        Views of the tensor, in order.
    """
    # the cuts of `compressors.micro.partition`, by which exchanges are priced
    ends = [i * words.numel() // count for i in range(count + 1)]
    return [words[a:b] for a, b in pairwise(ends)]


def one_bit_ring(
    packed: torch.Tensor, merge: Merge, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, int]:
    """All-reduce one bit per element over a ring.

    Parameters
    ----------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        This rank's bits, as :func:`gradstats.collectives.ring.pack_bits` makes them. Their number d is the same on all
        ranks and may be less than the number of ranks.
    merge : Merge
        Rule that merges two ranks' packed bits, see :data:`Merge`. It also gets padding past the end, whose values are
        not read.
    group : torch.distributed.ProcessGroup, optional
        The ranks; the default group if None.

    Returns
    -------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        The merged bits, the same on every rank.
    bytes_sent : int
        Bytes that this rank sent: 2·d·(M − 1)/M bits for M ranks, and at most five more for each hop: a checksum,
        and padding.
    """
    ring = Ring(group)
    return reduce_bits([ring], packed, merge, contributions=1), ring.bytes_sent


def reduce_bits(
    rings: Sequence[Ring], packed: torch.Tensor, merge: Merge, contributions: int
) -> torch.Tensor:
    """All-reduce packed bits over the first ring, and each part of it over the remaining rings.

    Parameters
    ----------
    rings : sequence of Ring
        Rings that this rank is in, at least one.
    packed : uint8 tensor, shape (bytes,)
        This rank's packed bits, of the same length on all ranks.
    merge : Merge
        Rule that merges two packed messages, see :data:`Merge`.
    contributions : int
        Number of ranks whose bits are already in `packed`.

    Returns
    -------
    uint8 tensor, shape (bytes,)
        The merged bits, the same on every rank.
    """
    ring, *others = rings
    # Cut between bytes, so that one packing serves all parts and no part pads its end.
    parts = split(packed, ring.size)

    def prepare(index: int, hops: int) -> Callable[[torch.Tensor], torch.Tensor]:
        # still this rank's own bits: in this period each part comes by once
        return merge(parts[index], contributions, hops * contributions)

    complete = ring.reduce_scatter(parts, prepare)
    if others:
        # the part holds the bits of all ranks of this ring
        parts[complete] = reduce_bits(others, parts[complete], merge, contributions * ring.size)
    ring.all_gather(parts, complete)
    return torch.cat(parts)
