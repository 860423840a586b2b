"""Low-rank adapters on a frozen transformer.

Source: Hu et al. 2021 (LoRA). Nothing is downloaded: the transformer learns the first half of the text for a few
seconds on each rank, alike by the seed, and its adapters then learn the second half.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from capture.workloads import gpt
from capture.workloads.config import RunConfig
from capture.workloads.task import Task

__all__ = ["example", "make_model", "make_task"]

_RANK, _SCALE = 8, 2.0
_FIRST_STEPS, _FIRST_RATE = 150, 2e-3
"""Training of the transformer by itself, before it is frozen: steps of AdamW, and their learning rate."""


class _Adapter(nn.Module):
    """What a weight is with its adapter, W + 2·B·A: B begins at zero, so that the first output is the transformer's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(torch.empty(_RANK, columns))
        self.b = nn.Parameter(torch.zeros(rows, _RANK))
        nn.init.normal_(self.a, std=columns**-0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + _SCALE * self.b @ self.a


def _adapted(model: gpt.GPT) -> gpt.GPT:
    # before the adapters come, which are trained
    model.requires_grad_(False)
    for layer in model.layers:
        assert isinstance(layer, nn.TransformerEncoderLayer)
        attention = layer.self_attn
        for owner, name in (
            # the matrices of a layer; norms and biases stay as they are
            (attention, "in_proj_weight"),
            (attention.out_proj, "weight"),
            (layer.linear1, "weight"),
            (layer.linear2, "weight"),
        ):
            parametrize.register_parametrization(owner, name, _Adapter(getattr(owner, name)))
    return model


def make_model(config: RunConfig) -> gpt.GPT:
    """Build the model of a run, with its adapters; only they are trained."""
    return _adapted(gpt.make_model(config))


def example(config: RunConfig) -> tuple[Tensor]:
    """Return a batch of random windows."""
    return gpt.example(config)


def make_task(config: RunConfig, rank: int) -> Task:
    """Train the transformer on half of the text, freeze it, and give its adapters the other half."""
    ids, unseen = gpt.texts(config)
    half = len(ids) // 2
    model = gpt.make_model(config)
    # as if there were one rank, so that all of them train alike, and need no exchange
    alone = config.replace(nproc=1)
    first = gpt.text_task(alone, 0, model, ids[:half], None)
    optimizer = torch.optim.AdamW(model.parameters(), _FIRST_RATE)
    for step in range(_FIRST_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(first.loss(model, step))
        optimizer.step()
    # what is frozen from here on must not keep a gradient
    model.zero_grad()
    return gpt.text_task(config, rank, _adapted(model), ids[half:], unseen)
