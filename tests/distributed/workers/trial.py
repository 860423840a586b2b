"""A trial of compression under DDP, rank by rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradstats.compressors import make_compressor
from gradstats.errors import InputError
from gradstats.hooks import CompressionState, Trial, compression_hook

STEPS = 30


def train(install, seed):
    """Train a perceptron on rows that differ from rank to rank."""
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)), init_sync=True
    )
    install(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    rows = torch.Generator().manual_seed(2 * seed + dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(32, 16, generator=rows)
        loss = nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1))
        yield loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def compressed(name, ratio):
    """Return what registers a compressor."""

    def install(ddp):
        state = CompressionState(
            make_compressor(name, ratio), named_parameters=ddp.module.named_parameters()
        )
        ddp.register_comm_hook(state, compression_hook)

    return install


def short_on_one_rank(install, seed):
    """End early on the second rank."""
    torch.manual_seed(seed)
    install(nn.Linear(2, 2))
    for _ in range(STEPS - dist.get_rank()):
        yield 1.0


def same_rows(install, seed):
    """Draw from the state that a trial seeds alike on all ranks."""
    worse = install(nn.Linear(2, 2))
    for step in range(3):
        yield 1.0 + torch.rand(()) + (1e-3 if worse and step else 0.0)


def cases(rank, world):
    """Return what each rank found."""
    found = {}
    for name, install in (
        ("all", compressed("topk", 1.0)),
        ("few", compressed("randomk", 0.002)),
    ):
        result = Trial(train, install, steps=STEPS, pairs=3).run()
        found[name] = (result.decision, result.low, result.high, result.losses, result.same_ranks)
    result = Trial(same_rows, lambda model: True, steps=3, pairs=3).run()
    found["same"] = [result.same_ranks, "draw batches by rank" in str(result)]
    try:
        Trial(short_on_one_rank, print, steps=STEPS).run()
    except InputError as error:
        found["short"] = str(error)
    return found
