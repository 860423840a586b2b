"""The recipes of CONTRIBUTING.md to the letter, from outside the package, which is installed from its wheel."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT
from support.installed import files_of, python

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def recipe(title):
    """Return the code blocks below a heading."""
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


TRAIN = """
import sys
import numpy as np, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import gradstats
from capture import Capture
from gradstats.collectives.plain import broadcast
from gradstats.compressors import make_compressor
from gradstats.hooks import CompressionState, compression_hook
{recipe}
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Linear(50, 40)
ddp = DDP(net)
state = CompressionState(make_compressor("{name}", 0.05), named_parameters=net.named_parameters())
capture = Capture("run.zarr", net)
ddp.register_comm_hook(*capture.wrap(state, compression_hook))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
thresholds, sent = [], torch.zeros(2040)
for step in range(6):
    optimizer.zero_grad()
    x = torch.randn(8, 50, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss = ddp(x).square().mean()
    loss.backward()
    optimizer.step()
    capture.step(loss=loss)
    thresholds.append(state.last.threshold)
    sent += torch.cat([p.grad.flatten() for p in net.parameters()])
capture.close()
dist.barrier()
trace = gradstats.open_trace("run.zarr")
rank = dist.get_rank()
{check}
parameters = torch.cat([p.detach().flatten() for p in net.parameters()])
other = parameters.clone()
broadcast(other, 0, None)  # the script ends soon: torch's leaves `other` to gloo's thread
assert torch.equal(parameters, other)
dist.barrier()
del ddp
dist.destroy_process_group()
"""


def trains(installed, folder, name, code, check):
    (folder / "train.py").write_text(TRAIN.format(recipe=code, name=name, check=check))
    python("train.py", path=[installed], cwd=folder, ranks=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder that has the recorded runs, and not the program."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").symlink_to(ROOT / "data")
    return folder


@pytest.mark.parametrize("thing", ["estimator", "law", "compressor"])
def test_what_a_user_saves_is_one_short_file(thing):
    title = f"Add an {thing}" if thing == "estimator" else f"Add a {thing}"
    assert len(recipe(title)[0].splitlines()) <= 25


def test_an_estimator_is_in_the_tables(installed, place):
    define, use = recipe("Add an estimator")
    printed = python("-c", define + use, path=[installed], cwd=place)
    # the table of the quality, and that of the latency
    assert printed.count("rayleigh") == 2


@pytest.mark.distributed
def test_an_estimator_trains_with_the_thresholds_of_the_tables(installed, tmp_path):
    """Offline = live: on the captured gradients the same object gives the same thresholds."""
    check = """
rule = gradstats.thresholds.make_estimator("rayleigh")
for step in range(6):
    offline = gradstats.threshold(trace.read(step, rank, "corrected"), 0.05, rule)
    assert offline == thresholds[step] > 0, (offline, thresholds[step])
(record, *_) = gradstats.quality(trace, [0.05], ["rayleigh"], kinds=["corrected"])
assert 0 < record["mean"] < 20
"""
    trains(installed, tmp_path, "rayleigh", recipe("Add an estimator")[0], check)


@pytest.mark.distributed
def test_a_compressor_trains(installed, tmp_path):
    check = """
assert state.last.selected == state.last.union == 2040
assert trace.steps(rank) == list(range(6))
assert bool((sent != 0).all())
kept = trace.read(5, rank, "corrected")
assert np.abs(kept).max() > 0  # the residual is added to what half precision sends
from gradstats.network import Network, plan
rows = plan(torch.zeros(2040), Network.of_link(1e-5, 1e-9), 0.01, [2], compressors=["half"])
assert {r["compressor"]: r["bytes"] for r in rows}["half"] == state.last.bytes_sent == 2 * 2040
"""
    (code,) = recipe("Add a compressor")
    assert code == files_of("rule.md")["half.py"]  # two pages have it
    trains(installed, tmp_path, "half", code, check)


def test_a_law_is_in_the_tables_and_figures(installed, place):
    define, use = recipe("Add a law")
    assert define == files_of("law.md")["dlogistic.py"]  # two pages have it
    printed = python("-c", define + use, path=[installed], cwd=place)
    fitted, *table, labels = printed.splitlines()
    assert fitted.startswith("<Fit: model dlogistic, scale 0.0")
    assert sum("dlogistic" in line for line in table) == 1
    assert "'logistic'" in labels


def test_a_table_is_printed(installed, place):
    printed = python("-c", "\n".join(recipe("Add a table")), path=[installed], cwd=place)
    assert "'positive': 0." in printed
    assert "Positive elements" in printed
