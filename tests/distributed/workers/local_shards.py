"""Local steps of sharded models: two replicas of two shards, beside loops over the model in one piece."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.checkpoints import resealed
from torch.distributed.fsdp import fully_shard
from workers.sharded import batch, fingerprint, gathered, loss_of, mesh_of, network, shard, trained

from capture import Capture
from gradstats.compressors import TopK
from gradstats.errors import ExchangeError, GradstatsError, NonFiniteGradientError
from gradstats.hooks import ErrorFeedback, LocalSteps

H, REPLICAS = 5, 2
OPTIONS = {
    "dense": dict,
    "topk with decay": lambda: {"compressor": TopK(0.1), "memory": ErrorFeedback(0.9)},
    # the last weight has one row: of the second fragment some ranks hold nothing
    "patterns": lambda: {"compressor": TopK(0.05), "fragments": [["0.*", "2.*"], ["*"]]},
    "delayed": lambda: {"compressor": TopK(0.05), "fragments": 2, "delay": 2},
    "one step": lambda: {"steps": 1},
}
CAPTURED = ("dense", "topk with decay", "patterns")


@functools.cache
def meshed(world):
    """Return the ranks by replica and shard; to make their groups takes longer than to train."""
    return mesh_of(REPLICAS, world // REPLICAS)


def built(name, world):
    """Return a sharded model, its optimizer, and local steps between its replicas."""
    torch.manual_seed(0)
    model, mesh = network(), meshed(world)
    shard(model, mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    if name == "one step":
        outer = None
    options = {"steps": H, "process_group": mesh["replicate"].get_group(), **OPTIONS[name]()}
    return model, optimizer, LocalSteps(model, optimizer, outer, **options)


def whole(model):
    return torch.cat([p.detach().reshape(-1) for p in gathered(model)]).numpy()


def reference(rank, world, steps, interval):
    """DiLoCo over the model in one piece: AdamW on a replica's mean gradient, then the outer step."""
    mesh = meshed(world)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    anchor = [p.detach().clone() for p in model.parameters()]
    velocity = [torch.zeros_like(a) for a in anchor]
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(step, rank, model)).backward()
        for p in model.parameters():
            group = None if interval == 1 else mesh["shard"].get_group()
            dist.all_reduce(p.grad, group=group)
            p.grad /= world if interval == 1 else world // REPLICAS
        optimizer.step()
        if interval > 1 and (step + 1) % interval == 0:
            for p, a, v in zip(model.parameters(), anchor, velocity, strict=True):
                delta = a - p.detach()
                dist.all_reduce(delta, group=mesh["replicate"].get_group())
                delta /= REPLICAS
                v.mul_(0.9).add_(delta)
                a.add_(delta.add(v, alpha=0.9), alpha=-0.7)
                p.data.copy_(a)
    return whole(model)


def learns(rank, world, name, folder):
    """Return losses, parameters of every rank's replica, what the exchanges record, and what a capture must hold."""
    model, optimizer, local = built(name, world)
    if name in CAPTURED:
        losses, held = captured(rank, f"{folder}/{name}.zarr", model, optimizer, local)
    else:
        with local:
            losses, held = trained(model, rank, optimizer, 0, 4 * H), None
    expected = None
    if name in ("dense", "one step"):
        expected = reference(rank, world, 4 * H, local.steps)
    return losses, whole(model), expected, local.exchanges, local.last, held


def captured(rank, path, model, optimizer, local):
    """Train with a capture; return losses, and what the trace must hold of this rank's replica, exchange by exchange.

    To gather takes most of the time: only before the exchanges, and after them.
    """
    anchors, deltas, gradients = [whole(model)], [], []
    last = False

    def seen(*_):  # before the capture's, while the local parameters are still there
        if last:
            deltas.append(anchors[-1] - whole(model))
            parts = [p.grad.full_tensor().reshape(-1) for p in model.parameters()]
            gradients.append(torch.cat(parts).numpy())

    def before(step, loss):
        nonlocal last
        if step and step % H == 0:
            anchors.append(whole(model))
        last = (step + 1) % H == 0
        capture.step(loss=loss, learning_rate=step)

    optimizer.register_step_post_hook(seen)
    with Capture(path, model) as capture:
        capture.follow(local)
        with local:
            losses = trained(model, rank, optimizer, 0, 4 * H, before)
    return losses, (deltas, gradients)


def resumes(rank, world, name, folder):
    """Stop in mid-interval, through the distributed checkpoint: the same bits as never having stopped."""
    model, optimizer, local = built(name, world)
    with local:
        trained(model, rank, optimizer, 0, 13)
    expected = fingerprint(model)
    model, optimizer, local = built(name, world)
    with local:
        trained(model, rank, optimizer, 0, 6)  # a step after an exchange, which may be under way
        dcp.save({"local": local.state_dict()}, checkpoint_id=folder)
    meshed.cache_clear()
    dist.new_group([0, 1])  # so that names of groups are others than when it was saved
    model, optimizer, local = built(name, world)
    template = {"local": local.state_dict()}
    dcp.load(template, checkpoint_id=folder)
    local.load_state_dict(template["local"])
    with local:
        trained(model, rank, optimizer, 6, 7)  # over the next exchange, that of any fragment
    # the state belongs to the mesh of this run, whatever groups an earlier one had
    state = optimizer.state[model[0].weight]["exp_avg"]
    assert state.device_mesh is model[0].weight.device_mesh
    assert state.full_tensor().shape == (32, 24)
    refused = []
    mine = template["local"][f"rank{rank}"]
    last = mine["fragments"][-1]
    foreign = {**last, "state": {**last["state"], "system": "x"}}
    reached = fingerprint(model)
    for wrong in (
        {f"rank{(rank + 1) % world}": mine},
        resealed(rank, mine, outer=b"damaged"),
        resealed(rank, mine, parameters=dict.fromkeys(mine["parameters"], torch.ones(3))),
        resealed(rank, mine, ranks=[0, 1]),
        resealed(rank, mine, optimizer=mine["outer"]),
        resealed(rank, mine, fragments=[*mine["fragments"][:-1], foreign]),
    ):
        try:
            local.load_state_dict(wrong)
        except GradstatsError as error:
            refused.append(str(error))
        assert fingerprint(model) == reached
    return expected, reached, refused


