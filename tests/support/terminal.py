"""The command line, run in this process."""

from __future__ import annotations

import contextlib
import io
import json
from types import SimpleNamespace

import pytest

from gradstats.cli import main


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(*args, terminal=False):
    """Run a command as the entry point does; both streams are a terminal, or neither."""
    stdout, stderr = (Terminal() if terminal else io.StringIO() for _ in range(2))
    with (
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as done,
    ):
        main(list(map(str, args)))
    return SimpleNamespace(
        returncode=done.value.code, stdout=stdout.getvalue(), stderr=stderr.getvalue()
    )


def records(*args):
    done = run(*args, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
