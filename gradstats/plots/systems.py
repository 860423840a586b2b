"""Figures of compressors in training: what ranks send together, what the theory assumes, where the time goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from gradstats.errors import unknown
from gradstats.plots.style import (
    HATCHES,
    LINES,
    PALETTE,
    legend_below,
    legend_beside,
    look_of,
    marked,
    plain_log,
    tidy,
)
from gradstats.tables import format_value, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "CurveBy",
    "CurveValue",
    "build_up",
    "lags_delta",
    "matching_rate",
    "time_split",
    "timeline",
    "training_curves",
]

_FEW_LAYERS = 8
CurveValue: TypeAlias = Literal["loss", "quality", "residual_norm", "matching_rate"]
_MEASURED = {
    "loss": "training loss",
    "quality": "k̂/k",
    "residual_norm": "norm of the residual",
    "matching_rate": "share of matching signs",
}
CurveBy: TypeAlias = Literal["step", "seconds", "megabytes"]
_SPENT = {
    "step": "step",
    "seconds": "seconds of training",
    "megabytes": "MB sent by a rank",
}


def _having(records: Iterable[Mapping[str, Any]], field: str) -> list[Mapping[str, Any]]:
    """Return the records that have a number in a field: not None or NaN, as of steps that were not diagnosed."""
    return [r for r in records if r[field] is not None and not math.isnan(r[field])]


def _distinct(records: Iterable[Mapping[str, Any]], field: str) -> list[Any]:
    return list(dict.fromkeys(r[field] for r in records))


def _means(
    records: Sequence[Mapping[str, Any]], name: str, at: str, value: str
) -> tuple[list[float], list[float]]:
    """Return where one compressor was measured, ascending, and the mean there."""
    points: dict[float, list[float]] = {}
    for record in records:
        if record["compressor"] == name:
            points.setdefault(record[at], []).append(record[value])
    return sorted(points), [float(np.mean(points[x])) for x in sorted(points)]


def _bands(records: Sequence[Mapping[str, Any]], at: str, value: str, ax: Axes) -> None:
    """Draw the means of each compressor over its seeds, and a band from the least to the largest."""
    for name in _distinct(records, "compressor"):
        mine = [r for r in records if r["compressor"] == name]
        seeds = [_first_rank(mine, seed) for seed in _distinct(mine, "seed")]
        points = range(min(map(len, seeds)))  # one that diverged, or was interrupted, ends early
        # runs are compared point by point, so all end with the shortest
        across = np.array([[float(seed[i][value]) for i in points] for seed in seeds])
        # seeds do not take the same time to a point: the mean place
        where = np.mean([[float(seed[i][at]) for i in points] for seed in seeds], axis=0)
        look = look_of(name)
        dots = marked(across.mean(axis=0), look["marker"])
        ax.plot(where, across.mean(axis=0), **look | dots, lw=1.5, ms=3, label=name)
        if len(seeds) > 1:
            ax.fill_between(
                where, across.min(axis=0), across.max(axis=0), color=look["color"], alpha=0.15, lw=0
            )


def _first_rank(records: Sequence[Mapping[str, Any]], seed: object) -> list[Mapping[str, Any]]:
    """Return the records of one training, of the first of its ranks where it has several."""
    one = [r for r in records if r["seed"] == seed]
    return [r for r in one if r.get("rank") == one[0].get("rank")]


def training_curves(
    records: Sequence[Mapping[str, Any]],
    ax: Axes,
    *,
    value: CurveValue = "loss",
    by: CurveBy = "step",
    title: str | None = None,
) -> Axes:
    """Draw how trainings went: for each compressor the mean over its seeds, in a band from the least to the largest.

    Loss by seconds is SIDCo's figure 10, k̂/k by steps its figures 9 and 18, the residual's norm MiCRO's figure 2, loss
    by bytes Marsit's figure 4.

    Parameters
    ----------
    records : sequence of mapping
        Records with compressor, seed, and the two quantities drawn; those of a compressor and seed in the order of the
        steps. Trainings are compared point by point, up to the end of the shortest. With a field ``rank``, each is its
        first rank's. A field ``floor`` is the noise floor of k̂/k, drawn around 1; ``sampled`` says that megabytes are
        those of the captured steps alone.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    value : {'loss', 'quality', 'residual_norm', 'matching_rate'}, optional
        Quantity to draw.
    by : {'step', 'seconds', 'megabytes'}, optional
        Quantity to draw it against.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.

    Raises
    ------
    InputError
        If there is no such quantity.
    """
    for quantity, names in ((value, _MEASURED), (by, _SPENT)):
        if quantity not in names:
            raise unknown("quantity", quantity, names)
    _bands(records, by, value, ax)
    sampled = " in the captured steps" if any(r.get("sampled") for r in records) else ""
    ax.set(xlabel=_SPENT[by] + sampled * (by == "megabytes"), ylabel=_MEASURED[value])
    low, high = ax.dataLim.intervaly
    # only where all is positive and spans a decade
    if 0 < 10 * low < high:
        ax.set_yscale("log")
        plain_log(ax.yaxis)
    if value == "quality":
        ax.axhline(1, color="0.3", lw=0.8)
        floor = max((r["floor"] for r in records if "floor" in r), default=0)
        if floor:
            # the widest floor, of the smallest k, holds for all
            ax.axhspan(1 - floor, 1 + floor, color="0.88", zorder=0, label="noise floor")
    if by == "megabytes":
        ax.set_xscale("log")
    legend_beside(ax)
    return tidy(ax, title)


def _lines(
    records: Sequence[Mapping[str, Any]], at: str, value: str, ax: Axes, marker: bool
) -> None:
    """Draw one line per compressor, with markers at all points or only where there are few."""
    for name in _distinct(records, "compressor"):
        look, (where, means) = look_of(name), _means(records, name, at, value)
        if not marker:
            look |= {"ms": 4, **marked(means, look["marker"])}
        ax.plot(where, means, label=name, **{"ms": 5} | look)


def build_up(records: Sequence[Mapping[str, Any]], ax: Axes, *, title: str | None = None) -> Axes:
    """Draw how many distinct elements all ranks send, over the k asked for, against the number of ranks (MiCRO).

    Parameters
    ----------
    records : sequence of mapping
        Records with compressor, nproc and build_up (union of the selections ÷ k). Several of a compressor and nproc are
        averaged, those without a number left out.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    records = _having(records, "build_up")
    _lines(records, "nproc", "build_up", ax, marker=True)
    ranks = sorted(_distinct(records, "nproc"))
    # without overlap n ranks send n·k elements
    ax.plot(ranks, ranks, color="0.5", lw=1, ls=(0, (1, 3)), label="no overlap")
    ax.axhline(1, color="0.3", lw=0.8)
    ax.set(xlabel="ranks", ylabel="union of the selections ÷ k", xscale="log", yscale="log")
    ax.set_xticks(ranks, [str(n) for n in ranks])
    # ticks between whole numbers of ranks mean nothing
    ax.xaxis.set_minor_locator(NullLocator())
    plain_log(ax.yaxis)
    legend_beside(ax)
    return tidy(ax, title)


