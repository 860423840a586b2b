"""Coverage of every interval, and size of every test, that gradstats prints.

    python benchmarks/intervals.py [--only WORD] [--again WORD] [--write]

Simulates samples whose truth is known and counts how often a 95 % interval holds it, or a test at 5 % leaves it
standing. Laws are the models' own with independent elements, layers of different scale, and clusters of elements that
share a scale. Every case is stored in docs/results/coverage.jsonl as soon as it ends, and is not repeated, so the
program can be interrupted; ``--again WORD`` repeats the cases whose name contains the word. Replicate i of a case
draws from ``numpy.random.default_rng([seed, i])`` with the seed stored. ``--write`` puts the tables into
docs/coverage.md. All cases take most of an hour. (The file is not called coverage.py: Numba imports a
module of that name.)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np
import xarray
from micro_batches import ask_noise
from numpy.typing import NDArray
from records import RESULTS, Row, command, complete, grid, keep, show, stored
from recovery import TRUTHS
from scipy import stats
from scipy.optimize import brentq
from scipy.signal import lfilter
from scipy.special import gamma, ndtri
from statements import Said, Seen, statements

from gradstats import FitError, Magnitudes, compressibility, fit, goodness, pot, sketch
from gradstats.analysis.drift import drift_records
from gradstats.analysis.peaks import mixture_records
from gradstats.analysis.quality import inner_90, noise_floor
from gradstats.network import fit_line
from gradstats.statistics.compressibility import local_exponents
from gradstats.statistics.distributions import MAGNITUDES, SHAPES
from gradstats.statistics.laws.choice import solvers
from gradstats.statistics.resampling import mean_interval
from gradstats.trace.sources import open_source

PATH = RESULTS / "coverage.jsonl"
SEED = 1
LAYERS = 50
BAND = 0.02
"""How far from its level a coverage may be."""

Generator = np.random.Generator
Values = NDArray[np.float64]
Answer = tuple[float, float, float] | float | Said | Seen
"""Lower end, upper end and truth of an interval, the p-value of a true null hypothesis, or what is said in words."""

_LAWS = MAGNITUDES | {"pareto": stats.pareto}


@dataclass(frozen=True)
class Law:
    """A law of magnitudes with scale 1, and how elements depend on each other.

    ``layers``: 50 layers of the same size, whose scales are the quantiles of a log-normal with σ = 1. ``clusters``: 10
    to 20 elements share a scale, whose own law is such that every single element has the model's.
    """

    model: str = "laplace"
    shape: tuple[float, ...] = ()
    kind: str = "independent"

    def __str__(self) -> str:
        name = " ".join([self.model.replace("double_", ""), *(f"{s:g}" for s in self.shape)])
        return name if self.kind == "independent" else f"{name}, {self.kind}"

    @property
    def scales(self) -> Values:
        """Scales of the layers."""
        if self.kind != "layers":
            return np.ones(1)
        return np.exp(ndtri((np.arange(LAYERS) + 0.5) / LAYERS))

    @property
    def magnitude(self):
        """Distribution of one layer, for scale 1."""
        return _LAWS[self.model](*self.shape)

    def parts(self, rng: Generator, n: int) -> Values:
        """Draw magnitudes, a row for each layer."""
        scales = self.scales
        draw = _clustered if self.kind == "clusters" else _independent
        return scales[:, None] * draw(rng, n, self.model, *self.shape).reshape(scales.size, -1)

    def draw(self, rng: Generator, n: int) -> Values:
        """Draw magnitudes."""
        return self.parts(rng, n).ravel()

    def sf(self, x: float) -> float:
        """Return the share above a magnitude."""
        return float(self.magnitude.sf(x / self.scales).mean())

    def isf(self, share: float) -> float:
        """Return the magnitude that a share exceeds."""
        if self.kind != "layers":
            return float(self.magnitude.isf(share))
        top = float(self.magnitude.isf(share) * self.scales[-1])
        return float(brentq(lambda x: self.sf(x) - share, 0, top, xtol=1e-12, rtol=1e-12))

    @property
    def tail(self) -> float:
        """Shape of a layer's tail as a generalized Pareto; NaN for another law."""
        return (
            self.shape[0]
            if self.model == "double_genpareto"
            else 0.0
            if self.model == "laplace"
            else math.nan
        )

    def mean_excess(self, over: float) -> float:
        """Return the mean excess over a threshold; NaN where layers are not generalized Pareto."""
        above = self.magnitude.sf(over / self.scales)
        return float(np.average(self.scales + self.tail * over, weights=above)) / (1 - self.tail)

    def ideal(self, n: int) -> Magnitudes:
        """Return the law's own quantiles, whose estimate is what a misspecified one converges to."""
        each = n // self.scales.size
        values = self.magnitude.isf((np.arange(each) + 0.5) / each)
        return Magnitudes.from_values(np.outer(self.scales, values).ravel())


