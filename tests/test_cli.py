"""The terminal, as a user meets it."""

from __future__ import annotations

import csv
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA, ROOT

from gradstats.tables import render

COMMANDS = (
    "info",
    "fit",
    "compressibility",
    "pot",
    "drift",
    "quality",
    "bench",
    "report",
    "capture",
    "demo",
)
EF = str(DATA / "resnet20-ef.zarr")
GRADSTATS = str(Path(sys.executable).with_name("gradstats"))


def run(*args, **options):
    return subprocess.run(
        [GRADSTATS, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def records(*args):
    done = run(*args, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    ("quality", EF): {"estimator", "ratio", "kind", "mean", "low", "high", "min", "max", "n"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "fields"), FIELDS.items(), ids=lambda v: v[0] if isinstance(v, tuple) else ""
)
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
    kinds = [r["kind"] for r in records("compressibility", EF)]
    assert kinds[-3:] == ["uniform", "halfnorm", "laplace"]
    one = records("quality", EF, "--estimator", "sidco-e", "--ratio", 0.001, "--stages", 1)
    assert one[0]["mean"] > 2


def test_tables_fit_80_columns_and_other_formats_parse(tmp_path):
    for command in [
        ("quality", DATA),
        ("fit", DATA, "--step", 10),
        ("compressibility", DATA),
        ("info", EF),
    ]:
        done = run(*command)
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80
        rows = list(csv.DictReader(run(*command, "--format", "csv").stdout.splitlines()))
        assert len(rows) == len(records(*command))
        lines = run(*command, "--format", "markdown").stdout.splitlines()
        assert all(line.count("|") == lines[0].count("|") for line in lines)
        latex = run(*command, "--format", "latex").stdout
        assert latex.startswith("\\begin{tabular}")
        assert "_" not in latex.replace("\\_", "")
    out = tmp_path / "q.json"
    assert run("quality", EF, "--format", "json", "-o", out).stdout == ""
    assert json.loads(out.read_text()) == records("quality", EF)


ERRORS = [
    (("quality", EF, "--estimator", "foo"), "no estimator 'foo'; there are exact"),
    (("quality", EF, "--ratio", 2), "ratio must be in (0, 1]"),
    (("quality", EF, "--step", 5), "it holds steps 10, 100, 1000, 2999"),
    (("quality", EF, "--format", "xml"), "no format 'xml'; there are table"),
    (("quality", DATA / "nothing.zarr"), "data holds resnet20-ef.zarr"),
    (("fit", EF, "--model", "cauchy"), "no model 'cauchy'; there are laplace"),
    (("fit", EF, "--method", "guess"), "no method 'guess'; there is closed"),
    (("fit", EF, "--model", "t", "--method", "pwm"), "t has no method 'pwm'; it has moments, mle"),
    (("fit", EF, "--scheduler", "tcp://127.0.0.1:1"), "no dask scheduler at tcp://127.0.0.1:1"),
    (("pot", EF, "--method", "guess"), "no method 'guess'"),
    (("pot", EF, "--ratio", 0), "ratio must be in (0, 1]"),
    (("drift", EF, "--quantity", "foo"), "no quantity 'foo'; there are zero_fraction"),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--store", "zip"), "no store 'zip'"),
    (("compressibility", EF, "--window", "a"), "two ranks like 1:1000"),
    (("info", ROOT / "pyproject.toml"), "not a trace, nor one of"),
    (("info", EF, "-o", "/nowhere/x"), "cannot write /nowhere/x"),
    (("report", EF, "-o", "/proc/x.html"), "cannot write /proc/x.html"),
    (("capture", "foo", "--out", "x.zarr"), "no workload 'foo'; there are resnet20-digits"),
    (("capture", "lstm-ptb", "--out", "x.zarr"), "--data-dir"),
    (
        ("capture", "lstm-ptb", "--out", "x.zarr", "--data-dir", "/tmp"),
        "holds none of ptb.train.txt",
    ),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--compressor", "zip"), "there are none, topk"),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--steps", 0), "steps must be at least 1"),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--nproc", 0), "nproc must be at least 1"),
    (("capture", "lstm-pydoc", "--out", "x.zarr", "--dtype", "int8"), "no dtype 'int8'"),
]