def lags_delta(records: Sequence[Mapping[str, Any]], ax: Axes, *, title: str | None = None) -> Axes:
    """Draw δ of every layer over the steps (LAGS figure 2); the convergence proof assumes that it is at most 1.

    Parameters
    ----------
    records : sequence of mapping
        Records with layer, step and delta; those without a number are left out.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    # one NaN would be the median of its step, and the largest
    records = _having(records, "delta")
    layers = _distinct(records, "layer")
    few = len(layers) <= _FEW_LAYERS
    for i, layer in enumerate(layers):
        points = sorted((r["step"], r["delta"]) for r in records if r["layer"] == layer)
        # one entry in the legend stands for all grey lines
        style: dict[str, Any] = {"color": "0.6", "lw": 0.7, "ms": 1.5}
        style["label"] = "_" if i else "each layer"
        if few:
            style = {"color": PALETTE[i], "ls": ("-", *LINES)[i % 5], "ms": 4, "label": layer}
        where, values = zip(*points, strict=True)
        ax.plot(where, values, **marked(values), **style)
    if layers and not few:
        steps = sorted(_distinct(records, "step"))
        at = [[r["delta"] for r in records if r["step"] == step] for step in steps]
        dots: dict[str, Any] = {"ms": 4, **marked(steps)}
        largest, median = [max(v) for v in at], [np.median(v) for v in at]
        ax.plot(steps, largest, color=PALETTE[1], lw=1.5, ls="--", label="largest", **dots)
        ax.plot(steps, median, color=PALETTE[0], lw=2, label="median", **dots)
    beyond = sum(r["delta"] > 1 for r in records)
    label = f"assumption fails: {beyond} of {len(records)}"
    ax.axhline(1, color="black", lw=1)
    # the axis reaches beyond 1 even where all is well, so that the line is seen
    ax.set_ylim(0, max(1.2, ax.get_ylim()[1]))
    # up to the end of the axis, after it was set
    ax.axhspan(1, ax.get_ylim()[1], color="0.92", zorder=0, label=label)
    ax.set(xlabel="step", ylabel="δ of the layer")
    legend_below(ax)
    return tidy(ax, title)


def matching_rate(
    records: Sequence[Mapping[str, Any]], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw the share of signs that equal those of the exact average, over the steps (Marsit figure 1 b).

    Parameters
    ----------
    records : sequence of mapping
        Records with compressor, step and matching_rate, in [0, 1]; those without a number are left out.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    _lines(_having(records, "matching_rate"), "step", "matching_rate", ax, marker=False)
    # room for the coin's line, and for all that is below
    low = min(0.4, ax.dataLim.y0 - 0.02)
    ax.axhline(0.5, color="0.3", lw=0.8, label="a coin")
    ax.set(xlabel="step", ylabel="share of matching signs", ylim=(low, 1.02))
    ax.legend(fontsize="small")
    return tidy(ax, title)


def time_split(records: Sequence[Mapping[str, Any]], ax: Axes, *, title: str | None = None) -> Axes:
    """Draw where the time of a training step goes, by compressor (RedSync figure 10, Marsit figure 5).

    Computing is the same work with every compressor, so all have its median, and its range over them is shaded: a
    difference between two compressors that is smaller is noise.

    Parameters
    ----------
    records : sequence of mapping
        Records with compressor, and compute, select and communicate in seconds per step, of one model and batch.
        Several of a compressor are averaged.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    names = _distinct(records, "compressor")
    means = {
        part: [
            1e3 * float(np.mean([r[part] for r in records if r["compressor"] == n])) for n in names
        ]
        for part in ("compute", "select", "communicate")
    }
    least, most = (f(means["compute"]) if names else 0.0 for f in (min, max))
    middle = float(np.median(means["compute"])) if names else 0.0
    means["compute"] = [middle] * len(names)
    left = np.zeros(len(names))
    for i, (part, widths) in enumerate(means.items()):
        style: dict[str, Any] = {"color": PALETTE[i], "hatch": HATCHES[i], "edgecolor": "white"}
        ax.barh(range(len(names)), widths, left=left, label=part, **style)
        left += widths
    if most > least:
        label = f"compute, measured: {format_value(least)} to {format_value(most)} ms"
        ax.axvspan(least, most, color="0.85", zorder=0, label=label)
    ax.set(xlabel="time per step (ms)")
    ax.set_yticks(range(len(names)), list(map(visible, names)))
    ax.invert_yaxis()
    legend_below(ax)
    return tidy(ax, title)


