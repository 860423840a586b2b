"""SIDCo's thresholds: quantiles of fitted sparsity-inducing distributions, in stages.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training
Systems", MLSys 2021, algorithm 1 and equations (4)–(11).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradstats.errors import InputError
from gradstats.primitives import Array, moments
from gradstats.thresholds.base import Estimator

__all__ = ["SIDCoE", "stage_ratios"]


def stage_ratios(ratio: float, stages: int, first: float = 0.25) -> list[float]:
    """Split a ratio over stages: δ₁ = `first`, then equal shares whose product is `ratio` (SIDCo section 2.4).

    A ratio at or above `first` needs one stage only.

    Examples
    --------
    >>> [round(r, 4) for r in stage_ratios(0.001, 3)]
    [0.25, 0.0632, 0.0632]
    """
    if stages < 1:
        raise InputError(f"stages must be at least 1, not {stages}")
    if stages == 1 or ratio >= first:
        return [ratio]
    return [first] + [(ratio / first) ** (1 / (stages - 1))] * (stages - 1)


class SIDCoE(Estimator):
    """Multi-stage exponential threshold (SIDCo-E) with a fixed number of stages.

    Stage 1 models |g| as exponential and takes its δ₁ quantile; each later stage models the excesses over the
    last threshold the same way (eq. 10 and 11, with the mean of |g| − η that eq. 11 intends). Exact zeros are a
    point mass π₀: the model is fitted to the non-zero elements and asked for δ/(1−π₀).

    Parameters
    ----------
    stages : number of stages M ≥ 1. One pass over the gradient each.
    first_ratio : δ₁, the share of elements the first stage aims to keep.

    Notes
    -----
    A fixed M is right for some gradients and far off for others: on tails heavier than exponential k̂
    falls as M grows, on lighter ones it rises. Compare several in ``gradstats quality``.
    """

    name = "sidco-e"

    def __init__(self, stages: int = 3, first_ratio: float = 0.25) -> None:
        if not 0 < first_ratio < 1:
            raise InputError(f"first_ratio must be in (0, 1), not {first_ratio}")
        stage_ratios(1.0, stages)  # raises on a bad count
        self.stages = stages
        self.first_ratio = first_ratio

    def _threshold(self, x: Array, k: int) -> tuple[float, Mapping[str, Any]]:
        threshold = 0.0
        seen: list[dict[str, float]] = []
        ratios: list[float] = []
        stage = 0
        while stage == 0 or stage < len(ratios):
            m = moments(x, above=threshold, log=False)
            if stage == 0:
                if k >= m.count:  # every non-zero element is asked for
                    break
                ratios = stage_ratios(k / m.count, self.stages, self.first_ratio)
            if m.count == 0:  # the last threshold exceeds every element: nothing left to model
                break
            scale = m.mean - threshold
            threshold += scale * math.log(1 / ratios[stage])
            seen.append(
                {"count": m.count, "scale": scale, "ratio": ratios[stage], "threshold": threshold}
            )
            stage += 1
        return threshold, {"stages": seen}
