"""The exchange of sparse systems: everybody sends a selection, everybody adds them up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradstats.collectives import SparseAllGather
from gradstats.collectives.plain import all_reduce_mean
from gradstats.collectives.ragged import RaggedAllGather
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors.base import Compressor, Reduced, Selector
from gradstats.primitives import Selection

__all__ = ["SparseCompressor", "as_compressor"]


class SparseCompressor(Compressor):
    """All-gather of what a :class:`Selector` selects on each rank.

    Parameters
    ----------
    selector : its state belongs to this compressor from now on.
    dtype : values travel as: float32, float16 or bfloat16. What rounding takes off stays in the residual.
    dense_above : where the ranks' selections of the last step came to more than this share of the gradient's elements
        together, they are all-reduced as one dense vector instead. At 1 that moves fewer bytes. Infinity for never.
    """

    def __init__(
        self, selector: Selector, dtype: torch.dtype = torch.float32, dense_above: float = 1.0
    ) -> None:
        self.selector = selector
        self.dense_above = dense_above
        self._gather = SparseAllGather(dtype)
        self._counts = RaggedAllGather()
        self._update = SparseUpdate()
        self._last = 0
        """Elements all ranks sent together in the last step."""

    @property
    def ratio(self) -> float | None:
        """The selector's kept fraction k/d."""
        return self.selector.ratio

    @ratio.setter
    def ratio(self, ratio: float | None) -> None:
        self.selector.ratio = ratio

    def target(self, numel: int, layer: str | None = None) -> int:
        """Return the selector's target count k."""
        return self.selector.target(numel)

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Select, exchange, add up; the flag travels in the message."""
        numel = corrected.numel()
        target = self.selector.target(numel)
        expected = target, 1 if self.selector.single_value else target
        before = self.selector.state_dict()
        started = time.perf_counter()
        message = self.selector.select(corrected) if not flag else None
        selected = time.perf_counter()
        own = []
        if message is not None:
            own = [Selection(message.indices, self._gather.rounded(message.values))]
        dense = self._last > self.dense_above * numel
        if dense:
            reduced = self._all_reduce(own, corrected, group, flag)
        else:
            reduced = self._all_gather(own, corrected, group, flag, expected)
        if message is None or any(reduced.flags):
            self.selector.load_state_dict(before)  # a refused step leaves no trace on any rank
            return Reduced(reduced.flags)
        reduced.communicate_seconds = time.perf_counter() - selected
        reduced.select_seconds = selected - started
        reduced.threshold, reduced.selected = message.threshold, message.indices.numel()
        corrected[message.indices] -= own[0].values.float()
        reduced.residual, reduced.sent = corrected, message.indices
        return reduced

    def _all_gather(
        self,
        own: list[Selection],
        corrected: torch.Tensor,
        group: dist.ProcessGroup | None,
        flag: int,
        expected: tuple[int, int],
    ) -> Reduced:
        numel = corrected.numel()
        gathered = self._gather(own, numel, group, flag, expected, corrected.device)
        if any(gathered.flags):
            return Reduced(gathered.flags)
        self._last = sum(len(each) for rank in gathered.selections for each in rank)
        self._update.begin(corrected)
        for rank in gathered.selections:  # in the same order everywhere: the same bits
            self._update.add(rank)
        union = self._update.divide(len(gathered.flags))
        return Reduced(
            gathered.flags,
            self._update.vector,
            touched=self._update.written,
            union=union,
            bytes_sent=gathered.bytes_sent,
        )

    def _all_reduce(
        self,
        own: list[Selection],
        corrected: torch.Tensor,
        group: dist.ProcessGroup | None,
        flag: int,
    ) -> Reduced:
        mean = torch.zeros_like(corrected)
        for each in own:
            mean[each.indices] = each.values.float()
        count = torch.tensor([sum(len(each) for each in own)], dtype=torch.int32)
        counts = self._counts(count.to(corrected.device), group, flag)
        if any(counts.flags):
            return Reduced(counts.flags)
        self._last = sum(int(each) for each in counts.words)
        mean = all_reduce_mean(mean, group)
        return Reduced(
            counts.flags,
            mean,
            union=int(mean.count_nonzero()),
            bytes_sent=counts.bytes_sent + mean.numel() * mean.element_size(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the compressor's state, the room its messages have, and how much all ranks sent."""
        return {
            "selector": self.selector.state_dict(),
            "capacity": self._gather.words.capacity,
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.selector.load_state_dict(state["selector"])
        self._gather.words.capacity = state["capacity"]
        self._last = state["last"]


def as_compressor(rule: Selector | Compressor) -> Compressor:
    """Return a compressor as it is, or a selector with the exchange that sparse compressors share.

    Parameters
    ----------
    rule : Selector or Compressor
        What a user gives to :class:`gradstats.hooks.CompressionState`.

    Returns
    -------
    Compressor
        The same object, or a :class:`SparseCompressor` around the selector.
    """
    return SparseCompressor(rule) if isinstance(rule, Selector) else rule
