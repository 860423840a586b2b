"""Measurements of one source for its part of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradstats.analysis.advise import energy_shares
from gradstats.analysis.closest import closest_laws, evenly, law_pairs
from gradstats.analysis.compression import compression
from gradstats.analysis.decay import compressibility_records
from gradstats.analysis.drift import dataset_of, drift_records
from gradstats.analysis.fits import fit_records
from gradstats.analysis.info import describe, info_records
from gradstats.analysis.peaks import mixture_records, pot_records
from gradstats.analysis.pieces import Key, evaluate, sketches_of
from gradstats.analysis.quality import series_of, summarise
from gradstats.primitives.arrays import as_numpy
from gradstats.primitives.ratio import RATIOS, target_count
from gradstats.primitives.sketch import Sketch
from gradstats.statistics.fitting import as_magnitudes
from gradstats.statistics.laws import LAWS
from gradstats.statistics.pot.peaks import MODEL
from gradstats.tables import Records
from gradstats.trace import Kind
from gradstats.trace.sources import Source, Subset, TraceSource

if TYPE_CHECKING:
    from xarray import Dataset

__all__ = [
    "MOST_STEPS",
    "STAGES",
    "TREND_RATIO",
    "Measured",
    "measure",
]

MOST_STEPS = 20
"""Most steps looked at. A longer trace has this many looked at, one of each stretch of equal length."""

TREND_RATIO = 0.01
"""Kept fraction whose exact threshold is followed over training."""

STAGES = 6
"""Number of times :func:`measure` reports progress."""


# Size: what a page is made of, a field a part; it has no behaviour.
@dataclass(frozen=True, slots=True)
class Measured:
    """The records of one source.

    Attributes
    ----------
    source : Source
        Source of the gradients.
    steps : list of int
        Steps looked at, ascending.
    captured : int
        Number of steps of the rank whose gradients the figures show.
    shown : list of int
        First, middle and last of the steps, which have figures and fits.
    rank : int
        Rank whose gradients the figures show, the first that is not all zero; thresholds and the ledger have all
        ranks.
    ledger : list of dict
        Oddities of the data by rank and kind (:func:`_ledger`).
    decay : list of dict
        Records of :func:`gradstats.analysis.decay.compressibility_records`, controls last.
    fits : list of dict
        Records of :func:`gradstats.analysis.fits.fit_records`, at the steps shown.
    laws : list of dict
        Records of :func:`gradstats.analysis.closest.closest_laws`.
    tails, peaks : list of dict
        Records of :func:`gradstats.analysis.peaks.mixture_records` and
        :func:`gradstats.analysis.peaks.pot_records`, at the steps shown.
    series : list of dict
        Records of :func:`gradstats.quality_series`.
    quality : list of dict
        Records of :func:`gradstats.quality`: the series, summarised.
    training : xarray.Dataset
        Data set of :func:`gradstats.over_training`, by layer, of what the report shows.
    drift : list of dict
        Records of :func:`gradstats.analysis.drift.drift_records`.
    facts : dict of str to str
        What is known of the run (:func:`gradstats.analysis.info.describe`); empty for a single gradient.
    losses : list of (int, float)
        Steps of the first rank, and the loss that was recorded there.
    live : list of dict
        Records of :func:`gradstats.compression`.
    sketches : dict of (Kind, int) to Sketch
        The gradients of the rank whose figures are shown, by kind and step.
    energy : list of dict
        kind, step, and shares: the share of Σg² that the largest elements hold, by ratio; at the steps shown, where a
        ratio leaves ten elements.
    """

    source: Source
    steps: list[int]
    captured: int
    shown: list[int]
    rank: int
    ledger: list[dict[str, Any]]
    decay: list[dict[str, Any]]
    fits: list[dict[str, Any]]
    laws: list[dict[str, Any]]
    tails: list[dict[str, Any]]
    peaks: list[dict[str, Any]]
    series: list[dict[str, Any]]
    quality: list[dict[str, Any]]
    training: Dataset
    drift: list[dict[str, Any]]
    facts: dict[str, str]
    losses: list[tuple[int, float]]
    live: list[dict[str, Any]]
    sketches: dict[tuple[Kind, int], Sketch]
    energy: list[dict[str, Any]]

    @property
    def kinds(self) -> list[Kind]:
        """Return the kinds of gradient, in the order of the trace."""
        return list(dict.fromkeys(r["kind"] for r in self.series))


def measure(source: Source, advance: Callable[[], None], client: Any = None) -> Measured:
    """Measure a source.

    Parameters
    ----------
    source : Source
        Source to measure.
    advance : callable
        Called after each of :data:`STAGES` stages.
    client : distributed.Client, optional
        Cluster that does the work.

    Returns
    -------
    Measured
        Records of all tables.
    """
    first = source.select()[0][0]
    recorded = info_records(source)
    rank, telling = _shown(recorded, first)
    captured = sorted({step for _, _, step in source.select(ranks=[rank])})
    steps = evenly(captured, MOST_STEPS)
    keys = source.select(ranks=[rank], steps=steps)
    shown = evenly([step for step in steps if step in telling] or steps, 3)
    here: dict[str, Any] = {"steps": shown, "ranks": [rank], "client": client}
    ledger = _ledger(source, recorded, steps, client)
    advance()
    decay = compressibility_records([source], **here | {"steps": steps})
    before, last = here | {"steps": shown[:-1]}, here | {"steps": shown[-1:]}
    # layers are shown at the last step only
    tails = mixture_records(source, per_layer=False, **before) if shown[:-1] else Records()
    tails += mixture_records(source, **last)
    peaks = pot_records(source, **here)
    advance()
    # a control is no candidate, so controls come last; sorting keeps the others in order
    names = sorted(LAWS, key=lambda name: LAWS[name].control)
    fits = fit_records(source, names, wasserstein=False, **here)
    # all looked at, not only those shown: pairs of neighbouring steps judge the laws
    laws = closest_laws(law_pairs(source, **here | {"steps": steps}))
    advance()
    series = series_of(source, Subset(steps), client=client)
    advance()
    training = dataset_of(
        source,
        Subset(steps, [rank], per_layer=len(source.layers) > 1),
        models=[MODEL],
        ratios=[TREND_RATIO],
        quantities=["mean", "zero_fraction", "shape", "threshold"],
        client=client,
    )
    advance()
    # a list keeps the dimension, by which drift_records tells its series
    drift = drift_records(training.sel(layer=["all"]), ["mean", "threshold"])
    advance()
    facts, losses, live = _run(source, rank)
    return Measured(
        source,
        steps,
        len(captured),
        shown,
        rank,
        ledger,
        decay,
        fits,
        laws,
        tails,
        peaks,
        series,
        summarise(series),
        training,
        drift,
        facts,
        losses,
        live,
        {key[1:]: s for key, s in sketches_of(source, keys, client).items()},
        _energy(source, rank, shown, client),
    )


def _shown(recorded: Sequence[dict[str, Any]], first: int) -> tuple[int, set[int]]:
    """Return the rank that figures show, the first with a finite element other than zero, and its steps with any."""
    telling: dict[int, set[int]] = {}
    for r in recorded:
        # what knows no zeros is taken to have none
        if r.get("zeros", 0) + r.get("nonfinite", 0) < r["numel"]:
            telling.setdefault(r["rank"], set()).add(r["step"])
    rank = first if first in telling else next(iter(telling), first)
    return rank, telling.get(rank, set())


def _energy(source: Source, rank: int, steps: Sequence[int], client: Any) -> list[dict[str, Any]]:
    """Return the share of Σg² that the largest elements hold, of every kind and step."""
    keys = Subset(steps, [rank]).keys(source)
    energies = evaluate(lambda submit, key: submit(_shares, source, key), keys, client)
    return [
        {"kind": kind, "step": step, "shares": shares}
        for (_, kind, step), shares in zip(keys, energies, strict=True)
    ]


def _shares(source: Source, key: Key) -> dict[float, float]:
    return energy_shares(as_magnitudes(source.read(*key).values), source.numel, RATIOS)


_LIVE = ("bytes", "build_up", "select", "communicate")


def _run(
    source: Source, rank: int
) -> tuple[dict[str, str], list[tuple[int, float]], list[dict[str, Any]]]:
    """Return what a trace says of its run, its losses, and what its compressor did."""
    if not isinstance(source, TraceSource):
        return {}, [], []
    columns = source.trace.scalars(rank)
    losses = zip(columns["step"].tolist(), columns["loss"].tolist(), strict=True)
    # a loss that is not a number has no place on an axis
    known = sorted((int(step), float(loss)) for step, loss in losses if np.isfinite(loss))
    live = compression(source.trace)
    ratio = source.trace.attrs.get("ratio")
    if not live and isinstance(ratio, int | float) and 0 < ratio <= 1:  # of an older trace
        k, unknown = target_count(ratio, source.numel), dict.fromkeys(_LIVE, float("nan"))
        counts = [int(n) for r in source.trace.ranks for n in source.trace.scalars(r)["selected"]]
        live = Records(unknown | {"quality": n / k} for n in counts if n >= 0)
    return describe(source), known, live


def _ledger(
    source: Source, records: Sequence[dict[str, Any]], steps: Sequence[int], client: Any
) -> list[dict[str, Any]]:
    """Return what is odd about the data: one record per rank and kind, about the worst step of those looked at.

    looked_at, nonfinite_at: these steps, and those of them with any NaN or infinity; zeros, nonfinite: most elements in
    one step; tied: largest share of the non-zero elements whose magnitude another element has, too; largest_tie: most
    elements of one magnitude; gap: the largest magnitude over the next one (these three are None where only sketches
    are kept); constant: names of layers whose elements are all equal at any step, or all zero where only sketches are
    kept.
    """
    recorded = {(r["rank"], r["kind"], r["step"]): r for r in records}
    every: dict[tuple[int, Kind], list[int]] = {}
    for rank, kind, step in recorded:
        every.setdefault((rank, kind), []).append(step)
    # of a long series only the steps looked at are read whole; another rank may have none of the first one's
    keys = [
        (*of, step)
        for of, series_steps in every.items()
        for step in [s for s in series_steps if s in steps]
        or evenly(sorted(series_steps), MOST_STEPS)
    ]
    inspections = evaluate(lambda submit, key: submit(_inspect, source, key), keys, client)
    looked_at = dict(zip(keys, inspections, strict=True))
    groups: dict[tuple[int, Kind], list[dict[str, Any]]] = {}
    for key, record in recorded.items():
        # a trace has the zeros of every step, other sources of those looked at
        if "zeros" in (row := record | looked_at.get(key, {})):
            groups.setdefault(key[:2], []).append(row)
    return [
        {
            "rank": rank,
            "kind": kind,
            "steps": len(every[rank, kind]),
            "zeros": max(r["zeros"] for r in rows),
            "nonfinite": max(r["nonfinite"] for r in rows),
            "nonfinite_steps": sum(r["nonfinite"] > 0 for r in rows),
            "nonfinite_at": sorted(r["step"] for r in rows if r["nonfinite"]),
            "looked_at": sorted(r["step"] for r in rows),
            "tied": max((r["tied"] for r in rows if "tied" in r), default=None),
            "largest_tie": max((r["largest_tie"] for r in rows if "tied" in r), default=None),
            "gap": max((r["gap"] for r in rows if "gap" in r), default=None),
            "constant": sorted({name for r in rows for name in r.get("constant", ())}),
        }
        for (rank, kind), rows in groups.items()
    ]


def _inspect(source: Source, key: Key) -> dict[str, Any]:
    rank, kind, step = key
    layers = [layer for layer in source.layers if layer.numel > 1]
    if source.sketched(rank, kind):
        sketches = zip(source.layers, source.stored_sketches(rank, kind, step), strict=True)
        constant = [la.name for la, s in sketches if la in layers and s.moments.zeros == s.numel]
        # a sketch tells zeros exactly, not whether other elements are equal
        return {"constant": constant}
    values = as_numpy(source.read(rank, kind, step).values).reshape(-1)
    finite = np.isfinite(values)
    magnitudes = np.abs(values[finite & (values != 0)])
    # one sort gives the ties, the largest of them and the gap
    levels, counts = np.unique(magnitudes, return_counts=True)
    return {
        "zeros": int(np.count_nonzero(values == 0)),
        "nonfinite": int(values.size - np.count_nonzero(finite)),
        "tied": float(counts[counts > 1].sum() / max(magnitudes.size, 1)),
        "largest_tie": int(counts.max(initial=0)),
        # of different magnitudes: a tie of the two largest is no gap
        "gap": float(levels[-1] / levels[-2]) if levels.size > 1 else 0.0,
        # NaN equals nothing, so a layer of NaN is not constant
        "constant": [la.name for la in layers if (values[la.slice] == values[la.slice][0]).all()],
    }
