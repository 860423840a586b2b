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