def timeline(records: Sequence[Mapping[str, Any]], ax: Axes, *, title: str | None = None) -> Axes:
    """Draw when each layer is worked on in each lane, as a Gantt chart (LAGS figure 1).

    Every block has the name of its layer; where a name is longer than its block, all have numbers, with a key.

    Parameters
    ----------
    records : sequence of mapping
        Records with lane (what works, such as ``compute`` or ``communicate``), layer, and start and end in seconds.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    lanes = _distinct(records, "lane")
    layers = _distinct(sorted(records, key=lambda r: r["start"]), "layer")
    origin = min((r["start"] for r in records), default=0.0)
    span = max((r["end"] for r in records), default=1.0) - origin
    # names where all of them fit into their blocks, else numbers, and which layers they are beside the axes
    fit = all(r["end"] - r["start"] > 0.012 * span * len(str(r["layer"])) for r in records)
    for i, lane in enumerate(lanes):
        for record in (r for r in records if r["lane"] == lane):
            start, width = record["start"] - origin, record["end"] - record["start"]
            ax.barh(i, 1e3 * width, left=1e3 * start, height=0.7, color=PALETTE[i % 10], alpha=0.6,
                    edgecolor="black", lw=0.5)  # fmt: skip
            name = str(record["layer"]) if fit else str(1 + layers.index(record["layer"]))
            # a number that does not fit stands above its block
            inside = fit or width > 0.012 * span * len(name)
            middle = 1e3 * (start + width / 2), i if inside else i - 0.42
            ax.text(*middle, name, ha="center", va="center", fontsize=7)
    if not fit:
        names = [f"{n}  {visible(str(layer))}" for n, layer in enumerate(layers, 1)]
        # a key of texts alone: its handles draw nothing
        nothing = [Line2D([], [], ls="") for _ in names]
        key = {
            "title": "layers",
            "handlelength": 0,
            "handletextpad": 0,
            "ncols": 1 + len(names) // 30,
        }
        ax.legend(
            nothing,
            names,
            fontsize="x-small",
            loc="center left",
            bbox_to_anchor=(1, 0.5),
            frameon=False,
            **key,
        )
    ax.set(xlabel="time (ms)")
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    return tidy(ax, title)
