"""Reading: what is committed, and nothing that is damaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError, TraceError, first_line
from gradstats.primitives import Moments
from gradstats.primitives.sketch import Sketch
from gradstats.trace.format import (
    BITS,
    KINDS,
    STATISTICS,
    Kind,
    count_nonfinite,
    from_bfloat16,
    layout,
    root_attributes,
)

if TYPE_CHECKING:
    import xarray
    import zarr

__all__ = ["Trace", "open_trace"]


class Trace:
    """A trace opened for reading. Only committed steps are visible.

    Attributes
    ----------
    path : the directory.
    attrs : the run's metadata as stored (model, data, compressor, seed, versions, …).
    layers : parameters in the order of the flat gradient.
    numel : elements of the flat gradient, d.
    world_size : ranks of the run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.attrs = root_attributes(self.path)
        self.layers = layout(self.path, self.attrs)
        try:
            self.numel = int(self.attrs["numel"])
            self.world_size = int(self.attrs["world_size"])
        except (TypeError, ValueError) as error:
            raise TraceError(f"{path} is damaged: unreadable numbers in its attributes") from error
        self._groups: dict[int, dict[str, zarr.Array[Any]]] = {}
        self._committed: dict[int, dict[int, int]] = {}
        for directory in sorted(self.path.glob("rank[0-9]*")):
            self._open_rank(directory)

    def _open_rank(self, directory: Path) -> None:
        import zarr

        try:
            rank = int(directory.name.removeprefix("rank"))
            group = zarr.open_group(directory, mode="r", zarr_format=3)
            arrays = dict(group.arrays())
            steps = np.asarray(arrays["step"][:])
        except Exception as error:
            raise TraceError(f"{directory} is damaged: {first_line(error)}") from error
        self._groups[rank] = arrays
        self._committed[rank] = {int(s): row for row, s in enumerate(steps) if s >= 0}

    def __repr__(self) -> str:
        return (
            f"<Trace {self.path} ranks={self.ranks} steps={len(self.steps())} numel={self.numel}>"
        )

    @property
    def name(self) -> str:
        """The directory's name without ``.zarr``."""
        return self.path.name.removesuffix(".zarr")

    @property
    def ranks(self) -> list[int]:
        """Ranks that were captured."""
        return sorted(self._groups)

    def steps(self, rank: int | None = None) -> list[int]:
        """Return the committed steps of a rank, or (None) of any rank, ascending."""
        if rank is not None:
            return sorted(self._rank(rank, self._committed))
        return sorted(set().union(*self._committed.values()))

    def kinds(self, rank: int) -> list[Kind]:
        """Return the kinds of gradient a rank captured, in full or as sketches."""
        return [k for k in KINDS if self.has_gradients(rank, k) or self.has_sketches(rank, k)]

    def has_gradients(self, rank: int = 0, kind: Kind = "gradient") -> bool:
        """Tell whether a rank holds every element of a kind, so that :meth:`read` can give them."""
        return kind in self._rank(rank, self._groups)

    def has_sketches(self, rank: int = 0, kind: Kind = "gradient") -> bool:
        """Tell whether a rank holds sketches of a kind, so that :meth:`sketches` can give them."""
        return f"{kind}_counts" in self._rank(rank, self._groups)

    def _rank(self, rank: int, table: Mapping[int, Any]) -> Any:
        try:
            return table[rank]
        except KeyError:
            have = ", ".join(map(str, self.ranks)) or "none"
            raise TraceError(f"{self.path} has no rank {rank}; it holds {have}") from None

    def _row(self, step: int, rank: int) -> int:
        committed: dict[int, int] = self._rank(rank, self._committed)
        if step not in committed:
            raise TraceError(f"{self.path} has no step {step} on rank {rank}")
        return committed[step]

    def _damaged(self, what: str, step: int, rank: int, why: object) -> TraceError:
        why = first_line(why) if isinstance(why, BaseException) else why
        return TraceError(f"{self.path}: {what} of step {step}, rank {rank} is damaged: {why}")

    def _gradient_array(self, rank: int, kind: Kind) -> zarr.Array[Any]:
        """Return the array that holds a kind in full."""
        if self.has_gradients(rank, kind):
            return self._groups[rank][kind]
        if self.has_sketches(rank, kind):
            raise TraceError(
                f"{self.path} holds only sketches of {kind!r} on rank {rank}: Trace.sketches gives their "
                "distributions; single elements need a capture with --store gradients"
            )
        raise TraceError(f"{self.path} has no {kind!r} on rank {rank}")

    def _elements(
        self, step: int, rank: int, kind: Kind, start: int, stop: int
    ) -> tuple[NDArray[np.float32], int]:
        """Return a part of a gradient, and how many non-finite elements all of it had at capture."""
        row, array = self._row(step, rank), self._gradient_array(rank, kind)
        try:
            values = np.asarray(array[row, start:stop])
            nonfinite = int(self._groups[rank][f"{kind}_nonfinite"][row])  # type: ignore[arg-type]
        except Exception as error:
            raise self._damaged(kind, step, rank, error) from error
        return from_bfloat16(values) if values.dtype == np.uint16 else values, nonfinite

    def read(self, step: int, rank: int = 0, kind: Kind = "gradient") -> NDArray[np.float32]:
        """Return one captured gradient, float32 (numel,), bit-exact as captured (bfloat16: as rounded).

        Raises
        ------
        TraceError
            If it was not captured, or as a sketch only, or its data is damaged.
        """
        values, nonfinite = self._elements(step, rank, kind, 0, self.numel)
        # A chunk file that has gone missing reads as NaN fill; the count taken at capture gives it away.
        if count_nonfinite(values) != nonfinite:
            raise self._damaged(kind, step, rank, "chunks are missing")
        return values

    def chunk_numel(self, rank: int = 0, kind: Kind = "gradient") -> int:
        """Return the elements per chunk on the disk: what :meth:`read_slice` reads at least.

        Raises
        ------
        TraceError
            If the kind was not captured in full.
        """
        return int(self._gradient_array(rank, kind).chunks[1])

    def read_slice(
        self, step: int, rank: int, kind: Kind, start: int, stop: int
    ) -> NDArray[np.float32]:
        """Return elements [start, stop) of one captured gradient, reading no more than the chunks they lie in.

        A missing chunk goes unnoticed here, unlike in :meth:`read`, if the gradient had as many non-finite elements
        as the chunks read have now.

        Parameters
        ----------
        step, rank, kind : as in :meth:`read`.
        start, stop : 0 ≤ start ≤ stop ≤ numel; borders of chunks (:meth:`chunk_numel`) make each be read once.

        Returns
        -------
        float32 (stop - start,)

        Raises
        ------
        InputError
            If the range is not within the gradient.
        TraceError
            If it was not captured, or as a sketch only, or its data is damaged.
        """
        if not 0 <= start <= stop <= self.numel:
            raise InputError(f"[{start}, {stop}) is not within the {self.numel} elements")
        size = self.chunk_numel(rank, kind)
        first, last = start // size * size, min(-(-stop // size) * size, self.numel)
        # Whole chunks: a missing one is then all NaN, which a few elements of it would hide among a few true NaN.
        values, nonfinite = self._elements(step, rank, kind, first, last)
        if count_nonfinite(values) > nonfinite:
            raise self._damaged(kind, step, rank, "chunks are missing")
        return values[start - first : stop - first].copy()

    def sketches(self, step: int, rank: int = 0, kind: Kind = "gradient") -> list[Sketch]:
        """Return the sketches stored of one gradient, of every layer in the order of the layout.

        They have 7 bits, and are, but for the single magnitudes of small layers, what
        :func:`gradstats.sketch` makes of each layer, bit for bit. Their sum is the whole gradient's.

        Raises
        ------
        TraceError
            If no sketches were stored, or their data is damaged.
        """
        row, arrays = self._row(step, rank), self._rank(rank, self._groups)
        if not self.has_sketches(rank, kind):
            raise TraceError(f"{self.path} has no sketches of {kind!r} on rank {rank}")
        what = f"the sketch of {kind}"
        try:
            counts = np.asarray(arrays[f"{kind}_counts"][row])
            moments = np.asarray(arrays[f"{kind}_moments"][row])
        except Exception as error:
            raise self._damaged(what, step, rank, error) from error
        if moments.shape != (len(self.layers), len(STATISTICS)) or len(counts) != len(moments):
            raise self._damaged(what, step, rank, "it does not fit the parameter layout")
        sketches = []
        for layer, number, sums in zip(self.layers, counts, moments.tolist(), strict=True):
            bins = np.flatnonzero(number > 0)  # ten times as fast as of the numbers
            occupied = number[bins].astype(np.int64)
            # A chunk that has gone missing reads as NaN moments, or as counts of zero: the sums tell.
            if sum(sums[:3]) != layer.numel or occupied.sum() != sums[0]:
                raise self._damaged(what, step, rank, "chunks are missing")
            count, zeros, nonfinite = map(int, sums[:3])
            total = Moments(layer.numel, count, zeros, nonfinite, *sums[3:])
            sketches.append(Sketch(total, bins, occupied, BITS))
        return sketches

    def scalars(self, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Return a rank's per-step columns (step, loss, threshold, …), committed rows only, by name."""
        rows = list(self._rank(rank, self._committed).values())
        arrays = self._rank(rank, self._groups)
        return {name: np.asarray(a[:])[rows] for name, a in arrays.items() if a.ndim == 1}

    def compression(self, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Return what the compressor said of a rank's steps: (steps,) by name of :data:`COMPRESSION`.

        Empty if it said nothing.
        """
        return self._statistics("compression", rank)

    def layer_compression(self, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Return what the compressor said of a rank's layers: (steps, layers) by name of :data:`LAYER_COMPRESSION`.

        NaN in steps it did not diagnose; empty if it said nothing.
        """
        return self._statistics("layer_compression", rank)

    def _statistics(self, name: str, rank: int) -> dict[str, NDArray[Any]]:
        rows = list(self._rank(rank, self._committed).values())
        array = self._rank(rank, self._groups).get(name)
        if array is None:
            return {}
        try:
            values = np.asarray(array[:])[rows]
        except Exception as error:
            raise TraceError(
                f"{self.path}: {name} of rank {rank} is damaged: {first_line(error)}"
            ) from error
        return {str(s): values[..., i] for i, s in enumerate(array.attrs["statistics"])}

    def gradients(self) -> Iterator[tuple[int, int, Kind, NDArray[np.float32]]]:
        """Yield (step, rank, kind, gradient) for everything captured in full: by rank and kind, steps in order."""
        for rank in self.ranks:
            for kind in (k for k in KINDS if self.has_gradients(rank, k)):
                for step in self.steps(rank):
                    yield step, rank, kind, self.read(step, rank, kind)

    def to_datatree(self) -> xarray.DataTree:
        """Open the trace as a dask-backed :class:`xarray.DataTree`, one node per rank."""
        import xarray

        return xarray.open_datatree(self.path, engine="zarr", chunks={}, consolidated=False)


def open_trace(path: str | Path) -> Trace:
    """Open a trace for reading.

    Raises
    ------
    TraceError
        If there is none at `path`, it is of another version, or damaged; one line says which.
    """
    return Trace(path)
