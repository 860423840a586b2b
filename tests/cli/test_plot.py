"""``gradstats plot``: every figure from the sources that it names, and what it says where there is nothing to draw."""

from __future__ import annotations

import inspect
import json
import re

import numpy as np
import pytest
from conftest import DATA, ROOT
from matplotlib.figure import Figure
from support.every import every
from support.terminal import run
from support.traces import LAYERS, said, write, write_replicas

import gradstats
from gradstats import plots
from gradstats.cli.plot import FIGURES, _from_traces
from gradstats.plots import files
from gradstats.trace import create_trace

RESULTS = ROOT / "docs" / "results"
FILES = {
    "latency_bars": "bench",
    "speedup": "speedup",
    "time_split": "time_split",
    "build_up": "build_up",
    "lags_delta": "delta",
    "matching_rate": "matching_rate",
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("plot") / "run.zarr"
    create_trace(path, LAYERS, world_size=1, metadata={"compressor": "topk", "seed": 3})
    write(path, range(3), rank=0, compression=True)
    return path


@pytest.fixture
def drawn(monkeypatch):
    """The axes that the command draws, when they are written."""
    found = []

    def save(figure, path, *, dark):
        found.append((figure, dark))

    monkeypatch.setattr(plots, "save", save)
    return found


def test_every_figure_of_the_package_can_be_drawn():
    # names of types are not called
    drawn = {name for name in plots.__all__ if inspect.isfunction(getattr(plots, name))}
    # no command writes the records of a timeline
    assert set(FIGURES) == drawn - {"png", "save", "timeline"}
    listed = run("plot", "--help").stdout
    assert all(re.search(rf"\b{name.replace('_', '-')}\b", listed) for name in FIGURES)
    assert "timeline" not in listed


def test_a_sharded_compressor_has_the_ranks_that_exchange_and_the_bytes_of_one(tmp_path):
    """Each of two replicas has two ranks, which select of different elements."""
    path = write_replicas(tmp_path / "run.zarr", range(3), compression=True, compressor="topk")
    rows = _from_traces(path, False)
    one = said(1)["compression"]["bytes_sent"]
    assert {(r["nproc"], r["rank"]) for r in rows} == {(2, 0), (2, 2)}
    assert [r["megabytes"] * 1e6 for r in rows[:3]] == pytest.approx(
        [one - 1, 2 * one - 1, 3 * one]
    )


@every("name", FIGURES)
def test_every_figure_is_drawn_in_its_size(name, trace, drawn, monkeypatch):
    called, draw = [], getattr(plots, name)
    drawn.clear()

    def spy(*given, ax, **rest):
        called.append((given, rest, draw(*given, ax=ax, **rest)))

    monkeypatch.setattr(plots, name, spy)
    source = RESULTS / f"{FILES[name]}.json" if name in FILES else trace
    done = run(
        "plot", name.replace("_", "-"), source, "-o", "x.svg", "--width", 100, "--height", 50
    )
    assert done.returncode == 0, done.stderr
    [(figure, dark)], [(given, rest, ax)] = drawn, called
    assert given
    assert rest["title"] is None
    assert ax.get_title() == ""
    assert not dark
    assert figure.get_size_inches() * 25.4 == pytest.approx((100, 50))
    assert ax.lines or ax.collections or ax.patches
    assert all((ax.get_xlabel(), ax.get_ylabel() or ax.get_yticklabels()))
    assert done.stderr.startswith("wrote x.svg: ") or "\nwrote x.svg: " in done.stderr


def test_the_gradient_is_the_one_asked_for(drawn):
    done = run("plot", "tail", DATA / "resnet20-ef.zarr", "-o", "x.pdf", "--kind", "corrected", "--step", 100,
               "--model", "laplace", "--title", "mine", "--dark")  # fmt: skip
    assert "wrote x.pdf: resnet20-ef, corrected, step 100, rank 0" in done.stderr
    [(figure, dark)] = drawn
    [ax] = figure.axes
    assert dark
    assert ax.get_title() == "mine"
    g = gradstats.open_trace(DATA / "resnet20-ef.zarr").read(100, kind="corrected")
    expected = plots.tail(g, [gradstats.fit(g, "laplace")], Figure().subplots())
    for line, other in zip(ax.lines, expected.lines, strict=True):
        assert np.allclose(line.get_xydata(), other.get_xydata(), equal_nan=True)


@pytest.mark.usefixtures("drawn")
def test_style_and_context_are_those_asked_for(trace, monkeypatch):
    asked, styled = [], files.styled
    monkeypatch.setattr(files, "styled", lambda *how: asked.append(how) or styled(*how))
    run(
        "plot",
        "tail",
        trace,
        "-o",
        "x.pdf",
        "--model",
        "laplace",
        "--style",
        "dark",
        "--context",
        "talk",
    )
    assert asked == [("dark", "talk")]


@every("name", FIGURES)
def test_a_layer_is_drawn_or_refused(name, trace, drawn, monkeypatch):
    said = {}

    def spy(*given, ax, **rest):
        said["given"] = given
        ax.plot([0, 1])

    monkeypatch.setattr(plots, name, spy)
    source = RESULTS / f"{FILES[name]}.json" if name in FILES else trace
    layer = "*weight" if name == "lags_delta" else "a.bias"
    done = run("plot", name.replace("_", "-"), source, "-o", "x.svg", "--layer", layer)
    if FIGURES[name].records and name != "lags_delta":
        assert done.returncode == 2
        assert "this figure is of no layer by itself: leave out --layer" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    if FIGURES[name].records:
        assert said["given"][0]
        return
    assert name.endswith("_map") or "a.bias" in done.stderr
    values = gradstats.open_trace(trace).read(2, layer="a.bias")
    first = said["given"][0]
    if name in ("tail", "density", "qq", "mean_excess", "parameter_stability"):
        assert np.array_equal(first, values)
    elif isinstance(first, dict):  # sketches by step
        assert {sketch.numel for sketch in first.values()} == {values.size}
    elif name.startswith("quality"):
        assert {r["layer"] for r in first} == {"a.bias"}
    two = run("plot", name.replace("_", "-"), source, "-o", "x.svg", "--layer", "a.*")
    assert two.returncode == (0 if name.endswith("_map") else 2)
    assert name.endswith("_map") or "one layer a figure" in two.stderr
    assert (
        run("plot", name.replace("_", "-"), source, "-o", "x.svg", "--layer", "z").returncode == 2
    )


def test_unless_chosen_the_largest_size_the_smallest_ratio_and_three_steps_are_drawn(
    trace, tmp_path, drawn, monkeypatch
):
    called = {}
    for name in ("latency_bars", "quality_over_steps", "best_k_error"):

        def spy(data, *, ax, name=name, **_):
            called[name] = data

        monkeypatch.setattr(plots, name, spy)
    rows = [
        {"compressor": "topk", "ratio": 0.1, "seconds": 1.0, "numel": numel}
        for numel in (1000, 50_000, 2000)
    ]
    (tmp_path / "bench.json").write_text(json.dumps(rows), "utf-8")
    for figure, source in (
        ("latency-bars", tmp_path / "bench.json"),
        ("quality-over-steps", trace),
        ("best-k-error", trace),
    ):
        assert run("plot", figure, source, "-o", "x.svg", "--kind", "gradient").returncode == 0
    assert called["latency_bars"] == [rows[1]]
    assert {r["ratio"] for r in called["quality_over_steps"]} == {0.001}
    assert list(called["best_k_error"]) == [f"gradient, step {step}" for step in range(3)]


@pytest.mark.usefixtures("drawn")
def test_the_ranks_that_are_shaded_are_those_of_p(tmp_path, monkeypatch):
    """Of a gradient of which nine tenths are zero, the largest hundredth of the others."""
    windows = []
    monkeypatch.setattr(plots, "magnitude_decay", lambda *_, window, **__: windows.append(window))
    x = np.zeros(200_000, np.float32)
    x[:20_000] = np.random.default_rng(3).laplace(size=20_000)
    for name, vector in (("sparse", x), ("whole", x[:20_000]), ("one", x[19_999:21_000])):
        np.save(tmp_path / f"{name}.npy", vector)
        done = run("plot", "magnitude-decay", tmp_path / f"{name}.npy", "-o", "x.svg")
        assert done.returncode == 0, done.stderr
    assert windows == [(1, 200), (1, 200), None]  # one element has no window
    assert gradstats.compressibility(x).window == (1, 200)


def test_records_of_traces_are_summed_and_named(trace, drawn):
    assert run("plot", "training-curves", trace, "-o", "x.png", "--by", "megabytes").returncode == 0
    rows = gradstats.compression(trace)
    [ax] = drawn[0][0].axes
    (line,) = (x for x in ax.lines if x.get_label() == "topk")
    assert np.allclose(line.get_xdata(), np.cumsum([r["bytes"] for r in rows]) / 1e6)


def test_megabytes_are_those_of_one_rank_and_of_the_captured_steps(tmp_path, drawn):
    """Of two ranks' rows, one after the other, neither axis would be in order."""
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS, world_size=2, metadata={"compressor": "topk"})
    for rank in range(2):
        write(path, range(0, 50, 10), rank=rank, compression=True)
    assert run("plot", "training-curves", path, "-o", "x.png", "--by", "megabytes").returncode == 0
    [ax] = drawn[0][0].axes
    assert ax.get_xlabel() == "MB sent by a rank in the captured steps"
    (line,) = (x for x in ax.lines if x.get_label() == "topk")
    rows = [r for r in gradstats.compression(path) if r["rank"] == 0]
    assert np.allclose(line.get_xdata(), np.cumsum([r["bytes"] for r in rows]) / 1e6)
    assert run("plot", "training-curves", path, "-o", "x.png").returncode == 0
    assert drawn[1][0].axes[0].get_xlabel() == "step"


