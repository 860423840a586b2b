"""What the worker processes of test_memory.py run.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers.trainings import refusal, same_on_all_ranks, wrapped

from gradstats.compressors import (
    LAGS,
    SSDM,
    Cascading,
    CLTk,
    DenseCompressor,
    EFSignSGD,
    Layerwise,
    Marsit,
    RandomK,
    SignSGD,
    TopK,
    make_compressor,
)
from gradstats.hooks import AdamCorrection, CompressionState, MomentumCorrection, compression_hook

COMPRESSORS = {
    "dense": DenseCompressor,
    "topk": lambda: TopK(1.0),
    "cltk": lambda: CLTk(1.0),
    "randomk": lambda: RandomK(1.0),
    "unbiased": lambda: RandomK(1.0, unbiased=True),
    "layerwise": lambda: Layerwise(lambda name, numel: TopK(1.0)),
    "lags": lambda: LAGS(1.0, adaptive=False),
    "redsync-quantised": lambda: make_compressor("redsync-quantised", 0.01),
    "signsgd": SignSGD,
    "ef-signsgd": EFSignSGD,
    "cascading": lambda: Cascading(stochastic=False),
    "marsit": lambda: Marsit(full_every=None),
    "marsit-full": lambda: Marsit(full_every=1),
}


class Constants(nn.Module):
    """Parameters whose gradients are what the loss is multiplied by."""

    def __init__(self):
        super().__init__()
        self.large = nn.Parameter(torch.zeros(40))
        self.named = nn.Parameter(torch.zeros(30))
        self.small = nn.Parameter(torch.zeros(3))

    def forward(self, factors, parts=("large", "named", "small")):
        return sum(
            (getattr(self, part) * factors[: getattr(self, part).numel()]).sum() for part in parts
        )


class Spread(nn.Module):
    """Two thirds compressed, one third not, and gradients that differ everywhere."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, n in (("large", 40), ("named", 30), ("small", 3)):
            setattr(self, name, nn.Parameter(torch.randn(n, generator=generator)))

    forward = Constants.forward


def updates(ddp, steps=4, factor=1.0, before=lambda step: None):
    """Train, and return the update of each parameter in each step: its mean and how far it is from that."""
    found = []
    for step in range(steps):
        ddp.zero_grad()
        before(step)
        (ddp(torch.ones(40)) * factor).backward()
        grads = [p.grad / factor for p in ddp.parameters()]
        found.append([(float(g.mean()), float((g - g.mean()).abs().max())) for g in grads])
    return found


def constant_gradients(rank, world):
    """Updates of every compressor and dense path where every gradient is 1."""
    options = {
        "small": {"dense_below": 10},
        "named": {"exclude": ["named"]},
        "all dense": {"exclude": ["*"]},
        "warm-up": {"ratio_at": lambda step: 1.0},
        "warm-up, then all": {"ratio_at": lambda step: 1.0 if step < 2 else None},
    }
    found = {}
    for name, compressor in COMPRESSORS.items():
        ddp, _ = wrapped(Constants(), compressor(), memory=MomentumCorrection(0.9))
        found[name] = updates(ddp)
    for name, given in options.items():
        ddp, _ = wrapped(Constants(), TopK(1.0), memory=MomentumCorrection(0.9), **given)
        found[name] = updates(ddp)
    for form in ("dgc", "redsync"):
        for name, given in (("compressed", {}), ("dense", {"exclude": ["*"]})):
            memory = MomentumCorrection(0.9, nesterov=form)
            ddp, _ = wrapped(Constants(), TopK(1.0), memory=memory, **given)
            found[f"{form}, {name}"] = updates(ddp)
    for name, given in (("compressed", {}), ("dense", {"exclude": ["*"]})):
        ddp, _ = wrapped(Constants(), TopK(1.0), memory=AdamCorrection(), **given)
        found[f"adam, {name}"] = updates(ddp)
    return found


def against_torch(rank, world):
    """Largest difference from PyTorch's optimizers, with gradients that differ by rank, place and step."""
    rules = {
        "momentum": (MomentumCorrection(0.9), {"momentum": 0.9}, torch.optim.SGD),
        "nesterov": (
            MomentumCorrection(0.8, nesterov=True),
            {"momentum": 0.8, "nesterov": True},
            torch.optim.SGD,
        ),
        "adam": (AdamCorrection((0.8, 0.95), eps=1e-6), {"betas": (0.8, 0.95), "eps": 1e-6}, torch.optim.Adam),
    }  # fmt: skip
    worst = {}
    for name, (memory, options, optimizer) in rules.items():
        nets = [Spread(), Spread()]
        # an Adam of every rank's own, as where a parameter is compressed, is not the mean's Adam
        exclude = ["*"] if name == "adam" else ["named"]
        ddp, _ = wrapped(nets[0], TopK(1.0), memory=memory, exclude=exclude, dense_below=10)
        dense = DDP(nets[1])
        optimizers = [
            torch.optim.SGD(nets[0].parameters(), 0.1),
            optimizer(dense.parameters(), 0.1, **options),
        ]
        for step in range(6):
            factors = torch.randn(40, generator=torch.Generator().manual_seed(10 * step + rank))
            for wrapping, chosen in zip((ddp, dense), optimizers, strict=True):
                chosen.zero_grad()
                wrapping(factors).square().backward()
                chosen.step()
        worst[name] = max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True)
        )
        assert same_on_all_ranks(nets[0].parameters())
    return worst


