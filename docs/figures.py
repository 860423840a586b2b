"""Draw the figures of the README from the traces in data/: ``make figures``."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

import gradstats
from gradstats import plots
from gradstats.distributions import SIDS

ROOT = Path(__file__).parents[1]


def tails() -> Figure:
    """Draw one step's tail with the three fits, without and with error feedback."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = {"resnet20": "gradient", "resnet20-ef": "corrected"}
    titles = ("without error feedback", "with error feedback")
    for ax, (name, kind), title in zip(figure.subplots(1, 2), panels.items(), titles, strict=True):
        g = gradstats.open_trace(ROOT / "data" / f"{name}.zarr").read(100, kind=kind)
        plots.tail(g, [gradstats.fit(g, m) for m in SIDS], ax, title=f"{title}, step 100")
    return figure


if __name__ == "__main__":
    tails().savefig(Path(__file__).parent / "img" / "tails.png", dpi=110)
