"""Capture under FSDP2: real ranks, against autograd of the same model in one piece."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray
from ranks import each_of, run_ranks
from support.every import every
from support.readers import assert_shards_agree
from workers import sharded

import gradstats
from gradstats import moments, open_trace
from gradstats.analysis.info import info_records
from gradstats.cli import main
from gradstats.primitives.sketch import sketch
from gradstats.trace.sources import open_source

pytestmark = [
    pytest.mark.distributed,
    # These models train faster than any disk writes.
    pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning"),
]

TOLERANCE = {"rtol": 2e-5, "atol": 2e-7}
"""Sums over the ranks in another order than ours."""

LOCAL = {"kinds": ("gradient", "local")}
HOOKED = ("gradient", "corrected", "local")
# fmt: off
CASES = {  # ranks of the mesh, options of the capture, ranks with gradients
    "1-D": ((2,), LOCAL, [0]),
    "HSDP": ((2, 2), LOCAL, [0]),
    "micro-steps": ((2,), LOCAL, [0]),
    "micro-steps without exchange": ((2,), LOCAL, [0]),
    "float64": ((2,), LOCAL, [0]),
    "bfloat16": ((2,), LOCAL, [0]),
    "second dimension": ((2,), LOCAL, [0]),
    "three ranks": ((3,), LOCAL, [0]),
}
# fmt: on


@pytest.fixture(scope="module")
def in_pieces(tmp_path_factory):
    """Path and what the ranks saw of each case; those of as many ranks are run by the same processes."""
    folder, worlds = tmp_path_factory.mktemp("sharded"), {}
    for case, (shape, options, _) in CASES.items():
        given = str(folder / case), shape, case, options
        worlds.setdefault(int(np.prod(shape)), {})[case] = given
    found = {}
    for world, cases in worlds.items():
        ranks = run_ranks(world, each_of, sharded.captured, tuple(cases.values()))
        for (case, (path, *_)), *seen in zip(cases.items(), *ranks, strict=True):
            found[case] = path, seen
    return found


@pytest.fixture(scope="module")
def hooked(tmp_path_factory):
    """Path of a trace of a training with a shard hook, in which each replica has one part, and what its ranks saw."""
    path = tmp_path_factory.mktemp("hooked") / "run.zarr"
    return path, run_ranks(4, sharded.with_hook, str(path), 1, HOOKED)


@every("case", CASES)
def test_the_gradient_is_that_of_the_model_in_one_piece(in_pieces, case):
    shape, _, leaders = CASES[case]
    path, seen = in_pieces[case]
    world = int(np.prod(shape))
    trace = assert_shards_agree(path)
    assert trace.ranks == list(range(world))
    assert [r for r in trace.ranks if trace.has_gradients(r)] == leaders
    assert trace.steps() == [0, 1, 2, 3]
    assert trace.attrs["world_size"] == world
    assert [la.name for la in trace.layers] == [n for n, _ in sharded.network().named_parameters()]
    mean = np.mean(seen, axis=0)
    near = {"rtol": 0.02, "atol": 2e-3} if case == "bfloat16" else TOLERANCE
    for step in trace.steps():
        np.testing.assert_allclose(trace.read(step), mean[step], **near)
        for rank in range(world):
            np.testing.assert_allclose(trace.read(step, rank, "local"), seen[rank][step], **near)
        # a partial norm is what production systems have logged
        assert moments(trace.read(step)).sum_squares == pytest.approx(
            np.square(mean[step]).sum(), rel=0.05 if case == "bfloat16" else 1e-5
        )
    assert np.abs(seen[0] - seen[1]).max() > 0.01


def test_sketches_and_one_rank(tmp_path):
    """Sketches of shards add up to those of the whole; `ranks` names the rank that a gradient is read under."""
    path = tmp_path / "run.zarr"
    options = {"store": "sketches", "ranks": [0], "total_steps": 4}
    seen = run_ranks(2, sharded.captured, str(path), (2,), "1-D", options)
    trace = assert_shards_agree(path)
    assert trace.ranks == [0]
    assert trace.shard_ranks(0) == [0, 1]
    for step in trace.steps():
        mean = np.mean(seen, axis=0)[step]
        for layer, one in zip(trace.layers, trace.sketches(step), strict=True):
            expected = sketch(mean[layer.slice].astype(np.float32), 7)
            assert one.moments.count == expected.moments.count
            assert one.moments.sum_squares == pytest.approx(expected.moments.sum_squares, rel=1e-4)


@pytest.mark.parametrize("parts", [1, 2])
def test_with_a_shard_hook_each_replica_shows_what_it_compressed(tmp_path, hooked, parts):
    path, found = hooked
    if parts > 1:
        path = tmp_path / "run.zarr"
        found = run_ranks(4, sharded.with_hook, str(path), parts, HOOKED)
    seen = [gradients for gradients, _ in found]
    trace = assert_shards_agree(path)
    assert [r for r in trace.ranks if trace.has_gradients(r)] == [0, 2]
    assert [r for r in trace.ranks if trace.has_gradients(r, "local")] == [0, 1, 2, 3]
    memory = {rank: np.zeros(trace.numel) for rank in (0, 2)}
    for step in trace.steps():
        for first in (0, 2):
            mean = (seen[first][step] + seen[first + 1][step]) / 2
            gradient = trace.read(step, first)
            np.testing.assert_allclose(gradient, mean, **TOLERANCE)
            corrected = trace.read(step, first, "corrected")
            memory[first] += gradient
            # what was sent left the memory; of the rest nothing is lost
            np.testing.assert_allclose(corrected, memory[first], atol=1e-5)
            sent = _largest(trace, corrected)
            assert 0.02 < sent.size / corrected.size < 0.1
            memory[first] = corrected.astype(float)
            memory[first][sent] = 0
    # the record is that of all shards and units
    for first in (0, 2):
        records = [found[first][1], found[first + 1][1]]
        for step, (one, other) in enumerate(zip(*records, strict=True)):
            for name in ("target", "bytes_sent", "union"):
                total = getattr(one, name) + getattr(other, name)
                assert trace.compression(first)[name][step] == total
            assert trace.compression(first)["numel"][step] == trace.numel
            assert trace.scalars(first)["selected"][step] == one.selected + other.selected
    assert trace.scalars(0)["loss"].tolist() == [0.0, 0.5, 1.0, 1.5]


def test_what_fsdp2_divides_under_float16_is_taken_back(tmp_path):
    """Of three shards it divides by 2 before the sum, and by 1.5 after the hook."""
    path, kinds = tmp_path / "run.zarr", ("gradient", "corrected", "local")
    found = run_ranks(3, sharded.with_hook, str(path), 1, kinds, 1, torch.float16)
    seen = [gradients for gradients, _ in found]
    trace = assert_shards_agree(path)
    near = {"rtol": 0.01, "atol": 1e-3 * np.abs(seen[0]).max()}
    for step in trace.steps():
        mean = np.mean([g[step] for g in seen], axis=0)
        np.testing.assert_allclose(trace.read(step), mean, **near)
        for rank in range(3):
            np.testing.assert_allclose(trace.read(step, rank, "local"), seen[rank][step], **near)
    np.testing.assert_allclose(trace.read(0, 0, "corrected"), trace.read(0), **near)


def _largest(trace, corrected):
    """Return what top-k of 5 % takes of each unit's shard, on each of two ranks."""
    from math import ceil

    sent = []
    for unit in (["0."], ["2."], ["4."]):
        layers = [la for la in trace.layers if la.name.startswith(unit[0])]
        for shard in range(2):
            own = []
            for la in layers:
                rows = ceil(la.shape[0] / 2)
                index = np.arange(la.offset, la.slice.stop).reshape(la.shape)
                own.append(index[shard * rows : (shard + 1) * rows].ravel())
            own = np.concatenate(own)
            if own.size:
                k = max(1, round(0.05 * own.size))
                sent.append(own[np.argsort(-np.abs(corrected[own]), kind="stable")[:k]])
    return np.concatenate(sent)


