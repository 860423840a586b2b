"""Every command line of the pages is one that the programs take, and those that only read run as they are shown.

Lines in blocks have to be whole; in running text an argument may be left out. What trains or times is parsed here.
"""

from __future__ import annotations

import re
import shlex
import tomllib

import numpy as np
import pytest
import typer
from conftest import ROOT
from safetensors.numpy import save_file
from support.every import every
from support.installed import files_of
from support.networks import measured_network
from support.terminal import commands, run
from support.traces import LAYERS, NUMEL, write

import gradstats
from gradstats.cli import _global_first, _load_plugins, app
from gradstats.registry import load_file
from gradstats.trace import create_trace

PAGES = [ROOT / "README.md", ROOT / "data" / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
# What stands for something else on the pages, and an example of it.
MEANT = {"DIR": ".", "WORKLOAD": "resnet20-digits", "NAME": "topk", "M": "3", "H": "2", "…": None}
READING = {"agreement", "compare", "compressibility", "compression", "drift", "fit", "info"}
READING |= {"delta", "plan", "pot", "quality", "wire"}  # the tutorial's test has the report
PROGRAMS = ("gradstats", "python", "torchrun", "pip", "make")


def lines():
    """Return the command lines of all pages: page, whether in a block, arguments."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
        prose = re.findall(
            r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        )
        for whole, some in ((True, blocks.splitlines()), (False, prose)):
            for each in some:
                line = each.partition(" #")[0]
                words = line.split() if "$" in line or "'" in line else shlex.split(line)
                words = [w for w in words if w != "sudo"]
                if words and words[0].rpartition("/")[2] in PROGRAMS and len(words) > 1:
                    words = [MEANT.get(w, w) for w in words]
                    words = [words[0].rpartition("/")[2], *(w for w in words[1:] if w)]
                    found.append((page.name, whole, words))
    return found


LINES = lines()


def unknown(whole, words):
    """Return why the program would not take a command line, or nothing."""
    program, *rest = words
    if program == "make":
        names = (ROOT / "Makefile").read_text(encoding="utf-8")
        named = (w for w in rest if "=" not in w)
        return [n for n in named if not re.search(rf"^{re.escape(n)}:", names, re.MULTILINE)]
    if program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*)\]", " ".join(rest))))
        return set(extras) - set(project["optional-dependencies"])
    if program in ("python", "torchrun"):
        if "gradstats.network" in rest:
            source = ROOT / "gradstats" / "network" / "__main__.py"
        else:
            script = next((w for w in rest if w.endswith(".py")), None)
            if script is None or "/" not in script:
                return []  # a script that the page itself shows
            source = ROOT / script
        # one program may hand its options on to another beside it
        code = "".join(p.read_text(encoding="utf-8") for p in source.parent.glob("*.py"))
        after = rest[[w.endswith(".py") or w == "gradstats.network" for w in rest].index(True) :]
        return [w for w in after if w.startswith("--") and f'"{w}"' not in code]
    _load_plugins()
    rest, loaded = _global_first(rest)
    rest = rest[2 * len(loaded) :]
    for file in loaded:
        load_file(file)
    group = commands(app)
    if rest[0].startswith("-"):
        return [] if run(*rest).returncode == 0 else rest
    with group.make_context("gradstats", rest, resilient_parsing=True) as context:
        command = group.get_command(context, rest[0])
        if command is None:
            return rest[0]
        try:
            command.make_context(rest[0], rest[1:], parent=context)
        except typer.BadParameter.__bases__[0] as error:
            if whole or type(error).__name__ not in ("MissingParameter", "BadOptionUsage"):
                return error.format_message()
    return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the pages' commands read, small: runs of two ranks with a compressor, and a measured network."""
    path = tmp_path_factory.mktemp("pages")
    kinds = ("gradient", "pseudogradient", "update")
    for name in ("run", "right", "wrong", "dense", "ef"):
        create_trace(path / f"{name}.zarr", LAYERS, world_size=2)
        for rank in (0, 1):
            write(
                path / f"{name}.zarr", range(0, 120, 20), rank=rank, kinds=kinds, compression=True
            )
    for name in ("right", "wrong"):
        np.savez(path / f"{name}.npz", w=np.ones(NUMEL, np.float32))
    for name in ("old", "new"):
        tensors = {"w": np.full((4, NUMEL), 1 + (name == "new") / 512, np.float32)}
        save_file(tensors, path / f"{name}.safetensors")
    np.save(path / "x.npy", np.ones(NUMEL, np.float32))
    measured_network(others=("rayleigh",)).save(path / "network.json")
    for page in ("law.md", "rule.md"):
        for name, code in files_of(page).items():
            (path / name).write_text(code, encoding="utf-8")
    return path


@every("page", sorted({page for page, *_ in LINES}))
def test_the_programs_take_every_command_line(page, folder, forgotten, monkeypatch):
    monkeypatch.chdir(folder)
    for _, whole, words in (line for line in LINES if line[0] == page):
        if "$" in " ".join(words):  # a loop of the shell
            continue
        assert not unknown(whole, words), " ".join(words)


@pytest.mark.slow
def test_the_commands_that_read_run_as_they_are_shown(folder, forgotten, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    shown = {
        tuple(words)
        for page, whole, words in LINES
        if (whole or page == "index.md")  # a table of questions and commands
        and words[0] == "gradstats"
        and words[1] in READING
        and page != "tutorial.md"
        and "://" not in " ".join(words)  # of nobody; tests of addresses have servers of their own
    }
    assert {words[1] for words in shown} == READING
    for words in sorted(shown):
        done = run(*words[1:])
        assert done.returncode == 0, (words, done.stderr)
        assert done.stdout, words
        assert max(map(len, done.stdout.splitlines()), default=0) <= 80, words


@pytest.mark.parametrize("page", ["compare", "agreement", "bits", "delta"])
def test_their_python_runs_on_the_same_files(folder, monkeypatch, page):
    monkeypatch.chdir(folder)
    text = (ROOT / "docs" / "howto" / f"{page}.md").read_text(encoding="utf-8")
    names = {"gradstats": gradstats}
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, names)
    first = next(name for name in names if name not in ("gradstats", "__builtins__"))
    assert len(names[first])