def _independent(rng: Generator, n: int, model: str, *shape: float) -> Values:
    if model == "gennorm":  # SciPy's is slow
        return rng.gamma(1 / shape[0], size=n) ** (1 / shape[0])
    return np.asarray(_LAWS[model](*shape).rvs(n, random_state=rng))


def _clustered(rng: Generator, n: int, model: str, *shape: float) -> Values:
    """Draw a scale mixture that has the model's law, one scale for 10 to 20 elements."""
    owner = np.repeat(np.arange(n // 10 + 1), rng.integers(10, 21, n // 10 + 1))[:n]
    count = int(owner[-1]) + 1
    if model in ("laplace", "norm", "gennorm"):  # uniform on (0, Z): Khinchine (1938)
        b = {"laplace": 1.0, "norm": 2.0}.get(model) or shape[0]
        unit = math.sqrt(2) if model == "norm" else 1.0
        return unit * rng.random(n) * (rng.gamma(1 + 1 / b, size=count) ** (1 / b))[owner]
    if model == "pareto":
        return np.exp(_clustered(rng, n, "laplace") / shape[0])
    if model == "dgamma":
        (a,) = shape
        return rng.beta(a, 1 - a, n) * rng.exponential(size=count)[owner]
    if model == "double_genpareto":
        (c,) = shape
        return rng.exponential(size=n) / (c * rng.gamma(1 / c, size=count)[owner])
    if model == "t":
        (df,) = shape
        return np.abs(rng.standard_normal(n)) * np.sqrt(df / rng.chisquare(df, count))[owner]
    if model == "lognorm":
        (s,) = shape
        both = rng.standard_normal(n) + rng.standard_normal(count)[owner]
        return np.exp(s * math.sqrt(0.5) * both)
    (c,) = shape  # Weibull: exponential over a positive stable scale (Kanter 1975)
    u, e = rng.uniform(0, math.pi, count), rng.exponential(size=count)
    stable = np.sin(c * u) / np.sin(u) ** (1 / c) * (np.sin((1 - c) * u) / e) ** ((1 - c) / c)
    return rng.exponential(size=n) / stable[owner]


@dataclass(frozen=True)
class Case:
    """One simulation: what is printed, of which law and how many elements."""

    name: str
    law: str
    n: int
    ask: Callable[[Generator], dict[str, Answer]] = field(repr=False)
    """One replicate: each quantity's interval with its truth, or its p-value."""
    replications: int
    stated: bool = True
    """Whether this regime is one that the interval or test is stated for."""
    outside: tuple[str, ...] = ()
    """Quantities that are outside their stated regime all the same."""
    level: float = 0.95
    brief: int = 0
    """Replications of the tests, which run it once in a regime that it is stated for."""

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from other cases."""
        return self.name, self.law, self.n

    @property
    def seed(self) -> int:
        """Seed of its replicates."""
        return zlib.crc32(repr((SEED, *self.key)).encode())


def measure(case: Case, replications: int) -> list[Row]:
    """Simulate a case; return a row for each quantity."""
    seen: dict[str, list[tuple[bool, bool, bool]]] = {}  # given, all too low, all too high
    kinds: dict[str, str] = {}
    for i in range(replications):
        for quantity, answer in case.ask(np.random.default_rng([case.seed, i])).items():
            if isinstance(answer, Said | Seen):
                kinds[quantity] = "statement" if isinstance(answer, Said) else "power"
                verdict = True, False, not answer[0]
            elif isinstance(answer, tuple):
                low, high, truth = answer
                verdict = bool(low <= high), bool(high < truth), bool(low > truth)
            else:
                kinds[quantity] = "test"
                verdict = not math.isnan(answer), False, bool(answer <= 1 - case.level + 1e-9)
            seen.setdefault(quantity, []).append(verdict)
    rows = []
    for quantity, verdicts in seen.items():
        given = [(low, high) for known, low, high in verdicts if known]
        lows, highs = (sum(side) for side in zip(*given, strict=True)) if given else (0, 0)
        rows.append(
            {
                "case": case.name,
                "quantity": quantity,
                "what": kinds.get(quantity, "interval"),
                "law": case.law,
                "n": case.n,
                "level": case.level,
                "replications": replications,
                "given": len(given),
                "covered": len(given) - lows - highs,
                "misses_low": lows,
                "misses_high": highs,
                "seed": case.seed,
                "regime": "stated" if case.stated and quantity not in case.outside else "outside",
            }
        )
    return rows


# What is asked of a sample


def ask_fit(law: Law, model: str, n: int, rng: Generator) -> dict[str, Answer]:
    """Ask for the parameters of a model, by every method that has its own solver."""
    m = sketch(law.draw(rng, n)).magnitudes
    answers: dict[str, Answer] = {}
    for method in _methods(model):
        truth = _truths(law, model, method)
        try:
            fitted = fit(m, model, method)
        except FitError:
            intervals = dict.fromkeys(truth, (math.nan, math.nan))
        else:
            intervals = {name: fitted.interval(name) for name in truth}
        for name, value in truth.items():
            answers[f"{name}, {method}"] = (*intervals[name], value)
    return answers


@cache
def _methods(model: str) -> list[str]:
    own = {s: method for (name, method), s in reversed(solvers().items()) if name == model}
    return sorted(own.values())


@cache
def _truths(law: Law, model: str, method: str) -> dict[str, float]:
    if law.kind == "layers":
        params = fit(law.ideal(1_000_000), model, method).params
    else:
        params = {"scale": 1.0} | dict(zip([SHAPES[model]], law.shape, strict=False))
    return {name: params[name] for name in (SHAPES[model], "scale") if name}


def ask_peaks(law: Law, n: int, share: float, rng: Generator) -> dict[str, Answer]:
    """Ask for mean excess, shape and modified scale over one threshold, and for quantiles further out."""
    m = sketch(law.draw(rng, n)).magnitudes
    mean = pot.mean_excess(m, [share])[0]
    row = pot.parameter_stability(m, [share])[0]
    c, scale = _peaks_truth(law, share)
    answers: dict[str, Answer] = {
        "mean excess": (mean.low, mean.high, law.mean_excess(mean.threshold)),
        "ξ": (row.c_low, row.c_high, c),
        "modified scale": (row.scale_low, row.scale_high, scale),
    }
    for part in (10, 1000):
        truth = _quantile(law, share / part)
        try:
            found = pot.tail_quantile(m, share / part, at=share)
        except FitError:
            answers[f"quantile at share/{part}"] = math.nan, math.nan, truth
        else:
            answers[f"quantile at share/{part}"] = found.low, found.high, truth
    if math.isnan(law.tail):
        del answers["mean excess"]
    return answers


_quantile = cache(Law.isf)


@cache
def _peaks_truth(law: Law, share: float) -> tuple[float, float]:
    """Return shape and modified scale: the law's, or those of the fit that misspecified ones converge to."""
    if law.kind != "layers" and not math.isnan(law.tail):
        return law.tail, 1.0
    row = pot.parameter_stability(law.ideal(1_000_000), [share])[0]
    return row.c, row.scale


def ask_choice(law: Law, n: int, rng: Generator) -> dict[str, Answer]:
    """Ask for the shape beyond the threshold that was chosen automatically."""
    m = sketch(law.draw(rng, n)).magnitudes
    seed = int(rng.integers(1 << 31))
    # the half that one split leaves is what the interval is about; more splits take their median
    choice = pot.choose_threshold(m, size=500, replicates=40, seed=seed, splits=1)
    if choice.estimate is None:
        return {"ξ": (math.nan, math.nan, math.nan)}
    truth = _peaks_truth(law, choice.estimate.ratio)[0]
    answers: dict[str, Answer] = {"ξ": (choice.estimate.c_low, choice.estimate.c_high, truth)}
    if not math.isnan(law.tail):
        answers["p_stable of the first"] = choice.candidates[0].p_stable
    return answers


def ask_mixture(law: Law, n: int, rng: Generator) -> dict[str, Answer]:
    """Ask for the shapes of layers together, each in its own unit, and one alone; test all for an exponential tail."""
    layers = {str(i): part for i, part in enumerate(law.parts(rng, n))}
    rows = {row["layer"]: row for row in mixture_records(open_source(layers))}
    truth = {"pooled": _peaks_truth(law, 0.1)[0], "normalised": law.tail, "0": law.tail}
    answers: dict[str, Answer] = {
        f"ξ, {'one layer' if name == '0' else name}": (
            rows[name]["c_low"],
            rows[name]["c_high"],
            c,
        )
        for name, c in truth.items()
    }
    answers["p of ξ = 0, one layer"] = rows["0"]["p_value"]
    answers["any ξ = 0 of 50 layers, Holm"] = min(rows[name]["p_holm"] for name in layers)
    return answers


def ask_decay(law: Law, n: int, rng: Generator) -> dict[str, Answer]:
    """Ask for the exponents of the default window, and of one range of ranks further down."""
    x = law.draw(rng, n)
    p, hill, local = _decay_truth(law, n)
    found, ranges = compressibility(x), local_exponents(x)
    middle = ranges[len(ranges) // 2]
    return {
        "p": (found.p_low, found.p_high, p),
        "Hill": (found.hill_low, found.hill_high, hill),
        "local exponent": (middle.p_low, middle.p_high, local),
    }


def ask_blocks(law: Law, n: int, rng: Generator) -> dict[str, Answer]:
    """Ask for the exponent's intervals by runs of neighbours, and by whole layers."""
    starts = np.arange(0, n, n // LAYERS) if law.kind == "layers" else None
    found = compressibility(law.draw(rng, n), layers=starts)
    p = _decay_truth(law, n)[0]
    answers: dict[str, Answer] = {"p, by runs": (found.runs_low, found.runs_high, p)}
    if starts is not None:
        answers["p, by layers"] = found.layers_low, found.layers_high, p
    return answers


def ask_window(law: Law, n: int, rng: Generator) -> dict[str, Answer]:
    """Ask for the exponent over ranks that do not begin with the first."""
    found = compressibility(law.draw(rng, n), (n // 500, n // 50))
    return {"p, ranks n/500 to n/50": (found.p_low, found.p_high, 1 / law.shape[0])}


@cache
def _decay_truth(law: Law, n: int) -> tuple[float, float, float]:
    if law.model == "pareto":
        return (1 / law.shape[0],) * 3
    ideal = law.ideal(n)
    found, ranges = compressibility(ideal), local_exponents(ideal)
    return found.p, found.hill, ranges[len(ranges) // 2].p


def ask_bootstrap(
    law: Law, n: int, method: str, statistic: str, rng: Generator
) -> dict[str, Answer]:
    """Test a law as itself, among 500 of its elements."""
    m = sketch(law.draw(rng, n)).magnitudes
    test = goodness.bootstrap(
        m,
        law.model,
        method,
        statistic=statistic,
        size=500,
        replicates=19,  # a p-value of 19 replicates is at most 0.05 in exactly 5 of 100
        seed=int(rng.integers(1 << 31)),
    )
    answers: dict[str, Answer] = {f"{statistic}, {method}": test.p_value}
    if statistic == "ks":
        answers[f"p_naive, {method}"] = test.p_naive
    return answers


def ask_nested(law: Law, n: int, rng: Generator) -> dict[str, Answer]:
    """Test a law against the models that it is a special case of."""
    m = sketch(law.draw(rng, n)).magnitudes
    special = fit(m, law.model, "mle")
    answers: dict[str, Answer] = {}
    for general in ("gennorm",) if law.model == "norm" else NESTING:
        try:
            answers[f"in {general}"] = goodness.compare(special, fit(m, general, "mle"), m).p_value
        except FitError:
            answers[f"in {general}"] = math.nan
    return answers


NESTING = ("dgamma", "double_genpareto", "gennorm", "dweibull")


def ask_vuong(law: Law, n: int, rng: Generator) -> dict[str, Answer]:
    """Test two models that are equally far from the law."""
    m = sketch(law.draw(rng, n)).magnitudes
    first, second = fit(m, "laplace", "mle"), fit(m, "norm", "mle")
    return {"Laplace or normal (Vuong)": goodness.compare(first, second, m).p_value}


@cache
def between() -> float:
    """Return the generalized normal's shape that Laplace and normal are equally far from."""

    def gap(b: float) -> float:
        mean, square = gamma(2 / b) / gamma(1 / b), gamma(3 / b) / gamma(1 / b)
        return math.log(2 * mean) + 1 - math.log(2 * math.pi * math.e * square) / 2

    return float(brentq(gap, 1, 2))


def ask_floor(law: Law, n: int, rng: Generator) -> dict[str, Answer]:
    """Ask whether k̂/k of the true law's threshold, and of a fitted one's, is within the noise floor."""
    x = law.draw(rng, n)
    k = n // 100
    low, high = 1 - noise_floor(k), 1 + noise_floor(k)
    kept = {"known law": _quantile(law, 0.01)}
    if law.model == "laplace":
        kept["fitted Laplace"] = fit(x, "laplace").threshold(0.01)
    if law.kind == "layers":
        del kept["fitted Laplace"]
    return {f"k̂/k of a {a}": (low, high, np.count_nonzero(x >= t) / k) for a, t in kept.items()}


def ask_spread(memory: float, n: int, rng: Generator) -> dict[str, Answer]:
    """Ask whether the range of 90 % of some values holds the next one."""
    y = autoregressive(memory, n + 1, rng)
    return {"next value": (*inner_90(y[:-1]), float(y[-1]))}


def autoregressive(memory: float, n: int, rng: Generator) -> Values:
    """Draw a stationary AR(1) series, or a random walk."""
    if memory == 1:
        return rng.standard_normal(n).cumsum()
    return np.asarray(lfilter([1], [1, -memory], rng.standard_normal(n + 1000))[-n:])


def ask_mean(memory: float, n: int, rng: Generator) -> dict[str, Answer]:
    """Ask for the mean of a series of k̂/k."""
    found = mean_interval(1 + 0.1 * autoregressive(memory, n, rng))
    return {"mean over steps": (found.low, found.high, 1.0)}


def ask_drift(memory: float, n: int, layers: int, rng: Generator) -> dict[str, Answer]:
    """Ask for the slope of series without one, and for tests of what they are."""
    level = np.stack([autoregressive(memory, n, rng) for _ in range(layers)], axis=1)
    values = np.exp(0.1 * level)[:, None, None, :]
    names = [str(i) for i in range(layers)]
    dataset = xarray.Dataset(
        {"mean": (("step", "rank", "kind", "layer"), values)},
        {"step": np.arange(n), "rank": [0], "kind": ["gradient"], "layer": names},
    )
    rows = drift_records(dataset, ["mean"])
    if layers > 1:
        return {f"any slope of {layers}, Holm": min(r["slope_p_holm"] for r in rows)}
    (row,) = rows
    answers: dict[str, Answer] = {
        "slope": (row["slope_low"], row["slope_high"], 0.0),
        "slope_p": row["slope_p"],
    }
    test = "adf_p" if memory == 1 else "kpss_p"
    return answers | {test: row[test]}


def ask_line(n: int, rng: Generator) -> dict[str, Answer]:
    """Ask for latency and bandwidth from medians of 15 noisy times of n sizes."""
    sizes = np.geomspace(1e3, 1e7, n)
    seconds = (1e-4 + 1e-9 * sizes)[:, None] * np.exp(0.05 * rng.standard_normal((n, 15)))
    fixed, slope = fit_line("all_reduce", 2, sizes, seconds).confidence()
    return {"fixed": (fixed.low, fixed.high, 1e-4), "slope": (slope.low, slope.high, 1e-9)}


# What is simulated

EACH = {200: 2000, 2000: 2000, 20_000: 500, 100_000: 500, 1_000_000: 500}
"""Replications by the number of elements: the standard error of 95 % is 0.5 to 1 point."""


def cases() -> Iterator[Case]:
    """Return every case, the cheap ones of a section first."""
    yield from _fits()
    yield from _decays()
    yield from _series()
    yield from _tests()
    yield from _peaks()
    for s in statements():
        name, options = f"statements, {s.name}", {"outside": s.outside, "brief": s.brief}
        yield Case(name, s.data, s.n, s.ask, s.replications, s.stated, **options)


def _fits() -> Iterator[Case]:
    wide = {
        "t": ("df, moments", "scale, moments"),
        "lognorm": ("s, moments", "scale, moments"),
    }
    for model, shape in TRUTHS.items():
        law = Law(model, shape)
        for n in (200, 2000, 1_000_000):
            ask = partial(ask_fit, law, model, n)
            outside = wide.get(model, ())
            if model == "dgamma" and n > 10_000:
                outside = ("a, closed", "scale, closed")
            brief = 100 * (n == 2000)
            yield Case("fit", str(law), n, ask, EACH[n], n >= 2000, outside, brief=brief)
        law = Law(model, shape, "clusters")
        for n, replications in ((2000, 1000), (1_000_000, 100)):
            ask = partial(ask_fit, law, model, n)
            yield Case("fit", str(law), n, ask, replications, stated=False)
    law = Law("laplace", (), "layers")
    for model in ("laplace", "dgamma", "double_genpareto", "gennorm"):
        for n, replications in ((2000, 1000), (1_000_000, 100)):
            ask = partial(ask_fit, law, model, n)
            yield Case("fit", f"{law}, as {model}", n, ask, replications, stated=False)


def _decays() -> Iterator[Case]:
    for law in (Law("pareto", (1.25,)), Law("pareto", (2.5,))):
        for n, replications in ((10_000, 1000), (1_000_000, 300)):
            ask = partial(ask_decay, law, n)
            brief = 40 * (n == 10_000)
            yield Case("compressibility", str(law), n, ask, replications, brief=brief)
    pareto, name = Law("pareto", (1.25,)), "compressibility, own window"
    yield Case(name, str(pareto), 10_000, partial(ask_window, pareto, 10_000), 1000, brief=50)
    name = "compressibility, blocks"
    for law in (pareto, Law("pareto", (1.25,), "clusters"), Law("laplace", (), "layers")):
        for n, replications in ((10_000, 500), (1_000_000, 100)):
            ask = partial(ask_blocks, law, n)
            brief = 50 * (law.kind == "independent" and n == 10_000)
            # stated for clusters of less than a tenth of a run, which is √n
            stated = law.kind == "independent" or (law.kind == "clusters" and n > 40_000)
            if law.kind != "layers" or n > 10_000:  # else too few elements of a layer
                yield Case(name, str(law), n, ask, replications, stated, brief=brief)
    for law in (
        Law("laplace"),
        Law("norm"),
        Law("laplace", (), "layers"),
        Law("pareto", (1.25,), "clusters"),
    ):
        for n, replications in ((10_000, 1000), (1_000_000, 100)):
            ask = partial(ask_decay, law, n)
            yield Case("compressibility", str(law), n, ask, replications, stated=False)


def _series() -> Iterator[Case]:
    slopes = {0.0: 20, 0.5: 40, 0.9: 150, 0.98: 1000, 1.0: math.inf}  # from so many steps on
    levels = {0.0: 60, 0.5: 400, 1.0: 400}  # KPSS and, of a random walk, ADF
    for memory, least in slopes.items():
        law = f"AR({memory:g})" if memory < 1 else "random walk"
        for n in (20, 60, 150, 400, *([1000] if memory == 0.98 else [])):
            ask = partial(ask_drift, memory, n, 1)
            brief = {(0.0, 60): 40, (1.0, 400): 30}.get((memory, n), 0)
            outside = () if n >= least else ("slope", "slope_p")
            if n < levels.get(memory, math.inf):
                outside = (*outside, "kpss_p", "adf_p")
            yield Case("drift", law, n, ask, 500, outside=outside, brief=brief)
    ask = partial(ask_drift, 0.5, 60, 10)
    yield Case("drift", "10 series of AR(0.5)", 60, ask, 500, brief=10)
    for memory in (0.0, 0.9):
        for n in (10, 20, 50, 200, 1000):
            ask = partial(ask_spread, memory, n)
            yield Case("low to high", f"AR({memory:g})", n, ask, 4000, stated=False, level=0.9)
    for memory, least in {0.0: 20, 0.5: 40, 0.9: 200}.items():
        for n in (20, 60, 150, 400):
            ask, brief = partial(ask_mean, memory, n), 150 * (memory == 0.5 and n == 60)
            name = "quality, mean over steps"
            yield Case(name, f"AR({memory:g})", n, ask, 2000, n >= least, brief=brief)
    for kind in ("normal", "heavy"):
        for micro, batch in ((2, 4), (4, 8), (8, 1), (4, 64)):
            for n in (20, 50):
                ask = partial(ask_noise, kind, micro, batch, n)
                law = f"{kind} inputs, {micro} micro-batches of {batch}"
                yield Case(
                    "monitor, noise", law, n, ask, 1000, brief=150 * (n == 50 and micro == 2)
                )
    for n in (5, 10, 20):
        ask = partial(ask_line, n)
        yield Case("bench-network", "a line, 5 % noise", n, ask, 1000, brief=50 * (n == 10))
    for law in (
        Law("laplace"),
        Law("double_genpareto", (0.15,)),
        Law("laplace", (), "layers"),
        Law("laplace", (), "clusters"),
    ):
        for n in (2000, 100_000):
            ask = partial(ask_floor, law, n)
            known = law.kind == "independent"
            outside = ("k̂/k of a fitted Laplace",)
            brief = 150 * (known and n == 2000)
            yield Case("quality", str(law), n, ask, EACH[n], known, outside, brief=brief)


def _tests() -> Iterator[Case]:
    for n in (200, 2000, 100_000):
        brief = 50 * (n == 2000)
        for law in (Law("laplace"), Law("norm")):
            yield Case("compare", str(law), n, partial(ask_nested, law, n), EACH[n], brief=brief)
        law = Law("gennorm", (between(),))
        ask = partial(ask_vuong, law, n)
        yield Case("compare", str(law), n, ask, EACH[n], n >= 2000, brief=brief)
    for law in (Law("laplace", (), "clusters"), Law("norm", (), "clusters")):
        yield Case("compare", str(law), 2000, partial(ask_nested, law, 2000), 500, stated=False)
    law = Law("gennorm", (between(),), "clusters")
    yield Case("compare", str(law), 2000, partial(ask_vuong, law, 2000), 500, stated=False)

    ways = {"laplace": "closed", "dgamma": "mle", "double_genpareto": "mle", "norm": "closed"}
    for statistic in ("ks", "ad"):
        for model, method in ways.items():
            law, name = Law(model, TRUTHS[model]), f"fit --bootstrap, {statistic}"
            naive = (f"p_naive, {method}",)
            ask = partial(ask_bootstrap, law, 500, method, statistic)
            brief = 50 * (model == "laplace")
            yield Case(name, str(law), 500, ask, 400, outside=naive, brief=brief)
            law = Law(model, TRUTHS[model], "clusters")
            if model in ("laplace", "dgamma"):
                for n in (500, 100_000):
                    ask = partial(ask_bootstrap, law, n, method, statistic)
                    yield Case(name, str(law), n, ask, 200, n > 10_000, outside=naive)


def _peaks() -> Iterator[Case]:
    for law in (Law("laplace"), Law("double_genpareto", (0.2,)), Law("double_genpareto", (0.4,))):
        for n, replications in ((2000, 1000), (20_000, 500), (1_000_000, 200)):
            ask = partial(ask_peaks, law, n, 0.1)
            brief = 50 * (n == 2000)
            heavy = ("mean excess",) if law.tail > 0.25 and n < 100_000 else ()
            yield Case("pot", str(law), n, ask, replications, outside=heavy, brief=brief)
    for law in (
        Law("norm"),
        Law("t", (4.0,)),
        Law("laplace", (), "layers"),
        Law("double_genpareto", (0.2,), "clusters"),
    ):
        for n, replications in ((2000, 500), (20_000, 300), (1_000_000, 100)):
            ask = partial(ask_peaks, law, n, 0.1)
            yield Case("pot", str(law), n, ask, replications, stated=False)
    law = Law("laplace", (), "layers")
    ask, pooled = partial(ask_mixture, law, 100_000), ("ξ, pooled",)
    yield Case("pot --layers", str(law), 100_000, ask, 200, outside=pooled, brief=10)
    name = "pot, threshold chosen"
    for law in (Law("laplace"), Law("double_genpareto", (0.2,)), Law("t", (4.0,))):
        n = 20_000 if law.shape else 10_000
        ask, brief = partial(ask_choice, law, n), 5 * (law.model == "laplace")
        yield Case(name, str(law), n, ask, 60, brief=brief)


SECTIONS = (
    "fit",
    "pot",
    "compressibility",
    "fit --bootstrap",
    "compare",
    "drift",
    "quality",
    "low to high",
    "monitor",
    "bench-network",
    "statements",
)
"""Tables of the page, by the beginning of their cases' names."""


def section_of(row: Row) -> str:
    """Return the table that a row belongs to."""
    name = row["case"].partition(",")[0]
    return "pot" if name.startswith("pot") else str(name)


def key_of(row: Row) -> tuple[str, str, int]:
    """Return the key of a row's case."""
    return row["case"], row["law"], row["n"]


def share(row: Row) -> float:
    """Return the share of the intervals given that hold the truth, or of the tests that reject nothing."""
    return row["covered"] / row["given"] if row["given"] else math.nan


def off(row: Row, chance: float = 0.05) -> bool:
    """Return whether a coverage is outside its band by more than the simulation's own error."""
    if row["what"] == "power":
        return False
    if row["what"] == "statement":  # right too often is no fault
        least = stats.binom.ppf(chance, row["given"], row["level"])
        return bool(row["covered"] < least)
    low, high = stats.binom.ppf(
        [chance, 1 - chance], row["given"], [row["level"] - BAND, row["level"] + BAND]
    )
    return not low <= row["covered"] <= high


def table(rows: list[Row]) -> str:
    """Return some rows as Markdown, with a column for each number of elements."""
    sizes = sorted({row["n"] for row in rows})
    lines = []
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        by_size = found.setdefault((row["law"], _what(row)), {})
        by_size[row["n"]] = row
    for (law, what), by_size in found.items():
        cells = [_cell(by_size[n]) if n in by_size else "" for n in sizes]
        lines.append([law, what, *cells])
    return grid(" | ".join(["law", "what", *(f"{n:,}:" for n in sizes)]), lines)


def _what(row: Row) -> str:
    if section_of(row) == "statements":
        return f"{row['case'].partition(', ')[2]}: {row['quantity']}"
    return row["quantity"] + {"pot, threshold chosen": ", threshold chosen"}.get(row["case"], "")


def _cell(row: Row) -> str:
    if not row["given"]:
        return "none"
    text = f"{100 * share(row):.1f}"
    text = f"**{text}**" if off(row) else text
    text = text if row["regime"] == "stated" else f"({text})"
    known = row["given"] / row["replications"]
    return text if known > 0.99 else f"{text} of {100 * known:.0f} %"


def named(rows: list[Row]) -> str:
    """Return the regimes with coverages outside their band as Markdown, those that are stated first."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda r: r["regime"] == "outside"):
        if row["given"] and off(row):
            groups.setdefault((row["regime"], section_of(row), row["law"]), []).append(row)
    lines = []
    for (regime, section, law), some in groups.items():
        sizes = ", ".join(f"{n:,}" for n in sorted({r["n"] for r in some}))
        what = "; ".join(dict.fromkeys(map(_what, some)))
        values = [
            [100 * r["covered"] / r["given"] for r in some],
            [100 * r["misses_low"] / r["given"] for r in some if r["what"] == "interval"],
            [100 * r["misses_high"] / r["given"] for r in some if r["what"] == "interval"],
        ]
        lines.append([regime, section, law, sizes, what, *map(_range, values)])
    heads = "regime | table | law | n: | what | covers, %: | too low, %: | too high, %:"
    return grid(heads, lines)


def _range(values: list[float]) -> str:
    if not values:
        return "–"
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low}–{high}"


def blocks(rows: list[Row]) -> dict[str, str]:
    """Return the tables of docs/coverage.md by the marks around them."""
    order = {case.key: i for i, case in enumerate(cases())}
    rows = sorted(rows, key=lambda r: order[key_of(r)])
    made = {name: [row for row in rows if section_of(row) == name] for name in SECTIONS}
    return {"outside": named(rows)} | {name: table(some) for name, some in made.items()}


def main() -> None:
    """Simulate what is not stored yet, and print the tables."""
    parser = command(__doc__, "coverage.md")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has the word")
    parser.add_argument("--again", metavar="WORD", help="repeat the cases whose name has the word")
    parser.add_argument("--results", type=Path, default=PATH, help="file of the stored rows")
    parser.add_argument("--replications", type=int, help="replications of every case")
    options = parser.parse_args()
    path: Path = options.results
    wanted = {c.key: options.replications or c.replications for c in cases()}
    rows = stored(path)
    kept = [r for r in rows if r["replications"] == wanted.get(key_of(r))]
    if options.again:
        kept = [r for r in kept if options.again not in r["case"]]
    if len(kept) < len(rows):
        keep(path, kept)
    chosen = {c.key: c for c in cases() if options.only in c.name}
    made = complete(path, key_of, chosen, lambda *key: measure(chosen[key], wanted[key]))
    show(blocks(made), options.write, "coverage.md")


if __name__ == "__main__":
    main()