def test_a_parameter_without_a_gradient(tmp_path):
    """FSDP2 leaves it out of its buffers: told to fill it with zeros, or one warning that says how."""
    for told in (True, False):
        path = tmp_path / f"{told}.zarr"
        found = run_ranks(2, sharded.unused, str(path), told)
        trace = open_trace(path)
        for said, _ in found:
            assert len(said) == (0 if told else 1), said
            assert told or "set_reduce_scatter_unused_params(True)" in said[0]
        assert trace.steps() == ([0, 1] if told else [])
        for step in trace.steps():
            for rank, (_, seen) in enumerate(found):
                local = trace.read(step, rank, "local")
                place = next(la.slice for la in trace.layers if la.name == "idle")
                assert not local[place].any()
                np.testing.assert_allclose(np.delete(local, place), seen[step], **TOLERANCE)


def test_a_layer_whose_turn_it_is_not_is_zero_and_nothing_of_a_step_thrown_away_is_left(tmp_path):
    run_ranks(2, sharded.in_turns, str(tmp_path))
    turns = open_trace(tmp_path / "turns.zarr")
    used = [[part.any() for part in np.split(turns.read(step), 2)] for step in turns.steps()]
    assert used == [[True, False], [False, True]] * 2
    for to_none in (True, False):
        thrown = open_trace(tmp_path / f"thrown-{to_none}.zarr")
        for rank in range(2):
            first, other = (thrown.read(step, rank, "local") for step in thrown.steps())
            np.testing.assert_allclose(first, other, rtol=1e-6)
            # the second rank's inputs are twice those of the first
            assert np.abs(first).sum() == pytest.approx(
                np.abs(thrown.read(0, 0, "local")).sum() * (rank + 1), rel=1e-6
            )


