from __future__ import annotations

import math
import pickle
import runpy
from dataclasses import replace

import numpy as np
import pytest
from conftest import DATA, ROOT
from scipy import stats
from support.every import every

from gradstats import fit
from gradstats.errors import InputError
from gradstats.primitives.ratio import RATIOS
from gradstats.primitives.sketch import Magnitudes, sketch
from gradstats.statistics.distributions import (
    CONTROLS,
    DISTRIBUTIONS,
    MAGNITUDES,
    SHAPES,
    SIDS,
    double_genpareto,
    double_lognorm,
    halft,
)
from gradstats.statistics.goodness import goodness
from gradstats.statistics.laws import LAWS, METHODS
from gradstats.statistics.laws.choice import solvers
from gradstats.statistics.solution import FitError, Flag, Reason
from gradstats.trace import open_trace

N = 200_000
MODELS, SOLVERS = tuple(LAWS), solvers()


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


@every("model", MODELS)
def test_the_magnitude_law_is_the_signed_law_folded(model):
    shape = {"dgamma": (0.6,), "double_genpareto": (0.2,), "t": (3.0,), "gennorm": (0.8,)}
    args = shape.get(model, (0.9,) if SHAPES[model] else ())
    signed_law, law = DISTRIBUTIONS[model](*args, scale=2.0), MAGNITUDES[model](*args, scale=2.0)
    x = np.geomspace(1e-3, 50, 40)
    assert np.allclose(law.pdf(x), 2 * signed_law.pdf(x), rtol=1e-9)
    assert np.allclose(law.sf(x), 2 * signed_law.sf(x), rtol=1e-9)
    assert np.allclose(law.logpdf(x), signed_law.logpdf(x) + math.log(2))
    q = np.array([1e-12, 1e-3, 0.3, 0.9])
    assert np.allclose(law.sf(law.isf(q)), q, rtol=1e-9)
    assert np.allclose(law.cdf(law.ppf(q)), q, rtol=1e-6)
    draws = law.rvs(5000, random_state=0)
    assert stats.kstest(draws, law.cdf).pvalue > 0.01


def test_own_laws_have_the_moments_of_what_they_are_made_of():
    assert double_lognorm(0.5).mean() == pytest.approx(0)
    half = stats.lognorm(0.5)
    assert double_lognorm(0.5).var() == pytest.approx(half.var() + half.mean() ** 2)
    with np.errstate(over="ignore", invalid="ignore"):  # in SciPy
        assert double_lognorm(20).var() == math.inf
    assert halft(5).mean() == pytest.approx(
        np.abs(stats.t(5).rvs(N, random_state=0)).mean(), rel=0.01
    )
    assert math.isnan(halft(-1.0).pdf(1.0))


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

    def test_impossible_support_is_flagged(self):
        x = np.r_[np.full(99, 1.0), 1.5]
        f = fit(x, "double_genpareto")
        assert f.flags == (Flag.SUPPORT,) == ("largest element outside the support",)
        assert goodness(f, x).nll == math.inf
        assert goodness(f, x).ad_upper == math.inf


