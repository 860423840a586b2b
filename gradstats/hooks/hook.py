"""A DDP communication hook that compresses gradients, and its checkpointable state.

Two lines in a training script::

    state = CompressionState(TopK(0.001), error_feedback=True)
    ddp_model.register_comm_hook(state, compression_hook)

The gradient is compressed as one vector over the whole model, as in most papers: buckets are held until the last one
arrives. Layer-wise systems (:class:`gradstats.compressors.Layerwise`) get every bucket at once, and communicate while
backpropagation goes on. Either way nothing of Python's is left with a communication thread afterwards:
releasing it while the interpreter shuts down would abort the process (see :mod:`gradstats.collectives.plain`).
"""

# No `from __future__ import annotations` here: DDP reads the hook's annotations at run time.

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist

# mypy does not see `dist.GradBucket`; this private path is the same class.
from torch._C._distributed_c10d import GradBucket

from gradstats.collectives.plain import all_reduce_mean
from gradstats.compressors import (
    Compressor,
    DenseCompressor,
    Layerwise,
    Reduced,
    Selector,
    SparseCompressor,
)
from gradstats.errors import (
    ExchangeError,
    GradstatsError,
    InputError,
    NonFiniteGradientError,
    first_line,
)
from gradstats.hooks.diagnostics import Diagnosis, diagnose
from gradstats.hooks.layout import ParameterLayout
from gradstats.hooks.memory import ErrorFeedback, Memory, NoMemory
from gradstats.primitives import warm_up
from gradstats.primitives.ratio import target_count
from gradstats.trace.record import StepRecord

__all__ = [
    "CompressionState",
    "NonFinite",
    "compression_hook",
    "dgc_warm_up",
]

