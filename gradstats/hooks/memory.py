"""Memories of past gradients that a rank adds to the next one, and error feedback, the plainest of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from gradstats.errors import InputError
from gradstats.primitives.ratio import check_number

__all__ = ["ErrorFeedback", "Memory", "NoMemory"]


class _Optional:
    """What a memory has only if it remembers something of densely averaged parameters."""

    def allocate_dense(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Make room for what is remembered of densely averaged parameters, and start from zero.

        Parameters
        ----------
        numel : int
            Number of elements of these parameters.
        device : torch.device
            Device of the gradient.
        dtype : torch.dtype
            Floating dtype of the memory.
        """

    def update_dense(self, mean: torch.Tensor, further: Sequence[slice] = ()) -> None:
        """Turn the mean gradient of densely averaged parameters into their update; :meth:`settle` makes it last.

        Parameters
        ----------
        mean : tensor, shape (dense_numel,)
            The mean over the ranks, the same bits on all of them. It is overwritten.
        further : sequence of slice
            Places, in order, of parameters of whose step an earlier exchange has taken a part.
        """

    def dense_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, shape (dense_numel,), that a checkpoint needs, by name.

        Returns
        -------
        dict of str to tensor
            One tensor for each of :attr:`dense_kinds`.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what else a restart needs: numbers that belong to no parameter."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class Memory(_Optional, ABC):
    """A rank's memory, which adds to a gradient what past steps did not send.

    A step is a call of :meth:`add` for every parameter, then one of :meth:`settle`; a step that fails before that
    leaves the memory as it was.

    Attributes
    ----------
    corrected : tensor, shape (d,)
        Gradient plus memory, valid once every part was added. The exchange may overwrite it.
    kinds : tuple of str
        Names of the tensors that :meth:`tensors` returns.
    dense_kinds : tuple of str
        Names of the tensors that :meth:`dense_tensors` returns.
    needs_residual : bool
        Whether it makes sense only with compressors that leave over what they have not sent.
    masking : bool
        Whether :meth:`settle` reads the positions that were sent.
    """

    corrected: torch.Tensor
    kinds: ClassVar[tuple[str, ...]] = ()
    dense_kinds: ClassVar[tuple[str, ...]] = ()
    needs_residual: ClassVar[bool] = True
    masking: bool = False

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

    def add(self, gradient: torch.Tensor, slot: slice, further: bool = False) -> None:
        """Put gradient plus memory into a part of :attr:`corrected`.

        Parameters
        ----------
        gradient : tensor, shape (n,)
            The gradient of one parameter, flat.
        slot : slice
            The parameter's place in the flat gradient, n elements long.
        further : bool
            Whether an earlier exchange has taken a part of the same step's gradient, so that a momentum has decayed.
        """
        # passed only where it is true: a memory of one's own may not take it
        if further:
            self.preview(gradient, slot, self.corrected[slot], further=True)
        else:
            self.preview(gradient, slot, self.corrected[slot])

    @abstractmethod
    def preview(
        self,
        gradient: torch.Tensor,
        slot: slice,
        out: torch.Tensor | None = None,
        further: bool = False,
    ) -> torch.Tensor:
        """Return the same bits that :meth:`add` will write, and change nothing else.

        Parameters
        ----------
        gradient : tensor, shape (n,)
            The gradient of one parameter, flat.
        slot : slice
            The parameter's place in the flat gradient, n elements long.
        out : tensor, shape (n,), optional
            Where to write them, of the memory's dtype.
        further : bool
            Whether an earlier exchange has taken a part of the same step's gradient.

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
            Positions that this rank sent, without those of layers that send all elements; None for all.
        """

    def discard(self) -> None:
        """Go back to what it was before the last :meth:`settle`; called once at most, and before the next :meth:`add`.

        The memories of this package need no copy for it: a step computes into the buffers that the last but one left.

        Raises
        ------
        InputError
            If a memory of your own does not say how.
        """
        raise InputError(f"{type(self).__name__} cannot take a step back: give it a discard()")

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

    needs_residual = False

    def allocate(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Make room for a copy of the gradient."""
        # compressors take one vector, which they may overwrite: not DDP's buckets
        self.corrected = torch.zeros(numel, dtype=dtype, device=device)

    def preview(
        self,
        gradient: torch.Tensor,
        slot: slice,
        out: torch.Tensor | None = None,
        further: bool = False,
    ) -> torch.Tensor:
        """Return the gradient itself, or a copy where one is asked for."""
        # no copy for who only looks
        return gradient if out is None else out.copy_(gradient)

    def settle(self, residual: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Forget what was not sent."""

    def discard(self) -> None:
        """There is nothing to take back."""


class ErrorFeedback(Memory):
    """Error feedback: what was not sent is added to the next gradient.

    Parameters
    ----------
    decay : float
        What the residual is multiplied by before it is added, in (0, 1]. Below 1 it forgets.

    Raises
    ------
    InputError
        If the decay is outside (0, 1].

    Notes
    -----
    Source: Seide et al. 2014; with decay SparseLoCo (Sarfi et al. 2025), where it stands in for an outer momentum.
    """

    kinds = ("residual",)

    def __init__(self, decay: float = 1.0) -> None:
        self.decay = check_number(decay, "decay", 0, 1, "(]")

    def allocate(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Start from a residual of zero."""
        self._residual = torch.zeros(numel, dtype=dtype, device=device)
        self.corrected = torch.zeros(numel, dtype=dtype, device=device)

    def preview(
        self,
        gradient: torch.Tensor,
        slot: slice,
        out: torch.Tensor | None = None,
        further: bool = False,
    ) -> torch.Tensor:
        """Return gradient + decay · residual; a step decays it once."""
        if self.decay == 1 or further:
            # dtypes promote to the memory's, so that the bits do not depend on `out`
            return torch.add(gradient, self._residual[slot], out=out)
        return torch.mul(self._residual[slot], self.decay, out=out).add_(gradient)

    def settle(self, residual: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Keep what was not sent of the corrected gradient as the residual."""
        # compressors that leave the residual in place save this copy
        if residual is not self.corrected:
            self.corrected.copy_(residual)
        # the residual before this step stays in the other buffer until the next one writes there
        self._residual, self.corrected = self.corrected, self._residual

    def discard(self) -> None:
        """Take the residual of before the last step again."""
        self._residual, self.corrected = self.corrected, self._residual

    @property
    def residual(self) -> torch.Tensor | None:
        """The residual, shape (d,); None with a decay."""
        return self._residual if self.decay == 1 else None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the residual."""
        return {"residual": self._residual}
