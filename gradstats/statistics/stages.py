"""The pieces of SIDCo's multi-stage threshold: ratios of the stages, quantile of one stage, loop over the stages.

Functions of numbers alone are compiled, from this source, into the loops of :mod:`gradstats.thresholds.sidco_loops`.

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
    "exponential_excess",
    "gamma_closed",
    "gamma_exact",
    "gamma_shape",
    "genpareto",
    "genpareto_by_moments",
    "genpareto_excess",
    "genpareto_parameters",
    "most_stages",
    "run_stages",
    "split_ratio",
    "stage_ratios",
    "worth_collecting",
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
    stages, own, later = split_ratio(ratio, stages, first)
    return [own] + [later] * (stages - 1)


def split_ratio(ratio: float, stages: int, first: float) -> tuple[int, float, float]:
    """Return how many stages there are, the share of the first, and that of every later one: see :func:`stage_ratios`.

    Parameters
    ----------
    ratio : float
        Share of the elements to keep in the end.
    stages : int
        Number of stages M ≥ 1.
    first : float
        Share δ₁ that the first of several stages keeps.
    """
    if stages == 1 or ratio >= first:
        return 1, ratio, 1.0
    return stages, first, (ratio / first) ** (1 / (stages - 1))


def most_stages(ratio: float) -> int:
    """Return ⌈log δ / log ½⌉, the largest number of stages that the authors' program uses; at least 1.

    Parameters
    ----------
    ratio : float
        Share δ of the elements to keep.
    """
    return max(1, math.ceil(math.log(ratio) / math.log(0.5))) if 0 < ratio < 1 else 1


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
    excess, scale = exponential_excess(m.mean, threshold, ratio)
    return excess, {"scale": scale}


def exponential_excess(mean: float, threshold: float, ratio: float) -> tuple[float, float]:
    """Return the excess and the scale of :func:`exponential`, from the mean magnitude.

    Parameters
    ----------
    mean : float
        Mean of the magnitudes that reach the threshold.
    threshold : float
        Threshold η of the stage before.
    ratio : float
        Share δ of them to keep.
    """
    scale = max(mean - threshold, 0.0)
    return scale * math.log(1 / ratio), scale


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
    excess, shape, scale = genpareto_excess(m.mean, m.variance, threshold, ratio)
    return excess, genpareto_parameters(shape, scale)


def genpareto_excess(
    mean: float, variance: float, threshold: float, ratio: float
) -> tuple[float, float, float]:
    """Return the excess, the shape and the scale of :func:`genpareto`, from mean and variance of the magnitudes.

    Parameters
    ----------
    mean : float
        Mean of the magnitudes that reach the threshold.
    variance : float
        Their variance.
    threshold : float
        Threshold η of the stage before.
    ratio : float
        Share δ of them to keep.
    """
    mean = max(mean - threshold, 0.0)
    if variance <= 1e-12 * mean**2 or mean == 0:
        return mean, -math.inf, 0.0
    shape, scale = genpareto_by_moments(mean, variance)
    logarithm = math.log(1 / ratio)
    excess = scale * logarithm
    if abs(shape * logarithm) > 1e-12:
        excess = scale * math.expm1(shape * logarithm) / shape
    return excess, shape, scale


def genpareto_parameters(shape: float, scale: float) -> dict[str, Any]:
    """Return the parameters that :func:`genpareto` names, and its flag.

    Parameters
    ----------
    shape, scale : float
        Shape ξ and scale.
    """
    return {"c": shape, "scale": scale, "unreliable": not -0.5 < shape <= 0.25}
