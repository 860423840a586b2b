"""What the worker processes of test_state.py run."""

import io
import itertools
import random

import numpy as np
import torch
import torch.distributed as dist
from support.checkpoints import resealed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers.hook import model

from gradstats.compressors import (
    LAGS,
    DenseCompressor,
    Layerwise,
    SparseCompressor,
    TopK,
    make_compressor,
    make_selector,
)
from gradstats.errors import InputError
from gradstats.hooks import (
    CompressionState,
    ErrorFeedback,
    MomentumCorrection,
    NoMemory,
    compression_hook,
    dgc_warm_up,
)

MEMORIES = {
    "none": NoMemory,
    "feedback": ErrorFeedback,
    "momentum": lambda: MomentumCorrection(0.9),
    "nesterov": lambda: MomentumCorrection(0.9, nesterov=True),
    "unmasked": lambda: MomentumCorrection(0.8, masking=False),
}


SYSTEMS = {
    "layerwise": lambda: Layerwise(lambda name, numel: make_selector("warm-exact", 0.01)),
    "lags": lambda: LAGS(0.01, adaptive=False),
    "bfloat16": lambda: SparseCompressor(make_selector("sidco-e", 0.01), torch.bfloat16),
    "redsync-quantised": lambda: make_compressor("redsync-quantised", 0.01),
    "micro-partitions": lambda: make_compressor("micro", 0.01),
}


def system(name):
    return SYSTEMS[name]() if name in SYSTEMS else make_selector(name, 0.01)


def batch(rank, step):
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(1000 * rank + step))


def backward(ddp, rank, step, scale=1.0):
    x = batch(rank, step)
    ddp.zero_grad()
    (scale * nn.functional.cross_entropy(ddp(x), (x.sum(1) > 0).long())).backward()


def flat_gradients(net):
    return np.concatenate([p.grad.numpy().reshape(-1) for p in net.parameters()])


def own_gradient(net, rank, step):
    """The gradient of this rank alone, as backpropagation leaves it."""
    x = batch(rank, step)
    loss = nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long())
    return np.concatenate(
        [g.numpy().reshape(-1) for g in torch.autograd.grad(loss, net.parameters())]
    )


class Reference:
    """Momentum correction in NumPy, line by line (DGC; RedSync algorithm 4 for Nesterov)."""

    def __init__(self, name, numel):
        self.name, self.u, self.v = name, np.zeros(numel, np.float32), np.zeros(numel, np.float32)

    def step(self, g, k):
        m = np.float32({"unmasked": 0.8}.get(self.name, 0.9))
        if self.name == "none":
            self.v = g.copy()
        elif self.name == "feedback":
            self.v = self.v + g
        elif self.name == "nesterov":
            self.u = (self.u + g) * m
            self.v = self.v + self.u + g
        else:
            self.u = g + m * self.u
            self.v = self.v + self.u
        kept = np.argsort(-np.abs(self.v), kind="stable")[:k]
        sent = np.zeros_like(self.v)
        sent[kept] = self.v[kept]
        self.v[kept] = 0
        if self.name != "unmasked":
            self.u[kept] = 0
        return sent


def memories(rank, world):
    """Return what :func:`remembered` does of every memory."""
    return {name: remembered(rank, world, name) for name in MEMORIES}


def remembered(rank, world, name):
    """Train with a memory; the update must be the mean of what naive references of all ranks send."""
    net = model()
    ddp = DDP(net, bucket_cap_mb=0.05)
    numel = sum(p.numel() for p in net.parameters())
    k = round(0.01 * numel)
    state = CompressionState(
        TopK(0.01), memory=MEMORIES[name](), named_parameters=net.named_parameters()
    )
    ddp.register_comm_hook(state, compression_hook)
    references = [Reference(name, numel) for _ in range(world)]
    worst = 0.0
    for step in range(8):
        expected = np.mean(
            [references[r].step(own_gradient(net, r, step), k) for r in range(world)], axis=0
        )
        if step == 5:  # what a capture would see is what is compressed
            pairs = [(p, torch.ones_like(p)) for p in net.parameters()]
            together = torch.zeros(numel)
            in_order = [p for p, _ in pairs]
            # what the last exchange left is of each parameter by itself
            assert not state.corrected_run(in_order, torch.ones(numel), together)
            state._setup.leftover.clear()  # as the next backward pass does, which finds no gradients
            previews = [state.corrected(*pair) for pair in pairs]
            run = state.corrected_run(in_order, torch.ones(numel), together)
            assert run == (name in ("none", "feedback"))
            assert torch.equal(together, torch.cat(previews) if run else torch.zeros(numel))
            # a gap, or another order
            assert not state.corrected_run([pairs[0][0], pairs[2][0]], together, together)
            assert not state.corrected_run([pairs[1][0], pairs[0][0]], together, together)
        backward(ddp, rank, step)
        got = flat_gradients(net)
        worst = max(worst, float(np.abs(got - expected).max() / np.abs(expected).max()))
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.05 * p.grad
    return worst, sum(p.numel() for p in previews), state.last


