"""Exchanges that are no optimizer's step: several into one gradient, and updates that nobody applies.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import contextlib
import copy
import io
import linecache
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import local_steps, sharded
from workers.trainings import refusal, same_on_all_ranks, wrapped

from capture import Capture
from gradstats.compressors import Layerwise, TopK, make_compressor
from gradstats.errors import GradstatsError
from gradstats.hooks import (
    AdamCorrection,
    CompressionState,
    ErrorFeedback,
    LocalSteps,
    MomentumCorrection,
    NoMemory,
    compression_hook,
    shard_hook,
)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(net, rank, step):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * rank + step))
    return nn.functional.cross_entropy(net(x), x[:, :4].argmax(1))


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def mean(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def whole(name, numel):
    return TopK(1.0)


TRAININGS = {
    "feedback": {"memory": ErrorFeedback()},
    "none": {"memory": NoMemory()},
    "momentum": {"memory": MomentumCorrection(0.9)},
    "nesterov": {"memory": MomentumCorrection(0.9, nesterov="dgc")},
    "some dense": {"memory": MomentumCorrection(0.9), "exclude": ["0.bias", "2.*"]},
    "weight decay": {"weight_decay": 0.1},
    "views": {"memory": MomentumCorrection(0.9), "ddp": {"gradient_as_bucket_view": True}},
    "unused": {"memory": MomentumCorrection(0.9), "ddp": {"find_unused_parameters": True}},
    "streams": {
        "memory": MomentumCorrection(0.9),
        "compressor": Layerwise(whole),
        "ddp": {"bucket_cap_mb": 1e-4},
    },
    "views that stream": {
        "memory": MomentumCorrection(0.9),
        "compressor": Layerwise(whole),
        "ddp": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True},
    },
}


def micro_steps(rank, world):
    """Largest difference from dense training of each way to accumulate, with an exchange in every micro-step."""
    found = {}
    for name, given in TRAININGS.items():
        for to_none in (True, False):
            options = {"compressor": TopK(1.0), **given}
            nets = [small(), small()]
            ddp, state = wrapped(nets[0], options.pop("compressor"), **options)
            memory = state.memory
            momentum = getattr(memory, "momentum", 0.0)
            nesterov = getattr(memory, "nesterov", None) is not None
            dense = torch.optim.SGD(
                nets[1].parameters(),
                0.1,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=given.get("weight_decay", 0.0),
            )
            twin, ours = DDP(nets[1]), torch.optim.SGD(nets[0].parameters(), 0.1)
            for step in range(3):
                for wrapping, optimizer in ((ddp, ours), (twin, dense)):
                    optimizer.zero_grad(set_to_none=to_none)
                    for part in range(2):
                        loss_of(wrapping, rank, 2 * step + part).backward()
                    optimizer.step()
            a, b = flat(nets[0].parameters()), flat(nets[1].parameters())
            found[name, to_none] = float((a - b).abs().max() / b.abs().max())
            assert same_on_all_ranks(nets[0].parameters())
    return found


def looked_at(rank, world):
    """The weights and the exchanges of trainings in which `autograd.grad` looks at the parameters, and does not."""
    found = {}
    for to_none in (True, False):
        for looks in (False, True):
            net = small()
            ddp, state = wrapped(net, TopK(0.1))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for step in range(12):
                optimizer.zero_grad(set_to_none=to_none)
                loss_of(ddp, rank, step).backward()
                if looks:
                    torch.autograd.grad(loss_of(net, rank, step), [*net.parameters()])
                if step % 4 < 3:  # else nobody applies it
                    optimizer.step()
            found[to_none, looks] = flat(net.parameters()), state.step
    return found


def micro_steps_of_adam(rank, world):
    """What a memory says that cannot take a step in parts; and whether it trains with one exchange a step."""
    net = small()
    ddp, _ = wrapped(net, TopK(0.1), memory=AdamCorrection())
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, rank, step).backward()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    after_a_step = refusal(lambda: loss_of(ddp, rank, 9).backward())
    return refusal(lambda: loss_of(ddp, rank, 9).backward()), after_a_step


def conserved(rank, world):
    """What error feedback loses of the mean gradient: two passes a step, a GAN, several losses, skips, SAM."""
    found = {}

    def training(net, **options):
        ddp, state = wrapped(net, TopK(0.25), **options)
        return ddp, state, torch.optim.SGD(net.parameters(), 0.05)

    def own(net, loss):
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return mean(flat(torch.autograd.grad(loss, list(net.parameters()), **options)))

    def lost(net, state, owed, applied):
        kept = mean(flat(state.residual(p) for p in net.parameters()))
        return float((owed - applied - kept).norm() / owed.norm())

    def grads(net):
        return flat(p.grad for p in net.parameters())

    net = small()
    ddp, state, optimizer = training(net)
    owed = applied = 0
    for step in range(10):
        optimizer.zero_grad()
        for part in range(2):
            loss = loss_of(ddp, rank, 2 * step + part)
            owed = owed + own(net, loss)
            loss.backward()
        applied = applied + grads(net)
        optimizer.step()
    found["two passes"] = lost(net, state, owed, applied)

    torch.manual_seed(rank)
    nets = [nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False)]
    for each in nets:
        for p in each.parameters():
            dist.broadcast(p.data, 0)
    (g, _, og), (d, state, od) = (training(net) for net in nets)
    owed = applied = 0
    for _ in range(20):
        x, z = torch.randn(16, 8) + 1, torch.randn(16, 8)
        od.zero_grad()
        loss = -d(x).sigmoid().log().mean() - (1 - d(g(z).detach()).sigmoid()).log().mean()
        owed = owed + own(nets[1], loss)
        loss.backward()
        applied = applied + grads(nets[1])
        od.step()
        og.zero_grad()
        (-d(g(z)).sigmoid().log().mean()).backward()
        og.step()
    state.discard()  # of the last pass through the discriminator
    found["gan"] = lost(nets[1], state, owed, applied)

    net = small()
    ddp, state, optimizer = training(net)
    owed = applied = 0
    for step in range(8):
        optimizer.zero_grad()
        spike = step in (3, 4)
        loss = loss_of(ddp, rank, step) * (1e4 if spike else 1)
        gradient = own(net, loss)
        loss.backward()
        if not spike:
            owed, applied = owed + gradient, applied + grads(net)
            optimizer.step()
    found["skipped"] = lost(net, state, owed, applied)

    net = small()
    ddp, state, optimizer = training(net)
    loss_of(ddp, rank, 99).backward()
    optimizer.step()  # so that it is known
    state.memory.residual.zero_()
    owed = applied = 0
    for step in range(8):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        with torch.no_grad():
            climbs = [0.05 * p.grad for p in net.parameters()]
            for p, climb in zip(net.parameters(), climbs, strict=True):
                p += climb
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, step)
        owed = owed + own(net, loss)
        loss.backward()
        applied = applied + grads(net)
        with torch.no_grad():
            for p, climb in zip(net.parameters(), climbs, strict=True):
                p -= climb
        optimizer.step()
    found["sam"] = lost(net, state, owed, applied)

    class Heads(nn.Module):
        """Two losses of one body, each in a pass and an exchange of its own."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.heads = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 4) for _ in "ab")

        def forward(self, x, head=0):
            return self.heads[head](self.body(x).relu())

    net, twin = Heads(), Heads()
    # small buckets: the first is of a head that the other pass did not use
    two = {"find_unused_parameters": True, "bucket_cap_mb": 1e-4}
    ddp, state, optimizer = training(net, ddp=two)
    owed = applied = 0
    for step in range(8):
        optimizer.zero_grad()
        # of a twin: to ask for gradients of the model itself would show its parameters to the state
        twin.load_state_dict(net.state_dict())
        for head in (0, 1):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(99 * rank + step))
            losses = [
                nn.functional.cross_entropy(each(x, head), x[:, :4].argmax(1))
                for each in (twin, ddp)
            ]
            owed = owed + own(twin, losses[0])
            losses[1].backward()
        applied = applied + grads(net)
        optimizer.step()
    found["two heads"] = lost(net, state, owed, applied) + abs(state.step - 16)

    net = small()
    ddp, state, optimizer = training(net, discard_unapplied=False)
    owed = applied = 0
    for step in range(8):
        parts = []
        for part in range(2):
            optimizer.zero_grad()
            loss = loss_of(ddp, rank, 2 * step + part)
            owed = owed + own(net, loss)
            loss.backward()
            parts.append([p.grad for p in net.parameters()])
        for p, *both in zip(net.parameters(), *parts, strict=True):
            p.grad = sum(both)
        applied = applied + grads(net)
        optimizer.step()
    found["several losses"] = lost(net, state, owed, applied)
    return found


