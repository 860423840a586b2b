"""What changed, written down: every codec gives back the later words to the bit, in the bytes that theory says."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.every import every

from gradstats.errors import InputError
from gradstats.primitives.codec import rice_words
from gradstats.primitives.deltas import (
    CODECS,
    WIDTHS,
    decode,
    encode,
    entropy_bytes,
    rounded_words,
    words_of,
)

LIBRARY = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


def pair(n, share, dtype, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=n).astype(np.float32)
    b = np.where(rng.random(n) < share, a + 1, a).astype(np.float32)
    return words_of(a, dtype), words_of(b, dtype)


@every("dtype", WIDTHS)
@every("n", [0, 1, 7, 8, 9, 130, 50_000])
@every("share", [0, 1e-4, 0.01, 0.5, 1])
def test_every_codec_gives_the_later_weights_to_the_bit(share, n, dtype):
    a, b = pair(n, share, dtype)
    changed = int(np.count_nonzero(a != b))
    sizes = {}
    for codec in CODECS:
        message = encode(a, b, codec)
        assert np.array_equal(decode(a, message, codec), b)
        sizes[codec] = len(message)
    new = changed * WIDTHS[dtype]
    assert sizes["bitmap"] == -(-n // 8) + new
    assert sizes["rice"] <= 8 + 4 * rice_words(changed, n) + new
    assert sizes["gaps"] <= 8 + changed + n / 127 + new


@settings(max_examples=60)
@given(
    st.lists(st.tuples(*[st.integers(0, 2**16 - 1)] * 2), max_size=60), st.sampled_from([*CODECS])
)
def test_any_bits(words, codec):
    """NaN of every kind, both zeros: what is compared are bits."""
    for dtype in (np.uint16, np.uint32):
        a, b = (np.array([w[i] for w in words], dtype) * dtype(65521) for i in (0, 1))
        assert np.array_equal(decode(a, encode(a, b, codec), codec), b)


def test_gaps_of_all_lengths():
    a = np.zeros(3_000_000, np.uint16)
    b = a.copy()
    b[np.cumsum([0, 1, 127, 128, 129, 16383, 16384, 16385, 2_097_152])] = 1
    for codec in CODECS:
        assert np.array_equal(decode(a, encode(a, b, codec), codec), b)
    assert len(encode(a, b, "gaps")) == 8 + (1 + 1 + 1 + 1 + 2 + 2 + 2 + 3 + 3) + 2 * 9


@pytest.mark.parametrize("dtype", WIDTHS)
def test_words_are_the_bits_of_the_type(dtype):
    x = np.concatenate([np.random.default_rng(0).normal(size=1000), [0, -0.0, 1e-40, 1e30, np.inf]])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        right = x.astype(LIBRARY[dtype])
    assert np.array_equal(words_of(x, dtype), right.view(f"u{WIDTHS[dtype]}"))


def test_eight_bits_have_one_scale():
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    largest = float(np.abs(x).max())
    right = (x * np.float32(448 / largest)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(rounded_words(x, largest), right.view(np.uint8))
    assert not rounded_words(np.zeros(5, np.float32), 0.0).any()
    assert rounded_words(np.full(3, np.nan, np.float32), 1.0).tolist() == [0, 0, 0]


def test_entropy_of_bytes_is_the_sum_over_planes():
    a = np.zeros(4096, np.uint16)
    b = np.tile(np.arange(4, dtype=np.uint16), 1024)
    assert entropy_bytes(a, b) == 4096 * 2 / 8  # two bits in the low byte, none in the high one
    assert entropy_bytes(a, a) == 0
    assert entropy_bytes(a[:0], a[:0]) == 0
    uniform = np.random.default_rng(0).integers(0, 2**32, 1 << 17, dtype=np.uint32)
    found = entropy_bytes(np.zeros_like(uniform), uniform)
    assert math.isclose(found, 4 * uniform.size, rel_tol=1e-2)


def test_a_codec_that_does_not_exist_is_refused():
    a = np.zeros(3, np.uint32)
    for call in (lambda: encode(a, a, "zip"), lambda: decode(a, b"", "zip")):
        with pytest.raises(
            InputError, match="changes are written as bitmap, gaps, rice, xor, not 'zip'"
        ):
            call()
