"""What a trace of a training says in a few numbers for each kind and phase, and what many trainings say together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.agreement import agreement
from gradstats.analysis.closest import closest_laws, law_pairs
from gradstats.analysis.drift import dataset_of
from gradstats.analysis.peaks import mixture_records, pot_records
from gradstats.analysis.quality import quality_series
from gradstats.analysis.rules import COUNTING, judged_rules
from gradstats.analysis.wire import wire
from gradstats.errors import InputError
from gradstats.primitives.ratio import RATIOS
from gradstats.primitives.select import topk
from gradstats.statistics.compressibility import compressibility
from gradstats.tables import Records
from gradstats.trace import Kind
from gradstats.trace.sources import Source, Subset, open_source

__all__ = [
    *("LAGS", "LEVELS", "atlas_records", "claims", "components", "reused", "step_records"),
    "worst_cases",
]

LAGS = (1, 5, 20)
"""Ages, in steps, at which a threshold is compared with the one that is right; RedSync searches every fifth step."""

LEVELS = ("training", "optimizer", "phase", "layer", "rest")
"""Over what shapes vary: trainings, a training's optimizers, phases and layers, which cross each other, and the rest,
what some of these have together, with the error of the fit."""
_CLOSE = (0.8, 1.25)
"""k̂/k that is on target: SIDCo's own tolerance, and the same factor upwards."""
_CLAIMED = {
    **dict.fromkeys(("sidco-e", "sidco-gp", "sidco-p", "dgc", "gaussiank"), _CLOSE),
    "redsync": (1.0, 2.0),
}
"""k̂/k between which a paper says that its rule is."""
_REUSED = LAGS[1]
"""Steps for which RedSync uses a threshold."""
_FEWEST_TRAININGS = 5
"""Trainings from which a share of the variance has an interval."""
_DRAWS = 1000
_ENOUGH = 0.95
"""k̂/k of exact top-k above which there are enough elements that are not zero."""
_TAILS = (0.1, 0.01, 0.001)
_ENERGY = (0.01, 0.001)
_BITS_ERROR = 0.01
"""Relative squared error that the smallest format stays below."""
_ALIKE: tuple[Kind, ...] = ("update", "weight")
"""Kinds that all ranks share: there is nothing to compare."""


def atlas_records(source: object, phases: Mapping[str, Sequence[int]]) -> Records:
    """Reduce a trace of whole gradients to a record for each kind and phase.

    Parameters
    ----------
    source : str, Path, Trace or Source
        Trace of whole gradients, of several ranks.
    phases : mapping of str to sequence of int
        Captured steps of each phase by its name, neighbours of each other: two at least.

    Returns
    -------
    Records
        kind, phase, numel, ranks; law (the closest one, fitted at the first step of the phase and judged at the next,
        as in :func:`gradstats.analysis.closest.closest_laws`), by_layer, tail_error and chance; xi (shape of the tail
        by the share of the non-zero elements that it has, where a fit has enough); layers (shape of the largest
        tenth of each layer); energy (share of the squares that the largest 1 and 0.1 % have); zeros (share); p,
        p_low, p_high and compressible, as in :func:`gradstats.compressibility`; rules (geometric mean of k̂/k by rule
        and ratio); cosine, overlap and noise_scale of the ranks, None where they share the vector; format and bits of
        the smallest format with an error below 1 %. Where not said otherwise they are of the first rank; numbers of
        single gradients are of the phase's first step.

    Raises
    ------
    InputError
        If a phase has fewer than two steps, or a step is not in the trace.
    """
    opened, records = open_source(source), Records()
    for phase, steps in phases.items():
        if len(steps) < 2:
            raise InputError(f"phase {phase} needs two steps at least, to judge one by the other")
        # kinds and ranks are those of the phase's first step
        keys = [key for key in opened.entries() if key[2] == steps[0]]
        for kind in dict.fromkeys(key[1] for key in keys):
            ranks = sorted(key[0] for key in keys if key[1] == kind)
            records.append({"kind": kind, "phase": phase} | _one(opened, kind, steps, ranks))
    return records


