"""What takes an exchange back: what it changed, as it was before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradstats.hooks.diagnostics import Diagnosis
from gradstats.trace.record import StepRecord

__all__ = ["Undo"]


@dataclass(frozen=True, slots=True)
class Undo:
    """What a state was before an exchange, but for the memory, which keeps it by itself.

    Attributes
    ----------
    step : int
        Number of the exchange.
    scale : float
        The loss scale of its gradients.
    compressor : mapping
        The compressor's state.
    last : StepRecord or None
        Record of the exchange before.
    diagnosis : Diagnosis or None
        Of the last step diagnosed.
    hidden : int
        Steps in a row with a hidden problem.
    """

    step: int
    scale: float
    compressor: Mapping[str, Any]
    last: StepRecord | None
    diagnosis: Diagnosis | None
    hidden: int
