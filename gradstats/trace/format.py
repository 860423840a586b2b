"""Names, arrays and attributes of a trace on disk, as its writer and its reader both know them."""

# Size: a third of its lines are docstrings; the schema is one file: what is written, and where it lies.

from __future__ import annotations

import glob
import json
import math
import os
import shutil
import stat
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import GradstatsError, InputError, TraceError, first_line
from gradstats.files import refuse_address, replace_file
from gradstats.primitives.ratio import shown
from gradstats.trace.columns import COUNTS, OF_LAYERS, OF_RUN, OF_STEPS, Column

__all__ = [
    "BINS",
    "BIN_CHUNK",
    "BITS",
    "CHUNK",
    "COMPRESSION",
    "FORMAT",
    "GROW",
    "KINDS",
    "LAYER_COMPRESSION",
    "OF_PARAMETERS",
    "PACK",
    "SCHEMA",
    "STATISTICS",
    "STORES",
    "WHOLE",
    "ArraySpec",
    "Kind",
    "Layer",
    "Shard",
    "Store",
    "array_specs",
    "chunk_name",
    "chunks_of",
    "count_nonfinite",
    "create_trace",
    "from_bfloat16",
    "group_metadata",
    "is_trace",
    "key_encoding",
    "layout",
    "pack_of",
    "read_metadata",
    "root_attributes",
    "to_bfloat16",
]

SCHEMA = 6
"""Version of the format that is written, and the only one that is read."""

