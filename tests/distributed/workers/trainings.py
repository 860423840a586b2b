"""Ordinary trainings with the compression hook, each against what dense DDP or one process would do.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import copy
import warnings

import torch
import torch.distributed as dist
from support.checkpoints import resealed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from workers.hook import model

from gradstats.compressors import LAGS, Layerwise, MiCRO, TopK, make_compressor
from gradstats.hooks import (
    CompressionState,
    ErrorFeedback,
    MomentumCorrection,
    compression_hook,
    dgc_warm_up,
)


def wrapped(net, compressor=None, *, ddp=None, **options):
    """Return a DDP model with the hook, and the hook's state."""
    wrapping = DDP(net, **(ddp or {}))
    rule = TopK(0.05) if compressor is None else compressor
    state = CompressionState(rule, named_parameters=net.named_parameters(), **options)
    wrapping.register_comm_hook(state, compression_hook)
    return wrapping, state


def inputs(rank, step, shape=(16, 40)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(net, rank, step):
    x = inputs(rank, step)
    return nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long())


def same_on_all_ranks(tensors):
    """Whether all ranks hold the same bits."""
    flat = torch.cat(
        [torch.view_as_real(t).flatten() if t.is_complex() else t.flatten() for t in tensors]
    )
    flat = flat.detach().double()
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    return all(torch.equal(each, flat) for each in gathered)


def refusal(call):
    """Return the message of the error that a call raises, and its type's name."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def scaled(rank, world, hook, scale, growth):
    """Train with a loss scaler; return scales, parameters, and the residual."""
    net = model()
    ddp = DDP(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)
    state = None
    if hook == "dense":
        ddp.register_comm_hook(None, allreduce_hook)
    else:
        state = CompressionState(TopK(0.05), named_parameters=net.named_parameters(), scaler=scaler)
        ddp.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    scales, untouched = [], []
    for step in range(12):
        optimizer.zero_grad()
        before = None
        if state is not None and state.step:
            before = {k: t.clone() for k, t in state.memory.tensors().items()}
        scaler.scale(1000 * loss_of(ddp, rank, step)).backward()
        if before is not None and state.last.problem:
            now = state.memory.tensors()
            untouched.append(all(torch.equal(before[k], now[k]) for k in before))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    residual = None if state is None else state.memory.residual.numpy()
    return scales, flat.numpy(), residual, untouched, same_on_all_ranks(net.parameters())


def hidden_overflow(rank, world):
    """Eight steps that a policy hides are worth a warning."""
    net = model()
    ddp, _ = wrapped(net, nonfinite="skip")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            (loss_of(ddp, rank, step) * float("inf")).backward()
    return [str(w.message) for w in caught if "not finite in 8 steps" in str(w.message)]


class Complex(nn.Module):
    """A complex layer between real ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(40, 5, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


def complex_parameters(rank, world, ratio):
    """Whether replicas stay together, and at ratio 1 train as dense DDP does."""
    nets = [Complex(), Complex()]
    ddp, _ = wrapped(nets[0], TopK(ratio))
    dense = DDP(nets[1])
    for step in range(5):
        for wrapping, net in ((ddp, nets[0]), (dense, nets[1])):
            net.zero_grad()
            wrapping(inputs(rank, step)).square().mean().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.05 * p.grad
    close = all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    )
    return same_on_all_ranks(nets[0].parameters()), close


