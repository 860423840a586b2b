"""Log-normal magnitudes with a random sign."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import lognorm

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.laws.law import Law
from gradstats.statistics.laws.moments import delta_method, require_spread
from gradstats.statistics.laws.reflected import Reflected
from gradstats.statistics.solution import Flag, Solution

__all__ = ["LAW", "by_logarithms", "by_moments", "double_lognorm", "double_lognorm_gen"]


class double_lognorm_gen(Reflected):
    """Symmetric distribution whose magnitude is log-normal, :data:`scipy.stats.lognorm` with the same `s`."""

    _magnitude = lognorm


double_lognorm = double_lognorm_gen(name="double_lognorm", shapes="s")


def by_logarithms(m: Magnitudes) -> Solution:
    """Take mean and standard deviation of the logarithms.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)
    s = math.sqrt(m.average((np.log(m.middle) - m.mean_log) ** 2))
    scale = math.exp(m.mean_log)
    root = math.sqrt(m.count)
    # ln x is normal: variances s²/(2n) of s and s²/n of ln scale, which is relative
    return Solution(
        {"s": s, "scale": scale}, {"s": s / root / math.sqrt(2), "scale": scale * s / root}
    )


def by_moments(m: Magnitudes) -> Solution:
    """Match log-normal magnitudes: s² = ln(mean square/mean²).

    Flagged where the mean square of so many elements has a standard error above a tenth, √((exp(4s²) − 1)/n).

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)

    def rule(mean: float, variance: float) -> dict[str, float]:
        square = math.log1p(variance / mean**2)
        # mean = scale·exp(s²/2), and variance/mean² = exp(s²) − 1
        return {"s": math.sqrt(square), "scale": mean * math.exp(-square / 2)}

    params = rule(m.mean, m.variance)
    s = params["s"]
    # the docstring's condition, (exp(4s²) − 1)/n above 0.1², without a power that overflows
    flags = (Flag.TAIL,) if 4 * s * s > math.log1p(0.01 * m.count) else ()
    # exp(s²), at most the number of magnitudes; exp(709) is the largest that float64 holds
    w, more = math.exp(min(s * s, 175)), math.expm1(min(s * s, 175))
    skewness, kurtosis = (w + 2) * math.sqrt(more), w**4 + 2 * w**3 + 3 * w**2 - 3
    return Solution(params, delta_method(rule, skewness, kurtosis, m), flags)


LAW = Law(
    name="lognorm",
    label="log-normal",
    magnitude=lognorm,
    signed=double_lognorm,
    solvers={"closed": by_logarithms, "moments": by_moments, "mle": by_logarithms},
    control=True,
)
