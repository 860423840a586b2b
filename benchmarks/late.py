"""SIDCo's figures 2 and 8 late in a training: gradients at steps 100, 1,000 and 10,000, and how its laws fit them.

    .venv/bin/python benchmarks/late.py [WORKLOAD] --data-dir DIR --work FOLDER [--steps S ...] [--write]

Trains with exact top-k at ratio 0.001, without and with error feedback, to the last of the steps, at a constant
learning rate, and captures the gradient of rank 0, before the residual is added. A training that is stopped goes on
from its checkpoint in FOLDER. What is found is stored in docs/results/late.jsonl when a training ends, and is not
repeated. The default is ResNet-8 on small images; ``resnet20-cifar10`` is the paper's, which takes an hour or two.
The table is printed at the end; ``--write`` also puts it into docs/theory.md.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
from records import RESULTS, Row, by, command, grid, missing, show, store, stored

import gradstats
from capture.workloads import WORKLOADS, RunConfig, run
from gradstats.statistics.distributions import SIDS
from gradstats.statistics.goodness import goodness

FILE = RESULTS / "late.jsonl"
HEADS = (
    "workload", "error feedback", "step:", "largest 1 %: share of ‖g‖²:", "largest ÷ mean:", "p:",
)  # fmt: skip
STEPS = (100, 1000, 10_000)
EVERY = 500
"""Steps from one checkpoint to the next."""
KEY = by("workload", "feedback", "step")
SHARE = 0.01
"""The largest elements whose share of the squared norm is looked at."""


def describe(gradient: np.ndarray) -> Row:
    """Return how concentrated a gradient is, and the distance of each of SIDCo's laws from it."""
    magnitudes = np.sort(np.abs(gradient.astype(np.float64)))[::-1]
    squares = magnitudes**2
    largest = max(1, round(SHARE * len(magnitudes)))
    found: Row = {
        "largest": float(squares[:largest].sum() / squares.sum()),
        "peak": float(magnitudes[0] / magnitudes.mean()),
        "p": float(gradstats.compressibility(gradient).p),
    }
    found |= {law: goodness(gradstats.fit(gradient, law), gradient).ks for law in SIDS}
    return found


def train(
    workload: str, feedback: bool, steps: tuple[int, ...], options: argparse.Namespace
) -> None:
    """Train, or go on, and store what the captured gradients are like."""
    name = f"{workload}-{'with' if feedback else 'without'}"
    config = RunConfig(
        workload=workload, data_dir=options.data_dir, steps=steps[-1] + 1, at=steps, ranks=(0,), kinds=("gradient",),
        error_feedback=feedback, lr_schedule="constant", evaluate=False, out=options.work / f"{name}.zarr",
        checkpoint=options.work / name, checkpoint_every=EVERY, label=name,
    )  # fmt: skip
    run(config)
    for trace in map(gradstats.open_trace, sorted(options.work.glob(f"{name}*.zarr"))):
        for step in trace.steps():
            row = {"workload": workload, "feedback": feedback, "step": int(step)}
            if missing(FILE, KEY, [KEY(row)]):
                store(FILE, row | describe(np.asarray(trace.read(step))))


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = []
    for r in rows:
        cells = [f"`{r['workload']}`", "with" if r["feedback"] else "without", f"{r['step']:,}"]
        cells += [f"{100 * r['largest']:.0f} %", f"{r['peak']:.0f}", f"{r['p']:.2f}"]
        lines.append([*cells, *(f"{r[law]:.3f}" for law in SIDS)])
    return grid(" | ".join([*HEADS, *(f"KS, `{law}`:" for law in SIDS)]), lines)


def main() -> None:
    """Run what is not stored yet, and print the table."""
    parser = command(__doc__, "theory.md")
    parser.add_argument("workload", nargs="?", default="resnet8-cifar16", choices=WORKLOADS)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for checkpoints and traces"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    options = parser.parse_args()
    steps = tuple(sorted(options.steps))
    left = missing(FILE, KEY, product([options.workload], (False, True), steps))
    for feedback in sorted({feedback for _, feedback, _ in left}):
        train(options.workload, feedback, steps, options)
    show({"late": table(stored(FILE))}, options.write, "theory.md")


if __name__ == "__main__":
    main()
