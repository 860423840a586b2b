"""A cost model with known coefficients, and gradients whose selections overlap by a known amount."""

from __future__ import annotations

import functools

import numpy as np
from ranks import run_ranks
from workers import network as cases

from gradstats.compressors import COMPRESSORS
from gradstats.network import ALGORITHMS, Network, fit_line
from gradstats.trace import Layer, TraceWriter, create_trace, open_trace

ALPHA, BETA = 5e-5, 0.8e-9


def noisy(rng, a, b, sizes, relative, repeats=5):
    exact = a + b * np.asarray(sizes)
    return exact[:, None] * np.exp(relative * rng.standard_normal((len(sizes), repeats)))


CODED = ("rice", "chunk", "float8_e4m3fn", "int8", "int4", "int2")
"""Codecs that take time of their own."""
SIZES = [128 * 4**i for i in range(10)]


@functools.cache
def measured_network(world=4, others=()):
    rng = np.random.default_rng(4)
    terms = {o: next(iter(a.values()))(world) for o, a in ALGORITHMS.items()}
    lines = [
        fit_line(o, world, SIZES, noisy(rng, m * ALPHA, v * BETA, SIZES, 0.1))
        for o, (m, v) in terms.items()
    ]
    local = ["memory", "pack", "unpack", "average", "unpack_signs", "merge_signs"]
    local += [f"{step}:{codec}" for step in ("encode", "decode") for codec in CODED]
    local += [f"select:{name}" for name in (*COMPRESSORS, *others) if name != "none"]
    lines += [fit_line(o, 1, SIZES, noisy(rng, 1e-5, 1e-9, SIZES, 0.1)) for o in local]
    decoded = [f"decode:{name}" for name in ("signsgd", "ef-signsgd", "ssdm")]
    lines += [fit_line(o, 2, SIZES, noisy(rng, 1e-5, 1e-9, SIZES, 0.1)) for o in decoded]
    return Network(tuple(lines), {}, {"world_size": world})


@functools.cache
def reports(world):
    """What every compressor sent among real processes, by rank."""
    return run_ranks(world, cases.exchanges)


def gradients(ranks, numel, shared, seed=0):
    """Rank by rank a gradient that is partly the same on all of them."""
    rng = np.random.default_rng(seed)
    common = rng.laplace(size=numel)
    return [
        (shared * common + (1 - shared) * rng.laplace(size=numel)).astype(np.float32)
        for _ in range(ranks)
    ]


def written(path, ranks):
    create_trace(path, [Layer("w", 0, ranks[0].shape)], world_size=len(ranks))
    for rank, values in enumerate(ranks):
        writer = TraceWriter(path, rank)
        writer.append(5, {"gradient": values})
        writer.close()
    return open_trace(path)


def top(values, k):
    return set(np.argsort(-np.abs(values))[:k].tolist())
