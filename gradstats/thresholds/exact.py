"""The exact threshold: the k-th largest magnitude."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradstats.primitives import Array, kth_largest
from gradstats.thresholds.base import Estimator

__all__ = ["Exact"]


class Exact(Estimator):
    """The k-th largest finite magnitude.

    Elements tied with it are all kept, so k̂ ≥ k, with equality when the magnitudes are distinct; k̂ < k only when the
    gradient has fewer than k non-zero elements (the threshold is then 0 and every non-zero element is kept).
    """

    name = "exact"

    def _threshold(self, x: Array, k: int) -> tuple[float, Mapping[str, Any]]:
        return kth_largest(x, k), {}
