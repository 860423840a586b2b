"""What optimizers apply: parameters before their steps, less those after."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from capture.copies import Copies, Values
from gradstats.errors import InputError, several
from gradstats.hooks.optimizers import closure_of, parameters_of
from gradstats.hooks.torch_private import backward_pass, has_step_hooks, innermost_optimizer
from gradstats.hooks.units import local_part
from gradstats.trace import Kind
from gradstats.trace.format import OF_PARAMETERS

__all__ = ["Updates", "optimizers_of"]


def optimizers_of(optimizer: Any, kinds: Sequence[Kind] | None) -> list[torch.optim.Optimizer]:
    """Return the optimizers behind what a user gave, unwrapped.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer, sequence of them, or None
        The option ``optimizer``.
    kinds : sequence of Kind, optional
        Kinds to capture.

    Returns
    -------
    list of torch.optim.Optimizer
        Empty if none is needed.

    Raises
    ------
    InputError
        If kinds need one and there is none, or the other way around, or it has no hooks.
    """
    needed = [kind for kind in OF_PARAMETERS if kind in (kinds or ())]
    if not needed and optimizer is None:
        return []
    names = " and ".join(OF_PARAMETERS)
    if optimizer is None:
        raise InputError(
            f"kind {needed[0]!r} is what is there when the optimizer has stepped: give Capture(optimizer=…)"
        )
    if not needed:
        raise InputError(
            f"optimizer= is for the kinds {names}: name them, as in kinds=['gradient', 'update']"
        )
    each_given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [innermost_optimizer(each) for each in each_given]
    for each in optimizers:
        if not has_step_hooks(each):
            raise InputError(
                f"optimizer= takes torch.optim.Optimizers, and {type(each).__name__} has none of their hooks"
            )
    if not optimizers:
        raise InputError("optimizer= is an empty list: give the optimizers of the model")
    return optimizers


class Updates:
    """Copy parameters before optimizers step, and write what the steps take off them into a step of the trace.

    The optimizers' steps belong to the step of the trace whose gradient they follow: the one in progress, or the one
    that is over since ``capture.step()``, whose snapshot then waits for them.

    Parameters
    ----------
    optimizers : sequence of torch.optim.Optimizer
        Optimizers, without wrappers.
    layers : tuple of (list of str, list of torch.Tensor)
        Names of the captured parameters, and the parameters.
    places : mapping of int to slice
        Places in the flat vector of what this rank holds, by the identity of the parameter.
    fired : callable
        Tells whether a backward pass has reached the parameters since the last end of a step.

    Attributes
    ----------
    complete : bool
        Whether every optimizer has stepped since the step of the trace began.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        layers: tuple[list[str], list[torch.Tensor]],
        places: Mapping[int, slice],
        fired: Callable[[], bool],
    ) -> None:
        self._optimizers = list(optimizers)
        self._layers, self._places, self._fired = layers, places, fired
        if not self._held() & {id(p) for p in layers[1]}:
            raise InputError(
                "the optimizer holds none of the captured parameters: make it of the model as it is now"
            )
        self._arrays: Mapping[Kind, Values] | None = None
        self._copies = Copies()
        self._state = _State()
        self._handles: list[Any] = []

    def start(
        self,
        opens: weakref.WeakMethod[Callable[[], None]],
        submits: weakref.WeakMethod[Callable[[], None]],
        warns: Callable[[str, str], None],
    ) -> None:
        """Put hooks on the optimizers.

        Parameters
        ----------
        opens : weak reference to a method
            Called where the optimizer's step may come before the end of its step of the trace, which then begins.
        submits : weak reference to a method
            Called when a snapshot that waits is complete.
        warns : callable
            Takes what a warning is about, and the warning.
        """
        self._opens, self._submits, self._warns = opens, submits, warns
        # weakly: optimizers outlive a capture, and would keep its buffers
        before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(_Weak(before)))
            self._handles.append(optimizer.register_step_post_hook(_Weak(after)))
        # of every optimizer of the process: one that took the place of those given
        others = _Weak(weakref.WeakMethod(self._note_other))
        self._handles.append(register_optimizer_step_post_hook(others))

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def complete(self) -> bool:
        """Whether every optimizer has stepped since the step of the trace began."""
        return self._state.stepped >= {id(each) for each in self._optimizers}

    def begin(self, arrays: Mapping[Kind, Values] | None, copies: Copies) -> None:
        """Begin a step of the trace.

        Parameters
        ----------
        arrays : mapping, optional
            Where its values go; None if it is not recorded.
        copies : Copies
            What copies to them.
        """
        self.clear()
        self._state.open = True
        self._arrays, self._copies = arrays, copies
        # over all steps: close() warns only if updates were to be written at all
        self._state.recorded |= arrays is not None
        for optimizer in self._optimizers:  # a closure computes the gradient within the step
            if id(optimizer) in self._state.within:
                self._take(optimizer)

    def end(self) -> None:
        """End the step of the trace: its optimizers' steps may still come."""
        self._state.open = False

    def clear(self) -> None:
        """Forget the copies."""
        self._arrays = None
        self._state = self._state.next()

    def finish(self) -> None:
        """Write what no step has changed: updates of zero, and the parameters as they are."""
        arrays = self._arrays
        if arrays is not None:
            held, lost = self._held() - self._state.elsewhere, []
            for name, parameter in zip(*self._layers, strict=True):
                if id(parameter) in self._state.settled:
                    continue
                # copied before an optimizer's step that did not end: what it has changed until then
                if id(parameter) in self._state.before:
                    self._settle(parameter)
                    continue
                place, now = self._places[id(parameter)], local_part(parameter.detach())
                if "update" in arrays:
                    # its optimizer took no step, as where GradScaler skips one: nothing was applied
                    arrays["update"][place] = 0 if id(parameter) in held else torch.nan
                # a rank may hold nothing of a sharded parameter
                if "weight" in arrays and place.stop > place.start:
                    self._copies.copy(now, arrays["weight"][place])
                if id(parameter) not in held:
                    lost.append(name)
            if lost and "update" in arrays:
                self._warns(
                    "held",
                    f"the updates of {several(lost)} are NaN in the trace: no "
                    "optimizer that the Capture was given holds them, or another one stepped in its place",
                )
        self.clear()

    def close(self) -> None:
        """Unhook; warn if no optimizer has ever stepped."""
        self.stop()
        if self._state.recorded and not self._state.ever:
            self._warns(
                "never",
                "the optimizers that the Capture was given took no step: the updates in the trace are zeros",
            )

    def _held(self) -> set[int]:
        return {id(p) for each in self._optimizers for p in parameters_of(each)}

    def _before(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        """Copy what the optimizer is about to change, if it is of a step that is recorded."""
        state = self._state
        state.within.add(id(optimizer))
        closure = closure_of(arguments, options) is not None
        stepped = id(optimizer) in state.stepped
        if not state.open:
            # an optimizer in the backward pass may step before any hook of the watch
            fired = self._fired() or backward_pass() >= 0
            if not (fired or closure):
                state.later = True
            opens, waits = self._opens(), self._arrays is not None
            # a backward pass since capture.step() is of the next step of the trace, unless steps come after that
            new = not state.later if fired else closure and (not waits or stepped)
            if new and opens is not None:
                opens()
            elif not waits or stepped:
                # every optimizer has stepped, and this is one step more
                if state.done and not fired:
                    self._warns(
                        "again",
                        "an optimizer stepped again without a backward pass in between: what it applied is in no step "
                        "of the trace",
                    )
                return
        self._take(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Write what the optimizer's step has taken off the parameters."""
        state = self._state
        state.within.discard(id(optimizer))
        state.ever = True
        # not recorded, or an optimizer of other parameters
        if self._arrays is None or not any(id(p) in state.before for p in parameters_of(optimizer)):
            return
        for parameter in parameters_of(optimizer):
            if id(parameter) in state.before:
                self._settle(parameter)
        state.stepped.add(id(optimizer))
        submits = self._submits()
        # capture.step() came before, and this was the last optimizer's step:
        # nothing more belongs to the step of the trace
        if not state.open and self.complete and submits is not None:
            submits()
            # of the new state: submits() has ended the one above
            self._state.done = True

    def _note_other(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note what an optimizer that the capture was not given has stepped."""
        if self._arrays is not None and optimizer not in self._optimizers:
            self._state.elsewhere.update(map(id, parameters_of(optimizer)))

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        if self._arrays is None:
            return
        for parameter in parameters_of(optimizer):
            if id(parameter) in self._places:
                # a further step before the next gradient: what is written is out of date
                self._state.settled.discard(id(parameter))
                # the first copy stays, for several steps are one update
                if id(parameter) not in self._state.before:
                    copied = "update" in self._arrays
                    part = local_part(parameter.detach())
                    # weights are read after the step, and need no copy
                    self._state.before[id(parameter)] = part.clone() if copied else part

    def _settle(self, parameter: torch.Tensor) -> None:
        """Write update and weight of one parameter as they are now."""
        place, now = self._places[id(parameter)], local_part(parameter.detach())
        assert self._arrays is not None
        if place.stop > place.start:
            if "update" in self._arrays:
                update = self._state.before[id(parameter)] - now
                self._copies.copy(update, self._arrays["update"][place])
            if "weight" in self._arrays:
                self._copies.copy(now, self._arrays["weight"][place])
        self._state.settled.add(id(parameter))


class _State:
    """Where the optimizers are in the step of the trace."""

    def __init__(self) -> None:
        self.within: set[int] = set()  # optimizers in their step()
        self.recorded = False  # whether any step was to be
        self.ever = False  # whether any optimizer has stepped
        self.later = False  # whether they step after capture.step()
        self.open = False  # whether the step of the trace is in progress
        self.done = False  # whether the last one was complete
        self.stepped: set[int] = set()
        self.elsewhere: set[int] = set()  # parameters that other optimizers have stepped
        self.before: dict[int, torch.Tensor] = {}
        self.settled: set[int] = set()  # parameters whose values are written

    def next(self) -> _State:
        """Return the state at the beginning of another step of the trace."""
        state = _State()
        # what is known of the training goes on; `within` is the same set, for a closure may begin a step of the trace
        state.within, state.recorded = self.within, self.recorded
        state.ever, state.later = self.ever, self.later
        return state


class _Weak:
    """A hook that does not keep the capture alive."""

    def __init__(self, method: weakref.WeakMethod[Callable[..., None]]) -> None:
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        alive = self._method()
        if alive is not None:
            alive(*arguments)
