"""Disks that are full, read-only, slow, failing, or gone: training goes on, warns once, and records nothing false."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from support.readers import assert_all_agree

from capture import Capture, CaptureWarning
from faults.kills import Known, expected, true_steps
from faults.processes import start
from gradstats import open_trace
from gradstats.errors import TraceError
from gradstats.trace import is_trace

STEPS = 60
_NEW_NAMESPACE, _READ_ONLY, _REMOUNT, _PRIVATE = 0x20000, 1, 32, 1 << 18 | 1 << 14

FAILING = Path(__file__).with_name("failing_disk.c")
"""Library that makes writes below a folder fail or wait, loaded before libc."""


def _mount(options: int, data: str = "", folder: str = "/", kind: str = "none") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", folder.encode(), kind.encode(), options, data.encode()):
        number = ctypes.get_errno()
        raise BlockingIOError(number, "busy") if number == errno.EBUSY else OSError(number, "mount")


def own_disk(folder: Path, kilobytes: int) -> bool:
    """Put a small disk of this process's own at a folder, if it may: that takes root."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.unshare(_NEW_NAMESPACE):
            return False
        _mount(_PRIVATE)
        _mount(0, f"size={kilobytes}k", str(folder), "tmpfs")
    except OSError:
        return False
    return True


def train(path: Path, seed: int, happen: Callable[[], None]) -> list[str]:
    """Train with a capture; let the fault happen at a random step. Return the warnings."""
    rng = random.Random(seed)
    net = Known()
    at = rng.randrange(STEPS)
    options = {"store": rng.choice(["gradients", "sketches"]), "buffers": rng.choice([1, 3])}
    total = rng.choice([None, STEPS])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Capture(path, net, kinds=["gradient"], total_steps=total, **options) as capture:
            for step in range(STEPS):
                if step == at:
                    happen()
                net.zero_grad()
                net(step, 0).backward()
                capture.step(loss=step / 2)
                flat = torch.cat([p.grad.reshape(-1) for p in net.parameters()]).numpy()
                assert np.array_equal(flat, expected(step, 0)), "the training saw another gradient"
    said = [str(w.message) for w in caught if issubclass(w.category, CaptureWarning)]
    assert len(said) == len(caught), [str(w.message) for w in caught]
    return [text for text in said if "is slower than the training" not in text]  # disk or processor


def nothing_false(path: Path) -> int:
    """Check every step that is left of a trace; return how many there are."""
    if not is_trace(path):
        return 0
    trace = open_trace(path)
    total = 0
    for rank in trace.ranks:
        steps = true_steps(trace, rank)
        assert steps == sorted(set(steps))
        assert steps == [] or 0 <= steps[0] <= steps[-1] < STEPS
        total += len(steps)
    return total


def _on_own_disk(folder: Path, seed: int, fault: str, reports: Connection) -> None:
    if not own_disk(folder, 3000):
        reports.send("not permitted here")
        return
    path = folder / "run.zarr"
    ballast = folder / "ballast"

    def happen() -> None:
        if fault == "full":
            room = random.Random(seed).choice([0, 4096, 40_000])
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
                while shutil.disk_usage(folder).free > room:
                    stream.write(bytes(4096))
        elif fault == "read-only":
            while True:  # refused while a file is open for writing
                with contextlib.suppress(BlockingIOError):
                    _mount(_REMOUNT | _READ_ONLY, "size=3000k", str(folder), "tmpfs")
                    break
        else:
            path.rename(folder / "elsewhere")

    said = train(path, seed, happen)
    if fault == "read-only":
        _mount(_REMOUNT, "size=3000k", str(folder), "tmpfs")
    ballast.unlink(missing_ok=True)
    if fault == "vanished":
        assert said, "no warning"
        path = folder / "elsewhere"
    left = nothing_false(path)
    if left:
        assert_all_agree(path)
    assert len(said) <= 1, said
    assert said or left == STEPS, f"{left} steps of {STEPS}, and no warning"
    reports.send("one warning" if said else "complete")


def _trial(fault: str, number: int, folder: Path) -> str:
    process = start(_on_own_disk, folder, number, fault)
    reports = process.rest()
    assert len(reports) == 1, "the training died"
    return reports[0]


full = functools.partial(_trial, "full")
read_only = functools.partial(_trial, "read-only")
vanished = functools.partial(_trial, "vanished")


@functools.cache
def _library(cache: Path) -> Path | None:
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = cache / "gradstats-failing-disk.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, FAILING, "-ldl"]
    subprocess.run(command, check=True)
    return library


def failing(number: int, folder: Path) -> str:
    """Let writes end in EIO, or take long, from a random one on, for a while or for good."""
    rng = random.Random(number)
    library = _library(folder.parent)
    if library is None:
        return "no C compiler"
    first = rng.randrange(1, 400)
    fault = {
        "FAIL_BELOW": str(folder),
        "FAIL_FROM": str(first),
        "FAIL_TO": str(rng.choice([first, first + 20, 10**9])),
        "FAIL_MICROSECONDS": str(rng.choice([0, 0, 20_000])),
    }
    done = subprocess.run(
        [sys.executable, __file__, folder / "run.zarr", str(number)],
        env={
            **os.environ,
            **fault,
            "LD_PRELOAD": str(library),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    said = json.loads(done.stdout)
    left = nothing_false(folder / "run.zarr")
    if left:
        assert_all_agree(folder / "run.zarr")
    assert len(said) <= 1, said
    slow = fault["FAIL_MICROSECONDS"] != "0"
    assert said or left == STEPS, f"{left} steps of {STEPS}, and no warning"
    assert not (slow and said), said
    return "complete" if left == STEPS else "one warning"


if __name__ == "__main__":
    try:
        print(json.dumps(train(Path(sys.argv[1]), int(sys.argv[2]), lambda: None)))
    except TraceError as error:  # the trace could not be created: said before the first step
        print(json.dumps([str(error)]))
