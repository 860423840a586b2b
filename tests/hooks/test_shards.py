"""Compression between the replicas of a sharded model: real ranks, two replicas of two shards."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run_ranks
from workers import sharded

pytestmark = pytest.mark.distributed

STEPS = 40


@pytest.fixture(scope="module")
def warm_exact():
    """40 steps of two replicas of two shards, dense and with warm-exact, by rank."""
    return run_ranks(4, sharded.hybrid, "warm-exact", 0.001, STEPS, 8192)


def test_replicas_stay_the_same_to_the_bit(warm_exact):
    for name in ("dense", "warm-exact"):
        assert len({found[name]["parameters"] for found in warm_exact}) == 1
    assert warm_exact[0]["dense"]["parameters"] != warm_exact[0]["warm-exact"]["parameters"]
    assert all(found["warm-exact"]["last"] == STEPS - 1 for found in warm_exact)


def test_the_loss_falls_as_without_compression(warm_exact):
    losses = {
        name: np.mean([found[name]["losses"] for found in warm_exact], axis=0)
        for name in ("dense", "warm-exact")
    }
    dense, sparse = losses["dense"][-20:], losses["warm-exact"][-20:]
    for first, last in ((losses["dense"][:5], dense), (losses["warm-exact"][:5], sparse)):
        assert last.mean() < first.mean() / 10  # both train
    # of what is gained without compression a tenth may be lacking in so few steps
    gained = losses["dense"][:5].mean() - dense.mean()
    assert abs(sparse.mean() - dense.mean()) < 0.1 * gained


def test_the_slow_link_carries_a_500th(warm_exact):
    for found in warm_exact:
        run = found["warm-exact"]
        # 4-byte positions and values of one element in 1,000, and the messages' heads
        assert run["sent"] / (4 * run["local"]) == pytest.approx(1 / 500, rel=0.25)


@pytest.mark.parametrize("compressor", ["topk", "signsgd", "dgc"])
def test_one_shard_a_replica_is_ddp_to_the_bit(compressor):
    for shards, ddp in run_ranks(2, sharded.against_ddp, compressor, 0.05):
        assert np.array_equal(shards, ddp)


@pytest.mark.parametrize("compressor", ["warm-exact", "lags"])
def test_stop_and_resume_through_a_distributed_checkpoint(tmp_path, compressor):
    found = run_ranks(4, sharded.resumed, str(tmp_path / "checkpoint"), compressor)
    for rank, (expected, resumed, refused) in enumerate(found):
        assert resumed == expected == found[0][0]
        another, replicas, units, parameters = refused
        assert f"this is rank {rank}, and the checkpoint holds rank{(rank + 1) % 4}" in another
        assert "of 3 replicas, and these are 2" in replicas
        assert "other FSDP units" in units
        assert "another model" in parameters


def test_a_gradient_that_is_not_finite_stops_all_ranks_and_training_goes_on():
    found = run_ranks(4, sharded.not_finite)
    for said, losses, _, last in found:
        assert "step 0: NaN or infinite gradient elements" in said
        assert np.isfinite(losses).all()
        assert last in (2, 3)  # of the units, some had sent before the failure
    assert len({parameters for *_, parameters, _ in found}) == 1


def test_options_of_a_shard_hook_do_what_they_do_for_ddp():
    for rank, found in enumerate(run_ranks(4, sharded.options)):
        finite, written, *_, problem = found["zero"]
        assert finite
        assert written > 0
        assert ("25 NaN or infinite elements taken as zero" in problem) == (rank == 0)
        finite, written, *_, problem = found["skip"]
        assert finite
        assert written == 0
        assert "step 0: NaN or infinite gradient elements: 25 on rank 0" in problem
        shares = [
            selected / numel for _, _, selected, numel, _ in (found[step] for step in range(3))
        ]
        assert shares[:2] == [1, 1]
        assert shares[2] == pytest.approx(0.05, abs=0.01)
        assert "2.weight did not become the same on all ranks: ranks 0 and 1 " in found["verified"]
