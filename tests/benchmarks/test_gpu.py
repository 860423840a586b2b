"""What is run on GPUs, where there is none: Triton's kernels are compiled, and the programs go through."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
from functools import partial

import gpu
import gpu_tables
import gpu_trainings
import pytest
import torch
from conftest import ROOT
from forked import CONTEXT
from torch.multiprocessing import start_processes

from gradstats.primitives.backend import MANY


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


def test_the_page_has_what_was_measured_on_a_gpu():
    rows = json.loads(gpu_tables.FILE.read_text("utf-8"))
    page = (ROOT / "docs" / "measurements.md").read_text("utf-8")
    for mark, table in gpu_tables.tables(rows).items():
        assert f"<!-- {mark} -->\n{table}\n<!-- /{mark} -->" in page
    # the sentences beside the tables
    compared = [r for r in rows if "wrong" in r]
    (wrong,) = [each for r in compared for each in r["wrong"]]
    assert "topk, memory adam, float32" in wrong
    off = round(100 * float(re.search(r"off by ([\d.]+) of their way", wrong).group(1)))
    assert f"which is {off} % off" in page
    trainings = sum(r["count"] for r in compared if r["part"] == "trainings")
    selections = sum(r["count"] for r in compared if r["part"] == "selections")
    assert f"{selections:,} selections and {trainings} trainings" in page
    one = len(gpu_trainings.planned(["float64"])) - len(gpu_trainings.RANDOM)
    exact = sum(one for r in compared if "float64" in r.get("dtypes", ()))
    assert f"- {exact} trainings in float64" in page
    steps = {
        (r["numel"] // 10**6, r["compressor"], r["backend"]): 1e3 * r["seconds"]
        for r in rows
        if r["part"] == "step"
    }
    costs = {
        millions: [
            took - steps[millions, "none", "none"]
            for (of, name, _), took in steps.items()
            if of == millions and name not in ("none", "lags, exactly")
        ]
        for millions in (25, 85)
    }
    small, large = (f"{min(c):.0f} to {max(c):.0f}" for c in costs.values())
    assert f"Most hooks take {small} ms of 26 million parameters and {large} of 85 million" in page
    timed = [r for r in rows if r["part"] == "latency"]
    faster = {(r["what"], r["backend"], r["numel"], r["ratio"]) for r in timed if r["speedup"] > 1}
    assert min(numel for *_, numel, _ in faster) == 26_000_000
    # exactly k is faster by Triton where there are more elements than its default takes at least
    exactly = {
        (r["numel"], r["backend"]): r["seconds"]
        for r in timed
        if (r["what"], r["ratio"]) == ("exactly k", 0.001)
    }
    gains = {n for n, by in exactly if by == "torch" and exactly[n, "triton"] < exactly[n, by]}
    assert gains == {26_000_000, 260_000_000}
    assert 3_000_000 < MANY < 8_500_000
    slow = {
        (r["what"], r["ratio"])
        for r in timed
        if (r["backend"], r["numel"]) == ("triton", 260_000_000) and r["speedup"] < 1
    }
    assert slow == {
        *(("histogram", ratio) for ratio in (0.1, 0.01, 0.001)),
        *(("sidco-gp", ratio) for ratio in (0.01, 0.001)),
        *(("sidco-p", 0.001), ("exactly k", 0.1)),
    }
    always, tenth = {"hard", "redsync", "micro"}, {"sidco-e", "sidco-gp", "sidco-p"}
    assert {(what, ratio) for what, by, n, ratio in faster if n == 26_000_000} == {
        *((each, ratio) for each in always for ratio in (0.1, 0.01, 0.001)),
        *((each, 0.1) for each in tenth),
    }
    most = max(r["speedup"] for r in timed if r["backend"] == "torch")
    assert f"more than {most:.2f} times as fast" in page
    (device,) = {r["device"] for r in rows}
    version = ".".join(rows[0]["torch"].split(".")[:2])
    assert f"{device} with PyTorch {version} " in page


@pytest.mark.slow
def test_the_benchmark_goes_through_without_a_gpu_and_gives_no_number(
    tmp_path, monkeypatch, capsys
):
    """All but the trainings, which take a minute. Its ranks are forked, where CUDA would need new processes."""
    parts = [part for part in gpu.PARTS if part != "trainings"]
    forked = partial(start_processes, start_method=CONTEXT.get_start_method())
    monkeypatch.setattr(gpu.mp, "spawn", forked)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--dry-run", "--backend", "torch", "--part", *parts]
    )
    gpu.main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*parts]
    assert last.endswith("measurements would have been taken")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The program on a machine that seems to have a GPU, where one part fails; its file afterwards."""
    one = {"part": "latency", "what": "exact", "backend": "torch", "numel": 100, "seconds": 1.23456}
    one |= {"ratio": 0.01, "reads": 2.0, "speedup": 1.0}

    def fails(*_):
        raise RuntimeError("two ranks on one GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(gpu, "WRONG", [])
    monkeypatch.setattr(gpu, "exchange", fails)
    monkeypatch.setattr(
        gpu, "latency", lambda _, numel, *__: [one | {"numel": numel, "seconds": 1.23456}]
    )
    monkeypatch.setattr(gpu, "messages", lambda *_: [{"part": "messages", "count": 1}])

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "new"), *arguments])
        with contextlib.suppress(SystemExit):
            gpu.main()
        return json.loads((tmp_path / "new" / "gpu.json").read_text())

    return run


