"""The training loop of the reference runs, as one rank runs it."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from capture.schedule import at, every
from capture.tap import Capture
from capture.workloads.baselines import TorchTopK, powersgd_state, waiting_hook
from capture.workloads.config import NO_EXCHANGE, RunConfig, RunResult
from gradstats.compressors import Compressor, Layerwise, SparseCompressor, make_compressor
from gradstats.hooks import CompressionState, compression_hook

if TYPE_CHECKING:
    from capture.tap import Hook
    from capture.workloads.task import Task

__all__ = ["thread_count", "worker"]

_LAYERWISE_BUCKET_MB = 0.1
"""PyTorch's buckets of 25 MB would hold the whole of a small model, and leave nothing to overlap."""
_ONE_BUCKET_MB = 100_000.0
"""Of any model: several, and PowerSGD's callbacks wait for each other in gloo's threads for ever."""


def worker(config: RunConfig) -> RunResult:
    """Train one rank; the environment is torchrun's."""
    torch.set_num_threads(thread_count(config.nproc))
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    dist.init_process_group("gloo")
    try:
        return _train(config)
    finally:
        dist.destroy_process_group()


def thread_count(nproc: int) -> int:
    """Return how many threads each of some processes on this machine gets."""
    return max(1, (os.cpu_count() or 1) // nproc)


def _train(config: RunConfig) -> RunResult:
    rank = dist.get_rank()
    task: Task = importlib.import_module(config.info.module).make_task(config, rank)
    state, hook, bucket_mb = _exchange(config, task.model)
    ddp = DistributedDataParallel(task.model, bucket_cap_mb=config.bucket_mb or bucket_mb)
    compression = state if isinstance(state, CompressionState) else None
    compressor = compression.compressor if compression else None
    capture = _make_capture(config, ddp)
    if capture is not None:
        state, hook = capture.wrap(state, hook)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=config.initial_learning_rate)
    result = RunResult(numel=sum(p.numel() for p in ddp.parameters()))
    steps = config.setting("steps")
    with _Progress(config.label if rank == 0 else "", steps) as progress:
        for step in range(steps):
            started = time.perf_counter()
            learning_rate = task.learning_rate(step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.zero_grad()
            loss = task.loss(ddp, step)
            torch.autograd.backward(loss)
            if capture is not None:
                capture.step(loss=loss, learning_rate=learning_rate)
            if task.clip is not None:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), task.clip)
            optimizer.step()
            result.losses.append(loss.item())
            result.seconds.append(time.perf_counter() - started)
            if compression is not None and compression.last is not None:
                result.records.append(asdict(compression.last))
            progress.advance(result.losses[-1])
    if capture is not None:
        capture.close()
    if task.accuracy is not None and config.evaluate and rank == 0:
        result.accuracy = task.accuracy(task.model)
    if task.perplexity is not None and config.evaluate and rank == 0:
        result.perplexity = task.perplexity(task.model)
    if isinstance(compressor, Layerwise):
        result.timeline = [asdict(activity) for activity in compressor.timeline]
    result.checksum = sum(float(p.detach().double().sum()) for p in ddp.parameters())
    return result


def _exchange(config: RunConfig, model: torch.nn.Module) -> tuple[Any, Hook, float | None]:
    """Return the state and the hook that average gradients, and the size of DDP's buckets in MB, None for its own."""
    if config.compressor == "powersgd":
        return (
            powersgd_state(config.error_feedback, **config.options),
            powerSGD_hook,
            _ONE_BUCKET_MB,
        )
    if config.compressor == NO_EXCHANGE:
        return None, waiting_hook, None
    compressor: Compressor | None
    if config.compressor == "torch-topk":
        compressor = SparseCompressor(TorchTopK(config.ratio))
    else:
        compressor = make_compressor(config.compressor, config.ratio, **config.options)
    if compressor is None:
        return None, allreduce_hook, None
    state = CompressionState(
        compressor,
        error_feedback=config.error_feedback and compressor.feedback,
        named_parameters=model.named_parameters(),
        diagnose_every=config.diagnose_every,
    )
    bucket_mb = _LAYERWISE_BUCKET_MB if isinstance(compressor, Layerwise) else None
    return state, compression_hook, bucket_mb


def _make_capture(config: RunConfig, model: torch.nn.Module) -> Capture | None:
    if config.out is None:
        return None
    return Capture(
        config.out,
        model,
        at(config.at) if config.at else every(config.every),
        ranks=config.ranks,
        store=config.store,
        dtype=config.dtype,
        total_steps=config.setting("steps"),
        metadata=config.metadata(),
        compress=config.compress,
        overwrite=config.overwrite,
    )


class _Progress:
    """A rich progress bar with the loss, or nothing."""

    def __init__(self, label: str, steps: int) -> None:
        self._label, self._steps = label, steps

    def __enter__(self) -> _Progress:
        if self._label:
            from gradstats.console import progress_bar

            self._bar = progress_bar()
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._steps)
        return self

    def advance(self, loss: float) -> None:
        if self._label:
            self._bar.update(self._task, advance=1, description=f"{self._label} loss {loss:.3f}")

    def __exit__(self, *exception: object) -> None:
        if self._label:
            self._bar.stop()
