"""Figures: one function each, drawing on the axes given and returning them.

Colours are distinguishable with any colour vision, and every series also differs in line style or marker,
so that the figures read in grey.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import seaborn as sns
from matplotlib.ticker import LogFormatter, NullFormatter
from numpy.typing import NDArray

from gradstats import pot
from gradstats._compressibility import CONTROLS, control, local_exponents
from gradstats._fit import Fit, as_magnitudes
from gradstats._sketch import Magnitudes, Sketch
from gradstats.errors import InputError
from gradstats.primitives import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset

__all__ = [
    "best_k_error",
    "density",
    "drift",
    "latency_bars",
    "local_exponent",
    "magnitude_decay",
    "mean_excess",
    "parameter_stability",
    "quality_bars",
    "quality_over_steps",
    "tail",
]

_PALETTE = sns.color_palette("colorblind")
_LINES = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_LABELS = {
    "laplace": "Laplace",
    "dgamma": "double gamma",
    "norm": "normal",
    "t": "Student's t",
    "gennorm": "gen. normal",
    "dweibull": "double Weibull",
    "lognorm": "log-normal",
    "double_genpareto": "double gen. Pareto",
    "halfnorm": "half-normal",
}
_MARKERS = "osD^vPX*<>ph"
_MOST_POINTS = 2000


def _label(name: str) -> str:
    return _LABELS.get(name, name)


def _next_colour(ax: Axes) -> tuple[float, float, float]:
    """Return a colour that no labelled line of the axes has yet."""
    return _PALETTE[sum(not str(line.get_label()).startswith("_") for line in ax.lines) % 10]  # type: ignore[no-any-return]


def _tidy(ax: Axes, title: str | None) -> Axes:
    if title:
        ax.set_title(title)
    ax.grid(alpha=0.3)
    sns.despine(ax=ax)
    return ax


def density(
    x: Array, fits: Sequence[Fit], ax: Axes, *, title: str | None = None, coverage: float = 0.99
) -> Axes:
    """Draw the density of the signed elements and of fitted models (SIDCo figure 2 a, c; 8 a, c).

    Parameters
    ----------
    x : gradient, any shape.
    fits : of the same gradient.
    ax : matplotlib axes to draw on.
    coverage : share of the elements inside the horizontal range.
    """
    values = np.asarray(x, np.float32).reshape(-1)
    values = values[np.isfinite(values)]
    nonzero = values[values != 0]
    limit = float(np.quantile(np.abs(nonzero), coverage)) if nonzero.size else 1.0
    counts, edges = np.histogram(nonzero, bins=150, range=(-limit, limit))
    widths = np.diff(edges)
    centres = (edges[:-1] + edges[1:]) / 2
    ax.fill_between(
        centres, counts / (values.size * widths), step="mid", color="0.8", label="captured"
    )
    for i, fitted in enumerate(fits):
        ax.plot(
            centres,
            (1 - fitted.zero_fraction) * fitted.dist.pdf(centres),
            ls=_LINES[i % len(_LINES)],
            color=_PALETTE[i],
            label=_label(fitted.model),
        )
    ax.set(xlabel="gradient element", ylabel="density", yscale="log")
    ax.legend(fontsize="small")
    return _tidy(ax, title)


def tail(
    x: Array | Sketch | Magnitudes, fits: Sequence[Fit], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw the share of elements above each magnitude, and what fitted models say (SIDCo figure 2 b, d; 8 b, d).

    Log-log: the far right is what a threshold at a small ratio depends on.
    """
    m = as_magnitudes(x)
    n, total = m.count, m.count / (1 - m.zero_fraction) if m.count else 1.0
    picks, magnitudes = _ranked(m)
    ax.plot(magnitudes, picks / total, color="0.2", lw=2.5, label="captured")
    if n:
        grid = np.geomspace(magnitudes[-1], magnitudes[0] * 2, 300)
        for i, fitted in enumerate(fits):
            survival = (1 - fitted.zero_fraction) * fitted.magnitude.sf(grid)
            ax.plot(
                grid,
                np.where(survival > 0, survival, np.nan),
                ls=_LINES[i % len(_LINES)],
                color=_PALETTE[i],
                label=_label(fitted.model),
            )
        ax.set_xlim(m.upper_quantile(0.8 * n), float(magnitudes[0]) * 2)
    for ratio in (0.1, 0.01, 0.001):
        ax.axhline(ratio, color="0.7", lw=0.7, zorder=0)
    ax.set(
        xlabel="magnitude |g|",
        ylabel="share of elements ≥ |g|",
        xscale="log",
        yscale="log",
        ylim=(0.5 / max(total, 1), 1.5),
    )
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.legend(fontsize="small")
    return _tidy(ax, title)


