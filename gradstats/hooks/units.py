"""FSDP2's units and what lies where in their buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradstats.collectives.plain import all_gather_flags
from gradstats.errors import InputError
from gradstats.hooks.fsdp_private import (
    InBuffer,
    averages_replicas,
    device_of,
    divide_factors,
    number_of_shards,
    parameter_groups,
    parameters_in_buffer,
    shard_group,
    shard_place,
)
from gradstats.trace.format import Shard

__all__ = [
    "Unit",
    "across",
    "as_sharded",
    "is_sharded",
    "local_part",
    "shard_groups",
    "shard_of",
    "shard_ranks",
    "stand_in",
    "units",
]


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that ``fully_shard`` was called on: its parameters are gathered, and their gradients reduced, together.

    Attributes
    ----------
    name : str
        Name of the module in the model; ``root`` for the model itself.
    module : torch.distributed.fsdp.FSDPModule
        The module.
    group : FSDPParamGroup
        What FSDP2 keeps of it.
    names : dict of int to str
        Names of the model's parameters, by identity.
    """

    name: str
    module: Any
    group: Any
    names: dict[int, str]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The sharded parameters that are trained, in the order of FSDP2's buffers."""
        return [each.parameter for each in parameters_in_buffer(self.group)]

    @property
    def shards(self) -> int:
        """Number of ranks over which the parameters are sharded."""
        return number_of_shards(self.group)

    @property
    def replicated(self) -> bool:
        """Whether FSDP2 itself averages over replicas."""
        return averages_replicas(self.group)

    @property
    def factors(self) -> tuple[float, float]:
        """What FSDP2 divides gradients by before the reduce-scatter, and after the hook."""
        return divide_factors(self.group)

    def reduced(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Return views of this rank's shards in the result of a reduce-scatter, without the padding.

        Parameters
        ----------
        output : tensor, shape (n,)
            What FSDP2 gives to an all-reduce hook.

        Returns
        -------
        list of tensor
            One for each of :attr:`parameters`, of the shape of its shard.

        Raises
        ------
        InputError
            If the buffer lacks a parameter.
        """
        # FSDP2 pads shards to one size, and packs them one behind the other
        places = self._places(output.numel())
        parts = torch.split(output, [each.padded for each in places])
        return [
            part[: each.shard_shape.numel()].view(each.shard_shape)
            for each, part in zip(places, parts, strict=True)
        ]

    def unreduced(self, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the whole gradients in what a rank is about to reduce.

        Parameters
        ----------
        buffer : tensor, shape (shards · n,)
            What FSDP2 gives to a reduce-scatter.

        Yields
        ------
        parameter : torch.Tensor
            One of :attr:`parameters`.
        gradient : torch.Tensor
            This rank's gradient of it, divided by the first of :attr:`factors`.

        Raises
        ------
        InputError
            If the buffer lacks a parameter.
        """
        rows = buffer.view(self.shards, -1)
        places = self._places(rows.shape[1])
        parts = torch.split(rows, [each.padded for each in places], dim=1)
        for each, part in zip(places, parts, strict=True):
            if each.dim == 0:  # ranks have as many rows each, and padding is at the end
                whole = part.reshape(-1)[: each.shape.numel()].view(each.shape)
            else:
                # of other dimensions FSDP2 shards only what divides evenly: no padding
                whole = torch.cat([row.view(each.shard_shape) for row in part], dim=each.dim)
            yield each.parameter, whole

    def _places(self, numel: int) -> list[InBuffer]:
        places = parameters_in_buffer(self.group)
        if sum(each.padded for each in places) != numel:
            raise InputError(
                f"unit {self.name}: some parameter got no gradient; call "
                "model.set_reduce_scatter_unused_params(True), which gives it zeros"
            )
        return places


def is_sharded(model: torch.nn.Module) -> bool:
    """Tell whether a model's parameters are sharded tensors.

    Parameters
    ----------
    model : torch.nn.Module
        Any module.

    Returns
    -------
    bool
        True after ``fully_shard``.
    """
    tensor = sys.modules.get("torch.distributed.tensor")  # no DTensor before it is loaded
    fsdp = sys.modules.get("torch.distributed.fsdp")
    # a unit's parameters are plain tensors while they are gathered
    return (fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules())) or (
        tensor is not None and any(isinstance(p, tensor.DTensor) for p in model.parameters())
    )


