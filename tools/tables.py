"""Print the tables of estimation quality of the README and the docs, from the traces in data/.

    PYTHONPATH=benchmarks python tools/tables.py [--write]

``make tables`` writes them into their pages, as ``--write`` does: the README has one ratio, docs/concepts/thresholds.md
all of them.
"""

from __future__ import annotations

import argparse

from pages import ROOT, block, put

from gradstats import quality
from gradstats.primitives.ratio import RATIOS
from gradstats.thresholds import ESTIMATORS, make_estimator

PAGES = {"README.md": (0.001,), "docs/concepts/thresholds.md": RATIOS}
COLUMNS = (("resnet20", "gradient"), ("resnet20-ef", "corrected"))


def cell(record: dict[str, float]) -> str:
    """Return the mean of k̂/k, with its extremes where they differ much."""
    mean, low, high = (f"{record[name]:.3g}" for name in ("mean", "min", "max"))
    return (
        f"{record['mean']:.3f}"
        if record["max"] - record["min"] < 0.02
        else f"{mean} ({low}–{high})"
    )


def cells(ratios: tuple[float, ...]) -> dict[tuple[str, str, float], str]:
    """Return k̂/k of every run, estimator and ratio."""
    return {
        (trace, r["estimator"], r["ratio"]): cell(r)
        for trace, kind in COLUMNS
        for r in quality(ROOT / "data" / f"{trace}.zarr", ratios, ESTIMATORS, kinds=[kind])
    }


def table(known: dict[tuple[str, str, float], str], ratios: tuple[float, ...]) -> str:
    """Return k̂/k of every estimator as Markdown."""
    lines = [
        "| rule | "
        + " | ".join(
            f"{'with' if 'ef' in t else 'without'} error feedback, {r:g}"
            for t, _ in COLUMNS
            for r in ratios
        )
        + " |",
        "|---" + "|---:" * len(COLUMNS) * len(ratios) + "|",
    ]
    for name in ESTIMATORS:
        star = (
            "\\*" if make_estimator(name).state_dict() and name not in ("dgc", "warm-exact") else ""
        )
        row = [known[t, name, r] for t, _ in COLUMNS for r in ratios]
        lines.append(f"| `{name}`{star} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or write them into their pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into their pages")
    write = parser.parse_args().write
    known = cells(RATIOS)
    for page, ratios in PAGES.items():
        made = table(known, ratios)
        if write:
            put(ROOT / page, "quality", made)
        else:
            print(block("quality", made))


if __name__ == "__main__":
    main()
