"""Results that show themselves: one line, a table with intervals, a data frame, a figure."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from conftest import DATA
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

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


@pytest.mark.parametrize("name", MADE)
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


@pytest.mark.parametrize(
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
