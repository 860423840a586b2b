from __future__ import annotations

import math
from dataclasses import asdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import DATA
from scipy import optimize, stats
from scipy.special import ndtri
from support.every import every

from gradstats import thresholds
from gradstats.errors import InputError
from gradstats.statistics.fitting import as_magnitudes, fit
from gradstats.statistics.pot import (
    choose_threshold,
    mean_excess,
    mixture,
    parameter_stability,
    stages,
    tail_quantile,
)
from gradstats.statistics.pot.choice import _forward_stop, _halves, _shapes, _stable
from gradstats.statistics.pot.peaks import covariance, threshold_of
from gradstats.statistics.pot.quantile import _extrapolate
from gradstats.statistics.solution import FitError
from gradstats.trace import open_trace

N = 100_000


def signed(magnitudes, seed=0):
    return magnitudes * np.random.default_rng(seed).choice([-1.0, 1.0], magnitudes.size)


def pareto(c, n=N, seed=1, scale=1.0):
    return signed(stats.genpareto(c, scale=scale).rvs(n, random_state=seed), seed)


def coarse(x):
    from gradstats.statistics.fitting import sketch

    return sketch(x).coarsen(7)


def uniform_below_pareto(share, n=N, seed=0):
    """Uniform on (0, 1) with weight 1 − share; beyond 1 generalized Pareto."""
    rng = np.random.default_rng(seed)
    above = rng.random(n) < share
    tail = 1 + stats.genpareto(0.2, scale=0.5).rvs(n, random_state=rng)
    return signed(np.where(above, tail, rng.random(n)), seed)


class TestMeanExcess:
    def test_is_constant_for_laplace(self):
        rows = mean_excess(stats.laplace(scale=3.0).rvs(N, random_state=1))
        assert len(rows) == 20
        assert rows[0].ratio == 0.5
        assert rows[-1].n == pytest.approx(100, abs=1)
        assert all(a.threshold < b.threshold for a, b in pairwise(rows))
        for row in rows:
            assert row.mean == pytest.approx(3.0, rel=4 / math.sqrt(row.n))
            half = 1.96 * row.mean / math.sqrt(row.n)  # sd is the mean for an exponential
            assert row.high - row.mean == pytest.approx(half, rel=0.3)
            assert row.mean - row.low == pytest.approx(row.high - row.mean)

    def test_rises_with_slope_of_the_shape(self):
        c = 0.2
        rows = mean_excess(pareto(c), [0.5, 0.1])
        slope = (rows[1].mean - rows[0].mean) / (rows[1].threshold - rows[0].threshold)
        assert slope == pytest.approx(c / (1 - c), abs=4 * rows[1].mean / math.sqrt(rows[1].n))

    def test_is_the_plain_mean_on_known_values(self):
        x = np.array([1.0, -2.0, 3.0, 4.0, 0.0, -8.0])
        (half, everything) = mean_excess(x, [0.4, 1.0])
        assert (half.n, half.threshold) == (2, 3.5)
        assert half.mean == pytest.approx(((4 - 3.5) + (8 - 3.5)) / 2)
        assert (everything.n, everything.threshold) == (5, 0.0)
        assert everything.mean == pytest.approx(18 / 5)
        sd = np.std([1, 2, 3, 4, 8], ddof=1)
        assert everything.high == pytest.approx(18 / 5 + ndtri(0.975) * sd / math.sqrt(5))

    def test_one_exceedance_has_no_interval_and_constants_have_none(self):
        (one,) = mean_excess(np.arange(1.0, 6.0), [0.2])
        assert one.n == 1
        assert math.isnan(one.low)
        (none,) = mean_excess(np.full(50, 2.0), [0.5])
        assert none.n == 0
        assert math.isnan(none.mean)