def not_finite(rank, world):
    """One shard of one replica is not finite: every rank says so, and the training can go on."""
    model, optimizer, local = built("topk with decay", world)
    with local:
        trained(model, rank, optimizer, 0, H - 1)
        held = model[0].weight.to_local().detach()
        kept = held.clone()
        if rank == 0:
            held[0, 0] = float("nan")
        said = ""
        try:
            optimizer.zero_grad()  # no forward pass, which would spread it over the replica
            optimizer.step()
        except NonFiniteGradientError as error:
            said = str(error)
        held.copy_(kept)
        losses = trained(model, rank, optimizer, H, 2 * H)
    return said, losses, fingerprint(model)


def ignored(rank, world, path):
    """Capture a model of which a parameter is not sharded: rank 0 of a replica holds it."""
    torch.manual_seed(0)
    model, mesh = network(), meshed(world)
    shard(model, mesh["shard"], ignored_params={model[4].bias})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    group = mesh["replicate"].get_group()
    local = LocalSteps(model, optimizer, steps=H, process_group=group)
    with Capture(path, model) as capture:
        capture.follow(local)
        with local:
            trained(model, rank, optimizer, 0, 2 * H)
    return local.exchanges


def refusals(rank, world, path):
    """Return what is said of groups and captures that do not fit."""
    mesh, said = meshed(world), {}
    model = shard(network(), mesh["shard"])
    both = shard(network(), mesh)
    crossed = [dist.new_group(pair) for pair in ([0, 3], [1, 2])][rank in (1, 2)]
    gathered_now = fully_shard(network(), mesh=mesh["shard"])
    with torch.no_grad():
        gathered_now(batch(0, rank, gathered_now))
    frozen = network()
    frozen[0].requires_grad_(False)
    fully_shard(frozen[0], mesh=mesh["shard"])
    same = mesh["replicate"]
    for label, make in {
        "all ranks": lambda: local_of(model, None),
        "one replica": lambda: local_of(model, mesh["shard"]),
        "both dimensions": lambda: local_of(both, mesh["replicate"]),
        "other shards": lambda: local_of(model, crossed),
        "gathered": lambda: local_of(gathered_now, same),
        "frozen": lambda: local_of(frozen, same),
        "clip": lambda: local_of(model, same, compressor=TopK(0.1), clip=1.0),
        "decay": lambda: local_of(model, same, compressor=TopK(0.1), weight_decay=0.1),
        "local": lambda: Capture(path, model, kinds=["local"]).follow(
            local_of(model, mesh["replicate"])
        ),
    }.items():
        try:
            make()
        except GradstatsError as error:
            said[label] = str(error)
    return said


def local_of(model, mesh, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    return LocalSteps(model, optimizer, process_group=group, **options)


def one_shard(rank, world, name):
    """One shard a replica: the same bits as local steps of the model in one piece."""
    found = []
    for sharded in (True, False):
        model, group = network(), None
        if sharded:
            mesh = mesh_of(world, 1)
            fully_shard(model, mesh=mesh["shard"])
            group = mesh["replicate"].get_group()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        local = LocalSteps(model, optimizer, outer, H, process_group=group, **OPTIONS[name]())
        with local:
            trained(model, rank, optimizer, 0, 18)
        found.append(fingerprint(model))
    return found


def lost_rank(rank, world, folder):
    """Leave the error of each rank that stays in a file: one is gone."""
    model, optimizer, local = built("topk with decay", world)
    try:
        with local:
            trained(model, rank, optimizer, 0, 2 * H - 1)
            if rank == 3:
                os._exit(0)
            optimizer.zero_grad()  # no forward pass: it would be FSDP2's to say who is lost
            optimizer.step()
    except ExchangeError as error:
        (folder / f"{rank}").write_text(str(error), encoding="utf-8")
    os._exit(0)


def two_ranks(rank, world):
    """Return what every case for two ranks returned."""
    return {name: one_shard(rank, world, name) for name in ("dense", "topk with decay", "delayed")}


def resuming(rank, world, folder):
    """Return what every case of resuming returned."""
    return {
        name: resumes(rank, world, name, f"{folder}/{name}")
        for name in ("topk with decay", "patterns", "delayed")
    }


def four_ranks(rank, world, folder):
    """Return what every other case for four ranks returned: processes take longer to start than these to run."""
    found = {f"learns, {name}": learns(rank, world, name, folder) for name in OPTIONS}
    found["not finite"] = not_finite(rank, world)
    found["ignored"] = ignored(rank, world, f"{folder}/ignored.zarr")
    found["refusals"] = refusals(rank, world, f"{folder}/refused.zarr")
    return found
