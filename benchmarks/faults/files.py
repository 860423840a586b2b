"""Mutated files of every kind that is read: the truth or one line, in bounded time and memory, and no code is run."""

from __future__ import annotations

import functools
import json
import pickle
import random
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.traces import write

from faults.processes import check_line
from gradstats.errors import GradstatsError
from gradstats.network import Network, Work
from gradstats.primitives import numel_of
from gradstats.trace import create_trace, is_trace
from gradstats.trace.sources import TraceSource, open_source, open_sources

NUMEL = 620
MEMORY = 1 << 30
"""Bytes that reading may take beyond what the process has: the files have some thousand."""


def _array(path: Path) -> None:
    np.save(path, np.random.default_rng(0).laplace(size=NUMEL).astype("f4"))


def _archive(path: Path) -> None:
    x = np.random.default_rng(0).laplace(size=NUMEL).astype("f4")
    np.savez(path, a=x[:600].reshape(30, 20), b=x[600:])


def _tensors(path: Path) -> None:
    x = torch.from_numpy(np.random.default_rng(0).laplace(size=NUMEL).astype("f4"))
    torch.save({"a": x[:600].clone().view(30, 20), "b": x[600:].clone()}, path)


def _pickle(path: Path) -> None:
    x = np.random.default_rng(0).laplace(size=NUMEL).astype("f4")
    path.write_bytes(pickle.dumps({"a": x, "b": print}))


def _safetensors(path: Path) -> None:
    from safetensors.numpy import save_file

    x = np.random.default_rng(0).laplace(size=NUMEL).astype("f4")
    save_file({"a": x[:600].reshape(30, 20).copy(), "b": x[600:].copy()}, path)


def _trace(path: Path, **options: Any) -> None:
    from support.traces import LAYERS

    create_trace(path, LAYERS, world_size=2, metadata={"model": "linear"})
    write(path, range(3), **options)


def _network(path: Path) -> None:
    Network.of_link(50e-6, 1e-9, {"select": 1e-9}).save(path)


KINDS: dict[str, Callable[[Path], None]] = {
    "a.npy": _array,
    "a.npz": _archive,
    "a.pt": _tensors,
    "pickled.pt": _pickle,
    "a.safetensors": _safetensors,
    "a.zarr": _trace,
    "compressor.zarr": functools.partial(_trace, compression=True, compress=True),
    "sketches.zarr": functools.partial(_trace, store="sketches"),
    "network.json": _network,
}


def _steps(path: Path) -> None:
    path.mkdir()
    for i in range(3):
        _tensors(path / f"g{i}.pt")


def _shards(path: Path) -> None:
    from safetensors.numpy import save_file

    path.mkdir()
    x = np.random.default_rng(0).laplace(size=NUMEL).astype("f4")
    save_file({"a": x[:600].copy()}, path / "m-1-of-2.safetensors")
    save_file({"b": x[600:].copy()}, path / "m-2-of-2.safetensors")
    places = {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}
    (path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _checkpoint(path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    x = torch.from_numpy(np.random.default_rng(0).laplace(size=NUMEL).astype("f4"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": x[:600].clone(), "b": x[600:].clone()}, checkpoint_id=path, no_dist=True)


def _nested(path: Path) -> None:
    x = torch.from_numpy(np.random.default_rng(0).laplace(size=NUMEL).astype("f4"))
    torch.save({"w": x, "loss": torch.tensor(1.0), "epoch": 3, "more": [1, None]}, path)


DUMPS: dict[str, Callable[[Path], None]] = {
    "steps": _steps,
    "shards": _shards,
    "checkpoint": _checkpoint,
    "nested.pt": _nested,
    "b.npz": _archive,
    "b.safetensors": _safetensors,
}
"""What :mod:`gradstats.trace.dumps` reads, and files again."""
_OF_INDEX = ("torch.distributed.checkpoint.", "torch", "collections", "builtins", "pathlib")


@functools.cache
def _originals() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="gradstats-originals-"))
    for name, make in (KINDS | DUMPS).items():
        make(folder / name)
    return folder


NUMBERS = [0, -1, 1, 2**31, 2**63, -(2**63), 10**12, 10**30, 1e308, "Infinity", "NaN"]


def _mutate(raw: bytes, rng: random.Random) -> bytes:
    """Change a few bytes, or a number in the text, or move, repeat or lose a part."""
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 3])):
        n = len(data)
        at = rng.randrange(n + 1)
        other = rng.randrange(n + 1)
        kind = rng.randrange(8)
        if kind == 0 and n:
            data[at % n] ^= 1 << rng.randrange(8)
        elif kind == 1 and n:
            data[at % n] = rng.choice([0, 255, 127, 128, ord("{"), ord("["), ord('"')])
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.choice([1, 4, 64]))
        elif kind == 4:
            del data[at : at + rng.choice([1, 2, 8, 100])]
        elif kind == 5:
            data[at:at] = data[other : other + 64]
        elif kind == 6:
            digits = [i for i, b in enumerate(data) if 48 <= b < 58 and i < 4096]
            if digits:
                i = rng.choice(digits)
                data[i : i + 1] = str(rng.choice(NUMBERS)).encode()
        else:
            data[at : at + 8] = (2 ** rng.randrange(64) - 1).to_bytes(8, "little")
    return bytes(data)


