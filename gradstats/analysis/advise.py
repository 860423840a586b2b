"""Which compression to try: what it cost in measured trainings whose gradients are most like these."""

# Size: a third of its lines are docstrings; what is measured, compared, chosen and said is one advice.

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Unpack

import numpy as np

from gradstats.analysis.agreement import agreement
from gradstats.analysis.closest import evenly
from gradstats.analysis.info import info_records
from gradstats.analysis.over import SpreadGradients, shares, subset_of
from gradstats.analysis.pieces import Key, sketches_of
from gradstats.analysis.verdicts import Verdict, setting_of, what_to_try
from gradstats.analysis.verdicts.advised import (
    FEWEST_ALIKE,
    Ranks,
    lossless_ratio,
    sparse_already,
)
from gradstats.analysis.verdicts.verdict import signed_percent
from gradstats.errors import InputError
from gradstats.primitives.ratio import check_number, target_count
from gradstats.primitives.sketch import Magnitudes
from gradstats.tables import Record, Records, Shown
from gradstats.trace import Kind
from gradstats.trace.sources import Source, TraceSource, open_source

__all__ = [
    "DIVERGED",
    "NEAREST",
    "SENT",
    "TOLERANCE",
    "Advice",
    "advice_for",
    "advise",
    "choose",
    "compared_kind",
    "distances",
    "energy_shares",
    "evidence",
    "family_of",
    "mean_above",
    "optimizer_of",
    "properties_of",
]

TOLERANCE = 0.02
"""Relative difference of the loss to dense training that is acceptable where nothing else is asked for."""
NEAREST = 5
"""Measured trainings that a prediction rests on. Of so many and one more that are alike, each is the worst as often: a
new one is worse than all five in one case of six."""
DIVERGED = 1e9
"""Relative difference of a loss that is not finite: JSON has no infinity."""
_MOST_STEPS = 5
"""Most steps whose properties are taken: one of each stretch of equal length."""
_FEWEST_ELEMENTS = 10
"""Elements of which a share of the energy is taken."""
_LEAST, _MOST = 1e-4, 1 - 1e-4
"""Ends of a share before its logit is taken."""
SENT = ("dense-bf16", "dense-fp8", "topk")
"""Compressors that a plan is to price for advice."""
_ENERGY = (0.01, 0.001)
_KINDS: tuple[Kind, ...] = ("gradient", "corrected")
_FAMILIES = {
    "Muon": ("dion", "muon", "shampoo", "soap"),
    "Adam": ("ada", "adem", "came", "lamb", "lion", "novograd", "prodigy", "rms", "sophia", "yogi"),
    "SGD": ("lars", "momentum", "nesterov", "sgd"),
}
"""What is in the names of each family's optimizers, as in FusedAdam and PagedAdamW8bit; the first that fits is it."""
_SAME = 1 - 1e-9
"""Mean cosine of ranks from which on they hold the same gradient."""
_SETTING = ("rule", "ratio", "memory", "format")
# What everything is compared with; it ends where it ends.
_DENSE: dict[str, Any] = {
    "rule": "none", "ratio": 1.0, "memory": "none", "format": "float32", "low": 0.0, "high": 0.0, "bytes": 1.0,
    "evidence": "", "distance": math.nan, "trainings": 0, "models": 0, "runs": 0, "acceptable": True,
    "reason": "what the others are compared with",
}  # fmt: skip
# What sends all elements that are not zero, of a gradient that has few.
_LOSSLESS = _DENSE | {
    "rule": "topk", "memory": "residual", "low": math.nan, "high": math.nan, "bytes": math.nan,
    "reason": "it leaves out zeros alone",
}  # fmt: skip


@cache
def evidence() -> Mapping[str, Any]:
    """Return the trainings that were measured, as ``benchmarks/losses.py --write`` stored them.

    Returns
    -------
    mapping of str to object
        ``trainings``, each with training, optimizer, properties by kind, and runs: rule, ratio, memory, format, steps,
        bytes (share of the dense ones) and above, the relative difference of the final losses to the dense ones, by
        seed. ``held_out``: what came of advice that was made for each training without it, what would have come of
        always the same, under which optimizers, and how far the trainings were that it rested on.
    """
    text = files("gradstats.analysis").joinpath("evidence.json").read_text(encoding="utf-8")
    measurements: Mapping[str, Any] = json.loads(text)
    return measurements


