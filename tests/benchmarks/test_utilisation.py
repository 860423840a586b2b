"""The page about local steps in networks has the stored measurements, and its sentence about them is what they say."""

from __future__ import annotations

import re

import utilisation
from pages import block
from records import stored


def test_the_page_shows_the_stored_measurements():
    page = utilisation.PAGE.read_text(encoding="utf-8")
    assert block("public", utilisation.table(utilisation.public())) in page
    rows = utilisation.lab_rows(stored(utilisation.LAB))
    assert block("lab local steps", utilisation.lab_table(rows)) in page
    off = max(abs(row["seconds"] / row["measured"] - 1) for row in rows)
    inside = sum(row["low"] <= row["measured"] <= row["high"] for row in rows)
    said = re.search(r"off by (\d+) % at most, within the interval in (\d+) of (\d+) cases", page)
    assert said
    assert [int(number) for number in said.groups()] == [round(100 * off), inside, len(rows)]
