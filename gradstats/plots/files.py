"""Figures as files: styles of seaborn, fonts embedded, the same bytes every time, light or dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradstats.errors import InputError
from gradstats.plots.style import png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_ending", "darken", "save", "styled"]

_DPI = 300
# PDF embeds TrueType fonts, so that texts stay texts. SVG has outlines in their place: as text it would name fonts that
# are not on every machine.
_EMBEDDED: dict[Any, Any] = {
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "gradstats",
}
# a date in the file would make two equal figures differ
_UNDATED: dict[str, dict[str, Any]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
_ENDINGS = (".pdf", ".svg", ".png")
_PARTS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")
# A turn of the hue by half a circle, as CSS has it, so that inverted colours keep their names.
_TURN = np.array([[-0.574, 1.430, 0.144], [0.426, 0.430, 0.144], [0.426, 1.430, -0.856]])


def check_ending(path: str | Path) -> str:
    """Return the ending of a figure's file in lower case.

    Parameters
    ----------
    path : str or Path
        File to write.

    Raises
    ------
    InputError
        If it is none of .pdf, .svg and .png.
    """
    ending = Path(path).suffix.lower()
    if ending not in _ENDINGS:
        raise InputError(f"no figure for {path}: name it {', '.join(_ENDINGS)}")
    return ending


@contextmanager
def styled(style: str = "ticks", context: str = "paper") -> Iterator[Figure]:
    """Give an empty figure, and draw in a style of seaborn until it is left.

    Parameters
    ----------
    style : str, optional
        ``white``, ``whitegrid``, ``dark``, ``darkgrid`` or ``ticks``. The grid is the style's.
    context : str, optional
        Sizes of text and lines: ``paper``, ``notebook``, ``talk`` or ``poster``.
    """
    import matplotlib
    import seaborn
    from matplotlib.figure import Figure

    # a column of a paper is 85 mm wide, and its captions 8 points high; seaborn's paper is twice as wide
    sizes = seaborn.plotting_context(context, font_scale=0.8 if context == "paper" else 1)
    settings: dict[Any, Any] = {**seaborn.axes_style(style), **sizes}
    # the font is that of matplotlib's settings: seaborn's first choice is not on every machine
    settings = {
        n: value for n, value in settings.items() if n not in ("font.family", "font.sans-serif")
    }
    # restored when the figure is left: the user's own settings stay
    with matplotlib.rc_context(settings):
        figure = Figure(layout="constrained")
        yield figure


def save(figure: Figure, path: str | Path, *, dark: bool = False) -> None:
    """Write a figure to a file: PDF or SVG with its fonts, or PNG of 300 pixels per inch.

    The same figure gives the same bytes every time.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        Figure to write, in its size.
    path : str or Path
        File to write, .pdf, .svg or .png; replaced if it exists.
    dark : bool, optional
        Invert the lightness of all colours, which keep their hue, and leave the background out: for dark pages.

    Raises
    ------
    InputError
        If the file's ending is another, or it cannot be written.
    """
    import matplotlib

    ending = check_ending(path)
    restore: Callable[[], None] | None = None
    try:
        with matplotlib.rc_context(_EMBEDDED):
            if dark:
                restore = darken(figure)
            elif ending == ".png":
                figure.draw_without_rendering()  # the layout knows the ticks only then
                Path(path).write_bytes(png(figure, dpi=_DPI))
                return
            figure.savefig(path, dpi=_DPI, transparent=dark, metadata=_UNDATED.get(ending))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        # the figure is the caller's, who may save it light next
        if restore:
            restore()


def darken(figure: Figure) -> Callable[[], None]:
    """Invert the lightness of everything that a figure has drawn, for a dark page; maps keep their colours.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        Figure to change.

    Returns
    -------
    callable
        Gives the figure its colours back.
    """
    figure.draw_without_rendering()  # ticks are made only now
    ticks: list[tuple[Any, dict[str, Any]]] = []
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        (tick, *_) = axis.get_major_ticks(1)
        mark, label = tick.tick1line.get_markeredgecolor(), tick.label1.get_color()
        ticks.append((axis, {"color": mark, "labelcolor": label}))
    colours = []
    for artist in figure.findobj():
        # a map's colours are a scale with a bar beside it
        mapped = getattr(artist, "get_array", lambda: None)() is not None
        for part in () if mapped else _PARTS:
            get, put = (getattr(artist, f"{verb}_{part}", None) for verb in ("get", "set"))
            if get is not None and put is not None:
                colours.append((put, get()))
    for put, colour in colours:  # after all are read, as one may set another
        put(_inverted(colour))
    for axis, _ in ticks:  # those of ticks that a later drawing adds
        axis.set_tick_params(colors=_inverted("black"), labelcolor=_inverted("black"))

    def restore() -> None:
        for axis, plain in ticks:
            axis.set_tick_params(**plain)
        for put, colour in colours:
            put(colour)

    return restore


def _inverted(colour: Any) -> Any:
    """Return a colour, or several, with the other lightness and the same hue."""
    from matplotlib.colors import to_rgba_array

    # words that matplotlib resolves itself when it draws
    if isinstance(colour, str) and colour in ("none", "auto", "inherit", "face"):
        return colour
    rgba = to_rgba_array(colour)
    # 1 − c inverts lightness and hue; the turn brings the hue back
    rgba[:, :3] = np.clip((1 - rgba[:, :3]) @ _TURN.T, 0, 1)
    return rgba if np.ndim(colour) == 2 else tuple(rgba[0])
