"""The trace: captured gradients on disk, one zarr v3 group per rank.

::

    NAME.zarr/                        attributes: schema, world size, parameter layout, run metadata
      rank00000/                      written by rank 0 alone
        step           (step,)            int64    -1 until the row is committed, written last
        gradient       (step, element)    float32 or uint16 (bfloat16 bits)
        corrected      (step, element)    the same, gradient + residual
        gradient_zeros, gradient_nonfinite, corrected_zeros, corrected_nonfinite   (step,) int64
        loss, learning_rate, threshold    (step,)  float64, NaN where unknown
        selected       (step,)            int64, k̂ kept in fact, -1 where unknown

``xarray.open_datatree(path, engine="zarr")`` opens it without this package. Rows with step -1 are not committed.
A process killed at any moment loses only those: chunk files appear complete or not at all (zarr renames them into
place), carry a checksum, and are written before their step number. bfloat16 is stored as the upper half of the
float32 bits; ``(u.astype("u4") << 16).view("f4")`` reads it.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import TraceError

if TYPE_CHECKING:
    import xarray
    import zarr

__all__ = [
    "KINDS",
    "SCHEMA",
    "Kind",
    "Layer",
    "Trace",
    "TraceWriter",
    "create_trace",
    "is_trace",
    "open_trace",
]

SCHEMA = 1
"""Version of the format this module writes, and the newest it reads."""

Kind: TypeAlias = Literal["gradient", "corrected"]
KINDS: tuple[Kind, ...] = ("gradient", "corrected")

_FORMAT = "gradstats-trace"
_FLOAT_SCALARS = ("loss", "learning_rate", "threshold")
_CHUNK = 1 << 22
_GROW = 64


@dataclass(frozen=True, slots=True)
class Layer:
    """One parameter's place in the flat gradient."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def slice(self) -> slice:
        """Position in the flat gradient."""
        return slice(self.offset, self.offset + self.numel)


