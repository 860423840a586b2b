"""An exchange is not an optimizer's step: several into one gradient, and updates that nobody applies."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from workers import exchanges

from gradstats.compressors import TopK, make_compressor
from gradstats.errors import InputError, NonFiniteGradientError
from gradstats.hooks import (
    AdamCorrection,
    CompressionState,
    ErrorFeedback,
    LocalSteps,
    MomentumCorrection,
    compression_hook,
)
from gradstats.hooks.applied import Applied
from gradstats.hooks.step import backed_off

pytestmark = pytest.mark.distributed


def test_micro_steps_that_exchange_train_as_dense_ones():
    for found in run_ranks(2, exchanges.micro_steps):
        assert len(found) == 2 * len(exchanges.TRAININGS)
        assert {case: error for case, error in found.items() if not error < 1e-5} == {}


@pytest.mark.parametrize("nesterov", [False, "dgc", "redsync"])
def test_momentum_of_a_step_in_parts_is_that_of_its_sum(nesterov):
    slot, found = slice(0, 3), []
    gradients = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    for in_parts in (True, False):
        memory = MomentumCorrection(0.9, nesterov=nesterov)
        memory.allocate(3, torch.device("cpu"))
        memory.allocate_dense(0, torch.device("cpu"))
        for step in gradients:
            for i, part in enumerate(step if in_parts else [step.sum(0)]):
                memory.add(part, slot, i > 0)
                memory.settle(memory.corrected, torch.arange(0))  # nothing is sent
        found.append(memory.tensors())
    parts, whole = found
    assert len(parts) == 2
    for name, each in parts.items():
        assert torch.allclose(each, whole[name], rtol=1e-5), name


def test_a_residual_decays_once_a_step():
    memory = ErrorFeedback(0.5)
    memory.allocate(2, torch.device("cpu"))
    for further, kept in ((False, [1.0, 3.0]), (True, [2.0, 6.0]), (False, [2.0, 6.0])):
        memory.add(torch.tensor([1.0, 3.0]), slice(0, 2), further)
        assert memory.corrected.tolist() == kept
        memory.settle(memory.corrected, torch.arange(0))


def test_autograd_grad_of_the_parameters_changes_nothing():
    for found in run_ranks(2, exchanges.looked_at):
        for to_none in (True, False):
            (plain, steps), (looked_at, same) = (found[to_none, looks] for looks in (False, True))
            assert torch.equal(plain, looked_at), to_none
            # of three that nobody applied two are taken back: the next exchange would take the last
            assert steps == same == 10


def test_adam_refuses_a_step_in_parts():
    for part, after_a_step in run_ranks(2, exchanges.micro_steps_of_adam):
        assert part.startswith("InputError: AdamCorrection has made a step of a part of this")
        assert after_a_step == ""


def test_error_feedback_loses_nothing_of_what_is_applied():
    for found in run_ranks(2, exchanges.conserved):
        assert found == dict.fromkeys(found, pytest.approx(0, abs=1e-5))
        assert set(found) == {"two passes", "gan", "skipped", "sam", "several losses", "two heads"}


def test_a_discarded_update_is_said_once():
    for skips, steps in run_ranks(2, exchanges.said_once):
        (message,) = skips
        assert message.startswith("no optimizer took the update of step 1 before")
        assert "pass discard_unapplied=False" in message
        assert steps == []


def test_a_part_of_an_update_that_is_zeroed_is_said_once():
    """Where another optimizer steps and this one's gradients are zeroed, error feedback takes for sent what is lost."""
    for lost, cut_off in run_ranks(2, exchanges.what_is_lost):
        (message,) = lost
        assert message.startswith("the update of parts.body.weight in step 2 was zeroed before its")
        assert "set its requires_grad to False, or detach its output" in message
        assert cut_off == []


def test_parts_that_take_turns_lose_nothing_or_say_so():
    for said, missing in run_ranks(2, exchanges.turns, False):
        assert said == []
        assert missing < 1e-6
    for said, missing in run_ranks(2, exchanges.turns, True):
        (message,) = said
        assert "it is lost" in message
        assert message.endswith("take turns, leave DDP's gradient_as_bucket_view off")
        assert missing > 1e-3


def test_a_scaler_that_the_state_was_not_given_is_said_once():
    for (given, missing, off), refused in run_ranks(2, exchanges.scalers):
        (message,) = missing
        assert "this state was not given it" in message
        assert (given, off) == ([], [])
        assert refused.startswith("NonFiniteGradientError: ")


