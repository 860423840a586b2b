"""Tables of what ``gpu.py`` measured, for docs/measurements.md.

    python benchmarks/gpu_tables.py [--write]

It needs no GPU: docs/results/gpu.json is what the program stored on a machine that has one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

from records import RESULTS, Row, command, grid, show

FILE = RESULTS / "gpu.json"
SHOWN = (26_000_000, 260_000_000)
RATIO = 0.001


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables by their marks."""
    by_part: dict[str, list[Row]] = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append(row)
    made = {
        "gpu-compared": _compared([r for r in rows if "wrong" in r]),
        "gpu-latency": _latency(by_part.get("latency", [])),
        "gpu-step": _steps(by_part.get("step", [])),
        "gpu-exchange": _exchange(by_part.get("exchange", [])),
        "gpu-capture": _capture(by_part.get("capture", [])),
    }
    return {mark: table for mark, table in made.items() if table}


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.3g}"


def _compared(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        group = f", {r['ranks']} over {r['group']}, {r['backend']}" if "ranks" in r else ""
        dtypes = f", {' and '.join(r['dtypes'])}" if "dtypes" in r else ""
        lines.append([f"{r['part']}{group}{dtypes}", str(r["count"]), str(len(r["wrong"]))])
    return grid("compared with the CPU | number: | failed:", lines)


def _latency(rows: list[Row]) -> str:
    every, rows = rows, [r for r in rows if r["ratio"] == RATIO and r["numel"] in SHOWN]
    found = {(r["what"], r["numel"], r["backend"]): r for r in rows}
    lines = []
    for what in dict.fromkeys(r["what"] for r in rows):
        line = [f"`{what}`"]
        for numel in SHOWN:
            alone = found.get((what, numel, "torch operator"))
            each = [alone] if alone else [found.get((what, numel, b)) for b in ("torch", "triton")]
            line += [_ms(r and r["seconds"]) for r in each] + ["–"] * (2 - len(each))
            best = max((r["speedup"] for r in each if r), default=None)
            line.append("–" if best is None else f"{best:.2g}")
        lines.append(line)
    heads = " | ".join(f"{n:,}: torch ms: | Triton ms: | × `torch.topk`:" for n in SHOWN)
    return f"{grid(f'rule | {heads}', lines)}\n\n{_ratios(every)}" if lines else ""


def _ratios(rows: list[Row]) -> str:
    """Return what Triton takes of the time of torch's operators, and what one read is."""
    found = {(r["numel"], r["ratio"], r["what"], r["backend"]): r["seconds"] for r in rows}
    parts = []
    for numel in sorted({r["numel"] for r in rows}):
        each = [
            seconds / found[numel, ratio, what, "torch"]
            for (n, ratio, what, by), seconds in found.items()
            if n == numel and by == "triton"
        ]
        parts.append(f"{statistics.median(each):.2g} of {numel:,} elements")
    largest = max(rows, key=lambda r: r["numel"])
    read = 4 * largest["numel"] / largest["bandwidth"]
    speed = f"{largest['bandwidth'] / 1e12:.1f} TB/s"
    return (
        "Triton's time over that of torch's operators, the median over all rules and ratios: "
        f"{', '.join(parts)}. A copy moves {speed}: one read of {largest['numel']:,} float32 "
        f"takes {_ms(read)} ms."
    )


def _steps(rows: list[Row]) -> str:
    models = list(dict.fromkeys(r["what"] for r in rows))
    found = {(r["compressor"], r["what"], r["backend"]): r["seconds"] for r in rows}
    lines = []
    for name in dict.fromkeys(r["compressor"] for r in rows):
        line = [f"`{name}`"]
        for model in models:
            if name == "none":
                line += [_ms(found[name, model, "none"]), "–"]
            else:
                line += [_ms(found.get((name, model, by))) for by in ("torch", "triton")]
        lines.append(line)
    numels = {r["what"]: r["numel"] for r in rows}
    heads = " | ".join(f"{numels[m]:,}: torch ms: | Triton ms:" for m in models)
    return grid(f"hook | {heads}", lines) if lines else ""


def _exchange(rows: list[Row]) -> str:
    found = {(r["what"], r["backend"]): r["seconds"] for r in rows}
    lines = [
        [f"`{name}`", *(_ms(found.get((name, by))) for by in ("torch", "triton"))]
        for name in dict.fromkeys(r["what"] for r in rows)
    ]
    return grid("compressor | torch ms: | Triton ms:", lines) if lines else ""


def _capture(rows: list[Row]) -> str:
    found = {(r["what"], r["store"]): r for r in rows}
    lines = []
    for what in dict.fromkeys(r["what"] for r in rows):
        whole, sketches = (found[what, store] for store in ("gradients", "sketches"))
        seconds = (whole["absent"], whole["seconds"], sketches["seconds"])
        lines.append([what, f"{whole['numel']:,}", *map(_ms, seconds)])
    heads = "model | parameters: | step ms: | all gradients stored: | sketches stored:"
    return grid(heads, lines) if lines else ""


def main() -> None:
    """Print the tables, or put them into the page."""
    options = command(__doc__).parse_args()
    show(tables(json.loads(FILE.read_text("utf-8"))), options.write)


if __name__ == "__main__":
    main()
