"""What the programs here store of runs that take long: a line of JSON each, so that nothing is run twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results"
Row = dict[str, Any]


def stored(path: Path) -> list[Row]:
    """Return the rows stored so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def store(path: Path, row: Row) -> None:
    """Add a row."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def put(page: str, mark: str, text: str) -> None:
    """Replace what stands between ``<!-- mark -->`` and ``<!-- /mark -->`` in a page of the docs."""
    path = RESULTS.parent / page
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, rest = path.read_text(encoding="utf-8").split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")
