"""All models fitted to one gradient, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from gradstats.primitives import Array
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Fit, as_magnitudes, fit, fittable
from gradstats.statistics.goodness import Goodness, goodness
from gradstats.statistics.laws import LawName
from gradstats.statistics.laws.choice import chosen, law_of
from gradstats.statistics.solution import FitError
from gradstats.tables import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Fits", "fit_all", "possible"]


class Fits(list[Fit], Shown):
    """Fits of several models to one gradient, the closest first: a list that shows itself as a table.

    Parameters
    ----------
    fits : sequence of (Fit, Goodness)
        Fits and their distances from the sample.
    failed : dict of str
        Models without a fit, and why.
    sample : Magnitudes
        What they were fitted to.

    Attributes
    ----------
    goodness : list of Goodness
        Distances, in the order of the fits.
    """

    def __init__(
        self, fits: Sequence[tuple[Fit, Goodness]], failed: dict[str, str], sample: Magnitudes
    ) -> None:
        ordered = sorted(fits, key=_distance)
        super().__init__(each for each, _ in ordered)
        self.goodness = [each for _, each in ordered]
        self.failed, self.sample = failed, sample

    _caption = (
        "Laws fitted to one gradient, the nearest first; 95 % intervals, of independent elements"
    )
    __repr__ = Shown.__repr__

    def _rows(self) -> list[dict[str, Any]]:
        """Return a record of each model: shape and scale with intervals, distances, AIC above the least, flags."""
        rows = []
        least = min((g.aic for g in self.goodness if not math.isnan(g.aic)), default=math.nan)
        for one, distances in zip(self, self.goodness, strict=True):
            row: dict[str, Any] = {"model": one.model, "method": one.method}
            named = {"scale": "scale"} | {
                n: "shape" for n in one.params if n not in ("loc", "scale")
            }
            for name in ("shape", "scale"):
                parameter = next((n for n, what in named.items() if what == name), None)
                ends = (math.nan,) * 2 if parameter is None else one.interval(parameter)
                value = math.nan if parameter is None else one.params[parameter]
                row |= {name: value, f"{name}_low": ends[0], f"{name}_high": ends[1]}
            row |= {"ks": distances.ks, "tail_error": distances.tail_error}
            row |= {"delta_aic": distances.aic - least}
            rows.append(row | {"flags": tuple(map(str, one.flags))})
        # the columns of the others, so that the table has one header
        empty = dict.fromkeys(rows[0], math.nan) if rows else {"method": ""}
        return rows + [
            empty | {"model": model, "method": "–", "flags": (why,)}
            for model, why in self.failed.items()
        ]

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the tails of the sample and of the models: :func:`gradstats.plots.tail`.

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
        return self._draw("tail", self.sample, list(self), ax=ax, **options)


def _distance(fitted: tuple[Fit, Goodness]) -> tuple[bool, float, float]:
    """Return what fits are ordered by: the error of their thresholds, or, where that is not known, the distance."""
    tail, body = fitted[1].tail_error, fitted[1].ks
    # NaN is always math.nan here, and tuples take an object for equal to itself: `body` then decides
    return math.isnan(tail), tail, body


def fit_all(
    x: Array | Sketch | Magnitudes, models: Sequence[LawName | str] | Literal["all"] | None = None
) -> Fits:
    """Fit several models to a gradient, each by its own default method, and measure how far each is from it.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient of any shape, or its sketch.
    models : sequence of str or "all", optional
        Names of :data:`gradstats.statistics.laws.LAWS`, or ``"all"``; by default those that are no controls.

    Returns
    -------
    Fits
        List of :class:`gradstats.Fit`, by the error of their thresholds (`tail_error`), or, where no ratio leaves the
        ten elements that it takes, by the Kolmogorov distance.

    Raises
    ------
    InputError
        If a model is unknown, or the array is not floating point.
    FitError
        If there is no finite non-zero element.

    Examples
    --------
    >>> import numpy as np
    >>> fits = fit_all(np.random.default_rng(0).laplace(size=5000), ["norm", "laplace"])
    >>> [each.model for each in fits]
    ['laplace', 'norm']
    """
    m = fittable(x)
    fits, failed = possible(m, models)
    return Fits([(one, goodness(one, m)) for one in fits], failed, m)


def possible(
    x: Array | Sketch | Magnitudes, models: Sequence[LawName | str] | Literal["all"] | None = None
) -> tuple[list[Fit], dict[str, str]]:
    """Fit those of several models that can be fitted, each by its own default method.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient of any shape, or its sketch.
    models : sequence of str or "all", optional
        As in :func:`fit_all`.

    Returns
    -------
    fits : list of Fit
        In the order of the models.
    failed : dict of str to str
        Models without a fit, and why.
    """
    m, failed = as_magnitudes(x), {}
    fits = []
    for model in chosen(models):
        try:
            fits.append(fit(m, model, law_of(model).default_method))
        except FitError as error:
            failed[model] = str(error)
    return fits, failed
