"""Train in the lab: how long a step takes at a given rate, and where the time goes."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from capture.lab.cluster import BURST, INTERFACE, Cluster, shaped_network
from capture.lab.launch import launch
from capture.workloads.config import BASELINES, DENSE, NO_EXCHANGE, RunConfig, RunResult
from gradstats.compressors import RULE, compressor_class, make_compressor
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
"""Steps at the start that are not counted: DDP rebuilds its buckets after the first, and stateful thresholds settle."""

_LONGEST_ALONE = 40
"""Number of steps that are enough to measure how long computing takes."""
_LONGEST_MESSAGE_S = 1.0
"""Seconds that the largest message of a sweep takes on a link: beyond, twice the bytes take twice as long."""
_SMALLEST_SWEEP = 1 << 16
"""Bytes, or elements, that every sweep reaches, however small the model or slow the link."""


@dataclass(frozen=True, slots=True)
class Computing:
    """Measurement of a training without an exchange.

    Attributes
    ----------
    seconds : float
        Seconds per step.
    numel : int
        Number of elements of the gradient.
    """

    seconds: float
    numel: int


def bench_network(
    config: RunConfig,
    rate: int | tuple[int, int],
    compressors: Sequence[str],
    *,
    local_steps: Sequence[int] = (0,),
    burst: int = BURST,
    on_network: Callable[[Network], None] | None = None,
    label: str = "",
) -> list[dict[str, Any]]:
    """Train a workload once per compressor and number of local steps, in one shaped network.

    Parameters
    ----------
    config : RunConfig
        Settings of the runs; compressor and local steps are replaced. Fragments and delay are those of runs with local
        steps.
    rate : int or (int, int)
        Rate of every link in each direction, in bit/s; or the rates at which a rank sends and receives.
    compressors : sequence of str
        Names (:data:`gradstats.compressors.COMPRESSORS`, :data:`capture.workloads.BASELINES`); ``none`` is PyTorch's
        dense all-reduce.
    local_steps : sequence of int
        Numbers of local steps from one exchange to the next; 0 for an exchange in every step.
    burst : int
        Bytes that an idle link saves up and then sends at once.
    on_network : callable, optional
        Function that gets the measured cost of collectives and of local work in this network. If it is given, they
        are measured before the runs.
    label : str
        Text before the lines that say what is measured next; no lines if empty.

    Returns
    -------
    list of dict
        One per number of local steps and compressor. Times are seconds per step, medians over the steps after
        :data:`WARM_UP`, averaged over the ranks. With local steps they are medians of the means over each interval
        after the first, and the steps are rounded up to such. A compressor that measures how to send
        (:attr:`gradstats.compressors.Compressor.settling`) does so in further steps before them. Exchanges that are
        PyTorch's own, such as ``none`` and ``powersgd``, do not record their parts.

        - ``compressor``, ``nproc``, ``rate`` (Mbit/s, of the slower direction), ``up`` and ``down``, ``ratio`` (NaN for
          PyTorch's exchanges), ``local_steps``, ``fragments``, ``delay``;
        - ``seconds``: the whole step.
        - ``compute_alone``: the same step without an exchange. It is measured once, before the runs: the same
          processes on the same cores, each training by itself, but waiting for the others in every step.
        - ``compute``: the same, but no more than the other parts leave of ``seconds``: the time of computing varies
          from run to run, and no part can be longer than the whole.
        - ``select``: choosing and packing what to send, as the hook measures it; 0 for ``none``, NaN for ``powersgd``.
        - ``communicate``: the part of the exchange that does not overlap with backpropagation, with the waiting for
          slower ranks in it. The hook measures it; for PyTorch's exchanges it is ``seconds`` − ``compute``, at least 0.
        - ``overlapped``: the part of the exchange during backpropagation, as the hook measures it; NaN for PyTorch's
          exchanges.
        - ``utilisation``: the share of ``seconds`` that ``compute`` takes.
        - ``bytes``: bytes that left a rank's interface, headers, acknowledgements and forwarded messages included, as
          the kernel counts them.
        - ``quality``: k̂/k, the mean over steps; NaN where there is none.
        - ``loss``: training loss, mean of the last tenth of the steps; with local steps these may be others.

        ``seconds`` exceeds the sum of its parts by the hook's memory, copies and bookkeeping.

    Raises
    ------
    InputError
        If the settings cannot work; see also :func:`capture.lab.cluster.shaped_network`.
    RunFailedError
        If a rank fails.
    """
    check(config, compressors, local_steps)
    records = []
    with shaped_network(config.nproc, rate, burst) as cluster:
        # in the same network and before the runs, which are compared with it
        computing = train_without_exchange(config, cluster)
        if on_network is not None:
            # a plan compares what was measured: the simplest compressor always is
            trained = [name.removeprefix(RULE) for name in compressors if name not in BASELINES]
            # each once, in the order in which they were given
            select = list(dict.fromkeys([*trained, "topk"]))
            on_network(measure_network(cluster, computing.numel, config.ratio, select, label))
        for steps in dict.fromkeys(local_steps):
            for name in compressors:
                shown = f"{name}, {steps} local steps" if steps else name
                run = _with(config, name, steps).replace(label=shown if config.label else "")
                record, *_ = train(run, cluster, computing.seconds)
                records.append(record)
    return records


def check(config: RunConfig, compressors: Sequence[str], local_steps: Sequence[int] = (0,)) -> None:
    """Check the settings of runs before anything is built.

    Parameters
    ----------
    config : RunConfig
        Settings of the runs; the compressor is replaced.
    compressors : sequence of str
        Compressors of the runs.
    local_steps : sequence of int
        Their numbers of local steps.

    Raises
    ------
    InputError
        If a run cannot work, or is too short.
    """
    # all of them, before the first of them runs
    for name, steps in product(compressors, local_steps):
        _with(config, name, steps).check()
    if not any(local_steps):
        config.check()  # fragments and a delay are of local steps
    if config.setting("steps") <= WARM_UP:
        raise InputError(f"steps must be more than {WARM_UP}: the first {WARM_UP} are not counted")


def _with(config: RunConfig, name: str, local_steps: int) -> RunConfig:
    """Return the settings with another compressor; PyTorch's exchanges send what they send, without a codec."""
    # both are refused without local steps
    if not local_steps:
        config = config.replace(fragments=1, delay=0)
    options = dict(config.options)
    if name in (DENSE, *BASELINES):
        options = {key: value for key, value in options.items() if key not in ("indices", "values")}
    return config.replace(compressor=name, options=options, local_steps=local_steps)


def train_without_exchange(config: RunConfig, cluster: Cluster) -> Computing:
    """Measure how long computing takes in a synchronous step.

    Each rank trains by itself, but waits for the others in every step.

    Parameters
    ----------
    config : RunConfig
        Settings of the run; the compressor is replaced.
    cluster : Cluster
        Network that is up.

    Returns
    -------
    Computing
        Seconds per step, and elements of the gradient.
    """
    steps = min(config.setting("steps"), _LONGEST_ALONE)
    alone = config.replace(
        compressor=NO_EXCHANGE, label="", steps=steps, options={}, evaluate=False
    ).replace(local_steps=0, fragments=1, delay=0)
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
    cluster : Cluster
        Network that is up.
    numel : int
        Number of elements of the gradient.
    ratio : float
        Kept fraction k/d of the selections.
    select : sequence of str
        Compressors whose selection is timed.
    label : str
        Text before the lines that say what is measured next; no lines if empty.

    Returns
    -------
    Network
        Lines fitted to the measured times.
    """
    # bits to bytes
    at_rate = int(_LONGEST_MESSAGE_S * cluster.rate / 8)
    networks = launch(
        cluster,
        _measure,
        {
            # whole elements of float32
            "largest": max(_SMALLEST_SWEEP, min(4 * numel, at_rate)) // 4 * 4,
            "largest_numel": max(_SMALLEST_SWEEP, numel),
            "ratio": ratio,
            "select": list(dict.fromkeys(select)),
        },
        label,
    )
    about = {**networks[0].about, "rate": cluster.rate, "up": cluster.up, "down": cluster.down}
    return Network(networks[0].lines, networks[0].algorithms, about)


def train(
    config: RunConfig, cluster: Cluster, compute: float
) -> tuple[dict[str, Any], list[float], list[float]]:
    """Train in a network that is up.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked.
    cluster : Cluster
        Network that is up.
    compute : float
        Seconds of a step without an exchange.

    Returns
    -------
    record : dict
        Measurements, see :func:`bench_network`.
    losses : list of float
        Training loss at every step, the mean over the ranks.
    seconds : list of float
        Seconds of every step that is counted, those of the slowest rank. Steps in which a compressor settles, and the
        first interval of local steps, are not; a loss and the seconds at its place are then of
        different steps.
    """
    steps, settling, local = config.setting("steps"), _settling(config), config.local_steps
    if local:
        steps, settling = -(-steps // local) * local, local
    # on top: as many steps are counted as of any other compressor
    run = config.replace(evaluate=False, steps=settling + steps)
    results, sent = zip(*launch(cluster, _train, run), strict=True)
    recorded = bool(results[0].records)  # a hook of PyTorch's does not say what it spends where
    first = 1 if local else settling  # with local steps there is a record for each exchange

    def per_step(values: Sequence[float]) -> float:
        if not local:
            return _median(values, settling)
        # one local step in so many exchanges, which a median of the steps would not see
        starts = range(settling, len(values), local)
        return median(fmean(values[start : start + local]) for start in starts)

    seconds = fmean(per_step(result.seconds) for result in results)

    def measured(name: str) -> float:
        if not recorded:
            return math.nan
        # the same steps as in per_step()
        counted = first if local else first + WARM_UP
        each = (median(r[name] for r in result.records[counted:]) for result in results)
        # a record is of an exchange, and an exchange of several steps
        return fmean(each) / (local or 1)

    select = 0.0 if config.compressor == DENSE else measured("select_seconds")
    communicate = measured("communicate_seconds") if recorded else max(0.0, seconds - compute)
    rest = seconds - communicate - (0.0 if math.isnan(select) else select)
    computing = max(0.0, min(compute, rest))
    losses = [fmean(step) for step in zip(*(result.losses for result in results), strict=True)]
    losses = losses[:steps]  # as many as any other compressor has
    # at least one, of a short run too
    last = math.ceil(len(losses) / 10)
    record = {
        "compressor": config.compressor,
        "nproc": config.nproc,
        "rate": cluster.rate / 1e6,
        "up": cluster.up / 1e6,
        "down": cluster.down / 1e6,
        "local_steps": local,
        "fragments": config.fragments,
        "delay": config.delay,
        # PyTorch's exchanges have no ratio; with a delay local steps keep no records, and have one
        "ratio": config.ratio if (recorded or local) and config.compressor != DENSE else math.nan,
        "seconds": seconds,
        "utilisation": computing / seconds,
        "compute": computing,
        "select": select,
        "communicate": communicate,
        "overlapped": measured("overlapped_seconds"),
        "bytes": round(fmean(per_step(counts) for counts in sent)),
        "quality": _quality([r for result in results for r in result.records[first:]]),
        "loss": fmean(losses[-last:]),
        "compute_alone": compute,
    }
    # a synchronous step takes as long as its slowest rank
    slowest = [max(step) for step in zip(*(result.seconds for result in results), strict=True)]
    return record, losses, slowest[settling:]


def _quality(records: Sequence[Mapping[str, Any]]) -> float:
    each = [r["selected"] / r["target"] for r in records if r["target"]]
    return fmean(each) if each else math.nan


def _median(steps: Sequence[float], settling: int = 0) -> float:
    return median(steps[settling + WARM_UP :])


def _settling(config: RunConfig) -> int:
    """Return the number of steps in which the compressor may still measure how to send; none of them is counted."""
    others = (NO_EXCHANGE, *BASELINES)
    if config.compressor in others or not compressor_class(config.compressor).streams:
        return 0
    compressor = make_compressor(config.compressor, config.ratio, **config.options)
    return 0 if compressor is None else compressor.settling


def _train(config: RunConfig) -> tuple[RunResult, list[int]]:
    """Train as one rank; also return the bytes sent in every step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from capture.workloads.training import worker

    # before the first step, whose bytes are the first difference
    before = _bytes_sent()
    counts: dict[int, list[int]] = defaultdict(list)  # an outer optimizer steps, too
    # after an optimizer's step the exchange before it is over
    register_optimizer_step_post_hook(lambda each, *_: counts[id(each)].append(_bytes_sent()))
    result = worker(config)
    # the inner optimizer steps most often
    totals = [before, *max(counts.values(), key=len)]
    return result, [after - before for before, after in pairwise(totals)]


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
    # thread-self: enter() moves a thread into a namespace, and self is the main thread
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            # after eight numbers of what was received: bytes sent
            return int(numbers.split()[8])
    raise LookupError(f"no interface {INTERFACE}")
