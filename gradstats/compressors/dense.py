"""The dense average, without compression: for warm-up steps, small parameters and comparison."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gradstats.collectives.plain import all_gather_flags, all_reduce_mean
from gradstats.compressors.base import Compressor, Reduced

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["DenseCompressor"]


class DenseCompressor(Compressor):
    """All-reduce of the whole gradient: nothing is compressed and nothing is left over."""

    has_ratio = False

    def target(self, numel: int, layer: str | None = None) -> int:
        """Return the number of elements, as all of them are sent."""
        return numel

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Average all elements; the residual is zero."""
        started = time.perf_counter()
        flags = all_gather_flags(flag, group, corrected.device)
        if any(flags):
            return Reduced(flags)
        mean = all_reduce_mean(corrected.clone(), group)
        numel = corrected.numel()
        return Reduced(
            flags=flags,
            mean=mean,
            residual=corrected.zero_(),
            selected=numel,
            union=numel,
            bytes_sent=numel * corrected.element_size(),
            communicate_seconds=time.perf_counter() - started,
        )
