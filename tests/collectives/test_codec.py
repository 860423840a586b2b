"""Codecs of a message: what rounding may do, what arrives, and messages that arrive damaged."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.every import every

from gradstats.collectives.codec import CHUNK, INDICES, SCALED, VALUES, Codec, as_codec
from gradstats.collectives.indices import IndexAllGather
from gradstats.collectives.packed import pack, unpack
from gradstats.collectives.ragged import GatheredWords
from gradstats.compressors import COMPRESSORS, codecs, make_compressor
from gradstats.compressors.cost import selection_words
from gradstats.errors import ExchangeError, InputError
from gradstats.primitives import Selection

CODECS = [Codec(*names) for names in itertools.product(INDICES, VALUES)]
LEVELS = {"int8": 127, "int4": 7, "int2": 1}
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def values_of(kind, n=1000):
    rng = np.random.default_rng(n)
    x = {
        "laplace": rng.laplace(size=n),
        "decades": np.exp(rng.uniform(-80, 80, n)) * rng.choice([-1, 1], n),
        "equal": np.full(n, -0.3),
        "zeros": np.zeros(n),
        "denormal": rng.uniform(-1e-38, 1e-38, n),
        "huge": rng.uniform(-3.4e38, 3.4e38, n),
    }[kind]
    return torch.from_numpy(x.astype(np.float32))


KINDS = ("laplace", "decades", "equal", "zeros", "denormal", "huge")


@every("kind", KINDS)
@every("name", VALUES)
@every("n", [0, 1, 3, CHUNK, CHUNK + 1, 1000])
def test_what_is_sent_and_what_is_left_add_up_bit_for_bit(name, kind, n):
    """Conservation: error feedback loses nothing, and no element's error is larger than the element."""
    codec, values = Codec(values=name), values_of(kind, max(n, 1))[:n]
    sent = codec.rounded(values)
    left = values - sent.float()
    within = values.abs() < (65504 if name == "float16" else torch.inf)  # its largest number
    assert torch.equal((sent.float() + left)[within], values[within])
    assert (left.abs() <= values.abs()).all()
    words = codec.pack_values(sent)
    assert words.numel() == codec.value_words(n)
    assert torch.equal(codec.unpack_values(words, n), sent.float())
    assert torch.equal(codec.rounded(sent.float()), sent)  # the way to the wire rounds again


@given(st.lists(floats, max_size=20), st.sampled_from(VALUES))
def test_any_floats_are_conserved(numbers, name):
    codec, values = Codec(values=name), torch.tensor(numbers, dtype=torch.float32)
    if name == "float16":
        values = values.clamp(-65504, 65504)
    sent = codec.rounded(values)
    assert torch.equal(codec.unpack_values(codec.pack_values(sent), len(numbers)), sent.float())
    left = values - sent.float()
    assert torch.equal(sent.float() + left, values)


@pytest.mark.parametrize("name", LEVELS)
def test_integers_are_the_nearest_of_even_steps_of_each_chunk(name):
    values = torch.cat([values_of("laplace", CHUNK), 1000 * values_of("laplace", CHUNK)])
    sent = Codec(values=name).rounded(values)
    for chunk, got in zip(values.split(CHUNK), sent.split(CHUNK), strict=True):
        largest = chunk.abs().max()
        levels = largest * torch.arange(-LEVELS[name], LEVELS[name] + 1) / LEVELS[name]
        nearest = (chunk[:, None] - levels).abs().min(1).values
        assert torch.allclose((got - chunk).abs(), nearest, rtol=1e-5, atol=float(largest) * 1e-6)
        assert torch.equal(got[chunk.abs().argmax()], chunk[chunk.abs().argmax()])


