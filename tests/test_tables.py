"""Records as tables: numbers, nothing, and what does not fit."""

from __future__ import annotations

import csv
import io
import json
import math
import re

import numpy as np
import pytest
from conftest import DATA
from support.every import every

import gradstats
from gradstats.tables import (
    FORMATS,
    Quality,
    Records,
    format_bytes,
    format_short,
    format_value,
    joined,
    render,
    visible,
)
from gradstats.thresholds.bench import bench


def test_rendering_of_numbers_and_nothing():
    row = {
        "a": 0.123456,
        "b": float("nan"),
        "c": True,
        "d": {"x": 1.5, "loc": 0},
        "e": 1e-7,
        "f": None,
    }
    assert json.loads(render([row], "json"))[0]["b"] is None
    lists = [{"a": [1, math.nan, [math.inf]], "b": {"c": (1.5, math.nan)}}]
    assert json.loads(render(lists, "json")) == [{"a": [1, None, [None]], "b": {"c": [1.5, None]}}]
    assert (
        render([row], "markdown").splitlines()[-1] == "| 0.123 | – | yes | x=1.50 | 1.0e-07 | – |"
    )
    assert render([], "json") == "[]"
    assert render([], "csv") == ""
    for format in ("table", "markdown", "latex"):
        assert isinstance(render([], format), str)


@every(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00099, "9.9e-04"),
        (0.001, "0.0010"),
        (-0.001, "-0.0010"),
        (0.0999, "0.100"),
        (0.099, "0.099"),
        (0.0123, "0.012"),
        (0.1, "0.100"),
        (-0.125, "-0.125"),
        (0.9, "0.900"),
        (1.0, "1.00"),
        (9.87, "9.87"),
        (10.0, "10.0"),
        (99.94, "99.9"),
        (100.0, "100"),
        (1234.5, "1234"),
        (9999.0, "9999"),
        (1e4, "1.0e+04"),
        (-12345.0, "-1.2e+04"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (True, "yes"),
        (False, "no"),
        (12345, "12345"),
        ({"loc": 0.0, "a": 0.05}, "a=0.050"),
        ({"loc": 0.5}, "loc=0.500"),
    ],
)
def test_numbers_have_three_digits_and_two_below_a_tenth(value, text):
    assert format_value(value) == text


def test_in_a_sentence_a_number_has_two_digits_and_no_power_of_ten_that_could_be_spared():
    for value, text in (
        (0.0, "0"),
        (0.0123, "0.012"),
        (9.96, "10"),
        (99.4, "99"),
        (99.5, "100"),
        (99.7, "100"),
        (1234.0, "1,234"),
        (123_456.0, "1.2e+05"),
    ):
        assert format_short(value) == text, value


