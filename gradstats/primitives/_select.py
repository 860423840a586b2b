"""Selection: the elements at or above a threshold, and the threshold that keeps exactly k."""

from __future__ import annotations

import sys

import numpy as np

from gradstats.errors import InputError
from gradstats.primitives._array import (
    Array,
    Selection,
    check,
    flat_chunks,
    is_tensor,
    numel_of,
    wide_dtype,
)

__all__ = ["kth_largest", "select"]


def select(x: Array, threshold: float) -> Selection:
    """Return the elements with |x| ≥ threshold, in index order.

    Exact zeros and NaN are never selected, not even at threshold 0: they carry nothing. An infinite element is.

    Parameters
    ----------
    x : array of any shape (flattened in C order), any floating dtype, any device.
    threshold : magnitude η ≥ 0, in the gradient's unit; compared in float32 for float32 and narrower.

    Returns
    -------
    Selection
        Indices (int64) and values; NumPy for NumPy, torch on the same device for torch.

    Raises
    ------
    InputError
        If the threshold is negative or NaN.

    Examples
    --------
    >>> import numpy as np
    >>> s = select(np.array([0.1, -3.0, 0.0, 2.0]), 2.0)
    >>> s.indices.tolist(), s.values.tolist()
    ([1, 3], [-3.0, 2.0])
    """
    if not threshold >= 0:
        raise InputError(f"a threshold must be a non-negative magnitude, not {threshold}")
    x = check(x)
    if is_tensor(x) and x.device.type != "cpu":
        flat = x.reshape(-1)
        magnitude = flat.abs().float()
        found = ((magnitude >= threshold) & (magnitude > 0)).nonzero().reshape(-1)
        return Selection(found, flat[found])
    parts: list[np.ndarray] = []
    for offset, chunk in flat_chunks(x):
        magnitude = np.abs(chunk)
        kept = np.flatnonzero((magnitude >= threshold) if threshold > 0 else (magnitude > 0))
        if kept.size:
            kept += offset
            parts.append(kept)
    indices = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if is_tensor(x):
        torch = sys.modules["torch"]
        positions = torch.from_numpy(indices)
        return Selection(positions, x.reshape(-1)[positions])
    return Selection(indices, x.reshape(-1)[indices])


def kth_largest(x: Array, k: int) -> float:
    """Return the k-th largest finite magnitude, 1 ≤ k; 0 if fewer than k elements are finite.

    An exact order statistic. The copy it partitions is the one large temporary of this module.
    """
    if k < 1:
        raise InputError(f"k must be at least 1, not {k}")
    x = check(x)
    magnitude = np.empty(numel_of(x), wide_dtype(x))
    for offset, chunk in flat_chunks(x):
        np.abs(chunk, out=magnitude[offset : offset + chunk.size])
    finite = np.isfinite(magnitude)
    if not finite.all():
        magnitude = magnitude[finite]
    if k > magnitude.size:
        return 0.0
    magnitude.partition(magnitude.size - k)
    return float(magnitude[magnitude.size - k])
