"""What compressors do in real training, beyond their losses: ``python benchmarks/diagnostics.py [NAME …]``.

Each study trains ResNet-20 on the embedded digits, and writes flat records to docs/results/NAME.json, from which
``make figures`` draws. Times (``timeline``, ``time_split``) want a quiet machine; nothing else hangs on the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gradstats
from capture.workloads import RunConfig, run

RESULTS = Path(__file__).parents[1] / "docs" / "results"
Records = list[dict[str, Any]]


def train(compressor: str, **settings: Any) -> tuple[Any, gradstats.Trace]:
    """Train with sketches and diagnoses captured; return the result and the trace."""
    folder = Path(tempfile.mkdtemp(prefix="gradstats-"))
    config = RunConfig(
        workload="resnet20-digits", compressor=compressor, store="sketches", out=folder / "run.zarr",
        ranks=(0,), **{"label": compressor, **settings},
    )  # fmt: skip
    return run(config), gradstats.open_trace(folder / "run.zarr")


def build_up() -> Records:
    """MiCRO's claim: the union of its selections does not grow with the workers."""
    records = []
    for compressor in ("topk", "sidco-e", "cltk", "micro"):
        for nproc in (1, 2, 4, 8):
            result, _ = train(
                compressor, nproc=nproc, steps=30, every=30, ratio=0.01, batch_size=64 // nproc
            )
            unions = [r["union"] / (0.01 * r["numel"]) for r in result.records[10:]]
            mean = statistics.fmean(unions)
            records.append({"compressor": compressor, "nproc": nproc, "build_up": mean})
    return records


def delta() -> Records:
    """LAGS-SGD's assumption 1, in every layer: δ_l of eq. 21."""
    _, trace = train(
        "lags", nproc=4, steps=300, every=10, diagnose_every=10, options={"adaptive": False}
    )
    return [
        {name: r[name] for name in ("layer", "numel", "target", "step", "delta")}
        for r in gradstats.compression(trace, per_layer=True)
    ]


def matching_rate() -> Records:
    """Marsit's figure 1b: whose signs agree with the exact mean's."""
    records = []
    for compressor in ("marsit", "signsgd", "ef-signsgd"):
        _, trace = train(compressor, nproc=4, steps=100, every=4, diagnose_every=4)
        records += [
            {"compressor": compressor, "step": r["step"], "matching_rate": r["matching_rate"]}
            for r in gradstats.compression(trace)
        ]
    return records


def sidco() -> Records:
    """SIDCo's adaptation of the number of stages, as published and corrected: k̂/k over a training."""
    records = []
    for name, rule, feedback in product(
        ("sidco-e", "sidco-gp", "sidco-p"), ("corrected", "paper"), (False, True)
    ):
        result, _ = train(
            name, steps=300, every=300, options={"stages": rule}, error_feedback=feedback
        )
        labels = {"estimator": name, "rule": rule, "error_feedback": feedback}
        records += [
            {**labels, "step": r["step"], "quality": r["selected"] / r["target"]}
            for r in result.records[::5]
        ]
    return records


def timeline() -> Records:
    """LAGS-SGD's figure 1: what the last step's time went to."""
    result, _ = train("lags", steps=40, every=40, options={"adaptive": False})
    return result.timeline


def time_split() -> Records:
    """Where a step's time goes; from the runs of ``benchmarks/convergence.py --times``."""
    path = RESULTS / "times-resnet20-cifar10.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    fields = ("compressor", "compute", "select", "communicate")
    return [{f: row[f] for f in fields} for row in rows if row.get("compute", 0) > 0]


STUDIES: dict[str, Callable[[], Records]] = {
    f.__name__: f for f in (build_up, delta, matching_rate, sidco, timeline, time_split)
}


def summary(name: str, records: Records) -> str:
    """Return what a study came to, in Markdown."""
    if name == "build_up":
        cells: dict[str, list[str]] = {}
        for r in records:
            cells.setdefault(r["compressor"], []).append(f"{r['build_up']:.2f}")
        return "\n".join(f"| `{c}` | {' | '.join(v)} |" for c, v in cells.items())
    if name == "delta":
        above = [r for r in records if r["delta"] > 1]
        large = [r for r in above if r["target"] > 1]
        worst = max(records, key=lambda r: r["delta"])
        return (
            f"δ > 1 in {len(above)} of {len(records)}, of which {len(large)} in layers with k > 1; "
            f"largest {worst['delta']:.2f} in {worst['layer']} (k = {worst['target']}); "
            f"median {statistics.median(r['delta'] for r in records):.3f}"
        )
    if name == "matching_rate":
        rates: dict[str, list[float]] = {}
        for r in records:
            rates.setdefault(r["compressor"], []).append(r["matching_rate"])
        return "\n".join(f"| `{c}` | {statistics.fmean(v):.3f} |" for c, v in rates.items())
    if name == "sidco":
        last: dict[tuple[str, str, str], list[float]] = {}
        for r in records:
            if r["step"] >= 100:
                feedback = "with" if r["error_feedback"] else "without"
                last.setdefault((r["estimator"], r["rule"], feedback), []).append(r["quality"])
        lines = []
        for (estimator, rule, feedback), values in last.items():
            low, *_, high = statistics.quantiles(values, n=20)
            median = statistics.median(values)
            lines.append(
                f"| `{estimator}` | {rule} | {feedback} | {median:.2f} ({low:.2f}–{high:.2f}) |"
            )
        return "\n".join(lines)
    return f"{len(records)} records"


def main() -> None:
    """Run the studies named, all if none is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(STUDIES), metavar="NAME")
    RESULTS.mkdir(exist_ok=True)
    for name in parser.parse_args().names:
        records = STUDIES[name]()
        rounded = [
            {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in r.items()}
            for r in records
        ]
        lines = ",\n".join(json.dumps(r) for r in rounded)
        (RESULTS / f"{name}.json").write_text(f"[\n{lines}\n]\n")
        print(f"{name}\n{summary(name, records)}\n")


if __name__ == "__main__":
    main()
