"""A trace of dumps that people have: step after step, resumable, in the memory of one gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from gradstats.console import no_progress
from gradstats.errors import InputError
from gradstats.files import refuse_address
from gradstats.primitives.arrays import as_numpy
from gradstats.trace import TraceWriter, create_trace, is_trace, open_trace
from gradstats.trace.dumps import Dumps
from gradstats.version import __version__

__all__ = ["import_dumps"]


def import_dumps(
    source: Dumps, out: str | Path, on_progress: Callable[[], None] = no_progress
) -> int:
    """Write the gradients of a source into a trace; continue one that was begun.

    Parameters
    ----------
    source : Dumps
        Gradients of one kind.
    out : str or Path
        Trace to make, or one that an earlier import of the same layers began: steps that it holds are not read again.
    on_progress : callable
        Called without arguments after every gradient, those that were there included.

    Returns
    -------
    int
        Gradients written.

    Raises
    ------
    InputError
        If a dump cannot be read, has other layers, comes before a step that is there, or is of a rank beyond those that
        the trace was begun with.
    TraceError
        If `out` is something else than such a trace, or cannot be written.
    """
    refuse_address(out)
    keys = source.entries()
    kind = keys[0][1]
    ranks = sorted({rank for rank, _, _ in keys})
    if not is_trace(out):
        # a later import knows its own trace by this entry
        about = {"imported": kind, "versions": {"gradstats": __version__}}
        create_trace(out, source.layers, world_size=ranks[-1] + 1, metadata=about)
    trace = open_trace(out)
    # a capture has steps of its own: an import must not add to them
    if trace.attrs.get("imported") != kind:
        raise InputError(
            f"{out} is another trace, not an import of kind {kind}: choose another name"
        )
    if trace.layers != source.layers:
        raise InputError(f"{out} has other layers than {source.name}: choose another name")
    if ranks[-1] >= trace.world_size:
        raise InputError(
            f"{out} was begun with {trace.world_size} {'rank' if trace.world_size == 1 else 'ranks'}, and "
            f"{source.name} has rank {ranks[-1]}: import all ranks at once, under another name"
        )
    written = 0
    for rank in ranks:
        steps = [step for r, _, step in keys if r == rank]
        there = set(trace.steps(rank)) if rank in trace.ranks else set()
        missing = [step for step in steps if step not in there]
        # a writer only appends, and cannot insert a step before one that is there
        if missing and there and missing[0] < max(there):
            raise InputError(
                f"step {missing[0]} of rank {rank} comes before step {max(there)}, which {out} holds: choose "
                "another name"
            )
        for _ in range(len(steps) - len(missing)):
            on_progress()
        if not missing:
            continue
        writer = TraceWriter(
            out,
            rank,
            kinds=(kind,),
            # a group that exists keeps the chunks that it was laid out with
            expected_steps=None if rank in trace.ranks else len(steps),
            resume=rank in trace.ranks,
        )
        for step in missing:
            values = as_numpy(source.read(rank, kind, step).values)
            # float64 beyond float32 becomes infinite, and is counted with what is not finite
            with np.errstate(over="ignore"):
                writer.append(step, {kind: np.ascontiguousarray(values, np.float32)})
            written += 1
            on_progress()
        writer.close()
    return written
