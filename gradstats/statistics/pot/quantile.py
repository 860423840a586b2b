"""Quantiles of the tail, with intervals, also beyond the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.ratio import target_count
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Fit, Method, fit
from gradstats.statistics.pot.peaks import (
    FEWEST,
    MODEL,
    NAN,
    covariance,
    finite_of,
    magnitudes_of,
    threshold_of,
)

__all__ = ["TailQuantile", "tail_quantile"]

_SEEN = 10
"""Elements beyond a quantile from which on the quantile by counting is shown."""

_LARGEST = 300.0
"""Logarithm of (share/ratio)^ξ beyond which the variance overflows."""


@dataclass(frozen=True, slots=True)
class TailQuantile:
    """A magnitude that a small share of the elements exceeds.

    Attributes
    ----------
    ratio : float
        Share of all finite elements, with zeros.
    value : float
        Magnitude by the generalized Pareto, in the gradient's unit; 0 if fewer elements are non-zero.
    low, high : float
        Its normal interval; NaN where the fit has no standard errors.
    level : float
        Probability that the interval holds the magnitude.
    at : float
        Share of all finite elements asked to exceed the threshold of the fit.
    threshold : float
        That threshold, in the gradient's unit.
    n : int
        Number of elements beyond it.
    fit : Fit
        Generalized Pareto fit of the excesses.
    empirical : float
        Magnitude by counting; NaN if fewer than ten elements lie beyond.
    flags : tuple of str
        Warnings.
    """

    ratio: float
    value: float
    low: float
    high: float
    level: float
    at: float
    threshold: float
    n: int
    fit: Fit
    empirical: float
    flags: tuple[str, ...]


def tail_quantile(
    x: Array | Sketch | Magnitudes,
    ratio: float,
    at: float = 0.05,
    method: Method = "mle",
    level: float = 0.95,
) -> TailQuantile:
    """Estimate the magnitude that a share of the elements exceeds from a fit of the peaks over a lower threshold.

    The quantile is u + (σ/ξ)((ζ/ratio)^ξ − 1), where ζ is the share beyond u. The interval is that of the delta method,
    with the binomial uncertainty of ζ (Coles 2001, section 4.3.3). It supposes that the excesses are generalized Pareto
    from u on. They are not quite, which is the larger error far beyond the data of millions of elements, and not in
    the interval.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.
    ratio : float
        Share of all finite elements, with zeros; below `at`. It may lie beyond the data.
    at : float
        Share of all finite elements that the fit is made from; all non-zero ones if there are fewer.
    method : {"closed", "moments", "mle", "pwm"}
        Method of the fit, see :func:`gradstats.fit`.
    level : float
        Probability that the interval holds the quantile, in (0, 1).

    Returns
    -------
    TailQuantile
        Quantile with its interval, the fit, and the quantile by counting.

    Raises
    ------
    FitError
        If the excesses have no fit.
    InputError
        If not 0 < ratio < at ≤ 1, the level is outside (0, 1), or the quantile is not finite.
    """
    from scipy.special import ndtri

    if not 0 < ratio < at <= 1:
        raise InputError(f"ratio must be above 0 and below at = {at} ≤ 1, not {ratio}")
    if not 0 < level < 1:
        raise InputError(f"level must be in (0, 1), not {level}")
    m = magnitudes_of(x)
    numel = finite_of(m)
    threshold = threshold_of(m, target_count(at, numel))
    over = m.excesses(threshold)
    fitted = fit(over, MODEL, method)
    c, scale, share = fitted.params["c"], fitted.params["scale"], over.count / numel
    flags = list(map(str, fitted.flags))
    beyond = ratio * numel
    empirical = m.upper_quantile(round(beyond)) if beyond >= _SEEN else NAN
    if beyond < _SEEN:
        flags.append(f"fewer than {_SEEN} elements beyond: extrapolated")
    if over.count < FEWEST:
        flags.append(f"fitted to fewer than {FEWEST} excesses")
    value, half = 0.0, NAN
    if ratio < share:
        excess, slopes, by_share = _extrapolate(c, scale, math.log(share / ratio))
        value = threshold + excess
        variance = float(slopes @ covariance(fitted) @ slopes)
        variance += by_share**2 * (1 - share) / (share * numel)
        half = float(ndtri(0.5 + level / 2)) * math.sqrt(variance)
    return TailQuantile(
        ratio=ratio,
        value=value,
        low=value - half,
        high=value + half,
        level=level,
        at=at,
        threshold=threshold,
        n=over.count,
        fit=fitted,
        empirical=empirical,
        flags=tuple(flags),
    )


def _extrapolate(c: float, scale: float, reach: float) -> tuple[float, NDArray[np.float64], float]:
    """Return (σ/ξ)(r^ξ − 1) for reach = ln r, its slopes in (ξ, σ), and its slope in ln r."""
    y = c * reach
    if y > _LARGEST:
        raise InputError(
            f"shape {c:.3g}: the quantile leaves the range of numbers; ask for a larger ratio"
        )
    power = math.exp(y)
    if abs(y) < 1e-4:  # limits for ξ → 0, where the differences below cancel
        by_scale, by_shape = reach * (1 + y / 2), reach**2 * (0.5 + y / 3)
    else:
        by_scale, by_shape = math.expm1(y) / c, reach**2 * (y * power - math.expm1(y)) / y**2
    return scale * by_scale, np.array([scale * by_shape, by_scale]), scale * power
