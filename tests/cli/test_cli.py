"""The terminal, as a user meets it: in this process, but where the process is what is tested."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA, ROOT
from rich.cells import cell_len
from support.every import every
from support.installed import files_of
from support.networks import measured_network
from support.programs import Program
from support.terminal import records, run
from support.traces import drifting_trace

import gradstats
from gradstats.analysis.verdicts import movement
from gradstats.cli import app
from gradstats.cli.statistics import _note_choices
from gradstats.primitives.sketch import sketch
from gradstats.report.questions import QUESTIONS
from gradstats.statistics.goodness import bootstrap
from gradstats.statistics.pot import choose_threshold
from gradstats.thresholds import ESTIMATORS
from gradstats.trace import Layer, TraceWriter, create_trace

COMMANDS = (
    "info",
    "fit",
    "compressibility",
    "pot",
    "drift",
    "compare",
    "agreement",
    "quality",
    "bench",
    "bench-network",
    "compression",
    "plan",
    "advise",
    "wire",
    "delta",
    "report",
    "plot",
    "capture",
    "workloads",
    "demo",
)
EF = str(DATA / "resnet20-ef.zarr")
GRADSTATS = str(Path(sys.executable).with_name("gradstats"))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


FIELDS = {
    ("info", EF): {"step", "rank", "kind", "numel"},
    ("fit", EF, "--step", "100"): {
        "step", "rank", "kind", "layer", "model", "params", "nll", "aic", "ks", "tail_error",
        "method", "stderr", "bic", "wasserstein", "ad_upper", "log_quantile", "quality", "status",
    },
    ("pot", EF, "--step", "100"): {
        "step", "rank", "kind", "ratio", "threshold", "n", "mean_excess", "c", "c_low", "c_high", "scale", "status",
    },
    ("pot", EF, "--step", "100", "--layers"): {"layer", "n", "c", "c_low", "c_high", "status"},
    ("drift", EF): {
        "quantity", "kind", "layer", "n", "mean", "low", "high", "slope", "slope_low", "acf1", "adf_p", "change_low",
    },
    ("compressibility", EF): {
        "step", "rank", "kind", "p", "p_low", "p_high", "c1", "window", "compressible", "sigma_p",
    },
    ("wire", EF, "--to", "mxfp4"): {
        "format", "rounding", "rotation", "layer", "ranks", "bits", "error", "bias", "cosine", "zeros", "saturated",
    },
    ("quality", EF): {"estimator", "ratio", "kind", "mean", "low", "high", "min", "max", "n"},
}  # fmt: skip


@every(("command", "fields"), FIELDS.items(), ids=lambda v: v[0] if isinstance(v, tuple) else "")
def test_json_records_have_the_fields_of_the_design(command, fields):
    for record in records(*command):
        assert record.keys() >= fields


def test_the_command_of_issue_2():
    found = records(
        "quality", EF, *["--ratio", "0.1", "--ratio", "0.01", "--ratio", "0.001"],
        *["--estimator", "exact", "--estimator", "dgc", "--estimator", "sidco-e"],
    )  # fmt: skip
    assert len(found) == 18
    assert all(r["mean"] == 1 for r in found if r["estimator"] == "exact")
    assert {r["kind"] for r in found} == {"gradient", "corrected"}


def test_layers_steps_kinds_and_windows_can_be_chosen():
    found = records(
        "fit", EF, "--per-layer", "--step", 10, "--kind", "corrected", "--model", "laplace"
    )
    assert len(found) == 60
    assert {r["kind"] for r in found} == {"corrected"}
    assert {r["window"] for r in records("compressibility", EF, "--window", "5:500")} == {"5-500"}
    chosen = ("--layer", "fc.*", "--step", 10, "--kind", "gradient")
    found = records("fit", EF, *chosen, "--model", "laplace")
    assert [r["layer"] for r in found] == ["all", "fc.weight", "fc.bias"]
    found = records("pot", EF, *chosen)
    assert [r["layer"] for r in found] == ["pooled", "normalised", "fc.weight", "fc.bias"]
    kinds = [r["kind"] for r in records("compressibility", EF)]
    assert kinds[-3:] == ["uniform", "halfnorm", "laplace"]
    one = records("quality", EF, "--estimator", "sidco-e", "--ratio", 0.001, "--stages", 1)
    assert one[0]["mean"] > 2


TWICE = {
    "quality": ("--ratio", 0.01, "--estimator", "dgc"),
    "fit": ("--model", "laplace"),
    "drift": ("--quantity", "threshold", "--quantity", "mean", "--model", "laplace", "--ratio", 0.01),
}  # fmt: skip


@every(("command", "asked"), TWICE.items())
def test_what_is_asked_for_twice_is_measured_once(command, asked):
    chosen = (EF, "--kind", "gradient", "--step", 10)
    assert records(command, *chosen, *asked, *asked) == records(command, *chosen, *asked)


WIDE = [
    ("info", DATA),
    ("fit", DATA, "--per-layer", "--step", 10, "--bootstrap", 2, "--size", 100, "--model", "laplace"),
    ("compressibility", DATA),
    ("pot", EF, "--step", 10, "--layers"),
    ("drift", EF, "--per-layer", "--model", "laplace", "--kind", "gradient"),
    ("quality", DATA),
    ("quality", EF, "--per-layer", "--ratio", 0.01, "--step", 10),
    ("quality", EF, "--by-stage", "--step", 10),
    ("bench", "--numel", 1000, "--repeats", 1),
    ("wire", EF, "--per-layer", "--step", 10, "--all", "--to", "mxfp6", "--to", "int4"),
]  # fmt: skip


@every("command", WIDE, ids=lambda c: "-".join(map(str, c[::2])))
def test_tables_fit_80_columns(command):
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "command", [("quality", EF, "--step", 10), ("fit", EF, "--step", 10), ("info", EF)]
)
def test_other_formats_parse(command, tmp_path):
    rows = list(csv.DictReader(run(*command, "--format", "csv").stdout.splitlines()))
    there = records(*command)
    assert len(rows) == len(there)
    assert list(rows[0]) == list(there[0])
    lines = run(*command, "--format", "markdown").stdout.splitlines()
    assert len(lines) == len(there) + 2
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    latex = run(*command, "--format", "latex").stdout
    assert latex.startswith("\\begin{tabular}")
    assert "_" not in latex.replace("\\_", "")
    out = tmp_path / "q.json"
    assert run(*command, "--format", "json", "-o", out).stdout == ""
    assert json.loads(out.read_text()) == there


ERRORS = [
    (("quality", EF, "--estimator", "foo"), "no estimator 'foo'; there are exact"),
    (("quality", EF, "--ratio", 2), "ratio must be in (0, 1]"),
    (("quality", EF, "--stages", 0), "Invalid value for '--stages'"),
    (("quality", EF, "--step", 5), "it holds steps 10, 100, 1000, 2999"),
    (("fit", EF, "--step", 10, "--step", 7), "matches steps 7; there are steps 10, 100"),
    (("fit", EF, "--layer", "x*"), "no layer of resnet20-ef matches x*; it has blocks.0.bn1.bias"),
    (("fit", DATA, "--rank", 0, "--rank", 1), "matches ranks 1; there are steps 10"),
    (("info", DATA / "resnet20-fe.zarr"), "did you mean"),
    (("quality", EF, "--estimator", "sidko-e"), "did you mean sidco-e?"),
    (
        ("quality", EF, "--kind", "correct"),
        "there are gradient, corrected, local, pseudogradient, update, weight; did you mean corrected?",
    ),
    (("quality", EF, "--format", "xml"), "no format 'xml'; there are table"),
    (("quality",), "gradstats quality: Missing argument 'SOURCE'. (gradstats quality --help)"),
    (("quality", EF, "--ratoi", 1), "No such option: --ratoi"),
    (("quality", EF, "--ratio", "a"), "Invalid value for '--ratio'"),
    (("qualty", EF), "No such command 'qualty'. Did you mean 'quality'?"),
    (("quality", DATA / "nothing.zarr"), "data holds resnet20-ef.zarr"),
    (("fit", EF, "--model", "cauchy"), "no model 'cauchy'; there are laplace"),
    (("fit", EF, "--method", "guess"), "no method 'guess'; there are closed"),
    (("fit", EF, "--model", "t", "--method", "pwm"), "t has no method 'pwm'; it has moments, mle"),
    (("pot", EF, "--method", "guess"), "no method 'guess'"),
    (("pot", EF, "--ratio", 0), "ratio must be in (0, 1]"),
    (("drift", EF, "--quantity", "foo"), "no quantity 'foo'; there are zero_fraction"),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--store", "zip"), "no store 'zip'"),
    (("compressibility", EF, "--window", "a"), "two ranks like 1:1000"),
    (("info", ROOT / "pyproject.toml"), "not a trace, nor one of"),
    (("info", EF, "-o", "/nowhere/x"), "cannot write /nowhere/x"),
    (("report", "x.npy", "-o", "/proc/x.html"), "cannot write /proc/x.html"),
    (("fit", EF, "--model", "laplac"), "did you mean laplace?"),
    (("capture", "foo", "--out", "x.zarr"), "no workload 'foo'; there are resnet20-digits"),
    (("capture", "lstm-pydok", "--out", "x.zarr"), "did you mean lstm-pydoc?"),
    (
        ("capture", "lstm-pydoc", "--out", "x.zarr", "--compressor", "marsid"),
        "did you mean marsit?",
    ),
    (("capture", "lstm-ptb", "--out", "x.zarr"), "--data-dir"),
    (
        ("capture", "lstm-ptb", "--out", "x.zarr", "--data-dir", "/tmp"),
        "holds none of ptb.train.txt",
    ),
    (
        ("capture", "lstm-pydoc", "--out", "x.zarr", "--compressor", "zip"),
        "there are none, dense-bf16, dense-fp8, topk",
    ),
    (
        ("capture", "lstm-pydoc", "--out", "x.zarr", "--compressor", "threshold:gaussian"),
        "did you mean threshold:gaussiank?",
    ),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--clip-kind", "both"), "no clip-kind 'both'"),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--nesterov", "torch"), "no nesterov 'torch'"),
    (
        ("capture", "lstm-pydoc", "--out", "x.zarr", "--lr-schedule", "fall"),
        "no lr-schedule 'fall'",
    ),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--momentum", 1), "momentum must be in [0, 1)"),
    (("bench-network", "--warm-up", -1), "warm_up must be at least 0"),
    (("bench-network", "--clip", -1), "clip must be in"),
    (("bench-network", "--weight-decay", -1), "weight_decay must be in"),
    (("capture", "lstm-pydoc", "--out", "x.npy"), "x.npy exists; choose another name"),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--steps", 0), "steps must be at least 1"),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--nproc", 0), "nproc must be at least 1"),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--dtype", "int8"), "no dtype 'int8'"),
]


@every(("command", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_errors_are_one_line_and_exit_2(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.arange(1, 500, dtype=np.float32))
    done = run(*command)
    assert done.returncode == 2
    assert done.stdout == ""
    # on a slow machine the report says that it takes long
    lines = [each for each in done.stderr.strip().splitlines() if " s left" not in each]
    assert len(lines) == 1, done.stderr
    assert message in lines[0]


TABLES = (
    ("info",),
    ("fit",),
    ("compressibility",),
    ("pot",),
    ("pot", "--choose", 59),
    ("pot", "--layers"),
    ("drift",),
    ("quality", "--estimator", "exact", "--estimator", "sidco-e"),
    ("quality", "--by-stage"),
)
NOISE = np.random.default_rng(0).laplace(size=200)
ODD = {
    "nan": np.full(200, np.nan),
    "infinite": np.full(200, -np.inf, np.float32),
    "zero": np.zeros(200, np.float32),
    "zero-and-nan": np.array([0, np.nan] * 100),
    "constant": np.full(200, 0.5, np.float32),
    "one": np.ones(1, np.float32),
    "two": np.array([1, -2], np.float32),
    "half": NOISE.astype(np.float16),
    "matrix": NOISE.reshape(10, 20),
    "scalar": np.float32(2),
    "largest": (1e38 * NOISE / 3).astype(np.float32),
    "smallest": np.full(200, 1e-45, np.float32),
}


@every("name", ODD)
def test_odd_gradients_have_tables(name, tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, ODD[name])
    for command, *options in TABLES:
        done = run(command, path, *options)
        assert done.returncode == 0, done.stderr
        assert "x.npy" in done.stdout or "--by-stage" in options  # some have no stage
        assert max(map(cell_len, done.stdout.splitlines())) <= 80


@every("name", ODD)
def test_odd_gradients_have_the_numbers_that_numpy_has(name, tmp_path):
    path, x = tmp_path / "x.npy", ODD[name]
    np.save(path, x)
    finite = np.abs(x[np.isfinite(x)].astype(float)).reshape(-1)
    a = np.sort(finite[finite > 0])[::-1]
    (info,) = records("info", path)
    assert info["numel"] == x.size
    laplace, gamma, _ = records("fit", path)
    assert laplace["status"] == ("ok" if a.size else "nothing to fit: no finite non-zero element")
    assert laplace["params"].get("scale", 0) == pytest.approx(a.mean() if a.size else 0)
    equal = "all magnitudes are equal" if a.size > 1 else "a shape needs at least two"
    assert gamma["status"].startswith(
        "nothing to fit" if not a.size else equal if np.ptp(a) == 0 else "ok"
    )
    for r in records("quality", path, "--estimator", "exact"):
        k = max(1, round(r["ratio"] * x.size))
        threshold = a[k - 1] if a.size >= k else 0
        kept = np.count_nonzero((np.abs(x) >= threshold) & (x != 0))
        assert (r["k"], r["mean"]) == (k, kept / k)
    decay = records("compressibility", path)[0]
    assert decay["window"] == f"1-{min(50, a.size)}"
    assert decay["reason"].startswith("too few" if a.size < 50 else "beyond the largest 5 %")
    for r in records("pot", path):
        assert r["n"] == (np.count_nonzero(a > r["threshold"]) if a.size else 0)
        assert (r["c"] is None) == (r["status"] != "ok")


@pytest.mark.parametrize(
    ("name", "sound"),
    [
        ("infinite", "200 elements NaN or infinite in the worst step (100.00 %)"),
        ("two", "Yes"),
        ("largest", "Yes"),
        ("smallest", "200 elements of one magnitude"),
    ],
)
def test_odd_gradients_have_a_report(name, sound, tmp_path):
    np.save(tmp_path / "x.npy", ODD[name])
    done = run("report", tmp_path / "x.npy", "-o", tmp_path / "r.html")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    text = (tmp_path / "r.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    answer = text.partition("Is the data sound?")[2].partition("</tr>")[0]
    assert f"<strong>{sound}" in answer
    assert ("class=warn" in answer) == (sound != "Yes")
    for question in QUESTIONS:
        assert f"{question}<" in text


def _object(path):
    np.save(path, np.array([1, None], object), allow_pickle=True)


def _truncated(path):
    np.save(path, NOISE)
    path.write_bytes(path.read_bytes()[:-20])


UNREADABLE = {
    "empty": (lambda path: np.save(path, np.empty(0)), "holds no elements"),
    "int": (lambda path: np.save(path, np.arange(9)), "not int64"),
    "complex": (lambda path: np.save(path, np.ones(9, complex)), "not complex128; give both parts"),
    "object": (_object, "Python objects"),
    "truncated": (_truncated, "cannot read"),
    "nothing": (Path.touch, "cannot read"),
    "text": (lambda path: path.write_text("step,loss\n"), "magic string is not correct"),
    "directory": (Path.mkdir, "is not a gradstats trace"),
}


@every(("make", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_gradient_is_one_line(make, message, tmp_path):
    path = tmp_path / "x.npy"
    make(path)
    for command, *options in (*TABLES, ("report", "-o", tmp_path / "r.html")):
        done = run(command, path, *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert message in done.stderr


def test_a_bootstrap_says_what_it_tested():
    command = ["fit", EF, "--step", 100, "--kind", "gradient", "--bootstrap", 19, "--size", 500]
    values = sketch(gradstats.open_trace(EF).read(100))
    for record in records(*command):
        assert record["subsample"] == 500
        test = bootstrap(values, record["model"], record["method"], size=500, replicates=19)
        assert record["p_value"] == test.p_value >= 0.05
    shown = run(*command).stdout
    assert "p of 19 refitted replicates of 500 elements" in " ".join(shown.split())
    assert max(map(cell_len, shown.splitlines())) <= 80


def test_of_layers_the_smallest_format_is_shown_and_all_where_they_are_asked_for():
    command = ["wire", EF, "--step", 10, "--kind", "gradient", "--to", "mxfp6", "--to", "int4"]
    layers = ["--per-layer", "--layer", "fc.*"]
    brief = run(*command, *layers).stdout
    assert [line.split()[0] for line in brief.splitlines()[-3:]] == ["all", "fc.weight", "fc.bias"]
    assert "int4" not in brief
    for more, times in ((), 1), ((*layers, "--all"), 3):
        shown = run(*command, *more).stdout
        assert len(re.findall(r"^ int4 ", shown, re.MULTILINE)) == times
    assert len(records(*command, *layers)) == 6


def test_a_choice_of_threshold():
    command = ["pot", EF, "--step", 100, "--kind", "gradient", "--choose", 40]
    command += ["--ratio", 0.5, "--ratio", 0.05, "--ratio", 0.001]
    found = records(*command)
    values = sketch(gradstats.open_trace(EF).read(100))
    choice = choose_threshold(values, [0.5, 0.05, 0.001], size=1000, replicates=40, seed=0)
    (chosen,) = (r for r in found if r["chosen"])
    assert chosen["ratio"] == choice.ratio
    for r, candidate in zip(found, choice.candidates, strict=True):
        for name in ("ratio", "p_value", "p_stable"):
            assert r[name] == getattr(candidate, name), name
    n, c, low, high = (getattr(choice.estimate, name) for name in ("n", "c", "c_low", "c_high"))
    assert [chosen[f"unseen_{name}"] for name in ("n", "c", "c_low", "c_high")] == [n, c, low, high]
    assert {r["splits"] for r in found} == {5}
    assert sum(r["chosen_by"] for r in found) <= 5
    assert all(0 < r["p_value"] <= 1 for r in found if r["n"] >= 100)
    done = run(*command)
    shown = done.stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "chosen" in shown
    assert "random splits choose" in done.stderr
    assert f"ξ = {c:.3f} ({low:.3f} to {high:.3f}) by the {n} excesses" in done.stderr
    for option in ("--layers",), ("--layer", "fc*"):
        refused = run(*command, *option)
        assert refused.returncode == 2
        assert "leave out --choose, or --layers and --layer" in refused.stderr
    assert "Too wide" not in shown


def test_the_splits_of_a_choice_are_counted_of_all_of_them(monkeypatch):
    """Also those in which no threshold passed; the median may be none of the ratios."""

    def looked_at(ratio, by, splits, **given):
        labels = {"trace": "run", "kind": "gradient", "step": 3, "rank": 1, "chosen": False}
        return labels | {"ratio": ratio, "chosen_by": by, "splits": splits} | given

    unseen = {"unseen_n": 1234, "unseen_c": 0.25, "unseen_c_low": 0.15, "unseen_c_high": 0.36}
    found = [looked_at(0.5, 0, 9), looked_at(0.1, 4, 9, chosen=True, **unseen)]
    found += [looked_at(0.02, 2, 9), looked_at(0.5, 1, 5, step=7), looked_at(0.1, 0, 5, step=7)]
    found += [looked_at(0.5, 3, 3, kind="update", chosen=True, **unseen)]
    found += [looked_at(0.5, 0, 0, step=9)]  # too few elements: nothing was chosen among
    said = []
    monkeypatch.setattr("gradstats.cli.statistics.note", said.append)
    _note_choices(found)
    shape = "\n  ξ = 0.250 (0.150 to 0.360) by the 1,234 excesses that the choice did not see"
    assert said == [
        "run, gradient, step 3, rank 1: chosen 0.1, the median\n"
        f"  random splits choose 0.1 (4 of 9), 0.02 (2 of 9), none (3 of 9){shape}",
        "run, gradient, step 7, rank 1: chosen none, the median\n"
        "  random splits choose 0.5 (1 of 5), none (4 of 5)",
        "run, update, step 3, rank 1: chosen 0.5, the median\n"
        f"  random splits choose 0.5 (3 of 3){shape}",
    ]


def test_a_plan_says_which_link_it_assumed_and_nothing_of_a_measured_one(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).laplace(size=20_000).astype("f4"))
    measured_network().save(tmp_path / "network.json")
    for where, assumed in (("--link", "1gbit"), True), (("--network", "network.json"), False):
        found = ["plan", "x.npy", *where, "--compute", 0.01, "--workers", 4, "--compressor", "topk"]
        with contextlib.chdir(tmp_path):
            done = run(*found)
        assert done.returncode == 0, done.stderr
        assert ("1gbit was not measured" in done.stderr) is assumed


@pytest.mark.usefixtures("unrendered")
def test_a_report_says_what_a_usual_link_would_make_of_it(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).laplace(size=200_000).astype("f4"))
    page = tmp_path / "r.html"
    cluster = ["--link", "1gbit", "--rtt", "20ms", "--compute", 0.1]
    cluster += ["--workers", 8, "--workers", 64]
    done = run("report", tmp_path / "x.npy", *cluster, "-o", page)
    assert "1gbit was not measured" in done.stderr
    first = page.read_text(encoding="utf-8").partition("Should I compress?")[2][:3000]
    # the first number of workers is in the headline, too
    workers = re.findall(r"(\d+) workers at 1,000 Mbit/s", first)
    assert workers == ["8", "8", "64"]
    assert first.count("x.npy: ") <= 1  # the page names the source, and the sentence does not again
    assert re.search(r"times as fast|don’t compress|don&#x27;t compress", first)
    refused = run("report", tmp_path / "x.npy", "--link", "1gbit", "-o", page)
    assert refused.returncode == 2
    assert "take --workers and --compute" in refused.stderr


def test_models_all_and_methods():
    found = records("fit", EF, "--step", 100, "--model", "all", "--method", "mle")
    assert len({r["model"] for r in found}) == 8
    assert {r["method"] for r in found} == {"mle"}
    default = records("fit", EF, "--step", 100, "--kind", "gradient")
    assert [r["model"] for r in default] == ["laplace", "dgamma", "double_genpareto"]
    assert all(set(r["stderr"]) <= set(r["params"]) for r in default)
    status = run("fit", EF, "--step", 100).stderr
    assert "double_genpareto: shape above 1/4: moment estimate unreliable (1 of the fits)" in status


@pytest.mark.usefixtures("unrendered")
def test_sketches_are_announced(tmp_path):
    from support.traces import heavy_trace

    path = heavy_trace(tmp_path / "s.zarr", "sketches", steps=1)
    for command in ("fit", "compressibility", "quality", "pot"):
        done = run(command, path)
        assert done.returncode == 0, done.stderr
        assert "Sketches (s): sizes are good to half a percent" in done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80
    assert records("info", path)[0]["stored"] == "sketch"
    assert run("report", path, "-o", tmp_path / "r.html").returncode == 0
    assert "Captured as sketches" in (tmp_path / "r.html").read_text()


def test_version():
    assert run("--version").stdout == "gradstats 0.1.0\n"


def test_every_command_has_help_and_is_in_the_overview():
    overview = (ROOT / "docs" / "index.md").read_text()
    for command in COMMANDS:
        done = run(command, "--help")
        assert done.returncode == 0
        assert len(done.stdout) > 200
        assert max(map(cell_len, done.stdout.splitlines())) <= 80
        assert f"gradstats {command}" in overview
    listed = run("--help").stdout
    assert all(command in listed for command in COMMANDS)


def test_a_closed_pipe_is_no_error():
    command = f"{GRADSTATS} info {EF} --format csv | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("trace,")
    assert "Traceback" not in done.stderr


@pytest.fixture
def gradient_file(tmp_path):
    x = np.random.default_rng(0).laplace(size=100_000).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    return tmp_path / "x.npy"


def test_a_terminal_gets_colour_and_progress_with_time_left(gradient_file):
    shown = run("quality", gradient_file, terminal=True)
    assert shown.returncode == 0
    for part in ("quality", "1/1", "left:", "0:00:00"):
        assert part in shown.stderr
    assert "\x1b[1m" in shown.stdout
    piped = run("quality", gradient_file)
    assert (piped.stderr, "\x1b" in piped.stdout) == ("", False)


@pytest.mark.parametrize("where", ["before", "after", "environment"])
def test_no_color(gradient_file, where, monkeypatch):
    command = ["quality", gradient_file, "--estimator", "exact"]
    if where == "environment":
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        command.insert(0 if where == "before" else 3, "--no-color")
    assert "\x1b" not in run(*command, terminal=True).stdout


def test_quiet_keeps_results_and_errors():
    command = ["fit", EF, "--step", 100]
    loud, quiet = run(*command, terminal=True), run("--quiet", *command, terminal=True)
    assert "of the fits" in loud.stderr
    assert quiet.stderr == ""
    assert quiet.stdout == loud.stdout
    assert "no model 'x'" in run("-q", "fit", EF, "--model", "x").stderr
    # behind -- it is a name
    assert "no such trace: -q" in run("info", "--", "-q").stderr


def test_what_drift_says_names_the_trace_where_there_are_several(tmp_path):
    for name in ("a", "b"):
        drifting_trace(tmp_path / f"{name}.zarr", range(3), lambda step: 1 + step)
    several = run("drift", tmp_path, "--quantity", "mean").stdout
    assert "a, gradient: " in several
    assert "b, gradient: " in several
    assert "a, gradient: " not in run("drift", tmp_path / "a.zarr", "--quantity", "mean").stdout


def test_what_drift_says_is_of_the_first_quantity_of_each_kind(tmp_path):
    """In the order of the table, whatever rows come after: other quantities, ratios and layers."""
    path = tmp_path / "run.zarr"
    drifting_trace(path, range(3), lambda step: 1 + step)
    for quantities, first in (
        (["mean", "threshold"], "mean"),
        (["threshold", "mean"], "threshold 0.1"),
    ):
        rows = gradstats.drift(path, quantities, ratios=[0.1, 0.01], per_layer=True)
        whole = {(r["kind"], r["quantity"]): r for r in rows if r["layer"] == "all"}
        asked = [word for name in quantities for word in ("--quantity", name)]
        done = run("drift", path, *asked, "--ratio", 0.1, "--ratio", 0.01, "--per-layer")
        said = done.stdout.partition("Drift over")[0].split()
        kinds = dict.fromkeys(r["kind"] for r in rows)
        assert " ".join(said) == " ".join(f"{k}: {movement(whole[k, first])}" for k in kinds)


def test_verdicts_of_controls_are_not_counted(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(0).laplace(size=200).astype(np.float32))
    said = run("compressibility", path, "--all").stderr
    assert "compressible –, 1 of 1: beyond the largest 5 %" in said


def test_a_layer_of_zeros_does_not_make_steps_few(tmp_path):
    """Of a frozen layer, which has no mean, as many steps were captured as of all others."""
    path = tmp_path / "run.zarr"
    create_trace(path, [Layer("frozen", 0, (10,)), Layer("learns", 10, (90,))])
    rng, writer = np.random.default_rng(0), TraceWriter(path, 0)
    for step in range(25):
        gradient = np.append(np.zeros(10), rng.laplace(size=90)).astype(np.float32)
        writer.append(step, {"gradient": gradient})
    writer.close()
    take = "Trend, autocorrelation and change take 20 steps, and"
    asked = ("drift", path, "--quantity", "mean", "--per-layer")
    assert f"{take} 1 of 3 rows has fewer with such a number." in run(*asked).stderr
    few = run(*asked, *(a for step in range(5) for a in ("--step", step))).stderr
    assert f"{take} here are 5: capture sketches of every step" in few


def test_steps_that_a_rank_lacks_are_said(tmp_path):
    create_trace(path := tmp_path / "run.zarr", [Layer("a", 0, (100,))], world_size=2)
    rng = np.random.default_rng(0)
    for rank, steps in enumerate((25, 24)):
        writer = TraceWriter(path, rank)
        for step in range(steps):
            writer.append(step, {"gradient": rng.laplace(size=100).astype(np.float32)})
        writer.close()
    said = "step is left out, as a rank lacks it or has no such number there: name ranks that hold"
    figure = ("plot", "drift", path, "-o", tmp_path / "x.png")
    for asked in (("drift", path, "--quantity", "mean"), figure):
        assert f"1 {said}" in run(*asked).stderr
        assert said not in run(*asked, "--rank", "0").stderr
    assert "Left out: 1 of 25 steps, which not all ranks have." in " ".join(
        run("drift", path, "--quantity", "mean").stdout.split()
    )


def test_what_is_a_difference_is_not_called_a_quotient(tmp_path):
    """A share of zeros that is 0 at some steps is followed as it is: its change is a difference."""
    path = tmp_path / "run.zarr"
    create_trace(path, [Layer("a", 0, (100,))])
    rng, writer = np.random.default_rng(0), TraceWriter(path, 0)
    for step in range(25):
        gradient = rng.laplace(size=100) * (rng.random(100) >= 0.1 * (step % 3))
        writer.append(step, {"gradient": gradient.astype(np.float32)})
    writer.close()
    asked = ("drift", path, "--quantity", "zero_fraction")
    (row,) = records(*asked)
    assert (row["relative"], row["change_low"] < 0) == (False, True)
    table = " ".join(run(*asked).stdout.split())
    assert "change ÷" not in table
    assert "change: a step's value ÷ the last one's, of others minus it" in table


COMPLETIONS = [
    ("quality x.zarr --estimator sid", ["sidco-e", "sidco-gp", "sidco-p"]),
    ("quality x.zarr --kind c", ["corrected"]),
    ("fit x.zarr --model d", ["dgamma", "double_genpareto", "dweibull"]),
    ("fit x.zarr --method m", ["moments", "mle"]),
    ("drift x.zarr --quantity thr", ["threshold"]),
    ("info x.zarr --format l", ["latex"]),
    ("capture lstm-p", ["lstm-pydoc", "lstm-ptb"]),
    ("capture lstm-ptb --compressor mar", ["marsit"]),
    ("comp", ["compressibility", "compare", "compression"]),
]


@every(("words", "expected"), COMPLETIONS, ids=[w for w, _ in COMPLETIONS])
def test_completion(words, expected, monkeypatch):
    monkeypatch.setenv("_GRADSTATS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"gradstats {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    assert run().stdout.split() == expected


def test_an_interrupt_is_one_line(monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradstats.report.write_report", interrupted)
    done = run("report", EF, "-o", tmp_path / "r.html")
    assert (done.returncode, done.stderr) == (130, "gradstats: interrupted\n")


LATE = """
import os, signal, sys, typer
from gradstats import cli, report

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.{late}):
        kill(pid, number)

