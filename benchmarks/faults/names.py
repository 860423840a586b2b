"""Names from outside, in every format that is written: shown, and never taken for markup, formulas or commands."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from rich.console import Console

from gradstats.report import write_report
from gradstats.tables import Records, render
from gradstats.trace import Layer, TraceWriter, create_trace

PIECES = [
    *("=cmd|' /C calc'!A0", "+1", "-2", "@SUM(A1)", "\t=1", "\\input{/etc/passwd}", "$x^2$", "100 %"),
    *("~", "^", "{", "}", "&", "#", "_", "\\", "|", "`", "*", "[a](javascript:x)", "<script>alert(1)</script>"),
    *("</td>", "<img src=x onerror=y>", '"', "'", "\n", "\r", "\x1b[31m", "\x1b]0;t\x07", "\x00", "\x9b2J"),
    *("\u202e", "\u2066", "\u200b", "é", "漢字", "🙂", "layer.weight", "0", " ", "a" * 200, "{{x}}", "%s"),
]  # fmt: skip


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.choice([1, 1, 2, 4])))


class _Tags(HTMLParser):
    """Collects tags, and attributes that run code."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.running: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.append(tag)
        self.running += [name for name, _ in attrs if name.startswith("on")]


def _no_controls(text: str) -> None:
    bad = {c for c in text if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"}
    assert not bad, [f"{ord(c):04x}" for c in bad]


def tables(number: int, folder: Path) -> str:
    """Render a table whose texts are hostile in every format, and read it back."""
    rng = random.Random(number)
    records = [{"layer": _name(rng), "source": _name(rng), "value": float(i)} for i in range(3)]
    assert json.loads(render(records, "json"))[0]["layer"] == records[0]["layer"]
    rows = list(csv.reader(io.StringIO(render(records, "csv"))))
    assert len(rows) == 4, rows
    for row in rows[1:]:
        assert len(row) == 3, row
        _no_controls("".join(row).replace("\t", ""))
        for cell in row[:2]:
            assert not cell.lstrip("\t\r\n ").startswith(("=", "+", "-", "@")), cell
    text = render(records, "markdown")
    _no_controls(text)
    lines = text.strip().split("\n")
    assert len(lines) == 5, text
    assert all(line.replace("\\|", "").count("|") == 4 for line in lines), text
    assert not re.search("<script|<img", text), text
    latex = render(records, "latex")
    _no_controls(latex)
    assert "\\input" not in latex, latex
    _no_controls(Records(records)._repr_html_())
    shown = render(records, "table")
    _no_controls(shown)
    Console(file=io.StringIO()).print(shown, markup=False)
    return "escaped"


def report(number: int, folder: Path) -> str:
    """Write a report about layers whose names are hostile: it has the tags of one with plain names."""
    rng = random.Random(number)
    hostile = [f"{i}{_name(rng)}" for i in range(3)]
    plain = ["a", "b", "c"]
    assert _tags(folder, number, hostile, _name(rng)) == _tags(folder, number, plain, "linear")
    return "escaped"


def _tags(folder: Path, number: int, names: list[str], model: str) -> set[str]:
    layers = [Layer(name, 500 * i, (500,)) for i, name in enumerate(names)]
    path, page = folder / "run.zarr", folder / "report.html"
    create_trace(path, layers, metadata={"model": model}, overwrite=True)
    writer = TraceWriter(path, 0)
    for step in range(3):
        g = np.random.default_rng([number, step]).laplace(size=1500).astype("f4")
        writer.append(step, {"gradient": g}, loss=1.0)
    writer.close()
    write_report([path], page)
    parser = _Tags()
    parser.feed(page.read_text(encoding="utf-8"))
    assert not parser.running, parser.running
    return set(parser.tags)
