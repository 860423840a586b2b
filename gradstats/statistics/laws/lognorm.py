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

    def rule(mean: float, mean_square: float) -> dict[str, float]:
        square = math.log(mean_square / mean**2)
        # mean = scale·exp(s²/2), and mean square/mean² = exp(s²)
        return {"s": math.sqrt(square), "scale": mean * math.exp(-square / 2)}

    params = rule(m.mean, m.mean_square)
    s = params["s"]
    # the docstring's condition, (exp(4s²) − 1)/n above 0.1², without a power that overflows
    flags = (Flag.TAIL,) if 4 * s * s > math.log1p(0.01 * m.count) else ()
    # E[xʳ] = exp(r²s²/2) at scale 1; exp(709) is the largest that float64 holds
    stderr = delta_method(rule, lambda r: math.exp(min(r * r * s * s / 2, 700)), m)
    return Solution(params, stderr, flags)


LAW = Law(
    name="lognorm",
    label="log-normal",
    magnitude=lognorm,
    signed=double_lognorm,
    solvers={"closed": by_logarithms, "moments": by_moments, "mle": by_logarithms},
    control=True,
)
