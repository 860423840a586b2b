"""What all taps have in common."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from capture.recorder import Contents, Phase, Recorder
from capture.states import Reports, records_steps, step_columns, unnamed, usual_kinds
from capture.taps.layout import Layout
from gradstats.errors import InputError, several
from gradstats.hooks.torch_private import comm_hooks
from gradstats.trace import Kind

__all__ = ["SCALED", "Tap", "check_no_hook"]

SCALED = (
    "a GradScaler calls the optimizer's step, and neither the Capture nor a state that it wraps was given it: the "
    "gradients in the trace are scaled. Pass scaler="
)


def check_no_hook(ddp: weakref.ref[DistributedDataParallel] | None) -> None:
    """Refuse a hook on a DDP model: its gradients would be what the hook left.

    Parameters
    ----------
    ddp : weak reference to DistributedDataParallel, optional
        DDP model of the training, if there is one.

    Raises
    ------
    InputError
        If a communication hook is registered on it.
    """
    model = None if ddp is None else ddp()
    names = [] if model is None else [getattr(h, "__name__", "hook") for h, _ in comm_hooks(model)]
    if names:
        raise InputError(
            f"the DDP model has a communication hook, {names[0]}, and its result would be captured instead of the "
            "gradient: make the Capture first, and register the hook by "
            f"ddp.register_comm_hook(*capture.wrap(state, {names[0]}))"
        )


class Tap(ABC):
    """See a training's gradients, and tell a recorder of each step's beginning and end.

    Parameters
    ----------
    recorder : Recorder
        What records.
    layout : Layout
        Captured parameters.
    kinds : sequence of Kind, optional
        Kinds to capture; what the state suggests if None.
    state : object
        State of the communication hook; None without one.
    """

    def __init__(
        self,
        recorder: Recorder,
        layout: Layout,
        kinds: Sequence[Kind] | None,
        state: Any = None,
    ) -> None:
        self._recorder = recorder
        self._layout = layout
        self._kinds = kinds
        self._state = state
        self._reports = Reports(state)

    @abstractmethod
    def end(
        self,
        model: torch.nn.Module | None,
        loss: float | torch.Tensor | None,
        learning_rate: float | None,
    ) -> None:
        """Take the user's word that a step is over.

        Parameters
        ----------
        model : torch.nn.Module, optional
            Model that has the gradients, if other than the captured one.
        loss : float or torch.Tensor, optional
            Loss of the step.
        learning_rate : float, optional
            Learning rate of the step.
        """

    def before_update(self) -> None:  # noqa: B027
        """Take note that an optimizer is about to step, before the step of the trace has begun."""

    @abstractmethod
    def check(self) -> None:
        """Refuse a hook that would make the gradients others than the user takes them for.

        Raises
        ------
        InputError
            If there is one.
        """

    def contents(self) -> Contents:
        """Return what this rank writes; asked for once, when the first step is recorded.

        Returns
        -------
        Contents
            Kinds, and what goes with them.

        Raises
        ------
        InputError
            If there are no such kinds here.
        """
        kinds = self._kinds or usual_kinds(self._state)
        if "pseudogradient" in kinds:
            raise InputError(
                "there are pseudo-gradients where local steps are taken: call capture.follow(local_steps)"
            )
        return self._contents(kinds)

    def finish(self) -> None:
        """End the step in progress: the capture is closed."""
        if self._recorder.phase is not Phase.IDLE:
            self._conclude()

    def close(self) -> None:
        """Do the same, and say what was missed."""
        self.finish()

    def _contents(self, kinds: Sequence[Kind]) -> Contents:
        devices = frozenset(p.device for p in self._layout.parameters)
        return Contents(tuple(kinds), devices, records_steps(self._state))

    def _begin(self, wanted: bool) -> None:
        # first: what the state reports from here on is of this step
        self._reports.begin()
        self._recorder.begin(self.contents, wanted)

    def _conclude(
        self, loss: float | torch.Tensor | None = None, learning_rate: float | None = None
    ) -> None:
        """Commit the step if its gradients were sent, and arrived; else drop it."""
        if self._recorder.phase is Phase.SENT and self._arrived():
            columns = {}
            # both go through all layers: only for a step that is written
            if self._recorder.records:
                columns = self._columns()
                self._mark_absent()
            self._recorder.commit(loss, learning_rate, columns)
        else:
            self._recorder.drop()

    def _arrived(self) -> bool:
        """Tell whether the exchange of a step that was sent is over, and well."""
        return True

    def _columns(self) -> dict[str, Any]:
        """Return what the state reports of the step."""
        observed = self._reports.new()
        if observed is None:
            return {}
        if unnamed(observed, self._layout.names):
            self._recorder.warn_once(
                "unnamed",
                "the hook's state numbers its parameters, so that its diagnosis of layers cannot be recorded: "
                "give it named_parameters=model.named_parameters()",
            )
        # the trace's layers: parts of a parameter are unknown to the state, and get NaN
        return step_columns(observed, [layer.name for layer in self._layout.parts.layers])

    def _mark_absent(self) -> None:  # noqa: B027
        """Mark what of a recorded step was not seen, if that is known only at its end."""

    def _absent(self, names: Sequence[str], why: str) -> None:
        """Warn of layers that are marked."""
        if names:
            self._recorder.warn_once(
                f"unseen: {why}",
                f"{several(names)} {'are' if len(names) > 1 else 'is'} NaN in the trace: {why}",
            )

    def _note_absent(self, parameter: torch.Tensor) -> None:
        """Warn of a parameter that the trace has no place for, unless it was left out on purpose."""
        name = self._layout.missing(parameter)
        if name is not None:
            self._recorder.warn_once(
                "absent",
                f"{name} is not captured: it did not require a gradient, or was not there, when the Capture was made",
            )
