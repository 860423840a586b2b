"""Monitors in trainings of several ranks: what each rank's monitor said, beside the gradient it should describe.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import copy
import warnings
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from workers.hook import model
from workers.trainings import loss_of

from gradstats import Monitor
from gradstats.compressors import TopK
from gradstats.errors import InputError
from gradstats.hooks import CompressionState, compression_hook, meeting
from gradstats.hooks.torch_private import store_of

STEPS = 4


def flat(net):
    return torch.cat([p.grad.flatten() for p in net.parameters()]).double().numpy()


def under_ddp(rank, world, micro, scale, compress):
    """Train with accumulation, a loss scaler or a compressor; return (values, gradient used, extra) of each step."""
    net = model()
    ddp = DDP(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
    state = None
    if compress:
        state = CompressionState(TopK(0.05), named_parameters=net.named_parameters(), scaler=scaler)
        ddp.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    logged, seen = [], []
    monitor = Monitor(
        ddp, logged.append, optimizer=optimizer, scaler=scaler, state=state, per_layer=True
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            with nullcontext() if part == micro - 1 else ddp.no_sync():
                scaler.scale(loss_of(ddp, rank, micro * step + part) / micro).backward()
        scaler.unscale_(optimizer)
        used = flat(net)
        scaler.step(optimizer)
        scaler.update()
        extra = None
        if compress:
            extra = state.last.quality, float(state.memory.residual.double().norm())
        seen.append((monitor.values, used, extra))
    monitor.close()
    return seen, len(logged)


def sharded(rank, world, mesh_shape):
    """Train an FSDP2 model; return what the monitor said, and the gradient gathered from all shards."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    net = model()
    return described(net, mesh, rank)


def sharded_in_tensor_parallel(rank, world):
    """The same of two linear layers that pairs of ranks share, columns and rows, and FSDP2 shards among the pairs."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor"))
    net = model()
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # a pair has the same inputs
    return described(net, mesh["shard"], rank // 2)


def described(net, mesh, rank):
    """Shard a model by FSDP2 and train it; return what the monitor said, and the whole gradient, of each step."""
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    monitor = Monitor(net, optimizer=optimizer, per_layer=True)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):  # accumulated without an exchange
            net.set_requires_gradient_sync(part == 1)
            (loss_of(net, rank, 2 * step + part) / 2).backward()
        whole = torch.cat([p.grad.full_tensor().flatten() for p in net.parameters()])
        optimizer.step()
        seen.append((monitor.values, whole.double().numpy(), None))
    dist.barrier()
    return seen


def on_one_rank(rank, world):
    """Make a monitor of a sharded model under `if rank == 0`, then one on each; return what came of both."""
    net, said, waited = model(), "", []
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(net, mesh=mesh)
    store, patience = store_of(mesh.get_group()), meeting._PATIENCE_S
    before, meeting._PATIENCE_S = store.timeout, 0.2
    store.set_timeout(timedelta(seconds=1))
    if rank == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                Monitor(net)
            except InputError as error:
                said = str(error)
        waited = [str(each.message) for each in caught]
    store.set_timeout(before)
    meeting._PATIENCE_S = patience
    dist.barrier()
    monitor = Monitor(net)
    loss_of(net, rank, 0).backward()
    return said, waited, monitor.step()


def micro_gradients(net, losses):
    """Return the gradients of some losses by themselves, on a copy of the model."""
    twin, found = copy.deepcopy(net), []
    for loss in losses:
        twin.zero_grad()
        loss(twin).backward()
        found.append(flat(twin))
    return np.stack(found)


def noise_by_hand(steps):
    """Return the noise scale of the gradients (micro-batches, d) of some steps, and the mean of its two parts."""
    traces, squares = [], []
    for g in steps:
        traces.append(g.var(0, ddof=1).sum())
        squares.append(np.square(g.mean(0)).sum() - traces[-1] / len(g))
    return np.mean(traces) / np.mean(squares), np.mean(traces), np.mean(squares)


def own_noise(rank, world):
    """Accumulate under DDP; return what the monitor says, and this rank's own noise scale."""
    net = model()
    ddp = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    monitor, seen = Monitor(ddp, optimizer=optimizer, noise=True), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [lambda m, i=i: loss_of(m, rank, i) / 3 for i in range(3 * step, 3 * step + 3)]
        seen.append(micro_gradients(net, losses))
        for i, loss in enumerate(losses):
            with nullcontext() if i == 2 else ddp.no_sync():
                loss(ddp).backward()
        optimizer.step()
    return monitor.values["gradient/noise_scale"], noise_by_hand(seen)[0]


CASES = {
    "plain": (1, 1, False),
    "accumulated": (3, 1, False),
    "scaled": (2, 1024.0, False),
    "compressed": (1, 1, True),
    "compressed, accumulated, scaled": (2, 1024.0, True),
}
"""Micro-batches, loss scale, and whether there is a compressor."""


def two_ranks(rank, world):
    """Return what every case of two ranks gave, by name."""
    found = {name: under_ddp(rank, world, *case) for name, case in CASES.items()}
    found["sharded"] = sharded(rank, world, (world,))
    return found | {"on one rank": on_one_rank(rank, world)}
