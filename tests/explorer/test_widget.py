"""The widget: its view in Python, what it refuses, laws fitted when they are asked for."""

from __future__ import annotations

import json
import re
import sys

import pytest
from conftest import DATA

import gradstats
from gradstats.errors import GradstatsError

RESNET = DATA / "resnet20.zarr"


def test_without_anywidget_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "gradstats.explorer.widget", raising=False)
    with pytest.raises(GradstatsError) as caught:
        gradstats.explore(RESNET)
    assert str(caught.value) == (
        "the explorer in JupyterLab needs anywidget: pip install 'gradstats[explore]'; "
        "gradstats explore SOURCE -o FILE.html needs nothing"
    )


@pytest.fixture
def view():
    pytest.importorskip("anywidget", reason="the extra explore is not installed")
    return gradstats.explore(
        RESNET,
        steps=[10, 2999],
        layers=["conv1.weight"],
        estimators=["exact", "hard"],
        ratios=[0.01, 0.001],
    )


def test_the_view_is_read_and_set_and_what_there_is_not_is_refused(view):
    assert (view.run, view.step, view.layer, view.ratio) == (
        "resnet20/gradient/0",
        2999,
        "all",
        0.001,
    )
    assert (view.laws, view.rules) == (["laplace", "dgamma", "double_genpareto"], ["exact"])
    view.step, view.layer, view.ratio, view.laws = 10, "conv1.weight", 0.01, ["norm"]
    assert repr(view) == "<Explorer resnet20/gradient/0 step=10 layer=conv1.weight ratio=0.01>"
    for name, value in {
        "step": 11,
        "layer": "conv",
        "ratio": 0.5,
        "rules": ["dgc"],
        "laws": ["x"],
        "run": "y",
    }.items():
        with pytest.raises(GradstatsError) as caught:
            setattr(view, name, value)
        assert "\n" not in str(caught.value)
        assert getattr(view, name) != value
    assert view.layer == "conv1.weight"


def test_a_law_is_fitted_when_it_is_asked_for(view, monkeypatch):
    sent = []
    monkeypatch.setattr(view, "send", sent.append)
    question = {"run": view.run, "step": 10, "layer": "conv1.weight", "law": "norm"}
    view._answer(view, {"id": "7", **question}, [])
    fitted = gradstats.fit(gradstats.open_trace(RESNET).read(10, layer="conv1.weight"), "norm")
    assert sent[0]["id"] == "7"
    assert sent[0]["found"]["params"] == [fitted.params["scale"]]
    view._answer(view, {"id": "8", **question, "step": 11}, [])
    assert "no step" in sent[1]["found"]["flags"]


def test_a_view_is_saved_as_a_page(view, tmp_path):
    view.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(data)["series"][0]["steps"] == [10, 2999]
    assert json.loads(data)["on_demand"] is False
