"""Work that takes long says so once where nobody sees a bar."""

from __future__ import annotations

import re
import time

import pytest
from conftest import DATA

from gradstats import console


@pytest.fixture
def said(monkeypatch, capsys):
    monkeypatch.setattr(console, "SOON_S", 0.2)
    monkeypatch.setattr(console, "LATEST_S", 0.5)
    monkeypatch.setattr(console.messages(), "quiet", False)

    def work(steps, seconds):
        with console.progress_bar() as bar:
            task = bar.add_task("fitting", total=steps)
            for _ in range(steps or 1):
                time.sleep(seconds)
                bar.advance(task)
        return capsys.readouterr().err

    return work


def test_the_time_left_is_said_when_a_tenth_is_done(said):
    line = said(20, 0.05)
    done, after, left = map(int, re.findall(r"\d+(?= of| s)", line))
    assert re.fullmatch(r"fitting: \d+ of 20 after \d+ s, about \d+ s left\n", line)
    assert 2 <= done < 20
    assert after <= 1 >= left


def test_work_without_parts_says_that_it_goes_on(said):
    assert re.fullmatch(r"fitting: 0 of 1 after \d s\n", said(1, 0.8))
    assert said(None, 0.8).startswith("fitting: under way after")


def test_quick_or_quiet_work_says_nothing(said, monkeypatch):
    assert said(3, 0.01) == ""
    monkeypatch.setattr(console.messages(), "quiet", True)
    assert said(20, 0.05) == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_in_a_notebook_a_bar_comes_when_work_takes_long():
    # seconds, which every process that collects tests would take
    import nbformat
    from nbclient import NotebookClient

    quick = f"""
import gradstats
from gradstats import console
result = gradstats.quality({str(DATA / "resnet20.zarr")!r}, ratios=[0.01], estimators=["exact"])
"""
    slow = f"console.SOON_S = 0{quick}"
    source = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in (quick, slow)])
    notebook = NotebookClient(source, timeout=120).execute()
    none, bar = (cell.outputs for cell in notebook.cells)
    assert none == []
    assert {"application/vnd.jupyter.widget-view+json"} <= {key for o in bar for key in o.data}
    assert all(o.output_type == "display_data" for o in bar)
