"""SIGKILL at a random moment of a capture: while a trace is created, filled, grown or closed."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.readers import assert_all_agree, assert_as_written, assert_shards_agree
from support.traces import LAYERS, gradient, held, said, shards_of, write_shards
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from capture import Capture
from faults.processes import start, start_ranks
from gradstats import open_trace
from gradstats.errors import TraceError
from gradstats.trace import KINDS, Trace, TraceWriter, create_trace, is_trace


class Known(nn.Module):
    """A model whose gradient in each step is known: the numbers of :func:`support.traces.gradient`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(20, 30)

    def forward(self, step: int, rank: int) -> torch.Tensor:
        """Return a loss whose gradient is that of the step."""
        given = torch.from_numpy(gradient(step, rank))
        weight, bias = given[:600].view(30, 20), given[600:]
        return (self.a.weight * weight).sum() + (self.a.bias[:20] * bias).sum()


LAYOUT = [("a.weight", 600), ("a.bias", 30)]


def expected(step: int, rank: int) -> np.ndarray[Any, Any]:
    """Return the gradient of :class:`Known`: ten elements of the bias are not used."""
    return np.concatenate([gradient(step, rank), np.zeros(10, np.float32)])


def _write_for_ever(folder: Path, seed: int, reports: Connection) -> None:
    """Create, fill and close small traces of all kinds, growing them often; say every step that was committed."""
    rng = random.Random(seed)
    reports.send("ready")
    for number in itertools.count():
        path = folder / f"{number}.zarr"
        create_trace(path, LAYERS)
        options: dict[str, Any] = {
            "store": rng.choice(["gradients", "sketches"]),
            "compression": rng.random() < 0.7,
            "expected_steps": rng.choice([1, 2, 3, None, 500]),
        }
        reports.send((number, options, None))
        writer = TraceWriter(path, 0, kinds=KINDS, **options)
        for step in range(rng.randrange(1, 20)):
            arrays = {k: gradient(step, 0, k) for k in KINDS}
            columns = said(step) if options["compression"] else {}
            writer.append(step, arrays, loss=step / 2, selected=step, **columns)
            reports.send((number, options, step))
        writer.close()


def _write_shards_for_ever(folder: Path, rank: int, seed: int, reports: Connection) -> None:
    """Write one rank's shards of small traces that rank 0 creates; say every step that was committed."""
    rng = random.Random(seed)  # the same on both ranks
    reports.send("ready")
    for number in itertools.count():
        path = folder / f"{number}.zarr"
        if rank == 0:
            create_trace(path, LAYERS, world_size=2)
        while not is_trace(path):
            time.sleep(0.001)
        options: dict[str, Any] = {
            "store": rng.choice(["gradients", "sketches"]),
            "compression": rng.random() < 0.7,
            "expected_steps": rng.choice([1, 2, 3, None, 500]),
        }
        last = rng.randrange(1, 20)
        each = write_shards(path, [], rank=rank, world=2, close=False, **options)
        for step in range(last):
            shards = shards_of(rank, 2)
            arrays = {
                k: gradient(step, rank, k) if k == "local" else held(gradient(step, 0, k), shards)
                for k in KINDS
            }
            columns = said(step) if options["compression"] else {}
            each.append(step, arrays, loss=step / 2, selected=step, **columns)
            reports.send((number, step))
        each.close()


def _left(folder: Path) -> list[tuple[Path, bool]]:
    """Return the traces in a folder, the oldest first, and which every reader is to read: the last two.

    The kill met the last one; those before it were whole by then, and one of them stands for all.
    """
    left = sorted((p for p in folder.glob("*.zarr") if is_trace(p)), key=lambda p: int(p.stem))
    return [(path, path in left[-2:]) for path in left]


def shards(number: int, folder: Path) -> str:
    """Kill both writers of a sharded model: what both have committed is there, and true."""
    rng = random.Random(number)
    processes = [start(_write_shards_for_ever, folder, rank, number) for rank in range(2)]
    for process in processes:
        process.wait_for("ready")
    time.sleep(rng.uniform(0.02, 0.8))
    for process in rng.sample(processes, 2):
        process.kill()
        time.sleep(rng.choice([0, 0, 0.02]))
    found = [process.rest() for process in processes]
    for path, newest in _left(folder):
        trace = assert_shards_agree(path) if newest else open_trace(path)
        both = [{step for n, step in each if n == int(path.stem)} for each in found]
        steps = trace.steps(0) if 0 in trace.ranks else []
        least = len(set.intersection(*both))
        assert least <= len(steps) <= least + 1, (both, steps)
        assert steps == list(range(len(steps)))
        for step in steps:
            if trace.has_gradients(0):
                assert np.array_equal(trace.read(step), gradient(step))
    return "nothing lost"


