"""The architecture: which room may import which, what loads when, and that every public name exists."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from functools import cache
from typing import Literal, get_origin

import pytest
from conftest import ROOT
from support.every import every

import capture
import gradstats

# From the ground up: an entry of a package may import the entries before it, and nothing after it.
ROOMS = [
    "gradstats.version",
    "gradstats.errors",
    "gradstats.registry",
    "gradstats.tables",
    "gradstats.console",
    "gradstats.files",
    "gradstats.primitives",
    "gradstats.collectives",
    "gradstats.statistics",
    "gradstats.trace",
    "gradstats.thresholds",
    "gradstats.plots",
    "gradstats.compressors",
    "gradstats.analysis",
    "gradstats.hooks",
    "gradstats.explorer",
    "gradstats.report",
    "gradstats.network",
    "gradstats.cli",
    "gradstats.__main__",
    "capture.schedule",
    "capture.copies",
    "capture.states",
    "capture.room",
    "capture.writer",
    "capture.updates",
    "capture.recorder",
    "capture.taps",
    "capture.creation",
    "capture.facade",
    "capture.integrations",
    "capture.workloads",
    "capture.options",
    "capture.lab",
    "capture.atlas",
    "capture.cli",
]
# A package's own page names what it makes public and loads it late: it is above everything it names.
FRONTS = ("gradstats", "capture")
# Loaded when first used, so that `gradstats --help` and `import gradstats` answer at once.
HEAVY = ("torch", "scipy", "statsmodels", "seaborn", "matplotlib", "numba", "zarr", "xarray")
HEAVY += ("pandas", "sklearn", "numpy", "dask", "distributed", "rich")


def modules():
    for package in ("gradstats", "capture"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, path


MODULES = dict(modules())


def imports(path):
    """Yield (module, whether inside a function) of everything a file imports from this project."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        node
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(f)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in MODULES else node.module), node in inside


def room(name):
    """Return the place of a module's room, None for another project's module."""
    for i, prefix in enumerate(ROOMS):
        if (name + ".").startswith(prefix + "."):
            return i
    return len(ROOMS) if name in FRONTS else None


def test_every_module_is_in_a_room():
    """A new file or folder at the top needs a room here first: think where it belongs."""
    homeless = [name for name in MODULES if room(name) is None]
    assert not homeless, f"not in ROOMS: {homeless}"
    empty = [r for r in ROOMS if not any((m + ".").startswith(r + ".") for m in MODULES)]
    assert not empty, f"rooms without a file: {empty}"


@every(("name", "path"), MODULES.items(), ids=list(MODULES))
def test_imports_point_down(name, path):
    for imported, _ in imports(path):
        theirs = room(imported)
        if theirs is not None and name not in FRONTS:
            assert theirs <= room(name), f"{name} imports {imported}, a room above it"


def test_no_circle_of_files():
    """Not within a room either, and not by imports inside functions."""
    graph = {
        name: {i for i, _ in imports(path) if i in MODULES and i != name}
        for name, path in MODULES.items()
        if name not in FRONTS
    }
    done, path = set(), []

    def visit(name):
        if name in done or name in FRONTS:
            return
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        path.append(name)
        for other in sorted(graph[name]):
            visit(other)
        path.pop()
        done.add(name)

    for name in graph:
        visit(name)


def test_no_underscore_hides_a_clash_of_names():
    names = [n for n in MODULES if n.split(".")[-1].startswith("_") and "__" not in n]
    assert not names


# what FSDP2 notes of a unit and of its parameters, without an underscore
NOTES_OF_FSDP2 = {
    *("all_reduce_grads", "fsdp_params", "fsdp_placement", "mesh_info", "shard_mesh_size"),
    *("sharded_param", "sharded_size", "padded_sharded_param_size", "replicate_process_group"),
    *("gradient_divide_factor", "force_sum_reduction_for_comms"),
}


def private_names(path):
    """Yield private names of other projects that a file uses: attributes that nothing here defines, and modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in NOTES_OF_FSDP2:
            yield node.attr
        if isinstance(node, ast.Attribute) and node.attr not in defined_here():
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names = node.module.split(".")
        else:
            continue
        yield from (n for n in names if n.startswith("_") and not n.startswith("__"))


@cache
def defined_here():
    names = set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(getattr(node, "attr", None) or node.id)
    return names


def test_what_torch_fsdp_and_numba_do_not_promise_is_in_one_file_each():
    # of named tuples, of os, and of Numba's structures, as its manual on extending it uses them
    promised = {"_replace", "_exit", "_getvalue"}
    places = {
        "gradstats.hooks.torch_private",
        "gradstats.hooks.fsdp_private",
        "gradstats.primitives.loops.compiled",
    }
    for name in MODULES.keys() - places:
        assert set(private_names(MODULES[name])) <= promised, name


def attributes(cls):
    """Return the names of what a class assigns to its instances, and of the fields that it declares."""
    names = {f.target.id for f in cls.body if isinstance(f, ast.AnnAssign)}
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    return names


@every(("name", "path"), list(MODULES.items()))
def test_what_is_large_says_why(name, path):
    """A file of more than 500 lines, a class of more than 300 or of more than 12 attributes: ``# Size:`` and why."""
    text = path.read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    if not tree.body:
        return
    head = lines[tree.body[0].end_lineno : tree.body[0].end_lineno + 3]
    assert len(lines) <= 500 or any(line.startswith("# Size: ") for line in head), name
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        first = min(each.lineno for each in (cls, *cls.decorator_list)) - 1
        large = cls.end_lineno - cls.lineno >= 300 or len(attributes(cls)) > 12
        assert large == lines[first - 1].startswith("# Size: "), f"{name}: {cls.name}"


