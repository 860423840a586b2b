"""The page of the atlas is what its command makes of the committed records."""

from __future__ import annotations

from conftest import ROOT

from capture.atlas import PIECES, STEPS, read_records
from gradstats.report.atlas import atlas_page

RESULTS = ROOT / "docs" / "results"


def test_the_page_is_that_of_the_records():
    records = read_records(RESULTS / "atlas.jsonl")
    series = read_records(RESULTS / "atlas-steps.jsonl")
    page = atlas_page(records, series, PIECES, STEPS)
    assert (ROOT / "docs/atlas.md").read_text(encoding="utf-8") == page
    # three phases of each kind, whose pseudo-gradients Muon has not, and a series of each
    for piece in {r["piece"] for r in records}:
        kinds = 3 if piece.endswith("/muon") else 4
        assert sum(r["piece"] == piece for r in records) == 3 * kinds
        assert [len(r["steps"]) for r in series if r["piece"] == piece] == [STEPS] * 3
