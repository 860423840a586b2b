"""What the worker processes of test_layerwise.py run.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import copy

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers.hook import model
from workers.state import batch

from capture import Capture
from gradstats.compressors import LAGS, Layerwise, SparseCompressor, TopK, lags
from gradstats.hooks import CompressionState, compression_hook
from gradstats.hooks.systems import dgc, redsync

RATIO = 0.02


def top_k(name, numel):
    return TopK(0.1 if name == "4.weight" else RATIO)  # a ratio per layer


SYSTEMS = {
    "overlapped": lambda: Layerwise(top_k, merge=0),
    "merged": lambda: Layerwise(top_k, merge=20_000),
    "in line": lambda: Layerwise(top_k, overlap=False),
    "one message": lambda: Layerwise(top_k, merge=10**9),
}


def targets(x, world_ratio=RATIO):
    return max(1, round(world_ratio * x.size))


def keep_largest(x, k):
    """Return the k largest magnitudes of x and those tied with the last of them, zeros elsewhere."""
    least = np.sort(np.abs(x))[-k]
    return np.where(np.abs(x) >= least, x, np.float32(0))


def loss_of(net, x):
    return nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long())


def train(rank, world, name, steps=5):
    """Train layer by layer; compare with top-k of every layer by itself, and count what was conserved."""
    net = model()
    ddp = DDP(net, bucket_cap_mb=0.001)  # a bucket a parameter
    compressor = SYSTEMS[name]()
    push, on_the_way = compressor.push, []

    def spy(*delivery):
        on_the_way.append(len(compressor._futures))
        push(*delivery)

    compressor.push = spy
    state = CompressionState(compressor, named_parameters=net.named_parameters(), diagnose_every=2)
    ddp.register_comm_hook(state, compression_hook)
    residuals = {n: np.zeros(p.numel(), np.float32) for n, p in net.named_parameters()}
    worst, conserved, deltas = 0.0, True, []
    for step in range(steps):
        own = torch.autograd.grad(loss_of(net, batch(rank, step)), list(net.parameters()))
        ddp.zero_grad()
        loss_of(ddp, batch(rank, step)).backward()
        for (n, p), g in zip(net.named_parameters(), own, strict=True):
            corrected = residuals[n] + g.numpy().reshape(-1)
            sent = keep_largest(corrected, targets(corrected, 0.1 if n == "4.weight" else RATIO))
            residuals[n] = corrected - sent
            total = torch.from_numpy(sent.copy())
            exact = torch.from_numpy(corrected.copy())
            dist.all_reduce(total)
            dist.all_reduce(exact)
            worst = max(worst, float((p.grad.reshape(-1) - total / world).abs().max()))
            conserved &= np.allclose(state.residual(p).reshape(-1), residuals[n], atol=1e-7)
            if step == 2:
                missed = float((exact - total).double().square().sum())
                share = 1 - np.count_nonzero(sent) / corrected.size
                deltas.append(missed / share / float(exact.double().square().sum()))
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
        if step == 2:
            diagnosis = state.diagnosis
    return {
        "worst": worst,
        "conserved": bool(conserved),
        "parameters": torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy(),
        "on the way": on_the_way,
        "lanes": [(a.lane, a.layer, a.numel, a.start, a.end) for a in compressor.timeline],
        "last": state.last,
        "delta": (diagnosis.delta, np.array(deltas)),
        "diagnosis": diagnosis,
        "residual": float(np.sqrt(sum(np.square(r).sum() for r in residuals.values()))),
    }


def adapt(rank, world, steps=9):
    """Let LAGS measure and choose; then stop, and go on from its checkpoint."""
    net = model()
    ddp = DDP(net, bucket_cap_mb=0.001)
    compressor = LAGS(0.001, calibrate=3, merge=30_000)
    state = CompressionState(compressor, named_parameters=net.named_parameters())
    ddp.register_comm_hook(state, compression_hook)
    selected = []
    for step in range(steps):
        ddp.zero_grad()
        loss_of(ddp, batch(rank, step)).backward()
        selected.append((state.last.selected, state.last.target))
    again = LAGS(0.001)
    again.load_state_dict(state.compressor.state_dict())
    return compressor.ratios, compressor.deliveries, selected, again.ratios


def choose_twice(rank, world, steps=9):
    """Let LAGS send everything after its first measurement; return what the second one was made at, and chose."""
    choose, calls = lags.hiding_ratios, []

    def all_at_first(numel, *rest):
        calls.append(len(numel))
        return np.ones(len(numel)) if len(calls) == 1 else choose(numel, *rest)

    lags.hiding_ratios = all_at_first
    net = model()
    ddp = DDP(net, bucket_cap_mb=0.001)
    compressor = LAGS(0.001, calibrate=3, merge=30_000)
    state = CompressionState(compressor, named_parameters=net.named_parameters())
    ddp.register_comm_hook(state, compression_hook)
    for step in range(steps):
        loss_of(ddp, batch(rank, step)).backward()
    return [(d.sent, d.numel) for d in compressor.deliveries], len(calls), compressor.ratios


class Branches(nn.Module):
    """A model of which a rank uses one branch in some steps only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.shared, self.left, self.right = (
            nn.Linear(40, 200),
            nn.Linear(200, 3),
            nn.Linear(200, 3),
        )

    def forward(self, x, left=True):
        return (self.left if left else self.right)(torch.relu(self.shared(x)))


