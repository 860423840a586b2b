"""The trace: captured gradients, or sketches of them, on disk, one zarr v3 group per rank.

::

    NAME.zarr/                        attributes: schema, world size, parameter layout, run metadata
      rank00000/                      written by rank 0 alone
        step           (step,)            int64    -1 until the row is committed, written last
        gradient       (step, element)    float32 or uint16 (bfloat16 bits); beside it or in its place, a sketch:
        gradient_counts    (step, layer, bin)         uint32
        gradient_moments   (step, layer, statistic)   float64
        corrected, corrected_counts, corrected_moments    the same, gradient + residual
        gradient_zeros, gradient_nonfinite, corrected_zeros, corrected_nonfinite   (step,) int64
        loss, learning_rate, threshold    (step,)  float64, NaN where unknown
        selected       (step,)            int64, k̂ kept in fact, -1 where unknown

``xarray.open_datatree(path, engine="zarr")`` opens it without this package. Rows with step -1 are not committed.
A process killed at any moment loses only those: chunk files appear complete or not at all (zarr renames them into
place), carry a checksum, and are written before their step number. bfloat16 is stored as the upper half of the
float32 bits; ``(u.astype("u4") << 16).view("f4")`` reads it.

A sketch tells how many finite non-zero elements of a layer have |g| in bin b, from edge b up to edge b + 1 of
``(np.arange(32641, dtype="u4") << 16).view("f4")``; layers are in the order of the layout. Its moments are named by
the attribute ``statistics``: count, zeros, nonfinite, sum_abs, sum_squares, sum_log, max, the sums over the finite
non-zero magnitudes. Schema 1 had no sketches, and is otherwise the same.
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

from gradstats._sketch import Sketch
from gradstats.errors import InputError, TraceError
from gradstats.primitives import Moments
from gradstats.primitives._parallel import BLOCK

if TYPE_CHECKING:
    import xarray
    import zarr

__all__ = [
    "KINDS",
    "SCHEMA",
    "STORES",
    "Kind",
    "Layer",
    "Store",
    "Trace",
    "TraceWriter",
    "create_trace",
    "is_trace",
    "open_trace",
]

SCHEMA = 2
"""Version of the format this module writes, and the newest it reads; it reads all from 1 on."""

Kind: TypeAlias = Literal["gradient", "corrected"]
KINDS: tuple[Kind, ...] = ("gradient", "corrected")

Store: TypeAlias = Literal["gradients", "sketches"]
STORES: tuple[Store, ...] = ("gradients", "sketches")

_FORMAT = "gradstats-trace"
_FLOAT_SCALARS = ("loss", "learning_rate", "threshold")
_CHUNK = 1 << 22
_GROW = 64

_BITS = 7
"""Mantissa bits of the histograms stored: bins 0.4 to 0.8 % wide."""
_BINS = 255 << _BITS
_BIN_CHUNK = 64 << _BITS
"""Bins per chunk: 64 octaves, with borders at 2^-63, 2 and 2^65. All 32,640 bins in one chunk would cost 17 ms a step
for ResNet-20 and 42 ms for 160 layers, spent on zeros. Empty chunks are never written, gradients lie in one chunk or
two, and no bin is cut off: 6 ms and 14 kB, or 14 ms and 115 kB. Narrower chunks save no more and make more files."""
_STATISTICS = ("count", "zeros", "nonfinite", "sum_abs", "sum_squares", "sum_log", "max")


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
    store : ``"gradients"``, or ``"sketches"`` for a histogram and the moments of every layer in their place.
    dtype : of the gradients: ``"float32"``, or ``"bfloat16"`` for half the space. Sketches are of the float32 values.
    expected_steps : rows to lay out; more are added when they are used up.
    compress : shuffle and compress the gradients (about a tenth smaller for float32, and much slower). Sketches always
        are.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int,
        *,
        kinds: Sequence[Kind] = ("gradient",),
        store: Store = "gradients",
        dtype: Literal["float32", "bfloat16"] = "float32",
        expected_steps: int | None = None,
        compress: bool = False,
    ) -> None:
        import zarr

        attributes = _root_attributes(Path(path))
        self.path = Path(path)
        self.kinds = tuple(kinds)
        self.store = store
        self.numel = int(attributes["numel"])
        self._layers = _layout(Path(path), attributes)
        self._bfloat16 = dtype == "bfloat16"
        self._rows = 0
        self._capacity = expected_steps or _GROW
        name = f"rank{rank:05d}"
        if (self.path / name).exists():
            raise TraceError(f"{self.path} already holds rank {rank}")
        # Laid out beside its place and renamed into it: a reader finds the rank's arrays all or not at all.
        partial = f".{name}.{uuid.uuid4().hex}.partial"
        group = zarr.create_group(
            self.path / partial,
            attributes={"rank": rank, "store": store, "dtype": dtype},
            zarr_format=3,
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

        def packed(level: int) -> list[Any]:
            return [BloscCodec(cname="zstd", clevel=level, shuffle="bitshuffle"), Crc32cCodec()]

        def gradient(kind: Kind) -> None:
            group.create_array(
                kind,
                shape=(self._capacity, self.numel),
                chunks=(1, min(max(self.numel, 1), _CHUNK)),
                dtype="uint16" if self._bfloat16 else "float32",
                fill_value=0x7FC0 if self._bfloat16 else float("nan"),
                dimension_names=("step", "element"),
                compressors=packed(9) if compress else [Crc32cCodec()],
                attributes={"encoding": "bfloat16"} if self._bfloat16 else {},
            )

        def sketches(kind: Kind) -> None:
            layers, statistics = len(self._layers), len(_STATISTICS)
            group.create_array(
                f"{kind}_counts",
                shape=(self._capacity, layers, _BINS),
                chunks=(1, max(layers, 1), _BIN_CHUNK),
                dtype="uint32",
                fill_value=0,
                dimension_names=("step", "layer", "bin"),
                compressors=packed(5),
                attributes={"bits": _BITS},
            )
            group.create_array(
                f"{kind}_moments",
                shape=(self._capacity, layers, statistics),
                chunks=(1, max(layers, 1), statistics),
                dtype="float64",
                fill_value=float("nan"),
                dimension_names=("step", "layer", "statistic"),
                compressors=packed(5),
                attributes={"statistics": list(_STATISTICS)},
            )

        for kind in self.kinds:
            (sketches if self.store == "sketches" else gradient)(kind)
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
        for kind in self.kinds:
            values = arrays[kind]
            if values.shape != (self.numel,) or values.dtype != np.float32:
                raise TraceError(
                    f"expected float32 ({self.numel},), got {values.dtype} {values.shape}"
                )
        row = self._rows
        try:
            if row == self._capacity:
                self._resize(2 * row)
            # A row is written once: what a failed write leaves in it must not show through in another step.
            self._rows += 1
            for kind in self.kinds:
                put = self._put_sketch if self.store == "sketches" else self._put_gradient
                zeros, nonfinite = put(kind, row, arrays[kind])
                self._put(f"{kind}_zeros", row, zeros)
                self._put(f"{kind}_nonfinite", row, nonfinite)
            self._put("loss", row, loss)
            self._put("learning_rate", row, learning_rate)
            self._put("threshold", row, threshold)
            self._put("selected", row, selected)
            self._put("step", row, step)
        except OSError as error:
            raise TraceError(f"cannot write step {step} to {self.path}: {error}") from error

    def _put_gradient(self, kind: Kind, row: int, values: NDArray[np.float32]) -> tuple[int, int]:
        """Write a gradient; return its zeros and its non-finite elements."""
        self._arrays[kind][row] = _to_bfloat16(values) if self._bfloat16 else values
        return self.numel - int(np.count_nonzero(values)), _count_nonfinite(values)

    def _put_sketch(self, kind: Kind, row: int, values: NDArray[np.float32]) -> tuple[int, int]:
        """Write a gradient's sketches; return its zeros and its non-finite elements."""
        layers = len(self._layers)
        moments = np.empty((layers, len(_STATISTICS)))
        # by their first bin, those alone that hold a count of any layer
        chunks: dict[int, NDArray[np.uint32]] = {}
        for i, layer in enumerate(self._layers):
            counts, moments[i] = _tally(values[layer.slice])
            for first in range(0, _BINS, _BIN_CHUNK):
                part = counts[first : first + _BIN_CHUNK]
                if part.any():
                    chunks.setdefault(first, np.zeros((layers, part.size), np.uint32))[i] = part
        for first, block in chunks.items():
            self._arrays[f"{kind}_counts"][row, :, first : first + block.shape[1]] = block
        self._arrays[f"{kind}_moments"][row] = moments
        return int(moments[:, 1].sum()), int(moments[:, 2].sum())

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


