"""Peaks over threshold of every gradient of a source: the records of ``gradstats pot``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradstats.analysis.pieces import each_sketched
from gradstats.primitives.ratio import check_ratio
from gradstats.primitives.sketch import Sketch
from gradstats.statistics import pot
from gradstats.statistics.fitting import Method
from gradstats.statistics.solution import FitError
from gradstats.trace.sources import Source

__all__ = ["mixture_records", "pot_records"]


@dataclass(frozen=True, slots=True)
class _Peaks:
    """What :func:`pot_records` does with the sketches of one gradient; travels to a worker."""

    ratios: tuple[float, ...] | None
    method: Method
    replicates: int
    size: int
    seed: int

    def __call__(self, labels: dict[str, Any], sketches: dict[str, Sketch]) -> list[dict[str, Any]]:
        m = sketches["all"].magnitudes
        try:
            excesses = pot.mean_excess(m, self.ratios)
            fits = pot.parameter_stability(m, self.ratios, self.method)
        except FitError as error:
            record = labels | dict.fromkeys(_PEAKS, float("nan")) | {"n": 0, "status": str(error)}
            chosen = {"p_value": float("nan"), "chosen": False} if self.replicates else {}
            return [record | chosen]
        records = [
            labels
            | {
                "ratio": fitted.ratio,
                "threshold": fitted.threshold,
                "n": fitted.n,
                "mean_excess": excess.mean,
                "mean_excess_low": excess.low,
                "mean_excess_high": excess.high,
                "c": fitted.c,
                "c_low": fitted.c_low,
                "c_high": fitted.c_high,
                "scale": fitted.scale,
                "scale_low": fitted.scale_low,
                "scale_high": fitted.scale_high,
                "status": fitted.status or "; ".join(fitted.flags) or "ok",
            }
            for excess, fitted in zip(excesses, fits, strict=True)
        ]
        if self.replicates:
            ratios = [r["ratio"] for r in records]
            choice = pot.choose_threshold(
                m,
                ratios,
                size=self.size,
                replicates=self.replicates,
                seed=self.seed,
                method=self.method,
            )
            found = {c.ratio: c.p_value for c in choice.candidates}
            for record in records:
                record["p_value"] = found.get(record["ratio"], float("nan"))
                record["chosen"] = record["ratio"] == choice.ratio
        return records


_PEAKS = [
    *("ratio", "threshold", "mean_excess", "mean_excess_low", "mean_excess_high"),
    *("c", "c_low", "c_high", "scale", "scale_low", "scale_high"),
]


def pot_records(
    source: Source,
    ratios: Sequence[float] | None = None,
    *,
    method: Method = "mle",
    replicates: int = 0,
    size: int = 1000,
    seed: int = 0,
    client: Any = None,
    on_progress: Callable[[], None] = lambda: None,
    **selection: Any,
) -> list[dict[str, Any]]:
    """Return the peaks over a series of thresholds of every gradient of a source.

    Parameters
    ----------
    source : read piece by piece.
    ratios : of the non-zero elements beyond each threshold; eight from 0.5 to 0.001 if None.
    method : of the generalized Pareto fits.
    replicates : of the bootstrap that chooses a threshold (:func:`gradstats.pot.choose_threshold`); no choice if 0.
    size, seed : of its subsamples.
    client, on_progress, selection : as for :func:`fit_records`.

    Returns
    -------
    list of dict
        trace, step, rank, kind; ratio, threshold, n; mean_excess, c, scale (σ − cu) with _low and _high, 95 %; status;
        p_value and chosen if asked for.
    """
    asked = tuple(ratios) if ratios is not None else _POT_RATIOS
    for ratio in asked:
        check_ratio(ratio)
    work = _Peaks(asked, method, replicates, size, seed)
    return each_sketched(source, work, False, client, on_progress, selection)


_POT_RATIOS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001)


def mixture_records(
    source: Source,
    at: float = 0.1,
    *,
    method: Method = "mle",
    client: Any = None,
    on_progress: Callable[[], None] = lambda: None,
    **selection: Any,
) -> list[dict[str, Any]]:
    """Return the tail shapes of every gradient: pooled, pooled after normalising layers, and layer by layer.

    Parameters are those of :func:`gradstats.pot.mixture` and :func:`fit_records`.

    Returns
    -------
    list of dict
        trace, step, rank, kind; layer (``pooled``, ``normalised``, then the parameters' names); n, c, c_low, c_high;
        status.
    """
    work = partial(_mixture, at=at, method=method)
    return each_sketched(source, work, True, client, on_progress, selection)


def _mixture(
    labels: dict[str, Any], sketches: dict[str, Sketch], at: float, method: Method
) -> list[dict[str, Any]]:
    try:
        found = pot.mixture({n: s for n, s in sketches.items() if n != "all"}, at, method)
    except FitError as error:
        numbers = dict.fromkeys(("c", "c_low", "c_high"), float("nan"))
        return [labels | {"layer": "pooled", "n": 0} | numbers | {"status": str(error)}]
    rows = {"pooled": found.pooled, "normalised": found.normalised, **found.layers}
    return [
        labels
        | {"layer": layer, "n": row.n, "c": row.c, "c_low": row.c_low, "c_high": row.c_high}
        | {"status": row.status or "; ".join(row.flags) or "ok"}
        for layer, row in rows.items()
    ]
