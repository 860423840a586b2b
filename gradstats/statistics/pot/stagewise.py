"""The fits behind SIDCo's multi-stage thresholds."""

from __future__ import annotations

from dataclasses import dataclass

from gradstats.errors import unknown
from gradstats.primitives import Array
from gradstats.primitives.ratio import check_number, target_count
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Fit, fit
from gradstats.statistics.goodness import Distances
from gradstats.statistics.laws import LAWS, LawName
from gradstats.statistics.laws.law import Method
from gradstats.statistics.pot.peaks import NAN, finite_of, magnitudes_of
from gradstats.statistics.solution import FitError
from gradstats.statistics.stages import stage_ratios

__all__ = ["Stage", "stages"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a multi-stage threshold.

    Attributes
    ----------
    stage : int
        Number of the stage, from 1.
    fit : Fit or None
        Model of the excesses over the threshold of the stage before (in the first stage, of the magnitudes).
    n : int
        Number of these excesses.
    asked : float
        Share of them that should exceed this stage's threshold.
    threshold : float
        Threshold η after this stage, in the gradient's unit.
    achieved : float
        Share of the excesses that do exceed it.
    ks : float
        Kolmogorov distance of the fit from the excesses.
    status : str
        Why there is no fit, the numbers are NaN and this stage is the last; empty if there is a fit.
    """

    stage: int
    fit: Fit | None
    n: int
    asked: float
    threshold: float = NAN
    achieved: float = NAN
    ks: float = NAN
    status: str = ""


def stages(
    x: Array | Sketch | Magnitudes,
    ratio: float,
    n_stages: int,
    model: LawName | str = "laplace",
    first: float = 0.25,
    method: Method = "closed",
) -> list[Stage]:
    """Return the fits behind a multi-stage threshold (SIDCo, Abdelmoniem et al. 2021, section 2.4, algorithm 1).

    The first stage models all non-zero magnitudes, every later one the excesses over the last threshold: exponential
    after ``"laplace"`` (estimator sidco-e), generalized Pareto after ``"double_genpareto"`` (sidco-p) and after
    ``"dgamma"`` (sidco-gp).

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.
    ratio : float
        Share of all finite elements, with zeros, to keep.
    n_stages : int
        Number of stages M ≥ 1. One is used if the ratio is at or above `first`.
    model : {"laplace", "double_genpareto", "dgamma"}
        Model of the first stage.
    first : float
        Share δ₁ that the first of several stages keeps, in (0, 1).
    method : {"closed", "moments", "mle", "pwm"}
        Method of every fit, see :func:`gradstats.fit`.

    Returns
    -------
    list of Stage
        Stages; the threshold of the last is the estimator's. Fewer than M if no element exceeds a threshold or a stage
        has no fit; none if every non-zero element is to be kept.

    Raises
    ------
    FitError
        If there is no finite non-zero element.
    InputError
        If the model is another, it has no such method, or a ratio or the number of stages is out of range.
    """
    later = {name: law.excess for name, law in LAWS.items() if law.excess}
    if not isinstance(model, str) or model not in later:
        raise unknown("model of later stages", model, later)
    first = check_number(first, "the first stage's share", 0, 1)
    m = magnitudes_of(x)
    # zeros count among the elements asked for, and no stage models them
    k = target_count(ratio, finite_of(m))
    # before the early return, so that a wrong number of stages is always refused
    shares = stage_ratios(min(k / m.count, 1.0), n_stages, first)
    if k >= m.count:
        return []
    stage_fits: list[Stage] = []
    threshold, over, before = 0.0, m, float(m.count)
    for number, asked in enumerate(shares, 1):
        if over.count == 0:
            break
        try:
            fitted = fit(over, model if number == 1 else later[model], method)
        except FitError as error:
            stage_fits.append(Stage(number, None, over.count, asked, status=str(error)))
            break
        # a stage's quantile is an excess over the threshold of the last (eq. 7 and 10)
        threshold += float(LAWS[fitted.model].magnitude.isf(asked, **fitted.params))
        after = m.exceedances(threshold)
        ks = Distances(fitted, over).kolmogorov()
        stage_fits.append(Stage(number, fitted, over.count, asked, threshold, after / before, ks))
        over, before = m.excesses(threshold), after
    return stage_fits
