"""Pairs of ranks that were given different things: refused on both, in one line that names what differs."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from faults.processes import Child, check_line, start_ranks
from gradstats.compressors import (
    COMPRESSORS,
    ChunkTopK,
    GlobalHistogram,
    Layerwise,
    RandomK,
    SignSGD,
    SparseCompressor,
    TopK,
    codecs,
    make_compressor,
    make_selector,
)
from gradstats.errors import InputError
from gradstats.hooks import (
    AdamCorrection,
    CompressionState,
    ErrorFeedback,
    LocalSteps,
    MomentumCorrection,
    shard_hook,
)
from gradstats.hooks.shards import exchange

__all__ = ["PAIRS", "pair"]

STEPS = 4


class Net(nn.Module):
    """A few parameters; a rank may have others."""

    def __init__(self, turned: bool = False, width: int = 12, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        for name in ("second", "first") if turned else ("first", "second"):
            setattr(self, name, nn.Linear(width, width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return something to differentiate."""
        return self.second(self.first(x.to(self.first.weight.dtype)).relu())


class Pair(NamedTuple):
    """Two ranks that differ.

    Attributes
    ----------
    name : str
        What it is.
    train : callable
        Trains with what it is given, and yields after every step.
    here, there : dict
        What ranks 0 and 1 give it.
    named : str
        What the error has to name.
    """

    name: str
    train: Callable[..., Iterator[Any]]
    here: dict[str, Any]
    there: dict[str, Any]
    named: str


