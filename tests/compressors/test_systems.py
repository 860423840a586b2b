"""MiCRO, CLT-k, random-k and RedSync in real processes, against naive dense references."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from ranks import run_ranks
from support.every import every
from torch.utils._pytree import tree_map
from workers import systems as cases

from gradstats import thresholds as rules
from gradstats.collectives.codec import INDICES, Codec
from gradstats.collectives.header import HEADER_BYTES
from gradstats.compressors import COMPRESSORS, make_compressor
from gradstats.compressors.cltk import CLTk
from gradstats.compressors.micro import MiCRO, partition
from gradstats.compressors.randomk import RandomK
from gradstats.compressors.redsync import MeanOfSign, RedSync
from gradstats.compressors.selectors import TopK
from gradstats.compressors.shared import GlobalHistogram
from gradstats.compressors.sparse import SparseCompressor
from gradstats.errors import ExchangeError, InputError
from gradstats.hooks.checkpoint import pack_state, unpack_state

WORLDS = [1, 2, 3, pytest.param(8, marks=pytest.mark.slow)]
few_worlds = pytest.mark.parametrize("world", [1, 2, 3])
each_world = pytest.mark.parametrize("world", WORLDS)
each_system = every("name", list(cases.SYSTEMS))


@functools.cache
def reports(world):
    return run_ranks(world, cases.battery)


def steps(world, name, *kinds):
    """Yield (kind of gradient, step, the ranks' records); all kinds if none is named."""
    for kind in kinds or cases.kinds(world, name):
        ranks = [report["records"][name, kind] for report in reports(world)]
        for step, records in enumerate(zip(*ranks, strict=True)):
            yield kind, step, records


def column(records, what):
    return np.array([r[what] for r in records])


@pytest.mark.distributed
@each_world
@each_system
def test_nothing_is_lost_and_replicas_are_identical(world, name):
    for kind, _, records in steps(world, name):
        numel = cases.KINDS[kind]
        mean = records[0]["mean"]
        assert all(np.array_equal(r["mean"], mean) for r in records)
        assert len({r["union"] for r in records}) == 1
        assert records[0]["flags"] == [0] * world
        corrected, residual = column(records, "corrected"), column(records, "residual")
        assert mean.shape == (numel,)
        assert np.isfinite(mean).all()
        if name == "randomk-unbiased":
            k = max(1, round(cases.RATIO * numel))
            mean = mean * (k / numel)
        total = corrected.astype(float).sum(0)
        back = world * mean.astype(float) + residual.astype(float).sum(0)
        scale = np.abs(corrected).sum(0).max(initial=1e-30)
        np.testing.assert_allclose(back, total, atol=1e-6 * scale)
        assert all(min(r["seconds"]) >= 0 for r in records)


@pytest.mark.distributed
@each_world
@every("name", ["micro", "micro-paper"])
def test_micro_is_its_algorithm_on_dense_vectors(world, name):
    for _, t, records in steps(world, name):
        corrected, residual = column(records, "corrected"), column(records, "residual")
        numel = corrected.shape[1]
        thresholds = column(records, "threshold")
        assert np.array_equal(thresholds, np.full(world, thresholds[0]), equal_nan=True)
        expected, chosen = [], 0
        for i, acc in enumerate(corrected):
            cycle = (t + i) % world
            own = [
                j
                for j in range(numel)
                if cycle * numel // world <= j < (cycle + 1) * numel // world
            ]
            mine = [j for j in own if acc[j] != 0 and abs(acc[j]) >= np.float32(thresholds[i])]
            assert records[i]["selected"] == len(mine)
            chosen += len(mine)
            expected += mine
        union = sorted(expected)
        assert len(set(union)) == len(union)
        for r in records:
            assert sorted(r["sent"].tolist()) == union
            assert r["union"] == chosen
        mean = np.zeros(numel)
        mean[union] = corrected[:, union].astype(float).sum(0) / world
        np.testing.assert_allclose(records[0]["mean"], mean, atol=1e-5)
        left = corrected.copy()
        left[:, union] = 0
        assert np.array_equal(residual, left)


@pytest.mark.distributed
@each_world
@every("bits", [4, 10])
def test_all_ranks_use_the_threshold_of_all_their_magnitudes(world, bits):
    for step in zip(*(r["one threshold"][bits] for r in reports(world)), strict=True):
        thresholds = {threshold for _, threshold, *_ in step}
        assert len(thresholds) == 1
        magnitudes = np.abs(np.concatenate([x for x, *_ in step]))
        k = 500 * world
        exact = np.sort(magnitudes)[-k]
        # within a bin, whose density is taken as linear
        assert thresholds.pop() == pytest.approx(exact, rel=2.0**-bits / 4 + 1 / k)
        selected = [count for *_, count, _ in step]
        assert sum(selected) == pytest.approx(k, rel=0.15 if bits == 4 else 0.01)
        assert selected == sorted(selected)  # the larger a rank's gradient, the more it sends
        # 8 bytes a position with its value, and 8 a bin
        assert all(size < 8 * 1.6 * max(selected) + 8 * 2000 for *_, size in step)


def test_partitions_are_disjoint_and_cover():
    for numel in (0, 1, 2, 7, 8, 1000, 2**33 + 1):
        for parts in (1, 2, 3, 8, 11):
            slices = [partition(numel, parts, i) for i in range(parts)]
            assert slices[0].start == 0
            assert slices[-1].stop == numel
            assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
            lengths = [s.stop - s.start for s in slices]
            assert max(lengths) - min(lengths) <= 1


@pytest.mark.distributed
@each_world
def test_micro_shows_every_element_to_every_worker_once_in_n_steps(world):
    for count in reports(world)[0]["visited"]:
        assert (count == 1).all()


@functools.cache
def counts_of_one_rule(world, start, feedback):
    """Return what MiCRO keeps over k in each step, by its rule on the ranks' parts behind each other."""
    numel, steer, kept = 100_000, rules.MiCRO("corrected", start), []
    left = [np.zeros(numel, np.float32) for _ in range(world)]
    for step in range(30):
        corrected = [
            cases.gradient("laplace", numel, r, step).numpy() + left[r] for r in range(world)
        ]
        places = [partition(numel, world, (step + r) % world) for r in range(world)]
        parts = [x[place] for x, place in zip(corrected, places, strict=True)]
        estimate, chosen = steer.select(np.abs(np.concatenate(parts)), cases.RATIO)
        kept.append(len(chosen) / (cases.RATIO * numel))
        sent = np.concatenate([np.arange(place.start, place.stop) for place in places])
        sent = sent[np.abs(np.concatenate(parts)) >= estimate.threshold]
        for x in corrected:  # what one rank chooses, all send
            x[sent] = 0
        if feedback:
            left = corrected
    return kept


@pytest.mark.distributed
@each_world
def test_micro_reaches_its_count_in_twenty_steps(world):
    for start, feedback in cases.starts(world):
        ranks = [report["converge"][start, feedback] for report in reports(world)]
        for relative, thresholds in ranks:
            assert thresholds == ranks[0][1]  # the same η, to the bit
            # step by step that of one rule on all elements; accumulators grow for 1/ratio steps
            assert relative == pytest.approx(counts_of_one_rule(world, start, feedback), rel=1e-3)
            late = np.array(relative[20:])
            if not feedback:
                assert np.abs(late - 1).max() < 0.1
            if start is None:
                assert abs(relative[0] - 1) < 1e-6  # the exact k-th largest


@pytest.mark.distributed
@few_worlds
def test_micro_sends_the_largest_where_nothing_reaches_its_threshold(world):
    for rule in ("corrected", "paper"):
        steer = rules.MiCRO(rule, 1e3)
        for step, records in enumerate(
            zip(*(r["beyond"][rule] for r in reports(world)), strict=True)
        ):
            parts = [
                r["corrected"][partition(997, world, (step + rank) % world)]
                for rank, r in enumerate(records)
            ]
            magnitudes = np.abs(np.concatenate(parts))
            estimate, chosen = steer.select(magnitudes, cases.RATIO)
            assert {r["threshold"] for r in records} == {estimate.threshold}
            assert {r["union"] for r in records} == {len(chosen)}
            assert "beyond" in estimate.details or step
            assert len(chosen) == (rule == "corrected") or step
            assert sum(r["selected"] for r in records) == len(chosen)


@pytest.mark.distributed
def test_micro_sends_the_largest_of_float64_too(one_rank):
    for seed in range(4):  # its float32 is larger in half of all cases
        corrected = torch.randn(
            997, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        largest = int(corrected.abs().argmax())
        reduced = MiCRO(0.01, threshold=1e3).reduce(corrected, None)
        assert (reduced.selected, reduced.union, reduced.sent.tolist()) == (1, 1, [largest])


@pytest.mark.distributed
def test_a_failed_exchange_leaves_the_selector_as_it_was(one_rank):
    compressor = SparseCompressor(MeanOfSign(TopK(0.1)))

    def fails(*rest):
        raise ExchangeError("lost")

    compressor._gather.words, words = fails, compressor._gather.words
    with pytest.raises(ExchangeError, match="lost"):
        compressor.reduce(torch.randn(100), None)
    compressor._gather.words = words
    assert compressor.selector.state_dict()["step"] == 0


@pytest.mark.distributed
def test_a_dense_union_is_no_smaller_than_a_selection(one_rank):
    compressor = SparseCompressor(TopK(0.5), Codec(values="int2"), dense_above=0.1)
    for seed in range(2):  # the second one densely
        reduced = compressor.reduce(torch.randn(1000), None)
        assert reduced.union == reduced.selected == 500, seed
    assert int(reduced.mean.count_nonzero()) < 500


@pytest.mark.distributed
def test_whether_the_sum_is_dense_follows_the_last_step_and_comes_back(one_rank):
    dense, sparse = torch.ones(1000), torch.zeros(1000)
    sparse[3] = 1.0
    compressor = SparseCompressor(TopK(0.5), dense_above=0.1)
    compressor.reduce(dense.clone(), None)
    resumed = SparseCompressor(TopK(0.5), dense_above=0.1)
    resumed.load_state_dict(compressor.state_dict())
    for each in (compressor, resumed):
        # all values without positions; the last step follows one of a single element
        sizes = [each.reduce(x.clone(), None).bytes_sent for x in (dense, sparse, sparse, sparse)]
        assert 4000 <= sizes[0] == sizes[1] < 4100
        assert sizes[2] > 8000  # the room of the first step's positions
        assert sizes[3] < 100


@pytest.mark.distributed
@pytest.mark.slow
def test_topk_builds_up_with_the_ranks_and_micro_does_not():
    built = {}
    for world in (1, 2, 4, 8):
        # of four ranks nothing else is asked
        sizes = (
            run_ranks(4, cases.all_sizes) if world == 4 else [r["sizes"] for r in reports(world)]
        )
        built[world] = [np.mean(sizes[0][name][0]) / 200 for name in ("topk", "micro")]
    topk = [built[w][0] for w in built]
    assert topk[0] == pytest.approx(1, abs=0.01)
    assert all(b > 1.7 * a for a, b in itertools.pairwise(topk))
    assert topk[-1] > 7
    assert all(0.7 < b[1] < 1.3 for b in built.values())


@pytest.mark.distributed
@each_world
def test_cltk_takes_the_leaders_positions(world):
    for _, t, records in steps(world, "cltk"):
        corrected, residual = column(records, "corrected"), column(records, "residual")
        numel = corrected.shape[1]
        k = max(1, round(cases.RATIO * numel))
        leading = np.abs(corrected[t % world])
        order = np.argsort(-leading, kind="stable")[:k]
        union = np.sort(order[leading[order] > 0])
        for r in records:
            assert np.array_equal(r["sent"], union)
            assert r["selected"] == r["union"] == union.size
        mean = np.zeros(numel)
        mean[union] = corrected[:, union].astype(float).sum(0) / world
        np.testing.assert_allclose(records[0]["mean"], mean, atol=1e-5)
        left = corrected.copy()
        left[:, union] = 0
        assert np.array_equal(residual, left)
        sizes = column(records, "bytes")
        assert (np.delete(sizes, t % world) == 4 * union.size).all()
        assert sizes[t % world] == 4 * union.size + 4 * (2 + k)


@pytest.mark.distributed
def test_cltk_takes_the_first_of_those_tied_whatever_positions_are_on_the_wire(one_rank):
    for indices in INDICES:
        corrected = torch.tensor([1.0, -1.0, 3.0, 1.0, 2.0, 1.0])
        reduced = CLTk(0.5, Codec(indices)).reduce(corrected, None)
        assert reduced.sent.tolist() == [0, 2, 4], indices
        assert reduced.mean.tolist() == [1, 0, 3, 0, 2, 0], indices
        assert reduced.residual.tolist() == [0, -1, 0, 1, 0, 1], indices


@pytest.mark.distributed
@each_world
def test_randomk_sends_the_same_positions_and_conserves_to_the_bit(world):
    seen = []
    for _, _, records in steps(world, "randomk", "laplace"):
        sent = records[0]["sent"]
        seen.append(tuple(sent))
        assert sent.size == len(set(sent)) == 20
        for r in records:
            assert np.array_equal(r["sent"], sent)
            assert r["bytes"] == 4 * 20  # and none of the flags, which are alone
            kept = np.zeros_like(r["corrected"])
            kept[sent] = r["corrected"][sent]
            assert np.array_equal(kept + r["residual"], r["corrected"])
        mean = np.zeros(997)
        mean[sent] = column(records, "corrected")[:, sent].astype(float).mean(0)
        np.testing.assert_allclose(records[0]["mean"], mean, atol=1e-5)
    assert len(set(seen)) == cases.STEPS


@pytest.mark.distributed
def test_unbiased_randomk_has_the_dense_mean_as_its_expectation():
    ranks = [report["unbiased"] for report in reports(2)]
    dense = np.mean([x.astype(float) for x, _, _ in ranks], axis=0)
    _, mean, count = ranks[0]
    # a position is d/k times its value with probability k/d = 1/8, else zero
    error = np.abs(dense) * np.sqrt((8 - 1) / count)
    assert (np.abs(mean - dense) < 4 * error).all()
    assert np.mean(((mean - dense) / error) ** 2) == pytest.approx(1, abs=0.5)


@pytest.mark.distributed
@each_world
@every("name", ["redsync-quant", "redsync-quant-search"])
def test_quantised_redsync_sends_one_sign_and_its_mean(world, name):
    for kind, t, records in steps(world, name):
        sign = 1 if t % 2 == 0 else -1
        numel = records[0]["mean"].size
        k = max(1, round(cases.RATIO * numel))
        total, touched = np.zeros(numel), np.zeros(numel, bool)
        for r in records:
            signed, sent = sign * r["corrected"], r["sent"]
            rest = np.delete(signed, sent)
            assert (signed[sent] > 0).all()
            assert sent.size >= min(k, np.count_nonzero(signed > 0))
            if kind != "constant":  # ties are all kept
                assert sent.size <= (k if name == "redsync-quant" else 2 * k)
            if not sent.size:
                assert np.array_equal(r["residual"], r["corrected"])
                continue
            assert rest.max(initial=-np.inf) < signed[sent].min()
            number = np.float32(r["corrected"][sent].astype(float).mean())
            total[sent] += number
            touched[sent] = True
            left = r["corrected"].copy()
            left[sent] -= number
            np.testing.assert_array_equal(r["residual"], left)
        np.testing.assert_allclose(records[0]["mean"], total / world, atol=1e-6)
        assert records[0]["union"] == touched.sum()
        assert (sign * records[0]["mean"] >= 0).all()


@pytest.mark.distributed
@each_world
def test_quantisation_halves_the_bytes(world):
    sizes = reports(world)[0]["sizes"]
    # headers take as much of both
    plain, quantised = (
        sum(each - HEADER_BYTES for each in sizes[name][1]) for name in ("redsync", "redsync-quant")
    )
    assert quantised / plain == pytest.approx(0.5, abs=0.01)


@pytest.mark.distributed
@each_world
def test_redsync_fits_the_selection_to_the_size(world):
    for _, _, records in steps(world, "redsync", "laplace"):
        assert all(r["selected"] == 20 for r in records)
    thresholds = []
    for _, t, records in steps(world, "redsync-search", "laplace"):
        if t % 5 == 0:
            assert all(20 <= r["selected"] <= 40 for r in records)
        else:  # reused
            assert [r["threshold"] for r in records] == thresholds
        thresholds = [r["threshold"] for r in records]
    for _, _, records in steps(world, "redsync-dense", "laplace"):
        for r in records:
            assert r["sent"] is None
            assert not r["residual"].any()
            assert r["selected"] == RedSync(cases.RATIO).target(r["selected"])
            np.testing.assert_allclose(r["mean"], column(records, "corrected").mean(0), atol=1e-6)


@pytest.mark.distributed
@each_world
@each_system
def test_nothing_to_send_is_nothing_sent(world, name):
    for _, _, records in steps(world, name, "zeros"):
        for r in records:
            assert not r["mean"].any()
            assert not r["residual"].any()
            if not name.startswith("randomk") and name != "redsync-dense":
                assert r["selected"] == r["union"] == r["sent"].size == 0


@pytest.mark.distributed
@few_worlds
@each_system
def test_resuming_changes_no_bit(world, name):
    assert [report["resumed"][name] for report in reports(world)] == [
        [True] * (2 if world < 3 else 1)
    ] * world


@pytest.mark.distributed
@few_worlds
@each_system
def test_a_refused_step_is_refused_by_all_and_leaves_no_trace(world, name):
    for report in reports(world):
        for record, unchanged in report["refused"][name]:
            assert record["flags"] == [0] * (world - 1) + [cases.FLAG]
            assert record["mean"] is None
            assert record["untouched"]
            # SparseCompressor's compressor has seen the refused gradient, and its gather the empty message
            assert unchanged or name in ("redsync", "redsync-search")


@pytest.mark.distributed
@each_world
def test_nobodys_random_state_is_touched(world):
    assert all(report["random state untouched"] for report in reports(world))


def test_options_are_checked_before_the_first_step():
    for make in (MiCRO, CLTk, RandomK, RedSync):
        with pytest.raises(InputError, match="ratio"):
            make(0)
    with pytest.raises(InputError, match="rule"):
        MiCRO(0.1, "other")
    with pytest.raises(InputError, match="rule"):
        RedSync(0.1, rule="other")
    with pytest.raises(InputError, match="seed"):
        RandomK(0.1, seed=-1)
    with pytest.raises(InputError, match="dense_below"):
        RedSync(0.1, dense_below=2, search_above=1)
    assert torch.equal(RandomK(0.5, seed=1)._draw(9, 4), RandomK(0.5, seed=1)._draw(9, 4))
    assert not torch.equal(RandomK(0.5, seed=1)._draw(99, 9), RandomK(0.5, seed=2)._draw(99, 9))


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 1.0])
def test_a_common_threshold_of_few_elements_keeps_k(one_rank, ratio):
    """Every element has a bin to itself, so that the bins of the k largest hold k and no more."""
    x = torch.from_numpy(2.0 ** np.arange(-50, 50)).float()
    reduced = GlobalHistogram(ratio).reduce(x.clone(), None)
    assert reduced.selected == round(ratio * x.numel())
    assert torch.equal(reduced.residual, torch.where(x > 2.0 ** (49 - 100 * ratio), 0, x))


@pytest.mark.parametrize("name", [*(n for n in COMPRESSORS if n != "none"), "global histogram"])
def test_what_was_loaded_is_saved_again_as_it_was(one_rank, name):
    """Capacities of messages, too: after a restart all ranks make the room that they had."""

    def made():
        if name == "global histogram":
            return GlobalHistogram(0.05)
        return make_compressor(name, 0.05)

    one, again = made(), made()
    for seed in range(3):
        one.reduce(torch.randn(3000, generator=torch.Generator().manual_seed(seed)), None)
    saved = unpack_state(pack_state(one.state_dict()), "compressor")
    again.load_state_dict(saved)
    first = readable(again.state_dict())
    assert first == readable(saved)
    # nor does it depend on what the one that loads it has done before
    for _ in range(2):
        again.reduce(100 * torch.ones(3000), None)
    again.load_state_dict(saved)
    assert readable(again.state_dict()) == first


def readable(state):
    """Return a state whose tensors are lists, which == compares."""
    return tree_map(lambda x: x.tolist() if isinstance(x, torch.Tensor) else x, state)
