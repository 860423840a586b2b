"""How far a fitted model is from the data. Effect sizes, not p-values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats._fit import Fit
from gradstats.primitives import Array
from gradstats.primitives._array import check, flat_chunks
from gradstats.thresholds import target_count

__all__ = ["TAIL_RATIOS", "Goodness", "goodness", "sorted_magnitudes"]

TAIL_RATIOS = (0.1, 0.01, 0.001)
"""Kept fractions at which the tail error is taken, where at least ten elements lie beyond."""

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Goodness:
    """Distances of a fit from its data.

    Attributes
    ----------
    nll : mean negative log-likelihood per finite element (nats), the point mass at zero included.
    aic : Akaike's criterion, 2·parameters + 2·n·nll.
    ks : Kolmogorov distance between the magnitudes' distribution functions. It says nothing about the tail.
    tail_error : largest |ln(η_model/η_exact)| over :data:`TAIL_RATIOS`; 0.69 is a factor of two.
    """

    nll: float
    aic: float
    ks: float
    tail_error: float


def sorted_magnitudes(x: Array) -> NDArray[Any]:
    """Return the finite non-zero magnitudes of `x`, ascending, float32 (float64 for float64)."""
    x = check(x)
    parts = []
    for _, chunk in flat_chunks(x):
        magnitude = np.abs(chunk)
        parts.append(magnitude[np.isfinite(magnitude) & (magnitude > 0)])
    values = np.concatenate(parts) if parts else np.empty(0, np.float32)
    values.sort()
    return values


def goodness(fit: Fit, ordered: NDArray[Any], ratios: Sequence[float] = TAIL_RATIOS) -> Goodness:
    """Measure a fit against its data.

    Parameters
    ----------
    fit : of the same gradient.
    ordered : its :func:`sorted_magnitudes`, ascending (n,).
    ratios : for the tail error, fractions of all elements.
    """
    n = ordered.size
    log_density, distance = 0.0, 0.0
    dist = fit.dist
    for start in range(0, n, _BLOCK):
        block = ordered[start : start + _BLOCK].astype(np.float64)
        log_density += float(dist.logpdf(block).sum())
        model = 1 - 2 * dist.sf(block)
        ranks = np.arange(start, start + block.size)
        distance = max(
            distance, float((model - ranks / n).max()), float(((ranks + 1) / n - model).max())
        )
    zero = fit.zero_fraction
    entropy = -sum(p * math.log(p) for p in (zero, 1 - zero) if p > 0)
    nll = entropy - (1 - zero) * log_density / n
    finite = fit.moments.numel - fit.moments.nonfinite
    return Goodness(
        nll=nll,
        aic=2 * fit.n_params + 2 * finite * nll,
        ks=(1 - zero) * distance,
        tail_error=_tail_error(fit, ordered, finite, ratios),
    )


def _tail_error(fit: Fit, ordered: NDArray[Any], finite: int, ratios: Sequence[float]) -> float:
    worst = float("nan")
    for ratio in ratios:
        k = target_count(ratio, finite)
        if not 10 <= k <= ordered.size:
            continue
        predicted = fit.threshold(ratio)
        error = abs(math.log(predicted / float(ordered[-k]))) if predicted > 0 else math.inf
        worst = error if math.isnan(worst) else max(worst, error)
    return worst
