"""What loops say to LLVM directly: 64 elements tested together, with a bit each of a word, and caches passed by.

Magnitudes are compared through their bits: the bits of non-negative floats are in the order of the values, zero has no
bit set, and everything above the bits of infinity is NaN. No setting of the floating-point unit (such as flushing
denormals) can change that.

This is the only file that knows llvmlite. An intrinsic returns what it is typed as and a function that builds its code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, imputils
from numba.extending import intrinsic
from numpy.typing import NDArray

from gradstats.primitives.loops.compiled import inner

__all__ = [
    "INFINITY",
    "LANES",
    "LINE",
    "MASK",
    "PART",
    "PIECE",
    "SUMMED",
    "WORD",
    "add_within",
    "compress",
    "compress_places",
    "fence",
    "fetch",
    "fetch_ahead",
    "lowest",
    "ones",
    "pair",
    "store_past_caches",
    "sum_from",
    "view",
    "within",
]

MASK = np.int32(0x7FFFFFFF)
"""Bits of a magnitude."""
INFINITY = np.int32(0x7F800000)
PART = 2048
"""Elements per part of a block: 8 kB, which stay in the first-level cache between the loops over it."""
WORD = 64
"""Elements tested together, with a bit each of a 64-bit word."""
LINE, _AHEAD = 16, 2048
"""Elements of a cache line, and how far ahead of a loop memory is asked for."""
PIECE = 256
"""Elements that a loop reads between asking for memory, where the compiler must not be disturbed inside it."""
SUMMED = 1024
"""Elements that are added up in float32, in as many sums as the processor's vectors have places for."""
LANES = 8
"""Numbers of float64 that are added together."""

_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic


def _row(context: Any, builder: Any, kind: Any, bits: Any, start: Any, mask: Any) -> Any:
    """Return bits[start:] & mask, as the vector of a word."""
    vector = ir.VectorType(ir.IntType(32), WORD)
    array = cgutils.create_struct_proxy(kind)(context, builder, bits)
    place = _place(builder, array.data, start, vector)
    # a slice may begin at any element, so only their own alignment holds
    return builder.and_(builder.load(place, align=4), _everywhere(builder, mask))


def _place(builder: Any, data: Any, at: Any, row: Any) -> Any:
    """Return the address of a row of elements from `at` on."""
    return builder.bitcast(builder.gep(data, [at]), row.as_pointer())


def _everywhere(builder: Any, scalar: Any, size: int = WORD) -> Any:
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
    # one comparison for both ends: below `low` the difference wraps around
    return masked, builder.icmp_unsigned("<=", builder.sub(masked, low), width)


@_intrinsic
def view(_: Any, x: Any, dtype: Any) -> Any:
    """Return an array as one of numbers of another type and the same size, as ``x.view(dtype)`` does.

    Numba compiles its own anew for each pair of types, which takes a fifth of a second.
    """
    if x.dtype.bitwidth != dtype.dtype.bitwidth:
        raise TypeError("only numbers of the same size can be viewed")
    kind = x.copy(dtype=dtype.dtype)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0])
        other = cgutils.create_struct_proxy(kind)(context, builder)
        for name in ("meminfo", "parent", "nitems", "itemsize", "shape", "strides"):
            setattr(other, name, getattr(array, name))
        other.data = builder.bitcast(array.data, other.data.type)
        # counts the new array's own reference to the memory
        return imputils.impl_ret_borrowed(context, builder, kind, other._getvalue())

    return kind(x, dtype), build


