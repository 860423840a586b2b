"""The page about mutants has the stored results; what is drawn is stable and changes what the code does."""

from __future__ import annotations

import mutations
import pytest
from pages import block
from records import DOCS, stored

MODULE = '''"""A module."""

from __future__ import annotations


def half(x: int | None, low: float = 0.5) -> int | None:
    """Return the half."""
    if x is None or x == 3:
        return None
    return x * low
'''


def test_the_page_shows_the_stored_results():
    rows = stored(mutations.FILE)
    text = block("mutations", mutations.table(rows))
    assert text in (DOCS / "reliability.md").read_text(encoding="utf-8")
    assert {row["file"] for row in rows} <= {file for file, _ in mutations.files()}


def test_every_reason_is_for_a_mutant_that_was_not_noticed():
    survived = {mutations.key(row) for row in stored(mutations.FILE) if row["result"] == "survived"}
    assert set(mutations.reasons()) <= survived
    assert all(why.startswith("equivalent: ") for why in mutations.reasons().values())


def test_more_than_85_percent_are_noticed():
    rows = stored(mutations.FILE)
    known = mutations.reasons()
    counted = [r for r in rows if r["result"] == "killed" or mutations.key(r) not in known]
    assert sum(row["result"] == "killed" for row in counted) >= 0.85 * len(counted)


def test_every_module_has_tests_that_exist():
    for file, tests in mutations.files():
        assert (mutations.ROOT / file).exists()
        assert all((mutations.ROOT / path).exists() for path in tests)


def test_mutants_are_drawn_by_place_and_change_what_the_code_does():
    pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed")
    drawn = list(mutations.draw(MODULE, 100))
    lines = {old for old, _, _ in drawn}
    assert lines <= {
        "def half(x: int | None, low: float = 0.5) -> int | None:",
        "if x is None or x == 3:",
        "return x * low",
    }
    assert len(drawn) == len(mutations.places(MODULE)) - 2  # two annotations with a |
    assert not any("x is 3" in new or "x is not 3" in new for _, new, _ in drawn)
    assert next(iter(mutations.draw("# moved\n" + MODULE, 2)))[:2] == drawn[0][:2]
    assert [old for old, _, _ in mutations.draw(MODULE, 2)] == [old for old, _, _ in drawn[:2]]
    assert not list(mutations.draw(MODULE, 0))
    others = list(mutations.draw(MODULE, 100, "a day"))
    assert sorted(others) != sorted(drawn)


def test_every_room_has_mutants_by_its_lines():
    lines, drawn = {}, {}
    for file, _ in mutations.files():
        room, text = mutations._room(file), (mutations.ROOT / file).read_text(encoding="utf-8")
        lines[room] = lines.get(room, 0) + len(text.splitlines())
        drawn[room] = drawn.get(room, 0) + mutations.count(file, text, 4.2)
        # more of them are the same ones and others
        assert mutations.count(file, text, 8) >= mutations.count(file, text, 4.2)
    assert {"capture", "explorer", "plots", "report", "trace"} < set(lines)
    assert sum(drawn.values()) >= 300
    for room, count in drawn.items():
        # a module's part of one is there or not
        assert abs(count - 4.2 * lines[room] / 1000) < 10


class Covered:
    """What coverage knows of MODULE: one test runs its condition, another the rest, and happened to import it."""

    def contexts_by_lineno(self, file):
        return {
            6: ["tests/a.py::one|run"],
            8: ["tests/a.py::one|run", "tests/b.py::two|setup"],
            10: ["tests/a.py::one|run"],
        }


def test_the_tests_that_run_a_line_are_tried(tmp_path):
    file, own = tmp_path / "module.py", ["tests/b.py", "tests"]
    file.write_text(MODULE)

    def tried(old, new):
        return mutations.running(Covered(), file, MODULE.replace(old, new), own)

    assert tried("x == 3", "x == 4") == ["tests/b.py::two", "tests/a.py::one"]
    assert tried("x * low", "x / low") == ["tests/a.py::one"]
    assert tried("return None", "return 0") == own  # nothing runs it
    assert tried("= 0.5", "= 1.5") == own  # on import, whichever test was the first to import it
