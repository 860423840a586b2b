"""The part of the page about one source: data quality, figures and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradstats.analysis.quality import QUANTILES
from gradstats.primitives.ratio import RATIOS
from gradstats.primitives.sketch import Sketch
from gradstats.report.html import details, escape, figure, note, table
from gradstats.report.measured import TREND_RATIO, Measured
from gradstats.report.questions import COUNTING, missing_ranks
from gradstats.statistics.compressibility import default_window
from gradstats.statistics.laws import LAWS
from gradstats.statistics.pot import FEWEST
from gradstats.statistics.pot.peaks import MODEL
from gradstats.statistics.several import possible
from gradstats.trace.sources import SKETCHED, Captured, TraceSource

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["run", "section"]


def section(m: Measured) -> str:
    """Return the figures and tables of one source.

    Parameters
    ----------
    m : Measured
        Measurements of the source.

    Returns
    -------
    str
        HTML.
    """
    keys = [(kind, step) for kind in m.kinds for step in m.shown if (kind, step) in m.sketches]
    reduced = {f"{kind}, step {step}": m.sketches[kind, step] for kind, step in keys}
    name = escape(m.source.name)
    return "\n".join(
        [
            f'<h2 id="{name}">{name}</h2>',
            _capture(m),
            _overview(m),
            _ledger(m),
            _decay(m, reduced),
            _tail(m, reduced),
            _models(m),
            _thresholds(m),
            _layers(m),
        ]
    )


def _capture(m: Measured) -> str:
    parts = []
    if isinstance(m.source, TraceSource):
        # these two describe the file, not the run
        attributes = {
            k: v for k, v in m.source.trace.attrs.items() if k not in ("layout", "format")
        }
        rows = [{"name": name, "value": value} for name, value in _flat(attributes)]
        columns = {"name": "setting", "value": "value"}
        parts.append(details("How it was captured", table(rows, columns, "Metadata of the trace.")))
    if any(m.source.sketched(m.rank, kind) for kind in m.kinds):
        parts.append(note(f"Captured as sketches: {SKETCHED}."))
    return "".join(parts)


def _overview(m: Measured) -> str:
    """Return the training as a picture for each kind, where there are steps to see something between."""
    if len(m.steps) < 3:
        return ""
    from gradstats import plots

    parts = []
    for kind in m.kinds:
        steps = {step: s for (k, step), s in m.sketches.items() if k == kind}
        if len(steps) < 3 or not any(each.magnitudes.count for each in steps.values()):
            continue

        def draw(axes: Sequence[Axes], steps: Mapping[int, Sketch] = steps) -> None:
            plots.overview(steps, axes[0])

        caption = f"The training as one picture: how many elements of the {kind} have which magnitude in each step, "
        caption += "and the exact thresholds that keep 0.1, 0.01 and 0.001 of them."
        title = f"{m.source.name}, {kind}"
        parts.append(figure(1, draw, caption, title=title, width=9.0, height=4.2))
    return "<h3>The training at a glance</h3>" + "".join(parts) if parts else ""


def _flat(attributes: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and values of nested settings, one by one."""
    for name, value in attributes.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}, ")
        else:
            yield f"{before}{name}".replace("_", " "), str(value)


def run(m: Measured) -> str:
    """Return what is known of the run behind a source, and its loss, for the top of the page.

    Parameters
    ----------
    m : Measured
        Measurements of the source.

    Returns
    -------
    str
        HTML; empty for a single gradient.
    """
    if not m.facts:
        return ""
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in m.facts.items()
    )
    loss = ""
    if len(m.losses) > 1:

        def draw(axes: Sequence[Axes]) -> None:
            steps, losses = zip(*m.losses, strict=True)
            axes[0].plot(steps, losses, marker="o" if len(steps) < 50 else None, ms=4)
            axes[0].set(xlabel="step", ylabel="training loss")
            axes[0].grid(alpha=0.3)

        caption = f"Loss of {m.source.name} at the captured steps of rank {m.rank}."
        loss = figure(1, draw, caption, width=3.2, height=2.4)
    name = escape(m.source.name)
    return f"<section class=run><div><h2>{name}</h2><dl>{facts}</dl></div>{loss}</section>"


def _ledger(m: Measured) -> str:
    columns = {
        "rank": "rank",
        "kind": "kind",
        "steps": "steps",
        "zeros": "zeros, worst step",
        "nonfinite": "NaN or infinite, worst step",
        "nonfinite_steps": "steps with any",
        "tied": "share tied",
        "largest_tie": "largest tie",
        "constant": "constant layers",
    }
    rows = [r | {"constant": len(r["constant"])} for r in m.ledger]
    constant = sorted({name for r in m.ledger for name in r["constant"]})
    absent = ", ".join(map(str, missing_ranks(m)))
    caption = (
        "Ledger. Tied: non-zero elements whose magnitude another has too (float32 alone ties some)."
    )
    return (
        "<h3>Data quality</h3>"
        + table(rows, columns, caption)
        + (note(f"Ranks not captured: {absent}.") if absent else "")
        + (note(f"Constant layers: {', '.join(constant)}.") if constant else "")
    )