class Words(nn.Module):
    """An embedding with sparse gradients, and a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(50, 4, sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.words(x).mean(1))


def sparse_embedding(rank, world, exclude):
    """The embedding is averaged exactly; the rest is compressed."""
    net, dense = Words(), Words()
    ddp, state = wrapped(net, TopK(0.3), exclude=exclude)
    reference = DDP(dense)
    agree = []
    for step in range(4):
        x = torch.randint(0, 50, (8, 3), generator=torch.Generator().manual_seed(10 * step + rank))
        for wrapping in (ddp, reference):
            wrapping.zero_grad()
            wrapping(x).square().sum().backward()
        agree.append(
            torch.allclose(net.words.weight.grad.to_dense(), dense.words.weight.grad.to_dense())
        )
        with torch.no_grad():
            for p in dense.parameters():  # keep both at the same point
                p.grad = None
    streaming = CompressionState(
        Layerwise(lambda n, d: TopK(0.1)), named_parameters=Words().named_parameters()
    )
    other = Words()
    streams = DDP(other)
    streaming = CompressionState(
        Layerwise(lambda n, d: TopK(0.1)), named_parameters=other.named_parameters()
    )
    streams.register_comm_hook(streaming, compression_hook)
    message = refusal(lambda: streams(torch.zeros(2, 3, dtype=torch.long)).sum().backward())
    return agree, state._setup.layout.names, message, state.last.bytes_sent


def other_dtype(rank, world, name, dtype):
    """One step of a large parameter in another dtype; the residual's dtype, and what was sent plus what was kept."""
    dtype = getattr(torch, dtype)
    torch.manual_seed(0)
    net = nn.Linear(1100, 1000, bias=False).to(dtype)  # above 2**20 elements
    ddp, state = wrapped(net, make_compressor(name, 0.001))
    reference = copy.deepcopy(net)
    x = inputs(rank, 0, (4, 1100)).to(dtype)
    ddp(x).float().square().mean().backward()
    reference(x).float().square().mean().backward()
    own = reference.weight.grad.double()
    kept = state.residual(net.weight)
    total = net.weight.grad.double() * world
    dist.all_reduce(own)
    if kept is not None:
        kept = kept.double()
        dist.all_reduce(kept)
        total = total + kept
    error = float((total - own).abs().max() / own.abs().max())
    return error, str(state.memory.corrected.dtype), same_on_all_ranks([net.weight.grad])


