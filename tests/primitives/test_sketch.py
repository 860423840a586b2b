from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.every import every

from gradstats.errors import InputError
from gradstats.primitives import histogram, kth_largest, moments
from gradstats.primitives.sketch import BITS, EXACT, Magnitudes, merge, sketch


def gradient(n, seed=0, zeros=0.1):
    rng = np.random.default_rng(seed)
    x = (rng.standard_t(3, n) * np.exp(rng.standard_normal(n))).astype(np.float32)
    x[rng.random(n) < zeros] = 0
    return x


@every("n", [0, 1, 100, EXACT, 200_000])
def test_is_the_sums_and_the_histogram(xp, n):
    x = gradient(n)
    s = sketch(xp(x))
    expected = histogram(x, BITS)
    assert np.array_equal(s.histogram.counts, expected.counts)
    assert (s.histogram.zeros, s.histogram.nonfinite) == (expected.zeros, expected.nonfinite)
    assert s.moments == moments(x)
    assert s.magnitudes.count == np.count_nonzero(x)
    assert (s.values is not None) == (np.count_nonzero(x) <= EXACT)


@every("cut", [0, 1, 9000, 60_000, 199_999])
@every("n", [20_000, 200_000])
def test_parts_add_up(n, cut):
    x = gradient(n)
    whole, both = sketch(x), sketch(x[: min(cut, n)]) + sketch(x[min(cut, n) :])
    assert np.array_equal(both.bins, whole.bins)
    assert np.array_equal(both.counts, whole.counts)
    assert both.moments.sum_abs == pytest.approx(whole.moments.sum_abs, rel=1e-12)
    assert both.moments.sum_log == pytest.approx(whole.moments.sum_log, rel=1e-12)
    assert both.moments.max == whole.moments.max
    if whole.values is None:
        assert both.values is None
    else:
        assert np.array_equal(both.values, whole.values)


def test_many_parts_and_other_bits():
    x = gradient(100_000)
    pieces = [sketch(p) for p in np.array_split(x, 37)]
    assert np.array_equal(merge(pieces).counts, sketch(x).counts)
    coarse = sketch(x).coarsen(7)
    assert np.array_equal(coarse.counts, sketch(x, 7).counts)
    assert coarse.moments == sketch(x, 7).moments
    with pytest.raises(InputError, match="coarsen"):
        coarse + sketch(x)
    with pytest.raises(InputError, match="7 bits"):
        coarse.coarsen(10)


