"""Gradient files: what is in them, by name, and what of it is no gradient.

``.npy``, ``.npz``, ``.safetensors`` (alone, or sharded with an index) and ``.pt``/``.pth``. Nothing is unpickled.
Whatever is left out is said, and what could be meant in two ways is asked.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradstats.errors import GradstatsError, InputError, first_line, unknown
from gradstats.primitives import Array
from gradstats.primitives.arrays import numel_of

__all__ = [
    "NESTED",
    "READ",
    "SUFFIXES",
    "Contents",
    "dictionary_of",
    "file_and_key",
    "gradients_of",
    "load_torch",
    "read_file",
    "some",
    "suffix_of",
]

NESTED = (".pt", ".pth")
SUFFIXES = (".npy", ".npz", ".safetensors", *NESTED)
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names of batch norm's statistics, which a ``state_dict`` has beside the parameters."""
_INDEX = ".safetensors.index.json"
READ = (*SUFFIXES, _INDEX)
"""Endings of what is read: gradient files, and the index of sharded ones."""
_LARGEST_INDEX = 1 << 26
_INFLATED = 1 << 30
"""Bytes that a file may always ask for; beyond, no more than 50 times what it holds of a member or tensor."""
_RATIO = 50


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds.

    Attributes
    ----------
    arrays : dict of str to array
        Arrays by layer, in the file's order.
    about : mapping of str to str
        Metadata of the file.
    remark : str
        What was left out, in a sentence; empty if nothing was.
    """

    arrays: dict[str, Array]
    about: Mapping[str, str]
    remark: str = ""


def suffix_of(path: Path) -> str:
    """Return the ending of a file's name in small letters; that of an index of shards is the whole of it.

    Parameters
    ----------
    path : Path
        The file.
    """
    return _INDEX if path.name.endswith(_INDEX) else path.suffix.lower()


def file_and_key(path: Path) -> tuple[Path, str]:
    """Split ``checkpoint.pt:model`` or ``folder:model`` into the place and the name of what in it is meant.

    Parameters
    ----------
    path : Path
        What the user gave.
    """
    place, _, key = str(path).rpartition(":")
    # what has a colon in its own name is meant as it is
    if not place or path.exists():
        return path, ""
    named = suffix_of(Path(place)) in NESTED or Path(place).is_dir()
    return (Path(place), key) if named else (path, "")


def some(values: Iterable[Any]) -> str:
    """Return the first few of some values, in order, as a list in words.

    Parameters
    ----------
    values : iterable
        Values that can be ordered.
    """
    distinct = sorted(set(values))
    return ", ".join(map(str, distinct[:8])) + (", …" if len(distinct) > 8 else "")


def read_file(path: Path, key: str = "") -> Contents:
    """Read a gradient file.

    Parameters
    ----------
    path : Path
        The file.
    key : str
        Name of the dictionary in it that is meant; ``.`` is the outermost.

    Returns
    -------
    Contents
        Its arrays, without those that can be no gradient.

    Raises
    ------
    InputError
        If it cannot be read, or it could be meant in two ways.
    """
    try:
        if not path.is_file():
            raise InputError(f"no such file: {path}")
    # a name too long, or a folder that may not be searched
    except OSError as error:
        raise InputError(f"cannot open {first_line(error)[:200]}") from None
    try:
        arrays, about, left_out = _load(path, key)
    except GradstatsError:
        raise
    except Exception as error:  # each format has its own errors for a damaged file
        raise InputError(f"cannot read {path}: {first_line(error)}") from None
    return gradients_of(path, key, arrays, about, left_out)


def gradients_of(
    path: Path,
    key: str,
    arrays: dict[str, Any],
    about: Mapping[str, str],
    left_out: list[str],
) -> Contents:
    """Return the arrays that can be a gradient, by their plain names.

    Parameters
    ----------
    path : Path
        Where they lie, for errors and the remark.
    key : str
        Name of the dictionary in it, or empty.
    arrays : dict of str to array
        All arrays.
    about : mapping of str to str
        Metadata of the file.
    left_out : list of str
        What is no array, for the remark.

    Returns
    -------
    Contents
        The arrays, and a remark on what was left out.

    Raises
    ------
    InputError
        If there are no elements, two names are one layer's, or the numbers are quantised.
    """
    empty = [name for name, array in arrays.items() if not numel_of(array)]
    arrays = {name: array for name, array in arrays.items() if name not in empty}
    if not arrays:
        raise InputError(f"{path} holds no elements")
    # save_safetensors lists its layers, of which one may be a single number
    ours = set(_order(about))
    why = {name: _no_gradient(name, array, name in ours) for name, array in arrays.items()}
    gradients = {name: array for name, array in arrays.items() if not why[name]}
    # a lone scalar, or whole numbers whose own error says what is wrong with them
    if not gradients:
        gradients, why = arrays, dict.fromkeys(arrays, "")
    _check_quantised(path, arrays, gradients)
    # what every model has is listed without a reason
    left_out += [f"{n}{'' if _is_known(n, arrays[n]) else f' ({why[n]})'}" for n in why if why[n]]
    left_out += [f"{name} (empty)" for name in empty]
    plain = {name: _plain_name(name) for name in gradients}
    if twice := [name for name, n in Counter(plain.values()).items() if n > 1]:
        both = [name for name, short in plain.items() if short == twice[0]]
        raise InputError(f"{path} holds {' and '.join(both)}, which are one layer: rename one")
    label = f"{path.name}:{key}" if key else path.name
    remark = f"left out of {label}, as no gradients: {some(left_out)}" if left_out else ""
    return Contents({plain[name]: array for name, array in gradients.items()}, about, remark)


def _check_quantised(path: Path, arrays: Mapping[str, Any], gradients: Mapping[str, Any]) -> None:
    """Refuse a file whose numbers are whole ones that other arrays scale."""
    whole = {
        n: numel_of(a) for n, a in arrays.items() if n not in gradients and "int" in str(a.dtype)
    }
    if sum(whole.values()) > sum(map(numel_of, gradients.values())):
        first = max(whole, key=whole.__getitem__)
        raise InputError(
            f"{path} holds more whole numbers ({first}: {arrays[first].dtype}) than others ({some(gradients)}), which "
            "may be their scales: save what they stand for, in floating point"
        )


def _is_known(name: str, array: Any) -> bool:
    """Tell whether a tensor is what models keep beside parameters: batch norm's statistics, whole numbers."""
    # by the types' names, which NumPy and torch have in common
    whole = any(kind in str(array.dtype) for kind in ("int", "bool"))
    return whole or name.rpartition(".")[2] in _BUFFERS


