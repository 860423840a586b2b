"""The README keeps its promises."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_training_diff_adds_at_most_ten_lines():
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL).group(1)
    assert 1 <= sum(line.startswith("+") for line in diff.splitlines()) <= 10


def test_the_diff_trains_and_captures(tmp_path):
    """The script of the README, after the diff, with what its omissions stand for."""
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL).group(1)
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
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
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    from gradstats import open_trace

    assert open_trace(tmp_path / "run.zarr").steps() == [0, 100]


def test_the_python_examples_run():
    code = re.search(r"In Python:\n\n```python\n(.*?)```", README, re.DOTALL).group(1)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_quality_table_is_what_the_script_prints():
    shown = re.search(r"<!-- quality -->\n(.*?)\n<!-- /quality -->", README, re.DOTALL).group(1)
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "tables.py"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == shown


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