def _decay(m: Measured, reduced: dict[str, Sketch]) -> str:
    from gradstats import plots

    counts = {sketched.magnitudes.count for sketched in reduced.values()}
    # one element has no window of ranks
    windows = sorted({default_window(count) for count in counts if count > 1})

    def draw(axes: Sequence[Axes]) -> None:
        plots.magnitude_decay(reduced, axes[0], window=windows[-1] if windows else None)
        plots.best_k_error(reduced, axes[1])
        plots.window_exponent(reduced, axes[2])

    columns = {
        "kind": "kind",
        "step": "step",
        "p": "p",
        "p_low": "low",
        "p_high": "high",
        "runs_low": "low, by runs",
        "runs_high": "high, by runs",
        "hill": "Hill's p",
        "sigma_p": "exponent of σ_k",
        "window": "ranks",
        "compressible": "compressible",
    }
    of = " of that with most non-zero elements" if len(windows) > 1 else ""
    caption = f"Sorted magnitudes (shaded: the ranks p is estimated on{of}), the error of keeping the k largest, and p "
    caption += "by window: where it crosses ½, the answer depends on the window. Grey: controls, which must fail."
    return (
        "<h3>Is it compressible?</h3>"
        + figure(3, draw, caption, title=m.source.name)
        + table(
            m.decay,
            columns,
            "Decay exponents with 95 % intervals: of independent elements, and by runs of neighbours, which may depend "
            "on one another; controls last.",
        )
    )


def _tail(m: Measured, reduced: dict[str, Sketch]) -> str:
    from gradstats import plots

    last = {kind: reduced[f"{kind}, step {m.shown[-1]}"] for kind in m.kinds}
    # of fewer elements no tail is fitted
    some = {kind: s for kind, s in last.items() if s.magnitudes.count >= FEWEST}
    parts = ["<h3>How heavy is its tail?</h3>"]
    if some:

        def draw(axes: Sequence[Axes]) -> None:
            for label, each in some.items():
                # kinds of different scale share the axes
                relative = each.magnitudes.scaled(1 / each.magnitudes.mean)
                plots.mean_excess(relative, axes[0], label=label)
                plots.parameter_stability(each, axes[1], label=label)
            axes[0].set(xlabel="threshold u ÷ mean", ylabel="mean excess ÷ mean")

        caption = f"Mean excess (rising: heavy) and shape ξ of the excesses by threshold at step {m.shown[-1]}; 95 %."
        title = f"{m.source.name}, step {m.shown[-1]}"
        parts.append(figure(2, draw, caption, title=title))
    labels = {"kind": "kind", "step": "step"}
    shapes = {"n": "excesses", "c": "ξ", "c_low": "low", "c_high": "high"}
    peaks = labels | {"ratio": "share beyond", "threshold": "threshold u", **shapes}
    parts.append(
        details("Peaks over thresholds", table(m.peaks, peaks, "Pooled, by threshold; 95 %."))
    )
    if len(m.source.layers) > 1:
        last_step = [r for r in m.tails if r["step"] == m.shown[-1] and math.isfinite(r["c"])]
        caption = f"ξ of each layer's top tenth at step {m.shown[-1]}, where that is {FEWEST} elements; 95 %."
        by_layer = table(last_step, {"kind": "kind", "layer": "layer", **shapes}, caption)
        parts.append(details("Tail shape by layer", by_layer))
    return "".join(parts)


def _models(m: Measured) -> str:
    parts = ["<h3>Which model is closest?</h3>"]
    for (kind, step), reduced in m.sketches.items():
        if step in (m.shown[0], m.shown[-1]):
            parts.append(_fits(m.source.name, m.source.read(m.rank, kind, step), reduced))
    rows = [
        r
        | {"kept": r["quality"].get(r["tail_ratio"], math.nan)}
        | {"params": {LAWS[r["model"]].symbols.get(n, n): v for n, v in r["params"].items()}}
        | {"status": r["status"].removeprefix("ok")}  # the fit is, which says nothing of the law
        for r in m.fits
    ]
    columns = {
        "kind": "kind",
        "step": "step",
        "model": "model",
        "params": "parameters",
        "nll": "−log L per element",
        "ks": "Kolmogorov",
        "tail_error": "tail error",
        "tail_ratio": "ratio",
        "tail_k": "k",
        "kept": "k̂/k",
        "p_tail": "p of k̂",
        "visible": "sees k̂/k − 1 of",
        "status": "remarks on the fit",
    }
    caption = (
        "Fits, each judged on the gradient that it was fitted to; the answer above judges them at the next captured "
        "step, and more methods. Tail error: largest |ln(threshold of the model ÷ exact)|. p: of the number of "
        "elements that the model's threshold keeps at the smallest ratio in use, if elements were independent; the "
        "last column but one is the smallest k̂/k − 1 that it sees with probability 0.8."
    )
    return "".join([*parts, table(rows, columns, caption)])


