"""Time of a training step with each hook and with PyTorch's own, in the same two processes.

    python benchmarks/hook_overhead.py [--width 1500] [--rounds 5] [--steps 10]

The model has two linear layers of width² and trains on one sample a step, so that a step is almost only the exchange
of the gradient. It goes over gloo on the loopback interface, the fastest network there is, where compression has the
least to gain. Rounds are interleaved, and the slower rank's time counts. PowerSGD (rank 1) has one bucket, because
with several it blocks itself on gloo.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "distributed"))

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from gradstats.compressors import make_compressor
from gradstats.hooks import CompressionState, compression_hook

HOOKS = ("allreduce_hook", "PowerSGD", "topk", "warm-exact", "sidco-e", "dgc", "micro", "marsit")


def make(name, width):
    """Return a fresh DDP model with a hook of this name."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    ddp = DDP(net, bucket_cap_mb=4096)
    if name == "allreduce_hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        return ddp, None
    if name == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ddp, None
    options = {"full_every": None} if name == "marsit" else {}
    state = CompressionState(make_compressor(name, 0.001, **options))
    ddp.register_comm_hook(state, compression_hook)
    return ddp, state


def measure(rank, world, width, rounds, steps):
    """Return the seconds of every hook's steps on the slower rank, and the parts of its last step."""
    made = {name: make(name, width) for name in HOOKS}
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(rank))
    seconds = {name: [] for name in HOOKS}
    for round_ in range(rounds + 1):
        for name, (ddp, _) in made.items():
            for _ in range(steps):
                dist.barrier()
                started = time.perf_counter()
                ddp(x).square().mean().backward()
                elapsed = torch.tensor([time.perf_counter() - started])
                dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
                if round_:
                    seconds[name].append(float(elapsed))
    split = {
        name: (s.last.select_seconds, s.last.communicate_seconds, s.last.bytes_sent)
        for name, (_, s) in made.items()
        if s is not None
    }
    return seconds, split


def main():
    """Time the hooks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=1500, help="width of the layers")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all hooks")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    o = parser.parse_args()
    seconds, split = run_ranks(2, measure, o.width, o.rounds, o.steps)[0]
    numel = 2 * o.width * (o.width + 1)
    print(f"{numel:,} elements\n")
    print("| hook | ms/step | ÷ allreduce_hook | select ms | communicate ms | bytes |")
    print("|---|---:|---:|---:|---:|---:|")
    dense = statistics.median(seconds["allreduce_hook"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        parts = split.get(name)
        cells = (
            ["–"] * 3
            if parts is None
            else [f"{1e3 * parts[0]:.1f}", f"{1e3 * parts[1]:.1f}", f"{parts[2]:,}"]
        )
        print(f"| {name} | {1e3 * middle:.1f} | {middle / dense:.2f} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
