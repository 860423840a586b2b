"""Is a gradient compressible? Power-law decay of its sorted magnitudes (SIDCo, definition 1).

A vector is compressible if its j-th largest magnitude is at most c₁ j^(−p) with p > ½. Any finite vector meets
that for some c₁, and a line through the whole log-log plot gives p = 0.65 even for uniform noise, so the
exponent is estimated over a stated window of the largest ranks, and controls stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import Array, kth_largest, select
from gradstats.primitives._array import check, flat_chunks, numel_of

__all__ = ["CONTROLS", "Compressibility", "compressibility", "control", "default_window"]

_Z95 = 1.959963984540054
_FEWEST = 10


@dataclass(frozen=True, slots=True)
class Compressibility:
    """Decay of the sorted magnitudes over a window of ranks.

    Attributes
    ----------
    p, p_low, p_high : exponent by the rank-½ regression (Gabaix and Ibragimov 2011) and its 95 % interval
        p(1 ± 1.96 √(2/n)), which allows for the dependence of order statistics; NaN with fewer than ten ranks.
    hill, hill_low, hill_high : Hill's estimate from the same largest ranks, interval p(1 ± 1.96/√n).
    c1 : smallest constant for which magnitude_j ≤ c₁ j^(−p) holds over the whole window.
    window : first and last rank, counted from 1.
    compressible : whether p > ½ with 97.5 % confidence on the window.
    """

    p: float
    p_low: float
    p_high: float
    hill: float
    hill_low: float
    hill_high: float
    c1: float
    window: tuple[int, int]
    compressible: bool


def default_window(numel: int) -> tuple[int, int]:
    """Return the ranks of the largest hundredth, (1, max(100, numel/100)), within the vector."""
    return 1, min(max(100, numel // 100), numel)


def compressibility(x: Array, window: tuple[int, int] | None = None) -> Compressibility:
    """Estimate the decay exponent of a gradient's sorted magnitudes.

    Parameters
    ----------
    x : array of any shape, NumPy or torch. Zeros have no rank; NaN and infinities are left out.
    window : first and last rank; :func:`default_window` if None. Cut to the non-zero elements.

    Raises
    ------
    InputError
        For a window that is not 1 ≤ first < last.

    Notes
    -----
    The bound of a light-tailed vector (uniform, normal, Laplace) is met with a tiny exponent: p is the tail
    index inverted, and falls with the window. An estimate is about its window, not about the vector.
    """
    x = check(x)
    numel = numel_of(x)
    first, last = default_window(numel) if window is None else window
    if window is not None and not 1 <= first < last:
        raise InputError(f"a window is two ranks, 1 ≤ first < last, not {first} and {last}")
    return _from_sorted(_largest(x, min(last, numel)), first)


def _largest(x: Array, count: int) -> NDArray[np.float64]:
    """Return the `count` largest finite magnitudes, descending; fewer if there are fewer non-zero ones."""
    if count < 1:
        return np.empty(0)
    values = select(x, kth_largest(x, count)).values
    magnitude = np.abs(np.concatenate([c for _, c in flat_chunks(values)] or [np.empty(0)]))
    magnitude = magnitude.astype(np.float64)
    magnitude = magnitude[np.isfinite(magnitude)]
    return np.sort(magnitude)[::-1][:count]


def _from_sorted(magnitudes: NDArray[np.float64], first: int) -> Compressibility:
    """Estimate from the largest magnitudes, descending from rank 1."""
    nan = float("nan")
    last = magnitudes.size
    n = last - first + 1
    if n < _FEWEST:
        return Compressibility(nan, nan, nan, nan, nan, nan, nan, (first, last), False)
    logs = np.log(magnitudes)
    ranks = np.arange(first, last + 1, dtype=np.float64)
    sizes = logs[first - 1 :] - logs[first - 1 :].mean()
    log_ranks = np.log(ranks - 0.5)
    covariance = -float(sizes @ (log_ranks - log_ranks.mean()))
    # slope of ln(rank-½) on ln(magnitude) is -1/p; a constant vector has p = 0
    p = float(sizes @ sizes) / covariance if covariance > 0 else 0.0
    half = _Z95 * math.sqrt(2 / n)
    # Hill over all ranks above the last one of the window
    hill = float(logs[:-1].mean() - logs[-1])
    hill_half = _Z95 / math.sqrt(last - 1)
    return Compressibility(
        p=p,
        p_low=p * (1 - half),
        p_high=p * (1 + half),
        hill=hill,
        hill_low=hill * (1 - hill_half),
        hill_high=hill * (1 + hill_half),
        c1=float((magnitudes[first - 1 :] * ranks**p).max()),
        window=(first, last),
        compressible=p * (1 - half) > 0.5,
    )


def _uniform(tail: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 - tail


def _halfnorm(tail: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.special import ndtri

    return np.asarray(-ndtri(tail / 2), float)


CONTROLS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "uniform": _uniform,
    "halfnorm": _halfnorm,
}
"""Upper quantile functions of magnitudes that are not compressible, by SciPy's names."""


def control(
    name: str, numel: int, window: tuple[int, int] | None = None
) -> tuple[Compressibility, NDArray[Any]]:
    """Return the decay of an ideal sample of a known law, and its largest magnitudes, descending.

    Its j-th largest magnitude is the law's quantile at (j − ½)/numel: no randomness.

    Parameters
    ----------
    name : a key of :data:`CONTROLS`.
    numel : size of the vector.
    window : as for :func:`compressibility`.
    """
    first, last = default_window(numel) if window is None else window
    ranks = np.arange(1, min(last, numel) + 1)
    magnitudes = CONTROLS[name]((ranks - 0.5) / numel)
    return _from_sorted(magnitudes, first), magnitudes
