"""What pyproject.toml promises: ranges, extras, one version."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from conftest import ROOT

import gradstats
from gradstats.errors import GradstatsError

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# zarr needs the first two itself, torch's CUDA builds bring the third; the last is named in types alone.
BROUGHT = {"google_crc32c", "numcodecs", "triton", "typing_extensions"}


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0].lower()


def imported(package):
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.split(".")[0]


def test_everything_imported_is_declared():
    optional = {
        name_of(r) for extra in EXTRAS if extra not in ("dev", "docs") for r in EXTRAS[extra]
    }
    declared = {name_of(r) for r in PROJECT["dependencies"]} | optional
    homes = packages_distributions()
    names = {*imported("gradstats"), *imported("capture")}
    names -= {*sys.stdlib_module_names, *BROUGHT, "gradstats", "capture"}
    missing = {n for n in names if not {d.lower() for d in homes.get(n, [n])} & declared}
    assert not missing - {"distributed"}  # dask's


def test_users_get_ranges_and_the_make_targets_one_torch():
    assert not [r for r in PROJECT["dependencies"] if "==" in r]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==", constraints, re.MULTILINE)
    assert "constraints.txt" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_version_stands_in_one_place():
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", gradstats.__version__)


@pytest.mark.parametrize(
    ("blocked", "extra", "call"),
    [
        ("sklearn.datasets", "workloads", "capture.workloads.images.load_digits()"),
        ("distributed", "cluster", "gradstats.analysis.pieces.connect('tcp://127.0.0.1:1')"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch, blocked, extra, call):
    import capture.workloads.images
    import gradstats.analysis.pieces

    assert extra in EXTRAS
    monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(GradstatsError, match=rf"pip install 'gradstats\[{extra}\]'$"):
        eval(call, {"capture": capture, "gradstats": gradstats})


def test_without_any_extra_the_program_answers():
    blocked = ("sklearn", "distributed", "transformers", "accelerate", "lightning", "tensorboard")
    code = (
        "import sys, runpy\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "import gradstats, capture, gradstats.report, gradstats.network.plan, capture.workloads.images\n"
        "sys.argv = ['gradstats', '--help']\n"
        "runpy.run_module('gradstats', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "capture" in done.stdout
