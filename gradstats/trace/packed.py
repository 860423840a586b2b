"""Chunk files of a closed trace, put together into few: zarr calls such a file a shard, and this package a pack.

A pack holds chunks that follow each other along the steps, byte for byte as their files did, and an index at its end.
zarr's own codec could write packs, but takes a whole one in memory, decoded: of sketches that is gigabytes.

An array's ``zarr.json`` says whether its chunks are files or lie in packs, and these have other names: ``c/0/0`` and
``c.0.0``. So one rename of ``zarr.json`` takes every new reader from one to the other, and what it leads to is on the
disk before, what it led to is deleted after.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import TraceError
from gradstats.files import replace_file, replacing, write_file
from gradstats.trace.format import KINDS, PACK, ArraySpec, chunk_name, pack_of, read_metadata

__all__ = ["CHECKSUM", "pack", "read_index", "unpack"]

CHECKSUM = 4  # bytes
_LARGEST = 1 << 28  # bytes of a pack: small enough to be copied and tried again
_ENTRY = np.dtype(("<i8", 2))
"""Where a chunk begins in its pack, and its length in bytes; -1, without a sign zarr's 2^64 - 1, if it is not there."""


def pack(folder: Path, spec: ArraySpec, rows: int) -> None:
    """Put the chunk files of an array into packs, if that makes fewer files.

    A process killed here leaves the chunk files or the packs, whole, and perhaps some of the others, which
    :func:`unpack` deletes.

    Parameters
    ----------
    folder : Path
        The array.
    spec : ArraySpec
        What it is.
    rows : int
        Its length.

    Raises
    ------
    OSError
        If the disk refuses; the array is as it was.
    """
    # Gradients are few files for their bytes, and would take twice the room while they are copied.
    if spec.name in KINDS or pack_of(read_metadata(folder / "zarr.json", folder)):
        return
    files = _chunk_files(folder, spec.separator, len(spec.dimensions))
    size = min(PACK, -(-rows // spec.rows))
    bytes_of = {key: file.stat().st_size for key, file in files.items()}
    while True:
        held: Counter[tuple[int, ...]] = Counter()
        for (first, *rest), length in bytes_of.items():
            held[first // max(size, 1), *rest] += length
        if size <= 1 or max(held.values(), default=0) <= _LARGEST:
            break
        size = -(-size // 2)
    if len(held) >= len(files):
        return
    try:
        for place in held:
            _write_pack(folder / chunk_name(place, spec.pack_separator), place, files, size)
        # the packs are on the disk by now, and from here on they are the array
        replace_file(folder / "zarr.json", spec.json(rows, size))
    except OSError:
        _remove(folder, spec.pack_separator)
        raise
    _remove(folder, spec.separator)


def _write_pack(
    file: Path, place: tuple[int, ...], files: Mapping[tuple[int, ...], Path], size: int
) -> None:
    """Write a pack: its chunks one after the other, so that one of them at a time is in memory, and their index."""
    from google_crc32c import value as crc32c

    first, *rest = place
    index = np.full(size, -1, _ENTRY)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as partial, partial.open("wb") as stream:
        for i in range(size):
            chunk = files.get((first * size + i, *rest))
            if chunk is not None:
                data = chunk.read_bytes()
                index[i] = stream.tell(), len(data)
                stream.write(data)
        stream.write(index.tobytes())
        stream.write(crc32c(index.tobytes()).to_bytes(CHECKSUM, "little"))


def read_index(stream: BinaryIO, size: int) -> NDArray[np.int64]:
    """Return where the chunks of a pack are.

    Parameters
    ----------
    stream : file
        The pack.
    size : int
        Chunks that it has room for.

    Returns
    -------
    ndarray of int64, shape (size, 2)
        The first byte of each, and how many there are; -1 if it is not there.

    Raises
    ------
    ValueError
        If the index is damaged.
    """
    from google_crc32c import value as crc32c

    length = size * _ENTRY.itemsize + CHECKSUM
    end = stream.seek(0, os.SEEK_END) - length
    if end < 0:
        raise ValueError("a pack is too short for its index")
    stream.seek(end)
    data = stream.read(length)
    if crc32c(data[:-CHECKSUM]) != int.from_bytes(data[-CHECKSUM:], "little"):
        raise ValueError("the checksum of a pack's index is wrong")
    index = np.frombuffer(data[:-CHECKSUM], _ENTRY)
    firsts, lengths = index.T
    there = (firsts != -1) | (lengths != -1)
    # in this order, so that no sum overflows
    if ((firsts < 0) | (lengths < 0) | (firsts > end) | (lengths > end - firsts))[there].any():
        raise ValueError("the index of a pack leads out of it")
    return index.astype(np.int64)


def unpack(group: Path, specs: Mapping[str, ArraySpec], lengths: Mapping[str, int]) -> None:
    """Make files of all chunks of a group again, so that rows can be added and removed; delete what a kill left.

    Parameters
    ----------
    group : Path
        The group.
    specs : mapping of str to ArraySpec
        Its arrays.
    lengths : mapping of str to int
        Their lengths.

    Raises
    ------
    OSError
        If the disk refuses.
    TraceError
        If a pack is damaged; the arrays are as they were.
    """
    sizes = {
        name: size
        for name in specs
        if (size := pack_of(read_metadata(group / name / "zarr.json", group)))
    }
    for name, size in sizes.items():
        _remove(group / name, specs[name].separator)
        _write_chunks(group / name, specs[name], size)
    # packs are deleted below: once, as thousands of small files would each wait for the disk (Windows has no sync)
    if sizes and hasattr(os, "sync"):
        os.sync()
    for name in sizes:
        replace_file(group / name / "zarr.json", specs[name].json(lengths[name]))
    for name, spec in specs.items():
        _remove(group / name, spec.pack_separator)


def _write_chunks(folder: Path, spec: ArraySpec, size: int) -> None:
    """Write the chunks that lie in the packs of an array as files."""
    packs = _chunk_files(folder, spec.pack_separator, len(spec.dimensions))
    for (first, *rest), file in packs.items():
        with file.open("rb") as stream:
            try:
                index = read_index(stream, size)
            except ValueError as error:
                raise TraceError(f"{file} is damaged: {error}") from None
            for i, (begin, length) in enumerate(index.tolist()):
                if begin >= 0:
                    stream.seek(begin)
                    chunk = folder / chunk_name((first * size + i, *rest), spec.separator)
                    chunk.parent.mkdir(parents=True, exist_ok=True)
                    write_file(chunk, stream.read(length))


def _chunk_files(folder: Path, separator: str, dimensions: int) -> dict[tuple[int, ...], Path]:
    """Return the files of an array that are named like chunks, by their indices."""
    files = {}
    for file in folder.glob("c" + f"{separator}*" * dimensions):
        _, *key = file.relative_to(folder).as_posix().split(separator)
        # a dotted name that was being written has a part more
        if len(key) == dimensions and all(map(str.isdecimal, key)):
            files[tuple(map(int, key))] = file
    return files


def _remove(folder: Path, separator: str) -> None:
    """Delete the files of an array that are named like chunks, and what was being written."""
    if separator == "/":
        shutil.rmtree(folder / "c", ignore_errors=True)
    for pattern in (".*.partial", *(["c.*"] if separator == "." else [])):
        for file in folder.glob(pattern):
            file.unlink()
