"""Losses, dense and compressed: which seeds choose and which judge; pages and advice are of the stored runs."""

from __future__ import annotations

import json
import math
import re
from itertools import chain

import losses
import numpy as np
import pytest
from pages import block
from records import DOCS, RESULTS, stored

from gradstats.analysis.advise import evidence
from gradstats.primitives.ratio import RATIOS
from gradstats.statistics.resampling import holm


def row(system, seed, loss, *, ratio=1.0, factor=1.0, piece="gcn-blocks/sgd"):
    found = {"piece": piece, "system": system, "ratio": ratio, "factor": factor, "seed": seed}
    return found | ({"problem": "not finite"} if loss is None else {"loss": loss, "bytes": 1000.0})


def test_a_rate_is_chosen_by_one_seed_and_judged_by_others():
    rows = [
        row("dense", 0, loss, factor=f)
        for f, loss in zip(losses.FACTORS, (3.0, 1.0, 2.0), strict=True)
    ]
    rows += [
        row("topk", 0, loss, ratio=0.1, factor=f)
        for f, loss in zip(losses.FACTORS, (5.0, None, 4.0), strict=True)
    ]
    assert losses.best_factor(rows, "gcn-blocks/sgd", "dense", 1.0) == 1.0
    # one that diverged is none
    assert losses.best_factor(rows, "gcn-blocks/sgd", "topk", 0.1) == 3.0
    # what changes the last digits trains at the dense rate
    assert losses.best_factor(rows, "gcn-blocks/sgd", "dense-bf16", 1.0) == 1.0
    every = [*losses.settings("gcn-blocks/sgd", ("dense", "topk", "dense-bf16"))]
    assert every == [
        ("gcn-blocks/sgd", "dense", 1.0),
        *(("gcn-blocks/sgd", "topk", r) for r in RATIOS),
        ("gcn-blocks/sgd", "dense-bf16", 1.0),
    ]
    trials = [*losses.trials(every)]
    assert len(trials) == 4 * len(losses.FACTORS)
    assert {(case[1], case[-1]) for case in trials} == {("dense", 0), ("topk", 0)}


def test_a_rate_beyond_the_grid_is_counted_where_it_ended_lower():
    rows = [
        row("dense", 0, loss, factor=f) for f, loss in zip(losses.FACTORS, (3, 2, 1), strict=True)
    ]
    rows += [row("dense", 0, 0.9, factor=losses.BEYOND)]
    rows += [
        row("topk", 0, loss, ratio=0.01, factor=f)
        for f, loss in zip((*losses.FACTORS, losses.BEYOND), (3, 2, 1, None), strict=True)
    ]
    said = losses.beyond(rows)
    assert (
        "in 1 of 1 dense trainings with SGD and 0 of 1 of `topk` at 0.01, with AdamW in 0 of 0"
        in said
    )
    # no setting trains at it
    assert losses.best_factor(rows, "gcn-blocks/sgd", "dense", 1.0) == 3.0


def test_pairs_have_the_same_seed_and_no_seed_that_chose():
    rows = [row("dense", seed, 1.0 + seed) for seed in range(3)]
    rows += [row("topk", seed, 1.5 * (1.0 + seed), ratio=0.1) for seed in range(4)]
    rows += [row("topk", 1, None, ratio=0.01)]
    # trainings to a plateau are among them, too
    (found,) = (t for t in losses.trainings(rows, []) if t["training"] == "gcn-blocks")
    runs = {r["ratio"]: r for r in found["runs"]}
    # seed 0 chose, and seed 3 has no dense run
    assert runs[0.1]["above"] == [pytest.approx(0.5)] * 2
    assert runs[0.01]["above"] == [losses.DIVERGED]
    assert (runs[0.1]["rule"], runs[0.1]["memory"], runs[0.1]["format"]) == (
        "topk",
        "residual",
        "float32",
    )
    assert "| diverged |" in losses.table([found])
    assert "| +50.0 |" in losses.table([found])