class TestAgainstScipy:
    """Maximum likelihood is SciPy's, where SciPy's generic optimiser finds it."""

    @every(
        ("model", "shape"),
        [
            ("dgamma", (0.4,)),
            ("dgamma", (3.0,)),
            ("double_genpareto", (0.3,)),
            ("double_genpareto", (-0.3,)),
            ("t", (3.0,)),
            ("gennorm", (0.7,)),
            ("gennorm", (2.5,)),
            ("dweibull", (0.7,)),
            ("lognorm", (1.2,)),
            ("norm", ()),
            ("laplace", ()),
        ],
    )
    def test_maximum_likelihood(self, model, shape):
        x = MAGNITUDES[model](*shape, scale=0.02).rvs(3000, random_state=1)
        f = fit(signed(x), model, "mle")
        # SciPy has no half t; with the location fixed the signed law is the same
        theirs = (
            stats.t.fit(signed(x), floc=0) if model == "t" else MAGNITUDES[model].fit(x, floc=0)
        )
        *shapes, _, scale = theirs
        assert f.params["scale"] == pytest.approx(scale, rel=2e-3)
        if shapes:
            assert f.shape == pytest.approx(shapes[0], rel=2e-3)
        # and never a worse likelihood than theirs
        ours = f.magnitude.logpdf(x).mean()
        assert ours >= MAGNITUDES[model](*theirs).logpdf(x).mean() - 1e-9

    @pytest.mark.parametrize("model", ["dgamma", "double_genpareto", "gennorm", "t", "dweibull"])
    def test_the_likelihood_has_its_maximum_there(self, model):
        """From a histogram too: moving a parameter by three standard errors never helps."""
        shape = {"t": 4.0, "double_genpareto": 0.2}.get(model, 0.7)
        x = MAGNITUDES[model](shape, scale=3.0).rvs(N, random_state=2)
        f = fit(x.astype(np.float32), model, "mle")
        best = f.magnitude.logpdf(x).mean()
        for name, error in f.stderr.items():
            for move in (-3, 3):
                moved = MAGNITUDES[model](**{**f.params, name: f.params[name] + move * error})
                assert moved.logpdf(x).mean() < best

    def test_weighted_moments_are_the_textbooks(self):
        """Hosking and Wallis 1987 with unbiased weights, in a naive loop."""
        x = np.sort(stats.genpareto(0.2, scale=3).rvs(500, random_state=3))
        n = x.size
        first = sum(x[i] * (n - 1 - i) / (n - 1) for i in range(n)) / n
        k = x.mean() / (x.mean() - 2 * first) - 2
        f = fit(x, "double_genpareto", "pwm")
        assert f.params["c"] == pytest.approx(-k)
        assert f.params["scale"] == pytest.approx(2 * x.mean() * first / (x.mean() - 2 * first))

    @pytest.mark.parametrize(
        "model", ["dgamma", "double_genpareto", "dweibull", "gennorm", "lognorm", "t"]
    )
    def test_moments_match_mean_and_mean_square(self, model):
        x = MAGNITUDES["dgamma"](1.2).rvs(N, random_state=4)
        f = fit(x, model, "moments")
        assert f.magnitude.mean() == pytest.approx(x.mean(), rel=1e-6)
        if model == "t":  # lighter than any t: its end
            assert f.flags == ()
        assert f.magnitude.var() == pytest.approx(x.var(), rel=1e-3)


class TestGeneralizedParetoRanges:
    """Each method has a range where it works (docs/statistics.md, models and methods)."""

    @pytest.mark.parametrize(
        ("c", "moments", "pwm", "mle"),
        [(0.4, 0.383, 0.397, 0.399), (0.5, 0.455, 0.499, 0.497), (0.7, 0.495, 0.682, 0.696)],
    )
    def test_heavy_tails(self, c, moments, pwm, mle):
        x = stats.genpareto(c).rvs(1_000_000, random_state=5).astype(np.float32)
        reduced = sketch(x)
        by = {m: fit(reduced, "double_genpareto", m) for m in ("moments", "pwm", "mle")}
        assert by["moments"].shape == pytest.approx(moments, abs=0.03)
        assert by["moments"].shape < 0.5
        assert Flag.MOMENTS in by["moments"].flags
        assert math.isnan(by["moments"].stderr["c"])
        assert by["pwm"].shape == pytest.approx(pwm, abs=0.03)
        assert (Flag.PWM in by["pwm"].flags) == (by["pwm"].shape >= 0.5)
        assert by["mle"].shape == pytest.approx(mle, abs=4 * (1 + c) / 1000 + 0.005)
        assert by["mle"].flags == ()

    def test_very_heavy(self):
        x = stats.genpareto(1.2).rvs(1_000_000, random_state=6)
        assert fit(x, "double_genpareto", "mle").shape == pytest.approx(1.2, abs=0.01)
        assert fit(x, "double_genpareto", "pwm").shape < 1

    @pytest.mark.parametrize(("c", "n", "share"), [(-0.3, 100, 0.10), (-0.5, 10_000, 0.29)])
    def test_how_often_moments_put_data_outside_the_support(self, c, n, share):
        rng = np.random.default_rng(7)
        law = stats.genpareto(c)
        flagged = sum(
            Flag.SUPPORT in fit(law.rvs(n, random_state=rng), "double_genpareto").flags
            for _ in range(400)
        )
        assert flagged / 400 == pytest.approx(share, abs=0.07)  # four binomial deviations and more

    @pytest.mark.parametrize("c", [1.5, 2.0, 3.0, 12.0, 30.0])
    def test_no_tail_is_too_heavy(self, c):
        """The mean of such a sample grows with its size; the search must not depend on it."""
        for seed in range(10):
            x = stats.genpareto(c, scale=1e-3).rvs(2000, random_state=seed)
            f = fit(x, "double_genpareto", "mle")
            assert f.shape == pytest.approx(c, abs=4.5 * (1 + c) / math.sqrt(2000))

    def test_no_local_maximum_says_so(self):
        """ξ = −2: the density grows towards the end of the support, and so does the likelihood."""
        x = stats.genpareto(-2.0).rvs(2000, random_state=8)
        with pytest.raises(FitError) as caught:
            fit(x, "double_genpareto", "mle")
        assert caught.value.reason is Reason.NO_MAXIMUM

    def test_irregular_shapes_have_no_standard_errors(self):
        x = stats.genpareto(-0.7).rvs(20_000, random_state=9)
        f = fit(x, "double_genpareto", "mle")
        assert f.shape == pytest.approx(-0.7, abs=0.05)
        assert f.flags == (Flag.IRREGULAR,)
        assert math.isnan(f.stderr["c"])

    def test_the_exponential_limit(self):
        x = stats.expon.rvs(size=N, random_state=10)
        f = fit(x, "double_genpareto", "mle")
        low, high = f.interval("c", 0.9999)
        assert low < 0 < high
        exact = double_genpareto(0.0)
        assert double_genpareto(1e-12).isf(1e-9) == pytest.approx(exact.isf(1e-9), rel=1e-6)


