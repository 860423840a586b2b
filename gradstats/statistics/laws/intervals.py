"""The generalized Pareto of magnitudes that are known by intervals: the likelihood of the intervals' probabilities.

The density at a level would be that of a pile, whose height depends on the spacing of the levels; the probability of
the interval around it does not (Heitjan 1989, on grouped data). A largest level that stands for all beyond it counts as
censored.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.levels import Levels
from gradstats.statistics.solution import FitError, Flag, Reason, Solution

__all__ = ["by_intervals", "exponential_gain", "interval_region"]

_LARGEST_SHAPE = 49.0
"""Where the likelihood still grows with the shape here, it has no maximum."""
# of the differences, in ξ and in ln σ
_STEP = 1e-3
_RAYS = 40
"""Directions in which the border of a region is sought."""
_HALVINGS = 12
"""Halvings of a ray: to a four-thousandth of its length."""


class _Grid(NamedTuple):
    """Intervals as the likelihood reads them: looked at once, for the thousand times that it is computed."""

    left: NDArray[np.float64]
    right: NDArray[np.float64]
    edges: NDArray[np.float64] | None
    """All borders, where each interval ends where the next begins."""
    share: NDArray[np.float64]
    bounded: bool
    unit: float

    @classmethod
    def of(cls, m: Levels) -> Self:
        """Return the intervals of a sample, in units of its mean."""
        # a border that two intervals share needs one evaluation, not two
        adjacent = np.array_equal(m.left[1:], m.right[:-1])
        edges = np.append(m.left, m.right[-1]) / m.mean if adjacent else None
        return cls(m.left / m.mean, m.right / m.mean, edges, m.weight / m.count, m.bounded, m.mean)


def _loss(
    c: NDArray[np.float64], log_scale: NDArray[np.float64], grid: _Grid
) -> NDArray[np.float64]:
    """Return the mean negative log-likelihood for each pair of shape and logarithm of the scale, in the grid's unit."""
    c, scale = c[..., None], np.exp(log_scale)[..., None]
    # there ln(1 + cz)/c is its limit z; np.where computes both, hence a shape of 1 to divide by
    small = np.abs(c) < 1e-8
    shape = np.where(small, 1.0, c)

    def hazard(x: NDArray[np.float64]) -> NDArray[np.float64]:
        z = x / scale
        # clipped at the end of the support and beyond: ln 0 over a negative shape is an infinite hazard
        curved = np.log1p(np.maximum(c * z, -1.0)) / shape
        return np.where(small, z, curved) if small.any() else curved

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if grid.edges is not None:
            edges = hazard(grid.edges)
            low, high = edges[..., :-1], edges[..., 1:]
        else:
            low, high = hazard(grid.left), hazard(grid.right)
        if grid.bounded:
            # Censored: the last interval has no upper end. `low` and `high` are views of one array,
            # but its last column is in `high` alone.
            high[..., -1] = math.inf
        # ln(S(left) − S(right)) with S = exp(−hazard), without subtracting nearly equal numbers
        inside = np.log(-np.expm1(low - high)) - low
    # ∞ − ∞: both borders lie beyond the support
    inside[np.isnan(inside)] = -math.inf
    return np.asarray(-(inside @ grid.share))


def _minimum(grid: _Grid) -> tuple[float, float, float]:
    """Return shape, logarithm of the scale, and the least loss."""
    from scipy.optimize import minimize

    def at(point: NDArray[np.float64]) -> float:
        value = (
            float(_loss(point[:1], point[1:], grid)[0])
            if -1 <= point[0] < _LARGEST_SHAPE + 1
            else math.inf
        )
        # finite, because the search judges its end by differences of losses, and ∞ − ∞ is NaN
        return min(value, 1e300)

    middle = math.log(
        grid.right[np.searchsorted(np.cumsum(grid.share), 0.5)]
    )  # far below a mean of one huge element
    # shapes on either side of 0 at the mean, and one of a very heavy tail at the median
    starts = [*(np.array([c, 0.0]) for c in (-0.2, 0.0, 0.5)), np.array([5.0, middle])]
    best = min(starts, key=at)
    for _ in range(2):  # begun again where it ended, the search leaves a simplex that has collapsed
        minimum = minimize(
            at,
            best,
            method="Nelder-Mead",
            callback=_end_without_maximum,
            options={"xatol": 1e-7, "fatol": 1e-12},
        )
        best = minimum.x
    return float(best[0]), float(best[1]), float(minimum.fun)


def _end_without_maximum(xk: NDArray[np.float64]) -> None:
    if xk[0] >= _LARGEST_SHAPE:
        # SciPy takes this from a callback for the end of the search, and returns the best point so far
        raise StopIteration


def _information(grid: _Grid, c: float, log_scale: float) -> NDArray[np.float64]:
    """Return the second derivatives of the mean loss in (ξ, ln σ), by differences."""
    h = _STEP
    shifts = np.array([[i, j] for i in (-h, 0, h) for j in (-h, 0, h)])
    f = _loss(c + shifts[:, 0], log_scale + shifts[:, 1], grid).reshape(3, 3)
    with np.errstate(invalid="ignore"):  # beyond the support; not finite then, which is looked at
        return _curvature(f, h)


