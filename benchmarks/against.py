"""Time a checkout against another one, case by case, in alternation on one machine.

    git worktree add ../before COMMIT
    .venv/bin/python benchmarks/against.py ../before [--match TEXT] [--rounds N] [-o FILE.json]

Each checkout runs in a process of its own, on one thread. A case is run in one and then in the other, round after
round, in changing order, so that a slow moment of the machine hits both. The table has the median over the rounds of
new time ÷ old time, with its 95 % interval: what lies above 1 with its whole interval has become slower. Cases use
public names alone, which both checkouts have: selection by every rule on small, middle and large gradients, one pass
over 26 million elements, signs, the update of many layers, and the processor's time of a captured step, the writer's
with it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

Call = Callable[[], object]
LAWS = ("laplace", "student-t")
RULES = ("exact", "warm-exact", "gaussiank", "redsync-trimmed", "sidco-e", "sidco-gp", "sidco-p")
RATIOS = (0.1, 0.01, 0.001)
STEPS = 5
"""Steps of a rule that adapts: in one of them it does."""


def cases() -> dict[str, Callable[[], tuple[Call, int]]]:
    """Return what makes each case: the call, and how often it is run in a row."""
    found: dict[str, Callable[[], tuple[Call, int]]] = {}
    for numel in (64, 256, 1000, 4096, 16_384, 65_536):
        for ratio in RATIOS[:2]:
            found[f"exact {numel:,} at {ratio:g}"] = partial(
                _rule, "exact", "layered", numel, ratio, 200
            )
            found[f"torch.topk {numel:,} at {ratio:g}"] = partial(_topk, numel, ratio)
    for rule in RULES[4:]:
        for numel in (64, 4096, 260_000):
            for ratio in RATIOS:
                name = f"{rule} {numel:,} at {ratio:g}"
                found[name] = partial(
                    _rule, rule, "layered", numel, ratio, 5 if numel > 5000 else 40
                )
    for numel in (4_500_000, 26_000_000):
        for law in LAWS:
            for rule in RULES:
                for ratio in RATIOS:
                    name = f"{rule} {numel:,} {law} at {ratio:g}"
                    found[name] = partial(_rule, rule, law, numel, ratio, 1)
    for name in ("sum", "moments", "exceedances", "histogram 7", "histogram 10"):
        found[f"pass: {name}"] = partial(_pass, name)
    for ratio in RATIOS:
        found[f"pass: select {ratio:g}"] = partial(_pass, f"select {ratio}")
    found["signs: signsgd"] = partial(_signs, "packed_signs")
    found["signs: ssdm"] = partial(_signs, "packed_stochastic_signs")
    found["update of 161 layers"] = _update
    for store in ("gradients", "sketches"):
        found[f"captured step, {store}"] = partial(_captured, store)
    found["step of a hook"] = partial(_captured, None)
    return found


@cache
def _gradient(law: str, numel: int) -> Any:
    """Return a gradient; those of 26 million elements take seconds to draw."""
    import torch

    from gradstats.thresholds.bench import TAILS

    return torch.from_numpy(TAILS[law](numel))


def _rule(rule: str, law: str, numel: int, ratio: float, runs: int) -> tuple[Call, int]:
    from gradstats.thresholds import make_estimator

    x, made = _gradient(law, numel), make_estimator(rule)
    return lambda: [made.select(x, ratio) for _ in range(STEPS if rule != "exact" else 1)], runs


def _topk(numel: int, ratio: float) -> tuple[Call, int]:
    import torch

    x, k = _gradient("layered", numel), max(1, round(ratio * numel))
    return lambda: torch.topk(x.abs(), k), 200


def _pass(name: str) -> tuple[Call, int]:
    from gradstats.primitives import exceedances, histogram, moments, select
    from gradstats.thresholds import threshold

    x = _gradient("laplace", 26_000_000)
    kind, _, option = name.partition(" ")
    if kind == "select":
        return partial(select, x, threshold(x, float(option))), 2
    if kind == "histogram":
        return partial(histogram, x, int(option)), 2
    return {
        "sum": x.sum,
        "moments": partial(moments, x),
        "exceedances": partial(exceedances, x, 0.0),
    }[kind], 2


def _signs(name: str) -> tuple[Call, int]:
    import torch

    from gradstats.compressors import signs

    x, generator = torch.randn(2_200_000), torch.Generator().manual_seed(0)
    return partial(getattr(signs, name), x, generator), 5


def _update() -> tuple[Call, int]:
    import numpy as np
    import torch

    from gradstats.hooks.gradient import FlatGradient
    from gradstats.hooks.layout import ParameterLayout
    from gradstats.hooks.memory import NoMemory

    sizes = np.random.default_rng(0).lognormal(11, 1.5, 161).astype(int) + 100
    parameters = {f"{i}": torch.zeros(int(n)) for i, n in enumerate(sizes)}
    layout = ParameterLayout()
    layout.add(parameters.items())
    flat = FlatGradient(layout, NoMemory())
    flat.allocate(torch.device("cpu"))
    mean = torch.randn(layout.numel)
    pairs = [(p, torch.zeros_like(p)) for p in parameters.values()]
    return lambda: flat.write(pairs, mean, 1.0), 2


def _captured(store: str | None) -> tuple[Call, int]:
    """Return a training step with error feedback of 60 layers, all of whose steps are captured, if any."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from capture import Capture
    from gradstats.compressors import make_compressor
    from gradstats.hooks import CompressionState, compression_hook

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(66, 66) for _ in range(60)))
    ddp = DistributedDataParallel(model)
    state = CompressionState(
        make_compressor("exact", 0.001), named_parameters=model.named_parameters()
    )
    x = torch.randn(4, 66)
    capture = None
    if store is None:
        ddp.register_comm_hook(state, compression_hook)
    else:
        path = Path(tempfile.mkdtemp(dir=os.environ["AGAINST"]), "run.zarr")
        capture = Capture(path, ddp, store=store)  # type: ignore[arg-type]
        ddp.register_comm_hook(*capture.wrap(state, compression_hook))

    def step() -> None:
        model.zero_grad()
        ddp(x).square().mean().backward()
        if capture is not None:
            capture.step()

    for _ in range(5):
        step()
    return step, 20


