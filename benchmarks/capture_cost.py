"""Cost of capturing, per training step.

    python benchmarks/capture_cost.py [--steps 110] [--rounds 5]

Trains ResNet-20 on the embedded digits in two processes, exact top-k at 0.001 with error feedback. Each round trains
the three variants one after another in fresh processes, so that a slow moment of the machine hits all of them alike.
The table has the median over rounds of each run's median step; the first ten steps are left out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from capture.workloads import RunConfig, run


def main() -> None:
    """Train the variants, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=110, help="steps of a run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each variant")
    parser.add_argument("--workload", default="resnet20-digits")
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    base = RunConfig(
        workload=arguments.workload, steps=arguments.steps, data_dir=arguments.data_dir
    )
    seconds: dict[str, list[float]] = {"absent": [], "idle": [], "every step": []}
    with tempfile.TemporaryDirectory() as folder:
        for index in range(arguments.rounds):
            variants = {
                "absent": base,
                "idle": base.replace(out=Path(folder, f"idle{index}.zarr"), at=(10**9,)),
                "every step": base.replace(out=Path(folder, f"every{index}.zarr"), every=1),
            }
            for name, config in variants.items():
                seconds[name].append(median(run(config).seconds[10:]))
    absent = median(seconds["absent"])
    print("| capture | ms per step | ÷ absent | range over rounds |")
    print("|---|---:|---:|---:|")
    for name, values in seconds.items():
        ratios = [v / a for v, a in zip(values, seconds["absent"], strict=True)]
        print(
            f"| {name} | {1e3 * median(values):.1f} | {median(values) / absent:.2f} "
            f"| {min(ratios):.2f}–{max(ratios):.2f} |"
        )


if __name__ == "__main__":
    main()
