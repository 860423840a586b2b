"""What a workload gives the training loop."""

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
    model : initialised alike on all ranks.
    loss : computes the training loss of the rank's batch number `step`, through the (DDP-wrapped) model given.
    learning_rate : the rate at a step, given the initial rate and the length of the run.
    accuracy : share of unseen samples the model gets right; None if there are none.
    perplexity : of unseen text; likewise.
    clip : largest norm of the averaged gradient; None for no clipping.
    """

    model: torch.nn.Module
    loss: Callable[[torch.nn.Module, int], torch.Tensor]
    learning_rate: Callable[[int], float]
    clip: float | None = None
    accuracy: Callable[[torch.nn.Module], float] | None = None
    perplexity: Callable[[torch.nn.Module], float] | None = None
