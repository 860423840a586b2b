"""Gradients of DDP on their way into a wrapped communication hook, bucket by bucket."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from capture.recorder import Phase, Recorder, warn
from capture.states import ObservedState, corrected_run, observe, scaler_of
from capture.taps.accumulation import Accumulation
from capture.taps.layout import Layout
from capture.taps.tap import SCALED, Tap
from capture.taps.watch import BackwardWatch
from gradstats.errors import InputError
from gradstats.hooks.applied import Applied
from gradstats.hooks.gradient import Pair, logical, pairs_of
from gradstats.hooks.torch_private import (
    NESTED,
    GradBucket,
    backward_pass,
    comm_hooks,
    copy_all,
    nested_backward,
)
from gradstats.trace import Kind

__all__ = ["BucketTap", "Hook"]

Hook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_CARRIED = (
    "gradients are exchanged several times a step, after each of its backward passes: the gradient recorded is the sum "
    "of this rank's own, and 'corrected' is what the last exchange compressed, which contains what the others brought "
    "from all ranks; exchange once a step (ddp.no_sync() around all but the last forward and backward pass)"
)
_UNAPPLIED = (
    "no optimizer took the gradients of an exchange before others replaced them (a skipped step, the generator's pass "
    "through a discriminator, the first pass of SAM): such an exchange is no step of the trace, unless capture.step() "
    "comes right after it"
)
_LATE = (
    "a backward pass adds to gradients that an optimizer has taken already (the generator's pass through a "
    "discriminator), and is no part of the step that is recorded"
)
_REPLACED = (
    "the model's parameters are others than those that DDP exchanges; wrap the model in DDP anew"
)
_UNSEEN = "a backward pass reached them, and DDP did not give them to the hook"


# Size: three trainings end a step differently (a call, an optimizer's hook, an update seen late), with a flag each.
class BucketTap(Tap):
    """Record what goes into a communication hook, if the hook's exchange succeeds.

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
        The model in DDP, if the capture was given that.
    state : object
        State of the hook.
    hook : callable
        The hook.
    """

    def __init__(
        self,
        recorder: Recorder,
        layout: Layout,
        kinds: Sequence[Kind] | None,
        watch: BackwardWatch,
        ddp: weakref.ref[DistributedDataParallel] | None,
        state: Any,
        hook: Hook,
    ) -> None:
        super().__init__(recorder, layout, kinds, state)
        self._watch = watch
        self._ddp = ddp
        self._hook = hook
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._copies: dict[int, _BucketCopy] = {}
        self._participants: set[int] = set()  # parameters in the buckets of a step that is recorded
        # parameters that the backward passes of the step have reached
        self._reached: set[int] = set()
        # those of a pass under way, and of passes before it that exchanged nothing
        self._passing: set[int] = set()
        self._accumulation = Accumulation(layout.parameters)
        self._applied = Applied()
        self._applied.watch(layout.parameters)
        self._late = False  # the pass adds to a gradient that an optimizer has taken
        self._follows_update = False  # the step began with a pass after an optimizer's step
        self._user_ends = False  # whether capture.step() is ever called
        self._called = False  # whether the hook was ever called
        self._passed = 0  # backward passes that ended without the hook
        if recorder.scaler is None:
            recorder.scaler = scaler_of(state)
        if recorder.active:
            watch.show(layout.parameters, self)

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Copy a bucket, and give it to the hook.

        Parameters
        ----------
        bucket : GradBucket
            What DDP gives; the first one of an iteration begins a step, unless it adds to gradients that were exchanged
            before and stand as they were.

        Returns
        -------
        torch.futures.Future
            What the hook returned.
        """
        if backward_pass() < 0 and self._ddp is not None:
            # a rank without inputs left takes part in the others' exchanges (Join): it has no gradient, nor a step
            return self._hook(self._state, bucket)
        try:
            # before the copy: where there is no step in progress there is nowhere to copy to
            if self._accumulation.exchange(bucket):
                self._begin_step()
            self._check_sync()
            if not self._recorder.active:  # it has stopped, and gives its memory back
                self._copies.clear()
            # before the hook, which may change the bucket in place
            if self._recorder.arrays and not self._late:
                self._copy(bucket)
            future = self._hook(self._state, bucket)
            if isinstance(future, torch.futures.Future):
                self._futures.append(future)
            if bucket.is_last():
                self._recorder.sent()
        # Ctrl-C, too: a step that is cut short must not be recorded
        except BaseException:
            self._recorder.drop()
            self._futures.clear()
            # what .grad holds is not the result of an exchange
            self._accumulation.exchanged = False
            raise
        return future

    def see(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Look at what a backward pass is about to add to a parameter's ``.grad``.

        Where that holds the result of an exchange, the bucket will hold the sum of both, and this rank's own gradient
        is seen here alone.

        Parameters
        ----------
        parameter, gradient : torch.Tensor
            A captured parameter, and what is added.
        """
        # once a pass, at the first parameter that it reaches
        if self._accumulation.enter(self._leave):
            ended = self._recorder.phase is Phase.IDLE  # by the user, in between
            # an optimizer has taken the step in progress, which only one that was seen can tell
            taken = not ended and self._applied.known and self._applied.stepped
            # a user who ends steps would have ended this one: the pass belongs to none. Else it begins the next
            self._late = taken and self._user_ends
            if self._late:
                self._recorder.warn_once(_LATE, _LATE)
            elif ended or taken:
                self._begin_step()
                self._follows_update = taken
                # the buffer holds an earlier step, and gradients are added to it
                for array in self._recorder.arrays.values():
                    array[...] = 0
            else:
                # the step goes on: DDP sends its sum again
                self._recorder.reopen()
        self._passing.add(id(parameter))
        if self._accumulation.carried and not self._late:
            slot = self._layout.slots.get(id(parameter))
            if slot is not None:
                self._recorder.add("gradient", slot, gradient)

    def _leave(self) -> None:
        """End a backward pass that did not fail."""
        if self._accumulation.leave():
            recorder = self._recorder
            if recorder.active and recorder.phase is Phase.OPEN and nested_backward():
                recorder.drop()
                recorder.stop(InputError(NESTED))
            self._reached |= self._passing
            self._passing.clear()
            if recorder.phase is Phase.OPEN:
                recorder.sent()  # DDP may have skipped its last buckets

    def end(
        self,
        model: torch.nn.Module | None,
        loss: float | torch.Tensor | None,
        learning_rate: float | None,
    ) -> None:
        """Commit the step with its loss and learning rate."""
        self._user_ends = True
        # the last backward pass ended without an exchange, under no_sync: more is to come
        goes_on = self._recorder.phase is Phase.OPEN and self._accumulation.ended
        if self._recorder.phase is not Phase.IDLE and not goes_on:
            if self._unapplied and self._follows_update:
                # the step that it is the end of was committed when this pass began
                self._drop(_LATE)
            else:
                self._conclude(loss, learning_rate)
        elif not self._watch.fired:
            self._recorder.misplaced()
        else:  # a backward pass under no_sync: the step goes on; or one that failed
            self._passed += 1
        # without parameters: DDP's buckets tell new gradients from old, not the watch
        self._watch.restart(())

    def check(self) -> None:
        """Refuse a DDP model on which something else than the wrapped hook is registered."""
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None:
            return
        hooks = comm_hooks(ddp)
        # without any hook only once a pass has run: until then it may still be registered
        if (not hooks and self._watch.fired) or any(
            # a capture that this one wraps has the same hook as this one itself
            hook is self._hook and (state is self._state or not hasattr(self._state, "wrap"))
            for hook, state in hooks
        ):
            name = getattr(self._hook, "__name__", "hook")
            raise InputError(
                "the hook that capture.wrap() returned is not registered on the DDP model: write "
                f"ddp.register_comm_hook(*capture.wrap(state, {name}))"
            )

    def close(self) -> None:
        """End the step in progress; warn if the hook was never called."""
        super().close()
        if self._passed and not self._called:
            path = self._recorder.storage.path
            warn(
                f"{path}: the hook that capture.wrap() returned saw no gradient in {self._passed} backward passes: "
                "give the Capture the DDP model, and register the hook on it"
            )

    def _begin_step(self) -> None:
        # the user did not end the last step, or it failed
        if self._recorder.phase is not Phase.IDLE:
            if self._unapplied:
                self._drop(_UNAPPLIED)
            else:
                self._conclude()
        self._called = True
        if self._applied.scaled and self._recorder.scaler is None:
            self._recorder.warn_once("scaled", SCALED)
        self._reached.clear()
        self._late = self._follows_update = False
        self._applied.begin()
        self._participants.clear()
        self._begin(self._recorder.wanted())

    @property
    def _unapplied(self) -> bool:
        """Whether there is an optimizer, and it has not taken the step in progress."""
        return self._applied.known and not self._applied.stepped

    def finish(self) -> None:
        """End the step in progress, if it is one."""
        if self._recorder.phase is not Phase.IDLE and self._unapplied:
            if self._follows_update:
                self._drop(_LATE)
            else:
                self._drop(_UNAPPLIED)
        super().finish()
        self._copies.clear()  # with the writer's memory: DDP holds the hook as long as it lives

    def _drop(self, why: str) -> None:
        """Forget the exchange in progress: it became no step of the optimizer's."""
        self._recorder.warn_once(why, why)
        self._recorder.drop()
        self._futures.clear()

    def _check_sync(self) -> None:
        """Warn of an exchange that the user thinks not to take place."""
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None and not ddp.require_backward_grad_sync:
            self._recorder.warn_once(
                "no_sync",
                "DDP's no_sync() around backward() alone does nothing: gradients are exchanged, and a step is "
                "recorded; put the forward pass into it too",
            )

    def _conclude(
        self, loss: float | torch.Tensor | None = None, learning_rate: float | None = None
    ) -> None:
        super()._conclude(loss, learning_rate)
        self._futures.clear()

    def _arrived(self) -> bool:
        try:
            # value() raises the error of an exchange that failed
            return all(f.done() and [f.value()] for f in self._futures)
        except Exception:  # the training has it already
            return False

    def _mark_absent(self) -> None:
        """Mark what no bucket has shown; what no backward pass reached is zero."""
        replaced = {layer.name for layer, _ in self._layout.replaced()}
        # empty where no pass shows what it reaches, as that of a rank that joins in others' exchanges
        unseen, reached = [], self._reached | self._passing
        for layer, parameter in zip(self._layout.layers, self._layout.parameters, strict=True):
            if layer.name in replaced:
                self._recorder.absent(layer.slice)
            elif id(parameter) in self._participants:
                # DDP's bucket has an earlier step's mean of a part whose turn it is not
                if reached and id(parameter) not in reached:
                    self._recorder.unused(layer.slice, ["gradient"])
            elif id(parameter) in self._reached:
                self._recorder.absent(layer.slice)
                unseen.append(layer.name)
            else:
                # written, because the buffer holds an earlier step
                for array in self._recorder.arrays.values():
                    array[layer.slice] = 0
        self._absent(sorted(replaced), _REPLACED)
        self._absent(unseen, _UNSEEN)
        for parameter in self._layout.named().values():
            # DDP has no bucket for what was unfrozen, or added, after it was made
            if parameter.grad is not None and id(parameter) not in self._layout.slots:
                self._note_absent(parameter)

    def _copy(self, bucket: GradBucket) -> None:
        """Copy a bucket of a step that is recorded."""
        # anew for each bucket, by whose index PowerSGD keeps its residuals
        observed = observe(self._state, bucket)
        self._participants.update(map(id, bucket.parameters()))
        arrays = self._recorder.arrays
        if self._accumulation.carried:  # its gradient was added up on the way
            arrays = {kind: array for kind, array in arrays.items() if kind != "gradient"}
            if arrays:
                self._recorder.warn_once("carried", _CARRIED)
        if self._copy_whole(bucket, observed, arrays):
            return
        # a state that knows the scaler has taken the scale out of what it corrects
        scale = None if scaler_of(self._state) is None else 1.0
        for parameter, gradient in _gradients(bucket):
            slot = self._layout.slots.get(id(parameter))
            if slot is None:
                self._note_absent(parameter)
                continue
            if "gradient" in arrays:
                self._recorder.copy("gradient", slot, gradient)
            if "corrected" in arrays:
                corrected = observed.corrected(parameter, gradient)
                self._recorder.copy("corrected", slot, corrected, scale)

    def _copy_whole(
        self, bucket: GradBucket, observed: ObservedState, arrays: Mapping[Kind, Any]
    ) -> bool:
        """Copy a bucket in few calls, if it can be done; tell whether it was.

        Of a network with many small parameters the calls for each take longer than the memory.
        """
        buffer = bucket.buffer()
        in_memory = all(isinstance(array, np.ndarray) for array in arrays.values())
        # what is left is one copy from memory to memory, without a scale
        if not in_memory or self._recorder.scale != 1 or buffer.is_sparse:
            return False
        copy = self._copies.get(bucket.index())
        if copy is None or not copy.fits(buffer):
            if bucket.index() == 0:  # DDP has made new buckets, perhaps fewer
                self._copies.clear()
            copy = _BucketCopy(buffer, list(_gradients(bucket)), self._layout.slots)
            self._copies[bucket.index()] = copy
        if not copy.possible:
            return False
        copy.copy(arrays, observed)
        return True


class _BucketCopy:
    """Copy what one of DDP's buckets brings to its places in the trace, in few calls.

    Gradients take one call; what a state compresses of them one for each run of parameters, where the state can say it.
    """

    def __init__(
        self, buffer: torch.Tensor, pairs: Sequence[Pair], slots: Mapping[int, slice]
    ) -> None:
        self._buffer = buffer  # kept, so that no other bucket's can come to have its address
        self._targets: dict[int, tuple[Any, torch.Tensor, list[torch.Tensor]]] = {}
        # elsewhere a device or a conversion is between, or part of the bucket is not captured
        self.possible = (
            buffer.dtype == torch.float32
            and buffer.is_cpu
            and all(id(p) in slots and p.dtype == torch.float32 for p, _ in pairs)
        )
        if self.possible:
            # in the model's order, in which DDP's buckets seldom are
            ordered = sorted(pairs, key=lambda pair: slots[id(pair[0])].start)
            self._sources = [gradient for _, gradient in ordered]
            self._slots = [slots[id(p)] for p, _ in ordered]
            self._runs = list(_runs(ordered, self._slots))

    def fits(self, buffer: torch.Tensor) -> bool:
        """Tell whether a bucket is still the one that this was made for: DDP makes new ones once."""
        return buffer.data_ptr() == self._buffer.data_ptr() and buffer.shape == self._buffer.shape

    def copy(self, arrays: Mapping[Kind, Any], state: ObservedState) -> None:
        """Copy the gradients, and what a state is about to compress of them, to their places in a step's arrays."""
        with torch.no_grad():
            for kind, array in arrays.items():
                if kind != "corrected":
                    copy_all(self._views(array)[1], self._sources)
            if "corrected" not in arrays:
                return
            corrected = self._views(arrays["corrected"])[0]
            gradient = self._views(arrays["gradient"])[0] if "gradient" in arrays else None
            for pairs, place in self._runs:
                parameters, out = [p for p, _ in pairs], corrected[place]
                # the gradient is there already, flat and in the model's order
                if gradient is None or not corrected_run(state, parameters, gradient[place], out):
                    parts = out.split_with_sizes([p.numel() for p in parameters])
                    for pair, part in zip(pairs, parts, strict=True):
                        part.copy_(state.corrected(*pair).reshape(-1))

    def _views(self, array: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return an array as a tensor, and in it the parameters, each of its shape."""
        # the writer's buffers are few and come back in turn: each gets its views once
        if id(array) not in self._targets:
            whole = torch.from_numpy(array)
            views = [
                whole[slot].view(source.shape)
                for slot, source in zip(self._slots, self._sources, strict=True)
            ]
            # with the array, so that its id is not given to another
            self._targets[id(array)] = array, whole, views
        return self._targets[id(array)][1:]


def _runs(pairs: Sequence[Pair], slots: Sequence[slice]) -> Iterator[tuple[Sequence[Pair], slice]]:
    """Yield parameters that follow one another without a gap, and their place."""
    first = 0
    for i, slot in enumerate(slots, 1):
        if i == len(slots) or slots[i].start != slot.stop:
            yield pairs[first:i], slice(slots[first].start, slot.stop)
            first = i


def _gradients(bucket: GradBucket) -> Iterator[Pair]:
    """Yield a bucket's parameters and their gradients, element for element."""
    if bucket.buffer().is_sparse:  # a bucket of its own
        yield bucket.parameters()[0], bucket.buffer().to_dense()
        return
    for parameter, gradient in pairs_of(bucket):
        yield parameter, logical(parameter, gradient.detach())
