"""Conclusions on data whose truth is known: which law is closest, which rule hits k."""

import math
import re

import numpy as np
import pytest
from scipy.optimize import brentq

import gradstats
from gradstats.analysis.closest import closest_laws, evenly, law_pairs
from gradstats.analysis.quality import INFINITE, series_of, spread_of
from gradstats.analysis.rules import TOLERANCE, judged_rules
from gradstats.analysis.verdicts import (
    closest_law,
    compressor_did,
    counting_rules,
    left_out,
    scale_moves,
    sound_elements,
    tail_tests,
    tail_weight,
    uneven,
    which_rule,
)
from gradstats.analysis.verdicts.verdict import Verdict, off_by, percent
from gradstats.statistics.laws import LAWS
from gradstats.trace import Layer, TraceWriter, create_trace
from gradstats.trace.sources import Subset, open_source

N = 200_000
SIZES = (1.0, 0.1, 0.01, 0.003)


def signed(rng, magnitudes):
    return (magnitudes * rng.choice((-1, 1), magnitudes.size)).astype(np.float32)


def gradients(steps=1, seed=0):
    """Return {name: gradients by step}, each of a law that is known."""
    rng = np.random.default_rng(seed)
    each = {
        "uniform": lambda _: signed(rng, rng.uniform(size=N)),
        "laplace": lambda _: signed(rng, rng.exponential(size=N)),
        "pareto": lambda _: signed(rng, rng.pareto(1 / 0.8, N)),
        "clipped": lambda _: np.clip(signed(rng, rng.exponential(size=N)), -4, 4),
        "gamma": lambda _: signed(rng, rng.gamma(0.4, size=N)),
        "two laws": lambda _: signed(
            rng, np.where(rng.random(N) < 0.02, 30, 1) * rng.exponential(size=N)
        ),
        "drifting": lambda step: signed(rng, 2.0**-step * rng.exponential(size=N)),
    }
    return {name: [make(step) for step in range(steps)] for name, make in each.items()}


def trace_of(path, steps):
    create_trace(path, [Layer("w", 0, (steps[0].size,))], world_size=1)
    writer = TraceWriter(path, 0)
    for step, values in enumerate(steps):
        writer.append(step, {"gradient": values})
    writer.close()
    return open_source(path)


