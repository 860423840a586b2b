"""Local steps in real processes, beside loops written from the papers' formulas."""

import copy
import math
import os
import time
from contextlib import suppress

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.checkpoints import resealed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from capture import Capture
from gradstats.collectives import Codec
from gradstats.compressors import ChunkTopK, SparseCompressor, TopK, make_compressor
from gradstats.errors import ExchangeError, GradstatsError, NonFiniteGradientError
from gradstats.hooks import ErrorFeedback, LocalSteps
from gradstats.hooks.systems import diloco, sparseloco

H = 5


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    )


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(rank, step):
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, (x[:, :3] + 0.3 * rank).argmax(1)


def backward(model, optimizer, rank, step):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return float(loss.detach())


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(local, model, optimizer, rank, steps, start=0):
    """Return the parameters after each step."""
    seen = []
    with local:
        for step in range(start, steps):
            backward(model, optimizer, rank, step)
            optimizer.step()
            seen.append(flat(model))
    return seen


def dense_reference(rank, world, steps):
    """DiLoCo, algorithm 1: local AdamW, then v ← μ v + Δ, θ ← θ − η (Δ + μ v) with the mean Δ of θ₀ − θ."""
    model = net()
    optimizer, anchor = adamw(model), [p.detach().clone() for p in model.parameters()]
    velocity, seen = [torch.zeros_like(a) for a in anchor], []
    for step in range(steps):
        backward(model, optimizer, rank, step)
        optimizer.step()
        if (step + 1) % H == 0 or step == steps - 1:
            for p, a, v in zip(model.parameters(), anchor, velocity, strict=True):
                delta = a - p.detach()
                dist.all_reduce(delta)
                delta /= world
                v.mul_(0.9).add_(delta)
                a.add_(delta.add(v, alpha=0.9), alpha=-0.7)
                p.data.copy_(a)
        seen.append(flat(model))
    return seen


def diloco_beside_its_loop(rank, world, steps):
    model = net(seed=rank)  # the ranks start apart; rank 0's parameters become everyone's
    optimizer = adamw(model)
    local = diloco(model, optimizer, H)
    seen = train(local, model, optimizer, rank, steps)
    same = [
        torch.equal(a, b)
        for a, b in zip(seen[:-1], dense_reference(rank, world, steps)[:-1], strict=True)
    ]
    return (
        same,
        torch.equal(flat(model), dense_reference(rank, world, steps)[-1]),
        flat(model).numpy(),
    )


def sparse_reference(rank, world, steps, chunk, k, average):
    """SparseLoCo from its formulas, all dense: e ← β e + Δ, Δ̂ = Q(top-k(e)), e ← e − Δ̂, θ ← θ₀ − α mean Δ̂."""
    model = net()
    optimizer, anchor = adamw(model), flat(model)
    e = torch.zeros_like(anchor)
    for step in range(steps):
        backward(model, optimizer, rank, step)
        optimizer.step()
        if (step + 1) % H:
            continue
        e = 0.95 * e + (anchor - flat(model))
        chosen = torch.zeros_like(e, dtype=torch.bool)
        for start in range(0, len(e), chunk):
            part = e[start : start + chunk].abs()
            keep = max(1, round(k / chunk * len(part)))
            chosen[start + part.argsort(descending=True)[:keep]] = True
        values = e[chosen]
        for start in range(0, len(values), 256):  # 2 bits: 0, or ± the largest of 256
            part = values[start : start + 256]
            largest = part.abs().max()
            values[start : start + 256] = largest * (part / largest).round()
        sent = torch.zeros_like(e)
        sent[chosen] = values
        e = e - sent
        dist.all_reduce(sent)
        senders = chosen.float()
        dist.all_reduce(senders)
        anchor = anchor - sent / (world if average == "ranks" else senders.clamp(min=1))
        torch.nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    return flat(model), e


def sparseloco_beside_its_formulas(rank, world, average):
    steps, chunk, k = 4 * H, 64, 4
    model = net()
    optimizer = adamw(model)
    local = sparseloco(model, optimizer, H, ratio=k / chunk, chunk=chunk, average=average)
    train(local, model, optimizer, rank, steps)
    expected, e = sparse_reference(rank, world, steps, chunk, k, average)
    memory = local._fragments[0].state.memory.tensors()["residual"]
    return (
        float((flat(model) - expected).abs().max()),
        float((memory - e).abs().max()),
        float(expected.abs().max()),
        local.last,
        flat(model).numpy(),
    )


