"""Power law against log-normal tail: a likelihood ratio that neither a scale nor a spread moves."""

from __future__ import annotations

import math

import numpy as np

from gradstats.primitives.sketch import Magnitudes

__all__ = ["against_lognormal"]

_BLOCKS = 200
"""Most blocks of ranks, evenly in the logarithm, by which the gaps between magnitudes are summed."""


def against_lognormal(m: Magnitudes, first: int, last: int) -> float:
    """Return Vuong's z of a power law against a log-normal over a window of ranks; positive for the power law.

    The gap between the logarithms of the i-th and the next largest magnitude, times i, is exponential. Its mean is the
    same everywhere for a power law (Rényi 1953), and falls towards the largest for a log-normal, like the inverse
    hazard of the normal law. The one free factor of each is fitted.

    Parameters
    ----------
    m : Magnitudes
        Distribution of all non-zero magnitudes.
    first, last : int
        First and last rank of the window, counted from 1.

    Returns
    -------
    float
        z; NaN where the magnitudes of the window do not differ.
    """
    from scipy.special import ndtri

    # whole ranks, of which small ones would repeat
    borders = np.unique(np.rint(np.geomspace(first, last, _BLOCKS + 1)))
    # from the largest down; the rank is that of the last magnitude in a cell, where its gap to the next is
    logs, ranks = np.log(m.middle[::-1]), m.weight[::-1].cumsum()
    inner = (ranks[:-1] >= first) & (ranks[:-1] < last)
    gaps, at = (ranks[:-1] * (logs[:-1] - logs[1:]))[inner], ranks[:-1][inner]
    # ranks from one border up to the next; no rank lies before the first border
    block = np.searchsorted(borders, at, side="right")
    exposure = np.bincount(block, gaps, borders.size + 1)[1 : borders.size]
    events = np.diff(borders)
    # tail share at the geometric middle of each block
    share = np.sqrt(borders[:-1] * borders[1:]) / m.count
    z = ndtri(share)
    # φ(z)/share: the rate of the gaps of a standard normal ln x
    hazard = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) / share
    total = events.sum()
    if not exposure.sum() > 0:
        return math.nan
    # maximum likelihood of an exponential rate: events over (weighted) exposure
    flat, normal = total / exposure.sum(), total / (exposure @ hazard) * hazard
    ratio = float(
        events @ np.log(flat / normal)
    )  # the sums of exposures times hazards are both `total`
    # each gap varies by its own mean, exposure/events
    spread = float(np.sqrt(events @ ((normal - flat) * exposure / events) ** 2))
    return ratio / spread if spread else math.nan
