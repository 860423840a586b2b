"""The exchange of sparse systems: everybody sends a selection, everybody adds them up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradstats.collectives import SparseAllGather
from gradstats.compressors.base import Compressor, Reduced, Reducer

__all__ = ["SparseReducer"]


class SparseReducer(Reducer):
    """All-gather of what a :class:`Compressor` selects on each rank.

    Parameters
    ----------
    compressor : its state belongs to this reducer from now on.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._gather: SparseAllGather | None = None
        self._capacity: int | None = None

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Select, all-gather, add up; the flag travels in the message."""
        if self._gather is None:
            capacity = self._capacity or self.compressor.target(corrected.numel())
            self._gather = SparseAllGather(capacity, group)
        before = self.compressor.state_dict()
        started = time.perf_counter()
        message = self.compressor.compress(corrected) if not flag else None
        selected = time.perf_counter()
        empty = corrected[:0]
        gathered = self._gather(
            message.indices if message else empty.long(),
            message.values if message else empty,
            corrected.numel(),
            flag,
        )
        if message is None or any(gathered.flags):
            self.compressor.load_state_dict(before)  # a refused step leaves no trace on any rank
            return Reduced(gathered.flags)
        communicated = time.perf_counter()
        mean = gathered.mean(corrected.numel())
        corrected[message.indices] = 0
        return Reduced(
            flags=gathered.flags,
            mean=mean,
            residual=corrected,
            sent=message.indices,
            threshold=message.threshold,
            selected=message.indices.numel(),
            union=_union(gathered.indices, corrected.numel()),
            bytes_sent=gathered.bytes_sent,
            select_seconds=selected - started,
            communicate_seconds=communicated - selected,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the compressor's state, and the room its messages have."""
        capacity = self._gather.capacity if self._gather is not None else self._capacity
        return {"compressor": self.compressor.state_dict(), "capacity": capacity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.compressor.load_state_dict(state["compressor"])
        self._capacity = state["capacity"]
        if self._gather is not None and self._capacity is not None:
            self._gather.capacity = self._capacity


def _union(indices: list[torch.Tensor], numel: int) -> int:
    """Count the positions that any rank sent."""
    seen = torch.zeros(numel, dtype=torch.bool, device=indices[0].device)
    for each in indices:
        seen[each] = True
    return int(seen.count_nonzero())