def test_bytes_have_three_digits_of_the_largest_unit():
    for count, text in (
        (999, "999 bytes"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (999_999, "1 MB"),
        (12_345_678, "12.3 MB"),
        (999_950_000_000, "1 TB"),
    ):
        assert format_bytes(count) == text, count


def test_a_ratio_is_shown_as_it_was_typed():
    rows = [{"ratio": r, "n": r} for r in (0.1, 0.0625, 1e-05)]
    cells = [line.split("|")[1:3] for line in render(rows, "markdown").splitlines()[2:]]
    assert [a.strip() for a, _ in cells] == ["0.1", "0.0625", "1e-05"]
    assert [b.strip() for _, b in cells] == ["0.100", "0.062", "1.0e-05"]


LAYER = "blocks.0.attention.projection.weight"
ROWS = [
    {"layer": LAYER, "params": "c=-0.412 scale=9.8e-04", "tail_error": 0.5, "wasserstein": 0.1 * i}
    for i in (1, 2)
] + [{"layer": "all", "params": "scale=9.8e-04", "tail_error": 1e-9, "wasserstein": 0.3}]


@every("width", range(20, 120))
def test_a_table_keeps_its_width_and_says_what_it_leaves_out(width):
    text = render(ROWS, width=width)
    body, _, left_out = text.partition("Too wide for")
    assert max(map(len, text.splitlines())) <= width
    said = " ".join(left_out.split())
    assert not said or said.startswith(f"{width} columns: ")
    for name, cell in (("tail error", "1.0e-09"), ("wasserstein", "0.300")):
        # a number is whole, or its column is named as left out
        assert (cell in body) != (name in said)


def test_headers_break_before_cells_and_cells_between_words():
    lines = render(ROWS, width=82).splitlines()
    assert any(LAYER in line and "c=-0.412 scale=9.8e-04" in line for line in lines)
    assert not any("tail error" in line for line in lines)
    folded = render(ROWS, width=70).splitlines()
    assert any("c=-0.412" in line and "scale" not in line for line in folded)
    assert "Too wide" not in "".join(folded)


def test_what_every_row_shares_is_said_once():
    rows = [{"kind": "corrected", "ratio": 0.1, "n": i} for i in (1, 2)]
    heading, facts, *table = render(rows, title="A title").splitlines()
    assert (heading, facts) == ("A title", "kind corrected; ratio 0.1")
    assert "corrected" not in "".join(table)
    assert "corrected" in render(rows[:1]).splitlines()[-1]


def test_names_are_no_markup():
    assert "w[0]" in render([{"layer": "w[0]"}, {"layer": "[bold]"}])
    assert "[bold]" in render([{"layer": "w[0]"}, {"layer": "[bold]"}])


def test_color_only_where_wanted():
    assert "\x1b[1m" in render(ROWS, color=True)
    assert "\x1b" not in render(ROWS)


def test_numpy_numbers_read_like_pythons():
    assert format_value(np.float32(28.885788)) == format_value(28.885788) == "28.9"
    assert format_value(np.float64("nan")) == "–"
    assert format_value(np.int64(28)) == "28"


HOSTILE = {
    "formula": "=cmd|' /C calc'!A0",
    "latex": r"\input{/etc/passwd}~^_",
    "markdown": "a|b\n<script>*x*",
    "terminal": "\x1b[2J\x1b]0;title\x07\u202egnp.exe",
}


def test_names_from_outside_do_nothing_but_stand_there():
    records = [{"layer": name, "n": 1} for name in HOSTILE.values()]
    cells = [row[0] for row in csv.reader(io.StringIO(render(records, "csv")))][1:]
    formula, *others, terminal = HOSTILE.values()
    assert cells == [f"'{formula}", *others, visible(terminal)]
    latex = render(records, "latex")
    assert r"\textbackslash{}input\{/etc/passwd\}\textasciitilde{}\textasciicircum{}\_" in latex
    markdown = render(records, "markdown").splitlines()
    assert len(markdown) == 2 + len(HOSTILE)
    assert r"a\|b\\n&lt;script>\*x\*" in markdown[4]
    for format in ("table", "markdown", "latex"):
        assert all(c.isprintable() for c in render(records, format).replace("\n", ""))
    assert json.loads(render(records, "json"))[3]["layer"] == HOSTILE["terminal"]


@pytest.mark.parametrize("begin", "=+-@\t\r")
def test_no_text_is_a_formula_to_a_spreadsheet(begin):
    text = render([{"layer": f"{begin}1+1", "n": -1.5}], "csv")
    assert text.startswith(("layer,n\n'", "layer,n\n\"'"))
    assert text.endswith(",-1.5")


def test_records_are_a_list_and_a_data_frame():
    records = Records([{"layer": "<b>", "scale": 0.000123456}, {"layer": "fc", "scale": math.nan}])
    assert records == [{"layer": "<b>", "scale": 0.000123456}, records[1]]
    frame = records.to_dataframe()
    assert frame["layer"].tolist() == ["<b>", "fc"]
    assert frame["scale"][0] == 0.000123456
    html = records._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert format_value(0.000123456) in html
    assert Records()._repr_html_()


def test_every_public_function_that_returns_records_returns_these():
    data = DATA / "resnet20-ef.zarr"
    one = {"ratios": (0.01,), "steps": [10]}
    for made in (
        gradstats.quality(data, estimators=["exact"], **one),
        gradstats.quality_series(data, estimators=["exact"], **one),
        gradstats.stage_budget(data, estimators=["sidco-e"], **one),
        gradstats.compression(data),
        bench([1000], [0.1], estimators=["exact"], repeats=1, references=False),
    ):
        assert isinstance(made, Records)
        assert len(made.to_dataframe()) == len(made)


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "parquet"])
def test_no_format_writes_control_characters(format):
    records = Records([{"layer": "a\x1b[31m", "n": 1}, {"layer": "\x9b2J\u202eb", "n": 2}])
    for text in (render(records, format), records._repr_html_(), repr(records)):
        assert not set(text) & set("\x1b\x9b\u202e")


def test_a_table_of_latex_has_caption_label_and_the_letters_of_the_screen():
    x = np.random.default_rng(0).laplace(size=5000)
    fits = gradstats.fit_all(x, ["laplace", "double_genpareto", "dgamma"])
    text = fits.to_latex(caption="Laws of 5 % of it", label="tab:my_fits")
    assert r"\caption{Laws of 5 \% of it. method closed.}" in text  # what all rows share
    assert r"\label{tab:my_fits}" in text
    head = next(line for line in text.splitlines() if line.startswith("model"))
    assert head == r"model & shape & scale & ks & tail error & $\Delta$AIC \\"
    rows = [line.split(" & ") for line in text.splitlines() if line.count("&") == head.count("&")][
        1:
    ]
    assert [row[0].replace("\\", "") for row in rows] == [f.model for f in fits]
    summary = fits.summary()
    for row, aic in zip(rows, summary["delta_aic"], strict=True):
        cell = row[-1].rstrip(" \\")
        assert cell == "--" if math.isnan(aic) else float(cell) == pytest.approx(aic, rel=0.01)
    assert len({len(row[3].partition(".")[2]) for row in rows}) == 1  # decimals alike
    assert not re.search(r"(?<![\w$])-\d", text)  # no hyphen for a minus
    one = gradstats.fit(x, "double_genpareto")
    assert r"$\xi$" in one.to_latex()
    assert "ξ" in one._repr_html_()
    assert "<th>scale</th>" in one._repr_html_()  # and not that of peaks over a threshold


