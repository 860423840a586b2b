"""The number of positions that ranks select together, measured in a trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradstats.errors import InputError
from gradstats.primitives import top_candidates
from gradstats.primitives.ratio import target_count
from gradstats.statistics.union import UnionGrowth, fit_union
from gradstats.trace import Kind, Trace

__all__ = ["UnionGrowth", "union_growth"]


def union_growth(
    trace: Trace,
    ratio: float,
    *,
    kind: Kind = "gradient",
    steps: Sequence[int] | None = None,
) -> list[UnionGrowth]:
    """Measure how the exact top-k selections of a trace's ranks overlap, step by step.

    Parameters
    ----------
    trace : Trace
        Trace of at least two ranks.
    ratio : float
        Kept fraction k/d, in (0, 1].
    kind : Kind
        Which captured vector to look at. A compressor with error feedback sees ``"corrected"``.
    steps : sequence of int, optional
        Steps to measure. By default all that every rank has.

    Returns
    -------
    list of UnionGrowth
        One for each step.

    Raises
    ------
    InputError
        If the trace has one rank, or a step is not there on all ranks.
    """
    if len(trace.ranks) < 2:
        raise InputError(f"{trace.path} has one rank; a union needs several")
    common = set.intersection(*(set(trace.steps(rank)) for rank in trace.ranks))
    chosen = sorted(common) if steps is None else list(steps)
    if not chosen or not common.issuperset(chosen):
        raise InputError(f"{trace.path} has no such step on all of its ranks")
    growth = []
    for step in chosen:
        # how many ranks have selected each position
        times = np.zeros(trace.numel, np.uint16)
        for rank in trace.ranks:
            gradient = trace.read(step, rank=rank, kind=kind)
            selection = top_candidates(gradient, target_count(ratio, trace.numel))[1]
            # += counts each index once, and the positions of a selection are distinct
            times[np.asarray(selection.indices)] += 1
        counts = np.bincount(times, minlength=len(trace.ranks) + 1).astype(np.int64)
        growth.append(fit_union(counts))
    return growth
