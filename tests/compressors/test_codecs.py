"""Codecs on the wire: real processes, all compressors; what is lossless changes no bit, and nothing is lost."""

from __future__ import annotations

import functools

import pytest
import torch
from ranks import run_ranks
from support.every import every
from workers import codecs as cases

from gradstats.collectives import Codec
from gradstats.network import exchange

pytestmark = pytest.mark.distributed
WORLD = 2


@functools.cache
def reports():
    return run_ranks(WORLD, cases.compressed)


@functools.cache
def trained():
    return run_ranks(WORLD, cases.trainings)


@every("numel", cases.NUMELS)
@every("name", cases.MADE)
def test_coded_positions_change_no_bit(name, numel):
    for report in reports():
        plain, *coded = (report[name, i, "float32", numel] for i in ("plain", "rice", "chunk"))
        for one, *others in zip(plain, *coded, strict=True):
            for other in others:
                assert torch.equal(one[0], other[0])
                assert torch.equal(one[1], other[1])
    if numel > 500:
        assert sum(s[3] for s in coded[0]) < sum(s[3] for s in plain)


@every("numel", cases.NUMELS)
@every("values", ["float32", *cases.VALUES])
@every("name", cases.MADE)
def test_what_rounding_takes_off_stays_in_the_residual(name, values, numel):
    """Conservation: what the ranks sent adds up to the update, what they kept to the rest, bit for bit."""
    if values not in ("float32", *cases.values_of(name, numel)):
        return
    steps = zip(*(report[name, "rice", values, numel] for report in reports()), strict=True)
    for ranks in steps:
        means, _, sent, _, lost = zip(*ranks, strict=True)
        assert torch.equal(*means)
        assert sum(lost) == 0
        assert torch.allclose(means[0], sum(sent) / WORLD, rtol=1e-6, atol=1e-7)


@every("numel", cases.NUMELS)
@every("values", ["float32", *cases.VALUES])
@every("name", ["topk", "exact", "lags", "cltk"])
def test_bytes_on_the_wire_are_those_that_plan_says(name, values, numel):
    if values not in ("float32", *cases.values_of(name, numel)) or (name == "lags" and numel < 500):
        return  # so small a layer is sent whole
    for indices in ("plain", "rice", "chunk") if values == "float32" else ("rice",):
        ranks = [report[name, indices, values, numel] for report in reports()]
        sent = [sum(step[3] for step in steps) for steps in zip(*ranks, strict=True)]
        one = exchange(name, numel, cases.RATIO, WORLD, codec=Codec(indices, values))
        # the first step cannot know that all ranks together send more than there are elements
        assert sent[1:] == [round(WORLD * one.bytes_sent)] * (cases.STEPS - 1)


def test_dense_values_of_16_bits_leave_what_was_rounded():
    for numel in cases.NUMELS:
        steps = zip(*(report["dense-bf16", numel] for report in reports()), strict=True)
        for ranks in steps:
            means, residuals, sent, sizes, lost = zip(*ranks, strict=True)
            assert torch.equal(*means)
            assert sum(lost) == 0
            assert (
                sizes == (2 * numel,) * WORLD == (exchange("dense-bf16", numel).bytes_sent,) * WORLD
            )
            assert torch.equal(sent[0].bfloat16().float(), sent[0])
            assert torch.allclose(means[0], sum(sent) / WORLD, rtol=2**-7, atol=0.02)
            assert numel == 1 or any(r.any() for r in residuals)


def test_dense_values_of_8_bits_lose_nothing_though_they_are_rounded_twice():
    """Conservation: the gradients of all ranks are the update and the residuals, whoever has rounded what."""
    for numel in cases.NUMELS:
        reports_ = (report["dense-fp8", numel] for report in reports())
        before = [torch.zeros(numel) for _ in range(WORLD)]
        for step, ranks in enumerate(zip(*reports_, strict=True)):
            means, residuals, _, sizes, _ = zip(*ranks, strict=True)
            assert torch.equal(*means)
            given = sum(cases.gradient("laplace", numel, rank, step) for rank in range(WORLD))
            assert torch.allclose(WORLD * means[0] + sum(residuals), given + sum(before), atol=1e-5)
            error = (WORLD * means[0] - given - sum(before)).norm()
            assert error < 0.1 * (given + sum(before)).norm()
            assert sizes == (exchange("dense-fp8", numel, world=WORLD).bytes_sent,) * WORLD
            before = list(residuals)
        # one and a half bytes an element among two, and a scale for every 256
        assert numel < 10_000 or sizes[0] == pytest.approx(1.5 * (1 + 4 / 256) * numel, rel=0.01)


@every("name", cases.SYSTEMS)
def test_trainings_with_coded_positions_are_the_same_bit_for_bit(name):
    for pairs, _ in trained():
        plain, coded = pairs[name]
        assert torch.equal(plain, coded)


def test_dense_trainings_in_fewer_bits_stay_near_those_in_float32():
    for _, (dense, *narrow) in trained():
        for other in narrow:
            assert not torch.equal(dense, other)
            assert torch.allclose(dense, other, atol=2e-3)
