"""The state of the compression hook: options, the step, and what a checkpoint holds."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import torch
import torch.distributed as dist

from gradstats.collectives.plain import all_gather_flags, all_reduce_mean
from gradstats.compressors import Compressor, DenseCompressor, Reduced, Selector, as_compressor
from gradstats.errors import ExchangeError, InputError, NonFiniteGradientError, first_line
from gradstats.hooks.diagnostics import Diagnosis, diagnose
from gradstats.hooks.gradient import FlatGradient, Pair, flatten, real_view, zero_bad
from gradstats.hooks.layout import ParameterLayout, check_patterns
from gradstats.hooks.memory import ErrorFeedback, Memory, NoMemory
from gradstats.hooks.ratio import RatioSchedule
from gradstats.hooks.torch_private import after_backward, tree_map
from gradstats.primitives.ratio import check_count, check_number, shown
from gradstats.thresholds import warm_up
from gradstats.trace.record import StepRecord

__all__ = [
    "CompressionState",
    "HeldBucket",
    "NonFinite",
    "Scaler",
    "count_bad",
    "load_together",
    "packed",
    "unpacked",
]

NonFinite: TypeAlias = Literal["raise", "skip", "zero", "propagate"]

_PLAIN = (torch.Tensor, torch.dtype, torch.device, int, float, complex, str, bytes, type(None))
_LARGEST_FLAG = 2**31 - 1
_PATIENCE = 8
"""Steps in a row with a non-finite gradient, hidden by policy, after which a warning says so."""


class Scaler(Protocol):
    """What is asked of a loss scaler, such as ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """Return the factor by which the loss of this step was multiplied."""


@dataclass(slots=True)
class HeldBucket:
    """A bucket of DDP's that waits for the last one of its step.

    Attributes
    ----------
    buffer : torch.Tensor
        What the future is to hold.
    pairs : list of (parameter, gradient)
        The gradients in the buffer that are to be compressed.
    future : torch.futures.Future
        What DDP waits for.
    """

    buffer: torch.Tensor
    pairs: list[Pair]
    future: torch.futures.Future[torch.Tensor]


class _Group(NamedTuple):
    """What a memory holds of some parameters."""

    key: str
    kinds: tuple[str, ...]
    tensors: Mapping[str, torch.Tensor]
    slots: Mapping[str, slice]
    sizes: Mapping[str, int]


