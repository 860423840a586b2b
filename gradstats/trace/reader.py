"""Reading: what is committed, and nothing that is damaged."""

# Size: half of its lines are docstrings of one class, which say all that a trace can be asked.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError, TraceError, unknown, unread
from gradstats.files import address_of
from gradstats.primitives import Moments
from gradstats.primitives.ratio import shown
from gradstats.primitives.sketch import Sketch, merge
from gradstats.tables import Shown
from gradstats.trace.format import (
    BITS,
    KINDS,
    STATISTICS,
    WHOLE,
    Kind,
    Layer,
    from_bfloat16,
    layout,
    root_attributes,
)
from gradstats.trace.remote import local
from gradstats.trace.stored import RankGroup, StoredArray

if TYPE_CHECKING:
    import pandas as pd
    import xarray
    from matplotlib.axes import Axes

__all__ = ["Trace", "open_trace"]

_LONGEST = 4096
"""Characters that a path may have."""


# Size: half of its lines are docstrings of all that a trace can be asked; its parts are in other files.
class Trace(Shown):
    """A trace opened for reading. Only committed steps are visible.

    Damage is met where it lies: a rank, column or step that cannot be read raises one line when it is asked for, and
    the rest of the trace stays readable.

    Parameters
    ----------
    path : str or Path
        The directory.

    Attributes
    ----------
    path : Path
        The directory.
    attrs : dict
        Attributes as stored: the format's own, and the run's metadata (model, data, compressor, seed, versions, …).
    layers : list of Layer
        Parameters in the order of the flat gradient.
    numel : int
        Elements of the flat gradient, d.
    world_size : int
        Ranks of the run.

    Raises
    ------
    InputError
        If `path` is no path, or has several lines.
    TraceError
        If there is no trace, it is of another version, or nothing of it can be read.
    """

    def __init__(self, path: str | Path) -> None:
        text = str(path)
        odd = len(text) > _LONGEST or len(text.splitlines()) > 1
        if not isinstance(path, str | Path) or odd:  # errors repeat it, in one line
            raise InputError(f"a trace is opened by the path of its folder, not {shown(path)}")
        self.path = Path(path)
        self.attrs = root_attributes(self.path)
        self.layers = layout(self.path, self.attrs)
        self.numel: int = self.attrs["numel"]
        self.world_size: int = self.attrs["world_size"]
        self._ranks: dict[int, RankGroup] = {}
        # groups that are being laid out have names that begin with a dot
        for folder in sorted(self.path.glob("rank[0-9]*")):
            if folder.name[4:].isdecimal():
                rank = int(folder.name[4:])
                self._ranks[rank] = RankGroup(folder, rank, self.path, self.attrs, self.layers)
        for rank, group in self._ranks.items():
            # the first of the ranks with shards speaks for all of them
            if group.sharded and not group.lost and rank == group.shard_ranks[0]:
                group.join(self._ranks)
        # a trace of which nothing can be read must not look like an empty one
        lost = [r.lost for r in self._ranks.values()]
        if lost and all(lost):
            raise TraceError(lost[0])

    def __repr__(self) -> str:
        steps = len(set().union(*(r.rows for r in self._ranks.values())))
        return f"<Trace {self.path} ranks={self.ranks} steps={steps} numel={self.numel}>"

    def _rows(self) -> list[dict[str, Any]]:
        """Return a record of each rank and kind; one that says why of a rank that cannot be read."""
        size = {"numel": self.numel, "layers": len(self.layers)}
        rows: list[dict[str, Any]] = []
        for rank in self.ranks:
            try:
                kinds, steps = self.kinds(rank), self.steps(rank)
            except TraceError as error:
                none = {"rank": rank, "kind": None, "steps": None, "first": None, "last": None}
                rows.append({**none, **size, "stored": str(error)})
                continue
            ends = {"first": min(steps, default=None), "last": max(steps, default=None)}
            for kind in kinds:
                stored = "gradients" if self.has_gradients(rank, kind) else "sketches"
                labels = {"rank": rank, "kind": kind, "steps": len(steps)}
                rows.append({**labels, **ends, **size, "stored": stored})
        return rows

    def plot(
        self, rank: int = 0, kind: Kind = "gradient", ax: Axes | None = None, **options: Any
    ) -> Axes:
        """Draw the sorted magnitudes of the first, middle and last step: :func:`gradstats.plots.magnitude_decay`.

        Parameters
        ----------
        rank : int
            Rank that captured the gradients.
        kind : Kind
            Kind of gradient.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; new ones by default.
        **options : object
            Options of the figure, such as ``title``.

        Returns
        -------
        matplotlib.axes.Axes
            The axes.

        Raises
        ------
        TraceError
            If there is no such rank, kind or step.
        """
        steps = self.steps(rank)
        if not steps:
            raise TraceError(f"{self.path} holds no committed step")
        vectors: dict[str, Any] = {}
        for step in (steps[0], steps[len(steps) // 2], steps[-1]):
            full = self.has_gradients(rank, kind)
            one = self.read(step, rank, kind) if full else merge(self.sketches(step, rank, kind))
            vectors[f"step {step}"] = one
        options.setdefault("title", f"{self.name}, {kind}, rank {rank}")
        return self._draw("magnitude_decay", vectors, ax=ax, **options)

    @property
    def name(self) -> str:
        """Return the directory's name without ``.zarr``."""
        return self.path.name.removesuffix(".zarr")

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that gradients are read under: of a sharded model the first of those with its shards."""
        # a lost rank is listed: asking for it says what is wrong with it
        return sorted(r for r, g in self._ranks.items() if g.lost or any(map(g.speaks, _kinds(g))))

    def shard_ranks(self, rank: int) -> list[int]:
        """Return the ranks that together hold the gradient read under one of them.

        Parameters
        ----------
        rank : int
            One of :attr:`ranks`.

        Returns
        -------
        list of int
            The ranks; `rank` alone where the model was not sharded.

        Raises
        ------
        TraceError
            If there is no such rank.
        """
        return list(self._rank(rank).shard_ranks)

    def steps(self, rank: int | None = None) -> list[int]:
        """Return the committed steps of a rank or of any rank, ascending.

        Parameters
        ----------
        rank : int, optional
            The rank; None for the steps that any rank holds.

        Returns
        -------
        list of int
            Step numbers.

        Raises
        ------
        TraceError
            If there is no such rank, or step numbers are lost.
        """
        if rank is not None:
            return sorted(self._whole(rank).rows)
        return sorted(set().union(*(self._whole(r).rows for r in self.ranks)))

    def kinds(self, rank: int) -> list[Kind]:
        """Return the kinds of gradient that a rank captured, in full or as sketches.

        Parameters
        ----------
        rank : int
            The rank.

        Returns
        -------
        list of Kind
            Some of :data:`KINDS`.
        """
        return [k for k in KINDS if self.has_gradients(rank, k) or self.has_sketches(rank, k)]

    def has_gradients(self, rank: int = 0, kind: Kind = "gradient") -> bool:
        """Tell whether a rank holds every element of a kind, so that :meth:`read` can give them.

        Parameters
        ----------
        rank : int
            The rank.
        kind : Kind
            The kind.

        Returns
        -------
        bool
            True also where the data is damaged.
        """
        group = self._rank(rank)
        return kind in group.names and group.speaks(kind)

    def has_sketches(self, rank: int = 0, kind: Kind = "gradient") -> bool:
        """Tell whether a rank holds sketches of a kind, so that :meth:`sketches` can give them.

        Parameters
        ----------
        rank : int
            The rank.
        kind : Kind
            The kind.

        Returns
        -------
        bool
            True also where the data is damaged.
        """
        group = self._rank(rank)
        return f"{kind}_counts" in group.names and group.speaks(kind)

    def _rank(self, rank: int) -> RankGroup:
        """Return a rank whose arrays can be read."""
        if rank not in self._ranks:
            have = ", ".join(map(str, self.ranks)) or "none"
            raise TraceError(f"{self.path} has no rank {rank}; it holds {have}")
        group = self._ranks[rank]
        if group.lost:
            raise TraceError(group.lost)
        return group

    def _whole(self, rank: int) -> RankGroup:
        """Return a rank all of whose step numbers are known."""
        group = self._rank(rank)
        if group.gaps:
            raise TraceError(group.gaps[0])
        return group

    def _row(self, step: int, rank: int) -> int:
        group = self._rank(rank)
        if step not in group.rows:
            if group.gaps:  # it may be one of those lost
                raise TraceError(group.gaps[0])
            raise TraceError(f"{self.path} has no step {step} on rank {rank}")
        return group.rows[step]

    def _damaged(self, what: str, step: int, rank: int, why: object) -> TraceError:
        return TraceError(f"{self.path}: {what} of step {step}, rank {rank} {unread(why)}")

    def _gradient_arrays(self, rank: int, kind: Kind) -> list[StoredArray]:
        """Return the arrays that hold a kind in full."""
        if self.has_gradients(rank, kind):
            return [holder.array(kind) for holder in self._rank(rank).holders(kind)]
        if self.has_sketches(rank, kind):
            raise TraceError(
                f"{self.path} holds only sketches of {kind!r} on rank {rank}: Trace.sketches gives their "
                "distributions; single elements need a capture with --store gradients"
            )
        spokesman = self._rank(rank).shard_ranks[0]
        if kind in self._rank(rank).names and rank != spokesman:
            raise TraceError(
                f"{self.path}: rank {rank} holds a part of {kind!r}, which is read under rank {spokesman}"
            )
        raise TraceError(f"{self.path} has no {kind!r} on rank {rank}")

    def _elements(
        self, step: int, rank: int, kind: Kind, start: int, stop: int
    ) -> NDArray[np.float32]:
        """Return a part of what one rank holds of a gradient; it begins and ends with chunks."""
        row, array = self._row(step, rank), self._rank(rank).array(kind)
        size = array.chunk[1]
        try:
            first, last = start // size, -(-stop // size)
            # checked by file name: zarr reads a missing chunk as NaN, which a gradient may hold, too
            present = {i for i in array.chunks(row) if first <= i < last}
            if len(present) < last - first:
                raise self._damaged(kind, step, rank, "chunks are missing")
            # checked before zarr decodes it, which takes as much memory as the chunk itself claims
            for i in present:
                array.holds(row, i)
            values = np.asarray(array.zarr[row, start:stop])
            values = from_bfloat16(values) if values.dtype == np.uint16 else values
        except TraceError:
            raise
        # zarr, codecs and file systems each raise errors of their own for damage
        except Exception as error:
            raise self._damaged(kind, step, rank, error) from error
        return values

    def read(
        self, step: int, rank: int = 0, kind: Kind = "gradient", layer: str | None = None
    ) -> NDArray[np.float32]:
        """Return one captured gradient, bit-exact as captured (bfloat16: as rounded).

        Parameters
        ----------
        step : int
            Training step.
        rank : int
            Rank that captured it.
        kind : Kind
            One of :data:`KINDS`.
        layer : str, optional
            Name of a parameter; all of them if None.

        Returns
        -------
        ndarray of float32, shape (numel,)
            All parameters one after the other; of one layer, in the shape of the parameter.

        Raises
        ------
        InputError
            If there is no such layer.
        TraceError
            If it was not captured, or as a sketch only, or its data is damaged.
        """
        if layer is None:
            return self.read_slice(step, rank, kind, 0, self.numel)
        place = self._layer(layer)
        values = self.read_slice(step, rank, kind, place.slice.start, place.slice.stop)
        return values.reshape(place.shape)

    def _layer(self, name: str) -> Layer:
        """Return the place of a parameter."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise unknown("layer", name, [layer.name for layer in self.layers])

    def __getitem__(self, layer: str) -> xarray.DataArray:
        """Return the gradients of one layer over all ranks, kinds and steps that hold them in full.

        Parameters
        ----------
        layer : str
            Name of a parameter.

        Returns
        -------
        xarray.DataArray
            Dimensions rank, kind and step with their labels, then ``dim_0``, … of the parameter; NaN where a rank did
            not capture a kind in a step.

        Raises
        ------
        InputError
            If there is no such layer.
        TraceError
            If there are only sketches, or data is damaged.
        """
        import xarray

        place, ranks, steps = self._layer(layer), self.ranks, self.steps()
        start, stop = place.slice.start, place.slice.stop
        kinds = [k for k in KINDS if any(self.has_gradients(r, k) for r in ranks)]
        if not kinds:
            raise TraceError(
                f"{self.path} holds only sketches: Trace.sketches gives their distributions"
            )
        values = np.full((len(ranks), len(kinds), len(steps), *place.shape), np.nan, np.float32)
        for i, rank in enumerate(ranks):
            for j, kind in enumerate(kinds):
                for n, step in enumerate(steps):
                    if self.has_gradients(rank, kind) and step in self._rank(rank).rows:
                        part = self.read_slice(step, rank, kind, start, stop)
                        values[i, j, n] = part.reshape(place.shape)
        return xarray.DataArray(
            values,
            {"rank": ranks, "kind": kinds, "step": steps},
            ["rank", "kind", "step", *(f"dim_{i}" for i in range(len(place.shape)))],
            layer,
        )

    def chunk_numel(self, rank: int = 0, kind: Kind = "gradient") -> int:
        """Return the elements per chunk on the disk: what :meth:`read_slice` reads at least.

        Parameters
        ----------
        rank : int
            Rank that captured the gradient.
        kind : Kind
            One of :data:`KINDS`.

        Returns
        -------
        int
            Elements per chunk.

        Raises
        ------
        TraceError
            If the kind was not captured in full.
        """
        # shards of different sizes may have chunks of different sizes
        return max(array.chunk[1] for array in self._gradient_arrays(rank, kind))

    def read_slice(
        self, step: int, rank: int, kind: Kind, start: int, stop: int
    ) -> NDArray[np.float32]:
        """Return elements [start, stop) of one captured gradient, reading no more than the chunks they lie in.

        Parameters
        ----------
        step : int
            Training step.
        rank : int
            Rank that captured it.
        kind : Kind
            One of :data:`KINDS`.
        start, stop : int
            First element, and the one after the last, 0 ≤ start ≤ stop ≤ numel. Borders of chunks
            (:meth:`chunk_numel`) make each chunk be read once.

        Returns
        -------
        ndarray of float32, shape (stop − start,)
            The elements.

        Raises
        ------
        InputError
            If the range is not within the gradient.
        TraceError
            If it was not captured, or as a sketch only, or its data is damaged.
        """
        if not 0 <= start <= stop <= self.numel:
            raise InputError(f"[{start}, {stop}) is not within the {self.numel} elements")
        self._gradient_arrays(rank, kind)  # raises where there are none
        # raises where there is no such step
        self._row(step, rank)
        group = self._rank(rank)
        # the model is not sharded, or every rank has all elements of this kind
        if len(holders := group.holders(kind)) == 1:
            return self._part(step, rank, kind, start, stop)
        # filled completely: RankGroup.join has checked that every element is in exactly one shard
        values = np.empty(stop - start, np.float32)
        for holder, mate in zip(group.shard_ranks, holders, strict=True):
            # stretches of the flat gradient, and where each begins in the vector of this rank's shards
            firsts, lengths = mate.pieces.T
            lasts, owns = firsts + lengths, lengths.cumsum() - lengths
            # stretches ascend, so that those that overlap [start, stop) are adjacent
            here = slice(np.searchsorted(lasts, start, "right"), np.searchsorted(firsts, stop))
            begins, ends = np.maximum(firsts[here], start), np.minimum(lasts[here], stop)
            if begins.size:
                # in the rank's own vector they are contiguous, and are read at once
                owns = owns[here] + begins - firsts[here]
                low, high = int(owns[0]), int(owns[-1] + ends[-1] - begins[-1])
                part = self._part(step, holder, kind, low, high)
                for begin, end, offset in zip(begins, ends, owns - low, strict=True):
                    values[begin - start : end - start] = part[offset : offset + end - begin]
        return values

    def _part(self, step: int, rank: int, kind: Kind, start: int, stop: int) -> NDArray[np.float32]:
        """Return elements [start, stop) of what one rank holds of a gradient."""
        array = self._rank(rank).array(kind)
        size, numel = array.chunk[1], array.shape[1]
        # widened to whole chunks; the array's end cuts the last
        first, last = start // size * size, min(-(-stop // size) * size, numel)
        values = self._elements(step, rank, kind, first, last)
        whole = (first, last) == (start, stop)
        # a copy, because a view would keep the whole chunks in memory
        return values if whole else values[start - first : stop - first].copy()

    def sketches(self, step: int, rank: int = 0, kind: Kind = "gradient") -> list[Sketch]:
        """Return the sketches stored of one gradient, one per layer in the order of the layout.

        They have 7 bits, and are, but for the single magnitudes of small layers, what
        :func:`gradstats.sketch` makes of each layer, bit for bit. Their sum is the whole gradient's.

        Parameters
        ----------
        step : int
            Training step.
        rank : int
            Rank that captured it.
        kind : Kind
            One of :data:`KINDS`.

        Returns
        -------
        list of Sketch
            One sketch per layer.

        Raises
        ------
        TraceError
            If no sketches were stored, or their data is damaged.
        """
        self._row(step, rank)
        if not self.has_sketches(rank, kind):
            raise TraceError(f"{self.path} has no sketches of {kind!r} on rank {rank}")
        group = self._rank(rank)
        ranks = [rank] if len(group.holders(kind)) == 1 else group.shard_ranks
        parts = [self._stored_sketches(step, r, kind) for r in ranks]
        return [merge(of_layer) for of_layer in zip(*parts, strict=True)]

    def _stored_sketches(self, step: int, rank: int, kind: Kind) -> list[Sketch]:
        """Return the sketches of what one rank holds of each parameter."""
        row, group = self._row(step, rank), self._rank(rank)
        what = f"the sketch of {kind}"
        stored, summed = group.array(f"{kind}_counts"), group.array(f"{kind}_moments")
        shape = (len(self.layers), len(STATISTICS))
        try:
            if stored.shape[1] != shape[0] or summed.shape[1:] != shape:
                raise self._damaged(what, step, rank, "it does not fit the parameter layout")
            sums_of = summed.read_chunk(row // summed.chunk[0], 0, 0)
            if self.layers and sums_of is None:
                raise self._damaged(what, step, rank, "chunks are missing")
            moments = np.empty(shape) if sums_of is None else sums_of[row % summed.chunk[0]]
            # not through zarr, which makes arrays of the many chunks that are not there: they are zeros
            counts = np.zeros(stored.shape[1:], stored.dtype)
            for i, start in enumerate(range(0, stored.shape[2], stored.chunk[2])):
                if (block := stored.read_chunk(row, 0, i)) is not None:
                    part = counts[:, start : start + stored.chunk[2]]
                    part[...] = block[0, :, : part.shape[1]]
        except TraceError:
            raise
        except Exception as error:
            raise self._damaged(what, step, rank, error) from error
        sketches = []
        # a rank with shards has sketches of its parts
        sizes = [la.numel for la in self.layers] if kind in WHOLE else group.sizes
        for size, number, sums in zip(sizes, counts, moments.tolist(), strict=True):
            bins = np.flatnonzero(number > 0)  # ten times as fast as of the numbers
            # uint32 on the disk; sums over ranks and steps may exceed it
            occupied = number[bins].astype(np.int64)
            # A chunk that has gone missing reads as NaN moments, or as counts of zero: the sums tell.
            if sum(sums[:3]) != size or occupied.sum() != sums[0]:
                raise self._damaged(what, step, rank, "chunks are missing")
            count, zeros, nonfinite = map(int, sums[:3])
            total = Moments(size, count, zeros, nonfinite, *sums[3:])
            sketches.append(Sketch(total, bins, occupied, BITS))
        return sketches

    def scalars(self, rank: int = 0) -> Mapping[str, NDArray[Any]]:
        """Return a rank's per-step columns (step, loss, threshold, …), committed rows only, by name.

        Parameters
        ----------
        rank : int
            The rank.

        Returns
        -------
        mapping of str to ndarray, shape (steps,)
            A column is read when it is looked up, and raises :class:`TraceError` then if it is damaged.

        Raises
        ------
        TraceError
            If there is no such rank, or step numbers are lost.
        """
        return self._whole(rank).scalars()

    def compression(self, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Return what the compressor said of a rank's steps.

        Parameters
        ----------
        rank : int
            The rank.

        Returns
        -------
        dict of str to ndarray, shape (steps,)
            By name of :data:`COMPRESSION`; empty if it said nothing.
        """
        return self._table("compression", rank)

    def layer_compression(self, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Return what the compressor said of a rank's layers.

        Parameters
        ----------
        rank : int
            The rank.

        Returns
        -------
        dict of str to ndarray, shape (steps, layers)
            By name of :data:`LAYER_COMPRESSION`; NaN in steps that it did not diagnose. Empty if it said nothing.
        """
        return self._table("layer_compression", rank)

    def _table(self, name: str, rank: int) -> dict[str, NDArray[Any]]:
        group = self._whole(rank)
        # joined under the first rank of a sharded model, and nowhere else
        if name not in group.names or group.shard_ranks[0] != rank:
            return {}
        values, names = group.joined(name), group.array(name).names
        if len(names) != values.shape[-1]:
            raise group.damaged(name, "its columns have no names")
        return {column: values[..., i] for i, column in enumerate(names)}

    def gradients(self) -> Iterator[tuple[int, int, Kind, NDArray[np.float32]]]:
        """Yield everything captured in full: by rank and kind, steps in order.

        Yields
        ------
        step, rank : int
            Training step and rank.
        kind : Kind
            One of :data:`KINDS`.
        values : ndarray of float32, shape (numel,)
            The gradient.
        """
        for rank in self.ranks:
            for kind in (k for k in KINDS if self.has_gradients(rank, k)):
                for step in self.steps(rank):
                    yield step, rank, kind, self.read(step, rank, kind)

    def to_dataframe(self) -> pd.DataFrame:
        """Return all that was stored of the steps besides gradients: loss, thresholds, what the compressor said.

        Returns
        -------
        pandas.DataFrame
            A row for each rank and step, in this order; columns :meth:`scalars` and :meth:`compression`.

        Raises
        ------
        TraceError
            If a column is damaged.
        """
        import pandas as pd

        frames = [
            pd.DataFrame({"rank": rank, **self.scalars(rank), **self.compression(rank)})
            for rank in self.ranks
        ]
        # pd.concat refuses an empty list
        every = pd.concat(frames) if frames else pd.DataFrame({"rank": [], "step": []})
        return every.set_index(["rank", "step"]).sort_index()

    def to_datatree(self) -> xarray.DataTree:
        """Open the trace as a dask-backed :class:`xarray.DataTree`, one node per rank.

        Returns
        -------
        xarray.DataTree
            The arrays as they are on the disk, rows that are not committed (step -1) included.

        Raises
        ------
        TraceError
            If the data is damaged.
        """
        import xarray

        try:
            # chunks={}: the chunks on the disk; a trace that grows has no consolidated metadata
            return xarray.open_datatree(self.path, engine="zarr", chunks={}, consolidated=False)
        except Exception as error:
            raise TraceError(f"{self.path} {unread(error)}") from error


def _kinds(group: RankGroup) -> list[Kind]:
    """Return the kinds of which a group holds something."""
    return [k for k in KINDS if {k, f"{k}_counts"} & group.names]


def open_trace(path: str | Path) -> Trace:
    """Open a trace for reading.

    Parameters
    ----------
    path : str or Path
        The directory, or an address that fsspec opens, which is fetched whole: ``s3://bucket/run.zarr``.

    Returns
    -------
    Trace
        The trace; only committed steps are visible.

    Raises
    ------
    InputError
        If `path` is no path, has several lines, or is an address that cannot be opened.
    TraceError
        If there is none at `path`, it is of another version, or damaged; one line says which.
    """
    # fetched before it is opened, so that a Trace always reads files
    address = isinstance(path, str | Path) and address_of(path) is not None
    return Trace(local(path) if address else path)
