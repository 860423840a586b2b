"""Sources of gradients for the tables: a trace, a folder of traces, a gradient file or arrays in memory.

Gradient files are ``.npy``, ``.npz``, ``.safetensors`` and ``.pt``/``.pth`` (read with ``weights_only``). Nothing is
unpickled. Several arrays in a file are the layers of one gradient.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError, first_line
from gradstats.primitives import Array
from gradstats.primitives.arrays import is_tensor
from gradstats.primitives.ratio import check_several, shown
from gradstats.primitives.sketch import Sketch
from gradstats.trace import Kind, Trace, is_trace, open_trace
from gradstats.trace.dumps import Dumps, dumps_of, holds_dumps
from gradstats.trace.files import READ, SUFFIXES, file_and_key, some, suffix_of
from gradstats.trace.remote import local
from gradstats.trace.source import ArraySource, Captured, Source, held, opened

__all__ = [
    "SKETCHED",
    "ArraySource",
    "Captured",
    "Source",
    "Subset",
    "TraceSource",
    "chosen",
    "layer_parts",
    "matching",
    "open_source",
    "open_sources",
]

SKETCHED = (
    "sizes are good to half a percent; signs and positions, where a rule asks for them, are made up"
)
"""What tables and reports say about a source that keeps only sketches."""


@dataclass(frozen=True, slots=True)
class Subset:
    """The part of a source that a table looks at. A field that is None or empty stands for everything.

    Attributes
    ----------
    steps, ranks : sequence of int, optional
        Steps and ranks to look at.
    kinds : sequence of Kind, optional
        Kinds to look at.
    layers : sequence of str, optional
        Patterns of parameter names, as in :mod:`fnmatch`. Giving any implies `per_layer`.
    per_layer : bool
        Whether each parameter is looked at by itself, too.

    Raises
    ------
    InputError
        If one of them is no list.
    """

    steps: Sequence[int] | None = None
    ranks: Sequence[int] | None = None
    kinds: Sequence[Kind] | None = None
    layers: Sequence[str] | None = None
    per_layer: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "ranks", "kinds", "layers"):
            values = getattr(self, name)
            if values is not None:
                several = check_several(values, name)
                if name == "layers" and not all(isinstance(pattern, str) for pattern in several):
                    raise InputError("layers must be patterns of parameter names, as texts")
                # kept as a list, because a first reader would use up an iterator
                object.__setattr__(self, name, several)

    def keys(self, source: Source) -> list[tuple[int, Kind, int]]:
        """Return the keys of a source's gradients that are in the subset.

        Parameters
        ----------
        source : Source
            Source to look into.

        Returns
        -------
        list of (rank, kind, step)
            Keys in the order of :meth:`Source.entries`.

        Raises
        ------
        InputError
            If there are none.
        """
        return source.select(steps=self.steps, ranks=self.ranks, kinds=self.kinds)

    def parameters(self, source: Source) -> list[str]:
        """Return the names of a source's parameters that are looked at by themselves.

        Parameters
        ----------
        source : Source
            Source to look into.

        Returns
        -------
        list of str
            Names in the order of the flat gradient; empty if only whole gradients are looked at.

        Raises
        ------
        InputError
            If patterns are given and none matches.
        """
        names = [layer.name for layer in source.layers]
        return chosen(names, self.layers, self.per_layer, source.name)


def chosen(
    names: Sequence[str], patterns: Sequence[str] | None, every: bool, where: str
) -> list[str]:
    """Return the parameters that are looked at by themselves.

    Parameters
    ----------
    names : sequence of str
        Names of all parameters.
    patterns : sequence of str, optional
        Names, or patterns of names, as in :mod:`fnmatch`.
    every : bool
        Whether all of them are wanted if there are no patterns.
    where : str
        What has these parameters, for the error.

    Returns
    -------
    list of str
        Names, in order.

    Raises
    ------
    InputError
        If patterns are given and none matches.
    """
    if not patterns:
        return list(names) if every else []
    patterns = check_several(patterns, "layers")
    # brackets of a part's name, experts[3], are no set of characters
    matches = [n for n in names if any(n == p or fnmatchcase(n, p) for p in patterns)]
    if not matches:
        listed = ", ".join(patterns)
        raise InputError(f"no layer of {where} matches {listed}; it has {some(names)}")
    return matches


def layer_parts(
    source: Source, captured: Captured, parameters: Collection[str]
) -> Iterator[tuple[str, Array]]:
    """Yield a gradient whole, then some of its parameters.

    Parameters
    ----------
    source : Source
        Source of the gradient.
    captured : Captured
        The gradient.
    parameters : collection of str
        Names of the parameters to yield.

    Yields
    ------
    name : str
        ``all``, then the parameters' names in the order of the flat gradient.
    values : ndarray or torch.Tensor
        Their elements, flat.
    """
    yield "all", captured.values
    for layer in source.layers:
        if layer.name in parameters:
            yield layer.name, captured.values[layer.slice]


class TraceSource(Source):
    """The gradients of a trace. It is pickled as a path: each worker opens the trace again, once.

    Parameters
    ----------
    trace : Trace
        Trace to read.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.name = trace.name
        self.layers = trace.layers
        # new for every source, so that workers reopen a trace that has grown since the last analysis
        self._token = uuid.uuid4().hex

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.trace.path.resolve()), self._token)

    def entries(self) -> list[tuple[int, Kind, int]]:
        """Return (rank, kind, step) of every committed gradient."""
        t = self.trace
        return [(r, k, s) for r in t.ranks for k in t.kinds(r) for s in t.steps(r)]

    def read(self, rank: int, kind: Kind, step: int) -> Captured:  # numpydoc ignore=PR01
        """Read one gradient from disk."""
        if self.sketched(rank, kind):
            values: Array = _made_up(self.stored_sketches(rank, kind, step))
        else:
            values = self.trace.read(step, rank, kind)
        return Captured(self.name, step, rank, kind, values)

    def elements(
        self, rank: int, kind: Kind, step: int, start: int, stop: int
    ) -> Array:  # numpydoc ignore=PR01
        """Read some elements from disk."""
        return self.trace.read_slice(step, rank, kind, start, stop)

    def sketched(self, rank: int, kind: Kind) -> bool:  # numpydoc ignore=PR01
        """Return whether the trace was captured as sketches."""
        return not self.trace.has_gradients(rank, kind)

    def stored_sketches(
        self, rank: int, kind: Kind, step: int
    ) -> list[Sketch]:  # numpydoc ignore=PR01
        """Read the sketches of one step, by parameter."""
        return self.trace.sketches(step, rank, kind)


