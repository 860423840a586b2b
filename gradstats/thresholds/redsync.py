"""RedSync's thresholds between the mean and the maximum magnitude."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradstats.primitives import (
    Array,
    Moments,
    kth_largest,
    moments,
    numel_of,
    select,
    top_candidates,
)
from gradstats.primitives.arrays import wide_dtype
from gradstats.primitives.moments import count_above
from gradstats.primitives.ratio import check_count
from gradstats.thresholds.base import Estimator, Result, Rule, check_rule

__all__ = ["RedSync", "RedSyncTrimmed", "Rule"]

_MOST_PROBES = 60
"""Largest number of bisections, for ties that no threshold separates."""


class _Counter:
    """Counter of the elements at or above a threshold; once few reach a lower bound, it looks at those alone."""

    def __init__(self, x: Array) -> None:
        self._x = x
        # as in worth_collecting: more of them would take too much memory
        self._few = numel_of(x) // 10
        self._values: Array | None = None
        self.passes = 0

    def count(self, threshold: float) -> int:
        """Count the elements at or above a threshold.

        Parameters
        ----------
        threshold : float
            Magnitude, not below the last bound.
        """
        if self._values is not None:
            return count_above(self._values, threshold)
        self.passes += 1
        return count_above(self._x, threshold)

    def raise_bound(self, threshold: float, count: int) -> None:
        """Take note that no later threshold is below this one.

        Parameters
        ----------
        threshold : float
            The lower bound.
        count : int
            Number of elements that reach it.
        """
        if self._values is None and count <= self._few:
            self._values = select(self._x, threshold).values
            self.passes += 1


class RedSync(Estimator):
    """Bisection of r in η = mean + r (max − mean) until k ≤ k̂ ≤ 2k, the result reused for five steps.

    Parameters
    ----------
    rule : {"corrected", "paper"}
        ``"corrected"`` lowers η whenever k̂ < k and bisects to float precision, so k ≤ k̂ ≤ 2k holds after every search
        unless ties forbid it. ``"paper"`` ends when the interval is ε wide, wherever it then is; the text gives no ε,
        and 0.2, which algorithm 2 has, ends after three probes.
    interval : int
        Number of steps for which a threshold is used, at least 1.

    Notes
    -----
    Source: RedSync (Fang et al. 2018), algorithm 3, and the reuse of algorithm 5.

    Differs from the text of algorithm 3, which moves a bound of r to the threshold: both rules bisect r. Beside that,
    ``"corrected"`` lowers η below k, not only below k/2, goes on when the interval is 0.2 wide, and searches again in
    the next step after it has found no threshold above 0.
    """

    name = "redsync"

    def __init__(self, rule: Rule = "corrected", interval: int = 5) -> None:
        check_rule(rule)
        self.rule = rule
        self.clamps = rule != "paper"
        self.interval = check_count(interval, "interval")
        self._threshold = 0.0
        self._step = 0

    def find(self, x: Array, k: int) -> Result:
        """Search the threshold, or use the last one again."""
        # A threshold of zero comes from a gradient with too few elements; used again, it would send whole gradients.
        searching = self._step % self.interval == 0 or (
            self._threshold == 0 and self.rule == "corrected"
        )
        self._step += 1
        if not searching:
            return Result(self._threshold, {"searched": False})
        m = moments(x, log=False)
        counter = _Counter(x)
        search = _bisect if self.rule == "corrected" else _bisect_as_published
        self._threshold, probes = search(m, k, counter)
        return Result(
            self._threshold, {"searched": True, "probes": probes, "passes": counter.passes + 1}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold in use and the number of steps."""
        return {"threshold": self._threshold, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._threshold, self._step = state["threshold"], state["step"]


def _mean(m: Moments) -> float:
    """Return the mean magnitude, and the largest where the sum of float64 magnitudes leaves their range."""
    return min(m.mean, m.max)


def _bisect(m: Moments, k: int, counter: _Counter) -> tuple[float, int]:
    """Return a threshold that k to 2k elements reach, and the number of probes."""
    if m.count <= k:
        return 0.0, 0
    # Invariant of the bisection: k or more elements reach `low`, fewer reach `high`.
    low, high = _mean(m), m.max
    if counter.count(low) < k:  # fewer than k elements reach the mean: search below it
        low, high = 0.0, low
    for probe in range(1, _MOST_PROBES + 1):
        middle = low + (high - low) / 2
        # neighbouring floats
        if middle in (low, high):
            break
        count = counter.count(middle)
        if k <= count <= 2 * k:
            return middle, probe
        if count < k:
            high = middle
        else:
            low = middle
            counter.raise_bound(low, count)
    return low, probe  # ties: the highest threshold that k elements reach


def _bisect_as_published(m: Moments, k: int, counter: _Counter) -> tuple[float, int]:
    """Return the threshold of the published search, and the number of probes."""
    if m.count == 0:
        return 0.0, 0
    mean = _mean(m)
    left, right, threshold, probes = 0.0, 1.0, mean, 0
    while right - left > 0.2:
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (m.max - mean)
        probes += 1
        count = counter.count(threshold)
        # as printed: between k/2 and k the search goes the wrong way
        if k < count < 2 * k:
            break
        if count < k / 2:
            right = ratio
        else:
            left = ratio
    return threshold, probes


class RedSyncTrimmed(Estimator):
    """Trimmed top-k: r is lowered from 0.8 by 0.2 until k̂ ≥ k, then exact top-k among what is left.

    Parameters
    ----------
    rule : {"corrected", "paper"}
        ``"corrected"`` keeps exactly k elements and ties. ``"paper"`` leaves out the final top-k, as the published
        programs do.

    Notes
    -----
    Source: RedSync (Fang et al. 2018), algorithm 2.

    Differs from the paper, whose text goes on while more than k elements are above the threshold. Where fewer than k
    reach the mean (r = 0), all non-zero elements are candidates. The k largest are the same whatever the candidates
    are, so ``"corrected"`` finds them as :class:`gradstats.thresholds.Exact` does, and no r.
    """

    name = "redsync-trimmed"

    def __init__(self, rule: Rule = "corrected") -> None:
        check_rule(rule)
        self.rule = rule
        self.clamps = rule != "paper"

    def find(self, x: Array, k: int) -> Result:
        """Find the threshold among what trimming leaves."""
        if self.rule == "corrected":
            kth, selection = top_candidates(x, k)
            return Result(kth, selection=selection)
        m = moments(x, log=False)
        if m.count <= k:
            return Result(0.0)
        mean, kth = _mean(m), kth_largest(x, k)
        # The first that k elements reach is the first that the k-th largest reaches.
        tried = (mean + r * (m.max - mean) for r in (0.8, 0.6, 0.4, 0.2, 0.0))
        # as select() will round it
        compared = wide_dtype(x).type
        return Result(next((eta for eta in tried if compared(eta) <= kth), 0.0))
