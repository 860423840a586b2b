"""How many bits a gradient needs: every number against float64 and what is sent; hostile gradients; the terminal."""

from __future__ import annotations

import math
import re
import tracemalloc

import numpy as np
import pytest
import torch
from conftest import DATA
from scipy.linalg import hadamard
from support import traces
from support.every import every
from support.terminal import records, run

import gradstats
from gradstats.analysis.wire import USUAL, Wire
from gradstats.collectives import Codec
from gradstats.errors import InputError, TraceError
from gradstats.primitives.arrays import CHUNK
from gradstats.primitives.formats import FORMATS
from gradstats.primitives.rounding import Message, Way, measure
from gradstats.trace import Layer, TraceWriter, create_trace

LIVE = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "bf16": "bfloat16", "fp16": "float16"}
RANKS = str(DATA / "ranks" / "resnet8.zarr")


def gradient(n, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.laplace(size=n) * np.exp(rng.normal(size=n))).astype(np.float32)


def sent(x, name):
    return Codec(values=LIVE.get(name, name)).rounded(torch.from_numpy(x)).double().numpy()


def expected(q, g):
    q, g = q.astype(np.float64), g.astype(np.float64)
    square = g @ g
    return {
        "error": (q - g) @ (q - g) / square,
        "bias": (q - g) @ g / square,
        "cosine": q @ g / math.sqrt(square * (q @ q)),
        "zeros": np.count_nonzero((q == 0) & (g != 0)) / np.count_nonzero(g),
    }


def block(found, **labels):
    """Return the only record with these labels."""
    (one,) = [r for r in found if all(r[n] == v for n, v in labels.items())]
    return one


@pytest.mark.parametrize("n", [1, 31, 1000, CHUNK + 77])
def test_numbers_are_those_of_what_is_sent(n):
    x = gradient(n)
    found = gradstats.wire(x, scales=["block"])
    assert [r["format"] for r in found] == list(USUAL)
    for each in found:
        right = expected(sent(x, each["format"]), x)
        assert {name: each[name] for name in right} == pytest.approx(right, rel=1e-9, abs=1e-15)
        assert each["bits"] * n == pytest.approx(FORMATS[each["format"]].bits_of(n))
        assert each["worst"] == each["error"]
        assert (each["n"], each["ranks"], each["dropped"], each["nonfinite"]) == (1, 1, 0, 0)


def test_one_scale_for_the_tensor_and_the_share_beyond_the_largest_number():
    x = gradient(CHUNK + 500)
    found = gradstats.wire(x, ["e4m3", "int8", "mxfp4"], scales=["tensor"])
    for name in ("e4m3", "int8"):
        each, form = block(found, format=name), FORMATS[name].whole()
        right = expected(form.quantised(torch.from_numpy(x)).numpy(), x)
        assert each["error"] == pytest.approx(right["error"], rel=1e-9)
        assert (each["scale"], each["saturated"]) == ("tensor", 0)
        assert each["bits"] == pytest.approx(8 + 32 / x.size)
    top = np.abs(np.append(x, np.zeros(-x.size % 32, np.float32)).reshape(-1, 32)).max(1)
    unit = 2.0 ** (np.floor(np.log2(top)) - 2)
    beyond = np.abs(x) > 6 * unit.repeat(32)[: x.size]
    assert block(found, format="mxfp4")["saturated"] == pytest.approx(beyond.mean())
    for n in range(1, 40):  # the largest of a tensor arrives, wherever its scale is cut off
        (each,) = gradstats.wire(np.full(20, 0.3 * n), ["nvfp4"])
        assert (each["saturated"], each["error"] < 1e-8) == (0, True)


