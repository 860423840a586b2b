"""The base of all trainers' callbacks: a capture whose model is known only when training begins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from capture.facade import Capture
from capture.schedule import Schedule
from capture.taps.buckets import Hook
from gradstats.errors import InputError
from gradstats.hooks import Monitor, Scaler
from gradstats.hooks.torch_private import comm_hooks, unwrap
from gradstats.trace.files import some
from gradstats.trace.format import OF_PARAMETERS

__all__ = ["TrainerCapture", "TrainerMonitor"]


class TrainerCapture:
    """Open, step and close a :class:`capture.Capture` as a trainer's events come.

    Parameters
    ----------
    path : str or Path
        Trace to create, ``NAME.zarr``.
    schedule : Schedule, int, iterable of int or callable
        Steps to capture, as for :class:`capture.Capture`.
    comm_hook : callable, optional
        DDP communication hook to register when training begins.
    comm_state : object
        State of the hook.
    **options : object
        Other options of :class:`capture.Capture`, except ``start_step``. Kinds that need ``optimizer`` are of the
        trainer's own, unless it is given.

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
        schedule: Schedule | int | Iterable[int] | Callable[[int], bool] = 1,
        *,
        comm_hook: Hook | None = None,
        comm_state: Any = None,
        **options: Any,
    ) -> None:
        # "number" comes before the options: the user's own choice wins
        self._arguments = {"path": path, "schedule": schedule, "overwrite": "number", **options}
        # A misspelt option is an error here, and not only when the model and the data have been loaded.
        inspect.signature(Capture).bind(model=None, start_step=0, **self._arguments)
        self._comm_hook = comm_hook
        self._comm_state = comm_state
        self.capture: Capture | None = None
        # the state of DDP's hook, which passes on to later captures
        self._registered: Capture | None = None

    def _open(
        self, model: nn.Module, start_step: int, scaler: Scaler | None, optimizers: Any = None
    ) -> None:
        hook, ddp = self._comm_hook, unwrap(model).ddp
        if hook is not None and ddp is None:
            raise InputError(
                "comm_hook needs a model in DistributedDataParallel, which this training does not use"
            )
        # without a hook the trainer shows gradients that it has unscaled
        scaling = {"scaler": scaler} if hook is not None else {}
        self._close()  # of a training that failed, and begins again
        moved = set(self._arguments.get("kinds") or ()) & set(OF_PARAMETERS)
        # a Capture refuses an optimizer that no kind needs
        optimizer_option = {"optimizer": optimizers} if moved and optimizers else {}
        first, options = self._registered, scaling | optimizer_option | self._arguments
        if hook is None or ddp is None:
            self.capture = Capture(model=model, start_step=start_step, **options)
        elif first is not None and any(state is first for _, state in comm_hooks(ddp)):
            # of ddp.module alone the capture would not know the group
            options = {"process_group": ddp.process_group, **options}
            # not of the DDP model, on which a Capture finds the earlier hook and refuses it
            self.capture = Capture(model=ddp.module, start_step=start_step, **options)
            self.capture.wrap(self._comm_state, hook)
            first._continue_in(self.capture)
        else:
            self.capture = self._registered = Capture(model=model, start_step=start_step, **options)
            ddp.register_comm_hook(*self.capture.wrap(self._comm_state, hook))

    def _close(self) -> None:
        if self.capture is not None:
            self.capture.close()


class TrainerMonitor:
    """Make a :class:`gradstats.Monitor` when a training begins, and take its steps as a trainer's events come.

    Parameters
    ----------
    log : callable, optional
        Called with the dict of every step described.
    every : int
        Distance of the steps described.
    **options : object
        Other options of :class:`gradstats.Monitor`, except ``optimizer``, ``scaler`` and ``start_step``.

    Attributes
    ----------
    monitor : Monitor or None
        Monitor of the training in progress, or of the last one; None before the first.

    Raises
    ------
    TypeError
        If an option is unknown.
    InputError
        If ``optimizer`` or ``scaler`` is given: the trainer has its own.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float]], object] | None = None,
        every: int = 1,
        **options: Any,
    ) -> None:
        # a misspelt option is an error here, before model and data are loaded
        inspect.signature(Monitor).bind(model=None, start_step=0, **options)
        if theirs := sorted(options.keys() & {"optimizer", "scaler"}):
            raise InputError(f"the trainer has its own {some(theirs)}: leave {some(theirs)} out")
        self._log, self._every, self._options = log, every, options
        self.monitor: Monitor | None = None

    def triggered(self, step: int) -> bool:
        """Tell whether a step is to be captured: the ``schedule`` of a ``CaptureCallback`` beside this one.

        Parameters
        ----------
        step : int
            Number of a step.

        Returns
        -------
        bool
            True for the steps that :meth:`gradstats.Monitor.triggered` names.
        """
        return self.monitor is not None and self.monitor.triggered(step)

    def _watch(
        self, model: nn.Module, start_step: int, log: Any = None, scaler: Any = None
    ) -> None:
        log = self._log if log is None else log
        options = self._options
        self.monitor = Monitor(
            model, log, self._every, scaler=scaler, start_step=start_step, **options
        )
