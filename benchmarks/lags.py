"""LAGS in the network lab: whether it is as fast as the best single ratio, and how its choice varies.

    sudo .venv/bin/python benchmarks/lags.py [times | choices | plan | table] [--rates 5 20 60 200] [--write]

Three workers train ResNet-20 on digits, each by every system in turns, step by step, so that what else the machine does
meets all of them alike. `times`: seconds and bytes of these steps at every rate, the choice of LAGS made before. It
includes messages by layer with and without overlap and one message, at equal ratios: the difference is what overlapping
hides (LAGS-SGD, eq. 20). `choices`: how LAGS chooses in ten runs. `plan`: what `gradstats plan` predicts, from one
measured network. Each row is stored in docs/results/lags.jsonl as soon as it is known and is not measured again;
`table` prints all of them, and ``--write`` also puts them into docs/network.md.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from records import RESULTS, Row, by, command, complete, grid, show, stored
from scipy.stats import bootstrap
from torch.nn.parallel import DistributedDataParallel

from capture.lab.cluster import shaped_network
from capture.lab.launch import launch
from capture.lab.run import measure_network
from capture.workloads import RunConfig
from capture.workloads.training import thread_count
from gradstats.compressors import LAGS, make_compressor
from gradstats.compressors.hiding import pipelining_bound
from gradstats.hooks import CompressionState, compression_hook
from gradstats.network.plan import plan

FILE = RESULTS / "lags.jsonl"
CONFIG = RunConfig(workload="resnet20-digits", nproc=3, ratio=0.001)
NUMEL = 269_722
RATES = (5, 20, 60, 200)
EQUAL = 0.01
"""Ratio at which sending by layer, with and without overlap, is compared with one message."""
SYSTEMS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "dense": ("none", 1.0, {}),
    "dense-bf16": ("dense-bf16", 1.0, {}),
    "topk 0.001": ("topk", 0.001, {}),
    f"topk {EQUAL}": ("topk", EQUAL, {}),
    "topk 0.1": ("topk", 0.1, {}),
    "lags": ("lags", 0.001, {}),
    "lags sampled": ("lags", 0.001, {"double_sampling": True}),
    f"by layer {EQUAL}": ("lags", EQUAL, {"adaptive": False}),
    f"by layer {EQUAL}, afterwards": ("lags", EQUAL, {"adaptive": False, "overlap": False}),
}
ALONE = "no exchange"
ROUNDS, RUNS = 21, 10
HEADS = (
    "Mbit/s: | system | ms: | ÷ best single ratio: | ÷ dense: | kB sent:",
    "Mbit/s: | bound (eq. 20): | one message ÷ by layer: | hidden ms, measured:",
    "Mbit/s: | runs: | chosen | elements: | µs an element: | eq. 19's elements: | ms: | one message's ms:",
    "Mbit/s: | system | predicted ms: | kB:",
)


class Trainee:
    """A replica that trains with one system, a step at a time."""

    def __init__(self, name: str) -> None:
        task = importlib.import_module(CONFIG.info.module).make_task(CONFIG, dist.get_rank())
        compressor, ratio, options = SYSTEMS.get(name, ("none", 1.0, {}))
        self.compressor = make_compressor(compressor, ratio, **options)
        streams = self.compressor is not None and self.compressor.streams
        self.ddp = DistributedDataParallel(task.model, bucket_cap_mb=0.1 if streams else None)
        self.state: CompressionState | None = None
        self.alone = name == ALONE
        if self.compressor is not None:
            named = task.model.named_parameters()
            self.state = CompressionState(self.compressor, named_parameters=named)
            self.ddp.register_comm_hook(self.state, compression_hook)
        self.loss = task.loss
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        self.count = 0

    def step(self) -> float:
        """Train for a step that begins on all ranks together, and return its seconds, the mean over the ranks."""
        dist.barrier()
        started = time.perf_counter()
        self.optimizer.zero_grad()
        if self.alone:
            with self.ddp.no_sync():
                self.loss(self.ddp, self.count).backward()
        else:
            self.loss(self.ddp, self.count).backward()
        self.optimizer.step()
        self.count += 1
        took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(took)
        return float(took) / dist.get_world_size()

    def settle(self) -> None:
        """Train until LAGS has chosen; others for the steps after which nothing changes any more."""
        wanted = self.compressor.settling if self.compressor is not None else 0
        while self.count < 3 or (self.count < wanted and not self.chosen):
            self.step()
        self.step()

    @property
    def chosen(self) -> bool:
        """Whether LAGS knows how to send."""
        return isinstance(self.compressor, LAGS) and bool(self.compressor.measured)

    def choice(self) -> Row:
        """Return what LAGS has measured and chosen."""
        lags = self.compressor
        assert isinstance(lags, LAGS)
        tried = [
            {"whole": w.whole, "sent": round(w.sent), "ratios": w.ratios, "seconds": s}
            for w, s in lags.measured
        ]
        return {
            "whole": lags.whole,
            "target": lags.target(NUMEL),
            "ratios": sorted(set(lags.ratios.values())),
            "tried": tried,
            "costs": None if lags.costs is None else lags.costs.__getstate__(),
        }


def times(names: list[str]) -> list[Row]:
    """As one rank: a row for each system, from rounds in which each makes a step."""
    trainees = {name: Trainee(name) for name in names}
    for trainee in trainees.values():
        trainee.settle()
    rows: dict[str, Row] = {name: {"seconds": [], "parts": []} for name in names}
    for _ in range(ROUNDS):
        for name, trainee in trainees.items():
            rows[name]["seconds"].append(trainee.step())
            last = trainee.state and trainee.state.last
            if last:
                parts = last.select_seconds, last.communicate_seconds, last.overlapped_seconds
                rows[name]["parts"].append(parts)
                rows[name]["bytes"] = last.bytes_sent
    for name, trainee in trainees.items():
        rows[name]["parts"] = [median(lane) for lane in zip(*rows[name]["parts"], strict=True)]
        if trainee.chosen:
            rows[name]["choice"] = trainee.choice()
    return [{"system": name, **row} for name, row in rows.items()]


def choose(name: str) -> Row:
    """As one rank: let LAGS choose once."""
    trainee = Trainee(name)
    trainee.settle()
    return trainee.choice()


def ranked(function: Any, *args: Any) -> Any:
    """As one rank: run a function in a process group."""
    torch.set_num_threads(thread_count(CONFIG.nproc))
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def several(function: Any, name: str, runs: int) -> list[Row]:
    """As one rank: call a function several times."""
    return [function(name) for _ in range(runs)]


def measured(seconds: list[float]) -> str:
    """Return a median and its 95 % interval, in ms."""
    low, high = bootstrap(
        (np.array(seconds),), np.median, method="percentile", rng=0
    ).confidence_interval
    return f"{1e3 * median(seconds):,.0f} ({1e3 * low:,.0f} to {1e3 * high:,.0f})"


def spread(values: list[float], spec: str = ",.0f") -> str:
    """Return the least and the largest value."""
    low, high = format(min(values), spec), format(max(values), spec)
    return low if low == high else f"{low} to {high}"


def ratio_of(a: list[float], b: list[float]) -> str:
    """Return the median of the ratios of paired steps, and its 95 % interval."""
    each = np.divide(a, b)
    low, high = bootstrap((each,), np.median, method="percentile", rng=0).confidence_interval
    return f"{np.median(each):.2f} ({low:.2f} to {high:.2f})"


def pooled(rows: Iterable[Row]) -> list[Row]:
    """Return a row for each rate and system, with the steps of all repeats."""
    found: dict[tuple[float, str], Row] = {}
    for row in rows:
        one = found.setdefault((row["rate"], row["system"]), {**row, "seconds": [], "choices": []})
        one["seconds"] += row["seconds"]
        one["choices"] += [sends(row["choice"])] if "choice" in row else []
    return sorted(found.values(), key=lambda row: row["rate"])


def sends(choice: Row) -> str:
    """Return a way to send in words."""
    return "one message" if choice["whole"] else "by layer"


def table(rows: list[Row]) -> str:
    """Return all rows as Markdown."""
    steps, hiding, chosen, plans = [], [], [], []
    found = pooled(row for row in rows if row["what"] == "times")
    for rate in dict.fromkeys(row["rate"] for row in found):
        here = {row["system"]: row for row in found if row["rate"] == rate}
        single = min(
            (row for name, row in here.items() if name.startswith("topk")),
            key=lambda row: median(row["seconds"]),
        )
        for name, row in here.items():
            sent = row.get("bytes", 0 if name == ALONE else 4 * NUMEL) / 1e3
            how = "".join(f", {way}" for way in dict.fromkeys(row["choices"]))
            against = [
                ratio_of(row["seconds"], other["seconds"]) for other in (single, here["dense"])
            ]
            cells = (f"`{name}`{how}", measured(row["seconds"]), *against, f"{sent:,.0f}")
            steps.append([str(rate), *cells])
    for rate in dict.fromkeys(row["rate"] for row in found):
        here = {row["system"]: row for row in found if row["rate"] == rate}
        one, layers, after = (
            here[name]
            for name in (f"topk {EQUAL}", f"by layer {EQUAL}", f"by layer {EQUAL}, afterwards")
        )
        compute = median(here[ALONE]["seconds"])
        communicate = one["parts"][1]
        bound = pipelining_bound(compute / 3, 2 / 3 * compute, communicate)
        hidden = np.subtract(after["seconds"], layers["seconds"]).tolist()
        cells = [f"{bound:.2f}", ratio_of(one["seconds"], layers["seconds"]), measured(hidden)]
        hiding.append([str(rate), *cells])
    choices = [row for row in rows if row["what"] == "choice"]
    for rate in dict.fromkeys(row["rate"] for row in choices):
        here = [row for row in choices if row["rate"] == rate]
        each = Counter(map(sends, here))
        hidden = [t for row in here for t in row["tried"] if len(set(t["ratios"])) > 1]
        one = [row["tried"][0] for row in here]
        cells = [
            ", ".join(f"{way}: {count}" for way, count in each.items()),
            spread([row["target"] for row in here]),
            spread([1e6 * row["costs"][1] for row in here], ".2g"),
            spread([t["sent"] for t in hidden]),
            *(spread([1e3 * t["seconds"] for t in found]) for found in (hidden, one)),
        ]
        chosen.append([str(rate), str(len(here)), *cells])
    for row in rows:
        if row["what"] == "plan":
            cells = [f"{row['rate']:g}", f"`{row['compressor']}`", f"{1e3 * row['seconds']:,.0f}"]
            plans.append([*cells, f"{row['bytes'] / 1e3:,.0f}"])
    made = zip(HEADS, (steps, hiding, chosen, plans), strict=True)
    return "\n\n".join(grid(heads, lines) for heads, lines in made)


def times_of(what: str, rate: int, repeat: int) -> list[Row]:
    """Return the rows of all systems at a rate."""
    with shaped_network(CONFIG.nproc, rate * 10**6) as cluster:
        rows = launch(cluster, ranked, times, [ALONE, *SYSTEMS])[0]
    return [{"what": what, "rate": rate, "repeat": repeat, **row} for row in rows]


def choices_of(what: str, rate: int) -> list[Row]:
    """Return what LAGS chooses at a rate."""
    with shaped_network(CONFIG.nproc, rate * 10**6) as cluster:
        ranks = launch(cluster, ranked, several, choose, "lags", RUNS)
    assert all(each == ranks[0] for each in ranks)  # chosen alike on all ranks
    return [{"what": what, "rate": rate, "run": run, **row} for run, row in enumerate(ranks[0])]


def plans_of(what: str, rates: Iterable[int]) -> Iterator[Row]:
    """Yield what is predicted at some rates, from one network and the time of computing that was stored."""
    names = ["dense-bf16", "topk", "lags"]
    compute = fmean(median(row["seconds"]) for row in stored(FILE) if row.get("system") == ALONE)
    with shaped_network(CONFIG.nproc, 60 * 10**6) as cluster:
        network = measure_network(cluster, NUMEL, 0.001, names)
    task = importlib.import_module(CONFIG.info.module).make_task(CONFIG, 0)
    source = {n: p.detach().numpy() for n, p in task.model.named_parameters()}
    bits = [rate * 1e6 for rate in rates]
    for row in plan(source, network, compute, [CONFIG.nproc], [0.001], names, rates=bits):
        fields = ("rate", "compressor", "seconds", "low", "high", "bytes", "selected")
        ratios = sorted(set(row["layers"].values()))
        yield {"what": what, "compute": compute, **{f: row[f] for f in fields}, "ratios": ratios}


def main() -> None:
    """Run what the command line names."""
    parser = command(__doc__, "network.md")
    parser.add_argument("what", nargs="*", default=["times", "choices", "plan", "table"])
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES))
    parser.add_argument("--repeats", type=int, default=2, help="runs of `times` at every rate")
    options = parser.parse_args()
    if "times" in options.what:
        cases = product(["times"], options.rates, range(options.repeats))
        complete(FILE, by("what", "rate", "repeat"), cases, times_of)
    if "choices" in options.what:
        complete(FILE, by("what", "rate"), product(["choice"], options.rates), choices_of)
    if "plan" in options.what:
        complete(FILE, by("what"), [("plan",)], lambda what: plans_of(what, options.rates))
    if "table" in options.what or options.write:
        show({"lags": table(stored(FILE))}, options.write, "network.md")


if __name__ == "__main__":
    main()
