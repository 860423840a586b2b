"""Advice: which trainings are alike, what they allow, what a plan forbids, and what is said."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.every import every
from support.networks import measured_network
from support.terminal import records, run
from support.traces import LAYERS, heavy_trace, write

import gradstats
from gradstats.analysis import advise
from gradstats.analysis.advise import compared_kind
from gradstats.analysis.verdicts import what_to_try
from gradstats.analysis.verdicts.verdict import signed_percent
from gradstats.errors import InputError
from gradstats.primitives.ratio import RATIOS
from gradstats.trace import Layer, TraceWriter, create_trace
from gradstats.trace.sources import open_source

ALIKE = {"energy_0.01": 0.5, "energy_0.001": 0.2, "zeros": 0.0, "cosine": 0.3}


def training(name, optimizer="sgd", energy=0.5, **above):
    """Return a training whose top-k ended so far above dense, at 0.1 and 0.01."""
    settings = {
        ("dense-bf16", 1.0, "none", "bfloat16"): ([0.001], 0.5),
        ("topk", 0.1, "residual", "float32"): (above.get("tenth", [0.0, 0.01]), 0.2),
        ("topk", 0.01, "residual", "float32"): (above.get("hundredth", [0.05, 0.06]), 0.02),
    }
    names = ("rule", "ratio", "memory", "format")
    runs = [
        dict(zip(names, key, strict=True)) | {"steps": 10, "above": values, "bytes": size}
        for key, (values, size) in settings.items()
    ]
    properties = {"gradient": ALIKE | {"energy_0.01": energy}}
    return {"training": name, "optimizer": optimizer, "properties": properties, "runs": runs}


def near(count, **given):
    return [training(f"near{i}", **given) for i in range(count)]


def two_ranks(folder):
    """Return a trace of the same steps of two ranks."""
    create_trace(folder / "t.zarr", LAYERS, world_size=2)
    for rank in range(2):
        write(folder / "t.zarr", [0, 1], rank=rank)
    return str(folder / "t.zarr")


@pytest.fixture
def measured(monkeypatch):
    def give(trainings):
        held = {"tolerance": 0.02, "within": 7, "of": 9, "settings": ["topk", "dense-fp8"]}
        held |= {"left_out": 0, "constant": {"dense-fp8": 6, "dense-bf16": 5}, "distance": 1.0}
        held |= {"optimizers": ["sgd", "adamw"]}
        monkeypatch.setattr(advise, "evidence", lambda: {"trainings": trainings, "held_out": held})
        return trainings

    return give


def chosen(optimizer="SGD", tolerance=0.02, without=(), plans=()):
    known = [t for t in advise.evidence()["trainings"] if t["training"] not in without]
    return advise.choose("gradient", ALIKE, optimizer, tolerance, known, plans)


def said(records, planned=False):
    held = advise.evidence()["held_out"]
    return what_to_try(
        records, "SGD", held, usual=held["distance"], planned=planned, nonzero=1.0, enough=True
    )


def test_the_smallest_setting_that_kept_the_loss_everywhere_is_recommended(measured):
    measured(near(6))
    best, *others = chosen()
    assert (best["rule"], best["ratio"], best["memory"]) == ("topk", 0.1, "residual")
    # means over the seeds
    assert (best["low"], best["high"]) == (0.005, 0.005)
    # of six trainings the five nearest count, with two runs each
    assert (best["trainings"], best["runs"]) == (5, 10)
    assert [(r["rule"], r["ratio"]) for r in others] == [
        ("topk", 0.01),
        ("dense-bf16", 1.0),
        ("none", 1.0),
    ]
    assert others[0]["reason"].startswith("ended 5.5 % above dense in near")
    assert chosen(tolerance=0.055)[0]["ratio"] == 0.01
    assert chosen(tolerance=0.004)[0]["rule"] == "dense-bf16"
    assert chosen(tolerance=0.0001)[0]["rule"] == "none"
    assert gradstats.advise(np.ones(5000), optimizer="SGD", tolerance=0).rule == "none"


def test_what_held_out_advice_came_to_is_said_of_such_advice_alone(measured, monkeypatch):
    trainings = measured([t for o in ("sgd", "adamw", "muon") for t in near(5, optimizer=o)])

    def verdict(tolerance=0.02, plans=(), kind="gradient", optimizer="SGD"):
        return str(advise.advice_for(kind, ALIKE, optimizer, tolerance, plans=plans).verdict)

    made = "such advice ended within 2 % of dense in 7 of 9"
    assert f"{made}. These" in verdict()
    for other in (0.0001, 0.01, 0.06):
        assert made not in verdict(other), other
    # such advice was made of gradients, with these optimizers
    assert made in verdict(optimizer="PagedAdamW")
    assert made not in verdict(optimizer="Muon")
    assert made not in verdict(optimizer=None)
    trainings[0]["properties"]["corrected"] = trainings[0]["properties"]["gradient"]
    assert "Try topk" in verdict(kind="corrected")
    assert made not in verdict(kind="corrected")
    plan = {"compressor": "topk", "ratio": 0.1, "speedup": 1.5, "speedup_low": 1.2}
    assert made not in verdict(plans=[plan | {"speedup_high": 2.0}])
    held = {"tolerance": 0.02, "within": 7, "of": 9, "settings": ["dense-fp8"], "left_out": 2}
    held |= {"constant": {"dense-fp8": 6, "dense-bf16": 5}, "distance": 1.0}
    held |= {"optimizers": ["sgd", "adamw"]}
    monkeypatch.setattr(advise, "evidence", lambda: {"trainings": trainings, "held_out": held})
    left = f"{made}, always by dense-fp8 (2 that say little are not counted). "
    assert f"{left}These are short" in verdict()
    # what always says the same is a control, where it does as well
    held["constant"]["dense-bf16"] = 7
    control = "A rule that looks at no gradient would have, too: always dense-fp8 in 6, always dense-bf16 in 7."
    assert left + control in verdict()
    assert "no gradient" not in verdict(0.01)


def test_it_says_where_a_gradient_is_unlike_all_that_were_measured(measured, monkeypatch):
    trainings = measured([*near(4), training("far", energy=0.9)])
    first = advise.choose("gradient", ALIKE, "SGD", 0.02, trainings)[0]
    # the farthest of the five, in standard deviations of what they differ by
    farthest = advise.distances("gradient", ALIKE, trainings)[id(trainings[-1])]
    assert first["distance"] == farthest > 1

    def numbers(usual, kind="gradient"):
        held = advise.evidence()["held_out"] | {"distance": usual}
        monkeypatch.setattr(advise, "evidence", lambda: {"trainings": trainings, "held_out": held})
        return advise.advice_for(kind, ALIKE, "SGD").verdict.numbers

    unlike = f"It is not much like them: the farthest is {farthest:.2g} standard deviations away"
    assert f"{unlike}, and of the measured trainings none was farther than 1.2" in numbers(1.2)
    assert "not much like" not in numbers(farthest)
    assert "no gradients of this kind were measured" not in numbers(1.2)
    # nothing is known of any: none is most alike
    unknown = advise.advice_for("update", ALIKE, "SGD")
    assert (unknown.rule, unknown.verdict.headline) == ("none", "Not known")
    assert unknown.verdict.numbers.startswith(
        "No measured training has gradients of the kind update. Next: try"
    )
    assert unknown.records[0]["reason"] == "no update was measured elsewhere"
    trainings[0]["properties"]["update"] = trainings[0]["properties"]["gradient"]
    assert "Of some of them no gradients of this kind were measured." in numbers(1.2, "update")


def test_the_nearest_trainings_count_and_no_others(measured):
    far = [training(f"far{i}", energy=0.99, tenth=[0.5]) for i in range(5)]
    measured([*far, *near(5)])
    assert chosen()[0]["evidence"] == ", ".join(f"near{i}/sgd" for i in range(5))
    assert chosen()[0]["ratio"] == 0.1
    # one of the far ones is among the five without a near one
    left = chosen(without=["near2"])
    assert left[0]["rule"] == "dense-bf16"
    assert "far" in next(r for r in left if r["ratio"] == 0.1)["evidence"]
    # two lengths of one training are one
    twice = [t | {"runs": 2 * t["runs"]} for t in near(6)]
    measured(twice)
    assert chosen()[0]["trainings"] == 5
    assert chosen()[0]["runs"] == 20
    measured(far[:2] + near(3))
    assert chosen()[0]["rule"] == "dense-bf16"
    measured(near(4))
    assert [r["reason"] for r in chosen()[1:]] == [
        "was measured in fewer than 5 such trainings"
    ] * 3
    assert chosen()[0]["rule"] == "none"


def test_optimizers_are_known_by_their_names():
    families = {
        "Adam": ("AdamW", "Lion", "FusedAdam", "DeepSpeedCPUAdam", "PagedAdamW8bit", "FusedLAMB"),
        "Muon": ("Muon", "MuonWithAuxAdam", "DistributedShampoo", "SOAP"),
        "SGD": ("SGD", "LARS"),
        None: ("ZeroRedundancyOptimizer", "AcceleratedOptimizer", ""),
    }
    found = {
        family: [advise.family_of(name) for name in names] for family, names in families.items()
    }
    assert found == {family: [family] * len(names) for family, names in families.items()}


def test_trainings_count_with_optimizers_of_their_own_kind(measured):
    measured(
        [
            *near(5),
            *near(5, optimizer="adamw", tenth=[0.2]),
            *near(5, optimizer="muon", hundredth=[0.01]),
        ]
    )
    for optimizer, name, ratio in (
        ("SGD", "sgd", 0.1),
        ("FusedAdam", "adamw", 1.0),
        ("SOAP", "muon", 0.01),
    ):
        found = chosen(optimizer)
        assert found[0]["ratio"] == ratio
        of = [r["evidence"] for r in found if r["rule"] != "none"]
        assert of == [", ".join(f"near{i}/{name}" for i in range(5))] * 3
    # of an unknown one all
    unknown = chosen(None)
    assert unknown[0]["rule"] == "dense-bf16"
    assert (unknown[0]["trainings"], unknown[0]["models"]) == (15, 5)
    # fifteen trainings of five models are no fifteen models
    assert "In the 15 measured trainings of 5 models with" in said(unknown).numbers
    assert "in one case of 6 if it is like these" in said(unknown).numbers
    for name, told in (("foo", True), ("SGD", False), (None, False)):
        numbers = advise.advice_for("gradient", ALIKE, name).verdict.numbers
        said_so = "No measured training has an optimizer like 'foo': those of all families count."
        assert (said_so in numbers) == told


def test_an_unknown_optimizer_is_answered_by_all_families_or_by_none(measured):
    """A setting of one family alone, such as AdamW's steps, is none for an optimizer that may be any."""
    measured([*near(6), *near(6, optimizer="adamw"), *near(4, optimizer="muon")])
    found = advise.advice_for("gradient", ALIKE, "foo")
    assert (found.rule, found.verdict.headline) == ("none", "Not known")
    assert "Fewer than 15 trainings were measured." in found.verdict.numbers
    assert found.records[1]["reason"] == "was measured in fewer than 15 such trainings"
    assert advise.advice_for("gradient", ALIKE, "SGD").rule == "topk"


