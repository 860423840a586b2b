from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import DATA
from scipy import stats
from support.every import every

from gradstats import compressibility
from gradstats.errors import InputError
from gradstats.primitives.sketch import sketch
from gradstats.statistics.compressibility import (
    CONTROLS,
    Ruling,
    control,
    local_exponents,
    window_exponents,
)
from gradstats.statistics.dependence import RUN, design_effect, over_blocks
from gradstats.statistics.resampling import block_counts
from gradstats.trace import open_trace


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
        # a sketch keeps these magnitudes and has no interval by runs, which takes longer and is not asked for
        c = compressibility(sketch(rng.random(20 * k) ** -0.5), (1, k))
        covered += c.p_low <= 0.5 <= c.p_high
        hill += c.hill_low <= 0.5 <= c.hill_high
    assert 0.93 <= covered / 500 <= 0.985
    assert 0.92 <= hill / 500 <= 0.975


def test_hill_is_the_textbook_formula():
    x = np.random.default_rng(2).standard_t(3, 50_000)
    top = np.sort(np.abs(x))[::-1][:500]
    expected = np.mean(np.log(top[:-1] / top[-1]))
    assert compressibility(x, (1, 500)).hill == pytest.approx(expected)


@pytest.mark.parametrize("window", [(1, 500), (10, 500), (400, 500)])
def test_estimates_are_of_the_ranks_they_take(window):
    """The regression takes the ranks of the window, Hill's estimate all above the last one."""
    first, last = window
    x = np.random.default_rng(2).standard_t(3, 50_000)
    top = np.log(np.sort(np.abs(x))[::-1][:last])
    c = compressibility(x, window)
    slope = np.polyfit(top[first - 1 :], np.log(np.arange(first, last + 1) - 0.5), 1)[0]
    assert c.p == pytest.approx(-1 / slope)
    assert c.hill == pytest.approx(np.mean(top[:-1] - top[-1]))
    half = 1.96 / math.sqrt(last - 1)
    ends = (c.hill * (1 - half), c.hill * (1 + half))
    assert (c.hill_low, c.hill_high) == pytest.approx(ends, rel=1e-4)
    if first == 1:
        half = 1.96 * math.sqrt(2 / last)
        assert (c.p_low, c.p_high) == pytest.approx((c.p * (1 - half), c.p * (1 + half)), rel=1e-4)


def test_intervals_off_the_first_rank_are_as_wide_as_estimates_differ():
    """From both sides: the deviation of 400 estimates is known to 3.5 %."""
    rng = np.random.default_rng(9)
    samples = [sketch(x) for x in rng.random((400, 1000)) ** -0.5]  # without intervals by runs
    windows = [[compressibility(x, w) for x in samples] for w in ((10, 500), (400, 500))]
    ranges = zip(*(local_exponents(x, per_decade=1) for x in samples), strict=True)
    for found in (*windows, *list(ranges)[1:]):  # of ranks 1 to 10 an estimate is not yet normal
        halves = [(e.p_high - e.p_low) / 2 / e.p for e in found]
        assert np.ptp(halves) < 1e-9
        deviation = np.std([e.p for e in found]) / 0.5
        assert halves[0] == pytest.approx(1.96 * deviation, rel=0.14)
    borders = [(e.first, e.last) for e in local_exponents(samples[0], 1)]
    assert borders == [(1, 10), (10, 100), (100, 1000)]


def test_verdicts():
    rng = np.random.default_rng(3)
    n = 1_000_000
    heavy = compressibility(rng.pareto(1.2, n) + 1)
    assert heavy.compressible is True
    assert heavy.reason == Ruling.SHOWN
    for light in (rng.random(n), np.abs(rng.standard_normal(n)), rng.laplace(size=n)):
        found = compressibility(light)
        assert found.compressible is False
        assert found.reason == Ruling.NOT_SHOWN


def test_an_interval_with_one_half_shows_nothing():
    """p above ½ with its interval's end below, in every window: of 50 ranks, and of 500."""
    c = compressibility(np.arange(1, 5001.0) ** -0.55)
    assert set(c.windows) == {"1-50", "1-500"}
    assert min(c.windows.values()) > 0.5
    assert c.p_low < 0.5 < c.p < c.p_high
    assert c.compressible is False
    assert c.reason == Ruling.NOT_SHOWN


