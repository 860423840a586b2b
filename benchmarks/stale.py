"""Which results are older than the code that they rest on.

    python benchmarks/stale.py [WORD...] [--write]

A result is a file of docs/results. It is made by the programs here that name it, and rests on what these import from
the packages; a training rests on the rooms that it goes through. A file counts as changed where its code differs from
that of the commit that stored the result last; comments, docstrings and blank lines do not count. So a result that is
listed may still be right: what has changed may not touch it. ``--write`` puts the table into docs/measurements.md.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

from records import RESULTS, ROOT, Row, command, grid, show

TRAINING = ("capture.workloads", "capture.lab", "gradstats.hooks")
"""Whoever imports from these trains."""
ROOMS = ("primitives", "collectives", "thresholds", "compressors", "hooks")
"""Rooms of gradstats that a training goes through."""


def makers() -> dict[str, list[Path]]:
    """Return the programs that name each result, those alone that name it most closely; one is a command."""
    names: list[tuple[re.Pattern[str], Path]] = []
    made = {file.name for file in RESULTS.iterdir()}
    for program in (*sorted(Path(__file__).parent.rglob("*.py")), ROOT / "capture" / "atlas.py"):
        for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) or (_is_text(node) and str(node.value) in made):
                names.append((re.compile(_pattern(node)), program))
    found: dict[str, list[Path]] = {}
    for file in sorted(RESULTS.iterdir()):
        fits = [(len(name.pattern), each) for name, each in names if name.fullmatch(file.name)]
        closest = max((length for length, _ in fits), default=0)
        found[file.name] = sorted({each for length, each in fits if length == closest})
    return found


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _pattern(name: ast.JoinedStr | ast.Constant) -> str:
    """Return a pattern of the names that a text gives."""
    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
    return "".join(re.escape(str(part.value)) if _is_text(part) else ".+" for part in parts)


def rests_on(program: Path) -> set[Path]:
    """Return the program and the files of the packages that hold what it imports from them."""
    found = {program}
    tree = ast.parse(program.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _ours(node.module or ""):
            found |= {_home(node.module or "", each.name) for each in node.names}
            if (node.module or "").startswith(TRAINING):
                found |= set(_rooms())
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "gradstats":
            found.add(_home("gradstats", node.attr))
    return found


def _ours(module: str) -> bool:
    return module.partition(".")[0] in ("gradstats", "capture")


def _rooms() -> Iterator[Path]:
    """Yield the files of the rooms that a training goes through."""
    for room in ROOMS:
        yield from (ROOT / "gradstats" / room).rglob("*.py")
    yield from (ROOT / "capture" / "workloads").rglob("*.py")


@cache
def _home(module: str, name: str) -> Path:
    """Return the file that defines what a module offers by a name."""
    where = importlib.import_module(module)
    try:
        thing = getattr(where, name)
    except AttributeError:
        thing = importlib.import_module(f"{module}.{name}")
    try:
        file = inspect.getsourcefile(inspect.unwrap(thing) if callable(thing) else thing)
    except TypeError:  # a number, a text or a table
        file = None
    path = Path(file or where.__file__ or "")
    return path if path.is_relative_to(ROOT) else Path(where.__file__ or "")


def code_of(text: str) -> str:
    """Return a file's code, without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_remark(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_remark(node: ast.AST) -> bool:
    """Tell whether a statement is a text alone: a docstring, or what is said of a constant."""
    return isinstance(node, ast.Expr) and _is_text(node.value)


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


@cache
def changed(path: Path, since: str) -> bool:
    """Tell whether a file's code differs from that of a commit."""
    name = path.relative_to(ROOT).as_posix()
    if not _git("diff", "--name-only", since, "--", name):
        return False
    try:
        before = _git("show", f"{since}:{name}")
    except subprocess.CalledProcessError:  # it was not there, or elsewhere
        return True
    return code_of(before) != code_of(path.read_text(encoding="utf-8"))


def stored_by(place: str) -> tuple[str, str]:
    """Return the last commit that stored rows of a result, and its day; empty texts where there is none.

    Parameters
    ----------
    place : str
        The file, from the repository's root.
    """
    # a commit that took rows out has measured nothing
    for entry in _git("log", "--format=@%H %cs", "--numstat", "--", place).split("@")[1:]:
        commit, counts = entry.split("\n", 1)
        if counts.split()[:1] != ["0"]:
            since, day = commit.split()
            return since, day
    return "", ""


def everything(words: list[str]) -> list[Row]:
    """Return a row for each result."""
    rows: list[Row] = []
    for name, programs in makers().items():
        if words and not any(word in name for word in words):
            continue
        place = f"docs/results/{name}"
        since, day = stored_by(place)
        files = set().union(*(rests_on(program) for program in programs)) if programs else set()
        newer = sorted(file for file in files if since and changed(file, since))
        rows.append(
            {
                "result": name,
                "programs": [program.stem for program in programs],
                "made": day or "not stored yet",
                "files": len(files),
                "changed": [file.relative_to(ROOT).as_posix() for file in newer],
            }
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown: what is current in one line, and then the others."""
    current = [row["result"] for row in rows if not row["changed"]]
    lines = []
    for row in rows:
        if row["changed"]:
            made = ", ".join(f"`{each}`" for each in row["programs"])
            counts = str(row["files"]), str(len(row["changed"]))
            lines.append([row["result"], made, row["made"], *counts])
    about = f"Of {len(rows)} results {len(current)} are of today's code: {', '.join(current) or 'none'}."
    heads = "result | made by | stored | files that it rests on: | changed since:"
    return f"{about}\n\n{grid(heads, lines)}"


def main() -> None:
    """Print the table, or of the results named which files have changed."""
    parser = command(__doc__)
    parser.add_argument("words", nargs="*", help="words in the names of results to look at closely")
    options = parser.parse_args()
    rows = everything(options.words)
    show({"stale": table(rows)}, options.write and not options.words)
    for row in rows if options.words else ():
        print(f"\n{row['result']}: " + (", ".join(row["changed"]) or "nothing has changed"))


if __name__ == "__main__":
    main()
