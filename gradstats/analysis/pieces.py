"""From gradients on disk to sketches, piece by piece: in this process, or on a dask cluster.

Whatever runs the pieces, they are the same and are put together in the same order, and so are the numbers. A piece
holds at most :data:`PIECE` elements, which is all the memory an analysis needs beside its sketches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import select
from gradstats.primitives.arrays import as_numpy
from gradstats.primitives.sketch import BITS, Sketch, merge, sketch
from gradstats.trace import Kind
from gradstats.trace.sources import Source

__all__ = [
    "PIECE",
    "Key",
    "Submit",
    "connect",
    "each_sketched",
    "evaluate",
    "plan_largest",
    "plan_sketches",
]

PIECE = 1 << 22
"""Elements read at once: a chunk of a trace."""

Key: TypeAlias = tuple[int, Kind, int]
"""Rank, kind and step of a gradient."""

Submit: TypeAlias = Callable[..., Any]
"""``submit(function, *arguments)``: dask's, which returns futures and takes them as arguments, or a plain call."""

T = TypeVar("T")


def connect(address: str) -> Any:
    """Return a client of the dask cluster at `address` (``tcp://host:port``).

    Raises
    ------
    InputError
        If there is none.
    """
    from distributed import Client

    try:
        return Client(address, timeout="5s")  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise InputError(f"no dask scheduler at {address}: {error}") from None


def _call(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def evaluate(
    plan: Callable[[Submit, Key], Any], keys: Iterable[Key], client: Any = None
) -> Iterator[Any]:
    """Yield the result of a plan for every key, in order.

    Parameters
    ----------
    plan : ``plan(submit, key)`` submits the steps of an analysis and returns the last one's future.
    keys : gradients.
    client : :class:`distributed.Client`; in this process, one after another, if None.
    """
    if client is None:
        for key in keys:
            yield plan(_call, key)
        return

    def submit(function: Callable[..., Any], *arguments: Any) -> Any:
        return client.submit(function, *arguments, pure=False)

    futures = [plan(submit, key) for key in keys]
    try:
        for i, future in enumerate(futures):
            yield future.result()
            futures[i] = None  # lets the cluster forget it
    finally:
        client.cancel([future for future in futures if future is not None])


def plan_sketches(
    submit: Submit, source: Source, key: Key, *, per_layer: bool = False, bits: int = BITS
) -> Any:
    """Submit the sketches of one gradient: a dictionary with ``all``, and every parameter's if wanted."""
    if source.sketched(*key[:2]):
        return submit(_stored, source, key, per_layer)
    parts = [
        submit(_sketch_piece, source, key, spans, bits) for spans in _pieces(source, per_layer)
    ]
    names = [layer.name for layer in source.layers] if per_layer else []
    return submit(_put_together, parts, names, bits)


def _pieces(source: Source, per_layer: bool) -> list[list[tuple[int, int, int]]]:
    """Return the (layer, start, stop) spans of every piece; the layer is 0 if layers do not matter."""
    pieces = []
    for start in range(0, source.numel, PIECE):
        stop = min(start + PIECE, source.numel)
        spans = [(0, start, stop)]
        if per_layer:
            spans = [
                (i, max(start, la.offset), min(stop, la.offset + la.numel))
                for i, la in enumerate(source.layers)
                if la.offset < stop and la.offset + la.numel > start
            ]
        pieces.append(spans)
    return pieces


def _sketch_piece(
    source: Source, key: Key, spans: list[tuple[int, int, int]], bits: int
) -> list[tuple[int, Sketch]]:
    start, stop = spans[0][1], spans[-1][2]
    values = source.elements(*key, start, stop)
    return [(layer, sketch(values[a - start : b - start], bits)) for layer, a, b in spans]


def _put_together(
    parts: list[list[tuple[int, Sketch]]], names: list[str], bits: int
) -> dict[str, Sketch]:
    flat = [piece for part in parts for piece in part]
    empty = sketch(np.empty(0, np.float32), bits)
    result = {"all": merge([s for _, s in flat] or [empty])}
    for i, name in enumerate(names):
        result[name] = merge([s for layer, s in flat if layer == i] or [empty])
    return result


def _stored(source: Source, key: Key, per_layer: bool) -> dict[str, Sketch]:
    sketches = source.stored_sketches(*key)
    result = {"all": merge(sketches)}
    if per_layer:
        result |= {layer.name: s for layer, s in zip(source.layers, sketches, strict=True)}
    return result


def plan_largest(submit: Submit, source: Source, key: Key, sketches: Any, count: int) -> Any:
    """Submit the `count` largest finite magnitudes of one gradient, descending.

    The sketch says where they begin; a second read collects them. Of a source of sketches they are good to
    the width of a cell.

    Parameters
    ----------
    sketches : what :func:`plan_sketches` returned.
    """
    if source.sketched(*key[:2]):
        return submit(_expand, sketches, count)
    low = submit(_beginning, sketches, count)
    parts = [
        submit(_collect, source, key, spans[0][1], spans[-1][2], low)
        for spans in _pieces(source, False)
    ]
    return submit(_largest, parts, count)


def _expand(sketches: dict[str, Sketch], count: int) -> NDArray[np.float64]:
    return sketches["all"].magnitudes.largest(count)


def _beginning(sketches: dict[str, Sketch], count: int) -> float:
    """Return a magnitude that at least `count` elements reach, if there are as many: the left edge of a cell."""
    m = sketches["all"].magnitudes
    i = int(np.searchsorted(m.cumulative, m.count - count, side="right"))
    return float(m.left[i]) if i < m.left.size and count < m.count else 0.0


def _collect(source: Source, key: Key, start: int, stop: int, low: float) -> NDArray[np.float64]:
    kept = as_numpy(select(source.elements(*key, start, stop), low).values)
    magnitude: NDArray[np.float64] = np.abs(kept).astype(np.float64)
    return magnitude[np.isfinite(magnitude)]


def _largest(parts: list[NDArray[np.float64]], count: int) -> NDArray[np.float64]:
    return np.sort(np.concatenate(parts))[::-1][:count] if parts else np.empty(0)


def each_sketched(
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
