"""The fits behind SIDCo's multi-stage thresholds."""

from __future__ import annotations

from dataclasses import dataclass

from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.ratio import target_count
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Fit, Method, fit
from gradstats.statistics.goodness import Distances
from gradstats.statistics.pot.peaks import MODEL, NAN, finite_of, magnitudes_of
from gradstats.statistics.solution import FitError
from gradstats.statistics.stages import stage_ratios

__all__ = ["Stage", "stages"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a multi-stage threshold.

    Attributes
    ----------
    stage : number, from 1.
    fit : of the excesses over the last stage's threshold (of the magnitudes, in the first); None without one.
    n : how many those are.
    asked : share of them that should exceed this stage's threshold.
    threshold : η after this stage, in the gradient's unit.
    achieved : share of them that does.
    ks : Kolmogorov distance of the fit from them.
    status : why there is no fit, the numbers are NaN and this stage is the last; empty if there is one.
    """

    stage: int
    fit: Fit | None
    n: int
    asked: float
    threshold: float = NAN
    achieved: float = NAN
    ks: float = NAN
    status: str = ""


_LATER = {"laplace": "laplace", "double_genpareto": MODEL, "dgamma": MODEL}


def stages(
    x: Array | Sketch | Magnitudes,
    ratio: float,
    n_stages: int,
    model: str = "laplace",
    first: float = 0.25,
    method: Method = "closed",
) -> list[Stage]:
    """Return the fits behind a multi-stage threshold (SIDCo, Abdelmoniem et al. 2021, section 2.4, algorithm 1).

    The first stage models all non-zero magnitudes, every later one the excesses over the last threshold: exponential
    after ``"laplace"`` (the threshold rule sidco-e), generalized Pareto after ``"double_genpareto"`` (sidco-p) and
    after ``"dgamma"`` (sidco-gp).

    Parameters
    ----------
    x : gradient, its sketch, or magnitudes.
    ratio : share of all finite elements, zeros included, to keep.
    n_stages : M ≥ 1. One is used if the ratio is at or above `first`.
    model : of the first stage, one of the three above.
    first : δ₁, the share that the first of several stages keeps.
    method : of :func:`gradstats.fit`, for every stage.

    Returns
    -------
    list of Stage
        The last one's threshold is the rule's. Fewer than M if no element exceeds a threshold or a stage has no fit;
        none if every non-zero element is to be kept.

    Raises
    ------
    FitError
        If there is no finite non-zero element.
    InputError
        For another model, a method that a model does not have, or a ratio or number of stages out of range.
    """
    if model not in _LATER:
        raise InputError(f"no stages with {model!r}; there are {', '.join(_LATER)}")
    if not 0 < first < 1:
        raise InputError(f"the first stage's share must be in (0, 1), not {first}")
    m = magnitudes_of(x)
    k = target_count(ratio, finite_of(m))
    shares = stage_ratios(min(k / m.count, 1.0), n_stages, first)
    if k >= m.count:
        return []
    found: list[Stage] = []
    threshold, over, before = 0.0, m, float(m.count)
    for number, asked in enumerate(shares, 1):
        if over.count == 0:
            break
        try:
            fitted = fit(over, model if number == 1 else _LATER[model], method)
        except FitError as error:
            found.append(Stage(number, None, over.count, asked, status=str(error)))
            break
        threshold += float(fitted.magnitude.isf(asked))
        after = m.exceedances(threshold)
        ks = Distances(fitted, over).kolmogorov()
        found.append(Stage(number, fitted, over.count, asked, threshold, after / before, ks))
        over, before = m.excesses(threshold), after
    return found
