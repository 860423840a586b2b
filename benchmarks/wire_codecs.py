"""Bits of coded positions, error of rounded values, and what coding costs, on the traces in data/.

    .venv/bin/python benchmarks/wire_codecs.py [--write]
    sudo .venv/bin/python benchmarks/wire_codecs.py --lab DIR [--write]

Rows are stored in docs/results/codecs.jsonl; ``--write`` also puts the tables into docs/measurements.md. Bits and
errors are the same on every machine. Nanoseconds are those of this one: the least of some repeats, one thread.
``--lab`` trains the LSTM on the Penn Treebank, whose folder is given, over links of three rates with and without
codecs. Those runs are stored in docs/results/codecs-lab.jsonl as soon as they end, and are not repeated. They need root
and a quiet machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from records import (
    DOCS,
    RESULTS,
    ROOT,
    Row,
    by,
    command,
    complete,
    grid,
    keep,
    missing,
    show,
    stored,
)

from capture.workloads import RunConfig
from gradstats.collectives.codec import SCALED, Codec
from gradstats.primitives import top_candidates
from gradstats.primitives.codec import rice_decode, rice_encode, rice_words
from gradstats.primitives.ratio import RATIOS, target_count
from gradstats.trace import open_trace

LAB, LAB_RATES = RESULTS / "codecs-lab.jsonl", (8_000_000, 80_000_000, 800_000_000)
WIRE = (("plain", "float32"), ("rice", "float32"), ("rice", "bfloat16"), ("rice", "int8"))
FILE, PAGE = RESULTS / "codecs.jsonl", DOCS / "measurements.md"
KINDS = {"resnet20": "gradient", "resnet20-ef": "corrected"}
"""Traces, and what a compressor saw in each."""
NUMEL, REPEATS = 1_000_000, 25
ROUNDED = ("float16", "bfloat16", "float8_e4m3fn", "int8", "int4", "int2")


def entropy(ratio: float) -> float:
    """Return the bits a position of an independent random choice needs at least."""
    return -(math.log2(ratio) + (1 - ratio) / ratio * math.log2(1 - ratio))


def bits() -> list[Row]:
    """Return the bits of a position and the relative error of the values, by trace and ratio."""
    rows = []
    for name, kind in KINDS.items():
        trace = open_trace(ROOT / "data" / f"{name}.zarr")
        for ratio in RATIOS:
            k = target_count(ratio, trace.numel)
            coded: list[float] = []
            errors: dict[str, list[float]] = {values: [] for values in ROUNDED}
            for step in trace.steps(trace.ranks[0]):
                gradient = trace.read(step, rank=trace.ranks[0], kind=kind)
                chosen = top_candidates(gradient, k)[1]
                indices = np.asarray(chosen.indices)
                coded.append(32 * rice_encode(indices).size / indices.size)
                values = torch.from_numpy(np.asarray(chosen.values, np.float32))
                for each, found in errors.items():
                    left = values - Codec(values=each).rounded(values).float()
                    found.append(float(left.norm() / values.norm()))
            rows.append(
                {
                    "what": "bits",
                    "trace": name,
                    "ratio": ratio,
                    "entropy": round(entropy(k / trace.numel), 4),
                    "rice": round(fmean(coded), 4),
                    "wire": round(32 * rice_words(k, trace.numel) / k, 4),
                    **{each: round(fmean(found), 5) for each, found in errors.items()},
                }
            )
    return rows


def nanoseconds(call: Callable[[], object], count: int) -> float:
    """Return the nanoseconds of one element: the least of some repeats."""
    call()
    spent = []
    for _ in range(REPEATS):
        started = time.process_time_ns()
        call()
        spent.append(time.process_time_ns() - started)
    return round(min(spent) / count, 2)


def costs() -> list[Row]:
    """Return the nanoseconds of coding an element, by codec and ratio."""
    torch.set_num_threads(1)
    rng, rows = np.random.default_rng(0), []
    for ratio in RATIOS:
        indices = np.flatnonzero(rng.random(NUMEL) < ratio)
        words = rice_encode(indices)
        count = indices.size
        both = (
            nanoseconds(lambda i=indices: rice_encode(i), count),  # type: ignore[misc]
            nanoseconds(lambda w=words, n=count: rice_decode(w, n, NUMEL), count),  # type: ignore[misc]
        )
        rows.append(cost("rice", ratio, *both))
    values = torch.from_numpy(rng.laplace(size=NUMEL // 100).astype(np.float32))
    for codec in (Codec(values=name) for name in SCALED):
        packed = codec.pack_values(values)
        both = (
            nanoseconds(lambda c=codec: c.pack_values(c.rounded(values)), len(values)),  # type: ignore[misc]
            nanoseconds(lambda c=codec, w=packed: c.unpack_values(w, len(values)), len(values)),  # type: ignore[misc]
        )
        rows.append(cost(codec.values, None, *both))
    return rows


def cost(codec: str, ratio: float | None, encode: float, decode: float) -> Row:
    """Return a row of costs."""
    return {"what": "cost", "codec": codec, "ratio": ratio, "encode": encode, "decode": decode}


def lab(data_dir: Path) -> list[Row]:
    """Return the steps measured in the lab; train what is not stored."""
    from capture.lab.cluster import shaped_network
    from capture.lab.run import train_without_exchange

    base = RunConfig(
        workload="lstm-ptb", data_dir=data_dir, nproc=2, steps=20, batch_size=8, hidden=400,
        compressor="topk", ratio=0.001,
    )  # fmt: skip
    key = by("rate", "indices", "values")
    for rate in LAB_RATES:
        if left := missing(LAB, key, ((rate, *each) for each in WIRE)):
            with shaped_network(base.nproc, rate) as network:
                alone = train_without_exchange(base, network).seconds
                complete(LAB, key, left, partial(one, base, network, alone))
    return stored(LAB)


def one(base: RunConfig, network: Any, alone: float, rate: int, indices: str, values: str) -> Row:
    """Train once in a network of this rate, and return the row that is stored."""
    from capture.lab.run import train

    options = {"indices": indices, "values": values}
    config = base.replace(options=options, label=f"{rate / 1e6:g} Mbit/s, {indices}, {values}")
    record, losses, _ = train(config, network, alone)
    fields = ("seconds", "compute_alone", "select", "communicate", "bytes")
    kept = {name: record[name] for name in fields}
    return {"rate": rate, **options, **kept, "losses": losses}


def lab_table(rows: list[Row]) -> str:
    """Return seconds, bytes and the last loss by rate and codec."""
    lines = []
    for row in rows:
        plain = next(r for r in rows if (r["rate"], r["indices"]) == (row["rate"], "plain"))
        cells = [f"{row['rate'] / 1e6:g}", f"`{row['indices']}`", f"`{row['values']}`"]
        cells += [f"{row['seconds']:.2f}", f"{row['seconds'] / plain['seconds']:.2f}"]
        cells += [
            f"{row['communicate']:.3f}",
            f"{row['bytes'] / 1e6:.3f}",
            f"{row['losses'][-1]:.3f}",
        ]
        lines.append(cells)
    heads = "Mbit/s: | positions | values | s/step: | ÷ plain: | exchange s: | MB sent: | loss:"
    return grid(heads, lines)


def tables(rows: list[Row]) -> dict[str, str]:
    """Return the tables of the page by their marks."""
    lines = []
    rounded, spent = [], []
    for row in rows:
        if row["what"] == "cost":
            ratio = "any" if row["ratio"] is None else f"{row['ratio']:g}"
            times = (f"{row[way]:.1f}" for way in ("encode", "decode"))
            spent.append([f"`{row['codec']}`", ratio, *times])
            continue
        head = row["trace"], f"{row['ratio']:g}"
        lines.append([*head, *(f"{row[each]:.2f}" for each in ("entropy", "rice", "wire")), "32"])
        rounded.append([*head, *(f"{row[each]:.2g}" for each in ROUNDED)])
    errors = " | ".join(["trace", "ratio:", *(f"{each}:" for each in ROUNDED)])
    return {
        "codec bits": grid(
            "trace | ratio: | entropy: | `rice`: | `rice`, with room: | plain:", lines
        ),
        "codec errors": grid(errors, rounded),
        "codec costs": grid("codec | ratio: | encode: | decode:", spent),
    }


def main() -> None:
    """Measure, store the rows, and print the tables."""
    parser = command(__doc__)
    parser.add_argument("--lab", type=Path, metavar="DIR", help="train in the lab instead")
    options = parser.parse_args()
    if options.lab:
        made = {"codec lab": lab_table(lab(options.lab))}
    else:
        keep(FILE, [*bits(), *costs()])
        made = tables(stored(FILE))
    show(made, options.write)


if __name__ == "__main__":
    main()
