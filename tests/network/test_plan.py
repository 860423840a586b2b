"""The plan: predictions against closed forms, what it recommends, and the terminal."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
import re

import numpy as np
import pytest
from conftest import ROOT
from matplotlib.figure import Figure
from ranks import run_ranks
from rich.cells import cell_len
from support.every import every
from support.networks import CODED, gradients, measured_network, top, written
from support.terminal import main
from workers import layerwise

import gradstats
from gradstats import plots
from gradstats.collectives import Codec
from gradstats.collectives.codec import PLAIN
from gradstats.compressors import COMPRESSORS, Compressor
from gradstats.errors import InputError
from gradstats.network import (
    ALGORITHMS,
    HELD,
    LayerTime,
    Line,
    Network,
    advice,
    deliveries,
    exchange,
    layer_ratios,
    plan,
    prediction,
    senders,
    simulate,
)
from gradstats.network.rates import format_rate, parse_rate
from gradstats.primitives.ratio import target_count
from gradstats.trace import Layer, TraceWriter, create_trace, open_trace

D, COMPUTE = 100_000, 0.02
ALPHA, BETA, SELECT, UNPACK = 5e-5, 8e-9, 1e-9, 3e-9
ZEROS = np.zeros(D, np.float32)


def link(alpha=ALPHA, beta=BETA, select=SELECT, unpack=UNPACK):
    local = {f"select:{name}": select for name in COMPRESSORS} | {"unpack": unpack}
    return Network.of_link(alpha, beta, local)


def by_name(records):
    return {r["compressor"]: r for r in records}


@pytest.mark.parametrize(("world", "ratio"), [(2, 0.001), (16, 0.01), (1024, 0.0001)])
def test_topk_and_dense_have_closed_forms(world, ratio):
    found = by_name(plan(ZEROS, link(), COMPUTE, [world], [ratio], ["topk"]))
    k = target_count(ratio, D)
    message, wire = 4 * (2 * k + 10), 2 * (world - 1) / world * 4 * D
    dense = COMPUTE + 2 * (world - 1) * ALPHA + wire * BETA
    local = SELECT * D + world * k * UNPACK
    sparse = COMPUTE + local + (world - 1) * (ALPHA + message * BETA)
    topk = found["topk"]
    assert found["none"]["seconds"] == pytest.approx(dense)
    assert topk["low"] < topk["seconds"] < topk["high"]  # no network is known exactly
    assert topk["seconds"] == pytest.approx(sparse)
    assert topk["speedup_low"] < topk["speedup"] < topk["speedup_high"]
    assert topk["speedup"] == pytest.approx(dense / sparse)
    assert topk["bytes"] == message
    # local + (n−1)(α + mβ) = 2(n−1)α + wire·β
    beta = (local - (world - 1) * ALPHA) / (wire - (world - 1) * message)
    expected = 8e-6 / beta if beta > 0 else math.inf
    assert topk["break_even"] == pytest.approx(expected, rel=1e-6)
    assert math.isnan(found["none"]["break_even"])


@pytest.mark.parametrize(
    ("limit", "changed"),
    [
        ("compute", {}),
        ("select", {"select": 1e-6}),
        ("pack", {"unpack": 1e-3}),
        ("latency", {"alpha": 0.1}),
        ("transfer", {"beta": 1e-4}),
    ],
)
def test_what_takes_most_of_a_step_limits_it(limit, changed):
    found = by_name(plan(ZEROS, link(**changed), COMPUTE, [4], [0.001], ["topk"]))
    assert found["topk"]["limit"] == limit


@pytest.mark.parametrize("world", [1, 4, 1024])
def test_parts_add_up_for_every_system(world):
    source = {"a": ZEROS, "b": ZEROS, "c": ZEROS}
    records = plan(source, measured_network(), COMPUTE, [world], draws=20, compressors=COMPRESSORS)
    assert {r["compressor"] for r in records} == set(COMPRESSORS)
    assert [r["seconds"] for r in records] == sorted(r["seconds"] for r in records)
    for r in records:
        parts = [r[name] for name in ("compute", "memory", "select", "pack", "latency", "transfer")]
        assert sum(parts) - r["hidden"] == pytest.approx(r["seconds"])
        assert min(parts) >= 0
        assert r["low"] <= r["seconds"] * (1 + 1e-9)
        assert r["seconds"] <= r["high"] * (1 + 1e-9)
        if r["compressor"] == "none":
            assert math.isnan(r["speedup_low"])  # it is as fast as itself, without a doubt
            assert math.isnan(r["speedup_high"])
        elif world > 1:
            assert r["low"] < r["high"]
            assert r["speedup_low"] < r["speedup_high"]


def test_dense_hides_buckets_behind_the_backward_pass():
    bucket = 25 * 2**20 // 4
    source = {"first": np.zeros(bucket, np.float32), "last": np.zeros(bucket, np.float32)}
    network, compute = link(0, 1e-9), 0.3
    (dense,) = plan(source, network, compute, [2], compressors=["none"])
    reduce = 4 * bucket * 1e-9  # 2(n−1)/n = 1
    assert dense["hidden"] == pytest.approx(reduce)
    assert dense["seconds"] == pytest.approx(compute + reduce)
    assert advice([dense]).startswith("2 workers at 8,000 Mbit/s: don't compress.")


def test_lags_hides_its_messages_and_names_its_ratios():
    source = {"a": ZEROS, "b": ZEROS, "c": ZEROS}
    layers = [LayerTime(name, D, 0.04 / 3) for name in "cba"]
    network = link().slowed(4)
    lags = by_name(plan(source, network, 0.06, [4], [0.001], ["lags"]))["lags"]
    ratios = layer_ratios(network, layers, 4, 0.001, selection="lags")
    assert lags["layers"] == pytest.approx(ratios)
    assert lags["layers"]["a"] == 0.001 < lags["layers"]["c"] < 0.5
    messages = deliveries(network, layers, 4, ratios, selection="lags")
    assert lags["seconds"] == pytest.approx(simulate(messages, 0.02).seconds)
    assert lags["hidden"] > 0
    assert lags["selected"] == sum(target_count(ratio, D) for ratio in ratios.values())
    # on the faster network all values of a layer hide without their positions
    fast = by_name(plan(source, link(), 0.06, [4], [0.001], ["lags"]))["lags"]
    assert fast["layers"] == {"a": 0.001, "b": 1, "c": 1}
    assert fast["seconds"] < 1.03 * lags["seconds"]


def test_lags_is_never_predicted_slower_than_one_message_or_dense():
    source = {str(i): ZEROS[: D // 4] for i in range(12)}
    rates = [10.0**i for i in range(5, 13)]
    for network in (link(), link(5e-3), measured_network()):
        records = plan(source, network, 0.06, [4], [0.001], ["topk", "lags"], rates=rates, draws=2)
        for rate in rates:
            seconds = {r["compressor"]: r["seconds"] for r in records if r["rate"] == rate / 1e6}
            assert seconds["lags"] < 1.04 * min(seconds.values())


@pytest.mark.distributed
@pytest.mark.parametrize("ratio", [0.1, 0.01])
def test_whole_systems_are_planned_as_they_train(ratio):
    """Layer by layer, biases or small layers whole, and of quantised layers one value."""
    names = ["dgc", "redsync", "redsync-quantised"]
    for layers, sent in run_ranks(2, layerwise.sent_by_systems, names, ratio):
        found = by_name(plan(layers, link(), COMPUTE, [2], [ratio], names))
        for name in names:
            record, (length, selected) = found[name], sent[name]
            if name == "dgc":  # vectors are averaged beside the exchange
                vectors = sum(x.size for x in layers.values() if x.ndim == 1)
                # planned and sent are 0.8 k to k of every matrix, each of its own step
                assert 0.8 <= record["selected"] / (selected + vectors) <= 1.25
                # and a message that is too short is sent again in part
                assert 0.8 <= length / record["bytes"] < 1.6
            else:  # messages have room for more
                ties = (
                    selected - record["selected"]
                )  # of a matrix, what equals its k-th is sent too
                assert 0 <= ties <= sum(x.ndim == 2 for x in layers.values())
                assert record["bytes"] < length < 1.25 * record["bytes"]
            assert record["layers"] == {}
        assert found["redsync-quantised"]["basis"] == "assumed"
        one = exchange("redsync-quantised", sum(x.size for x in layers.values()), ratio, 2)
        assert found["redsync-quantised"]["bytes"] > 1.2 * one.bytes_sent


OUTSIDE = '''
"""The first k elements of every gradient, averaged."""
from gradstats.collectives.plain import all_gather_flags, all_reduce_mean
from gradstats.compressors import COMPRESSORS, Compressor, Reduced
from gradstats.compressors.cost import FLAG, Work


class First(Compressor):
    one_union = True

    def __init__(self, ratio):
        self.ratio = ratio

    @classmethod
    def exchange(cls, load):
        return load.exchange(load.k, 4 * load.k, communicate=(FLAG, Work("all_reduce", 4 * load.k)))

    def reduce(self, corrected, group, flag=0):
        flags, k = all_gather_flags(flag, group, corrected.device), self.target(corrected.numel())
        mean = corrected.new_zeros(corrected.shape)
        mean[:k] = all_reduce_mean(corrected[:k].clone(), group)
        corrected[:k] = 0
        return Reduced(flags, mean, corrected, None, selected=k, union=k, bytes_sent=4 * k)


COMPRESSORS["first"] = First
'''


def test_a_compressor_from_outside_is_planned_by_what_its_class_says(forgotten):
    assert len(OUTSIDE.strip().splitlines()) <= 25
    exec(OUTSIDE, {})
    for compressors in (["first"], ()):
        first = by_name(plan(ZEROS, link(), COMPUTE, [4], [0.01], compressors))["first"]
        k = target_count(0.01, D)
        reduce = 6 * ALPHA + 6 / 4 * 4 * k * BETA
        assert first["seconds"] == pytest.approx(COMPUTE + 3 * (ALPHA + 32 * BETA) + reduce)
        assert (first["bytes"], first["union"], first["basis"]) == (4 * k, k, "exact")


def test_a_compressor_that_says_no_cost_is_not_planned(forgotten):
    silent = type("Silent", (Compressor,), {"reduce": lambda *_: None})
    COMPRESSORS["silent"] = silent
    with pytest.raises(InputError, match="no cost formula for 'silent'; give Silent an exchange"):
        plan(ZEROS, link(), COMPUTE, [4], [0.01], ["silent"])


def test_correcting_momentum_costs_more_passes_than_a_residual():
    network = Network.of_link(ALPHA, BETA, {"memory": 1e-9})
    found = by_name(plan(ZEROS, network, COMPUTE, [2], compressors=["topk", "redsync"]))
    assert found["topk"]["memory"] == pytest.approx(1e-9 * D)
    assert found["redsync"]["memory"] == pytest.approx(2.6e-9 * D)
    local = plan(ZEROS, network, COMPUTE, [2], compressors=["topk", "redsync"], local_steps=[4])
    few = {r["compressor"]: r["memory"] for r in local if r["local_steps"]}
    assert few["topk"] == few["redsync"]  # an outer optimizer's momentum is one for all


def test_the_fastest_is_recommended_and_dense_where_it_is():
    slow, fast = (1e8, 1e13)
    records = plan(ZEROS, link(), COMPUTE, [4], [0.01, 0.001], ["topk"], rates=[slow, fast])
    assert [r["recommended"] for r in records[:3]] == [True, False, False]
    for best, *others in (records[:3], records[3:]):
        assert all(best["seconds"] <= r["seconds"] for r in others)
    # a percent is no reason to compress
    (chosen,) = (r for r in records[3:] if r["recommended"])
    assert chosen["compressor"] == "none"
    assert records[3]["seconds"] < chosen["seconds"] < 1.02 * records[3]["seconds"]
    assert (records[0]["compressor"], records[0]["ratio"]) == ("topk", 0.001)
    assert "topk at ratio 0.001" in advice(records[:3])
    assert "don't compress" not in advice(records[:3])
    lossy = plan(
        ZEROS, link(alpha=0, select=1e-7), COMPUTE, [4], compressors=["topk"], rates=[fast]
    )
    assert lossy[0]["compressor"] == "none"
    assert "don't compress" in advice(lossy)
    assert f"It pays below {format_rate(lossy[1]['break_even'])}." in advice(lossy)
    assert format_rate(12345) == "12,300 Mbit/s"


@pytest.mark.parametrize("world", [2, 16])
@pytest.mark.parametrize("values", ["float32", "int8"])
def test_a_codec_pays_below_a_bandwidth_in_closed_form(world, values):
    encode, decode, ratio = 4e-9, 6e-9, 0.01
    costs = {f"encode:{c}": encode for c in CODED} | {f"decode:{c}": decode for c in CODED}
    costs["select:topk"] = SELECT
    network, codec = Network.of_link(ALPHA, BETA, costs), Codec("rice", values)
    found = by_name(plan(ZEROS, network, COMPUTE, [world], [ratio], ["topk", "none"], codec=codec))
    k, topk = target_count(ratio, D), found["topk"]
    words = 10 + codec.index_words(k, D) + codec.value_words(k)
    assert topk["bytes"] == 4 * words
    assert (topk["indices"], topk["values"]) == ("rice", values)
    coded = 2 if values == "int8" else 1
    # (n−1)·(bytes saved)·β = time of coding
    beta = coded * k * (encode + world * decode) / ((world - 1) * 4 * (10 + 2 * k - words))
    assert topk["codec_break_even"] == pytest.approx(8e-6 / beta, rel=1e-5)
    below = format_rate(8e-6 / beta)
    assert f"Its codec (rice, {values}) pays below {below}." in advice([topk, found["none"]])
    assert math.isnan(found["none"]["codec_break_even"])


def test_the_baseline_may_be_dense_in_bfloat16():
    for world in (2, 8):
        plain, half = (
            by_name(plan(ZEROS, link(), COMPUTE, [world], [0.001], ["topk"], baseline=b))
            for b in ("none", "bf16")
        )
        dense = COMPUTE + 2 * (world - 1) * (ALPHA + 2 * D / world * BETA)
        assert half["torch-bf16"]["seconds"] == pytest.approx(dense)
        assert half["torch-bf16"]["bytes"] == plain["none"]["bytes"] // 2 == 2 * D
        assert half["topk"]["speedup"] == pytest.approx(dense / plain["topk"]["seconds"])
        assert half["none"]["speedup"] < 1 == half["torch-bf16"]["speedup"]
        assert half["topk"]["break_even"] <= plain["topk"]["break_even"]
        assert math.isnan(half["torch-bf16"]["break_even"])
        assert "torch-bf16" in advice([half["topk"], half["torch-bf16"]])


def test_codecs_in_a_plan_are_those_of_what_is_sent():
    few = ["topk", "cltk", "randomk"]
    local = {f"select:{name}": SELECT for name in few}
    network = Network.of_link(ALPHA, BETA, local)
    all_of_them = by_name(plan(ZEROS, network, COMPUTE, [2], codec=Codec("rice", "int8")))
    sent = {n: (all_of_them[n]["indices"], all_of_them[n]["values"]) for n in (*few, "none")}
    plain = ("plain", "float32")
    assert sent == {"topk": ("rice", "int8"), "cltk": ("rice", "float32"), "randomk": plain, "none": plain}  # fmt: skip
    with pytest.raises(InputError, match="randomk sends no positions"):
        plan(ZEROS, network, COMPUTE, [2], compressors=few, codec=Codec("rice"))


def test_a_rule_that_keeps_fewer_elements_is_not_preferred_for_that(tmp_path):
    """sidco-e keeps 0.76 k of a gradient of which a tenth has ten times the scale."""
    rng = np.random.default_rng(0)
    x = rng.laplace(size=D) * np.where(rng.random(D) < 0.1, 10, 1)
    found = plan(x, link(select=0), COMPUTE, [2], [0.1], ["sidco-e", "topk"], rates=[1e7])
    rule, exact, dense = (by_name(found)[name] for name in ("sidco-e", "topk", "none"))
    assert rule["quality"] < 0.9
    assert rule["seconds"] < exact["seconds"] < dense["seconds"]
    assert rule["seconds_at_k"] == pytest.approx(exact["seconds"])
    assert [r["compressor"] for r in found if r["recommended"]] == ["topk"]
    assert "is no faster, within the interval, if it sent k elements" in advice(found)


def test_intervals_have_the_noise_of_computing_and_of_trainings():
    few = ["topk", "sidco-e"]

    def half_width(compute):
        topk = by_name(plan(ZEROS, measured_network(), compute, [4], compressors=few, draws=2000))
        return math.log(topk["topk"]["high"] / topk["topk"]["low"]) / 2 / 1.96

    base = half_width(COMPUTE)
    assert base > 0.95 * prediction.ERROR * 2.365 / 1.96  # of Student's t of eight systems
    times = [0.015, 0.02, 0.025]
    rng = np.random.default_rng(
        3
    )  # the slowest of four workers, by the times' own spread and middle
    sigma = np.std(np.log(times), ddof=1) * np.sqrt(2 / rng.chisquare(2, 100_000))
    middle = rng.standard_normal(100_000) / math.sqrt(3)
    slowest = sigma * (middle + rng.standard_normal((4, 100_000)).max(axis=0))
    noise = np.subtract(*np.quantile(slowest, (0.975, 0.025))) / 2 / 1.96
    assert half_width(times) == pytest.approx(math.hypot(base, noise), rel=0.25)
    assert half_width([COMPUTE] * 3) == pytest.approx(base, rel=0.1)


def test_the_coverage_that_the_command_says_is_that_of_the_page():
    page = (ROOT / "docs" / "network.md").read_text(encoding="utf-8")
    row = r"\| `[\w-]+` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) to ([\d,]+) \|"
    rows = [[float(n.replace(",", "")) for n in found] for found in re.findall(row, page)]
    rows = rows[: HELD[1]]
    inside = sum(low <= measured <= high for measured, _, low, high in rows)
    assert abs(inside - HELD[0]) <= 1  # a rounded end
    assert f"{HELD[0]} of the measured steps lie within the interval" in page
    concepts = (ROOT / "docs" / "concepts" / "cost.md").read_text(encoding="utf-8")
    assert f"intervals [held {HELD[0]} of {HELD[1]} steps]" in concepts


def test_where_nothing_was_measured_the_plan_says_so(inputs, capsys):
    """A sweep of a training without a compressor."""
    lines = tuple(a for a in measured_network().lines if not a.operation.startswith("select:"))
    Network(lines, measured_network().algorithms, {}).save("none.json")
    code, out, err = run(capsys, *PLAN, "--network", "none.json")
    assert code == 0, err
    assert "No compressor was considered: measure the network again" in " ".join(out.split())
    assert "Not considered, as the network was measured without them: dense-bf16," in err


def test_where_only_fast_links_gain_it_pays_above_a_bandwidth():
    doubling = {"all_gather": "recursive doubling"}
    network = Network.of_link(1e-3, 1e-9, {"select:signsgd": 0.0}, doubling)
    found = by_name(plan(ZEROS, network, COMPUTE, [1024], compressors=["signsgd"], rates=[1e12]))
    assert found["signsgd"]["speedup"] > 1
    at = found["signsgd"]["break_even"]
    assert found["signsgd"]["pays"] == "above"
    for rate, faster in ((at * 0.99, False), (at * 1.01, True)):
        near = plan(ZEROS, network, COMPUTE, [1024], compressors=["signsgd"], rates=[rate * 1e6])
        assert (by_name(near)["signsgd"]["speedup"] > 1) == faster
    slow = by_name(plan(ZEROS, network, COMPUTE, [1024], compressors=["signsgd"], rates=[1e6]))
    assert slow["signsgd"]["speedup"] < 1
    assert f"It pays above {format_rate(at)}." in advice(list(slow.values()))


def test_a_stated_rate_is_a_network_of_that_rate():
    rate = 3e8
    stated = plan(ZEROS, link(), COMPUTE, [8], compressors=["topk"], rates=[rate])
    built = plan(ZEROS, link(beta=8 / rate), COMPUTE, [8], compressors=["topk"])
    for a, b in zip(stated, built, strict=True):
        assert a | {"layers": None} == pytest.approx(b | {"layers": None}, nan_ok=True)
    assert stated[0]["rate"] == 300


def test_without_its_codec_a_compressor_sends_the_same_elements():
    """What a codec saves would else be mixed up with what a rule keeps too much or too little."""
    layers, codec = [LayerTime("w", 20_000, 1e-3)], Codec("rice", "int8")
    for selected in (60, 200, 900):  # of 200 that were asked for
        options = {"name": "sidco-e", "ratio": 0.01, "world": 2}
        coded, plain = (
            senders.OneMessage(
                **options,
                layers=layers,
                forward=0.0,
                codec=each,
                exchange=exchange("sidco-e", 20_000, 0.01, 2, selected=selected, codec=each),
            )
            for each in (codec, PLAIN)
        )
        assert coded.plain() == plain
        assert coded.exchange.bytes_sent < plain.exchange.bytes_sent
        assert coded.plain().exchange.selected == selected


def test_sent_counts_and_unions_come_from_the_trace(tmp_path):
    ranks = gradients(3, 20_000, 0.5)
    trace = written(tmp_path / "run.zarr", ranks)
    records = plan(trace, link(), COMPUTE, [2], [0.01], ["sidco-e", "micro", "topk", "randomk"])
    found = by_name(records)
    (expected,) = gradstats.quality(trace, [0.01], ["sidco-e"])
    rule = found["sidco-e"]
    assert (rule["quality"], rule["basis"]) == (expected["mean"], "trace")
    selected = round(200 * expected["mean"])
    assert rule["selected"] == selected
    assert rule["bytes"] == exchange("sidco-e", 20_000, 0.01, 2, selected=selected).bytes_sent
    assert (found["micro"]["quality"], found["micro"]["basis"]) == (1, "assumed")
    assert found["topk"]["basis"] == "exact"
    sets = [top(values, 200) for values in ranks]
    union = np.mean([len(a | b) for a, b in itertools.combinations(sets, 2)])
    assert found["topk"]["union"] == pytest.approx(union)
    assert (found["randomk"]["union"], found["none"]["union"]) == (200, 20_000)
    # one rank, or ranks that were captured after averaging, do not tell what others select
    averaged = written(tmp_path / "averaged.zarr", [ranks[0]] * 3)
    for source in (ranks[0], averaged):
        alone = by_name(plan(source, link(), COMPUTE, [2], [0.01], ["topk"]))
        assert math.isnan(alone["topk"]["union"])


def test_a_plan_may_be_of_some_captured_steps(tmp_path):
    ranks = gradients(2, 20_000, 0.5)
    heavy = [np.float32(np.sign(v) * np.abs(v) ** 3) for v in reversed(ranks)]
    path = tmp_path / "run.zarr"
    create_trace(path, [Layer("w", 0, (20_000,))], world_size=2)
    for rank in range(2):
        writer = TraceWriter(path, rank)
        for step, of_step in enumerate((ranks, heavy)):
            writer.append(
                step, {"gradient": of_step[rank] if step else np.full(20_000, np.nan, "f4")}
            )
        writer.close()
    of_all, of_some = (
        by_name(plan(path, link(), COMPUTE, [2], [0.01], ["sidco-e", "topk"], captured=steps))
        for steps in (None, [1])
    )
    (expected,) = gradstats.quality(heavy[0], [0.01], ["sidco-e"])
    assert of_some["sidco-e"]["quality"] != of_all["sidco-e"]["quality"]
    # of both ranks, which differ little
    assert of_some["sidco-e"]["quality"] == pytest.approx(expected["mean"], rel=0.1)
    union = len(top(heavy[0], 200) | top(heavy[1], 200))
    assert of_some["topk"]["union"] == pytest.approx(union)
    for absent in ([7], [1, 7]):
        with pytest.raises(InputError, match="steps 0, 1"):
            plan(path, link(), COMPUTE, [2], [0.01], ["topk"], captured=absent)
    with pytest.raises(InputError, match="captured must be a list or a tuple, not 1"):
        plan(path, link(), COMPUTE, [2], [0.01], ["topk"], captured=1)


def test_a_bare_rule_is_priced_as_it_was_measured():
    network = measured_network()
    values = np.random.default_rng(0).laplace(size=20_000)
    found = by_name(plan(values, network, COMPUTE, [4], [0.01], ["threshold:dgc"]))
    assert found["threshold:dgc"]["measured"]
    assert found["threshold:dgc"]["select"] > 0


def test_a_bare_rule_is_planned_beside_the_system_of_its_name():
    values = np.random.default_rng(0).laplace(size=100_000)
    found = by_name(plan(values, link(), COMPUTE, [2], [0.01], ["dgc", "threshold:dgc"]))
    (bare,) = gradstats.quality(values, [0.01], ["dgc"])
    (system,) = gradstats.quality(values, [0.01], ["dgc"], options={"dgc": {"rule": "program"}})
    assert bare["mean"] != system["mean"]
    assert found["threshold:dgc"]["quality"] == bare["mean"]
    assert found["dgc"]["quality"] == system["mean"]


def test_a_source_is_opened_once(tmp_path, monkeypatch):
    path, opened = tmp_path / "run.zarr", []
    written(path, gradients(2, 1000, 0.5))

    def opening(given):
        opened.append(given)
        return open_trace(given)

    monkeypatch.setattr("gradstats.trace.sources.open_trace", opening)
    plan(path, link(), COMPUTE, [2, 4], [0.1, 0.01], ["sidco-e", "topk"])
    assert opened == [path]


def test_names_shared_with_modules_are_functions():
    network = importlib.import_module("gradstats.network")
    for name in ("exchange", "plan"):
        module = importlib.import_module(f"gradstats.network.{name}")
        assert getattr(network, name) is getattr(module, name)


def test_what_a_run_recorded_goes_before_a_replay(tmp_path):
    path = tmp_path / "run.zarr"
    about = {"compressor": "sidco-e", "ratio": 0.01}
    create_trace(path, [Layer("w", 0, (1000,))], metadata=about)
    writer = TraceWriter(path, 0, compression=True)
    said = {"target": 10, "numel": 1000, "bytes_sent": 120, "union": 12}
    values = np.random.default_rng(0).laplace(size=1000).astype(np.float32)
    writer.append(0, {"gradient": values}, selected=17, compression=said)
    # refused, as with nonfinite="skip": it says nothing about the rule
    values[3] = np.nan
    refused = {"target": 0, "numel": 1000, "bytes_sent": 0, "union": 0}
    writer.append(1, {"gradient": values}, selected=0, compression=refused)
    writer.close()
    found = by_name(plan(path, link(), COMPUTE, [2], [0.01], ["dgc"], rates=[1e5]))
    assert math.isfinite(found["dgc"]["quality"])
    assert found["dgc"]["bytes"] < found["none"]["bytes"] / 4
    found = by_name(plan(path, link(), COMPUTE, [2], [0.01], ["sidco-e"], rates=[1e5]))
    assert found["sidco-e"]["quality"] == 1.7
    # under both names of the rule, as it has no system; a system's name is its own
    both = by_name(plan(path, link(), COMPUTE, [2], [0.01], ["threshold:sidco-e", "sidco-e"]))
    assert both["threshold:sidco-e"]["quality"] == both["sidco-e"]["quality"] == 1.7
    bare = tmp_path / "bare.zarr"
    create_trace(bare, [Layer("w", 0, (1000,))], metadata=about | {"compressor": "threshold:dgc"})
    writer = TraceWriter(bare, 0, compression=True)
    values[3] = 1
    writer.append(0, {"gradient": values}, selected=17, compression=said)
    writer.close()
    both = by_name(plan(bare, link(), COMPUTE, [2], [0.01], ["threshold:dgc", "dgc"]))
    assert both["threshold:dgc"]["quality"] == 1.7
    assert both["dgc"]["quality"] != 1.7
    # of the steps that are looked at
    later = by_name(plan(path, link(), COMPUTE, [2], [0.01], ["sidco-e"], captured=[1]))
    assert later["sidco-e"]["quality"] != 1.7
    assert "It keeps 1.7 of the k asked for." in advice([found["sidco-e"], found["none"]])


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100", 10**8),
        ("2.5Gbit", 25 * 10**8),
        ("500kbit", 500_000),
        ("1kbit", 1000),
        ("0.001", 1000),
        ("1mbit", 10**6),
    ],
)
def test_bandwidths_are_read_as_tc_writes_them(text, rate):
    assert parse_rate(text) == rate


@every("text", ["0.999kbit", "0.0009", "0", "-1", "1e3", "1tbit", "", "kbit"])
def test_rates_below_one_kbit_are_none(text):
    with pytest.raises(InputError, match="a rate is a number of Mbit/s"):
        parse_rate(text)


def test_the_figure_has_lines_and_measured_points():
    rates = [1e7, 1e8, 1e9]
    records = plan(ZEROS, link(), COMPUTE, [4, 8], compressors=["topk"], rates=rates)
    points = [
        {"compressor": name, "ratio": ratio, "workers": 4, "rate": 100.0, "seconds": seconds}
        for name, ratio, seconds in (("none", None, 3.0), ("topk", 0.001, 2.0), ("topk", 0.1, 1.0))
    ]
    ax = plots.speedup(records, Figure().subplots(), measured=points)
    expected = [
        (r["rate"], r["speedup"]) for r in records if (r["compressor"], r["workers"]) == ("topk", 4)
    ]
    assert [tuple(p) for p in ax.lines[0].get_xydata()] == sorted(expected)
    assert [tuple(p) for p in ax.lines[1].get_xydata()] == [(100.0, 1.5)]
    ax = plots.speedup(records, Figure().subplots(), at="workers")
    assert ax.lines[0].get_xydata()[:, 0].tolist() == [4, 8]


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """A gradient of Laplace values, a measured network and an assumed one, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    np.save("x.npy", np.random.default_rng(0).laplace(size=20_000).astype(np.float32))
    measured_network().save("network.json")
    link(alpha=0, select=1e-7).save("fast.json")
    return tmp_path


