"""Device code against the compiled loops, on CPU tensors: torch operators, and Triton's kernels in its interpreter."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from support import hostile
from support.every import every
from torch._subclasses.fake_tensor import FakeTensorMode

import gradstats
from gradstats import primitives
from gradstats.errors import InputError
from gradstats.primitives import (
    backend,
    exceedances,
    histogram,
    kth_largest,
    moments,
    operators,
    select,
    top_candidates,
)
from gradstats.primitives.backend import device_code
from gradstats.primitives.moments import signed_sums
from gradstats.thresholds import ESTIMATORS, make_estimator

backends = importlib.import_module("gradstats.primitives.backend")  # the name is a function's

ONE_ROUNDING = 2.0**-23
"""Between neighbouring float32: sums in another order move a threshold by no more."""

EXACT = ("exact", "warm-exact", "histogram", "dgc", "hard", "micro", "redsync-trimmed")
"""Estimators that only compare and count: their thresholds are the same bits."""


ODD = hostile.tensors(np.random.default_rng(5))
CHECKED = (
    "moments",
    "exceedances",
    "histogram",
    "select",
    "kth_largest",
    "top_candidates",
    "topk",
    "sketch",
)


WHY = "Triton is installed with the extra dev, on Linux"


def some(name, odd, cases, one_in):
    """Return the cases of an array: with Triton, whose interpreter is slow, a part, other ones for the next array."""
    return cases[ODD.index(odd) % one_in :: one_in] if name == "triton" else cases


@pytest.fixture(params=["torch", "triton"])
def name(request, monkeypatch):
    """A backend; the interpreter takes as long for a large block as for a small one."""
    if request.param == "triton":
        pytest.importorskip("triton", reason=WHY)
        from gradstats.primitives import triton_kernels

        monkeypatch.setattr(triton_kernels, "BLOCK", 1 << 14)
        monkeypatch.setattr(triton_kernels, "PROGRAMS", 2)
    return request.param


@pytest.fixture
def chunk(monkeypatch):
    """Chunks of which most odd arrays have several."""
    monkeypatch.setattr(operators, "CHUNK", 1000)


def same(a, b):
    return math.isnan(a) and math.isnan(b) if math.isnan(a) else a == pytest.approx(b, rel=1e-12)


@every("odd", ODD, ids=lambda odd: odd.name)
def test_the_same_answers_as_the_elements_give(name, chunk, odd):
    """Those that the compiled loops are asked for: counts, sums, histograms, selections, order statistics."""
    targets = [
        t
        for t in hostile.targets(np.random.default_rng(3))
        if t.array and getattr(t.function, "__name__", "") in CHECKED
    ]
    assert len(targets) > len(CHECKED)
    for target in some(name, odd, targets, 2):
        call = partial(target.function, **{target.array: odd.value}, **target.arguments)
        try:
            with backend(name):
                found = call()
        except InputError:  # a sketch beyond float32's range
            with pytest.raises(InputError):
                call()
            continue
        target.check(odd, found)


@every("odd", ODD, ids=lambda odd: odd.name)
def test_the_same_sums_as_the_compiled_loops(name, chunk, odd):
    x = odd.value
    # five with logarithms, then five without: every other one is of both kinds
    sums = list(product((True, False), (0.0, 0.5, 1e-42, 1e300, math.inf)))
    for log, above in some(name, odd, sums, 2):
        with backend(name):
            found = moments(x, above, log=log), exceedances(x, above)
        for a, b in zip(found, (moments(x, above, log=log), exceedances(x, above)), strict=True):
            assert (a.numel, a.count, a.zeros, a.nonfinite) == (
                (b.numel, b.count, b.zeros, b.nonfinite)
            )
            assert same(a.max, b.max)
            for field in ("sum_abs", "sum_squares", "sum_log"):
                assert same(getattr(a, field), getattr(b, field)), field
    plain = x.detach().resolve_neg()
    with backend(name):
        found = signed_sums(plain)
    assert all(same(a, b) for a, b in zip(found, signed_sums(plain), strict=True))


@every("dtype", [torch.float32, torch.bfloat16])
@every("misleads", [False, True])
def test_exactly_k_by_a_sampled_bound(name, misleads, dtype, monkeypatch):
    """A sample of every eighth element bounds the k-th; where it sees the largest alone, all are counted again."""
    if name == "triton":
        kernels = importlib.import_module("gradstats.primitives.triton_kernels")
        monkeypatch.setattr(kernels, "SAMPLED", 1000)
        monkeypatch.setattr(kernels, "SAMPLE", 5000)
    monkeypatch.setattr(operators, "CHUNK", 7000)
    x = torch.from_numpy(np.random.default_rng(1).laplace(size=40_000)).to(dtype)
    if misleads:
        x[::8] *= 1000
    x[1::997], x[2::997], x[3::997] = math.nan, math.inf, -math.inf
    # compared as whole numbers, in which NaN is nothing
    magnitude = x.float().abs().nan_to_num(0.0, math.inf).numpy()
    for k in (1, 100, 400, 6000, 30_000, 39_990):
        expected = np.sort(np.argsort(-magnitude, kind="stable")[:k])
        with backend(name):
            found = primitives.topk(x, k)
        assert np.array_equal(found.indices, expected)
        assert torch.equal(found.values, x[found.indices].nan_to_num(0.0, math.inf, -math.inf))


@every("odd", ODD[:8], ids=lambda odd: odd.name)
def test_one_histogram_of_some_copies(odd, monkeypatch):
    """Each program adds to one of them."""
    kernels = pytest.importorskip("gradstats.primitives.triton_kernels", reason=WHY)
    monkeypatch.setattr(kernels, "SAMPLED", 0)
    with backend("triton"):
        found = histogram(odd.value)
    assert np.array_equal(found.counts, histogram(odd.value).counts)


@pytest.mark.parametrize("runs", [True, False])
def test_large_cuda_tensors_are_read_by_triton_where_it_runs(runs, monkeypatch):
    """By torch's operators where it does not, or where they are small, float64 or strided."""
    kernels = pytest.importorskip("gradstats.primitives.triton_kernels", reason=WHY)
    monkeypatch.setattr(backends, "triton_runs", lambda index: runs)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with FakeTensorMode():  # tensors of a device that there is not
        large, small = (torch.empty(backends.MANY - i, device="cuda") for i in (0, 1))
        cases = [
            (large, kernels if runs else operators),
            (large.bfloat16(), kernels if runs else operators),
            (small, operators),
            (large.double(), operators),
            (torch.empty(2, backends.MANY, device="cuda").T, operators),
        ]
        for tensor, code in cases:
            assert device_code(tensor) is code
            with backend("compiled"):
                assert device_code(tensor) is None
        capturing = True  # a CUDA graph, which to try kernels would end
        assert device_code(large) is operators