def _fits(name: str, captured: Captured, reduced: Sketch) -> str:
    from gradstats import plots

    fits, _ = possible(reduced)

    def draw(axes: Sequence[Axes]) -> None:
        plots.density(captured.values, fits, axes[0])
        plots.tail(reduced, fits, axes[1])
        plots.qq(reduced, fits, axes[2])

    caption = f"Density, tail and Q–Q of the {captured.kind} at step {captured.step} with closed-form fits. "
    caption += "Bands hold at one rank each, if elements were independent."
    title = f"{name}, {captured.kind}, step {captured.step}"
    return figure(3, draw, caption, title=title, width=4.3, height=3.6)


def _thresholds(m: Measured) -> str:
    from gradstats import plots

    # those that count would be a line at 1
    quality = [r for r in m.quality if r["estimator"] not in COUNTING]
    # the smallest ratio is the farthest in the tail
    series = [r for r in m.series if r["estimator"] not in COUNTING and r["ratio"] == min(RATIOS)]

    def bars(axes: Sequence[Axes]) -> None:
        for ax, kind in zip(axes, m.kinds, strict=True):
            plots.quality_bars([r for r in quality if r["kind"] == kind], ax, title=kind)

    def steps(axes: Sequence[Axes]) -> None:
        for ax, kind in zip(axes, m.kinds, strict=True):
            plots.quality_over_steps([r for r in series if r["kind"] == kind], ax, title=kind)

    n = len(m.kinds)
    parts = ["<h3>Which threshold hits k?</h3>"]
    # of fewer than 20 gradients, low and high are the least and the largest
    whole = [r["spread"] != QUANTILES for r in quality]
    of = "all gradients" if whole and all(whole) else "90 % of the gradients"
    of += " (of all where they are fewer than 20)" if any(whole) and not all(whole) else ""
    caption = (
        f"Kept over asked for, and the interval of {of}; 1 is right. Grey: 1 ± 1.96/√k, what chance "
        "alone does to a known law of independent elements; in clusters of ten it is 3.2 times as wide. Rules that "
        "count k elements are in the table only."
    )
    parts.append(figure(n, bars, caption, title=m.source.name, width=6, height=4.2))
    if len(m.steps) > 1:
        caption = (
            f"Kept over asked for at ratio {min(RATIOS):g}, step by step. Rules with a state see the captured steps as "
            "if they were adjacent: in training they do better."
        )
        title = f"{m.source.name}, ratio {min(RATIOS):g}"
        parts.append(figure(n, steps, caption, title=title, width=6, height=4.2))
    columns = {
        "estimator": "rule",
        "ratio": "ratio",
        "kind": "kind",
        "k": "k",
        "mean": "k̂/k",
        "low": "low",
        "high": "high",
        "min": "least",
        "max": "most",
        "floor": "chance ±, known law",
        "floor_fitted": "chance ±, fitted Laplace",
        "energy_error": "excess error",
        "n": "gradients",
    }
    caption = (
        "Low and high: 5 and 95 % quantiles; of fewer than 20 gradients, the least and the most. "
        "Chance: 1.96/√k for independent elements of a known law, less for a Laplace fitted to them. Excess error: "
        "error of what is kept over that of the best k, minus 1."
    )
    return "".join([*parts, table(m.quality, columns, caption)])


def _layers(m: Measured) -> str:
    if len(m.source.layers) < 2:
        return ""
    from gradstats import plots

    parts = ["<h3>Layer by layer</h3>"]
    for kind in m.kinds:
        data = m.training.sel(kind=kind, model=MODEL, ratio=TREND_RATIO)
        zeros = bool((data["zero_fraction"] > 0).any())  # else there is nothing to see

        def draw(axes: Sequence[Axes], data: Any = data, zeros: bool = zeros) -> None:
            # the last axes are those of the map, so there is one more than quantities
            for ax, quantity in zip(
                axes, ("mean", "shape", "zero_fraction")[: 2 + zeros], strict=False
            ):
                plots.layer_map(data, quantity, ax)
            plots.drift_map(data, "mean", axes[-1])
            for ax in axes[1:]:
                # all axes have the same layers in the same order
                ax.tick_params(labelleft=False)

        caption = f"Scale{', tail and zeros' if zeros else ' and tail'} of the {kind} by layer, median and range over "
        caption += "steps; how the scale moves."
        height = min(2 + 0.11 * len(m.source.layers), 9)
        title = f"{m.source.name}, {kind}"
        parts.append(figure(3 + zeros, draw, caption, title=title, width=3.4, height=height))
    return "".join(parts)
