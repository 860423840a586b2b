"""The record of every step of a compressor in training. Loads without torch: traces are read where there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StepRecord", "together"]

_SUMMED = (
    *("selected", "numel", "bytes_sent", "target", "union"),
    *("select_seconds", "communicate_seconds", "overlapped_seconds"),
)
"""Fields that add up over the parts of a model."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one rank's compressor did in one step.

    Attributes
    ----------
    step : int
        Number of the step, 0 for the first synchronised backward pass.
    threshold : float
        Threshold η on this rank, NaN without one.
    selected : int
        Number k̂ of elements that this rank sent.
    numel : int
        Number d of elements of the compressed part of the gradient.
    bytes_sent : int
        Bytes of this rank's messages, padding and the dense part included.
    target : int
        Number k of elements that this rank was to send; 0 where there is no such number.
    union : int
        Positions at which any rank sent something.
    select_seconds : float
        Wall-clock seconds that this rank spent on selection.
    communicate_seconds : float
        Wall-clock seconds of communication while nothing else went on.
    overlapped_seconds : float
        Seconds of communication while the backward pass went on.
    problem : str
        What was wrong with the gradient and handled by policy; empty if nothing.
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
        """Return the estimation quality k̂/k; NaN without a k."""
        return self.selected / self.target if self.target else math.nan

    @property
    def build_up(self) -> float:
        """Return the union ÷ k: what the ranks' selections have grown to together (MiCRO); NaN without a k."""
        return self.union / self.target if self.target else math.nan

    @property
    def density(self) -> float:
        """Return the union ÷ d."""
        return self.union / self.numel if self.numel else math.nan

    @property
    def bits_per_element(self) -> float:
        """Return the bits sent ÷ d."""
        return 8 * self.bytes_sent / self.numel if self.numel else math.nan


def together(records: Sequence[StepRecord], step: int) -> StepRecord:
    """Return one record of a step in which the parts of a model were exchanged each by itself.

    Parameters
    ----------
    records : sequence of StepRecord
        One for each part, at least one. Sizes, bytes and seconds add up.
    step : int
        Number of the step.
    """
    return StepRecord(
        step=step,
        # parts of a model have thresholds of their own: one number cannot stand for several
        threshold=records[0].threshold if len(records) == 1 else math.nan,
        problem=next((record.problem for record in records if record.problem), ""),
        **{name: sum(getattr(record, name) for record in records) for name in _SUMMED},
    )
