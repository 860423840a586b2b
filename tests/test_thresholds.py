from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from references import thresholds as reference
from scipy import stats

from gradstats import open_trace, threshold
from gradstats.errors import InputError
from gradstats.primitives import select
from gradstats.thresholds import DGC, ESTIMATORS, Exact, SIDCoE, make_estimator, target_count

RATIOS = (0.1, 0.01, 0.001)


@pytest.mark.parametrize("ratio", RATIOS)
def test_exact_keeps_k(family, xp, ratio):
    eta = threshold(xp(family), ratio, "exact")
    k = target_count(ratio, family.size)
    assert eta == reference.exact(family, k)
    ties = np.count_nonzero(np.abs(family) == np.float32(eta)) - 1
    assert k <= len(select(xp(family), eta)) <= k + ties


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("ratio", RATIOS)
def test_sidco_e_equals_its_transcription(family, xp, ratio, stages):
    got = threshold(xp(family), ratio, "sidco-e", stages=stages)
    expected = reference.sidco_e(family, target_count(ratio, family.size), stages)
    assert got == pytest.approx(expected, rel=1e-6)  # float32 rounding of the result


def test_sidco_e_in_one_stage_is_the_quantile_of_scipys_exponential():
    x = stats.laplace(scale=0.02).rvs(200_000, random_state=3).astype(np.float32)
    loc, scale = stats.expon.fit(np.abs(x, dtype=np.float64), floc=0)
    eta = threshold(x, 0.01, "sidco-e", stages=1)
    assert eta == pytest.approx(stats.expon(loc, scale).isf(0.01), rel=1e-6)
    # and on truly exponential magnitudes it keeps k, within the noise floor
    assert len(select(x, eta)) / 2000 == pytest.approx(1, abs=1.96 * 2 / np.sqrt(2000))


def test_sidco_e_maps_the_ratio_past_a_point_mass_of_zeros():
    rng = np.random.default_rng(0)
    x = rng.laplace(size=400_000).astype(np.float32)
    x[rng.random(x.size) < 0.5] = 0
    kept = len(select(x, threshold(x, 0.01, "sidco-e", stages=2)))
    assert kept / 4000 == pytest.approx(1, abs=0.1)


def test_dgc_is_unbiased_on_shuffled_data_and_trims_excess():
    x = np.random.default_rng(5).laplace(size=100_000).astype(np.float32)
    rule, kept = DGC(seed=1), []
    for _ in range(200):
        estimate = rule.estimate(x, 0.01)
        kept.append(len(select(x, estimate.threshold)) / estimate.k)
        assert estimate.details["sample"] == pytest.approx(1000, abs=1)
    assert max(kept) <= 4 / 3
    # the sample's k is 10: ±32 %; re-selection turns what is above 4/3 into exactly 1
    assert 0.8 < np.mean(kept) < 1.05
    assert np.std(kept) < 0.35


