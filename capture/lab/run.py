"""Training in the lab: what a step costs at a given rate, and where the time goes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from capture.lab.cluster import BURST, INTERFACE, Cluster, shaped_network
from capture.lab.launch import launch
from capture.workloads.config import BASELINES, NO_EXCHANGE, RunConfig, RunResult
from gradstats.errors import InputError
from gradstats.network import Network

__all__ = [
    "WARM_UP",
    "Computing",
    "bench_network",
    "check",
    "measure_network",
    "train",
    "train_without_exchange",
]

WARM_UP = 3
"""Steps not counted: DDP rebuilds its buckets after the first, and thresholds with a state find it."""

_LONGEST_ALONE = 40
"""Steps that tell what computing takes."""
_LONGEST_MESSAGE_S = 1.0
"""Seconds that the largest message of a sweep takes on a link: beyond, twice the bytes take twice as long."""
_SMALLEST_SWEEP = 1 << 16
"""Bytes, or elements, up to which a sweep goes however small the model or slow the link."""
_UNRECORDED = ("none", "powersgd")
"""Exchanges of PyTorch's own, which do not say what they spend where."""


@dataclass(frozen=True, slots=True)
class Computing:
    """Training without an exchange.

    Attributes
    ----------
    seconds : of a step.
    numel : elements of the gradient.
    """

    seconds: float
    numel: int


def bench_network(
    config: RunConfig,
    rate: int,
    compressors: Sequence[str],
    *,
    burst: int = BURST,
    on_network: Callable[[Network], None] | None = None,
    label: str = "",
) -> list[dict[str, Any]]:
    """Train a workload once per compressor, in one shaped network.

    Parameters
    ----------
    config : of the runs; its compressor is replaced.
    rate : of every link in each direction, bit/s.
    compressors : names (:data:`gradstats.compressors.COMPRESSORS`, :data:`capture.workloads.BASELINES`); ``none`` is
        PyTorch's dense all-reduce.
    burst : bytes that an idle link saves up.
    on_network : measure what collectives and local work cost in this network, before the runs, and give it to this.
    label : before the lines that say what of the network is measured next; none if empty.

    Returns
    -------
    list of dict
        One per compressor. Times are seconds per step, medians over the steps after :data:`WARM_UP`, averaged over
        the ranks.

        - ``compressor``, ``nproc``, ``rate`` (Mbit/s), ``ratio`` (NaN for ``none`` and ``powersgd``);
        - ``seconds``: of the whole step.
        - ``compute``: of the same step without an exchange. Measured before the runs, for all of them: the same
          processes on the same cores, each training by itself, but waiting for the others in every step.
        - ``select``: choosing and packing what to send, as the hook measures it; 0 for ``none``, NaN for ``powersgd``.
        - ``communicate``: of the exchange, as far as it does not overlap with backpropagation, and of waiting in it for
          slower ranks. The hook measures it; for ``none`` and ``powersgd``, which PyTorch runs, it is ``seconds`` −
          ``compute``.
        - ``overlapped``: of the exchange during backpropagation, as the hook measures it; NaN for ``none`` and
          ``powersgd``.
        - ``bytes``: that left a rank's interface, headers, acknowledgements and forwarded messages included, as
          the kernel counts them.
        - ``quality``: k̂/k, the mean over steps; NaN where there is none.
        - ``loss``: training loss, mean of the last tenth of the steps.

        ``seconds`` exceeds the sum of its parts by the hook's memory, copies and bookkeeping.

    Raises
    ------
    InputError
        For settings that cannot work; see also :func:`capture.lab.cluster.shaped_network`.
    RunFailedError
        If a rank fails.
    """
    check(config, compressors)
    records = []
    with shaped_network(config.nproc, rate, burst) as cluster:
        computing = train_without_exchange(config, cluster)
        if on_network is not None:
            select = [name for name in compressors if name not in BASELINES]
            on_network(measure_network(cluster, computing.numel, config.ratio, select, label))
        for name in compressors:
            run = config.replace(compressor=name, label=name if config.label else "")
            record, _ = train(run, cluster, computing.seconds)
            records.append(record)
    return records


def check(config: RunConfig, compressors: Sequence[str]) -> None:
    """Raise :class:`InputError` for runs that cannot work."""
    for name in compressors:
        config.replace(compressor=name).check()
    if config.setting("steps") <= WARM_UP:
        raise InputError(f"steps must be more than {WARM_UP}, which are not counted")


