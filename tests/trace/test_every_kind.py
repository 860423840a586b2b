"""Every kind of trace, whole or interrupted anywhere, opens with xarray, with zarr and with us, and all three agree."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import time

import numpy as np
import pytest
import torch
import xarray
from faults import kills
from forked import CONTEXT
from ranks import run_ranks
from support.every import every
from support.readers import (
    assert_all_agree,
    assert_as_written,
    assert_shards_agree,
    received,
    through_xarray,
)
from support.traces import (
    LAYERS,
    NUMEL,
    assert_same_sketch,
    gradient,
    said,
    write,
    write_shards,
)
from workers.layerwise import captured

from gradstats import open_trace
from gradstats.errors import TraceError
from gradstats.primitives.sketch import sketch
from gradstats.trace import COMPRESSION, KINDS, SCHEMA, TraceWriter, create_trace
from gradstats.trace import format as trace_format
from gradstats.trace import writer as trace_writer

# fmt: off
CASES = {
    "dense": [([0, 5, 7], {})],
    "one kind": [([3], {"kinds": ["gradient"]})],
    "compressed": [([0, 5, 7], {"compress": True})],
    "compressor": [([1, 2, 4], {"compression": True})],  # no step that is diagnosed
    "diagnosed": [(range(8), {"compression": True})],
    "sketches": [([0, 1, 9], {"store": "sketches"})],
    "sketches and a compressor": [(range(5), {"store": "sketches", "compression": True})],
    "bfloat16": [([0, 1], {"dtype": "bfloat16", "compression": True})],
    "several ranks": [(range(4), {"rank": 0}), (range(2), {"rank": 3, "store": "sketches"})],
    "resumed": [(range(1000, 1004), {"compression": True})],
    "no step yet": [([], {"close": False})],
    "closed without a step": [([], {})],
    "grown": [(range(70), {"store": "sketches", "compression": True})],
    "grown often": [(range(40), {"expected_steps": 1})],
    "unused rows": [([0, 4], {"expected_steps": 50, "close": False, "compression": True})],
    "unused rows cut": [([0, 4], {"expected_steps": 5000, "compression": True})],
}
# fmt: on


@pytest.mark.slow
@every("case", CASES)
def test_every_kind_opens_everywhere(tmp_path, case):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS, world_size=4, metadata={"model": "linear"})
    for steps, options in CASES[case]:
        write(path, steps, **options)
    trace = assert_all_agree(path)
    assert trace.attrs["schema"] == SCHEMA
    assert xarray.open_datatree(path, engine="zarr", consolidated=False).attrs["model"] == "linear"
    for steps, options in CASES[case]:
        assert_as_written(trace, steps=steps, **{"rank": 0, **options})
    assert not [p for p in tmp_path.rglob("*") if "layout" in p.name or "partial" in p.name]
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]
    assert not any(p.is_symlink() for p in tmp_path.rglob("*"))


# fmt: off
SHARDED = {
    "two ranks": (2, {}),
    "more ranks than rows": (22, {"kinds": ["gradient"]}),
    "other dimension": (2, {"dims": (1, 0)}),
    "compressed": (2, {"compress": True}),
    "compressor": (2, {"compression": True}),
    "sketches": (3, {"store": "sketches"}),
    "sketches and a compressor": (2, {"store": "sketches", "compression": True}),
    "bfloat16": (2, {"dtype": "bfloat16"}),
    "grown": (2, {"expected_steps": 1}),
    "unused rows": (2, {"expected_steps": 50, "close": False}),
    "one rank": (1, {}),
    "no local": (2, {"kinds": ["gradient", "corrected"]}),
    "local alone": (2, {"kinds": ["local"]}),
}
# fmt: on


@pytest.mark.slow
@every("case", SHARDED)
def test_every_kind_of_a_sharded_model_opens_everywhere(tmp_path, case):
    world, options = SHARDED[case]
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS, world_size=world)
    for rank in range(world):  # the last was killed a step earlier
        steps = range(5 if world == 1 or rank < world - 1 else 4)
        write_shards(path, steps, rank=rank, world=world, **options)
    trace = assert_shards_agree(path)
    kinds = options.get("kinds", KINDS)
    whole = [k for k in kinds if k != "local"]
    assert trace.kinds(0) == list(kinds)
    assert trace.ranks == (list(range(world)) if "local" in kinds else [0])
    if whole:
        assert trace.steps(0) == list(range(5 if world == 1 else 4))
    for kind, step in itertools.product(whole, trace.steps(0)):
        x = gradient(step, 0, kind)
        row = trace.steps(0).index(step)
        assert trace.scalars(0)[f"{kind}_zeros"][row] == np.count_nonzero(x == 0)
        if options.get("store") == "sketches":
            for layer, one in zip(LAYERS, trace.sketches(step, 0, kind), strict=True):
                expected = sketch(x[layer.slice], 7)
                assert one.moments.count == expected.moments.count
                assert one.moments.sum_abs == pytest.approx(expected.moments.sum_abs, rel=1e-12)
                assert np.array_equal(one.bins, expected.bins)
                assert np.array_equal(one.counts, expected.counts)
        elif options.get("dtype") == "bfloat16":
            rounded = torch.from_numpy(x).bfloat16().float().numpy()
            assert np.array_equal(trace.read(step, 0, kind), rounded)
        else:
            assert np.array_equal(trace.read(step, 0, kind), x)
            for layer in LAYERS:
                part = trace.read(step, 0, kind, layer.name)
                assert np.array_equal(part, x[layer.slice].reshape(layer.shape))
    if options.get("compression"):  # counts are of all ranks, seconds of the slowest
        columns = trace.compression(0)
        told = said(3)["compression"]
        assert columns["bytes_sent"][3] == world * told["bytes_sent"]
        assert columns["communicate_seconds"][3] == told["communicate_seconds"]
        assert columns["residual_norm"][3] == pytest.approx(world**0.5 * told["residual_norm"])
        assert trace.scalars(0)["selected"].tolist() == [world * s for s in trace.steps(0)]
        assert np.isnan(trace.layer_compression(0)["delta"]).all()


def test_shards_that_are_not_a_whole_gradient_are_damage(tmp_path):
    """Attributes that were changed: another part twice, a part beyond its parameter, ranks that disagree."""
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS, world_size=2)
    for rank in range(2):
        write_shards(path, range(3), rank=rank, world=2, kinds=["gradient"])
    file = path / "rank00001/zarr.json"
    text = file.read_text()
    for change in (
        lambda a: a["shards"][0].update(offset=[0, 0]),
        lambda a: a["shards"][0].update(offset=[16, 0]),
        lambda a: a["shards"][0].update(shape=[14, 20]),
        lambda a: a["shards"].pop(),
        lambda a: a["shards"].reverse(),
        lambda a: a.update(shard_ranks=[1, 0]),
        lambda a: a.update(shard_ranks=[1]),
        lambda a: a.update(shard_ranks="ranks"),
        lambda a: a["shards"][0].update(offset=["0", 0]),
        lambda a: a["shards"][0].update(offset=[-1, 0]),
        lambda a: a["shards"][0].update(shape=[15]),
        lambda a: a.pop("shards"),
    ):
        about = json.loads(text)
        change(about["attributes"])
        file.write_text(json.dumps(about))
        with pytest.raises(TraceError, match="damaged") as raised:
            open_trace(path).read(0)
        assert "\n" not in str(raised.value)
    file.write_text(text)
    assert np.array_equal(open_trace(path).read(0), gradient(0))
    with pytest.raises(
        TraceError, match="rank 1 holds a part of 'gradient', which is read under rank 0"
    ):
        open_trace(path).read(0, 1)
    (path / "rank00001/gradient/c/2/0").unlink()
    with pytest.raises(TraceError, match="chunks are missing"):
        open_trace(path).read(2)
    assert np.array_equal(open_trace(path).read(1), gradient(1))


@pytest.mark.slow
def test_ranks_of_a_sharded_model_killed_at_a_random_moment(tmp_path):
    """What both had committed is there and true, whoever died first."""
    assert kills.shards(0, tmp_path) == "nothing lost"


@pytest.mark.distributed
def test_a_run_with_a_compressor_opens_everywhere(tmp_path):
    """What a training with `Capture` and a hook of ours leaves: the case that xarray refused."""
    run_ranks(2, captured, str(tmp_path / "run.zarr"), "topk")
    trace = assert_all_agree(tmp_path / "run.zarr")
    assert trace.ranks == [0, 1]
    assert set(trace.compression(1)) == set(COMPRESSION)
    assert np.isfinite(trace.layer_compression(1)["delta"][[0, 3]]).any()


class Killed(BaseException):
    """Ends the writer where it stands: nothing of it catches this."""


def counted(monkeypatch, allowed):
    """Let the writer do so many system calls that change the disk, and no more."""
    left = itertools.count(allowed, -1)

    def limited(operation):
        def once(*arguments, **options):
            if next(left) <= 0:
                raise Killed
            return operation(*arguments, **options)

        return once

    # pathlib and shutil call these
    for name in ("mkdir", "replace", "rmdir", "symlink", "unlink"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["growth", "close"])
def test_interrupted_in_mid_growth_or_mid_close_at_every_operation(tmp_path, monkeypatch, moment):
    linked = 0
    for allowed in itertools.count(0, 1):
        path = tmp_path / f"{allowed}.zarr"
        create_trace(path, LAYERS)
        writer = write(
            path,
            [0, 1],
            kinds=["gradient"],
            close=False,
            expected_steps=2 if moment == "growth" else 9,
        )
        with monkeypatch.context() as patch:
            counted(patch, allowed)
            try:
                if moment == "growth":
                    writer._resize(4)
                else:
                    writer.close()
                finished = True
            except Killed:
                finished = False
        rank = path / "rank00000"
        linked += any(p.is_symlink() for p in rank.rglob("*"))
        assert_as_written(open_trace(path), 0, [0, 1], ["gradient"])
        with xarray.open_datatree(path, engine="zarr", consolidated=False) as tree:
            length = tree["rank00000"].sizes["step"]
            assert tree["rank00000"].step.values[:2].tolist() == [0, 1]
        assert length in {"growth": (2, 4), "close": (9, 2)}[moment]
        if finished:
            break
        write(path, [2, 3], kinds=["gradient"], expected_steps=2, resume=True)
        assert_as_written(open_trace(path), 0, range(4), ["gradient"])
        assert not any(p.is_symlink() for p in rank.rglob("zarr.json*"))
    assert length == {"growth": 4, "close": 2}[moment]
    assert not any(p.is_symlink() for p in rank.rglob("*"))
    assert linked > 12
    assert_all_agree(path)


def contents(path):
    """Return the bytes of every file of a trace, by name."""
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["packing", "unpacking"])
def test_interrupted_in_mid_packing_or_unpacking_at_every_operation(tmp_path, monkeypatch, moment):
    """Closed, or continued after that: all readers find every step, and what a kill left goes with the next writer."""
    # two rows a chunk, so that columns are packed, too
    monkeypatch.setattr(trace_format, "GROW", 2)
    # nothing here is about power failures
    for name in ("sync", "fsync"):
        monkeypatch.setattr(os, name, lambda *_: None)
    options = {"kinds": ["gradient"], "store": "sketches", "expected_steps": 2}
    base, whole = tmp_path / "base.zarr", tmp_path / "whole.zarr"
    for path, steps, close in ((base, 4, moment == "unpacking"), (whole, 5, True)):
        create_trace(path, LAYERS)
        write(path, range(steps), close=close, **options)
    expected = contents(whole)
    assert sum(name.name == "c.0" for name in expected) > 5
    found = set()
    for allowed in itertools.count():
        path = tmp_path / f"{allowed}.zarr"
        shutil.copytree(base, path, symlinks=True)
        writer = TraceWriter(path, 0, resume=True, **options) if moment == "packing" else None
        with monkeypatch.context() as patch:
            counted(patch, allowed)
            try:
                if writer is not None:
                    writer.close()
                else:
                    TraceWriter(path, 0, resume=True, **options)
                finished = True
            except Killed:
                finished = False
        found.add("/".join(sorted(p.parent.name for p in path.rglob("c.0"))))
        assert_as_written(open_trace(path), 0, range(4), ["gradient"])
        numbers = through_xarray(path, consolidated=False)["rank00000"]
        assert numbers["step"][1].values[:4].tolist() == list(range(4))
        assert int(numbers["gradient_counts"][1].sum()) == 4 * NUMEL
        write(path, [4], resume=True, **options)
        assert contents(path) == expected
        shutil.rmtree(path)
        if finished:
            break
    # arrays one after the other, or all before the first is switched
    assert len(found) > (5 if moment == "packing" else 2)
    assert allowed > 30


def test_a_disk_that_fills_in_mid_growth_loses_nothing(tmp_path, monkeypatch):
    """The write fails, as on a full disk, and the writer goes on when there is room again."""
    for allowed in range(0, 40, 3):
        path = tmp_path / f"{allowed}.zarr"
        create_trace(path, LAYERS)
        writer = write(path, [0, 1], kinds=["gradient"], close=False, expected_steps=2)
        left = itertools.count(allowed, -1)

        def full(operation, left=left):
            def once(*arguments, **options):
                if next(left) <= 0:
                    raise OSError(28, "No space left on device")
                operation(*arguments, **options)

            return once

        with monkeypatch.context() as patch:
            for name in ("write_file", "write_link"):
                patch.setattr(trace_writer, name, full(getattr(trace_writer, name)))
            with contextlib.suppress(TraceError):
                writer.append(2, {"gradient": gradient(2)}, loss=1.0)
            committed = open_trace(path).steps()
            assert committed in ([0, 1], [0, 1, 2])
        assert through_xarray(path, consolidated=False)
        writer.append(3, {"gradient": gradient(3)}, loss=1.5)
        writer.append(4, {"gradient": gradient(4)}, loss=2.0)
        writer.append(5, {"gradient": gradient(5)}, loss=2.5)
        writer.close()
        trace = assert_all_agree(path)
        assert trace.steps() == [*committed, 3, 4, 5]
        assert not any(p.is_symlink() for p in path.rglob("*"))


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(trace_writer, "write_link", refused)
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    write(path, range(9), expected_steps=2)
    assert_as_written(assert_all_agree(path), 0, range(9))


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_a_random_moment_all_readers_agree(tmp_path, seed):
    """SIGKILL: during creation, steps, growth or close, of gradients or sketches."""
    assert kills.writer(seed, tmp_path) == "nothing lost"


def replace_for_ever(path, reports):
    """Write ever new traces in the place of the last; say which is complete."""
    reports.send("ready")
    for number in itertools.count():
        create_trace(path, LAYERS, metadata={"number": number}, overwrite=True)
        writer = TraceWriter(path, 0, expected_steps=8)
        for step in range(8):
            writer.append(step, {"gradient": gradient(step)}, loss=float(number))
        writer.close()
        reports.send(number)


@pytest.mark.parametrize("seed", range(2))
def test_killed_while_overwriting_no_half_of_an_old_trace_opens(tmp_path, seed):
    path = tmp_path / "run.zarr"
    reports, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=replace_for_ever, args=(path, theirs))
    process.start()
    theirs.close()
    assert reports.recv() == "ready"
    time.sleep(random.Random(seed).uniform(0.02, 0.4))
    process.kill()
    complete = max(received(reports), default=-1)
    process.join()
    for found in tmp_path.iterdir():  # what was being removed does not open either
        if not (found / "zarr.json").exists() or ".partial" in found.name:
            continue
        trace = open_trace(found)
        number = trace.attrs["number"]
        assert complete <= number <= complete + 1
        if number <= complete:
            assert trace.steps() == list(range(8))
        if trace.ranks:
            assert set(trace.scalars()["loss"].tolist()) <= {float(number)}
            for step in trace.steps():
                assert np.array_equal(trace.read(step), gradient(step))
    create_trace(path, LAYERS, overwrite=True)
    assert not list(tmp_path.glob(".*.replaced")) or complete < 0


def test_closing_costs_what_was_written(tmp_path):
    """And not what was laid out: 200,000 rows of sketches took minutes."""
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    writer = write(
        path, range(20), store="sketches", compression=True, expected_steps=200_000, close=False
    )
    start = time.process_time()
    writer.close()
    assert time.process_time() - start < 2  # 0.02 s on an idle machine
    assert_as_written(assert_all_agree(path), 0, range(20), compression=True)
    assert sum(1 for p in path.rglob("*") if p.is_file()) < 400


def test_steps_ascend_and_columns_have_room(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    writer = write(path, [3, 4], kinds=["gradient"], close=False)
    for step in (-1, 3, 4):
        with pytest.raises(ValueError, match=f"step {step} does not come after step 4"):
            writer.append(step, {"gradient": gradient(0)})
    with pytest.raises(ValueError, match="compression=True"):
        writer.append(5, {"gradient": gradient(0)}, compression={"target": 1})
    writer.append(6, {"gradient": gradient(6)})
    writer.close()
    assert open_trace(path).steps() == [3, 4, 6]
    assert open_trace(path).numel == NUMEL


def test_a_group_that_was_closed_without_steps_is_continued(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    write(path, [])
    write(path, [0, 1], resume=True)
    assert_as_written(assert_all_agree(path), 0, [0, 1])


def test_counts_of_a_step_that_was_cut_short_do_not_show_in_the_next(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    writer = write(path, [0], kinds=["gradient"], store="sketches", close=False)
    # killed before its commit; the next gradient has no counts in the bins of this one
    writer._put_sketch("gradient", 1, gradient(1) * np.float32(1e20))
    write(path, [1], kinds=["gradient"], store="sketches", resume=True)
    trace = open_trace(path)
    for i, stored in enumerate(trace.sketches(1)):
        assert_same_sketch(stored, sketch(gradient(1)[LAYERS[i].slice], 7))


def test_zeros_of_bfloat16_are_those_that_are_read(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    x = gradient(0)
    x[:4] = 0, -0.0, 1e-45, -1e-45
    writer = TraceWriter(path, 0, dtype="bfloat16")
    writer.append(0, {"gradient": x})
    writer.close()
    trace = open_trace(path)
    assert np.count_nonzero(trace.read(0) == 0) == 4
    assert trace.scalars()["gradient_zeros"].tolist() == [4]
