from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats
from support.every import every
from support.traces import DRIFTING_LAYERS, drifting_trace

from gradstats import drift, fit, over_training
from gradstats.analysis.drift import FEWEST_STEPS, QUANTITIES, _drift, drift_records
from gradstats.analysis.verdicts import movement
from gradstats.errors import InputError
from gradstats.primitives import kth_largest
from gradstats.statistics.compressibility import compressibility
from gradstats.statistics.goodness import goodness
from gradstats.statistics.series import unit_root_p
from gradstats.statistics.slopes import slope as slope_of
from gradstats.statistics.slopes import uneven_slope
from gradstats.trace import Layer, TraceWriter, create_trace
from gradstats.trace.sources import open_source


def test_the_dataset_holds_what_the_functions_return(tmp_path):
    path = drifting_trace(tmp_path / "run.zarr", [0, 5, 6], lambda s: 1 + s)
    d = over_training(path, models=["laplace", "dgamma"], ratios=(0.1, 0.01), per_layer=True)
    assert dict(d.sizes) == {"step": 3, "rank": 2, "kind": 1, "layer": 4, "model": 2, "ratio": 2}
    measured = {n: v.dims[4:] for n, v in d.items() if v.dims[2:4] == ("kind", "layer")}
    assert measured == QUANTITIES
    source = open_source(path)
    for step in (0, 6):
        values = source.read(1, "gradient", step).values
        at = d.sel(step=step, rank=1, kind="gradient")
        for layer, x in (("all", values), ("w", values[:2000])):
            here = at.sel(layer=layer)
            assert here["threshold"].sel(ratio=0.01) == kth_largest(x, round(0.01 * x.size))
            f = fit(x, "dgamma")
            assert here["shape"].sel(model="dgamma") == pytest.approx(f.shape)
            assert here["ks"].sel(model="dgamma") == pytest.approx(goodness(f, x).ks)
            assert np.isnan(here["shape"].sel(model="laplace"))
            assert here["p"] == pytest.approx(compressibility(x).p, rel=1e-9)
            assert here["zero_fraction"] == np.mean(x == 0)
            assert here["rms"] == pytest.approx(np.sqrt(np.mean(x[x != 0].astype(float) ** 2)))
        dead = at.sel(layer="dead")
        assert dead["zero_fraction"] == 1
        assert np.isnan(dead["mean"])
        assert np.isnan(dead["scale"]).all()
        assert at["loss"] == step / 10
    assert d.attrs["source"] == "run"


def test_a_variable_without_a_unit_does_not_change_with_the_scale():
    values = np.random.default_rng(0).laplace(size=3000)
    one, other = (over_training((c * values).astype("f4")) for c in (1e-3, 1e3))
    scaled = {n for n, v in one.items() if v.attrs.get("units") == one["mean"].attrs["units"]}
    assert scaled == {"mean", "rms", "max", "scale", "threshold"}
    for name in scaled:
        assert other[name].values == pytest.approx(1e6 * one[name].values, rel=1e-3, nan_ok=True)
    for name in ("ks", "wasserstein", "tail_error", "p", "shape"):
        assert other[name].values == pytest.approx(one[name].values, rel=1e-3, nan_ok=True)


def test_what_was_not_captured_is_nan(tmp_path):
    path = drifting_trace(tmp_path / "run.zarr", [0, 1, 2], lambda s: 1.0, ranks=(0,))
    writer = TraceWriter(path, 1)
    writer.append(1, {"gradient": np.ones(2100, np.float32)})
    writer.close()
    d = over_training(path)
    assert np.isnan(d["mean"].sel(rank=1, step=[0, 2])).all()
    assert d["mean"].sel(rank=1, step=1) == 1
    assert np.isfinite(d["mean"].sel(rank=0)).all()


def test_losses_and_rates_are_those_of_each_rank(tmp_path):
    create_trace(path := tmp_path / "run.zarr", DRIFTING_LAYERS, world_size=2)
    for rank in range(2):
        writer = TraceWriter(path, rank)
        for step in (3, 7):
            told = {"loss": step + 10 * rank, "learning_rate": 0.1 * (1 + rank)}
            writer.append(step, {"gradient": np.ones(2100, np.float32)}, **told)
        writer.close()
    d = over_training(path, models=[], ratios=[0.1])
    assert d["loss"].transpose("step", "rank").values.tolist() == [[3, 13], [7, 17]]
    assert d["learning_rate"].sel(step=7).values == pytest.approx([0.1, 0.2])


