"""SIDCo's thresholds: quantiles of fitted sparsity-inducing distributions, in stages.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems",
MLSys 2021, algorithm 1 and equations (4) to (11), (14) to (16).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from threading import local
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import (
    Array,
    Moments,
    Selection,
    exceedances,
    numel_of,
    select,
)
from gradstats.primitives.arrays import as_numpy, flat_blocks, is_tensor, wide_dtype
from gradstats.primitives.blocks import BLOCK
from gradstats.primitives.histogram import bin_edges
from gradstats.primitives.moments import rounded_sums
from gradstats.primitives.ratio import check_count, check_number, shown
from gradstats.primitives.select import keep
from gradstats.primitives.tails import BITS, Tails, tails
from gradstats.statistics.stages import (
    MOST_STAGES,
    Quantile,
    exponential,
    gamma_closed,
    gamma_exact,
    genpareto,
    genpareto_parameters,
    most_stages,
    run_stages,
    stage_ratios,
    worth_collecting,
)
from gradstats.thresholds.base import Estimator, Found

__all__ = ["SIDCoE", "SIDCoGP", "SIDCoP"]

Adaptation: TypeAlias = Literal["corrected", "paper", "program", "program-3"]
_ADAPTATIONS: tuple[Adaptation, ...] = get_args(Adaptation)
_FEW = 1 << 12
"""Elements up to which sorting them costs less than bins to count them in."""
_MANY = 1 << 21
"""Elements from which one histogram costs less than the passes of the stages."""
_ROUGH = 1 << 12
"""Elements below which they are summed themselves: of so few the sums of a histogram are too rough."""
_CELLS = 2.0**-7
"""Width of some four cells of a histogram, as a share of the magnitudes in them."""
_ROOM = local()
_FROM_COUNTS = ("paper", "program", "program-3")
"""Adaptations that learn from the counts of past steps."""


def _wide(m: Moments, threshold: float) -> bool:
    """Tell whether what reaches a threshold spreads over so many cells of a histogram that their middles stand for it.

    Of magnitudes that are all but equal, a model's threshold is among them; that of the middles may lie above them all.
    """
    return min(math.sqrt(m.variance), m.mean - threshold) > _CELLS * m.mean


def _sorted(x: Array) -> Tails:
    """Return the sums over the tails of a gradient of few elements, on any device."""
    values = np.abs(as_numpy(x).reshape(-1).astype(np.float64))
    values = np.sort(values[np.isfinite(values) & (values > 0)])
    return Tails.of_cells(values, values, np.ones_like(values))


def _room(size: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return this thread's memory for positions and values: new memory costs more than to copy from it."""
    room: tuple[NDArray[np.int32], NDArray[np.float32]] | None = getattr(_ROOM, "arrays", None)
    if room is None or room[0].size < size:
        room = _ROOM.arrays = np.empty(size, np.int32), np.empty(size, np.float32)
    return room