class TestStability:
    @pytest.mark.parametrize("method", ["mle", "pwm"])
    def test_shape_and_modified_scale_stay(self, method):
        for row in parameter_stability(pareto(0.3, scale=2.0), method=method):
            # four standard errors: the interval is 1.96 of them
            assert row.status == ""
            assert abs(row.c - 0.3) <= 4 / 1.96 * (row.c_high - row.c)
            assert abs(row.scale - 2.0) <= 4 / 1.96 * (row.scale_high - row.scale)

    def test_covers_zero_for_laplace(self):
        rows = parameter_stability(stats.laplace().rvs(N, random_state=3), [0.5, 0.1, 0.01])
        assert all(row.c_low <= 0 <= row.c_high for row in rows)
        assert all(row.scale_low <= 1 <= row.scale_high for row in rows)

    def test_modified_scales_interval_is_that_of_the_likelihood(self):
        row = parameter_stability(pareto(0.1), [0.1])[0]
        over = as_magnitudes(pareto(0.1)).excesses(row.threshold)
        f = fit(over, "double_genpareto", "mle")
        c, s, n, u = f.params["c"], f.params["scale"], row.n, row.threshold
        assert row.scale == pytest.approx(s - c * u, rel=1e-3)

        def loss(shape, modified):
            return (
                -stats.genpareto(shape, scale=modified + shape * u).logpdf(over.middle)
                @ over.weight
            )

        # at either end, the best shape loses half of chi-squared's 95 % quantile
        for end in (row.scale_low, row.scale_high):
            best = optimize.minimize_scalar(loss, args=(end,), bounds=(c - 0.2, c + 0.2)).fun
            assert best - loss(c, row.scale) == pytest.approx(stats.chi2(1).ppf(0.95) / 2, rel=0.02)
        # with many excesses it is nearly the delta method's: var σ + u² var ξ − 2u cov
        variance = (2 * s**2 * (1 + c) + u**2 * (1 + c) ** 2 + 2 * u * s * (1 + c)) / n
        width = 2 * 1.96 * math.sqrt(variance)
        assert row.scale_high - row.scale_low == pytest.approx(width, rel=0.02)

    @pytest.mark.parametrize(
        ("method", "c"),
        [("mle", 0.2), ("mle", -0.2), ("pwm", 0.2), ("pwm", -0.2), ("closed", -0.2)],
    )
    def test_covariance_is_that_of_repeated_fits(self, method, c):
        rng = np.random.default_rng(5)
        found = []
        for _ in range(200):
            x = stats.genpareto(c, scale=2).rvs(2000, random_state=rng)
            f = fit(x, "double_genpareto", method)
            found.append((f.params["c"], f.params["scale"]))
        seen, told = np.cov(np.array(found).T), covariance(f)
        assert np.allclose(np.diag(told), np.diag(seen), rtol=0.3)  # sd of a variance: 10 %
        assert told[0, 1] == pytest.approx(seen[0, 1], rel=0.3)

    @pytest.mark.parametrize("method", ["mle", "closed", "moments"])
    def test_shapes_are_compared_with_the_variance_of_their_difference(self, method):
        """The variance of an efficient estimate falls by what is left out; that of another is at most the sum."""
        here, further = (
            SimpleNamespace(method=method, stderr={"c": 0.1}, count=n, params={"c": c})
            for n, c in ((400, 0.0), (100, 0.3))
        )
        variance = 0.1**2 * (4 - 1 if method == "mle" else 4 + 1)
        expected = 2 * stats.norm.sf(0.3 / math.sqrt(variance))
        assert _stable({1.0: here, 2.0: further}, 1.0) == pytest.approx(expected)

    def test_stages_end_where_one_has_no_fit(self):
        x = np.append(np.linspace(0.1, 1.0, 2000), np.full(500, 5.0))
        found = stages(x, 0.01, 4, "double_genpareto")
        assert [bool(stage.status) for stage in found] == [False] * (len(found) - 1) + [True]

    @pytest.mark.parametrize("c", [0.2, -0.2])
    def test_covariance_by_probability_weighted_moments_is_that_of_their_formulas(self, c):
        """Of 4,000 samples, fitted here: a covariance is known to 3 %."""
        n, rng = 2000, np.random.default_rng(6)
        x = np.sort(stats.genpareto(c, scale=2).rvs((4000, n), random_state=rng), axis=1)
        a0 = x.mean(axis=1)
        a1 = (x * (n - np.arange(1, n + 1)) / (n - 1)).mean(axis=1)
        seen = np.cov(2 - a0 / (a0 - 2 * a1), 2 * a0 * a1 / (a0 - 2 * a1))
        told = covariance(fit(x[0], "double_genpareto", "pwm"))
        # the fit told of has a shape of its own, known to a few percent
        assert told[0, 1] / math.sqrt(told[0, 0] * told[1, 1]) == pytest.approx(
            seen[0, 1] / math.sqrt(seen[0, 0] * seen[1, 1]), rel=0.05
        )

    def test_a_threshold_without_fit_is_a_row(self):
        x = np.append(np.linspace(0.1, 1.0, 200), np.full(50, 5.0))
        rows = parameter_stability(x, [0.5, 0.1, 0.2])
        assert [bool(row.status) for row in rows] == [False, True, True]
        assert math.isnan(rows[2].c)
        assert math.isnan(rows[2].scale_high)

    def test_an_exponential_tail_is_rejected_as_rarely_as_it_says(self):
        """Far out, where a correction for fifty layers reads p: ξ√n is below 0.005 in 1.2 % of samples of 200."""
        rng = np.random.default_rng(4)
        p = [
            parameter_stability(rng.exponential(size=200), [1.0])[0].p_exponential
            for _ in range(1500)
        ]
        for level in (0.05, 0.005):
            assert np.mean(np.array(p) <= level) <= level + 3.5 * math.sqrt(level / 1500)
        assert parameter_stability(pareto(0.3), [0.1])[0].p_exponential < 1e-6
        assert math.isnan(parameter_stability(pareto(0.3), [0.1], "pwm")[0].p_exponential)

    def test_flags_come_along(self):
        (row,) = parameter_stability(pareto(0.6), [0.5], "moments")
        assert any("1/4" in flag for flag in row.flags)
        assert math.isnan(row.c_low)
        assert math.isnan(row.scale_low)


