"""Runs to a plateau: what is compared with what, what is stored, and that no run is repeated."""

from __future__ import annotations

import itertools
import math
import re
import statistics

import numpy as np
import plateau
import pytest
from pages import block
from records import DOCS, RESULTS, stored

from capture.workloads.launch import RunFailedError


def row(compressor, ratio, seed, accuracy, **more):
    found = {
        "loss": 1.0,
        "perplexity": math.nan,
        "word_error_rate": math.nan,
        "quality": 1.0,
        "bytes": 8.0,
    }
    found |= {
        "compressor": compressor,
        "ratio": ratio,
        "seed": seed,
        "accuracy": accuracy,
        "falling": 0.01,
    }
    return found | more


def test_differences_are_paired_by_seed():
    rows = [row("none", 1.0, seed, 0.5 + 0.1 * seed) for seed in range(3)]
    rows += [row("topk", 0.01, seed, 0.48 + 0.1 * seed + 0.01 * (seed == 2)) for seed in range(3)]
    rows += [row("micro", 0.01, 0, 0.5), {**row("lags", 0.01, 0, 0.5), "problem": "rank 0 failed"}]
    lines = plateau.table(rows).splitlines()
    # differences -2, -2, -1: mean -5/3, deviation 0.577, t = 4.303 with two degrees of freedom
    half = 4.3027 * math.sqrt(1 / 3) / math.sqrt(3)
    assert f"| -1.67 ± {half:.2f} * |" in lines[3]
    assert lines[2].startswith("| `none` | – | 3 | 1.000 | 60.00 | – |")
    assert "| +0.00 |" in lines[4]  # one seed has no interval
    assert "0 of 1 | diverged" in lines[5]
    assert lines[-1].startswith("Standard deviation of dense over its 3 seeds: 10.00")
    # of one system with several seeds its own 0.577 is pooled
    assert f"deviation of 0.58: of one seed, nothing below {4.3027 * 0.57735:.1f} is" in lines[-1]
    assert "Pooled" not in plateau.table(rows[:6])


def test_curves_are_means_of_equal_parts():
    assert plateau.curve([1.0, 3.0, 5.0, 7.0], points=2) == [2.0, 6.0]
    assert plateau.curve([1.0, 2.0, 6.0], points=5) == [1.0, 2.0, 6.0]
    assert plateau.curve([], points=5) == []


def test_times_are_those_at_which_a_loss_is_first_reached():
    def run(compressor, ratio, loss, second):
        curves = {"loss": loss, "seconds": [second * (i + 1) for i in range(len(loss))]}
        return {
            "compressor": compressor, "ratio": ratio, "rate": 10, "seconds": 0.02,
            "utilisation": 0.5, "curves": curves,
        }  # fmt: skip

    rows = [
        run("none", 1.0, [4.0, 3.0, 3.5, 2.0], 8.0),
        run("topk", 0.1, [4.0, 2.5, 2.2, 2.1], 1.0),
        run("signsgd", 1.0, [4.0, 3.0, 3.0, 3.0], 2.0),
        {**run("lags", 0.1, [9.0], 1.0), "problem": "rank 0 failed"},
        {**run("micro", 0.1, [1.0], 1.0), "rate": 20},
    ]
    head, _, *lines = plateau.times(rows, 10).splitlines()
    assert "s to 4.00 (a quarter) | s to 3.00 (half) | s to 2.00 (all)" in head
    assert lines == [
        "| `none` | – | 20 | 50 | 8 | 16 | 32 | 32 |",
        "| `topk` | 0.1 | 20 | 50 | 1 | 2 | never | 4 |",
        "| `signsgd` | – | 20 | 50 | 2 | 4 | never | 8 |",
    ]


