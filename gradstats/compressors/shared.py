"""One threshold for all ranks, taken from the sum of their histograms."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradstats.collectives.codec import PLAIN, Codec
from gradstats.collectives.header import Kind
from gradstats.collectives.ragged import GatheredWords, RaggedAllGather
from gradstats.compressors.base import Reduced
from gradstats.compressors.cost import Exchange, Load
from gradstats.compressors.selectors import ThresholdSelector
from gradstats.compressors.sparse import SparseCompressor
from gradstats.primitives import Histogram, histogram
from gradstats.primitives.histogram import bin_edges, check_bits
from gradstats.thresholds import Hard

__all__ = ["GlobalHistogram"]


class GlobalHistogram(SparseCompressor):
    """All-gather of the elements that reach a threshold common to all ranks: the quantile of all their magnitudes.

    The histograms' bins are the same everywhere, so that their counts add up. Σ k̂ over n ranks is n·k, up to the width
    of a bin; a rank whose gradient is larger sends more of it.

    Parameters
    ----------
    ratio : float
        Kept fraction k/d of the average rank, in (0, 1].
    bits : int
        Bits of the histogram, see :func:`gradstats.histogram`; 10 resolves the threshold to 0.1 %.
    codec : Codec or torch.dtype
        What positions and values are on the wire, see :class:`SparseCompressor`.
    dense_above : float
        Share of the gradient's elements above which all are all-reduced densely, see :class:`SparseCompressor`.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1] or values cannot travel as this type.

    Notes
    -----
    Source: gradstats; it follows no paper.

    A rank sends its upper bins alone, until they hold more than n·k elements: the common threshold cannot lie below
    them.
    """

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Refuse: nobody has said yet what the histograms take."""
        # past SparseCompressor, whose formula knows no histograms
        return super(SparseCompressor, cls).exchange(load)

    def __init__(
        self,
        ratio: float,
        bits: int = 10,
        codec: Codec | torch.dtype = PLAIN,
        dense_above: float = 1.0,
    ) -> None:
        # set anew in every step; Hard never lowers it to a rank's largest magnitude
        self._threshold = Hard(0.0)
        super().__init__(ThresholdSelector(self._threshold, ratio), codec, dense_above)
        self.bits = check_bits(bits)
        self._histograms = RaggedAllGather(kind=Kind.HISTOGRAM)

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Agree on a threshold, then exchange as :class:`SparseCompressor` does."""
        started = time.perf_counter()
        k = self.selector.target(corrected.numel()) * dist.get_world_size(group)
        # a rank that refuses reads no gradient, and takes part all the same
        words = self._upper_bins(corrected, k) if not flag else corrected[:0].int()
        counted = time.perf_counter()
        gathered = self._histograms(words, group, flag)
        if any(gathered.flags):
            return Reduced(gathered.flags)
        # computed on each rank from the same whole numbers, and so to the same bits
        self._threshold.threshold = self._quantile(gathered, k)
        agreed = time.perf_counter()
        # without the flag: had one been raised, all ranks would have returned
        reduced = super().reduce(corrected, group)
        reduced.bytes_sent += gathered.bytes_sent
        reduced.select_seconds += counted - started
        reduced.communicate_seconds += agreed - counted
        return reduced

    def _upper_bins(self, corrected: torch.Tensor, k: int) -> torch.Tensor:
        """Return the numbers of the upper bins and their counts, int32 (2 · bins,)."""
        h = histogram(corrected, self.bits)
        # Down to the bin of the (k+1)-th largest: k elements alone have no quantile. And one bin more, which gives the
        # density's slope.
        first = max(0, int(np.count_nonzero(h.exceedances() > k)) - 2)
        bins = first + np.flatnonzero(h.counts[first:])
        packed = np.concatenate([bins, h.counts[bins]]).astype(np.uint32).view(np.int32)
        return torch.from_numpy(packed).to(corrected.device)

    def _quantile(self, gathered: GatheredWords, k: int) -> float:
        """Return the magnitude that k elements of all ranks together reach; 0 if there are no more than k."""
        # 255 exponents: the last of 256 is that of infinities and NaN
        total = np.zeros(255 << self.bits, np.int64)
        for words in gathered.words:
            bins, counts = words.cpu().numpy().view(np.uint32).reshape(2, -1)
            total[bins] += counts
        occupied = np.flatnonzero(total)
        if not occupied.size:
            return 0.0
        # no threshold inside the last bin: its elements may all be equal, and lie below
        last = float(bin_edges(self.bits)[occupied[-1]])
        return min(Histogram(total, 0, 0, self.bits).upper_quantile(k), last)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of :class:`SparseCompressor` and the capacity of the histograms' messages."""
        return {**super().state_dict(), "histograms": self._histograms.capacity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._histograms.capacity = state["histograms"]
