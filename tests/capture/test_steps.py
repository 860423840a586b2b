"""What a step is, and what of it is there: exchanges that are no steps, gradients that are not where they were."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from forked import CONTEXT
from ranks import run_ranks
from torch import nn
from workers import captures, steps

from capture import Capture, CaptureWarning
from gradstats import moments, open_trace
from gradstats.errors import InputError, TraceError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning"),
]


def near(path, rank, gradients):
    """Check that a trace holds these gradients, in which NaN is what is marked, to the order of the sums."""
    trace = open_trace(path)
    assert trace.steps(rank) == list(range(len(gradients)))
    for step, gradient in enumerate(gradients):
        np.testing.assert_allclose(trace.read(step, rank), gradient, rtol=1e-4, atol=1e-6)
    return trace


@contextmanager
def recording():
    """Return the list that warnings come into."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    return folder, run_ranks(2, steps.trainings, str(folder))


def results(trained, name):
    """Yield the trace's folder, the rank, and what the training returned."""
    folder, everyone = trained
    for rank, each in enumerate(everyone):
        assert not (isinstance(each[name], str) and "Traceback" in each[name]), each[name]
        yield folder, rank, each[name]


@pytest.mark.distributed
def test_a_step_is_the_optimizers_however_often_gradients_are_exchanged(trained):
    for folder, rank, ways in results(trained, "accumulations"):
        for way, (gradients, said) in ways.items():
            trace = near(folder / f"{way}.zarr", rank, gradients)
            if way == "compressed":
                assert len(said) == 1
                assert "exchange once a step" in said[0]
            else:
                assert said == [], way
            if way not in ("never ended", "step of each"):
                assert trace.scalars(rank)["loss"].tolist() == [0, 1, 2]


@pytest.mark.distributed
def test_a_backward_pass_that_no_optimizer_takes_is_no_step(trained):
    for folder, rank, ways in results(trained, "passes"):
        for way, (gradients, said) in ways.items():
            trace = near(folder / f"{way}.zarr", rank, gradients)
            assert said
            assert all("generator's pass through a discriminator" in each for each in said), way
            losses = trace.scalars(rank)["loss"].tolist()
            # nobody had called step() yet when the first step was over
            first = [np.nan] if way == "passes after all" else [0]
            if way != "passes never":
                np.testing.assert_array_equal(losses, [*first, 1, 2])


@pytest.mark.distributed
def test_every_option_of_ddp_is_right_or_refused_by_name(trained):
    for folder, rank, (options, known) in results(trained, "options"):
        # options of newer releases need a line in workers/steps.py; these have nothing to do with exchanges
        tried = {"module", "device_ids", "output_device", "dim", "param_to_hook_all_reduce"}
        assert known <= tried | options.keys()
        assert options.pop("mixed_precision").startswith("InputError: DDP(mixed_precision=…)")
        for name, (gradients, said) in options.items():
            delayed = name == "delay_all_reduce_named_params"
            if delayed:
                gradients = [np.r_[g[:12300], g[-903:]] for g in gradients]
            assert (
                said
                == ["not captured: 2.weight, 2.bias, which DDP keeps out of its buckets"] * delayed
            )
            near(folder / f"option-{name}.zarr", rank, gradients)


@pytest.mark.distributed
def test_buckets_that_ddp_skips_are_zero(trained):
    for name in ("skipping", "later"):
        for folder, rank, (gradients, said) in results(trained, name):
            near(folder / f"{name}.zarr", rank, gradients)
            assert said == []


@pytest.mark.distributed
def test_parameters_that_ddp_ignores_are_left_out_by_name(trained):
    for folder, rank, (gradients, said) in results(trained, "ignored"):
        trace = near(folder / "ignored.zarr", rank, gradients)
        assert len(said) == 1
        assert said[0].startswith("not captured: scale, 4.bias, which DDP keeps out of its buckets")
        assert {"scale", "4.bias"}.isdisjoint(la.name for la in trace.layers)


