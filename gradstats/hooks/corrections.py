"""Local optimizers before the compression: what accumulates unsent are their steps, and not gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch

from gradstats.errors import InputError
from gradstats.hooks.memory import Memory
from gradstats.primitives.ratio import check_number, check_several, shown

__all__ = ["AdamCorrection", "MomentumCorrection", "Nesterov"]

Nesterov: TypeAlias = Literal["dgc", "redsync"]
"""Published forms of Nesterov's momentum, see :class:`MomentumCorrection`."""


class _Rule(ABC):
    """A local optimizer, which turns each gradient into the terms of a step."""

    kinds: ClassVar[tuple[str, ...]]

    def allocate(self, numel: int, device: torch.device, dtype: torch.dtype) -> None:
        """Start from zero. What a step computes lies in buffers of its own until it is settled."""
        self._now, self._next = (
            [torch.zeros(numel, dtype=dtype, device=device) for _ in self.kinds] for _ in range(2)
        )

    def terms(self, gradient: torch.Tensor, slot: slice, further: bool) -> Sequence[torch.Tensor]:
        """Return what is added up, in this order, and remember what the step will have changed."""
        out = [each[slot] for each in self._next]
        return (self._go_on if further else self._step)(gradient, slot, out)

    def preview(self, gradient: torch.Tensor, slot: slice, further: bool) -> Sequence[torch.Tensor]:
        """Return the terms, and change nothing."""
        out = [torch.empty_like(each[slot]) for each in self._now]
        return (self._go_on if further else self._step)(gradient, slot, out)

    @abstractmethod
    def _step(
        self, gradient: torch.Tensor, slot: slice, out: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Write the buffers' next values, and return the terms."""

    @abstractmethod
    def _go_on(
        self, gradient: torch.Tensor, slot: slice, out: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Do the same with a further part of a step's gradient: what it adds to a step that an exchange began."""

    def settle(self, mask: torch.Tensor | None) -> None:
        """Take over what the step has computed, and set the momentum to zero at some positions."""
        # before the mask, which must leave the old buffers as they are, for discard()
        self._now, self._next = self._next, self._now
        if mask is not None:
            self._now[0][mask] = 0

    def discard(self) -> None:
        """Take the buffers of before the last step again: it has written into others."""
        self._now, self._next = self._next, self._now

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name."""
        return dict(zip(self.kinds, self._now, strict=True))


class _Momentum(_Rule):
    """Momentum SGD, with Nesterov's momentum in one of the published forms."""

    kinds = ("velocity",)

    def __init__(self, momentum: float, nesterov: Nesterov | None) -> None:
        self.momentum = momentum
        self.nesterov = nesterov

    def _step(
        self, gradient: torch.Tensor, slot: slice, out: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        (before,), (u,) = [each[slot] for each in self._now], out
        if self.nesterov == "dgc":
            # u ← m (u + g)
            torch.add(before, gradient, out=u).mul_(self.momentum)
        else:
            # u ← m u + g
            torch.add(gradient, before, alpha=self.momentum, out=u)
        # v ← v + u, and + g with Nesterov's momentum
        return (u, gradient) if self.nesterov else (u,)

    def _go_on(
        self, gradient: torch.Tensor, slot: slice, out: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        # u and what accumulates are sums over the gradients of a step; u has decayed, and has been added
        more = gradient * self.momentum if self.nesterov == "dgc" else gradient
        torch.add(self._now[0][slot], more, out=out[0])
        return (more, gradient) if self.nesterov else (more,)


class _Adam(_Rule):
    """Adam, with the correction of its bias."""

    kinds = ("first_moment", "second_moment")

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self.betas = betas
        self.eps = eps
        self.step = 0

    def _step(
        self, gradient: torch.Tensor, slot: slice, out: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        first, second = self.betas
        # lerp does not promote dtypes
        gradient = gradient.to(out[0].dtype)
        # m ← β₁ m + (1 − β₁) g, and v ← β₂ v + (1 − β₂) g²
        torch.lerp(self._now[0][slot], gradient, 1 - first, out=out[0])
        torch.mul(self._now[1][slot], second, out=out[1]).addcmul_(
            gradient, gradient, value=1 - second
        )
        # √v̂ + ε; the step is counted only when it is settled, hence + 1
        root = (out[1] / (1 - second ** (self.step + 1))).sqrt_().add_(self.eps)
        return (out[0] / (1 - first ** (self.step + 1)) / root,)

    def _go_on(
        self, gradient: torch.Tensor, slot: slice, out: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        # Adam is not linear in the gradient: the steps of two parts do not add up to that of their sum
        raise InputError(
            "AdamCorrection has made a step of a part of this gradient: exchange once for each optimizer.step(), with "
            "no_sync() around the other micro-steps or one backward() of the sum of the losses"
        )

    def settle(self, mask: torch.Tensor | None) -> None:
        """Take over what the step has computed, and count the step."""
        super().settle(mask)
        self.step += 1

    def discard(self) -> None:
        """Take the buffers of before the last step again, and its number."""
        super().discard()
        self.step -= 1


class _Accumulating(Memory):
    """Memory of the steps of a local optimizer: what is compressed is the sum of those not sent.

    Densely averaged parameters have the same optimizer, which there steps with the mean.
    """

    needs_residual = False

    def __init__(self, rule: _Rule, dense_rule: _Rule, masking: bool) -> None:
        self.masking = masking
        self._rule, self._dense_rule = rule, dense_rule

    def allocate(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Start from zero."""
        self._rule.allocate(numel, device, dtype)
        self._accumulated, self.corrected = (
            torch.zeros(numel, dtype=dtype, device=device) for _ in range(2)
        )

    def add(self, gradient: torch.Tensor, slot: slice, further: bool = False) -> None:
        """Write what has accumulated, and this step, into :attr:`corrected`."""
        self._added(self._rule.terms(gradient, slot, further), slot, self.corrected[slot])

    def preview(
        self,
        gradient: torch.Tensor,
        slot: slice,
        out: torch.Tensor | None = None,
        further: bool = False,
    ) -> torch.Tensor:
        """Return what will have accumulated."""
        return self._added(self._rule.preview(gradient, slot, further), slot, out)

    def _added(
        self, terms: Sequence[torch.Tensor], slot: slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what has accumulated plus the terms of a step, added in their order."""
        first, *others = terms
        # add() and preview() both come here: one order of additions, the same bits
        out = torch.add(self._accumulated[slot], first, out=out)
        for each in others:
            out.add_(each)
        return out

    def settle(self, residual: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Keep what was not sent of the steps, and mask the momentum."""
        # where all was sent, as in a dense step, nothing is stale
        self._rule.settle(sent if self.masking else None)
        # densely averaged parameters send all of their elements: no velocity of theirs is stale
        self._dense_rule.settle(None)
        if residual is not self.corrected:
            self.corrected.copy_(residual)
        self._accumulated, self.corrected = self.corrected, self._accumulated

    def discard(self) -> None:
        """Take the buffers of before the last step again."""
        self._rule.discard()
        self._dense_rule.discard()
        self._accumulated, self.corrected = self.corrected, self._accumulated

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's buffers, and what has accumulated of its steps."""
        return {**self._rule.tensors(), "accumulated": self._accumulated}

    def allocate_dense(
        self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Start from zero."""
        self._dense_rule.allocate(numel, device, dtype)

    def update_dense(self, mean: torch.Tensor, further: Sequence[slice] = ()) -> None:
        """Replace the mean by the optimizer's step."""
        start = 0
        # an empty slot behind the last one, for the gap before it
        for slot in (*further, slice(mean.numel(), mean.numel())):
            self._step_dense(mean, slice(start, slot.start), False)
            self._step_dense(mean, slot, True)
            start = slot.stop

    def _step_dense(self, mean: torch.Tensor, slot: slice, further: bool) -> None:
        """Replace a part of the mean, if there is one."""
        if slot.start < slot.stop:
            part = mean[slot]
            first, *others = self._dense_rule.terms(part, slot, further)
            # summed before it is copied: a term may be this part of the mean itself
            part.copy_(sum(others, start=first))

    def dense_tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's buffers of densely averaged parameters."""
        return self._dense_rule.tensors()


class MomentumCorrection(_Accumulating):
    """Momentum correction: velocities accumulate instead of gradients, and stop where they were sent.

    With momentum m, u ← m u + g and v ← v + u; v is compressed. What is sent is zeroed in v, and with masking in u
    too. A layer that sends all its elements is not masked: nothing of it is stale, and its updates are those of
    momentum SGD. So are those of densely averaged parameters (`dense_below`, `exclude`), whose velocity follows the
    mean, and of compressors that leave nothing over (signSGD, cascading, SSDM), which compress u. The optimizer must
    be SGD without a momentum of its own.

    Parameters
    ----------
    momentum : float
        Momentum m, in [0, 1).
    nesterov : bool or {"dgc", "redsync"}
        Form of Nesterov's momentum. ``"dgc"``, or true, is that of DGC's program and of ``torch.optim.SGD``:
        u ← m (u + g), v ← v + u + g. ``"redsync"`` is RedSync's algorithm 4 as published: u ← m u + g, v ← v + u + g.
    masking : bool
        Whether to mask the momentum: to zero the velocity where something was sent.

    Raises
    ------
    InputError
        If the momentum is outside [0, 1), or the form is unknown.

    Notes
    -----
    Source: DGC (Lin et al. 2018), momentum correction and momentum factor masking; its program for Nesterov's momentum
    and for parameters that are not compressed, whose momentum does not accumulate; RedSync (Fang et al. 2018),
    algorithm 4, line 50 for layers that are averaged densely.

    Differs from RedSync's algorithm 4, whose momentum leaves weight decay out of g, and whose line 22 zeroes v
    wherever a mean was sent: here v keeps what the mean did not carry. Its line 15 adds a g that line 12 has put into
    u already, so that every gradient counts once more than in Nesterov's momentum.
    """

    kinds = (*_Momentum.kinds, "accumulated")
    dense_kinds = _Momentum.kinds

    def __init__(
        self,
        momentum: float = 0.9,
        *,
        nesterov: bool | Nesterov = False,
        masking: bool = True,
    ) -> None:
        momentum = check_number(momentum, "momentum", 0, 1, "[)")
        if not isinstance(nesterov, bool | str) or nesterov not in (
            False,
            True,
            *get_args(Nesterov),
        ):
            forms = ", ".join(get_args(Nesterov))
            raise InputError(
                f"nesterov must be true, false or one of {forms}, not {shown(nesterov)}"
            )
        self.momentum = momentum
        self.nesterov: Nesterov | None = "dgc" if nesterov is True else nesterov or None
        rule, dense_rule = (_Momentum(momentum, self.nesterov) for _ in range(2))
        super().__init__(rule, dense_rule, masking)


class AdamCorrection(_Accumulating):
    """Adam before the compression: the steps of each rank's Adam accumulate instead of gradients.

    What is compressed is the sum of the steps m̂/(√v̂ + ε) that were not sent. Densely averaged parameters have Adam's
    step with the mean. The optimizer must be SGD without momentum, with Adam's learning rate.

    Parameters
    ----------
    betas : tuple of float
        Decay of the first and of the second moment, each in [0, 1).
    eps : float
        Number ε > 0 that is added to the root of the second moment.
    masking : bool
        Whether to zero the first moment where something was sent, as momentum factor masking does.

    Raises
    ------
    InputError
        If a decay is outside [0, 1), or ε is not positive.

    Notes
    -----
    Source: Adam (Kingma and Ba 2015), whose steps Marsit (Wu et al. 2022, section 5) compresses for sentiment
    analysis. All parameters share one count of steps.
    """

    kinds = (*_Adam.kinds, "accumulated")
    dense_kinds = _Adam.kinds

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        eps: float = 1e-8,
        masking: bool = False,
    ) -> None:
        decays = [
            check_number(beta, "each of betas", 0, 1, "[)")
            for beta in check_several(betas, "betas")
        ]
        if len(decays) != 2:
            raise InputError(f"betas must be two numbers, not {len(decays)}")
        both, eps = (decays[0], decays[1]), check_number(eps, "eps", 0, math.inf)
        # of compressed and of densely averaged parameters; their counts go up together
        self._adam = _Adam(both, eps), _Adam(both, eps)
        super().__init__(*self._adam, masking)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"step": self._adam[0].step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for rule in self._adam:
            rule.step = int(state["step"])
