"""Local steps whose every number is known beforehand: each rank's gradients are drawn, and nothing is trained."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from gradstats.compressors import TopK, make_compressor
from gradstats.hooks import ErrorFeedback, LocalSteps

H, STEPS, RATE, OUTER, RATIO, DECAY = 4, 14, 0.1, 0.7, 0.3, 0.9
MIX = {"dense": 0.25, "delayed": 0.2, "remembered": 0.5}
DELAY = {"dense": 1, "delayed": 3, "remembered": 0}


def net(seed):
    """Return two layers with buffers between them, which are the rank's own, too."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[1].running_mean.fill_(seed + 1.0)
    model[1].num_batches_tracked.fill_(seed + 7)
    return model


def gradient(rank, step, i, shape):
    """Return what a rank's parameter i gets in a step; later parameters get more."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + i)
    return (1 + i) * torch.randn(shape, generator=generator)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


def built(case, model, optimizer):
    outer = torch.optim.SGD(model.parameters(), lr=OUTER)
    options = {"delay": DELAY[case], "mix": MIX[case], "fragments": [["0.*"], ["*"]]}
    if case == "remembered":
        options |= {"compressor": TopK(RATIO), "memory": ErrorFeedback(DECAY)}
    return LocalSteps(model, optimizer, outer, H, **options)


def stepped(case, rank, save=None, state=None):
    """Return the parameters after each step and at the end, and what was saved before one of the steps."""
    model, saved = net(rank), None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    local, seen = built(case, model, optimizer), []
    if state is not None:
        local.load_state_dict(state)
    with local:
        for step in range(0 if state is None else save, STEPS):
            if step == save and state is None:
                saved = copy.deepcopy(local.state_dict())
            for i, p in enumerate(model.parameters()):
                p.grad = gradient(rank, step, i, p.shape)
            optimizer.step()
            seen.append(flat(model))
    return [*seen, flat(model)], saved


def learned_once(rank):
    """Return the record and the targets of one exchange by a rule that takes its threshold from its first gradient."""
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    local = LocalSteps(
        model, optimizer, None, H, make_compressor("hard", RATIO), fragments=[["0.*"], ["*"]]
    )
    with local:
        for step in range(H):
            for i, p in enumerate(model.parameters()):
                p.grad = (100 if i > 1 else 1) * gradient(rank, step, i, p.shape)
            optimizer.step()
        last = local.last
    return last.numel, last.target, last.selected


def not_finite(rank, policy):
    """Return after which steps all parameters were finite, where one was not from the fourth step on."""
    model, seen = net(0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    local = LocalSteps(model, optimizer, None, H, TopK(0.5), delay=2, nonfinite=policy)
    with local:
        for step in range(3 * H - 1):
            for i, p in enumerate(model.parameters()):
                p.grad = gradient(rank, step, i, p.shape)
            if rank == 1 and step == H - 1:
                model[2].weight.grad[1, 2] = torch.nan
            optimizer.step()
            seen.append(all(bool(p.isfinite().all()) for p in model.parameters()))
    return seen


def two_ranks(rank, world):
    found = {}
    for case in MIX:
        seen, saved = stepped(case, rank, 5)
        resumed, _ = stepped(case, rank, 5, saved)
        found[case] = seen, resumed
    model = net(rank)
    LocalSteps(model, torch.optim.SGD(model.parameters(), lr=RATE), steps=H)
    found["buffers"] = [b.tolist() for b in model.buffers()]
    found["hard"] = learned_once(rank)
    found |= {policy: not_finite(rank, policy) for policy in ("skip", "zero")}
    dist.barrier()
    return found
