"""Coded positions, by the host and by operators: bit-exact round trips, promised lengths, words that nobody wrote."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.every import every

from gradstats.errors import InputError
from gradstats.primitives import codec_operators
from gradstats.primitives.codec import rice_decode, rice_encode, rice_words

LAST = 2**56 - 1
"""The last position there can be."""
positions = st.one_of(
    st.sets(st.integers(0, 200)),
    st.sets(st.integers(0, LAST), max_size=40),
    st.sets(st.integers(2**31 - 20, 2**31 + 20)),
).map(sorted)


def bits(words):
    return [int(word) >> i & 1 for word in words for i in range(32)]


def read(words, count):
    """Decode as the format's description says, bit by bit."""
    if not count:
        return []
    head = int(words[0]) | int(words[1]) << 32
    parameter, found, stream = head >> 56, [head & LAST], bits(words[2:])
    ends = parameter * (count - 1)
    for j in range(count - 1):
        low = sum(stream[parameter * j + i] << i for i in range(parameter))
        high = stream.index(1, ends) - ends
        ends += high + 1
        found.append(found[-1] + 1 + (high << parameter) + low)
    return found


def encode(positions):
    """Encode on the host and by operators, which write the same."""
    chosen = np.array(positions, np.int64)
    words = rice_encode(chosen)
    assert torch.equal(codec_operators.rice_encode(tensor(chosen)), tensor(words.view(np.int32)))
    return words


def decode(words, count, numel):
    """Decode on the host and by operators, which read the same, or refuse the same."""
    try:
        found, used = rice_decode(words, count, numel)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            codec_operators.rice_decode(tensor(words.view(np.int32)), count, numel)
        raise
    again = codec_operators.rice_decode(tensor(words.view(np.int32)), count, numel)
    assert torch.equal(again[0], tensor(found))
    assert again[1] == used
    return found, used


def tensor(array):
    return torch.from_numpy(np.array(array))


@given(positions, st.integers(0, 3))
def test_positions_come_back_bit_for_bit(chosen, behind):
    numel = chosen[-1] + 1 if chosen else 1
    words = encode(chosen)
    assert words.size <= rice_words(len(chosen), numel)
    message = np.append(words, np.full(behind, 2**32 - 1, np.uint32))
    found, used = decode(message, len(chosen), numel)
    assert found.dtype == np.int64
    assert (found.tolist(), used) == (chosen, words.size)
    assert read(words, len(chosen)) == chosen


@every(
    ("chosen", "numel"),
    [
        ([], 5),
        (range(100_000), 100_000),
        ([99_999], 100_000),
        ([0, 99_999], 100_000),
        ([*range(1000), LAST], LAST + 1),
        ([LAST], LAST + 1),
        (range(2**31 - 500, 2**31 + 500, 7), 2**40),
    ],
)
def test_hostile_sets_come_back(chosen, numel):
    chosen = np.array(chosen, np.int64)
    words = encode(chosen)
    assert words.size <= rice_words(chosen.size, numel)
    assert chosen.size != 1 or words.size == rice_words(1, numel)
    found, used = decode(words, chosen.size, numel)
    assert np.array_equal(found, chosen)
    assert used == words.size


@pytest.mark.parametrize("numel", [1, 2, 3, 64, 1000])
def test_no_set_is_longer_than_promised(numel):
    """The longest streams come from gaps of one length, and from a run with one far position."""
    for count in range(numel + 1):
        room = rice_words(count, numel)
        run = np.append(np.arange(count - 1), numel - 1) if count else np.arange(0)
        for chosen in (run, np.unique(np.linspace(0, numel - 1, count).astype(np.int64))):
            assert encode(chosen).size <= room


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_random_positions_take_little_more_than_their_entropy(ratio):
    chosen = np.flatnonzero(np.random.default_rng(1).random(2_000_000) < ratio)
    entropy = -(math.log2(ratio) + (1 - ratio) / ratio * math.log2(1 - ratio))
    assert entropy < 32 * encode(chosen).size / chosen.size < 1.03 * entropy
    assert 32 * rice_words(chosen.size, 2_000_000) / chosen.size < 1.1 * entropy


@pytest.mark.parametrize("chosen", [[1, 1], [2, 1], [-1], [3, 4, 4], [0, 2**56]])
def test_positions_that_do_not_ascend_are_refused(chosen):
    with pytest.raises(InputError, match="ascending"):
        encode(chosen)


@pytest.mark.parametrize("chosen", [[7], [0, 7], [5, 6, 7], [0, 2**40, LAST]])
def test_a_position_behind_the_last_is_refused(chosen):
    words = encode(chosen)
    assert decode(words, len(chosen), chosen[-1] + 1)[0].tolist() == chosen
    with pytest.raises(ValueError, match=r"elements|positions"):
        decode(words, len(chosen), chosen[-1])


@given(positions.filter(len))
def test_a_stream_that_is_cut_anywhere_is_refused(chosen):
    words = encode(chosen)
    for end in range(words.size):
        with pytest.raises(ValueError, match=r"message|positions"):
            decode(words[:end], len(chosen), LAST + 1)


@given(
    st.binary(max_size=60),
    st.one_of(st.integers(-2, 200), st.integers(0, 2**62)),
    st.integers(1, LAST),
)
def test_foreign_words_are_refused_or_positions(raw, count, numel):
    words = np.frombuffer(raw.ljust(-(-len(raw) // 4) * 4, b"\0"), np.uint32)
    try:
        found, used = decode(words, count, numel)
    except ValueError:
        return
    assert used <= words.size
    assert found.size == count <= 32 * words.size
    assert (np.diff(found) > 0).all()
    assert not count or 0 <= found[0] <= found[-1] < numel


def test_streams_longer_than_a_piece_come_back(monkeypatch):
    monkeypatch.setattr(codec_operators, "_PIECE", 3)
    chosen = np.flatnonzero(np.random.default_rng(2).random(20_000) < 0.05)
    found, used = decode(encode(chosen), chosen.size, 20_000)
    assert np.array_equal(found, chosen)
    assert used == encode(chosen).size


@given(positions.filter(len), st.data())
def test_a_flipped_bit_or_a_lost_end_is_refused_or_gives_positions(chosen, data):
    words, numel = encode(chosen), chosen[-1] + 1
    kept = words[: data.draw(st.integers(0, words.size))].copy()
    if kept.size:
        kept[data.draw(st.integers(0, kept.size - 1))] ^= np.uint32(
            1 << data.draw(st.integers(0, 31))
        )
    try:
        found, used = decode(kept, len(chosen), numel)
    except ValueError:
        return
    assert used <= kept.size
    assert (np.diff(found) > 0).all()
    assert 0 <= found[0] <= found[-1] < numel


def test_places_within_chunks_reach_as_far_as_their_head():
    last = 2**43 - 1
    words = codec_operators.chunk_encode(tensor([last - 9000, last]), 99)
    assert codec_operators.chunk_decode(words, 2, last + 1)[0].tolist() == [last - 9000, last]
    for wrong in ([last + 1], [2**44 + 5], [3, 3], [-1]):
        with pytest.raises(InputError, match="ascending, each once, from 0 to"):
            codec_operators.chunk_encode(tensor(wrong), 99)
