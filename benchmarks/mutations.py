"""Mutate the code at random places, and see whether the tests of the module notice.

    .venv/bin/pip install cosmic-ray
    .venv/bin/python benchmarks/mutations.py [WORD] [--each N] [--draw SEED] [--again] [--write]

The operators are those of cosmic-ray (https://cosmic-ray.readthedocs.io): another arithmetic operator or comparison,
a number one up or down, a ``not``, a loop that does not run. A place is drawn, then one of the operators that fit it,
so that the eleven ways to damage one ``+`` do not count eleven times. Annotations are left alone, and ``is`` does not
stand in for ``==``. A module has mutants in proportion to its lines, ``--each`` in a thousand; the draw depends on the
lines alone, and a larger ``--each`` adds to the mutants of a smaller one. ``--draw SEED`` tries ten others, of all
modules, and stores nothing: ``make mutants`` does so with the date.

Mutants run one by one in a copy of the last commit, which is kept in the folder of temporary files. Coverage says once
which tests run which line: of the module's tests, then of its room's, those that run the changed one are tried, and all
where it cannot say (what is compiled, or runs on import); after them those of several processes.
Results are stored one by one in docs/results/mutations.jsonl, so the program can be interrupted; ``--again`` repeats
those that were not noticed. It takes hours. The table is printed at the end; ``--write`` also puts it into
docs/reliability.md. benchmarks/mutations.json says why no test can notice a mutant.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from planted import noticed
from records import RESULTS, ROOT, Row, command, complete, grid, keep, missing, show, stored

if TYPE_CHECKING:
    from coverage import CoverageData

FILE = RESULTS / "mutations.jsonl"
TESTS = ROOT / "tests"
ALSO = {
    "atlas": "tests/docs/test_atlas_page.py",
    "laws": "tests/statistics/test_fitting.py",
    "stages": "tests/thresholds/test_thresholds.py",
    "dependence": "tests/analysis/test_drift.py",
    "union": "tests/network/test_union.py",
    "rates": "tests/compressors/test_layerwise.py",
    "compressors": "tests/test_registry.py",
    "units": "tests/capture/test_sharded.py",
}
"""Tests of modules whose tests have another name."""
LIMIT_S = 600
RANKS_LIMIT_S = 3600
"""The same for a room's tests of several processes."""
FEW = 10


class _Unannotated(ast.NodeTransformer):
    """Takes annotations and aliases of types out of a syntax tree."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        alias = isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"
        node.annotation = ast.Constant(None)
        if alias:
            node.value = None
        return self.generic_visit(node)


def _meaning(text: str) -> str:
    """Return what a module does, without its annotations."""
    return ast.dump(_Unannotated().visit(ast.parse(text)))


def places(text: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return where a module can be mutated.

    Parameters
    ----------
    text : str
        The module.

    Returns
    -------
    dict of (int, int) to list of (str, int)
        At each place, line and column, the operators that fit, each with the number of its occurrence.
    """
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    found = defaultdict(list)
    nodes = list(ast_nodes(get_ast(text)))
    for name in operator_names():
        identity = name.endswith(("_Is", "_IsNot")) and "Operator_Is" not in name
        if identity or name.startswith("core/Variable"):
            continue
        operator = get_operator(name)()
        starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(starts):
            found[place].append((name, occurrence))
    return found


def _changed(text: str, mutant: str) -> tuple[str, str]:
    """Return the lines in which two texts differ, before and after."""
    lines = list(difflib.ndiff(text.splitlines(), mutant.splitlines()))
    old, new = (
        " ".join(" ".join(line[2:] for line in lines if line.startswith(sign)).split())
        for sign in "-+"
    )
    return old, new


