"""RedSync's thresholds between the mean and the maximum (Fang et al. 2018, algorithms 2, 3 and 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from gradstats.errors import InputError
from gradstats.primitives import (
    Array,
    Moments,
    Selection,
    exceedances,
    moments,
    numel_of,
    select,
    top_candidates,
)
from gradstats.thresholds.base import Estimator, Found

__all__ = ["RedSync", "RedSyncTrimmed"]

Rule: TypeAlias = Literal["corrected", "paper"]
_MOST_PROBES = 60


def _check(rule: str) -> None:
    if rule not in ("corrected", "paper"):
        raise InputError(f"rule must be corrected or paper, not {rule!r}")


class _Counter:
    """Counts elements at or above thresholds; once few are left above a lower bound, among those alone."""

    def __init__(self, x: Array) -> None:
        self._x = x
        self._few = numel_of(x) // 10
        self._values: Array | None = None
        self.passes = 0

    def count(self, threshold: float) -> int:
        if self._values is not None:
            return exceedances(self._values, threshold).count
        self.passes += 1
        return exceedances(self._x, threshold).count

    def raise_bound(self, threshold: float, count: int) -> None:
        """Note that thresholds below this one will not be asked for any more."""
        if self._values is None and count <= self._few:
            self._values = select(self._x, threshold).values
            self.passes += 1


class RedSync(Estimator):
    """Bisection of r in η = mean + r (max − mean) until k ≤ k̂ ≤ 2k, the result reused for five steps.

    Parameters
    ----------
    rule : ``"corrected"`` keeps the invariant (lower η whenever k̂ < k) and bisects to float precision, so
        k ≤ k̂ ≤ 2k holds at every search unless ties forbid it. ``"paper"`` ends when the interval is 0.2 wide, after
        three probes, wherever it then is.
    interval : steps a threshold is used for.
    """

    name = "redsync"

    def __init__(self, rule: Rule = "corrected", interval: int = 5) -> None:
        _check(rule)
        if interval < 1:
            raise InputError(f"interval must be at least 1, not {interval}")
        self.rule = rule
        self.interval = interval
        self._threshold = 0.0
        self._step = 0

    def _find(self, x: Array, k: int) -> Found:
        # a threshold of zero, from a gradient without enough elements, would send everything of the next ones
        searching = self._step % self.interval == 0 or (
            self._threshold == 0 and self.rule == "corrected"
        )
        self._step += 1
        if not searching:
            return Found(self._threshold, {"searched": False})
        m = moments(x, log=False)
        counter = _Counter(x)
        search = _bisect if self.rule == "corrected" else _bisect_as_published
        self._threshold, probes = search(m, k, counter)
        return Found(
            self._threshold, {"searched": True, "probes": probes, "passes": counter.passes + 1}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold in use and the step counter."""
        return {"threshold": self._threshold, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._threshold, self._step = state["threshold"], state["step"]


def _bisect(m: Moments, k: int, counter: _Counter) -> tuple[float, int]:
    if m.count <= k:
        return 0.0, 0
    low, high = m.mean, m.max
    if counter.count(low) < k:  # fewer than k elements above the mean: search under it
        low, high = 0.0, low
    for probe in range(1, _MOST_PROBES + 1):
        middle = low + (high - low) / 2
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
    return low, probe  # ties at the threshold: the least number that is not below k


def _bisect_as_published(m: Moments, k: int, counter: _Counter) -> tuple[float, int]:
    if m.count == 0:
        return 0.0, 0
    left, right, threshold, probes = 0.0, 1.0, m.mean, 0
    while right - left > 0.2:
        ratio = left + (right - left) / 2
        threshold = m.mean + ratio * (m.max - m.mean)
        probes += 1
        count = counter.count(threshold)
        if k < count < 2 * k:
            break
        if count < k / 2:
            right = ratio
        else:
            left = ratio
    return threshold, probes


class RedSyncTrimmed(Estimator):
    """Trimmed top-k: lower r from 0.8 by 0.2 until k̂ ≥ k, then exact top-k among the survivors.

    Parameters
    ----------
    rule : ``"corrected"`` gives exactly k (ties kept). ``"paper"`` leaves out the final top-k, as the published
        programs do.
    """

    name = "redsync-trimmed"

    def __init__(self, rule: Rule = "corrected") -> None:
        _check(rule)
        self.rule = rule

    def _find(self, x: Array, k: int) -> Found:
        m = moments(x, log=False)
        if m.count <= k:
            return Found(0.0)
        threshold, candidates = self._first_reached(x, k, m)
        if self.rule == "paper" or len(candidates) <= k:
            return Found(threshold, {"candidates": len(candidates)})
        return Found(top_candidates(candidates.values, k)[0], {"candidates": len(candidates)})

    @staticmethod
    def _first_reached(x: Array, k: int, m: Moments) -> tuple[float, Selection]:
        """Return the first threshold that k elements reach, 0 if none does, and what reaches it."""
        tried = [m.mean + r * (m.max - m.mean) for r in (0.8, 0.6, 0.4, 0.2, 0.0)] + [0.0]
        # The first four are looked for among what reaches the fourth: one pass instead of four.
        survivors = select(x, tried[3]).values
        for threshold in tried[:4]:
            if exceedances(survivors, threshold).count >= k:
                return threshold, select(survivors, threshold)
        found = select(x, tried[4])
        return (tried[4], found) if len(found) >= k else (0.0, select(x, 0.0))
