"""What the worker processes of test_agreement.py run."""

import torch
from torch import nn

from gradstats.compressors import TopK, make_compressor
from gradstats.errors import GradstatsError
from gradstats.hooks import CompressionState, LocalSteps
from gradstats.hooks.shards import exchange


def _state(compressor, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    return net, CompressionState(compressor, named_parameters=net.named_parameters(), **options)


def _step(net, state, rank, step):
    made = torch.Generator().manual_seed(10 * step + rank)
    pairs = [(p, torch.randn(p.shape, generator=made)) for p in net.parameters()]
    exchange(state, pairs)
    return torch.cat([g.reshape(-1) for _, g in pairs])


def _refusal(call):
    try:
        call()
    except GradstatsError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differences(rank, world):
    """Return what is said where ranks differ before, during and after a step."""
    said = {}
    net, state = _state(TopK(0.1 if rank else 0.2), dense_below=10)
    said["ratio"] = _refusal(lambda: _step(net, state, rank, 0))
    said["left alone"] = str(state.step)
    net, state = _state(make_compressor("randomk", 0.1, seed=rank))
    said["seed"] = _refusal(lambda: _step(net, state, rank, 0))
    net, state = _state(TopK(0.1))
    _step(net, state, rank, 0)
    if rank:
        state.compressor.ratio = 0.3
    said["on the way"] = _refusal(lambda: _step(net, state, rank, 1))
    net, state = _state(TopK(0.1), ratio_at=lambda step: 1 if (step, rank) == (3, 1) else 0.1)
    for step in range(3):
        _step(net, state, rank, step)
    said["dense on one"] = _refusal(lambda: _step(net, state, rank, 3))
    return said


def verified(rank, world):
    """Return what is said where the update of the last rank has another bit in the second of two steps to verify."""
    net, state = _state(TopK(0.5), verify_every=2)
    write = state._setup.gradient.write
    said = []
    for step in range(5):
        before = state.residual(net[0].weight)
        before = None if before is None else before.clone()

        def wrong(pairs, *given, step=step):
            write(pairs, *given)
            if rank == world - 1 and step == 2:
                pairs[2][1].view(torch.int32)[0, 0] ^= 1

        state._setup.gradient.write = wrong
        said.append(_refusal(lambda step=step: _step(net, state, rank, step)))
        if said[-1]:
            said.append(torch.equal(before, state.residual(net[0].weight)))
            return said
    return said


def local_steps(rank, world):
    """Return what is said where ranks differ in local steps, and where anchors differ that are verified."""
    said = {}

    def train(total=8, rate=None, spoil=False, outer=True, **options):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        outer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5) if outer else None
        with LocalSteps(net, optimizer, outer, **options) as local:
            for step in range(total):
                if rate is not None and step == 3:
                    outer.param_groups[0]["lr"] = rate
                if spoil and step == 5:
                    local._fragments[-1].anchors["1.bias"][0] += 1e-3
                optimizer.zero_grad()
                net(torch.ones(1, 6) + rank).square().mean().backward()
                optimizer.step()
        return ""

    for name, options in (
        ("steps", {"steps": 3 if rank else 4}),
        ("a scheduler of one rank", {"steps": 2, "rate": 0.1 if rank else None}),
        ("two steps more", {"steps": 2, "total": 10 if rank else 8}),
        ("two steps more, late", {"steps": 2, "delay": 1, "total": 10 if rank else 8}),
        # every step is an exchange: a rank that ends tells those that go on, which would wait for it
        ("two steps more, averaged", {"steps": 1, "total": 10 if rank else 8, "outer": False}),
        # a rank that has ended sends a message of another size
        (
            "two steps more, sparse",
            {"steps": 2, "total": 10 if rank else 8, "compressor": TopK(0.25)},
        ),
        ("verified", {"steps": 2, "verify_every": 1, "spoil": rank == 1, "fragments": 2}),
        ("well", {"steps": 2, "verify_every": 1, "delay": 1, "fragments": 2}),
        ("a step more", {"steps": 2, "total": 9 if rank else 8}),
    ):
        said[name] = _refusal(lambda options=options: train(**options))
    return said
