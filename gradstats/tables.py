"""Flat records as tables: for the terminal, a paper or a program."""

# Size: a third of its lines are docstrings; five formats of a table stand side by side, with what they share.

from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from html import escape
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from gradstats.errors import GradstatsError, InputError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "FORMATS",
    "Drift",
    "Format",
    "Plan",
    "Quality",
    "Record",
    "Records",
    "Shown",
    "alike",
    "format_bytes",
    "format_short",
    "format_uncertain",
    "format_value",
    "joined",
    "parquet",
    "render",
    "visible",
]

Record: TypeAlias = Mapping[str, Any]
Format: TypeAlias = Literal["table", "json", "csv", "markdown", "latex", "parquet"]
_LABELS = {"trace", "step", "rank", "kind", "layer", "estimator", "model", "ratio"}
_LABELS |= {"quantity", "numel", "window", "n", "threads"}
_HEADERS = {
    "c": "ξ",
    "c_low": "ξ low",
    "c_high": "ξ high",
    "scale": "σ − ξu",
    "scale_low": "σ − ξu low",
    "scale_high": "σ − ξu high",
    "delta_aic": "ΔAIC",
    "seconds": "ms",
    "select": "select ms",
    "communicate": "communicate ms",
    "overlapped": "overlapped ms",
    "compute": "compute ms",
    "rate": "Mbit/s",
    "slope": "slope per 100 steps",
    "acf1": "autocorrelation",
}
"""Headings of terminal tables where a field's name has no unit or is SciPy's."""
_TIMES = ("seconds", "select", "communicate", "overlapped", "compute")
"""Fields in seconds, which tables for people have in milliseconds."""
_ANSWERS = {"compressible"}
"""Fields of which nothing is an answer, too."""
_LONGEST = 30  # characters that a word, such as a layer's name, may have before it is broken
_ALIKE = 100
"""Largest number ÷ smallest of a column up to which all have the same decimals."""
_SHOWN = 12
"""Records that a list of them shows in a terminal."""
_OWNERS = ("mean", "noise_scale", "seconds")
"""Fields to which a record's ``low`` and ``high`` belong."""
FORMATS: tuple[Format, ...] = get_args(Format)