def test_a_verdict_takes_50_ranks_and_at_most_a_twentieth():
    magnitudes = np.arange(1, 1001.0) ** -0.9
    reasons = [compressibility(magnitudes, (1, last)).reason for last in (49, 50, 51)]
    assert reasons == [Ruling.TOO_FEW, Ruling.SHOWN, Ruling.TOO_WIDE]


@pytest.mark.parametrize("steep", [0.4, 1.5])
def test_hills_estimate_must_agree(steep):
    """In ranks 1001 to 2000 a power law of 0.9, above them another: the regression does not see those, Hill does."""
    ranks = np.arange(1, 100_001.0)
    x = np.where(ranks <= 1000, 1000**-0.9 * (ranks / 1000) ** -steep, ranks**-0.9)
    c = compressibility(x, (1001, 2000))
    assert c.p_low > 0.8
    assert c.sigma_bound < 1
    assert c.hill_low > c.p_high if steep > 1 else 0.6 < c.hill_low < c.hill_high < c.p_low
    assert c.reason == Ruling.NOT_A_POWER_LAW


def test_hills_interval_must_be_above_one_half():
    """40 steep ranks raise the regression's exponent; both intervals overlap."""
    ranks = np.arange(1, 20_001.0)
    c = compressibility(np.where(ranks <= 40, 40**0.49 / ranks, ranks**-0.51), (1, 1000))
    assert c.p_low > 0.5
    assert min(c.windows.values()) > 0.55
    assert c.hill_low < 0.5 < c.p_low < c.hill_high
    assert c.sigma_bound < 1
    assert c.reason == Ruling.NOT_A_POWER_LAW


NOISE = {
    "uniform": lambda rng, n: rng.random(n),
    "normal": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
}


@every("law", NOISE)
@every("n", [50, 60, 100, 150, 400, 1000, 2000, 10_000])
def test_noise_is_never_compressible(law, n):
    """With the largest hundred ranks as the least window, nearly all samples of 60 to 100 passed."""
    rng = np.random.default_rng(n)
    # of sketches, whose verdict is the same: runs have no say in it
    verdicts = [compressibility(sketch(NOISE[law](rng, n))).compressible for _ in range(50)]
    assert set(verdicts) == ({None} if n < 1000 else {False})


def test_a_window_is_of_the_non_zero_elements():
    x = np.zeros(1_000_000)
    x[::200] = np.random.default_rng(4).random(5000)
    c = compressibility(x)
    assert c.window == (1, 50)
    assert c.compressible is False
    assert compressibility(x, (1, 3000)).reason == Ruling.TOO_WIDE
    assert compressibility(x, (1, 3000)).compressible is None
    assert compressibility(x, (1, 40)).reason == Ruling.TOO_FEW


def test_windows_that_disagree_give_no_verdict():
    """A power law above rank 2000 of a million, constant below: shown in the top 0.1 %, not in the top 10 %."""
    ranks = np.arange(1, 1_000_001.0)
    x = np.maximum(ranks**-0.8, 2000**-0.8) * (1 - 1e-9 * ranks)
    c = compressibility(x)
    assert list(c.windows) == ["1-1000", "1-10000", "1-100000"]
    assert c.windows["1-1000"] > 0.7
    assert c.windows["1-100000"] < 0.5
    assert c.compressible is None
    assert c.reason == Ruling.WINDOW


def test_windows_are_those_asked_for_by_themselves():
    x = np.random.default_rng(8).standard_t(2, 200_000)
    found = compressibility(x).windows
    for ranks, p in found.items():
        first, last = map(int, ranks.split("-"))
        assert compressibility(x, (first, last)).p == pytest.approx(p, rel=1e-4)
    assert {"1-200", "1-2000", "1-20000"} == set(found)


