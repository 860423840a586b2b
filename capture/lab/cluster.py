"""Network namespaces joined by a bridge, with every link shaped to a rate.

The bridge lives in a namespace of its own, and veth pairs are created between namespaces, so that no interface of the
host is ever added or changed; deleting the namespaces removes everything. Which ones a lab has made is in the file of
its lock, before it makes them: no others are removed, whatever their names.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from capture.lab.caller import caller
from capture.workloads.launch import SIGNALS, signals_raise
from gradstats.errors import GradstatsError, InputError

__all__ = ["BURST", "INTERFACE", "Cluster", "LabError", "enter", "shaped_network"]

INTERFACE = "eth0"
"""Name of a rank's interface in its namespace."""

LARGEST = 200
"""Largest number of ranks: they share a /24 network."""

_PREFIX = "gradstats-lab-"
_OURS = re.compile(rf"{_PREFIX}\d+-(?:hub|\d+)")
"""Names that `_build` gives."""
_NAMESPACES = Path("/var/run/netns")  # where iproute2 keeps them
_LOCK = Path(
    "/run/gradstats-lab.lock"
)  # forgotten with the namespaces when the machine starts anew
_FIRST_LINE = 16
"""Bytes of the first line of the lock's file, the number of a process; the lines after it are names of namespaces."""
_SUBNET = "198.18.0"  # in the block for benchmarks (RFC 2544): no name server has such an address
# from linux/sched.h
_CLONE_NEWNET = 0x40000000
# The bytes that an idle link saves up pass at once, so there are few, or small messages would be free. They must hold
# the largest segment, or the kernel cuts all segments into packets, which keeps a core busy at 1 Gbit/s. The queue is
# long enough never to drop a packet of the ranks: a retransmission timer would take longer than what is measured.
BURST = 32 * 1024
"""Bytes that an idle link saves up and then sends at once, by default."""
_SMALLEST_BURST = 4 * 1024
_LARGEST_SEGMENT = 30_000  # bytes
_QUEUE = "latency 1s"


class LabError(GradstatsError):
    """The lab cannot be built on this machine. The message says which command was refused and why."""


@dataclass(frozen=True)
class Cluster:
    """Namespaces and links that are up.

    Attributes
    ----------
    ranks : tuple of str
        Namespaces of the ranks.
    address : str
        Address of rank 0.
    up : int
        Rate at which a rank sends, in bit/s.
    down : int
        Rate at which it receives, in bit/s.
    """

    ranks: tuple[str, ...]
    address: str
    up: int
    down: int

    @property
    def rate(self) -> int:
        """Rate of the slower direction, in bit/s."""
        return min(self.up, self.down)


@contextmanager
def shaped_network(
    nproc: int, rate: int | tuple[int, int], burst: int = BURST
) -> Iterator[Cluster]:
    """Build a network for some ranks, and take it down again whatever happens.

    Each rank's link passes two token buckets (``tc tbf``), at its own end and at the bridge's, so that what it
    sends and what it receives are limited separately, as on a full-duplex cable. What an earlier lab has made and left,
    because it was killed, is removed first.

    Parameters
    ----------
    nproc : int
        Number of ranks, up to 200.
    rate : int or (int, int)
        Rate of every link in each direction, in bit/s; or the rates at which a rank sends and receives.
    burst : int
        Bytes that an idle link saves up and then sends at once, at least 4,096.

    Yields
    ------
    Cluster
        The network.

    Raises
    ------
    InputError
        If this is not Linux, or the process is not root, or ``ip`` or ``tc`` is missing; if there are too many ranks or
        the burst is too small; if another lab is running; if sudo names a user whom this machine does not have.
    LabError
        If the kernel refuses a part.
    torch.distributed.elastic.multiprocessing.SignalException
        On SIGINT, SIGTERM, SIGHUP and SIGQUIT, as torchrun's agent does, once the network is down.
    """
    _check(nproc)
    if burst < _SMALLEST_BURST:
        raise InputError(f"a burst must be at least {_SMALLEST_BURST} bytes, not {burst}")
    up, down = rate if isinstance(rate, tuple) else (rate, rate)
    # the lock first: what it names is then nobody's
    with _only_one() as made, signals_raise():
        _remove_all(made)
        try:
            yield _build(nproc, up, down, burst, made)
        finally:
            with suppress(ValueError):  # only the main thread has handlers
                # handlers are put back by signals_raise()
                for number in SIGNALS:  # a second Ctrl-C must not leave half of the network
                    signal.signal(number, lambda *_: None)
            _remove_all(made)