def test_a_discarded_step_leaves_no_bit():
    for same in run_ranks(2, exchanges.discarded):
        assert same == dict.fromkeys(same, True)


@pytest.mark.filterwarnings("error")  # such as the one of an update that no optimizer took
@pytest.mark.parametrize("applied", [False, True])
def test_a_checkpoint_leaves_no_exchange_to_take_back(one_rank, applied):
    """The exchange before it is of a training that nobody goes on with, applied or not."""
    torch.manual_seed(0)
    net = torch.nn.Linear(30, 20)
    ddp, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), 0.1)
    state = CompressionState(TopK(0.1), named_parameters=net.named_parameters())
    ddp.register_comm_hook(state, compression_hook)

    def exchange(step):
        optimizer.zero_grad()
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(step))
        ddp(x).square().sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    exchange(0)
    optimizer.step()
    weights, saved = copy.deepcopy(net.state_dict()), state.state_dict()
    expected = exchange(1)
    optimizer.step()
    exchange(2)
    if applied:
        optimizer.step()
    net.load_state_dict(weights)
    state.load_state_dict(saved)
    if applied:
        state.discard()
    again = state.state_dict()
    assert again["rank0"]["contents"] == saved["rank0"]["contents"]
    assert (state.step, state.last) == (1, None)
    assert all(map(torch.equal, exchange(1), expected))
    assert state.step == 2


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_discards_what_it_skips_for_another_model_alone(fused, apart):
    assert run_ranks(2, exchanges.overflow_elsewhere, fused, apart) == [(True, True, True)] * 2


def test_what_one_of_two_fused_optimizers_takes_is_applied():
    applied, parameters = Applied(), [torch.zeros(2, requires_grad=True) for _ in range(2)]
    applied.watch(parameters)
    for overflows, stepped in (([0.0, 1.0], True), ([1.0, 0.0], True), ([1.0, 1.0], False)):
        applied.begin()
        for parameter, overflow in zip(parameters, overflows, strict=True):
            optimizer = torch.optim.SGD([parameter], 0.1, fused=True)
            optimizer.found_inf = torch.tensor(overflow)  # as GradScaler sets it
            applied.after(optimizer, {id(parameter)})
        assert applied.stepped is stepped
    assert applied.known


def test_a_scale_that_falls_otherwise_is_no_overflow():
    # a scale is a float32: 0.7 times another is a rounded one
    for factor, fallen in ((0.5, 512.0), (0.7, float(np.float32(0.7 * 1024)))):
        scaler = torch.amp.GradScaler("cpu", backoff_factor=factor)
        scales = {1024.0: False, fallen: True, 256.0: False, 1000.0: False, 2048.0: False}
        assert {now: backed_off(scaler, 1024.0, now) for now in scales} == scales
    assert not backed_off(None, 1024.0, 512.0)


def test_units_of_a_sharded_model():
    for close, same, broken_off in run_ranks(4, exchanges.shards):
        assert close < 1e-5
        assert same == [True, True]
        # the unit that failed has not counted the step, those before it have
        assert broken_off.pop("one left") == (2, 3)
        assert broken_off == dict.fromkeys(broken_off, True)


def test_local_steps_go_back():
    assert run_ranks(2, exchanges.local) == [[(1, True, True, True), (1, True, True, True)]] * 2


def test_the_loss_scale_is_asked_for_once_a_step(one_rank, monkeypatch):
    asked = []
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    get = scaler.get_scale
    monkeypatch.setattr(scaler, "get_scale", lambda: asked.append(1) or get())
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2))
    state = CompressionState(TopK(0.5), scaler=scaler)
    ddp.register_comm_hook(state, compression_hook)
    for step in range(1, 4):
        scaler.scale(ddp(torch.ones(1, 3)).sum()).backward()
        # an accelerator would wait each time
        assert (state.step, len(asked)) == (step, step)


def test_an_optimizer_that_failed_in_its_closure_takes_nothing(one_rank):
    net = torch.nn.Linear(3, 2)
    ddp = DistributedDataParallel(net)
    state = CompressionState(TopK(0.5))
    ddp.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def backward(factor=1.0):
        optimizer.zero_grad()
        (factor * ddp(torch.ones(1, 3)).sum()).backward()

    optimizer.step(backward)
    with pytest.raises(NonFiniteGradientError):
        optimizer.step(lambda: backward(float("nan")))
    backward()
    assert state.step == 2
    # nothing has taken that one
    with pytest.warns(UserWarning, match="no optimizer took the update of step 1"):
        backward()
    assert state.step == 2


