"""A model whose gradient is whatever is wanted, to the bit: no processor's matrix product is in it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

SHAPES = {"words": (20, 12), "bias": (12,), "kernel": (7, 5, 2), "scale": (3,)}


class Model(nn.Module):
    """Parameters of a few shapes; the gradient of each is what the forward pass is told."""

    def __init__(self):
        super().__init__()
        for name, values in zip(SHAPES, gradients(9, 9), strict=True):
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, wanted):
        own = dict(self.named_parameters())
        return sum((own[n] * g).sum() for n, g in zip(SHAPES, wanted, strict=True) if n in own)


def gradients(rank, step, part=0):
    """Return the gradients of a rank in a step, in the order of the parameters."""
    rng = np.random.default_rng([41, rank, step, part])
    return [torch.from_numpy(rng.laplace(size=s).astype(np.float32)) for s in SHAPES.values()]


def backward(model, rank, step, part=0):
    model(gradients(rank, step, part)).backward()


def flat_gradient(model):
    return torch.cat([p.grad.detach().reshape(-1) for p in model.parameters()])


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
