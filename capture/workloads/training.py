"""Training loop of the reference runs, on one rank."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from capture.creation import Overwrite
from capture.facade import Capture
from capture.workloads.baselines import EXCHANGES, Exchange, TorchTopK
from capture.workloads.config import DENSE, RunConfig, RunResult
from capture.workloads.optimizers import BETAS, make_optimizers
from capture.workloads.resume import Checkpoint
from capture.workloads.sharding import clip_gradients, compress, shard, whole
from gradstats.compressors import Compressor, SparseCompressor, make_compressor
from gradstats.console import progress_bar
from gradstats.hooks import (
    AdamCorrection,
    CompressionState,
    Diagnosis,
    LocalSteps,
    ShardHook,
    compression_hook,
)
from gradstats.hooks.systems import diloco, make_state, sparseloco
from gradstats.trace.format import OF_PARAMETERS

if TYPE_CHECKING:
    from capture.workloads.task import Task

__all__ = ["thread_count", "worker"]

_STREAMED_BUCKET_MB = 0.1
"""Bucket size for compressors that stream: PyTorch's 25 MB would hold all of a small model, with nothing to overlap."""


_GROUPS: list[dist.ProcessGroup | None] = []
"""Held until the process ends. Callbacks of PowerSGD's hook hold the group too, and gloo's thread drops them after they
have run: the last to let go of a group ends its threads, and a thread that would end itself aborts the process."""


def worker(config: RunConfig, store: Any = None) -> RunResult:
    """Train as one rank; torchrun's environment variables say which.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked.
    store : torch.distributed.Store, optional
        Where the ranks meet; at the address in the environment variables if None.

    Returns
    -------
    RunResult
        Losses, times and records of this rank.
    """
    torch.set_num_threads(thread_count(config.nproc))
    # a run is to have the same checksum whenever it is repeated
    torch.use_deterministic_algorithms(True)
    # before the model is made: all ranks begin with the same weights
    torch.manual_seed(config.seed)
    if store is None:
        dist.init_process_group("gloo")
    else:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=config.nproc)
    _GROUPS.append(dist.group.WORLD)
    try:
        return _train(config)
    finally:
        dist.destroy_process_group()


def thread_count(nproc: int) -> int:
    """Return how many threads each process gets, where several share this machine: no more than OMP_NUM_THREADS.

    Parameters
    ----------
    nproc : int
        Number of processes.

    Returns
    -------
    int
        Number of threads, at least 1.
    """
    # torch has read OMP_NUM_THREADS, or counted the cores: a user who asks for fewer has a reason
    return min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // nproc))


def _train(config: RunConfig) -> RunResult:
    rank = dist.get_rank()
    task: Task = importlib.import_module(config.info.module).make_task(config, rank)
    network: torch.nn.Module = task.model
    local: LocalSteps | None = None
    compression: CompressionState | LocalSteps | ShardHook | None = None
    # before the optimizers: fully_shard() puts other parameters in the places of the model's
    mesh = None if config.parallel == "ddp" else shard(config, network)
    result, checkpoint, first = RunResult(), None, 0
    if config.local_steps:
        optimizers = make_optimizers(config, network)
        replicas = None if mesh is None else mesh["replicate"].get_group()
        compression = local = _make_local_steps(config, network, optimizers, replicas)
        capture = _make_capture(config, network)
        if capture is not None:
            capture.follow(local)
    elif mesh is not None:
        compression = compress(config, network, mesh, lambda: _make_compressor(config))
        optimizers = make_optimizers(config, network)
        # after compress(): a Capture looks for the hook when it is made
        capture = _make_capture(config, network, optimizers)
    else:
        state, hook, bucket_mb = _make_exchange(config, task.model)
        ddp = DistributedDataParallel(task.model, bucket_cap_mb=config.bucket_mb or bucket_mb)
        compression = state if isinstance(state, CompressionState) else None
        optimizers = make_optimizers(config, ddp)
        if config.checkpoint is not None:
            states = [each for each in (*optimizers, compression, task.carried) if each is not None]
            checkpoint = Checkpoint(config, ddp, states, result)
            # after the optimizers and the state are made, and before the Capture, which numbers its steps from here
            first = checkpoint.load()
        capture = _make_capture(config, ddp, optimizers, first)
        if capture is not None:
            state, hook = capture.wrap(state, hook)
        if capture is not None or config.compressor != DENSE:  # else DDP is left as PyTorch has it
            ddp.register_comm_hook(state, hook)
        network = ddp
    training = config.training()
    clip = training.clip if training.clip_kind == "averaged" else None
    if capture is not None:
        result.trace = str(capture.path)
    result.numel = sum(p.numel() for p in network.parameters() if p.requires_grad)
    steps = config.setting("steps")
    recorded = diagnosed = None
    with _Progress(config.label if rank == 0 else "", steps) as progress, local or nullcontext():
        progress.start(first)
        for step in range(first, steps):
            started = time.perf_counter()
            learning_rate = config.learning_rate_at(step)
            for group in (g for each in optimizers for g in each.param_groups):
                group["lr"] = learning_rate
            for each in optimizers:
                each.zero_grad()
            loss = task.loss(network, step)
            torch.autograd.backward(loss)
            if capture is not None:
                # before clipping and the optimizer, which change .grad
                capture.step(loss=loss, learning_rate=learning_rate)
            if clip is not None:
                clip_gradients(network, clip)
            for each in optimizers:
                each.step()
            result.losses.append(loss.item())
            result.seconds.append(time.perf_counter() - started)
            # with local steps most steps exchange nothing, and leave the last record where it is
            if compression is not None and compression.last not in (None, recorded):
                recorded = compression.last
                result.records.append(asdict(recorded))
                diagnosis = compression.diagnosis
                if diagnosis is not None and diagnosis is not diagnosed:
                    diagnosed = diagnosis
                    result.diagnoses.append(_scalars(diagnosis))
            if checkpoint is not None and (step + 1) % config.checkpoint_every == 0:
                # the others wait in save()
                if task.evaluate is not None and config.evaluate and rank == 0:
                    measured = task.evaluate(task.model)
                    result.evaluations += [{"step": step + 1, **measured}] if measured else []
                checkpoint.save(step + 1)
            progress.advance(result.losses[-1])
    if capture is not None:
        capture.close()
    # a sharded model is gathered by all ranks together
    if task.evaluate is not None and config.evaluate and (rank == 0 or config.parallel != "ddp"):
        for name, value in task.evaluate(task.model).items():
            setattr(result, name, value)
    if isinstance(compression, CompressionState):
        result.timeline = [asdict(activity) for activity in compression.compressor.timeline]
    # whole() is a collective: all ranks add up
    result.checksum = sum(float(whole(p.detach()).double().sum()) for p in network.parameters())
    return result