def _ranked(m: Magnitudes) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ranks evenly spread on a log axis, and the magnitudes there."""
    ranks = _log_ranks(m.count)
    return ranks, np.array([m.upper_quantile(int(k)) for k in ranks])


def _log_ranks(n: int) -> NDArray[np.int64]:
    """Return at most a few thousand ranks from 1 to n, evenly spread on a log axis."""
    if n == 0:
        return np.empty(0, np.int64)
    return np.unique(np.geomspace(1, n, min(n, _MOST_POINTS)).astype(np.int64))


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
    vectors : label to gradient or sketch.
    window : ranks to shade, as in :func:`gradstats.compressibility`.
    """
    each = {label: as_magnitudes(x) for label, x in vectors.items()}
    numel = max([2, *(m.count for m in each.values())])  # of the controls
    for i, (label, m) in enumerate(each.items()):
        ranks, magnitudes = _ranked(m)
        if ranks.size:
            ax.plot(ranks, magnitudes / m.max, color=_PALETTE[i % 10], lw=2, label=label)
    for i, name in enumerate(CONTROLS):
        _, magnitudes = control(name, numel, (1, numel))
        ranks = _log_ranks(magnitudes.size)
        relative = magnitudes[ranks - 1] / magnitudes[0]
        ax.plot(ranks, relative, color="0.5", ls=_LINES[i], label=f"control: {_label(name)}")
    ranks = _log_ranks(numel)
    ax.plot(ranks, ranks**-0.5, color="black", lw=1, ls=(0, (1, 3)), label="rank^(−½)")
    if window:
        ax.axvspan(*window, color="0.92", zorder=0)
    ax.set(
        xlabel="rank",
        ylabel="magnitude ÷ largest",
        xscale="log",
        yscale="log",
        ylim=(1e-5, 1.5),
    )
    ax.legend(fontsize="small")
    return _tidy(ax, title)


