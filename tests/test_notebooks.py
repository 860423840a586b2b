"""Every notebook runs from top to bottom, and the outputs committed are what it prints."""

from __future__ import annotations

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient


def printed(notebook):
    """Return what the code cells printed, and how many figures each drew."""
    return [
        (
            "".join(
                o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout"
            ),
            sum("image/png" in o.get("data", {}) for o in cell.outputs),
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_notebook_runs_and_is_current(path):
    notebook = nbformat.read(path, as_version=4)
    committed = printed(notebook)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": path.parent}}).execute()
    assert printed(notebook) == committed
    assert any(figures for _, figures in committed)
    assert not any(
        o.output_type == "stream" and o.name == "stderr"
        for cell in notebook.cells
        if cell.cell_type == "code"
        for o in cell.outputs
    )