class _Unused(NamedTuple):
    """A parameter that this rank did not use in a step, and the memory it had before."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    key: str
    slot: slice
    before: Mapping[str, torch.Tensor]


class CompressionState:
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
    process_group : torch.distributed.ProcessGroup, optional
        The group to average over: the one DDP was given; the default group if None.

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
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        warm_up()  # here, where it stalls nobody, and not in the first backward pass
        policies = get_args(NonFinite)
        if nonfinite is not None and not (isinstance(nonfinite, str) and nonfinite in policies):
            raise InputError(
                f"nonfinite must be one of {', '.join(policies)}, not {shown(nonfinite)}"
            )
        exclude = check_patterns(exclude, "exclude")
        if exclude and named_parameters is None:
            raise InputError("excluding parameters by name needs named_parameters")
        self.compressor = as_compressor(compressor)
        name = type(self.compressor).__name__
        if self.compressor.streams and named_parameters is None:
            raise InputError(f"{name} sends layer by layer and needs named_parameters")
        wanted = self.compressor.feedback if error_feedback is None else error_feedback
        self.memory = memory or (ErrorFeedback() if wanted else NoMemory())
        if not self.compressor.feedback and (self.memory.needs_residual or error_feedback):
            raise InputError(f"{name} leaves no residual to feed back")
        self.clip = None if clip is None else check_number(clip, "clip", 0, math.inf)
        self.nonfinite = nonfinite or ("raise" if scaler is None else "propagate")
        self.scaler = scaler
        self.diagnose_every = check_count(diagnose_every, "diagnose_every", 0)
        self.process_group = process_group
        self.step = 0
        self.last: StepRecord | None = None
        self.diagnosis: Diagnosis | None = None
        self.held: list[HeldBucket] = []
        """Buckets of the step in progress; the hook's."""
        self._schedule = RatioSchedule(self.compressor, ratio_at)
        self._layout = ParameterLayout(check_count(dense_below, "dense_below", 0), exclude)
        weight_decay = check_number(weight_decay, "weight_decay", 0, math.inf, "[)")
        self._gradient = FlatGradient(self._layout, self.memory, weight_decay)
        self.sparse_bad = 0
        """Elements that are not finite in averaged sparse gradients, or on ranks with other shards; the hook's."""
        self._problem = ""
        self._hidden = 0
        self._scale: float | None = None
        self._used: set[int] = set()
        self._agreed = False
        self._restored: Mapping[str, Any] | None = None
        self._identity: tuple[int, int] | None = None
        if named_parameters is not None:
            self._add((n, p) for n, p in named_parameters if p.requires_grad)

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
        if not self._layout.known:
            self._add((n, p) for n, p in named_parameters if p.requires_grad)

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
        slot = self._layout.slots.get(id(parameter))
        if not self._gradient.allocated or slot is None or self.memory.residual is None:
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
        flat = flatten(parameter, gradient)
        # once a step: on an accelerator it waits for the device
        if self._scale is None:
            self._scale = self._loss_scale()
        if self._scale != 1:
            flat = flat.to(self._layout.dtype) * (1 / self._scale)
        slot = self._layout.slots.get(id(parameter))
        if not self._gradient.allocated or slot is None:
            return flat
        return self.memory.preview(flat, slot)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs, of this rank alone: every rank saves its own.

        Returns
        -------
        dict
            One entry, ``rank0`` on rank 0, so that ``torch.distributed.checkpoint`` can save all ranks' under one
            name: a dictionary with step, world_size, memory and dense_memory (tensors by kind and parameter, of
            compressed and of densely averaged parameters), memory_counts, and compressor (bytes).
        """
        memory: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        for group in self._remembered():
            if self._gradient.allocated:
                memory[group.key] = {
                    kind: {  # zeros for what lost its place to a sparse gradient: a template made before lists it
                        n: tensor[group.slots[n]].clone() if n in group.slots else blank
                        for n, blank in self._blank(group).items()
                    }
                    for kind, tensor in group.tensors.items()
                }
            elif self._restored is not None:
                memory[group.key] = dict(self._restored.get(group.key, {}))
            else:  # what a distributed checkpoint loads into
                kinds = group.kinds if self._layout.known else ()
                memory[group.key] = {kind: self._blank(group) for kind in kinds}
        rank, world = self._rank_and_world()
        return {
            f"rank{rank}": {
                "step": self.step,
                "world_size": world,
                **memory,
                "memory_counts": self.memory.state_dict(),
                "system": type(self.compressor).__name__,
                "compressor": packed(self.compressor.state_dict()),
            }
        }

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
            some of them are not what the training owes. If compressor, memory or parameters differ from the saved
            ones; at once if the parameters are known, else at the first step. Nothing has been restored then.
        """
        rank, world = self._rank_and_world()
        if f"rank{rank}" not in state:
            has = ", ".join(map(str, state)) or "nothing"
            raise InputError(
                f"this is rank {rank}, and the checkpoint holds {has}: every rank saves and loads its own"
            )
        own = state[f"rank{rank}"]
        if int(own["world_size"]) != world:
            raise InputError(
                f"the checkpoint is of {own['world_size']} ranks, and these are {world}"
            )
        name = type(self.compressor).__name__
        if own["system"] != name:
            raise InputError(f"the checkpoint is of {own['system']}, and this is {name}")
        if (own["step"] or own["memory"]) and self.memory.kinds != tuple(own["memory"]):
            held, wanted = (", ".join(k) or "nothing" for k in (own["memory"], self.memory.kinds))
            raise InputError(
                f"the checkpoint's memory holds {held} where this one holds {wanted}: build the state with the same "
                "memory, and with named_parameters before a distributed checkpoint is loaded into it"
            )
        if own["memory"] and self._layout.known:
            self._check_memory(own)
        self.compressor.load_state_dict(unpacked(own["compressor"], "compressor"))
        if own.get("memory_counts"):
            self.memory.load_state_dict(own["memory_counts"])
        self.step = int(own["step"])
        self._agreed = False
        self._restored = own
        if self._gradient.allocated:
            self._restore()

    @contextmanager
    def naming_step(self) -> Iterator[None]:
        """Say in errors of the exchange which step it was. Used by the hook."""
        try:
            yield
        except BaseException as error:
            self._scale = None  # of a step that failed
            self._used.clear()
            if isinstance(error, ExchangeError):
                raise ExchangeError(f"step {self.step}: {error}") from error
            raise

    def begin(self, device: torch.device) -> None:
        """Begin a step; also drops what an interrupted backward pass left. Called by the hook.

        Parameters
        ----------
        device : torch.device
            Device of the gradients.
        """
        self.held.clear()
        self._problem = ""
        self.sparse_bad = 0
        self._scale = self._loss_scale()
        self.compressor.abandon()
        self._schedule.begin(self.step)
        self._agree(device)
        if self.compressor.streams and not self._gradient.allocated:
            self._allocate(device)

    def skip(self, parameters: Iterable[torch.Tensor]) -> None:
        """Leave parameters with sparse gradients to the hook, which averages them exactly.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters of one bucket.
        """
        for parameter in parameters:
            if self.compressor.streams:
                name = self._layout.name(parameter)
                raise InputError(
                    f"{name} has a sparse gradient, and {type(self.compressor).__name__} sends layer by layer: use "
                    "sparse=False, or a compressor of the whole model"
                )
            if self.memory.dense_kinds:
                name = self._layout.name(parameter) if self._layout.known else "a parameter"
                raise InputError(
                    f"{name} has a sparse gradient, for which {type(self.memory).__name__} keeps no momentum: use "
                    "sparse=False, or error feedback alone"
                )
            self._layout.skip(parameter)

    def use(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that this rank used parameters in the step, where autograd does not tell. Called by the hook.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters.
        """
        self._used.update(map(id, parameters))

    def ready(self, pairs: list[Pair]) -> None:
        """Take gradients that are ready; a compressor that streams sends them. Called by the hook.

        Parameters
        ----------
        pairs : list of (parameter, gradient)
            Gradients of one bucket.
        """
        if self._streams():
            self._layout.require(parameter for parameter, _ in pairs)
            self._push(pairs, self._take(pairs) or min(self.sparse_bad, _LARGEST_FLAG))

    def complete(self, pairs: list[Pair]) -> float | None:
        """Exchange, put the average into the gradients, and settle the memory. Called by the hook.

        Parameters
        ----------
        pairs : list of (parameter, gradient)
            Gradients of all buckets of the step.

        Returns
        -------
        float or None
            What every gradient was filled with, where the step was refused; else None.

        Raises
        ------
        NonFiniteGradientError, ExchangeError, InputError
            As :func:`gradstats.hooks.compression_hook` says.
        """
        if not self._layout.known:
            self._add((str(i), parameter) for i, (parameter, _) in enumerate(pairs))
        layout, dense_step = self._layout, self._schedule.dense(self.step)
        layout.check([parameter for parameter, _ in pairs])
        if not pairs:  # sparse gradients alone, which the hook has averaged
            if self.sparse_bad:
                world = dist.get_world_size(self.process_group)
                return self._refuse(pairs, Reduced([self.sparse_bad] * world))
            self.step += 1
            return None
        if not self._gradient.allocated:
            self._allocate(pairs[0][1].device)
        flag = 0
        if not self._streams():
            flag = self._take(pairs) or min(self.sparse_bad, _LARGEST_FLAG)
            if not dense_step:
                self._push(pairs, flag)
        compressor = DenseCompressor() if dense_step else self.compressor
        corrected = self.memory.corrected
        diagnosed = (
            self.diagnose_every > 0 and self.step % self.diagnose_every == 0 and layout.numel > 0
        )
        dense_mean = corrected.clone() if diagnosed else None
        # before the exchange, after which the ratios may change
        targets = (
            [self.compressor.target(s.stop - s.start, name) for name, s in layout.parts()]
            if diagnosed
            else []
        )
        target = compressor.target(layout.numel)
        dense_layers = self._dense_layers() if self.memory.masking and not dense_step else []
        unused = self._remember_unused(pairs)
        reduced = compressor.reduce(corrected, self.process_group, flag)
        if any(reduced.flags):
            return self._refuse(pairs, reduced)
        assert reduced.mean is not None
        assert reduced.residual is not None
        if layout.dense_numel:
            all_reduce_mean(self._gradient.dense, self.process_group)
            self.memory.update_dense(self._gradient.dense)
        assert self._scale is not None
        self._gradient.write(pairs, reduced.mean, self._scale)
        # finite here, infinite in float16; mean and dtype, and so the answer, are the same on every rank
        over = count_bad([g for _, g in pairs if g.dtype == torch.float16])
        if over:
            return self._refuse(pairs, Reduced([over] * len(reduced.flags)))
        if dense_mean is not None:
            self.diagnosis = diagnose(
                self.step,
                layout.parts(),
                targets,
                reduced.mean,
                all_reduce_mean(dense_mean, self.process_group),
                reduced.sent,
                reduced.residual,
            )
        if compressor.feedback:
            self.memory.settle(reduced.residual, _outside(reduced.sent, dense_layers))
        else:  # nothing is owed of what was not sent
            self.memory.settle(reduced.residual.zero_(), None)
        dense_bytes = self._gradient.dense.numel() * self._gradient.dense.element_size()
        self._record(
            threshold=reduced.threshold,
            selected=reduced.selected,
            target=target,
            bytes_sent=reduced.bytes_sent + dense_bytes,
            union=reduced.union,
            select_seconds=reduced.select_seconds,
            communicate_seconds=reduced.communicate_seconds,
            overlapped_seconds=reduced.overlapped_seconds,
        )
        if unused:
            after_backward(lambda: self._give_back(unused))
        return None

    def _record(self, **numbers: Any) -> None:
        """Note what the step did, and go on to the next."""
        self.last = StepRecord(
            step=self.step, numel=self._layout.numel, problem=self._problem, **numbers
        )
        self._used.clear()
        self._scale = None
        self._hidden = self._hidden + 1 if self._problem and self.nonfinite != "propagate" else 0
        if self._hidden == _PATIENCE:
            warnings.warn(
                f"gradients were not finite in {_PATIENCE} steps in a row, and nonfinite={self.nonfinite!r} hides it; "
                "with a loss scaler pass scaler=, so that it lowers its scale",
                stacklevel=2,
            )
        self.step += 1

    def _add(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = list(named_parameters)
        self._layout.add(named)
        used = self._used  # alone: a parameter must not keep the state and its memory alive
        for _, parameter in named:
            register: Any = parameter.register_post_accumulate_grad_hook
            register(lambda p: used.add(id(p)))

    def _allocate(self, device: torch.device) -> None:
        self._gradient.allocate(device)
        if self._restored is not None:
            self._check_memory(self._restored)
            self._restore()

    def _remembered(self) -> tuple[_Group, _Group]:
        """Return what the memory holds of compressed and of densely averaged parameters."""
        memory, layout, exists = self.memory, self._layout, self._gradient.allocated
        dense = dict(layout.dense_parts())
        return (
            _Group(
                "memory",
                memory.kinds,
                memory.tensors() if exists else {},
                dict(layout.parts()),
                layout.all,
            ),
            _Group(
                "dense_memory",
                memory.dense_kinds,
                memory.dense_tensors() if exists else {},
                dense,
                {name: slot.stop - slot.start for name, slot in dense.items()},
            ),
        )

    def _blank(self, group: _Group) -> dict[str, torch.Tensor]:
        """Return zeros for every parameter that a group ever had, in the model's order."""
        return {n: torch.zeros(d, dtype=self._layout.dtype) for n, d in group.sizes.items()}

    def _check_memory(self, saved: Mapping[str, Any]) -> None:
        for group in self._remembered():
            for tensors in saved.get(group.key, {}).values():
                if list(tensors) != list(group.sizes):
                    odd = sorted(set(tensors) ^ set(group.sizes)) or ["order of parameters"]
                    raise InputError(f"the checkpoint's residuals are of another model: {odd[0]}")
                for name, numel in group.sizes.items():
                    if tensors[name].numel() != numel:
                        raise InputError(
                            f"the checkpoint's residual of {name} has {tensors[name].numel()} elements, not {numel}"
                        )

    def _restore(self) -> None:
        assert self._restored is not None
        for group in self._remembered():
            # a checkpoint of before the first step may hold nothing
            for tensor in group.tensors.values():
                tensor.zero_()
            for kind, saved in self._restored.get(group.key, {}).items():
                for name, slot in group.slots.items():
                    group.tensors[kind][slot].copy_(saved[name])
        self._restored = None

    def _rank_and_world(self) -> tuple[int, int]:
        """Return this rank and the number of ranks, as they were while the process group lived."""
        if dist.is_initialized():
            group = self.process_group
            self._identity = dist.get_rank(group), dist.get_world_size(group)
        return self._identity or (0, 1)

    def _loss_scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def _agree(self, device: torch.device) -> None:
        """In the first step of a run, check that all ranks are at the same one: checkpoints may differ."""
        if self._agreed:
            return
        self._rank_and_world()
        steps = all_gather_flags(self.step, self.process_group, device)
        if len(set(steps)) > 1:
            raise InputError(
                f"the ranks begin at steps {', '.join(map(str, steps))}: load checkpoints of one step on all of them"
            )
        self._agreed = True

    def _streams(self) -> bool:
        """Tell whether buckets are sent as they come."""
        return self.compressor.streams and self.clip is None and not self._schedule.dense(self.step)

    def _push(self, pairs: list[Pair], flag: int) -> None:
        """Give parameters that are ready to a compressor that streams."""
        slots = self._layout.slots
        layers = [(self._layout.name(p), slots[id(p)]) for p, _ in pairs if id(p) in slots]
        self.compressor.push(self.memory.corrected, layers, self.process_group, flag)

    def _take(self, pairs: list[Pair]) -> int:
        """Add the memory to gradients; return how many elements are not finite, after the policy saw to them."""
        assert self._scale is not None
        bad = count_bad(self._gradient.take(pairs, self._factor(pairs)))
        if bad and self.nonfinite == "zero":
            where = self._gradient.first_bad()
            self._problem = f"{bad} NaN or infinite elements taken as zero{where}"
            zero_bad(pairs)
            bad = count_bad(self._gradient.take(pairs, self._factor(pairs)))
        return min(bad, _LARGEST_FLAG)

    def _factor(self, pairs: list[Pair]) -> float:
        """Return what gradients are multiplied by: clipping, and one over the loss scale."""
        assert self._scale is not None
        if self.clip is None:
            return 1 / self._scale
        bound = self.clip / math.sqrt(dist.get_world_size(self.process_group))
        return self._gradient.clipping(pairs, bound, self._scale) / self._scale

    def _refuse(self, pairs: list[Pair], reduced: Reduced) -> float:
        """Raise, or take the step as one without an update: a gradient somewhere is not finite."""
        ranks = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(reduced.flags) if n)
        self._problem = f"step {self.step}: NaN or infinite gradient elements: {ranks}{self._gradient.first_bad()}"
        if self.nonfinite == "raise":
            raise NonFiniteGradientError(self._problem)
        fill = math.inf if self.nonfinite == "propagate" else 0.0
        for _, gradient in pairs:
            gradient.fill_(fill)
        self._record(threshold=math.nan, selected=0, bytes_sent=reduced.bytes_sent)
        return fill

    def _dense_layers(self) -> list[slice]:
        """Return the places of layers that send all their elements: nothing of their momentum is stale."""
        layers = (
            self._layout.parts()
            if self.compressor.streams
            else [(None, slice(0, self._layout.numel))]
        )
        target = self.compressor.target
        return [s for name, s in layers if target(s.stop - s.start, name) == s.stop - s.start]

    def _remember_unused(self, pairs: Sequence[Pair]) -> list[_Unused]:
        """Return the memory of parameters this rank did not use: if no rank did, DDP does not apply the update."""
        unused = [pair for pair in pairs if id(pair[0]) not in self._used]
        return [
            _Unused(*pair, group.key, slot, {k: t[slot].clone() for k, t in group.tensors.items()})
            for group in (self._remembered() if unused else ())
            for pair in unused
            if (slot := group.slots.get(self._layout.name(pair[0]))) is not None
        ]

    def _give_back(self, unused: Sequence[_Unused]) -> None:
        """Restore the memory of parameters whose update DDP did not apply."""
        groups = {group.key: group for group in self._remembered()}
        for parameter, gradient, key, slot, before in unused:
            applied = parameter.grad is not None and torch.equal(
                flatten(parameter, gradient), real_view(parameter.grad).reshape(-1)
            )
            if not applied:
                for kind, tensor in groups[key].tensors.items():
                    tensor[slot] = before[kind]


