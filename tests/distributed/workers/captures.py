"""Trainings with a capture, each beside what a copy of the model without DDP would have given.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import copy
import gc
import os
import threading
import traceback
import warnings
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from workers.hook import model
from workers.trainings import Complex, Heads, Words, inputs, refusal

from capture import Capture, CaptureWarning
from gradstats.compressors import TopK
from gradstats.errors import GradstatsError
from gradstats.hooks import CompressionState, compression_hook

STEPS = 5


def flat(tensors):
    """Return tensors one behind the other, in logical order and their own precision."""
    parts = []
    for t in tensors:
        dense = t.detach().to_dense().resolve_conj()
        parts.append((torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1))
    return torch.cat(parts).numpy()


def alone(net, loss):
    """Return the gradient that a copy of the model without DDP gets; zeros where it gets none."""
    twin = copy.deepcopy(net)
    twin.zero_grad()
    loss(twin).backward()
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()])


def images():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3))
    return net.to(memory_format=torch.channels_last)


def image_loss(net, rank, step):
    return net(inputs(rank, step, (2, 3, 9, 9))).square().mean()


def plain_loss(net, rank, step):
    return net(inputs(rank, step)).square().mean()


def large_loss(net, rank, step):
    return 64 * plain_loss(net, rank, step)


def heads_loss(net, rank, step):
    return net(inputs(rank, step), step % 2).square().mean()


def words_loss(net, rank, step):
    x = torch.randint(0, 50, (8, 3), generator=torch.Generator().manual_seed(10 * step + rank))
    return net(x).square().sum()


def double_loss(net, rank, step):
    return net(inputs(rank, step).double()).square().mean()


class Remembering:
    """A state of one's own: it keeps 0.5 of what it saw, and says so in the parameters' logical order."""

    def __init__(self, net):
        self.memory = {p: torch.zeros(p.shape) for p in net.parameters()}

    def residual(self, parameter):
        return self.memory[parameter]


def remembering_hook(
    state: Remembering, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    for p in bucket.parameters():
        state.memory[p] += torch.arange(p.numel()).view(p.shape)
    return allreduce_hook(None, bucket)


def _topk(net):
    return CompressionState(TopK(0.1), named_parameters=net.named_parameters()), compression_hook


def _power(net):
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    return state, powersgd_hook


def _own(net):
    return Remembering(net), remembering_hook


def _dense(net):
    return None, allreduce_hook


RECORDED = {
    "channels_last": (images, image_loss, _topk, {}),
    "channels_last-dense": (images, image_loss, _dense, {}),
    "channels_last-own": (images, image_loss, _own, {}),
    "channels_last-powersgd": (images, image_loss, _power, {}),
    "channels_last-view": (images, image_loss, _topk, {"gradient_as_bucket_view": True}),
    "complex": (Complex, plain_loss, _topk, {}),
    "sparse": (Words, words_loss, _topk, {}),
    "float64": (lambda: model().double(), double_loss, _topk, {}),
    "static_graph": (model, plain_loss, _topk, {"static_graph": True}),
    "view": (model, plain_loss, _topk, {"gradient_as_bucket_view": True}),
    "unused": (Heads, heads_loss, _topk, {"find_unused_parameters": True}),
    "unused-dense": (Heads, heads_loss, _dense, {"find_unused_parameters": True}),
    # as of two optimizers that take turns: the gradient of the other head is left as it is
    "turns": (Heads, heads_loss, _topk, {"find_unused_parameters": True}),
    "turns-dense": (Heads, heads_loss, _dense, {"find_unused_parameters": True}),
    "buckets": (model, plain_loss, _topk, {"bucket_cap_mb": 0.05}),
}


def _residual(net, state):
    """Return what the hook is going to add, in logical order; None without a memory."""
    if isinstance(state, CompressionState | Remembering):
        parts = [state.residual(p) for p in net.parameters()]
        sizes = [p.numel() * (1 + p.is_complex()) for p in net.parameters()]
        return np.concatenate(
            [
                np.zeros(n) if r is None else r.reshape(-1).double().numpy()
                for r, n in zip(parts, sizes, strict=True)
            ]
        )
    return None


def record(rank, path, name):
    """Train, captured; return what the trace should hold."""
    make, loss_of, exchange, options = RECORDED[name]
    net = make()
    ddp = DDP(net, **options)
    state, hook = exchange(net)
    gradients, residuals = [], []
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with Capture(path, ddp, buffers=STEPS) as capture:
        ddp.register_comm_hook(*capture.wrap(state, hook))
        for step in range(STEPS):
            used = net
            if name.startswith("turns"):
                used = nn.ModuleList([net.body, net.heads[step % 2]])
            used.zero_grad()
            gradients.append(alone(net, partial(loss_of, rank=rank, step=step)))
            residuals.append(_residual(net, state))
            if name == "channels_last-powersgd":
                residuals[-1] = _powersgd_residual(net, state, gradients[-1].size)
            loss_of(ddp, rank, step).backward()
            capture.step()
            optimizer.step()
    return gradients, residuals


ORDER = []
"""Parameters of PowerSGD's one bucket, which is rebuilt after the first step."""


