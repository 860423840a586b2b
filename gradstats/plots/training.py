"""Figures over training and over layers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gradstats.errors import InputError
from gradstats.plots.style import (
    FEW_POINTS,
    LINES,
    PALETTE,
    label_of,
    legend_below,
    lone,
    marked,
    plain_log,
    tidy,
)
from gradstats.primitives.ratio import check_ratios, target_count
from gradstats.statistics.series import steps_of_all_ranks
from gradstats.tables import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from xarray import DataArray, Dataset

    from gradstats.primitives.sketch import Sketch

__all__ = ["drift", "drift_map", "layer_map", "overview"]

_BINS = 120
"""Rows of the picture of a training."""
_FAINTEST = 1e-5
"""Share of the elements per octave from which on it has a colour."""


def overview(
    steps: Mapping[int, Sketch],
    ax: Axes,
    *,
    ratios: Sequence[float] = (0.1, 0.01, 0.001),
    title: str | None = None,
) -> Axes:
    """Draw a training as one picture: steps across, magnitudes up, and the share of the elements per octave as colour.

    Lines are the exact thresholds that keep a ratio of all elements. Where something happened, the picture changes.

    Parameters
    ----------
    steps : mapping of int to Sketch
        Sketches of the captured steps, such as :func:`gradstats.sketch` makes; drawn side by side, however far apart.
    ax : matplotlib.axes.Axes
        Axes to draw on; a colour bar is put beside them.
    ratios : sequence of float, optional
        Kept fractions k/d, each in (0, 1], whose thresholds are lines.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.

    Raises
    ------
    InputError
        If no step has an element that is not zero.
    """
    from matplotlib.colors import LogNorm

    ratios = check_ratios(ratios)
    order = sorted(steps)
    # the number of all elements: shares are of these, zeros included
    every = [(steps[step].magnitudes, steps[step].numel) for step in order]
    if not any(m.count for m, _ in every):
        raise InputError("there is nothing to draw: no step has an element that is not zero")
    # the smallest hundredth of the elements would take half of the picture
    low = min(m.upper_quantile(0.99 * m.count) for m, _ in every if m.count)
    # a little above the largest, so that it lies inside the last row
    edges = np.geomspace(low, max(m.upper_quantile(1) for m, _ in every) * 1.05, _BINS + 1)
    octaves = np.log2(edges[1] / edges[0])
    # counts above an edge, whose differences are the rows
    above = np.array([[m.exceedances(edge) / numel for edge in edges] for m, numel in every])
    # per octave, so that the number of rows does not change the colours
    share = -np.diff(above, axis=1).T / octaves
    borders = np.arange(len(every) + 1) - 0.5
    mesh = ax.pcolormesh(
        borders,
        edges,
        np.ma.masked_less(share, _FAINTEST),
        cmap="cividis",
        norm=LogNorm(_FAINTEST, 1),
    )
    ax.figure.colorbar(mesh, ax=ax, label="share per octave")
    at = np.arange(len(every))
    for ratio, style in zip(ratios, itertools.cycle(("-", *LINES[:3])), strict=False):
        # a threshold of 0 keeps everything, and has no place on a logarithmic axis
        line = [m.upper_quantile(target_count(ratio, numel)) or np.nan for m, numel in every]
        for colour, width in (("white", 3.0), ("black", 1.2)):  # legible on any ground
            label = f"largest {ratio:g}" if colour == "black" else None
            marker = "o" if len(every) < FEW_POINTS else None
            ax.plot(at, line, style, color=colour, lw=width, marker=marker, ms=width, label=label)
    ax.set(yscale="log", xlabel="step", ylabel="magnitude |g|")
    ax.set(ylim=(edges[0], edges[-1]), xlim=(borders[0], borders[-1]))
    plain_log(ax.yaxis)
    _name_steps(ax, order, 0.0)
    legend_below(ax)
    # a grid over a map hides it
    tidy(ax, title).grid(visible=False)
    return ax


def drift(dataset: Dataset, quantity: str, ax: Axes, *, title: str | None = None) -> Axes:
    """Draw a quantity over training: mean over ranks, and the band from the least to the largest rank.

    Steps that not all ranks have are left out: a rank that ends early would move the mean.

    Parameters
    ----------
    dataset : xarray.Dataset
        Data set of :func:`gradstats.over_training` with one layer and kind selected. Ratios or models that are left
        differ by colour and line.
    quantity : str
        Variable of the data set.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.

    Raises
    ------
    InputError
        If more than one dimension beside step and rank is left.
    """
    array = dataset[quantity]
    other = [str(d) for d in array.dims if d not in ("step", "rank")]
    if len(other) > 1:
        raise InputError(
            f"a figure has one series of lines; use dataset.sel to choose all but one of {', '.join(other)}"
        )
    values = dataset[other[0]].values if other else [None]
    for i, value in enumerate(values):
        series = array if value is None else array.sel({other[0]: value})
        middle, colour = series, PALETTE[i % 10]
        if "rank" in series.dims:
            # steps that no rank has stay gaps
            series = series.sel(step=_of_all_ranks(series) | series.isnull().all("rank"))
            middle = series.mean("rank")
            bounds = series.min("rank"), series.max("rank")
            ax.fill_between(series["step"], *bounds, color=colour, alpha=0.2, lw=0)
            # a band of one step has no width
            if (alone := lone(middle)).size:
                low, high = (bound[alone] for bound in bounds)
                ax.vlines(series["step"][alone], low, high, color=colour, alpha=0.2, lw=4)
        label = None if value is None else label_of(str(value))
        style = ("-", *LINES)[i % 5]
        look = {"color": colour, "ls": style, "lw": 1.2, "ms": 3, **marked(middle)}
        ax.plot(middle["step"], middle, label=label, **look)
    ax.set(xlabel="step", ylabel=_named(array))
    if float(array.min()) > 0 and float(array.max()) > 10 * float(array.min()):
        ax.set_yscale("log")
    if other:
        ax.legend(fontsize="small", title=other[0])
    return tidy(ax, title)


def drift_map(
    dataset: Dataset, quantity: str, ax: Axes, *, relative: bool = True, title: str | None = None
) -> Axes:
    """Draw a quantity of every layer at every captured step as a map; white where there is none.

    Parameters
    ----------
    dataset : xarray.Dataset
        Data set of :func:`gradstats.over_training` by layer, with one kind, and one model or ratio, selected.
    quantity : str
        Variable of the data set. The mean over ranks is drawn, where all of them have one.
    ax : matplotlib.axes.Axes
        Axes to draw on; a colour bar is put beside them.
    relative : bool, optional
        Divide each layer by its geometric mean over the steps, to show what moves and not which layer is large. Only
        positive quantities are divided.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.

    Raises
    ------
    InputError
        If there are no layers, or another dimension is left.
    """
    array = _by_layer(dataset, quantity, ("step",))
    values = array.transpose("layer", "step").values.astype(float)
    name = _long_name(array)
    norm: Normalize | None = None
    known = values[np.isfinite(values)]
    # only positive quantities have a geometric mean
    if relative and known.size and (known > 0).all():
        from matplotlib.colors import LogNorm

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a layer may have no number at all
            values = values / np.exp(np.nanmean(np.log(values), axis=1, keepdims=True))
        norm, name = LogNorm(), f"{name} ÷ the layer's geometric mean"
    mesh = ax.pcolormesh(np.ma.masked_invalid(values), cmap="cividis", norm=norm)
    bar = ax.figure.colorbar(mesh, ax=ax, label=name)
    if norm is not None:
        plain_log(bar.ax.yaxis)
    _name_steps(ax, array["step"].values.tolist(), 0.5)
    _name_layers(ax, array, 0.5)
    ax.set(xlabel="step")
    tidy(ax, title).grid(visible=False)
    return ax


def layer_map(dataset: Dataset, quantity: str, ax: Axes, *, title: str | None = None) -> Axes:
    """Draw a quantity of every layer, in the model's order: median over steps and ranks, and the range.

    Parameters
    ----------
    dataset : xarray.Dataset
        Data set of :func:`gradstats.over_training` by layer, with one kind, and one model or ratio, selected.
    quantity : str
        Variable of the data set, such as ``zero_fraction``, ``mean`` for the scale, ``shape`` or ``p`` for the tail.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.

    Raises
    ------
    InputError
        If there are no layers, or another dimension is left.
    """
    array = _by_layer(dataset, quantity, ("step", "rank"))
    rows = array.transpose("layer", ...).values.reshape(array.sizes["layer"], -1)
    place, known = np.arange(len(rows)), [row[np.isfinite(row)] for row in rows]
    # by layer, as layers may lack steps
    low, middle, high = (
        [float(f(row)) if row.size else np.nan for row in known]
        for f in (np.min, np.median, np.max)
    )
    ax.hlines(place, low, high, color="0.6", lw=2)
    ax.plot(middle, place, "o", ms=3.5, color=PALETTE[0])
    _name_layers(ax, array, 0.0)
    ax.set(xlabel=_named(array))
    # scales of layers differ by powers of ten; matplotlib refuses a log axis of zeros
    if quantity in ("mean", "rms", "max", "scale", "threshold") and any(h > 0 for h in high):
        ax.set_xscale("log")
        plain_log(ax.xaxis)
    if quantity == "zero_fraction":
        # all shares, with room for points at the ends
        ax.set_xlim(-0.03, 1.03)
    return tidy(ax, title)


def _long_name(array: DataArray) -> str:
    return str(array.attrs.get("long_name", str(array.name).replace("_", " ")))


def _named(array: DataArray) -> str:
    """Return the long name of a variable with its unit."""
    unit = array.attrs.get("units", "1")
    return _long_name(array) if unit == "1" else f"{_long_name(array)} ({unit})"


def _of_all_ranks(array: DataArray) -> DataArray:
    """Return at which steps all ranks that have the quantity have it."""
    from xarray import apply_ufunc

    dimensions = ["step", "rank"]
    whole: DataArray = apply_ufunc(
        steps_of_all_ranks, array, input_core_dims=[dimensions], output_core_dims=[["step"]]
    )
    return whole


def _by_layer(dataset: Dataset, quantity: str, dimensions: tuple[str, ...]) -> DataArray:
    """Return a quantity over layers and the dimensions kept, averaged over ranks if these are not kept."""
    array = dataset[quantity].sel(layer=[name for name in dataset["layer"].values if name != "all"])
    if "rank" in array.dims and "rank" not in dimensions:
        # else the mean of a layer would move where a rank ends
        array = array.where(_of_all_ranks(array)).mean("rank")
    other = [str(d) for d in array.dims if d not in ("layer", *dimensions)]
    if other:
        raise InputError(
            f"a map has layers and steps only; use dataset.sel to choose one {', one '.join(other)}"
        )
    if not array.sizes["layer"]:
        raise InputError("no layers to draw; measure with per_layer=True")
    return array


def _name_steps(ax: Axes, steps: Sequence[int], offset: float) -> None:
    """Name at most eight of the steps, which stand side by side, at equal distances."""
    # the last step may go without: beside its neighbour's, its name would read as one number with it
    shown = range(0, len(steps), -(-len(steps) // 8))
    ax.set_xticks([i + offset for i in shown], [f"{steps[i]}" for i in shown])


def _name_layers(ax: Axes, array: DataArray, offset: float) -> None:
    """Name every layer, or as many as are legible, from the top down."""
    names = array["layer"].values
    # as high as the axes are now: the layout is made only when the figure is drawn
    height = ax.get_window_extent().height / ax.figure.dpi  # inches
    # nine names an inch are legible at this size
    shown = np.arange(0, names.size, max(1, int(np.ceil(names.size / max(height * 9, 1)))))
    ax.set_yticks(shown + offset, [visible(name) for name in names[shown]], fontsize=6.5)
    # the first layer on top, as in the model
    ax.set_ylim(names.size - 0.5 + offset, -0.5 + offset)
