"""Sums over the magnitudes of a block: of all, of those from a threshold on, of their squares and logarithms."""

# Size: a fifth of its lines are docstrings; the loops have steps in common, which LLVM writes into each.

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.loops.compiled import Written, compiled, inner
from gradstats.primitives.loops.words import (
    INFINITY,
    LANES,
    MASK,
    PART,
    PIECE,
    SUMMED,
    WORD,
    add_within,
    fetch_ahead,
    ones,
    sum_from,
    view,
)

__all__ = [
    "FAST",
    "block_moments",
    "block_norm",
    "block_signed",
    "block_sum",
    "block_sum_log",
    "block_tail",
    "moments_of_parts",
    "sums_of_repeats",
    "tail_sums",
]

_NORMAL, _MANTISSA, _ONE = np.int32(0x00800000), 23, np.int32(127)
"""Bits of the least normal number, bits of a mantissa, and the exponent of 1."""
_FACTORS = 16
"""Mantissas that are multiplied in float32: their product is below 2¹⁶."""
_SQUARED = 2.0**-50
"""Magnitude from which on, and up to its inverse, squares are added up in float32."""
_LEAST = 2.0**-149
"""The least magnitude that is not zero."""
_LN2 = 0.6931471805599453

# Sums may be reordered, which makes them vector instructions, but NaN and infinity keep their meaning, except to
# np.isfinite: it asks whether x − x is 0, which reordering answers without looking; compare with np.inf.
FAST = {"reassoc", "nsz", "contract"}


@inner(fastmath=FAST, error_model="numpy")
def _sums(x: NDArray[np.float32]) -> tuple[float, float]:
    total = 0.0
    squares = 0.0
    for i in range(x.size):
        a = np.float64(abs(x[i]))
        total += a
        squares += a * a
    return total, squares


@inner(fastmath=FAST, error_model="numpy")
def _sums_above(x: NDArray[np.float32], below: np.float32) -> tuple[float, float, int]:
    """Sum over |x| > below. For |x| ≥ a threshold, `below` is the next smaller float; 0 sums all that is not zero."""
    total = 0.0
    squares = 0.0
    count = np.int32(0)
    for i in range(x.size):
        magnitude = abs(x[i])
        is_above = magnitude > below
        a = np.float64(magnitude if is_above else np.float32(0))
        total += a
        squares += a * a
        count = np.int32(count + np.int32(is_above))
    return total, squares, count


@inner()
def _extremes(bits: NDArray[np.int32]) -> tuple[np.int32, np.int32]:
    """Return the largest magnitude's bits and the number of zeros."""
    largest = np.int32(0)
    zeros = np.int32(0)
    for i in range(bits.size):
        b = np.int32(bits[i] & MASK)
        largest = b if b > largest else largest
        # Numba adds int32 as int64, which halves what fits a vector
        zeros = np.int32(zeros + np.int32(b == 0))
    return largest, zeros


@inner()
def _magnitude(bits: np.int32) -> float:
    """Return the number of these bits, also where denormals are flushed."""
    if bits < _NORMAL:
        # a whole number of 2⁻¹⁴⁹
        return np.float64(bits) * _LEAST
    return np.float64(np.int32(bits).view(np.float32))


@inner()
def _denormals(bits: NDArray[np.int32]) -> np.int32:
    """Return the number of denormal magnitudes."""
    count = np.int32(0)
    for i in range(bits.size):
        b = np.int32(bits[i] & MASK)
        count = np.int32(count + np.int32(b < _NORMAL) - np.int32(b == 0))
    return count


@inner(fastmath=FAST, error_model="numpy")
def _sum_log(x: NDArray[np.float32]) -> float:
    """Sum ln|x| of at most 4,092 finite non-zero elements: exponents add up, mantissas multiply, one logarithm for all.

    Products of four float32 stay within float64's normal range, so that only every fourth is taken apart.
    """
    exponents = np.int64(0)
    product = 1.0
    n = x.size // 4
    # factors a quarter apart: neighbours lie in a vector as they are
    for i in range(n):
        four = np.float64((np.float64(x[i]) * x[n + i]) * (np.float64(x[2 * n + i]) * x[3 * n + i]))
        u = four.view(np.uint64)
        exponents += np.int64((u >> np.uint64(52)) & np.uint64(0x7FF)) - 1023
        # exponent 0, sign dropped: from 1 to below 2
        mantissa = np.uint64((u & np.uint64(0xFFFFFFFFFFFFF)) | np.uint64(0x3FF0000000000000))
        product *= mantissa.view(np.float64)
    total = np.log(product) + exponents * _LN2
    for i in range(4 * n, x.size):
        total += np.log(abs(np.float64(x[i])))
    return total


