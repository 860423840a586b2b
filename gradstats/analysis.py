"""The records behind the tables: one function per command, from sources to flat dictionaries.

They work from sketches, piece by piece, so that a gradient need not fit in memory; on a dask cluster if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats import pot
from gradstats._compressibility import (
    CONTROLS,
    Compressibility,
    checked_window,
    control,
    decay_of,
)
from gradstats._fit import MODELS, FitError, Method, check_method, fit
from gradstats._sketch import Sketch
from gradstats.goodness import bootstrap, goodness
from gradstats.reduction import Key, Submit, evaluate, plan_largest, plan_sketches
from gradstats.sources import Source, TraceSource
from gradstats.thresholds import target_count

__all__ = [
    "compressibility_records",
    "fit_records",
    "info_records",
    "mixture_records",
    "pot_records",
]


def _nothing() -> None:
    pass


def info_records(source: Source) -> list[dict[str, Any]]:
    """Return what a source holds: one record per rank, kind and step, with its scalars where it has them."""
    records = []
    scalars = {}
    if isinstance(source, TraceSource):
        scalars = {rank: source.trace.scalars(rank) for rank in source.trace.ranks}
    for rank, kind, step in source.entries():
        record = source.labels(rank, kind, step) | {"numel": source.numel}
        if rank in scalars:
            columns = scalars[rank]
            row = int((columns["step"] == step).argmax())
            selected = int(columns["selected"][row])
            record |= {
                "stored": "sketch" if source.sketched(rank, kind) else "gradient",
                "zeros": int(columns[f"{kind}_zeros"][row]),
                "nonfinite": int(columns[f"{kind}_nonfinite"][row]),
                "loss": float(columns["loss"][row]),
                "learning_rate": float(columns["learning_rate"][row]),
                "threshold": float(columns["threshold"][row]),
                "selected": None if selected < 0 else selected,
            }
        records.append(record)
    return records


@dataclass(frozen=True, slots=True)
class _Fitting:
    """What :func:`fit_records` does with the sketches of one gradient; travels to a worker."""

    models: tuple[str, ...]
    method: Method | None
    replicates: int
    size: int
    seed: int

    def __call__(self, labels: dict[str, Any], sketches: dict[str, Sketch]) -> list[dict[str, Any]]:
        return [
            labels | {"layer": layer, "model": model} | self._one(model, reduced)
            for layer, reduced in sketches.items()
            for model in self.models
        ]

    def _one(self, model: str, reduced: Sketch) -> dict[str, Any]:
        method = self.method or default_method(model)
        record: dict[str, Any] = {
            "method": method,
            "n": reduced.moments.count,
            "zeros": reduced.moments.zero_fraction,
        }
        nan = float("nan")
        try:
            fitted = fit(reduced, model, method)
        except FitError as error:
            numbers = dict.fromkeys(_DISTANCES, nan)
            record |= {"params": {}, "stderr": {}, **numbers, "log_quantile": {}, "quality": {}}
            if self.replicates:
                record |= _UNTESTED
            return record | {"status": str(error)}
        distances = goodness(fitted, reduced)
        record |= {
            "params": dict(fitted.params),
            "stderr": dict(fitted.stderr),
            "tail_error": distances.tail_error,
            **asdict(distances),
        }
        if self.replicates:
            record |= self._test(model, method, reduced)
        return record | {"status": "; ".join(fitted.flags) or "ok"}

    def _test(self, model: str, method: Method, reduced: Sketch) -> dict[str, Any]:
        try:
            test = bootstrap(
                reduced,
                model,
                method,
                size=self.size,
                replicates=self.replicates,
                seed=self.seed,
            )
        except FitError:
            return _UNTESTED
        return {"p_value": test.p_value, "p_naive": test.p_naive, "subsample": test.size}


_UNTESTED = {"p_value": float("nan"), "p_naive": float("nan"), "subsample": 0}
_DISTANCES = ("nll", "aic", "bic", "ks", "wasserstein", "ad_upper", "tail_error")


def default_method(model: str) -> Method:
    """Return the closed form where a model has one, as thresholds use it; else maximum likelihood."""
    return (
        "closed" if model in ("laplace", "dgamma", "double_genpareto", "norm", "lognorm") else "mle"
    )


def fit_records(
    source: Source,
    models: Sequence[str] = MODELS[:3],
    *,
    method: Method | None = None,
    per_layer: bool = False,
    replicates: int = 0,
    size: int = 2000,
    seed: int = 0,
    client: Any = None,
    on_progress: Callable[[], None] = _nothing,
    **selection: Any,
) -> list[dict[str, Any]]:
    """Fit models to every gradient of a source, whole (layer ``all``) and optionally by layer.

    Parameters
    ----------
    source : read piece by piece.
    models : names; the three sparsity-inducing ones if absent.
    method : as for :func:`gradstats.fit`; :func:`default_method` of each model if None.
    replicates : of the bootstrap behind p_value; none if 0.
    size, seed : of the subsample it tests.
    client : dask client to do the work.
    on_progress : called after every gradient.
    selection : steps, ranks, kinds.

    Returns
    -------
    list of dict
        trace, step, rank, kind, layer, model, method, n, zeros, params, stderr, the fields of
        :class:`gradstats.goodness.Goodness`, p_value, p_naive and subsample if asked for, status. A layer that
        a model cannot describe has empty numbers and the reason in ``status``.
    """
    for model in models:
        check_method(model, method or default_method(model))
    work = _Fitting(tuple(models), method, replicates, size, seed)
    return _each(source, work, per_layer, client, on_progress, selection)


def _each(
    source: Source,
    work: Callable[[dict[str, Any], dict[str, Sketch]], list[dict[str, Any]]],
    per_layer: bool,
    client: Any,
    on_progress: Callable[[], None],
    selection: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return the records that ``work(labels, sketches)`` makes of every gradient selected."""
    records: list[dict[str, Any]] = []

    def plan(submit: Submit, key: Key) -> Any:
        sketches = plan_sketches(submit, source, key, per_layer=per_layer)
        return submit(work, source.labels(*key), sketches)

    for found in evaluate(plan, source.select(**selection), client):
        records += found
        on_progress()
    return records


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
    on_progress: Callable[[], None] = _nothing,
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
        target_count(ratio, 1)
    work = _Peaks(asked, method, replicates, size, seed)
    return _each(source, work, False, client, on_progress, selection)


