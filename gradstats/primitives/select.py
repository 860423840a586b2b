"""Selection: the elements at or above a threshold, and the threshold that keeps exactly k."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.arrays import (
    Array,
    Selection,
    as_compared,
    as_numpy,
    as_positions,
    check,
    flat_blocks,
    is_tensor,
    narrowed,
    numel_of,
    strided,
    torch_index,
    wide_dtype,
)
from gradstats.primitives.backend import device_code
from gradstats.primitives.blocks import map_runs
from gradstats.primitives.ratio import check_count, check_magnitude

__all__ = ["kth_largest", "select", "top_candidates", "topk"]

_BLOCK = 1 << 18
"""Elements per block. There must always be room for a whole one, so it decides how much memory is reserved."""

_FEW = 1 << 16
"""Elements up to which sorting them is faster than a sample."""
SORTED = 1 << 13
"""Elements up to which sorting them is faster than a histogram."""
_WHOLLY = 1 << 8
"""Elements up to which to sort them all takes less than to find one rank."""
_SHIFT = 20
"""Bits inside a bin of 1/8 octave."""
_MANY, _FINE = 1 << 16, 16
"""Elements from which counting them costs less than sorting, and bits inside a bin of 1/128 octave, which they need."""

_INFINITY = np.int32(0x7F800000)
_LARGEST, _NORMAL = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_SAMPLE = 1 << 15
"""Least number of elements sampled: with fewer, the bracket of a small k costs more than the pass it saves."""


def select(x: Array, threshold: float) -> Selection:
    """Return the elements with |x| ≥ threshold, in index order.

    Exact zeros and NaN are never selected, not even at threshold 0; infinite elements are.

    Parameters
    ----------
    x : array_like
        Gradient of any shape (flattened in C order), floating dtype and device.
    threshold : float
        Magnitude η ≥ 0, in the gradient's unit; compared in float32 unless the gradient is float64.

    Returns
    -------
    Selection
        Positions and values; NumPy for NumPy, torch on the same device for torch.

    Raises
    ------
    InputError
        If the threshold is negative or NaN, or `x` is not a dense floating-point array.

    Examples
    --------
    >>> import numpy as np
    >>> s = select(np.array([0.1, -3.0, 0.0, 2.0]), 2.0)
    >>> s.indices.tolist(), s.values.tolist()
    ([1, 3], [-3.0, 2.0])
    """
    threshold = check_magnitude(threshold)
    x = check(x)
    code = device_code(x)
    if code is not None:
        zero, one = wide_dtype(x).type(0), wide_dtype(x).type(1)
        # the least denormal: at threshold 0 zeros are left out all the same
        least = float(np.nextafter(zero, one))
        return Selection(*code.select(x, max(as_compared(x, threshold), least)))
    # only infinity reaches a threshold beyond float32's range
    low = max(int(narrowed(threshold).view(np.int32)), 1)
    parts = map_runs(lambda run, numel: _select_run(run, numel, threshold, low), x, _BLOCK)
    indices, values = (_concatenate(list(each)) for each in zip(*parts, strict=True))
    return selection_like(x, indices, values)


def selection_like(x: Array, indices: NDArray[np.int64], values: NDArray[Any]) -> Selection:
    """Return a selection in the form and type of the array it is of.

    Parameters
    ----------
    x : array_like
        The array that elements were selected from.
    indices : ndarray of int64, shape (k̂,)
        Their positions.
    values : ndarray, shape (k̂,)
        Their values, of a type as wide as the array's.
    """
    if is_tensor(x):
        torch = sys.modules["torch"]
        # narrower types were widened, so the way back is exact
        tensors = torch.from_numpy(indices), torch.from_numpy(values)
        if x.is_cpu and x.dtype == tensors[1].dtype:
            return Selection(*tensors)
        return Selection(tensors[0].to(x.device), tensors[1].to(x.device, x.dtype))
    return Selection(indices, values.astype(x.dtype, copy=False))


def _concatenate(parts: list[NDArray[Any]]) -> NDArray[Any]:
    # np.concatenate copies a single part, too
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _select_run(
    run: Iterable[tuple[int, NDArray[Any]]], numel: int, threshold: float, low: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the positions and values of the elements to keep in successive blocks."""
    indices, values, count = np.empty(0, np.int64), np.empty(0, np.float32), 0
    first = -1
    wide: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
    for offset, block in run:
        # a run need not begin at 0, and the rate is the run's own
        first = offset if first < 0 else first
        if block.dtype == np.float64:
            magnitude = np.abs(block)
            places = np.flatnonzero((magnitude >= threshold) if threshold > 0 else (magnitude > 0))
            wide.append((places + offset, block[places]))
            continue
        from gradstats.primitives.loops.selection import block_select

        if indices.size - count < block.size:
            # Room at the rate so far, and for the worst block; pages that are never written cost nothing.
            rate = count / (offset - first) if offset > first else 0.0
            size = max(int(1.05 * rate * numel), count) + block.size
            indices, values = _grown(indices, count, size), _grown(values, count, size)
        count = block_select(block, np.int32(low), offset, indices, values, count)
    if wide:
        return np.concatenate([i for i, _ in wide]), np.concatenate([v for _, v in wide])
    # views: the room behind them was reserved, and never written to
    return indices[:count], values[:count]


