"""Compiled loops over one contiguous float32 block, without Python's interpreter lock.

NumPy on cache-sized chunks makes one sweep of the cache and one temporary per operation; these loops make one sweep in
all (`docs/measurements.md` has both). Numba caches the compiled code on disk; :func:`gradstats.warm_up` compiles it
ahead of time.

Magnitudes are compared through their bits: the bits of non-negative floats are in the order of the values, zero has no
bit set, and everything above the bits of infinity is NaN. No setting of the floating-point unit (such as flushing
denormals) can change that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray

__all__ = [
    "COMPRESSES",
    "PART",
    "block_bfloat16",
    "block_count",
    "block_counts",
    "block_histogram",
    "block_moments",
    "block_norm",
    "block_peaks",
    "block_select",
    "block_signed",
    "block_signs",
    "block_spread_signs",
    "block_stochastic_signs",
    "block_sum",
    "block_sum_log",
    "block_tail",
    "block_tail_histogram",
    "block_under",
    "copy_past_caches",
    "histograms_of_parts",
    "keep_at_least",
    "mean_of_bfloat16",
    "moments_of_parts",
    "round_to_bfloat16",
    "tail_sums",
    "warm_up",
]

_FEATURES = {
    name[1:]: name[0] == "+"  # the last mention counts
    for name in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if name
}
COMPRESSES = _FEATURES.get("avx512f", False)
"""Whether the processor moves the elements that a mask marks together: what :func:`block_tail_histogram` needs."""
_COMPRESSES_BYTES = all(_FEATURES.get(f"avx512{name}", False) for name in ("f", "bw", "vbmi2"))
"""Whether it does so with the bytes of a vector, one for each place of a word."""
_MASK = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_NORMAL, _MANTISSA, _ONE = np.int32(0x00800000), 23, np.int32(127)
"""Bits of the least normal number, bits of a mantissa, and the exponent of 1."""
PART = 2048
"""Elements per part of a block: 8 kB, which stay in the first-level cache between the loops over it."""
_WORD = 64
"""Elements tested together, with a bit each of a 64-bit word."""
_DRAWN = 128
"""Elements that are drawn before any is looked at, so that one does not wait for the memory of another."""
_SOME = 4
"""Elements of a word that are selected without asking whether there are so many."""
_MORE = 16
"""The same of words that have more than :data:`_SOME`."""
_LINE, _AHEAD = 16, 2048
"""Elements of a cache line, and how far ahead of a loop memory is asked for."""
_PAIRS = _LINE // 2
"""Pairs of elements of a cache line."""
_PIECE = 256
"""Elements that a loop reads between asking for memory, where the compiler must not be disturbed inside it."""
_SUMMED = 1024
"""Elements that are added up in float32, in as many sums as the processor's vectors have places for."""
_FACTORS = 16
"""Mantissas that are multiplied in float32: their product is below 2¹⁶."""
_SQUARED = 2.0**-50
"""Magnitude from which on, and up to its inverse, squares are added up in float32."""
_LANES = 8
"""Numbers of float64 that are added together."""
_LN2 = 0.6931471805599453
_GOLDEN, _MIX = (
    np.uint64(0x9E3779B97F4A7C15),
    (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)),
)
"""Constants of splitmix64 (Steele, Lea and Flood 2014)."""

