"""Shape and quantile of the tail of gradients whose elements have few different values.

    python benchmarks/levels.py [--replicates N] [--again WORD]

Laplace elements (ξ = 0) are stored in a number format at a scale, or clipped, and the peaks over a threshold fitted, as
:func:`gradstats.pot.tail_quantile` does it. A cell is a format, a scale, a number of elements and a ratio; its row says
how often a fit was refused, how far ξ is off on the mean, and how often its 95 % interval and that of the quantile at a
tenth of the ratio hold the truth. Every cell is stored in docs/results/levels.jsonl as soon as it ends, and is not
repeated, so the program can be interrupted; ``--again WORD`` repeats the cells whose format contains the word.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from records import RESULTS, Row, by, complete, keep, stored

from gradstats import FitError, pot, sketch
from gradstats.statistics.pot.peaks import magnitudes_of, stability_at

PATH = RESULTS / "levels.jsonl"
SIZES = 3_000, 30_000, 100_000, 400_000
RATIOS = 0.1, 0.03, 0.01

Values = NDArray[np.float32]


def _cast(dtype: torch.dtype, scale: float) -> Callable[[Values], tuple[Values, float]]:
    """Return a rounding to a format after multiplication by a scale, or to the format's largest number if it is 0."""

    def rounded(x: Values) -> tuple[Values, float]:
        factor = scale or torch.finfo(dtype).max / float(np.abs(x).max())
        held = (torch.from_numpy(x) * factor).to(dtype).float()
        return (held / factor).numpy(), 1.0

    return rounded


def _integers(bits: int, share: float) -> Callable[[Values], tuple[Values, float]]:
    """Return a rounding to symmetric integers whose largest stands for the magnitude that a share exceeds."""

    def rounded(x: Values) -> tuple[Values, float]:
        top = 2 ** (bits - 1) - 1
        step = float(np.quantile(np.abs(x), 1 - share)) / top
        return (np.clip(np.rint(x / step), -top, top) * step).astype(np.float32), 1.0

    return rounded


def _clipped(share: float) -> Callable[[Values], tuple[Values, float]]:
    """Return a clipping of a share of the elements."""

    def clipped(x: Values) -> tuple[Values, float]:
        bound = float(np.quantile(np.abs(x), 1 - share))
        return np.clip(x, -bound, bound).astype(np.float32), 1.0

    return clipped


FORMATS: dict[tuple[str, str], Callable[[Values], tuple[Values, float]]] = {
    ("e5m2", "0.001"): _cast(torch.float8_e5m2, 1e-3),
    ("e5m2", "1"): _cast(torch.float8_e5m2, 1.0),
    ("e5m2", "largest"): _cast(torch.float8_e5m2, 0.0),
    ("e4m3", "0.02"): _cast(torch.float8_e4m3fn, 0.02),
    ("e4m3", "1"): _cast(torch.float8_e4m3fn, 1.0),
    ("e4m3", "largest"): _cast(torch.float8_e4m3fn, 0.0),
    ("float16", "1e-07"): _cast(torch.float16, 1e-7),
    ("float16", "1e-06"): _cast(torch.float16, 1e-6),
    ("float16", "1"): _cast(torch.float16, 1.0),
    ("bfloat16", "1e-07"): _cast(torch.bfloat16, 1e-7),
    ("bfloat16", "1"): _cast(torch.bfloat16, 1.0),
    ("int8", "largest"): _integers(8, 0.0),
    ("int8", "0.001 clipped"): _integers(8, 0.001),
    ("int4", "largest"): _integers(4, 0.0),
    ("int4", "0.001 clipped"): _integers(4, 0.001),
    ("float32", "0.0002 clipped"): _clipped(0.0002),
    ("float32", "0.002 clipped"): _clipped(0.002),
    ("float32", "0.02 clipped"): _clipped(0.02),
    ("float32", "1"): lambda x: (x, 1.0),
}
"""What holds the elements, by format and scale."""


def cells() -> Iterator[tuple[str, str, int, float]]:
    """Yield format, scale, number of elements and ratio of every cell."""
    for held, n, ratio in product(FORMATS, SIZES, RATIOS):
        yield *held, n, ratio


def simulate(name: str, scale: str, n: int, ratio: float, replicates: int) -> Row:
    """Return a cell's row.

    `covered` is the share of the intervals of ξ that hold 0, `quantile_covered` that of the quantile's.
    """
    seed = zlib.crc32(f"{name} {scale} {n}".encode())
    hold, truth = FORMATS[name, scale], -math.log(ratio / 10)
    shapes, covered, quantiles, reasons, flagged = [], [], [], set(), 0
    for i in range(replicates):
        x = np.random.default_rng([seed, i]).laplace(size=n).astype(np.float32)
        s = sketch(hold(x)[0])
        m = magnitudes_of(s)
        one = stability_at(m, ratio * n / m.count if m.count > ratio * n else 1.0, "mle")
        if one.status:
            reasons.add(one.status)
            continue
        flagged += any("few different" in flag for flag in one.flags)
        shapes.append(one.c)
        if not math.isnan(one.c_low):
            covered.append(one.c_low <= 0 <= one.c_high)
        try:
            far = pot.tail_quantile(s, ratio / 10, at=ratio)
        except FitError:
            continue
        if not math.isnan(far.low):
            quantiles.append(far.low <= truth <= far.high)
    mean = float(np.mean(shapes)) if shapes else None
    return {
        "format": name,
        "scale": scale,
        "n": n,
        "ratio": ratio,
        "replicates": replicates,
        "refused": replicates - len(shapes),
        "levels": flagged,
        "shape": mean if mean is None else round(mean, 4),
        "spread": round(float(np.std(shapes)), 4) if shapes else None,
        "intervals": len(covered),
        "covered": round(float(np.mean(covered)), 4) if covered else None,
        "quantile_covered": round(float(np.mean(quantiles)), 4) if quantiles else None,
        "reasons": sorted(reasons),
    }


def main() -> None:
    """Simulate the cells that are not stored, and print those whose coverage is off."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicates", type=int, default=100)
    parser.add_argument("--again", metavar="WORD", help="repeat the cells whose format has it")
    options = parser.parse_args()
    if options.again:
        keep(PATH, [row for row in stored(PATH) if options.again not in row["format"]])
    key = by("format", "scale", "n", "ratio")
    rows = complete(PATH, key, cells(), lambda *cell: simulate(*cell, options.replicates))
    for row in rows:
        if row["covered"] is not None and row["covered"] < 0.85:
            print(row)
    given = [r["covered"] for r in rows if r["covered"] is not None]
    print(
        f"{len(rows)} cells, {len(given)} with intervals, coverage {np.mean(given):.3f} on the mean"
    )


if __name__ == "__main__":
    main()
