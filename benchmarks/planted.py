"""Plant faults one by one, and see whether the tests of the module notice.

    .venv/bin/python benchmarks/planted.py [--rows] [WORD] [--again] [--share I/N] [--write]

benchmarks/planted.json lists faults that somebody might make: a comparison the wrong way round, a factor lost, a bound
off by one. Each is planted in a copy of the repository, whose tests of that room then run. Results are stored one by
one in docs/results/planted.jsonl, so the program can be interrupted; ``--again`` repeats those whose name of a file
has the word. It takes hours. The table is printed at the end; ``--write`` also puts it into docs/reliability.md.

With ``--rows`` the faults are those of benchmarks/planted_rows.json, one at least for every row of docs/fidelity.md
that names code, and only the tests that the row itself names run. Their results are in docs/results/planted_rows.jsonl
with the names of these tests, so a fault is planted again when its row names others. It takes an hour.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from records import (
    RESULTS,
    ROOT,
    Row,
    command,
    complete,
    fidelity_rows,
    grid,
    keep,
    missing,
    show,
    stored,
)

FILE = RESULTS / "planted.jsonl"
ROWS = RESULTS / "planted_rows.jsonl"
LIMIT_S = 900
_DATA = os.environ.get("GRADSTATS_DATA", str(ROOT.parent / "shared" / "data"))


def planted() -> list[Row]:
    """Return the faults: file, old and new text, and the tests of the module."""
    faults: list[Row] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return faults


def key(row: Row) -> tuple[str, ...]:
    """Return what a fault is known by: where it is, and of a row of the papers also whose it is and what judges it."""
    where = row["file"], row["old"], row["new"]
    return (row["paper"], row["item"], *where, *row["names"]) if "paper" in row else where


def rows_with_code() -> dict[tuple[str, str], list[str]]:
    """Return the tests named in each row of docs/fidelity.md that names code, by paper and item.

    Where a paper has several rows of an item, such as a section, what the row is about follows it after a colon.
    """
    found = [(paper, *cells[:4]) for paper, cells in fidelity_rows()]
    several = Counter((paper, item) for paper, item, *_ in found)
    return {
        (paper, item if several[paper, item] == 1 else f"{item}: {what}"): re.findall(
            r"`(test_\w+)`", checked
        )
        for paper, item, what, here, checked in found
        if "`" in here
    }


@cache
def _test_functions() -> dict[str, list[str]]:
    """Return what pytest is to run for a test function's name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        within = [(f"{node.name}::", node) for node in tree.body if isinstance(node, ast.ClassDef)]
        for prefix, scope in (("", tree), *within):
            for node in scope.body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    place = f"{path.relative_to(ROOT)}::{prefix}{node.name}"
                    found.setdefault(node.name, []).append(place)
    return found


def planted_rows() -> list[Row]:
    """Return the faults in what rows of docs/fidelity.md name, each with the tests that its row names today."""
    path = Path(__file__).with_name("planted_rows.json")
    faults: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    names, found = rows_with_code(), []
    for fault in faults:
        named = names.get((fault["paper"], fault["item"]), [])
        tests = [test for name in named for test in _test_functions().get(name, [])]
        found.append({**fault, "names": named, "tests": tests})
    return found


def noticed(
    file: Path, text: str, tests: list[str], copy: Path, limit: float = LIMIT_S
) -> tuple[str, str]:
    """Run tests while a file has another text.

    Parameters
    ----------
    file : Path
        The file, in a copy of the repository. It has its own text again afterwards.
    text : str
        The text with a fault.
    tests : list of str
        What pytest runs, until something fails.
    copy : Path
        Root of the copy.
    limit : float
        Seconds after which the fault counts as noticed.

    Returns
    -------
    result : str
        ``"killed"`` or ``"survived"``.
    by : str
        The test that failed; ``"time"`` at the limit.
    """
    before = file.read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=copy,
            env={
                **os.environ,
                # options of the run that this is part of, such as a plugin's
                "PYTEST_ADDOPTS": "",
                "PYTHONPATH": str(copy),
                "NUMBA_CACHE_DIR": str(copy / "compiled"),
                "GRADSTATS_DATA": _DATA,
            },
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed", "time"
    finally:
        file.write_text(before, encoding="utf-8")
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return "survived", ""
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return "killed", failed[0] if failed else f"code {done.returncode}"