def step_records(source: object) -> Records:
    """Reduce a trace of every step to a record of series for each kind.

    Parameters
    ----------
    source : str, Path, Trace or Source
        Trace of gradients or of sketches.

    Returns
    -------
    Records
        kind; steps; and for each of them, of the whole gradient of the first rank: rms (root mean square), zeros
        (share) and threshold (exact, by ratio).
    """
    opened = open_source(source)
    first = min(rank for rank, _, _ in opened.entries())
    measured = dataset_of(
        opened, Subset(ranks=[first]), quantities=("rms", "zero_fraction", "threshold")
    ).isel(rank=0, layer=0)
    records = Records()
    for kind in measured.kind.values:
        of = measured.sel(kind=kind)
        series = {"rms": of.rms, "zeros": of.zero_fraction}
        records.append(
            {"kind": str(kind), "steps": of.step.values.tolist()}
            | {name: values.values.tolist() for name, values in series.items()}
            | {"threshold": {str(r): of.threshold.sel(ratio=r).values.tolist() for r in RATIOS}}
        )
    return records


def reused(records: Sequence[Mapping[str, Any]]) -> Records:
    """Compare the exact threshold of each step with those of the steps before.

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`step_records`.

    Returns
    -------
    Records
        One record of each series of thresholds and each of :data:`LAGS`: what the given record has for names; ratio;
        lag; median and high, the factor (at least 1) that half and 95 % of the steps stay within; pairs, how many were
        compared. Steps with a threshold of zero, where k elements are not there, are left out.
    """
    comparisons = Records()
    for record in records:
        names = {n: v for n, v in record.items() if isinstance(v, str)}
        for ratio, thresholds in record["threshold"].items():
            values = np.array(thresholds, np.float64)
            # NaN of zeros: no factor lies between them and others
            logs = np.log(values, where=values > 0, out=np.full(values.shape, math.nan))
            for lag in LAGS:
                apart = np.abs(logs[lag:] - logs[:-lag])
                apart = apart[np.isfinite(apart)]
                if apart.size:
                    median, high = np.exp(np.quantile(apart, (0.5, 0.95)))
                    row = {"ratio": float(ratio), "lag": lag}
                    row |= {"median": float(median), "high": float(high), "pairs": apart.size}
                    comparisons.append(names | row)
    return comparisons


def _one(source: Source, kind: Kind, steps: Sequence[int], ranks: Sequence[int]) -> dict[str, Any]:
    """Return what one kind has in one phase."""
    first, rank = steps[0], ranks[0]
    over: dict[str, Any] = {"kinds": [kind], "ranks": [rank]}
    # in float64, where squares of float32 neither overflow nor vanish
    values = np.asarray(source.read(rank, kind, first).values, np.float64)
    total = float(np.square(values).sum())
    # fitted at the first step, judged at the second
    pairs = law_pairs(source, steps=steps[:2], **over)
    laws = closest_laws(pairs)
    tails = pot_records(source, _TAILS, steps=[first], **over)
    # one layer is its own pool
    shapes = mixture_records(source, steps=[first], **over) if len(source.layers) > 1 else []
    decay = compressibility(values)
    # all steps of the phase, in order: rules with a memory learn from one to the next
    rules = judged_rules(quality_series(source, RATIOS, steps=list(steps), **over))
    together: dict[str, Any] = {"cosine": None, "overlap": None, "noise_scale": None}
    if kind not in _ALIKE and len(ranks) > 1:
        # the last record is that of all steps and the whole gradient
        whole = agreement(source, steps=list(steps), kinds=[kind])[-1]
        together = {name: whole[name] for name in together}
    best = wire(source, steps=[first], **over).smallest(_BITS_ERROR)
    return {
        "numel": values.size,
        "ranks": len(ranks),
        "law": laws[0]["model"] if laws else None,
        "by_layer": laws[0]["by_layer"] if laws else None,
        "tail_error": laws[0]["tail_error"] if laws else math.nan,
        "chance": laws[0]["chance"] if laws else math.nan,
        # keys of JSON are texts, so those in memory are, too
        "xi": {str(r["ratio"]): r["c"] for r in tails if math.isfinite(r["ratio"])},
        "layers": {
            r["layer"]: r["c"] for r in shapes if r["layer"] not in ("pooled", "normalised")
        },
        "energy": {str(share): _energy(values, share, total) for share in _ENERGY},
        "zeros": float((values == 0).mean()),
        **{name: getattr(decay, name) for name in ("p", "p_low", "p_high", "compressible")},
        "rules": {r["estimator"]: {str(k): v for k, v in r["mean"].items()} for r in rules},
        **together,
        "format": best["format"] if best else None,
        "bits": best["bits"] if best else None,
    }


def _energy(values: NDArray[np.float64], share: float, total: float) -> float:
    # at least one element, as k everywhere
    largest = np.asarray(topk(values, max(round(share * values.size), 1)).values)
    return float(np.square(largest).sum()) / total if total else math.nan


