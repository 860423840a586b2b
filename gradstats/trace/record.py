"""What is known of every step of a compressor in training. Loads without torch: traces are read where there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one rank's compressor did in one step.

    Attributes
    ----------
    step : 0 for the first synchronised backward pass.
    threshold : η on this rank, NaN without one.
    selected : elements this rank sent, k̂.
    target : elements it was to send, k; 0 where there is no such number.
    numel : elements of the compressed part of the gradient, d.
    bytes_sent : bytes of this rank's messages, padding included; the dense part's too.
    union : positions at which any rank sent something.
    select_seconds : of this rank's wall clock.
    communicate_seconds : likewise, as long as nothing else went on.
    overlapped_seconds : of communication while the backward pass went on.
    problem : what was wrong with the gradient and handled by policy; empty if nothing.
    """

    step: int
    threshold: float
    selected: int
    numel: int
    bytes_sent: int
    target: int = 0
    union: int = 0
    select_seconds: float = 0.0
    communicate_seconds: float = 0.0
    overlapped_seconds: float = 0.0
    problem: str = ""

    @property
    def quality(self) -> float:
        """Estimation quality k̂/k; NaN without a k."""
        return self.selected / self.target if self.target else math.nan

    @property
    def build_up(self) -> float:
        """The union ÷ k: what the ranks' selections have grown to together (MiCRO); NaN without a k."""
        return self.union / self.target if self.target else math.nan

    @property
    def density(self) -> float:
        """The union ÷ d."""
        return self.union / self.numel if self.numel else math.nan

    @property
    def bits_per_element(self) -> float:
        """Bits sent ÷ d."""
        return 8 * self.bytes_sent / self.numel if self.numel else math.nan
