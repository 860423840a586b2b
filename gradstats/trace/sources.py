"""What the tables read: a trace, a folder of traces, or any one gradient file.

Formats of single files: ``.npy``, ``.npz``, ``.safetensors``, ``.pt``/``.pth`` (``weights_only``). Nothing is
unpickled. Several arrays in a file are the layers of one gradient.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import GradstatsError, InputError, first_line
from gradstats.primitives import Array
from gradstats.primitives.arrays import check, flat_chunks, is_tensor, numel_of
from gradstats.primitives.sketch import Sketch
from gradstats.trace import Kind, Layer, Trace, is_trace, open_trace

__all__ = [
    "SKETCHED",
    "ArraySource",
    "Captured",
    "Source",
    "TraceSource",
    "layer_parts",
    "matching",
    "open_source",
    "open_sources",
]

SKETCHED = (
    "sizes are good to half a percent; signs and positions, where a rule asks for them, are made up"
)
"""What to mind about a source of sketches."""

SUFFIXES = (".npy", ".npz", ".safetensors", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Captured:
    """One gradient vector and where it comes from.

    Attributes
    ----------
    values : its elements; made up from a sketch where the source keeps no more (:attr:`Source.sketched`).
    """

    trace: str
    step: int
    rank: int
    kind: Kind
    values: Array


class Source(ABC):
    """Something that yields gradients.

    Attributes
    ----------
    name : for tables.
    layers : parameters in the order of the flat gradient.
    """

    name: str
    layers: list[Layer]

    @abstractmethod
    def entries(self) -> list[tuple[int, Kind, int]]:
        """Return (rank, kind, step) of everything there is; steps in order within a rank and kind."""

    @abstractmethod
    def read(self, rank: int, kind: Kind, step: int) -> Captured:
        """Return one gradient."""

    @abstractmethod
    def elements(self, rank: int, kind: Kind, step: int, start: int, stop: int) -> Array:
        """Return elements [start, stop) of one flat gradient, reading no more than that takes."""

    def sketched(self, rank: int, kind: Kind) -> bool:
        """Tell whether only sketches are kept: sizes to half a percent, neither signs nor positions."""
        return False

    def stored_sketches(self, rank: int, kind: Kind, step: int) -> list[Sketch]:
        """Return the sketch of every parameter, of a source that keeps sketches only."""
        raise InputError(f"{self.name} keeps no sketches")

    @property
    def numel(self) -> int:
        """Elements of a gradient, d."""
        return sum(layer.numel for layer in self.layers)

    def labels(self, rank: int, kind: Kind, step: int) -> dict[str, Any]:
        """Return the columns that identify one gradient in a table."""
        return {"trace": self.name, "step": step, "rank": rank, "kind": kind}

    def select(
        self,
        *,
        steps: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
        kinds: Sequence[str] | None = None,
    ) -> list[tuple[int, Kind, int]]:
        """Return the keys that match; raise :class:`InputError` if none does.

        A value that matches nothing beside others that do is no error here: another source may hold it
        (:func:`matching`).
        """
        keys = self.entries()
        found = [
            (rank, kind, step)
            for rank, kind, step in keys
            if (not steps or step in steps)
            and (not ranks or rank in ranks)
            and (not kinds or kind in kinds)
        ]
        if not found:
            if not keys:
                raise InputError(f"{self.name} holds no committed step")
            raise InputError(f"nothing in {self.name} matches; it holds {_held(keys)}")
        return found


def _held(keys: Sequence[tuple[int, Kind, int]]) -> str:
    ranks, kinds, steps = (_some(column) for column in zip(*keys, strict=True))
    return f"steps {steps}; ranks {ranks}; kinds {kinds}"


def _some(values: Iterable[Any]) -> str:
    distinct = sorted(set(values))
    return ", ".join(map(str, distinct[:8])) + (", …" if len(distinct) > 8 else "")


def layer_parts(source: Source, captured: Captured, per_layer: bool) -> Iterator[tuple[str, Array]]:
    """Yield ("all", the gradient), then, if wanted, (name, elements) of each parameter."""
    yield "all", captured.values
    if per_layer:
        for layer in source.layers:
            yield layer.name, captured.values[layer.slice]


class TraceSource(Source):
    """The gradients of a trace. Pickled as its path: workers open it again, once each."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.name = trace.name
        self.layers = trace.layers
        self._token = uuid.uuid4().hex

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.trace.path.resolve()), self._token)

    def entries(self) -> list[tuple[int, Kind, int]]:
        """Return (rank, kind, step) of every committed gradient."""
        t = self.trace
        return [(r, k, s) for r in t.ranks for k in t.kinds(r) for s in t.steps(r)]

    def read(self, rank: int, kind: Kind, step: int) -> Captured:
        """Read one gradient from the disk."""
        if self.sketched(rank, kind):
            values: Array = _made_up(self.stored_sketches(rank, kind, step))
        else:
            values = self.trace.read(step, rank, kind)
        return Captured(self.name, step, rank, kind, values)

    def elements(self, rank: int, kind: Kind, step: int, start: int, stop: int) -> Array:
        """Read some elements from the disk."""
        return self.trace.read_slice(step, rank, kind, start, stop)

    def sketched(self, rank: int, kind: Kind) -> bool:
        """Tell whether the trace was captured as sketches."""
        return not self.trace.has_gradients(rank, kind)

    def stored_sketches(self, rank: int, kind: Kind, step: int) -> list[Sketch]:
        """Read the sketches of one step, by parameter."""
        return self.trace.sketches(step, rank, kind)


