"""The tutorial, executed: its scripts and commands run in order, and print what the page shows.

``make tutorial`` puts what they print into the page.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest
from support.programs import program

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
_BLOCK = re.compile(r"```(python|sh|text)\n(.*?)```", re.DOTALL)


def executed(folder):
    """Run the page's blocks in a folder; return the page with what they print in its blocks of text."""
    text, printed = PAGE.read_text(encoding="utf-8"), ""

    def run(block):
        nonlocal printed
        language, content = block.groups()
        if language == "text":
            return f"```text\n{printed}```"
        printed = ""
        if language == "python" and "Capture(" in content:
            (folder / "train.py").write_text(content, encoding="utf-8")
        elif language == "python":
            printed = output(folder, "-c", content)
        else:
            for line in content.splitlines():
                name, *arguments = line.split()
                module = ["-m", name] if name == "gradstats" else []
                printed += output(folder, *module, *arguments)
        return block[0]

    return _BLOCK.sub(run, text)


def output(folder, *arguments):
    lines = program(*arguments, cwd=folder, env={"COLUMNS": "80"}).stdout.splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


@pytest.mark.slow
def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path, as_made):
    assert executed(tmp_path) == PAGE.read_text(encoding="utf-8")
    assert (tmp_path / "report.html").stat().st_size > 100_000


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/docs/test_tutorial.py --write")
    with tempfile.TemporaryDirectory() as made:
        page = executed(Path(made))
    PAGE.write_text(page, encoding="utf-8")