def stopped(*_, **__):
    signal.signal(signal.SIGTERM, lambda *_: None)
    raise {ends}

sys.late, report.write_report = Late(), stopped  # what sys holds goes when Python has taken its handlers back
cli.main()
"""


@pytest.mark.parametrize("late", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("ends", ["KeyboardInterrupt", "typer.Exit(143)"])
def test_a_signal_while_python_ends_changes_nothing(tmp_path, ends, late):
    script = LATE.format(ends=ends, late=late)
    command = [sys.executable, "-c", script, "report", EF, "-o", tmp_path / "r.html"]
    done = subprocess.run(command, capture_output=True, text=True)
    code, said = (143, "terminated") if "143" in ends else (130, "interrupted")
    assert (done.returncode, done.stderr) == (code, f"gradstats: {said}\n")


@pytest.mark.slow
@pytest.mark.distributed
def test_ctrl_c_ends_every_process_of_a_capture(tmp_path):
    out = tmp_path / "x.zarr"
    command = ["-m", "gradstats", "--quiet", "capture", "resnet20-digits", "--out", out]
    with Program(tmp_path, *command, "--steps", "100000", "--every", "1") as process:
        while process.poll() is None and not list(out.glob("rank*/step/c/*")):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        code = process.wait()
    *before, last = process.stderr.splitlines()
    assert (code, last) == (130, "gradstats: interrupted")
    # 100,000 steps may be more than the disk holds, which is said at once
    assert all("CaptureWarning: the disk of " in line or line[0] == " " for line in before)
    end = time.monotonic() + 60
    while members(process.pid) and time.monotonic() < end:  # the resource tracker goes last
        time.sleep(0.1)
    assert members(process.pid) == []


def members(session):
    """Return the processes of a session that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found.append(stat.parent.name)
    return found


