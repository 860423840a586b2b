"""What gradstats says in words, on data whose truth is known: how often it is wrong, and how often it says it at all.

Cases of ``benchmarks/intervals.py``, which runs and stores them. A ``Said`` is right unless a statement was made that
the data do not bear out; a ``Seen`` is the statement made where it is true, which is its power.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import trials
import xarray
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.signal import lfilter

from gradstats import pot, sketch
from gradstats.analysis.agreement import _one as compared_ranks
from gradstats.analysis.agreement import _record as over_ranks
from gradstats.analysis.causes import Measured, explain
from gradstats.analysis.closest import closest_laws, law_pairs
from gradstats.analysis.compare import TOLERANCE
from gradstats.analysis.drift import drift_records
from gradstats.analysis.quality import _BestK
from gradstats.analysis.rules import judged_rules
from gradstats.analysis.verdicts import batch_sentence, closest_law, movement
from gradstats.hooks.spikes import Spikes
from gradstats.statistics.tails import widened_interval
from gradstats.thresholds.changes import compared
from gradstats.trace import Layer, TraceWriter, create_trace
from gradstats.trace.sources import open_source

Generator = np.random.Generator
Values: TypeAlias = NDArray[np.float64]


class Said(NamedTuple):
    """Whether what was said is right; nothing said is never wrong."""

    right: bool


class Seen(NamedTuple):
    """Whether what is so was said."""

    seen: bool


class Statement(NamedTuple):
    """A simulation: what is printed, of which data, and how many of them."""

    name: str
    data: str
    n: int
    ask: Callable[[Generator], dict[str, Any]]
    replications: int
    brief: int
    stated: bool = True
    outside: tuple[str, ...] = ()


# bench --compare

_ROWS, _ROUNDS = 40, 15
_TIMED = {"compressor": "exact", "numel": 1, "ratio": 0.1, "threads": 1, "quality": 1.0}


def _log_times(kind: str, rng: Generator) -> Values:
    shape = (_ROWS, _ROUNDS)
    if kind == "Student's t(4), 3 %":
        return 0.03 * rng.standard_t(4, shape)
    if kind == "Student's t(4), 10 %":
        return 0.1 * rng.standard_t(4, shape)
    if kind == "5 %, a fifth interrupted":
        interrupted = (rng.random(shape) < 0.2) * rng.exponential(0.5, shape)
        return 0.05 * rng.standard_normal(shape) + interrupted
    each = 0.05 * rng.standard_normal(shape)  # and what a process has for itself
    return each + 0.02 * rng.standard_normal((_ROWS, 1))


TIMES = (
    "Student's t(4), 3 %",
    "Student's t(4), 10 %",
    "5 %, a fifth interrupted",
    "5 %, and 2 % a process",
)


def ask_times(kind: str, rng: Generator) -> dict[str, Any]:
    """Ask what changed between two runs of 40 rows, of which the last is slower by half in the second table."""

    def rows(times: Values) -> list[dict[str, Any]]:
        return [
            _TIMED | {"numel": i, "streams": float(np.median(x)), "rounds": list(x)}
            for i, x in enumerate(times)
        ]

    old, new = (np.exp(_log_times(kind, rng)) for _ in range(2))
    found = compared(rows(new), rows(old))
    same = Said(not any(r["status"] in ("slower", "faster") for r in found))
    new[-1] *= 1.5
    changed = compared(rows(new), rows(old))[-1]
    new[-1] *= 1.2 / 1.5
    less = compared(rows(new), rows(old))[-1]
    return {
        "any row of 40 slower or faster": same,
        "a change of 1.5 is the same": Said(changed["status"] != "same"),
        "1.5 times, seen": Seen(changed["status"] == "slower"),
        "1.2 times, seen": Seen(less["status"] == "slower"),
    }


# compare


def _cause(runs: list[tuple[Values, Values]]) -> list[str]:
    """Return the causes of some steps of one rank and one layer."""
    measured, before = {}, []
    for step, pair in enumerate(runs):
        one = Measured.of([0], [0])
        here = [np.asarray(x, np.float32) for x in pair]
        one.add("w", (here[0].size,), here, before, None)
        measured[step, "gradient"], before = one, here
    return [c["all"] for c in explain(measured, (0, 0), TOLERANCE).values()]


def _gradient(law: str, n: int, rng: Generator) -> Values:
    if law == "normal":
        return rng.standard_normal(n)
    if law == "Laplace":
        return rng.laplace(size=n)
    return 1e-3 * rng.standard_t(3, n) * np.exp(rng.standard_normal(n))


def _float16(x: Values) -> Values:
    return x.astype(np.float16).astype(np.float32).astype(np.float64)


def _bfloat16(x: Values) -> Values:
    bits = x.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _int8(x: Values) -> Values:
    step = np.abs(x).max() / 127
    return np.rint(x / step) * step


SHORT = {"float16": _float16, "bfloat16": _bfloat16, "int8": _int8}


def ask_causes(law: str, n: int, rng: Generator) -> dict[str, Any]:
    """Ask why two gradients differ, for causes that are so and for those that are not."""
    x, other = (_gradient(law, n, rng) for _ in range(2))
    s = math.exp(rng.uniform(math.log(1.5), math.log(64)))
    answers: dict[str, Any] = {}
    for name, short in SHORT.items():
        (plain,) = _cause([(x, short(x))])
        answers[f"a factor beside {name} rounding"] = Said("B = " not in plain)
        answers[f"{name} rounding, seen"] = Seen(plain == f"{name} rounding of B")
    for name in ("float16", "bfloat16"):
        (scaled,) = _cause([(x, SHORT[name](s * x))])
        whole = ("accumulation", "loss scale", "world size")
        answers[f"a whole number beside {name}"] = Said(not scaled.startswith(whole))
        (near,) = _cause([(x, SHORT[name](1.01 * x))])
        answers[f"a factor of 1.01 in {name}, seen"] = Seen(near.startswith("a factor: B = 1.0"))
    (eight,) = _cause([(x, _float16(8 * x))])
    answers["8 times in float16, seen"] = Seen(
        eight.startswith("accumulation or world size: B = 8")
    )
    (data,) = _cause([(x, other)])
    answers["a cause of different data"] = Said(data.startswith(("different data", "not known")))
    steps = [_gradient(law, n, rng) for _ in range(5)]
    late = _cause([(steps[i], steps[max(i - 1, 0)]) for i in range(5)])
    answers["stale by one step, seen"] = Seen(all(c.startswith("stale: B") for c in late[1:]))
    return answers


def ask_clipping(steps: int, rng: Generator) -> dict[str, Any]:
    """Ask why one step of many is smaller: by a factor of its own, or clipped at the largest norm of the others."""
    runs = [math.exp(0.3 * rng.standard_normal()) * rng.standard_normal(500) for _ in range(steps)]
    at = int(rng.integers(steps))
    scaled = [(x, x * (rng.uniform(0.3, 0.95) if i == at else 1)) for i, x in enumerate(runs)]
    said = next(c for c in _cause(scaled) if c)
    limit = 1.01 * max(float(np.linalg.norm(x)) for x in runs)
    runs[at] *= rng.uniform(1.2, 2.9) * limit / np.linalg.norm(runs[at])
    clipped = [(x, x * min(1.0, limit / float(np.linalg.norm(x)))) for x in runs]
    seen = next(c for c in _cause(clipped) if c)
    return {
        "a factor in one step is clipping": Said(not said.startswith("clipping")),
        "one clipped step, seen": Seen(seen.startswith("clipping")),
    }


def ask_ranks(ranks: int, rng: Generator) -> dict[str, Any]:
    """Ask what a mean over ranks lacks: one of them, or nothing, or what no single rank explains."""
    common = rng.standard_normal(500)
    local = [common + rng.standard_normal(500) for _ in range(ranks)]

    def why(weights: Values) -> str:
        mean = np.average(local, axis=0, weights=weights)
        one = Measured.of(range(ranks), range(ranks))
        both = [np.asarray(x, np.float32) for x in (*local, *[mean] * ranks)]
        one.add("w", (500,), both, [], None)
        found = explain({(0, "gradient"): one}, (ranks, ranks), TOLERANCE)
        return found[0, "gradient", 0]["all"]

    even, j = np.ones(ranks), int(rng.integers(ranks))
    any_ = why(rng.uniform(0.2, 3, ranks))
    lacks, doubles = (why(even + change * (np.arange(ranks) == j)) for change in (-1, 1))
    return {
        "a rank missing or twice": Said(not any_.startswith("a rank")),
        "one rank missing, seen": Seen(lacks.endswith(f"without rank {j}")),
        "one rank twice, seen": Seen(doubles.endswith(f"rank {j} counts double in its mean")),
    }


# agreement

_RANKS, _ELEMENTS = 4, 200


def _together(correlation: float, rng: Generator) -> list[Values]:
    """Draw the ranks' gradients: a common one of norm 1, and noise with a variance of 4, a part of it shared."""
    common = np.full(_ELEMENTS, _ELEMENTS**-0.5)
    shared, own = rng.standard_normal(_ELEMENTS), rng.standard_normal((_RANKS, _ELEMENTS))
    noise = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    return list(common + 2 * noise / _ELEMENTS**0.5)


