"""What dependence between elements does to counts and intervals: by runs of neighbours, and by whole blocks of them."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.loops.sums import sums_of_repeats
from gradstats.statistics.resampling import block_counts

__all__ = [
    "FEWEST_BLOCKS",
    "NO_POSITIONS",
    "RUN",
    "design_effect",
    "exponent_of",
    "over_blocks",
    "runs_of",
]

FEWEST_BLOCKS = 20
"""Blocks with an element in the window below which there is no interval."""

NO_POSITIONS = "a sketch does not say where elements lie"
"""Why a decay from a sketch has no interval over blocks."""

RUN = 512
"""Neighbouring elements whose counts are compared for a design effect."""

_FEWEST_RUNS = 20
"""Runs below which their variance says nothing."""

# a fixed seed: a gradient has one interval, whenever it is asked for
_REPLICATES, _SEED = 199, 0


def runs_of(numel: int) -> NDArray[np.int64]:
    """Return where runs of √numel neighbouring elements begin.

    Parameters
    ----------
    numel : int
        Number of elements of the gradient, with zeros.
    """
    return np.arange(0, numel, max(math.isqrt(numel), 1))


def design_effect(runs: int, total: float, squares: float) -> float:
    """Return how many times as much the counts of runs of neighbours vary as those of independent elements do.

    Parameters
    ----------
    runs : int
        Runs of :data:`RUN` elements.
    total, squares : float
        Sums over the runs of the number of elements that reach a threshold, and of its square.

    Returns
    -------
    float
        Variance over the binomial one; NaN of fewer than 20 runs, or where none or all elements reach the threshold.
    """
    mean = total / runs if runs >= _FEWEST_RUNS else 0.0
    if not 0 < mean < RUN:
        return math.nan
    # sample variance over the binomial one of a run
    return (squares - runs * mean**2) / (runs - 1) / (mean * (1 - mean / RUN))


def exponent_of(logs: NDArray[np.float64], first: int) -> float:
    """Return the exponent p of sorted magnitudes by the rank-½ regression (Gabaix and Ibragimov 2011).

    Parameters
    ----------
    logs : ndarray of float64
        Logarithms of the magnitudes from `first` to the last rank of the window, descending.
    first : int
        First rank of the window.
    """
    sizes = logs - logs.mean()
    covariance = -float(sizes @ _log_ranks(first, logs.size))
    # slope of ln(rank-½) on ln(magnitude) is -1/p; a constant vector has p = 0
    return float(sizes @ sizes) / covariance if covariance > 0 else 0.0


def _log_ranks(first: int, count: int) -> NDArray[np.float64]:
    """Return ln(rank − ½) of ranks in a row, less their mean."""
    log_ranks: NDArray[np.float64] = np.log(np.arange(first, first + count) - 0.5)
    log_ranks -= log_ranks.mean()
    return log_ranks


@lru_cache(maxsize=2)
def _draws(blocks: int) -> NDArray[np.int64]:
    """Return how often each replicate draws each block; kept, as gradients of one run have as many blocks."""
    counts = block_counts(blocks, _REPLICATES, np.random.default_rng(_SEED))
    counts.flags.writeable = False
    return counts


def over_blocks(
    magnitudes: NDArray[np.float64],
    positions: NDArray[np.int64],
    starts: NDArray[np.int64],
    window: tuple[int, int],
) -> tuple[float, float, str]:
    """Return the 95 % interval of p by a bootstrap of blocks of elements.

    As many blocks as there are, are drawn with replacement, and p is estimated from the same ranks of what they hold.
    The interval is p·exp(±t sd), with the standard deviation of ln p over 199 replicates and the quantile of t with
    half as many degrees of freedom as blocks have elements in the window. It allows for dependence within a block, not
    for that between blocks. With runs of √d, 90 to 95 % cover where the window holds fifty clusters or more, each
    shorter than a tenth of a run; for independent elements of 10,000 or fewer it is 89 %.

    Parameters
    ----------
    magnitudes : ndarray of float64, shape (n,)
        Largest magnitudes, descending: those of the window, and about as many below it, which replicates need.
    positions : ndarray of int64, shape (n,)
        Where in the gradient they lie.
    starts : ndarray of int64, shape (blocks,)
        First element of each block, ascending from 0.
    window : (int, int)
        First and last rank.

    Returns
    -------
    low, high : float
        Ends; NaN where there is no interval.
    reason : str
        Why there is none; empty if there is one.
    """
    from scipy.special import stdtrit

    first, last = window
    block = np.searchsorted(starts, positions, side="right") - 1
    inside = np.unique(block[:last]).size
    if inside < FEWEST_BLOCKS:
        return (
            math.nan,
            math.nan,
            f"fewer than {FEWEST_BLOCKS} blocks have an element in the window",
        )
    logs = np.log(magnitudes)
    window_logs = logs[first - 1 : last]
    p = exponent_of(window_logs, first)
    # less one of them: squares of small numbers lose few digits, and equal ones are exactly 0
    sizes = logs - window_logs[window_logs.size // 2]
    # repeated where they stand, sorted logarithms stay sorted
    before = np.concatenate([np.zeros(first), _log_ranks(first, window_logs.size).cumsum()])
    sums = np.empty((_REPLICATES, 4))
    sums_of_repeats(sizes, block, _draws(starts.size), before, first - 1, sums)
    # a replicate without the fullest blocks may end inside the window
    count, total, squares, products = sums[sums[:, 0] > (last - first) / 2].T
    covariance = total * before[first - 1 + count.astype(np.int64)] / count - products
    falls = covariance > 0
    exponents = (squares - total**2 / count)[falls] / covariance[falls]
    logged = np.log(exponents[exponents > 0])
    if p <= 0 or logged.size < _REPLICATES / 2:
        return math.nan, math.nan, "replicates have no exponent"
    # in ln p, so that both ends stay above 0
    factor = math.exp(float(stdtrit(inside / 2 - 1, 0.975)) * float(logged.std(ddof=1)))
    return p / factor, p * factor, ""