def test_passes_are_counted_to_the_first_transcripts_that_are_good_enough():
    def run(compressor, rates, quality):
        trials = [{"step": 59 * i, "character_error_rate": r} for i, r in enumerate(rates, 1)]
        found = {"evaluations": trials, "curves": {"quality": quality}}
        found |= {"word_error_rate": 0.8, "character_error_rate": rates[-1], "ratio": 0.001}
        return {"compressor": compressor, **found}

    rows = [
        run("topk", [0.9, 0.55, 0.56, 0.31], [2.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        {**run("none", [0.5, 0.2, 0.3, 0.25], []), "ratio": 1.0},
        {"compressor": "dgc", "ratio": 0.001, "problem": "rank 0 failed"},
    ]
    assert plateau.speech(rows).splitlines()[2:] == [
        "| `topk` | 0.001 | 80.0 | 31.0 | 2 | never | 3.00 |",
        "| `none` | – | 80.0 | 25.0 | 1 | 2 | – |",
        "| `dgc` | 0.001 | diverged | – | – | – | – |",
    ]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("plateau-*.jsonl")), ids=lambda p: p.stem)
def test_the_page_shows_the_stored_runs(path):
    rows, page = stored(path), (DOCS / "workloads.md").read_text(encoding="utf-8")
    lab = path.stem.endswith("-lab")
    text = plateau.times(rows, rows[0]["rate"]) if lab else plateau.table(rows)
    assert block(path.stem, text) in page
    if any(r.get("character_error_rate", math.nan) >= 0 for r in rows):
        assert block(f"{path.stem}-speech", plateau.speech(rows)) in page
    keys = [(r["compressor"], r["ratio"], r["seed"]) for r in rows]
    assert len(keys) == len(set(keys))


def test_what_the_page_on_choosing_says_of_pairs_and_seeds():
    page = (DOCS / "choose.md").read_text(encoding="utf-8")
    apart, pairs = [], 0
    for workload, field, better in (
        ("resnet8-cifar16", "accuracy", 1),
        ("lstm-ptb", "perplexity", -1),
    ):
        rows = stored(RESULTS / f"plateau-{workload}.jsonl")
        found = {(r["compressor"], r["ratio"], r["seed"]): r[field] for r in rows if field in r}
        for rule, ratio in itertools.product(
            ("sidco-e", "sidco-gp", "sidco-p"), (0.1, 0.01, 0.001)
        ):
            differences = [found[rule, ratio, s] - found["topk", ratio, s] for s in range(3)]
            pairs += 1
            if told := plateau.told_apart(differences):
                apart.append((workload, rule, ratio, told * better > 0))
        if workload == "lstm-ptb":
            for name in ("none", "dense-bf16"):
                assert sum(r["compressor"] == name for r in rows) == 6
    assert (pairs, apart) == (18, [("lstm-ptb", "sidco-gp", 0.01, True)])
    assert "Of 18 pairs of `topk` and a SIDCo rule" in page
    assert "(`dense-bf16` on the LSTM: six)" in page


def test_the_page_on_choosing_shows_the_stored_runs():
    runs = {w: stored(RESULTS / f"plateau-{w}.jsonl") for w in plateau.CHOICES}
    text = plateau.choice(runs)
    assert block("choice", text) in (DOCS / "choose.md").read_text(encoding="utf-8")
    # the same means and stars as in the tables of each training
    lines = text.splitlines()[2:]
    chosen = {line.split("|")[1].strip(): line.split("|")[2:] for line in lines}
    compared = 0
    for i, rows in enumerate(runs.values()):
        places: dict[str, int] = {}
        for line in plateau.table(rows).splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) < 7 or " ± " not in cells[6] or cells[1] not in chosen:
                continue
            cell = chosen[cells[1]][i].strip().split(" · ")[places.setdefault(cells[1], 0)]
            places[cells[1]] += 1
            shown = float(cell.rstrip("\\*").replace("−", "-"))
            assert shown == pytest.approx(float(cells[6].split(" ")[0]), abs=0.0551), line
            assert cell.endswith("*") == cells[6].endswith("*"), line
            compared += 1
    assert compared > 50