@inner()
def _mantissa(bits: np.int32) -> np.float32:
    """Return a float of these bits without its sign and exponent, from 1 to below 2."""
    return np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F800000)).view(np.float32)


def _sum(x: Any, low: Any) -> Any:
    reach = (x.view(np.int32) & MASK) >= low
    a, whole = np.where(reach, np.abs(x), np.float32(0)), x.size - x.size % WORD
    rows = [a[i : min(i + SUMMED, whole)].sum() for i in range(0, whole, SUMMED)]
    return np.count_nonzero(reach), np.append(np.float64(rows), a[whole:])


@compiled(_sum, within=6e-5, nogil=True)
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
    bits = view(x, np.int32)
    count = 0
    total = 0.0
    whole = bits.size - bits.size % WORD
    for start in range(0, whole, SUMMED):
        n, s = sum_from(bits, start, min(start + SUMMED, whole), np.uint32(MASK), low)
        count += n
        total += s
    for i in range(whole, bits.size):
        b = np.int32(bits[i] & MASK)
        if b >= low:
            count += 1
            total += np.float64(b.view(np.float32))
    return count, total


def _logs(x: Any) -> Any:
    a = np.abs(x)
    odd = (a > 0) & (a < np.finfo(np.float32).tiny) | ~(a < np.inf)
    rows = [a[i : i + PIECE].sum() for i in range(0, x.size, PIECE)]
    return (
        np.count_nonzero(a),
        np.float64(rows),
        np.nan if odd.any() else np.log(np.float64(a[a > 0])),
    )


@compiled(_logs, within=6e-5, nogil=True, fastmath=FAST, error_model="numpy")
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
        part = view(x[start : start + PART], np.int32)
        top = np.int32(0)
        none = np.int32(0)
        tiny = np.int32(0)
        exponents = np.int32(0)
        for begin in range(0, part.size, PIECE):
            fetch_ahead(x, start + begin, PIECE)
            piece = part[begin : begin + PIECE]
            s = np.float32(0)
            for i in range(piece.size):
                b = np.int32(piece[i] & MASK)
                top = b if b > top else top
                none = np.int32(none + np.int32(b == 0))
                tiny = np.int32(tiny + np.int32(b < _NORMAL))
                # biased; the bias is taken off at the end. Zeros have exponent 0 and mantissa 1 here, and add nothing
                exponents = np.int32(exponents + (b >> np.int32(_MANTISSA)))
                s = np.float32(s + b.view(np.float32))
            total += np.float64(s)
        # the exponent of a denormal is not in its bits
        if top >= INFINITY or tiny > none:
            logs = np.nan
        # factor j of all products lies together, so that products are places of a vector
        rows = part.size // _FACTORS
        product = 1.0
        for i in range(rows):
            several = np.float32(1)
            for j in range(_FACTORS):
                several = np.float32(several * _mantissa(part[j * rows + i]))
            factors = np.float32(several).view(np.int32)
            # so that the product in float64 takes a mantissa, below 2, of each
            exponents = np.int32(exponents + (factors >> np.int32(_MANTISSA)) - _ONE)
            product *= np.float64(_mantissa(factors))
        for i in range(rows * _FACTORS, part.size):
            product *= np.float64(_mantissa(part[i]))
        n = part.size - none
        logs += np.log(product) + _LN2 * (np.float64(exponents) - np.float64(_ONE) * n)
        count += n
    return count, total, logs


def _tail(x: Any, low: Any) -> Any:
    bits = x.view(np.int32) & MASK
    a = np.abs(x[(low <= bits) & (bits < INFINITY)]).astype(np.float64)
    return a.size, a, a**2


@compiled(_tail, within=1e-12, nogil=True)
def block_tail(x: NDArray[np.float32], low: np.int32) -> tuple[int, float, float]:
    """Return (count, Σ|x|, Σx²) over magnitudes whose bits are from `low` to below those of infinity.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    low : int32
        Bits of the least magnitude that is summed, at least 1.
    """
    # or `width` would wrap around
    if low >= INFINITY:
        return 0, 0.0, 0.0
    bits = view(x, np.int32)
    least, width, mask = np.uint32(low), np.uint32(INFINITY - 1 - low), np.uint32(MASK)
    count = 0
    total = 0.0
    squares = 0.0
    # sums of a part: the order of additions is the same on every processor
    lanes = np.empty((2, 2 * LANES))
    for start in range(0, x.size, PART):
        stop = min(start + PART, x.size)
        whole = stop - (stop - start) % WORD
        lanes[:] = 0.0
        for i in range(start, whole, WORD):
            fetch_ahead(bits, i, WORD)
            count += np.int64(ones(add_within(bits, i, mask, least, width, lanes)))
        for i in range(whole, stop):
            if low <= bits[i] & MASK < INFINITY:
                a = np.float64(abs(x[i]))
                lanes[0, 0] += a
                lanes[1, 0] += a * a
                count += 1
        for i in range(2 * LANES):
            total += lanes[0, i]
            squares += lanes[1, i]
    return count, total, squares