PLAN = ["plan", "x.npy", "--network", "network.json", "--compute", "0.01", "--workers", "4"]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as exited:
        main([str(a) for a in arguments])
    return exited.value.code, *capsys.readouterr()


def test_tables_fit_80_columns_and_end_with_the_recommendation(inputs, capsys):
    code, out, err = run(capsys, *PLAN, "--workers", 1024, "--ratio", 0.01, "--ratio", 0.001)
    assert code == 0, err
    assert max(map(cell_len, out.splitlines())) <= 80
    assert "Too wide" not in out
    assert out.count("A step of") == 2
    assert " ".join(out.split()).count("it pays") == 2  # by the prediction alone
    assert "Assumed to send exactly k: micro, redsync-quantised." in err
    code, out, err = run(capsys, "plan", "--help")
    assert code == 0
    assert max(map(cell_len, out.splitlines())) <= 80


def test_other_formats_have_every_field(inputs, capsys):
    few = [*PLAN, "--compressor", "topk", "--compressor", "marsit", "--bandwidth", "1gbit"]
    _, out, err = run(capsys, *few, "--format", "json")
    records = json.loads(out)
    assert {r["compressor"] for r in records} == {"none", "topk", "marsit"}
    fields = ["compressor", "workers", "ratio", "seconds", "low", "high", "speedup"]
    assert records[0].keys() >= {*fields, "break_even", "limit", "rate"}
    assert {r["rate"] for r in records} == {1000}
    fastest = min(records, key=lambda r: r["seconds"])
    (chosen,) = [r for r in records if r["recommended"]]
    assert chosen["compressor"] == "none"  # dense cannot be told from topk here
    assert chosen["low"] < fastest["seconds"] < chosen["seconds"]
    assert "don't compress" in err
    assert "which cannot be told from 1" in err
    assert (
        f"95 %; of {HELD[1]} steps of 8 systems (docs/network.md), each left out when the error was estimated, they "
        f"held {HELD[0]}." in err
    )
    rows = list(csv.DictReader(run(capsys, *few, "--format", "csv")[1].splitlines()))
    assert list(rows[0]) == list(records[0])
    assert "| workers | Mbit/s |" in run(capsys, *few, "--format", "markdown")[1]
    assert run(capsys, *few, "--format", "latex")[1].startswith("\\begin{tabular}")
    assert run(capsys, *few, "-o", "plan.txt")[1] == ""
    assert "topk" in (inputs / "plan.txt").read_text()


