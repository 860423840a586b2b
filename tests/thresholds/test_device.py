"""What a threshold and a selection move to the host, counted on CPU tensors that are read as a device's are."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.every import every
from torch.overrides import TorchFunctionMode

from gradstats import InputError, backend
from gradstats.collectives import Codec
from gradstats.compressors import LAGS, make_compressor, make_selector
from gradstats.hooks import CompressionState
from gradstats.primitives import (
    exceedances,
    histogram,
    moments,
    operators,
    select,
    top_candidates,
    topk,
)
from gradstats.primitives.arrays import taken
from gradstats.primitives.histogram import histogram_quantile
from gradstats.primitives.moments import signed_sums
from gradstats.primitives.tails import tails
from gradstats.thresholds import ESTIMATORS, make_estimator, sampled
from gradstats.thresholds.bench import sample_gradient
from gradstats.thresholds.exact import _SAMPLE
from gradstats.trace import writer as trace_writer

SCALARS = 1000
"""Bytes that a threshold may move."""

_WHOLE = ("cpu", "numpy", "tolist", "to", "__array__", "__reduce_ex__")
_ONE = ("item", "__float__", "__int__", "__bool__", "__index__", "__complex__")


class Moved(TorchFunctionMode):
    """Counter of the bytes that methods of tensors would copy to the host, if the tensors were not there."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self.calls = Counter()
        """Calls for which the host waits: those that copy to it or from it, and `nonzero`, whose result has a size."""
        self._host = []

    def __enter__(self):
        self._from_numpy = torch.from_numpy  # modes do not see it

        def made_on_the_host(array):
            self._host.append(self._from_numpy(array))
            return self._host[-1]

        torch.from_numpy = made_on_the_host
        return super().__enter__()

    def __exit__(self, *error):
        torch.from_numpy = self._from_numpy
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        self.calls["nonzero"] += name == "nonzero"
        # a copy to a device waits, too
        self.calls["new_tensor"] += name == "new_tensor"
        moved = name == "to" and any(args[0] is each for each in self._host)
        self.calls["to the device"] += moved and any(
            isinstance(each, torch.device) for each in (*args[1:], *kwargs.values())
        )
        if name not in (*_WHOLE, *_ONE) or any(args[0] is each for each in self._host):
            return result
        if name == "to" and "cpu" not in map(str, [*args[1:], *kwargs.values()]):
            return result
        if name in ("cpu", "to"):
            self._host.append(result)  # what follows there costs nothing
        self.bytes += args[0].element_size() * args[0].numel()
        self.calls[name] += 1
        return result


def test_the_counter_counts():
    x = torch.arange(10.0)
    with Moved() as moved:
        assert float(x[3]) + x[2].item() == 5
        assert bool(x[1] > 0)
    assert moved.bytes == 4 + 4 + 1
    for way in (
        lambda: x.numpy(),
        lambda: x.tolist(),
        lambda: x.cpu().numpy(),
        lambda: x.to("cpu", torch.float64).numpy(),
        lambda: np.asarray(x),
    ):
        with Moved() as moved:
            way()
        assert moved.bytes >= 40, way


@pytest.fixture(scope="module")
def gradient():
    return torch.from_numpy(sample_gradient(600_000))


@every("dtype", [torch.float32, torch.bfloat16])
@every("name", ESTIMATORS)
def test_thresholds_and_selections_move_scalars(name, dtype, gradient):
    """Beside them: warm-exact's sample."""
    x = gradient.to(dtype)
    sample = 4 * 2 * _SAMPLE if name == "warm-exact" else 0
    rule = make_estimator(name)
    with backend("torch"):
        for _ in range(3):
            with Moved() as moved:
                _, selection = rule.select(x, 0.01)
            assert moved.bytes <= SCALARS + sample, moved.calls
            assert selection.values.dtype == dtype


