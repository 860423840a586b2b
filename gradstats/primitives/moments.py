"""Sufficient statistics of |g|, or of its exceedances over a threshold, in one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives.arrays import (
    Array,
    Sums,
    as_compared,
    check,
    narrowed,
    numel_of,
    wide_dtype,
)
from gradstats.primitives.backend import device_code
from gradstats.primitives.blocks import map_blocks
from gradstats.primitives.ratio import check_magnitude

__all__ = [
    "SHORT",
    "Moments",
    "count_above",
    "exceedances",
    "least_bits",
    "moments",
    "rounded_sums",
    "signed_sums",
]

SHORT = 1 << 14
"""Elements below which sums are taken in float64: of fewer, rounding leaves more, and they cost little."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over the finite, non-zero elements with |g| ≥ `above`; ``a + b`` are the sums over both arrays together.

    Attributes
    ----------
    numel : int
        Elements of the array, d.
    count : int
        Number of elements summed.
    zeros : int
        Number of exact zeros in the whole array; −1 if it is not known.
    nonfinite : int
        Number of NaN and infinities in the whole array; −1 if it is not known.
    sum_abs : float
        Σ|g|, in the gradient's unit.
    sum_squares : float
        Σg².
    sum_log : float
        Σ ln|g|; NaN if it was not asked for.
    max : float
        Largest |g| summed, 0 if there is none; NaN if it is not known.
    above : float
        Threshold, in the gradient's unit.
    """

    numel: int
    count: int
    zeros: int
    nonfinite: int
    sum_abs: float
    sum_squares: float
    sum_log: float
    max: float
    above: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        """Return the sums over both arrays together."""
        if self.above != other.above:
            raise InputError(
                f"sums above {self.above} and {other.above} do not add; take both above one threshold"
            )
        # as exceedances() leaves them
        unknown = self.zeros < 0 or other.zeros < 0
        return Moments(
            self.numel + other.numel,
            self.count + other.count,
            -1 if unknown else self.zeros + other.zeros,
            -1 if unknown else self.nonfinite + other.nonfinite,
            self.sum_abs + other.sum_abs,
            self.sum_squares + other.sum_squares,
            self.sum_log + other.sum_log,
            # of two, max() returns the first if that is NaN
            other.max if math.isnan(other.max) else max(self.max, other.max),
            self.above,
        )

    @property
    def zero_fraction(self) -> float:
        """Share of exact zeros among the finite elements, π₀; 0 without finite elements, NaN if zeros are unknown."""
        if self.zeros < 0:
            return math.nan
        finite = self.numel - self.nonfinite
        return self.zeros / finite if finite else 0.0

    @property
    def mean(self) -> float:
        """Mean of |g| over the elements summed; NaN if there are none."""
        return self.sum_abs / self.count if self.count else float("nan")

    @property
    def variance(self) -> float:
        """Population variance of |g| over the elements summed; NaN if there are none."""
        return (
            # the difference of nearly equal numbers may round to below zero
            max(self.sum_squares / self.count - self.mean**2, 0.0) if self.count else float("nan")
        )

    @property
    def mean_log(self) -> float:
        """Mean of ln|g| over the elements summed; NaN if there are none or it was not asked for."""
        return self.sum_log / self.count if self.count else float("nan")


def moments(x: Array, above: float = 0.0, *, log: bool = True) -> Moments:
    """Reduce |x| to its sufficient statistics in one pass.

    Parameters
    ----------
    x : array_like
        Array of any shape and device, float16, float32, float64 or (torch) bfloat16.
    above : float
        Threshold, in the unit of `x`: only elements with |x| ≥ above are summed.
    log : bool
        Sum ln|x| too, which costs more than the rest together.

    Returns
    -------
    Moments
        Totals in float64, the same for a NumPy array and a tensor.

    Raises
    ------
    InputError
        If `x` is not a dense floating-point array, or `above` is negative or NaN.

    Examples
    --------
    >>> import numpy as np
    >>> m = moments(np.array([3.0, -1.0, 0.0, np.nan]))
    >>> m.count, m.zeros, m.nonfinite, m.sum_abs, m.max
    (2, 1, 1, 4.0, 3.0)
    """
    above = check_magnitude(above, "above")
    x = check(x)
    code = device_code(x)
    parts = (
        map_blocks(lambda _, block: _block(block, above, log), x)
        if code is None
        else [code.sums(x, as_compared(x, above), log).tolist()]
    )
    # in the order of the blocks, so that the number of threads does not change a bit
    count, zeros, nonfinite = (int(sum(part[i] for part in parts)) for i in range(3))
    sum_abs, sum_squares, sum_log = (sum(part[i] for part in parts) for i in range(3, 6))
    largest = max((part[6] for part in parts), default=0.0)
    return Moments(
        numel=numel_of(x),
        count=count,
        zeros=zeros,
        nonfinite=nonfinite,
        sum_abs=float(sum_abs),
        sum_squares=float(sum_squares),
        sum_log=sum_log if log else float("nan"),
        max=largest,
        above=above,
    )


def exceedances(x: Array, above: float) -> Moments:
    """Count the non-zero |x| ≥ above and sum |x| and x² over them, as a later stage of a threshold needs.

    These sums are those of :func:`moments`, in about half the time.

    Parameters
    ----------
    x : array_like
        Array of any shape and device, float16, float32, float64 or (torch) bfloat16.
    above : float
        Threshold, in the unit of `x`.

    Returns
    -------
    Moments
        With unknown fields: zeros and nonfinite are −1, max and sum_log NaN.

    Raises
    ------
    InputError
        If `x` is not a dense floating-point array, or `above` is negative or NaN.
    """
    x, above = check(x), check_magnitude(above, "above")
    code = device_code(x)
    if code is not None:
        return _tail(x, above, *code.tail(x, as_compared(x, above)))
    # loops are compiled for float32 alone
    if wide_dtype(x) != np.float32:
        m = moments(x, above, log=False)
        return replace(m, zeros=-1, nonfinite=-1, max=math.nan)
    low = least_bits(above)

    def tail(_: int, block: NDArray[Any]) -> tuple[int, float, float]:
        # imported where it runs, as loops bring Numba with them
        from gradstats.primitives.loops.sums import block_tail

        sums: tuple[int, float, float] = block_tail(block, low)
        return sums

    return _tail(x, above, *_added(map_blocks(tail, x)))


def rounded_sums(x: Array, above: float = 0.0, *, log: bool = False) -> Moments:
    """Count the non-zero |x| ≥ above and sum them, in the least time: what an exponential or a gamma model needs.

    Of 16,384 float32 elements and more, up to 1,024 at a time are added up in float32. A sum is within 6·10⁻⁵ of that
    of :func:`moments` in whatever order, a mean logarithm within 10⁻⁷; as errors have either sign, they are far smaller
    in practice, and tested to 10⁻⁷ and 10⁻⁸.

    Parameters
    ----------
    x : array_like
        Array of any shape and device, float16, float32, float64 or (torch) bfloat16.
    above : float
        Threshold, in the unit of `x`; with `log` only 0 takes the least time.
    log : bool
        Sum ln|x| too.

    Returns
    -------
    Moments
        With unknown fields: zeros and nonfinite are −1, max and the sum of squares NaN, and so is sum_log without
        `log`.

    Raises
    ------
    InputError
        If `x` is not a dense floating-point array, or `above` is negative or NaN.
    """
    x, above = check(x), check_magnitude(above, "above")
    # the loop for logarithms knows no threshold
    compiled = device_code(x) is None and wide_dtype(x) == np.float32 and not (log and above)
    if not compiled or numel_of(x) < SHORT:
        m = moments(x, above) if log else exceedances(x, above)
        return replace(m, zeros=-1, nonfinite=-1, sum_squares=math.nan, max=math.nan)
    low = least_bits(above)

    def sums(_: int, block: NDArray[Any]) -> tuple[int, float, float]:
        from gradstats.primitives.loops.sums import (
            block_moments,
            block_sum,
            block_sum_log,
            block_tail,
        )

        if log:
            count, total, logs = block_sum_log(block)
            # not where an element is not finite or is denormal, or a float32 sum overflowed: then again in float64
            if math.isfinite(total + logs):
                return count, total, logs
            m = block_moments(block, np.float32(0), True)
            return m[0], m[3], m[5]
        count, total = block_sum(block, low)
        if not math.isfinite(total):
            count, total, _ = block_tail(block, low)
        return count, total, math.nan

    count, total, logs = _added(map_blocks(sums, x))
    return Moments(numel_of(x), count, -1, -1, total, math.nan, logs, math.nan, above)


def count_above(x: Array, above: float) -> int:
    """Count the finite non-zero |x| ≥ above, as :func:`exceedances` does, without the sums.

    Parameters
    ----------
    x : array_like
        Array of any shape and device, float16, float32, float64 or (torch) bfloat16.
    above : float
        Threshold, in the unit of `x`.

    Returns
    -------
    int
        Their number.

    Raises
    ------
    InputError
        If `x` is not a dense floating-point array, or `above` is negative or NaN.
    """
    x, above = check(x), check_magnitude(above, "above")
    if device_code(x) is not None or wide_dtype(x) != np.float32:
        return exceedances(x, above).count
    low = least_bits(above)

    def count(_: int, block: NDArray[Any]) -> int:
        from gradstats.primitives.loops.counts import block_count

        return int(block_count(block, low))

    return sum(map_blocks(count, x))


def least_bits(above: float) -> np.int32:
    """Return the bits of the least non-zero float32 that reaches a threshold.

    Parameters
    ----------
    above : float
        Threshold.
    """
    # non-negative floats are ordered as their bits; 1 is the least denormal, which zeros do not reach
    return max(narrowed(above).view(np.int32), np.int32(1))


def _tail(x: Array, above: float, count: int, total: float, squares: float) -> Moments:
    return Moments(numel_of(x), count, -1, -1, total, squares, math.nan, math.nan, above)


def signed_sums(x: Array) -> tuple[int, float, float]:
    """Count the finite elements, and sum them and their squares.

    Parameters
    ----------
    x : array_like
        Checked array of any shape, floating dtype and device.

    Returns
    -------
    count : int
        Number of finite elements.
    total : float
        Σx.
    squares : float
        Σx².
    """
    code = device_code(x)
    if code is not None:
        return code.signed(x)
    return _added(map_blocks(_signed, x))


def _added(parts: list[tuple[int, float, float]]) -> tuple[int, float, float]:
    """Return the counts and the two sums of all blocks; zeros where there are none."""
    # an empty array has no blocks, and zip then no columns
    counts, totals, squares = zip(*parts or [(0, 0.0, 0.0)], strict=True)
    return sum(counts), float(sum(totals)), float(sum(squares))


def _signed(_: int, block: NDArray[Any]) -> tuple[int, float, float]:
    """Return (count, Σx, Σx²) over the finite elements of a block."""
    if block.dtype == np.float32:
        from gradstats.primitives.loops.sums import block_signed

        sums: tuple[int, float, float] = block_signed(block)
        return sums
    finite = block[np.isfinite(block)]
    # partial sums may become infinite with either sign, and NaN together
    with np.errstate(over="ignore", invalid="ignore"):
        return finite.size, float(finite.sum()), float(np.square(finite).sum())


def _block(block: NDArray[Any], above: float, log: bool) -> Sums:
    """Return (count, zeros, nonfinite, Σ|x|, Σx², Σln|x|, max) of one block."""
    if block.dtype == np.float32:
        from gradstats.primitives.loops.sums import block_moments

        return block_moments(block, narrowed(above), log)
    magnitude = np.abs(block)
    finite = magnitude[np.isfinite(magnitude)]
    terms = finite[(finite > 0) & (finite >= above)]
    with np.errstate(over="ignore"):  # sums beyond float64's range are infinite
        total, squares = float(terms.sum()), float(np.square(terms).sum())
    return (
        terms.size,
        finite.size - int(np.count_nonzero(finite)),
        magnitude.size - finite.size,
        total,
        squares,
        float(np.log(terms).sum()) if log else 0.0,
        float(terms.max(initial=0.0)),
    )
