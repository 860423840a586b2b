"""What programs of long measurements share: cases are measured once each, stored as rows, and shown as tables.

A file of rows has a line of JSON for each. A case that has a row is not measured again, so a program can be
interrupted, and a row that is taken out is measured anew.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pages import DOCS, RESULTS, ROOT, fidelity_rows, grid, put

__all__ = [
    "DOCS", "RESULTS", "ROOT", "Row", "by", "command", "complete", "dump", "fidelity_rows", "grid", "keep",
    "measure_into", "missing", "processor", "put", "show", "store", "stored",
]  # fmt: skip

Row = dict[str, Any]
Case = tuple[Any, ...]
Key = Callable[[Row], Case]

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


def by(*fields: str) -> Key:
    """Return a function that tells the case of a row by some fields; one that the row lacks is None."""
    return lambda row: tuple(row.get(field) for field in fields)


def missing(file: Path, key: Key, cases: Iterable[Case]) -> list[Case]:
    """Return the cases that no stored row is of."""
    known = set(map(key, stored(file)))
    return [case for case in cases if case not in known]


def complete(
    file: Path, key: Key, cases: Iterable[Case], measure: Callable[..., Row | Iterable[Row]]
) -> list[Row]:
    """Measure the cases that no stored row is of, storing what each gives as soon as it ends; return all rows.

    Parameters
    ----------
    file : Path
        Where rows are stored.
    key : callable
        Case that a row is of.
    cases : iterable of tuple
        All cases.
    measure : callable
        Called with the parts of a case; returns its row, or several.
    """
    left = missing(file, key, cases)
    for count, case in enumerate(left, 1):  # no bar: trainings have their own
        name = textwrap.shorten(" ".join(map(str, case)), 100)
        print(f"{count} of {len(left)}: {name}", file=sys.stderr, flush=True)
        made = measure(*case)
        for row in [made] if isinstance(made, dict) else made:
            store(file, row)
    return stored(file)


def command(about: str | None, page: str = "measurements.md") -> argparse.ArgumentParser:
    """Return the parser of a program with this docstring, whose tables ``--write`` puts into a page of docs/."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"put what is shown into docs/{page}")
    return parser


def show(tables: Mapping[str, str], write: bool, page: str = "measurements.md") -> None:
    """Print tables by their marks; put them into a page of docs/ if they are to be written."""
    for mark, text in tables.items():
        print(f"{mark}\n\n{text}\n")
        if write:
            put(DOCS / page, mark, text)


def measure_into(
    mark: str,
    file: Path,
    measure: Callable[[], list[Row]],
    table: Callable[[list[Row]], str],
    about: str | None,
    page: str = "measurements.md",
) -> None:
    """Be a program that measures everything at once, dumps the rows, and shows their table."""
    options = command(about, page).parse_args()
    dump(file, rows := measure())
    show({mark: table(rows)}, options.write, page)