class SIDCo(Estimator):
    """Multi-stage threshold: each stage adds a quantile of a model of the excesses over the last threshold.

    Parameters
    ----------
    stages : int or {"corrected", "paper", "program", "program-3"}
        A fixed number of stages M, 1 to 64, or the rule that adapts it.
    first_ratio : float
        Share δ₁ of the non-zero elements that the first of several stages aims to keep, in (0, 1).
    interval : int
        Steps Q between adaptations, at least 1.
    tolerance : float or (float, float)
        Relative error ε of the mean k̂ over Q steps that ``"paper"`` and the programs accept; a pair is (ε_L, ε_H),
        below and above.

    Notes
    -----
    Source: SIDCo, algorithm 1. No fixed M is right for all gradients: on tails heavier than the model k̂ falls as M
    grows, on lighter ones (error feedback) it rises. ``"paper"`` (Adapt_Stages) assumes the second and sticks at M = 1
    on the first. ``"program"`` and ``"program-3"`` are modes −2 and −3 of the authors' code: a stage less where too
    many were kept and one more where too few, until the sign of both is turned round, by −2 when the mean k̂ is
    further off than Q steps before, by −3 unless it has moved towards k from outside the tolerance. Where nothing
    changes from step to step, −2 sticks at M = 1 too. ``"corrected"`` computes k̂(M) for every M from one histogram
    every Q steps and takes the best.

    Differs from the paper: exact zeros are a point mass π₀, so the model is fitted to the non-zero elements and asked
    for δ/(1−π₀); thresholds and excesses are of |g|, where the text subtracts from the signed vector; mean k̂ is over
    the Q values added. `docs/concepts/errata.md` has the list.

    Of 2²¹ elements and more, stages that 4,096 elements or more reach are taken from one histogram where there are
    more than two (of SIDCo-E, three, of SIDCo-GP, one), and wherever ``"corrected"`` takes one to adapt. Thresholds of
    gradients of half precision are then those of direct sums, and those of continuous gradients within 0.05 % at
    ratios from 0.001 on. Clipped gradients, those with subnormal numbers and those of which a few elements make up the
    sum of squares are summed directly. Where two numbers of stages keep equally near to k, the histogram may
    take the other one; where float32 holds few different numbers, as those of bfloat16, a stage that ends near one may
    take it or leave it.
    """

    def __init__(
        self,
        stages: int | Adaptation = "corrected",
        first_ratio: float = 0.25,
        interval: int = 5,
        tolerance: float | tuple[float, float] = 0.2,
    ) -> None:
        if isinstance(stages, str) and stages not in _ADAPTATIONS:
            raise InputError(
                f"stages must be a number or one of {', '.join(_ADAPTATIONS)}, not {shown(stages)}"
            )
        pair = tolerance if isinstance(tolerance, tuple) else (tolerance, tolerance)
        if len(pair) != 2:
            raise InputError(
                f"tolerance must be a number or a pair of them, not {len(pair)} numbers"
            )
        low, high = (check_number(each, "tolerance", 0, math.inf, "(]") for each in pair)
        self.adaptation = stages if isinstance(stages, str) else None
        self.stages = (
            1 if isinstance(stages, str) else check_count(stages, "stages", 1, MOST_STAGES)
        )
        self.first_ratio = check_number(first_ratio, "first_ratio", 0, 1)
        self.interval = check_count(interval, "interval")
        self.tolerance = (low, high)
        self._step = 0
        self._kept = 0.0
        self._direction = 1
        self._last = 0.0

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        """Whether the adaptation learns from the counts of past steps."""
        return self.adaptation in _FROM_COUNTS

    def _models(self) -> tuple[Quantile, Quantile]:
        """Return the quantile functions of the first stage and of the later ones."""
        raise NotImplementedError

    _needs_log: ClassVar[bool] = False
    _pareto: ClassVar[bool] = True
    """Whether the later stages are a generalized Pareto; otherwise they are exponential."""
    _passes: ClassVar[int] = 2
    """Stages up to which a pass for each costs less than one histogram of a large gradient."""

    def _find(self, x: Array, k: int) -> Found:
        adapts = self.adaptation == "corrected" and self._step % self.interval == 0
        self._step += 1
        few = not is_tensor(x) and numel_of(x) <= min(BLOCK, _MANY - 1)
        view = flat_blocks(x, BLOCK) if few else None
        if view is not None and view[0].dtype.type is np.float32:
            return self._find_in_block(view[0], k, adapts)
        return self._find_in_passes(x, k, adapts)

    def _find_in_block(self, x: NDArray[np.float32], k: int, adapts: bool) -> Found:
        """Run the stages in one compiled loop: of so few elements calls cost as much as passes."""
        from gradstats.thresholds.sidco_loops import block_stages

        whole = self._whole(x) if self._needs_log or (adapts and x.size <= _FEW) else None
        count, one, several = -1, 0.0, 0.0
        ends: list[dict[str, Any]] = []
        if whole is not None:
            if k >= whole.count:
                return Found(0.0, {"stages": []})
            if adapts and x.size <= _FEW:
                self.stages, adapts = self._best_stages(x, None, whole, k), False
            ends = self._ends(whole, k)
            count, (one, several) = whole.count, (end["threshold"] for end in ends)
        fits = np.empty((MOST_STAGES, 5))
        indices, values = _room(x.size)
        self.stages, run, found = block_stages(
            x,
            k,
            self.stages,
            adapts,
            self.first_ratio,
            self._pareto,
            count,
            one,
            several,
            bin_edges(BITS),
            fits,
            indices,
            values,
        )
        if not run:
            return Found(0.0, {"stages": []})
        seen: list[dict[str, Any]] = []
        for count, ratio, threshold, one, two in fits[:run].tolist():
            parameters = genpareto_parameters(one, two) if self._pareto else {"scale": one}
            seen.append({"count": int(count), "ratio": ratio, "threshold": threshold, **parameters})
        if ends:
            seen[0] = ends[self.stages > 1]
        chosen = Selection(indices[:found].astype(np.int64), values[:found].copy())
        return Found(seen[-1]["threshold"], {"stages": seen}, chosen)

    def _find_in_passes(self, x: Array, k: int, adapts: bool) -> Found:
        """Run the stages pass by pass, or with one histogram."""
        large = numel_of(x) >= _MANY and wide_dtype(x) != np.float64
        if large and (adapts or self.stages > self._passes):
            once = tails(x)
            limit = once.limit(_ROUGH)
            if limit > 0 and _wide(whole := once.whole(log=self._needs_log), 0.0):
                found = self._run_stages(x, k, adapts, whole, once)
                if found.threshold < limit:
                    return found
        return self._run_stages(x, k, adapts, self._whole(x))

    def _run_stages(
        self, x: Array, k: int, adapts: bool, whole: Moments, once: Tails | None = None
    ) -> Found:
        """Run the stages, those that enough elements reach with a histogram where there is one."""
        if k >= whole.count:  # every non-zero element is asked for
            return Found(0.0, {"stages": []})
        if adapts:
            self.stages = self._best_stages(x, once, whole, k)
        ratios = stage_ratios(k / whole.count, self.stages, self.first_ratio)
        seen: list[dict[str, Any]] = []
        survivors: Selection | None = None

        def above(threshold: float) -> Moments:
            nonlocal survivors
            if survivors is None:
                share = seen[-1]["count"] * seen[-1]["ratio"] / numel_of(x)
                m = None if once is None else once.above(threshold)
                if m is not None and m.count >= _ROUGH and _wide(m, threshold):
                    return m
                if once is not None or worth_collecting(share, len(ratios) - len(seen)):
                    survivors = select(x, threshold)
            return self._above(x if survivors is None else survivors.values, threshold)

        for stage in run_stages(self._models(), ratios, whole, above):
            seen.append(stage)  # `above` reads what has been seen so far
        threshold = seen[-1]["threshold"]
        chosen = None if survivors is None else keep(survivors, threshold)
        return Found(threshold, {"stages": seen}, chosen)

    def _ends(self, whole: Moments, k: int) -> list[dict[str, Any]]:
        """Return a first stage that is the only one, and the first of several."""
        split = (stage_ratios(k / whole.count, stages, self.first_ratio) for stages in (1, 2))
        return [next(run_stages(self._models(), s, whole, lambda _: whole)) for s in split]

    def _whole(self, x: Array) -> Moments:
        return rounded_sums(x, log=True) if self._needs_log else self._above(x, 0.0)

    def _above(self, x: Array, threshold: float) -> Moments:
        """Return what the model of a later stage needs of the magnitudes that reach a threshold."""
        return exceedances(x, threshold)

    def _best_stages(self, x: Array, cells: Tails | None, whole: Moments, k: int) -> int:
        """Return the number of stages whose threshold keeps the nearest to k."""
        one, several = (end["threshold"] for end in self._ends(whole, k))
        direct = cells is None
        if cells is None and numel_of(x) <= _FEW and wide_dtype(x) != np.float64:
            cells = _sorted(x)
        if cells is None:
            cells = tails(x, min(one, several))  # no later threshold is below
        if is_tensor(cells.sums):
            return self._best_by_rows(cells, whole, k)
        from gradstats.thresholds.sidco_loops import best_stages

        m = self._above(x, several) if direct else cells.above(several)
        first = self.first_ratio
        second = m.count, m.sum_abs, m.sum_squares
        arrays = cells.left, cells.right, cells.sums
        return int(best_stages(*arrays, whole.count, k, first, one, several, second, self._pareto))

    def _best_by_rows(self, cells: Tails, whole: Moments, k: int) -> int:
        """Return the same, of cells on a device, of which a look-up moves a row."""
        split = partial(stage_ratios, k / whole.count, first=self.first_ratio)
        above = cache(cells.above)  # the first of several stages is always the same
        best, least = 1, math.inf
        for stages in range(1, most_stages(k / whole.count) + 1):
            *_, last = run_stages(self._models(), split(stages), whole, above)
            kept = above(last["threshold"]).count
            error = abs(math.log(max(kept, 0.5) / k))
            if error < least:
                best, least = stages, error
        return best

    def _observe(self, kept: int, k: int, numel: int) -> None:
        if self.adaptation not in _FROM_COUNTS:
            return
        self._kept += kept / k
        if self._step % self.interval:
            return
        quality, self._kept = self._kept / self.interval, 0.0
        (low, high), last, self._last = self.tolerance, self._last, quality
        if self.adaptation == "program":
            worse = abs(quality - 1) > abs(last - 1)
        else:  # no better than in the direction of the last step, or the last step was right
            better = (last < 1 - low and quality > last) or (last > 1 + high and quality < last)
            worse = not better
        if worse and last > 0 and self.adaptation != "paper":
            self._direction = -self._direction
        if quality > 1 + high:
            self.stages -= self._direction
        elif quality < 1 - low:
            self.stages += self._direction
        self.stages = min(max(self.stages, 1), most_stages(k / numel))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of stages and what its adaptation depends on."""
        return {
            "stages": self.stages,
            "step": self._step,
            "kept": self._kept,
            "direction": self._direction,
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.stages, self._step, self._kept = state["stages"], state["step"], state["kept"]
        self._direction, self._last = state["direction"], state["last"]


class SIDCoE(SIDCo):
    """SIDCo-E: an exponential at each stage.

    Notes
    -----
    Source: SIDCo, eq. 10 and 11. Differs in eq. 11, which sums |g| − η: its mean is meant. Stages and their adaptation
    are those of :class:`SIDCo`.
    """

    name = "sidco-e"
    _pareto = False
    _passes = 3  # a mean alone is summed in the time of reading

    def _models(self) -> tuple[Quantile, Quantile]:
        return exponential, exponential

    def _above(self, x: Array, threshold: float) -> Moments:
        return rounded_sums(x, threshold)


class SIDCoGP(SIDCo):
    """SIDCo-GP: a gamma distribution at the first stage, then generalized Pareto.

    Parameters
    ----------
    *args : object
        Parameters of :class:`SIDCo`: stages, first_ratio, interval, tolerance.
    gamma : {"exact", "closed"}
        Quantile of the first stage: the inverse of the incomplete gamma function (eq. 14), or the paper's closed form
        (eq. 15), in which negative values become 0.
    **options : object
        Parameters of :class:`SIDCo` by name.

    Notes
    -----
    Source: SIDCo, eq. 7 to 9 and 14 to 16. Differs by default from the closed form, an upper bound for shapes up to 1
    and thresholds beyond the scale, and far off elsewhere; and from algorithm 1, which divides by σ̂ where eq. 9 has the
    variance. The histogram that decides the number of stages gives the same shape, Σ ln|g| included.
    """

    name = "sidco-gp"
    _needs_log = True
    _passes = 1  # a pass that sums logarithms and one more cost more

    def __init__(
        self, *args: Any, gamma: Literal["exact", "closed"] = "exact", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if not isinstance(gamma, str) or gamma not in ("exact", "closed"):
            raise InputError(f"gamma must be exact or closed, not {shown(gamma)}")
        self.gamma = gamma

    def _models(self) -> tuple[Quantile, Quantile]:
        return (gamma_exact if self.gamma == "exact" else gamma_closed), genpareto


class SIDCoP(SIDCo):
    """SIDCo-P: a generalized Pareto distribution at each stage, by moments.

    Notes
    -----
    Source: SIDCo, eq. 7 to 9. Differs from algorithm 1, which divides by σ̂ where eq. 9 has the variance. Stages and
    their adaptation are those of :class:`SIDCo`.
    """

    name = "sidco-p"

    def _models(self) -> tuple[Quantile, Quantile]:
        return genpareto, genpareto
