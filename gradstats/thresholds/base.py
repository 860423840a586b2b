"""The base of all threshold estimators, which turn a gradient and a ratio into a threshold."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from gradstats.errors import InputError
from gradstats.primitives import Array, Selection, kth_largest, numel_of
from gradstats.primitives import select as select_elements
from gradstats.primitives.arrays import flat_chunks, is_tensor, wide_dtype
from gradstats.primitives.backend import device_code, readable
from gradstats.primitives.ratio import check_seed, shown, target_count
from gradstats.primitives.select import selection_like

_LARGEST = {wide: float(np.finfo(wide).max) for wide in (np.float32, np.float64)}

__all__ = ["Estimate", "Estimator", "RandomEstimator", "Result", "Rule", "check_rule"]

Rule: TypeAlias = Literal["corrected", "paper"]
"""A rule as it works, or as published where that does not."""


def check_rule(rule: str) -> None:
    """Check that there is a rule of this name.

    Parameters
    ----------
    rule : str
        Name to check.

    Raises
    ------
    InputError
        If it is neither ``"corrected"`` nor ``"paper"``.
    """
    if not isinstance(rule, str) or rule not in ("corrected", "paper"):
        raise InputError(f"rule must be corrected or paper, not {shown(rule)}")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A threshold and how it was found.

    Attributes
    ----------
    threshold : float
        Threshold η ≥ 0, in the gradient's unit; elements with |g| ≥ η and g ≠ 0 are kept. It is a number of the
        precision in which it is compared: float32, or float64 for float64 gradients.
    k : int
        Target count.
    numel : int
        Elements of the gradient.
    details : mapping of str to object
        What the estimator saw on the way (moments, stages, flags); each estimator has keys of its own. ``beyond`` is
        the rule's threshold where no element reaches it: `threshold` is then the largest magnitude, or that of a
        published rule, which keeps nothing.
    """

    threshold: float
    k: int
    numel: int
    details: Mapping[str, Any] = field(default_factory=dict)


class Result(NamedTuple):
    """The result of :meth:`Estimator.find`, where there is more to say than the threshold.

    Attributes
    ----------
    threshold : float
        Threshold η ≥ 0 before rounding.
    details : mapping of str to object
        What the estimator saw on the way.
    selection : Selection or None
        Elements at or above the threshold, if finding it gave them; they are otherwise selected in a further pass.
    """

    threshold: float
    details: Mapping[str, Any] = {}  # never written to
    selection: Selection | None = None


