"""From gradients on disk to sketches, piece by piece: in this process, or on a dask cluster.

The pieces and the order in which they are put together do not depend on what runs them, so neither do the numbers. A
piece holds at most :data:`PIECE` elements, which is all the memory an analysis needs apart from its sketches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gradstats.console import followed, no_progress
from gradstats.errors import GradstatsError, InputError
from gradstats.primitives import select
from gradstats.primitives.arrays import as_numpy, as_positions
from gradstats.primitives.sketch import Sketch, merge, sketch
from gradstats.registry import loaded_files
from gradstats.statistics.compressibility import in_order
from gradstats.tables import Records
from gradstats.trace import Kind
from gradstats.trace.sources import Source, Subset

__all__ = [
    "PIECE",
    "Key",
    "Submit",
    "connect",
    "each_sketched",
    "evaluate",
    "plan_largest",
    "plan_sketches",
    "sketches_of",
]

PIECE = 1 << 22
"""Most elements read at once: the size of a trace's chunk."""

Key: TypeAlias = tuple[int, Kind, int]
"""Rank, kind and step of a gradient."""

Submit: TypeAlias = Callable[..., Any]
"""``submit(function, *arguments)``: a plain call, or dask's, which returns futures and takes them as arguments."""

Located: TypeAlias = tuple[NDArray[np.float64], NDArray[np.int64] | None]
"""Magnitudes, and where in the gradient they lie if that is known."""

T = TypeVar("T")


def connect(address: str | None) -> AbstractContextManager[Any]:
    """Return a client of a dask cluster, whose workers know what `gradstats --load` has loaded here.

    Parameters
    ----------
    address : str or None
        Address of the scheduler, ``tcp://host:port``; None for work in this process.

    Returns
    -------
    context manager of distributed.Client or None
        Connected client, to be closed at the end of a ``with`` statement; None without an address.

    Raises
    ------
    InputError
        If nothing listens there, or no scheduler answers within dask's ``distributed.comm.timeouts.connect``.
    """
    if address is None:
        return nullcontext()
    try:
        from distributed import Client
    except ImportError:
        raise GradstatsError(
            "a dask cluster needs dask.distributed: pip install 'gradstats[cluster]'"
        ) from None
    try:
        _check_answer(address)
        client: Any = Client(address)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise InputError(f"no dask scheduler at {address}: {error}") from None
    for file in loaded_files():
        client.upload_file(file)  # and every worker imports it
    return cast("AbstractContextManager[Any]", client)


def _check_answer(address: str) -> None:
    """Raise if nothing listens at an address, or nothing that answers: dask tries again, and waits without an end."""
    import asyncio
    import socket
    from concurrent.futures import ThreadPoolExecutor

    from dask.config import get
    from dask.utils import parse_timedelta
    from distributed.comm.addressing import parse_address, parse_host_port
    from distributed.comm.core import connect

    if parse_address(address)[0] in ("tcp", "tls"):
        socket.create_connection(parse_host_port(address), timeout=5).close()
    # a busy one has all the time that dask gives it
    limit = parse_timedelta(get("distributed.comm.timeouts.connect"))

    async def meet() -> None:
        met = await asyncio.wait_for(connect(address), limit)  # type: ignore[no-untyped-call]
        await met.close()

    # in a thread: a notebook has a running loop in this one
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(asyncio.run, meet()).result()
        except TimeoutError:
            raise OSError(f"what listens there has not answered in {limit:g} s") from None