def one_step_beside_ddp(rank, world, name):
    make = {
        "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        "AdamW": adamw,
    }[name]
    model, twin = net(), net()
    optimizer = make(model)
    ours = train(LocalSteps(model, optimizer, steps=1), model, optimizer, rank, 7)
    ddp = DDP(twin)
    optimizer = make(ddp)
    same = []
    for step, parameters in enumerate(ours):
        backward(ddp, optimizer, rank, step)
        optimizer.step()
        same.append(torch.equal(flat(twin), parameters))
    return same


def the_mean_of_the_parameters(rank, world):
    """Local SGD: without an outer optimizer the parameters become the ranks' mean."""
    model = net()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, steps=H)
    before = []
    optimizer.register_step_post_hook(lambda *_: before.append(flat(model)))  # seen before ours
    seen = train(local, model, optimizer, rank, H)
    dist.all_reduce(before[-1])
    return float((seen[-1] - before[-1] / world).abs().max())


OPTIONS = {
    "dense": dict,
    "topk with decay": lambda: {"compressor": TopK(0.1), "memory": ErrorFeedback(0.9)},
    "fragments": lambda: {"compressor": TopK(0.05), "fragments": 3},
    "patterns": lambda: {"fragments": [["0.*", "2.weight"], ["*"]]},
    "delayed": lambda: {"compressor": TopK(0.05), "fragments": 2, "delay": 2},
    "marsit": lambda: {"compressor": make_compressor("marsit", 1.0)},
    "micro": lambda: {"compressor": make_compressor("micro", 0.3)},
    "lags": lambda: {"compressor": make_compressor("lags", 0.05)},
    "signsgd": lambda: {"compressor": make_compressor("signsgd", 1.0)},
    "cltk": lambda: {"compressor": make_compressor("cltk", 0.3), "exclude": ["*.bias"]},
}
RESUMED = ("topk with decay", "delayed")
CAPTURED = ("dense", "topk with decay", "fragments", "delayed")
AVERAGES = ("ranks", "senders")
SHARED = {0.0: (2.7, 3.0), 0.7: (1.2, 2.6), 1.0: (1.0, 1.0)}
"""Share of a vector that all ranks have in common, and how much larger a mean over three senders then is."""


def built(name, model, optimizer):
    options = OPTIONS[name]()
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    if "memory" in options:  # a residual that decays stands in for the momentum
        outer = torch.optim.SGD(model.parameters(), lr=0.7)
    return LocalSteps(model, optimizer, outer, H, **options)


def learns(rank, world, name):
    """Return the first and last losses, and the parameters when the block has ended."""
    model = net()
    optimizer = adamw(model)
    local, losses = built(name, model, optimizer), []
    with local:
        for step in range(65 if name == "delayed" else 63):  # 65: an exchange is under way
            losses.append(backward(model, optimizer, rank, step))
            optimizer.step()
    return sum(losses[:5]) / 5, sum(losses[-5:]) / 5, flat(model).numpy(), local.exchanges


def resumes(rank, world, name, folder):
    """Return whether stopping in the middle of an interval changes any bit of what follows, by way of storing it."""
    model = net()
    optimizer = adamw(model)
    whole = train(built(name, model, optimizer), model, optimizer, rank, 19)
    model = net()
    optimizer = adamw(model)
    local = built(name, model, optimizer)
    with local:
        for step in range(11):  # a step after an exchange, which may be under way
            backward(model, optimizer, rank, step)
            optimizer.step()
        saved = copy.deepcopy(local.state_dict())
    torch.save(saved, f"{folder}/{rank}.pt")
    dcp.save({"local": saved}, checkpoint_id=f"{folder}/{name}")
    same = []
    for way in ("save", "checkpoint"):
        model = net(seed=7)
        optimizer = adamw(model)
        local = built(name, model, optimizer)
        if way == "save":
            holder = {"local": torch.load(f"{folder}/{rank}.pt", weights_only=True)}
        else:
            dcp.load(holder := {"local": local.state_dict()}, checkpoint_id=f"{folder}/{name}")
        local.load_state_dict(holder["local"])
        rest = train(local, model, optimizer, rank, 19, start=11)
        same += [torch.equal(a, b) for a, b in zip(whole[11:], rest, strict=True)]
    refused = []
    for change in (
        {"steps": 6},
        {"parameters": {}},
        {"fragments": []},
    ):
        other = resealed(rank, saved[f"rank{rank}"], **change)
        try:
            local.load_state_dict(other)
        except GradstatsError as error:
            refused.append(str(error))
    try:
        local.load_state_dict({"rank9": {}})
    except GradstatsError as error:
        refused.append(str(error))
    return same, refused