class Shown:
    """A result that shows itself: in a line, as a table in notebooks, as a data frame, as a figure."""

    __slots__ = ()
    _caption: ClassVar[str] = ""
    """What the result is, for captions; the name of its class if empty."""
    figures: ClassVar[Callable[[str], Callable[..., Any]]]
    """Function that finds a figure by name; the package sets it, since figures are drawn above the tables."""

    def _rows(self) -> Sequence[Record]:
        """Return the table as records."""
        raise NotImplementedError

    def summary(self) -> pd.DataFrame:
        """Return the result as a data frame, with all digits.

        Returns
        -------
        pandas.DataFrame
            A row for each thing described, a column for each field.
        """
        import pandas as pd

        return pd.DataFrame(list(self._rows()))

    def __repr__(self) -> str:
        rows = joined(self._rows())
        cells = [
            f"{n} {text}" for n, text in (rows[0] if rows else {}).items() if text not in ("", "–")
        ]
        more = f"; {len(rows) - 1} more" if len(rows) > 1 else ""
        return f"<{type(self).__name__}: {', '.join(cells)}{more}>"

    def _repr_html_(self) -> str:
        """Return the table that Jupyter shows."""
        import pandas as pd

        rows = joined(self._rows())
        names, shared_text = _said_once(list(rows[0]) if rows else [], rows)
        labels = {name: visible(_header(name, names)) for name in names}
        shown = [{n: visible(v) if isinstance(v, str) else v for n, v in r.items()} for r in rows]
        frame = pd.DataFrame(shown, columns=names).rename(columns=labels)
        table: str = frame.to_html(max_rows=60, index=False)
        return f"<p>{escape(shared_text)}</p>\n{table}" if shared_text else table

    def to_latex(self, caption: str | None = None, label: str | None = None) -> str:
        r"""Return the result as a table of LaTeX, with what notebooks show: intervals, and headings with their letters.

        Parameters
        ----------
        caption : str, optional
            Caption, as plain text; what the result is if None. What all rows share is said at its end, and has no
            column.
        label : str, optional
            Label for ``\ref``; ``tab:`` and the result's name if None.

        Returns
        -------
        str
            A ``table`` environment. It needs the package ``booktabs``.
        """
        rows = joined(self._rows())
        names, shared_text = _said_once(list(rows[0]) if rows else [], rows)
        values = [_in_ms(record) for record in self._rows()]
        # milliseconds, as in the cells of `rows`
        columns = [
            alike([v[n] for v in values], [row[n] for row in rows])
            if n not in _intervals(values[0])
            # a cell with its interval has its digits already
            else [row[n] for row in rows]
            for n in names
        ]
        cells = [list(row) for row in zip(*columns, strict=True)]
        # right-aligned if every cell begins like a number, or is the dash for none
        numeric = [all(re.match(r"[-–\d]", row[n]) for row in rows) for n in names]
        heads = [_header(name, names) for name in names]
        name = type(self).__name__
        texts = [caption if caption is not None else self._caption or name, shared_text]
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                f"\\caption{{{_tex('. '.join(t.rstrip('.') for t in texts if t))}.}}",
                f"\\label{{{label or f'tab:{name.lower()}'}}}",
                _latex(heads, cells, numeric),
                r"\end{table}",
            ]
        )

    def _draw(self, figure: str, *arguments: Any, ax: Axes | None, **options: Any) -> Axes:
        """Draw a figure of :mod:`gradstats.plots`, on axes of its own where none are given."""
        if ax is None:
            from matplotlib import pyplot as plt

            ax = plt.subplots(layout="constrained")[1]
        drawn: Axes = type(self).figures(figure)(*arguments, ax=ax, **options)
        return drawn


class Records(list[dict[str, Any]], Shown):
    """Flat records of the same fields: a list that shows itself as a table."""

    def _rows(self) -> Sequence[Record]:
        return self

    def __repr__(self) -> str:
        """Return the table of the first records."""
        if not self:
            return f"{type(self).__name__}([])"
        more = f"\n… {len(self) - _SHOWN} more" if len(self) > _SHOWN else ""
        return (
            render(joined(self[:_SHOWN]), title=f"{len(self)} record{'s' * (len(self) != 1)}")
            + more
        )

    def to_dataframe(self) -> pd.DataFrame:
        """Return the records as a data frame.

        Returns
        -------
        pandas.DataFrame
            A row for each record, a column for each field.
        """
        return self.summary()


class Quality(Records):
    """Records of :func:`gradstats.quality`."""

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw k̂/k of the first trace, kind and layer: :func:`gradstats.plots.quality_bars`.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; new ones by default.
        **options : object
            Options of the figure, such as ``title``.

        Returns
        -------
        matplotlib.axes.Axes
            The axes.
        """
        labels = ("trace", "kind", "layer")
        one = [r for r in self if all(r.get(n) == self[0].get(n) for n in labels)]
        shown = [str(self[0][n]) for n in labels if self and self[0].get(n) not in (None, "all")]
        options.setdefault("title", ", ".join(shown))
        return self._draw("quality_bars", one, ax=ax, **options)


class Drift(Records):
    """Records of how a run's quantities move, and the data set that they were made of.

    Attributes
    ----------
    dataset : xarray.Dataset
        Data set of :func:`gradstats.over_training`, of the quantities that were followed.
    """

    dataset: Any = None

    def plot(self, quantity: str = "mean", ax: Axes | None = None, **options: Any) -> Axes:
        """Draw a quantity of the first kind and layer over the steps: :func:`gradstats.plots.drift`.

        Parameters
        ----------
        quantity : str
            Variable of the data set.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; new ones by default.
        **options : object
            Options of the figure, such as ``title``.

        Returns
        -------
        matplotlib.axes.Axes
            The axes.
        """
        one = self.dataset.isel(kind=0, layer=0)
        options.setdefault("title", f"{one.attrs.get('source')}, {one['kind'].item()}")
        return self._draw("drift", one, quantity, ax=ax, **options)


class Plan(Records):
    """Records of a plan: predicted times of a step."""

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the speed-ups: :func:`gradstats.plots.speedup`.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; new ones by default.
        **options : object
            Options of the figure, such as ``title``.

        Returns
        -------
        matplotlib.axes.Axes
            The axes.
        """
        return self._draw("speedup", self, ax=ax, **options)


