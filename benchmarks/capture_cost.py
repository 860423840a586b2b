"""Cost of capturing, per training step.

    python benchmarks/capture_cost.py [--workload resnet20-cifar10 --data-dir DIR] [--write]

Each training captures every step of every second block of steps. A captured block is compared with the two beside it,
which are not captured, so that a slow moment of the machine hits both alike; the first step of a block, in which the
writer is still busy with the last one's, is left out. Blocks are short, because the machine's speed changes
within seconds. The table has the median over the blocks of all trainings, with its interval. Exact top-k at 0.001 with
error feedback: both kinds are captured.

One training does not pay for what another left. Traces are removed at the end alone, because ext4 is slow to make files
for some time after it has removed many; and each is written out to the disk before the next training begins. They take
some gigabytes.
Results are stored in docs/results/capture_cost.jsonl; ``--write`` puts the table into docs/measurements.md.
"""

from __future__ import annotations

import os
import tempfile
from itertools import product
from pathlib import Path
from statistics import fmean, median

import numpy as np
from records import RESULTS, Row, command, grid, keep, processor, show, stored
from scipy import stats

from capture.workloads import RunConfig, run

FILE = RESULTS / "capture_cost.jsonl"
BLOCK, SETTLING = 4, 1
"""Steps in a block, and how many of them are left out."""
STORES = {
    "gradients": {},
    "gradients, bfloat16": {"dtype": "bfloat16"},
    "sketches": {"store": "sketches"},
}


def measure(config: RunConfig, blocks: int) -> list[float]:
    """Return how much longer than the steps around them captured ones took, block by block."""
    steps = BLOCK * (2 * blocks + 1)
    at = tuple(step for step in range(steps) if (step // BLOCK) % 2)
    result = run(config.replace(steps=steps, at=at, evaluate=False))
    seconds = np.reshape(result.seconds, (-1, BLOCK))[:, SETTLING:].mean(axis=1)
    return [
        float(seconds[i] / fmean(seconds[[i - 1, i + 1]]) - 1) for i in range(1, len(seconds), 2)
    ]


def table(rows: list[Row]) -> str:
    """Return the costs as Markdown."""
    lines = []
    for r in rows:
        low, high = interval(r["excess"])
        cost = f"{100 * median(r['excess']):+.1f}", f"{100 * low:+.1f} to {100 * high:+.1f}"
        lines.append([r["workload"], f"{r['nproc']} on {r['cores']}", r["stored"], *cost])
    heads = "workload | processes on cores | stored | cost of a captured step %: | 95 % interval:"
    return grid(heads, lines)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median, by order statistics."""
    ordered, n = sorted(values), len(values)
    at = int(stats.binom.ppf(0.025, n, 0.5))
    return ordered[max(at - 1, 0)], ordered[min(n - at, n - 1)]


def main() -> None:
    """Train, and print the table."""
    parser = command(__doc__)
    parser.add_argument("--workload", default="resnet20-digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--blocks", type=int, default=36, help="captured blocks of each training")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each kind")
    options = parser.parse_args()
    excess: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, nproc, name in product(range(options.rounds), (1, 2), STORES):
            config = RunConfig(
                workload=options.workload,
                data_dir=options.data_dir,
                nproc=nproc,
                out=Path(folder, f"{i} {nproc} {name}.zarr"),
                **STORES[name],
            )
            if hasattr(os, "sync"):
                os.sync()  # the last training's trace
            excess.setdefault((nproc, name), []).extend(measure(config, options.blocks))
    found = [
        {
            "workload": options.workload,
            "nproc": nproc,
            "cores": os.cpu_count(),
            "processor": processor(),
            "stored": name,
            "excess": values,
        }
        for (nproc, name), values in excess.items()
    ]
    keep(FILE, [*(r for r in stored(FILE) if r["workload"] != options.workload), *found])
    show({"capture cost": table(stored(FILE))}, options.write)


if __name__ == "__main__":
    main()
