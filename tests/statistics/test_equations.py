"""SIDCo's derivations, step by step, as numbers (Abdelmoniem et al. 2021, appendices B.3 and C)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, special, stats
from support.every import every

from gradstats import fit, quality
from gradstats.primitives import moments
from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.distributions import MAGNITUDES, dgamma, double_genpareto, laplace
from gradstats.statistics.laws.dgamma import by_likelihood
from gradstats.statistics.stages import (
    exponential,
    gamma_closed,
    gamma_exact,
    gamma_shape,
    genpareto,
    genpareto_by_moments,
)

RATIOS = (0.1, 0.01, 0.001)
SHAPES = (0.3, 0.7, 1.0)
TAILS = (-0.4, -0.1, 0.2, 0.4)


@pytest.mark.parametrize(
    ("model", "law"),
    [("laplace", laplace()), ("dgamma", dgamma(0.6)), ("double_genpareto", double_genpareto(0.2))],
)
def test_equations_3_to_5_the_threshold_is_one_quantile_in_two_forms(model, law):
    g = law.rvs(200_000, random_state=0)
    fitted = fit(g, model)
    half_zero = fit(np.concatenate([g, np.zeros_like(g)]), model)
    for ratio in RATIOS:
        assert half_zero.threshold(ratio / 2) == pytest.approx(fitted.threshold(ratio))
        assert fitted.threshold(ratio) == pytest.approx(fitted.dist.ppf(1 - ratio / 2))  # (5)
        assert fitted.threshold(ratio) == pytest.approx(fitted.magnitude.isf(ratio))  # (4)
        eta = law.ppf(1 - ratio / 2)
        assert law.cdf(eta) - law.cdf(-eta) == pytest.approx(1 - ratio, rel=1e-9)
        k = ratio * g.size
        assert abs(np.count_nonzero(np.abs(g) >= eta) - k) < 4 * math.sqrt(k)
    assert law.pdf(0.7) == pytest.approx(law.pdf(-0.7))


@pytest.mark.parametrize("shape", SHAPES)
def test_equations_17_to_20_double_gamma(shape):
    scale = 0.3
    law, magnitude = dgamma(shape, scale=scale), MAGNITUDES["dgamma"](shape, scale=scale)
    for x in (0.05, 0.4, 1.5):
        density = x ** (shape - 1) * math.exp(-x / scale) / (scale**shape * math.gamma(shape))
        assert law.pdf(x) == pytest.approx(density / 2)  # (17)
        assert magnitude.pdf(x) == pytest.approx(density)  # (18), (25)
        area, _ = integrate.quad(magnitude.pdf, 0, x)
        assert magnitude.cdf(x) == pytest.approx(area, rel=1e-6)  # (19)
        assert magnitude.cdf(x) == pytest.approx(special.gammainc(shape, x / scale))  # (20)


@every("shape", SHAPES)
@every("ratio", RATIOS)
def test_equations_14_15_and_21_to_24_the_closed_gamma_threshold_is_an_upper_bound(shape, ratio):
    x = special.gammainccinv(shape, ratio)  # (14) in units of β
    assert 1 - ratio >= 1 - x ** (shape - 1) * math.exp(-x) / math.gamma(shape) - 1e-12  # (21)
    logarithm = -math.log(ratio * math.gamma(shape))
    assert x <= logarithm - (1 - shape) * math.log(x) + 1e-9  # (22)
    assert x < 1 or x <= logarithm + 1e-9  # (23)
    m = moments(stats.gamma(shape).rvs(20_000, random_state=1))
    exact, found = gamma_exact(m.mean, m.mean_log, ratio)
    closed, _ = gamma_closed(m.mean, m.mean_log, ratio)
    assert exact == pytest.approx(found["scale"] * special.gammainccinv(found["a"], ratio))
    if exact >= found["scale"] and found["a"] <= 1:
        assert exact <= closed  # (24)


@pytest.mark.parametrize("shape", SHAPES)
def test_equations_16_and_25_to_27_the_closed_gamma_shape_solves_the_likelihood_within_1_5_percent(
    shape,
):
    log_mean = special.digamma(shape)  # of a gamma with scale 1, and mean = shape
    m = Magnitudes.from_values(stats.gamma(shape).rvs(20_000, random_state=3))
    a = by_likelihood(m).params["a"]
    assert special.digamma(a) - math.log(a) == pytest.approx(m.mean_log - math.log(m.mean))  # (26)
    assert gamma_shape(shape, log_mean) == pytest.approx(shape, rel=0.015)  # (27)


@pytest.mark.parametrize("shape", TAILS)
def test_equations_28_to_35_double_generalized_pareto(shape):
    scale = 0.5
    law = double_genpareto(shape, scale=scale)
    magnitude = MAGNITUDES["double_genpareto"](shape, scale=scale)
    mean, variance = scale / (1 - shape), scale**2 / ((1 - shape) ** 2 * (1 - 2 * shape))
    for x in (0.1, 0.6):
        power = 1 + shape * x / scale
        assert law.pdf(x) == pytest.approx(power ** (-(1 / shape + 1)) / (2 * scale))  # (30)
        assert magnitude.pdf(x) == pytest.approx(power ** (-(1 / shape + 1)) / scale)  # (31)
        assert magnitude.cdf(x) == pytest.approx(1 - power ** (-1 / shape))  # (32)
    for p in (0.5, 0.999):
        inverse = scale / shape * (math.exp(-shape * math.log(1 - p)) - 1)
        assert magnitude.ppf(p) == pytest.approx(inverse)  # (33)
    assert magnitude.stats("mv") == pytest.approx((mean, variance))  # (34), corrected
    wrong = scale / (1 + shape), scale**2 / ((1 + shape) ** 2 * (1 + 2 * shape))
    assert magnitude.stats("mv") != pytest.approx(wrong, rel=0.05)  # (34) as printed
    assert genpareto_by_moments(mean, variance) == pytest.approx((shape, scale))  # (29), (35)
    m = moments(magnitude.rvs(20_000, random_state=2))
    eta, c, scale = genpareto(m.mean, m.variance, 0.0, 0.01)
    expected = scale / c * (math.exp(-c * math.log(0.01)) - 1)
    assert eta == pytest.approx(expected)  # (28)


@pytest.mark.parametrize("shape", TAILS)
def test_equations_7_to_9_and_36_to_38_excesses_are_a_shifted_generalized_pareto(shape):
    before = 0.3
    excess = stats.genpareto(shape, loc=before, scale=0.5)
    x = excess.rvs(50_000, random_state=3)
    y = 0.7
    cdf = 1 - (1 + shape * (y - before) / 0.5) ** (-1 / shape)
    assert excess.cdf(y) == pytest.approx(cdf)  # (36)
    p = 0.9
    inverse = 0.5 / shape * (math.exp(-shape * math.log(1 - p)) - 1) + before
    assert excess.ppf(p) == pytest.approx(inverse)  # (37)
    m, over = moments(x), x - before
    step, c, scale = genpareto(m.mean, m.variance, before, 0.1)
    squared = over.mean() ** 2 / over.var()
    by_moments = 0.5 * (1 - squared), 0.5 * over.mean() * (squared + 1)
    assert (c, scale) == pytest.approx(by_moments, rel=1e-6)  # (8), (9), (38)
    eta = before + step
    by_hand = scale / c * (math.exp(-c * math.log(0.1)) - 1) + before
    assert eta == pytest.approx(by_hand)  # (7)


def test_equations_6_10_11_and_39_to_41_an_exponential_forgets():
    law, before, y = stats.expon(scale=0.4), 0.9, 0.25
    conditional = law.sf(before + y) / law.sf(before)  # (39), (40)
    assert conditional == pytest.approx(math.exp(-y / 0.4))  # (41)
    x = law.rvs(200_000, random_state=4)
    first, scale = exponential(moments(x).mean, 0.0, 0.25)
    assert (scale, first) == pytest.approx((x.mean(), x.mean() * math.log(4)))  # (6)
    above = x[x >= first]
    step, scale = exponential(moments(above).mean, first, 0.04)
    assert scale == pytest.approx((above - first).mean())  # (11), the mean
    assert scale == pytest.approx(0.4, rel=0.02)
    assert first + step == pytest.approx(scale * math.log(25) + first)  # (10)


def test_equations_44_and_45_the_error_of_the_ratio_is_a_difference_of_distributions():
    """Of normal elements, by a rule that takes them for Laplace."""
    x, law = stats.norm.rvs(size=400_000, random_state=5), stats.halfnorm()
    one_stage = {"sidco-e": {"stages": 1}}
    for record in quality(x, RATIOS, ["sidco-e"], options=one_stage):
        ratio = record["ratio"]
        estimated, eta = np.abs(x).mean() * math.log(1 / ratio), law.isf(ratio)
        counted = np.count_nonzero(np.abs(x) >= estimated) / x.size - ratio
        assert (record["mean"] - 1) * ratio == pytest.approx(
            counted, rel=1e-6, abs=2 / x.size
        )  # (44)
        expected = law.cdf(eta) - law.cdf(estimated)
        assert counted == pytest.approx(expected, abs=4 * math.sqrt(ratio / x.size))  # (45)
        assert abs(expected) > 0.1 * ratio