def test_what_the_pages_say_of_a_choice():
    rows = stored(RESULTS / "plateau-gpt-pydoc.jsonl")
    dense = {r["seed"]: r["perplexity"] for r in rows if r["compressor"] == "none"}
    for ratio in RATIOS:
        pairs = [
            r["perplexity"] - dense[r["seed"]]
            for r in rows
            if (r["compressor"], r["ratio"]) == ("topk", ratio)
        ]
        assert plateau.told_apart(pairs) == 1
    assert Stored("resnet8-cifar16").better("topk", 0.01) == 0
    assert Stored("lstm-ptb").better("topk", 0.01) == -1
    assert {r["optimizer"]["name"] for r in rows} == {"AdamW"}
    steps = [stored(RESULTS / f"plateau-{w}.jsonl")[0]["steps"] for w in plateau.CHOICES]
    assert steps == [2000, 600, 400]


class Stored:
    """The stored runs of a workload, and what differs in them by more than the seeds do."""

    def __init__(self, workload):
        self.rows = stored(RESULTS / f"plateau-{workload}.jsonl")
        self.found = {(r["compressor"], r["ratio"], r["seed"]): r for r in self.rows}
        systems = {key for key in self.found if key[0] in plateau.SYSTEMS and key[2] < 3}
        assert systems == {
            (*each, seed) for seed in range(3) for each in plateau.settings(plateau.SYSTEMS, RATIOS)
        }
        assert not [key for key in systems if "problem" in self.found[key]]

    def better(self, name, ratio, other="none", at=1.0):
        """Return 1 if one is better than another in an interval without 0, −1 if it is worse, else 0."""
        measure, sign = ("perplexity", -1) if self.rows[0]["perplexity"] > 0 else ("accuracy", 1)
        pairs = [
            sign * (self.found[name, ratio, seed][measure] - self.found[other, at, seed][measure])
            for seed in range(len(self.rows))
            if {(name, ratio, seed), (other, at, seed)} <= set(self.found)
        ]
        return plateau.told_apart(pairs)


RULES = ("sidco-e", "sidco-gp", "sidco-p")
EXACT = ("histogram", "redsync-trimmed", "cltk")
RATIOS = (0.1, 0.01, 0.001)


def test_what_the_page_says_of_the_runs():
    """The list behind the table: what exceeds the seeds' noise, and what does not."""
    better = (runs := Stored("resnet8-cifar16")).better
    assert not [1 for name, r in itertools.product(RULES, RATIOS) if better(name, r, "topk", r)]
    for name in ("topk", *RULES):
        assert better(name, 0.1) == 0
        assert better(name, 0.001) == -1
    assert better("dense-bf16", 1.0) == 0
    assert better("dgc", 0.1, "topk", 0.1) == better("redsync", 0.1, "topk", 0.1) == -1
    assert better("redsync", 0.001, "topk", 0.001) == 1
    sent = {n: runs.found[n, 0.001, 0]["bytes"] for n in ("redsync", "topk")}
    assert sent["redsync"] > 30 * sent["topk"]
    assert [better("lags", r, "topk", r) for r in RATIOS] == [-1] * 3
    assert [better("micro", r, "topk", r) for r in RATIOS] == [0, 0, -1]
    assert better("marsit", 1.0) == -1


