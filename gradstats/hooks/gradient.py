"""The gradient of a step on its way in and out: from DDP's buckets to flat vectors, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from gradstats.hooks.layout import ParameterLayout
from gradstats.hooks.memory import Memory
from gradstats.hooks.torch_private import GradBucket, copy_all

__all__ = [
    "FlatGradient",
    "MemoryPart",
    "Pair",
    "dense",
    "flatten",
    "logical",
    "pairs_of",
    "real_view",
    "warm_up_writing",
    "zero_bad",
]

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A parameter and its gradient in DDP's bucket."""

_BEYOND_CACHES = 1 << 22
"""Elements of an update that no cache keeps until the optimizer reads them, so that it is written past the caches, …"""
_LARGE = 1 << 16
"""… in parameters of this many elements; of smaller ones the call takes longer than the memory."""


def pairs_of(bucket: GradBucket) -> list[Pair]:
    """Return the parameters of a bucket with views of their gradients in its buffer.

    ``GradBucket.gradients()`` does that for real parameters alone: DDP lays a complex gradient out as its real view,
    and ``gradients()`` cuts the buffer by the number of complex elements.

    Parameters
    ----------
    bucket : torch.distributed.GradBucket
        Given by DDP.

    Returns
    -------
    list of (parameter, gradient)
        Contiguous views of the parameters' shapes and dtypes; see :func:`logical` for the order of their elements.
    """
    parameters = bucket.parameters()
    if not any(parameter.is_complex() for parameter in parameters):
        # all of them in one call: parameters may be many and small
        return list(zip(parameters, bucket.gradients(), strict=True))
    buffer, pairs, start = bucket.buffer(), [], 0
    for parameter in parameters:
        n = parameter.numel()
        if parameter.is_complex() and not buffer.is_complex():
            gradient = torch.view_as_complex(buffer[start : start + 2 * n].view(-1, 2))
            start += 2 * n
        else:
            gradient = buffer[start : start + n]
            start += n
        pairs.append((parameter, gradient.view(parameter.shape)))
    return pairs


