"""What SIDCo's algorithm is compiled with: the view of one block in memory, and the formulas.

Of some hundred thousand elements the calls from Python cost as much as the passes, and a trial asks for up to two
thousand look-ups. Algorithm, views and formulas are compiled from their own source.
"""

from __future__ import annotations

import math
from ctypes import POINTER, c_float
from threading import local
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives import Selection
from gradstats.primitives.loops.compiled import method, unit
from gradstats.primitives.loops.selection import block_select, keep_at_least
from gradstats.primitives.loops.sums import block_sum, block_tail
from gradstats.primitives.moments import SHORT, least_bits, rounded_sums
from gradstats.primitives.tails import first_reaching, part_above, tails_of_block
from gradstats.statistics.stages import (
    Sums,
    exponential,
    genpareto,
    genpareto_by_moments,
    most_stages,
    split_ratio,
    stage_excess,
)
from gradstats.thresholds.views import FEW, Trial, sorted_tails, worth_collecting

__all__ = ["Block", "sums_from"]

# one view at a time writes to a thread's memory: selection() copies out of it
_ROOM = local()


class Block(NamedTuple):
    """View of one block of float32 in memory, which collects what reaches a threshold once that is worth it.

    Attributes
    ----------
    x : ndarray of float32, shape (n,)
        Gradient.
    pareto : bool
        Sum squares, which an exponential does not need.
    indices : ndarray of int64, shape (n,)
        Positions collected.
    values : ndarray of float32, shape (n,)
        Values collected.
    state : ndarray of float64, shape (4,)
        Number of elements collected, −1 before; sums of what reaches the first of several thresholds, once it is tried.
    """

    x: NDArray[np.float32]
    pareto: bool
    indices: NDArray[np.int64]
    values: NDArray[np.float32]
    state: NDArray[np.float64]

    @classmethod
    def of(cls, x: NDArray[np.float32], pareto: bool) -> Block:
        """Return the view of a block, with memory of this thread: new memory costs more than to copy from it.

        Parameters
        ----------
        x : ndarray of float32, shape (n,)
            Gradient.
        pareto : bool
            Sum squares.
        """
        room: tuple[Any, ...] | None = getattr(_ROOM, "arrays", None)
        if room is None or room[0].size < x.size:
            room = np.empty(x.size, np.int64), np.empty(x.size, np.float32), np.empty(4)
            _ROOM.arrays = room
        # nothing is collected, and the second stage's sums are not known
        room[2][0] = room[2][1] = -1.0
        return cls(_as_usual(x), pareto, *room)

    def whole(self, log: bool) -> tuple[Sums, float]:
        """Return the sums over all non-zero magnitudes, and the sum of their logarithms or NaN."""
        if not log:
            return sums_from(self.x, np.int32(1), self.pareto), math.nan
        m = rounded_sums(self.x, log=True)
        return (m.count, m.sum_abs, m.sum_squares), m.sum_log

    def above(self, threshold: float, m: int, expected: float, passes: int) -> Sums:
        """Return the sums over the magnitudes that reach a threshold, not below the last one; always compiled."""
        # as bits, non-negative floats sort like whole numbers; from 1 on, zeros are left out
        low = max(np.float32(threshold).view(np.int32), np.int32(1))
        if self.state[0] < 0 and worth_collecting(expected / self.x.size, passes):
            self.state[0] = block_select(self.x, low, 0, self.indices, self.values, 0)
        collected = int(self.state[0])
        if collected < 0 and m == 1 and self.state[1] > 0:  # known from the trial
            return int(self.state[1]), self.state[2], self.state[3]
        return sums_from(self.x if collected < 0 else self.values[:collected], low, self.pareto)

    def selected(self, threshold: float) -> int:
        """Collect the elements that reach a threshold, not below the last one, and return how many; always compiled."""
        collected, least = int(self.state[0]), np.float32(threshold)
        if collected < 0:
            low = max(least.view(np.int32), np.int32(1))
            return int(block_select(self.x, low, 0, self.indices, self.values, 0))
        return int(keep_at_least(self.indices[:collected], self.values[:collected], least))

    def selection(self, selected: int) -> Selection:
        """Return what :meth:`selected` collected."""
        # the next gradient of this thread overwrites what is collected
        return Selection(self.indices[:selected].copy(), self.values[:selected].copy())

    def trial(self, one: float, several: float, later: float) -> Trial:
        """Return cells to try every number of stages on."""
        second = sums_from(self.x, least_bits(several), self.pareto)
        # stages that begin with this threshold need no pass for it
        self.state[1:] = second
        if self.x.size <= FEW:
            return Trial(sorted_tails(self.x), several, second)
        # Cells begin at the lowest threshold that can be looked up: the first of one stage, or the second of several
        # at the largest share. What reaches the first of several is summed above.
        least = several
        if second[0]:
            least += stage_excess(self.pareto, second, several, later)[0]
        return Trial(tails_of_block(self.x, min(one, least)), several, second)


def _as_usual(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the array, aligned and marked as writable: loops are compiled for one kind. Nothing writes to it."""
    if x.flags.carray:
        return x
    if not x.flags.aligned:
        return x.copy()
    return np.ctypeslib.as_array(x.ctypes.data_as(POINTER(c_float)), x.shape)


def sums_from(x: NDArray[np.float32], low: np.int32, pareto: bool) -> Sums:
    """Return the sums that a law needs, as :func:`gradstats.primitives.moments.rounded_sums` and `exceedances` do.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Elements.
    low : int32
        Bits of the least magnitude that is summed.
    pareto : bool
        Sum squares.
    """
    if not pareto and x.size >= SHORT:
        count, total = block_sum(x, low)
        # partial sums of float32 may overflow where those of float64 do not
        if total < np.inf:
            return count, total, np.nan
    sums: Sums = block_tail(x, low)
    return sums


# functions of numbers alone, which compiled code reaches by name
for _each in (
    exponential,
    first_reaching,
    genpareto,
    genpareto_by_moments,
    most_stages,
    part_above,
    split_ratio,
    stage_excess,
    sums_from,
    worth_collecting,
):
    unit(_each)


# what the algorithm asks of any view is compiled from that view's own method
method("above", lambda self, threshold, m, expected, passes: self.instance_class.above)
method("selected", lambda self, threshold: self.instance_class.selected)
method("tail", lambda self, threshold: self.instance_class.tail)
