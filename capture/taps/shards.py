"""Gradients of FSDP2: the shards that a rank holds, seen where they are reduced and exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from capture.recorder import Contents, Phase, Recorder
from capture.states import usual_kinds
from capture.taps.layout import Layout
from capture.taps.plain import TAKEN, PlainTap
from capture.taps.watch import BackwardWatch
from gradstats.errors import InputError, several, warn
from gradstats.hooks import CompressionState, ShardHook
from gradstats.hooks.fsdp_private import all_reduce_hook, other_micro_steps, reduce_scatter
from gradstats.hooks.gradient import Pair
from gradstats.hooks.units import Unit, local_part, shard_of, shard_ranks, units
from gradstats.trace import Kind
from gradstats.trace.format import WHOLE

__all__ = ["ShardTap", "Sharding"]

_REPLACED = (
    "the model's parameters are others than those that the Capture was made for; make a new one"
)


class Sharding:
    """What a rank holds of a sharded model, and what of it it writes.

    Parameters
    ----------
    layout : Layout
        Captured parameters, as ``fully_shard`` left them.
    process_group : ProcessGroup, optional
        Group whose ranks are captured; the default group if None.
    captured : iterable of int, optional
        Ranks to capture; all if None. A sharded gradient is that of the first rank that holds a part of it.

    Attributes
    ----------
    units : list of Unit
        Modules that ``fully_shard`` was called on.
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
        layout: Layout,
        process_group: dist.ProcessGroup | None,
        captured: Iterable[int] | None = None,
    ) -> None:
        self.units, parameters = units(layout.model), layout.parameters
        # FSDP2's own: what tensor parallelism shards is not among them
        known = {id(p) for unit in self.units for p in unit.parameters}
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
        # of replicas that FSDP2 averages over, which hold the same, the first writes
        self._writes = first
        self.ranks = (
            ranks
            if process_group is None
            else [dist.get_group_rank(process_group, rank) for rank in ranks]
        )
        self._wanted = None if captured is None else set(captured)
        self._rank = dist.get_rank(process_group)
        # shard_ranks() gives global ranks, self.ranks may be a group's
        holds = dist.get_rank() == ranks[0]
        held = [shard_of(name, p, holds) for name, p in zip(layout.names, parameters, strict=True)]
        self.shards = layout.parts.shards(held, layout.layers)
        self.places: dict[int, slice] = {}
        end = 0
        for parameter, shard in zip(parameters, held, strict=True):
            self.places[id(parameter)] = slice(end, end := end + shard.numel)

    def _find_hook(self) -> ShardHook | None:
        for unit in self.units:
            # shard_hook() registers a partial of a ShardHook's method
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
        # WHOLE kinds are this rank's own; of the others a rank holds a part, and all of a replica write theirs or none
        whole = self._wanted is None or self._rank in self._wanted
        part = self._writes and (self._wanted is None or self.ranks[0] in self._wanted)
        return tuple(kind for kind in kinds if (whole if kind in WHOLE else part))

    def warn_of_unwritten(self, kinds: Sequence[Kind]) -> None:
        """Warn where no rank writes some kinds.

        Parameters
        ----------
        kinds : sequence of Kind
            Kinds to capture.
        """
        lost = [kind for kind in kinds if kind not in WHOLE]
        # of replicas that are captured apart one may be left out on purpose, whole
        some = (self._wanted or set()) & set(self.ranks)
        if lost and some and self._writes and self.ranks[0] not in some:
            warn(
                f"kind {several(lost)} of a sharded model is captured under rank {self.ranks[0]}, which ranks= leaves "
                "out: nothing of it is captured"
            )

    def part(self, contents: Contents) -> Contents:
        """Return what of a model's gradients this rank writes.

        Parameters
        ----------
        contents : Contents
            What would be written of the model in one piece.

        Returns
        -------
        Contents
            Some of the kinds, with the shards where there are any.
        """
        kinds = self.kinds(contents.kinds)
        # nothing that is in shards: this rank's kinds are whole vectors
        if set(kinds) <= set(WHOLE):
            return replace(contents, kinds=kinds)
        return replace(contents, kinds=kinds, shards=self.shards, shard_ranks=self.ranks)

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


