"""Small traces with known contents."""

from __future__ import annotations

import numpy as np
import torch

from gradstats.trace import (
    COMPRESSION,
    KINDS,
    LAYER_COMPRESSION,
    Layer,
    Shard,
    TraceWriter,
    create_trace,
)

LAYERS = [Layer("a.weight", 0, (30, 20)), Layer("a.bias", 600, (20,))]


NUMEL = 620


def gradient(step, rank=0, kind="gradient"):
    """Return the gradient of a step, rank and kind, which they seed."""
    x = np.random.default_rng([step, rank, KINDS.index(kind)]).standard_normal(NUMEL)
    return x.astype(np.float32)


def shards_of(rank, world, dims=(0, 0)):
    """Return what a rank holds of LAYERS, each sharded along one dimension."""
    shards = []
    for layer, dim in zip(LAYERS, dims, strict=True):
        size = -(-layer.shape[dim] // world)
        first, last = (min(r * size, layer.shape[dim]) for r in (rank, rank + 1))
        offset, shape = [0] * len(layer.shape), list(layer.shape)
        offset[dim], shape[dim] = first, last - first
        shards.append(Shard(layer.name, tuple(offset), tuple(shape)))
    return shards


def held(values, shards):
    """Return the parts of a flat gradient that lie in shards."""
    parts = []
    for layer, shard in zip(LAYERS, shards, strict=True):
        box = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))
        parts.append(values[layer.slice].reshape(layer.shape)[box].ravel())
    return np.concatenate(parts)


def write_shards(path, steps, *, rank, world, kinds=KINDS, dims=(0, 0), close=True, **options):
    """Write one rank's shards of the gradients of rank 0, and a local gradient of its own."""
    shards = shards_of(rank, world, dims)
    writer = TraceWriter(
        path, rank, kinds=kinds, shards=shards, shard_ranks=range(world), **options
    )
    for step in steps:
        arrays = {
            k: gradient(step, rank, k) if k == "local" else held(gradient(step, 0, k), shards)
            for k in kinds
        }
        told = said(step) if options.get("compression") else {}
        writer.append(step, arrays, loss=step / 2, selected=step, **told)
    if close:
        writer.close()
    return writer


def write_replicas(path, steps, of=gradient, *, compression=False, **metadata):
    """Write the gradients of two replicas of a model, each sharded over two of four ranks."""
    create_trace(path, LAYERS, world_size=4, metadata=metadata)
    for rank in range(4):
        shards, first = shards_of(rank % 2, 2), rank - rank % 2
        ranks = (first, first + 1)
        writer = TraceWriter(path, rank, compression=compression, shards=shards, shard_ranks=ranks)
        for step in steps:
            told = said(step) | {"selected": step} if compression else {}
            writer.append(step, {"gradient": held(of(step, rank // 2), shards)}, **told)
        writer.close()
    return path


def said(step):
    """Return what a compressor says of a step; every third one is diagnosed."""
    columns = {"compression": {n: step + i / 4 for i, n in enumerate(COMPRESSION[:-1])}}
    if step % 3 == 0:
        values = np.array([step, np.nan])
        columns["layer_compression"] = {n: values + i for i, n in enumerate(LAYER_COMPRESSION)}
    return columns


def write(path, steps, *, rank=0, kinds=KINDS, close=True, **options):
    """Write the gradients of some steps of a rank."""
    writer = TraceWriter(path, rank, kinds=kinds, **options)
    for step in steps:
        writer.append(
            step,
            {k: gradient(step, rank, k) for k in kinds},
            loss=step / 2,
            selected=step,
            **(said(step) if options.get("compression") else {}),
        )
    if close:
        writer.close()
    return writer


def trace_of_steps(path, steps, layers=1, ranks=1):
    """Write a flat gradient a step, cut into layers of one size; every rank after the first has it rolled by one."""
    each = steps[0].size // layers
    create_trace(path, [Layer(f"l{i}", i * each, (each,)) for i in range(layers)], world_size=ranks)
    for rank in range(ranks):
        writer = TraceWriter(path, rank)
        for step, values in enumerate(steps):
            writer.append(step, {"gradient": np.roll(np.asarray(values, np.float32), rank)})
        writer.close()
    return path


def assert_same_sketch(stored, expected):
    """Assert that a stored sketch is the one that is expected."""
    assert stored.moments == expected.moments
    assert stored.bits == expected.bits == 7
    assert np.array_equal(stored.bins, expected.bins)
    assert np.array_equal(stored.counts, expected.counts)


def flat_gradient(model):
    """Return the gradients of all parameters in one vector."""
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()


def train(capture, model, steps):
    """Run a plain loop; return the gradients it saw."""
    seen = []
    for step in range(steps):
        model.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        capture.step(model, loss=loss, learning_rate=0.1)
        seen.append(flat_gradient(model).copy())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return seen


DRIFTING_LAYERS = [Layer("w", 0, (40, 50)), Layer("dead", 2000, (30,)), Layer("b", 2030, (70,))]


def drifting_trace(path, steps, scale, ranks=(0, 1), seed=0):
    """Laplace gradients whose scale is a function of the step, and a parameter without any."""
    create_trace(path, DRIFTING_LAYERS, world_size=2)
    for rank in ranks:
        rng = np.random.default_rng([seed, rank])
        writer = TraceWriter(path, rank)
        for step in steps:
            g = (rng.laplace(size=2100) * scale(step)).astype(np.float32)
            g[2000:2030] = 0
            writer.append(step, {"gradient": g}, loss=step / 10, learning_rate=0.1)
        writer.close()
    return path


HEAVY_LAYERS = [
    Layer("embedding", 0, (3000, 50)),
    Layer("bias", 150_000, (70,)),
    Layer("w", 150_070, (500, 30)),
]


def heavy_trace(path, store="gradients", steps=3, seed=0):
    """Write a trace of two ranks whose gradients have heavy tails."""
    numel = sum(layer.numel for layer in HEAVY_LAYERS)
    create_trace(path, HEAVY_LAYERS, world_size=2)
    for rank in (0, 1):
        rng = np.random.default_rng([seed, rank])
        writer = TraceWriter(path, rank, kinds=("gradient", "corrected"), store=store)
        for step in range(steps):
            g = rng.standard_t(4, numel).astype(np.float32) * np.float32(1e-3 / (1 + step))
            g[rng.random(numel) < 0.05] = 0
            writer.append(step, {"gradient": g, "corrected": g * 2}, loss=float(step))
        writer.close()
    return path
