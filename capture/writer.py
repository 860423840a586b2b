"""A background thread that writes snapshots, behind a bounded pool of buffers."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from capture.copies import Copies, Values
from capture.schedule import Retention
from gradstats.trace import Kind, TraceWriter

__all__ = ["PATIENCE_S", "BackgroundWriter", "Snapshot", "ThinningWriter"]

PATIENCE_S = 1.0
"""Seconds of waiting for the disk that are not worth a warning."""
_SHARE = 0.1
"""Share of a run's time spent on waiting that is not worth one either."""


@dataclass(slots=True)
class Snapshot:
    """One step on its way to the disk.

    Attributes
    ----------
    arrays : dict of str to float32 array or tensor
        Values by kind, in the order of the flat gradient; of a sharded one those that this rank holds.
    step : int
        Number of the step.
    scalars : mapping
        Keyword arguments of :meth:`gradstats.trace.TraceWriter.append`; a loss or a learning rate may be an array of
        one number, which is on its way too.
    arrived : callable or None
        What waits for values that are on their way from a device.
    """

    arrays: dict[Kind, Values]
    step: int = -1
    scalars: Mapping[str, Any] = field(default_factory=dict)
    arrived: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait until the values are there."""
        if self.arrived is not None:
            self.arrived()
            self.arrived = None


class ThinningWriter(TraceWriter):
    """A writer that removes the steps that are not kept, each when a newer one is committed.

    Parameters
    ----------
    *arguments : object
        Those of :class:`gradstats.trace.TraceWriter`.
    keep : Retention
        Steps that stay in the trace.
    **options : object
        Options of :class:`gradstats.trace.TraceWriter`.
    """

    def __init__(self, *arguments: Any, keep: Retention, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._keep = keep
        self._recent: deque[int] = deque()

    def append(self, step: int, arrays: Mapping[Kind, Any], **scalars: Any) -> None:
        """Write one step and commit it, then remove what is outdated.

        Parameters
        ----------
        step : int
            Step number.
        arrays : mapping of Kind to float32 array
            Gradients.
        **scalars : object
            What else :meth:`gradstats.trace.TraceWriter.append` takes.
        """
        # written first, removed then: a process killed in between leaves a step too many, never one too few
        super().append(step, arrays, **scalars)
        self._recent.append(step)
        # never empty: the step just written is newer than any limit. Each step is looked at once, when it becomes old
        while self._recent[0] <= step - self._keep.last:
            old = self._recent.popleft()
            if self._keep.outdated(old, step):
                self.remove(old)


class Effort:
    """Where the time of a thread goes: into work, waiting for a core, or waiting for the disk.

    It is a context around the work, entered in the thread itself.
    """

    def __init__(self) -> None:
        self._busy = self._wall = 0.0
        self._began = (0.0, 0.0)

    def __enter__(self) -> None:
        self._began = time.monotonic(), _on_a_core()

    def __exit__(self, *_: object) -> None:
        wall, busy = self._began
        self._wall += time.monotonic() - wall
        self._busy += _on_a_core() - busy

    @property
    def short_of_processor(self) -> bool:
        """Whether work and waiting for a core took most of the time."""
        # waiting for a core counts as work here, and the rest is waiting for the disk
        return self._wall > 0 and self._busy > 0.5 * self._wall


def _on_a_core() -> float:
    """Return the seconds that this thread has run, or could have run had a core been free (Linux alone knows those)."""
    try:
        file = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        with open(file, encoding="ascii") as stream:
            # time on a core and time in the queue for one, in nanoseconds; the third number counts time slices
            return sum(map(int, stream.read().split()[:2])) / 1e9
    except (OSError, ValueError):
        return time.thread_time()


class BackgroundWriter:
    """Write snapshots in order, on a thread of its own.

    Parameters
    ----------
    writer : TraceWriter
        Writer of one rank. Only the background thread uses it from now on.
    kinds : sequence of Kind
        Arrays that a snapshot holds.
    buffers : int
        Largest number of snapshots in use at once; :meth:`borrow` waits when all are.
    copies : Copies
        What gives the memory of the arrays.

    Attributes
    ----------
    error : Exception or None
        Failure that stopped the writing, None while all is well.
    """

    def __init__(
        self,
        writer: TraceWriter,
        kinds: Sequence[Kind],
        buffers: int,
        copies: Copies,
    ) -> None:
        self._writer, self._copies = writer, copies
        # SimpleQueues, for a finaliser puts something into them too, perhaps in the middle of another put()
        self._free: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        for _ in range(buffers):
            # Zeros, because a step writes nothing for parameters that it does not reach.
            self._free.put(Snapshot({k: copies.zeros(writer.size(k)) for k in kinds}))
        self._full: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        # An event, because a join that Ctrl-C interrupts takes the thread for ended (Python 3.11 and 3.12).
        self._done = threading.Event()
        self._given_up = False
        self._process = os.getpid()
        self.error: Exception | None = None
        self._started, self._waited = time.monotonic(), 0.0
        self._effort = Effort()
        # a daemon: a second Ctrl-C gives up what is queued, and the interpreter must be able to end
        self._thread = threading.Thread(target=self._run, name="gradstats-capture", daemon=True)
        self._thread.start()

    @property
    def short_of_processor(self) -> bool:
        """Whether writing waits for a core, rather than for the disk."""
        return self._effort.short_of_processor

    def borrow(self, on_wait: Callable[[], None]) -> Snapshot:
        """Return a free snapshot; if there is none, wait for the disk.

        Parameters
        ----------
        on_wait : callable
            Function called when training really waits: for longer than :data:`PATIENCE_S` now, or in all and for more
            than a tenth of the time. Short waits of a toy run, whose steps take less than a file, say nothing.

        Returns
        -------
        Snapshot
            Snapshot to fill, then to :meth:`submit` or to :meth:`give_back`.
        """
        try:
            return self._free.get_nowait()
        except queue.Empty:
            began = time.monotonic()
        try:
            # a limit, so that the warning comes while the training waits, and not after
            snapshot = self._free.get(timeout=PATIENCE_S)
        except queue.Empty:
            on_wait()
            snapshot = self._free.get()
        now = time.monotonic()
        self._waited += now - began
        if self._waited > max(PATIENCE_S, _SHARE * (now - self._started)):
            on_wait()
        return snapshot

    def submit(self, snapshot: Snapshot) -> None:
        """Queue a filled snapshot for writing.

        Parameters
        ----------
        snapshot : Snapshot
            One that :meth:`borrow` returned.
        """
        self._full.put(snapshot)

    def give_back(self, snapshot: Snapshot) -> None:
        """Return a borrowed snapshot that is not to be written.

        Parameters
        ----------
        snapshot : Snapshot
            One that :meth:`borrow` returned.
        """
        self._free.put(snapshot)

    def close(
        self, timeout: float | None = None, on_interrupt: Callable[[], None] | None = None
    ) -> bool:
        """Write everything queued, finish the trace, and end the thread.

        The first Ctrl-C while it waits takes effect when all is written, a second one at once.

        Parameters
        ----------
        timeout : float, optional
            Longest time to wait, in seconds. The thread goes on writing after it.
        on_interrupt : callable, optional
            Function called at the first Ctrl-C.

        Returns
        -------
        bool
            Whether the thread has ended.
        """
        # nobody waits again after a second Ctrl-C, not at interpreter exit either; nor for a thread of the parent's
        if self._given_up or os.getpid() != self._process:
            return False
        # the end of the queue: what came before is written first; a second one is never read
        self._full.put(None)
        if threading.current_thread() is self._thread:  # garbage is collected in any thread
            return False
        try:
            return self._done.wait(timeout)
        except KeyboardInterrupt:
            try:
                if on_interrupt is not None:
                    on_interrupt()
                # without the limit: only another Ctrl-C cuts this short
                self._done.wait()
            except BaseException:
                self._given_up = True
                raise
            raise

    def _run(self) -> None:
        try:
            while (snapshot := self._full.get()) is not None:
                # after a failure snapshots are handed back unwritten, or borrow() would wait for ever
                if self.error is None:
                    try:
                        # outside of the effort: this is waiting for the device
                        snapshot.wait()
                        with self._effort, self._copies.reading():
                            scalars = dict(snapshot.scalars)
                            # a number on a device comes as an array of one, which has arrived
                            for name in ("loss", "learning_rate"):
                                if not isinstance(value := scalars.get(name, 0.0), float):
                                    scalars[name] = float(value[0])
                            self._writer.append(snapshot.step, snapshot.arrays, **scalars)
                    except Exception as error:
                        self.error = error
                        _release(error)
                self._free.put(snapshot)
            # after a failure the trace stays as the last good step has left it
            if self.error is None:
                try:
                    self._writer.close()
                except Exception as error:
                    self.error = error
        finally:
            while not self._free.empty():  # pinned memory, or a device's
                self._free.get()
            self._done.set()


def _release(error: BaseException | None) -> None:
    """Take from an error, which is kept, the variables of the functions that it left: the step's arrays are there."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
