"""Results that show themselves: one line, a table with intervals, a data frame, a figure."""

from __future__ import annotations

import importlib
import inspect
import math
import pydoc
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import DATA
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from support.every import every

import gradstats
from gradstats.errors import InputError
from gradstats.tables import Records, format_uncertain, joined

X = np.random.default_rng(0).laplace(size=5000).astype(np.float32)
TRACE = DATA / "resnet20-ef.zarr"

MADE = {
    "Fit": lambda: gradstats.fit(X, "dgamma"),
    "Fits": lambda: gradstats.fit_all(X, ["laplace", "double_genpareto", "norm"]),
    "Pot": lambda: gradstats.pot.parameter_stability(X, [0.1, 0.05]),
    "Compressibility": lambda: gradstats.compressibility(X),
    "Quality": lambda: gradstats.quality(X, [0.1, 0.01], ["sidco-e", "dgc"]),
    "Trace": lambda: gradstats.open_trace(TRACE),
    "Sketch": lambda: gradstats.sketch(X),
}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@every("name", MADE)
def test_every_result_shows_itself(name):
    thing = MADE[name]()
    assert type(thing).__name__ == name
    text = repr(thing)
    assert len(text) < 250 or isinstance(thing, Records)
    assert max(map(len, text.splitlines())) <= 80 or "\n" not in text
    assert not re.search(r"\d\.\d{7,}", text)
    html = thing._repr_html_()
    assert re.match("(<p>.*</p>\n)?<table", html)
    assert not re.search(r"\d\.\d{7,}", html)
    frame = thing.summary()
    assert len(frame) >= 1
    assert frame.columns.size >= 5
    assert isinstance(thing.plot(), Axes)
    ax = plt.subplots()[1]
    assert thing.plot(ax=ax, title="here") is ax
    assert ax.get_title(loc="left") + ax.get_title() == "here"


def test_a_drift_and_a_plan_show_themselves():
    from gradstats.analysis.drift import drift_records

    dataset = gradstats.over_training(TRACE, models=(), ratios=(), kinds=["gradient"])
    moved = drift_records(dataset, ["mean", "p"])
    assert type(moved).__name__ == "Drift"
    assert isinstance(moved.plot(), Axes)
    assert isinstance(moved.plot("p"), Axes)
    assert "mean" in repr(moved)


def test_a_notebook_says_once_what_all_rows_share():
    html = Records(
        [{"layer": "<b>", "step": i, "c": 0.5 * i, "flags": ""} for i in range(2)]
    )._repr_html_()
    said, table = html.split("\n", 1)
    assert said == "<p>layer &lt;b&gt;</p>"
    assert re.findall("<th>(.*)</th>", table) == ["step", "ξ"]


def test_the_summary_has_the_numbers_in_full():
    fitted = gradstats.fit(X, "laplace")
    frame = fitted.summary()
    assert frame["scale"].tolist() == [fitted.params["scale"]]
    assert tuple(frame.loc[0, ["scale_low", "scale_high"]]) == fitted.interval("scale")
    rows = gradstats.fit_all(X, ["norm", "laplace"]).summary()
    assert rows["model"].tolist() == ["laplace", "norm"]
    assert rows["ks"].is_monotonic_increasing


def test_models_without_a_fit_say_why():
    fits = gradstats.fit_all(np.ones(50, np.float32), ["dgamma", "laplace"])
    assert [each.model for each in fits] == ["laplace"]
    assert "no shape describes them" in fits._repr_html_()


def test_flags_are_words_and_names_cannot_be_markup():
    (row,) = joined([{"layer": "<b>", "flags": ("shape above 1/4", "two"), "ok": True, "x": None}])
    assert row == {"layer": "<b>", "flags": "shape above 1/4; two", "ok": "yes", "x": "–"}
    assert "<b>" not in Records([{"layer": "<b>"}])._repr_html_()


@every(
    ("numbers", "text"),
    [
        ((0.83412, 0.81377, 0.85447), "0.834 (0.814 to 0.854)"),
        ((128.34, 99.9, 160.2), "128 (100 to 160)"),
        ((1.2345e-5, 1.1e-5, 1.4e-5), "1.23 (1.10 to 1.40)·10^-5"),
        ((-0.5, -1.0, 0.0), "-0.50 (-1.00 to 0.00)"),
        ((0.5, 0.5, 0.5), "0.500 (0.500 to 0.500)"),
        ((12.0, 3.0, math.inf), "12.0 (3.00 to inf)"),
        ((0.12345, math.nan, math.nan), "0.123"),
        ((None, 0.1, 0.2), "–"),
    ],
)
def test_digits_are_those_that_the_interval_leaves(numbers, text):
    assert format_uncertain(*numbers) == text


def test_long_records_are_cut():
    text = repr(Records({"step": i, "x": i / 7} for i in range(100)))
    assert text.startswith("100 records")
    assert text.endswith("… 88 more")
    assert repr(Records()) == "Records([])"