def plant(fault: Row, copy: Path) -> Row:
    """Run the tests of a module with a fault in it; say which one noticed."""
    target = copy / fault["file"]
    text = target.read_text(encoding="utf-8")
    if text.count(fault["old"]) != 1:
        return {**fault, "result": "gone", "by": ""}
    if not fault["tests"]:  # pytest would run all there are
        return {**fault, "result": "survived", "by": ""}
    changed = text.replace(fault["old"], fault["new"])
    result, by = noticed(target, changed, fault["tests"], copy)
    return {**fault, "result": result, "by": by}


def table(rows: list[Row]) -> str:
    """Return the counts by room, and every fault that no test noticed."""
    return _counts(rows, "room", lambda k: k[0].split("/")[1].removesuffix(".py"), planted())


def table_of_rows(rows: list[Row]) -> str:
    """Return the counts by paper, and every fault that no test of its row noticed."""
    return _counts(rows, "paper", lambda k: k[0], planted_rows())


def _counts(
    rows: list[Row], head: str, group: Callable[[tuple[str, ...]], str], faults: list[Row]
) -> str:
    """Return a table of the counts by what each fault's key is grouped by, and one of those not noticed."""
    lines = []
    results = {(key(row), row["result"]) for row in rows if row["result"] != "gone"}
    count = Counter((group(known), result) for known, result in results)
    for name in sorted({name for name, _ in count}):
        killed, survived = count[name, "killed"], count[name, "survived"]
        lines.append([name, *map(str, (killed + survived, killed, survived))])
    text, missed = grid(f"{head} | planted: | noticed: | not noticed:", lines), []
    why = {key(fault): fault.get("why", "no test yet") for fault in faults}
    for row in rows:
        if row["result"] == "survived":
            old, new = (" ".join(row[n].split()).replace("|", "\\|") for n in ("old", "new"))
            of = f"{row['paper']}, {row['item']}, " if "paper" in row else ""
            missed.append([f"{of}{row['file']}: `{old}` → `{new}`", why[key(row)]])
    return f"{text}\n\n{grid('not noticed | why', missed)}" if missed else text


class _Plan(NamedTuple):
    """One list of faults: where results are stored, what of them, and the table's page, mark and text."""

    faults: Callable[[], list[Row]]
    file: Path
    fields: tuple[str, ...]
    table: Callable[[list[Row]], str]
    page: str
    mark: str


_RESULT = ("file", "old", "new", "result", "by")
_OF_ROWS = ("paper", "item", "names", *_RESULT)
PLANS = {
    False: _Plan(planted, FILE, _RESULT, table, "reliability.md", "planted"),
    True: _Plan(planted_rows, ROWS, _OF_ROWS, table_of_rows, "fidelity.md", "planted-rows"),
}
"""What is planted, and with ``--rows``."""


def main() -> None:
    """Plant what was not planted yet, and print the table."""
    parser = command(__doc__, "reliability.md and docs/fidelity.md")
    parser.add_argument("word", nargs="?", default="", help="only faults in files with this name")
    parser.add_argument("--rows", action="store_true", help="faults of the rows of the papers")
    parser.add_argument("--again", action="store_true", help="repeat what is stored")
    parser.add_argument(
        "--share", default="1/1", metavar="I/N", help="every Nth from the Ith, beside other runs"
    )
    options = parser.parse_args()
    plan = PLANS[options.rows]
    known = plan.faults()
    faults = [fault for fault in known if options.word in fault["file"]]
    if options.again:
        again = {key(fault) for fault in faults}
        keep(plan.file, [row for row in stored(plan.file) if key(row) not in again])
    place, of = map(int, options.share.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__"))
        by_key = {key(fault): fault for fault in faults}
        left = missing(plan.file, key, by_key)[place - 1 :: of]

        def measure(*known: str) -> Row:
            row = plant(by_key[known], copy)
            return {name: row[name] for name in plan.fields}

        complete(plan.file, key, left, measure)
    if options.write and options.rows:  # what is in today's list, in its order
        found = {key(row): row for row in stored(plan.file)}
        keep(plan.file, [found[key(fault)] for fault in known if key(fault) in found])
    show({plan.mark: plan.table(stored(plan.file))}, options.write, plan.page)


if __name__ == "__main__":
    main()
