"""Count blocks of code that stand twice: ``python tools/repeats.py [FOLDER …] [--lines 6] [--show 10]``.

Docstrings, comments and imports do not count: what is said of a parameter may be said wherever it stands. Code is
compared as ``ast.unparse`` writes it, once to the letter and once with all names and constants alike.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from itertools import combinations
from pathlib import Path

Place = tuple[str, int]


def code_lines(path: Path) -> list[str]:
    """Return the lines of a file's code, as ``ast.unparse`` writes them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [
                child
                for child in body
                if not isinstance(child, ast.Import | ast.ImportFrom)
                and not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant))
            ]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree).splitlines()


def shape(line: str) -> str:
    """Return a line with every name and constant replaced by a mark."""
    out, word = [], False
    for character in line:
        if character.isalnum() or character in "_'\"":
            if not word:
                out.append("x")
            word = True
        else:
            out.append(character)
            word = False
    return "".join(out)


def repeats(files: dict[str, list[str]], length: int) -> list[tuple[Place, Place, int]]:
    """Return pairs of places that share at least `length` lines, each pair at its full length."""
    where: dict[tuple[str, ...], list[Place]] = defaultdict(list)
    for name, lines in files.items():
        for start in range(len(lines) - length + 1):
            where[tuple(line.strip() for line in lines[start : start + length])].append(
                (name, start)
            )
    pairs = {pair for places in where.values() for pair in combinations(places[:8], 2)}
    found = []
    for (a, i), (b, j) in sorted(pairs):
        if ((a, i - 1), (b, j - 1)) in pairs or (a == b and abs(i - j) < length):
            continue  # inside a longer run, or beside itself
        n = length
        while ((a, i + n - length + 1), (b, j + n - length + 1)) in pairs:
            n += 1
        found.append(((a, i + 1), (b, j + 1), n))
    return sorted(found, key=lambda pair: -pair[2])


def main() -> None:
    """Print both counts, the lines of code they are of, and the longest repeats."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", default=["gradstats", "capture"])
    parser.add_argument("--lines", type=int, default=6, help="lines that make a repeat")
    parser.add_argument("--show", type=int, default=10, help="repeats to show")
    options = parser.parse_args()
    paths = [p for folder in options.folders for p in sorted(Path(folder).rglob("*.py"))]
    files = {str(p): code_lines(p) for p in paths}
    exact = repeats(files, options.lines)
    alike = repeats({n: [shape(x) for x in lines] for n, lines in files.items()}, options.lines)
    total = sum(map(len, files.values()))
    print(
        f"{len(exact)} repeats to the letter, {len(alike)} of one shape, in {total} lines of code"
    )
    for (a, i), (b, j), n in exact[: options.show]:
        print(f"{n} lines: {a} ~ {b} (code lines {i}, {j}): {files[a][i - 1].strip()[:60]}")


if __name__ == "__main__":
    main()
