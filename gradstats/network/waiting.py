"""How much longer than one worker the slowest of many computes: the largest of so many draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["expected_largest", "largest_normal", "log_spread", "waiting"]

_NODES = 1 << 12
"""Points at which an expectation is evaluated: right to 0.001 up to a million workers."""


def log_spread(times: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms of some times; 0 of a single one.

    Parameters
    ----------
    times : sequence of float
        Seconds of single steps.
    """
    return float(np.std(np.log(times), ddof=1)) if len(times) > 1 else 0.0


def largest_normal(probabilities: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return quantiles of the largest of some standard normal numbers.

    Parameters
    ----------
    probabilities : ndarray of float64
        Where in its distribution, in (0, 1).
    count : int
        Of how many numbers.
    """
    from scipy.special import ndtri_exp

    # P(max ≤ x) = Φ(x)ⁿ; in logarithms, because the n-th root of p rounds to 1 for large n
    quantiles: NDArray[np.float64] = ndtri_exp(np.log(probabilities) / count)
    return quantiles


def expected_largest(count: int) -> float:
    """Return the expectation of the largest of some standard normal numbers.

    Parameters
    ----------
    count : int
        How many.
    """
    if count == 1:
        return 0.0
    # the expectation is the mean of the quantiles, taken at the midpoints of equal parts
    return float(np.mean(largest_normal((np.arange(_NODES) + 0.5) / _NODES, count)))


def waiting(times: Sequence[float], workers: int) -> float:
    """Return how many times as long as the median the slowest of some workers is expected to compute.

    The times are taken as draws of a log-normal law, and so is every worker's step.

    Parameters
    ----------
    times : sequence of float
        Measured seconds of single steps.
    workers : int
        Number of workers.

    Returns
    -------
    float
        The factor, at least 1; NaN if a single time does not say how times differ.
    """
    if len(times) < 2:
        return math.nan
    return math.exp(log_spread(times) * expected_largest(workers))
