"""Losses, dense and compressed: which seeds choose and which judge; pages and advice are of the stored runs."""

from __future__ import annotations

import json
import math
import re
import statistics

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
    assert missed == {"policy-cartpole/sgd", "policy-cartpole/adamw"}
    made = losses.held_out(judging)
    page = (DOCS / "losses.md").read_text(encoding="utf-8")
    assert block("losses", losses.table(found)) in page
    assert block("predictors", losses.predicted(judging)) in page
    assert block("held-out", losses.judged(made)) in page
    assert block("local-steps", losses.local_table(stored(losses.FILE))) in page
    assert (
        block("beside-topk", losses.beside_table(losses.beside_topk(stored(losses.FILE)))) in page
    )
    assert evidence()["trainings"] == json.loads(json.dumps(judging))
    assert evidence()["held_out"] == {k: v for k, v in made.items() if k != "rows"}


def test_the_best_rate_is_mostly_the_largest_tried_as_the_page_says():
    rows = stored(losses.FILE)
    tuned = {(r["piece"], r["system"], r["ratio"]) for r in rows if r["factor"] != 1}
    page = (DOCS / "losses.md").read_text(encoding="utf-8")
    counts = re.search(r"In (\d+) of (\d+) dense trainings and (\d+) of (\d+) of `topk`", page)
    assert counts
    found = []
    for system in ("dense", "topk"):
        best = [losses.best_factor(rows, *each) for each in tuned if each[1] == system]
        found += [sum(factor == max(losses.FACTORS) for factor in best), len(best)]
    assert found == [int(count) for count in counts.groups()]


def test_the_pages_of_a_choice_count_right():
    found = evidence()["trainings"]

    def nearer(ratio):
        """Return in how many trainings top-k of AdamW's steps ended below that of gradients, and of how many."""
        pairs = []
        for each in found:
            above = {
                run["memory"]: statistics.fmean(run["above"]) for run in each["runs"]
                if (run["rule"], run["ratio"], run["steps"]) == ("topk", ratio, losses.STEPS)
            }  # fmt: skip
            if "adam" in above:
                pairs.append(above["adam"] < above["residual"])
        return sum(pairs), len(pairs)

    def kept(rule, ratio, optimizers=("sgd", "adamw")):
        """Return in how many short trainings all runs stayed within 2 %, and how many there are."""
        runs = [
            run["above"] for each in found if each["optimizer"] in optimizers for run in each["runs"]
            if (run["rule"], run["ratio"], run["steps"]) == (rule, ratio, losses.STEPS)
            and run["memory"] == ("residual" if rule == "topk" else "none")
        ]  # fmt: skip
        return sum(max(above) <= 0.02 for above in runs), len(runs)

    text = (DOCS / "choose.md").read_text(encoding="utf-8")
    counts = re.search(
        r"in \[(\d+) of (\d+) short trainings\]\(losses.md\), `topk` at 0.1 in (\d+)", text
    )
    assert counts
    within, of, topk = map(int, counts.groups())
    assert kept("dense-bf16", 1.0) == kept("dense-fp8", 1.0) == (within, of)
    assert kept("topk", 0.1) == (topk, of)
    text = " ".join((DOCS / "decide.md").read_text(encoding="utf-8").split())
    for optimizer, words in (
        ("sgd", r"within 2 % of the dense loss in (\d+) of (\d+) short trainings"),
        ("adamw", r"With AdamW it did so in (\d+) of (\d+);"),
    ):
        counts = re.search(words, text)
        assert counts
        assert kept("topk", 0.1, (optimizer,)) == tuple(map(int, counts.groups()))
    muon = [
        100 * x
        for t in found
        if t["optimizer"] == "muon"
        for r in t["runs"]
        if (r["rule"], r["ratio"], r["memory"]) == ("topk", 0.1, "residual")
        for x in r["above"]
    ]
    said = "with Muon one training was measured, where it ended {:.1f} to {:.1f} % behind"
    assert said.format(min(muon), max(muon)) in text
    counts = re.search(
        r"in (\d+) of (\d+) trainings, at 0.001 in (\d+) of (\d+), at 0.1 in (\d+) of (\d+)\.", text
    )
    assert counts
    assert (*nearer(0.01), *nearer(0.001), *nearer(0.1)) == tuple(map(int, counts.groups()))
    rows = losses.predictors(found)
    # what losses.md says of them: one property is told from chance
    adjusted = holm(np.array([r["p"] for r in rows]))
    told = [(r["property"], r["ratio"]) for r, p in zip(rows, adjusted, strict=True) if p < 0.05]
    assert told == [("energy_0.01", 0.01)]
    assert all(r["rho"] < 0 for r in rows if r["property"] == "energy_0.01")
    assert all(math.isfinite(x) for each in found for run in each["runs"] for x in run["above"])