def joined(records: Sequence[Record]) -> list[dict[str, str]]:
    """Return records as texts, each number with its interval, in the digits that the interval leaves.

    Parameters
    ----------
    records : sequence of mapping
        Records. A field ``x`` beside ``x_low`` and ``x_high`` takes these in; ``low`` and ``high`` go to the mean, the
        noise scale or the seconds, where these have no interval of their own.

    Returns
    -------
    list of dict of str
        The same records with fewer fields.

    Examples
    --------
    >>> joined([{"p": 0.83412, "p_low": 0.81377, "p_high": 0.85447, "n": 12}])
    [{'p': '0.834 (0.814 to 0.854)', 'n': '12'}]
    """
    rows = []
    # converted first, since a number and its interval must have the same unit
    for record in map(_in_ms, records):
        ends = _intervals(record)
        taken = {end for pair in ends.values() for end in pair}
        rows.append(
            {
                n: format_uncertain(value, *(record[end] for end in ends[n]))
                if n in ends
                else _cell(
                    n, "; ".join(map(str, value)) if isinstance(value, tuple | list) else value
                )
                for n, value in record.items()
                if n not in taken
            }
        )
    return rows


def _intervals(record: Record) -> dict[str, tuple[str, str]]:
    """Return the fields that have an interval, with the names of its ends."""
    ends = {
        n: (f"{n}_low", f"{n}_high")
        for n in record
        if f"{n}_low" in record and f"{n}_high" in record
    }
    # `low` and `high` alone belong to one field: the first of these without an interval of its own
    owner = next((n for n in _OWNERS if n in record and n not in ends), "")
    if owner and "low" in record and "high" in record:
        ends[owner] = ("low", "high")
    return ends


def format_uncertain(value: Any, low: Any, high: Any) -> str:
    """Shorten a number to the digits that its interval leaves: two of half the interval's width.

    Parameters
    ----------
    value : float or None
        The number.
    low, high : float or None
        Ends of its interval. NaN or None for none, infinite for an open end.

    Returns
    -------
    str
        Such as ``"0.834 (0.814 to 0.854)"``; the number alone where there is no interval.
    """
    numbers = [math.nan if v is None else float(v) for v in (value, low, high)]
    # an open end is infinite, and none at all is NaN
    if math.isnan(numbers[0]) or any(map(math.isnan, numbers[1:])):
        return format_value(value)
    finite = [abs(v) for v in numbers if math.isfinite(v)]
    # an interval without a width says nothing about digits
    half = (numbers[2] - numbers[1]) / 2
    if not math.isfinite(half) or half <= 0 or not finite:
        return f"{format_value(value)} ({format_value(low)} to {format_value(high)})"
    # one power of ten for all three numbers, from 10^4 on and below 10^-3, as in format_value
    size = math.floor(math.log10(max(finite)))
    power = size if not -3 <= size < 4 else 0
    # down to the second digit of half the width; a float64 has 15 digits
    digits = min(max(1 - math.floor(math.log10(half)) + power, 0), 15)
    shown, *ends = (f"{v / 10.0**power:.{digits}f}" for v in numbers)
    return f"{shown} ({' to '.join(ends)})" + (f"·10^{power}" if power else "")


