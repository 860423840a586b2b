"""Time of a fit, compared with SciPy's.

    python benchmarks/speed_of_fits.py

Single runs in seconds. SciPy's take about a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from scipy import stats

from gradstats import fit, goodness, sketch, warm_up


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    """Time the fits, and print the table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    warm_up()
    fit(np.random.default_rng(1).exponential(size=100), "double_genpareto", "mle")
    print("| 10,000,000 elements | this package, s | SciPy, s | largest relative difference |")
    print("|---|---:|---:|---:|")
    rng = np.random.default_rng(0)
    x = stats.genpareto(0.2).rvs(10_000_000, random_state=rng).astype(np.float32)
    rows = {
        "generalized Pareto, maximum likelihood": ("double_genpareto", stats.genpareto),
        "gamma, maximum likelihood": ("dgamma", stats.gamma),
        "Laplace, maximum likelihood": ("laplace", stats.expon),
    }
    for name, (model, theirs) in rows.items():
        started = time.perf_counter()
        ours = fit(x, model, "mle")
        middle = time.perf_counter()
        # float64: SciPy sums a float32 array in float32
        *shapes, _, scale = theirs.fit(x.astype(float), floc=0)
        ended = time.perf_counter()
        pairs = [(ours.params["scale"], scale), *zip([ours.shape], shapes, strict=False)]
        difference = max(abs(a / b - 1) for a, b in pairs)
        print(f"| {name} | {middle - started:.3f} | {ended - middle:.2f} | {difference:.1e} |")
    reduced = sketch(x)
    fitted = fit(reduced, "laplace")
    ours = seconds(lambda: goodness.goodness(fitted, reduced))
    theirs = seconds(lambda: stats.kstest(x, fitted.magnitude.cdf))
    print(
        f"| all distances of a fit, from the sketch; SciPy's kstest alone | {ours:.3f} | {theirs:.2f} |"
    )
    print(f"| the sketch itself | {seconds(lambda: sketch(x)):.3f} | |")


if __name__ == "__main__":
    main()
