"""A program installed from its wheel, and the files that how-to pages have their readers save."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import ROOT
from support.programs import program


def install(project, folder):
    """Build a wheel of a project and install it, alone, into a folder; nothing is downloaded.

    What builds it is called as pip would, which takes longer than the building.
    """
    pytest.importorskip("hatchling", reason="make .venv installs what builds the wheel")
    wheels = folder / "wheels"
    _module("hatchling", "build", "--target", "wheel", "--directory", wheels, cwd=project)
    pip = ["pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    _module(*pip, "--target", folder, *wheels.glob("*.whl"))


def _module(*words, cwd=None):
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def python(*arguments, path, cwd, ranks=0):
    """Run Python with folders first on its path, and return what it printed."""
    return program(*arguments, path=path, cwd=cwd, ranks=ranks, env={"COLUMNS": "120"}).stdout


def blocks(page, kind):
    """Return the code blocks of one kind on a how-to page."""
    text = (ROOT / "docs" / "howto" / page).read_text(encoding="utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def files_of(page):
    """Return the Python files that a how-to page has its reader save, by name."""
    text = (ROOT / "docs" / "howto" / page).read_text(encoding="utf-8")
    names = re.findall(r"\bas\s`(\w+\.py)`:\n\n```python", text)
    return dict(zip(names, blocks(page, "python"), strict=True))
