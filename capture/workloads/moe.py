"""The transformer of :mod:`capture.workloads.gpt` with a mixture of experts in place of each feed-forward part.

Source: Jiang et al. 2024 (Mixtral): the 2 best of 8 experts for each word, their weights a softmax of their own two
scores; Fedus et al. 2022 (Switch), equation 4, for the loss that spreads words over experts.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads import gpt
from capture.workloads.config import RunConfig
from capture.workloads.task import Task

__all__ = ["MoE", "example", "make_model", "make_task"]

_EXPERTS, _CHOSEN = 8, 2
_BALANCE = 0.01
"""Weight of the loss that spreads words over experts, as in Switch."""


class _Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(_EXPERTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        words = x.flatten(0, 1)
        scores = self.router(words)
        best, chosen = scores.topk(_CHOSEN)
        weights = best.softmax(1)
        mixed = words.new_zeros(words.shape)
        for number, expert in enumerate(self.experts):
            # an expert that no word chose runs on none: its gradient is zero, not missing, as DDP needs it
            word, place = (chosen == number).nonzero(as_tuple=True)
            # under autocast experts answer in bfloat16
            mixed = mixed.index_add(
                0, word, (weights[word, place, None] * expert(words[word])).to(mixed.dtype)
            )
        # f of Switch's equation 4; counts have no gradient, which comes through the probabilities
        share = F.one_hot(chosen, _EXPERTS).float().mean((0, 1))
        return mixed.view_as(x), _EXPERTS * (share * scores.float().softmax(1).mean(0)).sum()


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mixture = _Experts(width)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm1(x)
        x = x + self.self_attn(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        mixed, balance = self.mixture(self.norm2(x))
        return x + mixed, balance


class MoE(gpt.GPT):
    """A :class:`capture.workloads.gpt.GPT` whose layers have 8 experts, of which each word passes 2.

    It takes the same parameters, and returns scores, shape (batch, time, vocab), and the loss that spreads words.
    """

    _layer = _Layer

    def _through(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        total = hidden.new_zeros(())
        for layer in self.layers:
            hidden, balance = layer(hidden, mask)
            total = total + _BALANCE * balance
        return hidden, total


def make_model(config: RunConfig) -> MoE:
    """Build the model of a run."""
    return MoE(config.setting("vocab"), *gpt.size_of(config))


def example(config: RunConfig) -> tuple[Tensor]:
    """Return a batch of random windows."""
    return gpt.example(config)


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and this rank's share of the data."""
    return gpt.text_task(config, rank, make_model(config), *gpt.texts(config))