def test_a_training_is_judged_by_the_mean_of_its_seeds(measured):
    measured([*near(4), training("wide", tenth=[-0.01, 0.046])])
    best = chosen()[0]
    assert (best["ratio"], best["low"], best["high"]) == (0.1, 0.005, pytest.approx(0.018))
    refused = next(r for r in chosen(tolerance=0.015) if r["ratio"] == 0.1)
    assert (refused["acceptable"], refused["reason"]) == (
        False,
        "ended 1.8 % above dense in wide/sgd",
    )


def test_what_is_no_faster_is_not_recommended(measured):
    measured(near(5))

    def plan(compressor, ratio, speedup, low):
        names = ("compressor", "ratio", "speedup", "speedup_low", "speedup_high")
        return dict(zip(names, (compressor, ratio, speedup, low, 2 * speedup), strict=True))

    plans = [
        plan("topk", 0.1, 1.5, 1.2),
        plan("topk", 0.01, 3.0, 2.0),
        plan("dense-bf16", None, 1.8, 1.4),
    ]
    # faster, although it sends more
    assert chosen(plans=plans)[0]["rule"] == "dense-bf16"
    numbers = said(chosen(plans=plans), planned=True).numbers
    assert "By the plan a step is 1.8 times as fast as dense." in numbers
    assert chosen(plans=plans[:2])[0]["ratio"] == 0.1
    slow = [plan("topk", 0.1, 1.1, 0.9), plan("dense-bf16", None, 0.9, 0.8)]
    found = chosen(plans=slow)
    assert found[0]["rule"] == "none"
    # faster, but for what a plan cannot tell
    assert (
        "with topk at ratio 0.1 with error feedback, which kept the loss, is 1.10 (0.90 to 2.20) times"
        in str(said(found, True))
    )
    slower = [plan("topk", 0.1, 0.9, 0.8), plan("dense-bf16", None, 0.9, 0.8)]
    assert "no setting that kept the loss is faster than dense" in str(
        said(chosen(plans=slower), True)
    )


