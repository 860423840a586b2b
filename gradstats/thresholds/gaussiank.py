"""GaussianK-SGD's threshold: a normal quantile, then a few corrections."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives import Array, exceedances, moments
from gradstats.primitives.blocks import map_blocks
from gradstats.primitives.ratio import check_count
from gradstats.statistics.solution import LEAST_SQUARES, FitError, Reason
from gradstats.thresholds.base import Estimator, Found

__all__ = ["GaussianK"]


class GaussianK(Estimator):
    """The two-sided normal quantile of the signed elements, corrected by the number of elements it keeps.

    Parameters
    ----------
    loops : int
        Largest number of counts, 0 to 100, each of which costs one pass; a correction follows every count but the
        last. The authors' program has 3 with error feedback, 5 without.

    Notes
    -----
    Source: Shi et al., arXiv 1911.08772, and the authors' program: the threshold is halved while it keeps fewer than
    ⅔ k and raised by half while it keeps more than 4/3 k. The elements of the last count are sent, however many they
    are: three counts are two corrections at most.

    Differs from the program: mean and deviation are those of the finite elements, and the threshold is never negative.
    """

    name = "gaussiank"

    def __init__(self, loops: int = 3) -> None:
        self.loops = check_count(loops, "loops", 0, 100)

    def _find(self, x: Array, k: int) -> Found:
        from scipy.special import ndtri

        m = moments(x, log=False)
        finite = m.numel - m.nonfinite
        if m.count == 0:
            return Found(0.0)
        if not LEAST_SQUARES < m.sum_squares < math.inf:
            raise FitError(Reason.RANGE)
        mean = sum(map_blocks(_signed_sum, x)) / finite
        std = math.sqrt(max(m.sum_squares / finite - mean * mean, 0.0))
        threshold = max(mean - float(ndtri(min(k / finite, 1.0) / 2)) * std, 0.0)
        counts = []
        for left in reversed(range(self.loops)):
            counts.append(exceedances(x, threshold).count)
            if left == 0:
                break
            if counts[-1] < 2 * k / 3:
                threshold *= 0.5
            elif counts[-1] > 4 * k / 3:
                threshold *= 1.5
            else:
                break
        return Found(threshold, {"mean": mean, "std": std, "counts": counts})


def _signed_sum(_: int, block: NDArray[Any]) -> float:
    """Return the sum of the finite elements of a block."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.sum(block, dtype=np.float64))
    if math.isfinite(total):
        return total
    return float(np.sum(block[np.isfinite(block)], dtype=np.float64))
