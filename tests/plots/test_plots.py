"""Figures draw the numbers that the functions return, on the axes given."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import math
import re
import sys

import numpy as np
import pytest
from conftest import ROOT
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

import gradstats
from gradstats import plots
from gradstats.errors import InputError
from gradstats.plots.style import label_of
from gradstats.statistics import pot
from gradstats.statistics.compressibility import CONTROLS, local_exponents, window_exponents
from gradstats.statistics.fitting import as_magnitudes

DATA, DOCS = ROOT / "data", ROOT / "docs"
X = np.random.default_rng(0).standard_t(3, 50_000).astype(np.float32)
CONTROL_LABELS = ["control: uniform", "control: half-normal", "control: Laplace"]


@pytest.fixture
def ax():
    return Figure().subplots()


def line(ax, label):
    return next(x for x in ax.lines if x.get_label() == label).get_xydata()


def band_at(ax, x):
    """Return the ends of the first band at a place."""
    corners = ax.collections[0].get_paths()[0].vertices
    ys = [y for at, y in corners if at == pytest.approx(x, rel=1e-3)]
    return min(ys), max(ys)


def ticks_of(ax):
    names = [t.get_text() for t in ax.get_yticklabels()]
    return dict(zip(ax.get_yticks(), names, strict=True))


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


def test_laws_of_the_rest_leave_room_for_zeros(ax):
    x = np.concatenate([X, np.zeros_like(X)])
    f = gradstats.fit(x, "laplace")
    assert f.zero_fraction == 0.5
    plots.density(x, [f], ax)
    at, drawn = line(ax, "Laplace").T
    assert np.allclose(drawn, f.dist.pdf(at) / 2)
    [captured] = ax.collections
    corners = captured.get_paths()[0].vertices
    assert 2 * np.trapezoid(np.interp(at, *corners[: len(corners) // 2].T), at) == pytest.approx(
        0.99, abs=0.02
    )
    other = Figure().subplots()
    plots.tail(x, [f], other)
    at, drawn = line(other, "Laplace").T
    assert np.allclose(drawn, f.magnitude.sf(at) / 2)
    assert line(other, "captured")[-1, 1] == pytest.approx(0.5, rel=1e-3)
    plots.tail(X, [], without := Figure().subplots())
    (low, high), (half_low, half_high) = (band_at(a, np.abs(X).max()) for a in (without, other))
    assert (half_low, half_high) == pytest.approx((low / 2, high / 2), rel=1e-3)


def test_magnitudes_and_what_is_left(ax):
    ordered = np.sort(np.abs(X).astype(float))[::-1]
    plots.magnitude_decay({"x": X}, ax, window=(3, 500))
    assert labels(ax) == ["x", *CONTROL_LABELS, "rank^(−½)"]
    drawn = line(ax, "x")
    assert (drawn[0, 0], drawn[-1, 0]) == (1, X.size)
    assert np.allclose(drawn[:, 1], ordered[drawn[:, 0].astype(int) - 1] / ordered[0], rtol=1e-3)
    (window,) = ax.patches
    assert (window.get_x(), window.get_x() + window.get_width()) == (3, 500)
    ranks, slope = line(ax, "rank^(−½)").T
    assert np.allclose(slope, 1 / np.sqrt(ranks))
    # the quantiles of a uniform law are linear: rank k of n is 1 − (k − ½)/n of the largest
    ranks, uniform = line(ax, "control: uniform").T
    assert np.allclose(uniform, 1 - (ranks - 1) / X.size, atol=1 / X.size)
    other = Figure().subplots()
    plots.best_k_error({"x": X}, other)
    assert labels(other) == ["x", *CONTROL_LABELS]
    for k, left in line(other, "x")[::100]:
        expected = np.sqrt((ordered[int(k) :] ** 2).sum() / (ordered**2).sum())
        assert left == pytest.approx(expected, rel=1e-3)
    ranks, uniform = line(other, "control: uniform")[:-1].T  # nothing is left of the last
    assert np.allclose(uniform, (1 - ranks / X.size) ** 1.5, atol=0.01)


def test_local_exponent(ax):
    plots.local_exponent({"x": X}, ax, per_decade=1)
    assert labels(ax)[: 1 + len(CONTROLS)] == ["x", *CONTROL_LABELS]
    found = local_exponents(X, 1)
    assert len(found) > 3
    assert np.allclose(line(ax, "x"), [((e.first * e.last) ** 0.5, e.p) for e in found])
    for (at, _), e in zip(line(ax, "x"), found, strict=True):
        assert band_at(ax, at) == pytest.approx((e.p_low, e.p_high))


def test_window_exponent(ax):
    plots.window_exponent({"x": X}, ax)
    assert labels(ax)[: 1 + len(CONTROLS)] == ["x", *CONTROL_LABELS]
    drawn = line(ax, "x")
    assert drawn[-1, 0] == pytest.approx(0.1)
    assert drawn[0, 0] * X.size >= 50
    assert drawn[-1, 1] == pytest.approx(window_exponents(X, [0.1])[0].p)
    with_zeros = np.concatenate([X, np.zeros(X.size)])  # shares are those of the others
    plots.window_exponent({"x": with_zeros}, other := Figure().subplots())
    found = window_exponents(X, np.geomspace(1e-4, 0.1, 13).tolist())
    assert np.allclose(line(other, "x"), [(e.last / X.size, e.p) for e in found], rtol=1e-3)


def test_peaks(ax):
    plots.mean_excess(X, ax, label="x")
    plots.mean_excess(2 * X, ax, label="2x")
    rows = pot.mean_excess(X)
    assert np.allclose(line(ax, "x"), [(r.threshold, r.mean) for r in rows])
    for r in rows:
        assert band_at(ax, r.threshold) == pytest.approx((r.low, r.high))
    assert len({tuple(x.get_color()) for x in ax.lines}) == 2
    other = Figure().subplots()
    plots.parameter_stability(X, other, label="x")
    plots.parameter_stability(X, other, label="again")
    rows = pot.parameter_stability(X)
    assert np.allclose(line(other, "x"), [(r.ratio, r.c) for r in rows])
    for r in rows:
        assert band_at(other, r.ratio) == pytest.approx((r.c_low, r.c_high))
    assert other.xaxis_inverted()


def test_drift(ax, tmp_path):
    from support.traces import drifting_trace

    path = drifting_trace(tmp_path / "run.zarr", range(5), lambda s: 100.0**s)
    d = gradstats.over_training(path).sel(kind="gradient", layer="all")
    plots.drift(d, "threshold", ax)
    assert np.allclose(
        line(ax, "0.01")[:, 1], d["threshold"].sel(ratio=0.01).mean("rank"), rtol=1e-12
    )
    assert ax.get_yscale() == "log"
    plots.drift(d, "mean", Figure().subplots())
    with pytest.raises(InputError, match="choose all but one of kind, layer"):
        plots.drift(gradstats.over_training(path), "mean", ax)


def test_a_drifting_quantity_has_a_band_of_all_its_ranks(ax):
    from xarray import DataArray

    values = np.array([[[5.0, 1.0, 3.0], [4.0, 8.0, 6.0]], [[1.0, 2.0, 9.0], [7.0, 2.0, 3.0]]])
    coords = {"ratio": [0.1, 0.01], "step": [3, 10], "rank": [0, 1, 2]}
    array = DataArray(values, coords, ("ratio", "step", "rank"), name="threshold")
    plots.drift(array.to_dataset(), "threshold", ax)
    assert len(ax.collections) == 2
    for name, of, band in zip(("0.1", "0.01"), values, ax.collections, strict=True):
        assert line(ax, name).tolist() == [[3, of[0].mean()], [10, of[1].mean()]]
        corners = {tuple(v) for v in band.get_paths()[0].vertices}
        assert corners == {
            (step, end)
            for step, row in zip((3, 10), of, strict=True)
            for end in (min(row), max(row))
        }


def dataset(values):
    from xarray import DataArray

    coords = {"step": range(len(values)), "rank": range(values.shape[1])}
    return DataArray(values, coords, ("step", "rank"), name="mean").to_dataset()


def test_steps_that_not_all_ranks_have_are_not_drawn(ax):
    values = np.array([[1.0, 5.0], [2.0, 6.0], [2.0, np.nan], [np.nan, np.nan], [1.0, 7.0]])
    plots.drift(dataset(values), "mean", ax)
    at, drawn = ax.lines[0].get_xydata().T
    # what no rank has stays a gap
    assert at.tolist() == [0, 1, 3, 4]
    assert np.array_equal(drawn, [3, 4, np.nan, 4], equal_nan=True)
    from xarray import DataArray

    layers = {"step": range(3), "rank": [0, 1], "layer": ["a", "b"]}
    of_layers = DataArray(np.ones((3, 2, 2)), layers, tuple(layers), name="mean")
    of_layers[2, 1, 1] = np.nan
    plots.drift_map(of_layers.to_dataset(), "mean", other := Figure().subplots())
    mask = np.ma.getmaskarray(other.collections[0].get_array())
    assert mask.tolist() == [[False, False, False], [False, False, True]]


def shown(line):
    """Return how many points of a line have a marker."""
    marker, every = line.get_marker(), line.get_markevery()
    if marker in ("", "None", None):
        return 0
    return len(line.get_xdata()) if every is None else len(every)


def test_points_that_no_line_reaches_have_markers():
    one = np.array([[1.0, 3.0]])
    ax = plots.drift(dataset(one), "mean", Figure().subplots())
    assert shown(ax.lines[0]) == 1
    # the range of its ranks
    assert ax.collections[-1].get_segments()[0].tolist() == [[0, 1], [0, 3]]
    many = np.ones((40, 2))
    assert shown(plots.drift(dataset(many), "mean", Figure().subplots()).lines[0]) == 0
    many[[9, 11]] = np.nan
    drawn = plots.drift(dataset(many), "mean", Figure().subplots()).lines[0]
    assert drawn.get_markevery() == [10]
    assert shown(drawn) == 1
    row = {"compressor": "marsit", "seed": 0, "matching_rate": 0.7, "loss": 1.0, "delta": 0.5}
    for draw in (plots.matching_rate, plots.training_curves):
        for steps, points in ((1, 1), (40, 0)):
            rows = [row | {"step": s} for s in range(steps)]
            assert shown(draw(rows, Figure().subplots()).lines[0]) == points
    for layers in (1, 20):
        rows = [row | {"step": 0, "layer": f"l{i}"} for i in range(layers)]
        ax = plots.lags_delta(rows, Figure().subplots())
        assert all(shown(line) for line in ax.lines if len(line.get_xdata()) == 1)


def test_low_rates_of_matching_are_inside_the_axes():
    for rate, low in ((0.3, 0.28), (0.7, 0.4)):
        row = {"compressor": "marsit", "step": 0, "matching_rate": rate}
        ax = plots.matching_rate([row], Figure().subplots())
        assert ax.get_ylim() == pytest.approx((low, 1.02))


@pytest.mark.parametrize("within", [1.005, 1.7, 40.0])
def test_the_scale_of_layers_has_numbers_that_do_not_overlap(within):
    from xarray import DataArray

    sizes = 1.3e-4 * np.geomspace(1, within, 8)
    coords = {"step": [0], "rank": [0], "layer": [f"l{i}" for i in range(8)]}
    data = DataArray(sizes[None, None], coords, tuple(coords), name="mean").to_dataset()
    figure = Figure(figsize=(4, 3), layout="constrained")
    ax = plots.layer_map(data, "mean", figure.subplots())
    plots.png(figure)
    low, high = ax.get_xlim()
    boxes = sorted(
        tick.label1.get_window_extent().extents[[0, 2]].tolist()
        for tick in (*ax.xaxis.get_major_ticks(), *ax.xaxis.get_minor_ticks())
        if low <= tick.get_loc() <= high and tick.label1.get_text()
    )
    assert len(boxes) >= 2
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(boxes))


@pytest.mark.parametrize(
    ("many", "name"), [(3, "c"), (25, "c"), (4, 5 * "a_very_long_compressor_name_")]
)
def test_the_legend_of_build_up_covers_no_curve(many, name):
    rows = [
        {"compressor": f"{name}{i}", "nproc": n, "build_up": n ** (0.5 + i / 60)}
        for i in range(many)
        for n in (1, 2, 4, 8)
    ]
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    ax = plots.build_up(rows, figure.subplots())
    plots.png(figure)
    axes, legend = ax.get_window_extent(), ax.get_legend().get_window_extent()
    assert legend.x0 >= axes.x1
    page = figure.bbox
    assert page.x0 <= legend.x0 < legend.x1 <= page.x1
    assert page.y0 <= legend.y0 < legend.y1 <= page.y1
    assert (axes.width > 0.15 * page.width) & (axes.height > 0.5 * page.height)
    texts = [t.get_text() for t in ax.get_legend().get_texts()]
    assert len({*texts}) == many + 1
    assert texts[0][-1] == "0"


def test_what_has_no_number_is_left_out(ax):
    none = {"compressor": "none", "build_up": None}
    rows = [none | {"nproc": n} for n in (1, 2)]
    rows += [{"compressor": "topk", "nproc": n, "build_up": n} for n in (1, 2)]
    rows += [{"compressor": "topk", "nproc": 1, "build_up": math.nan}]
    plots.build_up(rows, ax)
    assert labels(ax) == ["topk", "no overlap"]
    assert line(ax, "topk").tolist() == [[1, 1], [2, 2]]
    rates = [
        {"compressor": "marsit", "step": s, "matching_rate": r} for s, r in enumerate((0.7, None))
    ]
    plots.matching_rate(rates, other := Figure().subplots())
    assert line(other, "marsit").tolist() == [[0, 0.7]]


def test_a_delta_that_is_no_number_is_neither_median_nor_largest():
    deltas = [
        {"layer": f"l{i}", "step": s, "delta": math.nan if i == s else 0.1 * i + s}
        for i in range(12)
        for s in (0, 1)
    ]
    plots.lags_delta(deltas, other := Figure().subplots())
    assert line(other, "largest") == pytest.approx(np.array([[0, 1.1], [1, 2.1]]))
    assert line(other, "median") == pytest.approx(np.array([[0, 0.6], [1, 1.6]]))
    assert "assumption fails: 11 of 22" in [t.get_text() for t in other.get_legend().get_texts()]


def test_the_density_of_nothing_is_zero_and_that_of_something_its_share(ax):
    def captured(values):
        drawn = Figure().subplots()
        plots.density(values, [], drawn, coverage=1.0)
        (path,) = drawn.collections[0].get_paths()
        heights = path.vertices[:, 1]
        return drawn.get_yscale(), float(heights.max()), np.ptp(path.vertices[:, 0])

    for nothing in (np.zeros(10), np.empty(0), np.full(3, np.nan)):
        scale, highest, _ = captured(nothing)
        assert (scale, highest) == ("linear", 0)
    # all elements are ±2, half of them zeros, in two of 150 bins
    scale, highest, wide = captured(np.array([2.0, -2.0, 0.0, 0.0]))
    assert scale == "log"
    assert highest == pytest.approx(0.25 / (4 / 150))
    assert wide == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("empty", [np.zeros(10), np.empty(0)], ids=["zeros", "empty"])
def test_nothing_to_draw_is_drawn(empty):
    figure = Figure(figsize=(8, 12))
    axes = iter(figure.subplots(6, 2).ravel())
    assert as_magnitudes(empty).count == 0
    plots.density(empty, [], next(axes))
    for draw in (plots.tail, plots.qq):
        draw(empty, [], next(axes))
    for draw in (
        plots.magnitude_decay,
        plots.best_k_error,
        plots.local_exponent,
        plots.window_exponent,
    ):
        draw({"x": empty}, next(axes))
    few = np.arange(1.0, 5)
    for draw in (plots.mean_excess, plots.parameter_stability):
        draw(few, next(axes))
    plots.timeline([], next(axes))
    plots.lags_delta([], next(axes))
    assert plots.png(figure).startswith(b"\x89PNG")


def test_order_statistics_give_the_bands(ax):
    """Of a model's own samples, 95 % of each rank fall into its band."""
    law = gradstats.fit(X, "laplace")
    plots.qq(X, [law], ax)
    assert labels(ax) == ["Laplace", "equal"]
    expected, captured = line(ax, "Laplace").T
    ordered = np.sort(np.abs(X).astype(float))[::-1]
    assert captured[0] == pytest.approx(ordered[0], rel=1e-3)
    assert expected[0] == pytest.approx(law.magnitude.isf(0.5 / X.size))
    corners = ax.collections[0].get_paths()[0].vertices
    tops = [y for x, y in corners if x == pytest.approx(expected[0])]
    rng = np.random.default_rng(1)
    largest = law.magnitude.isf(rng.beta(1, X.size, 4000))  # of as many elements, 4000 times
    inside = np.mean((largest >= min(tops)) & (largest <= max(tops)))
    assert inside == pytest.approx(0.95, abs=0.02)
    other = Figure().subplots()
    plots.tail(X, [], other)
    expected = -np.log([0.975, 0.025]) / X.size
    assert band_at(other, ordered[0]) == pytest.approx(expected, rel=1e-3)


