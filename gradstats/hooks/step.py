"""One step of a training: from its first gradients to the mean in their place."""

# Size: a third of its lines are docstrings; a step and what it works with are read together.

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from gradstats.collectives.header import Moment, at_moment
from gradstats.collectives.plain import all_reduce_mean
from gradstats.compressors import Compressor, DenseCompressor, Reduced
from gradstats.errors import InputError
from gradstats.hooks.agreement import Agreement, check_applied
from gradstats.hooks.applied import Applied
from gradstats.hooks.checkpoint import Checkpoint
from gradstats.hooks.diagnostics import Diagnosis, diagnose
from gradstats.hooks.gradient import FlatGradient, Pair, zero_bad
from gradstats.hooks.guard import Guard, as_flag, count_bad
from gradstats.hooks.layout import ParameterLayout
from gradstats.hooks.leftover import Leftover
from gradstats.hooks.memory import Memory
from gradstats.hooks.ratio import RatioSchedule
from gradstats.hooks.torch_private import after_backward
from gradstats.hooks.usage import Usage
from gradstats.trace.record import StepRecord

__all__ = [
    "HeldBucket",
    "Outcome",
    "Scaler",
    "Setup",
    "Step",
    "backed_off",
    "loss_scale",
    "outside",
]


class Scaler(Protocol):
    """What is asked of a loss scaler, such as ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """Return the factor by which the loss of this step was multiplied."""


def loss_scale(scaler: Scaler | None) -> float:
    """Return the factor that gradients carry now; on an accelerator this waits for the device.

    Parameters
    ----------
    scaler : Scaler, optional
        Scaler of the training.
    """
    return 1.0 if scaler is None else float(scaler.get_scale())


def backed_off(scaler: Scaler | None, before: float, now: float) -> bool:
    """Tell whether a loss scaler found an overflow and skipped the optimizer's step: it lowers its scale then.

    Parameters
    ----------
    scaler : Scaler, optional
        Scaler of the training. One without ``get_backoff_factor()`` does not tell.
    before, now : float
        Its scale in the step, and after it.
    """
    factor = getattr(scaler, "get_backoff_factor", None)
    if factor is None or now >= before:
        return False
    # the scale is a float32 of the device; one that fell by another factor was set by hand
    return math.isclose(now, before * factor(), rel_tol=1e-6)


# Size: what a state is made of, an attribute a part; it has no behaviour.
@dataclass(frozen=True, slots=True)
class Setup:
    """What every step of a training works with: the same objects from the first to the last.

    Attributes
    ----------
    compressor : Compressor
        How gradients are averaged.
    gradient : FlatGradient
        The gradient as vectors, with layout and memory.
    schedule : RatioSchedule
        The compressor's ratio in every step.
    guard : Guard
        Policy for gradients that are not finite.
    usage : Usage
        Which parameters this rank used.
    leftover : Leftover
        What earlier exchanges left in the gradients.
    applied : Applied
        Whether an optimizer has applied the last update.
    checkpoint : Checkpoint
        Has the memory of a restart until there is room for it.
    clip : float or None
        Norm to which n ranks' gradients are clipped, each to clip/√n.
    diagnose_every : int
        Distance of diagnosed steps, 0 for none.
    process_group : torch.distributed.ProcessGroup or None
        Ranks to average over.
    agreement : Agreement
        What all ranks must agree on.
    verify_every : int
        Distance of steps whose update is compared over the ranks, 0 for none.
    """

    compressor: Compressor
    gradient: FlatGradient
    schedule: RatioSchedule
    guard: Guard
    usage: Usage
    leftover: Leftover
    applied: Applied
    checkpoint: Checkpoint
    clip: float | None
    diagnose_every: int
    process_group: dist.ProcessGroup | None
    agreement: Agreement
    verify_every: int

    @property
    def layout(self) -> ParameterLayout:
        """The places of the parameters."""
        return self.gradient.layout

    @property
    def memory(self) -> Memory:
        """What this rank remembers."""
        return self.gradient.memory

    def add(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give parameters that are trained their places, and watch their use.

        Parameters
        ----------
        named_parameters : iterable of (str, torch.Tensor)
            Names and parameters.
        """
        every = list(named_parameters)
        named = [(name, parameter) for name, parameter in every if parameter.requires_grad]
        # DDP averages what was trained when it was made: unfreezing later would go unnoticed
        self.usage.frozen = {n: weakref.ref(p) for n, p in every if not p.requires_grad}
        self.layout.add(named)
        self.agreement.add(named)
        parameters = [parameter for _, parameter in named]
        self.usage.watch(parameters)
        self.applied.watch(parameters)

    def further(self, parameter: torch.Tensor) -> bool:
        """Tell whether an earlier exchange has taken a part of the gradient of the optimizer's step that is coming.

        Parameters
        ----------
        parameter : torch.Tensor
            One of the parameters.
        """
        begun = self.leftover.parts or self.leftover.begun
        # once an optimizer has stepped, what comes belongs to the step after that
        if not begun or (self.applied.known and self.applied.stepped):
            return False
        return id(parameter) in self.leftover.parts or id(parameter) in self.leftover.begun

    def allocate(self, device: torch.device) -> None:
        """Make room for the gradient and the memory, and fill that from a checkpoint loaded before.

        Parameters
        ----------
        device : torch.device
            Device of the gradients.
        """
        self.gradient.allocate(device)
        self.checkpoint.restore_memory()

    def memory_of(
        self, parameter: torch.Tensor, place: slice, device: torch.device
    ) -> tuple[Memory, slice]:
        """Return the memory in which a compressed parameter has a place, and the place.

        Before the first exchange there is none, and this is a copy with room for the parameter alone. A memory of zeros
        adds something, too: AdamW's first step is none of the gradient's size.

        Parameters
        ----------
        parameter : torch.Tensor
            The parameter.
        place : slice
            Its place in the flat gradient.
        device : torch.device
            Device of its gradient.
        """
        if self.gradient.allocated:
            return self.memory, place
        memory, numel = copy.deepcopy(self.memory), place.stop - place.start
        memory.allocate(numel, device, self.layout.dtype)
        self.checkpoint.restore_part(memory, self.layout.name(parameter))
        return memory, slice(0, numel)


