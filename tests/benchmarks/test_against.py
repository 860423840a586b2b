"""A checkout against itself: every kind of case runs, and a row says both times."""

from __future__ import annotations

import against
import pytest
from conftest import ROOT


@pytest.mark.slow
def test_a_checkout_against_itself():
    names = ["exact 64 at 0.1", "torch.topk 64 at 0.1", "signs: ssdm", "step of a hook"]
    names += ["captured step, sketches", "sidco-e 4,096 at 0.01"]
    assert set(names) <= set(against.cases())
    rows = against.measure([ROOT, ROOT], names, rounds=2)
    assert [r["case"] for r in rows] == names
    for r in rows:
        assert 0 < r["low"] <= r["ratio"] <= r["high"]
        assert r["old_us"] > 0
        assert r["new_us"] > 0


def test_a_checkout_that_takes_twice_as_long_has_a_ratio_of_two(tmp_path, monkeypatch):
    stub = tmp_path / "stub.py"
    stub.write_text(
        "import os, sys\n"
        "for line in sys.stdin:\n"
        "    print(2e-6 if os.environ['PYTHONPATH'].endswith('new') else 1e-6, flush=True)\n"
    )
    monkeypatch.setattr(against, "__file__", str(stub))
    (row,) = against.measure([tmp_path / "old", tmp_path / "new"], ["a case"], rounds=3)
    assert (row["ratio"], row["old_us"], row["new_us"]) == (2, 1, 2)
