"""Style that the figures share: colours, lines, names, ranks on a log axis, and PNG files."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import (
    Locator,
    LogFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    ScalarFormatter,
    StrMethodFormatter,
)
from matplotlib.transforms import ScaledTranslation
from numpy.typing import ArrayLike, NDArray

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.laws import LAWS
from gradstats.tables import visible
from gradstats.thresholds import ESTIMATORS

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Text

__all__ = [
    "FEW_POINTS",
    "HATCHES",
    "LINES",
    "MARKERS",
    "PALETTE",
    "label_of",
    "legend_below",
    "legend_beside",
    "log_ranks",
    "lone",
    "look_of",
    "marked",
    "next_colour",
    "plain_log",
    "png",
    "ranked",
    "tidy",
]

_OF_NUMBERS = LogFormatter | ScalarFormatter | StrMethodFormatter
"""Formatters of ticks that hold no names."""
_CONTRAST = 3.0
"""Least contrast of a line with a white page (WCAG 2.1, 1.4.11)."""


def _luminance(colour: Sequence[float]) -> float:
    # sRGB to linear light (WCAG 2.1, relative luminance)
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def _dark_enough(colour: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return a colour, darker if it would not stand out from white."""
    while 1.05 / (_luminance(colour) + 0.05) < _CONTRAST:
        red, green, blue = colour
        # darker by 3 % at a time: the hue stays
        colour = (0.97 * red, 0.97 * green, 0.97 * blue)
    return colour


# Seaborn's palette for the colour-blind has four oranges once all are dark enough for thin lines on white. Kept are
# its blue, orange, green and sky; the six others are as far from these and each other as they can be, for eyes without
# red or green receptors, too.
_COLOURS = (
    *("0173b2", "de8f05", "029e73", "8b0000", "956aff"),
    *("2a0080", "9a1b6a", "707070", "5c7a00", "56b4e9"),
)
PALETTE = [
    _dark_enough((int(c[:2], 16) / 255, int(c[2:4], 16) / 255, int(c[4:], 16) / 255))
    for c in _COLOURS
]
LINES: tuple[Any, ...] = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX*<>ph"
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
_OTHERS = (
    *("lags", "cltk", "redsync-quantised", "randomk", "marsit", "signsgd", "ef-signsgd"),
    *("none", "ssdm", "cascading", "dense-bf16", "torch-topk", "powersgd", "torch-bf16"),
    "dense-fp8",
)
"""Compressors that are no rules, which are above this room: their places in the palette."""
FEW_POINTS = 30
"""Points from which on a line shows its course without markers."""
_MOST_POINTS = 2000
_NAMES_AN_INCH = 6
"""Lines of a legend that an inch holds."""
_LONGEST = 40
"""Characters of a name in a legend beside the axes."""
_BELOW = 32
"""Points that ticks and label of an axis take."""


def label_of(name: str) -> str:
    """Return a model's or control's name as legends show it.

    Parameters
    ----------
    name : str
        Name of a model or control.

    Returns
    -------
    str
        Name in legends; the name itself where there is no other.
    """
    if name in LAWS:
        return LAWS[name].label
    return {"halfnorm": "half-normal"}.get(name, name)


