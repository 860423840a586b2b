"""What a compressor did in a captured run, step by step and layer by layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradstats.trace import Trace

__all__ = ["compression"]


def compression(trace: Trace, *, per_layer: bool = False) -> list[dict[str, Any]]:
    """Return what this package's compressor recorded of the captured steps of a run.

    Parameters
    ----------
    trace : captured with one of this package's compressors; else there is nothing.
    per_layer : a record per layer, of the diagnosed steps (``CompressionState(diagnose_every=…)``).

    Returns
    -------
    records : trace, step, rank, and of a step: threshold, selected (k̂), target (k), quality (k̂/k), union,
        build_up (union/k), density (union/d), bytes, bits_per_element, select, communicate, overlapped (seconds),
        residual_norm, error_norm (its mean over captured ranks, MiCRO's eq. 1), matching_rate (Marsit, figure 1b). Of a
        layer: layer, numel, selected, target, quality, delta (LAGS-SGD's eq. 21). NaN where unknown.

    Examples
    --------
    ``pandas.DataFrame(gradstats.compression(gradstats.open_trace("run.zarr")))``
    """
    return _layers(trace) if per_layer else _steps(trace)


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _steps(trace: Trace) -> list[dict[str, Any]]:
    records = []
    for rank in trace.ranks:
        columns = trace.compression(rank)
        scalars = trace.scalars(rank)
        for row, step in enumerate(scalars["step"].tolist() if columns else []):
            c = {name: float(values[row]) for name, values in columns.items()}
            selected = int(scalars["selected"][row])
            if selected < 0:
                continue
            records.append(
                {
                    "trace": trace.name,
                    "step": step,
                    "rank": rank,
                    "threshold": float(scalars["threshold"][row]),
                    "selected": selected,
                    "target": int(c["target"]),
                    "quality": _ratio(selected, c["target"]),
                    "union": int(c["union"]),
                    "build_up": _ratio(c["union"], c["target"]),
                    "density": _ratio(c["union"], c["numel"]),
                    "bytes": int(c["bytes_sent"]),
                    "bits_per_element": _ratio(8 * c["bytes_sent"], c["numel"]),
                    "select": c["select_seconds"],
                    "communicate": c["communicate_seconds"],
                    "overlapped": c["overlapped_seconds"],
                    "residual_norm": c["residual_norm"],
                    "matching_rate": c["matching_rate"],
                }
            )
    norms: dict[int, list[float]] = {}
    for record in records:
        norms.setdefault(record["step"], []).append(record["residual_norm"])
    for record in records:
        record["error_norm"] = float(np.mean(norms[record["step"]]))
    return records


def _layers(trace: Trace) -> list[dict[str, Any]]:
    records = []
    for rank in trace.ranks:
        columns = trace.layer_compression(rank)
        for row, step in enumerate(trace.steps(rank) if columns else []):
            for i, layer in enumerate(trace.layers):
                selected, target, delta = (
                    float(columns[name][row, i]) for name in ("selected", "target", "delta")
                )
                if math.isnan(selected):
                    continue
                records.append(
                    {
                        "trace": trace.name,
                        "step": step,
                        "rank": rank,
                        "layer": layer.name,
                        "numel": layer.numel,
                        "selected": int(selected),
                        "target": int(target),
                        "quality": _ratio(selected, target),
                        "delta": delta,
                    }
                )
    return records