def _make_local_steps(
    config: RunConfig,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    group: dist.ProcessGroup | None,
) -> LocalSteps:
    options: dict[str, Any] = {
        "process_group": group,
        "fragments": config.fragments,
        "delay": config.delay,
        "average": config.average,
        "diagnose_every": config.diagnose_every,
    }
    if warm_up := config.training().warm_up:
        options["ratio_at"] = lambda step: 1.0 if step < warm_up else None
    steps, rate = config.local_steps, config.outer_rate
    if config.outer == "sparseloco":
        return sparseloco(model, optimizers, steps, learning_rate=rate, **options)
    compressor = make_compressor(config.compressor, config.ratio, **config.options)
    if compressor is not None:
        options["error_feedback"] = config.error_feedback and compressor.feedback
    if config.outer == "diloco":
        return diloco(
            model, optimizers, steps, learning_rate=rate, compressor=compressor, **options
        )
    # the mean of the parameters, which a step of 1 by the mean pseudo-gradient would end at, needs none
    outer = None if rate == 1 else torch.optim.SGD(model.parameters(), lr=rate)
    return LocalSteps(model, optimizers, outer, steps, compressor, **options)


def _make_exchange(config: RunConfig, model: torch.nn.Module) -> Exchange:
    if config.compressor in EXCHANGES:
        return EXCHANGES[config.compressor](config)
    training = config.training()
    warm_up = training.warm_up
    options: dict[str, Any] = {
        "diagnose_every": config.diagnose_every,
        "clip": training.clip if training.clip_kind == "local" else None,
    }
    named = model.named_parameters()
    if whole := config.whole_system:
        system: dict[str, Any] = {
            "momentum": training.momentum,
            "nesterov": training.nesterov or False,
            "weight_decay": training.weight_decay,
        }
        if warm_up:
            system |= whole.warm_up(warm_up)
        compressor_options = dict(config.options)
        state = make_state(
            config.compressor,
            config.ratio,
            named,
            compressor_options=compressor_options,
            **{**system, **options},
        )
    else:
        compressor = _make_compressor(config)
        state = CompressionState(
            compressor,
            error_feedback=config.error_feedback and compressor.feedback,
            memory=AdamCorrection(BETAS) if config.adam_correction else None,
            named_parameters=named,
            ratio_at=(lambda step: 1.0 if step < warm_up else None) if warm_up else None,
            **options,
        )
    # what streams sends each bucket as it comes
    bucket_mb = _STREAMED_BUCKET_MB if state.compressor.streams else None
    return Exchange(state, compression_hook, bucket_mb)


def _make_compressor(config: RunConfig) -> Compressor:
    if config.compressor == "torch-topk":
        return SparseCompressor(TorchTopK(config.ratio))
    compressor = make_compressor(config.compressor, config.ratio, **config.options)
    assert compressor is not None
    return compressor


def _make_capture(
    config: RunConfig,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    first: int = 0,
) -> Capture | None:
    steps = config.setting("steps")
    # a finished run that is repeated has no step to capture
    if config.out is None or first >= steps:
        return None
    # what was captured before a run was stopped stays, also where that was before its first checkpoint; what comes then
    # is a trace beside it
    overwrite: Overwrite = config.overwrite and not first
    if config.checkpoint is not None and not overwrite:
        overwrite = "number"
    moved = set(OF_PARAMETERS) & set(config.kinds or ())
    return Capture(
        config.out,
        model,
        config.schedule,
        ranks=config.ranks,
        kinds=config.kinds,  # type: ignore[arg-type]  # checked
        optimizer=list(optimizers) if moved else None,
        store=config.store,
        dtype=config.dtype,
        # under local steps a step of the trace is an exchange
        total_steps=steps // (config.local_steps or 1),
        metadata=config.metadata(),
        compress=config.compress,
        overwrite=overwrite,
        start_step=first,
    )


def _scalars(diagnosis: Diagnosis) -> dict[str, Any]:
    fields = ("step", "residual_norm", "matching_rate")
    return {f: getattr(diagnosis, f) for f in fields} | {"delta": diagnosis.delta.tolist()}


class _Progress:
    """A progress bar with the loss, or nothing if the label is empty."""

    def __init__(self, label: str, steps: int) -> None:
        self._label, self._steps = label, steps

    def __enter__(self) -> _Progress:
        if self._label:
            self._bar = progress_bar()
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._steps)
        return self

    def start(self, step: int) -> None:
        if self._label:
            self._bar.update(self._task, completed=step)

    def advance(self, loss: float) -> None:
        if self._label:
            self._bar.update(self._task, advance=1, description=f"{self._label} loss {loss:.3f}")

    def __exit__(self, *exception: object) -> None:
        if self._label:
            self._bar.stop()
