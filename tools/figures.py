"""Draw the figures of the README and the docs into docs/img/.

    PYTHONPATH=benchmarks python tools/figures.py [NAME …]

``make figures`` draws all of them. Most are drawn from the traces in data/. Figures of live runs are drawn from the
flat records in docs/results/NAME.json, which benchmarks/diagnostics.py, benchmarks/validation.py and ``gradstats
bench --format json`` write. Where that file is missing, the program says so and leaves the figure as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pages import IMAGES, RESULTS, ROOT

import gradstats
from capture.workloads import workload_info
from gradstats import plots
from gradstats.analysis.advise import evidence, mean_above
from gradstats.primitives.ratio import RATIOS
from gradstats.statistics.distributions import SIDS
from gradstats.statistics.solution import Z95
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
    left.set(xlabel="threshold u ÷ mean", ylabel="mean excess ÷ mean")
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


def losses() -> Figure:
    """Draw what top-k with error feedback cost each measured training, a panel for each optimizer."""
    found = evidence()["trainings"]
    optimizers = {"sgd": "SGD with momentum", "adamw": "AdamW", "muon": "Muon"}
    figure, axes = panels(
        1, 3, "Top-k with error feedback: loss above dense training at equal steps", width=4.2
    )
    names = list(dict.fromkeys(each["training"] for each in found))
    for ax, (optimizer, title) in zip(axes[0], optimizers.items(), strict=True):
        for each in found:
            runs = [r for r in each["runs"] if (r["rule"], r["memory"]) == ("topk", "residual")]
            if each["optimizer"] != optimizer:
                continue
            # a training has its colour in all panels, and a line for each length it was trained for
            for steps in dict.fromkeys(r["steps"] for r in runs):
                mine = (r for r in runs if r["steps"] == steps)
                points = sorted((r["ratio"], 100 * mean_above(r["above"])) for r in mine)
                label = each["training"] + ("" if steps == 120 else f", {steps} steps")
                # there are ten colours
                place = names.index(each["training"])
                style = {"color": f"C{place % 10}", "marker": "os"[place // 10], "label": label}
                style["linestyle"] = "-" if steps == 120 else "--"
                ax.plot(*zip(*points, strict=True), **style)
        ax.axhspan(-2, 2, color="0.85", zorder=0, label="within 2 %")
        # linear to 2 %, so that what is below dense has a place
        ax.set(title=title, xlabel="ratio k/d", ylabel="percent above dense", xscale="log")
        ax.set_yscale("symlog", linthresh=2)
        ax.invert_xaxis()
        ax.set_ylim(-5, 3e4)
    # one for all panels, below them: many lines lie near 0
    shown = {}
    for ax in axes[0]:
        shown |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(
        shown.values(), shown.keys(), fontsize="x-small", loc="outside lower center", ncols=5
    )
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "tails": tails,
    "fits": lambda: fits("resnet20"),
    "fits-ef": lambda: fits("resnet20-ef"),
    "compressibility": compressibility,
    "peaks": peaks,
    "quality": quality,
    "layers": layers,
    "losses": losses,
}
"""Figures drawn from the traces in data/, and from the losses that advice rests on."""


def bench(records: list[dict]) -> Figure:
    """Draw latency and speed-up at the largest size with the fewest threads (SIDCo's figures 14 to 17)."""
    numel, threads = max(r["numel"] for r in records), min(r["threads"] for r in records)
    shown = [r for r in records if r["numel"] == numel and r["threads"] == threads]
    title = f"Synthetic gradient of fifty Laplace layers, {numel:,} elements, threads: {threads}"
    figure, axes = panels(1, 2, title, width=5.5, height=6)
    for ax, value in zip(axes[0], ("seconds", "speedup"), strict=True):
        plots.latency_bars(shown, ax, value=value)
    return figure


def bench_models(records: list[dict]) -> Figure:
    """Draw speed-up and latency in captured gradients, a column for each model (SIDCo's figures 14 and 15)."""
    models = list(dict.fromkeys((r["gradient"], r["numel"]) for r in records))
    title = "Captured gradients with error feedback, one thread"
    figure, axes = panels(2, len(models), title, width=4.6, height=5.6)
    for row, value in zip(axes, ("speedup", "seconds"), strict=True):
        for (model, numel), ax in zip(models, row, strict=True):
            here = [r for r in records if r["gradient"] == model]
            plots.latency_bars(here, ax, value=value, title=f"{model}, {numel:,} elements")
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


TRAINED = "ResNet-8 on CIFAR-10 at 16×16, two ranks, 2,000 steps"
SYSTEMS = ("none", "topk", "sidco-e", "dgc", "redsync", "micro", "lags", "marsit")
RULES = ("sidco-e", "sidco-gp", "sidco-p", "dgc", "redsync", "gaussiank", "hard")
"""Rules that each rank follows for itself: MiCRO's k is that of all ranks together."""


def points(row: dict, value: str) -> list[dict]:
    """Return a run's points as ``plots.training_curves`` takes them: of diagnosed steps, or of blocks of steps."""
    curves, labels = row["curves"], {"compressor": row["compressor"], "seed": row["seed"]}
    if value in ("residual_norm", "matching_rate"):
        found = zip(curves.get("diagnosed", ()), curves.get(value, ()), strict=True)
        return [labels | {"step": step, value: x} for step, x in found]
    block = row["steps"] / len(curves["loss"])
    size = curves.get("bytes") or [row["bytes"]] * len(curves["loss"])  # dense: no records
    by = {
        "step": [(i + 1) * block for i in range(len(size))],
        "megabytes": [block * x / 1e6 for x in accumulate(size)],
        "seconds": curves.get("seconds", ()),
    }
    return [
        labels | {value: x} | {name: v[i] for name, v in by.items() if len(v)}
        for i, x in enumerate(curves[value])
    ]


def plateau(names: Sequence[str], value: str, by: str, title: str, rows: list[dict]) -> Figure:
    """Draw curves of the trainings to a plateau, a panel for each ratio; those without one are in every panel."""
    rows = [r for r in rows if "problem" not in r and r["compressor"] in names]
    ratios = [r for r in RATIOS if any(row["ratio"] == r for row in rows)]
    width = 4.4 if len(ratios) > 1 else 7.5  # the title of one panel is as wide as of three
    figure, axes = panels(1, len(ratios), f"{TRAINED}: {title}", width=width, height=3.8)
    for ratio, ax in zip(ratios, axes[0], strict=True):
        here = [row for row in rows if row["ratio"] in (ratio, 1.0)]
        here.sort(key=lambda row: names.index(row["compressor"]))
        records = [record for row in here for record in points(row, value)]
        if value == "quality":
            counted = ratio * workload_info("resnet8-cifar16").parameters * here[0]["steps"]
            floor = Z95 / math.sqrt(counted / len(here[0]["curves"]["loss"]))
            records = [record | {"floor": floor} for record in records]
        plots.training_curves(records, ax, value=value, by=by, title=f"ratio {ratio:g}")
    for ax in axes[0, :-1]:
        ax.get_legend().remove()
    return figure


LIVE: dict[str, Callable[[list[dict]], Figure]] = {
    "bench": bench,
    "bench_models": bench_models,
    "build_up": partial(single, plots.build_up, f"{DIGITS}, ratio 0.01: mean of steps 10 to 29"),
    "delta": partial(single, plots.lags_delta, f"{DIGITS}, four ranks, LAGS-SGD at ratio 0.001"),
    "matching_rate": partial(single, plots.matching_rate, f"{DIGITS}, four ranks"),
    "plateau-loss": partial(plateau, SYSTEMS, "loss", "step", "training loss"),
    "plateau-bytes": partial(plateau, SYSTEMS, "loss", "megabytes", "loss by bytes"),
    "plateau-quality": partial(plateau, RULES, "quality", "step", "k̂/k, means of 40 steps"),
    "plateau-residual": partial(
        plateau, SYSTEMS[1:-1], "residual_norm", "step", "what is left unsent"
    ),
    "plateau-time": partial(plateau, (*SYSTEMS, "dense-bf16"), "loss", "seconds", "100 Mbit/s"),
    "speedup": speedup,
    "time_split": partial(
        single, plots.time_split, "ResNet-20 on CIFAR-10, two ranks over loopback, ratio 0.001"
    ),
    "timeline": partial(single, plots.timeline, f"{DIGITS}, two ranks: a step of LAGS-SGD"),
}
"""Figures drawn from the records in docs/results/NAME.json, or of :data:`SOURCES`."""
_PLATEAU = "plateau-resnet8-cifar16"
SOURCES = {
    name: f"{_PLATEAU}{'-lab' if name.endswith('time') else ''}.jsonl"
    for name in LIVE
    if name.startswith("plateau")
}


def from_results(name: str) -> Figure | None:
    """Draw a figure of live runs; return None if its records are missing."""
    path = RESULTS / SOURCES.get(name, f"{name}.json")
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    records = [*map(json.loads, text.splitlines())] if path.suffix == ".jsonl" else json.loads(text)
    return LIVE[name](records)


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
            source = SOURCES.get(name, f"{name}.json")
            print(f"missing: docs/results/{source}, so no {name}.png", file=sys.stderr)
            continue
        path = IMAGES / f"{name}.png"
        path.write_bytes(plots.png(figure))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
