"""A law, a rule and a compressor of one's own: the how-to pages to the letter, with the program from its wheel."""

from __future__ import annotations

import json
import re
import shlex

import numpy as np
import pytest
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
        said[words[1], words[-1]] = text
    return folder, said


@pytest.mark.slow
@pytest.mark.distributed
class TestLoaded:
    def test_every_command_of_the_pages_shows_it(self, followed):
        _, said = followed
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
        of_laws, of_rules = ("density", "tail", "qq", "drift"), ("quality", "latency")
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
