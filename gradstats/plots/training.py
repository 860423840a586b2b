"""Figures over training and over layers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from gradstats.errors import InputError
from gradstats.plots.style import LINES, PALETTE, label_of, plain_log, tidy
from gradstats.tables import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from xarray import DataArray, Dataset

__all__ = ["drift", "drift_map", "layer_map"]


def drift(dataset: Dataset, quantity: str, ax: Axes, *, title: str | None = None) -> Axes:
    """Draw a quantity over training: mean over ranks, and the band from the least to the largest rank.

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
        middle, ranks = series, "rank" in series.dims
        if ranks:
            middle = series.mean("rank")
            bounds = series.min("rank"), series.max("rank")
            ax.fill_between(series["step"], *bounds, color=PALETTE[i % 10], alpha=0.2, lw=0)
        label = None if value is None else label_of(str(value))
        style = ("-", *LINES)[i % 5]
        ax.plot(middle["step"], middle, color=PALETTE[i % 10], ls=style, lw=1.2, label=label)
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
        Variable of the data set. The mean over ranks is drawn.
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
    steps = array["step"].values
    shown = np.unique(np.linspace(0, steps.size - 1, min(steps.size, 8)).astype(int))
    ax.set_xticks(shown + 0.5, [str(steps[i]) for i in shown])
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
    low, middle, high = (
        [float(f(row)) if row.size else np.nan for row in known]
        for f in (np.min, np.median, np.max)
    )
    ax.hlines(place, low, high, color="0.6", lw=2)
    ax.plot(middle, place, "o", ms=3.5, color=PALETTE[0])
    _name_layers(ax, array, 0.0)
    ax.set(xlabel=_named(array))
    if quantity in ("mean", "rms", "max", "scale", "threshold"):
        ax.set_xscale("log")
    if quantity == "zero_fraction":
        ax.set_xlim(-0.03, 1.03)
    return tidy(ax, title)


def _long_name(array: DataArray) -> str:
    return str(array.attrs.get("long_name", str(array.name).replace("_", " ")))


def _named(array: DataArray) -> str:
    """Return the long name of a variable with its unit."""
    unit = array.attrs.get("units", "1")
    return _long_name(array) if unit == "1" else f"{_long_name(array)} ({unit})"


def _by_layer(dataset: Dataset, quantity: str, kept: tuple[str, ...]) -> DataArray:
    """Return a quantity over layers and the dimensions kept, averaged over ranks if these are not kept."""
    array = dataset[quantity].sel(layer=[name for name in dataset["layer"].values if name != "all"])
    if "rank" in array.dims and "rank" not in kept:
        array = array.mean("rank")
    other = [str(d) for d in array.dims if d not in ("layer", *kept)]
    if other:
        raise InputError(
            f"a map has layers and steps only; use dataset.sel to choose one {', one '.join(other)}"
        )
    if not array.sizes["layer"]:
        raise InputError("no layers to draw; measure with per_layer=True")
    return array


def _name_layers(ax: Axes, array: DataArray, offset: float) -> None:
    """Name every layer, or as many as are legible, from the top down."""
    names = array["layer"].values
    height = ax.get_window_extent().height / ax.figure.dpi  # inches
    shown = np.arange(0, names.size, max(1, int(np.ceil(names.size / max(height * 9, 1)))))
    ax.set_yticks(shown + offset, [visible(name) for name in names[shown]], fontsize=6.5)
    ax.set_ylim(names.size - 0.5 + offset, -0.5 + offset)
