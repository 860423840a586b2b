"""Training in the lab: what a step costs at a given rate, and where the time goes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from capture.lab.launch import launch
from capture.lab.network import INTERFACE, Network, shaped_network
from capture.workloads import RunConfig, RunResult
from gradstats.errors import InputError

__all__ = ["WARM_UP", "bench_network"]

WARM_UP = 3
"""Steps not counted: DDP rebuilds its buckets after the first, and thresholds with a state find it."""

_LONGEST_ALONE = 30
"""Steps that tell what computing takes."""


def bench_network(config: RunConfig, rate: int, compressors: Sequence[str]) -> list[dict[str, Any]]:
    """Train a workload once per compressor, in one shaped network.

    Parameters
    ----------
    config : of the runs; its compressor is replaced.
    rate : of every link in each direction, bit/s.
    compressors : names (:data:`gradstats.compressors.COMPRESSORS`); ``none`` is PyTorch's dense all-reduce.

    Returns
    -------
    list of dict
        One per compressor. Times are seconds per step, medians over the steps after :data:`WARM_UP`, averaged over
        the ranks.

        - ``compressor``, ``nproc``, ``rate`` (Mbit/s), ``ratio`` (NaN for ``none``);
        - ``seconds``: of the whole step.
        - ``compute``: of the same step without an exchange. Measured before the runs, for all of them: the same
          number of processes at once on the same cores, each training by itself.
        - ``select``: choosing and packing what to send, as the hook measures it; 0 for ``none``.
        - ``communicate``: of the exchange, as far as it does not overlap with backpropagation, and of waiting in it for
          slower ranks. The hook measures it; for ``none``, which PyTorch runs, it is ``seconds`` − ``compute``.
        - ``overlapped``: of the exchange during backpropagation, as the hook measures it; NaN for ``none``.
        - ``bytes``: that left a rank's interface, headers, acknowledgements and forwarded messages included, as
          the kernel counts them.
        - ``loss``: training loss, mean of the last tenth of the steps.

        ``seconds`` exceeds the sum of its parts by the hook's memory, copies and bookkeeping.

    Raises
    ------
    InputError
        For settings that cannot work; see also :func:`capture.lab.network.shaped_network`.
    RunFailedError
        If a rank fails.
    """
    runs = [
        config.replace(compressor=name, label=name if config.label else "") for name in compressors
    ]
    for run in runs:
        run.check()
    steps = config.setting("steps")
    if steps <= WARM_UP:
        raise InputError(f"steps must be more than {WARM_UP}, which are not counted")
    with shaped_network(config.nproc, rate) as network:
        alone = config.replace(compressor="none", label="", steps=min(steps, _LONGEST_ALONE))
        results = launch(network, _train_alone, alone)
        compute = fmean(_median(result.seconds) for result in results)
        return [_record(run, network, compute) for run in runs]


def _record(config: RunConfig, network: Network, compute: float) -> dict[str, Any]:
    results, sent = zip(*launch(network, _train, config), strict=True)
    dense = config.compressor == "none"
    seconds = fmean(_median(result.seconds) for result in results)

    def measured(name: str) -> float:
        return fmean(_median([r[name] for r in result.records]) for result in results)

    last = math.ceil(config.setting("steps") / 10)
    return {
        "compressor": config.compressor,
        "nproc": config.nproc,
        "rate": network.rate / 1e6,
        "ratio": math.nan if dense else config.ratio,
        "seconds": seconds,
        "compute": compute,
        "select": 0.0 if dense else measured("select_seconds"),
        "communicate": seconds - compute if dense else measured("communicate_seconds"),
        "overlapped": math.nan if dense else measured("overlapped_seconds"),
        "bytes": round(fmean(_median(counts) for counts in sent)),
        "loss": fmean(fmean(result.losses[-last:]) for result in results),
    }


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


def _train_alone(config: RunConfig) -> RunResult:
    """Train by itself, while the other ranks do the same."""
    from capture.workloads.training import worker

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return worker(config)


def _bytes_sent() -> int:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise LookupError(f"no interface {INTERFACE}")
