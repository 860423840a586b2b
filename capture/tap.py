"""The object a training script talks to: it takes snapshots of gradients and hands them to a background thread."""

# No `from __future__ import annotations` here: DDP reads the annotations of the wrapped hook at run time.

import atexit
import fnmatch
import platform
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import GradBucket  # what mypy can see of dist.GradBucket

from capture.schedule import Schedule, as_schedule
from capture.states import observe, records_steps, step_columns
from capture.writer import BackgroundWriter, Snapshot
from gradstats.errors import GradstatsError, InputError, TraceError
from gradstats.trace import KINDS, STORES, Kind, Layer, Store, TraceWriter, create_trace

__all__ = ["Capture", "CaptureWarning", "Hook"]

Hook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class CaptureWarning(UserWarning):
    """Capturing is slower than training, or has stopped. The training goes on."""


class Capture:
    """Record per-step gradients of a training run, before and after error feedback.

    In a loop without DDP, call :meth:`step` once per iteration after ``backward()``. Under DDP, register the
    hook that :meth:`wrap` returns; it takes a snapshot of what goes into the inner hook. A background thread writes the
    snapshots, and sketches them first if asked to. When the disk is slower than the training, the training waits and
    one warning says so; when a write fails, capturing stops with one warning and the training goes on.

    Parameters
    ----------
    path : str or Path
        Trace to create, ``NAME.zarr``.
    model : torch.nn.Module
        Module whose gradients are captured, wrapped in DDP or not.
    schedule : Schedule, int or iterable of int
        Steps to capture: a :class:`Schedule`, N for every N-th step, or a list of steps.
    ranks : iterable of int, optional
        Ranks to capture; all if None.
    kinds : sequence of {"gradient", "corrected"}, optional
        What to store: the gradient, and the gradient plus the hook's memory. If None, both where the hook keeps a
        memory, else the gradient.
    parameters : sequence of str, optional
        Name patterns (``fnmatch``) of the parameters to capture; all if None.
    store : {"gradients", "sketches"}
        Whether to store the gradients themselves, or in their place a histogram and the moments of every layer, which
        take some kilobytes a step.
    dtype : {"float32", "bfloat16"}
        Type of the stored gradients; ``"bfloat16"`` takes half the space. Sketches are always of the
        float32 values.
    total_steps : int, optional
        Length of the run. If it is known, the trace is laid out once and need not grow.
    metadata : mapping of str to JSON values, optional
        Description of the run, stored with the trace.
    buffers : int
        Largest number of steps on their way from the training to the disk.
    compress : bool
        Whether to compress the stored gradients; sketches always are.
    overwrite : bool
        Whether to replace an existing trace at `path`.
    start_step : int
        Number of the first step, for a resumed run.
    process_group : ProcessGroup, optional
        Group whose ranks are captured; the default group, if there is one, if None.

    Attributes
    ----------
    path : Path
        The trace.
    schedule : Schedule
        Steps to capture.
    rank : int
        Rank of this process; 0 without a process group.
    active : bool
        Whether this rank still captures: False if it is not one of `ranks`, after a failed write, and once closed.

    Raises
    ------
    TraceError
        On every rank, if the trace cannot be created.
    InputError
        If no parameter matches `parameters`, or an option has a wrong value.

    Notes
    -----
    A parameter without a gradient (unused in the step) is recorded as zeros. With gradient accumulation under
    ``no_sync`` one step is recorded per synchronised backward pass, holding the accumulated sum.
    """

    def __init__(
        self,
        path: str | Path,
        model: torch.nn.Module,
        schedule: Schedule | int | Iterable[int] = 1,
        *,
        ranks: Iterable[int] | None = None,
        kinds: Sequence[Kind] | None = None,
        parameters: Sequence[str] | None = None,
        store: Store = "gradients",
        dtype: Literal["float32", "bfloat16"] = "float32",
        total_steps: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        buffers: int = 2,
        compress: bool = False,
        overwrite: bool = False,
        start_step: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if kinds is not None and (not kinds or set(kinds) - set(KINDS)):
            raise InputError(f"kinds must be some of {', '.join(KINDS)}, not {list(kinds)}")
        if store not in STORES:
            raise InputError(f"store must be {' or '.join(STORES)}, not {store}")
        if dtype not in ("float32", "bfloat16"):
            raise InputError(f"dtype must be float32 or bfloat16, not {dtype}")
        if buffers < 1:
            raise InputError(f"buffers must be at least 1, not {buffers}")
        self.path = Path(path)
        self.schedule = as_schedule(schedule)
        self._model = _unwrap(model)
        self._layers, self._slots = _layout(self._model, parameters)
        self._kinds: tuple[Kind, ...] | None = tuple(kinds) if kinds is not None else None
        self._store = store
        self._dtype = dtype
        self._buffers = buffers
        self._compress = compress
        self._total_steps = total_steps
        self._next = start_step
        self._current: Snapshot | None = None
        self._background: BackgroundWriter | None = None
        self._state: Any = None
        self._wrapped = False
        self._in_step = False
        self._waited = False
        self._closed = False
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(process_group) if distributed else 0
        world_size = dist.get_world_size(process_group) if distributed else 1
        self.active = ranks is None or self.rank in set(ranks)
        attributes = {
            "capture": {
                "schedule": self.schedule.description,
                "store": store,
                "dtype": dtype,
            },
            "versions": _versions(),
            **(metadata or {}),
        }
        _create_on_rank_zero(
            lambda: create_trace(
                self.path,
                self._layers,
                world_size=world_size,
                metadata=attributes,
                overwrite=overwrite,
            ),
            self.rank,
            process_group if distributed else None,
            distributed,
        )
        _at_exit(weakref.WeakMethod(self.close))

    def wrap(self, state: Any, hook: Hook) -> tuple["Capture", Hook]:
        """Wrap a DDP communication hook, so that what goes into it is captured.

        Use as ``ddp_model.register_comm_hook(*capture.wrap(state, hook))``. The inner hook runs unchanged.

        Parameters
        ----------
        state : object
            State of the inner hook; the process group or None for PyTorch's ``allreduce_hook``. It says what
            ``"corrected"`` is: see :class:`capture.states.ObservedState` for states of your own. For a state that keeps
            no memory, corrected equals gradient.
        hook : callable
            Any DDP communication hook.

        Returns
        -------
        tuple of (Capture, callable)
            State and hook to register.
        """
        self._state = state
        self._wrapped = True

        def capture_hook(
            capture: "Capture", bucket: GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            capture._before(bucket)
            return hook(state, bucket)

        return self, capture_hook

    def step(
        self,
        model: torch.nn.Module | None = None,
        *,
        loss: float | torch.Tensor | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """End a step: call once per iteration, after ``backward()`` and before gradients are zeroed.

        Without a wrapped hook it takes a snapshot of the model's gradients now. With one, it only adds the loss and
        the learning rate to what the hook saw; a step it is not called for is committed without them.

        Parameters
        ----------
        model : torch.nn.Module, optional
            Module with the same parameter names, if other than the one given at construction.
        loss : float or torch.Tensor, optional
            Loss to record with the step, if the step is captured.
        learning_rate : float, optional
            Learning rate to record with the step, if the step is captured.

        Raises
        ------
        InputError
            If `model` lacks a parameter of the trace.
        """
        if self._wrapped:
            if not self._in_step:  # a backward pass under no_sync: the step goes on
                return
        elif self._wanted():
            self._current = self._borrow()
            if self._current is not None:
                self._snapshot_model(self._current, model)
        self._commit(loss, learning_rate)

    def close(self) -> None:
        """Write what is queued and finish the trace. Calling it twice does no harm; the interpreter's exit calls it."""
        if self._closed:
            return
        if self._current is not None:
            self._commit()
        self._closed = True
        self.active = self.active and self._background is not None
        if self._background is not None:
            self._background.close()
            self._check()
        self.active = False

    def __enter__(self) -> "Capture":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wanted(self) -> bool:
        return self.active and self._next in self.schedule

    def _before(self, bucket: GradBucket) -> None:
        """Snapshot a bucket; the first one of an iteration begins a step."""
        if bucket.index() == 0:
            if self._in_step:  # step() was not called for the last one
                self._commit()
            self._in_step = True
            if self._wanted():
                self._current = self._borrow()
        if self._current is None:
            return
        arrays = self._current.arrays
        observed = observe(self._state, bucket)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            slot = self._slots.get(id(parameter))
            if slot is None:
                continue
            if "gradient" in arrays:
                _copy(gradient, arrays["gradient"][slot])
            if "corrected" in arrays:
                _copy(observed.corrected(parameter, gradient), arrays["corrected"][slot])

    def _snapshot_model(self, snapshot: Snapshot, model: torch.nn.Module | None) -> None:
        slots = self._slots if model is None else self._slots_of(model)
        for parameter in (self._model if model is None else model).parameters():
            slot = slots.get(id(parameter))
            if slot is None:
                continue
            for array in snapshot.arrays.values():
                if parameter.grad is None:
                    array[slot] = 0
                else:
                    _copy(parameter.grad, array[slot])

    def _slots_of(self, model: torch.nn.Module) -> dict[int, slice]:
        named = dict(_unwrap(model).named_parameters())
        try:
            return {id(named[layer.name]): layer.slice for layer in self._layers}
        except KeyError as error:
            raise InputError(
                f"the model has no parameter {error}; the trace was made for another model"
            ) from None

    def _borrow(self) -> Snapshot | None:
        if self._background is None:
            self._start()
        self._check()
        if self._background is None or not self.active:
            return None
        return self._background.borrow(self._on_wait)

    def _start(self) -> None:
        """Open this rank's writer, once the hook is known and with it the kinds to write."""
        if self._kinds is None:
            self._kinds = KINDS if observe(self._state).error_feedback else ("gradient",)
        expected = None if self._total_steps is None else self.schedule.count(self._total_steps)
        try:
            writer = TraceWriter(
                self.path,
                self.rank,
                kinds=self._kinds,
                store=self._store,
                dtype=self._dtype,
                expected_steps=expected,
                compress=self._compress,
                compression=records_steps(self._state),
            )
        except (GradstatsError, OSError) as error:
            self._stop(error)
            return
        self._background = BackgroundWriter(writer, self._kinds, self._buffers)

    def _commit(
        self, loss: float | torch.Tensor | None = None, learning_rate: float | None = None
    ) -> None:
        snapshot, self._current, self._in_step = self._current, None, False
        step, self._next = self._next, self._next + 1
        if snapshot is None or self._background is None:
            return
        scalars: dict[str, Any] = {}
        if loss is not None:
            scalars["loss"] = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if learning_rate is not None:
            scalars["learning_rate"] = float(learning_rate)
        scalars |= step_columns(observe(self._state), [layer.name for layer in self._layers])
        snapshot.step, snapshot.scalars = step, scalars
        self._background.submit(snapshot)

    def _on_wait(self) -> None:
        if not self._waited:
            self._waited = True
            _warn(f"{self.path}: the disk is slower than the training; training waits for it")

    def _check(self) -> None:
        if self.active and self._background is not None and self._background.error is not None:
            self._stop(self._background.error)

    def _stop(self, error: Exception) -> None:
        self.active = False
        _warn(f"capture stopped, training goes on: {error}")


def _warn(message: str) -> None:
    warnings.warn(message, CaptureWarning, stacklevel=2)


def _at_exit(close: "weakref.WeakMethod[Callable[[], None]]") -> None:
    """Call `close` at interpreter exit, if its object still lives.

    ``atexit`` is too late: zarr's thread pools are gone by then. They end in this earlier list, last in first
    out, which concurrent.futures uses too.
    """

    def finish() -> None:
        method = close()
        if method is not None:
            method()

    getattr(threading, "_register_atexit", atexit.register)(finish)


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]
    return model


def _layout(
    model: torch.nn.Module, patterns: Sequence[str] | None
) -> tuple[list[Layer], dict[int, slice]]:
    layers: list[Layer] = []
    slots: dict[int, slice] = {}
    offset = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if patterns is not None and not any(fnmatch.fnmatchcase(name, p) for p in patterns):
            continue
        layer = Layer(name, offset, tuple(parameter.shape))
        layers.append(layer)
        slots[id(parameter)] = layer.slice
        offset += layer.numel
    if not layers:
        names = ", ".join(name for name, _ in list(model.named_parameters())[:5])
        raise InputError(f"no trainable parameter to capture; the model has {names or 'none'}")
    return layers, slots


def _copy(gradient: torch.Tensor, place: NDArray[np.float32]) -> None:
    torch.from_numpy(place).copy_(gradient.detach().reshape(-1))


def _create_on_rank_zero(
    create: Callable[[], None],
    rank: int,
    process_group: dist.ProcessGroup | None,
    distributed: bool,
) -> None:
    """Create the trace once; raise its error on every rank, so that none waits for another."""
    problem: list[str | None] = [None]
    if rank == 0:
        try:
            create()
        except GradstatsError as error:
            problem = [str(error)]
    if distributed:
        dist.broadcast_object_list(problem, group=process_group, group_src=0)
    if problem[0] is not None:
        raise TraceError(problem[0])


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("gradstats", "torch", "numpy", "zarr")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
