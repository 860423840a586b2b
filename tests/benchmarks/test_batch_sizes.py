"""The page has the stored test errors by batch size, and every run is as long as the others."""

from __future__ import annotations

import itertools

import batch_sizes
from pages import block
from plateau import told_apart
from records import DOCS, stored


def test_the_page_shows_the_stored_runs():
    rows = stored(batch_sizes.FILE)
    page = (DOCS / "workloads.md").read_text(encoding="utf-8")
    assert block("batch sizes", batch_sizes.table(rows)) in page
    keys = [(row["batch"], row["compressor"], row["seed"]) for row in rows]
    assert sorted(keys) == sorted(
        itertools.product(batch_sizes.BATCHES, batch_sizes.SYSTEMS, range(3))
    )
    for row in rows:
        assert row["batch"] == row["nproc"] * row["batch_size"]
        assert row["batch"] * row["steps"] == 64 * 2000


def test_what_the_page_says_of_redsync():
    found = {
        (r["compressor"], r["batch"], r["seed"]): r["accuracy"] for r in stored(batch_sizes.FILE)
    }

    def differs(other, system="redsync"):
        return [
            told_apart([found[system, batch, s] - found[other, batch, s] for s in range(3)])
            for batch in batch_sizes.BATCHES
        ]

    assert differs("none") == differs("dense-bf16") == [-1] * 3
    assert differs("redsync-quantised") == [0] * 3
    assert differs("none", "dense-bf16") == [0, 0, -1]
    worse = [found["none", 1024, s] - found["dense-bf16", 1024, s] for s in range(3)]
    assert max(worse) < 0.002


def test_errors_are_means_over_seeds_with_intervals():
    rows = [
        {"batch": 64, "compressor": "none", "accuracy": accuracy} for accuracy in (0.5, 0.6, 0.7)
    ]
    rows += [{"batch": 64, "compressor": "redsync", "problem": "rank 0 failed"}]
    lines = batch_sizes.table(rows).splitlines()
    assert lines[0] == "| test error % | 64 |"
    assert lines[2] == "| `none` | 40.0 ± 24.8 |"  # 4.303 · 10/√3
    assert lines[4] == "| `redsync` | –, 0 of 1 |"
