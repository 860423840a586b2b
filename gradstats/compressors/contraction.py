"""The k-contraction on which the convergence of sparse compressors rests, measured on a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradstats.errors import InputError
from gradstats.primitives.ratio import check_ratio

__all__ = ["Contraction", "contraction"]


@dataclass(frozen=True, slots=True)
class Contraction:
    """How much of a gradient's energy a compressor left out, and what the theory allows.

    Attributes
    ----------
    left : float
        ‖C(g) − g‖²/‖g‖²; NaN for a gradient of zero.
    kept : float
        Share δ̂ = k̂/d of the elements that were sent.
    bound : float
        1 − δ, for the ratio that was asked for.
    measured_bound : float
        1 − δ̂, for the share that was sent.
    """

    left: float
    kept: float
    bound: float
    measured_bound: float

    @property
    def holds(self) -> bool:
        """Whether ‖C(g) − g‖² ≤ (1 − δ)‖g‖²; true for a gradient of zero."""
        return not self.left > self.bound

    @property
    def holds_measured(self) -> bool:
        """Whether ‖C(g) − g‖² ≤ (1 − δ̂)‖g‖²; true for a gradient of zero."""
        return not self.left > self.measured_bound


def contraction(gradient: torch.Tensor, sent: torch.Tensor, ratio: float) -> Contraction:
    """Measure the k-contraction of one compression.

    Parameters
    ----------
    gradient : tensor, shape (d,)
        Gradient g that was compressed, memory included.
    sent : tensor, shape (d,)
        What was sent of it, C(g); zero where nothing was.
    ratio : float
        Kept fraction δ = k/d that was asked for, in (0, 1].

    Returns
    -------
    Contraction
        Both sides of the inequality.

    Raises
    ------
    InputError
        If the shapes differ or the ratio is outside (0, 1].

    Notes
    -----
    Source: SIDCo (Abdelmoniem et al. 2021), eq. 13, and eq. 42 and 43 with the measured δ̂. An estimated threshold that
    keeps too few elements may break the first and never the second, as whatever reaches a threshold is larger than
    what does not. Random-k has equality in expectation.

    Examples
    --------
    >>> import torch
    >>> g = torch.tensor([3.0, -1.0, 1.0, 1.0])
    >>> c = contraction(g, torch.tensor([3.0, 0.0, 0.0, 0.0]), 0.25)
    >>> c.left, c.measured_bound, c.holds
    (0.25, 0.75, True)
    """
    check_ratio(ratio)
    if gradient.shape != sent.shape:
        raise InputError(
            f"what was sent has shape {tuple(sent.shape)}, not {tuple(gradient.shape)}"
        )
    g, c = gradient.double(), sent.double()
    energy = float(g.square().sum())
    kept = int(sent.count_nonzero()) / max(1, sent.numel())
    left = float((c - g).square().sum()) / energy if energy > 0 else math.nan
    return Contraction(left, kept, 1 - ratio, 1 - kept)