def _no_gradient(name: str, array: Any, ours: bool) -> str:
    """Return why a tensor can be no gradient, beside what is known not to be: a loss beside tensors."""
    if _is_known(name, array):
        return "a buffer"
    return "a single number" if not ours and np.ndim(array) == 0 else ""


def _plain_name(name: str) -> str:
    """Return a parameter's name without what torch.compile and DDP put into it."""
    # compile's part first: DDP's prefix may stand before or behind it
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _order(about: Mapping[str, str]) -> list[str]:
    """Return the order of layers that :func:`gradstats.save_safetensors` wrote; none of another program's entry."""
    try:
        order = json.loads(about.get("layers", "[]"))
    # json.loads raises RecursionError for text that is nested too deeply
    except (ValueError, RecursionError):
        return []
    return [n for n in order if isinstance(n, str)] if isinstance(order, list) else []


def _load(path: Path, key: str) -> tuple[dict[str, Any], Mapping[str, str], list[str]]:
    """Return a file's arrays, its metadata, and what of it is no array."""
    suffix = suffix_of(path)
    if suffix == ".npy":
        # np.load would take any other file for a pickle, and advise to open it
        return {"gradient": np.lib.format.open_memmap(path, mode="r")}, {}, []
    if suffix == ".npz":
        return _load_npz(path)
    if suffix == _INDEX:
        return _load_shards(path)
    if suffix == ".safetensors":
        arrays, about = _load_safetensors(path)
        return arrays, about, []
    arrays, left_out = _load_torch(path, key)
    return arrays, {}, left_out


