"""Sentences and fields that must change with what they are said of: each is asked for on both sides."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from support.every import every

from gradstats.analysis.decay import compressibility_records
from gradstats.analysis.drift import _drift
from gradstats.analysis.fits import fit_records
from gradstats.analysis.info import describe
from gradstats.analysis.verdicts import decay_shown
from gradstats.analysis.verdicts.gradient import FEWEST, tail_weight
from gradstats.analysis.verdicts.pairs import what_changed
from gradstats.analysis.verdicts.plans import advice
from gradstats.statistics.compressibility import compressibility
from gradstats.statistics.goodness import bootstrap
from gradstats.trace import Layer, TraceWriter, create_trace
from gradstats.trace.sources import open_source

NAN = math.nan


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@every(
    ("c", "low", "high", "word"),
    [
        (0.3, 0.1, 0.5, "Heavy"),
        (-0.3, -0.5, -0.1, "Short"),
        (0.1, -0.1, 0.3, "Exponential"),
        (-0.1, -0.3, 0.1, "Exponential"),
        (0.3, 0.0, 0.6, "Exponential"),
        (-0.3, -0.6, 0.0, "Exponential"),
        (-0.7, NAN, NAN, "Short"),
        (-0.4, NAN, NAN, "Exponential"),
    ],
)
def test_a_tail_is_heavy_or_short_where_its_interval_says_so(c, low, high, word):
    one = {"layer": "pooled", "step": 3, "n": FEWEST, "c": c, "c_low": low, "c_high": high}
    verdict = tail_weight([one], [], spike=False, layers=1, designs={})
    assert verdict.headline.startswith(f"{word} in the top tenth: ξ = ")
    assert ("no interval" in verdict.numbers) == math.isnan(low)


def test_shapes_of_the_steps_before_are_said_in_their_order():
    rows = [
        {"layer": "pooled", "step": step, "n": FEWEST, "c": c, "c_low": c - 0.1, "c_high": c + 0.1}
        for step, c in ((2, 0.11), (5, 0.22), (9, 0.33))
    ]
    said = tail_weight(rows, [], spike=False, layers=1, designs={}).numbers
    assert ". Pooled, 0.11 at step 2, 0.22 at step 5. " in said
    assert "Pooled, " not in tail_weight(rows[2:], [], spike=False, layers=1, designs={}).numbers


def changed(**given):
    usual = {"changed": 0.25, "changed_bf16": 0.125, "dtype": "fp32", "predicted": 0.5}
    usual |= {"law": "laplace", "bytes": 4000, "numel": 1000, "bytes_a": 500, "bytes_b": 250}
    return what_changed(usual | given)


@pytest.mark.parametrize("law", ["dgamma", "rate", "t"])
def test_what_changed_names_what_it_was_predicted_from(law):
    what = "updates of this rate" if law == "rate" else law
    assert f"(50 % predicted from {what})" in changed(law=law)


def test_what_changed_says_the_share_and_the_shortest_message():
    assert changed().startswith("25 % of the weights differ, 12.5 % in bf16 (50 % predicted")
    assert changed(dtype="bf16", predicted=NAN).startswith("25 % of the weights differ; ")
    assert changed().endswith("the shortest message is b: 250 bytes of 4 kB, 2.00 bits a weight")
    assert "message is a: 200 bytes" in changed(bytes_a=200)
    assert changed(changed=0.0) == "no weight differs"
    assert changed(pairs=2).startswith("from one to the next 25 % of the weights differ on average")
    assert changed(pairs=1) == changed()


def test_what_is_predicted_of_fp16_is_beside_the_share_in_fp16():
    assert changed(dtype="fp16").startswith(
        "25 % of the weights differ (50 % predicted from laplace), 12.5 % in bf16; "
    )
    assert "(0 % predicted from updates of zero)" in changed(law="none", predicted=0.0)


def test_losses_are_those_of_the_first_and_last_step_that_have_one(tmp_path):
    create_trace(tmp_path / "a.zarr", [Layer("w", 0, (8,))])
    writer = TraceWriter(tmp_path / "a.zarr", 0)
    for step, loss in enumerate([NAN, 4.0, 3.0, 2.0, 1.5, NAN]):
        writer.append(step, {"gradient": np.ones(8, np.float32)}, loss=loss, learning_rate=0.1)
    writer.close()
    facts = describe(open_source(tmp_path / "a.zarr"))
    assert facts["loss"] == "4.00 at step 1 to 1.50 at step 4"
    assert facts["learning rate"] == "0.100"


def test_a_law_that_cannot_describe_a_layer_is_tested_on_nothing(rng):
    source = open_source({"a": rng.laplace(size=5000).astype(np.float32), "b": np.ones(3000)})
    found = fit_records(
        source, ["laplace", "lognorm"], per_layer=True, replicates=99, size=500, layers=["b"]
    )
    tested = {(r["layer"], r["model"]): r for r in found}
    unfit = [r for r in found if not r["params"]]
    assert unfit
    for record in unfit:
        assert record["subsample"] == 0
        assert all(math.isnan(record[name]) for name in ("p_value", "p_naive", "p_holm"))
    assert tested["all", "laplace"]["subsample"] == 500
    test = bootstrap(source.read(*source.entries()[0]).values, "laplace", size=500, replicates=99)
    assert tested["all", "laplace"]["p_value"] == test.p_value
    assert 0.01 <= test.p_value < 1


def test_layers_are_the_tests_that_each_law_is_corrected_for(rng):
    layers = {name: rng.uniform(size=5000).astype(np.float32) for name in "abc"}
    found = fit_records(
        open_source(layers), ["laplace", "t"], per_layer=True, replicates=99, size=300
    )
    for model in ("laplace", "t"):
        each = [r for r in found if r["model"] == model and r["layer"] != "all"]
        least = min(each, key=lambda r: r["p_value"])
        assert least["p_holm"] == pytest.approx(3 * least["p_value"])
    for layer in ("all", *layers):
        above = [r["delta_aic"] for r in found if r["layer"] == layer]
        assert min(above) == 0 < max(above)


@pytest.mark.parametrize("zeros", [0.0, 0.6])
def test_intervals_of_a_decay_are_those_of_the_array(zeros, rng):
    """By runs, whose replicates reach twice as far as the window, which zeros are no part of."""
    x = (rng.standard_t(3, size=30_000) * (rng.random(30_000) >= zeros)).astype(np.float32)
    expected = compressibility(x, layers=[0])
    found = compressibility_records([open_source({"a": x})])[0]
    assert found["p"] == pytest.approx(expected.p, rel=1e-12)
    for name in ("runs_low", "runs_high"):
        assert math.isfinite(found[name])
        assert found[name] == pytest.approx(getattr(expected, name), rel=1e-12)


def test_changes_are_those_over_the_most_common_distance(rng):
    """Of a series that is captured densely now and then: growth by a tenth in ten steps is not that of one."""
    steps = np.cumsum(np.tile([10, 10, 10, 1], 30))
    series = 1.1 ** (steps / 10) * np.exp(1e-4 * rng.normal(size=steps.size))
    found = _drift(steps, series[:, None], np.ones((steps.size, 1), bool))
    assert found["spacing"] == 10
    assert found["change_low"] == pytest.approx(1.1, rel=1e-3)
    assert found["change_high"] == pytest.approx(1.1, rel=1e-3)
    assert found["slope"] == pytest.approx(1.1**10 - 1, rel=1e-2)


def test_a_decay_is_said_of_its_own_ranks(tmp_path, rng):
    """Of a window beyond the largest element; and of a gradient that becomes sparse, of fewer ranks at the end."""
    path = tmp_path / "run.zarr"
    create_trace(path, [Layer("a", 0, (20_000,))])
    writer = TraceWriter(path, 0)
    for step, kept in enumerate((20_000, 9_000)):
        values = np.append(rng.standard_t(3, size=kept), np.zeros(20_000 - kept))
        writer.append(step, {"gradient": values.astype(np.float32)})
    writer.close()
    source = open_source(path)

    def said(window=None, **over):
        records = compressibility_records([source], window, **over)
        own = [r for r in records if r["trace"] != "control"]
        return decay_shown(own, [r for r in records if r["trace"] == "control"]).numbers

    assert re.search(r"at step 0, of the largest 200[;.]", said(steps=[0]))
    assert re.search(r"at step 1, of the largest 90[;.]", said(steps=[1]))
    assert re.search(r"at step 0 of the largest 200, .* at step 1 of the largest 90[;.]", said())
    assert re.search(r"at step 1, of ranks 100 to 1,000[;.]", said((100, 1000)))


def decayed(step, p, low, high, **given):
    """Return the record of a decay: of independent elements p is within 0.05, by runs from low to high."""
    record = {"kind": "gradient", "step": step, "p": p, "p_low": p - 0.05, "p_high": p + 0.05}
    record |= {"runs_low": low, "runs_high": high, "window": "1-200", "reason": ""}
    record |= {"windows": {"1-100": p - 0.1, "1-200": p}, "compressible": True}
    return record | given


def test_a_decay_is_said_of_the_first_and_the_last_step_and_so_are_its_runs():
    control = decayed(None, 0.2, NAN, NAN, kind="laplace", compressible=False)
    unsure = {"reason": "windows disagree", "compressible": None}
    rows = [decayed(3, 0.6, 0.41, 0.79), decayed(5, 0.4, 0.31, 0.49, **unsure)]
    rows += [decayed(9, 0.7, 0.52, 0.88, **unsure)]
    verdict = decay_shown(rows, [control])
    meaning = "Shown means p above ½ in every window, by Hill's estimate and by σ_k too, and a "
    meaning += "power law likelier than a log-normal. "
    assert verdict.headline == "Shown at 1 of 3 steps"
    assert verdict.numbers == (
        "p = 0.60 (0.55 to 0.65) at step 3, 0.70 (0.65 to 0.75) at step 9, of the largest 200; "
        f"by runs of neighbours 0.41 to 0.79 and 0.52 to 0.88. {meaning}"
        "2 of 3 steps: windows disagree (at step 9 p = 0.60 to rank 100, 0.70 to rank 200). "
        "Controls: Laplace 0.20, rejected."
    )
    alone = decay_shown(rows[1:2], [control | {"compressible": True}])
    assert (alone.headline, alone.warn) == ("Not shown", True)
    assert alone.numbers == (
        "p = 0.40 (0.35 to 0.45) at step 5, of the largest 200; by runs of neighbours 0.31 to "
        f"0.49. {meaning}Step 5: windows disagree (p = 0.30 to rank 100, 0.40 to rank 200). "
        "Controls: Laplace 0.20: passes what it must reject!"
    )
    # a sketch does not say where elements lie, so its interval by runs is not known
    unknown = decayed(3, 0.6, NAN, NAN)
    assert "runs" not in decay_shown([unknown], [control]).numbers
    one = decay_shown([unknown, decayed(5, 0.6, 0.41, 0.79)], [control]).numbers
    assert "; by runs of neighbours 0.41 to 0.79 at step 5. " in one


def planned(compressor, seconds, speedup, limit, **given):
    """Return the record of a plan: its speed-up is within 10 % of what is given."""
    record = {"compressor": compressor, "ratio": 0.01, "seconds": seconds, "limit": limit}
    record |= {
        f"speedup{end}": by * speedup for end, by in (("", 1), ("_low", 0.9), ("_high", 1.1))
    }
    record |= {"workers": 8, "rate": 1000.0, "baseline": "none", "recommended": False}
    record |= {"measured": True, "quality": 1.0, "basis": "exact", "indices": "plain"}
    record |= {"values": "float32", "codec_break_even": 50.0, "codec_pays": "above"}
    return record | {"break_even": 300.0, "pays": "below"} | given


def test_a_plan_gives_each_way_its_own_time_and_limit():
    dense = planned("none", 0.12, 1, "the links", ratio=None)
    slow, slower = planned("topk", 0.15, 0.8, "selecting"), planned("dgc", 0.2, 0.6, "unpacking")
    assert advice([dense | {"recommended": True}, slow, slower]) == (
        "8 workers at 1,000 Mbit/s: don't compress. Dense takes 120 ms; topk at ratio 0.01, the "
        "fastest alternative, 150 ms, limited by selecting. It pays below 300 Mbit/s."
    )
    best = planned("dgc", 0.04, 3, "unpacking", recommended=True, basis="trace", quality=1.2)
    assert advice([best, planned("topk", 0.06, 2, "selecting"), dense]) == (
        "8 workers at 1,000 Mbit/s: dgc at ratio 0.01. It takes 40 ms instead of dense 120 ms, "
        "3 times as fast (2.7 to 3.3), limited by unpacking. It pays below 300 Mbit/s. It keeps "
        "1.2 of the k asked for."
    )
    coded = best | {"indices": "rice", "values": "int8", "basis": "exact"}
    assert advice([coded, planned("topk", 0.02, 6, "selecting", quality=0.5), dense]).endswith(
        "It pays below 300 Mbit/s. Its codec (rice, int8) pays above 50 Mbit/s. topk at ratio "
        "0.01 (20 ms) is no faster, within the interval, if it sent k elements and not 0.5 k."
    )


def test_what_never_pays_is_said_where_it_is_in_doubt():
    """As of one worker, which the table says never of."""
    dense = planned("none", 0.12, 1, "computing", ratio=None, recommended=True, workers=1)
    slower = planned("topk", 0.121, 0.99, "computing", pays="never", break_even=0.0)
    text = advice([dense, slower])
    assert text.startswith("1 worker at ")
    assert text.endswith(
        "By the prediction alone it does not pay at any bandwidth; here the difference is within its doubt."
    )


def test_a_faster_way_that_is_not_advised_has_its_reason():
    dense = planned("none", 0.12, 1, "the links", ratio=None, recommended=True)
    faster = planned("topk", 0.1, 1.2, "selecting", pays="always", break_even=NAN)
    for given, reason in (
        ({"speedup_low": 1.0}, "which cannot be told from 1"),
        ({"speedup_low": 1.01}, "which may be less than 2 %"),
        (
            {"speedup_low": 1.1, "quality": 0.5},
            "but of 0.5 k elements, and with k it would be no faster",
        ),
    ):
        said = advice([dense, faster | given])
        low = f"{given['speedup_low']:.3g}"
        assert f"limited by selecting: 1.2 times as fast ({low} to 1.32), {reason}. " in said
        # the prediction alone is not enough where its interval has 1 in it
        if given["speedup_low"] <= 1.02:
            assert said.endswith("Whether it pays has to be measured.")
        else:
            assert said.endswith("It pays at any bandwidth, by the prediction.")