def train_without_exchange(config: RunConfig, cluster: Cluster) -> Computing:
    """Train each rank by itself, waiting for the others in every step: what computing takes in a synchronous step."""
    steps = min(config.setting("steps"), _LONGEST_ALONE)
    alone = config.replace(
        compressor=NO_EXCHANGE, label="", steps=steps, options={}, evaluate=False
    )
    results, _ = zip(*launch(cluster, _train, alone), strict=True)
    return Computing(fmean(_median(result.seconds) for result in results), results[0].numel)


def measure_network(
    cluster: Cluster,
    numel: int,
    ratio: float,
    select: Sequence[str],
    label: str = "",
) -> Network:
    """Measure what collectives cost in this network, and local work up to a gradient's size.

    Parameters
    ----------
    cluster : that is up.
    numel : elements of the gradient.
    ratio : k/d of the selections.
    select : systems whose selection to time.
    label : before the lines that say what is measured next; none if empty.
    """
    at_rate = int(_LONGEST_MESSAGE_S * cluster.rate / 8)
    found = launch(
        cluster,
        _measure,
        {
            "largest": max(_SMALLEST_SWEEP, min(4 * numel, at_rate)) // 4 * 4,
            "largest_numel": max(_SMALLEST_SWEEP, numel),
            "ratio": ratio,
            "select": list(dict.fromkeys(select)),
        },
        label,
    )
    about = {**found[0].about, "rate": cluster.rate}
    return Network(found[0].lines, found[0].algorithms, about)


def train(
    config: RunConfig, cluster: Cluster, compute: float
) -> tuple[dict[str, Any], list[float]]:
    """Train in a network that is up.

    Parameters
    ----------
    config : of the run, checked.
    cluster : that is up.
    compute : seconds of a step without an exchange.

    Returns
    -------
    The record, see :func:`bench_network`, and the training loss by step, the mean over the ranks.
    """
    results, sent = zip(*launch(cluster, _train, config.replace(evaluate=False)), strict=True)
    unrecorded = config.compressor in _UNRECORDED
    seconds = fmean(_median(result.seconds) for result in results)

    def measured(name: str) -> float:
        if unrecorded:
            return math.nan
        return fmean(_median([r[name] for r in result.records]) for result in results)

    losses = [fmean(step) for step in zip(*(result.losses for result in results), strict=True)]
    last = math.ceil(len(losses) / 10)
    record = {
        "compressor": config.compressor,
        "nproc": config.nproc,
        "rate": cluster.rate / 1e6,
        "ratio": math.nan if unrecorded else config.ratio,
        "seconds": seconds,
        "compute": compute,
        "select": 0.0 if config.compressor == "none" else measured("select_seconds"),
        "communicate": seconds - compute if unrecorded else measured("communicate_seconds"),
        "overlapped": measured("overlapped_seconds"),
        "bytes": round(fmean(_median(counts) for counts in sent)),
        "quality": _quality([r for result in results for r in result.records]),
        "loss": fmean(losses[-last:]),
    }
    return record, losses


def _quality(records: Sequence[Mapping[str, Any]]) -> float:
    each = [r["selected"] / r["target"] for r in records if r["target"]]
    return fmean(each) if each else math.nan


def _median(steps: Sequence[float]) -> float:
    return median(steps[WARM_UP:])


def _train(config: RunConfig) -> tuple[RunResult, list[int]]:
    """Train as one rank; return also the bytes sent in every step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from capture.workloads.training import worker

    counts = [_bytes_sent()]
    register_optimizer_step_post_hook(lambda *_: counts.append(_bytes_sent()))
    result = worker(config)
    return result, [after - before for before, after in pairwise(counts)]


def _measure(options: Mapping[str, Any], label: str) -> Network:
    """Measure as one rank, with as many threads as in training."""
    import torch
    import torch.distributed as dist

    from capture.workloads.training import thread_count
    from gradstats.network.measure import measure

    dist.init_process_group("gloo")
    try:
        torch.set_num_threads(thread_count(dist.get_world_size()))
        shown = label and dist.get_rank() == 0
        return measure(
            **options,
            on_progress=lambda what: print(f"{label}: {what}", file=sys.stderr) if shown else None,
        )
    finally:
        dist.destroy_process_group()


def _bytes_sent() -> int:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise LookupError(f"no interface {INTERFACE}")