def said_once(rank, world):
    """The warnings of a training that skips steps, and of one that does not."""
    messages = []
    for skips in (True, False):
        net = small()
        ddp, _ = wrapped(net, TopK(0.25))
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(9):
                optimizer.zero_grad()
                loss_of(ddp, rank, step).backward()
                if not skips or step % 2 == 0:
                    optimizer.step()
        messages.append([str(w.message) for w in caught if "discard" in str(w.message)])
    return messages


def what_is_lost(rank, world):
    """What is said of an update that another optimizer's zero_grad() throws away, and of one that nobody does."""
    messages = []
    for cut_off in (False, True):
        torch.manual_seed(0)
        net = nn.ModuleDict(
            {"body": nn.Linear(8, 16), "a": nn.Linear(16, 4), "b": nn.Linear(16, 4)}
        )

        class Both(nn.Module):
            def __init__(self, parts):
                super().__init__()
                self.parts = parts

            def forward(self, x, head, cut):
                hidden = self.parts["body"](x).relu()
                return self.parts[head](hidden.detach() if cut else hidden)

        both = Both(net)
        ddp, _ = wrapped(both, TopK(0.25), ddp={"find_unused_parameters": True})
        # the body is the second head's
        own = [*net["body"].parameters(), *net["b"].parameters()]
        first, second = torch.optim.SGD(net["a"].parameters(), 0.05), torch.optim.SGD(own, 0.05)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                x = torch.randn(16, 8, generator=torch.Generator().manual_seed(99 * rank + step))
                for head, optimizer, cut in (("a", first, cut_off), ("b", second, False)):
                    first.zero_grad()
                    second.zero_grad()
                    nn.functional.cross_entropy(ddp(x, head, cut), x[:, :4].argmax(1)).backward()
                    optimizer.step()
        said = [str(w.message) for w in caught]
        messages.append([text for text in said if "before its optimizer stepped" in text])
    return messages


