"""What a source of gradients answers, and the source that holds one gradient in memory."""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.arrays import check, flat_chunks, numel_of
from gradstats.primitives.sketch import Sketch
from gradstats.trace import KINDS, Kind, Layer
from gradstats.trace.files import file_and_key, read_file, some

__all__ = ["ArraySource", "Captured", "Source", "held", "opened"]


@dataclass(frozen=True, slots=True)
class Captured:
    """One gradient vector and where it comes from.

    Attributes
    ----------
    trace : str
        Name of the source.
    step, rank : int
        Training step and rank of the gradient.
    kind : Kind
        One of :data:`gradstats.trace.KINDS`.
    values : ndarray or torch.Tensor, shape (d,)
        Elements of the gradient. Made up from a sketch where the source keeps only sketches
        (:meth:`Source.sketched`).
    """

    trace: str
    step: int
    rank: int
    kind: Kind
    values: Array


class Source(ABC):
    """Something that holds gradients by rank, kind and step.

    Attributes
    ----------
    name : str
        Name of the source in tables.
    layers : list of Layer
        Parameters in the order of the flat gradient.
    """

    name: str
    layers: list[Layer]
    remark = ""
    """What was left out when the source was read, in a sentence."""
    in_memory = False
    """Whether it is of no file, so that a task of a cluster carries all of it."""

    @abstractmethod
    def entries(self) -> list[tuple[int, Kind, int]]:
        """Return (rank, kind, step) of every gradient; steps ascend within a rank and kind."""

    @abstractmethod
    def read(self, rank: int, kind: Kind, step: int) -> Captured:
        """Return one gradient.

        Parameters
        ----------
        rank : int
            Rank that captured the gradient.
        kind : Kind
            One of :data:`gradstats.trace.KINDS`.
        step : int
            Training step.

        Returns
        -------
        Captured
            The gradient with its labels.
        """

    @abstractmethod
    def elements(self, rank: int, kind: Kind, step: int, start: int, stop: int) -> Array:
        """Return elements [start, stop) of one flat gradient, and read no more than these.

        Parameters
        ----------
        rank : int
            Rank that captured the gradient.
        kind : Kind
            One of :data:`gradstats.trace.KINDS`.
        step : int
            Training step.
        start, stop : int
            First element, and the one after the last.

        Returns
        -------
        ndarray or torch.Tensor, shape (stop − start,)
            The elements.
        """

    def sketched(self, rank: int, kind: Kind) -> bool:
        """Return whether only sketches are kept: magnitudes to half a percent, neither signs nor positions.

        Parameters
        ----------
        rank : int
            Rank that captured the gradient.
        kind : Kind
            One of :data:`gradstats.trace.KINDS`.

        Returns
        -------
        bool
            True for sketches, False for whole gradients.
        """
        return False

    def stored_sketches(self, rank: int, kind: Kind, step: int) -> list[Sketch]:
        """Return the sketches of one gradient, from a source that keeps only sketches.

        Parameters
        ----------
        rank : int
            Rank that captured the gradient.
        kind : Kind
            One of :data:`gradstats.trace.KINDS`.
        step : int
            Training step.

        Returns
        -------
        list of Sketch
            One sketch per parameter, in the order of :attr:`layers`.

        Raises
        ------
        InputError
            If the source keeps gradients.
        """
        raise InputError(f"{self.name} keeps no sketches")

    @property
    def numel(self) -> int:
        """Return the number of elements of a gradient, d."""
        return sum(layer.numel for layer in self.layers)

    def labels(self, rank: int, kind: Kind, step: int) -> dict[str, Any]:
        """Return the columns that identify one gradient in a table.

        Parameters
        ----------
        rank : int
            Rank that captured the gradient.
        kind : Kind
            One of :data:`gradstats.trace.KINDS`.
        step : int
            Training step.

        Returns
        -------
        dict
            trace, step, rank and kind.
        """
        return {"trace": self.name, "step": step, "rank": rank, "kind": kind}

    def select(
        self,
        *,
        steps: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
        kinds: Sequence[str] | None = None,
    ) -> list[tuple[int, Kind, int]]:
        """Return the keys of the gradients that match.

        A value that matches nothing beside others that do is no error here: another source may hold it
        (:func:`matching`).

        Parameters
        ----------
        steps, ranks : sequence of int, optional
            Steps and ranks to keep; all by default.
        kinds : sequence of str, optional
            Kinds to keep; all by default.

        Returns
        -------
        list of (rank, kind, step)
            Keys in the order of :meth:`entries`.

        Raises
        ------
        InputError
            If nothing matches. The message lists what the source holds.
        """
        keys = self.entries()
        matches = [
            (rank, kind, step)
            for rank, kind, step in keys
            if (not steps or step in steps)
            and (not ranks or rank in ranks)
            and (not kinds or kind in kinds)
        ]
        if not matches:
            if not keys:
                raise InputError(f"{self.name} holds no committed step")
            raise InputError(f"nothing in {self.name} matches; it holds {held(keys)}")
        return matches


