"""Quantiles of the tail, with intervals, also beyond the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.levels import levels_beyond
from gradstats.primitives.ratio import check_number, check_ratio, target_count
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Fit, fit
from gradstats.statistics.laws.law import Method
from gradstats.statistics.pot.peaks import (
    FEWEST,
    MODEL,
    NAN,
    covariance,
    disagreement,
    finite_of,
    magnitudes_of,
    threshold_of,
)
from gradstats.statistics.pot.profile import likelihood_region
from gradstats.statistics.solution import FitError, Reason

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
        Magnitude by the generalized Pareto, in the gradient's unit; by counting, and flagged, where ties leave no more
        elements than that beyond the threshold of the fit; 0 if fewer elements are non-zero.
    low, high : float
        Its interval: by profile likelihood of a likelihood fit, else normal for the logarithm of the excess over the
        threshold. NaN where the fit has no standard errors, or `value` is not by it.
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

    The quantile is u + (σ/ξ)((ζ/ratio)^ξ − 1), where ζ is the share beyond u. The interval is that of the profile
    likelihood (Coles 2001, section 4.3.3), with the binomial uncertainty of ζ added in squares to each side. 93 to 97 %
    of these hold the quantile where excesses are independent and generalized Pareto, from a hundred of them on. Those
    of gradients are not quite Pareto, which is the larger error far beyond the data of millions of elements and not in
    the interval (of a million normal, Student's t or layered elements 0 to 14 % hold it), and not independent (in
    clusters 76 to 90 %).

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

    ratio, at = check_ratio(ratio), check_ratio(at, "at")
    if ratio >= at:
        raise InputError(f"ratio must be below at = {at}, not {ratio}")
    level = check_number(level, "level", 0, 1)
    m = magnitudes_of(x)
    numel = finite_of(m)
    k = target_count(at, numel)
    # a threshold inside a pile of equal magnitudes would make a spike of it
    piled = levels_beyond(m, k) or m
    threshold = threshold_of(piled, k)
    over = piled.excesses(threshold)
    if not over.count:
        raise FitError(Reason.TIED)
    fitted = fit(over, MODEL, method)
    c, scale, share = fitted.params["c"], fitted.params["scale"], over.count / numel
    flags = list(map(str, fitted.flags + disagreement(over, fitted, threshold)))
    beyond = ratio * numel
    empirical = m.upper_quantile(round(beyond)) if beyond >= _SEEN else NAN
    if beyond < _SEEN and ratio < share:
        flags.append(f"fewer than {_SEEN} elements beyond: extrapolated")
    if over.count < FEWEST:
        flags.append(f"fitted to fewer than {FEWEST} excesses")
    value, low, high = 0.0, NAN, NAN
    if ratio < share:
        reach = math.log(share / ratio)
        excess, slopes, by_share = _extrapolate(c, scale, reach)
        value = threshold + excess
        z = float(ndtri(0.5 + level / 2))
        if method == "mle" and not math.isnan(fitted.stderr["c"]):
            with np.errstate(over="ignore"):
                near = _excesses(*likelihood_region(over, fitted, level), reach)
            below, above = excess - near.min(), near.max() - excess
        else:
            # normal for the logarithm of the excess, so that the lower end stays above the threshold
            factor = math.exp(z * math.sqrt(float(slopes @ covariance(fitted) @ slopes)) / excess)
            below, above = excess - excess / factor, excess * factor - excess
        # both sources of error, in squares, on either side (Zou and Donner 2008)
        # slope in ln ζ times the binomial error of ln ζ
        by_count = z * by_share * math.sqrt((1 - share) / (share * numel))
        low, high = value - math.hypot(below, by_count), value + math.hypot(above, by_count)
    elif threshold > 0:  # a tie at it is wholly on the other side
        value = m.upper_quantile(round(beyond))
        flags.append("ratio not below the share beyond the threshold: counted")
    return TailQuantile(
        ratio=ratio,
        value=value,
        low=low,
        high=high,
        level=level,
        at=at,
        threshold=threshold,
        n=over.count,
        fit=fitted,
        empirical=empirical,
        flags=tuple(flags),
    )


def _excesses(
    c: NDArray[np.float64], scale: NDArray[np.float64], reach: float
) -> NDArray[np.float64]:
    """Return (σ/ξ)(r^ξ − 1) for reach = ln r, shape by shape."""
    # any y this small gives the limit of expm1(y)/y, which is 1
    y = np.where(c == 0, 1e-12, c * reach)
    return scale * reach * np.expm1(y) / y


def _extrapolate(c: float, scale: float, reach: float) -> tuple[float, NDArray[np.float64], float]:
    """Return (σ/ξ)(r^ξ − 1) for reach = ln r, its slopes in (ξ, σ), and its slope in ln r."""
    y = c * reach
    # the slopes hold y·exp(y), and the variance their squares: 1e260 and more
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
