"""How the gradients of an FSDP2 model are captured: what this rank holds of them, and the taps in FSDP2's exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradstats.errors import InputError
from gradstats.hooks import ShardHook
from gradstats.hooks.shards import Observer
from gradstats.hooks.torch_private import all_reduce_hook, reduce_scatter
from gradstats.hooks.units import Unit, local_part, shard_of, shard_ranks, units
from gradstats.trace import Kind, Layer
from gradstats.trace.format import WHOLE

__all__ = ["Sharding"]


class Sharding:
    """What a capture has to know of a sharded model.

    Parameters
    ----------
    layers : sequence of Layer
        Captured parameters.
    parameters : sequence of torch.Tensor
        The same parameters, as ``fully_shard`` left them.
    model : torch.nn.Module
        The model.
    process_group : ProcessGroup, optional
        Group whose ranks are captured; the default group if None.
    captured : iterable of int, optional
        Ranks to capture; all if None. A sharded gradient is that of the first rank that holds a part of it.

    Attributes
    ----------
    shards : list of Shard
        What this rank holds of each layer.
    ranks : list of int
        Ranks whose shards are the whole gradient, in the numbers of the process group.
    places : dict of int to slice
        Places of this rank's shards in the vector of them all, by the identity of the parameter.
    hook : ShardHook or None
        What :func:`gradstats.hooks.shard_hook` registered on the model.

    Raises
    ------
    InputError
        If the parameters are gathered now, lie on several meshes, or are sharded by something else than FSDP2.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        parameters: Sequence[torch.Tensor],
        model: torch.nn.Module,
        process_group: dist.ProcessGroup | None,
        captured: Iterable[int] | None = None,
    ) -> None:
        self._units = units(model)
        known = {id(p.sharded_param) for unit in self._units for p in unit.parameters}
        sharded = [p for p in parameters if local_part(p) is not p]
        if not sharded or any(id(p) not in known for p in sharded):
            raise InputError(
                "some parameters are sharded by something else than FSDP2's fully_shard(), and cannot be captured"
            )
        ranks, first = shard_ranks(sharded[0])
        if any(shard_ranks(p)[0] != ranks for p in sharded):
            raise InputError(
                "parameters are sharded over different ranks; capture each part by itself"
            )
        self.hook = self._find_hook()
        # replicas that FSDP2 averages over hold the same
        self._speaks = first
        self.ranks = (
            ranks
            if process_group is None
            else [dist.get_group_rank(process_group, rank) for rank in ranks]
        )
        self._wanted = None if captured is None else set(captured)
        self._rank = dist.get_rank(process_group)
        holds = dist.get_rank() == ranks[0]
        self.shards = [
            shard_of(layer.name, p, holds) for layer, p in zip(layers, parameters, strict=True)
        ]
        self.places: dict[int, slice] = {}
        end = 0
        for parameter, shard in zip(parameters, self.shards, strict=True):
            self.places[id(parameter)] = slice(end, end := end + shard.numel)

    def _find_hook(self) -> ShardHook | None:
        for unit in self._units:
            hook = getattr(all_reduce_hook(unit.group), "func", None)
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, ShardHook):
                return owner
        return None

    def kinds(self, kinds: Sequence[Kind]) -> tuple[Kind, ...]:
        """Return the kinds that this rank writes.

        Parameters
        ----------
        kinds : sequence of Kind
            Kinds to capture.

        Returns
        -------
        tuple of Kind
            Some of `kinds`.
        """
        whole = self._wanted is None or self._rank in self._wanted
        part = self._speaks and (self._wanted is None or self.ranks[0] in self._wanted)
        return tuple(kind for kind in kinds if (whole if kind in WHOLE else part))

    def check(self) -> None:
        """Refuse a hook that was registered after the capture was made.

        Raises
        ------
        InputError
            If there is one.
        """
        if self._find_hook() is not self.hook:
            raise InputError(
                "the result of a shard_hook() would be captured instead of the gradient: call shard_hook() first, and "
                "make the Capture after it"
            )

    def watch(self, observer: Observer) -> None:
        """See what the model's shard hook exchanges.

        Parameters
        ----------
        observer : callable
            Function to call before each exchange.
        """
        if self.hook is not None:
            self.hook.observers.append(observer)

    def tap(self, on_reduce: Callable[[Unit, torch.Tensor], None]) -> None:
        """See every gradient before it is reduced.

        Parameters
        ----------
        on_reduce : callable
            Function of a unit and what it is about to reduce, called before that.

        Raises
        ------
        InputError
            If this version of PyTorch has no place for it, or the model is not sharded over several ranks.
        """
        for unit in self._units:
            if unit.shards < 2:
                raise InputError(
                    "kind 'local' needs shards on at least two ranks; one has nothing to reduce"
                )
            if not hasattr(unit.module, "set_custom_reduce_scatter"):
                raise InputError(
                    "kind 'local' needs a newer PyTorch, with set_custom_reduce_scatter()"
                )
            inner = reduce_scatter(unit.group)
            unit.module.set_custom_reduce_scatter(_Tap(inner, unit, on_reduce))


class _Tap:
    """A reduce-scatter of FSDP2's that shows what goes into it."""

    def __init__(
        self, inner: Any, unit: Unit, on_reduce: Callable[[Unit, torch.Tensor], None]
    ) -> None:
        self._inner = inner
        self._unit = unit
        self._on_reduce = on_reduce

    def allocate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self._inner.allocate(*arguments, **options)  # type: ignore[no-any-return]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any
    ) -> Any:
        self._on_reduce(self._unit, input_tensor)
        return self._inner(output_tensor=output_tensor, input_tensor=input_tensor, **options)
