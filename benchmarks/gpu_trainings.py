"""Trainings with every compressor on a device, held against the same trainings on the CPU.

Called by ``gpu.py``. In float64 the sums of both differ by some 1e-16 of a gradient, far less than elements differ from
a threshold: the same elements are sent, and the weights are the same to 1e-9. In float32 elements near a threshold go
another way, and weights may be 2 % of their way off. They are not compared in bfloat16, of compressors that draw
random numbers, which are others on a device, and of Adam's correction in float32: ranks must agree, and, but for
updates of signs alone, what is sent and kept must add up to the gradients.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.multiprocessing.spawn import ProcessException
from torch.nn.parallel import DistributedDataParallel as DDP

from gradstats.compressors import COMPRESSORS, TopK, make_compressor
from gradstats.hooks import (
    AdamCorrection,
    CompressionState,
    ErrorFeedback,
    LocalSteps,
    MomentumCorrection,
    compression_hook,
    shard_hook,
)
from gradstats.primitives import backend
from gradstats.primitives.backend import Backend
from gradstats.trace import Kind

STEPS = 12
RATIO = 0.05
RANDOM = ("randomk", "ssdm", "cascading", "marsit", "signsgd", "ef-signsgd")
"""They draw: positions, signs, or the signs of zeros."""
TIED = "topk, memory adam"
"""In its first step every element is one in size but for roundings, which decide what is sent: on the CPU alone, inputs
that differ by a rounding of float32 leave weights more than a tenth of their way apart."""
LARGE = ("ssdm", "cascading", "marsit")
"""Their updates are as long as the whole gradient in every element."""
MEMORIES = {"momentum": lambda: MomentumCorrection(0.9), "adam": AdamCorrection}
LOCAL = {"local steps": {}, "local steps, delayed": {"delay": 1}}
Report = dict[str, Any]


def net(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the same small model on every rank and device."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 30), nn.ReLU(), nn.Linear(30, 3)
    )
    return model.to(device, dtype)


def batches(
    rank: int, device: torch.device, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a rank's batches, the same on every device."""
    drawn = torch.Generator().manual_seed(rank)
    xs = [torch.randn(16, 40, generator=drawn, dtype=torch.float64) for _ in range(STEPS)]
    return [(x.to(device, dtype), (x.sum(1) > 0).long().to(device)) for x in xs]


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the elements of some tensors, on the CPU in float64."""
    return torch.cat([each.detach().reshape(-1).cpu().double() for each in tensors])


def _weights(model: nn.Module) -> torch.Tensor:
    return _flat(model.parameters())


def _compressed(
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    memory: Callable[[], Any] | None = None,
) -> Report:
    """Train under DDP, and add up what came in, what came out and what is left."""
    model = net(device, dtype)
    ddp = DDP(model, bucket_cap_mb=0.05)
    totals: Report = {k: torch.zeros_like(_weights(model)) for k in ("in", "out")}
    state = None
    if (compressor := make_compressor(name, RATIO)) is not None:
        state = CompressionState(
            compressor,
            named_parameters=model.named_parameters(),
            memory=memory() if memory else None,
            diagnose_every=5,
            verify_every=3,
        )
        kept: dict[int, torch.Tensor] = {}

        def hook(
            s: CompressionState, bucket: dist.GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
                kept[id(p)] = g.detach().clone()
            return compression_hook(s, bucket)

        # DDP compares the types, not their names
        hook.__annotations__ = compression_hook.__annotations__
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-5 if name in LARGE else 0.05)
    for x, y in batches(rank, device, dtype):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        if state is not None:
            totals["in"] += _flat(kept[id(p)] for p in model.parameters())
            totals["out"] += _flat(p.grad for p in model.parameters())  # type: ignore[misc]
        optimizer.step()
    if state is None:
        return {"weights": _weights(model)}
    left = ((state.residual(p), p) for p in model.parameters())
    totals["left"] = _flat(torch.zeros_like(p) if r is None else r for r, p in left)
    sent = state.last.bytes_sent if state.last else None
    return totals | {"weights": _weights(model), "sent": sent}


def _local(rank: int, device: torch.device, dtype: torch.dtype, **options: Any) -> Report:
    """Train with local steps and compressed pseudo-gradients."""
    model = net(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    memory = ErrorFeedback(decay=0.95)
    with LocalSteps(
        model, optimizer, outer, steps=3, compressor=TopK(0.1), memory=memory, **options
    ):
        for x, y in batches(rank, device, dtype):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {"weights": _weights(model)}


def _sharded(rank: int, device: torch.device, dtype: torch.dtype) -> Report:
    """Train replicas of a sharded model, each on one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net(device, dtype)
    mesh = init_device_mesh(
        device.type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
    )
    for i in (0, 2, 4):
        fully_shard(model[i], mesh=mesh["shard"])  # type: ignore[index]
    fully_shard(model, mesh=mesh["shard"])
    shard_hook(model, mesh["replicate"], lambda: make_compressor("topk", RATIO), ErrorFeedback)  # type: ignore[arg-type,return-value]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in batches(rank, device, dtype):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"weights": _flat(p.full_tensor() for p in model.parameters())}  # type: ignore[attr-defined]


