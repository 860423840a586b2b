"""Gradients rounded to number formats as they would be sent, piece by piece, against what they were.

A gradient is read once for each format, once for its largest element, and once for what is no number; nothing of its
size is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradstats.primitives.arrays import (
    Array,
    Selection,
    as_numpy,
    as_positions,
    check,
    even_chunks,
    flat_chunks,
    numel_of,
)
from gradstats.primitives.codec import rice_encode
from gradstats.primitives.formats import Format, rotated

__all__ = ["Measured", "Message", "Way", "measure"]

_LARGEST = float(np.finfo(np.float32).max)
_SIGNS = 0x5EED
"""What the seed of a rotation's signs has more than that of rounding."""


@dataclass(frozen=True)
class Way:
    """One way to write numbers.

    Attributes
    ----------
    format : Format
        Type of the numbers, and their scales.
    scale : {"none", "tensor", "block"}
        What shares a scale, for tables.
    rounding : {"nearest", "stochastic"}
        How numbers are rounded.
    rotation : int
        Numbers that a Hadamard matrix mixes before; 0 for none.
    """

    format: Format
    scale: str
    rounding: str
    rotation: int


class Message:
    """One rank's gradient: its elements, piece by piece, and which of them are sent.

    Parameters
    ----------
    values : array_like, shape (d,)
        The gradient, of any floating dtype.
    seed : sequence of int
        Seed of stochastic rounding.
    selection : Selection, optional
        What is sent of it; all of it by default.
    """

    def __init__(
        self, values: Array, seed: Sequence[int] = (0,), selection: Selection | None = None
    ) -> None:
        self.values = check(values)
        self.numel = numel_of(values)
        self.seed = seed
        self.places: NDArray[np.int64] | None = None
        self.position_bits = 0
        self._chosen: torch.Tensor | None = None
        self._largest: dict[int, torch.Tensor] = {}
        if selection is not None:
            self.places = as_positions(selection.indices)
            self._chosen = _exact(as_numpy(selection.values))
            self.position_bits = 32 * int(rice_encode(self.places).size)

    @property
    def count(self) -> int:
        """Return the number of elements that are sent."""
        return self.numel if self.places is None else self.places.size

    @cached_property
    def nonfinite(self) -> int:
        """Return the number of elements that are no number."""
        return sum(
            chunk.size - int(np.count_nonzero(np.isfinite(chunk)))
            for _, chunk in flat_chunks(self.values)
        )

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the elements in float64, without what is no number, and where they lie."""
        for start, chunk in even_chunks(self.values):
            yield slice(start, start + chunk.size), _exact(chunk)

    def messages(self) -> Iterator[torch.Tensor]:
        """Yield the numbers that are sent, in float32: piece by piece, or the selection at once."""
        if self._chosen is not None:
            yield _single(self._chosen)
            return
        for _, piece in self.pieces():
            yield _single(piece)

    def largest(self, rotation: int, signs: torch.Tensor | None) -> torch.Tensor:
        """Return the largest magnitude of the message, rotated or not; remembered.

        Parameters
        ----------
        rotation : int
            Numbers that are mixed; 0 for none.
        signs : float32 tensor, shape (rotation,), optional
            Signs of the rotation.
        """
        if rotation not in self._largest:
            each = (_mixed(m, signs).abs().amax() for m in self.messages() if m.numel())
            self._largest[rotation] = max(each, default=torch.zeros(()))
        return self._largest[rotation]


def _exact(values: NDArray[np.floating[Any]]) -> torch.Tensor:
    """Return elements in float64, those that are no number as 0."""
    # a copy, also of float64, as the zeros are written to it
    return torch.from_numpy(np.array(values, np.float64)).nan_to_num_(0.0, 0.0, 0.0)


def _single(exact: torch.Tensor) -> torch.Tensor:
    # finite numbers stay finite
    return exact.clamp(-_LARGEST, _LARGEST).float()


def _mixed(x: torch.Tensor, signs: torch.Tensor | None) -> torch.Tensor:
    """Return numbers as they are rounded: mixed in blocks, the last one filled with zeros, if there are signs."""
    if signs is None:
        return x
    # only the last piece: rotations are powers of two up to CHUNK, and divide all others
    if missing := -x.numel() % signs.numel():
        x = torch.cat([x, x.new_zeros(missing)])
    return rotated(x.view(-1, signs.numel()), signs).view(-1)


def _signs(size: int, seed: int) -> torch.Tensor | None:
    """Return the signs of a rotation, the same on all ranks."""
    if not size:
        return None
    drawn = np.random.default_rng([_SIGNS, seed]).integers(0, 2, size)
    return torch.from_numpy(np.where(drawn, 1.0, -1.0).astype(np.float32))


@dataclass
class _Counts:
    """What happened to the numbers of some messages."""

    nonzero: int = 0
    zeros: int = 0
    saturated: int = 0


def _arrived(
    way: Way, sent: Message, signs: torch.Tensor | None, counts: _Counts
) -> Iterator[torch.Tensor]:
    """Yield what arrives of each piece of a message, and count."""
    generator, form = None, way.format
    if way.rounding == "stochastic":
        # NumPy takes several numbers as a seed, none negative; torch takes one
        state = np.random.default_rng([*(abs(n) for n in sent.seed)]).integers(0, 2**62)
        generator = torch.Generator().manual_seed(int(state))
    # of the whole message: its pieces share the tensor's scale
    whole = sent.largest(way.rotation, signs) if form.scale != "none" else None
    for message in sent.messages():
        if not message.numel():
            yield message
            continue
        x = _mixed(message, signs)
        rows = form.rows(x)
        scales = form.scales(rows, whole)
        scaled = form.scaled(rows, scales)
        numbers = form.rounded(scaled, generator)
        # of the mixed numbers, which are what is rounded; those that fill up rows are 0
        there = rows != 0
        counts.nonzero += int(there.sum())
        counts.zeros += int(((numbers == 0) & there).sum())
        counts.saturated += int(form.beyond(scaled).sum())
        arrival = form.restored(numbers, scales).view(-1)[: x.numel()]
        if signs is not None:
            arrival = rotated(arrival.view(-1, signs.numel()), signs, back=True).view(-1)
        yield arrival[: message.numel()]


@dataclass
class Measured:
    """What one way did to one gradient, or to the sum of several; fields as in :func:`gradstats.wire`."""

    ranks: int
    numel: int
    bits: float
    error: float
    bias: float
    cosine: float
    zeros: float
    saturated: float
    dropped: float
    nonfinite: int


def measure(way: Way, sent: Sequence[Message], seed: int) -> list[Measured]:
    """Compare what arrives of each rank with its gradient, and the sum of several with their sum.

    Parameters
    ----------
    way : Way
        How numbers are written.
    sent : sequence of Message
        The ranks' gradients, of one size.
    seed : int
        Seed of the rotation's signs.

    Returns
    -------
    list of Measured
        One for each rank, and, of several, one for their sum.
    """
    signs = _signs(way.rotation, seed)
    counts = [_Counts() for _ in sent]
    units = [_unit(s) for s in sent]
    # the last one is of the ranks' sum; the smallest unit keeps it in range
    sums = [_Sums(unit) for unit in (*units, min(units, default=1.0))]
    streams = [_spread(s, _arrived(way, s, signs, c)) for s, c in zip(sent, counts, strict=True)]
    for pieces in zip(*streams, strict=True):
        # not strict: there is one more sum than ranks
        for each, piece in zip(sums, pieces, strict=False):
            each.add(*piece)
        if len(sent) > 1:
            total = [sum(column[1:], column[0]) for column in zip(*pieces, strict=True)]
            sums[-1].add(total[0], total[1], total[2])
    bits = [_bits(way, s) for s in sent]
    measurements = [
        _measured(1, s, each, [c], b)
        for s, each, c, b in zip(sent, sums, counts, bits, strict=False)
    ]
    if len(sent) > 1:
        measurements.append(_measured(len(sent), sent[0], sums[-1], counts, float(np.mean(bits))))
        measurements[-1].nonfinite = sum(each.nonfinite for each in measurements[:-1])
    return measurements


def _unit(sent: Message) -> float:
    """Return a power of two that keeps squares of a gradient's elements within float64."""
    top = float(sent.largest(0, None))
    # squares of float32 numbers, the smallest too, are within float64's range
    if 0 < top < _LARGEST or not sent.numel:
        return 1.0
    exact = max((float(p.abs().amax()) for _, p in sent.pieces()), default=0.0)
    # a power of two scales without rounding; beyond 2¹⁰²³ there is none for the smallest denormals
    return math.ldexp(1.0, min(-math.frexp(exact)[1], 1000)) if exact else 1.0


