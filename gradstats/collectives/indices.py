"""A ragged all-gather of positions alone, with one number a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradstats.collectives.packed import Ragged, index_dtype

__all__ = ["GatheredIndices", "IndexAllGather"]

_HEADER = 3


@dataclass(frozen=True, slots=True)
class GatheredIndices:
    """What every rank sent.

    Attributes
    ----------
    indices : per rank, int64 tensor (k̂_r,).
    numbers : per rank, the float32 number it attached.
    flags : per rank, the integer it attached.
    bytes_sent : bytes of this rank's own messages, padding included.
    """

    indices: list[torch.Tensor]
    numbers: list[float]
    flags: list[int]
    bytes_sent: int


class IndexAllGather(Ragged):
    """All-gather of positions of different number on every rank, with one number and one flag each.

    Each message is `[count, flag, number | indices]` in 32-bit words. As in
    :class:`gradstats.collectives.SparseAllGather` it is padded to a capacity derived from the counts that all ranks
    have seen; what does not fit travels in a second one.

    Parameters are those of :class:`gradstats.collectives.packed.Ragged`.
    """

    def __call__(
        self, indices: torch.Tensor, numel: int, number: float = 0.0, flag: int = 0
    ) -> GatheredIndices:
        """Exchange this rank's positions for everybody's.

        Parameters
        ----------
        indices : int64 (k̂,); may be empty.
        numel : elements of the dense gradient; decides the width of an index (32 bits below 2³¹).
        number : a float32 every rank learns from every other.
        flag : likewise a small integer.
        """
        dtype = index_dtype(numel)
        words = dtype.itemsize // torch.int32.itemsize
        packed = indices.to(dtype).contiguous().view(torch.int32)
        capacity = self.capacity
        header = torch.tensor([indices.numel(), flag, 0], dtype=torch.int32)
        header[2:].view(torch.float32)[0] = number
        parts = [
            self._gather(
                torch.cat([header.to(indices.device), packed[: capacity * words]]),
                _HEADER + capacity * words,
            )
        ]
        headers = parts[0][:, :_HEADER].cpu()
        counts = headers[:, 0].tolist()
        rest = max(counts) - capacity
        if rest > 0:
            parts.append(self._gather(packed[capacity * words :], rest * words))
        sent_bytes = sum(part.shape[1] * part.element_size() for part in parts)
        flags = headers[:, 1].tolist()
        self._adapt(max(counts), flags)
        bodies = torch.cat([parts[0][:, _HEADER:], *parts[1:]], dim=1)
        # clone: the index words may start at an odd offset that an int64 view would refuse
        gathered = [bodies[r, : n * words].clone().view(dtype).long() for r, n in enumerate(counts)]
        return GatheredIndices(
            indices=gathered,
            numbers=headers[:, 2].contiguous().view(torch.float32).tolist(),
            flags=flags,
            bytes_sent=sent_bytes,
        )

    def _gather(self, sent: torch.Tensor, length: int) -> torch.Tensor:
        """All-gather one message, padded to `length` words; return int32 (world, length)."""
        message = torch.zeros(length, dtype=torch.int32, device=sent.device)
        message[: sent.numel()] = sent
        return self._exchange(message)