def test_all_numbers_are_of_the_steps_that_all_ranks_have():
    values = np.array([[1.0, math.nan], [1.0, 10.0], [2.0, 3.0], [math.nan, math.nan]])
    # a third rank has no such number at all, so that it makes no step incomplete
    values = np.column_stack([values, np.full(4, math.nan)])
    found = _drift(np.arange(4), values, np.ones((4, 3), bool))
    assert [found[name] for name in ("n", "incomplete", "without")] == [2, 1, 1]
    assert (found["mean"], found["spacing"]) == (4, 1)
    said = movement(found | {"quantity": "mean"})
    assert said.endswith(
        ". Left out: 1 of 4 steps, which have no such number; 1 of 4 steps, which not all ranks have."
    )


def test_ranks_without_a_step_in_common_have_no_series():
    values = np.full((40, 2), math.nan)
    values[:20, 0] = values[20:, 1] = 1.0
    found = _drift(np.arange(40), values, np.isfinite(values)) | {"quantity": "mean"}
    assert (found["n"], found["incomplete"], found["without"]) == (0, 40, 0)
    assert all(math.isnan(found[name]) for name in ("mean", "low", "high", "slope", "spacing"))
    assert movement(found) == "mean: no step has such a number of all ranks"


@every("late", [False, True])
def test_a_rank_that_ends_early_or_begins_late_is_no_trend(late, tmp_path):
    """Ranks of different scale without a trend: of the mean over whichever are there, it would be 0.5 or 2."""
    rng, path = np.random.default_rng(31), tmp_path / f"{late}.zarr"
    create_trace(path, [Layer("w", 0, (50,))], world_size=2)
    for rank, steps in enumerate((range(60), range(30, 60) if late else range(30))):
        writer = TraceWriter(path, rank)
        for step in steps:
            size = (1 + 2 * rank) * math.exp(0.1 * rng.standard_normal())
            writer.append(step, {"gradient": np.full(50, size, np.float32)})
        writer.close()
    (found,) = drift(path, ["mean"])
    assert (found["n"], found["incomplete"], found["without"]) == (30, 30, 0)
    assert found["total_change_low"] < 1 < found["total_change_high"]
    assert found["slope_p"] > 0.05
    # each rank by itself has all of its steps
    assert [drift(path, ["mean"], ranks=[r])[0]["incomplete"] for r in (0, 1)] == [0, 0]


@every("n", [20, 21, 60, 400, 2000])
def test_a_unit_root_is_tested_with_the_lags_that_aic_chooses(n):
    """As statsmodels chooses them, by one regression for each."""
    from scipy.signal import lfilter
    from statsmodels.tsa.stattools import adfuller

    rng = np.random.default_rng([32, n])
    for memory, ma in ((0.0, 0.0), (0.9, -0.5), (1.0, 0.0), (0.5, 0.7)):
        y = lfilter([1, ma], [1, -memory], rng.standard_normal(n)) - 7
        expected = adfuller(y, regression="ct", autolag="AIC", result_object=False)[1]
        assert unit_root_p(y) == expected


def test_long_even_series_take_no_decomposition_for_each_lag(monkeypatch):
    """48 of them took most of 2 s at 20,000 steps, and 40 s at 100,000."""
    decomposed, svd = [], np.linalg.svd
    monkeypatch.setattr(np.linalg, "svd", lambda *a, **k: decomposed.append(1) or svd(*a, **k))
    values = np.exp(0.1 * np.random.default_rng(33).standard_normal((5000, 1)))
    found = _drift(np.arange(5000), values, np.ones((5000, 1), bool))
    assert found["adf_p"] < 0.05
    assert len(decomposed) < 10


