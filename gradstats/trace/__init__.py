"""The trace: captured gradients, or sketches of them, on disk, one zarr v3 group per rank.

::

    NAME.zarr/                        attributes: schema, world size, parameter layout, run metadata
      rank00000/                      written by rank 0 alone
        step           (step,)            int64    -1 until the row is committed, written last
        gradient       (step, element)    float32 or uint16 (bfloat16 bits); in its place, sketches:
        gradient_counts    (step, layer, bin)      uint32
        gradient_moments   (step, layer, moment)   float64
        corrected, corrected_counts, corrected_moments    the same, gradient + residual
        local, local_counts, local_moments                the same, before any reduction, where the model is sharded
        gradient_zeros, gradient_nonfinite, …             (step,)  int64, of every kind
        loss, learning_rate, threshold    (step,)  float64, NaN where unknown
        selected       (step,)            int64, k̂ kept in fact, -1 where unknown
        compression    (step, column)     float64: what a compressor of this package says of its step
        layer_compression  (step, layer, layer_column)   float64: and of its layers, in the steps it diagnosed

Where the model is sharded, ``gradient`` and ``corrected`` are ``(step, shard_element)``, the parts of the parameters
that the rank holds; its attribute ``shards`` says which, and ``shard_ranks`` who holds the others.

``xarray.open_datatree(path, engine="zarr", consolidated=False)`` opens it without this package, at any moment of its
writing or after its writer was killed. Rows with step -1 are not committed. A process killed at any moment loses only
those: chunk files appear complete or not at all, carry a checksum, and are written before their step number. The page
"The trace format" of the documentation specifies every array, attribute and chunk.
"""

from __future__ import annotations

from gradstats.trace.format import (
    COMPRESSION,
    DTYPES,
    KINDS,
    LAYER_COMPRESSION,
    SCHEMA,
    STORES,
    Dtype,
    Kind,
    Layer,
    Shard,
    Store,
    create_trace,
    is_trace,
)
from gradstats.trace.reader import Trace, open_trace
from gradstats.trace.writer import TraceWriter

__all__ = [
    "COMPRESSION",
    "DTYPES",
    "KINDS",
    "LAYER_COMPRESSION",
    "SCHEMA",
    "STORES",
    "Dtype",
    "Kind",
    "Layer",
    "Shard",
    "Store",
    "Trace",
    "TraceWriter",
    "create_trace",
    "is_trace",
    "open_trace",
]
