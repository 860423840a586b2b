"""What every solver returns, and why data may have no fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gradstats.errors import InputError

__all__ = ["FitError", "Flag", "Reason", "Solution"]


class Reason(StrEnum):
    """Why data has no fit."""

    EMPTY = "nothing to fit: no finite non-zero element"
    TOO_FEW = "a shape needs at least two elements"
    CONSTANT = "all magnitudes are equal: no shape describes them"
    NO_MAXIMUM = (
        "the likelihood has no local maximum (generalized Pareto with shape at or below -1)"
    )
    RANGE = "squares of these magnitudes leave the range of numbers: rescale them"
    NO_MOMENTS = "no shape has these moments"


class Flag(StrEnum):
    """What to mind about a fit. Members are strings, the sentences they stand for."""

    MOMENTS = "shape above 1/4: moment estimate unreliable"
    PWM = "shape above 1/2: probability-weighted moments unreliable"
    SUPPORT = "largest element outside the support"
    IRREGULAR = "shape below -1/2: standard errors do not hold"
    BOUNDARY = "shape at the end of the range searched"


class FitError(InputError):
    """The data has no fit of this model.

    Attributes
    ----------
    reason : why, a :class:`Reason`; it is also the message.
    """

    def __init__(self, reason: Reason) -> None:
        self.reason = Reason(reason)  # pickling hands the message back
        super().__init__(self.reason.value)


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver finds: parameters without the location, their standard errors, and flags."""

    params: Mapping[str, float]
    stderr: Mapping[str, float]
    flags: tuple[Flag, ...] = ()
