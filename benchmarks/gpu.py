"""Correctness first, then times, on a machine that has a GPU.

    python benchmarks/gpu.py [--out FOLDER] [--numel N …] [--ratio R …] [--backend NAME …] [--part NAME …]
        [--anyway] [--dry-run]

It needs torch, numpy, scipy and numba, and no network; Triton and zarr where they are there. Every estimator, read by
torch's operators and by Triton, must select what the compiled loops select on the CPU; messages must be the same bits;
and trainings with every compressor are compared with those on the CPU (``gpu_trainings.py``). If something differs, the
program ends there. Times follow in multiples of one read of the data (its bytes over the bandwidth of a copy of the
largest): the estimators with their selections, beside ``torch.topk`` and ``torch.kthvalue``; capture's cost per step;
the exchange of two processes, over NCCL where there are two GPUs, else over gloo; and training steps with hooks.

Writes gpu.json after each part, and prints tables; ``--part`` does some parts alone, which replace what the file has of
them. ``gpu_tables.py`` puts the stored tables into the documentation. ``--dry-run`` goes through all of it on the CPU
with small arrays (and, with ``TRITON_INTERPRET=1`` in the environment, Triton's kernels) and takes no time: there is no
number without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, get_args

import gpu_trainings
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_tables import tables
from records import dump
from support import hostile

from gradstats.collectives.codec import INDICES, Codec, Values
from gradstats.compressors import CompressorName, DenseCompressor, make_compressor
from gradstats.errors import InputError
from gradstats.hooks import CompressionState, compression_hook
from gradstats.primitives import backend, histogram, moments, select, topk
from gradstats.primitives.backend import MANY, device_code
from gradstats.primitives.ratio import RATIOS, target_count
from gradstats.thresholds import ESTIMATORS, make_estimator
from gradstats.thresholds.bench import REFERENCES, sample_gradient

NUMELS = (260_000, 2_600_000, 8_500_000, 26_000_000, 260_000_000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EXACT = ("exact", "warm-exact", "histogram", "dgc", "hard", "micro", "redsync-trimmed")
"""Estimators whose thresholds must be the same bits; the others' may be a float32 rounding off."""
HOOKS: dict[str, tuple[CompressorName, dict[str, Any]]] = {
    "none": ("none", {}),
    "topk": ("topk", {}),
    "topk, exactly": ("topk", {"exactly": True}),
    "warm-exact": ("warm-exact", {}),
    "sidco-e": ("sidco-e", {}),
    "redsync": ("redsync", {}),
    "dgc": ("dgc", {}),
    "micro": ("micro", {}),
    "lags": ("lags", {"calibrate": 2}),  # which ends before a step is timed
    "lags, exactly": ("lags", {"exactly": True, "adaptive": False}),
    "signsgd": ("signsgd", {}),
}
"""Compressors that are timed in training, with their options."""
REPEATS = 15
SETTLED = 25
"""Steps before a hook is timed: in the first ones SIDCo finds its stages, and LAGS measures."""
PARTS = ("selections", "messages", "trainings", "capture", "exchange", "latency", "step")
"""What is done, in this order: three comparisons, and what is timed."""
Record = dict[str, Any]


def available() -> list[str]:
    """Return the backends that there are to compare."""
    runs = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    return ["torch", "triton"] if runs and find_spec("triton") else ["torch"]


WRONG: list[str] = []
"""What did not hold so far."""


def check(condition: object, what: str) -> None:
    """Note and print what is wrong."""
    if not condition:
        WRONG.append(what)
        print(f"WRONG: {what}", flush=True)


def attempt(what: str, run: Callable[..., None], *arguments: Any) -> None:
    """Run a comparison; an error in it is wrong, too, and hides no other."""
    try:
        run(*arguments)
    except Exception as error:
        check(False, f"{what}: {type(error).__name__}: {' '.join(str(error).split())[-500:]}")


