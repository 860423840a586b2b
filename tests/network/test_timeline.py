"""Steps layer by layer: simulated against bounds and figures, predicted against what a real one sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.every import every
from support.networks import ALPHA, BETA, reports
from workers import network as cases

from gradstats.compressors.hiding import Delivery, pipelining_bound
from gradstats.network import (
    LayerTime,
    Line,
    Network,
    deliveries,
    layer_ratios,
    layer_times,
    simulate,
)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 4, pytest.param(3, marks=pytest.mark.slow)])
def test_layer_wise_bytes_are_those_of_the_layerwise_reducer(world):
    layers = [LayerTime(name, numel, 0.0) for name, numel in cases.LAYERS]
    network = Network.of_link(ALPHA, BETA)
    for merge in cases.MERGES:
        messages = deliveries(network, layers, world, cases.RATIO, merge=merge)
        assert sum(m.bytes_sent for m in messages) == reports(world)[0]["layers"][merge][-1]
        assert [n for m in messages for n in m.layers] == ["c", "b", "a"]
        assert all(m.select == 0 and (m.communicate > 0) == (world > 1) for m in messages)


@pytest.mark.distributed
def test_a_real_step_takes_no_less_than_its_simulation():
    timeline = reports(2)[0]["timeline"]
    spent = {
        lane: [a for a in timeline if a.lane == lane]
        for lane in ("backward", "select", "communicate")
    }
    seconds = [[a.end - a.start for a in activities] for activities in spent.values()]
    # the first layer's backward pass is before the timeline
    assert all(layer.backward >= 0.002 for layer in layer_times(timeline)[1:])
    messages = [
        Delivery((name,), numel, 0, *each)
        for (name, numel), *each in zip(cases.LAYERS, *seconds, strict=True)
    ]
    simulated = simulate(messages)
    assert simulated.seconds <= max(a.end for a in timeline)
    assert simulated.seconds >= sum(seconds[0]) + sum(seconds[1]) + seconds[2][-1] - 1e-12


@every(
    ("merge", "messages"),
    [
        (0, ["d", "c", "b", "a"]),
        (1, ["d", "c", "b", "a"]),
        (100, ["d", "c", "b", "a"]),
        (101, ["dc", "ba"]),
        (200, ["dc", "ba"]),
        (201, ["dcb", "a"]),
        (400, ["dcba"]),
        (401, ["dcba"]),
    ],
)
def test_a_message_leaves_as_soon_as_it_has_the_elements(merge, messages):
    layers = [LayerTime(name, 100, 0.25) for name in "dcba"]
    found = deliveries(Network.of_link(ALPHA, BETA), layers, 2, 0.1, merge=merge)
    assert ["".join(m.layers) for m in found] == messages
    assert [m.backward for m in found] == [0.25 * len(name) for name in messages]
    assert [(m.numel, m.sent) for m in found] == [(100 * len(n), 10 * len(n)) for n in messages]


times = st.floats(0, 1, allow_subnormal=False)


@given(st.lists(st.tuples(times, times, times), min_size=1, max_size=12), times)
def test_a_timeline_is_between_its_bounds(rows, forward):
    messages = [Delivery((str(i),), 1, 1, *row) for i, row in enumerate(rows)]
    one, after = (simulate(messages, forward, overlap=o) for o in (True, False))
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
    timeline = simulate(messages, forward=10)
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
    layers = [LayerTime(str(i), 500_000, 0.01) for i in range(8)]
    network = Network.of_link(1e-4, 8e-9, {"select:topk": 1e-9, "unpack": 5e-9})
    ratios = layer_ratios(network, layers, 4, 0.001, merge=0)
    assert ratios.pop("7") == 0.001  # nothing follows the last one
    assert all(0.001 < ratio < 1 for ratio in ratios.values())
    messages = deliveries(network, layers, 4, {**ratios, "7": 0.001}, merge=0)
    timeline = simulate(messages, 0.05)
    exposed = timeline.lane("communicate") - timeline.hidden
    assert exposed == pytest.approx(messages[-1].communicate)
    # eq. 19 leaves nothing but the quarter of room
    assert messages[0].communicate + messages[0].select > 0.75 * 0.01
    dense = simulate(deliveries(network, layers, 4, None), 0.05)
    assert dense.lane("select") == 0
    assert dense.seconds > timeline.seconds


def test_a_crowded_host_hides_no_unpacking():
    about = {"device": "cpu", "cores": 2, "threads": 1, "ranks_per_host": 2}
    lines = (
        Line("all_gather", 2, 1e-3, 0.0),
        Line("busy_all_gather", 2, 2e-3, 0.0),
        Line("pack", 1, 1e-2, 0.0),
        Line("unpack", 1, 0, 0.0),
    )
    lines += (Line("select:topk", 1, 1e-4, 0.0),)
    layers = [LayerTime("a", 1000, 0.1)]
    (spare,) = deliveries(Network(lines, about={**about, "cores": 4}), layers, 2, 0.01)
    (crowded,) = deliveries(Network(lines, about=about), layers, 2, 0.01)
    assert (spare.select, spare.communicate) == pytest.approx((1e-4, 1.1e-2))
    assert (crowded.select, crowded.communicate) == pytest.approx((1.21e-2, 0))
    assert not Network(lines).crowded