class ArraySource(Source):
    """A single gradient in memory.

    Parameters
    ----------
    layers : mapping of str to array_like
        Arrays by layer name, in the order of the flat gradient.
    name : str, optional
        Name of the source in tables.
    path : pathlib.Path, optional
        The file it was read from. A worker of a cluster then reads the file itself; otherwise every task carries the
        gradient.
    key : (int, Kind, int), optional
        Rank, kind and step of the gradient.
    remark : str, optional
        What was left out when it was read.
    """

    def __init__(
        self,
        layers: Mapping[str, Array],
        name: str = "array",
        path: Path | None = None,
        key: tuple[int, Kind, int] = (0, "gradient", 0),
        remark: str = "",
    ) -> None:
        self.name, self.remark = name, remark
        self.in_memory = path is None
        self._path, self._key = path, key
        # tells this source from a later one of the same file in a worker's cache
        self._token = uuid.uuid4().hex
        self.layers, offset = [], 0
        checked = {n: _check_of(n, a, one=len(layers) == 1) for n, a in layers.items()}
        for layer, array in checked.items():
            self.layers.append(Layer(layer, offset, tuple(array.shape)))
            offset += numel_of(array)
        self._arrays = list(checked.values())
        self._flat: Array | None = None
        self._lock = threading.Lock()
        self._numel = offset

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is None:
            layers = {la.name: self._values[la.slice].reshape(la.shape) for la in self.layers}
            return ArraySource, (layers, self.name, None, self._key)
        return _reread, (str(self._path.resolve()), self._token)

    @property
    def _values(self) -> Array:
        """The flat gradient: made when it is first read, for what lists a file needs no elements."""
        # threads of a cluster's worker share a source
        with self._lock:
            if self._flat is None:
                self._flat = _flatten(self._arrays, self._numel)
                # freed when they are in the flat vector: nothing is held twice
                self._arrays = []
            return self._flat

    def entries(self) -> list[tuple[int, Kind, int]]:
        """Return the only key."""
        return [self._key]

    def read(self, rank: int, kind: Kind, step: int) -> Captured:  # numpydoc ignore=PR01
        """Return the array."""
        return Captured(self.name, step, rank, kind, self._values)

    def elements(
        self, rank: int, kind: Kind, step: int, start: int, stop: int
    ) -> Array:  # numpydoc ignore=PR01
        """Return a view of some elements."""
        return self._values[start:stop]


def _check_of(name: str, array: Array, *, one: bool) -> Array:
    """Check an array; of several an error says which one is wrong."""
    try:
        return check(array)
    except InputError as error:
        if one:
            raise
        raise InputError(f"{name}: {error}") from None


# few, so that a worker does not keep the gradients of past analyses
@lru_cache(maxsize=8)
def _reread(path: str, token: str) -> ArraySource:
    """Read a file in a worker, once for each analysis."""
    return opened(Path(path))


def _flatten(arrays: list[Array], numel: int) -> Array:
    if len(arrays) == 1:
        # in logical order whatever the order in memory or in the file: what is compared is compared by place
        return arrays[0].reshape(-1)
    # float16, bfloat16 and float32 fit into float32; one float64 layer makes all of it float64
    double = any("float64" in str(a.dtype) for a in arrays)
    flat = np.empty(numel, np.float64 if double else np.float32)
    position = 0
    for array in arrays:
        # in chunks, so that widening a layer needs no copy of its size
        for offset, chunk in flat_chunks(array):
            flat[position + offset : position + offset + chunk.size] = chunk
        position += numel_of(array)
    return flat


def opened(path: Path) -> ArraySource:
    """Read a gradient file.

    Parameters
    ----------
    path : Path
        The file, and the name of what in it is meant after a colon.
    """
    contents = read_file(*file_and_key(path))
    return ArraySource(contents.arrays, path.name, path, _key_of(contents.about), contents.remark)


def _key_of(about: Mapping[str, str]) -> tuple[int, Kind, int]:
    """Return rank, kind and step by the metadata of a file that :func:`gradstats.save_safetensors` wrote."""
    try:
        kind: Any = about.get("kind", "gradient")
        rank, step = int(about.get("rank", 0)), int(about.get("step", 0))
    except ValueError:  # of another program
        return 0, "gradient", 0
    return rank, kind if kind in KINDS else "gradient", step


def held(keys: Sequence[tuple[int, Kind, int]]) -> str:
    """Return what a source holds, in words.

    Parameters
    ----------
    keys : sequence of (rank, kind, step)
        Its entries.
    """
    ranks, kinds, steps = (some(column) for column in zip(*keys, strict=True))
    return f"steps {steps}; ranks {ranks}; kinds {kinds}"
