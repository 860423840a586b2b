"""Exchanges: bytes against what real compressors send, seconds against formulas."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from conftest import ROOT
from support.every import every
from support.networks import ALPHA, BETA, CODED, measured_network, reports
from workers import network as cases

from gradstats.collectives import Codec
from gradstats.collectives.header import HEADER_BYTES
from gradstats.compressors import COMPRESSORS, SELECTORS, codecs
from gradstats.compressors.cost import ragged_bytes, selection_words
from gradstats.errors import InputError
from gradstats.network import Network, break_even, exchange, interval
from gradstats.primitives.ratio import target_count

EXACT = ("topk", "exact", "warm-exact", "redsync-trimmed", "lags", "redsync-quantised")
QUANTISED = ("redsync-quantised", cases.LARGE)
SIGNS = ("signsgd", "ef-signsgd", "ssdm", "cascading")
distributed = pytest.mark.distributed
each_world = pytest.mark.parametrize("world", [1, 2, 4, pytest.param(3, marks=pytest.mark.slow)])
each_numel = pytest.mark.parametrize("numel", cases.NUMELS)


def steps(world, name, numel):
    """Return (selected, bytes, unions), each by step and rank."""
    ranks = np.array([report[name, numel] for report in reports(world)])
    return np.moveaxis(ranks, (0, 1, 2), (2, 1, 0))


@distributed
@each_world
@every(
    ("name", "numel"),
    [*itertools.product(["none", *EXACT, *SIGNS, "cltk", "randomk"], cases.NUMELS), QUANTISED],
)
def test_bytes_are_what_the_system_reports(world, numel, name):
    _, sent, _ = steps(world, name, numel)
    predicted = exchange(name, numel, cases.RATIO, world)
    # of all ranks together: a leader's broadcast and uneven parts are on some of them only
    assert sent.sum(axis=1).tolist() == [round(world * predicted.bytes_sent)] * cases.STEPS


@distributed
@each_world
@every(("name", "numel"), [*itertools.product(SELECTORS, cases.NUMELS), QUANTISED])
def test_bytes_follow_from_what_was_selected(world, name, numel):
    selected, sent, unions = steps(world, name, numel)
    k = target_count(cases.RATIO, numel)
    # the systems turn dense where the last step's selections together were larger than the gradient
    sparse = np.append(True, selected.sum(axis=1)[:-1] <= numel) | (name == "micro")
    if name == "micro":
        words, room = 1 + selected, 1 + math.ceil(5 * k / (4 * world))
        assert (unions == selected.sum(axis=1, keepdims=True)).all()
    else:
        values = np.ones_like(selected) if name == "redsync-quantised" else selected
        pairs = zip(selected[sparse].tolist(), values[sparse].tolist(), strict=True)
        words = np.array([list(map(selection_words, c, v, [numel] * world)) for c, v in pairs])
        room = selection_words(k, 1 if name == "redsync-quantised" else k, numel)
    expected = np.full(cases.STEPS, HEADER_BYTES + 4 + 4 * numel)
    expected[sparse] = [sum(lengths) for lengths in ragged_bytes(words.tolist(), room)]
    if name == "micro":
        expected += 4 * unions[:, 0]
        # where no rank's partition reaches η, a message without positions comes before that of the largest magnitude
        empty = sent.max(axis=1) - expected
        assert ((empty == 0) | (unions[:, 0] == 1)).all()
        assert (empty[empty != 0] > HEADER_BYTES).all()
        assert (empty <= HEADER_BYTES + 4 + 4 * room).all()
        expected += empty
    assert sent.tolist() == [[e] * world for e in expected.tolist()]
    if (selected == selected[0]).all() and (sent == sent[0]).all():  # in a steady state
        last = exchange(name, numel, cases.RATIO, world, selected=selected[-1].tolist())
        assert last.bytes_sent == expected[-1]


@distributed
@each_world
@each_numel
@every("topology", ["ring", "torus"])
def test_marsit_moves_as_many_bytes_as_predicted(world, numel, topology):
    _, sent, _ = steps(world, f"one-bit {topology}", numel)
    one = exchange("marsit", numel, world=world, topology=topology, full_every=None)
    assert sent.sum(axis=1).tolist() == [round(world * one.bytes_sent)] * cases.STEPS
    _, sent, _ = steps(world, topology, numel)
    mixed = exchange("marsit", numel, world=world, topology=topology, full_every=4)
    assert sent.sum() == round(4 * world * mixed.bytes_sent)
    # a full round of three elements is less than the checksums of one of bits
    assert numel <= 3 or mixed.bytes_sent >= one.bytes_sent


@distributed
@each_world
@each_numel
def test_bytes_of_half_precision_and_of_selections_too_large_to_be_sparse(world, numel):
    _, sent, _ = steps(world, "half", numel)
    half = exchange("topk", numel, cases.RATIO, world, codec=Codec(values="float16"))
    assert (sent == half.bytes_sent).all()
    _, sent, _ = steps(world, "dense above", numel)
    predicted = exchange("topk", numel, 0.9, world)
    assert (sent[1:] == predicted.bytes_sent).all()  # the first step cannot know
    assert (predicted.bytes_sent == HEADER_BYTES + 4 + 4 * numel) == (world > 1)


@pytest.mark.parametrize("world", [2, 4, 16, 128])
def test_redsync_equations_1_and_2(world):
    numel, ratio, gamma = 1 << 20, 0.001, 3e-9
    k, lg = target_count(ratio, numel), math.log2(world)
    network = Network.of_link(
        ALPHA,
        BETA,
        {"select:redsync-quantised": 1e-9, "unpack": gamma},
        {"all_gather": "recursive doubling", "all_reduce": "rabenseifner"},
    )
    sparse = exchange("redsync-quantised", numel, ratio, world)
    assert sparse.bytes_sent == 4 * (
        k + 11
    )  # k positions, one mean, headers of eight and of two words
    assert sparse.seconds(network) == pytest.approx(
        numel * 1e-9 + lg * ALPHA + (world - 1) * 4 * (k + 11) * BETA + world * k * gamma
    )
    plain = exchange("topk", numel, ratio, world)
    assert plain.bytes_sent == 4 * (2 * k + 10)
    dense = exchange("none", numel, world=world)
    assert dense.seconds(network) == pytest.approx(
        2 * lg * ALPHA + 2 * (world - 1) / world * 4 * numel * BETA
    )


LOCAL = ("pack", "unpack", "unpack_signs", "merge_signs", "average")


@every("world", [2, 3, 8])
@every(
    "name",
    [
        "cltk",
        "randomk",
        "micro",
        "signsgd",
        "cascading",
        "marsit",
        "dense-bf16",
        "dense-fp8",
        "dgc",
    ],
)
def test_seconds_in_closed_form(name, world):
    """Flag or header, collectives over rings, and local work, from the papers' counts of messages."""
    d, k, n, select, local = 10_001, 100, world, 3e-9, 7e-9
    chunks = math.ceil(d / (256 * n))
    costs = dict.fromkeys((*LOCAL, "encode:float8_e4m3fn", "decode:float8_e4m3fn"), local)
    costs |= {f"decode:{name}": local, f"select:{name}": select}
    network = Network.of_link(ALPHA, BETA, costs)

    def gather(size):
        return (n - 1) * (ALPHA + size * BETA)

    def reduce(size):
        return 2 * (n - 1) * (ALPHA + size / n * BETA)

    def hops(count, size):
        return count * (ALPHA + size * BETA)

    broadcast, flag = math.ceil(math.log2(n)) * (ALPHA + 4 * (2 + k) * BETA), gather(32)
    # a scale before them, and a checksum behind
    part, packed = 4 + math.ceil(math.ceil(d / n) / 8) + 4, math.ceil(d / 8)
    share = math.ceil(k / n)  # the largest of the partition's
    room = 1 + math.ceil(5 * k / (4 * n))
    expected = {
        # the leader's positions, then the values; nobody packs
        "cltk": d * select + flag + broadcast + reduce(4 * k) + k * local,
        "randomk": d * select + flag + reduce(4 * k) + k * local,
        # positions of a rank's own partition, in an all-gather with a quarter of room; values of all
        "micro": d / n * select + share * local + gather(4 * (8 + room)) + reduce(4 * k) + k * local,
        "signsgd": d * select + flag + gather(4 * (1 + math.ceil(packed / 4) + 1)) + d * local,
        # every rank compresses a part n times, and decodes n − 1 on the way, and all n parts in the end
        "cascading": d * select + flag + hops(2 * (n - 1), part) + (2 * n - 1) * d / n * local,
        # the scale, one bit per element there and back, and merging at every hop of the first round
        "marsit": d * select + flag + gather(12) + hops(2 * (n - 1), math.ceil(packed / n) + 4)
        + 8 * math.ceil(packed / n) * (n - 1) * local + d * local,
        "dense-bf16": d * select + flag + reduce(2 * d) + d * local,
        # two rounds of a part each: a byte an element, and four for every 256
        "dense-fp8": d * select + flag + 2 * gather(chunks * 260 + 4) + (n + 2) * 256 * chunks * local,
        "dgc": d * select + k * local + gather(4 * (8 + 2 + 2 * k)) + n * k * local,
    }  # fmt: skip
    one = exchange(name, d, k / d, world, full_every=None)
    assert one.seconds(network) == pytest.approx(expected[name], rel=1e-9)


