"""MiCRO: exclusive partitions, one threshold steered by the global count, values all-reduced at the union."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradstats import thresholds
from gradstats.collectives.indices import GatheredIndices, IndexAllGather
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors.base import Compressor, Reduced
from gradstats.primitives import select, top_candidates
from gradstats.primitives.ratio import check_ratio, target_count
from gradstats.thresholds.micro import Rule

__all__ = ["MiCRO", "partition"]


def partition(numel: int, parts: int, index: int) -> slice:
    """Return one of `parts` contiguous parts of 0 … `numel` − 1, of lengths that differ by one at most.

    They are disjoint and cover everything; where `numel` < `parts` some are empty.

    Examples
    --------
    >>> [partition(5, 3, i) for i in range(3)]
    [slice(0, 1, None), slice(1, 3, None), slice(3, 5, None)]
    """
    return slice(index * numel // parts, (index + 1) * numel // parts)


class MiCRO(Compressor):
    """MiCRO (Yoon and Oh 2023, algorithm 1).

    In step t rank i selects |acc| ≥ η in partition (t + i) mod n alone. The positions are all-gathered, *every* rank's
    values at their union all-reduced, and its residual zeroed there. The union is Σ k̂_i: nothing builds up. η is the
    same on all ranks, steered by Σ k̂_i against k = max(1, round(ratio · d)).

    Parameters
    ----------
    ratio : k/d in (0, 1], of the whole gradient.
    rule : how η is steered, see :class:`gradstats.thresholds.MiCRO`; ``"paper"`` is the authors' program's way.
    threshold : where η starts. None: ``"corrected"`` takes the exact k-th largest magnitude of the first gradients,
        each rank looking at its partition; ``"paper"`` takes 1/(2√k) whatever the gradient's scale.

    Notes
    -----
    The paper leaves out how δ_{t+1} is estimated, and how δ_0 is. An empty selection sends no index, where the authors'
    program makes one up. A step in which every rank's partition is zero says nothing about η and leaves it.
    A step refused by a flag changes nothing, so the ranks stay together.

    `selected` is k̂_i, what this rank chose; `sent` is the union, where its residual was zeroed. The first step's
    bytes include the exchange of magnitudes that yields η.
    """

    one_union = True

    def __init__(
        self, ratio: float, rule: Rule = "corrected", threshold: float | None = None
    ) -> None:
        self.ratio: float = check_ratio(ratio)  # now, not in the first backward pass
        self.rule = rule
        self._controller = thresholds.MiCRO(rule, threshold)
        self._gather = IndexAllGather()
        self._update = SparseUpdate()
        self._step = 0

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Select in this rank's partition, average at everybody's positions, steer η."""
        started = time.perf_counter()
        numel, world = corrected.numel(), dist.get_world_size(group)
        k = max(1, target_count(self.ratio, numel))
        own = partition(numel, world, (self._step + dist.get_rank(group)) % world)
        part = corrected[own]
        extra_bytes = 0
        threshold: float | None = self._controller.state_dict()["threshold"]
        if threshold is None and self.rule == "paper":
            threshold = self._controller._find(part, k).threshold
        elif threshold is None:
            threshold, first = self._first_threshold(part, k, group, flag)
            if any(first.flags):
                return Reduced(first.flags)
            extra_bytes = first.bytes_sent
        estimated = time.perf_counter()
        empty = corrected[:0].long()
        indices, largest = empty, 0.0
        if threshold is not None:
            threshold = float(np.float32(threshold))  # as it is compared
        if threshold is not None and not flag and part.numel():
            indices = select(part, threshold).indices + own.start
            if not indices.numel():
                largest = float(part.abs().max())
        chosen = time.perf_counter()
        expected = -(-5 * k // (4 * world))
        gathered = self._gather(indices, numel, group, largest, flag, expected)
        if any(gathered.flags):
            return Reduced(gathered.flags)
        union = torch.cat(gathered.indices)
        mean = self._update.average(corrected, union, group)
        count = union.numel()
        if count or any(gathered.numbers):
            # Everything it is told is the same on all ranks, and so is the η it comes to.
            self._controller._observe(count, k, numel)
        self._step += 1
        ended = time.perf_counter()
        return Reduced(
            flags=gathered.flags,
            mean=mean,
            residual=corrected,
            sent=union,
            touched=gathered.indices,
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

        The smallest non-zero one if there are fewer than k; None, to be tried again, if there is none.
        """
        largest = part[:0]
        if part.numel() and not flag:
            chosen = top_candidates(part, k)[1].values
            assert isinstance(chosen, torch.Tensor)
            largest = chosen.abs()
        # The bits of positive floats, read as whole numbers, are in the same order.
        bits = largest.view(torch.int32).long()
        gathered = IndexAllGather()(bits, 0, group, flag=flag, expected=k)
        magnitudes = torch.cat(gathered.indices)
        if any(gathered.flags) or not magnitudes.numel():
            return None, gathered
        least = magnitudes.topk(min(k, magnitudes.numel())).values[-1:]
        threshold = float(least.int().view(torch.float32))
        self._controller = thresholds.MiCRO(self.rule, threshold)
        return threshold, gathered

    def state_dict(self) -> dict[str, Any]:
        """Return step, controller (with η), and the room the messages have."""
        return {
            "step": self._step,
            "controller": self._controller.state_dict(),
            "capacity": self._gather.words.capacity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._step = int(state["step"])
        self._controller.load_state_dict(state["controller"])
        self._gather.words.capacity = state["capacity"]
