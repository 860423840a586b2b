"""Recovery of known parameters by every model and method, and coverage of their 95 % intervals.

    python benchmarks/recovery.py [-n 2000] [--replicates 1000]

Fits simulated samples of known parameters. The first table has each parameter's mean estimate, its bias, and how
often the 95 % interval holds the truth. The second one has how often tests at 5 % reject samples of their own model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from pages import grid
from rich.console import Console
from rich.progress import track

from gradstats import FitError, fit
from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.distributions import MAGNITUDES, SHAPES
from gradstats.statistics.goodness import bootstrap
from gradstats.statistics.laws.choice import solvers

TRUTHS: dict[str, tuple[float, ...]] = {
    "laplace": (),
    "dgamma": (0.6,),
    "double_genpareto": (0.15,),
    "norm": (),
    "t": (6.0,),
    "gennorm": (0.8,),
    "dweibull": (0.7,),
    "lognorm": (1.0,),
}
SCALE = 0.01


@dataclass(frozen=True)
class Recovery:
    """Results of many fits to samples of one law, by name of the parameter."""

    truth: dict[str, float]
    mean: dict[str, float]
    deviation: dict[str, float]
    coverage: dict[str, float]
    failed: int


def recover(
    model: str, method: str, shape: tuple[float, ...], n: int, replicates: int, seed: int = 0
) -> Recovery:
    """Fit one model to many simulated samples, and summarise the estimates."""
    rng = np.random.default_rng(seed)
    law = MAGNITUDES[model](*shape, scale=SCALE)
    truth = {"scale": SCALE}
    if SHAPES[model]:
        truth = {SHAPES[model]: shape[0], **truth}
    found: dict[str, list[float]] = {name: [] for name in truth}
    covered = dict.fromkeys(truth, 0)
    failed = 0
    for _ in range(replicates):
        sample = Magnitudes.from_values(np.asarray(law.rvs(n, random_state=rng)))
        try:
            fitted = fit(sample, model, method)
        except FitError:
            failed += 1
            continue
        for name, value in truth.items():
            low, high = fitted.interval(name)
            found[name].append(fitted.params[name])
            covered[name] += low <= value <= high
    done = replicates - failed
    return Recovery(
        truth,
        {name: float(np.mean(v)) for name, v in found.items()},
        {name: float(np.std(v)) for name, v in found.items()},
        {name: c / done for name, c in covered.items()},
        failed,
    )


def table(n: int, replicates: int) -> str:
    """Return the recovery of every model and method as Markdown."""
    lines = []
    for model, method in _progress(list(solvers())):
        r = recover(model, method, TRUTHS[model], n, replicates)
        for name, truth in r.truth.items():
            bias = 100 * (r.mean[name] / truth - 1)
            cells = f"{truth:g}", f"{r.mean[name]:.4g}", f"{bias:+.2f}"
            lines.append([model, method, name, *cells, f"{100 * r.coverage[name]:.1f} %"])
    heads = "model | method | parameter | truth: | mean: | bias, %: | 95 % interval holds it:"
    return grid(heads, lines)


def _progress(cases: list[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    return track(cases, "simulating", console=Console(stderr=True))


def calibration(n: int, samples: int) -> str:
    """Return how often tests at 5 % reject samples of their own model, as Markdown."""
    lines = []
    cases = [("laplace", "closed"), ("dgamma", "mle"), ("double_genpareto", "mle")]
    rng = np.random.default_rng(1)
    for model, method in _progress(cases):
        law = MAGNITUDES[model](*TRUTHS[model])
        for statistic in ("ks", "ad"):
            tests = [
                bootstrap(
                    law.rvs(n, random_state=rng),
                    model,
                    method,
                    statistic=statistic,
                    size=n,
                    replicates=99,
                    seed=i,
                )
                for i in range(samples)
            ]
            rejected = 100 * np.mean([t.p_value <= 0.05 for t in tests])
            naive = 100 * np.mean([t.p_naive <= 0.05 for t in tests])
            shown = f"{naive:.1f} %" if statistic == "ks" else "–"
            lines.append([model, method, statistic, f"{rejected:.1f} %", shown])
    heads = "model | method | statistic | bootstrap rejects: | naive Kolmogorov test rejects:"
    return grid(heads, lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=2000, help="elements of a sample")
    parser.add_argument("--replicates", type=int, default=1000, help="samples of each law")
    options = parser.parse_args()
    print(table(options.n, options.replicates))
    print()
    print(calibration(500, options.replicates // 2))


if __name__ == "__main__":
    main()