def draw(text: str, each: int, word: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the mutants that are tried: the lines before and after, and the module; others for another word."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    def rank(*words: object) -> bytes:
        return hashlib.sha256((word + repr(words)).encode()).digest()

    if not each:
        return
    lines, same, left = text.splitlines(), _meaning(text), each
    found = places(text)
    for place in sorted(found, key=lambda at: rank(lines[at[0] - 1].strip(), at[1])):
        for name, occurrence in sorted(found[place], key=lambda way: rank(place[1], way[0])):
            mutant = mutate_code(text, get_operator(name)(), occurrence)
            try:
                changed = _meaning(mutant) != same
            except SyntaxError:
                continue
            if changed:
                yield *_changed(text, mutant), mutant
                left -= 1
                break
        if not left:
            return


def files() -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of all rooms, and the tests that should notice: their own first, then their room's."""
    for package in ("gradstats", "capture"):
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT / package).parts
            if parts in {("__init__.py",), ("__main__.py",)}:
                continue
            words = [file.stem, file.parent.name]
            if package == "capture":
                room = TESTS / "capture"
            else:  # a module of no room has a file of tests, or the commands are what uses it
                room = TESTS / parts[0] if len(parts) > 1 else TESTS / f"test_{parts[0]}"
                room = room if room.exists() else TESTS / "cli"
            own = [t for t in room.glob("test_*.py") if t.stem[5:] in words]
            also = [ROOT / ALSO[word] for word in words if word in ALSO]
            tests = [str(t.relative_to(ROOT)) for t in (*own, *also, room)]
            yield str(file.relative_to(ROOT)), tests


def count(file: str, text: str, each: float) -> int:
    """Return how many mutants a module has: in proportion to its lines, and the rest by the name, alike each time."""
    part = int(hashlib.sha256(file.encode()).hexdigest()[:8], 16) / 2**32
    return int(each * len(text.splitlines()) / 1000 + part)


def key(row: Row) -> tuple[str, str, str]:
    """Return what a mutant is known by."""
    return row["file"], row["old"], row["new"]


def reasons() -> dict[tuple[str, str, str], str]:
    """Return why a mutant cannot be noticed, for those where that was found out."""
    path = Path(__file__).with_suffix(".json")
    return {key(row): row["why"] for row in json.loads(path.read_text(encoding="utf-8"))}


def _room(file: str) -> str:
    package, *rest = file.split("/")
    return package if package == "capture" or len(rest) == 1 else rest[0]


def table(rows: list[Row]) -> str:
    """Return the counts by room, and every mutant that no test noticed."""
    lines, missed = [], []
    why = reasons()

    def verdict(row: Row) -> str:
        return "equivalent" if row["result"] == "survived" and key(row) in why else row["result"]

    count = Counter((name, verdict(row)) for row in rows for name in (_room(row["file"]), "all"))
    for room in [*sorted({room for room, _ in count} - {"all"}), "all"]:
        of = [count[room, result] for result in ("killed", "equivalent", "survived")]
        lines.append([room, *map(str, (sum(of), *of))])
    for row in sorted(rows, key=key):
        if row["result"] == "survived":
            old, new = (row[name].replace("|", "\\|") for name in ("old", "new"))
            shown = f"{row['file']}: `{old}` → `{new}`"
            missed.append([shown, why.get(key(row), "no test yet")])
    counts = grid("room | mutants: | noticed: | equivalent: | not noticed:", lines)
    return f"{counts}\n\n{grid('not noticed | why', missed)}"


def covered(tests: list[str], copy: Path) -> CoverageData:
    """Run the tests of some rooms once; return which of them run which line."""
    from coverage import CoverageData

    file = copy / f"covered-{hashlib.sha256(repr(tests).encode()).hexdigest()[:8]}"
    if not file.exists():
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
        options = ["--no-header", "-m", "not distributed", "--cov-context=test", "--cov-report="]
        env = {**os.environ, "PYTHONPATH": str(copy), "COVERAGE_FILE": str(file)}
        done = subprocess.run(
            [*command, *options, "--cov=gradstats", "--cov=capture", *tests],
            cwd=copy, env=env, check=False, stdout=sys.stderr,
        )  # fmt: skip
        # a test that fails (1) beside coverage, whose files another user cannot write, has run its lines all the same
        if done.returncode > 1:
            done.check_returncode()
    data = CoverageData(str(file))
    data.read()
    return data


