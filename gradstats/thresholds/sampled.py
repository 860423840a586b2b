"""DGC's threshold: an exact top-k of a small sample."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives import Array, kth_largest, numel_of, select
from gradstats.primitives.arrays import torch_index
from gradstats.primitives.moments import count_above
from gradstats.primitives.ratio import check_number
from gradstats.primitives.select import keep
from gradstats.thresholds.base import RandomEstimator, Result

__all__ = ["DGC"]


class DGC(RandomEstimator):
    """The k-th largest magnitude of a 1 % sample, refined once if far too many elements reach it.

    Parameters
    ----------
    sample_ratio : float
        Fraction of the elements sampled, in (0, 1].
    tolerance : float
        Re-select when k̂ > tolerance · k; at least 1.
    seed : int
        Seed of the sampling.

    Notes
    -----
    Source: Lin et al., ICLR 2018, section 3. If more than `tolerance` · k elements reach the threshold, the exact k-th
    largest of them replaces it (hierarchical re-selection). Too few elements stay too few, as in the paper.

    Differs from the paper in the sample: one element, at random, of each run of 1/`sample_ratio` consecutive ones, so
    that every region of the gradient is represented and no element is drawn twice.

    A sample of s elements estimates k with a standard deviation of about √(k·d/s), ±60 % of k at k = 270 and 1 %: the
    estimate is noisy for small gradients by construction.
    """

    name = "dgc"

    def __init__(self, sample_ratio: float = 0.01, tolerance: float = 4 / 3, seed: int = 0) -> None:
        super().__init__(seed)
        self.sample_ratio = check_number(sample_ratio, "sample_ratio", 0, 1, "(]")
        self.tolerance = check_number(tolerance, "tolerance", 1, math.inf, "[]")

    def _sample_indices(self, numel: int) -> NDArray[np.int64]:
        """Return the positions of one random element of each run."""
        run = max(1, round(min(1 / self.sample_ratio, 2.0**62)))
        starts = np.arange(0, numel, run)
        picks = starts + self._generator.integers(0, run, size=starts.size)
        return picks[picks < numel]

    def find(self, x: Array, k: int) -> Result:
        """Find the k-th largest of a sample, or of what reaches it where that is too much."""
        numel = numel_of(x)
        indices = self._sample_indices(numel)
        if indices.size == 0:  # the one run's pick fell beyond a tiny gradient's end
            indices = np.zeros(1, np.int64)
        flat = x.reshape(-1)
        sample = flat[torch_index(indices, x)]
        sampled_k = max(1, round(k * indices.size / numel))
        threshold = kth_largest(sample, sampled_k)
        candidates = select(x, threshold)
        found = len(candidates)
        reselected = found > self.tolerance * k
        if reselected:
            # infinite elements are always among them, and no threshold leaves them out
            reselected = count_above(candidates.values, 0.0) > self.tolerance * k
        if reselected:
            threshold = kth_largest(candidates.values, k)
            candidates = keep(candidates, threshold)
        details = {
            "sample": int(indices.size),
            "candidates": found,
            "reselected": reselected,
        }
        return Result(threshold, details, candidates)
