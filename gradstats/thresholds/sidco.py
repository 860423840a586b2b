"""SIDCo's thresholds: quantiles of fitted sparsity-inducing distributions, in stages.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems",
MLSys 2021. Algorithm 1 stands here: Sparsify's loop is :func:`run_stages`, what surrounds it :class:`SIDCo`, and
Adapt_Stages ``SIDCo.observe`` and :func:`best_stages`. Thresh_Estimation, equations (4) to (11) and (14) to (16), is
in :mod:`gradstats.statistics.stages`, and what a gradient answers in :mod:`gradstats.thresholds.views`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from gradstats.errors import InputError
from gradstats.primitives import Array, numel_of
from gradstats.primitives.arrays import flat_blocks, is_tensor, wide_dtype
from gradstats.primitives.blocks import BLOCK
from gradstats.primitives.ratio import check_count, check_number, shown
from gradstats.statistics.stages import (
    MOST_STAGES,
    Sums,
    check_range,
    gamma_closed,
    gamma_exact,
    genpareto_parameters,
    most_stages,
    split_ratio,
    stage_excess,
)
from gradstats.thresholds.base import Estimator, Result
from gradstats.thresholds.views import Cells, Gradient, Trial, View, Whole

if TYPE_CHECKING:
    from gradstats.primitives.loops.compiled import Written

__all__ = ["SIDCoE", "SIDCoGP", "SIDCoP"]

Adaptation: TypeAlias = Literal["corrected", "paper", "program", "program-3"]
_ADAPTATIONS: tuple[Adaptation, ...] = get_args(Adaptation)
Gamma: TypeAlias = Literal["exact", "closed"]
_MANY = 1 << 21
"""Elements from which one histogram costs less than the passes of the stages."""
_SOME = 100
"""Gradients of a process whose stages Python runs, some tenths of a millisecond slower, before seconds go to compile
them. A training compiles them before its first step."""
_FROM_COUNTS = ("paper", "program", "program-3")
"""Adaptations that learn from the counts of past steps."""


def run_stages(
    view: View,
    pareto: bool,
    expected: float,
    threshold: float,
    later: float,
    stages: int,
    fits: Written[np.float64],
) -> tuple[int, Any]:
    """Run the stages after the first (algorithm 1, Sparsify); return how many there are with it, and what is selected.

    It ends early when no element reaches a stage's threshold. Compiled as it is for a block, and for cells.

    Parameters
    ----------
    view : View
        The gradient, or cells that stand for it.
    pareto : bool
        Whether the excesses are generalized Pareto; otherwise they are exponential.
    expected : float
        Number of elements that should reach the first threshold.
    threshold : float
        Threshold η₁ of the first stage.
    later : float
        Share δₘ of every later stage.
    stages : int
        Number of stages M.
    fits : ndarray of float64, shape (at least `stages`, 5)
        Written, from the second row on: magnitudes modelled, share of them wanted, threshold, and the law's parameters.
    """
    for m in range(1, stages):  # for each stage m in (1, M)
        # temp = temp − ηₘ₋₁, and what is not above it is filtered out
        sums = view.above(threshold, m, expected, stages - m)
        if sums[0] == 0:
            stages = m
            break
        # ηₘ = Thresh_Estimation(temp, δₘ, DIST), which is an excess over ηₘ₋₁
        excess, one, two = stage_excess(pareto, sums, threshold, later)
        threshold += excess
        expected = sums[0] * later
        fits[m, 0], fits[m, 1], fits[m, 2], fits[m, 3], fits[m, 4] = (
            sums[0],
            later,
            threshold,
            one,
            two,
        )
    return stages, view.selected(threshold)  # g[abs(g) ≥ ηₘ]


def best_stages(
    trial: Trial,
    pareto: bool,
    whole: int,
    k: int,
    first: float,
    one: float,
    fits: Written[np.float64],
) -> int:
    """Return the number of stages whose threshold keeps the nearest to k, of those that the authors' program uses.

    Parameters
    ----------
    trial : Trial
        Cells to look thresholds up in, and the threshold of the first of several stages.
    pareto : bool
        Whether later stages are a generalized Pareto; otherwise they are exponential.
    whole : int
        Number of elements that are not zero.
    k : int
        Number of elements to keep.
    first : float
        Share δ₁ that the first of several stages keeps.
    one : float
        Threshold of a first stage that is the only one.
    fits : ndarray of float64, shape (MOST_STAGES, 5)
        Written, as :func:`run_stages` does.
    """
    # corrected Adapt_Stages: the paper's goes one way, which is wrong for tails heavier than the model
    best, least = 1, math.inf
    for stages in range(1, most_stages(k / whole) + 1):
        many, first_share, later = split_ratio(k / whole, stages, first)
        threshold = trial.several if many > 1 else one
        run, count = run_stages(trial, pareto, whole * first_share, threshold, later, many, fits)
        count = count if run == many else 0  # it ended early because none reaches the threshold
        # half an element stands for none; of equally good numbers of stages the least wins
        error = abs(math.log(max(count, 0.5) / k))
        if error < least:
            best, least = stages, error
    return best


class Algorithm(NamedTuple):
    """The algorithm, as it stands here or as Numba compiles it: the same numbers, to the last bit.

    Attributes
    ----------
    run_stages, best_stages : callable
        The functions of these names; compiled, for the view of a block and for a trial.
    """

    run_stages: Any
    best_stages: Any


class _Gradients:
    """How many gradients more of this process have their stages run by Python."""

    left = _SOME


@cache
def compiled_algorithm() -> Algorithm:
    """Return the algorithm compiled: made when first used, for Numba takes its time to load."""
    from gradstats.primitives.loops.compiled import compiled, unit

    unit(run_stages)  # the trial calls it
    return Algorithm(compiled(nogil=True)(run_stages), compiled(nogil=True)(best_stages))


def warm_up() -> None:
    """Compile the algorithm, or load it from the cache."""
    from gradstats.thresholds.sidco_loops import Block

    # types decide what is compiled, so two elements are as good as any
    algorithm, fits = compiled_algorithm(), np.empty((MOST_STAGES, 5))
    block = Block.of(np.ones(2, np.float32), False)
    trial = block.trial(1.0, 1.0, 1.0)
    algorithm.best_stages(trial, False, 2, 1, 0.25, 1.0, fits)
    algorithm.run_stages(block, False, 2.0, 1.0, 1.0, 1, fits)
    _Gradients.left = 0


_PLAIN = Algorithm(run_stages, best_stages)


def _algorithm() -> Algorithm:
    """Return the algorithm for gradients in memory."""
    return _PLAIN if _Gradients.left > 0 else compiled_algorithm()


# Size: five options of a user, four numbers that adaptation remembers, and what tells three rules apart.
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
        self.clamps = self.adaptation not in _FROM_COUNTS
        self.stages = (
            1 if isinstance(stages, str) else check_count(stages, "stages", 1, MOST_STAGES)
        )
        self.first_ratio = check_number(first_ratio, "first_ratio", 0, 1)
        self.interval = check_count(interval, "interval")
        self.tolerance = (low, high)
        self._step = 0
        self._quality_sum = 0.0
        self._direction = 1
        self._last = 0.0

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        """Whether the adaptation learns from the counts of past steps."""
        return self.adaptation in _FROM_COUNTS

    _pareto: ClassVar[bool] = True
    """Whether the later stages are a generalized Pareto; otherwise they are exponential."""
    _needs_log: ClassVar[bool] = False
    """Whether the first stage is a gamma distribution."""
    _passes: ClassVar[int] = 2
    """Stages up to which a pass for each costs less than one histogram of a large gradient."""

    def find(self, x: Array, k: int) -> Result:
        """Find the threshold stage by stage."""
        # at the first gradient, and every Q from there on
        adapts = self.adaptation == "corrected" and self._step % self.interval == 0
        self._step += 1
        # one block in memory, of which there is a compiled view
        few = not is_tensor(x) and numel_of(x) <= min(BLOCK, _MANY - 1)
        flat = flat_blocks(x, BLOCK) if few else None
        if flat is not None and flat[0].dtype.type is np.float32:
            from gradstats.thresholds.sidco_loops import Block

            _Gradients.left -= 1
            return self._sparsify(Block.of(flat[0], self._pareto), k, adapts)
        # cells are those of float32
        large = numel_of(x) >= _MANY and wide_dtype(x) != np.float64
        if large and (adapts or self.stages > self._passes):
            cells = Cells(x, self._pareto)
            if cells.resolves(0.0, cells.whole(log=False)[0]):
                result = self._sparsify(cells, k, adapts)
                # otherwise the last threshold is in doubt, and all is done again by direct sums
                if cells.resolves(result.threshold):
                    return result
        return self._sparsify(Whole(x, self._pareto), k, adapts)

    def _sparsify(self, view: Gradient, k: int, adapts: bool) -> Result:
        """Find a threshold by algorithm 1, Sparsify, and select where that costs little."""
        whole, logs = view.whole(self._needs_log)
        count = whole[0]
        if k >= count:  # every non-zero element is asked for
            return Result(0.0, {"stages": []})
        ratio = k / count  # δ/(1−π₀): exact zeros are a point mass
        if adapts:
            self.stages = self._best_stages(view, whole, logs, k)
        # a ratio of δ₁ or more needs one stage, whatever M is
        stages, first_share, later = split_ratio(ratio, self.stages, self.first_ratio)
        threshold, parameters = self._first(whole, logs, first_share)  # stage m = 1, with η₀ = 0
        stage_fits = [{"count": count, "ratio": first_share, "threshold": threshold, **parameters}]
        # Whole and Cells make passes over arrays of any kind, which compiled code cannot call
        algorithm = _PLAIN if isinstance(view, Whole) else _algorithm()
        fits = np.empty((stages, 5))
        stages, chosen = algorithm.run_stages(
            view, self._pareto, count * first_share, threshold, later, stages, fits
        )
        # Row 0 is the first stage. The loop leaves the last stage's threshold in `threshold`, which is the result.
        for count, share, threshold, one, two in fits[1:stages].tolist() if stages > 1 else ():
            fit = {"count": int(count), "ratio": share, "threshold": threshold}
            stage_fits.append(fit | self._parameters(one, two))
        return Result(threshold, {"stages": stage_fits}, view.selection(chosen))

    def _first(self, whole: Sums, logs: float, ratio: float) -> tuple[float, dict[str, Any]]:
        """Return the quantile of the first stage's law, and its parameters."""
        check_range(whole, self._pareto)
        excess, one, two = stage_excess(self._pareto, whole, 0.0, ratio)
        return excess, self._parameters(one, two)

    def _parameters(self, one: float, two: float) -> dict[str, Any]:
        """Return the parameters of a stage's law by name."""
        return genpareto_parameters(one, two) if self._pareto else {"scale": one}

    def _best_stages(self, view: Gradient, whole: Sums, logs: float, k: int) -> int:
        """Return the number of stages whose threshold keeps the nearest to k, as corrected Adapt_Stages."""
        ratio, first = k / whole[0], self.first_ratio
        one, several = (self._first(whole, logs, share)[0] for share in (ratio, first))
        # the share of a second stage is the largest where there are most stages
        trial = view.trial(one, several, split_ratio(ratio, most_stages(ratio), first)[2])
        algorithm = _PLAIN if is_tensor(trial.tails.sums) else _algorithm()
        fits = np.empty((MOST_STAGES, 5))
        return int(algorithm.best_stages(trial, self._pareto, whole[0], k, first, one, fits))

    def observe(self, kept: int, k: int, numel: int) -> None:
        """Adapt the number of stages, where that goes by counts."""
        if self.adaptation not in _FROM_COUNTS:
            return
        self._quality_sum += kept / k
        if self._step % self.interval:
            return
        quality, self._quality_sum = self._quality_sum / self.interval, 0.0
        (low, high), last, self._last = self.tolerance, self._last, quality
        if self.adaptation == "program":
            worse = abs(quality - 1) > abs(last - 1)
        else:  # no better than in the direction of the last step, or the last step was right
            better = (last < 1 - low and quality > last) or (last > 1 + high and quality < last)
            worse = not better
        # before the second interval there is nothing to compare with
        if worse and last > 0 and self.adaptation != "paper":
            self._direction = -self._direction
        # as published with direction 1: a stage less where too many are kept
        if quality > 1 + high:
            self.stages -= self._direction
        elif quality < 1 - low:
            self.stages += self._direction
        self.stages = min(max(self.stages, 1), most_stages(k / numel))

    def warm_up(self) -> None:
        """Compile the stages, which Python runs for the first gradients of a process otherwise."""
        warm_up()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of stages and what its adaptation depends on."""
        return {
            "stages": self.stages,
            "step": self._step,
            "kept": self._quality_sum,
            "direction": self._direction,
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.stages, self._step, self._quality_sum = state["stages"], state["step"], state["kept"]
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

    def __init__(self, *args: Any, gamma: Gamma = "exact", **options: Any) -> None:
        super().__init__(*args, **options)
        if not isinstance(gamma, str) or gamma not in get_args(Gamma):
            raise InputError(f"gamma must be exact or closed, not {shown(gamma)}")
        self.gamma = gamma

    def _first(self, whole: Sums, logs: float, ratio: float) -> tuple[float, dict[str, Any]]:
        check_range(whole, squares=False)
        count, total, _ = whole
        quantile = gamma_exact if self.gamma == "exact" else gamma_closed
        return quantile(total / count, logs / count, ratio)


class SIDCoP(SIDCo):
    """SIDCo-P: a generalized Pareto distribution at each stage, by moments.

    Notes
    -----
    Source: SIDCo, eq. 7 to 9. Differs from algorithm 1, which divides by σ̂ where eq. 9 has the variance. Stages and
    their adaptation are those of :class:`SIDCo`.
    """

    name = "sidco-p"
