"""Sums over tails from one histogram: against the sums of the data, on every device's code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import FAMILIES
from support.every import every

from gradstats.primitives import backend, moments
from gradstats.primitives.loops import counts as loops
from gradstats.primitives.tails import Tails, tails


@pytest.mark.parametrize("n", [1, 3, 500])
def test_known_magnitudes_are_added_up_exactly(n):
    values = np.round(np.random.default_rng(n).exponential(size=n), 2) + 0.01  # with ties
    ordered = np.sort(values)
    cells = Tails.of_cells(ordered, ordered, np.ones(n))
    for threshold in (0.0, *np.unique(values)[::7], 0.123456, values.max() + 1):
        found, kept = cells.tail(float(threshold)), values[values >= threshold]
        assert found[0] == kept.size
        assert found[1:] == pytest.approx((kept.sum(), np.square(kept).sum()), abs=1e-9)


def test_of_a_cell_that_is_cut_the_upper_part_counts():
    cells = Tails.of_cells(np.array([0.5, 1]), np.array([1.0, 2]), np.array([2.0, 4]))
    count, total, squares = cells.tail(
        1.5
    )  # two in 1.5 to 2; those cut off lie at 1.25, on average
    assert (count, total) == (2, 3.5)
    assert squares == pytest.approx(4 * 1.5**2 - 2 * 1.25**2)
    assert cells.sum_log() == pytest.approx(2 * math.log(0.75) + 4 * math.log(1.5))


def test_sums_are_those_of_the_data(family):
    cells = tails(family)
    for q in (0.0, 0.5, 0.99):
        eta = float(np.quantile(np.abs(family), q)) if q else 0.0
        m = moments(family, above=eta)
        expected = m.count, m.sum_abs, m.sum_squares
        assert cells.tail(eta) == pytest.approx(expected, rel=2e-3)
    # inside a cell a magnitude is 2e-4 from the middle (its root mean square), at random
    count, _, _ = cells.tail(0.0)
    error = abs(cells.sum_log() / count - moments(family).mean_log)
    assert error < 1e-7 + 4 * 2e-4 / np.sqrt(count)


@every("dtype", [torch.float16, torch.bfloat16])
@every("family", FAMILIES.values(), FAMILIES)
def test_numbers_of_half_precision_are_added_up_exactly(dtype, family):
    x = torch.from_numpy(family).to(dtype)
    magnitudes = x.double().abs().numpy()
    cells = tails(x)
    for eta in np.quantile(magnitudes, (0.0, 0.5, 0.99)):
        kept = magnitudes[(magnitudes >= eta) & (magnitudes > 0)]
        found = cells.tail(float(eta))
        assert found[0] == kept.size
        assert found[1:] == pytest.approx((kept.sum(), (kept**2).sum()), rel=1e-12)


def test_zeros_and_what_is_not_finite_are_left_out():
    x = np.array([0.0, -1.0, np.nan, 3.0, np.inf, 1e-45, -0.0], np.float32)
    assert tails(x).tail(0.0)[0] == 3
    count, total, _ = tails(x).tail(0.5)
    assert count == 2
    assert total == pytest.approx(4.0, rel=2.0**-10)  # half a cell
    for nothing in (np.zeros(3, np.float32), np.empty(0, np.float32)):
        for least in (0.0, 1.0):
            assert tails(nothing, least).tail(least)[0] == 0


@pytest.mark.slow
@every("code", ["compiled", "torch", "triton"])
@every("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every("family", FAMILIES.values(), FAMILIES)
def test_cells_below_the_least_threshold_are_left_out(code, dtype, family):
    # Triton's interpreter takes seconds for more
    x = torch.from_numpy(family[: 4000 if code == "triton" else 20_000]).to(dtype)
    ordered = x.double().abs().sort().values
    for least in (
        0.0,
        float(ordered[3 * x.numel() // 4]),
        float(ordered[-1]),
        2 * float(ordered[-1]),
        1e39,
    ):
        with backend(code):
            cells, all_cells = tails(x, least), tails(x)
        assert cells.left.size <= all_cells.left.size
        for threshold in (least, 1.01 * least):
            found, expected = cells.tail(threshold), all_cells.tail(threshold)
            assert found[0] == expected[0]
            assert found[1] == pytest.approx(expected[1], rel=1e-12)


@every("code", ["torch", "triton"])
@every("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every("family", FAMILIES.values(), FAMILIES)
def test_a_device_has_the_same_sums(code, dtype, family):
    if code == "triton":
        pytest.importorskip("triton")
    x = torch.from_numpy(family[:20_000].copy()).to(dtype)
    x[:4] = torch.tensor([0.0, math.nan, math.inf, -1e-7]).to(dtype)
    host = tails(x)
    with backend(code):
        there = tails(x)
    assert torch.is_tensor(there.sums)
    for eta in (0.0, *np.quantile(np.abs(family), (0.1, 0.5, 0.999)).tolist(), 1e30):
        a, b = host.tail(eta), there.tail(eta)
        assert a[0] == b[0]
        assert b[1:] == pytest.approx(a[1:], rel=1e-12, abs=1e-12)
    assert there.sum_log() == pytest.approx(host.sum_log(), rel=1e-12)


@every("size", [1, 63, 64, 65, 1023, 1024, 20_000])
@every("family", FAMILIES.values(), FAMILIES)
def test_counts_from_a_bin_on_are_those_of_the_histogram(size, family, monkeypatch):
    x = family[:size].copy()
    x[:: max(size // 7, 1)] = np.resize(
        [np.nan, np.inf, -np.inf, 0.0, 1e-45], x[:: max(size // 7, 1)].size
    )
    magnitudes = np.sort(np.abs(x[np.isfinite(x)]).astype(np.float64))
    for least in (0.0, 1e-45, *magnitudes[:: max(magnitudes.size // 4, 1)].tolist(), 3e38):
        found = []
        for counts in (loops.counts_of_all, loops.block_counts):
            monkeypatch.setattr(loops, "block_counts", counts)
            found.append(tails(x, least))
            monkeypatch.undo()
        for each in found[1:]:
            assert np.array_equal(each.left, found[0].left)
            assert np.array_equal(each.right, found[0].right)
            assert np.array_equal(each.sums, found[0].sums)
        reach = magnitudes[(magnitudes >= found[0].left.min(initial=math.inf)) & (magnitudes > 0)]
        assert found[0].tail(0.0)[0] == reach.size


@pytest.mark.parametrize("first", [0, 1, 4000, 8190])
def test_counts_of_all_are_those_of_each_block_alone(first):
    """Whatever was counted before, in the same memory: NaN and infinities are in no bin, and zeros neither."""
    rng = np.random.default_rng(0)
    for size in (0, 1, 2, 5000):
        x = rng.laplace(size=size).astype(np.float32)
        x[::7], x[3::11], x[5::13] = 0, np.nan, -np.inf
        magnitude = (x.view(np.uint32) & 0x7FFFFFFF)[np.isfinite(x) & (x != 0)]
        bins = np.bincount(magnitude >> 17, minlength=first)[first:]
        counts = loops.counts_of_all(x.view(np.uint32), first, 17)
        np.testing.assert_array_equal(counts, np.trim_zeros(bins, "b"))


@every("code", ["compiled", "torch"])
@every("least", [1, 20, 300, 10_000])
def test_no_cell_dominates_a_tail_below_the_limit(code, least):
    """By looking at every tail and every cell of it."""
    draw, kept = np.random.default_rng(least), []
    for trial in range(12):
        x = draw.standard_t(2, 400).astype(np.float32)
        if trial % 3:
            x = np.clip(x, -3, 3) if trial % 3 == 1 else np.where(x > 8, 100 * x, x)
        with backend(code):
            cells = tails(torch.from_numpy(x))
        count, _, squares, inside = np.asarray(cells.sums, np.float64).T
        own = squares[:-1] - squares[1:]
        fullest, largest = (np.maximum.accumulate(c[::-1])[::-1] for c in (inside[:-1], own))
        even = ((fullest <= count[:-1] / 8) & (largest <= squares[:-1] / 8))[
            count[:-1] >= least
        ].all()
        kept.append(even)
        last = np.flatnonzero(count > 0)[-1]
        assert cells.limit(least) == (cells.left[last] if even else 0.0)
    assert all(kept) == (least > 400)
    assert any(kept) == (least > 1)