def policies(rank, world):
    """Steps that are refused, gradients summed under no_sync, loss scales, and unused parameters."""
    found = {}

    def state_of(ddp, state):
        return [
            t.clone()
            for t in (*state.memory.tensors().values(), *state.memory.dense_tensors().values())
        ]

    for policy in ("skip", "propagate", "zero"):
        net = Constants()
        ddp, state = wrapped(
            net, TopK(1.0), memory=MomentumCorrection(0.9), dense_below=10, nonfinite=policy
        )
        bad = {"now": False}
        net.small.register_hook(
            lambda g, bad=bad: torch.full_like(g, torch.inf) if bad["now"] else g
        )
        kept = []

        def begin(step, bad=bad, kept=kept, ddp=ddp, state=state):
            bad["now"] = rank == 1 and step == 2
            if step in (2, 3):
                kept.append(state_of(ddp, state))

        found[policy] = updates(ddp, before=begin)
        found[f"{policy} untouched"] = all(torch.equal(a, b) for a, b in zip(*kept, strict=True))

    ddp, _ = wrapped(Constants(), TopK(1.0), memory=MomentumCorrection(0.9), dense_below=10)

    def accumulate(step):
        with ddp.no_sync():
            ddp(torch.ones(40)).backward()

    found["accumulated"] = updates(ddp, before=accumulate)

    class Scaler:
        scale = 1024.0

        def get_scale(self):
            return self.scale

    scaler = Scaler()
    ddp, _ = wrapped(
        Constants(), TopK(1.0), memory=MomentumCorrection(0.9), dense_below=10, scaler=scaler
    )
    found["scaled"] = []
    for step in range(4):
        scaler.scale = 1024.0 / 2**step
        found["scaled"] += updates(ddp, 1, scaler.scale)

    net = Constants()
    ddp, state = wrapped(
        net,
        TopK(1.0),
        memory=MomentumCorrection(0.9),
        dense_below=10,
        ddp={"find_unused_parameters": True},
    )
    unused = []
    for step in range(4):
        net.zero_grad()
        parts = ("large", "named", "small") if step != 2 else ("large", "named")
        ddp(torch.ones(40), parts).backward()
        unused.append(None if net.small.grad is None else float(net.small.grad[0]))
    found["unused"] = unused
    return found


def resume(rank, world, rule):
    """Stop after three steps with small and named parameters dense; every bit comes back."""
    memories = {
        "momentum": lambda: MomentumCorrection(0.9, nesterov="redsync"),
        "adam": AdamCorrection,
    }

    def fresh():
        net = Spread()
        state = CompressionState(
            TopK(0.2),
            memory=memories[rule](),
            named_parameters=net.named_parameters(),
            exclude=["named"],
            dense_below=10,
        )
        return net, state

    def run(net, state, steps):
        ddp = DDP(net)
        ddp.register_comm_hook(state, compression_hook)
        for step in steps:
            factors = torch.randn(40, generator=torch.Generator().manual_seed(10 * step + rank))
            net.zero_grad()
            ddp(factors).square().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.05 * p.grad

    straight, first, again, third = fresh(), fresh(), fresh(), fresh()
    run(*straight, range(7))
    run(*first, range(3))
    saved = first[1].state_dict()
    again[0].load_state_dict(first[0].state_dict())
    again[1].load_state_dict(saved)
    # what has been loaded and not used yet is saved again
    third[0].load_state_dict(first[0].state_dict())
    third[1].load_state_dict(again[1].state_dict())
    same = []
    for each in (again, third):
        run(*each, range(3, 7))
        same.append(
            all(
                torch.equal(a, b)
                for a, b in zip(straight[0].parameters(), each[0].parameters(), strict=True)
            )
        )
    other = CompressionState(
        TopK(0.2),
        memory=memories[rule](),
        named_parameters=Spread().named_parameters(),
        dense_below=10,
    )
    return (
        same,
        same_on_all_ranks(again[0].parameters()),
        refusal(lambda: other.load_state_dict(saved)),
    )


def sparse(rank, world):
    """A sparse gradient has no momentum here, and that is said."""
    net = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    ddp, _ = wrapped(net, TopK(0.5), memory=MomentumCorrection(0.9))
    words = torch.ones(3, dtype=torch.long)
    stochastic = CompressionState(SSDM(), memory=MomentumCorrection(0.9))
    return refusal(lambda: ddp(words).sum().backward()), stochastic.error_feedback
