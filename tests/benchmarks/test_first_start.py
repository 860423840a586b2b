"""First starts: the page shows what was stored, and a process with compiled code at hand takes less."""

from __future__ import annotations

import json

import first_start
from records import DOCS


def test_the_page_shows_what_was_stored():
    rows = json.loads(first_start.FILE.read_text(encoding="utf-8"))
    page = (DOCS / "measurements.md").read_text(encoding="utf-8")
    assert f"<!-- first start -->\n{first_start.table(rows)}\n<!-- /first start -->" in page
    assert [r["case"] for r in rows] == list(first_start.CASES)


def test_a_first_start_compiles_and_the_next_does_not(tmp_path):
    code = first_start.CASES['`gradstats.threshold(x, 0.001, "exact")`']
    first, later = (first_start.seconds(code, str(tmp_path)) for _ in range(2))
    assert 0 < later < first
