"""Measure what collectives and local work cost on this cluster, and fit lines to it."""

from __future__ import annotations

import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from gradstats.compressors import COMPRESSORS
from gradstats.compressors.signs import SignGathering
from gradstats.errors import InputError
from gradstats.network.exchange import exchange
from gradstats.network.model import ALGORITHMS, Line, Network, fit_line, interval
from gradstats.network.operations import (
    COLLECTIVES,
    Call,
    Group,
    compressing,
    decoding,
    local_work,
    random_gradient,
)
from gradstats.primitives import warm_up

__all__ = ["compare", "measure"]

_SMALLEST = 1 << 7
_FEWEST_SIZES = 4
_STEP = 4
"""Between sizes."""
_SHORTEST_S = 2e-3
"""What is timed at once takes at least this long: shorter calls are repeated."""
_MOST = 200
_MATRIX = 512
"""Rows of the matrices that are multiplied while collectives go on: long enough to leave the interpreter alone."""


def _geometric(largest: int) -> list[int]:
    """Return sizes up to the largest itself, of which none is close to another."""
    count = math.ceil(math.log(largest / _SMALLEST, _STEP) - 0.5)
    return [*(_SMALLEST * _STEP**i for i in range(count)), largest]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(call: Call, calls: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronise(device)
    return (time.perf_counter() - started) / calls


def _slowest(seconds: list[float], group: Group, device: torch.device) -> list[float]:
    """Return the largest of all ranks', element by element."""
    over = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(over, dist.ReduceOp.MAX, group=group)
    return [float(s) for s in over.tolist()]


def _swept(
    calls: Sequence[Call], repeats: int, group: Group, device: torch.device
) -> list[list[float]]:
    """Time a call of each size on all ranks at once; the slowest rank's seconds, by size and repeat.

    Every round has all sizes, so that a noisy moment does not fall on one of them alone.
    """
    times = []
    for call in calls:
        call()
        _synchronise(device)
        (once,) = _slowest([_timed(call, 1, device)], group, device)
        times.append(max(1, min(_MOST, math.ceil(_SHORTEST_S / once))))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for of_size, call, n in zip(seconds, calls, times, strict=True):
            dist.barrier(group)
            of_size.append(_timed(call, n, device))
    return [_slowest(of_size, group, device) for of_size in seconds]


@contextmanager
def _computing(device: torch.device) -> Iterator[None]:
    """Multiply matrices in a thread beside this one, as backpropagation does."""
    done = threading.Event()

    def multiply() -> None:
        matrix = torch.zeros(_MATRIX, _MATRIX, device=device)
        while not done.is_set():
            torch.mm(matrix, matrix)

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _selecting(
    name: str,
    ratio: float,
    gradients: Sequence[torch.Tensor],
    repeats: int,
    alone: dist.ProcessGroup,
) -> list[list[float]]:
    """Return the seconds a system selects for, by its own account, with nobody to send to; by size and repeat."""
    compressors = [compressing(name, ratio) for _ in gradients]
    seconds: list[list[float]] = [[] for _ in gradients]
    for _ in range(repeats + 1):
        for of_size, compressor, gradient in zip(seconds, compressors, gradients, strict=True):
            of_size.append(compressor.reduce(gradient.clone(), alone).select_seconds)
    # the first one finds its threshold
    return [_slowest(of_size[1:], None, gradients[0].device) for of_size in seconds]


def measure(
    worlds: Sequence[int] | None = None,
    *,
    largest: int = 1 << 25,
    largest_numel: int = 1 << 21,
    repeats: int = 9,
    ratio: float = 0.001,
    select: Sequence[str] = COMPRESSORS,
    device: torch.device | str = "cpu",
    on_progress: Callable[[str], None] = lambda _: None,
) -> Network:
    """Sweep sizes of every collective and of local work, and fit lines; called on every rank of the default group.

    Each repeat begins at a barrier and times calls one after the other, for two milliseconds at least; what counts is
    the slowest rank. Local work goes on on all ranks at once, as in training, so that they share the
    memory bandwidth as they will.

    Parameters
    ----------
    worlds : numbers of workers to measure collectives among, the first ranks of all; the whole group if None. With
        several, what :class:`gradstats.network.Network` makes of one number can be checked on the others.
    largest : bytes of the largest vector, at least 8192 a rank.
    largest_numel : elements of the largest gradient of local work, at least 8192.
    repeats : of every size; medians are fitted.
    ratio : k/d of the selections.
    select : systems, names of :data:`gradstats.compressors.COMPRESSORS`, whose selection to time.
    device : of the tensors.
    on_progress : called with what is measured next.

    Returns
    -------
    Network, the same on every rank that took part in everything; :meth:`gradstats.network.Network.save` it on rank 0.

    Raises
    ------
    InputError
        For options out of range.
    """
    device = torch.device(device)
    everybody = dist.get_world_size()
    worlds = sorted(set(worlds or [everybody]))
    _check(worlds, everybody, min(largest // max(worlds), largest_numel), repeats, select)
    warm_up()
    alone = [dist.new_group([rank]) for rank in range(everybody)][dist.get_rank()]
    lines: list[Line] = []
    for world in worlds:
        group = dist.new_group(range(world))
        for operation, prepare in COLLECTIVES.items():
            if dist.get_rank() >= world:
                continue
            on_progress(f"{operation} among {world}")
            # the gathered messages are to be no larger than the other vectors
            sizes = _geometric(largest // world if "all_gather" in operation else largest)
            calls = [prepare(size, device, group) for size in sizes]
            with _computing(device) if operation.startswith("busy") else nullcontext():
                seconds = _swept(calls, repeats, group, device)
            if operation == "hop":
                seconds = [[s / (world - 1) for s in of_size] for of_size in seconds]
            lines.append(fit_line(operation, world, sizes, seconds))
    dist.barrier()
    on_progress("local work")
    sizes = _geometric(largest_numel)
    works = [local_work(size, largest_numel, device) for size in sizes]
    local = {
        operation: _swept([work[operation] for work in works], repeats, None, device)
        for operation in works[0]
    }
    for name in (n for n in select if isinstance(compressing(n, ratio), SignGathering)):
        for world in sorted({2, everybody}):
            on_progress(f"decoding of {name} from {world}")
            calls = [decoding(name, size, world, device) for size in sizes]
            seconds = _swept(calls, repeats, None, device)
            lines.append(fit_line(f"decode:{name}", world, sizes, seconds))
    gradients = [random_gradient(size, device) for size in sizes]
    for name in dict.fromkeys(select):
        if name != "none":
            on_progress(f"selection by {name}")
            local[f"select:{name}"] = _selecting(name, ratio, gradients, repeats, alone)
    # nobody sends all of a gradient sparsely
    sent = {"pack", "unpack"}
    lines += [
        fit_line(operation, 1, sizes[:-1], seconds[:-1])
        if operation in sent
        else fit_line(operation, 1, sizes, seconds)
        for operation, seconds in local.items()
    ]
    about = {
        "world_size": everybody,
        "worlds": worlds,
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": os.cpu_count(),
        "ranks_per_host": int(os.environ.get("LOCAL_WORLD_SIZE", everybody)),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "ratio": ratio,
        "repeats": repeats,
        "versions": {p: version(p) for p in ("gradstats", "numpy", "torch")},
    }
    algorithms = {operation: next(iter(known)) for operation, known in ALGORITHMS.items()}
    return Network(tuple(lines), algorithms, about)


def compare(
    network: Network,
    numel: int,
    *,
    repeats: int = 9,
    ratio: float = 0.001,
    select: Sequence[str] = COMPRESSORS,
    device: torch.device | str = "cpu",
) -> list[dict[str, Any]]:
    """Run systems, and put what they take beside what a network predicts; called on every rank of the default group.

    Parameters
    ----------
    network : measured.
    numel : elements of the gradient; a different one on every rank.
    repeats : steps, after a first one that does not count.
    ratio, select, device : see :func:`measure`.

    Returns
    -------
    list of dict
        compressor, seconds (by the systems' own account, of the rank that waits least; median over the steps),
        predicted, low and high (its 95 % interval), and predicted over measured.
    """
    device, world = torch.device(device), dist.get_world_size()
    gradient = random_gradient(numel, device).roll(dist.get_rank() * numel // world)
    records = []
    for name in dict.fromkeys(select):
        compressor = compressing(name, ratio)
        seconds, selected = [], []
        for _ in range(repeats + 1):
            dist.barrier()
            reduced = compressor.reduce(gradient.clone(), None)
            seconds.append(reduced.select_seconds + reduced.communicate_seconds)
            selected.append(reduced.selected)
        # of the rank that comes last, which waits for nobody
        measured = -statistics.median(_slowest([-s for s in seconds[1:]], None, device))
        # as many as it does select: how well a rule hits k is another question
        sent = round(statistics.median(selected[1:]))
        one = exchange(name, numel, ratio, world, selected=sent, full_every=None)
        value, low, high = interval(network, one.seconds)
        records.append(
            {
                "compressor": name,
                "seconds": measured,
                "predicted": value,
                "low": low,
                "high": high,
                "÷ measured": value / measured,
            }
        )
    return records


def _check(
    worlds: Sequence[int], everybody: int, smallest: int, repeats: int, select: Sequence[str]
) -> None:
    if worlds[0] < 2 or worlds[-1] > everybody:
        raise InputError(
            f"collectives need 2 to {everybody} of the {everybody} ranks that run, not "
            + ", ".join(map(str, worlds))
        )
    least = _SMALLEST * _STEP ** (_FEWEST_SIZES - 1)
    if smallest < least:
        raise InputError(
            f"a line needs more sizes: bytes a rank and elements up to {least} at least"
        )
    if repeats < 2:
        raise InputError(f"repeats must be at least 2, not {repeats}")
    unknown = set(select) - set(COMPRESSORS)
    if unknown:
        raise InputError(f"no compressor {min(unknown)!r}; there are {', '.join(COMPRESSORS)}")
