"""Captures of ordinary trainings: what autograd left is stored, element for element, or nothing is."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from support.every import every
from support.programs import program
from support.traces import flat_gradient, train
from torch import nn
from workers import captures as cases

from capture import Capture, CaptureWarning
from gradstats import open_trace
from gradstats.errors import InputError

pytestmark = [
    # These models train faster than any disk writes.
    pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning"),
]


def holds(path, rank, gradients, residuals=None):
    """Check that a trace holds these gradients from step 0 on, and, if given, gradients plus residuals."""
    trace = open_trace(path)
    assert trace.steps(rank) == list(range(len(gradients)))
    for step, gradient in enumerate(gradients):
        stored = trace.read(step, rank)
        assert np.array_equal(stored, gradient.astype(np.float32), equal_nan=True), step
        if residuals is not None:  # added in the gradient's precision
            expected = (gradient + residuals[step].astype(gradient.dtype)).astype(np.float32)
            stored = trace.read(step, rank, "corrected")
            assert np.array_equal(stored, expected, equal_nan=True), step
    return trace


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    return folder, run_ranks(2, cases.recorded, str(folder))


@pytest.mark.distributed
@every("name", list(cases.RECORDED))
def test_what_autograd_left_is_stored(recorded, name):
    folder, results = recorded
    for rank, each in enumerate(results):
        assert not isinstance(each[name], str), each[name]
        gradients, residuals = each[name]
        if residuals[0] is None:
            holds(folder / f"{name}.zarr", rank, gradients)
        else:
            holds(folder / f"{name}.zarr", rank, gradients, residuals)
            assert any(r.any() for r in residuals)


@pytest.mark.distributed
def test_complex_parameters_have_their_parts_as_a_last_dimension(recorded):
    folder, _ = recorded
    assert [la.shape for la in open_trace(folder / "complex.zarr").layers] == [(40, 5, 2), (5,)]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["dense", "both", "state"])
def test_the_loss_scale_is_not_in_the_trace(tmp_path, kind):
    """Scales are powers of two, so the bits are those of a training without one."""
    for rank, (gradients, residuals, scales) in enumerate(
        run_ranks(2, cases.scaled, str(tmp_path / "a.zarr"), kind)
    ):
        assert len(set(scales)) > 3
        assert not np.isfinite(gradients[0]).all()
        assert np.isfinite(gradients[-1]).all()
        if kind == "dense":
            holds(tmp_path / "a.zarr", rank, gradients)
        else:
            holds(tmp_path / "a.zarr", rank, gradients, residuals)
            assert residuals[-1].any()


@pytest.mark.distributed
def test_a_step_before_backward_warns_once_and_stores_no_loss(tmp_path):
    for rank, (gradients, said) in enumerate(
        run_ranks(2, cases.misplaced, str(tmp_path / "a.zarr"))
    ):
        assert len(said) == 1
        assert "call it once per iteration, after backward()" in said[0]
        trace = holds(tmp_path / "a.zarr", rank, gradients)
        assert np.isnan(trace.scalars(rank)["loss"]).all()
        assert np.isnan(trace.scalars(rank)["learning_rate"]).all()


@pytest.mark.distributed
def test_a_hook_that_is_not_wrapped_is_refused_with_the_line_to_write(tmp_path):
    line = "ddp.register_comm_hook(*capture.wrap(state, compression_hook))"
    for rank, (*said, without, mean) in enumerate(run_ranks(2, cases.unwrapped, str(tmp_path))):
        assert len(said) == 4
        for message in said:
            assert message.startswith("InputError: ")
            assert line in message
        assert without == ""
        np.testing.assert_allclose(open_trace(tmp_path / "4.zarr").read(0, rank), mean, rtol=1e-6)
    assert not (tmp_path / "1.zarr").exists()
    assert all(not open_trace(tmp_path / f"{case}.zarr").ranks for case in (0, 3))


@pytest.mark.distributed
def test_no_sync_around_backward_alone_is_noticed(tmp_path):
    for half, whole in run_ranks(2, cases.half_no_sync, str(tmp_path)):
        assert len(half) == 1
        assert "put the forward pass into it too" in half[0]
        assert whole == []
    assert open_trace(tmp_path / "False.zarr").steps(0) == [0, 1, 2, 3]
    assert open_trace(tmp_path / "True.zarr").steps(0) == [0, 1]


@pytest.mark.distributed
def test_a_state_without_names_gets_them_or_a_warning_says_what_to_pass(tmp_path):
    for rank, said in enumerate(run_ranks(2, cases.numbered, str(tmp_path / "a.zarr"))):
        stored = open_trace(tmp_path / "a.zarr").layer_compression(rank)
        known = not all(np.isnan(column).all() for column in stored.values())
        assert known == (not said)
        assert all("give it named_parameters=model.named_parameters()" in each for each in said)


@pytest.mark.distributed
def test_an_unclosed_capture_is_finished_when_it_is_collected(tmp_path):
    assert run_ranks(2, cases.forgotten, str(tmp_path / "a.zarr")) == [[], []]
    for rank in (0, 1):
        assert open_trace(tmp_path / "a.zarr").steps(rank) == list(range(cases.STEPS))


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["middle", "middle-topk", "nan", "future"])
def test_a_step_that_failed_is_not_stored(tmp_path, how):
    for rank, (error, gradients) in enumerate(
        run_ranks(2, cases.failed, str(tmp_path / "a.zarr"), how)
    ):
        assert error
        assert len(gradients) == 2
        holds(tmp_path / "a.zarr", rank, gradients)


@pytest.mark.distributed
def test_a_step_in_which_a_rank_was_lost_is_not_stored(tmp_path):
    with pytest.raises(FileNotFoundError):  # no rank returns
        run_ranks(2, cases.lost, str(tmp_path / "a.zarr"))
    assert Path(tmp_path / "a.zarr.error").read_text(encoding="utf-8") == "ExchangeError"
    assert open_trace(tmp_path / "a.zarr").steps(0) == [0, 1]


@pytest.mark.distributed
@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_without_inputs_left_has_no_more_steps(tmp_path, ends):
    # it takes part in the others' exchanges with zeros, which are nobody's gradient
    path = tmp_path / "a.zarr"
    for rank, (gradients, said) in enumerate(run_ranks(2, cases.uneven, str(path), ends)):
        assert not said
        assert len(gradients) == 2 + 2 * rank
        holds(path, rank, gradients)


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["skip", "propagate"])
def test_a_step_hidden_by_policy_is_stored_as_it_was(tmp_path, policy):
    for rank, (gradients, records) in enumerate(
        run_ranks(2, cases.hidden, str(tmp_path / "a.zarr"), policy)
    ):
        scalars = holds(tmp_path / "a.zarr", rank, gradients).scalars(rank)
        assert [bool(r.problem) for r in records] == [False, False, True, False]
        assert scalars["selected"].tolist() == [r.selected for r in records]
        assert scalars["selected"][2] == 0
        assert np.isnan(scalars["threshold"]).tolist() == [False, False, True, False]
        norms = open_trace(tmp_path / "a.zarr").compression(rank)["residual_norm"]
        assert np.isnan(norms).tolist() == [False, False, True, False]


@pytest.mark.distributed
def test_every_error_in_creating_a_trace_reaches_all_ranks_at_once(tmp_path):
    started = time.monotonic()
    first, second = run_ranks(2, cases.creation, str(tmp_path))
    assert time.monotonic() - started < 50
    assert first == second
    for message in first:
        assert message.startswith("TraceError: ")
        assert "\n" not in message


@pytest.mark.distributed
def test_groups_and_several_models_have_a_capture_each(tmp_path):
    for rank, gradients in enumerate(run_ranks(4, cases.in_groups, str(tmp_path))):
        for i, expected in enumerate(gradients):
            path = tmp_path / f"group{rank // 2}-model{i}.zarr"
            assert holds(path, rank % 2, expected).world_size == 2
            assert open_trace(path).ranks == [0, 1]


@pytest.mark.distributed
def test_a_parameter_unfrozen_later_is_left_out_with_a_warning(tmp_path):
    for rank, (gradients, said) in enumerate(
        run_ranks(2, cases.unfrozen, str(tmp_path / "a.zarr"))
    ):
        assert len(said) == 1
        assert said[0].startswith("0.weight is not captured")
        holds(tmp_path / "a.zarr", rank, gradients)


# Plain loops


@pytest.mark.parametrize("name", ["channels_last", "complex", "sparse", "float64"])
def test_a_plain_loop_stores_logical_order(tmp_path, name):
    make, loss_of, *_ = cases.RECORDED[name]
    net, gradients = make(), []
    with Capture(tmp_path / "a.zarr", net, buffers=3) as capture:
        for step in range(3):
            net.zero_grad()
            loss_of(net, 0, step).backward()
            gradients.append(cases.flat([p.grad for p in net.parameters()]).copy())
            capture.step()
    holds(tmp_path / "a.zarr", 0, gradients)
    assert len({g.tobytes() for g in gradients}) == 3


def test_a_lazily_conjugated_gradient_is_stored(tmp_path):
    net = nn.Module()
    net.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with Capture(tmp_path / "a.zarr", net) as capture:
        net.weight.grad = torch.tensor([1 + 2j, 3 - 1j, 0]).conj()
        capture.step()
    assert open_trace(tmp_path / "a.zarr").read(0).tolist() == [1, -2, 3, 1, 0, 0]


def plain(path, order, *, set_to_none=True):
    """Train with the calls in this order; return gradients, what was warned of, and the trace."""
    torch.manual_seed(0)
    net = nn.Linear(40, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    gradients, loss = [], torch.zeros(())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Capture(path, net, buffers=4) as capture:
            for step in range(4):
                for call in order.split():
                    if call == "zero":
                        optimizer.zero_grad(set_to_none=set_to_none)
                    elif call == "forward":
                        loss = cases.plain_loss(net, 0, step)
                    elif call == "backward":
                        loss.backward()
                        gradients.append(flat_gradient(net).copy())
                    elif call == "optimize":
                        optimizer.step()
                    else:
                        capture.step(loss=loss)
    said = [str(w.message) for w in caught if "slower" not in str(w.message)]
    return gradients, said, open_trace(path)


@every("set_to_none", [True, False])
@every(
    ("order", "stored"),
    [
        ("zero forward STEP backward optimize", 0),
        ("forward STEP backward optimize zero", 0),
        ("forward backward optimize zero STEP", 0),
        # the last iteration's gradient: stored as that, but with no loss
        ("forward STEP zero backward optimize", 3),
        ("STEP zero forward backward optimize", 3),
    ],
)
def test_a_misplaced_step_in_a_plain_loop(tmp_path, order, stored, set_to_none):
    gradients, said, trace = plain(tmp_path / "a.zarr", order, set_to_none=set_to_none)
    assert len(said) == 1
    assert "call it once per iteration, after backward()" in said[0]
    assert len(trace.steps() if trace.ranks else []) == stored
    for step in range(stored):
        assert np.array_equal(trace.read(step), gradients[step])
        assert np.isnan(trace.scalars()["loss"][step])


@pytest.mark.parametrize("order", ["zero forward backward STEP optimize"] * 1)
def test_a_well_placed_step_is_not_doubted(tmp_path, order):
    gradients, said, trace = plain(tmp_path / "a.zarr", order, set_to_none=False)
    assert said == []
    assert trace.steps() == [0, 1, 2, 3]
    assert all(np.array_equal(trace.read(s), gradients[s]) for s in range(4))


def test_gradients_set_by_hand_and_gradients_of_zero_are_stored(tmp_path):
    net = nn.Linear(3, 2)
    with Capture(tmp_path / "a.zarr", net) as capture:
        for step in range(3):
            for p in net.parameters():
                p.grad = torch.full_like(p, step + 1.0)
            capture.step()
        net.zero_grad()
        (net(torch.ones(1, 3)) * 0).sum().backward()
        capture.step()
    trace = open_trace(tmp_path / "a.zarr")
    assert [trace.read(s)[0] for s in trace.steps()] == [1, 2, 3, 0]


def test_a_plain_loop_with_a_loss_scaler(tmp_path):
    net = nn.Linear(40, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    gradients = []
    with Capture(tmp_path / "a.zarr", net, scaler=scaler, buffers=4) as capture:
        for step in range(4):
            optimizer.zero_grad()
            gradients.append(cases.alone(net, lambda m, s=step: cases.plain_loss(m, 0, s)))
            scaler.scale(cases.plain_loss(net, 0, step)).backward()
            capture.step()
            scaler.unscale_(optimizer)
            if step == 3:
                net.weight.grad += 1
                with pytest.raises(InputError, match=r"before scaler\.unscale_"):
                    capture.step()
            scaler.step(optimizer)
            scaler.update()
    holds(tmp_path / "a.zarr", 0, gradients)


def test_a_parameter_unfrozen_in_a_plain_loop(tmp_path):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    with Capture(tmp_path / "a.zarr", net, parameters=["*.weight"]) as capture:
        net(torch.ones(1, 3)).sum().backward()
        capture.step()
        net[0].requires_grad_(True)
        net.zero_grad()
        net(torch.ones(1, 3)).sum().backward()
        with pytest.warns(CaptureWarning, match=r"0\.\w+ is not captured"):
            capture.step()
    assert [la.name for la in open_trace(tmp_path / "a.zarr").layers] == ["1.weight"]


def test_models_under_capture_can_be_copied_saved_and_collected(tmp_path):
    net = nn.Linear(40, 3)
    capture = Capture(tmp_path / "a.zarr", net)
    train(capture, net, 2)
    assert torch.equal(copy.deepcopy(net).weight, net.weight)
    assert torch.equal(pickle.loads(pickle.dumps(net)).weight, net.weight)
    capture.close()
    assert not net.weight._post_accumulate_grad_hooks


def capture_threads():
    return [t for t in threading.enumerate() if t.name == "gradstats-capture"]


def test_an_unclosed_capture_in_a_plain_loop(tmp_path):
    before = len(capture_threads())

    def forget():
        net = nn.Linear(40, 3)
        train(Capture(tmp_path / "a.zarr", net, buffers=2), net, 5)

    forget()
    gc.collect()
    assert len(capture_threads()) == before
    assert open_trace(tmp_path / "a.zarr").steps() == [0, 1, 2, 3, 4]


INTERRUPTED = """
import os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
import torch
import gradstats
from capture import Capture
from gradstats.trace import TraceWriter
gradstats.warm_up()  # a thread that is loading code when the interpreter ends makes its status 1
original = TraceWriter.append
def slow(self, *args, **kwargs):
    time.sleep(0.3)
    original(self, *args, **kwargs)
