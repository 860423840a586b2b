from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from gradstats import fit
from gradstats._fit import MODELS, FitError
from gradstats.distributions import DISTRIBUTIONS, double_genpareto
from gradstats.errors import InputError
from gradstats.goodness import goodness, sorted_magnitudes
from gradstats.primitives import kth_largest

N = 200_000


def signed(magnitudes, seed=0):
    return magnitudes * np.random.default_rng(seed).choice([-1.0, 1.0], magnitudes.size)


class TestDoubleGenpareto:
    @pytest.mark.parametrize("c", [-0.7, -0.3, 0.0, 0.2, 0.45, 1.2])
    def test_is_genpareto_with_a_random_sign(self, c):
        d = double_genpareto(c, scale=2.0)
        half = stats.genpareto(c, scale=2.0)
        x = np.linspace(0.01, 2.5, 50)
        assert np.allclose(d.pdf(x), half.pdf(x) / 2)
        assert np.allclose(d.pdf(-x), d.pdf(x))
        assert np.allclose(d.sf(x), half.sf(x) / 2, rtol=1e-12)
        assert np.allclose(d.cdf(-x), half.sf(x) / 2, rtol=1e-12)
        q = np.array([1e-9, 1e-3, 0.2, 0.5, 0.8])
        assert np.allclose(d.isf(q[:3]), half.isf(2 * q[:3]))
        assert np.allclose(d.sf(d.isf(q)), q)
        assert np.allclose(d.cdf(d.ppf(q)), q)
        assert np.allclose(d.logpdf(x), np.log(d.pdf(x)))

    def test_special_cases_and_moments(self):
        x = np.linspace(-4, 4, 81)
        assert np.allclose(double_genpareto(0.0).pdf(x), stats.laplace.pdf(x))
        inside = np.linspace(-0.99, 0.99, 9)
        assert np.allclose(double_genpareto(-1.0).pdf(inside), 0.5)
        assert double_genpareto(-0.5).support() == (-2, 2)
        half = stats.genpareto(0.2)
        assert double_genpareto(0.2).var() == pytest.approx(half.var() + half.mean() ** 2)
        assert double_genpareto(0.6).var() == math.inf
        draws = double_genpareto(0.1).rvs(N, random_state=1)
        assert stats.kstest(draws, double_genpareto(0.1).cdf).pvalue > 0.01


class TestClosedForms:
    """Recovery tolerances: four standard errors of the estimator at n = 200,000."""

    def test_laplace_is_scipys_maximum_likelihood(self, xp):
        x = stats.laplace(scale=0.3).rvs(N, random_state=1).astype(np.float32)
        f = fit(xp(x), "laplace")
        assert f.params["scale"] == pytest.approx(0.3, rel=4 / math.sqrt(N))
        assert f.params["scale"] == pytest.approx(stats.laplace.fit(x, floc=0)[1], rel=1e-6)

    @pytest.mark.parametrize("a", [0.4, 0.6, 1.0, 1.6])
    def test_dgamma_is_within_its_stated_error_of_maximum_likelihood(self, a):
        magnitudes = stats.gamma(a, scale=0.1).rvs(N, random_state=2)
        mle, _, _ = stats.gamma.fit(magnitudes, floc=0)
        f = fit(signed(magnitudes), "dgamma")
        assert f.params["a"] == pytest.approx(mle, rel=0.015)
        assert f.params["a"] * f.params["scale"] == pytest.approx(magnitudes.mean(), rel=1e-12)

    @pytest.mark.parametrize("c", [-0.3, -0.1, 0.0, 0.1, 0.2])
    def test_double_genpareto_recovers_its_parameters(self, c):
        x = double_genpareto(c, scale=0.02).rvs(N, random_state=3)
        f = fit(x, "double_genpareto")
        # asymptotic variance of the moment estimator, Hosking and Wallis 1987, eq. for k = -c
        variance = (1 - c) ** 2 * (1 - c + 6 * c * c) / ((1 - 3 * c) * (1 - 4 * c)) / N
        assert f.params["c"] == pytest.approx(c, abs=4 * math.sqrt(variance) * (1 - 2 * c))
        assert f.params["scale"] == pytest.approx(0.02, rel=0.03)

    def test_moment_estimates_of_heavy_tails_are_flagged(self):
        x = double_genpareto(0.7).rvs(N, random_state=3)
        f = fit(x, "double_genpareto")
        assert f.params["c"] < 0.5
        assert f.flags == ("shape above 1/4: moment estimate unreliable",)

    def test_impossible_support_is_flagged(self):
        x = np.r_[np.full(99, 1.0), 1.5]
        f = fit(x, "double_genpareto")
        assert f.flags == ("largest element outside the support",)
        g = goodness(f, sorted_magnitudes(x))
        assert g.nll == math.inf


@pytest.mark.parametrize("zeros", [0.0, 0.3])
@pytest.mark.parametrize("model", MODELS)
def test_point_mass_at_zero(model, zeros):
    """Zeros change π₀ and nothing else, and thresholds allow for them."""
    rng = np.random.default_rng(4)
    x = rng.laplace(size=N)
    nonzero = fit(x, model)
    n = round(zeros * N)
    both = np.r_[x, np.zeros(n)]
    mixed = fit(both, model)
    assert mixed.params == nonzero.params
    assert mixed.zero_fraction == n / (N + n)
    kept = np.mean(np.abs(both) >= mixed.threshold(0.01))
    assert kept / 0.01 == pytest.approx(1, abs=0.08)
    assert mixed.threshold(1.0) == 0.0
    assert mixed.n_params == nonzero.n_params + (zeros > 0)


@pytest.mark.parametrize("model", MODELS)
def test_goodness_equals_scipys(model):
    rng = np.random.default_rng(5)
    x = np.r_[rng.standard_t(4, 20_000), np.zeros(5000)].astype(np.float32)
    f = fit(x, model)
    g = goodness(f, sorted_magnitudes(x))
    magnitudes = np.abs(x[x != 0]).astype(float)
    ks = stats.kstest(magnitudes, lambda v: 1 - 2 * f.dist.sf(v)).statistic
    assert g.ks == pytest.approx(0.8 * ks, rel=1e-9)
    log_density = np.where(
        x == 0, math.log(0.2), np.log(0.8) + f.dist.logpdf(np.where(x == 0, 1, x))
    )
    assert g.nll == pytest.approx(-log_density.mean(), rel=1e-9)
    assert g.aic == pytest.approx(2 * f.n_params + 2 * x.size * g.nll)
    errors = [
        math.log(f.threshold(r) / kth_largest(x, round(r * x.size))) for r in (0.1, 0.01, 0.001)
    ]
    assert g.tail_error == pytest.approx(max(map(abs, errors)))


def test_refusals():
    x = np.ones(10)
    with pytest.raises(InputError, match="there are laplace"):
        fit(x, "cauchy")
    with pytest.raises(InputError, match="there is closed"):
        fit(x, "laplace", method="psychic")
    for hopeless in (np.zeros(5), np.full(3, np.nan), np.empty(0)):
        for model in MODELS:
            with pytest.raises(FitError, match="nothing to fit"):
                fit(hopeless, model)
    for model in ("dgamma", "double_genpareto"):
        with pytest.raises(FitError, match="equal"):
            fit(x, model)
    assert fit(np.array([3.0]), "laplace").params == {"scale": 3.0, "loc": 0.0}


def test_models_and_distributions_have_the_same_names():
    assert set(MODELS) == set(DISTRIBUTIONS)
