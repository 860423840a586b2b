"""Selection: the elements at or above a threshold, and the threshold that keeps exactly k."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives._array import (
    Array,
    Selection,
    as_numpy,
    check,
    is_tensor,
    numel_of,
    torch_index,
)
from gradstats.primitives._parallel import BLOCK, map_blocks

__all__ = ["kth_largest", "select", "top_candidates"]

_SAMPLE = 1 << 16
"""Elements sampled at least: the bracket of a small k is otherwise wider than the pass it saves."""


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
        positions = ((magnitude >= threshold) & (magnitude > 0)).nonzero().reshape(-1)
        return Selection(positions, flat[positions])
    parts = map_blocks(lambda offset, block: _select_block(offset, block, threshold), x)
    found = np.concatenate([indices for indices, _ in parts]) if parts else np.empty(0, np.int64)
    if is_tensor(x):
        torch = sys.modules["torch"]
        positions = torch.from_numpy(found)
        # narrower types were widened, so going back to them is exact
        values = torch.from_numpy(_concatenate([v for _, v in parts], np.float32)).to(x.dtype)
        return Selection(positions, values)
    return Selection(
        found, _concatenate([v for _, v in parts], x.dtype).astype(x.dtype, copy=False)
    )


def _concatenate(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _select_block(
    offset: int, block: NDArray[Any], threshold: float
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the positions and values of the block's elements to keep."""
    if block.dtype == np.float64:
        magnitude = np.abs(block)
        kept = np.flatnonzero((magnitude >= threshold) if threshold > 0 else (magnitude > 0))
    else:
        from gradstats.primitives._kernels import block_select

        with np.errstate(over="ignore"):  # beyond float32's range: nothing but infinity reaches it
            low = max(int(np.float32(threshold).view(np.int32)), 1)
        out = _scratch(block.size)
        kept = out[: block_select(block.view(np.int32), np.int32(low), out)].astype(np.int64)
    values = block[kept]
    kept += offset
    return kept, values


_local = threading.local()


def _scratch(size: int) -> NDArray[np.int32]:
    """Return this thread's buffer of positions, reused from block to block."""
    buffer: NDArray[np.int32] | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.size < size:
        buffer = np.empty(max(size, BLOCK), np.int32)
        _local.buffer = buffer
    return buffer


def top_candidates(x: Array, k: int, low: float | None = None) -> tuple[float, Selection]:
    """Return the k-th largest finite magnitude and the selection of everything that reaches it.

    Exact at the price of little more than one pass (after Floyd and Rivest 1975): a threshold surely a bit below
    the answer comes from a sample (or the caller), one streaming pass collects what reaches it, and the exact
    order statistic is taken among those. A bad guess costs another pass, never a wrong answer.

    Parameters
    ----------
    x : checked array of d elements.
    k : 1 ≤ k.
    low : a guess below the answer; from a sample if None.

    Returns
    -------
    threshold : 0 if fewer than k elements are finite and non-zero.
    selection : the elements with |x| ≥ threshold, as :func:`select` returns them (with the infinite ones).
    """
    numel = numel_of(x)
    if k < 1:
        raise InputError(f"k must be at least 1, not {k}")
    slack = 5.0
    while True:
        guess = _sampled_bound(x, k, numel, slack) if low is None else low
        candidates = select(x, guess)
        magnitude = np.abs(as_numpy(candidates.values))
        finite = magnitude[np.isfinite(magnitude)]
        if finite.size >= k:
            break
        if guess == 0:
            return 0.0, candidates
        low, slack = None, slack * 4
    threshold = float(np.partition(finite, finite.size - k)[finite.size - k])
    keep = np.flatnonzero(magnitude >= threshold)
    index = torch_index(keep, candidates.indices)
    return threshold, Selection(candidates.indices[index], candidates.values[index])


def _sampled_bound(x: Array, k: int, numel: int, slack: float) -> float:
    """Return a magnitude that at least k elements reach, `slack` standard deviations sure; 0 if unsure."""
    size = min(numel, max(_SAMPLE, numel // 100))
    stride = max(1, numel // size)
    flat = x.reshape(-1)  # a view, or for strided arrays the copy that sampling them needs
    sample = np.abs(as_numpy(flat[::stride]))
    expected = k * sample.size / numel
    rank = math.ceil(expected + slack * math.sqrt(expected) + slack)
    if rank >= sample.size:
        return 0.0
    bound = float(np.partition(sample, sample.size - rank)[sample.size - rank])
    return bound if math.isfinite(bound) else 0.0


def kth_largest(x: Array, k: int) -> float:
    """Return the k-th largest finite magnitude, 1 ≤ k; 0 if fewer than k elements are finite and non-zero."""
    return top_candidates(check(x), k)[0]
