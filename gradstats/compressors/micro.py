"""MiCRO: exclusive partitions, and one threshold that the global count steers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradstats import thresholds
from gradstats.collectives.codec import PLAIN, Codec, check_codec
from gradstats.collectives.indices import GatheredIndices, IndexAllGather
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors.base import Compressor, Reduced
from gradstats.compressors.cost import FULL, Exchange, Load, Work, coding, ragged_bytes
from gradstats.primitives import select, top_candidates
from gradstats.primitives.ratio import check_ratio, target_count
from gradstats.thresholds.micro import Rule

__all__ = ["MiCRO", "partition"]


def partition(numel: int, parts: int, index: int) -> slice:
    """Return one of the contiguous parts into which positions 0 … `numel` − 1 are cut.

    The parts are disjoint and cover everything; their lengths differ by one at most. If there are more parts than
    positions, some are empty.

    Parameters
    ----------
    numel : int
        Number of positions.
    parts : int
        Number of parts.
    index : int
        Number of the part wanted, from 0.

    Returns
    -------
    slice
        The part's positions.

    Examples
    --------
    >>> [partition(5, 3, i) for i in range(3)]
    [slice(0, 1, None), slice(1, 3, None), slice(3, 5, None)]
    """
    return slice(index * numel // parts, (index + 1) * numel // parts)


def _as_float32(magnitude: float) -> float:
    """Return the largest float32 that a magnitude reaches: as it travels, and as some element is selected by."""
    rounded = np.float32(min(magnitude, float(np.finfo(np.float32).max)))
    # as Python's numbers, since NumPy would compare in float32
    return float(np.nextafter(rounded, np.float32(0)) if float(rounded) > magnitude else rounded)


class MiCRO(Compressor):
    """Selection by one threshold, each rank in a partition of its own.

    In step t rank i selects |acc| ≥ η in partition (t + i) mod n alone. The positions are all-gathered, the values of
    *all* ranks at their union are all-reduced, and every rank's residual is zeroed there. The union is Σ k̂_i: nothing
    builds up. η is the same on all ranks, steered by Σ k̂_i against k = max(1, round(ratio · d)).

    Parameters
    ----------
    ratio : float
        Kept fraction k/d of the whole gradient, in (0, 1].
    rule : {"corrected", "paper"}
        How η is steered, see :class:`gradstats.thresholds.MiCRO`. ``"paper"`` does what the authors' program does.
    threshold : float, optional
        Threshold η to start with. By default ``"corrected"`` starts with the exact k-th largest magnitude of the first
        gradients, each rank looking at its partition, and ``"paper"`` with 1/(2√k), whatever the gradient's scale.
    codec : Codec
        What positions are on the wire. Values are added up on the way, and stay float32.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1], the rule is unknown, the threshold is not positive, or values are coded.

    Notes
    -----
    Source: MiCRO (Yoon and Oh 2023), algorithm 1.

    Differs from the paper, which leaves out how the threshold is estimated and where it starts: see `rule` and
    `threshold`. An empty selection sends no index; the authors' program makes one up.

    Where no rank's partition reaches η, ``"corrected"`` sends the largest magnitude of them, in a second exchange of
    positions, and ``"paper"`` nothing. A step in which every partition is zero says nothing about η and leaves it. A
    step refused by a flag changes nothing, so the ranks stay together. ``selected`` is k̂_i, what this rank chose;
    ``sent`` is the union, where its residual was zeroed. The first step's bytes include the exchange of magnitudes that
    yields η.
    """

    one_union = True
    codecs = ("indices",)

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return an all-gather of the positions in every partition, and an all-reduce of the values at all of them."""
        world, numel, codec = load.world, load.numel, load.codec
        counts = load.selected
        # without measured counts: the target, evenly over the partitions
        if counts is None:
            parts = (partition(load.k, world, i) for i in range(world))
            counts = [p.stop - p.start for p in parts]
        union, part = sum(counts), -(-numel // world)

        def words(count: int) -> int:
            # positions follow a number and, if they are coded, their count
            return (1 if codec == PLAIN else 2) + codec.index_words(count, part, numel)

        steps = [[words(c) for c in counts]] * 2
        messages = ragged_bytes(steps, words(-(-5 * load.k // (4 * world))))[-1]
        values = [Work("all_reduce", FULL * union)] if union else []
        return load.exchange(
            union / world,
            sum(messages) + FULL * union,
            select=(load.selecting._replace(size=numel / world),),
            pack=(Work("pack", max(counts)), *coding(codec, "encode", max(counts))),
            communicate=(*(Work("all_gather", m) for m in messages), *values),
            unpack=(Work("unpack", union), *coding(codec, "decode", union)),
        )

    def __init__(
        self,
        ratio: float,
        rule: Rule = "corrected",
        threshold: float | None = None,
        codec: Codec = PLAIN,
    ) -> None:
        self.ratio: float = check_ratio(ratio)  # now, not in the first backward pass
        self.rule = rule
        self._controller = thresholds.MiCRO(rule, threshold)
        self._gather = IndexAllGather(check_codec(codec, "micro", self.codecs))
        self._update = SparseUpdate()
        self._step = 0

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Select in this rank's partition, average at the positions of all ranks, and steer η."""
        started = time.perf_counter()
        numel, world = corrected.numel(), dist.get_world_size(group)
        # 1 even of an empty gradient, as the controller divides by it
        k = max(1, target_count(self.ratio, numel))
        # algorithm 1, line 7: in n steps every rank looks at every element once
        place = partition(numel, world, (self._step + dist.get_rank(group)) % world)
        part = corrected[place]
        extra_bytes = 0
        # not by find(), which would take η from this rank's partition alone
        threshold: float | None = self._controller.state_dict()["threshold"]
        if threshold is None and self.rule == "paper":
            threshold = self._controller.find(part, k).threshold
        elif threshold is None:
            # η is the same on all ranks, so all of them need the first one together
            threshold, first = self._first_threshold(part, k, group, flag)
            if any(first.flags):
                return Reduced(first.flags)
            extra_bytes = first.bytes_sent
        estimated = time.perf_counter()
        empty = corrected[:0].long()
        indices, largest = empty, 0.0
        if threshold is not None:
            threshold = float(np.float32(threshold))  # the precision in which it is compared
        if threshold is not None and not flag and part.numel():
            indices = select(part, threshold).indices + place.start
            if not indices.numel():
                # travels beside the positions, so that all ranks know the largest if nobody has any
                largest = _as_float32(float(part.abs().max()))
        chosen = time.perf_counter()
        # a quarter above an even share of k
        expected = -(-5 * k // (4 * world))
        # length of the longest partition
        span = -(-numel // world)
        gathered = self._gather(indices, numel, group, largest, flag, expected, span=span)
        if any(gathered.flags):
            return Reduced(gathered.flags)
        union = torch.cat(gathered.indices)
        total, reached = union.numel(), max(gathered.numbers)
        # from numbers that all ranks have, so all of them exchange positions again, or none
        if self._controller.clamps and not total and reached:
            # as of one gradient: the largest magnitude of all ranks' partitions, which each of them now knows
            threshold = reached
            if largest == reached:
                indices = select(part, reached).indices + place.start
            extra_bytes += gathered.bytes_sent
            gathered = self._gather(indices, numel, group, 0.0, flag, expected, span=span)
            if any(gathered.flags):
                return Reduced(gathered.flags)
            union = torch.cat(gathered.indices)
        # partitions are disjoint: no position is in the union twice
        mean = self._update.average(corrected, union, group)
        count = union.numel()
        if total or reached:
            # The controller's inputs are the same on all ranks, and so is its next η.
            self._controller.observe(total, k, numel)
        self._step += 1
        ended = time.perf_counter()
        return Reduced(
            flags=gathered.flags,
            mean=mean,
            residual=corrected,
            sent=union,
            threshold=float("nan") if threshold is None else threshold,
            selected=indices.numel(),
            union=count,
            bytes_sent=extra_bytes + gathered.bytes_sent + count * corrected.element_size(),
            select_seconds=chosen - estimated,
            communicate_seconds=ended - chosen + estimated - started,
        )

    def _first_threshold(
        self, part: torch.Tensor, k: int, group: dist.ProcessGroup | None, flag: int
    ) -> tuple[float | None, GatheredIndices]:
        """Set η to the k-th largest magnitude in all ranks' partitions together.

        With fewer than k non-zero elements it is the smallest of them; with none it is None, and the next step tries
        again.
        """
        largest = part[:0]
        if part.numel() and not flag:
            # up to k, as all the largest may lie in one partition
            chosen = top_candidates(part, k)[1].values
            assert isinstance(chosen, torch.Tensor)
            largest = chosen.abs().float()
        # The bits of positive floats, read as integers, are in the same order.
        bits = largest.view(torch.int32).long()
        most = part.numel() * dist.get_world_size(group) + 1  # partitions differ by one at most
        # they travel as positions: the bits of every float32, infinity too, are below 2³¹ − 1
        gathered = IndexAllGather()(bits, 2**31 - 1, group, flag=flag, expected=k, most=most)
        magnitudes = torch.cat(gathered.indices)
        if any(gathered.flags) or not magnitudes.numel():
            return None, gathered
        least = magnitudes.topk(min(k, magnitudes.numel())).values[-1:]
        threshold = float(least.int().view(torch.float32))
        # no rank refuses the step any more: all have seen all flags
        self._controller = thresholds.MiCRO(self.rule, threshold)
        return threshold, gathered

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the controller (with η) and the capacity of the messages."""
        return {
            "step": self._step,
            "controller": self._controller.state_dict(),
            "capacity": self._gather.words.capacity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._step = int(state["step"])
        self._controller.load_state_dict(state["controller"])
        self._gather.words.capacity = state["capacity"]
