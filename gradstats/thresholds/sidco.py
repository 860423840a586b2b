"""SIDCo's thresholds: quantiles of fitted sparsity-inducing distributions, in stages.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training
Systems", MLSys 2021, algorithm 1 and equations (4)–(11), (14)–(16).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias

from gradstats.errors import InputError
from gradstats.primitives import (
    Array,
    Histogram,
    Selection,
    exceedances,
    histogram,
    moments,
    numel_of,
    select,
)
from gradstats.statistics.stages import (
    HistogramMoments,
    Quantile,
    exponential,
    gamma_closed,
    gamma_exact,
    genpareto,
    most_stages,
    stage_ratios,
)
from gradstats.thresholds.base import Estimator, Found

__all__ = ["SIDCoE", "SIDCoGP", "SIDCoP"]

Adaptation: TypeAlias = Literal["corrected", "paper", "program"]


_ADAPTATIONS = ("corrected", "paper", "program")


def _worth_copying(share: float, passes: int) -> bool:
    """Tell whether copying a share of the elements pays for the passes still to come.

    In passes over the data, measured: a selection costs 1 + 180 times its share, a pass over a copy nothing. A copy of
    more than 3 % would take more than a tenth of the gradient's memory.
    """
    return share <= 0.03 and 1 + 180 * share < passes


class SIDCo(Estimator):
    """Multi-stage threshold: each stage takes a quantile of a model of the excesses over the last threshold.

    Exact zeros are a point mass π₀: the model is fitted to the non-zero elements and asked for δ/(1−π₀).

    Parameters
    ----------
    stages : a fixed number M ≥ 1, or an adaptation rule: ``"corrected"``, ``"paper"``, ``"program"``.
    first_ratio : δ₁, the share of the non-zero elements that the first of several stages aims to keep.
    interval : Q, steps between adaptations.
    tolerance : ε, the relative error of the mean k̂ over Q steps that ``"paper"`` and ``"program"`` accept; a pair for
        (ε_L, ε_H), below and above.

    Notes
    -----
    A fixed M is right for some gradients and far off for others: on tails heavier than the model k̂ falls as M
    grows, on lighter ones (error feedback) it rises. ``"paper"`` assumes the second and sticks at M = 1 on the first
    (algorithm 1, Adapt_Stages). ``"program"`` turns round when the last move made things worse, as the authors'
    code does in modes −2 and −3. ``"corrected"`` evaluates k̂(M) for every M from one histogram pass every Q steps
    and takes the best: it has no direction to get wrong.
    """

    def __init__(
        self,
        stages: int | Adaptation = "corrected",
        first_ratio: float = 0.25,
        interval: int = 5,
        tolerance: float | tuple[float, float] = 0.2,
    ) -> None:
        if not 0 < first_ratio < 1:
            raise InputError(f"first_ratio must be in (0, 1), not {first_ratio}")
        if isinstance(stages, str) and stages not in _ADAPTATIONS:
            raise InputError(f"stages must be a number or one of {', '.join(_ADAPTATIONS)}")
        if not isinstance(stages, str) and stages < 1:
            raise InputError(f"stages must be at least 1, not {stages}")
        low, high = tolerance if isinstance(tolerance, tuple) else (tolerance, tolerance)
        if interval < 1 or not (low > 0 and high > 0):
            raise InputError("interval must be at least 1 and tolerance positive")
        self.adaptation = stages if isinstance(stages, str) else None
        self.stages = 1 if isinstance(stages, str) else stages
        self.first_ratio = first_ratio
        self.interval = interval
        self.tolerance = (low, high)
        self._step = 0
        self._kept = 0.0
        self._direction = 1
        self._error = math.inf

    feedback_rules: ClassVar[tuple[str, ...]] = ("paper", "program")

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        """Whether the adaptation learns from the counts of past steps."""
        return self.adaptation in self.feedback_rules

    def _models(self) -> tuple[Quantile, Quantile]:
        """Return the quantile functions of the first stage and of the later ones."""
        raise NotImplementedError

    _needs_log: ClassVar[bool] = False

    def _find(self, x: Array, k: int) -> Found:
        if self.adaptation == "corrected" and self._step % self.interval == 0:
            self.stages = self._best_stages(histogram(x, 10), k)
        self._step += 1
        first, later = self._models()
        m = moments(x) if self._needs_log else exceedances(x, 0.0)
        if k >= m.count:  # every non-zero element is asked for
            return Found(0.0, {"stages": []})
        ratios = stage_ratios(k / m.count, self.stages, self.first_ratio)
        threshold, seen = 0.0, []
        survivors: Selection | None = None
        for stage, ratio in enumerate(ratios):
            if stage > 0:
                expected = m.count * ratios[stage - 1] / m.numel
                if survivors is None and _worth_copying(expected, len(ratios) - stage):
                    survivors = select(x, threshold)
                m = exceedances(x if survivors is None else survivors.values, threshold)
                m = replace(m, numel=numel_of(x))
            if m.count == 0:  # the last threshold exceeds every element: nothing left to model
                break
            excess, parameters = (first if stage == 0 else later)(m, threshold, ratio)
            threshold += excess
            seen.append({"count": m.count, "ratio": ratio, "threshold": threshold, **parameters})
        return Found(threshold, {"stages": seen})

    def _best_stages(self, h: Histogram, k: int) -> int:
        """Return the number of stages whose threshold keeps nearest to k, by the histogram alone."""
        tables = HistogramMoments(h)
        whole = tables.above(0.0)
        if k >= whole.count:
            return 1
        first, later = self._models()
        best, least = 1, math.inf
        for stages in range(1, most_stages(k / whole.count) + 1):
            threshold, m = 0.0, whole
            for stage, ratio in enumerate(stage_ratios(k / whole.count, stages, self.first_ratio)):
                if m.count == 0:
                    break
                threshold += (first if stage == 0 else later)(m, threshold, ratio)[0]
                m = tables.above(threshold)
            error = abs(math.log(max(m.count, 0.5) / k))
            if error < least:
                best, least = stages, error
        return best

    def _observe(self, kept: int, k: int, numel: int) -> None:
        if self.adaptation not in self.feedback_rules:
            return
        self._kept += kept / k
        if self._step % self.interval:
            return
        quality, self._kept = self._kept / self.interval, 0.0
        error = abs(quality - 1)
        if error > self.tolerance[quality > 1]:
            if self.adaptation == "paper":
                self._direction = -1 if quality > 1 else 1
            elif error > self._error:
                self._direction = -self._direction
            limit = most_stages(k / numel)
            self.stages = min(max(self.stages + self._direction, 1), limit)
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        """Return the stage count and what its adaptation follows."""
        return {
            "stages": self.stages,
            "step": self._step,
            "kept": self._kept,
            "direction": self._direction,
            "error": self._error,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.stages, self._step, self._kept = state["stages"], state["step"], state["kept"]
        self._direction, self._error = state["direction"], state["error"]


class SIDCoE(SIDCo):
    """SIDCo-E: exponential at each stage (eq. 10 and 11, with the mean of |g| − η that eq. 11 intends)."""

    name = "sidco-e"

    def _models(self) -> tuple[Quantile, Quantile]:
        return exponential, exponential


class SIDCoGP(SIDCo):
    """SIDCo-GP: gamma first, then generalized Pareto (eq. 7–9, 14–16).

    Parameters
    ----------
    gamma : the first stage's quantile: ``"exact"``, the inverse of the incomplete gamma function (eq. 14), or
        ``"closed"``, the paper's closed form (eq. 15), an upper bound for shapes up to 1 and thresholds beyond the
        scale, far off elsewhere; negative values become 0.
    options : of :class:`SIDCo`: stages, first_ratio, interval, tolerance.
    """

    name = "sidco-gp"
    _needs_log = True

    def __init__(
        self, *args: Any, gamma: Literal["exact", "closed"] = "exact", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if gamma not in ("exact", "closed"):
            raise InputError(f"gamma must be exact or closed, not {gamma!r}")
        self.gamma = gamma

    def _models(self) -> tuple[Quantile, Quantile]:
        return (gamma_exact if self.gamma == "exact" else gamma_closed), genpareto


class SIDCoP(SIDCo):
    """SIDCo-P: generalized Pareto at each stage, by moments (eq. 7–9)."""

    name = "sidco-p"

    def _models(self) -> tuple[Quantile, Quantile]:
        return genpareto, genpareto