def test_gamma_shape_closed_form_and_newton():
    """The approximation is off by 1.44 % at most, at a ≈ 0.4; Newton's method is not."""
    from scipy.special import digamma

    from gradstats.primitives.sketch import Magnitudes
    from gradstats.statistics.laws.dgamma import by_likelihood, closed

    worst = {}
    for a in np.geomspace(0.05, 50, 200):
        nothing = np.ones(0)
        m = Magnitudes(nothing, nothing, np.full(1, 1000.0), a, a * (a + 1), digamma(a), 9.0)
        worst[a] = abs(closed(m).params["a"] / a - 1)
        assert by_likelihood(m).params["a"] == pytest.approx(a, rel=1e-9)
    where = max(worst, key=worst.get)
    assert worst[where] == pytest.approx(0.0144, abs=0.0003)
    assert where == pytest.approx(0.4, rel=0.2)


def test_a_one_percent_error_of_the_shape_is_five_percent_of_the_quality():
    x = stats.gamma(0.6).rvs(4_000_000, random_state=11).astype(np.float32)
    reduced = sketch(x)
    closed, mle = (goodness(fit(reduced, "dgamma", m), reduced) for m in ("closed", "mle"))
    assert closed.quality[0.001] == pytest.approx(0.947, abs=3 / math.sqrt(4000))
    assert mle.quality[0.001] == pytest.approx(1, abs=3 / math.sqrt(4000))


@pytest.mark.parametrize("zeros", [0.001, 0.01, 0.1, 0.3])
def test_zeros_do_not_enter_the_shape(zeros):
    """Adding an epsilon before the logarithm would make k̂/k 0.86, 0.42, 0.005 here; a point mass does not."""
    x = stats.gamma(0.6).rvs(1_000_000, random_state=12).astype(np.float32)
    x[: round(zeros * x.size)] = 0
    reduced = sketch(x)
    g = goodness(fit(reduced, "dgamma"), reduced)
    assert g.quality[0.001] == pytest.approx(0.945, abs=0.1)


def test_thresholds_at_tiny_ratios_are_finite():
    x = stats.gamma(0.6).rvs(10_000, random_state=13)
    for model in MODELS:
        t = fit(x, model, "mle").threshold(1e-17)
        assert math.isfinite(t)
        assert t > x.max() / 2


@pytest.mark.parametrize("zeros", [0.0, 0.3])
@pytest.mark.parametrize("model", SIDS)
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