def serve() -> None:
    """Run the cases whose names arrive, and answer with seconds: elapsed, and of the processor where threads work."""
    import torch

    from gradstats import warm_up

    torch.set_num_threads(1)
    warm_up()
    known = cases()
    name, call, runs = "", None, 1
    for line in sys.stdin:
        if line.strip() != name:
            call = None  # gives memory back before the next case takes its own
            name = line.strip()
            call, runs = known[name]()
            for _ in range(2):
                call()
        assert call is not None
        clock = time.process_time if "step" in name else time.perf_counter
        started = clock()
        for _ in range(runs):
            call()
        print(json.dumps((clock() - started) / runs), flush=True)
    os._exit(0)  # a process group and captures are open


def measure(folders: list[Path], names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each case: median of new ÷ old with its interval, and both in microseconds."""
    with tempfile.TemporaryDirectory() as scratch:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, cwd=scratch,
                env={**os.environ, "PYTHONPATH": str(folder.resolve()), "AGAINST": scratch, "NUMBA_NUM_THREADS": "1"},
            )
            for folder in folders
        ]  # fmt: skip
        rows = []
        try:
            for name in names:
                seconds: list[list[float]] = [[], []]
                for turn in range(rounds):
                    for i in (0, 1) if turn % 2 else (1, 0):
                        worker = workers[i]
                        assert worker.stdin is not None
                        assert worker.stdout is not None
                        worker.stdin.write(name + "\n")
                        worker.stdin.flush()
                        seconds[i].append(float(worker.stdout.readline()))
                ratios = sorted(new / old for old, new in zip(*seconds, strict=True))
                old, new = (1e6 * statistics.median(each) for each in seconds)
                row = {"case": name, **_interval(ratios), "old_us": old, "new_us": new}
                rows.append(row)
                interval = "{ratio:.3f} ({low:.3f} to {high:.3f})".format(**row)
                print(f"{name:45} {interval}  {old:.1f} → {new:.1f} µs", flush=True)
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    return rows


def _interval(ordered: list[float]) -> dict[str, float]:
    """Return the median of sorted values and its 95 % interval, by order statistics."""
    from scipy import stats

    n = len(ordered)
    at = max(int(stats.binom.ppf(0.025, n, 0.5)) - 1, 0)
    return {"ratio": statistics.median(ordered), "low": ordered[at], "high": ordered[n - 1 - at]}


def main() -> None:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, nargs="?", help="the checkout to compare with")
    parser.add_argument("--match", default="", help="only cases whose name has this text")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", "--output", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.other is None or not (options.other / "gradstats").is_dir():
        parser.error("name the folder of another checkout")
    names = [name for name in cases() if options.match in name]
    rows = measure([options.other, Path(__file__).parents[1]], names, options.rounds)
    slower = [r["case"] for r in rows if r["low"] > 1 and r["ratio"] > 1.05]
    print(f"{len(rows)} cases; slower by more than 5 %: {', '.join(slower) or 'none'}")
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
