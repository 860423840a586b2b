"""The interface between a workload and the training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from capture.workloads.config import RunConfig
from gradstats.errors import InputError

__all__ = ["Task", "check_batch"]


@dataclass(slots=True)
class Task:
    """A model and its data on one rank.

    Attributes
    ----------
    model : torch.nn.Module
        Model, initialised alike on all ranks.
    loss : callable
        Function of the DDP-wrapped model and a step, which returns the training loss of this rank's batch.
    evaluate : callable or None
        Function of the model, which returns measures on unseen data by their names in :class:`RunResult`; None if
        there are no such data.
    """

    model: torch.nn.Module
    loss: Callable[[torch.nn.Module, int], torch.Tensor]
    evaluate: Callable[[torch.nn.Module], dict[str, float]] | None = None


def check_batch(config: RunConfig, count: int, what: str) -> int:
    """Return the samples of a process and step, if all processes together find as many.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.
    count : int
        Number of samples there are.
    what : str
        What samples are, in the plural.

    Raises
    ------
    InputError
        If there are fewer samples than a batch of all processes.
    """
    size = config.setting("batch_size")
    if size * config.nproc > count:
        raise InputError(
            f"a batch of {size * config.nproc} over all processes exceeds the {count} {what}; lower --batch-size"
        )
    return size
