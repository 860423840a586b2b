"""The papers' inequalities: what is stored, the page, and a short run of every study."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import theory
import torch
from conftest import ROOT
from records import stored
from support.traces import LAYERS, gradient

from capture.workloads import RunConfig
from gradstats.trace import TraceWriter, create_trace

ROWS = stored(theory.PATH)
PAGE = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")


def rows(study):
    return [row for row in ROWS if row["study"] == study]


def test_the_page_shows_what_was_measured():
    blocks = theory.blocks(ROWS)
    assert blocks.keys() == theory.TABLES.keys()
    for mark, text in blocks.items():
        assert f"<!-- {mark} -->\n{text}\n<!-- /{mark} -->" in PAGE, mark


def test_every_case_was_measured_once():
    cases = {(study, case) for study, each in theory.studies().items() for case, _ in each}
    assert {(row["study"], row["case"]) for row in ROWS} == cases
    many = ("decay", "layers", "compensation", "votes")
    single = [row for row in ROWS if row["study"] not in many]
    assert len(single) == len({(row["study"], row["case"]) for row in single})


def test_elias_codes_are_prefix_free_lengths():
    """As many zeros as the binary number has digits after its first, then the number; no code is shorter than H."""
    numbers = np.arange(1, 600)
    codes = [f"{n:b}".rjust(2 * len(f"{n:b}") - 1, "0") for n in numbers]
    assert theory.elias_gamma(numbers).tolist() == [len(code) for code in codes]
    for row in rows("votes"):
        assert row["entropy"] <= min(row["elias"], row["fixed"])
    for (summed,), own in theory.grouped(rows("votes"), "summed").items():
        coded, plain = (theory.mean(own, field) for field in ("elias", "fixed"))
        assert (coded < plain) == (summed in (4, 5, 8)), summed
        assert coded > 1.9


def test_proved_bounds_hold_in_every_case():
    assert all(row["holds_measured"] == row["cases"] for row in rows("contraction"))
    for row in rows("convergence"):
        assert row["least"] <= min(row[b] for b in ("bound", "bound_kept", "bound_contraction"))
    for row in rows("cascading"):
        assert row["error"] <= row["bound_parts"] <= 1.001 * row["bound"]
        assert row["central"] <= row["bound_central"]
    for row in rows("compensation"):
        assert row["compensation"] <= row["bound"] + 1e-9
        assert (row["compensation"] < 1e-9) == (row["step"] % row["every"] == 1 or row["step"] == 0)
    for row in rows("layered rate"):
        assert row["weighted"] <= row["bound"]
        assert row["bound_dense"] <= row["bound"]
    for row in rows("one-bit rate"):
        assert row["least"] <= row["mean"] <= (math.inf if row["bound"] is None else row["bound"])
        assert (row["bound"] is None) == (row["every"] == 50 and row["steps"] == 1000)
    layers = rows("layers")
    moment = max(row["second_moment"] for row in layers)
    for i, row in enumerate(layers):
        assert row["left"] <= 1 - 1 / row["c_max"]
        bound = theory.residual_bound([row["learning_rate"]] * i, moment, 1 / row["c_max"])
        assert row["distance"] <= bound


def test_a_case_measures_what_is_stored():
    """A fast case; the others are the same code with other names."""
    case = "gradient 0.001 exact"
    (found,) = dict(theory.studies()["contraction"])[case]()
    (kept,) = [row for row in rows("contraction") if row["case"] == case]
    assert {"study": "contraction", "case": case, **theory.rounded(found)} == kept


def test_the_smoothness_of_the_regression_is_the_largest_curvature_of_two_classes():
    """Of ten equally likely classes, where it starts, it is a fifth of that."""
    task = theory.Regression()
    everything, weights = torch.arange(1797), task.weights
    assert weights.shape == (64 + 64 * 65 // 2, 10)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(weights.shape, dtype=weights.dtype, generator=generator)
    start = task.gradient(everything)
    for _ in range(15):  # power iteration with the change of the gradient along a direction
        task.weights = weights + 1e-4 * direction / direction.norm()
        direction = ((task.gradient(everything) - start) / 1e-4).view_as(weights)
    assert float(direction.norm()) == pytest.approx(task.smoothness / 5, rel=0.01)


def test_the_variance_of_a_batch_is_that_of_gradients_drawn():
    task, generator = theory.Regression(), torch.Generator().manual_seed(0)
    everything = torch.arange(1797)
    for _ in range(20):  # away from where all classes are equally likely
        task.weights -= 2 * task.gradient(everything).view_as(task.weights)
    norm, variance = task.moments()
    mean = task.gradient(everything)
    assert norm == pytest.approx(float(mean @ mean))
    off = [float((task.drawn(generator) - mean).square().sum()) for _ in range(1000)]
    assert np.mean(off) == pytest.approx(variance, rel=0.05)


def test_an_exponent_is_read_off_by_the_line_through_both_logarithms():
    ranks = np.log(np.arange(1, 1001))
    power = 3 * np.arange(1, 2001) ** -0.7  # what is beyond the window does not count
    assert theory.slope(ranks, power) == pytest.approx(0.7)
    assert theory.slope(ranks[[0, -1]], power[[0, 999]]) == pytest.approx(0.7)
    kept = np.random.default_rng(0).exponential(size=1000)
    centred = ranks - ranks.mean()
    least = -(centred @ np.log(kept)) / (centred @ centred)
    assert theory.slope(ranks, kept) == pytest.approx(least)


def test_sums_of_signs_need_more_bits_at_every_hop(monkeypatch):
    """Of five ranks, whose sums of signs are counted here one by one."""

    def run(config):
        create_trace(config.out, LAYERS, world_size=5)
        for rank in range(5):
            writer = TraceWriter(config.out, rank, kinds=("gradient",))
            writer.append(0, {"gradient": gradient(0, rank)})
            writer.close()

    monkeypatch.setattr(theory, "run", run)
    found = theory.votes(5, 1)
    assert [row["summed"] for row in found] == [1, 2, 3, 4, 5]
    assert [row["fixed"] for row in found] == [1, 2, 2, 3, 3]
    entropies = [row["entropy"] for row in found]
    assert entropies == sorted(entropies)
    for row in found:
        signs = np.sum([gradient(0, rank) >= 0 for rank in range(row["summed"])], axis=0)
        nearest = sorted(range(row["summed"] + 1), key=lambda v: (abs(2 * v - row["summed"]), v))
        bits = [2 * (nearest.index(each) + 1).bit_length() - 1 for each in signs]
        assert row["elias"] == pytest.approx(np.mean(bits))
        shares = np.unique(signs, return_counts=True)[1] / signs.size
        assert row["entropy"] == pytest.approx(-(shares @ np.log2(shares)))


def test_the_model_without_sparsification_is_ahead_by_the_mean_residual(tmp_path, monkeypatch):
    """LAGS-SGD's eq. 7, 9 and 10, of a trace whose gradients are known."""
    ranks, steps = 3, 2
    residual = [[gradient(step, rank, "local") for rank in range(ranks)] for step in range(steps)]

    def run(config):
        create_trace(config.out, LAYERS, world_size=ranks)
        for rank in range(ranks):
            writer = TraceWriter(config.out, rank, kinds=("gradient", "corrected"))
            for step in range(steps):
                own = gradient(step, rank)
                writer.append(step, {"gradient": own, "corrected": own + residual[step][rank]})
            writer.close()

    monkeypatch.setattr(theory, "run", run)
    found = theory.layerwise(ranks, 0.01, steps)
    rate = RunConfig(workload="resnet20-digits").initial_learning_rate
    for step, row in enumerate(found):
        mean = np.mean([gradient(step, rank) for rank in range(ranks)], axis=0, dtype=float)
        behind = np.mean(residual[step], axis=0, dtype=float)
        assert row["second_moment"] == pytest.approx(mean @ mean)
        assert row["distance"] == pytest.approx(rate**2 * (behind @ behind), rel=1e-5)
        assert row["c_max"] == pytest.approx(100)  # six of 600
        assert row["left"] < 1 - 1 / row["c_max"]


