"""Threshold estimators, one per file, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.ratio import target_count
from gradstats.thresholds.base import Estimate, Estimator
from gradstats.thresholds.exact import Exact, WarmExact
from gradstats.thresholds.gaussiank import GaussianK
from gradstats.thresholds.hard import Hard
from gradstats.thresholds.histogram import HistogramQuantile
from gradstats.thresholds.micro import MiCRO
from gradstats.thresholds.redsync import RedSync, RedSyncTrimmed
from gradstats.thresholds.sampled import DGC
from gradstats.thresholds.sidco import SIDCoE, SIDCoGP, SIDCoP

__all__ = [
    "DGC",
    "ESTIMATORS",
    "Estimate",
    "Estimator",
    "Exact",
    "GaussianK",
    "Hard",
    "HistogramQuantile",
    "MiCRO",
    "RedSync",
    "RedSyncTrimmed",
    "SIDCoE",
    "SIDCoGP",
    "SIDCoP",
    "WarmExact",
    "make_estimator",
    "target_count",
    "threshold",
]

ESTIMATORS: dict[str, Callable[..., Estimator]] = {
    e.name: e
    for e in (
        Exact,
        WarmExact,
        HistogramQuantile,
        DGC,
        Hard,
        RedSync,
        RedSyncTrimmed,
        GaussianK,
        SIDCoE,
        SIDCoGP,
        SIDCoP,
        MiCRO,
    )
}
"""Estimator by name, as the command line and the tables call them."""


def make_estimator(name: str, **options: Any) -> Estimator:
    """Build the estimator called `name`.

    Raises
    ------
    InputError
        For an unknown name or an option the estimator does not take; the message lists what there is.
    """
    try:
        factory = ESTIMATORS[name]
    except KeyError:
        raise InputError(f"no estimator {name!r}; there are {', '.join(ESTIMATORS)}") from None
    try:
        return factory(**options)
    except TypeError as error:
        raise InputError(f"estimator {name!r}: {error}") from None


def threshold(
    x: Array, ratio: float, estimator: str | Estimator = "exact", **options: Any
) -> float:
    """Return the threshold on |x| that keeps about `ratio` of the elements.

    Parameters
    ----------
    x : array of any shape, NumPy or torch, any floating dtype.
    ratio : kept fraction k/d, in (0, 1].
    estimator : a name of :data:`ESTIMATORS`, or an estimator object.
    options : for the estimator named, such as ``stages=3``.

    Returns
    -------
    float
        η ≥ 0 in the gradient's unit. For more than the number, call :meth:`Estimator.estimate`.

    Examples
    --------
    >>> import numpy as np
    >>> threshold(np.arange(1.0, 11.0), 0.2)
    9.0
    """
    if isinstance(estimator, Estimator):
        if options:
            raise InputError("options go with an estimator's name; this estimator is already built")
        return estimator.estimate(x, ratio).threshold
    return make_estimator(estimator, **options).estimate(x, ratio).threshold
