"""Figure of what compression gains on a cluster, predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from gradstats.errors import InputError
from gradstats.plots.style import LINES, MARKERS, PALETTE, look_of, plain_log, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SpeedupAt", "speedup"]

_MOST_LINES = 8
_MOST_BARS = 5
"""Places at which a line has its interval."""
SpeedupAt: TypeAlias = Literal["rate", "workers"]
_LABELS: dict[SpeedupAt, str] = {"rate": "bandwidth of a link (Mbit/s)", "workers": "workers"}


def speedup(
    records: Sequence[Mapping[str, Any]],
    ax: Axes,
    *,
    at: SpeedupAt = "rate",
    measured: Sequence[Mapping[str, Any]] = (),
    title: str | None = None,
) -> Axes:
    """Draw how many times as fast as the baseline a step is, predicted, with 95 % intervals and measured points.

    Intervals are bars in the colour of their line, at up to five places and beside each other.

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`gradstats.network.plan.plan`. Of workers or rate, whichever is not on the axis, the first is
        drawn. Of more than eight compressors and ratios, those with the largest speed-up anywhere are drawn.
    ax : matplotlib.axes.Axes
        Axes to draw on.
    at : {'rate', 'workers'}, optional
        Field on the horizontal, logarithmic axis: bandwidth of the links (Mbit/s), or number of workers.
    measured : sequence of mapping, optional
        Records of measured steps: compressor, ratio, workers, rate, seconds; ``none`` is dense. Points are drawn where
        the baseline was measured, too.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes
        The axes given.

    Raises
    ------
    InputError
        If there are no records with a speed-up.
    """
    # of what was not measured there is no line, and NaN has no place in an order
    records = [r for r in records if not math.isnan(r["speedup"])]
    if not records:
        raise InputError("there are no records of plan with a speed-up to draw")
    other = "workers" if at == "rate" else "rate"
    fixed = records[0][other]
    unit = records[0].get("baseline", "none")
    called = "dense" if unit == "none" else unit
    curves: dict[tuple[str, float | None, int], list[Mapping[str, Any]]] = {}
    # the fastest first: curves keep the order of their first record, and the first eight are drawn
    for record in sorted(records, key=lambda r: -r["speedup"]):
        steps = _local(record)
        # the baseline is the unit; dense with local steps is a way of its own
        if record["compressor"] != unit or steps:
            curves.setdefault((record["compressor"], record["ratio"], steps), []).append(record)
    # of what was planned only for other numbers there is no line
    curves = {
        key: here
        for key, rows in curves.items()
        if (here := [r for r in rows if r[other] == fixed])
    }
    ways = {(ratio, steps) for _, ratio, steps in curves if ratio is not None or steps}
    there = [r for r in measured if r[other] == fixed]
    # the baseline of the same place on the axis, without local steps, is what points are divided by
    base = {r[at]: r["seconds"] for r in there if r["compressor"] == unit and not _local(r)}
    drawn = min(len(curves), _MOST_LINES)
    for i, ((name, ratio, steps), curve) in enumerate(islice(curves.items(), _MOST_LINES)):
        look = {"color": PALETTE[i], "ls": ("-", *LINES)[i % 5]}
        if len(ways) < 2:  # else several ratios of a compressor are told apart by their looks
            look = {part: look_of(name)[part] for part in look}
        colour = look["color"]
        rows = sorted(curve, key=lambda r: r[at])
        x = [r[at] for r in rows]
        label = name if ratio is None else f"{name}, {ratio:g}"
        label += f", {steps} local steps" if steps else ""
        ax.plot(x, [r["speedup"] for r in rows], label=label, **look)
        # bands of eight lines, all in the same place, add up to one colour that is none of theirs
        places = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_BARS))
        some = [rows[j] for j in np.unique(places.astype(int))]
        # bars of several lines at one place stand side by side, each 1 % of the axis from the next
        beside = (x[-1] / x[0]) ** (0.01 * (i - (drawn - 1) / 2))
        low, high = ([r[bound] for r in some] for bound in ("speedup_low", "speedup_high"))
        ax.vlines([r[at] * beside for r in some], low, high, color=colour, lw=1, alpha=0.7)
        points = [
            (r[at], base[r[at]] / r["seconds"])
            for r in there
            if (r["compressor"], _local(r)) == (name, steps)
            and ratio in (None, r["ratio"])
            and r[at] in base
        ]
        if points:
            # a label with an underscore is in no legend: the line's own entry says it
            ax.plot(*zip(*points, strict=True), ls="", marker=MARKERS[i], color=colour,
                    mec="black", label=f"_{label}, measured")  # fmt: skip
    ax.axhline(1, color="0.3", lw=0.8)
    what = f"{fixed} workers" if other == "workers" else f"{fixed:,.6g} Mbit/s"
    if measured:
        what += ", points measured"
    ax.set(xlabel=_LABELS[at], ylabel=f"times as fast as {called}", xscale="log", yscale="log")
    plain_log(ax.xaxis)
    plain_log(ax.yaxis)
    ax.legend(fontsize="small", title=what, title_fontsize="small", loc="upper right")
    return tidy(ax, title)


def _local(record: Mapping[str, Any]) -> int:
    """Return the local steps of a record; steps that were measured before there were any have none."""
    return int(record.get("local_steps", 0))
