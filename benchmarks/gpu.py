"""Correctness first, then times, on a machine that has a GPU.

    python benchmarks/gpu.py [--out FOLDER] [--numel N …] [--ratio R …] [--backend NAME …] [--dry-run]

It needs torch, numpy, scipy and numba, and no network; Triton, matplotlib and zarr where they are there. Every
estimator, read by torch's operators and by Triton, selects what the compiled loops select on the CPU; if one does not,
the program ends there. Times follow in multiples of one read of the data (its bytes over the bandwidth of a copy of
the largest): the estimators with their selections, beside ``torch.topk`` and ``torch.kthvalue``; capture's cost per
step; and the exchange of two processes, over NCCL where there are two GPUs, else over gloo.

Writes gpu.json, after each part, and gpu.png, and prints a table. ``--dry-run`` goes through all of it on the CPU with
small arrays (and, with ``TRITON_INTERPRET=1`` in the environment, Triton's kernels) and takes no time: there is no
number without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gradstats.compressors import DenseCompressor, make_compressor
from gradstats.primitives import backend, histogram, moments, select, topk
from gradstats.primitives.ratio import RATIOS, target_count
from gradstats.thresholds import ESTIMATORS, make_estimator
from gradstats.thresholds.bench import REFERENCES, sample_gradient

NUMELS = (260_000, 2_600_000, 26_000_000, 260_000_000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EXACT = ("exact", "warm-exact", "histogram", "dgc", "hard", "micro", "redsync-trimmed")
"""Estimators whose thresholds must be the same bits; the others' may be a float32 rounding off."""
COMPRESSORS = ("none", "topk", "sidco-e", "redsync", "signsgd")
REPEATS = 15
Record = dict[str, Any]


def available() -> list[str]:
    """Return the backends that there are to compare."""
    runs = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    return ["torch", "triton"] if runs and find_spec("triton") else ["torch"]


def check(condition: object, what: str) -> None:
    """End the program if something is wrong."""
    if not condition:
        sys.exit(f"WRONG: {what}")


