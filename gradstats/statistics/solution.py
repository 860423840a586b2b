"""The result of a solver, what to mind about it, and the reasons why data has no fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gradstats.errors import InputError

__all__ = ["LEAST_SQUARES", "Z95", "FitError", "Flag", "Reason", "Solution"]

LEAST_SQUARES = 1e-290
"""Sum of squares below which the largest of them have lost digits at the lower end of float64's range."""

Z95 = 1.959963984540054
"""Standard errors to either side of an estimate that make its 95 % normal interval."""


class Reason(StrEnum):
    """Reason why data has no fit."""

    EMPTY = "nothing to fit: no finite non-zero element"
    TIED = "nothing to fit: the largest magnitudes are tied, and none exceeds the threshold"
    TOO_FEW = "a shape needs at least two elements"
    CONSTANT = "all magnitudes are equal: no shape describes them"
    NO_MAXIMUM = (
        "the likelihood has no local maximum (generalized Pareto with shape at or below -1)"
    )
    RANGE = "squares of these magnitudes leave the range of numbers: rescale them"
    NO_MOMENTS = "no shape has these moments"
    LEVELS = (
        "fewer than three different values beyond the threshold: no shape can be told from them"
    )
    GROUPED = "few different values: only maximum likelihood (method mle) takes the intervals between them"


class Flag(StrEnum):
    """Warning about a fit; a member is the string that is shown."""

    MOMENTS = "shape above 1/4: moment estimate unreliable"
    TAIL = "the tail decides the mean square: moment estimate unreliable"
    PWM = "shape above 1/2: probability-weighted moments unreliable"
    SUPPORT = "largest element outside the support"
    IRREGULAR = "shape below -1/2: standard errors do not hold"
    BOUNDARY = "shape at the end of the range searched"
    LEVELS = "few different values: fitted to the intervals around them"
    BOUNDED = "as if clipped: the largest value counts as anything from there on"
    COUNTED = "counted and modelled quantiles differ by more than a quarter"


class FitError(InputError):
    """The data has no fit of this model.

    Parameters
    ----------
    reason : Reason
        Why. It is also the message.
    """

    def __init__(self, reason: Reason) -> None:
        self.reason = Reason(reason)  # pickling hands the message back
        super().__init__(self.reason.value)


@dataclass(frozen=True, slots=True)
class Solution:
    """Parameters that a solver found, with their standard errors.

    Attributes
    ----------
    params : mapping of str to float
        Parameters by SciPy's names, without the location.
    stderr : mapping of str to float
        Standard errors of the parameters; NaN where theory has none.
    flags : tuple of Flag
        Warnings.
    """

    params: Mapping[str, float]
    stderr: Mapping[str, float]
    flags: tuple[Flag, ...] = ()
