"""Maximum likelihood by a search over one shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize_scalar

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.solution import Flag, Solution

__all__ = ["ENDS", "search", "with_errors"]

ENDS = (0.05, 200.0)
"""Range of shapes searched where a law is a spike below it, and uniform above."""


def search(
    loss: Callable[[float], float], low: float, high: float
) -> tuple[float, tuple[Flag, ...]]:
    """Minimize over the logarithm of a shape; return it, with a flag if it is at an end of the range.

    Parameters
    ----------
    loss : callable
        Logarithm of the shape → loss.
    low, high : float
        Range of shapes.
    """
    bounds = math.log(low), math.log(high)
    log_shape = float(
        minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-8}).x
    )
    # the bounded method closes in on an end without ever reaching it
    at_end = min(log_shape - bounds[0], bounds[1] - log_shape) < 1e-3
    return log_shape, (Flag.BOUNDARY,) if at_end else ()


def with_errors(
    m: Magnitudes,
    name: str,
    log_shape: float,
    log_size: float,
    loss: Callable[[float, float], float],
    flags: tuple[Flag, ...],
) -> Solution:
    """Return the solution with standard errors from the observed information (central differences of logarithms).

    Parameters
    ----------
    m : Magnitudes
        Sample.
    name : str
        Name of the shape.
    log_shape, log_size : float
        Logarithms of shape and scale at the maximum.
    loss : callable
        (log shape, log scale) → mean negative log-likelihood of a magnitude.
    flags : tuple of Flag
        Warnings of the search; with one there are no standard errors.
    """
    shape, scale = math.exp(log_shape), math.exp(log_size)
    stderr = {name: math.nan, "scale": math.nan}
    if not flags:
        # differences err by h² from their width and by about 1e-16/h² from rounding: both are negligible
        h = 1e-3

        def at(i: int, j: int) -> float:
            return loss(log_shape + i * h, log_size + j * h)

        centre = at(0, 0)
        hessian = np.empty((2, 2))
        hessian[0, 0] = (at(1, 0) - 2 * centre + at(-1, 0)) / h**2
        hessian[1, 1] = (at(0, 1) - 2 * centre + at(0, -1)) / h**2
        hessian[0, 1] = hessian[1, 0] = (at(1, 1) - at(1, -1) - at(-1, 1) + at(-1, -1)) / (4 * h**2)
        # positive definite (Sylvester): a flat profile has no standard errors
        if np.linalg.det(hessian) > 0 and hessian[0, 0] > 0:
            errors = np.sqrt(np.diag(np.linalg.inv(hessian)) / m.count)
            # errors of logarithms are relative
            stderr = {name: shape * float(errors[0]), "scale": scale * float(errors[1])}
    return Solution({name: shape, "scale": scale}, stderr, flags)
