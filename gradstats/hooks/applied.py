"""Whether an optimizer has applied the last update: not every exchange becomes a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradstats.hooks.optimizers import parameters_of
from gradstats.hooks.torch_private import calling_scaler

__all__ = ["Applied"]

# weak: the hooks below last as long as the process, and must keep no training's state alive
_all: weakref.WeakSet[Applied] = weakref.WeakSet()
# handles of the one pair of hooks that serves all states; empty before the first state
_hooked: list[Any] = []


class Applied:
    """Sees the steps of all optimizers of the process, and knows which are of its parameters.

    Parameters
    ----------
    on_step : callable, optional
        Called before each of their steps.

    Attributes
    ----------
    known : bool
        Whether an optimizer of these parameters was ever seen. Who applies updates by hand has none.
    optimizers : weakref.WeakSet
        The optimizers of these parameters that have stepped.
    scaled : bool or None
        Whether a loss scaler called the first of their steps; None before it.
    """

    def __init__(self, on_step: Callable[[], None] | None = None) -> None:
        self._on_step = on_step
        self.known = False
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.scaled: bool | None = None
        self._scaler: weakref.ref[Any] | None = None
        self._parameters: set[int] = set()
        # those that any optimizer ever stepped, and that one has stepped since the last exchange
        self._held: set[int] = set()
        self._taken: set[int] = set()
        # before the first exchange no update waits for an optimizer
        self._stepped = True
        self._within = False
        # fused optimizers are called in any case, and look at these on the device
        self._overflows: list[torch.Tensor] = []
        _all.add(self)
        if not _hooked:
            _hooked.extend(
                (
                    register_optimizer_step_pre_hook(_before),
                    register_optimizer_step_post_hook(_after),
                )
            )

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look for steps of these parameters.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters, as an optimizer has them.
        """
        self._parameters.update(map(id, parameters))

    def forget(self) -> None:
        """Look for no steps: those of these parameters are not what the updates are for."""
        self._parameters.clear()

    def __reduce__(self) -> tuple[type[Applied], tuple[()]]:
        """Copy without the optimizers, which are of other parameters or of another process."""
        return Applied, ()

    def begin(self) -> None:
        """Note that there is a new update. Within a closure that an optimizer calls, it is applied as it comes."""
        self._stepped = self._within
        self._taken.clear()
        self._overflows.clear()

    def leave(self) -> None:
        """Note that a step failed, and with it the optimizer's step that it was within: PyTorch tells nobody."""
        self._within = False

    def take(self) -> None:
        """Count the last update as applied."""
        self._stepped = True
        self._overflows.clear()

    @property
    def scaler(self) -> Any:
        """The loss scaler that called the first of their steps, if one did and it is still there."""
        return None if self._scaler is None else self._scaler()

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has applied the last update; asks the device where a fused one may have skipped it."""
        if self._overflows:
            # skipped only if each of the optimizers found an overflow
            self._stepped |= not all(bool(each) for each in self._overflows)
            self._overflows.clear()
        return self._stepped

    def waiting(self) -> set[int]:
        """Return the parameters, by identity, whose optimizer has not stepped since the last exchange; another has."""
        return self._held - self._taken if self._taken else set()

    def adaptive(self) -> list[str]:
        """Return the kinds of those optimizers that divide by squares of gradients, as Adam does."""
        return [
            type(optimizer).__name__
            for optimizer in self.optimizers
            # the name that PyTorch's Adam and its kin give their second moment
            if any("exp_avg_sq" in values for values in optimizer.state.values())
        ]

    def with_momentum(self) -> list[str]:
        """Return the kinds of those optimizers that have a momentum."""
        return [
            type(optimizer).__name__
            for optimizer in self.optimizers
            if any(group.get("momentum") for group in optimizer.param_groups)
        ]

    def before(self, parameters: set[int]) -> None:
        """See an optimizer begin a step.

        Parameters
        ----------
        parameters : set of int
            Identities of the parameters of any optimizer.
        """
        self._within = not self._parameters.isdisjoint(parameters)
        if self._within and self._on_step is not None:
            self._on_step()

    def after(self, optimizer: torch.optim.Optimizer, parameters: set[int]) -> None:
        """See an optimizer end a step.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Any optimizer.
        parameters : set of int
            Identities of its parameters.
        """
        self._within = False
        mine = self._parameters & parameters
        if not mine:
            return
        if self.scaled is None:
            scaler = calling_scaler()
            self.scaled = scaler is not None
            self._scaler = None if scaler is None else weakref.ref(scaler)
        self.known = True
        self._held |= mine
        self._taken |= mine
        self.optimizers.add(optimizer)
        # GradScaler puts it on an optimizer whose kernels skip the step by themselves: the host does not know
        overflow = getattr(optimizer, "found_inf", None)
        if isinstance(overflow, torch.Tensor):
            self._overflows.append(overflow)
        else:
            self._stepped = True


def _before(optimizer: torch.optim.Optimizer, *_: object) -> None:
    # a list: a state may be collected while this runs
    if states := list(_all):
        # once for all states: a sharded model has one for each unit
        parameters = set(map(id, parameters_of(optimizer)))
        for each in states:
            each.before(parameters)


def _after(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if states := list(_all):
        parameters = set(map(id, parameters_of(optimizer)))
        for each in states:
            each.after(optimizer, parameters)
