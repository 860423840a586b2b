"""One-bit systems over real processes: signSGD and its kin, the rings of bits, and Marsit."""

from __future__ import annotations

import contextlib
import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from support.every import every
from workers import signs as cases

from gradstats import backend
from gradstats.collectives.ring import CHECK, pack_bits, split, unpack_bits
from gradstats.compressors.cascading import Cascading
from gradstats.compressors.marsit import Marsit, most_square, transient_merge
from gradstats.compressors.signs import (
    add_signed,
    bernoulli_bits,
    bits_per_element,
    matching_rate,
    packed_signs,
    packed_stochastic_signs,
    signed,
    stochastic_sign_bits,
)
from gradstats.compressors.signsgd import SSDM, EFSignSGD, SignSGD, majority_bits
from gradstats.errors import InputError

WORLDS = [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)]
SIGMAS = 5
"""Tolerance of every test of a probability, in binomial standard deviations; all draws are seeded."""

_run = functools.cache(lambda world: run_ranks(world, cases.everything))


@pytest.fixture(params=WORLDS)
def world(request):
    return request.param


@pytest.fixture
def reports(world):
    return _run(world)


@pytest.fixture(params=cases.FEW)
def few(request):
    """What ranks report that are few enough to run all cases."""
    return _run(request.param)


def deviation(share, expected, repeats):
    """|share − p| in standard deviations; where p is 0 or 1, nothing else may occur."""
    sigma = np.sqrt(expected * (1 - expected) / repeats)
    return np.abs(share - expected) / np.maximum(sigma, 1e-12)


# --- in one process ---------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=70))
def test_packing_bits_and_back(bits):
    tensor = torch.tensor(bits, dtype=torch.bool)
    packed = pack_bits(tensor)
    assert packed.dtype == torch.uint8
    assert packed.numel() == math.ceil(len(bits) / 8)
    assert torch.equal(unpack_bits(packed, len(bits)), tensor)
    # what accelerators run
    with backend("torch"):
        assert torch.equal(pack_bits(tensor), packed)
        assert torch.equal(unpack_bits(packed, len(bits)), tensor)


@given(st.integers(0, 40), st.integers(1, 9))
def test_splitting_into_parts(numel, count):
    parts = split(torch.arange(numel), count)
    assert torch.equal(torch.cat(parts), torch.arange(numel))
    lengths = [p.numel() for p in parts]
    assert len(lengths) == count
    assert max(lengths) - min(lengths) <= 1


