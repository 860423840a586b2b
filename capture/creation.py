"""Creating a trace: once, when all ranks have come, where all of them find it, and in nobody's way."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

import torch.distributed as dist

from capture.recorder import CaptureWarning
from gradstats.errors import GradstatsError, TraceError, first_line
from gradstats.hooks.meeting import meet
from gradstats.trace import open_trace
from gradstats.trace.format import is_trace

if sys.platform != "win32":
    import fcntl

__all__ = ["Overwrite", "create_on_all", "held", "hold", "restarted", "vacant"]

Overwrite: TypeAlias = bool | Literal["number"]

_LATE_S = 10.0
"""Longest that a file system shared by machines takes to show a new file to all."""
_SUFFIX = ".zarr"
_ADVICE = (
    "make the Capture on every rank, not under `if rank == 0`; ranks=[0] captures rank 0 alone"
)


def restarted() -> bool:
    """Tell whether torchrun has started this process in place of one that failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def hold(path: Path) -> Callable[[], None]:
    """Tell other processes that a trace is being captured into, until it is let go or this process ends.

    Parameters
    ----------
    path : Path
        The trace, which this process has created.

    Returns
    -------
    callable
        Lets it go.
    """
    try:
        # open for writing, it would keep its disk from being made read-only
        file = _locked(path, "rb")
    except OSError:  # there are no locks, or another process is asking in this moment
        return lambda: None
    _HELD.add(file)
    return file.close


def held(path: Path) -> bool:
    """Tell whether a Capture of any process that is not closed is going to write into a trace.

    Parameters
    ----------
    path : Path
        The trace.

    Returns
    -------
    bool
        False also where the file system has no locks.
    """
    try:
        _locked(path, "r+b").close()
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _locked(path: Path, mode: Literal["rb", "r+b"]) -> FileIO:
    """Return a trace's metadata, open and locked; raise where it cannot be, BlockingIOError where another has it."""
    if sys.platform == "win32":
        raise OSError("Windows has other locks")
    file = (path / "zarr.json").open(mode, buffering=0)
    try:
        # one that no other may have, too, takes a file open for writing on NFS
        kind = fcntl.LOCK_SH if mode == "rb" else fcntl.LOCK_EX
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _let_go_in_a_child() -> None:
    """Close what a fork has copied: a data loader that outlives its training would hold the trace for it."""
    for file in list(_HELD):
        file.close()


_HELD: WeakSet[FileIO] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_a_child)


def vacant(path: Path) -> tuple[Path, bool]:
    """Return a path for a trace beside those of other trainings, and whether an empty one is there to replace.

    Parameters
    ----------
    path : Path
        Where the trace would be; ``NAME-2.zarr``, ``NAME-3.zarr`` follow.

    Returns
    -------
    path : Path
        The first at which there is no trace that has a step or is going to have one.
    replace : bool
        Whether there is one without.
    """
    stem = path.name.removesuffix(_SUFFIX)
    suffix = path.name[len(stem) :]
    candidates = itertools.chain(
        [path], (path.with_name(f"{stem}-{n}{suffix}") for n in itertools.count(2))
    )
    for candidate in candidates:
        if not is_trace(candidate):
            return candidate, False
        if not held(candidate) and not _has_steps(candidate):
            return candidate, True
    # unreachable: without it the function would seem to return None
    raise AssertionError("names do not end")


def _has_steps(path: Path) -> bool:
    try:
        trace = open_trace(path)
        return any(trace.steps(rank) for rank in trace.ranks)
    except GradstatsError:  # damaged, perhaps worth mending
        return True


def create_on_all(
    create: Callable[[], Path],
    path: Path,
    rank: int,
    process_group: dist.ProcessGroup | None,
    writes: bool,
) -> tuple[Path, list[int]]:
    """Create a trace on rank 0, and look for it on all; what fails on one is raised on every rank, and none waits.

    Parameters
    ----------
    create : callable
        Creates it, and returns its path.
    path : Path
        What the user calls it.
    rank : int
        Rank of this process in the group.
    process_group : ProcessGroup, optional
        Ranks that have come together; None for the default group, if there is one.
    writes : bool
        Whether this rank is going to write.

    Returns
    -------
    path : Path
        Where the trace is.
    writers : list of int
        Ranks that are going to write.

    Raises
    ------
    InputError
        If some ranks do not come before the group's timeout.
    TraceError
        If it cannot be created, or a rank that writes does not find it.
    """
    distributed = dist.is_available() and dist.is_initialized()
    if distributed:
        meet("Capture", _ADVICE, process_group, CaptureWarning)
    # what failed; the name that was taken; the digest of what was made
    message: list[Any] = [None, None, None]
    interrupt: BaseException | None = None
    # the first of the group, whether it captures or not
    if rank == 0:
        try:
            made = create()
            message = [None, made.name, _digest(made)]
        except GradstatsError as error:
            message[0] = str(error)
        # sent like any other failure: the others would wait in the broadcast
        except BaseException as error:
            message[0] = f"cannot create {str(path)!r}: {type(error).__name__}: {first_line(error)}"
            interrupt = None if isinstance(error, Exception) else error
    # a collective: rank 0 comes here whatever happened above
    if distributed:
        dist.broadcast_object_list(message, group=process_group, group_src=0)
    if interrupt is not None:
        raise interrupt
    if message[0] is not None:
        raise TraceError(message[0])
    # the name alone comes from rank 0: the folder may be mounted elsewhere here
    made = path.with_name(message[1])
    if distributed:
        return made, _look(made, message[2], rank, process_group, writes)
    return made, [rank] * writes


def _look(
    path: Path, digest: str, rank: int, group: dist.ProcessGroup | None, writes: bool
) -> list[int]:
    """Return the ranks that write; raise on every rank if one of them does not find the trace."""
    problem, deadline = None, time.monotonic() + _LATE_S
    # each machine may have a disk of its own; a shared one shows a new file late. Rank 0 has made it, and who writes
    # nothing need not see it
    while writes and rank and _digest(path) != digest:
        if time.monotonic() > deadline:
            problem = f"rank {rank} on {platform.node()}"
            break
        time.sleep(0.1)
    # a collective: ranks that write nothing take part
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (problem, writes), group=group)
    blind = [p for p, _ in answers if p is not None]
    if blind:
        more = f", nor do {len(blind) - 1} more" if blind[1:] else ""
        raise TraceError(
            f"rank 0 has made {path}, and {blind[0]} does not find it there{more}: give a path on a disk that all "
            "ranks share, the same on each, or capture ranks=[…] of one machine"
        )
    return [r for r, (_, w) in enumerate(answers) if w]


def _digest(path: Path) -> str:
    """Return what tells a trace from another that was at the same path; nothing if there is none."""
    try:
        # this file holds the time of creation, which tells a trace from an older one at the same place
        return hashlib.sha256((path / "zarr.json").read_bytes()).hexdigest()
    except OSError:
        return ""
