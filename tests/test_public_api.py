"""The page of public names says what there is; ``python tests/test_public_api.py --write`` makes it anew."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import gradstats
from gradstats.network import Network

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "stable.md"
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
- the commands, their options, and the fields of their JSON and CSV records.

A release that renames or removes one of these, or gives it another meaning or unit, says so in the changelog. New ones
may come in any release.

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
    names = ", ".join(f"`{each}`" for each in sorted(found(name).__all__, key=str.lower))
    wrapped = textwrap.fill(names, 120, break_long_words=False, break_on_hyphens=False)
    return f"\n## {name}\n\n{wrapped}\n"


def page():
    return HEAD + "".join(map(section, MODULES))


@pytest.mark.parametrize("name", MODULES)
def test_the_page_has_every_public_name(name):
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    listed = dict(each.split("\n\n", 1) for each in sections[1:])
    names = {each.strip(" `\n") for each in listed[name].split(",")}
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
