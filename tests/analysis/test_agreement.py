"""Ranks against each other: numbers against NumPy and a planted noise scale; the interval against its coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import betabinom
from support.terminal import records, run
from support.traces import write_replicas

import gradstats
from gradstats.analysis.verdicts import batch_sentence
from gradstats.errors import InputError, TraceError
from gradstats.statistics.resampling import ratio_interval
from gradstats.statistics.union import UnionGrowth, fit_union
from gradstats.trace import Layer, TraceWriter, create_trace

LAYERS = [Layer("w", 0, (60, 50)), Layer("dead", 3000, (20,)), Layer("b", 3020, (180,))]
NUMEL, RANKS, STEPS = 3200, 4, 24


def gradient(step, rank):
    """Return a common part of norm 1 and a rank's own, whose variance is 4 in all."""
    x = np.random.default_rng([1, step]).standard_normal(NUMEL)
    x = (
        x / np.linalg.norm(x)
        + 2 * np.random.default_rng([2, step, rank]).standard_normal(NUMEL) / NUMEL**0.5
    )
    x[3000:3020] = 0
    return x.astype(np.float32)


def write(path, ranks=RANKS, steps=STEPS, of=gradient, **metadata):
    create_trace(path, LAYERS, world_size=ranks, metadata=metadata)
    for rank in range(ranks):
        writer = TraceWriter(path, rank, kinds=("gradient", "corrected"))
        for step in range(steps):
            g = of(step, rank)
            writer.append(step, {"gradient": g, "corrected": 3 * g})
        writer.close()
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write(tmp_path_factory.mktemp("agreement") / "run.zarr", batch_size=32)


def test_numbers_are_those_of_naive_loops(trace):
    found = gradstats.agreement(trace, ratio=0.01, per_layer=True, steps=[3], kinds=["gradient"])
    assert [r["layer"] for r in found if r["step"] == 3] == ["all", "w", "dead", "b"]
    slices = {"all": slice(None), **{la.name: la.slice for la in LAYERS}}
    for record in found:
        if record["layer"] == "dead":
            assert math.isnan(record["cosine"])
            assert math.isnan(record["noise_scale"])
            continue
        g = [np.float64(gradient(3, r)[slices[record["layer"]]]) for r in range(RANKS)]
        pairs = list(itertools.combinations(g, 2))
        k = max(1, round(0.01 * g[0].size))
        top = [set(np.argsort(-abs(x))[:k]) for x in g]
        cosines = [x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in pairs]
        some = [(x != 0) | (y != 0) for x, y in pairs]
        signs = [
            np.mean((np.sign(x) == np.sign(y))[s]) for (x, y), s in zip(pairs, some, strict=True)
        ]
        mean, n = np.mean(g, axis=0), RANKS
        noise = sum(((x - mean) ** 2).sum() for x in g) / (n - 1)
        signal = mean @ mean - noise / n
        assert record["cosine"] == pytest.approx(np.mean(cosines), rel=1e-9)
        assert record["signs"] == pytest.approx(np.mean(signs), rel=1e-9)
        both = [len(s & t) / k for s, t in itertools.combinations(top, 2)]
        assert record["overlap"] == pytest.approx(np.mean(both))
        assert record["explained"] == pytest.approx(mean @ mean / np.mean([x @ x for x in g]))
        expected = 32 * noise / signal if signal > 0 else math.inf
        assert record["noise_scale"] == pytest.approx(expected, rel=1e-6)
        times = np.bincount([i for s in top for i in s], minlength=g[0].size)
        growth = fit_union(np.bincount(times, minlength=n + 1))
        assert growth.predicted(n) / k == pytest.approx(len(set().union(*top)) / k, rel=1e-6)
        low, high = growth.bounds(8)
        assert record["union"] == pytest.approx(min(max(growth.predicted(8), low), high) / k)
        assert (record["union_low"], record["union_high"]) == pytest.approx((low / k, high / k))


def test_overlap_is_of_what_a_rank_has(tmp_path):
    """Ranks with fewer elements than k select fewer: 30, 30 and 10, the first two alike, the third in both."""
    values = np.zeros((3, NUMEL), np.float32)
    values[:, 100:110] = 1
    values[:2, 110:130] = [[2], [3]]
    path = write(tmp_path / "run.zarr", 3, 1, lambda step, rank: values[rank])
    found = gradstats.agreement(path, ratio=0.1, kinds=["gradient"], workers=3)
    (record,) = (r for r in found if r["step"] == 0)
    assert record["k"] == 320
    # of the first: all in the second, a third in the third; of the third: all in both
    assert record["overlap"] == pytest.approx(np.mean([(1 + 1 / 3) / 2, (1 + 1 / 3) / 2, 1]))
    assert record["union"] == pytest.approx(30 / 320)


