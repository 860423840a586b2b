"""What a compressor is measured by: ``torch.topk``, PyTorch's PowerSGD hook, and a step without an exchange."""

# No `from __future__ import annotations` here: DDP reads the hook's annotations at run time.

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from gradstats.compressors import Selection, TopK

__all__ = ["TorchTopK", "powersgd_state", "waiting_hook"]

_FIRST_COMPRESSED = 2
"""Step. PyTorch's state starts at 1,000 unless told, and refuses to start below 2 where it keeps a memory."""


class TorchTopK(TopK):
    """The k largest magnitudes by ``torch.topk``."""

    def compress(self, gradient: torch.Tensor) -> Selection:
        """Sort out the k largest."""
        largest = torch.topk(gradient.abs(), self.target(gradient.numel()), sorted=False)
        indices = largest.indices.sort().values
        return Selection(indices, gradient[indices], float("nan"))


def powersgd_state(error_feedback: bool, **options: Any) -> PowerSGDState:
    """Return the state of PyTorch's ``powerSGD_hook``; its model must have a single bucket, or gloo deadlocks.

    Parameters
    ----------
    error_feedback : whether it keeps what it does not send.
    options : of the state, such as ``matrix_approximation_rank`` (1).
    """
    options = {"start_powerSGD_iter": _FIRST_COMPRESSED} | options
    return PowerSGDState(None, use_error_feedback=error_feedback, **options)


def waiting_hook(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange nothing, but wait for the other ranks once a step; a DDP communication hook.

    A synchronous step is as slow as its slowest rank: this is the bound that computing sets to any compressor.
    """
    if bucket.is_last():
        dist.barrier()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