def _call(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def evaluate(
    plan: Callable[[Submit, Any], Any],
    keys: Iterable[Any],
    client: Any = None,
    title: str = "gradients",
) -> Iterator[Any]:
    """Yield the result of a plan for every gradient, or other piece of the work, in order.

    Parameters
    ----------
    plan : callable
        ``plan(submit, key)`` submits the steps of an analysis and returns the last one's future.
    keys : iterable
        Gradients to analyse, each a :data:`Key`; or steps, or series.
    client : distributed.Client, optional
        Cluster that does the work. By default this process does it, one after another.
    title : str, optional
        What the keys are, in the plural.

    Yields
    ------
    object
        What the last step of the plan returned.
    """
    # one gradient at a time is in memory, and none is read before it is asked for
    if client is None:
        for key in followed(keys, title):
            yield plan(_call, key)
        return

    def submit(function: Callable[..., Any], *arguments: Any) -> Any:
        # pure tasks are named by a hash of their arguments, and equal calls would share one result
        return client.submit(function, *arguments, pure=False)

    # all are submitted before the first is waited for, or workers would idle
    futures = [plan(submit, key) for key in keys]
    try:
        for i in followed(range(len(futures)), title):
            yield futures[i].result()
            futures[i] = None  # lets the cluster forget it
    # a reader that stops early, or an error, leaves tasks that nobody waits for
    finally:
        client.cancel([future for future in futures if future is not None])


def plan_sketches(
    submit: Submit,
    source: Source,
    key: Key,
    *,
    parameters: Collection[str] = (),
) -> Any:
    """Submit the sketches of one gradient.

    Parameters
    ----------
    submit : Submit
        What runs the pieces.
    source : Source
        Source of the gradient.
    key : Key
        Rank, kind and step of the gradient.
    parameters : collection of str, optional
        Names of parameters that get a sketch of their own.

    Returns
    -------
    dict of Sketch, or a future of it
        ``all``, the whole gradient, then the parameters' in the order of the flat gradient.
    """
    wanted = [la.name if la.name in parameters else None for la in source.layers]
    if source.sketched(*key[:2]):
        return submit(_stored, source, key, wanted)
    parts = [
        submit(_sketch_piece, source, key, spans) for spans in _pieces(source, bool(parameters))
    ]
    return submit(_put_together, parts, wanted)


def _pieces(source: Source, per_layer: bool) -> list[list[tuple[int, int, int]]]:
    """Return the (layer, start, stop) spans of every piece; without `per_layer` the layer is always 0."""
    pieces = []
    for start in range(0, source.numel, PIECE):
        stop = min(start + PIECE, source.numel)
        spans = [(0, start, stop)]
        if per_layer:
            # a layer may go on in the next piece, and a piece hold several layers
            spans = [
                (i, max(start, la.offset), min(stop, la.offset + la.numel))
                for i, la in enumerate(source.layers)
                if la.offset < stop and la.offset + la.numel > start
            ]
        pieces.append(spans)
    return pieces


def _sketch_piece(
    source: Source, key: Key, spans: list[tuple[int, int, int]]
) -> list[tuple[int, Sketch]]:
    start, stop = spans[0][1], spans[-1][2]
    # one read for all layers of the piece
    values = source.elements(*key, start, stop)
    return [(layer, sketch(values[a - start : b - start])) for layer, a, b in spans]


def _put_together(
    parts: list[list[tuple[int, Sketch]]], wanted: list[str | None]
) -> dict[str, Sketch]:
    by_layer: dict[int, list[Sketch]] = {}
    for layer, piece in itertools.chain.from_iterable(parts):
        by_layer.setdefault(layer, []).append(piece)
    # merge takes one sketch at least, and a gradient or a layer may have no elements
    empty = [sketch(np.empty(0, np.float32))]
    result = {"all": merge([s for part in parts for _, s in part] or empty)}
    for i, name in enumerate(wanted):
        if name is not None:
            result[name] = merge(by_layer.get(i, empty))
    return result


def _stored(source: Source, key: Key, wanted: list[str | None]) -> dict[str, Sketch]:
    sketches = source.stored_sketches(*key)
    parameters = zip(wanted, sketches, strict=True)
    return {"all": merge(sketches)} | {name: s for name, s in parameters if name is not None}


def plan_largest(submit: Submit, source: Source, key: Key, sketches: Any, count: int) -> Any:
    """Submit the largest finite magnitudes of one gradient.

    The sketch says where they begin, and a second read collects them. From a source of sketches they are good to the
    width of a cell.

    Parameters
    ----------
    submit : Submit
        What runs the pieces.
    source : Source
        Source of the gradient.
    key : Key
        Rank, kind and step of the gradient.
    sketches : dict of Sketch, or a future of it
        Sketches of the gradient, from :func:`plan_sketches`.
    count : int
        Number of magnitudes.

    Returns
    -------
    (ndarray of float64, ndarray of int64 or None), or a future of it
        Magnitudes in descending order, at most `count`, and their positions; None from a source of sketches.
    """
    if source.sketched(*key[:2]):
        return submit(_expand, sketches, count)
    low = submit(_beginning, sketches, count)
    parts = [
        submit(_collect, source, key, spans[0][1], spans[-1][2], low)
        for spans in _pieces(source, False)
    ]
    return submit(_largest, parts, count)


def _expand(sketches: dict[str, Sketch], count: int) -> Located:
    return sketches["all"].magnitudes.largest(count), None


def _beginning(sketches: dict[str, Sketch], count: int) -> float:
    """Return the left edge of the cell from which on there are at least `count` elements; 0 if there are fewer."""
    m = sketches["all"].magnitudes
    i = int(np.searchsorted(m.cumulative, m.count - count, side="right"))
    return float(m.left[i]) if i < m.left.size and count < m.count else 0.0


def _collect(source: Source, key: Key, start: int, stop: int, low: float) -> Located:
    # at least count magnitudes of the whole gradient are this large; a piece may have none
    selection = select(source.elements(*key, start, stop), low)
    magnitude: NDArray[np.float64] = np.abs(as_numpy(selection.values)).astype(np.float64)
    return magnitude, as_positions(selection.indices) + start


def _largest(parts: list[tuple[NDArray[np.float64], NDArray[np.int64]]], count: int) -> Located:
    if not parts:
        return np.empty(0), np.empty(0, np.int64)
    magnitudes, positions = (np.concatenate(each) for each in zip(*parts, strict=True))
    return in_order(magnitudes, positions, count)


def sketches_of(
    source: Source, keys: Sequence[Key], client: Any = None, layer: str = "all"
) -> dict[Key, Sketch]:
    """Return the sketch of every gradient as a whole, or of one of its layers.

    Parameters
    ----------
    source : Source
        Source to read piece by piece.
    keys : sequence of Key
        Rank, kind and step of each gradient.
    client : distributed.Client, optional
        Cluster that does the work.
    layer : str, optional
        Name of the layer; all of them by default.

    Returns
    -------
    dict of Key to Sketch
        Sketches, in the order of `keys`.
    """
    parts = () if layer == "all" else (layer,)
    all_sketches = evaluate(
        lambda submit, key: plan_sketches(submit, source, key, parameters=parts), keys, client
    )
    return {key: sketches[layer] for key, sketches in zip(keys, all_sketches, strict=True)}


def each_sketched(
    source: Source,
    subset: Subset,
    work: Callable[[dict[str, Any], dict[str, Sketch]], list[dict[str, Any]]],
    client: Any = None,
    on_progress: Callable[[], None] = no_progress,
) -> Records:
    """Return the records that a piece of work makes of every gradient's sketches.

    Parameters
    ----------
    source : Source
        Source to read piece by piece.
    subset : Subset
        Gradients to look at, and parameters that get sketches of their own.
    work : callable
        ``work(labels, sketches)`` returns the records of one gradient. It travels to the workers.
    client : distributed.Client, optional
        Cluster that does the work.
    on_progress : callable, optional
        Called after every gradient.

    Returns
    -------
    Records
        Records of all gradients, in order.
    """
    records = Records()
    parameters = subset.parameters(source)

    def plan(submit: Submit, key: Key) -> Any:
        sketches = plan_sketches(submit, source, key, parameters=parameters)
        return submit(work, source.labels(*key), sketches)

    for rows in evaluate(plan, subset.keys(source), client):
        records += rows
        on_progress()
    return records
