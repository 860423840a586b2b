"""A trace as every reader sees it. Their libraries are imported by what reads: a program that trains needs none."""

from __future__ import annotations

import contextlib
import itertools
import warnings

import numpy as np
import torch
from support.traces import LAYERS, assert_same_sketch, gradient, said

from gradstats import open_trace
from gradstats.primitives.sketch import sketch
from gradstats.trace import COMPRESSION, KINDS, LAYER_COMPRESSION


@contextlib.contextmanager
def strict():
    """Let no reader warn; and let dask start no pool of threads for every small array."""
    import dask

    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("error")
        yield


def bare(path):
    """Return {rank: {array: (dimensions, values, attributes)}} as zarr alone reads it."""
    import zarr

    root = zarr.open_group(path, mode="r", use_consolidated=False)
    return {
        name: {n: (a.metadata.dimension_names, a, dict(a.attrs)) for n, a in group.arrays()}
        for name, group in root.groups()
    }


def through_xarray(path, **options):
    """Return the same as xarray reads it."""
    import xarray

    with xarray.open_datatree(path, engine="zarr", **options) as tree:
        return named(tree.load())


def named(tree):
    """Return dimensions, variable and attributes by name, of every node of a tree."""
    return {
        name: {n: (v.dims, v, v.attrs) for n, v in node.to_dataset().variables.items()}
        for name, node in tree.children.items()
    }


def views(path):
    """Yield the trace as every reader sees it. No reader may warn, but for xarray's advice to consolidate."""
    with strict():
        yield bare(path)
        yield through_xarray(path, consolidated=False)
        yield named(open_trace(path).to_datatree())
        warnings.filterwarnings("ignore", ".*consolidated metadata", RuntimeWarning)
        yield through_xarray(path)


def newest(trace, count):
    """Return {(rank, kind, step): gradient or sketches} of so many last steps, as our reader gives them."""
    return {
        (rank, kind, step): (trace.read if trace.has_gradients(rank, kind) else trace.sketches)(
            step, rank, kind
        )
        for rank in trace.ranks
        for kind in trace.kinds(rank)
        for step in trace.steps(rank)[-count:]
    }


def assert_all_agree(path):
    """Compare what is committed, and every value of it; return our reader's trace."""
    trace = open_trace(path)
    ours = newest(trace, 6)  # read once, for all views
    for (rank, kind, step), whole in ours.items():
        if not trace.has_gradients(rank, kind):
            continue
        for layer in trace.layers:
            own = trace.read(step, rank, kind, layer.name)
            assert own.shape == layer.shape
            assert np.array_equal(own.reshape(-1), whole[layer.slice])
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
                theirs = np.asarray(arrays[name][1][:])[rows] if columns else None
                for i, (column, values) in enumerate(columns.items()):
                    assert arrays[name][2]["names"][i] == column
                    assert np.array_equal(theirs[..., i], values, equal_nan=True)
            for kind in trace.kinds(rank):
                for row, step in zip(rows[-6:].tolist(), trace.steps(rank)[-6:], strict=True):
                    own = ours[rank, kind, step]
                    if trace.has_gradients(rank, kind):
                        theirs = np.asarray(arrays[kind][1][row])
                        if arrays[kind][2].get("encoding") == "bfloat16":
                            theirs = (theirs.astype("u4") << 16).view("f4")
                        assert np.array_equal(theirs, own)
                    else:
                        counts = np.asarray(arrays[f"{kind}_counts"][1][row])
                        sums = np.asarray(arrays[f"{kind}_moments"][1][row])
                        for i, one in enumerate(own):
                            assert np.array_equal(np.flatnonzero(counts[i]), one.bins)
                            assert np.array_equal(counts[i][one.bins], one.counts)
                            assert sums[i].tolist()[:4] == [
                                *(one.moments.count, one.moments.zeros),
                                *(one.moments.nonfinite, one.moments.sum_abs),
                            ]
    assert_frames_agree(trace)
    return trace


def groups(path):
    """Yield {rank: (attributes, arrays)} as zarr, xarray and our reader's data tree see them."""
    import xarray
    import zarr

    with strict():
        root = zarr.open_group(path, mode="r", use_consolidated=False)
        yield {n: (dict(g.attrs), dict(g.arrays())) for n, g in root.groups()}
        with xarray.open_datatree(path, engine="zarr", consolidated=False) as tree:
            yield {n: (g.attrs, dict(g.to_dataset().load().variables)) for n, g in tree.items()}
        tree = open_trace(path).to_datatree()
        yield {n: (g.attrs, dict(g.to_dataset().load().variables)) for n, g in tree.items()}


def rows_of(view, ranks, name, rows, step):
    """Return attributes of some ranks' groups and of an array, and its row of a step."""
    found = []
    for rank in ranks:
        attributes, arrays = view[rank]
        array = arrays[name]
        found.append(({**attributes, **array.attrs}, np.asarray(array[rows[rank][step]])))
    return found


