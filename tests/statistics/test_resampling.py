from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.special import stdtrit
from statsmodels.stats.multitest import multipletests

from gradstats.statistics.resampling import block_counts, holm, mean_interval


def autoregressive(n, rho, rng):
    return lfilter([1.0], [1.0, -rho], rng.standard_normal(n + 200))[200:]


@pytest.mark.parametrize(("n", "rho"), [(20, 0.0), (100, 0.5), (100, 0.8), (300, 0.9)])
def test_interval_of_a_mean_covers(n, rho):
    """With independent steps it would cover 74 % at 0.5, 49 % at 0.8 and 35 % at 0.9."""
    rng, hits, naive, known = np.random.default_rng(1), 0, 0, 0
    for _ in range(600):
        y = autoregressive(n, rho, rng)
        found = mean_interval(y)
        half = 1.96 * y.std(ddof=1) / math.sqrt(n)
        naive += abs(y.mean()) <= half
        if not found.reason:
            known += 1
            hits += found.low <= 0 <= found.high
    assert known > 500
    assert 0.92 <= hits / known <= 0.985
    assert naive / 600 < 0.8 or rho == 0


def test_an_interval_excludes_zero_where_its_p_value_is_below_its_level():
    rng = np.random.default_rng(3)
    known = [mean_interval(0.2 + rng.standard_normal(40)) for _ in range(200)]
    clear = [found.p_value < 0.05 for found in known]
    assert clear == [found.low > 0 or found.high < 0 for found in known]
    assert 20 < sum(clear) < 180


def test_variance_is_that_of_the_bootstrap():
    """The mean of n/b circular blocks drawn with replacement; n/b − 1 for n/b as of a sample variance."""
    rng = np.random.default_rng(2)
    y = autoregressive(120, 0.7, rng)
    found = mean_interval(y)
    blocks = 120 / found.length
    starts = rng.integers(0, 120, (50_000, 1))
    drawn = y[(starts + np.arange(found.length)) % 120].mean(axis=1)
    error = (found.high - found.low) / 2 / stdtrit(blocks - 1, 0.975)
    assert found.length > 5
    assert error == pytest.approx(drawn.std() / math.sqrt(blocks - 1), rel=0.02)


def test_no_interval_has_a_reason():
    few = mean_interval(np.arange(19.0))
    assert (few.mean, few.reason) == (9, "fewer than 20 steps")
    assert math.isnan(few.low)
    walk = mean_interval(np.cumsum(np.random.default_rng(0).standard_normal(60)))
    assert walk.reason == "wanders like a random walk"
    assert math.isnan(walk.high)
    constant = mean_interval(np.full(20, 1.5))
    assert (constant.low, constant.high, constant.p_value, constant.reason) == (1.5, 1.5, 0, "")
    assert mean_interval(np.zeros(20)).p_value == 1
    assert math.isnan(mean_interval(np.array([math.nan])).mean)


def test_counts_are_of_as_many_blocks():
    counts = block_counts(50, 200, np.random.default_rng(0))
    assert counts.shape == (200, 50)
    assert set(counts.sum(axis=1)) == {50}
    assert counts.mean() == 1


def test_holm_is_that_of_statsmodels():
    rng = np.random.default_rng(0)
    for n in (1, 2, 59):
        p = np.round(rng.random(n) ** 3, 2)  # some tied
        assert np.array_equal(holm(p), multipletests(p, method="holm")[1])


def test_holm_leaves_out_what_was_not_tested():
    found = holm(np.array([0.01, math.nan, 0.04, 0.03]))
    assert np.allclose(found, [0.03, math.nan, 0.06, 0.06], equal_nan=True)
    assert np.isnan(holm(np.array([math.nan]))).all()
    assert holm(np.array([])).size == 0