def test_the_union_is_the_beta_binomials():
    for world, rho in itertools.product((1, 2, 8, 100), (1e-9, 0.01, 0.5, 0.99)):
        growth = UnionGrowth(1000, np.array([900, 80, 20]), rho)
        a, b = np.array([0.06, 0.94]) * (1 / rho - 1)  # a rank selects 60 of 1000
        expected = 1000 * (1 - betabinom.pmf(0, world, a, b))
        assert growth.predicted(world) == pytest.approx(expected, rel=1e-5 if rho > 1e-6 else 1e-2)
    for rho, union in ((0.0, 1000 * (1 - 0.94**8)), (1.0, 60)):
        growth = UnionGrowth(1000, np.array([900, 80, 20]), rho)
        assert growth.predicted(8) == pytest.approx(union)
    assert fit_union(np.array([0, 0, 3])).predicted(7) == 3
    assert fit_union(np.zeros(3, int)).predicted(7) == 0


def test_a_planted_noise_scale_is_found_in_samples(trace):
    (one,) = [r for r in gradstats.agreement(trace) if (r["step"], r["kind"]) == (None, "gradient")]
    assert one["noise_scale"] == pytest.approx(32 * 4, rel=0.1)
    assert one["low"] < 32 * 4 * (1 - 20 / NUMEL) < one["high"] < 2 * one["low"]
    (more,) = [
        r for r in gradstats.agreement(trace) if (r["step"], r["kind"]) == (None, "corrected")
    ]
    assert more["noise_scale"] == pytest.approx(one["noise_scale"], rel=1e-5)
    (other,) = [
        r for r in gradstats.agreement(trace, batch=1, kinds=["gradient"]) if r["step"] is None
    ]
    assert other["noise_scale"] == pytest.approx(one["noise_scale"] / 32)


@pytest.mark.parametrize(("batch", "samples"), [(8, 100), (None, 100 / 8)])
def test_of_a_sharded_model_every_rank_s_samples_count(tmp_path, batch, samples):
    """The gradient of a replica is the mean over its ranks: its batch is that of all of them."""

    def replica(step, number):
        rng = np.random.default_rng([5, step, number])
        mean = np.random.default_rng(5).standard_normal(620)
        # of 16 samples, whose noise is 100 times as large as the mean
        noise = 10 * np.linalg.norm(mean) * rng.standard_normal(620) / 620**0.5
        return (mean + noise / 4).astype(np.float32)

    known = {} if batch is None else {"batch_size": batch}
    path = write_replicas(tmp_path / "run.zarr", range(40), replica, **known)
    one = gradstats.agreement(path)[-1]
    assert one["noise_scale"] == pytest.approx(samples, rel=0.1)
    assert one["low"] < samples < one["high"]
    assert (one["ranks"], one["world"], one["batch"]) == (2, 4, batch)
    assert f"that of all ranks, {4 * (batch or 1)}" in batch_sentence(one)


def test_ties_are_not_agreement(tmp_path):
    """Of independent signs of one size any k are the largest."""

    def signs(step, rank):
        rng = np.random.default_rng([4, step, rank])
        return np.float32(0.01) * rng.choice(np.array([-1, 1], np.float32), NUMEL)

    path = write(tmp_path / "signs.zarr", of=signs)
    (one,) = [
        r for r in gradstats.agreement(path, ratio=0.1, kinds=["gradient"]) if r["step"] is None
    ]
    assert one["overlap"] == pytest.approx(0.1, abs=0.03)
    assert 1 <= one["union_low"] <= one["union"] <= one["union_high"]
    assert one["union_low"] == pytest.approx((1 - 0.9**RANKS) / 0.1, rel=0.05)


def test_means_over_steps_have_intervals_and_the_batch_a_sentence(trace):
    (one,) = [r for r in gradstats.agreement(trace, kinds=["gradient"]) if r["step"] is None]
    for name, truth in (("cosine", 1 / 5), ("overlap", None)):
        assert one[f"{name}_low"] < one[name] < one[f"{name}_high"]
        assert truth is None or one[f"{name}_low"] < truth < one[f"{name}_high"] + 0.01
    assert batch_sentence(one | {"world": 1}).startswith(
        "a larger batch would pay: that of all ranks, 32 samples, is below"
    )
    # steps are about 1 + noise scale ÷ batch: at the noise scale twice the batch saves a quarter
    assert batch_sentence(one | {"world": 1}).endswith(
        ", far below which twice the batch needs about half the steps, and at which three quarters"
    )
    assert batch_sentence(one | {"world": 9}).endswith(
        ", far beyond which more samples hardly save steps"
    )
    assert batch_sentence(one | {"world": 4}).startswith(
        "the batch of all ranks, 128 samples, is about the noise"
    )
    assert batch_sentence(one | {"world": 9}).startswith("a larger batch would bring little")
    few = one | {"low": math.nan, "reason": "fewer than 20 steps"}
    assert "not known: fewer than 20 steps" in batch_sentence(few)