def writer(number: int, folder: Path) -> str:
    """Kill a writer: every step whose ``append`` returned is there, and at most one more."""
    rng = random.Random(number)
    process = start(_write_for_ever, folder, number)
    process.wait_for("ready")
    time.sleep(rng.uniform(0.02, 0.8))
    process.kill()
    found = process.rest()
    for last in sorted({n for n, *_ in found})[-2:]:
        options = next(o for n, o, _ in found if n == last)
        reported = [step for n, _, step in found if n == last and step is not None]
        trace = assert_all_agree(folder / f"{last}.zarr")
        if not trace.ranks:
            assert not reported
            continue
        steps = trace.steps()
        assert len(reported) <= len(steps) <= len(reported) + 1
        assert_as_written(trace, 0, range(len(steps)), **options)
    return "nothing lost"


def _captures(rank: int, folder: Path, seed: int, reports: Connection, distributed: bool) -> None:
    rng = random.Random(seed)  # the same on all ranks
    net = Known()
    reports.send("ready")
    for number in itertools.count():
        steps = rng.randrange(1, 30)
        model = DDP(net) if distributed else net
        with Capture(
            folder / f"{number}.zarr",
            model,
            kinds=["gradient"],
            store=rng.choice(["gradients", "sketches"]),
            total_steps=rng.choice([None, steps]),
            buffers=rng.choice([1, 2, 4]),
        ) as capture:
            if distributed:
                model.register_comm_hook(*capture.wrap(None, allreduce_hook))
            for step in range(steps):
                model.zero_grad()
                model(step, rank).backward()
                capture.step(loss=step / 2)
        reports.send((number, steps))


def _one(folder: Path, seed: int, reports: Connection) -> None:
    _captures(0, folder, seed, reports, distributed=False)


def _rank(rank: int, world: int, folder: Path, seed: int, reports: Connection) -> None:
    _captures(rank, folder, seed, reports, distributed=True)


def _seen(folder: Path) -> dict[tuple[str, int], list[int]]:
    """Return what a reader sees of the newest trace while it is written: {(trace, rank): steps}."""
    seen = {}
    with contextlib.suppress(TraceError, ValueError):
        newest = max((p for p in folder.glob("*.zarr") if is_trace(p)), key=lambda p: int(p.stem))
        trace = open_trace(newest)
        for rank in trace.ranks:
            with contextlib.suppress(TraceError):  # its arrays are being written
                seen[newest.name, rank] = trace.steps(rank)
    return seen


def true_steps(trace: Trace, rank: int) -> list[int]:
    """Check every step that a rank's trace has; return their numbers."""
    steps = trace.steps(rank)
    losses = trace.scalars(rank)["loss"] if steps else np.empty(0)
    assert losses.tolist() == [s / 2 for s in steps], losses
    for step in steps:
        if trace.has_gradients(rank):
            assert np.array_equal(trace.read(step, rank), expected(step, rank))
        else:
            total = np.abs(expected(step, rank), dtype=np.float64).sum()
            found = sum(s.moments.sum_abs for s in trace.sketches(step, rank))
            assert np.isclose(found, total, rtol=1e-12)
    return steps


def _as_captured(trace: Trace, ranks: int, complete: int | None) -> None:
    assert [(layer.name, layer.numel) for layer in trace.layers] == LAYOUT
    if complete is not None:
        assert trace.ranks == list(range(ranks))
    for rank in trace.ranks:
        steps = true_steps(trace, rank)
        assert steps == list(range(len(steps) if complete is None else complete)), (rank, steps)


def _capture(number: int, folder: Path, ranks: int) -> str:
    rng = random.Random(number)
    one = ranks == 1
    processes = (
        [start(_one, folder, number)] if one else start_ranks(ranks, folder, _rank, folder, number)
    )
    for process in processes:
        process.wait_for("ready")
    time.sleep(rng.uniform(0.02, 1.5))
    seen = _seen(folder)
    for process in rng.sample(processes, ranks):
        process.kill()
        time.sleep(rng.choice([0, 0, 0.02]))
    complete: dict[int, int] = {}
    finished = [dict(process.rest()) for process in processes]
    for each in set.intersection(*map(set, finished)):
        complete[each] = finished[0][each]
    left = _left(folder)
    assert {int(path.stem) for path, _ in left} >= set(complete)
    for path, newest in left:
        trace = assert_all_agree(path) if newest else open_trace(path)
        _as_captured(trace, ranks, complete.get(int(path.stem)))
    for (name, rank), steps in seen.items():
        after = open_trace(folder / name).steps(rank)
        assert after[: len(steps)] == steps, f"seen before the kill: {steps}, after: {after}"
    return "nothing lost"


def capture(number: int, folder: Path) -> str:
    """Kill a training with a capture: what a reader had seen is still there, and every step left is true."""
    return _capture(number, folder, 1)


def captures(number: int, folder: Path) -> str:
    """Kill the two ranks of a training, one after the other."""
    return _capture(number, folder, 2)