PARTICIPLES = {"found", "own", "kept", "given", "said", "told", "seen"}
# what estimators are told of a step, and a column of `contraction`: both are public
PUBLIC_PARTICIPLES = {
    ("gradstats.compressors.contraction", "kept"),
    ("gradstats.thresholds.base", "kept"),
}
PUBLIC_PARTICIPLES |= {(f"gradstats.thresholds.{name}", "kept") for name in ("micro", "sidco")}


def test_a_name_says_what_it_is_and_not_what_was_done_to_it():
    names = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.arg):
                names.add((module, node.arg))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add((module, node.name))
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add((module, getattr(node, "attr", None) or node.id))
    assert {n for n in names if n[1].strip("_") in PARTICIPLES} == PUBLIC_PARTICIPLES


def loaded_by(code):
    script = f"import sys\n{code}\nprint('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    names = done.stdout.split()
    return {part for name in names for part in (name, name.split(".")[0])}


def test_help_loads_nothing_heavy():
    run_help = (
        "import contextlib, io, runpy, sys\n"
        "sys.argv = ['gradstats', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    runpy.run_module('gradstats', run_name='__main__')\n"
    )
    assert not loaded_by(run_help) & (set(HEAVY) - {"rich"})  # typer prints its help with rich
    assert not loaded_by("import gradstats, capture") & set(HEAVY)


@pytest.mark.parametrize("rooms", [("statistics", "tables", "analysis", "trace")])
def test_scalar_rooms_are_free_of_torch(rooms):
    """Fits, goodness, compressibility and tables are pure functions of what primitives return."""
    for name, path in MODULES.items():
        if name.startswith(tuple(f"gradstats.{r}" for r in rooms)):
            top = {i.split(".")[0] for i, inside in imports(path) if not inside}
            assert "torch" not in top, name


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (
            "import numpy as np, gradstats\ngradstats.threshold(np.ones(3), 0.5, 'sidco-e')",
            {"torch", "scipy.special", "scipy.stats"},
        ),
        (
            "from gradstats.compressors import COMPRESSORS\nassert 'marsit' in COMPRESSORS",
            {"torch"},
        ),
        ("import gradstats.analysis.fits, gradstats.analysis.quality", {"torch"}),
        ("from gradstats.trace import open_trace", {"torch", "scipy.special", "scipy.stats"}),
    ],
)
def test_what_stays_unloaded(code, absent):
    assert not loaded_by(code) & absent


@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_programs_find_what_they_import_without_edits_of_the_path(folder):
    """A program finds what is beside it; tools are told of benchmarks/ by the Makefile."""
    edit = re.compile(r"sys\.path *(\.\w+\(|\[|\+?=)|\baddsitedir\(")
    assert edit.search("sys.path.insert(0, folder)")
    programs = sorted((ROOT / folder).rglob("*.py"))
    assert len(programs) > 5
    assert [p.name for p in programs if edit.search(p.read_text(encoding="utf-8"))] == []


def test_functions_are_not_shadowed_by_modules():
    code = (
        "import gradstats.analysis.quality, gradstats.statistics.compressibility, gradstats.plots\n"
        "import gradstats.primitives.sketch, gradstats\n"
    )
    names = ("fit", "quality", "compressibility", "sketch", "moments", "histogram", "select")
    loaded_by(code + "\n".join(f"assert callable(gradstats.{name})" for name in names))


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
        assert thing.__doc__ or get_origin(thing) is Literal, name
    with pytest.raises(AttributeError, match="nonsense"):
        package.nonsense  # noqa: B018
    assert set(package.__all__) <= set(dir(package))


COLLECTIVES = {"all_gather", "all_gather_into_tensor", "all_gather_single"}
COLLECTIVES |= {"all_reduce", "all_to_all_single", "broadcast"}


def test_what_trains_uses_collectives_that_let_go():
    """After torch's own, an exit may abort the process, and a lost rank is an error of many lines."""
    for name, path in MODULES.items():
        if name.startswith(("gradstats.hooks", "gradstats.compressors")):
            text = path.read_text(encoding="utf-8")
            assert not COLLECTIVES & set(re.findall(r"\bdist\.(\w+)\(", text)), name


VERDICTS = "gradstats.analysis.verdicts"
# What is said of how a program works, and not of data: errors and notices.
NOTICES = {"gradstats.errors", "gradstats.console", "gradstats.hooks", "gradstats.primitives"}
NOTICES |= {"gradstats.cli", "capture.room"}


def test_verdicts_are_made_in_one_place():
    """Only there is a ``Verdict`` made, and a function that says something of data; a property ``verdict`` asks it."""
    elsewhere = []
    for name, path in MODULES.items():
        if (name + ".").startswith(VERDICTS + "."):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Verdict":
                elsewhere.append(f"{name}:{node.lineno} makes a Verdict")
            if not isinstance(node, ast.FunctionDef):
                continue
            says = (ast.get_docstring(node) or "").startswith("Say ")
            if says and not any((name + ".").startswith(n + ".") for n in NOTICES):
                elsewhere.append(f"{name}.{node.name} says something")
            if node.name == "verdict":
                _, *body = node.body  # after the docstring
                asks = [s for s in body if isinstance(s, ast.Return)] == body
                words = [c for c in ast.walk(node) if isinstance(c, ast.JoinedStr)]
                if not asks or words:
                    elsewhere.append(f"{name}.{node.name} has words of its own")
    assert not elsewhere
