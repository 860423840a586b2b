"""Every kind of trace, whole or interrupted anywhere, opens with xarray, with zarr and with us, and all three agree."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
import warnings

import numpy as np
import pytest
import torch
import xarray
import zarr
from forked import CONTEXT
from ranks import run_ranks
from support.traces import LAYERS, NUMEL, assert_same_sketch, gradient, old_trace, said, write
from workers.layerwise import captured

from gradstats import open_trace
from gradstats.errors import TraceError
from gradstats.primitives.sketch import sketch
from gradstats.trace import COMPRESSION, KINDS, LAYER_COMPRESSION, SCHEMA, TraceWriter, create_trace
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


def bare(path):
    """Return {rank: {array: (dimensions, values, attributes)}} as zarr alone reads it."""
    root = zarr.open_group(path, mode="r", use_consolidated=False)
    return {
        name: {n: (a.metadata.dimension_names, a, dict(a.attrs)) for n, a in group.arrays()}
        for name, group in root.groups()
    }


def through_xarray(path, **options):
    """Return the same as xarray reads it."""
    with xarray.open_datatree(path, engine="zarr", **options) as tree:
        return named(tree.load())


def named(tree):
    return {
        name: {n: (v.dims, v, v.attrs) for n, v in node.to_dataset().variables.items()}
        for name, node in tree.children.items()
    }


def views(path):
    """Yield the trace as every reader sees it. No reader may warn, but for xarray's advice to consolidate."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield bare(path)
        yield through_xarray(path, consolidated=False)
        yield named(open_trace(path).to_datatree())
        warnings.filterwarnings("ignore", ".*consolidated metadata", RuntimeWarning)
        yield through_xarray(path)


def assert_all_agree(path):
    """Compare what is committed, and every value of it; return our reader's trace."""
    trace = open_trace(path)
    for view in views(path):
        assert sorted(view) == [f"rank{rank:05d}" for rank in trace.ranks]
        for rank in trace.ranks:
            arrays = view[f"rank{rank:05d}"]
            numbers = np.asarray(arrays["step"][1][:])
            rows = np.flatnonzero(numbers >= 0)
            assert numbers[rows].tolist() == trace.steps(rank)
            assert {array.shape[0] for _, array, _ in arrays.values()} == {len(numbers)}
            for dimensions, array, _ in arrays.values():
                assert len(dimensions) == array.ndim
            for name, column in trace.scalars(rank).items():
                assert np.array_equal(np.asarray(arrays[name][1][:])[rows], column, equal_nan=True)
            for name in ("compression", "layer_compression"):
                columns = getattr(trace, name)(rank)
                assert bool(columns) == (name in arrays)
                for i, (column, values) in enumerate(columns.items()):
                    assert arrays[name][2]["names"][i] == column
                    theirs = np.asarray(arrays[name][1][:])[rows, ..., i]
                    assert np.array_equal(theirs, values, equal_nan=True)
            for kind in trace.kinds(rank):
                for row, step in zip(rows[-6:].tolist(), trace.steps(rank)[-6:], strict=True):
                    if trace.has_gradients(rank, kind):
                        theirs = np.asarray(arrays[kind][1][row])
                        if arrays[kind][2].get("encoding") == "bfloat16":
                            theirs = (theirs.astype("u4") << 16).view("f4")
                        assert np.array_equal(theirs, trace.read(step, rank, kind))
                    else:
                        counts = np.asarray(arrays[f"{kind}_counts"][1][row])
                        sums = np.asarray(arrays[f"{kind}_moments"][1][row])
                        for i, one in enumerate(trace.sketches(step, rank, kind)):
                            assert np.array_equal(np.flatnonzero(counts[i]), one.bins)
                            assert np.array_equal(counts[i][one.bins], one.counts)
                            assert sums[i].tolist()[:4] == [
                                *(one.moments.count, one.moments.zeros),
                                *(one.moments.nonfinite, one.moments.sum_abs),
                            ]
    return trace


def assert_as_written(trace, rank, steps, kinds=KINDS, compression=False, dtype=None, **_):
    """Compare the trace with what support.traces.write wrote."""
    assert trace.steps(rank) == list(steps)
    assert trace.scalars(rank)["loss"].tolist() == [s / 2 for s in steps]
    for step in list(steps)[-6:]:
        for kind in kinds:
            x = gradient(step, rank, kind)
            if trace.has_sketches(rank, kind):
                for layer, one in zip(LAYERS, trace.sketches(step, rank, kind), strict=True):
                    assert_same_sketch(one, sketch(x[layer.slice], 7))
            elif dtype == "bfloat16":
                rounded = torch.from_numpy(x).bfloat16().float().numpy()
                assert np.array_equal(trace.read(step, rank, kind), rounded)
            else:
                assert np.array_equal(trace.read(step, rank, kind), x)
    if compression:
        columns, layers = trace.compression(rank), trace.layer_compression(rank)
        for row, step in enumerate(steps):
            expected = said(step)
            for name in COMPRESSION:
                value = expected["compression"].get(name, np.nan)
                assert np.array_equal(columns[name][row], value, equal_nan=True)
            for name in LAYER_COMPRESSION:
                told = expected.get("layer_compression", {}).get(name, np.full(2, np.nan))
                assert np.array_equal(layers[name][row], told, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
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
    left = {p.name for p in tmp_path.rglob("*") if "layout" in p.name or "partial" in p.name}
    assert not left
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]
    assert not any(p.is_symlink() for p in tmp_path.rglob("*"))


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
    """Let the writer do so many operations on files, and no more."""
    left = itertools.count(allowed, -1)

    def limited(operation):
        def once(*arguments, **options):
            if next(left) <= 0:
                raise Killed
            operation(*arguments, **options)

        return once

    for name in ("_write_file", "_link"):
        monkeypatch.setattr(trace_writer, name, limited(getattr(trace_writer, name)))
    monkeypatch.setattr(trace_writer.shutil, "rmtree", limited(trace_writer.shutil.rmtree))


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
    assert length == {"growth": 4, "close": 2}[moment]
    assert not any(p.is_symlink() for p in rank.rglob("*"))
    assert linked > 12
    assert_all_agree(path)


