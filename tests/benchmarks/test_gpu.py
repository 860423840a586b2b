"""Triton's kernels, compiled for GPUs that nobody needs to have: nothing is run on one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time_without_spills(tmp_path):
    kernels = pytest.importorskip(
        "gradstats.primitives.triton_kernels",
        reason="Triton is installed with the extra dev, on Linux",
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_kernels.py"), "--json"],
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
    assert max(r["registers"] for r in records) <= 128


def test_the_page_has_the_numbers_of_the_results():
    records = json.loads((ROOT / "docs" / "results" / "gpu_kernels.json").read_text("utf-8"))
    assert not any(r["stores"] or r["loads"] for r in records)
    sums = [r for r in records if r["kernel"] == "sums_kernel"]
    groups = (
        [r for r in sums if "LOG" in r["constants"]],
        [r for r in sums if "LOG" not in r["constants"]],
        [r for r in records if r not in sums],
    )
    most = [max(r["registers"] for r in group) for group in groups]
    page = (ROOT / "docs" / "howto" / "gpu.md").read_text("utf-8")
    found = re.search(
        r"up to (\d+) registers a thread for the sums with logarithms, (\d+) without, (\d+) for",
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