def units(model: torch.nn.Module) -> list[Unit]:
    """Return the units of a model that ``fully_shard`` was called on.

    Parameters
    ----------
    model : torch.nn.Module
        Model.

    Returns
    -------
    list of Unit
        Units that have parameters, in the order of the modules.

    Raises
    ------
    InputError
        If a unit has several meshes, or its parameters are gathered now.
    """
    from torch.distributed.fsdp import FSDPModule

    # gathered parameters are other tensors, whose identities are not among these
    names = {id(p): name for name, p in model.named_parameters()}
    fsdp_units: dict[int, Unit] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = parameter_groups(module)
        if len(groups) > 1:
            raise InputError(
                f"{name or 'the model'} has parameters on several meshes; give each mesh a fully_shard() of its own"
            )
        for group in groups:
            # modules that were sharded together share one group
            fsdp_units.setdefault(id(group), Unit(name or "root", module, group, names))
    for unit in fsdp_units.values():
        if any(id(p) not in names for p in unit.parameters):
            raise InputError(
                f"the parameters of unit {unit.name} are gathered: do this before the first forward pass, or call the "
                "unit's reshard()"
            )
    return [unit for unit in fsdp_units.values() if unit.parameters]


def across(fsdp_units: Sequence[Unit], replicas: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Check that a group crosses a model's replicas, and return the one that holds this rank's.

    Parameters
    ----------
    fsdp_units : sequence of Unit
        The model's units.
    replicas : torch.distributed.ProcessGroup, optional
        Ranks of several replicas that hold the same shards; the default group if None.

    Returns
    -------
    torch.distributed.ProcessGroup
        Ranks that hold the shards of one replica, this one among them.

    Raises
    ------
    InputError
        If nothing that is trained is sharded by FSDP2, it averages over replicas itself, or the ranks of the group hold
        different shards, on all of them.
    """
    if not fsdp_units:
        raise InputError(
            "no parameter that is trained is sharded by fully_shard(): nothing keeps it the same within a replica"
        )
    ours = set(dist.get_process_group_ranks(replicas or dist.group.WORLD))
    for unit in fsdp_units:
        if unit.replicated:
            raise InputError(
                "fully_shard() has the replicas' dimension in its mesh, and averages over it before any hook: give it "
                'the other one alone, mesh=mesh["shard"]'
            )
        within = set(dist.get_process_group_ranks(shard_group(unit.group)))
        # rows and columns of a mesh meet in one rank, this one
        if len(ours & within) != 1:
            raise InputError(
                "the ranks to exchange with are of one replica: give those across replicas, such as "
                'mesh["replicate"], not those that hold its shards'
            )
    # what is left takes a message: whether the other ranks hold the same shards
    group = shard_group(fsdp_units[0].group)
    # place and number of shards in one 32-bit flag
    flag = dist.get_rank(group) << 16 | dist.get_world_size(group)
    if len(set(all_gather_flags(flag, replicas, device_of(fsdp_units[0].group)))) > 1:
        raise InputError(
            "the ranks to exchange with hold other shards than this one: give those that hold the same, such as "
            'mesh["replicate"]'
        )
    return group


def stand_in(parameter: torch.Tensor) -> torch.Tensor:
    """Return what a state of compression knows a parameter by: it asks for sizes, and sharded ones are the whole's.

    Parameters
    ----------
    parameter : torch.Tensor
        Parameter, sharded or not.

    Returns
    -------
    torch.Tensor
        Of a sharded one, a tensor without data, of the shape of this rank's shard; any other as it is.
    """
    part = local_part(parameter)
    if part is parameter:
        return parameter
    # trained, as the state passes over what is not
    return torch.empty(part.shape, dtype=part.dtype, device="meta").requires_grad_()


def as_sharded(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a gradient as its parameter's ``.grad``.

    Parameters
    ----------
    parameter : torch.Tensor
        Parameter, sharded or not.
    part : torch.Tensor
        The gradient, or this rank's shard of it.

    Returns
    -------
    torch.Tensor
        A tensor sharded as the parameter is, which shares the memory of `part`; `part` itself if it is not.
    """
    if local_part(parameter) is parameter:
        return part
    from torch.distributed.tensor import DTensor

    whole: Any = parameter
    # without a check by messages, and with the whole's shape: only even shards would tell it
    return DTensor.from_local(
        part,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def shard_groups(sharded: Any) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a tensor is sharded, without those that hold copies of it.

    Parameters
    ----------
    sharded : torch.distributed.tensor.DTensor
        The tensor.
    """
    mesh = sharded.device_mesh
    # is_shard() is False of FSDP2's strided shards of what tensor parallelism has split along the same dimension
    return tuple(
        mesh.get_group(i)
        for i, p in enumerate(sharded.placements)
        if not p.is_replicate() and not p.is_partial()
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a parameter or gradient.

    Parameters
    ----------
    tensor : torch.Tensor
        A tensor, sharded or not.

    Returns
    -------
    torch.Tensor
        The local tensor of a sharded one, which shares its memory; any other as it is.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        return tensor.to_local()  # type: ignore[no-any-return]
    return tensor


def shard_ranks(parameter: Any) -> tuple[list[int], bool]:
    """Return the ranks that hold the shards of a parameter, this one among them.

    Parameters
    ----------
    parameter : torch.distributed.tensor.DTensor
        A sharded parameter.

    Returns
    -------
    ranks : list of int
        Global ranks, in the order of their shards.
    first : bool
        Whether this is the first of several replicas that hold the same.

    Raises
    ------
    InputError
        If it is sharded in another way than ``fully_shard`` does by itself.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Sharded

    if any(type(each) not in (Replicate, Sharded) for each in parameter.placements):
        raise InputError(
            f"parameters placed as {parameter.placements} cannot be captured: use fully_shard() without tensor "
            "parallelism"
        )
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    # along a replicated dimension of the mesh: only the ranks of this copy
    copies = [isinstance(each, Replicate) for each in parameter.placements]
    index = tuple(i if copy else slice(None) for i, copy in zip(coordinate, copies, strict=True))
    # the copy at place 0 of every replicated dimension
    first = not any(i for i, copy in zip(coordinate, copies, strict=True) if copy)
    return mesh.mesh[index].flatten().tolist(), first


def shard_of(name: str, parameter: torch.Tensor, holds: bool) -> Shard:
    """Return what this rank holds of a parameter.

    Parameters
    ----------
    name : str
        Name of the parameter.
    parameter : torch.Tensor
        Parameter, sharded or not.
    holds : bool
        Whether this rank stands for all where it is not sharded.

    Returns
    -------
    Shard
        Its part. Of a complex parameter real and imaginary parts, as a last dimension of 2.

    Raises
    ------
    InputError
        If it has no dimension to shard.
    """
    if local_part(parameter) is parameter:
        if not parameter.dim():
            raise InputError(f"{name} has no dimension: of a sharded model it cannot be captured")
        shape = list(parameter.shape)
        offset = [0] * len(shape)
        # what is not sharded is written once, by the rank that holds it; the others have no rows of it
        shape[0] = shape[0] if holds else 0
    else:
        shape, offset = shard_place(parameter)
    tail = [2] if parameter.is_complex() else []
    return Shard(name, (*offset, *(0 for _ in tail)), (*shape, *tail))
