"""Blocks of an array, worked on by threads; results come back in the order of the blocks.

The blocks do not depend on the number of threads and their results are combined in order, so sums are the same to the
last bit with any number of threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from numpy.typing import NDArray

from gradstats.primitives.arrays import Array, flat_blocks, flat_chunks, numel_of
from gradstats.primitives.ratio import check_count

__all__ = ["get_num_threads", "map_blocks", "map_runs", "set_num_threads"]

T = TypeVar("T")

BLOCK = 1 << 20
"""Elements per block. The compiled loops keep to the cache by themselves; a block has to be so long that the threads do
not fight over the interpreter between two of them."""

_SMALL = 1 << 19
"""Elements per thread below which a further thread costs more than it saves."""

_threads: int | None = None


def set_num_threads(n: int | None) -> None:
    """Set how many threads the primitives use.

    Parameters
    ----------
    n : int or None
        Number of threads. None follows torch's setting, or takes one per core where torch is not loaded.

    Raises
    ------
    InputError
        If `n` is below 1.
    """
    global _threads
    _threads = None if n is None else check_count(n, "the number of threads")


def get_num_threads() -> int:
    """Return how many threads the primitives use."""
    if _threads is not None:
        return _threads
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _executor(pid: int) -> ThreadPoolExecutor:
    """Return the pool of a process (by its id, because threads do not survive a fork), the same for all callers."""
    # as many as can be of use: a thread starts only when all others are busy
    return ThreadPoolExecutor(os.cpu_count() or 1, "gradstats")


def map_runs(
    function: Callable[[Iterator[tuple[int, NDArray[Any]]], int], T],
    x: Array,
    block: int = BLOCK,
) -> list[T]:
    """Split the flattened array into one run of blocks per thread and call a function on each run.

    Parameters
    ----------
    function : callable
        Called as ``function(run, numel)``. The run yields (offset, block) and holds `numel` elements. Blocks are
        one-dimensional, float32 or float64; those of a strided, half-precision or device array are buffers that the
        next block reuses.
    x : array_like
        Array of any shape, floating dtype and device.
    block : int
        Largest number of elements in a block.

    Returns
    -------
    list
        What the function returned, in the order of the runs.
    """
    view = flat_blocks(x, block)
    if view is None:
        # one thread, because all chunks may arrive in one buffer
        return [function(iter(flat_chunks(x)), numel_of(x))]
    flat, starts = view
    threads = min(get_num_threads(), numel_of(x) // _SMALL)

    def run(part: range) -> T:
        pieces = ((start, flat[start : start + block]) for start in part)
        # at most a block too many, for the last block may be short: readers reserve room by it
        return function(pieces, len(part) * block)

    if threads <= 1:
        return [run(starts)]
    # One run per thread, so that each has buffers of its own and the work is even
    size = -(-len(starts) // threads)
    parts = [starts[i : i + size] for i in range(0, len(starts), size)]
    # map() keeps the order of the parts, on which sums and selections depend
    return list(_executor(os.getpid()).map(run, parts))


def map_blocks(function: Callable[[int, NDArray[Any]], T], x: Array) -> list[T]:
    """Call a function on every block of the flattened array and return the results in order; see :func:`map_runs`.

    Parameters
    ----------
    function : callable
        Called as ``function(offset, block)``.
    x : array_like
        Array of any shape, floating dtype and device.
    """
    view = flat_blocks(x, BLOCK) if numel_of(x) <= BLOCK else None
    if view is not None:
        return [function(0, view[0])] if view[1] else []
    runs = map_runs(lambda run, _: [function(offset, block) for offset, block in run], x)
    return [result for run in runs for result in run]
