"""Odd terminals, disks, names and files: one line each, and no traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support.terminal import main, run

from gradstats.errors import GradstatsError, InputError
from gradstats.network import Network
from gradstats.plots.style import png
from gradstats.report import write_report
from gradstats.trace.sources import open_source, open_sources


def command(*args, **options):
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "check": False} | options
    return subprocess.run([sys.executable, "-m", "gradstats", *map(str, args)], **settings)


@pytest.fixture
def file(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).laplace(size=2000).astype("f4"))
    return tmp_path / "x.npy"


GREEK = (["--help"], ["quality", "x.npy", "--ratio", "0.01", "--estimator", "exact"])


def test_a_terminal_without_greek_letters(file):
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    for args in GREEK:
        run = command(*args, env=env, cwd=file.parent)
        assert run.returncode == 0
        assert b"Traceback" not in run.stderr


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii"])
def test_streams_without_greek_letters(encoding, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    for args in GREEK:
        # as Python makes them for such a terminal
        out, err = (
            io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
            for errors in ("strict", "backslashreplace")
        )
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as done:
            main(args)
        assert done.value.code == 0
        out.flush()
        assert out.buffer.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
def test_a_full_disk_is_one_line(file):
    with open("/dev/full", "wb") as full:
        run = command("info", file, stdout=full)
    assert run.returncode == 2
    assert run.stderr.decode().strip().endswith("No space left on device")
    assert run.stderr.count(b"\n") == 1


def test_long_names_and_capitals(file):
    for name in ("x" * 300, "a\0b"):
        for opens in (open_source, open_sources):
            with pytest.raises(InputError):
                opens(name)
    for suffix in (".NPY", ".Npy"):
        os.link(file, file.with_suffix(suffix))
        assert open_source(file.with_suffix(suffix)).numel == 2000


def test_a_report_of_dollars_and_of_one_element(tmp_path):
    torch.save({r"$\href{x}{y}$": torch.randn(300), "b$": torch.randn(500)}, tmp_path / "odd.pt")
    np.save(tmp_path / "one.npy", np.ones(1, np.float32))
    for name in ("odd.pt", "one.npy"):
        write_report(tmp_path / name, tmp_path / f"{name}.html")
        assert (tmp_path / f"{name}.html").stat().st_size > 1000


def test_numbers_of_axes_stay_formulas():
    from matplotlib.figure import Figure

    figure = Figure()
    ax = figure.subplots()
    ax.loglog([1, 1e6], [1, 1e6])
    ax.set_title("$x")
    png(figure)
    assert ax.get_xticklabels()[0].get_parse_math()
    assert not ax.title.get_parse_math()


def test_a_member_that_is_no_array_is_left_out(tmp_path):
    import zipfile

    np.savez(tmp_path / "x.npz", a=np.ones(4, np.float32))
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr("readme.txt", "hello")
    source = open_source(tmp_path / "x.npz")
    assert source.numel == 4
    assert "readme.txt (no array)" in source.remark


def test_networks_that_nobody_measured(tmp_path):
    path = tmp_path / "network.json"
    Network.of_link(50e-6, 1e-9, {"select": 1e-9}).save(path)
    good = json.loads(path.read_text())

    def change(key, value):
        return json.dumps(good | {key: value})

    line = good["lines"][0]
    for text in (
        "[" * 100_000,
        change("lines", [1]),
        change("lines", ["a"]),
        change("lines", [line | {"fixed": 10**400}]),
        change("lines", [line | {"slope": 1e30}]),
        change("about", "ab"),
        change("about", [["a", 1]]),
        change("about", 3),
        change("algorithms", 3),
        json.dumps(3),
    ):
        path.write_text(text)
        with pytest.raises(GradstatsError, match="not a measured network") as caught:
            Network.load(path)
        assert "\n" not in str(caught.value)


def test_names_in_a_file_steer_neither_terminal_nor_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layer, file = "\x1b[31mw\n</script><script>\u202e", "a\x1b[2J<b>.safetensors"
    x = np.random.default_rng(0).laplace(size=600).astype(np.float32)
    save_file({layer: x}, file)
    said = [
        run("fit", file, "--per-layer", "--model", "laplace"),
        run("import", file, "--out", "\x1b[31mo.zarr"),
        run("info", "\x1b[31mo.zarr"),
        run("report", file, "-o", "r.html"),
        run("explore", file, "-o", "x.html"),
    ]
    assert [done.returncode for done in said] == [0] * len(said), said
    said.append(run("fit", f"no{file}"))
    pages = [Path(name).read_text(encoding="utf-8") for name in ("r.html", "x.html")]
    for text in [*pages, *(done.stdout + done.stderr for done in said)]:
        assert not set(text) & set("\x1b\u202e")
    for page in pages:
        assert "</script><script>" not in page
        assert "<b>" not in page.partition("<body")[2][:20_000]
