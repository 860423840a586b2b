"""Capture in a Hugging Face ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

from capture.integrations.trainer import TrainerCapture, TrainerMonitor
from capture.schedule import Schedule
from capture.taps.buckets import Hook
from gradstats.errors import InputError
from gradstats.hooks.units import is_sharded

__all__ = ["CaptureCallback", "MonitorCallback"]

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

    Steps are numbered as ``state.global_step`` counts them, from 0, and go on in a resumed training. Where there is a
    trace with steps already, of a training before, the new one gets a number: ``NAME-2.zarr``. The learning rate is
    recorded, and the loss of each rank's own micro-batches, which the ``Trainer`` shows to no callback: what its
    ``training_step`` returns if `trainer` is given, else what the model does (``.loss``), and without `trainer` only if
    no micro-batches are accumulated.

    Parameters
    ----------
    path : str or Path
        Trace to create, ``NAME.zarr``.
    schedule : Schedule, int, iterable of int or callable
        Steps to capture, as for :class:`capture.Capture`.
    comm_hook : callable, optional
        DDP communication hook to register when training begins, from PyTorch or from gradstats; ``allreduce_hook``
        averages as DDP does without one. It needs `trainer`, and training in several processes.
    comm_state : object
        State of the hook.
    trainer : Trainer, optional
        The ``Trainer``, for its DDP model and its loss; use
        ``trainer.add_callback(CaptureCallback(…, trainer=trainer))``.
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
        schedule: Schedule | int | Iterable[int] | Callable[[int], bool] = 1,
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
        self._losses: list[torch.Tensor] = []
        self._unhook: Callable[[], None] = lambda: None

    def on_train_begin(  # numpydoc ignore=PR01
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Create the trace, and register the hook if there is one."""
        self._unhook()  # of a training that failed, and begins again
        parallel = PartialState().distributed_type
        # FSDP2 counts among these, and leaves sharded tensors, which can be captured
        if parallel in _SHARDED and not is_sharded(model):
            raise InputError(
                f"gradients sharded by {parallel.value} cannot be captured; use DDP, or FSDP2 (fsdp_version: 2)"
            )
        self._open(
            # `model` is the bare one; DDP is around model_wrapped
            model if self._trainer is None else self._trainer.model_wrapped,
            state.global_step,
            None if self._trainer is None else self._trainer.accelerator.scaler,
            optimizer,
        )
        self._losses.clear()
        if self._trainer is not None:
            self._follow(self._trainer)
        elif args.gradient_accumulation_steps == 1:
            self._unhook = model.register_forward_hook(self._note_output).remove

    def _follow(self, trainer: Trainer) -> None:
        """Note the loss that each training step of a trainer returns, its share of the accumulated one."""
        # something else may have put one on this trainer, above the class's
        original, override = trainer.training_step, vars(trainer).get("training_step")

        def training_step(*arguments: Any, **options: Any) -> torch.Tensor:
            loss: torch.Tensor = original(*arguments, **options)
            # detached, or the graph of every micro-batch would be kept
            self._losses.append(loss.detach())
            return loss

        def restore() -> None:
            del trainer.training_step  # the class's own is seen again
            if override is not None:
                trainer.training_step = override
            # nothing is left to restore, should it be called again
            self._unhook = lambda: None

        trainer.training_step, self._unhook = training_step, restore

    def _note_output(self, model: torch.nn.Module, _: object, output: object) -> None:
        loss = getattr(output, "loss", None)
        # an evaluation calls the same model
        if model.training and isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())

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
        self.capture.step(learning_rate=optimizer.param_groups[0]["lr"], loss=self._loss())
        self._losses.clear()

    def _loss(self) -> torch.Tensor | None:
        """Return the loss of the step in progress, the sum of its micro-batches' shares."""
        return torch.stack(self._losses).sum() if self._losses else None

    def on_train_end(  # numpydoc ignore=PR01
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Finish the trace. After a training that fails, the interpreter's exit does it."""
        self._unhook()
        self._close()


class MonitorCallback(TrainerMonitor, TrainerCallback):  # type: ignore[misc]
    """Describe the gradient of every N-th step of a ``Trainer``, for any logger.

    ``Trainer(callbacks=[MonitorCallback(wandb.log, every=10)])``; the arguments are those of
    :class:`capture.integrations.trainer.TrainerMonitor`. The gradient is the one that the optimizer is about to use
    (``on_pre_optimizer_step``): accumulated, averaged over the ranks under DDP, without the loss scale of fp16, and
    clipped to ``max_grad_norm``, which is 1 unless you set it. Shards of FSDP2 are added up; those of FSDP1 and
    DeepSpeed are refused.

    Raises
    ------
    TypeError
        If an option is unknown.
    InputError
        When training begins, if the gradients are flat shards, or if an option has a wrong value.
    """

    def on_train_begin(  # numpydoc ignore=PR01
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Make the monitor."""
        parallel = PartialState().distributed_type
        names = (str(n) for n, _ in model.named_parameters())
        if parallel in _SHARDED and (
            # FSDP1's name for what it flattens
            parallel != DistributedType.FSDP or any("_flat_param" in n for n in names)
        ):
            raise InputError(
                f"gradients sharded by {parallel.value} cannot be described; use DDP or FSDP2"
            )
        # accelerate's optimizer has the scaler that it steps with
        self._watch(model, state.global_step, scaler=getattr(optimizer, "scaler", None))

    def on_pre_optimizer_step(  # numpydoc ignore=PR01
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take the step."""
        assert self.monitor is not None
        self.monitor.step()
