"""The interface between a workload and the training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Task"]


@dataclass(slots=True)
class Task:
    """A model and its data on one rank.

    Attributes
    ----------
    model : torch.nn.Module
        Model, initialised alike on all ranks.
    loss : callable
        Function of the DDP-wrapped model and a step, which returns the training loss of this rank's batch.
    accuracy : callable or None
        Function of the model, which returns the share of unseen samples it gets right; None if there are none.
    perplexity : callable or None
        Function of the model, which returns its perplexity on unseen text; None if there is none.
    """

    model: torch.nn.Module
    loss: Callable[[torch.nn.Module, int], torch.Tensor]
    accuracy: Callable[[torch.nn.Module], float] | None = None
    perplexity: Callable[[torch.nn.Module], float] | None = None
