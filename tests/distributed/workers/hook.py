"""What the worker processes of test_hooks.py and test_capture.py run.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradstats.collectives import SparseAllGather
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors import TopK, make_compressor
from gradstats.errors import NonFiniteGradientError
from gradstats.hooks import CompressionState, compression_hook
from gradstats.primitives import Selection


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3)
    )


def gather_cases(rank, world):
    """Ragged all-gathers against the dense mean: unequal, empty and full selections, duplicates."""
    numel = 1000
    gather = SparseAllGather()
    report = []
    for case in range(12):
        rng = np.random.default_rng([case, rank])
        count = [8, 0, 3, 25, 1000, 7, 0, 0, 1, 999, 30, 8][(case + rank) % 12]
        if case == 6:
            count = 0  # empty everywhere
        indices = torch.from_numpy(np.sort(rng.choice(numel, count, replace=False)))
        values = torch.from_numpy(rng.standard_normal(count).astype(np.float32))
        dense = torch.zeros(numel)
        dense[indices] = values
        dist.all_reduce(dense)
        got = gather([Selection(indices, values)], numel, flag=rank + case, expected=(8, 8))
        mean = torch.zeros(numel)
        for part in (part for each in got.selections for part in each):
            mean.index_add_(0, part.indices, part.values)
        mean /= world
        (own,) = got.selections[rank]
        report.append(
            {
                "error": float((mean - dense / world).abs().max()),
                "own": torch.equal(own.indices, indices) and torch.equal(own.values, values),
                "flags": got.flags,
                "messages": got.messages,
                "mean": mean.numpy(),
                "capacity": gather.words.capacity,
            }
        )
    return report


def wide_indices(rank, world):
    """Indices beyond 32 bits travel as 64-bit ones."""
    indices = torch.tensor([1, 2**31 + rank, 2**40])
    sent = Selection(indices, torch.arange(3.0))
    got = SparseAllGather()([sent], numel=2**41, expected=(2, 2))
    selections = [selection for (selection,) in got.selections]
    return [s.indices.tolist() for s in selections], [s.values.tolist() for s in selections]


class Ragged(TopK):
    """Exact top-k that keeps another share on every rank and in every step; now and then nothing at all."""

    def __init__(self, rank):
        super().__init__(0.01)
        self.rank, self.calls = rank, 0

    def select(self, gradient):
        self.calls += 1
        if (self.calls + self.rank) % 5 == 0:
            return Selection(gradient.new_empty(0).long(), gradient[:0], float("inf"))
        return TopK(0.002 * (1 + self.rank + self.calls % 3)).select(gradient)


def train(rank, world, steps, error_feedback, ragged, named):
    """Train through the hook; check the conservation law and the average at every step."""
    net = model()
    # a bucket cap of 50 kB makes several buckets, which DDP rebuilds after the first iteration
    ddp = DDP(net, bucket_cap_mb=0.05)
    compressor = Ragged(rank) if ragged else TopK(0.01)
    state = CompressionState(
        compressor,
        error_feedback=error_feedback,
        named_parameters=net.named_parameters() if named else None,
    )
    seen = {}
    original = compressor.select

    def spy(gradient):
        seen["corrected"] = gradient.clone()
        seen["message"] = original(gradient)
        return seen["message"]

    compressor.select = spy
    buckets = []

    def hook(
        state: CompressionState, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.index())
        for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
            seen[id(p)] = g.clone()
            old = state.residual(p)
            seen[id(p), "old"] = torch.zeros_like(g) if old is None else old.clone()
        return compression_hook(state, bucket)

    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    worst, conserved, empties = 0.0, True, 0
    for _ in range(steps):
        x = torch.randn(16, 40, generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), (x.sum(1) > 0).long()).backward()
        message = seen["message"]
        empties += message.indices.numel() == 0
        sent = torch.zeros_like(seen["corrected"])
        sent[message.indices] = message.values
        # sent + residual = gradient + old residual, to the last bit
        for p in net.parameters():
            slot = state._setup.layout.slots[id(p)]
            after = state.residual(p)
            total = sent[slot].view_as(p) + (torch.zeros_like(p) if after is None else after)
            if error_feedback:
                conserved &= torch.equal(total, seen[id(p)] + seen[id(p), "old"])
        dense = sent.clone()
        dist.all_reduce(dense)
        for p in net.parameters():
            expected = dense[state._setup.layout.slots[id(p)]].view_as(p) / world
            worst = max(worst, float((p.grad - expected).abs().max()))
        optimizer.step()
    parameters = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    return {
        "parameters": parameters.numpy(),
        "worst": worst,
        "conserved": bool(conserved),
        "empties": int(empties),
        "buckets": len(set(buckets)),
        "last": state.last,
        "steps": state.step,
    }


def resume(rank, world):
    """Stop at step 7, restore into a new DDP model, and go on: the same bits as never having stopped."""

    def run(net, state, optimizer, steps):
        ddp = DDP(net)
        ddp.register_comm_hook(state, compression_hook)
        for step in steps:
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * rank + step))
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()

    def fresh():
        net = model()
        state = CompressionState(TopK(0.01), named_parameters=net.named_parameters())
        return net, state, torch.optim.SGD(net.parameters(), lr=0.1)

    straight = fresh()
    run(*straight, range(15))
    first = fresh()
    run(*first, range(7))
    saved = first[1].state_dict()
    second = fresh()
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(saved)
    run(*second, range(7, 15))
    same = all(
        torch.equal(a, b)
        for a, b in zip(straight[0].parameters(), second[0].parameters(), strict=True)
    )
    residuals = all(
        torch.equal(straight[1].residual(a), second[1].residual(b))
        for a, b in zip(straight[0].parameters(), second[0].parameters(), strict=True)
    )
    other = nn.Linear(3, 3)
    stranger = CompressionState(TopK(0.01), named_parameters=other.named_parameters())
    message = ""
    try:
        stranger.load_state_dict(saved)  # at once: its parameters are known
    except Exception as error:
        message = str(error)
    names = sorted(saved[f"rank{rank}"]["memory"]["residual"])
    return same, residuals, names, message


def nonfinite(rank, world):
    """NaN on rank 1 at step 2: every rank raises the same error, and residuals are untouched."""
    net = model()
    ddp = DDP(net)
    state = CompressionState(TopK(0.01), named_parameters=net.named_parameters())
    ddp.register_comm_hook(state, compression_hook)
    for step in range(2):
        ddp(torch.randn(4, 40, generator=torch.Generator().manual_seed(step))).sum().backward()
    before = [state.residual(p).clone() for p in net.parameters()]
    x = torch.ones(4, 40)
    if rank == 1:
        x[0, 0] = float("nan")
    message = ""
    try:
        ddp(x).sum().backward()
    except NonFiniteGradientError as error:
        message = str(error)
    untouched = all(
        torch.equal(a, state.residual(p)) for a, p in zip(before, net.parameters(), strict=True)
    )
    return message, untouched, state.step


def refused_and_caught(rank, world, name, bad_steps, **options):
    """Train on after errors that are caught; return what was raised, the steps, and the parameters."""
    net = model()
    ddp = DDP(net, bucket_cap_mb=0.01, **options)
    state = CompressionState(make_compressor(name, 0.1), named_parameters=net.named_parameters())
    ddp.register_comm_hook(state, compression_hook)
    optimizer, raised = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(3):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(2 * step + rank))
        bad = x.clone()
        bad[0, 0] = float("nan") if rank == 1 else 0.0
        for batch in [bad] * bad_steps + [x]:
            optimizer.zero_grad()
            try:
                ddp(batch).square().sum().backward()
            except NonFiniteGradientError as error:
                raised.append(str(error))
            else:
                optimizer.step()
    return raised, state.step, torch.cat([p.detach().view(-1) for p in net.parameters()]).numpy()


def asked_futures(rank, world):
    """Whoever asks the futures of a refused step is told, as a Capture is."""
    net, asked = model(), []
    ddp = DDP(net)
    state = CompressionState(TopK(0.1), named_parameters=net.named_parameters())

    def hook(state, bucket):
        future = compression_hook(state, bucket)
        try:
            asked.append(torch.is_tensor(future.value()))
        except NonFiniteGradientError as error:
            asked.append(str(error))
        return future

    ddp.register_comm_hook(state, hook)
    raised = ""
    for value in (1.0, float("inf"), 1.0):
        try:
            ddp(torch.full((4, 40), value)).sum().backward()
        except NonFiniteGradientError as error:
            raised = str(error)
        net.zero_grad()
    return asked, raised


def capture_run(rank, world, path, kind, schedule, steps=8, accumulate=1, store="gradients"):
    """Train under DDP with a captured hook; return what the hook saw, to compare with the trace."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    from capture import Capture

    net = model()
    # PowerSGD's callbacks wait on gloo's threads: with several buckets in flight they all block each other.
    ddp = DDP(net, bucket_cap_mb=25 if kind == "powersgd" else 0.05)
    state, hook = None, default_hooks.allreduce_hook
    if kind == "topk":
        state = CompressionState(TopK(0.01), named_parameters=net.named_parameters())
        hook = compression_hook
    elif kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        hook = powerSGD_hook.powerSGD_hook
    offsets, position = {}, 0
    for name, p in net.named_parameters():
        offsets[id(p)] = (name, position)
        position += p.numel()
    seen, calls = [], [0]

    def spy(inner: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            seen.append(np.zeros(position, np.float32))
        calls[0] += 1
        for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = offsets[id(p)][1]
            seen[-1][start : start + p.numel()] = g.reshape(-1).numpy()
        return hook(inner, bucket)

    capture = Capture(
        path, ddp, schedule, store=store, total_steps=steps, metadata={"model": "mlp"}
    )
    ddp.register_comm_hook(*capture.wrap(state, spy))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            x = torch.randn(
                16, 40, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            )
            sync = micro == accumulate - 1
            context = torch.enable_grad() if sync else ddp.no_sync()
            with context:
                loss = nn.functional.cross_entropy(ddp(x), (x.sum(1) > 0).long())
                loss.backward()
        capture.step(loss=loss, learning_rate=0.05)
        losses.append(loss.item())
        optimizer.step()
    capture.close()
    return {"seen": seen, "losses": losses, "buckets": calls[0] / steps}


def create_conflict(rank, world, path):
    from capture import Capture

    try:
        Capture(path, model())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def live_thresholds(rank, world, folder, names, steps):
    """Train with one compressor after another, every step captured."""
    from capture import Capture
    from gradstats.compressors import make_selector

    for name in names:
        net = model()
        ddp = DDP(net)
        state = CompressionState(make_selector(name, 0.01), named_parameters=net.named_parameters())
        with Capture(f"{folder}/{name}.zarr", ddp, buffers=steps) as capture:
            ddp.register_comm_hook(*capture.wrap(state, compression_hook))
            for step in range(steps):
                ddp.zero_grad()
                x = torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * step + rank))
                nn.functional.cross_entropy(ddp(x), (x.sum(1) > 0).long()).backward()
                capture.step()
                with torch.no_grad():
                    for p in net.parameters():
                        p -= 0.1 * p.grad


def updates(rank, world):
    """Return how often a kept update differed from a naive mean, in values and in positions counted."""
    generator, update, wrong = np.random.default_rng(7), SparseUpdate(), []
    for numel, counts in (
        (500, (3, 4)),
        (500, (0, 0)),
        (500, (200, 90)),
        (500, (2, 5)),
        (90, (4, 1)),
    ):
        update.begin(torch.zeros(numel))
        total, seen = torch.zeros(numel), set()
        for count in counts:
            positions = np.sort(generator.choice(numel, count, replace=False))
            values = torch.from_numpy(generator.standard_normal(count).astype(np.float32))
            update.add([Selection(torch.from_numpy(positions), values)])
            for i, v in zip(positions.tolist(), values, strict=True):
                total[i] += v
                seen.add(i)
        if update.divide(3) != len(seen) or not torch.equal(update.vector, total / 3):
            wrong.append((numel, counts))
    return wrong
