"""A recommender that predicts clicks from tables of embeddings, of which each batch touches few rows.

Source: Naumov et al. 2019 (DLRM), small. Clicks are generated from a known model: a bias for every value of every
field, and products of the fields' hidden vectors. Values are as frequent as Zipf's law has it. The tables' gradients
are dense, with zeros in rows that no sample of the batch has: those of ``nn.Embedding(sparse=True)`` are averaged
without compression (:func:`gradstats.hooks.compression_hook`), and AdamW and Muon do not take them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.config import RunConfig
from capture.workloads.task import Task, generator

__all__ = ["Recommender", "example", "make_model", "make_task"]

_ROWS = (20, 50, 100, 200, 500, 1000, 2000, 8000)
"""Values of each field."""
_DENSE, _WIDTH = 8, 16
_UNSEEN = 20_000
"""Samples that the final model is judged on."""


class Recommender(nn.Module):
    """A table for each field, a small network for the numbers, products of every two vectors, and a network on top."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, _WIDTH) for rows in _ROWS)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]
        self.bottom = nn.Sequential(
            nn.Linear(_DENSE, 64), nn.ReLU(), nn.Linear(64, _WIDTH), nn.ReLU()
        )
        vectors = len(_ROWS) + 1
        inputs = _WIDTH + vectors * (vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, values: Tensor) -> Tensor:
        """Return the logits of a click.

        Parameters
        ----------
        numbers : float32 tensor, shape (n, 8)
            Features that are numbers.
        values : int64 tensor, shape (n, fields)
            Value of each field.

        Returns
        -------
        tensor, shape (n, 1)
            Logits.
        """
        dense = self.bottom(numbers)
        vectors = [dense, *(t(values[:, i]) for i, t in enumerate(self.tables))]
        stacked = torch.stack(vectors, 1)
        # each pair once, and no vector with itself
        rows, columns = torch.triu_indices(len(vectors), len(vectors), 1)
        products = (stacked @ stacked.transpose(1, 2))[:, rows, columns]
        logits: Tensor = self.top(torch.cat([dense, products], 1))
        return logits


class _Clicks:
    """The model that generates the clicks."""

    def __init__(self, seed: int) -> None:
        random = generator(seed, 9)
        self.biases = [0.5 * torch.randn(rows, generator=random) for rows in _ROWS]
        self.hidden = [0.5 * torch.randn(rows, 4, generator=random) for rows in _ROWS]
        self.slopes = 0.5 * torch.randn(_DENSE, generator=random)
        # Zipf's law: the n-th value is n times as rare as the first
        self.chances = [1 / torch.arange(1, rows + 1.0) for rows in _ROWS]

    def draw(self, count: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        values = torch.stack(
            [torch.multinomial(c, count, replacement=True, generator=random) for c in self.chances],
            1,
        )
        numbers = torch.randn(count, _DENSE, generator=random)
        drawn = torch.stack([h[v] for h, v in zip(self.hidden, values.t(), strict=True)])
        # products of all pairs of hidden vectors: half of what the square of a sum has more than the sum of squares
        logits = numbers @ self.slopes + (drawn.sum(0) ** 2 - (drawn**2).sum(0)).sum(1) / 2
        logits = logits + sum(b[v] for b, v in zip(self.biases, values.t(), strict=True)) - 1
        clicks = torch.rand(count, generator=random) < logits.sigmoid()
        return numbers, values, clicks.float()


def make_model(config: RunConfig) -> Recommender:
    """Build the model of a run."""
    return Recommender()


def example(config: RunConfig) -> tuple[Tensor, Tensor]:
    """Return a batch of generated samples."""
    return _Clicks(config.seed).draw(config.setting("batch_size"), generator(config.seed))[:2]


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and what generates this rank's samples."""
    clicks, size = _Clicks(config.seed), config.setting("batch_size")

    def loss(network: nn.Module, step: int) -> Tensor:
        numbers, values, clicked = clicks.draw(size, generator(config.seed, step, rank + 1))
        return F.binary_cross_entropy_with_logits(network(numbers, values)[:, 0], clicked)

    def accuracy(network: nn.Module) -> dict[str, float]:
        # the same samples whenever it is asked, on all ranks
        numbers, values, clicked = clicks.draw(_UNSEEN, generator(config.seed, 10))
        with torch.no_grad():
            right = (network(numbers, values)[:, 0] > 0) == (clicked > 0)
        return {"accuracy": float(right.float().mean())}

    return Task(make_model(config), loss, accuracy)