def test_a_setting_that_diverged_somewhere_ended_at_no_loss(measured):
    measured([*near(4), training("astray", hundredth=[advise.DIVERGED, 0.1])])
    (record,) = (r for r in chosen() if r["ratio"] == 0.01)
    assert record["reason"] == "diverged in astray/sgd"
    # and not the number that stands for it in JSON
    assert math.isinf(record["high"])


def test_it_is_said_with_its_evidence(measured):
    measured([*near(4), training("near4", tenth=[-0.01, 0.03])])
    verdict = said(chosen(), False)
    assert verdict.headline == "Try topk at ratio 0.1 with error feedback"
    evidence, held, following = verdict.numbers.split("\n")
    assert "In the 5 measured trainings with optimizers like SGD" in evidence
    assert "(near0/sgd, near1/sgd, near2/sgd, near3/sgd, near4/sgd; 10 runs)" in evidence
    assert "its mean loss ended +0.5 % to +1.0 % from the dense one" in evidence
    assert "in one case of 6" in evidence
    assert (
        "Of what sends less, topk at ratio 0.01 with error feedback ended 5.5 % above dense in near"
        in evidence
    )
    assert "within 2 % of dense in 7 of 9" in held
    assert "gradstats.Trial" in following
    nothing = said(chosen(tolerance=0.0001), False)
    assert nothing.headline == "Don't compress"
    assert "dense-bf16 ended 0.1 % above dense in near" in nothing.numbers
    measured([])
    assert said(chosen(), False).headline == "Not known"
    assert said(chosen(), False).warn


