"""Solvers: from the magnitudes of a gradient to the parameters of a model and their standard errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.solution import Solution
from gradstats.statistics.solvers import genpareto, likelihood, moments

__all__ = ["SOLVERS", "Solver"]

Solver: TypeAlias = Callable[[Magnitudes], Solution]

SOLVERS: dict[tuple[str, str], Solver] = {
    ("laplace", "closed"): likelihood.laplace,
    ("laplace", "moments"): likelihood.laplace,
    ("laplace", "mle"): likelihood.laplace,
    ("laplace", "pwm"): likelihood.laplace,
    ("dgamma", "closed"): likelihood.dgamma_closed,
    ("dgamma", "moments"): moments.dgamma,
    ("dgamma", "mle"): likelihood.dgamma,
    ("double_genpareto", "closed"): genpareto.by_moments,
    ("double_genpareto", "moments"): genpareto.by_moments,
    ("double_genpareto", "mle"): genpareto.by_likelihood,
    ("double_genpareto", "pwm"): genpareto.by_weighted_moments,
    ("norm", "closed"): likelihood.norm,
    ("norm", "moments"): likelihood.norm,
    ("norm", "mle"): likelihood.norm,
    ("t", "moments"): moments.t,
    ("t", "mle"): likelihood.t,
    ("gennorm", "moments"): moments.gennorm,
    ("gennorm", "mle"): likelihood.gennorm,
    ("dweibull", "moments"): moments.dweibull,
    ("dweibull", "mle"): likelihood.dweibull,
    ("lognorm", "closed"): likelihood.lognorm,
    ("lognorm", "moments"): moments.lognorm,
    ("lognorm", "mle"): likelihood.lognorm,
}
"""Solver by model and method."""
