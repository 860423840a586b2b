"""The corners where a rule or a system may be slow, each with the number it is held against.

    .venv/bin/python benchmarks/corners.py [--write]

Small gradients, thresholds at 26 million elements on light and heavy tails and on captured gradients, signs, and the
update of many layers: one thread, everything interleaved with what it is compared with. What Marsit's exchange and a
captured step cost is taken from what benchmarks/hook_overhead.py and benchmarks/capture_cost.py have stored; ``make
corners`` runs all three. Rows are stored in docs/results/corners.json, beside those of other processors; ``--write``
also puts the table into docs/measurements.md. It takes some minutes, and wants a quiet machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from records import RESULTS, ROOT, Row, grid, measure_into, processor, stored

from gradstats import open_trace
from gradstats.compressors.signs import packed_signs, packed_stochastic_signs
from gradstats.hooks.gradient import FlatGradient
from gradstats.hooks.layout import ParameterLayout
from gradstats.hooks.memory import NoMemory
from gradstats.primitives import exceedances, histogram, select
from gradstats.primitives.ratio import RATIOS
from gradstats.thresholds import make_estimator, threshold, warm_up
from gradstats.thresholds.bench import TAILS, bench

FILE = RESULTS / "corners.json"
LARGE, MEDIUM, SIGNED = 26_000_000, 4_500_000, 2_200_000
SMALL = (64, 256, 1024, 4096, 16_384, 65_536)
RULES = ("exact", "warm-exact", "gaussiank", "redsync-trimmed", "sidco-e", "sidco-gp", "sidco-p")
BOTH = ("laplace", "student-t")
ROUNDS, RUNS = 41, 20
"""Rounds, and runs in a row of what takes microseconds."""


def interleaved(calls: Mapping[str, Callable[[], object]], runs: int = 1) -> dict[str, list[float]]:
    """Return the seconds of each call in every round, after two that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(runs):
                call()
            if turn >= 2:
                seconds[name].append((time.perf_counter() - started) / runs)
    return seconds


def row(
    corner: str, case: str, values: list[float], unit: str, aim: float | None, over: str = ""
) -> Row:
    """Return a row: median and quartiles, in a unit or as multiples of what `over` names. A part has no aim."""
    low, middle, high = statistics.quantiles(values, n=4)
    numbers = {"low": low, "median": middle, "high": high, "aim": aim}
    return {"corner": corner, "case": case, "unit": unit, "over": over, **numbers}


def small() -> list[Row]:
    """Time exact selection and SIDCo-E where there are few elements, beside torch.topk."""
    rows = []
    for numel in SMALL:
        x = torch.from_numpy(TAILS["layered"](numel))
        for ratio in RATIOS:
            k, rule = max(1, round(ratio * numel)), make_estimator("exact")
            calls = {
                "exact": lambda r=rule, x=x, ratio=ratio: r.select(x, ratio),  # type: ignore[misc]
                "topk": lambda x=x, k=k: torch.topk(x.abs(), k),  # type: ignore[misc]
            }
            took = interleaved(calls, runs=RUNS)
            case = f"{numel:,}, ratio {ratio:g}"
            if numel <= 4096:
                rows.append(row("exact", case, [1e6 * s for s in took["exact"]], "µs", 30))
            if numel <= 1024 or numel > 4096:
                aim = 2 if numel <= 1024 else 1
                ratios = [a / b for a, b in zip(took["exact"], took["topk"], strict=True)]
                rows.append(row("exact", f"{case}, beside topk", ratios, "×", aim, "torch.topk"))
    x = torch.from_numpy(TAILS["layered"](64))
    rule = make_estimator("sidco-e")
    # five steps, of which one adapts the stages
    took = interleaved({"e": lambda: [rule.select(x, 0.1) for _ in range(5)]})
    rows.append(row("sidco-e", "64, mean of five steps", [2e5 * s for s in took["e"]], "µs", 60))
    x, rule = torch.from_numpy(TAILS["layered"](1000)), make_estimator("histogram")
    took = interleaved({"histogram": lambda: rule.select(x, 0.01)}, runs=RUNS)
    rows.append(row("histogram", "1,000", [1e6 * s for s in took["histogram"]], "µs", None))
    once: dict[str, Any] = {"threads": [1], "references": False, "repeats": 3}
    (r,) = bench([1000], [0.01], estimators=["histogram"], **once)
    memory = dict.fromkeys(("low", "median", "high"), r["memory"])
    about = {"corner": "histogram", "case": "1,000, its memory", "unit": "×", "over": "the data's"}
    rows.append({**about, **memory, "aim": None})
    return rows