@dataclass(frozen=True, slots=True, repr=False)
class Advice(Shown):
    """What :func:`advise` recommends to try.

    Attributes
    ----------
    rule : str
        Name for :func:`gradstats.compressors.make_compressor`; ``"none"`` for dense averaging.
    ratio : float
        Kept fraction k/d; 1 for dense rules.
    memory : {"residual", "adam", "none"}
        Whether what is not sent is kept for later steps; ``"adam"`` for the steps of each rank's Adam,
        :class:`gradstats.hooks.AdamCorrection`.
    format : str
        Number format of the values that are sent.
    low, high : float
        Range of the relative difference of the loss to that of dense training, mean over the seeds, in the trainings
        it rests on.
    records : Records
        One record of each setting, that which is recommended first: rule, ratio, memory, format, low, high, bytes
        (share of the dense ones, of two workers), evidence (the trainings), distance (of the farthest of them, in
        standard deviations of the properties), trainings, models and runs (how many), reason; speedup,
        speedup_low and speedup_high where a plan was given. Of a gradient that is sparse already the first is the ratio
        at which it leaves out zeros alone, which no training was measured for.
    verdict : Verdict
        The recommendation and its reasons in sentences.
    """

    rule: str
    ratio: float
    memory: str
    format: str
    low: float
    high: float
    records: Records
    verdict: Verdict

    @property
    def setting(self) -> str:
        """The recommended setting in words; empty where it is dense averaging."""
        return "" if self.rule == "none" else setting_of(self.records[0])

    def _rows(self) -> Sequence[Record]:
        return self.records

    def __str__(self) -> str:
        return str(self.verdict)


@shares(SpreadGradients)
def advise(
    source: object,
    plans: Sequence[Record] = (),
    *,
    optimizer: str | None = None,
    tolerance: float = TOLERANCE,
    without: Sequence[str] = (),
    **over: Unpack[SpreadGradients],
) -> Advice:
    """Recommend a compressor, a ratio, a memory and a number format to try, with reasons.

    Parameters
    ----------
    source : str, Path, Trace or Source
        Trace of the training, or gradients of it.
    plans : sequence of mapping, optional
        Records of :func:`gradstats.plan` for one number of workers and one rate: what is no faster than dense is not
        recommended. Without them the setting that sends least is.
    optimizer : str, optional
        Name of the training's optimizer; as the trace has it if None.
    tolerance : float, optional
        Relative difference of the loss to dense training that is acceptable.
    without : sequence of str, optional
        Measured trainings that the advice is to be made without: by name with every optimizer, or, as ``name/sgd``,
        with one.
    **over : Unpack[SpreadGradients]
        Gradients to look at, as in :class:`gradstats.analysis.over.SpreadGradients`.

    Returns
    -------
    Advice
        The recommendation, and a record of each setting that was measured.

    Raises
    ------
    InputError
        If the source has no gradients, or they are not finite, or an option has a wrong value.

    Notes
    -----
    A setting is acceptable if it ended, in the mean over seeds, within the tolerance in each of the :data:`NEAREST`
    trainings it was measured in, with an optimizer of the same family (:func:`family_of`), whose gradients are most
    alike: by the shares of the energy that the largest 1 and 0.1 % have, the share of zeros, and the cosine of the
    ranks. Where the family is not known, a setting has to be acceptable with each. Left out are trainings whose loss
    says little of their optimizer. Short trainings of small models say little of a long one:
    :class:`gradstats.Trial` tries it.
    """
    opened = open_source(source)
    limit = check_number(tolerance, "tolerance", 0, math.inf, "[)")
    trainings = evidence()["trainings"]
    known = {t["training"] for t in trainings}
    if unknown := [name for name in without if name not in known | {*map(_named, trainings)}]:
        raise InputError(
            f"no training {unknown[0]!r} was measured; there are {', '.join(sorted(known))}"
        )
    kind, properties = properties_of(opened, over)
    optimizer = optimizer_of(opened) if optimizer is None else optimizer
    return advice_for(kind, properties, optimizer, limit, without=without, plans=plans)