@pytest.mark.parametrize(("bits", "width"), [(7, 2**-7), (10, 2**-10)])
@pytest.mark.parametrize("n", [1000, 300_000])
def test_quantiles_and_exceedances(n, bits, width):
    x = gradient(n)
    m = sketch(x, bits).magnitudes
    for k in (1, 2, 17, n // 100, n // 3):
        exact = kth_largest(x, k)
        assert m.upper_quantile(k) == pytest.approx(exact, rel=width)
        at_edge = m.exceedances(exact)
        assert at_edge == pytest.approx(
            np.count_nonzero(np.abs(x) >= exact), rel=width * 5, abs=1.5
        )
    assert m.upper_quantile(n + 1) == 0.0
    assert m.exceedances(math.inf) == 0
    assert m.exceedances(0.0) == m.count


def test_largest_and_excesses_and_scaling():
    x = gradient(200_000)
    m = sketch(x).magnitudes
    ordered = np.sort(np.abs(x))[::-1][:5000]
    assert np.allclose(m.largest(5000), ordered, rtol=2**-10)
    assert m.largest(10**9).size == m.count
    u = float(ordered[4000])
    over = m.excesses(u)
    true = np.abs(x[np.abs(x) > u]).astype(float) - u
    assert over.count == pytest.approx(true.size, abs=2)
    assert over.mean == pytest.approx(true.mean(), rel=1e-3)
    assert over.mean_square == pytest.approx((true**2).mean(), rel=1e-3)
    assert m.scaled(3.0).upper_quantile(100) == pytest.approx(3 * m.upper_quantile(100))
    assert m.scaled(3.0).mean_log == pytest.approx(m.mean_log + math.log(3))
    three = m.scaled(3.0)
    assert three.mean_square == pytest.approx(9 * m.mean_square)
    assert (three.mean, three.max) == pytest.approx((3 * m.mean, 3 * m.max))
    assert three.zero_fraction == m.zero_fraction
    assert m.excesses(1e30).count == 0


def test_a_sample_is_like_the_whole():
    from scipy.stats import ks_2samp

    m = sketch(gradient(300_000, zeros=0)).magnitudes
    drawn = m.sample(3000, np.random.default_rng(0))
    assert drawn.count == 3000
    assert ks_2samp(drawn.middle, np.abs(gradient(300_000, zeros=0))).pvalue > 0.01
    again = m.sample(3000, np.random.default_rng(0))
    assert np.array_equal(drawn.middle, again.middle)
    assert m.sample(10**7, np.random.default_rng(0)) is m


def test_not_finite_denormal_and_double():
    x = np.array([1e-45, -1e-40, np.nan, np.inf, 2.0, 0.0], np.float32)
    s = sketch(x)
    assert (s.numel, s.moments.zeros, s.moments.nonfinite, s.magnitudes.count) == (6, 1, 2, 3)
    assert s.magnitudes.max == 2
    double = sketch(np.array([1e-300, 1e300, 0.0]))
    assert double.magnitudes.count == 2
    assert double.magnitudes.upper_quantile(1) == 1e300


def test_float64_outside_float32s_range_is_counted_or_refused():
    """Above 32,768 elements tiny ones vanished from the bins, and huge ones counted as infinite."""
    x = np.random.default_rng(0).laplace(size=40_000)
    tiny = x.copy()
    tiny[:5000] *= 1e-60
    s = sketch(tiny)
    assert s.magnitudes.count == s.moments.count == s.counts.sum() == 40_000
    assert s.magnitudes.upper_quantile(35_001) < 1e-30 < s.magnitudes.upper_quantile(34_990)
    huge = x.copy()
    huge[0] = 1e39
    with pytest.raises(InputError, match="rescale"):
        sketch(huge)
    small = sketch(huge[:20_000])
    assert small.magnitudes.max == 1e39
    merged = merge([small, sketch(huge[20_000:])])
    with pytest.raises(InputError, match="rescale"):
        _ = merged.magnitudes
    below = [sketch(half) for half in np.split(x * 1e-50, 2)]
    for wide in (lambda: below[0] + below[1], lambda: below[0].coarsen(7)):
        with pytest.raises(InputError, match="rescale"):
            wide()
    assert merge([*below, sketch(x), sketch(x)]).counts.sum() == 120_000  # most are within it
    # float32's own have bins
    single = [sketch(half) for half in np.split((x * 1e-40).astype(np.float32), 2)]
    assert merge(single).counts.sum() == np.count_nonzero((x * 1e-40).astype(np.float32))


def test_the_median_of_an_even_number_is_between_the_two_in_the_middle():
    for values, median in (([1, 3], 2), ([1, 3, 7], 3), ([2], 2), ([1.7e308] * 2, 1.7e308)):
        assert sketch(np.array(values, float)).summary()["median"].item() == median
    assert math.isnan(sketch(np.zeros(2)).summary()["median"].item())


@pytest.mark.parametrize("bits", [3, 7, 10])
def test_the_largest_magnitude_is_known(bits):
    x = gradient(200_000)
    m = sketch(x, bits).magnitudes
    largest = float(np.abs(x).max())
    assert m.middle[-1] == m.right[-1] == m.max == largest
    assert m.weight[-1] == 1
    assert m.count == np.count_nonzero(x)
    assert m.upper_quantile(1) == m.largest(1)[0] == largest
    assert (np.diff(m.left) >= 0).all()
    assert (m.right >= m.left).all()
    assert m.exceedances(largest) == 1
    # where others lie in its cell
    y = np.r_[np.ones(39_997), 2.0, 2.0002, 2.0005]
    m = sketch(y, bits).magnitudes
    assert (m.left[-2], m.right[-2], m.left[-1]) == (2.0, 2.0005, 2.0005)
    assert m.weight.tolist() == [39_997, 2, 1]
    # where all of the last cell are at its lower end
    y = np.where(np.arange(40_000) % 2, 2.0, 1.0)
    m = sketch(y, bits).magnitudes
    assert (m.left[-1], m.right[-1], m.weight[-1]) == (2.0, 2.0, 20_000)


def test_magnitudes_lie_evenly_inside_their_cells():
    """The j-th of w at (j − ½)/w of the cell's width."""
    m = Magnitudes.from_cells(np.array([0.5, 1]), np.array([1.0, 2]), np.array([2.0, 4]))
    places = [1.875, 1.625, 1.375, 1.125, 0.875, 0.625]
    assert m.largest(6).tolist() == places
    assert m.largest(3).tolist() == places[:3]
    assert [m.upper_quantile(k) for k in range(1, 8)] == [*places, 0]
    assert m.middle.tolist() == [0.75, 1.5]
    assert [m.exceedances(e) for e in (0, 0.75, 1, 1.25, 2.5)] == [6, 5, 4, 3, 0]
    over = m.excesses(1.25)
    assert (over.left.tolist(), over.right.tolist(), over.weight.tolist()) == ([0], [0.75], [3])


def test_a_sample_fills_its_cells():
    m = Magnitudes.from_cells(np.array([1.0, 3]), np.array([2.0, 3]), np.array([9000.0, 1000]))
    drawn = m.sample(2000, np.random.default_rng(0)).middle
    inside = drawn[drawn < 3]
    assert inside.size == pytest.approx(1800, abs=4 * math.sqrt(180))
    assert np.quantile(inside, [0.25, 0.5, 0.75]) == pytest.approx([1.25, 1.5, 1.75], abs=0.05)


@settings(max_examples=50)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_single_magnitudes_lose_nothing(values, seed):
    x = np.array(values) * np.random.default_rng(seed).choice([-1, 1], len(values))
    m = sketch(x).magnitudes
    ordered = np.sort(np.abs(x))[::-1]
    assert [m.upper_quantile(k) for k in range(1, x.size + 1)] == ordered.tolist()
    assert np.array_equal(m.largest(x.size), ordered)
    assert m.mean == pytest.approx(ordered.mean())
    assert Magnitudes.from_values(ordered).mean_square == pytest.approx((ordered**2).mean())


def test_four_times_ten_million_zeros_are_counted():
    """More than 2²⁴ per thread: torch.histc loses count there."""
    s = sketch(np.zeros(40_000_000, np.float32))
    assert s.moments.zeros == 40_000_000
    assert s.magnitudes.count == 0
