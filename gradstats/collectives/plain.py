"""Collectives of torch.distributed that return only when the backend has let go of their tensors.

gloo's thread destroys its work item microseconds *after* it has reported completion, and needs the interpreter to drop
the tensors in it. If the interpreter is shutting down by then, CPython ends the thread, C++ takes that for an uncaught
exception, and the process aborts: "terminate called without an active exception". A tenth of all runs that exit right
after their last step end so; the stack is gloo's runLoop, ~AsyncAllgatherWork, decref_pyobject, take_gil.
Point-to-point messages do not have this problem (:mod:`gradstats.collectives.ring`).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from gradstats.collectives.header import (
    HEADER_WORDS,
    Header,
    Kind,
    by_rank,
    check_bodies,
    check_kinds,
    checksum,
    moment,
    read_headers,
    words_of,
)
from gradstats.errors import ExchangeError, InputError, first_line

__all__ = [
    "all_gather",
    "all_gather_checked",
    "all_gather_flags",
    "all_gather_headers",
    "all_gather_texts",
    "all_reduce",
    "all_reduce_mean",
    "all_to_all",
    "broadcast",
    "check_moments",
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
    # references beyond these are the backend's
    before = [sys.getrefcount(t) for t in tensors]
    with exchange_errors():
        call()
    deadline = time.monotonic() + _LONGEST_S
    # no longer than the deadline, as a further reference need not be the backend's
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


def all_reduce(
    values: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> torch.Tensor:
    """Add up a tensor over the ranks, in place.

    Parameters
    ----------
    values : tensor
        This rank's summand, of the same shape on every rank; the sum afterwards.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.
    op : torch.distributed.ReduceOp
        What is done instead of adding up.

    Returns
    -------
    tensor
        The same tensor.
    """
    _released(lambda: dist.all_reduce(values, op, group=group), values)
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
    # `src` would be a rank of the whole training, not of the group
    _released(lambda: dist.broadcast(values, group=group, group_src=source), values)
    return values


def all_gather_flags(
    flag: int,
    group: dist.ProcessGroup | None,
    device: torch.device | str = "cpu",
    kind: Kind = Kind.FLAGS,
) -> list[int]:
    """Exchange one small integer, in a header that also says where in the training the rank is.

    Parameters
    ----------
    flag : int
        The number that this rank announces.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.
    device : torch.device or str
        Device of the message.
    kind : Kind
        What is exchanged.

    Returns
    -------
    list of int
        The number that each rank announced, by rank.

    Raises
    ------
    InputError
        If another rank exchanges something else, or is at another step, on all ranks.
    ExchangeError
        If a header arrives damaged.
    """
    headers = all_gather_headers(Header.now(kind, flag=flag), group, device)
    check_moments(headers, group, device)
    return [header.flag for header in headers]


def all_gather_headers(
    header: Header, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> list[Header]:
    """Exchange headers, and check their kinds.

    Parameters
    ----------
    header : Header
        This rank's.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.
    device : torch.device or str
        Device of the message.

    Returns
    -------
    list of Header
        Headers, by rank.
    """
    message = header.words(torch.empty(0, dtype=torch.int32, device=device))
    gathered = message.new_empty(dist.get_world_size(group) * HEADER_WORDS)
    all_gather(gathered, message, group)
    headers = read_headers(gathered.view(-1, HEADER_WORDS), header, dist.get_rank(group))
    check_kinds(headers)
    return headers


def check_moments(
    headers: list[Header], group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> None:
    """Check that all ranks are at the same place of the training.

    Parameters
    ----------
    headers : list of Header
        Headers, by rank.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.
    device : torch.device or str
        Device of messages.

    Raises
    ------
    InputError
        If they are not, on all ranks; it names what differs.
    """
    if len({header.step for header in headers}) > 1:
        steps = by_rank([f"step {header.step}" for header in headers])
        raise InputError(f"the ranks are not in the same step, {steps}")
    if len({header.details for header in headers}) > 1:
        # all ranks saw the same headers, so they exchange texts together
        texts = all_gather_texts(
            "\n".join(f"{name}\t{value}" for name, value in moment().details.items()),
            group,
            device,
        )
        each = [
            dict(line.split("\t", 1) for line in text.splitlines() if "\t" in line)
            for text in texts
        ]
        # a name may be of some ranks alone
        names = dict.fromkeys(itertools.chain(*each))
        name = next((n for n in names if len({e.get(n) for e in each}) > 1), "details")
        # names of a whole model's parameters are no line
        values = by_rank([e.get(name, "nothing")[:120] for e in each])
        raise InputError(f"the ranks differ in {name} in step {headers[0].step}, {values}")


def all_gather_texts(
    text: str, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> list[str]:
    """Exchange texts of any length.

    Parameters
    ----------
    text : str
        This rank's.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.
    device : torch.device or str
        Device of the messages.

    Returns
    -------
    list of str
        Texts, by rank.
    """
    octets = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    # without step and details, which differ where texts are asked for
    headers = all_gather_headers(Header(Kind.TEXTS, octets.numel()), group, device)
    longest = max(header.length for header in headers)
    message = octets.new_zeros(longest)
    message[: octets.numel()] = octets
    rows = all_gather_checked(message, group)
    return [
        # these texts end up in an error message, which must not fail over one character
        bytes(row[: header.length].tolist()).decode(errors="replace")
        for row, header in zip(rows, headers, strict=True)
    ]


def all_gather_checked(message: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather messages of equal length from all ranks, each with a checksum behind it.

    Parameters
    ----------
    message : tensor, shape (n,)
        This rank's message, of any dtype.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.

    Returns
    -------
    tensor, shape (ranks, n)
        Messages, by rank.

    Raises
    ------
    ExchangeError
        If one arrives damaged.
    """
    words = words_of(message)
    words = torch.cat([words, checksum(words)[None]])
    gathered = words.new_empty(dist.get_world_size(group) * words.numel())
    all_gather(gathered, words, group)
    rows = gathered.view(-1, words.numel())
    check_bodies([*rows[:, :-1]], rows[:, -1].tolist())
    size = message.numel() * message.element_size()
    # a clone of one row keeps its strides, and a view of another type needs the last one to be 1
    whole = torch.contiguous_format
    octets = rows[:, :-1].clone(memory_format=whole).view(-1).view(torch.uint8)
    # without the zeros that fill up the last word
    octets = octets.view(len(rows), -1)[:, :size].clone(memory_format=whole).view(-1)
    return octets.view(message.dtype).view(len(rows), message.numel())