def test_codec_and_baseline_are_options(inputs, capsys):
    few = [*PLAN, "--compressor", "topk", "--indices", "rice", "--baseline", "bf16"]
    code, out, err = run(capsys, *few, "--values", "int4", "--format", "json")
    assert code == 0, err
    records = by_name(json.loads(out))
    assert records.keys() == {"topk", "none", "torch-bf16"}
    assert (records["topk"]["indices"], records["topk"]["values"]) == ("rice", "int4")
    assert records["topk"]["baseline"] == "torch-bf16"
    code, out, _ = run(capsys, *few)
    assert code == 0
    assert "Its codec (rice, float32) pays" in " ".join(out.split())
    assert "at which Mbit/s it is faster than torch-bf16" in " ".join(out.split())
    assert max(map(cell_len, out.splitlines())) <= 80


@pytest.mark.parametrize(("baseline", "called"), [("none", "dense"), ("bf16", "torch-bf16")])
def test_a_mark_of_doubt_says_of_what(baseline, called, inputs, capsys):
    """What may differ from the baseline by two per cent only is marked, too, so that is what the note says."""
    arguments = [*PLAN, "--compressor", "topk", "--bandwidth", "10gbit", "--baseline", baseline]
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    assert "?" in out
    assert f"at this rate it may be within 2 % of {called}." in " ".join(err.split())