def render(
    records: Sequence[Record],
    format: Format = "table",
    *,
    columns: Sequence[str] | None = None,
    title: str | None = None,
    width: int = 80,
    color: bool = False,
    caption: Sequence[str] = (),
) -> str:
    """Render records of the same fields.

    Parameters
    ----------
    records : sequence of mapping
        Flat records. The first one's fields are the columns, in order.
    format : Format, optional
        ``json`` is a list of objects with every field, NaN and infinities as null; ``csv`` has every field; ``table``
        (for a terminal), ``markdown`` and ``latex`` show `columns` with numbers shortened. A terminal table says once,
        above it, what all rows share, and leaves out columns that hold nothing. ``parquet``, which is no text, is what
        :func:`parquet` makes.
    columns : sequence of str, optional
        Fields shown in the last three formats; all by default.
    title : str, optional
        Heading of a terminal table.
    width : int, optional
        Width of a terminal table in characters. Columns that do not fit are left out from the right, and named below
        the table.
    color : bool, optional
        Whether a terminal table keeps its colours.
    caption : sequence of str, optional
        Fields that a terminal table of one record says above it, too.

    Returns
    -------
    str
        Text without a final newline.

    Raises
    ------
    InputError
        If the format is ``parquet``, which is no text.
    """
    if format == "json":
        # NaN is no JSON: _json_value has put null in its place
        return json.dumps([_plain(r) for r in records], indent=1, allow_nan=False)
    if format == "csv":
        return _csv(records)
    if format == "parquet":
        raise InputError("parquet is no text: give -o FILE.parquet")
    records = [*map(_in_ms, records)]
    names = list(columns if columns is not None else (records[0] if records else ()))
    heading = [title] if title else []
    shared_text = ""
    # nothing stands above a Markdown table, so that it keeps all columns
    if format != "markdown":
        names, shared_text = _said_once(names, records, caption if format == "table" else ())
    if format == "table":
        heading += [shared_text] if shared_text else []
    cells = [_column(n, [r[n] for r in records]) for n in names]
    rows = [list(row) for row in zip(*cells, strict=True)]
    # decided by the values: None is shown as a dash, and leaves a column numeric
    numeric = [all(not isinstance(r[name], str) for r in records) for name in names]
    heads = [_header(name, names) for name in names]
    if format == "markdown":
        rules = ["---:" if n else "---" for n in numeric]
        # what Markdown takes for a cell's end, emphasis, code, a link or HTML
        special = str.maketrans({c: f"\\{c}" for c in "\\|*`[]"} | {"<": "&lt;"})
        body = [[cell.translate(special) for cell in row] for row in rows]
        return "\n".join("| " + " | ".join(row) + " |" for row in [heads, rules, *body])
    if format == "latex":
        same = f"\n% the same in all rows: {_tex(shared_text)}" if shared_text else ""
        return _latex(heads, rows, numeric) + same
    return _terminal(heads, rows, numeric, heading, width, color)


