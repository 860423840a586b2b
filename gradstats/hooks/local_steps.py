"""Local steps: every rank trains by itself, and once in a while they exchange how far they came."""

# Size: a third of its lines are docstrings; parts that have a life of their own are fragments, another file.

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradstats.collectives.background import Background
from gradstats.collectives.plain import all_gather_flags, broadcast
from gradstats.compressors import (
    Compressor,
    DenseCompressor,
    Selector,
    SparseCompressor,
    as_compressor,
)
from gradstats.compressors.sparse import Average, check_average
from gradstats.errors import GradstatsError, InputError
from gradstats.hooks.agreement import agree_on_model, optimizer_options
from gradstats.hooks.buffers import pack_buffers, unpack_buffers
from gradstats.hooks.checkpoint import load_all, pack_optimizer, unpack_optimizer
from gradstats.hooks.contents import check_count_of, check_values, field, refusing, seal, unseal
from gradstats.hooks.diagnostics import Diagnosis
from gradstats.hooks.facts import Facts, compressor_text, sent_text
from gradstats.hooks.fragment import Fragment, Named, divide, local_values
from gradstats.hooks.gradient import Pair, dense
from gradstats.hooks.layout import check_patterns, idle, warn_of_idle
from gradstats.hooks.local_optimizers import LocalOptimizers
from gradstats.hooks.memory import Memory
from gradstats.hooks.state import CompressionState
from gradstats.hooks.torch_private import groups_of_rank, unwrap
from gradstats.hooks.units import across, as_sharded, is_sharded, units
from gradstats.primitives.ratio import check_count, check_number
from gradstats.trace.record import StepRecord, together

__all__ = ["LocalSteps", "check_room"]


class _Watcher(NamedTuple):
    """What is called around exchanges."""

    before: Callable[[list[Pair]], None]
    after: Callable[[], None]


