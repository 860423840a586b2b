"""Everything that is measured on one source for its part of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradstats.analysis.decay import compressibility_records
from gradstats.analysis.drift import drift_records, over_training
from gradstats.analysis.fits import fit_records
from gradstats.analysis.info import info_records
from gradstats.analysis.peaks import mixture_records, pot_records
from gradstats.analysis.quality import quality_series, summarise
from gradstats.primitives.arrays import as_numpy
from gradstats.statistics.fitting import MODELS
from gradstats.thresholds import ESTIMATORS
from gradstats.trace import Kind
from gradstats.trace.sources import Source

if TYPE_CHECKING:
    from xarray import Dataset

__all__ = ["MOST_STEPS", "RATIOS", "REPLICATES", "SEED", "SUBSAMPLE", "Measured", "measure"]

RATIOS = (0.1, 0.01, 0.001)
MOST_STEPS = 20
"""Steps looked at; of a longer trace, this many evenly."""

REPLICATES, SUBSAMPLE, SEED = 99, 2000, 0
"""Of the goodness-of-fit tests."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The records of one source.

    Attributes
    ----------
    source : where they come from.
    steps : looked at, ascending.
    shown : the first, middle and last of them, which have figures and fits.
    rank : whose gradients the figures show; thresholds and the ledger have all ranks.
    ledger : what is in the data by rank and kind (:func:`_ledger`).
    decay : of :func:`gradstats.analysis.compressibility_records`, controls last.
    fits, tails, peaks : of fit_records, mixture_records and pot_records, at the steps shown.
    series, quality : of :func:`gradstats.quality_series`, and summarised.
    training : of :func:`gradstats.over_training`, by layer.
    drift : of :func:`gradstats.analysis.drift.drift_records`.
    """

    source: Source
    steps: list[int]
    shown: list[int]
    rank: int
    ledger: list[dict[str, Any]]
    decay: list[dict[str, Any]]
    fits: list[dict[str, Any]]
    tails: list[dict[str, Any]]
    peaks: list[dict[str, Any]]
    series: list[dict[str, Any]]
    quality: list[dict[str, Any]]
    training: Dataset
    drift: list[dict[str, Any]]

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of gradient, in the order of the trace."""
        return list(dict.fromkeys(r["kind"] for r in self.series))


def measure(source: Source, advance: Callable[[], None]) -> Measured:
    """Measure a source; `advance` is called six times."""
    keys = source.select()
    rank = keys[0][0]
    steps = _evenly(sorted({step for r, _, step in keys if r == rank}), MOST_STEPS)
    shown = _evenly(steps, 3)
    here: dict[str, Any] = {"steps": shown, "ranks": [rank]}
    ledger = _ledger(source, steps)
    advance()
    decay = compressibility_records([source], steps=steps, ranks=[rank])
    tails = mixture_records(source, **here)
    peaks = pot_records(source, **here)
    advance()
    fits = fit_records(source, MODELS[:3], replicates=REPLICATES, size=SUBSAMPLE, seed=SEED, **here)
    fits += [r | _UNTESTED for r in fit_records(source, MODELS[3:], **here)]
    fits.sort(key=lambda r: (r["kind"], r["step"]))
    advance()
    series = quality_series(source, RATIOS, tuple(ESTIMATORS), steps=steps)
    advance()
    training = over_training(
        source,
        models=["double_genpareto"],
        ratios=[0.01],
        per_layer=len(source.layers) > 1,
        steps=steps,
        ranks=[rank],
    )
    advance()
    drift = drift_records(training.sel(layer=["all"]), ["mean", "threshold"])
    advance()
    return Measured(
        source,
        steps,
        shown,
        rank,
        ledger,
        decay,
        fits,
        tails,
        peaks,
        series,
        summarise(series),
        training,
        drift,
    )


_UNTESTED = {"p_value": float("nan"), "p_naive": float("nan"), "subsample": 0}


def _evenly(steps: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the steps, the first and the last among them."""
    places = np.linspace(0, len(steps) - 1, min(len(steps), most))
    return [steps[i] for i in np.unique(places.astype(int))]


def _ledger(source: Source, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Return what is odd about the data, one record per rank and kind, the worst step of those looked at.

    zeros, nonfinite: most elements in one step; tied: largest share of the non-zero elements whose magnitude another
    has too; largest_tie: most elements of one magnitude; both None where only sketches are kept; constant: names of
    layers whose elements are all equal at any step, of sketches: all zero.
    """
    groups: dict[tuple[int, Kind], list[dict[str, Any]]] = {}
    for recorded in info_records(source):
        rank, kind, step = (recorded[name] for name in ("rank", "kind", "step"))
        looked_at = _inspect(source, rank, kind, step) if step in steps else {}
        groups.setdefault((rank, kind), []).append(recorded | looked_at)
    return [
        {
            "rank": rank,
            "kind": kind,
            "steps": len(rows),
            "zeros": max(r["zeros"] for r in rows),
            "nonfinite": max(r["nonfinite"] for r in rows),
            "nonfinite_steps": sum(r["nonfinite"] > 0 for r in rows),
            "tied": max((r["tied"] for r in rows if "tied" in r), default=None),
            "largest_tie": max((r["largest_tie"] for r in rows if "tied" in r), default=None),
            "constant": sorted({name for r in rows for name in r.get("constant", ())}),
        }
        for (rank, kind), rows in groups.items()
    ]


def _inspect(source: Source, rank: int, kind: Kind, step: int) -> dict[str, Any]:
    layers = [layer for layer in source.layers if layer.numel > 1]
    if source.sketched(rank, kind):
        sketches = zip(source.layers, source.stored_sketches(rank, kind, step), strict=True)
        constant = [la.name for la, s in sketches if la in layers and s.moments.zeros == s.numel]
        return {"constant": constant}
    values = as_numpy(source.read(rank, kind, step).values).reshape(-1)
    finite = np.isfinite(values)
    magnitudes = np.abs(values[finite & (values != 0)])
    counts = np.unique(magnitudes, return_counts=True)[1]
    return {
        "zeros": int(np.count_nonzero(values == 0)),
        "nonfinite": int(values.size - np.count_nonzero(finite)),
        "tied": float(counts[counts > 1].sum() / max(magnitudes.size, 1)),
        "largest_tie": int(counts.max(initial=0)),
        "constant": [la.name for la in layers if (values[la.slice] == values[la.slice][0]).all()],
    }
