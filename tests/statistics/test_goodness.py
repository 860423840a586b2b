from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from support.every import every

from gradstats import fit
from gradstats.errors import InputError
from gradstats.primitives import kth_largest
from gradstats.primitives.sketch import Magnitudes, sketch
from gradstats.statistics.distributions import MAGNITUDES, SIDS
from gradstats.statistics.fitting import as_magnitudes
from gradstats.statistics.goodness import (
    TAIL_RATIOS,
    bootstrap,
    compare,
    goodness,
    tail_distances,
)
from gradstats.statistics.laws import LAWS
from gradstats.statistics.laws.choice import solvers
from gradstats.statistics.solution import FitError, Reason
from gradstats.statistics.tails import tail_test, widened

SOLVERS = solvers()


@pytest.mark.parametrize("model", SIDS)
def test_equals_scipys(model):
    rng = np.random.default_rng(5)
    x = np.r_[rng.standard_t(4, 20_000), np.zeros(5000)].astype(np.float32)
    f = fit(x, model)
    g = goodness(f, x)
    magnitudes = np.abs(x[x != 0]).astype(float)
    ks = stats.kstest(magnitudes, lambda v: 1 - 2 * f.dist.sf(v)).statistic
    assert g.ks == pytest.approx(0.8 * ks, rel=1e-9)
    log_density = np.where(
        x == 0, math.log(0.2), np.log(0.8) + f.dist.logpdf(np.where(x == 0, 1, x))
    )
    assert g.nll == pytest.approx(-log_density.mean(), rel=1e-9)
    if (
        model == "laplace"
    ):  # the only one of the three whose closed form is the maximum of the likelihood
        assert g.aic == pytest.approx(2 * f.n_params + 2 * x.size * g.nll)
        assert g.bic == pytest.approx(math.log(x.size) * f.n_params + 2 * x.size * g.nll)
    for ratio in TAIL_RATIOS[:3]:
        exact = kth_largest(x, round(ratio * x.size))
        assert g.log_quantile[ratio] == pytest.approx(math.log(f.threshold(ratio) / exact))
        kept = np.count_nonzero(np.abs(x) >= f.threshold(ratio))
        assert g.quality[ratio] == pytest.approx(kept / round(ratio * x.size))
    assert TAIL_RATIOS[3] not in g.quality  # two elements would be left
    assert g.tail_error == max(map(abs, g.log_quantile.values()))


@pytest.mark.parametrize("model", SIDS)
def test_wasserstein_is_scipys(model):
    x = np.random.default_rng(6).gamma(0.7, size=20_000)
    f = fit(x, model, "mle")
    grid = f.magnitude.isf((np.arange(400_000) + 0.5) / 400_000)
    expected = stats.wasserstein_distance(x, grid) / x.mean()
    assert goodness(f, x).wasserstein == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("model", ["laplace", "dgamma", "double_genpareto", "lognorm", "dweibull"])
def test_wasserstein_is_exact_across_wide_gaps(model):
    rng = np.random.default_rng(0)
    for x in (np.array([1.0, 2, 3, 4, 30]), np.array([1.0, 1.1, 9]), rng.gamma(0.3, size=10)):
        f = fit(x, model, "moments")
        # far finer than any gap, and as far as the tail goes
        at = np.append(0.0, np.geomspace(1e-9, 1e5, 2_000_001)) * x.mean()
        counted = 1 - np.searchsorted(np.sort(x), (at[1:] + at[:-1]) / 2) / x.size
        difference = np.abs(counted - f.magnitude.sf((at[1:] + at[:-1]) / 2))
        expected = float(difference @ np.diff(at)) / x.mean()
        assert goodness(f, x).wasserstein == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("n", [50, 5000])
def test_upper_anderson_darling_is_the_textbook_sum(n):
    """Sinclair, Spurr and Ahmad 1990: n/2 − 2ΣF − Σ(2 − (2i−1)/n) ln(1−F), per element."""
    x = np.sort(stats.expon.rvs(size=n, random_state=7))
    f = fit(x, "laplace")
    cdf, logsf = f.magnitude.cdf(x), f.magnitude.logsf(x)
    i = np.arange(1, n + 1)
    textbook = n / 2 - 2 * cdf.sum() - ((2 - (2 * i - 1) / n) * logsf).sum()
    assert goodness(f, x).ad_upper == pytest.approx(textbook / n, rel=1e-6)


