"""Writing: one group per rank, a step at a time."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import TraceError
from gradstats.primitives.blocks import BLOCK
from gradstats.trace.format import (
    BIN_CHUNK,
    BINS,
    BITS,
    CHUNK,
    COMPRESSION,
    FLOAT_SCALARS,
    GROW,
    LAYER_COMPRESSION,
    STATISTICS,
    Kind,
    Store,
    count_nonfinite,
    layout,
    root_attributes,
    to_bfloat16,
)

if TYPE_CHECKING:
    import zarr

__all__ = ["TraceWriter"]


class TraceWriter:
    """Appends steps to one rank's group of a trace. Not thread-safe; one writer per rank.

    Parameters
    ----------
    path : a trace made by :func:`create_trace`.
    rank : whose group to write; it must not exist.
    kinds : which arrays :meth:`append` will be given.
    store : ``"gradients"``, or ``"sketches"`` for a histogram and the moments of every layer in their place.
    dtype : of the gradients: ``"float32"``, or ``"bfloat16"`` for half the space. Sketches are of the float32 values.
    expected_steps : rows to lay out; more are added when they are used up.
    compress : shuffle and compress the gradients (about a tenth smaller for float32, and much slower). Sketches always
        are.
    compression : make room for what a compressor says of its steps.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int,
        *,
        kinds: Sequence[Kind] = ("gradient",),
        store: Store = "gradients",
        dtype: Literal["float32", "bfloat16"] = "float32",
        expected_steps: int | None = None,
        compress: bool = False,
        compression: bool = False,
    ) -> None:
        import zarr

        attributes = root_attributes(Path(path))
        self.path = Path(path)
        self.kinds = tuple(kinds)
        self.store = store
        self.numel = int(attributes["numel"])
        self._layers = layout(Path(path), attributes)
        self._bfloat16 = dtype == "bfloat16"
        self._rows = 0
        self._capacity = expected_steps or GROW
        name = f"rank{rank:05d}"
        if (self.path / name).exists():
            raise TraceError(f"{self.path} already holds rank {rank}")
        # Laid out beside its place and renamed into it: a reader finds the rank's arrays all or not at all.
        partial = f".{name}.{uuid.uuid4().hex}.partial"
        group = zarr.create_group(
            self.path / partial,
            attributes={"rank": rank, "store": store, "dtype": dtype},
            zarr_format=3,
        )
        self._lay_out(group, compress)
        if compression:
            self._lay_out_compression(group)
        (self.path / partial).rename(self.path / name)
        group = zarr.open_group(self.path / name, mode="r+", zarr_format=3)
        self._arrays = dict(group.arrays())

    def _lay_out(self, group: zarr.Group, compress: bool) -> None:
        from zarr.codecs import BloscCodec, Crc32cCodec

        def scalar(name: str, dtype: str, fill: float) -> None:
            group.create_array(
                name,
                shape=(self._capacity,),
                chunks=(min(max(self._capacity, 1), 1024),),
                dtype=dtype,
                fill_value=fill,
                dimension_names=("step",),
                compressors=[Crc32cCodec()],
            )

        def packed(level: int) -> list[Any]:
            return [BloscCodec(cname="zstd", clevel=level, shuffle="bitshuffle"), Crc32cCodec()]

        def gradient(kind: Kind) -> None:
            group.create_array(
                kind,
                shape=(self._capacity, self.numel),
                chunks=(1, min(max(self.numel, 1), CHUNK)),
                dtype="uint16" if self._bfloat16 else "float32",
                fill_value=0x7FC0 if self._bfloat16 else float("nan"),
                dimension_names=("step", "element"),
                compressors=packed(9) if compress else [Crc32cCodec()],
                attributes={"encoding": "bfloat16"} if self._bfloat16 else {},
            )

        def sketches(kind: Kind) -> None:
            layers, statistics = len(self._layers), len(STATISTICS)
            group.create_array(
                f"{kind}_counts",
                shape=(self._capacity, layers, BINS),
                chunks=(1, max(layers, 1), BIN_CHUNK),
                dtype="uint32",
                fill_value=0,
                dimension_names=("step", "layer", "bin"),
                compressors=packed(5),
                attributes={"bits": BITS},
            )
            group.create_array(
                f"{kind}_moments",
                shape=(self._capacity, layers, statistics),
                chunks=(1, max(layers, 1), statistics),
                dtype="float64",
                fill_value=float("nan"),
                dimension_names=("step", "layer", "statistic"),
                compressors=packed(5),
                attributes={"statistics": list(STATISTICS)},
            )

        for kind in self.kinds:
            (sketches if self.store == "sketches" else gradient)(kind)
            scalar(f"{kind}_zeros", "int64", 0)
            scalar(f"{kind}_nonfinite", "int64", 0)
        for name in FLOAT_SCALARS:
            scalar(name, "float64", float("nan"))
        scalar("selected", "int64", -1)
        scalar("step", "int64", -1)

    def _lay_out_compression(self, group: zarr.Group) -> None:
        from zarr.codecs import Crc32cCodec

        layers = len(self._layers)
        for name, shape, chunks, dimensions, statistics in (
            ("compression", (), (64,), ("step", "statistic"), COMPRESSION),
            (
                "layer_compression",
                (layers,),
                (1, layers),
                ("step", "layer", "statistic"),
                LAYER_COMPRESSION,
            ),
        ):
            group.create_array(
                name,
                shape=(self._capacity, *shape, len(statistics)),
                chunks=(*chunks, len(statistics)),
                dtype="float64",
                fill_value=float("nan"),
                dimension_names=dimensions,
                compressors=[Crc32cCodec()],
                attributes={"statistics": list(statistics)},
            )

    def append(
        self,
        step: int,
        arrays: Mapping[Kind, NDArray[np.float32]],
        *,
        loss: float = float("nan"),
        learning_rate: float = float("nan"),
        threshold: float = float("nan"),
        selected: int = -1,
        compression: Mapping[str, float] | None = None,
        layer_compression: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Write one step and commit it.

        Parameters
        ----------
        step : non-negative step number, greater than the last.
        arrays : float32 (numel,) for every kind of this writer.
        loss, learning_rate, threshold : as used in the step; NaN where unknown.
        selected : k̂ the compressor kept, -1 where unknown.
        compression : some of :data:`COMPRESSION`, if the writer made room for it.
        layer_compression : some of :data:`LAYER_COMPRESSION`, each (layers,) in the order of the layout.

        Raises
        ------
        TraceError
            If the disk refuses; the step is then not committed, all earlier ones are.
        """
        for kind in self.kinds:
            values = arrays[kind]
            if values.shape != (self.numel,) or values.dtype != np.float32:
                raise TraceError(
                    f"expected float32 ({self.numel},), got {values.dtype} {values.shape}"
                )
        row = self._rows
        try:
            if row == self._capacity:
                self._resize(2 * row)
            # A row is written once: what a failed write leaves in it must not show through in another step.
            self._rows += 1
            for kind in self.kinds:
                put = self._put_sketch if self.store == "sketches" else self._put_gradient
                zeros, nonfinite = put(kind, row, arrays[kind])
                self._put(f"{kind}_zeros", row, zeros)
                self._put(f"{kind}_nonfinite", row, nonfinite)
            self._put("loss", row, loss)
            self._put("learning_rate", row, learning_rate)
            self._put("threshold", row, threshold)
            self._put("selected", row, selected)
            if compression:
                self._arrays["compression"][row] = [compression.get(n, np.nan) for n in COMPRESSION]
            if layer_compression:
                unknown = np.full(len(self._layers), np.nan)
                columns = [layer_compression.get(n, unknown) for n in LAYER_COMPRESSION]
                self._arrays["layer_compression"][row] = np.stack(columns, axis=1)
            self._put("step", row, step)
        except OSError as error:
            raise TraceError(f"cannot write step {step} to {self.path}: {error}") from error

    def _put_gradient(self, kind: Kind, row: int, values: NDArray[np.float32]) -> tuple[int, int]:
        """Write a gradient; return its zeros and its non-finite elements."""
        self._arrays[kind][row] = to_bfloat16(values) if self._bfloat16 else values
        return self.numel - int(np.count_nonzero(values)), count_nonfinite(values)

    def _put_sketch(self, kind: Kind, row: int, values: NDArray[np.float32]) -> tuple[int, int]:
        """Write a gradient's sketches; return its zeros and its non-finite elements."""
        layers = len(self._layers)
        moments = np.empty((layers, len(STATISTICS)))
        # by their first bin, those alone that hold a count of any layer
        chunks: dict[int, NDArray[np.uint32]] = {}
        for i, layer in enumerate(self._layers):
            counts, moments[i] = _tally(values[layer.slice])
            for first in range(0, BINS, BIN_CHUNK):
                part = counts[first : first + BIN_CHUNK]
                if part.any():
                    chunks.setdefault(first, np.zeros((layers, part.size), np.uint32))[i] = part
        for first, block in chunks.items():
            self._arrays[f"{kind}_counts"][row, :, first : first + block.shape[1]] = block
        self._arrays[f"{kind}_moments"][row] = moments
        return int(moments[:, 1].sum()), int(moments[:, 2].sum())

    def _put(self, name: str, row: int, value: float) -> None:
        """Write a scalar; one equal to the fill value is there already, and a write costs 0.6 ms of CPU."""
        array = self._arrays[name]
        fill = array.fill_value
        if value != fill and not (value != value and fill != fill):
            array[row] = value

    def _resize(self, capacity: int) -> None:
        for name, array in self._arrays.items():
            if name != "step":
                array.resize((capacity, *array.shape[1:]))
        self._arrays["step"].resize((capacity,))
        self._capacity = capacity

    def close(self) -> None:
        """Drop the rows laid out but never used. The trace is complete without it."""
        if self._rows < self._capacity:
            try:
                self._resize(self._rows)
            except OSError as error:
                raise TraceError(f"cannot finish {self.path}: {error}") from error


def _tally(values: NDArray[np.float32]) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Return the histogram, uint32 (bins,), and the statistics of one layer: the same bits as ``sketch(values, 7)``.

    On this thread alone: the primitives' pool is the training's.
    """
    from gradstats.primitives.kernels import block_histogram, block_moments

    counts = np.zeros(256 << BITS, np.uint32)
    total = np.zeros(len(STATISTICS))
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        block_histogram(block.view(np.uint32), 23 - BITS, counts)
        *sums, largest = block_moments(block, np.float32(0), True)
        total[:-1] += sums
        total[-1] = max(total[-1], largest)
    counts[0] -= np.uint32(total[1])  # the zeros share it with the smallest denormals
    return counts[:BINS], total
