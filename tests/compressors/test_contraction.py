"""The k-contraction of every selector, on gradients with tails of every kind, and the bounds that rest on it."""

from __future__ import annotations

import doctest
import math

import bounds
import numpy as np
import pytest
import torch
from bounds import (
    cascading_bound,
    compensation_bound,
    convergence_bound,
    layerwise_bound,
    one_bit_bound,
    rate_iterations,
    residual_bound,
    within_tolerance,
)
from support.every import every

from gradstats.compressors import SELECTORS, make_selector
from gradstats.compressors.contraction import contraction, random_ratio
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


@every("ratio", [0.1, 0.001])
@every("tail", TAILS)
@every("name", SELECTORS)
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


@pytest.mark.parametrize("ratio", [0.1, 0.001])
def test_top_k_keeps_the_k_largest_and_their_values(ratio):
    g = torch.from_numpy(np.random.default_rng(0).standard_t(3, D))
    selection = make_selector("topk", ratio).select(g)
    k = round(ratio * D)
    assert torch.equal(selection.indices, g.abs().topk(k).indices.sort().values)
    assert torch.equal(selection.values, g[selection.indices])


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


def test_how_often_k_is_within_its_tolerance():
    kept = [80, 120, 79, 121, 100]
    assert within_tolerance(kept, 100) == 0.6
    assert within_tolerance(kept, 100, low=0.21) == 0.8
    assert within_tolerance(kept, 100, high=0.3) == 0.8
    assert within_tolerance(kept, 100, window=2) == 1  # the fifth step is left out
    assert within_tolerance([0, 400], 100, window=2) == 0
    assert math.isnan(within_tolerance(kept, 100, window=6))
    for wrong in ({"low": 1.0}, {"high": -0.1}, {"window": 0}):
        with pytest.raises(InputError):
            within_tolerance(kept, 100, **wrong)


def test_the_bounds_in_closed_form():
    assert rate_iterations(0.01, 0.5) == pytest.approx(4e4)
    assert rate_iterations(0.01) * 0.8**-2 == pytest.approx(rate_iterations(0.01, 0.2))
    assert rate_iterations(0.012) < rate_iterations(0.01)
    # dense: theorem II of Karimireddy et al. without its second term; a tenth of the elements: 360 σ²L²/(I + 1) more
    dense = (4 * 2 + 3 * 5) / (2 * 10)
    assert convergence_bound(2, 3, 5, 1.0, 99) == pytest.approx(dense)
    assert convergence_bound(2, 3, 5, 0.1, 99) == pytest.approx(dense + 360 * 9 * 5 / 100)
    assert cascading_bound(50, 3, 2.0) == pytest.approx(100**3 * 4 / 3)
    assert cascading_bound(50, 2, 1.0, parts=2) == pytest.approx(50**2 / 2)
    assert cascading_bound(10**9, 100, 1.0) == math.inf
    for call in (
        lambda: rate_iterations(0.0),
        lambda: rate_iterations(0.1, 1.0),
        lambda: convergence_bound(1, 1, 1, 0.1, 0),
        lambda: residual_bound([0.1], 1, 2.0),
        lambda: residual_bound([0.1], 1, 0.5, eta=0.0),
        lambda: cascading_bound(0, 2, 1.0),
    ):
        with pytest.raises(InputError):
            call()


def test_the_bounds_of_layers_and_of_one_bit_as_their_proofs_have_them():
    rates, ratio = [0.5, 0.4, 0.45, 0.2, 0.1], 0.25
    dense = (2 * 3 + 2 * 5 * sum(a * a for a in rates)) / sum(rates)
    assert layerwise_bound(3, 2, 5, 1.0, rates) == pytest.approx(dense)
    found = []
    for eta in np.geomspace(1e-4, 1e3, 200):
        base = (1 - ratio) * (1 + eta)
        # eq. 15 of every step, as a sum over all steps before it
        sums = [sum(base**i * rates[t - i] ** 2 for i in range(1, t + 1)) for t in range(5)]
        constant = max(each / rate for each, rate in zip(sums, rates, strict=True))
        noise = (2 + 4 * constant / eta) * 5 * sum(a * a for a in rates)
        found.append((2 * 3 + noise) / sum(rates))
    assert layerwise_bound(3, 2, 5, ratio, rates) == pytest.approx(min(found))
    assert layerwise_bound(3, 2, 5, 0.1, rates) > layerwise_bound(3, 2, 5, ratio, rates) > dense
    # corollary 2: four times the steps halve its first term, and quarter the second
    first, second = (
        layerwise_bound(1, 1, 1, 0.1, [1 / math.sqrt(t)] * t) - 3 / math.sqrt(t) for t in (100, 400)
    )
    assert first == pytest.approx(4 * second, rel=0.05)
    # Marsit: of the noise of M ranks a part is left, and the 6 of eq. 7 stands in the divisor
    rate, rounds = math.sqrt(2 / 1000), 5 * 6
    share = 1 - 0.3 * rate - 6 * 0.09 * rate**2 * rounds
    above = 2 * 2.3 / (rate * 1000) + 0.3 * rate * 0.7 / 2
    above += 6 * 0.09 * rounds * (rate**2 * 0.7 / 2 + 1 / 1000)
    assert one_bit_bound(2.3, 0.3, 0.7, 2, 5, 1000) == pytest.approx(above / share)
    assert one_bit_bound(2.3, 0.3, 0.7, 2, 50, 1000) == math.inf
    for call in (
        lambda: layerwise_bound(1, 1, 1, 0.0, rates),
        lambda: one_bit_bound(1, 1, 1, 0, 5, 10),
        lambda: one_bit_bound(1, 1, 1, 2, 0, 10),
    ):
        with pytest.raises(InputError):
            call()