class ShardTap(PlainTap):
    """Record the shards of a model's gradients.

    Without a hook they are the ``.grad`` that FSDP2 left. What a :func:`gradstats.hooks.shard_hook` exchanges, and
    what a rank has before any reduction, is seen on the way.

    Parameters
    ----------
    recorder : Recorder
        What records.
    layout : Layout
        Captured parameters.
    kinds : sequence of Kind, optional
        Kinds to capture.
    watch : BackwardWatch
        Tells whether a backward pass has reached the parameters.
    sharding : Sharding
        What this rank holds.
    """

    def __init__(
        self,
        recorder: Recorder,
        layout: Layout,
        kinds: Sequence[Kind] | None,
        watch: BackwardWatch,
        sharding: Sharding,
    ) -> None:
        super().__init__(recorder, layout, kinds, watch, state=sharding.hook)
        self._sharding = sharding
        self._units: set[int] = set()  # that have shown gradients of the step
        if recorder.scaler is None and sharding.hook is not None:
            recorder.scaler = sharding.hook.scaler
        # what this rank does not write it need not look at
        written = sharding.kinds(kinds or usual_kinds(sharding.hook))
        # weakly, for the model holds what sees its exchanges
        exchanged, reduced = (
            weakref.WeakMethod(self._on_exchange),
            weakref.WeakMethod(self._on_reduce),
        )
        self._removes: list[Callable[[], None]] = []
        if sharding.hook is not None and {"gradient", "corrected"} & set(written):
            observers, observer = sharding.hook.observers, partial(_call, exchanged)
            observers.append(observer)
            self._removes.append(partial(observers.remove, observer))
        if "local" in written:
            self._removes += _see_reductions(sharding.units, partial(_call, reduced))

    def check(self) -> None:
        """Refuse a hook that was registered after the capture was made."""
        self._sharding.check()

    def finish(self) -> None:
        """End the step in progress, and leave the model as it was."""
        super().finish()
        for remove in self._removes:
            remove()
        self._removes.clear()

    def _contents(self, kinds: Sequence[Kind]) -> Contents:
        return self._sharding.part(super()._contents(kinds))

    def _begin(self, wanted: bool) -> None:
        self._units.clear()
        super()._begin(wanted)

    def _source(self, model: torch.nn.Module | None) -> torch.nn.Module:
        source = super()._source(model)
        if source is not self._layout.model:
            raise InputError(
                "step() takes no other model than the sharded one that the Capture was made for"
            )
        return source

    def _copy(self, source: torch.nn.Module, slots: Mapping[int, slice]) -> None:
        """Copy what was not seen on the way: the shards that FSDP2 left, where there is no hook."""
        hook, arrays = self._sharding.hook, self._recorder.arrays
        if not self._units and ("local" in arrays or hook is not None):
            raise InputError(
                "nothing was seen of the exchange: fully_shard(), shard_hook() and set_custom_reduce_scatter() come "
                "before the Capture"
            )
        # with a hook they were seen on the way, and 'local' in either case
        kinds = [kind for kind in arrays if hook is None and kind not in WHOLE]
        replaced, taken = {layer.name for layer, _ in self._layout.replaced()}, []
        unused: list[slice] = []
        for name, parameter in zip(self._layout.names, self._layout.parameters, strict=True):
            place = self._sharding.places[id(parameter)]
            if name in replaced:
                # shards lie in the vector of this rank's parts, whole gradients in that of the model
                self._recorder.absent(place, [kind for kind in arrays if kind not in WHOLE])
                self._recorder.absent(self._layout.slots[id(parameter)], WHOLE)
            elif kinds and parameter.grad is None and self._watch.reached(parameter):
                self._recorder.absent(place, kinds)
                taken.append(name)
            elif kinds and parameter.grad is not None and self._unused(parameter):
                unused.append(place)
            else:
                for kind in kinds:
                    self._recorder.put(kind, place, parameter)
        # last: it waits for the copies that are on their way
        for place in unused:
            self._recorder.unused(place, kinds)
        self._absent(sorted(replaced), _REPLACED)
        self._absent(taken, TAKEN)

    def _take_replaced(self) -> None:
        """Leave replaced parameters alone: their shards are not known."""

    def _open_step(self) -> None:
        """Begin a step with the first thing that is seen of it."""
        recorder = self._recorder
        if recorder.active and recorder.phase is Phase.IDLE:
            self._begin(recorder.wanted())
            # a step writes nothing for units that it does not reach
            for array in recorder.arrays.values():
                array[...] = 0

    def _on_exchange(
        self, state: CompressionState, parameters: Sequence[torch.Tensor], pairs: Sequence[Pair]
    ) -> None:
        """Copy what a unit's replicas are about to exchange."""
        recorder = self._recorder
        self._open_step()
        # .grad has the result of an earlier micro-step: the unit exchanges again
        if id(state) in self._units and parameters[0].grad is not None:
            recorder.warn_once(
                "exchanges",
                "the shard hook exchanges on every micro-step, and the last is recorded: call "
                "model.set_requires_all_reduce(False) before all but the last",
            )
        # recorded or not: it tells exchanges of a step apart
        self._units.add(id(state))
        if not recorder.arrays:
            return
        corrects = "corrected" in recorder.arrays
        # the loss scale times what FSDP2 is going to divide by after the hook
        scale = None if state.scaler is None else state.scaler.get_scale()
        for parameter, (shard, gradient) in zip(parameters, pairs, strict=True):
            place = self._sharding.places.get(id(parameter))
            if place is None:
                continue
            recorder.copy("gradient", place, gradient, scale)
            if corrects:
                # the state has taken the scale out
                recorder.copy("corrected", place, state.corrected(shard, gradient), 1.0)

    def _on_reduce(self, unit: Unit, buffer: torch.Tensor) -> None:
        """Copy this rank's gradients of a unit, before they are reduced; add those of micro-steps."""
        recorder = self._recorder
        self._open_step()
        self._units.add(id(unit))
        if not recorder.arrays:
            return
        try:
            local: Any = recorder.arrays["local"]
            # FSDP2 has divided what is in the buffer already; dividing by scale / divided puts that right, too
            divided = unit.factors[0]
            for parameter, gradient in unit.unreduced(buffer):
                place = self._layout.slots.get(id(parameter))
                if place is None:
                    continue
                # a vector of its own, to which earlier micro-steps are added
                values = recorder.copies.zeros(local[place].shape[0])
                recorder.copies.copy(gradient, values, recorder.scale / divided, wait=True)
                # they are in FSDP2's partial sum where it does not average over replicas yet, else in .grad
                waits = other_micro_steps(unit.group) is not None
                if waits or self._accumulates(parameter):
                    values += local[place]
                local[place] = values
        # the buffer lacks a parameter: the capture ends, the training goes on
        except InputError as error:
            recorder.drop()
            recorder.stop(error)

    def _accumulates(self, parameter: torch.Tensor) -> bool:
        """Tell whether a micro-step of this step has put something into a parameter's gradient."""
        if parameter.grad is None:
            return False
        # zeros are what is left of a step that was thrown away; values last, on a device each look waits for it
        return self._watch.untouched(parameter) or bool(local_part(parameter.grad).any())


