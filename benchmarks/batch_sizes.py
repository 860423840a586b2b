"""RedSync's table 2: test error by batch size, with and without compression.

    python benchmarks/batch_sizes.py [--data-dir DIR] [--seeds N] [--write]

Trains as benchmarks/plateau.py does, on as many images in all with every batch size, so that four times the batch is a
quarter of the steps. Learning rate and momentum stay, as the paper names one setting; warm-ups are the same share of a
run. Runs that plateau.py has stored are taken from there. Each run is stored in docs/results/batch_sizes.jsonl as soon
as it ends, and is not repeated, so the program can be interrupted. The table is printed at the end; ``--write`` also
puts it into docs/workloads.md.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from plateau import DENSE, OPTIONS, interval, one
from records import RESULTS, Row, by, command, complete, grid, show, stored

from capture.workloads import RunConfig
from gradstats.compressors import compressor_class

FILE = RESULTS / "batch_sizes.jsonl"
SYSTEMS = (DENSE, "dense-bf16", "redsync", "redsync-quantised")
BATCHES = (64, 256, 1024)
"""Images of a step, of all processes together."""
RATIO = 0.001
WARM_UP = 20
"""One step in so many at the beginning has a rising learning rate."""


def train(system: str, batch: int, seed: int, data_dir: Path | None) -> Row:
    """Train once, and return the row that is stored."""
    base = RunConfig(workload="resnet8-cifar16", data_dir=data_dir, compressor=system, seed=seed)
    steps = base.setting("steps") * base.setting("batch_size") * base.nproc // batch
    ratio = RATIO if compressor_class(system).has_ratio else 1.0
    for row in stored(RESULTS / "plateau-resnet8-cifar16.jsonl"):
        same = (row["compressor"], row["ratio"], row["seed"]) == (system, ratio, seed)
        if same and row["steps"] == steps:  # the batch of that experiment
            return {"batch": batch, **row}
    config = base.replace(
        ratio=ratio,
        steps=steps,
        batch_size=batch // base.nproc,
        lr_warm_up=steps // WARM_UP,
        momentum=base.replace(compressor=DENSE).training().momentum,
        nesterov="dgc",
        options=OPTIONS.get(system, {}),
        label=f"{system}, batch {batch}, seed {seed}",
    )
    return {"batch": batch, **one(config)}


def table(rows: list[Row]) -> str:
    """Return the test error by system and batch size as Markdown, with its 95 % interval over the seeds."""
    batches = [batch for batch in BATCHES if any(row["batch"] == batch for row in rows)]
    lines = []
    for system in SYSTEMS:
        cells = []
        for batch in batches:
            own = [r for r in rows if (r["compressor"], r["batch"]) == (system, batch)]
            errors = [100 * (1 - row["accuracy"]) for row in own if "problem" not in row]
            shown = "{:.1f} ± {:.1f}".format(*interval(errors)) if errors else "–"
            cells.append(
                shown if len(errors) == len(own) else f"{shown}, {len(errors)} of {len(own)}"
            )
        lines.append([f"`{system}`", *cells])
    return grid(" | ".join(["test error %", *(f"{batch:,}:" for batch in batches)]), lines)


def main() -> None:
    """Run what is not stored yet, and print the table."""
    parser = command(__doc__, "workloads.md")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    options = parser.parse_args()
    cases = ((s, b, seed) for seed, b, s in product(range(options.seeds), BATCHES, SYSTEMS))
    key = by("compressor", "batch", "seed")
    rows = complete(FILE, key, cases, lambda *case: train(*case, options.data_dir))
    show({"batch sizes": table(rows)}, options.write, "workloads.md")


if __name__ == "__main__":
    main()