@cache
def _alike(correlation: float) -> tuple[float, float]:
    """Return the expected cosine and overlap of two ranks, by other means than what is asked for them."""
    rng = np.random.default_rng(1)
    drawn = np.array([_together(correlation, rng) for _ in range(4000)])
    units = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
    k = _ELEMENTS // 10
    chosen = np.zeros_like(drawn)
    np.put_along_axis(chosen, np.argsort(np.abs(drawn))[..., -k:], k**-0.5, axis=-1)
    return _product(units), _product(chosen)


def _product(vectors: Values) -> float:
    """Return the mean inner product of two ranks' vectors of norm 1: that of the sum has theirs and its own n."""
    of_sum = np.square(vectors.sum(axis=1)).sum(axis=-1)
    return float(np.mean(of_sum - _RANKS)) / (_RANKS * (_RANKS - 1))


def ask_agreement(correlation: float, steps: int, rng: Generator) -> dict[str, Any]:
    """Ask for the noise scale, for how alike ranks are, and whether a larger batch would pay."""
    found = [compared_ranks(_together(correlation, rng), [0.1], 8)[0] for _ in range(steps)]
    one = over_ranks({"step": None}, found, 1, 1, _RANKS)
    cosine, overlap = _alike(correlation)
    batch = 4.0 * math.exp(rng.uniform(-1, 1))
    said = batch_sentence(one | {"world": batch})
    pays, brings = "batch would pay: " in said, "bring little" in said
    wrong = (pays and batch > 4) or (brings and batch < 4)
    far = batch_sentence(one | {"world": 1}), batch_sentence(one | {"world": 16})
    return {
        "noise scale": (one["low"], one["high"], 4.0),
        "cosine": (one["cosine_low"], one["cosine_high"], cosine),
        "overlap": (one["overlap_low"], one["overlap_high"], overlap),
        "a larger batch pays or does not": Said(not wrong),
        "a fourth of the noise scale or four times, seen": Seen(
            "would pay: " in far[0] and "little" in far[1]
        ),
    }