def test_a_result_without_a_sample_says_what_to_do():
    fitted = gradstats.Fit("laplace", {"loc": 0.0, "scale": 1.0}, 0.0, 10, "closed")
    with pytest.raises(InputError, match=r"plots\.tail"):
        fitted.plot()


PUBLIC = ("gradstats", "gradstats.hooks", "gradstats.plots", "gradstats.thresholds", "gradstats.compressors",
          "gradstats.trace", "gradstats.network", "gradstats.report", "gradstats.tables", "gradstats.primitives",
          "gradstats.collectives", "gradstats.statistics.laws", "gradstats.statistics.goodness",
          "gradstats.statistics.pot", "capture")  # fmt: skip


@every("name", PUBLIC)
def test_help_shows_no_address(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        thing = getattr(module, public)
        if not isinstance(thing, str):  # help of a text looks for what it names
            text = pydoc.render_doc(thing, renderer=pydoc.plaintext)
            assert " at 0x" not in text, public


def test_what_is_called_as_a_command_has_its_signature():
    from gradstats.analysis.peaks import pot
    from gradstats.report import write_report

    assert inspect.signature(gradstats.report) == inspect.signature(write_report)
    assert inspect.signature(gradstats.pot) == inspect.signature(pot)
    assert list(inspect.signature(gradstats.report).parameters) == [
        "sources",
        "path",
        "advice",
        "client",
    ]


def test_objects_of_a_training_say_what_runs_and_what_was_sent(tmp_path, capsys):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from capture import Capture
    from gradstats.compressors import make_compressor
    from gradstats.hooks import CompressionState, LocalSteps, compression_hook

    def train(forward, step=lambda: None):
        optimizer.zero_grad()
        forward(torch.ones(2, 40)).square().sum().backward()
        step()
        optimizer.step()

    model = torch.nn.Linear(40, 50)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    monitor = gradstats.Monitor(model, optimizer=optimizer)
    capture = Capture(tmp_path / "<b>.zarr", model)
    assert "last described none yet" in repr(monitor)
    assert "recorded 0 steps" in repr(capture)
    for _ in range(3):
        train(model, capture.step)
    assert "called by the optimizer, next step 3, last described step 2, norm " in repr(monitor)
    assert "state recording, next step 3, recorded 3 steps, a step takes 8.2 kB" in repr(capture)
    assert "a step, in " not in capsys.readouterr().err  # that little is not worth a word
    large = torch.nn.Linear(400, 500)
    with Capture(tmp_path / "large.zarr", large) as every:
        large(torch.ones(2, 400)).sum().backward()
        every.step()
    assert "802 kB a step, in " in capsys.readouterr().err
    assert "&lt;b&gt;" in capture._repr_html_()
    monitor.close()
    capture.close()
    assert "state closed" in repr(capture)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        state = CompressionState(make_compressor("topk", 0.01))
        assert "compressor topk at ratio 0.01, memory ErrorFeedback" in repr(state)
        assert "sent nothing yet" in repr(state)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, compression_hook)
        train(ddp)
        k, size = state.last.selected, gradstats.tables.format_bytes(state.last.bytes_sent)
        said = f"{k} of 2,050 elements (k̂/k {k / state.last.target:.2f}), {size}, in step 0"
        assert f"next step 1, sent {said}" in repr(state)
        assert said in state._repr_html_()
        del ddp
        local = LocalSteps(
            model, optimizer, steps=2, compressor=make_compressor("sidco-e", 0.1), fragments=2
        )
        with local:
            train(model)
            train(model)
        assert "compressor sidco-e at ratio 0.1, outer optimizer SGD" in repr(local)
        assert "fragments 2, local steps 2, exchanges 1, sent " in repr(local)
        assert "<td" in local._repr_html_()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("free", "total", "said"),
    [
        (10**9, None, ""),
        (10**6, None, "room for 121 captured steps: capture fewer"),
        (10**6, 100, ""),
        (10**6, 200, "room for 121 captured steps, and 200 would take 1.64 MB"),
    ],
)
def test_a_capture_warns_if_the_disk_will_be_full(free, total, said, tmp_path, monkeypatch, capsys):
    import torch

    from capture import Capture, CaptureWarning

    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    model = torch.nn.Linear(40, 50)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        with Capture(tmp_path / "x.zarr", model, range(1000), total_steps=total) as capture:
            model(torch.ones(40)).sum().backward()
            capture.step()
    found = [str(w.message) for w in caught if w.category is CaptureWarning]
    assert len(found) == bool(said)
    assert said in "".join(found)
    assert "a step" not in capsys.readouterr().err  # the steps were chosen


def test_the_ranks_of_a_capture_share_the_disk(tmp_path, monkeypatch, capsys):
    from capture.room import Room

    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    assert "room for 2 captured steps" in Room(4, thinned=False).problem(tmp_path, 1e5, 10)
    assert "400 kB a step of 4 ranks" in capsys.readouterr().err
    assert not Room(1, thinned=True).problem(tmp_path, 1e5, 10)
