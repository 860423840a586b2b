"""Maximum likelihood of the models with location zero, on magnitudes; a search is in one dimension at most."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import digamma, gammaln, polygamma

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.solution import FitError, Flag, Reason, Solution
from gradstats.statistics.solvers.moments import require_spread
from gradstats.statistics.stages import gamma_shape

__all__ = ["dgamma", "dgamma_closed", "dweibull", "gennorm", "laplace", "lognorm", "norm", "t"]

_ENDS = (0.05, 200.0)
"""Range of shapes searched by `gennorm` and `dweibull`: beyond it a distribution is a spike, or uniform."""


def laplace(m: Magnitudes) -> Solution:
    """Take the mean magnitude (SIDCo eq. 5), which is the exact estimate of every method.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    return Solution({"scale": m.mean}, {"scale": m.mean / math.sqrt(m.count)})


def norm(m: Magnitudes) -> Solution:
    """Take the root mean square.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    scale = math.sqrt(m.mean_square)
    return Solution({"scale": scale}, {"scale": scale / math.sqrt(2 * m.count)})


def lognorm(m: Magnitudes) -> Solution:
    """Take mean and standard deviation of the logarithms.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)
    s = math.sqrt(m.average((np.log(m.middle) - m.mean_log) ** 2))
    scale = math.exp(m.mean_log)
    root = math.sqrt(m.count)
    return Solution(
        {"s": s, "scale": scale}, {"s": s / root / math.sqrt(2), "scale": scale * s / root}
    )


def dgamma_closed(m: Magnitudes) -> Solution:
    """Approximate the maximum-likelihood shape within 1.5 % (SIDCo eq. 16 and 27).

    The standard errors contain the distance from maximum likelihood, which from some ten thousand elements on is most
    of the error.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    near, best = (_dgamma(m, a) for a in (_closed_shape(m), _likelihood_shape(m)))
    stderr = {
        name: math.hypot(error, near.params[name] - best.params[name])
        for name, error in near.stderr.items()
    }
    return Solution(near.params, stderr)


def dgamma(m: Magnitudes) -> Solution:
    """Solve ln a − ψ(a) = ln mean − mean log by Newton's method from the closed form (Minka 2002).

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    return _dgamma(m, _likelihood_shape(m))


def _likelihood_shape(m: Magnitudes) -> float:
    """Return the maximum-likelihood shape of gamma magnitudes."""
    a = _closed_shape(m)
    s = math.log(m.mean) - m.mean_log
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
    if math.isinf(a):
        raise FitError(Reason.CONSTANT)
    return a


def _dgamma(m: Magnitudes, a: float) -> Solution:
    """Return the solution with a shape: scale, and standard errors from the Fisher information."""
    scale = m.mean / a
    trigamma = float(polygamma(1, a))
    information = m.count * (a * trigamma - 1)
    stderr = {
        "a": math.sqrt(a / information),
        "scale": scale * math.sqrt(trigamma / information),
    }
    return Solution({"a": a, "scale": scale}, stderr)


