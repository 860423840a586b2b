"""What people have: a folder of a dump per step, lists in a file, sharded checkpoints, checkpoints of torch's DCP.

All of it is read one gradient at a time.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from gradstats.errors import GradstatsError, InputError, first_line
from gradstats.primitives import Array
from gradstats.trace import Kind, Layer, is_trace
from gradstats.trace.files import (
    NESTED,
    READ,
    Contents,
    dictionary_of,
    file_and_key,
    gradients_of,
    load_torch,
    read_file,
    some,
    suffix_of,
)
from gradstats.trace.source import ArraySource, Captured, Source

__all__ = ["Dumps", "Lists", "dumps_of", "holds_dumps"]

_NUMBER = re.compile(r"\d+")
_RANK = re.compile(r"rank[_.-]?(\d+)", re.IGNORECASE)
_INDEX = "*.safetensors.index.json"

Lists: TypeAlias = Literal["steps", "layers"]


@dataclass(frozen=True, slots=True)
class _Dump:
    """One gradient on the disk.

    Attributes
    ----------
    path : Path
        Where it lies.
    key : (int, int)
        Rank and step.
    read : callable
        Returns its arrays.
    """

    path: Path
    key: tuple[int, int]
    read: Callable[[], Contents]


class Dumps(Source):
    """Gradients that lie in files of their own, all of the same layers; each is read when it is asked for.

    Parameters
    ----------
    dumps : sequence of _Dump
        The gradients.
    name : str
        Name of the source in tables.
    kind : Kind
        What they are.

    Raises
    ------
    InputError
        If two have the same rank and step.
    """

    def __init__(self, dumps: Sequence[_Dump], name: str, kind: Kind = "gradient") -> None:
        self.name, self._kind = name, kind
        self._dumps: dict[tuple[int, int], _Dump] = {}
        # entries() promises ascending steps, and names sort step_10 before step_2
        for dump in sorted(dumps, key=lambda d: d.key):
            if dump.key in self._dumps:
                rank, step = dump.key
                other = self._dumps[dump.key].path.name
                raise InputError(
                    f"{other} and {dump.path.name} are both step {step} of rank {rank}: say where the numbers are, as "
                    "--step-from-name 'grad_{step}_rank{rank}.pt' of gradstats import"
                )
            self._dumps[dump.key] = dump
        # the last gradient read is kept: elements() is asked for it piece by piece
        self._last: tuple[tuple[int, int] | None, ArraySource | None] = None, None
        first = next(iter(self._dumps))
        # the first dump has the layers that all others must have
        opened = self._open(first)
        self.layers: list[Layer] = opened.layers
        self.remark = opened.remark

    def __getstate__(self) -> dict[str, Any]:
        # a worker of a cluster reads for itself
        return vars(self) | {"_last": (None, None)}

    def entries(self) -> list[tuple[int, Kind, int]]:
        """Return (rank, kind, step) of every dump."""
        return [(rank, self._kind, step) for rank, step in self._dumps]

    def read(self, rank: int, kind: Kind, step: int) -> Captured:  # numpydoc ignore=PR01
        """Read one dump."""
        source = self._open((rank, step))
        # the dump's own source holds a single gradient, under default labels
        return Captured(self.name, step, rank, kind, source.read(0, "gradient", 0).values)

    def elements(
        self, rank: int, kind: Kind, step: int, start: int, stop: int
    ) -> Array:  # numpydoc ignore=PR01
        """Return some elements of one dump, which is read whole."""
        return self.read(rank, kind, step).values[start:stop]

    def _open(self, key: tuple[int, int]) -> ArraySource:
        """Read a dump, unless it was the last, and check that its layers are those of the first."""
        # once: another thread may read another dump meanwhile
        last, source = self._last
        if last == key and source is not None:
            return source
        dump = self._dumps[key]
        self._last = None, None  # one at a time
        held = dump.read()
        try:
            source = ArraySource(held.arrays, self.name, remark=held.remark)
        except InputError as error:
            raise InputError(f"{dump.path}: {error}") from None
        # not of the first dump: the layers are taken from it
        if hasattr(self, "layers") and source.layers != self.layers:
            # names and shapes without offsets: where only the order differs, nothing is left over
            other = {(la.name, la.shape) for la in source.layers} ^ {
                (la.name, la.shape) for la in self.layers
            }
            raise InputError(
                f"{dump.path} has other layers than {next(iter(self._dumps.values())).path}, such as "
                f"{some(name for name, _ in other) or 'another order'}: import them apart"
            )
        self._last = key, source
        return source


def dumps_of(
    paths: Sequence[Path], pattern: str | None = None, lists: Lists | None = None
) -> list[_Dump]:
    """Return the gradients that files and folders hold.

    Parameters
    ----------
    paths : sequence of Path
        Gradient files, indices of shards, checkpoints of DCP, and folders of any of these; behind a colon, the
        dictionary that is meant in each: ``folder:model``.
    pattern : str, optional
        Where the numbers are in a name: ``grad_{step}_rank{rank}.pt``.
    lists : {"steps", "layers"}, optional
        What the tensors of a list are.

    Raises
    ------
    InputError
        If there is none, a name does not fit the pattern, or the numbers could be meant in two ways.
    """
    places = [(place, key) for path, key in map(file_and_key, paths) for place in _places(path)]
    if not places:
        raise InputError(f"nothing to import in {', '.join(map(str, paths))}")
    # a list numbers its own steps from 0, so that two of them would collide
    listed = [_from_list(*p, lists) for p in places] if len(places) == 1 else [None]
    if listed[0] is not None:
        return listed[0]
    numbers = _numbers([place.name for place, _ in places], pattern)
    return [
        # bound now, as the loop goes on
        _Dump(place, number, lambda place=place, key=key: _contents(place, key))  # type: ignore[misc]
        for (place, key), number in zip(places, numbers, strict=True)
    ]


def _places(path: Path) -> list[Path]:
    """Return what a path holds that is one gradient each."""
    if not path.exists():
        raise InputError(f"no such file or folder: {path}")
    if is_trace(path):
        raise InputError(f"{path} is a trace already")
    if path.is_file():
        if suffix_of(path) not in READ:
            raise InputError(f"{path}: none of {', '.join(READ)}")
        return [path]
    if _is_checkpoint(path):
        return [path]
    inside = sorted(path.iterdir(), key=lambda p: p.name)
    files = [p for p in inside if p.is_file() and suffix_of(p) in READ]
    return files + [p for p in inside if p.is_dir() and not is_trace(p) and _is_checkpoint(p)]


def holds_dumps(folder: Path) -> bool:
    """Tell whether a folder that is no trace holds something to read.

    Parameters
    ----------
    folder : Path
        The folder.
    """
    return bool(_places(folder))


def _is_checkpoint(folder: Path) -> bool:
    """Tell whether a folder is one checkpoint: of DCP, or in shards."""
    return (folder / ".metadata").is_file() or any(folder.glob(_INDEX))


def _contents(place: Path, key: str) -> Contents:
    if (place / ".metadata").is_file():
        return _load_dcp(place, key)
    if key and suffix_of(place) not in NESTED:
        raise InputError(f"{place} holds no dictionaries: leave out :{key}")
    if place.is_file():
        return read_file(place, key)
    indices = sorted(place.glob(_INDEX))
    if len(indices) > 1:
        raise InputError(f"{place} has several indices of shards: {some(p.name for p in indices)}")
    return read_file(indices[0])


def _numbers(names: Sequence[str], pattern: str | None) -> list[tuple[int, int]]:
    """Return rank and step by the names, which must leave no doubt."""
    if pattern is not None:
        return [_by_pattern(name, pattern) for name in names]
    keys = []
    for name in names:
        rank = _RANK.search(name)
        # the number of a rank is no number of a step
        left = _RANK.sub("", name)
        # without the ending, which may have a digit; names of folders have none
        numbers = _NUMBER.findall(left.rpartition(".")[0] or left)
        if len(numbers) != 1 and len(names) == 1:
            return [(0, 0)]
        if len(numbers) != 1:
            raise InputError(
                f"{name} has {'several numbers' if numbers else 'no number'}: say which is the step, as gradstats "
                "import … --step-from-name 'grad_{step}_rank{rank}.pt' does"
            )
        keys.append((int(rank[1]) if rank else 0, int(numbers[0])))
    return keys


def _by_pattern(name: str, pattern: str) -> tuple[int, int]:
    """Return rank and step of a name by a pattern with ``{step}`` and, perhaps, ``{rank}``; ``*`` is any text."""
    if pattern.count("{step}") != 1 or pattern.count("{rank}") > 1:
        raise InputError(
            f"the pattern {pattern!r} must have {{step}} once, and may have {{rank}}: grad_{{step}}.pt"
        )
    # re.escape has put a backslash before the star and the braces
    text = re.escape(pattern).replace(r"\*", ".*?")
    for word in ("step", "rank"):
        text = text.replace(re.escape("{" + word + "}"), rf"(?P<{word}>\d+)")
    match = re.search(text, name)
    if match is None:
        raise InputError(f"{name} does not fit the pattern {pattern}")
    groups = match.groupdict()
    # a pattern without {rank} is of rank 0
    return int(groups.get("rank") or 0), int(groups["step"])


def _from_list(path: Path, key: str, lists: Lists | None) -> list[_Dump] | None:
    """Return the gradients of a file that holds a list; None if it holds none."""
    if not path.is_file() or suffix_of(path) not in (".pt", ".pth"):
        return None
    import torch

    try:
        # mapped, as a list of steps may be larger than the memory
        loaded = load_torch(path, mmap=True)
    except InputError:
        raise
    except Exception:  # an old format cannot be mapped; an error in it is said where it is read
        try:
            loaded = load_torch(path)
        except Exception as error:
            raise InputError(f"cannot read {path}: {first_line(error)}") from None
    if not isinstance(loaded, list | tuple) or not loaded:
        return None
    tensors = [isinstance(each, torch.Tensor) for each in loaded]
    if all(tensors):
        # tensors of different shapes must be layers; those of one shape may be either
        if lists is None and len({tuple(each.shape) for each in loaded}) == 1 < len(loaded):
            raise InputError(
                f"{path} holds {len(loaded)} tensors of one shape, which may be steps or layers: add --list steps or "
                "--list layers"
            )
        if lists != "steps":
            return [_Dump(path, (0, 0), lambda: _of_step(path, key, loaded))]
    elif any(tensors):
        raise InputError(f"{path} holds a list of tensors and of other things: save one of these")
    return [
        _Dump(path, (0, step), lambda each=each: _of_step(path, key, each))  # type: ignore[misc]
        for step, each in enumerate(loaded)
    ]


def _of_step(path: Path, key: str, step: Any) -> Contents:
    """Return what one step of a list holds, as of a file of its own."""
    if isinstance(step, list | tuple):
        step = {str(i): value for i, value in enumerate(step)}
    _, tensors, left_out = dictionary_of(path, step, key)
    return gradients_of(path, key, tensors, {}, left_out)


class _Unpickler(pickle.Unpickler):
    """Reads the index of a DCP checkpoint, which is a pickle: of its own classes, and nothing that runs code."""

    _MODULE: ClassVar = "torch.distributed.checkpoint.metadata"
    _OTHERS: ClassVar = {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        # what the pickle of an index needs beside its own classes: sizes, dtypes, layouts, paths
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the index.

        Parameters
        ----------
        module, name : str
            Where it is.
        """
        import torch

        if module == "pathlib._local":  # so in indices written with Python 3.13
            module = "pathlib"
        kind = getattr(torch, name, None) if module == "torch" else None
        member = getattr(import_module(module), name, None) if module == self._MODULE else None
        # not what it has imported
        is_index_class = isinstance(member, type) and member.__module__ == module
        if is_index_class or (module, name) in self._OTHERS or isinstance(kind, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no index needs")


def _load_dcp(folder: Path, key: str) -> Contents:
    """Read the tensors of a DCP checkpoint, without a process group."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.state_dict_loader import load

    # DCP would unpickle the index itself, with any class in it
    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **options: Any) -> Metadata:
            return about

    try:
        data = (folder / ".metadata").read_bytes()
        index = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(index, Metadata):
            raise InputError(f"{folder} is no checkpoint of DCP: its index is another thing")
        about: Metadata = index
        # DCP joins these names to the folder: none may lead out of it
        for place in (index.storage_data or {}).values():
            name = place.relative_path
            if Path(name).name != name or (folder / name).is_symlink():
                raise InputError(f"{folder}: its index names a file that is not in it")
        outer, tensors, left_out = dictionary_of(folder, _state_of(folder, index), key)
        # no_dist: within a process group DCP would wait for the other ranks
        with warnings.catch_warnings():
            # torch warns of no_dist even where it was asked for
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled, unavailable or", UserWarning
            )
            load(
                {f"{outer}.{n}" if outer else n: tensor for n, tensor in tensors.items()},
                storage_reader=Reader(folder),
                no_dist=True,
            )
    except GradstatsError:
        raise
    except CheckpointException as problem:  # which is no Exception
        cause = next((each[0] for each in problem.failures.values()), problem)
        raise InputError(f"cannot read {folder}: {first_line(cause)}") from None
    except Exception as error:
        raise InputError(f"cannot read {folder}: {first_line(error)}") from None
    return gradients_of(folder, key, tensors, {}, left_out)


def _state_of(folder: Path, index: Any) -> dict[str, Any]:
    """Return the state dict of a DCP checkpoint, its tensors not yet read; ``...`` is what is no tensor."""
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    items = index.state_dict_metadata.items()
    asked = [
        math.prod(m.size) * m.properties.dtype.itemsize
        for _, m in items
        if isinstance(m, TensorStorageMetadata)
    ]
    # the index is not trusted: nothing larger than the files on the disk may be allocated
    held = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    # a negative size would offset another tensor's in the sum
    if min(asked, default=0) < 0 or sum(asked) > held:
        raise InputError(f"{folder}: its index says more than its files hold")
    # the keys that DCP has joined to a name, which may have dots of their own
    paths = index.planner_data if isinstance(index.planner_data, dict) else {}
    state: dict[str, Any] = {}
    for name, m in items:
        path = paths.get(name)
        # another program's planner may keep something else there
        if not isinstance(path, tuple) or ".".join(map(str, path)) != name:
            path = (name,)
        inner = state
        for key, below in pairwise(path):
            # a number is a place in a list, of which torch.save's files are not read either
            if isinstance(below, int):
                inner[key] = []
                break
            inner = inner.setdefault(key, {})
        else:
            # DCP reads into tensors that exist, and asks for what they are
            is_tensor = isinstance(m, TensorStorageMetadata)
            inner[path[-1]] = torch.empty(m.size, dtype=m.properties.dtype) if is_tensor else ...
    return state
