"""Statistical analysis of gradients: capture, model, threshold.

Public names load the first time they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

# of the standard library alone: this import loads neither torch nor NumPy
from gradstats.tables import Shown
from gradstats.version import __version__ as __version__

if TYPE_CHECKING:
    from gradstats import compressors, hooks, network, plots, report, thresholds, trace
    from gradstats.analysis.advise import advise
    from gradstats.analysis.agreement import agreement
    from gradstats.analysis.compare import compare
    from gradstats.analysis.compression import compression
    from gradstats.analysis.delta import delta
    from gradstats.analysis.drift import Quantity, drift, over_training
    from gradstats.analysis.quality import quality, quality_series, stage_budget
    from gradstats.analysis.wire import Rounding, Scale, wire
    from gradstats.errors import (
        ExchangeError,
        GradstatsError,
        InputError,
        NonFiniteGradientError,
        TraceError,
    )
    from gradstats.explorer import explore, write_explorer
    from gradstats.hooks.monitor import Monitor
    from gradstats.hooks.trial import Trial
    from gradstats.network.plan import plan
    from gradstats.primitives.backend import Backend, backend
    from gradstats.primitives.deltas import WeightType
    from gradstats.primitives.formats import NumberFormat
    from gradstats.primitives.histogram import histogram
    from gradstats.primitives.moments import moments
    from gradstats.primitives.select import select
    from gradstats.primitives.sketch import Magnitudes, Sketch, sketch
    from gradstats.statistics import distributions, goodness, laws, pot
    from gradstats.statistics.compressibility import compressibility
    from gradstats.statistics.fitting import Fit, fit
    from gradstats.statistics.several import fit_all
    from gradstats.statistics.solution import FitError
    from gradstats.thresholds import threshold, warm_up
    from gradstats.trace import Trace, open_trace
    from gradstats.trace.export import save_safetensors


def _figure(name: str) -> Callable[..., Any]:
    figure: Callable[..., Any] = getattr(import_module("gradstats.plots"), name)
    return figure


Shown.figures = staticmethod(_figure)  # results draw themselves with what is above them

_HOME = {
    "gradstats": ("compressors", "hooks", "network", "plots", "report", "thresholds", "trace"),
    "gradstats.analysis.advise": ("advise",),
    "gradstats.analysis.agreement": ("agreement",),
    "gradstats.analysis.compare": ("compare",),
    "gradstats.analysis.compression": ("compression",),
    "gradstats.analysis.delta": ("delta",),
    "gradstats.analysis.drift": ("Quantity", "drift", "over_training"),
    "gradstats.analysis.quality": ("quality", "quality_series", "stage_budget"),
    "gradstats.analysis.wire": ("Rounding", "Scale", "wire"),
    "gradstats.errors": (
        *("ExchangeError", "GradstatsError", "InputError"),
        *("NonFiniteGradientError", "TraceError"),
    ),
    "gradstats.explorer": ("explore", "write_explorer"),
    "gradstats.hooks.monitor": ("Monitor",),
    "gradstats.hooks.trial": ("Trial",),
    "gradstats.network.plan": ("plan",),
    "gradstats.primitives": ("Backend", "backend", "histogram", "moments", "select"),
    "gradstats.primitives.deltas": ("WeightType",),
    "gradstats.primitives.formats": ("NumberFormat",),
    "gradstats.primitives.sketch": ("Magnitudes", "Sketch", "sketch"),
    "gradstats.statistics": ("distributions", "goodness", "laws", "pot"),
    "gradstats.statistics.compressibility": ("compressibility",),
    "gradstats.statistics.fitting": ("Fit", "fit"),
    "gradstats.statistics.several": ("fit_all",),
    "gradstats.statistics.solution": ("FitError",),
    "gradstats.thresholds": ("threshold", "warm_up"),
    "gradstats.trace": ("Trace", "open_trace"),
    "gradstats.trace.export": ("save_safetensors",),
}
"""Public names by the module or package they are in, as in the imports above."""

# written out: type checkers do not evaluate a list that is computed
__all__ = [
    "Backend",
    "ExchangeError",
    "Fit",
    "FitError",
    "GradstatsError",
    "InputError",
    "Magnitudes",
    "Monitor",
    "NonFiniteGradientError",
    "NumberFormat",
    "Quantity",
    "Rounding",
    "Scale",
    "Sketch",
    "Trace",
    "TraceError",
    "Trial",
    "WeightType",
    "advise",
    "agreement",
    "backend",
    "compare",
    "compressibility",
    "compression",
    "compressors",
    "delta",
    "distributions",
    "drift",
    "explore",
    "fit",
    "fit_all",
    "goodness",
    "histogram",
    "hooks",
    "laws",
    "moments",
    "network",
    "open_trace",
    "over_training",
    "plan",
    "plots",
    "pot",
    "quality",
    "quality_series",
    "report",
    "save_safetensors",
    "select",
    "sketch",
    "stage_budget",
    "threshold",
    "thresholds",
    "trace",
    "warm_up",
    "wire",
    "write_explorer",
]


def _callable(module: ModuleType) -> None:
    """Let the module ``gradstats.pot`` be called as the command of its name: ``gradstats.pot("run.zarr")``."""
    from gradstats.analysis.peaks import pot

    # a call looks for it in the class, and help and completion for the signature in the object
    module.__class__ = type("Pot", (ModuleType,), {"__call__": staticmethod(pot)})
    vars(module)["__signature__"] = signature(pot)


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOME.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'gradstats' has no attribute {name!r}")
    if home in ("gradstats", "gradstats.statistics"):  # the name is a module's
        value: Any = import_module(f"{home}.{name}")
        if name == "pot":
            _callable(value)
    else:
        value = getattr(import_module(home), name)
    # the ordinary look-up finds it from now on: __getattr__ is only called for what is missing
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