# drift

SPACINGS: dict[str, Callable[[Generator, int], NDArray[np.int64]]] = {
    "bursts of 10": lambda _, n: np.arange(n) // 10 * 100 + np.arange(n) % 10,
    "dense start": lambda _, n: np.r_[np.arange(2 * n // 3), n + 20 * np.arange(n - 2 * n // 3)],
    "a random fifth": lambda rng, n: np.sort(rng.choice(5 * n, n, replace=False)),
}


def ask_uneven(spacing: str, memory: float, n: int, rng: Generator) -> dict[str, Any]:
    """Ask for the change over uneven steps of a series without one, and of one that moves."""
    at = SPACINGS[spacing](rng, n)
    level = lfilter([1], [1, -memory], rng.standard_normal(int(at[-1]) + 1001))[1000 + at]
    level *= math.sqrt(1 - memory**2)
    found = []
    for moves in (0.0, 4.0):
        values = np.exp(0.1 * (level + moves * at / at[-1]))[:, None, None, None]
        dataset = xarray.Dataset(
            {"mean": (("step", "rank", "kind", "layer"), values)},
            {"step": at, "rank": [0], "kind": ["gradient"], "layer": ["all"]},
        )
        found += drift_records(dataset, ["mean"])
    still, moving = found
    ends = still["total_change_low"], still["total_change_high"]
    return {
        "total change": (*ends, 1.0),
        "a change that is not there": Said("no trend" in movement(still)),
        "a change of four deviations, seen": Seen("no trend" not in movement(moving)),
    }


# Monitor

_RUN, _BREAK = 1000, 150

NORMS: dict[str, Callable[[Generator, int], Values]] = {
    "normal": lambda rng, n: 0.1 * rng.standard_normal((_RUN, n)),
    "Student's t(3)": lambda rng, n: 0.1 * rng.standard_t(3, (_RUN, n)),
    "AR(0.9)": lambda rng, n: (
        0.2 * math.sqrt(0.19) * lfilter([1], [1, -0.9], rng.standard_normal((_RUN, n)), axis=0)
    ),
    "common t(3)": lambda rng, n: (
        0.3 * rng.standard_t(3, (_RUN, 1)) + 0.05 * rng.standard_normal((_RUN, n))
    ),
    "decaying": lambda rng, n: (
        0.1 * rng.standard_normal((_RUN, n))
        - rng.uniform(0.3, 1, n) * np.log1p(np.arange(_RUN) / 10)[:, None]
    ),
}
"""Logarithms of the norms of some layers over 1,000 steps."""


def _alarms(spikes: Spikes, logs: Values) -> list[set[str]]:
    """Return the alarms of each of some steps that follow."""
    names, found = [str(i) for i in range(logs.shape[1])], []
    for row in np.exp(logs):
        values, _ = spikes.find(float(np.linalg.norm(row)), dict(zip(names, row, strict=True)))
        found.append({n for n in values if n != "spike" or not spikes.doubtful})
    return found


def ask_monitor(kind: str, layers: int, rng: Generator) -> dict[str, Any]:
    """Ask for alarms in 1,000 steps without any cause, and in runs where the first layer breaks at step 150."""
    logs = NORMS[kind](rng, layers)
    spikes, first = Spikes(map(str, range(layers)), 50, 6.0), np.arange(layers) == 0
    alarms = sum(map(bool, _alarms(spikes, logs[:_BREAK])))
    seen = {}
    for name, factor in {"30 times": 30.0, "6 times": 6.0, "a tenth": 0.1}.items():
        (some,) = _alarms(deepcopy(spikes), logs[_BREAK, None] + math.log(factor) * first)
        seen[name] = Seen(("spike/0" if factor > 1 else "collapse/0") in some)
    growth = np.arange(150)[:, None] * math.log(2) / 20 * first
    grown = _alarms(deepcopy(spikes), logs[_BREAK : _BREAK + 150] + growth)
    seen["doubling every 20 steps"] = Seen(any("growth/0" in some for some in grown))
    alarms += sum(map(bool, _alarms(spikes, logs[_BREAK:])))
    answers: dict[str, Any] = {
        "any alarm in 1,000 steps": Said(alarms == 0),
        "more than three in 1,000 steps": Said(alarms <= 3),
    }
    return answers | {f"{name}, seen": one for name, one in seen.items()}


# quality: does a rule hit k?


def ask_rules(memory: float, steps: int, rng: Generator) -> dict[str, Any]:
    """Ask whether rules hit k whose k̂/k varies by 10 % around 1, around 1.3 and around 2."""

    def judged(factor: float) -> dict[str, Any]:
        noise = lfilter([math.sqrt(1 - memory**2)], [1, -memory], rng.standard_normal(steps + 200))
        labels = {"trace": "t", "kind": "gradient", "layer": "all", "estimator": "sidco-e"}
        labels |= {"ratio": 0.01, "k": 100_000, "design": 1.0, "seen": True, "rank": 0}
        series = [
            labels | {"step": i, "selected": factor * 1e5 * math.exp(0.1 * e)}
            for i, e in enumerate(noise[200:])
        ]
        (rule,) = judged_rules(series)
        return dict(rule)

    one, near, far = (judged(f) for f in (1.0, 1.3, 2.0))
    return {
        "mean k̂/k": (one["low"][0.01], one["high"][0.01], 1.0),
        "hits k, at 1.3 k": Said(near["hits"] is not True),
        "misses k, at k": Said(one["hits"] is not False),
        "hits k at k, seen": Seen(one["hits"] is True),
        "misses k at 2 k, seen": Seen(far["hits"] is False),
    }


LENGTHS = {"independent": 1, "runs of 15": 15, "runs of 200": 200, "runs of 5,000": 5000}
"""Neighbours that share a scale, which is 1, or 3 for a fifth of them."""


def ask_design(length: int, steps: int, rng: Generator) -> dict[str, Any]:
    """Ask what k̂/k of the true law's threshold is, of a few gradients whose neighbours are large together."""
    n, k = 200_000, 2000

    def share(t: float) -> float:
        return 0.8 * math.exp(-t) + 0.2 * math.exp(-t / 3)

    threshold = brentq(lambda t: share(t) - k / n, 0, 100)
    labels = {"trace": "t", "kind": "gradient", "layer": "all", "estimator": "sidco-e"}
    labels |= {"ratio": k / n, "k": k, "seen": True, "rank": 0}
    series, alone = [], []
    for step in range(steps):
        scales = np.repeat(np.where(rng.random(-(-n // length)) < 0.2, 3, 1), length)[:n]
        x = scales * rng.exponential(size=n)
        selected = int(np.count_nonzero(x >= threshold))
        series.append(labels | {"step": step, "selected": selected, "design": _BestK(x).design(k)})
        alone.append(series[-1] | {"design": 1.0})
    (rule,), (careless,) = judged_rules(series), judged_rules(alone)
    r = k / n
    return {
        "mean k̂/k": (rule["low"][r], rule["high"][r], 1.0),
        "mean k̂/k without the design effect": (careless["low"][r], careless["high"][r], 1.0),
    }


def ask_shape(length: int, n: int, rng: Generator) -> dict[str, Any]:
    """Ask for ξ of the top tenth of generalized Pareto elements, of which neighbours share a scale."""
    c, k = 0.2, n // 10
    scales = np.repeat(rng.gamma(1 / c, size=-(-n // length)), length)[:n]
    x = rng.exponential(size=n) / (c * scales)
    (row,) = pot.parameter_stability(sketch(x).magnitudes, [k / n])
    design = _BestK(x).design(k)
    return {
        "ξ": (row.c_low, row.c_high, c),
        "ξ with the design effect": (*widened_interval(row.c, row.c_low, row.c_high, design), c),
    }


# Which law is closest?

_STEPS = 4

LAWS: dict[str, tuple[Callable[[Generator, int], Values], tuple[str, ...]]] = {
    "Laplace": (
        lambda rng, n: rng.exponential(size=n),
        ("Laplace", "double gamma", "double gen. Pareto"),
    ),
    "double gen. Pareto 0.2": (lambda rng, n: rng.pareto(5, n), ("double gen. Pareto",)),
    "double gamma 0.6": (lambda rng, n: rng.gamma(0.6, size=n), ("double gamma",)),
    "two scales, 1 and 30": (
        lambda rng, n: np.where(rng.random(n) < 0.02, 30, 1) * rng.exponential(size=n),
        (),
    ),
    "log-normal 1.5": (lambda rng, n: np.exp(1.5 * rng.standard_normal(n)), ()),
    "ξ of 0.1 to 0.5 by step": (lambda rng, n: rng.pareto(1 / rng.uniform(0.1, 0.5), n), ()),
}
"""Magnitudes, and the laws that hold them."""


def ask_closest(law: str, n: int, rng: Generator) -> dict[str, Any]:
    """Ask which law is closest, fitted at each of four steps and judged at the next one."""
    draw, true = LAWS[law]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.zarr"
        create_trace(path, [Layer("w", 0, (n,))], world_size=1)
        writer = TraceWriter(path, 0)
        for step in range(_STEPS):
            gradient = draw(rng, n) * rng.choice((-1, 1), n)
            writer.append(step, {"gradient": gradient.astype(np.float32)})
        writer.close()
        verdict = closest_law(closest_laws(law_pairs(open_source(path))))
    said, none = verdict.headline, verdict.headline.startswith("None")
    named = ": thresholds within" in said
    right = said.startswith(true)
    why = re.search(
        r"at ratio 0\.\d+ is .*too (low|high)( by a factor of [\d.]+)? at step \d", verdict.numbers
    )
    answers = {
        "a law that the data have not": Said(right or not named),
        "none without ratio, error and step": Said(not none or why is not None),
    }
    if true:
        return answers | {"the law, seen": Seen(named and right)}
    return answers | {"none, seen": Seen(none)}


# Trial


def ask_trial(noise: str, rng: Generator) -> dict[str, Any]:
    """Ask a trial whose pairs differ by none, by the tolerance, and by 5 % in the mean."""
    said = trials.decisions(noise, rng)
    none, edge, more = (said[mean] for mean in (0.0, trials.TOLERANCE, 0.05))
    return {
        "refused where there is no difference": Said(none != "refused"),
        "refused at the tolerance": Said(edge != "refused"),
        "confirmed at the tolerance": Said(edge != "confirmed"),
        "no difference, confirmed": Seen(none == "confirmed"),
        "5 % above, refused": Seen(more == "refused"),
    }


def ask_training(optimizer: str, rng: Generator) -> dict[str, Any]:
    """Ask a trial of a dense training beside itself with other batches, and with a tenth of the learning rate."""
    said = trials.trained(optimizer, int(rng.integers(2**30)))
    return {
        "dense beside dense refused": Said(said["batches"] != "refused"),
        "a tenth of the rate, refused": Seen(said["rate"] == "refused"),
    }


# What is simulated


def statements() -> Iterator[Statement]:
    """Return every case."""
    for kind, many in zip(TIMES, (100, 40, 40, 40), strict=True):
        brief = 5 * (kind in (TIMES[0], TIMES[-1]))
        yield Statement("bench --compare", kind, 15, partial(ask_times, kind), many, brief)
    for law in ("normal", "Laplace", "t(3), layers"):
        for n in (200, 5000):
            ask = partial(ask_causes, law, n)
            yield Statement("compare, causes", law, n, ask, 60, 10 * (n == 5000))
    for steps in (4, 24, 50):
        ask = partial(ask_clipping, steps)
        yield Statement(
            "compare, clipping", "norms vary by 30 %", steps, ask, 100, 15 * (steps == 24)
        )
    for ranks in (3, 8):
        ask = partial(ask_ranks, ranks)
        yield Statement("compare, ranks", "half common", ranks, ask, 100, 10)
    for correlation, n, many in ((0.0, 24, 300), (0.0, 60, 80), (0.05, 24, 80)):
        name = f"correlation {correlation:g} of ranks' noise"
        ask, brief = partial(ask_agreement, correlation, n), 4 * (n == 60)
        shared = ("noise scale", "a larger batch pays or does not") if correlation else ()
        yield Statement("agreement", name, n, ask, many, brief, outside=shared)
    for spacing in SPACINGS:
        for memory in (0.0, 0.5):
            ask = partial(ask_uneven, spacing, memory, 60)
            name = f"{spacing}, AR({memory:g})"
            yield Statement("drift, uneven", name, 60, ask, 200, 15 * (memory > 0))
    for kind in NORMS:
        for layers in (1, 5) if kind == "decaying" else (1, 5, 60):
            ask, hard = partial(ask_monitor, kind, layers), kind in ("AR(0.9)", "common t(3)")
            brief = 3 * (layers == 5 and hard)
            yield Statement("Monitor", kind, layers, ask, 40, brief)
    for name, length in LENGTHS.items():
        for steps in (1, 3):
            ask, brief = partial(ask_design, length, steps), 75 * (steps == 1 and length <= 15)
            # the range of three is wider than their mean's interval
            outside = () if length < 512 and steps == 1 else ("mean k̂/k",)
            if length > 1 or steps > 1:
                outside = (*outside, "mean k̂/k without the design effect")
            yield Statement("quality, design", name, steps, ask, 400, brief, outside=outside)
    for length, name in ((1, "independent"), (15, "runs of 15"), (200, "runs of 200")):
        for n in (20_000, 200_000):
            ask, brief = partial(ask_shape, length, n), 50 * (n == 20_000 and length <= 15)
            # runs that long make counts vary more than the shape, and the interval too wide
            outside = ("ξ", "ξ with the design effect")[: 1 + (length > 15)] if length > 1 else ()
            yield Statement("report, tail", name, n, ask, 300, brief, outside=outside)
    for law in LAWS:
        for n, many in ((20_000, 35), (200_000, 20)):
            ask, brief = partial(ask_closest, law, n), 3 * (n == 20_000)
            yield Statement("report, closest law", law, n, ask, many, brief)
    for noise in trials.DIFFERENCES:
        ask, data = partial(ask_trial, noise), f"differences {noise}"
        # most samples of a few have less than the mean of a skewed difference
        skewed = () if noise in trials.EVEN else ("confirmed at the tolerance",)
        yield Statement("Trial", data, trials.PAIRS, ask, 500, 50, outside=skewed)
    for optimizer in trials.OPTIMIZERS:
        ask = partial(ask_training, optimizer)
        brief = 3 * (optimizer == "SGD")  # fewer could not leave the band
        yield Statement("Trial", f"digits, {optimizer}", trials.PAIRS, ask, 100, brief)
    for memory, least in {0.0: 5, 0.5: 60}.items():
        for n in (5, 10, 24, 60):
            ask, brief = partial(ask_rules, memory, n), 50 * (n == 60)
            name = f"AR({memory:g})"
            yield Statement("quality, hits k", name, n, ask, 500, brief, stated=n >= least)