def _spread(
    sent: Message, arrived: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield a gradient, what was sent of it before rounding, and what arrives, all piece by piece in float64."""
    if sent.places is None:
        for (_, exact), arrival in zip(sent.pieces(), arrived, strict=True):
            yield exact, exact, arrival.double()
        return
    (all_of_it,) = arrived
    for where, exact in sent.pieces():
        first, last = np.searchsorted(sent.places, (where.start, where.stop))
        inside = torch.from_numpy(sent.places[first:last] - where.start)
        chosen, arrival = torch.zeros_like(exact), torch.zeros_like(exact)
        chosen[inside] = exact[inside]
        arrival[inside] = all_of_it[int(first) : int(last)].double()
        yield exact, chosen, arrival


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the scalar product, to the last bit the same with any number of threads, which BLAS's is not."""
    return float(np.einsum("i,i->", a.numpy(), b.numpy()))


class _Sums:
    """Sums of products of a gradient g, what was sent of it, and what arrived, q."""

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self.square = self.error = self.along = self.arrived = self.product = self.dropped = 0.0

    def add(self, exact: torch.Tensor, chosen: torch.Tensor, arrival: torch.Tensor) -> None:
        """Add one piece."""
        g, q = exact * self._unit, arrival * self._unit
        # of the difference itself: the difference of sums of squares would lose a small error
        off = q - g
        self.square += _dot(g, g)
        self.error += _dot(off, off)
        self.along += _dot(off, g)
        self.arrived += _dot(q, q)
        self.product += _dot(q, g)
        # the same object where everything is sent, and nothing dropped
        if chosen is not exact:
            left = chosen * self._unit - g
            self.dropped += _dot(left, left)


def _bits(way: Way, sent: Message) -> float:
    """Return the bits of a message, an element of the gradient."""
    count = sent.count
    if way.rotation:
        # what fills up the last mixed block is sent, too
        count += -count % way.rotation
    return (way.format.bits_of(count) + sent.position_bits) / max(sent.numel, 1)


def _measured(
    ranks: int, sent: Message, sums: _Sums, counts: Sequence[_Counts], bits: float
) -> Measured:
    nonzero = sum(c.nonzero for c in counts)
    # two roots, as the product of two sums of squares may overflow
    both = math.sqrt(sums.square) * math.sqrt(sums.arrived)

    def share(part: float, whole: float) -> float:
        return part / whole if whole else math.nan

    return Measured(
        ranks=ranks,
        numel=sent.numel,
        bits=bits,
        error=share(sums.error, sums.square),
        bias=share(sums.along, sums.square),
        cosine=share(sums.product, both),
        zeros=share(sum(c.zeros for c in counts), nonzero),
        saturated=share(sum(c.saturated for c in counts), nonzero),
        dropped=share(sums.dropped, sums.square),
        nonfinite=sent.nonfinite,
    )
