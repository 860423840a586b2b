"""Every loop with arguments over a block: what warming up compiles, and tests compare with the references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.console import messages, progress_bar
from gradstats.primitives.loops import copies, counts, rice, selection, signs, sums
from gradstats.primitives.loops.compiled import Compiling, Loop, has
from gradstats.primitives.loops.words import INFINITY, PART, WORD

__all__ = ["calls", "warm_up"]


def calls(x: NDArray[np.float32], low: int = 1) -> Iterator[tuple[Loop, tuple[Any, ...]]]:
    """Yield every loop with arguments for a block, also those that this processor does not have.

    Parameters
    ----------
    x : ndarray of float32, shape (n,)
        Block.
    low : int
        Bits of a threshold, at least 1.

    Yields
    ------
    (Loop, tuple)
        The loop, and its arguments; those that it writes are of no use afterwards.
    """
    n, bits, above = x.size, x.view(np.uint32), np.int32(low).view(np.float32)
    # filled with something, so that it shows where a loop does not write
    words, zeros = np.full((2, -(-n // WORD)), 7, np.uint64)
    # two parts that begin and end where no word or vector does
    parts = np.array([(0, n // 3), (n // 3, n)])
    largest, low32 = np.full(-(-n // PART), -1, np.float32), np.int32(low)
    yield sums.block_signed, (x,)
    yield sums.block_tail, (x, low32)
    yield sums.block_sum, (x, low32)
    yield sums.block_sum_log, (x,)
    yield sums.block_norm, (x, largest)
    for least, log in ((np.float32(0), False), (np.float32(0), True), (above, True)):
        yield sums.moments_of_parts, (x, parts, least, log, np.full((2, 7), 9.0))
    weight = np.arange(n, dtype=np.float64)
    yield sums.tail_sums, (weight, np.sqrt(weight), np.zeros((n + 1, 4)))
    # of the second replicate fewer than there are ranks, of the third nothing
    times, of_blocks = np.array([[2, 0, 3], [1, 0, 0], [0, 0, 0]]), np.arange(n) % 3
    yield (
        sums.sums_of_repeats,
        (np.sqrt(weight), of_blocks, times, np.sqrt(weight), n // 5, np.full((3, 4), 9.0)),
    )

    yield counts.block_count, (x, low32)
    yield counts.block_histogram, (bits, 16, np.full(1 << 15, 2, np.uint32))
    first = low >> 16
    yield counts.counts_of_tail, (bits, first, 16)
    # as long as there are bins, and filled: the loop clears the counters that it reaches
    room = np.full((INFINITY >> 16) - first + 1, 5, np.uint32)
    yield counts.block_tail_histogram, (bits, max(first << 16, 1), 16, room)
    of_parts, histograms = np.full((2, 7), 9.0), np.full((8, 3, 1 << 12), 7, np.uint32)
    sums.moments_of_parts.reference(x, parts, np.float32(0), True, of_parts)
    used = np.arange(8) % 3 == 0
    histograms[used] = 0
    yield (
        counts.histograms_of_parts,
        (bits, parts, of_parts, 1, 16, int(INFINITY) >> 16, histograms, used),
    )
    # counts of one array, and of several added up
    for dtype in (np.uint32, np.int64):
        yield counts.descend, (np.arange(n).astype(dtype), n / 2)

    # three are there already, and behind them is room for a whole block
    indices, values = np.zeros(n + 3, np.int64), np.zeros(n + 3, np.float32)
    # both, although this processor calls only one
    for loop in (selection.select_anywhere, selection.select_compressing):
        yield loop, (x, low32, 7, indices, values, 3)
    yield selection.keep_at_least, (np.arange(n), x.copy(), above)
    for high in (low32, INFINITY):
        yield selection.block_under, (x, high, np.zeros(n, np.int32))

    yield signs.block_signs, (x, words, zeros)
    packed = np.packbits(x > 0, bitorder="little")
    yield signs.block_spread_signs, (packed, np.float32(0.3), x.copy(), np.empty_like(x))
    yield (
        signs.block_stochastic_signs,
        (np.nan_to_num(x), 2.0, np.ones_like(largest), np.uint64(1), words),
    )

    for factor in (1, 1024):
        yield copies.copy_past_caches, (np.zeros_like(x), x, np.float32(factor))
    yield copies.block_bfloat16, (bits, np.zeros(n, np.uint16))
    yield copies.round_to_bfloat16, (x.copy(), np.zeros(n, np.uint16))
    yield copies.mean_of_bfloat16, ((bits >> 16).astype(np.uint16), np.float32(3), x.copy())

    # at least one position, and the first one is not 0
    indices = np.append(3, np.flatnonzero(x > above) + 4)
    for b in (0, 2, 7):
        yield rice.gap_sums, (indices, b, np.zeros(3, np.int64))
        size = b * (indices.size - 1) + int(((np.diff(indices) - 1 >> b) + 1).sum())
        words32 = np.zeros(-(-size // 32), np.uint32)
        yield rice.encode_gaps, (indices, b, words32)
        # by the reference: the loop that encodes need not be right for this one
        coded = words32.copy()
        rice.encode_gaps.reference(indices, b, coded)
        yield rice.decode_gaps, (coded, b, n + 4, np.append(3, np.zeros_like(indices[1:])))


def warm_up() -> None:
    """Compile every loop that this processor has, or load it from the cache; a terminal shows how many are left."""
    had_spoken = Compiling.has_spoken
    todo = [each for each in calls(np.ones(2 * WORD + 1, np.float32)) if has(each[0].needs)]
    with Compiling.of_all(), ExitStack() as stack:
        advance = None
        for done, (loop, arguments) in enumerate(todo, 1):
            loop(*arguments)
            # no bar before something is compiled: loading from the cache needs none
            if (
                advance is None
                and Compiling.has_spoken
                and not had_spoken
                and messages().is_terminal
            ):
                bar = stack.enter_context(progress_bar())
                task = bar.add_task("compiling loops", total=len(todo), completed=done - 1)
                advance = partial(bar.advance, task)
            if advance:
                advance()
