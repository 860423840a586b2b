"""The state of the compression hook: options, the step, and what a checkpoint holds."""

# Size: nearly half of its lines are docstrings of one class, which says every option of the hook.

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from gradstats.compressors import Compressor, Selector, as_compressor
from gradstats.errors import ExchangeError, InputError, NonFiniteGradientError
from gradstats.hooks.agreement import Agreement, as_made, check_applied, described
from gradstats.hooks.applied import Applied
from gradstats.hooks.checkpoint import Checkpoint
from gradstats.hooks.corrections import AdamCorrection, MomentumCorrection
from gradstats.hooks.diagnostics import Diagnosis
from gradstats.hooks.facts import Facts, compressor_text, sent_text
from gradstats.hooks.gradient import FlatGradient, flatten, warm_up_writing
from gradstats.hooks.guard import Guard, NonFinite
from gradstats.hooks.layout import ParameterLayout, check_patterns, warn_of_idle
from gradstats.hooks.leftover import Leftover
from gradstats.hooks.memory import ErrorFeedback, Memory, NoMemory
from gradstats.hooks.notices import Notices
from gradstats.hooks.ratio import RatioSchedule
from gradstats.hooks.step import Scaler, Setup, Step, backed_off, loss_scale
from gradstats.hooks.undo import Undo
from gradstats.hooks.usage import Usage
from gradstats.primitives.backend import backend
from gradstats.primitives.ratio import check_count, check_number
from gradstats.trace.record import StepRecord

__all__ = ["CompressionState"]