def test_excesses_over_a_cut_cell_are_a_whole_number():
    m = coarse(pareto(0.2)).magnitudes
    for threshold in np.linspace(0.1, 8.0, 50):
        over = m.excesses(threshold)
        assert over.count == over.weight.sum()
        assert over.count == pytest.approx(m.exceedances(threshold), abs=0.5 + 1e-6)


class TestStages:
    @every(
        ("rule", "model"),
        [("sidco-e", "laplace"), ("sidco-p", "double_genpareto"), ("sidco-gp", "dgamma")],
    )
    @every("zeros", [0.0, 0.3])
    @every("n", [20_000, 200_000])  # every value known, and a histogram
    def test_agrees_with_the_estimator(self, rule, model, zeros, n):
        x = stats.t(5).rvs(n, random_state=2).astype(np.float32)
        x[: int(zeros * n)] = 0
        cls = {"sidco-e": "SIDCoE", "sidco-p": "SIDCoP", "sidco-gp": "SIDCoGP"}[rule]
        for number in (1, 2, 3, 4):
            expected = getattr(thresholds, cls)(stages=number).estimate(x, 0.001)
            found = stages(x, 0.001, number, model)
            assert len(found) == number
            assert found[-1].threshold == pytest.approx(expected.threshold, rel=5e-3)
            for stage, seen in zip(found, expected.details["stages"], strict=True):
                assert stage.asked == pytest.approx(seen["ratio"])
                assert stage.n == pytest.approx(seen["count"], rel=0.01, abs=5)
                beyond = np.count_nonzero(np.abs(x) >= stage.threshold)
                assert stage.achieved == pytest.approx(beyond / stage.n, rel=0.02, abs=2 / stage.n)

    def test_models_and_goodness_of_each(self):
        x = stats.dgamma(0.5).rvs(N, random_state=1)
        first, second, third = stages(x, 0.01, 3, "dgamma")
        assert [s.fit.model for s in (first, second, third)] == [
            "dgamma",
            "double_genpareto",
            "double_genpareto",
        ]
        assert [s.stage for s in (first, second, third)] == [1, 2, 3]
        assert first.ks < 0.01
        assert stages(x, 0.01, 3)[0].ks > 0.1  # Laplace is not
        assert first.asked * second.asked * third.asked == pytest.approx(0.01)

    def test_keeping_every_nonzero_element_has_no_stage(self):
        x = np.zeros(1000)
        x[:10] = np.arange(1, 11)
        assert stages(x, 0.01, 3) == []
        assert len(stages(x, 0.009, 1)) == 1

    def test_ends_where_nothing_is_left_or_nothing_fits(self):
        assert [s.achieved for s in stages(np.ones(100), 0.1, 3)][-1] == 0.0
        (only,) = stages(np.ones(100), 0.1, 3, "double_genpareto")
        assert only.fit is None
        assert "equal" in only.status
        assert math.isnan(only.threshold)

    def test_refuses(self):
        x = np.arange(1.0, 100.0)
        for args in [(0.1, 0), (0.0, 2), (0.1, 2, "norm"), (0.1, 2, "laplace", 1.5)]:
            with pytest.raises(InputError):
                stages(x, *args)
        with pytest.raises(InputError, match="no method"):
            stages(x, 0.1, 2, "dgamma", 0.25, "pwm")


def choice_halves_are_disjoint(m):
    first, second = _halves(m, np.random.default_rng(0))
    both = np.sort(np.concatenate([first.middle, second.middle]))
    return np.array_equal(both, m.middle) and abs(first.count / m.count - 0.5) < 0.02


class TestForwardStop:
    def test_is_the_formula(self):
        p = [0.001, 0.01, 0.02, 0.9, 0.5]
        means = -np.cumsum(np.log1p(-np.array(p))) / np.arange(1, 6)
        expected = max((k for k in range(1, 6) if means[k - 1] <= 0.05), default=0)
        assert _forward_stop(p, 0.05) == expected == 3

    def test_edges(self):
        assert _forward_stop([], 0.05) == 0
        assert _forward_stop([1.0, 0.001], 0.05) == 0
        assert _forward_stop([0.3], 0.05) == 0
        assert _forward_stop([0.01], 0.05) == 1
        assert _forward_stop([math.nan, 0.5], 0.05) == 1


ACCEPTING = SimpleNamespace(p_value=0.5)
"""What a test of goodness says of an excess distribution that holds; for tests of what follows from such answers."""