def _captured(rank: int, device: torch.device, dtype: torch.dtype) -> Report:
    """Capture gradients before and after error feedback, and read them again."""
    from capture import Capture
    from gradstats import open_trace

    model = net(device, dtype)
    ddp = DDP(model, bucket_cap_mb=0.05)
    state = CompressionState(TopK(RATIO), named_parameters=model.named_parameters())
    kinds: list[Kind] = ["gradient", "corrected"]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with tempfile.TemporaryDirectory() as own:
        place = [own]
        dist.broadcast_object_list(place, device=device)  # that of the first rank
        path = Path(place[0], "run.zarr")
        with Capture(path, ddp, kinds=kinds) as capture:
            ddp.register_comm_hook(*capture.wrap(state, compression_hook))
            for x, y in batches(rank, device, dtype):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(ddp(x), y)
                loss.backward()
                capture.step(loss=loss)
                optimizer.step()
        dist.barrier()
        trace = open_trace(path)
        read = {k: torch.from_numpy(trace.read(7, kind=k, rank=rank)).double() for k in kinds}
        dist.barrier()  # before the folder goes
    return {"weights": _weights(model), **read}


def _scaled(rank: int, device: torch.device, dtype: torch.dtype) -> Report:
    """Train with a loss scaler that meets an overflow."""
    model = net(device, dtype)
    ddp = DDP(model)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=4)
    state = CompressionState(TopK(RATIO), named_parameters=model.named_parameters(), scaler=scaler)
    ddp.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for i, (x, y) in enumerate(batches(rank, device, dtype)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        scaler.scale(loss * (float("inf") if i == 5 and rank == 0 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"weights": _weights(model), "scale": torch.tensor([scaler.get_scale()])}


def _bad(rank: int, device: torch.device, dtype: torch.dtype) -> Report:
    """Meet a NaN on one rank, be told so on all, and go on."""
    model = net(device, dtype)
    ddp = DDP(model, bucket_cap_mb=0.05)
    state = CompressionState(TopK(RATIO), named_parameters=model.named_parameters())
    ddp.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    told = 0
    for i, (x, y) in enumerate(batches(rank, device, dtype)):
        optimizer.zero_grad()
        if i == 4 and rank == 0:
            x[0, 0] = float("nan")
        try:
            nn.functional.cross_entropy(ddp(x), y).backward()
        except Exception as error:
            told += "NaN or infinite gradient elements" in str(error)
            continue
        optimizer.step()
    return {"weights": _weights(model), "told": torch.tensor([told])}


def trainings() -> dict[str, Callable[..., Report]]:
    """Return the trainings by name."""
    found: dict[str, Callable[..., Report]] = {n: partial(_compressed, name=n) for n in COMPRESSORS}
    found |= {
        f"topk, memory {m}": partial(_compressed, name="topk", memory=make)
        for m, make in MEMORIES.items()
    }
    found |= {name: partial(_local, **options) for name, options in LOCAL.items()}
    found |= {"sharded": _sharded, "loss scale": _scaled, "bad elements": _bad}
    return found | ({"captured": _captured} if find_spec("zarr") else {})


def _run(
    rank: int,
    world: int,
    group: str,
    kind: str,
    code: Backend | None,
    dtypes: list[str],
    folder: str,
) -> None:
    """Run every training in one rank, and store its reports."""
    torch.set_num_threads(2)
    device = (
        torch.device(kind, rank if group == "nccl" else 0) if kind == "cuda" else torch.device(kind)
    )
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        group,
        f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    reports: dict[tuple[str, str], Report] = {}
    every = trainings()
    for dtype in dtypes:
        for name, _ in planned([dtype]):
            try:
                with backend(code) if code else nullcontext():
                    reports[name, dtype] = every[name](rank, device, getattr(torch, dtype))
            except Exception as error:
                reports[name, dtype] = {"error": f"{type(error).__name__}: {error}"}
            # at once: a backend may end the process
            torch.save(reports, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _all(
    world: int, group: str, kind: str, code: Backend | None, dtypes: list[str]
) -> list[dict[tuple[str, str], Report]]:
    with tempfile.TemporaryDirectory() as folder:
        with suppress(ProcessException):  # its reports then lack what it did not reach
            mp.spawn(_run, (world, group, kind, code, dtypes, folder), nprocs=world)
        files = [Path(folder, f"{rank}.pt") for rank in range(world)]
        return [torch.load(f, weights_only=False) if f.exists() else {} for f in files]


def compare(
    check: Callable[[object, str], None],
    kind: str,
    groups: list[tuple[int, str, Backend | None, list[str]]],
) -> list[Report]:
    """Run every training on a device and on the CPU, compare them, and return how many there were of each group.

    Parameters
    ----------
    check : callable
        Told of every condition and what it means if it does not hold.
    kind : str
        Type of the device.
    groups : list of (int, str, {"torch", "triton"} or None, list of str)
        Ranks, backend of the process group on the device (on the CPU it is gloo), what reads tensors there, and the
        types of the parameters.
    """
    # all at once: nothing is timed, and most of it is the start of processes
    with ThreadPoolExecutor(2 * len(groups)) as pool:
        running = [
            (
                pool.submit(_all, world, group, kind, code, dtypes),
                pool.submit(_all, world, "gloo", "cpu", None, dtypes),
            )
            for world, group, code, dtypes in groups
        ]
    records = []
    for (world, group, code, dtypes), (there, here) in zip(groups, running, strict=True):
        where = f"{world} ranks over {group}, {code or 'default'}"
        cases = planned(dtypes)
        weights = _compare(check, where, cases, there.result(), here.result())
        records.append(
            {"part": "trainings", "ranks": world, "group": group, "backend": code, "dtypes": dtypes}
            | {"count": len(cases), "weights": weights, "where": where}
        )
    return records


def planned(dtypes: list[str]) -> list[tuple[str, str]]:
    """Return names and dtypes of the trainings. CUDA has no loss scaler of bfloat16."""
    every = [(name, dtype) for dtype in dtypes for name in trainings()]
    return [case for case in every if case != ("loss scale", "bfloat16")]


def _compare(
    check: Callable[[object, str], None],
    where: str,
    cases: list[tuple[str, str]],
    there: list[dict[tuple[str, str], Report]],
    here: list[dict[tuple[str, str], Report]],
) -> int:
    """Compare trainings; return of how many the weights were compared with those of the CPU."""
    compared = 0
    for name, dtype in cases:
        what = f"training with {name}, {dtype}, {where}"
        lost_report = {"error": "not reached"}
        found, usual = ([r.get((name, dtype), lost_report) for r in side] for side in (there, here))
        errors = [r["error"] for r in [*usual, *found] if "error" in r]
        check(not errors, f"{what}: {errors[:1]}")
        if errors:
            continue
        expected = usual[0]
        same = all(torch.equal(r["weights"], found[0]["weights"]) for r in found)
        check(same, f"{what}: ranks differ")
        if "in" in expected and name not in ("signsgd", *LARGE):  # of these a part is lost for good
            lost, most = _lost(found), 2 * _lost(usual) + 1e-6
            check(lost <= most, f"{what}: {lost:.2g} are lost, on the CPU {_lost(usual):.2g}")
        if name in RANDOM or dtype == "bfloat16" or (name == TIED and dtype == "float32"):
            continue
        compared += 1
        if dtype == "float32":  # elements near a threshold go another way
            moved = expected["weights"] - _weights(net(torch.device("cpu"), torch.float32))
            far = (found[0]["weights"] - expected["weights"]).norm() / moved.norm()
            check(far <= 0.02, f"{what}: weights off by {float(far):.2g} of their way")
            continue
        for part in set(expected) - {"in", "out", "left", "sent"}:
            far = (found[0][part] - expected[part]).abs()
            near = torch.allclose(found[0][part], expected[part], rtol=1e-9, atol=1e-12)
            much = f"{part} off by {float(far.max()):.2g}, {int((far > 1e-9).sum())} elements"
            check(near, f"{what}: {much}")
        if "sent" in expected:
            check(found[0]["sent"] == expected["sent"], f"{what}: other bytes are sent")
    return compared


def _lost(reports: list[Report]) -> float:
    """Return how much of the gradients was neither applied nor kept, relative to them."""
    arrived = sum(r["in"] for r in reports)
    applied = len(reports) * reports[0]["out"] + sum(r["left"] for r in reports)
    return float((arrived - applied).norm() / arrived.norm())
