"""Processor time of a first start, when no compiled code is kept yet, and of the next one.

    .venv/bin/python benchmarks/first_start.py [--write]

Every case is a process of its own, with an empty folder for compiled code and then with what the first left there. Rows
are stored in docs/results/first_start.json; ``--write`` also puts the table into docs/measurements.md.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

from records import RESULTS, ROOT, Row, grid, measure_into, processor

FILE = RESULTS / "first_start.json"
_GRADIENT = (
    "import numpy, gradstats; x = numpy.random.default_rng(0).laplace(size=100_000).astype('f4'); "
)
_STATE = "from gradstats.compressors import make_compressor; from gradstats.hooks import CompressionState; "
CASES = {
    "`import gradstats, torch`": "import gradstats, torch",
    '`gradstats.threshold(x, 0.001, "exact")`': _GRADIENT
    + "gradstats.threshold(x, 0.001, 'exact')",
    '`gradstats.threshold(x, 0.001, "sidco-e")`': _GRADIENT
    + "gradstats.threshold(x, 0.001, 'sidco-e')",
    '`CompressionState(make_compressor("topk", 0.001))`': _STATE
    + "CompressionState(make_compressor('topk', 0.001))",
    '`CompressionState(make_compressor("sidco-e", 0.001))`': _STATE
    + "CompressionState(make_compressor('sidco-e', 0.001))",
    "`gradstats.warm_up()`": "import gradstats; gradstats.warm_up()",
}


def seconds(code: str, cache: str) -> float:
    """Return the processor time of a process that runs some code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def everything() -> list[Row]:
    """Return a row for each case, the least of three first starts and of three next ones."""
    rows: list[Row] = []
    for case, code in CASES.items():
        first, later = [], []
        for _ in range(3):
            with tempfile.TemporaryDirectory() as cache:
                first.append(seconds(code, cache))
                later.append(seconds(code, cache))
        rows.append(
            {"case": case, "first": min(first), "next": min(later), "processor": processor()}
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = ([r["case"], f"{r['first']:.1f}", f"{r['next']:.1f}"] for r in rows)
    return grid("process | first start, s: | next ones, s:", lines)


if __name__ == "__main__":
    measure_into("first start", FILE, everything, table, __doc__)