def policies(rank, world):
    """Small parameters and the output layer densely; the rest compressed."""
    net = model()
    ddp = DDP(net)
    state = CompressionState(
        TopK(0.01), named_parameters=net.named_parameters(), dense_below=500, exclude=["4.*"]
    )
    ddp.register_comm_hook(state, compression_hook)
    backward(ddp, rank, 0)
    means = np.mean([own_gradient(net, r, 0) for r in range(world)], axis=0)
    report, position = {}, 0
    for name, p in net.named_parameters():
        mean = means[position : position + p.numel()]
        position += p.numel()
        dense = np.allclose(p.grad.numpy().reshape(-1), mean, atol=1e-7)
        report[name] = (bool(dense), int(p.grad.count_nonzero()), state.residual(p) is None)
    return report, state.last


def warm_up(rank, world):
    """Three steps an epoch at 1, 0.25, 0.01; the first are dense and leave no residual."""
    net = model()
    ddp = DDP(net)
    state = CompressionState(
        TopK(0.5),
        named_parameters=net.named_parameters(),
        ratio_at=dgc_warm_up(3, (1.0, 0.25, 0.01)),
        diagnose_every=2,
    )
    ddp.register_comm_hook(state, compression_hook)
    selected, targets, dense_error = [], [], 0.0
    for step in range(10):
        backward(ddp, rank, step)
        if step < 3:
            mean = np.mean([own_gradient(net, r, step) for r in range(world)], axis=0)
            dense_error = max(dense_error, float(np.abs(flat_gradients(net) - mean).max()))
            assert not any(state.residual(p).any() for p in net.parameters())
        selected.append(state.last.selected / state.last.numel)
        if step % 2 == 0:
            targets.append(int(state.diagnosis.target.sum()) / state.last.target)
    return selected, dense_error, targets


def clipping(rank, world, scale):
    """Each rank's gradient has a norm of at most clip/√n, without a loss scale; weight decay comes on top."""
    net = model()
    ddp = DDP(net)
    state = CompressionState(
        DenseCompressor(),
        error_feedback=False,
        clip=0.01,
        weight_decay=0.1,
        scaler=torch.amp.GradScaler("cpu", init_scale=scale),
        named_parameters=net.named_parameters(),
    )
    ddp.register_comm_hook(state, compression_hook)
    backward(ddp, rank, 0, scale)
    weights = np.concatenate([p.detach().numpy().reshape(-1) for p in net.parameters()])
    clipped = []
    for r in range(world):
        g = own_gradient(net, r, 0)
        clipped.append(g * min(1.0, 0.01 / np.sqrt(world) / np.linalg.norm(g)))
    expected = np.mean(clipped, axis=0) + 0.1 * weights
    return float(np.abs(flat_gradients(net) / scale - expected).max())


def nonfinite(rank, world):
    """Return what :func:`damaged` does of every policy, parameter and system."""
    cases = itertools.product(("skip", "zero"), ("0.weight", "2.bias"), ("topk", "layerwise"))
    return {case: damaged(rank, world, *case) for case in cases}


