"""How much of a gradient a compressor leaves out, beside what the theory allows, and beside random elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradstats.errors import InputError
from gradstats.primitives.ratio import check_ratio

__all__ = ["Contraction", "contraction", "random_ratio"]


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
    # in float64, as squares of small float32 numbers would vanish
    g, c = gradient.double(), sent.double()
    energy = float(g.square().sum())
    fraction = int(sent.count_nonzero()) / max(1, sent.numel())
    left = float((c - g).square().sum()) / energy if energy > 0 else math.nan
    return Contraction(left, fraction, 1 - ratio, 1 - fraction)


def random_ratio(
    total: torch.Tensor,
    sent: torch.Tensor,
    count: int,
    generator: torch.Generator | None = None,
) -> float:
    """Return what was left of a sum, divided by what as many random elements would have left.

    Parameters
    ----------
    total : tensor, shape (d,)
        Sum, or mean, of the ranks' accumulated gradients of a layer.
    sent : tensor, shape (d,)
        Sum, or mean, of what the ranks sent of it.
    count : int
        Number of elements k that each rank sent, from 0 to d.
    generator : torch.Generator, optional
        Source of one random draw of k elements, on the CPU, as published. By default the expectation over all draws
        is taken, (1 − k/d)·‖total‖².

    Returns
    -------
    float
        δ_l, at most 1 where the assumption holds; NaN where the random elements leave nothing.

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), assumption 1 and eq. 21, whose formulas the available text has lost.

    Examples
    --------
    >>> import torch
    >>> random_ratio(torch.tensor([3.0, -1.0, 1.0, 1.0]), torch.tensor([3.0, 0.0, 0.0, 0.0]), 1)
    0.3333333333333333
    """
    x = total.double()
    missed = float((x - sent.double()).square().sum())
    energy = float(x.square().sum())
    if generator is None:
        random = (1 - count / max(1, x.numel())) * energy
    else:
        # what the random choice leaves out
        drawn = torch.randperm(x.numel(), generator=generator)[count:]
        random = float(x[drawn.to(x.device)].square().sum())
    return missed / random if random > 0 else math.nan