def test_a_rotation_is_a_hadamard_matrix_after_signs():
    """What is seen of it: one large element in a block becomes as many equal ones."""
    x = np.zeros(256, np.float32)
    x[5] = 3
    rotated = block(gradstats.wire(x, ["int2"], rotations=[128]), rotation=128)
    plain = block(gradstats.wire(x, ["int2"]), rotation=0)
    assert plain["error"] == 0  # the largest of a block arrives
    assert rotated["error"] < 1e-12  # so do 128 that are equal
    laplace = gradient(128)
    signs = np.where(np.random.default_rng([0x5EED, 7]).integers(0, 2, 128), 1.0, -1.0)
    h = hadamard(128) / math.sqrt(128)
    # the fast transform is the matrix with this order of rows
    there = h @ (signs * laplace)
    right = signs * (h.T @ sent(there.astype(np.float32), "mxfp4"))
    found = gradstats.wire(laplace, ["mxfp4"], rotations=[128], seed=7)
    assert found[0]["error"] == pytest.approx(expected(right, laplace)["error"], rel=1e-3)
    for n in (1, 100, 129):  # the last block is filled, and what fills it is sent
        each = gradstats.wire(gradient(n), ["int8"], rotations=[128])[0]
        assert each["error"] < 0.01
        assert each["bits"] * n == FORMATS["int8"].bits_of(128 * -(-n // 128))


def test_rounding_at_random_is_the_worse_alone_and_the_better_in_a_sum(tmp_path):
    """Of many ranks that agree, errors to the nearest add up, and those at random cancel."""
    path, x = tmp_path / "many.zarr", gradient(4000)
    create_trace(path, [Layer("w", 0, (4000,))], world_size=16)
    for rank in range(16):
        writer = TraceWriter(path, rank)
        writer.append(0, {"gradient": x})
        writer.close()
    found = gradstats.wire(path, ["int4"], roundings=["nearest", "stochastic"], seed=3)
    one, many = ({r["rounding"]: r for r in found if r["ranks"] == n} for n in (1, 16))
    assert one["stochastic"]["error"] > 1.5 * one["nearest"]["error"]
    assert many["nearest"]["error"] == pytest.approx(one["nearest"]["error"], rel=1e-9)
    assert many["stochastic"]["error"] == pytest.approx(one["stochastic"]["error"] / 16, rel=0.1)
    assert abs(many["stochastic"]["bias"]) < 0.01
    again = gradstats.wire(path, ["int4"], roundings=["stochastic"], seed=3)
    assert again[0]["error"] == one["stochastic"]["error"]
    other = gradstats.wire(path, ["int4"], roundings=["stochastic"], seed=4)
    assert other[0]["error"] != one["stochastic"]["error"]


def test_each_rank_is_rounded_and_the_sum_compared_with_the_exact_one():
    found = gradstats.wire(RANKS, ["mxfp4", "int2"], steps=[300, 310], layers=["fc.*"])
    assert {r["n"] for r in found if r["ranks"] == 1} == {4}
    assert {r["n"] for r in found if r["ranks"] == 2} == {2}
    trace = gradstats.open_trace(RANKS)
    layer = trace.layers[-1]
    for name in ("mxfp4", "int2"):
        for what, where in (("all", slice(None)), (layer.name, layer.slice)):
            sums = []
            for step in (300, 310):
                ranks = [np.asarray(trace.read(step, r))[where] for r in (0, 1)]
                q = sum(sent(x, name) for x in ranks)
                sums.append(expected(q, sum(x.astype(np.float64) for x in ranks)))
            each = block(found, format=name, ranks=2, layer=what)
            for field in ("error", "bias", "cosine"):
                assert each[field] == pytest.approx(np.mean([s[field] for s in sums]), rel=1e-9)
            assert each["worst"] == pytest.approx(max(s["error"] for s in sums), rel=1e-9)


def test_what_is_counted_of_a_sum_is_what_happened_on_any_rank():
    """One rank sends numbers that are too large, the other a few that are too small."""
    large, small = gradient(1000) * np.float32(1e6), gradient(1000, 1) * np.float32(1e-9)
    large[[3, 500, 999]] = math.nan, math.inf, -math.inf
    small[:300], small[700] = 0, math.nan
    chosen = gradstats.select(small, gradstats.threshold(small, 0.05))
    ranks = [Message(large), Message(small, selection=chosen)]
    *each, whole = measure(Way(FORMATS["fp16"], "none", "nearest", 0), ranks, 0)
    assert ([m.nonfinite for m in each], whole.nonfinite) == ([3, 1], 4)
    assert each[0].saturated > 0.8
    assert each[1].zeros > 0.8
    counts = 997, len(chosen)
    for name in ("zeros", "saturated"):
        both = sum(n * getattr(m, name) for n, m in zip(counts, each, strict=True))
        assert getattr(whole, name) == pytest.approx(both / sum(counts))
    assert whole.bits == (each[0].bits + each[1].bits) / 2 != each[0].bits
    assert (whole.ranks, whole.numel) == (2, 1000)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp16"])
def test_beside_a_threshold(name):
    x = gradient(CHUNK + 5000)
    (each,) = gradstats.wire(x, [name], ratio=0.01)
    kept = gradstats.select(x, gradstats.threshold(x, 0.01))
    q, left = np.zeros(x.size), x.copy()
    q[kept.indices], left[kept.indices] = sent(np.asarray(kept.values), name), 0
    assert each["error"] == pytest.approx(expected(q, x)["error"], rel=1e-9)
    square = float(np.square(x.astype(np.float64)).sum())
    assert each["dropped"] == pytest.approx(np.square(left.astype(np.float64)).sum() / square)
    assert each["dropped"] < each["error"] < each["dropped"] + 0.02
    codec, k = Codec("rice", LIVE.get(name, name)), len(kept)
    words = codec.pack_indices(torch.from_numpy(kept.indices), x.size).numel()
    assert each["bits"] * x.size == pytest.approx(32 * words + FORMATS[name].bits_of(k))
    assert "of which" in gradstats.wire(x, [name], ratio=0.01).verdict()


def test_gradients_without_an_answer_have_a_defined_one():
    for x in (np.zeros(300, np.float32), np.empty(0, np.float32)):
        for each in gradstats.wire(x):
            assert math.isnan(each["error"])
            assert math.isnan(each["worst"])
        assert gradstats.wire(x).smallest() is None
        assert gradstats.wire(x).verdict() == "no format changes a gradient that is zero"
    x = gradient(1000)
    bad = x.copy()
    bad[[3, 500, 999]] = math.nan, math.inf, -math.inf
    zeroed = np.where(np.isfinite(bad), bad, 0).astype(np.float32)
    for a, b in zip(gradstats.wire(bad), gradstats.wire(zeroed), strict=True):
        assert a | {"nonfinite": 0} == b
        assert a["nonfinite"] == 3
    each = gradstats.wire(bad, ["bf16"], ratio=0.1)[0]  # where it is selected, too
    assert each["error"] == pytest.approx(each["dropped"], rel=1e-4)
    assert each["nonfinite"] == 3
    for scale in (
        1e-200,
        1e200,
        5e-324,
    ):  # beyond float32: nothing of it arrives, or its largest number
        for each in gradstats.wire(x.astype(np.float64) * scale, ["bf16", "int8", "nvfp4"]):
            assert each["error"] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, torch.bfloat16])
