"""A model with experts in one parameter, captured part by part."""

from __future__ import annotations

import warnings

import torch
from support.traces import flat_gradient
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from workers.sharded import mesh_of

from capture import Capture
from gradstats.compressors import TopK
from gradstats.hooks import CompressionState, compression_hook

UNITS = {"experts": 0, "scale": 0, "query.weight": (0, 3), "embedding.*": 0}


class Experts(nn.Module):
    """An embedding, a layer of three heads, four experts in one parameter and a scale of each, and a bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.zeros(5))
        self.embedding = nn.Embedding(11, 6)
        self.query = nn.Linear(6, 6, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 6, 5) / 3)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.query(self.embedding(x))
        return torch.einsum("bi,eij,e->bj", x, self.experts, self.scale) + self.bias


def batch(step, rank=0):
    return torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(10 * step + rank))


def sketched(path):
    """Capture sketches of two steps of one process."""
    model = Experts()
    with Capture(path, model, units=UNITS, store="sketches") as capture:
        for step in range(2):
            model.zero_grad()
            model(batch(step)).square().mean().backward()
            capture.step()
    return path


def sharded(rank, world, path, compressed):
    """Train under FSDP2 with a capture; return this rank's gradients of the model in one piece."""
    warnings.simplefilter("ignore")
    plain, model, seen = Experts(), Experts(), []
    fully_shard(model, mesh=mesh_of(world))
    with Capture(path, model, units=UNITS) as capture:
        for step in range(2):
            model.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            capture.step()
            plain.zero_grad()
            plain(batch(step, rank)).square().mean().backward()
            seen.append(flat_gradient(plain).copy())
    ddp = DDP(Experts())
    state = CompressionState(
        TopK(0.1), named_parameters=ddp.module.named_parameters(), diagnose_every=1
    )
    with Capture(compressed, ddp, units=UNITS) as capture:
        ddp.register_comm_hook(*capture.wrap(state, compression_hook))
        ddp(batch(0, rank)).square().mean().backward()
        capture.step()
    del ddp
    return seen
