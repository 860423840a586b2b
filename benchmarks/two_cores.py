"""Gain of a second thread in each pass, compared with the gain of pure arithmetic on this machine.

    python benchmarks/two_cores.py [--rounds 15] [--numel 26000000]

The reference is arithmetic in registers: no memory, no interpreter, and two threads that wait for nothing. No pass
can gain more on this machine. Rounds are interleaved, so that every row meets the same neighbours on the host. `core
ratio` is the CPU time of the slower half over that of the faster one, for the same work; it is 1 on a machine without
neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np

from gradstats.primitives import exceedances, histogram, moments, select, set_num_threads, warm_up
from gradstats.thresholds.bench import sample_gradient


@numba.njit(nogil=True, cache=True)
def _spin(n: int) -> float:
    x = 0.5
    for _ in range(n):
        x = 3.7 * x * (1.0 - x)
    return x


def _timed_spin(n: int) -> float:
    started = time.thread_time()
    _spin(n)
    return time.thread_time() - started


def main() -> None:
    """Time the passes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds over all passes")
    parser.add_argument("--numel", type=int, default=26_000_000, help="elements of the data")
    options = parser.parse_args()
    warm_up()
    _spin(1)
    x = sample_gradient(options.numel)
    rare, common = (float(np.quantile(np.abs(x[::37]), 1 - r)) for r in (0.001, 0.1))
    passes: dict[str, Callable[[], object]] = {
        "moments": lambda: moments(x),
        "histogram, 10 bits": lambda: histogram(x, 10),
        "exceedances": lambda: exceedances(x, rare),
        "select 0.001": lambda: select(x, rare),
        "select 0.1": lambda: select(x, common),
    }
    work = 4_000_000
    pool = ThreadPoolExecutor(2)
    core_ratios: list[float] = []

    def arithmetic(threads: int) -> None:
        if threads == 1:
            _spin(work)
            return
        halves = list(pool.map(_timed_spin, [work // 2] * 2))
        core_ratios.append(max(halves) / min(halves))

    seconds: dict[str, dict[int, list[float]]] = {
        n: {1: [], 2: []} for n in ["arithmetic", *passes]
    }
    for round_ in range(options.rounds + 1):
        for threads in (1, 2):
            set_num_threads(threads)
            for name in seconds:
                started = time.perf_counter()
                arithmetic(threads) if name == "arithmetic" else passes[name]()
                if round_:
                    seconds[name][threads].append(time.perf_counter() - started)
    print(
        f"{'pass':20} {'1 thread':>9} {'2 threads':>9} {'gain':>6} {'quartiles':>12} of arithmetic's"
    )
    reference = 1.0
    for name, by_threads in seconds.items():
        gains = [a / b for a, b in zip(by_threads[1], by_threads[2], strict=True)]
        low, middle, high = statistics.quantiles(gains, n=4)
        one, two = (statistics.median(by_threads[n]) * 1e3 for n in (1, 2))
        reference = middle if name == "arithmetic" else reference
        print(
            f"{name:20} {one:6.1f} ms {two:6.1f} ms {middle:6.2f} {low:5.2f}-{high:5.2f} {middle / reference:8.2f}"
        )
    low, middle, high = statistics.quantiles(core_ratios, n=4)
    print(f"core ratio {middle:.2f} (quartiles {low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