@every(("model", "method"), SOLVERS)
def test_scale_equivariance(model, method):
    x = np.random.default_rng(14).gamma(1.3, size=5000)
    one, other = fit(x, model, method), fit(1e-20 * x, model, method)
    assert other.params["scale"] == pytest.approx(1e-20 * one.params["scale"], rel=1e-5)
    assert other.shape == pytest.approx(one.shape, rel=1e-5, nan_ok=True)


@every(("model", "method"), SOLVERS)
def test_from_a_histogram_alone(model, method):
    """The 7 bits that a trace of sketches keeps give parameters within 1 % and thresholds within half a percent."""
    x = np.random.default_rng(15).gamma(0.8, size=300_000).astype(np.float32)
    whole = sketch(x)
    full, coarse = fit(whole, model, method), fit(whole.coarsen(7), model, method)
    assert coarse.params["scale"] == pytest.approx(full.params["scale"], rel=0.01)
    if full.flags == ():
        assert coarse.shape == pytest.approx(full.shape, rel=0.01, abs=1e-3, nan_ok=True)
    for ratio in RATIOS:
        assert coarse.threshold(ratio) == pytest.approx(full.threshold(ratio), rel=0.005)


def test_refusals():
    x = np.ones(10)
    with pytest.raises(InputError, match="there are laplace"):
        fit(x, "cauchy")
    with pytest.raises(InputError, match="there is closed, moments, mle, pwm"):
        fit(x, "laplace", method="psychic")
    with pytest.raises(InputError, match="gennorm has no method 'pwm'; it has moments, mle"):
        fit(x, "gennorm", method="pwm")
    for hopeless in (np.zeros(5), np.full(3, np.nan), np.empty(0)):
        for model, method in SOLVERS:
            with pytest.raises(FitError, match="nothing to fit"):
                fit(hopeless, model, method)
    for model, method in SOLVERS:
        if SHAPES[model]:
            with pytest.raises(FitError) as caught:
                fit(x, model, method)
            assert caught.value.reason is Reason.CONSTANT
            with pytest.raises(FitError) as caught:
                fit(np.array([3.0]), model, method)
            assert caught.value.reason is Reason.TOO_FEW
    assert fit(np.array([3.0]), "laplace").params == {"scale": 3.0, "loc": 0.0}


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_squares_out_of_range_say_so(scale):
    for model, method in SOLVERS:
        with pytest.raises(FitError) as caught:
            fit(np.array([1.0, 2.0]) * scale, model, method)
        assert caught.value.reason is Reason.RANGE


def test_errors_survive_a_journey():
    """A worker of a cluster sends them pickled."""
    error = pickle.loads(pickle.dumps(FitError(Reason.CONSTANT)))
    assert error.reason is Reason.CONSTANT
    assert str(error) == Reason.CONSTANT


@pytest.mark.parametrize("method", ["mle", "moments"])
def test_shapes_at_the_end_of_their_range_are_flagged(method):
    """A uniform vector is the end of the generalized normal family, a light one of Student's."""
    uniform = np.random.default_rng(16).random(20_000)
    assert fit(uniform, "gennorm", method).shape > 30
    light = fit(uniform, "t", method)
    assert light.flags == (Flag.BOUNDARY,)
    assert math.isnan(light.stderr["df"])


def of_moments(mean_square, n):
    """Return n magnitudes of mean 1 of which nothing but the moments is known."""
    nothing = np.ones(0)
    return Magnitudes(nothing, nothing, np.full(1, float(n)), 1.0, mean_square, -1.0, 9.0)


def mean_square_of(model, shape):
    law = MAGNITUDES[model](shape)
    return law.moment(2) / law.mean() ** 2


