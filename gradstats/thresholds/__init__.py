"""Threshold estimators, one per file, and the registry of their names.

Neither SciPy nor torch is imported here or by an estimator's file: SciPy loads with the first threshold that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isabstract
from typing import Any, Literal, TypeAlias

from gradstats.errors import InputError, options_of, unknown
from gradstats.primitives import Array
from gradstats.primitives import warm_up as warm_up_primitives
from gradstats.primitives.ratio import shown, target_count
from gradstats.registry import Registry
from gradstats.thresholds.base import Estimate, Estimator, Result, Rule
from gradstats.thresholds.exact import Exact, WarmExact
from gradstats.thresholds.gaussiank import GaussianK
from gradstats.thresholds.hard import Hard
from gradstats.thresholds.histogram import HistogramQuantile
from gradstats.thresholds.micro import MiCRO
from gradstats.thresholds.redsync import RedSync, RedSyncTrimmed
from gradstats.thresholds.sampled import DGC, Sampling
from gradstats.thresholds.sidco import Adaptation, Gamma, SIDCoE, SIDCoGP, SIDCoP
from gradstats.thresholds.sidco import warm_up as warm_up_sidco

__all__ = [
    "DGC",
    "ESTIMATORS",
    "Adaptation",
    "Estimate",
    "Estimator",
    "EstimatorName",
    "Exact",
    "Gamma",
    "GaussianK",
    "Hard",
    "HistogramQuantile",
    "MiCRO",
    "RedSync",
    "RedSyncTrimmed",
    "Result",
    "Rule",
    "SIDCoE",
    "SIDCoGP",
    "SIDCoP",
    "Sampling",
    "WarmExact",
    "make_estimator",
    "target_count",
    "threshold",
    "warm_up",
]

EstimatorName: TypeAlias = Literal[
    "exact",
    "warm-exact",
    "histogram",
    "dgc",
    "hard",
    "redsync",
    "redsync-trimmed",
    "gaussiank",
    "sidco-e",
    "sidco-gp",
    "sidco-p",
    "micro",
]
"""The package's own names: a user's estimator may have any other."""
_OWN = (
    *(Exact, WarmExact, HistogramQuantile, DGC, Hard, RedSync, RedSyncTrimmed, GaussianK),
    *(SIDCoE, SIDCoGP, SIDCoP, MiCRO),
)


def _check(name: str, rule: object) -> None:
    if not name or ":" in name or name == "topk":  # a selector's name, of another way to be exact
        raise InputError(f"an estimator cannot have the name {name!r}")
    if not callable(rule) or (isinstance(rule, type) and not issubclass(rule, Estimator)):
        raise InputError(
            f"estimator {name!r} is to be a subclass of Estimator, or a function that returns one, not {shown(rule)}"
        )
    if isabstract(rule):
        raise InputError(f"estimator {name!r} has no find(x, k), which returns its threshold")
    # a function that builds a rule need not have a name
    rule_name = getattr(rule, "name", name)
    if rule_name != name:
        raise InputError(
            f"estimator {name!r} calls itself {rule_name!r}: both names are to be the same"
        )


ESTIMATORS: Registry[Callable[..., Estimator]] = Registry(
    "gradstats.estimators", {e.name: f"{e.__module__}:{e.__name__}" for e in _OWN}, _check
)
"""Estimator by the name that the command line and the tables use.

``ESTIMATORS["mine"] = Mine`` adds one to this program. Through the entry point ``gradstats.estimators`` an installed
package adds one to every program.
"""


def make_estimator(name: EstimatorName | str, **options: Any) -> Estimator:
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
    if not isinstance(name, str) or name not in ESTIMATORS:
        raise unknown("estimator", name, ESTIMATORS)
    factory = ESTIMATORS[name]
    with options_of("estimator", name):
        return factory(**options)


def threshold(
    x: Array, ratio: float, estimator: EstimatorName | str | Estimator = "exact", **options: Any
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