class TestChoice:
    def test_finds_where_the_tail_begins(self):
        choice = choose_threshold(uniform_below_pareto(0.1), replicates=99, splits=1)
        assert choice.threshold >= 1.0
        assert choice.ratio <= 0.1
        low = [c for c in choice.candidates if c.threshold < 1]
        assert len(low) == 3
        assert all(c.p_value <= 0.05 for c in low)
        assert 3 <= choice.rejected <= 4
        assert choice.note == ""

    @pytest.mark.slow
    def test_keeps_the_lowest_of_a_pure_tail(self):
        kept = 0
        for seed in range(6):
            x, ratios = pareto(0.3, seed=seed), [0.5, 0.1, 0.02]
            choice = choose_threshold(x, ratios, replicates=40, size=500, seed=seed, splits=1)
            kept += choice.rejected == 0
        assert kept >= 5

    def test_none_if_all_are_rejected(self):
        choice = choose_threshold(
            uniform_below_pareto(0.1), [0.3, 0.5], replicates=40, on_progress=lambda: None
        )
        assert [c.ratio for c in choice.candidates] == [0.5, 0.3]
        assert choice.ratio is None
        assert choice.threshold is None
        assert choice.rejected == 2
        assert "every candidate" in choice.note

    def test_shape_agrees_with_all_further_ones_on_a_captured_gradient(self):
        """Tests of 1000 excesses each accept the largest half, whose ξ = 0.29 the largest hundredth (0.13) denies."""
        gradient = open_trace(DATA / "resnet20.zarr").read(2999, kind="gradient")
        ratios = [0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001]
        choice = choose_threshold(gradient, ratios, replicates=40, splits=1)
        assert choice.ratio == 0.001
        before = choice.candidates[: choice.rejected]
        assert all(c.p_stable < 0.001 for c in before)
        assert sum(c.p_value > 0.05 for c in before) >= 3
        assert choice.candidates[-1].p_stable > 0.05
        assert choice.estimate.c_low < 0 < choice.estimate.c_high

    def test_one_shape_is_rejected_as_often_as_it_says(self):
        rng, rejected = np.random.default_rng(6), 0
        law = stats.genpareto(0.2)
        for _ in range(200):
            m = as_magnitudes(law.rvs(2000, random_state=rng))
            thresholds = [threshold_of(m, k) for k in (2000, 1000, 500, 250, 125)]
            rejected += _stable(_shapes(m, thresholds, "mle"), thresholds[0]) <= 0.1
        assert abs(rejected / 200 - 0.1) <= 3.5 * math.sqrt(0.1 * 0.9 / 200)

    @pytest.mark.slow
    @pytest.mark.parametrize("law", [stats.genpareto(-0.2), stats.expon(), stats.lognorm(1)])
    def test_estimate_covers_whatever_was_chosen(self, law, monkeypatch):
        """The fit of the other half, at the threshold chosen, against that of infinitely many elements."""
        monkeypatch.setattr("gradstats.statistics.pot.choice.bootstrap", lambda *_, **__: ACCEPTING)
        grid, rng, hits, known, chosen = (
            (np.arange(1000) + 0.5) / 1000,
            np.random.default_rng(2),
            0,
            0,
            set(),
        )
        for seed in range(150):
            choice = choose_threshold(law.isf(rng.random(6000)), seed=seed, splits=1)
            if choice.estimate is None:
                continue
            known += 1
            chosen.add(choice.ratio)
            beyond = law.isf(law.sf(choice.threshold) * grid) - choice.threshold
            truth = fit(np.maximum(beyond, 1e-12), "double_genpareto", "mle").params["c"]
            hits += choice.estimate.c_low <= truth <= choice.estimate.c_high
        assert known >= 140
        assert len(chosen) > 1
        assert abs(hits / known - 0.95) <= 3.5 * math.sqrt(0.95 * 0.05 / known)

    def test_the_estimate_is_of_elements_that_the_choice_did_not_see(self):
        x = pareto(0.2, 20_000)
        choice = choose_threshold(x, [0.5, 0.1], replicates=40)
        everything = parameter_stability(x, [choice.ratio])[0]
        assert choice.estimate.threshold == choice.threshold == everything.threshold
        assert choice.estimate.n == pytest.approx(everything.n / 2, rel=0.05)
        wider = (choice.estimate.c_high - choice.estimate.c_low) / (
            everything.c_high - everything.c_low
        )
        assert wider == pytest.approx(math.sqrt(2), rel=0.1)
        assert choice_halves_are_disjoint(as_magnitudes(x))

    def test_candidates_have_the_excesses_of_both_halves_and_tests_those_of_one(self):
        x = pareto(0.2, 20_000)
        choice = choose_threshold(x, [0.5, 0.1, 0.02], replicates=40, size=300, splits=1)
        assert [c.ratio for c in choice.candidates] == [0.5, 0.1, 0.02]
        for c in choice.candidates:
            assert c.n == np.count_nonzero(np.abs(x) > c.threshold)
            assert c.n == pytest.approx(c.ratio * x.size, rel=1e-3)
        *most, last = choice.candidates
        assert {c.tested for c in most} == {300}
        # a random half of 400
        assert last.tested == pytest.approx(last.n / 2, abs=5 * math.sqrt(last.n) / 2)

    def test_is_repeatable_and_reports_progress(self):
        x = pareto(0.1, 20_000)
        ticks = []
        kwargs = {"ratios": [0.5, 0.05], "replicates": 20, "size": 200, "alpha": 0.1}
        first = choose_threshold(x, **kwargs, on_progress=lambda: ticks.append(1))
        assert len(ticks) == 5 * 2 * 20
        assert asdict(first) == asdict(choose_threshold(x, **kwargs))
        assert first.candidates != choose_threshold(x, **kwargs, seed=1).candidates
        assert "not rejected is not true" in first.note
        assert (first.size, first.replicates, first.alpha, first.seed) == (200, 20, 0.1, 0)
        assert first.candidates[0].tested == 200

    @pytest.mark.slow
    def test_other_seeds_answer_within_the_range_of_one(self):
        """Where the law is known: every threshold of a Pareto tail and of a Laplace law holds, none of a comb."""
        rng = np.random.default_rng(0)
        comb = np.floor(40 * rng.random(20_000)) + rng.uniform(0, 0.1, 20_000)
        laws = {0.5: [pareto(0.3, 20_000), rng.laplace(size=20_000)], None: [comb]}
        for truth, samples in laws.items():
            for x in samples:
                for seed in range(2):
                    choice = choose_threshold(x, [0.5, 0.1], size=200, replicates=40, seed=seed)
                    assert choice.ratio == truth
                    assert truth in choice.range

    def test_the_median_of_the_splits_is_chosen(self, monkeypatch):
        x, ratios = pareto(0.3, 20_000), [0.5, 0.2, 0.05]
        monkeypatch.setattr("gradstats.statistics.pot.choice.bootstrap", lambda *_, **__: ACCEPTING)
        for rejected, ratio, far, near, note in [
            ([0, 1, 2, 3, 1], 0.2, None, 0.5, "the 5 splits answer 0.05 to 0.5, and none in 1"),
            ([3, 0, 3, 3, 0], None, None, 0.5, "rejected by 3 of 5 splits"),
            ([3, 0, 3, 0, 0], 0.5, None, 0.5, "the 5 splits answer 0.5, and none in 2"),
            ([1, 1, 1, 1, 1], 0.2, 0.2, 0.2, ""),
        ]:
            found = iter(rejected)
            monkeypatch.setattr(
                "gradstats.statistics.pot.choice._forward_stop", lambda *_, f=found: next(f)
            )
            choice = choose_threshold(x, ratios, replicates=20, size=500, alpha=0.1)
            assert (choice.ratio, choice.range) == (ratio, (far, near))
            assert note in choice.note
            assert bool(choice.note) == bool(note)
            assert choice.candidates[choice.rejected :] == () if ratio is None else choice.estimate
            assert len(choice.splits) == 5

    def test_skips_too_few_exceedances_and_says_so(self):
        choice = choose_threshold(pareto(0.1, 1000), replicates=20, alpha=0.1, size=100)
        assert [c.n >= 100 for c in choice.candidates] == [True] * len(choice.candidates)
        assert 0 < len(choice.candidates) < 8
        nothing = choose_threshold(np.arange(1.0, 6.0))
        assert (nothing.candidates, nothing.ratio) == ((), None)
        assert "nothing was tested" in nothing.note

    def test_a_candidate_without_fit_is_never_chosen(self):
        x = np.append(np.linspace(0.01, 1, 1000), np.full(300, 3.0))
        choice = choose_threshold(x, [0.2], replicates=20, alpha=0.1)
        assert choice.candidates == () or choice.ratio is None
        edge = 1 - np.linspace(0.001, 1, 2000) ** 4  # beyond ξ = −1 there is no maximum
        unfit = choose_threshold(edge, [0.5], replicates=20, alpha=0.1)
        if math.isnan(unfit.candidates[0].p_value):
            assert unfit.ratio is None
            assert unfit.candidates[0].status

    def test_refuses(self):
        x = pareto(0.1, 1000)
        for kwargs in [
            {"alpha": 0},
            {"replicates": 39},  # 1 − (1 − 1/40)² is above 0.05
            {"splits": 0},
            {"ratios": [2.0]},
            {"seed": -1},
        ]:
            with pytest.raises(InputError):
                choose_threshold(x, **kwargs)