def test_the_interval_of_a_ratio_covers():
    rng, inside, runs, d = np.random.default_rng(3), 0, 400, 40
    for _ in range(runs):
        g = rng.standard_normal((30, 2, d)) * 2 / d**0.5 + np.full(d, d**-0.5)
        mean = g.mean(axis=1)
        noise = ((g - mean[:, None]) ** 2).sum(axis=(1, 2))
        signal = (mean**2).sum(axis=1) - noise / 2
        low, high, reason = ratio_interval(noise, signal)
        assert not reason
        inside += low <= 4 <= high
    # 95 %, and three standard deviations of 400 runs; mean_interval itself covers 92 to 97 %
    assert 0.91 <= inside / runs <= 0.985


def test_an_interval_without_an_upper_end_and_none():
    rng = np.random.default_rng(0)
    top, none = 1 + 0.1 * rng.standard_normal(40), rng.standard_normal(40)
    low, high, reason = ratio_interval(top, none)
    assert 0 < low < high == math.inf
    low, high, _ = ratio_interval(top, none + 2)  # the mean below is surely above zero
    assert 0.3 < low < 0.5 < high < 1
    assert not reason
    holes = np.where(np.arange(80) % 2 == 0, math.nan, np.repeat(top, 2))
    assert ratio_interval(holes, np.repeat(none + 2, 2)) == ratio_interval(top, none + 2)
    # of nothing there is no share, and may be any of what may be nothing
    assert ratio_interval(0 * top, none + 2) == (0, 0, "")
    assert ratio_interval(0 * top, none) == (0, math.inf, "")
    assert ratio_interval(top[:19], none[:19])[2] == "fewer than 20 steps"
    assert ratio_interval(top[:0], none[:0])[2] == "fewer than 20 steps"


def test_gradients_captured_after_averaging_are_told(tmp_path):
    path = write(tmp_path / "run.zarr", 2, 3, lambda step, rank: gradient(step, 0))
    found = gradstats.agreement(path)
    assert {r["reason"] for r in found} == {
        "the ranks hold the same gradient: captured after averaging, or of the same samples on every rank"
    }
    assert found[0]["cosine"] == pytest.approx(1)
    assert math.isnan(found[0]["noise_scale"])


def test_some_steps_captured_after_averaging_are_told(tmp_path):
    """The noise scale is that of the others, and no interval is made of some of the steps."""
    path = write(tmp_path / "run.zarr", 2, 25, lambda step, rank: gradient(step, rank * (step > 5)))
    *each, over = gradstats.agreement(path)
    said = "the ranks hold the same gradient at 6 of 25 steps: captured after averaging"
    assert over["reason"].startswith(said)
    assert math.isnan(over["low"])
    assert f"is not known: {said}" in batch_sentence(over)
    others = gradstats.agreement(path, steps=range(6, 25))[-1]
    assert over["noise_scale"] == pytest.approx(others["noise_scale"])
    assert math.isnan(each[0]["noise_scale"])
    assert math.isfinite(each[6]["noise_scale"])


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_steps_without_a_gradient_are_left_out_and_counted(tmp_path, value):
    """They say nothing of the others, and least of all that ranks hold the same gradient."""

    def some(step, rank):
        return gradient(step, rank) if step != 3 else np.full(NUMEL, value, np.float32)

    *each, over = gradstats.agreement(write(tmp_path / "run.zarr", 2, 25, some, batch_size=2))
    others = gradstats.agreement(tmp_path / "run.zarr", steps=[*range(3), *range(4, 25)])[-1]
    assert (over["without"], others["without"]) == (1, 0)
    for name in ("noise_scale", "low", "high", "cosine", "signs", "overlap", "union", "explained"):
        assert over[name] == pytest.approx(others[name]), name
    assert each[3]["reason"] == "a rank's gradient is zero, or not finite"
    assert math.isnan(each[3]["union"])
    assert math.isnan(each[3]["noise_scale"])
    assert batch_sentence(over) == f"{batch_sentence(others)}. Left out: one step of zeros or NaN"