def test_a_disk_that_fills_in_mid_growth_loses_nothing(tmp_path, monkeypatch):
    """The write fails, as on a full disk, and the writer goes on when there is room again."""
    for allowed in range(0, 40, 3):
        path = tmp_path / f"{allowed}.zarr"
        create_trace(path, LAYERS)
        writer = write(path, [0, 1], kinds=["gradient"], close=False, expected_steps=2)
        left = itertools.count(allowed, -1)

        def full(operation, left=left):
            def once(*arguments):
                if next(left) <= 0:
                    raise OSError(28, "No space left on device")
                operation(*arguments)

            return once

        with monkeypatch.context() as patch:
            for name in ("_write_file", "_link"):
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

    monkeypatch.setattr(trace_writer, "_link", refused)
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    write(path, range(9), expected_steps=2)
    assert_as_written(assert_all_agree(path), 0, range(9))


def write_traces_for_ever(folder, seed, reports):
    """Create, fill and close small traces of all kinds, growing them often; say every step that was committed."""
    rng = random.Random(seed)
    reports.send("ready")
    for number in itertools.count():
        path = folder / f"{number}.zarr"
        create_trace(path, LAYERS)
        options = {
            "store": rng.choice(["gradients", "sketches"]),
            "compression": rng.random() < 0.7,
            "expected_steps": rng.choice([1, 2, 3, None, 500]),
        }
        reports.send((number, options, None))
        writer = TraceWriter(path, 0, kinds=KINDS, **options)
        for step in range(rng.randrange(1, 20)):
            arrays = {k: gradient(step, 0, k) for k in KINDS}
            columns = said(step) if options["compression"] else {}
            writer.append(step, arrays, loss=step / 2, selected=step, **columns)
            reports.send((number, options, step))
        writer.close()


def received(reports):
    """Return what is left in a pipe whose other end is gone."""
    found = []
    with contextlib.suppress(EOFError):
        while True:
            found.append(reports.recv())
    return found


@pytest.mark.parametrize("seed", range(12))
def test_killed_at_a_random_moment_all_readers_agree(tmp_path, seed):
    """SIGKILL: during creation, steps, growth or close, of gradients or sketches."""
    reports, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=write_traces_for_ever, args=(tmp_path, seed, theirs))
    process.start()
    theirs.close()
    assert reports.recv() == "ready"
    time.sleep(random.Random(seed).uniform(0.05, 0.8))
    process.kill()
    found = received(reports)
    process.join()
    for number in sorted({n for n, *_ in found})[-2:]:
        options = next(o for n, o, _ in found if n == number)
        reported = [step for n, _, step in found if n == number and step is not None]
        trace = assert_all_agree(tmp_path / f"{number}.zarr")
        if not trace.ranks:
            assert not reported
            continue
        # every step whose append returned is there; at most one more was committed and not reported
        steps = trace.steps()
        assert len(reported) <= len(steps) <= len(reported) + 1
        assert_as_written(trace, 0, range(len(steps)), **options)


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


@pytest.mark.parametrize("seed", range(12))
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


@pytest.mark.parametrize("schema", [1, 2])
@pytest.mark.parametrize("left", [{}, {"unused": 3}, {"unused": 3, "shorter": ["step", "loss"]}])
def test_older_schemas_are_read(tmp_path, schema, left):
    steps = [0, 3, 4, 10]
    path = old_trace(tmp_path / "run.zarr", schema, steps, **left)
    trace = open_trace(path)
    assert trace.attrs["schema"] == schema < SCHEMA
    kinds = KINDS if schema == 2 else ["gradient"]
    assert trace.kinds(0) == list(kinds)
    assert_as_written(trace, 0, steps, kinds, compression=schema == 2)
    assert np.array_equal(trace.read_slice(3, 0, "gradient", 100, 200), gradient(3)[100:200])
    assert trace.compression().keys() == (set(COMPRESSION) if schema == 2 else set())
    node = trace.to_datatree()["rank00000"]
    rows = np.flatnonzero(node.step.values >= 0)
    assert node.step.values[rows].tolist() == steps
    assert np.array_equal(node.gradient.values[rows[1]], gradient(3))
    if schema == 2:
        assert node.corrected_moments.dims == ("step", "layer", "moment")
        assert node.compression.dims == ("step", "column")


def test_closing_costs_what_was_written(tmp_path):
    """And not what was laid out: 200,000 rows of sketches took minutes."""
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    writer = write(
        path, range(20), store="sketches", compression=True, expected_steps=200_000, close=False
    )
    start = time.perf_counter()
    writer.close()
    assert time.perf_counter() - start < 2  # 0.02 s on an idle machine
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
