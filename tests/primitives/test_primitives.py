from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import ARRAYS, FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.every import every

from gradstats.errors import InputError
from gradstats.primitives import (
    Moments,
    exceedances,
    get_num_threads,
    histogram,
    kth_largest,
    moments,
    select,
    set_num_threads,
    top_candidates,
)
from gradstats.primitives.arrays import CHUNK, _runs, even_chunks, flat_chunks
from gradstats.primitives.histogram import Histogram, bin_edges
from gradstats.primitives.loops.counts import descend
from gradstats.primitives.moments import rounded_sums
from gradstats.primitives.ratio import RATIOS, check_seed

SUMS = ("sum_abs", "sum_squares", "sum_log")


def naive_moments(x, above=0.0):
    a = np.abs(np.asarray(x, np.float64).ravel())
    a = a[np.isfinite(a) & (a > 0) & (a >= above)]
    return {
        "count": a.size,
        "sum_abs": a.sum(),
        "sum_squares": (a * a).sum(),
        "sum_log": np.log(a).sum(),
        "max": a.max(initial=0.0),
    }


@every("above", [0.0, 1e-3])
@every("xp", ARRAYS.values(), ARRAYS)
@every("family", FAMILIES.values(), FAMILIES)
def test_moments_equal_a_naive_float64_sum(family, xp, above):
    m = moments(xp(family), above=above)
    for name, value in naive_moments(family, above).items():
        assert getattr(m, name) == pytest.approx(value, rel=1e-12), name
    assert m.numel == family.size
    assert m.zeros == np.count_nonzero(family == 0)


@every("above", [0.0, 1e-3])
@every("xp", ARRAYS.values(), ARRAYS)
@every("family", FAMILIES.values(), FAMILIES)
def test_exceedances_are_the_same_sums(family, xp, above):
    a, b = exceedances(xp(family), above), moments(xp(family), above=above)
    assert a.count == b.count
    assert a.sum_abs == pytest.approx(b.sum_abs, rel=1e-12)
    assert a.sum_squares == pytest.approx(b.sum_squares, rel=1e-12)
    hostile = np.r_[family[:3000], np.float32([np.inf, -np.inf, np.nan])]
    assert exceedances(xp(hostile), 1e-3).count == moments(xp(hostile), above=1e-3).count
    assert np.isfinite(exceedances(xp(hostile), 1e-3).sum_abs)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_an_element_at_the_threshold_is_above_it(xp, dtype):
    x = xp(np.array([3, -2, 2, 1, 0, np.nan, 1.5], dtype))
    for m in (moments(x, above=2.0), exceedances(x, 2.0)):
        assert (m.count, m.sum_abs, m.sum_squares, m.above) == (3, 7.0, 17.0, 2.0)
    assert moments(x, above=2.0).max == 3


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads):
    x = np.random.default_rng(1).standard_t(3, 3_000_000).astype(np.float32)
    x[::1000] = 0
    reference = (
        moments(x),
        exceedances(x, 1.0),
        histogram(x, 10),
        select(x, 3.0),
        kth_largest(x, 3000),
    )
    set_num_threads(threads)
    try:
        assert get_num_threads() == threads
        assert moments(x) == reference[0]
        assert repr(exceedances(x, 1.0)) == repr(reference[1])
        assert np.array_equal(histogram(x, 10).counts, reference[2].counts)
        again = select(x, 3.0)
        assert np.array_equal(again.indices, reference[3].indices)
        assert np.array_equal(again.values, reference[3].values)
        assert kth_largest(x, 3000) == reference[4]
    finally:
        set_num_threads(None)
    with pytest.raises(InputError):
        set_num_threads(0)


def test_threads_that_ask_for_different_numbers_of_threads_get_the_serial_sums():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n << 19, np.float32) for n in (2, 3)]  # for two and three threads
    set_num_threads(1)
    expected = [moments(x) for x in arrays]
    set_num_threads(3)
    try:
        with ThreadPoolExecutor(2) as users:
            work = [users.submit(lambda x=x: [moments(x) for _ in range(100)]) for x in arrays]
            for sums, found in zip(expected, work, strict=True):
                assert found.result() == [sums] * 100
    finally:
        set_num_threads(None)


