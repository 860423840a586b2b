"""The choice of a threshold by a sequence of tests with error control, and the tail beyond it from elements unseen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gradstats.console import no_progress
from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.levels import Levels, levels_beyond
from gradstats.primitives.ratio import (
    check_count,
    check_number,
    check_ratios,
    check_seed,
    target_count,
)
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Fit, fit
from gradstats.statistics.goodness import MOST_REPLICATES, bootstrap
from gradstats.statistics.laws.law import Method
from gradstats.statistics.pot.peaks import (
    FEWEST,
    MODEL,
    NAN,
    Stability,
    magnitudes_of,
    stability_of,
    threshold_of,
)
from gradstats.statistics.solution import FitError

__all__ = ["Candidate", "ThresholdChoice", "choose_threshold"]

_MOST_SPLITS = 1000
_SMALL = 500
"""Excesses tested below which a note says that the test has little power."""

_FURTHER = 4
"""Thresholds beyond the last candidate whose shapes all candidates must agree with."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A threshold that was tested.

    Attributes
    ----------
    ratio : float
        Share of the non-zero elements asked to exceed the threshold.
    threshold : float
        Threshold u, in the gradient's unit.
    n : int
        Number of elements beyond it.
    tested : int
        How many of them the test saw.
    p_value : float
        p-value of the generalized Pareto; NaN without a fit, which counts as rejected.
    status : str
        Why there is no fit; empty if there is one.
    p_stable : float
        p-value of one shape ξ beyond this threshold and all further ones; NaN where no further one has a fit.
    """

    ratio: float
    threshold: float
    n: int
    tested: int
    p_value: float
    status: str = ""
    p_stable: float = NAN

    @property
    def p_both(self) -> float:
        """p-value of the two tests together, 1 − (1 − p)² of the smaller (Šidák); NaN without a fit."""
        least = self.p_value if math.isnan(self.p_stable) else min(self.p_value, self.p_stable)
        return NAN if math.isnan(self.p_value) else 1 - (1 - least) ** 2


@dataclass(frozen=True, slots=True)
class ThresholdChoice:
    """The lowest threshold that was not rejected: the median of what several random splits of the elements answer.

    Attributes
    ----------
    ratio : float or None
        Ratio of the candidate chosen, the median of `splits`, None counting as the furthest out; None if most splits
        rejected every candidate, or none has enough exceedances.
    threshold : float or None
        Threshold of the candidate chosen, in the gradient's unit.
    candidates : tuple of Candidate
        All that were tested, from the lowest threshold to the highest, with the p-values of the first split whose
        answer is the median.
    rejected : int
        How many of them, from the first on, were rejected.
    alpha : float
        Accepted share of wrong rejections among the rejections, in expectation.
    size, replicates, seed : int
        Options of the bootstrap.
    note : str
        Warning about the choice; empty if there is none.
    estimate : Stability or None
        Fit beyond the threshold chosen of the elements that this split did not see, so that its intervals are not
        narrowed by the choice; None without one.
    splits : tuple of float or None
        Ratio that each split answers; None where it rejects every candidate.
    """

    ratio: float | None
    threshold: float | None
    candidates: tuple[Candidate, ...]
    rejected: int
    alpha: float
    size: int
    replicates: int
    seed: int
    note: str = ""
    estimate: Stability | None = None
    splits: tuple[float | None, ...] = ()

    @property
    def range(self) -> tuple[float | None, float | None]:
        """What the splits answer furthest out (None where one of them rejects every candidate) and least far out."""
        if not self.splits:
            return None, None
        ordered = sorted(self.splits, key=_outwards)
        return ordered[0], ordered[-1]


def choose_threshold(
    x: Array | Sketch | Magnitudes,
    ratios: Sequence[float] | None = None,
    alpha: float = 0.05,
    size: int = 1000,
    replicates: int = 79,
    seed: int = 0,
    method: Method = "mle",
    on_progress: Callable[[], None] = no_progress,
    splits: int = 5,
) -> ThresholdChoice:
    """Choose the lowest threshold beyond which the excesses are generalized Pareto, and stay so further out.

    The elements are split in two at random. On one half each candidate is tested twice: by
    :func:`gradstats.goodness.bootstrap` with the upper-tail Anderson-Darling statistic on a subsample of its excesses,
    and by comparing its shape ξ with that beyond every further threshold, down to a hundred excesses. Beyond a
    sufficient threshold ξ stays the same, and the difference of two nested estimates, one of them efficient, has the
    difference of their variances (Hausman 1978); the largest of the differences counts (Šidák). ForwardStop (G'Sell,
    Wager, Chouldechova and Tibshirani 2016) rejects the first k̂ = max{k : −(1/k) Σ_{i≤k} ln(1 − pᵢ) ≤ alpha} of them,
    and the next is chosen (Bader, Yan and Zhang 2018). Its error control supposes independent p-values; those of nested
    excesses are not quite.

    The other half gives `estimate`, the fit beyond the threshold chosen: a choice makes the intervals of the elements
    that it looked at too narrow.

    One split answers by chance where candidates are close. So several are made, and the median of what they answer is
    chosen: no threshold where most of them reject every candidate. Their range says how far chance moves the answer.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.
    ratios : sequence of float, optional
        Exceedance ratios of the non-zero elements, in (0, 1]; by default 8 from 0.5 to 0.01, or to 1000 exceedances
        where that is further, evenly in the logarithm. Those that leave fewer than :data:`FEWEST` exceedances to either
        half are not tested.
    alpha : float
        Level of the error control, in (0, 1).
    size : int
        Excesses tested of each candidate. At full size a test only says that n is large.
    replicates : int
        Replicates of each bootstrap, of which there is one a candidate and split.
    seed : int
        Seed of the splits, the subsamples and the replicates.
    method : {"closed", "moments", "mle", "pwm"}
        Method of every fit, see :func:`gradstats.fit`.
    on_progress : callable
        Called without arguments after every replicate.
    splits : int
        How many random splits are made. With an even number the one of the two middle answers that is further out
        is chosen.

    Returns
    -------
    ThresholdChoice
        The candidate chosen, all that were tested, and the estimate.

    Raises
    ------
    FitError
        If there is no finite non-zero element.
    InputError
        If a ratio is outside (0, 1], alpha outside (0, 1), the seed negative, a number no whole one or more than a
        thousand splits, or the replicates too few for the bootstrap to reject anything at alpha.

    Notes
    -----
    The interval of `estimate` is about the excesses over the threshold chosen: the ξ that a fit of infinitely many of
    them would have. 93 to 97 % hold it for independent elements of generalized Pareto, Laplace, log-normal and
    Student's t laws, from 10,000 elements on. Where the law is not generalized Pareto beyond any threshold, ξ still
    moves further out by less than the elements can show: 24 % hold the limit 1/3 of Student's t with 3 degrees, 1 % the
    limit 0 of the log-normal (σ = 1), at 20,000. Dependent elements are not allowed for.
    """
    alpha = check_number(alpha, "alpha", 0, 1)
    replicates = check_count(replicates, "replicates", 1, MOST_REPLICATES)
    # here too: without candidates no bootstrap would look at it
    size = check_count(size, "size", 2)
    # the least p-value of a bootstrap is 1/(B + 1), of which the two tests together make 1 − (1 − p)²
    if -2 * math.log1p(-1 / (replicates + 1)) > alpha:
        least = math.ceil(-1 / math.expm1(-alpha / 2) - 1)
        raise InputError(
            f"{replicates} replicates are too few to reject at {alpha}: ask for at least {least}"
        )
    check_seed(seed)
    splits = check_count(splits, "splits", 1, _MOST_SPLITS)
    m = magnitudes_of(x)
    if ratios is None:
        ratios = np.geomspace(0.5, min(0.01, 1000 / m.count), 8).tolist()
    asked = sorted(check_ratios(ratios), reverse=True)
    # found at the lowest threshold that has any, and used for all: one sample is split and tested
    m = next(filter(None, (levels_beyond(m, target_count(r, m.count)) for r in asked)), m)
    at = {ratio: threshold_of(m, target_count(ratio, m.count)) for ratio in asked}
    further = _further(m, asked)

    def answer(split: int) -> ThresholdChoice:
        # words of a seed sequence do not depend on how many are drawn: a split answers alike whatever `splits` is
        cut, *seeds = (
            np.random.SeedSequence(seed)
            .generate_state((split + 1) * (len(at) + 1))[-len(at) - 1 :]
            .tolist()
        )
        half, unseen = _halves(m, np.random.default_rng(cut))
        # fits of all excesses in this half, where the bootstrap takes a subsample
        shapes = _shapes(half, [*at.values(), *further], method)
        candidates: list[Candidate] = []
        for (ratio, threshold), bootstrap_seed in zip(at.items(), seeds, strict=True):
            over = half.excesses(threshold)
            if min(over.count, unseen.excesses(threshold).count) < FEWEST:
                continue
            p_value, status = NAN, ""
            try:
                p_value = bootstrap(
                    over,
                    MODEL,
                    method,
                    statistic="ad",
                    size=size,
                    replicates=replicates,
                    seed=bootstrap_seed,
                    on_progress=on_progress,
                ).p_value
            except FitError as error:
                status = str(error)
            if threshold not in shapes:  # a subsample may have a fit where all of them have none
                p_value, status = NAN, status or "all of its excesses have no fit together"
            # told of both halves together
            beyond, tested = m.excesses(threshold).count, min(size, over.count)
            stable = _stable(shapes, threshold)
            candidates.append(Candidate(ratio, threshold, beyond, tested, p_value, status, stable))
        rejected = _forward_stop([c.p_both for c in candidates], alpha)
        chosen = candidates[rejected] if rejected < len(candidates) else None
        return ThresholdChoice(
            ratio=chosen.ratio if chosen else None,
            threshold=chosen.threshold if chosen else None,
            candidates=tuple(candidates),
            rejected=rejected,
            alpha=alpha,
            size=size,
            replicates=replicates,
            seed=seed,
            note=_note(candidates, chosen),
            estimate=stability_of(unseen, chosen.ratio, chosen.threshold, method)
            if chosen
            else None,
        )

    answers = [answer(split) for split in range(splits)]
    ratios_found = tuple(each.ratio for each in answers)
    # ascending: of two middle answers the first is further out
    median = sorted(ratios_found, key=_outwards)[(splits - 1) // 2]
    first = answers[ratios_found.index(median)]
    return replace(first, splits=ratios_found, note=_join(first.note, ratios_found, median))


def _outwards(ratio: float | None) -> float:
    """Return a ratio to sort by; no threshold at all is the furthest out."""
    return 0.0 if ratio is None else ratio


def _join(note: str, ratios: Sequence[float | None], median: float | None) -> str:
    """Add to a note how the splits differ, where they do."""
    if len(set(ratios)) == 1:
        return note
    none, n = ratios.count(None), len(ratios)
    if median is None:
        note = f"every candidate was rejected by {none} of {n} splits: no threshold is proposed"
    known = sorted(r for r in ratios if r is not None)
    span = f"{known[0]:g}" if known[0] == known[-1] else f"{known[0]:g} to {known[-1]:g}"
    differ = f"the {n} splits answer {span}" + (f", and none in {none}" if none else "")
    return "; ".join(filter(None, (note, differ)))


def _halves(m: Magnitudes, rng: np.random.Generator) -> tuple[Magnitudes, Magnitudes]:
    """Split magnitudes at random, each by itself, into two independent samples of about half as many."""
    # each magnitude of a cell goes to either half by itself
    first = rng.binomial(m.weight.astype(np.int64), 0.5).astype(np.float64)

    def part(weight: NDArray[np.float64]) -> Magnitudes:
        if isinstance(m, Levels):
            return m.part(weight)
        some = weight > 0
        return Magnitudes.from_cells(m.left[some], m.right[some], weight[some])

    return part(first), part(m.weight - first)


def _further(m: Magnitudes, asked: Sequence[float]) -> list[float]:
    """Return thresholds beyond the last candidate, the last of them over a hundred magnitudes of each half."""
    # twice the least number, as either half gets about one of two
    last, least = min(asked, default=1.0), 2 * FEWEST / m.count
    if last <= least:
        return []
    ratios = np.geomspace(last, least, _FURTHER + 1)[1:]
    return [threshold_of(m, target_count(float(r), m.count)) for r in ratios]


def _shapes(m: Magnitudes, thresholds: Sequence[float], method: Method) -> dict[float, Fit]:
    """Fit the excesses over each threshold, where there are enough and they have a fit."""
    fits = {}
    for threshold in thresholds:
        over = m.excesses(threshold)
        if over.count >= 0.8 * FEWEST:  # about a hundred: the halves are random
            with suppress(FitError):
                fits[threshold] = fit(over, MODEL, method)
    return fits


def _stable(shapes: Mapping[float, Fit], threshold: float) -> float:
    """Return the p-value of one shape beyond a threshold and all further ones."""
    from scipy.special import ndtr

    if threshold not in shapes:
        return NAN
    here, p_values = shapes[threshold], []
    for other, further in shapes.items():
        # levels may leave the same excesses beyond two thresholds: their fits do not differ
        if other > threshold and further.count < here.count:
            # an estimate that is not efficient has no such variance, but one below the sum
            sign = -1 if here.method == "mle" else 1
            # under one shape the variance goes as 1/n: n(here)/n(further) times that of this threshold,
            # minus that of this one (Hausman), or at most plus it
            variance = here.stderr["c"] ** 2 * (here.count / further.count + sign)
            z = (further.params["c"] - here.params["c"]) / math.sqrt(variance)
            p_values.append(2 * float(ndtr(-abs(z))))
    p_values = [p for p in p_values if not math.isnan(p)]
    return 1 - (1 - min(p_values)) ** len(p_values) if p_values else NAN


def _forward_stop(p_values: Sequence[float], alpha: float) -> int:
    """Return k̂; a missing p-value adds nothing to the sum, so that its candidate is never chosen."""
    total, rejected = 0.0, 0
    for k, p in enumerate(p_values, 1):
        # Without a term the mean only falls, so k̂ cannot stop just before it.
        if not math.isnan(p):
            total -= math.log1p(-p) if p < 1 else -math.inf
        if total / k <= alpha:
            rejected = k
    return rejected


def _note(candidates: Sequence[Candidate], chosen: Candidate | None) -> str:
    """Return the warning about a choice."""
    if not candidates:
        return f"no candidate leaves {FEWEST} exceedances: nothing was tested"
    if chosen is None:
        return "every candidate was rejected: no threshold is proposed"
    if chosen.tested < _SMALL:
        return f"tested on {chosen.tested} excesses, with little power: not rejected is not true"
    return ""
