"""Memory, policies, warm-up, checkpoints of the hook's state, over real gloo processes."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import io
import subprocess
import sys
import threading

import pytest
import torch
from ranks import run_once, run_ranks
from support.checkpoints import resealed
from support.every import every
from workers import state as cases

from gradstats.compressors import (
    DenseCompressor,
    RandomK,
    SignSGD,
    ThresholdSelector,
    TopK,
    make_compressor,
)
from gradstats.errors import InputError
from gradstats.hooks import CompressionState, MomentumCorrection, dgc_warm_up
from gradstats.hooks.checkpoint import (
    pack_optimizer,
    pack_state,
    unpack_optimizer,
    unpack_state,
)
from gradstats.hooks.contents import tensor_text
from gradstats.hooks.layout import ParameterLayout
from gradstats.thresholds import Estimator

pytestmark = pytest.mark.distributed


def remembered(name, *, copied):
    """Three steps of a memory; the compressor returns the corrected buffer itself, or another tensor."""
    memory, generator = cases.MEMORIES[name](), torch.Generator().manual_seed(0)
    memory.allocate(6, torch.device("cpu"))
    memory.allocate_dense(0, torch.device("cpu"))
    slots, seen = (slice(0, 2), slice(2, 6)), []
    for sent in ([1, 3], None, [0, 5]):
        gradient = torch.randn(6, generator=generator)
        before = [t.clone() for t in memory.tensors().values()]
        previews = [memory.preview(gradient[slot], slot).clone() for slot in slots]
        written = torch.empty(6)
        for slot in slots:
            memory.preview(gradient[slot], slot, written[slot])
        assert all(map(torch.equal, before, memory.tensors().values()))
        for slot in slots:
            memory.add(gradient[slot], slot)
        assert torch.equal(torch.cat(previews), memory.corrected)
        assert torch.equal(written, memory.corrected)
        residual = memory.corrected.clone() if copied else memory.corrected
        places = torch.arange(6) if sent is None else torch.tensor(sent)
        residual[places] = 0
        memory.settle(residual, None if sent is None else places)
        seen.append([t.clone() for t in memory.tensors().values()])
        if memory.residual is not None:
            assert torch.equal(memory.residual, residual if copied else seen[-1][0])
        if copied:  # the memory holds its own copy of it
            residual.fill_(torch.nan)
            assert all(map(torch.equal, seen[-1], memory.tensors().values()))
    return seen


@pytest.mark.parametrize("name", cases.MEMORIES)
def test_a_memory_previews_what_it_adds_and_keeps_whatever_tensor_it_is_given(name):
    own, other = (remembered(name, copied=copied) for copied in (False, True))
    for step, (a, b) in enumerate(zip(own, other, strict=True)):
        assert all(map(torch.equal, a, b))
        if a:
            *_, kept = a
            zeros = [[1, 3], list(range(6)), [0, 5]][step]
            assert kept[zeros].count_nonzero() == 0
            assert kept.count_nonzero() == 6 - len(zeros)
        if len(a) == 2:  # masked where it was sent, but in a dense step nothing is stale
            masked = [] if step == 1 or name == "unmasked" else zeros
            assert (a[0] == 0).nonzero().flatten().tolist() == masked


@every("world", [1, 3])
@every("name", cases.MEMORIES)
def test_memories_are_the_references_line_by_line(name, world):
    for worst, elements, last in [report[name] for report in run_once(world, cases.memories)]:
        assert worst < 1e-5  # rounding of float32 sums
        assert elements == last.numel == 103_503
        assert last.union >= last.selected
        assert last.union <= world * last.selected
        assert last.select_seconds > 0
        assert last.communicate_seconds > 0


def test_small_and_excluded_parameters_are_averaged_densely():
    for report, last in run_ranks(2, cases.policies):
        dense = {name for name, (is_dense, _, _) in report.items() if is_dense}
        assert dense == {"0.bias", "2.bias", "4.weight", "4.bias"}
        assert last.numel == 40 * 300 + 300 * 300
        assert (
            sum(n for name, (_, n, _) in report.items() if name not in dense) <= 2 * last.selected
        )
        assert all(alone == (name in dense) for name, (_, _, alone) in report.items())
        assert last.bytes_sent > 4 * (300 + 300 + 903)


def test_warm_up_follows_its_schedule():
    for selected, dense_error, targets in run_ranks(2, cases.warm_up):
        # of all layers together, that of the record: all elements in the dense steps, too
        assert targets == pytest.approx([1.0] * 5, rel=1e-3)
        assert selected[:3] == [1.0, 1.0, 1.0]
        assert dense_error < 1e-6
        assert selected[3:6] == pytest.approx([0.25] * 3, rel=1e-3)
        assert selected[6:] == pytest.approx([0.01] * 4, rel=1e-3)
    schedule = dgc_warm_up(10)
    assert [schedule(s) for s in (0, 9, 10, 25, 39, 40, 1000)] == [
        0.25, 0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001,
    ]  # fmt: skip


@pytest.mark.parametrize(("world", "scale"), [(1, 1.0), (3, 1.0), (3, 1024.0)])
def test_local_clipping_and_weight_decay(world, scale):
    assert max(run_ranks(world, cases.clipping, scale)) < 1e-6


@pytest.mark.parametrize("name", ["topk", "layerwise"])
@pytest.mark.parametrize("parameter", ["0.weight", "2.bias"])
def test_a_bad_step_is_skipped_by_all(parameter, name):
    for rank, each in enumerate(run_once(2, cases.nonfinite)):
        report, steps = each["skip", parameter, name]
        assert steps == 4
        problem, finite, total, untouched = report[2]
        assert "step 2: NaN or infinite gradient elements: 2 on rank 1" in problem
        assert ("parameter" in problem) == (rank == 1)
        assert finite
        assert total == 0
        assert untouched
        assert [bool(r[0]) for r in report] == [False, False, True, False]
        assert report[3][2] > 0


@pytest.mark.parametrize("name", ["topk", "layerwise"])
@pytest.mark.parametrize("parameter", ["0.weight", "2.bias"])
def test_bad_elements_are_zeroed(parameter, name):
    (zero, _), (one, _) = (each["zero", parameter, name] for each in run_once(2, cases.nonfinite))
    assert all(finite and total > 0 for _, finite, total, _ in zero + one)
    assert [r[1:3] for r in zero] == [r[1:3] for r in one]  # the same update
    assert zero[2][0] == ""
    assert "2 NaN or infinite elements taken as zero" in one[2][0]


RESUMED = ["topk", "warm-exact", "dgc", "sidco-e", "redsync", "micro", *cases.SYSTEMS]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """What both ranks report of each system."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    ranks = run_ranks(2, cases.resume_each, RESUMED, folder, limit_s=700)
    return dict(zip(RESUMED, zip(*ranks, strict=True), strict=True))