def test_dont_is_said_where_dense_wins(inputs, capsys):
    arguments = [*PLAN, "--network", "fast.json", "--compressor", "topk"]
    code, out, _ = run(capsys, *arguments, "--bandwidth", "100gbit")
    assert code == 0
    assert "4 workers at 100,000 Mbit/s: don't compress." in " ".join(out.split())


def test_a_figure_is_written(inputs, capsys):
    measured = [
        {"compressor": "none", "ratio": None, "seconds": 0.05},
        {"compressor": "topk", "ratio": 0.001, "seconds": 0.02},
    ]
    measured = [{**r, "nproc": 4, "rate": 100.0, "compute": 0.01} for r in measured]
    (inputs / "measured.json").write_text(json.dumps(measured))
    sweep = [*PLAN, "--compressor", "topk", "--bandwidth", "100", "--bandwidth", "1gbit"]
    code, _, err = run(capsys, *sweep, "--measured", "measured.json", "--figure", "f.png")
    assert code == 0, err
    assert (inputs / "f.png").read_bytes().startswith(b"\x89PNG")
    at = PLAN.index("--compute")
    alone = [*PLAN[:at], *PLAN[at + 2 :], "--format", "json"]
    code, out, err = run(capsys, *alone, "--measured", "measured.json")
    assert code == 0, err
    assert (code, out) == run(capsys, *PLAN, "--format", "json")[:2]
    code, _, err = run(capsys, *alone)
    assert code == 2
    assert "say --compute SECONDS, or --measured" in err


