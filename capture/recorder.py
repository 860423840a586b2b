"""One step's life: whether it is recorded, where its gradients are copied, and when it goes to the writer."""

# Size: a third of its lines are docstrings, and a step's phases belong together.

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch

from capture.copies import Copies, Values
from capture.room import Room
from capture.schedule import Retention, Schedule
from capture.updates import Updates
from capture.writer import BackgroundWriter, Snapshot, ThinningWriter
from gradstats import errors
from gradstats.hooks import Scaler
from gradstats.hooks.step import loss_scale
from gradstats.hooks.torch_private import before_thread_pools_end
from gradstats.primitives.ratio import shown
from gradstats.trace import Dtype, Kind, Shard, Store, TraceWriter
from gradstats.trace.format import OF_PARAMETERS

__all__ = ["CaptureWarning", "Contents", "Phase", "Recorder", "Storage", "at_exit", "warn"]

_PATIENCE_S = 10.0
"""Longest that the collection of a capture that nobody closed waits for the disk."""


class CaptureWarning(UserWarning):
    """Capturing is slower than training, has stopped, or does not see what it should. The training goes on."""


class Phase(Enum):
    """How far the step in progress is."""

    IDLE = "idle"
    """No step has begun."""
    OPEN = "open"
    """Its gradients are being copied."""
    SENT = "sent"
    """All of them have been, and the training has sent them."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where and how a rank's steps are stored: options of the user's.

    Attributes
    ----------
    path : Path
        The trace.
    rank : int
        Rank of this process.
    store : Store
        Gradients or sketches.
    dtype : {"float32", "bfloat16"}
        Type of stored gradients.
    compress : bool
        Whether stored gradients are compressed.
    buffers : int
        Largest number of steps on their way to the disk.
    total_steps : int or None
        Length of the training, if it is known.
    keep : Retention or None
        Steps that stay in the trace; all if None.
    """

    path: Path
    rank: int
    store: Store
    dtype: Dtype
    compress: bool
    buffers: int
    total_steps: int | None
    keep: Retention | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """What a rank writes of every recorded step.

    Attributes
    ----------
    kinds : tuple of Kind
        Vectors of the step.
    devices : frozenset of torch.device
        Where gradients are.
    compression : bool
        Whether a hook's state reports what it did.
    shards : sequence of Shard or None
        What this rank holds of each parameter; None if all of it.
    shard_ranks : sequence of int
        Ranks whose shards are the whole gradient.
    """

    kinds: tuple[Kind, ...]
    devices: frozenset[torch.device]
    compression: bool = False
    shards: Sequence[Shard] | None = None
    shard_ranks: Sequence[int] = ()


