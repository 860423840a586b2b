"""The pieces of SIDCo's multi-stage threshold: ratios of the stages, quantile of one stage, loop over the stages.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems",
MLSys 2021. The solvers behind :func:`gradstats.fit` use the same closed forms of the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from gradstats.primitives import Moments
from gradstats.primitives.ratio import check_count
from gradstats.statistics.solution import LEAST_SQUARES, FitError, Reason

__all__ = [
    "MOST_STAGES",
    "Quantile",
    "exponential",
    "gamma_closed",
    "gamma_exact",
    "gamma_shape",
    "genpareto",
    "genpareto_by_moments",
    "most_stages",
    "run_stages",
    "stage_ratios",
]

MOST_STAGES = 64
"""Largest number of stages: halving 2⁶⁴ elements until one is left takes as many, each a pass over the gradient."""

Quantile: TypeAlias = Callable[[Moments, float, float], tuple[float, dict[str, Any]]]
"""(moments of |g| ≥ η, η, δ) → (excess over η that a share δ of them reaches, parameters and flags)."""


def stage_ratios(ratio: float, stages: int, first: float = 0.25) -> list[float]:
    """Split a ratio over stages: δ₁ = `first`, then equal shares whose product is `ratio` (SIDCo section 2.4).

    Parameters
    ----------
    ratio : float
        Share of the elements to keep in the end.
    stages : int
        Number of stages M ≥ 1. A ratio at or above `first` gets one stage only.
    first : float
        Share δ₁ that the first of several stages keeps.

    Returns
    -------
    list of float
        One share per stage, each of what the stage before kept.

    Raises
    ------
    InputError
        If `stages` is not from 1 to :data:`MOST_STAGES`.

    Examples
    --------
    >>> [round(r, 4) for r in stage_ratios(0.001, 3)]
    [0.25, 0.0632, 0.0632]
    """
    stages = check_count(stages, "stages", 1, MOST_STAGES)
    if stages == 1 or ratio >= first:
        return [ratio]
    return [first] + [(ratio / first) ** (1 / (stages - 1))] * (stages - 1)


def most_stages(ratio: float) -> int:
    """Return ⌈log δ / log ½⌉, the largest number of stages that the authors' program uses; at least 1.

    Parameters
    ----------
    ratio : float
        Share δ of the elements to keep.
    """
    return max(1, math.ceil(math.log(ratio) / math.log(0.5))) if 0 < ratio < 1 else 1


def run_stages(
    models: tuple[Quantile, Quantile],
    ratios: Sequence[float],
    whole: Moments,
    above: Callable[[float], Moments],
) -> Iterator[dict[str, Any]]:
    """Yield the stages of a multi-stage threshold (SIDCo algorithm 1) one after another.

    Ends early when no element exceeds a stage's threshold. Raises FitError if sums leave the range of numbers.

    Parameters
    ----------
    models : pair of Quantile
        Quantile of the first stage and of every later one.
    ratios : sequence of float
        One share per stage, see :func:`stage_ratios`.
    whole : Moments
        Moments of all non-zero magnitudes, which the first stage models.
    above : callable
        Threshold to the moments of the magnitudes that reach it. Called between two stages only.

    Yields
    ------
    dict
        ``count`` magnitudes modelled, ``ratio`` of them wanted, ``threshold`` after the stage, parameters and flags.
    """
    threshold, m = 0.0, whole
    for stage, ratio in enumerate(ratios):
        if stage:
            m = above(threshold)
        if m.count == 0:  # the last threshold exceeds every element: nothing left to model
            return
        if not m.sum_abs < math.inf:
            raise FitError(Reason.RANGE)
        excess, parameters = models[min(stage, 1)](m, threshold, ratio)
        threshold += excess
        yield {"count": m.count, "ratio": ratio, "threshold": threshold, **parameters}


def exponential(m: Moments, threshold: float, ratio: float) -> tuple[float, dict[str, Any]]:
    """Return the quantile β ln(1/δ) of exponential excesses, by maximum likelihood (SIDCo eq. 10 and 11).

    The scale β is the mean of |g| − η, which eq. 11 intends.

    Parameters
    ----------
    m : Moments
        Moments of the magnitudes that reach the threshold.
    threshold : float
        Threshold η of the stage before; 0 in the first.
    ratio : float
        Share δ of them to keep.
    """
    scale = max(m.mean - threshold, 0.0)
    return scale * math.log(1 / ratio), {"scale": scale}


def gamma_shape(mean: float, mean_log: float) -> float:
    """Return the closed-form gamma shape (SIDCo eq. 16), within 1.5 % of maximum likelihood.

    Parameters
    ----------
    mean : float
        Mean magnitude.
    mean_log : float
        Mean logarithm of the magnitudes.

    Returns
    -------
    float
        Shape α; infinite if all magnitudes are equal.
    """
    s = math.log(mean) - mean_log if mean > 0 else 0.0
    if s <= 1e-12:
        return math.inf
    return (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)


def gamma_exact(m: Moments, threshold: float, ratio: float) -> tuple[float, dict[str, Any]]:
    """Return the quantile of gamma magnitudes by the exact inverse of the incomplete gamma function (SIDCo eq. 14).

    Parameters
    ----------
    m : Moments
        Moments of all non-zero magnitudes.
    threshold : float
        Not used: the gamma distribution is a model of the first stage only.
    ratio : float
        Share δ of the magnitudes to keep.
    """
    from scipy.special import gammainccinv

    shape = gamma_shape(m.mean, m.mean_log)
    if math.isinf(shape):
        return m.mean, {"a": shape, "scale": 0.0}
    scale = m.mean / shape
    return scale * float(gammainccinv(shape, ratio)), {"a": shape, "scale": scale}


def gamma_closed(m: Moments, threshold: float, ratio: float) -> tuple[float, dict[str, Any]]:
    """Return SIDCo's closed form −β(ln δ + ln Γ(α)) of the quantile of gamma magnitudes (eq. 15).

    It bounds the quantile for shapes up to 1 and thresholds beyond the scale only; elsewhere it is flagged
    ``outside_bound``. A negative value becomes 0.

    Parameters
    ----------
    m : Moments
        Moments of all non-zero magnitudes.
    threshold : float
        Not used: the gamma distribution is a model of the first stage only.
    ratio : float
        Share δ of the magnitudes to keep.
    """
    shape = gamma_shape(m.mean, m.mean_log)
    if math.isinf(shape):
        return m.mean, {"a": shape, "scale": 0.0}
    scale = m.mean / shape
    value = -scale * (math.log(ratio) + math.lgamma(shape))
    outside = shape > 1 or value < scale
    return max(value, 0.0), {"a": shape, "scale": scale, "outside_bound": outside}


def genpareto_by_moments(mean: float, variance: float) -> tuple[float, float]:
    """Return shape ξ and scale of a generalized Pareto by its moments (SIDCo eq. 8 and 9); ξ is always below ½.

    Parameters
    ----------
    mean : float
        Mean excess.
    variance : float
        Variance of the excesses, above 0.
    """
    squared = mean**2 / variance
    return 0.5 * (1 - squared), 0.5 * mean * (squared + 1)


def genpareto(m: Moments, threshold: float, ratio: float) -> tuple[float, dict[str, Any]]:
    """Return the quantile (σ/ξ)(δ^−ξ − 1) of generalized Pareto excesses, with its limit at ξ = 0 (SIDCo eq. 7).

    Flagged ``unreliable`` unless −½ < ξ ≤ ¼.

    Parameters
    ----------
    m : Moments
        Moments of the magnitudes that reach the threshold.
    threshold : float
        Threshold η of the stage before; 0 in the first.
    ratio : float
        Share δ of them to keep.
    """
    if not LEAST_SQUARES < m.sum_squares < math.inf:
        raise FitError(Reason.RANGE)
    mean = max(m.mean - threshold, 0.0)
    if m.variance <= 1e-12 * mean**2 or mean == 0:
        return mean, {"c": -math.inf, "scale": 0.0, "unreliable": True}
    shape, scale = genpareto_by_moments(mean, m.variance)
    logarithm = math.log(1 / ratio)
    excess = scale * logarithm
    if abs(shape * logarithm) > 1e-12:
        excess = scale * math.expm1(shape * logarithm) / shape
    return excess, {"c": shape, "scale": scale, "unreliable": not -0.5 < shape <= 0.25}