def test_any_dtype_and_layout(dtype):
    x = gradient(640)
    like = torch.from_numpy(x).to(dtype) if isinstance(dtype, torch.dtype) else x.astype(dtype)
    plain = like.float().numpy() if torch.is_tensor(like) else like.astype(np.float32)
    for given in (like, like.reshape(20, 32)):
        found = gradstats.wire(given, ["mxfp6"])[0]
        assert found["error"] == pytest.approx(
            gradstats.wire(plain, ["mxfp6"])[0]["error"], rel=1e-3
        )
    turned = np.asfortranarray(plain.reshape(20, 32))
    assert (
        gradstats.wire(turned, ["mxfp6"])[0]["error"]
        == gradstats.wire(plain, ["mxfp6"])[0]["error"]
    )


def test_nothing_of_the_size_of_a_gradient_is_made():
    x, way = np.ones(1 << 22, np.float16), Way(FORMATS["bf16"], "none", "nearest", 0)
    tracemalloc.start()
    try:
        measure(way, [Message(x)], 0)
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


def test_the_smallest_format_below_an_error():
    found = gradstats.wire(gradient(5000))
    best = found.smallest(0.01)
    below = [r for r in found if r["worst"] <= 0.01]
    assert best["bits"] == min(r["bits"] for r in below)
    assert found.smallest(1e-12) is None
    assert f"below 0.01 is {best['format']}" in found.verdict()
    assert "the smallest format that keeps" in found.verdict()
    none = found.verdict(1e-12)
    assert "no format that was tried" in none
    # the table has the mean, and the limit is on the largest
    assert re.search(
        r"closest: \S+ bits an element, an error of \S+ on average, and \S+ at worst$", none
    )
    chosen = gradstats.wire(gradient(5000), ["bf16"]).verdict()
    assert "the smallest of the formats tried that keeps" in chosen
    assert isinstance(found, Wire)
    for error in (0, -1, math.nan, "0.1"):
        with pytest.raises(InputError, match="error must be in"):
            found.smallest(error)
    with pytest.raises(InputError, match="layer"):
        found.smallest(layer="fc")
    with pytest.raises(InputError, match="kind"):
        found.smallest(kind="corrected")


