"""The benchmark measures what it says; nothing here tests how fast anything is."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from matplotlib.figure import Figure
from scipy import stats
from support.terminal import run

from gradstats import plots
from gradstats.errors import InputError
from gradstats.thresholds import ESTIMATORS, changes
from gradstats.thresholds.bench import (
    PUBLISHED,
    REFERENCES,
    TAILS,
    _Case,
    _memory,
    bench,
    sample_gradient,
)
from gradstats.thresholds.changes import alternated, compared


@pytest.fixture(scope="module")
def records():
    return bench([20_000, 50_000], [0.1, 0.01], threads=[1], repeats=3)


def test_everything_is_measured_once(records):
    keys = {(r["compressor"], r["numel"], r["ratio"]) for r in records}
    assert len(keys) == len(records) == 4 * (len(ESTIMATORS) + len(REFERENCES))
    for numel, ratio in {(r["numel"], r["ratio"]) for r in records}:
        case = [r for r in records if (r["numel"], r["ratio"]) == (numel, ratio)]
        # one time of sorting, and one of reading the data, for all
        (sorting,) = (r["seconds"] for r in case if r["compressor"] == "torch.topk")
        reading = case[0]["seconds"] / case[0]["streams"]
        for r in case:
            assert r["speedup"] == pytest.approx(sorting / r["seconds"])
            assert r["streams"] == pytest.approx(r["seconds"] / reading)
    for r in records:
        assert r["seconds"] > 0
        if r["compressor"] in ("exact", "warm-exact", "redsync-trimmed", *REFERENCES):
            assert r["quality"] == pytest.approx(1, abs=1e-3)
        assert math.isnan(r["memory"]) == (r["compressor"] in REFERENCES)


def test_the_sample_is_heavy_tailed_and_reproducible():
    x = sample_gradient(100_000)
    assert (x == sample_gradient(100_000)).all()
    assert (x.astype(float) ** 4).mean() / (x.astype(float) ** 2).mean() ** 2 > 10
    assert abs(np.sign(x).mean()) < 5 / np.sqrt(x.size)
    scales = [np.abs(part).mean() for part in np.array_split(x, 50)]  # of its layers
    assert np.log(scales).std() == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("tail", TAILS)
def test_published_rules_keep_about_k_where_their_law_holds(tail):
    before = torch.get_rng_state()
    found = bench([500_000], [0.01], estimators=["exact"], repeats=2, published=True, tails=[tail])
    assert torch.equal(torch.get_rng_state(), before)  # the user's
    quality = {r["compressor"]: r["quality"] for r in found}
    assert quality.keys() == {"exact", *REFERENCES, *PUBLISHED}
    assert quality["torch: redsync"] == pytest.approx(1, abs=1e-3)
    assert 0.6 < quality["torch: dgc"] < 1.6  # of a sample's 50: four deviations
    if tail == "laplace":
        assert quality["torch: sidco-e"] == pytest.approx(1, abs=0.06)  # k = 5,000: 4 deviations


def test_a_model_is_timed_layer_by_layer():
    sizes = [3000, 40, 1]
    found = bench([], [0.1], estimators=["exact"], repeats=1, layouts={"net": sizes})
    assert {(r["gradient"], r["numel"], r["layers"]) for r in found} == {("net", 3041, 3)}
    assert all(r["quality"] == 1 for r in found)  # 300, 4 and 1 of them
    for r in found:  # a single round is its own mean
        assert r["streams_mean"] == pytest.approx(r["streams"])


def test_given_gradients_are_timed_step_by_step():
    seen = [np.arange(1, 101, dtype=np.float32) * scale for scale in (1, 2, 3)]
    parts = [[x[:60], x[60:]] for x in seen]
    (record,) = bench(
        [],
        [0.5],
        estimators=["exact"],
        threads=[1],
        repeats=2,
        references=False,
        gradients={"own": parts},
    )
    assert (record["gradient"], record["layers"], record["numel"]) == ("own", 2, 100)
    assert record["quality"] == 1
    half = torch.from_numpy(seen[0]).to(torch.bfloat16).requires_grad_()
    found = bench([], [0.5], estimators=["exact"], repeats=1, gradients={"own": [[half]]})
    assert {r["quality"] for r in found} == {1.0}
    for options in (
        {"repeats": 0},
        {"repeats": 2.5},
        {"threads": [0]},
        {"layouts": {"a": []}, "estimators": ["exact"]},
    ):
        with pytest.raises(InputError):
            bench([], [0.5], **options)
    for wrong in ([], [[]], [[seen[0]], [seen[0][:5]]], [[seen[0][:0]]]):
        with pytest.raises(InputError, match="the same parts, and none may be empty"):
            bench([], [0.5], gradients={"own": wrong})


def test_records_say_whether_caches_were_emptied():
    warm, cold = (
        bench([200_000], [0.01], estimators=[], repeats=5, cold=cold) for cold in (False, True)
    )
    assert {r["cache"] for r in warm} == {"warm"}
    assert {r["cache"] for r in cold} == {"cold"}


def test_quartiles_and_the_best_are_around_the_median(records):
    for r in records:
        assert r["seconds_best"] <= r["seconds"]
        assert r["streams_low"] <= r["streams"] <= r["streams_high"]
    assert any(r["streams_mean"] % 1 for r in records)


@pytest.mark.parametrize("numel", [1000, 1 << 19])
@pytest.mark.parametrize("cold", [False, True])
def test_seconds_are_of_one_run_also_where_several_are_timed_together(numel, cold, monkeypatch):
    """By a clock that goes on by 3 in each run of a rule, and by 1 from one look at it to the next."""
    now, calls = [0.0], []

    def look():
        now[0] += 1
        return now[0]

    def rule(x, k):
        now[0] += 3
        calls.append(k)
        return 2 * k

    clock = SimpleNamespace(perf_counter=look, sleep=lambda seconds: None)
    monkeypatch.setattr("gradstats.thresholds.bench.time", clock)
    monkeypatch.setattr("gradstats.thresholds.bench.REFERENCES", {"torch.topk": rule})
    (record,) = bench([numel], [0.1], estimators=[], threads=[1], repeats=2, cold=cold)
    # a round that warms up, and two
    together, rest = divmod(len(calls), 3)
    assert (rest, together > 1) == (0, numel == 1000 and not cold)
    assert record["seconds"] == record["seconds_best"] == pytest.approx(3 + 1 / together)
    # of a read of the data the clock sees only the look at it
    assert record["streams"] == record["streams_mean"] == pytest.approx(3 * together + 1)
    assert record["rounds"] == pytest.approx([3 * together + 1] * 2)
    assert (record["quality"], record["speedup"]) == (2, 1)


def test_memory_is_in_sizes_of_the_gradient():
    for dtype in (torch.float32, torch.float64):
        case = _Case("own", [[torch.zeros(100_000, dtype=dtype), torch.zeros(50_000, dtype=dtype)]])
        copies = _memory(lambda parts: len([x.numpy().copy() for x in parts]), case)
        assert copies == pytest.approx(1, abs=0.01)


BASE = {"compressor": "exact", "gradient": "layered", "numel": 10, "layers": 1, "ratio": 0.1,
        "threads": 1, "cache": "warm", "quality": 1.0}  # fmt: skip


def timed(rounds, **fields):
    return BASE | {"streams": float(np.median(rounds)), "rounds": list(rounds)} | fields


def test_comparing_says_what_changed_and_how_surely():
    noise = 1 + 0.01 * np.random.default_rng(0).standard_normal((8, 15))
    before = [timed(4 * noise[i], numel=i) for i in range(4)]
    now = [timed(4 * f * noise[4 + i], numel=i) for i, f in enumerate((1.0, 2.0, 0.5, 1.05))]
    found = compared([*now, timed([1.0], numel=9)], [*before, timed([1.0], numel=9, cache="cold")])
    assert [(r["numel"], r["status"]) for r in found] == [
        (0, "same"),
        (1, "slower"),
        (2, "faster"),
        (3, "unknown"),  # the interval reaches beyond 5 %
    ]
    for record, truth in zip(found, (1.0, 2.0, 0.5, 1.05), strict=True):
        assert record["change_low"] < truth < record["change_high"]
        assert record["change"] == pytest.approx(truth, rel=0.02)
    old = {n: v for n, v in before[1].items() if n not in ("gradient", "layers", "cache")}
    assert compared(now, [old])[0]["status"] == "slower"  # of before there was a choice
    for few in (timed(4 * noise[0, :14], numel=1), {n: old[n] for n in old if n != "rounds"}):
        (record,) = compared(now, [few])
        assert record["status"] == "unknown"
        assert record["rounds"] == len(few.get("rounds", ()))


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_unchanged_rows_are_seldom_called_slower_or_faster(noise):
    """Tables of 40 rows of the same code, in each of which a false verdict is one too many."""
    rng, wrong = np.random.default_rng(5), 0
    for _ in range(20):
        old, new = (np.exp(noise * rng.standard_t(4, (40, 15))) for _ in range(2))
        found = compared(*([timed(x, numel=i) for i, x in enumerate(side)] for side in (new, old)))
        wrong += any(r["status"] in ("slower", "faster") for r in found)
    assert wrong <= 3  # of one expected at most: two deviations


@pytest.mark.slow
def test_two_versions_are_run_in_turns(tmp_path, monkeypatch):
    (tmp_path / "gradstats").mkdir()
    (tmp_path / "gradstats" / "__init__.py").touch()
    # a version whose rule takes three times as long: what its command prints
    program = "import json, sys\ndef main():\n    print(json.dumps([%r]))\n"
    slow = timed([1.0], streams=1e9, numel=3000)
    (tmp_path / "gradstats" / "cli.py").write_text(program % slow, encoding="utf-8")
    options = ["--numel", "3000", "--ratio", "0.1", "--threads", "1", "--estimator", "exact"]
    turns, folders, run_one = [], [], changes._run
    arguments = [*options, "--no-references"]
    monkeypatch.setattr(changes, "_run", lambda *of: folders.append(of[0]) or run_one(*of))
    new, old = alternated(tmp_path, arguments, 2, lambda: turns.append(0))
    assert len(turns) == 4
    assert folders == [tmp_path, ROOT, ROOT, tmp_path]
    assert [len(r["rounds"]) for r in (*new, *old)] == [2, 2]
    assert old[0]["streams"] == 1e9
    assert new[0]["streams"] < 1e9
    assert compared(new, old)[0]["change"] < 1
    done = run("bench", "--compare", tmp_path, "--repeats", 1, *arguments, "--format", "json")
    (record,) = json.loads(done.stdout)
    assert (record["streams_before"], record["status"]) == (1e9, "unknown")
    with pytest.raises(InputError, match="no tail"):
        alternated(tmp_path, ["--tail", "none"], 1)
    with pytest.raises(InputError, match="holds no package gradstats"):
        alternated(tmp_path / "gradstats", options, 1)


OPTIONS = {
    "--numel": 77,
    "--tail": "laplace",
    "--layout": "resnet8-cifar16",
    "--ratio": 0.25,
    "--estimator": "dgc",
    "--threads": 2,
    "--step": 3,
    "--rank": 1,
    "--kind": "update",
}
SWITCHES = ("--per-layer", "--published", "--cold", "--no-references")


def test_another_version_is_asked_for_the_same(tmp_path, monkeypatch):
    """Each option goes to both versions, and none that was not given."""
    asked = []

    def alternate(other, arguments, repeats, on_progress):
        asked.append((other, arguments, repeats))
        return [timed([1.0])], [timed([1.0])]

    monkeypatch.setattr(changes, "alternated", alternate)
    source, compare = tmp_path / "g.npy", ("--compare", tmp_path, "--repeats", 4)

    def of(*options):
        assert run("bench", *options, *compare).returncode == 0
        other, arguments, repeats = asked.pop()
        assert (other, repeats) == (tmp_path, 4)
        return arguments

    assert of() == []
    assert of(source) == [str(source)]
    for name, value in OPTIONS.items():
        assert of(source, name, value) == [str(source), name, str(value)]
    for name in SWITCHES:
        assert of(source, name) == [str(source), name]
    assert of("--ratio", 0.1, "--ratio", 0.01, "--cold") == [
        *("--ratio", "0.1", "--ratio", "0.01", "--cold")
    ]


def test_the_command_times_sources_and_layouts_and_compares(tmp_path):
    np.save(tmp_path / "g.npy", np.random.default_rng(0).standard_normal(5000).astype(np.float32))
    options = (
        "--ratio",
        0.01,
        "--threads",
        1,
        "--repeats",
        2,
        "--estimator",
        "exact",
        "--no-references",
    )
    both = ("bench", tmp_path / "g.npy", "--layout", "resnet8-cifar16", *options)
    saved = tmp_path / "bench.json"
    run(*both, "--format", "json", "-o", saved)
    kinds = {(r["gradient"], r["layers"] > 1) for r in json.loads(saved.read_text("utf-8"))}
    assert kinds == {("g.npy gradient of rank 0", False), ("resnet8-cifar16", True)}
    changed = json.loads(run(*both, "--compare", saved, "--format", "json").stdout)
    assert [r["quality"] for r in changed] == [r["quality_before"] for r in changed]
    assert len(changed) == 2
    assert all(len(line) <= 80 for line in run(*both, "--compare", saved).stdout.splitlines())
    (tmp_path / "x.json").write_text('{"a": 1}', encoding="utf-8")
    for bad, said in (
        (("--compare", tmp_path / "x.json"), "is not JSON of bench"),
        (("--compare", tmp_path / "none.json"), "cannot read"),
        (("--compare", saved, "--numel", 77), "has nothing in common with this run"),
        (("--layout", "nothing"), "no workload 'nothing'"),
        (("--tail", "nothing"), "no tail 'nothing'"),
        (("--kind", "gradient"), "choose of a SOURCE"),
    ):
        done = run("bench", *options, *bad)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_figures(records):
    for value in ("seconds", "streams", "speedup"):
        ax = Figure().add_subplot()
        some = [r for r in records if r["numel"] == 20_000]
        assert plots.latency_bars(some, ax, value=value) is ax
        drawn = {x.get_label(): x for x in ax.lines}
        for ratio in (0.1, 0.01):
            dots = drawn[f"ratio {ratio:g}"]
            scale = 1e3 if value == "seconds" else 1  # milliseconds
            expected = [scale * r[value] for r in some if r["ratio"] == ratio]
            assert dots.get_xdata().tolist() == expected
            rows = np.round(dots.get_ydata()).astype(int)
            names = [ax.get_yticklabels()[i].get_text() for i in rows]
            assert names == [r["compressor"] for r in some if r["ratio"] == ratio]
            assert (dots.get_linestyle(), ax.get_xscale()) == ("None", "log")
        assert not ax.patches  # no bars, whose length would say nothing


def test_the_command():
    done = run("bench", "--numel", 20_000, "--ratio", 0.01, "--threads", 1, "--repeats", 2, "--estimator",
               "exact", "--format", "json")  # fmt: skip
    found = json.loads(done.stdout)
    assert {"compressor", "numel", "ratio", "seconds", "streams", "quality"} <= found[0].keys()
    assert len(found) == 1 + len(REFERENCES)
    for bad in (("--numel", 0), ("--ratio", 2), ("--estimator", "x")):
        done = run("bench", *bad)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1


def test_synthetic_gradients_have_the_laws_that_they_are_named_for():
    for name, law in (("laplace", stats.laplace()), ("student-t", stats.t(3))):
        assert stats.kstest(1e3 * TAILS[name](200_000), law.cdf).pvalue > 1e-3, name
    layers = np.array_split(TAILS["layered"](200_000), 50)
    assert np.ptp([np.log(np.abs(part).mean()) for part in layers]) > 3
