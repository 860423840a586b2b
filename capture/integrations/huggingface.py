"""Capture in a Hugging Face ``Trainer``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

try:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise ImportError(
        f"{__name__} needs transformers and accelerate: pip install 'gradstats[huggingface]'"
    ) from error

from capture.integrations.trainer import TrainerCapture
from capture.schedule import Schedule
from capture.tap import Hook
from gradstats.errors import InputError
from gradstats.hooks.units import is_sharded

__all__ = ["CaptureCallback"]

_SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


class CaptureCallback(TrainerCapture, TrainerCallback):  # type: ignore[misc]
    """Record the gradients of ``Trainer(callbacks=[CaptureCallback("run.zarr", schedule=100)])``.

    The callback records every parameter's ``.grad`` at ``on_pre_optimizer_step``, as the optimizer is about to use it:
    accumulated over the micro-batches, averaged over the ranks under DDP (so every rank holds the same one;
    ``ranks=[0]`` keeps it once), and clipped to ``max_grad_norm``, which is 1 unless you set it (0 switches it off).
    The gradient is free of fp16's loss scale, except in transformers 4 with clipping off.

    Under FSDP2 (``fsdp_version: 2``) the shards of this gradient are recorded, and read back whole.

    With `comm_hook` the callback records what goes into that hook instead: each rank's own gradient, before averaging
    and clipping, and without the loss scale of fp16. A compressor's state should know that scale too: give it the
    scaler, ``CompressionState(…, scaler=trainer.accelerator.scaler)``.

    Steps are numbered as ``state.global_step`` counts them, from 0, and go on in a resumed training, which needs
    another `path`. The learning rate is recorded; the loss is not, because the ``Trainer`` shows it to no callback.

    Parameters
    ----------
    path : str or Path
        Trace to create, ``NAME.zarr``.
    schedule : Schedule, int or iterable of int
        Steps to capture, as for :class:`capture.Capture`.
    comm_hook : callable, optional
        DDP communication hook to register when training begins, from PyTorch or from gradstats; ``allreduce_hook``
        averages as DDP does without one. It needs `trainer`, and training in several processes.
    comm_state : object
        State of the hook.
    trainer : Trainer, optional
        The ``Trainer``, for its DDP model; use ``trainer.add_callback(CaptureCallback(…, trainer=trainer))``.
    **options : object
        Other options of :class:`capture.Capture`, except ``start_step``.

    Raises
    ------
    TypeError
        If an option is unknown.
    InputError
        If `comm_hook` is given without `trainer`. When training begins, if `comm_hook` is given and the model is not in
        DDP, if the model is sharded by something else than FSDP2 (DeepSpeed), or if an option has a wrong value.
    TraceError
        When training begins, if the trace cannot be created.
    """

    def __init__(
        self,
        path: str | Path,
        schedule: Schedule | int | Iterable[int] = 1,
        *,
        comm_hook: Hook | None = None,
        comm_state: Any = None,
        trainer: Trainer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, schedule, comm_hook=comm_hook, comm_state=comm_state, **options)
        if comm_hook is not None and trainer is None:
            raise InputError("comm_hook needs trainer=…, on whose DDP model it is registered")
        self._trainer = trainer

    def on_train_begin(  # numpydoc ignore=PR01
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        **_: Any,
    ) -> None:
        """Create the trace, and register the hook if there is one."""
        parallel = PartialState().distributed_type
        if parallel in _SHARDED and not is_sharded(model):
            raise InputError(
                f"gradients sharded by {parallel.value} cannot be captured; use DDP, or FSDP2 (fsdp_version: 2)"
            )
        self._open(
            model if self._trainer is None else self._trainer.model_wrapped,
            state.global_step,
            None if self._trainer is None else self._trainer.accelerator.scaler,
        )

    def on_pre_optimizer_step(  # numpydoc ignore=PR01
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: torch.optim.Optimizer,
        **_: Any,
    ) -> None:
        """Record the step."""
        assert self.capture is not None
        self.capture.step(learning_rate=optimizer.param_groups[0]["lr"])

    def on_train_end(  # numpydoc ignore=PR01
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Finish the trace. After a training that fails, the interpreter's exit does it."""
        self._close()