def dweibull(m: Magnitudes) -> Solution:
    """Solve the profile equation E[xᶜ ln x]/E[xᶜ] − 1/c = E[ln x], whose left side rises with c.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)
    # relative to the largest, so that no power overflows
    logs = np.log(m.middle) - math.log(m.max)
    mean_log = m.mean_log - math.log(m.max)

    def equation(log_c: float) -> float:
        c = math.exp(log_c)
        powers = m.weight * np.exp(c * logs)
        return float(powers @ logs) / float(powers.sum()) - 1 / c - mean_log

    low, high = map(math.log, _ENDS)
    flags: tuple[Flag, ...] = ()
    if equation(low) > 0 or equation(high) < 0:
        log_c, flags = (low if equation(low) > 0 else high), (Flag.BOUNDARY,)
    else:
        log_c = brentq(equation, low, high, xtol=1e-12)
    c = math.exp(log_c)
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


def gennorm(m: Magnitudes) -> Solution:
    """Maximize the profile in β; for a given β, scaleᵝ = β E[xᵝ].

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)
    logs = np.log(m.middle) - math.log(m.max)

    def log_scale(beta: float) -> float:
        return math.log(m.max) + math.log(beta * m.average(np.exp(beta * logs))) / beta

    def loss(log_beta: float) -> float:
        beta = math.exp(log_beta)
        return log_scale(beta) - log_beta + float(gammaln(1 / beta)) + 1 / beta

    log_beta, flags = _search(loss, *_ENDS)
    beta = math.exp(log_beta)

    def full(log_shape: float, log_size: float) -> float:
        b = math.exp(log_shape)
        power = m.average(np.exp(b * (logs + math.log(m.max) - log_size)))
        return log_size - log_shape + float(gammaln(1 / b)) + power

    return _with_errors(m, "beta", log_beta, log_scale(beta), full, flags)


def t(m: Magnitudes) -> Solution:
    """Maximize the profile in df; for a given df the scale solves a monotone equation.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)
    squares = m.middle**2
    middle = math.log(m.mean_square)

    def log_scale(df: float) -> float:
        # ln σ with E[(df + 1) x² / (df σ² + x²)] = 1
        def equation(log_square: float) -> float:
            return (df + 1) * m.average(squares / (df * math.exp(log_square) + squares)) - 1

        low = middle - 2.0
        while equation(low) < 0:
            low -= 4.0
        return float(brentq(equation, low, middle + 1.0, xtol=1e-10)) / 2

    def full(log_shape: float, log_size: float) -> float:
        df = math.exp(log_shape)
        tails = m.average(np.log1p(squares / (df * math.exp(2 * log_size))))
        constant = gammaln((df + 1) / 2) - gammaln(df / 2) - 0.5 * math.log(df)
        return log_size - float(constant) + (df + 1) / 2 * tails

    def loss(log_df: float) -> float:
        return full(log_df, log_scale(math.exp(log_df)))

    log_df, flags = _search(loss, 0.1, 1e3)
    return _with_errors(m, "df", log_df, log_scale(math.exp(log_df)), full, flags)


def _search(
    loss: Callable[[float], float], low: float, high: float
) -> tuple[float, tuple[Flag, ...]]:
    """Minimize over the logarithm of a shape; return it, with a flag if it is at an end of the range."""
    bounds = math.log(low), math.log(high)
    found = float(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-8}).x)
    at_end = min(found - bounds[0], bounds[1] - found) < 1e-3
    return found, (Flag.BOUNDARY,) if at_end else ()


def _with_errors(
    m: Magnitudes,
    name: str,
    log_shape: float,
    log_size: float,
    loss: Callable[[float, float], float],
    flags: tuple[Flag, ...],
) -> Solution:
    """Return the solution with standard errors from the observed information (central differences of logarithms)."""
    shape, scale = math.exp(log_shape), math.exp(log_size)
    stderr = {name: math.nan, "scale": math.nan}
    if not flags:
        h = 1e-3

        def at(i: int, j: int) -> float:
            return loss(log_shape + i * h, log_size + j * h)

        centre = at(0, 0)
        hessian = np.empty((2, 2))
        hessian[0, 0] = (at(1, 0) - 2 * centre + at(-1, 0)) / h**2
        hessian[1, 1] = (at(0, 1) - 2 * centre + at(0, -1)) / h**2
        hessian[0, 1] = hessian[1, 0] = (at(1, 1) - at(1, -1) - at(-1, 1) + at(-1, -1)) / (4 * h**2)
        if np.linalg.det(hessian) > 0 and hessian[0, 0] > 0:
            errors = np.sqrt(np.diag(np.linalg.inv(hessian)) / m.count)
            stderr = {name: shape * float(errors[0]), "scale": scale * float(errors[1])}
    return Solution({name: shape, "scale": scale}, stderr, flags)