def test_what_cannot_be_captured_is_refused(tmp_path):
    for rank, said in enumerate(run_ranks(4, sharded.refusals, str(tmp_path / "run.zarr"))):
        # how many ranks write, as the first of them counts
        rooms = {"averaged replicas, None": 2, "averaged replicas, [0]": 2,
                 "apart replicas, None": 4, "apart replicas, [0]": 2}  # fmt: skip
        for name, count in rooms.items():
            assert said[f"room of {name}"] == ("None" if rank else str(count)), name
        # of the replica that writes; each rank has its own part of 'local'
        assert said["unwritten"] == [
            "kind gradient of a sharded model is captured under rank 0, which ranks= leaves out: nothing of it is "
            "captured"
        ] * (rank < 2)
        assert "call fully_shard() on it first" in said["plain"]
        assert 'mesh=mesh["shard"]' in said["both dimensions"]
        assert "write lambda" in said["not a factory"]
        assert 'mesh["replicate"]' in said["two dimensions"]
        assert "across replicas" in said["wrong dimension"]
        assert "sharded by fully_shard()" in said["local of a plain model"]
        assert "call shard_hook() first" in said["capture before the hook"]
        assert "before the first forward pass" in said["gathered"]
        assert "keep= is not for a sharded model" in said["kept"]
        assert all("\n" not in line for line in said.values())


@pytest.mark.usefixtures("unrendered")
def test_every_command_takes_a_sharded_trace(tmp_path, hooked, capsys):
    path, _ = hooked
    name = str(path)
    for command in (
        ["info", name],
        ["fit", name, "--per-layer", "--step", "0", "--kind", "local"],
        ["compressibility", name, "--step", "0"],
        ["quality", name, "--ratio", "0.01", "--estimator", "sidco-e"],
        ["pot", name, "--step", "0", "--kind", "gradient"],
        ["drift", name],
        ["compression", name],
        ["report", name, "-o", str(tmp_path / "report.html")],
    ):
        with pytest.raises(SystemExit) as done:
            main(command)
        assert done.value.code == 0, capsys.readouterr().err
        out = capsys.readouterr().out
        assert out or command[0] == "report"
        lines = (line for line in out.splitlines() if line != name)  # a path stays whole
        assert max(map(len, lines), default=0) <= 80, out
    records = info_records(open_source(path))
    assert {r["selected"] for r in records if r["rank"] in (1, 3)} == {None}  # parts are no totals
    assert len({r["selected"] for r in records if r["rank"] == 0}) == 1
    assert [r["rank"] for r in gradstats.compression(name)] == [0] * 4 + [2] * 4
    with xarray.open_datatree(path, engine="zarr", consolidated=False) as tree:
        assert set(tree["rank00001"].attrs["shard_ranks"]) == {0, 1}
