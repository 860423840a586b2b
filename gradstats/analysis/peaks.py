"""Peaks over threshold of every gradient of a source: the records of ``gradstats pot``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.over import Spread, SpreadGradients, shares, subset_of
from gradstats.analysis.pieces import PIECE, Key, Submit, each_sketched, evaluate, plan_sketches
from gradstats.errors import InputError
from gradstats.primitives.arrays import as_numpy
from gradstats.primitives.ratio import check_count, check_ratios, check_seed
from gradstats.primitives.sketch import Sketch
from gradstats.statistics.dependence import RUN, design_effect
from gradstats.statistics.laws.choice import law_of
from gradstats.statistics.laws.law import Method
from gradstats.statistics.pot import (
    choose_threshold,
    mean_excess,
    mixture,
    parameter_stability,
)
from gradstats.statistics.pot.mixtures import pooled_shapes
from gradstats.statistics.pot.peaks import MODEL
from gradstats.statistics.resampling import add_holm
from gradstats.statistics.solution import FitError
from gradstats.statistics.tails import widened_interval
from gradstats.tables import Records
from gradstats.trace.sources import Source, Subset, open_source

__all__ = ["mixture_records", "pot", "pot_records"]

_RATIOS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001)
_TAIL = 0.1
"""Share of the non-zero elements whose shapes are compared layer by layer."""
_NUMBERS = [
    *("ratio", "threshold", "mean_excess", "mean_excess_low", "mean_excess_high"),
    *("c", "c_low", "c_high", "scale", "scale_low", "scale_high"),
]
_UNSEEN = ("n", "c", "c_low", "c_high")
_UNCHOSEN = {
    "p_value": float("nan"),
    "p_stable": float("nan"),
    "chosen": False,
    "chosen_by": 0,
    "splits": 0,
}
_UNCHOSEN |= {"unseen_n": 0} | {f"unseen_{name}": float("nan") for name in _UNSEEN[1:]}


@dataclass(frozen=True, slots=True)
class _Peaks:
    """The work of :func:`pot_records` on the sketches of one gradient; it travels to a worker."""

    ratios: tuple[float, ...]
    method: Method
    replicates: int
    size: int
    seed: int

    def __call__(self, labels: dict[str, Any], sketches: dict[str, Sketch]) -> list[dict[str, Any]]:
        m = sketches["all"].magnitudes
        try:
            excesses = mean_excess(m, self.ratios)
            fits = parameter_stability(m, self.ratios, self.method)
        except FitError as error:
            # one record says why, in place of one for each threshold
            record = labels | dict.fromkeys(_NUMBERS, float("nan")) | {"n": 0, "status": str(error)}
            return [record | (_UNCHOSEN if self.replicates else {})]
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
            choice = choose_threshold(
                m,
                ratios,
                size=self.size,
                replicates=self.replicates,
                seed=self.seed,
                method=self.method,
            )
            candidates = {c.ratio: c for c in choice.candidates}
            for record in records:
                # ratios that the choice never looked at keep these
                record |= _UNCHOSEN
                by = choice.splits.count(record["ratio"])
                record |= {"chosen_by": by, "splits": len(choice.splits)}
                if candidate := candidates.get(record["ratio"]):
                    record |= {"p_value": candidate.p_value, "p_stable": candidate.p_stable}
                # one ratio alone has the estimate from elements that the choice did not see
                if choice.estimate and record["ratio"] == choice.ratio:
                    unseen = {f"unseen_{f}": getattr(choice.estimate, f) for f in _UNSEEN}
                    record |= {"chosen": True} | unseen
        return records


def _count_runs(
    source: Source, key: Key, start: int, stop: int, records: list[dict[str, Any]]
) -> NDArray[np.float64]:
    """Return the runs of a piece, and over them sums of the elements beyond each threshold, and of their squares."""
    # a piece holds a whole number of runs: only the last elements of a gradient are in none
    runs = (stop - start) // RUN
    magnitudes = np.abs(as_numpy(source.elements(*key, start, start + runs * RUN)))
    rows = magnitudes.reshape(runs, RUN)
    sums = []
    for record in records:
        # NaN, the threshold where nothing was fitted, is reached by no element
        counts = np.count_nonzero(rows >= record["threshold"], axis=1)
        sums.append((runs, counts.sum(), np.square(counts).sum()))
    return np.array(sums, float)


def _add_runs(
    records: list[dict[str, Any]], parts: list[NDArray[np.float64]]
) -> list[dict[str, Any]]:
    """Add the design effect beyond each threshold, and the interval of ξ that allows for it."""
    # from sketches there are no pieces: no runs, and a design effect of NaN
    sums = np.sum(parts, axis=0) if parts else np.zeros((len(records), 3))
    for record, (runs, total, squares) in zip(records, sums, strict=True):
        design = design_effect(int(runs), total, squares)
        low, high = float("nan"), float("nan")
        # without a design effect there is nothing to widen by
        if np.isfinite(design):
            low, high = widened_interval(record["c"], record["c_low"], record["c_high"], design)
        record |= {"design": design, "runs_low": low, "runs_high": high}
    return records


@shares(Spread)
def pot(
    source: object,
    ratios: Sequence[float] | None = None,
    *,
    method: Method = "mle",
    replicates: int = 0,
    size: int = 1000,
    seed: int = 0,
    **over: Unpack[Spread],
) -> Records:
    """Fit the peaks over a series of thresholds, or one tail layer by layer; ``gradstats.pot(…)`` is this function.

    Parameters
    ----------
    source : str, Path, Trace, array_like, mapping of str to array_like, or Source
        Trace or its path, gradient file, array, or arrays by layer name.
    ratios : sequence of float, optional
        Shares of the non-zero elements beyond each threshold; by default eight from 0.5 to 0.001. Layer by layer the
        first one counts, by default 0.1.
    method : Method, optional
        Method of the generalized Pareto fits.
    replicates : int, optional
        Replicates of the bootstrap that chooses a threshold, as in :func:`pot_records`. 0, the default, chooses none.
    size : int, optional
        Elements of each subsample that the bootstrap tests.
    seed : int, optional
        Seed of the subsamples and the replicates.
    **over : Unpack[Spread]
        Gradients and layers to look at, as in :class:`gradstats.analysis.over.Spread`.

    Returns
    -------
    Records
        Records as in :func:`pot_records`; layer by layer as in :func:`mixture_records`.

    Raises
    ------
    InputError
        If a ratio is outside (0, 1], the method is unknown, replicates are asked for layer by layer, or nothing
        matches.

    Notes
    -----
    With `layers` or `per_layer` the tails of these layers or of all are compared, pooled, normalised and one by one,
    in place of thresholds.

    Examples
    --------
    ``gradstats.pot("run.zarr", steps=[100]).to_dataframe()``
    """
    opened = open_source(source)
    # pot_records knows no layers, and mixture_records takes these by name
    layers, per_layer = over.pop("layers"), over.pop("per_layer")
    options: dict[str, Any] = {"method": method, **over}
    if per_layer or layers is not None:
        if replicates:
            raise InputError(
                "a threshold is chosen for the whole gradient: give replicates or layers"
            )
        # an empty list of ratios counts as none given
        at = _TAIL if ratios is None else [*check_ratios(ratios), _TAIL][0]
        return mixture_records(opened, at, layers=layers, **options)
    return pot_records(opened, ratios, replicates=replicates, size=size, seed=seed, **options)


@shares(SpreadGradients)
def pot_records(
    source: Source,
    ratios: Sequence[float] | None = None,
    *,
    method: Method = "mle",
    replicates: int = 0,
    size: int = 1000,
    seed: int = 0,
    **over: Unpack[SpreadGradients],
) -> Records:
    """Return the peaks over a series of thresholds of every gradient of a source.

    Parameters
    ----------
    source : Source
        Source to read piece by piece.
    ratios : sequence of float, optional
        Shares of the non-zero elements beyond each threshold; by default eight from 0.5 to 0.001.
    method : Method, optional
        Method of the generalized Pareto fits.
    replicates : int, optional
        Replicates of the bootstrap that chooses a threshold (:func:`gradstats.pot.choose_threshold`). 0, the default,
        chooses none.
    size : int, optional
        Elements of each subsample that the bootstrap tests.
    seed : int, optional
        Seed of the subsamples and the replicates.
    **over : Unpack[SpreadGradients]
        Gradients to look at, as in :class:`gradstats.analysis.over.SpreadGradients`.

    Returns
    -------
    Records
        trace, step, rank, kind, ratio, threshold, n; mean_excess, c and scale (σ − cu), each with _low and _high, 95 %
        intervals of independent elements; design, how many times as much the number of elements beyond the threshold
        varies between runs of 512 neighbours, and runs_low, runs_high, the interval of c widened by its root
        (:func:`gradstats.statistics.tails.widened_interval`; NaN from sketches, and of fewer than 20 runs); status.
        With a bootstrap also p_value (of the generalized Pareto), p_stable (of one shape from there
        on), chosen_by (how many of the random splits of the elements, of which there are `splits`, choose this ratio),
        chosen (the median of what they choose; none where most of them reject every ratio), and in the row chosen
        unseen_c with unseen_c_low and unseen_c_high, the shape of the unseen_n excesses that the choice did not see:
        those intervals are not narrowed by it, c_low and c_high are.

    Raises
    ------
    InputError
        If a ratio is outside (0, 1], or nothing matches.
    """
    asked = tuple(check_ratios(_RATIOS if ratios is None else ratios))
    # an unknown method is refused before anything is read
    law_of(MODEL).solver(method)
    check_count(replicates, "replicates", 0)
    work = _Peaks(asked, method, replicates, check_count(size, "size", 2), check_seed(seed))
    keys, records = subset_of(over).keys(source), Records()

    def plan(submit: Submit, key: Key) -> Any:
        rows = submit(work, source.labels(*key), plan_sketches(submit, source, key))
        # sketches do not say where elements lie
        pieces = () if source.sketched(*key[:2]) else range(0, source.numel, PIECE)
        parts = [
            submit(_count_runs, source, key, start, min(start + PIECE, source.numel), rows)
            for start in pieces
        ]
        return submit(_add_runs, rows, parts)

    for rows in evaluate(plan, keys, over["client"]):
        records += rows
        over["on_progress"]()
    return records


@shares(SpreadGradients)
def mixture_records(
    source: Source,
    at: float = _TAIL,
    *,
    method: Method = "mle",
    layers: Sequence[str] | None = None,
    per_layer: bool = True,
    **over: Unpack[SpreadGradients],
) -> Records:
    """Return the tail shapes of every gradient: pooled, pooled after normalising layers, and layer by layer.

    Parameters
    ----------
    source : Source
        Source to read piece by piece.
    at : float, optional
        Share of the non-zero elements that counts as the tail, as in :func:`gradstats.pot.mixture`.
    method : Method, optional
        Method of the generalized Pareto fits.
    layers : sequence of str, optional
        Patterns of parameter names, as in :mod:`fnmatch`: show only these. The pooled shapes have all parameters.
    per_layer : bool, optional
        Whether to fit every layer, too, and not only the two pooled ones.
    **over : Unpack[SpreadGradients]
        Gradients to look at, as in :class:`gradstats.analysis.over.SpreadGradients`.

    Returns
    -------
    Records
        trace, step, rank, kind; layer (``pooled``, ``normalised``, then the parameters' names); n, c, c_low, c_high
        (95 % interval), p_value (of ξ = 0, an exponential tail, by the likelihood ratio), p_holm (the same of a layer,
        corrected for the number of layers shown, of which one in twenty is below 0.05 by chance; NaN of the two
        pooled), status.

    Raises
    ------
    InputError
        If nothing matches.
    """
    shown = Subset(layers=layers, per_layer=True).parameters(source)
    if not per_layer:
        shown = []
    work = partial(_mixture, at=at, method=method, shown=("pooled", "normalised", *shown))
    # sketches of all layers, as the pooled shapes are of all
    subset = replace(subset_of(over), per_layer=True)
    records = each_sketched(source, subset, work, over["client"], over["on_progress"])
    # the pooled shapes are no further tests of layers
    each = (r for r in records if r["layer"] not in ("pooled", "normalised"))
    add_holm(each, "p_value", "p_holm", ("step", "rank", "kind"))
    return records


def _mixture(
    labels: dict[str, Any],
    sketches: dict[str, Sketch],
    at: float,
    method: Method,
    shown: tuple[str, ...],
) -> list[dict[str, Any]]:
    layers = {n: s for n, s in sketches.items() if n != "all"}
    try:
        # the two pooled shapes alone need no fit of each layer
        if len(shown) > 2:
            fits = mixture(layers, at, method)
            rows = {"pooled": fits.pooled, "normalised": fits.normalised, **fits.layers}
        else:
            rows = dict(zip(shown, pooled_shapes(layers, at, method), strict=True))
    except FitError as error:
        numbers = dict.fromkeys(("c", "c_low", "c_high", "p_value", "p_holm"), float("nan"))
        return [labels | {"layer": "pooled", "n": 0} | numbers | {"status": str(error)}]
    return [
        labels
        | {"layer": layer, "n": row.n, "c": row.c, "c_low": row.c_low, "c_high": row.c_high}
        | {"p_value": row.p_exponential, "p_holm": float("nan")}
        | {"status": row.status or "; ".join(row.flags) or "ok"}
        for layer, row in rows.items()
        if layer in shown
    ]