def enter(namespace: str) -> None:
    """Move this thread into a network namespace.

    Sockets opened, threads started and processes started from now on are in it; existing ones stay where they are.

    Parameters
    ----------
    namespace : str
        One of :attr:`Cluster.ranks`.

    Raises
    ------
    OSError
        If there is no such namespace, or the process may not enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    with open(_NAMESPACES / namespace) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _check(nproc: int) -> None:
    if not sys.platform.startswith("linux"):
        raise InputError("the network lab needs Linux: it is made of network namespaces")
    if not 1 <= nproc <= LARGEST:
        raise InputError(f"nproc must be 1 to {LARGEST}, not {nproc}")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise InputError(f"the network lab needs {tool}, of the package iproute2: install it")
    if os.geteuid() != 0:
        raise InputError("the network lab makes network namespaces, which takes root: use sudo")
    caller()  # whom ranks become: not known only once the network is up


@contextmanager
def _only_one() -> Iterator[TextIO]:
    """Hold this machine's lock, and yield its file; the kernel releases it with the process, however that ends."""
    try:
        # not mode "w": the number in the file is another lab's until the lock is ours
        descriptor = os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise LabError(f"cannot write {_LOCK}: {error.strerror}") from error
    with open(descriptor, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another network lab is running, process {file.readline().strip()}; wait for it"
            ) from None
        # in place of an earlier lab's number: the names after it stay until they are removed
        file.write(f"{os.getpid():<{_FIRST_LINE - 1}}\n")
        file.flush()
        yield file


def _build(nproc: int, up: int, down: int, burst: int, made: TextIO) -> Cluster:
    prefix = f"{_PREFIX}{os.getpid()}-"
    hub, ranks = f"{prefix}hub", tuple(f"{prefix}{rank}" for rank in range(nproc))
    # smaller than the bucket, whatever the user makes of that
    segment, bucket = min(_LARGEST_SEGMENT, burst * 9 // 10), f"burst {burst} {_QUEUE}"
    _make(hub, made)
    _run("ip -n", hub, "link add bridge type bridge")
    _run("ip -n", hub, "link set bridge up")
    for rank, name in enumerate(ranks):
        port = f"port{rank}"
        _make(name, made)
        _run("ip -n", name, "link set lo up")
        _run("ip -n", hub, "link add", port, "type veth peer name", INTERFACE, "netns", name)
        _run("ip -n", name, "link set", INTERFACE, f"gso_max_size {segment}")
        _run("ip -n", name, f"address add {_SUBNET}.{rank + 1}/24 dev", INTERFACE)
        # an interface shapes what it sends: the bridge's end sets what the rank receives
        for namespace, interface, rate in ((hub, port, down), (name, INTERFACE, up)):
            _run("tc -n", namespace, "qdisc add dev", interface, f"root tbf rate {rate}bit", bucket)
        _run("ip -n", hub, "link set", port, "master bridge up")
        _run("ip -n", name, "link set", INTERFACE, "up")
    return Cluster(ranks, f"{_SUBNET}.1", up, down)


def _make(namespace: str, made: TextIO) -> None:
    """Make a namespace that is in the file of the lock before it is there: killed in between, nothing is forgotten."""
    # of somebody else's the file must not say that it is a lab's
    if (_NAMESPACES / namespace).exists():
        raise LabError(f"there is a namespace {namespace} already, of no lab's: remove it")
    made.seek(0, os.SEEK_END)
    made.write(f"{namespace}\n")
    made.flush()
    _run("ip netns add", namespace)


def _remove_all(made: TextIO) -> None:
    """Delete every namespace that labs have made, and kill what still runs in it; the lock says that none does."""
    problems = []
    made.seek(_FIRST_LINE)
    for namespace in made.read().split():
        # not made after all, or removed by hand; the pattern is for a file that was damaged
        if not _OURS.fullmatch(namespace) or not (_NAMESPACES / namespace).exists():
            continue
        try:
            # a process within would keep the network alive after its name is gone
            for pid in _run("ip netns pids", namespace).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip netns delete", namespace)
        except LabError as error:  # the others are removed all the same
            problems.append(str(error))
    if problems:  # the next lab tries again, and so the names stay
        raise LabError("; ".join(problems))
    made.truncate(_FIRST_LINE)


def _run(*words: str) -> str:
    command = " ".join(words)
    # Ctrl-C reaches every process of the terminal: this one inherits the mask, and is done at once
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if done.returncode:
        why = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise LabError(f"{command}: {why[0]}")
    return done.stdout
