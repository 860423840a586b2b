"""A rank that is killed, stopped or slow in the middle of an exchange.

The others end within the process group's timeout, with one line; what was captured is intact, and nobody is left.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from support.readers import assert_all_agree
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from capture import Capture
from faults.processes import GROUP_TIMEOUT_S, start_ranks
from faults.resumes import SYSTEMS
from gradstats import open_trace
from gradstats.compressors import DenseCompressor, Marsit
from gradstats.errors import ExchangeError
from gradstats.hooks import CompressionState, compression_hook

WORLD = 4
EXCHANGES = {
    "sparse": SYSTEMS["topk"],
    "layer by layer": SYSTEMS["layerwise"],
    "layer by layer, adaptive": SYSTEMS["lags"],
    "two collectives": SYSTEMS["micro"],
    "leader": SYSTEMS["cltk"],
    "common positions": SYSTEMS["randomk"],
    "quantised": SYSTEMS["redsync-quantised"],
    "signs": SYSTEMS["signsgd"],
    "cascade": SYSTEMS["cascading"],
    "ring": SYSTEMS["marsit"],
    "torus": lambda: Marsit(topology="torus", shape=(2, 2)),
    "dense": DenseCompressor,
}
FATES = ("killed", "stopped", "slow")
CASES = list(itertools.product(EXCHANGES, FATES))
STEPS = 8


def _train(
    rank: int,
    world: int,
    exchange: str,
    fate: str,
    victim: int,
    at: int,
    folder: Path,
    reports: Connection,
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3))
    state = CompressionState(EXCHANGES[exchange](), named_parameters=net.named_parameters())
    ddp = DDP(net, bucket_cap_mb=0.001)
    capture = Capture(folder / "run.zarr", ddp, kinds=["gradient"])

    def hook(
        state: CompressionState, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        # in the middle of the step: the other buckets are on their way
        if rank == victim and state.step == at and bucket.is_last():
            reports.send("now")
            if fate == "slow":
                time.sleep(GROUP_TIMEOUT_S / 4)
            else:
                os.kill(os.getpid(), signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
        return compression_hook(state, bucket)

    hook.__annotations__ = compression_hook.__annotations__
    ddp.register_comm_hook(*capture.wrap(state, hook))
    own = []
    started = time.monotonic()
    try:
        for step in range(STEPS):
            x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1000 * rank + step))
            loss = nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long())
            mine = [g.reshape(-1) for g in torch.autograd.grad(loss, list(net.parameters()))]
            own.append(torch.cat(mine).numpy())
            ddp.zero_grad()
            started = time.monotonic()
            nn.functional.cross_entropy(ddp(x), (x.sum(1) > 0).long()).backward()
            capture.step(loss=float(step))
            with torch.no_grad():
                for p in net.parameters():
                    p -= 1e-3 * p.grad  # more, and a cascade of signs diverges
    except (ExchangeError, RuntimeError) as error:
        reports.send((type(error).__name__, str(error), time.monotonic() - started))
    capture.close()
    np.save(folder / f"own-{rank}.npy", np.stack(own))
    reports.send("end")


def lose(number: int, folder: Path) -> str:
    """Let one rank of four be killed, stopped or slow in one kind of exchange."""
    exchange, fate = CASES[number % len(CASES)]
    rng = random.Random(number)
    victim, at = rng.randrange(WORLD), rng.randrange(1, STEPS - 1)
    case = f"{exchange}, {fate}"
    ranks = start_ranks(WORLD, folder, _train, exchange, fate, victim, at, folder)
    ranks[victim].wait_for("now")
    said = {r: rank.rest() for r, rank in enumerate(ranks) if r != victim or fate == "slow"}
    if fate != "slow":
        assert fate == "killed" or ranks[victim].alive
        ranks[victim].kill()
        ranks[victim].join()
    assert not any(rank.alive for rank in ranks)
    for rank, reports in said.items():
        assert reports[-1:] == ["end"], (case, rank, reports)
        if fate == "slow":
            assert reports == ["end"], (case, rank, reports)
        else:
            kind, message, seconds = reports[0]
            assert kind == "ExchangeError" or exchange == "dense", (case, rank, reports)
            assert "\n" not in message, (case, message)
            assert seconds < 2 * GROUP_TIMEOUT_S, (case, rank, seconds)
        trace = open_trace(folder / "run.zarr")
        own = np.load(folder / f"own-{rank}.npy")
        assert trace.steps(rank) == list(range(STEPS if fate == "slow" else at)), (case, rank)
        for step in trace.steps(rank):
            assert np.allclose(trace.read(step, rank), own[step], rtol=1e-5, atol=1e-8)
    assert_all_agree(folder / "run.zarr")
    return "waited for" if fate == "slow" else "ended in time"
