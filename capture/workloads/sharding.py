"""Reference runs on sharded models: FSDP2 over all ranks, or within each of two replicas."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from capture.workloads.config import DENSE, RunConfig
from gradstats.compressors import Compressor
from gradstats.hooks import ErrorFeedback, NoMemory, ShardHook, shard_hook

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["REPLICAS", "clip_gradients", "compress", "shard", "whole"]

REPLICAS = 2
"""Number of replicas of a run with ``parallel="hsdp"``."""


def shard(config: RunConfig, model: nn.Module) -> DeviceMesh:
    """Shard a model, in place.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked; ``parallel`` is not ``"ddp"``.
    model : torch.nn.Module
        Model, alike on all ranks.

    Returns
    -------
    torch.distributed.device_mesh.DeviceMesh
        All ranks, by replica and shard where there are replicas. PyTorch averages over both if nothing is compressed
        and every step is exchanged.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    hybrid = config.parallel == "hsdp"
    shape = (REPLICAS, config.nproc // REPLICAS) if hybrid else (config.nproc,)
    # of a single dimension the name is "shard"
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    # of PyTorch, about in-place operations that our models do not have
    warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # FSDP2 takes no other
    # with the replicas in its mesh FSDP2 would average over them, and leave nothing to compress
    averages = config.compressor == DENSE and not config.local_steps
    # the parts before the model, which then takes what they leave
    for module in (*_parts(model), model):
        fully_shard(module, mesh=mesh if averages else mesh["shard"])
    return mesh


def compress(
    config: RunConfig, model: nn.Module, mesh: DeviceMesh, compressor: Callable[[], Compressor]
) -> ShardHook | None:
    """Compress between the replicas of a sharded model.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked.
    model : torch.nn.Module
        Model after :func:`shard`.
    mesh : torch.distributed.device_mesh.DeviceMesh
        What that returned.
    compressor : callable
        Function that makes the compressor of a unit.

    Returns
    -------
    ShardHook or None
        What compresses; None where PyTorch averages.
    """
    if config.compressor == DENSE:
        return None
    # one compressor is made only to be asked
    memory = ErrorFeedback if config.error_feedback and compressor().feedback else NoMemory
    training = config.training()
    return shard_hook(
        model,
        mesh["replicate"],
        compressor,
        memory,
        ratio_at=(lambda step: 1.0 if step < training.warm_up else None)
        if training.warm_up
        else None,
    )


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model that are called as modules, and share no parameter with others."""
    # with duplicates: a shared parameter comes once for each place
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))

    def within(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(child).forward is nn.Module.forward:  # a list of modules
                yield from within(child)
            elif (parameters := list(child.parameters())) and all(
                uses[id(p)] == 1 for p in parameters
            ):
                yield child

    return within(model)


def clip_gradients(model: nn.Module, bound: float) -> None:
    """Clip the gradient of a sharded model to a norm, which is that of the whole gradient.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    bound : float
        Largest norm.
    """
    parameters = list(model.parameters())
    # of sharded gradients it is a partial norm until the ranks have added it up
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, bound, whole(norm))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor as a plain one; all ranks take part.

    Parameters
    ----------
    tensor : torch.Tensor
        Tensor, sharded or not.

    Returns
    -------
    torch.Tensor
        All of it.
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
