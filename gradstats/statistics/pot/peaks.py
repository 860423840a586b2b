"""Thresholds at exceedance ratios, and how the mean and the fit of the excesses change with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.levels import Levels, levels_beyond
from gradstats.primitives.ratio import check_ratios, target_count
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Fit, as_magnitudes, fit
from gradstats.statistics.laws import LAWS
from gradstats.statistics.laws.law import Method
from gradstats.statistics.pot.profile import likelihood_region
from gradstats.statistics.solution import Z95, FitError, Flag, Reason
from gradstats.tables import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "FEWEST",
    "MODEL",
    "NAN",
    "MeanExcess",
    "Stability",
    "covariance",
    "disagreement",
    "finite_of",
    "magnitudes_of",
    "mean_excess",
    "parameter_stability",
    "stability_at",
    "stability_of",
    "threshold_of",
]

FEWEST = 100
"""Excesses below which no threshold is proposed, because the standard error of the shape is 0.1 and more."""

MODEL = "double_genpareto"
NAN = math.nan
_COUNTED, _OFF = 10, 1.25
"""Elements that make a counted quantile, and the factor from which on a modelled one differs from it."""
_SMALLEST, _LARGEST = 1e-140, 1e140
"""Largest magnitudes between which squares and their sums are ordinary numbers."""


def magnitudes_of(x: Array | Sketch | Magnitudes) -> Magnitudes:
    """Return the magnitudes of an array or a sketch after checking that there are some and that their squares exist.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.

    Raises
    ------
    FitError
        If there is no finite non-zero element.
    InputError
        If squares leave the range of numbers.
    """
    m = as_magnitudes(x)
    if m.count == 0:
        raise FitError(Reason.EMPTY)
    if not _SMALLEST < m.max < _LARGEST:
        raise InputError(
            f"magnitudes up to {m.max:.3g}: their squares leave the range of numbers; rescale them"
        )
    return m


def finite_of(m: Magnitudes) -> int:
    """Return the number of finite elements, with zeros.

    Parameters
    ----------
    m : Magnitudes
        Magnitudes of a gradient.
    """
    return round(m.count / (1 - m.zero_fraction))


def threshold_of(m: Magnitudes, k: int) -> float:
    """Return a threshold that the k largest magnitudes exceed; 0 if those are all.

    Between known values it lies half way to the next larger one. Any place there leaves the same exceedances; for
    rounded data (bfloat16, middles of cells) this is where rounding up began, so that excesses start at zero.

    Parameters
    ----------
    m : Magnitudes
        Magnitudes of a gradient.
    k : int
        Number of exceedances wanted.
    """
    if k >= m.count:
        return 0.0
    if isinstance(m, Levels):
        return m.border(k)
    # the largest magnitude that is not to exceed the threshold
    value = m.upper_quantile(k + 1)
    i = int(np.searchsorted(m.right, value, side="right"))
    # the first cell beyond it, unless the value lies inside a cell
    if i < m.left.size and m.left[i] > value:
        value = value + (float(m.left[i]) - value) / 2
    return value


def _ratios(m: Magnitudes, ratios: Sequence[float] | None) -> list[float]:
    """Return the ratios asked for, or twenty from one half to a hundred exceedances."""
    if ratios is not None:
        return check_ratios(ratios)
    least = FEWEST / m.count
    return [float(r) for r in np.geomspace(0.5, least, 20)] if least < 0.5 else [0.5]


@dataclass(frozen=True, slots=True)
class MeanExcess:
    """Mean excess over one threshold.

    Attributes
    ----------
    ratio : float
        Share of the non-zero elements asked to exceed the threshold.
    threshold : float
        Threshold u, in the gradient's unit.
    n : int
        Number of elements beyond it.
    mean : float
        Mean of |g| − u over them, in the gradient's unit; NaN for none.
    low, high : float
        Its 95 % normal interval; NaN for fewer than two elements.
    """

    ratio: float
    threshold: float
    n: int
    mean: float
    low: float
    high: float


def mean_excess(
    x: Array | Sketch | Magnitudes, ratios: Sequence[float] | None = None
) -> list[MeanExcess]:
    """Return the mean excess over a series of thresholds: the mean residual life plot.

    For generalized Pareto excesses it is a line of slope ξ/(1 − ξ): constant for Laplace gradients, rising for heavy
    tails (Davison and Smith 1990). For ξ ≥ ½ the variance is infinite and the intervals are too short; at ξ = 0.4 with
    200 excesses 89 % cover, and all that miss are too low.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.
    ratios : sequence of float, optional
        Exceedance ratios of the non-zero elements, in (0, 1]; by default 20 from 0.5 to 100 exceedances, evenly in the
        logarithm.

    Returns
    -------
    list of MeanExcess
        One per ratio.

    Raises
    ------
    FitError
        If there is no finite non-zero element.
    InputError
        If a ratio is outside (0, 1].
    """
    m = magnitudes_of(x)
    rows = []
    for ratio in _ratios(m, ratios):
        k = target_count(ratio, m.count)
        piled = levels_beyond(m, k) or m
        threshold = threshold_of(piled, k)
        over = piled.excesses(threshold)
        n, half = over.count, NAN
        # a population variance over n − 1 is the variance of the mean
        if n > 1:
            half = Z95 * math.sqrt(over.variance / (n - 1))
        rows.append(MeanExcess(ratio, threshold, n, over.mean, over.mean - half, over.mean + half))
    return rows


@dataclass(frozen=True, slots=True)
class Stability:
    """A generalized Pareto fit of the excesses over one threshold.

    Attributes
    ----------
    ratio : float
        Share of the non-zero elements asked to exceed the threshold.
    threshold : float
        Threshold u, in the gradient's unit.
    n : int
        Number of elements beyond it.
    c, c_low, c_high : float
        Shape ξ and its 95 % interval: by profile likelihood of a likelihood fit, else a normal one.
    scale, scale_low, scale_high : float
        Modified scale σ* = σ − ξu in the gradient's unit, and its 95 % interval, likewise.
    flags : tuple of str
        Warnings about the fit.
    status : str
        Why there is no fit and the numbers are NaN; empty if there is one.
    p_exponential : float
        p-value of ξ = 0, an exponential tail, by the likelihood ratio; NaN for other methods than maximum likelihood.
    """

    ratio: float
    threshold: float
    n: int
    c: float = NAN
    c_low: float = NAN
    c_high: float = NAN
    scale: float = NAN
    scale_low: float = NAN
    scale_high: float = NAN
    flags: tuple[str, ...] = ()
    status: str = ""
    p_exponential: float = NAN


class Pot(list[Stability], Shown):
    """Fits over a series of thresholds: a list that shows itself as a table.

    Parameters
    ----------
    fits : iterable of Stability
        The fits.
    sample : Magnitudes
        What they were fitted to.
    """

    def __init__(self, fits: Iterable[Stability], sample: Magnitudes) -> None:
        super().__init__(fits)
        self.sample = sample

    __repr__ = Shown.__repr__

    def _rows(self) -> list[dict[str, Any]]:
        """Return a record of each threshold."""
        return [asdict(one) for one in self]

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the shape over the thresholds: :func:`gradstats.plots.parameter_stability`.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; new ones by default.
        **options : object
            Options of the figure, such as ``title``.

        Returns
        -------
        matplotlib.axes.Axes
            The axes.
        """
        return self._draw("parameter_stability", self.sample, ax=ax, **options)