@every("voters", range(1, 20))
def test_votes_are_counted_without_unpacking(voters):
    bits = torch.from_numpy(np.random.default_rng(voters).random((voters, 4000)) < 0.5)
    majority, ties = majority_bits([pack_bits(row) for row in bits])
    votes = bits.sum(0)
    assert torch.equal(unpack_bits(majority, 4000), votes > voters // 2)
    assert torch.equal(unpack_bits(ties, 4000), votes == voters // 2)


@every("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@every("n", [0, 1, 8, 9, 1000, 40_001])
def test_packed_bits_become_elements_of_one_size(n, dtype):
    """In the memory of values, too, of which compiled loops read some."""
    rng = np.random.default_rng(n)
    bits, values = torch.from_numpy(rng.random(n) < 0.5), torch.from_numpy(rng.normal(size=n))
    values = values.to(dtype)
    expected = torch.where(bits, 1.0, -1.0).to(dtype) * torch.tensor(0.3, dtype=dtype)
    packed = pack_bits(bits)
    found = signed(packed, n, 0.3, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    strided = torch.stack([values, values], 1)[:, 0]
    for each in (values.clone(), strided):
        assert add_signed(packed, 0.3, each) is each
        assert torch.equal(each, values + expected)


@every("n", [8, 9, 1000])
def test_signs_are_written_into_the_memory_given(n):
    bits = torch.from_numpy(np.random.default_rng(n).random(n) < 0.5)
    packed = pack_bits(bits)
    room = torch.empty(8 * len(packed))
    found = signed(packed, n, 0.3, torch.float32, room)
    assert found.data_ptr() == room.data_ptr()
    assert torch.equal(found, signed(packed, n, 0.3, torch.float32))


@pytest.mark.parametrize("code", [None, "torch"])
def test_marsits_mean_lies_where_that_of_the_last_step_lay(code, one_rank):
    """New memory takes longer than what is written to it; another dtype or size has its own."""
    rule = Marsit(full_every=None)
    with backend(code) if code else contextlib.nullcontext():
        means = [
            rule.reduce(torch.linspace(-1, 1, n, dtype=dtype), None).mean
            for n, dtype in [(1000, torch.float32)] * 3 + [(1000, torch.float64)]
        ]
    assert len({mean.data_ptr() for mean in means[:3]}) == 1
    assert means[3].dtype == torch.float64
    assert means[3].data_ptr() != means[0].data_ptr()


@pytest.mark.parametrize(
    ("local_count", "received_count"), [(1, 1), (1, 2), (1, 7), (3, 5), (4, 4)]
)
def test_where_bits_differ_each_side_wins_by_its_contributions(local_count, received_count):
    n = 80_000
    merge = transient_merge(torch.Generator().manual_seed(1))
    zeros, ones = (torch.full((n // 8,), byte, dtype=torch.uint8) for byte in (0, 255))
    for local, received in ((zeros, ones), (ones, zeros), (zeros, zeros), (ones, ones)):
        merged = unpack_bits(merge(local, local_count, received_count)(received), n)
        expected = (local_count * int(local[0] > 0) + received_count * int(received[0] > 0)) / (
            local_count + received_count
        )
        assert deviation(merged.float().mean().item(), expected, n) < SIGMAS


@pytest.fixture(params=["torch", "triton"])
def device_bits(request):
    """Read as on a device: each code draws bits of its own."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is installed with the extra dev, on Linux")
    with backend(request.param):
        yield request.param


@every(("a", "n"), [(1, 2), (1, 3), (2, 3), (3, 8), (5, 7), (1, 200), (0, 3)])
def test_bits_made_64_at_a_time_have_exactly_their_probability(a, n, device_bits):
    # of Triton seven blocks: its interpreter is slow
    count = 400_000 if device_bits == "triton" else 1_600_000
    drawn = bernoulli_bits(count // 8, a, n, torch.Generator().manual_seed(2))
    # by NumPy: Triton's interpreter takes as long to unpack them as to draw them
    unpacked = np.unpackbits(drawn.numpy(), bitorder="little")
    bits = torch.from_numpy(unpacked).double()
    assert bits.numel() == count
    assert deviation(float(bits.mean()), a / n, count) < SIGMAS
    for apart in (1, 2, 8, 63, 64, 65, 512):  # neighbours in a byte, a word, and over words
        product = float((bits[apart:] * bits[:-apart]).mean())
        assert deviation(product, (a / n) ** 2, count - apart) < SIGMAS
    for place in (0, 7, 31, 63):
        share = float(bits[place::64].mean())
        assert deviation(share, a / n, count // 64) < SIGMAS


def test_bits_follow_from_the_generator(device_bits):
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    first, second = (bernoulli_bits(20_001, 1, 3, one) for _ in range(2))
    assert first.numel() == 20_001
    assert torch.equal(first, bernoulli_bits(20_001, 1, 3, other))
    assert one.get_state().equal(other.get_state()) is False
    assert torch.equal(second, bernoulli_bits(20_001, 1, 3, other))
    assert one.get_state().equal(other.get_state())
    # of two draws, and of two places of one draw, no more bits agree than by chance
    agree = deviation(
        float((first == second).double().mean()), chance_of_equal_bytes(1 / 3), 20_001
    )
    assert agree < SIGMAS


def test_what_ranks_throw_together_is_the_same_for_every_code(device_bits):
    thrown = bernoulli_bits(1000, 1, 2, torch.Generator().manual_seed(4), alike=True)
    with backend("compiled"):
        plain = bernoulli_bits(1000, 1, 2, torch.Generator().manual_seed(4))
    assert torch.equal(thrown, plain)


def chance_of_equal_bytes(p):
    return (p * p + (1 - p) ** 2) ** 8


def test_a_fair_bit_takes_one_random_bit():
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    bernoulli_bits(8 * 1000, 1, 2, one)
    torch.empty(1000, dtype=torch.int64).random_(
        torch.iinfo(torch.int64).min, None, generator=other
    )
    assert torch.equal(one.get_state(), other.get_state())
    assert bernoulli_bits(0, 1, 3, one).numel() == 0
    assert bernoulli_bits(3, 1, 3, one).numel() == 3


def test_stochastic_signs_are_unbiased():
    values, repeats = torch.tensor([0.6, -0.48, 0.64, 0.0]), 40_000
    generator = torch.Generator().manual_seed(1)
    bits = stochastic_sign_bits(values.repeat(repeats), float(values.norm()), generator)
    share = bits.view(repeats, 4).float().mean(0).numpy()
    expected = (0.5 + values / (2 * values.norm())).numpy()
    assert deviation(share, expected, repeats).max() < SIGMAS
    # the whole norm in one element: no choice is left
    assert stochastic_sign_bits(torch.tensor([3.0]), 3.0, generator)
    assert not stochastic_sign_bits(torch.tensor([-3.0]), 3.0, generator)


@every("n", [0, 1, 7, 8, 9, 2047, 2048, 2049, 10_000])
def test_packed_signs_are_the_bits_and_their_sum(n):
    """The compiled loop against torch's operators, coins for zeros included."""
    values = torch.from_numpy(np.random.default_rng(n).laplace(size=n).astype(np.float32))
    values[::5] = 0
    coins = bernoulli_bits(-(-n // 8), 1, 2, torch.Generator().manual_seed(2))
    bits = torch.where(values == 0, unpack_bits(coins, n), values > 0)
    packed, total = packed_signs(values, torch.Generator().manual_seed(2))
    assert torch.equal(unpack_bits(packed, n), bits)
    assert torch.equal(packed, pack_bits(bits))
    assert total == pytest.approx(float(values.double().abs().sum()), rel=1e-12)
    with backend("torch"):
        on_device, again = packed_signs(values, torch.Generator().manual_seed(2))
    assert torch.equal(on_device, packed)
    assert again == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_packed_stochastic_signs_have_the_probability_of_each_element(scale):
    """Few of these coins are replaced, each with its own probability: large elements, and small ones beside them."""
    values = scale * torch.tensor([30.0, -12.0, 1.0, -0.1, 0.0]).repeat(1000)
    values[1000] = -300 * scale  # in the first of three blocks
    norm, repeats = float(values.double().norm()), 2000
    generator, hits = torch.Generator().manual_seed(3), torch.zeros(5000)
    for _ in range(repeats):
        packed, found = packed_stochastic_signs(values, generator)
        hits += unpack_bits(packed, 5000)
    assert found == pytest.approx(norm, rel=1e-6)
    expected = (0.5 + values.double() / (2 * norm)).numpy()
    assert deviation((hits / repeats).numpy(), expected, repeats).max() < SIGMAS
    # together the elements of a kind are many: a bias of a thousandth would show
    kinds = torch.ones(5000, dtype=torch.bool)
    kinds[1000] = False
    for i in range(5):
        mine = kinds & (torch.arange(5000) % 5 == i)
        share = float(hits[mine].sum() / (repeats * mine.sum()))
        assert deviation(share, expected[i], repeats * int(mine.sum())) < SIGMAS


def test_packed_stochastic_signs_at_the_ends():
    generator = torch.Generator().manual_seed(1)
    for value in (3.0, -3.0, 3e38, -1e-40):  # the whole norm in one element: no choice is left
        for _ in range(20):
            packed, _ = packed_stochastic_signs(torch.tensor([value]), generator)
            assert int(packed) & 1 == (value > 0)
    for bad in (torch.nan, torch.inf):  # not for ever, and said in the norm
        packed, norm = packed_stochastic_signs(torch.tensor([1.0, bad, 2.0] * 1000), generator)
        assert not np.isfinite(norm)
    assert packed_stochastic_signs(torch.full((64,), 3e38), generator)[1] == np.inf
    assert np.isnan(packed_signs(torch.tensor([1.0, torch.nan]), generator)[1])
    leaf = torch.ones(9, requires_grad=True)
    assert packed_signs(leaf, generator)[1] == 9
    for _ in range(9):  # no coin is left behind the last element
        assert int(packed_stochastic_signs(leaf, generator)[0][1]) < 2
    packed, norm = packed_stochastic_signs(torch.zeros(8000), generator)
    assert norm == 0
    assert deviation(unpack_bits(packed, 8000).float().mean().item(), 0.5, 8000) < SIGMAS
    assert packed_stochastic_signs(torch.empty(0), generator)[0].numel() == 0


def test_stochastic_signs_of_nothing_leave_it_alone():
    values = torch.zeros(1000)
    bits = stochastic_sign_bits(values, 0.0, torch.Generator().manual_seed(1))
    assert not values.any()
    assert deviation(bits.float().mean().item(), 0.5, 1000) < SIGMAS


def test_the_sign_of_zero_is_a_fair_coin():
    values = torch.tensor([1.0, -1.0, 0.0, -0.0]).repeat(10_000)
    packed, _ = packed_signs(values, torch.Generator().manual_seed(1))
    share = unpack_bits(packed, 40_000).view(-1, 4).float().mean(0).numpy()
    assert deviation(share, np.array([1.0, 0.0, 0.5, 0.5]), 10_000).max() < SIGMAS


def test_matching_rate_counts_elements_that_have_a_sign():
    exact = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0])
    assert matching_rate(torch.tensor([9.0, -9.0, -9.0, -9.0, 9.0]), exact) == 0.75
    assert math.isnan(matching_rate(exact, torch.zeros(5)))


def test_bits_per_element():
    assert bits_per_element(100, 800) == 1
    # Figure 3b: 1.62, 1.31 and 1.16 bits for K = 50, 100 and 200
    for steps, bits in ((50, 1.62), (100, 1.31), (200, 1.16)):
        for world in (2, 8):
            hop = 2 * (world - 1) / world * 8000 / 8
            mean = (32 * hop + (steps - 1) * hop) / steps
            assert bits_per_element(mean, 8000, ring=world) == pytest.approx(bits, abs=0.006)
    assert math.isnan(bits_per_element(0, 0))
    assert math.isnan(bits_per_element(0, 10, ring=1))


def test_the_most_square_torus():
    assert [most_square(n) for n in (1, 2, 7, 8, 12, 16)] == [
        (1, 1),
        (1, 2),
        (1, 7),
        (2, 4),
        (3, 4),
        (4, 4),
    ]


@every(
    "make",
    [
        lambda: Marsit(full_every=0),
        lambda: Marsit(scale=0.0),
        lambda: Marsit(scale=math.nan),
        lambda: Marsit(topology="star"),
        lambda: Marsit(shape=(2, 2)),
        lambda: SignSGD(scale="median"),
        lambda: SignSGD(scale=-1.0),
        lambda: SSDM(seed=-1),
        lambda: EFSignSGD(seed=-1),
        lambda: Cascading(seed=-1),
    ],
)
def test_options_out_of_range(make):
    with pytest.raises(InputError) as error:
        make()
    assert "\n" not in str(error.value)


# --- over processes ---------------------------------------------------------------------------

distributed = pytest.mark.distributed


@distributed
def test_rings_and_tori_merge_every_contribution_once(world, reports):
    for report in reports:
        assert all(report["reductions"]["parity"])
    for shape, numel, counts in reports[0]["reductions"]["counts"]:
        if numel < 8 * world:
            continue  # some parts are empty
        rows, columns = shape or (1, world)
        assert counts == [(1, m) for m in range(1, columns)] + [
            (columns, columns * m) for m in range(1, rows)
        ]


@distributed
def test_one_bit_per_element_and_hop(world, reports):
    for report in reports:
        for numel, sent, _ in report["reductions"]["bits"]:
            # without the checksums, which are as long whatever the message is
            bits = 8 * (sent - min(sent, 2 * CHECK * (world - 1)))
            assert bits <= 2 * numel * (world - 1) / world + 2 * 8 * (world - 1)
            if world > 1 and numel >= 1000:
                assert bits_per_element(bits / 8, numel, ring=world) <= 1.1


@distributed
def test_all_replicas_get_the_same_bits(reports):
    for key, rounds in reports[0]["systems"].items():
        for report in reports[1:]:
            for (_, mean, _), (_, other, _) in zip(rounds, report["systems"][key], strict=True):
                assert mean.tobytes() == other.tobytes(), key


@distributed
def test_marsit_keeps_what_the_group_did_not_apply(reports):
    for report in reports:
        for (name, numel), rounds in report["systems"].items():
            for step, (before, mean, residual) in enumerate(rounds):
                if name == "marsit never" or (name.startswith("marsit") and step == 1):
                    np.testing.assert_allclose(residual + mean, before, rtol=1e-6, atol=1e-6)
                    assert np.unique(np.abs(mean)).size <= 1
                    each = [
                        np.abs(r["systems"][name, numel][step][0]).mean() for r in reports if numel
                    ]
                    size = 0.01 if name == "marsit never" else np.mean(each or [0.0])
                    np.testing.assert_allclose(np.abs(mean), size, rtol=1e-5)
                elif name != "ef-signsgd":
                    assert not residual.any()


@distributed
def test_ef_signsgd_keeps_what_the_rank_did_not_send(reports):
    for size in cases.sizes(len(reports)):
        for step in range(2):
            rounds = [report["systems"]["ef-signsgd", size][step] for report in reports]
            sent = [before - residual for before, _, residual in rounds]
            for (before, mean, _), own in zip(rounds, sent, strict=True):
                np.testing.assert_allclose(mean, np.mean(sent, 0), rtol=1e-5, atol=1e-6)
                signs = np.sign(own) * np.sign(before)
                assert (signs[before != 0] == 1).all()
                if size:
                    np.testing.assert_allclose(
                        np.abs(own), np.abs(before).mean(), rtol=1e-4, atol=1e-6
                    )


@distributed
def test_marsits_expected_bit_is_the_mean_bit(world, reports):
    for topology, share, expected in reports[0]["expectations"]:
        assert share.size == (2**world if world <= 4 else world + 1)
        assert deviation(share, expected, cases.REPEATS).max() < SIGMAS, topology


@distributed
def test_full_precision_rounds_are_the_dense_mean_and_reset_the_compensation(world, reports):
    for report in reports:
        for step, (dense, reset, sent) in enumerate(report["full_rounds"]):
            assert (dense, reset) == ((True, True) if step % 3 == 0 else (False, False))
            checks = 0 if step % 3 == 0 else CHECK * (1 + 2 * (world - 1))  # of the scale, too
            bits = bits_per_element(sent - checks, 1003, ring=world)
            assert world == 1 or bits == pytest.approx(32 if step % 3 == 0 else 1, abs=0.1)


@distributed
def test_signsgd_is_a_majority_vote_with_fair_ties(world, reports):
    for report in reports:
        votes = report["votes"]
        assert votes["majority"]
        assert votes["scale"]
        assert votes["values"] == [-0.5, 0.5]
        assert votes["bits"] < 1.01
        assert deviation(votes["zero"], 0.5, cases.REPEATS) < SIGMAS
        if world % 2 == 0:
            assert deviation(votes["tied"], 0.5, cases.REPEATS) < SIGMAS
        else:  # odd ranks vote +, and are one fewer
            assert votes["tied"] == 0


@distributed
def test_ssdm_is_unbiased(few):
    assert few[0]["unbiased"] < SIGMAS


@distributed
def test_stopping_and_resuming_changes_no_bit(few):
    for report in few:
        assert report["resume"] == dict.fromkeys(cases.SYSTEMS, True)


@distributed
def test_a_bad_gradient_on_one_rank_changes_nothing(few):
    assert all(report["flagged"] for report in few)


@distributed
def test_the_users_generators_are_left_alone(reports):
    assert all(report["generators"] for report in reports)


@distributed
def test_a_torus_that_does_not_fit(world, reports):
    for report in reports:
        assert len(report["misfits"]) == 8
        for message in report["misfits"]:
            assert f"does not fit {world} ranks" in message
            assert "\n" not in message


@distributed
def test_cascading_adds_up_exactly_where_a_part_is_one_element():
    """A sign and a norm, or a mean magnitude, say all of one number."""
    results = run_ranks(3, cases.one_element_each)
    exact = np.mean([own for own, _ in results], axis=0)
    for _, means in results:
        for mean in means:
            np.testing.assert_allclose(mean, exact, rtol=1e-6)


@distributed
@pytest.mark.slow
def test_cascading_deteriorates_with_the_ranks_and_marsit_does_not():
    few, many = (_run(world)[0]["quality"] for world in (2, 8))
    # 2 and 8 ranks: the error of the stochastic form explodes, the deterministic one's direction turns away
    assert many["cascading"]["error"] > 1e3 * few["cascading"]["error"]
    assert many["cascading sign"]["direction"] > 1.15 * few["cascading sign"]["direction"]
    assert many["cascading sign"]["match"] < few["cascading sign"]["match"] - 0.05
    # averaging SSDM's messages instead does get better
    assert many["ssdm"]["error"] < few["ssdm"]["error"]
    # a lone bit drawn from 8 signs matches less often than one drawn from 2, but stays far from a coin
    assert many["marsit"]["match"] > 0.7
    assert many["marsit"]["error"] < 1.5 * few["marsit"]["error"]
