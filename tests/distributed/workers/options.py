"""Every option of the constructors of DDP and ``fully_shard`` with the hooks, beside a training without it.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard, distribute_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint
from workers import sharded
from workers.trainings import refusal, same_on_all_ranks

from capture import Capture
from gradstats.compressors import Layerwise, TopK
from gradstats.hooks import CompressionState, ErrorFeedback, compression_hook, shard_hook


class Net(nn.Module):
    """Layers of which some are used, and a buffer."""

    def __init__(self, idle=()):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))
        self.idle = idle

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i not in self.idle:
                x = layer(x).tanh()
        return x


def everything(name, numel):
    return TopK(0.2)


def train(net, streams, rank, **options):
    """Return the parameters after some steps, and the residuals."""
    ddp = DDP(net, **options)
    state = CompressionState(
        Layerwise(everything) if streams else TopK(0.2),
        named_parameters=net.named_parameters(),
    )
    ddp.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().sum().backward()
        optimizer.step()
    assert same_on_all_ranks(net.parameters())
    return torch.cat([*(p.detach().flatten() for p in net.parameters()), state.memory.residual])


DDP_OPTIONS = {
    "dim": 0,
    "broadcast_buffers": False,
    "init_sync": False,
    "process_group": None,
    "bucket_cap_mb": 1e-4,
    "find_unused_parameters": True,
    "check_reduction": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "device_mesh": lambda: init_device_mesh("cpu", (2,)),
    "bucket_cap_mb_list": [1, 1],
    "batched_grad_copy": True,
    "forward_sync_buffers": False,
}
"""With these the training is bit for bit that without."""


def ddp_options(rank, world):
    """Whether each option changes no bit, with a compressor of the whole model and one that streams."""
    same = {}
    for streams in (False, True):
        plain = train(Net(), streams, rank)
        for name, value in DDP_OPTIONS.items():
            given = {name: value() if callable(value) else value}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same[name, streams] = torch.equal(plain, train(Net(), streams, rank, **given))
    return same


def skipped_buckets(rank, world):
    """Whether DDP passing over what no rank uses changes a bit: first, middle and last buckets, all in one."""
    same = {}
    for idle in ((0,), (3,), (1,), (1, 3), (0, 3)):
        for streams in (False, True):
            for cap in (1e-4, 25):
                given = {"find_unused_parameters": True, "bucket_cap_mb": cap}
                a = train(Net(idle), streams, rank, **given)
                b = train(Net(idle), streams, rank, skip_all_reduce_unused_params=True, **given)
                same[idle, streams, cap] = torch.equal(a, b)
    return same


def delayed(rank, world):
    """Parameters that DDP averages by itself, and the state has."""

    def options(net):
        return {
            "delay_all_reduce_named_params": [("layers.0.weight", net.layers[0].weight)],
            "param_to_hook_all_reduce": net.layers[0].bias,
        }

    net = Net()
    return refusal(lambda: train(net, False, rank, **options(net)))


def half(rank, world):
    """DDP's own mixed precision is a hook, and DDP takes one."""
    policy = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    return refusal(lambda: train(Net(), False, rank, mixed_precision=policy))


def sharded_training(mesh, rank, root=None, **options):
    model = sharded.network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"], **options)
    fully_shard(model, mesh=mesh["shard"], **{**options, **(root or {})})
    hook = shard_hook(model, mesh["replicate"], lambda: TopK(0.2), ErrorFeedback)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        sharded.loss_of(model, sharded.batch(step, rank, model)).backward()
        optimizer.step()
    kept = [s.memory.residual for s in hook.states.values() if s.step]
    whole = torch.cat([p.detach().flatten() for p in sharded.gathered(model)])
    # replicas hold the same
    gathered = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, whole)
    assert all(torch.equal(each, whole) for each in gathered)
    return whole, torch.cat([k.flatten() for k in kept])


def second(parameter):
    return Shard(1) if parameter.shape == (32, 24) else None


FSDP_OPTIONS = {
    "reshard_after_forward": [True, False],
    "shard_placement_fn": [second],
    "mp_policy": [MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)],
    "offload_policy": [CPUOffloadPolicy(pin_memory=False)],
}
"""With these sharded replicas train, and stay the same."""


def fsdp_options(rank, world):
    """Largest difference that each option makes, and what is said of a mesh and of what FSDP2 ignores."""
    mesh = sharded.mesh_of(2, 2)
    plain, _ = sharded_training(mesh, rank)
    found = {}
    for name, values in FSDP_OPTIONS.items():
        for i, value in enumerate(values):
            got, _ = sharded_training(mesh, rank, **{name: value})
            found[name, i] = float((got - plain).abs().max() / plain.abs().max())

    def both():
        model = fully_shard(sharded.network(), mesh=mesh)
        shard_hook(model, mesh["replicate"], lambda: TopK(0.2))

    def dims():
        model = fully_shard(
            distribute_module(sharded.network(), mesh),
            mesh=mesh,
            dp_mesh_dims=DataParallelMeshDims(shard="shard", replicate="replicate"),
        )
        shard_hook(model, mesh["replicate"], lambda: TopK(0.2))

    def ignored():
        model = sharded.network()
        fully_shard(model, mesh=mesh["shard"], ignored_params={model[4].bias})
        shard_hook(model, mesh["replicate"], lambda: TopK(0.2))

    return found, refusal(both), refusal(dims), refusal(ignored)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in the backward pass, each in a pass of its own if reentrant."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def checkpointed(rank, world, folder):
    """Return what is said of checkpointing, and the means or the steps captured, by way, hook and size of buckets."""
    found = {}
    for reentrant in (True, False):
        for size in (25, 3e-4):
            ddp = DDP(Checkpointed(reentrant), bucket_cap_mb=size)
            state = CompressionState(TopK(1.0), named_parameters=ddp.module.named_parameters())
            ddp.register_comm_hook(state, compression_hook)

            # DDP makes small buckets after the first step
            said = refusal(lambda ddp=ddp: [train_once(ddp, rank) for _ in range(2)])
            gradients = [p.grad.numpy() for p in ddp.parameters() if p.grad is not None]
            found[reentrant, size, "compressed"] = said, gradients, state.step
            ddp = DDP(Checkpointed(reentrant), bucket_cap_mb=size)
            path = f"{folder}/{reentrant}{size}.zarr"
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                with Capture(path, ddp) as capture:
                    ddp.register_comm_hook(*capture.wrap(None, allreduce_hook))
                    for _ in range(5):
                        train_once(ddp, rank)
                        capture.step()
            stops = [str(w.message) for w in warned if "capture stopped" in str(w.message)]
            found[reentrant, size, "captured"] = stops, path
    return found


def train_once(ddp, rank):
    ddp.zero_grad()
    ddp(torch.ones(3, 8) + rank).sum().backward()
