"""Laplace: exponential magnitudes."""

from __future__ import annotations

import math

from scipy.stats import expon, laplace

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.laws.law import Law
from gradstats.statistics.solution import Solution

__all__ = ["LAW", "by_mean"]


def by_mean(m: Magnitudes) -> Solution:
    """Take the mean magnitude (SIDCo eq. 5), which is the exact estimate of every method.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    # inverse Fisher information: scale²/n
    return Solution({"scale": m.mean}, {"scale": m.mean / math.sqrt(m.count)})


LAW = Law(
    name="laplace",
    label="Laplace",
    magnitude=expon,
    signed=laplace,
    solvers={"closed": by_mean, "moments": by_mean, "mle": by_mean, "pwm": by_mean},
    excess="laplace",
)
