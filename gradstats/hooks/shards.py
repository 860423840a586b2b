"""Compression between the replicas of a sharded model: the slow links alone.

FSDP2 reduces gradients within a replica, over fast links, as ever; what it would all-reduce between replicas is
compressed::

    mesh = init_device_mesh("cuda", (sites, ranks), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    hook = shard_hook(model, mesh["replicate"], lambda: make_compressor("warm-exact", 0.001), ErrorFeedback)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from gradstats.collectives.plain import all_gather_flags
from gradstats.compressors import Compressor, Selector
from gradstats.errors import InputError, NonFiniteGradientError, first_line
from gradstats.hooks.contents import check_count_of, field, refusing, seal, unseal
from gradstats.hooks.diagnostics import Diagnosis
from gradstats.hooks.fsdp_private import is_micro_step
from gradstats.hooks.gradient import Pair
from gradstats.hooks.guard import NonFinite, as_flag, count_bad
from gradstats.hooks.memory import Memory
from gradstats.hooks.state import CompressionState
from gradstats.hooks.step import Scaler, loss_scale
from gradstats.hooks.torch_private import version
from gradstats.hooks.units import Unit, across, local_part, stand_in, units
from gradstats.primitives.ratio import shown
from gradstats.trace.record import StepRecord, together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Observer", "ShardHook", "bad_in_replica", "exchange", "shard_hook"]

Observer: TypeAlias = Callable[["CompressionState", Sequence[torch.Tensor], Sequence[Pair]], None]
"""Called before an exchange with the unit's state, its sharded parameters, and what stands for them in the state with
the gradients of this rank's shards, in the units of FSDP2's buffers."""


class _Scale:
    """The factor that a unit's gradients carry when the hook gets them: the loss scale, and a division to come."""

    def __init__(self, unit: Unit, scaler: Scaler | None) -> None:
        self._unit, self._scaler = unit, scaler

    def get_scale(self) -> float:
        """Return the factor."""
        return loss_scale(self._scaler) * self._unit.factors[1]

    def get_backoff_factor(self) -> float:
        """Return what an overflow multiplies the scale by; 1 where that is not known."""
        return float(getattr(self._scaler, "get_backoff_factor", lambda: 1.0)())


def bad_in_replica(
    state: CompressionState, gradients: Sequence[torch.Tensor], within: dist.ProcessGroup
) -> int:
    """Count what is not finite on all ranks of a replica: other shards' exchanges are none of this rank's.

    Parameters
    ----------
    state : CompressionState
        Whose policy it is.
    gradients : sequence of tensor
        This rank's shards.
    within : torch.distributed.ProcessGroup
        Ranks of the replica.

    Returns
    -------
    int
        Number of elements, for :func:`exchange`; 0 where they count as zero. All ranks must raise if one does.
    """
    # a message within the replica: each of its ranks exchanges other shards, and none may go on alone
    flags = all_gather_flags(as_flag(count_bad(gradients)), within, gradients[0].device)
    return 0 if state.nonfinite == "zero" else as_flag(sum(flags))


def exchange(state: CompressionState, pairs: list[Pair], bad: int = 0) -> None:
    """Average gradients outside DDP, in place.

    Parameters
    ----------
    state : CompressionState
        Memory and compressor.
    pairs : list of (parameter, gradient)
        All that the state has.
    bad : int
        Elements that are not finite on ranks with other shards.

    Raises
    ------
    NonFiniteGradientError, ExchangeError, InputError
        As :func:`gradstats.hooks.compression_hook` says.
    """
    device = pairs[0][1].device
    with state.naming_step():
        if not any(gradient.numel() for _, gradient in pairs):
            # nothing here is nothing on the ranks that this one would talk to
            if any(all_gather_flags(bad, state.process_group, device)) and (
                state.nonfinite == "raise"
            ):
                raise NonFiniteGradientError(
                    "NaN or infinite gradient elements on a rank with other shards"
                )
            return
        step = state.begin(device)
        # before the gradients: a compressor that streams sends its flag with the first of them
        step.bad_elsewhere = bad
        # autograd's hooks see the user's parameters, and not what stands for them here
        state.use(parameter for parameter, _ in pairs)
        step.ready(pairs)
        state.complete()


