"""What capturing costs: the interval is that of a median, and the page has the stored measurements."""

from __future__ import annotations

import capture_cost
import numpy as np
from pages import block
from records import DOCS, stored


def test_the_page_shows_the_stored_measurements():
    text = block("capture cost", capture_cost.table(stored(capture_cost.FILE)))
    assert text in (DOCS / "measurements.md").read_text(encoding="utf-8")


def test_the_interval_of_a_median_covers_it():
    rng = np.random.default_rng(0)
    for n in (9, 24, 36):
        ends = np.array([capture_cost.interval(list(rng.exponential(size=n))) for _ in range(2000)])
        inside = (ends[:, 0] <= np.log(2)) & (np.log(2) <= ends[:, 1])
        assert 0.94 < inside.mean() < 0.99  # at least 95 %, as far as order statistics allow


def test_a_block_is_compared_with_the_two_beside_it(monkeypatch):
    class Result:
        # in the first step of each block the writer is busy with the last one's
        seconds = tuple(
            s for slow in (1.0, 3.0, 1.0) for s in (9.0, *[slow] * (capture_cost.BLOCK - 1))
        )

    monkeypatch.setattr(capture_cost, "run", lambda config: Result)
    config = capture_cost.RunConfig(workload="resnet20-digits")
    assert capture_cost.measure(config, 1) == [2.0]
