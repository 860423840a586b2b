"""Exchanges beside the training: in a thread, and on a device in a stream of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Background", "Pending", "at_once", "streaming"]

T = TypeVar("T")


def streaming(device: torch.device) -> Any:
    """Return the module of a device's streams and events, None where it has none.

    Parameters
    ----------
    device : torch.device
        Any device.
    """
    return torch.get_device_module(device) if device.type in ("cuda", "xpu") else None


class Pending(Generic[T]):
    """An exchange under way. It keeps what the exchange reads until the result has been waited for.

    Parameters
    ----------
    future : Future
        What the thread will have done: the result, and what makes a stream wait for the work behind it.
    exchange : callable
        What the thread calls.
    """

    def __init__(
        self,
        future: Future[tuple[T | BaseException, Callable[[], None]]],
        exchange: Callable[[], T],
    ) -> None:
        self._future, self._exchange = future, exchange

    def result(self) -> T:
        """Return the result, or raise what the exchange raised; this thread's stream waits for it, not the host."""
        outcome, follow = self._future.result()
        follow()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def end(self) -> None:
        """Wait until it has ended, whatever it raised."""
        with suppress(BaseException):
            self.result()


class Background:
    """One thread in which exchanges run in order, while the caller goes on.

    On a device that has streams (CUDA, XPU) they run in a stream of their own. It begins an exchange when the caller's
    stream has done what was asked of it so far, and the caller's stream waits for it where the result is asked for.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}

    def __reduce__(self) -> tuple[type[Background], tuple[()]]:
        """Copy without the thread, which is of this process, as where a model is copied or saved with its hook."""
        return Background, ()

    def submit(self, exchange: Callable[[], T], device: torch.device) -> Pending[T]:
        """Have an exchange run.

        Parameters
        ----------
        exchange : callable
            What to run. No tensor that it reads may be overwritten before the result was asked for.
        device : torch.device
            Device of its tensors.

        Returns
        -------
        Pending
            What returns the result.
        """
        if self._thread is None:
            # one thread, so that collectives begin in the same order on every rank
            self._thread = ThreadPoolExecutor(1, "gradstats-exchange")
        module = streaming(device)
        # headers say there, too, where in the training the exchange takes place
        run = copy_context().run
        if module is None:
            return Pending(self._thread.submit(run, _caught, exchange, lambda: None), exchange)
        if device not in self._streams:
            self._streams[device] = module.Stream(device=device)
        stream, ready, done = self._streams[device], module.Event(), module.Event()
        # the exchange reads what the caller has asked the device for so far
        ready.record(module.current_stream(device))

        def there() -> tuple[T | BaseException, Callable[[], None]]:
            with module.stream(stream):
                stream.wait_event(ready)
                # the stream is asked for when the result is, in the caller's thread
                result = _caught(exchange, lambda: module.current_stream(device).wait_event(done))
                # reached after an error, too
                done.record(stream)
            return result

        # events order the two streams: submitting makes the host wait for neither
        return Pending(self._thread.submit(run, there), exchange)

    def shutdown(self, wait: bool = True) -> None:
        """End the thread.

        Parameters
        ----------
        wait : bool
            Whether to wait for what it has not done yet.
        """
        if self._thread is not None:
            self._thread.shutdown(wait=wait)
            self._thread = None


def at_once(exchange: Callable[[], T]) -> Pending[T]:
    """Run an exchange now, in this thread and its stream; what it raises is raised here.

    Parameters
    ----------
    exchange : callable
        What to run.
    """
    done: Future[tuple[T | BaseException, Callable[[], None]]] = Future()
    done.set_result((exchange(), lambda: None))
    return Pending(done, exchange)


def _caught(
    exchange: Callable[[], T], follow: Callable[[], None]
) -> tuple[T | BaseException, Callable[[], None]]:
    """Return what an exchange returns or raises: a stream has to wait for what it began, too, if it failed."""
    try:
        return exchange(), follow
    except BaseException as error:  # raised where the result is asked for
        return error, follow