def damaged(rank, world, policy, bad_parameter, name):
    """Rank 1 has infinities at step 2, in a compressed or a densely averaged parameter."""
    net = model()
    ddp = DDP(net, bucket_cap_mb=0.001)
    state = CompressionState(
        system(name), named_parameters=net.named_parameters(), dense_below=500, nonfinite=policy
    )

    def hook(
        state: CompressionState, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if rank == 1 and state.step == 2:
            for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if p is dict(net.named_parameters())[bad_parameter]:
                    g.view(-1)[3:5] = float("inf")
        return compression_hook(state, bucket)

    ddp.register_comm_hook(state, hook)
    report = []
    for step in range(4):
        before = [
            None if state.residual(p) is None else state.residual(p).clone()
            for p in net.parameters()
        ]
        backward(ddp, rank, step)
        after = [state.residual(p) for p in net.parameters()]
        untouched = all(
            a is None or (b is not None and torch.equal(a, b))
            for a, b in zip(after, before, strict=True)
        )
        g = flat_gradients(net)
        report.append(
            (state.last.problem, bool(np.isfinite(g).all()), float(np.abs(g).sum()), untouched)
        )
    return report, state.step


def resume_each(rank, world, names, folder):
    """Return what :func:`resume` does of every system."""
    return [resume(rank, world, name, f"{folder}/{name}") for name in names]


def resume(rank, world, name, folder):
    """Stop at a random step; torch.save and the distributed checkpoint both bring back every bit."""
    import torch.distributed.checkpoint as dcp

    def fresh():
        net = model()
        memory = MomentumCorrection(0.9, nesterov=True)
        state = CompressionState(
            system(name), memory=memory, named_parameters=net.named_parameters()
        )
        return net, state

    def run(net, state, steps):
        ddp = DDP(net, bucket_cap_mb=0.001)
        ddp.register_comm_hook(state, compression_hook)
        for step in steps:
            backward(ddp, rank, step)
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.05 * p.grad

    stop = random.Random(f"{name}").randrange(2, 9)
    straight = fresh()
    run(*straight, range(11))
    first = fresh()
    run(*first, range(stop))
    stream = io.BytesIO()
    torch.save({"model": first[0].state_dict(), "state": first[1].state_dict()}, stream)
    # one name on all ranks, as everybody writes it
    both = {"model": first[0].state_dict(), "compression": first[1].state_dict()}
    dcp.save(both, checkpoint_id=folder)
    same = []
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    for way in ("save", "checkpoint"):
        again = fresh()
        if way == "save":
            again[0].load_state_dict(saved["model"])
            again[1].load_state_dict(saved["state"])
        else:
            holder = {"model": again[0].state_dict(), "compression": again[1].state_dict()}
            dcp.load(holder, checkpoint_id=folder)
            again[0].load_state_dict(holder["model"])
            again[1].load_state_dict(holder["compression"])
        run(*again, range(stop, 11))
        same.append(
            all(
                torch.equal(a, b)
                for a, b in zip(straight[0].parameters(), again[0].parameters(), strict=True)
            )
        )
    own = saved["state"][f"rank{rank}"]
    messages = []
    for wrong in (
        resealed(rank, own, world_size=world + 1),
        {f"rank{rank + 1}": own},
        resealed(rank, own, system="Other"),
        resealed(rank, own, memory={}),
        resealed(rank, own, memory={k: {"x": torch.ones(1)} for k in own["memory"]}),
    ):
        try:
            target = fresh()[1]
            target.load_state_dict(wrong)
            target._setup.allocate(torch.device("cpu"))
        except InputError as error:
            messages.append(str(error))
        assert target.step == 0 or "another model" in messages[-1]
    return same, messages


def lost_rank(rank, world, name, folder):
    """The last rank dies in the middle of step 3; the others say so, soon, with their memory intact."""
    import os
    import pathlib
    import time

    from gradstats.errors import ExchangeError

    net = model()
    ddp = DDP(net, bucket_cap_mb=0.001)
    state = CompressionState(make_compressor(name, 0.01), named_parameters=net.named_parameters())

    def hook(
        state: CompressionState, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if rank == world - 1 and state.step == 3:
            os._exit(0)
        return compression_hook(state, bucket)

    ddp.register_comm_hook(state, hook)
    for step in range(3):
        backward(ddp, rank, step)
    before = [state.residual(p).clone() for p in net.parameters()]
    started = time.monotonic()
    try:
        backward(ddp, rank, 3)
    except ExchangeError as error:
        intact = all(
            torch.equal(a, state.residual(p)) for a, p in zip(before, net.parameters(), strict=True)
        )
        seconds = time.monotonic() - started
        line = f"{seconds:.0f} {intact} {state.step} {error}"
        pathlib.Path(folder, f"{rank}.txt").write_text(line)
    os._exit(0)  # the group is beyond a barrier
