"""Local steps and their outer loop: against loops from the papers' formulas, and what a run may meet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from support.every import every
from workers import local_steps as cases

from gradstats import open_trace
from gradstats.compressors import ChunkTopK
from gradstats.errors import InputError
from gradstats.hooks import ErrorFeedback, LocalSteps
from gradstats.hooks.contents import seal

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def two(folder):
    """What the cases returned, rank by rank."""
    return run_ranks(2, cases.two_ranks, str(folder))


@pytest.fixture(scope="module")
def three():
    return run_ranks(3, cases.three_ranks)


def test_diloco_with_a_dense_exchange_is_its_loop_bit_for_bit(two):
    results = [rank["diloco"] for rank in two]  # three exchanges, and two steps left over
    for same, last, parameters in results:
        assert all(same)
        assert last
        assert np.array_equal(parameters, results[0][2])


@pytest.mark.parametrize("average", cases.AVERAGES)
def test_sparseloco_is_its_formulas(three, average):
    results = [rank[average] for rank in three]
    for off, residual_off, largest, record, parameters in results:
        assert off < 1e-5 * largest
        assert residual_off < 1e-5 * largest
        assert np.array_equal(parameters, results[0][4])
        assert (record.step, record.target) == (3, ChunkTopK(4 / 64, 64).target(record.numel))
        # 12 bits for a position, 16 for each chunk's count, 2 for a value; the rest is scales, headers and room
        assert record.bytes_sent < 1.3 * (14 * record.selected + 16 * record.numel / 4096) / 8 + 40


def test_one_dense_step_is_ddp_to_the_bit(two):
    assert [rank["ddp"] for rank in two] == [[[True] * 7] * 2] * 2  # with SGD and with AdamW


def test_one_step_takes_no_closure_and_follows_an_outer_rate_that_changes(two):
    for said, off in [rank["otherwise"] for rank in two]:
        assert said.startswith("steps=1 averages gradients before the optimizer's step")
        assert max(off) < 1e-6


def test_the_exchange_at_the_end_counts_and_loading_forgets_the_last_one(two):
    for seen, loaded, back, refused in [rank["counted"] for rank in two]:
        # of 1, 2 and 3 of the six parameters in three fragments, each exchanged a step after the one before
        assert seen[1, 4] == ([6, "after", 6, "after"], 2, 1, 2163)
        assert seen[3, 4] == ([1, 2, 3, "after", 1, 2, 3, "after"], 2, 1, 2163)
        # the last fragment was exchanged after the last step: what is left of the others is no whole exchange
        assert seen[3, 3] == ([1, 2, 3, "after"], 1, 0, 2163)
        assert loaded == (3, None, None)
        assert back == (3, None)
        # two exchanges were accepted, the third was not and is taken back by nothing
        counts, (now, delayed) = refused
        assert counts == (2, 2, True, 2)
        assert "not recorded with a delay" in delayed
        assert "not recorded" not in now


def test_without_an_outer_optimizer_parameters_become_the_mean(two):
    assert max(rank["mean"] for rank in two) < 1e-6


@every("name", cases.OPTIONS)
def test_it_learns_and_ends_with_the_same_parameters_everywhere(two, name):
    results = [rank[f"learns, {name}"] for rank in two]
    for first, last, parameters, exchanges in results:
        assert last < 0.8 * first
        # and the one at the end
        assert exchanges == (65 if name == "delayed" else 63) // cases.H + 1
        assert np.array_equal(parameters, results[0][2])


@pytest.mark.parametrize("name", cases.RESUMED)
def test_resuming_in_the_middle_of_an_interval_changes_no_bit(two, name):
    for same, refused in [rank[f"resumes, {name}"] for rank in two]:
        assert same == [True] * 8 * 2  # stored by torch.save, and by the distributed checkpoint
        *others, foreign = refused
        assert others == [
            "the checkpoint is of 6 local steps, and these are 5",
            "the checkpoint has other parameters than this model",
            f"the checkpoint is of 0 fragments, and these are {2 if name == 'delayed' else 1}",
        ]
        assert "every rank saves and loads its own" in foreign


def test_loading_forgets_an_exchange_that_is_under_way(two):
    assert [rank["rolled back"] for rank in two] == [True, True]


@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_what_is_not_finite_does_not_stay_on_its_rank(two, policy):
    for rank in two:
        assert np.isfinite(rank[policy]).all()
        assert np.array_equal(rank[policy], two[0][policy])


def test_what_could_not_be_read_back_is_not_saved(two):
    for rate, said in [rank["not readable"] for rank in two]:
        assert rate == 0.25
        assert said.startswith(
            "a checkpoint holds tensors, numbers and text, not a value of type object: "
        )


@pytest.mark.parametrize("shared", cases.SHARED)
def test_a_mean_over_senders_is_larger_the_less_ranks_agree(three, shared):
    """From 1, where all send the same positions, to the number of ranks, where no two do."""
    low, high = cases.SHARED[shared]
    for ratio, senders in [rank[shared] for rank in three]:
        assert low <= ratio * (1 + 1e-6)
        assert ratio <= high * (1 + 1e-6)
        # with the same number of senders s at every position it would be ranks / s
        assert ratio == pytest.approx(3 / senders, rel=0.25)


def test_a_mean_over_senders_stays_one_where_much_is_sent(three):
    assert [rank["much"] for rank in three] == [pytest.approx([0, 0], abs=1e-6)] * 3


def test_parameters_that_are_not_finite_stop_all_ranks_and_leave_the_rest_alone(two):
    results = [rank["not finite"] for rank in two]
    for message, left, parameters in results:
        assert message.startswith("step 0: NaN or infinite gradient elements: ")
        assert "on rank 1" in message
        assert left
        assert np.isfinite(parameters).all()
        assert np.array_equal(parameters, results[0][2])


@pytest.mark.parametrize("delay", [0, 2])
def test_a_lost_rank_is_one_error(tmp_path, delay):
    with pytest.raises(FileNotFoundError):  # no rank returns
        run_ranks(2, cases.lost_rank, tmp_path, delay)
    finite, _, text = (tmp_path / "error").read_text(encoding="utf-8").partition(" ")
    assert finite == "True"
    assert text.startswith("after local step 8: the exchange failed, a rank may be lost")
    assert "\n" not in text


def test_options_that_cannot_work_are_one_line(two):
    expected = {
        "steps": "steps must be at least 1",
        "delay": "delay must be below steps, 4, not 4",
        "mix": "mix must be in [0, 1]",
        "fragments": "3 fragments need as many steps, and these are 2",
        "many": "9 fragments of 6 parameters",
        "none": "2.weight is in none of the fragments: add a pattern such as '*'",
        "empty": "no parameter is in fragment 1",
        "outer": "the outer optimizer must have the model's trainable parameters",
        "average": "average must be one of ranks, senders",
        "senders": "MiCRO does not know who sent what: average over ranks",
        "memory": "a memory, or a mean over senders, needs a compressor",
        "ddp": "give LocalSteps the module inside it",
        "momentum": "momentum must be in (0, 1)",
        "decay": "decay must be in (0, 1]",
        "frozen": "the model has no parameter to train",
    }
    found = two[0]["wrong"]
    assert found.keys() == expected.keys()
    assert [label for label, text in expected.items() if text not in found[label]] == []
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="call init_process_group first"):
        LocalSteps(model, torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("name", cases.CAPTURED)
def test_a_capture_holds_pseudogradients(two, folder, name):
    results = [rank[f"captured, {name}"] for rank in two]
    trace = open_trace(folder / f"{name}.zarr")
    feedback = ["corrected"] if name != "dense" else []
    for rank, (deltas, gradients, fragments) in enumerate(results):
        assert trace.kinds(rank) == ["gradient", *feedback, "pseudogradient"]
        assert trace.steps(rank) == [0, 2, 4]
        for step in (0, 2, 4):
            if fragments == 1:  # others leave at other local steps
                found = trace.read(step, rank, "pseudogradient")
                assert np.array_equal(found, deltas[step].numpy())
            assert np.array_equal(
                trace.read(step, rank, "gradient")[-3:], gradients[step][-3:].numpy()
            )
        columns = trace.scalars(rank)
        assert columns["learning_rate"].tolist() == [4.0, 14.0, 24.0]
        assert np.isfinite(columns["loss"]).all()
        if name in ("topk with decay", "fragments"):
            assert (columns["selected"] > 0).all()
    if feedback and name != "delayed":
        # the corrected one is what was compressed: with the pseudo-gradient alone in the first step
        first = trace.read(0, 1, "pseudogradient")
        assert np.array_equal(trace.read(0, 1, "corrected"), first)
        assert not np.array_equal(trace.read(2, 1, "corrected"), trace.read(2, 1, "pseudogradient"))


def test_chunks_keep_their_largest():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[100:200] = 0  # of this chunk nothing
    found = ChunkTopK(0.1, 100).select(values)
    expected = []
    for start in range(0, 1000, 100):
        part = values[start : start + 100].abs()
        expected += [start + int(i) for i in part.topk(10).indices if part[i]]
    assert found.indices.tolist() == sorted(expected)
    assert torch.equal(found.values, values[found.indices])
    assert ChunkTopK(0.1, 300).target(1000) == 3 * 30 + 10
    assert len(ChunkTopK(0.1, 300).select(values[300:])) == 30 + 30 + 10
    assert len(ChunkTopK().select(values[:0])) == 0
    assert len(ChunkTopK(1.0, 1).select(values)) == 900


def test_a_residual_decays():
    memory = ErrorFeedback(0.5)
    memory.allocate(3, torch.device("cpu"))
    part = slice(0, 3)
    for expected in (1.0, 1.5, 1.75):  # nothing is sent
        one = torch.ones(3)
        assert torch.equal(memory.preview(one, part), torch.full((3,), expected))
        memory.add(one, part)
        memory.settle(memory.corrected, None)
        assert torch.equal(memory.tensors()["residual"], torch.full((3,), expected))


def test_a_model_that_was_loaded_or_moved_since_is_refused(one_rank):
    for change in (
        lambda net: net.load_state_dict({n: p + 1 for n, p in net.state_dict().items()}),
        lambda net: net.double(),
    ):
        net = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        local = LocalSteps(net, optimizer, steps=2)
        with local:  # an interval, after which parameters are what they came to
            for _ in range(2):
                net(torch.ones(1, 3)).sum().backward()
                optimizer.step()
        with local:
            pass
        local = LocalSteps(net, optimizer, steps=2)
        change(net)
        with (
            pytest.raises(InputError, match="since LocalSteps was made: make LocalSteps after"),
            local,
        ):
            pass


def steps_of(net, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()


def test_a_frozen_parameter_stays_once_its_steps_were_exchanged(one_rank):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    # whose momentum would move it in every exchange
    outer = torch.optim.SGD(net.parameters(), 0.7, momentum=0.9, nesterov=True)
    with LocalSteps(net, optimizer, outer, steps=2):
        steps_of(net, optimizer, 2)
        exchanged = net.bias.clone()
        steps_of(net, optimizer, 1)
        net.bias.requires_grad_(False)
        seen = []
        for _ in range(3):
            steps_of(net, optimizer, 1)
            seen.append((net.weight.clone(), net.bias.clone()))
            steps_of(net, optimizer, 1)
        net.bias.requires_grad_(True)
        steps_of(net, optimizer, 1)
        # as of a discriminator that is frozen while the generator steps, and the exchange comes
        for _ in range(2):
            anchor = net.bias.clone()
            net.bias.requires_grad_(True)
            steps_of(net, optimizer, 1)
            net.bias.requires_grad_(False)
            steps_of(net, optimizer, 1)
            assert not torch.equal(net.bias, anchor)
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[0][1], exchanged)  # the step that it took counts
    assert torch.equal(seen[0][1], seen[1][1])
    assert torch.equal(seen[0][1], seen[2][1])
    assert not torch.equal(seen[0][1], net.bias)  # it is trained again


def test_an_average_in_every_step_does_not_move_what_is_frozen(one_rank):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    with LocalSteps(net, optimizer, steps=1):
        steps_of(net, optimizer, 2)
        net.bias.requires_grad_(False)
        weight, bias = net.weight.clone(), net.bias.clone()
        steps_of(net, optimizer, 2)
    assert torch.equal(net.bias, bias)
    assert not torch.equal(net.weight, weight)


def test_gradients_that_come_after_the_average_are_refused(one_rank):
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in net]
    with LocalSteps(net, optimizers, steps=1) as local:
        for _ in range(2):  # of one backward pass, whatever is cleared in between
            net(torch.ones(1, 3)).sum().backward()
            for optimizer in optimizers:
                # what is written to them before each step, as by a loss scaler, too
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
                optimizer.step()
                optimizer.zero_grad()
        assert local.step == 2
        net(torch.ones(1, 3)).sum().backward()
        optimizers[0].step()
        net(torch.ones(1, 3)).sum().backward()
        with pytest.raises(InputError, match="backward pass for SGD came after that: each"):
            optimizers[1].step()
    with LocalSteps(net, optimizers, steps=1):
        handle = net[1].weight.register_post_accumulate_grad_hook(lambda _: optimizers[1].step())
        with pytest.raises(InputError, match="SGD steps within the backward pass"):
            net(torch.ones(1, 3)).sum().backward()
        handle.remove()


def test_ranks_that_froze_a_parameter_agree_on_it(two):
    for name in ("now", "delayed", "in every step"):
        ends = [rank["frozen"][name] for rank in two]
        for bias, after, weight in ends:
            # a delayed result is mixed with the parameters that were there, exchange by exchange
            assert np.array_equal(bias, after) is (name != "delayed")
            assert np.array_equal(after, ends[0][1])
            assert name == "delayed" or np.array_equal(bias, ends[0][0])
            assert np.array_equal(weight, ends[0][2])
    assert [rank["frozen"]["taken in"] for rank in two] == [True, True]
    assert [rank["frozen"]["one alone"] for rank in two] == ["frozen parameters"] * 2


class Wrapper(torch.nn.Module):
    """Renames entries of ``state_dict()``, as activation checkpoints of torch.distributed do."""

    def __init__(self, module):
        super().__init__()
        self._wrapped = module
        self._register_state_dict_hook(
            lambda module, state, prefix, _: {
                k.replace("_wrapped.", ""): v for k, v in state.items()
            }
        )

    def forward(self, x):
        return self._wrapped(x)


class Lazy(torch.nn.Module):
    """Buffers that the first forward pass makes or resizes, with infinity; one that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("made", None)
        self.register_buffer("least", torch.tensor([]))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.made = self.cache = x.detach().mean(0)
        self.least = x.detach().amin(0)
        return x


