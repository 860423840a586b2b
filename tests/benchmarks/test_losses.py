"""Losses, dense and compressed: which seeds choose and which judge; pages and advice are of the stored runs."""

from __future__ import annotations

import json
import math
import re

import losses
import numpy as np
import pytest
from pages import block
from records import DOCS, RESULTS, stored
from scipy.stats import spearmanr

from gradstats.analysis.advise import evidence
from gradstats.analysis.verdicts.verdict import joined
from gradstats.primitives.ratio import RATIOS
from gradstats.statistics.resampling import holm

SGD = losses.FACTORS["sgd"]


def row(system, seed, loss, *, ratio=1.0, factor=1.0, piece="gcn-blocks/sgd", first=9.0):
    found = {"piece": piece, "system": system, "ratio": ratio, "factor": factor, "seed": seed}
    if loss is None:
        return found | {"problem": "not finite"}
    return found | {"loss": loss, "first": first, "bytes": 1000.0}


def test_a_rate_is_chosen_by_one_seed_and_judged_by_others():
    rows = [row("dense", 0, loss, factor=f) for f, loss in zip(SGD, (3.0, 1.0, 2.0), strict=True)]
    rows += [
        row("topk", 0, loss, ratio=0.1, factor=f)
        for f, loss in zip(SGD, (5.0, None, 4.0), strict=True)
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
    assert len(trials) == 4 * 3
    assert {(case[1], case[-1]) for case in trials} == {("dense", 0), ("topk", 0)}


def test_a_rate_beyond_the_grid_is_counted_where_it_ended_lower():
    slow = " With {} all are too small for half of the trainings or more: what is said here of "
    slow += "its losses is of trainings that are slower than they have to be."
    rows = [row("dense", 0, loss, factor=f) for f, loss in zip(SGD, (3, 2, 1), strict=True)]
    rows += [row("dense", 0, 0.9, factor=9.0)]
    rows += [
        row("topk", 0, loss, ratio=0.01, factor=f)
        for f, loss in zip((*SGD, 9.0), (3, 2, 1, None), strict=True)
    ]
    said = losses.beyond(rows)
    assert (
        "ended lower than at any smaller one in 1, 0 and 0 of 1, 0 and 0 trainings with SGD, "
        in said
    )
    assert "that of `topk` at 0.01 in 0, 0 and 0. With" in said
    # the dense loss is 0.9 then, and top-k's is 11 % above it, no longer 0
    assert "of its loss or more, in 0, 0 and 0, farther in 1, 0 and 0, and crossed 2 %" in said
    assert said.endswith("of it in 1, 0 and 0." + slow.format("SGD"))
    # where dense ended no lower the rates are not said to be too small, whatever top-k did
    lower = [r | {"loss": 0.5} if r["system"] == "topk" else r for r in rows]
    lower[3] = lower[3] | {"loss": 1.1}
    assert losses.beyond(lower).endswith("and 0.")
    muon = [
        r | {"piece": r["piece"].replace("sgd", "muon"), "factor": round(9 * r["factor"])}
        for r in rows
    ]
    said = losses.beyond([*rows, *muon])
    assert "in 1, 0 and 1 of 1, 0 and 1 trainings with SGD, AdamW and Muon" in said
    assert "in 0, 0 and 0, farther in 1, 0 and 1, and crossed 2 % of it in 1, 0 and 1." in said
    assert said.endswith(slow.format("SGD") + slow.format("Muon"))
    # no setting trains at it
    assert losses.best_factor(rows, "gcn-blocks/sgd", "dense", 1.0) == 3.0
    rows[-1] |= {"loss": 0.9}
    said = losses.beyond(rows)
    assert "that of `topk` at 0.01 in 1, 0 and 0." in said
    assert "in 0, 0 and 0, farther in 0, 0 and 0," in said
    # 0.6 is 33 % below what dense came to, 1 was as far as dense
    rows[-1] |= {"loss": 0.6}
    assert "in 1, 0 and 0, farther in 0, 0 and 0," in losses.beyond(rows)


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
    # settings that differ in their seeds
    assert "| gcn-blocks/sgd | 120 | 1–2 |" in losses.table([found])
    # dense losses of seeds 1 and 2, which fell from 9
    assert found["fell"] == pytest.approx((9 / 2 + 9 / 3) / 2 - 1)


def test_a_finite_loss_is_not_called_diverged():
    rows = [row("dense", 1, 0.01), row("topk", 1, 2.0, ratio=0.1)]
    (found,) = (t for t in losses.trainings(rows, []) if t["training"] == "gcn-blocks")
    (run,) = (r for r in found["runs"] if r["steps"] == losses.STEPS)
    assert run["above"] == [pytest.approx(199)]
    assert "| +19900.0 |" in losses.table([found])


def judged(training, optimizer="sgd", fell=1.0, energy=0.5, **above):
    """Return a training as trainings() does: top-k's losses above dense at each ratio, by name."""
    runs = [
        {"rule": "topk", "memory": memory, "ratio": ratio, "steps": steps, "above": values}
        for ratio, name in zip(RATIOS, ("tenth", "hundredth", "thousandth"), strict=True)
        for memory, steps, values in (
            ("none", losses.STEPS, [9.0]),
            ("residual", 9999, [9.0]),
            ("residual", losses.STEPS, above.get(name)),
        )
        if values
    ]
    properties = {"gradient": {"energy_0.01": energy}}
    of = {"training": training, "optimizer": optimizer, "fell": fell}
    return of | {"properties": properties, "runs": runs}


def test_trainings_whose_loss_hardly_falls_say_nothing():
    found = [judged("far", fell=0.11), judged("flat", fell=0.09), judged("policy-cartpole", fell=9)]
    assert [t["training"] for t in losses.telling(found)] == ["far"]


def test_trainings_of_which_muon_has_little_say_nothing_of_it():
    found = [judged("far", "muon") | {"share": share} for share in (0.11, 0.09)]
    assert losses.telling(found) == found[:1]
    said = losses.muon_said(
        [judged("dense"), *(f | {"training": f"of {f['share']}"} for f in found)]
    )
    assert "it has most or many in `of 0.11` (11 %); in `of 0.09` (9 %) too few for" in said
    # 16 x 16 pixels, ten classes: the output layer is the only matrix
    assert losses.share_of_muon("resnet8-cifar16") == pytest.approx(640 / 75_290)
    assert losses.share_of_muon("lora-pydoc") == 1


def test_what_seeds_tell_is_corrected_for_the_number_of_trainings():
    near = [judged(f"near {i}", tenth=[0.0, 0.001, 0.0005]) for i in range(4)]
    # by itself it is told from 2 % (p = 0.03), as one of five it is not
    doubtful = judged("doubtful", tenth=[0.0, 0.009, 0.012])
    far, equal = judged("far", tenth=[0.5, 0.51, 0.52]), judged("equal", tenth=[0.01] * 3)
    one = "`topk` at 0.1 is within it in {} of {} and beyond in {};"
    assert one.format(1, 1, 0) in losses.told([doubtful])
    assert one.format(4, 6, 1) in losses.told([*near, doubtful, far])
    assert one.format(1, 2, 1) in losses.told([equal, far])


def test_what_kept_the_loss_is_counted_by_the_loss_and_by_its_fall():
    found = [
        # 4 % of a loss that fell by three times of it are 1.3 % of the fall
        judged("low", fell=3.0, tenth=[0.03, 0.05], hundredth=[0.01, 0.02]),
        # 1.5 % of a loss that fell by half of it are 3 % of the fall
        judged("high", fell=0.5, tenth=[0.015], hundredth=[0.3]),
        judged("high", "muon", tenth=[0.0], thousandth=[0.0, losses.DIVERGED]),
    ]
    rows = {(r["optimizer"], r["yardstick"]): r for r in losses.kept(found)}
    assert [rows["sgd", y][0.1] for y in losses.YARDSTICKS] == [1, 1]
    assert [rows["sgd", y][0.01] for y in losses.YARDSTICKS] == [1, 1]
    assert [rows["muon", y][0.001] for y in losses.YARDSTICKS] == [0, 0]
    found.append(judged("lower", fell=5.0, tenth=[0.06]))
    rows = {(r["optimizer"], r["yardstick"]): r for r in losses.kept(found)}
    assert [rows["sgd", y][0.1] for y in losses.YARDSTICKS] == [1, 2]
    table = losses.kept_table(losses.kept(found[:2]))
    assert "| SGD | the fall of the dense loss | 2 | 1 | 1 | 0 |" in table


def test_alike_trainings_foretell_where_they_do_and_not_where_they_do_not():
    rng = np.random.default_rng(0)
    energies = np.linspace(0.1, 0.9, 16)

    def rows(costs, **given):
        found = [
            judged(f"t{i}", energy=float(e), tenth=[float(c)], **given)
            for i, (e, c) in enumerate(zip(energies, costs, strict=True))
        ]
        return losses.alike(found)

    (row,) = rows(energies**2)
    assert (row["optimizer"], row["ratio"], row["trainings"]) == ("sgd", 0.1, 16)
    assert row["rho"] > 0.9
    assert row["p"] == 0.001
    # of costs that have nothing to do with it p is as often small as it says: at most 5 of 40 by more than chance
    assert sum(rows(rng.random(16))[0]["p"] <= 0.05 for _ in range(40)) <= 5
    assert "| SGD | 16 | +" in losses.alike_table([row])
    # those of another optimizer are others
    assert rows(energies**2, optimizer="adamw")[0]["optimizer"] == "adamw"


def test_advice_is_judged_where_it_was_not_made():
    def training(name, above, zeros=0.0, longer=0.0, half=0.0):
        settings = {"memory": "none", "ratio": 1.0, "format": "fp8"}
        properties = {"gradient": {"energy_0.01": 0.5, "zeros": zeros}}
        runs = [settings | {"rule": "dense-fp8", "steps": 1, "above": above, "bytes": 0.4}]
        runs += [runs[0] | {"steps": 9, "above": [longer]}]
        runs += [runs[0] | {"rule": "dense-bf16", "format": "b", "above": [half], "bytes": 0.5}]
        return {"training": name, "optimizer": "sgd", "properties": properties, "runs": runs}

    good = [training(f"good{i}", [0.01]) for i in range(5)]
    # gradients that are sparse already are told so, and nothing is judged by what is like them
    found = [*good, training("bad", [0.3, 0.1], half=0.03), training("sparse", [0.3], zeros=0.95)]
    made = losses.held_out(found)
    # without the bad one all are good, and it is judged by its own mean; the good ones know the bad one
    judged = {r["training"]: r for r in made["rows"]}
    assert judged["bad/sgd"]["rule"] == "dense-fp8"
    assert judged["bad/sgd"]["above"] == pytest.approx(0.2)
    assert not judged["bad/sgd"]["within"]
    assert judged["good0/sgd"]["rule"] == "none"
    assert (made["within"], made["of"]) == (5, 6)
    # what looks at nothing, judged by the same trainings
    assert made["constant"] == {"dense-bf16": 5, "dense-fp8": 5}
    # of an optimizer in too few trainings nothing is advised: that is neither right nor wrong
    alone = [training("other", [0.3]) | {"optimizer": "muon"}]
    assert losses.held_out([*found, *alone])["rows"] == made["rows"]
    assert made["optimizers"] == ["sgd"]
    text = losses.judged(made)
    assert "| bad/sgd | `dense-fp8` | 0.4 | +20.0 | **no** |" in text
    assert "right with `dense-bf16` in 5 and `dense-fp8` in 5 of 6." in text
    # each length by itself: the longer one ends 30 % above dense, the mean of all 15 %
    longer = losses.held_out([*good, training("late", [0.0], longer=0.3)])
    assert [r["above"] for r in longer["rows"] if r["training"] == "late/sgd"] == [0.3]


def test_a_property_goes_with_the_loss_of_trainings_and_not_of_their_optimizers():
    rng = np.random.default_rng(2)

    def training(name, optimizer, energy, zeros, above, fell):
        each = judged(name, optimizer, fell, tenth=[above], hundredth=[above], thousandth=[above])
        return each | {"properties": {"gradient": {"energy_0.01": energy, "zeros": zeros}}}

    # under the second optimizer all lose as much more; six trainings are twelve points and six observations
    order = [3, 1, 6, 2, 5, 4]
    found = [
        training(f"t{i}", optimizer, i / 10, zeros, (6 - i) * (1 + more), (6 - i) * order[i])
        for i, zeros in enumerate(rng.random(6))
        for more, optimizer in enumerate(("sgd", "adamw"))
    ]
    rows = losses.predictors(found)

    def of(name, yardstick):
        return [r for r in rows if (r["property"], r["yardstick"]) == (name, yardstick)]

    energy = of("energy_0.01", "loss")
    assert [(r["trainings"], r["rho"]) for r in energy] == [(6, pytest.approx(-1.0))] * 3
    assert [r["p"] for r in energy] == [pytest.approx(2 / math.factorial(6))] * 3
    # the share of the fall is one over its place in the order
    expected = spearmanr(range(6), [-x for x in order]).statistic
    assert [r["rho"] for r in of("energy_0.01", "fall")] == [pytest.approx(expected)] * 3
    expected = spearmanr([1 / (1 + (6 - i) * order[i]) for i in range(6)], range(6, 0, -1))
    assert of("left", "loss")[0]["rho"] == pytest.approx(expected.statistic)
    assert min(r["p"] for y in losses.YARDSTICKS for r in of("zeros", y)) > 0.05
    assert {r["property"] for r in rows} == {"energy_0.01", "zeros", "left"}
    line = "| energy of the largest 1 % | the dense loss | 6 | −1.00 (0.0028) |"
    assert line in losses.predicted(found)
    assert not losses.predictors([t for t in found if t["training"] < "t4"])


def test_pages_and_advice_are_those_of_the_stored_runs():
    found = losses.trainings(stored(losses.FILE), stored(RESULTS / "atlas.jsonl"))
    judging = losses.telling(found)
    left_out = {f"{t['training']}/{t['optimizer']}" for t in found if t not in judging}
    policies = {"policy-cartpole/sgd", "policy-cartpole/adamw"}
    hardly = {"lora-pydoc/sgd", "lora-pydoc/adamw", "lora-pydoc/muon"}
    few = {f"{t}/muon" for t in ("resnet8-cifar16", "unet-digits", "dlrm-clicks", "simclr-digits")}
    assert left_out == policies | hardly | few
    enough = [t for t in found if f"{t['training']}/{t['optimizer']}" not in few]
    missed = {r["training"] for r in losses.held_out(enough)["rows"] if not r["within"]}
    assert missed == {"gcn-blocks/sgd", "vit-digits/muon", *policies}
    made = losses.held_out(judging)
    page = (DOCS / "losses.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    # with those that hardly fall there are two misses, as Muon has a sixth training then
    with_them = losses.held_out([t for t in enough if t["training"] != "policy-cartpole"])
    miss, of_muon = (r for r in with_them["rows"] if not r["within"])
    assert (of_muon["training"], of_muon["rule"]) == ("vit-digits/muon", "dense-fp8")
    assert f"`dense-fp8` for `vit-digits` with Muon, {100 * of_muon['above']:.1f} %. With" in text
    assert (miss["training"], miss["rule"], miss["ratio"]) == ("gcn-blocks/sgd", "topk", 0.1)
    (fell,) = (
        t["fell"] for t in judging if (t["training"], t["optimizer"]) == ("gcn-blocks", "sgd")
    )
    above = 100 * miss["above"]
    assert f"which ended {above:.0f} % above dense, or {above / fell:.1f} % of its fall" in text
    assert f"with `gcn-blocks` and SGD it fell to a {1 + fell:.0f}th" in text
    most = max(t["fell"] for t in found if t["training"] == "lora-pydoc")
    assert f"that of `lora-pydoc` fell by {100 * most:.1f} % at most, in the mean" in text
    policy = [
        x for t in found if t["training"] == "policy-cartpole" for r in t["runs"]
        if r["rule"] == "dense-bf16" for x in r["above"]
    ]  # fmt: skip
    ends = f"{100 * min(policy):+.0f} to {100 * max(policy):+.0f} %".replace("-", "−")
    assert f"bfloat16 alone move it by {ends}" in text
    (graph,) = (
        r["above"] for t in judging if (t["training"], t["optimizer"]) == ("gcn-blocks", "muon")
        for r in t["runs"] if r["rule"] == "dense-bf16"
    )  # fmt: skip
    ends = f"{100 * min(graph):+.0f} to {100 * max(graph):+.0f} %".replace("-", "−")
    assert f"They move that of `gcn-blocks` with Muon, which counts, by {ends}." in text
    assert made["settings"] == ["dense-fp8"]
    assert made["within"] == made["of"]
    assert made["optimizers"] == ["adamw", "sgd"]
    judged = {r["training"] for r in made["rows"]}
    dense = [t for t in judging if f"{t['training']}/{t['optimizer']}" in judged]
    sparse = {t["training"] for t in judging if t not in dense and t["optimizer"] != "muon"}
    assert sparse == {"dlrm-clicks"}
    kept = sum(r[0.1] for r in losses.kept(dense) if r["yardstick"] == "loss")
    assert min(made["constant"].values()) >= made["within"]
    said = (
        "The advice is `dense-fp8` for all {}, and was right for all. `topk` at 0.1 kept the loss in {} of them, and "
        "advice named it for none."
    )
    assert said.format(made["of"], kept) in text
    of_muon = sum(t["optimizer"] == "muon" for t in judging)
    assert of_muon == 5
    assert "five trainings count, and the four that are left without one are too few" in text
    decide = " ".join((DOCS / "decide.md").read_text(encoding="utf-8").split())
    assert f"({made['within']} of {made['of']})" in decide
    assert made["constant"]["dense-bf16"] == made["of"]
    assert f"to say always `dense-bf16` was right in all {made['of']}, too." in decide
    known = {f"{t['training']}/{t['optimizer']}" for t in judging}
    most = max(
        r["numel"] for r in stored(RESULTS / "atlas.jsonl") if r["piece"] in known and "numel" in r
    )
    assert f"most like yours (two workers, at most {most / 1e6:.2f} million parameters)" in decide
    alike = losses.alike(judging)
    p = min(holm(np.array([r["p"] for r in alike])))
    assert p > 0.05
    assert len(alike) == 6
    assert f"corrected for all six by Holm's method, is {p:.2g}: nothing shows" in text
    assert block("losses", losses.table(found)) in page
    assert block("predictors", losses.predicted(judging)) in page
    assert block("held-out", losses.judged(made)) in page
    assert block("local-steps", losses.local_table(stored(losses.FILE))) in page
    assert evidence()["trainings"] == json.loads(json.dumps(judging))
    beside = losses.beside_topk(stored(losses.FILE), judging)
    assert block("beside-topk", losses.beside_table(beside)) in page
    assert block("told", losses.told(judging)) in page
    assert block("muon", losses.muon_said(found)) in page
    assert block("kept", losses.kept_table(losses.kept(judging))) in page
    assert block("alike", losses.alike_table(alike)) in page
    assert block("beside-said", losses.beside_said(beside)) in page
    assert block("beyond", losses.beyond(stored(losses.FILE))) in page
    assert evidence()["held_out"] == {k: v for k, v in made.items() if k != "rows"} | {
        "left_out": len(left_out)
    }


def test_every_run_that_judges_has_the_rate_that_seed_0_chose():
    rows = stored(losses.FILE)
    judging = [r for r in rows if r["seed"]]
    assert len(judging) > 1000
    assert [
        r for r in judging
        if r["factor"] != losses.best_factor(rows, r["piece"], r["system"], r["ratio"])
    ] == []  # fmt: skip


def test_the_best_rate_is_mostly_the_largest_tried_as_the_page_says():
    rows = stored(losses.FILE)
    tuned = {(r["piece"], r["system"], r["ratio"]) for r in rows if r["factor"] != 1}
    page = " ".join((DOCS / "losses.md").read_text(encoding="utf-8").split())
    found = []
    for system in ("dense", "topk"):
        for optimizer in losses.OPTIMIZERS:
            best = [
                losses.best_factor(rows, *each)
                for each in tuned
                if each[1] == system and each[0].endswith(f"/{optimizer}")
            ]
            found.append(f"{sum(f == max(losses.FACTORS[optimizer]) for f in best)} of {len(best)}")
    said = (
        "in {} dense trainings with SGD, in {} with AdamW and in {} with Muon; of `topk`, at three ratios each, in {}, "
        "{} and {}."
    )
    assert said.format(*found) in page


def test_the_pages_of_a_choice_count_right():
    found = evidence()["trainings"]
    counts = {(r["optimizer"], r["yardstick"]): r for r in losses.kept(found)}
    within, of = {}, {}
    for rule, ratio in (("dense-bf16", 1.0), ("dense-fp8", 1.0), ("topk", 0.1)):
        means = [
            np.mean(run["above"]) for each in found for run in each["runs"]
            if (run["rule"], run["ratio"], run["steps"]) == (rule, ratio, losses.STEPS)
            and run["memory"] == "residual"
        ]  # fmt: skip
        within[rule], of[rule] = sum(mean <= 0.02 for mean in means), len(means)
    assert within["topk"] == sum(counts[o, "loss"][0.1] for o in losses.OPTIMIZERS)
    assert (within["dense-bf16"], within["dense-fp8"]) == (of["topk"], of["topk"] - 1)
    assert set(of.values()) == {of["topk"]}
    text = (DOCS / "choose.md").read_text(encoding="utf-8")
    surely = re.findall(r"is within it in (\d+) of", losses.told(found))
    said = (
        "`dense-bf16` ended at most 2 % above dense, in the mean, in all [{} short trainings]"
        "(losses.md#within-2-of-what) (told from it in {}), `dense-fp8` in {} ({}), `topk` at 0.1 in {} ({})."
    )
    shown = of["topk"], surely[0], within["dense-fp8"], surely[1], within["topk"], surely[2]
    assert said.format(*shown) in text
    dense = [
        r["loss"] for r in stored(losses.FILE)
        if (r["piece"], r["system"]) == ("policy-cartpole/muon", "dense") and r["seed"]
    ]  # fmt: skip
    assert (len(dense), dense.count(0)) == (3, 2)
    assert "its dense loss ends at 0 with two of three seeds." in " ".join(
        (DOCS / "losses.md").read_text(encoding="utf-8").split()
    )
    text = " ".join((DOCS / "decide.md").read_text(encoding="utf-8").split())
    assert f"16 bits kept the loss (within 2 %, mean over seeds) in all {of['topk']} short" in text
    assert f"8 bits in all but one; three seeds tell it in {surely[0]} and {surely[1]}." in text
    numbers = {o: [counts[o, "loss"][r] for r in RATIOS] for o in losses.OPTIMIZERS}
    trainings = {o: counts[o, "loss"]["of"] for o in losses.OPTIMIZERS}
    said = (
        "`topk` kept it at 0.1 in {} of {} trainings with SGD, {} of {} with AdamW and {} of {} with "
        "Muon; at 0.01 in {}, {} and {}; at 0.001 in {}, {} and {} ("
    )
    tenth, *others = zip(*numbers.values(), strict=True)
    firsts = [x for pair in zip(tenth, trainings.values(), strict=True) for x in pair]
    assert said.format(*firsts, *(x for each in others for x in each)) in text
    # what losses.md says of properties
    rows = losses.predictors(found)
    adjusted = holm(np.array([r["p"] for r in rows]))
    told = [
        (r["property"], r["yardstick"], r["ratio"])
        for r, p in zip(rows, adjusted, strict=True) if p < 0.05
    ]  # fmt: skip
    assert told == [("left", "loss", 0.001)]

    def rho(name, yardstick):
        of = (name, yardstick)
        return np.array([r["rho"] for r in rows if (r["property"], r["yardstick"]) == of])

    assert max(rho("energy_0.01", "loss")) < 0
    assert max(rho("left", "loss")) < 0
    assert (np.abs(rho("left", "fall")) < np.abs(rho("left", "loss"))).all()
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
    # by more than three seeds differ; with two on one side, that is not enough
    assert losses.farther([0.30, 0.32, 0.34], [0.24, 0.26, 0.275])
    assert not losses.farther([0.30, 0.32, 0.34], [0.26, 0.28, 0.30])
    assert not losses.farther([0.30, 0.34], [0.24, 0.26, 0.275])
    # what is within the tolerance is not called
    assert losses.farther([0.021, 0.021], [0.0, 0.0])
    assert not losses.farther([0.019, 0.019], [0.0, 0.0])
    for seeds, most in ((2, 0.125), (3, 0.081)):
        pairs = np.random.default_rng(0).standard_normal((4000, 2, seeds))
        rates = []
        for wider in (1.0, 100.0):
            each = (pairs * np.array([[[1.0], [wider]]])).tolist()
            wrong = sum(losses.farther(a, b) or losses.farther(b, a) for a, b in each)
            rates.append(wrong / len(each))
        # 5 of 100, and more where one's seeds differ far more: four standard errors either way
        assert 0.036 < rates[0] < 0.064
        assert most - 0.021 < rates[1] < most + 0.021


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
    rows += [
        row(r["system"], r["seed"], r["loss"], ratio=r["ratio"], piece="lora-pydoc/sgd")
        for r in rows
    ]
    telling = [
        {"training": "gcn-blocks", "optimizer": "sgd"},
        {"training": "dlrm-clicks", "optimizer": "sgd"},
    ]
    every = losses.beside_topk(rows, telling)
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
    assert "| `diloco` | 0.01 | 0.1 | SGD | 1 | 1 | 0 | 0 | 0 | +20.0 |" in table
    # farther by little, which is not told
    assert found["ef-signsgd"]["behind"] == 1
    said = losses.beside_said(every)
    assert "Ten local steps: beside `topk` at 0.1 nearer in 0 of 1 and farther in 1, beside" in said
    assert (
        "`sidco-p`: nearer in 1 of 1 · 0 of 1 · 0 of 0, farther in 0 of 1 · 1 of 1 · 0 of 0."
        in said
    )


def test_where_other_systems_ended_is_what_the_pages_say():
    found = losses.trainings(stored(losses.FILE), stored(RESULTS / "atlas.jsonl"))
    rows = losses.beside_topk(stored(losses.FILE), losses.telling(found))
    bare, adam = (
        {(r["ratio"], r["optimizer"]): r for r in rows if r["system"] == system}
        for system in ("topk without feedback", "topk of AdamW's steps")
    )
    text = " ".join((DOCS / "choose.md").read_text(encoding="utf-8").split())
    farther, nearer, every = (
        sum(len(bare[0.01, o][p]) for o in losses.OPTIMIZERS for p in places)
        for places in (["farther"], ["nearer"], losses.PLACES)
    )
    assert f"farther from dense in {farther} of {every} trainings, and nearer in {nearer}]" in text
    page = " ".join((DOCS / "losses.md").read_text(encoding="utf-8").split())
    parts = []
    for ratio in RATIOS:
        ended = {p: sorted(adam[ratio, "adamw"][p]) for p in ("farther", "nearer")}
        places = [
            f"{p} in {joined(f'`{n}`' for n in names)}" for p, names in ended.items() if names
        ]
        parts.append(f"at {ratio:g} {', '.join(places)}")
    assert f"AdamW's steps ended {'; '.join(parts)}." in page
    ddp = " ".join((DOCS / "howto" / "ddp.md").read_text(encoding="utf-8").split())
    said = "nearer to dense at 0.01 in {} of {} trainings, farther in {}, at 0.001 in {} and {}, at 0.1 in {} and {}"
    near, far = (
        {ratio: len(adam[ratio, "adamw"][p]) for ratio in RATIOS} for p in ("nearer", "farther")
    )
    every = sum(len(adam[0.01, "adamw"][p]) for p in losses.PLACES)
    counts = near[0.01], every, far[0.01], near[0.001], far[0.001], near[0.1], far[0.1]
    assert said.format(*counts) in ddp
    # `topk` at 0.01 is never farther than signs, and sends less
    signs = [r for r in rows if (r["system"], r["ratio"]) == ("ef-signsgd", 0.01)]
    assert sum(len(r["nearer"]) for r in signs) == 0
    assert min(r["times"] for r in signs) > 1
    seconds = {
        r["compressor"]: r["seconds"]
        for r in stored(RESULTS / "network-vgg16-cifar10.jsonl")
        if "compressor" in r and "seconds" in r
    }
    half, quarter, theirs = (
        seconds[name] / seconds["none"] for name in ("dense-bf16", "dense-fp8", "torch-bf16")
    )
    said = f"they made a step of VGG16 {half:.2f} and {quarter:.1f} times as long, PyTorch's"
    assert f"{said} `bf16_compress_hook` {theirs:.2f} times" in text


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