def advice_for(
    kind: Kind,
    properties: Mapping[str, float],
    optimizer: str | None,
    tolerance: float = TOLERANCE,
    *,
    without: Sequence[str] = (),
    plans: Sequence[Record] = (),
) -> Advice:
    """Return what :func:`advise` recommends for a training whose gradients have these properties.

    Parameters
    ----------
    kind : Kind
        Kind that the properties are of.
    properties : mapping of str to float
        As :func:`properties_of` returns them.
    optimizer : str or None
        Name of the optimizer, if it is known.
    tolerance : float, optional
        Relative difference of the loss that is acceptable.
    without : sequence of str, optional
        Measured trainings that the advice is to be made without.
    plans : sequence of mapping, optional
        Records of a plan.
    """
    trainings = evidence()["trainings"]
    measured = [t for t in trainings if not {t["training"], _named(t)} & {*without}]
    records = choose(kind, properties, optimizer, tolerance, measured, plans)
    nonzero = properties.get("nonzero", 1.0)
    known = {name for name, value in properties.items() if not math.isnan(value)}
    # zeros alone tell no training from another
    enough = not known <= {"zeros", "nonzero"}
    compared = any(t["properties"].get(kind) for t in measured)
    lossless = _lossless(nonzero, plans) if nonzero and sparse_already(nonzero) else None
    # what a plan does not call faster, or has no time of, is not recommended, here either
    if lossless and plans and not lossless["speedup_low"] > 1:
        lossless, nonzero = None, 1.0
    if lossless:
        records.insert(0, lossless)
    elif not (nonzero and enough and compared):
        # nothing is recommended, and the records alone say so, too
        records.sort(key=lambda r: r["rule"] != "none")
        why = "too few elements to say" if compared else f"no {kind} was measured elsewhere"
        records[0] |= {"reason": why if nonzero else "all elements are zero"}
    best = records[0]
    fields = {name: best[name] for name in ("rule", "ratio", "memory", "format", "low", "high")}
    held, family = evidence()["held_out"], family_of(optimizer)
    # of advice that was made in another way it says nothing
    like_this = not plans and (kind, tolerance) == ("gradient", held["tolerance"])
    like_this = like_this and family in map(family_of, held["optimizers"])
    verdict = what_to_try(
        records,
        # a name that tells nothing is like no other
        optimizer if family else None,
        held if like_this else None,
        usual=held["distance"],
        planned=bool(plans),
        nonzero=nonzero,
        enough=enough,
        ranks=_ranks(properties),
        unlike=optimizer if optimizer and not family else "",
        unmeasured="" if compared else kind,
        fewest=FEWEST_ALIKE * len(_families(optimizer)),
    )
    return Advice(**fields, records=records, verdict=verdict)


def _families(optimizer: str | None) -> list[str]:
    """Return the families by which an optimizer is judged: its own, or each if that is not known."""
    family = family_of(optimizer)
    return [family] if family else [*_FAMILIES]


def _named(training: Mapping[str, Any]) -> str:
    """Return the name of a training with its optimizer, as :attr:`Advice.records` has it."""
    return f"{training['training']}/{training['optimizer']}"


def _ranks(properties: Mapping[str, float]) -> Ranks:
    """Return whether it is known how the ranks differ."""
    if "cosine" not in properties:
        return "unknown"
    return "same" if math.isnan(properties["cosine"]) else "compared"