def correctness(device: torch.device, numel: int, backends: list[str]) -> int:
    """Compare every estimator on the device with the compiled loops on the CPU; return the number of comparisons."""
    done = 0
    plain = torch.from_numpy(sample_gradient(numel))
    odd = plain.clone()
    odd[::97], odd[1::97], odd[2::97] = float("nan"), float("inf"), 1e-44
    for array, dtype in ((a, d) for a in (plain, odd, plain[:0], plain[:1]) for d in DTYPES):
        x = array.to(dtype)
        for layout in (x, x[: len(x) // 6 * 6].view(-1, 2, 3).transpose(0, 2)):
            there = layout.to(device)
            for name in backends:
                _same_passes(layout, there, name)
                for estimator in ESTIMATORS if len(x) else ():
                    _same_selection(layout, there, name, estimator)
                    done += 1
    return done


def _same_passes(x: torch.Tensor, there: torch.Tensor, name: str) -> None:
    what = f"{name}, {x.dtype}, shape {tuple(x.shape)}"
    few = max(1, x.numel() // 100)
    expected = moments(x), histogram(x, 7), select(x, 0.0), topk(x, few)
    with backend(name):  # type: ignore[arg-type]
        found = [
            (moments(there), histogram(there, 7), select(there, 0.0), topk(there, few))
            for _ in range(2)
        ]
    check(repr(found[0][0]) == repr(found[1][0]), f"moments are not the same twice: {what}")
    m, h, *_ = found[0]
    for field in ("count", "zeros", "nonfinite", "max"):
        check(getattr(m, field) == getattr(expected[0], field), f"{field}: {what}")
    sums = [
        [getattr(a, f) for f in ("sum_abs", "sum_squares", "sum_log")] for a in (m, expected[0])
    ]
    check(np.allclose(*sums, rtol=1e-11), f"sums: {what}")
    check(np.array_equal(h.counts, expected[1].counts), f"histogram: {what}")
    for s, kept in zip(found[0][2:], expected[2:], strict=True):
        check(torch.equal(s.indices.cpu(), kept.indices), f"positions: {what}")
        check(torch.equal(s.values.cpu(), kept.values), f"values: {what}")


def _same_selection(x: torch.Tensor, there: torch.Tensor, name: str, estimator: str) -> None:
    what = f"{estimator}, {name}, {x.dtype}, shape {tuple(x.shape)}"
    ours, theirs = make_estimator(estimator), make_estimator(estimator)
    expected = theirs.select(x, 0.01)[0].threshold
    with backend(name):  # type: ignore[arg-type]
        estimate, found = ours.select(there, 0.01)
    error = abs(estimate.threshold - expected)
    check(error <= (0 if estimator in EXACT else 2**-23 * expected), f"threshold: {what}")
    check(found.indices.device == there.device, f"moved: {what}")
    kept = select(x, estimate.threshold)
    check(torch.equal(found.indices.cpu(), kept.indices), f"positions: {what}")
    check(torch.equal(found.values.cpu(), kept.values), f"values: {what}")


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call, in seconds, with the device at rest before and after it; NaN on the CPU."""
    run()
    if device.type == "cpu":
        return math.nan
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def latency(
    device: torch.device, numels: list[int], ratios: list[float], backends: list[str]
) -> list[Record]:
    """Time every estimator with its selection, beside exact selection with torch's tools."""
    records = []
    largest = torch.zeros(max(numels), device=device)
    # a copy reads and writes; one of few elements is launch time and cache, not memory
    bandwidth = 2 * 4 * max(numels) / timed(largest.clone, device)
    del largest
    for numel in numels:
        x = torch.from_numpy(sample_gradient(numel)).to(device)
        read = 4 * numel / bandwidth
        for ratio in ratios:
            k = target_count(ratio, numel)
            runs: dict[tuple[str, str], Callable[[], int]] = {
                (each, "torch operator"): lambda f=REFERENCES[each]: f(x, k)  # type: ignore[misc]  # noqa: B023
                for each in ("torch.topk", "torch.kthvalue")
            }
            for name in backends:
                for estimator in ESTIMATORS:
                    rule = make_estimator(estimator)
                    runs[estimator, name] = lambda r=rule, n=name: _selected(r, x, ratio, n)  # type: ignore[misc]  # noqa: B023
                runs["exactly k", name] = lambda n=name: _exactly(x, k, n)  # type: ignore[misc]  # noqa: B023
            reference = math.nan
            for (what, by), run in runs.items():
                kept = run()
                seconds = timed(run, device)
                reference = seconds if what == "torch.topk" else reference
                records.append(
                    {"part": "latency", "what": what, "backend": by, "numel": numel}
                    | {"ratio": ratio, "seconds": seconds, "reads": seconds / read}
                    | {"speedup": reference / seconds, "quality": kept / k, "bandwidth": bandwidth}
                )
    return records


def _selected(rule: Any, x: torch.Tensor, ratio: float, name: Any) -> int:
    with backend(name):
        return len(rule.select(x, ratio)[1])


def _exactly(x: torch.Tensor, k: int, name: Any) -> int:
    with backend(name):
        return len(topk(x, k))


def capture_cost(device: torch.device, tiny: bool) -> list[Record]:
    """Time a training step without and with a capture of every step."""
    if not find_spec("zarr"):
        print("capture is left out: zarr is not installed")
        return []
    from capture import Capture

    channels, width, images, sequences = (4, 8, 2, 2) if tiny else (512, 768, 32, 16)
    convolution, attention = torch.nn.Conv2d, torch.nn.TransformerEncoderLayer
    layers = [convolution(channels, channels, 3, padding=1) for _ in range(11)]
    blocks = [attention(width, 4, 4 * width, batch_first=True) for _ in range(12)]
    models = {
        "convolutions, the size of ResNet-50": (layers, torch.randn(images, channels, 7, 7)),
        "a transformer, the size of BERT": (blocks, torch.randn(sequences, 128, width)),
    }
    records = []
    for what, (parts, data) in models.items():
        model, batch = torch.nn.Sequential(*parts).to(device), data.to(device)

        def step(capture: Any = None, model: Any = model, batch: Any = batch) -> None:
            model.zero_grad()
            model(batch).square().mean().backward()
            if capture is not None:
                capture.step()

        absent = timed(step, device)
        for store in ("gradients", "sketches"):
            with tempfile.TemporaryDirectory() as folder:
                taken = Capture(Path(folder) / "run.zarr", model, store=store)  # type: ignore[arg-type]
                seconds = timed(lambda: step(taken), device)  # noqa: B023 — called at once
                taken.close()
            records.append(
                {"part": "capture", "what": what, "store": store, "absent": absent}
                | {"seconds": seconds, "numel": sum(p.numel() for p in model.parameters())}
            )
    return records


def _exchange(rank: int, numel: int, cuda: bool, folder: str, backends: list[str]) -> None:
    """Average gradients over two processes with every compressor; rank 0 writes the records."""
    nccl = cuda and torch.cuda.device_count() > 1
    device = torch.device("cuda", rank if nccl else 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if nccl else "gloo", f"file://{folder}/store", rank=rank, world_size=2
    )
    records = []
    gradient = torch.from_numpy(sample_gradient(numel, seed=rank)).to(device)
    for name, by in product(COMPRESSORS, backends):
        compressor = make_compressor(name, 0.01) or DenseCompressor()

        def step(compressor: Any = compressor, by: Any = by) -> Any:
            with backend(by):
                return compressor.reduce(gradient.clone(), None)

        mean = step().mean
        both = [torch.empty_like(mean) for _ in range(2)]
        dist.all_gather(both, mean)
        check(torch.equal(*both), f"{name}, {by}: the ranks have different updates")
        seconds = timed(step, device)
        records.append(
            {"part": "exchange", "what": name, "backend": by, "group": dist.get_backend()}
            | {"numel": numel, "seconds": seconds, "ratio": 0.01}
        )
    if rank == 0:
        Path(folder, "records.json").write_text(json.dumps(records))
    dist.destroy_process_group()


def exchange(device: torch.device, numel: int, backends: list[str]) -> list[Record]:
    """Time the exchange of two processes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_exchange, (numel, device.type == "cuda", folder, backends), nprocs=2)
        records: list[Record] = json.loads(Path(folder, "records.json").read_text())
    return records


def show(records: list[Record]) -> None:
    """Print one line a record."""
    for r in records:
        reads = f"{r['reads']:8.2f} reads {r['speedup']:7.1f} x topk" if "reads" in r else ""
        where = r.get("backend", r.get("store", "")) + f" {r.get('group', '')}"
        print(
            f"{r['part']:9} {r['what']:36} {where:15} {r['numel']:>11,} {r.get('ratio', ''):>6} "
            f"{1e3 * r['seconds']:10.3f} ms {reads}"
        )


def draw(records: list[Record], path: Path) -> None:
    """Draw reads of the data by estimator at the smallest ratio, one panel a size."""
    from matplotlib.figure import Figure

    found = [r for r in records if r["part"] == "latency"]
    least = min(r["ratio"] for r in found)
    found = [r for r in found if r["ratio"] == least]
    numels = sorted({r["numel"] for r in found})
    figure = Figure(figsize=(4 * len(numels), 5), layout="constrained")
    for ax, numel in zip(
        np.ravel(figure.subplots(1, len(numels), sharey=True)), numels, strict=True
    ):
        for by in sorted({r["backend"] for r in found}):
            some = [r for r in found if r["numel"] == numel and r["backend"] == by]
            ax.plot([r["reads"] for r in some], [r["what"] for r in some], "o", label=by)
        ax.set(xscale="log", xlabel="multiples of one read", title=f"{numel:,} elements")
    figure.axes[0].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--numel", type=int, nargs="+", default=list(NUMELS))
    parser.add_argument("--ratio", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--backend", choices=available(), nargs="+", default=available())
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, without numbers")
    options = parser.parse_args()
    dry, backends = options.dry_run, options.backend
    if not dry and not torch.cuda.is_available():
        sys.exit(
            "torch finds no GPU here, so there is no number: --dry-run shows that the program works"
        )
    device = torch.device("cpu" if dry else "cuda")
    numels = [2000] if dry else options.numel
    path = options.out / "gpu.json"
    if not dry:
        options.out.mkdir(parents=True, exist_ok=True)
    print(f"{correctness(device, 2000 if dry else 3_000_000, backends)} selections as on the CPU")
    records: list[Record] = []
    for part in (
        lambda: latency(device, numels, options.ratio, backends),
        lambda: capture_cost(device, dry),
        lambda: exchange(device, min(max(numels), NUMELS[2]), backends),
    ):
        records += part()
        if not dry:  # after each part: a later one may fail
            machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            path.write_text(json.dumps({"machine": machine, "records": records}, indent=1))
    if dry:
        print(f"{len(records)} measurements would have been taken")
        return
    show(records)
    if find_spec("matplotlib"):
        draw(records, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
