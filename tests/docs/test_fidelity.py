"""The page that goes through the papers: nothing is left out, nothing named is missing, and its counts are its rows'.

``PYTHONPATH=benchmarks python tests/docs/test_fidelity.py --write`` makes the counts anew.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from pages import block, put
from pages import fidelity_rows as rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fidelity.md"
STATES = ("as published", "corrected", "partly", "not yet")
LAST = {
    "SIDCo": {"algorithm": 2, "eq.": 47, "figure": 18, "table": 1, "lemma": 3, "property": 2},
    "RedSync": {"algorithm": 5, "eq.": 2, "figure": 11, "table": 2},
    "MiCRO": {"algorithm": 1, "eq.": 1, "figure": 4, "table": 2},
    "LAGS-SGD": {
        "algorithm": 1, "eq.": 21, "figure": 3, "table": 2, "assumption": 1, "lemma": 1,
        "theorem": 1, "corollary": 2,
    },
    "Marsit": {"algorithm": 2, "eq.": 7, "figure": 5, "table": 2, "assumption": 2, "theorem": 1},
}  # fmt: skip
"""The last number of every kind that a paper counts."""
NUMBERED = re.compile(
    r"(algorithm|eq\.|figure|table|lemma|property|assumption|theorem|corollary) (\d+)"
)


def state(cells: list[str]) -> str:
    """Return how an item stands."""
    return re.sub(r"^\[(\w+)\].*", r"\1", cells[4]).partition(":")[0]


def counts() -> str:
    """Return the table of counts."""
    papers = list(dict.fromkeys(paper for paper, _ in rows()))
    seen = Counter((paper, state(cells)) for paper, cells in rows())
    lines = ["| paper | items | " + " | ".join(STATES) + " |", "|---" + "|---:" * 5 + "|"]
    for name in (*papers, "all"):
        each = [sum(seen[p, s] for p in papers if name in (p, "all")) for s in STATES]
        lines.append(f"| {name} | {sum(each)} | " + " | ".join(map(str, each)) + " |")
    return "\n".join(lines)


def test_the_counts_are_those_of_the_rows():
    assert block("counts", counts()) in PAGE.read_text(encoding="utf-8")


def test_every_number_of_every_paper_has_one_row():
    assert {paper for paper, _ in rows()} == LAST.keys()
    for paper, last in LAST.items():
        numbers: dict[str, list[int]] = {kind: [] for kind in last}
        for each, cells in rows():
            match = NUMBERED.fullmatch(cells[0])
            if each == paper and match and match[1] in last:
                numbers[match[1]].append(int(match[2]))
        assert numbers == {kind: list(range(1, n + 1)) for kind, n in last.items()}, paper


def test_every_row_has_an_answer():
    for paper, (item, what, here, checked, stands) in rows():
        cells = [item, what, here, checked, stands]
        assert all(cells), (paper, item)
        assert state(cells) in STATES, (paper, item, stands)
        if state(cells) == "not yet":
            assert ": " in stands, (paper, item)
            continue
        assert re.search(r"`test_\w+`|docs/|\.md#", checked), (paper, item)
        if state(cells) == "corrected":
            assert "](concepts/errata.md#" in stands, (paper, item)
        if state(cells) == "partly":
            assert ": " in stands, (paper, item)


@cache
def defined() -> set[str]:
    """Return the names of all test functions."""
    texts = (p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"def (test_\w+)\(", text)}


def test_the_rows_name_tests_code_and_files():
    """What the next test looks for is found."""
    text = "\n".join(" | ".join(cells) for _, cells in rows())
    for pattern, least in (
        (r"`(test_\w+)`", 100),
        (r"`((?:gradstats|capture)(?:\.\w+)+)`", 50),
        (r"\b(?:docs|tests|benchmarks)/[\w/.-]+\w", 10),
        (r"`([\w./]+)` \(([^)]*)\)", 10),
    ):
        assert len(re.findall(pattern, text)) > least, pattern


@pytest.mark.parametrize("paper", LAST)
def test_everything_named_exists(paper):
    from gradstats.cli import app

    commands = {c.name or c.callback.__name__.replace("_", "-") for c in app.registered_commands}
    for each, cells in rows():
        if each != paper:
            continue
        text = " | ".join(cells)
        for name in re.findall(r"`(test_\w+)`", text):
            assert name in defined(), (cells[0], name)
        for name in re.findall(r"`((?:gradstats|capture)(?:\.\w+)+)`", text):
            pkgutil.resolve_name(name)
        for name in re.findall(r"`gradstats ([\w-]+)", text):
            assert name in commands, (cells[0], name)
        for name in re.findall(r"\b(?:docs|tests|benchmarks)/[\w/.-]+\w", text):
            assert (ROOT / name).exists(), (cells[0], name)
        for name, inside in re.findall(r"`([\w./]+)` \(([^)]*)\)", text):
            file = ROOT / name
            if name.startswith("gradstats"):
                file = Path(inspect.getsourcefile(pkgutil.resolve_name(name)))
            source = file.read_text(encoding="utf-8")
            for word in re.findall(r"`(\w+)", inside):
                assert re.search(rf"\b{word}\b", source), (cells[0], name, word)


if __name__ == "__main__":
    if "--write" in sys.argv:
        put(PAGE, "counts", counts())
    print(counts())
