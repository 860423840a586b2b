"""Every notebook asks, answers at once with what its cells show, runs, and shows what is committed.

Cells tagged ``varies`` depend on the machine or its clock: they have to run, and are not compared.
"""

from __future__ import annotations

import os
import re
import signal
from itertools import pairwise

import pytest
from conftest import ROOT
from support.programs import BARE, Kernel

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 300_000
BAR = "application/vnd.jupyter.widget-view+json"  # of an analysis that takes long: on a busy machine only

SHORTER = {
    "08_live_compressors": {
        "STEPS = 0.01, 40": "STEPS = 0.01, 12",
        "nproc=2,": "nproc=2, batch_size=8,",
    }
}
"""What its trainings show varies with the machine, and is not compared: shorter ones show the rest."""

each = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)


def read(path):
    import nbformat  # seconds, which every process that collects tests would take

    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(cell, stream="stdout"):
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == stream)


def shown(cell):
    """Return what a cell printed, and the text of the results that it showed but for figures and bars."""
    data = [o.data for o in cell.outputs if "data" in o]
    results = [d["text/plain"] for d in data if not {"image/png", BAR} & {*d}]
    return text(cell) + "\n".join(r for r in results if r.strip())  # a bar leaves an empty line


def compared(notebook):
    """Return what the cells without a tag showed, and how many figures each of all cells drew."""
    return [
        (
            None if "varies" in cell.metadata.get("tags", ()) else shown(cell),
            sum("image/png" in o.get("data", {}) for o in cell.outputs),
        )
        for cell in code_cells(notebook)
    ]


def numbers(prose):
    return set(re.findall(r"\d+(?:[.,]\d+)*", prose))


@each
def test_begins_with_a_question_and_its_answer_in_numbers_that_the_cells_show(path):
    notebook = read(path)
    question, answer = (cell.source for cell in notebook.cells[:2])
    assert question.startswith("# ")
    assert re.search(r"^\*\*Question\.\*\* .*\?$", question, re.MULTILINE)
    assert answer.startswith("**Answer.** ")
    assert len(answer.split()) <= 130
    assert numbers(answer)
    assert numbers(answer) <= numbers("\n".join(map(shown, code_cells(notebook))))


@each
def test_tables_are_objects_and_training_in_processes_is_announced_and_has_a_bar(path):
    cells = read(path).cells
    for before, cell in pairwise(cells):
        if cell.cell_type == "code":
            assert "render(" not in cell.source
            if "capture.workloads" in cell.source:
                assert "ProgressBar(" in cell.source
                assert re.search(r"takes .* (?:seconds|minutes?)", before.source)


def test_links_to_other_notebooks_open_them():
    found = 0
    for path in PATHS:
        for cell in read(path).cells:
            prose = cell.source if cell.cell_type == "markdown" else ""
            for name in re.findall(r"\]\(([^):#]+)[^)]*\)", prose):
                assert (path.parent / name).exists(), (path.name, name)
                found += 1
    assert found > 10


@each
def test_committed_as_executed_from_top_to_bottom_small_and_without_volatile_metadata(path):
    notebook = read(path)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(figures for _, figures in compared(notebook))
    assert {o.output_type for cell in cells for o in cell.outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert not any(text(cell, "stderr") for cell in cells)
    widgets = [o.data for cell in cells for o in cell.outputs if BAR in o.get("data", {})]
    assert all(data["text/plain"].startswith("<Explorer ") for data in widgets)
    assert all(cell.metadata in ({}, {"tags": ["varies"]}) for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec"}
    assert path.stat().st_size < LARGEST


def test_the_list_in_the_documentation_has_every_notebook_and_only_numbers_of_its_answer():
    page = (ROOT / "docs/notebooks.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| \[`(\w+)`\]\(\.\./notebooks/\1\.ipynb\) \|(.*)\|$", page, re.MULTILINE)
    )
    assert sorted(rows) == [path.stem for path in PATHS]
    for path in PATHS:
        answer = read(path).cells[1].source
        assert numbers(rows[path.stem]) <= numbers(answer), path.stem


def test_a_kernel_that_takes_long_to_end_is_ended():
    """`jupyter_client` does so after some seconds; the next kernel starts, and ends by itself."""
    long, short = (["python", "-c", code] for code in ("import time; time.sleep(60)", ""))
    env = os.environ | {BARE: ""}
    kernel = Kernel(long, ROOT, env)
    assert kernel.poll() is None
    kernel.send_signal(signal.SIGTERM)
    assert kernel.wait() == -signal.SIGTERM
    assert Kernel(short, ROOT, env).wait() == 0


@pytest.mark.slow
@each
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_notebook_runs_and_is_current(path, as_made, monkeypatch):
    from nbclient import NotebookClient

    notebook = read(path)
    committed = compared(notebook)
    if path.stem in SHORTER:
        for whole, part in SHORTER[path.stem].items():
            [cell] = [cell for cell in code_cells(notebook) if whole in cell.source]
            assert "varies" in cell.metadata.tags
            cell.source = cell.source.replace(whole, part)
    monkeypatch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", Kernel)
    limits = {"timeout": 280, "startup_timeout": 280}
    NotebookClient(notebook, **limits, resources={"metadata": {"path": path.parent}}).execute()
    assert compared(notebook) == committed
    assert not any(text(cell, "stderr") for cell in code_cells(notebook))
