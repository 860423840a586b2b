"""What a captured gradient takes on disk, and how long it takes to write: whole, and as sketches of its layers.

    python benchmarks/trace_sizes.py [--write]

Gradients are those of backward passes on random inputs. Rows are stored in docs/results/trace_sizes.json; ``--write``
puts the table into docs/measurements.md.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from records import RESULTS, Row, grid, measure_into

from capture.workloads.layouts import backward_pass
from gradstats.primitives import warm_up
from gradstats.trace import Layer, create_trace
from gradstats.trace.writer import TraceWriter

FILE = RESULTS / "trace_sizes.json"
MODELS = ("resnet20-cifar10", "resnet18-cifar10")
STORES = ("sketches", "gradients")
STEPS = 30


def size(folder: Path) -> int:
    """Return the bytes in a folder's files; links count as nothing."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())


def measure(model: str) -> list[Row]:
    """Write a model's gradient to traces of every kind of store, in turn."""
    parts, _ = backward_pass(model, repeats=1, batch_size=8)
    layers, offset = [], 0
    for name, part in parts.items():
        layers.append(Layer(name, offset, tuple(part.shape)))
        offset += part.numel()
    gradient = {"gradient": torch.cat([p.reshape(-1) for p in parts.values()]).numpy()}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        writers = {}
        for store in STORES:
            create_trace(Path(folder, store), layers)
            writers[store] = TraceWriter(
                Path(folder, store), 0, store=store, expected_steps=STEPS + 1
            )
            writers[store].append(0, gradient)
        before = {store: size(Path(folder, store)) for store in STORES}
        seconds: dict[str, list[float]] = {store: [] for store in STORES}
        for step in range(1, STEPS + 1):
            for store, writer in writers.items():
                began = time.perf_counter()
                writer.append(step, gradient)
                seconds[store].append(time.perf_counter() - began)
        for store in STORES:
            grown = (size(Path(folder, store)) - before[store]) / STEPS
            rows.append(
                {
                    "model": model, "parameters": len(layers), "numel": offset, "stored": store,
                    "bytes": grown, "seconds": median(seconds[store]),
                }
            )  # fmt: skip
    return rows


def table(rows: list[Row]) -> str:
    """Return the sizes and times as Markdown, a line a model."""
    lines = []
    for model in dict.fromkeys(r["model"] for r in rows):
        sketch, whole = (
            r for store in STORES for r in rows if (r["model"], r["stored"]) == (model, store)
        )
        sizes = [
            f"{r['bytes'] / 1e3:,.3g}" if r["bytes"] < 1e6 else f"{r['bytes'] / 1e3:,.0f}"
            for r in (sketch, whole)
        ]
        times = [f"{1e3 * r['seconds']:.3g}" for r in (sketch, whole)]
        cells = [f"`{model}`", str(sketch["parameters"]), f"{sketch['numel']:,}", *sizes, *times]
        lines.append(cells)
    heads = "model | parameters: | elements: | sketch kB: | gradient kB: | write a sketch ms: | write a gradient ms:"
    return grid(heads, lines)


def everything() -> list[Row]:
    """Return all rows, of one thread."""
    torch.set_num_threads(1)
    warm_up()
    return [row for model in MODELS for row in measure(model)]


if __name__ == "__main__":
    measure_into("trace sizes", FILE, everything, table, __doc__)