def _call(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    alive = method()
    if alive is not None:
        alive(*arguments)


def _see_reductions(
    sharded: Sequence[Unit], on_reduce: Callable[[Unit, torch.Tensor], None]
) -> list[Callable[[], None]]:
    """Call a function with every unit, and what it is about to reduce; return what ends that."""
    wrapped = []
    for unit in sharded:
        if unit.shards < 2:
            raise InputError(
                "kind 'local' needs shards on at least two ranks; one has nothing to reduce"
            )
        if not hasattr(unit.module, "set_custom_reduce_scatter"):
            raise InputError("kind 'local' needs a newer PyTorch, with set_custom_reduce_scatter()")
        # what is registered already, or FSDP2's own, goes on reducing
        wrapped.append(_ReduceScatter(reduce_scatter(unit.group), unit, on_reduce))
        unit.module.set_custom_reduce_scatter(wrapped[-1])
    return [each.remove for each in wrapped]


class _ReduceScatter:
    """A reduce-scatter of FSDP2's that shows what goes into it."""

    def __init__(
        self, inner: Any, unit: Unit, on_reduce: Callable[[Unit, torch.Tensor], None]
    ) -> None:
        self._inner = inner
        self._unit = unit
        self._on_reduce = on_reduce

    def remove(self) -> None:
        # not where something else has been put around it
        if reduce_scatter(self._unit.group) is self:
            self._unit.module.set_custom_reduce_scatter(self._inner)

    def allocate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        # FSDP2 takes the memory for the result from the same object
        return self._inner.allocate(*arguments, **options)  # type: ignore[no-any-return]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any
    ) -> Any:
        self._on_reduce(self._unit, input_tensor)
        return self._inner(output_tensor=output_tensor, input_tensor=input_tensor, **options)
