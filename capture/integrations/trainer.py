"""The base of all trainers' callbacks: a capture whose model is known only when training begins."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from capture.schedule import Schedule
from capture.tap import Capture, Hook
from gradstats.errors import InputError
from gradstats.hooks import Scaler

__all__ = ["TrainerCapture"]


class TrainerCapture:
    """Open, step and close a :class:`capture.Capture` as a trainer's events come.

    Parameters
    ----------
    path : str or Path
        Trace to create, ``NAME.zarr``.
    schedule : Schedule, int or iterable of int
        Steps to capture, as for :class:`capture.Capture`.
    comm_hook : callable, optional
        DDP communication hook to register when training begins.
    comm_state : object
        State of the hook.
    **options : object
        Other options of :class:`capture.Capture`, except ``start_step``.

    Attributes
    ----------
    capture : Capture or None
        Capture of the training in progress, or of the last one; None before the first.

    Raises
    ------
    TypeError
        If an option is unknown.
    """

    def __init__(
        self,
        path: str | Path,
        schedule: Schedule | int | Iterable[int] = 1,
        *,
        comm_hook: Hook | None = None,
        comm_state: Any = None,
        **options: Any,
    ) -> None:
        self._arguments = {"path": path, "schedule": schedule, **options}
        # A misspelt option is an error here, and not only when the model and the data have been loaded.
        inspect.signature(Capture).bind(model=None, start_step=0, **self._arguments)
        self._comm_hook = comm_hook
        self._comm_state = comm_state
        self.capture: Capture | None = None

    def _open(self, model: nn.Module, start_step: int, scaler: Scaler | None) -> None:
        hook = self._comm_hook
        if hook is not None and not isinstance(model, DistributedDataParallel):
            raise InputError(
                "comm_hook needs a model in DistributedDataParallel, which this training does not use"
            )
        # without a hook the trainer shows gradients that it has unscaled
        scaling = {"scaler": scaler} if hook is not None else {}
        self.capture = Capture(model=model, start_step=start_step, **scaling | self._arguments)
        if hook is not None:
            model.register_comm_hook(*self.capture.wrap(self._comm_state, hook))  # type: ignore[operator]

    def _close(self) -> None:
        if self.capture is not None:
            self.capture.close()
