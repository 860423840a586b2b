"""The command line, run in this process."""

from __future__ import annotations

import contextlib
import io
import json
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import typer.main
from typer.testing import CliRunner

from gradstats import cli
from gradstats.compressors import COMPRESSORS
from gradstats.statistics.laws import LAWS
from gradstats.thresholds import ESTIMATORS

_build = typer.main.get_command
_built = {}


def commands(app):
    """Return what Typer makes of the app, which takes longer than most commands: once, unless something was added."""
    apps = [app, *(group.typer_instance for group in app.registered_groups)]
    functions = [command.callback for each in apps for command in each.registered_commands]
    names = [name for registry in (LAWS, ESTIMATORS, COMPRESSORS) for name in registry._loaded]
    key = (*map(id, apps), *functions, *names)
    if key not in _built:
        _built[key] = _build(app)
    return _built[key]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def main(arguments=None):
    """Be the entry point, for tests that call it often."""
    with patch("typer.main.get_command", commands):
        cli.main(arguments)


class Runner(CliRunner):
    """Typer's runner, likewise."""

    def invoke(self, app, *arguments, **options):
        with patch("typer.testing._get_command", commands):
            return super().invoke(app, *arguments, **options)


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