@pytest.fixture(scope="module")
def by_layer(tmp_path_factory):
    from support.traces import drifting_trace

    path = drifting_trace(
        tmp_path_factory.mktemp("layers") / "run.zarr", range(4), lambda s: 2.0**s
    )
    data = gradstats.over_training(path, models=["laplace"], ratios=[0.01], per_layer=True)
    return data.sel(kind="gradient", model="laplace", ratio=0.01)


def test_maps_of_layers(ax, by_layer):
    names = [name for name in by_layer["layer"].values if name != "all"]
    plots.layer_map(by_layer, "mean", ax)
    means = by_layer["mean"].sel(layer=names)
    assert np.allclose(ax.lines[0].get_xdata(), means.median(["step", "rank"]), equal_nan=True)
    assert [t.get_text() for t in ax.get_yticklabels()] == names
    ends = np.transpose([means.min(["step", "rank"]), means.max(["step", "rank"])])
    for i, segment in enumerate(ax.collections[0].get_segments()):
        expected = [] if np.isnan(ends[i]).any() else [(ends[i, 0], i), (ends[i, 1], i)]
        assert [tuple(point) for point in segment] == expected, names[i]
    top, bottom = ax.get_ylim()[::-1]
    assert top < bottom  # the first layer is at the top
    other = Figure().subplots()
    plots.drift_map(by_layer, "mean", other)
    drawn = other.collections[0].get_array()
    expected = means.mean("rank").transpose("layer", "step").values
    expected /= np.exp(np.log(expected).mean(axis=1, keepdims=True))
    assert np.allclose(drawn.filled(np.nan), expected, equal_nan=True)
    assert drawn.mask[names.index("dead")].all()
    for axes, offset in ((ax, 0), (other, 0.5)):  # each name in the row of its layer
        assert [*axes.get_yticks()] == [i + offset for i in range(len(names))]
    assert [t.get_text() for t in other.get_yticklabels()] == names
    steps = [str(step) for step in by_layer["step"].values]
    assert [t.get_text() for t in other.get_xticklabels()] == steps
    assert [*other.get_xticks()] == [i + 0.5 for i in range(len(steps))]
    plots.drift_map(by_layer, "zero_fraction", Figure().subplots())
    with pytest.raises(InputError, match="no layers"):
        plots.layer_map(by_layer.sel(layer=["all"]), "mean", ax)


