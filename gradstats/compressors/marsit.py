"""Marsit: one bit per element and hop, whose expectation is the average of all ranks' signs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist

from gradstats.collectives.header import checked_bytes
from gradstats.collectives.plain import all_gather_flags, all_reduce_mean
from gradstats.collectives.ring import CHECK, Merge, one_bit_ring
from gradstats.collectives.torus import check_torus, one_bit_torus
from gradstats.compressors.base import Compressor, Reduced
from gradstats.compressors.cost import FLAG, FULL, Exchange, Load, Topology, Work
from gradstats.compressors.signs import (
    RandomStream,
    bernoulli_bits,
    check_scale,
    mean_over_ranks,
    packed_signs,
    take_off,
)
from gradstats.errors import InputError
from gradstats.primitives.ratio import check_count, shown

__all__ = ["Marsit", "transient_merge"]


def transient_merge(generator: torch.Generator) -> Merge:
    """Return Marsit's unbiased merge: equal bits stay, and where they differ a bit drawn beforehand decides.

    Parameters
    ----------
    generator : torch.Generator
        Generator of the transient bits.

    Returns
    -------
    Merge
        The merge, as :func:`gradstats.collectives.one_bit_ring` takes it.

    Notes
    -----
    Source: Marsit (Wu et al. 2022), eq. 2, which has b = 1 and a + b = m; a torus needs any b.

    With a contributions in the received bit v and b in the local bit v*, the result is the received bit with
    probability a/(a + b). So the transient bit r is 1 with probability a/(a + b) where the local bit is 0, and b/(a +
    b) where it is 1, and v ⊙ v* = (v AND v*) OR ((v XOR v*) AND r). If E[v] is the mean of a signs and E[v*] that of
    b others, E[v ⊙ v*] is the mean of all.
    """

    def merge(
        local: torch.Tensor, local_count: int, received_count: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        # drawn while the message travels: 1, with probability b/(a + b), where the local bit wins
        take_local = bernoulli_bits(
            local.numel(), local_count, local_count + received_count, generator
        )
        # r: the local bit where it wins, else its opposite, the received bit where they differ
        transient = (local ^ take_local).bitwise_not_()
        return lambda received: (received & local) | ((received ^ local) & transient)

    return merge


class Marsit(Compressor):
    """One-bit all-reduce over a ring or torus, with global compensation.

    In a one-bit round the update is g_t = η_s·(2·bit − 1), where the bit is 1 with the probability that a rank picked
    at random has a positive corrected gradient, and every rank keeps c ← (g + c) − g_t: the residual is what the
    *group* did not apply, as no rank knows its own share. Every K-th round, from the first on, averages in full
    precision and sets c to 0.

    Parameters
    ----------
    full_every : int or None
        Number of rounds K from one full-precision average to the next, at least 1; None for never.
    scale : float or "mean"
        Step size η_s of a one-bit update, above 0. ``"mean"`` takes the mean over ranks of the mean |g + c|.
    topology : {"ring", "torus"}
        How the ranks are connected.
    shape : tuple of int, optional
        Rows and columns of the torus; the most square ones by default.
    seed : int
        Seed of the transient bits and coins, at least 0 and equal on all ranks. Each rank draws from a stream of its
        own.

    Raises
    ------
    InputError
        If an option is out of range; in :meth:`reduce`, if the shape does not hold the ranks.

    Notes
    -----
    Source: Marsit (Wu et al. 2022), algorithm 1.

    Differs from the paper: its η_s = 1/√(T·D) is for updates that already include the learning rate; here the rate
    multiplies the update afterwards, so η_s has the size of a gradient. The paper's rate falls by ten at every
    full-precision round: ``torch.optim.lr_scheduler.StepLR(optimizer, full_every, 0.1)``. It does not say what sgn(0)
    is: here it is a fair coin that each rank throws for itself.

    Between full-precision rounds every rank's compensation is a random walk of steps η_s, because the bit often is not
    its own. With ``"mean"``, η_s grows with the compensation, about as the square root of the number of rounds, and so
    keeps up with what must be made up for.

    ``bytes_sent`` is what this rank puts on the wire: 2·d·(M − 1)/M bits, or, in full-precision rounds, the 32 times as
    many that a ring all-reduce of float32 takes. ``bits_per_element(bytes, d, ring=M)`` gives bits per hop.
    """

    has_ratio = False
    always: ClassVar[Mapping[str, Any]] = {"full_every": None}

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return the hops of a one-bit ring or torus, and the full-precision average in every K-th round."""
        numel, world = load.numel, load.world
        ring = load.topology == "ring"
        rows, columns = (1, world) if ring else (load.shape or most_square(world))
        check_torus((rows, columns), world)
        packed = -(-numel // 8)
        along_row = -(-packed // columns)
        along_column = -(-along_row // rows)
        # two periods, along a row of whole vectors and along a column of parts; a ring is one row
        moved = 2 * packed * (rows * (columns - 1) + rows - 1) / world
        # of an empty part nothing travels; some columns have a byte more than others
        least, longer = divmod(packed, columns)
        parts = longer * min(rows, least + 1) + (columns - longer) * min(rows, least)
        messages = (columns - 1) * min(1, packed / columns) + (rows - 1) * parts / world
        moved += 2 * CHECK * messages
        # one float64 for the mean magnitude
        scale = checked_bytes(8) if world > 1 else 0
        full = 1 / load.full_every if load.full_every else 0.0
        one_bit = 1 - full
        return load.exchange(
            numel,
            full * (2 * (world - 1) * numel * FULL // world) + one_bit * (moved + scale),
            select=(load.selecting._replace(times=one_bit),),
            communicate=(
                FLAG,
                Work("all_reduce", FULL * numel, full),
                Work("all_gather", scale, one_bit),
                Work("hop", along_row + CHECK, one_bit * 2 * (columns - 1)),
                Work("hop", along_column + CHECK, one_bit * 2 * (rows - 1)),
            ),
            unpack=(
                Work("merge_signs", 8 * along_row, one_bit * (columns - 1)),
                Work("merge_signs", 8 * along_column, one_bit * (rows - 1)),
                Work("unpack_signs", numel, one_bit),
            ),
        )

    def __init__(
        self,
        full_every: int | None = 100,
        scale: float | Literal["mean"] = "mean",
        topology: Topology = "ring",
        shape: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        if full_every is not None:
            full_every = check_count(full_every, "full_every, unless it is None,")
        if not isinstance(topology, str) or topology not in get_args(Topology):
            raise InputError(f"topology must be 'ring' or 'torus', not {shown(topology)}")
        if shape is not None and topology == "ring":
            raise InputError("only a torus has a shape: pass topology='torus' or leave shape out")
        self.full_every = full_every
        self.scale = check_scale(scale)
        self.topology = topology
        self.shape = shape
        self._random = RandomStream(seed, 0)
        self._step = 0
        self._room = torch.empty(0)

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Average in one bit, or in full precision in every K-th round."""
        world = dist.get_world_size(group)
        shape = self.shape or most_square(world)
        if self.topology == "torus":
            # before any message, and alike on all ranks
            check_torus(shape, world)
        # before anything is drawn: a refused step leaves generator and round as they are
        flags = all_gather_flags(flag, group, corrected.device)
        if any(flags):
            return Reduced(flags)
        full = self.full_every is not None and self._step % self.full_every == 0
        reduced = (
            _full_precision(flags, corrected, group)
            if full
            else self._one_bit(flags, corrected, group, shape)
        )
        # rounds that were refused do not count towards the K-th
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
        generator = self._random.generator(dist.get_rank(group), corrected.device)
        packed, total = packed_signs(corrected, generator)
        selected = time.perf_counter()
        scale = (
            # the same bits everywhere, as replicas apply it and every compensation subtracts it
            mean_over_ranks(total / max(1, numel), group, corrected.device)
            if self.scale == "mean"
            else self.scale
        )
        merge = transient_merge(generator)
        if self.topology == "torus":
            packed, sent = one_bit_torus(packed, merge, group, shape)
        else:
            packed, sent = one_bit_ring(packed, merge, group)
        communicated = time.perf_counter()
        room = self._room
        if (room.numel(), room.dtype, room.device) != (
            8 * packed.numel(),
            corrected.dtype,
            corrected.device,
        ):
            self._room = corrected.new_empty(8 * packed.numel())
        # algorithm 1: c ← (g + c) − g_t, with the g_t of the group
        mean = take_off(packed, float(scale), corrected, self._room)
        return Reduced(
            flags=flags,
            mean=mean,
            residual=corrected,
            selected=numel,
            union=numel,
            bytes_sent=sent + (checked_bytes(8) if self.scale == "mean" and len(flags) > 1 else 0),
            select_seconds=selected - started,
            communicate_seconds=communicated - selected,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the round and the state of the random generator."""
        return {"step": self._step, "generator": self._random.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._step = state["step"]
        self._random.load(state["generator"])


def _full_precision(
    flags: list[int], corrected: torch.Tensor, group: dist.ProcessGroup | None
) -> Reduced:
    started = time.perf_counter()
    world, numel = len(flags), corrected.numel()
    # the sum overwrites what it is given, and the compensation is zeroed where the gradient lies
    mean = corrected.clone()
    # no rank has elements then, so none waits
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
    """Return rows ≤ columns of the most square torus.

    Parameters
    ----------
    world : int
        Number of ranks.

    Returns
    -------
    tuple of int
        Rows and columns, whose product is `world`.
    """
    rows = next(r for r in range(math.isqrt(world), 0, -1) if world % r == 0)
    return rows, world // rows
