"""Checkpoints that earlier code wrote are loaded, saved again as they were, and gone on from to the bit.

``data/checkpoints.pt.xz`` has, by case, what `state_dict` returned after some steps and the updates (of local steps,
the parameters) of the next ones, with the kind of processor that made them: on others sums may be rounded otherwise.
One process is the whole group. Rewrite it with ``WRITE_PINS=1 python -m pytest tests/pins/test_checkpoints.py``.
"""

from __future__ import annotations

import io
import lzma

import pytest
import torch
from pins.model import Model, backward, flat, flat_gradient
from pins.stored import FOLDER, WRITES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from gradstats.collectives import Codec
from gradstats.compressors import (
    COMPRESSORS,
    ChunkTopK,
    GlobalHistogram,
    Layerwise,
    SparseCompressor,
    TopK,
    make_compressor,
    make_selector,
)
from gradstats.hooks import (
    AdamCorrection,
    CompressionState,
    ErrorFeedback,
    LocalSteps,
    MomentumCorrection,
    compression_hook,
    dgc_warm_up,
    shard_hook,
)

pytestmark = pytest.mark.usefixtures("one_rank")

PATH = FOLDER / "checkpoints.pt.xz"
BEFORE, AFTER = 3, 3
"""Steps before a checkpoint, and after it."""


STATES = {
    **{
        name: lambda name=name: (make_compressor(name, 0.05), {})
        for name in COMPRESSORS
        if name != "none"
    },
    "momentum": lambda: (TopK(0.05), {"memory": MomentumCorrection(0.9)}),
    "nesterov, small densely": lambda: (
        TopK(0.05),
        {"memory": MomentumCorrection(0.9, nesterov=True), "dense_below": 20},
    ),
    "decay": lambda: (TopK(0.05), {"memory": ErrorFeedback(0.9)}),
    "adam": lambda: (TopK(0.05), {"memory": AdamCorrection()}),
    "no feedback, clipped": lambda: (
        TopK(0.05),
        {"error_feedback": False, "clip": 1.0, "weight_decay": 0.1},
    ),
    "warm-up": lambda: (TopK(0.05), {"ratio_at": dgc_warm_up(2, (1.0, 0.25, 0.05))}),
    "layer by layer": lambda: (Layerwise(lambda name, numel: make_selector("dgc", 0.05)), {}),
    "one histogram": lambda: (GlobalHistogram(0.05), {}),
    "chunks, coded": lambda: (SparseCompressor(ChunkTopK(0.05), Codec("chunk")), {}),
    "program": lambda: (make_selector("sidco-e", 0.05, stages="program", interval=2), {}),
}
LOCAL = {
    "dense": dict,
    "topk with decay": lambda: {"compressor": TopK(0.1), "memory": ErrorFeedback(0.9)},
    "fragments, delayed": lambda: {"compressor": TopK(0.1), "fragments": 2, "delay": 1},
}


class Hooked:
    """DDP with a state."""

    def __init__(self, name):
        self.model = Model()
        compressor, options = STATES[name]()
        options = {"named_parameters": self.model.named_parameters(), **options}
        self.state = CompressionState(compressor, **options)
        self._ddp = None

    def step(self, number):
        if self._ddp is None:
            self._ddp = DDP(self.model)
            self._ddp.register_comm_hook(self.state, compression_hook)
        self.model.zero_grad()
        backward(self._ddp, 0, number)
        return flat_gradient(self.model).clone()


class Sharded:
    """FSDP2 with a hook between replicas."""

    def __init__(self, name):
        self.model = Model()
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(self.model, mesh=mesh["shard"])
        make = lambda: make_compressor(name, 0.05)  # noqa: E731
        self.state = shard_hook(self.model, mesh["replicate"], make, ErrorFeedback)

    def step(self, number):
        self.model.zero_grad()
        backward(self.model, 0, number)
        return torch.cat([p.grad.to_local().reshape(-1) for p in self.model.parameters()])


class Local:
    """Local steps; a step is two of them."""

    def __init__(self, name):
        self.model = Model()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        outer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.state = LocalSteps(self.model, self._optimizer, outer, 4, **LOCAL[name]())

    def step(self, number):
        for part in range(2):
            self._optimizer.zero_grad()
            backward(self.model, 0, number, part)
            self._optimizer.step()
        return flat(self.model).clone()


CASES = {f"state: {name}": (Hooked, name) for name in STATES}
CASES |= {f"shards: {name}": (Sharded, name) for name in ("topk", "warm-exact")}
CASES |= {f"local steps: {name}": (Local, name) for name in LOCAL}


def stored():
    stream = io.BytesIO(lzma.decompress(PATH.read_bytes()))
    return torch.load(stream, weights_only=True)


def same(a, b):
    """Tell whether two parts of a checkpoint hold the same; bytes are what they unpack to."""
    if isinstance(a, bytes):
        if a == b:
            return True
        return same(*(torch.load(io.BytesIO(each), weights_only=True) for each in (a, b)))
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if torch.is_tensor(a):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b or (a != a and b != b)


def written(kind):
    found = {}
    for case, (cls, name) in CASES.items():
        training = cls(name)
        for number in range(BEFORE):
            training.step(number)
        saved = io.BytesIO()
        torch.save(training.state.state_dict(), saved)
        saved.seek(0)
        state = torch.load(saved, weights_only=True)
        updates = [training.step(n).to_sparse() for n in range(BEFORE, BEFORE + AFTER)]
        found[case] = {"state": state, "updates": updates}
    stream = io.BytesIO()
    torch.save({"processor": kind, "cases": found}, stream)
    PATH.write_bytes(lzma.compress(stream.getvalue(), preset=9))


def test_checkpoints_load_and_go_on(kind):
    if WRITES:
        written(kind)
    file = stored()
    assert set(file["cases"]) == set(CASES)
    not_the_same, gone_elsewhere = [], []
    for case, (cls, name) in CASES.items():
        saved, updates = file["cases"][case]["state"], file["cases"][case]["updates"]
        training = cls(name)
        training.state.load_state_dict(saved)
        if not same(training.state.state_dict(), saved):
            not_the_same.append(case)
        for number, update in enumerate(updates, BEFORE):
            now, then = training.step(number), update.to_dense()
            close = torch.equal(now, then) or (
                kind != file["processor"] and torch.allclose(now, then, rtol=1e-5, atol=1e-6)
            )
            if not close:
                gone_elsewhere.append((case, number))
    assert not_the_same == [], "what was loaded is saved otherwise"
    assert gone_elsewhere == [], "steps after a checkpoint are others"
