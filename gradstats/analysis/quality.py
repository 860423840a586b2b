"""Estimation quality, k̂/k: elements that a threshold keeps over those it was asked to keep."""

# Size: two fifths of its lines are docstrings; k̂/k is replayed, summarised and compared in one place.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, Unpack

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.over import Spread, shares, subset_of
from gradstats.analysis.pieces import Submit, evaluate
from gradstats.console import followed, no_progress
from gradstats.errors import InputError, unknown
from gradstats.primitives import Array, Selection, moments, numel_of, top_candidates
from gradstats.primitives.arrays import as_numpy, as_positions
from gradstats.primitives.ratio import RATIOS, check_ratios, check_several, each_once
from gradstats.statistics.dependence import RUN, design_effect
from gradstats.statistics.resampling import add_holm, mean_interval
from gradstats.statistics.solution import Z95
from gradstats.tables import Quality, Records
from gradstats.thresholds import ESTIMATORS, Estimate, Estimator, EstimatorName, make_estimator
from gradstats.thresholds.base import RandomEstimator
from gradstats.trace import Kind
from gradstats.trace.sources import Source, Subset, layer_parts, open_source

__all__ = [
    "EMPTY",
    "INFINITE",
    "QUANTILES",
    "by_step",
    "differences",
    "each_record",
    "fitted_floor",
    "inner_90",
    "log_quality",
    "noise_floor",
    "quality",
    "quality_series",
    "series_of",
    "spread_of",
    "stage_budget",
    "summarise",
    "telling",
]

Options: TypeAlias = Mapping[str, Mapping[str, Any]]
QUANTILES = "5 % to 95 %"
"""What :func:`spread_of` says of quantiles."""
_FEWEST_FOR_QUANTILES = 20
"""Values below which the 5 % and 95 % quantiles lie between the two outermost ones."""


def noise_floor(k: int, cluster: float = 1.0) -> float:
    """Return the half-width of the interval in which k̂/k of a known law lies in 95 of 100 samples.

    It is no test of an estimator: one that looks at the sample stays inside more often, as the threshold of a fitted
    Laplace does (:func:`fitted_floor`), and with dependent elements a perfect law does so less often: in clusters of
    10 to 20 that share a scale 61 to 64 of 100 times.

    Parameters
    ----------
    k : int
        Number of elements asked for.
    cluster : float, optional
        Number of neighbours that are large together; 1 for independent elements.

    Returns
    -------
    float
        1.96 √(cluster/k), the interval is 1 ± this; infinite for k = 0.
    """
    return Z95 * math.sqrt(cluster / k) if k else math.inf


def fitted_floor(k: int, ratio: float) -> float:
    """Return the noise floor of k̂/k for a Laplace whose scale is estimated from the same sample.

    The scale goes up with the sample's tail, so less is left to chance: at a ratio of 0.1 three fifths of
    :func:`noise_floor`, at 0.001 nearly all of it.

    Parameters
    ----------
    k : int
        Number of elements asked for.
    ratio : float
        Kept fraction δ, in (0, 1].

    Returns
    -------
    float
        1.96 √((1 − δ − δ ln²δ)/k), the interval is 1 ± this; infinite for k = 0.
    """
    # rounding at a ratio of 1, where nothing is left to chance
    left = max(1 - ratio - ratio * math.log(ratio) ** 2, 0.0)
    return noise_floor(k) * math.sqrt(left)


def inner_90(values: NDArray[np.floating]) -> tuple[float, float]:
    """Return the interval that holds the middle 90 % of some values; of fewer than 20, the least and the largest.

    Quantiles of few values say less than they seem to: between those of 5 and 95 % lie half of four values, and the
    next value 81 times of 100 after 20 values, 87 after 50, 90 after 200.

    Parameters
    ----------
    values : ndarray
        Finite numbers, at least one.

    Returns
    -------
    tuple of float
        Their 5 % and 95 % quantiles, or their range; :func:`spread_of` says which.
    """
    ends = (0.0, 1.0) if values.size < _FEWEST_FOR_QUANTILES else (0.05, 0.95)
    low, high = np.quantile(values, ends)
    return float(low), float(high)