def test_a_rank_of_zeros_makes_no_larger_batch_pay(tmp_path):
    """It is no noisy estimate of the mean gradient; left in, it more than doubles the noise scale."""

    def but_one(step, rank):
        return gradient(step, rank) if rank != 1 else np.zeros(NUMEL, np.float32)

    path = write(tmp_path / "run.zarr", 3, 24, but_one, batch_size=1)
    over = gradstats.agreement(path, kinds=["gradient"])[-1]
    assert (over["without"], over["reason"]) == (24, "a rank's gradient is zero, or not finite")
    assert batch_sentence(over).startswith(
        "whether a larger batch than 3 samples would pay is not known: a rank's gradient is zero"
    )
    sound = gradstats.agreement(path, kinds=["gradient"], ranks=[0, 2])[-1]
    assert sound["low"] < 4 < sound["high"]  # the noise of a rank is 4, the signal 1
    anything = sound | {"low": 0.0, "high": math.inf}
    assert batch_sentence(anything).endswith("is not known: the noise scale may be anything")


def test_intervals_hold_only_what_can_be(tmp_path):
    """An overlap that is rarely above zero has no interval that begins below it."""

    def seldom(step, rank):
        g = np.full(NUMEL, 1e-3, np.float32)
        g[0 if step % 9 == 0 else rank + 1] = 1
        return g

    over = gradstats.agreement(write(tmp_path / "run.zarr", 2, 27, seldom), ratio=1 / NUMEL)[-1]
    assert over["overlap"] == pytest.approx(1 / 9)
    assert over["overlap_low"] == 0 < over["overlap_high"] < 1


def test_a_step_that_lacks_a_rank_does_not_count(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS, world_size=3)
    for rank in range(3):
        writer = TraceWriter(path, rank)
        for step in range(4):
            if (step, rank) != (2, 1):
                writer.append(step, {"gradient": gradient(step, rank)})
        writer.close()
    *each, over = gradstats.agreement(path)
    assert [r["step"] for r in each] == [0, 1, 3]
    assert over["step"] is None
    for name in ("cosine", "signs", "overlap", "union"):
        assert over[name] == pytest.approx(np.mean([r[name] for r in each]))
    assert {r["ranks"] for r in (*each, over)} == {3}
    assert {r["world"] for r in gradstats.agreement(path, ranks=[0, 2])} == {3}
    assert [r["incomplete"] for r in (*each, over)] == [0, 0, 0, 1]
    said = "1 step is left out, as a rank lacks it: name ranks that hold it with --rank"
    assert said in run("agreement", path).stderr
    assert "left out" not in run("agreement", path, "--rank", 0, "--rank", 2).stderr


def test_what_has_no_ranks_to_compare_is_one_line(tmp_path, trace):
    with pytest.raises(InputError, match="no step that two ranks hold"):
        gradstats.agreement(write(tmp_path / "one.zarr", 1, 2))
    with pytest.raises(InputError, match="no step that two ranks hold"):
        gradstats.agreement(np.ones(5, np.float32))
    create_trace(tmp_path / "three.zarr", LAYERS, world_size=3)
    for rank, steps in enumerate([(0,), (0, 1), (1,)]):
        writer = TraceWriter(tmp_path / "three.zarr", rank)
        for step in steps:
            writer.append(step, {"gradient": gradient(step, rank)})
        writer.close()
    with pytest.raises(InputError, match="no step that all ranks hold; name ranks that hold the"):
        gradstats.agreement(tmp_path / "three.zarr")
    create_trace(tmp_path / "s.zarr", LAYERS, world_size=2)
    for rank in range(2):
        writer = TraceWriter(tmp_path / "s.zarr", rank, store="sketches")
        writer.append(0, {"gradient": gradient(0, rank)})
        writer.close()
    with pytest.raises(TraceError, match="only sketches"):
        gradstats.agreement(tmp_path / "s.zarr")


def test_the_command(trace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = records("agreement", trace, "--per-layer", "--workers", 16)
    fields = {
        "step",
        "kind",
        "layer",
        "cosine",
        "signs",
        "overlap",
        "union",
        "noise_scale",
        "low",
        "high",
    }
    assert all(r.keys() >= fields for r in found)
    assert len(found) == (STEPS + 1) * 2 * (1 + len(LAYERS))
    assert found[0]["workers"] == 16
    done = run("agreement", trace, "--step", 0, "--step", 1)
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Too wide" not in done.stdout
    assert "no interval: fewer than 20 steps" in done.stderr
    said = " ".join(done.stdout.split())
    assert "whether a larger batch than 128 samples would pay is not known" in said
    notes = " ".join(done.stderr.split())
    assert "noise that ranks share" in notes
    # the trace says how many, and nobody else
    assert "noise scale in samples; union of 8 workers, k = 0.001 d" in notes
    done = run("agreement", trace, "--rank", 0)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
