"""Parameters that a rank did not use in a step: where no rank did, DDP applies no update, and the memory must stay."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradstats.hooks.gradient import FlatGradient, Pair, flatten, real_view
from gradstats.hooks.leftover import remove_with

__all__ = ["UnusedParameter", "Usage"]


class UnusedParameter(NamedTuple):
    """A parameter that this rank did not use in a step, and the memory it had before.

    Attributes
    ----------
    parameter : torch.Tensor
        The parameter.
    gradient : torch.Tensor
        Its gradient in DDP's bucket, into which the mean is written.
    key : str
        Part of the memory that knows it, :attr:`gradstats.hooks.gradient.MemoryPart.key`.
    slot : slice
        Its place there.
    before : mapping of str to tensor
        Its memory before the step, by kind.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    key: str
    slot: slice
    before: Mapping[str, torch.Tensor]


class Usage:
    """Notes which parameters this rank uses in a step, and keeps the memory of those that no rank used.

    Parameters
    ----------
    gradient : FlatGradient
        Has the memory.

    Attributes
    ----------
    frozen : dict of str to weakref.ref
        Parameters that were not trained when the model was wrapped, by name.
    idle : set of int
        Parameters, by identity, that this rank did not use in the last step, and whose memory is as it was before.
    """

    def __init__(self, gradient: FlatGradient) -> None:
        self._gradient = gradient
        self._used: set[int] = set()
        self.frozen: dict[str, weakref.ref[torch.Tensor]] = {}
        self.idle: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the parameters, which are others or of another process."""
        return {**vars(self), "frozen": {}, "idle": set()}

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have autograd note when it accumulates a gradient.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters.
        """
        used = self._used  # alone: a parameter must not keep the state and its memory alive
        handles = []
        for parameter in parameters:
            register: Any = parameter.register_post_accumulate_grad_hook
            handles.append(register(lambda p: used.add(id(p))))
        remove_with(self, handles)

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that parameters were used, where autograd does not tell.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters.
        """
        self._used.update(map(id, parameters))

    def unfrozen(self) -> str | None:
        """Return the name of a parameter that is trained since the model was wrapped; None if none is."""
        every = ((name, reference()) for name, reference in self.frozen.items())
        return next((name for name, p in every if p is not None and p.requires_grad), None)

    def clear(self) -> None:
        """Forget what was used: the step has ended."""
        self._used.clear()

    def unused(self, pairs: Sequence[Pair]) -> list[UnusedParameter]:
        """Return the parameters that this rank did not use, with their memory before the step settles it.

        Parameters
        ----------
        pairs : sequence of (parameter, gradient)
            All gradients of the step.

        Returns
        -------
        list of UnusedParameter
            For :meth:`give_back`, when DDP has put the results into the gradients.
        """
        # in the usual step none: then neither places are listed nor memories copied
        rest = [pair for pair in pairs if id(pair[0]) not in self._used]
        name = self._gradient.layout.name
        remembered = [
            UnusedParameter(
                *pair, part.key, slot, {k: t[slot].clone() for k, t in part.tensors.items()}
            )
            for part in (self._gradient.memory_parts() if rest else ())
            for pair in rest
            if (slot := part.slots.get(name(pair[0]))) is not None
        ]
        # give_back() tells of the others
        self.idle = {id(p) for p, _ in rest} - {id(each.parameter) for each in remembered}
        return remembered

    def give_back(self, unused: Sequence[UnusedParameter]) -> None:
        """Restore the memory of parameters whose update DDP did not apply.

        Parameters
        ----------
        unused : sequence of UnusedParameter
            What :meth:`unused` returned in this step.
        """
        parts = {part.key: part for part in self._gradient.memory_parts()}
        for parameter, gradient, key, slot, before in unused:
            # where no rank used it DDP leaves .grad alone, else it holds the bucket's mean
            applied = parameter.grad is not None and torch.equal(
                flatten(parameter, gradient), real_view(parameter.grad).reshape(-1)
            )
            tensors = parts[key].tensors
            if not applied:
                for kind, tensor in tensors.items():
                    tensor[slot] = before[kind]
            # of a memory that is as before nothing was sent
            if not applied or all(torch.equal(t[slot], before[k]) for k, t in tensors.items()):
                self.idle.add(id(parameter))
