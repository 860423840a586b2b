"""The passes over a contiguous float32, float16 or bfloat16 tensor as Triton kernels.

Magnitudes are compared through their bits, as in :mod:`gradstats.primitives.loops.words`. What a program sums depends
on the number of elements alone, and programs are combined in order or by counting: every run gives the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from gradstats.primitives.operators import combined, magnitude_bits, random_words

__all__ = [
    "bernoulli",
    "counts",
    "pack_bits",
    "select",
    "signed",
    "sums",
    "tail",
    "topk",
    "unpack_bits",
]

BLOCK = 1024
"""Elements that a program reads at a time: eight for each thread of four warps."""

PROGRAMS = 1024
"""Programs that share a sum, if each has a block: several for each multiprocessor of a large GPU."""

MOST_BLOCKS = 512
"""Blocks summed by one program at most: a product of as many mantissas stays within float64's range."""

COPIES = 16
"""Histograms that programs share, each of them added to by some: one alone keeps them waiting for its fullest bins."""

SAMPLED = 1 << 20
"""Elements from which a sample bounds the k-th magnitude: of fewer all are counted in the time of its launches."""

SAMPLE = 1 << 16
"""Elements of that sample."""

_DEVIATIONS = 5.0
"""Deviations by which the bound is below what the sample says: it misses once in three million independent ones."""

_DIGITS = (16, 15)
"""Bits of a magnitude that are counted at a time, from the highest."""

_MASK = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_MANTISSA = tl.constexpr(0x7FFFFF)
_ONE = tl.constexpr(0x3F800000)
_NONE = 0x7FFFFFFF
"""Above the bits of every magnitude."""
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _loaded(x, start, numel, BLOCK: tl.constexpr):
    """Return positions, which of them exist, values as float32, and the bits of the magnitudes (0 beyond the end)."""
    at = start + tl.arange(0, BLOCK)
    inside = at < numel
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    return at, inside, value, value.to(tl.int32, bitcast=True) & _MASK


