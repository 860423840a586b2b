"""Triton's kernels, compiled for GPUs that nobody needs to have: nothing is run on one."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys

import gpu
import pytest
import torch
from conftest import ROOT


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time_without_spills(tmp_path):
    kernels = pytest.importorskip(
        "gradstats.primitives.triton_kernels",
        reason="Triton is installed with the extra dev, on Linux",
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_kernels.py"), "--short", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    records = json.loads(done.stdout)
    written = {name.strip("_") for name in vars(kernels) if name.endswith("_kernel")}
    assert {r["kernel"] for r in records} == written
    assert {r["arch"] for r in records} == {"sm_80", "sm_90"}
    assert [r for r in records if r["stores"] or r["loads"]] == []
    # four programs of 128 threads and 128 registers fill a multiprocessor's register file
    assert max(r["registers"] for r in records if r["case"] == "usual") <= 128
    every = {"usual", "unaligned", "64 bits", "one element"}
    for kernel in written:
        assert {r["case"] for r in records if r["kernel"] == kernel} == every


def test_the_page_has_the_numbers_of_the_results():
    records = json.loads((ROOT / "docs" / "results" / "gpu_kernels.json").read_text("utf-8"))
    assert not any(r["stores"] or r["loads"] for r in records)
    sums = [r for r in records if r["kernel"] == "sums_kernel"]
    drawn = [r for r in records if r["kernel"] == "bernoulli_kernel"]
    groups = (
        [r for r in sums if "LOG" in r["constants"]],
        [r for r in sums if "LOG" not in r["constants"]],
        [r for r in records if r not in [*sums, *drawn] and "pack" not in r["kernel"]],
        [r for r in records if "pack" in r["kernel"] and r["case"] != "unaligned"],
        [r for r in records if "pack" in r["kernel"] and r["case"] == "unaligned"],
        drawn,
    )
    most = [max(r["registers"] for r in group) for group in groups]
    page = (ROOT / "docs" / "measurements.md").read_text("utf-8")
    found = re.search(
        r"up to (\d+) registers a thread for the sums with logarithms, (\d+) without, (\d+) for counts and\s"
        r"selections, (\d+) for bits, (\d+) for\s[^,]*, (\d+) for random",
        page,
    )
    assert list(map(int, found.groups())) == most


@pytest.mark.slow
def test_the_benchmark_goes_through_without_a_gpu_and_gives_no_number(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry-run"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    selections, measurements = done.stdout.splitlines()
    assert selections.endswith("selections as on the CPU")
    assert measurements.endswith("measurements would have been taken")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def parts(monkeypatch):
    """The program on a machine that seems to have a GPU: one that measures nothing, and fails at the exchange."""
    one = {"part": "latency", "what": "exact", "backend": "torch", "numel": 100, "seconds": 1.0}
    one |= {"ratio": 0.01, "reads": 2.0, "speedup": 1.0}

    def fails(*_):
        raise RuntimeError("two ranks on one GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    for name, stub in {
        "correctness": lambda *_: 0,
        "latency": lambda *_: [one],
        "capture_cost": lambda *_: [],
        "exchange": fails,
    }.items():
        monkeypatch.setattr(gpu, name, stub)
    return one


def test_a_part_that_fails_loses_no_other(parts, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "new" / "results")])
    with pytest.raises(RuntimeError, match="two ranks"):
        gpu.main()
    written = json.loads((tmp_path / "new" / "results" / "gpu.json").read_text())
    assert written["records"] == [parts]


def test_the_figure_is_of_the_ratios_measured(parts, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(gpu, "exchange", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path), "--ratio", "0.01"])
    gpu.main()
    assert (tmp_path / "gpu.png").stat().st_size


def test_one_read_is_of_the_bandwidth_of_the_largest_copy(monkeypatch):
    """Launches of 1 s and 1 ms an element: a small copy says nothing of memory."""

    def timed(run, _):
        copied = getattr(getattr(run, "__self__", None), "numel", lambda: 0)()
        return 1 + 1e-3 * copied

    monkeypatch.setattr(gpu, "timed", timed)
    records = gpu.latency(torch.device("cpu"), [10, 10_000], [0.1], ["torch"])
    assert {r["backend"] for r in records} == {"torch operator", "torch"}
    for r in records:
        assert r["bandwidth"] == pytest.approx(2 * 4 * 10_000 / 11)
        assert math.isclose(r["reads"] * r["numel"] / 10_000 * 11 / 2, r["seconds"])
