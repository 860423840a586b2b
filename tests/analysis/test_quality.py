from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from gradstats import open_trace, quality, stage_budget
from gradstats.analysis.quality import (
    differences,
    fitted_floor,
    inner_90,
    noise_floor,
    quality_series,
    spread_of,
    summarise,
)
from gradstats.errors import InputError
from gradstats.thresholds import ESTIMATORS, make_estimator
from gradstats.trace import Layer, TraceWriter, create_trace

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


@pytest.mark.parametrize(("ratio", "known"), [(0.1, 0.99), (0.01, 0.95)])
def test_a_fitted_law_has_a_lower_floor(ratio, known):
    """A Laplace whose scale is the sample's mean: nearly always within the floor of a known law at 0.1."""
    rng = np.random.default_rng(1)
    n, k = 5000, round(5000 * ratio)
    inside = []
    for _ in range(2000):
        x = rng.exponential(size=n)
        off = abs(np.sum(x >= x.mean() * np.log(1 / ratio)) / k - 1)
        inside.append((off <= noise_floor(k), off <= fitted_floor(k, ratio)))
    of_known, of_fitted = np.mean(inside, axis=0)
    assert of_known >= known
    assert of_fitted == pytest.approx(0.95, abs=0.02)


def test_clusters_widen_the_floor():
    """Ten neighbours alike: the floor of independent elements holds in 48 of 100 samples."""
    rng = np.random.default_rng(2)
    k, n = 1000, 10_000
    off = [
        abs(10 * np.sum(rng.exponential(size=n // 10) >= np.log(10)) / k - 1) for _ in range(2000)
    ]
    assert np.mean(np.array(off) <= noise_floor(k)) == pytest.approx(0.48, abs=0.04)
    # the share of the law beyond is 0.1, not small: 1 − δ of the variance is left
    assert np.mean(np.array(off) <= noise_floor(k, 10)) == pytest.approx(0.96, abs=0.02)


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
    # misspelt options change nothing
    with pytest.raises(InputError, match="no estimator of options 'sidco_e'"):
        quality(x, options={"sidco_e": {"stages": 2}})
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


def test_ties_at_the_threshold_are_kept_and_best_k_has_only_k():
    x = np.array([4, 2, -2, 2, 2, 1, 1, 0, 0, 0], np.float32)
    (r,) = quality_series(x, (0.2,), ("exact",))
    assert (r["k"], r["selected"], r["quality"], r["threshold"]) == (2, 5, 2.5, 2.0)
    # 5 are sent and leave 1² + 1²; the best two leave three times 2² more
    assert r["energy_error"] == pytest.approx(np.sqrt(2 / 14) - 1)
    (r,) = quality_series(x, (0.5,), ("exact",))
    assert (r["k"], r["selected"], r["quality"]) == (5, 5, 1)
    assert r["energy_error"] == pytest.approx(0)


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


def played(estimator, values, ratio=0.01, layer="all"):
    """Records of a series, as of a run of so many steps."""
    labels = {"trace": "t", "rank": 0, "kind": "gradient", "layer": layer, "ratio": ratio}
    return [
        labels
        | {"estimator": estimator, "step": step, "k": 100, "quality": value, "fresh": value}
        | {"selected": round(100 * value), "seen": step, "design": 1.0, "energy_error": 0.0}
        for step, value in enumerate(values)
    ]


def test_an_error_that_a_gradient_does_not_have_is_left_out():
    # of fewer non-zero elements than k, such as of a step between two of another network
    records = played("a", [1.0, 1.0, 1.0])
    for record, error in zip(records, (0.1, np.nan, 0.3), strict=True):
        record["energy_error"] = error
    (summary,) = summarise(records)
    assert summary["energy_error"] == pytest.approx(0.2)
    for record in records:
        record["energy_error"] = np.nan
    assert np.isnan(summarise(records)[0]["energy_error"])


def test_infinite_elements_are_blamed_only_for_what_they_add():
    """NaN is above no threshold, and a rule that keeps more than k finite elements does so without infinities."""
    values = np.random.default_rng(0).laplace(size=4000).astype(np.float32)
    for odd, rule, blamed in (
        (np.inf, "exact", True),
        (np.nan, "redsync", False),
        (np.inf, "redsync", False),
    ):
        values[:2] = odd
        (record,) = quality_series(values, (0.1,), (rule,))
        assert record["selected"] > record["k"]
        assert ("infinite" in record["status"]) == blamed, (odd, rule)


def test_the_mean_over_a_run_has_an_interval(trace_path):
    rng = np.random.default_rng(0)
    values = 1 + 0.1 * np.diff(rng.standard_normal(51))  # no step goes on as the last one did
    (long,) = summarise(played("a", values))
    assert long["mean_low"] < long["mean"] < long["mean_high"]
    # blocks are of one step then, and the interval is Student's
    half = stats.t.ppf(0.975, 49) * np.std(values, ddof=1) / 50**0.5
    assert long["block"] == 1
    assert long["mean_low"] == pytest.approx(values.mean() - half)
    assert long["mean_high"] == pytest.approx(values.mean() + half)
    assert long["mean_status"] == "ok"
    slow = 1 + np.convolve(rng.standard_normal(53), np.full(4, 0.05), "valid")
    (over,) = summarise(played("a", slow))
    student = 2 * stats.t.ppf(0.975, 49) * np.std(slow, ddof=1) / 50**0.5
    assert over["block"] > 5
    assert over["mean_high"] - over["mean_low"] > 1.3 * student
    (short,) = quality(trace_path, (0.01,), ("sidco-e",), kinds=["gradient"])[:1]
    assert short["mean_status"] == "fewer than 20 steps"
    assert np.isnan(short["mean_low"])


def test_rules_are_compared_step_by_step():
    """Both follow the same ups and downs: intervals beside each other overlap, that of the difference is clear of 0."""
    rng = np.random.default_rng(1)
    shared = 1.8 + 0.2 * rng.standard_normal(60)  # b is farther from k
    series = played("a", shared) + played("b", shared + 0.03 + 0.01 * rng.standard_normal(60))
    low, high = ([r[end] for r in summarise(series)] for end in ("mean_low", "mean_high"))
    assert max(low) < min(high)
    (found,) = differences(series, versus="a")
    assert (found["estimator"], found["versus"], found["n"]) == ("b", "a", 60)
    assert 0.02 < found["difference_low"] < 0.03 < found["difference_high"] < 0.04
    assert found["error_low"] > 0  # b is farther from k
    assert found["p_holm"] == found["p_value"] < 1e-3
    assert found["status"] == "ok"


def test_differences_are_corrected_for_their_number():
    """Nineteen rules no better than the first: one is significant by itself, none is after Holm's correction."""
    rng = np.random.default_rng(8)
    series = [r for i in range(20) for r in played(f"r{i}", 1 + 0.1 * rng.standard_normal(40))]
    found = differences(series, versus="r0")
    least = min(found, key=lambda r: r["p_value"])
    assert least["p_value"] < 0.05
    assert least["p_holm"] == pytest.approx(19 * least["p_value"])
    assert least["p_holm"] > 0.05
    assert all(r["p_holm"] >= r["p_value"] for r in found)


def test_every_rank_ratio_kind_and_layer_has_a_rule_of_its_own(tmp_path):
    """Rules that remember: what one series saw is nothing to another, whatever else is looked at beside it."""
    path, rng = tmp_path / "run.zarr", np.random.default_rng(3)
    create_trace(path, [Layer("a", 0, (2000,)), Layer("b", 2000, (1000,))], world_size=2)
    for rank in range(2):
        writer = TraceWriter(path, rank, kinds=("gradient", "corrected"))
        for step in range(3):
            x = ((1 + rank) * 1.3**step * rng.laplace(size=3000)).astype(np.float32)
            x[2000:] *= 5
            writer.append(step, {"gradient": x, "corrected": 3 * x})
        writer.close()
    rules = ("hard", "micro")
    together = quality_series(path, (0.1, 0.01), rules, per_layer=True)
    labels = ("rank", "ratio", "kind", "layer", "estimator", "step")
    found = {tuple(r[n] for n in labels): (r["selected"], r["threshold"]) for r in together}
    assert len(found) == len(together) == 2 * 2 * 2 * 3 * 2 * 3
    for rank, ratio, kind in itertools.product((0, 1), (0.1, 0.01), ("gradient", "corrected")):
        for name, part in (("all", slice(None)), ("a", slice(2000)), ("b", slice(2000, None))):
            for rule in rules:
                alone = make_estimator(rule)
                for step in range(3):
                    x = open_trace(path).read(step, rank, kind)[part]
                    estimate, selection = alone.select(x, ratio)
                    key = (rank, ratio, kind, name, rule, step)
                    assert found[key] == (len(selection), estimate.threshold), key


def test_the_stage_that_is_farthest_off_is_blamed():
    """In each of three data sets another one of three stages, whichever side it is off to."""
    rng, blamed = np.random.default_rng(0), []
    sizes = np.where(rng.random(50_000) < 0.02, 30, 1)
    for x in (
        sizes * rng.laplace(size=50_000),
        rng.standard_normal(50_000),
        rng.standard_t(3, 50_000),
    ):
        options = {"sidco-e": {"stages": 3}}
        found = stage_budget(x.astype(np.float32), (0.001,), ("sidco-e",), options=options)
        far = [abs(np.log(r["factor"])) for r in found]
        assert len(far) == 3
        assert [r["blame"] for r in found] == [f == max(far) for f in far]
        blamed.append(int(np.argmax(far)))
    assert blamed == [0, 1, 2]


def test_a_comparison_is_corrected_for_ratios_and_layers_together():
    rng = np.random.default_rng(9)
    series = [
        r
        for name in ("a", "b")
        for ratio in (0.1, 0.01)
        for layer in ("all", "w", "v")
        for r in played(name, 1 + 0.1 * rng.standard_normal(40), ratio, layer)
    ]
    found = differences(series, versus="a")
    assert len(found) == 6
    least = min(found, key=lambda r: r["p_value"])
    assert least["p_holm"] == pytest.approx(6 * least["p_value"])


def test_a_comparison_leaves_out_what_a_rule_learned_from():
    rng = np.random.default_rng(2)
    ends = 1 + 0.1 * rng.standard_normal((2, 30))
    series = played("hard", np.r_[9.0, ends[0]]) + played("exact", np.r_[1.0, ends[1]])
    for versus, sign in (("exact", 1), ("hard", -1)):
        (found,) = differences(series, versus=versus)
        assert found["n"] == 30 == min(r["n"] for r in summarise(series))
        assert found["difference"] == pytest.approx(sign * np.mean(ends[0] - ends[1]))
    (alone,) = differences(played("hard", [2.0]) + played("exact", [1.0]), versus="exact")
    assert (alone["n"], alone["difference"]) == (1, 1.0)


def test_a_comparison_takes_two_rules():
    with pytest.raises(InputError, match="another estimator"):
        differences(played("a", [1.0]), versus="b")
    (nothing, much) = (differences(played(*rule) + played("b", [1.0] * 30), versus="b")[0] for rule in (
        ("a", [0.0] * 30), ("a", [4.0] * 30)
    ))  # fmt: skip
    assert nothing["error"] == pytest.approx(np.log(200))  # half an element of a hundred
    assert much["error"] == pytest.approx(np.log(4))
    (few,) = differences(played("a", [1.0, 2.0]) + played("b", [1.0, 1.0]), versus="b")
    assert few["difference"] == 0.5
    assert few["status"] == "fewer than 20 steps"
    assert np.isnan(few["p_holm"])