@every(
    ("model", "mean_square", "n", "flags"),
    [
        ("double_genpareto", mean_square_of("double_genpareto", 0.24), 1000, ()),
        ("double_genpareto", 3.0, 1000, (Flag.MOMENTS,)),  # ¼, and the fourth moment is infinite
        ("double_genpareto", mean_square_of("double_genpareto", 0.26), 1000, (Flag.MOMENTS,)),
        ("t", mean_square_of("t", 4.1), 1000, ()),
        ("t", mean_square_of("t", 3.9), 1000, (Flag.TAIL,)),
        ("t", math.pi / 2 - 0.01, 1000, (Flag.BOUNDARY,)),  # lighter than a normal vector
        # exp(s²), where exp(4s²) − 1 is a hundredth of n: s² = 0.59948
        ("lognorm", math.exp(0.599), 1000, ()),
        ("lognorm", math.exp(0.600), 1000, (Flag.TAIL,)),
        ("lognorm", math.exp(0.600), 1010, ()),
        ("gennorm", 1.334, 1000, ()),
        ("gennorm", 1.333, 1000, (Flag.BOUNDARY,)),  # 4/3 is that of a uniform vector
        ("gennorm", 1e9, 1000, (Flag.BOUNDARY,)),
        ("dweibull", 1.0001, 1000, ()),
        ("dweibull", 1.00001, 1000, (Flag.BOUNDARY,)),
    ],
)
def test_moments_say_where_they_are_unreliable(model, mean_square, n, flags):
    f = fit(of_moments(mean_square, n), model, "moments")
    assert f.flags == flags
    if flags and model != "lognorm":
        assert all(math.isnan(error) for error in f.stderr.values())
    else:
        assert all(0 < error < math.inf for error in f.stderr.values())


def ideal(model, *shape, n=20_000):
    """Return a sample without chance: the quantiles at the middles of n equal shares."""
    law = MAGNITUDES[model](*shape)
    return Magnitudes.from_values(law.isf((np.arange(n) + 0.5) / n))


@pytest.mark.parametrize(
    ("method", "c", "flags"),
    [
        ("pwm", 0.47, ()),
        ("pwm", 0.55, (Flag.PWM,)),
        ("mle", -0.47, ()),
        ("mle", -0.53, (Flag.IRREGULAR,)),
    ],
)
def test_generalized_pareto_shapes_are_flagged_where_theory_ends(method, c, flags):
    f = fit(ideal("double_genpareto", c), "double_genpareto", method)
    assert f.shape == pytest.approx(c, abs=0.02)
    assert f.flags == flags
    assert all(math.isnan(error) == bool(flags) for error in f.stderr.values())


def test_a_weibull_shape_at_the_end_of_its_range_is_flagged():
    f = fit(1 + 1e-4 * np.random.default_rng(0).random(1000), "dweibull", "mle")
    assert f.flags == (Flag.BOUNDARY,)
    assert f.shape == pytest.approx(200)
    assert math.isnan(f.stderr["c"])


TRUTHS = {
    "dgamma": 0.6,
    "double_genpareto": 0.1,
    "t": 6.0,
    "gennorm": 0.8,
    "dweibull": 0.7,
    "lognorm": 0.6,
}


@every("model", MODELS)
def test_standard_errors_are_those_of_the_fisher_information(model):
    """Scores by central differences of the density, at the quantiles of an ideal sample."""
    shape = {SHAPES[model]: TRUTHS[model]} if SHAPES[model] else {}
    truth, m = {**shape, "scale": 1.0}, ideal(model, *shape.values())
    scores = []
    for name, value in truth.items():
        up, down = (
            MAGNITUDES[model](**{**truth, name: value * (1 + h)}).logpdf(m.middle)
            for h in (1e-4, -1e-4)
        )
        scores.append((up - down) / (2e-4 * value))
    information = np.array(scores) @ np.array(scores).T
    expected = np.sqrt(np.diag(np.linalg.inv(information)))
    f = fit(m, model, "mle")
    # an ideal sample leaves out a little of a heavy tail
    near = 0.03 if model in ("double_genpareto", "t") else 0.002
    assert [f.stderr[name] for name in truth] == pytest.approx(expected, rel=near)