def test_properties_are_those_of_the_gradients(tmp_path):
    values = np.zeros(100_000, np.float32)
    values[:1000] = 1.0
    values[:100] = 3.0
    kind, found = advise.properties_of(open_source(values))
    assert kind == "gradient"
    # 1,000 elements have all of it, the 100 largest 900 of 1,800
    assert found["energy_0.01"] == pytest.approx(1, rel=1e-3)
    assert found["energy_0.001"] == pytest.approx(0.5, rel=1e-3)
    assert found["zeros"] == pytest.approx(0.99)
    assert found["nonzero"] == pytest.approx(0.01)
    assert "cosine" not in found


def test_a_sparse_gradient_loses_nothing_at_its_own_ratio(measured):
    measured(near(6))
    rng = np.random.default_rng(0)
    values = np.zeros(100_000, np.float32)
    values[rng.permutation(values.size)[:1234]] = rng.standard_normal(1234)
    advice = gradstats.advise(values, optimizer="SGD")
    assert advice.verdict.headline == "It is sparse already: at ratio 0.013 nothing is lost"
    assert "All but 1.2\N{NO-BREAK SPACE}% of its elements" in str(advice)
    assert (advice.rule, advice.ratio, advice.memory) == ("topk", 0.013, "residual")
    kept = [int(np.sum(abs(values) > gradstats.threshold(values, r))) for r in (0.013, 0.012)]
    assert kept[0] == 1234 > kept[1]
    half = np.where(rng.random(values.size) < 0.5, 0, rng.standard_normal(values.size))
    assert gradstats.advise(half, optimizer="SGD").verdict.headline.startswith(
        "Try topk at ratio 0.1"
    )


