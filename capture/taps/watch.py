"""Backward passes as a model's parameters see them: what tells a misplaced ``capture.step()``, and accumulation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from gradstats.hooks.gradient import dense
from gradstats.hooks.torch_private import version
from gradstats.hooks.units import local_part

__all__ = ["BackwardWatch"]

_UNKNOWN = -1
"""In the place of a version: a backward pass has reached the parameter, and no more is known of its gradient."""


class Seeing(Protocol):
    """What :meth:`BackwardWatch.show` shows gradients to."""

    def see(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Look at what a backward pass is about to add to a parameter's ``.grad``.

        Parameters
        ----------
        parameter, gradient : torch.Tensor
            The parameter, and what is added.
        """


class BackwardWatch:
    """Notice backward passes by hooks on parameters, which it does not keep alive.

    Attributes
    ----------
    stepped : bool
        Whether :meth:`note_step` has come after a backward pass since the last :meth:`restart`.
    """

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._handles: list[Any] = []
        self._shown: list[Any] = []
        self._nodes: list[Any] = []
        self.stepped = False

    def note_step(self) -> None:
        """Take note that an optimizer's step begins."""
        self.stepped |= self.fired

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        """Put hooks on parameters.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters that require gradients.
        """
        watched = list(parameters)
        self.add(watched)
        self.restart(watched)

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Put hooks on more parameters.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters that require gradients.
        """
        versions = self._versions  # alone: a parameter must not keep the watch alive

        def notice(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            # reached all the same: an optimizer in the backward pass has taken it
            versions[id(parameter)] = _UNKNOWN if gradient is None else version(gradient)

        for parameter in parameters:
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(notice))

    def show(self, parameters: Sequence[torch.Tensor], owner: Seeing) -> None:
        """Show an object what a backward pass is about to add to each parameter's ``.grad``; nothing to the one before.

        Hooks of :meth:`start` and :meth:`add` are removed: these notice the same, and each takes time in every step.

        Parameters
        ----------
        parameters : sequence of torch.Tensor
            Parameters that require gradients.
        owner : Seeing
            Shown a parameter and a gradient. It is not kept alive.
        """
        self._remove(self._shown)
        self._remove(self._handles)
        # hooks of tensors are called by autograd.grad() too, which accumulates nothing; of nodes that nobody holds DDP
        # makes new ones
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        for node, parameter in zip(self._nodes, parameters, strict=True):
            self._shown.append(node.register_prehook(_showing(parameter, owner, self._versions)))

    @property
    def fired(self) -> bool:
        """Whether a backward pass has reached a parameter since the last :meth:`restart`."""
        return bool(self._versions)

    def reached(self, parameter: torch.Tensor) -> bool:
        """Tell whether a backward pass has reached a parameter since the last :meth:`restart`.

        Parameters
        ----------
        parameter : torch.Tensor
            A watched parameter.
        """
        return id(parameter) in self._versions

    def restart(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin a step.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters, whose gradients are old from now on.
        """
        # in place, for the hooks hold this dict
        self._versions.clear()
        self.stepped = False
        # weakly, so that gradients that are set to None are freed
        self._known = {
            id(p): (weakref.ref(p.grad), version(p.grad)) for p in parameters if p.grad is not None
        }

    def has_gradient(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Tell whether the parameters' ``.grad`` come from this step.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters.

        Returns
        -------
        bool
            False if all are None; if all are zero, and not as a backward pass left them (they were set to zero since);
            and, unless a backward pass was noticed, if all are those of the last step.
        """
        present = [p for p in parameters if p.grad is not None]
        if self.fired:
            new = any(self.untouched(p) for p in present)
        else:  # set by hand, perhaps
            present = [p for p in present if not self.old(p)]
            new = False
        # values last: on a device each look waits for it
        return new or any(bool(_values(p).any()) for p in present)

    def stop(self) -> None:
        """Remove the hooks."""
        self._remove(self._handles)
        self._remove(self._shown)
        self._nodes.clear()
        # PyTorch does not swap tensors that have weak references, as a sharded model's .to() does
        self._known.clear()

    @staticmethod
    def _remove(handles: list[Any]) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    def untouched(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter's gradient is as a backward pass left it since the last :meth:`restart`.

        Parameters
        ----------
        parameter : torch.Tensor
            A parameter that has a gradient.
        """
        assert parameter.grad is not None
        return self._versions.get(id(parameter)) == version(parameter.grad)

    def old(self, parameter: torch.Tensor, written: bool = False) -> bool:
        """Tell whether a parameter's gradient is one that :meth:`restart` has seen, and as it was then.

        Parameters
        ----------
        parameter : torch.Tensor
            A parameter that has a gradient.
        written : bool
            Whether it may have been written to since, as clipping does.
        """
        assert parameter.grad is not None
        reference, before = self._known.get(id(parameter), (None, -1))
        same = reference is not None and reference() is parameter.grad
        return same and (written or before == version(parameter.grad))


def _showing(
    parameter: torch.Tensor, owner: Seeing, versions: dict[int, int]
) -> Callable[[tuple[torch.Tensor, ...]], None]:
    """Return a hook of autograd that keeps neither the parameter nor whom it shows it to alive."""
    # not by a WeakMethod, which is slower: this is called for each parameter, in each step
    key, parameter_ref, owner_ref = id(parameter), weakref.ref(parameter), weakref.ref(owner)

    def show(gradients: tuple[torch.Tensor, ...]) -> None:
        shown, seeing = parameter_ref(), owner_ref()
        if shown is not None and seeing is not None and gradients[0] is not None:
            versions[key] = _UNKNOWN
            seeing.see(shown, gradients[0])

    return show


def _values(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    # of a sharded one: no exchange, which some ranks might not take part in
    return dense(local_part(gradient))
