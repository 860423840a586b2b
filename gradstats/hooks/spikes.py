"""What is odd in the numbers of a step: norms that spike, and values that ask for a capture."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

__all__ = ["FEWEST", "Spikes", "Trigger"]

FEWEST = 10
"""Norms of a layer from which on a spike is told from them."""

_LEAST_SPREAD = 0.05
"""Smallest deviation of a logarithmic norm that a robust z divides by: steady layers move by less."""


class Spikes:
    """Norms that lie far above those of the steps before.

    Parameters
    ----------
    layers : iterable of str
        Names of the parameters.
    window : int
        Number of steps before that tell a spike, at least :data:`FEWEST`.
    limit : float
        Robust z from which on a parameter is said to spike.
    """

    def __init__(self, layers: Iterable[str], window: int, limit: float) -> None:
        self._limit = limit
        self._whole = deque[float](maxlen=window)
        self._layers = {name: deque[float](maxlen=window) for name in layers}

    def find(self, norm: float, norms: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
        """Return what spikes in a step, whose norms are among those before the next one.

        Parameters
        ----------
        norm : float
            Norm of the whole gradient.
        norms : mapping of str to float
            Norms of parameters.

        Returns
        -------
        values : dict of str to float
            Robust z of the whole as ``spike``, and of parameters that reach the limit as ``spike/LAYER``.
        blame : str or None
            The spiking parameter that adds most to the squared norm; None if none spikes.
        """
        values, excess = {}, {}
        if (past := _past(self._whole, norm)) is not None:
            values["spike"] = past[0]
        for name, each in norms.items():
            past = _past(self._layers[name], each)
            if past is not None and past[0] >= self._limit:
                z, middle = past
                values[f"spike/{name}"] = z
                excess[name] = each**2 - math.exp(2 * middle)
        return values, max(excess, key=excess.__getitem__, default=None)


def _past(logs: deque[float], norm: float) -> tuple[float, float] | None:
    """Return a norm's robust z among those before, and the median of their logarithms; None where they are too few."""
    if not norm > 0 or math.isinf(norm):
        return None
    log, past = math.log(norm), None
    if len(logs) >= FEWEST:
        middle = float(np.median(logs))
        spread = 1.4826 * float(np.median(np.abs(np.array(logs) - middle)))
        past = (log - middle) / max(spread, _LEAST_SPREAD), middle
    logs.append(log)
    return past


class Trigger:
    """Values of a step that ask for the following steps to be captured.

    Parameters
    ----------
    limits : mapping of str to float
        Values from which on they ask, by name; a name stands for the layers' values, too.
    following : int
        Number of steps that are asked for.
    """

    def __init__(self, limits: Mapping[str, float], following: int) -> None:
        self._limits = limits
        self._following = following
        self._armed = False
        # the first step that is not asked for any more
        self._until = -1

    def look_at(self, values: Mapping[str, float]) -> None:
        """Ask for steps if a value has reached its limit.

        Parameters
        ----------
        values : mapping of str to float
            Values of a step, by name or ``name/LAYER``.
        """
        limits = self._limits
        if any(limits.get(n.partition("/")[0], math.inf) <= v for n, v in values.items()):
            self._armed = True

    def asks_for(self, step: int) -> bool:
        """Tell whether a step is asked for; the first one after the values counts as the first.

        Parameters
        ----------
        step : int
            Number of the step.
        """
        if self._armed:
            self._until, self._armed = max(self._until, step + self._following), False
        return step < self._until