def test_a_plan_may_say_that_a_sparse_gradient_is_not_to_be_compressed(measured):
    measured(near(6))
    values = np.zeros(100_000, np.float32)
    values[:1234] = np.random.default_rng(0).standard_normal(1234)

    def advised(speedup, low, ratio=0.1):
        plan = {"compressor": "topk", "ratio": ratio, "speedup": speedup, "speedup_low": low}
        return gradstats.advise(values, [plan | {"speedup_high": 9.0}], optimizer="SGD")

    # the plan has no time of 0.013, and 0.1 leaves out as little
    faster = advised(2.0, 1.5)
    assert faster.verdict.headline == "It is sparse already: at ratio 0.1 nothing is lost"
    assert (faster.ratio, faster.records[0]["speedup"]) == (0.1, 2.0)
    assert advised(0.9, 0.8).rule == "none"
    # a smaller ratio, however fast, would lose something
    smaller = advised(5.0, 4.0, ratio=0.01)
    assert "sparse" not in smaller.verdict.headline


def test_every_step_and_rank_counts_where_nothing_is_said_to_be_lost(tmp_path):
    """The five steps of the first rank that are read are sparse, others are not."""
    create_trace(tmp_path / "t.zarr", LAYERS, world_size=2)
    rng = np.random.default_rng(0)
    for rank in range(2):
        writer = TraceWriter(tmp_path / "t.zarr", rank, kinds=("gradient",))
        for step in range(12):
            values = np.zeros(620, np.float32)
            many = 400 if (rank, step) == (1, 7) else 8
            values[:many] = rng.standard_normal(many)
            writer.append(step, {"gradient": values})
        writer.close()
    assert advise.properties_of(open_source(tmp_path / "t.zarr"))[1]["nonzero"] == 400 / 620
    assert "sparse" not in gradstats.advise(tmp_path / "t.zarr").verdict.headline


def test_nothing_is_advised_of_zeros_or_few_elements(measured):
    measured(near(6))
    zeros = gradstats.advise(np.zeros(5000), optimizer="SGD")
    assert zeros.verdict.headline == "All its elements are zero: there is nothing to send"
    few = gradstats.advise(np.ones(9), optimizer="SGD")
    assert few.verdict.headline == "Too few elements to say"
    assert [each.rule for each in (zeros, few)] == ["none", "none"]
    # a table of the records alone says so, too
    reasons = [each.records[0]["reason"] for each in (zeros, few)]
    assert reasons == ["all elements are zero", "too few elements to say"]
    enough = gradstats.advise(np.random.default_rng(0).laplace(size=5000), optimizer="SGD")
    assert [r["reason"] for r in enough.records if r["rule"] == "none"] == [
        "what the others are compared with"
    ]


def test_report_and_advise_rest_on_the_same_trainings(tmp_path):
    path = two_ranks(tmp_path)
    advice = gradstats.advise(path)
    answer = next(r for r in gradstats.report(path) if r["question"] == "Should I compress?")
    assert advice.records[0]["evidence"] in answer["numbers"]
    assert advice.setting in answer["answer"]