def test_where_triton_does_not_run_it_is_said_once(monkeypatch):
    """Here no CUDA device can hold the element it tries; its interpreter, which debugs, is no reason to warn."""
    kernels = pytest.importorskip("gradstats.primitives.triton_kernels", reason=WHY)
    if torch.cuda.is_available():
        pytest.skip("Triton may run on this machine's GPU")
    backends.triton_runs.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backends.triton_runs(0)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    backends.triton_runs.cache_clear()
    with pytest.warns(UserWarning, match="torch's operators read large CUDA tensors"):
        assert not backends.triton_runs(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backends.triton_runs(0)
    backends.triton_runs.cache_clear()


@every("odd", ODD, ids=lambda odd: odd.name)
def test_the_same_thresholds_and_selections(name, chunk, odd):
    for estimator in some(name, odd, list(ESTIMATORS), 4):
        same_selections(name, odd, estimator)


def same_selections(name, odd, estimator):
    """Twice, so that what is remembered counts; a selection follows from the threshold alone."""
    ours, theirs = make_estimator(estimator), make_estimator(estimator)
    for ratio in (0.01, 0.3):
        try:
            expected, compiled = theirs.select(odd.value, ratio)
        except gradstats.GradstatsError as error:
            with pytest.raises(type(error)), backend(name):
                ours.select(odd.value, ratio)
            return
        with backend(name):
            estimate, found = ours.select(odd.value, ratio)
        if estimator in EXACT:
            assert estimate.threshold == expected.threshold
        assert estimate.threshold == pytest.approx(expected.threshold, rel=ONE_ROUNDING, abs=1e-45)
        if estimate.threshold != expected.threshold:
            compiled = select(odd.value, estimate.threshold)
        assert torch.equal(found.indices, compiled.indices)
        assert torch.equal(found.values, compiled.values)
        assert found.values.dtype == odd.value.dtype


def test_orders_of_many_elements(name):
    """Beyond what is sorted: a sampled bracket, and one that misses."""
    x = torch.from_numpy(np.random.default_rng(0).random(200_000).astype(np.float32))
    hidden = x.clone()
    hidden[:: x.numel() // (1 << 15)] += 10
    for y, k in product((x, hidden, x.bfloat16()), (1, 10_000, 199_999, 200_001)):
        with backend(name):
            eta, found = top_candidates(y, k)
            assert kth_largest(y, k) == eta
        expected, compiled = top_candidates(y, k)
        assert eta == expected
        assert torch.equal(found.indices, compiled.indices)
        assert torch.equal(found.values, compiled.values)


@every("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_histograms_are_the_same(name, chunk, dtype):
    x = torch.from_numpy(np.random.default_rng(1).standard_t(2, 70_000)).to(dtype)
    x[:7] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, 1e38])
    for bits in (0, 7, 12):
        with backend(name):
            found = histogram(x, bits)
        expected = histogram(x, bits)
        assert np.array_equal(found.counts, expected.counts)
        assert (found.zeros, found.nonfinite) == (expected.zeros, expected.nonfinite)


def test_strided_tensors_are_read_in_index_order(name, chunk):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((50, 60, 7)).astype(np.float32))
    for y in (x.permute(2, 0, 1), x[::2, ::3, ::2], x.flip(0), x[:1].expand(3, 60, 7)):
        with backend(name):
            found, sums = select(y, 1.0), moments(y)
        flat = y.contiguous()
        assert torch.equal(found.indices, select(flat, 1.0).indices)
        assert torch.equal(found.values, select(flat, 1.0).values)
        assert sums.sum_abs == pytest.approx(moments(flat).sum_abs, rel=1e-12)


