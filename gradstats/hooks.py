"""A DDP communication hook that compresses gradients, and its checkpointable state.

Two lines in a training script::

    state = CompressionState(TopK(0.001), error_feedback=True)
    ddp_model.register_comm_hook(state, compression_hook)

The gradient is compressed as one vector over the whole model, as in the papers: buckets are held until the last one
arrives. The collective then runs on the calling thread, and nothing of Python's is left with a communication
thread afterwards: releasing it while the interpreter shuts down would abort the process (see
:mod:`gradstats.collectives.plain`).
"""

# No `from __future__ import annotations` here: DDP reads the hook's annotations at run time.

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist

# mypy does not see `dist.GradBucket`; this private path is the same class.
from torch._C._distributed_c10d import GradBucket

from gradstats.collectives.plain import all_reduce_mean
from gradstats.compressors import Compressor, DenseReducer, Reduced, Reducer, SparseReducer
from gradstats.errors import ExchangeError, InputError, NonFiniteGradientError
from gradstats.memory import ErrorFeedback, Memory, NoMemory
from gradstats.primitives import warm_up

__all__ = ["CompressionState", "NonFinite", "StepRecord", "compression_hook", "dgc_warm_up"]

NonFinite: TypeAlias = Literal["raise", "skip", "zero"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one rank's compressor did in one step.

    Attributes
    ----------
    step : 0 for the first synchronised backward pass.
    threshold : η on this rank, NaN without one.
    selected : elements this rank sent, k̂.
    numel : elements of the compressed part of the gradient, d.
    bytes_sent : bytes of this rank's messages, padding included; the dense part's too.
    union : positions at which any rank sent something: union ÷ k is the build-up.
    select_seconds, communicate_seconds : of this rank's wall clock.
    problem : what was wrong with the gradient and handled by policy; empty if nothing.
    """

    step: int
    threshold: float
    selected: int
    numel: int
    bytes_sent: int
    union: int = 0
    select_seconds: float = 0.0
    communicate_seconds: float = 0.0
    problem: str = ""


@dataclass(slots=True)
class _HeldBucket:
    buffer: torch.Tensor
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    future: torch.futures.Future[torch.Tensor]


def dgc_warm_up(
    steps_per_epoch: int, ratios: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004, 0.001)
) -> Callable[[int], float]:
    """Return DGC's schedule: the n-th ratio in the n-th epoch, the last one from then on (Lin et al. 2018).

    A ratio of 1 is a dense step.
    """
    return lambda step: ratios[min(step // steps_per_epoch, len(ratios) - 1)]


class CompressionState:
    """State of :func:`compression_hook`: memory, compressor, step.

    Parameters
    ----------
    compressor : what to send of each gradient, or a whole exchange (:class:`gradstats.compressors.Reducer`).
    error_feedback : add what was not sent to the next gradient; None for what the compressor is made for.
    memory : other than plain error feedback, such as :class:`gradstats.memory.MomentumCorrection`.
    named_parameters : ``model.named_parameters()``; gives the residuals the names under which they are
        checkpointed, and the flat gradient the model's order. Without it parameters are numbered
        in the order of the first backward pass.
    dense_below : parameters with fewer elements are averaged densely, in one message.
    exclude : name patterns (``fnmatch``) of parameters to average densely, such as ``"*.bias"`` or an output layer;
        needs `named_parameters`.
    ratio_at : step to ratio, for warm-up (:func:`dgc_warm_up`); 1 is a dense step. For compressors with a ratio.
    clip : local clipping: each of n ranks' gradients is scaled to a norm of at most clip/√n before it is accumulated
        (DGC).
    weight_decay : added to the gradient times the parameter before it is accumulated (RedSync, algorithm 4).
    nonfinite : what NaN or infinity on any rank does, on all of them: ``"raise"`` :class:`NonFiniteGradientError`;
        ``"skip"`` the step, with an update of zero and memories untouched; ``"zero"`` takes such elements as zero.
    process_group : the group to average over; the default one if None.

    Notes
    -----
    Residuals belong to parameters, not buckets: DDP rebuilds its buckets after the first iteration. A step that
    fails (a non-finite gradient, a lost rank) leaves the memory as it was before it.
    """

    def __init__(
        self,
        compressor: Compressor | Reducer,
        *,
        error_feedback: bool | None = None,
        memory: Memory | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        dense_below: int = 0,
        exclude: Sequence[str] = (),
        ratio_at: Callable[[int], float] | None = None,
        clip: float | None = None,
        weight_decay: float = 0.0,
        nonfinite: NonFinite = "raise",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        warm_up()  # here, where it stalls nobody, and not in the first backward pass
        if nonfinite not in get_args(NonFinite):
            raise InputError(f"nonfinite must be one of {', '.join(get_args(NonFinite))}")
        if exclude and named_parameters is None:
            raise InputError("excluding parameters by name needs named_parameters")
        self.reducer = compressor if isinstance(compressor, Reducer) else SparseReducer(compressor)
        if ratio_at is not None and not hasattr(self._ratio_owner(), "ratio"):
            raise InputError(f"{type(compressor).__name__} has no ratio to schedule")
        wanted = self.reducer.feedback if error_feedback is None else error_feedback
        if (wanted or memory is not None) and not self.reducer.feedback:
            raise InputError(f"{type(self.reducer).__name__} leaves no residual to feed back")
        self.memory = memory or (ErrorFeedback() if wanted else NoMemory())
        self.ratio_at = ratio_at
        self.clip = clip
        self.weight_decay = weight_decay
        self.nonfinite = nonfinite
        self.process_group = process_group
        self.step = 0
        self.last: StepRecord | None = None
        """Record of the last step, None before the first."""
        self._dense_below = dense_below
        self._exclude = tuple(exclude)
        self._held: list[_HeldBucket] = []
        self._names: list[str] = []
        self._slots: dict[int, slice] = {}
        self._dense: dict[int, slice] = {}
        self._numel = self._dense_numel = 0
        self._known = self._allocated = False
        self._restored: Mapping[str, Any] | None = None
        if named_parameters is not None:
            self._lay_out((n, p) for n, p in named_parameters if p.requires_grad)

    @property
    def error_feedback(self) -> bool:
        """Whether anything is remembered."""
        return not isinstance(self.memory, NoMemory)

    def _ratio_owner(self) -> Any:
        """Return the object whose ``ratio`` decides how much is sent."""
        return self.reducer.compressor if isinstance(self.reducer, SparseReducer) else self.reducer

    def _lay_out(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._known = True
        for name, parameter in named_parameters:
            n = parameter.numel()
            if n < self._dense_below or any(fnmatch.fnmatchcase(name, e) for e in self._exclude):
                self._dense[id(parameter)] = slice(self._dense_numel, self._dense_numel + n)
                self._dense_numel += n
                continue
            self._names.append(name)
            self._slots[id(parameter)] = slice(self._numel, self._numel + n)
            self._numel += n

    def _allocate(self, device: torch.device) -> None:
        self.memory.allocate(self._numel, device)
        self._allocated = True
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None

    def residual(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the residual that will be added to a parameter's next gradient.

        A float32 view of the parameter's shape; None before the first step, without error feedback, or where the memory
        is not a mere sum (:meth:`corrected` knows).
        """
        slot = self._slots.get(id(parameter))
        if not self._allocated or slot is None or self.memory.residual is None:
            return None
        return self.memory.residual[slot].view(parameter.shape)

    def corrected(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return what will be compressed of a parameter's gradient: gradient plus memory, flat, the same bits.

        But for clipping, which needs the whole gradient, and weight decay.
        """
        flat = gradient.detach().reshape(-1)
        slot = self._slots.get(id(parameter))
        if not self._allocated or slot is None:
            return flat
        return self.memory.preview(flat, slot)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs: step, memory by parameter name, the compressor's state, number of ranks.

        Of this rank alone: every rank saves its own.
        """
        memory: dict[str, dict[str, torch.Tensor]] = {}
        if self._allocated:
            for kind, tensor in self.memory.tensors().items():
                parts = zip(self._names, self._slots.values(), strict=True)
                memory[kind] = {name: tensor[slot].clone() for name, slot in parts}
        elif self._restored is not None:
            memory = dict(self._restored["memory"])
        return {
            "step": self.step,
            "world_size": dist.get_world_size(self.process_group) if dist.is_initialized() else 1,
            "memory": memory,
            "reducer": self.reducer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on the rank that saved it.

        Raises
        ------
        InputError
            If the number of ranks has changed: residuals belong to ranks, and those of some of them are not what the
            training owes. If the parameters differ from the saved ones; at once if they are known, else at
            the first step.
        """
        ranks = dist.get_world_size(self.process_group) if dist.is_initialized() else 1
        if int(state["world_size"]) != ranks:
            raise InputError(
                f"the checkpoint is of {state['world_size']} ranks, and these are {ranks}"
            )
        self.step = int(state["step"])
        self.reducer.load_state_dict(state["reducer"])
        self._restored = state
        if self._allocated:
            self._restore(state)
            self._restored = None

    def _restore(self, state: Mapping[str, Any]) -> None:
        tensors = self.memory.tensors()
        for kind, saved in state["memory"].items():
            if kind not in tensors:
                raise InputError(f"the checkpoint's memory is another: it holds {kind}")
            if list(saved) != self._names:
                odd = sorted(set(saved) ^ set(self._names)) or ["order of parameters"]
                raise InputError(f"the checkpoint's residuals are of another model: {odd[0]}")
            for name, slot in zip(self._names, self._slots.values(), strict=True):
                tensors[kind][slot].copy_(saved[name])

    def _hold(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket; on the last one of the iteration, communicate and complete them all."""
        if bucket.index() == 0:  # also drops what an interrupted backward pass left
            self._held.clear()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        held = _HeldBucket(bucket.buffer(), bucket.parameters(), bucket.gradients(), future)
        self._held.append(held)
        if bucket.is_last():
            buckets, self._held = self._held, []
            self._synchronise(buckets)
            for each in buckets:
                each.future.set_result(each.buffer)
        return future

    def _synchronise(self, buckets: list[_HeldBucket]) -> None:
        if not self._known:
            parameters = [p for bucket in buckets for p in bucket.parameters]
            self._lay_out((str(i), p) for i, p in enumerate(parameters))
        if not self._allocated:
            self._allocate(buckets[0].buffer.device)
        pairs = [
            pair
            for bucket in buckets
            for pair in zip(bucket.parameters, bucket.gradients, strict=True)
        ]
        dense = self._accumulate(pairs)
        problem = ""
        bad = self._count_bad(dense)
        if bad and self.nonfinite == "zero":
            problem = f"{bad} NaN or infinite elements taken as zero{self._where(dense)}"
            for _, gradient in pairs:
                gradient.nan_to_num_(0.0, 0.0, 0.0)
            dense = self._accumulate(pairs)
            bad = self._count_bad(dense)
        try:
            reduced = self._reduce(min(bad, 2**31 - 1))
        except RuntimeError as error:  # what every backend raises when a peer is gone or late
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise ExchangeError(
                f"step {self.step}: the exchange failed, a rank may be lost: {why[0]}"
            ) from error
        if any(reduced.flags):
            problem = self._describe(reduced.flags, dense)
            if self.nonfinite == "raise":
                raise NonFiniteGradientError(problem)
            for _, gradient in pairs:
                gradient.zero_()
            self.last = StepRecord(
                self.step, math.nan, 0, self._numel, reduced.bytes_sent, problem=problem
            )
            self.step += 1
            return
        assert reduced.mean is not None
        assert reduced.residual is not None
        if self._dense_numel:
            all_reduce_mean(dense, self.process_group)
        for parameter, gradient in pairs:
            slot = self._slots.get(id(parameter))
            part = dense[self._dense[id(parameter)]] if slot is None else reduced.mean[slot]
            gradient.copy_(part.view(gradient.shape))
        self.memory.settle(reduced.residual, reduced.sent)
        self.last = StepRecord(
            step=self.step,
            threshold=reduced.threshold,
            selected=reduced.selected,
            numel=self._numel,
            bytes_sent=reduced.bytes_sent + dense.numel() * dense.element_size(),
            union=reduced.union,
            select_seconds=reduced.select_seconds,
            communicate_seconds=reduced.communicate_seconds,
            problem=problem,
        )
        self.step += 1

    def _accumulate(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Write gradient plus memory of the compressed part; return the dense part, (its elements,)."""
        scale = 1.0
        if self.clip is not None:
            norm = math.sqrt(sum(float(g.detach().norm()) ** 2 for _, g in pairs))
            bound = self.clip / math.sqrt(dist.get_world_size(self.process_group))
            scale = min(1.0, bound / norm) if norm > 0 else 1.0
        dense = torch.empty(self._dense_numel, device=self.memory.corrected.device)
        for parameter, gradient in pairs:
            flat = gradient.detach().reshape(-1)
            if scale != 1.0:
                flat = flat * scale
            if self.weight_decay:
                flat = torch.add(flat, parameter.detach().reshape(-1), alpha=self.weight_decay)
            slot = self._slots.get(id(parameter))
            if slot is not None:
                self.memory.add(flat, slot)
            elif id(parameter) in self._dense:
                dense[self._dense[id(parameter)]] = flat.to(torch.float32)
            else:
                raise InputError(
                    "the hook met a parameter that named_parameters did not list; pass the model DDP wraps"
                )
        return dense

    def _count_bad(self, dense: torch.Tensor) -> int:
        corrected = self.memory.corrected
        if torch.isfinite(corrected.sum() + dense.sum()):  # one pass; a false alarm costs one more
            return 0
        parts = corrected, dense
        return sum(part.numel() - int(torch.isfinite(part).sum()) for part in parts)

    def _reduce(self, flag: int) -> Reduced:
        """Exchange the corrected gradient; densely in a step whose ratio is 1."""
        if self.ratio_at is not None:
            ratio = self.ratio_at(self.step)
            if ratio >= 1:
                return DenseReducer().reduce(self.memory.corrected, self.process_group, flag)
            self._ratio_owner().ratio = ratio
        return self.reducer.reduce(self.memory.corrected, self.process_group, flag)

    def _where(self, dense: torch.Tensor) -> str:
        """Name the first parameter whose gradient is not finite here, if any is."""
        for name, slot in zip(self._names, self._slots.values(), strict=True):
            if not torch.isfinite(self.memory.corrected[slot]).all():
                return f" (here first in parameter {name})"
        return " (here in a densely averaged parameter)" if not torch.isfinite(dense).all() else ""

    def _describe(self, flags: list[int], dense: torch.Tensor) -> str:
        """Return the same sentence on every rank, with the parameter on the ranks that can name it."""
        ranks = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(flags) if n)
        return f"step {self.step}: NaN or infinite gradient elements: {ranks}{self._where(dense)}"


def compression_hook(
    state: CompressionState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average compressed gradients over the process group; a DDP communication hook.

    Parameters
    ----------
    state : memory and compressor of this rank.
    bucket : given by DDP.

    Returns
    -------
    Future of the bucket's buffer, holding the average of what the ranks sent. Replicas get identical bits.

    Raises
    ------
    NonFiniteGradientError
        On every rank, when any rank's gradient holds NaN or infinity and the policy is to raise; memories stay as they
        were.
    ExchangeError
        If a rank is lost, within the process group's timeout; memories stay as they were.
    """
    return state._hold(bucket)
