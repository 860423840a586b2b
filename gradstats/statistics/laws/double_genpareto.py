"""Double generalized Pareto: generalized Pareto magnitudes, by moments, by likelihood, by weighted moments.

Signs are SciPy's: ξ = `c` > 0 is a heavy tail. Hosking and Wallis (1987) write k = −ξ.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import genpareto

from gradstats.primitives.arrays import dot
from gradstats.primitives.levels import Levels
from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.laws.intervals import by_intervals
from gradstats.statistics.laws.law import Law
from gradstats.statistics.laws.moments import delta_method, require_spread
from gradstats.statistics.laws.reflected import Reflected
from gradstats.statistics.solution import FitError, Flag, Reason, Solution
from gradstats.statistics.stages import genpareto_by_moments

__all__ = [
    "LAW",
    "best_shapes",
    "by_likelihood",
    "by_moments",
    "by_weighted_moments",
    "double_genpareto",
    "double_genpareto_gen",
]


class double_genpareto_gen(Reflected):
    """Double (reflected) generalized Pareto: f(x) = ½ (1 + c|x|)^(−1−1/c), on |x| < −1/c if c < 0.

    Symmetric; its magnitude is :data:`scipy.stats.genpareto` with the same `c`. c = 0 is the Laplace distribution,
    c = −1 the uniform one on (−1, 1).
    """

    _magnitude = genpareto


double_genpareto = double_genpareto_gen(name="double_genpareto", shapes="c")

_NO_ERRORS = {"c": math.nan, "scale": math.nan}
# products θx of a grid in memory together
_AT_ONCE = 1 << 14


def by_moments(m: Magnitudes) -> Solution:
    """Match mean m and variance v (SIDCo eq. 8 and 9): ξ = ½(1 − m²/v), always below ½.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)

    def rule(mean: float, variance: float) -> dict[str, float]:
        c, scale = genpareto_by_moments(mean, variance)
        return {"c": c, "scale": scale}

    params = rule(m.mean, m.variance)
    unreliable = params["c"] >= 0.25  # from there on the estimate has no variance
    flags = (Flag.MOMENTS,) if unreliable else ()
    c = params["c"]
    if unreliable:
        return Solution(params, _NO_ERRORS, flags)
    # the fourth moment exists for c < ¼
    skewness = 2 * (1 + c) * math.sqrt(1 - 2 * c) / (1 - 3 * c)
    kurtosis = 3 * (1 - 2 * c) * (2 * c * c + c + 3) / ((1 - 3 * c) * (1 - 4 * c))
    return Solution(params, delta_method(rule, skewness, kurtosis, m), flags)


