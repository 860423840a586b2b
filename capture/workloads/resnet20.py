"""ResNet-20 for small images (He et al. 2016, section 4.2): 269,722 parameters for 10 classes."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.classification import classification
from capture.workloads.config import RunConfig
from capture.workloads.images import load_cifar10, load_digits
from capture.workloads.task import Task

__all__ = ["ResNet20", "make_task"]


class _Block(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters (option A: subsample, pad channels with zeros)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.padding = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.padding:
            x = F.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding)
            )
        return F.relu(x + y)


class ResNet20(nn.Module):
    """Three stages of three blocks, of widths 16, 32 and 64.

    Parameters
    ----------
    classes : int
        Number of outputs.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.Sequential(
            *(_Block(i, o, 1 if i == o else 2) for i, o in pairwise(widths))
        )
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits.

        Parameters
        ----------
        x : float32 tensor, shape (n, 3, h, w)
            Images.

        Returns
        -------
        tensor, shape (n, classes)
            Logits.
        """
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.blocks(x).mean(dim=(2, 3)))  # type: ignore[no-any-return]


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
    if config.workload == "resnet20-cifar10":
        assert config.data_dir is not None
        images = load_cifar10(config.data_dir)
    else:
        images = load_digits()
    return classification(config, rank, ResNet20(), images)
