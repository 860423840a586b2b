"""Places and pages that the programs here and those in tools/ write to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

__all__ = ["DOCS", "IMAGES", "RESULTS", "ROOT", "block", "fidelity_rows", "grid", "put"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
IMAGES = DOCS / "img"
RESULTS = DOCS / "results"
_HYPHEN = re.compile(r"(?<=\| )-(?=\d)")


def block(mark: str, text: str) -> str:
    """Return a text between ``<!-- mark -->`` and ``<!-- /mark -->``; negative numbers of a table have a minus."""
    return f"<!-- {mark} -->\n{_HYPHEN.sub('−', text)}\n<!-- /{mark} -->"


def put(page: Path, mark: str, text: str) -> None:
    """Replace the text between ``<!-- mark -->`` and ``<!-- /mark -->`` in a Markdown page."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page} has no {begin} … {end} to put the table into")
    page.write_text(f"{before}{block(mark, text)}{after}", encoding="utf-8")


def grid(heads: str, lines: Iterable[Sequence[str]]) -> str:
    """Return lines of cells as a table in Markdown.

    Parameters
    ----------
    heads : str
        Heads of the columns, divided as in Markdown; numbers are below one that ends with a colon, and stand right.
    lines : iterable of sequence of str
        Cells of each line.
    """
    columns = heads.split(" | ")
    rule = "|".join("---:" if each.endswith(":") else "---" for each in columns)
    named = " | ".join(each.removesuffix(":") for each in columns)
    return "\n".join([f"| {named} |", f"|{rule}|", *(f"| {' | '.join(each)} |" for each in lines)])


@cache
def fidelity_rows() -> list[tuple[str, list[str]]]:
    """Return the paper and the five cells of every row of docs/fidelity.md: item, what, here, checked by, stands."""
    found = []
    page = (DOCS / "fidelity.md").read_text(encoding="utf-8")
    for section in re.split(r"(?m)^## ", page)[1:]:
        paper, _, body = section.partition("\n")
        for line in body.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) == 5 and cells[0] != "item" and not cells[0].startswith("---"):
                found.append((paper, cells))
    return found
