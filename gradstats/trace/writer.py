"""Writing: one group per rank, a step at a time.

Chunk files are written here, not through zarr: the scalars of a step are one small file each, made in memory and
renamed into place, where zarr reads, decodes, encodes and compares each of them.
"""

# Size: what is written in which order, which decides what a kill leaves behind, is in one file.

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
import uuid
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError, TraceError
from gradstats.files import write_file, write_link
from gradstats.primitives.arrays import Array, as_numpy
from gradstats.primitives.backend import device_code
from gradstats.primitives.blocks import BLOCK
from gradstats.trace.format import (
    BIN_CHUNK,
    BINS,
    BITS,
    CHUNK,
    COMPRESSION,
    GROW,
    LAYER_COMPRESSION,
    STATISTICS,
    WHOLE,
    ArraySpec,
    Dtype,
    Kind,
    Layer,
    Shard,
    Store,
    array_specs,
    chunks_of,
    count_nonfinite,
    group_metadata,
    layout,
    read_metadata,
    root_attributes,
    to_bfloat16,
)
from gradstats.trace.packed import pack, unpack

__all__ = ["TraceWriter"]


# Size: one rank's part from its creation to its close; its attributes are what is open.
class TraceWriter:
    """Append steps to one rank's group of a trace. Not thread-safe; one writer per rank.

    Parameters
    ----------
    path : str or Path
        Trace made by :func:`create_trace`.
    rank : int
        Rank whose group to write; the trace must not hold it.
    kinds : sequence of Kind
        Arrays that :meth:`append` will be given.
    store : Store
        ``"gradients"``, or ``"sketches"`` for a histogram and the moments of every layer in their place.
    dtype : {"float32", "bfloat16"}
        Type of the stored gradients; bfloat16 takes half the space. Sketches are of the float32 values.
    expected_steps : int, optional
        Rows to lay out; more are added when they are used up.
    compress : bool
        Whether to shuffle and compress the gradients (about a tenth smaller for float32, and much slower). Sketches
        always are.
    compression : bool
        Whether to make room for what a compressor says of its steps.
    shards : sequence of Shard, optional
        What this rank holds of each parameter, where the model is sharded: as many as there are parameters, in the
        order of the layout. :meth:`append` is then given these parts alone, one after the other; of kind ``"local"``
        all elements.
    shard_ranks : sequence of int
        Ranks whose shards together are the whole gradient, this one among them. The trace is read under the first.
    resume : bool
        Whether to continue the group that an earlier writer of the same options left, whole or cut short.

    Raises
    ------
    InputError
        If the shards are not parts of the trace's parameters.
    TraceError
        If there is no such trace, it holds the rank already, or it cannot be written.

    Notes
    -----
    Rows are laid out before they are used, because xarray wants every array along ``step`` to have the same length
    and each array's length is in a file of its own. When all are used, and at the end, :func:`_resize` changes all
    lengths in one rename.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int,
        *,
        kinds: Sequence[Kind] = ("gradient",),
        store: Store = "gradients",
        dtype: Dtype = "float32",
        expected_steps: int | None = None,
        compress: bool = False,
        compression: bool = False,
        shards: Sequence[Shard] | None = None,
        shard_ranks: Sequence[int] = (),
        resume: bool = False,
    ) -> None:
        attributes = root_attributes(Path(path))
        self.path = Path(path)
        self.kinds = tuple(kinds)
        self.store = store
        self.numel = int(attributes["numel"])
        self._layers = layout(Path(path), attributes)
        held = None
        places = [layer.slice for layer in self._layers]
        self._places = dict.fromkeys(self.kinds, places)
        if shards is not None:
            _check_shards(shards, self._layers, rank, shard_ranks)
            ends = np.cumsum([0, *(shard.numel for shard in shards)]).tolist()
            held, parts = ends[-1], [slice(first, last) for first, last in pairwise(ends)]
            self._places |= {kind: parts for kind in self.kinds if kind not in WHOLE}
        self._held = held
        self._bfloat16 = dtype == "bfloat16"
        self._rows = 0
        self._last = -1
        # of each row the step that it was for, and whether it is not committed, or no longer
        # flat arrays take nine bytes a step, however long the run
        self._steps, self._void = array("q"), bytearray()
        self._capacity = expected_steps or GROW
        self._specs = array_specs(
            len(self._layers),
            self.numel,
            kinds=self.kinds,
            store=store,
            bfloat16=self._bfloat16,
            compress=compress,
            compression=compression,
            chunk=CHUNK,
            held=held,
            **({"expected": expected_steps} if expected_steps else {}),
        )
        name = f"rank{rank:05d}"
        self._group = self.path / name
        # two writers of one rank would write the same rows
        if self._group.exists() and not resume:
            raise TraceError(f"{self.path} already holds rank {rank}")
        about: dict[str, Any] = {
            "rank": rank,
            "store": store,
            "dtype": dtype,
            "arrays": list(self._specs),
        }
        if shards is not None:
            about["shard_ranks"] = list(shard_ranks)
            about["shards"] = [
                {"name": s.name, "offset": list(s.offset), "shape": list(s.shape)} for s in shards
            ]
        # nothing has been written until here, so that wrong arguments leave no group behind
        try:
            if not (resume and self._group.exists()):
                _lay_out(self._group, self._specs, self._capacity, about)
                resume = False
        except OSError as error:
            raise TraceError(f"cannot write rank {rank} to {self.path}: {error}") from error
        self._packed = False  # whether close() has put chunks into packs
        if resume:
            self._continue(about)
        self._identity, self._about = _identity(self._group), _about(self._group)
        self._columns = {
            n: _Column(self._group / n, spec) for n, spec in self._specs.items() if spec.column
        }
        # the chunk being filled is kept in memory: its committed rows are read back, once
        if resume and self._rows:
            for name, column in self._columns.items():
                column.take_up(self._rows, self._group / name)
        if store == "sketches" or self._bfloat16:
            # here rather than in the thread that appends, where the first step would wait a second for it
            import gradstats.primitives.loops.sums  # noqa: F401
        if store == "sketches":  # kinds of the same layers share one
            tallies: dict[int, _Tally] = {}
            self._tallies = {
                k: tallies.setdefault(id(p), _Tally(p)) for k, p in self._places.items()
            }

    def _continue(self, about: Mapping[str, Any]) -> None:
        """Take up the rows that are committed; one that a killed writer left half-written is written again."""
        attributes = read_metadata(self._group / "zarr.json", self.path)["attributes"]
        if {name: attributes.get(name) for name in about} != about:
            raise TraceError(
                f"{self._group} was written with other options, and cannot be continued"
            )
        lengths = {}
        # chunks stay as they were laid out, whatever is expected now
        for name, spec in self._specs.items():
            stored = read_metadata(self._group / name / "zarr.json", self.path)
            lengths[name] = stored["shape"][0]
            rows, *chunk = chunks_of(stored)[0]
            self._specs[name] = replace(spec, rows=rows, chunk=tuple(chunk))
        try:
            unpack(self._group, self._specs, lengths)
        except OSError as error:
            raise TraceError(f"cannot continue {self._group}: {error}") from error
        # a writer killed in mid-growth may leave different lengths; the longest covers every row
        self._capacity = max(lengths.values())
        # killed within `_resize`: what is still a link becomes a file before anything is added
        if (self._group / "step" / "layout").is_symlink():
            _settle(self._group, self._specs, self._capacity)
        elif len(set(lengths.values())) > 1:
            _write_metadata(self._group, self._specs, self._capacity)
        import zarr

        numbers = np.asarray(zarr.open_array(self._group / "step", mode="r")[:])
        # rows after the last committed one were never finished, and are used again
        self._last = int(numbers.max(initial=-1))
        self._rows = int(np.flatnonzero(numbers >= 0).max(initial=-1)) + 1
        # a lost chunk of step numbers reads as -1: its rows would be taken for unused
        for place in range(-(-self._rows // self._specs["step"].rows)):
            if not (self._group / "step" / "c" / str(place)).exists():
                raise TraceError(f"{self._group} lacks steps in between, and cannot be continued")
        numbers = numbers[: self._rows]
        void = numbers < 0
        # an uncommitted row gets the number after the step before it, so that the list stays sorted for bisect
        self._steps = array("q", (np.maximum.accumulate(numbers) + void).tolist())
        self._void = bytearray(void.tolist())
        self._sweep()

    def size(self, kind: Kind) -> int:
        """Return the number of elements that :meth:`append` takes of a kind.

        Parameters
        ----------
        kind : Kind
            One of this writer's kinds.

        Returns
        -------
        int
            All of the flat gradient, or those that this rank holds of it.
        """
        return self.numel if self._held is None or kind in WHOLE else self._held

    def append(
        self,
        step: int,
        arrays: Mapping[Kind, Array],
        *,
        loss: float = float("nan"),
        learning_rate: float = float("nan"),
        threshold: float = float("nan"),
        selected: int = -1,
        compression: Mapping[str, float] | None = None,
        layer_compression: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Write one step and commit it.

        Parameters
        ----------
        step : int
            Step number, not negative and greater than the last.
        arrays : mapping of Kind to float32 array, shape (size(kind),)
            Gradients, one for every kind of this writer: arrays of NumPy, or, for sketches, tensors on any device.
        loss, learning_rate, threshold : float
            Values used in the step; NaN where unknown.
        selected : int
            Number of elements k̂ that the compressor kept, -1 where unknown.
        compression : mapping of str to float, optional
            Some of :data:`COMPRESSION`, if the writer made room for it.
        layer_compression : mapping of str to ndarray, shape (layers,), optional
            Some of :data:`LAYER_COMPRESSION`, in the order of the layout.

        Raises
        ------
        InputError
            If the step number is not greater than the last.
        TraceError
            If an array has another shape or type, or the disk refuses; the step is then not committed, all earlier
            ones are.
        """
        for kind in self.kinds:
            values = arrays[kind]
            # by name, since the array may be NumPy's or torch's
            if values.shape != (self.size(kind),) or "float32" not in str(values.dtype):
                raise TraceError(
                    f"expected float32 ({self.size(kind)},), got {values.dtype} {values.shape}"
                )
        if step <= self._last:
            raise InputError(f"step {step} does not come after step {self._last}")
        # refused, because the columns would be dropped silently
        if (compression or layer_compression) and "compression" not in self._columns:
            raise InputError("open the TraceWriter with compression=True to store compression")
        row = self._rows
        try:
            self._check_own()
            self._open_again()
            if row == self._capacity:
                # a group that was closed without steps has no rows to double
                self._resize(2 * row or GROW)
            # A row is written once: what a failed write leaves in it must not show through in another step.
            self._rows += 1
            # Until it is committed; no later step is smaller, so that the list stays sorted for bisect.
            self._steps.append(self._last + 1)
            self._void.append(True)
            # First of a chunk's files: where others are and it is not, it was lost.
            self._columns["step"].turn_to(row)
            for kind in self.kinds:
                put = self._put_sketch if self.store == "sketches" else self._put_gradient
                zeros, nonfinite = put(kind, row, arrays[kind])
                self._put(f"{kind}_zeros", row, zeros)
                self._put(f"{kind}_nonfinite", row, nonfinite)
            self._put("loss", row, loss)
            self._put("learning_rate", row, learning_rate)
            self._put("threshold", row, threshold)
            self._put("selected", row, selected)
            if "compression" in self._columns:
                step_scalars, unknown = compression or {}, np.full(len(self._layers), np.nan)
                self._put("compression", row, [step_scalars.get(n, np.nan) for n in COMPRESSION])
                columns = [(layer_compression or {}).get(n, unknown) for n in LAYER_COMPRESSION]
                self._put("layer_compression", row, np.stack(columns, axis=1))
            # the commit: everything else of this row is written by now
            self._put("step", row, step)
        except OSError as error:
            raise TraceError(f"cannot write step {step} to {self.path}: {error}") from error
        self._last, self._steps[row], self._void[row] = step, step, False

    def remove(self, step: int) -> None:
        """Remove a committed step. Its gradients or counts are deleted, and its numbers when those beside them are.

        Parameters
        ----------
        step : int
            Step number.

        Raises
        ------
        InputError
            If there is no such step.
        TraceError
            If the disk refuses.

        Notes
        -----
        Moments and columns hold several steps in a file, which goes with the last of them; numbers of a step in a file
        of up to 1024 stay. A process killed here leaves the step whole, or no step and files that nobody reads, which
        the next writer deletes. A reader opened before finds the step damaged: it has to open the trace again.
        """
        # rows of failed writes may have the same number, and come before the committed one
        row = bisect_right(self._steps, step) - 1
        if row < 0 or self._steps[row] != step or self._void[row]:
            raise InputError(f"{self._group} has no step {step} to remove")
        try:
            self._check_own()
            self._open_again()
            self._columns["step"].clear(row)  # from here on it is no step
            self._void[row] = True
            self._drop(row)
        except (OSError, ValueError) as error:
            raise TraceError(f"cannot remove step {step} from {self.path}: {error}") from error

    def _drop(self, row: int) -> None:
        """Delete the files that hold nothing but a row, or rows, that are not committed."""
        for name, spec in self._specs.items():
            # a gradient's chunks lie in a folder for each row
            if not spec.column and spec.separator == "/":
                shutil.rmtree(self._group / name / "c" / str(row), ignore_errors=True)
            elif not spec.column:
                # a range of bins without counts has no file
                for chunk in range(-(-spec.shape[-1] // spec.chunk[-1])):
                    (self._group / name / f"c.{row}.0.{chunk}").unlink(missing_ok=True)
            # a table's chunk goes with the last of its rows; those of single numbers are small and stay
            elif spec.shape:
                first = row - row % spec.rows
                beside = self._void[first : first + spec.rows]
                # a chunk that is not full yet will get further rows
                if len(beside) == spec.rows and all(beside):
                    shutil.rmtree(self._group / name / "c" / str(row // spec.rows), True)

    def _sweep(self) -> None:
        """Delete what a killed writer has left of steps that it removed, and of the one that it had begun."""
        for name, spec in self._specs.items():
            if spec.column:
                continue
            dotted = spec.separator == "."
            # dotted chunks lie beside the array's own zarr.json
            folder = self._group / name if dotted else self._group / name / "c"
            names = os.listdir(folder) if folder.exists() else []
            rows = {n.split(".")[1] if dotted and n.startswith("c.") else n for n in names}
            for row in (int(n) for n in rows if n.isdecimal()):
                # a range of bins that the next step of this row has no counts in would keep those of the last
                if row >= self._rows or self._void[row]:
                    self._drop(row)

    def _put_gradient(self, kind: Kind, row: int, values: Any) -> tuple[int, int]:
        """Write a gradient; return its zeros and its non-finite elements."""
        spec = self._specs[kind]
        stored = to_bfloat16(values) if self._bfloat16 else values
        folder, (size,) = f"{self._group}/{kind}/c/{row}", spec.chunk
        for i, start in enumerate(range(0, values.size, size)):
            _write_chunk(f"{folder}/{i}", _padded(stored[start : start + size], spec), spec)
        # of what is stored: bfloat16 rounds the smallest numbers to 0, which has a sign, the first bit
        zeros = stored << 1 == 0 if self._bfloat16 else values == 0
        # by NumPy: gradients alone need no compiled code, which takes a second to import
        return int(np.count_nonzero(zeros)), count_nonfinite(values)

    def _put_sketch(self, kind: Kind, row: int, values: Any) -> tuple[int, int]:
        """Write a gradient's sketches; return its zeros and its non-finite elements."""
        chunks, moments = self._tallies[kind](values)
        name = f"{kind}_counts"
        # ranges without counts are not written: a missing file means zeros
        for chunk, block in chunks.items():
            _write_chunk(f"{self._group}/{name}/c.{row}.0.{chunk}", block, self._specs[name])
        self._put(f"{kind}_moments", row, moments)
        return int(moments[:, 1].sum()), int(moments[:, 2].sum())

    def _check_own(self) -> None:
        """Refuse to write into what another writer has put in the place of this one's group."""
        identity = _identity(self._group)
        if identity == self._identity:
            return
        # some network filesystems number files anew; a trace of another run says when it was made
        if self._about != _about(self._group):
            raise TraceError(
                f"{self._group} was replaced while it was being written: another Capture has the same path"
            )
        self._identity = identity

    def _open_again(self) -> None:
        """Take the chunks out of the packs that :meth:`close` has made."""
        if self._packed:
            unpack(self._group, self._specs, dict.fromkeys(self._specs, self._capacity))
            self._packed = False

    def _put(self, name: str, row: int, value: Any) -> None:
        """Write what one column holds for a row."""
        self._columns[name].put(row, value)

    def _resize(self, capacity: int) -> None:
        """Change the number of rows laid out."""
        linked = _resize(self._group, self._specs, self._capacity, capacity)
        self._capacity = capacity
        # without links the lengths were changed one by one, and there is nothing to clear up
        if linked:
            _settle(self._group, self._specs, capacity)

    def close(self) -> None:
        """Drop the rows laid out but never used, and put the many chunk files of sketches and columns into few.

        The trace is complete without it. A reader by zarr or xarray that was opened before has to be opened again. A
        step that is written or removed after it, or by a writer that continues the group, makes all files anew.

        Raises
        ------
        TraceError
            If the disk refuses.
        """
        try:
            self._check_own()
            # readers by xarray then see as many rows as there were steps
            if self._rows < self._capacity:
                self._resize(self._rows)
            self._packed = True  # first, as a failure leaves some arrays packed
            for name, spec in self._specs.items():
                pack(self._group / name, spec, self._capacity)
        except OSError as error:
            raise TraceError(f"cannot finish {self.path}: {error}") from error


def _identity(group: Path) -> tuple[int, ...]:
    """Return what tells a rank's group from another one in its place."""
    # written once; a directory's own number may be used again for the next one
    about = os.stat(group / "zarr.json")
    return about.st_dev, about.st_ino, about.st_mtime_ns


def _about(group: Path) -> tuple[bytes, bytes]:
    """Return what a trace, and a rank's group in it, say of themselves."""
    return (group.parent / "zarr.json").read_bytes(), (group / "zarr.json").read_bytes()


def _check_shards(
    shards: Sequence[Shard], layers: Sequence[Layer], rank: int, ranks: Sequence[int]
) -> None:
    if [s.name for s in shards] != [layer.name for layer in layers]:
        raise InputError("shards must be one of each parameter, in the order of the trace's layout")
    if rank not in ranks:
        raise InputError(f"rank {rank} must be one of shard_ranks, not beside {list(ranks)}")
    try:
        for shard, layer in zip(shards, layers, strict=True):
            shard.runs(layer.shape)
    except ValueError as error:
        raise InputError(str(error)) from None


class _Column:
    """An array with many rows in a chunk. The chunk being filled is kept in memory, and nothing is read back."""

    def __init__(self, folder: Path, spec: ArraySpec) -> None:
        self._folder, self._spec = f"{folder}/c", spec
        # a single chunk in every dimension but the rows: index 0
        self._within = "/0" * len(spec.chunk)
        self._values = np.empty((spec.rows, *spec.chunk), spec.dtype)
        self._chunk = -1

    def turn_to(self, row: int) -> None:
        """Begin the chunk that a row lies in, if it is another than the last."""
        chunk = row // self._spec.rows
        if chunk != self._chunk:
            self._values[...] = self._spec.fill
            # written before its first row, so that a missing file always means damage
            self._write(chunk)
            self._chunk = chunk  # last: after a failed write the next call tries again

    def take_up(self, row: int, folder: Path) -> None:
        """Read the rows of the chunk that a row lies in, up to it; what was left beyond is dropped."""
        # the row begins a chunk, which has nothing to keep
        first = row - row % self._spec.rows
        if first == row:
            return
        import zarr

        self._values[...] = self._spec.fill
        self._values[: row - first] = zarr.open_array(folder, mode="r")[first:row]
        self._chunk = row // self._spec.rows

    def put(self, row: int, value: Any) -> None:
        """Write a row. One that equals the fill value is there already."""
        self.turn_to(row)
        place, fill = row % self._spec.rows, self._spec.fill
        self._values[place] = value
        # compared as stored, in the array's dtype
        entry = self._values[place]
        # NaN equals nothing, not even itself
        if (np.isnan(entry) if fill != fill else entry == fill).all():
            return
        try:
            self._write(self._chunk)
        except BaseException:
            self._values[place] = fill  # a later row's write must not bring it in
            raise

    def clear(self, row: int) -> None:
        """Give a row back its fill value."""
        chunk, place = divmod(row, self._spec.rows)
        held = self._values
        if chunk != self._chunk:
            # an earlier chunk, which is no longer in memory
            held = _read_chunk(f"{self._folder}/{chunk}{self._within}", self._spec)
        before = held[place].copy()
        held[place] = self._spec.fill
        try:
            self._write(chunk, held)
        except BaseException:
            # memory must match the disk, since the next row's write replaces the whole chunk
            held[place] = before
            raise

    def _write(self, chunk: int, values: NDArray[Any] | None = None) -> None:
        # arrays without layers have no chunks
        if all(self._spec.shape):
            file = f"{self._folder}/{chunk}{self._within}"
            _write_chunk(file, self._values if values is None else values, self._spec)


def _padded(values: NDArray[Any], spec: ArraySpec) -> NDArray[Any]:
    """Return a chunk of a gradient in its full size: zarr has no other."""
    (size,) = spec.chunk
    if values.size == size:
        return values
    whole = np.full(size, spec.fill, spec.dtype)
    whole[: values.size] = values
    return whole


def _read_chunk(file: str, spec: ArraySpec) -> NDArray[Any]:
    """Return the values of a chunk that is not compressed."""
    from google_crc32c import value as crc32c

    data = Path(file).read_bytes()
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise ValueError("a chunk's checksum is wrong")
    # little-endian on the disk, on whatever machine
    little = np.frombuffer(data[:-4], np.dtype(spec.dtype).newbyteorder("<"))
    return little.astype(spec.dtype).reshape(spec.rows, *spec.chunk)


def _write_chunk(file: str, values: NDArray[Any], spec: ArraySpec) -> None:
    """Write one chunk with its checksum: all of it or nothing."""
    from google_crc32c import value as crc32c

    little = np.ascontiguousarray(values, np.dtype(spec.dtype).newbyteorder("<"))
    if spec.codec is None:
        data = little.reshape(-1).view(np.uint8)
    else:
        # imported here: only sketches and compressed gradients need it
        from numcodecs import Blosc  # type: ignore[import-untyped]

        name, level, shuffle, block = spec.codec
        # Blosc takes the element's width, which its shuffle needs, from the array
        codec = Blosc(name, level, getattr(Blosc, shuffle.upper()), block)
        data = np.frombuffer(codec.encode(little), np.uint8)
    parts = (data.data, crc32c(data).to_bytes(4, "little"))
    for pause in _PAUSES_S:
        try:
            _write_in_place(file, spec, *parts)
            return
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            time.sleep(pause)  # of the writing thread: the training goes on
    _write_in_place(file, spec, *parts)


def _write_in_place(file: str, spec: ArraySpec, *parts: Any) -> None:
    """Write a chunk's file, and the folders that it lies in."""
    try:
        write_file(file, *parts)
    except FileNotFoundError:
        # Folders of chunks are made as they are needed. That of the array is there, or the trace has vanished, which
        # must be an error: made anew it would lack its metadata, and no reader would find what is in it.
        if spec.separator != "/":
            raise
        # levels: "c", and a folder for each index of the chunk but the last
        _make_folder(os.path.dirname(file), len(spec.dimensions))
        write_file(file, *parts)


def _make_folder(folder: str, levels: int) -> None:
    """Make a folder, and those that it lies in, up to a number of levels."""
    try:
        os.mkdir(folder)
    except FileNotFoundError:
        if levels == 1:
            # not even the array's folder is there
            raise
        _make_folder(os.path.dirname(folder), levels - 1)
        os.mkdir(folder)


def _lay_out(
    group: Path, specs: Mapping[str, ArraySpec], capacity: int, about: Mapping[str, Any]
) -> None:
    """Make a rank's group beside the trace and rename it into place: a reader finds all its arrays or none."""
    root = group.parent
    for place in (root.parent, root):  # zarr lists what lies in the root
        # a dot and its suffix keep it from being taken for a trace or a rank
        partial = place / f".{root.name[:180]}.{group.name}.{uuid.uuid4().hex[:8]}.partial"
        try:
            for name in specs:
                (partial / name).mkdir(parents=True)
            _write_metadata(partial, specs, capacity)
            write_file(partial / "zarr.json", group_metadata(about))
            partial.rename(group)
            return
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            # EXDEV: the trace is a file system of its own, into which nothing is renamed from outside
            if place is root or error.errno not in (*_NOT_THERE, errno.EXDEV):
                raise


# the folder above the trace belongs to somebody else, or may not be written
_NOT_THERE = (errno.EPERM, errno.EACCES, errno.EROFS)
_PASSING = (errno.EIO, errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT)
"""Errors that may be gone when a write is tried again."""
_PAUSES_S = (0.05, 0.2)
"""Seconds before it is."""
# what symlink() says where the file system has no links
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


def _write_metadata(group: Path, specs: Mapping[str, ArraySpec], capacity: int) -> None:
    for name, spec in specs.items():
        write_file(group / name / "zarr.json", spec.json(capacity))


def _resize(group: Path, specs: Mapping[str, ArraySpec], before: int, after: int) -> bool:
    """Change the length of all arrays of a group at once, so that xarray can open the trace at any moment.

    Each array's length is in its own ``zarr.json``. These become links that all go through one directory link, which
    is then turned from the old texts to the new ones: a single rename. :func:`_settle` makes them files again. No
    step changes what a reader sees but that one. Links leave no trace in traces, unless the process dies here.

    Returns whether :func:`_settle` has something to do: there are file systems without links.
    """
    # inside an array's folder, where zarr looks for nothing but zarr.json and chunks
    home = group / "step"
    try:
        for capacity in (before, after):
            (home / f"layout-{capacity}").mkdir(exist_ok=True)
            for name, spec in specs.items():
                write_file(home / f"layout-{capacity}" / f"{name}.json", spec.json(capacity))
        write_link(f"layout-{before}", home / "layout")
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # One after the other, `step` the shortest: our reader goes by it, and waits for no repair.
        order = list(specs) if after > before else list(specs)[::-1]
        _write_metadata(group, {name: specs[name] for name in order}, after)
        return False
    # relative, since a trace may be moved while links are left in it
    for name in specs:
        target = f"layout/{name}.json" if name == "step" else f"../step/layout/{name}.json"
        write_link(target, group / name / "zarr.json")
    write_link(f"layout-{after}", home / "layout")
    return True


def _settle(group: Path, specs: Mapping[str, ArraySpec], capacity: int) -> None:
    """Make the links that :func:`_resize` left files of the same content."""
    _write_metadata(group, specs, capacity)
    home = group / "step"
    # last: no metadata leads through it any more
    (home / "layout").unlink()
    for left in home.glob("layout-*"):
        shutil.rmtree(left, ignore_errors=True)


_AT_ONCE = 128
"""Layers that a device counts before the host waits for it; their histograms take 34 MB there."""


class _Tally:
    """Histograms and statistics of a gradient's layers, those of ``sketch(layer, 7)``.

    On the calling thread alone, for the primitives' pool is the training's, and in compiled loops, for Python's lock is
    the training's too. A device counts and adds up its own.
    """

    def __init__(self, places: Sequence[slice]) -> None:
        self._places = places
        self._parts = np.array([(p.start, p.stop) for p in places], np.int64).reshape(-1, 2)
        sizes = self._parts[:, 1] - self._parts[:, 0]
        # layers that the cache still holds when they are read again
        turns = np.flatnonzero(np.diff((np.cumsum(sizes) - 1) // BLOCK)) + 1
        self._groups = [slice(a, b) for a, b in pairwise([0, *turns.tolist(), len(places)])]
        # 256 << BITS, so that the last chunk is whole: BINS are 255 << BITS
        self._counts = np.zeros(((256 << BITS) // BIN_CHUNK, len(places), BIN_CHUNK), np.uint32)
        self._used = np.zeros(len(self._counts), np.bool_)

    def __call__(self, values: Array) -> tuple[dict[int, NDArray[np.uint32]], NDArray[np.float64]]:
        """Return the chunks of bins that have a count of any layer, until the next call, and the statistics."""
        # chunks without a mark still hold the counts of an earlier gradient
        self._used[:] = False
        count = self._count if device_code(values) is None else self._count_on_device
        moments = np.asarray(count(values), float).reshape(-1, len(STATISTICS))
        used = np.flatnonzero(self._used).tolist()
        return {chunk: self._counts[chunk] for chunk in used}, moments

    def _count(self, gradient: Array) -> NDArray[np.float64]:
        from gradstats.primitives.loops.counts import histograms_of_parts
        from gradstats.primitives.loops.sums import moments_of_parts

        values, sums = as_numpy(gradient), np.empty((len(self._parts), len(STATISTICS)))
        bits = values.view(np.uint32)
        for group in self._groups:
            moments_of_parts(values, self._parts[group], np.float32(0), True, sums[group])
            histograms_of_parts(
                bits,
                self._parts[group],
                sums[group],
                group.start,
                23 - BITS,
                BINS,
                self._counts,
                self._used,
            )
        return sums

    def _count_on_device(self, values: Any) -> NDArray[np.float64]:
        torch, code = sys.modules["torch"], device_code(values)
        assert code is not None
        sums = []
        for start in range(0, len(self._places), _AT_ONCE):
            parts = [values[place] for place in self._places[start : start + _AT_ONCE]]
            # as the host's bins, to the bit: counts are below 2³²
            counts = torch.stack([code.counts(part, BITS)[0].to(torch.int32) for part in parts])
            counts[:, BINS:] = 0
            chunks = counts.view(len(parts), -1, BIN_CHUNK)
            used = np.flatnonzero(chunks.any(2).any(0).cpu().numpy()).tolist()
            # cut one by one, as positions that are moved to the device are a wait; of zeros alone there are none
            host_counts = (
                torch.stack([chunks[:, chunk] for chunk in used]).cpu().numpy() if used else ()
            )
            for counted, chunk in zip(host_counts, used, strict=True):
                if not self._used[chunk]:
                    # cleared when first marked, since it may hold an earlier gradient's counts
                    self._counts[chunk], self._used[chunk] = 0, True
                self._counts[chunk, start : start + len(parts)] = counted.view(np.uint32)
            sums.append(torch.stack([code.sums(part, 0.0, True) for part in parts]).cpu().numpy())
        return np.concatenate(sums) if sums else np.empty((0, len(STATISTICS)))