def by_weighted_moments(m: Magnitudes) -> Solution:
    """Match the unbiased sample versions of E[X] and E[X(1−F)] (Hosking and Wallis 1987, eq. 7 and table 2).

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)
    n = m.count
    # mean over a cell's elements of the number of larger ones, n − i for i = 1…n
    larger = n - (m.cumulative - m.weight) - (m.weight + 1) / 2
    first = m.average(m.middle * larger) / (n - 1)
    # α₀ − 2α₁ = E[X(2F − 1)] > 0 of elements that differ; cells' middles may leave less
    gap = m.mean - 2 * first
    if gap <= 0:
        raise FitError(Reason.NO_MOMENTS)
    k = m.mean / gap - 2
    scale = 2 * m.mean * first / gap
    flags = (Flag.PWM,) if -k >= 0.5 else ()
    stderr = dict(_NO_ERRORS)
    # from ξ = ½ on the estimate has no variance
    if -k < 0.5:
        common = n * (1 + 2 * k) * (3 + 2 * k)
        stderr = {
            "c": math.sqrt((1 + k) * (2 + k) ** 2 * (1 + k + 2 * k * k) / common),
            "scale": scale * math.sqrt((7 + 18 * k + 11 * k * k + 2 * k**3) / common),
        }
    return Solution({"c": -k, "scale": scale}, stderr, flags)


def by_likelihood(m: Magnitudes) -> Solution:
    """Maximize the likelihood along its profile in θ = ξ/σ (Grimshaw 1993).

    For a given θ the best shape is the mean of ln(1 + θx), so one dimension is left. As the end of the support nears
    the largest element (ξ < −1) the likelihood grows without bound; the estimate is the local maximum before that. Data
    without one has no estimate, which is common below a few dozen elements.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    # a density at a pile of equal magnitudes would depend on the spacing of the levels
    if isinstance(m, Levels):
        return by_intervals(m)
    require_spread(m)
    # In units of the geometric mean, which exists for any tail; the mean of a heavy one grows with the sample.
    unit = math.exp(m.mean_log)
    x, weight = m.middle / unit, m.weight / m.weight.sum()
    largest = max(m.max / unit, float(x[-1]))
    # of the cells, not of the elements: near θ = 0 the loss is flatter than the difference of the two
    mean = dot(weight, x)
    exponential = math.log(mean) + 1  # the loss at θ = 0

    def shape(theta: float) -> float:
        # the best shape for a θ
        return dot(weight, np.log1p(theta * x))

    def losses_of(
        theta: NDArray[np.float64] | np.float64, c: NDArray[np.float64] | float
    ) -> NDArray[np.float64]:
        # mean negative log-likelihoods at the best shape for each θ
        with np.errstate(divide="ignore", invalid="ignore"):
            curved = np.log(c / theta) + c + 1
        # the limit: c and θ vanish together, where θx is small, however large x is in this unit
        return np.where(np.abs(theta) * mean < 1e-9, exponential, curved)

    def slope(theta: float) -> float:
        # derivative of the loss, which gives its minimum to more digits than the loss does
        # the limit: below, two terms that grow like 1/θ cancel
        if abs(theta) < 1e-6:
            return mean - dot(weight, x**2) / 2 / mean
        inverse = dot(weight, x / (1 + theta * x))
        return inverse / shape(theta) - 1 / theta + inverse

    # from the bound set by the largest element (fine there: the loss is steep) through zero to very heavy tails,
    # whose θ grows like e^ξ: as far as the loss falls, which it does not where θ times the least element is large
    bound, decades = -1 / largest, 4
    # a point of the grid at least lies between; no product θx overflows
    while slope(10 ** (decades - 0.2)) < 0 and 10.0**decades * largest < 1e300:
        decades += 4
    upwards = np.geomspace(1e-4, 10.0**decades, 10 * (4 + decades))
    grid = np.concatenate([bound * (1 - np.geomspace(1e-8, 1, 40)[:-1]), [0.0], upwards])
    shapes = best_shapes(grid, x, weight)
    losses = losses_of(grid, shapes)
    # local minima without the ends of the grid: towards the bound the loss may fall for ever
    inner = np.flatnonzero((losses[1:-1] <= losses[:-2]) & (losses[1:-1] <= losses[2:])) + 1
    # at ξ ≤ −1 the likelihood only rises towards the bound, so a dip there is no estimate
    inner = inner[shapes[inner] > -1]
    if not inner.size:
        raise FitError(Reason.NO_MAXIMUM)
    best = inner[np.argmin(losses[inner])]
    low, high = float(grid[best - 1]), float(grid[best + 1])
    if slope(low) < 0 < slope(high):
        theta = float(brentq(slope, low, high, xtol=1e-15, rtol=1e-14))
    else:  # there is more than one minimum between neighbours of the grid
        minimum = minimize_scalar(
            lambda theta: float(losses_of(np.float64(theta), shape(theta))),
            bounds=(low, high),
            method="bounded",
            options={"xatol": 1e-9 * (high - low)},
        )
        theta = float(minimum.x)
    c = shape(theta)
    # c/θ tends to the mean as θ vanishes
    scale = c / theta * unit if abs(theta) > 1e-12 else m.mean
    # the Fisher information, whose inverse the errors below are, exists for ξ > −½ only
    if c <= -0.5:
        return Solution({"c": c, "scale": scale}, _NO_ERRORS, (Flag.IRREGULAR,))
    stderr = {
        "c": (1 + c) / math.sqrt(m.count),
        "scale": scale * math.sqrt(2 * (1 + c) / m.count),
    }
    return Solution({"c": c, "scale": scale}, stderr)


def best_shapes(
    theta: NDArray[np.float64], x: NDArray[np.float64], weight: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the shape of the largest likelihood for each θ = ξ/σ: the mean of ln(1 + θx).

    Parameters
    ----------
    theta : ndarray of float64, shape (n,)
        Values of θ.
    x : ndarray of float64, shape (cells,)
        Magnitudes.
    weight : ndarray of float64, shape (cells,)
        Share of each, of sum 1.
    """
    # of few magnitudes all θ at once, as NumPy takes longer for a call than for them; of many a few θ, whose
    # products stay in the cache
    rows = max(_AT_ONCE // x.size, 1)
    some = (theta[i : i + rows] for i in range(0, theta.size, rows))
    return np.concatenate([np.einsum("ij,j", np.log1p(np.outer(t, x)), weight) for t in some])


LAW = Law(
    name="double_genpareto",
    label="double gen. Pareto",
    magnitude=genpareto,
    signed=double_genpareto,
    solvers={
        "closed": by_moments,
        "moments": by_moments,
        "mle": by_likelihood,
        "pwm": by_weighted_moments,
    },
    special_cases=("laplace",),
    excess="double_genpareto",
    symbols={"c": "ξ"},
)