# Size: 150 lines are docstrings; its attributes are five that users read, what it was made of, and its fragments.
class LocalSteps(Facts):
    """Local steps between exchanges, around an ordinary training loop: DiLoCo, SparseLoCo, local SGD.

    Every rank takes `steps` steps of its own optimizer. The ranks then average their pseudo-gradients, the parameters
    at the last exchange less those now, and the outer optimizer applies the mean to the parameters of the last
    exchange: these are again the same on all ranks. Only the exchange needs the network::

        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with LocalSteps(model, optimizer, outer, steps=100):
            for inputs, targets in loader:
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()

    Parameters
    ----------
    model : torch.nn.Module
        The model, the same on all ranks but for its values, and not wrapped in DDP. Parameters and buffers of rank 0
        become those of all. Of a model after ``fully_shard`` the shards of the first replica become those of all.
    optimizer : torch.optim.Optimizer or sequence of torch.optim.Optimizer
        Optimizer of the local steps, whose state stays on its rank; all of them if several train the model, such as
        Muon and AdamW. A local step is over when each has stepped.
    outer_optimizer : torch.optim.Optimizer, optional
        Optimizer of the exchanges, over the model's trainable parameters; their gradient is the mean pseudo-gradient
        when it steps. If None, the parameters become the mean over the ranks (local SGD).
    steps : int
        Number of local steps H from one exchange to the next.
    compressor : Compressor or Selector, optional
        What is sent of the pseudo-gradients, and how it is averaged. Densely if None.
    memory : Memory, optional
        What is added of past pseudo-gradients, such as ``ErrorFeedback(decay=0.95)``. If None, error feedback where the
        compressor is made for it.
    fragments : int or sequence of sequences of str
        Parts of the model that are exchanged at different steps of an interval: a number of parts of about equal size,
        or name patterns (``fnmatch``) of each. Each has a compressor and a memory of its own, copies of those given.
    delay : int
        Local steps that an exchange takes place in the background, before its result is applied.
    mix : float
        Weight, in [0, 1], of the parameters now against those of the outer optimizer when a delayed result is applied.
    average : {"ranks", "senders"}
        What a sum of sparse messages is divided by, see :class:`gradstats.compressors.SparseCompressor`.
    process_group : torch.distributed.ProcessGroup, optional
        Group to average over; the default group if None. Of a sharded model, the ranks of all replicas that hold the
        same shards: ``mesh["replicate"].get_group()``.
    **options : Any
        Further options of :class:`gradstats.hooks.CompressionState`, such as ``exclude``, ``ratio_at``, ``nonfinite``.

    Attributes
    ----------
    step : int
        Number of local steps taken.
    exchanges : int
        Number of whole exchanges, of all fragments. The one at the end of the block counts if steps of the last
        fragment were left.
    last : StepRecord or None
        Record of the last whole exchange, sums over the fragments; None before the first, and with a `delay`: another
        thread makes the records then.

    Raises
    ------
    InputError
        For options that do not go together or are out of range; on all ranks, if they were given different ones, or
        other models.
    ExchangeError
        Out of the optimizer's ``step()``, or the end of the ``with`` block, if a rank is lost. Parameters and memories
        stay as they were.
    NonFiniteGradientError
        In the same places, if any rank's parameters are no longer finite.

    Notes
    -----
    Source: DiLoCo (Douillard et al. 2023, arXiv 2311.08105), algorithm 1; fragments, delay and mixing Streaming DiLoCo
    (Douillard et al. 2025, arXiv 2501.18512); SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706) for compression with a
    decaying residual. :func:`gradstats.hooks.systems.diloco` and :func:`gradstats.hooks.systems.sparseloco` have the
    papers' settings.

    With one local step, no compressor and no outer optimizer there is nothing local left, and the gradients are
    averaged before the optimizer's step, as in DDP: the same bits on two ranks. ``optimizer.step(closure)``, which
    computes them within the step, is refused then. Until the step gradients are each rank's own: ``clip_grad_norm_``
    clips these, not their mean as under DDP.

    All ranks must take the same number of steps: with ``torch.amp.GradScaler``, which skips steps where a rank
    overflows, use bfloat16 instead. At the end of the block, unless by an error, what was not exchanged yet is, so that
    all ranks end with the same parameters. Buffers, such as running means, stay each rank's own. A parameter that is
    frozen when exchanges come moves by what ranks trained of it since the last one, and by what a memory holds back of
    it, but not by an outer momentum alone. With a delay it is mixed as the others are.

    Of a sharded model (``fully_shard``, with the mesh of one replica) a local step is one of all ranks of a replica.
    Then each rank exchanges its shards with the ranks of other replicas that hold the same; each has compressor and
    memory of its own. What is sparse is sparse in each shard.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        outer_optimizer: torch.optim.Optimizer | None = None,
        steps: int = 100,
        compressor: Compressor | Selector | None = None,
        memory: Memory | None = None,
        fragments: int | Sequence[Sequence[str]] = 1,
        *,
        delay: int = 0,
        mix: float = 0.5,
        average: Average = "ranks",
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        model, ddp = unwrap(model)
        if ddp is not None:
            raise InputError("DDP averages in every step: give LocalSteps the module inside it")
        if not dist.is_initialized():
            raise InputError("LocalSteps averages over ranks: call init_process_group first")
        self.steps = check_count(steps, "steps")
        self.delay = check_count(delay, "delay", 0)
        if self.delay >= self.steps:
            raise InputError(f"delay must be below steps, {self.steps}, not {self.delay}")
        self.mix = check_number(mix, "mix", 0, 1, "[]")
        self.step = self.exchanges = 0
        self.last: StepRecord | None = None
        # of before the last whole exchange, to take that back
        self._before: tuple[int, StepRecord | None] = 0, None
        self._group = process_group
        self._named: Named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        parameters = [p for _, p in self._named]
        if not parameters:
            raise InputError("the model has no parameter to train")
        # a step of rate 1 from the anchor along anchor − mean ends at the mean
        outer = outer_optimizer or torch.optim.SGD(parameters, lr=1.0)
        # first of all, as what follows sends messages whose sizes these decide
        options_of_all = {
            "steps": self.steps,
            "delay": self.delay,
            "mix": self.mix,
            "fragments": fragments,
            "average": average,
            "outer optimizer": type(outer),
            "outer optimizer's options": optimizer_options(outer),
            "memory": memory,
            **options,
        }
        agree_on_model(model, compressor, options_of_all, process_group, parameters[0].device)
        # the ranks that hold a replica's shards with this one
        within = across(units(model), process_group) if is_sharded(model) else None
        for name in ("clip", "weight_decay"):
            if within is not None and options.get(name):
                raise InputError(
                    f"{name} is of a whole gradient, and these are shards: leave it out"
                )
        self._outer = outer
        self._optimizers = LocalOptimizers(optimizer, self._named, outer)
        theirs = {id(p) for group in self._outer.param_groups for p in group["params"]}
        # one that it lacks would be put back to its anchor in every exchange
        if theirs != {id(p) for p in parameters}:
            raise InputError("the outer optimizer must have the model's trainable parameters")
        # one of the user's may become another rule than the mean: a scheduler changes its rate
        self._data_parallel = compressor is None and self.steps == 1 and outer_optimizer is None
        if compressor is None:
            if memory is not None or check_average(average) == "senders":
                raise InputError("a memory, or a mean over senders, needs a compressor")
            compressor, options = DenseCompressor(), {"error_feedback": False, **options}
        compressor = _averaging(as_compressor(compressor), check_average(average))
        if self.delay:  # a group of its own, whose messages those of the training cannot meet
            options["process_group"] = _group_like(process_group, parameters[0].device)
        else:
            options["process_group"] = process_group
        parts = divide(self._named, fragments)
        if len(parts) > self.steps:
            raise InputError(f"{len(parts)} fragments need as many steps, and these are {steps}")
        exclude = check_patterns(options.pop("exclude", ()), "exclude")
        warn_of_idle(exclude, [n for n, _ in model.named_parameters()])
        self._fragments: list[Fragment] = []
        for i, named in enumerate(parts):
            elsewhere = idle(exclude, [n for n, _ in named])
            # the first fragment has the user's own objects, to look at; copies for the others, as state must not mix
            build = partial(
                CompressionState,
                copy.deepcopy(compressor) if i else compressor,
                memory=copy.deepcopy(memory) if i else memory,
                exclude=[each for each in exclude if each not in elsewhere],
                **options,
            )
            # spread over the interval; the last one is exchanged at its end
            offset = (i + 1) * self.steps // len(parts)
            self._fragments.append(Fragment(named, offset, within, build))
        self._model = model
        # after the fragments, whose anchors it sets
        self._begin_alike()
        self._background = Background()
        self._watcher = _Watcher(lambda pairs: None, lambda: None)

    def _facts(self) -> dict[str, str]:
        return {
            "compressor": compressor_text(self._fragments[0].state.compressor),
            "outer optimizer": type(self._outer).__name__,
            "exchange every": f"{self.steps} local steps",
            **({"fragments": str(len(self._fragments))} if len(self._fragments) > 1 else {}),
            **({"delay": f"{self.delay} local steps"} if self.delay else {}),
            "local steps": str(self.step),
            "exchanges": str(self.exchanges),
            "sent": "not recorded with a delay" if self.delay else sent_text(self.last),
        }

    @property
    def error_feedback(self) -> bool:
        """Whether anything is remembered of past pseudo-gradients."""
        return self._fragments[0].state.error_feedback

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Comparison of the last diagnosed exchange with a dense one; None with several fragments."""
        return self._fragments[0].state.diagnosis if len(self._fragments) == 1 else None

    def corrected(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return what will be compressed of a parameter's pseudo-gradient: with the memory, the same bits.

        Parameters
        ----------
        parameter : torch.Tensor
            One of the model's parameters.
        gradient : torch.Tensor
            Its pseudo-gradient; of a sharded parameter, what this rank holds of it.

        Returns
        -------
        tensor, shape (n,)
            Flat, in logical order.
        """
        (fragment,) = (f for f in self._fragments if f.holds(parameter))
        return fragment.corrected(parameter, gradient)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter takes part in the exchanges.

        Parameters
        ----------
        parameter : torch.Tensor
            One of the model's parameters.
        """
        return any(fragment.holds(parameter) for fragment in self._fragments)

    def watch(self, before: Callable[[list[Pair]], None], after: Callable[[], None]) -> None:
        """Call functions around exchanges: what :class:`capture.Capture` does.

        Parameters
        ----------
        before : callable
            Called with the parameters of a fragment and what this rank has of their pseudo-gradients, before they are
            exchanged. It must not change them.
        after : callable
            Called without arguments after the last fragment of an interval; with a delay, once it is under way.
        """
        self._watcher = _Watcher(before, after)

    def __enter__(self) -> LocalSteps:
        """Begin to count the optimizer's steps."""
        if self._optimizers.attached:
            raise InputError("this LocalSteps is entered already")
        if not (self.step or self._data_parallel):
            moved = any(f.moved() for f in self._fragments)
            # the first exchange would count what was loaded as steps, and mostly take it back; refused on all ranks
            # together, as the others would wait for one
            if any(all_gather_flags(int(moved), self._group, self._fragments[0].device)):
                raise InputError(
                    "the model was changed, loaded or moved since LocalSteps was made: make LocalSteps after that"
                )
        if self._data_parallel:
            self._optimizers.attach(self._average_gradients, self._count, 1, averages=True)
        else:
            self._optimizers.attach(lambda: None, self._stepped, self.steps)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the count, and exchange what is left unless an error ended the block."""
        self._optimizers.detach()
        try:
            if kind is None:
                self._finish()
        finally:
            # after an error the other ranks may have left the exchange: waiting for it might never end
            self._background.shutdown(wait=kind is None)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs, at any step, of this rank alone: every rank saves its own.

        Returns
        -------
        dict
            One entry, named by the global rank, so that ``torch.distributed.checkpoint`` can save all ranks' under one
            name: a dictionary of tensors, numbers and bytes. This rank's trainable parameters (or shards) are in it,
            those of the last exchange and those now, its buffers, as the model's ``state_dict()`` would keep them, and
            the states of both optimizers.
        """
        for fragment in self._fragments:
            # the memory is settled, and the mean is there, only when it has ended
            fragment.wait()
        anchors = {n: a for f in self._fragments for n, a in f.anchors.items()}
        entry = {
            "ranks": _ranks(self._group),
            "steps": self.steps,
            "step": self.step,
            "exchanges": self.exchanges,
            "parameters": {n: local_values(p).clone() for n, p in self._named},
            "anchors": {n: anchors[n].clone() for n, _ in self._named},
            "buffers": pack_buffers(self._model),
            **self._optimizers.pack(),
            "outer": pack_optimizer(self._outer),
            "fragments": [f.state_dict() for f in self._fragments],
        }
        return seal(dist.get_rank(), entry)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned: parameters, buffers and both optimizers, too.

        Parameters
        ----------
        state : mapping
            What this rank saved; entries of other ranks beside it do not matter.

        Raises
        ------
        InputError
            If it is damaged, or of another rank, group of ranks, model, optimizer, number of steps or division into
            fragments. Nothing has been restored then.
        """
        for fragment in self._fragments:
            with suppress(GradstatsError):  # of an exchange that is to be forgotten
                fragment.wait()
        with refusing():
            entry = unseal(dist.get_rank(), state)
            ranks = _ranks(self._group)
            if entry.get("ranks") != ranks:
                raise InputError(
                    f"the checkpoint is of an exchange among ranks {entry.get('ranks')}, and this is one among {ranks}"
                )
            check_count_of("local steps", entry.get("steps"), self.steps)
            step, exchanges = field(entry, "step", int), field(entry, "exchanges", int)
            saved, anchors = (
                self._check_parameters(entry, what) for what in ("parameters", "anchors")
            )
            fragments = field(entry, "fragments", list)
            check_count_of("fragments", len(fragments), len(self._fragments))
            outer = unpack_optimizer(self._outer, field(entry, "outer", bytes), "outer optimizer")
            # in the order of the parts that load them below
            states = [*self._optimizers.unpack(entry), outer]
            restore = [
                f.prepare(each, anchors) for f, each in zip(self._fragments, fragments, strict=True)
            ]
            if "buffers" in entry:  # else of before they were saved: the model's own stay
                restore.append(unpack_buffers(self._model, field(entry, "buffers", bytes)))
            # the last that can be refused; what follows copies what was checked
            load_all([*self._optimizers.each, self._outer], states)
        for each in restore:
            each()
        for name, parameter in self._named:
            local_values(parameter).copy_(saved[name])
        self.step, self.exchanges, self.last = step, exchanges, None
        self._before = exchanges, None

    def _check_parameters(self, entry: Mapping[str, Any], what: str) -> Mapping[str, torch.Tensor]:
        """Return values of the parameters in a checkpoint, if they are those of this model."""
        saved = field(entry, what, Mapping)  # type: ignore[type-abstract]
        if list(saved) != [n for n, _ in self._named]:
            raise InputError(f"the checkpoint has other {what} than this model")
        for name, parameter in self._named:
            check_values(
                f"{name} of {what}", saved[name], local_values(parameter).shape, parameter.dtype
            )
        return saved

    def discard(self) -> None:
        """Take the last exchange of every fragment back: memories, estimators and counters are as before it.

        For a training that goes back to earlier parameters. Put these, and the optimizers' states, back first, on rank
        0 at least, and call it on all ranks: parameters and buffers of rank 0 become those of all, and the next
        interval begins with them. An exchange under way is dropped.
        """
        for fragment in self._fragments:
            with suppress(GradstatsError):  # of an exchange that is to be forgotten
                fragment.wait()
            fragment.pairs, fragment.sent = [], self.step
            fragment.state.discard()
        self.exchanges, self.last = self._before
        self._begin_alike()

    def _begin_alike(self) -> None:
        """Begin an interval with the parameters and buffers of rank 0 on all ranks."""
        # frozen parameters and buffers, too: they decide the gradients of the others
        for values in map(local_values, (*self._model.parameters(), *self._model.buffers())):
            # collectives take contiguous memory; copied back where that was a copy
            values.copy_(broadcast(values.contiguous(), 0, self._group))
        for fragment in self._fragments:
            fragment.anchor()

    def _stepped(self) -> None:
        """Count a local step, apply what came in, and exchange what is due."""
        self.step += 1
        for fragment in self._fragments:
            # before it is sent again: a pseudo-gradient starts from the anchor that this sets
            if fragment.pairs and self.step >= fragment.due:
                self._apply(fragment)
            if (self.step - fragment.offset) % self.steps == 0:
                self._send(fragment, self.delay)
                if fragment is self._fragments[-1]:
                    self._count_exchange()

    def _send(self, fragment: Fragment, delay: int, watched: bool = True) -> None:
        """Exchange a fragment's pseudo-gradient and apply it now, or have it exchanged in the background."""
        self._check_known()
        if fragment is self._fragments[-1]:
            # here, as one that is refused does not count, and cannot be taken back
            self._before = self.exchanges, self.last
        pairs = fragment.pseudogradients()
        if watched:
            self._watcher.before(pairs)
        fragment.send(
            pairs, self.step, delay, self._background, self._details(self._optimizers.attached)
        )
        if not delay:
            self._apply(fragment)

    def _apply(self, fragment: Fragment) -> None:
        """Apply what came of a fragment's exchange; if it is to be verified, compare what became of it."""
        fragment.apply(self._outer, self.step, self.mix)
        # not in the group of exchanges, in which another one may be running in the background
        fragment.state.verify([*fragment.anchors.items()], self._group)

    def _details(self, counted: bool = True) -> dict[str, str]:
        """Return what must be the same on all ranks in an exchange; the last one takes what is left on each."""
        return {
            "local steps": str(self.step) if counted else "the last",
            "the outer optimizer's options": optimizer_options(self._outer),
            "frozen parameters": ", ".join(n for n, p in self._named if not p.requires_grad)
            or "none",
        }

    def _check_known(self) -> None:
        """Raise if a parameter is trained that no exchange has: the ranks would drift apart in it."""
        # asked in every exchange: layers are unfrozen in the middle of trainings
        known = {id(p) for _, p in self._named}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise InputError(
                    f"{name} is trained, and was not when LocalSteps was made (it was unfrozen, added or replaced): "
                    "end the block before that, and begin another with a new LocalSteps"
                )

    def _count_exchange(self) -> None:
        """Count an exchange of all fragments, and put their records together."""
        records = [f.state.last for f in self._fragments if f.state.last is not None]
        # with a delay the thread may be writing the states' records
        if not self.delay and records:  # a rank may hold nothing of a fragment
            self.last = together(records, self.exchanges)
        self.exchanges += 1
        self._watcher.after()

    def _finish(self) -> None:
        """Exchange what some rank has not exchanged yet, so that all end with the same parameters."""
        if self._data_parallel:
            # every step was exchanged, but a rank that goes on would wait for this one
            self._fragments[0].end(self.step)
            return
        for fragment in self._fragments:  # all of them before another exchange of their group
            if fragment.pairs:
                self._apply(fragment)
        behind = [each for each in self._fragments if each.is_behind(self.step, self.delay)]
        # the last fragment ends an interval: without it these are parts of one, and no exchange of all
        whole = self._fragments[-1] in behind
        for fragment in behind:
            self._send(fragment, 0, watched=whole)
        if whole:
            self._count_exchange()

    def _average_gradients(self) -> None:
        """Average the gradients as DDP does; an unused parameter has a gradient of zero."""
        (fragment,) = self._fragments
        self._check_known()
        pairs = []
        for _, p in fragment.named:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            pairs.append((p, dense(local_values(gradient))))
        self._watcher.before(pairs)
        fragment.average(pairs, self.step, self._details())
        for parameter, mean in pairs:
            # of one frozen since, zero would let momentum and weight decay move it
            counts = fragment.counts(parameter, mean)
            parameter.grad = as_sharded(parameter, mean) if counts else None

    def _count(self) -> None:
        self.step += 1
        self._count_exchange()


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group; all of them if None."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def _group_like(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """Return a new group of the same ranks; no other rank has to take part."""
    # PyTorch calls it by its ranks and the number of groups that a rank is in, and waits for ever if these differ
    counts = all_gather_flags(groups_of_rank(), group, device)
    for _ in range(max(counts) - groups_of_rank()):
        # groups of this rank alone, without a message, until all ranks have as many
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    made: dist.ProcessGroup = dist.new_group(_ranks(group), use_local_synchronization=True)
    return made


def check_room(steps: int, fragments: int, delay: int) -> None:
    """Refuse fragments and a delay that an interval has no room for.

    Parameters
    ----------
    steps : int
        Local steps of an interval; 0 for an exchange in every step, which has neither.
    fragments : int
        Number of fragments, at least 1 and at most `steps`.
    delay : int
        Local steps that an exchange takes in the background, at least 0 and below `steps`.

    Raises
    ------
    InputError
        If they do not fit, or are no such numbers.
    """
    check_count(fragments, "fragments")
    check_count(delay, "delay", 0)
    if steps and (fragments > steps or delay >= steps):
        raise InputError(
            f"{steps} local steps leave room for as many fragments and a shorter delay, not for {fragments} and {delay}"
        )


def _averaging(compressor: Compressor, average: Average) -> Compressor:
    """Return a compressor that divides by the number of senders, if that is wanted."""
    if average == "senders":
        if not isinstance(compressor, SparseCompressor):
            name = type(compressor).__name__
            raise InputError(f"{name} does not know who sent what: average over ranks")
        # the user's own object keeps its average
        compressor = copy.copy(compressor)
        compressor.average = average
    return compressor
