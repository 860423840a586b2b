"""VGG16 for CIFAR-10: 14,982,987 parameters (Simonyan & Zisserman 2015, configuration D; SIDCo, table 1).

As the paper's count says: no batch normalisation, one hidden layer of 512 units, and 11 outputs, of which
CIFAR-10 uses ten.
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
"""Channels and number of convolutions before every pooling."""


class VGG16(nn.Module):
    """Thirteen 3×3 convolutions in five stages, two linear layers; input (n, 3, 32, 32), output (n, classes)."""

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
        """Return the logits."""
        x = self.features(x).flatten(1)
        return self.out(F.relu(self.hidden(x)))  # type: ignore[no-any-return]


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and this rank's share of the images."""
    assert config.data_dir is not None
    return classification(config, rank, VGG16(), load_cifar10(config.data_dir))