def look_of(name: str) -> dict[str, Any]:
    """Return colour, marker and line of an estimator or compressor: the same in every figure.

    Parameters
    ----------
    name : str
        Name of an estimator or compressor.

    Returns
    -------
    dict
        ``color``, ``marker`` and ``ls`` of :meth:`matplotlib.axes.Axes.plot`.
    """
    # a fixed list: a rule has its colour whatever else is drawn
    known = ["exact", *(rule for rule in ESTIMATORS.built_in if rule != "exact"), *_OTHERS]
    rule = {"topk": "exact"}.get(name, name)
    # what others add has a place of its own that does not depend on what is drawn beside it
    place = known.index(rule) if rule in known else len(known) + crc32(name.encode()) % 60
    # the line changes with every ten, so that a colour that comes again has another line
    line = ("-", *LINES)[(place + place // 10) % (1 + len(LINES))]
    return {
        "color": PALETTE[place % 10],
        "marker": MARKERS[place % len(MARKERS)],
        "ls": line,
    }


def marked(values: ArrayLike, marker: str = "o") -> dict[str, Any]:
    """Return the markers of a line: on every point of a short one, else on points that no line would reach.

    Parameters
    ----------
    values : array_like, shape (n,)
        Values of the line, not finite where it has a gap.
    marker : str, optional
        Marker.

    Returns
    -------
    dict
        ``marker`` and ``markevery`` of :meth:`matplotlib.axes.Axes.plot`.
    """
    if np.size(values) < FEW_POINTS:
        return {"marker": marker, "markevery": None}
    alone = lone(values).tolist()
    return {"marker": marker if alone else "", "markevery": alone or None}


def lone(values: ArrayLike) -> NDArray[np.int64]:
    """Return the places of the finite values without a finite neighbour, which neither a line nor a band shows.

    Parameters
    ----------
    values : array_like, shape (n,)
        Values of a line, not finite where it has a gap.

    Returns
    -------
    ndarray of int64
        Places, ascending.
    """
    known = np.pad(np.isfinite(np.asarray(values, float)), 1)
    return np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])


def next_colour(ax: Axes) -> tuple[float, float, float]:
    """Return a colour that no labelled line of the axes has yet.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Axes with lines.

    Returns
    -------
    tuple of float
        Red, green and blue, in [0, 1].
    """
    # lines without a label are decoration, and take no colour of the ten
    return PALETTE[sum(not str(line.get_label()).startswith("_") for line in ax.lines) % 10]


def legend_beside(ax: Axes) -> None:
    """Put the legend at the right of the axes, where it covers nothing.

    It has the columns that its height takes, and long names without their middle: it would leave no room for the axes.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Axes with labelled artists.
    """
    handles, labels = ax.get_legend_handles_labels()
    # as high as the axes are now: the layout is made only when the figure is drawn
    height = ax.get_window_extent().height / ax.figure.dpi  # inches
    columns = max(1, math.ceil(len(labels) / max(height * _NAMES_AN_INCH, 1)))
    ax.legend(handles, [_shortened(label) for label in labels], fontsize="small", loc="center left",
              bbox_to_anchor=(1, 0.5), frameon=False, ncols=columns, columnspacing=1)  # fmt: skip


def _shortened(name: str) -> str:
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[1 - half :]}"


def legend_below(ax: Axes) -> None:
    """Put the legend below the axes, in two columns, where it covers nothing and takes no width.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Axes with labelled artists, ticks and a label of the horizontal axis.
    """
    # in points, so that the legend clears ticks and label on axes of any height
    down = ScaledTranslation(0, -_BELOW / 72, ax.figure.dpi_scale_trans)
    ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, frameon=False,
              bbox_transform=ax.transAxes + down)  # fmt: skip


def tidy(ax: Axes, title: str | None) -> Axes:
    """Give the axes their title, a light grid and no box.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Axes to tidy.
    title : str or None
        Title, if any.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    if title:
        ax.set_title(visible(title))
    plain = (
        matplotlib.rcParams["axes.axisbelow"] == "line"
    )  # no style: seaborn's say whether there is a grid
    # seaborn's styles decide about the grid themselves
    ax.grid(**{"alpha": 0.3} if plain else {"visible": matplotlib.rcParams["axes.grid"]})
    ax.spines[["top", "right"]].set_visible(False)
    _plain_text([ax])
    return ax


def _plain_text(axes: Iterable[Axes]) -> None:
    """Show every text as it is: a dollar in a parameter's name begins no formula. Ticks of numbers keep theirs."""
    for ax in axes:
        texts = [ax.title, *ax.texts]
        if legend := ax.get_legend():
            texts += [legend.get_title(), *legend.get_texts()]
        for axis in (ax.xaxis, ax.yaxis):
            texts.append(axis.label)
            # ticks of numbers are not made just to be looked at: that takes as long as a drawing
            if not isinstance(axis.get_major_formatter(), _OF_NUMBERS):
                texts += axis.get_ticklabels(which="both")
        _plain(texts)