# a threshold's bits change at every step; Triton compiles anew for multiples of 16
@triton.jit(do_not_specialize=["low"])
def _sums_kernel(
    x,
    rows,
    numel,
    low,
    SIGNED: tl.constexpr,
    LOG: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row of (count, zeros, nonfinite, sum, squares, logarithms, max) of one program's blocks."""
    # 64 bits, or positions from 2³¹ on would wrap around
    program = tl.program_id(0).to(tl.int64)
    # a sum of its own for each place of a block: the order of additions is fixed
    count = tl.full([BLOCK], 0, tl.int32)
    zeros = tl.full([BLOCK], 0, tl.int32)
    nonfinite = tl.full([BLOCK], 0, tl.int32)
    exponents = tl.full([BLOCK], 0, tl.int32)
    largest = tl.full([BLOCK], 0, tl.int32)
    total = tl.full([BLOCK], 0.0, tl.float64)
    squares = tl.full([BLOCK], 0.0, tl.float64)
    product = tl.full([BLOCK], 1.0, tl.float64)
    for i in range(BLOCKS):
        start = (program * BLOCKS + i) * BLOCK
        _, inside, value, bits = _loaded(x, start, numel, BLOCK)
        mask = inside & (bits >= low) & (bits < _INFINITY)
        count += mask.to(tl.int32)
        zeros += (inside & (bits == 0)).to(tl.int32)
        # no `inside`: beyond the end bits are 0
        nonfinite += (bits >= _INFINITY).to(tl.int32)
        largest = tl.maximum(largest, tl.where(mask, bits, 0))
        wide = tl.where(mask, value if SIGNED else tl.abs(value), 0.0).to(tl.float64)
        total += wide
        squares += wide * wide
        if LOG:
            # exponents add up, mantissas multiply; a denormal is a whole number of 2⁻¹⁴⁹
            tiny = bits < 0x800000
            scaled = tl.where(tiny, bits.to(tl.float32).to(tl.int32, bitcast=True), bits)
            exponent = (scaled >> 23) - tl.where(tiny, 127 + 149, 127)
            mantissa = ((scaled & _MANTISSA) | _ONE).to(tl.float32, bitcast=True)
            exponents += tl.where(mask, exponent, 0)
            product *= tl.where(mask, mantissa, 1.0).to(tl.float64)
    row = rows + program * 7
    tl.store(row, tl.sum(count).to(tl.float64))
    tl.store(row + 1, tl.sum(zeros).to(tl.float64))
    tl.store(row + 2, tl.sum(nonfinite).to(tl.float64))
    tl.store(row + 3, tl.sum(total))
    tl.store(row + 4, tl.sum(squares))
    if LOG:
        logs = tl.log(product) + exponents.to(tl.float64) * _LN2
        tl.store(row + 5, tl.sum(logs))
    tl.store(row + 6, tl.max(largest).to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit
def _counts_kernel(
    x, counters, zeros, numel, SHIFT: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr
):
    """Count the elements of one block by their leading bits, in one of some histograms, and its zeros."""
    program = tl.program_id(0).to(tl.int64)
    _, inside, _, bits = _loaded(x, program * BLOCK, numel, BLOCK)
    histogram = counters + (program % COPIES) * ((_MASK >> SHIFT) + 1)
    # zeros, of which a gradient may have many, would all wait for one counter
    tl.atomic_add(histogram + (bits >> SHIFT), 1, mask=bits > 0, sem="relaxed")
    tl.store(zeros + program, tl.sum((inside & (bits == 0)).to(tl.int32)))


@triton.jit(do_not_specialize=["low"])
def _hits_kernel(x, hits, numel, low, BLOCK: tl.constexpr):
    """Count the elements of one block to select."""
    program = tl.program_id(0).to(tl.int64)
    _, _, _, bits = _loaded(x, program * BLOCK, numel, BLOCK)
    tl.store(hits + program, tl.sum(((bits >= low) & (bits <= _INFINITY)).to(tl.int32)))


@triton.jit(do_not_specialize=["low"])
def _select_kernel(x, ends, indices, values, numel, low, BLOCK: tl.constexpr):
    """Write the elements of one block to select, in order, before the end of its part."""
    program = tl.program_id(0).to(tl.int64)
    at, _, value, bits = _loaded(x, program * BLOCK, numel, BLOCK)
    mask = (bits >= low) & (bits <= _INFINITY)
    hits = mask.to(tl.int32)
    # `ends` count this program's elements, too
    place = tl.load(ends + program) - tl.sum(hits) + tl.cumsum(hits) - 1
    tl.store(indices + place, at, mask=mask)
    # exact: the value was widened from this type
    tl.store(values + place, value.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _ordered(x, start, numel, BLOCK: tl.constexpr):
    """Return positions, which of them exist, values, and the bits of the magnitudes, those of NaN zero."""
    at, inside, value, bits = _loaded(x, start, numel, BLOCK)
    return at, inside, value, tl.where(bits > _INFINITY, 0, bits)


@triton.jit
def _digits_kernel(
    x,
    counters,
    prefix,
    least,
    most,
    numel,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the next digits of one block's magnitudes that begin with those found, from the least to below the most."""
    program = tl.program_id(0).to(tl.int64)
    low, high = tl.load(least), tl.load(most)
    if low < high:
        _, _, _, bits = _ordered(x, program * BLOCK, numel, BLOCK)
        begun = ((bits >> SHIFT) >> WIDTH) == tl.load(prefix).to(tl.int32)
        digit = (bits >> SHIFT) & ((1 << WIDTH) - 1)
        counted = begun & (bits >= low) & (bits < high)
        tl.atomic_add(counters + digit, 1, mask=counted, sem="relaxed")


@triton.jit
def _ranks_kernel(x, over, tied, kth, numel, BLOCK: tl.constexpr):
    """Count the magnitudes of one block above the k-th, and those tied with it."""
    program = tl.program_id(0).to(tl.int64)
    _, inside, _, bits = _ordered(x, program * BLOCK, numel, BLOCK)
    least = tl.load(kth).to(tl.int32)
    tl.store(over + program, tl.sum((bits > least).to(tl.int32)))
    tl.store(tied + program, tl.sum((inside & (bits == least)).to(tl.int32)))


@triton.jit
def _topk_kernel(x, over_ends, tied_ends, kth, ties, indices, values, numel, BLOCK: tl.constexpr):
    """Write the elements of one block that are among the k, in order, from what was counted up to its end."""
    program = tl.program_id(0).to(tl.int64)
    at, inside, value, bits = _ordered(x, program * BLOCK, numel, BLOCK)
    least, most = tl.load(kth).to(tl.int32), tl.load(ties)
    over = (bits > least).to(tl.int32)
    equal = (inside & (bits == least)).to(tl.int32)
    tied_before = tl.load(tied_ends + program) - tl.sum(equal)
    mask = (over > 0) | ((equal > 0) & (tied_before + tl.cumsum(equal) <= most))
    # larger ones of earlier programs, and of their ties those that are among the k
    before = tl.load(over_ends + program) - tl.sum(over) + tl.minimum(tied_before, most)
    place = before + tl.cumsum(mask.to(tl.int32)) - 1
    tl.store(indices + place, at, mask=mask)
    sent = tl.where(bits > 0, value, 0.0)
    tl.store(values + place, sent.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _pack_kernel(bits, packed, numel, BLOCK: tl.constexpr):
    """Pack eight bits into each byte of one block, the first the lowest."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, 8)
    at = byte[:, None] * 8 + lane[None, :]
    bit = tl.load(bits + at, mask=at < numel, other=0).to(tl.int32)
    tl.store(packed + byte, tl.sum(bit << lane[None, :], 1).to(tl.uint8), mask=byte * 8 < numel)


@triton.jit
def _unpack_kernel(packed, bits, numel, BLOCK: tl.constexpr):
    """Write each bit of one block as a byte."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(packed + at // 8, mask=at < numel, other=0).to(tl.int32)
    tl.store(bits + at, ((byte >> (at % 8).to(tl.int32)) & 1).to(tl.uint8), mask=at < numel)


@triton.jit
def _digit(part, undecided, rest, denominator, drawn):
    """Compare one binary digit of a fraction with 64 drawn digits: bits are decided where they differ."""
    rest = rest * 2
    digit = -(rest >= denominator).to(tl.int64)  # all ones, or zeros
    return (
        part | (undecided & ~drawn & digit),
        undecided & ~(drawn ^ digit),
        rest + digit * denominator,
    )


@triton.jit(do_not_specialize=["numerator", "denominator"])
def _bernoulli_kernel(random, key, numel, numerator, denominator, BLOCK: tl.constexpr):
    """Write words of random bits, each 1 with the probability of a fraction: digits are drawn until they differ."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low, high = (at & 0xFFFFFFFF).to(tl.uint32), (at >> 32).to(tl.uint32)
    seed = tl.load(key)
    # small integers arrive with 32 bits, which doubling would leave
    denominator = denominator.to(tl.int64)
    rest = numerator.to(tl.int64)
    # zeros of the block's shape and 64 bits
    part = at * 0
    undecided = tl.where(at < numel, part - 1, part)
    step = low * 0
    while (rest > 0) & (tl.max((undecided != 0).to(tl.int32), 0) > 0):
        # the counter is the word's position and the step: draws do not depend on the launch
        a, b, c, d = tl.philox(seed, low, high, step, step * 0)
        first = a.to(tl.int64) | (b.to(tl.int64) << 32)
        second = c.to(tl.int64) | (d.to(tl.int64) << 32)
        part, undecided, rest = _digit(part, undecided, rest, denominator, first)
        part, undecided, rest = _digit(part, undecided, rest, denominator, second)
        step += 1
    tl.store(random + at, part, mask=at < numel)


INTERPRETED = not isinstance(_sums_kernel, triton.JITFunction)
"""Whether the kernels run in Triton's interpreter, on CPU tensors: the environment said so at the import."""


def _launch(kernel: Any, programs: int, x: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    """Start programs on the tensor's device, which need not be the current one; none starts for none."""
    if programs:
        with torch.cuda.device_of(x):
            kernel[(programs,)](x, *arguments, BLOCK=BLOCK, **constants)


def _bits(magnitude: float) -> int:
    """Return the bits of a float32, as int32 compares them."""
    return int(np.float32(magnitude).view(np.int32))


def _counter(x: torch.Tensor) -> torch.dtype:
    """Return the type that counts elements: 32 bits cannot overflow below 2³¹ of them."""
    return torch.int32 if x.numel() < 2**31 else torch.int64


def _summed(x: torch.Tensor, low: int, **constants: bool) -> torch.Tensor:
    """Combine the rows of :func:`_sums_kernel`."""
    blocks = triton.cdiv(x.numel(), BLOCK)
    # a power of two: each is compiled by itself
    each = min(triton.next_power_of_2(max(triton.cdiv(blocks, PROGRAMS), 1)), MOST_BLOCKS)
    programs = triton.cdiv(blocks, each)
    # an empty tensor has a row, too, as the largest of none is an error
    rows = torch.zeros((max(programs, 1), 7), dtype=torch.float64, device=x.device)
    _launch(_sums_kernel, programs, x, rows, x.numel(), low, BLOCKS=each, **constants)
    return combined(rows)


def sums(x: torch.Tensor, above: float, log: bool) -> torch.Tensor:
    """Return the sums over finite non-zero |x| ≥ above, on the device."""
    return _summed(x, max(_bits(above), 1), SIGNED=False, LOG=log)


def tail(x: torch.Tensor, above: float) -> tuple[int, float, float]:
    """Return (count, Σ|x|, Σx²) over finite non-zero |x| ≥ above."""
    count, _, _, total, squares, _, _ = sums(x, above, False).tolist()
    return int(count), total, squares


def signed(x: torch.Tensor) -> tuple[int, float, float]:
    """Return (count, Σx, Σx²) over the finite elements."""
    count, _, _, total, squares, _, _ = _summed(x, 0, SIGNED=True, LOG=False).tolist()
    return int(count), total, squares


def counts(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the elements by their leading bits, NaN too, and leave the counts on the device."""
    programs = triton.cdiv(x.numel(), BLOCK)
    # of few elements there is little to wait for, and copies have to be added up
    copies = COPIES if x.numel() >= SAMPLED else 1
    histograms = torch.zeros((copies, 1 << (8 + bits)), dtype=_counter(x), device=x.device)
    zeros = torch.zeros(programs, dtype=torch.int32, device=x.device)
    _launch(
        _counts_kernel, programs, x, histograms, zeros, x.numel(), SHIFT=23 - bits, COPIES=copies
    )
    return histograms.sum(0), zeros.sum()


def select(x: torch.Tensor, low: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ascending positions and values of |x| ≥ low > 0, without NaN: two reads and one synchronisation."""
    programs = triton.cdiv(x.numel(), BLOCK)
    hits = torch.zeros(programs, dtype=torch.int32, device=x.device)
    _launch(_hits_kernel, programs, x, hits, x.numel(), _bits(low))
    ends = hits.cumsum(0)
    # the synchronisation: the host has to know how long the result is
    count = int(ends[-1]) if programs else 0
    indices = torch.empty(count, dtype=torch.int64, device=x.device)
    values = torch.empty(count, dtype=x.dtype, device=x.device)
    if count:
        _launch(_select_kernel, programs, x, ends, indices, values, x.numel(), _bits(low))
    return indices, values


def _bound(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the bits of a magnitude that k elements almost surely reach, at least 1, on the device."""
    if x.numel() >= SAMPLED:
        some = magnitude_bits(x.view(-1)[:: x.numel() // SAMPLE])
        expected = k * some.numel() / x.numel()
        # deviations of a Poisson count, and a constant for small counts, which are skewed
        rank = math.ceil(expected + _DEVIATIONS * math.sqrt(expected) + _DEVIATIONS)
        if rank <= some.numel():
            return some.topk(rank, sorted=False).values.min().view(1).clamp_(min=1)
    return torch.ones(1, dtype=torch.int32, device=x.device)


def _kth_bits(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of the k-th largest magnitude, and how many with these bits are among the k; on the device."""
    programs = triton.cdiv(x.numel(), BLOCK)
    kth = torch.zeros(1, dtype=torch.int64, device=x.device)
    rest, inside = kth + k, kth + x.numel()
    least = _bound(x, k)
    # above all: NaN, whose bits are zero here
    most = torch.full_like(least, _NONE)
    left = sum(_DIGITS)
    for width in _DIGITS:
        left -= width
        histogram = torch.zeros(1 << width, dtype=_counter(x), device=x.device)
        shape = {"SHIFT": left, "WIDTH": width}
        _launch(_digits_kernel, programs, x, histogram, kth, least, most, x.numel(), **shape)
        if width == _DIGITS[0] and x.numel() >= SAMPLED:
            # the sample misled where fewer than k reach the bound: the others are counted too, else there are none
            lower = torch.where(histogram.sum() < k, 1, least)
            _launch(_digits_kernel, programs, x, histogram, kth, lower, least, x.numel(), **shape)
            least = lower
        histogram = histogram.long()
        # what was left out: all that begin with the digits found are `inside`, and these are the smallest
        histogram[:1] += inside - histogram.sum()
        reached = histogram.flip(0).cumsum(0)
        # from the highest digit down, the first with `rest` of them at or above it
        place = torch.searchsorted(reached, rest)
        digit = histogram.numel() - 1 - place
        inside = histogram[digit]
        rest = rest - (reached[place] - inside)
        kth = (kth << width) | digit
    return kth, rest


def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ascending positions and values of exactly k elements: four reads, and no synchronisation."""
    programs = triton.cdiv(x.numel(), BLOCK)
    kth, ties = _kth_bits(x, k)
    hits = torch.zeros((2, programs), dtype=torch.int32, device=x.device)
    _launch(_ranks_kernel, programs, x, *hits, kth, x.numel())
    # exactly k elements are kept, so every place is written
    indices = torch.empty(k, dtype=torch.int64, device=x.device)
    values = torch.empty(k, dtype=x.dtype, device=x.device)
    ends = hits.cumsum(1)
    _launch(_topk_kernel, programs, x, *ends, kth, ties, indices, values, x.numel())
    return indices, values


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack bits, eight a byte, in one read."""
    bits = bits.contiguous()
    packed = torch.empty(triton.cdiv(bits.numel(), 8), dtype=torch.uint8, device=bits.device)
    programs = triton.cdiv(packed.numel(), BLOCK)
    _launch(_pack_kernel, programs, bits.view(torch.uint8), packed, bits.numel())
    return packed


def unpack_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the first bits of what :func:`pack_bits` made, as bool."""
    bits = torch.empty(numel, dtype=torch.uint8, device=packed.device)
    _launch(_unpack_kernel, triton.cdiv(numel, BLOCK), packed.contiguous(), bits, numel)
    return bits.view(torch.bool)


def bernoulli(
    words: int, numerator: int, denominator: int, generator: torch.Generator
) -> torch.Tensor:
    """Return words of random bits, each 1 with the probability of a fraction, without a synchronisation."""
    # the generator's part: the key of a counter-based one (Philox), which the kernel draws from
    key = random_words(1, generator)
    random = torch.empty(words, dtype=torch.int64, device=generator.device)
    programs = triton.cdiv(words, BLOCK)
    _launch(_bernoulli_kernel, programs, random, key, words, numerator, denominator)
    return random
