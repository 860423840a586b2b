"""Gradients of a loop without a wrapped hook: what is in ``.grad`` when the user ends a step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from capture.recorder import Contents, Phase, Recorder
from capture.taps.layout import Layout, module_of
from capture.taps.tap import SCALED, Tap, check_no_hook
from capture.taps.watch import BackwardWatch
from gradstats.errors import InputError
from gradstats.hooks.applied import Applied
from gradstats.hooks.torch_private import has_unscaled
from gradstats.trace import Kind, Layer

__all__ = ["TAKEN", "PlainTap"]

TAKEN = (
    "a backward pass reached them, and capture.step() found no gradient: an optimizer in the backward pass has taken "
    "it, or it was set to None before"
)
_GONE = "the model has no parameter of that name and shape any more; make a Capture of the model as it is now"


class PlainTap(Tap):
    """Record the model's ``.grad`` at :meth:`end`.

    Parameters
    ----------
    recorder : Recorder
        What records.
    layout : Layout
        Captured parameters.
    kinds : sequence of Kind, optional
        Kinds to capture.
    watch : BackwardWatch
        Tells whether a backward pass has reached the parameters.
    ddp : weakref to DistributedDataParallel, optional
        The model in DDP, if it is; no hook may be registered on it.
    state : object
        What remembers and reports; None where nothing does.
    """

    def __init__(
        self,
        recorder: Recorder,
        layout: Layout,
        kinds: Sequence[Kind] | None,
        watch: BackwardWatch,
        ddp: weakref.ref[DistributedDataParallel] | None = None,
        state: Any = None,
    ) -> None:
        super().__init__(recorder, layout, kinds, state)
        self._watch = watch
        self._ddp = ddp
        self._applied = Applied(watch.note_step)
        self._applied.watch(layout.parameters)
        # whether a step of the trace has ended after the optimizer's
        self._after_steps = False

    def contents(self) -> Contents:
        """Return what this rank writes; nothing corrects a gradient where no hook is known."""
        if self._state is None and "corrected" in (self._kinds or ()):
            raise InputError(
                "corrected is what a hook is about to compress: register capture.wrap(state, hook), or call "
                "shard_hook() before the Capture of a sharded model"
            )
        return super().contents()

    def end(
        self,
        model: torch.nn.Module | None,
        loss: float | torch.Tensor | None,
        learning_rate: float | None,
    ) -> None:
        """Copy the gradients, if there are new ones, and commit the step."""
        recorder, source = self._recorder, self._source(model)
        slots = self._layout.slots
        if source is not self._layout.model:
            slots = self._layout.slots_of(source)
        # of a step that a tap of the exchange has begun, the schedule was asked
        begun = recorder.phase is not Phase.IDLE
        wanted = recorder.records if begun else recorder.wanted()
        # going through the model takes long: only if it is recorded, or if no known
        # parameter was reached, which may have been replaced
        if source is self._layout.model and (wanted or not self._watch.fired):
            self._take_replaced()
            slots = self._layout.slots
        # an optimizer's step has begun it, and no gradient is asked for
        updated = begun and wanted and not recorder.arrays
        if updated or self._has_gradient(source, slots, wanted):
            # before the step begins: it may refuse
            self._check_scaler(not updated)
            try:
                if not begun:
                    self._begin(wanted)
                if recorder.arrays:
                    self._copy(source, slots)
                # there is no exchange to wait for: .grad is its result
                recorder.sent()
                self._conclude(loss, learning_rate)
            except BaseException:
                recorder.drop()
                self._restart(source)  # the next step is another one
                raise
        else:
            recorder.misplaced()
            # a backward pass without a gradient to record: the step counts, for numbers are those of the training
            if self._watch.fired:
                recorder.skip()
            else:
                recorder.drop()  # an optimizer's closure has begun it
        self._restart(source)

    def before_update(self) -> None:
        """Begin the step of the trace: :meth:`end` comes after the optimizer's step."""
        self._begin(self._recorder.wanted())

    def close(self) -> None:
        """End the step in progress, and look for no more steps of optimizers."""
        super().close()
        self._applied.forget()

    def check(self) -> None:
        """Refuse a hook on the DDP model: the gradients would be what it left."""
        check_no_hook(self._ddp)

    def _source(self, model: torch.nn.Module | None) -> torch.nn.Module:
        """Return the model whose gradients are copied."""
        return self._layout.model if model is None else module_of(model)

    def _restart(self, source: torch.nn.Module) -> None:
        """Take note that the gradients which are there now are old."""
        other = () if source is self._layout.model else source.parameters()
        self._watch.restart([*self._layout.parameters, *other])

    def _take_replaced(self) -> None:
        """Go on with the parameters that have taken the place of others: a new head, a layer made anew."""
        adopted = list(self._layout.adopt())
        self._watch.add(adopted)
        self._applied.watch(adopted)

    def _has_gradient(
        self, source: torch.nn.Module, slots: Mapping[int, slice], wanted: bool
    ) -> bool:
        """Tell whether the gradients are of a backward pass since the last step."""
        if source is not self._layout.model:
            # nobody watches its backward passes: what was there at the last end of a step tells old from new
            source_parameters = (
                p for p in source.parameters() if id(p) in slots and p.grad is not None
            )
            return not all(map(self._watch.old, source_parameters))
        parameters = self._layout.parameters
        # values are looked at where they are needed, and not where DDP wrote them after the backward pass
        if self._watch.fired and (not wanted or self._ddp is not None):
            return any(p.grad is not None for p in parameters)
        return self._watch.has_gradient(parameters)

    def _check_scaler(self, gradients: bool) -> None:
        """Refuse gradients that the scaler has unscaled, and warn of scaled ones where there is no scaler to say so."""
        capture_scaler, applied, stepped = self._recorder.scaler, self._applied, self._watch.stepped
        # what is unscaled already would be divided by the scale once more; scaler.update() forgets that it was
        late = gradients and stepped and applied.scaled
        if capture_scaler is not None and (late or has_unscaled(capture_scaler)):
            raise InputError(
                "the scaler has unscaled the gradients: call capture.step() before scaler.unscale_() and "
                "scaler.step(), or give the Capture no scaler"
            )
        self._after_steps |= gradients and stepped
        scaler = applied.scaler if capture_scaler is None else None
        # where steps end after the optimizer's, gradients are unscaled; a step that the scaler skips looks like none
        if scaler is not None and gradients and not self._after_steps and not has_unscaled(scaler):
            self._recorder.warn_once("scaled", SCALED)

    def _copy(self, source: torch.nn.Module, slots: Mapping[int, slice]) -> None:
        """Copy the gradients of a step that is recorded, and mark those that are gone."""
        kinds, is_model = list(self._recorder.arrays), source is self._layout.model
        names, taken, unused = set(), [], []
        named = self._layout.named() if is_model else dict(source.named_parameters())
        for name, parameter in named.items():
            slot = slots.get(id(parameter))
            if slot is None:
                if is_model and parameter.grad is not None:
                    self._note_absent(parameter)
                continue
            names.add(name)
            # a gradient was there and is gone: its place gets NaN, not the zeros of an unused parameter
            if parameter.grad is None and is_model and self._watch.reached(parameter):
                taken.append(name)
                self._recorder.absent(slot)
                continue
            if parameter.grad is not None and is_model and self._unused(parameter):
                unused.append(slot)
                continue
            # also without a gradient: put() then writes zeros
            for kind in kinds:
                self._recorder.put(kind, slot, parameter)
        # last: it waits for the copies that are on their way
        for slot in unused:
            self._recorder.unused(slot)
        self._absent(taken, TAKEN)
        self._mark_gone([layer for layer in self._layout.layers if layer.name not in names])

    def _unused(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter's gradient is of an earlier step: it is frozen, or another part has its turn."""
        # where no backward pass was seen at all, gradients may be set by hand
        if not self._watch.fired or self._watch.reached(parameter):
            return False
        # clipping of the whole model writes to old gradients, too
        return not parameter.requires_grad or self._watch.old(parameter, written=True)

    def _mark_gone(self, layers: Sequence[Layer]) -> None:
        """Mark layers whose parameters the model has no more."""
        for layer in layers:
            self._recorder.absent(layer.slice)
        self._absent([layer.name for layer in layers], _GONE)