def best_k_error(
    vectors: Mapping[str, Array | Sketch | Magnitudes], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw the error of keeping the k largest, σ_k over the norm, with controls (SIDCo figure 7 b).

    Parameters
    ----------
    vectors : label to gradient or sketch.
    """
    each = {label: as_magnitudes(x) for label, x in vectors.items()}
    for i, (label, m) in enumerate(each.items()):
        if m.count:
            ax.plot(*_remaining(m), color=_PALETTE[i % 10], lw=2, label=label)
    for style, label, ideal in _controls(each):
        ax.plot(*_remaining(ideal), color="0.5", ls=style, label=label)
    ax.set(xlabel="k", ylabel="σ_k ÷ norm", xscale="log", yscale="log", ylim=(1e-3, 1.2))
    ax.legend(fontsize="small")
    return _tidy(ax, title)


def _controls(each: Mapping[str, Magnitudes]) -> Iterator[tuple[Any, str, Magnitudes]]:
    """Yield line style, label and ideal sample of every control, of the largest vector's size."""
    numel = max([2, *(m.count for m in each.values())])
    for i, name in enumerate(CONTROLS):
        ideal = Magnitudes.from_values(control(name, numel, (1, numel))[1])
        yield _LINES[i], f"control: {_label(name)}", ideal


def _remaining(m: Magnitudes) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ranks k and σ_k over the norm, cell by cell from the largest."""
    kept = np.cumsum((m.weight * m.middle**2)[::-1])
    ranks = np.cumsum(m.weight[::-1])
    picks = np.unique(np.searchsorted(ranks, _log_ranks(m.count)).clip(0, ranks.size - 1))
    left = np.sqrt(np.maximum(1 - kept[picks] / kept[-1], 0.0))
    return np.rint(ranks[picks]).astype(np.int64), np.where(left > 1e-6, left, np.nan)


def local_exponent(
    vectors: Mapping[str, Array | Sketch | Magnitudes],
    ax: Axes,
    *,
    per_decade: int = 2,
    title: str | None = None,
) -> Axes:
    """Draw the decay exponent over successive ranges of ranks, with 95 % intervals and controls.

    Compressible is what stays above ½; a light tail starts near 0 and rises.

    Parameters
    ----------
    vectors : label to gradient or sketch.
    per_decade : ranges per factor of ten.
    """
    each = {label: as_magnitudes(x) for label, x in vectors.items()}
    for i, (label, m) in enumerate(each.items()):
        found = local_exponents(m, per_decade)
        centres = [np.sqrt(e.first * e.last) for e in found]
        colour = _PALETTE[i % 10]
        ax.plot(centres, [e.p for e in found], marker=_MARKERS[i], ms=4, color=colour, label=label)
        bounds = [e.p_low for e in found], [e.p_high for e in found]
        ax.fill_between(centres, *bounds, color=colour, alpha=0.2)
    for style, label, ideal in _controls(each):
        found = local_exponents(ideal, per_decade)
        centres = [np.sqrt(e.first * e.last) for e in found]
        ax.plot(centres, [e.p for e in found], color="0.5", ls=style, label=label)
    ax.axhline(0.5, color="black", lw=1, ls=(0, (1, 3)), label="p = ½")
    ax.set(xlabel="rank", ylabel="local exponent p", xscale="log", ylim=(0, 2))
    ax.legend(fontsize="small", loc="upper left")
    return _tidy(ax, title)


def mean_excess(
    x: Array | Sketch | Magnitudes, ax: Axes, *, label: str = "captured", title: str | None = None
) -> Axes:
    """Draw the mean excess over each threshold with its 95 % interval.

    A line: level for an exponential tail, rising for a heavy one, falling for one that ends.

    Parameters
    ----------
    x : gradient or sketch.
    label : for the legend, so that several can share axes.
    """
    rows = pot.mean_excess(x)
    colour = _next_colour(ax)
    thresholds = [r.threshold for r in rows]
    ax.plot(thresholds, [r.mean for r in rows], marker="o", ms=3, color=colour, label=label)
    ax.fill_between(
        thresholds, [r.low for r in rows], [r.high for r in rows], color=colour, alpha=0.2
    )
    ax.set(xlabel="threshold u (gradient's unit)", ylabel="mean of |g| − u beyond u")
    ax.legend(fontsize="small")
    return _tidy(ax, title)


def parameter_stability(
    x: Array | Sketch | Magnitudes, ax: Axes, *, label: str = "captured", title: str | None = None
) -> Axes:
    """Draw the generalized Pareto shape of the excesses by the share beyond the threshold, with its 95 % interval.

    From a good threshold on it stays the same; neighbouring points share their largest elements.

    Parameters
    ----------
    x : gradient or sketch.
    label : for the legend, so that several can share axes.
    """
    rows = [r for r in pot.parameter_stability(x) if np.isfinite(r.c)]
    colour = _next_colour(ax)
    ratios = [r.ratio for r in rows]
    ax.plot(ratios, [r.c for r in rows], marker="o", ms=3, color=colour, label=label)
    ax.fill_between(
        ratios, [r.c_low for r in rows], [r.c_high for r in rows], color=colour, alpha=0.2
    )
    ax.axhline(0, color="0.3", lw=0.8)
    ax.set(
        xlabel="share of elements beyond the threshold",
        ylabel="shape ξ of the excesses",
        xscale="log",
    )
    if not ax.xaxis_inverted():
        ax.invert_xaxis()
    ax.legend(fontsize="small")
    return _tidy(ax, title)


def drift(dataset: Dataset, quantity: str, ax: Axes, *, title: str | None = None) -> Axes:
    """Draw a quantity over training: mean over ranks, and the band from the least to the largest rank.

    Parameters
    ----------
    dataset : of :func:`gradstats.over_training`, selected down to one layer and kind; a ratio or model that is left
        is told apart by colour and line.
    quantity : variable of it.
    """
    array = dataset[quantity]
    other = [str(d) for d in array.dims if d not in ("step", "rank")]
    if len(other) > 1:
        raise InputError(f"select one of each but one of {', '.join(other)}")
    values = dataset[other[0]].values if other else [None]
    for i, value in enumerate(values):
        series = array if value is None else array.sel({other[0]: value})
        middle, ranks = series, "rank" in series.dims
        if ranks:
            middle = series.mean("rank")
            bounds = series.min("rank"), series.max("rank")
            ax.fill_between(series["step"], *bounds, color=_PALETTE[i % 10], alpha=0.2, lw=0)
        label = None if value is None else _label(str(value))
        style = ("-", *_LINES)[i % 5]
        ax.plot(middle["step"], middle, color=_PALETTE[i % 10], ls=style, lw=1.2, label=label)
    ax.set(xlabel="step", ylabel=quantity.replace("_", " "))
    if float(array.min()) > 0 and float(array.max()) > 10 * float(array.min()):
        ax.set_yscale("log")
    if other:
        ax.legend(fontsize="small", title=other[0])
    return _tidy(ax, title)


def quality_bars(
    records: Sequence[Mapping[str, Any]], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw mean k̂/k of each estimator and ratio with the 90 % interval (SIDCo figure 1 c).

    Parameters
    ----------
    records : of :func:`gradstats.quality`, one trace and kind.
    """
    ratios = list(dict.fromkeys(r["ratio"] for r in records))
    names = list(dict.fromkeys(r["estimator"] for r in records))
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        for record in (r for r in records if r["estimator"] == name):
            position = ratios.index(record["ratio"]) + (i - (len(names) - 1) / 2) * width
            mean = max(record["mean"], 1e-3)
            ax.errorbar(
                position,
                mean,
                yerr=[
                    [max(mean - max(record["low"], 1e-3), 0)],
                    [max(record["high"] - mean, 0)],
                ],
                fmt=_MARKERS[i % len(_MARKERS)],
                color=_PALETTE[i % 10],
                capsize=3,
                label=name if record["ratio"] == ratios[0] else None,
            )
    for j, ratio in enumerate(ratios):
        record = next(r for r in records if r["ratio"] == ratio)
        floor = (max(record["floor_low"], 1e-3), record["floor_high"])
        ax.fill_between(
            [j - 0.45, j + 0.45], *floor, color="0.85", zorder=0, label=None if j else "noise floor"
        )
    ax.axhline(1, color="0.3", lw=0.8)
    ax.set(xlabel="ratio k/d", ylabel="k̂/k", yscale="log")
    ax.set_xticks(range(len(ratios)), [f"{r:g}" for r in ratios])
    for formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    ax.legend(fontsize="small")
    return _tidy(ax, title)


def quality_over_steps(
    series: Sequence[Mapping[str, Any]], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw k̂/k of each estimator over the steps, mean over ranks (SIDCo figures 4 b, d and 9).

    Parameters
    ----------
    series : of :func:`gradstats.quality_series`, one ratio and kind.
    """
    names = list(dict.fromkeys(r["estimator"] for r in series))
    for i, name in enumerate(names):
        points: dict[int, list[float]] = {}
        for record in series:
            if record["estimator"] == name:
                points.setdefault(record["step"], []).append(max(record["quality"], 1e-3))
        steps = sorted(points)
        means = [float(np.mean(points[step])) for step in steps]
        ax.plot(
            steps,
            means,
            marker=_MARKERS[i % len(_MARKERS)],
            ms=4,
            ls=("-", *_LINES)[i % 5],
            color=_PALETTE[i % 10],
            label=name,
        )
    if series:
        floor = 1.96 / np.sqrt(max(series[0]["k"], 1))
        ax.axhspan(max(1 - floor, 1e-3), 1 + floor, color="0.88", zorder=0, label="noise floor")
    ax.axhline(1, color="0.3", lw=0.8)
    ax.set(xlabel="step", ylabel="k̂/k", yscale="log")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.legend(fontsize="small", ncols=2)
    return _tidy(ax, title)


def latency_bars(
    records: Sequence[Mapping[str, Any]],
    ax: Axes,
    *,
    value: str = "seconds",
    title: str | None = None,
) -> Axes:
    """Draw latency, or speed-up over top-k, of every compressor by ratio (SIDCo figures 14 to 17).

    Parameters
    ----------
    records : of :func:`gradstats.bench.bench`, one numel and thread count.
    value : ``"seconds"``, ``"streams"`` or ``"speedup"``.
    """
    names = list(dict.fromkeys(r["compressor"] for r in records))
    ratios = list(dict.fromkeys(r["ratio"] for r in records))
    hatches = ("", "//", "..", "xx")
    height = 0.8 / max(len(ratios), 1)
    for j, ratio in enumerate(ratios):
        rows = {r["compressor"]: r[value] for r in records if r["ratio"] == ratio}
        ax.barh(
            [names.index(n) + (j - (len(ratios) - 1) / 2) * height for n in rows],
            list(rows.values()),
            height,
            color=_PALETTE[j % 10],
            hatch=hatches[j % 4],
            edgecolor="white",
            label=f"ratio {ratio:g}",
        )
    units = {"seconds": "latency (s)", "streams": "latency (reads of the data)"}
    ax.set(xlabel=units.get(value, "speed-up over torch.topk"), xscale="log")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.legend(fontsize="small")
    return _tidy(ax, title)
