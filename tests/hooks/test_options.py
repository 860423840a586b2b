"""Each option of today's DDP and ``fully_shard`` is right with the hooks, or refused by name."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers import options

from gradstats import open_trace

pytestmark = pytest.mark.distributed

ELSEWHERE = {
    "module",
    "device_ids",  # of a GPU
    "output_device",  # of a GPU
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "mixed_precision",
    "skip_all_reduce_unused_params",
}
"""Options of DDP that a test of their own has, or that need another machine."""


def test_no_option_is_forgotten():
    """A new release of PyTorch may have new ones: give each a line here and in docs/reliability.md."""
    ddp = set(inspect.signature(DistributedDataParallel).parameters)
    assert ddp == options.DDP_OPTIONS.keys() | ELSEWHERE
    theirs = set(inspect.signature(fully_shard).parameters)
    others = {"module", "mesh", "ignored_params", "dp_mesh_dims"}
    assert theirs == options.FSDP_OPTIONS.keys() | others


def test_options_of_ddp_change_no_bit():
    for same in run_ranks(2, options.ddp_options):
        assert same == dict.fromkeys(same, True)


def test_buckets_that_ddp_passes_over():
    for same in run_ranks(2, options.skipped_buckets):
        assert same == dict.fromkeys(same, True)


def test_what_ddp_averages_by_itself_is_refused_by_name():
    for message in run_ranks(2, options.delayed):
        assert "7 of 8 parameters came in DDP's buckets, layers.0.weight not" in message


def test_mixed_precision_of_ddp_is_refused():
    for message in run_ranks(2, options.half):
        assert "register_comm_hook" in message


def test_options_of_fully_shard():
    for found, both, dims, ignored in run_ranks(4, options.fsdp_options):
        # a threshold of each shard: another shape of the shards sends other elements
        limits = {"reshard_after_forward": 0, "mp_policy": 0.1, "shard_placement_fn": 0.1}
        assert all(error <= limits.get(name, 0) for (name, _), error in found.items()), found
        assert "has the replicas' dimension in its mesh" in both
        assert "has the replicas' dimension in its mesh" in dims
        assert ignored == ""  # FSDP2 does not average it, and neither does the hook


def test_reentrant_checkpointing_is_refused_where_it_cuts_the_buckets_apart(tmp_path):
    found = run_ranks(2, options.checkpointed, str(tmp_path))
    for rank, cases in enumerate(found):
        whole = cases[False, 25, "compressed"][1]
        for (reentrant, size, _), (said, rest, *steps) in cases.items():
            cut = reentrant and size != 25
            if steps:
                assert ("pass use_reentrant=False to torch.utils.checkpoint" in said) == cut
                assert steps == [1 if cut else 2]
                assert cut or all(map(np.allclose, rest, whole))
                continue
            assert len(said) == cut  # once
            trace = open_trace(rest)
            # in the first step there is one bucket
            assert trace.steps(rank) == ([0] if cut else [0, 1, 2, 3, 4])
            same = [trace.read(step, rank=rank) for step in trace.steps(rank)]
            assert all(np.array_equal(each, same[0]) for each in same)
