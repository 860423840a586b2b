"""The kept fraction k/d and the number of elements it asks for."""

from __future__ import annotations

from gradstats.errors import InputError

__all__ = ["RATIOS", "check_ratio", "target_count"]

RATIOS = (0.1, 0.01, 0.001)
"""Kept fractions that tables, reports and benchmarks show by default."""


def check_ratio(ratio: float) -> float:
    """Return a kept fraction unchanged if it is one.

    Parameters
    ----------
    ratio : float
        Kept fraction k/d.

    Raises
    ------
    InputError
        If it is not in (0, 1].
    """
    if not 0 < ratio <= 1:
        raise InputError(f"ratio must be in (0, 1], the fraction of elements kept, not {ratio}")
    return ratio


def target_count(ratio: float, numel: int) -> int:
    """Return k = max(1, round(ratio · numel)), at most `numel`; 0 for an empty gradient.

    Parameters
    ----------
    ratio : float
        Kept fraction k/d, in (0, 1].
    numel : int
        Elements of the gradient, d.

    Raises
    ------
    InputError
        If the ratio is not in (0, 1].
    """
    return min(max(1, round(check_ratio(ratio) * numel)), numel)
