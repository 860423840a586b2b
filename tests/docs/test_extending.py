"""Laws, rules and compressors of one's own: the how-to pages and CONTRIBUTING.md to the letter, with the wheel."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise

import numpy as np
import pytest
from conftest import ROOT
from support.installed import blocks, files_of, install, python
from support.traces import LAYERS, write

from gradstats.network import Network
from gradstats.trace import create_trace

FILES = files_of("law.md") | files_of("rule.md")
NAMES = ("dlogistic", "rayleigh", "half")
COMMANDS = [
    shlex.split(line)
    for page in ("law.md", "rule.md")
    for block in blocks(page, "sh")
    for line in block.splitlines()
]


def test_each_is_one_short_file():
    assert [*FILES] == [f"{name}.py" for name in NAMES]
    assert max(len(code.splitlines()) for code in FILES.values()) <= 25


def inputs(folder):
    """Write what the pages' commands read: a run of two ranks, and a network."""
    create_trace(folder / "run.zarr", LAYERS, world_size=2)
    for rank in (0, 1):
        write(folder / "run.zarr", range(2), rank=rank, kinds=("corrected",))
    Network.of_link(5e-5, 0.8e-9, {"select:rayleigh": 1e-9}).save(folder / "network.json")


@pytest.fixture(scope="module")
def followed(installed, tmp_path_factory):
    """A folder in which every command of the pages has been run, as it stands there, and what each said."""
    folder = tmp_path_factory.mktemp("followed")
    inputs(folder)
    for name, code in FILES.items():
        (folder / name).write_text(code, encoding="utf-8")
    said = {}
    for words in COMMANDS:
        text = python("-m", *words, path=[installed], cwd=folder)
        if words[1] == "report":
            text = (folder / "report.html").read_text(encoding="utf-8")
        for option, file in pairwise(words):
            if option == "--load":
                said[words[1], file] = text
    return folder, said


@pytest.mark.slow
@pytest.mark.distributed
class TestLoaded:
    def test_every_command_of_the_pages_shows_it(self, followed):
        _, said = followed
        assert {file for command, file in said if command == "report"} == {
            "dlogistic.py",
            "rayleigh.py",
        }
        assert {name for name, _ in said} >= {
            "fit",
            "quality",
            "bench",
            "plan",
            "report",
            "capture",
        }
        for (command, file), text in said.items():
            name = file.removesuffix(".py")
            if command == "report":
                assert re.search(rf"<td[^>]*>{name}</td>", text), name
            elif command != "capture":
                assert name in text, command

    def test_they_are_in_every_table_by_default(self, installed, followed):
        folder, _ = followed
        printed = python("-c", TABLES, path=[installed], cwd=folder)
        place, *tables = printed.splitlines()
        assert place.startswith(str(installed))
        fit, drift, quality, bench, plan = map(json.loads, tables)
        assert "dlogistic" in {r["model"] for r in fit}
        assert any("dlogistic" in r["quantity"] for r in drift)
        assert "rayleigh" in {r["estimator"] for r in quality}
        assert "rayleigh" in {r["compressor"] for r in bench}
        by_name = {r["compressor"]: r for r in plan}
        assert by_name["rayleigh"]["basis"] == "trace"  # k̂/k of this trace
        assert by_name["half"]["bytes"] == 2 * 620

    def test_they_are_in_every_figure_of_their_kind(self, installed, followed):
        folder, _ = followed
        shown = python("-c", FIGURES, path=[installed, folder], cwd=folder)
        figures = json.loads(shown.splitlines()[-1])
        # a compressor that sends all elements selects none
        of_laws, of_rules = ("density", "tail", "qq", "drift"), ("quality", "latency", "build_up")
        for figure, texts in figures.items():
            rules = ["rayleigh"] if figure.startswith(of_rules) else ["half", "rayleigh"]
            for name in ["logistic"] if figure in of_laws else rules:
                assert any(name in text for text in texts), (figure, name, texts)

    def test_offline_is_live(self, installed, followed):
        """On the captured gradients the rule finds the thresholds of the training; a plan says the bytes sent."""
        folder, _ = followed
        python("-c", LIVE, path=[installed, folder], cwd=folder)


TABLES = """
import contextlib
import gradstats
from gradstats.cli import main

print(gradstats.__file__)
loads = "--load dlogistic.py --load rayleigh.py --load=half.py"
for command in (
    "fit run.zarr",
    "drift run.zarr --quantity ks",
    "quality run.zarr",
    "bench --numel 1000 --repeats 1 --ratio 0.1",
    "plan run.zarr --network network.json --workers 4 --compute 0.05",
):
    with contextlib.suppress(SystemExit):
        main(["--quiet", *f"{command} {loads} --format json -o table.json".split()])
    print(open("table.json").read().replace("\\n", " "))
"""