def test_histograms_of_other_widths():
    x = np.random.default_rng(1).standard_t(3, 100_000).astype(np.float32)
    fine, coarse = histogram(x, 10), histogram(x)
    assert np.array_equal(fine.coarsen(7).counts, coarse.counts)
    with pytest.raises(InputError, match="do not add"):
        _ = fine + coarse
    for bad in (lambda: histogram(x, 13), lambda: coarse.coarsen(9)):
        with pytest.raises(InputError):
            bad()


def test_a_sampled_bracket_that_misses_costs_a_pass_not_the_answer():
    """Everything large hides between the sampled positions, or only there."""
    x = np.random.default_rng(0).random(1_000_000).astype(np.float32)
    stride = x.size // (1 << 16)
    for place in (np.s_[::stride], np.s_[1::stride]):
        y = x.copy()
        y[place] += 10
        for k in (100, 10_000, 80_000):
            assert kth_largest(y, k) == np.sort(y)[-k]


@every("dtype", [np.float32, np.float64, np.float16])
@every("border", [500, 2000, 4000, 10_000])
@every("xp", ARRAYS.values(), ARRAYS)
def test_ties_that_fill_k_exactly(xp, dtype, border):
    """Ranks at and beside the border of a run of equal magnitudes; of float32 in one block, and sampled."""
    x = np.repeat([3.0, -2.0, 1.0, -0.5], np.diff([0, 500, 2000, 4000, 10_000])).astype(dtype)
    x = np.random.default_rng(border).permutation(x)
    ordered = np.sort(np.abs(x))[::-1]
    for k in (border - 1, border, border + 1):
        expected = float(ordered[k - 1]) if k <= x.size else 0.0
        eta, kept = top_candidates(xp(x), k)
        assert eta == expected
        places = np.flatnonzero(np.abs(x) >= max(expected, 1e-9))
        assert np.asarray(kept.indices).tolist() == places.tolist()
        assert np.asarray(kept.values).tolist() == x[places].tolist()


def test_untrimmed_candidates_have_all_that_reach_the_guess(family):
    exact = kth_largest(family, 500)
    eta, kept = top_candidates(family, 500, 0.9 * exact, trim=False)
    assert eta == exact
    expected = select(family, 0.9 * exact)
    assert len(expected) > 500
    assert np.array_equal(kept.indices, expected.indices)
    assert np.array_equal(top_candidates(family, 500)[1].indices, select(family, exact).indices)


