"""Names of systems are whole systems, and `threshold:NAME` is the rule alone."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from support.every import every
from torch import nn
from workers import layerwise

from gradstats.compressors import (
    RULE,
    SELECTORS,
    Layerwise,
    SparseCompressor,
    compressor_class,
    make_compressor,
)
from gradstats.compressors.redsync import (
    DENSE_BELOW,
    SEARCH_ABOVE,
    MeanOfSign,
    redsync_selector,
)
from gradstats.errors import InputError
from gradstats.hooks import ErrorFeedback, MomentumCorrection, dgc_warm_up
from gradstats.hooks.ratio import DGC_RATIOS
from gradstats.hooks.systems import SYSTEMS, dgc, make_state, redsync


def model():
    return nn.Sequential(
        nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 300), nn.Linear(300, 3)
    )


def chosen(state, name):
    """The selector that a layer-wise state has for a parameter of the model."""
    numels = {n: p.numel() for n, p in model().named_parameters()}
    return state.compressor.choose(name, numels[name])


def test_dgc_is_layer_by_layer_with_vectors_dense_and_momentum_corrected():
    state = make_state("dgc", 0.01, model().named_parameters())
    assert isinstance(state.compressor, Layerwise)
    assert isinstance(state.memory, MomentumCorrection)
    assert (state.memory.momentum, state.memory.masking) == (0.9, True)
    assert state._setup.layout.names == ["0.weight", "2.weight", "3.weight"]
    assert chosen(state, "2.weight").estimator.name == "dgc"
    assert make_state(
        "dgc", 0.01, model().named_parameters(), exclude=["3.*"]
    )._setup.layout.names == [
        "0.weight",
        "2.weight",
    ]


@pytest.mark.parametrize("name", ["redsync", "redsync-quantised"])
def test_redsync_has_four_classes_of_size_and_an_exact_output_layer(name):
    options = {"dense_below": 500, "topk_below": 13_000, "search_above": 50_000}
    state = make_state(name, 0.01, model().named_parameters(), **options)
    assert chosen(state, "0.bias").whole  # dense, as it comes
    assert not chosen(state, "0.weight").whole
    quantised = name == "redsync-quantised"
    for parameter, estimator in (("0.weight", "exact"), ("2.weight", "redsync")):
        selector = chosen(state, parameter)
        assert isinstance(selector, MeanOfSign) == quantised
        rule = (selector.selector if quantised else selector).estimator
        assert rule.name == estimator
    assert rule.interval == (1 if quantised else 5)  # the sign changes in every step
    # the same density in every layer, now and after a schedule
    assert chosen(state, "2.weight").target(90_000) == 900
    assert state.compressor.ratio == 0.01
    assert redsync_selector(20_000, 0.01, topk_below=13_000).estimator.name == "redsync-trimmed"
    for output in ("3.weight", "3.bias"):
        assert not isinstance(chosen(state, output), MeanOfSign)
    named = redsync(model().named_parameters(), dense_below=0, output_layer=["0.*"], quantise=True)
    assert not isinstance(chosen(named, "0.weight"), MeanOfSign)
    assert isinstance(chosen(named, "3.weight"), MeanOfSign)
    assert state.memory.nesterov == "dgc"


def test_redsync_changes_its_exchange_at_128_kb_and_4_mb_of_float32():
    sizes = {"dense": 2**15 - 1, "top": 2**15, "trimmed": 2**20 - 1, "searched": 2**20}
    named = [(name, torch.empty(numel, 1)) for name, numel in sizes.items()]
    state = redsync(named, 0.01, topk_below=2**15 + 1)
    choices = {name: state.compressor.choose(name, numel) for name, numel in sizes.items()}
    assert choices.pop("dense").whole
    rules = {name: selector.estimator.name for name, selector in choices.items()}
    assert rules == {"top": "exact", "trimmed": "redsync-trimmed", "searched": "redsync"}
    assert redsync_selector(2**20, 0.01).estimator.name == "redsync"
    assert redsync_selector(2**20 - 1, 0.01).estimator.name == "redsync-trimmed"
    assert (4 * DENSE_BELOW, 4 * SEARCH_ABOVE) == (128 * 1024, 4 * 1024**2)


def test_redsync_is_dense_for_as_many_steps_as_asked_and_corrects_momentum():
    state = redsync(model().named_parameters(), 0.01, dense_steps=3, nesterov="redsync")
    assert [state._setup.schedule.dense(step) for step in range(5)] == [True] * 3 + [False] * 2
    assert (state.memory.momentum, state.memory.nesterov) == (0.9, "redsync")
    assert state.memory.masking
    assert not redsync(model().named_parameters(), 0.01)._setup.schedule.dense(0)


@pytest.mark.parametrize(
    ("ratio", "ratios"),
    [
        (0.001, [0.25, 0.0625, 0.015625, 0.004, 0.001]),
        (0.01, [0.25, 0.0625, 0.015625, 0.01, 0.01]),
        (0.1, [0.25, 0.1, 0.1, 0.1, 0.1]),
        (0.5, [0.5] * 5),
    ],
)
def test_dgc_never_warms_up_through_less_than_its_ratio(ratio, ratios):
    state = dgc(model().named_parameters(), ratio, steps_per_epoch=3)
    assert [state._setup.schedule.of(step) for step in range(0, 15, 3)] == ratios
    state._setup.schedule.begin(3)
    assert state.compressor.ratio == ratios[1]


def test_every_system_trains_with_the_codec_and_the_clipping_that_it_is_given():
    for name in SYSTEMS:
        options = {"compressor_options": {"indices": "rice"}, "clip": 2.0}
        state = make_state(name, 0.01, model().named_parameters(), **options)
        assert state.compressor._codec.indices == "rice", name
        assert state._setup.clip == 2.0, name


def test_a_ratio_of_every_layer_follows_a_schedule():
    state = redsync(
        model().named_parameters(), 0.1, dense_below=0, ratio_at=dgc_warm_up(1, (0.5, 0.2))
    )
    first = state.compressor._selector("0.weight", 12_000)
    assert (first.ratio, first.target(12_000)) == (0.5, 6000)
    state._setup.schedule.begin(1)
    assert first.ratio == state.compressor._selector("2.weight", 90_000).ratio == 0.2
    assert Layerwise(lambda name, numel: first).ratio is None


@every("name", SELECTORS)
def test_a_bare_rule_has_a_name_of_its_own(name):
    assert compressor_class(RULE + name) is SparseCompressor
    bare = make_compressor(RULE + name, 0.01)
    assert isinstance(bare, SparseCompressor)
    state = make_state(RULE + name, 0.01, model().named_parameters())
    assert isinstance(state.memory, ErrorFeedback)
    assert not state._setup.layout.dense_slots


def test_unknown_names_and_options():
    named = list(model().named_parameters())
    for name in ("threshold:nonsense", "threshold:", "threshold:marsit", "nonsense"):
        with pytest.raises(InputError, match="no compressor"):
            make_state(name, 0.01, named)
    for name in SYSTEMS:
        with pytest.raises(InputError, match=f"system '{name}': .*nonsense"):
            make_state(name, 0.01, named, compressor_options={"nonsense": 1})
    with pytest.raises(InputError, match="PyTorch's own averaging"):
        make_state("none", 0.01, named)


@pytest.mark.distributed
def test_dense_layers_of_redsync_are_averaged_as_they_come_with_momentum():
    for far, early, targets, numel in run_ranks(2, layerwise.dense_parts):
        assert far < 1e-6  # as under DDP and torch.optim.SGD
        assert early > 0  # messages that left before the backward pass was over
        assert {(target, selected) for target, selected, _ in targets} == {(numel, numel)}
        assert all(sent >= 4 * numel for _, _, sent in targets)


@pytest.mark.distributed
def test_a_layer_that_travels_whole_keeps_its_momentum():
    """At ratios above one half all values are sent: nothing of the momentum is stale then, and masking none of it."""
    for updates in run_ranks(2, layerwise.half_dense):
        assert [len(each) for each in updates] == [1] * 4
        assert [each[0] for each in updates] == pytest.approx([1, 1.9, 2.71, 3.439])


def test_dgc_has_an_epoch_for_each_ratio_of_its_warm_up():
    ratios = len(DGC_RATIOS) - 1  # the last is the training's own
    for steps in (1, ratios, ratios + 1, 100):
        (epoch,) = SYSTEMS["dgc"].warm_up(steps).values()
        assert ratios * (epoch - 1) < steps <= ratios * epoch, steps
