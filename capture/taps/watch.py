"""Whether a backward pass has reached a model's parameters: what tells a misplaced ``capture.step()``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from gradstats.hooks.torch_private import version
from gradstats.hooks.units import local_part

__all__ = ["BackwardWatch"]


class BackwardWatch:
    """Notice backward passes by hooks on parameters, which it does not keep alive."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._handles: list[Any] = []

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        """Put hooks on parameters.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters that require gradients.
        """
        watched = list(parameters)
        versions = self._versions  # alone: a parameter must not keep the watch alive

        def notice(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            versions[id(parameter)] = -1 if gradient is None else version(gradient)

        for parameter in watched:
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(notice))
        self.restart(watched)

    @property
    def fired(self) -> bool:
        """Whether a backward pass has reached a parameter since the last :meth:`restart`."""
        return bool(self._versions)

    def restart(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin a step.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters, whose gradients are old from now on.
        """
        self._versions.clear()
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
            new = any(self._untouched(p) for p in present)
        else:  # set by hand, perhaps
            present = [p for p in present if not self._old(p)]
            new = False
        return new or any(bool(_values(p).any()) for p in present)

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _untouched(self, parameter: torch.Tensor) -> bool:
        assert parameter.grad is not None
        return self._versions.get(id(parameter)) == version(parameter.grad)

    def _old(self, parameter: torch.Tensor) -> bool:
        assert parameter.grad is not None
        reference, before = self._known.get(id(parameter), (None, -1))
        return (
            reference is not None
            and reference() is parameter.grad
            and before == version(parameter.grad)
        )


def _values(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    # of a sharded one: no exchange, which some ranks might not take part in
    gradient = local_part(gradient)
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
