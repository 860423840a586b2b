"""Cascading compression, the baseline that compresses a partial sum at every hop of a ring."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from gradstats.collectives import all_gather_flags
from gradstats.collectives.ring import CHECK, Ring, split
from gradstats.compressors.base import Reduced
from gradstats.compressors.cost import FLAG, Exchange, Load, Work
from gradstats.compressors.micro import partition
from gradstats.compressors.signs import (
    SCALE_BYTES,
    SignCompressor,
    mean_magnitude,
    packed_signs,
    packed_stochastic_signs,
    read_message,
    sign_message,
    signed,
)

__all__ = ["Cascading"]


class Cascading(SignCompressor):
    """Cascading compression: the partial sum is compressed to scale·sign anew at every hop of a ring.

    The mean is s₃ = Q(…Q(Q(g₁) + g₂)… + g_M)/M. Every part of the vector has its own scale. There is no memory.

    Parameters
    ----------
    stochastic : bool
        Whether Q is SSDM's compression (‖v‖₂ times stochastic signs, unbiased), as in the paper. If false, Q is
        (‖v‖₁/d)·sgn(v), which is biased and has a bounded error.
    seed : int
        Seed of the signs, at least 0 and equal on all ranks. Each rank draws from a stream of its own.

    Raises
    ------
    InputError
        If the seed is negative.

    Notes
    -----
    Source: Marsit (Wu et al. 2022), section 3.2 and appendix A, which warn against it: the squared error is bounded by
    (2D)^M·G²/M only.

    Differs from the paper: Q draws its signs by the probability of the appendix, as section 3.2's can exceed 1. A
    part of the vector without elements sends nothing, not even a scale.
    """

    feedback = False

    def __init__(self, stochastic: bool = True, seed: int = 0) -> None:
        self.stochastic = stochastic
        super().__init__(seed)

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return the hops of a ring all-reduce, each with a scale and one bit for each element of a part."""
        numel, world = load.numel, load.world
        ends = [partition(numel, world, i) for i in range(world)]
        parts = [
            CHECK + SCALE_BYTES + -(-(e.stop - e.start) // 8) for e in ends if e.stop > e.start
        ]
        hops = 2 * (world - 1)
        return load.exchange(
            numel,
            # every part travels `hops` times, and ranks differ only in the uneven lengths
            hops / world * sum(parts),
            # each rank compresses one part of its own, and a sum at each of world − 1 hops
            select=(load.selecting._replace(size=numel / world, times=world),),
            communicate=(FLAG, Work("hop", max(parts), hops)),
            # a part at each of world − 1 hops, and all of them at the end
            unpack=(Work("unpack_signs", numel / world, 2 * world - 1),),
        )

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Send partial sums around the ring, compressed at every hop."""
        flags = all_gather_flags(flag, group, corrected.device)
        if any(flags):
            return Reduced(flags)
        started = time.perf_counter()
        ring = Ring(group)
        # after the flags: a refused step draws nothing
        generator = self._random.generator(dist.get_rank(group), corrected.device)
        local = split(corrected, ring.size)
        compressing = 0.0

        def compress(values: torch.Tensor) -> torch.Tensor:
            nonlocal compressing
            begun = time.perf_counter()
            if self.stochastic:
                packed, scale = packed_stochastic_signs(values, generator)
            else:
                packed, total = packed_signs(values, generator)
                scale = mean_magnitude(total, values.numel())
            message = sign_message(packed, scale)
            compressing += time.perf_counter() - begun
            return message

        def decoded(message: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            packed, scale = read_message(message)
            return signed(packed, values.numel(), scale, values.dtype)

        def prepare(index: int, _: int) -> Callable[[torch.Tensor], torch.Tensor]:
            values = local[index]
            # Q(received + values): nothing of it can be done before the message is there
            return lambda received: compress(decoded(received, values).add_(values))

        # An empty part sends nothing, not even a scale.
        parts = [
            torch.empty(
                SCALE_BYTES + (part.numel() + 7) // 8 if part.numel() else 0,
                dtype=torch.uint8,
                device=corrected.device,
            )
            for part in local
        ]
        # the only part that a rank sends before anything has come in
        if local[ring.position].numel():
            parts[ring.position] = compress(local[ring.position])
        ring.all_gather(parts, ring.reduce_scatter(parts, prepare))
        total = [
            decoded(part, values) if part.numel() else values
            for part, values in zip(parts, local, strict=True)
        ]
        mean = torch.cat(total).div_(ring.size)
        numel = corrected.numel()
        return Reduced(
            flags=flags,
            mean=mean,
            residual=corrected.zero_(),
            selected=numel,
            union=numel,
            bytes_sent=ring.bytes_sent,
            select_seconds=compressing,
            communicate_seconds=time.perf_counter() - started - compressing,
        )