@pytest.mark.parametrize("model", ["laplace", "dgamma", "double_genpareto", "t", "lognorm"])
def test_a_histogram_gives_the_distances_of_the_elements(model):
    """More elements than a sketch keeps one by one, against exact cells."""
    x = np.random.default_rng(8).standard_t(5, 100_000).astype(np.float32)
    exact = Magnitudes.from_values(np.abs(x).astype(float))
    f = fit(x, model, "mle")
    rough, true = goodness(f, x), goodness(f, exact)
    assert rough.nll == pytest.approx(true.nll, rel=1e-6)
    assert rough.ks == pytest.approx(true.ks, abs=1e-3 / 2)
    assert rough.wasserstein == pytest.approx(true.wasserstein, rel=0.01)
    assert rough.ad_upper == pytest.approx(true.ad_upper, rel=0.02)
    for ratio, error in true.log_quantile.items():
        assert rough.log_quantile[ratio] == pytest.approx(error, abs=1e-3)


def test_a_heavy_tail_has_no_wasserstein_distance():
    x = stats.genpareto(1.3).rvs(5000, random_state=9)
    g = goodness(fit(x, "double_genpareto", "mle"), x)
    assert g.wasserstein == math.inf
    assert g.ks < 0.02


def test_kolmogorov_does_not_see_the_tail():
    """Generalized normal 0.98 against Laplace: D is 0.002 (twice that folded), and 13 % too many are kept."""
    # as SciPy draws it, a tenth as fast: a power of gamma variates
    x = np.random.default_rng(10).gamma(1 / 0.98, size=4_000_000).astype(np.float32)
    x **= np.float32(1 / 0.98)
    g = goodness(fit(x, "laplace"), x)
    assert g.ks == pytest.approx(2 * 0.0017, abs=0.0005)
    assert g.quality[0.001] == pytest.approx(1.13, abs=3.5 / math.sqrt(4000))


@every(("model", "method"), SOLVERS)
def test_criteria_take_maximum_likelihood(model, method):
    """By moments a generalized Pareto had an AIC up to a million too high, or infinite."""
    x = np.r_[stats.genpareto(0.4).rvs(20_000, random_state=3), np.zeros(100)]
    f = fit(x, model, method)
    g = goodness(f, x)
    assert math.isfinite(g.aic) == math.isfinite(g.bic) == f.is_likelihood
    assert (g.criteria == "") == f.is_likelihood
    if not f.is_likelihood:
        assert "maximum likelihood" in g.criteria
        assert goodness(fit(x, model, "mle"), x).nll < g.nll
    else:
        assert f.params == pytest.approx(fit(x, model, "mle").params)
        assert g.aic == pytest.approx(2 * f.n_params + 2 * x.size * g.nll)
        assert g.bic == pytest.approx(math.log(x.size) * f.n_params + 2 * x.size * g.nll)


@pytest.mark.parametrize(
    ("model", "method", "error"),
    [
        ("laplace", "closed", 1e-9),
        ("dgamma", "closed", 1e-9),
        ("norm", "closed", 1e-9),
        ("double_genpareto", "mle", 3e-6),
        ("gennorm", "mle", 3e-6),
        ("t", "mle", 3e-6),
    ],
)
def test_a_coarse_sketch_gives_the_likelihood_of_the_elements(model, method, error):
    """At the middles of cells of 7 bits it was off by 1.3e-5."""
    x = stats.genpareto(0.2).rvs(270_000, random_state=4)
    coarse = sketch(x, 7)
    f = fit(coarse, model, method)
    exact = -(f.magnitude.logpdf(x) - math.log(2)).mean()
    assert goodness(f, coarse).nll == pytest.approx(exact, abs=error)