@pytest.mark.slow
@every("name", RESUMED)
def test_stop_and_resume_is_as_if_nothing_had_happened(name, resumed):
    for rank, (same, messages) in enumerate(resumed[name]):
        assert same == [True, True]
        world, other, system, memory, model = messages
        assert world == "the checkpoint is of 3 ranks, and these are 2"
        assert other.startswith(f"this is rank {rank}, and the checkpoint holds rank{rank + 1}: ")
        assert system.startswith("the checkpoint is of Other, and this is ")
        assert memory.startswith("the checkpoint's memory holds nothing where this one holds velo")
        assert model.startswith("the checkpoint's residuals are of another model: ")


@pytest.mark.parametrize("name", ["topk", "micro", "marsit", "lags"])
def test_a_lost_rank_is_one_clear_error(name, tmp_path):
    with contextlib.suppress(FileNotFoundError):  # no rank returns a result
        run_ranks(3, cases.lost_rank, name, str(tmp_path))
    for rank in (0, 1):
        seconds, intact, step, message = (tmp_path / f"{rank}.txt").read_text().split(" ", 3)
        assert int(seconds) < 20
        assert (intact, step) == ("True", "3")
        assert message.startswith("step 3: the exchange failed, a rank may be lost: ")
        assert "\n" not in message


