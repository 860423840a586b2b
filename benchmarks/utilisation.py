"""Local steps predicted by `gradstats plan`, beside what others measured and beside runs in the lab.

    python benchmarks/utilisation.py --write

docs/results/public_local_steps.jsonl holds steps of a public measurement, https://github.com/Adnan082/diloco-measured
at 07b7885: 30,846,720 parameters on four machines with one L40S each, NCCL over TCP, links shaped with tc; first of
three repeats. ``exchange`` is the median of the time that one took, ``seconds`` and ``compute`` are means over all
``steps`` that were counted. ``--write`` puts the table into docs/network.md.
"""

from __future__ import annotations

import argparse

import numpy as np
from records import DOCS, RESULTS, Row, put, stored

from gradstats.network import Network, plan

PUBLIC, PAGE = RESULTS / "public_local_steps.jsonl", DOCS / "network.md"
NUMEL, WORKERS = 30_846_720, 4


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


def main() -> None:
    """Predict, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/network.md")
    options = parser.parse_args()
    text = table(public())
    print(text)
    if options.write:
        put(PAGE, "public", text)


if __name__ == "__main__":
    main()