def _load_npz(path: Path) -> tuple[dict[str, Any], Mapping[str, str], list[str]]:
    # np.load leaves a file that it cannot read open; `with` closes it
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        # np.load would silently return one of two members of the same name
        members = archive.zip.infolist()
        names = [m.filename.removesuffix(".npy") for m in members]
        if twice := [n for n, count in Counter(names).items() if count > 1]:
            raise InputError(f"{path} holds two arrays named {twice[0]}: rename one")
        # by the sizes in the archive's directory, before anything is unpacked
        _check_packed(path, members)
        loaded = {name: archive[name] for name in archive.files}
    # np.load returns a member that is no .npy file as bytes
    arrays = {n: a for n, a in loaded.items() if isinstance(a, np.ndarray)}
    return arrays, {}, [f"{n} (no array)" for n in loaded if n not in arrays]


def _check_packed(path: Path, members: Iterable[zipfile.ZipInfo]) -> None:
    """Refuse an archive that is small and unpacks to much."""
    total = 0
    for member in members:
        total += member.file_size
        small = member.compress_size * _RATIO
        packed = member.compress_type != zipfile.ZIP_STORED
        # the running total decides, since many small members add up; a stored member is as large as in the file
        if packed and total > _INFLATED and member.file_size > small:
            raise InputError(
                f"{path}: {member.filename} unpacks {member.compress_size:,} bytes to {member.file_size:,}; save it "
                "uncompressed, with np.savez or torch.save, or as .npy"
            )


def _check_expanded(path: Path, tensors: Mapping[str, Any]) -> None:
    """Refuse tensors that repeat the few elements which a file holds, as ``expand`` does, into very many."""
    import torch

    total = 0
    for name, tensor in tensors.items():
        # expand makes strided tensors; others do not have one storage
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            continue
        if tensor.is_nested or tensor.device.type == "meta":
            continue  # refused later, with a reason of its own
        # the file holds the storage; a stride of 0 repeats it without taking room
        whole, held = tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()
        total += whole
        if total > _INFLATED and whole > held * _RATIO:
            raise InputError(
                f"{path}: {name} repeats {held:,} bytes to {whole:,}; save the tensor's contiguous()"
            )


