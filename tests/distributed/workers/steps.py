"""Trainings in which an exchange is no step, or a gradient is not where it was; each beside a model without DDP.

No `from __future__ import annotations`: DDP reads the hooks' annotations.
"""

import copy
import inspect
import io
import os
import signal
import traceback
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from workers import sharded
from workers.captures import alone, flat, messages, plain_loss
from workers.hook import model
from workers.trainings import refusal

from capture import Capture, creation
from gradstats.compressors import TopK
from gradstats.hooks import CompressionState, LocalSteps, compression_hook
from gradstats.hooks import meeting as meeting_of_ranks
from gradstats.hooks.torch_private import store_of

STEPS, PARTS = 3, 4


def captured(path, net, train, *, hook=None, options=None, **capturing):
    """Train under DDP with a wrapped hook; return what the training returns, and what was warned of."""
    ddp = DDP(net, **(options or {}))
    state, hook = hook or (None, allreduce_hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Capture(path, ddp, buffers=12, **capturing) as capture:
            ddp.register_comm_hook(*capture.wrap(state, hook))
            result = train(net, ddp, capture)
    return result, messages(caught)


def accumulate(rank, net, ddp, capture, sync=None, zero=True, each=False):
    """Add up the gradients of several backward passes, of which those in `sync` exchange."""
    optimizer, gradients = torch.optim.SGD(net.parameters(), 0.01), []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=zero)
        own = []
        for part in range(PARTS):
            number = PARTS * step + part
            own.append(alone(net, partial(plain_loss, rank=rank, step=number)))
            ddp.require_backward_grad_sync = sync is None or part in sync  # what no_sync() sets
            plain_loss(ddp, rank, number).backward()
            if each:
                capture.step(loss=float(number))
        gradients += own if each else [sum(own)]
        if not each:
            capture.step(loss=float(step))
        optimizer.step()
    return gradients


def unended(rank, net, ddp, capture):
    """Accumulate without ever calling `capture.step()`."""

    class Silent:
        def step(self, **_):
            pass

    return accumulate(rank, net, ddp, Silent())


def pass_through(rank, net, ddp, capture, end="after update", zero=False):
    """Have a second loss pass its gradient through the model, as a GAN's generator does: no optimizer takes it here."""
    optimizer, gradients = torch.optim.SGD(net.parameters(), 0.01), []
    for step in range(STEPS):
        optimizer.zero_grad()
        gradients.append(alone(net, partial(plain_loss, rank=rank, step=step)))
        plain_loss(ddp, rank, step).backward()
        if end == "before update":
            capture.step(loss=float(step))
        optimizer.step()
        if end == "after update":
            capture.step(loss=float(step))
        if zero:
            optimizer.zero_grad()
        plain_loss(ddp, rank, 100 + step).backward()
        if end == "after all":
            capture.step(loss=float(step))
    return gradients


def passes(rank, folder):
    """Return, for each place of `capture.step()`, the gradients that the trace should hold, and what was warned of."""
    results = {}
    for end in ("before update", "after update", "after all", "never"):
        for zero in {"before update": (False, True), "after update": (False, True)}.get(
            end, (False,)
        ):
            way = f"passes {end}{' zeroed' if zero else ''}"
            train = partial(pass_through, rank, end=end, zero=zero)
            results[way] = captured(f"{folder}/{way}.zarr", model(), train)
    return results


def compressed(net):
    return CompressionState(TopK(0.1), named_parameters=net.named_parameters()), compression_hook


def accumulations(rank, folder):
    """Return, for each way to accumulate, the gradients that the trace should hold, and what was warned of."""
    ways = {
        "every backward": {},
        "zeroed": {"zero": False},
        "first and last": {"sync": {0, 3}},
        "middle": {"sync": {1, 3}},
        "last": {"sync": {3}},
        "step of each": {"each": True},
    }
    results = {}
    for way, how in ways.items():
        results[way] = captured(f"{folder}/{way}.zarr", model(), partial(accumulate, rank, **how))
    results["never ended"] = captured(f"{folder}/never ended.zarr", model(), partial(unended, rank))
    for name, options in {
        "view": {"gradient_as_bucket_view": True},
        "static_graph": {"static_graph": True},
        "buckets": {"bucket_cap_mb": 0.05},
    }.items():
        results[name] = captured(
            f"{folder}/{name}.zarr", model(), partial(accumulate, rank), options=options
        )
    net = model()
    results["compressed"] = captured(
        f"{folder}/compressed.zarr", net, partial(accumulate, rank), hook=compressed(net)
    )
    return results


