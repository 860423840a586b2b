"""Optimizers as trainings have them: wrapped, with a closure, or in the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from gradstats.errors import InputError, several, warn
from gradstats.hooks.torch_private import innermost_optimizer, version

__all__ = [
    "GoneOptimizer",
    "SteppedGradients",
    "TakenGradients",
    "after_closure",
    "after_steps",
    "before_steps",
    "closure_of",
    "parameters_of",
]


def before_steps(optimizer: Any, call: Callable[..., Any]) -> RemovableHandle:
    """Call something before every step of an optimizer, or of the one that accelerate or Lightning has wrapped.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer, in whatever wrappers.
    call : callable
        Called as by ``Optimizer.register_step_pre_hook``.

    Returns
    -------
    RemovableHandle
        What unhooks it.

    Raises
    ------
    InputError
        If it is no optimizer of PyTorch's kind.
    """
    try:
        return innermost_optimizer(optimizer).register_step_pre_hook(call)  # type: ignore[no-any-return]
    except AttributeError:
        raise InputError(
            f"optimizer= takes a torch.optim.Optimizer, and {type(optimizer).__name__} has none of its hooks: call "
            "monitor.step() before its step() instead"
        ) from None


def after_steps(optimizer: Any, call: Callable[..., Any]) -> RemovableHandle:
    """Call something after every step of an optimizer that :func:`before_steps` takes.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer, in whatever wrappers.
    call : callable
        Called as by ``Optimizer.register_step_post_hook``.

    Returns
    -------
    RemovableHandle
        What unhooks it.
    """
    return innermost_optimizer(optimizer).register_step_post_hook(call)  # type: ignore[no-any-return]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters, in the order in which its state numbers them.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer, without wrappers.
    """
    return [p for group in optimizer.param_groups for p in group["params"]]


def closure_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the closure of an optimizer's step, or None.

    Parameters
    ----------
    arguments : tuple
        Positional arguments of ``step()``, the optimizer first.
    options : dict
        Keyword arguments.
    """
    # hooks get step()'s own arguments: a closure may come by position or by name
    return arguments[1] if len(arguments) > 1 else options.get("closure")


def after_closure(
    arguments: tuple[Any, ...], options: dict[str, Any], call: Callable[[], object]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call something when the gradients of an optimizer's step are there: now, or when its closure has run once.

    Parameters
    ----------
    arguments : tuple
        Positional arguments of ``step()``, the optimizer first.
    options : dict
        Keyword arguments.
    call : callable
        What is called.

    Returns
    -------
    tuple of (tuple, dict) or None
        Arguments to replace these; None if there is no closure.
    """
    closure = closure_of(arguments, options)
    if closure is None:
        call()
        return None
    calls = [call]

    def described(*inputs: Any, **more: Any) -> Any:
        loss = closure(*inputs, **more)
        if calls:  # LBFGS comes here several times
            calls.pop()()
        return loss

    # put where the closure was, as a hook's result replaces all arguments
    if len(arguments) > 1:
        return (arguments[0], described, *arguments[2:]), options
    return arguments, {**options, "closure": described}


class TakenGradients:
    """Notice gradients that are gone when they are looked at, though a backward pass has reached the parameter.

    Hooks on the parameters tell; they are removed after the first look that a backward pass has come before.

    Parameters
    ----------
    layers : sequence of (str, torch.Tensor)
        Names and parameters.
    """

    def __init__(self, layers: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._layers = layers
        self._reached: set[int] = set()
        self._warned = False
        reached = self._reached  # alone: a parameter must not keep this alive
        self._handles = _after_backward(layers, lambda p: reached.add(id(p)))

    def forget(self) -> None:
        """Begin a step."""
        self._reached.clear()

    def warn(self, has_gradient: bool) -> None:
        """Warn, once, of parameters whose gradient is gone, or if none has any.

        Parameters
        ----------
        has_gradient : bool
            Whether any parameter has a gradient.
        """
        # reached and gone: an unused parameter was not reached, and is none of these
        taken = [name for name, p in self._layers if p.grad is None and id(p) in self._reached]
        if taken:
            self._say(
                f"a monitor finds no gradient of {several(taken)}, which a backward pass has reached: an optimizer in "
                "the backward pass has taken it, or it was set to None before; it is left out of all numbers"
            )
        elif not has_gradient:
            self._say(
                "a monitor finds no gradient at all, and has nothing to describe: call step() after backward(), before "
                "gradients are set to None"
            )
        # one backward pass shows how the training works: no step pays for the hooks after that
        if self._reached:
            self.stop()

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._reached.clear()

    def _say(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warn(message)


class SteppedGradients:
    """Notes the gradients that an optimizer's step begins with: until the next backward pass they stay as they are.

    Parameters
    ----------
    parameters : sequence of torch.Tensor
        Parameters of the optimizer, or some of them.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._noted: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def note(self) -> None:
        """Note the gradients that there are."""
        self._noted = [(weakref.ref(gradient), version(gradient)) for gradient in self._present()]

    def forget(self) -> None:
        """Forget them: who swaps a module's gradients may hold no reference to them."""
        self._noted = []

    def stand(self) -> bool:
        """Tell whether these, and no others, are there, untouched: one backward pass may reach others than the last."""
        now = self._present()
        return len(now) == len(self._noted) > 0 and all(
            noted() is gradient and before == version(gradient)
            for (noted, before), gradient in zip(self._noted, now, strict=True)
        )

    def _present(self) -> list[torch.Tensor]:
        # those of frozen parameters are older
        return [p.grad for p in self._parameters if p.requires_grad and p.grad is not None]


class GoneOptimizer:
    """Warn, once, of a backward pass after an optimizer is gone: another has taken its place, without our hooks.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer, in whatever wrappers.
    layers : sequence of (str, torch.Tensor)
        Names and parameters.
    follower : object
        What follows the optimizer, and is kept alive by nothing here: without it nobody is warned.
    """

    def __init__(
        self, optimizer: Any, layers: Sequence[tuple[str, torch.Tensor]], follower: object
    ) -> None:
        self._layers, self._follower = layers, weakref.ref(follower)
        self._handles: list[RemovableHandle] = []
        self._end = weakref.finalize(innermost_optimizer(optimizer), self._watch)
        self._end.atexit = False

    def remove(self) -> None:
        """Watch no longer."""
        self._end.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self) -> None:
        # a training that is over has no backward pass any more, and its optimizer may go
        self._handles = _after_backward(self._layers, self._reached)

    def _reached(self, _: torch.Tensor) -> None:
        self.remove()
        if self._follower() is not None:
            warn(
                "the optimizer of a monitor is gone, and training goes on with another: it describes no more steps; "
                "make a monitor for the new one"
            )


def _after_backward(
    layers: Sequence[tuple[str, torch.Tensor]], call: Callable[[torch.Tensor], object]
) -> list[RemovableHandle]:
    """Have every parameter call something when a backward pass has left a gradient."""
    hooks: list[Any] = [p.register_post_accumulate_grad_hook for _, p in layers]
    return [register(call) for register in hooks]
