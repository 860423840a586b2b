"""Matching a scale family to the mean and the mean square of the magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from scipy.optimize import brentq

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.solution import FitError, Flag, Reason, Solution

__all__ = ["by_ratio", "delta_method", "require_spread"]

# relative step of the numerical derivatives, far above the 1e-12 to which _solve finds a shape
_STEP = 1e-5

Rule: TypeAlias = Callable[[float, float], dict[str, float]]
"""(mean, variance) → parameters, ``scale`` among them."""

Raw: TypeAlias = Callable[[float, int], float]
"""(shape, order) → raw moment of the magnitudes at scale 1."""


def require_spread(m: Magnitudes) -> None:
    """Check that magnitudes have a shape.

    Parameters
    ----------
    m : Magnitudes
        Sample.

    Raises
    ------
    FitError
        If there are fewer than two, or all are equal.
    """
    if m.count < 2:
        raise FitError(Reason.TOO_FEW)
    # below that the variance is what rounding leaves of mean square − mean²
    if m.variance <= 1e-14 * m.mean**2:
        raise FitError(Reason.CONSTANT)


def delta_method(rule: Rule, skewness: float, kurtosis: float, m: Magnitudes) -> dict[str, float]:
    """Return standard errors of a moment estimate, from moments up to the fourth of the fitted distribution.

    The sample's own moments would nearly always be too small, because the tail decides the fourth.

    Parameters
    ----------
    rule : callable
        (mean, variance) → parameters. It is differentiated numerically at the sample's moments.
    skewness, kurtosis : float
        Third and fourth central moment of the fitted distribution, in units of its standard deviation.
    m : Magnitudes
        Sample.

    Returns
    -------
    dict of str to float
        Standard error by parameter.
    """
    # of magnitudes that hardly differ, the mean square would leave no digits of the variance
    mean, variance = m.mean, m.variance
    # of the mean and the variance, for one element of the fitted law and relative to steps of each
    both = skewness * math.sqrt(variance) / mean
    covariance = np.array([[variance / mean**2, both], [both, kurtosis - 1]])
    up = rule(mean * (1 + _STEP), variance), rule(mean, variance * (1 + _STEP))
    down = rule(mean * (1 - _STEP), variance), rule(mean, variance * (1 - _STEP))
    errors = {}
    for name in up[0]:
        slopes = np.array([(up[i][name] - down[i][name]) / (2 * _STEP) for i in (0, 1)])
        # rounding may leave a quadratic form of zero just below it
        errors[name] = math.sqrt(max(float(slopes @ covariance @ slopes), 0.0) / m.count)
    return errors


def _solve(raw: Raw, target: float, low: float, high: float) -> float:
    """Return the shape at which mean²/mean square, which rises with the shape, is `target`; or an end of the range."""

    def ratio(shape: float) -> float:
        return raw(shape, 1) ** 2 / raw(shape, 2)

    if target <= ratio(low):
        return low
    if target >= ratio(high):
        return high
    # over the logarithm: the ranges span three to four decades
    log_shape = brentq(
        lambda s: ratio(math.exp(s)) - target, math.log(low), math.log(high), xtol=1e-12
    )
    return math.exp(log_shape)


def by_ratio(
    m: Magnitudes, name: str, raw: Raw, low: float, high: float, regular: float = 0.0
) -> Solution:
    """Fit a scale family with one shape by its moments.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    name : str
        Name of the shape.
    raw : callable
        (shape, order) → raw moment of the magnitudes at scale 1. mean²/mean square has to rise with the shape.
    low, high : float
        Range of shapes searched; at its ends the fit is flagged.
    regular : float
        Shape up to which there is no fourth moment: the fit is flagged and has no standard errors.
    """
    require_spread(m)

    def rule(mean: float, variance: float) -> dict[str, float]:
        shape = _solve(raw, mean**2 / (mean**2 + variance), low, high)
        return {name: shape, "scale": mean / raw(shape, 1)}

    params = rule(m.mean, m.variance)
    shape = params[name]
    # _solve returns an end itself where there is no root, so equality is exact
    if shape in (low, high):
        return Solution(params, dict.fromkeys(params, math.nan), (Flag.BOUNDARY,))
    if shape <= regular:
        return Solution(params, dict.fromkeys(params, math.nan), (Flag.TAIL,))
    first, second, third, fourth = (raw(shape, order) for order in (1, 2, 3, 4))
    spread = math.sqrt(second - first**2)
    skewness = (third - 3 * first * second + 2 * first**3) / spread**3
    kurtosis = (fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4) / spread**4
    return Solution(params, delta_method(rule, skewness, kurtosis, m))