def parquet(records: Sequence[Record]) -> bytes:
    """Return records as a Parquet file: the fields and types of JSON, with null for NaN and infinities.

    Parameters
    ----------
    records : sequence of mapping
        Records of the same fields. A field of fields, such as ``params``, is a struct, lists are lists, and a field
        whose values are of several types is JSON, as text.

    Returns
    -------
    bytes
        The file.

    Raises
    ------
    GradstatsError
        If pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow.parquet import write_table
    except ImportError:
        raise GradstatsError(
            "a Parquet file needs pyarrow: pip install 'gradstats[parquet]'"
        ) from None

    def column(raw_values: list[Any]) -> Any:
        # the format has no struct without fields
        values = [None if isinstance(v, Mapping) and not v else _json_value(v) for v in raw_values]
        # of nulls alone pyarrow makes a column of type null
        if all(v is None for v in values) and any(isinstance(v, float) for v in raw_values):
            return pyarrow.array(values, pyarrow.float64())  # all of it NaN
        try:
            return pyarrow.array(values)
        except pyarrow.ArrowException:
            return pyarrow.array([None if v is None else json.dumps(v) for v in values])

    names = list(records[0]) if records else []
    stream = io.BytesIO()
    write_table(pyarrow.table({n: column([r[n] for r in records]) for n in names}), stream)
    return stream.getvalue()


def _said_once(
    names: Sequence[str], records: Sequence[Record], caption: Sequence[str] = ()
) -> tuple[list[str], str]:
    """Return the columns that differ between records and hold something, and a line that says the rest."""
    if not records:
        return list(names), ""
    held = [
        n for n in names if n in _ANSWERS or any(_cell(n, r[n]) not in ("–", "") for r in records)
    ]
    # a table has at least one column, even if all are empty
    names = held or list(names)
    same = _shared(names, records)
    # one record shares everything with itself: only what the caller names goes above the table
    if len(records) == 1:
        same = {n: value for n, value in records[0].items() if n in names and n in caption}
    shared_text = "; ".join(f"{_header(n, names)} {_cell(n, v)}" for n, v in same.items())
    return [n for n in names if n not in same], shared_text


def _shared(names: Sequence[str], records: Sequence[Record]) -> dict[str, Any]:
    """Return the fields that have one value in all records; of labels, in those that have any."""
    same: dict[str, Any] = {}
    for name in names:
        values = [r[name] for r in records if name not in _LABELS or r[name] is not None]
        if values and all(value == values[0] for value in values[1:]):
            same[name] = values[0]
    # a table keeps at least one column
    return same if len(same) < len(names) else {}


def _header(name: str, names: Sequence[str]) -> str:
    if name.startswith("scale") and (
        "c" not in names or "model" in names
    ):  # no peaks over a threshold
        return name.replace("_", " ")
    if name.startswith("bandwidth_"):  # for a share of the time that a plan names
        return f"{name.removeprefix('bandwidth_')} %"
    return _HEADERS.get(name, name.replace("_", " "))


def _in_ms(record: Record) -> Record:
    """Return a record with its times in milliseconds; `low` and `high` are of its seconds where it has nothing else."""
    names = [*_TIMES]
    if next((n for n in _OWNERS if n in record), "") == "seconds":
        names += ["low", "high"]
    return {
        n: 1e3 * value if n in names and isinstance(value, Real) else value
        for n, value in record.items()
    }


def _column(name: str, values: Sequence[Any]) -> list[str]:
    """Return the cells of a column, numbers of about one size with the same decimals."""
    cells = [_cell(name, value) for value in values]
    return cells if name == "ratio" else alike(values, cells)


def alike(values: Sequence[Any], cells: Sequence[str]) -> list[str]:
    """Give numbers of about one size the same decimals: as many as the one that has most.

    Parameters
    ----------
    values : sequence of Any
        What the cells of a column show.
    cells : sequence of str
        The same, as :func:`format_value` shortens it.

    Returns
    -------
    list of str
        Cells. Those of integers, texts and nothing, and all where numbers differ by more than a factor of a hundred,
        stay as they are.
    """
    numbers = {
        i: float(v)
        for i, v in enumerate(values)
        # zero has no size, and is written as 0
        if isinstance(v, Real) and not isinstance(v, Integral) and math.isfinite(v) and v != 0
    }
    sizes = [abs(v) for v in numbers.values()]
    # only decimals of numbers without an exponent can be made equal
    written = {len(cells[i].partition(".")[2]) for i in numbers if "e" not in cells[i]}
    if len(written) < 2 or max(sizes) > _ALIKE * min(sizes):
        return list(cells)
    most = max(written)
    return [f"{numbers[i]:.{most}f}" if i in numbers else cell for i, cell in enumerate(cells)]


def _cell(name: str, value: Any) -> str:
    if name in _TIMES and isinstance(value, float) and 1e4 <= value < math.inf:
        return f"{value:.0f}"  # a step of ten seconds is still one in milliseconds
    # somebody typed a ratio as 0.1, so it is not shown as 0.100
    if name == "ratio" and value is not None and not isinstance(value, str):
        return f"{value:g}"
    return visible(format_value(value))


def visible(text: str) -> str:
    """Return a text with its control characters written out: names from outside must not steer a terminal.

    Parameters
    ----------
    text : str
        Any text, such as a layer's name or a file's.

    Returns
    -------
    str
        The same in one line, without escape sequences, line ends and changes of the writing direction.
    """
    # a space that does not break a line is harmless, and in texts of our own
    # str.isprintable is false for every space but the ASCII one
    return "".join(
        c
        if c.isprintable() or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode()
        for c in text
    )


def _plain(record: Record) -> dict[str, Any]:
    return {k: _json_value(v) for k, v in record.items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(v) for v in value]
    return value


def _csv(records: Sequence[Record]) -> str:
    if not records:
        return ""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(_csv_value, records[0]))
    for record in records:
        writer.writerow(map(_csv_value, record.values()))
    return stream.getvalue().rstrip("\n")


def _csv_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return json.dumps(_json_value(value))
    if not isinstance(value, str):
        return value
    # a spreadsheet takes a text that begins so for a formula, and runs it
    formula = value.startswith(("\t", "\r")) or value.lstrip().startswith(("=", "+", "-", "@"))
    # the csv module leaves a lone carriage return unquoted, and does not read it back
    lines = value.replace("\r", "\n").split("\n")
    # a file is shown in a terminal, too
    return ("'" if formula else "") + "\n".join(
        "\t".join(map(visible, line.split("\t"))) for line in lines
    )


def format_value(value: Any) -> str:
    """Shorten a value for reading.

    Parameters
    ----------
    value : Any
        Number, text, mapping or None.

    Returns
    -------
    str
        Numbers with three significant digits, two below 0.1; None and NaN as a dash.
    """
    if isinstance(value, Real) and not isinstance(value, Integral):
        value = float(value)  # NumPy's numbers are no Python floats
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value == 0 or math.isinf(value):
            return f"{value:g}"
        if 1e-3 <= abs(value) < 1e4:
            digits = (2 if abs(value) >= 0.1 else 1) - math.floor(math.log10(abs(value)))
            return f"{value:.{max(digits, 0)}f}"
        return f"{value:.1e}"
    if isinstance(value, Mapping):
        # a location of zero is fixed by the model, and tells nothing
        shown = {k: v for k, v in value.items() if not (k == "loc" and v == 0)}
        return " ".join(f"{k}={format_value(v)}" for k, v in shown.items())
    return str(value)


def format_short(value: float) -> str:
    """Shorten a number for a sentence.

    Parameters
    ----------
    value : float
        Number of at least 0.

    Returns
    -------
    str
        Two significant digits; from 99.5 on, where these would need a power of ten, whole below 10,000.
    """
    return f"{value:,.0f}" if 99.5 <= value < 1e4 else f"{value:.2g}"


def format_bytes(count: float) -> str:
    """Shorten a number of bytes for reading.

    Parameters
    ----------
    count : float
        Number of bytes.

    Returns
    -------
    str
        Three significant digits and a decimal unit, as in ``"12.3 MB"``.
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # from 999.5 of the smaller unit on, three digits would be 1e+03 of it
        if count >= size * (0.9995 if size > 1e3 else 1):
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


