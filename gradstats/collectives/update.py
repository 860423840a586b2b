"""The sum of sparse messages, in a buffer that is kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gradstats.collectives.plain import all_reduce_mean
from gradstats.primitives import Selection

__all__ = ["SparseUpdate"]

_FEW = 16
"""Positions are visited one by one if they are less than one in this many of all, else in passes over everything."""


class SparseUpdate:
    """A dense vector that is zero except where the last step wrote.

    The next step clears these positions alone. A fresh vector in every step, a pass to divide it and one to count
    what is in it would cost more than selecting does: a page fault for every 4 kB, and three streams over all
    elements.

    Attributes
    ----------
    vector : float32 or float64 tensor, shape (d,)
        The update; a buffer that the next step overwrites.
    written : list of int64 tensors
        The positions of each addition.
    """

    def __init__(self) -> None:
        self.vector = torch.empty(0)
        # for _union(), which leaves it False everywhere
        self._marks = torch.empty(0, dtype=torch.bool)
        self.written: list[torch.Tensor] = []

    def begin(self, like: torch.Tensor) -> None:
        """Start a step from zero.

        Parameters
        ----------
        like : tensor, shape (d,)
            A gradient, whose shape, dtype and device the update gets.
        """
        vector = self.vector
        if (vector.shape, vector.dtype, vector.device) != (like.shape, like.dtype, like.device):
            self.vector = torch.zeros_like(like)
            self._marks = torch.zeros_like(like, dtype=torch.bool)
        elif self._many():
            self.vector.zero_()
        else:
            for positions in self.written:
                self.vector.index_fill_(0, positions, 0)
        self.written = []

    def add(self, selections: Sequence[Selection]) -> None:
        """Add values at positions.

        Parameters
        ----------
        selections : sequence of Selection
            Values and their positions. Within one selection each position occurs once.
        """
        for each in selections:
            # noted first: if adding fails, the next step still clears these positions
            self.written.append(each.indices)
            values = each.values.to(self.vector.dtype)  # they travel as float32
            # one value may stand for all positions
            self.vector.index_add_(0, each.indices, values.expand(each.indices.shape))

    def divide(self, ranks: int | None) -> int:
        """Make the sum a mean over the ranks, or at each position over those that sent it.

        Parameters
        ----------
        ranks : int or None
            Number of ranks. None for a mean over senders: selections then are of different ranks.

        Returns
        -------
        int
            Number of positions at which anything was added.
        """
        if ranks is None and self.written:
            positions = torch.cat(self.written)
            # how many ranks sent each position: within a selection it occurs once
            senders = torch.zeros_like(self.vector).index_add_(
                0, positions, self.vector.new_ones(()).expand(positions.shape)
            )
            # what nobody sent is 0, and stays it
            self.vector.div_(senders.clamp_(min=1))
        elif ranks is not None and self._many():
            self.vector.div_(ranks)
        elif ranks is not None and self.written:
            positions = torch.cat(self.written)
            # Where positions repeat the values are equal, so it does not matter which is written last.
            self.vector[positions] = self.vector[positions].div_(ranks)
        return self._union()

    def average(
        self, corrected: torch.Tensor, positions: torch.Tensor, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """Average a gradient over the ranks at positions that all of them know, and zero it there.

        Parameters
        ----------
        corrected : float32 or float64 tensor, shape (d,)
            This rank's gradient; zero at `positions` afterwards.
        positions : int64 tensor, shape (k̂,)
            Distinct positions, the same on every rank. If there are none, nothing is sent.
        group : torch.distributed.ProcessGroup or None
            The ranks; the default group if None.

        Returns
        -------
        float32 or float64 tensor, shape (d,)
            The mean at `positions` and 0 elsewhere, the same bits on every rank; a buffer that the next step
            overwrites.
        """
        self.begin(corrected)
        if positions.numel():
            # only the values travel, in the order of the positions, which is the same on every rank
            self.add([Selection(positions, all_reduce_mean(corrected[positions], group))])
            # after the exchange: if that fails, the gradient is as it was
            corrected[positions] = 0
        return self.vector

    def _many(self) -> bool:
        return _FEW * sum(p.numel() for p in self.written) > self.vector.numel()

    def _union(self) -> int:
        if self._many():
            for positions in self.written:
                self._marks[positions] = True
            count = int(self._marks.count_nonzero())
            self._marks.zero_()
            return count
        count = 0
        for positions in self.written:
            # positions repeat between selections, not within one
            fresh = positions[~self._marks[positions]]
            self._marks[fresh] = True
            count += fresh.numel()
        for positions in self.written:
            self._marks[positions] = False
        return count
