"""The exact threshold, the k-th largest magnitude: from scratch, and warm-started from the last step."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradstats.primitives import Array, Selection, numel_of, top_candidates
from gradstats.primitives.arrays import as_numpy
from gradstats.primitives.backend import memory_of
from gradstats.primitives.ratio import target_count
from gradstats.primitives.select import SORTED, keep, top_sorted
from gradstats.thresholds.base import Estimate, Estimator, Result

__all__ = ["Exact", "WarmExact"]

# NumPy has one object for native float32: identity is the cheapest comparison
_SINGLE = np.dtype(np.float32)
_SORTED = 1 << 12
"""Elements up to which a bracket saves no time."""
_DENSE = 32
"""One wanted element in so many from which on the last threshold is of no use."""
_SAMPLE = 1 << 14
"""Candidates looked at for the next margin, which decides about time alone."""


class Exact(Estimator):
    """The k-th largest finite magnitude, exactly, for a sample and one pass; few elements are sorted.

    Elements tied with it are all kept, so k̂ ≥ k, with equality when the magnitudes are distinct. k̂ < k only if fewer
    than k elements are non-zero; the threshold is then 0 and all of them are kept.

    Notes
    -----
    Source: Floyd and Rivest (1975), see :func:`gradstats.primitives.top_candidates`.
    """

    name = "exact"

    def select(self, x: Array, ratio: float) -> tuple[Estimate, Selection]:
        """Find the threshold and return what it keeps: of few elements in fewer calls, which take longer than they."""
        # a subclass may find another threshold
        flat = memory_of(x) if type(self) is Exact else None
        if (
            flat is not None
            and 0 < flat.size <= SORTED
            and flat.dtype is _SINGLE
            and flat.ndim == 1
        ):
            k = target_count(ratio, flat.size)
            # None where an element is not finite, which the general way leaves out
            if top := top_sorted(flat, k):
                threshold, indices, values = top
                if flat is not x:  # a tensor's memory
                    # loaded, since the caller has a tensor
                    from_numpy = sys.modules["torch"].from_numpy
                    indices, values = from_numpy(indices), from_numpy(values)
                return Estimate(threshold, k, flat.size, {}), Selection(indices, values)
        return super().select(x, ratio)

    def find(self, x: Array, k: int) -> Result:
        """Find the k-th largest magnitude, and collect what reaches it."""
        threshold, selection = top_candidates(x, k)
        return Result(threshold, {}, selection)


class WarmExact(Estimator):
    """The exact threshold, with a bracket from the last step instead of a sample.

    The pass collects what reaches η_{t−1} e^(−m). The margin m follows the drift of the threshold (1.5 times the
    largest recent step of ln η) but ends where the last step had 2k elements, because with error feedback the
    magnitudes pile up just under the threshold. Too narrow a margin costs one more pass, never a wrong k. Where more
    than one element in 32 is wanted, a sample decides anew: it costs little beside them, and a margin more.

    Notes
    -----
    Not from a paper. The thresholds are always those of :class:`Exact`.
    """

    name = "warm-exact"

    def __init__(self) -> None:
        self._threshold = 0.0
        self._drift = 0.1
        self._margin = 0.0
        self._k = 0
        self.misses = 0
        """Number of steps that took a second pass."""

    def find(self, x: Array, k: int) -> Result:
        """Find the k-th largest magnitude, from the last step's on."""
        if numel_of(x) <= _SORTED:
            threshold, selection = top_candidates(x, k)
            self._threshold, self._k = threshold, k
            details = {"candidates": len(selection), "warm": False, "missed": False}
            return Result(threshold, details, selection)
        last = self._threshold
        # the threshold of another k says nothing about this one
        warm = last > 0 and self._k == k and k * _DENSE <= numel_of(x)
        part = math.exp(-self._margin)
        guess = last * part if warm else None
        high = last / part if warm and part > 0 else math.inf
        # untrimmed: what lies below the threshold tells where the 2k-th element is
        threshold, candidates = top_candidates(x, k, guess, high, trim=False)
        missed = guess is not None and threshold < guess
        self.misses += missed
        if warm and threshold > 0:
            # a difference, because quotients of float64 leave its range
            self._drift = max(abs(math.log(threshold) - math.log(last)), 0.9 * self._drift)
        self._threshold, self._k = threshold, k
        # before keep(), which overwrites the candidates
        self._margin = min(1.5 * self._drift, self._crowded(candidates, k, threshold))
        details = {"candidates": len(candidates), "warm": warm, "missed": missed}
        return Result(threshold, details, keep(candidates, threshold))

    @staticmethod
    def _crowded(candidates: Selection, k: int, threshold: float) -> float:
        """Return the margin within which this step had about 2k elements; infinite if it is not known."""
        # candidates come in index order, so every n-th is a sample
        stride = 1 + len(candidates) // _SAMPLE
        magnitude = np.abs(as_numpy(candidates.values[::stride]))
        finite = magnitude[np.isfinite(magnitude)]
        rank = 2 * k // stride
        if not 1 <= rank <= finite.size or threshold <= 0:
            return math.inf
        second = float(np.partition(finite, finite.size - rank)[finite.size - rank])
        # never 0, as ties would have it: the least fall of the threshold would miss
        return max(math.log(threshold) - math.log(second), 1e-4) if second > 0 else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return the last threshold and what its margin depends on."""
        return {
            "threshold": self._threshold,
            "drift": self._drift,
            "margin": self._margin,
            "k": self._k,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._threshold, self._drift = state["threshold"], state["drift"]
        self._margin, self._k = state["margin"], state["k"]
