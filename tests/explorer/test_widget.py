"""The widget: its view in Python, what it refuses, laws fitted when they are asked for; live in JupyterLab."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest
from conftest import DATA, ROOT
from support.browser import CHROMIUM, NO_BROWSER, Browser

import gradstats
from gradstats.errors import GradstatsError

RESNET = DATA / "resnet20.zarr"
CELL = f"""\
import gradstats
view = gradstats.explore({str(RESNET)!r}, layers=["conv1.weight"], estimators=["exact", "hard"])
view"""


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


def test_what_the_page_reads_is_what_is_sent_to_it(view):
    source = (ROOT / "gradstats/explorer/js/src/index.js").read_text()
    traits = json.loads(re.search(r"const TRAITS = (\[.*?\]);", source)[1])
    named = dict(re.findall(r"(\w+): \"(\w+)\"", re.search(r"const NAMED = {(.*?)}", source)[1]))
    assert named == {"from": "first", "to": "last"}
    read = {named.get(name, name) for name in traits} | {"payload"}
    assert read <= set(view.traits(sync=True))
    assert view.get_state(read).keys() == read


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


@pytest.fixture
def lab(tmp_path):
    """The address of a JupyterLab that runs a notebook with the explorer."""
    pytest.importorskip("anywidget", reason="the extra explore is not installed")
    import nbformat  # seconds, which every process that collects tests would take

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata.kernelspec = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.write(notebook, tmp_path / "run.ipynb")
    options = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.port=0",
        "--IdentityProvider.token=",
        "--ServerApp.ip=127.0.0.1",
    ]
    options += [f"--ServerApp.root_dir={tmp_path}", "--ServerApp.disable_check_xsrf=True"]
    folders = {f"JUPYTER_{n}_DIR": str(tmp_path / n.lower()) for n in ("RUNTIME", "CONFIG")}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            stdout=log,
            stderr=log,
            env=os.environ | folders,
        )
    try:
        end = time.monotonic() + 120
        while not (
            found := re.search(r"(http://127\.0\.0\.1:\d+)/lab", (tmp_path / "log").read_text())
        ):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end
            time.sleep(0.2)
        yield found[1]
    finally:
        process.terminate()  # it ends its kernels, too
        process.wait(60)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_live_in_jupyterlab_the_widget_draws_and_fits_a_law_that_is_chosen(lab):
    page = f"{lab}/lab/tree/run.ipynb"
    with Browser() as browser, browser.open(page, new=True, height=1400) as tab:
        tab.until("document.querySelector('.jp-Notebook .jp-InputArea-editor')", 120)

        def started():  # a cell that is run before the kernel is there stays as it is
            tab.eval("document.querySelector('.jp-Notebook .cm-content').focus()")
            tab.key("Enter", modifiers=8, text="\r")  # with shift: run
            time.sleep(3)
            return tab.eval("document.querySelector('.jp-InputPrompt').innerText") != "[ ]:"

        tab.until(started, 120)
        tab.until("document.querySelector('.gs-explorer #gs-magnitudes svg')", 200)
        tab.until(
            "document.querySelector('#gs-magnitudes svg').clientWidth"
            " > document.querySelector('.gs-explorer').clientWidth - 50"
        )
        tab.eval("document.querySelector('.gs-explorer input[value=norm]').click()")
        shown = (
            "[...document.querySelectorAll('#gs-laws tbody tr')].map((r) => r.innerText).join('|')"
        )
        tab.until(f"/norm[^|]*scale [0-9.]+/.test({shown})", 60)
        assert not [e for e in tab.errors if "gs-" in e or "anywidget" in e]
