"""Some trials of every part of the campaign; the committed results; and that a fault is seen."""

from __future__ import annotations

import campaign
import numpy as np
import pytest
from faults.processes import start
from pages import block
from records import DOCS, stored

SHORT = [(part, n) for part in campaign.PARTS.values() for n in range(part.short)]
LIMITED = [each for each in SHORT if each[0].trial.startswith("faults.files")]
"""They limit the memory of their process, so that what comes after them could start none."""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("trials", [[t for t in SHORT if t not in LIMITED], LIMITED])
def test_nothing_is_lost_false_or_raw(trials):
    """In one process, which forks all others from one."""
    process = start(campaign.batch, trials)
    for part, number in trials:
        report = process.report(part.limit)
        case = f"{part.what}, {number}"
        assert report, f"{case}: {'died' if report is None else 'hung'}"
        assert (report[0], report[2]) == (number, ""), case
    process.join()


@pytest.mark.slow
def test_a_long_capture_is_flat(monkeypatch):
    monkeypatch.setitem(campaign.PARTS, "soak", campaign.Part("faults.soak.short", "", 1, 1))
    row = campaign.run("soak", range(1))
    assert row["outcomes"] == {"flat": 1}, row["faults"]


def test_a_fault_is_counted_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setitem(campaign.PARTS, "planted", campaign.Part("support.planted.trial", "", 5, 0))
    row = campaign.run("planted", range(5))
    assert row["outcomes"] == {"fine": 3, "fault": 2}
    assert row["faults"] == [
        {"trial": 1, "what": "died"},
        {"trial": 3, "what": "ValueError: raw"},
    ]


def test_the_page_shows_the_committed_results():
    rows = stored(campaign.FILE)
    assert block("campaign", campaign.table(rows)) in (DOCS / "reliability.md").read_text("utf-8")
    assert [fault for row in rows for fault in row["faults"]] == []
    for name in {row["part"] for row in rows}:  # every trial once
        own = sorted((row for row in rows if row["part"] == name), key=lambda row: row["first"])
        assert [row["first"] for row in own] == [0, *np.cumsum([row["trials"] for row in own])[:-1]]
