"""Local steps in the plan: against steps taken one by one, closed forms, a public measurement, and the terminal."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import utilisation
from conftest import ROOT
from pages import block
from support.every import every
from support.networks import measured_network
from support.terminal import main
from utilisation import PAGE

from gradstats.collectives import Codec
from gradstats.collectives.codec import PLAIN
from gradstats.collectives.header import HEADER_BYTES
from gradstats.errors import InputError
from gradstats.network import TARGETS, Network, advice, local_advice, local_interval, plan
from gradstats.network.prediction import LATE, Draws
from gradstats.network.question import ask
from gradstats.plots import speedup
from gradstats.primitives.ratio import target_count
from gradstats.trace import open_trace

D, COMPUTE = 100_000, 0.02
ALPHA, BETA, SELECT, MEMORY, UNPACK = 5e-5, 8e-9, 1e-9, 2e-9, 3e-9
ZEROS = np.zeros(D, np.float32)
RATE = 10**9  # 8 / BETA
LOCAL = {"select:topk": SELECT, "memory": MEMORY, "unpack": UNPACK}
LINK = Network.of_link(ALPHA, BETA, LOCAL)


def one_by_one(compute, exchange, steps, fragments, delay, intervals=40):
    """Walk through the loop of LocalSteps, step by step, and return the mean of the later intervals."""
    offsets = [(i + 1) * steps // fragments for i in range(fragments)]
    due, done = [None] * fragments, [0.0] * fragments
    now = thread = 0.0
    ends = []
    for step in range(1, intervals * steps + 1):
        now += compute
        for i in range(fragments):
            if due[i] is not None and step >= due[i]:
                now, due[i] = max(now, done[i]), None
            if (step - offsets[i]) % steps == 0:
                thread = done[i] = max(now, thread) + exchange
                due[i] = step + delay
                if not delay:
                    now, due[i] = done[i], None
        if step % steps == 0:
            ends.append(now)
    half = intervals // 2
    return (ends[-1] - ends[half - 1]) / (intervals - half)


@every("seed", range(20))
def test_an_interval_takes_as_long_as_its_steps_one_by_one(seed):
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(1, 40))
    fragments, delay = int(rng.integers(1, min(steps, 6) + 1)), int(rng.integers(0, steps))
    for exchange in (0.0, *rng.uniform(0, 2 * steps / fragments, 3)):
        walked = one_by_one(1.0, exchange, steps, fragments, delay)
        found = local_interval(1.0, exchange, steps, fragments, delay)
        assert found == pytest.approx(walked, rel=1e-9)
        assert found >= max(steps, fragments * exchange) * (1 - 1e-12)


def test_what_an_interval_waits_for_has_closed_forms():
    assert local_interval(1, 5, 10) == 15
    assert local_interval(1, 5, 10, fragments=2) == 20
    assert local_interval(1, 5, 10, delay=5) == 10  # just hidden
    assert local_interval(1, 5, 10, delay=2) == pytest.approx(13)
    assert local_interval(1, 20, 10, delay=9) == pytest.approx(21)  # one step cannot hide it
    assert local_interval(1, 6, 10, fragments=2, delay=9) == pytest.approx(
        12
    )  # no pause on the link


@pytest.mark.parametrize(("world", "steps"), [(2, 1), (4, 8), (64, 500)])
def test_dense_and_topk_have_closed_forms(world, steps):
    records = plan(ZEROS, LINK, COMPUTE, [world], [0.01], ["topk"], local_steps=[steps])
    assert [r["local_steps"] for r in records] == [0, steps, steps]
    assert records[0]["compressor"] == records[0]["baseline"] == "none"
    found = {r["compressor"]: r for r in records[1:]}
    k, outer = target_count(0.01, D), 3 * MEMORY * D
    flags = (world - 1) * (ALPHA + 32 * BETA)
    fixed = outer + flags + 2 * (world - 1) * ALPHA
    wire = 2 * (world - 1) / world * 4 * D
    message = 4 * (2 * k + 10)
    sparse = outer + SELECT * D + world * k * UNPACK + (world - 1) * (ALPHA + message * BETA)
    for name, exchanged in (("none", fixed + wire * BETA), ("topk", sparse)):
        r = found[name]
        assert r["seconds"] == pytest.approx(COMPUTE + exchanged / steps)
        assert r["utilisation"] == pytest.approx(COMPUTE / r["seconds"])
        assert r["utilisation_low"] < r["utilisation"]
        assert r["utilisation"] <= r["utilisation_high"] <= 1
        parts = [r[part] for part in ("compute", "memory", "select", "pack", "latency", "transfer")]
        assert sum(parts) == pytest.approx(r["seconds"])
        assert r["hidden"] == pytest.approx(0, abs=1e-12)
        assert r["compute"] == COMPUTE
        assert r["speedup"] == pytest.approx(records[0]["seconds"] / r["seconds"])
    assert found["topk"]["bytes"] == message
    slow = fixed - (world - 1) * 32 * BETA  # without the flags' bytes
    for target in TARGETS:
        room = steps * COMPUTE * (100 / target - 1) - slow
        bits = 8e-6 * (wire + (world - 1) * 32) / room if room > 0 else math.inf
        assert found["none"][f"bandwidth_{target}"] == pytest.approx(bits, rel=1e-6)


def test_at_the_bandwidth_for_a_share_it_computes_for_that_share():
    options = {"compressors": ["topk"], "local_steps": [8], "fragments": 4, "delay": 3}
    records = plan(ZEROS, LINK, COMPUTE, [4], [0.01], **options)
    assert len(records) == 3
    for target in (50, 90):
        for record in records:
            rate = 1e6 * record[f"bandwidth_{target}"]
            again = plan(ZEROS, LINK, COMPUTE, [4], [0.01], rates=[rate], **options)
            (same,) = (r for r in again if as_run(r) == as_run(record))
            assert same["utilisation"] == pytest.approx(target / 100, rel=1e-5)


def test_workers_that_differ_change_no_share_where_nothing_is_sent():
    """They make computing longer, and the step as much."""
    free = Network.of_link(0, 1e-18, {"select:topk": 0})
    ends = ("utilisation_low", "utilisation_high")
    same, differing = (
        plan(ZEROS, free, times, [8], [0.01], ["topk"], local_steps=[4])
        for times in (COMPUTE, [0.01, 0.02, 0.03, 0.04])
    )
    for one, other in zip(same, differing, strict=True):
        assert [other[end] for end in ends] == pytest.approx([one[end] for end in ends])
        assert (one["utilisation"], other["utilisation"]) == pytest.approx((1, 1))


def as_run(record):
    return record["compressor"], record["local_steps"]


def test_bytes_are_those_that_runs_with_local_steps_sent():
    for name, compressor, codec in (
        ("dense", "none", PLAIN),
        ("sparseloco", "topk", Codec("chunk", "int2")),
    ):
        trace = open_trace(ROOT / "data" / "local" / f"{name}.zarr")
        options = {"local_steps": [20], "codec": codec}
        planned = plan(trace, LINK, COMPUTE, [2], [64 / 4096], [compressor], **options)
        found = {r["compressor"]: r for r in planned if r["local_steps"]}[compressor]
        # these runs sent a header of two words before selections
        older = HEADER_BYTES - 8 if name == "sparseloco" else 0
        assert set(trace.compression(0)["bytes_sent"]) == {found["bytes"] - older}
        assert set(trace.compression(0)["target"]) == {found["selected"]}


def test_a_delay_hides_exchanges_and_fragments_alone_do_not():
    def dense(**options):
        return plan(ZEROS, LINK, COMPUTE, [4], compressors=["none"], local_steps=[8], **options)[1]

    plain, parts, late = dense(), dense(fragments=4), dense(fragments=4, delay=1)
    assert parts["seconds"] > plain["seconds"]  # as many bytes, more messages
    assert parts["transfer"] == pytest.approx(plain["transfer"], rel=1e-3)
    own = 2 * MEMORY * D / 8  # the difference of parameters and the outer optimizer
    assert late["seconds"] == pytest.approx(COMPUTE + own)
    assert late["utilisation"] == pytest.approx(COMPUTE / (COMPUTE + own))
    exchanged = sum(late[p] for p in ("memory", "select", "pack", "latency", "transfer"))
    assert late["hidden"] == pytest.approx(exchanged - own)


def test_fragments_pass_over_the_whole_model_once():
    free = Network.of_link(0, 1e-18, LOCAL)
    expected = COMPUTE + 3 * MEMORY * D / 8
    for fragments in (1, 4):
        options = {"local_steps": [8], "fragments": fragments}
        record = plan(ZEROS, free, COMPUTE, [4], compressors=["none"], **options)[1]
        assert record["seconds"] == pytest.approx(expected, rel=1e-6), fragments


def test_local_steps_share_what_makes_an_exchange_late():
    question = ask(LINK, COMPUTE, [4], [0.01], ["topk"], local_steps=[0, 10], draws=2000)
    late = {
        steps: np.median(np.log(errors))
        for (name, _, steps), errors in Draws.of(question).errors.items()
        if name == "topk"
    }
    # of at least 2,000 draws with a deviation of some 0.13
    assert late == {0: pytest.approx(LATE, abs=0.012), 10: pytest.approx(LATE / 10, abs=0.012)}


def test_where_no_local_steps_are_needed_the_advice_says_so():
    for options in ({"workers": [1]}, {"workers": [4], "rates": [10**13]}):
        records = plan(ZEROS, LINK, COMPUTE, compressors=["none"], local_steps=[0, 8], **options)
        assert "No local steps are needed for 90 %: none has" in local_advice(records)


def test_two_trainings_differ_by_more_than_their_steps():
    # of 200 draws the width is known to 7 %, of 2,000 to 2 %
    options = {"compressors": ["none"], "local_steps": [8], "draws": 2000}
    local = plan(ZEROS, measured_network(), COMPUTE, [4], **options)[1]
    width = math.log(local["speedup_high"] / local["speedup_low"])
    assert width > 2 * 1.8 * math.sqrt(2) * 0.08  # of both, each known to 8 %


def test_the_slower_direction_of_a_link_decides():
    rates = [(RATE // 8, RATE), (RATE, RATE // 8), RATE // 8]
    records = plan(ZEROS, LINK, COMPUTE, [4], [0.01], ["topk"], rates=rates)
    slow_up, slow_down, symmetric = records[:2], records[2:4], records[4:]
    assert {(r["up"], r["down"], r["rate"]) for r in slow_up} == {(125, 1000, 125)}
    assert {(r["up"], r["down"], r["rate"]) for r in slow_down} == {(1000, 125, 125)}
    assert {(r["up"], r["down"], r["rate"]) for r in symmetric} == {(125, 125, 125)}
    for one, other, third in zip(slow_up, slow_down, symmetric, strict=True):
        assert one["seconds"] == other["seconds"] == third["seconds"]


@every(
    ("options", "why"),
    [
        ({"local_steps": [8], "fragments": 9}, "8 local steps leave room"),
        ({"local_steps": [0, 8], "delay": 8}, "8 local steps leave room"),
        ({"delay": 1}, "give local steps, too"),
        ({"local_steps": [-1]}, "local_steps must be"),
        ({"local_steps": 8}, "local_steps must be"),
        ({"rates": [0]}, "a rate must be in"),
        ({"rates": [(1e6, 1e6, 1e6)]}, "not 3 rates"),
    ],
)
def test_what_no_training_does_is_refused(options, why):
    with pytest.raises(InputError, match=why):
        plan(ZEROS, LINK, COMPUTE, [4], compressors=["topk"], **options)


def test_a_public_measurement_takes_what_its_links_allow_and_up_to_a_third_more():
    rows = utilisation.public()
    local = [r for r in rows if r["system"] == "diloco"]
    assert len(local) == 16
    for r in rows:
        assert 8 * 4 * 2 * 3 / 4 * utilisation.NUMEL / (1e6 * r["rate"]) == pytest.approx(
            r["planned_exchange"], rel=1e-3
        )
    late = [r for r in local if r["exchanges"] > 1]  # later than the one that also connects
    excess = [r["exchange"] / r["planned_exchange"] for r in late]
    assert 1 < min(excess) < max(excess) < 1.3
    for r in late:
        assert r["utilisation"] == pytest.approx(r["planned_counted"], rel=0.25)
        assert r["utilisation"] < r["planned_counted"]


def test_the_page_has_this_table():
    assert block("public", utilisation.table(utilisation.public())) in PAGE.read_text()


COMMAND = ["--compute", "0.02", "--workers", "4", "--compressor", "topk", "--compressor", "none"]


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "g.npy", ZEROS)
    LINK.save(tmp_path / "network.json")
    return [str(tmp_path / "g.npy"), "--network", str(tmp_path / "network.json"), *COMMAND]


def test_the_command_says_what_bandwidth_it_takes(files, capsys):
    steps = [word for h in (1, 8, 128) for word in ("--local-steps", str(h))]
    words = ["plan", *files, *steps, "--up", "20", "--down", "1gbit"]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "4 workers at 20 Mbit/s" in said
    assert all(f"{share} %" in said for share in TARGETS)
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--format", "json"])
    records = json.loads(capsys.readouterr().out)
    assert [(r["local_steps"], r["compressor"]) for r in records] == [
        (0, "none"),
        *((h, name) for h in (1, 8, 128) for name in ("topk", "none")),
    ]
    assert {r["rate"] for r in records} == {20}
    assert records[0]["bandwidth_99"] is None or records[0]["bandwidth_99"] > 0
    busy = [r["utilisation"] for r in records if r["compressor"] == "none"]
    assert busy[1:] == sorted(busy[1:])
    assert busy[0] > busy[1]  # buckets hide behind the backward pass


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--up", "5"), "--up and --down go together"),
        (("--up", "5", "--down", "5", "--bandwidth", "5"), "take the place of --bandwidth"),
        (("--local-steps", "4", "--delay", "4"), "4 local steps leave room"),
    ],
)
def test_the_command_refuses_in_a_line(files, words, why, capsys):
    with pytest.raises(SystemExit) as done:
        main(["plan", *files, *words])
    assert done.value.code == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_sentences_and_the_figure_tell_local_steps_apart():
    from matplotlib.figure import Figure

    options = {"compressors": ["topk", "none"], "local_steps": [1, 128]}
    records = plan(ZEROS, LINK, COMPUTE, [4], [0.01], rates=[1e6], **options)
    text = local_advice(records)
    assert text.startswith("4 workers at 1 Mbit/s: with an exchange in every step, by DDP, 0.4")
    assert "128 local steps with topk at ratio 0.01 give 90 % first" in text
    assert "Dense exchanges every 128 local steps give" in text
    mixed = plan(
        ZEROS, LINK, COMPUTE, [4], [0.01], rates=[1e6], **options | {"local_steps": [128, 0]}
    )
    assert [r["local_steps"] for r in mixed] == [0, 0, 128, 128]
    assert local_advice(mixed).startswith(text[:80])
    slow = plan(ZEROS, LINK, COMPUTE, [4], rates=[1e3], **options)
    assert "None of this gives 90 %: 128 local steps with topk at ratio 0.001" in local_advice(slow)
    for r in slow:
        r["utilisation"] = min(r["utilisation"], 0.1)
    next(r for r in slow if r["local_steps"] == 128)["utilisation"] = 0.8997
    assert " give just below 90 %." in local_advice(slow)
    alone = plan(ZEROS, LINK, COMPUTE, [4], [0.01], ["topk"])
    assert advice(alone).startswith("4 workers")
    ax = speedup(records, Figure().subplots())
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert sorted(labels) == sorted(
        f"{name}, {steps} local steps" for name in ("topk, 0.01", "none") for steps in (1, 128)
    )
