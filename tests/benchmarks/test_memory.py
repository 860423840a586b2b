"""Memory of commands: the page shows what was stored, and the program sees what a process allocates."""

from __future__ import annotations

import json
import sys

import memory
from records import DOCS


def test_the_page_shows_what_was_stored():
    rows = json.loads(memory.FILE.read_text(encoding="utf-8"))
    page = (DOCS / "measurements.md").read_text(encoding="utf-8")
    assert f"<!-- memory -->\n{memory.table(rows)}\n<!-- /memory -->" in page
    found = [(r["format"], r["numel"], r["command"]) for r in rows]
    assert found == [
        (f, n, c) for f in memory.FORMATS for n in memory.SIZES for c in memory.COMMANDS
    ]


def test_what_a_process_allocates_is_seen():
    few, many = (
        memory.megabytes(sys.executable, "-c", f"x = bytearray({n}); import time; time.sleep(0.3)")
        for n in (0, 100_000_000)
    )
    assert 95 < many - few < 110
