"""Estimation quality: how many elements a threshold keeps, against how many it was asked to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradstats.primitives import Array, Selection, moments, numel_of, top_candidates
from gradstats.primitives.arrays import as_numpy
from gradstats.thresholds import Estimate, Estimator, make_estimator
from gradstats.trace.sources import layer_parts, open_source

__all__ = ["noise_floor", "quality", "quality_series", "stage_budget", "summarise"]


def noise_floor(k: int) -> float:
    """Return 1.96/√k: k̂/k of a perfect *model* is within 1 ± this in 95 of 100 samples.

    An estimator that looks at the sample itself can do better.
    """
    return 1.96 / math.sqrt(k) if k else math.inf


def quality_series(
    source: object,
    ratios: Sequence[float] = (0.1, 0.01, 0.001),
    estimators: Iterable[str] = ("exact", "dgc", "sidco-e"),
    **selection: Any,
) -> list[dict[str, Any]]:
    """Replay estimators over every gradient of a source, one record each.

    Parameters are those of :func:`quality`. Each estimator has one instance per ratio, rank and kind, which sees
    the steps in order, as it would in training.

    Returns
    -------
    list of dict
        trace, step, rank, kind, layer, estimator, ratio, numel, k, selected (k̂), quality (k̂/k), energy_error
        (‖g − C(g)‖/σ_k − 1, what convergence feels: negative where more than k were kept), threshold.
    """
    records = []
    best: _BestK | None = None
    for played in _replay(source, ratios, estimators, **selection):
        if best is None or best.values is not played.values:
            best = _BestK(played.values)
        kept, k = len(played.selection), played.estimate.k
        records.append(
            played.labels
            | {
                "numel": numel_of(played.values),
                "k": k,
                "selected": kept,
                "quality": kept / k if k else float("nan"),
                "energy_error": best.energy_error(played.selection, k),
                "threshold": played.estimate.threshold,
            }
        )
    return records


@dataclass(frozen=True, slots=True)
class _Played:
    """One estimator on one gradient."""

    labels: dict[str, Any]
    values: Array
    estimate: Estimate
    selection: Selection


def _replay(
    source: object,
    ratios: Sequence[float],
    estimators: Iterable[str],
    *,
    steps: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    kinds: Sequence[str] | None = None,
    per_layer: bool = False,
    options: dict[str, dict[str, Any]] | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> Iterator[_Played]:
    """Run estimators over the gradients of a source, steps in order, each with one instance per series."""
    opened = open_source(source)
    names = list(estimators)
    live: dict[tuple[str, float, int, str, str], Estimator] = {}
    for rank, kind, step in opened.select(steps=steps, ranks=ranks, kinds=kinds):
        captured, where = opened.read(rank, kind, step), opened.labels(rank, kind, step)
        for layer, values in layer_parts(opened, captured, per_layer):
            for name in names:
                for ratio in ratios:
                    key = (name, ratio, rank, kind, layer)
                    if key not in live:
                        live[key] = make_estimator(name, **(options or {}).get(name, {}))
                    labels = where | {"layer": layer, "estimator": name, "ratio": ratio}
                    yield _Played(labels, values, *live[key].select(values, ratio))
        on_progress()


class _BestK:
    """The error of best-k selection on one gradient, remembered by k."""

    def __init__(self, values: Array) -> None:
        self.values = values
        self._total = moments(values, log=False).sum_squares
        self._kept: dict[int, float] = {}

    def energy_error(self, selection: Selection, k: int) -> float:
        """Return ‖g − C(g)‖/σ_k − 1; NaN where best-k leaves nothing."""
        if k not in self._kept:
            magnitudes = np.abs(as_numpy(top_candidates(self.values, k)[1].values)) if k else []
            # ties at the threshold beyond k do not count
            largest = np.sort(np.asarray(magnitudes, np.float64))[::-1][:k]
            self._kept[k] = float(np.square(largest).sum())
        kept = float(np.square(as_numpy(selection.values).astype(np.float64)).sum())
        best = self._total - self._kept[k]
        if not best > 1e-12 * self._total:
            return float("nan")
        return math.sqrt(max(self._total - kept, 0.0) / best) - 1


def quality(
    source: object,
    ratios: Sequence[float] = (0.1, 0.01, 0.001),
    estimators: Iterable[str] = ("exact", "dgc", "sidco-e"),
    **selection: Any,
) -> list[dict[str, Any]]:
    """Compare the number of elements that estimated thresholds keep with the target, k̂/k.

    Parameters
    ----------
    source : a trace or its path, a gradient file, an array, or a mapping of layer names to arrays.
    ratios : kept fractions k/d, each in (0, 1].
    estimators : names of :data:`gradstats.thresholds.ESTIMATORS`.
    selection : ``steps``, ``ranks``, ``kinds`` to look at (all if absent), ``per_layer``, ``options`` by estimator name
        (``{"sidco-e": {"stages": 2}}``), ``on_progress`` called once per gradient.

    Returns
    -------
    list of dict
        One record per estimator, ratio, kind and layer (``all`` is the whole gradient): mean of k̂/k over steps and
        ranks; low and high, its 5 % and 95 % quantiles (the interval that holds 90 % of the gradients looked at);
        min, max, n (gradients); k; energy_error, the mean of ‖g − C(g)‖/σ_k − 1; floor, the noise floor 1.96/√k, and
        floor_low and floor_high, 1 ∓ floor.

    Notes
    -----
    Stateful rules (reuse, feedback, warm start, adaptive stages) see the captured steps as if they were
    adjacent. On a trace of a few distant steps they look worse than in training.

    Raises
    ------
    InputError
        For an unknown estimator, a ratio outside (0, 1], or a selection that matches nothing.
    """
    return summarise(quality_series(source, ratios, estimators, **selection))


def summarise(series: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reduce the records of :func:`quality_series` to those of :func:`quality`."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in series:
        labels = ("trace", "estimator", "ratio", "kind", "layer")
        key = tuple(record[label] for label in labels)
        groups.setdefault(key, []).append(record)
    return [_summary(records) for records in groups.values()]


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    values = np.array([r["quality"] for r in records])
    k = records[0]["k"]
    low, high = np.quantile(values, [0.05, 0.95])
    floor = noise_floor(k)
    return {
        "trace": records[0]["trace"],
        "estimator": records[0]["estimator"],
        "ratio": records[0]["ratio"],
        "kind": records[0]["kind"],
        "layer": records[0]["layer"],
        "mean": float(values.mean()),
        "low": float(low),
        "high": float(high),
        "min": float(values.min()),
        "max": float(values.max()),
        "n": len(records),
        "k": k,
        "energy_error": float(np.mean([r["energy_error"] for r in records])),
        "floor": floor,
        "floor_low": 1 - floor,
        "floor_high": 1 + floor,
    }


def stage_budget(
    source: object,
    ratios: Sequence[float] = (0.1, 0.01, 0.001),
    estimators: Iterable[str] = ("sidco-e", "sidco-gp", "sidco-p"),
    **selection: Any,
) -> list[dict[str, Any]]:
    """Split the error of multi-stage thresholds over their stages.

    Each stage asks for a share of what the last one left, and gets another. The product of got/asked over the stages
    is k̂/k, so the factors say which stage is to blame.

    Parameters are those of :func:`quality`; estimators without stages have no records.

    Returns
    -------
    list of dict
        trace, step, rank, kind, layer, estimator, ratio, stage (from 1), asked, got, factor (got/asked), quality (the
        product of the factors up to this stage).
    """
    records = []
    for played in _replay(source, ratios, estimators, **selection):
        stages = played.estimate.details.get("stages", [])
        counts = [stage["count"] for stage in stages] + [len(played.selection)]
        product = 1.0
        for i, stage in enumerate(stages):
            got = counts[i + 1] / counts[i]
            factor = got / stage["ratio"]
            product *= factor
            shares = {"stage": i + 1, "asked": stage["ratio"], "got": got, "factor": factor}
            records.append(played.labels | shares | {"quality": product})
    return records
