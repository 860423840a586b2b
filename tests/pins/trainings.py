"""A dozen short trainings with a capture; their gradients are the same bits on every processor."""

from __future__ import annotations

import torch
from pins.model import Model, backward
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from capture import Capture, at, logarithmic
from gradstats.compressors import TopK, make_compressor
from gradstats.hooks import (
    CompressionState,
    ErrorFeedback,
    LocalSteps,
    MomentumCorrection,
    compression_hook,
    shard_hook,
)

STEPS = 7


def _run(capture, model, rank=0, parts=1):
    with capture:
        for step in range(STEPS):
            model.zero_grad()
            for part in range(parts):
                backward(model, rank, step, part)
            capture.step(loss=step / 2, learning_rate=0.1)


def plain(path, schedule=1, parts=1, **options):
    model = Model()
    if "parameters" in options:
        model.scale.requires_grad_(False)
    _run(Capture(path, model, schedule, **options), model, parts=parts)


PLAIN = {
    "plain": {"schedule": 2},
    "bfloat16, compressed": {"dtype": "bfloat16", "compress": True},
    "length known": {"total_steps": STEPS, "compress": True},
    "sketches": {"store": "sketches"},
    "sketches, length known": {"store": "sketches", "total_steps": STEPS},
    "some layers": {"parameters": ["*s", "ker*"]},
    "logarithmic, later": {"schedule": logarithmic(4), "start_step": 100, "metadata": {"a": [1]}},
    "at": {"schedule": at([1, 4])},
    "accumulated": {"parts": 2},
}
"""Trainings of one process without DDP."""


def exchanged(rank, path, state, hook, **options):
    """A training with DDP whose hook is captured."""
    ddp = DDP(state.pop("model"))
    capture = Capture(path, ddp, **options)
    made = state.pop("state")
    if hook is not None:
        ddp.register_comm_hook(*capture.wrap(made, hook))
    _run(capture, ddp, rank)


def _topk(memory=None, **options):
    model = Model()
    state = CompressionState(
        TopK(0.1), memory=memory, named_parameters=model.named_parameters(), **options
    )
    return {"model": model, "state": state}


def ddp(rank, path, name):
    if name == "no hook":
        exchanged(rank, path, {"model": Model(), "state": None}, None)
    elif name == "all-reduce":
        exchanged(rank, path, {"model": Model(), "state": None}, allreduce_hook, schedule=3)
    elif name == "error feedback":
        exchanged(rank, path, _topk(diagnose_every=2), compression_hook)
    elif name == "momentum, bfloat16":
        state = _topk(MomentumCorrection(0.5), dense_below=5)
        exchanged(rank, path, state, compression_hook, dtype="bfloat16", compress=True)
    elif name == "sketches of the corrected":
        options = {"kinds": ["corrected"], "store": "sketches"}
        exchanged(rank, path, _topk(), compression_hook, **options)
    elif name == "one rank":
        exchanged(rank, path, _topk(), compression_hook, ranks=[0], schedule=2)


DDPS = (
    *("no hook", "all-reduce", "error feedback", "momentum, bfloat16"),
    *("sketches of the corrected", "one rank"),
)


def local(rank, path, name):
    """Local steps that a capture follows."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"compressor": TopK(0.1), "memory": ErrorFeedback(0.5)} if name == "topk" else {}
    steps = LocalSteps(model, optimizer, None, 2, **options)
    with Capture(path, model) as capture:
        capture.follow(steps)
        with steps:
            for step in range(STEPS // 2 * 2):
                optimizer.zero_grad()
                backward(model, rank, step)
                capture.step(loss=step / 2, learning_rate=0.1)
                optimizer.step()


def sharded(rank, path, name):
    """FSDP2: shards over both ranks, or two replicas with a hook between them."""
    model = Model()
    hook = name == "hook"
    mesh = init_device_mesh(
        "cpu", (2, 1) if hook else (1, 2), mesh_dim_names=("replicate", "shard")
    )
    fully_shard(model, mesh=mesh["shard"])
    if hook:
        shard_hook(model, mesh["replicate"], lambda: make_compressor("topk", 0.1), ErrorFeedback)
    kinds = None if hook else ("gradient", "local")
    _run(Capture(path, model, kinds=kinds), model, rank)


def of_two_ranks(rank, world, folder):
    """Run all trainings of two ranks: processes take longer to start than these to run."""
    for name in DDPS:
        ddp(rank, f"{folder}/ddp, {name}.zarr", name)
    for name in ("dense", "topk"):
        local(rank, f"{folder}/local steps, {name}.zarr", name)
    for name in ("shards", "hook"):
        sharded(rank, f"{folder}/sharded, {name}.zarr", name)


def of_one_process(folder):
    for name, options in PLAIN.items():
        plain(f"{folder}/{name}.zarr", **options)
