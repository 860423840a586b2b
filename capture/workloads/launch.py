"""Start functions and runs in several processes on this machine, through torchrun's own API."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import select
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from capture.workloads.config import RunConfig, RunResult
from gradstats.errors import GradstatsError
from gradstats.registry import load_file, loaded_files

__all__ = ["SIGNALS", "RunFailedError", "launch", "signals_raise", "start"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a process to end, and that torchrun's agent takes."""

T = TypeVar("T")


class RunFailedError(GradstatsError):
    """A worker process failed. The message says which rank and why."""


def launch(config: RunConfig) -> RunResult:
    """Run a workload in several processes that talk through gloo, over the loopback interface.

    Parameters
    ----------
    config : RunConfig
        Settings of the run; they are checked before any process starts.

    Returns
    -------
    RunResult
        Result of rank 0.

    Raises
    ------
    InputError
        If the settings cannot work.
    RunFailedError
        If a rank fails; the other ranks are stopped.
    """
    config.check()
    # the ranks meet in a file: a store of PyTorch's that is a server would listen on every interface
    with tempfile.TemporaryDirectory(prefix="gradstats-store-") as folder:
        return start(config.nproc, _over_loopback, config, os.path.join(folder, "store"))[0]


def _over_loopback(config: RunConfig, file: str) -> RunResult:
    import torch.distributed as dist

    from capture.workloads.training import worker

    # a user's own choice stays
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return worker(config, dist.FileStore(file, config.nproc))  # type: ignore[attr-defined]


def start(nproc: int, function: Callable[..., T], *args: Any) -> list[T]:
    """Run a function in several processes, under torchrun's elastic agent.

    Parameters
    ----------
    nproc : int
        Number of processes (ranks).
    function : callable
        Function at the top of a module, where the processes find it. They have torchrun's environment variables.
    *args : object
        Arguments of the function; they must be picklable.

    Returns
    -------
    list
        Return value of each rank.

    Raises
    ------
    RunFailedError
        If a rank fails; the others are stopped.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from gradstats.hooks.torch_private import without_names_of_events

    # One process imports what every rank needs, and the ranks are forked from it. They are then not children of this
    # process, and must watch it themselves to end with it.
    forked = hasattr(os, "pidfd_open")
    multiprocessing.set_forkserver_preload(["capture.workloads.forked"])
    with (
        _settings_of_a_launch(),
        without_names_of_events(),
        tempfile.TemporaryDirectory(prefix="gradstats-run-") as logs,
    ):
        launcher = elastic_launch(
            LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=nproc,
                run_id=uuid.uuid4().hex,
                # torchrun's rendezvous in a file, not at a server that would listen on every interface
                rdzv_backend="c10d",
                rdzv_endpoint=os.path.join(logs, "rendezvous"),
                rdzv_configs={"store_type": "file"},
                local_addr="127.0.0.1",
                start_method="forkserver" if forked else "spawn",
                # a failure is reported, not tried again
                max_restarts=0,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            ),
            _rank,
        )
        try:
            # signals_raise() outermost, because the agent leaves handlers of its own behind
            with signals_raise(), _ctrl_c_spares_children():
                parent = os.getpid() if forked else None
                results: dict[int, T] = launcher(parent, loaded_files(), function, args)
        except ChildFailedError as error:
            # the first one: other ranks fail because they have lost it
            rank, failure = error.get_first_failure()
            why = _last_line(failure.message)
            if (
                failure.exitcode == 1 and failure.error_file == "<N/A>"
            ):  # it did not come to the function
                why = 'it ended before it began; call this in a file, below if __name__ == "__main__":'
            raise RunFailedError(f"rank {rank} failed: {why}") from error
    # in the order of ranks, whatever the order in which they ended
    return [results[rank] for rank in range(nproc)]


@contextmanager
def _settings_of_a_launch() -> Iterator[None]:
    """Set what torchrun's agent takes from this process, and restore it: it is the caller's."""
    # the first keeps the agent from making a store for the ranks, which would listen on every interface; the agent
    # itself sets the second
    share = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    variables = {each: os.environ.get(each) for each in (share, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    # RunFailedError says what failed in one line; the agent's tables of tracebacks would bury it
    distributed = logging.getLogger("torch.distributed")
    names = ("torch.distributed.elastic.agent.server.api", "torch.multiprocessing.spawn")
    loggers = {each: each.disabled for each in map(logging.getLogger, names)}
    level = distributed.level
    try:
        os.environ[share] = "1"
        distributed.setLevel(logging.CRITICAL)
        for each in loggers:
            each.disabled = True
        yield
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        distributed.setLevel(level)
        for each, disabled in loggers.items():
            each.disabled = disabled


def _rank(
    parent: int | None, files: list[str], function: Callable[..., T], args: tuple[Any, ...]
) -> T:
    if parent is not None:
        threading.Thread(target=_end_with, args=[os.pidfd_open(parent)], daemon=True).start()
    # Ctrl-C reaches every process of the terminal: the agent reports it once, this process just ends.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    for file in files:
        load_file(file)
    return function(*args)


def _end_with(process: int) -> None:
    """End this process when the process of a pidfd ends, however it ends."""
    # a pidfd becomes readable when its process has ended
    select.select([process], [], [])
    # not sys.exit(), which ends a thread alone
    os._exit(1)


class _Raise:
    """Handler of signals that raises SignalException, but not again within a second."""

    last = -math.inf  # time of the last one, on the monotonic clock, in seconds

    def __call__(self, number: int, frame: object) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        if time.monotonic() - self.last > 1:
            self.last = time.monotonic()
            raise SignalException(f"signal {number}", signal.Signals(number))


_raise = _Raise()


@contextmanager
def signals_raise(*, last: bool = False) -> Iterator[None]:
    """Have a signal that asks this process to end raise, and restore the handlers.

    torchrun's agent does the same while processes run, with handlers of its own that it leaves behind. What comes
    within a second of such a signal is the same impatient person: it would only cut the cleaning up short.

    Parameters
    ----------
    last : bool
        Whether this process ends after such a signal: it then does not listen to another one.

    Raises
    ------
    torch.distributed.elastic.multiprocessing.SignalException
        On SIGINT, SIGTERM, SIGHUP and SIGQUIT. In other threads than the main one nothing is changed.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # not within another such context: nothing has been raised yet
    if signal.getsignal(signal.SIGINT) is not _raise:
        _raise.last = -math.inf
    # that of a library in C cannot be put back, and stays
    dispositions = {each: signal.getsignal(each) for each in SIGNALS}
    handlers = {each: handler for each, handler in dispositions.items() if handler is not None}
    try:
        for each in handlers:
            signal.signal(each, _raise)
        yield
    except SignalException:
        # set here, too, for a handler of the agent's may have raised it
        _raise.last = time.monotonic()
        if last:
            handlers = dict.fromkeys(handlers, lambda *_: None)
        raise
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


@contextmanager
def _ctrl_c_spares_children() -> Iterator[None]:
    """Keep Ctrl-C from processes that are still starting, where each would print a traceback.

    They inherit the signal mask of this thread. Another thread receives the signal, and Python runs the handler here.
    """
    resource_tracker.ensure_running()  # the first process would start it, which clears the mask
    done = threading.Event()
    receiver = threading.Thread(target=done.wait)
    receiver.start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        done.set()
        receiver.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # a handler may raise here


def _last_line(message: object) -> str:
    """Return the line of a worker's error report that names the error."""
    text = str(message)
    if isinstance(message, dict):
        text = str(message.get("message", message))
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