def _outside(positions: torch.Tensor | None, layers: Sequence[slice]) -> torch.Tensor | None:
    """Return the positions that are in none of some layers, which are in order and apart."""
    if positions is None or not layers:
        return positions
    starts, stops = (
        torch.tensor(ends, device=positions.device)
        for ends in zip(*((s.start, s.stop) for s in layers), strict=True)
    )
    layer = torch.bucketize(positions, stops, right=True)
    inside = positions >= starts[layer.clamp(max=len(layers) - 1)]
    return positions[(layer == len(layers)) | ~inside]


def load_together(states: Sequence[CompressionState], saved: Sequence[Mapping[str, Any]]) -> None:
    """Restore several states, all of them or none.

    Parameters
    ----------
    states : sequence of CompressionState
        States of one training.
    saved : sequence of mapping
        What the :meth:`CompressionState.state_dict` of each returned.

    Raises
    ------
    InputError
        As :meth:`CompressionState.load_state_dict` does. Nothing has been restored then.
    """
    before = [state.state_dict() for state in states]
    try:
        for state, own in zip(states, saved, strict=True):
            state.load_state_dict(own)
    except BaseException:
        for state, own in zip(states, before, strict=True):
            state.load_state_dict(own)
        raise


def packed(state: Mapping[str, Any]) -> bytes:
    """Return a state as bytes: a distributed checkpoint that is loaded into a template cannot follow its structure.

    Parameters
    ----------
    state : mapping
        What changes its structure from step to step, such as what a compressor or an optimizer keeps.

    Returns
    -------
    bytes
        For :func:`unpacked`.

    Raises
    ------
    InputError
        If it holds what no checkpoint can be read back with.
    """

    def plain(value: object) -> object:
        value = value.item() if isinstance(value, np.generic) else value
        if not isinstance(value, _PLAIN):
            raise InputError(
                f"a checkpoint holds tensors, numbers and text, not {shown(value)}: it could not be read back"
            )
        return value

    stream = io.BytesIO()
    torch.save(tree_map(plain, state), stream)
    return stream.getvalue()


def unpacked(data: bytes, what: str) -> dict[str, Any]:
    """Return what :func:`packed` made bytes of.

    Parameters
    ----------
    data : bytes
        Part of a checkpoint.
    what : str
        Its name, for an error.

    Raises
    ------
    InputError
        If the bytes are damaged.
    """
    try:
        return dict(torch.load(io.BytesIO(data), weights_only=True))
    except Exception as error:  # whatever damaged bytes raise
        raise InputError(f"the checkpoint's {what} cannot be read: {first_line(error)}") from None


def count_bad(parts: Sequence[torch.Tensor]) -> int:
    """Return the number of elements that are not finite.

    Parameters
    ----------
    parts : sequence of tensor
        Elements.

    Returns
    -------
    int
        Number of NaN and infinite ones.
    """
    # one pass; a false alarm, sums that overflow, costs one more
    if not parts or torch.isfinite(torch.stack([part.sum() for part in parts]).sum()):
        return 0
    return sum(part.numel() - int(torch.isfinite(part).sum()) for part in parts)
