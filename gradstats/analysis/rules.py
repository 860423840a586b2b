"""Which rule hits k: the mean of k̂/k over gradients that a rule did not learn from, at all ratios in use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gradstats.analysis.quality import EMPTY, by_step, log_quality, noise_floor, telling
from gradstats.statistics.resampling import FEWEST_IN_SERIES, mean_interval
from gradstats.tables import Records

__all__ = ["COUNTING", "TOLERANCE", "judged_rules"]

COUNTING = ("exact", "warm-exact", "histogram", "redsync-trimmed")
"""Rules that count elements until they have k; the others estimate."""
TOLERANCE = 1.25
"""Factor from k within which the mean number of elements of a rule that hits k lies."""
_FEWEST_FOR_INTERVAL = 5
"""Steps from which their mean has an interval; of fewer, their range and what chance may add is one."""
_FEWEST_ELEMENTS = 10
"""Elements wanted below which chance alone decides."""


def judged_rules(series: Iterable[dict[str, Any]]) -> Records:
    """Judge rules by the records of :func:`gradstats.quality_series`, the one nearest to k first.

    What counts is ln(k̂/k), so that twice and half of k are equally far. A rule that takes its threshold from the first
    gradient is judged on the later ones.

    Parameters
    ----------
    series : iterable of dict
        Records of :func:`gradstats.quality_series`.

    Returns
    -------
    Records
        One record per trace, kind, layer and estimator: n (gradients judged); by ratio, mean (the geometric mean of
        k̂/k over all ranks, or of a rank that misses k while all together do not), low and high (its 95 % interval, see
        Notes) and nothing (gradients of which no element was kept); ranks, by ratio such a rank;
        interval, whether these are intervals, and no widened ranges, at every ratio; empty, the gradients of which no
        element can be kept, which are left out; far, the largest |ln mean| over the ratios, infinite where nothing was
        kept; hits, whether the interval is within :data:`TOLERANCE` of 1 at every ratio: True, False where it lies
        outside at one of them, else None; reason.

    Notes
    -----
    From 20 steps on intervals are those of :func:`gradstats.statistics.resampling.mean_interval`, from 5 on those of
    Student's t, which take steps as independent. Of fewer steps they are the range of k̂/k, widened by what chance may
    do to one gradient, its design effect included.
    """
    groups: dict[tuple[Any, ...], dict[float, list[dict[str, Any]]]] = {}
    for record in series:
        key = tuple(record[n] for n in ("trace", "kind", "layer", "estimator"))
        groups.setdefault(key, {}).setdefault(record["ratio"], []).append(record)
    records = Records()
    for (trace, kind, layer, estimator), ratios in groups.items():
        labels = {"trace": trace, "kind": kind, "layer": layer, "estimator": estimator}
        records.append(labels | _judged(ratios))
    # layers in the order of the model; rules that cannot be judged come last: NaN has no place in an order
    place = {layer: i for i, layer in enumerate(dict.fromkeys(r["layer"] for r in records))}
    records.sort(
        key=lambda r: (r["trace"], r["kind"], place[r["layer"]], math.isnan(r["far"]), r["far"])
    )
    return records


def _judged(ratios: dict[float, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the verdict on one rule."""
    mean, low, high, nothing, alone = {}, {}, {}, {}, {}
    n, hits, interval = 0, [], True
    first = next(iter(ratios.values()))  # the same gradients at every ratio
    empty = sum(r.get("status") == EMPTY for r in first)
    for ratio, rows in ratios.items():
        # a threshold taken from a gradient hits it by construction; of a few elements the count is chance
        judged = [r for r in telling(rows) if r["k"] >= _FEWEST_ELEMENTS]
        if not judged:
            continue
        n = max(n, len(judged))
        over = _interval(judged)
        if not (outside := _outside(over)) and (missed := _rank_that_misses(judged)):
            alone[ratio], over, outside = *missed, True
        mean[ratio], low[ratio], high[ratio], known = over
        interval &= known
        nothing[ratio] = sum(r["selected"] == 0 for r in judged)
        within = low[ratio] >= 1 / TOLERANCE and high[ratio] <= TOLERANCE
        # a mean near k is no hit where one gradient was sent empty
        hits.append(True if within and not nothing[ratio] else False if outside else None)
    numbers = {"n": n, "mean": mean, "low": low, "high": high, "interval": interval}
    numbers |= {"nothing": nothing, "ranks": alone, "empty": empty}
    if not mean:
        reason = f"fewer than {_FEWEST_ELEMENTS} elements asked for"
        if empty == len(first):
            reason = EMPTY
        elif not any(map(telling, ratios.values())):
            reason = "the only gradient there is gave the threshold"
        return numbers | {"far": math.nan, "hits": None, "reason": reason}
    # infinite: a rule that sent nothing once is behind all that never did
    far = max(math.inf if nothing[r] else abs(math.log(mean[r])) for r in mean)
    # one ratio outside decides; one undecided leaves it open
    verdict = False if False in hits else None if None in hits else True
    return numbers | {"far": far, "hits": verdict, "reason": ""}


_Over: TypeAlias = tuple[float, float, float, bool]
"""A geometric mean of k̂/k with its 95 % interval, or with a range, and whether it is an interval."""


def _outside(over: _Over) -> bool:
    _, low, high, _ = over
    return high < 1 / TOLERANCE or low > TOLERANCE


def _rank_that_misses(rows: Sequence[dict[str, Any]]) -> tuple[int, _Over] | None:
    """Return the rank whose own mean is surely outside the tolerance and farthest off: a mean over ranks hides it."""
    ranks: dict[int, list[dict[str, Any]]] = {}
    for r in rows:
        ranks.setdefault(r["rank"], []).append(r)
    if len(ranks) < 2:
        return None
    logs = {rank: float(np.mean([*map(log_quality, records)])) for rank, records in ranks.items()}
    # of hundreds of ranks few need an interval
    far = [rank for rank, log in logs.items() if abs(log) > math.log(TOLERANCE)]
    misses = {rank: over for rank in far if _outside(over := _interval(ranks[rank]))}
    worst = max(misses, key=lambda rank: abs(logs[rank]), default=None)
    return None if worst is None else (worst, misses[worst])


def _interval(rows: Sequence[dict[str, Any]]) -> _Over:
    """Return the geometric mean of k̂/k with its 95 % interval, or with a range, and whether it is an interval."""
    logs = by_step([r | {"log": log_quality(r)} for r in rows], "log")
    mean = float(logs.mean())
    # a series that wanders like a random walk has no such interval, and falls through to the range
    if logs.size >= FEWEST_IN_SERIES and not (over := mean_interval(logs)).reason:
        return math.exp(mean), math.exp(over.low), math.exp(over.high), True
    if _FEWEST_FOR_INTERVAL <= logs.size < FEWEST_IN_SERIES:
        from scipy.special import stdtrit

        half = float(stdtrit(logs.size - 1, 0.975) * logs.std(ddof=1) / math.sqrt(logs.size))
        return math.exp(mean), math.exp(mean - half), math.exp(mean + half), True
    # the widest: the range has no other allowance for dependence
    design = max((r["design"] for r in rows if math.isfinite(r["design"])), default=1.0)
    # a design effect below 1 makes no range narrower
    chance = noise_floor(rows[0]["k"], max(design, 1.0))
    # of so few steps the range, widened by what chance does to one gradient
    return math.exp(mean), math.exp(logs.min() - chance), math.exp(logs.max() + chance), False