def test_an_optimizer_given_twice_is_one(one_rank):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with LocalSteps(net, [optimizer, optimizer], steps=2) as local:
        for _ in range(4):
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        assert local.exchanges == 2


def test_one_step_takes_gradients_of_sparse_embeddings(one_rank):
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Embedding(5, 2, sparse=sparse)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with LocalSteps(net, optimizer, steps=1):
            for words in ([0, 3, 3], [1, 3, 4]):
                optimizer.zero_grad()
                net(torch.tensor(words)).square().sum().backward()
                optimizer.step()
        found.append(net.weight.detach().clone())
    assert torch.equal(*found)


def test_sparse_gradients_that_are_averaged_are_in_the_bytes_of_every_step(one_rank):
    """As many as those of the same table as a dense gradient, also where the step is refused."""
    sent = {}
    for sparse in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Embedding(50, 4, sparse=sparse), torch.nn.Linear(4, 30))
        ddp = DistributedDataParallel(net)
        state = CompressionState(
            TopK(0.25),
            named_parameters=net.named_parameters(),
            exclude=["0.weight"],
            nonfinite="skip",
        )
        ddp.register_comm_hook(state, compression_hook)
        sent[sparse] = []
        for factor in (1.0, float("nan"), 2.0):
            net.zero_grad()
            (factor * ddp(torch.tensor([1, 3, 3])).square().sum()).backward()
            assert bool(state.last.problem) == (factor != factor)
            sent[sparse].append(state.last.bytes_sent)
    table = 4 * 50 * 4
    assert sent[True][::2] == sent[False][::2]
    assert min(sent[True][::2]) > table
    # the table's mean travels by itself, before anybody knows that the step is refused
    assert sent[True][1] - sent[False][1] == table


def test_a_closure_takes_its_updates():
    for exchanged, evaluated in run_ranks(2, exchanges.within_a_closure):
        assert exchanged == evaluated


def test_warnings_point_at_the_users_lines():
    assert run_ranks(1, exchanges.pointed_at) == [
        ["loss_of(net, rank, step).backward()", "capture.step()"]
    ]


def test_adam_behind_sparse_error_feedback_is_said_once():
    for found in run_ranks(2, exchanges.adaptive):
        for name, messages in found.items():
            # AdamW behind Adam's own steps is another mistake
            assert len(messages) == (name in ("feedback", "momentum", "adam")), (name, messages)
        assert "the momentum counts twice" in found["adam"][0]
        assert found["momentum"][0].startswith("AdamW behind sparse error feedback")
        assert found["feedback"][0].startswith("AdamW behind sparse error feedback")
        assert "memory=AdamCorrection() with SGD" in found["feedback"][0]


def test_a_state_with_a_group_can_be_copied():
    assert run_ranks(2, exchanges.copied) == [True, True]


def test_a_compressor_without_a_ratio_needs_none():
    assert make_compressor("none") is None
    assert make_compressor("dense-bf16").ratio is None
    assert make_compressor("ef-signsgd").ratio is None
    for name in ("topk", "micro", "threshold:dgc"):
        with pytest.raises(InputError, match="give it a ratio"):
            make_compressor(name)


def test_tied_weights_have_one_place():
    assert run_ranks(2, exchanges.tied) == [[(80, 8, [80])] * 2] * 2


@pytest.mark.parametrize("memory", [MomentumCorrection(0.9), AdamCorrection()])
def test_a_momentum_that_counts_twice_is_said_once(one_rank, memory):
    for make, said in (
        (lambda p: torch.optim.SGD(p, 0.1), 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1),
        (torch.optim.AdamW, int(isinstance(memory, AdamCorrection))),
    ):
        net = torch.nn.Linear(3, 2)
        ddp, optimizer = DistributedDataParallel(net), make(net.parameters())
        state = CompressionState(
            TopK(1.0), memory=copy.deepcopy(memory), named_parameters=net.named_parameters()
        )
        ddp.register_comm_hook(state, compression_hook)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            for _ in range(4):
                optimizer.zero_grad()
                ddp(torch.ones(1, 3)).sum().backward()
                optimizer.step()
        texts = [str(w.message) for w in given if "the momentum counts twice" in str(w.message)]
        assert len(texts) == said
        assert all(type(memory).__name__ in t and type(optimizer).__name__ in t for t in texts)
