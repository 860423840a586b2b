"""Functions that the worker processes of test_exchange.py, test_timeline.py and test_measure.py run."""

import sys
import time

import torch
import torch.distributed as dist
from workers.systems import gradient

from gradstats.compressors import (
    COMPRESSORS,
    DenseCompressor,
    Layerwise,
    Marsit,
    MiCRO,
    SparseCompressor,
    TopK,
    make_compressor,
)
from gradstats.network import operations
from gradstats.network.measure import measure

RATIO = 0.02
STEPS = 4
NUMELS = (3, 997)
LARGE = 40_000
"""RedSync averages smaller ones densely."""
LAYERS = (("c", 500), ("b", 300), ("a", 7_197))
MERGES = (0, 600, 1 << 16)


def message_sizes(rank, world, size):
    """Return the bytes of what the sums and gathers of one size are over, by name."""
    seen = {}

    def spy(name, first):
        def call(*tensors, **options):
            seen[name] = tensors[first].numel() * tensors[first].element_size()

        return call

    names = {"all_reduce": 0, "all_gather": 1, "broadcast": 0}
    for name, first in names.items():
        setattr(operations, name, spy(name, first))
    dist.reduce_scatter_single = spy("reduce_scatter", 1)
    for name in (*names, "reduce_scatter"):
        getattr(operations, f"_{name}")(size, torch.device("cpu"), None)()
    return seen


def of_a_second(rank, world):
    """Return the seconds that are written down of each collective, by name, where every call takes one."""
    module = sys.modules[measure.__module__]
    module._swept = lambda calls, repeats, *_: [[1.0] * repeats for _ in calls]
    lines = module._collectives(world, 1 << 17, 3, torch.device("cpu"), lambda _: None)
    return {line.operation: set(line.seconds) for line in lines}


def _run(compressor, numel, rank, steps=STEPS):
    """Return (selected, bytes, union) of every step."""
    done = [
        compressor.reduce(gradient("laplace", numel, rank, step), None) for step in range(steps)
    ]
    return [(r.selected, r.bytes_sent, r.union) for r in done]


def _pushed(rank, merge, seconds=0.0):
    compressor = Layerwise(lambda name, numel: TopK(RATIO), merge=merge)
    bytes_sent = []
    for step in range(3):
        corrected, start = gradient("laplace", sum(n for _, n in LAYERS), rank, step), 0
        for name, numel in LAYERS:
            time.sleep(seconds)
            compressor.push(corrected, [(name, slice(start, start + numel))], None)
            start += numel
        bytes_sent.append(compressor.reduce(corrected, None).bytes_sent)
    return bytes_sent, compressor.timeline


def exchanges(rank, world):
    """Return what every system sent, by name and number of elements."""
    report = {}
    for numel in NUMELS:
        for name in COMPRESSORS:
            compressor = make_compressor(name, RATIO) or DenseCompressor()
            report[name, numel] = _run(compressor, numel, rank)
        # an η to start from, so that the first step's bytes are those of any other
        report["micro", numel] = _run(MiCRO(RATIO, threshold=4.0), numel, rank)
        for topology in ("ring", "torus"):
            report[topology, numel] = _run(Marsit(full_every=4, topology=topology), numel, rank)
            only = Marsit(full_every=None, topology=topology, scale="mean")
            report[f"one-bit {topology}", numel] = _run(only, numel, rank)
        report["half", numel] = _run(SparseCompressor(TopK(RATIO), torch.float16), numel, rank)
        report["dense above", numel] = _run(SparseCompressor(TopK(0.9)), numel, rank)
    report["redsync-quantised", LARGE] = _run(
        make_compressor("redsync-quantised", RATIO), LARGE, rank
    )
    report["layers"] = {merge: _pushed(rank, merge)[0] for merge in MERGES}
    report["timeline"] = _pushed(rank, 0, seconds=0.002)[1]
    return report


def sweep(rank, world, worlds, select):
    """Return a small measurement."""
    return measure(
        worlds, largest=1 << 17, largest_numel=1 << 15, repeats=3, ratio=0.01, select=select
    )
