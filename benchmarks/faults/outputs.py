"""Commands that are killed while they replace a file: it is the old one or the new one, whole."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from support.traces import drifting_trace

from faults.processes import start
from gradstats import open_trace

OLD = b"what was there before\n"
COMMANDS = {
    "fit.csv": ("fit", "{trace}", "--format", "csv", "-o", "{out}"),
    "quality.json": ("quality", "{trace}", "--format", "json", "-o", "{out}"),
    "pot.tex": ("pot", "{trace}", "--format", "latex", "-o", "{out}"),
    "report.html": ("report", "{trace}", "-o", "{out}"),
}


@functools.cache
def _trace() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="gradstats-trace-"))
    drifting_trace(folder / "run.zarr", range(4), lambda step: 1 + step, ranks=(0,))
    return folder / "run.zarr"


def _run(command: tuple[str, ...], out: Path, reports: Connection) -> None:
    from gradstats.cli import main

    reports.send("ready")
    arguments = [part.format(trace=_trace_of(out), out=out) for part in command]
    try:
        main(arguments)
    except SystemExit as end:
        reports.send(end.code or 0)
        return
    reports.send(0)


def _trace_of(out: Path) -> Path:
    return out.parent / "run.zarr"


@functools.cache
def _whole(name: str) -> tuple[float, bytes]:
    """Return the seconds that a command takes, and what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, name)
        shutil.copytree(_trace(), _trace_of(out))
        process = start(_run, COMMANDS[name], out)
        process.wait_for("ready")
        started = time.monotonic()
        process.wait_for(0, seconds=240)
        return time.monotonic() - started, out.read_bytes()


def replaced(number: int, folder: Path) -> str:
    """Kill a command at a random moment, most often near its end."""
    name = list(COMMANDS)[number % len(COMMANDS)]
    rng = random.Random(number)
    seconds, _ = _whole(name)
    out = folder / name
    out.write_bytes(OLD)
    shutil.copytree(_trace(), _trace_of(out))
    process = start(_run, COMMANDS[name], out)
    process.wait_for("ready")
    time.sleep(rng.choice([rng.uniform(0, 1.2), rng.uniform(0.9, 1.1)]) * seconds)
    process.kill()
    process.rest()
    found = out.read_bytes()
    if found == OLD:
        return "the old one"
    ends = {".csv": b"\n", ".json": b"]\n", ".tex": b"}\n", ".html": b"</html>\n"}
    assert found.endswith(ends[out.suffix]), found[-40:]
    lines = _whole(name)[1].count(b"\n")
    assert found.count(b"\n") == lines, f"{found.count(10)} lines of {lines}"
    trace = open_trace(_trace_of(out))
    assert np.isfinite(trace.read(0)).all()
    return "the new one"
