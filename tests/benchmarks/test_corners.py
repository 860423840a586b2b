"""The corners: the page shows what was stored, and every part can be measured again."""

from __future__ import annotations

import json

import corners
import pytest
from records import DOCS


def test_the_page_shows_what_was_stored():
    rows = json.loads(corners.FILE.read_text(encoding="utf-8"))
    page = (DOCS / "measurements.md").read_text(encoding="utf-8")
    assert f"<!-- corners -->\n{corners.table(rows)}\n<!-- /corners -->" in page
    others = {"histogram", "signsgd, ef-signsgd", "ssdm", "update", "marsit", "captured step"}
    assert {r["corner"] for r in rows} == {*corners.RULES, *others}
    for each in corners.elsewhere():  # what other programs have stored since is in the table, too
        assert each in rows
    assert {"AMD EPYC, AVX-512", "Intel Xeon, AVX-512"} <= {r["processor"] for r in rows}


@pytest.mark.slow
def test_every_part_runs(monkeypatch):
    monkeypatch.setattr(corners, "LARGE", 3000)
    monkeypatch.setattr(corners, "MEDIUM", 2000)
    monkeypatch.setattr(corners, "SIGNED", 3000)
    monkeypatch.setattr(corners, "SMALL", (64, 5000))
    monkeypatch.setattr(corners, "ROUNDS", 3)
    monkeypatch.setattr(corners, "RUNS", 1)
    rows = [
        r
        for part in ("small", "middle", "signs", "update", "large")
        for r in getattr(corners, part)()
    ]
    assert all(0 < r["low"] <= r["median"] <= r["high"] for r in rows)
    here = [{**r, "processor": corners.processor()} for r in rows]
    there = [{**r, "processor": "another"} for r in rows[1:]]
    first, *others = corners.table(here + there).splitlines()[2:]
    assert first.endswith("| – |") != first.endswith(") |")
    assert len(others) == len(there)
    for line in others:
        assert line.count("|") == 6
        assert line.count(" … ") == 2
