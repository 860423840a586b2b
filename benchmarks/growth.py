"""How systems grow with the number of workers, in the network lab: time of a step, bytes, and what is selected.

    sudo .venv/bin/python benchmarks/growth.py [--write]

ResNet-20 on digits, for MiCRO's figure 1 and LAGS's table 2. A batch is shared out, so that the cores of this one
machine have as much to compute for many workers as for few. Each number of workers is stored in
docs/results/growth.jsonl as soon as it is measured, and is not measured again. It needs root and a quiet machine.
``--write`` also puts the table into docs/network.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from records import RESULTS, Row, by, command, complete, grid, show

from capture.lab.run import bench_network
from capture.workloads import RunConfig

FILE = RESULTS / "growth.jsonl"
WORKERS, BATCH = (2, 4, 8), 64
RATE, RATIO = 20 * 10**6, 0.01
SYSTEMS = ("none", "dense-bf16", "topk", "sidco-e", "cltk", "micro", "lags", "marsit")
FIELDS = (
    "compressor",
    "nproc",
    "seconds",
    "compute_alone",
    "select",
    "communicate",
    "overlapped",
    "bytes",
    "quality",
)


def table(rows: list[Row]) -> str:
    """Return the runs as Markdown: a line for each system, and three columns for each number of workers."""
    workers = sorted({row["nproc"] for row in rows})
    found = {(row["compressor"], row["nproc"]): row for row in rows}
    heads = [f"{n} workers, ms: | × dense: | kB:" for n in workers]
    lines = []
    for name in dict.fromkeys(row["compressor"] for row in rows):
        cells = []
        for n in workers:
            row, dense = found[name, n], found["none", n]
            cells += [f"{1e3 * row['seconds']:,.0f}", f"{dense['seconds'] / row['seconds']:.2f}"]
            cells += [f"{row['bytes'] / 1e3:,.1f}"]
        lines.append([f"`{name}`", *cells])
    alone = ", ".join(
        f"{1e3 * found['none', n]['compute_alone']:,.0f} ms with {n}" for n in workers
    )
    return f"{grid(' | '.join(['system', *heads]), lines)}\n\nA step without an exchange: {alone}."


def measure(workers: int, steps: int) -> Iterator[Row]:
    """Yield the row of each system with a number of workers."""
    config = RunConfig(
        workload="resnet20-digits", nproc=workers, batch_size=BATCH // workers, steps=steps,
        ratio=RATIO, evaluate=False, label=f"{workers} workers",
    )  # fmt: skip
    for record in bench_network(config, RATE, SYSTEMS):
        yield {field: record[field] for field in FIELDS}


def main() -> None:
    """Measure what is not stored yet, and print the table."""
    parser = command(__doc__, "network.md")
    parser.add_argument("--steps", type=int, default=23)
    options = parser.parse_args()
    cases = [(workers,) for workers in WORKERS]
    rows = complete(FILE, by("nproc"), cases, lambda workers: measure(workers, options.steps))
    show({"growth": table(rows)}, options.write, "network.md")


if __name__ == "__main__":
    main()