def test_8_bit_floats_are_torchs_scaled_to_the_largest_of_each_chunk():
    values = torch.cat([values_of("laplace", CHUNK), 1e-9 * values_of("decades", CHUNK)])
    sent = Codec(values="float8_e4m3fn").rounded(values)
    for chunk, got in zip(values.split(CHUNK), sent.split(CHUNK), strict=True):
        scale = chunk.abs().max() / 448
        expected = (chunk / scale).to(torch.float8_e4m3fn).float() * scale
        assert torch.allclose(got, expected, rtol=1e-6)
        assert torch.equal(got[chunk.abs().argmax()], chunk[chunk.abs().argmax()])
        normal = chunk.abs() >= 2**-6 * scale
        assert ((got - chunk).abs() <= chunk.abs() / 16)[
            normal
        ].all()  # three bits behind the first


@every("dtype", [torch.float16, torch.bfloat16])
@every("name", VALUES)
def test_half_precision_is_coded_too(name, dtype):
    values = values_of("laplace", 1000).to(dtype)
    sent = Codec(values=name).rounded(values)
    assert torch.equal(sent, Codec(values=name).rounded(values.float()))


def test_too_large_values_become_the_largest_and_float64_is_narrowed():
    for name in VALUES:
        sent = Codec(values=name).rounded(torch.tensor([1e300, -1.0], dtype=torch.float64))
        assert sent.isfinite().all()
        assert sent.dtype == getattr(torch, "float32" if name in SCALED else name)


