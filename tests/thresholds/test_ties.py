"""Many equal elements, and thresholds that no element reaches: what every rule keeps of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.every import every

from gradstats import select
from gradstats.thresholds import ESTIMATORS, make_estimator

RATIO = 0.001


def clipped(share, n=300_000):
    v = np.random.default_rng(2).laplace(size=n).astype(np.float32)
    bound = np.quantile(np.abs(v), 1 - share)
    return np.clip(v, -bound, bound).astype(np.float32)


def gradients():
    x = np.random.default_rng(1).laplace(size=50_000).astype(np.float32)
    yield "clipped at 0.2 %", clipped(0.002)
    yield "clipped at 2 %", clipped(0.02)
    yield "clipped, 2M", np.clip(np.resize(x, (1 << 21) + 5) + np.float32(0), -1.3, 1.3)
    yield "signs", np.sign(x)
    yield "one magnitude", np.full(3000, 0.003, np.float32)
    yield "e5m2", (torch.from_numpy(x) * 1e-3).to(torch.float8_e5m2).float().numpy()
    step = np.abs(x).max() / 7
    yield "int4", (np.rint(x / step) * step).astype(np.float32)
    yield "one element", np.full(1, -2, np.float32)
    yield "uniform", np.random.default_rng(3).uniform(-1, 1, 1000).astype(np.float32)
    yield "float64", clipped(0.02).astype(np.float64) * 1e-30
    yield "tensor", torch.from_numpy(clipped(0.02)).bfloat16()


@every("name", [n for n in ESTIMATORS if n != "hard"])
def test_no_threshold_exceeds_the_largest_element(name):
    for kind, x in gradients():
        live = make_estimator(name)
        for step in range(6):
            estimate, selection = live.select(x, RATIO)
            assert len(selection) > 0, (kind, step)
            assert estimate.threshold <= float(abs(x).max()), (kind, step)
            if step == 0:
                offline = make_estimator(name).estimate(x, RATIO)
                assert offline.threshold == estimate.threshold, kind
                assert ("beyond" in offline.details) == ("beyond" in estimate.details), kind
                assert len(select(x, offline.threshold)) == len(selection), kind


@pytest.mark.parametrize("name", ["sidco-gp", "sidco-p", "histogram"])
@pytest.mark.parametrize("share", [0.002, 0.02])
def test_of_clipped_gradients_all_that_tie_at_the_bound_are_kept(name, share):
    x = clipped(share)
    tied = int(np.count_nonzero(np.abs(x) == np.abs(x).max()))
    live = make_estimator(name)
    for _ in range(12):
        kept = len(live.select(x, RATIO)[1])
        assert tied <= kept <= 1.01 * tied


def test_published_formulas_keep_nothing_and_say_so():
    x = clipped(0.02)
    for name, options in (
        ("sidco-p", {"stages": "paper"}),
        ("micro", {"rule": "paper", "threshold": 100.0}),
        ("hard", {"threshold": 100.0}),
    ):
        estimate, selection = make_estimator(name, **options).select(x, RATIO)
        assert len(selection) == 0, name
        assert estimate.details["beyond"] == estimate.threshold > np.abs(x).max(), name
        offline = make_estimator(name, **options).estimate(x, RATIO)
        assert offline.details["beyond"] == estimate.threshold, name


def test_what_is_zero_or_empty_keeps_nothing():
    for name in ESTIMATORS:
        for x in (np.zeros(100, np.float32), np.empty(0, np.float32)):
            assert len(make_estimator(name).select(x, RATIO)[1]) == 0


def test_micro_learns_from_its_own_threshold():
    x = clipped(0.02)
    rule = make_estimator("micro", threshold=1e6)
    for _ in range(30):
        estimate, selection = rule.select(x, 0.1)
    assert "beyond" not in estimate.details
    assert len(selection) == pytest.approx(0.1 * x.size, rel=0.1)


def test_a_threshold_of_all_ranks_is_reached_by_ties_at_the_largest():
    from types import SimpleNamespace

    from gradstats.compressors.shared import GlobalHistogram

    x = torch.from_numpy(clipped(0.02))
    compressor = GlobalHistogram(RATIO)
    words = compressor._upper_bins(x, 600)
    threshold = compressor._quantile(SimpleNamespace(words=[words, words]), 600)
    assert len(select(x, threshold)) >= 6000


def test_quality_says_why_a_count_is_not_what_was_asked_for():
    from gradstats import quality

    sparse = np.where(np.arange(100_000) % 1000 == 0, np.float32(1.5), np.float32(0))
    (exact,) = quality(sparse, [0.01], ["exact"])
    assert exact["mean"] == pytest.approx(0.1)
    assert "all non-zero elements were kept" in exact["status"]
    (beyond,) = quality(clipped(0.02), [0.001], ["sidco-p"])
    assert "no element reaches the rule's threshold: the largest replaces it" in beyond["status"]
    (plain,) = quality(clipped(0.0), [0.01], ["exact"])
    assert plain["status"] == "ok"