def middle() -> list[Row]:
    """Time SIDCo-E on 260,000 elements with its adaptation, in reads of the data."""
    x = torch.from_numpy(TAILS["layered"](260_000))
    rows = []
    for ratio in RATIOS:
        rule = make_estimator("sidco-e")
        calls = {
            "e": lambda r=rule, ratio=ratio: [r.select(x, ratio) for _ in range(5)],  # type: ignore[misc]
            "read": lambda: [x.sum() for _ in range(5)],
        }
        took = interleaved(calls)
        streams = [a / b for a, b in zip(took["e"], took["read"], strict=True)]
        case = f"260,000, ratio {ratio:g}, mean of five steps"
        rows.append(row("sidco-e", case, streams, "×", 6, "a read"))
    least = threshold(x, 0.001)
    parts = {
        "one sum over all": lambda: exceedances(x, 0.0),
        "one histogram": lambda: histogram(x, 10),
        "selection of 0.001": lambda: select(x, least),
    }
    took = interleaved({**parts, "read": x.sum}, runs=5)
    for part in parts:
        streams = [a / b for a, b in zip(took[part], took["read"], strict=True)]
        rows.append(row("sidco-e", f"260,000, of it {part}", streams, "×", None, "a read"))
    return rows


def large() -> list[Row]:
    """Time every rule with a target on 26 million elements, in reads of the data.

    Of a light and a heavy tail, and of captured gradients, which are repeated until they are as many.
    """
    x = np.resize(
        open_trace(ROOT / "data" / "resnet20-ef.zarr").read(1000, kind="corrected"), LARGE
    )
    # as of the others: three that differ, but not so that a warm start could not know
    captured = {"captured": [[x], [1.1 * x], [0.95 * np.roll(x, LARGE // 3)]]}
    every = {"estimators": RULES, "threads": [1], "references": False, "repeats": 11}
    found = [
        *bench([LARGE], tails=BOTH, **every),  # type: ignore[arg-type]
        *bench([], gradients=captured, **every),  # type: ignore[arg-type]
    ]
    less = {**every, "estimators": ("exact", "sidco-e")}
    found += bench([MEDIUM], tails=("laplace",), **less)  # type: ignore[arg-type]
    rows = []
    for r in found:
        size, aim = ("26 M", 5) if r["numel"] == LARGE else ("4.5 M", None)
        if aim and r["compressor"] in ("exact", "warm-exact", "redsync-trimmed"):
            aim = 6
        rows.append(
            {
                "corner": r["compressor"], "case": f"{size}, {r['gradient']}, ratio {r['ratio']:g}", "unit": "×",
                "over": "a read", "low": r["streams_low"], "median": r["streams"], "high": r["streams_high"],
                "aim": aim,
            }
        )  # fmt: skip
    return rows


def signs() -> list[Row]:
    """Time the choice of signs on 2.2 million elements, in reads of the data."""
    x, generator = torch.randn(SIGNED), torch.Generator().manual_seed(0)
    calls = {
        "signsgd, ef-signsgd": lambda: packed_signs(x, generator),
        "ssdm": lambda: packed_stochastic_signs(x, generator),
        "read": lambda: x.sum(),
    }
    took = interleaved(calls)
    read = took.pop("read")
    return [
        row(name, "2.2 M", [a / b for a, b in zip(each, read, strict=True)], "×", 3, "a read")
        for name, each in took.items()
    ]


def update() -> list[Row]:
    """Time the writing of an update into the gradients of 161 layers, beside a copy of it."""
    torch.manual_seed(0)
    sizes = np.random.default_rng(0).lognormal(11, 1.5, 161).astype(int) + 100
    parameters = {f"{i}": torch.zeros(int(n)) for i, n in enumerate(sizes)}
    layout = ParameterLayout()
    layout.add(parameters.items())
    flat = FlatGradient(layout, NoMemory())
    flat.allocate(torch.device("cpu"))
    mean = torch.randn(layout.numel)
    pairs = [(p, torch.zeros_like(p)) for p in parameters.values()]
    plain = [torch.zeros_like(p) for p in parameters.values()]
    parts = mean.split([p.numel() for p in parameters.values()])
    calls = {
        "write": lambda: flat.write(pairs, mean, 1.0),
        "copy": lambda: [t.copy_(p) for t, p in zip(plain, parts, strict=True)],
    }
    took = interleaved(calls)
    ratios = [a / b for a, b in zip(took["write"], took["copy"], strict=True)]
    case = f"161 layers, {layout.numel:,} elements"
    return [row("update", case, ratios, "×", 1, "a copy")]


def elsewhere() -> list[Row]:
    """Return what two other programs have stored, of whatever processor they ran on."""
    rows = []
    for r in json.loads((RESULTS / "hook_overhead.json").read_text(encoding="utf-8")):
        if r["hook"] == "marsit" and "processor" in r:
            numbers = {"low": r["low"], "median": r["ratio"], "high": r["high"], "aim": 1.2}
            case = f"hook, {r['numel']:,} over loopback"
            about = {"corner": "marsit", "case": case, "unit": "×", "over": "a dense all-reduce"}
            rows.append({**about, **numbers, "processor": r["processor"]})
    for r in (r for r in stored(RESULTS / "capture_cost.jsonl") if "processor" in r):
        case = f"{r['stored']}, {r['nproc']} process{'es' * (r['nproc'] > 1)} on {r['cores']} cores"
        percent = [100 * each for each in r["excess"]]
        found = row("captured step", case, percent, "%", 3 if r["stored"] == "sketches" else 5)
        rows.append({**found, "processor": r["processor"]})
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown, with a column for each processor."""
    processors = sorted({r["processor"] for r in rows})
    lines = []
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for r in rows:
        found.setdefault((r["corner"], r["case"]), {})[r["processor"]] = r
    for (corner, case), on in found.items():
        r = next(iter(on.values()))
        unit = f" × {r['over']}" if r["unit"] == "×" else f" {r['unit']}"
        aim = f"≤ {r['aim']:g}{unit}" if r["aim"] is not None else unit[1:]
        cells = (_cell(on[p]) if p in on else "–" for p in processors)
        lines.append([f"`{corner}`", case, aim, *cells])
    return grid(" | ".join(["corner", "case", "aim:", *(f"{p}:" for p in processors)]), lines)


def _cell(r: Row) -> str:
    middle, low, high = (f"{r[n]:.3g}" for n in ("median", "low", "high"))
    missed = " missed" if r["aim"] is not None and r["median"] > r["aim"] else ""
    return f"{middle} ({low} … {high}){missed}"


def everything() -> list[Row]:
    """Return all rows, of one thread, and those that other processors have stored."""
    torch.set_num_threads(1)
    warm_up()
    here = processor()
    rows = [{**r, "processor": here} for p in (small, middle, signs, update, large) for r in p()]
    rows += elsewhere()
    others = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
    known = {(r["corner"], r["case"], r["processor"]) for r in rows}
    return rows + [
        r
        for r in others
        if r["processor"] != here and (r["corner"], r["case"], r["processor"]) not in known
    ]


if __name__ == "__main__":
    measure_into("corners", FILE, everything, table, __doc__)