@every("name", VALUES)
@every("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_infinite_values_become_the_largest_and_stay_as_they_are_here(name, dtype):
    """In one chunk of two; of the other nothing changes."""
    values = torch.cat([values_of("laplace", CHUNK)[:CHUNK] for _ in range(2)]).to(dtype)
    values[3], values[7] = torch.inf, -torch.inf
    before, codec = values.clone(), Codec(values=name)
    sent = codec.rounded(values)
    assert torch.equal(values, before)
    if name in SCALED:
        assert sent.isfinite().all()
        assert sent[3] > 1e4
        assert sent[7] == -sent[3]
        words = codec.pack_values(sent)
        assert torch.equal(codec.unpack_values(words, len(values)), sent)
    if name not in ("nvfp4",):  # whose scales have one of their own for all
        alone = codec.rounded(values[CHUNK:])
        assert torch.equal(sent[CHUNK:], alone)


def selections(numel):
    """Return hostile selections, with one value for all where there is only one."""
    rng = np.random.default_rng(3)
    sets = [[], [numel - 1], [0], range(min(numel, 700)), np.sort(rng.choice(numel, 90, False))]
    for i, chosen in enumerate(sets):
        indices = torch.tensor(np.array(chosen, np.int64))
        yield Selection(indices, values_of("laplace", 1000)[: len(indices) if i % 2 else 1])


@every("codec", CODECS, ids=str)
@every("numel", [1000, 2**31 - 1, 2**31, 2**41])
def test_selections_arrive_one_behind_the_other(codec, numel):
    each = [Selection(s.indices, codec.rounded(s.values)) for s in selections(min(numel, 10**6))]
    each.append(Selection(torch.tensor([3, numel - 1]), codec.rounded(torch.tensor([1.0, -2.0]))))
    words = [pack(s, numel, codec) for s in each]
    for sent, packed in zip(each, words, strict=True):
        most = selection_words(len(sent), len(sent.values), numel, codec)
        assert packed.numel() <= most
        assert codec.indices != "plain" or packed.numel() == most
    got = unpack(torch.cat(words), numel, codec)
    assert len(got) == len(each)
    for sent, found in zip(each, got, strict=True):
        assert torch.equal(sent.indices, found.indices)
        assert torch.equal(sent.values.float(), found.values)


@every("codec", CODECS, ids=str)
def test_damaged_messages_are_refused_or_harmless(codec):
    """Whatever arrives, positions stay in the gradient and no value is missing."""
    numel, refused, taken = 500, [], 0
    indices = torch.arange(0, 400, 5)
    sent = Selection(indices, codec.rounded(values_of("laplace", 80)))
    whole = torch.cat([pack(sent, numel, codec)] * 2).numpy()
    for seed in range(300):
        rng, raw = random.Random(seed), whole.copy().view(np.uint8)
        kind = rng.choice(["flip", "word", "cut", "foreign"])
        if kind == "flip":
            raw[rng.randrange(raw.size)] ^= 1 << rng.randrange(8)
        elif kind == "word":
            word = rng.choice([-1, 0, 1, 2**31 - 1, -(2**31), numel, rng.getrandbits(31)])
            raw.view(np.int32)[rng.randrange(whole.size)] = word
        elif kind == "cut":
            raw = raw[: 4 * rng.randrange(whole.size)]
        else:
            raw[:] = np.frombuffer(rng.randbytes(raw.size), np.uint8)
        try:
            got = unpack(torch.from_numpy(raw.view(np.int32)), numel, codec, rank=3)
        except ExchangeError as error:
            refused.append(str(error))
            continue
        taken += 1
        for each in got:
            assert len(each.values) in (1, len(each.indices))
            assert not len(each) or 0 <= int(each.indices.min()) <= int(each.indices.max()) < numel
    assert refused
    assert taken
    assert all("rank 3 is damaged" in text and "\n" not in text for text in refused)


@pytest.mark.parametrize("indices", INDICES)
def test_positions_alone_arrive_or_are_refused(indices):
    """Messages of positions hold what they say, to the last word."""
    chosen, gather = torch.tensor([3, 2**31 + 5, 2**40]), IndexAllGather(Codec(indices))

    def arrived(change):
        gather.words = lambda words, *rest: GatheredWords([change(words)], [0], 0, 1)
        return gather(chosen, 2**41, number=2.5)

    got = arrived(lambda words: words)
    assert torch.equal(got.indices[0], chosen)
    assert got.numbers == [2.5]
    for change in (
        lambda words: words[:-1],
        lambda words: words[:0],
        lambda words: torch.cat([words, words[-1:]]),
    ):
        with pytest.raises(ExchangeError, match="rank 0 is damaged"):
            arrived(change)


def test_a_claim_of_many_positions_allocates_nothing():
    for count in (2**31 - 1, 10**6):
        words = torch.tensor([count, 1, 0, 0, 0, 0], dtype=torch.int32)
        for codec in (Codec("rice", "int2"), Codec("plain", "int2"), Codec("rice")):
            with pytest.raises(ExchangeError, match="damaged"):
                unpack(words, 2**40, codec)


@every(
    ("name", "options", "message"),
    [
        ("randomk", {"indices": "rice"}, "randomk sends no positions: leave indices out"),
        ("cltk", {"values": "int8"}, "cltk sends no values of its own to code"),
        ("micro", {"values": "float16"}, "micro sends no values of its own to code"),
        ("redsync-quantised", {"values": "int4"}, "redsync-quantised sends no values"),
        ("signsgd", {"indices": "rice"}, "signsgd sends no positions"),
        ("none", {"values": "int8"}, "none sends no values"),
        ("none", {"bogus": 3}, "compressor 'none' has no option bogus"),
        ("dense-bf16", {"indices": "rice"}, "dense-bf16 sends no positions"),
        ("topk", {"indices": "zip"}, "indices travel as plain, rice, chunk, not 'zip'"),
        (
            "topk",
            {"values": "float64"},
            "values travel as float32, float16, bfloat16, float8_e4m3fn, int8",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(name, options, message):
    with pytest.raises(InputError, match=message) as raised:
        make_compressor(name, 0.1, **options)
    assert "\n" not in str(raised.value)


@every("name", COMPRESSORS)
def test_every_compressor_takes_the_codec_of_what_it_sends(name):
    for field, value in (("indices", "rice"), ("values", "int8")):
        if field in codecs(name):
            make_compressor(name, 0.1, **{field: value})
    assert make_compressor(name, 0.1, indices="plain", values="float32") or name == "none"


def test_a_codec_is_a_codec():
    assert as_codec(torch.bfloat16) == Codec("plain", "bfloat16")
    with pytest.raises(InputError, match="a codec is needed"):
        as_codec("rice")
