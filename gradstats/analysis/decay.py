"""How fast sorted magnitudes fall: the records of ``gradstats compressibility``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.over import SpreadGradients, shares, subset_of
from gradstats.analysis.pieces import Key, Submit, evaluate, plan_largest, plan_sketches
from gradstats.primitives.sketch import Sketch
from gradstats.statistics.compressibility import (
    CONTROLS,
    Compressibility,
    checked_window,
    control,
    decay_of,
    with_blocks,
)
from gradstats.tables import Records
from gradstats.trace.sources import Source

__all__ = ["compressibility_records"]


@shares(SpreadGradients)
def compressibility_records(
    sources: Iterable[Source],
    window: tuple[int, int] | None = None,
    **over: Unpack[SpreadGradients],
) -> Records:
    """Return the decay of every gradient, then of controls of the same size and window.

    Parameters
    ----------
    sources : iterable of Source
        Sources to read piece by piece.
    window : (int, int), optional
        First and last rank to look at, as in :func:`gradstats.compressibility`.
    **over : Unpack[SpreadGradients]
        Gradients to look at, as in :class:`gradstats.analysis.over.SpreadGradients`.

    Returns
    -------
    Records
        trace, step, rank, kind and the fields of :class:`gradstats.statistics.compressibility.Compressibility`. A
        control has its name as kind; its trace is ``control``, its step and rank are None.

    Raises
    ------
    InputError
        If the window does not fit, or nothing matches.
    """
    subset = subset_of(over)
    records = Records()
    # a dict is a set in order: controls follow the sizes of the sources, each once
    sizes: dict[int, None] = {}
    for source in sources:
        # a window of the non-zero elements lies within that of all
        _, last = checked_window(window, source.numel)

        def plan(submit: Submit, key: Key, source: Source = source, last: int = last) -> Any:
            sketches = plan_sketches(submit, source, key)
            # as many again below the window, which a bootstrap's replicates need
            largest = plan_largest(submit, source, key, sketches, 2 * last)
            # blocks of the bootstrap may be the layers
            layers = np.array([layer.offset for layer in source.layers], np.int64)
            return submit(_decay, source.labels(*key), largest, sketches, window, layers)

        for record in evaluate(plan, subset.keys(source), over["client"]):
            records.append(record)
            over["on_progress"]()
        sizes[source.numel] = None
    for numel in sizes:
        for name in CONTROLS:
            labels = {"trace": "control", "step": None, "rank": None, "kind": name}
            ideal = control(name, numel, window)[0]
            # ideal samples have no neighbours that depend on one another
            records.append(labels | _fields(replace(ideal, dependence="")))
    return records


def _decay(
    labels: dict[str, Any],
    largest: tuple[NDArray[np.float64], NDArray[np.int64] | None],
    sketches: dict[str, Sketch],
    window: tuple[int, int] | None,
    layers: NDArray[np.int64],
) -> dict[str, Any]:
    m, (magnitudes, positions) = sketches["all"].magnitudes, largest
    # the window of the non-zero elements, which may be fewer than the source's
    first, last = checked_window(window, m.count)
    if positions is not None:
        # sketches do not know positions
        positions = positions[: 2 * last]
    decay = decay_of(magnitudes[:last], first, m)
    numel = sketches["all"].numel
    return labels | _fields(with_blocks(decay, magnitudes[: 2 * last], positions, numel, layers))


def _fields(decay: Compressibility) -> dict[str, Any]:
    # without the sample, an array that asdict would copy
    fields = asdict(replace(decay, sample=None))
    del fields["sample"]
    return fields | {"window": f"{decay.window[0]}-{decay.window[1]}"}