@pytest.mark.parametrize("name", ["sidco-e", "sidco-gp", "sidco-p"])
def test_sidco_looks_its_stages_up_on_the_device(name, gradient, monkeypatch):
    """The host waits once for each stage, the selection and other sums, and what cells stand for; to adapt, for all."""
    with backend("torch"):
        tails(gradient)  # the cells' middles are moved to a device once
    monkeypatch.setattr("gradstats.thresholds.sidco._MANY", gradient.numel())
    live, offline = make_estimator(name), make_estimator(name)
    for step in range(2):
        with backend("torch"), Moved() as moved:
            there, chosen = live.select(gradient, 0.001)
        here, expected = offline.select(gradient, 0.001)
        assert there.threshold == pytest.approx(here.threshold, rel=1e-7)
        assert torch.equal(chosen.indices, expected.indices)
        assert moved.bytes <= (SCALARS if step else 3 * SCALARS), moved.calls
        assert moved.calls.total() <= 3 + len(there.details["stages"]) + 55 * (not step)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_how_often_the_host_waits(name, gradient, monkeypatch):
    """As docs/measurements.md says: once for sums and quantiles; for a selection once, or once a chunk."""
    chunks = 1
    if name == "triton":
        kernels = pytest.importorskip(
            "gradstats.primitives.triton_kernels",
            reason="Triton is installed with the extra dev, on Linux",
        )
        monkeypatch.setattr(kernels, "BLOCK", 1 << 17)
    else:
        monkeypatch.setattr(operators, "CHUNK", 1 << 17)
        chunks = 5
    for run, waits in (
        (lambda: moments(gradient), 1),
        (lambda: exceedances(gradient, 1e-3), 1),
        (lambda: signed_sums(gradient), 1),
        (lambda: histogram_quantile(gradient, 6000, 10), 1),
        (lambda: histogram(gradient), 3),
        (lambda: select(gradient, 1e-2), chunks),
        (lambda: top_candidates(gradient, 6000), 1 + chunks),
        (lambda: monkeypatch.setattr(operators, "WHOLE", 1), 0),
        (lambda: top_candidates(gradient, 6000), 3 + chunks),
        (lambda: topk(gradient, 6000), 0),
    ):
        with backend(name), Moved() as moved:
            run()
        assert moved.calls.total() == waits, moved.calls


@every(
    ("name", "options"),
    [
        *((name, {}) for name in ("topk", "sidco-e", "redsync", "signsgd", "marsit")),
        *(("topk", {"indices": codec, "values": "int8"}) for codec in ("rice", "chunk")),
        ("topk", {"exactly": True}),
    ],
    ids=str,
)
def test_exchanges_move_scalars_and_give_the_same_update(name, options, gradient, one_rank):
    """Live as on a device, and live on the CPU; what a process group moves by itself is not counted."""
    live, offline = (make_compressor(name, 0.01, **options) for _ in range(2))
    for _ in range(2):
        with backend("torch"), Moved() as moved:
            ours = live.reduce(gradient.clone(), None)
        theirs = offline.reduce(gradient.clone(), None)
        assert torch.equal(ours.mean, theirs.mean)
        assert torch.equal(ours.residual, theirs.residual)
        assert ours.selected == theirs.selected
        assert moved.bytes <= SCALARS, moved.calls


def test_layers_that_send_exactly_k_are_taken_without_a_wait(gradient, one_rank):
    """The exchange waits, in a thread of its own."""
    layers = [("a", slice(0, 200_000)), ("b", slice(200_000, gradient.numel()))]
    live, offline = (LAGS(0.01, adaptive=False, exactly=True) for _ in range(2))
    ours, theirs = gradient.clone(), gradient.clone()
    with backend("torch"):
        with Moved() as moved:
            live.push(ours, layers, None)
        mean = live.reduce(ours, None).mean.clone()
    assert not moved.calls.total(), moved.calls
    offline.push(theirs, layers, None)
    assert torch.equal(mean, offline.reduce(theirs, None).mean)
    assert torch.equal(ours, theirs)
    for name, part in layers:
        k = live.selectors[name].target(part.stop - part.start)
        assert int((mean[part] != 0).sum()) == k


@pytest.mark.parametrize("code", ["compiled", "torch"])
@pytest.mark.parametrize("codec", ["plain", "rice", "chunk"])
def test_exactly_k_of_layers_with_hardly_anything_in_them(code, codec, one_rank):
    """Frozen layers: zeros fill up, and what arrives is what was sent."""
    x = torch.zeros(3000)
    x[1700], x[2999] = 1.0, -2.0
    for system in (
        make_compressor("topk", 0.01, exactly=True, indices=codec),
        LAGS(0.01, adaptive=False, exactly=True, codec=Codec(codec)),
    ):
        with backend(code):
            found = system.reduce(x.clone(), None)
        assert found.sent.dtype == torch.int64
        assert found.sent.tolist() == [*range(28), 1700, 2999]
        assert torch.equal(found.mean, x)
        assert not found.residual.any()


def test_exactly_is_refused_where_it_cannot_be():
    with pytest.raises(InputError, match="adaptive=False"):
        LAGS(0.01, exactly=True)
    with pytest.raises(InputError, match="sampled"):
        LAGS(0.01, adaptive=False, exactly=True, double_sampling=True)
    with pytest.raises(InputError, match="true or false"):
        make_selector("topk", 0.1, exactly="no")


def test_codes_go_on_where_the_chosen_code_does_not_run(monkeypatch):
    """Triton without its interpreter reads no CPU tensor; positions are then coded as without it."""
    kernels = pytest.importorskip("gradstats.primitives.triton_kernels", reason="needs Triton")
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    indices = torch.tensor([3, 70, 71])
    with backend("triton"):
        for name in ("rice", "chunk"):
            words = Codec(name).pack_indices(indices, 100)
            assert torch.equal(Codec(name).unpack_indices(words, 3, 100)[0], indices)


