"""Codecs as options of reference runs: at the terminal, in the lab, and in a training."""

from __future__ import annotations

import pytest

from capture.lab.run import _with, check
from capture.options import run_config
from capture.workloads import RunConfig, run
from gradstats.collectives import Codec
from gradstats.errors import InputError
from gradstats.network import exchange


def test_the_terminals_options_are_those_of_the_compressor():
    plain = run_config("resnet20-digits", compressor="topk", indices="plain", values="float32")
    assert not plain.options
    coded = run_config("resnet20-digits", compressor="dgc", indices="rice", values="int8")
    assert coded.options == {"indices": "rice", "values": "int8"}
    coded.check()
    assert coded.metadata()["options"] == coded.options


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        ("randomk", "randomk sends no positions"),
        ("none", "none sends no positions"),
        ("torch-topk", "torch-topk has no codec"),
        ("torch-bf16", "torch-bf16 has no codec"),
        ("redsync-quantised", "redsync-quantised sends no values"),
    ],
)
def test_runs_that_cannot_code_are_refused(compressor, message):
    options = {"values": "int8"} if "quantised" in compressor else {"indices": "rice"}
    with pytest.raises(InputError, match=message):
        RunConfig(workload="resnet20-digits", compressor=compressor, options=options).check()


def test_the_lab_compares_a_codec_with_exchanges_that_have_none():
    config = run_config("resnet20-digits", steps=10, indices="rice")
    check(config, ["none", "topk", "torch-bf16", "powersgd"])
    assert _with(config, "topk", 0).options == {"indices": "rice"}
    assert not _with(config, "torch-bf16", 0).options
    with pytest.raises(InputError, match="randomk sends no positions"):
        check(config, ["none", "randomk"])


@pytest.mark.slow
@pytest.mark.distributed
def test_a_training_with_coded_positions_is_the_same_and_sends_what_plan_says():
    def train(compressor, **options):
        config = RunConfig(workload="resnet20-digits", steps=3, batch_size=8, ratio=0.01)
        return run(config.replace(compressor=compressor, options=options))

    plain, coded = train("topk"), train("topk", indices="rice")
    assert coded.losses == plain.losses
    assert coded.checksum == plain.checksum
    for result, codec in ((plain, Codec()), (coded, Codec("rice"))):
        predicted = exchange("topk", result.numel, 0.01, 2, codec=codec).bytes_sent
        assert [r["bytes_sent"] for r in result.records] == [predicted] * 3
    narrow = train("torch-bf16")
    assert narrow.losses[0] == plain.losses[0]
    assert narrow.losses[1:] != plain.losses[1:]