def test_a_bound_that_breaks_is_not_a_power_law():
    """Magnitudes that bend upwards beyond the window: c₂ k^(½−p) promises less than is left."""
    ranks = np.arange(1, 100_001.0)
    x = np.where(ranks <= 1000, ranks**-1.5, 1000**-1.5 * (ranks / 1000) ** -0.7)
    c = compressibility(x)
    assert c.sigma_bound > 1
    assert min(c.windows.values()) > 0.5
    assert c.compressible is None
    assert c.reason == Ruling.NOT_A_POWER_LAW


@pytest.mark.parametrize(("name", "disagree"), [("resnet20", 2), ("resnet20-ef", 2)])
def test_no_captured_gradient_is_called_compressible(name, disagree):
    """At step 10 the largest 1 % alone say p = 0.73, where σ_k breaks its bound and Hill says 0.63."""
    trace = open_trace(DATA / f"{name}.zarr")
    found = [compressibility(trace.read(step, kind="gradient")) for step in trace.steps()]
    assert [c.compressible for c in found] == [None] * disagree + [False] * (4 - disagree)


def test_few_layers_have_enough_elements_for_a_verdict():
    trace = open_trace(DATA / "resnet20.zarr")
    gradient = trace.read(10, kind="gradient")
    found = [compressibility(gradient[layer.slice]) for layer in trace.layers]
    assert not any(c.compressible for c in found)
    small = [c for c, layer in zip(found, trace.layers, strict=True) if layer.numel < 1000]
    assert all(c.compressible is None for c in small)
    assert len(small) > 30


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_are_the_quantiles_of_their_law_and_fail(name):
    decay, magnitudes = control(name, 270_000)
    law = stats.expon if name == "laplace" else getattr(stats, name)
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
    assert c.compressible is None
    assert c.reason == Ruling.TOO_FEW


def test_constants_do_not_decay():
    c = compressibility(np.full(1000, 2.0))
    assert (c.p, c.p_low, c.p_high, c.hill, c.c1) == (0, 0, 0, 0, 2)


class TestBestKError:
    """σ_k, what is left after keeping the k largest (SIDCo property 1)."""

    def test_a_power_law_keeps_the_promise(self):
        magnitudes = np.arange(1, 1_000_001.0) ** -0.8
        c = compressibility(magnitudes, (10, 1000))
        naive = [math.sqrt((magnitudes[k:] ** 2).sum()) for k in (10, 1000)]
        assert c.sigma_p == pytest.approx(math.log(naive[0] / naive[1]) / math.log(100), rel=1e-6)
        assert c.sigma_p == pytest.approx(0.3, abs=0.02)
        assert 0.9 < c.sigma_bound <= 1

    def test_from_rank_1_on_it_falls_a_little_slower_than_the_promise(self):
        c = compressibility(np.arange(1, 1_000_001.0) ** -0.834)
        assert c.sigma_p == pytest.approx(0.321, abs=1e-3)  # p − ½ is 0.334
        assert c.compressible is True

    def test_a_light_tail_hardly_falls(self):
        x = np.random.default_rng(5).random(100_000)
        c = compressibility(x)
        assert c.sigma_p == pytest.approx(0, abs=0.005)
        assert math.isnan(c.sigma_bound)

    def test_rounding_is_not_an_error(self):
        x = np.r_[np.arange(1, 101.0) ** -2, np.full(10_000, 1e-12)]
        c = compressibility(x, (1, 5000))
        assert math.isfinite(c.sigma_p)
        for scale, power in ((1, -8.0), (1e200, -0.9)):  # nothing to measure, and beyond the range
            c = compressibility(scale * np.arange(1, 5001.0) ** power)
            assert min(c.windows.values()) > 0.8
            assert math.isnan(c.sigma_bound)
            assert (c.compressible, c.reason) == (None, Ruling.UNCHECKED)


