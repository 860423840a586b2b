"""Draw the figures of the README and the docs from the traces in data/: ``make figures``."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

import gradstats
from gradstats import plots
from gradstats.distributions import SIDS

ROOT = Path(__file__).parents[1]
IMAGES = Path(__file__).parent / "img"


def read(trace: str, step: int, kind: str = "gradient"):
    """Return one captured gradient of rank 0."""
    return gradstats.open_trace(ROOT / "data" / f"{trace}.zarr").read(step, kind=kind)


def tails() -> Figure:
    """Draw one step's tail with the three fits, without and with error feedback."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = {"resnet20": "gradient", "resnet20-ef": "corrected"}
    titles = ("without error feedback", "with error feedback")
    for ax, (name, kind), title in zip(figure.subplots(1, 2), panels.items(), titles, strict=True):
        g = read(name, 100, kind)
        plots.tail(g, [gradstats.fit(g, m) for m in SIDS], ax, title=f"{title}, step 100")
    return figure


def compressibility() -> Figure:
    """Draw SIDCo's figure 7 with controls, and the local exponent that a line through it hides."""
    vectors = {
        "gradient, step 10": read("resnet20", 10),
        "gradient, step 2999": read("resnet20", 2999),
        "with error feedback, step 2999": read("resnet20-ef", 2999, "corrected"),
    }
    reduced = {label: gradstats.sketch(x) for label, x in vectors.items()}
    figure = Figure(figsize=(15, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    plots.magnitude_decay(reduced, left, window=(1, 2697), title="sorted magnitudes")
    plots.best_k_error(reduced, middle, title="error of keeping the k largest")
    plots.local_exponent(reduced, right, title="decay exponent by rank")
    return figure


def peaks() -> Figure:
    """Draw mean excess and shape over thresholds, pooled and with every layer in its own unit."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    trace = gradstats.open_trace(ROOT / "data" / "resnet20.zarr")
    g = trace.read(2999)
    scaled = g.copy()
    for layer in trace.layers:
        scaled[layer.slice] /= abs(g[layer.slice]).mean()
    for label, x in {"pooled": g, "layers normalised": scaled}.items():
        plots.mean_excess(x / abs(x).mean(), left, label=label)
        plots.parameter_stability(x, right, label=label)
    left.set(xlabel="threshold u ÷ mean", ylabel="mean of |g| − u beyond u, ÷ mean")
    return figure


FIGURES = {"tails": tails, "compressibility": compressibility, "peaks": peaks}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        draw().savefig(IMAGES / f"{name}.png", dpi=110)
