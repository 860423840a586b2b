"""Fragments of local steps beside a loop over two ranks that differ, every number of which is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_ranks
from workers import local_fragments as cases
from workers.local_fragments import DECAY, DELAY, MIX, OUTER, RATE, RATIO, STEPS, H

from gradstats.compressors import TopK
from gradstats.hooks import LocalSteps
from gradstats.primitives.ratio import target_count

pytestmark = pytest.mark.distributed
FIRST = 6 * 5 + 5
"""Elements of the first fragment; the other one has the normalisation and the last layer."""


@pytest.fixture(scope="module")
def two():
    return run_ranks(2, cases.two_ranks)


def expected(case):
    """Return each rank's parameters after every step and at the end, from the papers' formulas."""
    start = cases.flat(cases.net(0)).astype(float)
    shapes = [p.shape for p in cases.net(0).parameters()]
    now, anchor = [start.copy() for _ in range(2)], start.copy()
    left = np.zeros((2, start.size))
    parts = [slice(0, FIRST), slice(FIRST, start.size)]
    waiting, sent_at, seen = {}, [0, 0], ([], [])

    def mean_of(part):
        deltas = np.array([anchor[part] - now[r][part] for r in range(2)])
        if case != "remembered":
            return deltas.mean(axis=0)
        left[:, part] = DECAY * left[:, part] + deltas
        sent = np.zeros_like(deltas)
        for r in range(2):
            k = target_count(RATIO, sent[r].size)
            chosen = np.argsort(-np.abs(left[r, part]))[:k]
            sent[r, chosen] = left[r, part][chosen]
        left[:, part] -= sent
        return sent.mean(axis=0)

    def apply(part, mean, mix):
        anchor[part] -= OUTER * mean
        for r in range(2):
            now[r][part] = mix * now[r][part] + (1 - mix) * anchor[part]

    for step in range(1, STEPS + 1):
        for r in range(2):
            drawn = [cases.gradient(r, step - 1, i, s).reshape(-1) for i, s in enumerate(shapes)]
            now[r] -= RATE * torch.cat(drawn).numpy()
        for i, part in enumerate(parts):
            if i in waiting and step >= waiting[i][0]:
                apply(part, waiting.pop(i)[1], MIX[case])
            if (step - (i + 1) * H // 2) % H == 0:
                mean, sent_at[i] = mean_of(part), step
                if DELAY[case]:
                    waiting[i] = step + DELAY[case], mean
                else:
                    apply(part, mean, 0)
        for r in range(2):
            seen[r].append(now[r].copy())
    for i, (_, mean) in waiting.items():
        apply(parts[i], mean, MIX[case] if sent_at[i] < STEPS else 0)
    for at, part in zip(sent_at, parts, strict=True):
        if at < STEPS or DELAY[case]:
            apply(part, mean_of(part), 0)
    for r in range(2):
        seen[r].append(now[r].copy())
    return seen


@pytest.mark.parametrize("case", MIX)
def test_fragments_are_their_formulas_step_by_step(two, case):
    """The mix of a late result, a memory of each fragment, and what is left at the end."""
    for rank, seen in enumerate(expected(case)):
        found = two[rank][case][0]
        assert len(found) == len(seen) == STEPS + 1
        for step, (one, other) in enumerate(zip(found, seen, strict=True)):
            np.testing.assert_allclose(one, other, atol=2e-5, err_msg=f"rank {rank}, step {step}")
    assert np.array_equal(two[0][case][0][-1], two[1][case][0][-1])


@pytest.mark.parametrize("case", MIX)
def test_what_is_under_way_at_a_restart_is_applied_when_it_is_due(two, case):
    """Saved a step after one fragment has sent, two steps before that is applied where the delay is three."""
    for rank in two:
        whole, resumed = rank[case]
        assert len(resumed) == STEPS + 1 - 5
        for step, (one, other) in enumerate(zip(whole[5:], resumed, strict=True)):
            assert np.array_equal(one, other), step


def test_buffers_are_those_of_the_first_rank(two):
    assert two[0]["buffers"] == [[1.0] * 5, [1.0] * 5, 7]
    assert two[1]["buffers"] == two[0]["buffers"]


def test_each_fragment_has_a_rule_of_its_own_and_the_record_has_all_of_them(two):
    """Of the second fragment, a hundred times as large, the first one's threshold would keep all."""
    sizes = (FIRST, cases.flat(cases.net(0)).size - FIRST)
    targets = sum(target_count(RATIO, n) for n in sizes)
    for rank in two:
        assert rank["hard"] == (sum(sizes), targets, targets)


@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_what_is_not_finite_is_gone_when_the_late_result_is_applied(two, policy):
    """Sent after the fourth step and applied after the sixth: not at the end of the block alone."""
    assert two[0][policy] == [True] * 11
    assert two[1][policy] == [True] * 3 + [False] * 2 + [True] * 6


def test_a_pattern_may_exclude_of_one_fragment_alone(one_rank):
    def made(*patterns):
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        net[1].bias.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
        local = LocalSteps(
            net, optimizer, steps=4, compressor=TopK(0.1), fragments=2, exclude=patterns
        )
        return [f.state._setup.layout.names for f in local._fragments]

    # a frozen parameter's pattern is no mistake
    assert made("0.bias", "1.weight", "1.bias") == [["0.weight"], []]
    with pytest.warns(
        UserWarning, match="called bias, so it excludes nothing; the first of 4 is 0.weight$"
    ) as warned:
        assert made("bias", "1.weight") == [["0.weight"], ["0.bias"]]
    assert len(warned) == 1