def test_dense_tensors_are_added_up_without_positions(monkeypatch):
    """Positions of a chunk take eight bytes an element and dimension."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 6, 7, 8)).astype(np.float32))
    expected = histogram(x), moments(x), exceedances(x, 1.0), signed_sums(x)
    monkeypatch.setattr(torch, "unravel_index", None)
    monkeypatch.setattr(operators, "CHUNK", 100)
    turned = x.transpose(0, 3).contiguous().transpose(0, 3)
    for y in (x.to(memory_format=torch.channels_last), turned):
        assert not y.is_contiguous()
        with backend("torch"):
            found = histogram(y), moments(y), exceedances(y, 1.0), signed_sums(y)
        assert np.array_equal(found[0].counts, expected[0].counts)
        assert found[1].sum_log == pytest.approx(expected[1].sum_log, rel=1e-12)
        assert found[2].sum_abs == pytest.approx(expected[2].sum_abs, rel=1e-12)
        assert found[3] == pytest.approx(expected[3], rel=1e-12)


@every("programs", [1, 3])
@every("numel", [0, 1, 127, 128, 129, 1000])
def test_borders_of_blocks_and_programs(numel, programs, monkeypatch):
    """Of Triton's kernels alone: several blocks a program, and a last one that is not full."""
    kernels = pytest.importorskip("gradstats.primitives.triton_kernels", reason=WHY)
    monkeypatch.setattr(kernels, "BLOCK", 128)
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    x = torch.from_numpy(np.random.default_rng(numel).laplace(size=numel).astype(np.float32))
    x[::3] = 0
    with backend("triton"):
        found = moments(x), signed_sums(x), histogram(x), select(x, 0.7)
    sums, signs, counted, selected = moments(x), signed_sums(x), histogram(x), select(x, 0.7)
    for field in ("count", "zeros", "nonfinite", "max", "sum_abs", "sum_squares", "sum_log"):
        assert same(getattr(found[0], field), getattr(sums, field)), field
    assert found[1] == pytest.approx(signs, rel=1e-12)
    assert np.array_equal(found[2].counts, counted.counts)
    assert found[2].zeros == counted.zeros
    assert torch.equal(found[3].indices, selected.indices)
    assert torch.equal(found[3].values, selected.values)