def test_advice_is_judged_where_it_was_not_made():
    def training(name, above):
        settings = dict.fromkeys(("memory", "rule"), "none") | {"ratio": 1.0, "format": "fp8"}
        properties = {"gradient": {"energy_0.01": 0.5, "zeros": 0.0}}
        runs = [settings | {"rule": "dense-fp8", "steps": 1, "above": above, "bytes": 0.4}]
        return {"training": name, "optimizer": "sgd", "properties": properties, "runs": runs}

    made = losses.held_out(
        [*(training(f"good{i}", [0.01]) for i in range(5)), training("bad", [0.3, 0.1])]
    )
    # without the bad one all are good, and it is judged by its own mean; the good ones know the bad one
    judged = {r["training"]: r for r in made["rows"]}
    assert judged["bad/sgd"]["rule"] == "dense-fp8"
    assert judged["bad/sgd"]["above"] == pytest.approx(0.2)
    assert not judged["bad/sgd"]["within"]
    assert judged["good0/sgd"]["rule"] == "none"
    assert (made["within"], made["of"]) == (5, 6)
    assert "| bad/sgd | `dense-fp8` | 0.4 | +20.0 | **no** |" in losses.judged(made)


def test_a_property_goes_with_the_loss_of_trainings_and_not_of_their_optimizers():
    rng = np.random.default_rng(1)

    def training(name, optimizer, energy, zeros, above):
        runs = [
            {"rule": "topk", "memory": m, "ratio": r, "steps": n, "above": [value * r]}
            for r in RATIOS
            for m, n, value in (
                ("residual", losses.STEPS, above),
                ("residual", 9999, -99.0),
                ("adam", losses.STEPS, -99.0),
            )
        ]
        properties = {"gradient": {"energy_0.01": energy, "zeros": zeros}}
        return {
            "training": name,
            "optimizer": optimizer,
            "properties": properties,
            "runs": runs,
        }

    # under the second optimizer all lose as much more; six trainings are twelve points and six observations
    found = [
        training(f"t{i}", optimizer, i / 10, zeros, (6 - i) * (1 + more))
        for i, zeros in enumerate(rng.random(6))
        for more, optimizer in enumerate(("sgd", "adamw"))
    ]
    rows = losses.predictors(found)
    energy = [r for r in rows if r["property"] == "energy_0.01"]
    assert [(r["trainings"], r["rho"]) for r in energy] == [(6, pytest.approx(-1.0))] * 3
    assert [r["p"] for r in energy] == [pytest.approx(2 / math.factorial(6))] * 3
    assert min(r["p"] for r in rows if r["property"] == "zeros") > 0.05
    assert {r["property"] for r in rows} == {"energy_0.01", "zeros"}
    assert "| energy of the largest 1 % | 6 | −1.00 (0.0028) |" in losses.predicted(found)
    assert not losses.predictors([t for t in found if t["training"] < "t4"])


def test_pages_and_advice_are_those_of_the_stored_runs():
    found = losses.trainings(stored(losses.FILE), stored(RESULTS / "atlas.jsonl"))
    judging = losses.telling(found)
    assert {t["training"] for t in found} - {t["training"] for t in judging} == {"policy-cartpole"}
    missed = {r["training"] for r in losses.held_out(found)["rows"] if not r["within"]}
    assert missed == {"gcn-blocks/sgd", "policy-cartpole/sgd", "policy-cartpole/adamw"}
    made = losses.held_out(judging)
    page = (DOCS / "losses.md").read_text(encoding="utf-8")
    # the only advice that is not dense-fp8, and the only miss
    (other,) = (r for r in made["rows"] if r["rule"] != "dense-fp8")
    assert [r for r in made["rows"] if not r["within"]] == [other]
    assert (other["training"], other["rule"], other["ratio"]) == ("gcn-blocks/sgd", "topk", 0.1)
    assert f"ended {100 * other['above']:.0f} % above dense there" in page
    assert block("losses", losses.table(found)) in page
    assert block("predictors", losses.predicted(judging)) in page
    assert block("held-out", losses.judged(made)) in page
    assert block("local-steps", losses.local_table(stored(losses.FILE))) in page
    assert (
        block("beside-topk", losses.beside_table(losses.beside_topk(stored(losses.FILE)))) in page
    )
    assert evidence()["trainings"] == json.loads(json.dumps(judging))
    beside = losses.beside_topk(stored(losses.FILE))
    assert block("beside-said", losses.beside_said(beside)) in page
    assert block("beyond", losses.beyond(stored(losses.FILE))) in page
    assert evidence()["held_out"] == {k: v for k, v in made.items() if k != "rows"} | {
        "left_out": 2
    }


def test_the_best_rate_is_mostly_the_largest_tried_as_the_page_says():
    rows = stored(losses.FILE)
    tuned = {(r["piece"], r["system"], r["ratio"]) for r in rows if r["factor"] != 1}
    page = " ".join((DOCS / "losses.md").read_text(encoding="utf-8").split())
    found = []
    for optimizer in ("sgd", "adamw"):
        for system in ("dense", "topk"):
            best = [
                losses.best_factor(rows, *each)
                for each in tuned
                if each[1] == system and each[0].endswith(f"/{optimizer}")
            ]
            found.append(f"{sum(f == max(losses.FACTORS) for f in best)} of {len(best)}")
    said = "in {} dense trainings and {} of `topk`, with AdamW in {} and {}."
    assert said.format(*found) in page