@lru_cache(maxsize=8)
def _reopen(path: str, token: str) -> TraceSource:
    """Open a trace in a worker; the token tells the source of one analysis from that of the next."""
    return TraceSource(open_trace(path))


def _made_up(sketches: Sequence[Sketch]) -> NDArray[np.float32]:
    """Return a gradient that has these sketches: magnitudes spread evenly over cells, random signs and positions."""
    # one seed for all calls: tables of the same trace agree, and no global state is touched
    rng = np.random.default_rng(0)
    parts = []
    for s in sketches:
        # magnitudes and NaN first, zeros behind them; signs and places are drawn afterwards
        values = np.zeros(s.numel, np.float32)
        values[: s.magnitudes.count] = s.magnitudes.largest(s.numel)
        values[s.magnitudes.count :][: s.moments.nonfinite] = np.nan
        values *= rng.choice(np.array([-1, 1], np.float32), s.numel)
        rng.shuffle(values)
        parts.append(values)
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def open_source(source: object) -> Source:
    """Open one source of gradients.

    Parameters
    ----------
    source : str, Path, Trace, array_like, mapping of str to array_like, or Source
        Path of a trace, of a gradient file, or of a folder of these files or of a sharded checkpoint; an open trace, an
        array, arrays by layer name, or a source, which is returned as it is.

    Returns
    -------
    Source
        The source. Gradient files are read here, traces when their gradients are asked for.

    Raises
    ------
    GradstatsError
        If it cannot be read. The message has one line.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, Trace):
        return TraceSource(source)
    if isinstance(source, Mapping):
        return ArraySource(source)
    if isinstance(source, np.ndarray) or is_tensor(source):
        return ArraySource({"gradient": source})
    if not isinstance(source, str | Path):
        raise InputError(
            f"not a source of gradients: {type(source).__name__}; give a path, a trace or arrays"
        )
    path = local(source)
    try:
        place, key = file_and_key(path)
        folder, file = place.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # a name too long, a null character
        raise InputError(
            f"no path of a source: {shown(str(source))}: {first_line(error)[:80]}"
        ) from None
    # whatever is not named like a gradient file is a trace, or an error about one
    if folder or suffix_of(place) not in READ:
        if file:
            raise InputError(f"{path}: not a trace, nor one of {', '.join(SUFFIXES)}")
        if folder and _is_folder_of_dumps(place):
            name = place.resolve().name
            return Dumps(dumps_of([path]), f"{name}:{key}" if key else name)
        return TraceSource(open_trace(path))
    return opened(path)


def _is_folder_of_dumps(path: Path) -> bool:
    try:
        # of a folder with traces one has to be named
        return not (is_trace(path) or any(map(is_trace, path.iterdir()))) and holds_dumps(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def open_sources(path: str | Path) -> list[Source]:
    """Open the source at a path, or every trace in a folder that is not a trace itself.

    Parameters
    ----------
    path : str or Path
        Trace, gradient file, folder of traces, of gradient files or of a sharded checkpoint, or the address of one.

    Returns
    -------
    list of Source
        Traces of a folder in the order of their names.

    Raises
    ------
    GradstatsError
        If nothing can be read there. The message has one line, and names what is near and can be read.
    """
    path = local(path)
    if path.is_dir() and not is_trace(path):
        # other entries of a folder with traces are not looked at
        traces = sorted((p for p in path.iterdir() if is_trace(p)), key=lambda p: p.stem)
        if traces:
            return [open_source(p) for p in traces]
    if (
        not file_and_key(path)[0].exists()
        and path.parent.is_dir()
        and (names := _readable(path.parent))
    ):
        near = get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise InputError(f"no such trace: {path}; {path.parent} holds {some(names)}{hint}")
    return [open_source(path)]


def _readable(folder: Path) -> list[str]:
    """Return the names of the traces and gradient files in a folder."""
    return [
        p.name for p in folder.iterdir() if is_trace(p) or (p.is_file() and suffix_of(p) in READ)
    ]


def matching(
    sources: Sequence[Source],
    *,
    steps: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    kinds: Sequence[Kind] | None = None,
    layers: Sequence[str] | None = None,
) -> list[Source]:
    """Return the sources that hold something of a selection.

    Parameters
    ----------
    sources : sequence of Source
        Sources to look into.
    steps, ranks : sequence of int, optional
        Steps and ranks to look for; any by default.
    kinds : sequence of Kind, optional
        Kinds to look for; any by default.
    layers : sequence of str, optional
        Patterns of parameter names to look for, as in :mod:`fnmatch`; any by default.

    Returns
    -------
    list of Source
        Sources in the order given.

    Raises
    ------
    InputError
        If no source holds anything of the selection, or a value of it matches nothing in any source.
    """
    subset = Subset(steps, ranks, kinds, layers)
    matches, selected, problems = [], [], []
    for source in sources:
        try:
            keys = subset.keys(source)
            subset.parameters(source)
        except InputError as error:
            # an error only if no source matches
            problems.append(error)
            continue
        matches.append(source)
        selected += keys
    if not matches:
        raise problems[0]
    # in the order of a key: rank, kind, step
    wanted: tuple[Sequence[Any] | None, ...] = (ranks, kinds, steps)
    columns = zip(*selected, strict=True)
    for what, asked, there in zip(("ranks", "kinds", "steps"), wanted, columns, strict=True):
        if absent := set(asked or ()).difference(there):
            names = ", ".join(source.name for source in sources)
            all_of_it = held([key for source in sources for key in source.entries()])
            raise InputError(
                f"nothing in {names} matches {what} {some(absent)}; there are {all_of_it}"
            )
    # each pattern by itself: chosen() raises only where none matches
    parameters = [layer.name for source in matches for layer in source.layers]
    for pattern in subset.layers or ():
        chosen(parameters, [pattern], False, ", ".join(source.name for source in matches))
    return matches