def test_steps_without_a_number_are_counted(tmp_path):
    create_trace(path := tmp_path / "run.zarr", DRIFTING_LAYERS, world_size=3)
    writer = TraceWriter(path, 0)
    rng = np.random.default_rng(0)
    for step in range(12):
        values = rng.laplace(size=2100) if step < 8 else np.full(2100, np.nan)
        writer.append(step, {"gradient": values.astype(np.float32)})
    writer.close()
    found = {r["quantity"]: r for r in drift(path, ["mean", "threshold"], ratios=[0.1])}
    for name in ("mean", "threshold 0.1"):
        assert (found[name]["n"], found[name]["without"]) == (8, 4)
        said = movement(found[name])
        assert said.startswith(f"{name} between ")
        assert said.endswith("here are 8. Left out: 4 of 12 steps, which have no such number.")
    # a data set that was made by hand says nothing of what was captured
    dataset = over_training(path, models=[]).drop_vars("captured")
    (mean,) = drift_records(dataset, ["mean"])
    assert (mean["n"], mean["without"]) == (8, 0)
    (none,) = drift(np.full(9, math.nan), ["mean"])
    assert (none["n"], none["without"]) == (0, 1)
    assert movement(none) == "mean: no step has such a number"
    # a rank that lacks a step, which another has, leaves nothing out
    writer = TraceWriter(path, 2)
    writer.append(1, {"gradient": np.ones(2100, np.float32)})
    writer.close()
    (alone,) = drift(path, ["mean"], ranks=[2])
    assert (alone["n"], alone["without"]) == (1, 0)


def test_only_what_is_asked_for_is_measured(tmp_path):
    path = drifting_trace(tmp_path / "run.zarr", [0, 1, 2], lambda s: 1 + s)
    for asked, expected in (((), ("mean", "threshold", "shape", "p")), (["ks"], ("ks",))):
        found = drift(path, asked, models=["dgamma"], ratios=(0.1,))
        assert tuple(dict.fromkeys(r["quantity"].split()[0] for r in found)) == expected
        assert {n for n in found.dataset if n in QUANTITIES} == set(expected)


def test_a_trend_takes_the_fewest_steps(tmp_path):
    path = drifting_trace(tmp_path / "run.zarr", range(FEWEST_STEPS), lambda s: 1.0)
    d = over_training(path, models=["laplace"])
    assert math.isfinite(drift_records(d, ["mean"])[0]["slope"])
    assert math.isnan(drift_records(d.isel(step=slice(1, None)), ["mean"])[0]["slope"])


def test_a_single_array_is_a_short_run():
    d = over_training(np.random.default_rng(0).laplace(size=5000))
    assert d.sizes["step"] == 1
    records = drift_records(d)
    assert records
    assert all(math.isnan(r["slope"]) for r in records)


