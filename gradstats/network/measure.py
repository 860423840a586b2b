"""Measurement of collectives and local work on a cluster, and the lines fitted to it."""

from __future__ import annotations

import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from gradstats.compressors import COMPRESSORS, compressor_class
from gradstats.compressors.signs import SignGathering
from gradstats.console import no_progress
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
from gradstats.primitives.ratio import check_ratio
from gradstats.thresholds import warm_up
from gradstats.version import __version__

__all__ = ["compare", "measure", "time_local"]

_SMALLEST = 1 << 7
_FEWEST_SIZES = 4
_STEP = 4
"""Factor from one size to the next."""
_SHORTEST_S = 2e-3
"""Shortest time that is measured. Shorter calls are repeated up to it, but at most :data:`_MOST` times."""
_MOST = 200
_OF_SENT = ("pack", "unpack", "encode", "decode")
"""Local work on what is sent."""
_MATRIX = 512
"""Rows of the matrices multiplied during collectives: large, so that the thread seldom needs the interpreter."""


def _geometric(largest: int) -> list[int]:
    """Return sizes up to the largest one, no two of them close to each other."""
    # the last step, to the largest size, is by a factor from 2 to 8
    count = math.ceil(math.log(largest / _SMALLEST, _STEP) - 0.5)
    return [*(_SMALLEST * _STEP**i for i in range(count)), largest]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        # kernels are queued: without waiting only their launch would be timed
        torch.cuda.synchronize(device)