def test_the_pages_of_a_choice_count_right():
    found = evidence()["trainings"]

    def kept(rule, ratio, optimizers=("sgd", "adamw")):
        """Return in how many short trainings all runs stayed within 2 %, and how many there are."""
        runs = [
            run["above"] for each in found if each["optimizer"] in optimizers for run in each["runs"]
            if (run["rule"], run["ratio"], run["steps"]) == (rule, ratio, losses.STEPS)
            and run["memory"] == "residual"
        ]  # fmt: skip
        return sum(max(above) <= 0.02 for above in runs), len(runs)

    text = (DOCS / "choose.md").read_text(encoding="utf-8")
    counts = re.search(
        r"in \[(\d+) of (\d+) short trainings\]\(losses.md\), `topk` at 0.1 in (\d+) of (\d+)", text
    )
    assert counts
    within, of, topk, of_topk = map(int, counts.groups())
    assert kept("dense-bf16", 1.0) == kept("dense-fp8", 1.0) == (within, of)
    assert kept("topk", 0.1) == (topk, of_topk)
    text = " ".join((DOCS / "decide.md").read_text(encoding="utf-8").split())
    for optimizer, said in (
        (
            "sgd",
            "within 2 % of the dense loss in {} of {} short trainings, at 0.01 in {} of {}, at 0.001 in {} of {}.",
        ),
        ("adamw", "With AdamW it did so in {} of {}, {} of {} and {} of {};"),
    ):
        counts = chain.from_iterable(kept("topk", ratio, (optimizer,)) for ratio in RATIOS)
        assert said.format(*counts) in text
    muon = [
        100 * x
        for t in found
        if t["optimizer"] == "muon"
        for r in t["runs"]
        if (r["rule"], r["ratio"], r["memory"]) == ("topk", 0.1, "residual")
        for x in r["above"]
    ]
    said = "with Muon one training was measured, where it ended {:.1f} to {:.1f} % behind at 0.1"
    assert said.format(min(muon), max(muon)) in text
    # what losses.md says of properties: one was told from chance before the last training
    for last, told in ((["lstm-an4"], {("energy_0.01", 0.01): "0.029"}), ([], {})):
        rows = losses.predictors([each for each in found if each["training"] not in last])
        adjusted = holm(np.array([r["p"] for r in rows]))
        of = {(r["property"], r["ratio"]): p for r, p in zip(rows, adjusted, strict=True)}
        assert {name: f"{p:.2g}" for name, p in of.items() if p < 0.05} == told
    page = " ".join((DOCS / "losses.md").read_text(encoding="utf-8").split())
    now = f"with the eleventh, speech, it is {of['energy_0.01', 0.01]:.2g}"
    assert f"(corrected p 0.029); {now}" in page
    assert all(r["rho"] < 0 for r in rows if r["property"] == "energy_0.01")
    assert all(math.isfinite(x) for each in found for run in each["runs"] for x in run["above"])


def test_farther_is_by_more_than_seeds_differ_by_chance():
    assert losses.farther([0.30, 0.32], [0.20, 0.22])
    assert not losses.farther([0.20, 0.22], [0.30, 0.32])
    # means 0.1 apart, and the seeds of either 0.05
    assert not losses.farther([0.28, 0.33], [0.20, 0.21])
    assert not losses.farther([0.30, 0.31], [0.18, 0.23])
    # what diverged differs from every seed
    assert losses.farther([0.3, losses.DIVERGED], [0.2, 0.25])
    assert not losses.farther([0.2, 0.25], [0.3, losses.DIVERGED])
    assert not losses.farther([0.3, losses.DIVERGED], [0.2, losses.DIVERGED])
    pairs = np.random.default_rng(0).standard_normal((4000, 2, 2)).tolist()
    wrong = sum(losses.farther(a, b) or losses.farther(b, a) for a, b in pairs)
    # 5 of 100, four standard errors either way
    assert 0.036 < wrong / len(pairs) < 0.064