def _grown(array: NDArray[Any], used: int, size: int) -> NDArray[Any]:
    larger = np.empty(size, array.dtype)
    larger[:used] = array[:used]
    return larger


def top_candidates(
    x: Array, k: int, low: float | None = None, high: float = math.inf, *, trim: bool = True
) -> tuple[float, Selection]:
    """Return the k-th largest finite magnitude and the selection of everything that reaches it.

    Few elements are sorted. Of more it is exact for little more than one pass (after Floyd and Rivest 1975): a sample,
    or the caller, gives a threshold almost surely a little below the answer, one streaming pass collects what reaches
    it, and the order statistic is taken among those. A bad guess costs another pass, never a wrong answer.

    Parameters
    ----------
    x : array_like
        Gradient of any shape, dense and of floating point.
    k : int
        Rank of the magnitude, at least 1.
    low : float, optional
        A guess below the answer; by default from a sample.
    high : float
        A guess above it, with `low`.
    trim : bool
        Leave out the candidates below the threshold.

    Returns
    -------
    threshold : float
        The k-th largest magnitude; 0 if fewer than k elements are finite and non-zero.
    selection : Selection
        Elements with |x| ≥ threshold (without `trim` also those that reach `low`), with the infinite ones.

    Raises
    ------
    InputError
        If k is no whole number from 1 on, or `x` is not a dense floating-point array.
    """
    x, k = check(x), check_count(k, "k")
    numel, on_device = numel_of(x), device_code(x) is not None
    if k > numel:  # no sample has a k-th one
        low = 0.0
    elif low is None and numel <= _FEW and not on_device and (few := _top_of_few(x, k)):
        return few
    elif low is None and on_device and (top := _top_on_device(x, k)):
        return top
    # deviations of a count in a sample: of independent elements one in three million lies beyond
    slack = 5.0
    while True:
        if low is None:
            low, high = _sampled_bracket(x, k, numel, slack)
        candidates = select(x, low)
        threshold = _kth_magnitude(candidates.values, k, high)
        if threshold is not None:
            break
        # everything was selected, and there are fewer than k
        if low == 0:
            return 0.0, candidates
        # this ends, as a bracket wider than the sample begins at 0
        low, high, slack = None, math.inf, slack * 4
    return threshold, keep(candidates, threshold) if trim else candidates


def _top_on_device(x: Any, k: int) -> tuple[float, Selection] | None:
    """Return the k-th largest magnitude and what reaches it, by torch's own order statistic; None of too many."""
    from gradstats.primitives import operators

    if x.numel() > operators.WHOLE:
        return None
    threshold = operators.kth_magnitude(x.reshape(-1), k) or 0.0
    return threshold, select(x, threshold)


def _top_of_few(x: Array, k: int) -> tuple[float, Selection] | None:
    """Return the k-th largest magnitude and what reaches it, by sorting; None where it takes more than that.

    Of more than :data:`SORTED` elements a histogram says first which of them are worth sorting.
    """
    view = flat_blocks(x, 1)
    # what follows compares 32 bits
    if view is None or view[0].dtype.type is not np.float32:
        return None
    flat, _ = view
    if flat.size <= SORTED:
        top = top_sorted(flat, k)
        return top and (top[0], selection_like(x, *top[1:]))
    from gradstats.primitives.loops.selection import block_select, keep_at_least

    first, beyond, _ = _bin_of(flat, k, _SHIFT)
    if first < 0:
        return None
    indices, values = np.empty(flat.size, np.int64), np.empty(flat.size, np.float32)
    # from 1 on: the lowest bin has zeros, too
    n = block_select(flat, np.int32(max(first, 1)), 0, indices, values, 0)
    threshold = _kth_magnitude(values[:n], k, float(np.int32(beyond).view(np.float32)))
    # its bin had zeros, and fewer than k elements have not
    if threshold is None:
        return None
    n = keep_at_least(indices[:n], values[:n], np.float32(threshold))
    # copies, because the room is as large as the gradient
    return threshold, selection_like(x, indices[:n].copy(), values[:n].copy())