def test_a_checkpoint_that_is_not_plain_gets_no_advice():
    class Code:
        def __reduce__(self):
            return print, ("run",)

    stream = io.BytesIO()
    torch.save({"selector": Code()}, stream)
    state = CompressionState(TopK(0.1))
    own = state.state_dict()["rank0"]
    for damaged, why in (
        (stream.getvalue(), "it holds other objects than tensors, which may run code"),
        (own["compressor"][:100], ""),
        (b"", ""),
    ):
        with pytest.raises(InputError, match=f"compressor cannot be read: {why}") as caught:
            state.load_state_dict(resealed(0, own, compressor=damaged))
        assert "weights_only" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_was_saved_on_a_device_that_is_gone_is_loaded(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.25))
    weight.sum().backward()
    optimizer.step()
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
        state, packed = pack_state({"generator": torch.arange(4.0)}), pack_optimizer(optimizer)
    assert unpack_state(state, "compressor")["generator"].tolist() == [0, 1, 2, 3]
    found = unpack_optimizer(optimizer, packed, "optimizer")
    assert torch.equal(found["state"][0]["exp_avg"], optimizer.state[weight]["exp_avg"])
    assert found["param_groups"][0]["lr"] == 0.25


def test_a_conjugated_tensor_can_be_sealed():
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert tensor_text(x.conj()) == tensor_text(x.conj().resolve_conj()) != tensor_text(x)
    assert tensor_text(x.conj().imag) == tensor_text(-x.imag)  # negated lazily


def test_an_optimizers_parameters_are_looked_through_once_for_all_states():
    class Counted(list):
        read = 0

        def __iter__(self):
            Counted.read += 1
            return super().__iter__()

    net = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(9))
    states = [CompressionState(TopK(0.5), named_parameters=each.named_parameters()) for each in net]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.param_groups[0]["params"] = Counted(optimizer.param_groups[0]["params"])
    optimizer.step()
    assert all(state._setup.applied.known for state in states)
    # by the optimizer itself, before it, and after it
    assert Counted.read == 3


def test_names_among_the_patterns_are_not_searched_for(monkeypatch):
    asked = []
    match = fnmatch.fnmatchcase
    monkeypatch.setattr(fnmatch, "fnmatchcase", lambda *a: asked.append(a) or match(*a))
    named = [(f"{i}.w", torch.nn.Parameter(torch.ones(2))) for i in range(30)]
    named += [("a[0]", torch.nn.Parameter(torch.ones(2)))]
    excluded = [*(f"{i}.w" for i in range(20)), glob.escape("a[0]"), "2?.w"]
    layout = ParameterLayout(exclude=excluded)
    layout.add(named)
    assert layout.names == []
    # the 10 others of two patterns, and the escaped name
    assert len(asked) <= 2 * 11


def test_a_compressor_that_cannot_load_is_left_as_it_was():
    model = torch.nn.Linear(9, 9)
    compressor = make_compressor("micro", 0.1)
    state = CompressionState(compressor, named_parameters=model.named_parameters())
    own, before = state.state_dict()["rank0"], compressor.state_dict()
    half = pack_state({"step": 7})
    with pytest.raises(InputError, match="do not both have capacity"):
        state.load_state_dict(resealed(0, own, step=7, compressor=half))
    odd = pack_state({**before, "step": 7, "controller": {"threshold": "high"}})
    with pytest.raises(InputError, match="the checkpoint does not fit: "):
        state.load_state_dict(resealed(0, own, step=7, compressor=odd))
    assert compressor.state_dict() == before
    assert state.step == 0


def test_hostile_schedules():
    for at in (0.1, "0.1", [0.1]):
        with pytest.raises(InputError, match="a schedule must be a function of the step"):
            CompressionState(TopK(0.1), ratio_at=at)
    for ratio in ("0.1", [0.1], 1j, float("nan"), 2, True, torch.tensor(0.1)):
        with pytest.raises(InputError, match="ratio must be in"):
            CompressionState(TopK(0.1), ratio_at=lambda step, ratio=ratio: ratio)
        with pytest.raises(InputError, match="ratio must be in"):
            dgc_warm_up(10, [0.1, ratio])
    with pytest.raises(InputError, match="at least one ratio"):
        dgc_warm_up(10, [])


