"""The interface between a workload and the training loop.

A workload's module has three functions of a checked :class:`RunConfig`. ``make_model(config)`` builds the model alone,
on torch's current device; ``example(config)`` gives a tuple of random inputs; ``make_task(config, rank)`` adds the
data of a rank, and raises :class:`InputError` where these are too few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from capture.workloads.config import RunConfig
from gradstats.errors import InputError

__all__ = ["Task", "check_batch", "generator"]


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
    carried : object
        What a step leaves for the next one besides the model; it has ``state_dict`` and ``load_state_dict``. None if
        nothing does.
    """

    model: torch.nn.Module
    loss: Callable[[torch.nn.Module, int], torch.Tensor]
    evaluate: Callable[[torch.nn.Module], dict[str, float]] | None = None
    carried: Any = None


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


def generator(*entropy: int) -> torch.Generator:
    """Return a generator of its own for each tuple of numbers, such as seed, step and rank.

    Parameters
    ----------
    *entropy : int
        Numbers of 0 or more.

    Returns
    -------
    torch.Generator
        Generator on the CPU.
    """
    # hashed, so that neighbouring seeds, steps and ranks have nothing in common
    state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    # into the positive half of a signed number
    return torch.Generator().manual_seed(int(state[0]) >> 1)