# Sums may be reordered, which makes them vector instructions, but NaN and infinity keep their meaning, except to
# np.isfinite: it asks whether x − x is 0, which reordering answers without looking; compare with np.inf. Loops that sum
# are written into their callers (`inline="always"`), one function to the compiler: called, the process that compiles
# them and those that load them from the cache take differently ordered copies, and the last bit of a sum differs.
_FAST = {"reassoc", "nsz", "contract"}


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a loop, and keep the code on disk where there is a folder for it: a container may have none."""

    def compile_(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # Numba found no folder it may write to
            _say_once()
            return njit(**options)(function)

    return compile_


@cache
def _say_once() -> None:
    warnings.warn(
        "no folder for compiled code is writable, so every process compiles for some seconds: "
        "set NUMBA_CACHE_DIR to one that is",
        stacklevel=4,
    )


_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic


def _row(context: Any, builder: Any, kind: Any, bits: Any, start: Any, mask: Any) -> Any:
    """Return bits[start:] & mask, as the vector of a word."""
    vector = ir.VectorType(ir.IntType(32), _WORD)
    array = cgutils.create_struct_proxy(kind)(context, builder, bits)
    place = _place(builder, array.data, start, vector)
    return builder.and_(builder.load(place, align=4), _everywhere(builder, mask))


def _place(builder: Any, data: Any, at: Any, row: Any) -> Any:
    """Return the address of a row of elements from `at` on."""
    return builder.bitcast(builder.gep(data, [at]), row.as_pointer())


def _everywhere(builder: Any, scalar: Any, size: int = _WORD) -> Any:
    """Return a vector of equal elements."""
    nothing = ir.Constant(ir.VectorType(scalar.type, size), ir.Undefined)
    first = builder.insert_element(nothing, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), size), [0] * size)
    )


def _compared(context: Any, builder: Any, signature: Any, arguments: Any) -> tuple[Any, Any]:
    """Return bits[start + j] & mask, and whether it is from `low` to `low + width`, unsigned, as vectors."""
    bits, start, mask, low, width = arguments[:5]
    masked = _row(context, builder, signature.args[0], bits, start, mask)
    low, width = _everywhere(builder, low), _everywhere(builder, width)
    return masked, builder.icmp_unsigned("<=", builder.sub(masked, low), width)


@_intrinsic
def _within(_: Any, bits: Any, start: Any, mask: Any, low: Any, width: Any) -> Any:
    """Return a word whose bit j tells whether (bits[start + j] & mask) − low, unsigned, is at most `width`.

    A vector comparison, of which a processor has the bits in one instruction; from Python's loops a compiler does not
    find it. Element 0 is the lowest bit on any machine that stores the lowest byte first.
    """
    if bits.layout != "C":
        raise TypeError("only neighbouring elements can be compared together")

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, kept = _compared(context, builder, signature, arguments)
        return builder.bitcast(kept, ir.IntType(_WORD))

    return types.uint64(bits, types.intp, types.uint32, types.uint32, types.uint32), build


def _part(builder: Any, vector: Any, start: int, size: int) -> Any:
    """Return some elements of a vector."""
    places = ir.Constant(ir.VectorType(ir.IntType(32), size), [*range(start, start + size)])
    return builder.shuffle_vector(vector, vector, places)


@_intrinsic
def _sum_from(_: Any, bits: Any, start: Any, stop: Any, mask: Any, low: Any) -> Any:
    """Return how many of bits[start:stop] & mask, of whole words, are from `low` on, signed, and their sum as floats.

    Places of a word have sums of their own, which are halved in the end: the order is part of the code, whatever the
    compiler does around it. A loop's own would depend on its caller.
    """
    if bits.layout != "C":
        raise TypeError("only neighbouring elements can be added together")

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, start, stop, mask, low = arguments
        many = ir.VectorType(ir.IntType(32), _WORD)
        row = ir.VectorType(ir.FloatType(), _WORD)
        number = cgutils.alloca_once_value(builder, ir.Constant(many, [0] * _WORD))
        total = cgutils.alloca_once_value(builder, ir.Constant(row, [0.0] * _WORD))
        builder.store(ir.Constant(many, [0] * _WORD), number)  # where it is allocated runs once
        builder.store(ir.Constant(row, [0.0] * _WORD), total)
        step = ir.Constant(start.type, _WORD)
        with cgutils.for_range_slice(builder, start, stop, step, start.type) as (at, _):
            masked = _row(context, builder, signature.args[0], bits, at, mask)
            kept = builder.icmp_signed(">=", masked, _everywhere(builder, low))
            sums = builder.load(total)
            added = builder.fadd(sums, builder.bitcast(masked, row))
            builder.store(builder.select(kept, added, sums), total)
            builder.store(builder.add(builder.load(number), builder.zext(kept, many)), number)
        n, s = builder.load(number), builder.load(total)
        half = _WORD // 2
        while half:
            n = builder.add(_part(builder, n, 0, half), _part(builder, n, half, half))
            s = builder.fadd(_part(builder, s, 0, half), _part(builder, s, half, half))
            half //= 2
        first = ir.Constant(ir.IntType(32), 0)
        n = builder.zext(builder.extract_element(n, first), start.type)
        s = builder.fpext(builder.extract_element(s, first), ir.DoubleType())
        return context.make_tuple(builder, signature.return_type, [n, s])

    found = types.Tuple((types.intp, types.float64))
    return found(bits, types.intp, types.intp, types.uint32, types.int32), build


@_intrinsic
def _add_within(_: Any, bits: Any, start: Any, mask: Any, low: Any, width: Any, lanes: Any) -> Any:
    """Add the floats that :func:`_within` marks, and their squares, to two rows of lanes; return its word.

    Written out, because what a compiler makes of a loop that counts and sums under a condition is slower.
    """
    if bits.layout != "C" or lanes.layout != "C":
        raise TypeError("only neighbouring elements can be added together")

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        masked, kept = _compared(context, builder, signature, arguments)
        zeros = ir.Constant(masked.type, [0] * _WORD)
        some = builder.select(kept, masked, zeros)
        some = builder.bitcast(some, ir.VectorType(ir.FloatType(), _WORD))
        row = ir.VectorType(ir.DoubleType(), _LANES)
        array = cgutils.create_struct_proxy(signature.args[5])(context, builder, arguments[5])
        places = [
            builder.bitcast(
                builder.gep(array.data, [ir.Constant(ir.IntType(64), i)]), row.as_pointer()
            )
            for i in range(0, 4 * _LANES, _LANES)
        ]
        found = [builder.load(place, align=8) for place in places]
        for j in range(0, _WORD, _LANES):
            x = builder.fpext(_part(builder, some, j, _LANES), row)
            turn = (
                j // _LANES % 2
            )  # two sums of each in turn, as an addition waits for the last one
            fused = {"flags": ("contract",)}
            found[turn] = builder.fadd(found[turn], x)
            found[2 + turn] = builder.fadd(found[2 + turn], builder.fmul(x, x, **fused), **fused)
        for place, each in zip(places, found, strict=True):
            builder.store(each, place, align=8)
        return builder.bitcast(kept, ir.IntType(_WORD))

    arguments = bits, types.intp, types.uint32, types.uint32, types.uint32, lanes
    return types.uint64(*arguments), build


def _compressed(builder: Any, values: Any, word: Any, start: int) -> tuple[Any, Any]:
    """Return a row's elements that bits of a word from `start` on mark, moved together, and how many they are.

    The instruction is AVX-512's, with a register as its target: the form that writes to memory itself is slow on some
    processors.
    """
    row, long, size = values.type, ir.IntType(64), values.type.count
    flags = ir.VectorType(ir.IntType(1), size)
    compress = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(row, [row, row, flags]),
        f"llvm.x86.avx512.mask.compress.v{size}i{row.element.width}",
    )
    marked, some = word, builder.ctpop(word)
    if size < _WORD:
        marked = builder.trunc(builder.lshr(word, ir.Constant(long, start)), ir.IntType(size))
        some = builder.zext(builder.ctpop(marked), long)
    unset = ir.Constant(row, ir.Undefined)
    return builder.call(compress, [values, unset, builder.bitcast(marked, flags)]), some


def _move(builder: Any, source: Any, start: Any, word: Any, target: Any, at: Any) -> list[Any]:
    """Move the elements of source[start:] that a word marks to target[at:], and some others after them.

    Returns where those of each row went, and the place after the last marked one.
    """
    row, long = ir.VectorType(ir.IntType(32), _LINE), ir.IntType(64)
    places = [at]
    for j in range(0, _WORD, _LINE):
        here = builder.add(start, ir.Constant(long, j))
        values = builder.load(_place(builder, source, here, row), align=4)
        moved, some = _compressed(builder, values, word, j)
        builder.store(moved, _place(builder, target, places[-1], row), align=4)
        places.append(builder.add(places[-1], some))
    return places


@_intrinsic
def _compress(_: Any, bits: Any, start: Any, word: Any, target: Any, at: Any) -> Any:
    """Move the elements of bits[start:] that a word marks to target[at:], and some others after them.

    Returns the place after the last marked one.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, start, word, target, at = arguments
        source, goal = (
            cgutils.create_struct_proxy(kind)(context, builder, array).data
            for kind, array in ((signature.args[0], bits), (signature.args[3], target))
        )
        return _move(builder, source, start, word, goal, at)[-1]

    arguments = bits, types.intp, types.uint64, target, types.intp
    return types.intp(*arguments), build