def test_what_the_page_says_of_the_other_compressors():
    runs = Stored("resnet8-cifar16")
    rows = {key[:2]: row for key, row in runs.found.items() if key[2] == 0}
    assert {*plateau.settings(plateau.OTHERS, RATIOS)} <= {*rows}
    text = plateau.table(runs.rows)
    least = float(re.search(r"nothing below (\S+) is", text)[1])

    def ahead(name, ratio, other="none", at=1.0):
        return 100 * (rows[name, ratio]["accuracy"] - rows[other, at]["accuracy"])

    level = [("dense-fp8", 1.0, "none", 1.0)]
    level += [(n, r, "topk", r) for n in EXACT for r in RATIOS]
    level += [("hard", r, "none", 1.0) for r in (0.1, 0.01)]
    level += [("redsync-quantised", r, "redsync", r) for r in RATIOS]
    (edge,) = (each for each in level if abs(ahead(*each)) >= least)
    assert edge == ("cltk", 0.001, "topk", 0.001)
    page = " ".join((DOCS / "workloads.md").read_text(encoding="utf-8").split())
    assert f"`cltk` at 0.001, which is {-ahead(*edge):.2f} below it" in page
    assert -ahead(*edge) < 1.05 * least
    assert ahead("signsgd", 1.0) < -least > ahead("ef-signsgd", 1.0)
    assert ahead("signsgd", 1.0, "marsit") > least < ahead("ef-signsgd", 1.0, "marsit")
    assert [f"{rows['hard', r]['quality']:.1f}" for r in (0.1, 0.01)] == ["1.8", "3.1"]
    assert rows["hard", 0.01]["quality"] > 3
    assert rows["gaussiank", 0.001]["quality"] < 0.03
    assert ahead("gaussiank", 0.001, "topk", 0.001) < -15
    assert ahead("randomk", 0.1, "topk", 0.1) < -10
    assert all(rows["randomk", r]["accuracy"] <= 0.1 for r in (0.01, 0.001))
    assert all("problem" in rows[name, 1.0] for name in ("ssdm", "cascading"))


def test_numbers_of_what_went_astray_stay_short():
    assert [plateau.fixed(x, ".3f") for x in (2.5, 1e15)] == ["2.500", "1.0e+15"]
    assert [plateau.fixed(x, "+.2f") for x in (-2.5, 3.314e14)] == ["-2.50", "+3.3e+14"]


def test_what_the_page_says_of_the_word_lstm():
    better = (runs := Stored("lstm-ptb")).better
    level = ("topk", *RULES, "micro", "lags")
    assert [better(name, 0.1) for name in level] == [0] * 6
    assert better("dense-bf16", 1.0) == 0
    sparse = (*level, "dgc", "redsync")
    assert {better(name, r) for name, r in itertools.product(sparse, (0.01, 0.001))} == {-1}
    assert not [
        1
        for name, r in itertools.product((*RULES, "micro"), RATIOS)
        if better(name, r, "topk", r) < 0
    ]
    assert [better("lags", r, "topk", r) for r in RATIOS] == [0, -1, 0]
    assert {better(n, r, "topk", r) for n in ("dgc", "redsync") for r in RATIOS} == {-1}
    means = {
        row["compressor"]: plateau.interval(
            [r["perplexity"] for r in runs.rows if r["compressor"] == row["compressor"]]
        )[0]
        for row in runs.rows
        if row["compressor"] in plateau.SYSTEMS
    }
    assert max(means, key=means.get) == "marsit"
    alone = {key[:2]: row["perplexity"] for key, row in runs.found.items() if key[2] == 0}
    assert {*plateau.settings(plateau.OTHERS, RATIOS)} <= {*alone}
    least = float(re.search(r"nothing below (\S+) is", plateau.table(runs.rows))[1])
    assert f"{runs.found['hard', 0.001, 0]['quality']:.1f}" == "7.0"
    assert f"{runs.found['gaussiank', 0.001, 0]['quality']:.2f}" == "0.15"
    level = [(n, r) for n in EXACT for r in RATIOS]
    level += [("gaussiank", 0.1), ("gaussiank", 0.01)]
    assert max(abs(alone[each] - alone["topk", each[1]]) for each in level) < least
    assert alone["gaussiank", 0.001] - alone["topk", 0.001] > 30 > least
    assert max(alone["hard", r] for r in RATIOS) - alone["none", 1.0] < least
    assert alone["signsgd", 1.0] < alone["marsit", 1.0] < alone["ssdm", 1.0]
    assert min(alone["randomk", r] for r in RATIOS) > 700
    assert 2000 < alone["cascading", 1.0] < 2600
    assert alone["ef-signsgd", 1.0] > 1e14
    few = [
        runs.found["dense-bf16", 1.0, s]["perplexity"] - runs.found["none", 1.0, s]["perplexity"]
        for s in range(3)
    ]
    assert plateau.told_apart(few) != 0


