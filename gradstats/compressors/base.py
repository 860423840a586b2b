"""What a compressor is: from an accumulated gradient to what travels, and what comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["Selection", "Selector", "Reduced", "Compressor"]


@dataclass(frozen=True, slots=True)
class Selection:
    """A sparse message.

    Attributes
    ----------
    indices : int64 tensor (k̂,), ascending positions in the flat gradient.
    values : tensor (k̂,), the gradient's values there; or (1,), one value that stands for all of them.
    threshold : η the selection used, NaN for a compressor without one.
    """

    indices: torch.Tensor
    values: torch.Tensor
    threshold: float


class Selector(ABC):
    """Selects what to send from one rank's gradient (residual already added).

    Attributes
    ----------
    single_value : whether it sends one value that stands for all.
    """

    single_value: bool = False

    @abstractmethod
    def compress(self, gradient: torch.Tensor) -> Selection:
        """Return the elements of the flat `gradient` (d,) to send; `gradient` is left unchanged."""

    @abstractmethod
    def target(self, numel: int) -> int:
        """Return the number of elements it aims to send, k."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to continue bit-identically."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 — none to restore
        """Restore what :meth:`state_dict` returned."""


@dataclass(slots=True)
class Reduced:
    """What an exchange over the ranks came to.

    Attributes
    ----------
    flags : per rank, what it announced; if any is not zero, nothing else below counts.
    mean : float32 (d,), the update: the same bits on every rank. Clone it to keep it: it may be a buffer that the next
        step overwrites.
    residual : (d,), what this rank has not sent; it may be the corrected gradient itself, overwritten.
    sent : int64 (k̂,), positions this rank sent; None if it sent something of all.
    threshold : η on this rank; NaN without one.
    selected : elements this rank sent, k̂.
    union : positions at which any rank sent something.
    touched : int64 tensors, each of ascending positions, outside of which the mean is zero; None if it is dense.
    bytes_sent : bytes of this rank's messages, padding included.
    select_seconds : of this rank's wall clock.
    communicate_seconds : likewise, as long as nothing else went on.
    overlapped_seconds : of communication while the backward pass went on.
    """

    flags: list[int]
    mean: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    touched: list[torch.Tensor] | None = None
    threshold: float = float("nan")
    selected: int = 0
    union: int = 0
    bytes_sent: int = 0
    select_seconds: float = field(default=0.0)
    communicate_seconds: float = field(default=0.0)
    overlapped_seconds: float = field(default=0.0)


class Compressor(ABC):
    """Averages a flat gradient over the ranks, lossily. Every rank calls it the same number of times.

    Attributes
    ----------
    feedback : whether it is meant to be used with error feedback; unbiased and sign systems are not.
    """

    feedback: bool = True

    @abstractmethod
    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Exchange and average.

        Parameters
        ----------
        corrected : float32 (d,), gradient plus what memory added. May be overwritten unless a flag comes back.
        group : of the ranks; the default one if None.
        flag : a small integer that every rank is to learn, not zero if this rank's gradient must not be used
            (it is then not looked at).
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to continue bit-identically."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 — none to restore
        """Restore what :meth:`state_dict` returned."""
