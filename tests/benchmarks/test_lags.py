"""The page about LAGS has the stored results, and says of them what they show."""

from __future__ import annotations

import re

import lags
import pytest
from pages import block
from records import DOCS, stored

PAGE = (DOCS / "network.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables():
    return "\n".join(lags.table(stored(lags.FILE)))


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
    assert f"takes {ratios[0]:.2f} to\n{ratios[-2]:.2f} times as long at three rates" in PAGE
    assert f"and {ratios[-1]:.2f} times at 20 Mbit/s" in PAGE
