"""Sums over several vectors: against NumPy on whole arrays."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from gradstats.errors import InputError
from gradstats.primitives.arrays import CHUNK
from gradstats.primitives.pairs import gram, pair, sign_pairs

RNG = np.random.default_rng(5)
SIZE = 2 * CHUNK + 17


def sparse(seed):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(SIZE) * (rng.random(SIZE) < 0.5)).astype(np.float32)


def test_gram_is_the_matrix_of_products():
    x = [sparse(0), sparse(1).astype(np.float64) * 1e3, sparse(2)]
    expected = np.array(x, np.float64) @ np.array(x, np.float64).T
    np.testing.assert_allclose(gram(x), expected, rtol=1e-12)
    x[1][7], x[2][-1] = np.nan, np.inf
    kept = np.delete(np.array(x, np.float64), [7, SIZE - 1], axis=1)
    np.testing.assert_allclose(gram(x), kept @ kept.T, rtol=1e-12)


def test_squares_that_vanish_are_refused():
    x = sparse(0).astype(np.float64)
    for scale in (1e-160, 1e-200):
        with pytest.raises(InputError, match="leave the range of numbers"):
            gram([x, x * scale])
    assert gram([x, 0 * x])[1].tolist() == [0, 0]
    assert gram([x * 1e-130])[0, 0] == pytest.approx(x @ x * 1e-260, rel=1e-12)
    # of float32 none do
    tiny = np.full(3, 1e-45, np.float32)
    assert gram([tiny])[0, 0] == 3 * np.float64(tiny[0]) ** 2


def test_counts_of_a_pair():
    a, b = sparse(3), sparse(4)
    b[:5000] = a[:5000]
    b[11], a[12] = np.nan, np.inf
    found = pair(a, b)
    assert found.same == np.count_nonzero(a == b)
    assert found.agree == np.count_nonzero((a > 0) & (b > 0)) + np.count_nonzero((a < 0) & (b < 0))
    assert found.either == np.count_nonzero((a != 0) | (b != 0))
    assert found.shared == np.count_nonzero((a == b) & (a != 0))
    assert found.nonzero == (np.count_nonzero(a), np.count_nonzero(b))
    assert found.nonfinite == (1, 1)
    assert pair(a[:1000], b[:1000]) + pair(a[1000:], b[1000:]) == found


def test_strided_vectors_lie_beside_their_copies():
    whole = np.random.default_rng(0).standard_normal((1000, 301)).astype(np.float32)
    strided, turned = whole[:, :299], torch.from_numpy(whole[:, :299].T.copy()).bfloat16().T
    for x, copy in ((strided, strided.copy()), (turned, turned.contiguous())):
        assert pair(x, copy).same == x.shape[0] * x.shape[1] == 299_000
        assert sign_pairs([x, copy]) == (299_000, 299_000)
        products = gram([x, copy])
        assert (products == products[0, 0]).all()


def test_types_of_two_widths_are_compared_as_float32():
    narrow, wide = np.float32([np.nan, 0, 1, 0.1, 2]), np.array([np.nan, 1e-60, 1, 0.1, 3])
    for found in (pair(narrow, wide), pair(wide, narrow)):
        assert (found.same, found.shared) == (4, 3)


def test_types_that_hold_every_element():
    x = torch.randn(1000)
    for dtype, place in ((torch.bfloat16, 0), (torch.float16, 1)):
        short = x.to(dtype)
        fine = pair(x, short).fine
        assert fine[0][place] == int((short.float() != x).sum()) > 900
        assert fine[1][place] == 0
        assert fine[1][1 - place] >= 0


def test_fingerprints_tell_other_values_and_not_other_places():
    a = sparse(6)
    shuffled = RNG.permutation(a)
    one, other = pair(a, shuffled).prints
    assert one == other
    assert Counter(a.tolist()) == Counter(shuffled.tolist())
    changed = a.copy()
    i = int(np.flatnonzero(a)[0])
    changed[i] = np.nextafter(a[i], np.float32(9))
    assert len(set(pair(a, changed).prints)) == 2
    assert len(set(pair(a, -a).prints)) == 2
    assert len(set(pair(np.append(a, np.float32(0)), np.append(np.float32(0), a)).prints)) == 1


@pytest.mark.parametrize("count", [2, 3, 5])
def test_signs_agree_as_pair_by_pair(count):
    rng = np.random.default_rng(count)
    vectors = [rng.integers(-1, 2, 300_000).astype(np.float32) for _ in range(count)]
    agree = either = 0
    for a, b in itertools.combinations(vectors, 2):
        agree += int(((a * b) > 0).sum())
        either += int(((a != 0) | (b != 0)).sum())
    assert sign_pairs(vectors) == (agree, either)
