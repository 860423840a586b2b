"""Number formats: bit for bit those of the library that NumPy's users have, and what MX and NVFP4 say of scales."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.every import every
from torch.overrides import TorchFunctionMode

from gradstats.collectives.codec import SCALED, Codec
from gradstats.errors import InputError
from gradstats.primitives.formats import FORMATS, as_format, rotated

ELEMENTS = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp8-e5m2": ml_dtypes.float8_e5m2,
    "mxfp6": ml_dtypes.float6_e2m3fn,
    "mxfp6-e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
}
LIVE = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
KINDS = ("laplace", "decades", "equal", "zeros", "denormal", "huge", "with zero blocks")


def numbers(kind, n):
    rng = np.random.default_rng(n)
    x = {
        "laplace": rng.laplace(size=n),
        "decades": np.exp(rng.uniform(-80, 80, n)) * rng.choice([-1, 1], n),
        "equal": np.full(n, -0.3),
        "zeros": np.zeros(n),
        "denormal": rng.uniform(-1e-38, 1e-38, n),
        "huge": rng.uniform(-3.4e38, 3.4e38, n),
        "with zero blocks": np.where(np.arange(n) // 32 % 3 == 0, 0, rng.laplace(size=n)),
    }[kind]
    return torch.from_numpy(x.astype(np.float32))


def cast(x, name):
    """Return numbers of the type, by the library; it has no answer of its own beyond the largest."""
    largest = np.float32(FORMATS[name].largest)
    return np.clip(x, -largest, largest).astype(ELEMENTS[name])


@every("name", ELEMENTS)
def test_elements_are_those_of_the_library(name):
    """All sizes, ties and what is too large; also by the steps of the type where torch has a type of its own."""
    form, rng = FORMATS[name], np.random.default_rng(0)
    steps = np.arange(-600, 600, dtype=np.float32) / 16  # up to ±37.5
    x = np.exp(rng.uniform(-40, 15, 20_000)) * rng.choice([-1, 1], 20_000)
    x = np.concatenate([x.astype(np.float32), steps, steps / 38 * np.float32(form.largest)])
    x = np.concatenate([x, [0.0, -0.0, 1e-45, 3e38], -x]).astype(np.float32)
    right = cast(x, name)
    for each in {form, replace(form, dtype=None)} if form.bits < 16 else {form}:
        found = each.rounded(torch.from_numpy(x))
        assert np.array_equal(found.numpy(), right.astype(np.float32))
        if form.bits <= 8:
            codes = each.codes(found)
            assert np.array_equal(codes.numpy(), right.view(np.uint8))
            assert torch.equal(each.numbers(codes).view(torch.int32), found.view(torch.int32))


@every("kind", KINDS)
@every("name", [n for n, form in FORMATS.items() if form.scale == "e8m0"])
def test_blocks_are_those_of_the_mx_specification(name, kind):
    """Section 6.3: the scale is the largest power of two up to the largest magnitude, over that of the type."""
    form, x = FORMATS[name], numbers(kind, 3232)
    largest = {"mxfp8": 8, "mxfp8-e5m2": 15, "mxfp6": 2, "mxfp6-e3m2": 4, "mxfp4": 2}[name]
    right = []
    for block in x.double().numpy().reshape(-1, 32):
        top = np.abs(block).max()
        exponent = max(math.frexp(top)[1] - 1 - largest, -127) if top else -127
        stored = np.array(2.0**exponent).astype(ml_dtypes.float8_e8m0fnu)
        assert float(stored) == 2.0**exponent
        scaled = np.clip(block / 2.0**exponent, -form.largest, form.largest).astype(np.float32)
        right.append(cast(scaled, name).astype(np.float64) * 2.0**exponent)
    assert np.array_equal(form.quantised(x).double().numpy(), np.concatenate(right))


@every("kind", KINDS)
def test_blocks_are_those_of_nvfp4(kind):
    form, x = FORMATS["nvfp4"], numbers(kind, 3200)
    found, scales = form.quantised(x), form.scales(form.rows(x))
    top = float(x.abs().max())
    if top < 2.0**-100:
        assert not found.any()
        return
    tensor = float(scales.tensor)
    assert 1 - 2.0**-15 < tensor * 6 * 448 / top <= 1
    rows = x.double().numpy().reshape(-1, 16)
    each = np.abs(rows).max(1) / 6 / tensor
    each = np.clip(each, 2.0**-6, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(scales.each.view(torch.uint8).numpy(), each.view(np.uint8))
    unit = each.astype(np.float64)[:, None] * tensor
    right = cast((rows / unit).astype(np.float32), "nvfp4").astype(np.float64) * unit
    assert np.array_equal(found.double().numpy(), right.reshape(-1))


@every("kind", KINDS)
@every("values", SCALED)
@every("n", [0, 1, 15, 16, 31, 33, 256, 1000])
def test_what_is_sent_is_what_is_analysed(values, kind, n):
    """The message holds the format's bits, and no more; what arrives are its numbers, and sending them again, too."""
    form, codec, x = (
        FORMATS[LIVE.get(values, values)],
        Codec(values=values),
        numbers(kind, max(n, 1))[:n],
    )
    words = codec.pack_values(x)
    assert torch.equal(codec.unpack_values(words, n), form.quantised(x))
    assert 0 <= 32 * words.numel() - form.bits_of(n) < 64
    assert torch.equal(form.quantised(form.quantised(x)), form.quantised(x))


