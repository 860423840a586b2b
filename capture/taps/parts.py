"""Parts of a parameter as layers of their own: rows of an embedding, experts of a fused parameter, heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from gradstats.errors import InputError
from gradstats.hooks.layout import matching
from gradstats.primitives.ratio import shown
from gradstats.trace import Layer, Shard

__all__ = ["Parts", "UnitsOption"]

UnitsOption: TypeAlias = Mapping[str, int | tuple[int, int]]


class Parts:
    """Which parameters are cut into which layers.

    Parameters
    ----------
    units : mapping of str to int or (int, int), optional
        By name pattern the dimension along which each index is a layer, or the dimension and the number of equal parts.
    layers : sequence of Layer
        The parameters.

    Attributes
    ----------
    layers : list of Layer
        The parameters, and in the place of those that are cut their parts, ``NAME[0]``, ``NAME[1]``, ….

    Raises
    ------
    InputError
        If no parameter matches a pattern, or one cannot be cut so.
    """

    def __init__(self, units: UnitsOption | None, layers: Sequence[Layer]) -> None:
        counts = _counts(units, layers)
        self.layers: list[Layer] = []
        self._rows: list[int] = []  # of each part of a parameter; 0 if it is not cut
        for layer, count in zip(layers, counts, strict=True):
            rows = layer.shape[0] // count if count else 0
            self._rows.append(rows)
            if not count:
                self.layers.append(layer)
                continue
            shape, size = _shape(layer.shape, rows), layer.numel // count
            self.layers += [
                Layer(f"{layer.name}[{i}]", layer.offset + i * size, shape) for i in range(count)
            ]

    def shards(self, shards: Sequence[Shard], layers: Sequence[Layer]) -> list[Shard]:
        """Return what a rank holds of each of :attr:`layers`.

        Parameters
        ----------
        shards : sequence of Shard
            What it holds of each parameter.
        layers : sequence of Layer
            The parameters.
        """
        part_shards = []
        for shard, layer, rows in zip(shards, layers, self._rows, strict=True):
            if not rows:
                part_shards.append(shard)
                continue
            # rows of the parameter that this rank holds
            begin, end = shard.offset[0], shard.offset[0] + shard.shape[0]
            for i in range(layer.shape[0] // rows):
                # those of part i among them: none if low >= high
                low, high = max(begin, i * rows), min(end, (i + 1) * rows)
                offset, shape = shard.offset[1:], shard.shape[1:]
                # a part of several rows, or of a vector, keeps dimension 0
                if len(_shape(layer.shape, rows)) == len(layer.shape):
                    held = max(0, high - low)
                    # the offset is within the part
                    offset, shape = (low - i * rows if held else 0, *offset), (held, *shape)
                # a part of one row has lost dimension 0: the rank holds the shard's other dimensions of it, or nothing
                elif low >= high:
                    offset, shape = (0,) * len(offset), (0,) * len(shape)
                part_shards.append(Shard(f"{layer.name}[{i}]", offset, shape))
        return part_shards


def _shape(whole: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the shape of so many rows: of one without its dimension, unless there is no other."""
    return whole[1:] if rows == 1 and len(whole) > 1 else (rows, *whole[1:])


def _counts(units: UnitsOption | None, layers: Sequence[Layer]) -> list[int]:
    """Return into how many parts each parameter is cut; 0 if it is not."""
    counts = dict.fromkeys((layer.name for layer in layers), 0)
    if units is not None and not isinstance(units, Mapping):
        raise InputError(
            f"units maps name patterns to a dimension, as in {{'*.experts': 0}}, not {shown(units)}"
        )
    for pattern, how in (units or {}).items():
        dim, count = how if isinstance(how, tuple) and len(how) == 2 else (how, None)
        # not isinstance(): a bool is an int, too
        counted = count is None or (type(count) is int and count > 0)
        if type(dim) is not int or not counted:
            raise InputError(
                f"units[{pattern!r}] is a dimension, or a dimension and a number of parts, not {shown(how)}"
            )
        if dim != 0:
            raise InputError(
                f"units[{pattern!r}] names dimension {dim}: parts of dimension 0 alone lie together in the gradient"
            )
        matches = matching([pattern])
        some = [layer for layer in layers if matches(layer.name)]
        if not some:
            raise InputError(f"units: no captured parameter matches {pattern!r}")
        for layer in some:
            size = layer.shape[0] if layer.shape else 0
            parts = size if count is None else count
            if not layer.numel or size % parts:
                raise InputError(
                    f"units: {layer.name} of shape {layer.shape} does not fall into {parts} equal parts along "
                    "dimension 0"
                )
            counts[layer.name] = counts[layer.name] or parts  # the first pattern counts
    return list(counts.values())
