"""The atlas' numbers: those of a planted trace, worst cases worked out by hand, variances that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.traces import LAYERS, NUMEL, gradient, write

from gradstats.analysis import atlas
from gradstats.errors import InputError
from gradstats.trace import create_trace
from gradstats.trace.sources import open_sources


def shaped(training, optimizer, layers, kind="gradient"):
    return {"training": training, "optimizer": optimizer, "kind": kind, "layers": layers}


def crossed(rng, trainings, deviations):
    """Return records of two optimizers, three phases and 20 layers, the same in all, with known deviations."""
    records = []
    for t in range(trainings):
        sizes = (
            (1, 1, 1),
            (2, 1, 1),
            (1, 3, 1),
            (1, 1, 20),
            (2, 1, 20),
            (1, 3, 20),
            (2, 3, 1),
            (2, 3, 20),
        )
        # what two or three have together are four equal parts of the rest
        spreads = *deviations[:4], *[deviations[4] / 2] * 4
        x = sum(spread * rng.normal(size=size) for spread, size in zip(spreads, sizes, strict=True))
        for o, of in enumerate(x):
            records += [shaped(str(t), "ab"[o], dict(enumerate(shapes))) for shapes in of]
    return records


def test_variances_are_those_that_were_drawn():
    """Those of phases and optimizers also where the layers, which are the same in all of them, vary most."""
    rng = np.random.default_rng(3)
    truth = np.array([2.0, 0.7, 0.5, 1.5, 1.0])
    rows = atlas.components(crossed(rng, 400, truth))
    assert [r["level"] for r in rows] == list(atlas.LEVELS)
    assert [r["variance"] for r in rows] == pytest.approx(truth**2, rel=0.25)
    assert sum(r["share"] for r in rows) == pytest.approx(1)
    assert all(r["low"] <= r["share"] <= r["high"] for r in rows)
    # nothing but layers: the other levels have next to nothing
    alone = atlas.components(crossed(rng, 30, [0, 0, 0, 1, 0]))
    assert alone[3]["share"] > 0.95
    few = atlas.components(crossed(rng, 4, truth))
    assert all(math.isnan(r["low"]) for r in few)
    assert atlas.components(crossed(rng, 1, truth)) == []
    # layers without a fit, as a file and as a record in memory has them
    records = crossed(rng, 6, truth)
    expected = atlas.components(records)
    for record, nothing in zip(records, [None, math.nan] * 18, strict=True):
        record["layers"]["none"] = nothing
    records[0]["layers"]["none"] = 1e9  # one phase alone has it
    assert atlas.components(records) == expected


def test_intervals_hold_a_small_share_of_phases():
    rng = np.random.default_rng(4)
    truth = np.array([0.25, 0.1, 0.12, 0.28, 0.17])
    held = 0
    for _ in range(20):
        rows = atlas.components(crossed(rng, 11, truth))
        held += rows[2]["low"] <= truth[2] ** 2 / (truth**2).sum() <= rows[2]["high"]
    # nine of ten do; of 20, fewer than 14 are one case in 400
    assert held >= 14


def test_uneven_families_leave_no_bias():
    rng = np.random.default_rng(5)
    records = []
    for t in range(600):  # layers, phases and optimizers that differ in number
        mean, layers = rng.normal(), rng.normal(size=2 + t % 5)
        for o in range(1 + t % 3):
            for _ in range(1 + t % 4):
                shapes = mean + layers + 0.5 * rng.normal(size=layers.size)
                records.append(shaped(str(t), str(o), dict(enumerate(shapes))))
    rows = atlas.components(records)
    assert {r["level"]: r["variance"] for r in rows} == pytest.approx(
        {"training": 1, "optimizer": 0, "phase": 0, "layer": 1, "rest": 0.25}, abs=0.15
    )
    # one optimizer or one phase says nothing of how these differ
    assert {r["trainings"] for r in rows} == {600 // 12 * 6}


def judged(training, **rules):
    exact = {"0.1": 1.0, "0.01": 1.0}
    return {"training": training, "rules": {"exact": exact, **rules}}


def test_the_best_worst_case_and_whether_it_holds_elsewhere():
    records = [
        judged("one", steady={"0.1": 2.0, "0.01": 0.5}, wild={"0.1": 1.0, "0.01": 1.1}),
        judged("two", steady={"0.1": 0.5}, wild={"0.1": 1.0}),
        judged("three", steady={"0.1": 1.9, "0.01": 1.0}, wild={"0.1": 0.125}),
    ]
    first, second = atlas.worst_cases(records)
    assert (first["estimator"], first["where"], first["trainings"]) == ("steady", "one", 3)
    assert (first["worst"], second["worst"]) == (pytest.approx(2), pytest.approx(8))
    assert second["median"] == pytest.approx(1.1)
    # without `three` the wild one looks best, and is a factor of 8 off there
    assert (first["chosen"], second["chosen"]) == (2, 1)
    assert (first["held_out"], second["held_out"]) == (pytest.approx(2), pytest.approx(8))
    assert math.isnan(first["low"])  # three trainings
    short = judged("one", steady={"0.1": 0.01, "0.01": 1.0})
    short["rules"]["exact"]["0.1"] = 0.4  # there are not so many elements
    assert atlas.worst_cases([short])[0]["worst"] == pytest.approx(1)
    # no rule is judged in both
    assert atlas.worst_cases([judged("one", a={"0.1": 2.0}), judged("two", b={"0.1": 2.0})]) == []


def test_the_interval_of_a_median_covers_it():
    rng = np.random.default_rng(0)
    for n in (6, 12):
        ends = [atlas._median_interval(np.sort(rng.normal(size=n))) for _ in range(2000)]
        covered = np.mean([low <= 1 <= high for low, high in ends])  # exp of the median, 0
        assert covered >= 0.94
    assert math.isnan(atlas._median_interval(np.arange(5.0))[0])


def test_records_are_those_of_the_trace(tmp_path):
    path = tmp_path / "a.zarr"
    create_trace(path, LAYERS, world_size=2)
    for rank in (0, 1):
        write(path, (3, 4), rank=rank, kinds=("gradient", "update"))
    record, update = atlas.atlas_records(path, {"early": (3, 4)})
    assert (record["kind"], record["phase"], record["ranks"]) == ("gradient", "early", 2)
    assert (update["kind"], update["cosine"]) == ("update", None)
    values = np.sort(np.abs(gradient(3).astype(np.float64)))[::-1]
    k = round(0.01 * NUMEL)
    assert record["energy"]["0.01"] == pytest.approx((values[:k] ** 2).sum() / (values**2).sum())
    assert record["zeros"] == 0
    cosines = [np.corrcoef(gradient(s, 0), gradient(s, 1))[0, 1] for s in (3, 4)]
    assert record["cosine"] == pytest.approx(np.mean(cosines), abs=0.02)
    assert record["rules"]["exact"]["0.1"] == pytest.approx(1, abs=0.01)
    assert set(record["layers"]) <= {layer.name for layer in LAYERS}
    (tmp_path / "zeros").mkdir()
    for step in (0, 1):
        np.save(tmp_path / "zeros" / f"grad_{step}.npy", np.zeros(NUMEL))
    (source,) = open_sources(tmp_path / "zeros")
    (nothing,) = atlas.atlas_records(source, {"early": (0, 1)})
    assert nothing["xi"] == {}
    with pytest.raises(InputError, match="two steps"):
        atlas.atlas_records(path, {"early": (3,)})


def test_series_are_those_of_every_step(tmp_path):
    path = tmp_path / "a.zarr"
    create_trace(path, LAYERS, world_size=2)
    for rank in (0, 1):
        write(path, (3, 4, 5), rank=rank, kinds=("gradient", "update"))
    first, update = atlas.step_records(path)
    assert (first["kind"], update["kind"], first["steps"]) == ("gradient", "update", [3, 4, 5])
    for i, step in enumerate((3, 4, 5)):
        values = np.sort(np.abs(gradient(step).astype(np.float64)))[::-1]
        assert first["rms"][i] == pytest.approx(math.sqrt((values**2).mean()))
        assert first["zeros"][i] == 0
        # cells are half a percent wide
        for ratio in (0.1, 0.01):
            exact = values[round(ratio * NUMEL) - 1]
            assert first["threshold"][str(ratio)][i] == pytest.approx(exact, rel=0.01)


def test_a_threshold_is_judged_by_those_before_it():
    doubling = [2.0**i for i in range(8)]
    record = {"piece": "one", "kind": "corrected", "rms": doubling}
    still = {"0.1": doubling, "0.01": [3.0] * 30, "0.001": [0.0] * 30}
    found = atlas.reused([record | {"threshold": still}])
    assert {(r["piece"], r["kind"]) for r in found} == {("one", "corrected")}
    rows = {(r["ratio"], r["lag"]): (r["median"], r["high"], r["pairs"]) for r in found}
    assert rows.pop((0.1, 1)) == pytest.approx((2, 2, 7))
    assert rows.pop((0.1, 5)) == pytest.approx((32, 32, 3))
    # too short for a lag of 20, and nothing of what is zero
    assert rows == {(0.01, 1): (1, 1, 29), (0.01, 5): (1, 1, 25), (0.01, 20): (1, 1, 10)}
    uneven = [1.0, 1.0, 1.0, 4.0, 4.0]
    (row,) = atlas.reused([record | {"threshold": {"0.1": uneven}}])
    # of the four pairs three are alike
    assert (row["median"], row["high"]) == pytest.approx((1, 4 ** (1 - 0.05 * 3)))


def test_a_claim_holds_in_all_phases_in_some_or_in_none():
    def record(piece, quality, compressible=None, exact=1.0):
        rules = {"exact": {"0.1": exact}, "sidco-e": {"0.1": quality}, "redsync": {"0.1": quality}}
        return {"piece": piece, "kind": "gradient", "rules": rules, "compressible": compressible}

    records = [
        *(record("all", q, True) for q in (0.81, 1.24)),
        *(record("some", q, c) for q, c in ((0.79, True), (1.1, False))),
        *(record("none", q, False) for q in (1.26, 1.9)),
        *(record("few", q, None, exact=0.9) for q in (1.0, 1.0)),
    ]
    still, jumping = [1.0] * 40, [1.3 ** (i // 20) for i in range(40)]
    series = [
        {"piece": piece, "kind": "corrected", "threshold": {"0.01": values}}
        for piece, values in (("still", still), ("jumping", jumping))
    ]
    found = {
        (r["claim"], r["kind"], r["ratio"]): (r["holds"], r["depends"], r["fails"])
        for r in atlas.claims(records, series)
    }
    # a piece whose intervals of p all contain 1/2 says nothing
    assert found.pop(("redsync", "gradient", 0.1)) == (1, 2, 0)
    assert found.pop(("sidco-e", "gradient", 0.1)) == (1, 1, 1)
    # a jump in one of forty steps is five of the pairs that are five steps apart
    assert found.pop(("reuse", "corrected", 0.01)) == (1, 0, 1)
    ((key, compressible),) = found.items()
    assert key[:2] == ("compressible", "gradient")
    assert math.isnan(key[2])
    assert compressible == (1, 1, 1)