@dataclass(frozen=True, slots=True)
class HeldBucket:
    """A bucket of DDP's that waits for the last one of its step.

    Attributes
    ----------
    buffer : torch.Tensor
        What the future is to hold.
    future : torch.futures.Future
        What DDP waits for.
    """

    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


class Outcome(NamedTuple):
    """What a step ended with.

    Attributes
    ----------
    record : StepRecord or None
        What it did; None if no gradient was the state's.
    diagnosis : Diagnosis or None
        Comparison with a dense exchange, if it was a step to diagnose.
    fill : float or None
        What every gradient was filled with, where the step was refused; else None.
    """

    record: StepRecord | None = None
    diagnosis: Diagnosis | None = None
    fill: float | None = None


class _Comparison(NamedTuple):
    """What a diagnosis needs from before the exchange, after which gradient and ratios may have changed."""

    corrected: torch.Tensor
    targets: list[int]


# Size: what happens to a gradient in one step, from the first bucket to the record, in that order.
class Step:
    """One step: gradients come in, are exchanged, and hold the mean.

    Parameters
    ----------
    setup : Setup
        What every step works with.
    number : int
        Number of the step.
    scale : float
        The loss scale that the gradients carry.

    Attributes
    ----------
    number : int
        Number of the step.
    scale : float
        The loss scale that the gradients carry.
    held : list of HeldBucket
        DDP's buckets that have come.
    pairs : list of (parameter, gradient)
        Gradients that have come, views of the buckets.
    bad_elsewhere : int
        Elements that are not finite in averaged sparse gradients, or on ranks with other shards.
    problem : str
        What is wrong with the gradients; empty if nothing is.
    bucket : int
        Index of DDP's last bucket that has come; -1 before the first.
    skipped, ended : bool
        Whether DDP has passed over a bucket before that, and whether the step was completed, whatever it came to.
    """

    def __init__(self, setup: Setup, number: int, scale: float) -> None:
        self.number = number
        self.scale = scale
        self.held: list[HeldBucket] = []
        self.pairs: list[Pair] = []
        self.bad_elsewhere = 0
        self.problem = ""
        self.bucket = -1
        self.skipped = self.ended = False
        self._setup = setup
        self._open = False
        # of averaged sparse gradients
        self._sparse_bytes = 0

    def at(self) -> AbstractContextManager[None]:
        """Return a context in which headers say which step this is, and what must agree in it."""
        setup = self._setup
        # ranks of other ratios would read each other's messages by the wrong lengths
        ratio = 1.0 if setup.schedule.dense(self.number) else setup.compressor.ratio
        shown = {} if ratio is None else {"ratio": f"{ratio:.9g}"}
        return at_moment(Moment(self.number, {**shown, **setup.agreement.details}))

    def open(self, device: torch.device) -> None:
        """Before the first message, see that all ranks have the same options, and are about to do the same.

        Parameters
        ----------
        device : torch.device
            Device of the gradients.
        """
        setup, group = self._setup, self._setup.process_group
        # of one from outside nobody knows which parts of its state are a rank's own
        ours = type(setup.compressor).__module__.startswith("gradstats.")
        state = setup.compressor.state_dict if ours else dict
        setup.agreement.check(self.number, state, group, device)
        # once a step and before its first message; sparse gradients alone have none of the compressor's
        if not self._open and (self._streams() or self.pairs):
            self._open = True
            setup.agreement.announce(group, device)

    def average_sparse(
        self, buffer: torch.Tensor, parameters: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """Return the mean of the ranks' sparse gradients, exactly; it travels as a dense vector.

        Parameters
        ----------
        buffer : torch.Tensor
            A sparse bucket.
        parameters : iterable of torch.Tensor
            Parameters of the bucket, which lose their places in the compressed gradient.

        Returns
        -------
        torch.Tensor
            The mean, sparse.

        Raises
        ------
        InputError
            If the compressor or the memory needs them as dense gradients.
        """
        for parameter in parameters:
            self._refuse_sparse(parameter)
            self._setup.layout.skip(parameter)
        # ranks have other rows each: as dense vectors they add up element by element
        values = buffer.to_dense()
        if self._setup.guard.zeroes:
            values.nan_to_num_(0.0, 0.0, 0.0)
        mean = all_reduce_mean(values, self._setup.process_group)
        self._sparse_bytes += values.numel() * values.element_size()
        # the same on every rank
        self.bad_elsewhere += mean.numel() - int(torch.isfinite(mean).sum())
        return mean.to_sparse(buffer.sparse_dim())

    def _refuse_sparse(self, parameter: torch.Tensor) -> None:
        """Raise where a parameter must not have a sparse gradient."""
        compressor, memory, layout = self._setup.compressor, self._setup.memory, self._setup.layout
        if compressor.streams:
            raise InputError(
                f"{layout.name(parameter)} has a sparse gradient, and {type(compressor).__name__} sends layer by "
                "layer: use sparse=False, or a compressor of the whole model"
            )
        if memory.dense_kinds:
            # without named_parameters no parameter has a name in the first step
            name = layout.name(parameter) if layout.known else "a parameter"
            raise InputError(
                f"{name} has a sparse gradient, for which {type(memory).__name__} keeps no momentum: use "
                "sparse=False, or error feedback alone"
            )

    def ready(self, pairs: Sequence[Pair]) -> None:
        """Take gradients that are ready; a compressor that streams sends them.

        Parameters
        ----------
        pairs : sequence of (parameter, gradient)
            Gradients of one bucket.
        """
        self.pairs += pairs
        # first: the memory must get the new gradient alone
        self._setup.leftover.set_aside(pairs)
        if self._streams():
            # before the push: once it has sent something, the other ranks wait for the rest
            self._setup.layout.require(parameter for parameter, _ in pairs)
            with self.at():
                self._push(pairs, self._take(pairs))

    def add_absent(self) -> None:
        """Add gradients of zero for parameters that no rank uses and DDP leaves out; their memory will stay."""
        came = {id(parameter) for parameter, _ in self.pairs}
        absent = [p for p in self._setup.layout.parameters() if id(p) not in came]
        # in the order of buckets, which is about that of the backward pass
        self.ready([(p, torch.zeros_like(p, requires_grad=False)) for p in reversed(absent)])

    def complete(self) -> Outcome:
        """Exchange, put the average into the gradients, and settle the memory.

        Returns
        -------
        Outcome
            What the step did.

        Raises
        ------
        NonFiniteGradientError, ExchangeError, InputError
            As :func:`gradstats.hooks.compression_hook` says.
        """
        try:
            # put back in any case: also where the step fails, .grad keeps what it had
            return self._complete()
        finally:
            self._setup.leftover.put_back(self.pairs)

    def _complete(self) -> Outcome:
        """Do so with gradients from which what earlier exchanges left is taken out."""
        setup, layout, memory = self._setup, self._setup.layout, self._setup.memory
        group, pairs = setup.process_group, self.pairs
        if not layout.known:  # numbered in the order of the first backward pass
            setup.add((str(i), parameter) for i, (parameter, _) in enumerate(pairs))
        layout.check([parameter for parameter, _ in pairs])
        if not pairs:  # sparse gradients alone, which have been averaged
            if self.bad_elsewhere:
                # the mean is the same on all ranks, and so is the answer: no message is needed
                return self._refuse(Reduced([self.bad_elsewhere] * dist.get_world_size(group)))
            return Outcome()
        if not setup.gradient.allocated:
            setup.allocate(pairs[0][1].device)
        self.open(pairs[0][1].device)
        dense_step, flag = setup.schedule.dense(self.number), 0
        if not self._streams():
            flag = self._take(pairs)
            # one that streams and had to wait, as for the norm to clip by; others take nothing before the exchange
            if not dense_step and setup.compressor.streams:
                self._push(pairs, flag)
        compressor = DenseCompressor() if dense_step else setup.compressor
        # all before the exchange, after which ratios may change
        comparison = self._comparison(compressor)
        target = compressor.target(layout.numel)
        dense_layers = self._dense_layers() if memory.masking and not dense_step else []
        unused = setup.usage.unused(pairs)
        # every rank comes here, also with a bad gradient: the flag travels with the messages
        reduced = compressor.reduce(memory.corrected, group, flag)
        if any(reduced.flags):  # some rank's gradient is not finite, and there is no mean
            return self._refuse(reduced)
        assert reduced.mean is not None
        assert reduced.residual is not None
        dense = setup.gradient.dense
        if layout.dense_numel:
            # after the flags, by which all ranks know that no rank refuses the step
            all_reduce_mean(dense, group)
            further = [s for p, s in layout.dense_places(pairs) if setup.further(p)]
            # passed only where it says something: a memory of one's own may not take it
            memory.update_dense(dense, **({"further": further} if further else {}))
        # nothing is written or settled yet, so that this step, too, can be refused as if nothing had happened:
        # finite here, infinite in float16; mean and dtype, and so the answer, are the same on every rank
        over = setup.gradient.beyond_half(pairs, reduced.mean, self.scale)
        if over:
            return self._refuse(Reduced([over] * len(reduced.flags)))
        setup.gradient.write(pairs, reduced.mean, self.scale)
        if setup.verify_every and self.number % setup.verify_every == 0:
            check_applied([(layout.name(p), g) for p, g in pairs], group)
        # one more all-reduce, which all ranks reach: they agreed on diagnose_every
        diagnosis = None if comparison is None else self._diagnosis(comparison, reduced)
        if compressor.feedback:
            memory.settle(reduced.residual, outside(reduced.sent, dense_layers))
        else:  # nothing is owed of what was not sent
            memory.settle(reduced.residual.zero_(), None)
        if unused:
            # only then does .grad tell which updates DDP has applied
            after_backward(lambda: setup.usage.give_back(unused))
        record = self._record(
            threshold=reduced.threshold,
            selected=reduced.selected,
            target=target,
            bytes_sent=reduced.bytes_sent
            + dense.numel() * dense.element_size()
            + self._sparse_bytes,
            union=reduced.union,
            select_seconds=reduced.select_seconds,
            communicate_seconds=reduced.communicate_seconds,
            overlapped_seconds=reduced.overlapped_seconds,
        )
        return Outcome(record, diagnosis)

    def _record(self, **numbers: Any) -> StepRecord:
        """Return what the step did."""
        numel = self._setup.layout.numel
        return StepRecord(step=self.number, numel=numel, problem=self.problem, **numbers)

    def _streams(self) -> bool:
        """Tell whether buckets are sent as they come."""
        setup = self._setup
        # clipping has to wait for the norm of the whole gradient
        streams = setup.compressor.streams and setup.clip is None
        return streams and not setup.schedule.dense(self.number)

    def _push(self, pairs: Sequence[Pair], flag: int) -> None:
        """Give parameters that are ready to a compressor that streams."""
        setup, layout = self._setup, self._setup.layout
        slots = layout.slots
        layers = [(layout.name(p), slots[id(p)]) for p, _ in pairs if id(p) in slots]
        setup.compressor.push(setup.memory.corrected, layers, setup.process_group, flag)

    def _take(self, pairs: Sequence[Pair]) -> int:
        """Add the memory to gradients; return the flag for what is not finite after the policy saw to it."""
        gradient, leftover = self._setup.gradient, self._setup.leftover
        # asked of every parameter only where an earlier exchange left something
        further = self._setup.further if leftover.parts or leftover.begun else None
        bad = count_bad(gradient.take(pairs, self._factor(pairs), further))
        if bad and self._setup.guard.zeroes:
            self.problem = f"{bad} NaN or infinite elements taken as zero{gradient.first_bad()}"
            # then anew from the gradients: bad elements are in the clipping norm, and in the memory's sums
            zero_bad(pairs)
            bad = count_bad(gradient.take(pairs, self._factor(pairs), further))
        # any rank's flag refuses the step on all; the count is for the message
        return as_flag(bad or self.bad_elsewhere)

    def _factor(self, pairs: Sequence[Pair]) -> float:
        """Return what gradients are multiplied by: clipping, and one over the loss scale."""
        setup = self._setup
        if setup.clip is None:
            return 1 / self.scale
        bound = setup.clip / math.sqrt(dist.get_world_size(setup.process_group))
        return setup.gradient.clipping(pairs, bound, self.scale) / self.scale

    def _refuse(self, reduced: Reduced) -> Outcome:
        """Raise, or take the step as one without an update: a gradient somewhere is not finite."""
        ranks = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(reduced.flags) if n)
        where = self._setup.gradient.first_bad()
        self.problem = f"step {self.number}: NaN or infinite gradient elements: {ranks}{where}"
        fill = self._setup.guard.refuse(self.problem, self.pairs)
        sent = reduced.bytes_sent + self._sparse_bytes
        record = self._record(threshold=math.nan, selected=0, bytes_sent=sent)
        return Outcome(record, fill=fill)

    def _comparison(self, compressor: Compressor) -> _Comparison | None:
        """Return what a diagnosis needs, if this is a step to diagnose."""
        every, layout = self._setup.diagnose_every, self._setup.layout
        if not every or self.number % every or not layout.numel:
            return None
        targets = [compressor.target(s.stop - s.start, name) for name, s in layout.parts()]
        return _Comparison(self._setup.memory.corrected.clone(), targets)

    def _diagnosis(self, before: _Comparison, reduced: Reduced) -> Diagnosis:
        """Compare the update with the dense mean."""
        assert reduced.mean is not None
        assert reduced.residual is not None
        return diagnose(
            self.number,
            self._setup.layout.parts(),
            before.targets,
            reduced.mean,
            all_reduce_mean(before.corrected, self._setup.process_group),
            reduced.sent,
            reduced.residual,
        )

    def _dense_layers(self) -> list[slice]:
        """Return the places of layers that send all their elements: nothing of their momentum is stale."""
        compressor, layout = self._setup.compressor, self._setup.layout
        layers = layout.parts() if compressor.streams else [(None, slice(0, layout.numel))]
        return [
            s for name, s in layers if compressor.target(s.stop - s.start, name) == s.stop - s.start
        ]


def outside(positions: torch.Tensor | None, layers: Sequence[slice]) -> torch.Tensor | None:
    """Return the positions that are in none of some layers.

    Parameters
    ----------
    positions : int64 tensor, shape (k̂,), or None
        Positions; None for all.
    layers : sequence of slice
        Places of layers, in order and apart.

    Returns
    -------
    int64 tensor or None
        The others; None for all.
    """
    if positions is None or not layers:
        return positions
    starts, stops = (
        torch.tensor(ends, device=positions.device)
        for ends in zip(*((s.start, s.stop) for s in layers), strict=True)
    )
    # the only layer that can hold a position is the first one that ends behind it
    layer = torch.bucketize(positions, stops, right=True)
    # positions behind the last layer have no start to read: clamped here, and kept below
    inside = positions >= starts[layer.clamp(max=len(layers) - 1)]
    return positions[(layer == len(layers)) | ~inside]
