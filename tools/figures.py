"""Draw the figures of the README and the docs into docs/img/.

    python tools/figures.py [NAME …]

``make figures`` draws all of them. Most are drawn from the traces in data/. Figures of live runs are drawn from the
flat records in docs/results/NAME.json, which benchmarks/diagnostics.py, benchmarks/validation.py and ``gradstats
bench --format json`` write. Where that file is missing, the program says so and leaves the figure as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pages import IMAGES, RESULTS, ROOT

import gradstats
from gradstats import plots
from gradstats.primitives.ratio import RATIOS
from gradstats.statistics.distributions import SIDS
from gradstats.thresholds import ESTIMATORS

DATA = ROOT / "data"
PANELS = {"resnet20": "gradient", "resnet20-ef": "corrected"}
TITLES = ("without error feedback", "with error feedback")
RUN = "ResNet-20 on CIFAR-10, top-k at ratio 0.001, 3,000 steps"
DIGITS = "ResNet-20 on digits"


def read(trace: str, step: int, kind: str = "gradient"):
    """Return one captured gradient of rank 0."""
    return gradstats.open_trace(DATA / f"{trace}.zarr").read(step, kind=kind)


def panels(rows: int, columns: int, title: str, *, width: float = 5.0, height: float = 3.6):
    """Return a figure, with a title that says what was trained, and its array of axes."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False)


def tails() -> Figure:
    """Draw the tail of one step with three fits, without and with error feedback."""
    figure, axes = panels(1, 2, f"{RUN}: step 100")
    for ax, (name, kind), title in zip(axes[0], PANELS.items(), TITLES, strict=True):
        g = read(name, 100, kind)
        plots.tail(g, [gradstats.fit(g, m) for m in SIDS], ax, title=title)
    return figure


def fits(trace: str) -> Figure:
    """Draw density, tail and Q–Q early and late in training (SIDCo's figures 2 and 8)."""
    figure, axes = panels(
        2, 3, f"{RUN}, {dict(zip(PANELS, TITLES, strict=True))[trace]}", width=4.6
    )
    for row, step in zip(axes, (100, 2999), strict=True):
        g = read(trace, step, PANELS[trace])
        fitted = [gradstats.fit(g, m) for m in SIDS]
        for ax, draw in zip(row, (plots.density, plots.tail, plots.qq), strict=True):
            draw(g, fitted, ax, title=f"{PANELS[trace]}, step {step}")
    return figure


def compressibility() -> Figure:
    """Draw SIDCo's figure 7 with controls, and the local exponent, which a straight line through it hides."""
    vectors = {
        "gradient, step 10": read("resnet20", 10),
        "gradient, step 2999": read("resnet20", 2999),
        "with error feedback, step 2999": read("resnet20-ef", 2999, "corrected"),
    }
    reduced = {label: gradstats.sketch(x) for label, x in vectors.items()}
    figure, [[left, middle, right]] = panels(1, 3, RUN, height=4)
    plots.magnitude_decay(reduced, left, window=(1, 2697), title="sorted magnitudes")
    plots.best_k_error(reduced, middle, title="error of keeping the k largest")
    plots.local_exponent(reduced, right, title="decay exponent by rank")
    return figure


def peaks() -> Figure:
    """Draw mean excess and shape over thresholds, for all layers as they are and for normalised ones."""
    figure, [[left, right]] = panels(1, 2, f"{RUN}, {TITLES[0]}, step 2999")
    trace = gradstats.open_trace(DATA / "resnet20.zarr")
    g = trace.read(2999)
    scaled = g.copy()
    for layer in trace.layers:
        scaled[layer.slice] /= abs(g[layer.slice]).mean()
    for label, x in {"pooled": g, "layers normalised": scaled}.items():
        plots.mean_excess(x / abs(x).mean(), left, label=label)
        plots.parameter_stability(x, right, label=label)
    left.set(xlabel="threshold u ÷ mean", ylabel="mean of |g| − u beyond u, ÷ mean")
    return figure


def quality() -> Figure:
    """Draw k̂/k of the rules (SIDCo's figure 1 c), and over the steps at the smallest ratio (figures 4 and 9)."""
    figure, axes = panels(2, 2, f"{RUN}: steps 10 to 2999", height=3.8)
    names = [name for name in ESTIMATORS if name not in ("exact", "warm-exact", "redsync-trimmed")]
    for column, (name, kind), title in zip(axes.T, PANELS.items(), TITLES, strict=True):
        source = DATA / f"{name}.zarr"
        records = gradstats.quality(source, RATIOS, names, kinds=[kind])
        plots.quality_bars(records, column[0], title=title)
        series = gradstats.quality_series(source, [0.001], names, kinds=[kind])
        plots.quality_over_steps(series, column[1], title=f"{title}, ratio 0.001")
    for ax in axes[:, 0]:  # both columns have the same
        ax.get_legend().remove()
    return figure


