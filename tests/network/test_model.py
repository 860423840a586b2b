"""The cost model: lines fitted to measurements, scaled to other numbers of workers, and kept in a file."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t
from support.networks import ALPHA, BETA, SIZES, measured_network, noisy

from gradstats.errors import InputError
from gradstats.network import ALGORITHMS, Line, Network, Work, exchange, fit_line, interval


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


def test_intervals_of_a_fit_cover():
    rng = np.random.default_rng(1)
    covered = np.zeros(2)
    for _ in range(80):
        line = fit_line("all_reduce", 2, SIZES, noisy(rng, 3e-4, 1e-9, SIZES, 0.2))
        found = line.confidence()
        covered += [i.low <= t <= i.high for i, t in zip(found, (3e-4, 1e-9), strict=True)]
    assert (covered / 80 > 0.87).all()


def test_a_fit_says_whether_a_line_is_adequate():
    rng = np.random.default_rng(2)
    straight = fit_line("x", 1, SIZES, noisy(rng, 3e-4, 1e-9, SIZES, 0.1))
    assert straight.spread < 3 * straight.noise
    bent = noisy(rng, 3e-4, 1e-9, SIZES, 0.1)
    bent[-3:] *= 4  # what no longer fits into a cache
    assert fit_line("x", 1, SIZES, bent).spread > 5 * straight.noise


def test_noise_is_the_error_of_a_median_and_bends_add_a_quarter():
    line = fit_line(
        "x", 1, SIZES, np.outer(3e-4 + 1e-9 * np.asarray(SIZES), [0.8, 0.9, 1, 1.1, 1.2])
    )
    assert line.noise == pytest.approx(1.253 * 0.2 / 1.349 / math.sqrt(5))
    assert line.error == pytest.approx(line.noise)  # what is straight has no error of interpolation
    bends = tuple(np.exp([0, 0.2, 0, 0]))
    bent = Line("x", 1, 1.0, 0.0, spread=0.5, noise=0.03, sizes=(1, 4, 16, 64), bends=bends)
    # predicted from its neighbours, the second is 0.2 off and the third 0.1
    assert bent.error == pytest.approx(math.hypot(0.03, math.sqrt((0.2**2 + 0.1**2) / 2) / 4))
    assert Line("x", 1, 1.0, 0.0, spread=0.5, noise=0.03).error == 0.5


def test_a_bent_line_is_predicted_as_measured():
    rng = np.random.default_rng(5)
    exact = 3e-4 + 1e-9 * np.asarray(SIZES)
    exact[-3:] *= 4
    line = fit_line("x", 1, SIZES, exact[:, None] * np.ones(3))
    assert [line.at(size) for size in SIZES] == pytest.approx(exact)
    assert line.at(SIZES[-1] * 2) == pytest.approx(2 * exact[-1], rel=0.05)
    assert line.at(SIZES[0] / 2) == pytest.approx(exact[0], rel=0.05)
    middle = math.sqrt(SIZES[5] * SIZES[6])
    assert exact[5] < line.at(middle) < exact[6]
    straight = fit_line("x", 1, SIZES, noisy(rng, 3e-4, 1e-9, SIZES, 0.05))
    assert straight.error < 0.05 < line.error
    network = Network((line,), {}, {})
    slower = network.slowed(2).line("x", 1)  # local work does not hang on the links
    assert slower.at(SIZES[-1]) == line.at(SIZES[-1])
    assert Line("x", 1, 1.0, 0.0).at(5) == 1


def test_a_fit_of_relative_errors_gets_both_ends():
    rng = np.random.default_rng(3)
    y = noisy(rng, 1e-4, 1e-9, SIZES, 0.1)
    line = fit_line("x", 1, SIZES, y)
    assert line.fixed == pytest.approx(1e-4, rel=0.15)
    assert line.slope == pytest.approx(1e-9, rel=0.15)
    steep = fit_line("x", 1, [1, 2, 3], [[0.9], [2.4], [3.9]])
    assert (steep.fixed, steep.covariance[0]) == (0, (0, 0))
    assert steep.slope > 1
    for bad in ([[1.0], [0.0], [1.0]], [[1.0], [math.nan], [1.0]]):
        with pytest.raises(InputError, match="positive times"):
            fit_line("x", 1, [1, 2, 3], bad)


def test_local_work_on_messages_grows_with_their_number():
    line = fit_line("decode:ssdm", 2, SIZES, 1e-9 * np.asarray(SIZES)[:, None] * [1, 1, 1])
    network = Network((line,))
    assert network.line("decode:ssdm", 2) == line
    for world in (1, 8):
        assert network.line("decode:ssdm", world).at(1000) == pytest.approx(5e-7 * world)


@pytest.mark.parametrize("world", [2, 16])
def test_other_numbers_of_workers_are_scaled(world):
    network, truth = measured_network(), Network.of_link(ALPHA, BETA)
    for operation in ALGORITHMS:
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


def test_a_shaped_network_has_the_rate_it_was_shaped_to():
    lines = Network.of_link(ALPHA, BETA).lines
    assert Network(lines).rate == pytest.approx(8 / BETA)
    assert Network(lines, about={"rate": 5e6}).rate == 5e6


@pytest.mark.parametrize("measured", [(2, 16), (16, 2), (16, 2, 64)])
def test_the_nearest_number_of_workers_is_scaled(measured):
    """By its ratio, not its difference: 8 is twice away from 16, and four times from 2."""
    lines = [
        Line(operation, world, 1.0 * world, 0.0)
        for world in measured
        for operation in ("hop", "decode:x")
    ]
    lines.append(Line("pack", 1, 5.0, 0.0))
    network = Network(tuple(lines))
    for world, nearest in ((2, 2), (3, 2), (5, 2), (6, 16), (8, 16), (16, 16), (20, 16)):
        assert network.line("hop", world).fixed == nearest  # a hop costs the same among any number
        assert network.line("decode:x", world).fixed == pytest.approx(world)
        assert network.line("hop", world).world == world
    assert network.line("pack", 8) == lines[-1]


def test_what_two_predictions_share_varies_in_common():
    """A line is off by one factor at every size, so that the ratio of two of its times is certain."""
    network = measured_network()
    # others would be drawn, too, thousands of times
    used = [line for line in network.lines if line.operation in ALGORITHMS]
    network = replace(network, lines=tuple(used))
    (line,) = [line for line in network.lines if line.operation == "all_gather"]
    large, small = (exchange("signsgd", d, world=4).communicate[1:] for d in (10**8, 10**3))
    certain = interval(network, lambda n: n.seconds(large, 4) / n.seconds(small, 4))
    ratio = network.seconds(large, 4) / network.seconds(small, 4)
    assert certain == pytest.approx((ratio, ratio, ratio))
    # one alone has the error of the line, and so have two sizes together
    width = t.ppf(0.975, line.degrees) * line.error
    for works in (large, small, large + small):
        value, low, high = interval(network, lambda n, w=works: n.seconds(w, 4), draws=4000)
        assert value == network.seconds(works, 4)
        assert np.log([low / value, high / value]) == pytest.approx([-width, width], rel=0.12)
    # known from few sizes, the error is larger than it looks
    few = Network((Line("x", 1, 1.0, 0.0, degrees=2, spread=0.01),))
    _, low, high = interval(few, lambda n: n.line("x", 1).at(1), draws=4000)
    assert np.log([low, high]) == pytest.approx([-0.043, 0.043], rel=0.2)
    # of different lines, errors come together
    reduce = [Work("all_reduce", 1e6)]
    value, low, high = interval(network, lambda n: n.seconds(large, 4) / n.seconds(reduce, 4))
    assert high / low > math.exp(2 * width)
    one = exchange("topk", 10**6, 0.01, 4)
    assumed = interval(Network.of_link(ALPHA, BETA), one.seconds)
    assert assumed.low == assumed.value == assumed.high


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
        (content | {"about": {"rate": "fast"}}, "not a measured network"),
        (content | {"about": {"up": 0}}, "not a measured network"),
        (content | {"about": {"ranks_per_host": "2", "cores": None}}, "not a measured network"),
        (content | {"about": {"threads": float("nan")}}, "not a measured network"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=message):
            Network.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match="not a measured network"):
        Network.load(path)
    # of a machine whose cores Python does not know
    about = {"device": "cpu", "cores": None, "ranks_per_host": 64, "threads": 4, "rate": None}
    path.write_text(json.dumps(content | {"about": about}))
    assert not Network.load(path).crowded
    assert Network.load(path).rate > 0
    with pytest.raises(InputError, match="cannot read"):
        Network.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot write"):
        network.save(tmp_path / "no" / "folder.json")


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="without 'pack'"):
        Network(()).line("pack", 2)
    with pytest.raises(InputError, match="by 'magic'"):
        Network.of_link(1, 1, algorithms={"all_reduce": "magic"})