class TestTailQuantile:
    @pytest.mark.parametrize(
        ("c", "zeros", "ratio"),
        [
            (0.0, 0, 0.002),
            (0.2, 1, 0.002),
            (-0.2, 1, 0.002),
            (0.2, 0, 0.09),  # near the threshold, where the share beyond it is what is uncertain
        ],
    )
    def test_interval_covers(self, c, zeros, ratio):
        n, reps = 5000, 500
        law = stats.genpareto(c)
        truth = law.isf(ratio * (1 + zeros))  # as many zeros as magnitudes double the share
        hits = 0
        rng = np.random.default_rng(7)
        for _ in range(reps):
            x = np.concatenate([law.rvs(n, random_state=rng), np.zeros(zeros * n)])
            q = tail_quantile(x, ratio, at=0.1 / (1 + zeros))
            hits += q.low <= truth <= q.high
        assert q.n == 500
        assert abs(hits / reps - 0.95) <= 3.5 * math.sqrt(0.95 * 0.05 / reps)

    @pytest.mark.parametrize("c", [-0.2, 0.2, 0.5])
    def test_interval_covers_far_out(self, c):
        """A hundred excesses, a quantile a hundred times rarer: the normal interval covered 80 to 86 %."""
        law, rng = stats.genpareto(c), np.random.default_rng(3)
        low = high = known = 0
        for _ in range(300):
            q = tail_quantile(law.rvs(1000, random_state=rng), 0.001, at=0.1)
            if math.isnan(q.low):
                continue
            known += 1
            low += q.high < law.isf(0.001)
            high += q.low > law.isf(0.001)
        assert known >= 295
        margin = 3.5 * math.sqrt(0.95 * 0.05 / known)
        assert abs((low + high) / known - 0.05) <= margin
        assert low / known <= 0.025 + margin  # all of the misses were here

    def test_agrees_with_counting_where_there_is_something_to_count(self):
        x = pareto(0.2)
        q = tail_quantile(x, 0.001)
        assert q.empirical == pytest.approx(np.sort(np.abs(x))[-100], rel=2e-3)
        assert q.value == pytest.approx(q.empirical, rel=0.1)
        assert q.low < stats.genpareto(0.2).isf(0.001) < q.high
        assert q.flags == ()
        wider = tail_quantile(x, 0.001, level=0.99)  # farther up than down, and more so
        up, down = (
            (wider.high - wider.value) / (q.high - q.value),
            (wider.value - wider.low) / (q.value - q.low),
        )
        assert down < 2.5758 / 1.96 < up < 1.1 * 2.5758 / 1.96
        assert down > 2.5758 / 1.96 / 1.1

    def test_beyond_the_data(self):
        q = tail_quantile(pareto(0.0), 1e-7)
        assert math.isnan(q.empirical)
        assert any("extrapolated" in flag for flag in q.flags)
        assert q.low < math.log(1e7) < q.high

    @every("c", [-0.4, -1e-5, -1e-9, 0.0, 1e-9, 2e-5, 0.3, 1.5])
    def test_slopes_are_the_derivatives(self, c):
        def excess(c, scale, reach):
            return scale * np.expm1(c * reach) / c

        scale, reach, h = 2.0, math.log(500), 1e-3
        value, slopes, by_share = _extrapolate(c, scale, reach)
        if abs(c) > 1e-8:
            assert value == pytest.approx(excess(c, scale, reach), rel=1e-8)
        # the last coefficients of a fourth-order central difference, none of which is at c = 0
        ends = [excess(c + i * h, scale, reach) for i in (-2, -1, 1, 2)]
        assert slopes[0] == pytest.approx(np.dot([1, -8, 8, -1], ends) / (12 * h), rel=1e-5)
        assert slopes[1] == pytest.approx(value / scale)
        step = 1e-6
        up, down = (_extrapolate(c, scale, reach + d)[0] for d in (step, -step))
        assert by_share == pytest.approx((up - down) / (2 * step), rel=1e-6)

    def test_mostly_zeros(self):
        x = np.zeros(100_000)
        x[:1000] = stats.expon.rvs(size=1000, random_state=1)
        q = tail_quantile(x, 0.001)  # one in ten of the non-zero ones
        assert (q.threshold, q.n) == (0.0, 1000)
        assert q.value == pytest.approx(math.log(10), rel=0.15)
        none = tail_quantile(x, 0.02)
        assert none.value == none.empirical == 0.0
        assert math.isnan(none.low)

    def test_refuses(self):
        x = pareto(0.1, 1000)
        for kwargs in [
            {"ratio": 0.05},
            {"ratio": 0.0},
            {"ratio": 0.01, "at": 1.5},
            {"ratio": 0.01, "level": 1},
        ]:
            with pytest.raises(InputError):
                tail_quantile(x, **kwargs)
        # all magnitudes are equal, or half of them the largest
        for tied in np.ones(1000), np.repeat([1.0, -2.0], 500):
            with pytest.raises(FitError, match="the largest magnitudes are tied, and none exceeds"):
                tail_quantile(tied, 0.01)

    def test_ties_that_leave_too_few_beyond_the_threshold_are_counted(self):
        """0.7 % lie above a level that holds 10 %: the threshold of 5 % is beyond it."""
        x = np.repeat(np.arange(1.0, 8), [7000, 1930, 1000, 28, 21, 14, 7])
        for ratio, value in ((0.01, 3.0), (0.007, 4.0)):
            q = tail_quantile(x, ratio, 0.05)
            assert (q.n, q.value, q.empirical) == (70, value, value)
            assert math.isnan(q.low)
            assert q.flags[-1].endswith("counted")
        modelled = tail_quantile(x, 0.005, 0.05)
        assert 3.5 < modelled.value < 5
        assert not modelled.flags[-1].endswith("counted")

    def test_no_error_theory_is_no_interval(self):
        q = tail_quantile(pareto(0.6), 0.001, method="moments")
        assert math.isfinite(q.value)
        assert math.isnan(q.low)
        assert q.flags