def _timed(call: Call, calls: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronise(device)
    return (time.perf_counter() - started) / calls


def _slowest(seconds: list[float], group: Group, device: torch.device) -> list[float]:
    """Return the seconds of the slowest rank, element by element."""
    over = torch.tensor(seconds, dtype=torch.float64, device=device)
    # a collective has ended when it has on the slowest rank
    dist.all_reduce(over, dist.ReduceOp.MAX, group=group)
    return [float(s) for s in over.tolist()]


def _swept(
    calls: Sequence[Call], repeats: int, group: Group, device: torch.device
) -> list[list[float]]:
    """Time a call of each size on all ranks at once; return the slowest rank's seconds by size and repeat.

    Every round goes through all sizes, so that a noisy moment does not hit one of them alone.
    """
    times = []
    for call in calls:
        # the first call connects, allocates and compiles
        call()
        _synchronise(device)
        # of the slowest rank, the same on all: every rank must make the same number of calls
        (once,) = _slowest([_timed(call, 1, device)], group, device)
        times.append(max(1, min(_MOST, math.ceil(_SHORTEST_S / once))))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for of_size, call, n in zip(seconds, calls, times, strict=True):
            # all begin together, or waiting for a late rank would be timed, too
            dist.barrier(group)
            of_size.append(_timed(call, n, device))
    # reduced once at the end, so that no reduction comes between timed calls
    return [_slowest(of_size, group, device) for of_size in seconds]


@contextmanager
def _computing(device: torch.device) -> Iterator[None]:
    """Multiply matrices in another thread, as the backward pass does."""
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
    """Return the seconds that a compressor reports for selecting, by size and repeat; each rank exchanges alone."""
    compressors = [compressing(name, ratio) for _ in gradients]
    seconds: list[list[float]] = [[] for _ in gradients]
    for _ in range(repeats + 1):
        for of_size, compressor, gradient in zip(seconds, compressors, gradients, strict=True):
            # a copy: reduce() may overwrite what it is given
            of_size.append(compressor.reduce(gradient.clone(), alone).select_seconds)
    # the first step finds the threshold, and is left out
    return [_slowest(of_size[1:], None, gradients[0].device) for of_size in seconds]


def measure(
    worlds: Sequence[int] | None = None,
    *,
    largest: int = 1 << 25,
    largest_numel: int = 1 << 21,
    repeats: int = 9,
    ratio: float = 0.001,
    select: Collection[str] = COMPRESSORS,
    device: torch.device | str = "cpu",
    on_progress: Callable[[str], None] = no_progress,
) -> Network:
    """Time every collective and local work at many sizes, and fit lines; called on every rank of the default group.

    Each repeat begins at a barrier and times calls one after the other for at least two milliseconds; the slowest rank
    counts. Local work is timed on all ranks at once, so that they share the memory bandwidth as in training.

    Parameters
    ----------
    worlds : sequence of int, optional
        Numbers of workers among which collectives are measured; each uses the first ranks. By default the whole group.
        With several, the scaling of :class:`gradstats.network.Network` can be checked.
    largest : int
        Bytes of the largest vector, at least 8192 for each worker.
    largest_numel : int
        Elements of the largest gradient of local work, at least 8192.
    repeats : int
        How often each size is timed, at least twice. Lines are fitted to the medians.
    ratio : float
        Kept fraction k/d of the selections, in (0, 1].
    select : collection of str
        Names of :data:`gradstats.compressors.COMPRESSORS` whose selection is timed.
    device : torch.device or str
        Device of the tensors.
    on_progress : callable
        Function that is called with the name of what is measured next.

    Returns
    -------
    Network
        Cost model, the same on every rank that took part in everything. Rank 0 can
        :meth:`save <gradstats.network.Network.save>` it.

    Raises
    ------
    InputError
        If an option is out of range.
    """
    device = torch.device(device)
    everybody = dist.get_world_size()
    worlds = sorted(set(worlds or [everybody]))
    _check(worlds, everybody, largest, largest_numel, repeats, ratio, select)
    # compiles loops now, so that compiling is not timed
    warm_up()
    # every rank has to make every group, in the same order, whether it is in it or not
    alone = [dist.new_group([rank]) for rank in range(everybody)][dist.get_rank()]
    lines: list[Line] = []
    for world in worlds:
        lines += _collectives(world, largest, repeats, device, on_progress)
    # ranks outside of the groups wait here, so that all begin local work together
    dist.barrier()
    lines += _local(select, ratio, largest_numel, repeats, device, alone, on_progress)
    about = {
        "world_size": everybody,
        "worlds": worlds,
        "backend": dist.get_backend(),
        **_machine(device),
        "ratio": ratio,
        "repeats": repeats,
        "versions": {"gradstats": __version__} | {p: version(p) for p in ("numpy", "torch")},
    }
    algorithms = {operation: next(iter(known)) for operation, known in ALGORITHMS.items()}
    return Network(tuple(lines), algorithms, about)


def _machine(device: torch.device) -> dict[str, Any]:
    """Return what is said of the machine that was measured."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": os.cpu_count(),
        # torchrun says it; without torchrun all ranks are taken to be on one host
        "ranks_per_host": int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def time_local(
    numel: int,
    ratio: float = 0.001,
    select: Collection[str] = COMPRESSORS,
    repeats: int = 5,
    coded: bool = False,
) -> tuple[Line, ...]:
    """Time local work in this process alone, on the CPU: what :func:`measure` does between collectives.

    Parameters
    ----------
    numel : int
        Elements of the gradient; sizes up to it are timed, at least 8192 and at most 2²¹.
    ratio : float
        Kept fraction k/d of the selections, in (0, 1].
    select : collection of str
        Names of :data:`gradstats.compressors.COMPRESSORS` whose selection is timed.
    repeats : int
        How often each size is timed.
    coded : bool
        Whether codecs are timed, too.

    Returns
    -------
    tuple of Line
        A line for every operation.
    """
    warm_up()
    least = _SMALLEST * _STEP ** (_FEWEST_SIZES - 1)
    largest = min(max(numel, least), 1 << 21)
    alone, threads = not dist.is_initialized(), torch.get_num_threads()
    # as torchrun starts processes; and two pools on few cores stall each other
    torch.set_num_threads(1)
    if alone:
        # a store in this process: no port, and nobody to wait for
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        lines = _local(
            select,
            ratio,
            largest,
            repeats,
            torch.device("cpu"),
            dist.new_group([dist.get_rank()]),
            lambda _: None,
            coded,
        )
    finally:
        torch.set_num_threads(threads)
        if alone:
            dist.destroy_process_group()
    return tuple(lines)


def _local(  # what both of the above take
    select: Collection[str],
    ratio: float,
    largest_numel: int,
    repeats: int,
    device: torch.device,
    alone: dist.ProcessGroup,
    on_progress: Callable[[str], None],
    coded: bool = True,
) -> list[Line]:
    """Return the lines of local work, timed on all ranks at once."""
    everybody, lines = dist.get_world_size(), []
    on_progress("local work")
    sizes = _geometric(largest_numel)
    works = [local_work(size, largest_numel, device, coded) for size in sizes]
    local = {
        operation: _swept([work[operation] for work in works], repeats, None, device)
        for operation in works[0]
    }
    for name in (n for n in select if issubclass(compressor_class(n), SignGathering)):
        # for two messages and for all of them, as the time depends on their number
        for world in sorted({2, everybody}):
            on_progress(f"decoding by {name} of {world} messages")
            calls = [decoding(name, size, world, device) for size in sizes]
            seconds = _swept(calls, repeats, None, device)
            lines.append(fit_line(f"decode:{name}", world, sizes, seconds))
    gradients = [random_gradient(size, device) for size in sizes]
    for name in dict.fromkeys(select):
        if name != "none":
            on_progress(f"selection by {name}")
            # each rank exchanges with itself: all select at once, as in training, and nothing is sent
            local[f"select:{name}"] = _selecting(name, ratio, gradients, repeats, alone)
    for operation, seconds in local.items():
        # nobody sends a whole gradient as positions and values
        end = -1 if operation.split(":")[0] in _OF_SENT else None
        lines.append(fit_line(operation, 1, sizes[:end], seconds[:end]))
    return lines


def _collectives(
    world: int,
    largest: int,
    repeats: int,
    device: torch.device,
    on_progress: Callable[[str], None],
) -> Iterator[Line]:
    """Yield a line for every collective among the first `world` ranks; the others get none."""
    group = dist.new_group(range(world))  # on every rank
    if dist.get_rank() >= world:
        return
    for operation, prepare in COLLECTIVES.items():
        on_progress(f"{operation} among {world}")
        # all messages of an all-gather together are as large as the other vectors
        sizes = _geometric(largest // world if "all_gather" in operation else largest)
        calls = [prepare(size, device, group) for size in sizes]
        with _computing(device) if operation.startswith("busy") else nullcontext():
            seconds = _swept(calls, repeats, group, device)
        # an all-gather around a ring has one hop less than ranks
        if operation == "hop":
            seconds = [[s / (world - 1) for s in of_size] for of_size in seconds]
        yield fit_line(operation, world, sizes, seconds)


def compare(
    network: Network,
    numel: int,
    *,
    repeats: int = 9,
    ratio: float = 0.001,
    select: Collection[str] = COMPRESSORS,
    device: torch.device | str = "cpu",
) -> list[dict[str, Any]]:
    """Run compressors, and compare their times with the prediction; called on every rank of the default group.

    Parameters
    ----------
    network : Network
        Measured cost model.
    numel : int
        Elements of the gradient, which differs from rank to rank.
    repeats : int
        How many steps are timed, after a first one that is not.
    ratio : float
        Kept fraction k/d, in (0, 1].
    select : collection of str
        Names of :data:`gradstats.compressors.COMPRESSORS` to run.
    device : torch.device or str
        Device of the tensors.

    Returns
    -------
    list of dict
        One record for each compressor: ``compressor``; ``seconds``, which it reports on the rank that waits least, the
        median of the steps; ``predicted`` with its 95 % interval ``low`` and ``high``; and ``÷ measured``, predicted
        over measured.
    """
    device, world = torch.device(device), dist.get_world_size()
    # rolled, so that ranks select different positions, as in training
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
        # the rank that comes last waits for nobody, so its time is the shortest
        measured = -statistics.median(_slowest([-s for s in seconds[1:]], None, device))
        # The prediction gets the number really selected: how well a rule hits k is another question.
        sent = round(statistics.median(selected[1:]))
        # `compressing` leaves out rounds of full precision, and so does what is predicted
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
    worlds: Sequence[int],
    everybody: int,
    largest: int,
    largest_numel: int,
    repeats: int,
    ratio: float,
    select: Collection[str],
) -> None:
    """Raise :class:`InputError` for options that would fail only after minutes."""
    # a collective of one rank has no messages
    if worlds[0] < 2 or worlds[-1] > everybody:
        raise InputError(
            f"collectives need 2 to {everybody} of the {everybody} ranks that run, not "
            + ", ".join(map(str, worlds))
        )
    least = _SMALLEST * _STEP ** (_FEWEST_SIZES - 1)
    if min(largest // worlds[-1], largest_numel) < least:
        raise InputError(
            f"the largest size is too small to fit a line: give at least {least * worlds[-1]} bytes "
            f"and {least} elements"
        )
    if repeats < 2:
        raise InputError(f"repeats must be at least 2, not {repeats}")
    check_ratio(ratio)
    for name in select:
        compressor_class(name)