def put_together(trace, parts):
    """Make a gradient of the shards of its ranks, by what the page on the format says of them."""
    whole = np.full(trace.numel, np.nan, np.float32)
    for attributes, values in parts:
        if "encoding" in attributes:
            values = (values.astype("u4") << 16).view("f4")
        start = 0
        for layer, shard in zip(trace.layers, attributes["shards"], strict=True):
            assert shard["name"] == layer.name
            box = tuple(
                slice(o, o + n) for o, n in zip(shard["offset"], shard["shape"], strict=True)
            )
            end = start + int(np.prod(shard["shape"]))
            whole[layer.slice].reshape(layer.shape)[box] = values[start:end].reshape(shard["shape"])
            start = end
        assert start == values.size
    return whole


def assert_shards_agree(path):
    """Compare what is committed of a sharded model as zarr, xarray and our reader see it; return our trace."""
    trace = open_trace(path)
    ours = newest(trace, 4)
    for (rank, kind, step), whole in ours.items():
        zeros = trace.scalars(rank)[f"{kind}_zeros"][trace.steps(rank).index(step)]
        assert zeros >= 0
        if not trace.has_gradients(rank, kind):
            continue
        for start in range(0, trace.numel, max(trace.numel // 3, 1)):
            stop = min(start + 100, trace.numel)
            part = trace.read_slice(step, rank, kind, start, stop)
            assert np.array_equal(part, whole[start:stop])
    for view in groups(path):
        rows = {}
        for name, (_, arrays) in view.items():
            assert len({array.shape[0] for array in arrays.values()}) == 1
            numbers = np.asarray(arrays["step"][:]).tolist()
            rows[name] = {step: row for row, step in enumerate(numbers) if step >= 0}
        for rank in trace.ranks:
            mates = [f"rank{r:05d}" for r in trace.shard_ranks(rank)]
            speaks = mates[0] == f"rank{rank:05d}"
            if speaks and not set(mates) <= view.keys():  # one was killed before it began
                assert trace.steps(rank) == []
                continue
            holders = mates if speaks else [f"rank{rank:05d}"]
            assert trace.steps(rank) == sorted(set.intersection(*(set(rows[n]) for n in holders)))
            for kind in trace.kinds(rank):
                own = [f"rank{rank:05d}"] if kind == "local" else holders
                for step in trace.steps(rank)[-4:]:
                    if trace.has_sketches(rank, kind):
                        counts = sum(
                            values for _, values in rows_of(view, own, f"{kind}_counts", rows, step)
                        )
                        for i, one in enumerate(ours[rank, kind, step]):
                            assert np.array_equal(np.flatnonzero(counts[i]), one.bins)
                            assert np.array_equal(counts[i][one.bins], one.counts)
                            assert one.numel == trace.layers[i].numel
                        continue
                    parts = rows_of(view, own, kind, rows, step)
                    theirs = parts[0][1] if kind == "local" else put_together(trace, parts)
                    if kind == "local" and "encoding" in parts[0][0]:
                        theirs = (theirs.astype("u4") << 16).view("f4")
                    assert np.array_equal(theirs, ours[rank, kind, step])
    assert_frames_agree(trace)
    return trace


def assert_frames_agree(trace):
    """Compare the data frame and the arrays of layers with what the trace gives step by step."""
    frame = trace.to_dataframe()
    assert frame.index.tolist() == [
        (rank, step) for rank in trace.ranks for step in trace.steps(rank)
    ]
    for rank in filter(trace.steps, trace.ranks):
        for name, column in {**trace.scalars(rank), **trace.compression(rank)}.items():
            if name != "step":
                assert np.array_equal(frame.loc[rank][name], column, equal_nan=True)
    held = {k for rank in trace.ranks for k in trace.kinds(rank) if trace.has_gradients(rank, k)}
    for layer in trace.layers if held else ():
        array = trace[layer.name].load()
        assert array.dims[:3] == ("rank", "kind", "step")
        assert array.shape == (len(trace.ranks), len(held), len(trace.steps()), *layer.shape)
        for rank, kind, step in itertools.product(trace.ranks, held, trace.steps()[-6:]):
            there = trace.has_gradients(rank, kind) and step in trace.steps(rank)
            wanted = (
                trace.read(step, rank, kind, layer.name) if there else np.full(layer.shape, np.nan)
            )
            assert np.array_equal(
                array.sel(rank=rank, kind=kind, step=step), wanted, equal_nan=True
            )


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


def received(reports):
    """Return what is left in a pipe whose other end is gone."""
    found = []
    with contextlib.suppress(EOFError):
        while True:
            found.append(reports.recv())
    return found
