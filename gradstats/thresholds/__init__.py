"""Threshold estimators, one per file, and the registry of their names.

Neither SciPy nor torch is imported here or by an estimator's file: SciPy loads with the first threshold that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradstats.errors import InputError, options_of, unknown
from gradstats.primitives import Array
from gradstats.primitives import warm_up as warm_up_primitives
from gradstats.primitives.ratio import target_count
from gradstats.thresholds.base import Estimate, Estimator, Result
from gradstats.thresholds.exact import Exact, WarmExact
from gradstats.thresholds.gaussiank import GaussianK
from gradstats.thresholds.hard import Hard
from gradstats.thresholds.histogram import HistogramQuantile
from gradstats.thresholds.micro import MiCRO
from gradstats.thresholds.redsync import RedSync, RedSyncTrimmed
from gradstats.thresholds.sampled import DGC
from gradstats.thresholds.sidco import SIDCoE, SIDCoGP, SIDCoP
from gradstats.thresholds.sidco import warm_up as warm_up_sidco

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
    "Result",
    "SIDCoE",
    "SIDCoGP",
    "SIDCoP",
    "WarmExact",
    "make_estimator",
    "target_count",
    "threshold",
    "warm_up",
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
"""Estimator by the name that the command line and the tables use."""


def make_estimator(name: str, **options: Any) -> Estimator:
    """Build an estimator by its name.

    Parameters
    ----------
    name : str
        Name of the estimator, a key of :data:`ESTIMATORS`.
    **options : object
        Parameters of its class, such as ``stages=3``.

    Returns
    -------
    Estimator
        A new one, with a state of its own.

    Raises
    ------
    InputError
        If the name is unknown (the message lists the names) or the estimator does not take an option.
    """
    factory = ESTIMATORS.get(name) if isinstance(name, str) else None
    if factory is None:
        raise unknown("estimator", name, ESTIMATORS)
    with options_of("estimator", name):
        return factory(**options)


def threshold(
    x: Array, ratio: float, estimator: str | Estimator = "exact", **options: Any
) -> float:
    """Return the threshold on |x| that keeps about `ratio` of the elements.

    Parameters
    ----------
    x : array_like
        Gradient of any shape, NumPy or torch, any floating dtype. NaN and infinities are left out.
    ratio : float
        Kept fraction k/d, in (0, 1].
    estimator : str or Estimator
        Name of an estimator, a key of :data:`ESTIMATORS`, or an estimator.
    **options : object
        Parameters of the estimator named, such as ``stages=3``.

    Returns
    -------
    float
        Threshold η ≥ 0, in the gradient's unit. :meth:`Estimator.estimate` returns more than the number.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1], `x` is not dense floating point, or the estimator or an option is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> threshold(np.arange(1.0, 11.0), 0.2)
    9.0
    """
    if isinstance(estimator, Estimator):
        if options:
            raise InputError(
                "options go with an estimator's name; this one is already built: give them to its class"
            )
        return estimator.estimate(x, ratio).threshold
    return make_estimator(estimator, **options).estimate(x, ratio).threshold


def warm_up() -> None:
    """Compile the loops of primitives and thresholds (seconds, once per installation) or load them from the cache.

    Without this call the first use of a loop waits for it. Building a :class:`gradstats.hooks.CompressionState`
    compiles the loops of its compressor. It is of the compiled loops alone: Triton compiles a kernel when it is first
    launched (see :func:`gradstats.backend`).
    """
    warm_up_primitives()
    warm_up_sidco()