@every(
    ("command", "said"),
    [
        (("tial", "run.zarr", "-o", "x.pdf"), "no figure 'tial'; there are tail, density"),
        (("tail", "run.zarr", "-o", "x.gif"), "no figure for x.gif: name it .pdf, .svg, .png"),
        (("tail", "run.zarr", "-o", "x.pdf", "--style", "grey"), "no style 'grey'; there are ticks"),
        (("speedup", "run.zarr", "-o", "x.pdf"), "gradstats plan -o records.json"),
        (("speedup", "x.json", "-o", "x.pdf"), "no speedup in x.json: this figure takes what gradstats plan writes"),
        (("latency-bars", "plan.json", "-o", "x.pdf"), "no seconds in plan.json: this figure takes what"),
        (("speedup", "y.json", "-o", "x.pdf"), "y.json is not JSON of gradstats plan"),
        (("time-split", "none.json", "-o", "x.pdf"), "cannot read none.json"),
        (("tail", DATA, "-o", "x.pdf"), "one source a figure, and here are "),
        (("training-curves", "run.zarr", "-o", "x.pdf", "--quantity", "los"), "no los in run.zarr"),
    ],
)  # fmt: skip
def test_a_figure_that_cannot_be_drawn_says_why(command, said, trace, tmp_path, monkeypatch):
    monkeypatch.chdir(trace.parent)
    np.save("g.npy", np.ones(9, np.float32))
    (trace.parent / "x.json").write_text(
        json.dumps([{"compressor": "topk", "ratio": 0.1}]), "utf-8"
    )
    # what other commands write has no `numel`
    (trace.parent / "plan.json").write_text(
        json.dumps([{"compressor": "topk", "ratio": 0.1, "speedup": 1.2}]), "utf-8"
    )
    (trace.parent / "y.json").write_text("{}", "utf-8")
    done = run("plot", *command)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert said in done.stderr
