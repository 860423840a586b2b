"""What a capture reads of a hook's state: the protocol, parts of it, PyTorch's PowerSGD, and nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from capture import Capture
from capture.states import (
    ObservedState,
    Reports,
    corrected_run,
    observe,
    records_steps,
    step_columns,
    unnamed,
)
from gradstats.compressors import TopK
from gradstats.hooks import CompressionState, StepRecord

MODEL = nn.Linear(3, 2)
GRADIENT = torch.arange(6.0).view(2, 3)


class Residual:
    """As documented: a method `residual`, and nothing else."""

    def residual(self, parameter):
        return None if parameter is MODEL.bias else torch.ones(2, 3)


class Corrected:
    """The rest of the protocol may be missing."""

    def corrected(self, parameter, gradient):
        return 2 * gradient


@pytest.mark.parametrize("state", [None, object(), SimpleNamespace(error_feedback=True)])
def test_a_state_without_memory_adds_nothing(state):
    observed = observe(state)
    assert not observed.error_feedback
    assert torch.equal(observed.corrected(MODEL.weight, GRADIENT), GRADIENT.reshape(-1))
    assert (records_steps(state), step_columns(observed, ["weight"])) == (False, {})


def test_parts_of_the_protocol_are_used():
    observed = observe(Residual())
    assert observed.error_feedback
    assert torch.equal(observed.corrected(MODEL.weight, GRADIENT), GRADIENT.reshape(-1) + 1)
    assert torch.equal(observed.corrected(MODEL.bias, GRADIENT[0, :2]), GRADIENT[0, :2])
    off = Residual()
    off.error_feedback = False
    assert not observe(off).error_feedback
    assert observe(Corrected()).error_feedback
    assert torch.equal(observe(Corrected()).corrected(MODEL.weight, GRADIENT), 2 * GRADIENT)


def test_what_corrects_several_at_once_is_asked_once_and_a_changed_sum_counts():
    class Both(Corrected):
        def corrected(self, parameter, gradient):
            return 3 * gradient

        def corrected_run(self, parameters, gradient, out):
            known = len(parameters) == 2
            return known and out.copy_(4 * gradient) is out

    class OneChanged(Both):
        def corrected(self, parameter, gradient):
            return 5 * gradient

    gradient = torch.arange(8.0)
    for state, asked in ((observe(Corrected()), False), (Both(), True), (OneChanged(), False)):
        out = torch.zeros(8)
        assert corrected_run(state, [MODEL.weight, MODEL.bias], gradient, out) == asked
        assert torch.equal(out, 4.0 * asked * gradient)
    assert not corrected_run(Both(), [MODEL.weight], gradient[:6], out[:6])


def test_a_state_that_implements_the_protocol_is_used_as_it_is():
    state = CompressionState(TopK(0.5), named_parameters=MODEL.named_parameters())
    assert isinstance(state, ObservedState)
    assert observe(state) is state
    assert records_steps(state)
    assert step_columns(state, ["weight", "bias"]) == {}  # no step yet


def test_powersgd_keeps_its_residuals_by_bucket():
    state = PowerSGDState(None, start_powerSGD_iter=2)
    parameters = [MODEL.bias, MODEL.weight]
    bucket = SimpleNamespace(index=lambda: 1, parameters=lambda: parameters)
    assert observe(state).error_feedback
    assert torch.equal(
        observe(state, bucket).corrected(MODEL.bias, GRADIENT[0, :2]), GRADIENT[0, :2]
    )
    state.error_dict[1] = torch.arange(8.0)
    observed = observe(state, bucket)
    assert observed.corrected(MODEL.bias, torch.zeros(2)).tolist() == [0, 1]
    assert observed.corrected(MODEL.weight, torch.zeros(2, 3)).tolist() == [2, 3, 4, 5, 6, 7]
    state.use_error_feedback = False
    observed = observe(state, bucket)
    assert not observed.error_feedback
    assert not observed.corrected(MODEL.bias, torch.zeros(2)).any()


def test_columns_are_in_the_order_of_the_trace():
    layers = {name: np.array([1.0, 2.0]) for name in ("numel", "selected", "target", "delta")}
    diagnosis = SimpleNamespace(
        step=4, layers=("b", "a"), residual_norm=0.5, matching_rate=0.75, **layers
    )
    state = SimpleNamespace(
        last=StepRecord(4, 0.25, 12, 1000, 96), diagnosis=diagnosis, error_feedback=False
    )
    columns = step_columns(observe(state), ["a", "dense", "b"])
    assert (columns["threshold"], columns["selected"]) == (0.25, 12)
    assert columns["compression"]["bytes_sent"] == 96
    assert columns["compression"]["matching_rate"] == 0.75
    for values in columns["layer_compression"].values():
        assert np.array_equal(values, [2, np.nan, 1], equal_nan=True)
    diagnosis.step = 3  # of another step
    assert set(step_columns(observe(state), ["a"])) == {"threshold", "selected", "compression"}


def test_names_are_given_to_a_state_that_wants_them(tmp_path):
    class Numbered:
        def name_parameters(self, named_parameters):
            self.named = dict(named_parameters)

    state = Numbered()
    with Capture(tmp_path / "a.zarr", nn.Sequential(MODEL)) as capture:
        capture.wrap(state, lambda state, bucket: None)
        capture.wrap(None, lambda state, bucket: None)  # one that does not
    assert list(state.named) == ["0.weight", "0.bias"]


def test_a_diagnosis_by_number_is_told_from_one_by_name():
    state = SimpleNamespace(last=None, diagnosis=None, error_feedback=False)
    for layers, expected in (
        (("0", "1"), True),
        (("0", "weight"), False),
        (("weight",), False),
        ((), False),
    ):
        state.diagnosis = SimpleNamespace(layers=layers)
        assert unnamed(observe(state), ["weight", "bias"]) == expected
    assert not unnamed(observe(SimpleNamespace(diagnosis=None)), ["weight"])
    state.diagnosis = SimpleNamespace(layers=("0", "1"))
    assert not unnamed(observe(state), ["0", "1"])  # of an nn.ParameterList


def test_records_are_news_only_once():
    state = SimpleNamespace(last=None)
    reports = Reports(state)
    reports.begin()
    assert reports.new() is None
    state.last = StepRecord(0, 0.25, 12, 1000, 96)
    assert reports.new().last is state.last
    reports.begin()
    assert reports.new() is None
    state.last = StepRecord(0, 0.25, 12, 1000, 96)  # of another run
    assert reports.new().last is state.last
    state.last = SimpleNamespace(step=0)  # kept, and changed in place
    reports.begin()
    state.last.step = 1
    assert reports.new().last is state.last


def test_layers_with_the_prefix_of_ddp_are_found():
    numbers = {name: np.array([1.0]) for name in ("selected", "target", "delta")}
    diagnosis = SimpleNamespace(
        step=4, layers=("module.a",), residual_norm=0.5, matching_rate=0.75, **numbers
    )
    state = SimpleNamespace(last=StepRecord(4, 0.25, 12, 1000, 96), diagnosis=diagnosis)
    columns = step_columns(observe(state), ["a", "b"])
    assert np.array_equal(columns["layer_compression"]["delta"], [1, np.nan], equal_nan=True)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (0.5, {"compression": {}}),
        (SimpleNamespace(threshold=0.25), {"threshold": 0.25, "compression": {}}),
        (SimpleNamespace(step=4, bytes_sent=8), {"compression": {"bytes_sent": 8}}),
    ],
)
def test_a_record_may_have_some_numbers_only(last, expected):
    state = SimpleNamespace(last=last, diagnosis=None)
    assert step_columns(observe(state), ["a"]) == expected
    state.diagnosis = SimpleNamespace(step=4, matching_rate=0.75)
    assert not unnamed(observe(state), ["a"])
    columns = step_columns(observe(state), ["a"])
    # of which step it is, only a number tells
    known = hasattr(last, "step")
    assert columns.pop("layer_compression", None) == ({} if known else None)
    if known:
        expected["compression"]["matching_rate"] = 0.75
    assert columns == expected
