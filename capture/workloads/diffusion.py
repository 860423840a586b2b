"""A diffusion model of the digits: a U-Net that tells the noise in an image.

Source: Ho et al. 2020 (DDPM), loss of equation 14; Nichol and Dhariwal 2021 for the cosine by which the noise grows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.config import RunConfig
from capture.workloads.images import load_images, side_of
from capture.workloads.task import Task, check_batch, generator

__all__ = ["UNet", "example", "make_model", "make_task"]

_WIDTH, _TIME, _STEPS = 32, 64, 1000


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(_TIME, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        total: Tensor = self.skip(x) + self.conv2(F.silu(self.norm2(y)))
        return total


class UNet(nn.Module):
    """Three resolutions, with residual blocks on the way down and on the way up, each of which has the step."""

    def __init__(self) -> None:
        super().__init__()
        w = _WIDTH
        self.time = nn.Sequential(nn.Linear(_TIME, _TIME), nn.SiLU())
        self.first, self.last = nn.Conv2d(1, w, 3, padding=1), nn.Conv2d(w, 1, 3, padding=1)
        self.down = nn.ModuleList([_Block(w, w), _Block(w, 2 * w)])
        self.smaller = nn.ModuleList([nn.Conv2d(c, c, 3, 2, 1) for c in (w, 2 * w)])
        self.middle = _Block(2 * w, 2 * w)
        self.up = nn.ModuleList([_Block(4 * w, 2 * w), _Block(3 * w, w)])
        self.norm = nn.GroupNorm(8, w)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """Tell the noise.

        Parameters
        ----------
        x : float32 tensor, shape (n, 1, h, w)
            Noisy images.
        step : int64 tensor, shape (n,)
            Step of the noise of each, below 1,000.

        Returns
        -------
        tensor, shape (n, 1, h, w)
            Noise.
        """
        # the step as sines and cosines of falling frequencies, as transformers tell positions
        rates = torch.exp(-math.log(1e4) * torch.arange(_TIME // 2) / (_TIME // 2))
        angles = step[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        y, skips = self.first(x), []
        for block, smaller in zip(self.down, self.smaller, strict=True):
            skips.append(block(y, time))
            y = smaller(skips[-1])
        y = self.middle(y, time)
        for block in self.up:
            larger = y.repeat_interleave(2, 2).repeat_interleave(2, 3)
            y = block(torch.cat([larger, skips.pop()], 1), time)
        noise: Tensor = self.last(F.silu(self.norm(y)))
        return noise


def make_model(config: RunConfig) -> UNet:
    """Build the model of a run."""
    return UNet()


def example(config: RunConfig) -> tuple[Tensor, Tensor]:
    """Return a batch of random images and steps."""
    size, side = config.setting("batch_size"), side_of(config.info)
    return torch.randn(size, 1, side, side), torch.randint(_STEPS, (size,))


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and this rank's share of the images."""
    images = load_images(config.info, config.data_dir)
    size = check_batch(config, len(images), "images")
    # equation 17 of Nichol and Dhariwal, with s = 0.008: the share of the signal is f(t) / f(0), f a squared cosine
    angle = (torch.arange(_STEPS) / _STEPS + 0.008) / 1.008 * math.pi / 2
    # its root is what an image is multiplied by, and what is left of 1 belongs to the noise
    signal = (angle.cos() / angle[0].cos())[:, None, None, None]
    noise_size = (1 - signal**2).sqrt()

    def loss(network: nn.Module, step: int) -> Tensor:
        # the digit itself, without the differences in the other channels
        clean = images.batch(step, size, rank, config.nproc, config.seed)[0][:, :1]
        # 1: other numbers than those of the augmentation, which has seed, step and rank + 1 alone
        random = generator(config.seed, step, rank + 1, 1)
        noise = torch.randn(clean.shape, generator=random)
        at = torch.randint(_STEPS, (size,), generator=random)
        return F.mse_loss(network(signal[at] * clean + noise_size[at] * noise, at), noise)

    return Task(make_model(config), loss)
