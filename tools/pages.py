"""Places and pages that the programs in tools/ and benchmarks/ write to."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DOCS", "IMAGES", "RESULTS", "ROOT", "block", "put"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
IMAGES = DOCS / "img"
RESULTS = DOCS / "results"


def block(mark: str, text: str) -> str:
    """Return a text between ``<!-- mark -->`` and ``<!-- /mark -->``."""
    return f"<!-- {mark} -->\n{text}\n<!-- /{mark} -->"


def put(page: Path, mark: str, text: str) -> None:
    """Replace the text between ``<!-- mark -->`` and ``<!-- /mark -->`` in a Markdown page."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page} has no {begin} … {end} to put the table into")
    page.write_text(f"{before}{block(mark, text)}{after}", encoding="utf-8")