def test_systems_are_compared_with_topk_of_the_same_training():
    rows = [row("dense", seed, 1.0) for seed in (1, 2)]
    rows += [row("topk", seed, 1.5 + 0.01 * seed, ratio=0.01) for seed in (1, 2)]
    rows += [row("topk", seed, 1.0, ratio=0.1) for seed in (1, 2)]
    rows += [row("sidco-p", seed, 1.7, ratio=0.01) for seed in (1, 2)]
    rows += [row("sidco-p", seed, 0.9, ratio=0.1) for seed in (1, 2)]
    rows += [row("diloco", seed, 1.2) for seed in (1, 2)]
    rows += [row("ef-signsgd", seed, 1.52) for seed in (1, 2)]
    # nothing to compare with
    rows += [
        row("diloco", 1, 1.2, piece="dlrm-clicks/sgd"),
        row("dense", 1, 1.0, piece="dlrm-clicks/sgd"),
    ]
    every = losses.beside_topk(rows)
    # each beside top-k of its own ratio, what has none beside two; one seed has no difference
    assert [(r["system"], r["ratio"], r["nearer"]) for r in every if r["nearer"]] == [
        ("sidco-p", 0.1, ["gcn-blocks"]),
        ("diloco", 0.01, ["gcn-blocks"]),
    ]
    found = {r["system"]: r for r in every if r["ratio"] == 0.01}
    assert found.keys() == {"sidco-p", "diloco", "ef-signsgd"}
    where = {name: [p for p in losses.PLACES if r[p]] for name, r in found.items()}
    assert where == {"sidco-p": ["farther"], "diloco": ["nearer"], "ef-signsgd": ["untold"]}
    assert all(r["optimizer"] == "sgd" for r in found.values())
    # as many bytes in an exchange, of which there is one in ten steps
    assert [found[name]["times"] for name in ("sidco-p", "diloco")] == [1.0, pytest.approx(0.1)]
    table = losses.beside_table([found["diloco"]])
    assert "| `diloco` | 0.01 | 0.1 | SGD | 1 | 1 | 0 | 0 | +20.0 |" in table
    said = losses.beside_said(every)
    assert "Ten local steps: beside `topk` at 0.1 nearer in 0 of 1 and farther in 1, beside" in said
    assert (
        "`sidco-p`: nearer in 1 of 1 · 0 of 1 · 0 of 0, farther in 0 of 1 · 1 of 1 · 0 of 0."
        in said
    )


def test_where_other_systems_ended_is_what_the_pages_say():
    rows = losses.beside_topk(stored(losses.FILE))
    bare, adam = (
        {(r["ratio"], r["optimizer"]): r for r in rows if r["system"] == system}
        for system in ("topk without feedback", "topk of AdamW's steps")
    )
    text = " ".join((DOCS / "choose.md").read_text(encoding="utf-8").split())
    farther, nearer, every = (
        sum(len(bare[0.01, o][p]) for o in ("sgd", "adamw") for p in places)
        for places in (["farther"], ["nearer"], losses.PLACES)
    )
    assert f"farther from dense in {farther} of {every} trainings, and nearer in {nearer}]" in text
    # what losses.md says of the transformers
    assert {"gpt-pydoc", "moe-pydoc"} <= {*adam[0.001, "adamw"]["farther"]}
    # decide.md: it helped some and set others back
    for ratio in (0.01, 0.001):
        assert adam[ratio, "adamw"]["nearer"]
        assert adam[ratio, "adamw"]["farther"]
    (step,) = (
        r["seconds"] / dense["seconds"]
        for r in stored(RESULTS / "network-vgg16-cifar10.jsonl")
        for dense in stored(RESULTS / "network-vgg16-cifar10.jsonl")
        if (r.get("compressor"), dense.get("compressor")) == ("dense-fp8", "none")
    )
    assert f"made a step of VGG16 {step:.1f} times as long" in text


def test_longer_trainings_end_farther_behind_than_they_began():
    """What the page on trials says of top-k at 0.01 and 0.001."""
    for name in ("resnet8-cifar16", "lstm-ptb", "gpt-pydoc"):
        rows = [r for r in stored(RESULTS / f"plateau-{name}.jsonl") if "curves" in r]
        dense = {r["seed"]: r for r in rows if r["compressor"] == "none"}
        for ratio in (0.01, 0.001):
            gaps = []
            for r in rows:
                if (r["compressor"], r["ratio"]) == ("topk", ratio):
                    mine, other = (each["curves"]["loss"] for each in (r, dense[r["seed"]]))
                    eighth = len(mine) // 8
                    gaps.append([np.mean(mine[p]) / np.mean(other[p]) for p in
                                 (slice(eighth), slice(-eighth, None))])  # fmt: skip
            first, last = np.mean(gaps, 0)
            assert last > first, (name, ratio)