def _damage(path: Path, rng: random.Random) -> tuple[Path, bytes, bool]:
    """Damage a file, or one of a trace's.

    Returns the file, what was in it, and whether a whole other one is in its place now.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    victim = rng.choice(files)
    act = rng.random()
    before = victim.read_bytes()
    whole = path.is_file()
    if whole or act < 0.8:
        victim.write_bytes(_mutate(before, rng))
    elif act < 0.9:
        victim.unlink()
    else:
        victim.write_bytes(rng.choice(files).read_bytes())
    return victim, before, act >= 0.9 and not whole


class _Guard:
    """Notes what a reader must not do: run foreign code, or open what it was not given."""

    def __init__(self) -> None:
        self.forbidden: list[str] = []
        self.watching = False
        self.folder = ""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        if event in ("os.system", "subprocess.Popen", "os.exec", "pickle.find_class"):
            if event != "pickle.find_class" or not str(arguments[0]).startswith(_OF_INDEX):
                self.forbidden.append(f"{event} {arguments[:2]}")
        elif event == "open" and isinstance(arguments[0], str):
            if str(arguments[1]).startswith(("w", "a", "x")):
                self.forbidden.append(f"opened {arguments[0]} for writing")
            elif not arguments[0].startswith((self.folder, sys.prefix, sys.base_prefix, "/proc")):
                self.forbidden.append(f"opened {arguments[0]}")


@functools.cache
def _guard() -> _Guard:
    read(_originals() / "a.zarr")  # what is imported late is imported now
    for name in KINDS | DUMPS:
        _outcome(_originals() / name)
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limit))
    return _Guard()


def read(path: Path) -> dict[str, Any]:
    """Read everything that a file holds, as the commands do."""
    if path.name == "network.json":
        network = Network.load(path)
        works = [Work("all_reduce", 1e6), Work("all_gather", 1e3), Work("select", 1e6)]
        return {"seconds": network.seconds(works, 4), "link": network.link()}
    source = open_source(path) if path.is_file() or is_trace(path) else open_sources(path)[0]
    found: dict[str, Any] = {}
    for rank, kind, step in source.entries():
        if isinstance(source, TraceSource) and source.sketched(rank, kind):
            sums = [s.moments for s in source.stored_sketches(rank, kind, step)]
            found[f"{rank} {kind} {step}"] = repr(sums)
        else:
            values = np.asarray(source.read(rank, kind, step).values)
            found[f"{rank} {kind} {step}"] = values.copy()
    if isinstance(source, TraceSource):
        for rank in source.trace.ranks:
            for name, column in source.trace.scalars(rank).items():
                found[f"{rank} {name}"] = np.asarray(column)
            for name, column in source.trace.compression(rank).items():
                found[f"{rank} compression {name}"] = column
    return found


def _outcome(path: Path) -> dict[str, Any] | None:
    """Return what is read; None where it is refused."""
    try:
        return read(path)
    except GradstatsError as error:
        check_line(error)
        return None


@functools.cache
def _true(name: str) -> dict[str, Any] | None:
    return _outcome(_originals() / name)


def mutated(number: int, folder: Path) -> str:
    """Read a mutated file."""
    return _mutated(number, list(KINDS)[number % len(KINDS)])


def mutated_dump(number: int, folder: Path) -> str:
    """Read a mutated dump, shard or checkpoint."""
    return _mutated(number, list(DUMPS)[number % len(DUMPS)])


def _mutated(number: int, name: str) -> str:
    guard = _guard()
    rng = random.Random(number)
    path = _originals() / name
    true = _true(name)
    victim, before, exchanged = _damage(path, rng)
    guard.folder, guard.forbidden, guard.watching = str(path.parent), [], True
    try:
        found = _outcome(path)
        files = [path] if path.is_file() else path.rglob("*")
        size = sum(p.stat().st_size for p in files)
    finally:
        guard.watching = False
        victim.write_bytes(before)
    assert not guard.forbidden, guard.forbidden
    if found is None:
        return "one line"
    for values in found.values():
        if isinstance(values, np.ndarray):
            assert numel_of(values) * 4 <= 8 * size + 4096, f"{values.shape} from {size} bytes"
    if exchanged:  # it has a checksum of its own, and nothing says where it was
        return "a chunk in another's place"
    if path.suffix == ".zarr":  # checksums: what is read is what was written
        assert true is not None
        for key, values in found.items():
            if key in true:
                assert np.array_equal(
                    np.asarray(values),
                    np.asarray(true[key]),
                    equal_nan=isinstance(values, np.ndarray),
                ), key
    return "read"