def spread_of(count: int) -> str:
    """Return what :func:`inner_90` gives of so many values, in words.

    Parameters
    ----------
    count : int
        Number of values.
    """
    return "least to largest" if count < _FEWEST_FOR_QUANTILES else QUANTILES


@shares(Spread)
def quality_series(
    source: object,
    ratios: Sequence[float] = RATIOS,
    estimators: Iterable[EstimatorName | str] | None = None,
    *,
    options: Options | None = None,
    **over: Unpack[Spread],
) -> Records:
    """Replay estimators over every gradient of a source, one record each.

    Each estimator has one instance per ratio, rank and kind, which sees the steps in order, as it would in training.

    Parameters
    ----------
    source : str, Path, Trace, array_like, mapping of str to array_like, or Source
        Trace or its path, gradient file, array, or arrays by layer name.
    ratios : sequence of float, optional
        Kept fractions k/d, each in (0, 1].
    estimators : iterable of str, optional
        Names of :data:`gradstats.thresholds.ESTIMATORS`; all by default.
    options : dict of dict, optional
        Options by estimator's name, such as ``{"sidco-e": {"stages": 2}}``.
    **over : Unpack[Spread]
        Gradients and layers to look at, as in :class:`gradstats.analysis.over.Spread`.

    Returns
    -------
    Records
        trace, step, rank, kind, layer, estimator, ratio, numel, k, selected (k̂), quality (k̂/k), energy_error
        (‖g − C(g)‖/σ_k − 1, what convergence feels: negative where more than k were kept), threshold, seen (gradients
        that the instance had seen before), fresh (k̂/k of an instance that has seen none), design (how many times the
        variance of the k largest elements' numbers in runs of 512 neighbours is that of independent elements: what
        is said of k elements holds of k/design; NaN of fewer than 20 runs), status.

    Raises
    ------
    InputError
        If an estimator is unknown, a ratio is outside (0, 1], or nothing matches.
    """
    return series_of(
        open_source(source),
        subset_of(over),
        ratios,
        estimators,
        options=options,
        client=over["client"],
        on_progress=over["on_progress"],
    )


def series_of(
    source: Source,
    subset: Subset,
    ratios: Sequence[float] = RATIOS,
    estimators: Iterable[EstimatorName | str] | None = None,
    *,
    options: Options | None = None,
    client: Any = None,
    on_progress: Callable[[], None] = no_progress,
) -> Records:
    """Return the records of :func:`quality_series` of a source that is open.

    Parameters
    ----------
    source : Source
        Source to read.
    subset : Subset
        Gradients and layers to look at.
    ratios : sequence of float, optional
        Kept fractions k/d, each in (0, 1].
    estimators : iterable of str, optional
        Names of :data:`gradstats.thresholds.ESTIMATORS`; all by default.
    options : dict of dict, optional
        Options by estimator's name.
    client : distributed.Client, optional
        Cluster that does the work.
    on_progress : callable, optional
        Called after every gradient.

    Returns
    -------
    Records
        Records as in :func:`quality_series`.
    """
    if client is not None:
        # a generator would be empty after the first task
        names = None if estimators is None else check_several(estimators, "estimators")
        work = partial(series_of, ratios=ratios, estimators=names, options=options)
        return _spread(work, source, subset, client, on_progress)
    return Records(
        each_record(
            source, subset, ratios, estimators, options=options, on_progress=on_progress, fresh=True
        )
    )


def _spread(
    work: Callable[[Source, Subset], Records],
    source: Source,
    subset: Subset,
    client: Any,
    on_progress: Callable[[], None],
) -> Records:
    """Return the records of a source, where each rank and kind is a task: rules learn from step to step."""
    # counts how often to report progress; a Counter keeps the order of the keys
    gradients = Counter((rank, kind) for rank, kind, _ in subset.keys(source))

    def plan(submit: Submit, series: tuple[int, Kind]) -> Any:
        rank, kind = series
        return submit(work, source, replace(subset, ranks=[rank], kinds=[kind]))

    records = Records()
    for number, rows in zip(
        gradients.values(), evaluate(plan, gradients, client, "series"), strict=True
    ):
        records += rows
        for _ in range(number):
            on_progress()
    return records


