"""Copies that go on by themselves, with streams that do nothing until somebody waits: there is no device here."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from capture import Capture, copies
from gradstats import backend, open_trace


class Streams:
    """A device's streams as a module: copies to a second stream wait until an event of it is waited for."""

    def __init__(self):
        self.pending = deque()
        self.log = []
        self.begun = self.ended = 0
        self.lock = Lock()

    def module(self):
        later = self

        class Deferred(TorchFunctionMode):
            def __torch_function__(self, function, types, arguments=(), options=None):
                if function.__name__ == "copy_" and (options or {}).pop("non_blocking", False):
                    assert arguments[0].dtype == arguments[1].dtype  # else the host would wait
                    assert later.log[-1] == "ordered"  # what the training does to it comes first
                    later.pending.append((arguments, function))
                    later.begun += 1
                    return arguments[0]
                return function(*arguments, **(options or {}))

        class Event:
            def record(self, stream):
                self.upto = later.begun

            def synchronize(self):
                later.log.append("waited")
                with later.lock:
                    while later.ended < self.upto:
                        arguments, copy = later.pending.popleft()
                        copy(*arguments)
                        later.ended += 1

        @contextmanager
        def stream(_):
            with Deferred():
                yield

        def made(device):
            return SimpleNamespace(wait_stream=lambda training: later.log.append("ordered"))

        return SimpleNamespace(
            Stream=made, Event=Event, stream=stream, current_stream=lambda device: None
        )


@pytest.fixture
def streams(monkeypatch):
    found = Streams()
    module = found.module()
    monkeypatch.setattr(copies, "streaming", lambda device: module)
    monkeypatch.setattr(copies, "_pinned", lambda size: torch.zeros(size))
    held = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: held.append(self), raising=False
    )
    found.held = held
    return found


def test_a_copy_is_of_the_gradient_as_it_was(streams):
    host = copies.Copies([torch.device("cpu")])
    place = host.zeros(3)
    gradient = torch.tensor([1.0, -2.0, 3.0])
    host.copy(gradient, place)
    gradient.zero_()  # the exchange writes into the bucket
    assert place.tolist() == [0, 0, 0]
    wait = host.mark()
    assert host.mark() is None
    wait()
    assert place.tolist() == [1, -2, 3]
    assert len(streams.held) == 1
    host.copy(gradient + 1, place, 2.0, wait=True)  # at once
    assert place.tolist() == [0.5] * 3


def test_small_elements_of_float16_outlive_a_large_loss_scale():
    host, gradient = copies.Copies(), torch.tensor([2.0**-14, -0.75, 1000.0], dtype=torch.float16)
    place = host.zeros(3)
    host.copy(gradient, place, 2.0**16)
    assert place.tolist() == [2.0**-30, -0.75 / 2**16, 1000 / 2**16]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_number_is_on_its_way_as_a_gradient_is(streams, shape):
    host = copies.Copies([torch.device("cpu")])
    loss = torch.full(shape, 3.0)
    place = host.number(loss)
    loss.zero_()
    assert place.tolist() == [0]
    host.mark()()
    assert place.tolist() == [3]
    with pytest.raises(ValueError, match="only one element"):
        host.number(torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_memory_is_float32_whatever_the_default_and_the_gradient_are(streams, monkeypatch, dtype):
    monkeypatch.undo()
    made = []
    # without a device there is no memory to pin
    monkeypatch.setattr(torch, "zeros", lambda *a, **o: made.append(o["dtype"]))
    copies._pinned(3)
    monkeypatch.undo()
    assert made == [torch.float32]
    monkeypatch.setattr(copies, "streaming", lambda device: streams.module())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None, raising=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        place = copies.Copies([torch.device("cpu")], stay=True).zeros(3)
    finally:
        torch.set_default_dtype(before)
    assert place.dtype == torch.float32
    host = copies.Copies([torch.device("cpu")])
    place = np.zeros(3, np.float32)
    host.copy(torch.tensor([1.0, -2.0, 3.0], dtype=dtype), place)
    host.mark()()
    assert place.tolist() == [1, -2, 3]


def test_what_is_in_memory_is_copied_at_once():
    host = copies.Copies([torch.device("cpu")])
    place = host.zeros(2)
    host.copy(torch.tensor([1.0, 2.0]), place)
    assert place.tolist() == [1, 2]
    assert host.mark() is None
    assert host.number(torch.tensor(3.0)) == host.number(3) == 3.0


def train(path, *, fails=False, **options):
    """Train four steps; the second fails if told so, and then the third has no gradient of the weight."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    gradients = []
    with Capture(path, model, buffers=1, **options) as capture:
        for step in range(4):
            model.weight.requires_grad_(not (fails and step == 2))
            loss = model(torch.randn(8, 5)).square().mean()
            loss.backward()
            if fails and step == 1:
                broken = patch.object(
                    capture._recorder, "_put_number", side_effect=ValueError("it failed")
                )
                with broken, pytest.raises(ValueError, match="it failed"):
                    capture.step(loss=loss)
            else:  # a capturable optimizer's learning rate is on the device, too
                capture.step(loss=loss, learning_rate=torch.tensor(0.1 * (step + 1)))
            if not (fails and step == 1):  # a step that failed does not count
                parts = [
                    torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()
                ]
                gradients.append(np.concatenate([p.reshape(-1) for p in parts]))
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
            loss.detach().zero_()
            model.zero_grad()
    assert capture._recorder._background._free.empty()  # pinned memory, or a device's, is not kept
    return gradients


@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_is_the_same(streams, tmp_path, fails, monkeypatch):
    """Also after a step that failed: what was on its way does not come into the next one."""
    expected = train(tmp_path / "there.zarr", fails=fails)
    assert "waited" in streams.log
    assert not streams.pending
    there = open_trace(tmp_path / "there.zarr")
    for step in there.steps():
        assert np.array_equal(there.read(step, 0, "gradient"), expected[step])
    monkeypatch.undo()
    train(tmp_path / "here.zarr", fails=fails)
    here = open_trace(tmp_path / "here.zarr")
    assert here.steps() == there.steps()
    assert np.array_equal(here.scalars()["loss"], there.scalars()["loss"])
    rates = there.scalars()["learning_rate"]
    np.testing.assert_allclose(rates, [0.1, 0.3, 0.4] if fails else [0.1, 0.2, 0.3, 0.4])


def test_sketches_are_made_where_the_gradient_is(streams, tmp_path, monkeypatch):
    with backend("torch"):
        train(tmp_path / "there.zarr", store="sketches")
    assert "waited" in streams.log
    assert streams.begun == 0  # nothing as large as the gradient went to the host
    monkeypatch.undo()
    train(tmp_path / "here.zarr", store="sketches")
    there, here = (open_trace(tmp_path / f"{name}.zarr") for name in ("there", "here"))
    assert there.steps() == here.steps()
    assert np.array_equal(here.scalars()["loss"], there.scalars()["loss"])
    for step in here.steps():
        for a, b in zip(*(trace.sketches(step) for trace in (there, here)), strict=True):
            assert np.array_equal(a.bins, b.bins)
            assert np.array_equal(a.counts, b.counts)
            assert a.moments.sum_abs == pytest.approx(b.moments.sum_abs, rel=1e-12)
            assert a.moments.max == b.moments.max
