"""The tap: plain loops, DDP hooks, schedules, slow and full disks."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from importlib.metadata import version

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from support.traces import train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from workers import hook as cases

from capture import Capture, CaptureWarning, at, every, logarithmic, recent
from capture.schedule import as_schedule
from capture.taps.buckets import BucketTap
from capture.taps.layout import Layout
from gradstats import open_trace
from gradstats.compressors import TopK
from gradstats.errors import InputError, TraceError
from gradstats.hooks import CompressionState, compression_hook
from gradstats.trace import TraceWriter

# These models train faster than any disk writes.
pytestmark = pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning")


@pytest.mark.parametrize("total", [None, 9])
def test_plain_loop_records_what_backward_left(tmp_path, total):
    model = cases.model()
    with Capture(tmp_path / "a.zarr", model, 2, total_steps=total) as capture:
        seen = train(capture, model, 9)
    trace = open_trace(tmp_path / "a.zarr")
    assert trace.steps() == [0, 2, 4, 6, 8]
    assert trace.kinds(0) == ["gradient"]
    for step in trace.steps():
        assert np.array_equal(trace.read(step), seen[step])
    assert trace.scalars()["learning_rate"].tolist() == [0.1] * 5
    assert [la.name for la in trace.layers] == [n for n, _ in model.named_parameters()]
    assert trace.attrs["versions"]["torch"] == version("torch")


@pytest.mark.parametrize(
    ("keep", "steps", "said"),
    [
        (3, [6, 7, 8], "the last 3 steps"),
        (recent(3, 4), [0, 4, 6, 7, 8], "the last 3 steps; of those before, every 4 from 0"),
        (recent(2, at([1])), [1, 7, 8], "the last 2 steps; of those before, 1"),
    ],
)
def test_old_steps_that_are_not_kept_are_removed(tmp_path, keep, steps, said):
    model = cases.model()
    with Capture(tmp_path / "a.zarr", model, keep=keep) as capture:
        seen = train(capture, model, 9)
    trace = open_trace(tmp_path / "a.zarr")
    assert trace.steps() == steps
    assert trace.attrs["capture"]["keep"] == said
    for step in steps:
        assert np.array_equal(trace.read(step), seen[step])
    chunks = os.listdir(tmp_path / "a.zarr" / "rank00000" / "gradient" / "c")
    assert sorted(map(int, chunks)) == steps


def test_patterns_frozen_and_unused_parameters(tmp_path):
    model = cases.model()
    model[0].bias.requires_grad_(False)
    with Capture(tmp_path / "a.zarr", model, parameters=["*.bias", "2.*"]) as capture:
        model[2](torch.ones(1, 300)).sum().backward()
        capture.step()
    trace = open_trace(tmp_path / "a.zarr")
    assert [la.name for la in trace.layers] == ["2.weight", "2.bias", "4.bias"]
    values = trace.read(0)
    assert np.array_equal(values[trace.layers[0].slice], model[2].weight.grad.reshape(-1).numpy())
    assert not values[trace.layers[2].slice].any()
    with pytest.raises(InputError, match="no trainable parameter"):
        Capture(tmp_path / "b.zarr", model, parameters=["nothing*"])
    # its letters are patterns, too, and one of them matches everything
    with pytest.raises(InputError, match="parameters must be a list or a tuple"):
        Capture(tmp_path / "b.zarr", model, parameters="2.*")
    assert not (tmp_path / "b.zarr").exists()


def test_a_pattern_that_matches_nothing_beside_one_that_does_is_said(tmp_path):
    model = cases.model()
    model[0].bias.requires_grad_(False)
    said = "^parameters: no parameter is called 0.wieght, so it captures nothing; the first of 6 is 0.weight$"
    # a frozen parameter is known
    with (
        pytest.warns(UserWarning, match=said),
        Capture(tmp_path / "a.zarr", model, parameters=["0.wieght", "0.bias", "2.*"]),
    ):
        pass
    assert [la.name for la in open_trace(tmp_path / "a.zarr").layers] == ["2.weight", "2.bias"]


def test_ranks_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(InputError, match="ranks: there is no rank 7 among 1, which are counted"):
        Capture(tmp_path / "a.zarr", cases.model(), ranks=[0, 7])
    assert not (tmp_path / "a.zarr").exists()


def test_corrected_is_of_a_hook(tmp_path):
    model = cases.model()
    with Capture(tmp_path / "a.zarr", model, kinds=["gradient", "corrected"]) as capture:
        model(torch.ones(1, 40)).sum().backward()
        with pytest.raises(InputError, match=r"^corrected is what a hook .* capture\.wrap"):
            capture.step()


def test_bad_settings_are_refused(tmp_path):
    for options in (
        {"kinds": ["residual"]},
        {"store": "histograms"},
        {"dtype": "int8"},
        {"buffers": 0},
        {"buffers": 1.5},
        {"kinds": "gradient"},
        {"schedule": 0},
        {"keep": 0},
        {"keep": 2.5},
    ):
        with pytest.raises(InputError):
            Capture(tmp_path / "a.zarr", cases.model(), **options)
    capture = Capture(tmp_path / "a.zarr", cases.model())
    with pytest.raises(InputError, match="made for another"):
        capture.step(nn.Linear(2, 2))
    capture.close()
    capture.close()
    with pytest.raises(TraceError, match="overwrite=True"):
        Capture(tmp_path / "a.zarr", cases.model())


def test_arguments_in_the_wrong_place_are_named(tmp_path):
    model = cases.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InputError, match=r"needs a torch\.nn\.Module.*whose parameters it updates"):
        Capture(tmp_path / "a.zarr", optimizer)
    assert not (tmp_path / "a.zarr").exists()
    with Capture(tmp_path / "a.zarr", model) as capture:
        for state in (None, CompressionState(TopK(0.1))):
            with pytest.raises(InputError, match="takes the state first: the two are swapped"):
                capture.wrap(compression_hook, state)
        with pytest.raises(InputError, match="a communication hook is a function"):
            capture.wrap(None, 3)


def test_a_hook_that_no_model_calls_is_said(tmp_path):
    model = cases.model()
    capture = Capture(tmp_path / "a.zarr", model)
    capture.wrap(CompressionState(TopK(0.1)), compression_hook)  # and nothing registers it
    for _ in range(2):
        model(torch.ones(2, 40)).sum().backward()
        capture.step()
    with pytest.warns(CaptureWarning, match="saw no gradient in 2 backward passes"):
        capture.close()


def test_a_slow_disk_is_waited_for_and_nothing_dropped(tmp_path, monkeypatch):
    gate = threading.Semaphore(0)
    original = TraceWriter.append

    def slow(self, *args, **kwargs):
        gate.acquire()
        original(self, *args, **kwargs)

    monkeypatch.setattr(TraceWriter, "append", slow)
    model = cases.model()
    capture = Capture(tmp_path / "a.zarr", model, buffers=2)
    releaser = threading.Timer(1.5, lambda: gate.release(100))
    releaser.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = train(capture, model, 10)
        capture.close()
    releaser.join()
    assert [str(w.message).split(": ")[1] for w in caught if w.category is CaptureWarning] == [
        "the disk is slower than the training, which waits for it"
    ]
    (said,) = (str(w.message) for w in caught if w.category is CaptureWarning)
    assert said.endswith("or take more memory (buffers=4)")
    trace = open_trace(tmp_path / "a.zarr")
    assert trace.steps() == list(range(10))
    assert all(np.array_equal(trace.read(s), seen[s]) for s in range(10))


def test_a_full_disk_stops_capturing_not_training(tmp_path, monkeypatch):
    original = TraceWriter.append

    def failing(self, step, *args, **kwargs):
        if step == 3:
            raise TraceError("cannot write step 3: No space left on device")
        original(self, step, *args, **kwargs)

    monkeypatch.setattr(TraceWriter, "append", failing)
    model = cases.model()
    capture = Capture(tmp_path / "a.zarr", model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(train(capture, model, 12)) == 12
        capture.close()
    assert [str(w.message) for w in caught if "slower" not in str(w.message)] == [
        "capture stopped, training goes on: cannot write step 3: No space left on device"
    ]
    assert not capture.active
    assert open_trace(tmp_path / "a.zarr").steps() == [0, 1, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tiny file system needs root")
def test_a_really_full_disk(tmp_path):
    """The same on a 1 MB file system: the error is the kernel's."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        model = cases.model()
        capture = Capture(disk / "a.zarr", model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = train(capture, model, 12)
            capture.close()
        stopped = [str(w.message) for w in caught if "stopped" in str(w.message)]
        assert len(stopped) == 1
        assert os.strerror(errno.ENOSPC) in stopped[0]
        trace = open_trace(disk / "a.zarr")
        assert len(trace.steps()) >= 1
        for step in trace.steps():
            assert np.array_equal(trace.read(step), seen[step])
    finally:
        subprocess.run(["umount", disk], check=True)


def test_forgetting_to_close_loses_nothing(tmp_path):
    script = f"""
import torch
from capture import Capture
model = torch.nn.Linear(3, 2)
capture = Capture({str(tmp_path / "a.zarr")!r}, model)
for step in range(5):
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    capture.step()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert open_trace(tmp_path / "a.zarr").steps() == [0, 1, 2, 3, 4]


FORKS = """
import sys, time
import multiprocessing
import torch
from torch.utils.data import DataLoader
from capture import Capture

model, seconds = torch.nn.Linear(40, 3), []
with Capture(sys.argv[1], model) as capture:
    for epoch in range(2):  # the trace is opened in the first one
        started = time.perf_counter()
        for x in DataLoader(torch.randn(8, 40), 4, num_workers=2, multiprocessing_context="fork"):
            model.zero_grad()
            model(x).sum().backward()
            capture.step()
        seconds.append(time.perf_counter() - started)
    child = multiprocessing.get_context("fork").Process(target=capture.close)
    child.start()
    child.join(60)
    assert child.exitcode == 0, child.exitcode
# of a worker that does not end by itself DataLoader waits five seconds
assert seconds[1] < 4 + seconds[0], seconds
"""


def test_forked_processes_such_as_a_data_loaders_leave_the_capture_alone(tmp_path):
    path = str(tmp_path / "a.zarr")
    subprocess.run([sys.executable, "-c", FORKS, path], check=True, timeout=120)
    trace = open_trace(path)
    assert trace.steps() == [0, 1, 2, 3]
    assert trace.read(3).any()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["allreduce", "topk", "powersgd"])
def test_ddp_hooks_are_recorded_before_and_after_error_feedback(tmp_path, kind):
    path = tmp_path / "a.zarr"
    results = run_ranks(2, cases.capture_run, str(path), kind, 1)
    trace = open_trace(path)
    assert trace.ranks == [0, 1]
    assert trace.world_size == 2
    for rank, result in enumerate(results):
        if kind != "powersgd":
            assert result["buckets"] > 1.2  # they are rebuilt after the first iteration
        assert trace.steps(rank) == list(range(8))
        assert np.allclose(trace.scalars(rank)["loss"], result["losses"])
        for step in range(8):
            assert np.array_equal(trace.read(step, rank), result["seen"][step])
        assert trace.kinds(rank) == (
            ["gradient"] if kind == "allreduce" else ["gradient", "corrected"]
        )
        if kind == "topk":
            check_error_feedback(trace, rank)
        if kind == "powersgd":
            # no residual before PowerSGD starts at iteration 2; afterwards its rank-1 error
            same = [
                np.array_equal(trace.read(s, rank), trace.read(s, rank, "corrected"))
                for s in range(8)
            ]
            assert same == [True] * 3 + [False] * 5


def check_error_feedback(trace, rank):
    """corrected_t = gradient_t + residual_t, residual_t+1 = corrected_t without what was sent, bit for bit."""
    scalars = trace.scalars(rank)
    residual = np.zeros(trace.numel, np.float32)
    for step in range(8):
        corrected = trace.read(step, rank, "corrected")
        assert np.array_equal(corrected, trace.read(step, rank) + residual)
        sent = np.abs(corrected) >= np.float32(scalars["threshold"][step])
        assert sent.sum() == scalars["selected"][step]
        residual = np.where(sent, np.float32(0), corrected)


@pytest.mark.distributed
def test_gradient_accumulation_records_one_sum_per_synchronised_step(tmp_path):
    path = tmp_path / "a.zarr"
    results = run_ranks(2, cases.capture_run, str(path), "topk", [1, 2, 5], 6, 3)
    trace = open_trace(path)
    for rank, result in enumerate(results):
        assert trace.steps(rank) == [1, 2, 5]
        assert len(result["seen"]) == 6
        for step in (1, 2, 5):
            assert np.array_equal(trace.read(step, rank), result["seen"][step])


@pytest.mark.distributed
def test_all_ranks_hear_that_the_trace_cannot_be_made(tmp_path):
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / "precious").touch()
    for message in run_ranks(2, cases.create_conflict, str(tmp_path / "a.zarr")):
        assert message.startswith("TraceError: ")
        assert "not touching it" in message


def test_schedules():
    assert [s for s in range(9) if s in every(3)] == [0, 3, 6]
    assert every(3).count(10) == 4
    assert [s for s in range(9) if s in as_schedule([7, 2])] == [2, 7]
    assert as_schedule(at([1])).description == "at 1"
    assert as_schedule(np.int64(4)).description == "every 4 from 0"
    assert [s for s in range(9) if s in as_schedule(np.arange(2, 4))] == [2, 3]
    for wrong in (10.0, None, [1.5], torch.arange(3), ["2"], np.int64(0), "10"):
        with pytest.raises(InputError):
            as_schedule(wrong)
    with pytest.raises(InputError, match="whole number"):
        every(2.5)
    assert [s for s in range(9) if s in at([0])] == [0]
    assert at([3, 0]).description == "at 0, 3"
    assert [s for s in range(9) if s in every(3, start=5)] == [5, 8]  # and not 2
    assert [s for s in range(9) if s in every(2, start=3)] == [3, 5, 7]
    assert every(2, start=10).count(10) == 0
    assert every(3, start=5).description == "every 3 from 5"
    assert every(1).count(4) == 4
    assert [s for s in range(101) if s in logarithmic(1)] == [0, 1, 10, 100]
    with pytest.raises(InputError):
        every(0)
    with pytest.raises(InputError):
        at([-1])
    with pytest.raises(InputError):
        logarithmic(0)
    with pytest.raises(InputError, match="per_decade must be a whole number"):
        logarithmic(float("nan"))
    with pytest.raises(InputError, match="before= is a schedule"):
        recent(3, before=lambda step: True)


def test_numbers_that_a_capture_cannot_use_are_refused_before_the_training(tmp_path):
    for options in (
        {"total_steps": 500.0},
        {"start_step": 2.5},
        {"start_step": -3},
        {"start_step": "3"},
    ):
        with pytest.raises(InputError, match=f"{next(iter(options))} must be"):
            Capture(tmp_path / "a.zarr", torch.nn.Linear(2, 2), **options)
    assert not [*tmp_path.iterdir()]


@given(st.integers(1, 20), st.integers(0, 6))
def test_logarithmic_schedules_have_their_density(per_decade, decade):
    steps = [s for s in range(10**3) if s in logarithmic(per_decade)]
    assert steps[0] == 0
    assert {1, 10, 100} <= set(steps)
    assert sum(100 <= s < 1000 for s in steps) == per_decade


@pytest.mark.distributed
def test_every_estimator_gives_offline_the_thresholds_it_gave_live(tmp_path):
    """Replayed over the captured vectors, also the stateful rules, bit for bit."""
    from gradstats.thresholds import ESTIMATORS, make_estimator

    steps = 12
    run_ranks(2, cases.live_thresholds, str(tmp_path), list(ESTIMATORS), steps)
    for name in ESTIMATORS:
        trace = open_trace(tmp_path / f"{name}.zarr")
        for rank in (0, 1):
            rule, live = make_estimator(name), trace.scalars(rank)
            assert len(live["step"]) == steps
            for step in range(steps):
                estimate, selection = rule.select(trace.read(step, rank, "corrected"), 0.01)
                assert estimate.threshold == live["threshold"][step], (name, step)
                assert len(selection) == live["selected"][step]


def _conv_net(memory_format):
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 9, 3, bias=False)),
        *(nn.Flatten(), nn.Linear(9 * 16, 5)),
    )
    return net.to(memory_format=memory_format)


def _captured_conv(path, net, copied, **options):
    """Train a few steps with top-k and error feedback; count the buckets that were copied in one go."""
    ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.005)
    with Capture(path, ddp, **options) as capture:
        state = CompressionState(TopK(0.05))
        ddp.register_comm_hook(*capture.wrap(state, compression_hook))
        whole = capture._tap._copy_whole
        capture._tap._copy_whole = lambda *a: copied.append(whole(*a)) or copied[-1]
        for step in range(4):
            ddp.zero_grad()
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            ddp(x).square().mean().backward()
            capture.step()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
    assert not capture._tap._copies  # nor the writer's memory, while DDP holds the hook
    return open_trace(path)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_bucket_is_copied_in_one_go_where_that_is_the_same(
    tmp_path, one_rank, memory_format, monkeypatch
):
    copied, apart = [], []
    together = _captured_conv(tmp_path / "a.zarr", _conv_net(memory_format), copied)
    assert all(copied)
    assert len(copied) > 4  # more than one bucket
    monkeypatch.setattr(BucketTap, "_copy_whole", lambda *_: False)
    expected = _captured_conv(tmp_path / "b.zarr", _conv_net(memory_format), apart)
    assert not any(apart)
    for step in expected.steps():
        for kind in ("gradient", "corrected"):
            assert np.array_equal(together.read(step, 0, kind), expected.read(step, 0, kind))
    assert not np.array_equal(expected.read(3), expected.read(3, 0, "corrected"))


def test_a_capture_may_wrap_another_and_a_raw_hook_is_refused(tmp_path, one_rank):
    net = nn.Linear(8, 8)
    ddp = nn.parallel.DistributedDataParallel(net)
    state = CompressionState(TopK(0.1), named_parameters=net.named_parameters())
    paths = [tmp_path / name for name in ("seldom.zarr", "often.zarr")]
    with Capture(paths[0], ddp, 2) as seldom, Capture(paths[1], ddp) as often:
        ddp.register_comm_hook(*often.wrap(*seldom.wrap(state, compression_hook)))
        for step in range(4):
            ddp.zero_grad()
            ddp(torch.full((1, 8), step + 1.0)).sum().backward()
            for each in (often, seldom):
                each.step(loss=float(step))
    few, all_ = map(open_trace, paths)
    assert (few.steps(), all_.steps()) == ([0, 2], [0, 1, 2, 3])
    assert np.array_equal(few.read(2), all_.read(2))
    assert few.scalars()["loss"].tolist() == [0, 2]
    for registered in (None, dist.group.WORLD):
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        with Capture(tmp_path / f"{registered is None}.zarr", ddp) as capture:
            capture.wrap(None, allreduce_hook)
            ddp.register_comm_hook(registered, allreduce_hook)
            ddp(torch.ones(1, 8)).sum().backward()
            with pytest.raises(InputError, match="is not registered on the DDP model"):
                capture.step()


@pytest.mark.parametrize("plain", [False, True])
def test_a_scaler_that_the_capture_was_not_given_is_said_once(tmp_path, one_rank, plain):
    """Gradients are then recorded with the scale; with the scaler given they are not, and nothing is said."""
    largest = {}
    for known in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        ddp = net if plain else nn.parallel.DistributedDataParallel(net)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        path = tmp_path / f"{known}.zarr"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with Capture(path, ddp, scaler=scaler if known else None) as capture:
                if not plain:
                    ddp.register_comm_hook(*capture.wrap(None, allreduce_hook))
                for _ in range(3):
                    optimizer.zero_grad()
                    scaler.scale(ddp(torch.ones(1, 8)).sum()).backward()
                    capture.step()
                    scaler.step(optimizer)
                    scaler.update()
        said = [
            str(w.message)
            for w in said
            if "the gradients in the trace are scaled" in str(w.message)
        ]
        assert len(said) == (not known)
        largest[known] = abs(open_trace(path).read(0, 0)).max()
    assert largest[False] == 1024 * largest[True]


def test_with_a_scaler_a_step_ends_before_the_scaler_s(tmp_path):
    """Where gradients are unscaled already: refused if they would be unscaled again, and else recorded as they are."""
    net = nn.Linear(8, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train(capture, order):
        for factor in (1.0, 1.0, float("inf")):  # the last step is one that the scaler skips
            optimizer.zero_grad()
            scaler.scale(factor * net(torch.ones(1, 8)).sum()).backward()
            for call in order:
                call() if call == capture.step or call == scaler.update else call(optimizer)

    for name, order in {
        "late": (scaler.step, scaler.update, "step"),
        "unscaled": (scaler.unscale_, "step", scaler.step, scaler.update),
    }.items():
        for known in (scaler, None):
            with Capture(tmp_path / f"{name}{known is None}.zarr", net, scaler=known) as capture:
                calls = [capture.step if call == "step" else call for call in order]
                if known is None:  # and nothing is warned of
                    train(capture, calls)
                    continue
                with pytest.raises(
                    InputError, match=r"call capture.step\(\) before scaler.unscale_"
                ):
                    train(capture, calls)
            # what it has begun with the optimizer is over, or the next one could not begin
            scaler.update() if name == "unscaled" else None
        assert abs(open_trace(tmp_path / f"{name}True.zarr").read(1)).max() == 1


def test_gradients_of_earlier_steps_are_zeros(tmp_path):
    """Of parameters that were frozen since, or that another optimizer has in turn."""
    body, head, other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
    net = nn.ModuleList([body, head, other])
    with Capture(tmp_path / "a.zarr", net) as capture:
        for step in range(4):
            turn = head if step % 2 else other
            for p in turn.parameters():
                p.grad = None
            if body.weight.requires_grad:
                body.zero_grad()
            turn(body(torch.full((1, 4), step + 1.0))).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            capture.step()
            if step == 1:
                body.requires_grad_(False)  # with the gradient that it has
    trace = open_trace(tmp_path / "a.zarr")
    for step in range(4):
        assert trace.read(step, layer="0.weight").any() == (step < 2)
        assert trace.read(step, layer="1.weight").any() == (step % 2 == 1)
        assert trace.read(step, layer="2.weight").any() == (step % 2 == 0)


def test_a_last_exchange_that_no_optimizer_took_is_no_step(tmp_path, one_rank):
    """Nor is one before; who applies updates by hand has steps all the same."""
    for skipped, by_hand in (({1, 3}, False), (set(), False), (set(), True)):
        net = nn.Linear(4, 2)
        ddp = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        path = tmp_path / f"{len(skipped)}-{by_hand}.zarr"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Capture(path, ddp) as capture:  # steps are ended by the next exchange
                ddp.register_comm_hook(*capture.wrap(None, allreduce_hook))
                for step in range(4):
                    net.zero_grad()
                    ddp(torch.full((1, 4), step + 1.0)).sum().backward()
                    if step not in skipped and not by_hand:
                        optimizer.step()
        first = [open_trace(path).read(step)[0] for step in open_trace(path).steps()]
        assert first == [step + 1 for step in range(4) if step not in skipped]


def test_a_capture_that_stops_gives_its_memory_back(tmp_path, one_rank, monkeypatch):
    def full(*_, **__):
        raise TraceError("the disk is full")

    monkeypatch.setattr(TraceWriter, "append", full)
    net = nn.Linear(8, 8)
    ddp = nn.parallel.DistributedDataParallel(net)
    capture = Capture(tmp_path / "a.zarr", ddp)
    ddp.register_comm_hook(*capture.wrap(None, allreduce_hook))
    arrays = []

    def step():
        ddp(torch.ones(1, 8)).sum().backward()
        arrays.extend(map(weakref.ref, capture._recorder.arrays.values()))
        capture.step()

    step()
    while capture._recorder._background.error is None:
        time.sleep(0.01)
    with pytest.warns(CaptureWarning, match="the disk is full"):
        step()
    capture._recorder._background._done.wait()
    gc.collect()
    assert arrays
    assert not any(array() is not None for array in arrays)
    capture.close()


def test_a_layout_follows_a_model_that_changes():
    """It goes through the model anew for each change, wherever that is, and only then."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3)))
    layout = Layout(model)

    def follows():
        now, then = dict(model.named_parameters()), layout.named()
        return now.keys() == then.keys() and all(now[name] is then[name] for name in now)

    assert follows()
    assert layout.named() is layout.named()
    changes = (
        lambda: model[1].__setitem__(0, nn.Linear(3, 3)),
        lambda: model.add_module("head", nn.Linear(3, 1)),
        lambda: setattr(model[0], "bias", nn.Parameter(torch.ones(3))),
        lambda: model[1][0].register_parameter("bias", None),
        lambda: model[1][0].register_parameter("scale", nn.Parameter(torch.ones(1))),
        lambda: setattr(model, "0", nn.Identity()),
        lambda: delattr(model, "head"),
    )
    for change in changes:
        before = layout.named()
        change()
        assert follows()
        assert layout.named() is not before


def test_a_bucket_with_holes_in_the_trace_is_copied_parameter_by_parameter(tmp_path, one_rank):
    copied = []
    net = _conv_net(torch.channels_last)
    trace = _captured_conv(tmp_path / "a.zarr", net, copied, parameters=["*.weight"])
    assert not all(copied)
    assert [layer.name for layer in trace.layers] == [
        "0.weight",
        "1.weight",
        "3.weight",
        "5.weight",
    ]
    whole = _captured_conv(tmp_path / "b.zarr", _conv_net(torch.channels_last), [])
    places = {layer.name: layer.slice for layer in whole.layers}
    for step, kind in ((0, "gradient"), (3, "corrected")):
        expected = [whole.read(step, 0, kind)[places[layer.name]] for layer in trace.layers]
        assert np.array_equal(trace.read(step, 0, kind), np.concatenate(expected))