def test_report_is_one_self_contained_page(gradient_file, tmp_path):
    page = tmp_path / "deep" / "report.html"
    done = run("report", gradient_file, "-o", page, terminal=True)
    assert done.returncode == 0, done.stderr
    assert "report" in done.stderr
    assert f"wrote {page}" in " ".join(done.stderr.split())  # wrapped in a terminal
    assert done.stdout == ""
    text = page.read_text()
    assert page.stat().st_size < 5_000_000
    assert text.count("<img ") == text.count('alt="') >= 3
    assert 'src="data:image/png;base64,' in text
    assert "http://" not in text
    assert "https://" not in text
    for name in ("x.npy", "sidco-e"):
        assert name in text


def test_output_replaces_a_file_at_once(tmp_path, monkeypatch):
    """An interrupted command leaves the old file; a pipe is written as it is."""
    output = tmp_path / "table.csv"
    output.write_text("old")
    full = OSError(28, "No space left on device")

    def fails(self, data):
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", fails)
        done = run("info", EF, "--format", "csv", "-o", output)
    assert done.returncode == 2
    assert output.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]
    assert run("info", EF, "--format", "csv", "-o", output).returncode == 0
    assert output.read_text().startswith("trace,")
    assert run("info", EF, "-o", "/dev/null").returncode == 0