def each_record(
    source: Source,
    subset: Subset,
    ratios: Sequence[float] = RATIOS,
    estimators: Iterable[EstimatorName | str] | None = None,
    *,
    options: Options | None = None,
    on_progress: Callable[[], None] = no_progress,
    fresh: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the records of :func:`series_of` one by one, so that those of a long run need not be held together.

    Parameters
    ----------
    source : Source
        Source to read.
    subset : Subset
        Gradients and layers to look at.
    ratios : sequence of float, optional
        Kept fractions k/d, each in (0, 1].
    estimators : iterable of str, optional
        Names of :data:`gradstats.thresholds.ESTIMATORS`; all by default.
    options : dict of dict, optional
        Options by estimator's name.
    on_progress : callable, optional
        Called after every gradient.
    fresh : bool, optional
        Run rules that remember once more without their past; otherwise the field ``fresh`` says what ``quality`` does.

    Yields
    ------
    dict
        A record as in :func:`quality_series`.
    """
    best: _BestK | None = None
    for played in _replay(source, subset, ratios, estimators, options, on_progress, fresh=fresh):
        # all rules and ratios get one array for a gradient: what its k largest hold is found once
        if best is None or best.values is not played.values:
            best = _BestK(played.values)
        count, k = len(played.selection), played.estimate.k
        yield played.labels | {
            "numel": numel_of(played.values),
            "k": k,
            "selected": count,
            "quality": count / k if k else float("nan"),
            "energy_error": best.energy_error(played.selection, k),
            "threshold": played.estimate.threshold,
            "seen": played.past_gradients,
            "fresh": played.fresh / k if k else float("nan"),
            "design": best.design(k),
            "status": _status(played, count, best),
        }


@dataclass(frozen=True, slots=True)
class _Played:
    """One estimator on one gradient."""

    labels: dict[str, Any]
    values: Array
    estimate: Estimate
    selection: Selection
    past_gradients: int
    """Gradients that it has seen before."""
    fresh: int
    """Elements that one keeps that has seen none."""


def _replay(
    source: Source,
    subset: Subset,
    ratios: Sequence[float],
    estimators: Iterable[EstimatorName | str] | None,
    options: Options | None,
    on_progress: Callable[[], None],
    *,
    fresh: bool = False,
) -> Iterator[_Played]:
    """Run estimators over the gradients of a source, steps in order, each with one instance per series.

    With `fresh`, a rule that remembers runs once more on each gradient without its past.
    """
    every = ESTIMATORS if estimators is None else estimators
    names = each_once(check_several(every, "estimators"))
    ratios = check_ratios(ratios)
    for name in options or ():
        if name not in ESTIMATORS:
            raise unknown("estimator of options", name, ESTIMATORS)
    parameters = subset.parameters(source)
    live: dict[tuple[str, float, int, str, str], Estimator] = {}
    past_gradients: Counter[tuple[str, float, int, str, str]] = Counter()
    for rank, kind, step in followed(subset.keys(source), "gradients"):
        captured, where = source.read(rank, kind, step), source.labels(rank, kind, step)
        for layer, values in layer_parts(source, captured, parameters):
            for name in names:
                for ratio in ratios:
                    # a layer is a series of its own: rules remember thresholds, which differ between layers
                    key, keywords = (name, ratio, rank, kind, layer), (options or {}).get(name, {})
                    if key not in live:
                        live[key] = make_estimator(name, **keywords)
                    labels = where | {"layer": layer, "estimator": name, "ratio": ratio}
                    # the rule with its past goes on; the one without is made anew each time
                    estimate, selection = live[key].select(values, ratio)
                    anew = len(selection)
                    # the first gradient is new to every rule: nothing to run twice
                    if fresh and past_gradients[key] and _remembers(live[key]):
                        anew = len(make_estimator(name, **keywords).select(values, ratio)[1])
                    yield _Played(labels, values, estimate, selection, past_gradients[key], anew)
                    # after the record, which counts the gradients before
                    past_gradients[key] += 1
        on_progress()


def _remembers(rule: Estimator) -> bool:
    """Tell whether what a rule does depends on the gradients that it has seen."""
    # a random generator's state is no memory of gradients
    return bool(rule.state_dict()) and not isinstance(rule, RandomEstimator)


EMPTY = "no element is finite and not zero"
"""Status of a gradient of which no rule can keep anything."""
INFINITE = "infinite elements were kept beside at most k finite ones"
"""Status of a gradient of which a rule keeps more than k, as infinities are above every threshold."""
_ROUNDING = 1e-9
"""Relative difference of two sums of squares that is one of rounding."""


def _status(played: _Played, count: int, best: _BestK) -> str:
    """Return what there is to say of a count beside its number, or ``ok``."""
    if best.empty:
        return EMPTY
    # NaN is above no threshold, and finite elements beyond k are not of the infinite ones
    if best.nonfinite and count > played.estimate.k >= count - _infinite(played.selection):
        return INFINITE
    if count < played.estimate.k and played.estimate.threshold == 0:
        return "all non-zero elements were kept: there are fewer than asked for"
    if "beyond" in played.estimate.details:
        largest = "the largest replaces it" if count else "nothing is kept"
        return f"no element reaches the rule's threshold: {largest}"
    return "ok"


def _infinite(selection: Selection) -> int:
    return int(np.count_nonzero(np.isinf(as_numpy(selection.values))))


class _BestK:
    """What the k largest elements of one gradient hold, and how they lie together; remembered by k."""

    def __init__(self, values: Array) -> None:
        self.values = values
        # the sum of logarithms is not needed
        sums = moments(values, log=False)
        self._total, self.empty = sums.sum_squares, not sums.count
        self.nonfinite = sums.nonfinite > 0
        self._energies: dict[int, float] = {}
        self._design: dict[int, float] = {}

    def energy_error(self, selection: Selection, k: int) -> float:
        """Return ‖g − C(g)‖/σ_k − 1; NaN where best-k leaves nothing."""
        self._look(k)
        energy = _energy(as_numpy(selection.values).astype(np.float64))
        best = self._total - self._energies[k]
        # also false for NaN; k may be all non-zero elements, which leaves nothing
        if not best > 1e-12 * self._total:
            return float("nan")
        # more than k elements may hold nearly all of the energy
        error = math.sqrt(max(self._total - energy, 0.0) / best) - 1
        return 0.0 if abs(error) < _ROUNDING else error

    def design(self, k: int) -> float:
        """Return the variance of the counts in runs of neighbours, over that of independent elements."""
        self._look(k)
        return self._design[k]

    def _look(self, k: int) -> None:
        if k in self._energies:
            return
        chosen = top_candidates(self.values, k)[1] if k else None
        magnitudes = [] if chosen is None else np.abs(as_numpy(chosen.values))
        # top_candidates keeps all ties at the threshold; only k elements count
        largest = np.sort(np.asarray(magnitudes, np.float64))[::-1][:k]
        self._energies[k], self._design[k] = _energy(largest), math.nan
        if chosen is not None and (runs := numel_of(self.values) // RUN):
            # the last run is shorter than the others, and not counted
            counts = np.bincount(as_positions(chosen.indices) // RUN, minlength=runs)[:runs]
            sums = float(counts.sum()), float(np.square(counts).sum())
            self._design[k] = design_effect(runs, *sums)


def _energy(values: NDArray[np.float64]) -> float:
    # beyond float64's range it is infinite, and the error not known
    with np.errstate(over="ignore"):
        return float(np.square(values).sum())


@shares(Spread)
def quality(
    source: object,
    ratios: Sequence[float] = RATIOS,
    estimators: Iterable[EstimatorName | str] | None = None,
    *,
    options: Options | None = None,
    **over: Unpack[Spread],
) -> Records:
    """Compare the number of elements that estimated thresholds keep with the target, k̂/k.

    Parameters
    ----------
    source : str, Path, Trace, array_like, mapping of str to array_like, or Source
        Trace or its path, gradient file, array, or arrays by layer name.
    ratios : sequence of float, optional
        Kept fractions k/d, each in (0, 1].
    estimators : iterable of str, optional
        Names of :data:`gradstats.thresholds.ESTIMATORS`; all by default.
    options : dict of dict, optional
        Options by estimator's name, such as ``{"sidco-e": {"stages": 2}}``.
    **over : Unpack[Spread]
        Gradients and layers to look at, as in :class:`gradstats.analysis.over.Spread`.

    Returns
    -------
    Records
        One record per trace, estimator, ratio, kind and layer (``all`` is the whole gradient): mean of k̂/k over steps
        and ranks; mean_low and mean_high, the 95 % interval of the mean by blocks of neighbouring steps
        (:func:`gradstats.statistics.resampling.mean_interval`; block is their length, and mean_status says why there is
        no interval, as of fewer than 20 steps); low and high, the interval that holds 90 % of the gradients looked at
        (of fewer than 20 gradients, all of them: ``spread`` says which); min, max, n (gradients; without the first one
        of a rule that takes its threshold from it); k; fresh, the mean of k̂/k of instances without a past;
        energy_error, the mean of ‖g − C(g)‖/σ_k − 1; design, the median design effect: the floors widen by its root;
        floor, the noise floor 1.96/√k of a known law and independent elements, and
        floor_low and floor_high, 1 ∓ floor; floor_fitted, that of a Laplace fitted to the same sample. With elements in
        clusters of ten both are √10 times as wide. status is ``ok``, or says of the first gradient where it is so that
        all non-zero elements were kept, or that none reaches the rule's threshold. Gradients of which no element is
        finite and not zero count only where there are no others.

    Raises
    ------
    InputError
        If an estimator is unknown, a ratio is outside (0, 1], or nothing matches.

    Notes
    -----
    Stateful rules (reuse, feedback, warm start, adaptive stages) see the captured steps as if they were adjacent. On a
    trace of a few distant steps they look worse than in training.
    """
    return summarise(
        series_of(
            open_source(source),
            subset_of(over),
            ratios,
            estimators,
            options=options,
            client=over["client"],
            on_progress=over["on_progress"],
        )
    )


def summarise(series: Iterable[dict[str, Any]]) -> Records:
    """Reduce the records of :func:`quality_series` to those of :func:`quality`.

    Parameters
    ----------
    series : iterable of dict
        Records of :func:`quality_series`.

    Returns
    -------
    Records
        Records as in :func:`quality`.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in series:
        labels = ("trace", "estimator", "ratio", "kind", "layer")
        key = tuple(record[label] for label in labels)
        groups.setdefault(key, []).append(record)
    return Quality(_summary(records) for records in groups.values())


def telling(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of one rule on gradients that tell something of it.

    Those are left out that it took its threshold from, and those of which no element is finite and not zero.

    Parameters
    ----------
    records : sequence of dict
        Records of :func:`quality_series` of one rule.
    """
    # estimators from outside may not say
    learns = getattr(ESTIMATORS.get(records[0]["estimator"]), "learns_first", False)
    known = [r for r in records if r["seen"] or not learns]
    return [r for r in known if r.get("status") != EMPTY]


def log_quality(record: dict[str, Any]) -> float:
    """Return ln(k̂/k) of a record of :func:`quality_series`, by half an element where none was kept.

    Sending nothing is then no better than sending twice as much.

    Parameters
    ----------
    record : dict
        The record.
    """
    return math.log(max(record["selected"], 0.5) / max(record["k"], 1))


def _summary(series: list[dict[str, Any]]) -> dict[str, Any]:
    # a trace of one gradient has no other to judge such a rule by
    records = telling(series) or series
    values = np.array([r["quality"] for r in records])
    designs = [r["design"] for r in records if math.isfinite(r["design"])]
    # NaN where fewer elements are not zero than were asked for
    errors = [r["energy_error"] for r in records if math.isfinite(r["energy_error"])]
    k = records[0]["k"]
    low, high = inner_90(values)
    floor = noise_floor(k)
    # ranks of a step are not independent, so blocks are of steps
    over = mean_interval(by_step(records, "quality"))
    return {
        "trace": records[0]["trace"],
        "estimator": records[0]["estimator"],
        "ratio": records[0]["ratio"],
        "kind": records[0]["kind"],
        "layer": records[0]["layer"],
        "mean": float(values.mean()),
        "mean_low": over.low,
        "mean_high": over.high,
        "mean_status": over.reason or "ok",
        "block": over.length,
        "low": low,
        "high": high,
        "spread": spread_of(len(records)),
        "min": float(values.min()),
        "max": float(values.max()),
        "n": len(records),
        "k": k,
        "fresh": float(np.mean([r["fresh"] for r in records])),
        "energy_error": float(np.mean(errors)) if errors else math.nan,
        "design": float(np.median(designs)) if designs else math.nan,
        "floor": floor,
        "floor_low": 1 - floor,
        "floor_high": 1 + floor,
        "floor_fitted": fitted_floor(k, records[0]["ratio"]),
        "status": next((r["status"] for r in records if r.get("status", "ok") != "ok"), "ok"),
    }


def by_step(records: Sequence[dict[str, Any]], name: str) -> NDArray[np.float64]:
    """Return the mean over ranks of a field at each step, in the order of the steps.

    Parameters
    ----------
    records : sequence of dict
        Records of one series.
    name : str
        The field.
    """
    steps: dict[int, list[float]] = {}
    for record in records:
        steps.setdefault(record["step"], []).append(record[name])
    # blocks of neighbours need the order of time
    return np.array([np.mean(steps[step]) for step in sorted(steps)])


def differences(series: Iterable[dict[str, Any]], versus: str) -> Records:
    """Compare every rule with one of them, step by step, on the same gradients.

    Both rules see the same gradient, so its own ups and downs cancel in the difference, which two intervals beside each
    other do not show.

    Parameters
    ----------
    series : iterable of dict
        Records of :func:`quality_series`, of two estimators or more.
    versus : str
        Estimator that the others are compared with.

    Returns
    -------
    Records
        One record per trace, estimator, ratio, kind and layer: versus; n (steps, without the first one of a rule that
        takes its threshold from it); difference, the mean over steps of
        k̂/k of the estimator minus that of `versus`, with its 95 % interval difference_low and difference_high; error,
        the same of |ln k̂/k|, below 0 where the estimator is closer to k, with error_low and error_high; p_value of no
        difference in |ln k̂/k|, and p_holm, corrected for the number of rules, ratios and layers of a trace and kind;
        status, why there is no interval.

    Raises
    ------
    InputError
        If the series has no such estimator, or no other.
    """
    groups: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for record in series:
        key = tuple(record[label] for label in ("trace", "ratio", "kind", "layer"))
        # by half an element where none was kept: ln 0 would swallow every mean
        far = record | {"error": abs(log_quality(record))}
        groups.setdefault(key, {}).setdefault(record["estimator"], []).append(far)
    if any(versus not in rules or len(rules) < 2 for rules in groups.values()):
        raise InputError(f"a comparison takes {versus!r} and another estimator: ask for both")
    comparisons = Records()
    for (trace, ratio, kind, layer), rules in groups.items():
        for name, records in rules.items():
            if name == versus:
                continue
            pair = [telling(r) or r for r in (records, rules[versus])]
            places = [{(r["rank"], r["step"]) for r in part} for part in pair]
            # what one of them learned from is left out of both; a single gradient stays, as in `quality`
            common = places[0] & places[1]
            mine, other = (
                [r for r in part if not common or (r["rank"], r["step"]) in common] for part in pair
            )
            difference, error = (
                # step by step: both rules saw the same gradient
                mean_interval(by_step(mine, field) - by_step(other, field))
                for field in ("quality", "error")
            )
            labels = {"trace": trace, "estimator": name, "versus": versus, "ratio": ratio}
            labels |= {"kind": kind, "layer": layer, "n": len({r["step"] for r in mine})}
            record = labels | {
                "difference": difference.mean,
                "difference_low": difference.low,
                "difference_high": difference.high,
                "error": error.mean,
                "error_low": error.low,
                "error_high": error.high,
                "p_value": error.p_value,
                "p_holm": math.nan,
                "status": difference.reason or error.reason or "ok",
            }
            comparisons.append(record)
    add_holm(comparisons, "p_value", "p_holm", ("trace", "kind"))
    return comparisons


@shares(Spread)
def stage_budget(
    source: object,
    ratios: Sequence[float] = RATIOS,
    estimators: Iterable[EstimatorName | str] | None = None,
    *,
    options: Options | None = None,
    **over: Unpack[Spread],
) -> Records:
    """Split the error of multi-stage thresholds over their stages.

    Each stage asks for a share of what the last one left, and gets another. The product of got/asked over the stages
    is k̂/k, so the factors say which stage is to blame.

    Parameters
    ----------
    source : str, Path, Trace, array_like, mapping of str to array_like, or Source
        Trace or its path, gradient file, array, or arrays by layer name.
    ratios : sequence of float, optional
        Kept fractions k/d, each in (0, 1].
    estimators : iterable of str, optional
        Names of :data:`gradstats.thresholds.ESTIMATORS`; all by default. Those without stages have no records.
    options : dict of dict, optional
        Options by estimator's name, such as ``{"sidco-e": {"stages": 2}}``.
    **over : Unpack[Spread]
        Gradients and layers to look at, as in :class:`gradstats.analysis.over.Spread`.

    Returns
    -------
    Records
        trace, step, rank, kind, layer, estimator, ratio, stage (from 1), asked, got, factor (got/asked), quality (the
        product of the factors up to this stage), blame (whether its factor is the farthest from 1 of the stages).

    Raises
    ------
    InputError
        If an estimator is unknown, a ratio is outside (0, 1], or nothing matches.
    """
    opened, subset, on_progress = open_source(source), subset_of(over), over["on_progress"]
    names = None if estimators is None else check_several(estimators, "estimators")
    if (client := over["client"]) is not None:
        work = partial(_stages, ratios=ratios, estimators=names, options=options)
        return _spread(work, opened, subset, client, on_progress)
    return _stages(opened, subset, ratios, names, options, on_progress)


def _stages(
    source: Source,
    subset: Subset,
    ratios: Sequence[float],
    estimators: Sequence[str] | None,
    options: Options | None,
    on_progress: Callable[[], None] = no_progress,
) -> Records:
    """Return the records of :func:`stage_budget` of a source that is open."""
    records = Records()
    for played in _replay(source, subset, ratios, estimators, options, on_progress):
        stages = played.estimate.details.get("stages", [])
        # what enters each stage, and last what leaves the final one
        counts = [stage["count"] for stage in stages] + [len(played.selection)]
        shares = [after / before for before, after in pairwise(counts)]
        factors = [got / stage["ratio"] for got, stage in zip(shares, stages, strict=True)]
        # a stage that keeps nothing is infinitely far off
        far = [abs(math.log(factor)) if factor else math.inf for factor in factors]
        for i, stage in enumerate(stages):
            numbers = {"stage": i + 1, "asked": stage["ratio"], "got": shares[i]}
            numbers |= {"factor": factors[i], "quality": math.prod(factors[: i + 1])}
            records.append(played.labels | numbers | {"blame": far[i] == max(far)})
    return records
