"""Work that takes long says so once where nobody sees a bar."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from conftest import DATA

from gradstats import console


@pytest.fixture
def said(monkeypatch, capsys):
    """Work through so many steps of so many seconds each, by a clock of its own, and return what is said."""
    timers, now = [], 0.0

    class Timer:
        def __init__(self, seconds, function, arguments):
            self.at, self.call = now + seconds, lambda: function(*arguments)

        def start(self):
            timers.append(self)

        def cancel(self):
            if self in timers:
                timers.remove(self)

    def go_on(seconds):
        nonlocal now
        now += seconds
        for timer in [each for each in timers if each.at <= now]:
            timers.remove(timer)
            timer.call()

    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(console, "threading", SimpleNamespace(Timer=Timer))
    monkeypatch.setattr(console.messages(), "quiet", False)

    def work(steps, seconds):
        with console.progress_bar() as bar:
            task = bar.add_task("fitting", total=steps)
            for _ in range(steps or 1):
                go_on(seconds)
                bar.advance(task)
        assert not timers
        return capsys.readouterr().err

    return work


def test_the_time_left_is_said_when_a_tenth_is_done(said):
    # at five seconds, and not before
    assert said(20, 2) == "fitting: 2 of 20 after 6 s, about 54 s left\n"
    # a tenth comes later
    assert said(40, 3) == "fitting: 4 of 40 after 12 s, about 108 s left\n"


def test_work_without_parts_says_that_it_goes_on(said):
    assert said(1, 70) == "fitting: 0 of 1 after 70 s\n"
    assert said(None, 70) == "fitting: under way after 70 s\n"


def test_quick_or_quiet_work_says_nothing(said, monkeypatch):
    assert said(3, 1.6) == ""
    monkeypatch.setattr(console.messages(), "quiet", True)
    assert said(20, 5) == ""


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
