"""The records behind the tables: one function per command, from sources to flat dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradstats._compressibility import CONTROLS, Compressibility, compressibility, control
from gradstats._fit import MODELS, FitError, fit_moments
from gradstats.errors import InputError
from gradstats.goodness import goodness, sorted_magnitudes
from gradstats.primitives import moments, numel_of
from gradstats.sources import Source, TraceSource, layer_parts

__all__ = ["compressibility_records", "fit_records", "info_records"]


def _nothing() -> None:
    pass


def info_records(source: Source) -> list[dict[str, Any]]:
    """Return what a source holds: one record per rank, kind and step, with its scalars where it has them."""
    records = []
    scalars = {}
    if isinstance(source, TraceSource):
        scalars = {rank: source.trace.scalars(rank) for rank in source.trace.ranks}
    numel = sum(layer.numel for layer in source.layers)
    for rank, kind, step in source.entries():
        record: dict[str, Any] = {
            "trace": source.name,
            "step": step,
            "rank": rank,
            "kind": kind,
            "numel": numel,
        }
        if rank in scalars:
            columns = scalars[rank]
            row = int((columns["step"] == step).argmax())
            selected = int(columns["selected"][row])
            record |= {
                "zeros": int(columns[f"{kind}_zeros"][row]),
                "nonfinite": int(columns[f"{kind}_nonfinite"][row]),
                "loss": float(columns["loss"][row]),
                "learning_rate": float(columns["learning_rate"][row]),
                "threshold": float(columns["threshold"][row]),
                "selected": None if selected < 0 else selected,
            }
        records.append(record)
    return records


def fit_records(
    source: Source,
    models: Sequence[str] = MODELS,
    *,
    per_layer: bool = False,
    on_progress: Callable[[], None] = _nothing,
    **selection: Any,
) -> list[dict[str, Any]]:
    """Fit models to every gradient of a source, whole (layer ``all``) and optionally by layer.

    A layer that a model cannot describe has empty numbers and the reason in ``status``.
    """
    records = []
    for model in models:
        if model not in MODELS:
            raise InputError(f"no model {model!r}; there are {', '.join(MODELS)}")
    for key in source.select(**selection):
        captured = source.read(*key)
        for layer, values in layer_parts(source, captured, per_layer):
            sums = moments(values)
            ordered = sorted_magnitudes(values)
            for model in models:
                record = captured.labels | {"layer": layer, "model": model}
                try:
                    fitted = fit_moments(sums, model)
                except FitError as error:
                    nan = float("nan")
                    record |= {"params": {}, "nll": nan, "aic": nan, "ks": nan, "tail_error": nan}
                    records.append(record | {"zeros": sums.zero_fraction, "status": str(error)})
                    continue
                measured = goodness(fitted, ordered)
                record |= {
                    "params": {k: float(v) for k, v in fitted.params.items()},
                    "nll": measured.nll,
                    "aic": measured.aic,
                    "ks": measured.ks,
                    "tail_error": measured.tail_error,
                    "zeros": sums.zero_fraction,
                    "status": "; ".join(fitted.flags) or "ok",
                }
                records.append(record)
        on_progress()
    return records


def compressibility_records(
    sources: Iterable[Source],
    window: tuple[int, int] | None = None,
    *,
    on_progress: Callable[[], None] = _nothing,
    **selection: Any,
) -> list[dict[str, Any]]:
    """Return the decay of every gradient, then of controls of the same size and window.

    The controls' kind is their name and their step and rank are None.
    """
    records = []
    sizes: dict[int, None] = {}
    for source in sources:
        for key in source.select(**selection):
            captured = source.read(*key)
            decay = compressibility(captured.values, window)
            records.append(captured.labels | _decay(decay))
            sizes[numel_of(captured.values)] = None
            on_progress()
    for numel in sizes:
        for name in CONTROLS:
            labels = {"trace": "control", "step": None, "rank": None, "kind": name}
            records.append(labels | _decay(control(name, numel, window)[0]))
    return records


def _decay(decay: Compressibility) -> dict[str, Any]:
    return {
        "p": decay.p,
        "p_low": decay.p_low,
        "p_high": decay.p_high,
        "hill": decay.hill,
        "hill_low": decay.hill_low,
        "hill_high": decay.hill_high,
        "c1": decay.c1,
        "window": f"{decay.window[0]}-{decay.window[1]}",
        "compressible": decay.compressible,
    }