class Estimator(ABC):
    """Base of the threshold estimators; tables and compressors run the same objects.

    A rule is a class with a `name` and :meth:`find`. One with state (sampling, reuse, feedback, warm start) keeps it in
    the instance: use one instance per gradient stream, and :meth:`state_dict` to checkpoint it.

    Attributes
    ----------
    name : str
        Name on the command line and in tables.
    feedback : bool
        Whether the rule learns from the number of elements that its last threshold kept, see :meth:`observe`.
    learns_first : bool
        Whether it takes its threshold from the first gradient exactly: tables judge it on the later ones.
    clamps : bool
        Whether a threshold that no element reaches becomes the largest magnitude; a published formula stays as it is.

    Examples
    --------
    >>> class HalfOfTheLargest(Estimator):
    ...     name = "half"
    ...     def find(self, x, k):
    ...         return abs(x).max() / 2
    >>> HalfOfTheLargest().estimate(np.array([1.0, -4.0, 3.0]), 0.1).threshold
    2.0
    """

    name: ClassVar[str]
    feedback: ClassVar[bool] = False
    learns_first: ClassVar[bool] = False
    clamps: bool = True

    @abstractmethod
    def find(self, x: Array, k: int) -> float | Result:
        """Find the threshold of a gradient; what a rule has to say, and all that it has to.

        Called by :meth:`estimate` and :meth:`select`, which have checked the gradient, and round the threshold.

        Parameters
        ----------
        x : array_like
            Gradient of at least one element, any shape, any floating dtype. What lies on the CPU in float32 or float64
            is a NumPy array, also where the caller has a tensor; anything else is as the caller has it.
            :func:`gradstats.moments`, :func:`gradstats.histogram` and :func:`gradstats.select` take all of these. It
            may hold NaN and infinities, and is not to be changed.
        k : int
            Number of elements to keep, from 1 to their number.

        Returns
        -------
        float or Result
            Threshold η ≥ 0, in the gradient's unit; as a :class:`Result` with details, or with the selection.
        """

    def observe(self, kept: int, k: int, numel: int) -> None:  # noqa: B027 — most rules learn nothing
        """Learn how many elements the last threshold kept; nothing by default.

        Called after every selection. A rule that needs it says ``feedback = True``: :meth:`estimate` then selects, too.

        Parameters
        ----------
        kept : int
            Number of elements k̂ that the last threshold kept.
        k : int
            Number that was wanted.
        numel : int
            Number of elements of the gradient.
        """

    def estimate(self, x: Array, ratio: float) -> Estimate:
        """Estimate the threshold that keeps `ratio` of the elements of `x`.

        Parameters
        ----------
        x : array_like
            Gradient of any shape, NumPy or torch, any floating dtype. NaN and infinities are left out.
        ratio : float
            Kept fraction k/d, in (0, 1].

        Returns
        -------
        Estimate
            Threshold and how it was found.

        Raises
        ------
        InputError
            If the ratio is outside (0, 1] or the array is not dense floating point.
        """
        return self._run(x, ratio, select=self.feedback)[0]

    def select(self, x: Array, ratio: float) -> tuple[Estimate, Selection]:
        """Estimate the threshold and return the elements it keeps, often in a single pass.

        Parameters
        ----------
        x : array_like
            Gradient of any shape, NumPy or torch, any floating dtype.
        ratio : float
            Kept fraction k/d, in (0, 1].

        Returns
        -------
        estimate : Estimate
            Threshold and how it was found.
        selection : Selection
            Elements at or above the threshold, as :func:`gradstats.select` returns them.

        Raises
        ------
        InputError
            If the ratio is outside (0, 1] or the array is not dense floating point.
        """
        estimate, selection = self._run(x, ratio, select=True)
        assert selection is not None
        return estimate, selection

    def _run(self, x: Array, ratio: float, *, select: bool) -> tuple[Estimate, Selection | None]:
        # a tensor in memory is read as an array: one kind for every rule, the same bits
        read = readable(x)
        numel = numel_of(read)
        k = target_count(ratio, numel)
        if numel == 0:
            return Estimate(0.0, 0, 0), select_elements(x, 0.0) if select else None
        result = self._result(read, k)
        # rounded once, here, so that every later comparison (NumPy, torch, another device) is the same
        wide = wide_dtype(read).type
        threshold = float(wide(min(result.threshold, _LARGEST[wide])))
        # a copy: the rule's own mapping may be shared, and `beyond` is added
        details = dict(result.details)
        # what reaches a threshold beyond the largest number is not what reaches that
        selection = result.selection if select and result.threshold <= _LARGEST[wide] else None
        if select and selection is None:
            selection = select_elements(read, threshold)
        # of the rule's own threshold, before it is clamped: a rule with feedback learns from that
        count = 0 if selection is None else len(selection)
        if threshold > 0 and not (count if select else _is_reached(read, threshold)):
            details["beyond"] = threshold
            largest = kth_largest(read, 1) if self.clamps else 0.0
            # 0 where no element is finite and non-zero: there is nothing to keep
            if largest > 0:
                threshold = largest
                selection = select_elements(read, threshold) if select else None
        estimate = Estimate(threshold, k, numel, details)
        if selection is None:
            return estimate, None
        self.observe(count, k, numel)
        # selected from the memory of a tensor, and returned as tensors
        if is_tensor(read) or not is_tensor(x):
            return estimate, selection
        return estimate, selection_like(x, selection.indices, selection.values)

    def warm_up(self) -> None:  # noqa: B027 — most rules have nothing more
        """Compile what a training uses and a few thresholds do not; nothing unless a rule says otherwise."""

    def _result(self, x: Array, k: int) -> Result:
        """Return what :meth:`find` found, checked: a rule may be anybody's."""
        answer: Any = self.find(x, k)
        result = answer if isinstance(answer, Result) else Result(answer)
        try:
            threshold = float(result.threshold)
        except (TypeError, ValueError):
            threshold = math.nan
        # negated, so that NaN is refused
        if not threshold >= 0:
            raise InputError(
                f"the rule {self.name!r} found the threshold {shown(result.threshold)}; "
                "find is to return a number of at least 0"
            )
        return result._replace(threshold=threshold)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to continue bit-identically; empty for a rule without state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if state:
            raise InputError(
                f"{self.name} keeps no state, got {sorted(state)}: was it saved by another estimator?"
            )


def _is_reached(x: Array, threshold: float) -> bool:
    """Tell whether an element reaches a threshold; on the CPU the first chunk mostly shows it."""
    if device_code(x) is not None:
        return len(select_elements(x, threshold)) > 0
    return any(len(select_elements(chunk, threshold)) for _, chunk in flat_chunks(x))


class RandomEstimator(Estimator):
    """Base of the estimators that draw samples, from a generator of their own: no global state is touched.

    Parameters
    ----------
    seed : int
        Seed of the generator, from 0 to 2⁶⁴ − 1.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(check_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        return {"generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the generator's state."""
        self._generator.bit_generator.state = state["generator"]
