"""The trace: captured gradients, or sketches of them, on disk, one zarr v3 group per rank.

::

    NAME.zarr/                        attributes: schema, world size, parameter layout, run metadata
      rank00000/                      written by rank 0 alone
        step           (step,)            int64    -1 until the row is committed, written last
        gradient       (step, element)    float32 or uint16 (bfloat16 bits); beside it or in its place, a sketch:
        gradient_counts    (step, layer, bin)         uint32
        gradient_moments   (step, layer, statistic)   float64
        corrected, corrected_counts, corrected_moments    the same, gradient + residual
        gradient_zeros, gradient_nonfinite, corrected_zeros, corrected_nonfinite   (step,) int64
        loss, learning_rate, threshold    (step,)  float64, NaN where unknown
        selected       (step,)            int64, k̂ kept in fact, -1 where unknown
        compression    (step, statistic)  float64: what a compressor of this package says of its step
        layer_compression  (step, layer, statistic)   float64: and of its layers, in the steps it diagnosed

``xarray.open_datatree(path, engine="zarr")`` opens it without this package. Rows with step -1 are not committed.
A process killed at any moment loses only those: chunk files appear complete or not at all (zarr renames them into
place), carry a checksum, and are written before their step number. bfloat16 is stored as the upper half of the
float32 bits; ``(u.astype("u4") << 16).view("f4")`` reads it.

A sketch tells how many finite non-zero elements of a layer have |g| in bin b, from edge b up to edge b + 1 of
``(np.arange(32641, dtype="u4") << 16).view("f4")``; layers are in the order of the layout. Its moments are named by
the attribute ``statistics``: count, zeros, nonfinite, sum_abs, sum_squares, sum_log, max, the sums over the finite
non-zero magnitudes. Schema 1 had no sketches, and is otherwise the same.
"""

from __future__ import annotations

from gradstats.trace.format import (
    COMPRESSION,
    KINDS,
    LAYER_COMPRESSION,
    SCHEMA,
    STORES,
    Kind,
    Layer,
    Store,
    create_trace,
    is_trace,
)
from gradstats.trace.reader import Trace, open_trace
from gradstats.trace.writer import TraceWriter

__all__ = [
    "COMPRESSION",
    "KINDS",
    "LAYER_COMPRESSION",
    "SCHEMA",
    "STORES",
    "Kind",
    "Layer",
    "Store",
    "Trace",
    "TraceWriter",
    "create_trace",
    "is_trace",
    "open_trace",
]
