"""Series over training: which steps belong to one, and whether it has a unit root."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["incomplete_steps", "steps_of_all_ranks", "unit_root_p"]


def steps_of_all_ranks(values: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return which steps have a number of every rank that has any.

    A mean over whichever ranks a step has would move where a rank ends early or begins late, though no rank moves.

    Parameters
    ----------
    values : ndarray, shape (..., steps, ranks)
        Numbers, not finite where there is none.

    Returns
    -------
    ndarray of bool, shape (..., steps)
        True where all ranks have one; False throughout where no rank has any.
    """
    known = np.isfinite(values)
    silent = ~known.any(axis=-2, keepdims=True)
    whole: NDArray[np.bool_] = (known | silent).all(axis=-1) & known.any(axis=-1)
    return whole


def incomplete_steps(values: NDArray[np.floating]) -> NDArray[np.int64]:
    """Count the steps that some of the ranks have, and others that have the quantity lack.

    Parameters
    ----------
    values : ndarray, shape (..., steps, ranks)
        Numbers, not finite where there is none.

    Returns
    -------
    ndarray of int64, shape (...)
        Number of these steps.
    """
    some = np.isfinite(values).any(axis=-1)
    return np.asarray((some & ~steps_of_all_ranks(values)).sum(axis=-1), np.int64)


def unit_root_p(y: NDArray[np.float64]) -> float:
    """Return the p-value of a unit root around a line: the augmented Dickey-Fuller test, its lags chosen by AIC.

    Parameters
    ----------
    y : ndarray, shape (n,)
        Series at even steps, not constant, of at least ten values.

    Returns
    -------
    float
        Small where the series returns to its line.
    """
    from statsmodels.tsa.stattools import adfuller

    lags = _aic_lags(y)
    return float(adfuller(y, maxlag=lags, regression="ct", autolag=None, result_object=False)[1])


def _aic_lags(y: NDArray[np.float64]) -> int:
    """Return the lags that ``adfuller(y, regression="ct", autolag="AIC")`` chooses.

    It fits a regression for each number of lags by a singular value decomposition, 40 s for 100,000 steps. The
    regressions are nested, so that one QR decomposition has the residuals of all.
    """
    # the most lags that statsmodels tries (Schwert 1989)
    most = min(y.size // 2 - 3, math.ceil(12 * (y.size / 100) ** 0.25))
    change = np.diff(y)
    n = change.size - most
    lagged = [change[most - lag : change.size - lag] for lag in range(1, most + 1)]
    line = (np.ones(n), np.arange(1.0, n + 1))
    columns = np.column_stack([*line, y[most:-1], *lagged, change[most:]])
    # what the first j columns leave of the last lies in its rows from j on
    squares = np.square(np.asarray(np.linalg.qr(columns, mode="r"))[:, -1])
    left = np.cumsum(squares[::-1])[::-1][3 : 4 + most]
    # an exact line leaves nothing
    with np.errstate(divide="ignore"):
        aic = n * np.log(left) + 2 * np.arange(most + 1)
    return int(np.argmin(aic))