@lru_cache(maxsize=8)
def _reopen(path: str, token: str) -> TraceSource:
    """Open a trace in a worker; the token tells the source of one analysis from that of the next."""
    return TraceSource(open_trace(path))


def _made_up(sketches: Sequence[Sketch]) -> NDArray[np.float32]:
    """Return a gradient with these sketches: magnitudes evenly inside their cells, signs and positions at random."""
    rng = np.random.default_rng(0)
    parts = []
    for s in sketches:
        values = np.zeros(s.numel, np.float32)
        values[: s.magnitudes.count] = s.magnitudes.largest(s.numel)
        values[s.magnitudes.count :][: s.moments.nonfinite] = np.nan
        values *= rng.choice(np.array([-1, 1], np.float32), s.numel)
        rng.shuffle(values)
        parts.append(values)
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


class ArraySource(Source):
    """A single gradient in memory, given as one array or as named layers; step 0 of rank 0."""

    def __init__(self, layers: Mapping[str, Array], name: str = "array") -> None:
        self.name = name
        self.layers, offset = [], 0
        checked = {n: check(a) for n, a in layers.items()}
        for layer, array in checked.items():
            self.layers.append(Layer(layer, offset, tuple(array.shape)))
            offset += numel_of(array)
        self._values = _flatten(list(checked.values()), offset)

    def entries(self) -> list[tuple[int, Kind, int]]:
        """Return the only key."""
        return [(0, "gradient", 0)]

    def read(self, rank: int, kind: Kind, step: int) -> Captured:
        """Return the array."""
        return Captured(self.name, step, rank, kind, self._values)

    def elements(self, rank: int, kind: Kind, step: int, start: int, stop: int) -> Array:
        """Return a view of some elements."""
        return self._values[start:stop]


def _flatten(arrays: list[Array], numel: int) -> Array:
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    double = any("float64" in str(a.dtype) for a in arrays)
    flat = np.empty(numel, np.float64 if double else np.float32)
    position = 0
    for array in arrays:
        for offset, chunk in flat_chunks(array):
            flat[position + offset : position + offset + chunk.size] = chunk
        position += numel_of(array)
    return flat


