"""Double gamma: gamma magnitudes."""

from __future__ import annotations

import math

from scipy.special import digamma, polygamma
from scipy.stats import dgamma, gamma

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.laws.law import Law
from gradstats.statistics.laws.moments import delta_method, require_spread
from gradstats.statistics.solution import FitError, Reason, Solution
from gradstats.statistics.stages import gamma_shape

__all__ = ["LAW", "by_likelihood", "by_moments", "closed"]


def closed(m: Magnitudes) -> Solution:
    """Approximate the maximum-likelihood shape within 1.5 % (SIDCo eq. 16 and 27).

    The standard errors contain the distance from maximum likelihood, which from some ten thousand elements on is most
    of the error.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    near, best = (_solution(m, a) for a in (_closed_shape(m), _likelihood_shape(m)))
    stderr = {
        name: math.hypot(error, near.params[name] - best.params[name])
        for name, error in near.stderr.items()
    }
    return Solution(near.params, stderr)


def by_moments(m: Magnitudes) -> Solution:
    """Match gamma magnitudes: a = mean²/variance.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)

    def rule(mean: float, variance: float) -> dict[str, float]:
        return {"a": mean**2 / variance, "scale": variance / mean}

    params = rule(m.mean, m.variance)
    a = params["a"]
    return Solution(params, delta_method(rule, 2 / math.sqrt(a), 3 + 6 / a, m))


def by_likelihood(m: Magnitudes) -> Solution:
    """Solve ln a − ψ(a) = ln mean − mean log by Newton's method from the closed form (Minka 2002).

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    return _solution(m, _likelihood_shape(m))


def _likelihood_shape(m: Magnitudes) -> float:
    """Return the maximum-likelihood shape of gamma magnitudes."""
    a = _closed_shape(m)
    s = math.log(m.mean) - m.mean_log
    # a start within 1.5 % takes two to four steps; the bound is for s that rounding has spoilt
    for _ in range(20):
        # a generalized Newton step, which fits a line in 1/a and never leaves the positive axis
        step = (math.log(a) - digamma(a) - s) / (a * a * (1 / a - polygamma(1, a)))
        before, a = a, 1 / (1 / a + step)
        if abs(a - before) <= 1e-13 * a:
            break
    return float(a)


def _closed_shape(m: Magnitudes) -> float:
    """Return SIDCo's closed form, or raise :class:`FitError` where there is no shape."""
    if m.count < 2:
        raise FitError(Reason.TOO_FEW)
    a = gamma_shape(m.mean, m.mean_log)
    # s = ln mean − mean log vanishes only where all magnitudes are equal
    if math.isinf(a):
        raise FitError(Reason.CONSTANT)
    return a


def _solution(m: Magnitudes, a: float) -> Solution:
    """Return the solution with a shape: scale, and standard errors from the Fisher information."""
    scale = m.mean / a
    trigamma = float(polygamma(1, a))
    # inverse of the Fisher information n[[ψ′(a), 1/scale], [1/scale, a/scale²]]
    information = m.count * (a * trigamma - 1)
    stderr = {
        "a": math.sqrt(a / information),
        "scale": scale * math.sqrt(trigamma / information),
    }
    return Solution({"a": a, "scale": scale}, stderr)


LAW = Law(
    name="dgamma",
    label="double gamma",
    magnitude=gamma,
    signed=dgamma,
    solvers={"closed": closed, "moments": by_moments, "mle": by_likelihood},
    special_cases=("laplace",),
    excess="double_genpareto",
)