def test_of_many_steps_a_few_are_named_at_equal_distances(ax):
    found = gradstats.sketch(np.random.default_rng(2).laplace(size=100).astype("f4"))
    plots.overview({20 * i: found for i in range(20)}, ax, ratios=[0.1])
    assert [*ax.get_xticks()] == [0, 3, 6, 9, 12, 15, 18]
    assert [t.get_text() for t in ax.get_xticklabels()] == [f"{60 * i}" for i in range(7)]


def test_an_overview_has_the_shares_and_the_exact_thresholds(ax):
    """Steps of other scale and shape, out of order, one with zeros: each in its own column, above its own lines."""
    rng = np.random.default_rng(5)
    values = {7: rng.laplace(size=6000), 3: 20 * rng.standard_t(3, 6000), 11: np.zeros(6000)}
    values[7][:1000] = 0
    plots.overview(
        {s: gradstats.sketch(v.astype("f4")) for s, v in values.items()}, ax, ratios=[0.1, 0.01]
    )
    assert [t.get_text() for t in ax.get_xticklabels()] == ["3", "7", "11"]
    assert [*ax.get_xticks()] == [0, 1, 2]
    (mesh,) = ax.collections
    edges = mesh.get_coordinates()[:, 0, 1]
    share = mesh.get_array().filled(0)
    assert share.shape == (len(edges) - 1, 3)
    for column, step in enumerate(sorted(values)):
        counts, _ = np.histogram(np.abs(values[step]), edges)
        expected = counts / 6000 / np.log2(edges[1] / edges[0])
        # a cell of the histogram is an eighth of an octave or less, and may lie across an edge
        assert share[:, column].sum() == pytest.approx(expected.sum(), rel=0.02), step
        assert abs(np.cumsum(share[:, column] - expected)).max() < 0.02 * max(expected.sum(), 1)
    lines = [line for line in ax.lines if line.get_color() == "black"]
    assert [line.get_label() for line in lines] == ["largest 0.1", "largest 0.01"]
    for line, k in zip(lines, (600, 60), strict=True):
        exact = [np.sort(np.abs(values[s]))[-k] for s in (3, 7)]
        assert np.allclose(line.get_ydata()[:2], exact, rtol=0.01)
        assert np.isnan(line.get_ydata()[2])
    with pytest.raises(InputError, match="nothing to draw"):
        plots.overview({0: gradstats.sketch(np.zeros(5, "f4"))}, Figure().subplots())


