"""A test of the tail at the ratio in use: whether chance explains what a threshold keeps, and what it can see."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradstats.statistics.fitting import Fit
from gradstats.statistics.laws import LAWS
from gradstats.statistics.solution import Z95

__all__ = ["TailTest", "tail_test", "widened", "widened_interval"]

_Z80 = 0.8416
"""What a normal variable is below with probability 0.8."""


@dataclass(frozen=True, slots=True)
class TailTest:
    """Whether a threshold keeps more or fewer elements than chance explains.

    Attributes
    ----------
    ratio : float
        Kept fraction of the threshold.
    k : int
        Elements it should keep: the observations of the test.
    p_value : float
        Two-sided p-value of the number it keeps.
    visible : float
        Smallest k̂/k − 1 that the test, at 5 %, sees with probability 0.8.
    """

    ratio: float
    k: int
    p_value: float
    visible: float


def tail_test(fit: Fit, ratio: float, k: int, quality: float) -> TailTest:
    """Test what a model's threshold keeps, at the ratio in use, with all elements, as if they were independent.

    The root of a count varies by ½ whatever its mean (Anscombe 1948), here times √(1 − ratio), as of k out of n. A fit
    to the same data by maximum likelihood makes the count vary less (Durbin 1973), so that the test rejects less often
    than it says. One by other methods may make it vary more: at most by the sum of what its parameters' standard errors
    do to the count.

    Parameters
    ----------
    fit : Fit
        Model.
    ratio : float
        Kept fraction k/d.
    k : int
        Elements that the threshold should keep.
    quality : float
        Quotient k̂/k, what it keeps over what it should.

    Returns
    -------
    TailTest
        p-value, and what the test can see; NaN where a standard error is not known, or the law ends at its threshold.
    """
    variance = (1 - ratio) / k
    if not fit.is_likelihood:
        variance += _doubt(fit, ratio) ** 2
    # √(k̂/k) varies half as much, relatively, as k̂/k
    return _judged(ratio, k, quality, math.sqrt(variance) / 2)


def widened(test: TailTest, quality: float, design: float) -> TailTest:
    """Return the test of elements that are large together.

    Parameters
    ----------
    test : TailTest
        Test of independent elements.
    quality : float
        Quotient k̂/k, what the threshold keeps over what it should.
    design : float
        Variance of the count over that of independent elements.

    Returns
    -------
    TailTest
        A wider one.
    """
    # solved for the deviation that _judged made `visible` of
    deviation = (math.sqrt(1 + test.visible) - 1) / (Z95 + _Z80)
    return _judged(test.ratio, test.k, quality, math.sqrt(design) * deviation)


def widened_interval(middle: float, low: float, high: float, design: float) -> tuple[float, float]:
    """Return the interval of an estimate from elements that are large together.

    Parameters
    ----------
    middle, low, high : float
        Estimate and its interval, of independent elements.
    design : float
        Variance of the count over that of independent elements; below 1 it counts as 1.

    Returns
    -------
    (float, float)
        Ends, each farther from the estimate by the root of the design effect.
    """
    by = math.sqrt(max(design, 1.0))
    return middle - by * (middle - low), middle + by * (high - middle)


def _judged(ratio: float, k: int, quality: float, deviation: float) -> TailTest:
    """Return the test by the standard deviation of √(k̂/k)."""
    from scipy.special import ndtr

    z = abs(math.sqrt(quality) - 1)
    # no deviation, as at a ratio of 1: any difference is real
    p_value = 2 * float(ndtr(-z / deviation)) if deviation else float(z == 0)
    return TailTest(ratio, k, p_value, (1 + (Z95 + _Z80) * deviation) ** 2 - 1)


def _doubt(fit: Fit, ratio: float) -> float:
    """Return what the standard errors of parameters do to the share beyond a threshold, relative, at most."""
    law, params = LAWS[fit.model].magnitude, dict(fit.params)
    threshold = fit.threshold(ratio)
    share = float(law.sf(threshold, **params))
    if not share:  # the law ends there, to the last digit
        return math.nan
    total = 0.0
    for name, error in fit.stderr.items():
        high, low = (
            float(law.sf(threshold, **params | {name: params[name] + sign * error}))
            for sign in (1, -1)
        )
        # |slope| times error, by a difference that is two errors wide
        total += abs(high - low) / 2 / share
    return total