def test_a_file_is_loaded_wherever_it_is_named(tmp_path, forgotten):
    for page in ("law.md", "rule.md"):
        for name, code in files_of(page).items():
            (tmp_path / name).write_text(code, encoding="utf-8")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).logistic(size=2000))
    rule, law, x = (str(tmp_path / name) for name in ("rayleigh.py", "dlogistic.py", "x.npy"))
    command = ["quality", x, "--estimator", "rayleigh", "--ratio", "0.1", "--format", "json"]
    assert "no estimator 'rayleigh'" in run(*command).stderr
    for line in (["--load", rule, *command], [*command, f"--load={rule}"]):
        (record,) = json.loads(run(*line).stdout)
        assert record["estimator"] == "rayleigh"
        ESTIMATORS.pop("rayleigh")
    done = run("fit", "--load", law, x, "--load", rule, "--model", "dlogistic", "--quiet")
    assert "dlogistic" in done.stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["info", "x.npy", "--load", "nowhere.py"], "gradstats: cannot load nowhere.py: No such"),
        (["info", "x.npy", "--load"], "gradstats: --load takes a file: --load FILE.py"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(line, said):
    done = run(*line)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("forgotten")
def test_a_loaded_file_may_bring_a_command(tmp_path):
    file = tmp_path / "greeting.py"
    file.write_text(
        "from gradstats.cli import app\n\n@app.command()\ndef greet() -> None:\n    print('hello')\n"
    )
    commands = list(app.registered_commands)
    try:
        assert run("greet", "--load", file).stdout == "hello\n"
    finally:
        app.registered_commands[:] = commands
