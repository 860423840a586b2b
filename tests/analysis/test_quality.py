from __future__ import annotations

import numpy as np
import pytest

from gradstats import quality, stage_budget
from gradstats.analysis.quality import inner_90, noise_floor, quality_series, spread_of
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
        assert (record["low"], record["high"]) == (min(values), max(values))  # of four
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


def test_few_values_have_a_range_and_no_quantiles(trace_path):
    """Between 5 % and 95 % of four values lie two of them."""
    assert inner_90(np.array([3.0, 1.0, 2.0, 5.0])) == (1, 5)
    assert inner_90(np.arange(19.0)) == (0, 18)
    assert inner_90(np.arange(21.0)) == (1, 19)
    for record in quality(trace_path, (0.01,), ("exact", "sidco-e")):
        assert (record["low"], record["high"]) == (record["min"], record["max"])
        assert record["spread"] == "least to largest"
    assert spread_of(20) == "5 % to 95 %"


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


def test_the_stage_budget_multiplies_to_the_quality(trace_path):
    records = stage_budget(trace_path, (0.001,), options={"sidco-e": {"stages": 3}}, steps=[100])
    series = quality_series(
        trace_path, (0.001,), ("sidco-e",), options={"sidco-e": {"stages": 3}}, steps=[100]
    )
    mine = [r for r in records if r["estimator"] == "sidco-e" and r["kind"] == "gradient"]
    assert [r["stage"] for r in mine] == [1, 2, 3]
    assert np.prod([r["asked"] for r in mine]) == pytest.approx(0.001, rel=2e-3)
    assert mine[-1]["quality"] == pytest.approx(np.prod([r["factor"] for r in mine]))
    found = next(r["quality"] for r in series if r["kind"] == "gradient")
    assert mine[-1]["quality"] == pytest.approx(found, rel=2e-3)
    assert stage_budget(trace_path, estimators=["exact"]) == []


def test_energy_error_is_measured_against_best_k(trace_path):
    x = np.random.default_rng(0).standard_t(3, 10_000).astype(np.float32)
    for r in quality_series(
        x, (0.01,), ("exact", "sidco-e", "hard"), options={"hard": {"threshold": 2.0}}
    ):
        kept = np.abs(x) >= np.float32(r["threshold"])
        g = np.sort(np.abs(x.astype(float)))
        best = np.sqrt(np.sum(g[:-100] ** 2))
        error = np.sqrt(np.sum(np.where(kept, 0, x.astype(float)) ** 2))
        assert r["energy_error"] == pytest.approx(error / best - 1, abs=1e-9)


def test_layers_are_measured_by_themselves(trace_path):
    records = quality(trace_path, (0.01,), ("exact", "micro"), per_layer=True, kinds=["gradient"])
    assert len(records) == 2 * 60
    assert {r["layer"] for r in records} >= {"all", "conv1.weight", "fc.bias"}
    assert all(r["mean"] == 1 for r in records if r["estimator"] == "exact")


def test_layers_are_chosen_by_pattern(trace_path):
    records = quality(trace_path, (0.01,), ("exact",), layers=["fc.*"], kinds=["gradient"])
    assert [r["layer"] for r in records] == ["all", "fc.weight", "fc.bias"]
    with pytest.raises(InputError, match=r"no layer of resnet20(-ef)? matches nonsense; it has"):
        quality(trace_path, (0.01,), ("exact",), layers=["nonsense"])
