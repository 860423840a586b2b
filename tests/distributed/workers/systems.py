"""What the worker processes of test_systems.py run: each system on gradients known to the test."""

import functools
import pickle
import random

import numpy as np
import torch

from gradstats.compressors.base import Compressor
from gradstats.compressors.cltk import CLTk
from gradstats.compressors.micro import MiCRO
from gradstats.compressors.randomk import RandomK
from gradstats.compressors.redsync import RedSync
from gradstats.compressors.selectors import TopK
from gradstats.compressors.shared import GlobalHistogram
from gradstats.compressors.sparse import SparseCompressor

RATIO = 0.02
SYSTEMS = {
    "micro": lambda: MiCRO(RATIO),
    "micro-paper": lambda: MiCRO(RATIO, "paper", threshold=2.0),
    "global-histogram": lambda: GlobalHistogram(RATIO),
    "cltk": lambda: CLTk(RATIO),
    "randomk": lambda: RandomK(RATIO, seed=3),
    "randomk-unbiased": lambda: RandomK(RATIO, unbiased=True, seed=3),
    "redsync-quant": lambda: RedSync(RATIO, True, dense_below=0),
    "redsync-quant-search": lambda: RedSync(RATIO, True, dense_below=0, search_above=0),
    "redsync": lambda: RedSync(RATIO, dense_below=0),
    "redsync-search": lambda: RedSync(RATIO, dense_below=0, search_above=0),
    "redsync-dense": lambda: RedSync(RATIO),
}
KINDS = {"laplace": 997, "patchy": 300, "zeros": 50, "constant": 50, "one": 1, "few": 3}
"""Gradients, and how many elements they have."""
STEPS = 7
FLAG = 3


def kinds(world, name):
    """Return the gradients a system meets; many processes take turns on few cores."""
    if world < 3:
        return list(KINDS)
    if world < 8:
        return ["laplace", "patchy", "zeros", "few"]
    some = ["laplace", "zeros"]
    return [*some, "few"] if name in ("micro", "cltk", "redsync-quant") else some


def starts(world):
    """Return (threshold to start at, error feedback) of MiCRO's convergence."""
    every = [(start, feedback) for start in (None, 1e-3, 1e3) for feedback in (False, True)]
    return every if world == 2 else every[:2] if world < 8 else every[:1]


def gradient(kind, numel, rank, step):
    """Return a rank's gradient of a step, float32; one's own, whatever is then written into it."""
    return torch.from_numpy(_drawn(kind, numel, rank, step).copy())


@functools.lru_cache(256)  # 30 steps of eight ranks
def _drawn(kind, numel, rank, step):
    """Draw it once: from other starts, or stopped and resumed, a run meets the same gradients again."""
    rng = np.random.default_rng([numel, rank, step])
    x = rng.laplace(size=numel)
    if kind == "zeros" or (kind == "patchy" and (rank + step) % 3 == 0):
        x[:] = 0
    elif kind == "patchy":
        x *= rng.random(numel) < 0.1
    elif kind == "constant":
        x[:] = 1 + rank
    return x.astype(np.float32)


def step_once(compressor: Compressor, corrected, flag=0):
    """Reduce; return a record of arrays, and the residual."""
    before = corrected.clone()
    done = compressor.reduce(corrected, None, flag)
    if any(done.flags):
        untouched = torch.equal(before.nan_to_num(7.0), corrected.nan_to_num(7.0))
        return {"flags": done.flags, "mean": done.mean, "untouched": untouched}, corrected
    assert done.mean.dtype == torch.float32
    record = {
        "corrected": before.numpy(),
        "mean": done.mean.clone().numpy(),
        "residual": done.residual.clone().numpy(),
        "sent": None if done.sent is None else done.sent.numpy(),
        "threshold": done.threshold,
        "selected": done.selected,
        "union": done.union,
        "bytes": done.bytes_sent,
        "flags": done.flags,
        "seconds": (done.select_seconds, done.communicate_seconds),
    }
    return record, done.residual


def run(compressor, kind, numel, rank, steps, residual=None, feedback=True):
    """Run steps with error feedback; return the records and the last residual."""
    residual = torch.zeros(numel) if residual is None else residual
    records = []
    for step in steps:
        x = gradient(kind, numel, rank, step)
        record, left = step_once(compressor, x + residual if feedback else x)
        residual = left.clone()
        records.append(record)
    return records, residual


def same(a, b):
    return len(a) == len(b) and all(
        np.array_equal(x["mean"], y["mean"])
        and np.array_equal(x["residual"], y["residual"])
        and np.array_equal(x["threshold"], y["threshold"], equal_nan=True)
        and x["bytes"] == y["bytes"]
        for x, y in zip(a, b, strict=True)
    )


