"""The update that sparse messages add up to, in a buffer that is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gradstats.collectives.plain import all_reduce_mean
from gradstats.primitives import Selection

__all__ = ["SparseUpdate"]

_FEW = 16
"""Positions are visited one by one where there are fewer than this share of all, else in passes over everything."""


class SparseUpdate:
    """A dense vector that is zero but where the last step wrote.

    The next step clears these positions alone. A fresh vector a step, a pass to divide it and one to count what is in
    it would cost more than selecting does: a page fault for every 4 kB, and three streams over all elements.

    Attributes
    ----------
    vector : float32 (d,), the update; a buffer, overwritten by the next step.
    written : int64 tensors, the positions of each addition.
    """

    def __init__(self) -> None:
        self.vector = torch.empty(0)
        self._seen = torch.empty(0, dtype=torch.bool)
        self.written: list[torch.Tensor] = []

    def begin(self, like: torch.Tensor) -> None:
        """Start from zero, with the shape and the device of a gradient (d,)."""
        if self.vector.shape != like.shape or self.vector.device != like.device:
            self.vector = torch.zeros_like(like)
            self._seen = torch.zeros_like(like, dtype=torch.bool)
        elif self._many():
            self.vector.zero_()
        else:
            for positions in self.written:
                self.vector[positions] = 0
        self.written = []

    def add(self, selections: Sequence[Selection]) -> None:
        """Add values at positions; both may repeat from call to call, positions within one may not."""
        for each in selections:
            self.written.append(each.indices)
            self.vector.index_add_(0, each.indices, each.values.expand(each.indices.shape))

    def divide(self, ranks: int) -> int:
        """Make the sum a mean over the ranks; return at how many positions anything was added."""
        if self._many():
            self.vector.div_(ranks)
        elif self.written:
            positions = torch.cat(self.written)
            # one value where positions repeat, so that it does not matter which is written last
            self.vector[positions] = self.vector[positions].div_(ranks)
        return self._union()

    def average(
        self, corrected: torch.Tensor, positions: torch.Tensor, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """Average a gradient over the ranks at positions that all of them know, and zero it there.

        Parameters
        ----------
        corrected : float32 (d,), this rank's; zero at `positions` afterwards.
        positions : int64 (k̂,), distinct, the same on every rank. If empty, nothing is sent.
        group : of the ranks; the default one if None.

        Returns
        -------
        float32 (d,): the mean at `positions`, 0 elsewhere; the same bits on every rank.
        """
        self.begin(corrected)
        if positions.numel():
            self.add([Selection(positions, all_reduce_mean(corrected[positions], group))])
            corrected[positions] = 0
        return self.vector

    def _many(self) -> bool:
        return _FEW * sum(p.numel() for p in self.written) > self.vector.numel()

    def _union(self) -> int:
        if self._many():
            for positions in self.written:
                self._seen[positions] = True
            count = int(self._seen.count_nonzero())
            self._seen.zero_()
            return count
        count = 0
        for positions in self.written:
            fresh = positions[~self._seen[positions]]
            self._seen[fresh] = True
            count += fresh.numel()
        for positions in self.written:
            self._seen[positions] = False
        return count
