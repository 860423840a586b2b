"""Everything that is read of the traces in `data/`: it is the same whatever schema they are kept in.

One hash for every record and for every array of a rank, kind and step. Rewrite them with
``WRITE_PINS=1 python -m pytest tests/pins/test_committed_traces.py``.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conftest import DATA
from pins.stored import WRITES, digest

from gradstats import open_trace

TRACES = [
    path.parent.relative_to(DATA).as_posix()
    for path in sorted(DATA.rglob("zarr.json"))
    if path.parent.suffix == ".zarr"
]
VOLATILE = ("schema",)
"""What a conversion changes."""


def hashed(array):
    array = np.ascontiguousarray(array)
    return digest(str(array.dtype), array.shape, array.tobytes())


def plain(value):
    """Return a value of text, numbers, lists and dictionaries in one order."""
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def everything(trace):
    """Return the hash of everything that a trace says, by what it is."""
    found = {
        "layers": digest([dataclasses.astuple(layer) for layer in trace.layers]),
        "ranks": digest(trace.ranks),
        "sizes": digest(trace.numel, trace.world_size),
    }
    for name, value in trace.attrs.items():
        if name not in VOLATILE:
            found[f"attribute {name}"] = digest(plain(value))
    for layer in trace.layers[:3]:
        found[f"layer {layer.name}"] = hashed(trace[layer.name].to_numpy())
    for rank in trace.ranks:
        found[f"rank {rank}"] = digest(
            trace.steps(rank), trace.kinds(rank), trace.shard_ranks(rank)
        )
        for name, table in (
            ("scalars", trace.scalars(rank)),
            ("compression", trace.compression(rank)),
            ("layer_compression", trace.layer_compression(rank)),
        ):
            for column in sorted(table):
                found[f"rank {rank} {name} {column}"] = hashed(table[column])
        for kind in trace.kinds(rank):
            stores = trace.has_gradients(rank, kind), trace.has_sketches(rank, kind)
            found[f"rank {rank} {kind}"] = digest(stores)
            for step in trace.steps(rank):
                place = f"rank {rank} {kind} step {step}"
                found[place] = hashed(trace.read(step, rank, kind))
                part = trace.read_slice(step, rank, kind, 1000, 3000)
                found[f"{place}, a slice"] = hashed(part)
    return found


def test_every_trace_is_pinned(pins):
    assert WRITES or list(pins.values) == TRACES


@pytest.mark.parametrize("name", TRACES)
def test_a_committed_trace_reads_as_before(name, pins):
    pins.check(everything(open_trace(DATA / name)), name)
