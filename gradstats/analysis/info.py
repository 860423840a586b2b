"""Contents of a source: the records of ``gradstats info``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gradstats.tables import Records, format_bytes, format_value
from gradstats.trace import Kind
from gradstats.trace.sources import Source, TraceSource

__all__ = ["describe", "info_records", "info_summary"]


def describe(source: TraceSource) -> dict[str, str]:
    """Return what is known of the run behind a trace, in words.

    Parameters
    ----------
    source : TraceSource
        Trace to describe.

    Returns
    -------
    dict of str to str
        Of run, compressor, training, loss, gradient, captured, size, made and versions those that are known.
    """
    trace, a = source.trace, source.trace.attrs
    # ranks of a sharded model are read under one of them
    captured = len(set().union(*map(trace.shard_ranks, trace.ranks)))
    optimizer = a.get("optimizer")
    # metadata may be anything, also a text
    if not isinstance(optimizer, Mapping):
        optimizer = {"name": optimizer} if isinstance(optimizer, str) else {}
    versions = a.get("versions")
    versions = versions if isinstance(versions, Mapping) else {}
    facts = {
        "run": _joined([a.get("model"), f"on {a['data']}" if "data" in a else None], " "),
        "compressor": _joined(
            [
                a.get("compressor"),
                f"ratio {a['ratio']:g}" if isinstance(a.get("ratio"), int | float) else None,
                {"True": "with error feedback", "False": "without error feedback"}.get(
                    str(a.get("error_feedback"))
                ),
            ]
        ),
        "training": _joined(
            [
                a.get("workload"),
                *(
                    f"{n.replace('_', ' ')} {a[n]}"
                    for n in ("steps", "batch_size", "seed")
                    if n in a
                ),
                optimizer.get("name"),
                *(
                    f"{name.replace('_', ' ')} {format_value(value)}"
                    for name, value in optimizer.items()
                    if name != "name" and isinstance(value, int | float | str)
                ),
            ]
        ),
        "loss": _ends(source, "loss"),
        "learning rate": _ends(source, "learning_rate"),
        "gradient": f"{trace.numel:,} elements in {len(trace.layers)} parameters",
        "captured": f"{len(trace.steps())} steps, {captured} of {trace.world_size} ranks",
        "size": _size(source),
        "made": _joined([a.get("created"), f"on {a['host']}" if "host" in a else None], " "),
        "versions": _joined([f"{k} {v}" for k, v in versions.items()]),
    }
    return {name: text for name, text in facts.items() if text}


def _joined(parts: list[Any], between: str = ", ") -> str:
    return between.join(str(part) for part in parts if part is not None)


def _ends(source: TraceSource, name: str) -> str:
    """Return a recorded number at the first and the last step that the first rank has it of."""
    # none where nothing was captured
    for rank in source.trace.ranks[:1]:
        columns = source.trace.scalars(rank)
        steps, values = columns["step"].tolist(), columns[name].tolist()
        known = [(step, v) for step, v in zip(steps, values, strict=True) if math.isfinite(v)]
        if known:
            shown = [f"{format_value(v)} at step {step}" for step, v in (known[0], known[-1])]
            same = known[0][1] == known[-1][1]
            return format_value(known[0][1]) if same else " to ".join(shown)
    return ""


def _size(source: TraceSource) -> str:
    """Return how much the trace takes on the disk."""
    files = (os.path.join(at, n) for at, _, names in os.walk(source.trace.path) for n in names)
    size = float(sum(os.path.getsize(file) for file in files if os.path.isfile(file)))
    return f"{format_bytes(size)} on the disk"


def _scalars(source: Source) -> dict[int, Mapping[str, Any]]:
    """Return the columns of every rank of a trace; none of another source."""
    if not isinstance(source, TraceSource):
        return {}
    return {rank: source.trace.scalars(rank) for rank in source.trace.ranks}


def info_records(source: Source) -> Records:
    """Return what a source holds.

    Parameters
    ----------
    source : Source
        Source to describe.

    Returns
    -------
    Records
        One record per gradient: trace, step, rank, kind, numel. From a trace also stored (``gradient`` or
        ``sketch``), zeros and nonfinite (elements), loss, learning_rate, threshold, selected (k̂; None where unknown).
    """
    records = Records()
    scalars = _scalars(source)
    for rank, kind, step in source.entries():
        record = source.labels(rank, kind, step) | {"numel": source.numel}
        if rank in scalars:
            columns = scalars[rank]
            # the row of the step: gradients and numbers of a rank are of the same steps
            row = int((columns["step"] == step).argmax())
            selected = int(columns["selected"][row])
            record |= {
                "stored": "sketch" if source.sketched(rank, kind) else "gradient",
                "zeros": int(columns[f"{kind}_zeros"][row]),
                "nonfinite": int(columns[f"{kind}_nonfinite"][row]),
                "loss": float(columns["loss"][row]),
                "learning_rate": float(columns["learning_rate"][row]),
                "threshold": float(columns["threshold"][row]),
                # −1: no compressor recorded it
                "selected": None if selected < 0 else selected,
            }
        records.append(record)
    return records


def info_summary(source: Source) -> Records:
    """Return what a source holds, in one record of each kind, read rank by rank and not gradient by gradient.

    Parameters
    ----------
    source : Source
        Source to describe.

    Returns
    -------
    Records
        trace, kind, ranks and steps (in words), gradients (their number), numel; from a trace also zeros (most elements
        of one gradient) and nonfinite (gradients with any).
    """
    groups: dict[Kind, dict[int, list[int]]] = {}
    for rank, kind, step in source.entries():
        groups.setdefault(kind, {}).setdefault(rank, []).append(step)
    scalars = _scalars(source)
    records = Records()
    for kind, ranks in groups.items():
        steps = sorted({step for each in ranks.values() for step in each})
        rank, step = next(iter(ranks)), steps[0]
        record = {"trace": source.labels(rank, kind, step)["trace"], "kind": kind}
        record |= {"ranks": _spanned([*ranks]), "steps": _spanned(steps)}
        record |= {"gradients": sum(map(len, ranks.values())), "numel": source.numel}
        if scalars:
            zeros, nonfinite = 0, 0
            for each, have in ranks.items():
                columns = scalars[each]
                some = np.isin(columns["step"], have)
                zeros = max(zeros, int(columns[f"{kind}_zeros"][some].max(initial=0)))
                nonfinite += int(np.count_nonzero(columns[f"{kind}_nonfinite"][some] > 0))
            record |= {"zeros": zeros, "nonfinite": nonfinite}
        records.append(record)
    return records


def _spanned(numbers: Sequence[int]) -> str:
    """Return whole numbers in few words."""
    if len(numbers) < 5:
        return ", ".join(map(str, numbers))
    apart = {b - a for a, b in pairwise(numbers)}
    each = f" every {next(iter(apart))}" if len(apart) == 1 and apart != {1} else ""
    return f"{len(numbers)}, {numbers[0]} to {numbers[-1]}{each}"
