"""Headers and checksums: what is altered is noticed, whatever it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradstats.collectives import header
from gradstats.collectives.header import Header, Kind, Moment, at_moment, checksum, read_headers
from gradstats.errors import ExchangeError, InputError


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