def realistic(rank, world, what, layerwise):
    """Train as people do; the update must be the mean of what naive references of all ranks send."""
    torch.manual_seed(0)
    net = Branches()
    dtype = torch.bfloat16 if what == "bfloat16 model" else torch.float32
    net.to(dtype)
    ddp = DDP(net, find_unused_parameters=what == "unused", bucket_cap_mb=0.001)
    compressor = Layerwise(lambda n, d: TopK(RATIO)) if layerwise else SparseCompressor(TopK(RATIO))
    state = CompressionState(compressor, named_parameters=net.named_parameters())
    ddp.register_comm_hook(state, compression_hook)
    groups = [{"params": net.shared.parameters(), "lr": 0.3}]
    groups += [{"params": [*net.left.parameters(), *net.right.parameters()], "lr": 0.01}]
    if what == "groups":
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    parts = 3 if what == "accumulation" else 1

    def loss(module, step, part):
        x = batch(rank, 10 * step + part).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
            left = (step + rank) % 2 == 0 if what == "unused" else True
            y = module(x, left)
        return nn.functional.cross_entropy(y.float(), (x.sum(1) > 0).long()) + (
            0 if what == "unused" else 0 * sum(p.float().sum() for p in module.parameters())
        )

    residual, worst = None, 0.0
    for step in range(6):
        twin = copy.deepcopy(net)
        for part in range(parts):
            loss(twin, step, part).backward()
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
        if what == "accumulation":
            with ddp.no_sync():
                for part in range(parts - 1):
                    loss(ddp, step, part).backward()
        loss(ddp, step, parts - 1).backward()
        flat = [g.float().numpy().reshape(-1) for g in own]
        if not layerwise:
            flat = [np.concatenate(flat)]
        residual = residual or [np.zeros_like(g) for g in flat]
        corrected = [r + g for r, g in zip(residual, flat, strict=True)]
        sent = [keep_largest(c, targets(c)) for c in corrected]
        residual = [c - s for c, s in zip(corrected, sent, strict=True)]
        total = torch.from_numpy(np.concatenate(sent))
        dist.all_reduce(total)
        got = torch.cat([p.grad.float().reshape(-1) for p in net.parameters()])
        worst = max(worst, float((got - total / world).abs().max() / total.abs().max()))
        optimizer.step()
        optimizer.zero_grad()
    return worst, torch.cat([p.detach().float().reshape(-1) for p in net.parameters()]).numpy()


def presets(rank, world, name):
    """Train with a whole system; report the loss, what travelled, and whether replicas agree."""
    net = model()
    ddp = DDP(net, bucket_cap_mb=0.001)
    if name == "dgc":
        state = dgc(net.named_parameters(), 0.01, momentum=0.5, clip=2.0, steps_per_epoch=2)
    else:
        state = redsync(
            net.named_parameters(),
            0.01,
            output_layer=["4.*"],
            quantise="quantised" in name,
            momentum=0.5,
            clip=2.0 if "clipped" in name else None,
            dense_steps=1,
            dense_below=500,
            search_above=50_000,
        )
    ddp.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    losses, records = [], []
    for step in range(30):
        optimizer.zero_grad()
        loss = loss_of(ddp, batch(rank, step % 3))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        records.append(state.last)
    return losses, records, torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy()


def rounded(rank, world, dtype, dense_above):
    """Return what one step of rounded values, or of a dense exchange, adds up to."""
    compressor = SparseCompressor(TopK(0.4), dtype, dense_above)
    rng = np.random.default_rng(rank)
    residual, report = torch.zeros(1000), []
    for step in range(3):
        x = torch.from_numpy(rng.standard_normal(1000).astype(np.float32))
        if step == 1:
            x[7] = 1e6  # beyond what float16 can hold
        corrected = x + residual
        total = corrected.clone()
        dist.all_reduce(total)
        done = compressor.reduce(corrected.clone(), None)
        left = done.residual.clone()
        dist.all_reduce(left)
        error = (world * done.mean.double() + left.double() - total.double()).abs().max()
        kept = keep_largest(corrected.numpy(), 400)
        fits = (kept != 0) & (np.abs(kept) < 6e4)
        worst = np.abs(1 - (corrected - done.residual).numpy()[fits] / kept[fits]).max()
        report.append(
            (float(error), float(worst), done.bytes_sent, done.union, done.mean.clone().numpy())
        )
        residual = done.residual
    return report


def captured(rank, world, path, name):
    """Capture a compressed run; report what the hook's state said after every step."""
    net = model()
    ddp = DDP(net, bucket_cap_mb=0.001)
    compressor = SYSTEMS["merged"]() if name == "layerwise" else SparseCompressor(TopK(RATIO))
    state = CompressionState(
        compressor, named_parameters=net.named_parameters(), diagnose_every=3, exclude=["4.bias"]
    )
    said = []
    with Capture(path, ddp, store="sketches") as capture:
        ddp.register_comm_hook(*capture.wrap(state, compression_hook))
        for step in range(5):
            ddp.zero_grad()
            loss_of(ddp, batch(rank, step)).backward()
            capture.step()
            said.append((state.last, state.diagnosis if step % 3 == 0 else None))
    return said
