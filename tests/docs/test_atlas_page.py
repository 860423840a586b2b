"""The page of the atlas is what its command makes of the committed records."""

from __future__ import annotations

from conftest import ROOT

from capture.atlas import PIECES, STEPS, read_records
from gradstats.report.atlas import atlas_page


def test_the_page_is_that_of_the_records():
    records = read_records(ROOT / "docs/results/atlas.jsonl")
    assert (ROOT / "docs/atlas.md").read_text(encoding="utf-8") == atlas_page(
        records, PIECES, STEPS
    )
    measured = {r["piece"] for r in records}
    assert measured <= {*PIECES}
    assert all(sum(r["piece"] == piece for r in records) == 9 for piece in measured)
