"""The page about LAGS has the stored results, and says of them what they show."""

from __future__ import annotations

import re
import statistics

import lags
import pytest
from pages import block
from records import DOCS, stored

PAGE = (DOCS / "network.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables():
    return lags.table(stored(lags.FILE))


def test_the_page_shows_the_stored_results(tables):
    assert block("lags", tables) in PAGE


def test_the_page_says_how_lags_compares_with_the_best_single_ratio(tables):
    number = r"([\d.]+) \(([\d.]+) to ([\d.]+)\)"
    row = rf"^\| (\d+) \| `lags`, [^|]*\|[^|]*\| {number} \| ([\d.]+)"
    rows = re.findall(row, tables, re.MULTILINE)
    found = {int(rate): [float(n) for n in numbers] for rate, *numbers in rows}
    assert set(found) == set(lags.RATES)
    assert f"reach up to {max(high for _, _, high, _ in found.values()):.2f}" in PAGE
    assert all(dense < 1 for *_, dense in found.values())  # dense takes longer at every rate
    ratios = sorted(ratio for ratio, *_ in found.values())
    assert ratios[-1] <= 1.1  # within 10 %
    assert f"takes {ratios[0]:.2f} to\n{ratios[-1]:.2f} times as long; the" in PAGE


def test_the_page_says_what_the_choices_and_the_plan_were(tables):
    rows = stored(lags.FILE)
    by_rate = [
        [
            t["sent"]
            for row in rows
            if row["what"] == "choice" and row["rate"] == rate
            for t in row["tried"]
            if len(set(t["ratios"])) > 1
        ]
        for rate in {row["rate"] for row in rows if row["what"] == "choice"}
    ]
    most = max(max(each) / min(each) for each in by_rate)
    assert f"up to {most:.1f} times as many elements" in PAGE
    took = {
        (row["rate"], row["system"]): statistics.median(row["seconds"])
        for row in lags.pooled(row for row in rows if row["what"] == "times")
    }
    off = {
        name: max(
            abs(row["seconds"] / took[row["rate"], system] - 1)
            for row in rows
            if row["what"] == "plan" and row["compressor"] == name
        )
        for name, system in (("none", "dense"), ("dense-bf16", "dense-bf16"))
    }
    assert off["none"] < 0.1
    assert f"one in 16 bits within {100 * off['dense-bf16']:.0f} %" in PAGE