def _lossless(nonzero: float, plans: Sequence[Record]) -> dict[str, Any]:
    """Return the record of the ratio that leaves out zeros alone; by a plan, of the next one that it has a time of."""
    ratio = lossless_ratio(nonzero)
    if plans:
        known = (p["ratio"] for p in plans if p["compressor"] == "topk" and p["ratio"] >= ratio)
        ratio = min(known, default=ratio)
    record = _LOSSLESS | {"ratio": ratio}
    return record | _planned(record, plans)


def optimizer_of(source: Source) -> str | None:
    """Return the name of the optimizer that a trace was captured with, if it says one.

    Parameters
    ----------
    source : Source
        Trace, or gradients that know of none.
    """
    stored = source.trace.attrs.get("optimizer") if isinstance(source, TraceSource) else None
    # metadata are whatever the user wrote
    name = stored.get("name") if isinstance(stored, Mapping) else stored
    return name if isinstance(name, str) else None


def family_of(optimizer: str | None) -> str | None:
    """Return which optimizers one is like.

    Parameters
    ----------
    optimizer : str or None
        Name of the optimizer, if it is known.

    Returns
    -------
    {"SGD", "Adam", "Muon"} or None
        Its step is in proportion to the gradient, or is scaled for each element, or for matrices; None where no name
        tells.
    """
    name = (optimizer or "").lower()
    fits = (family for family, parts in _FAMILIES.items() if any(part in name for part in parts))
    return next(fits, None)


def properties_of(
    source: Source, over: SpreadGradients | None = None
) -> tuple[Kind, dict[str, float]]:
    """Return what trainings are compared by, the median over some steps of the first rank.

    Parameters
    ----------
    source : Source
        Gradients.
    over : SpreadGradients, optional
        Shared options: which gradients to look at, and the cluster that does it.

    Returns
    -------
    kind : Kind
        Kind that was looked at: the gradient if there is one, else what it is compressed as.
    properties : dict of str to float
        Shares of Σg² that the largest 1 and 0.1 % hold, share of zeros, and the mean cosine of the ranks where several
        whole gradients are known, NaN if they are the same; and nonzero, the share of elements that are not zero at
        the step that has most.
    """
    over = over or {}
    keys, client = subset_of(over).keys(source), over.get("client")
    kinds = [key[1] for key in keys]
    if not source.numel:
        raise InputError(f"{source.name} has no elements to give advice from")
    kind = compared_kind(kinds)
    steps_of: dict[int, list[int]] = {}
    for rank, of_kind, step in keys:
        if of_kind == kind:
            steps_of.setdefault(rank, []).append(step)
    # a trace knows the zeros, NaN and infinities of every step of every rank; those that were chosen count
    chosen = set(keys)
    recorded = [
        r for r in info_records(source)
        if r["kind"] == kind and (r["rank"], r["kind"], r["step"]) in chosen
    ]  # fmt: skip
    for r in recorded:
        _check_finite(source, r.get("nonfinite", 0), r["rank"], r["step"])
    first = next(iter(steps_of))
    series: dict[str, list[float]] = {}
    shown: list[Key] = [
        (first, kind, step) for step in evenly(sorted(steps_of[first]), _MOST_STEPS)
    ]
    for (*_, step), sketched in sketches_of(source, shown, client).items():
        _check_finite(source, sketched.moments.nonfinite, first, step)
        magnitudes = sketched.magnitudes
        for ratio, share in energy_shares(magnitudes, source.numel, _ENERGY).items():
            series.setdefault(f"energy_{ratio:g}", []).append(share)
        series.setdefault("zeros", []).append(1 - magnitudes.count / source.numel)
        series.setdefault("nonzero", []).append(magnitudes.count / source.numel)
    properties = {name: float(np.median(values)) for name, values in series.items()}
    counted = [(source.numel - r["zeros"]) / source.numel for r in recorded if "zeros" in r]
    properties["nonzero"] = max([*series["nonzero"], *counted])
    common = sorted(set.intersection(*map(set, steps_of.values())))
    if len(steps_of) > 1 and common and not source.sketched(first, kind):
        # the last record is that of all steps and the whole gradient
        steps = evenly(common, _MOST_STEPS)
        compared = agreement(
            source, kinds=[kind], ranks=sorted(steps_of), steps=steps, client=client
        )
        # not known where a rank's gradient is of zeros at every step
        if not math.isnan(cosine := compared[-1]["cosine"]):
            # ranks that hold the same gradient, as after averaging, do not tell how workers differ
            properties["cosine"] = cosine if cosine < _SAME else math.nan
    return kind, properties


