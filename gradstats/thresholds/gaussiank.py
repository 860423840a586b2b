"""GaussianK-SGD's threshold: a normal quantile, then a few corrections."""

from __future__ import annotations

import math

from gradstats.primitives import Array, Selection, exceedances, moments, top_candidates
from gradstats.primitives.moments import signed_sums
from gradstats.primitives.ratio import check_count
from gradstats.primitives.select import keep
from gradstats.statistics.solution import LEAST_SQUARES, FitError, Reason
from gradstats.thresholds.base import Estimator, Found

__all__ = ["GaussianK"]


class GaussianK(Estimator):
    """The two-sided normal quantile of the signed elements, corrected by the number of elements it keeps.

    Parameters
    ----------
    loops : int
        Largest number of counts, 0 to 100; a correction follows every count but the last. The authors' program has 3
        with error feedback, 5 without. One pass collects the 2k largest elements; a count beyond them takes another.

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

        finite, total, squares = signed_sums(x)
        if squares == 0 and moments(x, log=False).count == 0:
            return Found(0.0)
        if not LEAST_SQUARES < squares < math.inf:
            raise FitError(Reason.RANGE)
        mean = total / finite
        std = math.sqrt(max(squares / finite - mean * mean, 0.0))
        threshold = max(mean - float(ndtri(min(k / finite, 1.0) / 2)) * std, 0.0)
        tail = _Tail(x, k)
        counts = []
        for left in reversed(range(self.loops)):
            counts.append(tail.count(threshold))
            if left == 0:
                break
            if counts[-1] < 2 * k / 3:
                threshold *= 0.5
            elif counts[-1] > 4 * k / 3:
                threshold *= 1.5
            else:
                break
        details = {"mean": mean, "std": std, "counts": counts}
        return Found(threshold, details, tail.selection(threshold))


class _Tail:
    """The 2k largest elements, collected once: counts and a selection among them take no other pass."""

    def __init__(self, x: Array, k: int) -> None:
        self._x = x
        self._low, self._found = top_candidates(x, 2 * k)

    def count(self, threshold: float) -> int:
        """Count the finite elements that reach a threshold."""
        return exceedances(
            self._found.values if threshold >= self._low else self._x, threshold
        ).count

    def selection(self, threshold: float) -> Selection | None:
        """Return what reaches a threshold, None if that takes a pass."""
        return keep(self._found, threshold) if threshold >= self._low else None
