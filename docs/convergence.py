"""Every system in real training, same seed and budget, dense beside it: ``python docs/convergence.py DATA_DIR``.

Two processes, ResNet-20. Each run is stored in convergence.jsonl as it ends, and not repeated: interrupt and go on
at will. The table is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from pathlib import Path

from capture.workloads import RunConfig, run
from capture.workloads.launch import RunFailedError
from gradstats.compressors import COMPRESSORS

LAST = 25
"""Steps whose mean training loss is shown."""


def one(compressor: str, options: argparse.Namespace, rate: float) -> dict[str, float | str]:
    """Train once and reduce what the run recorded."""
    result = run(
        RunConfig(
            workload="resnet20-cifar10" if options.data_dir else "resnet20-digits",
            data_dir=options.data_dir,
            nproc=options.nproc,
            steps=options.steps,
            compressor=compressor,
            ratio=options.ratio,
            learning_rate=rate,
            label=compressor,
        )
    )
    records = result.records
    k = max(1, round(options.ratio * result.numel))
    warm = slice(len(result.seconds) // 10, None)  # the first tenth warms up

    def mean(values: list[float]) -> float:
        return statistics.fmean(values) if values else math.nan

    return {
        "compressor": compressor,
        "rate": rate,
        "loss": mean([loss if math.isfinite(loss) else 1e9 for loss in result.losses[-LAST:]]),
        "accuracy": result.accuracy,
        "quality": mean([r["selected"] / k for r in records]),
        "union": mean([r["union"] / k for r in records]),
        "bytes": mean([r["bytes_sent"] for r in records]) if records else 4.0 * result.numel,
        "step_ms": 1e3 * statistics.median(result.seconds[warm]),
        "select_ms": 1e3 * mean([r["select_seconds"] for r in records[warm]]),
        "communicate_ms": 1e3 * mean([r["communicate_seconds"] for r in records[warm]]),
    }


def table(rows: list[dict[str, float | str]]) -> str:
    """Return the runs as Markdown."""
    lines = [
        "| compressor | loss | test accuracy | k̂/k | union/k | bytes/step | ms/step | select | communicate |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if "problem" in row:
            step = re.search(r"step \d+", str(row["problem"]))
            cells = [
                f"`{row['compressor']}`",
                f"diverged, {step[0]}" if step else "failed",
                *["–"] * 7,
            ]
            lines.append("| " + " | ".join(cells) + " |")
            continue
        signs = row["quality"] > 100 or math.isnan(row["quality"])
        cells = [
            f"`{row['compressor']}`",
            f"{row['loss']:.2f}",
            f"{100 * row['accuracy']:.1f} %",
            "–" if signs else f"{row['quality']:.2f}",
            "–" if signs else f"{row['union']:.2f}",
            f"{row['bytes']:,.0f}",
            f"{row['step_ms']:.0f}",
            *(
                "–" if math.isnan(row[n]) else f"{row[n]:.1f}"
                for n in ("select_ms", "communicate_ms")
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is not there yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "data_dir", type=Path, nargs="?", help="CIFAR-10's binary files; the digits if absent"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--only", nargs="*", default=COMPRESSORS, choices=COMPRESSORS)
    parser.add_argument("--store", type=Path, default=Path("convergence.jsonl"))
    options = parser.parse_args()
    lines = options.store.read_text().splitlines() if options.store.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {row["compressor"] for row in rows}
    for compressor in options.only:
        if compressor in done or compressor == "exact":  # exact and topk are the same
            continue
        try:
            rows.append(one(compressor, options, options.rate))
        except RunFailedError as error:  # a diverging system is a result
            rows.append({"compressor": compressor, "problem": str(error)})
        with options.store.open("a") as stream:
            stream.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