class TestComparison:
    def test_a_nested_test_at_scale_takes_maximum_likelihood(self):
        """The closed gamma loses to the exponential that it contains; its |difference| was called significant."""
        x = np.random.default_rng(13).exponential(size=1_000_000)
        laplace = fit(x, "laplace")
        for method in ("closed", "moments"):
            with pytest.raises(InputError, match='method="mle"'):
                compare(fit(x, "dgamma", method), laplace, x)
        best = fit(x, "dgamma", "mle")
        c, d = compare(best, laplace, x), compare(laplace, best, x)
        a = best.params["a"]
        assert c.difference == -d.difference
        # twice the gain is the square of the shape's distance from 1 in standard errors
        assert c.z == pytest.approx(((a - 1) / best.stderr["a"]) ** 2, rel=0.05, abs=0.02)
        assert c.p_value == d.p_value > 0.01

    def test_a_nested_test_has_a_sign(self):
        x = np.random.default_rng(14).exponential(size=2000)
        worse = replace(fit(x, "dgamma", "mle"), params={"a": 1.2, "scale": 0.8, "loc": 0.0})
        c = compare(worse, fit(x, "laplace"), x)
        assert c.difference < 0
        assert (c.z, c.p_value) == (0, 1)

    def test_vuong_by_hand(self):
        x = stats.lognorm(1.0).rvs(3000, random_state=11)
        a, b = fit(x, "lognorm", "mle"), fit(x, "dweibull", "mle")
        ratio = a.magnitude.logpdf(x) - b.magnitude.logpdf(x)
        c = compare(a, b, x)
        assert c.difference == pytest.approx(ratio.mean())
        assert c.z == pytest.approx(math.sqrt(3000) * ratio.mean() / ratio.std())
        assert not c.nested
        assert c.difference > 0
        assert c.p_value < 0.01
        assert compare(b, a, x).z == pytest.approx(-c.z)

    def test_nested_models_get_a_likelihood_ratio_test(self):
        """Under the null the statistic is χ²(1): 400 samples, 5 % level."""
        rng = np.random.default_rng(12)
        rejected = 0
        for _ in range(400):
            x = rng.standard_exponential(500)
            c = compare(fit(x, "dgamma", "mle"), fit(x, "laplace", "mle"), x)
            assert c.nested
            assert c.difference >= -1e-12
            rejected += c.p_value < 0.05
        assert rejected / 400 == pytest.approx(0.05, abs=3.5 * math.sqrt(0.05 * 0.95 / 400))

    def test_the_same_fit_is_no_different(self):
        x = np.arange(1.0, 100)
        f = fit(x, "lognorm")
        assert compare(f, f, x).p_value == 1


class TestBootstrap:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("model", "method", "statistic"),
        [
            ("laplace", "closed", "ks"),
            ("dgamma", "mle", "ks"),
            ("double_genpareto", "mle", "ks"),
            ("double_genpareto", "mle", "ad"),
        ],
    )
    def test_p_is_uniform_under_the_null_and_the_naive_one_is_not(self, model, method, statistic):
        shape = {"laplace": (), "dgamma": (0.7,), "double_genpareto": (0.2,)}[model]
        rng = np.random.default_rng(13)
        law = MAGNITUDES[model](*shape)
        tests = [
            bootstrap(
                law.rvs(200, random_state=rng),
                model,
                method,
                statistic=statistic,
                size=200,
                replicates=19,
                seed=i,
            )
            for i in range(100)
        ]
        p = np.array([t.p_value for t in tests])
        # p takes the values 1/20 … 1; half a step takes the discreteness out
        assert stats.kstest(p - 0.5 / 20, stats.uniform.cdf).pvalue > 0.001
        if statistic == "ks":
            naive = np.array([t.p_naive for t in tests])
            assert (naive < 0.05).sum() == 0  # 5 of 100 expected of a test
            assert naive.mean() > 0.6

    def test_sees_a_misfit_that_the_naive_test_misses(self):
        x = stats.gamma(0.88).rvs(100_000, random_state=14).astype(np.float32)
        tests = [bootstrap(x, "laplace", size=1000, replicates=99, seed=i) for i in range(30)]
        assert all((t.size, t.replicates, t.failed) == (1000, 99, 0) for t in tests)
        seen, naive = (
            sum(p < 0.05 for p in ps)
            for ps in zip(*((t.p_value, t.p_naive) for t in tests), strict=True)
        )
        assert seen >= 12
        assert naive <= seen / 2

    def test_is_reproducible_and_leaves_the_global_state_alone(self):
        x = np.random.default_rng(15).laplace(size=5000)
        np.random.seed(3)  # noqa: NPY002
        before = np.random.get_state()[1].copy()  # noqa: NPY002
        first = bootstrap(x, "dgamma", size=300, replicates=19, seed=4)
        assert first == bootstrap(x, "dgamma", size=300, replicates=19, seed=4)
        assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002

    @pytest.mark.parametrize("failing", [0, 5, 19])
    def test_replicates_without_a_fit_count_as_farther(self, failing, monkeypatch):
        """The first fit is that of the subsample; of the refits some fail, and the rest is as it was."""
        from gradstats.statistics import goodness as module

        x, fits = np.random.default_rng(17).laplace(size=2000), []

        def fitted(*given):
            fits.append(given)
            if 1 < len(fits) <= 1 + failing:
                raise FitError(Reason.NO_MAXIMUM)
            return fit(*given)

        def distance(fitted, m, statistic):
            return 1.0 if len(fits) == 1 else 0.5 if len(fits) % 2 else 2.0

        monkeypatch.setattr(module, "fit", fitted)
        monkeypatch.setattr(module, "_distance", distance)
        found = bootstrap(x, "laplace", size=200, replicates=19)
        assert (found.replicates, found.failed) == (19, failing)
        farther = failing + sum(i % 2 == 0 for i in range(2 + failing, 21))
        assert found.p_value == pytest.approx((farther + 1) / 20)

    def test_zeros_are_not_tested(self):
        x = np.r_[np.random.default_rng(16).laplace(size=3000), np.zeros(3000)]
        assert bootstrap(x, "laplace", size=10_000, replicates=19).size == 3000

    def test_refusals(self):
        x = np.ones(100)
        with pytest.raises(FitError, match="equal"):
            bootstrap(x, "dgamma")
        with pytest.raises(InputError, match="there are ks, ad"):
            bootstrap(x, "laplace", statistic="cvm")
        with pytest.raises(InputError, match="replicate"):
            bootstrap(x, "laplace", replicates=0)


