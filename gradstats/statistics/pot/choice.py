"""The choice of a threshold by a sequence of goodness-of-fit tests with error control."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.ratio import target_count
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Method
from gradstats.statistics.goodness import bootstrap
from gradstats.statistics.pot.peaks import FEWEST, MODEL, NAN, magnitudes_of, threshold_of
from gradstats.statistics.solution import FitError

__all__ = ["Candidate", "ThresholdChoice", "choose_threshold"]

_SMALL = 500
"""Excesses tested below which a note says that the test has little power."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A threshold that was tested.

    Attributes
    ----------
    ratio : float
        Share of the non-zero elements asked to exceed the threshold.
    threshold : float
        Threshold u, in the gradient's unit.
    n : int
        Number of elements beyond it.
    tested : int
        How many of them the test saw.
    p_value : float
        p-value of the generalized Pareto; NaN without a fit, which counts as rejected.
    status : str
        Why there is no fit; empty if there is one.
    """

    ratio: float
    threshold: float
    n: int
    tested: int
    p_value: float
    status: str = ""


@dataclass(frozen=True, slots=True)
class ThresholdChoice:
    """The lowest threshold that was not rejected.

    Attributes
    ----------
    ratio : float or None
        Ratio of the candidate chosen; None if every one was rejected, or none has enough exceedances.
    threshold : float or None
        Threshold of the candidate chosen, in the gradient's unit.
    candidates : tuple of Candidate
        All that were tested, from the lowest threshold to the highest.
    rejected : int
        How many of them, from the first on, were rejected.
    alpha : float
        Accepted share of wrong rejections among the rejections, in expectation.
    size, replicates, seed : int
        Options of the bootstrap.
    note : str
        Warning about the choice; empty if there is none.
    """

    ratio: float | None
    threshold: float | None
    candidates: tuple[Candidate, ...]
    rejected: int
    alpha: float
    size: int
    replicates: int
    seed: int
    note: str = ""


def choose_threshold(
    x: Array | Sketch | Magnitudes,
    ratios: Sequence[float] | None = None,
    alpha: float = 0.05,
    size: int = 1000,
    replicates: int = 199,
    seed: int = 0,
    method: Method = "mle",
    on_progress: Callable[[], None] = lambda: None,
) -> ThresholdChoice:
    """Choose the lowest threshold whose excesses are not rejected as generalized Pareto.

    Each candidate is tested by :func:`gradstats.goodness.bootstrap` with the upper-tail Anderson-Darling statistic on
    a subsample of its excesses. ForwardStop (G'Sell, Wager, Chouldechova and Tibshirani 2016) rejects the first
    k̂ = max{k : −(1/k) Σ_{i≤k} ln(1 − pᵢ) ≤ alpha} of them, and the next is chosen (Bader, Yan and Zhang 2018). Its
    error control supposes independent p-values; those of nested excesses are not quite. A misfit that does not show
    among `size` excesses is not found: a larger size chooses a higher threshold.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.
    ratios : sequence of float, optional
        Exceedance ratios of the non-zero elements, in (0, 1]; by default 8 from 0.5 to 0.01, evenly in the logarithm.
        Those that leave fewer than :data:`FEWEST` exceedances are not tested.
    alpha : float
        Level of the error control, in (0, 1).
    size : int
        Excesses tested of each candidate. At full size a test only says that n is large.
    replicates : int
        Replicates of each bootstrap.
    seed : int
        Seed of the subsamples and replicates.
    method : {"closed", "moments", "mle", "pwm"}
        Method of every fit, see :func:`gradstats.fit`.
    on_progress : callable
        Called without arguments after every replicate.

    Returns
    -------
    ThresholdChoice
        The candidate chosen and all that were tested.

    Raises
    ------
    FitError
        If there is no finite non-zero element.
    InputError
        If a ratio is outside (0, 1], alpha outside (0, 1), the seed negative, or the replicates too few to reject
        anything at alpha.
    """
    if not 0 < alpha < 1:
        raise InputError(f"alpha must be in (0, 1), not {alpha}")
    if replicates < 1 or -math.log1p(-1 / (replicates + 1)) > alpha:
        raise InputError(f"{replicates} replicates are too few to reject at {alpha}: ask for more")
    if seed < 0:
        raise InputError(f"the seed must not be negative, not {seed}")
    m = magnitudes_of(x)
    asked = np.geomspace(0.5, 0.01, 8).tolist() if ratios is None else list(ratios)
    asked = sorted({float(r) for r in asked}, reverse=True)
    seeds = np.random.SeedSequence(seed).generate_state(max(len(asked), 1)).tolist()
    candidates: list[Candidate] = []
    for ratio, own in zip(asked, seeds, strict=False):
        threshold = threshold_of(m, target_count(ratio, m.count))
        over = m.excesses(threshold)
        if over.count < FEWEST:
            continue
        p_value, status = NAN, ""
        try:
            p_value = bootstrap(
                over,
                MODEL,
                method,
                statistic="ad",
                size=size,
                replicates=replicates,
                seed=own,
                on_progress=on_progress,
            ).p_value
        except FitError as error:
            status = str(error)
        tested = min(size, over.count)
        candidates.append(Candidate(ratio, threshold, over.count, tested, p_value, status))
    rejected = _forward_stop([c.p_value for c in candidates], alpha)
    chosen = candidates[rejected] if rejected < len(candidates) else None
    return ThresholdChoice(
        ratio=chosen.ratio if chosen else None,
        threshold=chosen.threshold if chosen else None,
        candidates=tuple(candidates),
        rejected=rejected,
        alpha=alpha,
        size=size,
        replicates=replicates,
        seed=seed,
        note=_note(candidates, chosen),
    )


def _forward_stop(p_values: Sequence[float], alpha: float) -> int:
    """Return k̂; a missing p-value adds nothing to the sum, so that its candidate is never chosen."""
    total, rejected = 0.0, 0
    for k, p in enumerate(p_values, 1):
        if not math.isnan(p):
            total -= math.log1p(-p) if p < 1 else -math.inf
        if total / k <= alpha:
            rejected = k
    return rejected


def _note(candidates: Sequence[Candidate], chosen: Candidate | None) -> str:
    """Return the warning about a choice."""
    if not candidates:
        return f"no candidate leaves {FEWEST} exceedances: nothing was tested"
    if chosen is None:
        return "every candidate was rejected: no threshold is proposed"
    if chosen.tested < _SMALL:
        return f"tested on {chosen.tested} excesses, with little power: not rejected is not true"
    return ""