def layers() -> Figure:
    """Draw scale and tail of every layer, and how the scale changes."""
    data = gradstats.over_training(
        DATA / "resnet20.zarr", models=["double_genpareto"], ratios=[0.01], per_layer=True
    ).sel(kind="gradient", model="double_genpareto", ratio=0.01)
    figure, axes = panels(1, 3, f"{RUN}, {TITLES[0]}", width=4, height=7)
    for ax, quantity in zip(axes[0], ("mean", "shape"), strict=False):
        plots.layer_map(data, quantity, ax)
    plots.drift_map(data, "mean", axes[0, 2])
    for ax in axes[0, 1:]:
        ax.tick_params(labelleft=False)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "tails": tails,
    "fits": lambda: fits("resnet20"),
    "fits-ef": lambda: fits("resnet20-ef"),
    "compressibility": compressibility,
    "peaks": peaks,
    "quality": quality,
    "layers": layers,
}
"""Figures drawn from the traces in data/."""


def bench(records: list[dict]) -> Figure:
    """Draw latency and speed-up at the largest size with the fewest threads (SIDCo's figures 14 to 17)."""
    numel, threads = max(r["numel"] for r in records), min(r["threads"] for r in records)
    shown = [r for r in records if r["numel"] == numel and r["threads"] == threads]
    title = f"Synthetic gradient of fifty Laplace layers, {numel:,} elements, threads: {threads}"
    figure, axes = panels(1, 2, title, width=5.5, height=6)
    for ax, value in zip(axes[0], ("seconds", "speedup"), strict=True):
        plots.latency_bars(shown, ax, value=value)
    return figure


def single(draw: Callable[..., Axes], title: str, records: list[dict]) -> Figure:
    """Draw records in one panel."""
    figure, [[ax]] = panels(1, 1, title, width=6.8, height=3.9)
    draw(records, ax)
    return figure


def speedup(records: list[dict]) -> Figure:
    """Draw predicted and measured speed-ups over dense against bandwidth."""
    title = "LSTM on PTB, Gloo between network namespaces: predicted (lines), measured (points)"
    figure, axes = panels(1, 2, title, width=5.6, height=4.2)
    for workers, ax in zip(sorted({r["workers"] for r in records}), axes[0], strict=True):
        here = [r for r in records if r["workers"] == workers]
        predicted = [r for r in here if "speedup" in r]
        plots.speedup(predicted, ax, measured=[r for r in here if "speedup" not in r])
    return figure


LIVE: dict[str, Callable[[list[dict]], Figure]] = {
    "bench": bench,
    "build_up": partial(single, plots.build_up, f"{DIGITS}, ratio 0.01: mean of steps 10 to 29"),
    "delta": partial(single, plots.lags_delta, f"{DIGITS}, four ranks, LAGS-SGD at ratio 0.001"),
    "matching_rate": partial(single, plots.matching_rate, f"{DIGITS}, four ranks"),
    "speedup": speedup,
    "time_split": partial(
        single, plots.time_split, "ResNet-20 on CIFAR-10, two ranks over loopback, ratio 0.001"
    ),
    "timeline": partial(single, plots.timeline, f"{DIGITS}, two ranks: a step of LAGS-SGD"),
}
"""Figures drawn from the records in docs/results/NAME.json."""


def from_results(name: str) -> Figure | None:
    """Draw a figure of live runs; return None if its records are missing."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    return LIVE[name](json.loads(path.read_text(encoding="utf-8")))


def main() -> None:
    """Draw the named figures, or all, and say which records are missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*FIGURES, *LIVE]))
    names = parser.parse_args().names or [*FIGURES, *LIVE]
    if unknown := sorted({*names} - {*FIGURES, *LIVE}):
        parser.error(f"no figure {', '.join(unknown)}")
    for name in names:
        figure = FIGURES[name]() if name in FIGURES else from_results(name)
        if figure is None:
            print(f"missing: docs/results/{name}.json, so no {name}.png", file=sys.stderr)
            continue
        path = IMAGES / f"{name}.png"
        path.write_bytes(plots.png(figure))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