def _check_finite(source: Source, bad: int, rank: int, step: int) -> None:
    if bad:
        raise InputError(
            f"{source.name} has {bad:,} NaN or infinite elements at step {step}, rank {rank}: a sum over workers "
            "passes them on to all, mend that first; of a step that a loss scaler skipped look at other steps alone"
        )


def compared_kind(kinds: Sequence[Kind]) -> Kind:
    """Return the kind by which trainings are compared: the gradient, else what it is compressed as, else the first.

    Parameters
    ----------
    kinds : sequence of Kind
        Kinds that there are.
    """
    # what was not reduced yet, whatever it is called, is what a compressor gets
    return next((k for k in _KINDS if k in kinds), kinds[0])


def energy_shares(
    magnitudes: Magnitudes, numel: int, ratios: Iterable[float]
) -> dict[float, float]:
    """Return the share of Σg² that the largest elements hold.

    Parameters
    ----------
    magnitudes : Magnitudes
        Magnitudes of a gradient.
    numel : int
        Its elements, zeros included.
    ratios : iterable of float
        Kept fractions k/d.

    Returns
    -------
    dict of float to float
        Share by ratio, of those that leave ten elements; empty where the squares have no finite sum.
    """
    # squares beyond the range of float64 sum to infinity or to 0, of which nothing has a share
    total = magnitudes.count * magnitudes.mean_square if magnitudes.count else 0.0
    if not 0 < total < math.inf:
        return {}
    counts = {ratio: target_count(ratio, numel) for ratio in ratios}
    return {
        ratio: float(np.square(magnitudes.largest(k)).sum()) / total
        for ratio, k in counts.items()
        if k >= _FEWEST_ELEMENTS
    }


def choose(
    kind: Kind,
    properties: Mapping[str, float],
    optimizer: str | None,
    tolerance: float,
    measured: Sequence[Mapping[str, Any]],
    plans: Sequence[Record] = (),
) -> Records:
    """Return every measured setting with what it cost in the trainings most alike, the recommended one first.

    Parameters
    ----------
    kind : Kind
        Kind that the properties are of.
    properties : mapping of str to float
        As :func:`properties_of` returns them.
    optimizer : str or None
        Name of the optimizer; trainings with those of every family count if its own is not known.
    tolerance : float
        Relative difference of the loss that is acceptable.
    measured : sequence of mapping
        Trainings that were measured, as :func:`evidence` has them.
    plans : sequence of mapping, optional
        Records of a plan.

    Returns
    -------
    Records
        As :attr:`Advice.records`.
    """
    far = distances(kind, properties, measured)
    families = _families(optimizer)
    settings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for family in families:
        mine = [t for t in measured if family_of(t["optimizer"]) == family]
        mine.sort(key=lambda t: far[id(t)])
        for training in mine:
            for run in training["runs"]:
                key = tuple(run[n] for n in _SETTING)
                rows = settings.setdefault(key, [])
                name = _named(training)
                # a training may have been measured for several lengths: it counts once
                if len({r["of"] for r in rows if r["family"] == family} | {name}) <= NEAREST:
                    rows.append(run | {"of": name, "family": family, "far": far[id(training)]})
    records = Records([dict(_DENSE)])
    fewest = FEWEST_ALIKE * len(families)
    for key, rows in settings.items():
        records.append(dict(zip(_SETTING, key, strict=True)) | _judged(rows, tolerance, fewest))
    for record in records:
        record |= _planned(record, plans)
    # what a plan does not call faster is not worth a doubt; of the others the fastest, or without a plan the smallest
    good = [r for r in records if r["acceptable"] and (not plans or r["speedup_low"] > 1)]
    cost = (lambda r: -r["speedup"]) if plans else (lambda r: r["bytes"])
    best = min(good, key=cost, default=records[0])
    return Records([best, *sorted((r for r in records if r is not best), key=lambda r: r["bytes"])])


