"""The optimizers of local steps, as one: a local step is over when each of them has stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradstats.errors import InputError
from gradstats.hooks.checkpoint import pack_optimizer, unpack_optimizer
from gradstats.hooks.contents import field
from gradstats.hooks.fragment import Named
from gradstats.hooks.optimizers import closure_of, parameters_of
from gradstats.hooks.torch_private import backward_pass, innermost_optimizer
from gradstats.primitives.ratio import shown

__all__ = ["LocalOptimizers"]


class LocalOptimizers:
    """Optimizers that together train a model.

    Parameters
    ----------
    optimizers : torch.optim.Optimizer or sequence of torch.optim.Optimizer
        What the user gave.
    named : list of (str, torch.Tensor)
        Names and parameters of the model that are trained.
    outer : torch.optim.Optimizer
        Optimizer of the exchanges, which steps in between.

    Attributes
    ----------
    each : list of torch.optim.Optimizer
        The optimizers.

    Raises
    ------
    InputError
        If one is none.
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        named: Named,
        outer: torch.optim.Optimizer,
    ) -> None:
        entries = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        # one given twice, as with a wrapper of it, is one
        self.each = list({id(o): o for o in map(innermost_optimizer, entries)}.values())
        # an empty list has no optimizer either, and is refused alike
        for one in self.each or [None]:
            if not isinstance(one, torch.optim.Optimizer):
                raise InputError(
                    f"optimizer must be a torch.optim.Optimizer, or a list of them, not {shown(one)}"
                )
        self._named = named
        self._outer = outer
        self._stepped: set[int] = set()
        self._uncounted = 0
        self._handles: list[Any] = []

    @property
    def attached(self) -> bool:
        """Whether steps are counted."""
        return bool(self._handles)

    def attach(
        self,
        before: Callable[[], None],
        after: Callable[[], None],
        most: int,
        averages: bool = False,
    ) -> None:
        """Call functions around local steps.

        Parameters
        ----------
        before : callable
            Called before the first optimizer's step.
        after : callable
            Called when each optimizer has stepped, in whatever order.
        most : int
            Steps that another optimizer may take of these parameters while none of these steps.
        averages : bool
            Whether `before` averages the gradients.

        Raises
        ------
        InputError
            If they are averaged, out of an optimizer's step, not here: where that has a closure, which computes others
            in it, or where a backward pass came after the average.
        """
        late: set[int] = set()

        def begin(
            optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]
        ) -> None:
            if averages and closure_of(arguments, options) is not None:
                raise InputError(
                    "steps=1 averages gradients before the optimizer's step, and a closure computes others in it: "
                    "call closure() and then step() without it, or use DDP"
                )
            if averages and backward_pass() >= 0:
                raise InputError(
                    f"steps=1 averages gradients before the first optimizer's step, and {type(optimizer).__name__} "
                    "steps within the backward pass: step after it, or use DDP"
                )
            if not self._stepped:
                before()
                late.clear()
            elif not late.isdisjoint(id(p) for p in parameters_of(optimizer)):
                raise InputError(
                    "steps=1 averages gradients before the first optimizer's step, and a backward pass for "
                    f"{type(optimizer).__name__} came after that: each optimizer steps once after all backward passes, "
                    "or use DDP"
                )

        def end(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self._uncounted = 0
            self._stepped.add(id(optimizer))
            if len(self._stepped) == len(self.each):
                # first: if the exchange raises, the next local step begins anew
                self._stepped.clear()
                after()

        # an error may have ended the last block between two optimizers
        self._stepped.clear()
        self._uncounted = 0
        for each in self.each:
            self._handles += [
                each.register_step_pre_hook(begin),
                each.register_step_post_hook(end),
            ]
        if averages:
            self._handles += [
                p.register_post_accumulate_grad_hook(lambda p: late.add(id(p)))  # type: ignore[no-untyped-call]
                for _, p in self._named if p.requires_grad
            ]  # fmt: skip
        # of every optimizer of the process: hooks on those given would not see another one step
        self._handles.append(register_optimizer_step_post_hook(lambda o, *_: self._refuse(o, most)))

    def detach(self) -> None:
        """Call nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _refuse(self, optimizer: torch.optim.Optimizer, most: int) -> None:
        """Raise if an optimizer that is none of these trains what these do not, or in place of them."""
        if optimizer is self._outer or optimizer in self.each:
            return
        ours = {id(p) for each in self.each for p in parameters_of(each)}
        stepped = {id(p) for p in parameters_of(optimizer)}
        # one that trains the same parameters beside these takes nothing from the exchange, as a wrapper's steps do
        if not ours.isdisjoint(stepped):
            self._uncounted += 1
        if self._uncounted > most:
            kind = type(optimizer).__name__
            raise InputError(
                f"{self._uncounted} steps of {kind}, which LocalSteps was not given, and none of its own optimizer: "
                "nothing is exchanged. Make a new LocalSteps with the optimizer that trains now"
            )
        theirs = stepped - ours
        name = next((name for name, p in self._named if id(p) in theirs), None)
        if name is not None:
            kinds = ", ".join(type(each).__name__ for each in (*self.each, optimizer))
            raise InputError(
                f"{type(optimizer).__name__} trains {name}, and LocalSteps counts other optimizers' steps: give it all "
                f"of them, LocalSteps(model, [{kinds}], …)"
            )

    def pack(self) -> dict[str, bytes]:
        """Return what a checkpoint holds of them."""
        return {_key(i): pack_optimizer(each) for i, each in enumerate(self.each)}

    def unpack(self, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what :meth:`pack` made bytes of, for each optimizer's ``load_state_dict()``.

        Parameters
        ----------
        saved : mapping
            A checkpoint with the entries of :meth:`pack` among others.

        Raises
        ------
        InputError
            If it is of other optimizers, or damaged.
        """
        # as many numbers as keys: there cannot be more optimizers in it
        there = sum(_key(i) in saved for i in range(len(saved)))
        if there != len(self.each):
            raise InputError(
                f"the checkpoint is of {there} optimizers, and these are {len(self.each)}"
            )
        return [
            unpack_optimizer(each, field(saved, _key(i), bytes), "optimizer")
            for i, each in enumerate(self.each)
        ]


def _key(number: int) -> str:
    return f"optimizer{number + 1}" if number else "optimizer"
