"""What an optimizer's step does to the parameters, as numbers of a monitor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradstats.collectives.plain import all_reduce
from gradstats.hooks.gradient import dense, real_view
from gradstats.hooks.units import local_part, shard_groups

__all__ = ["UPDATE_NAMES", "StepUpdates"]

UPDATE_NAMES = ("update_norm", "update_to_weight", "update_cosine", "unchanged_bf16")
"""Values of a monitor that :class:`StepUpdates` gives."""


class StepUpdates:
    """Compare parameters before and after an optimizer's step.

    Parameters
    ----------
    layers : sequence of (str, torch.Tensor)
        Names and parameters.
    """

    def __init__(self, layers: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._layers = layers
        self._before: list[torch.Tensor] = []

    @property
    def waiting(self) -> bool:
        """Whether a step is in progress that is to be described."""
        return bool(self._before)

    def forget(self) -> None:
        """Forget the copy: the step failed."""
        self._before = []

    def before(self) -> None:
        """Copy the parameters."""
        # this rank's shards alone: sums over the ranks follow
        self._before = [local_part(p.detach()).clone() for _, p in self._layers]

    def after(self) -> tuple[dict[str, float], dict[str, float]]:
        """Describe what has changed, and forget the copy.

        Returns
        -------
        whole : dict of str to float
            Values of all parameters that have a gradient together, by :data:`UPDATE_NAMES`; empty if none has one.
        ratios : dict of str to float
            Norm of the update ÷ norm of the weights, by parameter.
        """
        copies, self._before = self._before, []
        sums: dict[str, torch.Tensor] = {}
        shards: dict[Any, list[str]] = {}
        for (name, parameter), before in zip(self._layers, copies, strict=True):
            groups = _groups(parameter)
            if parameter.grad is None:
                if groups:  # another rank may have a part of it
                    sums[name] = torch.zeros(6, dtype=torch.float64, device=before.device)
                    shards.setdefault(groups, []).append(name)
                continue
            sums[name] = _sums(before, local_part(parameter.detach()), local_part(parameter.grad))
            if groups:
                shards.setdefault(groups, []).append(name)
        # in the order of the layers, the same on all ranks, which must all reach these all-reduces
        for groups, names in shards.items():
            # one message for all layers of the same mesh
            together = torch.stack([sums[name] for name in names])
            for group in groups:
                all_reduce(together, group)
            sums |= dict(zip(names, together, strict=True))
        totals = {name: each.tolist() for name, each in sums.items()}
        # no elements: no rank had a gradient
        totals = {name: each for name, each in totals.items() if each[5]}
        ratios = {name: _root(each[0], each[2]) for name, each in totals.items()}
        if not totals:
            return {}, {}
        update, dot, weight, gradient, same, numel = map(sum, zip(*totals.values(), strict=True))
        product = math.sqrt(update * gradient)
        whole = {
            "update_norm": math.sqrt(update),
            "update_to_weight": _root(update, weight),
            "update_cosine": dot / product if product else math.nan,
            "unchanged_bf16": same / numel,
        }
        return _known(whole), _known(ratios)


def _sums(before: torch.Tensor, now: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return ‖u‖², u·g, ‖θ‖², ‖g‖², the elements that are the same in bfloat16, and their number."""
    # view_as_real takes no lazily conjugated tensor
    b, w, g = (real_view(x.detach().resolve_conj()) for x in (before, now, dense(gradient)))
    # in bfloat16 a difference of neighbours would lose what it is about
    least = torch.promote_types(b.dtype, torch.float32)
    b, w, g = b.to(least), w.to(least), g.to(least)
    # before − after: along the gradient for plain SGD
    u = b - w
    total = torch.float64
    return torch.stack(
        [
            (u * u).sum(dtype=total),
            (u * g).sum(dtype=total),
            (b * b).sum(dtype=total),
            (g * g).sum(dtype=total),
            (b.bfloat16() == w.bfloat16()).sum().to(total),
            torch.tensor(b.numel(), dtype=total, device=b.device),
        ]
    )


def _groups(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a parameter is sharded."""
    return () if local_part(parameter) is parameter else shard_groups(parameter)


def _root(top: float, bottom: float) -> float:
    return math.sqrt(top / bottom) if bottom else math.nan


def _known(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not math.isnan(value)}