def distances(
    kind: Kind, properties: Mapping[str, float], candidates: Sequence[Mapping[str, Any]]
) -> dict[int, float]:
    """Return how far each training's gradients are from some properties, infinite where nothing is known of them.

    Parameters
    ----------
    kind : Kind
        Kind that the properties are of.
    properties : mapping of str to float
        As :func:`properties_of` returns them.
    candidates : sequence of mapping
        Trainings, as :func:`evidence` has them.

    Returns
    -------
    dict of int to float
        Distance by a training's ``id``, in units of the standard deviation of the properties.
    """
    known = {id(t): _scales(t["properties"].get(kind, {})) for t in candidates}
    mine = _scales(properties)
    # in units of how much trainings differ
    spread = {
        name: float(np.std([p[name] for p in known.values() if name in p])) or 1.0
        for name in mine
        if any(name in p for p in known.values())
    }
    distance_by_id = {}
    for each, theirs in known.items():
        common = [n for n in spread if n in theirs]
        squares = [((mine[n] - theirs[n]) / spread[n]) ** 2 for n in common]
        distance_by_id[each] = math.sqrt(float(np.mean(squares))) if squares else math.inf
    return distance_by_id


def _scales(properties: Mapping[str, float]) -> dict[str, float]:
    """Return properties on scales on which equal differences mean as much: shares as logits."""
    coordinates = {}
    for name, value in properties.items():
        if math.isnan(value):
            continue
        if name != "cosine":
            share = min(max(value, _LEAST), _MOST)
            value = math.log(share / (1 - share))
        coordinates[name] = value
    return coordinates


def _judged(rows: Sequence[Mapping[str, Any]], tolerance: float, fewest: int) -> dict[str, Any]:
    """Return what a setting cost in some trainings, if they are not fewer than are asked for."""
    # evidence.json cannot hold infinity, which is what a training that diverged ended at
    means = ((mean_above(row["above"]), row["of"]) for row in rows)
    above = [(math.inf if mean >= DIVERGED else mean, of) for mean, of in means]
    trainings = list(dict.fromkeys(row["of"] for row in rows))
    (low, _), (high, worst) = min(above), max(above)
    enough = len(trainings) >= fewest
    acceptable = enough and high <= tolerance
    if not enough:
        reason = f"was measured in fewer than {fewest} such trainings"
    elif acceptable:
        reason = f"ended at most {100 * tolerance:g} % above dense in all of them"
    elif math.isinf(high):
        reason = f"diverged in {worst}"
    else:
        reason = f"ended {signed_percent(high).lstrip('+')} % above dense in {worst}"
    return {
        "low": low,
        "high": high,
        "bytes": float(np.median([row["bytes"] for row in rows])),
        "evidence": ", ".join(trainings),
        "distance": max(row["far"] for row in rows),
        "trainings": len(trainings),
        # one training with two optimizers is of one model
        "models": len({name.partition("/")[0] for name in trainings}),
        "runs": sum(len(row["above"]) for row in rows),
        "acceptable": acceptable,
        "reason": reason,
    }


def mean_above(above: Sequence[float]) -> float:
    """Return the mean over seeds of how far a loss ended above dense: :data:`DIVERGED` where one of them did.

    Parameters
    ----------
    above : sequence of float
        Relative differences of the losses, by seed.
    """
    return DIVERGED if DIVERGED in above else float(np.mean(above))


def _planned(record: Record, plans: Sequence[Record]) -> dict[str, float]:
    """Return what a plan says of a setting; NaN where it says nothing."""
    names = ("speedup", "speedup_low", "speedup_high")
    for plan in plans:
        if (plan["compressor"], plan["ratio"] or 1.0) == (record["rule"], record["ratio"]):
            return {name: plan[name] for name in names}
    return dict.fromkeys(names, math.nan)
