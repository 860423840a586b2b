"""The records behind the tables: one function per command, from sources to flat dictionaries.

They work from sketches, piece by piece, so that a gradient need not fit in memory; on a dask cluster if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats._compressibility import (
    CONTROLS,
    Compressibility,
    checked_window,
    control,
    decay_of,
)
from gradstats._fit import METHODS, MODELS, FitError, Method, fit
from gradstats._sketch import Sketch
from gradstats.errors import InputError
from gradstats.goodness import bootstrap, goodness
from gradstats.reduction import Key, Submit, evaluate, plan_largest, plan_sketches
from gradstats.sources import Source, TraceSource

__all__ = ["compressibility_records", "fit_records", "info_records"]


def _nothing() -> None:
    pass


def info_records(source: Source) -> list[dict[str, Any]]:
    """Return what a source holds: one record per rank, kind and step, with its scalars where it has them."""
    records = []
    scalars = {}
    if isinstance(source, TraceSource):
        scalars = {rank: source.trace.scalars(rank) for rank in source.trace.ranks}
    for rank, kind, step in source.entries():
        record: dict[str, Any] = {
            "trace": source.name,
            "step": step,
            "rank": rank,
            "kind": kind,
            "numel": source.numel,
        }
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


def _labels(source: Source, key: Key) -> dict[str, Any]:
    rank, kind, step = key
    return {"trace": source.name, "step": step, "rank": rank, "kind": kind}


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
                record |= {"p_value": nan, "p_naive": nan, "subsample": 0}
            return record | {"status": str(error)}
        distances = asdict(goodness(fitted, reduced))
        record |= {
            "params": dict(fitted.params),
            "stderr": dict(fitted.stderr),
            "tail_error": max(map(abs, distances["log_quantile"].values()), default=nan),
            **distances,
        }
        if self.replicates:
            try:
                test = bootstrap(
                    reduced,
                    model,
                    method,
                    size=self.size,
                    replicates=self.replicates,
                    seed=self.seed,
                )
                record |= {
                    "p_value": test.p_value,
                    "p_naive": test.p_naive,
                    "subsample": test.size,
                }
            except FitError:
                record |= {"p_value": nan, "p_naive": nan, "subsample": 0}
        return record | {"status": "; ".join(fitted.flags) or "ok"}


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
        if model not in MODELS:
            raise InputError(f"no model {model!r}; there are {', '.join(MODELS)}")
    if method is not None and method not in METHODS:
        raise InputError(f"no method {method!r}; there is {', '.join(METHODS)}")
    work = _Fitting(tuple(models), method, replicates, size, seed)
    records: list[dict[str, Any]] = []

    def plan(submit: Submit, key: Key) -> Any:
        return submit(
            work, _labels(source, key), plan_sketches(submit, source, key, per_layer=per_layer)
        )

    for found in evaluate(plan, source.select(**selection), client):
        records += found
        on_progress()
    return records


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
            return submit(_decay, _labels(source, key), largest, sketches, first)

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
