"""The page about planted faults has the stored results, and a planted fault is noticed."""

from __future__ import annotations

import planted
from pages import block
from records import DOCS, stored


def test_the_page_shows_the_stored_results():
    rows = stored(planted.FILE)
    text = block("planted", planted.table(rows))
    assert text in (DOCS / "reliability.md").read_text(encoding="utf-8")
    known = {planted.key(fault) for fault in planted.planted()}
    assert {planted.key(row) for row in rows} <= known
    why = {planted.key(fault): fault.get("why", "") for fault in planted.planted()}
    assert all(why[planted.key(row)] for row in rows if row["result"] == "survived")


def test_a_fault_is_planted_noticed_and_taken_out(tmp_path):
    module, test = tmp_path / "module.py", tmp_path / "test_module.py"
    module.write_text("def half(x):\n    return x / 2\n")
    test.write_text("from module import half\ndef test_half():\n    assert half(4) == 2\n")
    fault = {"file": "module.py", "old": "x / 2", "new": "x / 4", "tests": ["test_module.py"]}
    assert planted.plant(fault, tmp_path)["by"] == "test_module.py::test_half"
    assert planted.plant({**fault, "new": "x / 2.0"}, tmp_path)["result"] == "survived"
    assert planted.plant({**fault, "old": "x / 3"}, tmp_path)["result"] == "gone"
    assert "x / 2\n" in module.read_text()
