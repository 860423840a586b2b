"""Peaks over threshold of gradient magnitudes: diagnostics, the choice of a threshold, tail quantiles, mixtures.

Everything works from the cells of a :class:`gradstats.Magnitudes`, so a histogram is enough. The excesses over a
threshold u are modelled as generalized Pareto with SciPy's sign: c = ξ > 0 is a heavy tail. Intervals take the elements
as independent, which those of a gradient are not: the dispersion over ranks and steps is the honest interval.
"""

from __future__ import annotations

from gradstats.statistics.pot.choice import Candidate, ThresholdChoice, choose_threshold
from gradstats.statistics.pot.mixtures import Mixture, mixture
from gradstats.statistics.pot.peaks import (
    FEWEST,
    MeanExcess,
    Stability,
    mean_excess,
    parameter_stability,
)
from gradstats.statistics.pot.quantile import TailQuantile, tail_quantile
from gradstats.statistics.pot.stagewise import Stage, stages

__all__ = [
    "FEWEST",
    "Candidate",
    "MeanExcess",
    "Mixture",
    "Stability",
    "Stage",
    "TailQuantile",
    "ThresholdChoice",
    "choose_threshold",
    "mean_excess",
    "mixture",
    "parameter_stability",
    "stages",
    "tail_quantile",
]
