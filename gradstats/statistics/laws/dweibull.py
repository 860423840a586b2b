"""Double Weibull: Weibull magnitudes."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln
from scipy.stats import dweibull, weibull_min

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.laws.law import Law
from gradstats.statistics.laws.moments import by_ratio, require_spread
from gradstats.statistics.laws.search import ENDS
from gradstats.statistics.solution import Flag, Solution

__all__ = ["LAW", "by_likelihood", "by_moments"]


def by_moments(m: Magnitudes) -> Solution:
    """Match Weibull magnitudes.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    return by_ratio(m, "c", lambda c, r: math.exp(gammaln(1 + r / c)), 0.05, 200.0)


def by_likelihood(m: Magnitudes) -> Solution:
    """Solve the profile equation E[xᶜ ln x]/E[xᶜ] − 1/c = E[ln x], whose left side rises with c.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)
    # relative to the largest, so that no power overflows
    logs = np.log(m.middle) - math.log(m.max)
    # the exact mean of the elements, not that of the cells' middles
    mean_log = m.mean_log - math.log(m.max)

    def equation(log_c: float) -> float:
        c = math.exp(log_c)
        powers = m.weight * np.exp(c * logs)
        return float(powers @ logs) / float(powers.sum()) - 1 / c - mean_log

    low, high = map(math.log, ENDS)
    flags: tuple[Flag, ...] = ()
    if equation(low) > 0 or equation(high) < 0:
        # no root in the range: the end that is nearer to it
        log_c, flags = (low if equation(low) > 0 else high), (Flag.BOUNDARY,)
    else:
        log_c = brentq(equation, low, high, xtol=1e-12)
    c = math.exp(log_c)
    # scaleᶜ = E[xᶜ] at the best c, in units of the largest
    scale = m.max * m.average(np.exp(c * logs)) ** (1 / c)
    if flags:
        return Solution({"c": c, "scale": scale}, {"c": math.nan, "scale": math.nan}, flags)
    # inverse Fisher information
    root, euler = math.sqrt(m.count), float(np.euler_gamma)
    stderr = {
        "c": c * math.sqrt(6) / math.pi / root,
        "scale": scale / c * math.sqrt(1 + 6 * (1 - euler) ** 2 / math.pi**2) / root,
    }
    return Solution({"c": c, "scale": scale}, stderr)


LAW = Law(
    name="dweibull",
    label="double Weibull",
    magnitude=weibull_min,
    signed=dweibull,
    solvers={"moments": by_moments, "mle": by_likelihood},
    control=True,
    special_cases=("laplace",),
    reasons={"closed": "neither its moments nor its likelihood give the shape in closed form"},
)