@pytest.mark.parametrize(("command", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_errors_are_one_line_and_exit_2(command, message, tmp_path):
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert message in lines[0]


def test_a_bootstrap_says_what_it_tested():
    command = ["fit", EF, "--step", 100, "--kind", "gradient", "--bootstrap", 19, "--size", 500]
    for record in records(*command):
        assert record["subsample"] == 500
        assert 0.05 <= record["p_value"] <= 1
    shown = run(*command).stdout
    assert "p of 19 refitted replicates of 500 elements" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


def test_a_choice_of_threshold():
    command = ["pot", EF, "--step", 100, "--kind", "gradient", "--choose", 59]
    found = records(*command)
    assert sum(r["chosen"] for r in found) <= 1
    assert all(0 < r["p_value"] <= 1 for r in found if r["n"] >= 100)


def test_models_all_and_methods():
    found = records("fit", EF, "--step", 100, "--model", "all", "--method", "mle")
    assert len({r["model"] for r in found}) == 8
    assert {r["method"] for r in found} == {"mle"}
    default = records("fit", EF, "--step", 100, "--kind", "gradient")
    assert [r["model"] for r in default] == ["laplace", "dgamma", "double_genpareto"]
    assert all(set(r["stderr"]) <= set(r["params"]) for r in default)
    status = run("fit", EF, "--step", 100).stderr
    assert "double_genpareto: shape above 1/4: moment estimate unreliable (1 of the fits)" in status


def test_sketches_are_announced(tmp_path):
    from test_reduction import make_trace

    path = make_trace(tmp_path / "s.zarr", "sketches", steps=2)
    for command in ("fit", "compressibility", "quality", "pot"):
        done = run(command, path)
        assert done.returncode == 0, done.stderr
        assert "Sketches (s): sizes are good to half a percent" in done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80
    assert records("info", path)[0]["stored"] == "sketch"
    assert run("report", path, "-o", tmp_path / "r.html").returncode == 0
    assert "Captured as sketches" in (tmp_path / "r.html").read_text()


def test_usage_errors_exit_2_too():
    assert run("quality").returncode == 2
    assert run("nonsense").returncode == 2
    assert run("--version").stdout == "gradstats 0.1.0\n"


def test_every_command_has_help_and_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        done = run(command, "--help", env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"})
        assert done.returncode == 0
        assert len(done.stdout) > 200
        assert f"gradstats {command}" in readme
    listed = run("--help").stdout
    assert all(command in listed for command in COMMANDS)


def test_a_closed_pipe_is_no_error():
    command = f"{GRADSTATS} info {EF} --format csv | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("trace,")
    assert "Traceback" not in done.stderr


def test_a_terminal_gets_a_progress_bar(tmp_path):
    x = np.random.default_rng(0).laplace(size=100_000).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [GRADSTATS, "quality", tmp_path / "x.npy"], stderr=follower, stdout=subprocess.PIPE
    )
    os.close(follower)
    shown = b""
    while True:  # a terminal holds 4 kB: whoever does not read, stops the program
        try:
            part = os.read(leader, 4096)
        except OSError:  # how a terminal says that its last user has gone
            break
        if not part:
            break
        shown += part
    os.close(leader)
    table, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "quality" in shown.decode()
    assert "1/1" in shown.decode()
    assert b"sidco-e" in table


def test_rendering_of_numbers_and_nothing():
    row = {
        "a": 0.123456,
        "b": float("nan"),
        "c": True,
        "d": {"x": 1.5, "loc": 0},
        "e": 1e-7,
        "f": None,
    }
    assert json.loads(render([row], "json"))[0]["b"] is None
    assert (
        render([row], "markdown").splitlines()[-1] == "| 0.123 | – | yes | x=1.50 | 1.0e-07 | – |"
    )
    assert render([], "json") == "[]"
    assert render([], "csv") == ""
    for format in ("table", "markdown", "latex"):
        assert isinstance(render([], format), str)


def test_report_is_one_self_contained_page(tmp_path):
    page = tmp_path / "deep" / "report.html"
    done = run("report", DATA, "-o", page)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert page.stat().st_size < 5_000_000
    assert text.count("<img ") == text.count('alt="') >= 10
    assert 'src="data:image/png;base64,' in text
    assert "http://" not in text
    assert "https://" not in text
    for name in ("resnet20", "resnet20-ef", "uniform", "sidco-e"):
        assert name in text
