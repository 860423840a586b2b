"""Collectives of torch.distributed that return only when the backend has let go of their tensors.

gloo's thread destroys its work item microseconds *after* it has reported completion, and needs the interpreter to drop
the tensors in it. If the interpreter is shutting down by then, CPython ends the thread, C++ takes that for an uncaught
exception, and the process aborts: "terminate called without an active exception". A tenth of all runs that exit right
after their last step end so; the stack is gloo's runLoop, ~AsyncAllgatherWork, decref_pyobject, take_gil.
Point-to-point messages do not have this problem (:mod:`gradstats.collectives.ring`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from gradstats.errors import ExchangeError, first_line

__all__ = [
    "all_gather",
    "all_gather_flags",
    "all_reduce",
    "all_reduce_mean",
    "all_to_all",
    "broadcast",
    "exchange_errors",
]

_LONGEST_S = 1.0
"""Longest wait for the backend to let go, in seconds."""


@contextmanager
def exchange_errors() -> Iterator[None]:
    """Turn the errors that backends raise when a peer is gone or late into :class:`ExchangeError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # a RuntimeError too, but no fault of another rank
    except RuntimeError as error:
        raise ExchangeError(
            f"the exchange failed, a rank may be lost: {first_line(error)}"
        ) from error


def _released(call: Callable[[], object], *tensors: torch.Tensor) -> None:
    """Make a call, and wait until there are no more references to the tensors than before."""
    before = [sys.getrefcount(t) for t in tensors]
    with exchange_errors():
        call()
    deadline = time.monotonic() + _LONGEST_S
    while [sys.getrefcount(t) for t in tensors] != before and time.monotonic() < deadline:
        time.sleep(0)  # gives the backend's thread the interpreter


def all_gather(
    gathered: torch.Tensor, message: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Gather messages of equal length from all ranks.

    Parameters
    ----------
    gathered : tensor, shape (ranks · n,)
        Receives the messages of all ranks, one after the other.
    message : tensor, shape (n,)
        This rank's message.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.
    """
    # of this name since PyTorch 2.13 only, which warns of the old one
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    _released(lambda: gather(gathered, message, group=group), gathered, message)


def all_reduce(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Add up a tensor over the ranks, in place.

    Parameters
    ----------
    values : tensor
        This rank's summand, of the same shape on every rank; the sum afterwards.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.

    Returns
    -------
    tensor
        The same tensor.
    """
    _released(lambda: dist.all_reduce(values, group=group), values)
    return values


def all_reduce_mean(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Average a tensor over the ranks, in place.

    Parameters
    ----------
    values : tensor
        This rank's values, of the same shape on every rank; the mean afterwards.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.

    Returns
    -------
    tensor
        The same tensor.
    """
    return all_reduce(values, group).div_(dist.get_world_size(group))


def all_to_all(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Send each rank a row.

    Parameters
    ----------
    rows : tensor, shape (ranks, n)
        What each rank is sent; contiguous, of the same shape on every rank.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.

    Returns
    -------
    tensor, shape (ranks, n)
        What each rank has sent to this one.
    """
    received = torch.empty_like(rows)
    _released(lambda: dist.all_to_all_single(received, rows, group=group), received, rows)
    return received


def broadcast(values: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Give every rank the tensor of one rank, in place.

    Parameters
    ----------
    values : tensor
        What the source sends; of the same shape on every rank.
    source : int
        Rank within the group that sends.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.

    Returns
    -------
    tensor
        The same tensor.
    """
    _released(lambda: dist.broadcast(values, group=group, group_src=source), values)
    return values


def all_gather_flags(
    flag: int, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> list[int]:
    """Exchange one small integer.

    Parameters
    ----------
    flag : int
        The number that this rank announces.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.
    device : torch.device or str
        Device of the message.

    Returns
    -------
    list of int
        The number that each rank announced, by rank.
    """
    gathered = torch.empty(dist.get_world_size(group), dtype=torch.int32, device=device)
    all_gather(gathered, torch.tensor([flag], dtype=torch.int32, device=device), group)
    return [int(f) for f in gathered.tolist()]