# a number that is no part of a name such as conv-1.2, or the power of ten of format_uncertain
_NUMBER = re.compile(
    r"(?<![\w.-])(?P<number>-?\d+(?:\.\d+)?)(?:e(?P<power>[+-]\d+))?(?![\w.-])|·10\^(?P<times>-?\d+)"
)
_TEX = {c: f"\\{c}" for c in "_%&#${}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "k̂": r"$\hat{k}$",
    "ξ": r"$\xi$",
    "Δ": r"$\Delta$",
    "δ": r"$\delta$",
    "σ": r"$\sigma$",
    "η": r"$\eta$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "÷": r"$\div$",
    "−": "$-$",
}
"""What LaTeX takes for special characters, and for letters that not every font of it has."""
_SPECIAL = re.compile("|".join(map(re.escape, sorted(_TEX, key=len, reverse=True))))


def format_rate(rate: float) -> str:
    """Return a rate as text, with three significant digits.

    Parameters
    ----------
    rate : float
        Rate in Mbit/s, as in the records of :func:`gradstats.network.plan`.
    """
    # rounded to three digits first; .7g then writes them without an exponent below 10^7
    return f"{float(f'{rate:.3g}'):,.7g} Mbit/s"


def _tex(text: str) -> str:
    """Return a text for LaTeX, which shows it as it is; of numbers the sign is a minus, and a power of ten a power."""
    pieces, at = [], 0
    for match in _NUMBER.finditer(text):
        # text between numbers is escaped, numbers are not: the braces and dollars of a power are LaTeX's own
        pieces.append(_SPECIAL.sub(lambda c: _TEX[c[0]], text[at : match.start()]))
        at, power = match.end(), match["times"] or match["power"]
        number = match["number"] or ""
        if power:
            pieces.append(f"${number}\\cdot10^{{{int(power)}}}$")
        else:
            pieces.append(number.replace("-", "$-$"))
    return "".join([*pieces, _SPECIAL.sub(lambda c: _TEX[c[0]], text[at:])])