@pytest.mark.distributed
def test_a_ring_of_two_keeps_its_bounds():
    (row,) = theory.cascade(2, 50, 20)
    # each message of a vector of norm 1 has the variance D − 1
    assert row["central"] == pytest.approx((50 - 1) / 2, rel=0.15)
    assert row["error"] <= row["bound_parts"] < row["bound"]
    assert row["central"] <= row["bound_central"]
    assert row["central"] < row["error"]


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    asked = []
    monkeypatch.setattr(
        theory,
        "studies",
        lambda: {
            "decay": [
                (case, lambda case=case: asked.append(case) or [{**rows("decay")[0], "case": case}])
                for case in "ab"
            ]
        },
    )
    monkeypatch.setattr(sys, "argv", ["theory.py", "--results", str(path)])
    theory.main()
    first = path.read_text().splitlines()
    path.write_text(first[0] + "\n")
    theory.main()
    theory.main()
    assert path.read_text().splitlines() == first
    assert asked == ["a", "b", "b"]
    assert json.loads(first[1])["case"] == "b"
    assert "| gradient, without, step 10 |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["theory.py", "weather"])
    with pytest.raises(SystemExit):
        theory.main()


def test_the_sentences_on_proved_rates_have_the_numbers_of_the_tables():
    page = " ".join(PAGE.split())
    layers, bits = rows("layered rate"), rows("one-bit rate")
    factor = min(row["bound"] / row["weighted"] for row in layers)
    assert f"It holds by a factor of {math.floor(factor):.0f} and more. At a ratio" in page
    more = {
        row["schedule"]: row["bound"] / row["bound_dense"]
        for row in layers
        if (row["nproc"], row["ratio"], row["steps"]) == (2, 0.01, 1000)
    }
    assert {name: round(value, -1 if value > 10 else 0) for name, value in more.items()} == {
        "constant": 2,
        "falling": 40,
    }
    factor = min(row["bound"] / row["mean"] for row in bits if row["bound"] is not None)
    assert f"It holds by a factor of {math.floor(factor):.0f} and more. $K$ hardly" in page
    means = {f"{r['mean']:.4f}" for r in bits if (r["nproc"], r["steps"]) == (2, 1000)}
    assert means == {"0.0155"}
    (needed,) = {row["steps_needed"] for row in bits if row["every"] == 50}
    assert f"{needed / 1e6:.1f} million" in page