def powersgd_hook(
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    ORDER[:] = bucket.parameters()
    return powerSGD_hook(state, bucket)


def _powersgd_residual(net, state, size):
    """Return PowerSGD's residual, which is kept as the bucket lies in memory."""
    kept = state.error_dict.get(0)
    if kept is None:
        return np.zeros(size)
    parts, at = {}, 0
    for p in ORDER:
        parts[p] = kept.as_strided(p.shape, p.stride(), kept.storage_offset() + at)
        at += p.numel()
    return flat([parts[p] for p in net.parameters()])


def recorded(rank, world, folder):
    """Run all trainings; what one raises is its result."""
    results = {}
    for name in RECORDED:
        try:
            results[name] = record(rank, f"{folder}/{name}.zarr", name)
        except Exception:
            results[name] = traceback.format_exc()
    return results


def scaled(rank, world, path, kind):
    """A loss scale that overflows first, and grows: the trace does not know it."""
    net = model()
    ddp = DDP(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    given = None if kind == "state" else scaler
    state, hook = (
        _dense(net)
        if kind == "dense"
        else (
            CompressionState(TopK(0.1), named_parameters=net.named_parameters(), scaler=scaler),
            compression_hook,
        )
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    gradients, residuals, scales = [], [], []
    with Capture(path, ddp, buffers=10, scaler=given) as capture:
        ddp.register_comm_hook(*capture.wrap(state, hook))
        for step in range(10):
            optimizer.zero_grad()
            scale = scaler.get_scale()
            own = alone(net, lambda m, s=step, k=scale: large_loss(m, rank, s) * k)
            gradients.append(own * np.float32(1 / scale))
            residuals.append(_residual(net, state))
            scaler.scale(large_loss(ddp, rank, step)).backward()
            capture.step()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scale)
    return gradients, residuals, scales


def messages(caught):
    """Return what a capture warned of, but for a slow disk."""
    said = [str(w.message) for w in caught if w.category is CaptureWarning]
    return [each for each in said if "slower than the training" not in each]


def misplaced(rank, world, path):
    """`step()` before `backward()`."""
    net = model()
    ddp = DDP(net)
    gradients = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Capture(path, ddp, buffers=STEPS) as capture:
            ddp.register_comm_hook(*capture.wrap(None, allreduce_hook))
            for step in range(STEPS):
                ddp.zero_grad()
                gradients.append(alone(net, partial(plain_loss, rank=rank, step=step)))
                loss = plain_loss(ddp, rank, step)
                capture.step(loss=loss, learning_rate=0.1)
                loss.backward()
    return gradients, messages(caught)


def unwrapped(rank, world, folder):
    """Hooks that are registered otherwise than wrapped; DDP without a hook."""
    said = []
    for case in range(5):
        net = model()
        ddp = DDP(net)
        state, hook = _topk(net)
        path = f"{folder}/{case}.zarr"

        def train(capture, ddp=ddp):
            with capture:
                plain_loss(ddp, rank, 0).backward()
                capture.step()

        if case == 0:  # registered after the capture was made
            capture = Capture(path, ddp)
            ddp.register_comm_hook(state, hook)
            said.append(refusal(partial(train, capture)))
        elif case == 1:  # and before
            ddp.register_comm_hook(state, hook)
            said.append(refusal(partial(Capture, path, ddp)))
        elif case == 2:  # wrapped, but the bare one registered
            capture = Capture(path, ddp)
            capture.wrap(state, hook)
            ddp.register_comm_hook(state, hook)
            said.append(refusal(partial(train, capture)))
        elif case == 3:  # wrapped, and none registered
            capture = Capture(path, ddp)
            capture.wrap(state, hook)
            said.append(refusal(partial(train, capture)))
        else:  # no hook: the average is captured
            said.append(refusal(partial(train, Capture(path, ddp))))
            mean = torch.from_numpy(alone(net, partial(plain_loss, rank=rank, step=0)))
            dist.all_reduce(mean)
            said.append((mean / world).numpy())
    return said


def half_no_sync(rank, world, folder):
    """`no_sync` around `backward()` only, which is a no-op; and as it should be."""
    said = []
    for whole in (False, True):
        net = model()
        ddp = DDP(net)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Capture(f"{folder}/{whole}.zarr", ddp) as capture:
                ddp.register_comm_hook(*capture.wrap(None, allreduce_hook))
                for step in range(4):
                    if whole and step % 2 == 0:
                        with ddp.no_sync():
                            plain_loss(ddp, rank, step).backward()
                    else:
                        loss = plain_loss(ddp, rank, step)
                        if step % 2 == 0:
                            with ddp.no_sync():
                                loss.backward()
                        else:
                            loss.backward()
                    capture.step()
        said.append(messages(caught))
    return said


def numbered(rank, world, path):
    """A state without names, diagnosed."""
    net = model()
    ddp = DDP(net)
    state = CompressionState(TopK(0.1), diagnose_every=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Capture(path, ddp, buffers=STEPS) as capture:
            ddp.register_comm_hook(*capture.wrap(state, compression_hook))
            for step in range(STEPS):
                ddp.zero_grad()
                plain_loss(ddp, rank, step).backward()
                capture.step()
    return messages(caught)


def forgotten(rank, world, path):
    """A capture that goes out of scope with its DDP model, unclosed, the last step not ended by `step()`."""

    def train():
        net = model()
        ddp = DDP(net)
        capture = Capture(path, ddp, buffers=STEPS)
        ddp.register_comm_hook(*capture.wrap(*_topk(net)))
        for step in range(STEPS):
            ddp.zero_grad()
            plain_loss(ddp, rank, step).backward()

    train()
    gc.collect()
    return [t.name for t in threading.enumerate() if t.name == "gradstats-capture"]


class Breaking(torch.autograd.Function):
    """The identity; its backward pass raises when told to."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Breaking.armed:
            raise ArithmeticError("in the middle of the backward pass")
        return gradient


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(40, 50), nn.Linear(50, 60)

    def forward(self, x):
        return self.last(Breaking.apply(self.first(x)))


def failing_future(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """An exchange that fails after the hook has returned."""
    if not Breaking.armed:
        return allreduce_hook(None, bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_exception(ArithmeticError("connection closed"))
    return future


def failed(rank, world, path, how):
    """Fail in step 2; return the error, and what steps 0 and 1 were."""
    net = Fragile()
    ddp = DDP(net, bucket_cap_mb=0.001)
    state, hook = {
        "middle": _dense,
        "middle-topk": _topk,
        "nan": _topk,
        "future": lambda net: (None, failing_future),
    }[how](net)
    gradients = []

    def train():
        with Capture(path, ddp, buffers=1) as capture:
            ddp.register_comm_hook(*capture.wrap(state, hook))
            for step in range(3):
                ddp.zero_grad()
                if step < 2:
                    gradients.append(alone(net, partial(plain_loss, rank=rank, step=step)))
                loss = plain_loss(ddp, rank, step)
                if step == 2:
                    Breaking.armed = how != "nan"
                    loss = loss * (float("nan") if how == "nan" else 1)
                loss.backward()
                capture.step(loss=loss)

    error = refusal(train)
    Breaking.armed = False
    return error, gradients


def lost(rank, world, path):
    """The last rank dies in step 2."""
    net = model()
    ddp = DDP(net)
    state, hook = _topk(net)
    capture = Capture(path, ddp, ranks=[0])
    ddp.register_comm_hook(*capture.wrap(state, hook))
    error = ""
    try:
        with capture:
            for step in range(4):
                if step == 2 and rank == world - 1:
                    os._exit(0)
                ddp.zero_grad()
                plain_loss(ddp, rank, step).backward()
                capture.step()
    except GradstatsError as refused:
        error = type(refused).__name__
    with open(f"{path}.error", "w", encoding="utf-8") as file:
        file.write(error)
    os._exit(0)  # the group is beyond a barrier


def uneven(rank, world, path, ends):
    """Rank 1 has more batches, under DDP's Join, and the user ends steps or does not; return gradients and messages."""
    net = model()
    ddp = DDP(net)
    state, hook = _topk(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    gradients = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Capture(path, ddp) as capture, Join([ddp]):
            ddp.register_comm_hook(*capture.wrap(state, hook))
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                gradients.append(alone(net, lambda m, s=step: plain_loss(m, rank, s)))
                plain_loss(ddp, rank, step).backward()
                optimizer.step()
                if ends:
                    capture.step()
    return gradients, messages(caught)


def hidden(rank, world, path, policy):
    """Step 2 is not finite on rank 1, and a policy hides it; return gradients and records."""
    net = model()
    ddp = DDP(net)
    state = CompressionState(
        TopK(0.1), named_parameters=net.named_parameters(), nonfinite=policy, diagnose_every=1
    )
    gradients, records = [], []
    with Capture(path, ddp, buffers=4) as capture:
        ddp.register_comm_hook(*capture.wrap(state, compression_hook))
        for step in range(4):
            factor = float("inf") if step == 2 and rank == 1 else 1.0
            ddp.zero_grad()
            gradients.append(alone(net, lambda m, s=step, f=factor: plain_loss(m, rank, s) * f))
            (plain_loss(ddp, rank, step) * factor).backward()
            capture.step()
            records.append(state.last)
    return gradients, records


def creation(rank, world, folder):
    """Errors of rank 0 of every kind reach all ranks."""
    said = []
    for path, options in (
        ("type.zarr", {"metadata": {"x": object()}}),
        ("mapping.zarr", {"metadata": 5}),
        ("n" * 300 + ".zarr", {}),
        ("nul\0.zarr", {}),
        ("/proc/nothing/a.zarr", {}),
    ):
        said.append(
            refusal(lambda p=path, o=options: Capture(os.path.join(folder, p), model(), **o))
        )
    return said


def in_groups(rank, world, folder):
    """Two groups of two ranks; two DDP models in each process, with a capture each."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = rank // 2
    torch.manual_seed(0)
    nets = [model(), nn.Linear(40, 2)]
    ddps, captures = [], []
    for i, net in enumerate(nets):
        ddp = DDP(net, process_group=pairs[group])
        state = CompressionState(
            TopK(0.05), named_parameters=net.named_parameters(), process_group=pairs[group]
        )
        capture = Capture(f"{folder}/group{group}-model{i}.zarr", ddp, buffers=3)
        ddp.register_comm_hook(*capture.wrap(state, compression_hook))
        ddps.append(ddp)
        captures.append(capture)
    gradients = [[], []]
    for step in range(3):
        for i, (net, ddp, capture) in enumerate(zip(nets, ddps, captures, strict=True)):
            ddp.zero_grad()
            gradients[i].append(alone(net, partial(plain_loss, rank=rank, step=step)))
            plain_loss(ddp, rank, step).backward()
            capture.step()
            with torch.no_grad():
                for p in ddp.parameters():
                    p -= 0.1 * p.grad
    for capture in captures:
        capture.close()
    return gradients


def unfrozen(rank, world, path):
    """A parameter frozen when the capture is made, and then unfrozen and wrapped anew."""
    net = model()
    net[0].weight.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Capture(path, net, buffers=4) as capture:
            gradients = []
            for step in range(4):
                if step in (0, 2):
                    net[0].weight.requires_grad_(step == 2)
                    ddp = DDP(net)
                    ddp.register_comm_hook(*capture.wrap(None, allreduce_hook))
                ddp.zero_grad()
                own = alone(net, partial(plain_loss, rank=rank, step=step))
                gradients.append(own[net[0].weight.numel() :])
                plain_loss(ddp, rank, step).backward()
                capture.step()
    return gradients, messages(caught)
