"""Plant faults one by one, and see whether the tests of the module notice.

    .venv/bin/python benchmarks/planted.py [WORD] [--again] [--write]

benchmarks/planted.json lists faults that somebody might make: a comparison the wrong way round, a factor lost, a bound
off by one. Each is planted in a copy of the repository, whose tests of that room then run. Results are stored one by
one in docs/results/planted.jsonl, so the program can be interrupted; ``--again`` repeats those whose name of a file
has the word. It takes hours. The table is printed at the end; ``--write`` also puts it into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from records import DOCS, RESULTS, ROOT, Row, keep, put, store, stored
from rich.console import Console
from rich.progress import track

FILE = RESULTS / "planted.jsonl"
LIMIT_S = 900


def planted() -> list[Row]:
    """Return the faults: file, old and new text, and the tests of the module."""
    faults: list[Row] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return faults


def key(row: Row) -> tuple[str, str, str]:
    """Return what a fault is known by."""
    return row["file"], row["old"], row["new"]


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
            env={**os.environ, "PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(copy / "compiled")},
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
    changed = text.replace(fault["old"], fault["new"])
    result, by = noticed(target, changed, fault["tests"], copy)
    return {**fault, "result": result, "by": by}


def table(rows: list[Row]) -> str:
    """Return the counts by room, and every fault that no test noticed."""
    lines = ["| room | planted | noticed | not noticed |", "|---|---:|---:|---:|"]
    results = {(key(row), row["result"]) for row in rows if row["result"] != "gone"}
    count = Counter((found[0][0].split("/")[1].removesuffix(".py"), found[1]) for found in results)
    for room in sorted({room for room, _ in count}):
        killed, survived = count[room, "killed"], count[room, "survived"]
        lines.append(f"| {room} | {killed + survived} | {killed} | {survived} |")
    lines += ["", "| not noticed | why |", "|---|---|"]
    why = {key(fault): fault.get("why", "no test yet") for fault in planted()}
    for row in rows:
        if row["result"] == "survived":
            old, new = (" ".join(row[n].split()).replace("|", "\\|") for n in ("old", "new"))
            lines.append(f"| {row['file']}: `{old}` → `{new}` | {why[key(row)]} |")
    return "\n".join(lines)


def main() -> None:
    """Plant what was not planted yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("word", nargs="?", default="", help="only faults in files with this name")
    parser.add_argument("--again", action="store_true", help="repeat what is stored")
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    options = parser.parse_args()
    faults = [fault for fault in planted() if options.word in fault["file"]]
    if options.again:
        again = {key(fault) for fault in faults}
        kept = [row for row in stored(FILE) if key(row) not in again]
        keep(FILE, kept)
    done = {key(row) for row in stored(FILE)}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__"))
        left = [fault for fault in faults if key(fault) not in done]
        for fault in track(left, "planting", console=Console(stderr=True)):
            row = plant(fault, copy)
            store(FILE, {name: row[name] for name in ("file", "old", "new", "result", "by")})
    text = table(stored(FILE))
    print(text)
    if options.write:
        put(DOCS / "reliability.md", "planted", text)


if __name__ == "__main__":
    main()
