"""Blocks of an array, worked on by threads. Results come back in the order of the blocks.

The blocks are the same whatever the number of threads, and their results are combined in order: so are the sums, to
the last bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives.arrays import Array, flat_blocks, flat_chunks, numel_of

__all__ = ["get_num_threads", "map_blocks", "map_runs", "set_num_threads"]

T = TypeVar("T")

BLOCK = 1 << 20
"""Elements per block. The compiled loops keep to the cache by themselves; a block is long enough for the threads not
to fight over the interpreter between two of them."""

_SMALL = 1 << 19
"""Elements per thread below which a second one costs more than it brings."""

_threads: int | None = None


def set_num_threads(n: int | None) -> None:
    """Set how many threads the primitives use; None follows torch's setting, or the cores where torch is absent."""
    global _threads
    if n is not None and n < 1:
        raise InputError(f"at least one thread is needed, not {n}")
    _threads = n


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
    """Return the pool of a process; threads do not survive a fork.

    One for all callers, from whatever thread: how many of its threads start is up to the runs they submit.
    """
    return ThreadPoolExecutor(os.cpu_count() or 1, "gradstats")


def map_runs(
    function: Callable[[Iterator[tuple[int, NDArray[Any]]], int], T],
    x: Array,
    block: int = BLOCK,
) -> list[T]:
    """Split the flattened array into runs of blocks; return ``function(run, numel)`` of each, in order.

    A run of numel elements yields (offset, block). Blocks are one-dimensional, float32 or float64, at most
    `block` elements; those of a strided, half-precision or device array are buffers that live until the next.
    """
    view = flat_blocks(x, block)
    if view is None:
        return [function(iter(flat_chunks(x)), numel_of(x))]
    flat, starts = view
    threads = min(get_num_threads(), numel_of(x) // _SMALL)

    def run(part: range) -> T:
        pieces = ((start, flat[start : start + block]) for start in part)
        return function(pieces, len(part) * block)

    if threads <= 1:
        return [run(starts)]
    # One run per thread: each has buffers of its own, and the work is even.
    size = -(-len(starts) // threads)
    parts = [starts[i : i + size] for i in range(0, len(starts), size)]
    return list(_executor(os.getpid()).map(run, parts))


def map_blocks(function: Callable[[int, NDArray[Any]], T], x: Array) -> list[T]:
    """Return ``function(offset, block)`` of every block, in order; see :func:`map_runs`."""
    runs = map_runs(lambda run, _: [function(offset, block) for offset, block in run], x)
    return [result for run in runs for result in run]