# Size: 252 lines are docstrings; a step, what guards it, and checkpoints are objects of other files.
class CompressionState(Facts):
    """State of :func:`gradstats.hooks.compression_hook`: memory, compressor, step. One for every DDP model.

    Parameters
    ----------
    compressor : Compressor or Selector
        How gradients are averaged, or what to send of each (with the exchange that sparse compressors share).
    error_feedback : bool, optional
        Add what was not sent to the next gradient. What the compressor is made for if None.
    memory : Memory, optional
        Other than plain error feedback, such as :class:`gradstats.hooks.MomentumCorrection`, whose momentum densely
        averaged parameters have too.
    named_parameters : iterable of (str, torch.Tensor), optional
        ``model.named_parameters()``. Gives the residuals the names under which they are checkpointed, and the flat
        gradient the model's order. Without it parameters are numbered in the order of the first backward pass.
        Compressors that stream need it.
    dense_below : int
        Parameters with fewer elements are averaged densely, in one message.
    exclude : sequence of str
        Name patterns (``fnmatch``) of parameters to average densely, such as ``"*.bias"`` or an output layer. Needs
        `named_parameters`.
    ratio_at : callable, optional
        Step to ratio, for warm-up (:func:`gradstats.hooks.dgc_warm_up`). 1 is a dense step, None leaves the
        compressor's.
    clip : float, optional
        Local clipping: the gradient of each of n ranks is scaled to a norm of at most clip/√n before it is accumulated
        (DGC). Streaming compressors then send when the backward pass is over and the norm is known.
    weight_decay : float
        Multiple of the parameter added to its gradient before it is accumulated (RedSync, algorithm 4).
    nonfinite : {"raise", "skip", "zero", "propagate"}, optional
        What NaN or infinity on any rank does, on all of them. ``"raise"``: :class:`NonFiniteGradientError`.
        ``"skip"``: the step has an update of zero. ``"zero"``: such elements count as zero. ``"propagate"``: the
        update is infinite, as in dense DDP, so that a loss scaler sees it, skips the step and lowers its scale.
        Memories stay as they were, but for ``"zero"``. If None, ``"propagate"`` with a scaler and ``"raise"``
        without.
    scaler : Scaler, optional
        The ``torch.amp.GradScaler`` of the training. The memory is then kept in unscaled units.
    diagnose_every : int
        In every n-th step, all-reduce the dense gradient too, and compare (:attr:`diagnosis`); 0 for never.
    verify_every : int
        In every n-th step, compare a digest of the update over the ranks before the memory is settled, and raise
        :class:`ExchangeError` on all of them if one has other bits, with its name and that of the parameter; 0 for
        never.
    process_group : torch.distributed.ProcessGroup, optional
        The group to average over: the one DDP was given; the default group if None.
    discard_unapplied : bool
        Whether an update whose gradient was zeroed before any optimizer took it counts as thrown away
        (:meth:`discard`). Pass false if you apply updates without ``optimizer.step()``, such as those of several
        losses together.

    Attributes
    ----------
    step : int
        Number of the next step.
    last : StepRecord or None
        Record of the last step; None before the first.
    diagnosis : Diagnosis or None
        Of the last step diagnosed.
    compressor : Compressor
        How gradients are averaged.
    memory : Memory
        What this rank remembers.

    Raises
    ------
    InputError
        For options that do not go together or are out of range.

    Notes
    -----
    Residuals belong to parameters, not buckets: DDP rebuilds its buckets after the first iteration. They are float32
    (float64 if any parameter is), whatever the default dtype. A complex parameter is compressed as its real view:
    real and imaginary parts are elements of their own. Sparse gradients (``nn.Embedding(sparse=True)``) are averaged
    exactly, without compression. A step that fails (a non-finite gradient, a lost rank) leaves the memory as it was
    before it, and so does, for a parameter, a step in which no rank used it (``find_unused_parameters``).

    A step is an optimizer's step. Of several exchanges into one ``.grad``, as of micro-steps without ``no_sync()``,
    each takes the new part of the gradient, momentum decays once, and the means add up. An exchange whose update no
    optimizer takes is discarded: where a loss scaler skips a step, and where the gradient is zeroed first.
    """

    def __init__(
        self,
        compressor: Compressor | Selector,
        *,
        error_feedback: bool | None = None,
        memory: Memory | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        dense_below: int = 0,
        exclude: Sequence[str] = (),
        ratio_at: Callable[[int], float | None] | None = None,
        clip: float | None = None,
        weight_decay: float = 0.0,
        nonfinite: NonFinite | None = None,
        scaler: Scaler | None = None,
        diagnose_every: int = 0,
        verify_every: int = 0,
        process_group: dist.ProcessGroup | None = None,
        discard_unapplied: bool = True,
    ) -> None:
        # one that is switched off skips no step
        enabled = getattr(scaler, "is_enabled", lambda: scaler is not None)()
        guard = Guard(nonfinite, scaled=enabled)
        exclude = check_patterns(exclude, "exclude")
        if exclude and named_parameters is None:
            raise InputError("excluding parameters by name needs named_parameters")
        made = as_compressor(compressor)
        # here, where it stalls nobody, and not in the first backward pass
        with backend("compiled"):  # whatever reads the gradients: loops are compiled for the rest
            made.warm_up()
        warm_up_writing()
        name = type(made).__name__
        if made.streams and named_parameters is None:
            raise InputError(f"{name} sends layer by layer and needs named_parameters")
        wanted = made.feedback if error_feedback is None else error_feedback
        memory = memory or (ErrorFeedback() if wanted else NoMemory())
        # a momentum needs no residual: where nothing is left over it is compressed by itself
        if not made.feedback and (memory.needs_residual or error_feedback):
            raise InputError(f"{name} leaves no residual to feed back")
        layout = ParameterLayout(check_count(dense_below, "dense_below", 0), exclude)
        weight_decay = check_number(weight_decay, "weight_decay", 0, math.inf, "[)")
        gradient = FlatGradient(layout, memory, weight_decay)
        self.scaler = scaler
        self.step = 0
        self.last: StepRecord | None = None
        self.diagnosis: Diagnosis | None = None
        schedule = RatioSchedule(made, ratio_at)
        # what decides messages or updates: ranks are compared by it, and refused where it differs
        options = {
            "memory": memory,
            "dense_below": dense_below,
            "exclude": exclude,
            "ratio_at": schedule.described(),
            "clip": clip,
            "weight_decay": weight_decay,
            "nonfinite": guard.policy,
            "scaler": scaler is not None,
            "diagnose_every": diagnose_every,
            "verify_every": verify_every,
        }
        texts = [*as_made(made).items()]
        texts += (each for name, value in options.items() for each in described(name, value))
        self._setup = Setup(
            made,
            gradient,
            schedule,
            guard,
            Usage(gradient),
            Leftover(),
            Applied(),
            Checkpoint(made, gradient, process_group),
            None if clip is None else check_number(clip, "clip", 0, math.inf),
            check_count(diagnose_every, "diagnose_every", 0),
            process_group,
            # without a schedule all messages have sizes that the ranks derive from each other's
            Agreement(texts, announces=ratio_at is not None),
            check_count(verify_every, "verify_every", 0),
        )
        self._current: Step | None = None
        self._discard_unapplied = discard_unapplied
        # to take the last exchange back, and to take back the one in progress once it is over
        self._undo: Undo | None = None
        self._before: Undo | None = None
        self._notices = Notices()
        if named_parameters is not None:
            named = list(named_parameters)
            self._setup.add(named)
            warn_of_idle(exclude, [name for name, _ in named])

    def _facts(self) -> dict[str, str]:
        memory = type(self.memory).__name__ if self.error_feedback else "none"
        return {
            "compressor": compressor_text(self.compressor),
            "memory": memory,
            "next step": str(self.step),
            "sent": sent_text(self.last),
        }

    @property
    def compressor(self) -> Compressor:
        """How gradients are averaged."""
        return self._setup.compressor

    @property
    def memory(self) -> Memory:
        """What this rank remembers."""
        return self._setup.gradient.memory

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group to average over; None for the default group."""
        return self._setup.process_group

    @property
    def agreement(self) -> Agreement:
        """What all ranks must agree on. The hook's."""
        return self._setup.agreement

    @property
    def nonfinite(self) -> NonFinite:
        """What a gradient that is not finite does."""
        return self._setup.guard.policy

    @property
    def in_progress(self) -> Step | None:
        """The step in progress, if there is one. The hook's."""
        return self._current

    @property
    def current(self) -> Step:
        """The step in progress; one without gradients if a capture asks before the first bucket. The hook's."""
        if self._current is None:
            # once a step, and once more for a capture: on an accelerator it waits, and all buckets are divided by one
            scale = loss_scale(self.scaler)
            self._discard_if_unapplied(scale)
            self._current = Step(self._setup, self.step, scale)
        return self._current

    @property
    def error_feedback(self) -> bool:
        """Whether anything is remembered."""
        return bool(self.memory.kinds)

    def name_parameters(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Name the parameters of a state that was built without names; nothing happens if it knows them already.

        Parameters
        ----------
        named_parameters : iterable of (str, torch.Tensor)
            ``model.named_parameters()``.
        """
        if not self._setup.layout.known:
            self._setup.add(named_parameters)

    def residual(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the residual that will be added to a parameter's next gradient.

        Parameters
        ----------
        parameter : torch.Tensor
            One of the model's parameters.

        Returns
        -------
        torch.Tensor or None
            A view of the parameter's shape (complex parameters: a last dimension of 2). None before the first step,
            without error feedback, or where the memory is not a mere sum (:meth:`corrected` knows).
        """
        slot = self._setup.layout.slots.get(id(parameter))
        if not self._setup.gradient.allocated or slot is None or self.memory.residual is None:
            return None
        shape = (*parameter.shape, 2) if parameter.is_complex() else parameter.shape
        return self.memory.residual[slot].view(shape)

    def corrected(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return what will be compressed of a parameter's gradient: gradient plus memory, the same bits.

        Clipping, which needs the whole gradient, and weight decay are not in it.

        Parameters
        ----------
        parameter : torch.Tensor
            One of the model's parameters.
        gradient : torch.Tensor
            Its gradient, as DDP's bucket holds it or with the parameter's own strides.

        Returns
        -------
        tensor, shape (n,)
            Flat, in logical order, in unscaled units.
        """
        setup, scale = self._setup, self.current.scale
        slot = setup.layout.slots.get(id(parameter))
        flat = flatten(parameter, setup.leftover.without(parameter, gradient))
        # times the inverse, in the memory's dtype, as the step does: dividing would give other bits
        if scale != 1:
            flat = flat.to(setup.layout.dtype) * (1 / scale)
        # without a slot it is averaged densely
        if slot is None:
            return flat
        memory, place = setup.memory_of(parameter, slot, flat.device)
        # passed only where it is true, as in Memory.add()
        if setup.further(parameter):
            return memory.preview(flat, place, further=True)
        return memory.preview(flat, place)

    def corrected_run(
        self, parameters: Sequence[torch.Tensor], gradient: torch.Tensor, out: torch.Tensor
    ) -> bool:
        """Write what :meth:`corrected` returns of parameters that lie one after another, in one call.

        Parameters
        ----------
        parameters : sequence of torch.Tensor
            Parameters of the model, in its order.
        gradient : tensor, shape (n,)
            Their gradients, each flat in logical order, one after another.
        out : tensor, shape (n,)
            Written: the same bits.

        Returns
        -------
        bool
            False, and nothing is written, where each is to be asked for by itself.
        """
        setup = self._setup
        # a momentum, and a memory of one's own, may need to know each parameter
        if type(self.memory).preview not in (ErrorFeedback.preview, NoMemory.preview):
            return False
        if not setup.gradient.allocated or self.current.scale != 1:
            return False
        if not gradient.dtype == out.dtype == setup.layout.dtype:
            return False
        setup.leftover.settle(parameters)
        if setup.leftover.has_any():
            return False
        slots = [setup.layout.slots.get(id(parameter)) for parameter in parameters]
        places = [place for place in slots if place is not None]
        if len(places) < len(slots) or any(a.stop != b.start for a, b in pairwise(places)):
            return False
        self.memory.preview(gradient, slice(places[0].start, places[-1].stop), out)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs, of this rank alone: every rank saves its own.

        Returns
        -------
        dict
            One entry, ``rank0`` on rank 0 of the training, so that ``torch.distributed.checkpoint`` can save all ranks'
            under one name: a dictionary with step, world_size, memory and dense_memory (tensors by kind and parameter,
            of compressed and of densely averaged parameters), memory_counts, and compressor (bytes).
        """
        self._discard_skipped()
        return self._setup.checkpoint.save(self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on the rank that saved it.

        Parameters
        ----------
        state : mapping
            What this rank saved; entries of other ranks beside it do not matter.

        Raises
        ------
        InputError
            If this rank's entry is missing, or the number of ranks has changed: residuals belong to ranks, and those of
            some of them are not what the training owes. If it is damaged, or of another version. If compressor, memory
            or parameters differ from the saved ones; at once if the parameters are known, else at the first step.
            Nothing has been restored then.
        """
        self._resume(self._setup.checkpoint.load(state))

    def content(self) -> dict[str, Any]:
        """Return what is in this rank's entry, for a checkpoint of several states."""
        self._discard_skipped()
        return self._setup.checkpoint.content(self.step)

    def prepare(self, content: Mapping[str, Any]) -> Callable[[], None]:
        """Check what :meth:`content` returned, and return what restores it; nothing is changed before that is called.

        Parameters
        ----------
        content : mapping
            Part of a checkpoint.

        Raises
        ------
        InputError
            If it does not fit.
        """
        restore = self._setup.checkpoint.prepare(content)
        return lambda: self._resume(restore())

    def _resume(self, step: int) -> None:
        """Go on from a checkpoint, once all ranks agree on it."""
        self.step = step
        # of a step that this training has not taken
        self._undo = self.last = self.diagnosis = None
        # ranks may have loaded checkpoints of different steps
        self._setup.agreement.reopen()

    def discard(self) -> None:
        """Take the last exchange back: memory, estimators and counters are what they were before it.

        Call it on all ranks before the next backward pass if you do not apply the update, as when its norm is too
        large. Nothing happens if there is nothing to take back: no exchange yet, one that was refused, or was taken
        back already. Of several exchanges into one ``.grad`` it takes back the last.

        It needs no memory but the compressor's ``state_dict()``, some numbers: a step writes into the buffers that the
        last but one left, and the next step overwrites them.

        Raises
        ------
        InputError
            If a memory of your own has no :meth:`gradstats.hooks.Memory.discard`.
        """
        undo = self._undo
        if undo is None:
            return
        # first, as a memory of one's own may refuse: nothing else has changed then
        self.memory.discard()
        self.compressor.rewind(undo.compressor)
        self._undo = None
        self.step, self.last, self.diagnosis = undo.step, undo.last, undo.diagnosis
        self._setup.guard.hidden = undo.hidden

    def _skipped(self, undo: Undo, scale: float | None = None) -> bool:
        """Tell whether the loss scaler has skipped the step of the last exchange."""
        applied = self._setup.applied
        # the caller may have asked already: on an accelerator each question waits for the device
        now = loss_scale(self.scaler) if scale is None else scale
        # an applied update stands: the scale falls, too, where another optimizer's gradients overflow
        return backed_off(self.scaler, undo.scale, now) and not (applied.known and applied.stepped)

    def _discard_skipped(self) -> None:
        """Before a checkpoint, take an exchange back whose step the loss scaler has skipped."""
        # the next step would do it, and a restart has nothing left to take it back with
        if self._current is None and self._undo is not None and self._skipped(self._undo):
            self.discard()

    def _discard_if_unapplied(self, scale: float) -> None:
        """Take the last exchange back if its update went nowhere; there is no taking back once a step has begun."""
        undo, applied = self._undo, self._setup.applied
        # a memory of one's own without discard() keeps every exchange
        if undo is not None and type(self.memory).discard is not Memory.discard:
            if self._skipped(undo, scale):
                self.discard()
            elif (
                self._discard_unapplied
                and applied.known
                and not applied.stepped
                and not self._setup.leftover.has_any()
            ):
                self.discard()
                self._notices.discarded(undo.step)
            elif waiting := applied.waiting():
                lost = waiting & self._setup.leftover.zeroed() - self._setup.usage.idle
                if name := self._setup.layout.name_of(lost):
                    self._notices.lost(name, undo.step)
        self._undo = None

    def _notice(self) -> None:
        """Say what a training should not do, once of each kind."""
        setup = self._setup
        if setup.usage.frozen and (name := setup.usage.unfrozen()) is not None:
            self._notices.unfrozen(name)
        if setup.applied.scaled and self.scaler is None and self.memory.needs_residual:
            self._notices.unscaled()
        # not where Adam comes before the compression, or nothing comes late
        if self.compressor.has_ratio and not isinstance(self.memory, NoMemory | AdamCorrection):
            for kind in setup.applied.adaptive():
                self._notices.adaptive(kind)
        if isinstance(self.memory, AdamCorrection | MomentumCorrection):
            kinds = setup.applied.with_momentum()
            # Adam behind a momentum is said above
            if isinstance(self.memory, AdamCorrection):
                kinds += setup.applied.adaptive()
            for kind in kinds:
                self._notices.twice(type(self.memory).__name__, kind)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressionState:
        """Return a state of its own, which exchanges in the same process group: groups cannot be copied."""
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        # without __init__, which would hook into parameters and optimizers again
        other = object.__new__(type(self))
        memo[id(self)] = other
        vars(other).update((name, copy.deepcopy(each, memo)) for name, each in vars(self).items())
        return other

    def forget_optimizers(self) -> None:
        """Look for no optimizer's steps: the update is not for theirs."""
        self._setup.applied.forget()

    def follow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look for the steps of optimizers that know parameters by other tensors than the state does.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters, as an optimizer has them.
        """
        self._setup.applied.watch(parameters)

    def note_begun(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Note which gradients outside DDP an earlier exchange has put a part of the next step into.

        Parameters
        ----------
        pairs : iterable of (parameter, tensor or None)
            Parameters with what is in their ``.grad``.
        """
        applied = self._setup.applied
        if not (applied.known and applied.stepped):
            # zeros are no part of a step: gradients may be zeroed and not set to None
            begun = {id(p) for p, grad in pairs if grad is not None and bool(grad.any())}
            self._setup.leftover.begun = begun

    def join(self) -> None:
        """Take part in a step of other ranks without a gradient; it counts as applied. The hook's."""
        self._setup.leftover.clear()
        self._setup.applied.take()

    def note_filled(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note that DDP has put the update into gradients. The hook's.

        Parameters
        ----------
        parameters : sequence of torch.Tensor
            Parameters of the step.
        """
        self._setup.leftover.note(parameters)

    @contextmanager
    def naming_step(self) -> Iterator[None]:
        """Say in errors of the exchange which step it was, and drop that step. The hook's."""
        try:
            yield
        except BaseException as error:
            # after an interrupt, too: half a step must not be taken for the beginning of the next
            self._drop_step()
            self._setup.applied.leave()
            if isinstance(error, ExchangeError):
                raise ExchangeError(f"step {self.step}: {error}") from error
            raise

    def begin(self, device: torch.device) -> Step:
        """Begin a step; what an interrupted backward pass left is dropped. The hook's.

        Parameters
        ----------
        device : torch.device
            Device of the gradients.

        Returns
        -------
        Step
            What takes the gradients, until :meth:`complete`.
        """
        # asked anew, though a capture may have asked: its step may be that of an interrupted backward pass
        self._current = None
        step, setup = self.current, self._setup
        # of an interrupted backward pass: what it has pushed would travel with this step
        self.compressor.abandon()
        # before anything is sent: rules, generators and counters move on with the exchange
        self._before = Undo(
            self.step,
            step.scale,
            self.compressor.state_dict(),
            self.last,
            self.diagnosis,
            setup.guard.hidden,
        )
        self._notice()
        # before the first header, which says the ratio
        setup.schedule.begin(self.step)
        with step.at():
            step.open(device)
        # a stream writes to the memory with the first bucket; else there is room when all parameters have come
        if self.compressor.streams and not setup.gradient.allocated:
            setup.allocate(device)
        return step

    def use(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that this rank used parameters in the step, where autograd does not tell.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters.
        """
        self._setup.usage.add(parameters)

    def complete(self, skipped: bool = False) -> float | None:
        """Have the step in progress put the average into its gradients, and go on to the next. The hook's.

        Parameters
        ----------
        skipped : bool
            Whether DDP has passed over buckets that no rank uses (``skip_all_reduce_unused_params``).

        Returns
        -------
        float or None
            What every gradient was filled with, where the step was refused; else None.

        Raises
        ------
        NonFiniteGradientError, ExchangeError, InputError
            As :func:`gradstats.hooks.compression_hook` says.
        """
        with self.current.at():
            if skipped:
                self.current.add_absent()
            try:
                outcome = self.current.complete()
            except NonFiniteGradientError:
                self._rewind()
                raise
        if outcome.diagnosis is not None:
            self.diagnosis = outcome.diagnosis
        if outcome.fill is not None:
            self._rewind()
        elif outcome.record is not None:
            self._undo = self._before
            self._setup.applied.begin()
        self._drop_step()
        if outcome.record is not None:
            self.last = outcome.record
            self._setup.guard.end_step(outcome.record.problem)
        self.step += 1
        return outcome.fill

    def verify(
        self, named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None
    ) -> None:
        """After a step that is to be verified, check that what was made of its update is the same on all ranks.

        Parameters
        ----------
        named : sequence of (str, torch.Tensor)
            Names and tensors.
        group : torch.distributed.ProcessGroup or None
            The ranks.

        Raises
        ------
        ExchangeError
            If it is not, on all of them.
        """
        every = self._setup.verify_every
        # complete() has counted the step already
        if every and (self.step - 1) % every == 0:
            check_applied(named, group)

    def _rewind(self) -> None:
        """Take back what a refused step has changed in the compressor; it has changed no memory."""
        if self._before is not None:
            self.compressor.rewind(self._before.compressor)

    def _drop_step(self) -> None:
        self._current = None
        self._before = None
        self._setup.usage.clear()
        self._setup.leftover.clear()
