"""Memories of past gradients that a rank adds to the next one: error feedback and momentum correction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from gradstats.errors import InputError

__all__ = ["ErrorFeedback", "Memory", "MomentumCorrection", "NoMemory"]


class Memory(ABC):
    """A rank's memory, which adds to a gradient what past steps did not send.

    A step is a call of :meth:`add` for every parameter, then one of :meth:`settle`; a step that fails before that
    leaves the memory as it was.

    Attributes
    ----------
    corrected : tensor, shape (d,)
        Gradient plus memory, valid once every part was added. The exchange may overwrite it.
    kinds : tuple of str
        Names of the tensors that :meth:`tensors` returns.
    """

    corrected: torch.Tensor
    kinds: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def allocate(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Make room for a gradient, and start from zero.

        Parameters
        ----------
        numel : int
            Number of elements d of the flat gradient.
        device : torch.device
            Device of the gradient.
        dtype : torch.dtype
            Floating dtype of the memory.
        """

    @abstractmethod
    def add(self, gradient: torch.Tensor, slot: slice) -> None:
        """Put gradient plus memory into a part of :attr:`corrected`.

        Parameters
        ----------
        gradient : tensor, shape (n,)
            The gradient of one parameter, flat.
        slot : slice
            The parameter's place in the flat gradient, n elements long.
        """

    @abstractmethod
    def preview(self, gradient: torch.Tensor, slot: slice) -> torch.Tensor:
        """Return the same bits that :meth:`add` will write, and change nothing.

        Parameters
        ----------
        gradient : tensor, shape (n,)
            The gradient of one parameter, flat.
        slot : slice
            The parameter's place in the flat gradient, n elements long.

        Returns
        -------
        tensor, shape (n,)
            Gradient plus memory.
        """

    @abstractmethod
    def settle(self, residual: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Keep what was not sent.

        Parameters
        ----------
        residual : tensor, shape (d,)
            What this rank has not sent of the corrected gradient; it may be the buffer :attr:`corrected` itself.
        sent : int64 tensor, shape (k̂,), or None
            Positions that this rank sent; None for all.
        """

    @property
    def residual(self) -> torch.Tensor | None:
        """The tensor, shape (d,), that is added to the next gradient; None if more than a sum is done."""
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, shape (d,), that a checkpoint needs, by name.

        Returns
        -------
        dict of str to tensor
            One tensor for each of :attr:`kinds`.
        """
        return {}


class NoMemory(Memory):
    """No memory: what is not sent is lost."""

    def allocate(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Make room for a copy of the gradient."""
        self.corrected = torch.zeros(numel, dtype=dtype, device=device)

    def add(self, gradient: torch.Tensor, slot: slice) -> None:
        """Copy the gradient into :attr:`corrected`."""
        self.corrected[slot].copy_(gradient)

    def preview(self, gradient: torch.Tensor, slot: slice) -> torch.Tensor:
        """Return the gradient itself."""
        return gradient

    def settle(self, residual: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Forget what was not sent."""


class ErrorFeedback(Memory):
    """Error feedback: what was not sent is added to the next gradient.

    Notes
    -----
    Source: Seide et al. 2014.
    """

    kinds = ("residual",)

    def allocate(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Start from a residual of zero."""
        self._residual = torch.zeros(numel, dtype=dtype, device=device)
        self.corrected = torch.zeros(numel, dtype=dtype, device=device)

    def add(self, gradient: torch.Tensor, slot: slice) -> None:
        """Write gradient + residual into :attr:`corrected`."""
        torch.add(gradient, self._residual[slot], out=self.corrected[slot])

    def preview(self, gradient: torch.Tensor, slot: slice) -> torch.Tensor:
        """Return gradient + residual."""
        return gradient + self._residual[slot]

    def settle(self, residual: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Keep what was not sent of the corrected gradient as the residual."""
        if residual is self.corrected:
            self._residual, self.corrected = self.corrected, self._residual
        else:
            self._residual.copy_(residual)

    @property
    def residual(self) -> torch.Tensor | None:
        """The residual, shape (d,)."""
        return self._residual

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the residual."""
        return {"residual": self._residual}


class MomentumCorrection(Memory):
    """Momentum correction: velocities accumulate instead of gradients, and stop where they were sent.

    With momentum m, u ← m u + g and v ← v + u (Nesterov: u ← m (u + g) and v ← v + u + g); v is compressed. What is
    sent is zeroed in v, and with masking in u too. The optimizer must be SGD without a momentum of its own.

    Parameters
    ----------
    momentum : float
        Momentum m, in [0, 1).
    nesterov : bool
        Whether to use Nesterov's momentum.
    masking : bool
        Whether to mask the momentum: to zero the velocity where something was sent.

    Raises
    ------
    InputError
        If the momentum is outside [0, 1).

    Notes
    -----
    Source: DGC (Lin et al. 2018), momentum correction and momentum factor masking; RedSync (Fang et al. 2018),
    algorithm 4, for Nesterov's momentum.

    Differs from RedSync's algorithm 4, whose momentum leaves weight decay out of g, and whose line 22 zeroes v
    wherever a mean was sent: here v keeps what the mean did not carry.
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
        """Write the accumulated velocity into :attr:`corrected`."""
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
        # where all was sent, as in a dense step, nothing is stale: this is momentum SGD
        if self.masking and sent is not None:
            self._velocity[sent] = 0
        if residual is self.corrected:
            self._accumulated, self.corrected = self.corrected, self._accumulated
        else:
            self._accumulated.copy_(residual)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the velocity and what has accumulated of it."""
        return {"velocity": self._velocity, "accumulated": self._accumulated}
