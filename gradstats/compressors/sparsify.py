"""Sparsification by a threshold estimator: the object of the tables, at work in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from gradstats.compressors.base import Selection, Selector
from gradstats.primitives.ratio import target_count
from gradstats.thresholds import Estimator, Exact

if TYPE_CHECKING:
    import torch

__all__ = ["ThresholdSelector", "TopK"]


class ThresholdSelector(Selector):
    """Send the elements with |g| ≥ η, η from any threshold estimator.

    Parameters
    ----------
    estimator : its state belongs to this compressor from now on.
    ratio : target fraction k/d in (0, 1].
    """

    def __init__(self, estimator: Estimator, ratio: float) -> None:
        target_count(ratio, 1)  # raises on a bad ratio now, not in the first backward pass
        self.estimator = estimator
        self.ratio = ratio

    def compress(self, gradient: torch.Tensor) -> Selection:
        """Estimate the threshold of `gradient` and select by it."""
        estimate, selection = self.estimator.select(gradient, self.ratio)
        indices, values = cast(
            "tuple[torch.Tensor, torch.Tensor]", (selection.indices, selection.values)
        )
        return Selection(indices, values, estimate.threshold)

    def target(self, numel: int) -> int:
        """Return k = max(1, round(ratio · numel))."""
        return target_count(self.ratio, numel)

    def state_dict(self) -> dict[str, Any]:
        """Return the estimator's state."""
        return {"estimator": self.estimator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the estimator's state."""
        self.estimator.load_state_dict(state["estimator"])


class TopK(ThresholdSelector):
    """Exact top-k: the k largest magnitudes (and those tied with the k-th)."""

    def __init__(self, ratio: float) -> None:
        super().__init__(Exact(), ratio)
