"""Traces and files at addresses that fsspec opens: fetched once per process, and read as those of this machine."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from gradstats.console import progress_bar
from gradstats.errors import InputError, first_line
from gradstats.files import address_of
from gradstats.primitives.ratio import shown

__all__ = ["asked_for", "local"]

_AT_ONCE = 64
"""Files that are asked for together: a request takes tens of milliseconds, whatever it brings."""
_ADDRESSES: dict[Path, str] = {}
"""What each fetched file or folder was asked for as: the copy goes with the process, and pages stay."""


def local(path: str | Path) -> Path:
    """Return a path of this machine; what an address holds is fetched, once, into a folder that goes at the end.

    Parameters
    ----------
    path : str or Path
        A path, which is returned as it is, or an address: ``s3://…``, ``gs://…``, ``hf://…``, ``https://…``,
        ``zip://INNER::FILE``. Options of its file system are taken from its environment and configuration files.

    Returns
    -------
    Path
        The path.

    Raises
    ------
    InputError
        If the address cannot be opened. The message has one line.
    """
    address = address_of(path)
    if address is None:
        # only whether this can be a path at all: whoever opens it reports that nothing is there
        try:
            os.lstat(path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:  # a name too long, a null character
            # any other error is reported by whoever opens it
            if not isinstance(error, OSError) or error.errno == errno.ENAMETOOLONG:
                raise InputError(
                    f"no path of a source: {shown(str(path))}: {first_line(error)[:80]}"
                ) from None
        return Path(path)
    return _fetch(address)


def asked_for(path: Path) -> str:
    """Return the address that a path of this machine was fetched from; the path itself if it was here.

    Parameters
    ----------
    path : Path
        What :func:`local` returned.
    """
    return _ADDRESSES.get(path, str(path))


# errors are not kept: the next call tries again
@lru_cache(maxsize=64)
def _fetch(address: str) -> Path:
    """Copy what an address holds."""
    file, key = address, ""
    # what follows the file's name is a name within it, and not part of the address
    head, colon, tail = address.rpartition(":")
    if colon and head.endswith((".pt", ".pth")) and "/" not in tail:
        file, key = head, f":{tail}"
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        system, inner = url_to_fs(file)
    except ImportError as error:
        raise InputError(
            f"{address} takes a package that is not installed ({first_line(error)}): pip install 'gradstats[remote]'"
        ) from None
    except Exception as error:
        raise InputError(f"cannot open {address}: {first_line(error)}") from None
    # zip://::FILE and a bucket's root have no name of their own: the address's last part gives one
    last = file.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    name = inner.rstrip("/").rpartition("/")[2] or last.removesuffix(".zip") or "trace.zarr"
    if name in (".", ".."):
        raise InputError(f"{address} ends in no name")
    try:
        folder, is_there = system.isdir(inner), system.exists(inner)
        if not is_there:
            raise InputError(f"nothing at {address}")
        # under its own name, which is the source's in tables
        home = Path(tempfile.mkdtemp(prefix="gradstats-"))
        # traces are read lazily: the copy is needed until the process ends
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        if folder:
            _copy_folder(system, inner.rstrip("/"), home / name)
        else:
            system.get_file(inner, str(home / name))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"cannot read {address}: {first_line(error)}") from None
    copy = home / f"{name}{key}"
    _ADDRESSES[copy] = address
    return copy


def _copy_folder(system: Any, inner: str, home: Path) -> None:
    """Copy the files below an address, none to a place beside it; as many at once as its file system does."""
    home.mkdir()
    pairs = []
    for each in system.find(inner):
        part = each.removeprefix(inner).lstrip("/")
        if ".." in Path(part).parts or not part:
            raise InputError(f"{inner} holds a file with a name that leads out of it")
        target = home / part
        target.parent.mkdir(parents=True, exist_ok=True)
        pairs.append((each, str(target)))
    with progress_bar() as bar:
        task = bar.add_task(f"fetching {home.name}", total=len(pairs))
        for start in range(0, len(pairs), _AT_ONCE):
            batch = pairs[start : start + _AT_ONCE]
            # a list, because the file system can then make the requests concurrently
            system.get([source for source, _ in batch], [target for _, target in batch])
            bar.advance(task, len(batch))
