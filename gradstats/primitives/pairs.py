"""Several vectors side by side: the products of all pairs, and what two have in common element by element.

Both are sums over elements, so those of a gradient are those of its layers added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives.arrays import Array, check, even_chunks, wide_dtype

__all__ = ["Pair", "gram", "pair", "sign_pairs"]

_SMALLEST = float(np.finfo(float).tiny / np.finfo(float).eps)
"""Sum of squares below which these have lost digits, or all."""


def gram(vectors: Sequence[Array]) -> NDArray[np.float64]:
    """Return the products of all pairs of vectors, from which every norm, angle, mean and fit follows.

    Parameters
    ----------
    vectors : sequence of array_like
        Vectors of equal length. Where any of them is not finite, the element counts in none.

    Returns
    -------
    ndarray of float64, shape (n, n)
        Σ xᵢyᵢ of each pair.

    Raises
    ------
    InputError
        If squares are beyond float64's range, or so small that they vanish.

    Examples
    --------
    >>> import numpy as np
    >>> gram([np.array([3.0, 4.0]), np.array([1.0, 0.0])]).tolist()
    [[25.0, 3.0], [3.0, 1.0]]
    """
    products = np.zeros((len(vectors), len(vectors)))
    # squares of float32 are far from the smallest numbers, so only others are looked at
    double = any(wide_dtype(v) == np.float64 for v in vectors)
    some = np.zeros(len(vectors), bool)
    for chunks in zip(*(even_chunks(check(v)) for v in vectors), strict=True):
        # products of two float32 are exact in float64
        rows = np.array([chunk for _, chunk in chunks], np.float64)
        # left out of all vectors: with other elements for each pair, products would not be those of vectors
        finite = np.isfinite(rows).all(axis=0)
        rows = rows if finite.all() else rows[:, finite]
        with np.errstate(over="ignore", invalid="ignore"):
            products += rows @ rows.T
        if double:
            some |= rows.any(axis=1)
    if not np.isfinite(products).all() or (some & (products.diagonal() < _SMALLEST)).any():
        raise InputError("squares of these magnitudes leave the range of numbers: rescale them")
    return products


@dataclass(frozen=True, slots=True)
class Pair:
    """Counts over the elements of two vectors, a and b; ``x + y`` are the counts over both parts together.

    Attributes
    ----------
    numel : int
        Elements of each vector.
    same : int
        Elements that are equal, NaN to NaN too.
    agree : int
        Elements of the same sign, neither of them zero.
    either : int
        Elements that are not zero in a or b.
    shared : int
        Elements that are equal and not zero.
    nonzero : (int, int)
        Elements of a and of b that are not zero.
    nonfinite : (int, int)
        Elements of a and of b that are NaN or infinite.
    fine : ((int, int), (int, int))
        Elements of a and of b that bfloat16, and that float16 with its range, would round.
    prints : (int, int)
        Fingerprints of the non-zero elements of a and of b in any order, modulo 2⁶⁴.
    fourth : (float, float)
        Σa⁴ and Σb⁴ of the finite elements; infinite where that leaves the range of float64.
    """

    numel: int
    same: int
    agree: int
    either: int
    shared: int
    nonzero: tuple[int, int]
    nonfinite: tuple[int, int]
    fine: tuple[tuple[int, int], tuple[int, int]]
    prints: tuple[int, int]
    fourth: tuple[float, float] = field(compare=False)  # depends on the order of the sum

    def __add__(self, other: Pair) -> Pair:
        (a, b), (c, d) = self.fine, other.fine
        return Pair(
            self.numel + other.numel,
            self.same + other.same,
            self.agree + other.agree,
            self.either + other.either,
            self.shared + other.shared,
            (self.nonzero[0] + other.nonzero[0], self.nonzero[1] + other.nonzero[1]),
            (self.nonfinite[0] + other.nonfinite[0], self.nonfinite[1] + other.nonfinite[1]),
            ((a[0] + c[0], a[1] + c[1]), (b[0] + d[0], b[1] + d[1])),
            # a sum, so that neither the order nor the division into parts matters
            tuple((p + q) % 2**64 for p, q in zip(self.prints, other.prints, strict=True)),  # type: ignore[arg-type]
            (self.fourth[0] + other.fourth[0], self.fourth[1] + other.fourth[1]),
        )


def sign_pairs(vectors: Sequence[Array]) -> tuple[int, int]:
    """Count, over all pairs of vectors and all elements, where both have the same sign.

    Parameters
    ----------
    vectors : sequence of array_like
        Vectors of equal length.

    Returns
    -------
    agree : int
        Pairs of elements of the same sign, neither of them zero.
    either : int
        Pairs of elements of which at least one is not zero.
    """
    n = len(vectors)
    agree = either = 0
    for chunks in zip(*(even_chunks(check(v)) for v in vectors), strict=True):
        positive = np.zeros(chunks[0][1].size, np.int64)
        negative = positive.copy()
        for _, chunk in chunks:
            positive += chunk > 0
            negative += chunk < 0
        zeros = n - positive - negative
        agree += int((positive * (positive - 1) + negative * (negative - 1)).sum()) // 2
        # all pairs but those of two zeros
        either += int((n * (n - 1) - zeros * (zeros - 1)).sum()) // 2
    return agree, either


_NOTHING = Pair(0, 0, 0, 0, 0, (0, 0), (0, 0), ((0, 0), (0, 0)), (0, 0), (0.0, 0.0))


def pair(a: Array, b: Array) -> Pair:
    """Count what two vectors have in common, element by element.

    Parameters
    ----------
    a, b : array_like, shape (d,)
        Vectors of equal length, NumPy or torch, any floating dtype.

    Returns
    -------
    Pair
        The counts.
    """
    a, b = check(a), check(b)
    both = zip(even_chunks(a), even_chunks(b), strict=True)
    # what float64 has beyond float32 cannot be equal: then both are compared as float32
    exact = wide_dtype(a) == wide_dtype(b)
    return reduce(add, (_pair(x, y, exact) for (_, x), (_, y) in both), _NOTHING)


def _pair(x: NDArray[np.floating], y: NDArray[np.floating], exact: bool) -> Pair:
    with np.errstate(over="ignore"):  # what float32 has no room for is infinite in the fingerprint
        narrow = x.astype(np.float32), y.astype(np.float32)
    a, b = (x, y) if exact else narrow
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    some = x != 0, y != 0
    nonzero = tuple(int(np.count_nonzero(s)) for s in some)
    return Pair(
        x.size,
        int(np.count_nonzero(equal)),
        int(np.count_nonzero(np.sign(x) * np.sign(y) > 0)),
        int(np.count_nonzero(some[0] | some[1])),
        int(np.count_nonzero(equal & (a != 0))),
        nonzero,  # type: ignore[arg-type]
        tuple(int(np.count_nonzero(~np.isfinite(v))) for v in (x, y)),  # type: ignore[arg-type]
        (_fine(narrow[0]), _fine(narrow[1])),
        # of the values that are compared: two float64 may differ beyond float32
        tuple(_print(v) for v in ((x, y) if exact else narrow)),  # type: ignore[arg-type]
        (_fourth(x), _fourth(y)),
    )


def _fourth(x: NDArray[np.floating]) -> float:
    with np.errstate(over="ignore"):
        # fourth powers of float32 overflow from 4·10⁹ on
        squares = np.square(x[np.isfinite(x)], dtype=np.float64)
        return float(squares @ squares)


def _fine(x: NDArray[np.float32]) -> tuple[int, int]:
    # bfloat16 is the upper half of a float32
    bits = x.view(np.uint32)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16).astype(np.float32)
    return int(np.count_nonzero(bits & 0xFFFF)), int(np.count_nonzero((half != x) & ~np.isnan(x)))


def _print(x: NDArray[np.floating]) -> int:
    """Return the sum of the mixed bits (splitmix64) of the non-zero elements."""
    # −0 is left out with the zeros
    bits = x[x != 0].view(f"u{x.itemsize}").astype(np.uint64)
    # products and the sum wrap around, modulo 2⁶⁴
    with np.errstate(over="ignore"):
        bits *= np.uint64(0x9E3779B97F4A7C15)
        bits ^= bits >> np.uint64(30)
        bits *= np.uint64(0xBF58476D1CE4E5B9)
        bits ^= bits >> np.uint64(27)
        bits *= np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        return int(bits.sum(dtype=np.uint64))
