"""Figures, one function each, which draw on the axes given and return them.

Colours are distinguishable with any colour vision, and every series also differs in line style, marker or hatch,
so that the figures read in grey.
"""

from __future__ import annotations

from gradstats.plots.decay import best_k_error, local_exponent, magnitude_decay, window_exponent
from gradstats.plots.files import save
from gradstats.plots.fits import density, mean_excess, parameter_stability, qq, tail
from gradstats.plots.speedups import SpeedupAt, speedup
from gradstats.plots.style import png
from gradstats.plots.systems import (
    CurveBy,
    CurveValue,
    build_up,
    lags_delta,
    matching_rate,
    time_split,
    timeline,
    training_curves,
)
from gradstats.plots.thresholds import latency_bars, quality_bars, quality_over_steps
from gradstats.plots.training import drift, drift_map, layer_map, overview

__all__ = [
    "CurveBy",
    "CurveValue",
    "SpeedupAt",
    "best_k_error",
    "build_up",
    "density",
    "drift",
    "drift_map",
    "lags_delta",
    "latency_bars",
    "layer_map",
    "local_exponent",
    "magnitude_decay",
    "matching_rate",
    "mean_excess",
    "overview",
    "parameter_stability",
    "png",
    "qq",
    "quality_bars",
    "quality_over_steps",
    "save",
    "speedup",
    "tail",
    "time_split",
    "timeline",
    "training_curves",
    "window_exponent",
]
