"""The cost model: bytes against real compressors, seconds against formulas, unions against brute force."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from support.networks import ALPHA, BETA, SIZES, gradients, measured_network, noisy, top, written
from workers import network as cases

from gradstats import network as cost
from gradstats.compressors import COMPRESSORS, SELECTORS
from gradstats.compressors.lags import Delivery, pipelining_bound
from gradstats.errors import InputError
from gradstats.network import Network, Work, exchange
from gradstats.network.exchange import ragged_bytes, selection_words
from gradstats.primitives.ratio import target_count

WORLDS = [1, 2, 4, pytest.param(3, marks=pytest.mark.slow)]
EXACT = ("topk", "exact", "warm-exact", "redsync-trimmed", "lags", "redsync-quantised")
QUANTISED = ("redsync-quantised", cases.LARGE)
SIGNS = ("signsgd", "ef-signsgd", "ssdm", "cascading")
distributed = pytest.mark.distributed
each_world = pytest.mark.parametrize("world", WORLDS)
each_numel = pytest.mark.parametrize("numel", cases.NUMELS)


@functools.cache
def reports(world):
    return run_ranks(world, cases.exchanges)


def steps(world, name, numel):
    """Return (selected, bytes, unions), each by step and rank."""
    ranks = np.array([report[name, numel] for report in reports(world)])
    return np.moveaxis(ranks, (0, 1, 2), (2, 1, 0))


@distributed
@each_world
@pytest.mark.parametrize(
    ("name", "numel"),
    [*itertools.product(["none", *EXACT, *SIGNS, "cltk", "randomk"], cases.NUMELS), QUANTISED],
)
def test_bytes_are_what_the_system_reports(world, numel, name):
    _, sent, _ = steps(world, name, numel)
    predicted = exchange(name, numel, cases.RATIO, world)
    # of all ranks together: a leader's broadcast and uneven parts are on some of them only
    assert sent.sum(axis=1).tolist() == [round(world * predicted.bytes_sent)] * cases.STEPS


@distributed
@each_world
@pytest.mark.parametrize(
    ("name", "numel"), [*itertools.product(SELECTORS, cases.NUMELS), QUANTISED]
)
def test_bytes_follow_from_what_was_selected(world, name, numel):
    selected, sent, unions = steps(world, name, numel)
    k = target_count(cases.RATIO, numel)
    # the systems turn dense where the last step's selections together were larger than the gradient
    sparse = np.append(True, selected.sum(axis=1)[:-1] <= numel) | (name == "micro")
    if name == "micro":
        words, room = 1 + selected, 1 + math.ceil(5 * k / (4 * world))
        assert (unions == selected.sum(axis=1, keepdims=True)).all()
    else:
        values = np.ones_like(selected) if name == "redsync-quantised" else selected
        pairs = zip(selected[sparse].tolist(), values[sparse].tolist(), strict=True)
        words = np.array([list(map(selection_words, c, v, [numel] * world)) for c, v in pairs])
        room = selection_words(k, 1 if name == "redsync-quantised" else k, numel)
    expected = np.full(cases.STEPS, 12 + 4 * numel)
    expected[sparse] = [sum(lengths) for lengths in ragged_bytes(words.tolist(), room)]
    if name == "micro":
        expected += 4 * unions[:, 0]
    assert sent.tolist() == [[e] * world for e in expected.tolist()]
    if (selected == selected[0]).all():  # in a steady state
        last = exchange(name, numel, cases.RATIO, world, selected=selected[-1].tolist())
        assert last.bytes_sent == expected[-1]


@distributed
@each_world
@each_numel
@pytest.mark.parametrize("topology", ["ring", "torus"])
def test_marsit_moves_as_many_bytes_as_predicted(world, numel, topology):
    _, sent, _ = steps(world, f"one-bit {topology}", numel)
    one = exchange("marsit", numel, world=world, topology=topology, full_every=None)
    assert sent.sum(axis=1).tolist() == [round(world * one.bytes_sent)] * cases.STEPS
    _, sent, _ = steps(world, topology, numel)
    mixed = exchange("marsit", numel, world=world, topology=topology, full_every=4)
    assert sent.sum() == round(4 * world * mixed.bytes_sent)
    assert mixed.bytes_sent >= one.bytes_sent


@distributed
@each_world
@each_numel
def test_bytes_of_half_precision_and_of_selections_too_large_to_be_sparse(world, numel):
    _, sent, _ = steps(world, "half", numel)
    half = exchange("topk", numel, cases.RATIO, world, value_bytes=2)
    assert (sent == half.bytes_sent).all()
    _, sent, _ = steps(world, "dense above", numel)
    predicted = exchange("topk", numel, 0.9, world)
    assert (sent[1:] == predicted.bytes_sent).all()  # the first step cannot know
    assert (predicted.bytes_sent == 12 + 4 * numel) == (world > 1)


@distributed
@each_world
def test_layer_wise_bytes_are_those_of_the_layerwise_reducer(world):
    layers = [cost.LayerTime(name, numel, 0.0) for name, numel in cases.LAYERS]
    network = Network.of_link(ALPHA, BETA)
    for merge in cases.MERGES:
        messages = cost.deliveries(network, layers, world, cases.RATIO, merge=merge)
        assert sum(m.bytes_sent for m in messages) == reports(world)[0]["layers"][merge][-1]
        assert [n for m in messages for n in m.layers] == ["c", "b", "a"]
        assert all(m.select == 0 and (m.communicate > 0) == (world > 1) for m in messages)


@distributed
def test_a_real_step_takes_no_less_than_its_simulation():
    timeline = reports(2)[0]["timeline"]
    spent = {
        lane: [a for a in timeline if a.lane == lane]
        for lane in ("backward", "select", "communicate")
    }
    seconds = [[a.end - a.start for a in activities] for activities in spent.values()]
    # the first layer's backward pass is before the timeline
    assert all(layer.backward >= 0.002 for layer in cost.layer_times(timeline)[1:])
    messages = [
        Delivery((name,), numel, 0, *each)
        for (name, numel), *each in zip(cases.LAYERS, *seconds, strict=True)
    ]
    simulated = cost.simulate(messages)
    assert simulated.seconds <= max(a.end for a in timeline)
    assert simulated.seconds >= sum(seconds[0]) + sum(seconds[1]) + seconds[2][-1] - 1e-12


@pytest.mark.parametrize("world", [2, 4, 16, 128])
def test_redsync_equations_1_and_2(world):
    numel, ratio, gamma = 1 << 20, 0.001, 3e-9
    k, lg = target_count(ratio, numel), math.log2(world)
    network = Network.of_link(
        ALPHA,
        BETA,
        {"select:redsync-quantised": 1e-9, "unpack": gamma},
        {"all_gather": "recursive doubling", "all_reduce": "rabenseifner"},
    )
    sparse = exchange("redsync-quantised", numel, ratio, world)
    assert sparse.bytes_sent == 4 * (k + 5)  # k positions, one mean, two headers of two words
    assert sparse.seconds(network) == pytest.approx(
        numel * 1e-9 + lg * ALPHA + (world - 1) * 4 * (k + 5) * BETA + world * k * gamma
    )
    plain = exchange("topk", numel, ratio, world)
    assert plain.bytes_sent == 4 * (2 * k + 4)
    dense = exchange("none", numel, world=world)
    assert dense.seconds(network) == pytest.approx(
        2 * lg * ALPHA + 2 * (world - 1) / world * 4 * numel * BETA
    )


@pytest.mark.parametrize("world", [2, 3, 5, 64])
def test_rings_of_any_size(world):
    network = Network.of_link(ALPHA, BETA)
    reduce, hop = Work("all_reduce", 1e6), Work("hop", 1e6 / world, 2 * (world - 1))
    expected = 2 * (world - 1) * ALPHA + 2 * (world - 1) / world * 1e6 * BETA
    assert network.seconds([reduce], world) == pytest.approx(expected)
    assert network.seconds([hop], world) == pytest.approx(expected)
    gather = network.seconds([Work("all_gather", 1e3)], world)
    assert gather == pytest.approx((world - 1) * (ALPHA + 1e3 * BETA))
    assert network.line("all_reduce", 1).at(1e6) == 0


def test_indices_are_wide_only_where_they_must_be():
    narrow, wide = (exchange("topk", n, 1000 / n, 4) for n in (2**31 - 1, 2**31))
    assert wide.bytes_sent - narrow.bytes_sent == 4 * 1000
    assert (
        exchange("cltk", 2**31, 1e-6, 4).bytes_sent
        > exchange("cltk", 2**31 - 1, 1e-6, 4).bytes_sent
    )


def test_a_torus_has_fewer_hops_than_a_ring():
    network = Network.of_link(ALPHA, 0)
    ring, torus = (
        exchange("marsit", 10**6, world=16, topology=t, full_every=None) for t in ("ring", "torus")
    )
    flags = 2 * 15 * ALPHA  # and the scale
    assert ring.seconds(network) == pytest.approx(30 * ALPHA + flags)
    assert torus.seconds(network) == pytest.approx(12 * ALPHA + flags)
    assert torus.bytes_sent == ring.bytes_sent


def test_a_message_larger_than_its_room_takes_two_then_one():
    assert ragged_bytes([[10, 4], [10, 4], [3, 3], [3, 3]], 8) == [[40, 8], [56], [56], [20]]


def test_intervals_of_a_fit_cover():
    rng = np.random.default_rng(1)
    covered = np.zeros(2)
    for _ in range(80):
        line = cost.fit_line("all_reduce", 2, SIZES, noisy(rng, 3e-4, 1e-9, SIZES, 0.2))
        found = line.confidence()
        covered += [i.low <= t <= i.high for i, t in zip(found, (3e-4, 1e-9), strict=True)]
    assert (covered / 80 > 0.87).all()


def test_a_fit_says_whether_a_line_is_adequate():
    rng = np.random.default_rng(2)
    straight = cost.fit_line("x", 1, SIZES, noisy(rng, 3e-4, 1e-9, SIZES, 0.1))
    assert straight.spread < 3 * straight.noise
    bent = noisy(rng, 3e-4, 1e-9, SIZES, 0.1)
    bent[-3:] *= 4  # what no longer fits into a cache
    assert cost.fit_line("x", 1, SIZES, bent).spread > 5 * straight.noise


def test_a_bent_line_is_predicted_as_measured():
    rng = np.random.default_rng(5)
    exact = 3e-4 + 1e-9 * np.asarray(SIZES)
    exact[-3:] *= 4
    line = cost.fit_line("x", 1, SIZES, exact[:, None] * np.ones(3))
    assert [line.at(size) for size in SIZES] == pytest.approx(exact)
    assert line.at(SIZES[-1] * 2) == pytest.approx(2 * exact[-1], rel=0.05)
    assert line.at(SIZES[0] / 2) == pytest.approx(exact[0], rel=0.05)
    middle = math.sqrt(SIZES[5] * SIZES[6])
    assert exact[5] < line.at(middle) < exact[6]
    straight = cost.fit_line("x", 1, SIZES, noisy(rng, 3e-4, 1e-9, SIZES, 0.05))
    assert straight.error < 0.05 < line.error
    network = Network((line,), {}, {})
    slower = network.slowed(2).line("x", 1)  # local work does not hang on the links
    assert slower.at(SIZES[-1]) == line.at(SIZES[-1])
    assert cost.Line("x", 1, 1.0, 0.0).at(5) == 1


def test_local_work_on_messages_grows_with_their_number():
    line = cost.fit_line("decode:ssdm", 2, SIZES, 1e-9 * np.asarray(SIZES)[:, None] * [1, 1, 1])
    network = Network((line,))
    assert network.line("decode:ssdm", 2) == line
    for world in (1, 8):
        assert network.line("decode:ssdm", world).at(1000) == pytest.approx(5e-7 * world)


def test_a_crowded_host_hides_no_unpacking():
    about = {"device": "cpu", "cores": 2, "threads": 1, "ranks_per_host": 2}
    lines = (
        cost.Line("all_gather", 2, 1e-3, 0.0),
        cost.Line("busy_all_gather", 2, 2e-3, 0.0),
        cost.Line("pack", 1, 1e-2, 0.0),
        cost.Line("unpack", 1, 0, 0.0),
    )
    lines += (cost.Line("select:topk", 1, 1e-4, 0.0),)
    layers = [cost.LayerTime("a", 1000, 0.1)]
    (spare,) = cost.deliveries(Network(lines, about={**about, "cores": 4}), layers, 2, 0.01)
    (crowded,) = cost.deliveries(Network(lines, about=about), layers, 2, 0.01)
    assert (spare.select, spare.communicate) == pytest.approx((1e-4, 1.1e-2))
    assert (crowded.select, crowded.communicate) == pytest.approx((1.21e-2, 0))
    assert not Network(lines).crowded


def test_a_shaped_network_has_the_rate_it_was_shaped_to():
    lines = Network.of_link(ALPHA, BETA).lines
    assert Network(lines).rate == pytest.approx(8 / BETA)
    assert Network(lines, about={"rate": 5e6}).rate == 5e6


def test_a_fit_of_relative_errors_gets_both_ends():
    rng = np.random.default_rng(3)
    y = noisy(rng, 1e-4, 1e-9, SIZES, 0.1)
    line = cost.fit_line("x", 1, SIZES, y)
    assert line.fixed == pytest.approx(1e-4, rel=0.15)
    assert line.slope == pytest.approx(1e-9, rel=0.15)
    steep = cost.fit_line("x", 1, [1, 2, 3], [[0.9], [2.4], [3.9]])
    assert (steep.fixed, steep.covariance[0]) == (0, (0, 0))
    assert steep.slope > 1
    for bad in ([[1.0], [0.0], [1.0]], [[1.0], [math.nan], [1.0]]):
        with pytest.raises(InputError, match="positive times"):
            cost.fit_line("x", 1, [1, 2, 3], bad)


@pytest.mark.parametrize("world", [2, 16])
def test_other_numbers_of_workers_are_scaled(world):
    network, truth = measured_network(), Network.of_link(ALPHA, BETA)
    for operation in cost.ALGORITHMS:
        scaled, exact = network.line(operation, world), truth.line(operation, world)
        assert scaled.fixed == pytest.approx(exact.fixed, rel=0.2)
        assert scaled.slope == pytest.approx(exact.slope, rel=0.2)
        fixed, slope = scaled.confidence()
        original = network.line(operation, 4).confidence()
        # as wide as before, relatively
        assert fixed.high / fixed.value == pytest.approx(original[0].high / original[0].value)
        assert slope.high / slope.value == pytest.approx(original[1].high / original[1].value)
    alpha, beta = network.link()
    assert alpha.low < ALPHA < alpha.high
    assert beta.low < BETA < beta.high


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_system_has_a_time_with_an_interval(name):
    network = measured_network()
    one = exchange(name, 270_000, 0.001, 8)
    value, low, high = cost.interval(network, one.seconds)
    assert 0 < low < value < high < 2 * value
    split = one.split(network)
    assert sum(split.values()) == pytest.approx(value)
    assert all(seconds >= 0 for seconds in split.values())


def test_what_two_predictions_share_varies_in_common():
    network, one = measured_network(), exchange("topk", 10**6, 0.01, 4)
    assert cost.interval(network, lambda n: one.seconds(n) / one.seconds(n)) == (1, 1, 1)
    assumed = cost.interval(Network.of_link(ALPHA, BETA), one.seconds)
    assert assumed.low == assumed.value == assumed.high


def test_break_even_is_where_both_take_as_long():
    numel, world, select = 10**7, 8, 5e-9
    network = Network.of_link(ALPHA, BETA, {"select:topk": select})
    dense, sparse = exchange("none", numel, world=world), exchange("topk", numel, 0.001, world)

    def gain(n):
        return dense.seconds(n) - sparse.seconds(n)

    # 2(n-1)(α + 4d/n β) = (n-1)(α + m β) + γ d
    beta = (numel * select - 7 * ALPHA) / (7 / 4 * 4 * numel - 7 * sparse.bytes_sent)
    assert cost.break_even(network, gain) == pytest.approx(8 / beta, rel=1e-6)
    assert gain(Network.of_link(ALPHA, 1.01 * beta, {"select:topk": select})) > 0
    assert gain(Network.of_link(ALPHA, 0.99 * beta, {"select:topk": select})) < 0
    assert cost.break_even(network, lambda n: 1.0) == math.inf
    assert cost.break_even(network, lambda n: -1.0) == 0


times = st.floats(0, 1, allow_subnormal=False)


@given(st.lists(st.tuples(times, times, times), min_size=1, max_size=12), times)
def test_a_timeline_is_between_its_bounds(rows, forward):
    messages = [Delivery((str(i),), 1, 1, *row) for i, row in enumerate(rows)]
    one, after = (cost.simulate(messages, forward, overlap=o) for o in (True, False))
    b, s, c = (sum(column) for column in zip(*rows, strict=True))
    assert after.seconds == pytest.approx(forward + b + s + c)
    assert one.seconds <= after.seconds + 1e-9
    assert one.seconds >= forward + max(b + s, c) - 1e-9
    if forward + b + s + c > 1e-6:
        assert after.seconds / one.seconds <= one.bound * (1 + 1e-9)
        assert one.bound == pytest.approx(pipelining_bound(forward, b + s, c))
    assert one.hidden == pytest.approx(forward + b + s + c - one.seconds, abs=1e-9)
    assert after.hidden == pytest.approx(0, abs=1e-9)


def test_the_timeline_of_figure_1():
    messages = [Delivery(("2",), 1, 1, 1, 0, 3), Delivery(("1",), 1, 1, 1, 1, 2)]
    timeline = cost.simulate(messages, forward=10)
    assert [(a.lane, a.layer, a.start, a.end) for a in timeline.activities] == [
        ("backward", "2", 0, 1),
        ("select", "2", 1, 1),
        ("backward", "1", 1, 2),
        ("select", "1", 2, 3),
        ("communicate", "2", 1, 4),
        ("communicate", "1", 4, 6),
    ]
    assert (timeline.seconds, timeline.hidden) == (16, 2)


def test_predicted_ratios_hide_what_can_be_hidden():
    layers = [cost.LayerTime(str(i), 500_000, 0.01) for i in range(8)]
    network = Network.of_link(1e-4, 8e-9, {"select:topk": 1e-9, "unpack": 5e-9})
    ratios = cost.layer_ratios(network, layers, 4, 0.001, merge=0)
    assert ratios.pop("7") == 0.001  # nothing follows the last one
    assert all(0.001 < ratio < 1 for ratio in ratios.values())
    messages = cost.deliveries(network, layers, 4, {**ratios, "7": 0.001}, merge=0)
    timeline = cost.simulate(messages, 0.05)
    exposed = timeline.lane("communicate") - timeline.hidden
    assert exposed == pytest.approx(messages[-1].communicate)
    # eq. 19 leaves nothing but the quarter of room
    assert messages[0].communicate + messages[0].select > 0.75 * 0.01
    dense = cost.simulate(cost.deliveries(network, layers, 4, None), 0.05)
    assert dense.lane("select") == 0
    assert dense.seconds > timeline.seconds


@pytest.mark.parametrize("shared", [0.0, 0.3, 0.6, 1.0])
def test_unions_are_measured_exactly_and_predicted_beyond(tmp_path, shared):
    numel, ratio, k = 20_000, 0.01, 200
    ranks = gradients(16, numel, shared)
    (growth,) = cost.union_growth(written(tmp_path / "run.zarr", ranks[:8]), ratio)
    sets = [top(values, k) for values in ranks]
    assert growth.selected == k
    for n in (1, 2, 5, 8):
        brute = np.mean([len(set.union(*c)) for c in itertools.combinations(sets[:8], n)])
        assert growth.measured(n) == pytest.approx(brute)
        assert growth(n) == growth.measured(n)
    truth = len(set.union(*sets))
    assert growth(16) == pytest.approx(truth, rel=0.15)
    low, high = growth.bounds(16)
    assert low <= truth <= 1.02 * high  # other ranks' gradients are other draws
    assert low <= growth(16) <= 1.02 * high
    independent = numel * (1 - (1 - k / numel) ** 16)
    if shared == 0:
        assert growth.correlation < 0.02
        assert growth(16) == pytest.approx(independent, rel=0.03)
    elif shared == 1:
        assert growth(16) == pytest.approx(k, rel=0.01)
    else:
        assert abs(growth(16) - truth) < abs(independent - truth)
    with pytest.raises(InputError, match="has 8 ranks"):
        growth.measured(9)


def test_unions_need_several_ranks_with_a_common_step(tmp_path):
    one = written(tmp_path / "one.zarr", gradients(1, 100, 0))
    with pytest.raises(InputError, match="one rank"):
        cost.union_growth(one, 0.1)
    two = written(tmp_path / "two.zarr", gradients(2, 100, 0))
    with pytest.raises(InputError, match="no such step"):
        cost.union_growth(two, 0.1, steps=[4])


def test_a_network_comes_back_from_its_file(tmp_path):
    network, path = measured_network(), tmp_path / "network.json"
    network.save(path)
    assert Network.load(path) == network
    content = json.loads(path.read_text())
    for wrong, message in (
        (content | {"schema": 99}, "schema 99"),
        (content | {"format": "other"}, "not a measured network"),
        ([], "not a measured network"),
        (content | {"lines": [{"operation": "x"}]}, "not a measured network"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=message):
            Network.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match="not a measured network"):
        Network.load(path)
    with pytest.raises(InputError, match="cannot read"):
        Network.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot write"):
        network.save(tmp_path / "no" / "folder.json")


def test_the_example_of_the_documentation_runs(capsys):
    page = (ROOT / "docs" / "concepts" / "cost.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    assert "'communicate'" in capsys.readouterr().out


def test_bad_input_is_refused():
    for call, message in (
        (lambda: exchange("zip", 10), "no compressor 'zip'"),
        (lambda: exchange("topk", 10, world=0), "needs ranks"),
        (lambda: exchange("topk", 10, 2.0), "ratio must be"),
        (lambda: exchange("topk", 10, world=3, selected=[1, 2]), "has 2 ranks, not 3"),
        (lambda: exchange("marsit", 10, world=4, topology="torus", shape=(1, 3)), "torus of 1"),
        (lambda: Network(()).line("pack", 2), "without 'pack'"),
        (lambda: Network.of_link(1, 1, algorithms={"all_reduce": "magic"}), "by 'magic'"),
    ):
        with pytest.raises(InputError, match=message):
            call()
