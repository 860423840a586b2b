"""Figures of how fast sorted magnitudes fall, with controls that are not compressible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradstats.plots.style import (
    LINES,
    MARKERS,
    PALETTE,
    label_of,
    legend_beside,
    log_ranks,
    ranked,
    tidy,
)
from gradstats.primitives import Array
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.compressibility import (
    CONTROLS,
    LocalExponent,
    checked_window,
    control,
    local_exponents,
    window_exponents,
)
from gradstats.statistics.fitting import as_magnitudes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["best_k_error", "local_exponent", "magnitude_decay", "window_exponent"]

_Points: TypeAlias = tuple[list[float], list[LocalExponent]]
"""Places on the axis, and the exponents to draw there."""


def magnitude_decay(
    vectors: Mapping[str, Array | Sketch | Magnitudes],
    ax: Axes,
    *,
    window: tuple[int, int] | None = None,
    title: str | None = None,
) -> Axes:
    """Draw sorted magnitudes, relative to the largest, with controls and the slope ½ (SIDCo figure 7 a).

    Parameters
    ----------
    vectors : mapping of str to array_like, Sketch or Magnitudes
        Gradients by label.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    window : (int, int), optional
        First and last rank to shade, as in :func:`gradstats.compressibility`.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    each = {label: as_magnitudes(x) for label, x in vectors.items()}
    # controls need two elements, also where all vectors are empty
    numel = max([2, *(m.count for m in each.values())])  # size of the controls
    checked_window(window, numel)
    for i, (label, m) in enumerate(each.items()):
        ranks, magnitudes = ranked(m)
        if ranks.size:
            # relative to the largest, so that gradients of any scale share the axes
            ax.plot(ranks, magnitudes / m.max, color=PALETTE[i % 10], lw=2, label=label)
    for i, name in enumerate(CONTROLS):
        # the whole sample, drawn at log-spaced ranks
        _, magnitudes = control(name, numel, (1, numel))
        ranks = log_ranks(magnitudes.size)
        # ranks begin at 1, places at 0
        relative = magnitudes[ranks - 1] / magnitudes[0]
        ax.plot(ranks, relative, color="0.5", ls=LINES[i], label=f"control: {label_of(name)}")
    ranks = log_ranks(numel)
    ax.plot(ranks, ranks**-0.5, color="black", lw=1, ls=(0, (1, 3)), label="rank^(−½)")
    if window is not None:
        ax.axvspan(*window, color="0.92", zorder=0)
    ax.set(
        xlabel="rank",
        ylabel="magnitude ÷ largest",
        xscale="log",
        yscale="log",
        ylim=(1e-5, 1.5),
    )
    ax.legend(fontsize="small")
    return tidy(ax, title)