Kind: TypeAlias = Literal["gradient", "corrected", "local", "pseudogradient", "update", "weight"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WHOLE: tuple[Kind, ...] = ("local",)
"""Kinds of which every rank has all elements, also where the model is sharded."""
OF_PARAMETERS: tuple[Kind, ...] = ("update", "weight")
"""Kinds that are known when the optimizer has stepped: what it takes off the parameters, and what is left of them."""

Store: TypeAlias = Literal["gradients", "sketches"]
STORES: tuple[Store, ...] = get_args(Store)
Dtype: TypeAlias = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
"""Types in which elements are stored."""

COMPRESSION = tuple(column.name for column in OF_STEPS)
"""Columns of a step's compression, NaN where unknown; gradstats.hooks' StepRecord and Diagnosis say what they are."""
LAYER_COMPRESSION = tuple(column.name for column in OF_LAYERS)
"""Columns of a layer's compression, NaN where unknown."""

FORMAT = "gradstats-trace"
RESERVED = ("format", "schema", "world_size", "numel", "layout")
# 16 MiB of float32: the least that is read of a gradient, and what one file holds
CHUNK = 1 << 22
# rows laid out where nobody says how many steps come
GROW = 64
PACK = 2048
"""Chunks in a pack at most: zarr reads the index of all of them, of 32 kB then, whenever it reads one."""

BITS = 7
"""Mantissa bits of the histograms stored: bins 0.4 to 0.8 % wide."""
BINS = 255 << BITS
BIN_CHUNK = 32 << BITS
"""Bins per chunk: 32 octaves, with borders at 2^-63, 2^-31, 2 and 2^33. Empty chunks are never written, gradients lie
in one chunk or two, and no bin is cut off. With all 32,640 bins in one chunk most of the time would be spent on zeros;
narrower chunks save hardly more and make more files."""
_FAST, _SMALL = ("lz4", 5, "shuffle", 1 << 16), ("zstd", 9, "bitshuffle", 0)
"""Codecs of counts, of which many are written in little time, and of gradients that are to be small. 64 kB stay in the
second-level cache."""
STATISTICS = ("count", "zeros", "nonfinite", "sum_abs", "sum_squares", "sum_log", "max")

_ROWS = 1024  # rows per chunk of a scalar: a write is one file of 8 kB
_TABLE = 1 << 16  # bytes per chunk of compression columns, about
_RUNS = 1 << 22  # stretches of one shard in its flat parameter
_METADATA = 1 << 26  # largest zarr.json that is read: a layout of half a million parameters


_LONG_NAMES = {
    "gradient": "gradient as autograd left it",
    "corrected": "gradient plus what error feedback added",
    "local": "gradient of this rank before any reduction",
    "pseudogradient": "parameters at the last exchange less those now",
    "update": "parameters before the optimizer's step less those after",
    "weight": "parameters after the optimizer's step",
    "counts": "elements by magnitude",
    "moments": "sums over the elements",
    **{column.name: column.label for column in (*COUNTS, *OF_RUN)},
    "step": "training step",
    "compression": "what the compressor said of the step",
    "layer_compression": "what the compressor said of each parameter",
}
_COUNTED = ("counts", "zeros", "nonfinite", "selected", "step")


def _labels(name: str) -> dict[str, str]:
    """Return the attributes by which xarray labels an array: a long name, and the unit of counts."""
    # an array of a kind, such as corrected_zeros, has a label of two parts
    kind, _, what = name.rpartition("_")
    long = _LONG_NAMES.get(name) or f"{_LONG_NAMES[what]} of the {_LONG_NAMES[kind]}"
    return {"long_name": long, **({"units": "1"} if what in _COUNTED else {})}


@dataclass(frozen=True, slots=True)
class Layer:
    """The place of one parameter in the flat gradient.

    Attributes
    ----------
    name : str
        Name of the parameter.
    offset : int
        Its first element in the flat gradient.
    shape : tuple of int
        Its shape.
    """

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements of the parameter."""
        return math.prod(self.shape)

    @property
    def slice(self) -> slice:
        """Return its position in the flat gradient."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one parameter that a rank holds where the model is sharded.

    Attributes
    ----------
    name : str
        Name of the parameter.
    offset : tuple of int
        Index in the parameter of the part's first element.
    shape : tuple of int
        Shape of the part; with a zero where the rank holds nothing.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements of the part."""
        return math.prod(self.shape)

    def runs(self, whole: tuple[int, ...]) -> NDArray[np.int64]:
        """Return where the part lies in the flat parameter.

        Parameters
        ----------
        whole : tuple of int
            Shape of the parameter.

        Returns
        -------
        ndarray of int64, shape (n, 2)
            First element and number of elements of every stretch, ascending. Where the first dimension is sharded, as
            FSDP does it, there is one.

        Raises
        ------
        ValueError
            If the part does not lie within the parameter.
        """
        # `last` becomes the last dimension that is cut; from that dimension on the part is contiguous
        last, start, numel = 0, 0, 1
        for i, (o, n, total) in enumerate(zip(self.offset, self.shape, whole, strict=True)):
            # from JSON, where True is a whole number for isinstance, too
            if not (type(o) is int and type(n) is int and 0 <= o <= o + n <= total):
                raise ValueError(f"a shard of {self.name} does not lie within it")
            if n != total:
                last = i
            # Horner's rule: the place of the part's first element in the flat parameter
            start, numel = start * total + o, numel * n
        if not numel:
            return np.empty((0, 2), np.int64)
        # one stretch for each combination of indices before the last cut dimension
        pieces = math.prod(self.shape[:last])
        if pieces > _RUNS:
            raise ValueError(f"a shard of {self.name} is in too many pieces")
        if (
            pieces == 1
        ):  # a trace of 256 ranks has 180 thousand of these: arrays would take ten seconds
            return np.array([[start, numel]])
        starts: NDArray[np.int64] = np.zeros((), np.int64)
        for i in range(len(whole)):
            stride = math.prod(whole[i + 1 :])
            # from the cut dimension on, a stretch begins at the part's own offset
            indices = np.arange(self.shape[i]) if i < last else np.zeros(1, np.int64)
            # in row-major order, so that the starts ascend
            starts = np.add.outer(starts, (self.offset[i] + indices) * stride)
        starts = starts.reshape(-1)
        return np.stack([starts, np.full_like(starts, math.prod(self.shape[last:]))], axis=1)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a rank's group. Its first dimension is ``step``.

    Attributes
    ----------
    name : str
        Name of the array.
    dimensions : tuple of str
        Names of its dimensions.
    shape : tuple of int
        Its shape without the first dimension.
    rows : int
        Rows per chunk.
    chunk : tuple of int
        Elements per chunk along the other dimensions.
    dtype : str
        Type of its elements.
    fill : float
        Value of elements that are not stored.
    codec : (str, int, str, int), optional
        Blosc's codec, its level, the shuffle before it, and the bytes that it takes at once (0: its choice); None for
        elements as they are.
    attributes : dict
        Attributes of the array.
    separator : {"/", "."}
        Character between the indices in the name of a chunk's file. With a dot chunks lie in the array's own folder,
        and no step has to make folders; such chunks can be asked for one by one, but not listed. Packs have the other.
    """

    name: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    rows: int
    chunk: tuple[int, ...]
    dtype: str
    fill: float
    codec: tuple[str, int, str, int] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    separator: str = "/"

    @property
    def column(self) -> bool:
        """Return whether it holds a few numbers a step, many steps in one chunk file."""
        return self.rows > 1

    @property
    def pack_separator(self) -> str:
        """Return the character between the indices in the name of a pack, so that no chunk has the same name."""
        return "/" if self.separator == "." else "."

    def json(self, capacity: int, pack: int = 0) -> bytes:
        """Return the text of the array's ``zarr.json``.

        Parameters
        ----------
        capacity, pack : int
            Those of :meth:`metadata`.

        Returns
        -------
        bytes
            The text.
        """
        return json.dumps(self.metadata(capacity, pack), indent=2).encode()

    def metadata(self, capacity: int, pack: int = 0) -> dict[str, Any]:
        """Return the content of the array's ``zarr.json``.

        Parameters
        ----------
        capacity : int
            Length of the first dimension.
        pack : int
            Chunks along the steps that lie in one file; 0 if each is a file.

        Returns
        -------
        dict
            Zarr version 3 metadata.
        """
        itemsize = np.dtype(self.dtype).itemsize
        codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if self.codec is not None:
            name, level, shuffle, block = self.codec
            blosc = {
                # Blosc's shuffle brings together the bytes of the same place in elements of this width
                "typesize": itemsize,
                "cname": name,
                "clevel": level,
                "shuffle": shuffle,
                "blocksize": block,
            }
            codecs.append({"name": "blosc", "configuration": blosc})
        # the checksum comes last, over the bytes on the disk, so that damage is found before Blosc decodes it
        codecs.append({"name": "crc32c"})
        chunk, file = [self.rows, *self.chunk], [self.rows * max(pack, 1), *self.chunk]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [capacity, *self.shape],
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": file}},
            "chunk_key_encoding": key_encoding(self.pack_separator if pack else self.separator),
            # zarr writes NaN as a string, since JSON has none
            "fill_value": "NaN" if self.fill != self.fill else int(self.fill),
            "codecs": [_sharding(chunk, codecs)] if pack else codecs,
            "dimension_names": list(self.dimensions),
            "attributes": self.attributes,
            "storage_transformers": [],
        }