def test_a_checkpoint_has_the_buffers_of_its_rank(one_rank, tmp_path):
    def made():
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), Wrapper(torch.nn.BatchNorm1d(3)), Lazy())
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        return net, optimizer, LocalSteps(net, optimizer, steps=2)

    net, optimizer, local = made()
    with local:
        for _ in range(3):
            net(torch.randn(8, 3)).square().sum().backward()
            optimizer.step()
        saved = local.state_dict()
        dcp.save({"local": saved}, checkpoint_id=tmp_path / "all")
    for through in ("torch.save", "dcp"):
        other, _, again = made()
        if through == "dcp":  # into the structure of a model that has never run
            saved = again.state_dict()
            dcp.load({"local": saved}, checkpoint_id=tmp_path / "all")
        again.load_state_dict(saved)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(getattr(other[1]._wrapped, name), getattr(net[1]._wrapped, name))
        for name in ("made", "least", "mask"):
            assert torch.equal(getattr(other[2], name), getattr(net[2], name))
        assert not other[2].cache.any()
    assert net[1]._wrapped.num_batches_tracked == 3
    plain = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    plain = LocalSteps(plain, torch.optim.SGD(plain.parameters(), 0.01), steps=2)
    with pytest.raises(InputError, match="other parameters than this model"):
        plain.load_state_dict(saved)
    # of before buffers were saved: the model's own stay
    older = {k: v for k, v in saved["rank0"].items() if k not in ("version", "contents", "buffers")}
    other, _, again = made()
    again.load_state_dict(seal(0, older))
    assert other[1]._wrapped.num_batches_tracked == 0
    assert torch.equal(other[0].weight, saved["rank0"]["parameters"]["0.weight"])
    net[2].register_buffer("more", torch.ones(1))
    with pytest.raises(InputError, match="other buffers than this model"):
        again.load_state_dict(local.state_dict())
    del net[2].more
    net[2].mask = torch.zeros(1, 1)  # of a shorter context than the model's
    with pytest.raises(InputError, match=r"buffer 2\.mask has shape \(1, 1\), not \(2, 2\)"):
        again.load_state_dict(local.state_dict())
