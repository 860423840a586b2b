"""What a rank's entry of a checkpoint says of itself: version, list of contents, checksums; and checks of fields."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from gradstats.errors import GradstatsError, InputError, first_line

__all__ = [
    "VERSION",
    "check_count_of",
    "check_values",
    "field",
    "refusing",
    "seal",
    "tensor_text",
    "unseal",
]

VERSION = 1
"""Version of entries; entries of another one are refused."""

T = TypeVar("T")


def seal(rank: int, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one rank saves, with its list of contents, under a name of its own.

    All ranks' entries then fit into one checkpoint.

    Parameters
    ----------
    rank : int
        Number of the rank.
    content : mapping
        What it saves: tensors, numbers, texts and bytes in dictionaries and lists.

    Returns
    -------
    dict
        For :func:`unseal`.
    """
    sums = json.dumps(dict(_checksums(content))).encode()
    # the list has a checksum of its own: if it is damaged, no entry may be blamed
    contents = f"{zlib.crc32(sums):08x}".encode() + sums
    return {f"rank{rank}": {"version": VERSION, "contents": contents, **content}}


def unseal(rank: int, state: object) -> Mapping[str, Any]:
    """Return what one rank saved, whole and unaltered.

    Parameters
    ----------
    rank : int
        Number of the rank.
    state : mapping
        Entries of any ranks, as :func:`seal` made them.

    Returns
    -------
    mapping
        The content.

    Raises
    ------
    InputError
        If the rank's entry is not among them, is of another version, or is not what was saved.
    """
    if not isinstance(state, Mapping) or f"rank{rank}" not in state:
        has = ", ".join(map(_plain, state)) if isinstance(state, Mapping) else type(state).__name__
        raise InputError(
            f"this is rank {rank}, and the checkpoint holds {has or 'nothing'}: every rank saves and loads its own"
        )
    entry = state[f"rank{rank}"]
    if not isinstance(entry, Mapping):
        raise InputError(f"the checkpoint's rank{rank} is no entry, but {type(entry).__name__}")
    version = entry.get("version", "unknown")
    # isinstance would take True for version 1
    if type(version) is not int or version != VERSION:
        raise InputError(
            f"the checkpoint is of version {_plain(version)}, and this reads version {VERSION}: resume with the "
            "gradstats that saved it"
        )
    content = {key: each for key, each in entry.items() if key not in ("version", "contents")}
    saved, here = _contents(entry.get("contents")), dict(_checksums(content))
    # paths first: values are compared below, where both sides must have them
    if lost := [path for path in saved if path not in here]:
        raise InputError(f"the checkpoint lacks {_plain(lost[0])}, which was saved: it is damaged")
    if strange := [path for path in here if path not in saved]:
        raise InputError(
            f"the checkpoint has {_plain(strange[0])}, which was not saved: it is damaged"
        )
    if changed := [path for path in saved if saved[path] != here[path]]:
        raise InputError(
            f"the checkpoint's {_plain(changed[0])} does not have its checksum: it is damaged, load another one"
        )
    return content


def _contents(data: object) -> dict[str, str]:
    """Return the checksums by path that :func:`seal` wrote."""
    if isinstance(data, bytes):
        check, sums = data[:8], data[8:]
        if f"{zlib.crc32(sums):08x}".encode() == check:
            return dict(json.loads(sums))
    raise InputError("the checkpoint's list of contents is damaged: load another one")


def _plain(text: object) -> str:
    """Return a name from a file as it may be shown."""
    # a damaged file may name anything, of any length
    shown = str(text)[:120]
    return shown if shown.isprintable() else repr(shown)


def tensor_text(x: torch.Tensor) -> str:
    """Return what tells a tensor from others: dtype, shape, and a checksum of its values.

    Parameters
    ----------
    x : tensor
        The tensor, on any device.
    """
    # the same text wherever it lies, and with whatever strides
    whole = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # as octets: NumPy has no bfloat16, and NaNs of other bits are other values
    octets: Any = whole.reshape(-1).view(torch.uint8).numpy() if whole.numel() else b""
    return f"{whole.dtype} {tuple(whole.shape)} {zlib.crc32(octets):08x}"