def test_moments_count_what_they_leave_out(xp):
    x = np.array([0, -0.0, np.nan, np.inf, -np.inf, 2, -1], np.float32)
    m = moments(xp(x))
    assert (m.numel, m.count, m.zeros, m.nonfinite) == (7, 2, 2, 3)
    assert (m.sum_abs, m.sum_squares, m.max) == (3.0, 5.0, 2.0)
    assert m.zero_fraction == 0.5
    assert (m.mean, m.variance) == (1.5, 0.25)
    assert m.mean_log == pytest.approx(np.log(2) / 2)
    both = m + moments(xp(np.array([-4, 0], np.float32)))
    assert (both.numel, both.count, both.zeros, both.nonfinite, both.max) == (9, 3, 3, 3, 4.0)
    assert (both.sum_abs, both.sum_squares, both.sum_log) == (7.0, 21.0, pytest.approx(np.log(8)))
    with pytest.raises(InputError, match="do not add"):
        _ = m + moments(xp(x), above=1.0)
    unknown = exceedances(xp(x), 0.0)
    for each in (unknown, unknown + unknown, unknown + m, m + unknown):
        assert (each.zeros, each.nonfinite) == (-1, -1)
        assert np.isnan([each.zero_fraction, each.max, each.sum_log]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_widened_not_rounded(dtype):
    x = torch.from_numpy(FAMILIES["laplace"]).to(dtype)
    wide = x.double().numpy()
    assert moments(x).sum_abs == pytest.approx(np.abs(wide).sum(), rel=1e-12)
    eta = kth_largest(x, 100)
    assert eta == np.sort(np.abs(wide))[-100]
    selected = select(x, eta)
    assert selected.values.dtype == dtype
    assert np.array_equal(selected.indices.numpy(), np.flatnonzero(np.abs(wide) >= eta))


def test_strided_and_multidimensional_inputs_are_read_in_index_order():
    x = np.random.default_rng(0).standard_normal((700, 600)).astype(np.float32)
    for view, flat in ((x.T, x.T.copy()), (x[::2, ::3], x[::2, ::3].copy())):
        for given_, expected in ((view, flat), (torch.from_numpy(x).T, x.T.copy())):
            a, b = select(given_, 2.0), select(expected.ravel(), 2.0)
            assert np.array_equal(np.asarray(a.indices), b.indices)
            assert np.array_equal(np.asarray(a.values), b.values)
            assert moments(given_).sum_abs == pytest.approx(moments(expected).sum_abs, rel=1e-12)


@pytest.mark.parametrize("shape", [(700, 600), (2, 300_001), (300_001, 2), (5, 50, 40, 60), (7,)])
def test_a_strided_tensor_is_copied_in_parts(shape):
    """One whose elements torch reads: in other types NumPy does."""
    whole = torch.randn(*shape[::-1], generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = whole.permute(*range(len(shape))[::-1])[..., ::2]
    runs = list(_runs(turned, CHUNK))
    memory = turned.untyped_storage()
    assert all(
        part.nbytes() <= 2 * CHUNK or part.data_ptr() == memory.data_ptr()
        for part in (run.untyped_storage() for run in runs)
    )
    assert torch.equal(torch.cat(runs), turned.reshape(-1))
    for chunks in (flat_chunks, even_chunks):
        found = [(offset, chunk.copy()) for offset, chunk in chunks(turned)]
        assert np.array_equal(
            np.concatenate([c for _, c in found]), turned.reshape(-1).float().numpy()
        )
        assert [o for o, _ in found] == np.cumsum([0, *(c.size for _, c in found[:-1])]).tolist()
    assert {chunk.size for _, chunk in found[:-1]} <= {CHUNK}


def test_numpy_and_torch_give_the_same_bits(family):
    assert moments(family) == moments(torch.from_numpy(family))
    assert np.array_equal(histogram(family).counts, histogram(torch.from_numpy(family)).counts)


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_chunk_borders(size):
    x = np.arange(1, size + 1, dtype=np.float32)
    assert moments(x).sum_abs == size * (size + 1) / 2
    selection = select(x, size - 2)
    assert selection.indices.tolist() == [size - 3, size - 2, size - 1]


@every("xp", ARRAYS.values(), ARRAYS)
@every("family", FAMILIES.values(), FAMILIES)
def test_select_equals_a_mask(family, xp):
    eta = float(np.quantile(np.abs(family), 0.99))
    expected = np.flatnonzero(np.abs(family) >= np.float32(eta))
    got = select(xp(family), np.float32(eta).item())
    assert np.array_equal(np.asarray(got.indices), expected)
    assert np.array_equal(np.asarray(got.values), family[expected])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zeros_and_nan_are_never_selected_but_infinity_is(xp, dtype):
    x = xp(np.array([0, -0.0, np.nan, np.inf, 1e-45, -2], np.float32).astype(dtype))
    assert np.asarray(select(x, 0.0).indices).tolist() == [3, 4, 5]
    assert np.asarray(select(x, 1.0).indices).tolist() == [3, 5]
    assert np.asarray(select(x, 2.0).indices).tolist() == [3, 5]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_selected_values_keep_numpys_dtype(dtype, threshold):
    x = np.random.default_rng(3).laplace(size=3000).astype(dtype)
    kept = select(x, threshold)
    assert kept.values.dtype == dtype
    assert np.array_equal(kept.indices, np.flatnonzero((np.abs(x) >= threshold) & (x != 0)))
    assert np.array_equal(kept.values, x[kept.indices])
    assert top_candidates(x, 10)[1].values.dtype == dtype


@pytest.mark.parametrize("share", [0.001, 0.01, 0.02, 0.05, 0.2, 0.9])
def test_select_finds_few_and_many_infinities_and_equals(share):
    """Magnitudes at the threshold and infinite ones, at every place of the groups that are tested together."""
    rng = np.random.default_rng(round(1000 * share))
    x = rng.random(128 * 50 + 77).astype(np.float32)
    x[rng.random(x.size) < share] = np.inf
    x[rng.random(x.size) < share] = -2
    x[rng.random(x.size) < share] = np.nan
    expected = np.flatnonzero(np.abs(x) >= 2)
    kept = select(x, 2.0)
    assert np.array_equal(kept.indices, expected)
    assert np.array_equal(kept.values, x[expected])


def test_kth_largest_states_its_edges():
    x = np.array([3, np.nan, -5, np.inf, 1], np.float32)
    assert kth_largest(x, 1) == 5
    assert kth_largest(x, 3) == 1
    assert kth_largest(x, 4) == 0
    with pytest.raises(InputError, match="at least 1"):
        kth_largest(x, 0)


def test_histogram_counts_every_element(family):
    h = histogram(family)
    assert h.numel == family.size
    assert h.zeros == np.count_nonzero(family == 0)
    edges = bin_edges()
    expected, _ = np.histogram(np.abs(family[family != 0]).astype(np.float64), edges)
    assert np.array_equal(h.counts, expected)


def test_histograms_add(family):
    a, b = histogram(family[:1000]), histogram(family[1000:])
    both = histogram(family)
    assert np.array_equal((a + b).counts, both.counts)
    assert (a + b).zeros == both.zeros
    # arrays have no one truth value
    assert a != b
    assert select(family, 0.0) != select(family, 0.0)


@every("ratio", RATIOS)
@every("family", FAMILIES.values(), FAMILIES)
def test_histogram_quantiles_are_within_a_bin(family, ratio):
    k = round(ratio * family.size)
    exact = kth_largest(family, k)
    assert histogram(family).upper_quantile(k) == pytest.approx(exact, rel=1 / 128)


@pytest.mark.parametrize(
    ("below", "inside", "above"),
    [(30, 100, 10), (10, 100, 30), (50, 50, 50), (0, 100, 1000), (1000, 100, 0), (0, 7, 0)],
)
def test_quantiles_lie_where_a_linear_density_has_them(below, inside, above):
    """The line through the neighbouring bins' densities at their middles, never negative inside the bin."""
    counts, i = np.zeros(bin_edges(3).size - 1, np.int64), 127 * 8 + 3
    counts[i - 1 : i + 2] = below, inside, above
    left, right = bin_edges(3)[i : i + 2]
    slope = min(max((above - below) / 4 / inside, -1), 1)  # half the change from end to end
    for k in above + inside * np.array([0.01, 0.1, 0.5, 0.9, 0.99]):
        t = (Histogram(counts, 0, 0, 3).upper_quantile(k) - left) / (right - left)
        beyond = (1 - t) * (1 + slope * t)  # the density 1 − slope + 2 slope t, from t to 1
        assert above + inside * beyond == pytest.approx(k, rel=1e-9)


def test_quantiles_of_the_first_and_the_last_bin_are_even():
    counts = np.zeros(bin_edges(0).size - 1, np.int64)
    counts[[0, 1, -2, -1]] = 10, 4, 3, 7
    edges = bin_edges(0)
    h = Histogram(counts, 0, 0, 0)
    assert h.upper_quantile(3.5) == pytest.approx((edges[-2] + edges[-1]) / 2)
    assert h.upper_quantile(19) == pytest.approx(edges[1] / 2, rel=1e-9, abs=0)


def test_a_count_that_a_bin_fills_goes_on_to_the_next():
    counts = np.array([0, 5, 0, 3, 0], np.int64)
    assert descend(counts, 2.9) == (3, 3)
    assert descend(counts, 3) == (1, 8)
    assert descend(counts, 8) == (-1, 8)
    x = np.repeat([4.0, 1.0], [3, 5]).astype(np.float32)
    assert histogram(x).upper_quantile(3) == pytest.approx(1, rel=1 / 128)
    assert histogram(x).upper_quantile(8) == 0  # no more than 8 are there


def test_histogram_of_float64_beyond_float32_is_silent():
    h = histogram(np.array([1e300, 1e-300, 1.0]))
    assert (h.nonfinite, h.zeros, h.counts.sum()) == (1, 1, 1)
    assert histogram(np.zeros(5, np.float32)).upper_quantile(1) == 0.0


def test_empty_arrays(xp):
    x = xp(np.empty(0, np.float32))
    assert moments(x).count == 0
    assert np.isnan(moments(x).mean)
    assert len(select(x, 0.0)) == 0
    assert histogram(x).numel == 0


@pytest.mark.parametrize(
    "bad", [np.arange(3), np.array(["a"]), torch.arange(3), torch.eye(2).to_sparse()]
)
def test_what_is_no_gradient_is_refused_in_one_line(bad):
    with pytest.raises(InputError) as caught:
        moments(bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("threshold", [-1.0, float("nan")])
def test_thresholds_must_be_magnitudes(threshold):
    with pytest.raises(InputError, match="non-negative"):
        select(np.ones(3), threshold)
    with pytest.raises(InputError, match="non-negative"):
        moments(np.ones(3), above=threshold)


finite = st.floats(-1e6, 1e6, width=32, allow_subnormal=True)


@settings(max_examples=60)
@given(arrays(np.float32, st.integers(0, 300), elements=finite), st.integers(1, 40))
def test_merging_halves_gives_the_whole(x, cut):
    whole, a, b = moments(x), moments(x[:cut]), moments(x[cut:])
    assert whole.count == a.count + b.count
    assert whole.sum_abs == pytest.approx(a.sum_abs + b.sum_abs, rel=1e-12)
    assert whole.max == max(a.max, b.max)


@settings(max_examples=60)
@given(arrays(np.float32, st.integers(1, 300), elements=finite), st.integers(1, 300))
def test_the_kth_largest_selects_k(x, k):
    k = min(k, x.size)
    eta = kth_largest(x, k)
    kept = len(select(x, eta))
    if eta > 0:
        assert kept >= k
        assert np.count_nonzero(np.abs(x) > eta) < k
    else:
        assert kept == np.count_nonzero(x)


def test_seeds_are_64_bits_wide():
    assert check_seed(2**64 - 1) == 2**64 - 1
    for wrong in (2**64, 2**64 + 1, -1):
        with pytest.raises(InputError, match="seed must be from 0 to"):
            check_seed(wrong)


def test_a_histogram_counts_what_reaches_each_bin():
    x = np.random.default_rng(0).standard_t(3, 5000).astype(np.float32)
    h = histogram(x, 3)
    at = np.flatnonzero(h.counts)
    expected = [np.count_nonzero(np.abs(x) >= edge) for edge in bin_edges(3)[at]]
    assert h.exceedances()[at].tolist() == expected


def test_moments_are_of_all_magnitudes_if_no_threshold_is_named():
    assert Moments(3, 3, 0, 0, 6.0, 14.0, math.log(6), 3.0).above == 0


@every("log", [False, True])
@every("xp", ARRAYS.values(), ARRAYS)
@every("family", FAMILIES.values(), FAMILIES)
def test_rounded_sums_are_those_of_moments(family, xp, log):
    """Within what rounding in float32 leaves at random, far below what it could."""
    x = xp(family)
    found, expected = rounded_sums(x, log=log), moments(x)
    assert (found.numel, found.count) == (expected.numel, expected.count)
    assert found.sum_abs == pytest.approx(expected.sum_abs, rel=1e-7)
    if log:
        assert found.mean_log == pytest.approx(expected.mean_log, abs=1e-8)
    else:
        eta = float(np.quantile(np.abs(family), 0.9))
        found, expected = rounded_sums(x, eta), exceedances(x, eta)
        assert (found.count, found.above) == (expected.count, eta)
        assert found.sum_abs == pytest.approx(expected.sum_abs, rel=1e-7)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "odd",
    [
        np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0]),  # sums leave float32's range
        np.array([1e-45, -1e-40, 0.0]),  # denormal: their exponents are not in their bits
        np.zeros(1),
    ],
)
def test_rounded_sums_of_odd_numbers_are_exact(log, odd):
    x = np.full(40_000, 1e-3 if odd.size > 1 else 0.0, np.float32)
    x[: 1000 * odd.size] = np.tile(odd, 1000)
    found, expected = rounded_sums(x, log=log), moments(x)
    assert found.count == expected.count
    assert found.sum_abs == pytest.approx(expected.sum_abs, rel=1e-6)
    if log:
        assert found.sum_log == pytest.approx(expected.sum_log, rel=1e-6, abs=1e-9)
