"""Marsit (Wu et al. 2022): one bit per element and hop, whose expectation is the average of all ranks' signs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from gradstats.collectives.plain import all_gather_flags, all_reduce_mean
from gradstats.collectives.ring import Merge, one_bit_ring, pack_bits
from gradstats.collectives.torus import check_torus, one_bit_torus
from gradstats.compressors.base import Compressor, Reduced
from gradstats.compressors.signs import (
    RandomStream,
    check_scale,
    mean_over_ranks,
    sign_bits,
    signed,
)
from gradstats.errors import InputError

__all__ = ["Marsit", "transient_merge"]

_BITS = 8


def transient_merge(generator: torch.Generator) -> Merge:
    """Return Marsit's merge: keep equal bits; where they differ take a bit drawn beforehand, unbiasedly.

    With a contributions in the received bit and b in the local one, it is the received bit with probability
    a/(a + b). So the transient bit r is 1 with a/(a + b) where the local bit is 0, and with b/(a + b) where it is 1
    (equation 2 has b = 1, a + b = m), and v ⊙ v* = (v AND v*) OR ((v XOR v*) AND r). If E[v] is the mean of a signs and
    E[v*] that of b others, E[v ⊙ v*] is the mean of all.
    """

    def merge(
        local: torch.Tensor, local_count: int, received_count: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        # Integers below a + b: probabilities like 1/3 are exact, and faster to draw than floats.
        drawn = torch.randint(
            local_count + received_count,
            (local.numel() * _BITS,),
            generator=generator,
            device=local.device,
            dtype=torch.int32,
        )
        take_local = pack_bits(drawn < local_count)
        transient = (local ^ take_local).bitwise_not_()
        return lambda received: (received & local) | ((received ^ local) & transient)

    return merge


class Marsit(Compressor):
    """One-bit all-reduce over a ring or torus, with global compensation (Marsit, Algorithm 1).

    In a one-bit round the update is g_t = η_s·(2·bit − 1), where the bit is 1 with the probability that a rank picked
    at random has a positive corrected gradient, and every rank keeps c ← (g + c) − g_t: the residual is what the
    *group* did not apply, as no rank knows its own share. Every K-th round, from the first on, averages in full
    precision, and c ← 0. sgn(0) is a fair coin of each rank.

    Parameters
    ----------
    full_every : K; 1 averages densely in every round, None never.
    scale : η_s; "mean" is the mean over ranks of the mean |g + c|. The theory has 1/√(T·D) for updates that already
        include the learning rate; here it multiplies the update afterwards, so η_s is the size of a gradient.
    topology : "ring" or "torus".
    shape : (rows, columns) of the torus; None for the most square one.
    seed : of the transient bits and coins, equal on all ranks, not negative. Each rank draws from a stream of its own.

    Raises
    ------
    InputError
        For options out of range; in :meth:`reduce`, for a shape that does not hold the ranks.

    Notes
    -----
    Between full-precision rounds every rank's compensation is a random walk of steps η_s, because the bit often is not
    its own. With "mean", η_s grows with it, about as the square root of the rounds, and so keeps up with what must be
    made good.

    `bytes_sent` is what this rank puts on the wire: 2·d·(M − 1)/M bits, or the 32 times as many that a ring all-reduce
    of float32 takes in full-precision rounds. `bits_per_element(bytes, d, ring=M)` gives bits per hop.
    """

    has_ratio = False

    def __init__(
        self,
        full_every: int | None = 100,
        scale: float | Literal["mean"] = "mean",
        topology: Literal["ring", "torus"] = "ring",
        shape: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        if full_every is not None and full_every < 1:
            raise InputError(f"full_every must be at least 1, or None, not {full_every}")
        if topology not in ("ring", "torus"):
            raise InputError(f"topology must be 'ring' or 'torus', not {topology!r}")
        if shape is not None and topology == "ring":
            raise InputError("a ring has no shape; topology='torus' has one")
        self.full_every = full_every
        self.scale = check_scale(scale)
        self.topology = topology
        self.shape = shape
        self._own = RandomStream(seed, 0)
        self._step = 0

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Average in one bit, or in full precision if it is time."""
        world = dist.get_world_size(group)
        shape = self.shape or most_square(world)
        if self.topology == "torus":
            check_torus(shape, world)
        flags = all_gather_flags(flag, group, corrected.device)
        if any(flags):
            return Reduced(flags)
        full = self.full_every is not None and self._step % self.full_every == 0
        reduced = (
            _full_precision(flags, corrected, group)
            if full
            else self._one_bit(flags, corrected, group, shape)
        )
        self._step += 1
        return reduced

    def _one_bit(
        self,
        flags: list[int],
        corrected: torch.Tensor,
        group: dist.ProcessGroup | None,
        shape: tuple[int, int],
    ) -> Reduced:
        started = time.perf_counter()
        numel = corrected.numel()
        generator = self._own.generator(dist.get_rank(group), corrected.device)
        bits = sign_bits(corrected, generator)
        total = float(torch.linalg.vector_norm(corrected, 1, dtype=torch.float64))
        selected = time.perf_counter()
        scale = (
            mean_over_ranks(total / max(1, numel), group, corrected.device)
            if self.scale == "mean"
            else self.scale
        )
        merge = transient_merge(generator)
        if self.topology == "torus":
            bits, sent = one_bit_torus(bits, merge, group, shape)
        else:
            bits, sent = one_bit_ring(bits, merge, group)
        communicated = time.perf_counter()
        mean = signed(bits, float(scale), corrected.dtype)
        return Reduced(
            flags=flags,
            mean=mean,
            residual=corrected.sub_(mean),
            selected=numel,
            union=numel,
            bytes_sent=sent + (8 if self.scale == "mean" and len(flags) > 1 else 0),
            select_seconds=selected - started,
            communicate_seconds=communicated - selected,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the round and the state of the random generator."""
        return {"step": self._step, "generator": self._own.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._step = state["step"]
        self._own.load(state["generator"])


def _full_precision(
    flags: list[int], corrected: torch.Tensor, group: dist.ProcessGroup | None
) -> Reduced:
    started = time.perf_counter()
    world, numel = len(flags), corrected.numel()
    mean = corrected.clone()
    if numel:
        all_reduce_mean(mean, group)
    return Reduced(
        flags=flags,
        mean=mean,
        residual=corrected.zero_(),
        selected=numel,
        union=numel,
        bytes_sent=2 * (world - 1) * numel * corrected.element_size() // world,
        communicate_seconds=time.perf_counter() - started,
    )


def most_square(world: int) -> tuple[int, int]:
    """Return (rows, columns) of `world` ranks with rows ≤ columns as close as possible."""
    rows = next(r for r in range(math.isqrt(world), 0, -1) if world % r == 0)
    return rows, world // rows
