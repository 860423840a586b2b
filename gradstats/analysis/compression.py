"""A compressor's own account of a captured run, by step and by layer: the records of ``gradstats compression``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from gradstats.tables import Records
from gradstats.trace import Trace, open_trace
from gradstats.trace.record import StepRecord

__all__ = ["compression"]

_COUNTS = ("target", "numel", "bytes_sent", "union")
_SECONDS = ("select_seconds", "communicate_seconds", "overlapped_seconds")


def compression(trace: Trace | str | Path, *, per_layer: bool = False) -> Records:
    """Return what one of this package's compressors recorded of the captured steps of a run.

    Parameters
    ----------
    trace : Trace, str or Path
        Trace captured with one of this package's compressors, or its path. Others give no records.
    per_layer : bool, optional
        Return one record per layer, of the diagnosed steps (``CompressionState(diagnose_every=…)``).

    Returns
    -------
    Records
        Of a step: trace, step, rank, threshold, selected (k̂), target (k), quality (k̂/k), union, build_up (union/k),
        density (union/d), bytes, bits_per_element, select, communicate, overlapped (seconds), residual_norm, error_norm
        (mean of residual_norm over the captured ranks; MiCRO, equation 1), matching_rate (Marsit, figure 1 b). Of a
        layer: trace, step, rank, layer, numel, selected, target, quality, delta (LAGS-SGD, equation 21). Unknown
        numbers are NaN.

    Examples
    --------
    ``gradstats.compression("run.zarr").to_dataframe()``
    """
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    return Records(_layers(opened) if per_layer else _steps(opened))


def _steps(trace: Trace) -> list[dict[str, Any]]:
    records = []
    for rank in trace.ranks:
        # empty where no compressor of this package ran
        columns = trace.compression(rank)
        scalars = trace.scalars(rank)
        for row, step in enumerate(scalars["step"].tolist() if columns else []):
            selected = int(scalars["selected"][row])
            # −1: nothing was recorded of this step
            if selected < 0:
                continue
            numbers: dict[str, Any] = {name: int(columns[name][row]) for name in _COUNTS}
            numbers |= {name: float(columns[name][row]) for name in _SECONDS}
            # quotients are the record's own, so a trace says what the run said while it ran
            r = StepRecord(
                step=step,
                threshold=float(scalars["threshold"][row]),
                selected=selected,
                **numbers,
            )
            records.append(
                {
                    "trace": trace.name,
                    "step": step,
                    "rank": rank,
                    "threshold": r.threshold,
                    "selected": selected,
                    "target": r.target,
                    "quality": r.quality,
                    "union": r.union,
                    "build_up": r.build_up,
                    "density": r.density,
                    "bytes": r.bytes_sent,
                    "bits_per_element": r.bits_per_element,
                    "select": r.select_seconds,
                    "communicate": r.communicate_seconds,
                    "overlapped": r.overlapped_seconds,
                    "residual_norm": float(columns["residual_norm"][row]),
                    "matching_rate": float(columns["matching_rate"][row]),
                }
            )
    # norms of all captured ranks by step, for MiCRO's equation 1: (1/n) Σ‖eᵢ‖
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
                # NaN in steps that were not diagnosed
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
                        "quality": selected / target if target else math.nan,
                        "delta": delta,
                    }
                )
    return records