# Size: one step's life, whose phases share a step's variables; a third of the lines are docstrings.
class Recorder:
    """Record steps: :meth:`begin`, :meth:`copy` what comes, :meth:`sent`, and :meth:`commit` or :meth:`drop`.

    It does not know where gradients come from; a tap (:mod:`capture.taps`) tells it.

    Parameters
    ----------
    storage : Storage
        Where and how to store.
    schedule : Schedule
        Steps to record.
    step : int
        Number of the first step.
    scaler : Scaler, optional
        Loss scaler of the training.
    active : bool
        Whether this rank records at all.

    Attributes
    ----------
    active : bool
        Whether anything is still recorded: False after a failed write, and once closed.
    copies : Copies
        What copies gradients; without devices until the first recorded step.
    phase : Phase
        How far the step in progress is.
    scale : float
        Loss scale of the last recorded step.
    scaler : Scaler or None
        Loss scaler of the training.
    storage : Storage
        Where and how to store.
    step : int
        Number of the next step.
    recorded : int
        Number of steps queued for writing.
    bytes : float
        What a recorded step of this rank takes on the disk; 0 where that is not known, as of sketches.
    room : Room or None
        What says how much the trace takes, on one of the ranks.
    updates : Updates or None
        What writes the kinds that optimizers leave, where they are captured.
    """

    def __init__(
        self,
        storage: Storage,
        schedule: Schedule,
        step: int,
        scaler: Scaler | None,
        active: bool,
    ) -> None:
        self.active = active
        self.copies = Copies()
        self.phase = Phase.IDLE
        self.scale = 1.0
        self.scaler = scaler
        self.storage = storage
        self._schedule = schedule
        self._step = step
        self.updates: Updates | None = None
        self.room: Room | None = None
        self.recorded, self.bytes = 0, 0.0
        self._snapshot: Snapshot | None = None
        self._arrays: dict[Kind, Values] = {}
        self._waiting: Snapshot | None = None  # for the optimizers' steps
        self._background: BackgroundWriter | None = None
        self._warnings: set[str] = set()
        _all.add(self)

    def leave(self) -> None:
        """Record nothing more, and close nothing: this is a copy in a forked process, such as a data loader's."""
        # nothing is open yet: this process may be the one that trains
        if self._background is None:
            return
        self.active = False
        # the thread that writes is the parent's, and so is the trace; to free pinned memory would ask a device of it
        _left.append((self._background, self._snapshot, self._waiting, self._arrays))
        self._forget()
        self._waiting = self._background = None

    @property
    def arrays(self) -> Mapping[Kind, Values]:
        """Where the gradients of the step in progress go, by kind; empty if none of it is recorded."""
        return self._arrays

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._step

    @property
    def records(self) -> bool:
        """Whether anything of the step in progress is recorded."""
        return self._snapshot is not None

    def wanted(self) -> bool:
        """Ask the schedule whether the next step is to be recorded: once a step, for it may be a user's function."""
        return self.active and self._step in self._schedule

    def begin(self, contents: Callable[[], Contents], wanted: bool) -> None:
        """Begin a step; wait for the disk if all buffers are on their way to it.

        Parameters
        ----------
        contents : callable
            Says what this rank writes; called before the first recorded step.
        wanted : bool
            What :meth:`wanted` has answered.
        """
        # taps end a step before they begin another: a second begin() would lose a borrowed snapshot
        assert self.phase is Phase.IDLE
        self.phase = Phase.OPEN
        # before updates.begin(), which forgets the copies that the waiting step still needs
        self.submit_waiting()
        # not before the first recorded step: a hook, and with it the kinds, may come after the constructor
        if wanted and self._background is None:
            self._open(contents())
        # the writer's thread cannot raise in the training; its failure is looked for here
        self._check()
        # _open() or _check() may have stopped the capture
        if wanted and self.active and self._background is not None:
            self._snapshot = self._background.borrow(self._on_wait)
            arrays = self._snapshot.arrays
            # the others are written by Updates, when the optimizers have stepped
            self._arrays = {kind: a for kind, a in arrays.items() if kind not in OF_PARAMETERS}
            # the scale that this backward pass carries: scaler.update() comes after it
            self.scale = loss_scale(self.scaler)
        # also where the step is not recorded: optimizers' steps are assigned to steps of the trace by their order
        if self.updates is not None:
            self.updates.begin(
                None if self._snapshot is None else self._snapshot.arrays, self.copies
            )

    def copy(
        self, kind: Kind, place: slice, gradient: torch.Tensor, scale: float | None = None
    ) -> None:
        """Copy a gradient, if the step is recorded and this kind is written.

        Parameters
        ----------
        kind : Kind
            What it is.
        place : slice
            Its place in the flat vector of this kind.
        gradient : torch.Tensor
            As :meth:`capture.copies.Copies.copy` takes it.
        scale : float, optional
            What it was multiplied by; the loss scale if None.
        """
        array = self.arrays.get(kind)
        if array is not None:
            self.copies.copy(gradient, array[place], self.scale if scale is None else scale)

    def put(
        self, kind: Kind, place: slice, parameter: torch.Tensor, scale: float | None = None
    ) -> None:
        """Copy what a parameter's ``.grad`` holds, or zeros, in the same way.

        Parameters
        ----------
        kind : Kind
            What it is.
        place : slice
            Its place in the flat vector of this kind.
        parameter : torch.Tensor
            The parameter.
        scale : float, optional
            What the gradient was multiplied by; the loss scale if None.
        """
        array = self.arrays.get(kind)
        if array is not None:
            self.copies.put(parameter, array[place], self.scale if scale is None else scale)

    def add(self, kind: Kind, place: slice, gradient: torch.Tensor) -> None:
        """Add a gradient to what was copied of the step, if it is recorded and this kind is written.

        Parameters
        ----------
        kind : Kind
            What it is.
        place : slice
            Its place in the flat vector of this kind.
        gradient : torch.Tensor
            As :meth:`capture.copies.Copies.copy` takes it, with the loss scale.
        """
        array: Any = self.arrays.get(kind)
        if array is not None:
            # the sum reads what is there: copies on their way must have come
            self._settle()
            # a vector of its own, because copy() overwrites
            values = self.copies.zeros(array[place].shape[0])
            self.copies.copy(gradient, values, self.scale, wait=True)
            array[place] += values

    def absent(self, place: slice, kinds: Collection[Kind] | None = None) -> None:
        """Mark what nobody has shown of the step: NaN stands there, not a number.

        Parameters
        ----------
        place : slice
            Its place in the flat vector.
        kinds : collection of Kind, optional
            Kinds in which it is missing; all if None.
        """
        self._fill(place, math.nan, kinds)

    def unused(self, place: slice, kinds: Collection[Kind] | None = None) -> None:
        """Write zeros for what the step did not use, though an older gradient is there.

        Parameters
        ----------
        place : slice
            Its place in the flat vector.
        kinds : collection of Kind, optional
            Kinds that it has a place in; all if None.
        """
        self._fill(place, 0.0, kinds)

    def _fill(self, place: slice, value: float, kinds: Collection[Kind] | None) -> None:
        self._settle()
        for kind, array in self.arrays.items():
            if kinds is None or kind in kinds:
                array[place] = value

    def _settle(self) -> None:
        """Wait for the copies of the step that are on their way: what is written now is not to be overwritten."""
        wait = self.copies.mark()
        if wait is not None:
            wait()

    def reopen(self) -> None:
        """Note that gradients are added to what the training has sent: it is to send them again."""
        if self.phase is Phase.SENT:
            self.phase = Phase.OPEN

    def sent(self) -> None:
        """Note that the training has sent the step's gradients."""
        self.phase = Phase.SENT

    def commit(
        self,
        loss: float | torch.Tensor | None = None,
        learning_rate: float | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """End the step, and queue it for writing if it is recorded.

        Parameters
        ----------
        loss : float or torch.Tensor, optional
            Loss of the step.
        learning_rate : float, optional
            Learning rate of the step.
        columns : mapping, optional
            What a hook's state reports of the step.
        """
        snapshot = self._snapshot
        if snapshot is not None:
            scalars = dict(columns or {})
            if "misplaced" not in self._warnings:  # else they may be of another step
                for name, value in (("loss", loss), ("learning_rate", learning_rate)):
                    if value is not None:
                        self._put_number(scalars, name, value)
            snapshot.scalars = scalars
            snapshot.step = self._step
            # after the scalars: a loss on a device is copied like a gradient, and has to have arrived, too
            snapshot.arrived = self.copies.mark()
        # also where nothing is recorded: numbers are those of the training
        self._step += 1
        self._forget()
        self._waiting = snapshot
        if self.updates is not None:
            self.updates.end()
        if self.updates is None or self.updates.complete:
            self.submit_waiting()

    def submit_waiting(self) -> None:
        """Queue the last step for writing, if it has waited for optimizers' steps: they have come, or will not."""
        snapshot, self._waiting = self._waiting, None
        if snapshot is None or self._background is None:
            return
        # finish() copies what no optimizer has changed: one more event to wait for
        if self.updates is not None:
            self.updates.finish()
            snapshot.arrived = _both(snapshot.arrived, self.copies.mark())
        self._background.submit(snapshot)
        self.recorded += 1

    def _forget(self) -> None:
        self._snapshot, self.phase = None, Phase.IDLE
        self._arrays = {}

    def _put_number(self, scalars: dict[str, Any], name: str, value: Any) -> None:
        """Record a number of the step; what is none is left out, with a warning."""
        try:
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise TypeError
            scalars[name] = self.copies.number(value)
        except (TypeError, ValueError):
            several = isinstance(value, torch.Tensor)
            what = f"a tensor of {value.numel()}" if several else shown(value)
            self.warn_once(
                name, f"capture.step({name}=…) takes one number, not {what}, and does not record it"
            )

    def drop(self) -> None:
        """Forget a step that failed; it does not count."""
        snapshot, opened = self._snapshot, self.phase is not Phase.IDLE
        self._forget()
        # in phase IDLE the copies in Updates are of the step that waits, and are needed
        if self.updates is not None and opened:
            self.updates.clear()
        if snapshot is not None and self._background is not None:
            # even though nobody reads it: the buffer is handed out again
            snapshot.arrived = self.copies.mark()
            snapshot.wait()  # what is still on its way would come into another step
            self._background.give_back(snapshot)

    def skip(self) -> None:
        """Count a step of which nothing is known."""
        self.drop()
        self._step += 1

    def misplaced(self) -> None:
        """Warn that the end of a step came without a gradient."""
        self.warn_once(
            "misplaced",
            "capture.step() found no gradient of a new backward pass, and records nothing: call it once per iteration, "
            "after backward() and before gradients are zeroed. Losses and learning rates are not recorded from here "
            "on, for they may be of other steps",
        )

    def warn_once(self, about: str, message: str) -> None:
        """Warn, unless there was a warning about the same before.

        Parameters
        ----------
        about : str
            What it is about.
        message : str
            The warning.
        """
        if about not in self._warnings:
            self._warnings.add(about)
            warn(message)

    def stop(self, error: Exception) -> None:
        """Record nothing more, and warn.

        Parameters
        ----------
        error : Exception
            The reason.
        """
        self.active = False
        if self._background is not None:
            self._background.close(0.0)  # gives its memory back
        warn(f"capture stopped, training goes on: {error}")

    def close(self) -> None:
        """Write what is queued, and finish the trace."""
        # it may wait for optimizers' steps that never come
        self.submit_waiting()
        if self.updates is not None:
            self.updates.close()
        if self._background is not None:
            self._background.close(on_interrupt=self._on_interrupt)
            # what failed while the rest was being written
            self._check()
        self.active = False

    def abandon(self) -> None:
        """Do the same without waiting long for a slow disk: garbage is collected in any place."""
        self.submit_waiting()
        if self.updates is not None:
            self.updates.close()
        background, path = self._background, self.storage.path
        if background is None:
            return
        if not background.close(_PATIENCE_S):
            # the thread is a daemon, which the interpreter would end in the middle of a step
            at_exit(lambda: background.close)
        # not active: stop() has told of it already
        elif background.error is not None and self.active:
            warn(f"{path} was not closed, and lacks its last steps: {background.error}")

    def _open(self, contents: Contents) -> None:
        """Open this rank's writer."""
        storage, expected = self.storage, None
        if storage.total_steps is not None:
            expected = self._captured_until(storage.total_steps)
        make: Callable[..., TraceWriter] = TraceWriter
        if storage.keep is not None:
            make = partial(ThinningWriter, keep=storage.keep)
        # whatever the disk or the options refuse ends the capture, not the training
        try:
            writer = make(
                storage.path,
                storage.rank,
                kinds=contents.kinds,
                store=storage.store,
                dtype=storage.dtype,
                expected_steps=expected,
                compress=storage.compress,
                compression=contents.compression,
                shards=contents.shards,
                shard_ranks=contents.shard_ranks,
            )
            if storage.store == "gradients":
                size = 4 if storage.dtype == "float32" else 2
                self.bytes = float(size * sum(map(writer.size, contents.kinds)))
            if self.room is not None and self.bytes:
                if storage.keep is not None:  # about: old steps that are kept are few
                    last = storage.keep.last
                    stay = self._captured_until(self._step + last) or last
                    expected = min(stay, expected or stay)
                problem = self.room.problem(storage.path, self.bytes, expected)
                if problem:
                    warn(problem)
            # sketches are made on the device, and bring only counts to the host
            self.copies = Copies(contents.devices, stay=storage.store == "sketches")
            self._background = BackgroundWriter(
                writer, contents.kinds, storage.buffers, self.copies
            )
        except Exception as error:
            self.stop(error)

    def _captured_until(self, end: int) -> int | None:
        """Return how many steps from this one on, which is captured, are to be; None if nobody can tell."""
        # a user's function is asked in the step itself, never ahead of it
        if not self._schedule.known:
            return None
        return max(1, self._schedule.count(end) - self._schedule.count(self._step))

    def _check(self) -> None:
        if self.active and self._background is not None and self._background.error is not None:
            self.stop(self._background.error)

    def _on_wait(self) -> None:
        slow = self._background is not None and self._background.short_of_processor
        self.warn_once(
            "wait",
            f"{self.storage.path}: {'writing, which has too little of a processor,' if slow else 'the disk'} is slower "
            "than the training, which waits for it: "
            f"{'leave a core free, ' if slow else ''}capture fewer steps, keep sketches (store='sketches'), or take "
            f"more memory (buffers={2 * self.storage.buffers})",
        )

    def _on_interrupt(self) -> None:
        warn(f"{self.storage.path}: writing what is queued; press Ctrl-C again to lose it")


_all: weakref.WeakSet[Recorder] = weakref.WeakSet()
_left: list[Any] = []
"""What this process has of its parent's captures, and never frees."""


def _leave() -> None:
    for recorder in list(_all):
        recorder.leave()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave)


def _both(
    first: Callable[[], None] | None, second: Callable[[], None] | None
) -> Callable[[], None] | None:
    """Return what waits for two things, either of which may be none."""
    if first is None or second is None:
        return first or second

    def wait() -> None:
        first()
        second()

    return wait


def warn(message: str) -> None:
    """Warn of something that a capture does not do as it should.

    Parameters
    ----------
    message : str
        The warning.
    """
    errors.warn(message, CaptureWarning)


def at_exit(close: Callable[[], Callable[[], object] | None]) -> None:
    """Call what `close` returns at interpreter exit, such as a method that is weakly held; nothing if that is None.

    Parameters
    ----------
    close : callable
        Returns what to call, or None.
    """

    def finish() -> None:
        # asked for now: what is weakly held may be gone
        method = close()
        if method is not None:
            method()

    with contextlib.suppress(RuntimeError):  # the interpreter exits already
        before_thread_pools_end(finish)