def load_torch(path: Path, *, mmap: bool = False) -> Any:
    """Return what a file of ``torch.save`` holds, of tensors and plain values alone; nothing in it is run.

    Parameters
    ----------
    path : Path
        The file.
    mmap : bool
        Whether tensors are read when they are used.

    Raises
    ------
    InputError
        If it is small and unpacks to much.
    """
    import torch

    # the format before torch 1.6 is no archive, and compresses nothing
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            _check_packed(path, archive.infolist())
    # to the CPU, as a tensor may come from a GPU that is not here
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _load_safetensors(path: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    from safetensors import safe_open

    # as tensors of torch, since NumPy has no bfloat16
    with safe_open(path, "pt") as archive:
        about = archive.metadata() or {}
        held = dict.fromkeys(archive.keys())
        order = [n for n in _order(about) if n in held]  # the file itself sorts them
        names = dict.fromkeys([*order, *held])
        return {name: archive.get_tensor(name) for name in names}, about


def _load_shards(path: Path) -> tuple[dict[str, Any], Mapping[str, str], list[str]]:
    """Read the shards that an index names, which lie beside it."""
    from safetensors import safe_open

    if path.stat().st_size > _LARGEST_INDEX:
        raise InputError(f"{path} is larger than any index")
    document = json.loads(path.read_text(encoding="utf-8"))
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not places:
        raise InputError(f"{path} is no index of shards: it has no weight_map")
    arrays: dict[str, Any] = {}
    # every shard is opened once, however many tensors it has
    for shard in dict.fromkeys(places.values()):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise InputError(f"{path} names a shard that is not beside it")
        if not (path.parent / shard).is_file():
            raise InputError(f"{path} names {shard}, and there is no such file")
        with safe_open(path.parent / shard, "pt") as archive:
            held = set(archive.keys())
            for name in (n for n, place in places.items() if place == shard):
                if name not in held:
                    raise InputError(f"{path}: {shard} does not hold {name}")
                arrays[name] = archive.get_tensor(name)
    return {name: arrays[name] for name in places}, {}, []


def _load_torch(path: Path, key: str) -> tuple[dict[str, Any], list[str]]:
    loaded = load_torch(path)
    if isinstance(loaded, list | tuple) and loaded:
        raise InputError(
            f"{path} holds a list of {len(loaded)}, of layers or of steps: gradstats import {path} --out NAME.zarr "
            "makes a trace of it"
        )
    _, tensors, left_out = dictionary_of(path, loaded, key)
    return tensors, left_out


def dictionary_of(path: Path, loaded: Any, key: str) -> tuple[str, dict[str, Any], list[str]]:
    """Return the tensors that are meant in what a file holds, which may be dictionaries in a dictionary.

    Parameters
    ----------
    path : Path
        Where it lies, for errors.
    loaded : object
        What it holds.
    key : str
        Name of the dictionary that is meant; ``.`` is the outermost, and an empty key means the only one.

    Returns
    -------
    name : str
        Name of the dictionary; that of the outermost is empty.
    tensors : dict of str to torch.Tensor
        Its tensors.
    left_out : list of str
        What else there is.

    Raises
    ------
    InputError
        If there are none, or several and no key.
    """
    inner = dict(_nested(loaded))
    if key:
        name = "" if key == "." else key
        if name not in inner:
            raise unknown(f"dictionary of tensors in {path}", key, [n or "." for n in inner])
    elif not inner:
        raise InputError(
            f"{path} holds neither a tensor nor a dictionary of tensors; save one of these"
        )
    else:
        name = next(iter(inner))
        # a single one that is no deeper than one level needs no name
        if len(inner) > 1 or (name and name not in loaded):
            offered = ", ".join(
                f"{path}:{name or '.'} ({len(t)} tensor{'s' * (len(t) != 1)})"
                for name, (t, _) in [*inner.items()][:5]
            )
            raise InputError(
                f"{path} holds its tensors in dictionaries; give one of them: {offered}"
            )
        # nobody chose it by a key: what lies beside it is said
        if name:
            inner[name][1].extend(f"{k} ({_what(v)})" for k, v in loaded.items() if k != name)
    tensors, left_out = inner[name]
    _check_expanded(path, tensors)
    return name, tensors, left_out


def _nested(
    loaded: Any, name: str = "", depth: int = 4
) -> Iterator[tuple[str, tuple[dict[str, Any], list[str]]]]:
    """Yield the dictionaries of tensors in what a file holds, and what else is in each; the outermost has no name."""
    import torch

    if isinstance(loaded, torch.Tensor):
        yield name, ({"gradient": loaded}, [])
    elif isinstance(loaded, dict) and depth:
        tensors = {k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)}
        if tensors:
            # the keys 1 and "1" differ in a dictionary, but not as names
            if len({str(k) for k in tensors}) < len(tensors):
                twice = next(n for n, c in Counter(map(str, tensors)).items() if c > 1)
                raise InputError(f"two tensors are named {twice}, as a number and as text")
            others = [f"{k} ({_what(v)})" for k, v in loaded.items() if k not in tensors]
            yield name, ({str(k): v for k, v in tensors.items()}, others)
        # `depth` ends this: a dictionary in a file may hold itself
        for key, value in loaded.items():
            if isinstance(value, dict):
                yield from _nested(value, f"{name}.{key}" if name else str(key), depth - 1)


def _what(value: Any) -> str:
    """Return what something is that is no tensor; of ``...`` only this is known."""
    if value is ...:
        return "no tensor"
    return "None" if value is None else f"a {type(value).__name__}"
