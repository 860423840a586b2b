"""SIDCo's formulas: the ratios of the stages, and what each of the three laws adds to a threshold.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems",
MLSys 2021. The algorithm that calls them is in :mod:`gradstats.thresholds.sidco`; functions of numbers alone are also
compiled, from this source. The solvers behind :func:`gradstats.fit` use the same closed forms of the shapes.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from gradstats.primitives.ratio import check_count
from gradstats.statistics.solution import LEAST_SQUARES, FitError, Reason

__all__ = [
    "MOST_STAGES",
    "Sums",
    "check_range",
    "exponential",
    "gamma_closed",
    "gamma_exact",
    "gamma_shape",
    "genpareto",
    "genpareto_by_moments",
    "genpareto_parameters",
    "most_stages",
    "split_ratio",
    "stage_excess",
    "stage_ratios",
]

MOST_STAGES = 64
"""Largest number of stages: halving 2⁶⁴ elements until one is left takes as many, each a pass over the gradient."""

Sums: TypeAlias = tuple[int, float, float]
"""Number, Σ|g| and Σg² of the magnitudes that reach a threshold. An exponential needs no squares: they may be NaN."""


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
    stages, first_share, later = split_ratio(ratio, stages, first)
    return [first_share] + [later] * (stages - 1)


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
        # the first of several stages would keep no more than this already; a later stage would keep everything
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


def exponential(mean: float, threshold: float, ratio: float) -> tuple[float, float]:
    """Return the quantile β ln(1/δ) of exponential excesses and their scale β, by maximum likelihood (eq. 10 and 11).

    The scale is the mean of |g| − η, which eq. 11 intends.

    Parameters
    ----------
    mean : float
        Mean of the magnitudes that reach the threshold.
    threshold : float
        Threshold η of the stage before; 0 in the first.
    ratio : float
        Share δ of them to keep.
    """
    # sums are rounded: a mean may lie below its own threshold by the last digits
    scale = max(mean - threshold, 0.0)
    return scale * math.log(1 / ratio), scale


def genpareto(
    mean: float, variance: float, threshold: float, ratio: float
) -> tuple[float, float, float]:
    """Return the quantile (σ/ξ)(δ^−ξ − 1) of generalized Pareto excesses, its limit at ξ = 0 (eq. 7), and ξ and σ.

    Parameters
    ----------
    mean : float
        Mean of the magnitudes that reach the threshold.
    variance : float
        Their variance.
    threshold : float
        Threshold η of the stage before; 0 in the first.
    ratio : float
        Share δ of them to keep.
    """
    mean = max(mean - threshold, 0.0)
    # All are equal, up to rounding: no shape describes them, and every quantile is their value.
    if variance <= 1e-12 * (mean * mean) or mean == 0:
        return mean, -math.inf, 0.0
    shape, scale = genpareto_by_moments(mean, variance)
    logarithm = math.log(1 / ratio)
    # the limit ξ → 0, an exponential; below, δ^−ξ − 1 as expm1(ξ ln 1/δ), which keeps the digits of a small ξ
    excess = scale * logarithm
    if abs(shape * logarithm) > 1e-12:
        excess = scale * math.expm1(shape * logarithm) / shape
    return excess, shape, scale


def genpareto_by_moments(mean: float, variance: float) -> tuple[float, float]:
    """Return shape ξ and scale of a generalized Pareto by its moments (SIDCo eq. 8 and 9); ξ is always below ½.

    Parameters
    ----------
    mean : float
        Mean excess.
    variance : float
        Variance of the excesses, above 0.
    """
    squared = mean * mean / variance
    return 0.5 * (1 - squared), 0.5 * mean * (squared + 1)


def genpareto_parameters(shape: float, scale: float) -> dict[str, Any]:
    """Return the parameters of a generalized Pareto by name, flagged ``unreliable`` unless −½ < ξ < ¼.

    Parameters
    ----------
    shape, scale : float
        Shape ξ and scale.
    """
    # Lemma 2 takes |ξ| < ½; from ¼ on the estimate by moments has no variance.
    return {"c": shape, "scale": scale, "unreliable": not -0.5 < shape < 0.25}


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
    # ln of arithmetic over geometric mean: at least 0, and 0, up to rounding, only if all are equal
    s = math.log(mean) - mean_log if mean > 0 else 0.0
    if s <= 1e-12:
        return math.inf
    return (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)


def gamma_exact(mean: float, mean_log: float, ratio: float) -> tuple[float, dict[str, Any]]:
    """Return the quantile of gamma magnitudes by the exact inverse of the incomplete gamma function (SIDCo eq. 14).

    Parameters
    ----------
    mean : float
        Mean of all non-zero magnitudes.
    mean_log : float
        Mean of their logarithms.
    ratio : float
        Share δ of the magnitudes to keep.
    """
    from scipy.special import gammainccinv

    shape = gamma_shape(mean, mean_log)
    if math.isinf(shape):
        return mean, {"a": shape, "scale": 0.0}
    # inverse of the upper tail: 1 − δ would lose the digits of a small δ
    scale = mean / shape
    return scale * float(gammainccinv(shape, ratio)), {"a": shape, "scale": scale}


def gamma_closed(mean: float, mean_log: float, ratio: float) -> tuple[float, dict[str, Any]]:
    """Return SIDCo's closed form −β(ln δ + ln Γ(α)) of the quantile of gamma magnitudes (eq. 15).

    It bounds the quantile for shapes up to 1 and thresholds beyond the scale only; elsewhere it is flagged
    ``outside_bound``. A negative value becomes 0.

    Parameters
    ----------
    mean : float
        Mean of all non-zero magnitudes.
    mean_log : float
        Mean of their logarithms.
    ratio : float
        Share δ of the magnitudes to keep.
    """
    shape = gamma_shape(mean, mean_log)
    if math.isinf(shape):
        return mean, {"a": shape, "scale": 0.0}
    scale = mean / shape
    value = -scale * (math.log(ratio) + math.lgamma(shape))
    # the two conditions of the bound (eq. 24)
    outside = shape > 1 or value < scale
    return max(value, 0.0), {"a": shape, "scale": scale, "outside_bound": outside}


def stage_excess(
    pareto: bool, sums: Sums, threshold: float, ratio: float
) -> tuple[float, float, float]:
    """Return what a stage adds to the threshold, and its law's parameters: ξ and σ, or β and 0.

    Parameters
    ----------
    pareto : bool
        Whether the excesses are generalized Pareto; otherwise they are exponential.
    sums : (int, float, float)
        Sums of the magnitudes that reach the threshold, at least one.
    threshold : float
        Threshold η of the stage before; 0 in the first.
    ratio : float
        Share δ of them to keep.
    """
    count, total, squares = sums
    mean = total / count
    if pareto:
        # variance of the magnitudes is that of their excesses; rounding may leave it below 0
        return genpareto(mean, max(squares / count - mean * mean, 0.0), threshold, ratio)
    excess, scale = exponential(mean, threshold, ratio)
    return excess, scale, 0.0


def check_range(sums: Sums, squares: bool) -> None:
    """Check that sums have not left float64's range, as those of float64 magnitudes may.

    Parameters
    ----------
    sums : (int, float, float)
        Sums of at least one magnitude.
    squares : bool
        Whether a law needs the sum of squares.

    Raises
    ------
    FitError
        If one has.
    """
    if not sums[1] < math.inf or (squares and not LEAST_SQUARES < sums[2] < math.inf):
        raise FitError(Reason.RANGE)