@pytest.mark.parametrize("name", ["mean", "noise_scale", "seconds", "p"])
def test_numbers_with_an_interval_keep_it_in_latex(name):
    low, high = ("low", "high") if name != "p" else ("p_low", "p_high")
    rows = Records(
        [
            {"layer": "a", name: 1.02, low: 0.98, high: 1.06},
            {"layer": "b", name: 1.0312, low: 1.0301, high: 1.0324},
        ]
    )
    lines = [line.removesuffix(r" \\") for line in rows.to_latex().splitlines() if " & " in line][
        1:
    ]
    assert [line.split(" & ")[1] for line in lines] == [row[name] for row in joined(rows)]
    assert all(" to " in line for line in lines)


def test_files_of_tables_name_things_as_the_screen():
    rows = [
        {"model": "a", "c": -0.5, "delta_aic": 1e-7},
        {"model": "b", "c": 0.25, "delta_aic": 2.0},
    ]
    latex = render(rows, "latex")
    assert r"model & $\xi$ & $\Delta$AIC" in latex
    assert r"a & $-$0.500 & $1.0\cdot10^{-7}$" in latex
    assert render(rows, "markdown").startswith("| model | ξ | ΔAIC |")
    assert "ξ" in render(rows)
    assert list(json.loads(render(rows, "json"))[0]) == ["model", "c", "delta_aic"]
    same = render([r | {"rank_": 0} for r in rows], "latex").splitlines()
    assert same[-1] == r"% the same in all rows: rank  0"
    assert "rank" not in "".join(same[:-1])


def test_decimals_are_alike_in_a_column_of_one_size():
    rows = [
        {"x": v, "far": w}
        for v, w in ((0.0071, 1.0), (0.0106, 12.5), (0.45, 0.0012), (math.nan, 0))
    ]
    cells = [line.split("|")[1:3] for line in render(rows, "markdown").splitlines()[2:]]
    assert [a.strip() for a, _ in cells] == ["0.0071", "0.0106", "0.4500", "–"]
    assert [b.strip() for _, b in cells] == ["1.00", "12.5", "0.0012", "0"]


def test_times_are_in_milliseconds_for_people_and_in_seconds_for_programs():
    rows = [
        {"compressor": n, "seconds": s, "select": 1e-4 * s, "low": s / 2}
        for n, s in (("a", 0.02), ("b", 12.5))
    ]
    text = render(rows, "markdown").splitlines()
    assert text[0] == "| compressor | ms | select ms | low |"
    assert text[2] == "| a | 20.0 | 0.0020 | 10.0 |"
    assert text[3] == "| b | 12500 | 1.25 | 6250 |"
    assert json.loads(render(rows, "json"))[0]["seconds"] == 0.02
    assert joined([{"mean": 2.0, "low": 1.0, "high": 3.0, "n": 1}])[0]["mean"] == "2.0 (1.0 to 3.0)"


def test_times_of_a_latex_table_are_those_of_the_terminal():
    """Seconds are shown in milliseconds, also where a column is brought to the same decimals."""
    found = Records(
        {"rule": name, "select": time, "compute": 2 * time, "threshold": 10 * time}
        for name, time in (("a", 0.0012345), ("b", 0.012345), ("c", 0.08))
    )
    lines = found.to_latex().splitlines()
    cells = [line.removesuffix(r" \\").split(" & ") for line in lines if " & " in line]
    assert cells == [
        ["rule", "select ms", "compute ms", "threshold"],
        ["a", "1.23", "2.47", "0.012"],
        ["b", "12.35", "24.69", "0.123"],
        ["c", "80.00", "160.00", "0.800"],
    ]
    terminal = [line.split() for line in render(found).splitlines()]
    assert [row for row in terminal if row and row[0] in "abc"] == cells[1:]


def test_a_figure_of_qualities_is_of_the_first_trace_kind_and_layer(monkeypatch):
    """Points of others would stand over the same ticks, under the same names."""
    drawn = []
    monkeypatch.setattr(
        Quality, "_draw", lambda self, name, rows, *, ax, title: drawn.append((name, rows, title))
    )
    labels = [
        {"trace": trace, "kind": kind, "layer": layer}
        for trace in ("one", "two")
        for kind in ("gradient", "update")
        for layer in ("all", "fc")
    ]
    found = [each | {"ratio": ratio, "mean": 1.0} for ratio in (0.1, 0.01) for each in labels]
    for i, each in enumerate(labels):
        Quality(found[i:] + found[:i]).plot()
        name, rows, title = drawn[-1]
        assert name == "quality_bars"
        assert title == ", ".join(n for n in each.values() if n != "all")
        assert sorted(r["ratio"] for r in rows) == [0.01, 0.1]
        assert all(r.items() >= each.items() for r in rows)