def not_readable():
    """Return a learning rate of NumPy's, read back, and what is said of an object that could not be."""
    model = net()
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    local = built("dense", model, optimizer)
    saved = local.state_dict()
    optimizer.param_groups[0]["lr"] = 1.0
    local.load_state_dict(saved)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["schedule"] = object()
    try:
        local.state_dict()
    except GradstatsError as error:
        return rate, str(error)


def norms(rank, world, shared):
    """Return the norm of a mean over senders against that over ranks, and how many send a coordinate."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(20_000, generator=generator)
    own = torch.randn(20_000, generator=generator.manual_seed(1 + rank))
    means = []
    for average in ("ranks", "senders"):
        compressor = SparseCompressor(ChunkTopK(), Codec("chunk"), average=average)
        reduced = compressor.reduce(shared * common + (1 - shared) * own, None)
        means.append(reduced.mean.clone())
    ranks, senders = (float(mean.norm()) for mean in means)
    return senders / ranks, world * reduced.selected / reduced.union


def much(rank, world):
    """Return the largest error of a mean over senders, which are so many that a dense sum would be shorter."""
    generator, compressor, errors = (
        torch.Generator(),
        SparseCompressor(TopK(0.8), average="senders"),
        [],
    )
    for step in range(2):
        of_all = [
            torch.randn(1000, generator=generator.manual_seed(10 * step + r)) for r in range(world)
        ]
        sent, senders = torch.zeros(1000), torch.zeros(1000)
        for each in of_all:
            largest = each.abs().topk(800).indices
            sent[largest] += each[largest]
            senders[largest] += 1
        mean = compressor.reduce(of_all[rank].clone(), None).mean
        errors.append(float((mean - sent / senders.clamp(min=1)).abs().max()))
    return errors


def not_finite(rank, world):
    """Return the error of an exchange, and whether the parameters were left alone and can go on."""
    model = net()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, steps=2, compressor=TopK(0.1))
    with local:
        for step in range(2):
            backward(model, optimizer, rank, step)
            if step == 1 and rank == 1:
                model[0].weight.data[0, 0] = float("nan")
            try:
                optimizer.step()
            except NonFiniteGradientError as error:
                message = str(error)
        left = bool(flat(model).isnan().any()) == (rank == 1)
        model[0].weight.data.nan_to_num_(0.0)
        for step in range(2, 4):
            backward(model, optimizer, rank, step)
            optimizer.step()
    return message, left, flat(model).numpy()


def not_finite_for_a_while(rank, world, policy):
    """One parameter is not finite in one local step, and an exchange is applied late: it must not stay on its rank."""
    model = net()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, steps=4, compressor=TopK(0.5), delay=2, nonfinite=policy)
    with local:
        for step in range(16):
            backward(model, optimizer, rank, step)
            if rank == 1 and step == 3:
                model[0].weight.data[0, 0] = float("nan")
            if step > 3:  # what became of it lasts until the exchange is applied
                for p in model.parameters():
                    p.grad.nan_to_num_(0.0)
            optimizer.step()
            for values in optimizer.state.values():
                for value in values.values():
                    value.nan_to_num_(0.0)
    return flat(model).numpy()


def rolled_back(rank, world):
    """Load what was saved while an exchange is under way: the same as if that had never begun."""
    seen = []
    for slow in (False, True):
        model = net()
        optimizer = adamw(model)
        local = built("delayed", model, optimizer)
        with local:
            for step in range(11):
                backward(model, optimizer, rank, step)
                optimizer.step()
                if step == 8:
                    saved = copy.deepcopy(local.state_dict())
            if slow:
                state = local._fragments[1].state
                settle = state.memory.settle
                state.memory.settle = lambda *given, settle=settle: (
                    time.sleep(0.3),
                    settle(*given),
                )
                backward(model, optimizer, rank, 99)
                for _ in range(4):  # begins an exchange that is not over when the state is loaded
                    optimizer.step()
            local.load_state_dict(saved)
            for step in range(9, 19):
                backward(model, optimizer, rank, step)
                optimizer.step()
        seen.append(flat(model))
    return torch.equal(*seen)


def one_step_otherwise(rank, world):
    """Return what is said of a closure in data-parallel steps, and how far an outer rate of 0.5 is from its formula."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSteps(model, optimizer, steps=1):
        try:
            optimizer.step(lambda: backward(model, optimizer, rank, 0))
        except GradstatsError as error:
            said = str(error)
        start = flat(model)
        backward(model, optimizer, rank, 0)
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        optimizer.step()
        dist.all_reduce(gradient)
        off = [float((flat(model) - (start - 0.1 * gradient / world)).abs().max())]
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    with LocalSteps(model, optimizer, outer, steps=1):
        start = flat(model)
        outer.param_groups[0]["lr"] = 0.5  # as a scheduler does
        backward(model, optimizer, rank, 0)
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        optimizer.step()
        dist.all_reduce(gradient)
        off.append(float((flat(model) - (start - 0.05 * gradient / world)).abs().max()))
    return said, off


