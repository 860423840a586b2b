"""Statistical analysis of gradients: capture, model, threshold.

Everything public is reachable from here and loads when first used. A function and a module of one name would
shadow each other (importing ``gradstats.fit`` sets the attribute ``fit``), so those modules have an underscore.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradstats import compressors, distributions, goodness, plots, pot, thresholds
    from gradstats._compressibility import compressibility
    from gradstats._compression import compression
    from gradstats._fit import Fit, FitError, fit
    from gradstats._quality import quality, quality_series, stage_budget
    from gradstats._sketch import Magnitudes, Sketch, sketch
    from gradstats.errors import (
        ExchangeError,
        GradstatsError,
        InputError,
        NonFiniteGradientError,
        TraceError,
    )
    from gradstats.evolution import over_training
    from gradstats.export import save_safetensors
    from gradstats.primitives import histogram, moments, select, warm_up
    from gradstats.thresholds import threshold
    from gradstats.trace import Trace, open_trace

__version__ = "0.1.0"

_HOME = {
    "ExchangeError": "gradstats.errors",
    "Fit": "gradstats._fit",
    "FitError": "gradstats._fit",
    "GradstatsError": "gradstats.errors",
    "InputError": "gradstats.errors",
    "NonFiniteGradientError": "gradstats.errors",
    "Trace": "gradstats.trace",
    "TraceError": "gradstats.errors",
    "Magnitudes": "gradstats._sketch",
    "Sketch": "gradstats._sketch",
    "compressibility": "gradstats._compressibility",
    "compression": "gradstats._compression",
    "fit": "gradstats._fit",
    "histogram": "gradstats.primitives",
    "over_training": "gradstats.evolution",
    "moments": "gradstats.primitives",
    "open_trace": "gradstats.trace",
    "quality": "gradstats._quality",
    "save_safetensors": "gradstats.export",
    "quality_series": "gradstats._quality",
    "select": "gradstats.primitives",
    "sketch": "gradstats._sketch",
    "stage_budget": "gradstats._quality",
    "threshold": "gradstats.thresholds",
    "warm_up": "gradstats.primitives",
}
_MODULES = ("compressors", "distributions", "goodness", "plots", "pot", "thresholds")

__all__ = [
    "ExchangeError",
    "Fit",
    "FitError",
    "GradstatsError",
    "InputError",
    "Magnitudes",
    "NonFiniteGradientError",
    "Sketch",
    "Trace",
    "TraceError",
    "compressibility",
    "compression",
    "compressors",
    "distributions",
    "fit",
    "goodness",
    "histogram",
    "moments",
    "open_trace",
    "over_training",
    "plots",
    "pot",
    "quality",
    "quality_series",
    "save_safetensors",
    "select",
    "sketch",
    "stage_budget",
    "threshold",
    "thresholds",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = import_module(f"gradstats.{name}")
    else:
        raise AttributeError(f"module 'gradstats' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
