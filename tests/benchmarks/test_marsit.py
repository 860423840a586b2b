"""The page about Marsit has the stored results."""

from __future__ import annotations

import json
from functools import partial

import marsit
import pytest
from pages import block
from plateau import told_apart
from records import DOCS, stored

from capture.workloads import RunConfig


def test_the_page_shows_the_stored_results():
    rows = stored(marsit.FILE)
    page = (DOCS / "systems.md").read_text(encoding="utf-8")
    assert block("marsit", marsit.table([*rows, *marsit.dense()])) in page
    times = json.loads(marsit.TIMES.read_text(encoding="utf-8"))
    assert block("marsit-times", marsit.times_table(times)) in page
    assert {(row["full_every"], row["seed"]) for row in rows} == {
        (every, seed) for every in marsit.EVERY for seed in range(marsit.SEEDS)
    }
    for (
        row
    ) in rows:  # what a full round sends: 32 bits instead of one, beside eight bytes about zeros
        full = len(range(0, row["steps"], row["full_every"])) if row["full_every"] else 0
        share = full / row["steps"]
        assert row["bits"] == pytest.approx(1 + 31 * share, rel=5e-3)


@pytest.mark.parametrize(("full_every", "bits"), [(None, 1), (5, 1 + 31 / 5)])
def test_bits_are_counted_per_element_and_hop(monkeypatch, full_every, bits):
    def one(config):
        """Return what every rank of a ring sends: 2(n − 1)/n times the bits of all elements."""
        assert (config.compressor, config.options) == ("marsit", {"full_every": full_every})
        hops = 2 * (config.nproc - 1) / config.nproc
        return {"bytes": hops * bits * config.info.parameters / 8, "loss": 1.0}

    monkeypatch.setattr(marsit, "one", one)
    monkeypatch.setattr(marsit, "RunConfig", partial(RunConfig, nproc=4))
    row = marsit.train(full_every, 3, None)
    assert row["full_every"] == full_every
    assert row["bits"] == pytest.approx(bits)


def test_what_the_page_says_of_k():
    found = {(row["full_every"], row["seed"]): row for row in stored(marsit.FILE)}

    def differs(k, name):
        """Return the sign of the difference from never, paired by seed; 0 where its interval holds 0."""
        return told_apart(
            [found[k, seed][name] - found[None, seed][name] for seed in range(marsit.SEEDS)]
        )

    assert differs(5, "loss") == -1
    assert [differs(k, "accuracy") for k in (25, 50)] == [-1, -1]
    assert [differs(k, "loss") for k in (25, 50)] == [1, 1]
    assert [differs(k, n) for k in (10, 100) for n in ("loss", "accuracy")] == [0] * 4
