"""Memory that a command takes for a large gradient: what is the process's own, without the file that it maps.

    .venv/bin/python benchmarks/memory.py [--write]

Every case is a process of its own. Rows are stored in docs/results/memory.json; ``--write`` also puts the table into
docs/measurements.md.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from records import RESULTS, Row, grid, measure_into, processor
from safetensors.torch import save_file

FILE = RESULTS / "memory.json"
COMMANDS = ("info", "fit", "compressibility", "quality")
SIZES = (30_000_000, 120_000_000)
FORMATS = ("npy", "npy, Fortran order", "safetensors, bfloat16")


def make(folder: Path, form: str, numel: int) -> Path:
    """Write a gradient of Laplace's law, a matrix, piece by piece where the format lets one."""
    rng, shape = np.random.default_rng(0), (numel // 1000, 1000)
    if form == "safetensors, bfloat16":
        path = folder / "g.safetensors"
        values = torch.empty(shape, dtype=torch.bfloat16)
        for row in values.split(10_000):
            row.copy_(torch.from_numpy(rng.laplace(size=tuple(row.shape))))
        save_file({"g": values}, path)
        return path
    path = folder / "g.npy"
    whole = np.lib.format.open_memmap(
        path, mode="w+", dtype=np.float32, shape=shape, fortran_order="Fortran" in form
    )
    for start in range(0, shape[0], 10_000):
        part = whole[start : start + 10_000]
        part[...] = rng.laplace(size=part.shape)
    whole.flush()
    return path


def megabytes(*command: str) -> float:
    """Return the most memory of its own that a process had, looked at every 10 ms, in MB."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    status, most = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
        most = max(most, int(found[1]) if found else 0)
        time.sleep(0.01)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return most * 1024 / 1e6


def everything() -> list[Row]:
    """Return a row for each format, size and command."""
    gradstats = str(Path(sys.executable).with_name("gradstats"))
    rows: list[Row] = []
    for form, numel in itertools.product(FORMATS, SIZES):
        with tempfile.TemporaryDirectory() as folder:
            path = make(Path(folder), form, numel)
            size = path.stat().st_size / 1e6
            for command in COMMANDS:
                most = megabytes(gradstats, "--quiet", command, str(path))
                row = {"format": form, "numel": numel, "file": size, "command": command}
                rows.append(row | {"megabytes": most, "processor": processor()})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = []
    for form, numel in itertools.product(FORMATS, SIZES):
        own = [r for r in rows if (r["format"], r["numel"]) == (form, numel)]
        cells = (f"{r['megabytes']:.0f}" for r in own)
        lines.append([form, f"{numel / 1e6:.0f} million", f"{own[0]['file']:.0f}", *cells])
    commands = (f"`{c}`, MB:" for c in COMMANDS)
    return grid(" | ".join(["format", "elements:", "file, MB:", *commands]), lines)


if __name__ == "__main__":
    measure_into("memory", FILE, everything, table, __doc__)