def _checksums(content: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the checksum of everything in an entry, its kind and shape included."""
    if isinstance(content, Mapping):
        for key, each in content.items():
            # names of parameters may have slashes: a/b is no b inside a
            name = str(key).replace("\\", "\\\\").replace("/", "\\/")
            yield from _checksums(each, f"{path}/{name}" if path else name)
    elif isinstance(content, list | tuple):
        for i, each in enumerate(content):
            yield from _checksums(each, f"{path}/{i}")
    elif isinstance(content, torch.Tensor):
        yield path, tensor_text(content)
    else:
        # repr tells floats exactly
        data = content if isinstance(content, bytes) else repr(content).encode()
        yield path, f"{type(content).__name__} {zlib.crc32(data):08x}"


@contextmanager
def refusing() -> Iterator[None]:
    """Turn whatever a strange entry of a checkpoint makes Python raise into one line.

    Raises
    ------
    InputError
        For every exception that is not gradstats' own.
    """
    try:
        yield
    except GradstatsError:
        raise
    except Exception as error:
        raise InputError(
            f"the checkpoint does not fit: {type(error).__name__}: {_plain(first_line(error))}"
        ) from None


def field(entry: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a field of an entry.

    Parameters
    ----------
    entry : mapping
        The entry, or a part of it.
    name : str
        Name of the field.
    kind : type
        Its type.

    Raises
    ------
    InputError
        If it is missing, or of another type.
    """
    value = entry.get(name)
    # True is an int to Python
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        has = "none" if name not in entry else type(value).__name__
        raise InputError(f"the checkpoint's {name} must be {kind.__name__}, not {has}")
    return value


def check_count_of(what: str, saved: object, here: int) -> None:
    """Check that there are as many of something as there were.

    Parameters
    ----------
    what : str
        What is counted, in the plural.
    saved : int
        Number in the checkpoint.
    here : int
        Number now.

    Raises
    ------
    InputError
        If they differ.
    """
    if type(saved) is not int or saved != here:
        raise InputError(f"the checkpoint is of {_plain(saved)} {what}, and these are {here}")


def check_values(
    what: str,
    saved: object,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    low: float | None = None,
) -> None:
    """Check that something saved is a tensor of finite values.

    Parameters
    ----------
    what : str
        Its name.
    saved : object
        What was saved.
    shape : sequence of int, optional
        Its shape; that of any vector if None.
    dtype : torch.dtype, optional
        Its dtype; any floating one if None.
    low : float, optional
        Least value that it may have.

    Raises
    ------
    InputError
        If it is none, of another shape or dtype, or holds what no training can go on from.
    """
    what = _plain(what)
    if not isinstance(saved, torch.Tensor):
        raise InputError(f"the checkpoint's {what} is no tensor, but {type(saved).__name__}")
    # of any length, but flat: as memories are saved by parameter
    if (saved.dim() != 1) if shape is None else (tuple(saved.shape) != tuple(shape)):
        here = "one dimension" if shape is None else f"shape {tuple(shape)}"
        raise InputError(f"the checkpoint's {what} has shape {tuple(saved.shape)}, not {here}")
    if saved.dtype != dtype if dtype is not None else not saved.is_floating_point():
        raise InputError(
            f"the checkpoint's {what} is {saved.dtype}, not {dtype or 'floating point'}"
        )
    # of whole numbers all are finite
    if not torch.isfinite(saved).all():
        raise InputError(
            f"the checkpoint's {what} holds NaN or infinity: it was saved when the training had gone wrong already"
        )
    if low is not None and saved.numel() and float(saved.min()) < low:
        raise InputError(f"the checkpoint's {what} holds values below {low:g}")
