"""Flat records as tables: for the terminal, a paper or a program. Also the progress bars."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    import rich.progress

__all__ = ["FORMATS", "Format", "Record", "format_value", "progress_bar", "render"]

Record: TypeAlias = Mapping[str, Any]
Format: TypeAlias = Literal["table", "json", "csv", "markdown", "latex"]
_LABELS = {"trace", "step", "rank", "kind", "layer", "numel", "window", "n", "threads"}
FORMATS: tuple[Format, ...] = get_args(Format)


def render(
    records: Sequence[Record],
    format: Format = "table",
    *,
    columns: Sequence[str] | None = None,
    title: str | None = None,
    width: int = 80,
    color: bool = False,
) -> str:
    """Render records of the same fields.

    Parameters
    ----------
    records : flat mappings; the first one's order is the order of the columns.
    format : ``json`` is a list of objects with every field, not-a-number as null; ``csv`` has every field;
        ``table`` (for a terminal), ``markdown`` and ``latex`` show `columns` with numbers shortened.
    columns : fields shown in the last three; all if None.
    title : above a terminal table.
    width : of a terminal table, in characters.
    color : keep terminal colours.

    Returns
    -------
    str
        Without a final newline.
    """
    if format == "json":
        return json.dumps([_plain(r) for r in records], indent=1, allow_nan=False)
    if format == "csv":
        return _csv(records)
    names = list(columns if columns is not None else (records[0] if records else ()))
    if format == "table" and len(records) > 1:
        # What is the same in every row is said once, above the table: 80 columns are few.
        values = {n: {r[n] for r in records} - {None} for n in names if n in _LABELS}
        same = {n: v.pop() for n, v in values.items() if len(v) == 1}
        names = [n for n in names if n not in same]
        facts = [f"{n} {v}" for n, v in same.items()]
        title = "; ".join([*([title] if title else []), *facts])
    rows = [[f"{r[n]:g}" if n == "ratio" else format_value(r[n]) for n in names] for r in records]
    numeric = [all(not isinstance(r[name], str) for r in records) for name in names]
    if format == "markdown":
        rules = ["---:" if n else "---" for n in numeric]
        return "\n".join("| " + " | ".join(row) + " |" for row in [names, rules, *rows])
    if format == "latex":
        return _latex(names, rows, numeric)
    return _terminal(names, rows, numeric, title, width, color)


def _plain(record: Record) -> dict[str, Any]:
    return {k: _json_value(v) for k, v in record.items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _json_value(v) for k, v in value.items()}
    return value


def _csv(records: Sequence[Record]) -> str:
    if not records:
        return ""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(records[0])
    for record in records:
        writer.writerow(
            json.dumps(_json_value(v)) if isinstance(v, Mapping) else v for v in record.values()
        )
    return stream.getvalue().rstrip("\n")


def format_value(value: Any) -> str:
    """Shorten a value for reading: three significant digits, two below 0.1."""
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
        # a location fixed at zero is no news
        shown = {k: v for k, v in value.items() if not (k == "loc" and v == 0)}
        return " ".join(f"{k}={format_value(v)}" for k, v in shown.items())
    return str(value)


def _latex(names: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> str:
    special = str.maketrans({c: f"\\{c}" for c in "_%&#$"} | {"–": "--"})
    lines = [
        f"\\begin{{tabular}}{{{''.join('r' if n else 'l' for n in numeric)}}}",
        "\\toprule",
        " & ".join(n.translate(special) for n in names) + r" \\",
        "\\midrule",
        *(" & ".join(cell.translate(special) for cell in row) + r" \\" for row in rows),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines)


def _terminal(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    title: str | None,
    width: int,
    color: bool,
) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    for name, right in zip(names, numeric, strict=True):
        table.add_column(
            name.replace("_", " "),
            justify="right" if right else "left",
            no_wrap=name in ("compressor", "estimator", "kind", "model", "quantity", "trace"),
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_jupyter=False,
        force_terminal=color,
        no_color=not color,
        highlight=False,
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def progress_bar() -> rich.progress.Progress:
    """Return a progress display on stderr with time left; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