@every(
    ("model", "method", "shape"),
    [
        ("laplace", "closed", None),
        ("norm", "closed", None),
        ("lognorm", "closed", 0.6),
        ("lognorm", "moments", 0.3),
        ("lognorm", "moments", 1e-3),  # magnitudes that hardly differ
        ("dgamma", "closed", 2.0),
        ("dgamma", "moments", 0.6),
        ("dgamma", "moments", 1e6),
        ("double_genpareto", "closed", -0.2),
        ("double_genpareto", "pwm", 0.3),
        ("dweibull", "moments", 1.5),
        ("dweibull", "moments", 150.0),
        ("gennorm", "moments", 1.5),
        ("t", "moments", 8.0),
    ],
)
def test_standard_errors_are_those_of_repeated_fits(model, method, shape):
    """From both sides: the deviation of 300 estimates is known to 4 %, that of Student's df to less."""
    law = MAGNITUDES[model](*([] if shape is None else [shape]))
    rng = np.random.default_rng(25)
    samples = (Magnitudes.from_values(law.rvs(2000, random_state=rng)) for _ in range(300))
    found = [fit(m, model, method) for m in samples]
    for name in found[0].stderr:
        told = np.nanmedian([f.stderr[name] for f in found])
        seen = np.std([f.params[name] for f in found])
        assert told == pytest.approx(seen, rel=0.25 if model == "t" else 0.16), name


@pytest.mark.parametrize(("df", "flags"), [(2.5, (Flag.TAIL,)), (3.5, (Flag.TAIL,)), (8, ())])
def test_students_t_by_moments_says_when_the_tail_decides(df, flags):
    x = stats.t(df).rvs(200_000, random_state=17)
    found = fit(x, "t", "moments")
    assert found.flags == flags
    assert math.isnan(found.stderr["df"]) == bool(flags)
    assert fit(x, "t", "mle").flags == ()


@pytest.mark.parametrize(
    ("s", "n", "flags"), [(1.0, 50_000, ()), (1.0, 500, (Flag.TAIL,)), (2.0, 50_000, (Flag.TAIL,))]
)
def test_lognormal_by_moments_says_when_the_tail_decides(s, n, flags):
    x = stats.lognorm(s).rvs(n, random_state=18)
    assert fit(x, "lognorm", "moments").flags == flags
    assert fit(x, "lognorm").flags == ()


@pytest.mark.parametrize("df", [0.5, 1.0, 4.0, 30.0])
def test_half_t_keeps_the_lower_tail(df):
    """1 − 2 sf gave 2e-5 of error at 1e-12, and 0 at 1e-17."""
    law = MAGNITUDES["t"](df)
    density = 2 * stats.t(df).pdf(0)
    for q in (1e-17, 1e-12, 1e-9):  # there the distribution function is a line
        assert law.ppf(q) == pytest.approx(q / density, rel=1e-9)
        assert law.cdf(q / density) == pytest.approx(q, rel=1e-9)
    q = np.array([1e-6, 0.1, 0.49, 0.5, 0.51, 0.9, 1 - 1e-9])
    assert law.cdf(law.ppf(q)) == pytest.approx(q, rel=1e-9)
    assert law.sf(law.isf(1e-12)) == pytest.approx(1e-12, rel=1e-9)
    assert law.ppf(0.0) == 0
    assert law.ppf(1.0) == math.inf
    assert law.cdf(math.inf) == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_pareto_shape_near_zero_is_not_that_of_a_grid(seed):
    """The score at 0 gives it: ξ = (mean square/2 − mean²)/mean² + O(ξ²), for exponentials."""
    x = np.random.default_rng([19, seed]).exponential(size=1_000_000)
    f = fit(x, "double_genpareto", "mle")
    c, scale = f.params["c"], f.params["scale"]
    # both derivatives of the likelihood vanish at the maximum, for the elements too
    z = x / scale
    by_shape = np.mean(np.log1p(c * z) / c**2 - (1 + 1 / c) * z / (1 + c * z))
    by_scale = np.mean(-1 + (1 + c) * z / (1 + c * z))
    # inverse information of (ξ, ln σ) at ξ = 0: the Newton step that is left
    assert abs(1 * by_shape - 1 * by_scale) < 2e-6
    assert abs(-1 * by_shape + 2 * by_scale) < 2e-6


def test_coarse_sketches_have_the_maximum_and_a_likelihood_fit():
    """The last cell counted at its middle; where the support ends that cost the fit."""
    for step in (1000, 2999):
        g = open_trace(DATA / "resnet20-ef.zarr").read(step, kind="corrected")
        full = fit(g, "double_genpareto", "mle")
        assert full.shape < -0.2
        for bits in (7, 5):
            coarse = fit(sketch(g, bits), "double_genpareto", "mle")
            assert coarse.shape == pytest.approx(full.shape, abs=1e-4)