def parameter_stability(
    x: Array | Sketch | Magnitudes, ratios: Sequence[float] | None = None, method: Method = "mle"
) -> Pot:
    """Fit the excesses over a series of thresholds.

    Above a threshold from which the excesses are generalized Pareto, ξ and σ* = σ − ξu stay the same (Coles 2001,
    section 4.3.4). The fits share their largest elements, so neighbouring intervals are not independent.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.
    ratios : sequence of float, optional
        Exceedance ratios of the non-zero elements, in (0, 1]; by default those of :func:`mean_excess`.
    method : {"closed", "moments", "mle", "pwm"}
        Method of every fit, see :func:`gradstats.fit`. Intervals are NaN where an estimate has none.

    Returns
    -------
    Pot
        A list of one :class:`Stability` per ratio; a threshold without a fit has NaN and a status.

    Raises
    ------
    FitError
        If there is no finite non-zero element.
    InputError
        If a ratio is outside (0, 1] or the method is unknown.
    """
    m = magnitudes_of(x)
    return Pot([stability_at(m, ratio, method) for ratio in _ratios(m, ratios)], m)


def stability_at(
    m: Magnitudes, ratio: float, method: Method, fewest: int = 0, levels: bool = True
) -> Stability:
    """Fit the excesses over one threshold; without a fit, return NaN and a status.

    Parameters
    ----------
    m : Magnitudes
        Magnitudes of a gradient.
    ratio : float
        Share of them asked to exceed the threshold, in (0, 1].
    method : {"closed", "moments", "mle", "pwm"}
        Method of the fit, see :func:`gradstats.fit`.
    fewest : int
        Number of exceedances below which nothing is fitted.
    levels : bool
        Whether to look for levels that magnitudes pile up on.
    """
    k = target_count(ratio, m.count)
    m = (levels_beyond(m, k) if levels else None) or m
    threshold = threshold_of(m, k)
    return stability_of(m, ratio, threshold, method, fewest)