def running(data: CoverageData, file: Path, mutant: str, tests: list[str]) -> list[str]:
    """Return those of some tests that run what a mutant changes; all of them where that is not known."""
    text = file.read_text(encoding="utf-8")
    pairs = zip_longest(text.splitlines(), mutant.splitlines())
    line = next(number for number, (old, new) in enumerate(pairs, 1) if old != new)
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not around:  # a decorator's line, say
        return tests
    statement = max(around, key=lambda node: node.lineno)
    # what runs on import is only in the name of the test that happened to import it first
    if not any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node is not statement
        for node in around
    ):
        return tests
    body = getattr(statement, "body", None)
    end = body[0].lineno if isinstance(body, list) else (statement.end_lineno or 0) + 1
    known = data.contexts_by_lineno(str(file))
    found = {name for number in range(statement.lineno, end) for name in known.get(number, ())}
    # what runs in another process has no name
    names = sorted({name.partition("|")[0] for name in found if name})
    own = [name for test in tests for name in names if name.startswith(test)]
    return list(dict.fromkeys(own)) or tests


def _try(file: Path, mutant: str, tests: list[str], some: list[str], copy: Path) -> Row:
    """Run some tests of one process, then those of several; return what was noticed, and by which test."""
    names = copy / "tests.txt"  # thousands, too many for a command
    names.write_text("\n".join(some), encoding="utf-8")
    result, by = noticed(file, mutant, ["-m", "not distributed", f"@{names}"], copy, LIMIT_S)
    while result == "survived":
        result, by = noticed(file, mutant, ["-m", "distributed", *tests], copy, RANKS_LIMIT_S)
        if result == "survived" or by == "time":
            break
        # A busy machine may be what the ranks did not finish on: the same test must pass without the mutant.
        own = file.read_text(encoding="utf-8")
        result = (
            "killed" if noticed(file, own, [by], copy, LIMIT_S)[0] == "survived" else "survived"
        )
    return {"result": result, "by": by}


def main() -> None:
    """Try the mutants that were not tried yet, and print the table."""
    parser = command(__doc__, "reliability.md")
    parser.add_argument("word", nargs="?", default="", help="only modules with this in the path")
    parser.add_argument("--each", type=float, default=4.2, help="mutants in a thousand lines")
    parser.add_argument("--draw", help="try ten others, drawn by this word, and store nothing")
    parser.add_argument("--again", action="store_true", help="repeat those not noticed")
    options = parser.parse_args()
    if options.again:
        rows = stored(FILE)
        keep(FILE, (r for r in rows if r["result"] == "killed" or options.word not in r["file"]))
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # kept: what tests run which line takes minutes to find out
    copy = Path(tempfile.gettempdir(), f"gradstats-mutants-{commit}")
    if not copy.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
    # a run that was killed leaves its mutant
    subprocess.run(["git", "checkout", "--quiet", "."], cwd=copy, check=True)
    modules = [each for each in files() if options.word in each[0] and (copy / each[0]).exists()]
    if options.draw:
        random.Random(options.draw).shuffle(modules)
    drawn: dict[tuple[str, str, str], tuple[str, list[str]]] = {}
    for file, tests in modules:
        if options.draw and len(drawn) == FEW:
            break
        text = (copy / file).read_text(encoding="utf-8")
        # another mutant of each of ten modules, or this module's part of the sample
        many = 1 if options.draw else count(file, text, options.each)
        for old, new, mutant in draw(text, many, options.draw or ""):
            drawn[file, old, new] = mutant, tests

    def measure(file: str, old: str, new: str) -> Row:
        mutant, tests = drawn[file, old, new]
        # what is in the room is run with it
        rooms = [test for test in tests if not test.startswith(f"{tests[-1]}/")]
        some = running(covered(rooms, copy), copy / file, mutant, tests)
        row = {"file": file, "old": old, "new": new}
        return {**row, **_try(copy / file, mutant, tests, some, copy)}

    if options.draw:
        print(table([measure(*each) for each in drawn]))
        return
    left = missing(FILE, key, drawn)
    # an interrupted run has seen something of every room
    random.Random(0).shuffle(left)
    complete(FILE, key, left, measure)
    show({"mutations": table(stored(FILE))}, options.write, "reliability.md")


if __name__ == "__main__":
    main()
