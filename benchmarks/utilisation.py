"""Local steps predicted by `gradstats plan`, beside what others measured and beside runs in the lab.

    python benchmarks/utilisation.py --write
    sudo .venv/bin/python benchmarks/utilisation.py --lab --write

docs/results/public_local_steps.jsonl holds steps of a public measurement, https://github.com/Adnan082/diloco-measured
at 07b7885: 30,846,720 parameters on four machines with one L40S each, NCCL over TCP, links shaped with tc; first of
three repeats. ``exchange`` is the median of the time that one took, ``seconds`` and ``compute`` are means over all
``steps`` that were counted.

``--lab`` measures the lab once at one rate, as `gradstats bench-network --measure` does, and trains at others. Runs are
stored in docs/results/lab_local_steps*, and are not repeated. ``--write`` puts the tables into docs/network.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from statistics import median

import numpy as np
from records import DOCS, RESULTS, Row, put, store, stored

from capture.lab.cluster import shaped_network
from capture.lab.run import measure_network, train, train_without_exchange
from capture.workloads import RunConfig
from gradstats.network import Network, plan

PUBLIC, PAGE = RESULTS / "public_local_steps.jsonl", DOCS / "network.md"
NUMEL, WORKERS = 30_846_720, 4
LAB, NETWORK = RESULTS / "lab_local_steps.jsonl", RESULTS / "lab_local_steps.json"
RUN = RunConfig(workload="resnet20-digits", nproc=2, batch_size=16, steps=64)
FITTED_AT, RATES = 50 * 10**6, (20 * 10**6, 100 * 10**6)
LOCAL_STEPS, SYSTEMS = (0, 4, 16), ("none", "dense-bf16", "topk")
ROUNDS = 3
"""Runs of each kind: the machine is now faster, now slower, and a step without an exchange is timed in each round."""


def public() -> list[Row]:
    """Return the public measurement beside what a plan of its links says, which knows no more than their rate."""
    source = np.zeros(NUMEL, np.float32)
    rows = []
    for measured in stored(PUBLIC):
        steps, rate, compute = (measured[name] for name in ("local_steps", "rate", "compute"))
        network = Network.of_link(0, 8e-6 / rate)
        options = {"compressors": ["none"], "local_steps": [steps]}
        planned = plan(source, network, compute, [WORKERS], **options)[-1]
        exchange = max(steps, 1) * (planned["seconds"] - compute)
        # what was counted need not be whole intervals
        counted = compute + measured["exchanges"] / measured["steps"] * exchange
        rows.append(
            {
                **measured,
                "utilisation": compute / measured["seconds"],
                "planned_exchange": exchange,
                "planned_counted": compute / counted,
                "planned": planned["utilisation"],
            }
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return the comparison as Markdown."""
    lines = [
        "| system | H | Mbit/s | exchange s | predicted s | measured ÷ predicted | exchanges in counted steps | "
        "utilisation % | predicted % | in whole intervals % |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        exchange = r["exchange"] or r["seconds"] - r["compute"]
        cells = [
            {"ddp": "DDP", "diloco": "DiLoCo"}[r["system"]],
            f"{r['local_steps'] or '–'}",
            f"{r['rate']:,}",
            f"{exchange:.3g}",
            f"{r['planned_exchange']:.3g}",
            f"{exchange / r['planned_exchange']:.2f}",
            f"{r['exchanges']} in {r['steps']}",
            *(f"{100 * r[n]:.3g}" for n in ("utilisation", "planned_counted", "planned")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measure() -> list[Row]:
    """Return the steps measured in the lab; train what is not stored."""
    if not NETWORK.exists():
        with shaped_network(RUN.nproc, FITTED_AT) as cluster:
            alone = train_without_exchange(RUN.replace(steps=40), cluster)
            network = measure_network(cluster, alone.numel, RUN.ratio, SYSTEMS[1:], "network")
            dataclasses.replace(network, about={**network.about, "numel": alone.numel}).save(
                NETWORK
            )
    done = {(r["round"], r["rate"], r["local_steps"], r["compressor"]) for r in stored(LAB)}
    for number, rate in itertools.product(range(ROUNDS), RATES):
        missing = [
            each
            for each in itertools.product(LOCAL_STEPS, SYSTEMS)
            if (number, rate / 1e6, *each) not in done
        ]
        if not missing:
            continue
        with shaped_network(RUN.nproc, rate) as cluster:
            alone = train_without_exchange(RUN, cluster)
            for steps, name in missing:
                run = RUN.replace(compressor=name, local_steps=steps)
                row, *_ = train(run, cluster, alone.seconds)
                store(LAB, {"round": number, **row})
    return stored(LAB)


def lab_rows(runs: list[Row]) -> list[Row]:
    """Return what a plan says of each kind of run in the lab, beside the rounds that were measured."""
    network, rows = Network.load(NETWORK), []
    for rate in RATES:
        here = [r for r in runs if r["rate"] == rate / 1e6]
        planned = plan(
            np.zeros(network.about["numel"], np.float32),
            network,
            median(r["compute_alone"] for r in here),
            [RUN.nproc],
            compressors=SYSTEMS[1:],
            rates=[rate],
            local_steps=LOCAL_STEPS,
        )
        for steps, name in itertools.product(LOCAL_STEPS, SYSTEMS):
            key = (steps, name)
            of_plan = next(r for r in planned if (r["local_steps"], r["compressor"]) == key)
            took = [r["seconds"] for r in here if (r["local_steps"], r["compressor"]) == key]
            row = {"rate": rate / 1e6, "local_steps": steps, "compressor": name, "took": took}
            numbers = {end: of_plan[end] for end in ("seconds", "low", "high")}
            rows.append({**row, "measured": median(took), **numbers})
    return rows


def lab_table(rows: list[Row]) -> str:
    """Return the lab's steps and those of a plan as Markdown."""
    lines = [
        "| Mbit/s | H | compressor | measured ms a step, lowest to highest | predicted ms | 95 % interval | error % |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    for r in rows:
        seconds = (r["measured"], min(r["took"]), max(r["took"]), r["seconds"], r["low"], r["high"])
        middle, least, most, predicted, low, high = (f"{1e3 * each:,.0f}" for each in seconds)
        lines.append(
            f"| {r['rate']:g} | {r['local_steps'] or '–'} | `{r['compressor']}` | {middle}, {least} to {most} | "
            f"{predicted} | {low} to {high} | {100 * (r['seconds'] / r['measured'] - 1):+.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Predict, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/network.md")
    parser.add_argument("--lab", action="store_true", help="train in the lab, too")
    options = parser.parse_args()
    text = table(public())
    print(text)
    if options.write:
        put(PAGE, "public", text)
    if options.lab:
        text = lab_table(lab_rows(measure()))
        print(text)
        if options.write:
            put(PAGE, "lab local steps", text)


if __name__ == "__main__":
    main()