def array_specs(
    layers: int,
    numel: int,
    *,
    kinds: Sequence[Kind] = KINDS,
    store: Store = "gradients",
    bfloat16: bool = False,
    compress: bool = False,
    compression: bool = False,
    chunk: int = CHUNK,
    expected: int = _ROWS,
    held: int | None = None,
) -> dict[str, ArraySpec]:
    """Return the arrays of a rank's group by name; ``step``, whose entry commits a row, is the last.

    Parameters
    ----------
    layers : int
        Number of parameters.
    numel : int
        Elements of the flat gradient.
    kinds : sequence of Kind
        Kinds that are captured.
    store : Store
        Whether gradients are stored, or sketches.
    bfloat16 : bool
        Whether the gradients are stored as bfloat16.
    compress : bool
        Whether the gradients are compressed.
    compression : bool
        Whether there are columns for what a compressor says of its steps.
    chunk : int
        Largest number of elements in a chunk of a gradient.
    expected : int
        Rows expected: the chunk of a scalar need not be longer.
    held : int, optional
        Elements that this rank holds of a sharded gradient; None if it holds all.

    Returns
    -------
    dict
        An :class:`ArraySpec` by name.
    """
    nan, specs = float("nan"), []
    # a compromise: longer chunks make fewer files, but every step rewrites its chunk
    rows = min(max(expected, GROW), _ROWS)

    def scalar(name: str, column: Column) -> None:
        specs.append(ArraySpec(name, ("step",), (), rows, (), column.dtype, column.fill))

    for kind in kinds:
        if store == "sketches":
            # zarr has no chunks of length 0
            wide = max(layers, 1)
            specs.append(
                ArraySpec(
                    f"{kind}_counts",
                    ("step", "layer", "bin"),
                    (layers, BINS),
                    1,
                    (wide, BIN_CHUNK),
                    "uint32",
                    0,
                    _FAST,
                    {"bits": BITS},
                    ".",
                )
            )
            specs.append(
                ArraySpec(
                    f"{kind}_moments",
                    ("step", "layer", "moment"),
                    (layers, len(STATISTICS)),
                    _table_rows(wide * len(STATISTICS), rows),
                    (wide, len(STATISTICS)),
                    "float64",
                    nan,
                    None,
                    {"names": list(STATISTICS)},
                )
            )
        else:
            # an unreduced gradient is whole on every rank, even where the model is sharded
            whole = held is None or kind in WHOLE
            size = numel if whole or held is None else held
            specs.append(
                ArraySpec(
                    kind,
                    ("step", "element" if whole else "shard_element"),
                    (size,),
                    1,
                    (min(max(size, 1), chunk),),
                    "uint16" if bfloat16 else "float32",
                    # bits of bfloat16's NaN
                    0x7FC0 if bfloat16 else nan,
                    _SMALL if compress else None,
                    {"encoding": "bfloat16"} if bfloat16 else {},
                )
            )
        for column in COUNTS:
            scalar(f"{kind}_{column.name}", column)
    for column in OF_RUN:
        scalar(column.name, column)
    if compression:
        for name, dimensions, shape, names in (
            ("compression", ("step", "column"), (), COMPRESSION),
            ("layer_compression", ("step", "layer", "layer_column"), (layers,), LAYER_COMPRESSION),
        ):
            wide = max(layers, 1) if shape else 1
            specs.append(
                ArraySpec(
                    name,
                    dimensions,
                    (*shape, len(names)),
                    _table_rows(wide * len(names), rows),
                    (*([wide] if shape else []), len(names)),
                    "float64",
                    nan,
                    None,
                    {"names": list(names)},
                )
            )
    specs.append(ArraySpec("step", ("step",), (), rows, (), "int64", -1))
    return {
        spec.name: replace(spec, attributes={**spec.attributes, **_labels(spec.name)})
        for spec in specs
    }


