"""Headers and checksums: what is altered is noticed, whatever it is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from gradstats.collectives import header, plain, ragged
from gradstats.collectives.header import (
    HEADER_BYTES,
    Header,
    Kind,
    Moment,
    at_moment,
    checksum,
    read_headers,
)
from gradstats.collectives.ragged import RaggedAllGather
from gradstats.collectives.update import SparseUpdate
from gradstats.errors import ExchangeError, InputError
from gradstats.primitives import Selection


@pytest.mark.parametrize("n", [0, 1, 1000, header._BLOCK + 3])
def test_a_checksum_sees_every_changed_word(n):
    words = torch.from_numpy(np.random.default_rng(n).integers(-(2**31), 2**31, n, np.int32))
    whole = checksum(words)
    assert torch.equal(checksum(torch.cat([words, words.new_zeros(5)])), whole)
    for place in {0, n // 2, n - 1} if n else ():
        for bit in (0, 17, 31):
            changed = words.clone()
            changed[place] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            assert not torch.equal(checksum(changed), whole)
    if n > 1:
        assert not torch.equal(checksum(words.flip(0)), whole)
    # all was lost, the checksum too
    assert int(checksum(torch.zeros(n, dtype=torch.int32))) != 0


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_checksum_sees_changes_that_could_cancel(in_memory, monkeypatch):
    expected = header._sum(torch.arange(-9, header._BLOCK, dtype=torch.int32))
    if not in_memory:  # torch's operators, as on a device
        monkeypatch.setattr(header, "_in_memory", lambda words: False)
    assert int(checksum(torch.arange(-9, header._BLOCK, dtype=torch.int32))) == expected
    n = 33
    words = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int32)
    pairs = list(itertools.combinations(range(n), 2))
    for change in (-(2**31), 1 << 30, 1):  # two signs of float32, two higher bits, two lower ones
        changed = words.repeat(len(pairs), 1)
        for row, pair in zip(changed, pairs, strict=True):
            row[list(pair)] ^= change
        assert not (checksum(changed) == checksum(words)).any()
    # the same word of two blocks, and what three times as much makes up for
    long = torch.zeros(header._BLOCK + 9, dtype=torch.int32)
    whole = checksum(long)
    for first, second, by in ((0, 0, -1), (1, 0, -1), (0, 0, 3), (3, 3, -(2**31))):
        changed = long.clone()
        changed[first] += abs(by)
        changed[header._BLOCK + second] -= by
        assert not torch.equal(checksum(changed), whole)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3, 2, 0)])
def test_a_checksum_of_nothing_is_that_of_zeros(shape):
    zeros = torch.zeros(*shape[:-1], 7, dtype=torch.int32)
    assert torch.equal(checksum(torch.zeros(shape, dtype=torch.int32)), checksum(zeros))


def test_every_bit_of_a_header_is_checked():
    empty = torch.empty(0, dtype=torch.int32)
    with at_moment(Moment(7, {"ratio": "0.1"})):
        own = Header.now(Kind.FLAGS, flag=3)
        sent = own.words(empty)
    assert read_headers(sent[None], own, 0) == [Header(**{**_fields(own), "body": int(sent[-1])})]
    for word in range(header._CHECKED + 1):
        for bit in range(32):
            changed = sent.numpy().copy()
            changed.view(np.uint32)[word] ^= np.uint32(1 << bit)
            with pytest.raises(ExchangeError, match="the message of rank 0 is damaged: its header"):
                read_headers(torch.from_numpy(changed)[None], own, 0)


def _fields(own):
    return {name: getattr(own, name) for name in Header.__slots__}


def test_another_kind_and_another_version_are_named():
    flags, words = Header(Kind.FLAGS), Header(Kind.WORDS)
    with pytest.raises(InputError, match="different things, flags on rank 0, words on rank 1: all"):
        header.check_kinds([flags, words])
    with pytest.raises(InputError, match="flags on rank 0, something of another version on rank 1"):
        header.check_kinds([flags, Header(-1)])


def test_what_only_some_ranks_have_is_named(monkeypatch):
    monkeypatch.setattr(plain, "all_gather_texts", lambda *_: ["a\t1", "a\t1\nratio\t0.1"])
    headers = [Header(Kind.FLAGS, details=details) for details in (1, 2)]
    with pytest.raises(InputError, match=r"differ in ratio in step 0, nothing on rank 0, 0.1 on"):
        plain.check_moments(headers, None)


@pytest.mark.distributed
def test_words_arrive_without_a_copy_and_too_many_are_refused(one_rank, monkeypatch):
    gather = RaggedAllGather(capacity=9)
    (words,) = gather(torch.arange(7, dtype=torch.int32)).words
    assert words.tolist() == list(range(7))
    assert words.untyped_storage().nbytes() == HEADER_BYTES + 4 * 9  # of the message that came
    # as if a header could say no more than 6: this rank would raise alone, and the others wait for it
    monkeypatch.setattr(ragged, "_MOST", 6)
    with pytest.raises(
        InputError, match="rank 0 has more than 6 words to send at once: keep fewer"
    ):
        gather(torch.arange(7, dtype=torch.int32))
    assert len(gather(torch.arange(6, dtype=torch.int32)).words[0]) == 6


def test_an_update_has_the_dtype_of_its_gradient():
    update = SparseUpdate()
    for dtype in (torch.float32, torch.float64):
        update.begin(torch.zeros(3, dtype=dtype))
        update.add([Selection(torch.tensor([1]), torch.tensor([2.0]))])
        assert update.vector.dtype == dtype
        assert update.vector.tolist() == [0, 2, 0]
