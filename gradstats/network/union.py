"""How many positions ranks select together, as their number grows: measured in a trace, and beyond it modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import top_candidates
from gradstats.primitives.ratio import target_count
from gradstats.trace import Kind, Trace

__all__ = ["UnionGrowth", "union_growth"]

_LEAST = 1e-9
"""Correlation taken for none."""


@dataclass(frozen=True, slots=True)
class UnionGrowth:
    """The union of ranks' selections by the number of ranks.

    However selections come about, as long as no rank is special U(n) rises and bends down, which bounds it beyond the
    ranks measured. The model goes further: every position has a propensity p to be selected, beta distributed over
    the positions, and given p the ranks select it independently and alike. Then a position is selected by a
    beta-binomial number of ranks, and U(n) = d·(1 − E[(1 − p)ⁿ]). `correlation` 0 are independent selections,
    U(n) = d·(1 − (1 − k/d)ⁿ); 1 are equal ones, U(n) = k. Ranks that avoid each other, as MiCRO's, are not in it. Few
    ranks say little about the positions that each of many would rarely select: predict twice the ranks measured, not
    ten times as many.

    Attributes
    ----------
    numel : elements, d.
    counts : int64 (ranks + 1,), how many positions were selected by 0, 1, … ranks.
    correlation : of two ranks' selecting the same position, between 0 and 1; the one with which the model's union of
        all ranks is the measured one.
    """

    numel: int
    counts: NDArray[np.int64]
    correlation: float

    @property
    def ranks(self) -> int:
        """Ranks measured."""
        return self.counts.size - 1

    @property
    def selected(self) -> float:
        """Elements a rank selects, the mean."""
        return float(self.counts @ np.arange(self.counts.size)) / self.ranks

    def measured(self, world: int) -> float:
        """Return the mean union over all subsets of `world` of the ranks measured.

        Raises
        ------
        InputError
            If there are not so many.
        """
        from scipy.stats import hypergeom

        if not 1 <= world <= self.ranks:
            raise InputError(f"the trace has {self.ranks} ranks, not {world}")
        # a position that c ranks selected is missed by a subset drawn at random with this probability
        missed = hypergeom.pmf(0, self.ranks, np.arange(self.ranks + 1), world)
        return float(self.counts @ (1 - missed))

    def predicted(self, world: int) -> float:
        """Return the union that the model expects of `world` ranks."""
        from scipy.stats import betabinom

        return self.numel * float(1 - betabinom.pmf(0, world, *self._beta()))

    def bounds(self, world: int) -> tuple[float, float]:
        """Return what the union of `world` ranks, more than were measured, lies between without any model."""
        last = self.measured(self.ranks)
        slope = last - (self.measured(self.ranks - 1) if self.ranks > 1 else 0.0)
        return last, min(float(self.numel), last + (world - self.ranks) * slope)

    def __call__(self, world: int) -> float:
        """Return the union of `world` ranks: measured where it was, else predicted."""
        return self.measured(world) if world <= self.ranks else self.predicted(world)

    def _beta(self) -> tuple[float, float]:
        mean = self.selected / self.numel
        rest = 1 / self.correlation - 1
        return mean * rest, (1 - mean) * rest


def _fitted(numel: int, counts: NDArray[np.int64]) -> UnionGrowth:
    from scipy.optimize import brentq

    def growth(logit: float) -> UnionGrowth:
        return UnionGrowth(numel, counts, float(1 / (1 + np.exp(-logit))))

    def excess(logit: float) -> float:
        one = growth(logit)
        return one.predicted(one.ranks) - one.measured(one.ranks)

    end = -float(np.log(_LEAST))
    if excess(-end) <= 0:  # they overlap no more than by chance
        return growth(-end)
    return growth(end if excess(end) >= 0 else brentq(excess, -end, end))


def union_growth(
    trace: Trace,
    ratio: float,
    *,
    kind: Kind = "gradient",
    steps: Sequence[int] | None = None,
) -> list[UnionGrowth]:
    """Measure how the exact top-k selections of a trace's ranks overlap, step by step.

    Parameters
    ----------
    trace : of at least two ranks.
    ratio : k/d.
    kind : ``"gradient"``, or ``"corrected"``, which is what a compressor with error feedback sees.
    steps : to measure; all that every rank has if None.

    Raises
    ------
    InputError
        For a trace of one rank, or without a step that all of them have.
    """
    if len(trace.ranks) < 2:
        raise InputError(f"{trace.path} has one rank; a union needs several")
    common = set.intersection(*(set(trace.steps(rank)) for rank in trace.ranks))
    chosen = sorted(common) if steps is None else list(steps)
    if not chosen or not common.issuperset(chosen):
        raise InputError(f"{trace.path} has no such step on all of its ranks")
    found = []
    for step in chosen:
        times = np.zeros(trace.numel, np.uint16)
        for rank in trace.ranks:
            gradient = trace.read(step, rank=rank, kind=kind)
            selection = top_candidates(gradient, target_count(ratio, trace.numel))[1]
            times[np.asarray(selection.indices)] += 1
        counts = np.bincount(times, minlength=len(trace.ranks) + 1).astype(np.int64)
        found.append(_fitted(trace.numel, counts))
    return found
