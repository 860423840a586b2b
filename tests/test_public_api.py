"""The page of public names says what there is, and how it is called; all signatures stay as they are kept.

``python tests/test_public_api.py --write`` makes both anew. Signatures are parameters and their defaults, of functions,
of classes and of the public methods and attributes of classes, without annotations, which are not what is stable.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from enum import Enum
from pathlib import Path
from types import GenericAlias
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
from support.every import every

import gradstats
from gradstats.network import Network

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "stable.md"
SIGNATURES = Path(__file__).parent / "pins" / "data" / "signatures.json"
MODULES = (
    "gradstats",
    "gradstats.compressors",
    "gradstats.hooks",
    "gradstats.collectives",
    "gradstats.thresholds",
    "gradstats.distributions",
    "gradstats.goodness",
    "gradstats.laws",
    "gradstats.pot",
    "gradstats.trace",
    "gradstats.tables",
    "gradstats.plots",
    "gradstats.report",
    "gradstats.network",
    "capture",
)
HEAD = """\
# What is stable

Stable are

- the public names below, with the names of their parameters and attributes;
- the commands, their options, and the fields of their JSON and CSV records;
- the ways in for what users bring: `--load FILE.py`, and the entry points `gradstats.laws`, `gradstats.estimators` and
  `gradstats.compressors`.

Versions are MAJOR.MINOR.PATCH. A patch release changes nothing of this. A minor release may add. What it removes or
renames has warned for at least one minor release and six months, with the name of what to use instead: by a
`FutureWarning` in Python, in a line on stderr in the terminal. Other breaking changes wait for a major release. The
changelog lists them all. This holds before 1.0, too.

Files outlive versions. A trace and a measured network have a number in the field `schema`; a release that reads other
numbers says so in the changelog, and files of others are refused in one line. JSON records are lists without such a
number: fields are added, and keep name, meaning and unit.

Anything else may change in any release: modules and names that are not on this page, terminal tables, figures, the
report, the wording of messages, and the last digits of numbers.
"""


def found(name):
    """Return a module by its public path; some paths are attributes of gradstats."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        package, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(package), attribute)


def section(name):
    lines = (f"{each}{text}" for each, text in signed(name))
    return "\n".join([f"\n## {name}\n", "```python", *lines, "```", ""])


def signed(name):
    """Yield the public names of a module and, of what can be called, parameters and defaults."""
    module = found(name)
    for each in sorted(module.__all__, key=str.lower):
        value = getattr(module, each)
        yield each, (signature(value) or "") if callable(value) else ""


def page():
    return HEAD + "".join(map(section, MODULES))


def signature(function):
    """Return parameters and defaults as text, or names; None where Python knows none, or each version others."""
    if get_origin(function) is Literal:
        return f" = Literal{json.dumps(get_args(function))}"
    enum = inspect.isclass(function) and issubclass(function, Enum)
    if enum or isinstance(function, GenericAlias):
        return None
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=found.empty))
    return re.sub(r"<function [^,)]*>", "<function>", text)


def ours(owner, attribute):
    """Return what a class has by a name, if this project gave it to it."""
    for cls in owner.__mro__:
        if attribute in vars(cls):
            return (
                vars(cls)[attribute]
                if cls.__module__.startswith(("gradstats", "capture"))
                else None
            )
    return None


def signatures(name):
    """Return {public name of a module, and of what its classes have: signature, or what it is}."""
    module, texts = found(name), {}
    for public in sorted(module.__all__):
        value = getattr(module, public)
        if not inspect.isclass(value):
            texts[public] = signature(value) if callable(value) else type(value).__name__
            continue
        texts[public] = signature(value)
        for attribute in sorted(dir(value)):
            inner = None if attribute.startswith("_") else ours(value, attribute)
            if inner is None:
                continue
            function = inner.__func__ if isinstance(inner, classmethod | staticmethod) else inner
            text = signature(function) if inspect.isfunction(function) else None
            texts[f"{public}.{attribute}"] = text or "attribute"
    return texts


@every("name", MODULES)
def test_signatures_are_as_they_were(name):
    kept, texts = json.loads(SIGNATURES.read_text("utf-8"))[name], signatures(name)
    changed = {n: (t, texts.get(n)) for n, t in kept.items() if texts.get(n) != t}
    assert changed == {}, "run python tests/test_public_api.py --write if this is meant"
    added = set(texts) - set(kept)
    assert added == set(), "run python tests/test_public_api.py --write"


@every("name", MODULES)
def test_the_page_has_every_public_name(name):
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    listed = dict(each.split("\n\n", 1) for each in sections[1:])
    names = {re.match(r"\w+", line)[0] for line in listed[name].strip("`\n").splitlines()[1:]}
    assert names == set(found(name).__all__), "run python tests/test_public_api.py --write"


def test_the_page_is_as_written_here():
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("of_path", [True, False])
def test_the_functions_of_commands_take_paths_and_objects_and_return_tables(of_path, tmp_path):
    x = np.random.default_rng(0).laplace(size=5000).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    network = Network.of_link(1e-3, 1e-8)
    network.save(tmp_path / "network.json")
    source, cluster = x, network
    if of_path:
        source, cluster = str(tmp_path / "x.npy"), tmp_path / "network.json"
    tables = {
        "quality": gradstats.quality(source, [0.1], ["exact"]),
        "pot": gradstats.pot(source, [0.1]),
        "tails": gradstats.pot(source, [0.1], per_layer=True),
        "drift": gradstats.drift(source, ["mean"]),
        "plan": gradstats.plan(source, cluster, 0.1, [2], compressors=["topk"]),
        "report": gradstats.report(source),
    }
    assert {name: len(table) for name, table in tables.items()} | {"report": 0} == {
        "quality": 1,
        "pot": 1,
        "tails": 3,
        "drift": 1,
        "plan": 2,
        "report": 0,
    }
    for name, table in tables.items():
        frame = table.to_dataframe()
        assert list(frame.columns) == list(table[0]), name
    pooled, expected = tables["pot"][0], gradstats.pot.parameter_stability(x, [0.1])[0]
    assert pooled["c"] == expected.c == tables["tails"][0]["c"]
    assert tables["drift"][0]["mean"] == pytest.approx(np.abs(x).mean(), rel=1e-5)
    answers = {row["question"]: row["answer"] for row in tables["report"]}
    assert answers["Does it move?"] == "One step only"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_public_api.py --write")
    PAGE.write_text(page(), encoding="utf-8")
    kept = {name: signatures(name) for name in MODULES}
    SIGNATURES.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