@pytest.mark.parametrize("name", ["topk", "sidco-e", "lags", "signsgd", "marsit"])
def test_a_state_is_made_where_gradients_will_be_read_on_a_gpu(monkeypatch, name):
    """Loops are compiled with CPU tensors, which Triton without its interpreter does not read."""
    kernels = pytest.importorskip("gradstats.primitives.triton_kernels", reason="needs Triton")
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    model = torch.nn.Linear(3, 2)
    with backend("triton"):
        state = CompressionState(
            make_compressor(name, 0.1), named_parameters=model.named_parameters()
        )
        assert state.step == 0
        with pytest.raises(InputError, match="reads CUDA tensors"):
            select(torch.ones(3), 0.5)


@pytest.mark.parametrize("name", ["topk", "redsync", "dgc"])
def test_selectors_move_scalars(name, gradient):
    selector = make_selector(name, 0.01)
    with backend("torch"):
        for _ in range(2):
            with Moved() as moved:
                selector.select(gradient)
            assert moved.bytes <= SCALARS, moved.calls


def assert_same_tally(found, expected):
    """Compare what two tallies returned: counts to the bit, sums up to the order in which they are added."""
    (counts, moments), (others, sums) = found, expected
    assert counts.keys() == others.keys()
    assert all(np.array_equal(counts[c], others[c]) for c in counts)
    assert np.array_equal(moments[:, :3], sums[:, :3])
    assert np.allclose(moments, sums, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_device_counts_the_layers_of_a_sketched_step_and_the_host_waits_three_times(
    name, monkeypatch
):
    """Counts are those of the host, of every step: chunks of bins that only an earlier step had are empty again."""
    if name == "triton":
        pytest.importorskip("triton", reason="Triton is installed with the extra dev, on Linux")
    monkeypatch.setattr(trace_writer, "_AT_ONCE", 3)
    rng = np.random.default_rng(4)
    sizes = [4000, 1, 0, 777, 50, 3000, 9]
    edges = np.cumsum([0, *sizes])
    places = [slice(a, b) for a, b in pairwise(edges.tolist())]
    there, here = trace_writer._Tally(places), trace_writer._Tally(places)
    for scale in (1.0, 1e-30, 1e30, 1e-4):  # each has bins that no other has
        values = torch.from_numpy((scale * rng.laplace(size=edges[-1])).astype(np.float32))
        values[::11], values[4500], values[4600], values[4700] = 0, math.nan, math.inf, 1e-44
        with backend(name), Moved() as moved:
            found = there(values)
        assert_same_tally(found, here(values))
        # seven layers, three at a time: which bins there are, their counts, and the sums
        assert moved.calls.total() == 3 * 3, moved.calls


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_device_counts_layers_that_are_all_zero_or_empty(name, monkeypatch):
    """Alone, or in a part of the layers."""
    if name == "triton":
        pytest.importorskip("triton", reason="Triton is installed with the extra dev, on Linux")
    monkeypatch.setattr(trace_writer, "_AT_ONCE", 1)
    places = [slice(0, 0), slice(0, 40), slice(40, 90)]
    there, here = trace_writer._Tally(places), trace_writer._Tally(places)
    for values in (torch.zeros(90), torch.zeros(90).index_fill(0, torch.tensor([50]), 0.5)):
        with backend(name):
            found = there(values)
        assert_same_tally(found, here(values))


@every("numel", [1, 9, 10, 11, 69, 70, 71, 1001])
@every("seed", range(5))
def test_dgcs_places_are_one_of_each_run_and_used_again(numel, seed, monkeypatch):
    """Of an array and of a tensor the same; a last run that is shorter has one or none."""
    monkeypatch.setattr(sampled, "_OFFSETS", 7)
    run, drawn = 10, []

    def noting(x, positions):
        drawn.append(np.asarray(positions))
        return taken(x, positions)

    monkeypatch.setattr(sampled, "taken", noting)
    x = np.random.default_rng(seed).laplace(size=numel).astype(np.float32)
    found = [
        sampled.DGC(1 / run, seed=seed).estimate(each, 0.3) for each in (x, torch.from_numpy(x))
    ]
    assert found[0] == found[1]
    places, same = drawn
    assert np.array_equal(places, same)
    whole = numel // run
    assert np.array_equal(places[:whole] // run, np.arange(whole))
    assert places.size - whole in (0, 1)
    assert places.size >= 1
    assert places[-1] < numel
    later = places[7 : whole or None] % run
    assert np.array_equal(later, np.resize(places[:7] % run, later.size) if later.size else later)