def of_adamw(training, ratio=0.01):
    """Return how far the short runs of a training with AdamW ended above dense, by system."""
    found = {}
    for r in training["runs"]:
        if r["steps"] == losses.STEPS and r["format"] == "float32":
            found[r["rule"], r["memory"], r["ratio"]] = r["above"]
    names = {
        "topk": ("topk", "residual", ratio),
        "sidco-p": ("sidco-p", "residual", ratio),
        "bare": ("topk", "none", ratio),
    }
    return {name: found[key] for name, key in names.items() if key in found}


def test_what_the_small_gpt_says_at_three_ratios_is_what_the_page_says():
    (gpt,) = (
        t
        for t in evidence()["trainings"]
        if (t["training"], t["optimizer"]) == ("gpt-pydoc", "adamw")
    )
    for ratio in RATIOS:
        found = of_adamw(gpt, ratio)
        assert not losses.farther(found["sidco-p"], found["topk"])
        assert not losses.farther(found["topk"], found["sidco-p"])
        assert losses.farther(found["bare"], found["topk"]) == (ratio == 0.001)
    text = " ".join((DOCS / "losses.md").read_text(encoding="utf-8").split())
    assert (
        "In the small GPT with AdamW `sidco-p` ended where `topk` did at every ratio, and without feedback top-k "
        "ended farther from dense at 0.001 alone" in text
    )


def test_farther_is_by_more_than_seeds_differ():
    assert losses.farther([0.30, 0.32], [0.20, 0.22])
    assert not losses.farther([0.20, 0.22], [0.30, 0.32])
    # means 0.1 apart, and the seeds of one of them 0.12
    assert not losses.farther([0.25, 0.37], [0.20, 0.22])
    assert not losses.farther([0.30, 0.32], [0.15, 0.27])


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
    # each beside top-k of its own ratio
    assert [r["nearer"] for r in every if r["ratio"] == 0.1] == [["gcn-blocks"]]
    found = {r["system"]: r for r in every if r["ratio"] == 0.01}
    assert found.keys() == {"sidco-p", "diloco", "ef-signsgd"}
    where = {name: [p for p in ("nearer", "same", "farther") if r[p]] for name, r in found.items()}
    assert where == {"sidco-p": ["farther"], "diloco": ["nearer"], "ef-signsgd": ["same"]}
    assert all(r["optimizer"] == "sgd" for r in found.values())
    table = losses.beside_table([found["diloco"]])
    assert "| `diloco` | – | SGD | 1 | 1 | 0 | 0 | +20.0 |" in table


def test_where_other_systems_ended_is_what_the_pages_say():
    rows = losses.beside_topk(stored(losses.FILE))

    def where(system, place, ratio=losses.BESIDE):
        """Return the trainings of a system that ended there, by optimizer."""
        return {
            r["optimizer"]: r[place] for r in rows if (r["system"], r["ratio"]) == (system, ratio)
        }

    def count(system, place, ratio=losses.BESIDE):
        return sum(map(len, where(system, place, ratio).values()))

    (every,) = {
        sum(count(system, place, ratio) for place in losses.PLACES)
        for system, ratios in {
            "sidco-p": (losses.BESIDE,),
            "topk without feedback": RATIOS,
            "ef-signsgd": (losses.BESIDE,),
            "diloco": (losses.BESIDE,),
        }.items()
        for ratio in ratios
    }
    bare = "topk without feedback"
    assert where("sidco-p", "nearer") == {"sgd": ["resnet8-cifar16", "vit-digits"], "adamw": []}
    near = {ratio: where(bare, "nearer", ratio)["adamw"] for ratio in RATIOS}
    assert ["unet-digits" in found for found in near.values()] == [True, True, True]
    assert ["vit-digits" in found for found in near.values()] == [True, True, False]
    assert where("ef-signsgd", "nearer") == {"sgd": [], "adamw": ["gcn-blocks"]}
    text = " ".join((DOCS / "losses.md").read_text(encoding="utf-8").split())
    farther = [count(bare, "farther", ratio) for ratio in RATIOS]
    nearer = [count(bare, "nearer", ratio) for ratio in RATIOS]
    for sentence in (
        f"`sidco-p` at 0.01 ended where `topk` did in {count('sidco-p', 'same')} of {every}, and nearer in "
        f"{count('sidco-p', 'nearer')}, `resnet8-cifar16` and `vit-digits` with SGD.",
        f"Without feedback top-k ended farther from dense in {farther[0]} of {every} at 0.1, in {farther[1]} at 0.01 "
        f"and in {farther[2]} at 0.001, and nearer in {nearer[0]}, {nearer[1]} and {nearer[2]}. `unet-digits` with "
        "AdamW was nearer at every ratio, `vit-digits` with AdamW at 0.1 and 0.01: ",
        "`ef-signsgd` ended nearer in one, `gcn-blocks` with AdamW.",
        f"Ten local steps ended nearer in {count('diloco', 'nearer')} of {every}, for about five times the bytes of "
        f"`topk` at 0.01, and farther in {count('diloco', 'farther')}.",
    ):
        assert sentence in text, sentence
    said = f"farther from dense in {farther[1]} of {every} trainings, and nearer in {nearer[1]}]"
    assert said in " ".join((DOCS / "choose.md").read_text(encoding="utf-8").split())