def test_local_exponents_of_laplace_rise_and_a_line_through_them_would_mislead():
    """Of a million: 0.12, 0.18, 0.31 over ranks 10 to 10³, 10³ to 10⁴, 10⁴ to 10⁵; 0.645 for uniform noise."""
    rng = np.random.default_rng(6)
    x = rng.laplace(size=1_000_000)
    by = {(e.first, e.last): e for e in local_exponents(x, per_decade=1)}
    assert by[1000, 10_000].p == pytest.approx(0.18, abs=0.02)
    assert by[10_000, 100_000].p == pytest.approx(0.31, abs=0.02)
    assert by[100, 1000].p < by[1000, 10_000].p < by[10_000, 100_000].p
    uniform = np.sort(rng.random(100_000))[::-1]
    slope = np.polyfit(np.log(np.arange(1, uniform.size + 1)), np.log(uniform), 1)[0]
    assert -slope > 0.5  # what a line through the whole plot says
    assert all(e.p < 0.1 for e in local_exponents(uniform) if e.last <= 10_000)


def test_local_exponents_of_a_power_law_are_the_same_everywhere():
    found = local_exponents(np.arange(1, 100_001.0) ** -0.7)
    assert len(found) >= 6
    assert all(e.p == pytest.approx(0.7, abs=0.05) for e in found[1:])
    assert all(e.p_low < e.p < e.p_high for e in found)
    assert [e.first for e in found[1:]] == [e.last for e in found[:-1]]
    assert local_exponents(np.zeros(10)) == []


@pytest.mark.parametrize("bits", [7, 10])
def test_from_a_sketch(bits):
    x = np.random.default_rng(7).standard_t(2, 300_000).astype(np.float32)
    full, rough = compressibility(x), compressibility(sketch(x, bits))
    assert rough.p == pytest.approx(full.p, rel=0.01)
    assert rough.hill == pytest.approx(full.hill, rel=0.01)
    assert rough.sigma_p == pytest.approx(full.sigma_p, rel=0.02)
    assert rough.window == full.window