def _compress_places(most: int) -> Callable[..., None]:
    """Return what moves the elements of bits[start:] that a word marks, up to `most`, to values[at:].

    Of each, offset + its place goes to indices[at:]. Some others follow, but none beyond the room of a whole word.
    """

    def places(
        _: Any, bits: Any, start: Any, word: Any, offset: Any, indices: Any, values: Any, at: Any
    ) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            bits, start, word, offset, indices, values, at = arguments
            long, width = ir.IntType(64), signature.args[4].dtype.bitwidth
            size = _LINE * 32 // width
            row = ir.VectorType(ir.IntType(width), size)
            source, goal, target = (
                cgutils.create_struct_proxy(signature.args[i])(context, builder, array).data
                for i, array in ((0, bits), (4, indices), (5, values))
            )
            begin = builder.add(offset, start)
            if width < 64:
                begin = builder.trunc(begin, row.element)
            first = _everywhere(builder, begin, size)
            # of bytes one instruction moves the places of all, and those of few take few stores
            each, stored = (_WORD, most) if _COMPRESSES_BYTES else (_LINE, _LINE)
            kind = ir.VectorType(ir.IntType(8 * _WORD // each), each)
            goes_to = _move(builder, source, start, word, target, at)
            for j in range(0, _WORD, each):
                moved, _ = _compressed(builder, ir.Constant(kind, [*range(j, j + each)]), word, j)
                for i in range(0, stored, size):
                    wide = _part(builder, moved, i, size)
                    if kind.element.width < width:
                        wide = builder.zext(wide, row)
                    place = builder.add(goes_to[j // _LINE], ir.Constant(long, i))
                    place = _place(builder, goal, place, row)
                    builder.store(builder.add(wide, first), place, align=width // 8)
            return context.get_dummy_value()

        arguments = bits, types.intp, types.uint64, types.intp, indices, values, types.intp
        return types.none(*arguments), build

    return _intrinsic(places)


@_intrinsic
def _ones(_: Any, word: Any) -> Any:
    """Return the number of bits that are set."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), build


@_intrinsic
def _lowest(_: Any, word: Any) -> Any:
    """Return the place of the lowest bit that is set in a word; 64 if none is."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@_intrinsic
def _fetch(_: Any, x: Any, at: Any) -> Any:
    """Ask for the memory of the elements of a cache line, which may be beyond the end: it need not be there."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, at = arguments
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, x)
        place = builder.bitcast(builder.gep(array.data, [at]), ir.IntType(8).as_pointer())
        read, keep, data = (ir.Constant(ir.IntType(32), n) for n in (0, 3, 1))
        kinds = [place.type, read.type, keep.type, data.type]
        fetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [place.type], ir.FunctionType(ir.VoidType(), kinds)
        )
        builder.call(fetch, [place, read, keep, data])
        return context.get_dummy_value()

    return types.none(x, types.intp), build


@_compiled(inline="always")
def _fetch_ahead(x: NDArray[Any], start: int, size: int) -> None:
    """Ask for as many elements, of 4 bytes, as a loop is about to read, a little further on.

    A processor foresees reads up to the next page; loops that do much with an element then wait at each. Those that
    only add or compare are no slower without, and on some processors faster.
    """
    for i in range(start + _AHEAD, start + _AHEAD + size, _LINE):
        _fetch(x, i)


@_compiled(inline="always")
def _sums(x: NDArray[np.float32]) -> tuple[float, float]:
    total = 0.0
    squares = 0.0
    for i in range(x.size):
        a = np.float64(abs(x[i]))
        total += a
        squares += a * a
    return total, squares


@_compiled(inline="always")
def _sums_above(x: NDArray[np.float32], below: np.float32) -> tuple[float, float, int]:
    """Sum over |x| > below. For |x| ≥ a threshold, `below` is the next smaller float; 0 sums all that is not zero."""
    total = 0.0
    squares = 0.0
    count = np.int32(0)
    for i in range(x.size):
        magnitude = abs(x[i])
        kept = magnitude > below
        a = np.float64(magnitude if kept else np.float32(0))
        total += a
        squares += a * a
        count = np.int32(count + np.int32(kept))
    return total, squares, count


@_compiled(nogil=True)
def _extremes(bits: NDArray[np.int32]) -> tuple[np.int32, np.int32]:
    """Return the largest magnitude's bits and the number of zeros."""
    largest = np.int32(0)
    zeros = np.int32(0)
    for i in range(bits.size):
        b = np.int32(bits[i] & _MASK)
        largest = b if b > largest else largest
        zeros = np.int32(zeros + np.int32(b == 0))
    return largest, zeros


@_compiled(inline="always")
def _sum_log(x: NDArray[np.float32]) -> float:
    """Sum ln|x| of at most 4,092 finite non-zero elements: exponents add up, mantissas multiply, one logarithm for all.

    Products of four float32 stay within float64's normal range, so that only every fourth is taken apart.
    """
    exponents = np.int64(0)
    product = 1.0
    n = x.size // 4
    for i in range(n):
        four = np.float64((np.float64(x[i]) * x[n + i]) * (np.float64(x[2 * n + i]) * x[3 * n + i]))
        u = four.view(np.uint64)
        exponents += np.int64((u >> np.uint64(52)) & np.uint64(0x7FF)) - 1023
        mantissa = np.uint64((u & np.uint64(0xFFFFFFFFFFFFF)) | np.uint64(0x3FF0000000000000))
        product *= mantissa.view(np.float64)
    total = np.log(product) + exponents * _LN2
    for i in range(4 * n, x.size):
        total += np.log(abs(np.float64(x[i])))
    return total


@_compiled(inline="always")
def _mantissa(bits: np.int32) -> np.float32:
    """Return a float of these bits without its sign and exponent, from 1 to below 2."""
    return np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F800000)).view(np.float32)


@_compiled(nogil=True)
def block_sum(x: NDArray[np.float32], low: np.int32) -> tuple[int, float]:
    """Return (count, Σ|x|) over magnitudes whose bits are from `low` on, added up in float32, and at last in float64.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    low : int32
        Bits of the least magnitude that is summed, at least 1.

    Returns
    -------
    (int, float)
        The sum is not finite where some element is not, or a sum of 1,024 leaves float32's range.
    """
    bits = x.view(np.int32)
    count = 0
    total = 0.0
    whole = bits.size - bits.size % _WORD
    for start in range(0, whole, _SUMMED):
        n, s = _sum_from(bits, start, min(start + _SUMMED, whole), np.uint32(_MASK), low)
        count += n
        total += s
    for i in range(whole, bits.size):
        b = np.int32(bits[i] & _MASK)
        if b >= low:
            count += 1
            total += np.float64(b.view(np.float32))
    return count, total


@_compiled(nogil=True, fastmath=_FAST, error_model="numpy")
def block_sum_log(x: NDArray[np.float32]) -> tuple[int, float, float]:
    """Return (count, Σ|x|, Σln|x|) over the non-zero elements, added up in float32, and at last in float64.

    Exponents add up as whole numbers. Mantissas multiply, sixteen in float32, which rounds a logarithm by at most
    6·10⁻⁸, and the products in float64.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.

    Returns
    -------
    (int, float, float)
        Σln|x| is NaN where an element is not finite or is denormal; the other sum is that of :func:`block_sum`.
    """
    count = 0
    total = 0.0
    logs = 0.0
    for start in range(0, x.size, PART):
        part = x[start : start + PART].view(np.int32)
        top = np.int32(0)
        none = np.int32(0)
        tiny = np.int32(0)
        exponents = np.int32(0)
        for begin in range(0, part.size, _PIECE):
            _fetch_ahead(x, start + begin, _PIECE)
            piece = part[begin : begin + _PIECE]
            s = np.float32(0)
            for i in range(piece.size):
                b = np.int32(piece[i] & _MASK)
                top = b if b > top else top
                none = np.int32(none + np.int32(b == 0))
                tiny = np.int32(tiny + np.int32(b < _NORMAL))
                exponents = np.int32(exponents + (b >> np.int32(_MANTISSA)))
                s = np.float32(s + b.view(np.float32))
            total += np.float64(s)
        if top >= _INFINITY or tiny > none:
            logs = np.nan
        rows = part.size // _FACTORS
        product = 1.0
        for i in range(rows):
            several = np.float32(1)
            for j in range(_FACTORS):
                several = np.float32(several * _mantissa(part[j * rows + i]))
            factors = np.float32(several).view(np.int32)
            exponents = np.int32(exponents + (factors >> np.int32(_MANTISSA)) - _ONE)
            product *= np.float64(_mantissa(factors))
        for i in range(rows * _FACTORS, part.size):
            product *= np.float64(_mantissa(part[i]))
        n = part.size - none
        logs += np.log(product) + _LN2 * (np.float64(exponents) - np.float64(_ONE) * n)
        count += n
    return count, total, logs


@_compiled(nogil=True)
def block_tail(x: NDArray[np.float32], low: np.int32) -> tuple[int, float, float]:
    """Return (count, Σ|x|, Σx²) over magnitudes whose bits are from `low` to below those of infinity.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    low : int32
        Bits of the least magnitude that is summed, at least 1.
    """
    if low >= _INFINITY:
        return 0, 0.0, 0.0
    bits = x.view(np.int32)
    least, width, mask = np.uint32(low), np.uint32(_INFINITY - 1 - low), np.uint32(_MASK)
    count = 0
    total = 0.0
    squares = 0.0
    lanes = np.empty((2, 2 * _LANES))
    for start in range(0, x.size, PART):
        stop = min(start + PART, x.size)
        whole = stop - (stop - start) % _WORD
        lanes[:] = 0.0
        for i in range(start, whole, _WORD):
            _fetch_ahead(bits, i, _WORD)
            count += np.int64(_ones(_add_within(bits, i, mask, least, width, lanes)))
        for i in range(whole, stop):
            if low <= bits[i] & _MASK < _INFINITY:
                a = np.float64(abs(x[i]))
                lanes[0, 0] += a
                lanes[1, 0] += a * a
                count += 1
        for i in range(2 * _LANES):
            total += lanes[0, i]
            squares += lanes[1, i]
    return count, total, squares


@_compiled(nogil=True)
def block_count(x: NDArray[np.float32], low: np.int32) -> int:
    """Count the magnitudes whose bits are from `low` to below those of infinity.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    low : int32
        Bits of the least magnitude that is counted, at least 1.
    """
    if low >= _INFINITY:
        return 0
    bits = x.view(np.uint32)
    least, width, mask = np.uint32(low), np.uint32(_INFINITY - 1 - low), np.uint32(_MASK)
    count = 0
    for start in range(0, x.size, _SUMMED):
        part = bits[start : start + _SUMMED]
        n = np.int32(0)
        for i in range(part.size):
            n = np.int32(n + np.int32(np.uint32((part[i] & mask) - least) <= width))
        count += n
    return count


@_compiled(nogil=True, fastmath=_FAST, error_model="numpy")
def block_moments(
    x: NDArray[np.float32], above: np.float32, log: bool
) -> tuple[int, int, int, float, float, float, np.float32]:
    """Return (count, zeros, nonfinite, Σ|x|, Σx², Σln|x|, max) over finite non-zero |x| ≥ above.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    above : float32
        Least magnitude that is summed.
    log : bool
        Sum the logarithms too; otherwise their sum is 0.
    """
    count = 0
    zeros = 0
    nonfinite = 0
    total = 0.0
    squares = 0.0
    logs = 0.0
    largest = np.float32(0)
    kept = np.empty(PART, np.float32)
    for start in range(0, x.size, PART):
        part = x[start : start + PART]
        top, none = np.int32(0), np.int32(0)
        for begin in range(0, part.size, _PIECE):
            _fetch_ahead(x, start + begin, _PIECE)
            peak, empty = _extremes(part[begin : begin + _PIECE].view(np.int32))
            top = max(top, peak)
            none += empty
        zeros += none
        if top >= _INFINITY or (log and (none > 0 or above > 0)):
            # copy what counts: something is not finite (rare), or the logarithms must not meet zeros
            n = 0
            for i in range(part.size):
                a = abs(part[i])
                if not a < np.inf:
                    nonfinite += 1
                elif a > 0 and a >= above:
                    kept[n] = a
                    n += 1
            part = kept[:n]
            top, none = _extremes(part.view(np.int32))
            if n == 0:
                continue
        if above > 0:
            s, q, c = _sums_above(part, np.nextafter(above, np.float32(0)))
            count += c
            if c > 0:
                largest = max(largest, _magnitude(top))
        else:
            s, q = _sums(part)
            count += part.size - none
            largest = max(largest, _magnitude(top))
        total += s
        squares += q
        if log:
            logs += _sum_log(part)
    return count, zeros, nonfinite, total, squares, logs, largest


@_compiled(nogil=True, fastmath=_FAST, error_model="numpy")
def block_signed(x: NDArray[np.float32]) -> tuple[int, float, float]:
    """Return (count, Σx, Σx²) over the finite elements.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    """
    count = 0
    total = 0.0
    squares = 0.0
    for start in range(0, x.size, _PIECE):
        part = x[start : start + _PIECE]
        s = 0.0
        q = 0.0
        for i in range(part.size):
            a = np.float64(part[i])
            s += a
            q += a * a
        n = part.size
        if not q < np.inf:
            s = 0.0
            q = 0.0
            n = 0
            for i in range(part.size):
                a = np.float64(part[i])
                if abs(a) < np.inf:
                    s += a
                    q += a * a
                    n += 1
        count += n
        total += s
        squares += q
    return count, total, squares


@_compiled(nogil=True, fastmath=_FAST, error_model="numpy")
def block_signs(
    x: NDArray[np.float32], words: NDArray[np.uint64], zeros: NDArray[np.uint64]
) -> tuple[bool, float]:
    """Pack x > 0 and x = 0 as bits, the first lowest; return (whether there are zeros, Σ|x|).

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    words : ndarray of uint64, shape (⌈n/64⌉,)
        Where the signs go.
    zeros : ndarray of uint64, shape (⌈n/64⌉,)
        Where the zeros are marked.
    """
    bits = x.view(np.int32)
    nothing, one, width = np.uint32(0), np.uint32(1), np.uint32(_INFINITY - 1)
    magnitude, signed = np.uint32(_MASK), np.uint32(0xFFFFFFFF)
    found = False
    total = 0.0
    for start in range(0, x.size, PART):
        part = bits[start : start + PART]
        least = np.int32(_MASK)
        s = 0.0
        for i in range(part.size):
            b = np.int32(part[i] & _MASK)
            least = b if b < least else least
            s += np.float64(b.view(np.float32))
        total += s
        stop = start + part.size
        whole = stop - part.size % _WORD
        for i in range(start, whole, _WORD):
            words[i // _WORD] = _within(bits, i, signed, one, width)
        if least == 0:
            found = True
            for i in range(start, whole, _WORD):
                zeros[i // _WORD] = _within(bits, i, magnitude, nothing, nothing)
        else:
            zeros[start // _WORD : whole // _WORD] = 0
        if whole < stop:
            last = none = np.uint64(0)
            for j in range(whole, stop):
                last |= np.uint64(0 < bits[j] <= _INFINITY) << np.uint64(j - whole)
                none |= np.uint64(bits[j] & _MASK == 0) << np.uint64(j - whole)
            words[whole // _WORD] = last
            zeros[whole // _WORD] = none
    return found, total


@_compiled(nogil=True)
def block_spread_signs(
    packed: NDArray[np.uint8],
    scale: np.float32,
    x: NDArray[np.float32],
    spread: NDArray[np.float32],
) -> None:
    """Make every bit a number of one size, and take it off from an element, in one pass.

    Parameters
    ----------
    packed : ndarray of uint8, shape (⌈n/8⌉,)
        Bits, eight a byte, the first lowest: 1 for +, 0 for −.
    scale : float32
        Size of the numbers.
    x : ndarray of float32, shape (n,)
        Overwritten: what is left.
    spread : ndarray of float32, shape (n,)
        Written: the numbers.
    """
    size = np.int32(np.float32(scale).view(np.int32))
    for start in range(0, x.size, PART):
        part = spread[start : start + PART]
        bits, given = part.view(np.int32), packed[start // 8 :]
        for i in range(part.size // 8):
            minus = ~np.uint32(given[i])
            for j in range(8):
                sign = np.int32(((minus >> np.uint32(j)) & np.uint32(1)) << np.uint32(31))
                bits[8 * i + j] = size ^ sign
        for i in range(part.size - part.size % 8, part.size):
            minus = ~np.uint32(given[i // 8])
            sign = np.int32(((minus >> np.uint32(i % 8)) & np.uint32(1)) << np.uint32(31))
            bits[i] = size ^ sign
        left = x[start : start + PART]
        for i in range(part.size):
            left[i] -= part[i]


@_compiled(nogil=True)
def _magnitude(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)


@_compiled(inline="always")
def _random(state: np.uint64) -> np.uint64:
    """Return the 64 random bits that splitmix64 has for a state."""
    z = (state ^ (state >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return z ^ (z >> np.uint64(31))


@_compiled(inline="always")
def _uniform(state: np.uint64) -> float:
    """Return the number in [0, 1) that splitmix64 has for a state."""
    return np.float64(_random(state) >> np.uint64(11)) * 2.0**-53


@_compiled(nogil=True, fastmath=_FAST, error_model="numpy")
def block_norm(x: NDArray[np.float32], largest: NDArray[np.float32]) -> float:
    """Return Σx², added up in float32 in each part of a block, and find the largest magnitude of it.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    largest : ndarray of float32, shape (⌈n/2048⌉,)
        Written: the largest magnitude of every 2,048 elements; NaN if one of them is NaN.
    """
    bits = x.view(np.int32)
    squares = 0.0
    for start in range(0, x.size, PART):
        part = bits[start : start + PART]
        top = np.int32(0)
        s = np.float32(0)
        for i in range(part.size):
            b = np.int32(part[i] & _MASK)
            top = b if b > top else top
            a = b.view(np.float32)
            s = np.float32(s + a * a)
        most = np.int32(top).view(np.float32)
        largest[start // PART] = most
        if _SQUARED < most < 1 / _SQUARED:
            squares += np.float64(s)
        else:
            for i in range(part.size):
                a = np.float64(np.int32(part[i] & _MASK).view(np.float32))
                squares += a * a
    return squares


@_compiled(nogil=True, error_model="numpy")
def block_stochastic_signs(
    x: NDArray[np.float32],
    norm: float,
    largest: NDArray[np.float32],
    seed: np.uint64,
    words: NDArray[np.uint64],
) -> None:
    """Throw random signs of expectation x/norm.

    All are fair coins first. Then each is replaced by the sign of its element with the probability |x|/norm. Few are:
    where they are is drawn element by skipped element, with the largest probability of some, and taken back where an
    element's is smaller.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Finite elements.
    norm : float
        Their norm, finite, and 0 if they all are.
    largest : ndarray of float32, shape (⌈n/2048⌉,)
        What :func:`block_norm` found.
    seed : uint64
        Seed of the random numbers.
    words : ndarray of uint64, shape (⌈n/64⌉,)
        Written: the signs, 1 for +, the first lowest, and zeros after the last.
    """
    state = np.uint64(seed)
    for i in range(words.size):
        state += _GOLDEN
        words[i] = _random(state)
    if x.size % _WORD:
        words[-1] &= (np.uint64(1) << np.uint64(x.size % _WORD)) - np.uint64(1)
    skips = np.empty(largest.size)
    for part in range(largest.size):
        skips[part] = 1 / np.log1p(-min(np.float64(largest[part]) / norm, 1.0))
    places, bars = np.empty(_DRAWN, np.int64), np.empty(_DRAWN)
    n = 0
    for part in range(largest.size):
        top = np.float64(largest[part])
        if top == 0:
            continue
        at = np.float64(part * PART - 1)
        stop = np.float64(min((part + 1) * PART, x.size))
        while True:
            state += _GOLDEN
            at += 1 + np.floor(np.log(1 - _uniform(state)) * skips[part])
            if not at < stop:
                break
            state += _GOLDEN
            places[n] = np.int64(at)
            _fetch(x, places[n])
            bars[n] = _uniform(state) * top
            n += 1
            if n == _DRAWN:
                _replace_coins(x, places, bars, n, words)
                n = 0
    _replace_coins(x, places, bars, n, words)


@_compiled(inline="always")
def _replace_coins(
    x: NDArray[np.float32],
    places: NDArray[np.int64],
    bars: NDArray[np.float64],
    n: int,
    words: NDArray[np.uint64],
) -> None:
    """Put the signs of those drawn elements whose magnitude exceeds their bar; without a branch, for no guess helps."""
    for i in range(n):
        place = np.uint64(places[i])
        value = np.float64(x[place])
        at, bit = place // np.uint64(_WORD), place % np.uint64(_WORD)
        coin = words[at]
        signed = (coin & ~(np.uint64(1) << bit)) | (np.uint64(value > 0) << bit)
        words[at] = signed if bars[i] < abs(value) else coin


@_compiled(inline="always")
def _put(
    x: NDArray[np.float32],
    start: int,
    word: np.uint64,
    some: int,
    offset: int,
    indices: NDArray[np.int64],
    values: NDArray[np.float32],
    n: np.uint64,
) -> np.uint64:
    """Write out the first elements that a word marks, and return the others.

    There may be fewer, and the next ones overwrite the rest: a wrong guess whether to go on costs more.
    """
    for i in range(some):
        at = np.uint64(start) + (_lowest(word) & np.uint64(_WORD - 1))
        indices[n + np.uint64(i)] = np.int64(np.uint64(offset) + at)
        values[n + np.uint64(i)] = x[at]
        word &= word - np.uint64(1)
    return word


@_compiled(inline="always")
def _put_all(
    bits: NDArray[np.int32],
    start: int,
    word: np.uint64,
    offset: int,
    indices: NDArray[np.int64],
    values: NDArray[np.float32],
    n: int,
) -> None:
    """Write out all elements that a word marks, as what :func:`_compress_places` returns does."""
    into = values.view(np.int32)
    at = np.uint64(n)
    end = at + _ones(word)
    while at < end:
        word = _put(bits, start, word, 2 * _SOME, offset, indices, into, at)
        at += np.uint64(2 * _SOME)


_put_many = _compress_places(_WORD) if COMPRESSES else _put_all
_put_more = _compress_places(_MORE) if COMPRESSES else _put_all


@_compiled(nogil=True)
def block_select(
    x: NDArray[np.float32],
    low: np.int32,
    offset: int,
    indices: NDArray[np.int64],
    values: NDArray[np.float32],
    found: int,
) -> int:
    """Append the elements whose magnitude bits are between `low` and those of infinity; return the new count.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    low : int32
        Bits of the least magnitude selected.
    offset : int
        Position of the block's first element in the gradient.
    indices : ndarray of int64
        Written: positions in the gradient. It needs room for a whole block beyond `found`.
    values : ndarray of float32
        Written: values, with the same room.
    found : int
        Elements already there.
    """
    bits = x.view(np.int32)
    n = np.uint64(found)
    whole = bits.size - bits.size % _WORD
    # one unsigned comparison: below `low` wraps around, NaN is beyond infinity
    mask, least, width = np.uint32(_MASK), np.uint32(low), np.uint32(_INFINITY - low)
    few, more = np.uint64(_SOME), np.uint64(_MORE)
    for part in range(0, whole, PART):
        before = n
        for start in range(part, min(part + PART, whole), _WORD):
            _fetch_ahead(bits, start, _WORD)
            word = _within(bits, start, mask, least, width)
            left = _ones(word)
            if left > few:
                if left > more:
                    _put_many(bits, start, word, offset, indices, values, np.int64(n))
                else:
                    _put_more(bits, start, word, offset, indices, values, np.int64(n))
            elif left > np.uint64(0):
                _put(x, start, word, _SOME, offset, indices, values, n)
            n += left
        # where many are selected, the next words are not asked how many they have: to write all costs less than wrong
        # guesses
        selected = n - before
        few = np.uint64(0 if selected > np.uint64(PART // 16) else _SOME)
        more = np.uint64(0 if selected > np.uint64(3 * PART // 16) else _MORE)
    for j in range(whole, bits.size):
        if np.uint32((bits[j] & _MASK) - low) <= width:
            indices[n] = offset + j
            values[n] = x[j]
            n += np.uint64(1)
    return np.int64(n)


@_compiled(nogil=True)
def block_peaks(x: NDArray[np.float32], peaks: NDArray[np.int32]) -> None:
    """Find the largest magnitude in each of some groups, which every so many elements are taken from in turn.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block; a last incomplete round is left out.
    peaks : ndarray of int32, shape (groups,)
        Written: the bits of the largest, where groups ≤ n.
    """
    bits = x.view(np.int32)
    for j in range(peaks.size):
        peaks[j] = bits[j] & _MASK
    for start in range(peaks.size, bits.size - peaks.size + 1, peaks.size):
        part = bits[start : start + peaks.size]
        for j in range(part.size):
            b = np.int32(part[j] & _MASK)
            peaks[j] = b if b > peaks[j] else peaks[j]


@_compiled(nogil=True)
def block_under(
    values: NDArray[np.float32], high: np.int32, found: NDArray[np.int32]
) -> tuple[int, int]:
    """Collect the magnitudes below a bound; return how many finite ones are not, and how many were collected.

    Parameters
    ----------
    values : ndarray of float32, shape (n,)
        Values; infinite ones are left out.
    high : int32
        Bits of the bound, at most those of infinity.
    found : ndarray of int32, shape (n,)
        Written: the bits of the magnitudes.
    """
    bits = values.view(np.int32)
    n = np.uint64(0)
    infinite = np.int64(0)
    for i in range(bits.size):
        b = np.int32(bits[i] & _MASK)
        found[n] = b
        n += np.uint64(b < high)
        infinite += np.int64(b >= _INFINITY)
    return bits.size - np.int64(n) - infinite, np.int64(n)


@_compiled(nogil=True)
def keep_at_least(
    indices: NDArray[np.int64], values: NDArray[np.float32], threshold: np.float32
) -> int:
    """Move the elements with |value| ≥ threshold to the front, in order, and return how many there are.

    Parameters
    ----------
    indices : ndarray of int64, shape (n,)
        Overwritten: positions.
    values : ndarray of float32, shape (n,)
        Overwritten: values.
    threshold : float32
        Least magnitude kept.
    """
    n = np.uint64(0)
    for i in range(values.size):
        v = values[i]
        indices[n] = indices[i]
        values[n] = v
        n += np.uint64(abs(v) >= threshold)
    return np.int64(n)


@_compiled(nogil=True)
def block_histogram(bits: NDArray[np.uint32], shift: int, counts: NDArray[np.uint32]) -> None:
    """Count a block's elements by their leading magnitude bits.

    Parameters
    ----------
    bits : ndarray of uint32, shape (n,)
        Block, as bits.
    shift : int
        Trailing bits that do not tell bins apart.
    counts : ndarray of uint32 or uint64
        Added to: one counter per bin.
    """
    # two elements are read at once; an unsigned index needs no test for Python's negative ones
    pairs = bits[: bits.size // 2 * 2].view(np.uint64)
    low, high = np.uint64(shift), np.uint64(32 + shift)
    mask = (np.uint64(1) << np.uint64(31 - shift)) - np.uint64(1)
    whole = pairs.size - pairs.size % _PAIRS
    for start in range(0, whole, _PAIRS):
        _fetch_ahead(bits, 2 * start, 2 * _PAIRS)
        for i in range(_PAIRS):
            pair = pairs[start + i]
            counts[(pair >> low) & mask] += np.uint32(1)
            counts[(pair >> high) & mask] += np.uint32(1)
    for i in range(whole, pairs.size):
        pair = pairs[i]
        counts[(pair >> low) & mask] += np.uint32(1)
        counts[(pair >> high) & mask] += np.uint32(1)
    if bits.size % 2:
        counts[(np.uint64(bits[-1]) >> low) & mask] += np.uint32(1)


@_compiled(nogil=True)
def _count_into(
    bits: NDArray[np.uint32],
    mask: np.uint32,
    shift: int,
    first: np.uint32,
    counts: NDArray[np.uint32],
    top: np.uint32,
) -> np.uint32:
    """Count magnitudes by their leading bits, from the bin `first` on, and overwrite them by their bins.

    Counters from `top` on are set to 0 when needed; returns where those begin that were not.
    """
    most = np.uint32(0)
    for i in range(bits.size):
        here = ((bits[i] & mask) >> np.uint32(shift)) - first
        most = here if here > most else most
        bits[i] = here
    while bits.size and top <= most:
        counts[top] = 0
        top += np.uint32(1)
    for i in range(bits.size):
        counts[bits[i]] += np.uint32(1)
    return top


@_compiled(nogil=True)
def block_tail_histogram(
    bits: NDArray[np.uint32], low: int, shift: int, counts: NDArray[np.uint32]
) -> int:
    """Count a block's finite magnitudes from a bin on by their leading bits, where the processor :data:`COMPRESSES`.

    Of a gradient most are below; they are left out 64 at a time, for counting takes longer than comparing.

    Parameters
    ----------
    bits : ndarray of uint32, shape (n,)
        Block, as bits.
    low : int
        Least bits of the first bin, from 1 on; a multiple of 2^shift but for the lowest bin.
    shift : int
        Trailing bits that do not tell bins apart.
    counts : ndarray of uint32
        Written: one counter per bin, from that of `low` on. Those after the last that is not 0 are left as they are.

    Returns
    -------
    int
        Number of bins up to that one.
    """
    if low >= _INFINITY:
        return 0
    mask, least, width = np.uint32(_MASK), np.uint32(low), np.uint32(_INFINITY - 1 - low)
    first = np.uint32(low) >> np.uint32(shift)
    kept = np.empty(_SUMMED + _WORD, np.uint32)
    n = 0
    top = np.uint32(0)
    whole = bits.size - bits.size % _WORD
    for start in range(0, whole, _WORD):
        _fetch_ahead(bits, start, _WORD)
        n = _compress(bits, start, _within(bits, start, mask, least, width), kept, n)
        if n > _SUMMED - _WORD:
            top = _count_into(kept[:n], mask, shift, first, counts, top)
            n = 0
    for i in range(whole, bits.size):
        kept[n] = bits[i]
        n += np.int64((bits[i] & mask) - least <= width)
    return np.int64(_count_into(kept[:n], mask, shift, first, counts, top))


@_compiled(nogil=True)
def _counts_of_all(bits: NDArray[np.uint32], first: int, shift: int) -> NDArray[np.uint32]:
    """Return the counts of a block's bins from one on, to the last that is not empty."""
    counts = np.zeros(1 << (31 - shift), np.uint32)
    block_histogram(bits, shift, counts)
    for i in range(bits.size if first == 0 else 0):
        counts[0] -= np.uint32(bits[i] & np.uint32(_MASK) == 0)  # zeros are no magnitudes
    last = np.int64(_INFINITY) >> shift
    while last > first and counts[last - 1] == 0:
        last -= 1
    return counts[first:last]


@_compiled(nogil=True)
def _counts_of_tail(bits: NDArray[np.uint32], first: int, shift: int) -> NDArray[np.uint32]:
    """Return the same, where the processor :data:`COMPRESSES`."""
    counts = np.empty((np.int64(_INFINITY) >> shift) - first, np.uint32)
    return counts[: block_tail_histogram(bits, max(first << shift, 1), shift, counts)]


block_counts = _counts_of_tail if COMPRESSES else _counts_of_all


@_compiled(nogil=True)
def block_bfloat16(bits: NDArray[np.uint32], rounded: NDArray[np.uint16]) -> None:
    """Round to bfloat16, nearest even; NaN stays NaN, and what is finite stays finite.

    Parameters
    ----------
    bits : ndarray of uint32, shape (n,)
        Block, as bits.
    rounded : ndarray of uint16, shape (n,)
        Written: the bits of the rounded elements.
    """
    infinity = np.uint32(_INFINITY)
    for i in range(bits.size):
        b = bits[i]
        magnitude = b & np.uint32(_MASK)
        up = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1)))
        # above 3.39e38 nearest is infinity, which would say of a finite gradient that it is not
        reached = magnitude < infinity and (up & np.uint32(0x7F800000)) == infinity
        up = np.uint32(up - (np.uint32(reached) << np.uint32(16)))
        rounded[i] = np.uint16(0x7FC0) if magnitude > infinity else np.uint16(up >> np.uint32(16))


_ROW = 1 << 12
"""Elements that lie in the first-level cache between the two passes over them."""


@_compiled(nogil=True)
def round_to_bfloat16(x: NDArray[np.float32], rounded: NDArray[np.uint16]) -> None:
    """Round to bfloat16, nearest even, and leave what rounding took off.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block; afterwards less what it was rounded to.
    rounded : ndarray of uint16, shape (n,)
        Written: the bits of the rounded elements. NaN stays NaN; what is too large, or infinite, becomes the largest
        number.
    """
    infinity, bits = np.uint32(_INFINITY), x.view(np.uint32)
    # in an array of its own, or the compiler could not tell that the second pass does not change what the first reads
    back = np.empty(_ROW, np.float32)
    back_bits = back.view(np.uint32)
    for start in range(0, x.size, _ROW):
        row, given, sent = (
            bits[start : start + _ROW],
            x[start : start + _ROW],
            rounded[start : start + _ROW],
        )
        for i in range(row.size):
            b = row[i]
            magnitude = b & np.uint32(_MASK)
            up = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1)))
            reached = magnitude <= infinity and (up & np.uint32(0x7F800000)) == infinity
            up = np.uint32(up - (np.uint32(reached) << np.uint32(16)))
            up = np.uint32(0x7FC00000) if magnitude > infinity else up & np.uint32(0xFFFF0000)
            back_bits[i] = up
            sent[i] = np.uint16(up >> np.uint32(16))
        for i in range(given.size):
            given[i] -= back[i]


@_compiled(nogil=True, error_model="numpy")
def mean_of_bfloat16(
    sums: NDArray[np.uint16], ranks: np.float32, mean: NDArray[np.float32]
) -> None:
    """Divide sums in bfloat16 by the number of summands, in float32.

    Parameters
    ----------
    sums : ndarray of uint16, shape (n,)
        Bits of the sums.
    ranks : float32
        Number of summands.
    mean : ndarray of float32, shape (n,)
        Written.
    """
    back = np.empty(_ROW, np.float32)
    back_bits = back.view(np.uint32)
    for start in range(0, sums.size, _ROW):
        row, out = sums[start : start + _ROW], mean[start : start + _ROW]
        for i in range(row.size):
            back_bits[i] = np.uint32(row[i]) << np.uint32(16)
        for i in range(out.size):
            out[i] = back[i] / ranks


@_compiled(nogil=True)
def moments_of_parts(
    x: NDArray[np.float32], parts: NDArray[np.int64], sums: NDArray[np.float64]
) -> None:
    """Reduce several parts by :func:`block_moments`, each by itself.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Elements.
    parts : ndarray of int64, shape (some, 2)
        Where each part begins and ends.
    sums : ndarray of float64, shape (some, 7)
        Written: count, zeros, nonfinite, Σ|x|, Σx², Σln|x| and max of each.
    """
    for i in range(len(parts)):
        part, row = x[parts[i, 0] : parts[i, 1]], sums[i]
        row[0], row[1], row[2], row[3], row[4], row[5], row[6] = block_moments(
            part, np.float32(0), True
        )


@_compiled(nogil=True)
def histograms_of_parts(
    bits: NDArray[np.uint32],
    parts: NDArray[np.int64],
    sums: NDArray[np.float64],
    first: int,
    shift: int,
    bins: int,
    counts: NDArray[np.uint32],
    used: NDArray[np.bool_],
) -> None:
    """Count the elements of several parts by their leading magnitude bits, each part by itself.

    Parameters
    ----------
    bits : ndarray of uint32, shape (n,)
        Elements, as bits.
    parts : ndarray of int64, shape (some, 2)
        Where each part begins and ends.
    sums : ndarray of float64, shape (some, 7)
        What :func:`moments_of_parts` found: zeros are not counted, and bins are looked at from that of the largest
        down to that of the last element.
    first : int
        Number of the first of them.
    shift : int
        Trailing bits that do not tell bins apart.
    bins : int
        Number of bins, from the lowest on, that are wanted.
    counts : ndarray of uint32, shape (chunks, parts, size)
        Written: the bins of every part, `size` of them in a chunk. A chunk that is not `used` is left as it was.
    used : ndarray of bool, shape (chunks,)
        Written: which chunks have a count of any part, now or before.
    """
    chunks, _, size = counts.shape
    row = np.zeros(chunks * size, np.uint32)
    for i in range(len(parts)):
        block_histogram(bits[parts[i, 0] : parts[i, 1]], shift, row)
        row[0] -= np.uint32(sums[i, 1])  # they share it with the smallest denormals
        row[bins:] = 0
        left = np.int64(sums[i, 0])
        chunk = (np.int64(np.float32(sums[i, 6]).view(np.int32)) >> shift) // size
        while left > 0 and chunk >= 0:
            here = row[chunk * size : (chunk + 1) * size]
            some = np.uint32(0)
            for j in range(size):
                some += here[j]
            if some > 0:
                if not used[chunk]:
                    counts[chunk] = 0
                    used[chunk] = True
                counts[chunk, first + i] = here
                here[:] = 0
            left -= np.int64(some)
            chunk -= 1


@_compiled(nogil=True)
def descend(counts: NDArray[np.int64], k: float) -> tuple[int, int]:
    """Go down from the last bin until more than k elements are reached; return the bin and that number.

    Parameters
    ----------
    counts : ndarray of uint32, uint64 or int64, shape (bins,)
        Elements per bin.
    k : float
        Number of elements to exceed.

    Returns
    -------
    (int, int)
        Bin, or −1 if there are no more than k elements, and elements in it and above it.
    """
    above = np.int64(0)
    for i in range(counts.size - 1, -1, -1):
        above += np.int64(counts[i])
        if above > k:
            return i, above
    return -1, above


@_compiled(nogil=True)
def tail_sums(
    weight: NDArray[np.float64], middle: NDArray[np.float64], sums: NDArray[np.float64]
) -> None:
    """Add up cells from the last to the first.

    Parameters
    ----------
    weight : ndarray of float64, shape (cells,)
        Number of magnitudes in each cell.
    middle : ndarray of float64, shape (cells,)
        Their magnitude.
    sums : ndarray of float64, shape (cells + 1, 4)
        Written, but for the last row: number, sum and sum of squares from each cell on, and the number in it.
    """
    count, total, squares = 0.0, 0.0, 0.0
    for i in range(weight.size - 1, -1, -1):
        w, x = weight[i], middle[i]
        count += w
        total += w * x
        squares += w * (x * x)
        sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3] = count, total, squares, w


@_intrinsic
def _store_past_caches(_: Any, target: Any, at: Any, values: Any) -> Any:
    """Write the elements of a cache line, target[at:], from values[at:] and not through the caches.

    The first must lie where a cache line begins. Other threads see it after :func:`_fence`.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, at, values = arguments
        row = ir.VectorType(ir.FloatType(), _LINE)
        to, source = (
            builder.bitcast(
                builder.gep(cgutils.create_struct_proxy(kind)(context, builder, array).data, [at]),
                row.as_pointer(),
            )
            for kind, array in ((signature.args[0], target), (signature.args[2], values))
        )
        store = builder.store(builder.load(source, align=4), to, align=4 * _LINE)
        once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.none(target, types.intp, values), build


@_intrinsic
def _fence(_: Any) -> Any:
    """Wait until what was written can be read by others."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), build


@_compiled(nogil=True)
def copy_past_caches(
    target: NDArray[np.float32], x: NDArray[np.float32], factor: np.float32
) -> None:
    """Copy a vector without reading what it overwrites: less time than a copy takes, where no cache could keep it.

    Where it is multiplied, it is written as any other vector.

    Parameters
    ----------
    target : ndarray of float32, shape (n,)
        Written, and not kept in any cache.
    x : ndarray of float32, shape (n,)
        The vector.
    factor : float32
        What the elements are multiplied by.
    """
    n = target.size
    first = min(n, -(target.ctypes.data // target.itemsize) % _LINE) if factor == 1 else n
    last = n - (n - first) % _LINE
    for i in range(first):
        target[i] = x[i] * factor
    for start in range(first, last, _LINE):
        _store_past_caches(target, start, x)
    for i in range(last, n):
        target[i] = x[i] * factor
    _fence()


def warm_up() -> None:
    """Compile every kernel, or load it from the cache: for arrays that may be written, and for those that may not."""
    writable = np.ones(2 * _WORD + 1, np.float32)
    read_only = writable.copy()
    read_only.flags.writeable = False
    indices, values = np.empty(writable.size, np.int64), np.empty_like(writable)
    counts, words, zeros = np.zeros(1 << 15, np.uint32), *np.empty((2, 3), np.uint64)
    for x in (writable, read_only):
        for log in (False, True):
            block_moments(x, np.float32(0), log)
        block_signed(x)
        block_tail(x, np.int32(1))
        block_count(x, np.int32(1))
        block_sum(x, np.int32(1))
        block_sum_log(x)
        block_signs(x, words, zeros)
        block_norm(x, values[:1])
        block_stochastic_signs(x, 2.0, values[:1], np.uint64(1), words)
        block_select(x, np.int32(1), 0, indices, values, 0)
        block_histogram(x.view(np.uint32), 16, counts)
        block_counts(x.view(np.uint32), 1, 16)
        block_bfloat16(x.view(np.uint32), np.empty(x.size, np.uint16))
        parts, used = np.zeros((1, 2), np.int64), np.zeros(8, np.bool_)
        found = np.zeros((8, 1, 1 << 12), np.uint32)
        sums = np.empty((1, 7))
        moments_of_parts(x, parts, sums)
        histograms_of_parts(x.view(np.uint32), parts, sums, 0, 16, 1 << 15, found, used)
        block_peaks(x, np.empty(x.size, np.int32))
    block_spread_signs(np.zeros(values.size, np.uint8), np.float32(1), writable, values)
    keep_at_least(indices, values, np.float32(1))
    block_under(values, _INFINITY, np.empty(values.size, np.int32))
    descend(counts, 0.5)
    descend(counts.astype(np.int64), 0.5)
    tail_sums(np.ones(1), np.ones(1), np.zeros((2, 4)))
    round_to_bfloat16(values, np.empty(values.size, np.uint16))
    mean_of_bfloat16(np.zeros(values.size, np.uint16), np.float32(1), values)
    copy_past_caches(values, writable, np.float32(1))
