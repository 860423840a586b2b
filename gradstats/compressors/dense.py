"""The dense average, without compression: for warm-up steps, small parameters and comparison."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from gradstats.collectives.codec import CHUNK, SCALED, Codec, as_codec
from gradstats.collectives.header import check_bodies, checksum
from gradstats.collectives.plain import (
    all_gather_checked,
    all_gather_flags,
    all_reduce,
    all_to_all,
)
from gradstats.compressors.base import Compressor, Reduced
from gradstats.compressors.cost import FLAG, FULL, WORD, Exchange, Load, Work, coding, dense
from gradstats.primitives.blocks import map_blocks

__all__ = ["DenseCompressor"]

_HALF = 2
"""Bytes of a bfloat16."""


class DenseCompressor(Compressor):
    """All-reduce of the whole gradient: nothing is compressed, and only what rounding takes off is left over.

    Parameters
    ----------
    dtype : torch.dtype, optional
        Type that values are rounded to, such as ``torch.bfloat16`` or ``torch.float8_e4m3fn``; that of the gradient if
        None.

    Raises
    ------
    InputError
        If values cannot travel as this type.

    Notes
    -----
    Source: for bfloat16, ``bf16_compress_hook`` of PyTorch. Differs from it: what rounding takes off a rank's gradient
    is its residual, and the sum is divided by the number of ranks, not the summands. What rounding takes off the sums
    on their way is lost, as in PyTorch.

    8-bit floats are no type to add in. Every rank adds up one part of the gradient, in float32, from the ranks'
    messages, and sends its mean rounded once more (as DoubleSqueeze does, Tang et al. 2019; scales as
    :class:`gradstats.collectives.Codec` has them). What that rounding takes off stays with the rank: nothing
    is lost but the last bits of sums in float32.
    """

    has_ratio = False
    variants: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {
        "none": None,
        "dense-bf16": {"dtype": torch.bfloat16},
        "dense-fp8": {"dtype": torch.float8_e4m3fn},
    }

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._codec = None if dtype is None else as_codec(dtype)
        # of the last step: new pages take as long as writing to them
        self._message = self._mean = torch.empty(0)

    def warm_up(self) -> None:
        """Compile what rounds to bfloat16; there are no other loops."""
        if self._codec is not None:
            values = torch.zeros(1)
            if _in_loops(values, self._codec):
                self._mean_by_loop(self._rounded_by_loop(values), 1)

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return an all-reduce; of 8-bit floats, two all-to-alls of parts. DDP's own average has no flags."""
        rounded = {"dense-bf16": _bfloat16, "dense-fp8": _eight_bits}
        if load.name in rounded:
            return rounded[load.name](load)
        if load.name == "none":
            size = FULL * load.numel
            return load.exchange(load.numel, size, communicate=(Work("all_reduce", size),))
        return dense(load)

    def target(self, numel: int, layer: str | None = None) -> int:
        """Return the number of elements, as all of them are sent."""
        return numel

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Average all elements; the residual is zero, or what rounding took off."""
        started = time.perf_counter()
        flags = all_gather_flags(flag, group, corrected.device)
        if any(flags):
            return Reduced(flags)
        flagged = time.perf_counter()
        # not before the flags are known: rounding changes the gradient, a refused step must not
        if self._codec is not None and self._codec.values in SCALED:
            messages, size = _in_parts(corrected, self._codec, dist.get_world_size(group))
            rounded = time.perf_counter()
            # `corrected` is the residual by now
            mean, bytes_sent = _mean_of_parts(corrected, messages, size, self._codec, group)
        else:
            in_loops = self._codec is not None and _in_loops(corrected, self._codec)
            sent = self._rounded_by_loop(corrected) if in_loops else self._rounded(corrected)
            rounded = time.perf_counter()
            all_reduce(sent, group)
            world = dist.get_world_size(group)
            mean = (
                self._mean_by_loop(sent, world)
                if in_loops
                # divided in the wider type, or the mean would be rounded once more
                else sent.to(corrected.dtype).div_(world)
            )
            bytes_sent = corrected.numel() * sent.element_size()
        numel = corrected.numel()
        return Reduced(
            flags=flags,
            mean=mean,
            residual=corrected,
            selected=numel,
            union=numel,
            bytes_sent=bytes_sent,
            select_seconds=rounded - flagged,
            communicate_seconds=time.perf_counter() - rounded + flagged - started,
        )

    def _rounded(self, corrected: torch.Tensor) -> torch.Tensor:
        """Return values as they travel, and leave what rounding took off."""
        sent = corrected if self._codec is None else self._codec.rounded(corrected)
        if sent is corrected:  # of the type that travels
            # the sum is written where the summand lies, and nothing was rounded off
            sent = corrected.clone()
            corrected.zero_()
        else:
            # exact, but for values beyond the range of the type, which became its largest number
            corrected -= sent
        return sent

    def _rounded_by_loop(self, corrected: torch.Tensor) -> torch.Tensor:
        """Return values in bfloat16, and leave what rounding took off: the same bits, in one pass instead of three."""
        from gradstats.primitives.loops.copies import round_to_bfloat16

        if self._message.numel() != corrected.numel():
            self._message = torch.empty_like(corrected, dtype=torch.bfloat16)
            self._mean = torch.empty_like(corrected)
        # NumPy has no bfloat16: the same memory as whole numbers
        bits = self._message.view(torch.int16).numpy().view(np.uint16)
        # blocks are views (see _in_loops), so the loop leaves in the gradient what it takes off
        map_blocks(
            lambda start, block: round_to_bfloat16(block, bits[start : start + block.size]),
            corrected,
        )
        return self._message

    def _mean_by_loop(self, sums: torch.Tensor, world: int) -> torch.Tensor:
        """Return the mean, of sums in bfloat16."""
        from gradstats.primitives.loops.copies import mean_of_bfloat16

        bits = sums.view(torch.int16).numpy().view(np.uint16)
        map_blocks(
            lambda start, block: mean_of_bfloat16(
                bits[start : start + block.size], np.float32(world), block
            ),
            self._mean,
        )
        return self._mean


def _in_loops(corrected: torch.Tensor, codec: Codec) -> bool:
    """Tell whether compiled loops round the gradient where it lies."""
    # other tensors would reach the loop as copies, and what it leaves in them would be lost
    plain = corrected.dtype == torch.float32 and corrected.is_contiguous()
    return codec.values == "bfloat16" and corrected.is_cpu and plain


def _bfloat16(load: Load) -> Exchange:
    size = _HALF * load.numel
    return load.exchange(
        load.numel,
        size,
        select=(load.selecting,),
        communicate=(FLAG, Work("all_reduce", size)),
        unpack=(Work("average", load.numel),),
    )


def _eight_bits(load: Load) -> Exchange:
    codec, world = Codec(values="float8_e4m3fn"), load.world
    # whole chunks, so that no two parts share a scale
    part = CHUNK * -(-load.numel // (CHUNK * world))
    message = WORD * (codec.value_words(part) + 1)
    # an all-to-all of parts puts as many bytes on every link as an all-gather of one
    hop = Work("all_gather", message)
    return load.exchange(
        load.numel,
        (world + 1) * message,
        select=(load.selecting,),
        communicate=(FLAG, hop, hop),
        unpack=(*coding(codec, "encode", part), *coding(codec, "decode", (world + 1) * part)),
    )


def _in_parts(corrected: torch.Tensor, codec: Codec, world: int) -> tuple[torch.Tensor, int]:
    """Return a message for each rank with its part of the gradient, and a part's size; leave what rounding took off."""
    numel = corrected.numel()
    size = CHUNK * -(-numel // (CHUNK * world))
    # float32 for a float64 gradient, too: the difference stays in the residual
    padded = torch.zeros(world * size, device=corrected.device)
    padded[:numel] = corrected
    # by parts, as they are packed: a scale may be for all values
    for part in padded.view(world, size):
        part.copy_(codec.rounded(part))
    corrected -= padded[:numel]
    return torch.stack([codec.pack_values(part) for part in padded.view(world, size)]), size


def _mean_of_parts(
    residual: torch.Tensor,
    messages: torch.Tensor,
    size: int,
    codec: Codec,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, int]:
    """Return the mean and the bytes sent for it; what rounding the own part took off is added to the residual."""
    rank, world, numel = dist.get_rank(group), dist.get_world_size(group), residual.numel()
    part = torch.zeros(size, device=residual.device)
    # each with a checksum behind it
    messages = torch.cat([messages, checksum(messages)[:, None]], dim=1)
    rows = all_to_all(messages, group)
    check_bodies([*rows[:, :-1]], rows[:, -1].tolist())
    for words in rows[:, :-1]:
        part.add_(codec.unpack_values(words, size), alpha=1 / world)  # a sum could leave the range
    message = codec.pack_values(codec.rounded(part))
    # all ranks decode the same bytes, each also its own: replicas get the same bits
    parts = [codec.unpack_values(words, size) for words in all_gather_checked(message, group)]
    # the last parts may end, or even begin, behind the gradient
    start, stop = (min(i * size, numel) for i in (rank, rank + 1))
    # times the ranks: the mean will divide by their number what this rank alone adds
    residual[start:stop] += world * (part - parts[rank])[: stop - start]
    # with the part to itself, and one word more for the checksum behind the mean
    sent = (messages.numel() + message.numel() + 1) * message.element_size()
    return torch.cat(parts)[:numel].to(residual.dtype), sent