@_intrinsic
def pair(_: Any, bits: Any, at: Any) -> Any:
    """Return two neighbours of 32 bits as the number of 64 bits that they are in memory.

    A view of the array as such numbers would be two functions more to compile, which take half a second.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0])
        place = _place(builder, array.data, arguments[1], ir.IntType(2 * bits.dtype.bitwidth))
        # a slice may begin at any element, so only their own alignment holds
        return builder.load(place, align=4)

    return types.uint64(bits, types.intp), build


@_intrinsic
def within(_: Any, bits: Any, start: Any, mask: Any, low: Any, width: Any) -> Any:
    """Return a word whose bit j tells whether (bits[start + j] & mask) − low, unsigned, is at most `width`.

    A vector comparison, of which a processor has the bits in one instruction; from Python's loops a compiler does not
    find it. Element 0 is the lowest bit on any machine that stores the lowest byte first.
    """
    if bits.layout != "C":
        raise TypeError("only neighbouring elements can be compared together")

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, marks = _compared(context, builder, signature, arguments)
        return builder.bitcast(marks, ir.IntType(WORD))

    return types.uint64(bits, types.intp, types.uint32, types.uint32, types.uint32), build


def _part(builder: Any, vector: Any, start: int, size: int) -> Any:
    """Return some elements of a vector."""
    places = ir.Constant(ir.VectorType(ir.IntType(32), size), [*range(start, start + size)])
    return builder.shuffle_vector(vector, vector, places)


@_intrinsic
def sum_from(_: Any, bits: Any, start: Any, stop: Any, mask: Any, low: Any) -> Any:
    """Return how many of bits[start:stop] & mask, of whole words, are from `low` on, signed, and their sum as floats.

    Places of a word have sums of their own, which are halved in the end: the order is part of the code, whatever the
    compiler does around it. A loop's own would depend on its caller.
    """
    if bits.layout != "C":
        raise TypeError("only neighbouring elements can be added together")

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, start, stop, mask, low = arguments
        many = ir.VectorType(ir.IntType(32), WORD)
        row = ir.VectorType(ir.FloatType(), WORD)
        number = cgutils.alloca_once_value(builder, ir.Constant(many, [0] * WORD))
        total = cgutils.alloca_once_value(builder, ir.Constant(row, [0.0] * WORD))
        builder.store(ir.Constant(many, [0] * WORD), number)  # where it is allocated runs once
        builder.store(ir.Constant(row, [0.0] * WORD), total)
        step = ir.Constant(start.type, WORD)
        with cgutils.for_range_slice(builder, start, stop, step, start.type) as (at, _):
            masked = _row(context, builder, signature.args[0], bits, at, mask)
            marks = builder.icmp_signed(">=", masked, _everywhere(builder, low))
            sums = builder.load(total)
            # no fastmath flags: the order of additions stays as it is written
            added = builder.fadd(sums, builder.bitcast(masked, row))
            builder.store(builder.select(marks, added, sums), total)
            builder.store(builder.add(builder.load(number), builder.zext(marks, many)), number)
        n, s = builder.load(number), builder.load(total)
        half = WORD // 2
        while half:
            n = builder.add(_part(builder, n, 0, half), _part(builder, n, half, half))
            s = builder.fadd(_part(builder, s, 0, half), _part(builder, s, half, half))
            half //= 2
        first = ir.Constant(ir.IntType(32), 0)
        n = builder.zext(builder.extract_element(n, first), start.type)
        s = builder.fpext(builder.extract_element(s, first), ir.DoubleType())
        return context.make_tuple(builder, signature.return_type, [n, s])

    kind = types.Tuple((types.intp, types.float64))
    return kind(bits, types.intp, types.intp, types.uint32, types.int32), build


@_intrinsic
def add_within(_: Any, bits: Any, start: Any, mask: Any, low: Any, width: Any, lanes: Any) -> Any:
    """Add the floats that :func:`within` marks, and their squares, to two rows of lanes; return its word.

    Written out, because what a compiler makes of a loop that counts and sums under a condition is slower.
    """
    if bits.layout != "C" or lanes.layout != "C":
        raise TypeError("only neighbouring elements can be added together")

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        masked, marks = _compared(context, builder, signature, arguments)
        zeros = ir.Constant(masked.type, [0] * WORD)
        # zeros add nothing, and what is left out may be NaN
        some = builder.select(marks, masked, zeros)
        some = builder.bitcast(some, ir.VectorType(ir.FloatType(), WORD))
        row = ir.VectorType(ir.DoubleType(), LANES)
        array = cgutils.create_struct_proxy(signature.args[5])(context, builder, arguments[5])
        places = [
            builder.bitcast(
                builder.gep(array.data, [ir.Constant(ir.IntType(64), i)]), row.as_pointer()
            )
            # of two rows, two vectors each: sums first, then sums of squares
            for i in range(0, 4 * LANES, LANES)
        ]
        sums = [builder.load(place, align=8) for place in places]
        for j in range(0, WORD, LANES):
            x = builder.fpext(_part(builder, some, j, LANES), row)
            turn = j // LANES % 2  # two sums of each in turn, as an addition waits for the last one
            fused = {"flags": ("contract",)}
            sums[turn] = builder.fadd(sums[turn], x)
            sums[2 + turn] = builder.fadd(sums[2 + turn], builder.fmul(x, x, **fused), **fused)
        for place, each in zip(places, sums, strict=True):
            builder.store(each, place, align=8)
        return builder.bitcast(marks, ir.IntType(WORD))

    arguments = bits, types.intp, types.uint32, types.uint32, types.uint32, lanes
    return types.uint64(*arguments), build


def _compressed(builder: Any, values: Any, word: Any, start: int) -> tuple[Any, Any]:
    """Return a row's elements that bits of a word from `start` on mark, moved together, and how many they are.

    The instruction is AVX-512's, with a register as its target: the form that writes to memory itself is slow on some
    processors.
    """
    row, long = values.type, ir.IntType(64)
    flags = ir.VectorType(ir.IntType(1), LINE)
    move = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(row, [row, row, flags]),
        f"llvm.x86.avx512.mask.compress.v{LINE}i32",
    )
    marked = builder.trunc(builder.lshr(word, ir.Constant(long, start)), ir.IntType(LINE))
    # what lies behind the marked elements is overwritten or never read
    unset = ir.Constant(row, ir.Undefined)
    moved = builder.call(move, [values, unset, builder.bitcast(marked, flags)])
    return moved, builder.zext(builder.ctpop(marked), long)


def _move(builder: Any, source: Any, start: Any, word: Any, target: Any, at: Any) -> list[Any]:
    """Move the elements of source[start:] that a word marks to target[at:], and some others after them.

    Returns where those of each row went, and the place after the last marked one.
    """
    row, long = ir.VectorType(ir.IntType(32), LINE), ir.IntType(64)
    places = [at]
    for j in range(0, WORD, LINE):
        here = builder.add(start, ir.Constant(long, j))
        values = builder.load(_place(builder, source, here, row), align=4)
        moved, some = _compressed(builder, values, word, j)
        # a whole row, of which the next one overwrites what is not marked
        builder.store(moved, _place(builder, target, places[-1], row), align=4)
        places.append(builder.add(places[-1], some))
    return places


@_intrinsic
def compress(_: Any, bits: Any, start: Any, word: Any, target: Any, at: Any) -> Any:
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


@_intrinsic
def compress_places(
    _: Any, bits: Any, start: Any, word: Any, offset: Any, indices: Any, values: Any, at: Any
) -> Any:
    """Move the elements of bits[start:] that a word marks to values[at:], and their positions to indices[at:].

    A position is `offset` + the place. Some others follow, but none beyond the room of a whole word.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, start, word, offset, indices, values, at = arguments
        long, width = ir.IntType(64), signature.args[4].dtype.bitwidth
        size = LINE * 32 // width
        row = ir.VectorType(ir.IntType(width), size)
        source, goal, target = (
            cgutils.create_struct_proxy(signature.args[i])(context, builder, array).data
            for i, array in ((0, bits), (4, indices), (5, values))
        )
        begin = builder.add(offset, start)
        if width < 64:
            # positions that a caller keeps in 32 bits
            begin = builder.trunc(begin, row.element)
        first = _everywhere(builder, begin, size)
        kind = ir.VectorType(ir.IntType(32), LINE)
        goes_to = _move(builder, source, start, word, target, at)
        for j in range(0, WORD, LINE):
            moved, _ = _compressed(builder, ir.Constant(kind, [*range(j, j + LINE)]), word, j)
            for i in range(0, LINE, size):
                wide = _part(builder, moved, i, size)
                if width > 32:
                    wide = builder.zext(wide, row)
                place = builder.add(goes_to[j // LINE], ir.Constant(long, i))
                place = _place(builder, goal, place, row)
                builder.store(builder.add(wide, first), place, align=width // 8)
        return context.get_dummy_value()

    arguments = bits, types.intp, types.uint64, types.intp, indices, values, types.intp
    return types.none(*arguments), build


@_intrinsic
def ones(_: Any, word: Any) -> Any:
    """Return the number of bits that are set."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), build


@_intrinsic
def lowest(_: Any, word: Any) -> Any:
    """Return the place of the lowest bit that is set in a word; 64 if none is."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # 0: defined for a word of zeros, too
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@_intrinsic
def fetch(_: Any, x: Any, at: Any) -> Any:
    """Ask for the memory of the elements of a cache line, which may be beyond the end: it need not be there."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, at = arguments
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, x)
        place = builder.bitcast(builder.gep(array.data, [at]), ir.IntType(8).as_pointer())
        # for reading, in all caches, and data rather than instructions
        read, keep, data = (ir.Constant(ir.IntType(32), n) for n in (0, 3, 1))
        kinds = [place.type, read.type, keep.type, data.type]
        fetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [place.type], ir.FunctionType(ir.VoidType(), kinds)
        )
        builder.call(fetch, [place, read, keep, data])
        return context.get_dummy_value()

    return types.none(x, types.intp), build


@inner()
def fetch_ahead(x: NDArray[Any], start: int, size: int) -> None:
    """Ask for as many elements, of 4 bytes, as a loop is about to read, a little further on.

    A processor foresees reads up to the next page; loops that do much with an element then wait at each. Those that
    only add or compare are no slower without, and on some processors faster.
    """
    for i in range(start + _AHEAD, start + _AHEAD + size, LINE):
        fetch(x, i)


@_intrinsic
def store_past_caches(_: Any, target: Any, at: Any, values: Any) -> Any:
    """Write the elements of a cache line, target[at:], from values[at:] and not through the caches.

    The first must lie where a cache line begins. Other threads see it after :func:`fence`.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, at, values = arguments
        row = ir.VectorType(ir.FloatType(), LINE)
        to, source = (
            builder.bitcast(
                builder.gep(cgutils.create_struct_proxy(kind)(context, builder, array).data, [at]),
                row.as_pointer(),
            )
            for kind, array in ((signature.args[0], target), (signature.args[2], values))
        )
        # LLVM is promised the alignment: such a store to another address is an error of the processor
        store = builder.store(builder.load(source, align=4), to, align=4 * LINE)
        once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.none(target, types.intp, values), build


@_intrinsic
def fence(_: Any) -> Any:
    """Wait until what was written can be read by others."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # weaker fences emit no instruction on x86, where stores past the caches need one
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), build