class _Exchange:
    """One unit's parameters, state, and gradients that wait for a later micro-step."""

    def __init__(
        self, unit: Unit, within: dist.ProcessGroup, state: Callable[..., CompressionState]
    ) -> None:
        self.unit = unit
        self.shards = [stand_in(p) for p in unit.parameters]
        names = [unit.names[id(p)] for p in unit.parameters]
        self.state = state(named_parameters=zip(names, self.shards, strict=True))
        # optimizers step these, and not the stand-ins
        self.state.follow(unit.parameters)
        self.waiting: torch.Tensor | None = None
        self._micro = 0
        self._version = 0
        self._within = within

    def forget(self) -> None:
        """Forget the gradients of micro-steps that wait."""
        self.waiting = None
        self._micro = 0

    def __call__(self, observers: Sequence[Observer], output: torch.Tensor) -> bool:
        """Take what FSDP2 has reduced; tell whether it was exchanged."""
        pairs = list(zip(self.shards, self.unit.reduced(output), strict=True))
        parameters = self.unit.parameters
        # a micro-step leaves zeros: they were set to None or zeroed since, and the accumulation was broken off
        # FSDP2 adds to the local part, which is no change of the whole; a gradient that it makes has had none
        changes = [version(p.grad) for p in parameters if p.grad is not None]
        if self._micro and (not changes or max(changes) != self._version):
            self.forget()
        self._micro += 1
        self._version = max(changes, default=0)
        if is_micro_step(self.unit.group):
            self.waiting = output.clone() if self.waiting is None else self.waiting.add_(output)
            # FSDP2 adds what the hook leaves to .grad: nothing before the last micro-step
            output.zero_()
            return False
        # sums of other numbers of micro-steps have no common mean
        self.state.agreement.details["micro-steps"] = str(self._micro)
        if self.waiting is not None:
            output += self.waiting
        self.forget()
        held = [None if p.grad is None else local_part(p.grad) for p in parameters]
        # FSDP2 adds the result to what is there
        self.state.note_begun(zip(self.shards, held, strict=True))
        for observer in observers:
            observer(self.state, parameters, pairs)
        gradients = [gradient for _, gradient in pairs]
        exchange(self.state, pairs, bad_in_replica(self.state, gradients, self._within))
        return True


