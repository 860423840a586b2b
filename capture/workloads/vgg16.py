"""VGG16 for CIFAR-10: 14,982,987 parameters.

Source: Simonyan and Zisserman 2015, configuration D, with the number of parameters of SIDCo, table 1. That number means
no batch normalisation, one hidden layer of 512 units, and 11 outputs, of which CIFAR-10 uses ten.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.classification import classification
from capture.workloads.config import RunConfig
from capture.workloads.images import load_cifar10
from capture.workloads.task import Task

__all__ = ["VGG16", "make_task"]

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and number of convolutions of every stage, which ends with a pooling."""


class VGG16(nn.Module):
    """Thirteen 3×3 convolutions in five stages, and two linear layers.

    Parameters
    ----------
    classes : int
        Number of outputs.
    """

    def __init__(self, classes: int = 11) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for channels, count in _STAGES:
            for _ in range(count):
                layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU()]
                inputs = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Linear(512, 512)
        self.out = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                module.bias.data.zero_()  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits.

        Parameters
        ----------
        x : float32 tensor, shape (n, 3, 32, 32)
            Images.

        Returns
        -------
        tensor, shape (n, classes)
            Logits.
        """
        x = self.features(x).flatten(1)
        return self.out(F.relu(self.hidden(x)))  # type: ignore[no-any-return]


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and this rank's share of the data.

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
    """
    assert config.data_dir is not None
    return classification(config, rank, VGG16(), load_cifar10(config.data_dir))
