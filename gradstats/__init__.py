"""Statistical analysis of gradients: capture, model, threshold.

Everything public is reachable from here and loads when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradstats import compressors, plots, thresholds
    from gradstats.analysis.compression import compression
    from gradstats.analysis.drift import over_training
    from gradstats.analysis.quality import quality, quality_series, stage_budget
    from gradstats.errors import (
        ExchangeError,
        GradstatsError,
        InputError,
        NonFiniteGradientError,
        TraceError,
    )
    from gradstats.primitives import histogram, moments, select, warm_up
    from gradstats.primitives.sketch import Magnitudes, Sketch, sketch
    from gradstats.statistics import distributions, goodness, pot
    from gradstats.statistics.compressibility import compressibility
    from gradstats.statistics.fitting import Fit, fit
    from gradstats.statistics.solution import FitError
    from gradstats.thresholds import threshold
    from gradstats.trace import Trace, open_trace
    from gradstats.trace.export import save_safetensors

__version__ = "0.1.0"

_HOME = {
    "ExchangeError": "gradstats.errors",
    "Fit": "gradstats.statistics.fitting",
    "FitError": "gradstats.statistics.solution",
    "GradstatsError": "gradstats.errors",
    "InputError": "gradstats.errors",
    "NonFiniteGradientError": "gradstats.errors",
    "Trace": "gradstats.trace",
    "TraceError": "gradstats.errors",
    "Magnitudes": "gradstats.primitives.sketch",
    "Sketch": "gradstats.primitives.sketch",
    "compressibility": "gradstats.statistics.compressibility",
    "compression": "gradstats.analysis.compression",
    "fit": "gradstats.statistics.fitting",
    "histogram": "gradstats.primitives",
    "over_training": "gradstats.analysis.drift",
    "moments": "gradstats.primitives",
    "open_trace": "gradstats.trace",
    "quality": "gradstats.analysis.quality",
    "save_safetensors": "gradstats.trace.export",
    "quality_series": "gradstats.analysis.quality",
    "select": "gradstats.primitives",
    "sketch": "gradstats.primitives.sketch",
    "stage_budget": "gradstats.analysis.quality",
    "threshold": "gradstats.thresholds",
    "warm_up": "gradstats.primitives",
}
_MODULES = {
    "compressors": "gradstats.compressors",
    "distributions": "gradstats.statistics.distributions",
    "goodness": "gradstats.statistics.goodness",
    "plots": "gradstats.plots",
    "pot": "gradstats.statistics.pot",
    "thresholds": "gradstats.thresholds",
}

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
        value = import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'gradstats' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
