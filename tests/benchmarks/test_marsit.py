"""The page about Marsit has the stored results."""

from __future__ import annotations

import json

import marsit
import pytest
from pages import block
from records import DOCS, stored


def test_the_page_shows_the_stored_results():
    rows = stored(marsit.FILE)
    page = (DOCS / "systems.md").read_text(encoding="utf-8")
    assert block("marsit", marsit.table(rows)) in page
    times = json.loads(marsit.TIMES.read_text(encoding="utf-8"))
    assert block("marsit-times", marsit.times_table(times)) in page
    assert {(row["full_every"], row["seed"]) for row in rows} == {
        (every, seed) for every in marsit.EVERY for seed in range(marsit.SEEDS)
    }
    for row in rows:  # what a full round sends: 32 bits instead of one
        full = len(range(0, marsit.STEPS, row["full_every"])) if row["full_every"] else 0
        share = full / marsit.STEPS
        assert row["bits"] == pytest.approx(1 + 31 * share, rel=1e-3)


def test_what_the_page_says_of_small_k():
    def mean(every):
        return (
            sum(r["loss"] for r in stored(marsit.FILE) if r["full_every"] == every) / marsit.SEEDS
        )

    large = [mean(every) for every in marsit.EVERY if every is None or every >= 25]
    assert max(large) < 0.25 < min(mean(5), mean(10))
