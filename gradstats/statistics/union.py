"""The number of positions that ranks select together, as a function of the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives.ratio import check_count

__all__ = ["UnionGrowth", "fit_union"]

_LEAST = 1e-9
"""Smallest correlation of the model; independent selections get it."""


@dataclass(frozen=True, slots=True)
class UnionGrowth:
    """The size of the union of ranks' selections, as a function of the number of ranks.

    As long as no rank is special, U(n) rises and bends down, whatever the selections depend on. This bounds it beyond
    the ranks that were measured. The model goes further: every position has a propensity p to be selected, which is
    beta distributed over the positions, and given p the ranks select it independently and with the same probability.
    Then the number of ranks that select a position is beta-binomial, and U(n) = d·(1 − E[(1 − p)ⁿ]). A `correlation` of
    0 means independent selections, U(n) = d·(1 − (1 − k/d)ⁿ); 1 means equal ones, U(n) = k. The model does not cover
    ranks that avoid each other, as MiCRO's do. A few ranks say little about positions that each of many ranks would
    rarely select: predict twice as many ranks as were measured, not ten times as many.

    Attributes
    ----------
    numel : int
        Elements of the gradient, d.
    counts : ndarray of int64, shape (ranks + 1,)
        How many positions were selected by 0, 1, … ranks.
    correlation : float
        Correlation of two ranks' selecting the same position, from 0 to 1. With it the model's union of all ranks is
        the measured one.
    """

    numel: int
    counts: NDArray[np.int64]
    correlation: float

    @property
    def ranks(self) -> int:
        """Number of ranks measured."""
        return self.counts.size - 1

    @property
    def selected(self) -> float:
        """Mean number of elements that a rank selects."""
        return float(self.counts @ np.arange(self.counts.size)) / self.ranks

    def measured(self, world: int) -> float:
        """Return the mean union over all subsets of `world` of the measured ranks.

        Parameters
        ----------
        world : int
            Number of ranks in a subset.

        Raises
        ------
        InputError
            If fewer ranks were measured.
        """
        if not 1 <= world <= self.ranks:
            raise InputError(f"the trace has {self.ranks} ranks, not {world}")
        if world == self.ranks:
            return float(self.counts[1:].sum())
        from scipy.stats import hypergeom

        # probability that a random subset misses a position which c ranks selected, for every c
        missed = hypergeom.pmf(0, self.ranks, np.arange(self.ranks + 1), world)
        return float(self.counts @ (1 - missed))

    def predicted(self, world: int) -> float:
        """Return the union that the model expects of `world` ranks.

        Parameters
        ----------
        world : int
            Number of ranks, at least 1.

        Raises
        ------
        InputError
            If there are fewer.
        """
        mean, rho = self.selected / max(self.numel, 1), self.correlation
        # The beta-binomial's probability of no success, factor by factor: (b + i)/(a + b + i) = 1 − xᵢ with
        # a + b = 1/ρ − 1 and a/(a + b) the mean. The first x is the mean whatever ρ is.
        others = np.arange(1, check_count(world, "the number of ranks"))
        x = mean * np.append(1.0, (1 - rho) / (1 - rho + rho * others))
        # 1 − Π(1 − xᵢ) through logarithms keeps the digits of a union that is small beside d
        with np.errstate(divide="ignore"):  # everything is selected
            return -self.numel * math.expm1(np.log1p(-x).sum())

    def bounds(self, world: int) -> tuple[float, float]:
        """Return the limits of the union of more ranks than were measured, which hold without any model.

        Parameters
        ----------
        world : int
            Number of ranks, at least those measured.

        Returns
        -------
        tuple of float
            The measured union of all ranks, and that union extended at its last slope.

        Raises
        ------
        InputError
            If fewer are asked for: their union is :meth:`measured`.
        """
        if world < self.ranks:
            raise InputError(
                f"bounds are of at least the {self.ranks} ranks measured, not {world}: use measured"
            )
        last = self.measured(self.ranks)
        # concave: no further rank adds more than the last one did
        slope = last - (self.measured(self.ranks - 1) if self.ranks > 1 else 0.0)
        return last, min(float(self.numel), last + (world - self.ranks) * slope)

    def __call__(self, world: int) -> float:
        """Return the union of `world` ranks: measured if there are so many, else predicted, within :meth:`bounds`."""
        if world <= self.ranks:
            return self.measured(world)
        # these hold without the model, which gives way to them where ranks avoid each other
        low, high = self.bounds(world)
        return min(max(self.predicted(world), low), high)


def fit_union(counts: NDArray[np.int64]) -> UnionGrowth:
    """Fit the model to how many positions were selected by how many ranks.

    Parameters
    ----------
    counts : ndarray of int64, shape (ranks + 1,)
        How many of the gradient's d positions were selected by 0, 1, … ranks.

    Returns
    -------
    UnionGrowth
        The model, whose union of all ranks is the measured one.
    """
    from scipy.optimize import brentq

    numel = int(counts.sum())

    def growth(logit: float) -> UnionGrowth:
        return UnionGrowth(numel, counts, float(1 / (1 + np.exp(-logit))))

    # falls as the correlation rises: the more ranks agree, the smaller their union
    def excess(logit: float) -> float:
        one = growth(logit)
        return one.predicted(one.ranks) - one.measured(one.ranks)

    end = -float(np.log(_LEAST))
    if excess(-end) <= 0:  # the selections overlap no more than by chance
        return growth(-end)
    return growth(end if excess(end) >= 0 else brentq(excess, -end, end))
