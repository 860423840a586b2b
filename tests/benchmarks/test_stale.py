"""Which results are older than their code: who makes each, and what counts as a change."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import stale
from records import DOCS, RESULTS, ROOT


def test_every_result_is_made_by_a_program_that_is_here():
    made = stale.makers()
    assert {file.name for file in RESULTS.iterdir()} == made.keys()
    assert [name for name, programs in made.items() if not programs] == []
    stems = {name: {program.stem for program in programs} for name, programs in made.items()}
    assert stems["levels.jsonl"] == {"levels"}
    assert stems["network-lstm-ptb.jsonl"] == {"experiment"}
    page = (DOCS / "measurements.md").read_text(encoding="utf-8")
    table = page.partition("<!-- stale -->")[2].partition("<!-- /stale -->")[0]
    assert [name for name in made if name not in table] == []


def test_a_result_rests_on_what_its_program_imports():
    files = {
        file.relative_to(ROOT).as_posix()
        for file in stale.rests_on(ROOT / "benchmarks" / "levels.py")
    }
    assert "gradstats/statistics/pot/peaks.py" in files
    assert not any(file.startswith("gradstats/hooks") for file in files)
    files = {
        file.relative_to(ROOT).as_posix()
        for file in stale.rests_on(ROOT / "benchmarks" / "plateau.py")
    }
    assert {"gradstats/hooks/hook.py", "gradstats/thresholds/sampled.py"} <= files


def test_words_are_no_code():
    text = '"""A page."""\ndef f(x):\n    """Return x."""\n    return x\n'
    assert stale.code_of(text) == stale.code_of("def f(x):\n\n    return x  # as it is\n")
    assert stale.code_of(text) != stale.code_of(text.replace("return x\n", "return -x\n"))
    constant = '"""A page."""\nLEAST = 3\n"""The least."""\nMOST = 4\n"""The most."""\n'
    assert stale.code_of(constant) == stale.code_of("LEAST = 3\nMOST = 4\n")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_what_has_changed_since_a_commit(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    monkeypatch.setattr(stale, "ROOT", tmp_path)
    git("init", "-q")
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    for file in (one, two):
        file.write_text("x = 1\n")
    git("add", ".")
    git("commit", "-qm", "both")
    one.write_text("x = 1  # one\n")
    two.write_text("x = 2\n")
    (tmp_path / "three.py").write_text("x = 3\n")
    git("add", ".")
    since = stale._git("rev-parse", "HEAD").strip()
    assert not stale.changed(one, since)
    assert stale.changed(two, since)
    assert stale.changed(tmp_path / "three.py", since)
    # rows are stored by a commit that has some, not by one that takes some out
    rows = tmp_path / "rows.jsonl"
    assert stale.stored_by("rows.jsonl") == ("", "")
    rows.write_text("1\n2\n")
    git("add", ".")
    git("commit", "-qm", "rows")
    stored = stale._git("rev-parse", "HEAD").strip()
    rows.write_text("1\n")
    git("commit", "-qam", "one less")
    assert stale.stored_by("rows.jsonl")[0] == stored
    rows.write_text("1\n3\n")
    git("commit", "-qam", "another")
    assert stale.stored_by("rows.jsonl")[0] == stale._git("rev-parse", "HEAD").strip() != stored