def test_windows():
    x = np.random.default_rng(0).laplace(size=5000)
    assert compressibility(x, (10, 300)).window == (10, 300)
    assert compressibility(x, (1, 10**9)).window == (1, 5000)
    for bad in ((0, 10), (5, 5), (9, 2)):
        with pytest.raises(InputError, match="window"):
            compressibility(x, bad)


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "least", "most"), [(1, 0.88, 1.0), (20, 0.0, 0.55)])
def test_interval_by_runs_covers_clusters(cluster, least, most):
    """Clusters of twenty alike: the interval for independent elements covers 39 %, that by runs 91 %."""
    rng, runs, plain = np.random.default_rng(7), 0, 0
    for _ in range(80):
        x = np.repeat(rng.random(100_000 // cluster) ** -0.5, cluster)
        c = compressibility(x * np.exp(0.01 * rng.standard_normal(x.size)))
        runs += c.runs_low <= 0.5 <= c.runs_high
        plain += c.p_low <= 0.5 <= c.p_high
    assert runs / 80 >= 0.91 - 3.5 * math.sqrt(0.91 * 0.09 / 80)
    assert least <= plain / 80 <= most


def test_blocks_need_positions():
    x = np.random.default_rng(1).standard_t(2, 50_000)
    known, lost = compressibility(x), compressibility(sketch(x))
    assert known.runs_low < known.p < known.runs_high
    assert known.dependence == ""
    assert math.isnan(lost.runs_low)
    assert "where elements lie" in lost.dependence
    assert (lost.p_low, lost.reason) == (pytest.approx(known.p_low, rel=1e-3), known.reason)
    few = compressibility(np.where(np.arange(50_000) < 2000, 100 * x, x))  # all in nine runs
    assert math.isnan(few.runs_low)
    assert "fewer than 20 blocks" in few.dependence


def test_interval_by_blocks_is_that_of_repeated_elements():
    """Blocks that differ leave some replicates that end inside the window, and too few of others, which do not count.

    One block has a share of the elements to itself.
    """
    rng, short, left_out = np.random.default_rng(3), 0, 0
    for tail, blocks, window, own in (
        (2, 50, (1, 300), 0),
        (0.7, 25, (7, 200), 0),
        (4, 400, (3, 2000), 0),
        (2, 30, (2, 300), 0.85),
    ):
        scale = np.exp(rng.standard_normal(blocks) * (own == 0))
        of = np.where(rng.random(20_000) < own, 5, rng.integers(blocks, size=20_000))
        of.sort()
        x = np.abs(rng.standard_t(tail, of.size)) * scale[of]
        first, last = window
        largest = np.argsort(-x)[: 2 * last]
        logs, block = np.log(x[largest]), of[largest]
        starts = np.searchsorted(of, np.arange(blocks))
        exponents = []
        for counts in block_counts(blocks, 199, np.random.default_rng(0)):
            drawn = np.repeat(logs, counts[block])[first - 1 : last]
            short += drawn.size < last - first + 1
            if drawn.size <= (last - first) / 2:
                left_out += 1
            else:
                ranks = np.arange(first, first + drawn.size)
                exponents.append(-1 / np.polyfit(drawn, np.log(ranks - 0.5), 1)[0])
        p = -1 / np.polyfit(logs[first - 1 : last], np.log(np.arange(first, last + 1) - 0.5), 1)[0]
        degrees = np.unique(block[:last]).size / 2 - 1
        factor = np.exp(stats.t(degrees).ppf(0.975) * np.log(exponents).std(ddof=1))
        low, high, reason = over_blocks(x[largest], largest, starts, window)
        assert (low, high, reason) == (pytest.approx(p / factor), pytest.approx(p * factor), "")
    assert short > left_out + 10
    assert left_out > 50


def test_blocks_may_be_layers():
    x = np.random.default_rng(2).laplace(size=50_000)
    runs = range(0, 50_000, 223)  # √50,000: layers that are the runs have their interval
    c = compressibility(x, layers=runs)
    assert (c.layers_low, c.layers_high) == (c.runs_low, c.runs_high)
    other = compressibility(x, layers=range(0, 50_000, 1000))
    assert other.runs_low == c.runs_low
    assert other.layers_low < c.p < other.layers_high
    assert other.layers_low != c.layers_low
    assert math.isnan(compressibility(x).layers_low)
    assert math.isnan(compressibility(x, layers=[0, 25_000]).layers_low)
    for wrong in ([0, 50_000], [1, 2], [0, 5, 5]):
        with pytest.raises(InputError, match="begin"):
            compressibility(x, layers=wrong)


def test_windows_by_share():
    x = np.random.default_rng(3).standard_t(2, 100_000)
    found = window_exponents(x, [0.0001, 0.001, 0.01])
    assert [(e.first, e.last) for e in found] == [(1, 100), (1, 1000)]  # ten ranks are too few
    c = compressibility(x)
    assert found[1].p == pytest.approx(c.p, rel=1e-3)
    assert (found[1].p_low, found[1].p_high) == pytest.approx((c.p_low, c.p_high), rel=1e-3)


def test_a_log_normal_is_not_called_compressible_and_a_power_law_is():
    rng, n = np.random.default_rng(0), 100_000
    for sigma in (1, 2, 3):
        found = [compressibility(rng.lognormal(0, sigma, n)) for _ in range(10)]
        assert sum(c.compressible is True for c in found) <= 1
    assert sum(c.reason == Ruling.LOGNORMAL for c in found) >= 5  # p > ½ in every window of σ = 3
    power_laws = [compressibility(1 + rng.pareto(1 / 0.8, n)) for _ in range(30)]
    assert sum(c.reason == Ruling.LOGNORMAL for c in power_laws) == 0
    assert sum(c.compressible is True for c in power_laws) >= 24


def test_a_design_effect_is_the_variance_of_counts_over_that_of_independent_elements():
    rng = np.random.default_rng(0)
    for together in (1, 16, RUN):  # neighbours that reach the threshold together
        reach = np.repeat(rng.random((2000, RUN // together)) < 0.1, together, 1)
        counts = reach.sum(1)
        share = counts.mean() / RUN
        found = design_effect(2000, float(counts.sum()), float(np.square(counts).sum()))
        assert found == pytest.approx(counts.var(ddof=1) / (RUN * share * (1 - share)))
        assert found == pytest.approx(together, rel=0.15)  # five standard errors
    for counts in (np.zeros(40), np.full(40, RUN), np.arange(19.0)):
        assert math.isnan(design_effect(len(counts), counts.sum(), np.square(counts).sum()))