def _curvature(f: NDArray[np.float64], h: float) -> NDArray[np.float64]:
    cc, ss = (f[2, 1] - 2 * f[1, 1] + f[0, 1]) / h**2, (f[1, 2] - 2 * f[1, 1] + f[1, 0]) / h**2
    cs = (f[2, 2] - f[2, 0] - f[0, 2] + f[0, 0]) / (4 * h**2)
    return np.array([[cc, cs], [cs, ss]])


def by_intervals(m: Levels) -> Solution:
    """Maximize the likelihood of the intervals.

    Parameters
    ----------
    m : Levels
        Sample, of three levels or more: two leave one share, and that has no shape.
    """
    if m.count < 2:
        raise FitError(Reason.TOO_FEW)
    if m.weight.size < 2:
        raise FitError(Reason.CONSTANT)
    if m.weight.size < 3:
        raise FitError(Reason.LEVELS)
    grid = _Grid.of(m)
    c, log_scale, _ = _minimum(grid)
    # the search ran into an end of the shapes allowed
    if not -0.999 < c < _LARGEST_SHAPE:
        raise FitError(Reason.NO_MAXIMUM)
    scale = grid.unit * math.exp(log_scale)
    flags = (Flag.LEVELS, *((Flag.BOUNDED,) if m.bounded else ()))
    nan = {"c": math.nan, "scale": math.nan}
    if c <= -0.5:
        return Solution({"c": c, "scale": scale}, nan, (*flags, Flag.IRREGULAR))
    information = _information(grid, c, log_scale)
    # at the edge of the support a difference may reach outside, and a flat loss has no inverse
    if not np.isfinite(information).all() or np.linalg.eigvalsh(information)[0] <= 0:
        return Solution({"c": c, "scale": scale}, nan, flags)
    variance = np.diag(np.linalg.inv(information)) / m.count
    # the second error is that of ln σ, so relative
    stderr = {"c": math.sqrt(variance[0]), "scale": scale * math.sqrt(variance[1])}
    return Solution({"c": c, "scale": scale}, stderr, flags)


def interval_region(
    m: Levels, c: float, scale: float, level: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the border of the shapes and scales whose likelihood is close enough to the largest one.

    Parameters
    ----------
    m : Levels
        Sample that was fitted.
    c, scale : float
        Its fit, with standard errors.
    level : float
        Probability that the interval of one function holds the truth.

    Returns
    -------
    c : ndarray of float64
        Shapes on the border.
    scale : ndarray of float64
        Scales beside them.
    """
    from scipy.special import chdtri

    grid, log_scale = _Grid.of(m), math.log(scale / m.mean)
    # half of the χ² quantile, for a loss that is a mean over the elements
    room = float(chdtri(1, 1 - level)) / 2 / m.count
    # With H = LLᵀ the quadratic approximation ½ δᵀHδ = room has the border δ = L⁻ᵀu √(2·room), |u| = 1:
    # rays of length 1 end where the true border should be.
    root = np.linalg.inv(np.linalg.cholesky(_information(grid, c, log_scale)).T)
    angle = np.linspace(0, 2 * math.pi, _RAYS, endpoint=False)
    rays = root @ np.array([np.cos(angle), np.sin(angle)]) * math.sqrt(2 * room)
    limit = float(_loss(np.array([c]), np.array([log_scale]), grid)[0]) + room

    def above(length: NDArray[np.float64]) -> NDArray[np.bool_]:
        points = c + length * rays[0], log_scale + length * rays[1]
        # negated, so that a loss of NaN lies outside
        return np.asarray(~(_loss(*points, grid) <= limit) | (points[0] <= -1))

    inside, outside = np.zeros(_RAYS), np.ones(_RAYS)
    # doubles each ray until it ends outside, or is 256 times as long as expected
    for _ in range(8):
        near = ~above(outside)
        if not near.any():
            break
        inside, outside = np.where(near, outside, inside), np.where(near, 2 * outside, outside)
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        beyond = above(middle)
        inside, outside = np.where(beyond, inside, middle), np.where(beyond, middle, outside)
    return c + inside * rays[0], grid.unit * np.exp(log_scale + inside * rays[1])


def exponential_gain(m: Levels, c: float, scale: float) -> float:
    """Return twice what a shape gains in likelihood over an exponential, over all magnitudes.

    Parameters
    ----------
    m : Levels
        Sample that was fitted.
    c, scale : float
        Its fit.
    """
    from scipy.optimize import minimize_scalar

    grid, zero = _Grid.of(m), np.zeros(1)
    # in units of the mean, which is about the exponential's scale
    minimum = minimize_scalar(
        lambda s: float(_loss(zero, np.array([s]), grid)[0]), bounds=(-5, 5), method="bounded"
    )
    loss = float(_loss(np.array([c]), np.array([math.log(scale / m.mean)]), grid)[0])
    return 2 * m.count * (float(minimum.fun) - loss)