def top_sorted(
    flat: NDArray[np.float32], k: int
) -> tuple[float, NDArray[np.int64], NDArray[np.float32]] | None:
    """Return the k-th largest magnitude and the positions and values of what reaches it, by NumPy alone.

    Of few elements: what is called from Python takes longer than the work. So every call here was timed.

    Parameters
    ----------
    flat : ndarray of float32, shape (n,)
        Elements, at least one.
    k : int
        Rank of the magnitude, from 1 to n.

    Returns
    -------
    (float, ndarray, ndarray) or None
        None if an element is not finite.
    """
    magnitude = np.abs(flat)
    if k == 1:
        kth = largest = magnitude.item(
            magnitude.argmax()
        )  # a fifth of what max() takes; NaN if there is one
    else:
        # positions are found in the order of the elements, so a copy is put in order
        ordered, rank = magnitude.copy(), flat.size - k
        if flat.size <= _WHOLLY:
            ordered.sort()
            largest = ordered.item(-1)
        else:
            ordered.partition(rank)
            largest = magnitude.item(magnitude.argmax())
        kth = ordered.item(rank)
    # false for NaN, too: both would be taken for the largest
    if not largest < math.inf:
        return None
    if kth >= _NORMAL:
        positions = (magnitude >= kth).nonzero()[0]
    else:  # as whole numbers: where denormals are flushed, they are zero to a comparison of floats
        bits = magnitude.view(np.int32)
        least = int(np.partition(bits, flat.size - k)[flat.size - k])
        # exact, as a denormal is a whole number of 2⁻¹⁴⁹
        kth = least * 2.0**-149
        positions = (bits >= (least or 1)).nonzero()[0]
    return kth, positions, flat[positions]


def _bin_of(x: NDArray[Any], k: int, shift: int) -> tuple[int, int, int]:
    """Return the first bits of the bin of the k-th largest finite magnitude, those after it, and its rank in the bin.

    The first are negative if fewer are finite.
    """
    from gradstats.primitives.loops.counts import block_histogram, descend

    counts = np.zeros(1 << 31 - shift, np.uint32)
    block_histogram(x.view(np.uint32), shift, counts)
    # more than k − 1 are at least k; infinity and NaN are beyond the slice
    i, reached = descend(counts[: _INFINITY >> shift], float(k - 1))
    return i << shift, i + 1 << shift, k - (reached - int(counts[i]))


def _kth_magnitude(elements: Array, k: int, high: float) -> float | None:
    """Return the k-th largest finite magnitude, None if there are fewer; only what lies under `high` is sorted."""
    if device_code(elements) is not None:
        from gradstats.primitives import operators

        return operators.kth_magnitude(elements, k)
    values = as_numpy(elements)
    if values.dtype != np.float32:
        magnitude = np.abs(values)
        magnitude = magnitude[np.isfinite(magnitude)]
        n = magnitude.size
        return float(np.partition(magnitude, n - k)[n - k]) if n >= k else None
    from gradstats.primitives.loops.selection import block_under

    bits = np.empty(values.size, np.int32)
    # finite, so that no infinity is under it
    bound = np.float32(min(high, _LARGEST)).view(np.int32)
    above, n = block_under(values, bound, bits)
    if above + n < k:
        return None
    if above >= k:  # the bracket missed
        above, n = block_under(values, _INFINITY, bits)
    candidates, rank = bits[:n], k - above
    if n >= _MANY:
        first, beyond, rank = _bin_of(candidates, rank, _FINE)
        candidates = candidates[(candidates >= first) & (candidates < beyond)]
    candidates.partition(candidates.size - rank)
    return float(candidates[candidates.size - rank].view(np.float32))


def keep(selection: Selection, threshold: float) -> Selection:
    """Return the part of a selection at or above a threshold.

    Parameters
    ----------
    selection : Selection
        Elements to choose from; it may be overwritten.
    threshold : float
        Least magnitude kept.
    """
    indices, values = selection.indices, selection.values
    threshold = as_compared(values, threshold)
    if device_code(values) is not None:
        from gradstats.primitives import operators

        return operators.keep(selection, threshold)
    if is_tensor(values) and values.device.type == "cpu" and "float32" in str(values.dtype):
        indices, values = indices.numpy(), values.numpy()  # the same memory
    if isinstance(values, np.ndarray) and values.dtype == np.float32:
        from gradstats.primitives.loops.selection import keep_at_least

        n = keep_at_least(indices, values, np.float32(threshold))
        # the loop moved what is kept to the front of the same memory
        return Selection(selection.indices[:n], selection.values[:n])
    magnitude = np.abs(as_numpy(selection.values))
    places = np.flatnonzero(magnitude >= threshold)
    index = torch_index(places, selection.indices)
    return Selection(selection.indices[index], selection.values[index])


