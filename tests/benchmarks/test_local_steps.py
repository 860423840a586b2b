"""The tables about pseudo-gradients: the page shows what was stored."""

from __future__ import annotations

import local_steps
from records import DOCS

ROWS = local_steps.stored(local_steps.FILE)


def test_the_page_shows_what_was_stored():
    page = (DOCS / "measurements.md").read_text(encoding="utf-8")
    for mark, text in local_steps.tables(ROWS).items():
        assert f"<!-- {mark} -->\n{text}\n<!-- /{mark} -->" in page, mark


def test_what_the_page_says_of_the_table_is_in_it():
    """Lighter tails than gradients, and more alike without compression; a mean over senders is never smaller."""
    of = {(row["compressor"], row["kind"]): row for row in ROWS}
    for compressor in ("none", "sparseloco"):
        gradient, pseudo = (of[compressor, kind] for kind in ("gradient", "pseudogradient"))
        assert pseudo["share"][2] < gradient["share"][1]
        assert pseudo["decay"][2] < gradient["decay"][1]
    assert of["none", "pseudogradient"]["cosine"][1] > of["none", "gradient"]["cosine"][2]
    assert all(1 <= row["norm"][1] <= row["norm"][2] <= row["ranks"] for row in ROWS)
