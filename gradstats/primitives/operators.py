"""The passes over a gradient as torch operators, for any device: chunk by chunk, and only scalars leave it.

Every function is one of :class:`gradstats.primitives.backend.DeviceCode`, or works on the few elements that a pass
selected. A chunk's temporaries are the largest that are made, also of strided tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradstats.primitives.arrays import Selection

__all__ = [
    "bernoulli",
    "combined",
    "counts",
    "descend",
    "keep",
    "kth_magnitude",
    "magnitude_bits",
    "occupied",
    "pack_bits",
    "random_words",
    "select",
    "signed",
    "sums",
    "tail",
    "tail_sums",
    "topk",
    "unpack_bits",
]

_DIGITS = 8
"""Binary digits after which words without undecided bits are left alone."""
CHUNK = 1 << 22
"""Elements per chunk: a device reads them in the time of a few launches, and the temporaries are some 100 to 200 MB (of
strided tensors some 300 MB: the positions of a chunk take eight bytes an element and dimension; :func:`topk` takes up
to 100 bytes for each of these, or of k elements if they are more)."""
WHOLE = 1 << 24
"""Elements of which :func:`kth_magnitude` takes less than a sample and a pass; its temporaries are 67 MB of float32."""


def _chunks(x: torch.Tensor, size: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (offset, chunk) over the flattened tensor: views, or, of a strided tensor, copies."""
    size = size or CHUNK
    if x.is_contiguous():
        flat = x.view(-1)
        for offset in range(0, x.numel(), size):
            yield offset, flat[offset : offset + size]
        return
    for offset in range(0, x.numel(), size):
        # gathered by position: reshape(-1) would copy the whole tensor
        places = torch.arange(offset, min(offset + size, x.numel()), device=x.device)
        yield offset, x[torch.unravel_index(places, x.shape)]


def _in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its dimensions in the order of its memory, so that chunks of a dense one are views."""
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))


def _widened(x: torch.Tensor) -> torch.Tensor:
    """Return float64 as it is, and everything else as float32."""
    return x if x.dtype == torch.float64 else x.float()


def _rows(
    x: torch.Tensor, row: Callable[[torch.Tensor], list[torch.Tensor]], width: int
) -> torch.Tensor:
    """Return one row of float64 scalars a chunk, on the device."""
    chunks = (_widened(chunk) for _, chunk in _chunks(_in_memory_order(x)))
    # one dtype, in which counts are exact below 2⁵³, so that all scalars leave the device together
    rows = [torch.stack([each.double() for each in row(chunk)]) for chunk in chunks]
    return torch.stack(rows) if rows else x.new_zeros((1, width), dtype=torch.float64)


def sums(x: torch.Tensor, above: float, log: bool) -> torch.Tensor:
    """Return the sums over finite non-zero |x| ≥ above, on the device."""

    def row(chunk: torch.Tensor) -> list[torch.Tensor]:
        magnitude = chunk.abs()
        # false for NaN, too
        finite = magnitude < math.inf
        mask = finite & (magnitude > 0) & (magnitude >= above)
        # masked: to select, the host would have to wait for the number of elements
        some = torch.where(mask, magnitude, 0.0)
        wide = some.double()
        logs = (
            # ln 1 = 0 for what is left out; widened first, as float32's logarithm rounds
            torch.where(mask, magnitude, 1.0).double().log_().sum() if log else wide.new_zeros(())
        )
        return [
            *(mask.sum(), (magnitude == 0).sum(), (~finite).sum()),
            *(wide.sum(), wide.square().sum(), logs, some.max()),
        ]

    return combined(_rows(x, row, 7))


def combined(rows: torch.Tensor) -> torch.Tensor:
    """Combine the sums of the parts of a gradient, on the device.

    Parameters
    ----------
    rows : float64 tensor, shape (parts, 7)
        Sums of each part.
    """
    added = rows.sum(0)
    added[6] = rows[:, 6].max()
    return added


def tail(x: torch.Tensor, above: float) -> tuple[int, float, float]:
    """Return (count, Σ|x|, Σx²) over finite non-zero |x| ≥ above."""

    def part(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        magnitude = chunk.abs()
        return (magnitude < math.inf) & (magnitude > 0) & (magnitude >= above), magnitude

    return _first_sums(x, part)


def signed(x: torch.Tensor) -> tuple[int, float, float]:
    """Return (count, Σx, Σx²) over the finite elements."""
    return _first_sums(x, lambda chunk: (chunk.isfinite(), chunk))


def _first_sums(
    x: torch.Tensor, part: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[int, float, float]:
    """Return (count, sum, squares) of a part of each chunk: which elements are in it, and what is added up of them."""

    def row(chunk: torch.Tensor) -> list[torch.Tensor]:
        mask, values = part(chunk)
        wide = torch.where(mask, values, 0.0).double()
        return [mask.sum(), wide.sum(), wide.square().sum()]

    count, total, squares = _rows(x, row, 3).sum(0).tolist()
    return int(count), total, squares


def counts(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the elements by their leading bits, NaN too, and leave the counts on the device."""
    histogram = torch.zeros(1 << (8 + bits), dtype=torch.int64, device=x.device)
    zeros = torch.zeros((), dtype=torch.int64, device=x.device)
    one = torch.ones((), dtype=torch.int64, device=x.device)
    for _, chunk in _chunks(_in_memory_order(x)):
        magnitude = chunk.float().abs()
        zeros += (magnitude == 0).sum()
        bins = (magnitude.view(torch.int32) >> (23 - bits)).long()
        # counts add up to the same in any order; bincount would ask the host for their largest
        # `one` is expanded: a single number is read, not a chunk of ones
        histogram.scatter_add_(0, bins, one.expand_as(bins))
    # they share the lowest bin with the smallest denormals
    histogram[0] -= zeros
    return histogram, zeros


