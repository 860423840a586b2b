"""Pseudo-gradients of local steps, exchange by exchange."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from capture.recorder import Contents, Phase, Recorder
from capture.states import usual_kinds
from capture.taps.layout import Layout
from capture.taps.shards import Sharding
from capture.taps.tap import Tap, check_no_hook
from gradstats.hooks import LocalSteps
from gradstats.hooks.gradient import Pair
from gradstats.trace import Kind

__all__ = ["ExchangeTap"]


class ExchangeTap(Tap):
    """Record what local steps exchange; a step of the trace is an exchange of all fragments.

    Parameters
    ----------
    recorder : Recorder
        What records.
    layout : Layout
        Captured parameters.
    kinds : sequence of Kind, optional
        Kinds to capture.
    owner : object
        Capture that is kept alive as long as the local steps call the tap.
    local_steps : LocalSteps
        The local steps.
    sharding : Sharding, optional
        What this rank holds of a sharded model.
    ddp : weak reference to DistributedDataParallel, optional
        DDP model that the capture was given.
    """

    def __init__(
        self,
        recorder: Recorder,
        layout: Layout,
        kinds: Sequence[Kind] | None,
        owner: object,
        local_steps: LocalSteps,
        sharding: Sharding | None = None,
        ddp: weakref.ref[DistributedDataParallel] | None = None,
    ) -> None:
        super().__init__(recorder, layout, kinds, local_steps)
        self._owner = owner
        self._local_steps = local_steps
        self._sharding = sharding
        self._ddp = ddp
        self._loss: float | torch.Tensor | None = None
        self._learning_rate: float | None = None
        self._participants: set[int] = set()  # parameters exchanged in the interval

    def before(self, pairs: Sequence[Pair]) -> None:
        """Copy the pseudo-gradients of a fragment; the first one of an interval begins a step.

        Parameters
        ----------
        pairs : sequence of (parameter, pseudo-gradient)
            What the fragment is about to exchange.
        """
        recorder = self._recorder
        if not recorder.active:
            return
        # fragments take turns: those of an interval are one step of the trace
        if recorder.phase is Phase.IDLE:
            self._participants.clear()
            self._begin(recorder.wanted())
        if not recorder.arrays:
            return
        corrects = "corrected" in recorder.arrays
        places = self._places
        for parameter, pseudogradient in pairs:
            # before the place is looked for: what is exchanged is not absent, wherever it lies
            self._participants.add(id(parameter))
            slot = places.get(id(parameter))
            if slot is None:
                self._note_absent(parameter)
                continue
            if slot.start == slot.stop:  # another rank's
                continue
            # differences of parameters carry no loss scale
            recorder.copy("pseudogradient", slot, pseudogradient, 1.0)
            if corrects:
                corrected = self._state.corrected(parameter, pseudogradient)
                recorder.copy("corrected", slot, corrected, 1.0)
            # the optimizer has used it, and so it is unscaled
            recorder.put("gradient", slot, parameter, 1.0)

    def after(self) -> None:
        """Commit the step: the last fragment of the interval has been exchanged."""
        if self._recorder.phase is not Phase.IDLE:
            self._recorder.sent()
            self._conclude(self._loss, self._learning_rate)
        # those of an interval are not those of the next
        self._loss = self._learning_rate = None

    def end(
        self,
        model: torch.nn.Module | None,
        loss: float | torch.Tensor | None,
        learning_rate: float | None,
    ) -> None:
        """Keep loss and learning rate of a local step, in case it ends an interval."""
        self._loss, self._learning_rate = loss, learning_rate

    def check(self) -> None:
        """Refuse a hook that was registered after the capture was made."""
        check_no_hook(self._ddp)
        if self._sharding is not None:
            self._sharding.check()

    @property
    def _places(self) -> Mapping[int, slice]:
        return self._layout.slots if self._sharding is None else self._sharding.places

    def _mark_absent(self) -> None:
        """Mark what no fragment has, as each rank trains it alone, and what was exchanged before the capture began."""
        apart: list[str] = []
        before: list[str] = []
        for name, parameter in zip(self._layout.names, self._layout.parameters, strict=True):
            if id(parameter) not in self._participants:
                self._recorder.absent(self._places[id(parameter)])
                (before if self._local_steps.holds(parameter) else apart).append(name)
        self._absent(apart, "the local steps do not exchange them")
        self._absent(
            before,
            "the capture began within an interval, after the exchange of this part; later steps have it",
        )

    def contents(self) -> Contents:
        """Return what this rank writes: pseudo-gradients are added to what the local steps' memory suggests."""
        kinds = self._kinds or (*usual_kinds(self._state), "pseudogradient")
        contents = self._contents(kinds)
        return contents if self._sharding is None else self._sharding.part(contents)
