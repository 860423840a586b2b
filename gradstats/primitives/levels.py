"""Magnitudes of few different values: each stands for an interval that reaches half-way to its neighbours.

Numbers of 4 or 8 bits, half precision below its normal range, and clipped elements pile up on levels. A threshold that
an interpolation places inside such a pile, or a density at its middle, makes a spike of it. What is known is how many
magnitudes lie between the borders at which rounding changes its result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.sketch import Magnitudes

__all__ = ["Levels", "levels_beyond"]

_SHARE = 0.03
"""Share of the magnitudes beyond a threshold from which on a tie is a level; bfloat16 has 1 to 2 %."""

_FEWEST, _FEWEST_COUNTED = 5, 20
"""Elements that make a level: of magnitudes known one by one, and of those counted in cells."""

_DOMINANT = 4
"""How many times the elements of the cells beside it a level has."""

_WIDE = 3
"""Successive cells, with none beside them, that may be one level whose last digits differ."""

_DRAWN_AT_ONCE = 10**9
"""Magnitudes from which on NumPy refuses to draw numbers per level."""

_EXPECTED, _EXPECTED_HERE = 4.0, 2.0
"""Elements expected beyond the largest value from which on their absence (probability e⁻⁴) means clipping, and from
which on (e⁻²) the last of some levels counts as clipped: that costs little where it was not."""


@dataclass(frozen=True, eq=False)
class Levels(Magnitudes):
    """Magnitudes whose cells are intervals around levels.

    Attributes
    ----------
    bounded : bool
        Whether the largest level stands for all magnitudes beyond it, too: they were clipped, or left the format.
    """

    bounded: bool = False

    @classmethod
    def of(
        cls,
        left: NDArray[np.float64],
        right: NDArray[np.float64],
        weight: NDArray[np.float64],
        bounded: bool,
        zero_fraction: float = 0.0,
    ) -> Levels:
        """Take the means from the middles.

        Parameters
        ----------
        left, right : ndarray of float64, shape (levels,)
            Ends of the intervals, ascending.
        weight : ndarray of float64, shape (levels,)
            Number of magnitudes in each.
        bounded : bool
            Whether the largest level stands for all beyond it.
        zero_fraction : float
            Share of exact zeros.
        """
        m = Magnitudes.from_cells(left, right, weight, zero_fraction)
        means = m.mean, m.mean_square, m.mean_log
        return cls(left, right, weight, *means, m.max, zero_fraction, bounded)

    @property
    def largest_share(self) -> float:
        """Share of the magnitudes that the fullest level has."""
        return float(self.weight.max()) / self.count

    def border(self, k: int) -> float:
        """Return the border half-way to the next level that at most k magnitudes exceed; the largest level if none do.

        Parameters
        ----------
        k : int
            Number of exceedances wanted.
        """
        # negated below, as searchsorted takes ascending numbers
        beyond = self.count - self.cumulative
        i = int(np.searchsorted(-beyond, -k))
        if i == self.weight.size - 1:
            return float(self.middle[-1])
        # the two ends differ where levels are so far apart that intervals do not meet
        return float(self.right[i] + self.left[i + 1]) / 2

    def excesses(self, threshold: float) -> Levels:
        """Return |g| − threshold of the levels whose middle lies above a threshold.

        Parameters
        ----------
        threshold : float
            Magnitude η ≥ 0, a border.
        """
        # a level is wholly on one side: where its elements lie in the interval is not known
        i = int(np.searchsorted(self.middle, threshold, side="right"))
        # the lowest interval may reach below a threshold that is no border of its own
        left, right = (np.maximum(edge[i:] - threshold, 0.0) for edge in (self.left, self.right))
        return self.of(left, right, self.weight[i:], self.bounded)

    def part(self, weight: NDArray[np.float64]) -> Levels:
        """Return some of the magnitudes.

        Parameters
        ----------
        weight : ndarray of float64, shape (levels,)
            How many of each level; those of none are left out.
        """
        some = weight > 0
        # without the largest level nothing stands for what lies beyond
        bounded = self.bounded and bool(some[-1])
        return self.of(self.left[some], self.right[some], weight[some], bounded)

    def sample(self, size: int, rng: np.random.Generator) -> Levels:
        """Draw magnitudes without replacement.

        Parameters
        ----------
        size : int
            How many; all of them if there are fewer.
        rng : numpy.random.Generator
            Source of the draws.
        """
        if size >= self.count:
            return self
        # numbers per level, without a list of all magnitudes, which the other method makes
        if self.count < _DRAWN_AT_ONCE:
            drawn = rng.multivariate_hypergeometric(
                self.weight.astype(np.int64), size, method="marginals"
            )
        else:
            ranks = rng.choice(self.count, size, replace=False, shuffle=False)
            levels = np.searchsorted(self.cumulative, ranks, side="right")
            drawn = np.bincount(levels, minlength=self.weight.size)
        return self.part(drawn.astype(np.float64))

    def rounded(self, values: NDArray[np.float64]) -> Levels:
        """Return other magnitudes as these levels would hold them.

        Parameters
        ----------
        values : ndarray of float64
            Magnitudes.
        """
        borders = (self.right[:-1] + self.left[1:]) / 2
        counts = np.bincount(np.searchsorted(borders, values), minlength=self.weight.size)
        return self.part(counts.astype(np.float64))


def levels_beyond(m: Magnitudes, k: int) -> Levels | None:
    """Return the magnitudes as levels if the k + 1 largest pile up on few values, or on the largest, else None.

    Parameters
    ----------
    m : Magnitudes
        Magnitudes of a gradient.
    k : int
        Number of exceedances of a threshold.
    """
    if isinstance(m, Levels):
        return m
    if not m.count:
        return None
    known = np.array_equal(m.left, m.right)
    # the cell of the (k + 1)-th largest
    start = int(np.searchsorted(m.cumulative, m.count - min(k + 1, m.count), side="right"))
    if known and m.weight[start:].sum() == m.weight.size - start and _spread(m.left[start:]):
        return None  # ties are the exception
    value, weight, alone = _piles(m)
    beyond = np.cumsum(weight[::-1])[::-1]
    # the last pile from which on there are still k + 1
    i = int(np.searchsorted(-beyond, -(k + 1), side="right")) - 1 if k < m.count else 0
    tail = slice(max(i, 0), None)
    fewest = _FEWEST if known else _FEWEST_COUNTED
    enough = max(fewest, _SHARE * float(weight[tail].sum()))
    # clipping shows at the largest value, however smooth the tail before it is
    clipped = bool(alone[-1]) and _is_bound(weight, _EXPECTED)
    if not (clipped or np.any(alone[tail] & (weight[tail] >= enough))):
        return None
    return _around(value, weight, m.zero_fraction)


def _spread(values: NDArray[np.float64]) -> bool:
    """Tell whether no value of an ascending array occurs as often as a level does."""
    # in ascending order as many are equal where the first and the last of them are
    return values.size < _FEWEST or not np.any(
        values[_FEWEST - 1 :] == values[: values.size - _FEWEST + 1]
    )


def _piles(
    m: Magnitudes,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return values, how many magnitudes each has, and whether it stands out from the cells beside it."""
    left, right, weight = m.left, m.right, m.weight
    if np.array_equal(left, right):
        value, first = np.unique(left, return_index=True)
        weight = np.add.reduceat(weight, first)
        return value, weight, np.ones(value.size, np.bool_)
    if left.size > 1 and left[-1] == right[-1] == right[-2]:  # the largest, cut off its cell
        left, right, weight = left[:-1], right[:-1], np.append(weight[:-2], weight[-2] + weight[-1])
    value = (left + right) / 2
    if right[-1] == m.max and weight[-1] > _FEWEST_COUNTED:
        value[-1] = (
            m.max
        )  # of many that share a cell with the largest most are as large, if they are a level
    apart = np.append(True, left[1:] > right[:-1])
    run = np.cumsum(apart) - 1
    length = np.bincount(run)[run]
    # a neighbour that does not touch counts as empty
    before = np.where(apart, 0.0, np.append(0.0, weight[:-1]))
    after = np.where(np.append(apart[1:], True), 0.0, np.append(weight[1:], 0.0))
    alone = (length <= _WIDE) | (weight > _DOMINANT * np.maximum(before, after))
    # a short run is one pile; each cell of a long one is a pile of its own
    first = np.flatnonzero(apart | (length > _WIDE))
    total = np.add.reduceat(weight, first)
    return np.add.reduceat(weight * value, first) / total, total, alone[first]


def _around(
    value: NDArray[np.float64], weight: NDArray[np.float64], zero_fraction: float
) -> Levels:
    """Return intervals half-way to the neighbours, where the spacing from level to level at most doubles."""
    if value.size == 1:
        return Levels.of(value, value, weight, False, zero_fraction)
    gaps = np.diff(value).tolist()
    # before the first gap zero is the neighbour
    spacing, widest = [], float(value[0])
    for gap in gaps:  # beyond a level that no element has, its neighbours do not reach half-way
        widest = min(gap, 2 * widest)
        spacing.append(widest)
    half = np.array(spacing) / 2
    left = value - np.append(half[0], half)
    right = value + np.append(half, half[-1])
    left[0] = max(left[0], 0.0)
    return Levels.of(left, right, weight, _is_bound(weight, _EXPECTED_HERE), zero_fraction)


def _is_bound(weight: NDArray[np.float64], expected: float) -> bool:
    """Tell whether there should be elements beyond the last pile, if they fall off as from the one before."""
    if weight.size < 2:
        return False
    # geometric decay predicts the next pile; one that grew is expected to stay as it is
    return bool(weight[-1] * min(weight[-1] / weight[-2], 1.0) > expected)