def test_fits_of_everything_in_little_time():
    """Not a benchmark: a generous bound that a pass over the elements per model would break."""
    import time

    reduced = sketch(np.random.default_rng(17).laplace(size=10_000_000).astype(np.float32))
    started = time.process_time()
    for model in ("double_genpareto", "dgamma", "laplace"):
        goodness(fit(reduced, model, "mle"), reduced)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("law", "model", "method"),
    [
        (stats.expon(), "laplace", "closed"),
        (stats.gamma(0.6), "dgamma", "closed"),
        (stats.genpareto(0.15), "double_genpareto", "closed"),
    ],
)
def test_the_tail_of_a_true_law_is_seldom_rejected(law, model, method):
    rng, rejected = np.random.default_rng(0), 0
    for _ in range(100):
        m = as_magnitudes(law.rvs(5000, random_state=rng))
        fitted = fit(m, model, method)
        kept = tail_distances(fitted, m, [0.01])[1][0.01]
        rejected += tail_test(fitted, 0.01, 50, kept).p_value <= 0.05
    assert rejected <= 12


def test_what_a_test_of_the_tail_sees():
    """Counts of independent elements, so many more than the threshold should keep: seen 80 times of 100."""
    rng = np.random.default_rng(1)
    fitted = fit(rng.laplace(size=1000), "laplace", "closed")
    test = tail_test(fitted, 0.01, 200, 1.0)
    assert (test.k, test.p_value) == (200, 1.0)
    more = rng.binomial(20_000, 0.01 * (1 + test.visible), 2000) / 200
    seen = [tail_test(fitted, 0.01, 200, q).p_value <= 0.05 for q in more]
    assert np.mean(seen) == pytest.approx(0.8, abs=0.04)
    wide = widened(test, 1.5, 16.0)
    assert np.sqrt(1 + wide.visible) - 1 == pytest.approx(4 * (np.sqrt(1 + test.visible) - 1))
    assert wide.p_value > tail_test(fitted, 0.01, 200, 1.5).p_value


@pytest.mark.parametrize("zeros", [0, 20_000])
def test_a_test_of_the_tail_doubts_parameters_that_are_not_of_the_likelihood(zeros):
    """By the errors of its parameters, each times how fast ln k̂ changes with it; those of the likelihood have none."""
    z95, z80, ratio, k = stats.norm.isf(0.025), stats.norm.ppf(0.8), 0.01, 400
    x = np.append(np.random.default_rng(2).laplace(size=40_000), np.zeros(zeros))
    for model, method in (("laplace", "closed"), ("dgamma", "closed"), ("double_genpareto", "pwm")):
        fitted = fit(x, model, method)
        threshold, law, doubt = fitted.threshold(ratio), LAWS[model].magnitude, 0.0
        for name, error in fitted.stderr.items():
            low, high = (
                law.logsf(threshold, **dict(fitted.params) | {name: fitted.params[name] + step})
                for step in (-1e-3 * error, 1e-3 * error)
            )
            doubt += abs(high - low) / 2e-3
        assert doubt > 0.01
        if fitted.is_likelihood:
            doubt = 0.0
        deviation = math.sqrt((1 - ratio) / k + doubt**2) / 2
        test = tail_test(fitted, ratio, k, 1.2)
        assert test.visible == pytest.approx((1 + (z95 + z80) * deviation) ** 2 - 1, rel=0.01)
        p = 2 * stats.norm.sf((math.sqrt(1.2) - 1) / deviation)
        assert test.p_value == pytest.approx(p, rel=0.05), model


def test_a_law_that_ends_at_its_threshold_is_not_judged():
    """AdamW's first updates: nearly all of one size, so that the tail of the law fitted is bounded there."""
    rng = np.random.default_rng(0)
    sizes = np.where(rng.random(9000) < 0.9, 1e-3, 1e-3 * rng.beta(5, 0.2, 9000))
    x = (sizes * rng.choice([-1, 1], 9000)).astype(np.float32)
    fitted = fit(x, "double_genpareto", "moments")
    test = tail_test(fitted, 1e-4, 1, 9.0)
    assert math.isnan(test.p_value)
