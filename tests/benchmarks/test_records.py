"""What programs of long measurements share: cases, rows, tables."""

from __future__ import annotations

import pytest
import records
from records import by, command, complete, grid, keep, missing, show, stored

KEY = by("name", "rate")


def test_a_case_is_measured_once_and_stored_as_soon_as_it_ends(tmp_path, capsys):
    path, asked = tmp_path / "rows.jsonl", []

    def measure(name, rate):
        asked.append(name)
        if name == "c" and asked.count("c") == 1:
            raise KeyboardInterrupt
        row = {"name": name, "rate": rate} if rate else {"name": name}
        return [row, {**row, "second": True}] if name == "a" else row

    cases = [("a", 1), ("b", None), ("c", 2)]
    with pytest.raises(KeyboardInterrupt):
        complete(path, KEY, cases, measure)
    assert [row["name"] for row in stored(path)] == ["a", "a", "b"]
    assert missing(path, KEY, cases) == [("c", 2)]
    assert [row["name"] for row in complete(path, KEY, cases, measure)] == ["a", "a", "b", "c"]
    assert asked == ["a", "b", "c", "c"]
    assert "2 of 3: b None\n" in capsys.readouterr().err
    keep(path, [row for row in stored(path) if row["name"] != "b"])  # taken out, it runs again
    complete(path, KEY, cases, measure)
    assert asked[4:] == ["b"]


def test_a_table_has_numbers_on_the_right():
    assert grid("name | rate, s:", [["a", "1"], ["b", "2"]]) == (
        "| name | rate, s |\n|---|---:|\n| a | 1 |\n| b | 2 |"
    )


def test_tables_are_shown_and_written_if_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "DOCS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- rates -->\nold\n<!-- /rates -->\n")
    options = command("What it does.\n\nMore.", "page.md").parse_args([])
    show({"rates": "new"}, options.write, "page.md")
    assert capsys.readouterr().out == "rates\n\nnew\n\n"
    assert "old" in page.read_text()
    options = command("What it does.\n\nMore.", "page.md").parse_args(["--write"])
    show({"rates": "new"}, options.write, "page.md")
    assert page.read_text() == "<!-- rates -->\nnew\n<!-- /rates -->\n"