@every(
    ("options", "message"),
    [
        ({"formats": ["fp5"]}, "number format 'fp5'"),
        ({"formats": "mxfp4"}, "formats must be a list or a tuple"),
        ({"formats": []}, "formats must name at least one"),
        ({"roundings": ["up"]}, "rounding 'up'"),
        ({"rotations": [3]}, "rotations must be powers of two"),
        ({"rotations": [2**18]}, "rotations must be from 0 to 131072"),
        ({"scales": ["row"]}, "scale 'row'"),
        ({"ratio": 0}, "ratio must be in"),
        ({"estimator": "best"}, "estimator 'best'"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(options, message):
    with pytest.raises(InputError, match=message) as raised:
        gradstats.wire(gradient(100), **options)
    assert "\n" not in str(raised.value)


def test_sketches_have_no_elements_to_round(tmp_path):
    path = tmp_path / "sketched.zarr"
    create_trace(path, traces.LAYERS, world_size=1)
    traces.write(path, range(2), store="sketches")
    with pytest.raises(TraceError, match="only sketches"):
        gradstats.wire(path)


def test_a_rule_that_keeps_less_is_not_said_to_send_what_was_asked_for():
    """Of a gradient of which one element in fifty is not zero, no rule sends a tenth."""
    x = np.where(np.arange(5000) % 50 == 0, gradient(5000), 0).astype(np.float32)
    found = gradstats.wire(x, ["nvfp4"], ratio=0.1)
    assert found.verdict().startswith("at ratio 0.1 nvfp4 takes ")
    assert found.verdict().endswith(" is what is not sent")


def test_a_layer_of_zeros_is_not_one_that_no_format_suits(tmp_path):
    layers = {name: gradient(500) for name in ("a", "b", "zero")}
    layers["zero"] = np.zeros(500, np.float32)
    np.savez(tmp_path / "x.npz", **layers)
    asked = ("wire", tmp_path / "x.npz", "--to", "int4")
    several = run(*asked, "--per-layer", "--error", 1e-9).stderr
    assert "no format stays below 1e-09 in 2 layers, such as a" in several
    assert "in b\n" in run(*asked, "--layer", "b", "--error", 1e-9).stderr
    assert "no format" not in run(*asked, "--layer", "zero", "--error", 1e-9).stderr


def test_the_sum_of_the_ranks_says_what_no_format_suits(tmp_path):
    """What cancels in the sum is a layer of zeros, though each rank has an error of its own."""
    path = tmp_path / "run.zarr"
    create_trace(path, [Layer("cancels", 0, (500,)), Layer("adds", 500, (500,))], world_size=2)
    for rank, sign in enumerate((1, -1)):
        writer = TraceWriter(path, rank)
        x = np.append(sign * gradient(500), gradient(500, 1 + rank))
        writer.append(0, {"gradient": x.astype(np.float32)})
        writer.close()
    asked = ("wire", path, "--to", "int4", "--per-layer", "--error")
    assert "no format stays below 1e-09 in adds\n" in run(*asked, 1e-9).stderr
    # between the errors of the sum and those of the ranks
    found = gradstats.wire(path, ["int4"], per_layer=True, scales=["block"])
    alone, together = (block(found, layer="adds", ranks=n)["worst"] for n in (1, 2))
    limit = (alone + together) / 2
    said = run(*asked, limit, "--scale", "block").stderr
    assert ("no format stays below" in said) == (together > limit)


def test_at_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = ("wire", RANKS, "--step", 300)
    done = run(*command)
    assert done.stdout.startswith("resnet8, gradient: the smallest format that keeps")
    assert "sum of 2 ranks" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Too wide" not in done.stdout
    some = ("--to", "mxfp4", "--to", "int4", "--rounding", "stochastic", "--rotation", 16)
    found = records(*command, *some, "--ratio", 0.01, "--layer", "fc.*", "--seed", 5)
    assert {r["format"] for r in found} == {"mxfp4", "int4"}
    assert {(r["rounding"], r["rotation"], r["ratio"]) for r in found} == {("stochastic", 16, 0.01)}
    assert {r["layer"] for r in found} == {"all", "fc.weight", "fc.bias"}
    assert found[0].keys() >= {
        *("format", "rounding", "rotation", "layer", "ranks", "bits"),
        *("error", "bias", "cosine", "zeros", "saturated"),
    }
    layers = run(*command, "--per-layer", "--error", 0.05).stdout
    assert "fc.weight" in layers
    assert max(map(len, layers.splitlines())) <= 80
    refused = run(*command, "--to", "mxfp5")
    assert refused.returncode == 2
    assert "did you mean mxfp" in refused.stderr
