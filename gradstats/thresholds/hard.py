"""The hard threshold: one number for the whole training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradstats.primitives import Array, top_candidates
from gradstats.primitives.ratio import check_magnitude
from gradstats.thresholds.base import Estimator, Result

__all__ = ["Hard"]


class Hard(Estimator):
    """A constant threshold, whatever the gradient and the ratio.

    Parameters
    ----------
    threshold : float, optional
        Threshold η ≥ 0, in the gradient's unit; by default the exact threshold of the first gradient with k non-zero
        elements. One before it, as of a layer that starts at zero, is sent whole.
    """

    name = "hard"
    learns_first = True
    clamps = False  # a constant, whatever the gradient

    def __init__(self, threshold: float | None = None) -> None:
        self.threshold = None if threshold is None else check_magnitude(threshold)

    def find(self, x: Array, k: int) -> Result:
        """Return the one threshold; that of the first gradient with k non-zero elements if none was given."""
        if self.threshold is None:
            self.threshold = top_candidates(x, k)[0] or None  # 0 would keep all of every later one
        return Result(self.threshold or 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold."""
        return {"threshold": self.threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the threshold."""
        self.threshold = state["threshold"]