def stability_of(
    m: Magnitudes, ratio: float, threshold: float, method: Method, fewest: int = 0
) -> Stability:
    """Fit the excesses over a given threshold; without a fit, return NaN and a status.

    Parameters
    ----------
    m : Magnitudes
        Magnitudes of a gradient.
    ratio : float
        Share of them that the threshold stands for, which is passed on.
    threshold : float
        Threshold u, in the gradient's unit.
    method : {"closed", "moments", "mle", "pwm"}
        Method of the fit, see :func:`gradstats.fit`.
    fewest : int
        Number of exceedances below which nothing is fitted.
    """
    over = m.excesses(threshold)
    if m.count and not over.count:
        return Stability(ratio, threshold, 0, status=Reason.TIED)
    if 0 < over.count < fewest:
        return Stability(ratio, threshold, over.count, status=f"fewer than {fewest} exceedances")
    try:
        fitted = fit(over, MODEL, method)
    except FitError as error:
        return Stability(ratio, threshold, over.count, status=str(error))
    c, scale = fitted.params["c"], fitted.params["scale"]
    modified = scale - c * threshold
    if method == "mle" and not math.isnan(fitted.stderr["c"]):
        shapes, scales = likelihood_region(over, fitted)
        c_low, c_high = float(shapes.min()), float(shapes.max())
        # the profile interval of a function is its range over the region
        on_border = scales - shapes * threshold
        low, high = float(on_border.min()), float(on_border.max())
    else:
        c_low, c_high = fitted.interval("c")
        # of σ − ξu in (ξ, σ)
        slopes = np.array([-threshold, 1.0])
        half = Z95 * math.sqrt(float(slopes @ covariance(fitted) @ slopes))
        low, high = modified - half, modified + half
    ends = c_low, c_high, modified, low, high
    p = NAN
    # χ² needs a regular estimate
    if method == "mle" and c > -0.5:
        from scipy.special import chdtrc

        from gradstats.statistics.laws.intervals import exponential_gain

        # twice what a shape gains over an exponential of the same mean
        if isinstance(over, Levels):
            gain = exponential_gain(over, c, scale)
        else:
            gain = 2 * over.count * (math.log(over.mean / scale) - c)
        p = float(chdtrc(1, max(gain, 0.0)))
    flags = tuple(map(str, fitted.flags + disagreement(over, fitted, threshold)))
    return Stability(ratio, threshold, over.count, c, *ends, flags=flags, p_exponential=p)


def disagreement(over: Magnitudes, fitted: Fit, threshold: float) -> tuple[Flag, ...]:
    """Return the flag of a fit whose quantile far out is not the one counted there.

    The magnitude that one in a hundred excesses reaches, or ten where they are fewer than a thousand, is compared.

    Parameters
    ----------
    over : Magnitudes
        Excesses that were fitted.
    fitted : Fit
        Their fit.
    threshold : float
        Threshold u that they exceed.
    """
    k = max(over.count // 100, _COUNTED)
    # a clipped value counts as anything from there on, so no quantile beyond it is counted
    if over.count < 10 * _COUNTED or (isinstance(over, Levels) and over.bounded):
        return ()
    # not frozen, for which SciPy takes a millisecond
    law = LAWS[fitted.model].magnitude
    modelled = threshold + float(law.isf(k / over.count, **fitted.params))
    i = min(int(np.searchsorted(over.cumulative, over.count - k, side="right")), over.left.size - 1)
    # inside its cell a counted quantile may lie anywhere
    low, high = threshold + float(over.left[i]), threshold + float(over.right[i])
    off = max(modelled / high, low / modelled) if modelled > 0 else math.inf
    return (Flag.COUNTED,) if off > _OFF else ()


def covariance(fitted: Fit) -> NDArray[np.float64]:
    """Return the asymptotic covariance of (ξ, σ) from the standard errors of a fit and the correlation in theory.

    Source: Hosking and Wallis (1987), sections 3 and 4, in k = −ξ, so that their correlation changes its sign.

    Parameters
    ----------
    fitted : Fit
        Generalized Pareto fit.

    Returns
    -------
    ndarray of float64, shape (2, 2)
        Covariance; NaN where the fit has no standard errors.
    """
    k = -fitted.params["c"]
    a, b = fitted.stderr["c"], fitted.stderr["scale"]
    if math.isnan(a) or math.isnan(b):
        return np.full((2, 2), NAN)
    # by likelihood, the inverse Fisher information: variances (1 − k)²/n and 2σ²(1 − k)/n, covariance σ(1 − k)/n
    if fitted.method == "mle":
        correlation = 1 / math.sqrt(2 * (1 - k))
    elif fitted.method == "pwm":
        # the variances of by_weighted_moments, without their common factor
        shape = (1 + k) * (2 + k) ** 2 * (1 + k + 2 * k * k)
        scale = 7 + 18 * k + 11 * k * k + 2 * k**3
        correlation = (2 + k) * (2 + 6 * k + 7 * k * k + 2 * k**3) / math.sqrt(shape * scale)
    else:
        both = 2 * (1 + 6 * k + 12 * k * k) * (1 + k + 6 * k * k)
        correlation = (1 + 4 * k + 12 * k * k) / math.sqrt(both)
    mixed = -correlation * a * b
    return np.array([[a * a, mixed], [mixed, b * b]])