def test_traces_know_their_ranks_and_optimizer(tmp_path, measured):
    path = two_ranks(tmp_path)
    kind, found = advise.properties_of(open_source(path))
    expected = gradstats.agreement(path, kinds=[kind])[-1]["cosine"]
    assert found["cosine"] == pytest.approx(expected)
    measured(near(5))
    advice = gradstats.advise(path)
    assert (advice.rule, advice.ratio) == (advice.records[0]["rule"], advice.records[0]["ratio"])
    assert advice.summary()["rule"].tolist()[0] == advice.rule
    with pytest.raises(InputError, match="no training 'nope' was measured; there are near0"):
        gradstats.advise(path, without=["nope"])
    with pytest.raises(InputError, match="tolerance"):
        gradstats.advise(path, tolerance=-1)
    # a name is that of every optimizer, and as the records have it of one
    measured([*near(6), *near(6, optimizer="adamw")])
    for without, left in (("near1", False), ("near1/sgd", False), ("near1/adamw", True)):
        best = gradstats.advise(path, optimizer="SGD", without=[without]).records[0]
        assert ("near1/sgd" in best["evidence"]) == left


def test_no_zero_has_a_sign():
    shares = (-0.0004, 0.0, 0.0004, -0.0006, 0.0006, -0.123, math.inf)
    expected = ["0.0", "0.0", "0.0", "−0.1", "+0.1", "−12", "+inf"]
    assert [*map(signed_percent, shares)] == expected


def test_ranks_that_are_left_out_do_not_tell_how_workers_differ(tmp_path):
    create_trace(tmp_path / "t.zarr", [Layer("w", 0, (5000,))], world_size=3)
    shared = np.random.default_rng(9).laplace(size=5000)
    for rank in range(3):
        alone = np.random.default_rng(rank).laplace(size=5000)
        # the last one's is noise
        values = alone if rank == 2 else shared + alone / 10
        writer = TraceWriter(tmp_path / "t.zarr", rank, kinds=("gradient",))
        writer.append(0, {"gradient": values.astype("f4")})
        writer.close()
    source = open_source(tmp_path / "t.zarr")
    _, found = advise.properties_of(source, {"ranks": [0, 1]})
    assert found["cosine"] == pytest.approx(1 / 1.01, abs=0.005)
    assert advise.properties_of(source)[1]["cosine"] < 0.5


def test_what_is_sparse_and_known_by_its_zeros_alone_is_told_so_where_a_plan_calls_it_slow(
    measured,
):
    measured(near(6))
    numbers = {"speedup": 0.5, "speedup_low": 0.4, "speedup_high": 0.6}
    plans = [{"compressor": "topk", "ratio": ratio} | numbers for ratio in (0.1, 0.01, 0.001)]
    known = {"zeros": 0.95, "nonzero": 0.05}
    found = advise.advice_for("gradient", known, "SGD", plans=plans)
    assert found.rule == "none"
    assert found.records[0]["reason"] == "too few elements to say"
    assert "Too few elements" in str(found.verdict)


def test_ranks_that_were_captured_after_averaging_do_not_tell_how_workers_differ(
    tmp_path, measured
):
    create_trace(tmp_path / "t.zarr", [Layer("w", 0, (5000,))], world_size=2)
    for rank in range(2):
        writer = TraceWriter(tmp_path / "t.zarr", rank, kinds=("gradient",))
        writer.append(0, {"gradient": np.random.default_rng(0).laplace(size=5000).astype("f4")})
        writer.close()
    measured(near(6))
    source = open_source(tmp_path / "t.zarr")
    kind, found = advise.properties_of(source)
    assert math.isnan(found["cosine"])
    left = {name: value for name, value in found.items() if name != "cosine"}
    candidates = [training("one"), training("two", energy=0.9)]
    assert advise.distances(kind, found, candidates) == advise.distances(kind, left, candidates)
    sentence = "the ranks hold the same gradient, as after averaging."
    assert sentence in gradstats.advise(source, optimizer="SGD").verdict.numbers
    create_trace(tmp_path / "zeros.zarr", [Layer("w", 0, (5000,))], world_size=2)
    for rank in range(2):
        writer = TraceWriter(tmp_path / "zeros.zarr", rank, kinds=("gradient",))
        values = np.random.default_rng(0).laplace(size=5000).astype("f4")
        writer.append(0, {"gradient": values * (rank == 0)})
        writer.close()
    assert "cosine" not in advise.properties_of(open_source(tmp_path / "zeros.zarr"))[1]
    (tmp_path / "other").mkdir()
    different = gradstats.advise(two_ranks(tmp_path / "other"), optimizer="SGD")
    assert "How workers differ" not in different.verdict.numbers
    alone = gradstats.advise(np.random.default_rng(0).laplace(size=5000), optimizer="SGD")
    assert "compared: whole gradients of several ranks are not known." in alone.verdict.numbers