def test_a_part_that_fails_loses_no_other(measured):
    rows = measured("--part", "messages", "exchange", "latency", "--numel", "10", "20")
    assert [(r["part"], r.get("numel")) for r in rows] == [
        ("messages", None),
        ("latency", 10),
        ("latency", 20),
    ]
    assert rows[0]["wrong"] == []
    assert rows[1]["seconds"] == 1.235
    assert gpu.WRONG == ["exchange: RuntimeError: two ranks on one GPU"]


def test_a_part_replaces_what_the_file_has_of_it(measured):
    measured("--part", "messages", "latency", "--numel", "10", "20")
    rows = measured("--part", "latency", "--numel", "20")
    assert [(r["part"], r.get("numel")) for r in rows] == [
        ("messages", None),
        ("latency", 10),
        ("latency", 20),
    ]


def test_a_comparison_that_breaks_off_leaves_no_earlier_one(measured, monkeypatch):
    measured("--part", "messages")

    def fails(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu, "messages", fails)
    (row,) = measured("--part", "messages")
    assert row["count"] == 0
    assert row["wrong"] == ["messages: RuntimeError: no such kernel"]


def test_nothing_is_timed_where_answers_differ(measured, monkeypatch):
    def differs(*_):
        gpu.check(False, "other positions")
        return [{"part": "messages", "count": 1}]

    monkeypatch.setattr(gpu, "messages", differs)
    rows = measured("--part", "messages", "latency", "--numel", "10")
    assert [(r["part"], r.get("wrong")) for r in rows] == [("messages", ["other positions"])]
    rows = measured("--part", "messages", "latency", "--numel", "10", "--anyway")
    assert [r["part"] for r in rows] == ["messages", "latency"]


def test_one_read_is_of_the_bandwidth_of_the_largest_copy(monkeypatch):
    """Launches of 1 s and 1 ms an element: a small copy says nothing of memory."""

    def alternating(runs, *_, **__):
        def copied(run):
            return getattr(getattr(run, "__self__", None), "numel", lambda: 0)()

        return {name: 1 + 1e-3 * copied(run) for name, run in runs.items()}

    monkeypatch.setattr(gpu, "alternating", alternating)
    records = [
        r
        for numel in (10, 10_000)
        for r in gpu.latency(torch.device("cpu"), numel, 10_000, [0.1], ["torch"])
    ]
    assert {r["backend"] for r in records} == {"torch operator", "torch"}
    for r in records:
        assert r["bandwidth"] == pytest.approx(2 * 4 * 10_000 / 11)
        assert math.isclose(r["reads"] * r["numel"] / 10_000 * 11 / 2, r["seconds"])


@pytest.mark.parametrize("name", [gpu_trainings.TIED, "topk, memory momentum"])
def test_roundings_decide_what_adams_correction_sends_first(name, monkeypatch, one_rank):
    """Which is why its weights are not compared in float32, and those of others are."""
    cpu, drawn = torch.device("cpu"), gpu_trainings.batches
    run = gpu_trainings.trainings()[name]
    begun = gpu_trainings._weights(gpu_trainings.net(cpu, torch.float32))
    usual = run(0, cpu, torch.float32)["weights"]
    monkeypatch.setattr(
        gpu_trainings, "batches", lambda *of: [((1 + 2**-22) * x, y) for x, y in drawn(*of)]
    )
    off = (run(0, cpu, torch.float32)["weights"] - usual).norm() / (usual - begun).norm()
    assert off > 0.1 if name == gpu_trainings.TIED else off < 1e-4


def test_trainings_that_differ_are_told():
    """Of two ranks: one with other weights, one far from the CPU's, gradients that are lost, and one that died."""
    start = gpu_trainings._weights(gpu_trainings.net(torch.device("cpu"), torch.float32))
    ones, told = torch.ones_like(start), []
    good = {"weights": start + ones, "in": ones, "out": ones, "left": 0 * ones, "sent": 8}
    far, lost = good | {"weights": start + 1.1 * ones}, good | {"out": 0.5 * ones}
    near = good | {"weights": start + 1.01 * ones}
    cases = {
        ("topk", "float64"): (good, good),
        ("dgc", "float64"): (good, far),
        ("hard", "float64"): (near, near),
        ("hard", "float32"): (near, near),  # elements near a threshold
        ("exact", "float32"): (far, far),
        ("exact", "bfloat16"): (far, far),
        ("micro", "bfloat16"): (lost, lost),
        ("lags", "float64"): (good | {"sent": 4}, good),
        ("randomk", "float64"): (far, far),  # draws others on a device
        ("cltk", "float64"): (good, None),
        ("redsync", "float64"): (good, good),
    }
    here = [dict.fromkeys(cases, good) for _ in range(2)]
    del here[0]["redsync", "float64"]  # the CPU's died
    there = [{case: c[rank] for case, c in cases.items() if c[rank]} for rank in range(2)]
    count = gpu_trainings._compare(
        lambda ok, what: ok or told.append(what), "here", [*cases], there, here
    )
    assert [what.removeprefix("training with ").replace(", here", "") for what in told] == [
        "dgc, float64: ranks differ",
        f"hard, float64: weights off by 0.01, {len(ones)} elements",
        "exact, float32: weights off by 0.1 of their way",
        "micro, bfloat16: 0.5 are lost, on the CPU 0",
        "lags, float64: other bytes are sent",
        "cltk, float64: ['not reached']",
        "redsync, float64: ['not reached']",
    ]
    assert count == 6  # neither bfloat16 nor drawn nor died