def test_the_examples_of_the_bounds():
    found = doctest.testmod(bounds)
    assert found.attempted
    assert not found.failed


def test_error_feedback_on_a_quadratic_keeps_its_bound():
    """f(x) = ½ Σ λ x², λ ≤ 1, with noise: eq. 43 with the contraction of the worst step."""
    rng, d, steps = np.random.default_rng(2), 200, 400
    curvature = torch.from_numpy(rng.uniform(0.1, 1, d))
    x = torch.from_numpy(rng.standard_normal(d)) / 4
    gap = float((curvature * x.square()).sum() / 2)
    memory, rate = torch.zeros(d, dtype=torch.float64), 1 / math.sqrt(steps + 1)
    selector, worst, least, second = make_selector("topk", 0.05), 1.0, math.inf, 0.0
    for _ in range(steps + 1):
        exact = curvature * x
        least = min(least, float(exact.square().sum()))
        g = exact + 0.01 * torch.from_numpy(rng.standard_normal(d))
        second = max(second, float(g.square().sum()))
        corrected = rate * g + memory
        selection = selector.select(corrected)
        sent = torch.zeros_like(corrected)
        sent[selection.indices] = selection.values
        worst = min(worst, 1 - contraction(corrected, sent, 0.05).left)
        memory, x = corrected - sent, x - sent
    assert worst >= 0.05
    assert least <= convergence_bound(gap, 1.0, second, worst, steps)


def test_a_random_draw_has_the_expectation_that_replaces_it():
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(500, generator=generator)
    sent = torch.where(total.abs() > 1.5, total, 0)
    count = int(sent.count_nonzero())
    drawn = [1 / random_ratio(total, sent, count, generator) for _ in range(400)]
    expected = 1 / random_ratio(total, sent, count)
    assert abs(np.mean(drawn) - expected) < 5 * np.std(drawn) / 20
    assert np.std(drawn) > 0
    assert random_ratio(3 * total, 3 * sent, count) == pytest.approx(1 / expected)
    assert math.isnan(random_ratio(total, total, 500))
    assert math.isnan(random_ratio(total, total, 500, generator))
    assert math.isnan(random_ratio(torch.zeros(4), torch.zeros(4), 1))


def test_layers_contract_by_the_largest_ratio():
    """LAGS-SGD's lemma 1: the sum of four ranks' layers keeps 1/c_max at least, where each layer keeps 1/c_l."""
    rng = np.random.default_rng(3)
    ranks = [torch.from_numpy(rng.standard_t(3, 3000)) for _ in range(4)]
    layers = [(slice(0, 1000), 0.1), (slice(1000, 1200), 0.05), (slice(1200, 3000), 0.5)]
    total, sent = torch.stack(ranks).sum(0), torch.zeros(3000, dtype=torch.float64)
    deltas = []
    for part, ratio in layers:
        for x in ranks:
            selection = make_selector("topk", ratio).select(x[part])
            sent[part.start + selection.indices] += selection.values
        count = round(ratio * (part.stop - part.start))
        deltas.append(random_ratio(total[part], sent[part], count))
    assert max(deltas) <= 1
    found = contraction(total, sent, min(ratio for _, ratio in layers))
    assert found.holds
    # and no ratio above the least one would do for every layer
    assert all(contraction(total[part], sent[part], ratio).holds for part, ratio in layers)


def test_the_compensation_of_marsit_keeps_its_bound():
    """Marsit's eq. 7, with signs that are as wrong as they can be: every update goes the other way."""
    rng, every = np.random.default_rng(5), 8
    compensation, gradients, updates = np.zeros(100), [], []
    for _ in range(every):
        bound = compensation_bound(gradients, updates, every)
        assert compensation @ compensation <= bound
        g = 1 + rng.standard_normal(100)
        update = -np.abs(g).mean() * np.sign(g + compensation)
        compensation = compensation + g - update
        gradients.append(g @ g)
        updates.append(update @ update)
    assert compensation_bound(gradients, updates, every) == pytest.approx(
        54 * (sum(gradients) + sum(updates))
    )
    assert compensation @ compensation > sum(gradients) + sum(updates)
    assert compensation_bound([], [], 1) == 0
    with pytest.raises(InputError):
        compensation_bound([1.0], [1.0], 0)


@pytest.mark.parametrize("eta", [None, 0.05, 1.0])
def test_the_distance_from_dense_training_keeps_its_bound(eta):
    """LAGS-SGD's corollary 1, with top-k whose contraction is known and gradients of norm 1."""
    rng, ratio = np.random.default_rng(4), 0.2
    rates = [0.1] * 30 + [0.01] * 10
    memory, selector = torch.zeros(300, dtype=torch.float64), make_selector("topk", ratio)
    for i, rate in enumerate(rates, 1):
        g = torch.from_numpy(rng.standard_normal(300))
        corrected = rate * g / g.norm() + memory
        selection = selector.select(corrected)
        memory = corrected.clone()
        memory[selection.indices] = 0
        bound = residual_bound(rates[:i], 1.0, ratio, eta)
        assert float(memory.square().sum()) <= bound * (1 + 1e-12)
    assert residual_bound(rates, 1.0, ratio) <= residual_bound(rates, 1.0, ratio, 0.1)
    assert residual_bound(rates, 1.0, 1.0) == 0
    # the last step's rate counts once contracted, the one before twice
    assert residual_bound([0.0, 1.0], 1.0, 0.5, 0.5) == pytest.approx(0.75 / 0.5)
    assert residual_bound([1.0, 0.0], 1.0, 0.5, 0.5) == pytest.approx(0.75**2 / 0.5)
