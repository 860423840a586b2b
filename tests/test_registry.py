"""Registries: what loads when, what others bring, and what is refused."""

from __future__ import annotations

import importlib
import pickle
import sys
from importlib.metadata import EntryPoint, EntryPoints, entry_points

import pytest
from support.every import every

from gradstats import registry
from gradstats.compressors import COMPRESSORS
from gradstats.errors import InputError
from gradstats.registry import Registry


def check(name, value):
    if not callable(value):
        raise InputError(f"{name} is no function")


@pytest.fixture
def functions(monkeypatch):
    """A registry of two functions of its own, and two entry points, of which the second cannot be loaded."""
    brought = [
        EntryPoint("cbrt", "math:cbrt", "some.functions"),
        EntryPoint("broken", "nowhere:f", "some.functions"),
        EntryPoint("sqrt", "math:exp", "some.functions"),
    ]
    monkeypatch.setattr(registry, "entries", lambda group: EntryPoints(brought))
    return Registry("some.functions", {"sqrt": "math:sqrt", "add": "wave:open"}, check)


def test_installed_packages_are_looked_through_once_for_all_groups(monkeypatch):
    looked = []
    monkeypatch.setattr(
        registry, "entry_points", lambda **group: looked.append(group) or entry_points(**group)
    )
    registry._installed.cache_clear()
    groups = "console_scripts", "gradstats.commands", "gradstats.none"
    for group in groups:
        assert list(registry.entries(group)) == list(entry_points(group=group)), group
    assert looked == [{}]


def test_names_load_nothing(functions, monkeypatch):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    assert list(functions) == ["sqrt", "add", "cbrt", "broken"]
    assert len(functions) == 4
    assert "add" in functions
    assert "other" not in functions
    assert "wave" not in sys.modules
    assert functions["add"] is sys.modules["wave"].open


def test_its_own_come_first_and_a_program_may_replace_them(functions):
    assert functions["sqrt"](9) == 3  # not the entry point's
    functions["sqrt"] = lambda x: x
    functions["mine"] = abs
    assert functions["sqrt"](9) == 9
    assert list(functions)[-1] == "mine"
    del functions["mine"], functions["cbrt"]
    assert list(functions) == ["sqrt", "add", "broken"]
    with pytest.raises(KeyError):
        del functions["mine"]
    with pytest.raises(
        KeyError, match="topk"
    ):  # a rule, which this registry lists and does not hold
        del COMPRESSORS["topk"]


def test_what_cannot_be_used_is_refused_in_one_line(functions):
    with pytest.raises(InputError, match=r"^3 is no function$"):
        functions["3"] = 3
    with pytest.raises(InputError, match=r"'broken' cannot be loaded from nowhere:f: No module"):
        functions["broken"]
    with pytest.raises(KeyError):
        functions["other"]


@every(
    ("text", "said"),
    [
        (None, "No such file or directory"),
        ("x = 1\ny = unknown\n", "line 2: NameError: name 'unknown' is not defined"),
        ("def f(:\n", "line 1: SyntaxError: invalid syntax"),
        ("import nowhere_at_all\n", "line 1: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        ("open('nothing')\n", "line 1: FileNotFoundError: [Errno 2] No such file"),
        (
            "from gradstats.thresholds import ESTIMATORS\nESTIMATORS['mine'] = 3\n",
            "line 2: estimator 'mine' is to be a subclass of Estimator, or a function",
        ),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(tmp_path, text, said):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as error:
        registry.load_file(path)
    assert str(error.value).startswith(f"cannot load {path}")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert str(path) not in registry.loaded_files()
    assert "load_mine" not in sys.modules


def test_a_file_is_loaded_as_a_module_beside_others(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_FILES", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it.py").write_text("ONE = 1\n")
    (tmp_path / "statistics.py").write_text(  # a name that Python has
        "from dataclasses import dataclass\nimport beside_it\n\n"
        "@dataclass\nclass Mine:\n    one: int = beside_it.ONE\n"
    )
    registry.load_file(tmp_path / "statistics.py")
    mine = sys.modules.pop("load_statistics").Mine()
    assert mine.one == 1
    assert "mean" in vars(importlib.import_module("statistics"))
    assert registry.loaded_files() == [str(tmp_path / "statistics.py")]


def test_files_of_one_name_are_modules_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_FILES", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("load_same", "load_same_2"):  # taken away after the test
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    files = [tmp_path / folder / "same.py" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"class Mine:\n    where = {file.parent.name!r}\n")
        registry.load_file(file)
    mine = [sys.modules[name].Mine for name in ("load_same", "load_same_2")]
    assert [each.where for each in mine] == ["a", "b"]
    assert [pickle.loads(pickle.dumps(each)) for each in mine] == mine
    # read again in its own place
    registry.load_file(files[0])
    assert sys.modules["load_same"].Mine is not mine[0]
    assert "load_same_3" not in sys.modules


def test_registries_refuse_what_they_cannot_use(forgotten):
    from gradstats.compressors import COMPRESSORS, Compressor
    from gradstats.thresholds import ESTIMATORS, Estimator, Exact

    without = type("Without", (Estimator,), {"name": "mine"})
    for registered, name, value, said in (
        (ESTIMATORS, "mine", without, r"has no find\(x, k\)"),
        (ESTIMATORS, "mine", Exact, "calls itself 'exact': both names"),
        (ESTIMATORS, "topk", Exact, "cannot have the name 'topk'"),
        (ESTIMATORS, "threshold:mine", Exact, "cannot have the name"),
        (ESTIMATORS, "mine", int, "subclass of Estimator, or a function"),
        (COMPRESSORS, "mine", Compressor, "has no reduce"),
        (COMPRESSORS, "mine", Exact, "subclass of Compressor, not a value of type"),
        (COMPRESSORS, "threshold:mine", Compressor, "cannot have the name"),
    ):
        with pytest.raises(InputError, match=said):
            registered[name] = value
        assert "mine" not in registered


def test_a_rule_that_comes_later_is_a_compressor_at_once(forgotten):
    from gradstats.compressors import COMPRESSORS, SELECTORS, codecs, make_compressor
    from gradstats.compressors.sparse import SparseCompressor
    from gradstats.thresholds import ESTIMATORS, Hard

    before = list(COMPRESSORS)
    assert before[:4] == ["none", "dense-bf16", "dense-fp8", "topk"]
    ESTIMATORS["mine"] = lambda threshold=2.0: Hard(threshold)
    assert "mine" in COMPRESSORS
    assert "mine" in SELECTORS
    assert set(COMPRESSORS) - set(before) == {"mine"}
    assert len(COMPRESSORS) == len(before) + 1
    for name in ("mine", "threshold:mine"):
        made = make_compressor(name, 0.1, threshold=3.0, values="float16")
        assert isinstance(made, SparseCompressor)
        assert made.selector.estimator.threshold == 3.0
    assert codecs("mine") == ("indices", "values")
    del ESTIMATORS["mine"]
    assert list(COMPRESSORS) == before