def best_k_error(
    vectors: Mapping[str, Array | Sketch | Magnitudes], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw the error of keeping the k largest, σ_k over the norm, with controls (SIDCo figure 7 b).

    Parameters
    ----------
    vectors : mapping of str to array_like, Sketch or Magnitudes
        Gradients by label.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    each = {label: as_magnitudes(x) for label, x in vectors.items()}
    for i, (label, m) in enumerate(each.items()):
        if m.count:
            ax.plot(*_remaining(m), color=PALETTE[i % 10], lw=2, label=label)
    for style, label, ideal in _controls(each):
        ax.plot(*_remaining(ideal), color="0.5", ls=style, label=label)
    ax.set(xlabel="k", ylabel="σ_k ÷ norm", xscale="log", yscale="log", ylim=(1e-3, 1.2))
    ax.legend(fontsize="small")
    return tidy(ax, title)


def _controls(each: Mapping[str, Magnitudes]) -> Iterator[tuple[Any, str, Magnitudes]]:
    """Yield line style, label and ideal sample of every control, of the largest vector's size."""
    # the window of a control is its whole sample
    numel = max([2, *(m.count for m in each.values())])
    for i, name in enumerate(CONTROLS):
        ideal = Magnitudes.from_values(control(name, numel, (1, numel))[1])
        yield LINES[i], f"control: {label_of(name)}", ideal


def _remaining(m: Magnitudes) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ranks k and σ_k over the norm, cell by cell from the largest."""
    # relative to the largest: squares neither overflow nor vanish
    energy = np.cumsum((m.weight * (m.middle / m.max) ** 2)[::-1])
    ranks = np.cumsum(m.weight[::-1])
    # where each rank falls among the cells; neighbouring ranks share large ones
    picks = np.unique(np.searchsorted(ranks, log_ranks(m.count)).clip(0, ranks.size - 1))
    left = np.sqrt(np.maximum(1 - energy[picks] / energy[-1], 0.0))
    # below 1e-6 the difference of two sums is rounding
    return np.rint(ranks[picks]).astype(np.int64), np.where(left > 1e-6, left, np.nan)


def local_exponent(
    vectors: Mapping[str, Array | Sketch | Magnitudes],
    ax: Axes,
    *,
    per_decade: int = 2,
    title: str | None = None,
) -> Axes:
    """Draw the decay exponent over successive ranges of ranks, with 95 % intervals and controls.

    A vector is compressible where its exponent stays above ½. With a light tail it starts near 0 and rises.

    Parameters
    ----------
    vectors : mapping of str to array_like, Sketch or Magnitudes
        Gradients by label.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    per_decade : int, optional
        Ranges of ranks per factor of ten.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    each = {label: as_magnitudes(x) for label, x in vectors.items()}

    def estimate(m: Magnitudes) -> _Points:
        exponents = local_exponents(m, per_decade)
        # the middle of a range on a logarithmic axis
        return [math.sqrt(e.first * e.last) for e in exponents], exponents

    _exponents(ax, each, estimate)
    most = max([10, *(m.count for m in each.values())])
    ax.set(xlabel="rank", ylabel="local exponent p", xscale="log", xlim=(1, most), ylim=(0, 2))
    ax.legend(fontsize="small", loc="upper left")
    return tidy(ax, title)


def window_exponent(
    vectors: Mapping[str, Array | Sketch | Magnitudes], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw the decay exponent over windows of the largest elements, by the share they hold, with controls.

    A power law has one exponent in all windows. Where a curve crosses ½, the verdict depends on the window.

    Parameters
    ----------
    vectors : mapping of str to array_like, Sketch or Magnitudes
        Gradients by label.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    each = {label: as_magnitudes(x) for label, x in vectors.items()}
    # the share of a window is what different sizes of gradients have in common
    shares = np.geomspace(1e-4, 0.1, 13).tolist()

    def estimate(m: Magnitudes) -> _Points:
        exponents = window_exponents(m, shares)
        return [e.last / m.count for e in exponents], exponents

    _exponents(ax, each, estimate)
    ax.set(xlabel="share of the non-zero elements in the window", ylabel="exponent p of the window")
    ax.set(xscale="log", xlim=(5e-5, 0.2), ylim=(0, None))
    legend_beside(ax)
    return tidy(ax, title)


def _exponents(
    ax: Axes, each: Mapping[str, Magnitudes], estimate: Callable[[Magnitudes], _Points]
) -> None:
    """Draw exponents with their intervals, those of the controls in grey and without, and the line at ½."""
    for i, (label, m) in enumerate(each.items()):
        at, exponents = estimate(m)
        colour = PALETTE[i % 10]
        ax.plot(
            at,
            [e.p for e in exponents],
            marker=MARKERS[i % len(MARKERS)],
            ms=4,
            color=colour,
            label=label,
        )
        # controls have no chance in them, and so no interval
        bounds = [e.p_low for e in exponents], [e.p_high for e in exponents]
        ax.fill_between(at, *bounds, color=colour, alpha=0.2)
    for style, label, ideal in _controls(each):
        at, exponents = estimate(ideal)
        ax.plot(at, [e.p for e in exponents], color="0.5", ls=style, label=label)
    ax.axhline(0.5, color="black", lw=1, ls=(0, (1, 3)), label="p = ½")