class TestMixture:
    def layers(self, n=20_000, seed=0):
        # 50 log-normal scales, evenly over their distribution: what a random fifty are on average
        scales = np.exp(1.5 * ndtri((np.arange(50) + 0.5) / 50))
        rng = np.random.default_rng(seed)
        return {f"layer{i}": rng.laplace(scale=s, size=n) for i, s in enumerate(scales)}

    def test_heaviness_of_laplace_layers_is_their_scales(self):
        found = mixture(self.layers())
        assert found.pooled.c == pytest.approx(0.50, abs=0.06)
        assert found.normalised.c == pytest.approx(-0.01, abs=0.02)
        assert found.from_mixing == found.pooled.c - found.normalised.c
        assert found.from_mixing > 0.4
        assert len(found.layers) == 50
        error = (1.0) / math.sqrt(2000)
        assert all(abs(own.c) < 4.5 * error for own in found.layers.values())

    def test_one_layer_has_nothing_mixed(self):
        found = mixture({"only": pareto(0.3)})
        assert found.from_mixing == pytest.approx(0.0, abs=1e-6)
        assert found.pooled.c == pytest.approx(found.layers["only"].c, abs=0.003)

    def test_real_heaviness_stays(self):
        found = mixture({f"l{i}": pareto(0.3, seed=i, scale=10.0**-i) for i in range(4)})
        assert found.normalised.c == pytest.approx(0.3, abs=4 * 1.3 / math.sqrt(0.1 * 4 * N))

    def test_layers_that_cannot_be_fitted(self):
        found = mixture(
            {
                "good": pareto(0.1),
                "small": pareto(0.1, 50),
                "zero": np.zeros(10),
                "same": np.full(5000, 0.5),
            }
        )
        assert found.layers["good"].status == ""
        assert "fewer than 100" in found.layers["small"].status
        assert found.layers["zero"].status
        assert found.layers["same"].status
        assert math.isnan(found.layers["zero"].c)
        assert math.isfinite(found.from_mixing)

    def test_small_pools_have_a_status(self):
        found = mixture({"a": np.arange(1.0, 6.0)})
        assert found.pooled.status
        assert math.isnan(found.from_mixing)

    def test_refuses(self):
        with pytest.raises(InputError, match="at least one"):
            mixture({})
        with pytest.raises(FitError):
            mixture({"a": np.zeros(3)})
        with pytest.raises(InputError):
            mixture({"a": np.ones(3)}, at=0.0)