def logical(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient from a DDP bucket so that its element [i, j, …] is that of the parameter.

    A bucket holds gradients in the memory order of their parameters. For a ``channels_last`` parameter that is not the
    logical order, and a contiguous view of the bucket has its elements elsewhere.

    Parameters
    ----------
    parameter : torch.Tensor
        The parameter, in whatever memory format.
    gradient : torch.Tensor
        A contiguous view of the bucket, of the parameter's shape.

    Returns
    -------
    torch.Tensor
        A view of the same memory, of the parameter's shape.
    """
    if parameter.is_contiguous():
        return gradient
    # DDP keeps strides where they are dense, which is when an empty copy keeps them
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())


def flatten(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a real vector in logical order.

    Parameters
    ----------
    parameter : torch.Tensor
        The parameter.
    gradient : torch.Tensor
        Its gradient, as DDP's bucket holds it.

    Returns
    -------
    tensor, shape (n,)
        A view where possible. A complex gradient has real and imaginary parts in turn.
    """
    # a bucket's gradient needs none of its own, and to detach it takes as long as a small one
    detached = gradient.detach() if gradient.requires_grad else gradient
    return real_view(logical(parameter, detached)).reshape(-1)


def real_view(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor, with real and imaginary parts as a last dimension of 2 if it is complex.

    Parameters
    ----------
    values : torch.Tensor
        Real or complex values.

    Returns
    -------
    torch.Tensor
        A view.
    """
    return torch.view_as_real(values) if values.is_complex() else values


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with all its elements: ``nn.Embedding(sparse=True)`` has one of the rows that were looked up.

    Parameters
    ----------
    gradient : torch.Tensor
        Sparse or dense.

    Returns
    -------
    torch.Tensor
        The gradient itself if it is dense.
    """
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def zero_bad(pairs: Sequence[Pair]) -> None:
    """Set NaN and infinite elements of gradients to zero, in place.

    Parameters
    ----------
    pairs : sequence of (parameter, gradient)
        Gradients in DDP's buckets.
    """
    for _, gradient in pairs:
        real_view(gradient).nan_to_num_(0.0, 0.0, 0.0)


class MemoryPart(NamedTuple):
    """What a memory holds of the compressed parameters, or of the densely averaged ones.

    Attributes
    ----------
    key : str
        Its name in a checkpoint.
    kinds : tuple of str
        Names of its tensors.
    tensors : mapping of str to tensor
        The tensors by name; empty before they are allocated.
    slots : mapping of str to slice
        Places of the parameters in each tensor, by name.
    sizes : mapping of str to int
        Elements of every parameter it ever had, by name, in the model's order.
    """

    key: str
    kinds: tuple[str, ...]
    tensors: Mapping[str, torch.Tensor]
    slots: Mapping[str, slice]
    sizes: Mapping[str, int]


class FlatGradient:
    """Gradients of a step as two vectors: the compressed one, in the memory, and the densely averaged one.

    Parameters
    ----------
    layout : ParameterLayout
        Places of the parameters.
    memory : Memory
        Adds to the compressed part what earlier steps did not send.
    weight_decay : float
        Multiple of the parameter that is added to its gradient.

    Attributes
    ----------
    layout : ParameterLayout
        Places of the parameters.
    memory : Memory
        What holds the compressed part.
    dense : tensor, shape (dense_numel,)
        The densely averaged part.
    allocated : bool
        Whether the vectors exist.
    """

    def __init__(self, layout: ParameterLayout, memory: Memory, weight_decay: float = 0.0) -> None:
        self.layout = layout
        self.memory = memory
        self._weight_decay = weight_decay
        self.dense = torch.empty(0)
        self.allocated = False

    def allocate(self, device: torch.device) -> None:
        """Make room, and start the memory from zero.

        Parameters
        ----------
        device : torch.device
            Device of the gradients.
        """
        layout = self.layout
        self.memory.allocate(layout.numel, device, layout.dtype)
        self.memory.allocate_dense(layout.dense_numel, device, layout.dtype)
        self.dense = torch.zeros(layout.dense_numel, dtype=layout.dtype, device=device)
        self.allocated = True

    def memory_parts(self) -> tuple[MemoryPart, MemoryPart]:
        """Return what the memory holds of compressed and of densely averaged parameters."""
        memory, layout = self.memory, self.layout
        slots, dense_slots = dict(layout.parts()), dict(layout.dense_parts())
        return (
            MemoryPart(
                "memory",
                memory.kinds,
                memory.tensors() if self.allocated else {},
                slots,
                layout.all,
            ),
            MemoryPart(
                "dense_memory",
                memory.dense_kinds,
                memory.dense_tensors() if self.allocated else {},
                dense_slots,
                {name: slot.stop - slot.start for name, slot in dense_slots.items()},
            ),
        )

    def clipping(self, pairs: Sequence[Pair], bound: float, scale: float) -> float:
        """Return the factor that brings this rank's gradient to a norm of at most `bound`.

        Parameters
        ----------
        pairs : sequence of (parameter, gradient)
            The whole gradient.
        bound : float
            Largest norm, in unscaled units.
        scale : float
            The loss scale that the gradients carry.

        Returns
        -------
        float
            At most 1.
        """
        # squares in float64: those of float16 end at 65,504
        norms = [torch.linalg.vector_norm(flatten(*pair), dtype=torch.float64) for pair in pairs]
        values = torch.stack(norms).tolist() if norms else []  # waits for a device once
        norm = math.sqrt(sum(each**2 for each in values)) / scale
        # NaN is not above 0; an infinite norm gives 0, and 0 · ∞ = NaN: count_bad() finds either
        return min(1.0, bound / norm) if norm > 0 else 1.0

    def take(
        self,
        pairs: Sequence[Pair],
        factor: float = 1.0,
        further: Callable[[torch.Tensor], bool] | None = None,
    ) -> list[torch.Tensor]:
        """Write gradients plus memory.

        Parameters
        ----------
        pairs : sequence of (parameter, gradient)
            Gradients that are ready.
        factor : float
            What they are multiplied by: clipping, and one over the loss scale.
        further : callable, optional
            Tells of a parameter whether an earlier exchange has taken a part of its step's gradient; of none if None.

        Returns
        -------
        list of tensors
            The parts written: one a parameter, or the two vectors if the gradient is whole.
        """
        layout, memory = self.layout, self.memory
        for parameter, gradient in pairs:
            flat = flatten(parameter, gradient)
            if factor != 1.0:
                # widened first: in float16 the product would round, and small elements vanish
                flat = flat.to(layout.dtype) * factor
            more = further is not None and further(parameter)
            # once an optimizer step, not once an exchange
            if self._weight_decay and not more:
                flat = torch.add(flat, flatten(parameter, parameter), alpha=self._weight_decay)
            slot = layout.slots.get(id(parameter))
            if slot is None:
                # the memory has no part in it: what is averaged densely leaves nothing over
                self.dense[layout.dense_slots[id(parameter)]].copy_(flat)
            elif more:
                memory.add(flat, slot, further=True)
            else:
                memory.add(flat, slot)
        # two sums say as much as one a parameter
        if len(pairs) == len(layout.slots) + len(layout.dense_slots):
            return [memory.corrected[: layout.numel], self.dense]
        return [self._part(memory.corrected, parameter) for parameter, _ in pairs]

    def _part(self, vector: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's part of a compressed vector, or of the densely averaged one."""
        slot = self.layout.slots.get(id(parameter))
        return self.dense[self.layout.dense_slots[id(parameter)]] if slot is None else vector[slot]

    def write(
        self,
        pairs: Sequence[Pair],
        mean: torch.Tensor,
        scale: float,
    ) -> None:
        """Put the average into the gradients.

        Parameters
        ----------
        pairs : sequence of (parameter, gradient)
            All gradients of the step.
        mean : tensor, shape (d,)
            The update of the compressed part.
        scale : float
            The loss scale that the gradients are to carry.
        """
        slots = self.layout.slots
        sizes = [slot.stop - slot.start for slot in slots.values()]
        # all views in one call: to cut a small one out takes longer than to copy it
        parts = dict(zip(slots, mean[: self.layout.numel].split_with_sizes(sizes), strict=True))
        # the whole update decides: what a single layer leaves in the caches is gone before the optimizer comes
        past = mean.numel() >= _BEYOND_CACHES and _plain(mean)
        whole: list[Pair] = []
        for parameter, gradient in pairs:
            target = real_view(logical(parameter, gradient))
            part = parts.get(id(parameter))
            if part is None:
                part = self.dense[self.layout.dense_slots[id(parameter)]]
            elif past and target.numel() >= _LARGE and _plain(target):
                from gradstats.primitives.loops.copies import copy_past_caches

                copy_past_caches(target.view(-1).numpy(), part.numpy(), np.float32(scale))
                continue
            whole.append((target, part.view_as(target)))
        if scale == 1 and whole:
            targets, sources = zip(*whole, strict=True)
            copy_all(targets, sources)
        else:
            for target, part in whole:
                # multiplied in the memory's dtype, and rounded once, to the gradient's
                target.copy_(part * scale)

    def beyond_half(self, pairs: Sequence[Pair], mean: torch.Tensor, scale: float) -> int:
        """Return the number of elements that :meth:`write` would make infinite, as float16 ends at 65,504.

        Parameters
        ----------
        pairs : sequence of (parameter, gradient)
            All gradients of the step.
        mean : tensor, shape (d,)
            The update of the compressed part, all finite.
        scale : float
            The loss scale that the gradients are to carry.
        """
        half = [id(p) for p, g in pairs if g.dtype == torch.float16 and g.numel()]
        slots, dense_slots = self.layout.slots, self.layout.dense_slots
        parts = [mean[slots[i]] if i in slots else self.dense[dense_slots[i]] for i in half]
        if not parts:
            return 0
        # a norm takes no copy, and one wait for a device
        largest = torch.stack([torch.linalg.vector_norm(part, math.inf) for part in parts]).max()
        if float(largest) * scale < 65_000:
            return 0
        # rounded as they are written
        written = ((part * scale).to(torch.float16) for part in parts)
        return sum(part.numel() - int(torch.isfinite(part).sum()) for part in written)

    def first_bad(self) -> str:
        """Name the first parameter whose gradient is not finite on this rank, in brackets; empty if none is."""
        for name, slot in self.layout.parts():
            # waits for a device once a parameter: asked only where a step is refused
            if not torch.isfinite(self.memory.corrected[slot]).all():
                return f" (here first in parameter {name})"
        dense = torch.isfinite(self.dense).all()
        return "" if dense else " (here in a densely averaged parameter)"


def warm_up_writing() -> None:
    """Compile what writes a large update, or load it."""
    from gradstats.primitives.loops.copies import copy_past_caches

    # dtypes decide what is compiled, lengths do not
    copy_past_caches(np.zeros(1, np.float32), np.zeros(1, np.float32), np.float32(1))


def _plain(x: torch.Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32 and x.is_contiguous()
