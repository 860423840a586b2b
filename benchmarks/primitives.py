"""Time of one pass of each primitive, compared with reading the data once.

    python benchmarks/primitives.py [--numel 26000000] [--write]

Laplace data, median of 11 interleaved rounds, with one and with two threads. Three primitives are also timed in
NumPy, on chunks of 512 kB. Rows are stored in docs/results/primitives.json; ``--write`` also puts the table into
docs/measurements.md.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from records import RESULTS, Row, command, dump, grid, show

from gradstats.primitives import (
    exceedances,
    histogram,
    moments,
    select,
    set_num_threads,
    warm_up,
)
from gradstats.primitives.ratio import RATIOS

FILE = RESULTS / "primitives.json"
CHUNK = 1 << 17
"""Elements of 512 kB, which stay in a cache."""


def numpy_moments(x):
    """Return sum, sum of squares, largest, zeros and not finite elements of the magnitudes."""
    total = squares = largest = 0.0
    zeros = bad = 0
    buffer = np.empty(CHUNK, np.float32)
    for start in range(0, x.size, CHUNK):
        chunk = x[start : start + CHUNK]
        a = np.abs(chunk, out=buffer[: chunk.size])
        total += float(a.sum(dtype=np.float64))
        squares += float(np.dot(a, a))
        largest = max(largest, float(a.max()))
        zeros += a.size - np.count_nonzero(a)
        bad += a.size - np.count_nonzero(np.isfinite(a))
    return total, squares, largest, zeros, bad


def numpy_histogram(x):
    """Return how many magnitudes fall into each bin of exponent and 7 bits of mantissa."""
    counts = np.zeros(1 << 15, np.int64)
    for start in range(0, x.size, CHUNK):
        bits = x[start : start + CHUNK].view(np.uint32)
        counts += np.bincount((bits & 0x7FFFFFFF) >> 16, minlength=1 << 15)
    return counts


def numpy_select(x, eta):
    """Return positions and values of magnitudes from a threshold on."""
    indices, values = [], []
    buffer = np.empty(CHUNK, np.float32)
    for start in range(0, x.size, CHUNK):
        chunk = x[start : start + CHUNK]
        kept = np.flatnonzero(np.abs(chunk, out=buffer[: chunk.size]) >= eta)
        indices.append(kept + start)
        values.append(chunk[kept])
    return np.concatenate(indices), np.concatenate(values)


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown; the first is what the others are compared with."""
    lines, stream = [], rows[0]["one"]
    for row in rows:
        one, two = row["one"], row["two"]
        cells = f"{1e3 * one:.1f}", f"{one / stream:.2f}", f"{1e3 * two:.1f}", f"{one / two:.2f}"
        lines.append([row["pass"], *cells])
    return grid("pass | ms: | streams: | ms, 2 threads: | faster by:", lines)


def main() -> None:
    """Time the passes, and print the table."""
    parser = command(__doc__)
    parser.add_argument("--numel", type=int, default=26_000_000, help="elements of the data")
    options = parser.parse_args()
    numel = options.numel
    x = np.random.default_rng(0).laplace(size=numel).astype(np.float32)
    tensor = torch.from_numpy(x)
    warm_up()
    runs = {
        "torch.sum, one stream": tensor.sum,
        "moments, no logarithms": lambda: moments(x, log=False),
        "moments": lambda: moments(x),
        "exceedances": lambda: exceedances(x, 1.4),
        "histogram, 7 bits": lambda: histogram(x),
        "histogram, 10 bits": lambda: histogram(x, 10),
        **{f"select {r:g}": lambda r=r: select(x, -np.log(r)) for r in RATIOS[::-1]},
        "NumPy moments": lambda: numpy_moments(x),
        "NumPy histogram, 7 bits": lambda: numpy_histogram(x),
        **{f"NumPy select {r:g}": lambda r=r: numpy_select(x, -np.log(r)) for r in RATIOS[::-1]},
    }
    columns: dict[int, dict[str, float]] = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        set_num_threads(threads)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(11):
            for name, run in runs.items():
                if name.startswith("moments, no"):
                    time.sleep(0.02)  # torch's threads spin on for a while
                started = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - started)
        columns[threads] = {name: statistics.median(s) for name, s in seconds.items()}
    rows = [{"pass": name, "one": columns[1][name], "two": columns[2][name]} for name in runs]
    dump(FILE, rows)
    show({"passes": table(rows)}, options.write)


if __name__ == "__main__":
    main()
