from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from gradstats import compressibility
from gradstats._compressibility import CONTROLS, control
from gradstats.errors import InputError


def test_a_pure_power_law_is_recovered(xp):
    magnitudes = np.arange(1, 100_001.0) ** -0.7
    x = np.random.default_rng(0).permutation(magnitudes).astype(np.float32)
    c = compressibility(xp(x))
    assert c.window == (1, 1000)
    assert c.p == pytest.approx(0.7, rel=0.03)  # rank - ½ shifts a noiseless law a little
    assert c.c1 == pytest.approx(max(magnitudes[:1000] * np.arange(1, 1001) ** c.p), rel=1e-6)


@pytest.mark.parametrize("k", [100, 1000])
def test_intervals_cover_the_truth_as_often_as_they_say(k):
    """Pareto with p = ½: 500 samples, so 95 % coverage is within ±2 points of what is seen."""
    rng = np.random.default_rng(1)
    covered, hill = 0, 0
    for _ in range(500):
        x = rng.random(20 * k) ** -0.5
        c = compressibility(x, (1, k))
        covered += c.p_low <= 0.5 <= c.p_high
        hill += c.hill_low <= 0.5 <= c.hill_high
    assert 0.93 <= covered / 500 <= 0.985
    assert 0.92 <= hill / 500 <= 0.975


def test_hill_is_the_textbook_formula():
    x = np.random.default_rng(2).standard_t(3, 50_000)
    top = np.sort(np.abs(x))[::-1][:500]
    expected = np.mean(np.log(top[:-1] / top[-1]))
    assert compressibility(x, (1, 500)).hill == pytest.approx(expected)


def test_verdicts():
    rng = np.random.default_rng(3)
    n = 1_000_000
    assert compressibility(rng.pareto(1.2, n) + 1).compressible
    for light in (rng.random(n), np.abs(rng.standard_normal(n)), rng.laplace(size=n)):
        assert not compressibility(light).compressible


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_are_the_quantiles_of_their_law_and_fail(name):
    decay, magnitudes = control(name, 270_000)
    law = getattr(stats, name)
    assert np.allclose(magnitudes, law.isf((np.arange(1, 2701) - 0.5) / 270_000))
    assert not decay.compressible
    sample = law.rvs(size=270_000, random_state=0)
    assert compressibility(sample).p == pytest.approx(decay.p, rel=0.2)


@pytest.mark.parametrize(
    "x",
    [np.zeros(1000), np.empty(0), np.array([1.0]), np.full(50, np.nan), np.r_[np.zeros(99), 1.0]],
)
def test_too_few_elements_give_no_verdict_and_no_number(x):
    c = compressibility(x)
    assert math.isnan(c.p)
    assert math.isnan(c.c1)
    assert not c.compressible


def test_constants_do_not_decay():
    c = compressibility(np.full(1000, 2.0))
    assert (c.p, c.p_low, c.p_high, c.hill, c.c1) == (0, 0, 0, 0, 2)


def test_windows():
    x = np.random.default_rng(0).laplace(size=5000)
    assert compressibility(x, (10, 300)).window == (10, 300)
    assert compressibility(x, (1, 10**9)).window == (1, 5000)
    for bad in ((0, 10), (5, 5), (9, 2)):
        with pytest.raises(InputError, match="window"):
            compressibility(x, bad)