@pytest.mark.distributed
def test_parameters_that_fsdp_ignores_are_left_out_by_name(trained):
    folder, everyone = trained
    own = [each["sharded"][0] for each in everyone]
    for _, rank, (gradient, said) in results(trained, "sharded"):
        trace = open_trace(folder / "sharded.zarr")
        assert len(said) == 1
        assert said[0].startswith("not captured: 4.bias, which fully_shard() leaves alone")
        assert "4.bias" not in [la.name for la in trace.layers]
        np.testing.assert_allclose(trace.read(0, rank, "local"), gradient, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(trace.read(0), np.mean(own, axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.distributed
def test_a_head_that_ddp_does_not_know_is_marked(trained):
    for folder, rank, (gradients, said) in results(trained, "swapped"):
        near(folder / "swapped.zarr", rank, gradients)
        assert len(said) == 1
        assert said[0].startswith("4.bias, 4.weight are NaN in the trace")


@pytest.mark.distributed
def test_a_parameter_that_is_unfrozen_behind_ddps_back_is_named(trained):
    for folder, rank, (gradients, said) in results(trained, "unfrozen"):
        near(folder / "unfrozen.zarr", rank, gradients)
        assert len(said) == 1
        assert said[0].startswith("4.bias is not captured")


@pytest.mark.distributed
def test_what_local_steps_do_not_exchange_is_marked(trained):
    for folder, rank, said in results(trained, "local steps"):
        assert len(said) == 1
        assert said[0].startswith("4.weight is NaN in the trace: the local steps do not exchange")
        trace = open_trace(folder / "local.zarr")
        for kind in ("gradient", "pseudogradient"):
            absent = np.isnan(trace.read(0, rank, kind))
            assert {la.name for la in trace.layers if absent[la.slice].any()} == {"4.weight"}
        # what is named in one interval is not of the next
        columns = trace.scalars(rank)
        assert np.array_equal(columns["loss"], [1, np.nan, 4], equal_nan=True)
        assert np.array_equal(columns["learning_rate"], [11, np.nan, 14], equal_nan=True)


@pytest.mark.distributed
def test_a_step_within_the_backward_pass_is_refused(trained):
    for folder, _, said in results(trained, "halfway"):
        assert said.startswith("InputError: capture.step() is called within a backward pass")
        assert not open_trace(folder / "halfway.zarr").ranks


@pytest.mark.distributed
def test_a_capture_on_one_rank_or_on_separate_disks_is_one_line_at_once(trained):
    for folder, rank, (said, waited, apart, other) in results(trained, "meeting"):
        if rank == 0:
            assert said.startswith("InputError: a Capture waited 1 s in vain for rank 1 (of 2)")
            assert "ranks=[0]" in said
            assert len(waited) == 1
            assert "not under `if rank == 0`" in waited[0]
        for name, message in (("run", apart), ("two", other)):
            assert message.startswith(
                f"TraceError: rank 0 has made {folder}/disk{rank}/{name}.zarr"
            )
            assert "rank 1 on" in message


@pytest.mark.distributed
def test_a_model_in_ddp_with_a_wrapped_capture_can_be_copied_and_saved(trained):
    for folder, rank, (gradients, states) in results(trained, "copied"):
        for each in gradients:
            np.testing.assert_allclose(each, gradients[-1], rtol=1e-5, atol=1e-7)
        assert states == [(False, True)] * 2
        assert open_trace(folder / "copied.zarr").steps(rank) == [0, 1]


def test_a_loss_that_is_no_number_is_a_warning(tmp_path):
    net = nn.Linear(4, 3)
    with Capture(tmp_path / "a.zarr", net, buffers=4) as capture, recording() as caught:
        for loss in (torch.ones(3), "low", torch.tensor(2.0)):
            net.zero_grad()
            net(torch.ones(2, 4)).sum().backward()
            capture.step(loss=loss, learning_rate=[0.1])
    scalars = open_trace(tmp_path / "a.zarr").scalars()
    assert np.isnan(scalars["loss"]).tolist() == [True, True, False]
    assert np.isnan(scalars["learning_rate"]).all()
    assert [m.partition(" takes")[0] for m in captures.messages(caught)] == [
        "capture.step(loss=…)",
        "capture.step(learning_rate=…)",
    ]


def test_several_ddp_models_in_one_are_refused(tmp_path, monkeypatch):
    """A pair of networks, of which each has a DDP of its own; one alone is found."""
    from torch.nn.parallel import DistributedDataParallel

    class Wrapped(DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module, self.parameters_to_ignore, self.mixed_precision = module, set(), None
            self.process_group, self._comm_hooks = None, []

        def __del__(self):
            pass

    pair = nn.ModuleDict({"a": Wrapped(nn.Linear(2, 2)), "b": Wrapped(nn.Linear(2, 2))})
    with pytest.raises(InputError, match="ModuleDict has 2 DDP models in it"):
        Capture(tmp_path / "a.zarr", pair)
    pair["a"] = pair["a"].module
    pair["b"]._comm_hooks = [(captures.powersgd_hook, None)]
    with pytest.raises(InputError, match="has a communication hook, powersgd_hook"):
        Capture(tmp_path / "a.zarr", torch.compile(pair, backend="eager"))


def test_a_number_is_given_to_a_trace_only_where_there_is_one_with_steps(tmp_path, monkeypatch):
    net = nn.Linear(4, 3)

    def begin(name="run.zarr", steps=1, **options):
        with Capture(tmp_path / name, net, **options) as capture:
            for _ in range(steps):
                net.zero_grad()
                net(torch.ones(2, 4)).sum().backward()
                capture.step()
        return capture.path.name

    with recording() as caught:
        assert begin(steps=0, overwrite="number") == "run.zarr"
        assert begin(overwrite="number") == "run.zarr"  # nothing is lost
        assert captures.messages(caught) == []
        assert begin(overwrite="number") == "run-2.zarr"
        assert begin(overwrite="number") == "run-3.zarr"
        assert begin("plain", overwrite="number") == "plain"
        assert begin("plain", overwrite="number") == "plain-2"
    assert len(captures.messages(caught)) == 3
    with pytest.raises(TraceError, match="overwrite=True"):
        begin()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.warns(CaptureWarning, match=r"captured in .*run-4\.zarr"):
        assert begin() == "run-4.zarr"
    assert open_trace(tmp_path / "run-4.zarr").steps() == [0]


@pytest.mark.distributed
def test_a_trace_that_is_captured_into_is_replaced_by_nobody(tmp_path):
    """Empty or not, by a training of this process or of another; once its process is gone, by all."""
    path, net = tmp_path / "run.zarr", nn.Linear(4, 3)
    first = Capture(path, net)
    with pytest.warns(CaptureWarning, match=r"or is written into: .* in .*run-2\.zarr"):
        second = Capture(path, net, overwrite="number")
    with pytest.raises(TraceError, match=r"another Capture writes into .*run\.zarr: end its"):
        Capture(path, net, overwrite=True)
    child = CONTEXT.Process(target=steps.held, args=(path, tmp_path / "said"))
    child.start()
    child.join()
    number, replaced = (tmp_path / "said").read_text("utf-8").split("\n")
    assert number == str(tmp_path / "run-3.zarr")
    assert replaced.startswith(f"TraceError: another Capture writes into {path}: end its training")
    assert open_trace(tmp_path / "run-3.zarr").steps() == []
    reads, writes = os.pipe()
    fork = os.fork()  # a data loader's worker, which outlives its training
    if not fork:
        os.write(writes, b"there")
        time.sleep(60)
        os._exit(0)
    assert os.read(reads, 5) == b"there"
    os.close(reads)
    os.close(writes)
    first.close()
    del second  # nobody has closed it
    gc.collect()
    # the last is that of a process that is gone
    for each in (path, tmp_path / "run-2.zarr", tmp_path / "run-3.zarr"):
        with recording() as caught, Capture(each, net, overwrite="number") as capture:
            assert capture.path == each
        assert captures.messages(caught) == []
        Capture(each, net, overwrite=True).close()
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)


def test_a_module_that_is_swapped_is_recorded_where_it_was_or_marked(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    with Capture(tmp_path / "a.zarr", net, buffers=8) as capture, recording() as caught:
        expected = []
        for step in range(8):
            if step in (2, 5):  # the same shape, then another
                net[2] = nn.Linear(5, 3 if step == 2 else 2)
            if step == 7:
                net[2] = nn.Linear(5, 3)
            net.zero_grad()
            net(torch.randn(9, 4)).square().mean().backward()
            capture.step()
            gradient = captures.flat([p.grad for p in net.parameters()])
            if step in (5, 6):
                gradient = np.r_[gradient[:25], np.full(18, np.nan)]
            expected.append(gradient)
    near(tmp_path / "a.zarr", 0, expected)
    said = captures.messages(caught)
    assert len(said) == 1
    assert said[0].startswith("2.weight, 2.bias are NaN in the trace")


def test_parameters_that_change_places_are_recorded_where_they_are(tmp_path):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    a, b, c = (layer.weight for layer in net)
    d = nn.Parameter(torch.randn(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        with Capture(tmp_path / "a.zarr", net, parameters=["*.weight"], buffers=8) as capture:
            expected = []
            for places in ((a, b, c), (b, a, c), (c, b, a), (c, b, d), (a, b, d)):
                for layer, weight in zip(net, places, strict=True):
                    layer.weight = weight
                net.zero_grad()
                net(torch.randn(9, 3)).square().mean().backward()
                capture.step()
                expected.append(captures.flat([layer.weight.grad for layer in net]))
    near(tmp_path / "a.zarr", 0, expected)


def test_another_models_gradient_is_recorded_once(tmp_path):
    net, other = nn.Linear(4, 3), nn.Linear(4, 3)
    gradients = []
    with Capture(tmp_path / "a.zarr", net, schedule=[0, 2], buffers=4) as capture:
        with recording() as caught:
            for _ in range(3):
                other(torch.randn(2, 4)).sum().backward()  # and adds to the one before
                capture.step(other)
                gradients.append(captures.flat([p.grad for p in other.parameters()]))
        assert captures.messages(caught) == []
        with pytest.warns(CaptureWarning, match="found no gradient of a new backward pass"):
            capture.step(other)
    trace = open_trace(tmp_path / "a.zarr")
    assert trace.steps() == [0, 2]
    assert all(np.array_equal(trace.read(s), gradients[s].astype(np.float32)) for s in (0, 2))


def test_gradients_that_an_optimizer_takes_in_the_backward_pass_are_marked(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Linear(7, 7))

    def take(parameter):
        parameter.grad = None

    net[0].weight.register_post_accumulate_grad_hook(take)
    with Capture(tmp_path / "a.zarr", net, buffers=4) as capture, recording() as caught:
        net[2].bias.register_post_accumulate_grad_hook(take)  # after the capture's own hook
        for _ in range(2):
            net.zero_grad()
            net[:3](torch.randn(9, 4)).square().mean().backward()
            capture.step()
    trace = open_trace(tmp_path / "a.zarr")
    sums = moments(trace.read(1))
    assert sums.nonfinite == 23
    assert 0 < sums.sum_abs < np.inf
    for step in (0, 1):
        missing = {la.name for la in trace.layers if np.isnan(trace.read(step)[la.slice]).any()}
        assert missing == {"0.weight", "2.bias"}
        assert not trace.read(step)[trace.layers[-1].slice].any()  # not used: zero
    assert len(captures.messages(caught)) == 1


def test_a_step_within_a_plain_backward_pass_is_refused(tmp_path):
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    with Capture(tmp_path / "a.zarr", net) as capture:
        net[1].weight.register_post_accumulate_grad_hook(lambda _: capture.step())
        with pytest.raises(InputError, match="within a backward pass"):
            net(torch.ones(2, 4)).sum().backward()


def test_a_gradient_of_autograd_grad_is_none_of_the_step(tmp_path):
    """It is asked for between backward passes, for a penalty say, and adds nothing to `.grad`."""
    net = nn.Linear(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Capture(tmp_path / "a.zarr", net) as capture:
            net(torch.ones(2, 4)).sum().backward()
            torch.autograd.grad(net(torch.ones(2, 4)).sum(), list(net.parameters()))
            capture.step()
    near(tmp_path / "a.zarr", 0, [captures.flat([p.grad for p in net.parameters()])])
