"""Momentum wherever a gradient is averaged: compressed, densely, in warm-up and by signs."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from support.every import every
from torch.nn.parallel import DistributedDataParallel
from workers import memory as cases

from gradstats.compressors import RandomK, SignSGD, SparseCompressor, TopK
from gradstats.errors import InputError
from gradstats.hooks import (
    AdamCorrection,
    CompressionState,
    ErrorFeedback,
    LocalSteps,
    MomentumCorrection,
    compression_hook,
)
from gradstats.hooks.memory import NoMemory
from gradstats.hooks.step import outside

MOMENTUM = [1, 1.9, 2.71, 3.439]
NESTEROV = {"dgc": [1.9, 2.71, 3.439, 4.0951], "redsync": [2, 2.9, 3.71, 4.439]}


@pytest.fixture(scope="module")
def constant():
    return run_ranks(2, cases.constant_gradients)


@pytest.fixture(scope="module")
def policies():
    return run_ranks(2, cases.policies)


def means(found):
    """The updates of each parameter, step by step; within a parameter they are all the same."""
    assert max(spread for step in found for _, spread in step) < 1e-5
    return [
        list(each) for each in zip(*([mean for mean, _ in step] for step in found), strict=True)
    ]


@pytest.mark.distributed
@every(
    "name",
    [*cases.COMPRESSORS, "small", "named", "all dense", "warm-up", "warm-up, then all"],
)
def test_a_constant_gradient_has_the_updates_of_momentum_sgd(constant, name):
    for rank in constant:
        for parameter in means(rank[name]):
            assert parameter == pytest.approx(MOMENTUM, rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("where", ["compressed", "dense"])
@pytest.mark.parametrize("form", ["dgc", "redsync"])
def test_both_published_forms_of_nesterovs_momentum(constant, form, where):
    for parameter in means(constant[0][f"{form}, {where}"]):
        assert parameter == pytest.approx(NESTEROV[form], rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("where", ["compressed", "dense"])
def test_adam_of_a_constant_gradient_has_steps_of_one(constant, where):
    for parameter in means(constant[0][f"adam, {where}"]):
        assert parameter == pytest.approx([1, 1, 1, 1], rel=1e-4)


@pytest.mark.distributed
def test_nothing_left_out_is_pytorchs_optimizer():
    for worst in run_ranks(2, cases.against_torch):
        assert max(worst.values()) < 1e-5


@pytest.mark.distributed
def test_a_refused_step_leaves_the_momentum_of_dense_parameters(policies):
    for rank in policies:
        for parameter in means(rank["skip"]):
            assert parameter == pytest.approx([1, 1.9, 0, 2.71], rel=1e-5)
        assert [step[0][0] for step in rank["propagate"]] == pytest.approx(
            [1, 1.9, torch.inf, 2.71]
        )
        assert rank["skip untouched"]
        assert rank["propagate untouched"]
        assert not rank["zero untouched"]
        small = [step[2][0] for step in rank["zero"]]
        assert small == pytest.approx(
            [1, 1.9, 0.9 * 1.9 + 0.5, 0.9 * (0.9 * 1.9 + 0.5) + 1], rel=1e-5
        )


@pytest.mark.distributed
def test_momentum_counts_exchanges_and_unscaled_gradients(policies):
    for rank in policies:
        for parameter in means(rank["accumulated"]):
            assert parameter == pytest.approx([2 * m for m in MOMENTUM], rel=1e-5)
        for parameter in means(rank["scaled"]):
            assert parameter == pytest.approx(MOMENTUM, rel=1e-5)
        # a step in which no rank used it: no update, no momentum
        assert rank["unused"] == [1, pytest.approx(1.9), None, pytest.approx(2.71)]


@pytest.mark.distributed
@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_dense_momentum_survives_a_checkpoint_bit_by_bit(rule):
    for same, replicas, message in run_ranks(2, cases.resume, rule):
        assert same == [True, True]
        assert replicas
        assert message == "InputError: the checkpoint's residuals are of another model: named"


@pytest.mark.distributed
def test_sparse_gradients_are_refused_and_signs_are_not():
    for message, remembers in run_ranks(1, cases.sparse):
        assert message.startswith(
            "InputError: 0.weight has a sparse gradient, for which MomentumCorr"
        )
        assert remembers


def test_options_out_of_range():
    with pytest.raises(InputError, match="nesterov must be true, false or one of dgc, redsync"):
        MomentumCorrection(0.9, nesterov="torch")
    assert MomentumCorrection(nesterov=True).nesterov == "dgc"
    assert MomentumCorrection().nesterov is None
    with pytest.raises(InputError, match=r"betas must be in \[0, 1\)"):
        AdamCorrection((0.9, 1.0))
    with pytest.raises(InputError, match="eps must be in"):
        AdamCorrection(eps=0.0)
    for compressor in (SignSGD(), RandomK(0.1, unbiased=True)):
        with pytest.raises(InputError, match="leaves no residual to feed back"):
            CompressionState(compressor, memory=ErrorFeedback())
    assert CompressionState(TopK(0.1), memory=AdamCorrection()).error_feedback


def test_positions_outside_of_layers():
    positions = torch.tensor([0, 3, 4, 9, 10, 14, 15])
    assert outside(positions, [slice(0, 4), slice(10, 15)]).tolist() == [4, 9, 15]
    assert outside(positions, [slice(4, 10)]).tolist() == [0, 3, 10, 14, 15]
    assert outside(None, [slice(0, 4)]) is None


def test_a_state_shows_what_it_compresses_where_gradients_were_not_zeroed(one_rank):
    torch.manual_seed(0)
    net = torch.nn.Linear(30, 20)
    ddp = DistributedDataParallel(net)
    state = CompressionState(TopK(0.1), named_parameters=net.named_parameters())
    shown = {}

    def hook(state, bucket):
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        for parameter, gradient in pairs:
            shown[parameter.ndim] = state.corrected(parameter, gradient).clone()
        return compression_hook(state, bucket)

    ddp.register_comm_hook(state, hook)
    for step in range(3):
        x = torch.randn(4, 30)
        own = torch.autograd.grad(net(x).square().sum(), [*net.parameters()])
        residual = state.memory.residual.clone() if step else torch.zeros(620)
        ddp(x).square().sum().backward()  # what the exchange before left is in .grad
        expected = torch.cat([each.reshape(-1) for each in own]) + residual
        torch.testing.assert_close(torch.cat([shown[2], shown[1]]), expected, rtol=1e-5, atol=1e-5)
        assert residual.any() or not step


class Seen(SparseCompressor):
    """Keeps what it is given."""

    def reduce(self, corrected, *rest):
        self.given = corrected.clone()
        return super().reduce(corrected, *rest)


MEMORIES = {
    "sum": ErrorFeedback,
    "decay": lambda: ErrorFeedback(0.5),
    "momentum": MomentumCorrection,
    "nesterov": lambda: MomentumCorrection(0.8, nesterov=True),
    "redsync": lambda: MomentumCorrection(0.8, nesterov="redsync", masking=False),
    "adam": AdamCorrection,
    "none": NoMemory,
}


@pytest.mark.parametrize("name", MEMORIES)
def test_what_a_state_shows_is_what_it_compresses_from_the_first_step_on_and_resumed(
    one_rank, name
):
    torch.manual_seed(0)
    # other sizes, so that a place of another parameter would show; the smallest is averaged densely
    net = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 4))
    saved, compared = None, 0
    for _ in range(2):
        ddp = DistributedDataParallel(net)
        named = net.named_parameters()
        state = CompressionState(
            Seen(TopK(0.1)), memory=MEMORIES[name](), named_parameters=named, dense_below=10
        )
        if saved is not None:
            state.load_state_dict(saved)
        shown = {}

        def hook(state, bucket, shown=shown):
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                shown[id(parameter)] = state.corrected(parameter, gradient).clone()
            return compression_hook(state, bucket)

        ddp.register_comm_hook(state, hook)
        for _ in range(3):
            net.zero_grad()
            ddp(torch.randn(4, 30)).square().sum().backward()
            *compressed, _ = [shown[id(p)] for p in net.parameters()]
            assert torch.equal(torch.cat(compressed), state.compressor.given)
            compared += 1
        saved = state.state_dict()
    assert compared == 6


def test_what_local_steps_show_is_what_they_compress_resumed_too(one_rank):
    torch.manual_seed(0)
    net, saved, steps = torch.nn.Linear(6, 5), None, 0
    for _ in range(2):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        local = LocalSteps(
            net, optimizer, steps=2, compressor=Seen(TopK(0.1)), memory=ErrorFeedback(0.5)
        )
        if saved is not None:
            local.load_state_dict(saved)
        shown, given = [], []

        def before(pairs, local=local, shown=shown):
            shown.append(torch.cat([local.corrected(*pair) for pair in pairs]))

        def after(local=local, given=given):
            given.append(local._fragments[0].state.compressor.given)

        local.watch(before, after)
        with local:
            for _ in range(6):
                optimizer.zero_grad()
                net(torch.randn(8, 6)).square().sum().backward()
                optimizer.step()
        assert len(shown) == len(given) == 3
        for ours, theirs in zip(shown, given, strict=True):
            assert torch.equal(ours, theirs)
            steps += 1
        saved = local.state_dict()
    assert steps == 6
