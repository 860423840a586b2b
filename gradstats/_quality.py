"""Estimation quality: how many elements a threshold keeps, against how many it was asked to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gradstats.primitives import numel_of, select
from gradstats.sources import open_source
from gradstats.thresholds import Estimator, make_estimator

__all__ = ["noise_floor", "quality", "quality_series"]


def noise_floor(k: int) -> float:
    """Return 1.96/√k: k̂/k of a perfect *model* is within 1 ± this in 95 of 100 samples.

    An estimator that looks at the sample itself can do better.
    """
    return 1.96 / math.sqrt(k) if k else math.inf


def quality_series(
    source: object,
    ratios: Sequence[float] = (0.1, 0.01, 0.001),
    estimators: Iterable[str] = ("exact", "dgc", "sidco-e"),
    *,
    steps: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    kinds: Sequence[str] | None = None,
    options: dict[str, dict[str, Any]] | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Replay estimators over every gradient of a source, one record each.

    Parameters are those of :func:`quality`. Each estimator has one instance per ratio, rank and kind, which sees
    the steps in order, as it would in training.

    Returns
    -------
    list of dict
        trace, estimator, ratio, step, rank, kind, numel, k, selected (k̂), quality (k̂/k), threshold.
    """
    opened = open_source(source)
    names = list(estimators)
    live: dict[tuple[str, float, int, str], Estimator] = {}
    records = []
    for rank, kind, step in opened.select(steps=steps, ranks=ranks, kinds=kinds):
        captured = opened.read(rank, kind, step)
        for name in names:
            for ratio in ratios:
                key = (name, ratio, rank, kind)
                if key not in live:
                    live[key] = make_estimator(name, **(options or {}).get(name, {}))
                estimate = live[key].estimate(captured.values, ratio)
                kept = len(select(captured.values, estimate.threshold))
                records.append(
                    {
                        "trace": captured.trace,
                        "estimator": name,
                        "ratio": ratio,
                        "step": step,
                        "rank": rank,
                        "kind": kind,
                        "numel": numel_of(captured.values),
                        "k": estimate.k,
                        "selected": kept,
                        "quality": kept / estimate.k if estimate.k else float("nan"),
                        "threshold": estimate.threshold,
                    }
                )
        on_progress()
    return records


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
    selection : ``steps``, ``ranks``, ``kinds`` to look at (all if absent), ``options`` by estimator name
        (``{"sidco-e": {"stages": 2}}``), ``on_progress`` called once per gradient.

    Returns
    -------
    list of dict
        One record per estimator, ratio and kind: mean of k̂/k over steps and ranks; low and high, its 5 % and 95 %
        quantiles (the interval that holds 90 % of the gradients looked at); min, max, n (gradients); k;
        floor, the noise floor 1.96/√k, and floor_low and floor_high, 1 ∓ floor.

    Raises
    ------
    InputError
        For an unknown estimator, a ratio outside (0, 1], or a selection that matches nothing.
    """
    series = quality_series(source, ratios, estimators, **selection)
    groups: dict[tuple[str, str, float, str], list[dict[str, Any]]] = {}
    for record in series:
        key = (record["trace"], record["estimator"], record["ratio"], record["kind"])
        groups.setdefault(key, []).append(record)
    return [_summary(*key, records) for key, records in groups.items()]


def _summary(
    trace: str, estimator: str, ratio: float, kind: str, records: list[dict[str, Any]]
) -> dict[str, Any]:
    values = np.array([r["quality"] for r in records])
    k = records[0]["k"]
    low, high = np.quantile(values, [0.05, 0.95])
    floor = noise_floor(k)
    return {
        "trace": trace,
        "estimator": estimator,
        "ratio": ratio,
        "kind": kind,
        "mean": float(values.mean()),
        "low": float(low),
        "high": float(high),
        "min": float(values.min()),
        "max": float(values.max()),
        "n": len(records),
        "k": k,
        "floor": floor,
        "floor_low": 1 - floor,
        "floor_high": 1 + floor,
    }
