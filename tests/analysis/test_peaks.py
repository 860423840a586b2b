"""Peaks over threshold by runs of neighbours: the design effect against a naive one, whatever the pieces."""

from __future__ import annotations

import math

import numpy as np
import pytest

import gradstats
from gradstats.analysis import peaks
from gradstats.errors import InputError
from gradstats.statistics.dependence import RUN
from gradstats.statistics.resampling import holm
from gradstats.trace import Layer, TraceWriter, create_trace


def together(numel, length, seed=0):
    """Return elements of which `length` neighbours share a scale: they are large together."""
    rng = np.random.default_rng(seed)
    scales = np.repeat(rng.gamma(5.0, size=-(-numel // length)), length)[:numel]
    return (rng.exponential(size=numel) / scales * rng.choice((-1, 1), numel)).astype("f4")


@pytest.mark.parametrize("piece", [4 * RUN, 1 << 22])
def test_intervals_by_runs_are_wider_by_the_root_of_the_counts_variance(monkeypatch, piece):
    monkeypatch.setattr(peaks, "PIECE", piece)
    x = together(60_000, 3 * RUN)
    x[:500] = math.nan  # is in no count
    found = gradstats.pot(x, [0.2, 0.02])
    assert len(found) == 2
    for record in found:
        runs = np.abs(x[: 60_000 // RUN * RUN]).reshape(-1, RUN) >= record["threshold"]
        share = runs.mean()
        naive = runs.sum(axis=1).var(ddof=1) / (RUN * share * (1 - share))
        assert record["design"] == pytest.approx(naive, rel=1e-9)
        assert naive > 5
        for end in ("low", "high"):
            by = (record[f"runs_{end}"] - record["c"]) / (record[f"c_{end}"] - record["c"])
            assert by == pytest.approx(math.sqrt(naive), rel=1e-9), end


def test_independent_elements_have_no_wider_interval_than_by_chance():
    """The design effect of n runs has a standard deviation of √(2/n): 5 of them are 0.65 here."""
    found = gradstats.pot(together(60_000, 1), [0.2, 0.02])
    for record in found:
        assert abs(record["design"] - 1) < 5 * math.sqrt(2 / (60_000 // RUN))
        assert record["runs_low"] <= record["c_low"]


def test_where_positions_or_runs_are_missing_there_is_no_interval(tmp_path):
    (few,) = gradstats.pot(together(19 * RUN, 1), [0.1])
    assert all(math.isnan(few[name]) for name in ("design", "runs_low", "runs_high"))
    assert math.isfinite(few["c_low"])


def test_layers_are_the_tests_that_a_tail_is_corrected_for():
    rng = np.random.default_rng(0)
    layers = {name: rng.standard_t(df, 3000) for name, df in zip("abc", (3, 6, 30), strict=True)}
    pooled, normalised, *each = gradstats.pot(layers, per_layer=True)
    assert math.isnan(pooled["p_holm"])
    assert math.isnan(normalised["p_holm"])
    corrected = holm(np.array([r["p_value"] for r in each]))
    assert [r["p_holm"] for r in each] == corrected.tolist()
    assert [r["layer"] for r in each] == [*"abc"]


def test_each_gradient_is_a_family_of_its_own(tmp_path):
    """More steps, ranks or kinds make no layer of a gradient less sure: a correction is over its layers."""
    layers = [Layer(name, i * 1500, (1500,)) for i, name in enumerate("abc")]
    create_trace(tmp_path / "run.zarr", layers, world_size=2)
    for rank in (0, 1):
        writer = TraceWriter(tmp_path / "run.zarr", rank, kinds=("gradient", "corrected"))
        for step in (0, 1):
            rng = np.random.default_rng([rank, step])
            x, y = (
                np.concatenate([rng.standard_t(df, 1500) for df in (2.5, 3, 9)]).astype("f4")
                for _ in range(2)
            )
            writer.append(step, {"gradient": x, "corrected": y})
        writer.close()
    families = {}
    with pytest.raises(InputError, match="give replicates or layers"):
        gradstats.pot(tmp_path / "run.zarr", per_layer=True, replicates=9)
    for r in gradstats.pot(tmp_path / "run.zarr", per_layer=True):
        if r["layer"] in "abc":
            families.setdefault((r["step"], r["rank"], r["kind"]), []).append(r)
    assert len(families) == 8
    for key, family in families.items():
        corrected = holm(np.array([r["p_value"] for r in family]))
        assert [r["p_holm"] for r in family] == corrected.tolist(), key
        assert 0 < min(corrected) < 0.5, key  # of 1 a larger family would make 1 as well