def default_dtype(rank, world, dtype):
    """Memories do not follow the default dtype."""
    net = model()
    x = inputs(rank, 0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        ddp, state = wrapped(net)
        loss = ddp(x).square().mean()
        loss.backward()
        return str(state.memory.residual.dtype)
    finally:
        torch.set_default_dtype(torch.float32)


def memory_formats(rank, world):
    """What is sent, kept and decayed lies at its own element, whatever the memory format."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3)).to(
        memory_format=torch.channels_last
    )
    alone = copy.deepcopy(net)
    ddp, state = wrapped(net, TopK(0.2), weight_decay=0.1)
    x = inputs(rank, 0, (2, 3, 9, 9)).to(memory_format=torch.channels_last)
    ddp(x).square().mean().backward()
    alone(x).square().mean().backward()
    errors = []
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        expected = q.grad + 0.1 * q.detach()
        kept = state.residual(p).clone()
        dist.all_reduce(expected)
        dist.all_reduce(kept)
        errors.append(float((p.grad * world + kept - expected).abs().max()))
    strided = any(not p.is_contiguous() for p in net.parameters())
    return errors, strided


class Heads(nn.Module):
    """Two heads, one of which is used in each step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(40, 20)
        self.heads = nn.ModuleList(nn.Linear(20, 3) for _ in range(2))

    def forward(self, x, which):
        return self.heads[which](self.body(x))


def unused(rank, world, memory, view):
    """All that backpropagation gave is applied or kept, when parameters are not used by any rank in some steps.

    Beside it, of the parameters that no rank used: which tensors of their memory changed, and
    which stayed.
    """
    net = Heads()
    ddp = DDP(net, find_unused_parameters=True, gradient_as_bucket_view=view)
    # with a momentum the heads' biases are averaged densely: that memory is another one
    keep, below = ErrorFeedback(), 0
    if memory == "momentum":
        keep, below = MomentumCorrection(0.5, masking=False), 4
    state = CompressionState(
        TopK(0.1), memory=keep, named_parameters=net.named_parameters(), dense_below=below
    )
    ddp.register_comm_hook(state, compression_hook)
    given = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    applied = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    changed, stayed = set(), set()
    for step in range(8):
        net.zero_grad()
        alone = copy.deepcopy(net)
        alone(inputs(rank, step), step % 2).square().mean().backward()
        before = remembered(state)
        ddp(inputs(rank, step), step % 2).square().mean().backward()
        for (kind, name), values in remembered(state).items():
            # nobody can tell whether zeros stayed
            if name.startswith(f"heads.{1 - step % 2}.") and before[kind, name].any():
                same = torch.equal(values, before[kind, name])
                (stayed if same else changed).add((kind, name))
        for (n, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
            if q.grad is not None:
                given[n] += q.grad
            if p.grad is not None:
                applied[n] += p.grad
    lost = {}
    for name, p in net.named_parameters():
        total = given[name]
        kept = state.residual(p)
        if kept is None:
            continue
        rest = kept.clone()
        dist.all_reduce(total)
        dist.all_reduce(rest)
        lost[name] = float((applied[name] * world + rest - total).abs().max())
    return lost, changed, stayed


def remembered(state):
    """What a state remembers, compressed or densely averaged, by kind and parameter."""
    content = state.content()
    return {
        (f"{part} {kind}", name): values
        for part in ("memory", "dense_memory")
        for kind, tensors in content[part].items()
        for name, values in tensors.items()
    }


def two_models(rank, world):
    """One state on two models is refused in the first step."""
    nets = [nn.Linear(4, 2), nn.Linear(4, 3)]
    named = [(f"{i}.{n}", p) for i, net in enumerate(nets) for n, p in net.named_parameters()]
    state = CompressionState(TopK(0.5), named_parameters=named)
    messages = []
    for net in nets:
        ddp = DDP(net)
        ddp.register_comm_hook(state, compression_hook)
        messages.append(refusal(lambda ddp=ddp: ddp(torch.ones(2, 4)).sum().backward()))
    return messages


def own_errors(rank, world):
    """An error of the compressor's own is not a lost rank."""

    class Broken(TopK):
        def select(self, gradient):
            raise RuntimeError("out of paper")

    ddp, _ = wrapped(model(), Broken(0.1))
    return refusal(lambda: loss_of(ddp, rank, 0).backward())


def different_steps(rank, world):
    """Checkpoints of different steps are refused on all ranks."""
    first, state = wrapped(model())
    loss_of(first, rank, 0).backward()
    saved = state.state_dict()
    saved = resealed(rank, saved[f"rank{rank}"], step=1 + rank)
    second, other = wrapped(model())
    other.load_state_dict(saved)
    return refusal(lambda: loss_of(second, rank, 1).backward())


def after_the_group(rank, world):
    """A state is saved with its ranks after the process group is gone."""
    ddp, state = wrapped(model())
    loss_of(ddp, rank, 0).backward()
    return state


def nothing_compressed(rank, world):
    ddp, state = wrapped(model(), dense_below=10**9, diagnose_every=1)
    loss_of(ddp, rank, 0).backward()
    return state.diagnosis, state.last.numel, same_on_all_ranks([p.grad for p in ddp.parameters()])


def clipped_half(rank, world):
    """A norm above 65,504 of a float16 gradient is a number."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64, bias=False).half()
    ddp, state = wrapped(net, TopK(1.0), clip=1.0)
    ddp(torch.full((8, 64), 40.0).half()).float().sum().mul(60).backward()
    return float(net.weight.grad.float().norm()), state.last.problem


def schedule(rank, world, name):
    """The selected counts of a scheduled ratio, by step."""
    ddp, state = wrapped(
        model(), make_compressor(name, 0.001), ratio_at=dgc_warm_up(2, (0.2, 0.05, 0.01))
    )
    counts = []
    for step in range(6):
        loss_of(ddp, rank, step).backward()
        counts.append(state.last.selected)
    return counts, sum(p.numel() for p in ddp.parameters())


def lags_resumes(rank, world):
    """Ratios that LAGS chose survive a checkpoint under a schedule."""

    def fresh():
        net = model()
        compressor = LAGS(0.001, calibrate=2)
        ddp, state = wrapped(
            net, compressor, ddp={"bucket_cap_mb": 0.05}, ratio_at=dgc_warm_up(1, (0.02, 0.01))
        )
        return ddp, state

    ddp, state = fresh()
    for step in range(16):
        loss_of(ddp, rank, step).backward()
    chosen = dict(state.compressor.ratios)
    again, other = fresh()
    other.load_state_dict(state.state_dict())
    loss_of(again, rank, 16).backward()
    return bool(chosen), other.compressor.ratios == chosen


TRAININGS = {
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "bucket_cap": {"bucket_cap_mb": 0.05},
}


def variant(rank, world, name, streams):
    """A DDP option leaves the training as it is without it: the parameters, bit for bit."""
    results = []
    for options in ({}, TRAININGS[name]):
        net = model()
        rule = Layerwise(lambda n, d: TopK(0.05)) if streams else TopK(0.05)
        ddp, _ = wrapped(net, rule, ddp=options)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    return torch.equal(*results), same_on_all_ranks(net.parameters())


def groups(rank, world):
    """Two process groups, each with its own average; two models in one process with a state each."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    torch.manual_seed(0)
    nets = [model(), nn.Linear(40, 2)]
    ddps = []
    for net in nets:
        ddp = DDP(net, process_group=group)
        state = CompressionState(
            TopK(0.05), named_parameters=net.named_parameters(), process_group=group
        )
        ddp.register_comm_hook(state, compression_hook)
        ddps.append(ddp)
    for step in range(3):
        for ddp in ddps:
            ddp.zero_grad()
            ddp(inputs(rank, step)).square().mean().backward()
            with torch.no_grad():
                for p in ddp.parameters():
                    p -= 0.1 * p.grad
    return [torch.cat([p.detach().flatten() for p in net.parameters()]).numpy() for net in nets]


def frozen(rank, world):
    """A parameter frozen when DDP wraps the model; one unfrozen afterwards is not DDP's; a new wrap takes it."""
    net = model()
    net[0].weight.requires_grad_(False)
    ddp, state = wrapped(net)
    loss_of(ddp, rank, 0).backward()
    first = state._setup.layout.numel
    del ddp
    net[0].weight.requires_grad_(True)
    ddp, state = wrapped(net)
    net.zero_grad()
    loss_of(ddp, rank, 1).backward()
    late = model()
    stale = CompressionState(TopK(0.1), named_parameters=late.named_parameters())
    late[0].weight.requires_grad_(False)
    ddp = DDP(late)
    ddp.register_comm_hook(stale, compression_hook)
    message = refusal(lambda: loss_of(ddp, rank, 0).backward())
    return (
        first,
        state._setup.layout.numel,
        same_on_all_ranks([p.grad for p in net.parameters()]),
        message,
    )


def zero_redundancy(rank, world):
    """A sharded optimizer trains as a plain one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, about itself
        from torch.distributed.optim import ZeroRedundancyOptimizer
    results = []
    for sharded in (False, True):
        net = model()
        ddp, _ = wrapped(net)
        if sharded:
            optimizer = ZeroRedundancyOptimizer(
                net.parameters(), optimizer_class=torch.optim.SGD, lr=0.1
            )
        else:
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    return torch.equal(*results)


def uneven(rank, world):
    """Ranks with more batches than others, under DDP's Join: all end, with the same parameters."""
    net = model()
    ddp, state = wrapped(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    steps = 0
    with Join([ddp]):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()
            steps += 1
    return steps, state.step, same_on_all_ranks(net.parameters())


def accumulated(rank, world):
    """Accumulation under no_sync around forward and backward: one exchange, of the sum."""
    net = model()
    ddp, state = wrapped(net, TopK(1.0))
    alone = copy.deepcopy(net)
    with ddp.no_sync():
        loss_of(ddp, rank, 0).backward()
    loss_of(ddp, rank, 1).backward()
    (loss_of(alone, rank, 0) + loss_of(alone, rank, 1)).backward()
    error = 0.0
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        expected = q.grad.clone()
        dist.all_reduce(expected)
        error = max(error, float((p.grad * world - expected).abs().max()))
    return state.step, error


def micro_in_double(rank, world):
    """MiCRO on float64: the union is averaged, and residuals are zero there."""
    net = model().double()
    ddp, state = wrapped(net, MiCRO(0.01))
    alone = copy.deepcopy(net)
    x = inputs(rank, 0).double()
    ddp(x).square().mean().backward()
    alone(x).square().mean().backward()
    own = torch.cat([p.grad.flatten() for p in alone.parameters()])
    mean = torch.cat([p.grad.flatten() for p in net.parameters()])
    total, kept = own.clone(), state.memory.residual.clone()
    dist.all_reduce(total)
    dist.all_reduce(kept)
    return float((mean * world + kept - total).abs().max() / total.abs().max()), state.last.union


def python_reducer(rank, world):
    _, state = wrapped(model())
    return refusal(lambda: compression_hook(state, (torch.zeros(3),)))


def sparse_checkpoint(rank, world, folder):
    """A model with a sparse embedding resumes through the distributed checkpoint."""
    import torch.distributed.checkpoint as dcp

    def fresh():
        net = Words()
        ddp, state = wrapped(net, TopK(0.3))
        return net, ddp, state

    def run(ddp, steps):
        for step in steps:
            x = torch.randint(0, 50, (8, 3), generator=torch.Generator().manual_seed(step))
            ddp.zero_grad()
            ddp(x).square().sum().backward()

    net, ddp, state = fresh()
    run(ddp, range(3))
    dcp.save({"compression": state.state_dict()}, checkpoint_id=folder)
    other, again, resumed = fresh()
    holder = {"compression": resumed.state_dict()}
    dcp.load(holder, checkpoint_id=folder)
    resumed.load_state_dict(holder["compression"])
    run(ddp, [3])
    run(again, [3])
    return [
        torch.equal(
            p.grad.to_dense() if p.grad.is_sparse else p.grad,
            q.grad.to_dense() if q.grad.is_sparse else q.grad,
        )
        for p, q in zip(net.parameters(), other.parameters(), strict=True)
    ]


def groups_in_one_checkpoint(rank, world, folder):
    """Each rank trains in a group of its own, and all save into one checkpoint; whether each gets its own back."""
    import torch.distributed.checkpoint as dcp

    groups = [dist.new_group([r]) for r in range(world)]

    def fresh():
        net = model()
        named = net.named_parameters()
        state = CompressionState(TopK(0.1), named_parameters=named, process_group=groups[rank])
        ddp = DDP(net, process_group=groups[rank])
        ddp.register_comm_hook(state, compression_hook)
        return net, ddp, state

    net, ddp, state = fresh()
    loss_of(ddp, rank, 0).backward()
    dcp.save({"compression": state.state_dict()}, checkpoint_id=folder)
    other, again, resumed = fresh()
    holder = {"compression": resumed.state_dict()}
    dcp.load(holder, checkpoint_id=folder)
    resumed.load_state_dict(holder["compression"])
    for each in (ddp, again):
        each.zero_grad()
        loss_of(each, rank, 1).backward()
    return [
        torch.equal(p.grad, q.grad)
        for p, q in zip(net.parameters(), other.parameters(), strict=True)
    ]


def checkpoints(rank, world, folder):
    """Return what both of these did."""
    return (
        sparse_checkpoint(rank, world, f"{folder}/sparse"),
        groups_in_one_checkpoint(rank, world, f"{folder}/groups"),
    )


def sparse_nonfinite(rank, world, policy):
    """NaN in a sparse gradient is handled by the policy."""
    net = Words()
    ddp, state = wrapped(net, TopK(0.3), nonfinite=policy)
    net.words.weight.register_hook(
        lambda g: torch.sparse_coo_tensor(
            g._indices(), g._values() * (float("nan") if rank == 1 else 1), g.shape
        )
    )
    message = refusal(lambda: ddp(torch.ones(2, 3, dtype=torch.long)).square().sum().backward())
    grad = net.words.weight.grad
    finite = grad is not None and bool(torch.isfinite(grad.to_dense()).all())
    problem = state.last.problem if state.last else ""
    return message, finite, problem


def clipped_zero(rank, world, bad):
    """Clipping is to the norm of what is left after bad elements became zero."""
    net = nn.Linear(4, 1, bias=False)
    ddp, _ = wrapped(net, TopK(1.0), clip=0.5, nonfinite="zero")
    net.weight.register_hook(lambda g: torch.tensor([[100.0, 200.0, 300.0, bad]]))
    ddp(torch.ones(1, 4)).sum().backward()
    return float(net.weight.grad.norm())


def half_overflow(rank, world, scale):
    """A mean that is too large for float16, with its loss scale, is refused, and stays in the residual."""
    net, scaler = nn.Linear(2, 1, bias=False).half(), torch.amp.GradScaler("cpu", init_scale=scale)
    ddp, state = wrapped(net, TopK(0.5), nonfinite="skip", scaler=scaler)
    net.weight.register_hook(lambda g: torch.tensor([[60_000.0, 39_000.0]]).half())
    seen = []
    for _ in range(2):
        net.zero_grad()
        ddp(torch.ones(1, 2).half()).sum().backward()
        seen.append((net.weight.grad.flatten().tolist(), state.last.problem != ""))
    kept = state.memory.residual.tolist()
    ddp, state = wrapped(net, make_compressor("warm-exact", 0.5), nonfinite="raise", scaler=scaler)
    net.zero_grad()
    ddp(torch.ones(1, 2).half()).sum().backward()
    net.zero_grad()
    before = repr(state.compressor.state_dict())
    message = refusal(lambda: ddp(torch.ones(1, 2).half()).sum().backward())
    same = repr(state.compressor.state_dict()) == before
    return seen, kept, (message, net.weight.grad.flatten().tolist(), same)


def dense_momentum(rank, world):
    """A dense step with momentum correction is a step of momentum SGD."""
    net = nn.Linear(1, 1, bias=False)
    ddp, _ = wrapped(net, TopK(1.0), memory=MomentumCorrection(0.9), ratio_at=lambda step: 1.0)
    updates = []
    for _ in range(4):
        net.zero_grad()
        ddp(torch.ones(1, 1)).sum().backward()
        updates.append(float(net.weight.grad))
    return updates
