"""The parts of RedSync's step: each has its own time, and all of them are found in a real training."""

from __future__ import annotations

from itertools import pairwise, product

import parts
import pytest
from pages import block
from ranks import run_ranks
from records import DOCS, stored

from gradstats.collectives import packed


def test_a_part_has_the_time_of_what_it_does_itself(monkeypatch):
    clock = iter((0, 1, 3, 10, 20, 25))  # outer begins, inner from 1 to 3, outer ends; another
    monkeypatch.setattr(parts.time, "thread_time", lambda: next(clock))
    found = parts.Parts()
    inner = found.timed("select", lambda x: x + 1)
    outer = found.timed("pack", lambda x: 2 * inner(x))
    assert outer(3) == 8
    assert found.seconds == {"pack": 8, "select": 2}
    assert inner(1) == 2  # after it, nothing is inside anything
    assert found.seconds == {"pack": 8, "select": 7}


def test_a_part_that_fails_has_its_time_and_leaves_the_next_alone(monkeypatch):
    clock = iter((0, 1, 4, 6, 7, 9))
    monkeypatch.setattr(parts.time, "thread_time", lambda: next(clock))
    found = parts.Parts()
    bad = found.timed("pack", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        found.timed("mask", bad)()
    assert found.seconds == {"pack": 3, "mask": 3}
    assert found.timed("select", int)() == 0
    assert found.seconds["select"] == 2


@pytest.mark.distributed
@pytest.mark.parametrize("quantise", [False, True])
def test_every_part_is_found_in_a_training(quantise):
    before = packed.pack, packed.SparseAllGather.rounded
    for seconds in run_ranks(2, parts.train, "resnet20-digits", quantise, 1, 2):
        assert all(0 < seconds[part] < 1 for part in parts.PARTS), seconds
    with parts.Parts().watched():
        assert packed.pack is not before[0]
    assert (packed.pack, packed.SparseAllGather.rounded) == before


def test_unpacking_grows_with_the_workers_as_the_pages_say():
    rows = stored(parts.FILE)
    assert block("parts", parts.table(rows)) in (DOCS / "systems.md").read_text("utf-8")
    for (workload, workers), quantise in product(parts.WORKERS.items(), (False, True)):
        case = workload, quantise
        own = [row for row in rows if (row["workload"], row["quantise"]) == case]
        assert tuple(row["workers"] for row in own) == workers
        for few, more in pairwise(own):
            assert more["unpack"] > 1.1 * few["unpack"], case
            for part in ("mask", "select", "pack"):
                assert more[part] < 1.3 * few[part], (case, part)