class Turns(nn.Module):
    """Two parts, one of which is used at a time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x, which):
        return self.parts[which](x)


def turns(rank, world, view):
    """What is said where optimizers take turns, each zeroes its own part, and how much is neither applied nor kept."""
    net = Turns()
    ddp, state = wrapped(
        net, TopK(0.2), ddp={"find_unused_parameters": True, "gradient_as_bucket_view": view}
    )
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in net.parts]
    owed, applied = (torch.zeros_like(net.parts[0].weight) for _ in range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            which = step % 2
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(99 * rank + step))
            optimizers[which].zero_grad()
            ddp(x, which).square().mean().backward()
            if not which:
                weight = net.parts[0].weight.detach().clone().requires_grad_()
                output = nn.functional.linear(x, weight, net.parts[0].bias.detach())
                owed += torch.autograd.grad(output.square().mean(), weight)[0]
                applied += net.parts[0].weight.grad
            optimizers[which].step()
    missing = mean(owed - state.residual(net.parts[0].weight)) - applied
    return [str(w.message) for w in caught], float(missing.abs().max())


def scalers(rank, world):
    """What is said of scalers that a state was given, and was not, and of one that is switched off; and its NaN."""
    messages = []
    for given, enabled in ((True, True), (False, True), (False, False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
        net = small()
        ddp, _ = wrapped(net, TopK(0.2), scaler=scaler if given else None)
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(ddp, rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
        messages.append([str(w.message) for w in caught if "Scaler" in str(w.message)])
    # a scaler that is switched off skips no step: what is not finite must not be passed on
    off = torch.amp.GradScaler("cpu", enabled=False)
    net = small()
    ddp, _ = wrapped(net, TopK(0.2), scaler=off)
    loss = loss_of(ddp, rank, 0) * (float("nan") if rank else 1.0)
    return messages, refusal(loss.backward)


COMPRESSORS = {
    "topk": lambda: make_compressor("topk", 0.05),
    "warm-exact": lambda: make_compressor("warm-exact", 0.05),
    "sidco-e": lambda: make_compressor("sidco-e", 0.05),
    "dgc": lambda: make_compressor("dgc", 0.05),
    "micro": lambda: make_compressor("micro", 0.05),
    "cltk": lambda: make_compressor("cltk", 0.05),
    "randomk": lambda: make_compressor("randomk", 0.05),
    "redsync": lambda: make_compressor("redsync", 0.05),
    "redsync-quantised": lambda: make_compressor("redsync-quantised", 0.05),
    "ef-signsgd": lambda: make_compressor("ef-signsgd", 0.05),
    "ssdm": lambda: make_compressor("ssdm", 0.05),
    "marsit": lambda: make_compressor("marsit", 0.05),
    "layerwise": lambda: Layerwise(
        lambda name, numel: make_compressor("warm-exact", 0.05).selector
    ),
    "dense-bf16": lambda: make_compressor("dense-bf16", 0.05),
}
MEMORIES = {
    "usual": lambda: None,
    "momentum": lambda: MomentumCorrection(0.9),
    "adam": AdamCorrection,
}


def discarded(rank, world):
    """Of each compressor and memory: whether a step that is discarded leaves no bit anywhere, at any time."""
    same = {}
    for name, compressor in COMPRESSORS.items():
        for memory in (
            MEMORIES if name in ("topk", "layerwise", "redsync-quantised") else ("usual",)
        ):
            ends = []
            for discards in (False, True):
                net = small()
                ddp, state = wrapped(net, compressor(), memory=MEMORIES[memory](), dense_below=5)
                # buckets are rebuilt after the first backward pass, and their order is that of sums
                for step in range(6):
                    if discards and step in (0, 3, 4):
                        (1e3 * loss_of(ddp, rank, 50 + step)).backward()
                        net.zero_grad()
                        state.discard()
                        state.discard()  # once more does no harm
                    loss_of(ddp, rank, step).backward()
                    with torch.no_grad():
                        for p in net.parameters():
                            p -= 0.05 * p.grad
                    net.zero_grad()
                kept = [*state.memory.tensors().values(), *state.memory.dense_tensors().values()]
                end = [flat(net.parameters()), *(k.clone() for k in kept)]
                ends.append((end, state.step, state.last.step, state.memory.state_dict()))
            (a, *counts), (b, *also) = ends
            equal = all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
            same[name, memory] = equal and counts == also
    return same


def overflow_elsewhere(rank, world, fused, apart):
    """A scaler skips a step because one of two models overflows: parameters and memory of the other, and a twin's.

    With an optimizer of both models the twin lacks the step. With optimizers `apart` the scaler skips that of the model
    that overflows alone, and of the twin none overflows.
    """
    ends = []
    for overflows in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
        nets = [small(), small()]
        (one, state), (two, _) = (wrapped(net, TopK(0.2), scaler=scaler) for net in nets)
        of_each = [[*net.parameters()] for net in nets]
        parts = of_each if apart else [of_each[0] + of_each[1]]
        optimizers = [torch.optim.SGD(part, 0.05, fused=fused) for part in parts]
        for step in range(5):
            if step == 2 and not overflows and not apart:
                continue
            for optimizer in optimizers:
                optimizer.zero_grad()
            bad = float("inf") if step == 2 and overflows else 1.0
            loss = loss_of(one, rank, step) + bad * loss_of(two, rank, step)
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            if step == 2:
                state.state_dict()  # a checkpoint between two steps holds the right memory
        ends.append((flat(nets[0].parameters()), state.memory.residual.clone(), state.step))
    (a, b, c), (x, y, z) = ends
    return torch.equal(a, x), torch.equal(b, y), c == z


def shards(rank, world):
    """Micro-steps that exchange between replicas; an update that is taken back; one that no optimizer takes."""
    mesh = sharded.mesh_of(2, 2)

    def training(memory):
        model = sharded.shard(sharded.network(), mesh["shard"])
        hook = shard_hook(model, mesh["replicate"], lambda: TopK(1.0), memory)
        return model, hook, torch.optim.SGD(model.parameters(), 0.01)

    ends = []
    for every in (True, False):
        model, _, optimizer = training(lambda: MomentumCorrection(0.9))
        for step in range(4):
            optimizer.zero_grad()
            for part in range(3):
                model.set_requires_all_reduce(every or part == 2)
                sharded.loss_of(model, sharded.batch(step, rank, model, part)).backward()
            optimizer.step()
        ends.append(flat(sharded.gathered(model)))
    close = float((ends[0] - ends[1]).abs().max() / ends[1].abs().max())

    ends = []
    for way in ("never", "discard", "by itself"):
        model = sharded.shard(sharded.network(), mesh["shard"])
        hook = shard_hook(model, mesh["replicate"], lambda: TopK(0.1), ErrorFeedback)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(4):
            if step == 2 and way != "never":
                optimizer.zero_grad()
                (1e3 * sharded.loss_of(model, sharded.batch(50, rank, model))).backward()
                if way == "discard":
                    hook.discard()
            optimizer.zero_grad()
            sharded.loss_of(model, sharded.batch(step, rank, model)).backward()
            optimizer.step()
        kept = [s.memory.residual for s in hook.states.values() if s.step]
        ends.append((flat([*sharded.gathered(model), *kept]), hook.last.step))
    same = [torch.equal(e, ends[0][0]) and n == ends[0][1] for e, n in ends[1:]]
    return close, same, broken_off_shards(rank, mesh)


class Scale:
    """A loss scaler that is told what to do."""

    scale = 4.0

    def get_scale(self):
        return self.scale

    def get_backoff_factor(self):
        return 0.5


def broken_off_shards(rank, mesh):
    """Whether nothing is left of a step that a scaler skipped, or that failed, and of micro-steps that stopped."""
    scaler, same = Scale(), {}
    model = sharded.shard(sharded.network(), mesh["shard"])
    hook = shard_hook(model, mesh["replicate"], lambda: TopK(0.1), ErrorFeedback, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def backward(step):
        (scaler.scale * sharded.loss_of(model, sharded.batch(step, rank, model))).backward()

    def saved():
        return hook.state_dict()[f"rank{rank}"]["contents"]

    def fail(state, parameters, pairs):
        if state is hook.states["0"]:  # the last unit to come
            raise GradstatsError("before its exchange")

    backward(0)
    optimizer.step()
    optimizer.zero_grad()
    before = saved()
    backward(1)
    scaler.scale = 2.0
    same["skipped"] = saved() == before
    optimizer.zero_grad()
    backward(1)
    optimizer.step()
    optimizer.zero_grad()
    before = saved()
    hook.observers.append(fail)
    with contextlib.suppress(GradstatsError):
        backward(2)
    hook.observers.clear()
    model.reset_iter_state()
    optimizer.zero_grad()
    same["one left"] = hook.states["0"].step, hook.states["2"].step
    hook.discard()
    same["failed"] = saved() == before
    start = hook.state_dict()
    ends = []
    for way in ("never", "set to None", "zeroed", "discarded", "loaded"):
        hook.load_state_dict(start)
        optimizer.zero_grad()
        if way != "never":
            model.set_requires_all_reduce(False)
            backward(99)
            model.set_requires_all_reduce(True)
            optimizer.zero_grad(set_to_none=way == "set to None")
        if way == "discarded":
            hook.discard()
        elif way == "loaded":
            hook.load_state_dict(start)
        backward(2)
        ends.append([p.grad.to_local().clone() for p in model.parameters()])
    for each in ends[1:]:
        same[len(same)] = all(map(torch.equal, each, ends[0]))
    return same


def local(rank, world):
    """Local steps that go back to earlier parameters: whether all is then as it was, and where the ranks end."""
    found = []
    for delay in (0, 2):
        model = local_steps.net()
        optimizer = local_steps.adamw(model)
        local = LocalSteps(
            model, optimizer, steps=4, compressor=TopK(0.2), memory=ErrorFeedback(0.9), delay=delay
        )
        memory = local._fragments[0].state.memory
        with local:
            for step in range(5):
                local_steps.backward(model, optimizer, rank, step)
                optimizer.step()
            residual = None if delay else memory.tensors()["residual"].clone()
            good = [p.detach().clone() for p in model.parameters()]
            for step in range(5, 9):
                local_steps.backward(model, optimizer, rank, step)
                optimizer.step()
            with torch.no_grad():
                for p, kept in zip(model.parameters(), good, strict=True):
                    p.copy_(kept)
            local.discard()
            exchanges = local.exchanges
            back = delay or torch.equal(memory.tensors()["residual"], residual)
            together = same_on_all_ranks(model.parameters())
            for step in range(9, 14):
                local_steps.backward(model, optimizer, rank, step)
                optimizer.step()
        found.append((exchanges, bool(back), together, same_on_all_ranks(model.parameters())))
    return found


def within_a_closure(rank, world):
    """Exchanges within a closure that an optimizer calls are steps: nothing is discarded."""
    net = small()
    ddp, state = wrapped(net, TopK(0.25))
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, 0)
        loss.backward()
        return loss

    calls = 0
    for _ in range(3):
        with contextlib.suppress(GradstatsError):
            optimizer.step(closure)
        calls = state.step
    return calls, sum(s["func_evals"] for s in optimizer.state.values())


def adaptive(rank, world):
    """What is said of AdamW behind each memory, dense exchanges, local steps and no optimizer."""
    found = {}
    for name, compressor, memory in (
        ("feedback", TopK(0.1), None),
        ("momentum", TopK(0.1), MomentumCorrection(0.9)),
        ("adam", TopK(0.1), AdamCorrection()),
        ("none", TopK(0.1), NoMemory()),
        ("dense", make_compressor("dense-bf16"), None),
    ):
        net = small()
        ddp, _ = wrapped(net, compressor, memory=memory)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        found[name] = said(lambda: steps(ddp, optimizer, rank))  # noqa: B023
    net = small()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    with LocalSteps(net, optimizer, steps=2, compressor=TopK(0.1)):
        found["local"] = said(lambda: steps(net, optimizer, rank))
    ddp, _ = wrapped(small())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    found["sgd"] = said(lambda: steps(ddp, optimizer, rank))
    return found


def pointed_at(rank, world):
    """The lines that a state's and a capture's warnings point at, of a backward pass and a call."""
    net = small()
    ddp, _ = wrapped(net, TopK(0.1))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        steps(ddp, optimizer, rank)
        with Capture(f"{folder}/a.zarr", small()) as capture:
            capture.step()
    return [linecache.getline(w.filename, w.lineno).strip() for w in caught]


def steps(net, optimizer, rank):
    for step in range(4):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()


def said(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


def copied(rank, world):
    """Whether a state with a process group, copied in mid-training, goes on as the one it was copied from."""
    group = dist.new_group([0, 1])
    ends = []
    for copies in (False, True):
        net = small()
        ddp, state = wrapped(net, TopK(0.2), process_group=group, ddp={"process_group": group})
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        steps(ddp, optimizer, rank)
        other = copy.deepcopy(state) if copies else state
        same = other.process_group is group and other.memory is not state.memory
        kept = other.memory.residual.clone()
        steps(ddp, optimizer, rank)
        assert same == copies
        if copies:  # nothing of it has changed with the other
            assert torch.equal(kept, other.memory.residual)
            # and the whole model can be saved with the hook, where the group is the default one
            free, _ = wrapped(small(), TopK(0.2))
            steps(free, torch.optim.SGD(free.parameters(), 0.05), rank)
            torch.save(free, io.BytesIO())
            assert not torch.equal(kept, state.memory.residual)
        ends.append(flat(net.parameters()))
    return torch.equal(*ends)


def tied(rank, world):
    """Elements and names of a state that is given tied weights twice, for a whole model and layer by layer."""
    found = []
    for compressor in (TopK(0.1), Layerwise(lambda name, numel: TopK(0.1))):
        embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        head.weight = embedding.weight
        net = nn.Sequential(embedding, head)
        named = net.named_parameters(remove_duplicate=False)
        ddp = DDP(net)
        state = CompressionState(compressor, named_parameters=named)
        ddp.register_comm_hook(state, compression_hook)
        x = torch.arange(10)
        nn.functional.cross_entropy(ddp(x), x).backward()
        found.append((state.last.numel, state.last.selected, list(state.memory.residual.shape)))
    return found
