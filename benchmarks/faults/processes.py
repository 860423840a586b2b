"""Processes that a trial starts, stops and kills."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked import CONTEXT
from support.readers import received

__all__ = ["Child", "check_line", "start", "start_ranks"]

GROUP_TIMEOUT_S = 6
"""How long a rank waits for another."""


class Child:
    """A process, and what it reports."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._reports, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=target, args=(*arguments, theirs))
        self._process.start()
        self.kill = self._process.kill
        self.join = self._process.join
        theirs.close()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def wait_for(self, word: object, seconds: float = 60) -> None:
        """Read the next report, which must be `word`."""
        assert self._reports.poll(seconds), f"no report {word!r} for {seconds} s"
        got = self._reports.recv()
        assert got == word, got

    def report(self, seconds: float) -> Any:
        """Return the next report; None if the process is gone, and False if it is silent for so long."""
        if not self._reports.poll(seconds):
            return False
        with contextlib.suppress(EOFError):
            return self._reports.recv()
        return None

    def rest(self) -> list[Any]:
        """Return the reports that are left, once the process is gone."""
        self.join()
        return received(self._reports)


def check_line(error: Exception) -> None:
    """Check that an error is one line that a terminal can show."""
    text = str(error)
    assert "\n" not in text, text
    assert 0 < len(text) < 2000, text[:200]
    assert "weights_only" not in text, text


def start(target: Callable[..., None], *arguments: Any) -> Child:
    """Start ``target(*arguments, reports)`` in a process of its own."""
    return Child(target, *arguments)


def start_ranks(
    world: int, folder: Path, target: Callable[..., None], *arguments: Any
) -> list[Child]:
    """Start ``target(rank, world, *arguments, reports)`` on every rank of a new gloo group."""
    return [Child(_rank, rank, world, folder, target, *arguments) for rank in range(world)]


def _rank(
    rank: int,
    world: int,
    folder: Path,
    target: Callable[..., None],
    *arguments: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    reports: Connection = arguments[-1]
    target(rank, world, *arguments[:-1], reports)
    reports.close()
    os._exit(0)  # a group that lost a rank is beyond a farewell
