"""Training a network to classify images, whichever network it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.config import RunConfig
from capture.workloads.images import ImageSet
from capture.workloads.task import Task
from gradstats.errors import InputError

__all__ = ["classification"]

_EVALUATED = 500
"""Unseen images at once."""


def classification(config: RunConfig, rank: int, model: nn.Module, images: ImageSet) -> Task:
    """Return the task of one rank: its share of the images, and the schedule of He et al.

    Parameters
    ----------
    config : of the run.
    rank : of this process.
    model : images (n, 3, h, w) to logits.
    images : of all ranks.

    Raises
    ------
    InputError
        If there are fewer images than a batch of all ranks.
    """
    wanted = config.setting("batch_size") * config.nproc
    if wanted > len(images):
        raise InputError(f"a batch of {wanted} over all processes exceeds the {len(images)} images")
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    steps, rate = config.setting("steps"), config.initial_learning_rate

    def learning_rate(step: int) -> float:
        """Divide by 10 at one half and at three quarters of the run, as He et al. do."""
        return rate * 0.1 ** ((step >= steps // 2) + (step >= 3 * steps // 4))

    def loss(network: nn.Module, step: int) -> Tensor:
        inputs, targets = images.batch(
            step, config.setting("batch_size"), rank, config.nproc, config.seed
        )
        return F.cross_entropy(
            network(inputs.contiguous(memory_format=torch.channels_last)), targets
        )

    def accuracy(network: nn.Module) -> float:
        """Count what the network gets right of the unseen images, with its running statistics."""
        assert images.test is not None
        inputs, targets = images.test
        network.eval()
        right = 0
        with torch.no_grad():
            for start in range(0, len(targets), _EVALUATED):
                part = slice(start, start + _EVALUATED)
                right += int((network(inputs[part]).argmax(1) == targets[part]).sum())
        network.train()
        return right / len(targets)

    return Task(model, loss, learning_rate, accuracy=accuracy if images.test else None)
