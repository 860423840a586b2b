"""What SIDCo's algorithm asks of a gradient: sums of all magnitudes, sums of those that reach a threshold, and these.

A :class:`View` answers ``above(threshold, …)`` and ``selected(threshold)``, a :class:`Gradient` also ``whole(log)``,
``trial(…)`` and ``selection(…)``. A :class:`Whole` array takes a pass for each, :class:`Cells` look sums up in a
histogram, and :class:`gradstats.thresholds.sidco_loops.Block` is the view of one block in memory, compiled.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradstats.primitives import Array, Selection, exceedances, numel_of, select
from gradstats.primitives.arrays import as_numpy, is_tensor, wide_dtype
from gradstats.primitives.moments import rounded_sums
from gradstats.primitives.select import keep
from gradstats.primitives.tails import Tails, tails
from gradstats.statistics.stages import Sums, check_range

__all__ = ["FEW", "Cells", "Gradient", "Trial", "View", "Whole", "sorted_tails", "worth_collecting"]

FEW = 1 << 12
"""Elements up to which sorting them costs less than bins to count them in."""
_ROUGH = 1 << 12
"""Elements below which they are summed themselves: of so few the sums of a histogram are too rough."""
_SPAN = 2.0**-7
"""Width of some four cells of a histogram, as a share of the magnitudes in them."""


def worth_collecting(share: float, passes: int) -> bool:
    """Tell whether collecting a share of the elements costs less than the passes still to come.

    To collect it was measured to cost 1 + 8·share passes over the data. It saves the stages' passes to come, and the
    last one, which selects. Of more than a tenth, positions and values would take a third of the gradient's memory.

    Parameters
    ----------
    share : float
        Share of the gradient's elements.
    passes : int
        Passes still to come.
    """
    return share <= 0.1 and 8 * share < passes


class View(Protocol):
    """What the algorithm asks of a gradient, or of cells that stand for one."""

    def above(self, threshold: float, m: int, expected: float, passes: int) -> Sums:
        """Return the sums over the magnitudes that reach a threshold, not below the last one.

        Parameters
        ----------
        threshold : float
            Magnitude η.
        m : int
            Number of stages before: the sums of the second may be known from a trial.
        expected : float
            Number of elements that should reach it.
        passes : int
            Passes still to come: if it is worth it, the elements are collected for them.
        """

    def selected(self, threshold: float) -> Any:
        """Return the elements that reach a threshold, not below the last one, or how many they are.

        Parameters
        ----------
        threshold : float
            Magnitude η.
        """


class Gradient(View, Protocol):
    """What it asks of a gradient, beside the stages."""

    def whole(self, log: bool) -> tuple[Sums, float]:
        """Return the sums over all non-zero magnitudes, and the sum of their logarithms.

        Parameters
        ----------
        log : bool
            Sum logarithms, for which squares may be left out; otherwise their sum is NaN.
        """

    def trial(self, one: float, several: float, later: float) -> Trial:
        """Return cells to try every number of stages on.

        Parameters
        ----------
        one, several : float
            Threshold of a first stage that is the only one, and of the first of several.
        later : float
            Largest share that a second stage may keep.
        """

    def selection(self, selected: Any) -> Selection | None:
        """Return what :meth:`selected` chose, None if it chose nothing yet.

        Parameters
        ----------
        selected : object
            Its result.
        """


class Whole:
    """A gradient of any kind, on any device: a pass for each answer, until few reach a threshold.

    Parameters
    ----------
    x : array_like
        Checked gradient.
    pareto : bool
        Sum squares, which an exponential does not need.
    """

    def __init__(self, x: Array, pareto: bool) -> None:
        self._x, self._pareto = x, pareto
        self._survivors: Selection | None = None
        self._second: Sums | None = None

    def whole(self, log: bool) -> tuple[Sums, float]:
        """Return the sums over all non-zero magnitudes, and the sum of their logarithms."""
        if not log:
            return self._sums(self._x, 0.0), math.nan
        # a gamma law needs no squares
        m = rounded_sums(self._x, log=True)
        return (m.count, m.sum_abs, m.sum_squares), m.sum_log

    def above(self, threshold: float, m: int, expected: float, passes: int) -> Sums:
        """Return the sums over the magnitudes that reach a threshold, not below the last one."""
        # from here on the stages look at these alone: no later threshold is lower
        if self._survivors is None and worth_collecting(expected / numel_of(self._x), passes):
            self._survivors = select(self._x, threshold)
        if self._survivors is not None:
            sums = self._sums(self._survivors.values, threshold)
        elif m == 1 and self._second is not None:
            sums = self._second
        else:
            sums = self._sums(self._x, threshold)
        if sums[0]:
            check_range(sums, self._pareto)
        return sums

    def _sums(self, x: Array, threshold: float) -> Sums:
        m = exceedances(x, threshold) if self._pareto else rounded_sums(x, threshold)
        return m.count, m.sum_abs, m.sum_squares

    def selected(self, threshold: float) -> Selection | None:
        """Return the elements that reach a threshold, if some have been collected."""
        return None if self._survivors is None else keep(self._survivors, threshold)

    def selection(self, selected: Selection | None) -> Selection | None:
        """Return what :meth:`selected` did."""
        return selected

    def trial(self, one: float, several: float, later: float) -> Trial:
        """Return cells to try every number of stages on."""
        few = numel_of(self._x) <= FEW and wide_dtype(self._x) != np.float64
        cells = sorted_tails(self._x) if few else tails(self._x, min(one, several))
        # on a device a look-up moves one row, and direct sums would take another pass
        if is_tensor(cells.sums):
            return Trial(cells, several, cells.tail(several))
        self._second = self._sums(self._x, several)  # which stages ask for, too
        return Trial(cells, several, self._second)


class Cells(Whole):
    """A large gradient, of which one histogram answers where its cells stand for the magnitudes.

    Parameters
    ----------
    x : array_like
        Checked gradient, not of float64.
    pareto : bool
        Sum squares where elements are summed.
    """

    def __init__(self, x: Array, pareto: bool) -> None:
        super().__init__(x, pareto)
        self._tails = tails(x)
        self._limit = self._tails.limit(_ROUGH)
        self._all = self._tails.tail(0.0)  # moved from a device once

    def resolves(self, threshold: float, sums: Sums | None = None) -> bool:
        """Tell whether midpoints of cells approximate what reaches a threshold.

        They do below the last cell, unless :meth:`gradstats.primitives.tails.Tails.limit` doubts them all. To be
        summed, magnitudes must be many, and spread over enough cells: of some that are all but equal a model's
        threshold is among them, while that of the midpoints may lie above them all.

        Parameters
        ----------
        threshold : float
            Magnitude η.
        sums : (int, float, float), optional
            Sums of the magnitudes that reach it; without, the threshold alone is judged.
        """
        if sums is None or not threshold < self._limit:
            return threshold < self._limit
        count, total, squares = sums
        if count < _ROUGH:
            return False
        # both the spread and the mean excess must be many times what midpoints are wrong by
        mean = total / count
        deviation = math.sqrt(max(squares / count - mean**2, 0.0))
        return min(deviation, mean - threshold) > _SPAN * mean

    def whole(self, log: bool) -> tuple[Sums, float]:
        """Return the sums over all non-zero magnitudes, and the sum of their logarithms or NaN."""
        return self._all, self._tails.sum_log() if log else math.nan

    def above(self, threshold: float, m: int, expected: float, passes: int) -> Sums:
        """Return the sums over the magnitudes that reach a threshold: those that cells do not resolve are collected."""
        if self._survivors is None:
            sums = self._tails.tail(threshold)
            if self.resolves(threshold, sums):
                return sums
            self._survivors = select(self._x, threshold)
        # with survivors at hand, it sums those
        return super().above(threshold, m, expected, passes)

    def trial(self, one: float, several: float, later: float) -> Trial:
        """Return cells to try every number of stages on."""
        return Trial(self._tails, several, self._tails.tail(several))


class Trial(NamedTuple):
    """Cells on which every number of stages is tried; compiled as it is, too.

    Attributes
    ----------
    tails : Tails
        Cells.
    several : float
        Threshold of the first of several stages, which may be below the first cell.
    second : (int, float, float)
        Sums of the magnitudes that reach it.
    """

    tails: Tails
    several: float
    second: Sums

    def above(self, threshold: float, m: int, expected: float, passes: int) -> Sums:
        """Return the sums over the magnitudes that reach a threshold."""
        # summed over the elements, because the cells may begin above this threshold
        return self.second if m == 1 else self.tails.tail(threshold)

    def selected(self, threshold: float) -> int:
        """Return how many magnitudes reach a threshold."""
        return self.tails.tail(threshold)[0]


def sorted_tails(x: Array) -> Tails:
    """Return the sums over the tails of a gradient of few elements, on any device.

    Parameters
    ----------
    x : array_like
        Checked gradient, not of float64.
    """
    values = np.abs(as_numpy(x).reshape(-1).astype(np.float64))
    values = np.sort(values[np.isfinite(values) & (values > 0)])
    return Tails.of_cells(values, values, np.ones_like(values))
