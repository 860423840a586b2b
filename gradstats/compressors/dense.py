"""The dense average, without compression: for warm-up steps, small parameters and comparison."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from gradstats.collectives.codec import as_codec
from gradstats.collectives.plain import all_gather_flags, all_reduce
from gradstats.compressors.base import Compressor, Reduced

__all__ = ["DenseCompressor"]


class DenseCompressor(Compressor):
    """All-reduce of the whole gradient: nothing is compressed, and only what rounding takes off is left over.

    Parameters
    ----------
    dtype : torch.dtype, optional
        Type that values are rounded to and added up in, such as ``torch.bfloat16``; that of the gradient if None.

    Raises
    ------
    InputError
        If values cannot travel as this type.

    Notes
    -----
    Source: for bfloat16, ``bf16_compress_hook`` of PyTorch. Differs from it: what rounding takes off a rank's gradient
    is its residual, and the sum is divided by the number of ranks, not the summands. What rounding takes off the sums
    on their way is lost, as in PyTorch.
    """

    has_ratio = False

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._codec = None if dtype is None else as_codec(dtype)

    def target(self, numel: int, layer: str | None = None) -> int:
        """Return the number of elements, as all of them are sent."""
        return numel

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Average all elements; the residual is zero, or what rounding took off."""
        started = time.perf_counter()
        flags = all_gather_flags(flag, group, corrected.device)
        if any(flags):
            return Reduced(flags)
        flagged = time.perf_counter()
        sent = corrected.clone()
        if self._codec is None:
            corrected.zero_()
        else:
            sent = self._codec.rounded(sent)
            corrected -= sent
        rounded = time.perf_counter()
        mean = all_reduce(sent, group).to(corrected.dtype).div_(dist.get_world_size(group))
        numel = corrected.numel()
        return Reduced(
            flags=flags,
            mean=mean,
            residual=corrected,
            selected=numel,
            union=numel,
            bytes_sent=numel * sent.element_size(),
            select_seconds=rounded - flagged,
            communicate_seconds=time.perf_counter() - rounded + flagged - started,
        )