def counted(rank, world):
    """Return calls around exchanges, and counts and last record: at the end, after loading, after going back then."""
    seen = {}
    for fragments, steps in ((1, 4), (3, 4), (3, 3)):
        model = net()
        optimizer = adamw(model)
        local = LocalSteps(model, optimizer, steps=3, compressor=TopK(0.1), fragments=fragments)
        calls = []
        local.watch(lambda pairs, c=calls: c.append(len(pairs)), lambda c=calls: c.append("after"))
        train(local, model, optimizer, rank, steps)
        seen[fragments, steps] = calls, local.exchanges, local.last.step, local.last.numel
    model = net()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, steps=1, compressor=TopK(0.1))
    train(local, model, optimizer, rank, 3)
    other = LocalSteps(model, optimizer, steps=1, compressor=TopK(0.1))
    train(other, model, optimizer, rank, 1)
    other.load_state_dict(local.state_dict())
    loaded = other.exchanges, other.last, other._fragments[0].state.last
    other.discard()
    return seen, loaded, (other.exchanges, other.last), refused_then_discarded(rank)


def refused_then_discarded(rank):
    """Return counts after an exchange that is refused, and after discard(): none of it is left to take back."""
    model = net()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, steps=1, compressor=TopK(0.1))
    local.__enter__()
    for step in range(2):
        backward(model, optimizer, rank, step)
        optimizer.step()
    good, last = [p.detach().clone() for p in model.parameters()], local.last
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with suppress(NonFiniteGradientError):
        optimizer.step()
    refused = local.exchanges
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), good, strict=True):
            parameter.copy_(values)
    local.discard()
    local.__exit__(ValueError, None, None)
    counts = refused, local.exchanges, local.last is last, local._fragments[0].state.step
    delayed = LocalSteps(model, optimizer, steps=2, compressor=TopK(0.1), delay=1)
    return counts, [repr(each) for each in (local, delayed)]


def lost_rank(rank, world, folder, delay):
    """Return nothing, but leave the error of the rank that stays in a file: the other one is gone."""
    model = net()
    optimizer = adamw(model)
    try:
        with LocalSteps(model, optimizer, steps=4, compressor=TopK(0.1), delay=delay):
            for step in range(40):
                if rank == 1 and step == 6:
                    os._exit(0)
                backward(model, optimizer, rank, step)
                optimizer.step()
    except ExchangeError as error:
        finite = bool(flat(model).isfinite().all())
        (folder / "error").write_text(f"{finite} {error}", encoding="utf-8")
    os._exit(0)  # the group is beyond a barrier


def wrong(rank, world):
    """Return the errors of options that do not go together."""
    model = net()
    optimizer = adamw(model)
    other = torch.optim.SGD(net().parameters(), lr=1.0)
    found = {}
    for label, make in {
        "steps": lambda: LocalSteps(model, optimizer, steps=0),
        "delay": lambda: LocalSteps(model, optimizer, steps=4, delay=4),
        "mix": lambda: LocalSteps(model, optimizer, mix=2),
        "fragments": lambda: LocalSteps(model, optimizer, steps=2, fragments=3),
        "many": lambda: LocalSteps(model, optimizer, fragments=9),
        "none": lambda: LocalSteps(model, optimizer, fragments=[["0.*"]]),
        "empty": lambda: LocalSteps(model, optimizer, fragments=[["*"], ["0.*"]]),
        "outer": lambda: LocalSteps(model, optimizer, other),
        "average": lambda: LocalSteps(model, optimizer, compressor=TopK(0.1), average="all"),
        "senders": lambda: LocalSteps(
            model, optimizer, compressor=make_compressor("micro", 0.1), average="senders"
        ),
        "memory": lambda: LocalSteps(model, optimizer, memory=ErrorFeedback()),
        "ddp": lambda: LocalSteps(DDP(model), optimizer),
        "momentum": lambda: diloco(model, optimizer, momentum=1.0),
        "decay": lambda: sparseloco(model, optimizer, decay=0.0),
        "frozen": lambda: LocalSteps(nn.ReLU(), optimizer),
    }.items():
        try:
            make()
        except GradstatsError as error:
            found[label] = str(error)
    return found


