"""What every threshold estimator is: an object that turns a gradient and a ratio into a threshold."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gradstats.errors import InputError
from gradstats.primitives import Array, numel_of
from gradstats.primitives._array import check, wide_dtype

__all__ = ["Estimate", "Estimator", "target_count"]


def target_count(ratio: float, numel: int) -> int:
    """Return k = max(1, round(ratio · numel)), at most `numel`; 0 for an empty gradient.

    Raises
    ------
    InputError
        If the ratio is not in (0, 1].
    """
    if not 0 < ratio <= 1:
        raise InputError(f"ratio must be in (0, 1], the fraction of elements kept, not {ratio}")
    return min(max(1, round(ratio * numel)), numel)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A threshold and how it came about.

    Attributes
    ----------
    threshold : η ≥ 0 in the gradient's unit, representable in the precision it is compared in
        (float32; float64 for float64 gradients). Elements with |g| ≥ η and g ≠ 0 are kept.
    k : the target count.
    numel : elements of the gradient.
    details : what the estimator saw on the way (moments, stages, flags); keys are the estimator's own.
    """

    threshold: float
    k: int
    numel: int
    details: Mapping[str, Any] = field(default_factory=dict)


class Estimator(ABC):
    """A threshold rule. The object in a table is the object a compressor runs.

    Stateful rules (sampling, reuse, feedback) keep their state in the instance: use one instance per gradient
    stream, and :meth:`state_dict` to checkpoint it.
    """

    name: ClassVar[str]

    @abstractmethod
    def _threshold(self, x: Array, k: int) -> tuple[float, Mapping[str, Any]]:
        """Return (η, details) for a non-empty gradient."""

    def estimate(self, x: Array, ratio: float) -> Estimate:
        """Estimate the threshold that keeps `ratio` of the elements of `x`.

        Parameters
        ----------
        x : array of any shape, NumPy or torch, float16, bfloat16, float32 or float64.
        ratio : kept fraction k/d, in (0, 1].

        Raises
        ------
        InputError
            For a ratio outside (0, 1] or an array that is not dense floating point.
        """
        x = check(x)
        numel = numel_of(x)
        k = target_count(ratio, numel)
        if numel == 0:
            return Estimate(0.0, 0, 0)
        threshold, details = self._threshold(x, k)
        if math.isnan(threshold) or threshold < 0:
            raise AssertionError(f"{self.name} produced the threshold {threshold}")
        # Rounded once, here, so that every later comparison (NumPy, torch, another device) is the same.
        return Estimate(float(wide_dtype(x).type(threshold)), k, numel, details)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to continue bit-identically (empty for a stateless rule)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if state:
            raise InputError(f"{self.name} keeps no state, got {sorted(state)}")


class RandomEstimator(Estimator):
    """A rule that draws samples, from a generator of its own: nobody's global state is touched."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        return {"generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the generator's state."""
        self._generator.bit_generator.state = state["generator"]