def _sampled_bracket(x: Array, k: int, numel: int, slack: float) -> tuple[float, float]:
    """Return magnitudes that more and fewer than k elements reach, by `slack` deviations; (0, inf) if not known."""
    size = min(numel, max(_SAMPLE, numel // 100))
    stride = max(1, numel // size)
    some = strided(x, stride)
    # the stride is a whole number: there may be more than were asked for
    size = numel_of(some)
    expected = k * size / numel
    # deviations of a Poisson count, and a constant for small counts, which are skewed
    margin = slack * math.sqrt(expected) + slack
    below, above = math.ceil(expected + margin), math.floor(expected - margin)
    low, high = 0.0, math.inf
    if below < size and device_code(some) is not None:
        low = _kth_magnitude(some, below, math.inf) or 0.0
    elif below < size:
        sample = np.abs(as_numpy(some))
        sample.partition(size - below)
        low = float(sample[size - below])
        if above >= 1:
            # already partitioned: the upper bound is among these
            top = sample[size - below :]
            high = float(np.partition(top, top.size - above)[top.size - above])
    # NaN and infinity come last in order, and as a bound say nothing
    return (low if math.isfinite(low) else 0.0), (high if math.isfinite(high) else math.inf)


def kth_largest(x: Array, k: int) -> float:
    """Return the k-th largest finite magnitude, exactly.

    Parameters
    ----------
    x : array_like
        Gradient of any shape, floating dtype and device.
    k : int
        Rank, at least 1.

    Returns
    -------
    float
        Magnitude; 0 if fewer than k elements are finite and non-zero.

    Raises
    ------
    InputError
        If k is no whole number from 1 on, or `x` is not a dense floating-point array.
    """
    return top_candidates(x, k)[0]


def topk(x: Array, k: int) -> Selection:
    """Return exactly k elements, those with the largest magnitudes; on a device the host does not wait for it.

    Of those tied with the k-th the first in index order are taken. Infinite elements are the largest. If fewer than k
    elements are non-zero, the first zeros are added, with the value 0, among which NaN counts.

    Parameters
    ----------
    x : array_like
        Gradient of any shape (flattened in C order), floating dtype and device.
    k : int
        Number of elements, at least 1; all are returned if there are no more.

    Returns
    -------
    Selection
        Positions and values; NumPy for NumPy, torch on the same device for torch. Its length is known before.

    Raises
    ------
    InputError
        If k is no whole number from 1 on, or `x` is not a dense floating-point array.

    Notes
    -----
    On a device the bits of the k-th magnitude are found 16 at a time, by counts of which none goes to the host. On the
    host what :func:`top_candidates` finds is cut, or filled up.

    Examples
    --------
    >>> import numpy as np
    >>> topk(np.array([2.0, -3.0, 0.0, 2.0]), 2).indices.tolist()
    [0, 1]
    """
    x, k = check(x), check_count(k, "k")
    k = min(k, numel_of(x))
    code = device_code(x)
    if code is not None and k:
        return Selection(*code.topk(x, k))
    # k is 0 for an empty gradient alone: nothing, in its own type
    selection = top_candidates(x, k)[1] if k else select(x, math.inf)
    if len(selection) > k:
        magnitude = np.abs(as_numpy(selection.values))
        kth = np.partition(magnitude, magnitude.size - k)[magnitude.size - k]
        over, tied = magnitude > kth, magnitude == kth
        places = np.flatnonzero(over | (tied & (tied.cumsum() <= k - np.count_nonzero(over))))
        index = torch_index(places, selection.indices)
        return Selection(selection.indices[index], selection.values[index])
    if len(selection) < k:  # of the first k places at least those missing are free
        positions, values = as_positions(selection.indices), as_numpy(selection.values)
        open_ = np.ones(k, bool)
        open_[positions[positions < k]] = False
        free = np.flatnonzero(open_)[: k - len(selection)]
        positions = np.concatenate([positions, free])
        order = positions.argsort()
        values = np.concatenate([values, np.zeros(free.size, values.dtype)])
        return selection_like(x, positions[order], values[order])
    return selection
