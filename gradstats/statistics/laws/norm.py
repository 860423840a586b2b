"""Normal: half-normal magnitudes."""

from __future__ import annotations

import math

from scipy.stats import halfnorm, norm

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.laws.law import Law
from gradstats.statistics.solution import Solution

__all__ = ["LAW", "by_mean_square"]


def by_mean_square(m: Magnitudes) -> Solution:
    """Take the root mean square.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    scale = math.sqrt(m.mean_square)
    # inverse Fisher information: scale²/(2n)
    return Solution({"scale": scale}, {"scale": scale / math.sqrt(2 * m.count)})


LAW = Law(
    name="norm",
    label="normal",
    magnitude=halfnorm,
    signed=norm,
    solvers={"closed": by_mean_square, "moments": by_mean_square, "mle": by_mean_square},
    control=True,
)