CALLS = {
    "mean_excess": mean_excess,
    "mle": parameter_stability,
    "pwm": lambda x: parameter_stability(x, method="pwm"),
    "laplace": lambda x: stages(x, 0.1, 3),
    "pareto": lambda x: stages(x, 0.1, 3, "double_genpareto"),
    "dgamma": lambda x: stages(x, 0.1, 3, "dgamma"),
    "choice": lambda x: choose_threshold(x, replicates=20, alpha=0.1),
    "quantile": lambda x: tail_quantile(x, 0.001, 0.5),
    "mixture": lambda x: mixture({"a": x}),
}


def everything(x):
    """Every function on one gradient: what they return, and the one line of those that refuse."""
    found, refused = {}, {}
    for name, call in CALLS.items():
        try:
            found[name] = call(x)
        except InputError as error:
            refused[name] = str(error)
    assert not any("\n" in refusal for refusal in refused.values())
    return found, refused


@pytest.mark.parametrize(
    "x",
    [
        np.empty(0),
        np.zeros(100),
        np.zeros(0, np.float32),
        np.full(10, np.nan),
        np.array([np.nan, np.inf, 0.0]),
    ],
)
def test_nothing_is_refused(x):
    found, refused = everything(x)
    assert found == {}
    assert set(refused.values()) == {"nothing to fit: no finite non-zero element"}


@pytest.mark.parametrize("x", [np.array([1e300, 2e300, 3e300]), np.array([1e-300, 3e-300])])
def test_squares_beyond_numbers_are_refused(x):
    found, refused = everything(x)
    assert found == {}
    assert all("rescale them" in refusal for refusal in refused.values())


