"""How much of a heavy tail is a mixture of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Method, as_magnitudes
from gradstats.statistics.pot.peaks import FEWEST, NAN, Stability, magnitudes_of, stability_at
from gradstats.statistics.solution import FitError, Reason

__all__ = ["Mixture", "mixture"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """How heavy the tail of a gradient is, together and layer by layer.

    Attributes
    ----------
    at : share of the non-zero elements that each shape is fitted to.
    pooled : the largest of all layers' magnitudes.
    normalised : the same after each layer is divided by its mean magnitude; without unit.
    layers : name to the layer's own.
    from_mixing : shape pooled minus normalised: what the layers' different scales add to it.
    """

    at: float
    pooled: Stability
    normalised: Stability
    layers: Mapping[str, Stability]
    from_mixing: float


def mixture(
    layers: Mapping[str, Array | Sketch | Magnitudes], at: float = 0.1, method: Method = "mle"
) -> Mixture:
    """Tell how much of a heavy tail is only a mixture of layers of different scale.

    Fifty Laplace layers whose scales are log-normal with σ = 1.5 have a pooled shape of 0.5 at the top 10 %; each
    divided by its mean magnitude, together −0.01.

    Parameters
    ----------
    layers : name to a gradient, its sketch, or magnitudes. Layers without a non-zero element add nothing.
    at : share of the non-zero elements that each shape is fitted to, in (0, 1].
    method : of :func:`gradstats.fit`.

    Returns
    -------
    Mixture
        With NaN and a status where there are fewer than :data:`FEWEST` exceedances, or no fit.

    Raises
    ------
    FitError
        If no layer has a finite non-zero element.
    InputError
        For no layer, a ratio outside (0, 1], or an unknown method.
    """
    if not layers:
        raise InputError("a mixture needs at least one layer")
    parts = {name: as_magnitudes(layer) for name, layer in layers.items()}
    some = [magnitudes_of(m) for m in parts.values() if m.count]
    if not some:
        raise FitError(Reason.EMPTY)
    pooled = stability_at(_pool(some, [1.0] * len(some)), at, method, FEWEST)
    normalised = stability_at(_pool(some, [m.mean for m in some]), at, method, FEWEST)
    own = {
        name: stability_at(m, at, method, FEWEST)
        if m.count
        else Stability(at, NAN, 0, status=Reason.EMPTY.value)
        for name, m in parts.items()
    }
    return Mixture(at, pooled, normalised, own, pooled.c - normalised.c)


def _pool(parts: Sequence[Magnitudes], units: Sequence[float]) -> Magnitudes:
    """Put magnitudes in their units together; cells of different layers overlap, so their middles stand for them."""
    middle = np.concatenate([m.middle / unit for m, unit in zip(parts, units, strict=True)])
    weight = np.concatenate([m.weight for m in parts])
    order = np.argsort(middle, kind="stable")
    return Magnitudes.from_cells(middle[order], middle[order], weight[order])