def test_maps_take_one_model(by_layer, ax):
    stacked = by_layer.expand_dims(kind=["gradient"])
    with pytest.raises(InputError, match="choose one kind"):
        plots.drift_map(stacked, "mean", ax)


def test_build_up_and_matching_rate_are_means(ax):
    rows = [{"compressor": "topk", "nproc": n, "build_up": u} for n, u in [(4, 3), (2, 1), (2, 2)]]
    plots.build_up(rows, ax)
    assert line(ax, "topk").tolist() == [[2, 1.5], [4, 3]]
    assert line(ax, "no overlap").tolist() == [[2, 2], [4, 4]]
    other = Figure().subplots()
    rows = [{"compressor": "marsit", "step": s, "matching_rate": 0.9} for s in (5, 1)]
    plots.matching_rate(rows, other)
    assert line(other, "marsit").tolist() == [[1, 0.9], [5, 0.9]]


def test_trainings_are_means_in_a_band_of_their_seeds(ax):
    rows = [
        {"compressor": name, "seed": seed, "step": step, "megabytes": 2 * step, "quality": value}
        for name, seed, values in (("topk", 0, (1, 2)), ("topk", 1, (3, 6)), ("micro", 0, (50,)))
        for step, value in enumerate(values, 1)
    ]
    plots.training_curves(rows, ax, value="quality")
    assert line(ax, "topk").tolist() == [[1, 2], [2, 4]]
    assert line(ax, "micro").tolist() == [[1, 50]]
    [band] = ax.collections  # one run alone has no band
    low, high = band.get_datalim(ax.transData).intervaly
    assert (low, high) == (1, 6)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == ("step", "k̂/k", "log")
    near = plots.training_curves(
        [r | {"floor": 0.1} for r in rows[:4]], Figure().subplots(), value="quality"
    )
    assert near.get_yscale() == "linear"  # where a decade would have one tick
    assert "noise floor" in [t.get_text() for t in near.get_legend().get_texts()]
    # a seed that ends early ends the comparison
    plots.training_curves(rows[:3], other := Figure().subplots(), value="quality", by="megabytes")
    assert line(other, "topk").tolist() == [[2, 2]]
    with pytest.raises(InputError, match="no quantity 'los'; there are loss, quality"):
        plots.training_curves(rows, ax, value="los")


@pytest.mark.parametrize("layers", [2, 20])
def test_delta_counts_what_breaks_the_assumption(ax, layers):
    rows = [{"layer": f"l{i}", "step": s, "delta": 0.2 * s} for i in range(layers) for s in (6, 1)]
    plots.lags_delta(rows, ax)
    legend = [t.get_text() for t in ax.get_legend().get_texts()]
    assert f"assumption fails: {layers} of {2 * layers}" in legend
    name = "l0" if layers == 2 else "largest"
    assert line(ax, name) == pytest.approx(np.array([[1, 0.2], [6, 1.2]]))
    assert ax.get_ylim()[1] >= 1.2


def test_of_many_layers_the_largest_delta_and_the_median_have_lines(ax):
    rows = [
        {"layer": f"l{i}", "step": s, "delta": 0.2 * s + i / 100} for i in range(21) for s in (6, 1)
    ]
    plots.lags_delta(rows, ax)
    assert line(ax, "largest") == pytest.approx(np.array([[1, 0.4], [6, 1.4]]))
    assert line(ax, "median") == pytest.approx(np.array([[1, 0.3], [6, 1.3]]))


def test_times_are_in_milliseconds(ax):
    rows = [{"compressor": "a", "compute": 0.01, "select": 0.002, "communicate": 0.003}] * 2
    plots.time_split(rows, ax)
    bars = [(p.get_x(), p.get_width()) for p in ax.patches]
    assert np.allclose(bars, [(0, 10), (10, 2), (12, 3)])
    assert len({p.get_hatch() for p in ax.patches}) == 3  # told apart in grey
    other = Figure().subplots()
    rows = [{"lane": lane, "layer": "fc", "start": s, "end": s + 0.01}
            for lane, s in (("compute", 5), ("communicate", 5.01))]  # fmt: skip
    plots.timeline(rows, other)
    assert np.allclose([(p.get_x(), p.get_width()) for p in other.patches], [(0, 10), (10, 10)])
    assert [t.get_text() for t in other.texts] == ["fc", "fc"]


