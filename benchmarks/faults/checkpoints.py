"""Checkpoints that were altered: refused in one line with nothing restored, or the same as before."""

from __future__ import annotations

import copy
import functools
import io
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from faults.options import Net, _gradients
from faults.processes import check_line
from faults.resumes import SYSTEMS
from faults.wire import _group
from gradstats.compressors import TopK, make_compressor
from gradstats.errors import GradstatsError, InputError
from gradstats.hooks import (
    AdamCorrection,
    CompressionState,
    ErrorFeedback,
    LocalSteps,
    MomentumCorrection,
    shard_hook,
)
from gradstats.hooks.contents import _checksums, seal
from gradstats.hooks.shards import exchange

MEMORIES: dict[str, Callable[[], Any]] = {
    "its own": lambda: None,
    "momentum": lambda: MomentumCorrection(0.9),
    "adam": AdamCorrection,
}


class Subject(NamedTuple):
    """What is saved and restored, and what shows all of it.

    Attributes
    ----------
    state : CompressionState, ShardHook or LocalSteps
        What is saved.
    model : torch.nn.Module
        Its model.
    """

    state: Any
    model: torch.nn.Module

    def seen(self) -> dict[str, str]:
        """Return the checksums of everything."""
        content = self.state.state_dict()["rank0"]
        weights = {n: p.detach() for n, p in self.model.state_dict().items()}
        local = {n: getattr(p, "to_local", lambda p=p: p)() for n, p in weights.items()}
        return dict(_checksums({"state": content, "model": local}))


def _replica(steps: int, system: str, memory: str) -> Subject:
    model = Net()
    state = CompressionState(
        SYSTEMS[system](),
        memory=MEMORIES[memory](),
        named_parameters=model.named_parameters(),
        dense_below=20,
    )
    for step in range(steps):
        exchange(state, _gradients(model, steps, step))
    return Subject(state, model)


def _sharded(steps: int, name: str) -> Subject:
    model = Net()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.first, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    made = shard_hook(
        model,
        mesh["replicate"],
        lambda: make_compressor(name, 0.2),
        lambda: MomentumCorrection(0.9),
    )
    for step in range(steps):
        model.zero_grad()
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * steps + step))
        model(x).square().mean().backward()
    return Subject(made, model)


def _local(steps: int, about: str) -> Subject:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    options: dict[str, Any] = {
        "dense": {},
        "sparse": {"compressor": TopK(0.2), "memory": ErrorFeedback(0.9)},
        "delayed": {"compressor": TopK(0.2), "fragments": 2, "delay": 1},
    }[about]
    training = LocalSteps(model, optimizer, outer, 3, **options)
    training.__enter__()
    for step in range(2 * steps):
        optimizer.zero_grad()
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * steps + step))
        model(x).square().mean().backward()
        optimizer.step()
    training._optimizers.detach()
    return Subject(training, model)


def _kinds() -> Iterator[Callable[[int], Subject]]:
    for about in ("dense", "sparse", "delayed"):
        for _ in range(3):  # there is more in it than in other kinds
            yield functools.partial(_local, about=about)
    for name in ("topk", "warm-exact", "randomk", "micro"):
        yield functools.partial(_sharded, name=name)
    for system in SYSTEMS:
        for memory in MEMORIES:
            if system != "none" and system != "lags":
                yield functools.partial(_replica, system=system, memory=memory)


KINDS = list(_kinds())


class _Saved(NamedTuple):
    target: Subject
    own: dict[str, Any]
    """What brings the target back."""
    before: dict[str, str]
    entry: dict[str, Any]
    after: dict[str, str]
    file: bytes
    folder: Path


@functools.cache
def _saved(number: int) -> _Saved | None:
    _group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            source, target = KINDS[number](3), KINDS[number](2)
        except InputError:
            return None  # such a memory does not go with the compressor
    own, entry = (copy.deepcopy(each.state.state_dict()) for each in (target, source))
    before = target.seen()
    target.state.load_state_dict(entry)
    after = target.seen()
    target.state.load_state_dict(own)
    assert target.seen() == before
    stream, folder = io.BytesIO(), Path(tempfile.mkdtemp(prefix="gradstats-"))
    torch.save(entry, stream)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"state": entry}, checkpoint_id=str(folder))
    return _Saved(target, own, before, entry, after, stream.getvalue(), folder)


