"""A background thread that writes snapshots, behind a bounded pool of buffers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.trace import Kind, TraceWriter

__all__ = ["BackgroundWriter", "Snapshot"]


@dataclass(slots=True)
class Snapshot:
    """One step on its way to the disk.

    Attributes
    ----------
    arrays : dict of str to float32 array, shape (d,)
        Values by kind, in the order of the flat gradient.
    step : int
        Number of the step.
    scalars : mapping
        Keyword arguments of :meth:`gradstats.trace.TraceWriter.append`.
    """

    arrays: dict[Kind, NDArray[np.float32]]
    step: int = -1
    scalars: Mapping[str, Any] = field(default_factory=dict)


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

    Attributes
    ----------
    error : Exception or None
        Failure that stopped the writing, None while all is well.
    """

    def __init__(self, writer: TraceWriter, kinds: Sequence[Kind], buffers: int) -> None:
        self._writer = writer
        self._free: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        for _ in range(buffers):
            # Zeros, because a step writes nothing for parameters that it does not reach.
            self._free.put(Snapshot({k: np.zeros(writer.numel, np.float32) for k in kinds}))
        self._full: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        # An event, because a join that Ctrl-C interrupts takes the thread for ended (Python 3.11 and 3.12).
        self._done = threading.Event()
        self._given_up = False
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="gradstats-capture", daemon=True)
        self._thread.start()

    def borrow(self, on_wait: Callable[[], None]) -> Snapshot:
        """Return a free snapshot; if there is none, wait for the disk.

        Parameters
        ----------
        on_wait : callable
            Function called before waiting.

        Returns
        -------
        Snapshot
            Snapshot to fill, then to :meth:`submit` or to :meth:`give_back`.
        """
        try:
            return self._free.get_nowait()
        except queue.Empty:
            on_wait()
            return self._free.get()

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
        if self._given_up:
            return False
        self._full.put(None)
        if threading.current_thread() is self._thread:  # garbage is collected in any thread
            return False
        try:
            return self._done.wait(timeout)
        except KeyboardInterrupt:
            try:
                if on_interrupt is not None:
                    on_interrupt()
                self._done.wait()
            except BaseException:
                self._given_up = True
                raise
            raise

    def _run(self) -> None:
        try:
            while (snapshot := self._full.get()) is not None:
                if self.error is None:
                    try:
                        self._writer.append(snapshot.step, snapshot.arrays, **snapshot.scalars)
                    except Exception as error:
                        self.error = error
                self._free.put(snapshot)
            if self.error is None:
                try:
                    self._writer.close()
                except Exception as error:
                    self.error = error
        finally:
            self._done.set()
