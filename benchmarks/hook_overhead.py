"""Time of a training step with each hook and with PyTorch's own, in the same two processes.

    python benchmarks/hook_overhead.py [--width 1500] [--rounds 5] [--steps 10] [--write]

The model has two linear layers of width² and trains on one sample a step, so that a step is almost only the exchange
of the gradient. It goes over gloo on the loopback interface, the fastest network there is, where compression has the
least to gain. Rounds are interleaved, and the slower rank's time counts. PowerSGD (rank 1) has one bucket, because
with several it blocks itself on gloo. Rows are stored in docs/results/hook_overhead.json; ``--write`` also puts the
table into docs/systems.md.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from ranks import run_ranks
from records import RESULTS, Row, command, dump, grid, processor, show
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from capture.workloads.baselines import bf16_hook
from gradstats.compressors import make_compressor
from gradstats.hooks import CompressionState, compression_hook

DENSE = {"allreduce_hook": default_hooks.allreduce_hook, "bf16_compress_hook": bf16_hook}
HOOKS = (
    *DENSE, "PowerSGD", "dense-bf16", "topk", "warm-exact", "sidco-e", "sidco-gp", "dgc", "micro", "signsgd", "marsit",
)  # fmt: skip
FILE = RESULTS / "hook_overhead.json"


def make(name, width):
    """Return a fresh DDP model with a hook of this name."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    ddp = DDP(net, bucket_cap_mb=4096)
    if name in DENSE:
        ddp.register_comm_hook(None, DENSE[name])
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
                ddp.zero_grad()
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
    parser = command(__doc__, "systems.md")
    parser.add_argument("--width", type=int, default=1500, help="width of the layers")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all hooks")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    o = parser.parse_args()
    seconds, split = run_ranks(2, measure, o.width, o.rounds, o.steps)[0]
    rows = []
    for name, values in seconds.items():
        select, communicate, bytes_sent = split.get(name, (None, None, None))
        ratios = [a / b for a, b in zip(values, seconds["allreduce_hook"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "hook": name, "numel": 2 * o.width * (o.width + 1), "seconds": statistics.median(values),
                "low": low, "ratio": middle, "high": high,
                "select": select, "communicate": communicate, "bytes": bytes_sent, "processor": processor(),
            }
        )  # fmt: skip
    dump(FILE, rows)
    show({"hook": table(rows)}, o.write, "systems.md")


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = []
    for row in rows:
        parts = [
            "–" if row[name] is None else f"{scale * row[name]:,.{digits}f}"
            for name, scale, digits in (
                ("select", 1e3, 1),
                ("communicate", 1e3, 1),
                ("bytes", 1, 0),
            )
        ]
        cells = [f"`{row['hook']}`", f"{1e3 * row['seconds']:.1f}", f"{row['ratio']:.2f}"]
        lines.append([*cells, f"{row['low']:.2f} … {row['high']:.2f}", *parts])
    heads = (
        "hook | ms/step: | ÷ allreduce_hook: | quartiles | select ms: | communicate ms: | bytes:"
    )
    return f"{rows[0]['numel']:,} elements\n\n{grid(heads, lines)}"


if __name__ == "__main__":
    main()
