"""Each threshold rule in a few lines of float64 NumPy, straight from the papers; slow and obvious."""

from __future__ import annotations

import numpy as np


def exact(x, k):
    return np.sort(np.abs(x))[::-1][k - 1]


def sidco_e(x, k, stages, first=0.25):
    g = np.abs(np.asarray(x, np.float64).ravel())
    g = g[g > 0]
    ratio = k / g.size
    if ratio >= 1:
        return 0.0
    if stages == 1 or ratio >= first:
        ratios = [ratio]
    else:
        ratios = [first] + [(ratio / first) ** (1 / (stages - 1))] * (stages - 1)
    eta = 0.0
    for delta in ratios:
        g = g[g >= eta]
        if g.size == 0:
            break
        eta = eta + np.mean(g - eta) * np.log(1 / delta)
    return eta
