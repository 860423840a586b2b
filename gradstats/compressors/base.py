"""What a compressor is: from an accumulated gradient to what travels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Compressed", "Compressor"]


@dataclass(frozen=True, slots=True)
class Compressed:
    """A sparse message.

    Attributes
    ----------
    indices : int64 tensor (k̂,), ascending positions in the flat gradient.
    values : tensor (k̂,), the gradient's values there.
    threshold : η the selection used, NaN for a compressor without one.
    """

    indices: torch.Tensor
    values: torch.Tensor
    threshold: float


class Compressor(ABC):
    """Selects what to send from one rank's gradient (residual already added)."""

    @abstractmethod
    def compress(self, gradient: torch.Tensor) -> Compressed:
        """Return the elements of the flat `gradient` (d,) to send; `gradient` is left unchanged."""

    @abstractmethod
    def target(self, numel: int) -> int:
        """Return the number of elements it aims to send, k."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to continue bit-identically."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 — none to restore
        """Restore what :meth:`state_dict` returned."""
