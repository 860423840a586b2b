"""DGC's threshold: an exact top-k of a small sample."""

from __future__ import annotations

import math
import sys
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import Array, Selection, kth_largest, numel_of, select
from gradstats.primitives.arrays import is_tensor, strided, taken
from gradstats.primitives.moments import count_above
from gradstats.primitives.ratio import check_number, shown
from gradstats.primitives.select import keep
from gradstats.thresholds.base import RandomEstimator, Result

__all__ = ["DGC"]


Sampling: TypeAlias = Literal["paper", "program"]
_LOWER, _TIMES = 0.8, 10
"""The program lowers its threshold by this factor while fewer than this share of k are selected, so often at most."""

_OFFSETS = 1 << 16
"""Offsets drawn at most, which repeat after so many runs: few numbers are drawn, and moved to a device."""


class DGC(RandomEstimator):
    """The k-th largest magnitude of a 1 % sample, refined once if far too many elements reach it.

    Parameters
    ----------
    sample_ratio : float
        Fraction of the elements sampled, in (0, 1].
    tolerance : float
        Re-select when k̂ > tolerance · k; at least 1. The program's rule has its own.
    seed : int
        Seed of the sampling.
    rule : {"paper", "program"}
        ``"paper"``: too few elements stay too few. ``"program"`` is the selection of the authors' program, which the
        system has (:func:`gradstats.hooks.systems.dgc`): the sample has two wanted elements at least, the threshold
        falls to 0.8 of itself while fewer than 0.8 k reach it, up to ten times, and of more than k the k largest are
        taken.

    Notes
    -----
    Source: Lin et al., ICLR 2018, section 3. If more than `tolerance` · k elements reach the threshold, the exact k-th
    largest of them replaces it (hierarchical re-selection).

    Differs from the paper in the sample: one element, at random, of each run of 1/`sample_ratio` consecutive ones, so
    that every region of the gradient is represented and no element is drawn twice (places in the runs repeat after
    65,536 of them); the program's rule takes every n-th element, from a random one on, as the program does. Differs
    from the program in which elements go where up to 1.3 k reach the threshold: the smallest, and not the last by
    position.

    A sample of s elements estimates k with a standard deviation of about √(k·d/s), ±60 % of k at k = 270 and 1 %: the
    estimate is noisy for small gradients by construction.
    """

    name = "dgc"

    def __init__(
        self,
        sample_ratio: float = 0.01,
        tolerance: float = 4 / 3,
        seed: int = 0,
        rule: Sampling = "paper",
    ) -> None:
        super().__init__(seed)
        self.sample_ratio = check_number(sample_ratio, "sample_ratio", 0, 1, "(]")
        self.tolerance = check_number(tolerance, "tolerance", 1, math.inf, "[]")
        if not isinstance(rule, str) or rule not in get_args(Sampling):
            raise InputError(f"rule must be paper or program, not {shown(rule)}")
        self.rule = rule

    def _one_of_each_run(self, x: Array, k: int) -> tuple[Array, int]:
        """Return one random element of each run, and how many of them are wanted."""
        numel = numel_of(x)
        # a tiny ratio has an infinite inverse, or one beyond int64
        run = max(1, round(min(1 / self.sample_ratio, 2.0**62)))
        runs = -(-numel // run)
        offsets = self._generator.integers(0, run, size=min(runs, _OFFSETS))
        # the last run may be shorter than the others
        beyond = (runs - 1) * run + int(offsets[(runs - 1) % _OFFSETS]) >= numel
        if beyond and runs == 1:  # of a tiny gradient the first
            offsets, beyond = np.zeros(1, np.int64), False
        sample = taken(x, _positions(x, run, offsets, runs - beyond))
        return sample, max(1, round(k * (runs - beyond) / numel))

    def _every_nth(self, x: Array, k: int) -> tuple[Array, int]:
        """Return the elements that the program samples, and how many of them are wanted."""
        numel = numel_of(x)
        # ⌈2d/k⌉ elements contain two of the wanted ones, on average
        two = -(-2 * numel // k)
        if numel <= two:
            return x, k
        # strides as in the authors' program: odd, near a multiple of 32, and 8 less until the sample is large enough
        least = max(math.ceil(numel * self.sample_ratio), two)
        stride = 32 * math.ceil(numel / least / 32) + 1
        while stride > 8 and numel // stride < least:
            stride -= 8
        start = int(self._generator.integers(stride))
        # ⌈k·s/d⌉, rounded up as there
        sample = strided(x, stride, start)
        # what follows is faster in a copy
        sample = sample.contiguous() if is_tensor(sample) else np.ascontiguousarray(sample)
        return sample, -(-(numel // stride) * k // numel)

    def find(self, x: Array, k: int) -> Result:
        """Find the k-th largest of a sample, or of what reaches it where that is too much."""
        program = self.rule == "program"
        sample, wanted = (self._every_nth if program else self._one_of_each_run)(x, k)
        threshold = kth_largest(sample, wanted)
        candidates = select(x, threshold)
        count = len(candidates)
        if program:
            threshold, candidates = _lowered(x, threshold, candidates, _LOWER * k)
        most = k if program else self.tolerance * k
        reselected = len(candidates) > most
        if reselected:
            # infinite elements are always among them, and no threshold leaves them out
            reselected = count_above(candidates.values, 0.0) > most
        if reselected:
            threshold = kth_largest(candidates.values, k)
            candidates = keep(candidates, threshold)
        details = {
            "sample": numel_of(sample),
            "candidates": count,
            "reselected": reselected,
        }
        return Result(threshold, details, candidates)


def _positions(x: Array, run: int, offsets: NDArray[np.int64], runs: int) -> Array:
    """Return one position of each of the first runs, where the array is: its start, and the next of the offsets."""
    if not is_tensor(x):
        return np.arange(runs) * run + np.resize(offsets, runs)
    torch = sys.modules["torch"]
    there = torch.from_numpy(offsets).to(x.device).repeat(-(-runs // len(offsets)))[:runs]
    positions: Array = torch.arange(runs, device=x.device) * run + there
    return positions


def _lowered(
    x: Array, threshold: float, candidates: Selection, least: float
) -> tuple[float, Selection]:
    """Return a lower threshold with its candidates, where fewer than `least` reach the given one."""
    for _ in range(_TIMES):
        if len(candidates) >= least or threshold == 0:
            break
        threshold *= _LOWER
        candidates = select(x, threshold)
    return threshold, candidates
