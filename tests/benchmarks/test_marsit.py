"""The page about Marsit has the stored results."""

from __future__ import annotations

import json
from functools import partial

import marsit
import numpy as np
import pytest
from pages import block
from plateau import told_apart
from ranks import run_ranks
from records import DOCS, stored

from capture.workloads import WORKLOADS, RunConfig


def test_the_page_shows_the_stored_results():
    rows = stored(marsit.FILE)
    page = (DOCS / "systems.md").read_text(encoding="utf-8")
    assert block("marsit", marsit.table([*rows, *marsit.dense()])) in page
    assert block("marsit-own", marsit.own_table(stored(marsit.OWN))) in page
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


@pytest.mark.parametrize("system", marsit.OWN_SYSTEMS)
def test_at_its_own_rate_full_rounds_are_where_the_rate_falls(monkeypatch, system):
    monkeypatch.setattr(marsit, "one", lambda config: config)
    config = marsit.train_own(system, 2, None)
    assert (config.compressor, config.seed) == (system, 2)
    rates = [config.learning_rate_at(step) for step in range(config.setting("steps"))]
    falls = [step for step in range(1, len(rates)) if rates[step] < rates[step - 1]]
    assert rates[0] == 0.03
    assert rates[falls[0]] == pytest.approx(0.003)
    every = config.options.get("full_every")
    assert (every is None) == (system != "marsit")
    if every:
        assert list(range(every, len(rates), every)) == falls[:2]
    training = config.training()
    assert (training.momentum, training.nesterov) == (0.9, None)


@pytest.mark.slow
@pytest.mark.distributed
def test_rounds_are_split_by_system_and_topology():
    seconds = np.array(run_ranks(4, marsit.split, 2, "resnet20-digits"))
    assert seconds.shape == (4, len(marsit.SPLIT), 2, len(marsit.PARTS))
    assert (seconds > 0).all()
    rows = json.loads(marsit.ROUNDS.read_text(encoding="utf-8"))
    assert [(row["system"], row["topology"]) for row in rows] == list(marsit.SPLIT)
    page = (DOCS / "systems.md").read_text(encoding="utf-8")
    assert block("marsit-rounds", marsit.rounds_table(rows)) in page
    assert round(WORKLOADS[marsit.WORKLOAD].parameters / 1e6) == 23
    _, signs, feedback, _, ring, torus = (row["communicate"] for row in rows)
    ms = [f"{1e3 * each:.0f}" for each in (ring, torus, signs, feedback)]
    said = "a ring {} ms, a torus {}, signSGD {}, EF-signSGD {}".format(*ms)
    assert said in (DOCS / "claims.md").read_text(encoding="utf-8")
    assert f"communicates for {torus / ring:.2f} of its time over the ring" in page


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
