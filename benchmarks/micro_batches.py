"""Micro-batches of a regression whose per-sample gradients are known, and the interval of their noise scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradstats.hooks.noise import noise_ends
from gradstats.statistics.noise import noise_and_signal

__all__ = ["ask_noise", "population", "truth"]

Generator = np.random.Generator
Values = NDArray[np.float64]


def population(kind: str, samples: int = 512, width: int = 30) -> Values:
    """Return the gradients of all samples of a linear regression, the whole data set: (samples, width)."""
    rng = np.random.default_rng(7)
    shape = samples, width
    inputs = rng.standard_t(4, shape) if kind == "heavy" else rng.standard_normal(shape)
    errors = inputs @ (0.3 * rng.standard_normal(width)) + rng.standard_normal(samples)
    gradients: Values = 2 * errors[:, None] * inputs
    return gradients


def truth(gradients: Values) -> float:
    """Return tr Σ ÷ ‖G‖² of a data set, exactly."""
    mean = gradients.mean(0)
    return float(np.square(gradients - mean).sum(1).mean() / (mean @ mean))


def ask_noise(
    kind: str, micro: int, batch: int, n: int, rng: Generator
) -> dict[str, tuple[float, float, float]]:
    """Ask for the noise scale and the cosine after n steps of so many micro-batches, drawn with replacement."""
    gradients = population(kind)
    drawn = gradients[rng.integers(0, len(gradients), (n, micro, batch))].mean(2)
    squares, of_sum = np.square(drawn).sum((1, 2)), np.square(drawn.sum(1)).sum(1)
    found = [noise_and_signal(s, t, micro) for s, t in zip(squares, of_sum, strict=True)]
    low, high = noise_ends(*np.array(found).T)
    scale = truth(gradients)
    return {"noise scale": (batch * low, batch * high, scale)}
