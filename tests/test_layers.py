"""The architecture: who imports whom, what loads when, and that every public name exists."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys

import pytest
from conftest import ROOT

import capture
import gradstats

# Each module may import those before it (DESIGN: dependencies point one way).
LAYERS = [
    "gradstats.errors",
    "gradstats.primitives",
    "gradstats.thresholds",
    "gradstats.collectives",
    "gradstats.compressors",
    "gradstats.memory",
    "gradstats._record",
    "gradstats.diagnostics",
    "gradstats._layout",
    "gradstats.hooks",
    "gradstats.systems",
    "gradstats.trace",
    "capture",
]


# Programs are above everything, wherever the command that starts them has them live.
PROGRAMS = {"gradstats.collectives.measure"}


def imports(path, package):
    """Yield the gradstats and capture modules a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def modules():
    for package in ("gradstats", "capture"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, path


def layer(name):
    if name in PROGRAMS:
        return None
    return next(
        (i for i, prefix in enumerate(LAYERS) if (name + ".").startswith(prefix + ".")), None
    )


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=[name for name, _ in modules()])
def test_imports_point_one_way(name, path):
    for imported in imports(path, name):
        if name.startswith("gradstats"):
            assert not imported.startswith("capture"), f"{name} imports {imported}"
        mine, theirs = layer(name), layer(imported)
        if mine is not None and theirs is not None:
            assert theirs <= mine, f"{name} imports {imported}, a layer above it"


def test_scalar_modules_are_free_of_torch():
    """Fits, goodness, compressibility and tables are pure functions of what primitives return."""
    scalar = (
        "_fit",
        "_compressibility",
        "_compression",
        "_quality",
        "goodness",
        "tables",
        "analysis",
        "trace",
    )
    found = [(n, p) for n, p in modules() if n.startswith(tuple(f"gradstats.{s}" for s in scalar))]
    assert len(found) >= len(scalar)
    for name, path in found:
        assert not any(i.split(".")[0] == "torch" for i in imports(path, name)), name


def loaded_by(code):
    script = (
        f"import sys\n{code}\nprint('\\n'.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_help_loads_nothing_heavy():
    run_help = (
        "import contextlib, io, runpy, sys\n"
        "sys.argv = ['gradstats', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    runpy.run_module('gradstats', run_name='__main__')\n"
    )
    heavy = {"torch", "scipy", "statsmodels", "seaborn", "matplotlib", "numba", "zarr", "xarray"}
    heavy |= {"pandas", "sklearn", "numpy", "dask"}
    assert not loaded_by(run_help) & heavy
    assert not loaded_by("import gradstats, capture") & heavy


def test_functions_are_not_shadowed_by_the_modules_they_live_in():
    code = "import gradstats.analysis, gradstats.plots, gradstats\nassert callable(gradstats.fit)"
    loaded_by(code + "\nassert callable(gradstats.quality) and callable(gradstats.compressibility)")


def test_a_threshold_of_an_array_needs_no_torch():
    code = "import numpy as np, gradstats\ngradstats.threshold(np.ones(3), 0.5, 'sidco-e')"
    assert "torch" not in loaded_by(code)


def test_the_names_of_compressors_need_no_torch():
    code = "from gradstats.compressors import COMPRESSORS\nassert 'marsit' in COMPRESSORS"
    assert "torch" not in loaded_by(code)


@pytest.mark.parametrize("package", [gradstats, capture, gradstats.compressors])
def test_every_public_name_exists_and_is_documented(package):
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        assert module.__doc__, f"{info.name} has no docstring"
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name), f"{info.name}.__all__ names {name}"
    for name in package.__all__:
        thing = getattr(package, name)
        assert thing.__doc__, name
    with pytest.raises(AttributeError, match="nonsense"):
        package.nonsense  # noqa: B018
    assert set(package.__all__) <= set(dir(package))
