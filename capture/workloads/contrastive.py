"""Contrastive learning without labels: two views of each digit are to be nearer to each other than to other digits.

Source: Chen et al. 2020 (SimCLR), equation 1. Each rank contrasts its own batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.classification import example, make_model
from capture.workloads.config import RunConfig
from capture.workloads.images import load_images
from capture.workloads.task import Task, check_batch, generator

__all__ = ["example", "make_model", "make_task"]

_TEMPERATURE = 0.2
_ERASED = 6
"""Side of the square that a view lacks."""


def _view(images: Tensor, random: torch.Generator) -> Tensor:
    """Return images of another contrast, each without a square, and with noise."""
    n, _, side, _ = images.shape
    contrast = 0.5 + torch.rand(n, 1, 1, 1, generator=random)
    # of each image's square the first row and the first column
    first = torch.randint(side - _ERASED + 1, (2, n, 1), generator=random)
    place = torch.arange(side)
    rows, columns = (place >= first) & (place < first + _ERASED)
    mask = ~(rows[:, :, None] & columns[:, None, :])
    view: Tensor = contrast * images * mask[:, None]
    return view + 0.1 * torch.randn(images.shape, generator=random)


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and this rank's share of the images."""
    images = load_images(config.info, config.data_dir)
    size = check_batch(config, len(images), "images")
    # the other view of image i is i + size, of 2 size in all
    partner = torch.arange(2 * size).roll(size)

    def loss(network: nn.Module, step: int) -> Tensor:
        batch, _ = images.batch(step, size, rank, config.nproc, config.seed)
        # 1: other numbers than those of the augmentation, which has seed, step and rank + 1 alone
        random = generator(config.seed, step, rank + 1, 1)
        codes = F.normalize(network(torch.cat([_view(batch, random), _view(batch, random)])))
        alike = codes @ codes.t() / _TEMPERATURE
        # a view is not compared with itself, with which it is most alike
        itself = torch.eye(2 * size, dtype=torch.bool)
        return F.cross_entropy(alike.masked_fill(itself, -torch.inf), partner)

    return Task(make_model(config), loss)