def _gradients(net: nn.Module, rank: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return [(p, torch.randn(p.shape, generator=made, dtype=p.dtype)) for p in net.parameters()]


def replicas(
    rank: int,
    make: Callable[[], Any],
    net: Callable[[], nn.Module] = Net,
    named: bool = True,
    before: Callable[[int, CompressionState], None] = lambda step, state: None,
    memory: Callable[[], Any] = lambda: None,
    **options: Any,
) -> Iterator[Any]:
    """Exchange gradients, as under DDP."""
    model = net()
    names = model.named_parameters() if named else None
    state = CompressionState(make(), memory=memory(), named_parameters=names, **options)
    for step in range(STEPS):
        before(step, state)
        pairs = _gradients(model, rank, step)
        kept = [g.clone() for _, g in pairs]
        try:
            exchange(state, pairs)
        except InputError:
            assert all(map(torch.equal, kept, (g for _, g in pairs))), (
                "written before it was refused"
            )
            raise
        yield step


def shards(
    rank: int, make: Callable[[], Any], micro: int = 1, fed: bool = True, **options: Any
) -> Iterator[Any]:
    """Train two replicas of one shard each, with a hook between them."""
    model = Net()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    shard_hook(model, mesh["replicate"], make, ErrorFeedback if fed else None, **options)
    for step in range(STEPS):
        model.zero_grad()
        for part in range(micro):
            model.set_requires_all_reduce(part == micro - 1)
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
        yield step


def local(
    rank: int,
    steps: int = 2,
    make: Callable[[], Any] = lambda: None,
    memory: Callable[[], Any] = lambda: None,
    outer: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
    net: Callable[[], nn.Module] = Net,
    rate: float | None = None,
    extra: int = 0,
    **options: Any,
) -> Iterator[Any]:
    """Train by local steps; the outer rate may be changed on the way, or a step taken alone."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    above = outer(model.parameters())
    training = LocalSteps(
        model, optimizer, above, steps, compressor=make(), memory=memory(), **options
    )
    with training:
        for step in range(4 * STEPS + extra):
            if step == 5 and rate is not None:
                above.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            model(torch.ones(2, 12)).square().mean().backward()
            optimizer.step()
            yield step


def _later(ratio: float) -> Callable[[int, CompressionState], None]:
    """Return what sets a ratio in the middle of a training."""

    def change(step: int, state: CompressionState) -> None:
        if step == 2:
            state.compressor.ratio = ratio

    return change


def _loaded(ratio: float) -> Callable[[int, CompressionState], None]:
    """Return what loads the checkpoint of a training with another ratio before the first step."""

    def load(step: int, state: CompressionState) -> None:
        if step == 0:
            other = copy.deepcopy(state.state_dict())
            from gradstats.hooks.checkpoint import pack_state, unpack_state
            from gradstats.hooks.contents import seal

            entry = next(iter(other.values()))
            content = {k: v for k, v in entry.items() if k not in ("version", "contents")}
            saved = unpack_state(content["compressor"], "compressor")
            for key in ("capacity", "last", "step"):
                if key in saved:
                    saved[key] = round(ratio * 1000)
                    break
            content["compressor"] = pack_state(saved)
            state.load_state_dict(seal(dist.get_rank(), content))

    return load


def _systems() -> dict[str, Callable[..., Any]]:
    made: dict[str, Callable[..., Any]] = {
        name: functools.partial(make_compressor, name) for name in COMPRESSORS if name != "none"
    }
    made["lags"] = functools.partial(make_compressor, "lags", adaptive=False)
    made["layerwise"] = lambda ratio, **o: Layerwise(
        lambda name, numel: make_selector("topk", 0.1), ratio=ratio, **o
    )
    made["histogram of all"] = GlobalHistogram
    made["chunks"] = lambda ratio, **o: SparseCompressor(ChunkTopK(ratio), **o)
    return made


def _pairs() -> Iterator[Pair]:
    systems = _systems()
    names = list(systems)
    for i, (name, make) in enumerate(systems.items()):
        base = {"make": functools.partial(make, 0.1)}

        def differ(what: str, named: str, here: Any = None, /, base=base, name=name, **there: Any):
            return Pair(
                f"{name}: {what}", replicas, {**base, **(here or {})}, {**base, **there}, named
            )

        has_ratio = make(0.1).has_ratio
        feedback = make(0.1).feedback
        other = systems[names[(i + 1) % len(names)]]
        yield differ("another compressor", "compressor", make=functools.partial(other, 0.1))
        if has_ratio:
            yield differ("ratio", "ratio", make=functools.partial(make, 0.2))
            yield differ("ratio from the third step", "ratio", before=_later(0.3))
            yield differ("schedule", "ratio", {"ratio_at": lambda s: 0.2}, ratio_at=lambda s: 0.3)
            yield differ(
                "schedule at one step",
                "ratio",
                {"ratio_at": lambda s: 1 if s == 3 else 0.2},
                ratio_at=lambda s: 0.2,
            )
        yield differ("dense_below", "dense_below", dense_below=20)
        yield differ("exclude", "exclude", exclude=["*.bias"])
        yield differ("clip", "clip", clip=1.0)
        yield differ("weight decay", "weight_decay", weight_decay=0.1)
        yield differ("policy", "nonfinite", nonfinite="zero")
        yield differ("diagnosis", "diagnose_every", diagnose_every=2)
        yield differ("verification", "verify_every", verify_every=1)
        yield differ("order of parameters", "parameter 0", net=functools.partial(Net, turned=True))
        yield differ("shapes", "parameter 0", net=functools.partial(Net, width=13))
        yield differ(
            "dtype of parameters", "parameter 0", net=functools.partial(Net, dtype=torch.float64)
        )
        if feedback:
            yield differ("memory", "memory", memory=lambda: MomentumCorrection(0.9))
            yield differ("no memory", "memory", error_feedback=False)
            yield differ("decay", "memory", memory=lambda: ErrorFeedback(0.9))
        if {"capacity", "last", "step"} & make(0.1).state_dict().keys():
            yield differ("a checkpoint", "state", before=_loaded(0.9))
        if "indices" in (codecs(name) if name in COMPRESSORS else ()):
            yield differ("indices", "codec", make=functools.partial(make, 0.1, indices="rice"))
        if "values" in (codecs(name) if name in COMPRESSORS else ()):
            yield differ("values", "codec", make=functools.partial(make, 0.1, values="int8"))
        if name in ("randomk", "signsgd", "ef-signsgd", "ssdm", "cascading", "marsit"):
            yield differ("seed", "seed", make=functools.partial(make, 0.1, seed=1))
    for a, b, what in (
        ({"make": lambda: make_selector("sidco-e", 0.1, stages=2)}, {}, "stages"),
        ({"make": lambda: make_selector("hard", 0.1, threshold=0.2)}, {}, "threshold"),
        ({"make": lambda: make_selector("dgc", 0.1, sample_ratio=0.5)}, {}, "sample_ratio"),
        ({"make": lambda: make_selector("redsync", 0.1, interval=3)}, {}, "interval"),
        ({"make": lambda: SignSGD(scale=1.0)}, {}, "scale"),
        ({"make": lambda: RandomK(0.1, unbiased=True)}, {}, "compressor"),
        ({"make": lambda: SparseCompressor(TopK(0.1), average="senders")}, {}, "average"),
        ({"make": lambda: SparseCompressor(TopK(0.1), dense_above=0.1)}, {}, "dense_above"),
        ({"memory": lambda: MomentumCorrection(0.9)}, {"memory": lambda: MomentumCorrection(0.8)}, "momentum"),
        ({"memory": lambda: AdamCorrection()}, {"memory": lambda: AdamCorrection(eps=1e-6)}, "eps"),
    ):  # fmt: skip
        plain = {
            "stages": lambda: make_selector("sidco-e", 0.1, stages=3),
            "threshold": lambda: make_selector("hard", 0.1, threshold=0.1),
            "sample_ratio": lambda: make_selector("dgc", 0.1),
            "interval": lambda: make_selector("redsync", 0.1),
            "scale": SignSGD,
        }.get(what, lambda: TopK(0.1))
        yield Pair(f"rules: {what}", replicas, {"make": plain, **a}, {"make": plain, **b}, what)
    yield from _shard_pairs()
    yield from _local_pairs()


def _shard_pairs() -> Iterator[Pair]:
    for name in (
        "topk",
        "warm-exact",
        "randomk",
        "micro",
        "signsgd",
        "cltk",
        "marsit",
        "dense-bf16",
    ):
        make = functools.partial(make_compressor, name, 0.2)
        base = {"make": make, "fed": make().feedback}

        def differ(what: str, named: str, base=base, name=name, **there: Any) -> Pair:
            return Pair(f"shards, {name}: {what}", shards, base, {**base, **there}, named)

        yield differ("micro-steps", "micro-steps", micro=2)
        yield differ("policy", "nonfinite", nonfinite="skip")
        yield differ("verification", "verify_every", verify_every=2)
        if make().has_ratio:
            yield differ("ratio", "ratio", make=functools.partial(make_compressor, name, 0.3))
            yield differ("schedule", "ratio", ratio_at=lambda s: 1 if s == 2 else 0.2)
        if make().feedback:
            yield differ(
                "another compressor", "compressor", make=lambda: SparseCompressor(ChunkTopK(0.2))
            )
        if name in ("randomk", "signsgd", "marsit"):
            yield differ("seed", "seed", make=functools.partial(make, seed=5))


def _local_pairs() -> Iterator[Pair]:
    sparse = {"make": lambda: TopK(0.2)}
    for about, base in (("dense", {}), ("sparse", sparse), ("delayed", {**sparse, "delay": 1})):
        for what, named, there in (
            ("H", "steps", {"steps": 3}),
            ("delay", "delay", {"delay": 1 if about != "delayed" else 0}),
            ("mix", "mix", {"mix": 0.25}),
            ("fragments", "fragments", {"fragments": 2}),
            ("outer optimizer", "outer optimizer", {"outer": lambda p: torch.optim.Adam(p)}),
            ("outer rate", "outer optimizer", {"outer": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5)}),
            ("outer momentum", "outer optimizer", {"outer": lambda p: torch.optim.SGD(p, lr=0.5)}),
            ("a scheduler of one rank", "outer optimizer", {"rate": 0.1}),
            ("compressor", "compressor", {"make": lambda: ChunkTopK(0.2)}),
            ("policy", "nonfinite", {"nonfinite": "skip"}),
            ("schedule", "ratio_at", {"ratio_at": lambda s: 0.5} if base else {"dense_below": 5}),
            ("dense_below", "dense_below", {"dense_below": 20}),
            ("a model in other order", "parameter", {"net": functools.partial(Net, turned=True)}),
            ("a wider model", "parameter", {"net": functools.partial(Net, width=13)}),
            ("a step more", "", {"extra": 2}),
            ("memory", "memory", {"memory": lambda: ErrorFeedback(0.9), **sparse}),
        ):  # fmt: skip
            if what == "schedule" and not base:
                named = "dense_below"
            if what == "memory" and not base:
                named = "compressor"
            yield Pair(f"local steps, {about}: {what}", local, base, {**base, **there}, named)


PAIRS = list(_pairs())


def pair(rank: int, number: int) -> str:
    """Train the pair of a number on this rank; return the error that stopped it."""
    case = PAIRS[number % len(PAIRS)]
    try:
        for _ in case.train(rank, **(case.there if rank else case.here)):
            pass
    except InputError as error:
        check_line(error)
        if case.named not in str(error):
            return f"{case.name}: a false cause: {error}"
        return f"refused {error}"
    except Exception as error:
        return f"{case.name}: {type(error).__name__}: {error}"
    return f"{case.name}: not noticed"


def _run(rank: int, world: int, first: int, count: int, reports: Connection) -> None:
    for number in range(first, first + count):
        reports.send((number, pair(rank, number)))
        dist.barrier()  # what was refused leaves the ranks in step


_running: tuple[int, list[Child]] | None = None


def trial(number: int, folder: Path) -> str:
    """Read what both ranks of a pair say; the same two processes go through many pairs."""
    global _running
    if _running is None or _running[0] != number:
        place = Path(tempfile.mkdtemp(prefix="gradstats-"))
        _running = number, start_ranks(2, place, _run, number, 50 - number % 50)
    _, ranks = _running
    said = [rank.report(60) for rank in ranks]
    if not all(said):
        for rank in ranks:
            rank.kill()
        _running = None
        name = PAIRS[number % len(PAIRS)].name
        raise AssertionError(f"{name}: {['died' if s is None else s or 'hung' for s in said]}")
    _running = (number + 1, ranks) if (number + 1) % 50 else None
    texts = [text for _, text in said]
    assert [n for n, _ in said] == [number] * 2
    for text in texts:
        assert text.startswith("refused "), text
    assert texts[0] == texts[1], texts
    return "refused by name on both"


if __name__ == "__main__":
    print(len(PAIRS), *itertools.islice((p.name for p in PAIRS), 400), sep="\n")
