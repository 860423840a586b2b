"""Gradients late in a training: what is said of them, and that no training is repeated."""

from __future__ import annotations

import late
import numpy as np
import pytest
from pages import block
from records import DOCS, stored

from capture.workloads import RunConfig


def test_concentration_in_closed_form():
    gradient = np.ones(1000, np.float32)
    gradient[::2] = -1
    gradient[:10] = 30.0
    found = late.describe(gradient)
    assert found["largest"] == pytest.approx(9000 / 9990)
    assert found["peak"] == pytest.approx(30 / 1.29)
    assert {*late.SIDS} <= {*found}


def test_the_law_of_the_gradient_is_nearest():
    gradient = np.random.default_rng(0).laplace(size=100_000).astype(np.float32)
    assert late.describe(gradient)["laplace"] < 0.01
    normal = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    assert late.describe(normal)["laplace"] > 0.05
    assert late.describe(normal)["peak"] < late.describe(gradient)["peak"]


@pytest.mark.slow
@pytest.mark.distributed
def test_trainings_are_stored_and_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(late, "FILE", tmp_path / "late.jsonl")
    monkeypatch.setattr(late, "RunConfig", lambda **rest: RunConfig(**rest, batch_size=4))

    def main():
        work = tmp_path / "work"
        arguments = f"late.py resnet20-digits --work {work} --steps 1 3".split()
        monkeypatch.setattr("sys.argv", arguments)
        late.main()
        return stored(late.FILE)

    rows = main()
    assert [(r["feedback"], r["step"]) for r in rows] == [
        (False, 1), (False, 3), (True, 1), (True, 3),
    ]  # fmt: skip
    assert rows[0] != rows[2]
    assert "| `resnet20-digits` | with | 3 |" in capsys.readouterr().out
    monkeypatch.setattr(late, "run", lambda config: pytest.fail("again"))
    assert main() == rows


def test_the_page_shows_the_stored_rows():
    page = (DOCS / "theory.md").read_text(encoding="utf-8")
    assert block("late", late.table(stored(late.FILE))) in page


def test_what_the_page_says_of_the_largest():
    found = {(r["feedback"], r["step"]): f"{100 * r['largest']:.0f}" for r in stored(late.FILE)}
    page = " ".join((DOCS / "theory.md").read_text(encoding="utf-8").split())
    assert (
        f"the largest 1 % have {found[False, 100]} % of its squared norm at step 100 and "
        f"{found[False, 1000]} % at step 1,000. With it they have {found[True, 100]} and {found[True, 1000]} %"
    ) in page