def create_trace(
    path: str | Path,
    layers: Sequence[Layer],
    *,
    world_size: int = 1,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Create an empty trace; one process does this before any :class:`TraceWriter` opens it.

    Parameters
    ----------
    path : directory to create, ``NAME.zarr`` by convention.
    layers : parameters in the order of the flat gradient.
    world_size : ranks of the run, whether captured or not.
    metadata : JSON values describing the run (model, data, optimizer, compressor, ratio, seed, versions, …).
    overwrite : replace an existing trace. Anything else at `path` is never removed.

    Raises
    ------
    TraceError
        If `path` exists and is not an empty directory or a trace to overwrite.
    """
    import zarr

    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        if not is_trace(path):
            raise TraceError(f"{path} exists and is not a trace; not touching it")
        if not overwrite:
            raise TraceError(f"{path} exists; choose another name or ask to overwrite it")
        shutil.rmtree(path)
    attributes = {
        "format": _FORMAT,
        "schema": SCHEMA,
        "world_size": world_size,
        "numel": sum(layer.numel for layer in layers),
        "layout": [
            {"name": la.name, "offset": la.offset, "shape": list(la.shape)} for la in layers
        ],
        **(metadata or {}),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        zarr.create_group(path, attributes=attributes, zarr_format=3)
    except OSError as error:
        raise TraceError(f"cannot create {path}: {error}") from error


class TraceWriter:
    """Appends steps to one rank's group of a trace. Not thread-safe; one writer per rank.

    Parameters
    ----------
    path : a trace made by :func:`create_trace`.
    rank : whose group to write; it must not exist.
    kinds : which arrays :meth:`append` will be given.
    dtype : ``"float32"``, or ``"bfloat16"`` for half the space.
    expected_steps : rows to lay out; more are added when they are used up.
    compress : shuffle and compress the chunks (about a tenth smaller for float32, and much slower).
    """

    def __init__(
        self,
        path: str | Path,
        rank: int,
        *,
        kinds: Sequence[Kind] = ("gradient",),
        dtype: Literal["float32", "bfloat16"] = "float32",
        expected_steps: int | None = None,
        compress: bool = False,
    ) -> None:
        import zarr

        attributes = _root_attributes(Path(path))
        self.path = Path(path)
        self.kinds = tuple(kinds)
        self.numel = int(attributes["numel"])
        self._bfloat16 = dtype == "bfloat16"
        self._rows = 0
        self._capacity = expected_steps or _GROW
        name = f"rank{rank:05d}"
        if (self.path / name).exists():
            raise TraceError(f"{self.path} already holds rank {rank}")
        # Laid out beside its place and renamed into it: a reader finds the rank's arrays all or not at all.
        partial = f".{name}.{uuid.uuid4().hex}.partial"
        group = zarr.create_group(
            self.path / partial, attributes={"rank": rank, "dtype": dtype}, zarr_format=3
        )
        self._lay_out(group, compress)
        (self.path / partial).rename(self.path / name)
        group = zarr.open_group(self.path / name, mode="r+", zarr_format=3)
        self._arrays = dict(group.arrays())

    def _lay_out(self, group: zarr.Group, compress: bool) -> None:
        from zarr.codecs import BloscCodec, Crc32cCodec

        def scalar(name: str, dtype: str, fill: float) -> None:
            group.create_array(
                name,
                shape=(self._capacity,),
                chunks=(min(max(self._capacity, 1), 1024),),
                dtype=dtype,
                fill_value=fill,
                dimension_names=("step",),
                compressors=[Crc32cCodec()],
            )

        codecs: list[Any] = [Crc32cCodec()]
        if compress:
            codecs.insert(0, BloscCodec(cname="zstd", clevel=9, shuffle="bitshuffle"))
        for kind in self.kinds:
            group.create_array(
                kind,
                shape=(self._capacity, self.numel),
                chunks=(1, min(max(self.numel, 1), _CHUNK)),
                dtype="uint16" if self._bfloat16 else "float32",
                fill_value=0x7FC0 if self._bfloat16 else float("nan"),
                dimension_names=("step", "element"),
                compressors=codecs,
                attributes={"encoding": "bfloat16"} if self._bfloat16 else {},
            )
            scalar(f"{kind}_zeros", "int64", 0)
            scalar(f"{kind}_nonfinite", "int64", 0)
        for name in _FLOAT_SCALARS:
            scalar(name, "float64", float("nan"))
        scalar("selected", "int64", -1)
        scalar("step", "int64", -1)

    def append(
        self,
        step: int,
        arrays: Mapping[Kind, NDArray[np.float32]],
        *,
        loss: float = float("nan"),
        learning_rate: float = float("nan"),
        threshold: float = float("nan"),
        selected: int = -1,
    ) -> None:
        """Write one step and commit it.

        Parameters
        ----------
        step : non-negative step number, greater than the last.
        arrays : float32 (numel,) for every kind of this writer.
        loss, learning_rate, threshold : as used in the step; NaN where unknown.
        selected : k̂ the compressor kept, -1 where unknown.

        Raises
        ------
        TraceError
            If the disk refuses; the step is then not committed, all earlier ones are.
        """
        row = self._rows
        try:
            if row == self._capacity:
                self._resize(2 * row)
            for kind in self.kinds:
                values = arrays[kind]
                if values.shape != (self.numel,) or values.dtype != np.float32:
                    raise TraceError(
                        f"expected float32 ({self.numel},), got {values.dtype} {values.shape}"
                    )
                self._arrays[kind][row] = _to_bfloat16(values) if self._bfloat16 else values
                self._put(f"{kind}_zeros", row, self.numel - int(np.count_nonzero(values)))
                self._put(f"{kind}_nonfinite", row, _count_nonfinite(values))
            self._put("loss", row, loss)
            self._put("learning_rate", row, learning_rate)
            self._put("threshold", row, threshold)
            self._put("selected", row, selected)
            self._put("step", row, step)
        except OSError as error:
            raise TraceError(f"cannot write step {step} to {self.path}: {error}") from error
        self._rows += 1

    def _put(self, name: str, row: int, value: float) -> None:
        """Write a scalar; one equal to the fill value is there already, and a write costs 0.6 ms of CPU."""
        array = self._arrays[name]
        fill = array.fill_value
        if value != fill and not (value != value and fill != fill):
            array[row] = value

    def _resize(self, capacity: int) -> None:
        for name, array in self._arrays.items():
            if name != "step":
                array.resize((capacity, *array.shape[1:]))
        self._arrays["step"].resize((capacity,))
        self._capacity = capacity

    def close(self) -> None:
        """Drop the rows laid out but never used. The trace is complete without it."""
        if self._rows < self._capacity:
            try:
                self._resize(self._rows)
            except OSError as error:
                raise TraceError(f"cannot finish {self.path}: {error}") from error


def _count_nonfinite(values: NDArray[np.float32]) -> int:
    return values.size - int(np.count_nonzero(np.isfinite(values)))


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, nearest even, NaN kept NaN; return the bits."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def is_trace(path: str | Path) -> bool:
    """Tell whether `path` is a directory that says it is a trace, of whatever version."""
    try:
        attributes = json.loads((Path(path) / "zarr.json").read_bytes())["attributes"]
        return bool(attributes["format"] == _FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _root_attributes(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise TraceError(f"no such trace: {path}")
    if not is_trace(path):
        raise TraceError(f"{path} is not a gradstats trace")
    attributes = json.loads((path / "zarr.json").read_bytes())["attributes"]
    schema = attributes.get("schema")
    if schema != SCHEMA:
        raise TraceError(f"{path} has trace schema {schema}; this gradstats reads {SCHEMA}")
    missing = {"world_size", "numel", "layout"} - attributes.keys()
    if missing:
        raise TraceError(f"{path} is damaged: its attributes lack {', '.join(sorted(missing))}")
    return cast("dict[str, Any]", attributes)


class Trace:
    """A trace opened for reading. Only committed steps are visible.

    Attributes
    ----------
    path : the directory.
    attrs : the run's metadata as stored (model, data, compressor, seed, versions, …).
    layers : parameters in the order of the flat gradient.
    numel : elements of the flat gradient, d.
    world_size : ranks of the run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.attrs = _root_attributes(self.path)
        try:
            self.layers = [
                Layer(la["name"], int(la["offset"]), tuple(la["shape"]))
                for la in self.attrs["layout"]
            ]
            self.numel = int(self.attrs["numel"])
            self.world_size = int(self.attrs["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path} is damaged: unreadable parameter layout") from error
        self._groups: dict[int, dict[str, zarr.Array[Any]]] = {}
        self._committed: dict[int, dict[int, int]] = {}
        for directory in sorted(self.path.glob("rank[0-9]*")):
            self._open_rank(directory)

    def _open_rank(self, directory: Path) -> None:
        import zarr

        try:
            rank = int(directory.name.removeprefix("rank"))
            group = zarr.open_group(directory, mode="r", zarr_format=3)
            arrays = dict(group.arrays())
            steps = np.asarray(arrays["step"][:])
        except Exception as error:
            raise TraceError(f"{directory} is damaged: {_first_line(error)}") from error
        self._groups[rank] = arrays
        self._committed[rank] = {int(s): row for row, s in enumerate(steps) if s >= 0}

    def __repr__(self) -> str:
        return (
            f"<Trace {self.path} ranks={self.ranks} steps={len(self.steps())} numel={self.numel}>"
        )

    @property
    def name(self) -> str:
        """The directory's name without ``.zarr``."""
        return self.path.name.removesuffix(".zarr")

    @property
    def ranks(self) -> list[int]:
        """Ranks that were captured."""
        return sorted(self._groups)

    def steps(self, rank: int | None = None) -> list[int]:
        """Return the committed steps of a rank, or (None) of any rank, ascending."""
        if rank is not None:
            return sorted(self._rank(rank, self._committed))
        return sorted(set().union(*self._committed.values()))

    def kinds(self, rank: int) -> list[Kind]:
        """Return the kinds of gradient a rank captured."""
        return [kind for kind in KINDS if kind in self._rank(rank, self._groups)]

    def _rank(self, rank: int, table: Mapping[int, Any]) -> Any:
        try:
            return table[rank]
        except KeyError:
            have = ", ".join(map(str, self.ranks)) or "none"
            raise TraceError(f"{self.path} has no rank {rank}; it holds {have}") from None

    def read(self, step: int, rank: int = 0, kind: Kind = "gradient") -> NDArray[np.float32]:
        """Return one captured gradient, float32 (numel,), bit-exact as captured (bfloat16: as rounded).

        Raises
        ------
        TraceError
            If it was not captured, or its data is damaged.
        """
        committed = self._rank(rank, self._committed)
        arrays = self._rank(rank, self._groups)
        if step not in committed:
            raise TraceError(f"{self.path} has no step {step} on rank {rank}")
        if kind not in arrays:
            raise TraceError(f"{self.path} has no {kind!r} on rank {rank}")
        row = committed[step]
        try:
            values = np.asarray(arrays[kind][row])
            nonfinite = int(arrays[f"{kind}_nonfinite"][row])
        except Exception as error:
            raise TraceError(
                f"{self.path}: {kind} of step {step}, rank {rank} is damaged: {_first_line(error)}"
            ) from error
        if values.dtype == np.uint16:
            values = _from_bfloat16(values)
        # A chunk file that has gone missing reads as NaN fill; the count taken at capture gives it away.
        if _count_nonfinite(values) != nonfinite:
            raise TraceError(
                f"{self.path}: {kind} of step {step}, rank {rank} is damaged: chunks are missing"
            )
        return values

    def scalars(self, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Return a rank's per-step columns (step, loss, threshold, …), committed rows only, by name."""
        rows = list(self._rank(rank, self._committed).values())
        arrays = self._rank(rank, self._groups)
        return {name: np.asarray(a[:])[rows] for name, a in arrays.items() if a.ndim == 1}

    def gradients(self) -> Iterator[tuple[int, int, Kind, NDArray[np.float32]]]:
        """Yield (step, rank, kind, gradient) for everything captured: by rank and kind, steps in order."""
        for rank in self.ranks:
            for kind in self.kinds(rank):
                for step in self.steps(rank):
                    yield step, rank, kind, self.read(step, rank, kind)

    def to_datatree(self) -> xarray.DataTree:
        """Open the trace as a dask-backed :class:`xarray.DataTree`, one node per rank."""
        import xarray

        return xarray.open_datatree(self.path, engine="zarr", chunks={}, consolidated=False)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def open_trace(path: str | Path) -> Trace:
    """Open a trace for reading.

    Raises
    ------
    TraceError
        If there is none at `path`, it is of another version, or damaged; one line says which.
    """
    return Trace(path)
