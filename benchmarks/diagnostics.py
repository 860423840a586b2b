"""Studies of compressors in real training, beyond their losses.

    python benchmarks/diagnostics.py [NAME …] [--data-dir FOLDER]

Each study trains ResNet-20 on the embedded digits and writes flat records to docs/results/NAME.json, which ``make
figures`` draws. ``bench_models`` and ``delta_models`` train larger models, on the data sets in the subfolders of a
folder, and run only where they are named. ``bench_models``, ``timeline`` and ``time_split`` need a quiet machine;
nothing else depends on the clock.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from records import RESULTS, dump, stored

import gradstats
from capture.workloads import RunConfig, run
from gradstats.thresholds.bench import bench

Records = list[dict[str, Any]]


def train(compressor: str, **settings: Any) -> tuple[Any, gradstats.Trace]:
    """Train while sketches and diagnoses are captured; return the result and the trace."""
    folder = Path(tempfile.mkdtemp(prefix="gradstats-"))
    usual = {"workload": "resnet20-digits", "store": "sketches", "label": compressor, "every": 1}
    config = RunConfig(
        compressor=compressor, out=folder / "run.zarr", ranks=(0,), **{**usual, **settings}
    )
    return run(config), gradstats.open_trace(folder / "run.zarr")


def build_up() -> Records:
    """Measure how the union of selections grows with the workers; MiCRO claims that its own does not."""
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


def overlap() -> Records:
    """Measure the union of 0.1 % of each worker, up to the 16 of which RedSync says that they hardly overlap."""
    records = []
    for nproc in (2, 4, 8, 16):
        # as many images a worker: a gradient of more of them is more like the others'
        result, _ = train("topk", nproc=nproc, steps=30, every=30, ratio=0.001, batch_size=8)
        k = result.records[-1]["target"]
        union = statistics.fmean(r["union"] / k for r in result.records[10:])
        records.append({"nproc": nproc, "build_up": union, "density": union * k / result.numel})
    return records


def delta() -> Records:
    """Measure δ_l of LAGS-SGD's eq. 21 in every layer; its assumption 1 is δ_l ≤ 1."""
    return _delta(steps=300, every=10)


def _delta(every: int, **settings: Any) -> Records:
    options = {"adaptive": False}
    _, trace = train(
        "lags", nproc=4, every=every, diagnose_every=every, options=options, **settings
    )
    return [
        {name: r[name] for name in ("layer", "numel", "target", "step", "delta")}
        for r in gradstats.compression(trace, per_layer=True)
    ]


def delta_models(data: Path) -> Records:
    """Measure δ_l in the larger models of LAGS-SGD's figure 2, of which it shows ResNet-20, VGG16 and an LSTM."""
    return [
        {"workload": workload, **record}
        for workload in ("vgg16-cifar10", "lstm-ptb")
        for record in _delta(
            every=5, steps=60, workload=workload, data_dir=data / MODELS[workload], batch_size=8
        )
    ]


def matching_rate() -> Records:
    """Measure how many signs agree with those of the exact mean (Marsit's figure 1b)."""
    records = []
    for compressor in ("marsit", "signsgd", "ef-signsgd"):
        _, trace = train(compressor, nproc=4, steps=100, every=4, diagnose_every=4)
        records += [
            {"compressor": compressor, "step": r["step"], "matching_rate": r["matching_rate"]}
            for r in gradstats.compression(trace)
        ]
    return records


def sidco() -> Records:
    """Measure k̂/k over a training with SIDCo's rule for the number of stages, as published and corrected."""
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
    """Measure how the time of the last step was spent (LAGS-SGD's figure 1)."""
    result, _ = train("lags", steps=40, every=40, options={"adaptive": False})
    return result.timeline


def time_split() -> Records:
    """Return the parts of a step's time, from the runs of ``benchmarks/convergence.py --times``."""
    rows = stored(RESULTS / "times-resnet20-cifar10.jsonl")
    fields = ("compressor", "compute", "select", "communicate")
    return [{f: row[f] for f in fields} for row in rows if row.get("compute", 0) > 0]


MODELS = {
    "resnet20-cifar10": "cifar-10-batches-bin",
    "vgg16-cifar10": "cifar-10-batches-bin",
    "lstm-ptb": "ptb",
}
"""Models of SIDCo's figures 14 and 15, and the folder of their data; its fourth needs ImageNet."""


def bench_models(data: Path) -> Records:
    """Time selection in gradients with error feedback of three models, after 4, 8 and 12 steps (SIDCo's figure 15)."""
    records: Records = []
    for workload, folder in MODELS.items():
        _, trace = train(
            "topk", workload=workload, data_dir=data / folder, nproc=1, steps=13, every=4,
            ratio=0.001, store="gradients", kinds=("corrected",),
        )  # fmt: skip
        gradients = [[trace.read(step, kind="corrected")] for step in trace.steps()[1:]]
        found = bench((), gradients={workload: gradients}, threads=(1,), repeats=7, published=True)
        records += [{k: v for k, v in r.items() if k not in ("rounds", "memory")} for r in found]
    return records


STUDIES: dict[str, Callable[..., Records]] = {
    f.__name__: f for f in (build_up, overlap, delta, matching_rate, sidco, timeline, time_split)
}
ASKED: dict[str, Callable[..., Records]] = {f.__name__: f for f in (bench_models, delta_models)}
"""Studies that run only where they are named."""


def summary(name: str, records: Records) -> str:
    """Return the result of a study as Markdown."""
    if name == "build_up":
        cells: dict[str, list[str]] = {}
        for r in records:
            cells.setdefault(r["compressor"], []).append(f"{r['build_up']:.2f}")
        return "\n".join(f"| `{c}` | {' | '.join(v)} |" for c, v in cells.items())
    if name == "overlap":
        return "\n".join(
            f"| {r['nproc']} | {r['build_up']:.2f} | {100 * r['density']:.2f} % |" for r in records
        )
    if name == "delta_models":
        named = dict.fromkeys(r["workload"] for r in records)
        return "\n".join(
            f"{w}: " + summary("delta", [r for r in records if r["workload"] == w]) for w in named
        )
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
    """Run the named studies, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    every = STUDIES | ASKED
    names = ", ".join(every)
    parser.add_argument("names", nargs="*", default=list(STUDIES), metavar="NAME", help=names)
    parser.add_argument("--data-dir", type=Path, help="folder of CIFAR-10, PTB and AN4")
    options = parser.parse_args()
    if options.data_dir is None and (asked := [n for n in options.names if n in ASKED]):
        parser.error(f"{asked[0]} needs --data-dir")
    for name in options.names:
        records = every[name](options.data_dir) if name in ASKED else every[name]()
        rounded = [
            {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in r.items()}
            for r in records
        ]
        dump(RESULTS / f"{name}.json", rounded)
        print(f"{name}\n{summary(name, records)}\n")


if __name__ == "__main__":
    main()