def select(x: torch.Tensor, low: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ascending positions and values of |x| ≥ low > 0, without NaN."""
    # torch.cat needs a tensor, also of an empty gradient
    indices, values = [x.new_empty(0, dtype=torch.int64)], [x.new_empty(0)]
    for offset, chunk in _chunks(x):
        # in the precision that `low` was rounded to; float16 would round it again
        places = (_widened(chunk).abs() >= low).nonzero().view(-1)
        indices.append(places + offset)
        values.append(chunk[places])
    return torch.cat(indices), torch.cat(values)


def magnitude_bits(chunk: torch.Tensor) -> torch.Tensor:
    """Return the bits of magnitudes as whole numbers, in their order; those of NaN are zero.

    Parameters
    ----------
    chunk : tensor
        Elements; what is narrower than float32 is widened.
    """
    # infinity stays: by default it becomes the largest finite number
    magnitude = _widened(chunk).abs().nan_to_num_(0.0, math.inf)
    return magnitude.view(torch.int64 if chunk.dtype == torch.float64 else torch.int32)


def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ascending positions and values of exactly k elements with the largest magnitudes."""
    best = x.new_empty(0)
    indices = x.new_empty(0, dtype=torch.int64)
    # what is kept is sorted with each chunk: of many elements, with a larger one
    for offset, chunk in _chunks(x, max(CHUNK, k)):
        positions = torch.arange(offset, offset + chunk.numel(), device=x.device)
        values, positions = torch.cat([best, chunk]), torch.cat([indices, positions])
        # stable: of ties the first stay the first
        order = magnitude_bits(values).sort(descending=True, stable=True).indices[:k]
        best, indices = values[order], positions[order]
    indices, order = indices.sort()
    # where NaN stands for zero it becomes one, and −0 becomes 0
    return indices, torch.where(magnitude_bits(best) > 0, best, 0)[order]


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack bits, eight a byte."""
    packed = bits.new_zeros((bits.numel() + 7) // 8, dtype=torch.uint8)
    for lane in range(8):
        each = bits[lane::8]
        packed[: each.numel()] |= each.to(torch.uint8) << lane
    return packed


def unpack_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the first bits of what :func:`pack_bits` made, as bool."""
    bits = packed.new_empty(numel, dtype=torch.bool)
    for lane in range(8):
        each = bits[lane::8]
        each.copy_((packed[: each.numel()] >> lane) & 1)
    return bits


def random_words(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return words of 64 random bits.

    Parameters
    ----------
    count : int
        Number of words.
    generator : torch.Generator
        Their generator, on the device wanted.

    Returns
    -------
    int64 tensor, shape (count,)
        The words.
    """
    words = torch.empty(count, dtype=torch.int64, device=generator.device)
    # None: the upper end is left out, and 2⁶³ is no int64
    return words.random_(torch.iinfo(torch.int64).min, None, generator=generator)


def bernoulli(
    words: int, numerator: int, denominator: int, generator: torch.Generator
) -> torch.Tensor:
    """Return words of random bits, each 1 with the probability of a fraction."""
    bits = torch.zeros(words, dtype=torch.int64, device=generator.device)
    # `part` is `bits` itself until the first words are left out
    part, positions, rest, digits = bits, None, numerator, 0
    open_ = torch.full_like(bits, -1)  # bits whose digits have all been equal
    # digit by digit against those of the fraction: a bit is decided where they first differ,
    # and 1 if the drawn number is the smaller; digits after the last 1 leave nothing to be smaller than
    while rest and open_.numel():
        digit, rest = divmod(2 * rest, denominator)
        drawn = random_words(part.numel(), generator)
        if digit:
            part |= open_ & ~drawn
            open_ &= drawn
        else:
            open_ &= ~drawn
        digits += 1
        if digits % _DIGITS == 0 and rest:  # few words still have open bits
            if positions is not None:
                bits[positions] |= part
            left = open_.nonzero().view(-1)
            positions = left if positions is None else positions[left]
            part, open_ = torch.zeros_like(left), open_[left]
    if positions is not None:
        bits[positions] |= part
    return bits


def occupied(counts: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bring the occupied bins of a histogram to the host.

    Parameters
    ----------
    counts : int64 tensor, shape (bins,)
        Elements per bin.

    Returns
    -------
    bins : ndarray of int64, shape (b,)
        Occupied bins, ascending.
    counts : ndarray of int64, shape (b,)
        Elements in each of them.
    """
    bins = counts.nonzero().view(-1)
    pair = torch.stack([bins, counts[bins]]).cpu().numpy()
    return pair[0], pair[1]


def descend(
    counts: torch.Tensor, k: float, finite: int
) -> tuple[int, int, tuple[int, int, int], int]:
    """Go down from the last finite bin until more than k elements are reached.

    Parameters
    ----------
    counts : int64 tensor, shape (bins,)
        Elements per bin.
    k : float
        Number of elements to exceed.
    finite : int
        Number of bins of finite magnitudes.

    Returns
    -------
    bin : int
        Where it ends; −1 if there are no more than k elements.
    reached : int
        Elements in it and above it.
    around : (int, int, int)
        Elements in the bin before it, in it, and in the one after it.
    nonfinite : int
        NaN and infinities.
    """
    reached = counts[:finite].flip(0).cumsum(0)
    # of whole numbers, more than k is more than ⌊k⌋
    # filled there: a number that is moved is a wait
    most = torch.full((1,), math.floor(k), dtype=reached.dtype, device=reached.device)
    place = torch.searchsorted(reached, most, right=True)
    here = finite - 1 - place
    # `place` is one too far where no bin is reached; clamped, what is read is not used
    around = torch.cat([here - 1, here, here + 1]).clamp_(0, finite - 1)
    last = reached[place.clamp(max=finite - 1)]
    numbers = torch.cat([here, last, counts[around], counts[finite:].sum()[None]]).tolist()
    i, above, before, inside, after, nonfinite = (int(each) for each in numbers)
    return i, above, (before, inside, after), nonfinite


def tail_sums(weight: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    """Add up the bins of a histogram from the last to the first, on its device.

    Parameters
    ----------
    weight : int64 tensor, shape (bins,)
        Elements per bin.
    middle : float64 tensor, shape (bins,)
        Their magnitude, ascending, on the same device.

    Returns
    -------
    float64 tensor, shape (bins + 1, 4)
        Number, sum and sum of squares from each bin on, and the number in it; zeros last.
    """
    # rows: CUDA adds up a column with one thread, and a vector in no fixed order
    parts = torch.stack([torch.ones_like(middle), middle, middle.square()]) * weight
    sums = middle.new_zeros(middle.numel() + 1, 4)
    sums[:-1, :3] = parts.flip(1).cumsum(1).flip(1).T
    sums[:-1, 3] = weight
    return sums


def kth_magnitude(values: Any, k: int) -> float | None:
    """Return the k-th largest finite magnitude, None if there are fewer that are not zero.

    Parameters
    ----------
    values : tensor, shape (n,)
        Elements.
    k : int
        Rank, at least 1.
    """
    if k > values.numel():
        return None
    # NaN and infinity become 0, and 0 is no answer
    magnitude = _widened(values).abs().nan_to_num_(0, 0)
    return float(magnitude.topk(k, sorted=False).values.min()) or None


def keep(selection: Selection, threshold: float) -> Selection:
    """Return the part of a selection at or above a threshold, without NaN.

    Parameters
    ----------
    selection : Selection
        Elements to choose from.
    threshold : float
        Least magnitude kept, a number of the gradient's precision.
    """
    places = (_widened(selection.values).abs() >= threshold).nonzero().view(-1)
    return Selection(selection.indices[places], selection.values[places])