def test_dgc_state_resumes_bit_identically_and_leaves_global_state_alone():
    x = np.random.default_rng(5).laplace(size=50_000).astype(np.float32)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    a = DGC(seed=3)
    a.estimate(x, 0.01)
    saved = a.state_dict()
    later = [a.estimate(x, 0.01).threshold for _ in range(3)]
    b = DGC(seed=99)
    b.load_state_dict(saved)
    assert [b.estimate(x, 0.01).threshold for _ in range(3)] == later
    assert np.array_equal(before[0], np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(before[1], torch.get_rng_state())


@pytest.mark.parametrize("name", ESTIMATORS)
class TestEveryEstimator:
    def test_numpy_and_torch_agree_bit_for_bit(self, name, family):
        a = make_estimator(name).estimate(family, 0.01)
        b = make_estimator(name).estimate(torch.from_numpy(family), 0.01)
        assert a == b

    def test_on_captured_gradients_it_keeps_something_sane(self, name, trace_path):
        trace = open_trace(trace_path)
        for _, _, _, g in trace.gradients():
            eta = threshold(g, 0.01, name)
            assert 0 < eta < np.abs(g).max()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_dtypes(self, name, dtype):
        x = torch.from_numpy(np.random.default_rng(0).laplace(size=5000)).to(dtype)
        a = threshold(x, 0.05, name)
        b = threshold(x.to(torch.float64), 0.05, name)
        assert a == pytest.approx(b, rel=1e-6)

    @pytest.mark.parametrize("ratio", [1e-9, 0.001, 0.5, 1.0])
    @pytest.mark.parametrize(
        "hostile",
        [
            np.zeros(1000),
            np.full(1000, 0.5),
            np.array([2.0]),
            np.array([0.0]),
            np.array([np.nan, np.inf, 1.0, -2.0]),
            np.full(10, np.nan),
            np.full(10, 1e-45),
            np.r_[np.zeros(999), 1.0],
            np.array([1e38, -3e38, 1e-38]),
            np.empty(0),
        ],
        ids=[
            "zeros", "constant", "one", "one zero", "nan and inf", "all nan", "denormal",
            "one of 1000", "huge", "empty",
        ],
    )  # fmt: skip
    def test_hostile_gradients_have_an_answer(self, name, hostile, ratio):
        x = hostile.astype(np.float32)
        estimate = make_estimator(name).estimate(x, ratio)
        assert 0 <= estimate.threshold < np.inf
        assert estimate.k == (max(1, round(ratio * x.size)) if x.size else 0)
        select(x, estimate.threshold)

    @settings(max_examples=25, deadline=None)
    @given(exponent=st.integers(-60, 60), flip=st.booleans())
    def test_scale_and_sign_equivariance(self, name, exponent, flip):
        x = np.random.default_rng(2).laplace(size=3000).astype(np.float32)
        factor = np.float32(2.0**exponent) * (-1 if flip else 1)
        a = make_estimator(name).estimate(x, 0.01).threshold
        b = make_estimator(name).estimate(x * factor, 0.01).threshold
        assert b == pytest.approx(a * abs(float(factor)), rel=1e-6)

    def test_ratio_is_checked(self, name):
        for ratio in (0, -0.1, 1.1, float("nan")):
            with pytest.raises(InputError, match="ratio"):
                threshold(np.ones(3, np.float32), ratio, name)


@pytest.mark.parametrize("name", ["exact", "sidco-e"])
def test_permutation_invariance(name, family):
    shuffled = np.random.default_rng(0).permutation(family)
    assert threshold(shuffled, 0.01, name) == pytest.approx(threshold(family, 0.01, name), rel=1e-6)


def test_exact_keeps_ties_and_all_non_zeros_when_they_are_few():
    x = np.array([1, 2, 2, 2, 0, 0], np.float32)
    assert len(select(x, threshold(x, 2 / 6))) == 3
    assert threshold(x, 5 / 6) == 0.0
    assert len(select(x, 0.0)) == 4


def test_options_and_objects():
    x = np.ones(10, np.float32)
    assert threshold(x, 0.1, Exact()) == 1
    with pytest.raises(InputError, match="already built"):
        threshold(x, 0.1, Exact(), stages=2)
    with pytest.raises(InputError, match="there are exact, dgc"):
        make_estimator("nonsense")
    with pytest.raises(InputError, match=r"exact.*arguments"):
        make_estimator("exact", stages=3)
    for options in ({"stages": 0}, {"first_ratio": 1.5}):
        with pytest.raises(InputError):
            SIDCoE(**options)
    for options in ({"sample_ratio": 0}, {"tolerance": 0.5}):
        with pytest.raises(InputError):
            DGC(**options)
    with pytest.raises(InputError, match="keeps no state"):
        Exact().load_state_dict({"a": 1})


def test_offline_equals_live(trace_path):
    """The threshold recorded by the hook is the one the estimator gives on the captured vector."""
    trace = open_trace(trace_path)
    kind = trace.kinds(0)[-1]
    live = trace.scalars(0)
    for row, step in enumerate(live["step"]):
        g = trace.read(int(step), 0, kind)
        assert threshold(g, trace.attrs["ratio"]) == live["threshold"][row]
        assert len(select(g, live["threshold"][row])) == live["selected"][row]


def test_data_is_there():
    assert sorted(p.name for p in DATA.glob("*.zarr")) == ["resnet20-ef.zarr", "resnet20.zarr"]
