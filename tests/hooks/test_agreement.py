"""Ranks that differ are refused on all of them by name, and updates that differ are found."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from ranks import run_ranks
from support.every import every
from workers import agreement as cases

from gradstats.compressors import COMPRESSORS, Layerwise, make_compressor, make_selector
from gradstats.errors import InputError
from gradstats.hooks import AdamCorrection, ErrorFeedback, MomentumCorrection
from gradstats.hooks.agreement import described, optimizer_options
from gradstats.hooks.fragment import divide
from gradstats.hooks.layout import check_patterns

OPTIONS = {
    **{
        f"{name}: seed": (functools.partial(make_compressor, name, 0.1), {"seed": 1})
        for name in ("randomk", "signsgd", "ef-signsgd", "ssdm", "cascading", "marsit")
    },
    **{
        f"{name}: values": (functools.partial(make_compressor, name, 0.1), {"values": "int8"})
        for name in ("topk", "sidco-e", "lags", "redsync-quantised")
        if name != "redsync-quantised"
    },
    "cltk: indices": (functools.partial(make_compressor, "cltk", 0.1), {"indices": "rice"}),
    "marsit: full": (functools.partial(make_compressor, "marsit", 0.1), {"full_every": 7}),
    "decay": (ErrorFeedback, {"decay": 0.5}),
    "momentum": (MomentumCorrection, {"momentum": 0.5}),
    "masking": (MomentumCorrection, {"masking": False}),
    "betas": (AdamCorrection, {"betas": (0.8, 0.99)}),
}


@every("name", OPTIONS)
def test_every_option_is_described(name):
    make, other = OPTIONS[name]
    assert dict(described("x", make())) == dict(described("x", make()))
    assert dict(described("x", make())) != dict(described("x", make(**other)))


def test_numbers_of_numpy_are_numbers_and_a_type_made_in_c_has_no_options():
    for one, other in (
        (np.float32(1), np.float32(1000)),
        (np.int64(0), np.int64(50)),
        (np.array([1.0, 2.0]), np.array([1.0, 3.0])),
    ):
        assert dict(described("x", one)) != dict(described("x", other))
    assert dict(described("x", np.float64(1))) == dict(described("x", 1))
    assert dict(described("x", torch.Generator())) == {"x": "torch._C.Generator"}


@every("name", [name for name in COMPRESSORS if name != "none"])
def test_a_ratio_is_described_wherever_there_is_one(name):
    one, other = (make_compressor(name, ratio) for ratio in (0.1, 0.2))
    differ = dict(described("x", one)) != dict(described("x", other))
    assert differ == one.has_ratio


def test_functions_are_known_by_what_is_in_them():
    def choose(ratio):
        return Layerwise(lambda name, numel: make_selector("topk", ratio))

    one, same, other = (dict(described("x", choose(ratio))) for ratio in (0.1, 0.1, 0.2))
    assert one == same != other


def test_lists_are_shown_as_they_were_written():
    assert dict(described("x", ["*.bias", 2, ("a", None)])) == {"x": "['*.bias', 2, ['a', None]]"}
    assert dict(described("x", [["a"], "b"])) != dict(described("x", ["a", ["b"]]))


def test_a_set_is_the_same_in_every_process():
    names = [f"{i}.bias" for i in range(50)]
    one, other = set(names), set(dict.fromkeys(names[::-1]))
    assert list(one) != list(other)  # as between processes
    assert dict(described("x", one)) == dict(described("x", other))
    assert dict(described("x", one)) != dict(described("x", one - {"0.bias"}))
    assert check_patterns(one, "exclude") == check_patterns(other, "exclude")
    with pytest.raises(InputError, match="fragments must be a list or a tuple"):
        divide([], frozenset([("*",)]))


@every(
    "case",
    [
        ([10, 20, 30, 60], [3, 1]),
        ([1, 1, 1, 1, 100], [3, 1, 1]),
        ([100, 1, 1], [1, 1, 1]),
        ([0, 0, 0], [1, 1, 1]),
    ],
)
def test_fragments_of_about_equal_size_are_never_empty(case):
    sizes, expected = case
    named = [(str(i), torch.zeros(n)) for i, n in enumerate(sizes)]
    parts = divide(named, len(expected))
    assert [len(part) for part in parts] == expected
    assert [each for part in parts for each in part] == named


def test_a_rate_of_an_optimizer_is_in_its_options():
    weight = torch.nn.Parameter(torch.ones(1))
    one, other = (
        optimizer_options(torch.optim.SGD([weight], lr=rate, momentum=0.9)) for rate in (0.1, 0.2)
    )
    assert "lr 0.1" in one
    assert one != other


@pytest.mark.distributed
def test_what_differs_is_named_on_all_ranks():
    reports = run_ranks(2, cases.differences)
    said = reports[0]
    assert reports[1] == said
    assert said["ratio"] == (
        "InputError: the ranks differ in compressor.selector.ratio, 0.2 on rank 0, 0.1 on rank 1: give all of them "
        "the same"
    )
    assert said["left alone"] == "0"
    assert "differ in compressor.seed, 0 on rank 0, 1 on rank 1" in said["seed"]
    assert said["on the way"].endswith("differ in ratio in step 1, 0.1 on rank 0, 0.3 on rank 1")
    assert said["dense on one"].endswith("differ in ratio in step 3, 0.1 on rank 0, 1 on rank 1")


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_an_update_that_differs_is_found_where_it_is_verified(world):
    who = "ranks 0 and 1 differ" if world == 2 else "rank 2 differs from the others"
    for report in run_ranks(world, cases.verified):
        assert report == [
            "",
            "",
            f"ExchangeError: step 2: 1.weight did not become the same on all ranks: {who}",
            True,
        ]


@pytest.mark.distributed
def test_local_steps_that_differ_are_named():
    reports = run_ranks(2, cases.local_steps)
    said = reports[0]
    assert reports[1] == said
    assert "differ in steps, 4 on rank 0, 3 on rank 1" in said["steps"]
    assert "differ in the outer optimizer's options in step" in said["a scheduler of one rank"]
    assert "lr 0.5" in said["a scheduler of one rank"]
    for name in ("two steps more", "two steps more, late", "two steps more, sparse"):
        assert "the ranks have taken different numbers of local steps" in said[name]
        assert "rank 0 has ended after 8, rank 1 is at " in said[name]
    assert "flags on rank 0, the beginning of a step on rank 1" in said["two steps more, averaged"]
    assert "1.bias did not become the same on all ranks: ranks 0 and 1 differ" in said["verified"]
    assert said["well"] == ""
    assert "rank 0 has ended after 8, rank 1 has ended after 9" in said["a step more"]
