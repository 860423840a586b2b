"""Pieces of the page: figures as embedded images and sortable tables, with all text escaped."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from gradstats.tables import Record, alike, format_value, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["details", "escape", "figure", "note", "page", "table"]


_LEAST_P = 1e-6
"""p below which it is only said to be smaller."""


def escape(text: str) -> str:
    """Return a text as HTML shows it, its control characters written out.

    Parameters
    ----------
    text : str
        Any text, such as a layer's name.

    Returns
    -------
    str
        HTML.
    """
    # html.escape leaves control characters as they are
    return html.escape(visible(text))


def page(title: str, body: str) -> str:
    """Return the whole document.

    Parameters
    ----------
    title : str
        Title, as plain text.
    body : str
        Content of the body, as HTML.

    Returns
    -------
    str
        HTML.
    """
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # str.format would take the braces of CSS and scripts for its own
    return Template(template).substitute(title=escape(title), body=body)


def note(text: str) -> str:
    """Return a paragraph in small print.

    Parameters
    ----------
    text : str
        Plain text.

    Returns
    -------
    str
        HTML.
    """
    return f"<p class=note>{escape(text)}</p>"


def details(summary: str, body: str) -> str:
    """Return HTML that is folded until it is clicked or printed.

    Parameters
    ----------
    summary : str
        Plain text that stays visible.
    body : str
        Content that is folded, as HTML.

    Returns
    -------
    str
        HTML.
    """
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def figure(
    panels: int,
    draw: Callable[[Sequence[Axes]], object],
    caption: str,
    *,
    title: str = "",
    width: float = 5.2,
    height: float = 3.7,
) -> str:
    """Render a figure as an embedded PNG; its caption is its alternative text.

    Parameters
    ----------
    panels : int
        Number of axes beside each other.
    draw : callable
        Called with the axes to draw on.
    caption : str
        Plain text that says what is drawn and how to read it.
    title : str, optional
        Title over all axes, such as the run and the step.
    width, height : float, optional
        Size of a panel in inches.

    Returns
    -------
    str
        HTML.
    """
    from matplotlib.figure import Figure

    from gradstats import plots

    # without pyplot, which keeps figures and chooses a backend for the whole process
    canvas = Figure(figsize=(width * panels, height), layout="constrained")
    if title:
        canvas.suptitle(title)
    axes = list(canvas.subplots(1, panels, squeeze=False)[0])
    draw(axes)
    # after drawing: only then an axis knows its range
    _lighten(axes)
    # without optimization, which costs six times the time for a page that is read once
    data = base64.b64encode(plots.png(canvas, optimize=False)).decode()
    text = escape(caption)
    return (
        f'<figure{" class=wide" * (panels > 1)}><div><img alt="{text}" src="data:image/png;base64,{data}"></div>'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _lighten(axes: Sequence[Axes]) -> None:
    """Drop small ticks of long logarithmic axes: there are hundreds, and each takes as long to draw as a line."""
    from matplotlib.ticker import NullLocator

    for ax in axes:
        for axis in (ax.xaxis, ax.yaxis):
            # an axis may be inverted
            low, high = sorted(axis.get_view_interval())
            if axis.get_scale() == "log" and 0 < 10 * low < high:
                axis.set_minor_locator(NullLocator())


def table(records: Sequence[Record], columns: Mapping[str, str], caption: str) -> str:
    """Return records as a table whose headings sort it.

    Parameters
    ----------
    records : sequence of mapping
        Flat records that have the fields shown.
    columns : mapping of str to str
        Headings by field, in the order shown.
    caption : str
        Plain text above the table.

    Returns
    -------
    str
        HTML.
    """
    text = {name for name in columns if any(isinstance(r[name], str) for r in records)}

    def left(name: str) -> str:
        return " class=text" if name in text else ""

    head = "".join(
        f"<th scope=col{left(name)}>{escape(title)}</th>" for name, title in columns.items()
    )
    shown = {name: _shown(name, [r[name] for r in records]) for name in columns}
    rows = "".join(
        "<tr>"
        + "".join(
            # the cell's text is rounded, so sorting goes by the value itself
            f'<td{left(name)} data-value="{escape(_sortable(record[name]))}">'
            f"{escape(shown[name][i])}</td>"
            for name in columns
        )
        + "</tr>"
        for i, record in enumerate(records)
    )
    return (
        f"<div class=scroll><table class=sortable><caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _shown(name: str, values: Sequence[Any]) -> list[str]:
    """Return the cells of a column: decimals alike, a minus as wide as a digit, and no p that is too small to mean."""
    # ratios are what users typed: 0.001, not 1.00e-03
    if name in ("ratio", "tail_ratio"):
        return [f"{value:g}" for value in values]
    cells = alike(values, [format_value(value) for value in values])
    if name == "p_tail":
        cells = [
            "<\N{NO-BREAK SPACE}10⁻⁶" if v < _LEAST_P else c
            for v, c in zip(values, cells, strict=True)
        ]
    return [
        c.replace("-", "−") if isinstance(v, float) else c
        for v, c in zip(values, cells, strict=True)
    ]


def _sortable(value: Any) -> str:
    """Return what a column is sorted by; nothing for a value that is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool | int | float):
        # Number() of JavaScript knows Infinity, not inf
        return repr(float(value)).replace("inf", "Infinity")
    return format_value(value)
