"""A long capture: memory, files, threads and the time of a step stay where they are."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path

import numpy as np

from capture import Capture, CaptureWarning
from faults.kills import Known, expected
from gradstats import open_trace

PARTS = 20


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(number: int, folder: Path, steps: int = 100_000, slower: float = 2) -> str:
    """Capture many steps; compare the last third of the run with the middle one."""
    net = Known()
    memory, files, threads = [], [], []
    seconds = np.full(
        steps, np.nan
    )  # of its full size from the start, so that it is not what grows
    warnings.simplefilter("ignore", CaptureWarning)  # training may wait for the disk
    with Capture(folder / "run.zarr", net, kinds=["gradient"], total_steps=steps) as capture:
        for step in range(steps):
            started = time.perf_counter()
            net.zero_grad()
            net(step % 64, 0).backward()
            capture.step(loss=step / 2)
            seconds[step] = time.perf_counter() - started
            if step % (steps // PARTS) == 0:
                memory.append(_resident())
                files.append(len(os.listdir("/proc/self/fd")))
                threads.append(threading.active_count())
    third = steps // 3
    middle, last = np.median(seconds[third:-third]), np.median(seconds[-third:])
    tenth = PARTS // 3
    grown = np.median(memory[-tenth:]) - np.median(memory[tenth:-tenth])
    assert grown < 4 << 20, f"{grown:.0f} bytes more in memory: {memory}"
    # Now and then one more, when the writer is at work: what leaks is there at every look, and grows without end.
    for opened in (files, threads):
        assert min(opened[-tenth:]) <= max(opened[tenth:-tenth]), opened
    # two cores that others use too: a time that grows with the steps would be far above
    assert last < slower * middle, f"{middle} s a step, later {last} s"
    trace = open_trace(folder / "run.zarr")
    assert trace.steps() == list(range(steps))
    assert trace.scalars()["loss"].tolist() == [s / 2 for s in range(steps)]
    for step in range(0, steps, max(1, steps // 50)):
        assert (trace.read(step) == expected(step % 64, 0)).all()
    return "flat"


def short(number: int, folder: Path) -> str:
    """Capture fewer steps, beside other tests that take the processor."""
    return soak(number, folder, steps=2000, slower=10)