class Late(nn.Module):
    """Heads of which some are never used; in reverse order they fill DDP's first and last buckets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.body = nn.Linear(40, 50), nn.Linear(40, 50)
        self.head, self.last = nn.Linear(50, 2), nn.Linear(50, 60)

    def forward(self, x, early=False):
        return (self.last if early else self.head)(self.body(x))


def skipping(rank, folder):
    """DDP does not exchange buckets of parameters that are never used."""
    return skipped(rank, f"{folder}/skipping.zarr", lambda step: False)


def skipping_later(rank, folder):
    """Those that only the first step uses, of a training that nobody ends the steps of."""
    return skipped(rank, f"{folder}/later.zarr", lambda step: step == 0, ends=False)


def skipped(rank, path, early, ends=True):
    def train(net, ddp, capture):
        gradients = []
        for step in range(STEPS):

            def loss(model, step=step):
                return plain_loss(partial(model, early=early(step)), rank, step)

            ddp.zero_grad()
            gradients.append(alone(net, loss))
            loss(ddp).backward()
            if ends:
                capture.step()
        return gradients

    options = {
        "find_unused_parameters": True,
        "skip_all_reduce_unused_params": True,
        "bucket_cap_mb": 0.001,
    }
    return captured(path, Late(), train, options=options)


def ignored(rank, folder):
    """A parameter that DDP ignores, of a module inside, and of the model itself."""
    net = model()
    net.scale = nn.Parameter(torch.ones(3))
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["4.bias", ".scale"])

    def train(net, ddp, capture):
        own = alone(net, partial(plain_loss, rank=rank, step=0))
        plain_loss(ddp, rank, 0).backward()
        capture.step()
        return [own[3:-3]]

    return captured(f"{folder}/ignored.zarr", net, train)


def swapped_under_ddp(rank, folder):
    """A head that is swapped behind DDP's back is not exchanged."""

    def train(net, ddp, capture):
        gradients = []
        for step in range(2):
            if step == 1:
                net[4] = nn.Linear(300, 3)
            ddp.zero_grad()
            gradients.append(alone(net, partial(plain_loss, rank=rank, step=step)))
            plain_loss(ddp, rank, step).backward()
            capture.step()
        gradients[1][-903:] = np.nan
        return gradients

    return captured(
        f"{folder}/swapped.zarr", model(), train, options={"find_unused_parameters": True}
    )


def unfrozen_under_ddp(rank, folder):
    """A parameter that is unfrozen behind DDP's back: each rank trains it by itself."""
    net = model()
    net[4].bias.requires_grad_(False)

    def train(net, ddp, capture):
        gradients = []
        for step in range(2):
            net[4].bias.requires_grad_(step == 1)
            ddp.zero_grad()
            gradients.append(alone(net, partial(plain_loss, rank=rank, step=step))[:-3])
            plain_loss(ddp, rank, step).backward()
            capture.step()
        return gradients

    return captured(f"{folder}/unfrozen.zarr", net, train)


def local_steps(rank, folder):
    """Local steps that were begun when a parameter was frozen do not exchange it."""
    net = model()
    net[4].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    local = LocalSteps(net, optimizer, steps=2)
    net[4].weight.requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Capture(f"{folder}/local.zarr", net) as capture:
            capture.follow(local)
            # no longer there, as the local steps have it
            net[4].weight.requires_grad_(False)
            with local:
                for step in range(6):
                    optimizer.zero_grad()
                    plain_loss(net, rank, step).backward()
                    # at the end of the first interval, in the middle of the last
                    if step in (1, 4):
                        capture.step(loss=step, learning_rate=10 + step)
                    optimizer.step()
    return messages(caught)


def halfway(rank, folder):
    """`capture.step()` in the middle of the backward pass."""
    net = model()
    ddp = DDP(net)
    with Capture(f"{folder}/halfway.zarr", ddp) as capture:
        ddp.register_comm_hook(*capture.wrap(None, allreduce_hook))
        handle = net[2].weight.register_post_accumulate_grad_hook(lambda _: capture.step())
        loss = plain_loss(ddp, rank, 0)
        said = refusal(loss.backward)
        handle.remove()
    return said


def ignored_by_fsdp(rank, folder):
    """A parameter that FSDP2 ignores."""
    net, plain = sharded.network(), sharded.network()
    fully_shard(net, mesh=sharded.mesh_of(2), ignored_params={net[4].bias})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Capture(f"{folder}/sharded.zarr", net, kinds=["gradient", "local"]) as capture:
            sharded.loss_of(net, sharded.batch(0, rank, plain)).backward()
            capture.step()
    return sharded.own_gradient(plain, 0, rank)[:-1], messages(caught)


