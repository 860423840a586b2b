"""What every threshold estimator is: an object that turns a gradient and a ratio into a threshold."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gradstats.errors import InputError
from gradstats.primitives import Array, Selection, numel_of
from gradstats.primitives import select as select_elements
from gradstats.primitives.arrays import check, wide_dtype
from gradstats.primitives.ratio import target_count

__all__ = ["Estimate", "Estimator", "Found", "RandomEstimator", "target_count"]


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


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule found: η, what it saw, and the selection if that came with it."""

    threshold: float
    details: Mapping[str, Any] = field(default_factory=dict)
    selection: Selection | None = None


class Estimator(ABC):
    """A threshold rule. The object in a table is the object a compressor runs.

    Stateful rules (sampling, reuse, feedback, warm start) keep their state in the instance: use one instance per
    gradient stream, and :meth:`state_dict` to checkpoint it.
    """

    name: ClassVar[str]
    feedback: ClassVar[bool] = False
    """Whether the rule learns from how many elements its last threshold kept."""

    @abstractmethod
    def _find(self, x: Array, k: int) -> Found:
        """Find the threshold of a checked, non-empty gradient."""

    def _observe(self, kept: int, k: int, numel: int) -> None:  # noqa: B027 — most rules learn nothing
        """Learn that the last threshold kept `kept` elements of `numel`, `k` wanted."""

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
        return self._run(x, ratio, select=self.feedback)[0]

    def select(self, x: Array, ratio: float) -> tuple[Estimate, Selection]:
        """Estimate the threshold and return the elements it keeps, often in one pass together.

        Parameters and errors are those of :meth:`estimate`; the selection is that of
        :func:`gradstats.select` at the threshold.
        """
        estimate, selection = self._run(x, ratio, select=True)
        assert selection is not None
        return estimate, selection

    def _run(self, x: Array, ratio: float, *, select: bool) -> tuple[Estimate, Selection | None]:
        x = check(x)
        numel = numel_of(x)
        k = target_count(ratio, numel)
        if numel == 0:
            return Estimate(0.0, 0, 0), select_elements(x, 0.0) if select else None
        found = self._find(x, k)
        if math.isnan(found.threshold) or found.threshold < 0:
            raise AssertionError(f"{self.name} produced the threshold {found.threshold}")
        # Rounded once, here, so that every later comparison (NumPy, torch, another device) is the same.
        largest = float(np.finfo(wide_dtype(x)).max)
        threshold = float(wide_dtype(x).type(min(found.threshold, largest)))
        estimate = Estimate(threshold, k, numel, found.details)
        if not select:
            return estimate, None
        selection = found.selection
        if selection is None:
            selection = select_elements(x, threshold)
        self._observe(len(selection), k, numel)
        return estimate, selection

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