def claims(records: Sequence[Mapping[str, Any]], series: Sequence[Mapping[str, Any]]) -> Records:
    """Count the trainings in which claims of the papers hold.

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`atlas_records`, each with its ``piece``.
    series : sequence of mapping
        Records of :func:`step_records`, each with its ``piece``.

    Returns
    -------
    Records
        One record for each claim, kind and ratio (NaN where it has none): claim; kind; ratio; holds, depends and fails,
        the numbers of pieces in all of whose phases it holds, in some, and in none. Ratios at which exact top-k does
        not find k elements are left out.
    """
    held: dict[tuple[str, str, float], dict[str, list[bool]]] = {}

    def add(claim: str, record: Mapping[str, Any], ratio: float, holds: bool) -> None:
        of = held.setdefault((claim, record["kind"], ratio), {})
        of.setdefault(record["piece"], []).append(holds)

    for record in records:
        if record["compressible"] is not None:
            add("compressible", record, math.nan, record["compressible"])
        for rule, (low, high) in _CLAIMED.items():
            for ratio, quality in record["rules"].get(rule, {}).items():
                if record["rules"]["exact"][ratio] > _ENOUGH:
                    add(rule, record, float(ratio), low <= quality <= high)
    for r in reused(series):
        if r["lag"] == _REUSED:
            add("reuse", r, r["ratio"], r["high"] <= _CLOSE[1])
    tallies = Records()
    for (claim, kind, ratio), by in held.items():
        all_of = sum(map(all, by.values()))
        none_of = len(by) - sum(map(any, by.values()))
        counts = {"holds": all_of, "depends": len(by) - all_of - none_of, "fails": none_of}
        tallies.append({"claim": claim, "kind": kind, "ratio": ratio} | counts)
    return tallies


def worst_cases(records: Sequence[Mapping[str, Any]]) -> Records:
    """Rank threshold rules by their worst training, and say whether that holds of a training that was left out.

    A rule is as far from k as |ln(k̂/k)| is large: at worst over the optimizers, kinds, phases and ratios of a training.
    Rules that count until they have k are left out, as are ratios at which exact top-k does not find k elements.

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`atlas_records`, each with its ``training``.

    Returns
    -------
    Records
        One record of each rule that is judged in every training, that with the best worst case first: estimator; worst
        (factor from k, at least 1) and where, the training of it; median (the factor, over trainings) with low and
        high, a distribution-free interval of 95 % at least, NaN of fewer than six trainings; chosen, of how many
        trainings it would be the choice when these are left out; held_out, the largest of its factors on these;
        trainings.
    """
    far: dict[str, dict[str, float]] = {}
    for record in records:
        # a gradient with fewer elements that are not zero than asked for has no k largest
        enough = [r for r, quality in record["rules"]["exact"].items() if quality > _ENOUGH]
        for rule, every in record["rules"].items():
            means = {ratio: every[ratio] for ratio in enough if ratio in every}
            if rule not in COUNTING and means:
                by = far.setdefault(rule, {})
                # the same factor both ways: half and twice k are equally far
                here = max(abs(math.log(quality)) for quality in means.values())
                by[record["training"]] = max(by.get(record["training"], 0.0), here)
    trainings = sorted({t for by in far.values() for t in by})
    # worst cases are comparable only over the same trainings
    far = {rule: by for rule, by in far.items() if len(by) == len(trainings)}
    held: dict[str, list[float]] = {rule: [] for rule in far}
    for out in trainings if far and len(trainings) > 1 else ():
        # chosen without the training that is left out, then judged on it
        best = min(far, key=lambda rule: max(v for t, v in far[rule].items() if t != out))
        held[best].append(far[best][out])
    ranking = Records()
    for rule, by in far.items():
        values = np.sort(list(by.values()))
        low, high = _median_interval(values)
        where = max(by, key=lambda t: by[t])
        ranking.append(
            {"estimator": rule, "worst": math.exp(by[where]), "where": where}
            | {"median": math.exp(float(np.median(values))), "low": low, "high": high}
            | {"chosen": len(held[rule])}
            | {"held_out": math.exp(max(held[rule])) if held[rule] else None}
            | {"trainings": len(trainings)}
        )
    ranking.sort(key=lambda r: r["worst"])
    return ranking


def _median_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return factors between which the median lies: order statistics, by the signs' binomial distribution."""
    from scipy.stats import binom

    n = values.size
    place = int(binom.ppf(0.025, n, 0.5))  # fewer than so many below the median have 2.5 % at most
    if place < 1:
        return math.nan, math.nan
    return math.exp(values[place - 1]), math.exp(values[n - place])