def test_intervals_of_positive_parameters_begin_at_zero_at_least():
    for model, name in (
        ("dgamma", "a"),
        ("dweibull", "c"),
        ("gennorm", "beta"),
        ("laplace", "scale"),
    ):
        f = replace(fit(np.array([1.0, 2.0, 4.0]), model, "mle"), stderr={name: 999.0})
        assert f.interval(name)[0] == 0 < f.interval(name)[1]
    f = replace(
        fit(stats.expon.rvs(size=99, random_state=0), "double_genpareto"), stderr={"c": 9.0}
    )
    assert f.interval("c")[0] < -9


@pytest.mark.parametrize("n", [2000, 269_722, 1_000_000])
def test_the_closed_gammas_interval_contains_its_bias(n):
    """At n = 269,722 the interval of the shape 0.6 covered 0 of 60; the closed form is 1 % off at any n."""
    rng = np.random.default_rng(20)
    covered = 0
    for _ in range(20):
        f = fit(rng.gamma(0.6, size=n), "dgamma")
        low, high = f.interval("a")
        inside = f.interval("scale")
        covered += low <= 0.6 <= high and inside[0] <= 1 <= inside[1]
    assert covered >= 18
    assert f.stderr["a"] < 0.02


def test_models_and_distributions_have_the_same_names():
    assert set(MODELS) == set(DISTRIBUTIONS) == set(MAGNITUDES) == set(SHAPES)
    assert SIDS + CONTROLS == MODELS
    assert SIDS == ("laplace", "dgamma", "double_genpareto")  # SIDCo's three
    assert {model for model, _ in SOLVERS} == set(MODELS)
    assert {method for _, method in SOLVERS} == set(METHODS)
    for model in MODELS:
        assert DISTRIBUTIONS[model].shapes == SHAPES[model]


@pytest.mark.slow
@every(("model", "method"), SOLVERS)
def test_recovery_and_coverage(model, method):
    """500 samples of 2,000: bias within four standard errors of the mean beyond what theory allows (1.5 % for the
    gamma's closed form, 3–4 % for a moment shape and Student's df, whose bias is of order 1/n); 95 % intervals within
    3.5 binomial deviations, or conservative."""
    recovery = runpy.run_path(str(ROOT / "benchmarks" / "recovery.py"))
    r = recovery["recover"](model, method, recovery["TRUTHS"][model], 2000, 500)
    assert r.failed == 0
    allowed = {
        "dgamma": 0.015 if method == "closed" else 0.005,
        "t": 0.04,
        "double_genpareto": 0.03,
    }
    for name, truth in r.truth.items():
        noise = 4 * r.deviation[name] / math.sqrt(500)
        assert abs(r.mean[name] - truth) <= noise + allowed.get(model, 0.008) * truth
        assert r.coverage[name] >= 0.95 - 3.5 * math.sqrt(0.95 * 0.05 / 500)


@pytest.mark.parametrize("c", [-0.2, 0.1, 0.5])
def test_the_pareto_likelihood_has_no_slope_at_its_maximum(c):
    x = stats.genpareto(c).rvs(3000, random_state=np.random.default_rng(3))
    f = fit(x, "double_genpareto", "mle")

    def likelihood(c, scale):
        return stats.genpareto(c, scale=scale).logpdf(x).sum()

    at = f.params["c"], f.params["scale"]
    for i, name in enumerate(("c", "scale")):
        step = 1e-3 * f.stderr[name] * (np.arange(2) == i)
        slope = (likelihood(*(at + step)) - likelihood(*(at - step))) / 2e-3
        assert abs(slope) < 1e-4, name  # of one standard error


@pytest.mark.parametrize("shape", [0.4, 1.0, 3.0])
def test_the_error_of_a_gamma_shape_by_moments_is_the_textbooks(shape):
    """2a(a + 1)/n is its asymptotic variance (Johnson, Kotz and Balakrishnan 1994, chapter 17)."""
    x = np.random.default_rng(0).gamma(shape, size=50_000)
    found = fit(x, "dgamma", "moments")
    a = found.params["a"]
    assert found.stderr["a"] == pytest.approx(math.sqrt(2 * a * (a + 1) / x.size), rel=1e-6)
