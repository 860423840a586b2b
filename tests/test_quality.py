from __future__ import annotations

import numpy as np
import pytest

from gradstats import quality
from gradstats._quality import noise_floor, quality_series
from gradstats.errors import InputError
from gradstats.thresholds import ESTIMATORS

FIELDS = {"estimator", "ratio", "kind", "mean", "low", "high", "min", "max", "n"}


def test_exact_is_exact_on_captured_gradients(trace_path):
    records = quality(trace_path, (0.1, 0.01, 0.001), ("exact",))
    for record in records:
        assert record.keys() >= FIELDS
        assert record["mean"] == record["min"] == record["max"] == 1.0
        assert record["n"] == 4


def test_summaries_are_those_of_the_series(trace_path):
    series = quality_series(trace_path, (0.01,), ("sidco-e",))
    for record in quality(trace_path, (0.01,), ("sidco-e",)):
        values = [r["quality"] for r in series if r["kind"] == record["kind"]]
        assert record["mean"] == pytest.approx(np.mean(values))
        assert (record["min"], record["max"]) == (min(values), max(values))
        assert record["low"] == pytest.approx(np.quantile(values, 0.05))
        assert record["high"] == pytest.approx(np.quantile(values, 0.95))
        assert record["floor_high"] == 1 + noise_floor(record["k"])


def test_the_noise_floor_is_that_of_a_perfect_model():
    """The true quantile of the law, on 2000 samples: 95 % of k̂/k are within the floor."""
    rng = np.random.default_rng(0)
    k, n = 100, 10_000
    eta = np.log(n / k)
    inside = [
        abs(np.sum(rng.exponential(size=n) >= eta) / k - 1) <= noise_floor(k) for _ in range(2000)
    ]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
    assert noise_floor(0) == np.inf


def test_options_reach_the_estimators():
    x = np.random.default_rng(0).standard_t(3, 100_000).astype(np.float32)
    one, three = (
        quality(x, (0.001,), ("sidco-e",), options={"sidco-e": {"stages": m}})[0]["mean"]
        for m in (1, 3)
    )
    # NOTES: on Student-t(3) k̂/k falls from 4.7 to 1.2 between one stage and three
    assert one > 3.5
    assert three < 1.6


def test_bad_requests():
    x = np.ones(10, np.float32)
    with pytest.raises(InputError, match="no estimator"):
        quality(x, estimators=["nonsense"])
    with pytest.raises(InputError, match="ratio"):
        quality(x, ratios=[0])
    assert quality(np.zeros(10, np.float32), estimators=list(ESTIMATORS))[0]["mean"] == 0