def test_only_the_steps_asked_for_have_to_be_finite(tmp_path, measured):
    measured(near(6))
    create_trace(tmp_path / "t.zarr", [Layer("w", 0, (5000,))])
    writer = TraceWriter(tmp_path / "t.zarr", 0)
    for step in range(3):
        values = np.random.default_rng(step).laplace(size=5000).astype("f4")
        values[:5] *= 1 if step else np.inf  # a step that a loss scaler skips
        writer.append(step, {"gradient": values})
    writer.close()
    with pytest.raises(
        InputError, match=r"5 NaN or infinite elements at step 0.*look at other steps"
    ):
        gradstats.advise(tmp_path / "t.zarr")
    assert gradstats.advise(tmp_path / "t.zarr", steps=[1, 2], optimizer="SGD").rule == "topk"
    done = run("advise", tmp_path / "t.zarr", "--step", 1, "--step", 2, "--optimizer", "SGD")
    assert done.stdout.startswith("Try topk at ratio 0.1")


@pytest.mark.slow
@every(
    ("metadata", "optimizer"),
    [
        ({"optimizer": {"name": ["muon", "adamw"]}}, None),
        ({"optimizer": "AdamW"}, "AdamW"),
        ({"optimizer": {"name": "Muon"}}, "Muon"),
        ({"optimizer": 3, "versions": "cuda 12.4"}, None),
        ({"compressor": "topk", "ratio": [0.01, 0.001], "versions": ["1", 2]}, None),
        ({"compressor": ["topk"], "ratio": "0.01", "steps": {}, "batch_size": "32"}, None),
    ],
)
def test_metadata_of_any_type_are_no_error(tmp_path, metadata, optimizer):
    network = tmp_path.parent / "network.json"
    measured_network().save(network)
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.zarr"
    create_trace(path, LAYERS, metadata=metadata)
    write(path, [0])
    assert advise.optimizer_of(open_source(path)) == optimizer
    for command in (
        ("info", path),
        ("advise", path),
        ("plan", path, "--network", network, "--compute", 0.1, "--workers", 2),
    ):
        done = run(*command)
        assert "Traceback" not in done.stderr
        assert done.returncode == 0, done.stderr
    if optimizer:
        assert optimizer in run("info", path).stdout


def test_sketches_are_enough(tmp_path):
    """What is kept in a sketch is what a training is compared by; only the ranks' cosine needs the gradients."""
    whole, cells = (
        advise.properties_of(open_source(heavy_trace(tmp_path / f"{store}.zarr", store)))[1]
        for store in ("gradients", "sketches")
    )
    assert "cosine" not in cells
    assert abs(whole.pop("cosine")) < 0.05  # ranks that are independent
    assert cells == pytest.approx(whole, rel=0.01)
    assert 0.05 < cells["zeros"] < 0.06


def test_odd_gradients_have_a_defined_answer():
    for values, reason in (
        (np.ones(0), "no elements"),
        (np.array([np.nan, 1.0, np.inf]), "2 NaN or infinite elements at step 0"),
    ):
        with pytest.raises(InputError, match=reason):
            gradstats.advise(values)
    for values in (np.zeros(5000), np.ones(1), np.full(5000, 1e-300), np.full(5000, 1e300)):
        assert gradstats.advise(values, optimizer="SGD").records