def meeting(rank, folder):
    """A Capture under `if rank == 0`, then one that each rank has in a folder of its own."""
    group, store = dist.new_group([0, 1]), store_of(None)
    before, meeting_of_ranks._PATIENCE_S, creation._LATE_S = store.timeout, 0.2, 0.5
    store.set_timeout(timedelta(seconds=1))
    said, waited = "", []
    if rank == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            said = refusal(lambda: Capture(f"{folder}/0.zarr", model(), process_group=group))
        waited = messages(caught)
    store.set_timeout(before)
    dist.barrier()
    place = Path(folder, f"disk{rank}")
    place.mkdir()
    apart = refusal(lambda: Capture(place / "run.zarr", model()))
    # one of the ranks is enough where it alone writes
    Capture(place / "one.zarr", model(), ranks=[0]).close()
    # another trace at the same path is not the one
    if rank:
        Capture(place / "two.zarr", nn.Linear(1, 1), process_group=dist.new_group([1])).close()
    else:
        dist.new_group([1])
    return said, waited, apart, refusal(lambda: Capture(place / "two.zarr", model()))


def copied(rank, folder):
    """A model in DDP with a wrapped capture is copied and saved whole, in mid-training."""
    net = model()
    ddp = DDP(net)
    with Capture(f"{folder}/copied.zarr", ddp) as capture:
        ddp.register_comm_hook(*capture.wrap(None, allreduce_hook))
        plain_loss(ddp, rank, 0).backward()
        capture.step()
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        twins = [copy.deepcopy(ddp), torch.load(file, weights_only=False)]
        gradients = []
        for each in (*twins, ddp):
            each.zero_grad()
            plain_loss(each, rank, 1).backward()
            gradients.append(flat([p.grad for p in each.parameters()]))
        capture.step()
    states = [state for each in twins for _, state in each._comm_hooks]
    return gradients, [(state.active, state.path == capture.path) for state in states]


def every_option(net):
    """Return the options of DDP's constructor, each with a value that is not its default's."""
    delayed = [("2.weight", net[2].weight), ("2.bias", net[2].bias)]
    mesh = init_device_mesh("cpu", (2,))
    return {
        "broadcast_buffers": {"broadcast_buffers": False},
        "init_sync": {"init_sync": False},
        "process_group": {"process_group": dist.new_group([0, 1])},
        "bucket_cap_mb": {"bucket_cap_mb": 0.01},
        "find_unused_parameters": {"find_unused_parameters": True},
        "check_reduction": {"check_reduction": True},
        "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
        "static_graph": {"static_graph": True},
        "delay_all_reduce_named_params": {
            "delay_all_reduce_named_params": delayed,
            "param_to_hook_all_reduce": net[2].weight,
        },
        "mixed_precision": {"mixed_precision": _MixedPrecision()},
        "device_mesh": {"device_mesh": mesh},
        "skip_all_reduce_unused_params": {
            "find_unused_parameters": True,
            "skip_all_reduce_unused_params": True,
        },
        "bucket_cap_mb_list": {"bucket_cap_mb_list": [1, 2]},
        "batched_grad_copy": {"batched_grad_copy": True},
        "forward_sync_buffers": {"forward_sync_buffers": False},
    }


def options_of_ddp(rank, folder):
    """Return, for each option, what the trace should hold and what was said, or the error."""
    known = set(inspect.signature(DDP).parameters)
    results = {}
    for name in every_option(model()):
        net = model()
        options = {k: v for k, v in every_option(net)[name].items() if k in known}

        def train(net, ddp, capture):
            gradients = []
            for step in range(2):
                ddp.zero_grad()
                gradients.append(alone(net, partial(plain_loss, rank=rank, step=step)))
                plain_loss(ddp, rank, step).backward()
                capture.step()
            return gradients

        run = partial(captured, f"{folder}/option-{name}.zarr", net, train, options=options)
        results[name] = []
        error = refusal(lambda run=run, kept=results[name]: kept.append(run()))
        results[name] = error or results[name][0]
    return results, known


def held(path, said):
    """Say what a capture beside that of another process is told, and be killed with one that is not closed."""
    net = nn.Linear(4, 3)
    capture = Capture(path, net, overwrite="number")
    refused = refusal(lambda: Capture(path, net, overwrite=True))
    said.write_text(f"{capture.path}\n{refused}", encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


CASES = {
    "options": options_of_ddp,
    "meeting": meeting,
    "copied": copied,
    "sharded": ignored_by_fsdp,
    "accumulations": accumulations,
    "passes": passes,
    "skipping": skipping,
    "later": skipping_later,
    "ignored": ignored,
    "swapped": swapped_under_ddp,
    "unfrozen": unfrozen_under_ddp,
    "local steps": local_steps,
    "halfway": halfway,
}


def trainings(rank, world, folder):
    """Run all; what one raises is its result."""
    results = {}
    for name, run in CASES.items():
        try:
            results[name] = run(rank, folder)
        except Exception:
            results[name] = traceback.format_exc()
    return results