NonFinite: TypeAlias = Literal["raise", "skip", "zero"]

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A parameter and its gradient."""

_LARGEST_FLAG = 2**31 - 1
_FEW = 16
"""An update is written position by position where fewer than this share of all are not zero, …"""
_LARGE = 1 << 20
"""… in parameters of this many elements; copying smaller ones takes no longer."""


@dataclass(slots=True)
class _HeldBucket:
    buffer: torch.Tensor
    pairs: list[_Pair]
    future: torch.futures.Future[torch.Tensor]


def dgc_warm_up(
    steps_per_epoch: int, ratios: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004, 0.001)
) -> Callable[[int], float | None]:
    """Return DGC's schedule: the n-th ratio in the n-th epoch, the last one from then on (Lin et al. 2018).

    A ratio of 1 is a dense step.
    """
    return lambda step: ratios[min(step // steps_per_epoch, len(ratios) - 1)]


class CompressionState:
    """State of :func:`compression_hook`: memory, compressor, step.

    Parameters
    ----------
    compressor : what to send of each gradient, or a whole exchange (:class:`gradstats.compressors.Compressor`).
    error_feedback : add what was not sent to the next gradient; None for what the compressor is made for.
    memory : other than plain error feedback, such as :class:`gradstats.hooks.memory.MomentumCorrection`.
    named_parameters : ``model.named_parameters()``; gives the residuals the names under which they are
        checkpointed, and the flat gradient the model's order. Without it parameters are numbered
        in the order of the first backward pass. Layer-wise systems need it.
    dense_below : parameters with fewer elements are averaged densely, in one message.
    exclude : name patterns (``fnmatch``) of parameters to average densely, such as ``"*.bias"`` or an output layer;
        needs `named_parameters`.
    ratio_at : step to ratio, for warm-up (:func:`dgc_warm_up`); 1 is a dense step, None leaves the compressor's.
    clip : local clipping: each of n ranks' gradients is scaled to a norm of at most clip/√n before it is accumulated
        (DGC). Layer-wise systems then send when the backward pass is over and the norm known.
    weight_decay : added to the gradient times the parameter before it is accumulated (RedSync, algorithm 4).
    nonfinite : what NaN or infinity on any rank does, on all of them: ``"raise"`` :class:`NonFiniteGradientError`;
        ``"skip"`` the step, with an update of zero and memories untouched; ``"zero"`` takes such elements as zero.
    diagnose_every : in every n-th step, all-reduce the dense gradient too, and compare (:attr:`diagnosis`); 0 for
        never.
    process_group : the group to average over; the default one if None.

    Notes
    -----
    Residuals belong to parameters, not buckets: DDP rebuilds its buckets after the first iteration. A step that
    fails (a non-finite gradient, a lost rank) leaves the memory as it was before it.
    """

    def __init__(
        self,
        compressor: Selector | Compressor,
        *,
        error_feedback: bool | None = None,
        memory: Memory | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        dense_below: int = 0,
        exclude: Sequence[str] = (),
        ratio_at: Callable[[int], float | None] | None = None,
        clip: float | None = None,
        weight_decay: float = 0.0,
        nonfinite: NonFinite = "raise",
        diagnose_every: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        warm_up()  # here, where it stalls nobody, and not in the first backward pass
        if nonfinite not in get_args(NonFinite):
            raise InputError(f"nonfinite must be one of {', '.join(get_args(NonFinite))}")
        if exclude and named_parameters is None:
            raise InputError("excluding parameters by name needs named_parameters")
        self.compressor = (
            compressor if isinstance(compressor, Compressor) else SparseCompressor(compressor)
        )
        if isinstance(self.compressor, Layerwise) and named_parameters is None:
            raise InputError("a layer-wise system needs named_parameters")
        wanted = self.compressor.feedback if error_feedback is None else error_feedback
        if (wanted or memory is not None) and not self.compressor.feedback:
            raise InputError(f"{type(self.compressor).__name__} leaves no residual to feed back")
        self.memory = memory or (ErrorFeedback() if wanted else NoMemory())
        self.ratio_at = ratio_at
        self.clip = clip
        self.weight_decay = weight_decay
        self.nonfinite = nonfinite
        self.diagnose_every = diagnose_every
        self.process_group = process_group
        self.step = 0
        self._set_ratio()  # raises now, not in the first backward pass
        self.last: StepRecord | None = None
        """Record of the last step, None before the first."""
        self.diagnosis: Diagnosis | None = None
        """Of the last step diagnosed."""
        self._layout = ParameterLayout(dense_below, exclude)
        self._held: list[_HeldBucket] = []
        self._dense = torch.empty(0)
        self._problem = ""
        self._allocated = False
        self._restored: Mapping[str, Any] | None = None
        if named_parameters is not None:
            self._layout.add((n, p) for n, p in named_parameters if p.requires_grad)

    @property
    def error_feedback(self) -> bool:
        """Whether anything is remembered."""
        return not isinstance(self.memory, NoMemory)

    def _ratio_owner(self) -> Any:
        """Return the object whose ``ratio`` decides how much is sent."""
        return (
            self.compressor.compressor
            if isinstance(self.compressor, SparseCompressor)
            else self.compressor
        )

    def _allocate(self, device: torch.device) -> None:
        self.memory.allocate(self._layout.numel, device)
        self._dense = torch.zeros(self._layout.dense_numel, device=device)
        self._allocated = True
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None

    def residual(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the residual that will be added to a parameter's next gradient.

        A float32 view of the parameter's shape; None before the first step, without error feedback, or where the memory
        is not a mere sum (:meth:`corrected` knows).
        """
        slot = self._layout.slots.get(id(parameter))
        if not self._allocated or slot is None or self.memory.residual is None:
            return None
        return self.memory.residual[slot].view(parameter.shape)

    def corrected(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return what will be compressed of a parameter's gradient: gradient plus memory, flat, the same bits.

        But for clipping, which needs the whole gradient, and weight decay.
        """
        flat = gradient.detach().reshape(-1)
        slot = self._layout.slots.get(id(parameter))
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
                parts = self._layout.parts()
                memory[kind] = {name: tensor[slot].clone() for name, slot in parts}
        elif self._restored is not None:
            memory = dict(self._restored["memory"])
        return {
            "step": self.step,
            "world_size": dist.get_world_size(self.process_group) if dist.is_initialized() else 1,
            "memory": memory,
            "compressor": self.compressor.state_dict(),
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
        self.compressor.load_state_dict(state["compressor"])
        self._restored = state
        if self._allocated:
            self._restore(state)
            self._restored = None

    def _restore(self, state: Mapping[str, Any]) -> None:
        tensors = self.memory.tensors()
        for kind, saved in state["memory"].items():
            if kind not in tensors:
                raise InputError(f"the checkpoint's memory is another: it holds {kind}")
            if list(saved) != self._layout.names:
                odd = sorted(set(saved) ^ set(self._layout.names)) or ["order of parameters"]
                raise InputError(f"the checkpoint's residuals are of another model: {odd[0]}")
            for name, slot in self._layout.parts():
                tensors[kind][slot].copy_(saved[name])

    def _hold(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket; on the last one of the iteration, communicate and complete them all."""
        if bucket.index() == 0:  # also drops what an interrupted backward pass left
            self._held.clear()
            self._problem = ""
            if isinstance(self.compressor, Layerwise):
                self.compressor.abandon()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        self._held.append(_HeldBucket(bucket.buffer(), pairs, future))
        with self._lost_ranks_named():
            if self._streams():
                self._push(pairs, self._take(pairs))
            if bucket.is_last():
                buckets, self._held = self._held, []
                self._synchronise([pair for each in buckets for pair in each.pairs])
                for each in buckets:
                    each.future.set_result(each.buffer)
        return future

    @contextmanager
    def _lost_ranks_named(self) -> Iterator[None]:
        try:
            yield
        except GradstatsError:
            raise
        except RuntimeError as error:  # what every backend raises when a peer is gone or late
            raise ExchangeError(
                f"step {self.step}: the exchange failed, a rank may be lost: {first_line(error)}"
            ) from error

    def _ratio(self) -> float | None:
        """Return the ratio scheduled for this step."""
        return None if self.ratio_at is None else self.ratio_at(self.step)

    def _dense_step(self) -> bool:
        return (self._ratio() or 0) >= 1

    def _streams(self) -> bool:
        """Tell whether buckets are sent as they come."""
        return (
            isinstance(self.compressor, Layerwise) and self.clip is None and not self._dense_step()
        )

    def _push(self, pairs: list[_Pair], flag: int) -> None:
        """Give parameters that are ready to a layer-wise system."""
        assert isinstance(self.compressor, Layerwise)
        self._set_ratio()
        slots = self._layout.slots
        layers = [
            (self._layout.name(parameter), slots[id(parameter)])
            for parameter, _ in pairs
            if id(parameter) in slots
        ]
        self.compressor.push(self.memory.corrected, layers, self.process_group, flag)

    def _set_ratio(self) -> None:
        ratio = self._ratio()
        if ratio is not None and ratio < 1:
            owner = self._ratio_owner()
            if not hasattr(owner, "ratio"):
                raise InputError(f"{type(owner).__name__} has no ratio to schedule")
            owner.ratio = ratio

    def _synchronise(self, pairs: list[_Pair]) -> None:
        """Exchange, put the average into the gradients, and settle the memory."""
        layout = self._layout
        if not layout.known:
            layout.add((str(i), parameter) for i, (parameter, _) in enumerate(pairs))
        flag, dense_step = 0, self._dense_step()
        if not self._streams():
            flag = self._take(pairs)
            if isinstance(self.compressor, Layerwise) and not dense_step:
                self._push(pairs, flag)
        self._set_ratio()
        compressor = DenseCompressor() if dense_step else self.compressor
        corrected = self.memory.corrected
        diagnosed = self.diagnose_every > 0 and self.step % self.diagnose_every == 0
        dense_mean = corrected.clone() if diagnosed else None
        # before the exchange, after which the ratios may change
        targets = self._layer_targets() if diagnosed else []
        target = self._whole_target(dense_step)
        reduced = compressor.reduce(corrected, self.process_group, flag)
        if any(reduced.flags):
            self._refuse(pairs, reduced)
            return
        assert reduced.mean is not None
        assert reduced.residual is not None
        if layout.dense_numel:
            all_reduce_mean(self._dense, self.process_group)
        self._write(pairs, reduced.mean, reduced.touched)
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
        self.memory.settle(reduced.residual, reduced.sent)
        self.last = StepRecord(
            step=self.step,
            threshold=reduced.threshold,
            selected=reduced.selected,
            target=target,
            numel=layout.numel,
            bytes_sent=reduced.bytes_sent + self._dense.numel() * self._dense.element_size(),
            union=reduced.union,
            select_seconds=reduced.select_seconds,
            communicate_seconds=reduced.communicate_seconds,
            overlapped_seconds=reduced.overlapped_seconds,
            problem=self._problem,
        )
        self.step += 1

    def _write(
        self, pairs: list[_Pair], mean: torch.Tensor, touched: list[torch.Tensor] | None
    ) -> None:
        """Put the average into the gradients."""
        slots = self._layout.slots
        few = touched is not None and _FEW * sum(p.numel() for p in touched) < mean.numel()
        for parameter, gradient in pairs:
            slot = slots.get(id(parameter))
            if slot is None:
                dense = self._dense[self._layout.dense_slots[id(parameter)]]
                gradient.copy_(dense.view(gradient.shape))
            elif few and gradient.is_contiguous() and gradient.numel() >= _LARGE:
                assert touched is not None
                flat = gradient.view(-1).zero_()  # half the memory traffic of a copy
                ends = torch.tensor([slot.start, slot.stop], device=flat.device)
                for positions in touched:
                    first, last = torch.searchsorted(positions, ends).tolist()
                    here = positions[first:last]
                    flat[here - slot.start] = mean[here]
            else:
                gradient.copy_(mean[slot].view(gradient.shape))

    def _target(self, name: str, numel: int) -> int:
        """Return k of a layer, or of the whole; 0 where there is none."""
        if isinstance(self.compressor, Layerwise) and name in self.compressor.compressors:
            return self.compressor.compressors[name].target(numel)
        ratio = getattr(self._ratio_owner(), "ratio", None)
        return 0 if ratio is None else target_count(ratio, numel)

    def _layer_targets(self) -> list[int]:
        return [self._target(name, slot.stop - slot.start) for name, slot in self._layout.parts()]

    def _whole_target(self, dense_step: bool) -> int:
        if dense_step:
            return self._layout.numel
        if isinstance(self.compressor, Layerwise):
            return sum(self._layer_targets())
        return self._target("", self._layout.numel)

    def _refuse(self, pairs: list[_Pair], reduced: Reduced) -> None:
        """Raise, or take the step as one of zero gradients: a gradient somewhere is not finite."""
        problem = self._describe(reduced.flags)
        if self.nonfinite == "raise":
            raise NonFiniteGradientError(problem)
        for _, gradient in pairs:
            gradient.zero_()
        self.last = StepRecord(
            self.step, math.nan, 0, self._layout.numel, reduced.bytes_sent, problem=problem
        )
        self.step += 1

    def _take(self, pairs: list[_Pair]) -> int:
        """Add the memory to gradients; return how many elements are not finite, after the policy saw to them."""
        if not self._allocated:
            self._allocate(pairs[0][1].device)
        bad = self._count_bad(self._accumulate(pairs))
        if bad and self.nonfinite == "zero":
            self._problem = f"{bad} NaN or infinite elements taken as zero{self._where()}"
            for _, gradient in pairs:
                gradient.nan_to_num_(0.0, 0.0, 0.0)
            bad = self._count_bad(self._accumulate(pairs))
        return min(bad, _LARGEST_FLAG)

    def _accumulate(self, pairs: list[_Pair]) -> list[torch.Tensor]:
        """Write gradient plus memory of the compressed part, and the dense part; return what was written."""
        scale = 1.0
        if self.clip is not None:
            norm = math.sqrt(sum(float(g.detach().norm()) ** 2 for _, g in pairs))
            bound = self.clip / math.sqrt(dist.get_world_size(self.process_group))
            scale = min(1.0, bound / norm) if norm > 0 else 1.0
        written = []
        for parameter, gradient in pairs:
            self._layout.check(parameter)
            flat = gradient.detach().reshape(-1)
            if scale != 1.0:
                flat = flat * scale
            if self.weight_decay:
                flat = torch.add(flat, parameter.detach().reshape(-1), alpha=self.weight_decay)
            slot = self._layout.slots.get(id(parameter))
            if slot is not None:
                self.memory.add(flat, slot)
                written.append(self.memory.corrected[slot])
            else:
                part = self._dense[self._layout.dense_slots[id(parameter)]]
                written.append(part.copy_(flat))
        return written

    @staticmethod
    def _count_bad(parts: list[torch.Tensor]) -> int:
        # one pass; a false alarm, sums that overflow, costs one more
        if torch.isfinite(torch.stack([part.sum() for part in parts]).sum()):
            return 0
        return sum(part.numel() - int(torch.isfinite(part).sum()) for part in parts)

    def _where(self) -> str:
        """Name the first parameter whose gradient is not finite here, if any is."""
        for name, slot in self._layout.parts():
            if not torch.isfinite(self.memory.corrected[slot]).all():
                return f" (here first in parameter {name})"
        dense = torch.isfinite(self._dense).all()
        return "" if dense else " (here in a densely averaged parameter)"

    def _describe(self, flags: list[int]) -> str:
        """Return the same sentence on every rank, with the parameter on the ranks that can name it."""
        ranks = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(flags) if n)
        return f"step {self.step}: NaN or infinite gradient elements: {ranks}{self._where()}"


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