def test_what_the_page_says_of_speech():
    rows = {r["compressor"]: r for r in stored(RESULTS / "plateau-blstm-an4.jsonl")}
    assert {*rows} == {"none", "topk", "dgc", "sidco-e"}
    assert {(r["nproc"], r["seed"], r["steps"]) for r in rows.values()} == {(2, 0, 20 * 59)}
    wrong = {name: f"{100 * r['character_error_rate']:.1f}" for name, r in rows.items()}

    def passes(name):
        rates = [each["character_error_rate"] for each in rows[name]["evaluations"]]
        return next(i for i, rate in enumerate(rates, 1) if rate <= plateau.CHARACTER_ERRORS[0])

    page = " ".join((DOCS / "workloads.md").read_text(encoding="utf-8").split())
    for sentence in (
        f"dense training has {wrong['none']} % of the characters wrong, `dgc` {wrong['dgc']}, `sidco-e` "
        f"{wrong['sidco-e']} and `topk` {wrong['topk']}",
        f"`dgc` sends {rows['dgc']['bytes'] / rows['topk']['bytes']:.1f} times the bytes of `topk`",
        f"reached by dense training after {passes('none')} passes, by `dgc` after {passes('dgc')}, `sidco-e` after "
        f"{passes('sidco-e')} and `topk` after {passes('topk')}",
        f"`sidco-e` sends {rows['sidco-e']['bytes'] / rows['topk']['bytes']:.1f} times the bytes: it keeps "
        f"{rows['sidco-e']['quality']:.2f} k on average, though not in the first pass",
        f"its loss goes on to {rows['none']['loss']:.2f} an utterance",
    ):
        assert sentence in page, sentence
    assert statistics.fmean(rows["sidco-e"]["curves"]["quality"][:2]) < 1
    trials = [each["character_error_rate"] for each in rows["none"]["evaluations"]]
    assert trials[9] - trials[-1] < 0.01


def test_what_the_page_says_of_adamw():
    rows = stored(RESULTS / "plateau-gpt-pydoc.jsonl")

    def curve(name, ratio):
        mine = [r["curves"]["loss"] for r in rows if (r["compressor"], r["ratio"]) == (name, ratio)]
        return np.mean(mine, axis=0)

    behind = [curve("topk", ratio) - curve("none", 1.0) for ratio in (0.1, 0.01, 0.001)]
    early = [each[5:12].mean() for each in behind]
    assert {each.size for each in behind} == {50}  # 10 to 24 %
    for each, most in zip(behind, early, strict=True):
        assert most > max(each[:5].mean(), each[12:].mean())
    page = " ".join((DOCS / "workloads.md").read_text(encoding="utf-8").split())
    said = "by {:.2f}, {:.2f} and {:.2f} nats of training loss between 10 and 24 % of the steps."
    assert said.format(*early) in page


