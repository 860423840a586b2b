"""One rank's arrays as they lie on the disk: what should be there, what is, and what of it can be read."""

# Size: a third of its lines are docstrings; an array and the group of a rank are read by the same rules.

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import TraceError, unread
from gradstats.primitives.ratio import shown
from gradstats.trace.columns import COUNTS, OF_LAYERS, OF_RUN, OF_STEPS
from gradstats.trace.format import (
    CHUNK,
    KINDS,
    WHOLE,
    ArraySpec,
    Kind,
    Layer,
    Shard,
    array_specs,
    chunk_name,
    chunks_of,
    key_encoding,
    pack_of,
    read_metadata,
)
from gradstats.trace.packed import CHECKSUM, read_index

if TYPE_CHECKING:
    import zarr

__all__ = ["RankGroup", "StoredArray"]

# kinds that every rank has whole are left out: their counts need no joining
_SCALARS = {column.name: column for column in OF_RUN} | {
    f"{kind}_{column.name}": column for kind in KINDS if kind not in WHOLE for column in COUNTS
}
_TABLES = {
    name: {column.name: column for column in columns}
    for name, columns in (("compression", OF_STEPS), ("layer_compression", OF_LAYERS))
}
"""Columns by the array that holds them, and by their names in it."""


class StoredArray:
    """One array: its metadata, checked, and its chunks, each a file or in a pack with others.

    Parameters
    ----------
    folder : Path
        The array.
    root : Path
        Trace that no link may lead out of.
    spec : ArraySpec
        What the trace's layout says of the array.

    Attributes
    ----------
    shape, chunk : tuple of int
        Shapes of the array and of a chunk.
    dtype : str
        Type of the elements.
    names : list of str
        Names along the last dimension, where it has any.

    Raises
    ------
    OSError, ValueError, KeyError, TypeError
        If it is lost, or is not such an array.
    """

    def __init__(self, folder: Path, root: Path, spec: ArraySpec) -> None:
        self._folder, self._root = folder, root
        about = read_metadata(folder / "zarr.json", root)
        shape, (grid, described) = about["shape"], chunks_of(about)
        codecs = [codec["name"] for codec in described]
        order = described[0]["configuration"]["endian"]
        self._pack = pack_of(about)
        self._separator = spec.pack_separator if self._pack else spec.separator
        # read_chunk and holds_beyond read files without zarr, and rely on all of this
        if (
            (about["node_type"], about["zarr_format"]) != ("array", 3)
            or not all(type(n) is int and 0 <= n < 1 << 62 for n in [*shape, *grid])
            or not len(shape) == len(grid) == 1 + len(spec.shape)
            or not all(grid)
            # gradients are cut into pieces of any size; a row of anything else into those of the layout
            or (tuple(grid[1:]) != spec.chunk and spec.name not in KINDS)
            or (self._pack and spec.name in KINDS)
            or codecs not in (["bytes", "crc32c"], ["bytes", "blosc", "crc32c"])
            or order != "little"
            or about["chunk_key_encoding"] != key_encoding(self._separator)
        ):
            raise ValueError("its metadata is not that of a trace")
        # bfloat16 is stored as its bits
        types = [spec.dtype, *(["uint16"] if spec.name in KINDS else [])]
        if about["data_type"] not in types:
            raise ValueError("it is of another type than traces hold")
        if tuple(shape[1:]) != spec.shape:
            raise ValueError("it does not fit the parameter layout")
        # a chunk is decoded whole, so that the size that a file claims for it must be bounded
        if math.prod(grid) > max(CHUNK, spec.rows * math.prod(spec.chunk)):
            raise ValueError("its chunks are larger than any that are written")
        self.shape: tuple[int, ...] = tuple(shape)
        self.chunk: tuple[int, ...] = tuple(grid)
        self.dtype: str = about["data_type"]
        self._blosc = "blosc" in codecs
        self._indices: dict[tuple[int, ...], tuple[tuple[int, ...], NDArray[np.int64]]] = {}
        self.names = [str(n) for n in about["attributes"].get("names", ())]

    # opened when it is first read, since zarr takes milliseconds for it
    @cached_property
    def zarr(self) -> zarr.Array[Any]:
        """Return the array as zarr opens it."""
        import zarr

        return zarr.open_array(self._folder, mode="r", zarr_format=3)

    @contextmanager
    def _opened(self, key: Sequence[int]) -> Iterator[tuple[BinaryIO, int] | None]:
        """Open the file that a chunk is in, at the chunk; give it and the chunk's bytes, or None if it is not there."""
        first, *rest = key
        place = (first // self._pack, *rest) if self._pack else tuple(key)
        file = self._folder / chunk_name(place, self._separator)
        real = os.path.realpath(file)
        if real != str(file) and not Path(real).is_relative_to(os.path.realpath(self._root)):
            raise ValueError("a chunk is a link that leads out of the trace")
        try:
            status = file.stat()
        except FileNotFoundError:
            yield None
            return
        # before it is opened: a pipe would block
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("a chunk is not a regular file")
        with file.open("rb") as stream:
            if not self._pack:
                yield stream, status.st_size
                return
            begin, length = self._index(place, stream)[first % self._pack].tolist()
            stream.seek(max(begin, 0))
            yield None if begin < 0 else (stream, length)

    def _index(self, place: tuple[int, ...], stream: BinaryIO) -> NDArray[np.int64]:
        """Return the index of a pack, which is read once."""
        status = os.fstat(stream.fileno())
        # a writer that continues the trace puts another file in its place
        version = status.st_ino, status.st_size, status.st_mtime_ns
        if place not in self._indices or self._indices[place][0] != version:
            self._indices[place] = version, read_index(stream, self._pack)
        return self._indices[place][1]

    def _check_size(self, stream: BinaryIO, length: int) -> None:
        """Refuse a chunk of another size than this array's, once decoded: that could take any memory."""
        size = math.prod(self.chunk) * np.dtype(self.dtype).itemsize
        if self._blosc:
            # bytes 4 to 7 of Blosc's header are the length after decoding; they are read again with the rest
            start = stream.tell()
            claimed = int.from_bytes(stream.read(min(length, 8))[4:], "little")
            stream.seek(start)
        else:
            claimed = length - CHECKSUM
        if claimed != size:
            raise ValueError(f"a chunk holds {claimed} bytes, not {size}")

    def holds(self, *key: int) -> bool:
        """Tell whether a chunk is there.

        Parameters
        ----------
        *key : int
            Indices of the chunk.

        Returns
        -------
        bool
            False if there is no such file, and it is in no pack.

        Raises
        ------
        ValueError
            If it is no file, or its size is not that of a chunk of this array, or its pack is damaged.
        """
        with self._opened(key) as chunk:
            if chunk is not None:
                self._check_size(*chunk)
            return chunk is not None

    def read_chunk(self, *key: int) -> NDArray[Any] | None:
        """Return the values of a chunk, without zarr, which takes milliseconds for it.

        Parameters
        ----------
        *key : int
            Indices of the chunk.

        Returns
        -------
        ndarray of the chunk's shape, or None
            Its values; None if it is not there.

        Raises
        ------
        ValueError
            As :meth:`holds` does, and if its checksum is wrong.
        """
        from google_crc32c import value as crc32c

        with self._opened(key) as chunk:
            if chunk is None:
                return None
            self._check_size(*chunk)
            stream, length = chunk
            data = stream.read(length)
        values, checksum = data[:-CHECKSUM], data[-CHECKSUM:]
        if crc32c(values) != int.from_bytes(checksum, "little"):
            raise ValueError("a chunk's checksum is wrong")
        if self._blosc:
            # imported here: only sketches and compressed gradients need it
            from numcodecs import Blosc  # type: ignore[import-untyped]

            values = Blosc().decode(values)
        return np.frombuffer(values, np.dtype(self.dtype).newbyteorder("<")).reshape(self.chunk)

    def chunk_rows(self, chunk: int) -> NDArray[Any]:
        """Return the rows of a chunk that holds whole rows, and is there (:meth:`holds`).

        Parameters
        ----------
        chunk : int
            Index of the chunk.

        Returns
        -------
        ndarray, shape (rows, …)
            Their values.

        Raises
        ------
        ValueError
            If it is damaged.
        """
        # the last chunk has its full length on the disk, and rows beyond the array
        low, high = chunk * self.chunk[0], min((chunk + 1) * self.chunk[0], self.shape[0])
        # arrays without layers have no chunks
        if self.chunk[1:] != self.shape[1:]:
            return np.asarray(self.zarr[low:high])
        values = self.read_chunk(chunk, *[0] * (len(self.shape) - 1))
        if values is None:
            raise ValueError("a chunk is missing")
        return values[: high - low]

    def chunks(self, *key: int) -> set[int]:
        """Return which chunks are there, in bounded time whatever the shape says.

        Parameters
        ----------
        *key : int
            First indices of the chunks; none where they lie in packs.

        Returns
        -------
        set of int
            Indices along the next dimension; all that a damaged pack has room for.
        """
        dotted = self._separator == "."
        try:
            names = os.listdir(
                self._folder if dotted else self._folder.joinpath("c", *map(str, key))
            )
        except OSError:
            return set()
        numbers = {n.split(".")[1] if dotted and n.startswith("c.") else n for n in names}
        # 19 digits may exceed int64, of which indices are
        indices = {int(n) for n in numbers if n.isdecimal() and len(n) < 19}
        if not self._pack:
            return indices
        return {i for place in indices for i in self._in_pack(place)}

    def _in_pack(self, place: int) -> list[int]:
        """Return which chunks are in a pack of whole rows; all that it has room for if it is damaged."""
        first = place * self._pack
        try:
            with self._opened([first, *[0] * (len(self.shape) - 1)]):
                index = self._indices[place, *[0] * (len(self.shape) - 1)][1]
                there = np.flatnonzero(index[:, 0] >= 0)
        # whoever reads the chunks meets the damage
        except (OSError, ValueError, KeyError):
            there = np.arange(min(self._pack, -(-self.shape[0] // self.chunk[0]) - first))
        return (first + there).tolist()

    def holds_beyond(self, chunk: int) -> bool:
        """Tell whether a chunk of step numbers has some beyond the array's length, which its metadata says.

        Parameters
        ----------
        chunk : int
            Index of a chunk.

        Returns
        -------
        bool
            True if steps were committed that the length hides. A writer that has just grown the array hides none.
        """
        # rows within the length, a number in a text: one changed digit of it would hide steps without a sign
        rows = max(self.shape[0] - chunk * self.chunk[0], 0)
        # past the array's length, at which zarr cuts the chunk
        if rows >= self.chunk[0] or (numbers := self.read_chunk(chunk)) is None:
            return False
        if not (numbers[rows:] >= 0).any():
            return False
        # read again, as a writer may have grown the array since it was opened
        now = read_metadata(self._folder / "zarr.json", self._root)["shape"]
        return bool(now == list(self.shape))


@lru_cache(maxsize=8)  # the ranks of a trace have the same
def _known_specs(layers: int, numel: int, held: int | None) -> Mapping[str, ArraySpec]:
    """Return the arrays that a group can hold, by name."""
    how: dict[str, Any] = {"compression": True, "held": held}
    return array_specs(layers, numel, **how) | array_specs(layers, numel, store="sketches", **how)


# Size: half of its lines are docstrings; its attributes are a rank's arrays, and what of them is in memory.
class RankGroup:
    """The group of one rank.

    Parameters
    ----------
    folder : Path
        The group.
    rank : int
        The rank.
    root : Path
        The trace.
    attributes : mapping
        Attributes of the trace.
    layers : sequence of Layer
        Parameters of the trace.

    Attributes
    ----------
    lost : str
        Why nothing of the group can be read; empty if something can.
    gaps : list of str
        Why step numbers are unknown, for each chunk of them that cannot be read.
    rows : dict of int to int
        Row of every step that is known to be committed, in the order of the rows.
    names : set of str
        Arrays that the group should hold.
    sharded : bool
        Whether the rank holds a part of the gradient.
    shard_ranks : list of int
        Ranks whose shards together are the whole gradient; this one alone if its model was not sharded.
    sizes : list of int
        Elements that the rank holds of each parameter.
    pieces : int64 array, shape (n, 2)
        First element in the flat gradient, and number of elements, of the stretches that the rank holds.
    mates : list of RankGroup
        Groups of :attr:`shard_ranks`, once :meth:`join` has found them; until then this one alone.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        root: Path,
        attributes: Mapping[str, Any],
        layers: Sequence[Layer],
    ) -> None:
        self._folder, self._rank, self._root = folder, rank, root
        self.lost = ""
        self.gaps: list[str] = []
        self.rows: dict[int, int] = {}
        self.names: set[str] = set()
        self._arrays: dict[str, StoredArray] = {}
        self._specs: Mapping[str, ArraySpec] = {}
        self.sharded = False
        self.shard_ranks = [rank]
        self.sizes = [layer.numel for layer in layers]
        self.pieces = np.array([[0, attributes["numel"]]])
        self.mates = [self]
        self._numel: int = attributes["numel"]
        try:
            about = read_metadata(folder / "zarr.json", root)
            if about["node_type"] != "group":
                raise ValueError("it is not a group")
            if about["attributes"]["rank"] != rank:
                raise ValueError(f"it is that of rank {shown(about['attributes']['rank'])}")
            held = self._find_shards(about["attributes"], layers)
            self._specs = _known_specs(len(layers), self._numel, held)
            # by the list in the metadata: a lost array has no folder to be found by
            self.names = {*about["attributes"]["arrays"], "step"}
            if not self._specs.keys() >= self.names:
                raise ValueError("its list of arrays is not that of a trace")
            self._find_steps()
        except TraceError as error:
            self.lost = str(error)
        # whatever one rank's folder holds, the other ranks must stay readable
        except Exception as error:
            self.lost = f"{folder} {unread(error)}"

    def _find_shards(self, about: Mapping[str, Any], layers: Sequence[Layer]) -> int | None:
        """Find what the rank holds of a sharded gradient; return how many elements, or None if it holds all."""
        if "shards" not in about:
            return None
        ranks = about["shard_ranks"]
        if not all(type(r) is int for r in ranks) or self._rank not in ranks:
            raise ValueError("its list of ranks is not that of a trace")
        runs, self.sizes = [], []
        # strict: as many shards as layers, in their order
        for layer, entry in zip(layers, about["shards"], strict=True):
            shard = Shard(entry["name"], tuple(entry["offset"]), tuple(entry["shape"]))
            if shard.name != layer.name:
                raise ValueError("its shards are not those of the parameter layout")
            runs.append(shard.runs(layer.shape))
            self.sizes.append(shard.numel)
        self.sharded, self.shard_ranks = True, list(ranks)
        # an empty array first: concatenate takes no empty list, and a model may have no layers
        self.pieces = np.concatenate([np.empty((0, 2), np.int64), *runs])
        # runs() counts from the parameter's first element
        self.pieces[:, 0] += np.repeat([la.offset for la in layers], [len(r) for r in runs])
        return sum(self.sizes)

    def speaks(self, kind: Kind) -> bool:
        """Tell whether a kind is read under this rank.

        Parameters
        ----------
        kind : Kind
            The kind.

        Returns
        -------
        bool
            False for shards of a gradient that is read under another rank.
        """
        return kind in WHOLE or self.shard_ranks[0] == self._rank

    def holders(self, kind: Kind) -> list[RankGroup]:
        """Return the groups that hold a kind, this one's or its mates'.

        Parameters
        ----------
        kind : Kind
            The kind.

        Returns
        -------
        list of RankGroup
            The groups.
        """
        return [self] if kind in WHOLE else self.mates

    def join(self, groups: Mapping[int, RankGroup]) -> None:
        """Find the groups with the other shards; a step is committed if it is in all of them.

        Parameters
        ----------
        groups : mapping of int to RankGroup
            All groups of the trace, by rank.
        """
        mates = [groups[r] for r in self.shard_ranks if r in groups]
        if len(mates) < len(self.shard_ranks):  # a rank that has not begun, or died before
            self.rows = {}
            return
        lost = next((mate.lost for mate in mates if mate.lost), "")
        # sorted, the pieces must cover the flat gradient: each begins where the one before ends
        pieces = np.concatenate([mate.pieces for mate in mates])
        pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
        ends = np.concatenate([[0], pieces.sum(axis=1)])
        # arrays of whole kinds are of each rank alone, and need not be on all
        shared = {n for n in self.names if n.rpartition("_")[0] not in WHOLE and n not in WHOLE}
        if lost:
            self.lost = lost
        elif (
            not np.array_equal(ends[:-1], pieces[:, 0])
            or ends[-1] != self._numel
            or any(mate.shard_ranks != self.shard_ranks for mate in mates)
            or not all(mate.names >= shared for mate in mates)
        ):
            self.lost = (
                f"{self._folder} is damaged: the shards of its ranks are not a whole gradient"
            )
        else:
            self.mates = mates
            # a step whose number one rank has lost may be committed on all
            self.gaps = [gap for mate in mates for gap in mate.gaps]
            common = set.intersection(*(set(mate.rows) for mate in mates))
            # in the order of this rank's rows, which is that of the steps
            self.rows = {step: row for step, row in self.rows.items() if step in common}

    def damaged(self, name: str, why: object, where: str = "") -> TraceError:
        """Return the error about one array.

        Parameters
        ----------
        name : str
            The array.
        why : str or Exception
            What is wrong with it.
        where : str
            In which part of it.

        Returns
        -------
        TraceError
            One line.
        """
        return TraceError(f"{self._root}: {name} of rank {self._rank} {unread(why, where)}")

    def array(self, name: str) -> StoredArray:
        """Return one of the arrays that the group should hold.

        Parameters
        ----------
        name : str
            One of :attr:`names`.

        Returns
        -------
        StoredArray
            The array.

        Raises
        ------
        TraceError
            If it is lost or damaged.
        """
        if name not in self._arrays:
            try:
                array = StoredArray(self._folder / name, self._root, self._specs[name])
            except FileNotFoundError:
                raise self.damaged(name, "it is lost") from None
            except KeyError as error:
                raise self.damaged(name, f"its metadata lacks {error}") from None
            except Exception as error:
                raise self.damaged(name, error) from error
            self._arrays[name] = array
        return self._arrays[name]

    def _find_steps(self) -> None:
        """Find the committed rows, chunk by chunk, and note the chunks that cannot be read."""
        steps = self.array("step")
        size = steps.chunk[0]
        expected = steps.chunks()
        # a lost chunk of steps shows in chunks of other columns that cover the same rows
        for name in self.scalar_names():
            try:  # the chunk of `step` is the first file of its rows
                other = self.array(name)
                expected |= {i * other.chunk[0] // size for i in other.chunks()}
            except TraceError:
                continue  # an error for those who ask for that column
        for i in sorted(expected):
            low, high = i * size, min((i + 1) * size, steps.shape[0])
            try:
                # checked first: where the length is too small, `high` may fall below `low`
                if steps.holds_beyond(i):
                    raise ValueError(f"there are steps beyond its length, {steps.shape[0]}")
                if high <= low:
                    continue
                if not steps.holds(i):
                    raise ValueError("a chunk is missing")
                numbers = steps.chunk_rows(i).tolist()
            except Exception as error:
                rows = f"rows {low} to {max(high - 1, low)}: "
                self.gaps.append(str(self.damaged("step", error, rows)))
                continue
            # -1: not committed, or removed
            self.rows |= {s: low + row for row, s in enumerate(numbers) if s >= 0}

    def column(self, name: str, rows: Sequence[int] | None = None) -> NDArray[Any]:
        """Return rows of an array that holds many rows in a chunk.

        Parameters
        ----------
        name : str
            One of :attr:`names`.
        rows : sequence of int, optional
            Ascending rows; all that are committed by default.

        Returns
        -------
        ndarray, shape (rows, …)
            Their values.

        Raises
        ------
        TraceError
            If one of them is damaged.
        """
        array = self.array(name)
        # dictionaries keep their order: rows ascend
        wanted = np.array(list(self.rows.values()) if rows is None else rows, np.int64)
        values = np.empty((wanted.size, *array.shape[1:]), array.dtype)
        size = array.chunk[0]
        order = np.argsort(wanted // size, kind="stable")
        chunks, firsts = np.unique(wanted[order] // size, return_index=True)
        for i, places in zip(chunks.tolist(), np.split(order, firsts[1:]), strict=False):
            try:
                there = array.holds(i, *[0] * (len(array.chunk) - 1))
                # arrays without layers have no chunk files
                if values[places].size and not there:
                    raise ValueError("a chunk is missing")
                values[places] = array.chunk_rows(i)[wanted[places] - i * size]
            except Exception as error:
                # for the error: users know steps, not rows
                numbers = [s for s, row in self.rows.items() if row // size == i]
                where = f"steps {min(numbers)} to {max(numbers)}: "
                raise self.damaged(name, error, where) from error
        return values

    def joined(self, name: str) -> NDArray[Any]:
        """Return the committed rows of a column, of the whole gradient where the ranks of its shards have one each.

        Parameters
        ----------
        name : str
            One of :attr:`names`.

        Returns
        -------
        ndarray, shape (rows, …)
            As the :class:`~gradstats.trace.columns.Column` says; NaN where the ranks' values do not make one.

        Raises
        ------
        TraceError
            If one of them is damaged.
        """
        one = _SCALARS.get(name)
        if (name in _TABLES or (one and one.of_compressor)) and self.shard_ranks[0] != self._rank:
            # of some shards alone: the whole is read under another rank
            return np.full_like(self.column(name), one.fill if one else np.nan)
        # there is one rank, or every rank has the whole's number already
        if len(self.mates) == 1 or not (name in _TABLES or (one and one.joined)):
            return self.column(name)
        parts: NDArray[Any] = np.stack(
            # a step may lie in another row of each rank's group
            [m.column(name, [m.rows[s] for s in self.rows]) for m in self.mates]
        )
        if one and one.joined:
            return one.joined(parts)
        known = _TABLES[name]
        # a column whose way to join is not known is unknown in the whole
        joins = [known[n].joined if n in known else None for n in self.array(name).names]
        whole = [
            parts[0, ..., i] * np.nan if j is None else j(parts[..., i])
            for i, j in enumerate(joins)
        ]
        return np.stack(whole, axis=-1)

    def scalar_names(self) -> list[str]:
        """Return the names of the arrays that hold one number a step.

        Returns
        -------
        list of str
            Names, in the order in which they are written.
        """
        return [n for n, s in self._specs.items() if not s.shape and n in self.names]

    def scalars(self) -> Mapping[str, NDArray[Any]]:
        """Return the arrays that hold one number a step, each read when it is looked up.

        Returns
        -------
        mapping of str to ndarray, shape (steps,)
            Committed rows by name.
        """
        return _Scalars(self)


class _Scalars(Mapping[str, NDArray[Any]]):
    """Columns that are read when they are looked up, so that a damaged one does not hide the others."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self._names = group, group.scalar_names()
        self._read: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._read:
            self._read[name] = self._group.joined(name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
