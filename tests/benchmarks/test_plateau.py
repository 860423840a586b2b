"""Runs to a plateau: what is compared with what, what is stored, and that no run is repeated."""

from __future__ import annotations

import math

import plateau
import pytest
from records import stored

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
    assert "+0.00 ± inf |" in lines[4]
    assert "0 of 1 | diverged" in lines[5]
    assert lines[-1].startswith("Standard deviation of dense over its 3 seeds: 10.00")


def test_every_compressor_meets_every_ratio_once():
    runs = list(plateau.settings(plateau.SYSTEMS, (0.1, 0.01, 0.001)))
    assert len(runs) == len(set(runs)) == 3 + 3 * (len(plateau.SYSTEMS) - 3)
    assert [name for name, ratio in runs if ratio == 1.0] == ["none", "dense-bf16", "marsit"]


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
