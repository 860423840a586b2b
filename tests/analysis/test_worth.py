"""Whether to compress: three sentences, whose evidence is that of the trainings that were measured."""

import json
import statistics

import pytest
from conftest import DATA

from gradstats.analysis.verdicts.worth import EVIDENCE, LITTLE, should_compress

RESULTS = DATA.parent / "docs" / "results"
SHARES = {0: {0.1: 0.9, 0.01: 0.4}, 7: {0.1: 0.7, 0.01: 0.3}}
EVEN = {0.1: 0.44, 0.01: 0.08}


def said(shares=SHARES, **given):
    usual = {"optimizer": "SGD", "ratio": None, "nonzero": 1.0, "sound": True, "advice": ()}
    return should_compress("run.zarr", shares, EVEN, **usual | given)


@pytest.mark.parametrize("training", EVIDENCE, ids=lambda t: t.name)
def test_the_evidence_is_that_of_the_stored_runs(training):
    rows = [json.loads(line) for line in (RESULTS / training.results).read_text().splitlines()]
    runs = {(r["compressor"], r["ratio"], r["seed"]): r for r in rows}
    assert rows[0]["nproc"] == 2
    name = rows[0]["optimizer"]["name"]
    assert training.optimizer.startswith(name)
    assert training.adaptive == (name != "SGD")
    for ratio, (low, high) in training.behind.items():
        pairs = [(runs["topk", ratio, seed], runs["none", 1.0, seed]) for seed in range(3)]
        ends = [one["loss"] - dense["loss"] for one, dense in pairs]
        assert (min(ends), max(ends)) == pytest.approx((low, high), abs=0.006)
        first = len(pairs[0][0]["curves"]["loss"]) // 10
        early = [
            statistics.fmean(one["curves"]["loss"][:first])
            - statistics.fmean(dense["curves"]["loss"][:first])
            for one, dense in pairs
        ]
        assert statistics.fmean(early) == pytest.approx(training.early[ratio], abs=0.006)


def test_it_is_said_in_three_sentences():
    verdict = said()
    assert verdict.headline == "If the network is slow: topk with error feedback, at ratio 0.1"
    assert all(t.behind[0.1][1] <= LITTLE for t in EVIDENCE if not t.adaptive)
    saves, costs, following = verdict.numbers.split("\n")
    assert saves.endswith("give plan a link.")
    assert costs.startswith(
        "Trained by SGD with momentum, topk with error feedback ended −0.02 to "
    )
    assert costs.endswith("70 to 90\N{NO-BREAK SPACE}% at 0.1 and 30 to 40\N{NO-BREAK SPACE}% at 0.01"
                          " of Σg² at steps 0 and 7.")  # fmt: skip
    assert "AdamW" not in costs
    assert following.startswith("Next: gradstats plan run.zarr --link ")


def test_the_optimizer_decides():
    for name in (
        "AdamW",
        "Adam",
        "Lion",
        "FusedAdam",
        "DeepSpeedCPUAdam",
        "PagedAdamW8bit",
        "FusedLAMB",
    ):
        verdict = said(optimizer=name)
        assert verdict.headline == f"Not behind {name}, by what was measured"
        assert (
            "Trained by AdamW, topk with error feedback ended 0.19 to 0.21 nats above"
            in verdict.numbers
        )
        assert "SGD" not in verdict.numbers
        assert "--local-steps 20" in verdict.numbers.split("Next: ")[1]
    unknown = said(optimizer=None)
    assert unknown.headline.endswith("at ratio 0.1; not behind Adam")
    assert "Trained by SGD" in unknown.numbers
    assert "Trained by AdamW" in unknown.numbers
    assert " at 0.001 (this run’s ratio)" in said(ratio=0.001).numbers


def test_a_plan_goes_first():
    plan = "4 workers at 1 Gbit/s: topk at ratio 0.01. It takes 3 ms."
    assert said(advice=[plan]).headline == "4 workers at 1 Gbit/s: topk at ratio 0.01"
    assert said(advice=[plan]).numbers.startswith(plan)
    assert said(advice=[plan], optimizer="AdamW").headline.endswith(
        "; but behind AdamW it cost much"
    )


@pytest.mark.parametrize(
    ("given", "headline"),
    [
        ({"shares": {}}, "Too few elements to say"),
        ({"sound": False}, "Not before the data is sound: it has NaN or infinite elements"),
        ({"nonzero": 0.001}, "It is sparse already: at ratio 0.001 nothing is lost"),
        ({"shares": {0: {0.1: 0.27, 0.01: 0.03}}}, "Hardly: it has no large elements to send"),
    ],
)
def test_what_the_data_forbids(given, headline):
    assert said(**given).headline == headline