FIGURES = """
import json
import matplotlib
matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.text import Text
import dlogistic, half, rayleigh
import gradstats
from gradstats import plots
from gradstats.thresholds.bench import bench

trace = gradstats.open_trace("rayleigh.zarr")
gradient = trace.read(trace.steps(0)[-1], 0, "corrected")
fits = gradstats.fit_all(gradient)
training = gradstats.over_training(trace, kinds=["corrected"], ranks=[0])
rows = gradstats.plan("run.zarr", "network.json", 0.05, [2, 4, 8], compressors=["half", "rayleigh"])
live = [
    {**row, "compressor": name, "nproc": 2, "seed": 0, "compute": 0.1, "matching_rate": 0.5, "loss": 1.0}
    for name in ("half", "rayleigh")
    for row in gradstats.compression(f"{name}.zarr")
]
drawn = {
    "density": (gradient, fits),
    "tail": (gradient, fits),
    "qq": (gradient, fits),
    "drift": (training.sel(layer="all", kind="corrected", rank=0), "ks"),
    "quality_bars": (gradstats.quality("run.zarr", [0.1], kinds=["corrected"]),),
    "quality_over_steps": (gradstats.quality_series("run.zarr", [0.1], kinds=["corrected"], ranks=[0]),),
    "latency_bars": (bench([1000], [0.1], repeats=1),),
    "speedup": (rows,),
    "build_up": (live,),
    "time_split": (live,),
    "training_curves": (live,),
    "matching_rate": (live,),
}
texts = {}
for figure, arguments in drawn.items():
    canvas, ax = pyplot.subplots()
    getattr(plots, figure)(*arguments, ax, **({"at": "workers"} if figure == "speedup" else {}))
    texts[figure] = [text.get_text() for text in canvas.findobj(Text)]
print(json.dumps(texts))
"""

LIVE = """
import half, rayleigh
import gradstats, numpy as np
from gradstats.thresholds import make_estimator
trace = gradstats.open_trace("rayleigh.zarr")
for rank in trace.ranks:
    rule = make_estimator("rayleigh")
    live = dict(zip(trace.scalars(rank)["step"].tolist(), trace.scalars(rank)["threshold"].tolist()))
    for step in trace.steps(rank):
        offline = gradstats.threshold(trace.read(step, rank, "corrected"), 0.001, rule)
        assert offline == live[step] > 0, (step, offline, live[step])
sent = {r["bytes"] for r in gradstats.compression(gradstats.open_trace("half.zarr"))}
rows = gradstats.plan("half.zarr", "network.json", 0.05, [2], compressors=["half"])
assert {r["bytes"] for r in rows if r["compressor"] == "half"} == sent, sent
"""


@pytest.mark.slow
def test_a_package_brings_them_to_every_program(installed, tmp_path):
    (package,) = blocks("rule.md", "toml")
    (law,) = blocks("law.md", "toml")
    source, brought = tmp_path / "source", tmp_path / "brought"
    source.mkdir()
    for name, code in FILES.items():
        (source / name).write_text(code, encoding="utf-8")
    text = package.replace('"half.py"]', '"half.py", "dlogistic.py"]') + law
    (source / "pyproject.toml").write_text(text, encoding="utf-8")
    install(source, brought)
    inputs(tmp_path)
    x = np.random.default_rng(0).logistic(size=20_000).astype(np.float32)
    np.save(tmp_path / "run.npy", x)

    def program(*words):
        return python("-m", "gradstats", *words, path=[installed, brought], cwd=tmp_path)

    assert re.search(
        r"^ +all +dlogistic +\w+ +scale=0\.99", program("fit", "run.npy"), re.MULTILINE
    )
    assert "lognorm, dlogistic or all" in " ".join(re.findall(r"[\w,]+", program("fit", "--help")))
    plan = ["plan", "run.npy", "--network", "network.json", "--workers", "4", "--compute", "1"]
    planned = program(*plan)
    assert "rayleigh" in planned
    assert "half" in planned
    program("report", "run.npy", "-o", "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "logistic: thresholds within " in html  # the closest
    for name in ("dlogistic", "rayleigh"):
        assert re.search(rf"<td [^>]*>{name}</td>", html)
    training = ["resnet20-digits", "--steps", "2", "--compressor", "half", "--out", "half.zarr"]
    program("capture", *training)


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
