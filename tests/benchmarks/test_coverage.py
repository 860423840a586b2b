"""The simulation of intervals and tests: its records, its page, and a short run of it."""

from __future__ import annotations

import math
import sys

import intervals
import numpy as np
import pytest
from conftest import ROOT
from scipy.stats import kstest
from support.every import every

CASES = list(intervals.cases())
BRIEF = [case for case in CASES if case.brief]
ROWS = intervals.stored(intervals.PATH)


def leaves_its_band(row):
    """Whether a coverage differs from its band by more than 999 of 1000 simulations of that length do."""
    return intervals.off(row, 0.0005)


def test_the_page_shows_what_was_simulated():
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    for mark, text in intervals.blocks(ROWS).items():
        assert f"<!-- {mark} -->\n{text}\n<!-- /{mark} -->" in page, mark


def test_every_case_was_simulated_as_it_is_described():
    known = {(r["case"], r["law"], r["n"]): r for r in ROWS}
    assert known.keys() == {case.key for case in CASES}
    for case in CASES:
        row = known[case.key]
        assert (row["replications"], row["seed"]) == (case.replications, case.seed), case.key
    for row in ROWS:
        case = next(c for c in CASES if c.key == intervals.key_of(row))
        outside = not case.stated or row["quantity"] in case.outside
        assert row["regime"] == ("outside" if outside else "stated"), case.key
        assert row["covered"] + row["misses_low"] + row["misses_high"] == row["given"]
        assert row["given"] <= row["replications"]


def test_every_quantity_is_in_the_short_run_once():
    """Apart from those without a stated regime."""
    short = {case.key for case in BRIEF}
    stated = [r for r in ROWS if r["regime"] == "stated"]
    covered = {
        (r["case"].partition(",")[0], r["quantity"].split(",")[0])
        for r in stated
        if (r["case"], r["law"], r["n"]) in short
    }
    assert covered == {(r["case"].partition(",")[0], r["quantity"].split(",")[0]) for r in stated}


@pytest.mark.slow
@every("case", BRIEF, ids=lambda case: f"{case.name}-{case.law}")
def test_the_short_run_stays_in_its_bands(case):
    rows = intervals.measure(case, case.brief)
    stated = [row for row in rows if row["regime"] == "stated"]
    assert stated
    assert [row for row in stated if leaves_its_band(row)] == []


@pytest.mark.parametrize("factor", [0.6, 1.7])
def test_a_wrong_width_leaves_the_band(factor):
    """Of a mean of normal values: intervals that are too narrow, or too wide."""

    def ask(rng):
        x = rng.standard_normal(50)
        half = factor * 1.96 / 50**0.5
        return {"mean": (x.mean() - half, x.mean() + half, 0.0)}

    case = intervals.Case("mean", "normal", 50, ask, 300)
    (row,) = intervals.measure(case, 300)
    assert leaves_its_band(row)
    assert intervals.off(row)


@pytest.mark.parametrize(("right", "fails"), [(1.0, False), (0.95, False), (0.7, True)])
def test_a_statement_may_be_right_too_often_and_not_too_seldom(right, fails):
    def ask(rng):
        said = intervals.Said(bool(rng.random() < right))
        return {"said": said, "seen": intervals.Seen(False)}

    said, seen = intervals.measure(intervals.Case("statements, a", "b", 1, ask, 400), 400)
    assert (said["what"], seen["what"]) == ("statement", "power")
    assert intervals.off(said, 0.0005) == fails
    assert not intervals.off(seen)


def test_misses_have_a_side_and_a_missing_interval_is_none():
    answers = iter(
        [(1.0, 2.0, 3.0), (1.0, 2.0, 0.0), (1.0, 2.0, 1.5), (float("nan"),) * 2 + (1.0,)]
    )
    case = intervals.Case("a", "b", 1, lambda _: {"x": next(answers)}, 4)
    (row,) = intervals.measure(case, 4)
    counts = [row[name] for name in ("given", "covered", "misses_low", "misses_high")]
    assert counts == [3, 1, 1, 1]