def key_encoding(separator: str) -> dict[str, Any]:
    """Return the entry of an array's metadata that says how its chunks are named.

    Parameters
    ----------
    separator : {"/", "."}
        Character between the indices in a chunk's name.
    """
    return {"name": "default", "configuration": {"separator": separator}}


def chunk_name(key: Iterable[int], separator: str) -> str:
    """Return the name of a chunk's file, or of a pack's, in the folder of its array.

    Parameters
    ----------
    key : iterable of int
        Indices of the chunk.
    separator : {"/", "."}
        Character between them.
    """
    return separator.join(("c", *map(str, key)))


def _sharding(chunk: list[int], codecs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the codec that puts chunks into one file, with an index at its end."""
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    about = {"chunk_shape": chunk, "codecs": codecs, "index_codecs": index, "index_location": "end"}
    return {"name": "sharding_indexed", "configuration": about}


def chunks_of(about: Mapping[str, Any]) -> tuple[list[int], list[dict[str, Any]]]:
    """Return what an array's metadata says of its chunks, whether each is a file or they lie in packs.

    Parameters
    ----------
    about : mapping
        Content of the array's ``zarr.json``.

    Returns
    -------
    shape : list of int
        Shape of a chunk.
    codecs : list of dict
        Codecs of a chunk.
    """
    codecs = about["codecs"]
    if codecs[0]["name"] == "sharding_indexed":
        inner = codecs[0]["configuration"]
        return inner["chunk_shape"], inner["codecs"]
    return about["chunk_grid"]["configuration"]["chunk_shape"], codecs


def pack_of(about: Mapping[str, Any]) -> int:
    """Return how many chunks lie in a pack, as an array's metadata says it.

    Parameters
    ----------
    about : mapping
        Content of the array's ``zarr.json``.

    Returns
    -------
    int
        Chunks along the steps; 0 if each is a file.

    Raises
    ------
    ValueError
        If there are packs, and not such as are written.
    """
    shape, codecs = chunks_of(about)
    if about["codecs"] == codecs:
        return 0
    file = about["chunk_grid"]["configuration"]["chunk_shape"]
    size = int(file[0] // shape[0])
    if (
        not 1 <= size <= PACK
        or file != [size * shape[0], *shape[1:]]
        or about["codecs"] != [_sharding(shape, codecs)]
    ):
        raise ValueError("its packs are not those of a trace")
    return size


def _table_rows(numbers: int, rows: int) -> int:
    """Return how many rows of a table, of so many numbers each, are in a chunk: it is written anew with each."""
    # 8: bytes of a float64
    return min(max(_TABLE // (8 * numbers), 2), rows)


def group_metadata(attributes: Mapping[str, Any]) -> bytes:
    """Return the content of a group's ``zarr.json``.

    Parameters
    ----------
    attributes : mapping
        Attributes of the group, JSON values.

    Returns
    -------
    bytes
        Zarr version 3 metadata.
    """
    group = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    return json.dumps(group, indent=2, allow_nan=False).encode()


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
    path : str or Path
        Directory to create, ``NAME.zarr`` by convention.
    layers : sequence of Layer
        Parameters in the order of the flat gradient.
    world_size : int
        Number of ranks of the run, whether captured or not.
    metadata : mapping of str to JSON values, optional
        Description of the run (model, data, optimizer, compressor, ratio, seed, versions, …).
    overwrite : bool
        Whether to replace an existing trace. It is renamed away when the new one is complete, then removed. Anything
        else at `path` is never touched.

    Raises
    ------
    InputError
        If JSON cannot hold the metadata, or it uses a name of the format's own; nothing is written then.
    TraceError
        If `path` exists and is not an empty directory or a trace to overwrite, or cannot be written.
    """
    refuse_address(path)
    if len({la.name for la in layers}) < len(layers):
        raise InputError("two layers have the same name: a trace tells layers apart by their names")
    attributes = {
        "format": FORMAT,
        "schema": SCHEMA,
        "world_size": world_size,
        "numel": sum(layer.numel for layer in layers),
        "layout": [
            {"name": la.name, "offset": la.offset, "shape": list(la.shape)} for la in layers
        ],
        **_checked(metadata or {}),
    }
    try:
        # where a link leads: the link stays, and the trace is made there
        place = Path(os.path.realpath(path))
        if place.exists() and not (place.is_dir() and not any(place.iterdir())):
            if not is_trace(place):
                raise TraceError(f"{path} exists and is not a trace; not touching it")
            if not overwrite:
                raise TraceError(
                    f"{path} exists; choose another name, or replace it with overwrite=True"
                )
        _place(place, group_metadata(attributes))
    except GradstatsError:
        raise
    except (OSError, ValueError, TypeError) as error:  # a name with a NUL is a ValueError
        raise TraceError(f"cannot create {path}: {first_line(error)}") from error


def _checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata that can be stored, or say what cannot."""
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise InputError(f"metadata: {key!r} is no name; its keys must be strings")
        if key in RESERVED:
            raise InputError(
                f"metadata: {key!r} is a name of the trace format's own; choose another"
            )
        try:
            json.loads(json.dumps({key: value}, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"metadata: JSON cannot hold the value of {key!r}: {first_line(error)}"
            ) from None
    return dict(metadata)


def _place(path: Path, root: bytes) -> None:
    """Put an empty trace at a path, where there is nothing, an empty directory, or a trace to replace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # leftovers of an earlier call that was interrupted
    _clear(path)
    unique = f".{path.name[:200]}.{uuid.uuid4().hex[:8]}"
    fresh, old = path.with_name(f"{unique}.partial"), path.with_name(f"{unique}.replaced")
    if path.is_dir():
        if not any(path.iterdir()):
            replace_file(path / "zarr.json", root)
            return
        if path.is_mount():  # it cannot be renamed: it stops being a trace first of all
            (path / "zarr.json").unlink()
            for entry in path.iterdir():
                _remove(entry)
            replace_file(path / "zarr.json", root)
            return
    try:
        # completed beside its place, so that the path never leads to a directory without metadata
        fresh.mkdir()
        (fresh / "zarr.json").write_bytes(root)
        # a rename cannot replace a non-empty directory, so that the old trace is moved away first
        if path.exists():
            path.rename(old)
        fresh.rename(path)
    except BaseException:
        _remove(fresh)
        # the second rename failed: put the old trace back
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    _clear(path)


def _clear(path: Path) -> None:
    """Remove a trace that was replaced, and what is left of others whose removal was interrupted."""
    # without a trace at the path, the one that was moved away may be the only copy
    replaced = (path / "zarr.json").exists()
    pattern = f".{glob.escape(path.name[:200])}.????????.replaced"
    for left in path.parent.glob(pattern):
        if replaced:
            (left / "zarr.json").unlink(missing_ok=True)  # half of it must not open
        if not (left / "zarr.json").exists():
            _remove(left)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_trace(path: str | Path) -> bool:
    """Tell whether `path` is a directory that says it is a trace, of whatever version.

    Parameters
    ----------
    path : str or Path
        Anything.

    Returns
    -------
    bool
        True if its ``zarr.json`` can be read and names the format.
    """
    try:
        attributes = read_metadata(Path(path) / "zarr.json", Path(path))["attributes"]
        return bool(attributes["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_metadata(file: Path, within: Path) -> dict[str, Any]:
    """Return the content of a ``zarr.json``, whatever lies in its place, in bounded time and memory.

    Parameters
    ----------
    file : Path
        File to read.
    within : Path
        Directory above it that a link must not lead out of.

    Returns
    -------
    dict
        The document.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is not a regular file in that directory, too large, or holds no JSON object.
    """
    real = os.path.realpath(file)
    # links within the trace are allowed: metadata files are links while it grows
    if real != str(file) and not Path(real).is_relative_to(os.path.realpath(within)):
        raise ValueError(f"{file.name} is a link that leads out of the trace")
    handle = os.open(real, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe must not block
    with os.fdopen(handle, "rb") as stream:
        # of the open file, since the name may lead elsewhere by now
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{file.name} is not a regular file")
        if status.st_size > _METADATA:
            raise ValueError(f"{file.name} has {status.st_size} bytes, more than any trace needs")
        text = stream.read(_METADATA)
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError(f"{file.name} is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    return document


def root_attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a trace, checked.

    Parameters
    ----------
    path : Path
        The trace.

    Returns
    -------
    dict
        The format's own attributes and the run's metadata.

    Raises
    ------
    TraceError
        If there is no trace, it is of another version, or its own attributes are damaged.
    """
    try:
        if not path.exists():
            raise TraceError(f"no such trace: {path}")
    except (OSError, ValueError) as error:
        # the text of an OSError has the path once more, however long it is
        reason = getattr(error, "strerror", None) or first_line(error)
        raise TraceError(f"cannot open {shown(str(path))}: {reason}") from None
    if not is_trace(path):
        raise TraceError(f"{path} is not a gradstats trace")
    attributes = read_metadata(path / "zarr.json", path)["attributes"]
    schema = attributes.get("schema")
    # True equals 1, and is no version
    if type(schema) is not int or schema != SCHEMA:
        written = repr(schema) if isinstance(schema, str) else str(schema)
        raise TraceError(
            f"{path} was written by another version of gradstats (schema {written[:40]}); this one reads schema "
            f"{SCHEMA}: open it with the version that wrote it, or capture it again"
        )
    missing = {"world_size", "numel", "layout"} - attributes.keys()
    if missing:
        raise TraceError(f"{path} is damaged: its attributes lack {', '.join(sorted(missing))}")
    total = sum(layer.numel for layer in layout(path, attributes))
    numel, world_size = attributes["numel"], attributes["world_size"]
    if type(numel) is not int or type(world_size) is not int or world_size < 1:
        raise TraceError(f"{path} is damaged: unreadable numbers in its attributes")
    if numel != total:
        raise TraceError(
            f"{path} is damaged: its numel, {numel}, does not fit the parameter layout, {total}"
        )
    return cast("dict[str, Any]", attributes)


def layout(path: Path, attributes: Mapping[str, Any]) -> list[Layer]:
    """Return the parameters that the attributes of a trace list.

    Parameters
    ----------
    path : Path
        The trace, for the error.
    attributes : mapping
        Attributes of the trace.

    Returns
    -------
    list of Layer
        Parameters in the order of the flat gradient.

    Raises
    ------
    TraceError
        If a name is no string, a shape is no list of sizes, or one does not begin where the last ends.
    """
    layers, offset = [], 0
    try:
        names = [entry["name"] for entry in attributes["layout"]]
        if len(set(names)) < len(names):
            twice = next(name for name, n in Counter(names).items() if n > 1)
            raise TraceError(f"{path} is damaged: two of its layers are named {shown(twice)}")
        for entry in attributes["layout"]:
            layer = Layer(entry["name"], entry["offset"], tuple(entry["shape"]))
            sizes = all(type(n) is int and 0 <= n < 1 << 62 for n in layer.shape)
            # NumPy's arrays have 64 dimensions at most
            if not (isinstance(layer.name, str) and sizes and len(layer.shape) <= 64):
                raise ValueError(entry)
            if type(layer.offset) is not int or layer.offset != offset:
                raise ValueError(entry)
            offset += layer.numel
            layers.append(layer)
        # positions in the flat gradient are int64
        if offset >= 1 << 62:
            raise ValueError(offset)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is damaged: unreadable parameter layout") from error
    return layers


def count_nonfinite(values: NDArray[np.float32]) -> int:
    """Return the number of NaN and infinite elements.

    Parameters
    ----------
    values : ndarray of float32
        Elements.

    Returns
    -------
    int
        Number of those that are not finite.
    """
    # in two passes that need a byte an element, and no compiled code
    return values.size - int(np.count_nonzero(np.isfinite(values)))


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, nearest even; NaN stays NaN, and what is finite stays finite.

    Parameters
    ----------
    values : ndarray of float32
        Elements.

    Returns
    -------
    ndarray of uint16
        Bits of the rounded elements.
    """
    # imported here: compiled code takes a second to load, and float32 traces never need it
    from gradstats.primitives.loops.copies import block_bfloat16

    rounded = np.empty(values.shape, np.uint16)
    # contiguous, as a view of another type has to be
    block_bfloat16(np.ascontiguousarray(values).view(np.uint32), rounded)
    return rounded


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 values of bfloat16 bits.

    Parameters
    ----------
    bits : ndarray of uint16
        Bits.

    Returns
    -------
    ndarray of float32
        Values.
    """
    # bfloat16 is the upper half of a float32: exact
    return (bits.astype(np.uint32) << 16).view(np.float32)