def open_source(source: object) -> Source:
    """Open one source of gradients.

    Parameters
    ----------
    source : a path (trace or gradient file), a :class:`Trace`, an array, a mapping of layer names to arrays, or
        a :class:`Source`.

    Raises
    ------
    GradstatsError
        One line, if it cannot be read.
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
        raise InputError(f"not a source of gradients: {type(source).__name__}")
    path = Path(source)
    if path.is_dir() or path.suffix not in SUFFIXES:
        if path.is_file():
            raise InputError(f"{path}: not a trace, nor one of {', '.join(SUFFIXES)}")
        return TraceSource(open_trace(path))
    return ArraySource(_load(path), path.name)


def open_sources(path: str | Path) -> list[Source]:
    """Open a source, or every trace in a folder that is not one itself.

    Raises
    ------
    GradstatsError
        One line, if it cannot be read; where there is something near that can be, the line names it.
    """
    path = Path(path)
    if path.is_dir() and not is_trace(path):
        traces = sorted((p for p in path.iterdir() if is_trace(p)), key=lambda p: p.stem)
        if traces:
            return [open_source(p) for p in traces]
        if files := _readable(path):
            raise InputError(
                f"{path} holds no trace, but the files {_some(files)}; give one of them"
            )
    if not path.exists() and path.parent.is_dir() and (names := _readable(path.parent)):
        near = get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise InputError(f"no such trace: {path}; {path.parent} holds {_some(names)}{hint}")
    return [open_source(path)]


def _readable(folder: Path) -> list[str]:
    """Return the names of the traces and gradient files in a folder."""
    return [
        p.name for p in folder.iterdir() if is_trace(p) or (p.is_file() and p.suffix in SUFFIXES)
    ]


def matching(sources: Sequence[Source], **selection: Any) -> list[Source]:
    """Return the sources that hold something of a selection.

    Raises
    ------
    InputError
        If none does, or a value of the selection matches nothing in any.
    """
    found, problems = [], []
    for source in sources:
        try:
            source.select(**selection)
            found.append(source)
        except InputError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    selected = [key for source in found for key in source.select(**selection)]
    for what, there in zip(("ranks", "kinds", "steps"), zip(*selected, strict=True), strict=True):
        if absent := set(selection.get(what) or ()).difference(there):
            names = ", ".join(source.name for source in sources)
            held = _held([key for source in sources for key in source.entries()])
            raise InputError(f"nothing in {names} matches {what} {_some(absent)}; there are {held}")
    return found


def _load(path: Path) -> dict[str, Any]:
    """Read a gradient file into named arrays."""
    if not path.is_file():
        raise InputError(f"no such file: {path}")
    arrays: dict[str, Any]
    try:
        if path.suffix == ".npy":
            # not np.load, which takes any other file for a pickle and advises to open it
            arrays = {"gradient": np.lib.format.open_memmap(path, mode="r")}
        elif path.suffix == ".npz":
            # np.load leaves a file it cannot read open; this closes it
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                arrays = dict(archive)
        elif path.suffix == ".safetensors":
            from safetensors.torch import load_file

            arrays = load_file(path)
        else:
            arrays = _load_torch(path)
    except GradstatsError:
        raise
    except Exception as error:  # each format has its own errors for a damaged file
        raise InputError(f"cannot read {path}: {first_line(error)}") from None
    arrays = {name: array for name, array in arrays.items() if numel_of(array)}
    if not arrays:
        raise InputError(f"{path} holds no elements")
    return arrays


def _load_torch(path: Path) -> dict[str, Any]:
    import torch

    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(loaded, torch.Tensor):
        return {"gradient": loaded}
    if isinstance(loaded, dict):
        tensors = {
            str(k): v
            for k, v in loaded.items()
            if isinstance(v, torch.Tensor) and v.is_floating_point()
        }
        if tensors:
            return tensors
    raise InputError(f"{path} holds neither a tensor nor a dictionary of tensors")
