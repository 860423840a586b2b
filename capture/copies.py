"""Copies of gradients, for which training does not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gradstats.collectives.background import streaming
from gradstats.hooks.gradient import dense, real_view
from gradstats.hooks.units import local_part

__all__ = ["Copies", "Values"]

Values: TypeAlias = NDArray[np.float32] | torch.Tensor
"""Memory of the host, or of a device."""


class Copies:
    """Copy gradients to the host while the device that computes them goes on.

    A gradient on such a device (CUDA, XPU) is first cloned there, in the order of the training, which may then
    overwrite it; a second stream moves the clone to pinned memory. Neither the host nor the training waits for that.
    What :meth:`mark` returns does: whoever reads the copies calls it first. Gradients in the host's memory are copied
    at once.

    Parameters
    ----------
    devices : iterable of torch.device
        Where gradients are.
    stay : bool
        Whether they stay on their device, if it is one alone, because little of them will be read.
    """

    def __init__(self, devices: Iterable[torch.device] = (), *, stay: bool = False) -> None:
        self._streams: dict[torch.device, Any] = {}
        for device in set(devices):
            module = streaming(device)
            if module is not None:
                self._streams[device] = module.Stream(device=device)
        self._used: set[torch.device] = set()
        # one vector holds all parameters: on several devices there is no place for it but the host
        self._home = next(iter(self._streams)) if stay and len(self._streams) == 1 else None

    def zeros(self, size: int) -> Values:
        """Return memory to copy to: pinned where copies go on by themselves, or on the device.

        Parameters
        ----------
        size : int
            Number of elements.
        """
        if self._home is not None:
            return torch.zeros(size, dtype=torch.float32, device=self._home)
        if not self._streams:
            return np.zeros(size, np.float32)
        # shares the pinned memory, and keeps it
        pinned: NDArray[np.float32] = _pinned(size).numpy()
        return pinned

    def copy(
        self,
        gradient: torch.Tensor,
        place: Values,
        scale: float = 1.0,
        *,
        wait: bool = False,
    ) -> None:
        """Store a gradient in logical order, without its loss scale.

        Parameters
        ----------
        gradient : torch.Tensor
            Dense or sparse, real or complex, on any device.
        place : float32 array
            Written: as many elements, of what :meth:`zeros` returned.
        scale : float
            What the loss was multiplied by.
        wait : bool
            Return when it is there.
        """
        # view_as_real() refuses a tensor whose conjugation is still to be done
        values = real_view(dense(gradient.detach()).resolve_conj())
        # in logical order whatever the strides; a copy only where they need one
        values = values.reshape(-1)
        if scale != 1:
            # widened first: float16 divided by a large scale loses its small
            # elements. 1 / scale is exact for powers of two
            values = values.to(torch.promote_types(values.dtype, torch.float32)) * (1 / scale)
        if isinstance(place, torch.Tensor):  # on the device, in the order of the training
            place.copy_(values)
            return
        target = torch.from_numpy(place)
        # a device without a stream here is the CPU, or one that no parameter was on when the capture was opened
        stream = None if wait else self._streams.get(values.device)
        # the plain copy_() is on the current stream, and returns when the values are there
        if stream is None:
            target.copy_(values)
            return
        # without a clone the training could overwrite the gradient before it is copied; a scaled one is a copy already.
        # Of another type it is converted here: PyTorch would do that on the host, which would wait for the values
        module, held = streaming(values.device), values.to(torch.float32, copy=scale == 1)
        # the clone is made on the training's stream, and must not be read before
        stream.wait_stream(module.current_stream(values.device))
        with module.stream(stream):
            target.copy_(held, non_blocking=True)
        held.record_stream(stream)  # its memory is not used again before
        self._used.add(values.device)

    def put(self, parameter: torch.Tensor, place: Values, scale: float) -> None:
        """Store what this rank has of a parameter's gradient, or zeros.

        Parameters
        ----------
        parameter : torch.Tensor
            Parameter, of which only the gradient is read.
        place : float32 array
            Written.
        scale : float
            What the loss was multiplied by.
        """
        # no backward pass has reached it
        if parameter.grad is None:
            place[...] = 0
        # a rank may hold no row of a sharded parameter
        elif place.shape[0]:
            self.copy(local_part(parameter.grad), place, scale)

    def number(self, value: float | torch.Tensor) -> float | Values:
        """Return a number, or, of one on a device, an array in which it will be.

        Parameters
        ----------
        value : float or torch.Tensor
            Such as a loss; a tensor has one element.
        """
        if not isinstance(value, torch.Tensor):
            return float(value)
        # float() refuses a tensor of several elements, on any device
        if value.device not in self._streams or value.numel() != 1:
            return float(value.detach())
        # as a gradient is copied: float() would make the host wait for the device
        place = self.zeros(1)
        self.copy(value, place)
        return place

    def mark(self) -> Callable[[], None] | None:
        """Return what waits for the copies so far, in any thread; None where there is nothing to wait for."""
        # devices without a copy since the last mark have nothing to wait for
        events = [(device, self._streams[device]) for device in self._used]
        self._used.clear()
        # copies that stay on the device are on the training's own stream
        if self._home is not None:
            events = [(self._home, streaming(self._home).current_stream(self._home))]
        if not events:
            return None
        # events, not streams: to wait for a stream would be to wait for the copies of later steps, too
        marks = [(streaming(device).Event(), stream) for device, stream in events]
        for event, stream in marks:
            event.record(stream)

        def wait() -> None:
            for event, _ in marks:
                event.synchronize()

        return wait

    def reading(self) -> AbstractContextManager[Any]:
        """Return a context in which what stays on its device is read, on a stream that training does not wait for."""
        if self._home is None:
            return nullcontext()
        context: AbstractContextManager[Any] = streaming(self._home).stream(
            self._streams[self._home]
        )
        return context


def _pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float32, pin_memory=True)