def _moments(x: Any, above: Any, log: Any) -> Any:
    finite = np.abs(x[np.isfinite(x)])
    a = finite[(finite > 0) & (finite >= above)].astype(np.float64)
    zeros, logs = finite.size - np.count_nonzero(finite), np.log(a) if log else 0.0
    return a.size, zeros, x.size - finite.size, a, a**2, logs, a.max(initial=0)


def _moments_of_parts(x: Any, parts: Any, above: Any, log: Any, sums: Any) -> None:
    for row, (start, stop) in zip(sums, parts, strict=True):
        row[:] = [np.sum(each) for each in _moments(x[start:stop], above, log)]


@compiled(_moments_of_parts, within=1e-9, nogil=True, fastmath=FAST, error_model="numpy")
def moments_of_parts(
    x: NDArray[np.float32],
    parts: NDArray[np.int64],
    above: np.float32,
    log: bool,
    sums: Written[np.float64],
) -> None:
    """Reduce several parts, each by itself, over finite non-zero |x| ≥ above.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Elements.
    parts : ndarray of int64, shape (some, 2)
        Where each part begins and ends.
    above : float32
        Least magnitude that is summed.
    log : bool
        Sum the logarithms too; otherwise their sum is 0.
    sums : ndarray of float64, shape (some, 7)
        Written: count, zeros, nonfinite, Σ|x|, Σx², Σln|x| and max of each.
    """
    terms = np.empty(PART, np.float32)
    low = max(np.float32(above).view(np.int32), np.int32(1))
    # the bits of a small whole number are a denormal's; one of a constant the compiler would compare itself
    flushes = not np.int32(len(parts)).view(np.float32) > np.float32(0)
    for row in range(len(parts)):
        block = x[parts[row, 0] : parts[row, 1]]
        count = 0
        zeros = 0
        nonfinite = 0
        total = 0.0
        squares = 0.0
        logs = 0.0
        largest = np.int32(0)
        for start in range(0, block.size, PART):
            part = block[start : start + PART]
            top, none = np.int32(0), np.int32(0)
            for begin in range(0, part.size, PIECE):
                fetch_ahead(block, start + begin, PIECE)
                peak, empty = _extremes(view(part[begin : begin + PIECE], np.int32))
                top = max(top, peak)
                none += empty
            zeros += none
            if (
                top >= INFINITY
                or (log and (none > 0 or above > 0))
                or (flushes and _denormals(view(part, np.int32)) > 0)
            ):
                # copy what counts: something is not finite (rare), or the logarithms must not meet zeros
                bits = view(part, np.int32)
                n = 0
                for i in range(part.size):
                    b = np.int32(bits[i] & MASK)
                    if b >= INFINITY:
                        nonfinite += 1
                    elif b >= low and flushes and b < _NORMAL:
                        tiny = _magnitude(b)
                        count += 1
                        total += tiny
                        squares += tiny * tiny
                        if log:
                            logs += np.log(tiny)
                        largest = max(largest, b)
                    elif b >= low:
                        terms[n] = b.view(np.float32)
                        n += 1
                part = terms[:n]
                top, none = _extremes(view(part, np.int32))
                if n == 0:
                    continue
            if above > 0:
                # more than the next smaller number, which is 0 for the least denormal: zeros never count
                s, q, c = _sums_above(part, np.nextafter(above, np.float32(0)))
                count += c
                # if any element reaches `above`, the largest does
                if c > 0:
                    largest = max(largest, top)
            else:
                s, q = _sums(part)
                count += part.size - none
                largest = max(largest, top)
            total += s
            squares += q
            if log:
                logs += _sum_log(part)
        sums[row, 0], sums[row, 1], sums[row, 2] = count, zeros, nonfinite
        sums[row, 3], sums[row, 4], sums[row, 5] = total, squares, logs
        sums[row, 6] = _magnitude(largest)


def block_moments(
    x: NDArray[np.float32], above: np.float32, log: bool
) -> tuple[int, int, int, float, float, float, float]:
    """Return what :func:`moments_of_parts` finds of a block in one part: one loop is compiled for both.

    Parameters
    ----------
    x, above, log : object
        The same.
    """
    sums = np.empty((1, 7))
    moments_of_parts(x, np.array([[0, x.size]]), above, log, sums)
    count, zeros, nonfinite, total, squares, logs, largest = sums[0].tolist()
    return int(count), int(zeros), int(nonfinite), total, squares, logs, largest


