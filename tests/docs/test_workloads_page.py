"""The page about reference trainings lists those that there are, with their parameters and papers."""

from __future__ import annotations

import re

from conftest import ROOT

from capture.workloads import WORKLOADS


def test_the_table_is_the_registry():
    page = (ROOT / "docs/workloads.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- workloads -->\n(.*?)<!-- /workloads -->", page, re.DOTALL)[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == [*WORKLOADS]
    for name, papers, parameters, data, missing in rows:
        info = WORKLOADS[name.strip("`")]
        listed = (f"{paper} ({n})" if n else paper for paper, n in info.papers.items())
        assert papers == (", ".join(listed) or "–")
        assert parameters == f"{info.parameters:,}"
        assert ("embedded" in data) == (not info.files)
        assert missing
    recipes = page[page.index("## The papers' recipes") :]
    assert all(first in recipes for first in ("SIDCo", "RedSync", "MiCRO", "Marsit"))
