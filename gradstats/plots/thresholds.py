"""Figures of how many elements threshold rules keep, and how long they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradstats.plots.style import (
    MARKERS,
    PALETTE,
    legend_beside,
    look_of,
    plain_log,
    tidy,
)
from gradstats.statistics.solution import Z95

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["latency_bars", "quality_bars", "quality_over_steps"]

_FLOOR = "noise floor"


_LEAST = 1e-3
"""Where k̂/k = 0 is drawn on a logarithmic axis."""


def _mark_nothing(ax: Axes, x: float, colour: Any) -> None:
    ax.annotate(
        "0", (x, _LEAST), color=colour, fontsize=7, ha="center", va="bottom", annotation_clip=False
    )


def quality_bars(
    records: Sequence[Mapping[str, Any]], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw mean k̂/k of each estimator and ratio with its low and high (SIDCo figure 1 c).

    Whiskers hold 90 % of the gradients, or all of them where they are fewer than 20. The noise floor is what chance
    does to a known law of independent elements.

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`gradstats.quality`, of one trace and kind.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    ratios = list(dict.fromkeys(r["ratio"] for r in records))
    names = list(dict.fromkeys(r["estimator"] for r in records))
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        look = look_of(name)
        for record in (r for r in records if r["estimator"] == name):
            # rules of one ratio stand side by side, around its tick
            position = ratios.index(record["ratio"]) + (i - (len(names) - 1) / 2) * width
            mean = max(record["mean"], _LEAST)
            if record["low"] <= 0:
                _mark_nothing(ax, position, look["color"])
            ax.errorbar(
                position,
                mean,
                yerr=[
                    # a whisker has no negative length: the mean may be outside of low and high where it was raised
                    [max(mean - max(record["low"], _LEAST), 0)],
                    [max(record["high"] - mean, 0)],
                ],
                fmt=look["marker"],
                color=look["color"],
                capsize=3,
                # one entry for each rule, not for each ratio
                label=name if record["ratio"] == ratios[0] else None,
            )
    for j, ratio in enumerate(ratios):
        record = next(r for r in records if r["ratio"] == ratio)
        # the floor of few elements reaches below zero, which this axis does not have
        floor = (max(record["floor_low"], 1e-3), record["floor_high"])
        ax.fill_between(
            [j - 0.45, j + 0.45], *floor, color="0.85", zorder=0, label=None if j else _FLOOR
        )
    ax.axhline(1, color="0.3", lw=0.8)
    ax.set(xlabel="ratio k/d", ylabel="k̂/k", yscale="log")
    ax.set_xticks(range(len(ratios)), [f"{r:g}" for r in ratios])
    plain_log(ax.yaxis)
    legend_beside(ax)
    return tidy(ax, title)


def quality_over_steps(
    series: Sequence[Mapping[str, Any]], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw k̂/k of each estimator over the steps, mean over ranks (SIDCo figures 4 b, d and 9).

    The noise floor is what chance does to a known law of independent elements.

    Parameters
    ----------
    series : sequence of mapping
        Records of :func:`gradstats.quality_series`, of one ratio and kind.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    names = list(dict.fromkeys(r["estimator"] for r in series))
    for name in names:
        look = look_of(name)
        points: dict[int, list[float]] = {}
        for record in series:
            if record["estimator"] == name:
                # nothing kept is drawn at the end of the axis, and marked
                points.setdefault(record["step"], []).append(max(record["quality"], _LEAST))
        steps = sorted(points)
        means = [float(np.mean(points[step])) for step in steps]
        ax.plot(steps, means, ms=4, label=name, **look)
        for step, mean in zip(steps, means, strict=True):
            if mean <= _LEAST:
                _mark_nothing(ax, step, look["color"])
    if series:
        # k is the same for all rules at one ratio
        floor = Z95 / np.sqrt(max(series[0]["k"], 1))
        ax.axhspan(max(1 - floor, 1e-3), 1 + floor, color="0.88", zorder=0, label=_FLOOR)
    ax.axhline(1, color="0.3", lw=0.8)
    ax.set(xlabel="step", ylabel="k̂/k", yscale="log")
    plain_log(ax.yaxis)
    legend_beside(ax)
    return tidy(ax, title)


def latency_bars(
    records: Sequence[Mapping[str, Any]],
    ax: Axes,
    *,
    value: Literal["seconds", "streams", "speedup"] = "seconds",
    title: str | None = None,
) -> Axes:
    """Draw latency, or speed-up over top-k, of every compressor by ratio (SIDCo figures 14 to 17).

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`gradstats.thresholds.bench.bench`, of one numel and number of threads.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    value : {'seconds', 'streams', 'speedup'}, optional
        Field to draw, as dots; seconds in milliseconds.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    names = list(dict.fromkeys(r["compressor"] for r in records))
    ratios = list(dict.fromkeys(r["ratio"] for r in records))
    height = 0.6 / max(len(ratios), 1)
    scale = 1e3 if value == "seconds" else 1
    for j, ratio in enumerate(ratios):
        rows = {r["compressor"]: r[value] for r in records if r["ratio"] == ratio}
        # a bar's length says nothing on a logarithmic axis, which has no zero to begin at
        ax.plot(
            [scale * x for x in rows.values()],
            # ratios of one compressor stand side by side, around its tick
            [names.index(n) + (j - (len(ratios) - 1) / 2) * height for n in rows],
            ls="",
            marker=MARKERS[j % len(MARKERS)],
            ms=5,
            color=PALETTE[j % 10],
            label=f"ratio {ratio:g}",
        )
    # seconds have no natural unit: one read of the data, or top-k, is 1
    if value != "seconds":
        ax.axvline(1, color="0.3", lw=0.8)
    units = {"seconds": "latency (ms)", "streams": "latency (reads of the data)"}
    ax.set(xlabel=units.get(value, "speed-up over torch.topk"), xscale="log")
    plain_log(ax.xaxis)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.legend(fontsize="small")
    return tidy(ax, title)
