"""Everything this project uses of FSDP2 that PyTorch does not promise; a new release is read against this file.

All was read in torch 2.13; what has a branch names the older release that it is for. A *group* below is FSDP2's
``FSDPParamGroup``: the parameters of a unit that are gathered and reduced together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

__all__ = [
    "InBuffer",
    "all_reduce_hook",
    "averages_replicas",
    "device_of",
    "divide_factors",
    "is_micro_step",
    "number_of_shards",
    "other_micro_steps",
    "parameter_groups",
    "parameters_in_buffer",
    "reduce_scatter",
    "shard_group",
    "shard_place",
]


class InBuffer(NamedTuple):
    """A parameter that is trained, and its part of FSDP2's buffers.

    Attributes
    ----------
    parameter : torch.nn.Parameter
        This rank's shard, a ``DTensor``.
    shape : torch.Size
        Shape of the whole parameter.
    shard_shape : torch.Size
        Shape of this rank's shard.
    padded : int
        Elements that every rank's shard takes in a buffer.
    dim : int
        Dimension that is sharded.
    """

    parameter: torch.Tensor
    shape: torch.Size
    shard_shape: torch.Size
    padded: int
    dim: int


def parameter_groups(module: Any) -> list[Any]:
    """Return what FSDP2 keeps of a unit: an ``FSDPParamGroup`` for each mesh that its parameters lie on.

    Parameters
    ----------
    module : torch.distributed.fsdp.FSDPModule
        Module that ``fully_shard`` was called on.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # until PyTorch 2.11
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def parameters_in_buffer(group: Any) -> list[InBuffer]:
    """Return the parameters of a group that are trained, in the order of its buffers.

    Parameters
    ----------
    group : FSDPParamGroup
        One of :func:`parameter_groups`.
    """
    return [
        InBuffer(
            each.sharded_param,
            each._orig_size,
            each.sharded_size,
            each.padded_sharded_param_size.numel(),
            each.fsdp_placement.dim,
        )
        for each in group.fsdp_params
        if each.sharded_param.requires_grad
    ]


def number_of_shards(group: Any) -> int:
    """Return the number of ranks over which a group's parameters are sharded; 1 if they are replicated alone.

    Parameters
    ----------
    group : FSDPParamGroup
        One of :func:`parameter_groups`.
    """
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def averages_replicas(group: Any) -> bool:
    """Tell whether FSDP2 itself averages over replicas, before any hook.

    Parameters
    ----------
    group : FSDPParamGroup
        One of :func:`parameter_groups`.
    """
    return hasattr(group.mesh_info, "replicate_process_group")


def device_of(group: Any) -> torch.device:
    """Return the device that a group's gradients are reduced on, where offloaded parameters are not.

    Parameters
    ----------
    group : FSDPParamGroup
        One of :func:`parameter_groups`.
    """
    return cast("torch.device", group.device)


def is_micro_step(group: Any) -> bool:
    """Tell whether later backward passes add to this one: ``set_requires_all_reduce(False)`` was called.

    Parameters
    ----------
    group : FSDPParamGroup
        One of :func:`parameter_groups`.
    """
    return not group.all_reduce_grads


def divide_factors(group: Any) -> tuple[float, float]:
    """Return what FSDP2 divides gradients by before the reduce-scatter, and after the all-reduce hook.

    Parameters
    ----------
    group : FSDPParamGroup
        One of :func:`parameter_groups`.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    # called as FSDP2's foreach_reduce() calls it: for float16 it divides by about √n on either side of the sum
    before, after, *_ = _get_gradient_divide_factors(
        group._reduce_scatter_process_group,
        group._all_reduce_process_group if averages_replicas(group) else None,
        group._reduce_dtype or group._orig_dtype,
        group.device.type,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
    )
    # None: the backend divides within its reduction, and nothing else does
    return float(before or 1), float(after or 1)


def shard_group(group: Any) -> dist.ProcessGroup:
    """Return the ranks over which a unit's parameters are sharded.

    Parameters
    ----------
    group : FSDPParamGroup
        One of :func:`parameter_groups`.
    """
    return cast("dist.ProcessGroup", group._reduce_scatter_process_group)


def all_reduce_hook(group: Any) -> Callable[..., Any] | None:
    """Return what ``set_all_reduce_hook`` registered on a unit.

    Parameters
    ----------
    group : FSDPParamGroup
        One of :func:`parameter_groups`.
    """
    return cast("Callable[..., Any] | None", group._all_reduce_hook)


def reduce_scatter(group: Any) -> Any:
    """Return what ``set_custom_reduce_scatter`` registered on a unit, or what FSDP2 uses by itself.

    Parameters
    ----------
    group : FSDPParamGroup
        One of :func:`parameter_groups`.
    """
    return group._reduce_scatter_comm


def other_micro_steps(group: Any) -> torch.Tensor | None:
    """Return what FSDP2 keeps of earlier micro-steps while it does not average over replicas.

    Parameters
    ----------
    group : FSDPParamGroup
        One of :func:`parameter_groups`.
    """
    return cast("torch.Tensor | None", group._partial_reduce_output)


def shard_place(parameter: Any) -> tuple[list[int], list[int]]:
    """Return the shape of this rank's shard of a parameter, and where in the whole it begins.

    Parameters
    ----------
    parameter : torch.distributed.tensor.DTensor
        Sharded parameter.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return list(shape), list(offset)