def captured(rank, world, path, name):
    """Train with a capture; return what the trace must hold, step by step."""
    model = net()
    optimizer = adamw(model)
    local = built(name, model, optimizer)
    anchors, deltas, gradients = [flat(model)], [], []

    def seen(*_):  # registered before ours, so that the local parameters are still there
        deltas.append(anchors[-1] - flat(model))
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))

    optimizer.register_step_post_hook(seen)
    with Capture(path, model, schedule=2, metadata={"local_steps": H}) as capture:
        capture.follow(local)
        with local:
            for step in range(5 * H + 2):
                loss = backward(model, optimizer, rank, step)
                capture.step(loss=loss, learning_rate=step)
                optimizer.step()
                if (step + 1) % H == 0:
                    anchors.append(flat(model))
    return deltas[H - 1 :: H], gradients[H - 1 :: H], len(local._fragments)


def frozen(rank, world):
    """Freeze a bias between two exchanges, on both ranks, then on one alone."""
    found = {}
    for name, delay in (("now", 0), ("delayed", 2)):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with LocalSteps(model, optimizer, outer, H, delay=delay) as local:
            for step in range(3 * H + 2):
                backward(model, optimizer, rank, step)
                optimizer.step()
                if (
                    step == H + 2
                ):  # a delayed exchange has come, and one with this interval's steps has not
                    model[0].bias.requires_grad_(False)
                if step == 2 * H + delay - 1:
                    settled = model[0].bias.detach().clone()
        found[name] = (
            settled.numpy(),
            model[0].bias.detach().numpy(),
            model[0].weight.detach().numpy(),
        )
        assert local.exchanges == 4
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with LocalSteps(model, optimizer, steps=1):
        for step in range(3):
            model[0].bias.requires_grad_(step < 2)
            if step == 1:  # with a gradient of this rank's own, which the average takes in
                backward(model, optimizer, rank, step)
                model[0].bias.requires_grad_(False)
                before = model[0].bias.detach().clone()
                optimizer.step()
                settled = model[0].bias.detach().clone()
                found["taken in"] = not torch.equal(settled, before)
                continue
            backward(model, optimizer, rank, step)
            optimizer.step()
    ends = model[0].bias.detach().numpy(), model[0].weight.detach().numpy()
    found["in every step"] = settled.numpy(), *ends
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with LocalSteps(model, optimizer, steps=2):
            model[0].bias.requires_grad_(rank > 0)
            for step in range(2):
                backward(model, optimizer, rank, step)
                optimizer.step()
    except GradstatsError as error:
        found["one alone"] = (
            "frozen parameters" if "frozen parameters" in str(error) else str(error)
        )
    return found


def _each(cases):
    return {name: case() for name, case in cases.items()}


def two_ranks(rank, world, folder):
    """Return what every case for two ranks returned: processes take longer to start than these to run."""
    return _each(
        {
            "diloco": lambda: diloco_beside_its_loop(rank, world, 17),
            "ddp": lambda: [one_step_beside_ddp(rank, world, n) for n in ("SGD", "AdamW")],
            "otherwise": lambda: one_step_otherwise(rank, world),
            "counted": lambda: counted(rank, world),
            "mean": lambda: the_mean_of_the_parameters(rank, world),
            "not finite": lambda: not_finite(rank, world),
            "wrong": lambda: wrong(rank, world),
            "rolled back": lambda: rolled_back(rank, world),
            "frozen": lambda: frozen(rank, world),
            "not readable": lambda: not_readable(),
            **{p: lambda p=p: not_finite_for_a_while(rank, world, p) for p in ("skip", "zero")},
            **{f"learns, {n}": lambda n=n: learns(rank, world, n) for n in OPTIONS},
            **{f"resumes, {n}": lambda n=n: resumes(rank, world, n, folder) for n in RESUMED},
            **{
                f"captured, {n}": lambda n=n: captured(rank, world, f"{folder}/{n}.zarr", n)
                for n in CAPTURED
            },
        }
    )


def three_ranks(rank, world):
    """Return what every case for three ranks returned."""
    return _each(
        {
            **{a: lambda a=a: sparseloco_beside_its_formulas(rank, world, a) for a in AVERAGES},
            **{s: lambda s=s: norms(rank, world, s) for s in SHARED},
            "much": lambda: much(rank, world),
        }
    )
