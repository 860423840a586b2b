"""The task of classifying images, for any network of :data:`capture.workloads.networks.NETWORKS`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.config import RunConfig
from capture.workloads.images import load_images, side_of
from capture.workloads.networks import NETWORKS
from capture.workloads.task import Task, check_batch

__all__ = ["example", "make_model", "make_task"]

_EVALUATED = 500
"""Number of unseen images that are classified at once."""


def make_model(config: RunConfig) -> nn.Module:
    """Build the network of a run.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked.

    Returns
    -------
    torch.nn.Module
        Network from images, shape (n, 3, h, w), to logits.
    """
    return NETWORKS[config.info.network](config.info.classes)


def example(config: RunConfig) -> tuple[Tensor]:
    """Return random inputs of the network.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.

    Returns
    -------
    tuple of tensor
        One batch of images.
    """
    channels = 1 if config.info.network.endswith("grey") else 3
    side = side_of(config.info)
    return (torch.randn(config.setting("batch_size"), channels, side, side),)


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and this rank's share of the images.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked.
    rank : int
        Rank of this process.

    Returns
    -------
    Task
        Model and data of this rank.

    Raises
    ------
    InputError
        If there are fewer images than a batch of all ranks.
    """
    images = load_images(config.info, config.data_dir)
    size = check_batch(config, len(images), "images")
    model = make_model(config).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(network: nn.Module, step: int) -> Tensor:
        inputs, targets = images.batch(step, size, rank, config.nproc, config.seed)
        return F.cross_entropy(
            network(inputs.contiguous(memory_format=torch.channels_last)), targets
        )

    def accuracy(network: nn.Module) -> dict[str, float]:
        network.eval()  # batch normalisation uses its running statistics
        right = count = 0
        with torch.no_grad():
            for inputs, targets in images.unseen(_EVALUATED):
                right += int((network(inputs).argmax(1) == targets).sum())
                count += len(targets)
        network.train()
        return {"accuracy": right / count} if count else {}

    return Task(model, loss, accuracy)