TraceWriter.append = slow
model = torch.nn.Linear(3, 2)
capture = Capture({path!r}, model, buffers=8, {option})
for step in range(5):
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    capture.step()
for n in range({times}):
    threading.Timer(0.4 + 0.3 * n, os.kill, (os.getpid(), signal.SIGINT)).start()
capture.close()
"""


@pytest.mark.parametrize(
    ("times", "option"),
    [(1, "store='gradients'"), (2, "store='sketches'"), (2, "dtype='bfloat16'")],
)
def test_an_interrupt_while_closing_waits_for_what_is_queued(tmp_path, times, option):
    stored = range(5, 6) if times == 1 else range(1, 5)
    script = INTERRUPTED.format(path=str(tmp_path / "a.zarr"), times=times, option=option)
    done = program("-c", script, check=False)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert "press Ctrl-C again to lose it" in done.stderr
    assert len(open_trace(tmp_path / "a.zarr").steps()) in stored


def test_errors_between_borrowing_and_submitting_do_not_block_the_training(tmp_path):
    net = nn.Linear(40, 3)
    capture = Capture(tmp_path / "a.zarr", net, buffers=2)
    failures = []

    def run():
        warnings.simplefilter("ignore")
        train(capture, net, 1)
        other = nn.Sequential(nn.Linear(40, 3))
        wide = nn.Linear(50, 3)
        wide(torch.ones(1, 50)).sum().backward()
        for arguments in ({"model": other}, {"model": wide}, {"loss": torch.ones(2)}) * 2:
            net(torch.ones(1, 40)).sum().backward()
            try:
                capture.step(**arguments)
            except (InputError, RuntimeError, TypeError, ValueError) as error:
                failures.append(error)
        train(capture, net, 3)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert len(failures) == 4  # what is no loss is a warning
    capture.close()
    trace = open_trace(tmp_path / "a.zarr")
    assert trace.steps() == [0, 1, 2, 3, 4, 5]
    assert np.isnan(trace.scalars()["loss"][1:3]).all()


def test_a_state_that_raises_does_not_block_the_training(tmp_path):
    """In a wrapped hook, called as DDP does."""

    class Bucket:
        def __init__(self, net):
            self.net = net

        def index(self):
            return 0

        def is_last(self):
            return True

        def buffer(self):
            return torch.ones(sum(p.numel() for p in self.net.parameters()))

        def parameters(self):
            return list(self.net.parameters())

        def gradients(self):
            parameters = self.parameters()
            parts = self.buffer().split([p.numel() for p in parameters])
            return [g.view_as(p) for g, p in zip(parts, parameters, strict=True)]

    class State:
        broken = True

        def corrected(self, parameter, gradient):
            if self.broken:
                raise ArithmeticError("broken")
            return gradient

    def inner(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    net, state = nn.Linear(3, 2), State()
    with Capture(tmp_path / "a.zarr", net, buffers=2) as capture:
        _, hook = capture.wrap(state, inner)
        for _ in range(3):
            with pytest.raises(ArithmeticError):
                hook(capture, Bucket(net))
        state.broken = False
        hook(capture, Bucket(net))
        capture.step(loss=0.5)
    trace = open_trace(tmp_path / "a.zarr")
    assert trace.steps() == [0]
    assert trace.scalars()["loss"].tolist() == [0.5]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_in_training_loses_nothing(tmp_path):
    net = nn.Linear(40, 3)

    def interrupted():
        with Capture(tmp_path / "a.zarr", net, buffers=4) as capture:
            train(capture, net, 3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert open_trace(tmp_path / "a.zarr").steps() == [0, 1, 2]
