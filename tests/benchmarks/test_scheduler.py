"""A trace in a bucket, read in one process and by workers: the page has the stored rows, and these say what it says."""

from __future__ import annotations

import mmap
from pathlib import Path

import psutil
import pytest
import scheduler
from pages import block
from records import DOCS, stored

ROWS = stored(scheduler.FILE)
PAGE = (DOCS / "statistics.md").read_text(encoding="utf-8")


def test_the_page_shows_the_stored_rows():
    assert block("scheduler", scheduler.table(ROWS)) in PAGE


def test_every_command_prints_the_same_in_every_way():
    cases = {}
    for row in ROWS:
        cases.setdefault((row["trace"], row["command"]), {})[row["way"]] = row
    assert cases.keys() == {(t, c) for t in scheduler.TRACES for c in scheduler.COMMANDS}
    assert cases
    for case, ways in cases.items():
        assert ways.keys() == set(scheduler.WAYS), case
        assert len({row["output"] for row in ways.values()}) == 1, case
        # the command fetches a trace once, whoever works on it
        assert ways[scheduler.BUCKET]["bytes"] == ways[scheduler.CLUSTER]["bytes"] > 0, case
        assert ways[scheduler.CLUSTER]["worker_cpu"] > 0, case


def test_another_output_is_said():
    rows = [{**row, "output": row["way"]} for row in ROWS]
    assert scheduler.table(rows).count("**another**") == len(ROWS) // 2 > 0


def test_what_is_read_from_the_server_is_counted():
    def application(environ, start_response):
        yield b"four"
        yield b"more"

    counted = scheduler.Counted(application)
    for method in ("GET", "PUT", "GET"):
        assert b"".join(counted({"REQUEST_METHOD": method}, None)) == b"fourmore"
    assert (counted.requests, counted.bytes) == (2, 16)


def test_a_worker_says_its_peak_since_it_was_asked_before():
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    if scheduler.peak_of("self") > psutil.Process().memory_info().rss / 1e6 + 60:
        pytest.skip("the kernel does not forget a process's peak")
    seconds, _ = scheduler.used(fresh=True)
    held = mmap.mmap(-1, 200_000_000)  # what malloc gets back it may keep
    held[::4096] = b"x" * len(held[::4096])
    after, peak = scheduler.used()
    held.close()
    scheduler.used(fresh=True)
    again = scheduler.used()[1]
    assert after >= seconds
    assert again == pytest.approx(peak - 200, abs=60)
