"""The pages about planted faults have the stored results, and a planted fault is noticed."""

from __future__ import annotations

import planted
from pages import block
from records import DOCS, ROOT, stored


def test_the_page_shows_the_stored_results():
    rows = stored(planted.FILE)
    text = block("planted", planted.table(rows))
    assert text in (DOCS / "reliability.md").read_text(encoding="utf-8")
    known = {planted.key(fault) for fault in planted.planted()}
    assert {planted.key(row) for row in rows} <= known
    why = {planted.key(fault): fault.get("why", "") for fault in planted.planted()}
    assert all(why[planted.key(row)] for row in rows if row["result"] == "survived")


def test_every_row_of_the_papers_that_names_code_has_a_fault_and_a_test():
    faults = planted.planted_rows()
    assert {(fault["paper"], fault["item"]) for fault in faults} == {*planted.rows_with_code()}
    for fault in faults:
        of = fault["paper"], fault["item"], fault["old"]
        text = (ROOT / fault["file"]).read_text(encoding="utf-8")
        assert text.count(fault["old"]) == 1, of
        assert fault["old"] != fault["new"], of
        assert fault["tests"], of


def test_the_page_shows_which_faults_the_tests_of_their_rows_notice():
    """To plant those of changed rows: ``python benchmarks/planted.py --rows --write``."""
    rows = stored(planted.ROWS)
    text = block("planted-rows", planted.table_of_rows(rows))
    assert text in (DOCS / "fidelity.md").read_text(encoding="utf-8")
    why = {planted.key(fault): fault.get("why", "") for fault in planted.planted_rows()}
    assert [planted.key(row) for row in rows] == [*why]
    missed = [row for row in rows if row["result"] != "killed"]
    assert len(missed) <= 0.05 * len(rows)
    assert all(why[planted.key(row)] for row in missed)
    # by a test that failed, not because none could be run
    assert all("::" in row["by"] or row["by"] == "time" for row in rows if row not in missed)


def test_a_fault_is_planted_noticed_and_taken_out(tmp_path):
    module, test = tmp_path / "module.py", tmp_path / "test_module.py"
    module.write_text("def half(x):\n    return x / 2\n")
    test.write_text("from module import half\ndef test_half():\n    assert half(4) == 2\n")
    fault = {"file": "module.py", "old": "x / 2", "new": "x / 4", "tests": ["test_module.py"]}
    assert planted.plant(fault, tmp_path)["by"] == "test_module.py::test_half"
    assert planted.plant({**fault, "new": "x / 2.0"}, tmp_path)["result"] == "survived"
    assert planted.plant({**fault, "old": "x / 3"}, tmp_path)["result"] == "gone"
    assert planted.plant({**fault, "tests": []}, tmp_path)["result"] == "survived"
    assert "x / 2\n" in module.read_text()
