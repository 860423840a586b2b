"""What an exchange left in `.grad`, where nobody zeroed it before the next one: not every exchange is a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradstats.hooks.gradient import Pair, logical
from gradstats.hooks.torch_private import is_part, version

__all__ = ["Leftover", "remove_with"]


def remove_with(owner: object, handles: Sequence[RemovableHandle]) -> None:
    """Remove hooks when their owner is gone: a model may outlive many.

    Parameters
    ----------
    owner : object
        What the hooks are for; they must not keep it alive.
    handles : sequence of RemovableHandle
        The hooks' handles.
    """

    def remove() -> None:
        for handle in handles:
            handle.remove()

    # not at exit, when nothing is left to run them
    weakref.finalize(owner, remove).atexit = False


def _before(
    owner: weakref.ref[Leftover], parameter: weakref.ref[torch.Tensor]
) -> Callable[[tuple[torch.Tensor, ...]], None]:
    # weak both: the parameter's node keeps the hook
    def look(_: tuple[torch.Tensor, ...]) -> None:
        # nothing is kept in the usual training, which sets gradients to None
        if (leftover := owner()) is not None and (tensor := parameter()) is not None:
            leftover.look(tensor)

    return look


class _Filled(NamedTuple):
    """A `.grad` that an exchange filled, how often it had been changed in place, and whose it is."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    parameter: weakref.ref[torch.Tensor]


class Leftover:
    """The parts of gradients that are means of earlier exchanges, to which autograd has added new gradients.

    With an exchange in every micro-step, DDP hands over what the last exchange left plus the new gradient, on each
    rank. The mean over the ranks keeps what is equal on all of them; a memory would take it for a gradient. So it is
    set aside before the exchange, and added to the mean.

    It takes a copy of a parameter's gradient only where an exchange left something in it.

    Attributes
    ----------
    parts : dict of int to tensor
        What an exchange left, by the identity of the parameter.
    begun : set of int
        Parameters outside DDP of whose optimizer step an exchange has taken a part.
    """

    def __init__(self) -> None:
        self.parts: dict[int, torch.Tensor] = {}
        self.begun: set[int] = set()
        self._filled: dict[int, _Filled] = {}
        # on a device, whether a part is zero is asked once for many
        self._unsure: set[int] = set()
        # since the last exchange
        self._zeroed: set[int] = set()
        # of nodes that nobody holds new ones are made
        self._nodes: dict[int, Any] = {}
        self._handles: list[RemovableHandle] = []
        remove_with(self, self._handles)

    def __reduce__(self) -> tuple[type[Leftover], tuple[()]]:
        """Copy without the exchanges, which are of other parameters or of another process."""
        return Leftover, ()

    def _watch(self, parameter: torch.Tensor) -> None:
        """Look at `.grad` before autograd adds to it."""
        # not a hook of the tensor: autograd.grad() calls these, too, and adds nothing
        self._nodes[id(parameter)] = node = get_gradient_edge(parameter).node
        before = _before(weakref.ref(self), weakref.ref(parameter))
        self._handles.append(node.register_prehook(before))

    def look(self, parameter: torch.Tensor) -> None:
        """Set aside what an exchange left in a gradient, before anything is added to it.

        Parameters
        ----------
        parameter : torch.Tensor
            The parameter.
        """
        key, grad = id(parameter), parameter.grad
        filled = self._filled.get(key)
        if filled is None:
            return
        # DDP's views of buckets are others when it has rebuilt them
        if grad is None or (grad is not filled.tensor() and not is_part(grad)):
            self._forget(key)
            return
        # by zero_(), for one, after which nothing is left
        changed = version(grad) != filled.version
        if key in self.parts:
            # accumulated since; gradients that are views of buckets change together
            if changed and not grad.any():
                self._forget(key)
                return
        # sparse gradients are averaged without the memory: what is equal on all ranks may stay in them
        elif grad.layout != torch.strided or (changed and grad.is_cpu and not grad.any()):
            self._forget(key)
            return
        else:
            # a copy: autograd adds the new gradient in place
            self.parts[key] = grad.detach().clone()
            if changed and not grad.is_cpu:
                self._unsure.add(key)
        # the addition that follows is one change, and not a user's
        self._filled[key] = filled._replace(version=version(grad) + 1)

    def _forget(self, key: int) -> None:
        self._zeroed.add(key)
        del self._filled[key]
        self.parts.pop(key, None)
        self._unsure.discard(key)

    def settle(self, parameters: Sequence[torch.Tensor]) -> None:
        """Know of parameters whose gradients are complete what is left in them, also where they were not used.

        Parameters
        ----------
        parameters : sequence of torch.Tensor
            Parameters of a bucket.
        """
        if not self._filled:
            return
        for parameter in parameters:
            if id(parameter) not in self.parts:
                self.look(parameter)
        if self._unsure:
            keys = list(self._unsure)
            # one wait for the device for all of them
            some = torch.stack([self.parts[key].any() for key in keys]).tolist()
            self._unsure.clear()
            for key in (key for key, left in zip(keys, some, strict=True) if not left):
                self._forget(key)

    def has_any(self) -> bool:
        """Tell whether an exchange left anything in any gradient, also in those that have not come yet."""
        # the first bucket may be of parameters that the last pass did not use, whatever it left in others
        noted = (filled.parameter() for filled in self._filled.values())
        self.settle([parameter for parameter in noted if parameter is not None])
        return bool(self.parts or self.begun)

    def zeroed(self) -> set[int]:
        """Return the parameters, by identity, whose gradient an exchange filled and somebody zeroed since."""
        self.has_any()
        return self._zeroed

    def without(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient without what an exchange left in it.

        Parameters
        ----------
        parameter : torch.Tensor
            The parameter.
        gradient : torch.Tensor
            Its gradient, as DDP's bucket holds it.
        """
        self.settle([parameter])
        part = self.parts.get(id(parameter))
        # the part has the parameter's strides, the bucket its memory order
        return gradient if part is None else logical(parameter, gradient) - part

    def set_aside(self, pairs: Sequence[Pair]) -> None:
        """Take what an exchange left out of gradients, in place; :meth:`put_back` adds it to the mean.

        Parameters
        ----------
        pairs : sequence of (parameter, gradient)
            Gradients in DDP's bucket.
        """
        self.settle([parameter for parameter, _ in pairs])
        for parameter, gradient in pairs if self.parts else ():
            if id(parameter) in self.parts:
                # what autograd's sum of both has rounded away stays lost
                logical(parameter, gradient).sub_(self.parts[id(parameter)])

    def put_back(self, pairs: Sequence[Pair]) -> None:
        """Add what was set aside.

        Parameters
        ----------
        pairs : sequence of (parameter, gradient)
            All gradients of the exchange.
        """
        for parameter, gradient in pairs if self.parts else ():
            if id(parameter) in self.parts:
                logical(parameter, gradient).add_(self.parts[id(parameter)])

    def clear(self) -> None:
        """Forget what earlier exchanges left."""
        self.parts.clear()
        self.begun.clear()
        self._filled.clear()
        self._unsure.clear()
        self._zeroed.clear()

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note the gradients that an exchange has filled, once DDP has put the results into them.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters.
        """
        self._zeroed.clear()
        self._filled = {}
        for p in parameters:
            # from the first exchange on, when a model's type and device are settled: with them the node changes
            if id(p) not in self._nodes and p.requires_grad:
                self._watch(p)
            if (grad := p.grad) is not None:
                self._filled[id(p)] = _Filled(weakref.ref(grad), version(grad), weakref.ref(p))
