"""What happens when a gradient is not finite: one policy, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch

from gradstats.errors import InputError, NonFiniteGradientError, warn
from gradstats.hooks.gradient import Pair
from gradstats.primitives.ratio import shown

__all__ = ["Guard", "NonFinite", "as_flag", "count_bad"]

NonFinite: TypeAlias = Literal["raise", "skip", "zero", "propagate"]

_PATIENCE = 8
"""Steps in a row with a non-finite gradient, hidden by policy, after which a warning says so."""


def count_bad(parts: Sequence[torch.Tensor]) -> int:
    """Return the number of elements that are not finite.

    Parameters
    ----------
    parts : sequence of tensor
        Elements.

    Returns
    -------
    int
        Number of NaN and infinite ones.
    """
    # one pass; a false alarm, sums that overflow, costs one more
    if not parts or torch.isfinite(torch.stack([part.sum() for part in parts]).sum()):
        return 0
    return sum(part.numel() - int(torch.isfinite(part).sum()) for part in parts)


def as_flag(bad: int) -> int:
    """Return a number of elements as it travels to the other ranks: no more than 32 bits.

    Parameters
    ----------
    bad : int
        Number of elements that are not finite.
    """
    return min(bad, 2**31 - 1)


class Guard:
    """The policy for gradients that are not finite.

    Parameters
    ----------
    policy : {"raise", "skip", "zero", "propagate"}, optional
        As :class:`gradstats.hooks.CompressionState` has it.
    scaled : bool
        Whether there is a loss scaler, which a policy left out propagates to.

    Attributes
    ----------
    policy : str
        One of the four.
    hidden : int
        Steps in a row whose problem nobody saw.

    Raises
    ------
    InputError
        If it is no policy.
    """

    def __init__(self, policy: NonFinite | None, scaled: bool) -> None:
        policies = get_args(NonFinite)
        if policy is not None and not (isinstance(policy, str) and policy in policies):
            raise InputError(f"nonfinite must be one of {', '.join(policies)}, not {shown(policy)}")
        # a scaler must see the overflow: raising, or zeros, would keep its scale where it is
        self.policy: NonFinite = policy or ("propagate" if scaled else "raise")
        self.hidden = 0

    @property
    def zeroes(self) -> bool:
        """Whether elements that are not finite count as zero."""
        return self.policy == "zero"

    def refuse(self, problem: str, pairs: Sequence[Pair]) -> float:
        """Raise, or fill the gradients so that the step has no update, or one that a loss scaler skips.

        Parameters
        ----------
        problem : str
            What is wrong.
        pairs : sequence of (parameter, gradient)
            All gradients of the step.

        Returns
        -------
        float
            What the gradients were filled with.

        Raises
        ------
        NonFiniteGradientError
            If the policy is to raise.
        """
        if self.policy == "raise":
            raise NonFiniteGradientError(problem)
        fill = math.inf if self.policy == "propagate" else 0.0
        # on every rank alike: one whose own gradient is finite must not take another step than the others
        for _, gradient in pairs:
            gradient.fill_(fill)
        return fill

    def end_step(self, problem: str) -> None:
        """Count steps whose problem the policy hides, and warn when there were several in a row.

        Parameters
        ----------
        problem : str
            What was wrong in the step; empty if nothing was.
        """
        # "propagate" hides nothing: the update is infinite for all to see
        self.hidden = self.hidden + 1 if problem and self.policy != "propagate" else 0
        # equal, not at least: one warning for each stretch of such steps
        if self.hidden == _PATIENCE:
            warn(
                f"gradients were not finite in {_PATIENCE} steps in a row, and nonfinite={self.policy!r} hides it; "
                "with a loss scaler pass scaler=, so that it lowers its scale"
            )
