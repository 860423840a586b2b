"""The k-contraction of every selector, on gradients with tails of every kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradstats.compressors import SELECTORS, make_selector
from gradstats.compressors.contraction import contraction
from gradstats.errors import InputError

D = 100_000
TAILS = {
    "laplace": lambda rng: rng.laplace(size=D),
    "t3": lambda rng: rng.standard_t(3, D),
    "uniform": lambda rng: rng.uniform(-1, 1, D),
    "equal": lambda rng: rng.choice([-1.0, 1.0], D),
}


def sent_of(selection):
    sent = torch.zeros(D)
    sent[selection.indices] = selection.values
    return sent


@pytest.mark.parametrize("ratio", [0.1, 0.001])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", SELECTORS)
def test_what_reaches_a_threshold_contracts_by_its_own_share(name, tail, ratio):
    g = torch.from_numpy(TAILS[tail](np.random.default_rng(0)).astype(np.float32))
    selector = make_selector(name, ratio)
    for _ in range(3):
        selection = selector.select(g)
        found = contraction(g, sent_of(selection), ratio)
        assert found.kept == len(selection) / D
        # the sums round where all elements are equal and the bound is met exactly
        assert found.left <= found.measured_bound + 1e-12
        if len(selection) >= ratio * D:
            assert found.left <= found.bound + 1e-12


def test_random_positions_meet_the_bound_on_average_and_the_smallest_break_it():
    rng = np.random.default_rng(1)
    g = torch.from_numpy(rng.standard_t(4, D))
    left = []
    for _ in range(200):
        sent = torch.zeros_like(g)
        positions = torch.from_numpy(rng.choice(D, D // 10, replace=False))
        sent[positions] = g[positions]
        left.append(contraction(g, sent, 0.1).left)
    assert abs(np.mean(left) - 0.9) < 5 * np.std(left) / np.sqrt(len(left))
    sent = torch.zeros_like(g)
    smallest = g.abs().argsort()[: D // 10]
    sent[smallest] = g[smallest]
    broken = contraction(g, sent, 0.1)
    assert (broken.holds, broken.holds_measured) == (False, False)


def test_the_edges():
    nothing = contraction(torch.zeros(5), torch.zeros(5), 0.5)
    assert math.isnan(nothing.left)
    assert nothing.holds
    assert contraction(torch.ones(4), torch.ones(4), 1.0).left == 0
    few = contraction(torch.tensor([2.0, 1.0, 1.0, 1.0]), torch.tensor([2.0, 0, 0, 0]), 0.75)
    assert (few.holds, few.holds_measured) == (False, True)
    with pytest.raises(InputError, match=r"what was sent has shape \(3,\), not \(4,\)"):
        contraction(torch.ones(4), torch.ones(3), 0.5)
