"""A DDP communication hook that compresses gradients, and its checkpointable state.

Two lines in a training script::

    state = CompressionState(TopK(0.001), error_feedback=True)
    ddp_model.register_comm_hook(state, compression_hook)

The gradient is compressed as one vector over the whole model, as in the papers: buckets are held until the last one
arrives. The collective then runs on the calling thread, and nothing of Python's is left with a communication
thread afterwards: releasing it while the interpreter shuts down would abort the process (see
:mod:`gradstats.collectives.packed`).
"""

# No `from __future__ import annotations` here: DDP reads the hook's annotations at run time.

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# mypy does not see `dist.GradBucket`; this private path is the same class.
from torch._C._distributed_c10d import GradBucket

from gradstats.collectives import SparseAllGather
from gradstats.compressors import Compressor
from gradstats.errors import InputError, NonFiniteGradientError
from gradstats.primitives import warm_up

__all__ = ["CompressionState", "StepRecord", "compression_hook"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one rank's compressor did in one step.

    Attributes
    ----------
    step : 0 for the first synchronised backward pass.
    threshold : η on this rank.
    selected : elements this rank sent, k̂.
    numel : elements of the gradient, d.
    bytes_sent : bytes of this rank's messages, padding included.
    """

    step: int
    threshold: float
    selected: int
    numel: int
    bytes_sent: int


@dataclass(slots=True)
class _HeldBucket:
    buffer: torch.Tensor
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    future: torch.futures.Future[torch.Tensor]


class CompressionState:
    """State of :func:`compression_hook`: residuals, compressor, step.

    Parameters
    ----------
    compressor : what to send of each gradient.
    error_feedback : add what was not sent to the next gradient.
    named_parameters : ``model.named_parameters()``; gives the residuals the names under which they are
        checkpointed, and the flat gradient the model's order. Without it parameters are numbered
        in the order of the first backward pass.
    process_group : the group to average over; the default one if None.

    Notes
    -----
    Residuals belong to parameters, not buckets: DDP rebuilds its buckets after the first iteration. A step that
    fails (a non-finite gradient, a lost rank) leaves the residuals as they were before it.
    """

    def __init__(
        self,
        compressor: Compressor,
        *,
        error_feedback: bool = True,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        warm_up()  # here, where it stalls nobody, and not in the first backward pass
        self.compressor = compressor
        self.error_feedback = error_feedback
        self.process_group = process_group
        self.step = 0
        self.last: StepRecord | None = None
        """Record of the last step, None before the first."""
        self._held: list[_HeldBucket] = []
        self._names: list[str] = []
        self._slots: dict[int, slice] = {}
        self._residual: torch.Tensor | None = None
        self._corrected: torch.Tensor | None = None
        self._gather: SparseAllGather | None = None
        self._restored: Mapping[str, Any] | None = None
        self._numel = 0
        if named_parameters is not None:
            self._lay_out((n, p) for n, p in named_parameters if p.requires_grad)

    def _lay_out(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in named_parameters:
            self._names.append(name)
            self._slots[id(parameter)] = slice(self._numel, self._numel + parameter.numel())
            self._numel += parameter.numel()

    def _allocate(self, device: torch.device) -> None:
        self._residual = torch.zeros(self._numel, device=device)
        self._corrected = torch.zeros(self._numel, device=device)
        self._gather = SparseAllGather(self.compressor.target(self._numel), self.process_group)
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None

    def residual(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the residual that will be added to a parameter's next gradient.

        A float32 view of the parameter's shape; None before the first step or without error feedback.
        """
        slot = self._slots.get(id(parameter))
        if not self.error_feedback or self._residual is None or slot is None:
            return None
        return self._residual[slot].view(parameter.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs: step, residuals by parameter name, compressor state."""
        residuals = {}
        if self._residual is not None:
            for name, slot in zip(self._names, self._slots.values(), strict=True):
                residuals[name] = self._residual[slot].clone()
        elif self._restored is not None:
            residuals = dict(self._restored["residuals"])
        return {
            "step": self.step,
            "residuals": residuals,
            "compressor": self.compressor.state_dict(),
            "capacity": self._gather.capacity if self._gather is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on the rank that saved it.

        Raises
        ------
        InputError
            If the parameters differ from the saved ones; at once if they are known, else at the first step.
        """
        self.step = int(state["step"])
        self.compressor.load_state_dict(state["compressor"])
        self._restored = state
        if self._residual is not None:
            self._restore(state)
            self._restored = None

    def _restore(self, state: Mapping[str, Any]) -> None:
        assert self._residual is not None
        assert self._gather is not None
        residuals = state["residuals"]
        if residuals:
            if list(residuals) != self._names:
                odd = sorted(set(residuals) ^ set(self._names)) or ["order of parameters"]
                raise InputError(f"the checkpoint's residuals are of another model: {odd[0]}")
            for name, slot in zip(self._names, self._slots.values(), strict=True):
                self._residual[slot].copy_(residuals[name])
        if state["capacity"] is not None:
            self._gather.capacity = int(state["capacity"])

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
        if not self._slots:
            parameters = [p for bucket in buckets for p in bucket.parameters]
            self._lay_out((str(i), p) for i, p in enumerate(parameters))
        if self._residual is None:
            self._allocate(buckets[0].buffer.device)
        assert self._residual is not None
        assert self._corrected is not None
        assert self._gather is not None
        corrected = self._corrected
        for bucket in buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                slot = self._slot(parameter)
                torch.add(gradient.detach().reshape(-1), self._residual[slot], out=corrected[slot])
        bad = 0
        if not torch.isfinite(corrected.sum()):  # one pass; a false alarm costs one more
            bad = corrected.numel() - int(torch.isfinite(corrected).sum())
        message = self.compressor.compress(corrected) if not bad else None
        empty = corrected[:0]
        gathered = self._gather(
            message.indices if message else empty.long(),
            message.values if message else empty,
            self._numel,
            min(bad, 2**31 - 1),
        )
        if any(gathered.flags):
            self._refuse(gathered.flags, corrected)
        assert message is not None
        mean = gathered.mean(self._numel)
        for bucket in buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                gradient.copy_(mean[self._slot(parameter)].view(gradient.shape))
        if self.error_feedback:
            corrected[message.indices] = 0
            self._residual, self._corrected = corrected, self._residual
        self.last = StepRecord(
            self.step,
            message.threshold,
            message.indices.numel(),
            self._numel,
            gathered.bytes_sent,
        )
        self.step += 1

    def _slot(self, parameter: torch.Tensor) -> slice:
        try:
            return self._slots[id(parameter)]
        except KeyError:
            raise InputError(
                "the hook met a parameter that named_parameters did not list; pass the model DDP wraps"
            ) from None

    def _refuse(self, flags: list[int], corrected: torch.Tensor) -> None:
        """Raise the same error on every rank; name the parameter on the ranks that can."""
        ranks = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(flags) if n)
        where = ""
        for name, slot in zip(self._names, self._slots.values(), strict=True):
            if not torch.isfinite(corrected[slot]).all():
                where = f" (here first in parameter {name})"
                break
        raise NonFiniteGradientError(
            f"step {self.step}: NaN or infinite gradient elements: {ranks}{where}"
        )


def compression_hook(
    state: CompressionState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average compressed gradients over the process group; a DDP communication hook.

    Parameters
    ----------
    state : residuals and compressor of this rank.
    bucket : given by DDP.

    Returns
    -------
    Future of the bucket's buffer, holding the average of what the ranks sent. Replicas get identical bits.

    Raises
    ------
    NonFiniteGradientError
        On every rank, when any rank's gradient holds NaN or infinity; residuals stay as they were.
    """
    return state._hold(bucket)