def test_bits_an_element_are_those_of_the_specifications():
    per_block = {name: form.bits_of(1024) / 1024 for name, form in FORMATS.items()}
    assert per_block["mxfp8"] == 8.25
    assert per_block["mxfp6"] == 6.25
    assert per_block["mxfp4"] == 4.25
    assert per_block["nvfp4"] == 4.5 + 32 / 1024
    assert per_block["int4"] == 4 + 32 / 256
    assert FORMATS["e4m3"].whole().bits_of(1024) == 8 * 1024 + 32
    assert all(form.bits_of(0) == 0 for form in FORMATS.values())


@pytest.mark.slow
@every("name", FORMATS)
def test_rounding_at_random_has_the_right_mean_and_stays_between_neighbours(name):
    form, generator = FORMATS[name], torch.Generator().manual_seed(1)
    for scale in (1.0, 2.0**-140) if name == "bf16" else (1.0,):
        x = scale * (torch.rand(50, generator=generator) * min(form.largest, 40.0) - 0.3)
        draws = torch.stack([form.rounded(x.clone(), generator) for _ in range(4000)]).double()
        low, high = draws.amin(0), draws.amax(0)
        nearest = form.rounded(x.clone()).double()
        assert ((nearest == low) | (nearest == high)).all()
        assert ((draws == low) | (draws == high)).all()
        off = (draws.mean(0) - x.double()).abs()
        assert (off <= 5 * (high - low) / 2 / 4000**0.5 + 1e-12 * scale).all()
        assert torch.equal(form.rounded(nearest.float(), generator), nearest.float())


@settings(max_examples=50)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70),
    st.sampled_from(list(FORMATS)),
)
def test_no_number_becomes_larger_than_twice_itself_or_changes_its_sign(values, name):
    form, x = FORMATS[name], torch.tensor(values, dtype=torch.float32)
    for each in {form, form.whole()} if form.scale == "float32" else {form}:
        found = each.quantised(x)
        assert found.isfinite().all()
        assert (found * x.sign() >= 0).all()
        assert ((x - found).abs() <= x.abs()).all()


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_a_rotation_keeps_lengths_and_can_be_taken_back(size):
    x = numbers("laplace", 4 * size).view(-1, size)
    signs = torch.where(torch.arange(size) % 3 == 0, -1.0, 1.0)
    found = rotated(x, signs)
    assert torch.allclose(rotated(found, signs, back=True), x, atol=1e-5)
    assert torch.allclose(found.norm(dim=1), x.norm(dim=1), rtol=1e-5)
    one = torch.zeros(1, size)
    one[0, 0] = 1
    assert torch.allclose(rotated(one, signs).abs(), torch.full((1, size), size**-0.5))


def test_a_format_that_does_not_exist_is_refused():
    for name in ("fp5", None, ["mxfp4"]):
        with pytest.raises(InputError, match="number format"):
            as_format(name)


class NoReciprocals(TorchFunctionMode):
    """Refuses what CUDA rounds otherwise than the CPU: tensors divided by a number."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__truediv__, torch.Tensor.div, torch.div, torch.true_divide):
            assert torch.is_tensor(args[1]), f"divided by the number {args[1]}"
        return function(*args, **(kwargs or {}))


@every("name", FORMATS)
def test_scales_have_the_same_bits_on_every_device(name):
    form = FORMATS[name]
    rows = form.rows(torch.linspace(-3, 5, 100))
    with NoReciprocals():
        scales = form.scales(rows)
        form.restored(form.scaled(rows, scales), scales)