def test_what_the_page_says_of_the_clock():
    rows = stored(RESULTS / "plateau-resnet8-cifar16-lab.jsonl")
    curves = {(r["compressor"], r["ratio"]): r["curves"] for r in rows}
    dense = curves["none", 1.0]["loss"]
    first, second = (
        min(dense[: round(share * len(dense))]) for share in list(plateau.TARGETS.values())[:2]
    )

    def until(name, ratio, loss):
        pairs = zip(curves[name, ratio]["loss"], curves[name, ratio]["seconds"], strict=True)
        return next((seconds for found, seconds in pairs if found <= loss), math.inf)

    plain, half = (until(name, 1.0, second) for name in ("none", "dense-bf16"))
    assert half < plain
    for name, ratio in itertools.product(("topk", "sidco-e", "sidco-gp", "micro"), (0.1, 0.01)):
        assert until(name, ratio, second) < half
    assert until("sidco-p", 0.01, second) < half < until("sidco-p", 0.1, second)
    assert until("marsit", 1.0, second) == math.inf
    assert until("marsit", 1.0, first) > until("none", 1.0, first)
    for name in ("topk", "sidco-e", "sidco-gp", "sidco-p", "micro"):
        assert until(name, 0.001, second) == math.inf
        assert until(name, 0.001, first) > until("none", 1.0, first)
    for ratio in (0.1, 0.01, 0.001):
        whole = {name: c["seconds"][-1] for (name, r), c in curves.items() if r == ratio}
        others = [whole[n] for n in whole if n not in ("redsync", "lags")]
        assert whole["redsync"] > max(others)


def test_every_compressor_meets_every_ratio_once():
    runs = list(plateau.settings(plateau.SYSTEMS, (0.1, 0.01, 0.001)))
    assert len(runs) == len(set(runs)) == 3 + 3 * (len(plateau.SYSTEMS) - 3)
    assert [name for name, ratio in runs if ratio == 1.0] == ["none", "dense-bf16", "marsit"]
    papers = {*RULES, "topk", "dgc", "redsync", "micro", "lags", "marsit"}
    assert {"none", "dense-bf16", *papers} == set(plateau.SYSTEMS)


@pytest.mark.slow
@pytest.mark.distributed
def test_runs_are_stored_and_not_repeated(tmp_path, monkeypatch, capsys):
    def main(*more):
        settings = "--steps 3 --batch-size 4 --nproc 1 --seeds 1 --ratios 0.1"
        arguments = f"plateau.py resnet20-digits {settings} --results {tmp_path}".split()
        arguments += more
        monkeypatch.setattr("sys.argv", arguments)
        plateau.main()
        return stored(tmp_path / "plateau-resnet20-digits.jsonl")

    kept = ("--checkpoints", str(tmp_path / "kept"), "--checkpoint-every", "2")
    main("--only", "none", *kept)
    path = tmp_path / "plateau-resnet20-digits.jsonl"
    whole = stored(path)
    path.unlink()
    (part,) = main("--only", "none", "topk", *kept, "--so-far")
    assert (part["made"], part["curves"]["loss"]) == (2, whole[0]["curves"]["loss"][:2])
    (again,) = main("--only", "none", *kept)  # from step 2
    assert "made" not in again
    assert again["curves"] == whole[0]["curves"]
    path.unlink()
    with pytest.raises(SystemExit, match="a run with other settings"):
        main("--only", "none", *kept, "--learning-rate", "0.5")

    rows = main("--only", "none", "topk")
    assert [(r["compressor"], r["seed"]) for r in rows] == [("none", 0), ("topk", 0)]
    assert {"compressor", "ratio", "seed", "steps", "loss", "accuracy", "bytes"} <= set(rows[0])
    assert rows[0]["bytes"] == 4 * 269_722
    assert rows[1]["bytes"] < 0.3 * rows[0]["bytes"]
    assert "| `topk` | 0.1 | 1 |" in capsys.readouterr().out

    with pytest.raises(SystemExit, match="other settings"):
        main("--learning-rate", "0.5")

    def fails(config):
        raise RunFailedError("rank 0 failed at step 1")

    monkeypatch.setattr(plateau, "run", fails)
    again = main("--only", "none", "topk", "micro")
    assert again[:2] == rows  # stored rows are not run again
    assert [r["problem"] for r in again[2:]] == ["rank 0 failed at step 1"]