class ShardHook:
    """What :func:`shard_hook` registered: a state for every FSDP unit, and their checkpoint.

    Parameters
    ----------
    exchanges : mapping of str to callable
        The units' exchanges, by the names of their modules.
    shards, replicas : int
        Number of ranks in a replica, and of replicas.
    scaler : Scaler, optional
        The loss scaler of the training.

    Attributes
    ----------
    states : dict of str to CompressionState
        States by the name of the unit's module; ``root`` for the model itself.
    error_feedback : bool
        Whether anything is remembered.
    diagnosis : None
        Exchanges between replicas are not diagnosed.
    scaler : Scaler or None
        The loss scaler of the training.
    observers : list of callable
        Functions that see every exchange before it happens, such as a capture's.
    """

    diagnosis: Diagnosis | None = None

    def __init__(
        self,
        exchanges: Mapping[str, _Exchange],
        shards: int,
        replicas: int,
        scaler: Scaler | None = None,
    ) -> None:
        self.scaler = scaler
        self.states = {name: each.state for name, each in exchanges.items()}
        self.error_feedback = any(state.error_feedback for state in self.states.values())
        self.observers: list[Observer] = []
        self._size = {"shards": shards, "replicas": replicas}
        # kept, as a checkpoint may be saved when the process group is gone
        self._rank = dist.get_rank()
        # units of the step under way that have come, and those of them that were exchanged
        self._came: set[str] = set()
        self._exchanged: set[str] = set()
        self._records: list[StepRecord] = []
        self._last: StepRecord | None = None
        self._exchanges = exchanges

    def exchange(self, unit: str, output: torch.Tensor) -> None:
        """Average what a unit's replicas have; FSDP2's all-reduce hook of that unit.

        Parameters
        ----------
        unit : str
            Name of the unit.
        output : tensor, shape (n,)
            Padded shards of the unit's gradients on this rank. They are overwritten.

        Raises
        ------
        NonFiniteGradientError, ExchangeError, InputError
            As :func:`gradstats.hooks.compression_hook` says. FSDP2 needs ``model.reset_iter_state()`` before the next
            step then.
        """
        if unit in self._came:  # a new step
            self._came.clear()
            self._exchanged.clear()
        self._came.add(unit)
        # last: of a unit that fails the last exchange is that of an earlier step, which was applied
        if self._exchanges[unit](self.observers, output):
            self._exchanged.add(unit)

    @property
    def last(self) -> StepRecord | None:
        """Record of the last step on this rank, of all units together; None before the first."""
        states = (self.states[name] for name in self.states if name in self._came)
        records = [state.last for state in states if state.last is not None]
        # put together anew only where a unit has another record
        if len(records) != len(self._records) or any(
            new is not old for new, old in zip(records, self._records, strict=True)
        ):
            step = max((record.step for record in records), default=0)
            self._records, self._last = records, together(records, step) if records else None
        return self._last

    def discard(self) -> None:
        """Take the last exchange of every unit back, as :meth:`gradstats.hooks.CompressionState.discard` does.

        Call it on all ranks before the next backward pass if you do not apply the update. A step that failed on one
        unit has changed the memories of the units before it: this takes them back. Micro-steps that wait for a later
        one are dropped.
        """
        for name in self._exchanged:
            self.states[name].discard()
        for each in self._exchanges.values():
            each.forget()
        self._came.clear()
        self._exchanged.clear()

    def corrected(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient as it is: an observer sees what a unit's state adds.

        Parameters
        ----------
        parameter : torch.Tensor
            One of the model's parameters.
        gradient : torch.Tensor
            Its gradient.

        Returns
        -------
        torch.Tensor
            The gradient.
        """
        return gradient

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs, of this rank alone: every rank saves its own.

        Returns
        -------
        dict
            One entry, named by the global rank, so that ``torch.distributed.checkpoint`` can save all ranks' under one
            name: a dictionary with the numbers of shards and replicas, and the units'
            :meth:`gradstats.hooks.CompressionState.state_dict`.
        """
        each = {name: state.content() for name, state in self.states.items()}
        return seal(self._rank, {**self._size, "units": each})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on the rank that saved it.

        Parameters
        ----------
        state : mapping
            What this rank saved; entries of other ranks beside it do not matter.

        Raises
        ------
        InputError
            If this rank's entry is missing, or it is of other numbers of shards or replicas, other units, compressors,
            memories or parameters, or damaged. Nothing has been restored then.
        """
        with refusing():
            entry = unseal(self._rank, state)
            for what, here in self._size.items():
                check_count_of(what, entry.get(what), here)
            saved = field(entry, "units", Mapping)  # type: ignore[type-abstract]
            if saved.keys() != self.states.keys():
                odd = min(saved.keys() ^ self.states.keys())
                raise InputError(f"the checkpoint is of a model with other FSDP units: {odd}")
            # all are checked before the first is restored
            restore = [self.states[name].prepare(saved[name]) for name in self.states]
            for each in restore:
                each()
        for unit in self._exchanges.values():
            unit.forget()
        self._came.clear()
        self._exchanged.clear()


def shard_hook(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    compressor: Callable[[], Compressor | Selector],
    memory: Callable[[], Memory] | None = None,
    *,
    ratio_at: Callable[[int], float | None] | None = None,
    nonfinite: NonFinite | None = None,
    scaler: Scaler | None = None,
    verify_every: int = 0,
) -> ShardHook:
    """Compress what replicas of a sharded model exchange.

    Call ``fully_shard`` with the mesh of a replica's shards, ``mesh=mesh["shard"]``, and this with the mesh across the
    replicas. FSDP2 gathers parameters and reduces gradients within a replica; then the ranks that hold the same shards
    exchange them compressed, unit by unit during the backward pass.

    Parameters
    ----------
    model : torch.nn.Module
        Model after ``fully_shard``.
    mesh : torch.distributed.device_mesh.DeviceMesh
        Ranks with the same shards, one dimension: ``mesh["replicate"]``.
    compressor : callable
        Function without arguments that makes a compressor or a selector, such as
        ``lambda: make_compressor("warm-exact", 0.001)``. It is called once for every FSDP unit.
    memory : callable, optional
        Function without arguments that makes a memory, such as :class:`gradstats.hooks.ErrorFeedback`; called once for
        every unit. If None, error feedback where the compressor is made for it.
    ratio_at : callable, optional
        Step to ratio, as for :class:`gradstats.hooks.CompressionState`.
    nonfinite : {"raise", "skip", "zero", "propagate"}, optional
        What NaN or infinity does, as for :class:`gradstats.hooks.CompressionState`, for each unit by itself.
    scaler : Scaler, optional
        The loss scaler of the training. Memories are then kept in unscaled units.
    verify_every : int
        Compare the update over the replicas in every n-th step, as for :class:`gradstats.hooks.CompressionState`.

    Returns
    -------
    ShardHook
        States of the units, their records and their checkpoint.

    Raises
    ------
    InputError
        If the model is not sharded, FSDP2 averages over replicas itself, or the meshes do not cross.

    Notes
    -----
    Parameters that a step does not use get gradients of zero, as their memory may have something to send. With several
    micro-steps call ``model.set_requires_all_reduce(False)`` before all but the last, or each of them is exchanged.
    Where a step fails on one unit (a gradient that is not finite), units before it have sent theirs.
    """
    from torch.distributed.device_mesh import DeviceMesh

    for what, factory in (("compressor", compressor), ("memory", memory)):
        if not callable(factory) and (what, factory) != ("memory", None):
            raise InputError(
                f"{what} must be a function that makes one for each FSDP unit, not {shown(factory)}: write lambda: …"
            )
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise InputError(
            f'mesh must be one dimension of a mesh, such as mesh["replicate"], not {shown(mesh)}'
        )
    if not isinstance(model, torch.nn.Module) or not (fsdp_units := units(model)):
        raise InputError("the model is not sharded: call fully_shard() on it first")
    group = mesh.get_group()
    exchanges = {}
    for unit in fsdp_units:
        within = across([unit], group)
        # one for each unit: a compressor and a memory hold the state of one flat vector
        state = partial(
            CompressionState,
            compressor(),
            memory=None if memory is None else memory(),
            ratio_at=ratio_at,
            # decided here: the state always gets a scaler, which has the factor of FSDP2's division
            nonfinite=nonfinite or ("raise" if scaler is None else "propagate"),
            scaler=_Scale(unit, scaler),
            verify_every=verify_every,
            process_group=group,
        )
        exchanges[unit.name] = _Exchange(unit, within, state)
    hook = ShardHook(exchanges, fsdp_units[0].shards, mesh.size(), scaler)
    for unit in fsdp_units:
        if hasattr(unit.module, "set_reduce_scatter_unused_params"):
            unit.module.set_reduce_scatter_unused_params(True, recurse=False)
        try:
            unit.module.set_all_reduce_hook(partial(hook.exchange, unit.name))
        except ValueError as error:
            raise InputError(first_line(error)) from None
    return hook
