"""Print the README's table of estimation quality from the traces in data/: ``make tables`` puts it there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gradstats import quality
from gradstats.thresholds import ESTIMATORS, make_estimator

ROOT = Path(__file__).parents[1]
RATIOS = (0.1, 0.01, 0.001)
COLUMNS = (("resnet20", "gradient"), ("resnet20-ef", "corrected"))


def cell(record: dict[str, float]) -> str:
    """Return the mean and the extremes."""
    mean, low, high = (f"{record[name]:.3g}" for name in ("mean", "min", "max"))
    return (
        f"{record['mean']:.3f}"
        if record["max"] - record["min"] < 0.02
        else f"{mean} ({low}–{high})"
    )


def table() -> str:
    """Return k̂/k of every estimator, ratio and run, as Markdown."""
    cells = {
        (trace, r["estimator"], r["ratio"]): cell(r)
        for trace, kind in COLUMNS
        for r in quality(ROOT / "data" / f"{trace}.zarr", RATIOS, ESTIMATORS, kinds=[kind])
    }
    lines = [
        "| | "
        + " | ".join(
            f"{'with' if 'ef' in t else 'no'} EF, {r:g}" for t, _ in COLUMNS for r in RATIOS
        )
        + " |",
        "|---" + "|---:" * 6 + "|",
    ]
    for name in ESTIMATORS:
        star = (
            "\\*" if make_estimator(name).state_dict() and name not in ("dgc", "warm-exact") else ""
        )
        row = [cells[t, name, r] for t, _ in COLUMNS for r in RATIOS]
        lines.append(f"| `{name}`{star} | " + " | ".join(row) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv:
        readme = ROOT / "README.md"
        text = readme.read_text(encoding="utf-8")
        block = f"<!-- quality -->\n{table()}\n<!-- /quality -->"
        pattern = "<!-- quality -->.*?<!-- /quality -->"
        readme.write_text(re.sub(pattern, lambda _: block, text, flags=re.DOTALL), encoding="utf-8")
    else:
        print(table())
