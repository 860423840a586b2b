"""The hook in ordinary trainings: whatever people do with DDP works, or is refused by name."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from ranks import run_cases, run_ranks
from support.checkpoints import resealed
from support.every import every
from workers import trainings

from gradstats.compressors import Marsit, TopK, make_compressor
from gradstats.errors import InputError
from gradstats.hooks import CompressionState, dgc_warm_up

pytestmark = pytest.mark.distributed
SCALED = (("dense", 2.0**127, 3), ("topk", 2.0**127, 3), ("topk", 2.0**4, 2), ("topk", 1.0, 1000))
OTHER_DTYPES = tuple(
    itertools.product(
        ("topk", "micro", "lags", "ef-signsgd", "cltk"), ("float64", "bfloat16", "float16")
    )
)
SCHEDULED = ("topk", "redsync-quantised", "cltk", "randomk", "lags")
UNUSED = tuple(itertools.product(("feedback", "momentum"), (False, True)))
VARIANTS = tuple(itertools.product(trainings.TRAININGS, (False, True)))


def test_a_loss_scaler_sees_overflow_as_in_dense_training():
    """An intended overflow: the scale falls until nothing is infinite, and grows again."""
    dense, ours, *_ = run_cases(2, trainings.scaled, SCALED).values()
    for (scales, *_), (found, _, _, untouched, same) in zip(dense, ours, strict=True):
        assert found == scales
        assert scales[0] == 2.0**126  # the first step overflowed
        assert sorted(scales) != scales[::-1]  # and the scale grew again
        assert all(untouched)
        assert same


def test_a_changing_loss_scale_changes_nothing():
    """Scales are powers of two: the residual in unscaled units is that of a training without a scaler."""
    *_, changing, constant = run_cases(2, trainings.scaled, SCALED).values()
    for (scales, flat, residual, *_), (ones, plain, kept, *_) in zip(
        changing, constant, strict=True
    ):
        assert len(set(scales)) > 3
        assert set(ones) == {1.0}
        assert np.array_equal(flat, plain)
        assert np.array_equal(residual, kept)


def test_a_policy_that_hides_overflow_says_so_once():
    for messages in run_ranks(2, trainings.hidden_overflow):
        assert len(messages) == 1
        assert "pass scaler=" in messages[0]


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_complex_parameters_are_averaged(ratio):
    for same, close in run_cases(2, trainings.complex_parameters, ((0.1,), (1.0,)))[ratio,]:
        assert same
        assert close == (ratio == 1)


@pytest.mark.parametrize("exclude", [(), ("words.*",)])
def test_sparse_gradients_are_averaged_exactly(exclude):
    ranks = run_cases(2, trainings.sparse_embedding, (((),), (("words.*",),)))[exclude,]
    for agree, names, message, sent in ranks:
        assert all(agree)
        # 50 rows of 4 travel as a dense vector, beside three elements and their positions
        assert 800 + 24 <= sent < 800 + 200
        assert names == ["out.weight", "out.bias"]
        assert message.startswith("InputError: words.weight has a sparse gradient")


@every(("name", "dtype"), OTHER_DTYPES)
def test_large_parameters_of_every_dtype(name, dtype):
    # what the ranks sent, rounded to the gradient's dtype, plus what they kept, is what they had
    largest = {"float64": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    ranks = run_cases(2, trainings.other_dtype, OTHER_DTYPES, limit_s=700)[name, dtype]
    for error, memory, same in ranks:
        assert error < largest
        assert memory == ("torch.float64" if dtype == "float64" else "torch.float32")
        assert same


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_memories_do_not_follow_the_default_dtype(dtype):
    assert run_ranks(2, trainings.default_dtype, dtype) == ["torch.float32"] * 2


def test_channels_last_keeps_every_element_in_its_place():
    for errors, strided in run_ranks(2, trainings.memory_formats):
        assert strided
        assert max(errors) < 1e-6


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("memory", ["feedback", "momentum"])
def test_parameters_that_no_rank_used_lose_nothing(memory, view):
    weights, biases = ([f"heads.{i}.{name}" for i in (0, 1)] for name in ("weight", "bias"))
    kinds = {"memory residual": weights}  # all of a bias may be sent, and leave nothing
    if memory == "momentum":
        # what has accumulated as well as the velocity, and the velocity of what is averaged densely
        kinds = {"memory velocity": weights, "memory accumulated": weights}
        kinds["dense_memory velocity"] = biases
    for lost, changed, stayed in run_cases(2, trainings.unused, UNUSED)[memory, view]:
        assert len(lost) == (6 if memory == "feedback" else 0)
        assert max(lost.values(), default=0) < 1e-6
        assert changed == set()
        assert stayed >= {(kind, name) for kind, names in kinds.items() for name in names}


def test_one_state_on_two_models_is_refused():
    for messages in run_ranks(2, trainings.two_models):
        assert all("2 of 4 parameters came in DDP's buckets" in m for m in messages)


def test_an_error_of_the_compressor_is_not_a_lost_rank():
    assert run_ranks(2, trainings.own_errors) == ["RuntimeError: out of paper"] * 2


def test_checkpoints_of_different_steps_are_refused_by_all():
    for message in run_ranks(2, trainings.different_steps):
        assert message.startswith("InputError: the ranks begin at steps 1, 2: load checkpoints")


def test_nothing_compressed_is_diagnosed_as_nothing():
    assert run_ranks(2, trainings.nothing_compressed) == [(None, 0, True)] * 2


def test_the_norm_of_a_half_precision_gradient_is_finite():
    for norm, problem in run_ranks(2, trainings.clipped_half):
        assert norm == pytest.approx(1 / np.sqrt(2), rel=1e-2)
        assert problem == ""


@pytest.mark.parametrize("name", SCHEDULED)
def test_every_compressor_with_a_ratio_follows_the_schedule(name):
    for counts, numel in run_cases(2, trainings.schedule, tuple((n,) for n in SCHEDULED))[name,]:
        expected = [round(r * numel) for r in (0.2, 0.2, 0.05, 0.05, 0.01, 0.01)]
        assert counts == pytest.approx(expected, rel=0.02, abs=5)


def test_ratios_that_lags_chose_survive_a_checkpoint():
    assert run_ranks(2, trainings.lags_resumes) == [(True, True)] * 2


def test_a_schedule_that_cannot_be_followed_is_refused_at_once():
    late = dgc_warm_up(1000, (1.0, 1.0, 0.01))
    with pytest.raises(InputError, match="Marsit has no ratio to schedule"):
        CompressionState(Marsit(), ratio_at=late)
    with pytest.raises(InputError, match="ratio must be in"):
        CompressionState(TopK(0.1), ratio_at=lambda step: 0.1 if step < 100 else 0.0)
    table = [0.5, 0.1, 0.1]
    with pytest.raises(InputError, match=r"no ratio at step 4 \(IndexError: list index out of"):
        CompressionState(TopK(0.1), ratio_at=lambda step: table[step])
    assert CompressionState(Marsit(), ratio_at=lambda step: 1.0 if step < 9 else None)
    assert make_compressor("marsit", 0.1).ratio is None


@every(("name", "streams"), VARIANTS)
def test_options_of_ddp_change_nothing(name, streams):
    ends = run_cases(2, trainings.variant, VARIANTS, limit_s=700)[name, streams]
    assert ends == [(True, True)] * 2


def test_process_groups_and_models_side_by_side():
    one, two, three, four = run_ranks(4, trainings.groups)
    for a, b in ((one, two), (three, four)):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not np.array_equal(one[0], three[0])


def test_frozen_parameters():
    for first, second, same, message in run_ranks(2, trainings.frozen):
        assert second - first == 300 * 40
        assert same
        assert "5 of 6 parameters came in DDP's buckets, 0.weight not" in message


def test_a_sharded_optimizer():
    assert run_ranks(2, trainings.zero_redundancy) == [True, True]


def test_uneven_inputs_under_join():
    (few, _, same), (many, steps, also) = run_ranks(2, trainings.uneven)
    assert (few, many) == (3, 5)
    assert steps == 5
    assert same
    assert also


def test_accumulation_is_one_exchange_of_the_sum():
    for steps, error in run_ranks(2, trainings.accumulated):
        assert steps == 1
        assert error < 1e-6


def test_micro_in_float64_conserves():
    for error, union in run_ranks(2, trainings.micro_in_double):
        assert error < 1e-12
        assert union > 0


def test_a_schedule_of_none_leaves_the_compressors_ratio():
    late = TopK(0.1)
    CompressionState(late, ratio_at=lambda step: None if step < 1000 else 0.001)
    assert late.ratio == 0.1
    warm = TopK(0.001)
    state = CompressionState(warm, ratio_at=lambda step: 0.25 if step < 100 else None)
    assert warm.ratio == 0.25
    state._setup.schedule.begin(100)
    assert warm.ratio == 0.001


def test_a_checkpoint_of_another_model_restores_nothing():
    small, large = torch.nn.Linear(2, 2), torch.nn.Linear(3, 2)
    saved = CompressionState(TopK(0.5), named_parameters=small.named_parameters()).state_dict()
    saved = resealed(0, saved["rank0"], step=7)
    state = CompressionState(TopK(0.5), named_parameters=large.named_parameters())
    with pytest.raises(InputError, match=r"residual of weight has shape \(4,\), not shape \(6,\)"):
        state.load_state_dict(saved)
    assert state.step == 0


def test_sparse_embeddings_resume_and_groups_share_a_checkpoint(tmp_path):
    ends = run_ranks(2, trainings.checkpoints, str(tmp_path))
    assert ends == [([True] * 3, [True] * 6)] * 2


def test_nan_in_a_sparse_gradient_follows_the_policy():
    for message, _, _ in run_ranks(2, trainings.sparse_nonfinite, "raise"):
        assert message.startswith("NonFiniteGradientError: step 0")
    for message, finite, problem in run_ranks(2, trainings.sparse_nonfinite, "skip"):
        assert (message, finite) == ("", True)
        assert "NaN or infinite" in problem
    for message, finite, _ in run_ranks(2, trainings.sparse_nonfinite, "zero"):
        assert (message, finite) == ("", True)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_clipping_after_bad_elements_became_zero(bad):
    assert run_ranks(1, trainings.clipped_zero, bad) == [pytest.approx(0.5)]


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_mean_beyond_float16_stays_in_the_residual(scale):
    ((seen, residual, (message, own, same)),) = run_ranks(1, trainings.half_overflow, scale)
    assert seen[0] == ([60_000.0, 0.0], False)
    assert seen[1] == ([0.0, 0.0], True)  # 39,000 twice
    assert residual == [0.0, float(np.float16(39_000)) / scale]  # without the loss scale
    # a step that is refused by an error leaves the rank's own gradient, and no trace in the rule
    assert message.startswith("NonFiniteGradientError: step 1: NaN or infinite gradient elements")
    assert own == [60_000.0, float(np.float16(39_000))]
    assert same


def test_a_dense_step_with_momentum_correction_is_momentum_sgd():
    assert run_ranks(1, trainings.dense_momentum) == [pytest.approx([1, 1.9, 2.71, 3.439])]


def _in_use(handle):
    hooks = handle.hooks_dict_ref()
    return hooks is not None and handle.id in hooks


def test_a_model_keeps_no_state_alive_and_no_hook_of_one():
    net = torch.nn.Linear(3, 2)
    states = [
        CompressionState(TopK(0.5), named_parameters=net.named_parameters()) for _ in range(3)
    ]
    gone = [weakref.ref(each) for state in states for each in (state, state._setup.leftover)]
    for state in states:
        state.note_filled([net.weight])
    handles = [state._setup.leftover._handles[0] for state in states]
    del state, states[1:]
    gc.collect()
    assert [each() is None for each in gone] == [False, False, True, True, True, True]
    # a hook of each kind for the state that is left
    assert [_in_use(handle) for handle in handles] == [True, False, False]
    assert len(net.weight._post_accumulate_grad_hooks) == 1
    states.clear()
    gc.collect()
    assert gone[0]() is gone[1]() is None
    assert not _in_use(handles[0])
    assert not net.weight._post_accumulate_grad_hooks


def test_buckets_that_are_none_are_refused():
    for message in run_ranks(1, trainings.python_reducer):
        assert message.startswith("InputError: compiled DDP's python_reducer hands over no buckets")
