"""What a rank remembers of past gradients and adds to the next: error feedback, momentum correction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from gradstats.errors import InputError

__all__ = ["ErrorFeedback", "Memory", "MomentumCorrection", "NoMemory"]


class Memory(ABC):
    """Adds to a gradient what past steps did not send.

    A step is :meth:`add` for every parameter, then :meth:`settle`; one that fails before that leaves the memory as it
    was.

    Attributes
    ----------
    corrected : float32 (d,), gradient plus memory, valid once every part was added. The exchange may overwrite it.
    """

    corrected: torch.Tensor
    kinds: ClassVar[tuple[str, ...]] = ()
    """Names of what :meth:`tensors` returns."""

    @abstractmethod
    def allocate(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Make room for a gradient of `numel` elements, and start from zero."""

    @abstractmethod
    def add(self, gradient: torch.Tensor, slot: slice) -> None:
        """Put gradient plus memory into a part of :attr:`corrected`.

        Parameters
        ----------
        gradient : (slot's length,).
        slot : its place in the flat gradient.
        """

    @abstractmethod
    def preview(self, gradient: torch.Tensor, slot: slice) -> torch.Tensor:
        """Return what :meth:`add` will write, the same bits, changing nothing."""

    @abstractmethod
    def settle(self, residual: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Keep what was not sent.

        Parameters
        ----------
        residual : (d,), of the corrected gradient; may be its buffer.
        sent : positions sent, None for all.
        """

    @property
    def residual(self) -> torch.Tensor | None:
        """What is added to the next gradient, (d,); None if it is not a mere sum."""
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors (d,) a checkpoint needs, by name."""
        return {}


class NoMemory(Memory):
    """What is not sent is lost."""

    def allocate(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Make room for a copy of the gradient."""
        self.corrected = torch.zeros(numel, dtype=dtype, device=device)

    def add(self, gradient: torch.Tensor, slot: slice) -> None:
        """Copy the gradient."""
        self.corrected[slot].copy_(gradient)

    def preview(self, gradient: torch.Tensor, slot: slice) -> torch.Tensor:
        """Return the gradient."""
        return gradient

    def settle(self, residual: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Forget it."""


class ErrorFeedback(Memory):
    """Add what was not sent to the next gradient (Seide et al. 2014)."""

    kinds = ("residual",)

    def allocate(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Start from a residual of zero."""
        self._residual = torch.zeros(numel, dtype=dtype, device=device)
        self.corrected = torch.zeros(numel, dtype=dtype, device=device)

    def add(self, gradient: torch.Tensor, slot: slice) -> None:
        """Write gradient + residual."""
        torch.add(gradient, self._residual[slot], out=self.corrected[slot])

    def preview(self, gradient: torch.Tensor, slot: slice) -> torch.Tensor:
        """Return gradient + residual."""
        return gradient + self._residual[slot]

    def settle(self, residual: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Make the rest of the corrected gradient the residual."""
        if residual is self.corrected:
            self._residual, self.corrected = self.corrected, self._residual
        else:
            self._residual.copy_(residual)

    @property
    def residual(self) -> torch.Tensor | None:
        """The residual."""
        return self._residual

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the residual."""
        return {"residual": self._residual}


class MomentumCorrection(Memory):
    """Accumulate velocities instead of gradients, and stop both where they were sent (DGC, Lin et al. 2018).

    u ← m u + g, v ← v + u (Nesterov: u ← m (u + g), v ← v + u + g); v is what is compressed. What is sent is zeroed in
    v, and with masking in u too. The optimizer of the training must be SGD without a momentum of its own.

    Parameters
    ----------
    momentum : m in [0, 1).
    nesterov : look ahead (RedSync, algorithm 4).
    masking : momentum factor masking.
    """

    kinds = ("velocity", "accumulated")

    def __init__(
        self, momentum: float = 0.9, *, nesterov: bool = False, masking: bool = True
    ) -> None:
        if not 0 <= momentum < 1:
            raise InputError(f"momentum must be in [0, 1), not {momentum}")
        self.momentum = momentum
        self.nesterov = nesterov
        self.masking = masking

    def allocate(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Start from velocities of zero."""
        self._velocity, self._next, self._accumulated, self.corrected = (
            torch.zeros(numel, dtype=dtype, device=device) for _ in range(4)
        )

    def add(self, gradient: torch.Tensor, slot: slice) -> None:
        """Write the accumulated velocity."""
        u, out = self._next[slot], self.corrected[slot]
        if self.nesterov:
            torch.add(self._velocity[slot], gradient, out=u).mul_(self.momentum)
        else:
            torch.add(gradient, self._velocity[slot], alpha=self.momentum, out=u)
        torch.add(self._accumulated[slot], u, out=out)
        if self.nesterov:
            out.add_(gradient)

    def preview(self, gradient: torch.Tensor, slot: slice) -> torch.Tensor:
        """Return what the accumulated velocity will be."""
        u, v = self._velocity[slot], self._accumulated[slot]
        if self.nesterov:
            return v + (u + gradient).mul_(self.momentum) + gradient
        return v + torch.add(gradient, u, alpha=self.momentum)

    def settle(self, residual: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Keep what was not sent of the velocity, and mask the momentum."""
        self._velocity, self._next = self._next, self._velocity
        if self.masking:
            if sent is None:
                self._velocity.zero_()
            else:
                self._velocity[sent] = 0
        if residual is self.corrected:
            self._accumulated, self.corrected = self.corrected, self._accumulated
        else:
            self._accumulated.copy_(residual)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return both accumulators."""
        return {"velocity": self._velocity, "accumulated": self._accumulated}
