"""The task of classifying images, for any network."""

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
"""Number of unseen images that are classified at once."""


def classification(config: RunConfig, rank: int, model: nn.Module, images: ImageSet) -> Task:
    """Return the task of one rank, with its share of the images.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.
    rank : int
        Rank of this process.
    model : torch.nn.Module
        Network from images, shape (n, 3, h, w), to logits.
    images : ImageSet
        Images of all ranks.

    Returns
    -------
    Task
        Model and data of this rank.

    Raises
    ------
    InputError
        If there are fewer images than a batch of all ranks.
    """
    wanted = config.setting("batch_size") * config.nproc
    if wanted > len(images):
        raise InputError(
            f"a batch of {wanted} over all processes exceeds the {len(images)} images; lower --batch-size"
        )
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(network: nn.Module, step: int) -> Tensor:
        inputs, targets = images.batch(
            step, config.setting("batch_size"), rank, config.nproc, config.seed
        )
        return F.cross_entropy(
            network(inputs.contiguous(memory_format=torch.channels_last)), targets
        )

    def accuracy(network: nn.Module) -> float:
        assert images.test is not None
        inputs, targets = images.test
        network.eval()  # batch normalisation uses its running statistics
        right = 0
        with torch.no_grad():
            for start in range(0, len(targets), _EVALUATED):
                part = slice(start, start + _EVALUATED)
                right += int((network(inputs[part]).argmax(1) == targets[part]).sum())
        network.train()
        return right / len(targets)

    return Task(model, loss, accuracy=accuracy if images.test else None)
