"""Run a function in several real gloo processes, and bring back what each returned."""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import tempfile
import time
from pathlib import Path

from forked import CONTEXT

LIMIT_S = 240
"""Ranks that wait for each other for ever are killed after this."""


def _entry(rank, world, folder, function, args):
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # a rank that crashes shows where, of which its exit status says nothing
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    try:
        result = function(rank, world, *args)
        Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(world, function, *args, limit_s=LIMIT_S):
    """Return [function(rank, world, *args) for each rank], each in its own process, within some seconds."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _entry,
            (world, folder, function, args),
            nprocs=world,
            start_method=CONTEXT.get_start_method(),
            join=False,
        )
        deadline = time.monotonic() + limit_s
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{function.__name__} on {world} ranks took over {limit_s} s")
        return [pickle.loads(Path(folder, f"{r}.pickle").read_bytes()) for r in range(world)]


run_once = functools.cache(run_ranks)
"""The same, but only once for all tests that look at what these arguments return."""


def each_of(rank, world, function, cases):
    """Return what a function does of each case, one after the other."""
    found = []
    for case in cases:
        try:
            found.append(function(rank, world, *case))
        except Exception as error:
            error.add_note(f"in case {case}")
            raise
    return found


@functools.cache
def run_cases(world, function, cases, limit_s=LIMIT_S):
    """Return what :func:`run_ranks` does of each case, all in the same processes, which take longer to start."""
    ranks = run_ranks(world, each_of, function, cases, limit_s=limit_s)
    return dict(zip(cases, map(list, zip(*ranks, strict=True)), strict=True))
