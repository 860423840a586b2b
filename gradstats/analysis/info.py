"""Contents of a source: the records of ``gradstats info``."""

from __future__ import annotations

from gradstats.tables import Records
from gradstats.trace.sources import Source, TraceSource

__all__ = ["info_records"]


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
