"""The program as users have it: installed from its wheel."""

from __future__ import annotations

import shutil

import pytest
from conftest import ROOT
from support.installed import install


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The folder that gradstats is installed into, with the loops that the tests have compiled."""
    folder = tmp_path_factory.mktemp("installed")
    install(ROOT, folder)
    for code in (ROOT / "gradstats").rglob("__pycache__/*.nbc"):
        there = folder / code.parent.relative_to(ROOT)
        there.mkdir(exist_ok=True)
        shutil.copy(code, there)
    return folder