@every("world", [2, 8])
@every("name", ["topk", "cltk", "micro", "redsync-quantised", "randomk", "lags"])
def test_a_codec_costs_its_steps_and_saves_its_bytes(name, world):
    """Coding takes time by element of each message, and only what a compressor sends is coded."""
    d, ratio, encode, decode = 1_000_000, 0.01, 3e-9, 5e-9
    k = target_count(ratio, d)
    costs = {f"encode:{c}": encode for c in CODED} | {f"decode:{c}": decode for c in CODED}
    network = Network.of_link(ALPHA, BETA, costs)
    codec = Codec("rice", "int8").only(codecs(name))
    plain, coded = (exchange(name, d, ratio, world, codec=c) for c in (Codec(), codec))
    rice, integers = "indices" in codecs(name), "values" in codecs(name)
    messages, own = (1, -(-k // world)) if name == "micro" else (world, k)
    messages = 1 if name == "cltk" else messages
    steps = (rice + integers) * (own * encode + messages * k * decode)
    assert coded.split(network)["pack"] + coded.split(network)["unpack"] == pytest.approx(steps)
    if rice:
        assert coded.bytes_sent < plain.bytes_sent
        # 8.55 bits a position instead of 32 (8.23 with a quarter more of them), and a byte a value; CLT-k's positions
        # are broadcast by one rank in turn
        share = {"cltk": 1 / world, "micro": 1.25 / world}.get(name, 1)
        bits = 8.23 if name == "micro" else 8.55
        saved = k * ((32 - bits) / 8 * share + (3 - 4 / 256) * integers)
        assert plain.bytes_sent - coded.bytes_sent == pytest.approx(saved, rel=0.01)


def test_indices_are_wide_only_where_they_must_be():
    narrow, wide = (exchange("topk", n, 1000 / n, 4) for n in (2**31 - 1, 2**31))
    assert wide.bytes_sent - narrow.bytes_sent == 4 * 1000
    assert (
        exchange("cltk", 2**31, 1e-6, 4).bytes_sent
        > exchange("cltk", 2**31 - 1, 1e-6, 4).bytes_sent
    )


def test_a_torus_has_fewer_hops_than_a_ring():
    network = Network.of_link(ALPHA, 0)
    ring, torus = (
        exchange("marsit", 10**6, world=16, topology=t, full_every=None) for t in ("ring", "torus")
    )
    flags = 2 * 15 * ALPHA  # and the scale
    assert ring.seconds(network) == pytest.approx(30 * ALPHA + flags)
    assert torus.seconds(network) == pytest.approx(12 * ALPHA + flags)
    # checksums of fewer messages
    assert ring.bytes_sent - torus.bytes_sent == 4 * (30 - 12)


def test_a_message_larger_than_its_room_takes_two_then_one():
    assert ragged_bytes([[10, 4], [10, 4], [3, 3], [3, 3]], 8) == [[64, 8], [80], [80], [44]]


@every("name", COMPRESSORS)
def test_every_system_has_a_time_with_an_interval(name):
    network = measured_network()
    one = exchange(name, 270_000, 0.001, 8)
    value, low, high = interval(network, one.seconds)
    assert 0 < low < value < high < 2 * value
    split = one.split(network)
    assert sum(split.values()) == pytest.approx(value)
    assert all(seconds >= 0 for seconds in split.values())


def test_break_even_is_where_both_take_as_long():
    numel, world, select = 10**7, 8, 5e-9
    network = Network.of_link(ALPHA, BETA, {"select:topk": select})
    dense, sparse = exchange("none", numel, world=world), exchange("topk", numel, 0.001, world)

    def gain(n):
        return dense.seconds(n) - sparse.seconds(n)

    # 2(n-1)(α + 4d/n β) = (n-1)(α + m β) + γ d
    beta = (numel * select - 7 * ALPHA) / (7 / 4 * 4 * numel - 7 * sparse.bytes_sent)
    assert break_even(network, gain) == pytest.approx(8 / beta, rel=1e-6)
    assert gain(Network.of_link(ALPHA, 1.01 * beta, {"select:topk": select})) > 0
    assert gain(Network.of_link(ALPHA, 0.99 * beta, {"select:topk": select})) < 0
    assert break_even(network, lambda n: 1.0) == math.inf
    assert break_even(network, lambda n: -1.0) == 0


def test_the_example_of_the_documentation_runs(capsys):
    page = (ROOT / "docs" / "concepts" / "cost.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    assert "'communicate'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exchange("zip", 10), "no compressor 'zip'"),
        (lambda: exchange("randomk", 10, codec=Codec("rice")), "randomk sends no positions"),
        (lambda: exchange("topk", 10, world=0), "needs ranks"),
        (lambda: exchange("topk", 10, 2.0), "ratio must be"),
        (lambda: exchange("topk", 10, world=3, selected=[1, 2]), "has 2 ranks, not 3"),
        (lambda: exchange("marsit", 10, world=4, topology="torus", shape=(1, 3)), "torus of 1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
