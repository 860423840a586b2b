"""The table of few different values: what is stored, and a short run of it."""

from __future__ import annotations

import levels
import numpy as np
import pytest

ROWS = levels.stored(levels.PATH)


def test_every_cell_was_simulated_and_the_intervals_hold_the_truth():
    cells = list(levels.cells())
    assert len(cells) >= 200
    assert {(r["format"], r["scale"], r["n"], r["ratio"]) for r in ROWS} == set(cells)
    given = [row for row in ROWS if row["covered"] is not None]
    assert np.average([r["covered"] for r in given], weights=[r["intervals"] for r in given]) > 0.92
    for row in given:
        # of few excesses, a bound that few elements reach is not recognised
        few = row["n"] * row["ratio"] < 1000
        assert row["covered"] >= (0.6 if few else 0.8), row
        assert few or abs(row["shape"]) < 0.1, row


@pytest.mark.parametrize(
    "cell", [("e5m2", "0.001"), ("int4", "largest"), ("float32", "0.02 clipped")]
)
def test_a_short_run(cell):
    row = levels.simulate(*cell, 100_000, 0.1, 3)
    assert row["refused"] == 0
    assert row["levels"] == 3
    assert abs(row["shape"]) < 0.1
