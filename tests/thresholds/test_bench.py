"""The benchmark measures what it says; nothing here tests how fast anything is."""

from __future__ import annotations

import json
import math

import pytest
from matplotlib.figure import Figure
from support.terminal import run

from gradstats import plots
from gradstats.thresholds import ESTIMATORS
from gradstats.thresholds.bench import REFERENCES, bench, sample_gradient


@pytest.fixture(scope="module")
def records():
    return bench([20_000, 50_000], [0.1, 0.01], repeats=3)


def test_everything_is_measured_once(records):
    keys = {(r["compressor"], r["numel"], r["ratio"]) for r in records}
    assert len(keys) == len(records) == 4 * (len(ESTIMATORS) + len(REFERENCES))
    for r in records:
        assert r["seconds"] > 0
        assert r["streams"] > 0
        assert r["speedup"] > 0
        if r["compressor"] in ("exact", "warm-exact", "redsync-trimmed", *REFERENCES):
            assert r["quality"] == pytest.approx(1, abs=1e-3)
        assert math.isnan(r["memory"]) == (r["compressor"] in REFERENCES)


def test_the_sample_is_heavy_tailed_and_reproducible():
    x = sample_gradient(100_000)
    assert (x == sample_gradient(100_000)).all()
    assert (x.astype(float) ** 4).mean() / (x.astype(float) ** 2).mean() ** 2 > 10


def test_figures(records):
    for value in ("seconds", "streams", "speedup"):
        ax = Figure().add_subplot()
        some = [r for r in records if r["numel"] == 20_000]
        assert plots.latency_bars(some, ax, value=value) is ax
        assert len(ax.containers) == 2


def test_the_command():
    done = run("bench", "--numel", 20_000, "--ratio", 0.01, "--threads", 1, "--repeats", 2, "--estimator",
               "exact", "--format", "json")  # fmt: skip
    found = json.loads(done.stdout)
    assert {"compressor", "numel", "ratio", "seconds", "streams", "quality"} <= found[0].keys()
    assert len(found) == 1 + len(REFERENCES)
    for bad in (("--numel", 0), ("--ratio", 2), ("--estimator", "x")):
        done = run("bench", *bad)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