def _tally(values: NDArray[np.float32]) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Return the histogram, uint32 (bins,), and the statistics of one layer: the same bits as ``sketch(values, 7)``.

    On this thread alone: the primitives' pool is the training's, and is not made for two users.
    """
    from gradstats.primitives._kernels import block_histogram, block_moments

    counts = np.zeros(256 << _BITS, np.uint32)
    total = np.zeros(len(_STATISTICS))
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        block_histogram(block.view(np.uint32), 23 - _BITS, counts)
        *sums, largest = block_moments(block, np.float32(0), True)
        total[:-1] += sums
        total[-1] = max(total[-1], largest)
    counts[0] -= np.uint32(total[1])  # the zeros share it with the smallest denormals
    return counts[:_BINS], total


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
    if schema not in range(1, SCHEMA + 1):
        raise TraceError(f"{path} has trace schema {schema}; this gradstats reads 1 to {SCHEMA}")
    missing = {"world_size", "numel", "layout"} - attributes.keys()
    if missing:
        raise TraceError(f"{path} is damaged: its attributes lack {', '.join(sorted(missing))}")
    return cast("dict[str, Any]", attributes)


def _layout(path: Path, attributes: Mapping[str, Any]) -> list[Layer]:
    try:
        return [
            Layer(la["name"], int(la["offset"]), tuple(la["shape"])) for la in attributes["layout"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is damaged: unreadable parameter layout") from error


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
        self.layers = _layout(self.path, self.attrs)
        try:
            self.numel = int(self.attrs["numel"])
            self.world_size = int(self.attrs["world_size"])
        except (TypeError, ValueError) as error:
            raise TraceError(f"{path} is damaged: unreadable numbers in its attributes") from error
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
        """Return the kinds of gradient a rank captured, in full or as sketches."""
        return [k for k in KINDS if self.has_gradients(rank, k) or self.has_sketches(rank, k)]

    def has_gradients(self, rank: int = 0, kind: Kind = "gradient") -> bool:
        """Tell whether a rank holds every element of a kind, so that :meth:`read` can give them."""
        return kind in self._rank(rank, self._groups)

    def has_sketches(self, rank: int = 0, kind: Kind = "gradient") -> bool:
        """Tell whether a rank holds sketches of a kind, so that :meth:`sketches` can give them."""
        return f"{kind}_counts" in self._rank(rank, self._groups)

    def _rank(self, rank: int, table: Mapping[int, Any]) -> Any:
        try:
            return table[rank]
        except KeyError:
            have = ", ".join(map(str, self.ranks)) or "none"
            raise TraceError(f"{self.path} has no rank {rank}; it holds {have}") from None

    def _row(self, step: int, rank: int) -> int:
        committed: dict[int, int] = self._rank(rank, self._committed)
        if step not in committed:
            raise TraceError(f"{self.path} has no step {step} on rank {rank}")
        return committed[step]

    def _damaged(self, what: str, step: int, rank: int, why: object) -> TraceError:
        why = _first_line(why) if isinstance(why, BaseException) else why
        return TraceError(f"{self.path}: {what} of step {step}, rank {rank} is damaged: {why}")

    def _gradient_array(self, rank: int, kind: Kind) -> zarr.Array[Any]:
        """Return the array that holds a kind in full."""
        if self.has_gradients(rank, kind):
            return self._groups[rank][kind]
        if self.has_sketches(rank, kind):
            raise TraceError(
                f"{self.path} holds only sketches of {kind!r} on rank {rank}: Trace.sketches gives their "
                "distributions; single elements need a capture with --store gradients"
            )
        raise TraceError(f"{self.path} has no {kind!r} on rank {rank}")

    def _elements(
        self, step: int, rank: int, kind: Kind, start: int, stop: int
    ) -> tuple[NDArray[np.float32], int]:
        """Return a part of a gradient, and how many non-finite elements all of it had at capture."""
        row, array = self._row(step, rank), self._gradient_array(rank, kind)
        try:
            values = np.asarray(array[row, start:stop])
            nonfinite = int(self._groups[rank][f"{kind}_nonfinite"][row])  # type: ignore[arg-type]
        except Exception as error:
            raise self._damaged(kind, step, rank, error) from error
        return _from_bfloat16(values) if values.dtype == np.uint16 else values, nonfinite

    def read(self, step: int, rank: int = 0, kind: Kind = "gradient") -> NDArray[np.float32]:
        """Return one captured gradient, float32 (numel,), bit-exact as captured (bfloat16: as rounded).

        Raises
        ------
        TraceError
            If it was not captured, or as a sketch only, or its data is damaged.
        """
        values, nonfinite = self._elements(step, rank, kind, 0, self.numel)
        # A chunk file that has gone missing reads as NaN fill; the count taken at capture gives it away.
        if _count_nonfinite(values) != nonfinite:
            raise self._damaged(kind, step, rank, "chunks are missing")
        return values

    def chunk_numel(self, rank: int = 0, kind: Kind = "gradient") -> int:
        """Return the elements per chunk on the disk: what :meth:`read_slice` reads at least.

        Raises
        ------
        TraceError
            If the kind was not captured in full.
        """
        return int(self._gradient_array(rank, kind).chunks[1])

    def read_slice(
        self, step: int, rank: int, kind: Kind, start: int, stop: int
    ) -> NDArray[np.float32]:
        """Return elements [start, stop) of one captured gradient, reading no more than the chunks they lie in.

        A missing chunk goes unnoticed here, unlike in :meth:`read`, if the gradient had as many non-finite elements
        as the chunks read have now.

        Parameters
        ----------
        step, rank, kind : as in :meth:`read`.
        start, stop : 0 ≤ start ≤ stop ≤ numel; borders of chunks (:meth:`chunk_numel`) make each be read once.

        Returns
        -------
        float32 (stop - start,)

        Raises
        ------
        InputError
            If the range is not within the gradient.
        TraceError
            If it was not captured, or as a sketch only, or its data is damaged.
        """
        if not 0 <= start <= stop <= self.numel:
            raise InputError(f"[{start}, {stop}) is not within the {self.numel} elements")
        size = self.chunk_numel(rank, kind)
        first, last = start // size * size, min(-(-stop // size) * size, self.numel)
        # Whole chunks: a missing one is then all NaN, which a few elements of it would hide among a few true NaN.
        values, nonfinite = self._elements(step, rank, kind, first, last)
        if _count_nonfinite(values) > nonfinite:
            raise self._damaged(kind, step, rank, "chunks are missing")
        return values[start - first : stop - first].copy()

    def sketches(self, step: int, rank: int = 0, kind: Kind = "gradient") -> list[Sketch]:
        """Return the sketches stored of one gradient, of every layer in the order of the layout.

        They have 7 bits, and are, but for the single magnitudes of small layers, what
        :func:`gradstats.sketch` makes of each layer, bit for bit. Their sum is the whole gradient's.

        Raises
        ------
        TraceError
            If no sketches were stored, or their data is damaged.
        """
        row, arrays = self._row(step, rank), self._rank(rank, self._groups)
        if not self.has_sketches(rank, kind):
            raise TraceError(f"{self.path} has no sketches of {kind!r} on rank {rank}")
        what = f"the sketch of {kind}"
        try:
            counts = np.asarray(arrays[f"{kind}_counts"][row])
            moments = np.asarray(arrays[f"{kind}_moments"][row])
        except Exception as error:
            raise self._damaged(what, step, rank, error) from error
        if moments.shape != (len(self.layers), len(_STATISTICS)) or len(counts) != len(moments):
            raise self._damaged(what, step, rank, "it does not fit the parameter layout")
        sketches = []
        for layer, number, sums in zip(self.layers, counts, moments.tolist(), strict=True):
            bins = np.flatnonzero(number > 0)  # ten times as fast as of the numbers
            occupied = number[bins].astype(np.int64)
            # A chunk that has gone missing reads as NaN moments, or as counts of zero: the sums tell.
            if sum(sums[:3]) != layer.numel or occupied.sum() != sums[0]:
                raise self._damaged(what, step, rank, "chunks are missing")
            count, zeros, nonfinite = map(int, sums[:3])
            total = Moments(layer.numel, count, zeros, nonfinite, *sums[3:])
            sketches.append(Sketch(total, bins, occupied, _BITS))
        return sketches

    def scalars(self, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Return a rank's per-step columns (step, loss, threshold, …), committed rows only, by name."""
        rows = list(self._rank(rank, self._committed).values())
        arrays = self._rank(rank, self._groups)
        return {name: np.asarray(a[:])[rows] for name, a in arrays.items() if a.ndim == 1}

    def gradients(self) -> Iterator[tuple[int, int, Kind, NDArray[np.float32]]]:
        """Yield (step, rank, kind, gradient) for everything captured in full: by rank and kind, steps in order."""
        for rank in self.ranks:
            for kind in (k for k in KINDS if self.has_gradients(rank, k)):
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
