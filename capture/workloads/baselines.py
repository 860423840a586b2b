"""Exchanges to compare compressors with: ``torch.topk``, PyTorch's hooks, and a step without an exchange."""

# No `from __future__ import annotations` here: DDP reads the hook's annotations at run time.

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from capture.taps.buckets import Hook
from capture.workloads.config import DENSE, NO_EXCHANGE, RunConfig
from gradstats.compressors import TopK
from gradstats.hooks.torch_private import GradBucket
from gradstats.primitives import Selection

__all__ = ["EXCHANGES", "Exchange", "TorchTopK", "bf16_hook", "waiting_hook"]

_FIRST_COMPRESSED = 2
"""First step that PowerSGD compresses. PyTorch's default is 1,000, and it refuses less than 2 with a memory."""
_ONE_BUCKET_MB = 100_000.0
"""Bucket size that holds any model: with several, PowerSGD's callbacks block each other in gloo's threads."""


class Exchange(NamedTuple):
    """How a run averages its gradients.

    Attributes
    ----------
    state : object
        State of the hook.
    hook : callable
        DDP communication hook.
    bucket_mb : float or None
        Size of DDP's buckets in MB; PyTorch's default if None.
    """

    state: Any
    hook: Hook
    bucket_mb: float | None = None


class TorchTopK(TopK):
    """The k largest magnitudes, by ``torch.topk``."""

    def select(self, gradient: torch.Tensor) -> Selection:
        """Select the k largest magnitudes.

        Parameters
        ----------
        gradient : float tensor, shape (d,)
            Gradient plus memory.

        Returns
        -------
        Selection
            The k elements, in ascending order of positions.
        """
        # sorted by position below, so that their order of magnitude is of no use
        largest = torch.topk(gradient.abs(), self.target(gradient.numel()), sorted=False)
        indices = largest.indices.sort().values
        return Selection(indices, gradient[indices])


def waiting_hook(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange nothing, but wait for the other ranks once a step; a DDP communication hook.

    A synchronous step is as slow as its slowest rank: this is the bound that computing sets to any compressor.

    Parameters
    ----------
    _ : None
        State; there is none.
    bucket : GradBucket
        Gradients of this rank.

    Returns
    -------
    Future
        The bucket as it is.
    """
    # once a step: other buckets of the pass are not waited for
    if bucket.is_last():
        dist.barrier()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def bf16_hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradient in bfloat16, by PyTorch's hook; DDP lets that one itself run with NCCL only.

    Parameters
    ----------
    state : None
        State; there is none.
    bucket : GradBucket
        Gradients of this rank.

    Returns
    -------
    Future
        The average, in the gradient's type.
    """
    return bf16_compress_hook(state, bucket)  # type: ignore[arg-type]  # None: the default group


def _powersgd(config: RunConfig) -> Exchange:
    # the user's options win
    options = {"start_powerSGD_iter": _FIRST_COMPRESSED} | dict(config.options)
    state = PowerSGDState(None, use_error_feedback=config.error_feedback, **options)
    return Exchange(state, powerSGD_hook, _ONE_BUCKET_MB)


EXCHANGES: dict[str, Callable[[RunConfig], Exchange]] = {
    DENSE: lambda config: Exchange(None, allreduce_hook),
    NO_EXCHANGE: lambda config: Exchange(None, waiting_hook),
    "powersgd": _powersgd,
    "torch-bf16": lambda config: Exchange(None, bf16_hook),
}
"""Exchanges that are hooks of their own, by name. They keep no record of what a step takes."""
