"""Figures draw the numbers that the functions return, on the axes given."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

import gradstats
from gradstats import plots, pot
from gradstats._compressibility import CONTROLS, local_exponents
from gradstats._fit import as_magnitudes
from gradstats.errors import InputError

X = np.random.default_rng(0).standard_t(3, 50_000).astype(np.float32)
CONTROL_LABELS = ["control: uniform", "control: half-normal", "control: Laplace"]


@pytest.fixture
def ax():
    return Figure().subplots()


def line(ax, label):
    return next(x for x in ax.lines if x.get_label() == label).get_xydata()


def labels(ax):
    return [x.get_label() for x in ax.lines if not x.get_label().startswith("_")]


@pytest.mark.parametrize("reduce", [lambda x: x, gradstats.sketch], ids=["array", "sketch"])
def test_tail(ax, reduce):
    f = gradstats.fit(X, "laplace")
    assert plots.tail(reduce(X), [f], ax) is ax
    drawn = line(ax, "captured")
    for magnitude, share in drawn[:: len(drawn) // 7]:
        assert share == pytest.approx(np.mean(np.abs(X) >= magnitude), rel=0.01, abs=1.1 / X.size)
    model = line(ax, "Laplace")
    assert np.allclose(model[:, 1], f.magnitude.sf(model[:, 0]))


def test_magnitudes_and_what_is_left(ax):
    ordered = np.sort(np.abs(X).astype(float))[::-1]
    plots.magnitude_decay({"x": X}, ax, window=(1, 500))
    assert labels(ax) == ["x", *CONTROL_LABELS, "rank^(−½)"]
    drawn = line(ax, "x")
    assert np.allclose(drawn[:, 1], ordered[drawn[:, 0].astype(int) - 1] / ordered[0], rtol=1e-3)
    other = Figure().subplots()
    plots.best_k_error({"x": X}, other)
    assert labels(other) == ["x", *CONTROL_LABELS]
    for k, left in line(other, "x")[::100]:
        expected = np.sqrt((ordered[int(k) :] ** 2).sum() / (ordered**2).sum())
        assert left == pytest.approx(expected, rel=1e-3)


def test_local_exponent(ax):
    plots.local_exponent({"x": X}, ax, per_decade=1)
    assert labels(ax)[: 1 + len(CONTROLS)] == ["x", *CONTROL_LABELS]
    assert np.allclose(line(ax, "x")[:, 1], [e.p for e in local_exponents(X, 1)])


def test_peaks(ax):
    plots.mean_excess(X, ax, label="x")
    plots.mean_excess(2 * X, ax, label="2x")
    rows = pot.mean_excess(X)
    assert np.allclose(line(ax, "x"), [(r.threshold, r.mean) for r in rows])
    assert len({tuple(x.get_color()) for x in ax.lines}) == 2
    other = Figure().subplots()
    plots.parameter_stability(X, other, label="x")
    plots.parameter_stability(X, other, label="again")
    rows = pot.parameter_stability(X)
    assert np.allclose(line(other, "x"), [(r.ratio, r.c) for r in rows])
    assert other.xaxis_inverted()


def test_drift(ax, tmp_path):
    from test_evolution import make_trace

    path = make_trace(tmp_path / "run.zarr", range(5), lambda s: 100.0**s)
    d = gradstats.over_training(path).sel(kind="gradient", layer="all")
    plots.drift(d, "threshold", ax)
    assert np.allclose(
        line(ax, "0.01")[:, 1], d["threshold"].sel(ratio=0.01).mean("rank"), rtol=1e-12
    )
    assert ax.get_yscale() == "log"
    plots.drift(d, "mean", Figure().subplots())
    with pytest.raises(InputError, match="select one of each but one of kind, layer"):
        plots.drift(gradstats.over_training(path), "mean", ax)


def test_nothing_to_draw_is_drawn():
    for empty in (np.zeros(10), np.empty(0)):
        plots.tail(empty, [], Figure().subplots())
        plots.magnitude_decay({"x": empty}, Figure().subplots())
        plots.best_k_error({"x": empty}, Figure().subplots())
        plots.local_exponent({"x": empty}, Figure().subplots())
        assert as_magnitudes(empty).count == 0