def _latex(heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> str:
    lines = [
        f"\\begin{{tabular}}{{{''.join('r' if n else 'l' for n in numeric)}}}",
        "\\toprule",
        " & ".join(map(_tex, heads)) + r" \\",
        "\\midrule",
        *(" & ".join(map(_tex, row)) + r" \\" for row in rows),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines)


def _terminal(
    labels: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    heading: Sequence[str],
    width: int,
    color: bool,
) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # each column with its header first, as _layout takes it
    widths, gap = _layout([[la, *(r[i] for r in rows)] for i, la in enumerate(labels)], width)
    # SIMPLE_HEAD itself puts one blank between columns
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1), collapse_padding=True)
    # `widths` ends where columns no longer fit
    for label, right, size in zip(labels, numeric, widths, strict=False):
        table.add_column(label, justify="right" if right else "left", width=size, overflow="fold")
    for row in rows:
        table.add_row(*row[: len(widths)])
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_jupyter=False,
        force_terminal=color,  # rich takes the stream for no terminal, and would drop the colours
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for line in heading:
        console.print(line, style="bold")
    console.print(table)
    # rich fills every line up to the width of the table
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    if left_out := ", ".join(labels[len(widths) :]):
        lines += textwrap.wrap(
            f"Too wide for {width} columns: {left_out}. --format json and csv have them.", width
        )
    return "\n".join(lines).rstrip("\n")


def _layout(columns: Sequence[Sequence[str]], width: int) -> tuple[list[int], int]:
    """Return the widths of the columns that fit, and the gap between them; `columns` have the header first."""

    def longest(texts: Sequence[str]) -> int:
        return max((len(word) for text in texts for word in text.split()), default=0)

    # three widths: nothing broken; headers broken between words; cells broken between words as well
    natural = [max(map(len, column)) for column in columns]
    whole = [max(longest([head]), *map(len, cells), 0) for head, *cells in columns]
    broken = [max(longest([head]), min(longest(cells), _LONGEST)) for head, *cells in columns]

    def spare(shown: int, least: Sequence[int], gap: int) -> int:
        # two blanks are those of SIMPLE_HEAD at both ends of a line
        return width - sum(least[:shown]) - gap * (shown - 1) - 2

    # In this order: break headers, narrow the gap, break cells between words, leave out columns.
    ways = [(least, gap) for least in (whole, broken) for gap in (2, 1)]
    choices = ((n, least, gap) for n in range(len(columns), 0, -1) for least, gap in ways)
    # not even one column fits: the first is folded
    one = (min(1, len(columns)), broken, 1)
    shown, least, gap = next((c for c in choices if spare(*c) >= 0), one)
    # columns grow from left to right, as long as there is room
    left, widths = max(spare(shown, least, gap), 0), []
    for small, large in zip(least[:shown], natural, strict=False):
        widths.append(min(large, small + left))
        left -= widths[-1] - small
    return widths, gap