@every(
    ("x", "unfit"),
    [
        (np.array([1.0]), "at least two"),
        (np.array([1.0, 2.0]), "at least two"),
        (np.arange(1.0, 6.0), "no local maximum"),
        (np.ones(1000), "nothing to fit"),
        (np.append(np.ones(1000), np.nan), "nothing to fit"),
        (np.repeat([1.0, 2.0], 500), "all magnitudes are equal"),
        (np.linspace(0, 1, 1000), "no local maximum"),
        (np.geomspace(1e-30, 1e30, 2000).astype(np.float32), ""),
        (np.full(60_000, 0.25, np.float32), "nothing to fit"),
        (np.array([5e-324] * 10 + [1.0]), "at least two"),
        (stats.genpareto(3.0).rvs(3000, random_state=1), ""),
        (stats.beta(1, 0.3).rvs(3000, random_state=1), "no local maximum"),
    ],
)
def test_odd_data_has_a_defined_answer(x, unfit):
    """`unfit` says why the upper half has no fit by maximum likelihood."""
    found, refused = everything(x)
    a = np.abs(x[np.isfinite(x) & (x != 0)].astype(float))
    assert list(refused) == (["quantile"] if unfit else [])
    for row in found["mean_excess"]:
        over = a[a > row.threshold] - row.threshold
        assert row.n == over.size
        assert math.isnan(row.mean) if row.n == 0 else row.mean == pytest.approx(over.mean())
        assert math.isnan(row.low) == math.isnan(row.high) == (row.n < 2)
        if row.n > 1:
            half = 1.96 * over.std(ddof=1) / math.sqrt(row.n)
            assert row.high - row.mean == pytest.approx(half, rel=1e-3, abs=1e-9 * row.mean)
    first = found["mle"][0]
    assert unfit in first.status
    # of some elements nothing is said to be empty
    assert "no finite non-zero element" not in first.status
    assert all(unfit in refusal for refusal in refused.values())
    fits = [*found["mle"], *found["pwm"], found["mixture"].pooled, found["mixture"].layers["a"]]
    for row in fits:
        assert row.n == np.count_nonzero(a > row.threshold)
        assert math.isfinite(row.c) == math.isfinite(row.scale) == (row.status == "")
        assert row.status or row.n > 1
    for name in ("laplace", "pareto", "dgamma"):
        n, threshold = a.size, 0.0
        for stage in found[name]:
            assert stage.n == n
            assert (stage.fit is None) == math.isnan(stage.achieved) == bool(stage.status)
            if stage.fit is not None:
                assert stage.threshold > threshold
                n, threshold = np.count_nonzero(a > stage.threshold), stage.threshold
                assert stage.achieved == pytest.approx(n / stage.n)
        assert found[name] or a.size == 1  # a tenth of one element is that one
    choice = found["choice"]
    assert choice.ratio is None or choice.ratio in [c.ratio for c in choice.candidates]
    assert all(math.isnan(c.p_value) == bool(c.status) for c in choice.candidates)
    if not unfit:
        quantile = found["quantile"]
        assert quantile.threshold < quantile.value
        assert quantile.n == np.count_nonzero(a > quantile.threshold)


def test_nan_is_left_out():
    x = pareto(0.2, 5000)
    assert mean_excess(np.append(x, [np.nan, np.inf])) == mean_excess(x)


def test_a_coarse_histogram_is_enough():
    x = pareto(0.3, 200_000)
    rough, ratios = coarse(x), [0.5, 0.1, 0.02]
    for a, b in zip(mean_excess(x, ratios), mean_excess(rough, ratios), strict=True):
        assert b.mean == pytest.approx(a.mean, rel=0.01)
        assert b.threshold == pytest.approx(a.threshold, rel=0.01)
        assert b.high - b.mean == pytest.approx(a.high - a.mean, rel=0.02)
    for p, q in zip(
        parameter_stability(x, ratios), parameter_stability(rough, ratios), strict=True
    ):
        assert q.c == pytest.approx(p.c, abs=0.003)
        assert q.c_high == pytest.approx(p.c_high, abs=0.004)
    one, two = stages(x, 0.001, 3)[-1], stages(rough, 0.001, 3)[-1]
    assert two.threshold == pytest.approx(one.threshold, rel=0.01)
    fine, wide = tail_quantile(x, 1e-4), tail_quantile(rough, 1e-4)
    assert wide.value == pytest.approx(fine.value, rel=0.01)
    assert wide.high == pytest.approx(fine.high, rel=0.01)
    layers = TestMixture().layers()
    full = mixture(layers)
    less = mixture({name: coarse(layer) for name, layer in layers.items()})
    assert less.pooled.c == pytest.approx(full.pooled.c, rel=0.01)
    assert less.normalised.c == pytest.approx(full.normalised.c, abs=0.003)


def test_choice_from_a_coarse_histogram():
    rough = coarse(uniform_below_pareto(0.1))
    choice = choose_threshold(rough, [0.5, 0.2, 0.09], replicates=40, alpha=0.05)
    assert choice.ratio == 0.09


def test_numpy_and_torch_are_the_same(xp):
    x = pareto(0.2, 5000).astype(np.float32)
    assert mean_excess(xp(x)) == mean_excess(x)
