"""A training that is stopped and goes on from its checkpoint: the same bits as if nothing had happened."""

from __future__ import annotations

import functools
import io
import itertools
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from faults.processes import start_ranks
from gradstats.compressors import (
    COMPRESSORS,
    LAGS,
    Cascading,
    Compressor,
    Layerwise,
    SparseCompressor,
    make_compressor,
    make_selector,
)
from gradstats.errors import InputError
from gradstats.hooks import (
    CompressionState,
    ErrorFeedback,
    MomentumCorrection,
    NoMemory,
    compression_hook,
)

SYSTEMS: dict[str, Callable[[], Compressor]] = {
    **{name: functools.partial(make_compressor, name, 0.02) for name in COMPRESSORS},
    # its ratios otherwise depend on times that it measures
    "lags": lambda: LAGS(0.02, adaptive=False),
    "layerwise": lambda: Layerwise(lambda name, numel: make_selector("warm-exact", 0.02)),
    "coded": functools.partial(make_compressor, "topk", 0.02, indices="rice", values="int4"),
    "coded-micro": functools.partial(make_compressor, "micro", 0.02, indices="rice"),
    "bfloat16": lambda: SparseCompressor(make_selector("sidco-e", 0.02), torch.bfloat16),
}
MEMORIES: dict[str, Callable[[], Any]] = {
    "its own": lambda: None,
    "none": NoMemory,
    "feedback": ErrorFeedback,
    "momentum": lambda: MomentumCorrection(0.9),
    "nesterov": lambda: MomentumCorrection(0.9, nesterov=True),
}
COMBINATIONS = list(itertools.product(SYSTEMS, MEMORIES))
STEPS = 60


def _fresh(system: str, memory: str) -> tuple[nn.Module, CompressionState]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3))
    state = CompressionState(
        SYSTEMS[system](), memory=MEMORIES[memory](), named_parameters=net.named_parameters()
    )
    return net, state


def _train(
    net: nn.Module, state: CompressionState, rank: int, steps: range, after: Callable[[int], None]
) -> None:
    ddp = DDP(net, bucket_cap_mb=0.001)
    ddp.register_comm_hook(state, compression_hook)
    # a cascade of signs grows with every step, and diverges at the rate of the others
    rate = 1e-4 if isinstance(state.compressor, Cascading) else 0.05
    for step in steps:
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1000 * rank + step))
        ddp.zero_grad()
        nn.functional.cross_entropy(ddp(x), (x.sum(1) > 0).long()).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= rate * p.grad
        after(step + 1)


def _bits(net: nn.Module, state: CompressionState) -> bytes:
    """Return everything that a checkpoint holds; equal states give equal bytes."""
    stream = io.BytesIO()
    torch.save({"model": net.state_dict(), "state": state.state_dict()}, stream)
    return stream.getvalue()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return bool(a == b)


def _resume(
    rank: int,
    world: int,
    folder: Path,
    system: str,
    memory: str,
    moments: list[int],
    reports: Connection,
) -> None:
    try:
        straight = _fresh(system, memory)
    except InputError:
        reports.send("not combined")
        return
    saved: dict[int, bytes] = {0: _bits(*straight)}
    _train(*straight, rank, range(STEPS), lambda s: saved.update({s: _bits(*straight)}))
    final = torch.load(io.BytesIO(saved[STEPS]))
    for number, moment in enumerate(moments):
        again = _fresh(system, memory)
        checkpoint = torch.load(io.BytesIO(saved[moment]))
        if number % 5 == 0:  # by the distributed checkpoint, in the same files for all ranks
            there = str(folder / f"checkpoint-{moment}")
            dcp.save(
                {"model": checkpoint["model"], "state": checkpoint["state"]}, checkpoint_id=there
            )
            checkpoint = {"model": again[0].state_dict(), "state": again[1].state_dict()}
            dcp.load(checkpoint, checkpoint_id=there)
        again[0].load_state_dict(checkpoint["model"])
        again[1].load_state_dict(checkpoint["state"])
        # to the end once in a while; a few steps show a lost bit as well
        until = STEPS if number % 10 == 0 else min(STEPS, moment + 3)
        _train(*again, rank, range(moment, until), lambda s: None)
        expected = final if until == STEPS else torch.load(io.BytesIO(saved[until]))
        found = torch.load(io.BytesIO(_bits(*again)))
        if not _same(found, expected):
            reports.send(f"resumed at step {moment}, other bits at step {until}")
            return
    reports.send("same bits")
    if rank == 0:
        reports.send(saved[moments[0]])
    dist.barrier()


def _elsewhere(
    rank: int, world: int, system: str, memory: str, saved: bytes, reports: Connection
) -> None:
    _, state = _fresh(system, memory)
    try:
        state.load_state_dict(torch.load(io.BytesIO(saved))["state"])
    except InputError as error:
        reports.send(str(error))
        return
    reports.send("accepted")


def resume(number: int, folder: Path, moments: int = 50) -> str:
    """Resume one system with one memory at 50 steps, then on another number of ranks, which is refused."""
    system, memory = COMBINATIONS[number % len(COMBINATIONS)]
    chosen = sorted(random.Random(number).sample(range(1, STEPS), moments))
    reports = [
        rank.rest() for rank in start_ranks(2, folder, _resume, folder, system, memory, chosen)
    ]
    if reports[0] == ["not combined"]:
        return "not combined"
    assert [r[:1] for r in reports] == [["same bits"]] * 2, (
        system,
        memory,
        [r[:1] for r in reports],
    )
    (folder / "alone").mkdir()
    (alone,) = start_ranks(1, folder / "alone", _elsewhere, system, memory, reports[0][1])
    (message,) = alone.rest()
    assert message == "the checkpoint is of 2 ranks, and these are 1", (system, memory, message)
    return "same bits"