def _places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a checkpoint, dictionaries and lists included."""
    items: Any = ()
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    for key, each in items:
        yield (*path, key)
        yield from _places(each, (*path, key))


def _at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def _other(value: Any, rng: random.Random) -> Any:
    """Return something else in the place of a value."""
    if isinstance(value, torch.Tensor) and value.numel():
        changed = value.clone()
        flat = changed.view(-1).view(torch.uint8)
        flat[rng.randrange(flat.numel())] ^= 1 << rng.randrange(8)
        return rng.choice(
            [
                changed,
                value[None],
                value.double(),
                value.to(torch.int32),
                torch.full_like(value, float("nan")),
                torch.full_like(value, float("inf")),
                value.flatten()[:-1],
                value.flatten()[:1],
                torch.zeros_like(value),
                value.tolist(),
                None,
            ]
        )
    if isinstance(value, bytes) and value:
        raw = bytearray(value)
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        return rng.choice([bytes(raw), value[: len(value) // 2], b"", "text", None])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, -1, str(value), None, 2**40, float("nan")])
    return rng.choice([None, 3, "\x1b[2J", {}, [], torch.ones(2)])


_INVALID = (
    lambda value: value[None],
    lambda value: value.to(torch.int32),
    lambda value: torch.full_like(value, float("nan")),
    lambda value: torch.full_like(value, float("inf")),
    lambda value: torch.cat([value.flatten(), value.flatten()]),
    lambda value: value.tolist(),
    lambda value: None,
)
"""What no tensor of a checkpoint may be, whatever its checksum says."""


def _mutated(saved: _Saved, rng: random.Random, folder: Path) -> Any:
    """Return an altered checkpoint; raise what the library that reads it does."""
    kind = rng.choice(["value", "lost", "strange", "sealed", "file", "distributed", "distributed"])
    if kind == "file":
        return torch.load(io.BytesIO(_flipped(saved.file, rng)), weights_only=True)
    if kind == "distributed":
        place = folder / "checkpoint"
        shutil.copytree(saved.folder, place)
        (file,) = place.glob("*.distcp")
        file.write_bytes(_flipped(file.read_bytes(), rng))
        holder = {"state": copy.deepcopy(saved.own)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(holder, checkpoint_id=str(place))
        return holder["state"]
    entry = copy.deepcopy(saved.entry)
    content = entry["rank0"]
    places = [p for p in _places(content) if p]
    if kind == "sealed":  # what was wrong when it was saved
        del content["version"], content["contents"]
        tensors = [
            p
            for p in places
            if p[0] in content
            and isinstance(_at(content, p), torch.Tensor)
            and _at(content, p).numel()
        ]
        if tensors and rng.random() < 0.7:
            path = rng.choice(tensors)
            _at(content, path[:-1])[path[-1]] = rng.choice(_INVALID)(_at(content, path))
        else:
            keys = [p for p in places if p[0] in content and isinstance(p[-1], str)]
            path = rng.choice(keys)
            # what is empty holds nothing that could be lost
            if _at(content, path) not in ({}, [], None) or isinstance(
                _at(content, path), torch.Tensor
            ):
                del _at(content, path[:-1])[path[-1]]
        return seal(0, content)
    path = rng.choice(places)
    parent = _at(content, path[:-1])
    if kind == "lost":
        del parent[path[-1]]
    elif kind == "strange" and isinstance(parent, dict):
        parent["strange"] = copy.deepcopy(parent[path[-1]])
    else:
        parent[path[-1]] = _other(parent[path[-1]], rng)
    return entry


def _flipped(data: bytes, rng: random.Random) -> bytes:
    raw, at = bytearray(data), rng.randrange(len(data))
    kind = rng.choice(["flip", "flip", "flip", "zeros", "cut"])
    if kind == "flip":
        raw[at] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        raw[at : at + 64] = bytes(len(raw[at : at + 64]))
    else:
        del raw[at:]
    return bytes(raw)


def mutated(number: int, folder: Path) -> str:
    """Alter one checkpoint and load it."""
    rng = random.Random(number)
    saved = _saved(number % len(KINDS))
    if saved is None:
        return "not combined"
    try:
        altered = _mutated(saved, rng, folder)
    except (Exception, CheckpointException):  # which is no Exception
        return "refused by torch"
    refusal = None
    try:
        saved.target.state.load_state_dict(altered)
    except GradstatsError as error:
        check_line(error)
        refusal = str(error)
    if refusal is not None:
        assert saved.target.seen() == saved.before, f"half restored: {refusal}"
        return "refused with nothing restored"
    seen = saved.target.seen()
    saved.target.state.load_state_dict(saved.own)
    odd = [key for key in {**seen, **saved.after} if seen.get(key) != saved.after.get(key)]
    assert not odd, f"accepted as another state: {odd[:3]}"
    assert saved.target.seen() == saved.before
    return "the same"