def _signed(x: Any) -> Any:
    finite = x[np.isfinite(x)].astype(np.float64)
    return finite.size, finite, finite**2


@compiled(_signed, within=1e-12, nogil=True, fastmath=FAST, error_model="numpy")
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
    for start in range(0, x.size, PIECE):
        part = x[start : start + PIECE]
        s = 0.0
        q = 0.0
        for i in range(part.size):
            a = np.float64(part[i])
            s += a
            q += a * a
        n = part.size
        # squares of float32 numbers do not overflow float64: some element is not finite
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


def _norm(x: Any, largest: Any) -> Any:
    largest[:] = [np.abs(x[i : i + PART]).max() for i in range(0, x.size, PART)]
    return x.astype(np.float64) ** 2


@compiled(_norm, within=5e-7, nogil=True, fastmath=FAST, error_model="numpy")
def block_norm(x: NDArray[np.float32], largest: Written[np.float32]) -> float:
    """Return Σx², added up in float32 in each part of a block, and find the largest magnitude of it.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    largest : ndarray of float32, shape (⌈n/2048⌉,)
        Written: the largest magnitude of every 2,048 elements; NaN if one of them is NaN.
    """
    bits = view(x, np.int32)
    squares = 0.0
    for start in range(0, x.size, PART):
        part = bits[start : start + PART]
        top = np.int32(0)
        s = np.float32(0)
        for i in range(part.size):
            b = np.int32(part[i] & MASK)
            # by bits, among which NaN is the largest
            top = b if b > top else top
            a = b.view(np.float32)
            s = np.float32(s + a * a)
        most = np.int32(top).view(np.float32)
        largest[start // PART] = most
        # else squares leave float32's range, or `most` is NaN: again in float64
        if _SQUARED < most < 1 / _SQUARED:
            squares += np.float64(s)
        else:
            for i in range(part.size):
                a = np.float64(np.int32(part[i] & MASK).view(np.float32))
                squares += a * a
    return squares


def _tail_sums(weight: Any, middle: Any, sums: Any) -> None:
    for column, terms in enumerate((weight, weight * middle, weight * (middle * middle))):
        sums[:-1, column] = terms[::-1].cumsum()[::-1]
    sums[:-1, 3] = weight


@compiled(_tail_sums, nogil=True)
def tail_sums(
    weight: NDArray[np.float64], middle: NDArray[np.float64], sums: Written[np.float64]
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


def _sums_of_repeats(x: Any, block: Any, counts: Any, before: Any, first: Any, sums: Any) -> None:
    ranked = np.diff(before)
    for row, times in zip(sums, counts, strict=True):
        drawn = np.repeat(x, times[block])[first : before.size - 1]
        here = ranked[first : first + drawn.size]
        row[:] = drawn.size, drawn.sum(), drawn @ drawn, drawn @ here


@compiled(_sums_of_repeats, within=1e-12, nogil=True)
def sums_of_repeats(
    x: NDArray[np.float64],
    block: NDArray[np.int64],
    counts: NDArray[np.int64],
    before: NDArray[np.float64],
    first: int,
    sums: Written[np.float64],
) -> None:
    """Add up sorted numbers that are repeated where they stand, and their products with what belongs to their ranks.

    Parameters
    ----------
    x : ndarray of float64, shape (n,)
        Numbers in order.
    block : ndarray of int64, shape (n,)
        Block of each.
    counts : ndarray of int64, shape (replicates, blocks)
        How often each block is repeated.
    before : ndarray of float64, shape (ranks + 1,)
        What belongs to ranks, added up: what stands at i is the sum over the first i.
    first : int
        Ranks that are left out at the beginning; those after `ranks` are, too.
    sums : ndarray of float64, shape (replicates, 4)
        Written: of each replicate the number of ranks, Σx, Σx² and Σx times what belongs to the rank.
    """
    last = before.size - 1
    for row in range(counts.shape[0]):
        placed, total, squares, products = 0, 0.0, 0.0, 0.0
        end, ranked = first, before[first]
        for i in range(x.size):
            placed += counts[row, block[i]]
            begin, below = end, ranked
            # not a branch: a third of the numbers are not drawn, and no processor foresees which
            end = min(max(placed, first), last)
            ranked = before[end]
            repeated = (end - begin) * x[i]
            total += repeated
            squares += repeated * x[i]
            products += x[i] * (ranked - below)
            if placed >= last:
                break
        sums[row, 0], sums[row, 1], sums[row, 2], sums[row, 3] = (
            end - first,
            total,
            squares,
            products,
        )
