"""Fitting a gradient: a point mass at zero and a symmetric distribution for the rest.

Closed forms of SIDCo (Abdelmoniem et al., MLSys 2021), on sums that one pass collects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gradstats.errors import InputError
from gradstats.primitives import Array, Moments, moments
from gradstats.thresholds.stages import gamma_shape

__all__ = ["MODELS", "Fit", "FitError", "fit", "fit_moments"]

Method: TypeAlias = Literal["closed"]


class FitError(InputError):
    """The data has no fit of this model; the message says why."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model of a gradient's elements.

    Attributes
    ----------
    model : name, a key of :data:`gradstats.distributions.DISTRIBUTIONS`.
    params : parameters of `dist` by SciPy's names (shapes, ``loc`` = 0, ``scale`` in the gradient's unit).
    zero_fraction : π₀, weight of the point mass at zero.
    moments : the sums the fit was made from.
    method : how.
    flags : what to mind, such as ``"shape above 1/4: moment estimate unreliable"``.
    """

    model: str
    params: Mapping[str, float]
    zero_fraction: float
    moments: Moments
    method: str
    flags: tuple[str, ...] = ()

    @property
    def dist(self) -> Any:
        """Frozen SciPy distribution of the signed, non-zero elements (``.pdf .sf .isf .ppf``)."""
        from gradstats.distributions import DISTRIBUTIONS

        return DISTRIBUTIONS[self.model](**self.params)

    @property
    def n_params(self) -> int:
        """Number of estimated parameters, π₀ included where there are zeros."""
        return len(self.params) - 1 + (self.zero_fraction > 0)

    def threshold(self, ratio: float) -> float:
        """Return the magnitude that the model exceeds with probability `ratio`.

        The zeros take none of it: the quantile of the non-zero part at δ/(1−π₀), 0 if that is 1 or more.
        """
        conditional = ratio / (1 - self.zero_fraction)
        return float(self.dist.isf(conditional / 2)) if conditional < 1 else 0.0


def _fit_laplace(m: Moments) -> tuple[dict[str, float], tuple[str, ...]]:
    # Maximum likelihood with the location known to be zero.
    return {"scale": m.mean}, ()


def _fit_dgamma(m: Moments) -> tuple[dict[str, float], tuple[str, ...]]:
    # SIDCo eq. (16), (27): an approximation of the maximum-likelihood shape, within 1.5 % of it.
    shape = gamma_shape(m)
    if math.isinf(shape):
        raise FitError("all magnitudes are equal: the gamma shape is infinite")
    return {"a": shape, "scale": m.mean / shape}, ()


def _fit_double_genpareto(m: Moments) -> tuple[dict[str, float], tuple[str, ...]]:
    # SIDCo eq. (8), (9): matching the first two moments, in the sign where a heavy tail has ξ > 0.
    if m.variance <= 1e-14 * m.mean**2:
        raise FitError("all magnitudes are equal: no generalized Pareto matches their moments")
    squared = m.mean**2 / m.variance
    shape, scale = 0.5 * (1 - squared), 0.5 * m.mean * (squared + 1)
    flags = []
    if shape > 0.25:
        flags.append("shape above 1/4: moment estimate unreliable")
    if shape < 0 and m.max > -scale / shape:
        flags.append("largest element outside the support")
    return {"c": shape, "scale": scale}, tuple(flags)


_CLOSED: dict[str, Callable[[Moments], tuple[dict[str, float], tuple[str, ...]]]] = {
    "laplace": _fit_laplace,
    "dgamma": _fit_dgamma,
    "double_genpareto": _fit_double_genpareto,
}
MODELS = tuple(_CLOSED)
"""Names of the models that can be fitted."""


def fit_moments(m: Moments, model: str, method: Method = "closed") -> Fit:
    """Fit a model to the sums of a gradient; see :func:`fit`."""
    if model not in _CLOSED:
        raise InputError(f"no model {model!r}; there are {', '.join(MODELS)}")
    if method != "closed":
        raise InputError(f"no method {method!r}; there is closed")
    if m.count == 0:
        raise FitError("nothing to fit: no finite non-zero element")
    params, flags = _CLOSED[model](m)
    return Fit(model, {**params, "loc": 0.0}, m.zero_fraction, m, method, flags)


def fit(x: Array, model: str, method: Method = "closed") -> Fit:
    """Fit a sparsity-inducing distribution to a gradient.

    Parameters
    ----------
    x : array of any shape, NumPy or torch, any floating dtype. NaN and infinities are left out.
    model : ``"laplace"``, ``"dgamma"`` or ``"double_genpareto"``.
    method : ``"closed"``, the paper's closed forms: maximum likelihood for Laplace, an approximation of it
        for gamma (shape within 1.5 %), moments for generalized Pareto (shape always below ½, unreliable above ¼).

    Returns
    -------
    Fit

    Raises
    ------
    InputError
        For an unknown model or method, or an array that is not floating point.
    FitError
        If there is nothing to fit, or all magnitudes are equal (gamma, generalized Pareto).

    Examples
    --------
    >>> import numpy as np
    >>> f = fit(np.array([1.0, -3.0, 2.0, 0.0]), "laplace")
    >>> f.params["scale"], f.zero_fraction
    (2.0, 0.25)
    """
    return fit_moments(moments(x), model, method)
