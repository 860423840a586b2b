"""What selecting, packing, unpacking and masking take of RedSync's step (its figure 10), as the workers grow.

    python benchmarks/parts.py [--write]

Ranks train VGG16, and the LSTM of PTB, on random inputs by ``redsync``, quantised and not, at ratio 0.001. What each
part computes is timed by its thread's processor time, without what it calls of another part: ranks share two cores
here, where a clock would also count waiting. So the exchange itself is not among the parts. Rows are means over ten
steps and all ranks; those stored in docs/results/parts.jsonl are not measured again. ``--write`` puts the table into
docs/systems.md.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from statistics import fmean
from threading import local
from typing import Any
from unittest import mock

import torch
from ranks import run_ranks
from records import RESULTS, Row, by, command, complete, grid, processor, show
from torch.nn.parallel import DistributedDataParallel as DDP

from capture.workloads import WORKLOADS, RunConfig
from gradstats.collectives import packed
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors import Selector
from gradstats.hooks import MomentumCorrection, compression_hook
from gradstats.hooks.systems import make_state
from gradstats.trace.record import StepRecord

FILE = RESULTS / "parts.jsonl"
WORKERS = {"vgg16-cifar10": (2, 4, 8), "lstm-ptb": (2, 4)}
"""Numbers of workers; eight were not tried in the LSTM, whose 66 million parameters take gigabytes a rank."""
BATCH = 2
BEFORE, STEPS = 25, 10
"""Steps that are not timed, and those that are: the paper's ten. Thresholds are reused over five steps; in the first
ones, while momentum and residual grow, they select many times k."""
PARTS = ("mask", "select", "pack", "unpack")


class Parts:
    """Processor time by part; what a part calls of another is the other's."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._thread = local()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time is this part's."""

        @functools.wraps(function)
        def wrapper(*given: Any, **options: Any) -> Any:
            outer = getattr(self._thread, "inner", 0.0)
            self._thread.inner, started = 0.0, time.thread_time()
            try:
                return function(*given, **options)
            finally:
                whole = time.thread_time() - started
                self.seconds[part] += whole - self._thread.inner
                self._thread.inner = outer + whole

        return wrapper

    @contextmanager
    def watched(self) -> Iterator[Counter[str]]:
        """Time what RedSync's parts are here, and give their seconds."""
        selectors, left = [], [Selector]
        while left:
            left += (kind := left.pop()).__subclasses__()
            selectors.append(kind)
        places = [
            *((kind, "select", "select") for kind in selectors if "select" in vars(kind)),
            *((MomentumCorrection, name, "mask") for name in ("add", "settle", "update_dense")),
            (packed, "pack", "pack"),
            (packed.SparseAllGather, "rounded", "pack"),
            (packed, "unpack", "unpack"),
            *((SparseUpdate, name, "unpack") for name in ("begin", "add", "divide")),
        ]
        with ExitStack() as stack:
            for owner, name, part in places:
                timed = self.timed(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
            yield self.seconds


def on_random_inputs(
    rank: int, world: int, workload: str, system: str, *, rate: float = 0.001, **options: Any
) -> Iterator[StepRecord]:
    """Train in one of several ranks for as long as is asked, at ratio 0.001; yield what its state says of each step."""
    torch.manual_seed(rank)
    config = RunConfig(workload=workload, nproc=world, batch_size=BATCH)
    module = importlib.import_module(config.info.module)
    ddp = DDP(module.make_model(config))
    state = make_state(system, 0.001, ddp.module.named_parameters(), **options)
    ddp.register_comm_hook(state, compression_hook)
    inputs = module.example(config)
    optimizer = torch.optim.SGD(ddp.parameters(), rate)
    while True:
        found = ddp(*inputs)
        output = found[0] if isinstance(found, tuple) else found
        # the loss of predicting one class: by outputs squared, quantised trainings diverge
        output.log_softmax(-1)[..., 0].mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield state.last


def train(
    rank: int, world: int, workload: str, quantise: bool, before: int = BEFORE, steps: int = STEPS
) -> dict[str, float]:
    """Train; return k̂/k, and the seconds of a step by part."""
    training = on_random_inputs(rank, world, workload, "redsync", quantise=quantise)
    qualities = []
    with Parts().watched() as seconds:
        for _ in range(before):
            next(training)
        seconds.clear()
        for _ in range(steps):
            record = next(training)
            qualities.append(record.selected / record.target)
    return {
        "quality": fmean(qualities),
        **{part: seconds[part] / steps for part in PARTS},
    }


def measure(workload: str, quantise: bool, workers: int) -> Row:
    """Return the row of a training, the mean of its ranks."""
    ranks = run_ranks(workers, train, workload, quantise, limit_s=900)
    means = {n: round(fmean(rank[n] for rank in ranks), 6) for n in ("quality", *PARTS)}
    case = {"workload": workload, "quantise": quantise, "workers": workers}
    return {**case, "numel": WORKLOADS[workload].parameters, **means, "processor": processor()}


def table(rows: list[Row]) -> str:
    """Return milliseconds and shares as Markdown."""
    lines = []
    for row in rows:
        whole = sum(row[part] for part in PARTS)
        lines.append(
            [
                f"`{row['workload']}`",
                "yes" if row["quantise"] else "no",
                str(row["workers"]),
                f"{row['quality']:.2f}",
                *(f"{1e3 * row[part]:.3g}" for part in PARTS),
                f"{100 * row['unpack'] / whole:.0f}",
            ]
        )
    heads = "training | quantised | workers: | k̂/k: | " + "".join(f"{p} ms: | " for p in PARTS)
    return grid(f"{heads}unpack % of these:", lines)


def main() -> None:
    """Measure what is not stored, and print the table."""
    options = command(__doc__, "systems.md").parse_args()
    cases = [
        (workload, quantise, workers)
        for workload, quantise in product(WORKERS, (False, True))
        for workers in WORKERS[workload]
    ]
    rows = complete(FILE, by("workload", "quantise", "workers"), cases, measure)
    show({"parts": table(rows)}, options.write, "systems.md")


if __name__ == "__main__":
    main()