def _plain(texts: Iterable[Text]) -> None:
    for text in texts:
        text.set_parse_math(False)
        # names come from outside, and matplotlib's warning of a missing glyph repeats it as it is
        if not (shown := text.get_text()).isprintable():
            text.set_text("\n".join(map(visible, shown.split("\n"))))


def plain_log(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers: at 1, 2 and 5, or at powers of ten if it is long.

    Parameters
    ----------
    axis : matplotlib.axis.Axis
        Axis to label.
    """
    low, high = axis.get_view_interval()
    if low <= 0:  # nothing drawn
        return
    # less than two and a half decades have room for labels between powers of ten
    locator: Locator = LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,))
    powers = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = np.outer(powers, (1, 2, 5))
    # with fewer than two of them matplotlib has as many ticks as a linear axis, whose longer numbers overlap
    if np.count_nonzero((ticks >= low) & (ticks <= high)) < 2:
        locator = MaxNLocator(4)
    axis.set_major_locator(locator)
    axis.set_major_formatter("{x:g}")
    # minor ticks would be labelled between
    axis.set_minor_formatter(NullFormatter())


def ranked(m: Magnitudes) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ranks evenly spread on a log axis, and the magnitudes there.

    Parameters
    ----------
    m : Magnitudes
        Magnitudes of a gradient.

    Returns
    -------
    ranks : ndarray of int64, shape (n,)
        Ranks from 1, ascending.
    magnitudes : ndarray of float64, shape (n,)
        Magnitudes at these ranks, in the gradient's unit.
    """
    ranks = log_ranks(m.count)
    return ranks, np.array([m.upper_quantile(int(k)) for k in ranks])


def log_ranks(n: int) -> NDArray[np.int64]:
    """Return at most a few thousand ranks from 1 to n, evenly spread on a log axis.

    Parameters
    ----------
    n : int
        Largest rank.

    Returns
    -------
    ndarray of int64
        Ranks, ascending; empty for n = 0.
    """
    if n == 0:
        return np.empty(0, np.int64)
    # small ranks come several times as whole numbers
    return np.unique(np.geomspace(1, n, min(n, _MOST_POINTS)).astype(np.int64))


def png(figure: Figure, *, dpi: int = 110, optimize: bool = True) -> bytes:
    """Return a figure as a PNG of 256 colours.

    It has a third of the size that matplotlib's has, and the same bytes every time.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        Figure to render.
    dpi : int, optional
        Pixels per inch.
    optimize : bool, optional
        Whether to take time for the colours nearest to the picture's, and for the smallest file. Without, it takes a
        seventh of the time, and colours that are off by less than can be seen.

    Returns
    -------
    bytes
        Content of the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    _plain_text(figure.axes)
    _plain(figure.texts)
    before = figure.dpi
    # the figure is the user's: its resolution is put back below
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]  # once; savefig draws twice for the layout's sake
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    # 256 colours have no transparency, and pages are white
    image = Image.fromarray(np.ascontiguousarray(pixels[..., :3]))
    figure.set_dpi(before)
    small = io.BytesIO()
    # the same bytes every time: neither has a random start
    method = Image.Quantize.MEDIANCUT if optimize else Image.Quantize.FASTOCTREE
    colours = image.quantize(256, method)
    # an octree's colours are means: that of the paper stays as it is
    palette = np.array(colours.getpalette(), np.uint8).reshape(-1, 3)
    palette[np.asarray(colours)[0, 0]] = pixels[0, 0, :3]
    colours.putpalette(palette.tobytes())
    colours.save(small, format="png", optimize=optimize)
    return small.getvalue()
