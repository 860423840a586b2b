"""Local steps between the replicas of a sharded model: real ranks, two replicas of two shards."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run_ranks
from support.readers import assert_shards_agree
from workers import local_shards as cases

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def four(folder):
    """What the cases returned, rank by rank."""
    return run_ranks(4, cases.four_ranks, str(folder))


@pytest.mark.parametrize("name", cases.OPTIONS)
def test_it_learns_and_ends_with_the_same_parameters_everywhere(four, name):
    results = [rank[f"learns, {name}"] for rank in four]
    losses = np.mean([losses for losses, *_ in results], axis=0)
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()
    for _, parameters, expected, exchanges, last, _ in results:
        assert np.array_equal(parameters, results[0][1])
        # and, where exchanges are late, one at the end
        assert exchanges == (4 * cases.H if name == "one step" else 4 + (name == "delayed"))
        if (
            expected is not None
        ):  # a loop over the model in one piece, whose sums have another order
            np.testing.assert_allclose(parameters, expected, rtol=1e-4, atol=2e-6)
        if name == "topk with decay":
            assert last.target <= last.selected < 1.3 * last.target + 1


def test_each_rank_sends_of_what_it_holds(four):
    sizes = [rank["learns, dense"][4].numel for rank in four]
    parameters = four[0]["learns, dense"][1].size
    assert sizes[:2] == sizes[2:]
    assert sum(sizes[:2]) == parameters


@pytest.fixture(scope="module")
def resumed_four(folder):
    return run_ranks(4, cases.resuming, str(folder))


@pytest.mark.parametrize("name", ["topk with decay", "patterns", "delayed"])
def test_stop_and_resume_through_a_distributed_checkpoint(resumed_four, name):
    for rank, results in enumerate(resumed_four):
        expected, resumed, refused = results[name]
        assert resumed == expected
        another, damaged, shape, ranks, optimizer, fragment = refused
        assert f"this is rank {rank}, and the checkpoint holds rank{(rank + 1) % 4}" in another
        assert damaged.startswith("the checkpoint's outer optimizer cannot be read: ")
        assert "0.weight of parameters has shape (3,), not shape" in shape
        assert ranks.startswith("the checkpoint is of an exchange among ranks [0, 1], and this is")
        assert "optimizer is SGD with groups of [6] parameters, and this is AdamW" in optimizer
        assert "the checkpoint is of x, and this is SparseCompressor" in fragment


@pytest.mark.parametrize("name", cases.CAPTURED)
def test_a_capture_holds_each_replicas_pseudogradients(four, folder, name):
    held = [rank[f"learns, {name}"][5] for rank in four]
    trace = assert_shards_agree(folder / f"{name}.zarr")
    assert trace.steps() == [0, 1, 2, 3]
    assert [r for r in trace.ranks if trace.has_gradients(r)] == [0, 2]
    for rank in (0, 2):
        deltas, gradients = held[rank]
        assert len(deltas) == len(gradients) == 4
        assert trace.shard_ranks(rank) == [rank, rank + 1]
        for step in trace.steps():
            pseudogradient = trace.read(step, rank, "pseudogradient")
            # the first of two fragments is exchanged earlier in an interval
            end = slice(-8 if name == "patterns" else 0, None)
            assert np.array_equal(pseudogradient[end], deltas[step][end])
            assert np.array_equal(trace.read(step, rank)[end], gradients[step][end])
            if name == "topk with decay" and step:
                corrected = trace.read(step, rank, "corrected")
                assert np.abs(corrected - pseudogradient).max() > 0
    assert np.abs(held[0][0][0] - held[2][0][0]).max() > 0


def test_a_shard_that_is_not_finite_stops_all_ranks_and_training_goes_on(four):
    results = [rank["not finite"] for rank in four]
    for said, losses, parameters in results:
        assert "NaN or infinite gradient elements" in said
        assert np.isfinite(losses).all()
        assert parameters == results[0][2]


def test_groups_and_captures_that_do_not_fit_are_refused(four):
    for said in (rank["refusals"] for rank in four):
        assert 'such as mesh["replicate"]' in said["all ranks"]
        assert 'such as mesh["replicate"]' in said["one replica"]
        assert 'mesh=mesh["shard"]' in said["both dimensions"]
        assert "take 'gradient'" in said["local"]
        assert "hold other shards than this one" in said["other shards"]
        assert "are gathered" in said["gathered"]
        assert "no parameter that is trained is sharded" in said["frozen"]
        assert said["clip"] == "clip is of a whole gradient, and these are shards: leave it out"
        assert said["decay"].startswith("weight_decay is of a whole gradient")


def test_a_parameter_that_is_not_sharded_is_captured_where_it_is_held(four, folder):
    assert [rank["ignored"] for rank in four] == [2] * 4
    trace = assert_shards_agree(folder / "ignored.zarr")
    assert trace.steps() == [0, 1]
    # it is the last element, and the first rank of a replica holds it
    assert trace.read(1, 2, "pseudogradient")[-1] != 0


def test_one_shard_a_replica_is_the_model_in_one_piece_to_the_bit():
    for rank in run_ranks(2, cases.two_ranks):
        assert rank.keys() == {"dense", "topk with decay", "delayed"}
        for sharded, whole in rank.values():
            assert sharded == whole


def test_a_lost_rank_is_one_error_on_every_rank(tmp_path):
    with pytest.raises(FileNotFoundError):  # no rank returns
        run_ranks(4, cases.lost_rank, tmp_path)
    said = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert said.keys() == {"0", "1", "2"}
    for text in said.values():
        assert text.startswith("after local step 10: ")
        assert "\n" not in text