@every("model", [*intervals.TRUTHS, "pareto"])
def test_clusters_share_a_scale_and_have_the_models_law(model):
    law = intervals.Law(model, intervals.TRUTHS.get(model, (1.25,)), "clusters")
    x = law.draw(np.random.default_rng(7), 100_000)
    assert kstest(x[::41], law.magnitude.cdf).pvalue > 1e-3  # one of a cluster at most
    assert np.corrcoef(np.log(x[1:]), np.log(x[:-1]))[0, 1] > 0.05


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"

    def run(*options):
        arguments = ["intervals.py", "--results", str(path), "--only", "bench-network", *options]
        monkeypatch.setattr(sys, "argv", [*arguments, "--replications", "3"])
        intervals.main()
        return path.read_text().splitlines()

    first = run()
    assert len(first) == 6
    path.write_text("\n".join(first[:2]) + "\n")
    assert run() == first
    assert run() == first
    assert sorted(run("--again", "bench")) == sorted(first)
    assert "| a line, 5 % noise | slope |" in capsys.readouterr().out


def test_every_quantity_is_in_its_band_where_it_says_so():
    off = {r["quantity"] for r in ROWS if r["regime"] == "stated" and intervals.off(r)}
    assert off == set()


def test_the_numbers_in_sentences_are_those_of_the_rows():
    """Of false alarms and the closest law, what the page says in words above its table."""
    page = " ".join((ROOT / "docs" / "coverage.md").read_text(encoding="utf-8").split())
    rows = {(r["case"].partition(", ")[2], r["law"], r["n"], r["quantity"]): r for r in ROWS}

    false, alarms = (
        [r for k, r in rows.items() if k[3] == name]
        for name in ("any alarm in 1,000 steps", "30 times, seen")
    )
    wrong = [r["given"] - r["covered"] for r in false]
    assert {r["given"] for r in (*false, *alarms)} == {40}
    assert f"in {min(wrong)} to {max(wrong)} of 40 runs of 1,000 steps" in page
    heavy = [r["covered"] for r in alarms if r["law"] == "Student's t(3)"]
    assert f"30 times is seen in {min(heavy)} to {max(heavy)} of 40" in page
    said = [r["replications"] for r in ROWS if r["case"].startswith("statements")]
    assert f"{min(said)} to {max(said)} replications, whose standard error at 95 is" in page
    errors = [100 * math.sqrt(0.95 * 0.05 / n) for n in (min(said), max(said))]
    assert "standard error at 95 is {:.0f} to {:.0f} points".format(*errors) in page
    skewed, rare = (
        100 * (1 - intervals.share(rows["Trial", f"differences {noise}", 8, "confirmed at the tolerance"]))
        for noise in ("exponential, 1 %", "a fifth in one of ten")
    )  # fmt: skip
    howto = " ".join((ROOT / "docs/howto/trial.md").read_text(encoding="utf-8").split())
    said = f"wrong in {skewed:.0f} of 100 (exponential differences) to {rare:.0f} (one pair of ten ends a fifth above"
    assert said in howto
    named = [r for k, r in rows.items() if k[3] == "a law that the data have not"]
    off = [[r["given"] - r["covered"] for r in named if r["n"] == n] for n in (200_000, 20_000)]
    assert (max(off[0]), sum(off[1])) == (0, 0)
    shares = {
        name: [
            100 * intervals.share(rows["report, tail", "runs of 15", n, name])
            for n in (20_000, 200_000)
        ]
        for name in ("ξ", "ξ with the design effect")
    }
    assert "98 to 99 % where 15 neighbours share a scale, against 81 to 84 % without it" in page
    assert [f"{min(v):.0f} {max(v):.0f}" for v in shares.values()] == ["81 84", "98 99"]
    reasons = [r for k, r in rows.items() if k[3].startswith("none without ratio")]
    assert reasons
    assert all(r["covered"] == r["given"] for r in reasons)