def selections(device: torch.device, numel: int, backends: list[str]) -> list[Record]:
    """Compare every estimator on the device with the compiled loops on the CPU; return how many comparisons."""
    done = 0
    plain = torch.from_numpy(sample_gradient(numel))
    odd = plain.clone()
    odd[::97], odd[1::97], odd[2::97] = float("nan"), float("inf"), 1e-44
    for array, dtype in ((a, d) for a in (plain, odd, plain[:0], plain[:1]) for d in DTYPES):
        x = array.to(dtype)
        for layout in (x, x[: len(x) // 6 * 6].view(-1, 2, 3).transpose(0, 2)):
            there = layout.to(device)
            for name in backends:
                what = f"{name}, {dtype}, shape {tuple(layout.shape)}"
                attempt(what, _same_passes, layout, there, name)
                for estimator in ESTIMATORS if len(x) else ():
                    attempt(f"{estimator}, {what}", _same_selection, layout, there, name, estimator)
                    done += 1
    for each in hostile.tensors(np.random.default_rng(5)):
        there = each.value.to(device)
        for name in backends:
            attempt(f"{name}, {each.name}", _same_passes, each.value, there, name)
            for estimator in ESTIMATORS:
                what = f"{estimator}, {name}, {each.name}"
                attempt(what, _same_selection, each.value, there, name, estimator)
                done += 1
    if device.type == "cuda" and "triton" in backends:
        # what is read by Triton without being asked for, above the sizes at which rules go other ways
        large = torch.from_numpy(sample_gradient(2 * MANY + 77))
        there = large.to(device)
        check("triton" in str(device_code(there)), "a large tensor is not read by Triton")
        attempt("default, large", _same_passes, large, there, "default")
        for estimator in ESTIMATORS:
            what = f"{estimator}, default, large"
            attempt(what, _same_selection, large, there, "default", estimator)
            done += 1
    return [{"part": "selections", "count": done, "numel": numel}]


def _read_by(name: str) -> contextlib.AbstractContextManager[None]:
    """Choose what reads tensors, or leave it to the device."""
    return contextlib.nullcontext() if name == "default" else backend(name)  # type: ignore[arg-type]


def _same_passes(x: torch.Tensor, there: torch.Tensor, name: str) -> None:
    what = f"{name}, {x.dtype}, shape {tuple(x.shape)}"
    few = max(1, x.numel() // 100)
    expected = moments(x), histogram(x, 7), select(x, 0.0), topk(x, few)
    with _read_by(name):
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
    check(np.allclose(*sums, rtol=1e-11, atol=0, equal_nan=True), f"sums: {sums}: {what}")
    check(np.array_equal(h.counts, expected[1].counts), f"histogram: {what}")
    for s, kept in zip(found[0][2:], expected[2:], strict=True):
        check(torch.equal(s.indices.cpu(), kept.indices), f"positions: {what}")
        check(torch.equal(s.values.cpu(), kept.values), f"values: {what}")


def _same_selection(x: torch.Tensor, there: torch.Tensor, name: str, estimator: str) -> None:
    what = f"{estimator}, {name}, {x.dtype}, shape {tuple(x.shape)}"
    ours, theirs = make_estimator(estimator), make_estimator(estimator)
    for ratio in (0.01, 0.3):  # twice, so that what is remembered counts
        try:
            expected = theirs.select(x, ratio)[0].threshold
        except InputError:
            with _read_by(name), contextlib.suppress(InputError):
                ours.select(there, ratio)
                check(False, f"not refused: {what}")
            return
        with _read_by(name):
            estimate, found = ours.select(there, ratio)
        error = abs(estimate.threshold - expected)
        near = 0 if estimator in EXACT else max(2**-23 * expected, 1e-45)
        check(error <= near, f"threshold off by {error} of {expected}: {what}")
        check(found.indices.device == there.device, f"moved: {what}")
        kept = select(x, estimate.threshold)
        check(torch.equal(found.indices.cpu(), kept.indices), f"positions: {what}")
        check(torch.equal(found.values.cpu(), kept.values), f"values: {what}")


def messages(device: torch.device) -> list[Record]:
    """Compare what every way in which positions and values travel makes of a gradient; return how many ways."""
    x = torch.from_numpy(sample_gradient(30_000))
    ways = [Codec(values=v) for v in get_args(Values)] + [Codec(indices=i) for i in INDICES]
    for codec in ways:
        attempt(f"{codec}", _same_messages, x, device, codec)
    return [{"part": "messages", "count": len(ways), "numel": len(x)}]


def _same_messages(x: torch.Tensor, device: torch.device, codec: Codec) -> None:
    """Compare messages bit by bit: those of a device are read on the CPU, and the other way round."""
    few = select(x, float(x.abs().quantile(0.9)))
    values, there = few.values.contiguous(), few.values.to(device)
    rounded = codec.rounded(values)
    check(torch.equal(codec.rounded(there).cpu(), rounded), f"rounded: {codec}")
    words = codec.pack_values(rounded)
    check(torch.equal(codec.pack_values(rounded.to(device)).cpu(), words), f"values: {codec}")
    read = codec.unpack_values(words.to(device), len(values)).cpu()
    check(torch.equal(read, codec.unpack_values(words, len(values))), f"values read: {codec}")
    packed = codec.pack_indices(few.indices, len(x))
    found = codec.pack_indices(few.indices.to(device), len(x))
    check(torch.equal(found.cpu(), packed), f"positions: {codec}")
    back = codec.unpack_indices(packed.to(device), len(values), len(x))[0]
    check(torch.equal(back.cpu(), few.indices), f"positions read: {codec}")


def alternating(
    runs: Mapping[Any, Callable[[], object]], device: torch.device, rounds: int = REPEATS
) -> dict[Any, float]:
    """Return the median time of each call, in seconds, in rounds over all of them; NaN on the CPU."""
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1 if device.type == "cuda" else 1):
        for name, run in runs.items():
            seconds[name].append(_timed(run, device))
    # without the first, in which kernels are compiled
    return {n: statistics.median(s[1:]) if s[1:] else math.nan for n, s in seconds.items()}


def _each(run: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Return the time of each call after the first five, in seconds; NaN on the CPU."""
    if device.type != "cuda":
        run()
        return [math.nan]
    return [_timed(run, device) for _ in range(rounds)][5:]


def _timed(run: Callable[[], object], device: torch.device) -> float:
    _rest(device)
    started = time.perf_counter()
    run()
    _rest(device)
    return time.perf_counter() - started


def _rest(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def latency(
    device: torch.device, numel: int, largest: int, ratios: list[float], backends: list[str]
) -> list[Record]:
    """Time every estimator with its selection, beside exact selection with torch's tools."""
    records = []
    block = torch.zeros(largest, device=device)
    # a copy reads and writes; one of few elements is launch time and cache, not memory
    bandwidth = 2 * 4 * largest / alternating({"": block.clone}, device)[""]
    del block
    x = torch.from_numpy(sample_gradient(numel)).to(device)
    for ratio in ratios:
        k = target_count(ratio, numel)
        runs: dict[tuple[str, str], Callable[[], int]] = {
            (each, "torch operator"): partial(REFERENCES[each], x, k)
            for each in ("torch.topk", "torch.kthvalue")
        }
        for name in backends:
            for estimator in ESTIMATORS:
                rule = make_estimator(estimator)
                runs[estimator, name] = partial(_selected, rule, x, ratio, name)
            runs["exactly k", name] = partial(_exactly, x, k, name)
        seconds = alternating(runs, device, rounds=7)
        for (what, by), took in seconds.items():
            records.append(
                {"part": "latency", "what": what, "backend": by, "numel": numel, "ratio": ratio}
                | {"seconds": took, "reads": took / (4 * numel / bandwidth)}
                | {"speedup": seconds["torch.topk", "torch operator"] / took}
                | {"quality": runs[what, by]() / k, "bandwidth": bandwidth}
            )
    return records


def _selected(rule: Any, x: torch.Tensor, ratio: float, name: Any) -> int:
    with backend(name):
        return len(rule.select(x, ratio)[1])


def _exactly(x: torch.Tensor, k: int, name: Any) -> int:
    with backend(name):
        return len(topk(x, k))


def models(tiny: bool) -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    """Return models and a batch for each."""
    channels, width, images, sequences = (4, 8, 2, 2) if tiny else (512, 768, 32, 16)
    convolution, attention = torch.nn.Conv2d, torch.nn.TransformerEncoderLayer
    layers = [convolution(channels, channels, 3, padding=1) for _ in range(11)]
    blocks = [attention(width, 4, 4 * width, batch_first=True) for _ in range(12)]
    return {
        "convolutions, the size of ResNet-50": (
            torch.nn.Sequential(*layers),
            torch.randn(images, channels, 7, 7),
        ),
        "a transformer, the size of BERT": (
            torch.nn.Sequential(*blocks),
            torch.randn(sequences, 128, width),
        ),
    }


def capture_cost(device: torch.device, tiny: bool) -> list[Record]:
    """Time a training step without and with a capture of every step."""
    if not find_spec("zarr"):
        print("capture is left out: zarr is not installed")
        return []
    from capture import Capture

    records = []
    for what, (model, batch) in models(tiny).items():
        model, batch = model.to(device), batch.to(device)

        def step(capture: Any = None, model: Any = model, batch: Any = batch) -> None:
            model.zero_grad()
            model(batch).square().mean().backward()
            if capture is not None:
                capture.step()

        seconds: dict[Any, list[float]] = {None: [], "gradients": [], "sketches": []}
        # one after the other, each trace complete before the next begins: what is written meanwhile belongs to it
        for _ in range(3):
            for store, took in seconds.items():
                with contextlib.ExitStack() as stack:
                    if store is None:
                        run = step
                    else:
                        path = Path(
                            stack.enter_context(tempfile.TemporaryDirectory()), "trace.zarr"
                        )
                        run = partial(step, stack.enter_context(Capture(path, model, store=store)))
                    took += _each(run, device, rounds=20)
        medians = {store: statistics.median(took) for store, took in seconds.items()}
        numel = sum(p.numel() for p in model.parameters())
        records += [
            {"part": "capture", "what": what, "store": store, "absent": medians[None]}
            | {"seconds": medians[store], "rounds": len(seconds[store]), "numel": numel}
            for store in ("gradients", "sketches")
        ]
    return records


def _stepped(model: torch.nn.Module, batch: torch.Tensor, name: str, by: Any) -> Callable[[], None]:
    """Return what takes a training step with a hook."""
    ddp = torch.nn.parallel.DistributedDataParallel(deepcopy(model))
    plain, options = HOOKS[name]
    compressor = make_compressor(plain, 0.001, **options)
    if compressor is not None:
        state = CompressionState(compressor, named_parameters=ddp.module.named_parameters())
        ddp.register_comm_hook(state, compression_hook)

    def step() -> None:
        ddp.zero_grad()
        with contextlib.nullcontext() if by == "none" else backend(by):
            ddp(batch).square().mean().backward()

    return step


def _hooked(rank: int, cuda: bool, tiny: bool, folder: str, backends: list[str]) -> None:
    """Time a step of one process's training with every hook: what compressing takes where nothing is to be sent."""
    device = torch.device("cuda" if cuda else "cpu")
    dist.init_process_group(
        "nccl" if cuda else "gloo", f"file://{folder}/store", rank=rank, world_size=1
    )
    records = []
    for what, (model, batch) in models(tiny).items():
        model, batch = model.to(device), batch.to(device)
        runs = {
            (name, by): _stepped(model, batch, name, by)
            for name, by in [("none", "none"), *product(list(HOOKS)[1:], backends)]
        }
        # DDP rebuilds its buckets, SIDCo finds its stages, and LAGS its ratios
        for _ in range(1 if tiny else SETTLED):
            alternating(runs, device, rounds=0)
        for (name, by), seconds in alternating(runs, device).items():
            records.append(
                {"part": "step", "what": what, "backend": by, "compressor": name, "ratio": 0.001}
                | {"seconds": seconds, "numel": sum(p.numel() for p in model.parameters())}
            )
    Path(folder, "records.json").write_text(json.dumps(records))
    dist.destroy_process_group()


def hooked(device: torch.device, tiny: bool, backends: list[str]) -> list[Record]:
    """Time training steps with hooks, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_hooked, (device.type == "cuda", tiny, folder, backends), nprocs=1)
        records: list[Record] = json.loads(Path(folder, "records.json").read_text())
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
    for name, by in product(HOOKS, backends):
        plain, options = HOOKS[name]
        compressor = make_compressor(plain, 0.01, **options) or DenseCompressor()

        def step(compressor: Any = compressor, by: Any = by) -> Any:
            with backend(by):
                return compressor.reduce(gradient.clone(), None)

        record = {"part": "exchange", "what": name, "backend": by, "group": dist.get_backend()}
        record |= {"numel": numel, "ratio": 0.01}
        try:
            mean = step().mean
            both = [torch.empty_like(mean) for _ in range(2)]
            dist.all_gather(both, mean)
            record["same"] = torch.equal(*both)
            record["seconds"] = alternating({"": step}, device)[""]
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
        records.append(record)
    if rank == 0:
        Path(folder, "records.json").write_text(json.dumps(records))
    dist.destroy_process_group()


def exchange(device: torch.device, numel: int, backends: list[str]) -> list[Record]:
    """Time the exchange of two processes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_exchange, (numel, device.type == "cuda", folder, backends), nprocs=2)
        records: list[Record] = json.loads(Path(folder, "records.json").read_text())
    for r in records:
        what = f"exchange, {r['what']}, {r['backend']}"
        check("error" not in r, f"{what}: {r.get('error')}")
        check(r.get("same", True), f"{what}: the ranks have different updates")
    return [r for r in records if "seconds" in r]


def groups(device: torch.device, backends: list[str]) -> list[tuple[int, str, Any, list[str]]]:
    """Return the process groups in which trainings are compared: ranks, backend, what reads tensors, and dtypes."""
    if device.type == "cpu":
        return [(2, "gloo", backends[-1], ["float64"])]
    both = "nccl" if torch.cuda.device_count() > 1 else "gloo"  # NCCL takes no two ranks of one GPU
    return [
        (2, both, backends[0], ["float64", "bfloat16"]),
        (1, "nccl", backends[0], ["float64"]),
        (1, "nccl", backends[-1], ["float32"]),
    ]


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
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--anyway", action="store_true", help="take times although answers differ")
    options = parser.parse_args()
    dry, backends = options.dry_run, options.backend
    if not dry and not torch.cuda.is_available():
        sys.exit(
            "torch finds no GPU here, so there is no number: --dry-run shows that the program works"
        )
    device = torch.device("cpu" if dry else "cuda")
    path = options.out / "gpu.json"
    if not dry:
        options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    def store(part: str, found: list[Record]) -> None:
        if dry:
            return
        # at once: a later part may fail; and a part that is measured alone replaces the stored one
        kept = json.loads(path.read_text()) if path.exists() else []
        new = {_piece(r) for r in found}
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        dump(
            path, [r for r in kept if _piece(r) not in new] + [_shortened(r) | about for r in found]
        )

    records: list[Record] = []
    differences = 0
    for part, run in parts(device, options, backends):
        if part in PARTS[3:] and differences and not options.anyway:
            sys.exit(f"{differences} answers differ: nothing is timed; --anyway times all the same")
        before = len(WRONG)
        found: list[Record] = []
        attempt(part, lambda: found.extend(run()))  # noqa: B023 — called at once
        if part in PARTS[:3]:
            differences = len(WRONG)
            # of a comparison that broke off, too: the file must not keep an earlier one's
            wrong = WRONG[before:]
            found = [
                r | {"wrong": [w for w in wrong if r.get("where", "") in w]}
                for r in found or [{"part": part, "count": 0}]
            ]
        store(part, found)
        records += found
        print(f"{part}: {len(found)} records, {time.perf_counter() - started:.0f} s", flush=True)
    if dry:
        print(f"{sum('seconds' in r for r in records)} measurements would have been taken")
    else:
        for mark, table in tables(json.loads(path.read_text())).items():
            print(f"{mark}\n\n{table}\n")
    if WRONG:
        sys.exit(f"{len(WRONG)} things are wrong")


def _piece(record: Record) -> tuple[str, int | None]:
    """Return what is measured at once, and so replaced at once."""
    return record["part"], record["numel"] if record["part"] == "latency" else None


def _shortened(record: Record) -> Record:
    """Return a record with four digits of each number measured."""
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in record.items()}


def parts(
    device: torch.device, options: argparse.Namespace, backends: list[str]
) -> Iterator[tuple[str, Callable[[], list[Record]]]]:
    """Yield what is to be done."""
    dry = options.dry_run
    numels = [2000] if dry else options.numel
    every: list[tuple[str, Callable[[], list[Record]]]] = [
        ("selections", partial(selections, device, 2000 if dry else 3_000_000, backends)),
        ("messages", partial(messages, device)),
        ("trainings", partial(gpu_trainings.compare, check, device.type, groups(device, backends))),
        ("capture", partial(capture_cost, device, dry)),
        ("exchange", partial(exchange, device, min(max(numels), NUMELS[3]), backends)),
        *(
            ("latency", partial(latency, device, n, max(numels), options.ratio, backends))
            for n in numels
        ),
        ("step", partial(hooked, device, dry, backends)),
    ]
    yield from (each for each in every if each[0] in options.part)


if __name__ == "__main__":
    main()
