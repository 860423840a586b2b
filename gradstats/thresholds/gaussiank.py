"""GaussianK-SGD's threshold: a normal quantile, then a few corrections."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gradstats.primitives import (
    Array,
    Selection,
    moments,
    numel_of,
    select,
    top_candidates,
)
from gradstats.primitives.arrays import is_tensor, strided
from gradstats.primitives.moments import count_above, signed_sums
from gradstats.primitives.ratio import check_count
from gradstats.primitives.select import keep
from gradstats.statistics.solution import LEAST_SQUARES, FitError, Reason
from gradstats.thresholds.base import Estimator, Result

__all__ = ["GaussianK"]

_SAMPLE, _HITS = 1 << 15, 16
"""Elements looked at beforehand, and how many of them must be wanted for their counts to mean anything."""
_MOST = 0.1
"""Share of the elements up to which what the last threshold keeps is collected at once, however far it is from k."""
_COUNTED = 0.15
"""Share of the elements that can be collected in the time of counting among all of them."""
_FEW = 1 << 16
"""Elements up to which the largest are found by sorting."""


class GaussianK(Estimator):
    """The two-sided normal quantile of the signed elements, corrected by the number of elements it keeps.

    Parameters
    ----------
    loops : int
        Largest number of counts, 0 to 100; a correction follows every count but the last. The authors' program has 3
        with error feedback, 5 without. One pass collects what reaches the threshold that a sample foretells, or the 2k
        largest elements where it cannot; a count beyond takes another.

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

    def find(self, x: Array, k: int) -> Result:
        """Find the normal quantile, and correct it by what it keeps."""
        from scipy.special import ndtri

        finite, total, squares = signed_sums(x)
        # squares of tiny numbers vanish too, and only zeros have the threshold 0
        if squares == 0 and moments(x, log=False).count == 0:
            return Result(0.0)
        if not LEAST_SQUARES < squares < math.inf:
            raise FitError(Reason.RANGE)
        mean = total / finite
        std = math.sqrt(max(squares / finite - mean * mean, 0.0))
        # two-sided: half of the share in each tail
        threshold = max(mean - float(ndtri(min(k / finite, 1.0) / 2)) * std, 0.0)
        tail = _Tail(x, k, self._foretold(x, threshold, k))
        threshold, counts = self._corrected(threshold, k, tail.count)
        details = {"mean": mean, "std": std, "counts": counts}
        return Result(threshold, details, tail.selection(threshold))

    def _foretold(self, x: Array, threshold: float, k: int) -> float | None:
        """Return where to collect from, by a sample's counts; None where its hits are too few, or too many."""
        if numel_of(x) <= _FEW:
            return None
        some = strided(x, numel_of(x) // _SAMPLE)
        some = some.contiguous() if is_tensor(some) else np.ascontiguousarray(some)
        expected = k * numel_of(some) / numel_of(x)
        # the counts of a sample with so few hits are noise
        if expected < _HITS:
            return None
        last, counts = self._corrected(threshold, expected, lambda t: count_above(some, t))
        if not counts or counts[-1] < _HITS / 2:
            return None
        # everything between the first and the last threshold is counted from one collection
        low, reached = min(threshold, last), max(counts[0], counts[-1])
        # collecting down to the lowest threshold costs more than the passes that it saves: begin at the last
        if reached - counts[-1] > _COUNTED * (len(counts) - 1) * numel_of(some):
            low, reached = last, counts[-1]
        return low if reached <= max(3 * expected, _MOST * numel_of(some)) else None

    def _corrected(
        self, threshold: float, k: float, count: Callable[[float], float]
    ) -> tuple[float, list[float]]:
        """Return the last threshold counted, and the counts."""
        counts: list[float] = []
        for left in reversed(range(self.loops)):
            counts.append(count(threshold))
            # what was counted last is sent: a correction after it would go unchecked
            if left == 0:
                break
            if counts[-1] < 2 * k / 3:
                threshold *= 0.5
            elif counts[-1] > 4 * k / 3:
                threshold *= 1.5
            else:
                break
        return threshold, counts


class _Tail:
    """Everything that reaches a threshold, collected once: counts and a selection among it take no other pass.

    Without a threshold, the 2k largest elements.
    """

    def __init__(self, x: Array, k: int, low: float | None) -> None:
        self._x = x
        self._low, self._candidates = (
            top_candidates(x, 2 * k) if low is None else (low, select(x, low))
        )

    def count(self, threshold: float) -> int:
        """Count the finite elements that reach a threshold."""
        # what is collected contains all that reaches a higher threshold
        return count_above(
            self._candidates.values if threshold >= self._low else self._x, threshold
        )

    def selection(self, threshold: float) -> Selection | None:
        """Return what reaches a threshold, None if that takes a pass."""
        if threshold <= self._low:
            return self._candidates if threshold == self._low else None
        return keep(self._candidates, threshold)
