"""Registries: what loads when, what others bring, and what is refused."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from gradstats import registry
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


def test_what_cannot_be_used_is_refused_in_one_line(functions):
    with pytest.raises(InputError, match=r"^3 is no function$"):
        functions["3"] = 3
    with pytest.raises(InputError, match=r"'broken' cannot be loaded from nowhere:f: No module"):
        functions["broken"]
    with pytest.raises(KeyError):
        functions["other"]