def layered(rng, n=N // 4):
    return {f"l{i}": signed(rng, size * rng.exponential(size=n)) for i, size in enumerate(SIZES)}


def law(source, **options):
    return closest_law(closest_laws(law_pairs(source, **options)))


def rule(source, **options):
    return which_rule(judged_rules(series_of(source, Subset(), **options)))


def error_of(verdict):
    """Return the error that a headline says, in per cent."""
    return float(re.search(r"([\d.]+)\N{NO-BREAK SPACE}%", verdict.headline)[1])


NAMES = {
    "uniform": "double gen. Pareto",
    "laplace": "Laplace",
    "pareto": "double gen. Pareto (mle)",
    "clipped": None,
    "gamma": "double gamma",
    "two laws": None,
}


@pytest.mark.parametrize("steps", [1, 3])
def test_the_closest_law_is_the_one_the_data_is_of(steps, tmp_path):
    for name, known in NAMES.items():
        each = gradients(steps)[name]
        source = trace_of(tmp_path / f"{name}.zarr", each) if steps > 1 else open_source(each[0])
        verdict = law(source)
        how = "judged at the next (2 pairs)" if steps > 1 else "Judged on the gradient that it was"
        assert how in verdict.numbers, name
        if known is None:
            assert verdict.headline.startswith("None of 3; the nearest, "), name
            assert "-fold" in verdict.headline or error_of(verdict) > 5, name
        else:
            assert verdict.headline.startswith(f"{known}: thresholds within "), name
            assert error_of(verdict) < (15 if name == "pareto" else 5), name
        assert verdict.warn == ("-fold" in verdict.headline), name


def test_none_says_where_the_nearest_is_farthest_off(tmp_path):
    """The pair, the ratio and the direction are those of the law's own records."""
    source = trace_of(tmp_path / "clipped.zarr", gradients(3)["clipped"])
    pairs = law_pairs(source)
    best = closest_laws(pairs)[0]
    same = ("model", "method", "by_layer")
    own = [r for r in pairs if all(r[n] == best[n] for n in same)]
    off, ratio, fitted, judged = max(
        (
            (e, ratio, r["fitted"], r["judged"])
            for r in own
            for ratio, e in r["log_quantile"].items()
        ),
        key=lambda one: abs(one[0]),
    )
    said = law(source).numbers
    side = "high" if off > 0 else "low"
    at = re.search(r"Farthest off: its threshold at ratio (\S+) is (.+) at step (\d+), "
                   r"fitted at step (\d+)\.", said.replace("\N{NO-BREAK SPACE}%", "%"))  # fmt: skip
    assert at.group(1, 3, 4) == (f"{ratio:g}", str(judged), str(fitted))
    assert f"too {side}" in at[2]
    (number,) = re.findall(r"[\d.]+", at[2])
    shown = 1 + float(number) / 100 if "%" in at[2] else float(number)
    assert shown == pytest.approx(np.exp(abs(off)), rel=0.05)


def test_what_is_too_low_is_so_by_a_factor():
    said = {
        -0.5: "too low by a factor of 1.65",
        0.5: "65 % too high",
        -2.0: "too low by a factor of 7.39",
        0.0: "0.01 % too high",
    }
    said |= {-1e-9: "0.01 % too low", 1.0: "2.7-fold too high", -9: "more than 100-fold too low"}
    assert {off: off_by(off).replace("\N{NO-BREAK SPACE}", " ") for off in said} == said


def test_what_is_not_all_or_nothing_is_not_said_to_be():
    ledger = {
        "zeros": 0,
        "nonfinite": 1,
        "nonfinite_steps": 1,
        "gap": 1.0,
        "constant": [],
        "steps": 1,
    }
    ledger |= {"tied": 0.0, "largest_tie": 1, "rank": 0, "kind": "gradient"}
    said = sound_elements([ledger], 10**6, 1, [], 1).headline.replace("\N{NO-BREAK SPACE}", " ")
    assert said.startswith("1 element NaN or infinite in the worst step (less than 0.01 %)")
    of_all = uneven({0: 0.997}, 0.01, 0.1, 10**6).headline.replace("\N{NO-BREAK SPACE}", " ")
    assert of_all == "The largest 1 % hold more than 99 % of its energy"
    assert "hold 100\N{NO-BREAK SPACE}% of" in uneven({0: 1.0}, 0.01, 0.1, 10**6).headline


@pytest.mark.parametrize(
    ("off", "said"),
    [
        (math.inf, "is infinite, which keeps nothing at step 1"),
        (-math.inf, "is 0, which keeps everything at step 1"),
    ],
)
def test_a_threshold_that_is_no_number_is_said(off, said):
    law = {
        "model": "laplace",
        "method": "closed",
        "by_layer": False,
        "tail_error": 0.5,
        "worst": abs(off),
    }
    law |= {"chance": 0.0, "k": 100, "pairs": 2, "ratios": [0.01], "predictive": False, "off": off}
    law |= {"off_ratio": 0.01, "off_judged": 1, "off_fitted": 0}
    assert f"its threshold at ratio 0.01 {said}." in closest_law([law]).numbers


def test_a_rule_that_counts_and_finds_all_elements_is_told_from_one_that_is_off():
    """Each record is looked at once: a long series has many of them."""

    class Record(dict):
        __hash__ = None

        def __eq__(self, other):
            raise AssertionError("records are compared")

    row = {"estimator": "exact", "k": 100, "ratio": 0.01}
    full = row | {"selected": 110, "threshold": 0.5, "quality": 1.1}
    short = row | {"selected": 50, "threshold": 0.0, "quality": 0.5, "ratio": 0.1}
    assert counting_rules([Record(full), Record(short), Record(full)]) == (
        " There are fewer non-zero elements than k at ratio 0.1: all are kept. Even rules that count elements are up "
        "to 10\N{NO-BREAK SPACE}% off: magnitudes are tied."
    )


def test_layers_of_different_size_are_a_law_each():
    found = closest_laws(law_pairs(open_source(layered(np.random.default_rng(0)))))
    assert closest_law(found).headline.startswith("Laplace, one a layer: thresholds within ")
    whole = [r for r in found if not r["by_layer"]]
    assert min(r["tail_error"] for r in whole) > np.log(1.05)
    # judged by the same thresholds from the true law of each layer
    scales, k = np.array(SIZES), N // 100
    (record,) = (r for r in law_pairs(open_source(layered(np.random.default_rng(0))), ["laplace"])
                 if r["by_layer"])  # fmt: skip
    flat = np.sort(np.abs(np.concatenate([*layered(np.random.default_rng(0)).values()])))[::-1]
    true = next(t for t in np.linspace(8, 0.1, 4000) if (np.exp(-t / scales) * N / 4).sum() >= k)
    assert record["log_quantile"][0.01] == pytest.approx(np.log(true / flat[k - 1]), abs=0.02)


def test_layers_too_small_for_a_law_count_with_the_others():
    """Of fewer than ten elements a layer has no law of its own; its elements share those of the others."""
    rng = np.random.default_rng(1)
    scales = {"large": 1.0, "small": 0.1, "ten": 20.0}
    sizes = {"large": 4000, "small": 2000, "ten": 10}
    layers = {n: signed(rng, scales[n] * rng.exponential(size=sizes[n])) for n in sizes}
    layers |= {f"tiny {i}": signed(rng, rng.exponential(size=9)) for i in range(250)}
    few, flat = 250 * 9, np.sort(np.abs(np.concatenate([*layers.values()])))[::-1]
    means = np.array([np.abs(layers[n]).mean(dtype=float) for n in sizes])
    counts = np.array([*sizes.values()]) * (1 + few / sum(sizes.values()))
    pairs = law_pairs(open_source(layers), ["laplace"], ratios=[0.3, 0.01])
    (record,) = (r for r in pairs if r["by_layer"])
    assert [*record["log_quantile"]] == [0.3, 0.01]
    for ratio, off in record["log_quantile"].items():
        k = round(ratio * flat.size)
        threshold = brentq(lambda t, k=k: counts @ np.exp(-t / means) - k, 0, 1000)
        assert off == pytest.approx(np.log(threshold / flat[k - 1]), abs=1e-4), ratio


def test_laws_are_judged_at_a_step_that_they_have_not_seen(tmp_path):
    """Each step has a law of its own: what fits one does not fit the next."""
    rng = np.random.default_rng(0)
    steps = [signed(rng, rng.exponential(size=N)), signed(rng, rng.uniform(size=N))]
    source = trace_of(tmp_path / "run.zarr", steps)
    assert law(source, steps=[0]).headline.startswith("Laplace: thresholds within")
    assert law(source, steps=[1]).headline.startswith("double gen. Pareto: thresholds within")
    verdict = law(source)
    assert verdict.headline.startswith("None of 3; the nearest")
    (pair,) = (r for r in law_pairs(source, ["laplace"]))
    assert (pair["fitted"], pair["judged"]) == (0, 1)
    x, y = (np.sort(np.abs(s).astype(float))[::-1] for s in steps)
    eta = x.mean() * np.log(100) * np.exp(np.log(y).mean() - np.log(x).mean())
    assert pair["log_quantile"][0.01] == pytest.approx(np.log(eta / y[N // 100 - 1]), abs=1e-3)


def test_a_scale_that_drifts_is_no_other_law(tmp_path):
    source = trace_of(tmp_path / "run.zarr", gradients(4)["drifting"])
    assert law(source).headline.startswith("Laplace: thresholds within ")


@pytest.mark.parametrize(
    ("x", "headline"),
    [
        (np.array([1.0]), "No law can be judged"),
        (np.zeros(1000), "No law can be judged"),
        (
            np.where(np.arange(N) < 206, np.arange(N) + 1.0, 0),
            "Too few elements to tell laws apart",
        ),
    ],
)
def test_no_power_is_an_answer(x, headline):
    assert law(open_source(x.astype(np.float32))).headline == headline


@pytest.mark.parametrize("rest", [np.nan, 0.0])
def test_gradients_of_which_nothing_can_be_kept_judge_no_rule(rest, tmp_path):
    """The steps of a run that has diverged, say."""
    rng = np.random.default_rng(0)
    good = [signed(rng, rng.exponential(size=N)) for _ in range(6)]
    left = [np.full(N, rest, np.float32)] * 2
    source = trace_of(tmp_path / "both", [*good, *left])
    rules = judged_rules(series_of(source, Subset(), [0.01]))
    alone = judged_rules(series_of(trace_of(tmp_path / "good", good), Subset(), [0.01]))
    named = {r["estimator"]: r for r in rules}
    assert {r["empty"] for r in rules} == {2}
    # rules that remember nothing
    for r in alone:
        if r["estimator"] in ("sidco-e", "dgc", "gaussiank", "exact"):
            assert named[r["estimator"]] == r | {"trace": "both", "empty": 2}
    said = which_rule(rules)
    assert re.match(r"sidco-\w+: k̂/k = 1\.0", said.headline)
    assert "Left out: 2 gradients of which no element is finite and not zero." in said.numbers
    assert "Kept nothing" not in said.numbers
    (row,) = (r for r in gradstats.quality(source, [0.01], ["exact"]))
    assert (row["mean"], row["n"], row["status"]) == (1, 6, "ok")
    none = judged_rules(series_of(trace_of(tmp_path / "none", left), Subset(), [0.01]))
    assert which_rule(none).headline == "No estimating rule is judged"
    # no space that a sentence after it would double
    assert str(which_rule([])) == "No estimating rule is judged."
    assert "no element is finite and not zero" in which_rule(none).numbers


def test_chance_is_said_of_the_elements_that_it_is_of():
    """Where zeros begin, the threshold of 3,000 elements is less certain than that of 300."""
    x = np.zeros(300_000)
    rng = np.random.default_rng(0)
    x[:3010] = signed(rng, rng.exponential(size=3010))
    (law, *_) = closest_laws(law_pairs(open_source({"w": x}), ["laplace"], ratios=[0.01, 0.001]))
    assert law["k"] == 3000
    assert law["chance"] > 1.96 / math.sqrt(300)


def test_a_law_far_beyond_chance_is_refused_of_few_elements(tmp_path):
    """Of 20 elements beyond the smallest ratio: a log-normal is none of the laws, and a Pareto may be one."""
    said = {}
    for name, draw in {
        "log-normal": lambda rng: np.exp(1.5 * rng.standard_normal(20_000)),
        "Pareto 0.8": lambda rng: rng.pareto(1 / 0.8, 20_000),
    }.items():
        rng = np.random.default_rng([1, 2])
        steps = [signed(rng, draw(rng)) for _ in range(4)]
        laws = closest_laws(law_pairs(trace_of(tmp_path / f"{name}.zarr", steps)))
        assert laws[0]["chance"] > np.log(1.2)
        said[name] = closest_law(laws).headline
    assert said["log-normal"].startswith("None of 3; the nearest, ")
    assert said["Pareto 0.8"] == "Too few elements to tell laws apart"


def test_one_gradient_beside_zeros_is_judged_by_itself(tmp_path):
    x = gradients()["laplace"][0]
    laws = closest_laws(law_pairs(trace_of(tmp_path / "run.zarr", [np.zeros_like(x), x])))
    assert "laplace" in {law["model"] for law in laws}
    assert {(law["predictive"], law["pairs"]) for law in laws} == {(False, 1)}


def test_steps_are_spread_from_first_to_last(tmp_path):
    assert evenly([*range(10)], 3) == [0, 4, 9]
    assert evenly([3, 7], 6) == [3, 7]
    assert evenly([3, 7, 9], 1) == [3]
    source = trace_of(tmp_path / "run.zarr", [s[:1000] for s in gradients(6)["laplace"]])
    pairs = law_pairs(source, ["laplace"], most=3)
    assert [(r["fitted"], r["judged"]) for r in pairs] == [(0, 2), (2, 5)]


def test_steps_show_more_than_one_side_of_gradients_that_repeat():
    # at a fixed distance 20 of 39 steps, as 6 of 21, were every other one, or every fourth
    for most in (5, 6, 20):
        for n in range(most + 1, 400):
            steps = evenly(range(n), most)
            case = f"{most} of {n}: {steps}"
            assert len(set(steps)) == most, case
            assert (steps[0], steps[-1], sorted(steps)) == (0, n - 1, steps), case
            # one of each stretch: never two stretches without any
            assert np.diff(steps).max() <= 2 * (n - 1) / (most - 1), case
            for period in range(2, 11):
                if n >= 2 * period:
                    _, times = np.unique(np.array(steps) % period, return_counts=True)
                    assert times.max() < 0.9 * most, (period, case)


def test_a_rule_that_learned_from_the_only_gradient_is_not_judged():
    verdict = rule(open_source(gradients()["laplace"][0]))
    assert verdict.headline.startswith("sidco-")
    assert "hard, micro: the only gradient there is gave the threshold" in verdict.numbers


def test_a_rule_is_judged_on_gradients_after_those_it_learned_from(tmp_path):
    each = gradients(3)["laplace"]
    series = series_of(trace_of(tmp_path / "run.zarr", each), Subset(), (0.01,), ("hard",))
    assert [r["seen"] for r in series] == [0, 1, 2]
    (judged,) = judged_rules(series)
    assert judged["n"] == 2
    later = [r["selected"] / r["k"] for r in series if r["seen"]]
    assert judged["mean"][0.01] == pytest.approx(np.exp(np.mean(np.log(later))))
    (row,) = gradstats.quality(open_source(tmp_path / "run.zarr"), (0.01,), ("hard",))
    assert (row["n"], row["mean"]) == (2, pytest.approx(np.mean(later)))
    assert row["fresh"] == pytest.approx(1)  # each gradient by its own exact threshold


def test_what_keeps_nothing_is_not_near():
    verdict = rule(open_source(gradients()["uniform"][0]), estimators=("sidco-e", "sidco-p"))
    assert verdict.headline.startswith("sidco-p: ")
    assert "Kept nothing: sidco-e" not in verdict.headline
    paper = {"sidco-e": {"stages": "paper"}}  # whose thresholds stay as they are
    source = open_source(gradients()["uniform"][0])
    judged = judged_rules(series_of(source, Subset(), (0.01,), ("sidco-e",), options=paper))
    assert judged[0]["far"] == np.inf
    assert judged[0]["hits"] is False


def played(name, logs, k=1000, ratio=0.01):
    """Return the series of a rule whose ln(k̂/k) is known, a step each."""
    labels = {"trace": "t", "rank": 0, "kind": "gradient", "layer": "all", "ratio": ratio}
    return [
        labels
        | {"estimator": name, "step": step, "k": k, "selected": k * np.exp(log), "seen": step}
        | {"design": 1.0}
        for step, log in enumerate(logs)
    ]


def test_a_rule_that_is_half_off_in_every_gradient_is_told_from_one():
    """The worst of many gradients is no measure of chance: +50 % in each of twenty misses, a perfect rule hits."""
    rng = np.random.default_rng(0)
    verdicts = {0.0: [], np.log(1.5): []}
    for shift, found in verdicts.items():
        for _ in range(100):
            logs = shift + rng.normal(0, 0.1, 20)
            (judged,) = judged_rules(played("a", logs))
            found.append(judged["hits"])
    assert verdicts[0.0].count(True) == 100
    assert verdicts[np.log(1.5)].count(False) == 100


def test_the_range_of_few_steps_allows_for_elements_that_are_large_together():
    """Of fewer than five steps: least and most, widened by what chance does to the least certain of them."""
    rows = played("a", [0.1, -0.2, 0.05], k=400)
    for designs, widest in (
        ([1.0, 9.0, 4.0], 9.0),
        ([math.nan, 4.0, math.nan], 4.0),
        ([0.5, 0.25, 0.5], 1.0),  # chance does no less than to independent elements
        ([math.nan] * 3, 1.0),
    ):
        several = [r | {"design": d} for r, d in zip(rows, designs, strict=True)]
        (judged,) = judged_rules(several)
        chance = 1.959964 * math.sqrt(widest / 400)
        assert judged["low"][0.01] == pytest.approx(math.exp(-0.2 - chance)), designs
        assert judged["high"][0.01] == pytest.approx(math.exp(0.1 + chance)), designs
        assert not judged["interval"]


@pytest.mark.parametrize("n", [8, 25])
def test_the_interval_of_the_mean_covers_it(n):
    rng = np.random.default_rng(n)
    inside = 0
    for _ in range(1000):
        (judged,) = judged_rules(played("a", rng.normal(0.05, 0.2, n)))
        inside += judged["low"][0.01] <= np.exp(0.05) <= judged["high"][0.01]
    assert 0.93 <= inside / 1000 <= 0.97


def test_the_worst_ratio_decides():
    good, bad = played("a", [0.0] * 20), played("a", [1.0] * 20, ratio=0.001)
    (judged,) = judged_rules(good + bad)
    assert (judged["hits"], judged["far"]) == (False, pytest.approx(1.0))
    assert which_rule([judged]).headline == "None; the nearest, a, has k̂/k = 1.00 to 2.72"
    assert which_rule(judged_rules(good)).headline == "a: k̂/k = 1.00"
    unsure = judged_rules(played("a", np.random.default_rng(0).normal(0.2, 0.5, 20)))
    assert which_rule(unsure).headline.startswith("Not decided; the nearest, a, ")
    assert f"within a factor of {TOLERANCE:g} of 1" in which_rule(unsure).numbers


def test_a_rank_that_misses_k_is_not_hidden_by_the_others():
    good = [played("a", [0.0] * 20) for _ in range(3)]
    bad = played("a", [-0.5] * 20)
    series = [r | {"rank": rank} for rank, rows in enumerate([*good, bad]) for r in rows]
    (judged,) = judged_rules(series)
    # the mean over ranks, exp(−⅛), is within the tolerance
    assert (judged["hits"], judged["ranks"]) == (False, {0.01: 3})
    assert judged["mean"][0.01] == pytest.approx(math.exp(-0.5))
    said = which_rule([judged])
    assert said.headline == "None; the nearest, a, has k̂/k = 0.61"
    assert "The numbers are of rank 3 at 0.01, which misses k: " in said.numbers
    (judged,) = judged_rules([r for r in series if r["rank"] < 3])
    assert (judged["hits"], judged["ranks"]) == (True, {})
    assert "The numbers are of" not in which_rule([judged]).numbers


def test_infinities_are_not_called_ties():
    """They lie above every threshold, and are kept beside the k that are asked for."""
    values = np.random.default_rng(0).laplace(size=4000).astype(np.float32)
    for some, said in ((np.inf, "Rules that count elements keep"), (None, "magnitudes are tied")):
        odd = values.copy()
        if some:
            odd[:5] = some
        else:
            odd = np.round(odd)
        series = series_of(open_source(odd), Subset(), (0.01,), ("exact",))
        assert (series[0]["selected"] > series[0]["k"]) is True
        assert (series[0]["status"] == INFINITE) == (some is not None)
        assert ("magnitudes are tied" in counting_rules(series)) == (some is None), said


def test_a_law_that_is_near_is_told_from_those_that_are_refused():
    """However little the smallest ratio says: of layers of different scale, the others are many times off."""
    usual = {"method": "closed", "k": 40, "chance": 0.33, "pairs": 9, "ratios": [0.1, 0.001]}
    usual |= {"predictive": True, "off_ratio": 0.1, "off": 1.4, "off_fitted": 0, "off_judged": 1}
    near = usual | {"model": "laplace", "by_layer": True, "tail_error": 0.04, "worst": 0.07}
    far = usual | {"model": "laplace", "by_layer": False, "tail_error": 1.4, "worst": 1.5}
    assert closest_law([near, far]).headline.startswith("Laplace, one a layer: thresholds within ")
    some = far | {"tail_error": 0.2, "worst": 0.3}
    assert closest_law([near, some]).headline == "Too few elements to tell laws apart"
    none = near | {"tail_error": 0.2, "worst": 0.3}
    assert closest_law([none, far]).headline == "Too few elements to tell laws apart"


def scale(means, **record):
    usual = {"quantity": "mean", "n": len(means), "without": 0, "incomplete": 0, "relative": True}
    usual |= dict.fromkeys(("total_change", "total_change_low", "total_change_high"), math.nan)
    usual |= dict.fromkeys(("slope", "slope_low", "slope_high"), math.nan)
    usual |= {"low": min(means), "high": max(means), "spread": spread_of(len(means))}
    return scale_moves(usual | record, [*range(len(means))], means, len(means))


def test_a_scale_that_goes_up_and_down_is_no_factor():
    assert scale([4.0, 2.0, 1.0]).headline == "Mean magnitude × 0.25"
    assert scale([100.0, 1.0, 100.0, 1.0]).headline == "Mean magnitude between 1 and 100"
    assert "between 1 and 100." in scale([100.0, 1.0, 100.0, 1.0]).numbers
    assert scale([1.0, 1.05, 1.02]).headline == "Mean magnitude × 1"
    same = scale([0.5] * 25)
    assert same.headline == "Mean magnitude is 0.500, the same at all 25 steps"
    assert "have no power" not in same.numbers


def test_a_mean_of_ever_more_elements_says_so():
    """Of a gradient that fills up, the mean of what is not zero stays, and that of all elements does not."""
    means = [1.0, 1.0, 1.0]
    record = {"n": 3, "slope": math.nan}
    said = scale_moves(record, [0, 1, 2], means, 3, (0.01, 0.51)).numbers
    assert said.endswith(
        "Means are of the elements that are not zero, 1 to 51\N{NO-BREAK SPACE}% of all."
    )
    assert "not zero" not in scale_moves(record, [0, 1, 2], means, 3, (0.95, 1.0)).numbers


def test_a_slope_is_not_said_of_steps_that_there_are_not():
    known = {"slope": 2.0, "slope_low": 1.0, "slope_high": 3.0, "total_change": 1.8}
    known |= {"total_change_low": 1.4, "total_change_high": 2.2}
    assert "Per 100 steps" not in scale([*np.linspace(1, 2, 100)], **known).numbers
    said = scale([*np.linspace(1, 2, 101)], **known)
    assert said.numbers.endswith("Per 100 steps +200.0 % (+100.0 to +300.0).")
    assert said.headline.startswith("Mean magnitude × 1.8")


def test_a_rule_is_not_undecided_and_far_off_at_once():
    near = played("a", [0.0] * 20)
    wild = played("b", np.random.default_rng(1).normal(1.0, 6.0, 6))
    rules = judged_rules(near + wild)
    (b,) = (r for r in rules if r["estimator"] == "b")
    assert (b["hits"], b["far"] > np.log(2)) == (None, True)
    assert "Cannot be told" not in which_rule(rules).numbers
    assert "More than twofold off: b." in left_out(rules)[1]


def test_the_nearest_rule_is_named_first_and_the_farthest_last():
    """Of three rules that hit k and two that do not; then with every number given to another rule."""
    logs = (0.02, -0.08, 0.15, -1.0, 2.0)
    for names in ("abcde", "ecbda"):
        best, second, third, far, farthest = names
        series = [r for n, log in zip(names, logs, strict=True) for r in played(n, [log] * 20)]
        verdict = which_rule(judged_rules(sorted(series, key=lambda r: r["estimator"])))
        assert verdict.headline == f"{best}: k̂/k = 1.02"
        assert f"These hit k, too: {second}, {third}." in verdict.numbers
        assert verdict.numbers.endswith(f" Farthest off: {farthest}, 7.39.")
        neither = [r for r in series if r["estimator"] in (far, farthest)]
        verdict = which_rule(judged_rules(neither))
        assert verdict.headline == f"None; the nearest, {far}, has k̂/k = 0.37"
        assert verdict.numbers.endswith(f" Farthest off: {farthest}, 7.39.")


def test_no_number_near_100_is_a_power_of_ten():
    rules = judged_rules(played("a", [0.0] * 20) + played("b", [math.log(99.7)] * 20))
    assert which_rule(rules).numbers.endswith(" Farthest off: b, 100.")
    assert percent(math.log(1.998)) == "100\N{NO-BREAK SPACE}%"
    assert percent(math.log(140)) == "140-fold"


def test_a_test_of_the_tail_rejects_small_p_values():
    """Of three laws those are rejected that keep far more than k, and a control is not spoken of."""
    row = {"tail_ratio": 0.001, "tail_k": 500, "visible": 0.2, "p_tail": 0.5}
    models = ("laplace", "dgamma", "double_genpareto")
    for far in ([], models[:2], models[2:], models):
        rows = [row | {"model": m, "quality": {0.001: 1.4 if m in far else 1.02}} for m in models]
        said = tail_tests([*rows, row | {"model": "norm", "quality": {0.001: 9.0}}], {})
        named = ", ".join(LAWS[m].label for m in far) if far != models else "all 3 laws"
        assert said.endswith(f", and rejects {named or 'none of them'}."), far
        assert "sees 20\N{NO-BREAK SPACE}% more than k" in said


def test_a_short_table_says_what_it_leaves_out():
    series = [
        row
        for name, log in (("exact", 0.0), ("a", 0.1), ("b", -1.0), ("c", 2.0))
        for row in played(name, [log] * 20)
    ]
    names, said = left_out(judged_rules(series))
    assert names == ["exact", "b", "c"]
    assert said.endswith("More than twofold off: b, c. --all shows them.")
    assert left_out(judged_rules(played("exact", [0.0] * 20))) == ([], "")


def test_elements_that_are_large_together_widen_the_floor():
    rng = np.random.default_rng(0)
    even = rng.laplace(size=N)
    together = np.repeat(np.exp(rng.normal(0, 1.5, N // 500)), 500) * even
    series = [series_of(open_source(x.astype(np.float32)), Subset(), (0.01,), ("exact",))[0]
              for x in (even, together)]  # fmt: skip
    assert 0.7 < series[0]["design"] < 1.4
    assert series[1]["design"] > 10
    # as counted by hand
    marked = np.zeros(N // 512 * 512)
    largest = np.argsort(-np.abs(together.astype(np.float32)))[: series[1]["k"]]
    marked[largest[largest < marked.size]] = 1
    counts = marked.reshape(-1, 512).sum(1)
    share = counts.mean() / 512
    expected = counts.var(ddof=1) / (512 * share * (1 - share))
    assert series[1]["design"] == pytest.approx(expected)


def test_a_tail_without_a_shape_is_short_and_not_one_of_too_few_elements():
    """Of a uniform gradient likelihood may have no local maximum, however many its elements are."""
    row = {"step": 3, "layer": "pooled", "c": math.nan, "c_low": math.nan, "c_high": math.nan}
    for n, headline in ((20_000, "Short in the top tenth: "), (99, "Too few elements ")):
        said = tail_weight([row | {"n": n}], [], spike=False, layers=1, designs={})
        assert said.headline.startswith(headline)


def test_what_the_compressor_did_is_medians_in_the_units_that_are_said():
    nothing = {"build_up": math.nan, "communicate": math.nan}
    live = [
        nothing | {"bytes": size, "select": seconds, "quality": 1.5}
        for size, seconds in ((8, 0.002), (12, 0.004))
    ]
    assert compressor_did(live, "topk", 100) == Verdict(
        "topk: k̂/k = 1.50 (1.50 to 1.50)",
        "2 steps and ranks; 10 bytes a step, for 4 d = 400; select 3 ms.",
        True,
    )


def test_a_heavy_tail_is_of_the_layers_too_where_their_scales_explain_less_than_half():
    row = {"step": 3, "layer": "pooled", "n": 1000, "c": 0.3, "c_low": 0.1, "c_high": 0.5}
    for c, said in (
        (0.25, "in the layers too"),
        (0.1, "most of it from layers of different scale"),
    ):
        tails = [row, row | {"layer": "normalised", "c": c}]
        verdict = tail_weight(tails, [], spike=False, layers=2, designs={3: 4.0})
        assert verdict.headline == f"Heavy in the top tenth: ξ = 0.30, {said}"
        assert verdict.numbers.startswith("Top tenth of what is not zero, step ")
        assert "that of the top tenth is −0.10 to 0.70, which does not exclude 0" in verdict.numbers