def test_a_pattern_that_excludes_nothing_is_named():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    named = [*net.named_parameters()]
    CompressionState(TopK(0.1), named_parameters=named, exclude=["1.*", "0.bias", "?.weight"])
    said = "no parameter is called bias, 2.[*], so it excludes nothing; the first of 4 is 0.weight"
    with pytest.warns(UserWarning, match=said):
        CompressionState(TopK(0.1), named_parameters=named, exclude=["bias", "0.*", "2.*"])


def test_refusals():
    with pytest.raises(InputError, match=r"momentum must be in \[0, 1\)"):
        MomentumCorrection(1.0)
    with pytest.raises(InputError, match="nonfinite must be one of raise, skip, zero"):
        CompressionState(TopK(0.1), nonfinite="ignore")
    with pytest.raises(InputError, match="needs named_parameters"):
        CompressionState(TopK(0.1), exclude=["*.bias"])
    with pytest.raises(InputError, match="DenseCompressor has no ratio"):
        CompressionState(DenseCompressor(), ratio_at=lambda step: 0.1)
    for compressor in (SignSGD(), RandomK(0.1, unbiased=True)):
        assert not CompressionState(compressor).error_feedback
        with pytest.raises(InputError, match="leaves no residual to feed back"):
            CompressionState(compressor, error_feedback=True)
    state = CompressionState(TopK(0.1), named_parameters=torch.nn.Linear(2, 2).named_parameters())
    own = state.state_dict()["rank0"]
    for key in ("memory", "dense_memory"):
        for odd in ([], None, {"residual": []}):
            with pytest.raises(InputError, match="the checkpoint's"):
                state.load_state_dict(resealed(0, own, step=3, **{key: odd}))
    with pytest.raises(InputError, match="memory holds velocity where this one holds residual"):
        state.load_state_dict(resealed(0, own, step=3, memory={"velocity": {}}))
    assert state.step == 0


FIRST_STEP = """
import gc, os, sys
import torch
import torch._dynamo, torch.profiler  # to wrap a model imports it: a second for each process
import torch.distributed as dist
from numba.core.registry import cpu_target
from torch.nn.parallel import DistributedDataParallel
from gradstats.compressors import make_compressor
from gradstats.hooks import CompressionState, compression_hook
from gradstats.primitives.loops.compiled import Loop

cpu_target.target_context.refresh()  # what loads any compiled loop imports this, no loop itself
gc.freeze()
for name in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        break
    if os.waitpid(pid, 0)[1]:
        sys.exit(name)
else:
    sys.exit()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
state = CompressionState(make_compressor(name, 0.01))
compiled, compile_ = [], Loop.compile
Loop.compile = lambda loop, sig: (compiled.append(loop.py_func.__name__), compile_(loop, sig))[1]
ddp = DistributedDataParallel(torch.nn.Linear(2100, 2100))
ddp.register_comm_hook(state, compression_hook)
torch.manual_seed(0)
for _ in range(2):
    inputs = torch.randn(2, 2100)
    # gradients that are exactly zero, as behind a ReLU
    inputs[:, :100] = 0
    ddp(inputs).square().mean().backward()
print(name, compiled, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_the_first_step_of_a_large_model_compiles_nothing():
    """Every name in a process of its own: what one has loaded, the next would find."""
    names = ["topk", "sidco-e", "sidco-gp", "redsync", "signsgd", "dense-bf16"]
    command = [sys.executable, "-c", FIRST_STEP, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} []" for name in names]


def test_what_a_state_was_made_of_cannot_be_replaced():
    state = CompressionState(TopK(0.1))
    for name in ("compressor", "memory", "process_group"):
        with pytest.raises(AttributeError):
            setattr(state, name, None)


class FromOutside(Estimator):
    """A rule that cannot be copied, and that must not be run before the training is."""

    name = "from-outside"

    def __init__(self):
        self.group = threading.Lock()

    def find(self, x, k):
        raise AssertionError("run")


def test_a_rule_from_outside_is_not_run_when_a_state_is_made():
    assert CompressionState(ThresholdSelector(FromOutside(), 0.1)).step == 0
