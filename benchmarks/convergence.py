"""Real training with every compressor and without one, from the same seed and for as many steps.

    python benchmarks/convergence.py WORKLOAD [--data-dir DIR] [--times] [--write]

Trains in two processes. Each run is stored in docs/results/convergence-WORKLOAD.jsonl as soon as it ends, and is not
repeated, so the program can be interrupted. Losses do not depend on the clock. Times do: measure them on a quiet
machine with ``--times``, in short runs of their own. The table is printed at the end; ``--write`` also puts it into
docs/systems.md.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from pathlib import Path

from records import RESULTS, Row, by, command, complete, grid, show, stored

from capture.workloads import RunConfig, RunResult, run, workload_info
from capture.workloads.launch import RunFailedError
from gradstats.compressors import COMPRESSORS

LAST = 25
"""How many of the last steps the training loss is averaged over."""
UNSEEN = {
    "accuracy": "accuracy",
    "perplexity": "perplexity",
    "character_error_rate": "character errors",
}
"""What is measured on unseen data, and its words in the table; a task has one of them."""


def one(compressor: str, options: argparse.Namespace) -> Row:
    """Train once, and return the row of the table."""
    names = ("workload", "data_dir", "nproc", "steps", "hidden", "vocab", "ratio")
    settings = {name: getattr(options, name) for name in names}
    try:
        result = run(RunConfig(**settings, compressor=compressor, label=compressor))
    except RunFailedError as error:  # a diverging system is a result
        return {"compressor": compressor, "problem": str(error)}
    return {"compressor": compressor, **measures(result)}


def measures(result: RunResult, last: int = LAST) -> Row:
    """Return the fields of a row that a run gave, with the loss of its last steps."""
    records = result.records
    warm = slice(len(result.seconds) // 10, None)  # the first tenth warms up

    def mean(values: list[float]) -> float:
        return statistics.fmean(values) if values else math.nan

    def per_k(field: str) -> float:
        return mean([r[field] / r["target"] for r in records if r["target"]])

    split = {f: mean([r[f"{f}_seconds"] for r in records[warm]]) for f in ("select", "communicate")}
    step = statistics.median(result.seconds[warm])
    return {
        "loss": mean([loss if math.isfinite(loss) else 1e9 for loss in result.losses[-last:]]),
        "accuracy": result.accuracy,
        "perplexity": result.perplexity,
        "word_error_rate": result.word_error_rate,
        "character_error_rate": result.character_error_rate,
        "quality": per_k("selected"),
        "build_up": per_k("union"),
        "bytes": mean([r["bytes_sent"] for r in records]) if records else 4.0 * result.numel,
        "step": step,
        "compute": step - (sum(split.values()) if records else math.nan),
        **split,
    }


def table(rows: list[Row], times: list[Row]) -> str:
    """Return the runs as Markdown."""
    unseen = next((f for f in UNSEEN if any(r.get(f, 0) > 0 for r in rows)), "perplexity")
    lines = []
    clock = {r["compressor"]: r for r in times if "problem" not in r}
    for row in sorted(rows, key=lambda r: [*COMPRESSORS].index(r["compressor"])):
        name = f"`{row['compressor']}`"
        if "problem" in row:
            step = re.search(r"step \d+", str(row["problem"]))
            lines.append([name, f"diverged, {step[0]}" if step else "failed", *["–"] * 7])
            continue
        value = row[unseen]
        final = f"{value:.0f}" if unseen == "perplexity" else f"{100 * value:.1f} %"
        cells = [name, f"{row['loss']:.2f}", final]
        cells += ["–" if math.isnan(row[f]) else f"{row[f]:.2f}" for f in ("quality", "build_up")]
        cells += [f"{row['bytes']:,.0f}"]
        timed = clock.get(row["compressor"], {})
        for field, digits in (("step", 0), ("select", 1), ("communicate", 1)):
            value = 1e3 * timed.get(field, math.nan)
            cells += ["–" if math.isnan(value) else f"{value:.{digits}f}"]
        lines.append(cells)
    head = (
        f"compressor | loss: | test {UNSEEN[unseen]}: | k̂/k: | union/k: | bytes/step: | ms/step: | "
    )
    return grid(f"{head}select: | communicate:", lines)


def main() -> None:
    """Run what is not stored yet, and print the table."""
    parser = command(__doc__, "systems.md")
    parser.add_argument("workload", nargs="?", default="resnet20-digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument(
        "--only", nargs="*", default=[*COMPRESSORS], choices=COMPRESSORS, metavar="NAME"
    )
    parser.add_argument(
        "--times", action="store_true", help="store these runs as the times of the table"
    )
    options = parser.parse_args()
    workload_info(options.workload)
    kinds = {
        name: RESULTS / f"{name}-{options.workload}.jsonl" for name in ("convergence", "times")
    }
    path = kinds["times" if options.times else "convergence"]
    names = [(name,) for name in options.only if name != "exact"]  # exact and topk are the same
    complete(path, by("compressor"), names, lambda name: one(name, options))
    text = table(stored(kinds["convergence"]), stored(kinds["times"]))
    show({options.workload: text}, options.write, "systems.md")


if __name__ == "__main__":
    main()
