"""Local steps as people train: several optimizers, parameters that come later, uneven numbers of batches.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from workers.exchanges import flat, loss_of, mean, small
from workers.trainings import refusal, same_on_all_ranks, wrapped

from gradstats.compressors import TopK
from gradstats.hooks import ErrorFeedback, LocalSteps
from gradstats.hooks.systems import diloco


def two_optimizers(net):
    matrices = [p for p in net.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(others, 0.01)]


def step_all(net, optimizers, rank, step):
    net.zero_grad()
    loss_of(net, rank, step).backward()
    for each in optimizers:
        each.step()


def together(rank, world):
    """Muon and AdamW, in either order: local SGD is the mean of the parameters every three steps, to the bit."""
    same = []
    for order in (1, -1):
        nets = [small(), small()]
        ours, plain = (two_optimizers(net)[::order] for net in nets)
        with LocalSteps(nets[0], ours, steps=3) as local:
            for step in range(9):
                step_all(nets[0], ours, rank, step)
                step_all(nets[1], plain, rank, step)
                if step % 3 == 2:
                    for p in nets[1].parameters():
                        p.data.copy_(mean(p.data))
        close = float((flat(nets[0].parameters()) - flat(nets[1].parameters())).abs().max())
        same.append((local.step, local.exchanges, close, same_on_all_ranks(nets[0].parameters())))

    nets, ends = [small(), small()], []
    sets = [two_optimizers(net) for net in nets]
    for net, optimizers in zip(nets, sets, strict=True):
        with LocalSteps(net, optimizers, steps=1):
            for step in range(4):
                step_all(net, optimizers[:: 1 if net is nets[0] else -1], rank, step)
        ends.append(flat(net.parameters()))
    return same, torch.equal(*ends)


def resumed(rank, world):
    """Whether a training with two optimizers goes on bit for bit; what a checkpoint of another number says."""

    def fresh():
        net = small()
        optimizers = two_optimizers(net)
        options = {"compressor": TopK(0.2), "memory": ErrorFeedback(0.9)}
        return net, optimizers, LocalSteps(net, optimizers, steps=3, **options)

    net, optimizers, local = fresh()
    with local:
        for step in range(8):
            if step == 4:
                saved = local.state_dict()
            step_all(net, optimizers, rank, step)
    again, theirs, local = fresh()
    local.load_state_dict(saved)
    with local:
        for step in range(4, 8):
            step_all(again, theirs, rank, step)
    other = small()
    one = LocalSteps(other, torch.optim.AdamW(other.parameters()), steps=3)
    options = {"compressor": TopK(0.2), "memory": ErrorFeedback(0.9)}
    one = LocalSteps(other, torch.optim.AdamW(other.parameters()), steps=3, **options)
    message = refusal(lambda: one.load_state_dict(saved))
    return torch.equal(flat(net.parameters()), flat(again.parameters())), message


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate has it: of the base class, but without its attributes."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)


def refused(rank, world):
    """What is said where an exchange would miss something."""

    def late(change):
        net = small()
        net[2].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        with LocalSteps(net, optimizer, steps=3):
            for step in range(9):
                if step == 4:
                    change(net, optimizer)
                step_all(net, [optimizer], rank, step)

    def add(net, optimizer):
        torch.manual_seed(7)
        net.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": [*net[3].parameters()]})

    def replace(net, optimizer):
        net[2] = nn.Linear(16, 4)

    def made_anew():
        net = small()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with LocalSteps(net, optimizer, steps=3):
            for step in range(9):
                if step == 4:
                    optimizer = torch.optim.SGD(net.parameters(), 0.05)
                step_all(net, [optimizer], rank, step)

    def one_of_two():
        net = small()
        optimizers = two_optimizers(net)
        with LocalSteps(net, optimizers[0], steps=3):
            step_all(net, optimizers, rank, 0)

    def uneven(delay):
        net = small()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        with LocalSteps(net, optimizer, steps=3, compressor=TopK(0.2), delay=delay):
            for step in range(9):
                if (rank, step) != (1, 4):
                    step_all(net, [optimizer], rank, step)

    def wrapper():
        net = small()
        inner = torch.optim.AdamW(net.parameters(), 0.01)
        optimizer = Wrapper(inner)
        with diloco(net, optimizer, 3):
            for step in range(6):
                step_all(net, [optimizer], rank, step)
        assert same_on_all_ranks(net.parameters())

    found = {
        "unfrozen": refusal(lambda: late(lambda net, o: net[2].bias.requires_grad_(True))),
        "added": refusal(lambda: late(add)),
        "replaced": refusal(lambda: late(replace)),
        "made anew": refusal(made_anew),
        "one of two": refusal(one_of_two),
        "no optimizer": refusal(lambda: LocalSteps(small(), [], steps=3)),
        "wrapper": refusal(wrapper),
        "uneven": refusal(lambda: uneven(0)),
    }
    dist.barrier()
    return found


def unfrozen_under_ddp(rank, world):
    """What the hook says of a parameter that is unfrozen, and that DDP does not average."""
    net = small()
    net[2].bias.requires_grad_(False)
    ddp, _ = wrapped(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            if step == 2:
                net[2].bias.requires_grad_(True)
            loss_of(ddp, rank, step).backward()
    return [str(w.message) for w in caught if "2.bias" in str(w.message)]