class TestDrift:
    def test_a_known_trend(self, tmp_path):
        """The scale shrinks by 20 % every 100 steps; sampling noise is 1/√4000 a step."""
        path = drifting_trace(tmp_path / "run.zarr", range(120), lambda s: 0.8 ** (s / 100))
        records = drift_records(over_training(path, models=["laplace"]), ["mean", "threshold"])
        assert [r["quantity"] for r in records] == [
            "mean",
            "threshold 0.1",
            "threshold 0.01",
            "threshold 0.001",
        ]
        mean = records[0]
        assert mean["slope_low"] < -0.2 < mean["slope_high"]
        assert mean["slope"] == pytest.approx(-0.2, abs=0.02)
        assert mean["n"] == 120
        assert mean["spacing"] == 1
        assert mean["relative"]
        assert mean["low"] < mean["mean"] < mean["high"]
        assert mean["acf1"] > 0.8
        assert mean["slope_p"] < 1e-3
        assert mean["slope_p_holm"] == mean["slope_p"]  # one series
        # a steady fall is neither a random walk nor anything but stationary around its line
        assert mean["adf_p"] < 0.05 < mean["kpss_p"]
        # successive means: noise √2/√4200, drift 0.2 %
        assert mean["change_low"] == pytest.approx(1 - 2.33 * math.sqrt(2 / 4140), abs=0.02)
        assert mean["change_high"] == pytest.approx(1 + 2.33 * math.sqrt(2 / 4140), abs=0.02)

    def test_changes_are_the_outermost_hundredths_of_successive_steps(self, tmp_path):
        """Of two ranks' mean; a few steps jump, so that 1 % and 5 % are far apart."""
        rng, path, steps = np.random.default_rng(5), tmp_path / "run.zarr", 80
        sizes = np.exp(0.02 * rng.standard_t(2, (steps, 2)))
        create_trace(path, [Layer("w", 0, (50,))], world_size=2)
        for rank in range(2):
            writer = TraceWriter(path, rank)
            for step in range(steps):
                writer.append(step, {"gradient": np.full(50, sizes[step, rank], np.float32)})
            writer.close()
        (found,) = drift_records(over_training(path, models=[]), ["mean"])
        ratios = np.exp(np.diff(np.log(sizes.mean(1))))
        low, high = np.exp(np.quantile(np.log(ratios), [0.01, 0.99]))
        assert found["change_low"] == pytest.approx(low, rel=1e-5)
        assert found["change_high"] == pytest.approx(high, rel=1e-5)
        assert low < np.quantile(ratios, 0.05) - 0.01

    def test_no_trend(self, tmp_path):
        path = drifting_trace(tmp_path / "run.zarr", range(0, 200, 2), lambda s: 3.0)
        mean = drift_records(over_training(path, models=["laplace"]), ["mean"])[0]
        assert mean["slope_low"] < 0 < mean["slope_high"]
        assert abs(mean["acf1"]) < 0.4
        assert mean["adf_p"] < 0.05  # it returns to its level
        assert mean["kpss_p"] > 0.05
        assert mean["spacing"] == 2

    def test_slope_intervals_allow_for_memory(self, tmp_path):
        """An AR(1) level without a trend: intervals are much wider than least squares' own."""
        import statsmodels.api as sm

        rng = np.random.default_rng(1)
        level = [0.0]
        for _ in range(299):
            level.append(0.95 * level[-1] + 0.1 * rng.standard_normal())
        path = drifting_trace(tmp_path / "run.zarr", range(300), lambda s: math.exp(level[s]))
        d = over_training(path, models=["laplace"])
        mean = drift_records(d, ["mean"])[0]
        y = np.log(d["mean"].mean("rank").values[:, 0, 0])
        naive = sm.OLS(y, sm.add_constant(np.arange(300) / 100)).fit().conf_int()[1]
        honest = np.log1p([mean["slope_low"], mean["slope_high"]])
        assert np.ptp(honest) > 3 * np.ptp(naive)

    @pytest.mark.parametrize(
        ("n", "memory", "ma", "share", "coverage"),
        [
            (20, 0.0, 0.0, 0.99, 0.943),
            (60, 0.5, 0.0, 1.00, 0.954),
            (150, 0.9, 0.0, 0.88, 0.944),
            (1000, 0.98, 0.0, 0.98, 0.954),
            (150, 0.9, -0.5, 1.00, 0.934),  # a slow level seen through noise
            (300, 0.98, 0.0, 0.42, 0.827),  # near a unit root: as the docstring says
        ],
    )
    def test_slope_intervals_cover_what_they_say(self, n, memory, ma, share, coverage):
        """Shares of 2000 series; with Newey-West's bandwidth 85 % for white noise of 20 steps, 32 % at acf 0.98."""
        from scipy.signal import lfilter

        rng = np.random.default_rng([21, n])
        wrong = given = 0
        for _ in range(800):
            y = lfilter([1, ma], [1, -memory], rng.standard_normal(n + 1000))[-n:]
            _, low, high, p = slope_of(np.arange(n) / 100, y)
            given += math.isfinite(low)
            wrong += low > 0 or high < 0
            assert math.isnan(low) or (p < 0.05) == (low > 0 or high < 0)

        def noise(p, draws):  # of both simulations
            return 3.5 * math.sqrt(p * (1 - p) * (1 / draws + 1 / (2000 * share))) + 1e-3

        assert given / 800 == pytest.approx(share, abs=noise(share, 800) + 0.005)
        assert 1 - wrong / given == pytest.approx(coverage, abs=noise(coverage, given))

    @pytest.mark.parametrize(
        ("n", "memory", "cosines"), [(60, -0.5, 4), (1000, -0.5, 10), (3000, 0.5, 21)]
    )
    def test_the_long_run_variance_is_that_of_few_cosines(self, n, memory, cosines):
        """From what a regression on line and cosines explains of the residuals, of prewhitened ones if positive."""
        rng, at = np.random.default_rng(24), np.arange(n) / 100
        y = 0.1 * at + rng.standard_normal(n)
        for i in range(1, n):
            y[i] += memory * (y[i - 1] - 0.1 * at[i - 1])
        slope, intercept = np.polyfit(at, y, 1)
        residual, rho = y - slope * at - intercept, 0.0
        if memory > 0:
            rho = (n * (residual[1:] @ residual[:-1]) / (residual[:-1] @ residual[:-1]) + 2) / (
                n - 4
            )
            residual = residual[1:] - rho * residual[:-1]
        place = (np.arange(residual.size) + 0.5) / residual.size
        line = np.column_stack([np.ones(place.size), place])
        waves = np.cos(np.pi * np.outer(place, np.arange(2, cosines + 2)))
        (less,), (more,) = (
            np.linalg.lstsq(basis, residual)[1] for basis in (line, np.hstack([line, waves]))
        )
        variance = (less - more) / cosines / (1 - rho) ** 2
        error = math.sqrt(variance / np.sum((at - at.mean()) ** 2))
        half = stats.t.ppf(0.975, cosines) * error
        p = 2 * stats.t.sf(abs(slope) / error, cosines)
        assert slope_of(at, y) == pytest.approx((slope, slope - half, slope + half, p))

    def test_random_walks_have_no_slope_to_speak_of(self):
        rng = np.random.default_rng(22)
        for n in (60, 1000):
            found = [
                slope_of(np.arange(n) / 100, rng.standard_normal(n).cumsum()) for _ in range(200)
            ]
            assert np.mean([math.isnan(low) for _, low, _, _ in found]) > 0.7

    @every("pattern", ["bursts", "dense start", "random", "log"])
    @every(("memory", "ma"), [(0.0, 0.0), (0.5, 0.0), (0.9, -0.5)])
    def test_uneven_steps_seldom_have_a_slope_that_is_not_there(self, pattern, memory, ma):
        """Few intervals miss a slope of zero, of the series that get one and of all; 60 steps, 120 series."""
        from scipy.signal import lfilter

        rng, n, missed = np.random.default_rng([26, len(pattern)]), 60, 0
        for _ in range(120):
            at = {
                "bursts": np.arange(n) // 10 * 100 + np.arange(n) % 10,
                "dense start": np.r_[np.arange(40), 40 + 20 * np.arange(n - 40)],
                "random": np.sort(rng.choice(5 * n, n, replace=False)),
                "log": np.unique(np.geomspace(1, 20 * n, 80).astype(int))[:n],
            }[pattern]
            y = lfilter([1, ma], [1, -memory], rng.standard_normal(at[-1] + 1001))[1000 + at]
            _, low, high, p = uneven_slope(at / 100, y)
            missed += not (math.isnan(low) or low <= 0 <= high)
            assert math.isnan(low) or (p < 0.05) == (low > 0 or high < 0)
        limit = 0.05 if not ma else 0.09  # a slow level seen through noise, as at even steps
        assert missed <= 120 * limit + 3.1 * math.sqrt(120 * limit * (1 - limit))

    def test_uneven_steps_of_a_line_have_its_slope(self):
        at = np.array([0, 1, 2, 3, 50, 51, 52, 200, 201, 500]) / 100
        assert uneven_slope(at, 3 * at + 1)[:3] == pytest.approx((3, 3, 3))
        noisy = 3 * np.repeat(at, 3) + np.arange(30) / 1e3
        y = noisy + np.random.default_rng(0).standard_normal(30) / 10
        _, low, high, p = uneven_slope(np.repeat(at, 3) + np.arange(30) / 1e3, y)
        assert low < 3 < high < 3.3
        assert p < 1e-3

    def test_the_change_of_a_run_is_that_of_its_line(self, tmp_path):
        """Not last ÷ first: the last step is an outlier."""
        scales = [0.8 ** (s / 100) for s in range(60)]
        scales[-1] *= 3
        path = drifting_trace(tmp_path / "run.zarr", range(60), scales.__getitem__)
        (mean,) = drift_records(over_training(path, models=[]), ["mean"])
        assert mean["total_change_low"] < 0.8**0.6 < mean["total_change_high"]
        assert mean["total_change"] < 1.1
        said = movement(mean)
        assert "from the first step to the last, fitted" in said
        assert movement(mean | {"total_change_low": 0.8, "total_change_high": 0.9}).startswith(
            "mean × 0."
        )
        assert movement(mean | {"total_change_high": 1.2}).startswith("mean: no trend is told, × ")
        few = over_training(path, models=[], steps=range(5))
        said = movement(drift_records(few, ["mean"])[0])
        assert re.fullmatch(
            r"mean between 0\.\d+ and [\d.]+; a trend takes 20 steps, and here are 5", said
        )

    def test_values_that_lie_outside_are_not_denied(self):
        """Of ten steps of four ranks, two values in forty are outside what holds 90 %; of three ranks at six, none."""
        values = np.full((10, 4), 2.0)
        values[:5] = 1.0
        values[0, 0], values[9, 3] = 0.1, 9.0
        found = _drift(np.arange(10), values, np.ones((10, 4), bool)) | {"quantity": "mean"}
        said = movement(found)
        assert said.startswith(
            "mean between 1.00 and 2.00 (5 % to 95 % of the values); a trend takes"
        )
        found = _drift(np.arange(6), values[:6, :3], np.ones((6, 3), bool)) | {"quantity": "mean"}
        assert movement(found).startswith("mean between 0.100 and 2.00; a trend takes")

    def test_a_line_has_its_slope(self):
        at = np.arange(50) / 100
        assert slope_of(at, 3 * at + 1) == (pytest.approx(3), pytest.approx(3), pytest.approx(3), 0)

    def test_many_layers_are_corrected_for(self, tmp_path):
        rng = np.random.default_rng(23)
        path = tmp_path / "run.zarr"
        layers = [Layer(f"layer{i}", i * 50, (50,)) for i in range(30)]
        create_trace(path, layers)
        writer = TraceWriter(path, 0)
        for step in range(60):
            writer.append(step, {"gradient": rng.laplace(size=1500).astype(np.float32)})
        writer.close()
        records = drift_records(over_training(path, models=[], per_layer=True), ["mean"])
        assert len(records) == 31
        assert min(r["slope_p"] for r in records) < 0.05  # by chance
        assert min(r["slope_p_holm"] for r in records) > 0.05
        least = min(records, key=lambda r: r["slope_p"])
        assert least["slope_p_holm"] == pytest.approx(31 * least["slope_p"])

    def test_few_steps_give_numbers_without_tests(self, tmp_path):
        path = drifting_trace(tmp_path / "run.zarr", [0, 10, 100], lambda s: 1.0)
        mean = drift_records(over_training(path), ["mean"])[0]
        assert mean["n"] == 3
        assert math.isfinite(mean["mean"])
        for name in ("slope", "acf1", "adf_p", "kpss_p", "change_low"):
            assert math.isnan(mean[name])

    def test_constants_have_no_trend_to_speak_of(self, tmp_path):
        path = tmp_path / "run.zarr"
        create_trace(path, DRIFTING_LAYERS[:1])
        writer = TraceWriter(path, 0)
        for step in range(30):
            writer.append(step, {"gradient": np.ones(2000, np.float32)})
        writer.close()
        mean = drift_records(over_training(path), ["mean"])[0]
        assert mean["mean"] == mean["low"] == mean["high"] == 1
        assert math.isnan(mean["slope"])
        at = np.arange(30.0)
        wobble = np.where(at < 20, 1.0, np.nextafter(1, 2))
        for y in (np.ones(30), np.zeros(30), wobble, -wobble):
            assert slope_of(at, y) == uneven_slope(at**2, y) == (0, 0, 0, 1)
            drift = _drift(np.arange(30), y[:, None], np.ones((30, 1), bool))
            assert all(math.isnan(drift[name]) for name in ("slope", "slope_p", "adf_p"))

    def test_refusals(self, tmp_path):
        path = drifting_trace(tmp_path / "run.zarr", [0], lambda s: 1.0)
        with pytest.raises(InputError, match="no quantity 'nonsense'; there are zero_fraction"):
            drift_records(over_training(path), ["nonsense"])
        with pytest.raises(InputError, match="there are laplace"):
            over_training(path, models=["cauchy"])
        with pytest.raises(InputError, match="ratio"):
            over_training(path, ratios=[2.0])


def test_of_few_elements_a_threshold_keeps_one():
    x = np.random.default_rng(0).laplace(size=40).astype(np.float32)
    found = over_training({"w": x}, ratios=[0.001, 0.1])["threshold"].squeeze()
    assert found.sel(ratio=0.001) == np.abs(x).max()
    assert found.sel(ratio=0.1) == np.sort(np.abs(x))[-4]
