"""Figures of models and captured elements: density, tail, Q–Q, and peaks over a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from matplotlib.legend_handler import HandlerTuple
from numpy.typing import NDArray

from gradstats.plots.style import LINES, PALETTE, label_of, next_colour, plain_log, ranked, tidy
from gradstats.primitives import Array
from gradstats.primitives.arrays import as_numpy, check
from gradstats.primitives.ratio import RATIOS, check_number
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics import pot
from gradstats.statistics.fitting import Fit, as_magnitudes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["density", "mean_excess", "parameter_stability", "qq", "tail"]

_LARGEST = 1e250
"""Where axes end at the latest: Matplotlib's overflow beyond."""


def density(
    x: Array, fits: Sequence[Fit], ax: Axes, *, title: str | None = None, coverage: float = 0.99
) -> Axes:
    """Draw the density of the signed elements and of fitted models (SIDCo figure 2 a, c; 8 a, c).

    Parameters
    ----------
    x : array_like
        Gradient of any shape.
    fits : sequence of Fit
        Models fitted to the same gradient.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.
    coverage : float, optional
        Share of the elements inside the horizontal range.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    coverage = check_number(coverage, "coverage", 0, 1, "(]")
    values = as_numpy(check(x)).reshape(-1)
    values = values[np.isfinite(values)]
    # zeros are a point mass, which no density shows
    nonzero = values[values != 0]
    # a float64 limit makes float64 bins: float32 overflows on the range of the largest and merges the smallest
    limit = np.quantile(np.abs(nonzero), coverage) if nonzero.size else 1.0
    limit = np.float64(np.clip(np.float64(limit), 1 / _LARGEST, _LARGEST))
    # the same range for both signs, so that asymmetry can be seen
    counts, edges = np.histogram(nonzero, bins=150, range=(-limit, limit))
    widths = np.diff(edges)
    centres = (edges[:-1] + edges[1:]) / 2
    # over all elements, zeros included: the area is the share that is not zero
    ax.fill_between(
        centres, counts / (max(values.size, 1) * widths), step="mid", color="0.8", label="captured"
    )
    for i, fitted in enumerate(fits):
        ax.plot(
            centres,
            # a law describes the elements that are not zero
            (1 - fitted.zero_fraction) * fitted.dist.pdf(centres),
            ls=LINES[i % len(LINES)],
            color=PALETTE[i % 10],
            label=label_of(fitted.model),
        )
    ax.set(xlabel="gradient element (gradient's unit)", ylabel="density (1 ÷ gradient's unit)")
    ax.locator_params(axis="x", nbins=5)
    # nothing was drawn that a logarithm could show
    if nonzero.size:
        ax.set_yscale("log")
        plain_log(ax.yaxis)
    ax.legend(fontsize="small")
    return tidy(ax, title)


def tail(
    x: Array | Sketch | Magnitudes, fits: Sequence[Fit], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw the share of elements above each magnitude, and what fitted models say (SIDCo figure 2 b, d; 8 b, d).

    Both axes are logarithmic. A threshold at a small ratio depends on the far right. The band around the captured
    elements is that of :func:`qq`, and as optimistic.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient of any shape, or its sketch.
    fits : sequence of Fit
        Models fitted to the same gradient.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    m = as_magnitudes(x)
    # all finite elements, of which the magnitudes are those that are not zero
    n, total = m.count, m.count / (1 - m.zero_fraction) if m.count else 1.0
    picks, magnitudes = ranked(m)
    ax.plot(magnitudes, picks / total, color="0.2", lw=2, label="captured")
    if n:
        low, high = _beyond(picks, n)
        # shares of the non-zero elements become shares of all
        band = ax.fill_between(magnitudes, low * n / total, high * n / total, color="0.75", lw=0)
        band.set(zorder=0.5, label=_BAND)
        # a factor of two to see where laws go on beyond the largest element
        right = min(float(magnitudes[0]) * 2, _LARGEST)
        grid = np.geomspace(magnitudes[-1], right, 300)
        for i, fitted in enumerate(fits):
            survival = (1 - fitted.zero_fraction) * fitted.magnitude.sf(grid)
            ax.plot(
                grid,
                # a logarithmic axis has no place for 0: the line ends
                np.where(survival > 0, survival, np.nan),
                ls=LINES[i % len(LINES)],
                color=PALETTE[i % 10],
                label=label_of(fitted.model),
            )
        # the smallest fifth would take most of the axis
        ax.set_xlim(m.upper_quantile(0.8 * n), right)
    for ratio in RATIOS:
        ax.axhline(ratio, color="0.7", lw=0.7, zorder=0)
    ax.set(
        xlabel="magnitude |g| (gradient's unit)",
        ylabel="share of elements ≥ |g|",
        xscale="log" if n else "linear",
        yscale="log",
        # half an element: the last one is drawn above it
        ylim=(0.5 / max(total, 1), 1.5),
    )
    plain_log(ax.xaxis)
    ax.legend(fontsize="small")
    return tidy(ax, title)


_BAND = "95 % each, if independent"


def _beyond(ranks: NDArray[np.int64], n: int) -> tuple[NDArray[np.float64], ...]:
    """Return the 2.5 % and 97.5 % quantiles of the true share beyond the k-th largest of n: Beta(k, n + 1 − k)."""
    from scipy.stats import beta

    return tuple(np.asarray(beta.ppf(q, ranks, n + 1 - ranks)) for q in (0.025, 0.975))


def qq(
    x: Array | Sketch | Magnitudes, fits: Sequence[Fit], ax: Axes, *, title: str | None = None
) -> Axes:
    """Draw the captured magnitudes against those that fitted models expect at the same rank, log-log.

    On the diagonal a model is right; above it, the gradient's tail is heavier than the model's. The band holds, rank by
    rank, 95 % of the k-th largest of n independent elements of the model (order statistics; David and Nagaraja 2003,
    section 2.2).

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient of any shape, or its sketch. Zeros and non-finite elements are left out.
    fits : sequence of Fit
        Models fitted to the same gradient.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.

    Notes
    -----
    The band is too narrow, because elements of a gradient depend on one another. It also holds at each rank by itself,
    not at all of them at once: neighbours leave it together.
    """
    m = as_magnitudes(x)
    ranks, magnitudes = ranked(m)
    if ranks.size:
        low, high = _beyond(ranks, m.count)
        bands = []
        for i, fitted in enumerate(fits):
            # rank k of n is expected at the share (k − ½)/n
            expected, top, bottom = (
                fitted.magnitude.isf(share) for share in ((ranks - 0.5) / m.count, low, high)
            )
            # a low share beyond is a large magnitude, so the bounds change places
            band = ax.fill_between(expected, bottom, top, color=PALETTE[i % 10], alpha=0.2, lw=0)
            bands.append(band)
            style = {"ls": LINES[i % len(LINES)], "color": PALETTE[i % 10]}
            ax.plot(expected, magnitudes, label=label_of(fitted.model), **style)
        # the model may expect more than the largest captured
        right = min(float(magnitudes[0]) * 3, _LARGEST)
        limits = m.upper_quantile(0.8 * m.count), right
        ax.plot(limits, limits, color="0.3", lw=0.8, label="equal")
        ax.set(xlim=limits, ylim=limits, xscale="log", yscale="log")
        plain_log(ax.xaxis)
        plain_log(ax.yaxis)
        handles, names = ax.get_legend_handles_labels()
        if bands:  # one entry, in the colours of all of them
            handles = cast("list[Artist]", [*handles, tuple(bands)])  # as HandlerTuple takes it
            names = [*names, _BAND]
        ax.legend(handles, names, fontsize="small", handler_map={tuple: HandlerTuple(ndivide=None)})
    ax.set(
        xlabel="magnitude the model expects (gradient's unit)",
        ylabel="captured magnitude (gradient's unit)",
    )
    return tidy(ax, title)


def mean_excess(
    x: Array | Sketch | Magnitudes, ax: Axes, *, label: str = "captured", title: str | None = None
) -> Axes:
    """Draw the mean excess over each threshold with its 95 % interval.

    It is a line: level for an exponential tail, rising for a heavy one, falling for one that ends.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient of any shape, or its sketch.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    label : str, optional
        Label in the legend, so that several gradients can share axes.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    rows = pot.mean_excess(x)
    colour = next_colour(ax)
    thresholds = [r.threshold for r in rows]
    ax.plot(thresholds, [r.mean for r in rows], marker="o", ms=3, color=colour, label=label)
    ax.fill_between(
        thresholds, [r.low for r in rows], [r.high for r in rows], color=colour, alpha=0.2
    )
    ax.set(xlabel="threshold u (gradient's unit)", ylabel="mean excess (gradient's unit)")
    ax.legend(fontsize="small")
    return tidy(ax, title)


def parameter_stability(
    x: Array | Sketch | Magnitudes, ax: Axes, *, label: str = "captured", title: str | None = None
) -> Axes:
    """Draw the generalized Pareto shape of the excesses by the share beyond the threshold, with its 95 % interval.

    From a good threshold on the shape stays the same. Neighbouring points share their largest elements.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient of any shape, or its sketch.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    label : str, optional
        Label in the legend, so that several gradients can share axes.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.
    """
    # a threshold with too few excesses has no shape
    rows = [r for r in pot.parameter_stability(x) if np.isfinite(r.c)]
    colour = next_colour(ax)
    ratios = [r.ratio for r in rows]
    ax.plot(ratios, [r.c for r in rows], marker="o", ms=3, color=colour, label=label)
    ax.fill_between(
        ratios, [r.c_low for r in rows], [r.c_high for r in rows], color=colour, alpha=0.2
    )
    ax.axhline(0, color="0.3", lw=0.8)
    ax.set(xlabel="share of elements beyond the threshold", ylabel="shape ξ of the excesses")
    if rows:
        ax.set(xscale="log")
        # thresholds rise to the right, as in the mean excess beside it
        ax.xaxis.set_inverted(True)
    ax.legend(fontsize="small")
    return tidy(ax, title)
