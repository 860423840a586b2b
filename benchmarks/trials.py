"""What a trial of compression decides on differences of known size, and on a training that differs by chance only."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn

from gradstats.hooks.trial import Decision, Trial, decide

__all__ = ["DIFFERENCES", "OPTIMIZERS", "decisions", "trained"]

TOLERANCE = 0.02
PAIRS = 8
_STEPS, _BATCH = 60, 32
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

DIFFERENCES: dict[str, Draw] = {
    "normal, 0.5 %": lambda rng, n: 0.005 * rng.standard_normal(n),
    "normal, 2 %": lambda rng, n: 0.02 * rng.standard_normal(n),
    "Student's t(3), 1 %": lambda rng, n: 0.01 * rng.standard_t(3, n),
    "exponential, 1 %": lambda rng, n: 0.01 * (rng.exponential(size=n) - 1),
    "a fifth in one of ten": lambda rng, n: (
        0.002 * rng.standard_normal(n) + 0.2 * (rng.random(n) < 0.1) - 0.02
    ),
}
"""Noise of the relative difference of a pair's losses."""
EVEN = tuple(DIFFERENCES)[:3]
"""Noise that is as often above its mean as below."""

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "SGD": lambda parameters, factor: torch.optim.SGD(parameters, lr=0.1 * factor, momentum=0.9),
    "AdamW": lambda parameters, factor: torch.optim.AdamW(parameters, lr=0.003 * factor),
}


def decisions(noise: str, rng: np.random.Generator) -> dict[float, Decision]:
    """Decide on pairs that differ by none, the tolerance, and 5 and 10 % in the mean, by the same noise."""
    drawn = DIFFERENCES[noise](rng, PAIRS)
    return {mean: _sequence(mean + drawn) for mean in (0.0, TOLERANCE, 0.05, 0.1)}


def _sequence(above: NDArray[np.float64]) -> Decision:
    for n in range(1, PAIRS + 1):
        decision, _, _ = decide([float(v) for v in above[:n]], TOLERANCE, PAIRS)
        if decision != "undecided":
            return decision
    return "undecided"


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.from_numpy(digits.data / 16).float(), torch.from_numpy(digits.target)


def trained(optimizer: str, seed: int) -> dict[str, Decision]:
    """Run two trials of a perceptron with dropout: other batches from the second step on, and a tenth of the rate."""
    x, y = _digits()
    # the first one imports much, which is to be frozen, too
    OPTIMIZERS[optimizer]([nn.Parameter(x)], 1.0)
    gc.freeze()  # a trial collects garbage after each run: most of its time, if all that is imported is looked at

    def train(install: Callable[[nn.Module], Any], seed: int) -> Iterator[torch.Tensor]:
        model = nn.Sequential(
            nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
        )
        changed = install(model)
        stepped = OPTIMIZERS[optimizer](model.parameters(), 0.1 if changed == "rate" else 1.0)
        for step in range(_STEPS):
            if step == 1 and changed == "batches":
                torch.manual_seed(seed + 2**20)
            batch = torch.randint(len(x), (_BATCH,))
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            yield loss
            stepped.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            stepped.step()

    def decided(what: str) -> Decision:
        return Trial(train, lambda _: what, steps=_STEPS, pairs=PAIRS, seed=seed).run().decision

    return {what: decided(what) for what in ("batches", "rate")}
