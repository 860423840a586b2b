"""Tails of gradients whose elements have few different values: number formats, clipping, one magnitude."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.every import every

from gradstats import pot, sketch
from gradstats.primitives.levels import Levels, levels_beyond
from gradstats.statistics.fitting import as_magnitudes, fit
from gradstats.statistics.pot.peaks import disagreement
from gradstats.statistics.solution import FitError, Flag

N = 100_000
"""More elements than a sketch keeps one by one."""


def laplace(n=N, seed=0):
    return np.random.default_rng(seed).laplace(size=n).astype(np.float32)


def cast(x, dtype, factor):
    return (torch.from_numpy(x) * factor).to(dtype).float().numpy() / np.float32(factor)


def integers(x, bits):
    step = np.abs(x).max() / (2 ** (bits - 1) - 1)
    return (np.rint(x / step) * step).astype(np.float32)


FORMATS = {
    "e5m2": lambda x: cast(x, torch.float8_e5m2, 1e-3),
    "e4m3": lambda x: cast(x, torch.float8_e4m3fn, 448 / np.abs(x).max()),
    "float16 at 1e-7": lambda x: cast(x, torch.float16, 1e-7),
    "int8": lambda x: integers(x, 8),
    "int4": lambda x: integers(x, 4),
    "clipped": lambda x: np.clip(x, -6, 6),
}


@every("n", [20_000, N])
@every("name", FORMATS)
def test_shape_and_quantile_are_those_of_what_was_rounded(name, n):
    x = FORMATS[name](laplace(n))
    row = pot.parameter_stability(x, [0.1])[0]
    width = 4 / 1.96
    assert row.status == ""
    assert (row.c - row.c_high) * width <= row.c <= (row.c - row.c_low) * width
    assert row.c_high - row.c_low < 0.4
    assert any(flag in row.flags for flag in (Flag.LEVELS.value, Flag.BOUNDED.value))
    far = pot.tail_quantile(x, 1e-3, at=0.1)
    assert far.value == pytest.approx(-math.log(1e-3), rel=0.15)
    assert far.low < far.value < far.high
    # the same fit, however many elements are kept one by one
    if n == N:
        few = pot.parameter_stability(FORMATS[name](laplace())[:20_000], [0.1])[0]
        assert abs(few.c - row.c) < width * (few.c_high - few.c_low)


@pytest.mark.slow
def test_modified_scale_mean_excess_choice_and_mixture_take_levels():
    x = FORMATS["e4m3"](laplace())
    row = pot.parameter_stability(x, [0.1])[0]
    assert row.scale_low < 1 < row.scale_high
    assert row.p_exponential > 0.001
    for each in pot.mean_excess(x, [0.3, 0.1, 0.03]):
        assert each.mean == pytest.approx(1, abs=0.1)
    choice = pot.choose_threshold(x, ratios=[0.2, 0.1], size=300, replicates=40)
    assert choice.threshold is not None
    assert abs(choice.estimate.c) < 0.1
    parts = {"a": x, "b": 10 * FORMATS["e5m2"](laplace(seed=1))}
    mixed = pot.mixture(parts, at=0.05)
    assert abs(mixed.layers["a"].c) < 0.1
    assert abs(mixed.normalised.c) < 0.15


def test_one_magnitude_and_two_have_no_shape():
    for value in (0.003, 0.25):
        for n in (1000, 60_000):
            row = pot.parameter_stability(np.full(n, value, np.float32), [0.1])[0]
            assert math.isnan(row.c)
            assert row.status
    signs = np.random.default_rng(0).choice([-1.0, 1.0, 3.0], N).astype(np.float32)
    (row,) = pot.parameter_stability(signs, [0.5])
    assert math.isnan(row.c)
    three = np.random.default_rng(0).choice([1.0, 2.0, 3.0], N).astype(np.float32)
    (row,) = pot.parameter_stability(three, [0.7])
    assert "three different values" in row.status


def test_methods_without_intervals_refuse_coarse_levels_and_flag_fine_ones():
    coarse = FORMATS["e5m2"](laplace())
    (row,) = pot.parameter_stability(coarse, [0.1], method="pwm")
    assert "maximum likelihood" in row.status
    (row,) = pot.parameter_stability(FORMATS["int8"](laplace()), [0.1], method="pwm")
    assert Flag.LEVELS.value in row.flags
    assert abs(row.c) < 0.05
    with pytest.raises(FitError, match="maximum likelihood"):
        fit(levels_beyond(sketch(FORMATS["int4"](laplace())).magnitudes, N // 10), "laplace")


def test_a_bound_is_told_from_a_level():
    x = laplace()
    assert not levels_beyond(sketch(FORMATS["int8"](x)).magnitudes, N // 10).bounded
    clipped = sketch(np.clip(x, -4, 4)).magnitudes
    found = levels_beyond(clipped, N // 10)
    assert isinstance(found, Levels)
    assert found.bounded
    (row,) = pot.parameter_stability(np.clip(x, -4, 4), [0.1])
    assert Flag.BOUNDED.value in row.flags
    assert 2 * row.c_low - row.c < 0 < 2 * row.c_high - row.c


@pytest.mark.parametrize("bounded", [True, False])
def test_a_part_without_the_largest_level_has_no_bound(bounded):
    """Of magnitudes that were clipped at 4, those of 1 and 2 alone were not."""
    levels = np.array([1.0, 2.0, 4.0])
    m = Levels.of(levels, levels, np.array([50.0, 30.0, 20.0]), bounded)
    for weight, kept in (([5, 3, 2], levels), ([0, 0, 1], [4.0]), ([0, 3, 0], [2.0])):
        part = m.part(np.array(weight, float))
        assert part.left.tolist() == list(kept)
        assert part.bounded is (bounded and weight[-1] > 0)
    rounded = m.rounded(np.array([0.9, 2.2, 2.4]))  # nearer to 2 than to 4
    assert (rounded.left.tolist(), rounded.weight.tolist()) == ([1.0, 2.0], [1.0, 2.0])
    assert rounded.bounded is False
    assert m.rounded(np.array([1.0, 9.0])).bounded is bounded
    # a few that were drawn may lack the largest level, and then know nothing of it
    samples = [m.sample(3, np.random.default_rng(seed)) for seed in range(20)]
    assert len({4.0 in one.left for one in samples}) == 2
    assert all(one.bounded is (bounded and 4.0 in one.left) for one in samples)


def test_levels_of_a_billion_magnitudes_are_drawn_and_scaled():
    levels = np.array([1.0, 2.0, 3.0])
    m = Levels.of(levels, levels, np.array([6e8, 3e8, 1e8]), True)
    drawn = m.sample(10_000, np.random.default_rng(0))
    assert drawn.count == 10_000
    assert drawn.weight == pytest.approx([6000, 3000, 1000], rel=0.1)
    twice = m.scaled(2.0)
    assert (type(twice), twice.bounded) == (Levels, True)
    assert twice.left.tolist() == [2, 4, 6]
    assert twice.mean == 2 * m.mean


@pytest.mark.parametrize("n", [20_000, N])
def test_continuous_magnitudes_are_no_levels(n):
    rng = np.random.default_rng(0)
    samples = {
        "laplace": rng.laplace(size=n),
        "student": rng.standard_t(3, n),
        "uniform": rng.uniform(-1, 1, n),
        "all but equal": 1 + 1e-2 * rng.standard_normal(n),
        "lognormal": np.exp(3 * rng.standard_normal(n)),
    }
    for name, x in samples.items():
        m = sketch(x.astype(np.float32)).magnitudes
        coarse = sketch(x.astype(np.float32)).coarsen(7).magnitudes
        for k in (100, n // 100, n // 10, n // 2):
            assert levels_beyond(m, k) is None, (name, k)
            assert levels_beyond(coarse, k) is None, (name, k)


@pytest.mark.parametrize(("n", "k"), [(4000, 40), (700, 10), (1000, 10)])
def test_the_quantile_that_is_counted_is_that_of_one_in_a_hundred(n, k):
    """Or of ten: it flags no fit by what fewer reach, and does by as many."""
    excesses = -np.log1p(-(np.arange(n) + 0.5) / n)
    law = fit(excesses, "laplace")
    for large, flags in ((k - 1, ()), (k, (Flag.COUNTED,))):
        values = excesses.copy()
        values[n - large :] *= 100
        assert disagreement(as_magnitudes(values), law, 1.0) == flags


def test_counted_and_modelled_quantiles_that_disagree_are_flagged():
    rng = np.random.default_rng(0)
    spiked = np.where(rng.random(N) < 0.003, 50.0, rng.laplace(size=N))
    spiked *= rng.uniform(0.99, 1, N)
    (row,) = pot.parameter_stability(spiked, [0.1])
    assert Flag.COUNTED.value in row.flags
    assert Flag.COUNTED.value not in pot.parameter_stability(laplace(), [0.1])[0].flags
    assert Flag.COUNTED.value in pot.tail_quantile(spiked, 2e-3, at=0.1).flags


def test_wasserstein_is_finite_however_far_the_largest_lies():
    from gradstats.statistics.goodness import goodness

    g = laplace()
    distances = []
    for largest in (690, 700, 720, 745, 760):
        u = g.copy()
        u[0] = largest
        distances.append(goodness(fit(u, "laplace"), u).wasserstein)
    assert np.isfinite(distances).all()
    assert np.all(np.diff(distances) > 0)
    at = np.append(0.0, np.geomspace(1e-6, 1e4, 400_001))
    middle, x = (at[1:] + at[:-1]) / 2, np.sort(np.abs(u).astype(float))
    above = 1 - np.searchsorted(x, middle) / N
    expected = np.abs(above - fit(u, "laplace").magnitude.sf(middle)) @ np.diff(at) / x.mean()
    assert distances[-1] == pytest.approx(expected, rel=2e-3)


def test_float64_below_the_range_of_float32_is_refused():
    from gradstats.errors import InputError

    x = np.random.default_rng(0).laplace(size=N)
    for factor in (1e-40, 1e-42, 1e-60):
        with pytest.raises(InputError, match="rescale"):
            pot.parameter_stability(x * factor, [0.1])
    assert abs(pot.parameter_stability(x * 1e-34, [0.1])[0].c) < 0.05
