"""The recipes of CONTRIBUTING.md, followed to the letter from outside the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from conftest import ROOT

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


def trains(folder, name, code, check):
    (folder / "train.py").write_text(TRAIN.format(recipe=code, name=name, check=check))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        [sys.executable, *launch], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_estimator_is_in_the_tables(tmp_path):
    define, use = recipe("Add an estimator")
    done = subprocess.run(
        [sys.executable, "-c", define + use], capture_output=True, text=True, check=True, cwd=ROOT
    )
    # the table of the quality, and that of the latency
    assert done.stdout.count("rayleigh") == 2


@pytest.mark.distributed
def test_an_estimator_trains_with_the_thresholds_of_the_tables(tmp_path):
    """Offline = live: on the captured gradients the same object gives the same thresholds."""
    check = """
rule = gradstats.thresholds.make_estimator("rayleigh")
for step in range(6):
    offline = gradstats.threshold(trace.read(step, rank, "corrected"), 0.05, rule)
    assert offline == thresholds[step] > 0, (offline, thresholds[step])
(record, *_) = gradstats.quality(trace, [0.05], ["rayleigh"], kinds=["corrected"])
assert 0 < record["mean"] < 20
"""
    trains(tmp_path, "rayleigh", recipe("Add an estimator")[0], check)


@pytest.mark.distributed
def test_a_compressor_trains(tmp_path):
    check = """
assert state.last.selected == state.last.union == state.last.target == 102
assert trace.steps(rank) == list(range(6))
assert int((sent != 0).sum()) > 500  # six blocks of 102
again = CompressionState(make_compressor("block", 0.05), named_parameters=net.named_parameters())
again.load_state_dict(state.state_dict())
assert again.compressor.state_dict() == {"step": 6}
from gradstats.network import Network, plan
rows = plan(torch.zeros(2040), Network.of_link(1e-5, 1e-9), 0.01, [2], [0.05], ["block"])
assert {r["compressor"]: r["bytes"] for r in rows}["block"] == state.last.bytes_sent
"""
    (code,) = recipe("Add a compressor")
    trains(tmp_path, "block", code, check)


def law_file():
    """Return the recipe of a law, which two pages have."""
    page = (ROOT / "docs" / "howto" / "law.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert code == recipe("Add a law")[0]
    assert len(code.splitlines()) <= 25
    return page, code


def test_a_law_is_in_the_tables_and_figures():
    _, code = law_file()
    use = recipe("Add a law")[1]
    done = subprocess.run(
        [sys.executable, "-c", code + use], capture_output=True, text=True, check=True, cwd=ROOT
    )
    fitted, *table, labels = done.stdout.splitlines()
    assert fitted.startswith("<Fit: model dlogistic, scale 0.0")
    assert sum("dlogistic" in line for line in table) == 1
    assert "'logistic'" in labels


def test_an_installed_law_is_in_the_terminal_and_the_report(tmp_path):
    page, code = law_file()
    ((block,), (commands,)) = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("toml", "sh")
    )
    (tmp_path / "dlogistic.py").write_text(code, encoding="utf-8")
    metadata = tmp_path / "dlogistic-1.0.dist-info"  # what installing a package leaves
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dlogistic\nVersion: 1.0\n")
    points = tomllib.loads(block)["project"]["entry-points"]["gradstats.laws"]
    lines = "".join(f"{name} = {place}\n" for name, place in points.items())
    (metadata / "entry_points.txt").write_text(f"[gradstats.laws]\n{lines}")
    x = np.random.default_rng(0).logistic(size=20_000).astype(np.float32)
    np.save(tmp_path / "run.npy", x)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(ROOT)])

    def run(*arguments):
        command = [sys.executable, "-m", "gradstats", *arguments]
        settings = os.environ | {"PYTHONPATH": path, "COLUMNS": "120"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=settings
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    default, _ = (
        run(*line.replace("run.zarr", "run.npy").split()[1:]) for line in commands.splitlines()
    )
    named = run("fit", "run.npy", "--model", "dlogistic", "--all")
    assert re.search(r"^ +all +dlogistic +scale=0\.99", default, re.MULTILINE)  # the closest
    assert "dlogistic" in named
    assert "laplace" not in named
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (
        "leaves logistic." in html
    )  # the answer: of the laws tested, the only one that is not rejected
    assert re.search(r"<td [^>]*>dlogistic</td>", html)  # the table of the fits
    assert "lognorm, dlogistic or all" in " ".join(re.findall(r"[\w,]+", run("fit", "--help")))


def test_a_table_is_printed():
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(recipe("Add a table"))],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "'positive': 0." in done.stdout
    assert "Positive elements" in done.stdout
