"""Trainings whose updates are captured, beside the parameters before and after every step.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import warnings

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import sharded

from capture import Capture
from gradstats.compressors import TopK
from gradstats.hooks import CompressionState, compression_hook


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)


def batch(step, rank=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, 20, generator=generator).to(dtype)


def sgd(net):
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(net, **options):
    return torch.optim.AdamW(net.parameters(), 0.01, **options)


def muon(net):
    """Muon takes matrices alone; AdamW has the rest, as its authors do it."""
    matrices = [p for p in net.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(others, 0.01)]


OPTIMIZERS = {
    "sgd": sgd,
    "adamw": adamw,
    "adamw fused": lambda net: adamw(net, fused=True),
    "adamw foreach": lambda net: adamw(net, foreach=True),
    "muon": muon,
}


def copied(net):
    """Return the parameters in one piece each, in their own precision."""
    return [p.detach().clone() for p in sharded.gathered(net)]


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors]).float().numpy()


def difference(before, net):
    return flat([b - now for b, now in zip(before, copied(net), strict=True)])


def compared(path, seen):
    """Return the steps at which a trace does not hold, to the bit, what was seen; in the trace's own order."""
    from gradstats import open_trace

    trace = open_trace(path)
    rank = trace.ranks[0]
    return trace.steps(), [
        step
        for step in trace.steps()
        for kind, want in zip(("update", "weight"), seen[step], strict=True)
        if not np.array_equal(trace.read(step, rank, kind), want)
    ]


def under_ddp(rank, world, folder):
    """Train under DDP in several ways; return what is wrong of each."""
    wrong = {}
    for case in ("hook", "hook without step", "compressed", "no_sync", "no hook"):
        ddp = DDP(network())
        optimizers = muon(ddp.module) if case == "compressed" else [sgd(ddp)]
        path = f"{folder}/{case.replace(' ', '_')}.zarr"
        capture = Capture(
            path, ddp, 2, kinds=["gradient", "update", "weight"], optimizer=optimizers, buffers=1
        )
        if case == "compressed":
            named = ddp.module.named_parameters()
            hook = CompressionState(TopK(0.1), named_parameters=named), compression_hook
            ddp.register_comm_hook(*capture.wrap(*hook))
        elif case != "no hook":
            ddp.register_comm_hook(*capture.wrap(None, allreduce_hook))
        seen = {}
        with capture:
            for step in range(5):
                for each in optimizers:
                    each.zero_grad()
                if case == "no_sync":
                    with ddp.no_sync():
                        ddp(batch(50 + step, rank)).square().mean().backward()
                ddp(batch(step, rank)).square().mean().backward()
                before = copied(ddp.module)
                if case not in ("hook without step", "compressed"):
                    capture.step()
                for each in optimizers:
                    each.step()
                if case == "compressed":
                    capture.step()
                seen[step] = difference(before, ddp.module), flat(copied(ddp.module))
        wrong[case] = compared(path, seen) if rank == 0 else ([0, 2, 4], [])
        del ddp
    return wrong


def under_fsdp(rank, world, folder):
    """Train under FSDP2; return the steps captured, and those that are wrong."""
    wrong = {}
    for name, make in {"adamw": adamw, "sgd": sgd}.items():
        model = sharded.network()
        sharded.shard(model, sharded.mesh_of(world))
        path, seen, optimizer = f"{folder}/{name}.zarr", {}, make(model)
        kinds = ["gradient", "local", "update", "weight"]
        with Capture(path, model, kinds=kinds, optimizer=optimizer) as capture:
            for step in range(3):
                optimizer.zero_grad()
                sharded.loss_of(model, sharded.batch(step, rank, model)).backward()
                before = copied(model)
                if name == "sgd":
                    capture.step()
                optimizer.step()
                if name == "adamw":
                    capture.step()
                seen[step] = difference(before, model), flat(copied(model))
        torch.distributed.barrier()
        wrong[name] = compared(path, seen)
    return wrong


def plain(path, make, order, *, every=1, dtype=torch.float32, parts=1, steps=5, **options):
    """Train in a plain loop, with ``capture.step()`` before or after the optimizers'; return as :func:`compared`."""
    net = network(dtype)
    made = make(net)
    optimizers, seen = made if isinstance(made, list) else [made], {}
    kinds = ["gradient", "update", "weight"]
    with (
        warnings.catch_warnings(),
        Capture(path, net, every, kinds=kinds, optimizer=made, **options) as capture,
    ):
        warnings.simplefilter("error")
        for step in range(steps):
            for each in optimizers:
                each.zero_grad()
            for part in range(parts):
                net(batch(step + 50 * part, dtype=dtype)).square().mean().backward()
            before = copied(net)
            if order == "before":
                capture.step()
            for each in optimizers:
                each.step()
            if order == "after":
                capture.step()
            seen[step] = difference(before, net), flat(copied(net))
    return compared(path, seen)


def scaled(path, order, make, overflows, steps=6):
    """Train with a loss scaler some of whose steps overflow; return as :func:`compared`."""
    net, seen = network(), {}
    optimizer, scaler = make(net), torch.amp.GradScaler("cpu", init_scale=8.0)
    kinds = ["gradient", "update", "weight"]
    # after scaler.step() the gradients are unscaled already
    known = scaler if order == "before" else None
    with Capture(path, net, kinds=kinds, optimizer=optimizer, scaler=known) as capture:
        for step in range(steps):
            optimizer.zero_grad()
            loss = net(batch(step)).square().mean()
            scaler.scale(loss * (torch.inf if step in overflows else 1.0)).backward()
            before = copied(net)
            if order == "before":
                capture.step()
            scaler.step(optimizer)
            if order == "after":
                capture.step()
            scaler.update()
            seen[step] = difference(before, net), flat(copied(net))
    return compared(path, seen), {step: not seen[step][0].any() for step in seen}


def closures(path, inside, make=None):
    """Train with a closure; return the updates captured, and the parameters before and after the training."""
    from gradstats import open_trace

    net = network()
    make = make or (lambda net: torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3))
    optimizer = make(net)
    moved = [copied(net)]
    with Capture(path, net, kinds=["gradient", "update"], optimizer=optimizer) as capture:
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                loss = net(batch(step)).square().mean()
                loss.backward()
                if inside:
                    capture.step(loss=loss)
                return loss

            optimizer.step(closure)
            moved.append(copied(net))
            if not inside:
                capture.step()
    trace = open_trace(path)
    return [trace.read(step, 0, "update") for step in trace.steps()], moved


def adversaries(path, order, every=1):
    """Train two networks against each other, both captured as one model; return as :func:`compared`."""
    both = nn.ModuleDict({"one": network(), "two": network()})
    optimizers, seen = [sgd(both["one"]), adamw(both["two"])], {}
    kinds = ["gradient", "update", "weight"]
    with Capture(path, both, every, kinds=kinds, optimizer=optimizers) as capture:
        for step in range(7):
            before = copied(both)
            optimizers[0].zero_grad()
            both["one"](batch(step)).square().mean().backward()
            if order == "before":
                capture.step()
            optimizers[0].step()
            optimizers[1].zero_grad()
            if step % 3 != 1:  # not in every iteration
                both["two"](batch(step)).square().mean().backward()
                optimizers[1].step()
            if order == "after":
                capture.step()
            seen[step] = difference(before, both), flat(copied(both))
    return compared(path, seen)
