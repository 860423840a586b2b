"""What pseudo-gradients are like beside gradients: tails, agreement of ranks, thresholds, means over senders.

    options="gpt-pydoc --nproc 4 --local-steps 20 --steps 240 --every 1 --dtype bfloat16"
    gradstats capture $options --compressor none --out dense.zarr
    gradstats capture $options --outer sparseloco --out sparse.zarr
    python benchmarks/local_steps.py dense.zarr sparse.zarr --write

Rows are stored in docs/results/local_steps.jsonl; ``--write`` also puts tables into docs/measurements.md. A number
is the median over the exchanges from the fifth on, and its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from records import RESULTS, Row, command, grid, keep, show, stored

from gradstats import compressibility, open_trace, quality
from gradstats.compressors import ChunkTopK
from gradstats.primitives import top_candidates
from gradstats.trace import Trace

FILE = RESULTS / "local_steps.jsonl"
RATIO = 0.01
FIRST = 4
"""First exchange that counts: the warm-up of the learning rate is over."""
COLUMNS = {
    "share": "energy of the largest 1 %",
    "decay": "decay p",
    "cosine": "cosine of two ranks",
    "senders": "senders of a top-1 % position",
    "norm": "norm over senders ÷ over ranks",
}


def measured(vectors: list[NDArray[np.float32]]) -> dict[str, float]:
    """Return what the vectors of all ranks are like in one step."""
    k = max(1, round(RATIO * vectors[0].size))
    squares = [np.sort(np.square(v.astype(np.float64)))[::-1] for v in vectors]
    chosen = [np.asarray(top_candidates(v, k)[1].indices) for v in vectors]
    cosines = [
        float(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))
        for a, b in combinations(vectors, 2)
    ]
    total, count = np.zeros(vectors[0].size), np.zeros(vectors[0].size)
    for vector in vectors:
        sent = ChunkTopK().select(torch.from_numpy(vector))
        total[sent.indices.numpy()] += sent.values.numpy()
        count[sent.indices.numpy()] += 1
    over_senders = np.linalg.norm(total / np.maximum(count, 1))
    return {
        "share": float(np.mean([s[:k].sum() / s.sum() for s in squares])),
        "decay": compressibility(vectors[0]).p,
        "cosine": float(np.mean(cosines)),
        "senders": sum(map(len, chosen)) / len(np.unique(np.concatenate(chosen))),
        "norm": float(over_senders / np.linalg.norm(total / len(vectors))),
    }


def rows(trace: Trace) -> list[Row]:
    """Return one row for each kind of vector in a trace."""
    about, steps, found = trace.attrs, trace.steps()[FIRST:], []
    for kind in trace.kinds(0):
        each = [measured([trace.read(s, r, kind) for r in trace.ranks]) for s in steps]
        kept = quality(trace, [RATIO], kinds=[kind])
        found.append(
            {
                "workload": about["workload"],
                "size": about["size"],
                "compressor": about["compressor"],
                "ranks": len(trace.ranks),
                "local_steps": about["local_steps"]["steps"],
                "kind": kind,
                "exchanges": len(steps),
                **{
                    name: [
                        round(float(np.quantile([e[name] for e in each], q)), 4)
                        for q in (0.5, 0, 1)
                    ]
                    for name in COLUMNS
                },
                "kept": {r["estimator"]: round(r["mean"], 3) for r in kept},
            }
        )
    return found


def tables(stored_rows: Sequence[Row]) -> dict[str, str]:
    """Return rows as tables, by the mark of their place."""
    heads = {
        "vectors": list(COLUMNS.values()),
        "kept": [f"`{name}`" for name in stored_rows[0]["kept"]],
    }
    found = {}
    for mark, columns in heads.items():
        lines = []
        for row in stored_rows:
            if mark == "vectors":
                cells = ["{:.3g} ({:.3g}–{:.3g})".format(*row[name]) for name in COLUMNS]
            else:
                cells = [f"{kept:.3g}" for kept in row["kept"].values()]
            lines.append([row["compressor"], row["kind"], *cells])
        found[mark] = grid(" | ".join(["exchange", "vector", *(f"{c}:" for c in columns)]), lines)
    return found


def main() -> None:
    """Measure traces, and write the page."""
    parser = command(__doc__)
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    options = parser.parse_args()
    if options.traces:
        keep(FILE, [row for path in options.traces for row in rows(open_trace(path))])
    show(tables(stored(FILE)), options.write)


if __name__ == "__main__":
    main()