def resumed(make, rank, straight, cut):
    """Tell whether stopping after `cut` steps and resuming from a checkpoint changes no bit of those done straight."""
    first = make()
    _, residual = run(first, "laplace", 997, rank, range(cut))
    second = make()
    if cut:  # a used instance forgets what it was
        run(second, "laplace", 997, rank, range(2))
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    rest, _ = run(second, "laplace", 997, rank, range(cut, STEPS), residual)
    return same(straight[cut:], rest)


def refused(make, rank, world, straight, at):
    """Refuse step `at`, as a rank with a NaN does; tell whether the rest is as if it had not been."""
    compressor = make()
    head, residual = run(compressor, "laplace", 997, rank, range(at))
    bad = gradient("laplace", 997, rank, 99) + residual
    if rank == world - 1:
        bad[5] = float("nan")
    record, _ = step_once(compressor, bad, FLAG if rank == world - 1 else 0)
    tail, _ = run(compressor, "laplace", 997, rank, range(at, STEPS), residual)
    return record, same(straight, head + tail)


def random_states():
    numpy_state = np.random.get_state()  # noqa: NPY002
    return random.getstate(), [str(x) for x in numpy_state], torch.get_rng_state().tolist()


def converge(rank, start, feedback, rule="corrected"):
    """Return Σk_i / k and η by step, on Laplace gradients drawn anew from the same distribution."""
    records, _ = run(
        MiCRO(RATIO, rule, threshold=start), "laplace", 100_000, rank, range(30), feedback=feedback
    )
    return [r["union"] / (RATIO * 100_000) for r in records], [r["threshold"] for r in records]


def beyond(rank, rule):
    """Return the records of a MiCRO whose η starts far above all gradients."""
    return run(MiCRO(RATIO, rule, threshold=1e3), "laplace", 997, rank, range(3))[0]


def visited(rank, world, numel=101):
    """Count how often each position is chosen in n steps by one rank, the only one with a gradient."""
    counts = []
    for only in sorted({0, world - 1}):
        compressor = MiCRO(RATIO, "paper", threshold=1e-30)
        count = np.zeros(numel, int)
        for _ in range(world):
            record, _ = step_once(compressor, torch.full((numel,), float(rank == only)))
            np.add.at(count, record["sent"], 1)
        counts.append(count)
    return counts


def sizes(rank, make, steps=4, numel=20_000):
    records, _ = run(make(), "laplace", numel, rank, range(steps), feedback=False)
    return [r["union"] for r in records], [r["bytes"] for r in records]


def all_sizes(rank, world):
    """Return how many positions, and bytes, each step of four systems has."""
    return {
        "topk": sizes(rank, lambda: SparseCompressor(TopK(0.01))),
        "micro": sizes(rank, lambda: MiCRO(0.01)),
        "redsync": sizes(rank, lambda: RedSync(0.01, dense_below=0)),
        "redsync-quant": sizes(rank, lambda: RedSync(0.01, True, dense_below=0)),
    }


def one_threshold(rank, bits):
    """Return k̂, η and bytes by step, where every rank's gradient has another scale."""
    compressor, report = GlobalHistogram(0.01, bits), []
    for step in range(4):
        x = (1 + rank) * gradient("laplace", 50_000, rank, step)
        record, _ = step_once(compressor, x.clone())
        report.append((x.numpy(), record["threshold"], record["selected"], record["bytes"]))
    return report


def unbiased_mean(rank, steps=400, numel=64):
    x = gradient("laplace", numel, rank, 0)
    compressor, total = RandomK(1 / 8, unbiased=True), np.zeros(numel)
    for _ in range(steps):
        total += compressor.reduce(x.clone(), None).mean.double().numpy()
    return x.numpy(), total / steps, steps


def battery(rank, world):
    """Everything, in one set of processes: starting them takes longer than this."""
    before = random_states()
    few = SYSTEMS if world < 4 else {}
    cuts, refusals = ((0, 4), (0, 3)) if world < 3 else ((4,), (3,))
    records = {
        (name, kind): run(make(), kind, KINDS[kind], rank, range(STEPS))[0]
        for name, make in SYSTEMS.items()
        for kind in kinds(world, name)
    }
    straight = {name: records[name, "laplace"] for name in few}
    report = {
        "records": records,
        "resumed": {
            n: [resumed(m, rank, straight[n], cut) for cut in cuts] for n, m in few.items()
        },
        "refused": {
            n: [refused(m, rank, world, straight[n], at) for at in refusals] for n, m in few.items()
        },
        "converge": {how: converge(rank, *how) for how in starts(world)},
        "beyond": {rule: beyond(rank, rule) for rule in ("corrected", "paper")},
        "visited": visited(rank, world),
        "sizes": all_sizes(rank, world),
        "one threshold": {bits: one_threshold(rank, bits) for bits in (4, 10)},
        "unbiased": unbiased_mean(rank) if world == 2 else None,
    }
    report["random state untouched"] = random_states() == before
    return report