ERRORS = [
    (["--network", "none.json"], "cannot read none.json"),
    (["--network", "x.npy"], "x.npy is not a measured network"),
    (["--network", "garbage.json"], "garbage.json is not a measured network"),
    (["--compressor", "marsid"], "did you mean marsit?"),
    (["--ratio", "0"], "ratio must be in (0, 1]"),
    (["--ratio", "1.5"], "ratio must be in (0, 1]"),
    (["--workers", "0"], "Invalid value for '--workers'"),
    (["--compute", "0"], "compute must be in (0, inf), seconds"),
    (["--compute", "nan"], "compute must be in (0, inf), seconds"),
    (["--bandwidth", "fast"], "a rate is a number of Mbit/s"),
    (["--figure", "f.png"], "several --bandwidth or --workers"),
    (["--figure", "f.xyz", "--workers", "8"], "no figure for f.xyz: name it .pdf, .svg, .png"),
    (["--measured", "garbage.json", "--figure", "f.png", "--workers", "8"], "bench-network"),
    (["--format", "xml"], "no format 'xml'"),
    (["--indices", "ricr"], "did you mean rice?"),
    (["--values", "int3"], "no values 'int3'"),
    (["--baseline", "fp8"], "no baseline 'fp8'"),
    (["--compressor", "randomk", "--indices", "rice"], "randomk sends no positions"),
    (["--step", "7"], "nothing in x.npy matches; it holds steps 0"),
]


