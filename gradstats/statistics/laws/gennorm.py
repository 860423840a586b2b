"""Generalized normal: half generalized normal magnitudes."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln
from scipy.stats import gennorm, halfgennorm

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.laws.law import Law
from gradstats.statistics.laws.moments import by_ratio, require_spread
from gradstats.statistics.laws.search import ENDS, search, with_errors
from gradstats.statistics.solution import Solution

__all__ = ["LAW", "by_likelihood", "by_moments"]


def by_moments(m: Magnitudes) -> Solution:
    """Match generalized normal magnitudes (Mallat 1989); mean²/mean square is at most ¾, that of a uniform vector.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    return by_ratio(
        m, "beta", lambda b, r: math.exp(gammaln((r + 1) / b) - gammaln(1 / b)), 0.05, 200.0
    )


def by_likelihood(m: Magnitudes) -> Solution:
    """Maximize the profile in β; for a given β, scaleᵝ = β E[xᵝ].

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)
    # relative to the largest, so that no power overflows
    logs = np.log(m.middle) - math.log(m.max)

    def log_scale(beta: float) -> float:
        return math.log(m.max) + math.log(beta * m.average(np.exp(beta * logs))) / beta

    def loss(log_beta: float) -> float:
        beta = math.exp(log_beta)
        # mean negative log-likelihood at the best scale, where E[(x/scale)ᵝ] = 1/β
        return log_scale(beta) - log_beta + float(gammaln(1 / beta)) + 1 / beta

    log_beta, flags = search(loss, *ENDS)
    beta = math.exp(log_beta)

    # the same at any scale: the standard errors need its second derivatives
    def full(log_shape: float, log_size: float) -> float:
        b = math.exp(log_shape)
        power = m.average(np.exp(b * (logs + math.log(m.max) - log_size)))
        return log_size - log_shape + float(gammaln(1 / b)) + power

    return with_errors(m, "beta", log_beta, log_scale(beta), full, flags)


LAW = Law(
    name="gennorm",
    label="gen. normal",
    magnitude=halfgennorm,
    signed=gennorm,
    solvers={"moments": by_moments, "mle": by_likelihood},
    control=True,
    special_cases=("laplace", "norm"),
    reasons={"closed": "neither its moments nor its likelihood give the shape in closed form"},
)
