"""Operations that are timed on a cluster: calls of a collective or of local work, at a given size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from gradstats.collectives.codec import INDICES, SCALED, Codec
from gradstats.collectives.packed import pack, unpack
from gradstats.collectives.plain import all_gather, all_reduce, broadcast
from gradstats.collectives.ring import Ring, pack_bits
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors import (
    Compressor,
    DenseCompressor,
    compressor_class,
    make_compressor,
)
from gradstats.compressors.marsit import transient_merge
from gradstats.compressors.signs import SignGathering, sign_message, signed
from gradstats.hooks.memory import ErrorFeedback
from gradstats.primitives import Selection
from gradstats.thresholds.bench import sample_gradient

__all__ = [
    "COLLECTIVES",
    "Call",
    "Group",
    "compressing",
    "decoding",
    "local_work",
    "random_gradient",
]

Group: TypeAlias = dist.ProcessGroup | None
Call: TypeAlias = Callable[[], object]


def _all_reduce(size: int, device: torch.device, group: Group) -> Call:
    # sizes are in bytes, of which a float32 has 4
    vector = torch.zeros(size // 4, device=device)
    return lambda: all_reduce(vector, group)


def _all_gather(size: int, device: torch.device, group: Group) -> Call:
    message = torch.zeros(size // 4, dtype=torch.int32, device=device)
    # allocated once: allocation is not part of what is timed
    gathered = message.new_empty(dist.get_world_size(group) * message.numel())
    return lambda: all_gather(gathered, message, group)


def _reduce_scatter(size: int, device: torch.device, group: Group) -> Call:
    world = dist.get_world_size(group)
    part = torch.zeros(max(1, size // 4 // world), device=device)
    vector = torch.zeros(world * part.numel(), device=device)
    return lambda: dist.reduce_scatter_single(part, vector, group=group)


def _broadcast(size: int, device: torch.device, group: Group) -> Call:
    vector = torch.zeros(size // 4, device=device)
    return lambda: broadcast(vector, 0, group)


def _hop(size: int, device: torch.device, group: Group) -> Call:
    ring = Ring(group)
    # unsigned bytes, so that a part has as many elements as bytes
    parts = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ring.size)]
    return lambda: ring.all_gather(parts, ring.position)


COLLECTIVES: dict[str, Callable[[int, torch.device, Group], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "hop": _hop,
    "busy_all_gather": _all_gather,
}
"""For each collective, a function from a size in bytes, a device and a group to the call that is timed."""


def random_gradient(numel: int, device: torch.device) -> torch.Tensor:
    """Return a synthetic gradient.

    Parameters
    ----------
    numel : int
        Number of elements.
    device : torch.device
        Device of the tensor.

    Returns
    -------
    float32 tensor, shape (numel,)
        The same on every call and rank.
    """
    return torch.from_numpy(sample_gradient(numel)).to(device)


def local_work(size: int, numel: int, device: torch.device, coded: bool = True) -> dict[str, Call]:
    """Return calls of local work by name.

    Parameters
    ----------
    size : int
        Elements that the work is done on: those of a gradient, or those sent.
    numel : int
        Elements of the dense gradient from which they are sent.
    device : torch.device
        Device of the tensors.
    coded : bool
        Whether codecs are there, too.
    """
    gradient = random_gradient(size, device)
    # spread evenly over the dense gradient: ascending and each once, as selections are
    indices = torch.arange(size, device=device) * (numel // size)
    selection = Selection(indices, gradient)
    words = pack(selection, numel)
    update, dense = SparseUpdate(), torch.zeros(numel, device=device)
    packed = pack_bits(gradient > 0)
    total = torch.zeros_like(gradient)
    merge = transient_merge(torch.Generator(device))
    memory = ErrorFeedback()
    memory.allocate(size, device)

    # drawn at random, because evenly spaced gaps would all be coded alike
    drawn = np.random.default_rng(0).choice(numel, size, replace=False, shuffle=False)
    positions = torch.from_numpy(np.sort(drawn)).to(device)

    def unpacking() -> None:
        update.begin(dense)
        update.add(unpack(words, numel))
        update.divide(2)

    def remembering() -> None:
        memory.add(gradient, slice(0, size))
        # the hook checks for NaN in one pass over the whole gradient
        torch.isfinite(memory.corrected.sum())
        # the hook copies the average back into the gradients
        total.copy_(gradient)
        memory.settle(memory.corrected, indices)

    return {
        "pack": lambda: pack(selection, numel),
        "unpack": unpacking,
        "memory": remembering,
        "average": lambda: torch.zeros_like(gradient).div_(2),
        "unpack_signs": lambda: total.add_(signed(packed, size, 0.0, total.dtype)),
        "merge_signs": lambda: merge(packed, 1, 1)(packed),
        **(_coding(positions, gradient, numel) if coded else {}),
    }


def _coding(positions: torch.Tensor, values: torch.Tensor, numel: int) -> dict[str, Call]:
    """Return the calls in which positions and values are coded and decoded."""
    calls: dict[str, Call] = {}
    # plain positions need no coding beyond what "pack" times
    for codec in (Codec(name) for name in INDICES if name != "plain"):
        stream = codec.pack_indices(positions, numel)
        # bound now, as the loop goes on
        calls[f"encode:{codec.indices}"] = lambda c=codec: c.pack_indices(positions, numel)  # type: ignore[misc]
        calls[f"decode:{codec.indices}"] = lambda c=codec, w=stream: c.unpack_indices(  # type: ignore[misc]
            w, positions.numel(), numel
        )
    for codec in (Codec(values=name) for name in SCALED):
        words = codec.pack_values(values)
        # rounded first, as compressors do it: the residual needs what was sent
        calls[f"encode:{codec.values}"] = lambda c=codec: c.pack_values(c.rounded(values))  # type: ignore[misc]
        calls[f"decode:{codec.values}"] = lambda c=codec, w=words: c.unpack_values(  # type: ignore[misc]
            w, values.numel()
        )
    return calls


def decoding(name: str, size: int, world: int, device: torch.device) -> Call:
    """Return the call in which a sign compressor decodes the messages of all ranks, whose signs differ.

    Parameters
    ----------
    name : str
        A compressor that gathers signs.
    size : int
        Elements of the gradient.
    world : int
        Number of ranks.
    device : torch.device
        Device of the tensors.
    """
    compressor = compressing(name, 1.0)
    assert isinstance(compressor, SignGathering)
    gradient = random_gradient(size, device)
    signs = [gradient.roll(rank * size // world) > 0 for rank in range(world)]
    messages = torch.stack([sign_message(pack_bits(row), 1.0) for row in signs])
    return lambda: compressor.decode(messages, gradient)


def compressing(name: str, ratio: float) -> Compressor:
    """Return a compressor that compresses in every step and at every size.

    Parameters
    ----------
    name : str
        One of :data:`gradstats.compressors.COMPRESSORS`.
    ratio : float
        Kept fraction k/d, in (0, 1].
    """
    return make_compressor(name, ratio, **compressor_class(name).always) or DenseCompressor()