@every("share", [0.0, 0.3, 1.0])
@every("numel", [0, 1, 2, 7, 8, 9, 127, 128, 129, 1000, 1023, 1024, 1025, 3001])
def test_bits_are_packed_as_numpy_packs_them(numel, share, monkeypatch):
    kernels = pytest.importorskip("gradstats.primitives.triton_kernels", reason=WHY)
    monkeypatch.setattr(kernels, "BLOCK", 128)
    bits = np.random.default_rng(numel).random(numel) < share
    packed = kernels.pack_bits(torch.from_numpy(bits))
    assert packed.tolist() == np.packbits(bits, bitorder="little").tolist()
    assert torch.equal(kernels.unpack_bits(packed, numel), torch.from_numpy(bits))
    strided = torch.from_numpy(np.repeat(bits, 2))[::2]
    assert torch.equal(kernels.pack_bits(strided), packed)


def test_twice_the_same_bits(name):
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    with backend(name):
        a, b = (
            (moments(x), exceedances(x, 1.0), signed_sums(x), select(x, 2.0).indices.tolist())
            for _ in range(2)
        )
    assert repr(a) == repr(b)


def test_the_device_decides_unless_it_is_said():
    x, array = torch.ones(3), np.ones(3, np.float32)
    assert device_code(x) is device_code(array) is None
    with backend("torch"):
        assert device_code(x) is operators
        assert device_code(array) is None
        with backend("compiled"):
            assert device_code(x) is None
        assert device_code(x) is operators
    assert device_code(x) is None
    with pytest.raises(InputError, match="no backend 'cuda'; there are"):
        backend("cuda")


def on(device):
    """Return a tensor that says it is on another device; there is none."""
    kind = type("Elsewhere", (torch.Tensor,), {"device": torch.device(device)})
    return torch.ones(3).as_subclass(kind)


def test_devices_with_float64_are_read_where_they_are():
    assert device_code(on("cuda:1")) is device_code(on("xpu")) is operators
    assert device_code(on("mps")) is device_code(on("cpu")) is None
    with backend("compiled"):
        assert device_code(on("cuda:1")) is None
    with backend("torch"), pytest.raises(InputError, match="MPS has no float64"):
        device_code(on("mps"))


def test_triton_reads_what_its_kernels_can(monkeypatch):
    kernels = pytest.importorskip("gradstats.primitives.triton_kernels", reason=WHY)
    x = on("cuda:1")
    with backend("triton"):
        assert device_code(x) is device_code(x.bfloat16()) is kernels
        assert device_code(x[::2]) is device_code(x.double()) is operators
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    with pytest.raises(InputError, match="Triton is not installed: pip install triton"):
        backend("triton")


def test_triton_without_a_gpu_and_its_interpreter_says_so():
    pytest.importorskip("triton", reason=WHY)
    code = """
import torch
from gradstats import GradstatsError, backend, moments
try:
    with backend("triton"):
        moments(torch.ones(3))
except GradstatsError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert "reads CUDA tensors, and this one is on cpu" in done.stdout


def test_blocks_of_two_threads_may_overlap():
    """The choice entered last rules until it ends, and none stays."""
    pytest.importorskip("triton", reason=WHY)
    x = on("cuda:1")
    first, second = backend("compiled"), backend("triton")
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        assert device_code(x) is None
        other.submit(second.__enter__).result()
        inside = device_code(x)
        assert inside is not None
        assert inside is not operators
        one.submit(first.__exit__, None, None, None).result()
        assert device_code(x) is inside
        other.submit(second.__exit__, None, None, None).result()
    assert device_code(x) is operators


def test_a_choice_may_be_entered_again():
    x, choice = torch.ones(3), backend("torch")
    for _ in range(2):
        with choice, backend("compiled"):
            with choice:
                assert device_code(x) is operators
            assert device_code(x) is None
        assert device_code(x) is None


def test_a_block_that_fails_ends_the_choice():
    with pytest.raises(InputError), backend("torch"):
        primitives.moments(torch.ones(3), -1.0)
    assert device_code(torch.ones(3)) is None