@every(("options", "message"), ERRORS, ids=[" ".join(o) for o, _ in ERRORS])
def test_bad_input_is_one_line(inputs, capsys, options, message):
    (inputs / "garbage.json").write_text("{]")
    code, out, err = run(capsys, *PLAN, "--compressor", "topk", *options)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert message in err


def test_what_is_missing_is_named(inputs, capsys):
    at = PLAN.index("--workers")
    code, _, err = run(capsys, *PLAN[:at], *PLAN[at + 2 :])
    assert code == 2
    assert "Missing option '--workers'" in err
    at = PLAN.index("--network")
    for both in ([], [*PLAN[at : at + 2], "--link", "1gbit"]):
        code, _, err = run(capsys, *PLAN[:at], *PLAN[at + 2 :], *both)
        assert code == 2
        assert len(err.strip().splitlines()) == 1
        for way in (
            "--link (1gbit, 10gbit, 100gbit, wan, or a rate)",
            "-m gradstats.network -o FILE",
        ):
            assert way in err
    collectives = [line for line in link(0, 1).lines if line.operation in ALGORITHMS]
    lines = (*collectives, Line("memory", 1, 0.0, 0.0))
    with pytest.raises(InputError, match="without 'select:dgc'"):
        plan(ZEROS, Network(lines), 1.0, [2], compressors=["dgc"])
    with pytest.raises(InputError, match="nothing per byte"):
        plan(ZEROS, link(beta=0), 1.0, [2])
    with pytest.raises(InputError, match="draws must be at least 0, not -1"):
        plan(ZEROS, link(), 1.0, [2], draws=-1)
    with pytest.raises(InputError, match="compressors must be a list or a tuple, not 'topk'"):
        plan(ZEROS, link(), 1.0, [2], compressors="topk")
    with pytest.raises(InputError, match="at least 1 worker"):
        plan(ZEROS, link(), 1.0, [])
    with pytest.raises(InputError, match="not an empty list"):
        plan(ZEROS, link(), [], [2])
    with pytest.raises(InputError, match="network must be a Network or its file"):
        plan(ZEROS, 3, 1.0, [2])
    with pytest.raises(InputError, match="no elements to send"):
        plan(np.zeros(0, np.float32), link(), 1.0, [2])
