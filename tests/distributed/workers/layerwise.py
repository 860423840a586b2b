"""What the worker processes of test_layerwise.py run.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import copy
import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers.hook import model
from workers.state import batch

from capture import Capture
from gradstats.compressors import LAGS, Layerwise, SparseCompressor, TopK, calibration
from gradstats.compressors.hiding import Costs
from gradstats.hooks import CompressionState, compression_hook
from gradstats.hooks.systems import dgc, make_state, redsync

RATIO = 0.02
DENSE = {"b": 0.6, "a": RATIO}


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
        on_the_way.append(len(compressor._pendings))
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


def adapt(rank, world):
    """Let LAGS measure and choose; then stop, and go on from its checkpoint."""
    net = model()
    ddp = DDP(net, bucket_cap_mb=0.001)
    compressor = LAGS(0.001, calibrate=2, merge=30_000)
    state = CompressionState(compressor, named_parameters=net.named_parameters())
    ddp.register_comm_hook(state, compression_hook)
    selected = []
    for step in range(compressor.settling + 1):
        ddp.zero_grad()
        loss_of(ddp, batch(rank, step)).backward()
        selected.append((state.last.selected, state.last.target))
    again = LAGS(0.001)
    again.load_state_dict(state.compressor.state_dict())
    return {
        "choice": (compressor.ratios, compressor.whole, compressor.measured, compressor.costs),
        "deliveries": compressor.deliveries,
        "selected": selected,
        "again": (again.ratios, again.whole),
    }


def try_all(rank, world, double_sampling):
    """Let LAGS try every way to send; return the ways, and for each step what was lost, its bytes and its counts."""
    calibration._WORTH_A_TRIAL = np.inf
    agreed = calibration._agreed

    def decided(*given):
        """Decide by no clock: eq. 19 gets a ratio between the smallest and one half."""
        step, whole, deliveries = agreed(*given)
        return step, whole, [replace(d, backward=0.005, select=0.001) for d in deliveries]

    calibration._agreed = decided
    calibration.probe = lambda *_: Costs(0, 0.005 / 900, 0, 1)
    layers = [("c", slice(0, 9_000)), ("b", slice(9_000, 9_500)), ("a", slice(9_500, 20_000))]
    compressor = LAGS(0.01, calibrate=1, merge=1, double_sampling=double_sampling)
    residual, rows = torch.zeros(20_000), []
    for step in range(9):
        generator = torch.Generator().manual_seed(100 * step + rank)
        corrected = residual + torch.randn(20_000, generator=generator)
        total, way = corrected.clone(), (compressor.whole, set(compressor.ratios.values()))
        for layer in layers:
            time.sleep(0.005)
            compressor.push(corrected, [layer], None)
        target = compressor.target(20_000)
        reduced = compressor.reduce(corrected, None)
        residual = reduced.residual.clone()
        left = residual + reduced.mean
        dist.all_reduce(total)
        dist.all_reduce(left)
        lost = float((total - left).abs().max())
        rows.append((way, lost, reduced.bytes_sent, reduced.selected, target))
    return rows, compressor.measured


def mostly_dense(rank, world):
    """Send one of two layers whole, twice; return what was lost, its residual, bytes and count of the second step."""
    compressor = Layerwise(lambda name, numel: TopK(DENSE[name]), merge=1)
    for step in range(2):
        corrected = torch.randn(1500, generator=torch.Generator().manual_seed(2 * rank + step))
        total = corrected.clone()
        compressor.push(corrected, [("b", slice(0, 500))], None)
        compressor.push(corrected, [("a", slice(500, 1500))], None)
        reduced = compressor.reduce(corrected, None)
    left = reduced.residual + reduced.mean
    dist.all_reduce(total)
    dist.all_reduce(left)
    lost = float((total - left).abs().max())
    return lost, float(reduced.residual[:500].abs().max()), reduced.bytes_sent, reduced.selected


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


def dense_parts(rank, world, steps=6):
    """Train with RedSync that sends every layer densely, and with DDP and Nesterov's momentum."""
    start = model()
    ours, theirs = DDP(copy.deepcopy(start), bucket_cap_mb=0.001), DDP(copy.deepcopy(start))
    state = redsync(ours.module.named_parameters(), 0.01, dense_below=10**9, merge=0)
    ours.register_comm_hook(state, compression_hook)
    # before its last layer the backward pass takes its time, as that of a large model would
    ours.module[1].register_full_backward_hook(lambda *_: time.sleep(0.02))
    optimizers = (
        torch.optim.SGD(ours.parameters(), lr=0.05),
        torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    )
    early, targets = 0, []
    for step in range(steps):
        for ddp, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(ddp, batch(rank, step)).backward()
            optimizer.step()
        ends = [a.end for a in state.compressor.timeline if a.lane == "backward"]
        early += sum(
            a.start < ends[-1] for a in state.compressor.timeline if a.lane == "communicate"
        )
        targets.append((state.last.target, state.last.selected, state.last.bytes_sent))
    far = max(
        float((a - b).detach().abs().max())
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    return far, early / steps, targets, sum(p.numel() for p in ours.parameters())


def half_dense(rank, world, steps=4):
    """Train on a constant gradient with a ratio above ½, at which all values travel; return the updates."""
    net = nn.Linear(30, 1, bias=False)
    with torch.no_grad():
        net.weight.zero_()
    ddp = DDP(net)
    state = redsync(net.named_parameters(), 0.6, dense_below=0, nesterov=False)
    ddp.register_comm_hook(state, compression_hook)
    updates = []
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.ones(1, 30)).sum().backward()
        updates.append(sorted(set(net.weight.grad.flatten().tolist())))
    return updates


def sent_by_systems(rank, world, names, ratio, steps=4):
    """Train with whole systems; return the layers, and by name the records of the last step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 300), nn.Linear(300, 20))
    found = {}
    for name in names:
        ddp = DDP(copy.deepcopy(net), bucket_cap_mb=0.001)
        ddp.register_comm_hook(
            state := make_state(name, ratio, ddp.module.named_parameters()), compression_hook
        )
        torch.manual_seed(rank)
        for _ in range(steps):
            ddp.zero_grad()
            ddp(torch.randn(8, 300)).square().mean().backward()
        found[name] = state.last.bytes_sent, state.last.selected
    return {n: p.detach().numpy() for n, p in net.named_parameters()}, found
