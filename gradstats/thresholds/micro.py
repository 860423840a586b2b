"""MiCRO's threshold: feedback from the number of elements that the last one kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradstats.primitives import Array, top_candidates
from gradstats.primitives.arrays import wide_dtype
from gradstats.primitives.ratio import check_number
from gradstats.thresholds.base import Estimator, Result, Rule, check_rule

__all__ = ["MiCRO", "Rule"]


_ENDS32, _ENDS64 = (-100.0, 88.0), (-740.0, 709.0)
"""Ends of ln η: the ranges of float32 and of float64."""


class MiCRO(Estimator):
    """A threshold steered towards k by nothing but the number of elements that it keeps.

    Parameters
    ----------
    rule : {"corrected", "paper"}
        Rule of the steps. ``"corrected"`` searches ln η: growing strides until too many and too few have been seen,
        then interpolation in between; a bracket that turns out stale is dropped. On a gradient that stands still it is
        within 10 % of k after 20 steps from any start. ``"paper"`` multiplies η by 1.005, 1.00125 or 0.995.
    threshold : float, optional
        Threshold to start with, above 0. By default the exact one of the first gradient (``"corrected"``), or 1/(2√k)
        (``"paper"``).

    Notes
    -----
    Source: MiCRO, whose paper leaves out the steps and the start; ``"paper"`` has those of the authors' program.

    Differs from the program: its steps hardly move a threshold that starts far off, and its start does not depend on
    the scale of the gradient, so ``"corrected"`` is the default.
    """

    name = "micro"
    learns_first = True
    feedback = True

    def __init__(self, rule: Rule = "corrected", threshold: float | None = None) -> None:
        check_rule(rule)
        self.rule = rule
        self.clamps = rule != "paper"
        self._threshold = (
            None if threshold is None else check_number(threshold, "threshold", 0, math.inf)
        )
        # slope of ln k̂ against −ln η: 1 for the heaviest tails, tens with error feedback
        self._slope = 2.0
        self._stride = 0.0
        self._ends = _ENDS32
        # (ln η, ln(k̂/k)) where too many and where too few were kept
        self._many: tuple[float, float] | None = None
        self._few: tuple[float, float] | None = None

    def find(self, x: Array, k: int) -> Result:
        """Return the threshold that the counts so far have led to."""
        self._ends = _ENDS64 if wide_dtype(x) == np.float64 else _ENDS32
        # also 0: a first gradient with fewer than k non-zero elements has no threshold to start from
        if not self._threshold:
            self._threshold = (
                1 / (2 * math.sqrt(k)) if self.rule == "paper" else top_candidates(x, k)[0]
            )
        return Result(self._threshold, {"slope": self._slope})

    def observe(self, kept: int, k: int, numel: int) -> None:
        """Steer the threshold by the number of elements that it kept."""
        if not self._threshold:  # a gradient of zeros says nothing
            return
        if self.rule == "paper":
            exam = kept / k
            self._threshold *= 1.005 if exam > 1.1 else 1.00125 if exam > 1 / 1.1 else 0.995
            return
        # half an element stands for none, whose logarithm is infinite
        here, excess = math.log(self._threshold), math.log(max(kept, 0.5) / k)
        # in the band the search is over; once the gradient has moved on, another one begins
        if abs(kept / k - 1) <= 0.1:
            self._many = self._few = None
            self._stride = 0.0
            goal = here + 0.5 * excess / self._slope
        else:
            goal = self._search(here, excess, saturated=kept == 0 or 2 * kept > numel)
        # beyond these ends the threshold compared is 0 or infinite, and math.exp overflows
        self._threshold = math.exp(min(max(goal, self._ends[0]), self._ends[1]))

    def _search(self, here: float, excess: float, *, saturated: bool) -> float:
        """Return the next ln η: inside the bracket if there is one, else further by growing strides."""
        if excess > 0:
            self._many = (here, excess)
        else:
            self._few = (here, excess)
        if self._many is not None and self._few is not None:
            width = self._few[0] - self._many[0]
            if width > 1e-3:
                self._stride = 0.0
                drop = self._many[1] - self._few[1]
                share = self._many[1] / drop
                if saturated or width > 1:  # the ends say little: halve
                    share = 0.5
                else:
                    self._slope = min(max(drop / width, 1.0), 50.0)
                # an interpolation close to one end would hardly narrow the bracket
                return self._many[0] + min(max(share, 0.2), 0.8) * width
            # so narrow a bracket without an answer belongs to a gradient of the past
            if excess > 0:
                self._few = None
            else:
                self._many = None
        # all or nothing kept tells the direction alone, not how far to go
        wanted = 1.0 if saturated else abs(excess) / self._slope
        # while the answer stays on the same side, strides triple
        self._stride = max(wanted, 3 * self._stride)
        return here + math.copysign(self._stride, excess)

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold and the state of the search."""
        return {
            "threshold": self._threshold,
            "slope": self._slope,
            "stride": self._stride,
            "many": self._many,
            "few": self._few,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._threshold, self._slope = state["threshold"], state["slope"]
        self._stride = state["stride"]
        self._many = None if state["many"] is None else (state["many"][0], state["many"][1])
        self._few = None if state["few"] is None else (state["few"][0], state["few"][1])
