"""Rows that long-running programs store, one line of JSON each, so that no run is repeated."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from pages import DOCS, RESULTS, ROOT, fidelity_rows, put

__all__ = [
    "DOCS",
    "RESULTS",
    "ROOT",
    "Row",
    "dump",
    "fidelity_rows",
    "keep",
    "measure_into",
    "processor",
    "put",
    "store",
    "stored",
]

Row = dict[str, Any]

_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}
"""Names of vectors by the kernel's flag, the widest first."""


def stored(path: Path) -> list[Row]:
    """Return the rows stored so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def store(path: Path, row: Row) -> None:
    """Add a row to a file of rows."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def keep(path: Path, rows: Iterable[Row]) -> None:
    """Leave these rows in a file of rows, and no others."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def dump(path: Path, rows: list[Row]) -> None:
    """Write rows to a JSON file that ``tools/figures.py`` draws, a row on each line."""
    path.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n")


def processor() -> str:
    """Return this machine's processor and its widest vectors, which decide the loops: AMD EPYC, AVX2."""
    file = Path("/proc/cpuinfo")
    about = file.read_text() if file.exists() else ""
    named = re.search(r"model name\s*: (.*)", about)
    words = re.sub(r"\([^)]*\)", "", named[1] if named else platform.machine()).split()
    wide = next((shown for flag, shown in _VECTORS.items() if re.search(rf"\b{flag}\b", about)), "")
    return ", ".join(filter(None, (" ".join(words[:2]), wide)))


def measure_into(
    mark: str,
    file: Path,
    measure: Callable[[], list[Row]],
    table: Callable[[list[Row]], str],
    about: str,
) -> None:
    """Measure, dump the rows, and print the table; with ``--write`` also put it into docs/measurements.md."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    options = parser.parse_args()
    rows = measure()
    dump(file, rows)
    text = table(rows)
    print(text)
    if options.write:
        put(DOCS / "measurements.md", mark, text)
