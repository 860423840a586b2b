"""Whether to compress: three sentences, which take what kept the loss from measured trainings."""

import numpy as np
import pytest
from support.terminal import records

from gradstats.analysis.verdicts import Verdict
from gradstats.analysis.verdicts.worth import should_compress

SHARES = {0: {0.1: 0.9, 0.01: 0.4}, 7: {0.1: 0.7, 0.01: 0.3}}
EVEN = {0.1: 0.44, 0.01: 0.08}
TRY = "In the 5 measured trainings it ended −1 % to +1 %.\nAdvice was right.\nNext: try it on yours"
TRIED = Verdict("Try dense-bf16", TRY)
NOTHING = Verdict("Don't compress", "No setting kept the loss.\nAdvice was right.\nNext: try it")
HARDLY = "Hardly: it has no large elements to send; if the network is slow, try dense-bf16"
UNKNOWN = Verdict("Not known", "Fewer than 3 trainings were measured. Next: try it")


def said(shares=SHARES, **given):
    usual = {"tried": TRIED, "setting": "dense-bf16", "nonzero": 1.0, "advice": ()}
    return should_compress("run.zarr", shares, EVEN, **usual | given)


def test_it_is_said_in_three_sentences():
    verdict = said()
    assert verdict.headline == "If the network is slow: try dense-bf16"
    saves, costs, following = verdict.numbers.split("\n")
    assert saves.endswith("give plan a link.")
    assert costs.startswith(
        "In the 5 measured trainings it ended −1 % to +1 %. Advice was right. Here the"
    )
    assert costs.endswith("70 to 90\N{NO-BREAK SPACE}% at 0.1 and 30 to 40\N{NO-BREAK SPACE}% at 0.01"
                          " of Σg² at steps 0 and 7.")  # fmt: skip
    assert following.startswith("Next: gradstats plan run.zarr --link ")
    assert "--local-steps" not in following


@pytest.mark.parametrize("tried", [NOTHING, UNKNOWN], ids=["nothing", "unknown"])
def test_where_nothing_kept_the_loss_local_steps_are_next(tried):
    verdict = said(tried=tried, setting="")
    assert verdict.headline == tried.headline
    assert verdict.numbers.count("Next:") == 1
    assert "--local-steps 20" in verdict.numbers.split("Next: ")[1]


def test_steps_that_a_scaler_skipped_can_be_left_out():
    asked = "\nA sum over workers passes them on to all. If a loss scaler skipped {}, ask of the others: gradstats "
    asked += "advise run.zarr --step …\nNext: gradstats info run.zarr --all"
    for bad, these in ((1, "that step"), (3, "those steps")):
        assert said(tried=None, unsound=(bad, 4)).numbers.endswith(asked.format(these))
    # a file is one step, and info does not count its elements
    every = said(tried=None, unsound=(4, 4)).numbers
    assert "scaler" not in every
    assert every.endswith("Next: gradstats drift run.zarr --quantity nonfinite --per-layer")


def test_a_file_with_nan_is_told_where_they_are(tmp_path):
    values = np.random.default_rng(0).laplace(size=2000).astype(np.float32)
    values[7] = np.nan
    np.savez(tmp_path / "g.npz", a=values[:1000], b=values[1000:])
    rows = records("drift", tmp_path / "g.npz", "--quantity", "nonfinite", "--per-layer")
    assert {r["layer"]: r["mean"] for r in rows} == {"all": 1, "a": 1, "b": 0}


def test_a_plan_goes_first():
    plan = "4 workers at 1 Gbit/s: topk at ratio 0.01. It takes 3 ms."
    found = said(advice=[plan])
    assert found.numbers.startswith(plan)
    head = "4 workers at 1 Gbit/s: topk at ratio 0.01; by trainings that were measured: "
    assert found.headline == f"{head}dense-bf16"
    assert said(advice=[plan], tried=NOTHING, setting="").headline == f"{head}don't compress"
    agreed = "4 workers at 1 Gbit/s: dense-bf16. It takes 3 ms."
    assert said(advice=[agreed]).headline == "4 workers at 1 Gbit/s: dense-bf16"
    against = "4 workers at 1 Gbit/s: don't compress."
    assert said(advice=[against]).headline == "4 workers at 1 Gbit/s: don't compress"


@pytest.mark.parametrize(
    ("given", "headline"),
    [
        ({"shares": {}}, "Too few elements to say"),
        ({"shares": {}, "nonzero": 0.0}, "All its elements are zero: there is nothing to send"),
        (
            {"tried": None, "unsound": (2, 7)},
            "Not before the data is sound: NaN or infinite elements at 2 of 7 steps looked at",
        ),
        ({"nonzero": 0.001}, "It is sparse already: at ratio 0.001 nothing is lost"),
        ({"shares": {0: {0.1: 0.27, 0.01: 0.03}}}, HARDLY),
        # leaving out all but the largest is what it has no elements for
        (
            {"shares": {0: {0.1: 0.27}}, "setting": "topk at ratio 0.1 with error feedback"},
            "Hardly: it has no large elements to send",
        ),
        # a normal vector's share, and a little more; of few elements twice it
        ({"shares": {0: {0.1: 0.44, 0.01: 0.16}}}, HARDLY),
        *(
            ({"shares": {0: each}}, "If the network is slow: try dense-bf16")
            for each in ({0.1: 0.45, 0.01: 0.03}, {0.1: 0.44, 0.01: 0.17})
        ),
    ],
)
def test_what_the_data_forbids(given, headline):
    assert said(**given).headline == headline
