"""Capture in a Lightning ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )
except ImportError as error:
    raise ImportError(f"{__name__} needs lightning: pip install 'gradstats[lightning]'") from error

from capture.integrations.trainer import TrainerCapture, TrainerMonitor
from capture.schedule import Schedule
from capture.taps.buckets import Hook
from gradstats.errors import InputError

__all__ = ["CaptureCallback", "MonitorCallback"]


class CaptureCallback(TrainerCapture, Callback):  # type: ignore[misc]
    """Record the gradients of ``Trainer(callbacks=[CaptureCallback("run.zarr", schedule=100)])``.

    The callback records every parameter's ``.grad`` at ``on_before_optimizer_step``: the mean over the micro-batches of
    ``accumulate_grad_batches``, averaged over the ranks under DDP (so every rank holds the same one; ``ranks=[0]``
    keeps it once), without the loss scale of fp16, and before ``gradient_clip_val``.

    Under FSDP2 (``ModelParallelStrategy``) the shards of this gradient are recorded, and read back whole.

    With `comm_hook` the callback records what goes into that hook instead: each rank's own gradient, before averaging,
    and without the loss scale of fp16. A compressor's state should know that scale too: make the scaler, and give it to
    both, ``MixedPrecision("16-mixed", "cuda", scaler)`` and ``CompressionState(…, scaler=scaler)``.

    Steps are numbered as ``trainer.global_step`` counts them, from 0, and go on in a resumed training; with several
    optimizers every optimizer's step is one. Where there is a trace with steps already, of a training before, the new
    one gets a number: ``NAME-2.zarr``. The loss (as ``backward`` gets it, summed over the micro-batches) and the
    learning rate are recorded.

    Parameters
    ----------
    path : str or Path
        Trace to create, ``NAME.zarr``.
    schedule : Schedule, int, iterable of int or callable
        Steps to capture, as for :class:`capture.Capture`.
    comm_hook : callable, optional
        DDP communication hook to register when training begins, from PyTorch or from gradstats; ``allreduce_hook``
        averages as DDP does without one. Give it here, not to ``DDPStrategy(ddp_comm_hook=…)``: DDP takes one hook, and
        Lightning registers its own on CUDA only.
    comm_state : object
        State of the hook.
    **options : object
        Other options of :class:`capture.Capture`, except ``start_step``.

    Raises
    ------
    TypeError
        If an option is unknown.
    InputError
        When training begins, if the strategy is neither a single device, nor DDP, nor FSDP2, if `comm_hook` is given
        and the strategy is not DDP, or if an option has a wrong value.
    TraceError
        When training begins, if the trace cannot be created.
    """

    def __init__(
        self,
        path: str | Path,
        schedule: Schedule | int | Iterable[int] | Callable[[int], bool] = 1,
        *,
        comm_hook: Hook | None = None,
        comm_state: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(path, schedule, comm_hook=comm_hook, comm_state=comm_state, **options)
        self._loss: torch.Tensor | float = 0.0

    def on_train_start(  # numpydoc ignore=PR01
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Create the trace, and register the hook if there is one."""
        known = SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy
        if not isinstance(trainer.strategy, known):
            name = type(trainer.strategy).__name__
            raise InputError(
                f"gradients of {name} cannot be captured; use a single device, DDP, or ModelParallelStrategy with "
                "fully_shard()"
            )
        self._loss = 0.0  # of a training that failed while it accumulated
        # the strategy's model: DDP or sharded, where pl_module is bare
        model, optimizers = trainer.strategy.model, list(trainer.optimizers)
        self._open(model, trainer.global_step, _scaler(trainer), optimizers)

    def on_before_backward(  # numpydoc ignore=PR01
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Add up the loss of the step."""
        scaler = _scaler(trainer)
        # detached, or the graph of every micro-batch would be kept
        loss = loss.detach()
        # the precision plugin has multiplied it already; on the device, where get_scale() would wait for it
        scale = 1.0 if scaler is None else scaler.scale(torch.ones_like(loss))
        self._loss = self._loss + loss / scale

    def on_before_optimizer_step(  # numpydoc ignore=PR01
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record the step."""
        assert self.capture is not None
        self.capture.step(loss=self._loss, learning_rate=optimizer.param_groups[0]["lr"])
        self._loss = 0.0

    def on_train_end(  # numpydoc ignore=PR01
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Finish the trace."""
        self._close()

    def on_exception(  # numpydoc ignore=PR01
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Finish the trace of what was captured before the training failed."""
        self._close()


class MonitorCallback(TrainerMonitor, Callback):  # type: ignore[misc]
    """Describe the gradient of every N-th step of a ``Trainer``, for any logger.

    ``Trainer(callbacks=[MonitorCallback(every=10)])``; the arguments are those of
    :class:`capture.integrations.trainer.TrainerMonitor`; without `log` the trainer's logger logs. The gradient is
    the one at ``on_before_optimizer_step``: the mean over the micro-batches, averaged over the ranks under DDP,
    without the loss scale of fp16, and before ``gradient_clip_val``.

    Raises
    ------
    TypeError
        If an option is unknown.
    InputError
        When training begins, if an option has a wrong value.
    """

    def on_train_start(  # numpydoc ignore=PR01
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Make the monitor."""
        log, logger = self._log, trainer.logger
        if log is None and logger is not None:
            # of this training: the next one may have another logger

            def log(values: Mapping[str, float]) -> None:
                logger.log_metrics(values, trainer.global_step)

        self._watch(trainer.strategy.model, trainer.global_step, log, _scaler(trainer))

    def on_before_optimizer_step(  # numpydoc ignore=PR01
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Take the step."""
        assert self.monitor is not None
        self.monitor.step()


def _scaler(trainer: Trainer) -> Any:
    """Return the loss scaler of a training, if it has one."""
    return getattr(trainer.precision_plugin, "scaler", None)
