"""Unions of selections, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.networks import gradients, top, written

from gradstats.errors import InputError
from gradstats.network import UnionGrowth, union_growth
from gradstats.statistics.union import fit_union
from gradstats.trace import Layer, TraceWriter, create_trace, open_trace


@pytest.mark.parametrize("shared", [0.0, 0.3, 0.6, 1.0])
def test_unions_are_measured_exactly_and_predicted_beyond(tmp_path, shared):
    numel, ratio, k = 20_000, 0.01, 200
    ranks = gradients(16, numel, shared)
    (growth,) = union_growth(written(tmp_path / "run.zarr", ranks[:8]), ratio)
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


def test_bounds_follow_the_last_slope_and_end_at_the_gradient():
    """Of three ranks: 10 positions by one rank only, 6 by two, 4 by all."""
    growth = UnionGrowth(100, np.array([80, 10, 6, 4]), 0.1)
    assert (growth.ranks, growth.selected) == (3, (10 + 12 + 12) / 3)
    pair = 4 + 6 + 10 * 2 / 3  # one of three pairs misses a position of one rank
    assert [growth.measured(n) for n in (1, 2, 3)] == pytest.approx([34 / 3, pair, 20])
    assert growth.bounds(3) == (20, 20)
    assert growth.bounds(5) == pytest.approx((20, 20 + 2 * (20 - pair)))
    assert growth.bounds(1000) == (20, 100)
    for ask, ranks in ((growth.bounds, 2), (growth.predicted, 0)):
        with pytest.raises(InputError, match="ranks"):
            ask(ranks)
    assert UnionGrowth(100, np.array([80, 20]), 0.1).bounds(3) == (20, 60)
    assert UnionGrowth(100, np.array([85, 10, 5]), 0.1).bounds(4) == (15, 25)


def test_a_union_of_ranks_that_avoid_each_other_does_not_fall_as_ranks_are_added():
    """Two ranks select disjoint parts, 400 of 1000 each: the model alone says 784 of three."""
    growth = fit_union(np.array([200, 800, 0]))
    assert growth.predicted(3) < 800
    assert [growth(n) for n in (1, 2, 3)] == [400, 800, 800]
    assert 800 < growth(4) == growth.predicted(4) < 1000 == growth.bounds(4)[1]


def test_unions_need_several_ranks_with_a_common_step(tmp_path):
    one = written(tmp_path / "one.zarr", gradients(1, 100, 0))
    with pytest.raises(InputError, match="one rank"):
        union_growth(one, 0.1)
    two = written(tmp_path / "two.zarr", gradients(2, 100, 0))
    with pytest.raises(InputError, match="no such step"):
        union_growth(two, 0.1, steps=[4])


def test_a_union_is_of_the_kind_that_is_asked_for(tmp_path):
    """Of the gradients ranks select the same elements, of the corrected ones others."""
    values = np.zeros((2, 2, 100), np.float32)
    values[:, 0, :10] = 1.0
    values[0, 1, :10] = values[1, 1, 10:20] = 1.0
    create_trace(tmp_path / "run.zarr", [Layer("w", 0, (100,))], world_size=2)
    for rank, (gradient, corrected) in enumerate(values):
        writer = TraceWriter(tmp_path / "run.zarr", rank, kinds=("gradient", "corrected"))
        writer.append(0, {"gradient": gradient, "corrected": corrected})
        writer.close()
    trace = open_trace(tmp_path / "run.zarr")
    measured = {kind: union_growth(trace, 0.1, kind=kind)[0] for kind in ("gradient", "corrected")}
    assert {kind: growth.measured(2) for kind, growth in measured.items()} == {
        "gradient": 10,
        "corrected": 20,
    }