@pytest.mark.parametrize(("rank", "step"), [(1, 3), (0, 6)])
def test_what_is_not_finite_is_found_on_every_rank_and_step(tmp_path, rank, step):
    """Advice looks at five steps of the first rank, and a trace knows of all."""
    create_trace(tmp_path / "run.zarr", LAYERS, world_size=2)
    rng = np.random.default_rng(0)
    for each in (0, 1):
        writer = TraceWriter(tmp_path / "run.zarr", each)
        for at in range(9):
            values = rng.laplace(size=sum(la.numel for la in LAYERS)).astype(np.float32)
            values[:5] *= np.inf if (each, at) == (rank, step) else 1
            writer.append(at, {"gradient": values})
        writer.close()
    said = f"5 NaN or infinite elements at step {step}, rank {rank}: "
    with pytest.raises(InputError, match=said):
        gradstats.advise(tmp_path / "run.zarr")


def test_the_evidence_in_the_package_is_sound():
    found = advise.evidence()
    assert found["held_out"]["within"] <= found["held_out"]["of"] <= len(found["trainings"])
    for each in found["trainings"]:
        for setting in each["runs"]:
            assert setting["above"]
            assert all(map(math.isfinite, setting["above"]))
            assert 0 < setting["bytes"] <= 1
            assert (setting["ratio"] < 1) == (setting["rule"] in ("topk", "sidco-p"))


def test_the_command_says_and_stores_it(measured, tmp_path, monkeypatch):
    measured(near(6))
    path = two_ranks(tmp_path)
    said = run("advise", path, "--optimizer", "SGD").stdout
    assert said.startswith("Try topk at ratio 0.1 with error feedback.")
    rows = records("advise", path, "--optimizer", "SGD")
    fields = {"rule", "ratio", "memory", "format", "reason", "low", "high", "evidence"}
    assert fields <= set(rows[0])
    assert rows[0]["rule"] == "topk"
    # records hold no sentences: who asks for JSON reads the verdict beside it
    beside = run("advise", path, "--optimizer", "SGD", "--format", "json").stderr
    assert beside.startswith("Try topk at ratio 0.1 with error feedback")
    assert "7 of 9" in beside
    asked = []

    def plan(source, cluster, compute, workers, ratios, *rest, captured, client):
        asked.append((workers, ratios, captured))
        # all as fast as each other
        times = {"speedup": 2.0, "speedup_low": 1.5, "speedup_high": 2.5}
        return [{"compressor": "topk", "ratio": ratio} | times for ratio in ratios]

    monkeypatch.setattr(gradstats.network, "plan", plan)
    measured_network().save(tmp_path / "network.json")
    cluster = ["--network", tmp_path / "network.json", "--compute", 0.1, "--workers", 64]
    assert run("advise", path, *cluster).returncode == 0
    assert run("advise", path, *cluster, "--step", 0).returncode == 0
    assert asked == [([64], [*RATIOS], None), ([64], [*RATIOS], [0])]
    # of bf16 this plan has no time
    assert (
        "speedup –: of such a setting the plan has no time" in run("advise", path, *cluster).stderr
    )
    asked.pop()
    assert "speedup" not in run("advise", path).stderr
    # what is sparse already is planned at the ratio at which nothing is lost, and is told so
    values = np.zeros(10_000, np.float32)
    values[:250] = np.random.default_rng(0).laplace(size=250)
    np.save(tmp_path / "sparse.npy", values)
    sparse = run("advise", tmp_path / "sparse.npy", *cluster)
    assert asked[-1][1] == [*RATIOS, 0.025]
    assert sparse.stdout.startswith("It is sparse already: at ratio 0.025 nothing is lost.")
    failed = run("advise", path, "--link", "1gbit")
    assert failed.returncode == 2
    assert "--compute" in failed.stderr


def test_trainings_are_compared_by_what_a_compressor_gets():
    assert compared_kind(["update", "corrected"]) == "corrected"
    assert compared_kind(["corrected", "gradient"]) == "gradient"
    assert compared_kind(["pseudogradient", "update"]) == "pseudogradient"
