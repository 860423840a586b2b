"""The table of codecs: the page shows what was stored, and what was stored is what the code does."""

from __future__ import annotations

import wire_codecs as codecs

ROWS = codecs.stored(codecs.FILE)


def test_the_page_shows_what_was_stored():
    page = codecs.PAGE.read_text(encoding="utf-8")
    for mark, text in codecs.tables(ROWS).items():
        assert f"<!-- {mark} -->\n{text}\n<!-- /{mark} -->" in page, mark


def test_bits_and_errors_on_the_traces_are_those_stored():
    assert codecs.bits() == [row for row in ROWS if row["what"] == "bits"]


def test_coded_positions_are_near_their_entropy_and_never_longer_than_their_room():
    for row in ROWS:
        if row["what"] == "bits":
            assert row["entropy"] < row["rice"] <= row["wire"] < 1.1 * row["entropy"]
            assert row["int8"] < row["int4"] < row["int2"] < 1


def test_codecs_in_the_lab_halve_the_bytes_at_the_same_loss():
    rows = codecs.stored(codecs.LAB)
    assert [(r["rate"], r["indices"], r["values"]) for r in rows] == [
        (rate, *wire) for rate in codecs.LAB_RATES for wire in codecs.WIRE
    ]
    page = codecs.PAGE.read_text(encoding="utf-8")
    assert f"<!-- codec lab -->\n{codecs.lab_table(rows)}\n<!-- /codec lab -->" in page
    for rate in codecs.LAB_RATES:
        plain, rice, half, byte = (r for r in rows if r["rate"] == rate)
        assert rice["losses"] == plain["losses"]  # bit for bit
        assert byte["bytes"] < half["bytes"] < 0.5 * plain["bytes"]
        assert abs(half["losses"][-1] / plain["losses"][-1] - 1) < 0.01