def test_the_sentences_have_the_numbers_of_the_tables():
    page = " ".join(PAGE.split())
    steps = [row for row in rows("decay") if row["of"].isdigit()]
    plain = [row["line"] for row in steps if row["kind"] == "gradient"]
    assert f"$p$ is {min(plain):.2f} to {max(plain):.2f} at every step" in page
    sigma = [row["sigma_line"] for row in steps if row["kind"] == "gradient"]
    assert f"falls with {min(sigma):.2f} to {max(sigma):.2f}, faster" in page
    early, *_, late = (
        row for row in steps if row["kind"] == "gradient" and "-ef" not in row["trace"]
    )
    assert f"$p$ falls from {early['ends']:.2f} to {late['ends']:.2f} over the training" in page
    assert f"$\\sigma_k$ from {early['sigma']:.2f} to {late['sigma']:.2f}" in page
    assert all(row["line"] < 0.5 and row["p"] < 0.5 for row in steps if row["kind"] == "corrected")
    (laplace,) = [row for row in rows("decay") if row["of"] == "laplace"]
    assert f"has {laplace['line']:.2f} there and {laplace['p']:.2f} in its tail" in page
    assert f"falls with {laplace['sigma_line']:.2f} by the line" in page
    convergence = rows("convergence")
    bounds = ("bound", "bound_kept", "bound_contraction")
    least = min(row[b] / row["least"] for row in convergence for b in bounds)
    assert f"by a factor of {least:.0f} and more" in page
    layers = rows("layers")
    better = [(1 - row["left"]) * row["c_max"] for row in layers]
    assert f"{min(better):.0f} to {max(better):.0f} times better" in page
    cascading = [row["error"] / row["bound_parts"] for row in rows("cascading") if row["nproc"] > 1]
    shares = f"{100 * min(cascading):.1f} to {100 * max(cascading):.0f} % of the bound in parts"
    assert shares in page
    compensated = [row for row in rows("compensation") if row["compensation"] > 1e-9]
    least = min(row["bound"] / row["compensation"] for row in compensated)
    assert f"It holds by a factor of {least:.0f} and more" in page