def components(records: Sequence[Mapping[str, Any]]) -> Records:
    """Split the variance of the layers' tail shapes over trainings, optimizers, phases and layers.

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`atlas_records`, each with its ``training`` and ``optimizer``.

    Returns
    -------
    Records
        One record per kind and level of :data:`LEVELS`: variance, share, and low and high of the share, the interval of
        1,000 draws of trainings with replacement, NaN of fewer than five; trainings, and values (shapes in all). A
        training counts that has two optimizers, phases and layers or more, with the layers that all of its phases have.

    Notes
    -----
    An analysis of variance of each training (Searle, Casella and McCulloch 1992): its layers are the same under every
    optimizer and in every phase, and phases are the same times, so all three cross. The variance of the means of a
    level, less what the others have left in it, is averaged over trainings; the means of trainings likewise. What falls
    below 0 is 0. All levels are taken as drawn from many.
    """
    variance_components = Records()
    for kind in dict.fromkeys(r["kind"] for r in records):
        cells: dict[str, dict[str, list[dict[str, float]]]] = {}
        for r in records:
            if r["kind"] == kind:
                # a file has None where a layer has no fit, a record in memory NaN
                known = {n: c for n, c in r["layers"].items() if c is not None and math.isfinite(c)}
                of = cells.setdefault(r["training"], {})
                of.setdefault(r["optimizer"], []).append(known)
        tables = [x for of in cells.values() if min((x := _crossed([*of.values()])).shape) > 1]
        if len(tables) < 2:
            continue
        # trainings are what is drawn: each is analysed once
        each = np.array([_of_training(x) for x in tables])
        variances = _variances(each)
        shares = variances / variances.sum()
        low = high = np.full(len(LEVELS), math.nan)
        if len(tables) >= _FEWEST_TRAININGS:
            # a constant seed: the same records give the same page
            rng = np.random.default_rng(0)
            drawn = []
            for places in rng.integers(len(tables), size=(_DRAWS, len(tables))):
                of_draw = _variances(each[places])
                drawn.append(of_draw / of_draw.sum())
            low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
        for i, level in enumerate(LEVELS):
            variance_components.append(
                {"kind": kind, "level": level, "variance": float(variances[i])}
                | {"share": float(shares[i]), "low": float(low[i]), "high": float(high[i])}
                | {"trainings": len(tables), "values": sum(x.size for x in tables)}
            )
    return variance_components


def _crossed(optimizers: Sequence[Sequence[Mapping[str, float]]]) -> NDArray[np.float64]:
    """Return shapes by optimizer, phase and layer, of the layers that all phases have."""
    phases = min(map(len, optimizers))
    every = [shapes for of in optimizers for shapes in of[:phases]]
    layers = [n for n in every[0] if all(n in shapes for shapes in every)]
    values = np.array([[shapes[n] for n in layers] for shapes in every], np.float64)
    return values.reshape(len(optimizers), phases, len(layers))


def _of_training(x: NDArray[np.float64]) -> list[float]:
    """Return the variances of the levels below a training, its mean, and the variance of that mean.

    `x` has an axis each for optimizers, phases and layers.
    """
    sizes = np.array(x.shape)

    def mean_square(*axes: int) -> float:
        # of what axes have together, beyond what fewer of them have
        of = x.mean(axis=tuple({0, 1, 2}.difference(axes)), keepdims=True)
        for axis in axes:
            of = of - of.mean(axis=axis, keepdims=True)
        return float(np.square(of).sum() / np.prod(sizes[[*axes]] - 1))

    error = mean_square(0, 1, 2)
    # a mean over an axis has its share of what that axis varies by
    pairs = {
        (a, b): mean_square(a, b) - error / sizes[3 - a - b] for a, b in ((0, 1), (0, 2), (1, 2))
    }
    single = [
        mean_square(axis) - error * sizes[axis] / x.size
        - sum(v / sizes[a + b - axis] for (a, b), v in pairs.items() if axis in (a, b))
        for axis in range(3)
    ]  # fmt: skip
    rest = error + sum(pairs.values())
    of_mean = error / x.size + sum(v / (sizes[a] * sizes[b]) for (a, b), v in pairs.items())
    return [*single, rest, float(x.mean()), of_mean + float(np.sum(single / sizes))]


def _variances(each: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the variances of :data:`LEVELS` over some trainings; each row is one's of :func:`_of_training`."""
    trainings = each[:, 4].var(ddof=1) - each[:, 5].mean()
    # a difference of variances falls below zero where a level has hardly any
    return np.maximum([trainings, *each[:, :4].mean(axis=0)], 0.0)
