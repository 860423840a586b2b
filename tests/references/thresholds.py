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


def genpareto_excess(excesses, delta):
    mean, var = np.mean(excesses), np.var(excesses)
    xi = 0.5 * (1 - mean**2 / var)
    beta = 0.5 * mean * (mean**2 / var + 1)
    return beta / xi * (delta**-xi - 1)


def sidco_staged(x, k, stages, first_stage, first=0.25):
    """SIDCo-GP (first_stage a gamma quantile) and SIDCo-P (first_stage None)."""
    g = np.abs(np.asarray(x, np.float64).ravel())
    g = g[g > 0]
    ratio = k / g.size
    if ratio >= 1:
        return 0.0
    ratios = [ratio]
    if stages > 1 and ratio < first:
        ratios = [first] + [(ratio / first) ** (1 / (stages - 1))] * (stages - 1)
    eta = 0.0
    for m, delta in enumerate(ratios):
        g = g[g >= eta]
        if g.size == 0:
            break
        gamma = m == 0 and first_stage is not None
        eta = first_stage(g, delta) if gamma else eta + genpareto_excess(g - eta, delta)
    return eta


def gamma_quantile(g, delta):
    from scipy import stats

    s = np.log(g.mean()) - np.log(g).mean()
    a = (3 - s + np.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return stats.gamma(a, scale=g.mean() / a).isf(delta)


def gaussiank(x, k, loops=3):
    from scipy import stats

    x = np.asarray(x, np.float64).ravel()
    eta = max(stats.norm(x.mean(), x.std()).isf(k / x.size / 2), 0)
    sent = eta  # without a count, the quantile
    for _ in range(loops):
        sent = eta  # the authors' program sends what it counted, and rescales afterwards
        kept = np.count_nonzero((np.abs(x) >= np.float32(eta)) & (x != 0))
        if kept < 2 * k / 3:
            eta *= 0.5
        elif kept > 4 * k / 3:
            eta *= 1.5
        else:
            break
    return sent


def redsync_published(x, k):
    g = np.abs(np.asarray(x, np.float64).ravel())
    mean, left, right = g[g > 0].mean(), 0.0, 1.0
    eta = mean
    while right - left > 0.2:
        r = left + (right - left) / 2
        eta = mean + r * (g.max() - mean)
        kept = np.count_nonzero(g >= np.float32(eta))
        if k < kept < 2 * k:
            break
        if kept < k / 2:
            right = r
        else:
            left = r
    return eta


def dgc_of_its_program(x, ratio, rng):
    """Return how many elements DGC's authors' program sends (synxlin/deep-gradient-compression), with its defaults."""
    g = np.abs(np.asarray(x, np.float64))
    wanted, stride = int(np.ceil(g.size * ratio)), 1
    least = max(np.ceil(0.01 * g.size), np.ceil(2 / ratio))
    whole = g.size <= np.ceil(2 / ratio)
    if not whole:
        stride = int(np.ceil(g.size / least / 32)) * 32 + 1
        while g.size // stride < least:
            stride -= 8
    sample = np.sort(g[rng.integers(stride) :: stride])
    threshold = sample[-int(np.ceil((g.size // stride) * ratio))]
    for _ in range(0 if whole else 10):
        if np.sum(g >= threshold) >= 0.8 * wanted:
            break
        threshold *= 0.8
    # more than 1.3 of what is wanted are sorted, others cut by position: either way there are no more
    return min(int(np.sum(g >= threshold)), wanted)