def test_a_png_is_small_and_the_same_every_time(ax):
    plots.tail(X, [], ax)
    first = plots.png(ax.figure)
    assert first == plots.png(ax.figure)
    stream = io.BytesIO()
    ax.figure.savefig(stream, dpi=110)
    assert len(first) < 0.6 * len(stream.getvalue())


def test_figures_of_live_runs(tmp_path, monkeypatch, capsys):
    """tools/figures.py draws what records there are, and says which are not."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    figures = importlib.import_module("figures")
    for name in ("ROOT", "IMAGES", "RESULTS"):
        monkeypatch.setattr(figures, name, tmp_path)
    rows = [{"compressor": "topk", "nproc": n, "build_up": n} for n in (2, 4)]
    (tmp_path / "build_up.json").write_text(json.dumps(rows))
    monkeypatch.setattr(sys, "argv", ["figures.py", "build_up", "delta"])
    figures.main()
    said = capsys.readouterr()
    assert said.out.startswith("build_up.png: ")
    assert said.err == "missing: docs/results/delta.json, so no delta.png\n"
    assert [p.name for p in tmp_path.glob("*.png")] == ["build_up.png"]
    monkeypatch.setattr(sys, "argv", ["figures.py", "nonsense"])
    with pytest.raises(SystemExit):
        figures.main()


def test_figures_of_the_runs_to_a_plateau(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    figures = importlib.import_module("figures")
    curves = {"loss": [3.0, 2.0], "quality": [1.0, 0.5], "bytes": [2e6, 1e6], "diagnosed": [0, 5]}
    curves |= {"residual_norm": [0.1, 0.2], "matching_rate": [0.9, 0.8]}
    row = {"compressor": "topk", "ratio": 0.01, "seed": 0, "steps": 10, "bytes": 9.0}
    dense = {**row, "compressor": "none", "ratio": 1.0, "curves": {"loss": [3.0, 1.0], "bytes": []}}
    row["curves"] = curves
    assert [p["megabytes"] for p in figures.points(row, "loss")] == [10, 15]
    assert [p["megabytes"] for p in figures.points(dense, "loss")] == pytest.approx([45e-6, 90e-6])
    assert [p["step"] for p in figures.points(row, "quality")] == [5, 10]
    assert [(p["step"], p["residual_norm"]) for p in figures.points(row, "residual_norm")] == [
        (0, 0.1),
        (5, 0.2),
    ]
    for name, draw in figures.LIVE.items():
        if name.startswith("plateau") and name != "plateau-time":
            rows = (
                [row, dense] if "loss" in name or "bytes" in name else [row | {"compressor": "dgc"}]
            )
            [ax] = draw(rows).axes
            assert len(ax.lines) >= len(rows)


def test_committed_figures_are_small():
    for image in (DOCS / "img").glob("*.png"):
        assert image.stat().st_size < (200_000 if image.stem == "report" else 150_000), image


def test_a_rule_looks_the_same_in_every_figure():
    from capture.workloads import BASELINES
    from gradstats.compressors import COMPRESSORS
    from gradstats.plots.style import PALETTE, _luminance, look_of

    records = gradstats.quality(
        np.random.default_rng(0).laplace(size=2000), [0.1], ["dgc", "exact"]
    )
    ax = plots.quality_bars(records[::-1], Figure().subplots())
    series = gradstats.quality_series(np.ones(9), [0.5], ["dgc"])
    alone = plots.quality_over_steps(series, Figure().subplots())
    colours = {c.get_label(): c.lines[0].get_color() for c in ax.containers}
    assert colours["dgc"] == alone.lines[0].get_color() == look_of("dgc")["color"]
    assert look_of("topk") == look_of("exact") != look_of("dgc")
    names = [n for n in (*COMPRESSORS, *BASELINES) if n != "exact"]  # topk is exact
    looks = [tuple(str(look_of(name)[part]) for part in ("color", "ls")) for name in names]
    assert len(set(looks)) == len(looks)
    # rules of others: no palette has as many colours as there are names, but lines and markers vary, too
    others = [tuple(map(str, look_of(f"rule-{i}").values())) for i in range(300)]
    assert len(set(others)) >= 50
    assert {look[0] for look in others} == {str(colour) for colour in PALETTE}
    for colour in PALETTE:
        assert 1.05 / (_luminance(colour) + 0.05) >= 3


def test_qualities_are_means_with_their_spread(ax):
    rows = [
        {"estimator": name, "ratio": ratio, "mean": mean, "low": mean / 2, "high": 2 * mean, "floor_low": 0.9,
         "floor_high": 1.1}
        for name, ratio, mean in (("dgc", 0.1, 0.8), ("dgc", 0.01, 0.7), ("micro", 0.1, 1.2), ("micro", 0.01, 1.5))
    ]  # fmt: skip
    plots.quality_bars(rows, ax)
    drawn = [
        (bar.lines[0].get_ydata()[0], *bar.lines[2][0].get_segments()[0][:, 1])
        for bar in ax.containers
    ]
    assert np.allclose(drawn, [(r["mean"], r["low"], r["high"]) for r in rows])
    series = [
        {"estimator": "dgc", "step": step, "quality": quality, "k": 100}
        for step, quality in ((5, 0.5), (1, 1.0), (5, 1.5), (1, 3.0))
    ]
    other = plots.quality_over_steps(series, Figure().subplots())
    assert line(other, "dgc").tolist() == [[1, 2], [5, 1]]


def test_qualities_stand_over_the_tick_of_their_ratio_within_its_own_floor(ax):
    """Ratios that ascend nowhere, each with a floor of its own, in the order in which they come."""
    floors = {0.01: 0.2, 0.1: 0.06, 0.001: 0.6}
    rows = [
        {"estimator": name, "ratio": ratio, "mean": mean, "low": mean / 2, "high": 2 * mean}
        | {"floor_low": 1 - floors[ratio], "floor_high": 1 + floors[ratio]}
        for name, means in (("dgc", (0.8, 0.7, 0.6)), ("micro", (1.2, 1.5, 1.7)))
        for ratio, mean in zip(floors, means, strict=True)
    ]
    plots.quality_bars(rows, ax)
    ticks = dict(
        zip(ax.get_xticks(), [float(t.get_text()) for t in ax.get_xticklabels()], strict=True)
    )
    assert [*ticks.values()] == [*floors]
    assert len(ax.containers) == len(rows)
    for bar, row in zip(ax.containers, rows, strict=True):
        x = bar.lines[0].get_xdata()[0]
        near = min(ticks, key=lambda tick: abs(tick - x))
        assert ticks[near] == row["ratio"]
        assert x < near if row["estimator"] == "dgc" else x > near
    bands = [c for c in ax.collections if isinstance(c, PolyCollection)]
    assert len(bands) == len(floors)
    for band, (tick, ratio) in zip(bands, ticks.items(), strict=True):
        box = band.get_datalim(ax.transData)
        assert np.mean(box.intervalx) == pytest.approx(tick)
        assert box.intervaly == pytest.approx((1 - floors[ratio], 1 + floors[ratio]))


def floor_of(ax):
    (band,) = [p for p in ax.patches if p.get_label() == "noise floor"]
    return band.get_y(), band.get_y() + band.get_height()


@pytest.mark.parametrize("k", [100, 40_000])
def test_the_floor_over_steps_is_that_of_k_elements(ax, k):
    half = 1.96 / k**0.5
    series = [{"estimator": "dgc", "step": s, "quality": 1.0, "k": k} for s in (1, 2)]
    assert floor_of(plots.quality_over_steps(series, ax)) == pytest.approx(
        (1 - half, 1 + half), rel=1e-4
    )
    rows = [
        {"compressor": "dgc", "seed": 0, "step": s, "quality": 1.0, "floor": half} for s in (1, 2)
    ]
    drawn = plots.training_curves(rows, Figure().subplots(), value="quality")
    assert floor_of(drawn) == pytest.approx((1 - half, 1 + half))


def test_latencies_stand_in_the_row_of_their_compressor(ax):
    """A compressor that lacks a ratio moves no other one; only speed-ups have a line at 1."""
    seconds = {("topk", 0.1): 0.004, ("dgc", 0.1): 0.002, ("micro", 0.1): 0.001}
    seconds |= {("micro", 0.01): 0.0005, ("topk", 0.01): 0.003}
    rows = [
        {"compressor": n, "ratio": r, "seconds": s, "speedup": 0.004 / s}
        for (n, r), s in seconds.items()
    ]
    other = Figure().subplots()
    plots.latency_bars(rows, ax)
    plots.latency_bars(rows, other, value="speedup")
    for drawn, scale in ((ax, lambda s: 1e3 * s), (other, lambda s: 0.004 / s)):
        names = [t.get_text() for t in drawn.get_yticklabels()]
        assert names == ["topk", "dgc", "micro"]
        for ratio in (0.1, 0.01):
            found = {names[round(y)]: x for x, y in line(drawn, f"ratio {ratio:g}")}
            expected = {n: scale(s) for (n, r), s in seconds.items() if r == ratio}
            assert found == pytest.approx(expected)
        places = [y for r in (0.1, 0.01) for _, y in line(drawn, f"ratio {r:g}")]
        assert len(set(places)) == len(rows)
        assert drawn.yaxis_inverted()
    assert len(ax.lines) == 2
    assert [*other.lines[2].get_xdata()] == [1, 1]


def test_nothing_kept_is_marked():
    rows = [{"estimator": "micro", "ratio": 0.1, "mean": 0.0, "low": 0.0, "high": 0.0}]
    rows[0] |= {"floor_low": 0.9, "floor_high": 1.1}
    ax = plots.quality_bars(rows, Figure().subplots())
    assert [t.get_text() for t in ax.texts] == ["0"]
    series = [
        {"estimator": "micro", "step": s, "quality": q, "k": 9} for s, q in ((1, 0.0), (2, 1))
    ]
    ax = plots.quality_over_steps(series, Figure().subplots())
    assert [(t.get_text(), t.xy[0]) for t in ax.texts] == [("0", 1)]


def test_results_name_the_run_in_their_titles_and_axes_the_unit():
    from matplotlib import pyplot

    path = DATA / "resnet20.zarr"
    assert gradstats.open_trace(path).plot().get_title() == "resnet20, gradient, rank 0"
    records = gradstats.quality(path, [0.01], ["exact"])
    assert records.plot().get_title() == "resnet20, gradient"
    assert records.plot(title="mine").get_title() == "mine"
    found = gradstats.drift(path, ["mean"], models=["laplace"])
    drawn = found.plot("mean")
    assert drawn.get_title() == "resnet20, gradient"
    assert drawn.get_ylabel() == "mean magnitude (gradient's unit)"
    for name, variable in found.dataset.variables.items():
        assert variable.attrs["long_name"], name
        assert ("units" in variable.attrs) == (variable.dtype.kind not in "OU"), name
    pyplot.close("all")


def test_legends_of_many_rules_cover_nothing():
    records = gradstats.quality(np.random.default_rng(0).laplace(size=2000), [0.1, 0.01])
    figure = Figure(layout="constrained")
    ax = plots.quality_bars(records, figure.subplots())
    figure.draw_without_rendering()
    assert ax.get_legend().get_window_extent().x0 >= ax.get_window_extent().x1 - 1


def spread(one, other):
    """Return how far two colours are apart for usual eyes, and for those without red or green receptors (OKLab)."""
    to_lms = np.array(
        [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    )
    to_lab = np.array(
        [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    )
    eyes = (
        np.eye(3),
        np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
        np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    )  # Machado, Oliveira and Fernandes (2009)

    def lab(colour, eye):
        c = np.asarray(colour)
        linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
        return to_lab @ np.cbrt(to_lms @ np.clip(eye @ linear, 0, 1))

    distances = [np.linalg.norm(lab(one, eye) - lab(other, eye)) for eye in eyes]
    return distances[0], min(distances[1:])


def test_no_two_colours_look_alike():
    """Among the systems of the plateau five were some orange."""
    from gradstats.plots.style import PALETTE, look_of

    apart = [spread(a, b) for i, a in enumerate(PALETTE) for b in PALETTE[:i]]
    assert min(usual for usual, _ in apart) > 0.12
    assert min(other for _, other in apart) > 0.07
    systems = ("none", "topk", "sidco-e", "dgc", "redsync", "micro", "lags", "marsit")
    assert len({look_of(name)["color"] for name in systems}) == len(systems)


def test_a_qq_plots_legend_has_the_colours_drawn(ax):
    fits = [gradstats.fit(X, model) for model in ("laplace", "dgamma", "double_genpareto")]
    plots.qq(X, fits, ax)
    legend = ax.get_legend()
    entries = dict(
        zip([t.get_text() for t in legend.get_texts()], legend.legend_handles, strict=True)
    )
    lines = {x.get_label(): x.get_color() for x in ax.lines}
    for name in ("Laplace", "double gamma", "double gen. Pareto"):
        assert entries[name].get_color() == lines[name]
    # the one entry of the bands shows each of them
    shown = [p for p in legend.findobj(Patch) if p is not legend.get_frame()]
    bands = [tuple(band.get_facecolor()[0]) for band in ax.collections]
    assert np.allclose(sorted(tuple(p.get_facecolor()) for p in shown), sorted(bands))
    assert np.allclose([b[:3] for b in bands], [lines[label_of(f.model)] for f in fits])


def test_computing_is_the_same_for_all_and_its_noise_is_shaded(ax):
    rows = [
        {"compressor": name, "compute": compute, "select": select, "communicate": 0.02}
        for name, compute, select in (("a", 0.3, 0.001), ("b", 0.4, 0.002), ("c", 0.38, 0.003))
    ]
    plots.time_split(rows, ax)
    bars = {c.get_label(): [(p.get_x(), p.get_width()) for p in c] for c in ax.containers}
    assert np.allclose(bars["compute"], [(0, 380)] * 3)
    assert np.allclose(bars["select"], [(380, 1), (380, 2), (380, 3)])
    assert np.allclose(bars["communicate"], [(381, 20), (382, 20), (383, 20)])
    (band,) = [p for p in ax.patches if "measured" in p.get_label()]
    assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx((300, 400))
    assert band.get_label() == "compute, measured: 300 to 400 ms"
    ticks = ticks_of(ax)
    assert [ticks[round(p.get_y() + p.get_height() / 2)] for p in ax.containers[1]] == [*"abc"]


def test_every_block_of_a_timeline_is_named(ax):
    names = ["blocks.8.conv2.weight", "conv1.weight"]
    rows = [
        {"lane": "backward", "layer": names[0], "start": 1.0, "end": 1.000001},
        {"lane": "backward", "layer": names[1], "start": 1.0001, "end": 1.02},
        {"lane": "communicate", "layer": names[1], "start": 1.03, "end": 1.05},
    ]
    plots.timeline(rows, ax)
    key = [t.get_text() for t in ax.get_legend().get_texts()]
    assert key == [f"1  {names[0]}", f"2  {names[1]}"]
    assert [t.get_text() for t in ax.texts] == ["1", "2", "2"]
    for text, row in zip(ax.texts, rows, strict=True):
        x, y = text.get_position()
        assert x == pytest.approx(1e3 * ((row["start"] + row["end"]) / 2 - 1))
        assert ticks_of(ax)[round(y)] == row["lane"]
        low, high = sorted(ax.get_ylim())
        assert low < y < high


def test_intervals_of_speedups_are_bars_beside_each_other(ax):
    rows = [
        {"compressor": name, "ratio": 0.01, "workers": 4, "rate": 10.0**i, "speedup": s / (i + 1)}
        | {"speedup_low": s / (i + 2), "speedup_high": 2 * s / (i + 1)}
        for name, s in (("topk", 9.0), ("lags", 8.0), ("dense-bf16", 2.0))
        for i in range(12)
    ]
    plots.speedup(rows, ax)
    assert len({(tuple(x.get_color()), x.get_linestyle()) for x in ax.lines[:3]}) == 3
    places = []
    for line, bars in zip(ax.lines, ax.collections, strict=False):
        assert tuple(bars.get_color()[0][:3]) == tuple(line.get_color())
        segments = np.array(bars.get_segments())
        assert len(segments) == 5
        mine = [r for r in rows if r["compressor"] == line.get_label().partition(",")[0]]
        drawn = {tuple(s[:, 1]) for s in segments}
        assert drawn <= {(r["speedup_low"], r["speedup_high"]) for r in mine}
        places += [s[0, 0] for s in segments]
    assert len(set(places)) == 15  # none covers another
    assert not any(isinstance(c, PolyCollection) for c in ax.collections)


def test_speedups_that_are_not_known_take_no_line(ax):
    speedups = [5.0, math.nan, *(5 - 0.1 * i for i in range(1, 9)), math.nan, 50.0]
    rows = [
        {"compressor": "topk", "ratio": (i + 1) / 100, "workers": 4, "rate": 10.0}
        | dict.fromkeys(("speedup", "speedup_low", "speedup_high"), s)
        for i, s in enumerate(speedups)
    ]
    plots.speedup(rows, ax)
    shown = [text.get_text() for text in ax.get_legend().get_texts()]
    assert shown == [f"topk, {(i + 1) / 100:g}" for i in (11, 0, 2, 3, 4, 5, 6, 7)]
    with pytest.raises(InputError, match="no records of plan with a speed-up"):
        plots.speedup([rows[1], rows[10]], ax)


def test_speedups_of_few_records(ax):
    row = {"ratio": 0.01, "workers": 4, "speedup": 3.0, "speedup_low": 2.0, "speedup_high": 4.0}
    rows = [row | {"compressor": "topk", "rate": rate} for rate in (10.0, 100.0)]
    # planned for another number of workers only
    rows.append(row | {"compressor": "lags", "rate": 10.0, "workers": 8, "speedup": 9.0})
    plots.speedup(rows, ax)
    assert labels(ax) == ["topk, 0.01"]
    with pytest.raises(InputError, match="no records"):
        plots.speedup([], ax)
    rows = [row | {"compressor": f"c{i}", "rate": 10.0, "speedup": float(i)} for i in range(1, 11)]
    plots.speedup(rows, other := Figure().subplots())
    assert labels(other) == [f"c{i}, 0.01" for i in (10, 9, 8, 7, 6, 5, 4, 3)]


def test_speedups_are_over_the_baseline(ax):
    """With dense averaging in bfloat16 as the baseline, that in float32 is a line of its own."""
    row = {"ratio": None, "workers": 4, "rate": 10.0, "baseline": "torch-bf16"}
    speed = {"none": 0.5, "torch-bf16": 1.0, "topk": 3.0}
    rows = [
        row | {"compressor": name, "speedup": s, "speedup_low": s, "speedup_high": s}
        for name, s in speed.items()
    ]
    seconds = {"none": 4.0, "torch-bf16": 2.0, "topk": 0.5}
    measured = [row | {"compressor": name, "seconds": s} for name, s in seconds.items()]
    plots.speedup(rows, ax, measured=measured)
    assert ax.get_ylabel() == "times as fast as torch-bf16"
    assert labels(ax) == ["topk", "none"]
    points = {x.get_label(): x.get_ydata()[0] for x in ax.lines if "measured" in x.get_label()}
    assert points == {"_topk, measured": 4.0, "_none, measured": 0.5}


def test_points_measured_belong_to_the_line_of_their_ratio_and_local_steps(ax):
    """Each over the dense step of its own rate; none of other workers, or of a rate without a dense step."""
    ways = {("topk", 0.1, 0): 4.0, ("topk", 0.01, 0): 3.0, ("topk", 0.01, 5): 2.0}
    rows = [
        {"compressor": name, "ratio": ratio, "local_steps": steps, "workers": 4, "rate": rate}
        | {"speedup": speed, "speedup_low": speed, "speedup_high": speed}
        for (name, ratio, steps), speed in ways.items()
        for rate in (10.0, 100.0)
    ]
    dense = {10.0: 8.0, 100.0: 2.0}
    measured = [
        {"compressor": name, "ratio": ratio, "local_steps": steps, "workers": 4, "rate": rate}
        | {"seconds": seconds / by}
        for (name, ratio, steps), by in ({("none", None, 0): 1.0} | ways).items()
        for rate, seconds in dense.items()
    ]
    # a dense step among local ones is no baseline
    measured.append(measured[0] | {"local_steps": 5, "seconds": 0.1})
    measured += [r | {"workers": 8, "seconds": 0.01} for r in measured]
    measured += [measured[2] | {"rate": 1000.0}]
    plots.speedup(rows, ax, measured=measured)
    points = {x.get_label(): x.get_xydata() for x in ax.lines if "measured" in x.get_label()}
    expected = {
        f"_{name}, {ratio:g}{f', {steps} local steps' * bool(steps)}, measured": speed
        for (name, ratio, steps), speed in ways.items()
    }
    assert points.keys() == expected.keys()
    for label, speed in expected.items():
        assert points[label] == pytest.approx(np.array([[10, speed], [100, speed]])), label


def test_a_grey_stays_grey_in_a_png(ax):
    plots.density(X, [gradstats.fit(X, "laplace")], ax)
    drawn = {}
    for optimize in (True, False):
        with Image.open(io.BytesIO(plots.png(ax.figure, optimize=optimize))) as image:
            drawn[optimize] = np.asarray(image.convert("RGB")).astype(int)
        levels, counts = np.unique(drawn[optimize].reshape(-1, 3), axis=0, return_counts=True)
        most = levels[np.argsort(counts)[::-1][:2]]
        assert np.ptp(most, axis=1).max() <= 2  # the page, and the captured elements
        assert most.max() == 255
    # of 255, beside the picture that takes its time
    assert np.abs(drawn[True] - drawn[False]).mean() < 3


@pytest.mark.parametrize("dark", [False, True])
def test_a_figure_is_as_wide_as_asked_and_has_its_fonts(tmp_path, dark):
    from gradstats.plots.files import styled

    written = {}
    for ending in ("pdf", "svg", "png"):
        for again in ("a", "b"):
            with styled("whitegrid") as figure:
                figure.set_size_inches(85 / 25.4, 60 / 25.4)
                ax = plots.tail(X, [gradstats.fit(X, "laplace")], figure.subplots())
                plots.save(figure, tmp_path / f"{again}.{ending}", dark=dark)
            written[ending] = tmp_path / f"{again}.{ending}"
        assert written[ending].read_bytes() == (tmp_path / f"a.{ending}").read_bytes()
    assert ax.get_title() == ""
    pdf = written["pdf"].read_bytes()
    box = [float(x) for x in re.search(rb"MediaBox \[([^]]*)\]", pdf)[1].split()]
    assert box[2:] == pytest.approx([72 * 85 / 25.4, 72 * 60 / 25.4])
    found = {a or b for a, b in re.findall(rb"/Subtype /(Type\d)|/(FontFile2)", pdf)}
    assert found == {b"Type0", b"FontFile2"}  # TrueType, and no bitmaps or outlines by Type 3
    svg = written["svg"].read_text("utf-8")
    assert re.search(r'width="240.9\d*pt"', svg)
    assert "<text" not in svg
    with Image.open(written["png"]) as image:
        assert image.width == pytest.approx(85 / 25.4 * 300, abs=1)
        corner = image.convert("RGBA").getpixel((0, 0))
    assert corner[3] == (0 if dark else 255)
    with pytest.raises(InputError, match=r"name it \.pdf, \.svg, \.png"):
        plots.save(figure, tmp_path / "x.eps")
    with pytest.raises(InputError, match="cannot write"):
        plots.save(figure, tmp_path / "no" / "x.pdf")


def test_a_dark_figure_is_light_on_dark_in_the_same_hues(ax):
    from colorsys import rgb_to_hls

    from gradstats.plots.files import darken

    plots.tail(X, [gradstats.fit(X, "laplace")], ax)
    before = {x.get_label(): to_rgb(x.get_color()) for x in ax.lines}
    darken(ax.figure)
    after = {x.get_label(): to_rgb(x.get_color()) for x in ax.lines}
    for name in ("captured", "Laplace"):
        (hue, low, _), (turned, high, _) = (rgb_to_hls(*c[name]) for c in (before, after))
        assert low < 0.5 < high
        assert name == "captured" or turned == pytest.approx(hue, abs=0.03)
    assert to_rgb(ax.xaxis.label.get_color()) == pytest.approx((1, 1, 1), abs=0.01)
    for tick in ax.xaxis.get_major_ticks():
        assert to_rgb(tick.label1.get_color()) == pytest.approx((1, 1, 1), abs=0.01)


def test_dark_colours_are_those_of_css():
    """``invert(1) hue-rotate(180deg)``: of c′ = 1 − c the mirror image about its grey, twice the luminance less c′."""
    from gradstats.plots.files import _inverted
    from gradstats.plots.style import PALETTE

    for colour in map(to_rgb, PALETTE):
        inverted = 1 - np.array(colour)
        grey = np.dot([0.213, 0.715, 0.072], inverted)  # CSS filter effects, 8.2
        assert _inverted(colour)[:3] == pytest.approx(np.clip(2 * grey - inverted, 0, 1), abs=1e-9)


def test_a_figure_saved_dark_keeps_its_own_colours(ax, tmp_path):
    plots.tail(X, [gradstats.fit(X, "laplace")], ax)
    ax.bar([1, 2], [0.1, 0.2], color="tab:red")
    ax.scatter([3, 4], [0.1, 0.2], c=[0.0, 1.0])
    light, dark, again = (tmp_path / f"{name}.svg" for name in ("light", "dark", "again"))
    for path in (light, dark, again):
        # ticks that a later drawing adds have the colours, too
        ax.set_xlim(1e-3, 10 if path is dark else 1e3)
        plots.save(ax.figure, path, dark=path is dark)
    assert light.read_bytes() == again.read_bytes() != dark.read_bytes()
    with pytest.raises(InputError):
        plots.save(ax.figure, tmp_path / "no" / "x.svg", dark=True)
    plots.save(ax.figure, again)
    assert light.read_bytes() == again.read_bytes()
