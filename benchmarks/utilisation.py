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
LOCAL_STEPS, SYSTEMS = (0, 4, 16), ("none", "topk")


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
            network = measure_network(cluster, alone.numel, RUN.ratio, ["topk"], "network")
            about = {**network.about, "compute": alone.seconds, "numel": alone.numel}
            dataclasses.replace(network, about=about).save(NETWORK)
    compute = Network.load(NETWORK).about["compute"]
    done = {(r["rate"], r["local_steps"], r["compressor"]) for r in stored(LAB)}
    for rate in RATES:
        missing = [
            each
            for each in itertools.product(LOCAL_STEPS, SYSTEMS)
            if (rate / 1e6, *each) not in done
        ]
        if not missing:
            continue
        with shaped_network(RUN.nproc, rate) as cluster:
            for steps, name in missing:
                run = RUN.replace(compressor=name, local_steps=steps)
                store(LAB, train(run, cluster, compute)[0])
    return stored(LAB)


def lab_table(rows: list[Row]) -> str:
    """Return the lab's steps and those of a plan as Markdown."""
    network = Network.load(NETWORK)
    records = plan(
        np.zeros(network.about["numel"], np.float32),
        network,
        network.about["compute"],
        [RUN.nproc],
        compressors=["topk"],
        rates=list(RATES),
        local_steps=LOCAL_STEPS,
    )
    planned = {(r["rate"], r["local_steps"], r["compressor"]): r for r in records}
    lines = [
        "| Mbit/s | H | compressor | measured ms a step | predicted ms | 95 % interval | error % |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    for r in rows:
        p = planned[r["rate"], r["local_steps"], r["compressor"]]
        low, high = (f"{1e3 * p[end]:,.0f}" for end in ("low", "high"))
        lines.append(
            f"| {r['rate']:g} | {r['local_steps'] or '–'} | `{r['compressor']}` | {1e3 * r['seconds']:,.0f} | "
            f"{1e3 * p['seconds']:,.0f} | {low} to {high} | {100 * (p['seconds'] / r['seconds'] - 1):+.0f} |"
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
        text = lab_table(measure())
        print(text)
        if options.write:
            put(PAGE, "lab local steps", text)


if __name__ == "__main__":
    main()