_POT_RATIOS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001)


def mixture_records(
    source: Source,
    at: float = 0.1,
    *,
    method: Method = "mle",
    client: Any = None,
    on_progress: Callable[[], None] = _nothing,
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
    return _each(source, work, True, client, on_progress, selection)


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


def compressibility_records(
    sources: Iterable[Source],
    window: tuple[int, int] | None = None,
    *,
    client: Any = None,
    on_progress: Callable[[], None] = _nothing,
    **selection: Any,
) -> list[dict[str, Any]]:
    """Return the decay of every gradient, then of controls of the same size and window.

    The controls' kind is their name and their step and rank are None.
    """
    records = []
    sizes: dict[int, None] = {}
    for source in sources:
        first, last = checked_window(window, source.numel)

        def plan(
            submit: Submit, key: Key, source: Source = source, first: int = first, last: int = last
        ) -> Any:
            sketches = plan_sketches(submit, source, key)
            largest = plan_largest(submit, source, key, sketches, last)
            return submit(_decay, source.labels(*key), largest, sketches, first)

        for record in evaluate(plan, source.select(**selection), client):
            records.append(record)
            on_progress()
        sizes[source.numel] = None
    for numel in sizes:
        for name in CONTROLS:
            labels = {"trace": "control", "step": None, "rank": None, "kind": name}
            records.append(labels | _fields(control(name, numel, window)[0]))
    return records


def _decay(
    labels: dict[str, Any], largest: NDArray[np.float64], sketches: dict[str, Sketch], first: int
) -> dict[str, Any]:
    return labels | _fields(decay_of(largest, first, sketches["all"].moments.sum_squares))


def _fields(decay: Compressibility) -> dict[str, Any]:
    return asdict(decay) | {"window": f"{decay.window[0]}-{decay.window[1]}"}
