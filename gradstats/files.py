"""Files that are replaced whole: whoever looks, at any moment, finds the old one or the new one."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradstats.errors import InputError

__all__ = ["address_of", "refuse_address", "replace_file", "replacing", "write_file", "write_link"]

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+(?:::[a-z][a-z0-9+.-]+)*):(//?)(?=.|$)", re.IGNORECASE)
"""Scheme of an address, of two letters or more: a drive has one. pathlib makes one slash of two."""

# O_BINARY: without it Windows writes a carriage return before every line feed
_NEW = (
    os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)


def address_of(path: str | Path) -> str | None:
    """Return the address ``scheme://…`` that a text or a path stands for; None for a path of this machine.

    Parameters
    ----------
    path : str or Path
        What the user gave.
    """
    text = str(path)
    scheme = _ADDRESS.match(text)
    # pathlib has made one slash of two, so that "data:/x" is a path where there is a folder "data:"
    if scheme is None or (
        scheme[2] == "/" and Path(text).parts and Path(Path(text).parts[0]).exists()
    ):
        return None
    rest = text[scheme.end() :].lstrip("/")
    # the third slash of file:///x is the root of the path, and not stripped
    return f"{scheme[1]}://{'/' if scheme[1] == 'file' else ''}{rest}"


def refuse_address(path: str | Path) -> None:
    """Refuse to write to an address, of which the file system would make a folder named like its scheme.

    Parameters
    ----------
    path : str or Path
        Where to write.

    Raises
    ------
    InputError
        If it is an address.
    """
    if address := address_of(path):
        raise InputError(
            f"cannot write to {address}: write to a folder of this machine, and copy it there when it is complete"
        )


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a file to write in place of another, and put it there when all of it is written and on the disk.

    After an exception, or when the process is killed, the old file is as it was.

    Parameters
    ----------
    path : str or Path
        File to make or to replace. If it is a link, the file it leads to.

    Yields
    ------
    Path
        Name in the same folder, at which nothing exists.
    """
    refuse_address(path)
    # to where a link leads: the link stays, and its target is replaced
    path = Path(os.path.realpath(path))
    # cut, because file systems allow 255 bytes; unique, because several processes may write the same file
    partial = path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        # a new file gets its permissions from the umask; keep those of the file that it replaces
        if path.exists():
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        # synced before the rename, so that after a power failure the name does not lead to an empty file
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    # an interruption must not leave a partial file behind either
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, where the system has a way to."""
    # Windows opens no folder, and some network file systems sync none: the file is there all the same
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Write a file in place of another; it is on the disk when this returns.

    Parameters
    ----------
    path : str or Path
        File to make or to replace.
    content : str or bytes
        What to write; text as UTF-8.
    """
    refuse_address(path)
    data = content.encode() if isinstance(content, str) else content
    path = Path(path)
    if path.exists() and not path.is_file():  # a terminal or a pipe has no old content to keep
        path.write_bytes(data)
        return
    with replacing(path) as partial:
        partial.write_bytes(data)


def write_file(path: str | Path, *parts: bytes | memoryview) -> None:
    """Write a file in place of another, without waiting for the disk, for those who write many.

    By few system calls: each lets go of Python's lock, for which the training has to wait while it is taken again.

    Parameters
    ----------
    path : str or Path
        File to make or to replace, which nobody else writes: it is written as ``PATH.partial``.
    *parts : bytes or memoryview
        What to write, one after the other.

    Raises
    ------
    OSError
        If it cannot be written; the old file is as it was.
    """
    partial = f"{path}.partial"
    try:
        try:
            descriptor = os.open(partial, _NEW, 0o666)  # 0o666 less the umask, as open() does it
        except FileExistsError:
            # left by a process that was killed; never opened, since it may be a link to a file that is needed
            os.unlink(partial)
            descriptor = os.open(partial, _NEW, 0o666)
        try:
            left = [memoryview(part) for part in parts]
            while left:  # at most two gigabytes at a time, and what the disk has room for
                written = _write_some(descriptor, left)
                # first the parts that are written whole, then the beginning of the next
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if left:
                    left[0] = left[0][written:]
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise


def _write_some(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Write as much of some parts as goes in one call; return how many bytes. Windows takes one part at a time."""
    return os.writev(descriptor, parts) if hasattr(os, "writev") else os.write(descriptor, parts[0])


def write_link(target: str, path: Path) -> None:
    """Put a symbolic link in the place of a file or of another link.

    Parameters
    ----------
    target : str
        What the link leads to.
    path : Path
        The link to make or to replace.

    Raises
    ------
    OSError
        If the file system has no links, or refuses; what was at `path` stays.
    """
    # symlink() refuses a name that exists; a rename replaces it in one step
    partial = path.with_name(f"{path.name}.partial")
    try:
        # left by a process that was killed
        partial.unlink(missing_ok=True)
        partial.symlink_to(target)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
