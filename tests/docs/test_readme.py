"""The README keeps its promises."""

from __future__ import annotations

import re

import xarray
from conftest import ROOT
from support.programs import program

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language):
    return re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)[1]


def test_it_is_short():
    assert len(README.encode()) <= 6 * 1024


def test_the_training_diff_adds_at_most_ten_lines():
    assert 1 <= sum(line.startswith("+") for line in block("diff").splitlines()) <= 10


def test_the_diff_trains_and_captures(tmp_path):
    """The script of the README, after the diff, with what its omissions stand for."""
    after = "\n".join(line[1:] for line in block("diff").splitlines() if not line.startswith("-"))
    script = f"""
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
model, state, hook = torch.nn.Linear(4, 2), None, allreduce_hook
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()
loader = [(torch.ones(3, 4), torch.tensor([0, 1, 0]))] * 101
{after}
del ddp
dist.destroy_process_group()
"""
    program("-c", script, cwd=tmp_path)
    from gradstats import open_trace

    assert open_trace(tmp_path / "run.zarr").steps() == [0, 100]
    tree = xarray.open_datatree(tmp_path / "run.zarr", engine="zarr", consolidated=False)
    assert tree["rank00000"]["step"].values.tolist() == [0, 100]


def test_the_python_example_prints_what_is_shown():
    assert len(block("python").strip().splitlines()) <= 10
    done = program("-c", block("python"), cwd=ROOT)
    assert done.stdout == block("text")


def test_the_quality_tables_are_what_the_script_prints():
    shown = [
        re.search(r"<!-- quality -->.*?<!-- /quality -->", text, re.DOTALL)[0]
        for text in (README, (ROOT / "docs/concepts/thresholds.md").read_text(encoding="utf-8"))
    ]
    done = program(ROOT / "tools" / "tables.py", path=[ROOT / "benchmarks"])
    assert done.stdout.strip() == "\n".join(shown)


def test_the_commands_shown_exist():
    from support.terminal import run

    shown = "".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    commands = re.findall(r"^gradstats (\w+)", shown, re.MULTILINE)
    assert len(commands) > 2
    for command in commands:
        assert run(command, "--help").returncode == 0, command


def test_every_test_that_a_page_names_exists():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    source = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 40
    assert [name for name in sorted(named) if f"def {name}(" not in source] == []
