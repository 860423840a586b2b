"""Verdicts on what was measured: a headline, the numbers behind it, and whether something is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradstats.analysis.drift import FEWEST_STEPS, movement
from gradstats.analysis.rules import COUNTING, judged_rules
from gradstats.analysis.verdicts import (
    Verdict,
    closest_law,
    counting_rules,
    decay_shown,
    tail_tests,
    which_rule,
)
from gradstats.analysis.worth import should_compress
from gradstats.primitives.ratio import target_count
from gradstats.report.measured import Measured
from gradstats.statistics.compressibility import control
from gradstats.statistics.pot import FEWEST
from gradstats.statistics.tails import widened_interval
from gradstats.trace import Kind
from gradstats.trace.sources import Source, TraceSource

__all__ = ["COUNTING", "QUESTIONS", "SHOULD", "Verdict", "argument_of", "missing_ranks", "should"]


def missing_ranks(measured: Measured) -> list[int]:
    """Return the ranks of the run that were not captured.

    Parameters
    ----------
    measured : Measured
        Measurements of a source.

    Returns
    -------
    list of int
        Ranks in ascending order; empty for a single gradient.
    """
    if not isinstance(measured.source, TraceSource):
        return []
    trace = measured.source.trace
    # a sharded gradient is read under one rank, and held by several
    return sorted({*range(trace.world_size)}.difference(*map(trace.shard_ranks, trace.ranks)))


def argument_of(source: Source) -> str:
    """Return what a command takes for a source.

    Parameters
    ----------
    source : Source
        A source that was opened.

    Returns
    -------
    str
        The path of a trace, the name of anything else.
    """
    return str(source.trace.path) if isinstance(source, TraceSource) else source.name


def _of(records: Sequence[dict[str, Any]], kind: Kind) -> list[dict[str, Any]]:
    return [r for r in records if r["kind"] == kind]


_SOUND = 0.01
"""Share of zeros from which on the first screen warns."""
_TIED = 0.001
"""Share of elements of one magnitude from which on the first screen warns."""
_SPIKE = 100
"""Quotient of the two largest magnitudes from which on the first screen warns; of a Pareto tail with ξ = 0.8, in 3 of
1,000 gradients."""
_TENTH = 0.1
"""Share of the elements that the tail is of."""
_CLOSE = 0.25
"""Distance of k̂/k from 1 up to which a model fits, and a rule hits k, where chance alone does not make it farther."""


def should(measured: Measured, kind: Kind, advice: Sequence[str]) -> Verdict:
    """Say whether to compress, in three sentences.

    Parameters
    ----------
    measured : Measured
        Measurements of a source.
    kind : Kind
        Kind of gradient that would be compressed.
    advice : sequence of str
        What plans for networks say of this source.
    """
    source = measured.source
    trace = source.trace if isinstance(source, TraceSource) else None
    settings = {} if trace is None else trace.attrs
    optimizer, ratio = settings.get("optimizer"), settings.get("ratio")
    shares = {r["step"]: r["shares"] for r in _of(measured.energy, kind) if r["shares"]}
    rows = _of(measured.ledger, kind)
    return should_compress(
        argument_of(source),
        shares,
        {ratio: _even(source.numel, ratio) for ratio in next(iter(shares.values()), ())},
        optimizer=optimizer.get("name") if isinstance(optimizer, Mapping) else None,
        ratio=ratio if isinstance(ratio, int | float) else None,
        # nothing is lost at a ratio that the gradient with the fewest zeros fits in
        nonzero=1 - min(r["least_zeros"] for r in rows) / source.numel,
        # one step is enough: the sum over workers passes NaN on to all
        sound=not any(r["nonfinite"] for r in rows),
        advice=advice,
    )


def _even(numel: int, ratio: float) -> float:
    """Return the share of Σg² that the largest elements of a normal vector hold."""
    k = target_count(ratio, numel)
    # a standard normal vector has Σg² = numel
    return float(np.square(control("halfnorm", numel, (1, k))[1]).sum()) / numel


def _live(measured: Measured, kind: Kind) -> Verdict:
    """Say what the compressor of the run did."""
    said = measured.facts.get("compressor")
    if not measured.live:
        return Verdict(
            "Not recorded", f"The run had {said}." if said else "No compressor is known."
        )
    rows, d = measured.live, measured.source.numel
    # NaN means that nothing was recorded
    known = [r["quality"] for r in rows if math.isfinite(r["quality"])]
    headline = f"{said or 'The compressor'}"
    if known:
        headline += f": k̂/k = {np.mean(known):.2f} ({min(known):.2f} to {max(known):.2f})"
    numbers = f"{len(rows)} steps and ranks"
    for name, text, unit in (
        ("bytes", "{:,.0f} bytes a step, for 4 d = " + f"{4 * d:,}", 1),
        ("build_up", "union of the ranks {:.2f} k", 1),
        ("select", "select {:.3g} ms", 1000),
        ("communicate", "communicate {:.3g} ms", 1000),
    ):
        values = [r[name] for r in rows if math.isfinite(r[name])]
        # medians: single slow steps say nothing of the usual one
        numbers += f"; {text.format(unit * np.median(values))}" if values else ""
    # of the mean: single steps may be far off by chance
    far = bool(known) and abs(float(np.mean(known)) - 1) > _CLOSE
    return Verdict(headline, numbers + ".", far)


def _spiky(ledger: Sequence[dict[str, Any]]) -> bool:
    """Return whether one element is so large that what is said of all may be about it alone."""
    return any((r["gap"] or 0) >= _SPIKE for r in ledger)


def _data(measured: Measured, kind: Kind) -> Verdict:
    """Say whether the elements themselves are sound."""
    rows, d = _of(measured.ledger, kind), measured.source.numel
    found: list[str] = []
    harmless: list[str] = []
    # any NaN is bad; zeros are usual in small numbers
    for name, text, bad in (("nonfinite", "NaN or infinite", 0.0), ("zeros", "zero", _SOUND)):
        most = max(r[name] for r in rows)
        if most:
            said = f"{most:,} elements {text} in one step ({_percent(most / d, 2)})"
            (found if most >= bad * d else harmless).append(said)
    # two elements of one magnitude are usual: float32 alone ties some
    tie = max((r["largest_tie"] or 0 for r in rows), default=0)
    if tie > max(1, _TIED * d):
        found.append(f"{tie:,} elements of one magnitude: no threshold lies between them")
    constant = {name for r in rows for name in r["constant"]}
    if constant:
        found.append(f"{len(constant)} constant layer{'s' * (len(constant) > 1)}")
    if _spiky(rows):
        found.append("one element is more than a hundred times the next")
    # the ledger has a row for each rank
    counts = {r["steps"] for r in rows}
    if len(counts) > 1:
        found.append(f"ranks have {min(counts)} to {max(counts)} steps")
    numbers = f"{_many(d, 'element')} in {_many(len(measured.source.layers), 'layer')}; "
    numbers += _many(max(counts), "step")
    absent = missing_ranks(measured)
    if absent and isinstance(measured.source, TraceSource):
        of = measured.source.trace.world_size
        numbers += f"; rank {', '.join(map(str, absent))} of {of} not captured"
    numbers = "; ".join([*harmless, numbers])
    limits = f" Warned of: any NaN or infinity, zeros from {_percent(_SOUND)}, ties above {_percent(_TIED, 1)}."
    if found:
        return Verdict("; ".join(found), f"{numbers}.{limits}", True)
    return Verdict("Yes", f"{numbers}.{limits}")


def _spread(measured: Measured, kind: Kind) -> Verdict:
    """Say how much of the energy the largest hundredth holds."""
    numel, ratio = measured.source.numel, 0.01
    shares = {
        r["step"]: r["shares"][ratio] for r in _of(measured.energy, kind) if ratio in r["shares"]
    }
    if not shares:
        return Verdict("Too few elements to say", f"{_many(numel, 'element')}.")
    at = ", ".join(f"{_percent(share)} at step {step}" for step, share in shares.items())
    numbers = f"Share of Σg²: {at}. Of a normal vector: {_percent(_even(numel, ratio))}."
    return Verdict(
        f"The largest {_percent(ratio)} hold {_percent([*shares.values()][-1])} of its energy",
        numbers,
    )


def _tail(measured: Measured, kind: Kind) -> Verdict:
    """Say how heavy the tail is, and whether the layers' scales make it so."""
    rows = _of(measured.tails, kind)
    pooled = [r for r in rows if r["layer"] == "pooled" and math.isfinite(r["c"])]
    if not pooled or pooled[-1]["n"] < FEWEST:
        return Verdict("Too few elements for a tail", f"It takes {FEWEST} in the largest tenth.")
    last = pooled[-1]
    # one spike decides the shape of any tail that it is in
    if _spiky(_of(measured.ledger, kind)):
        numbers = f"Of the top tenth, step {last['step']}, with it: {_interval(last, 'c')}."
        return Verdict("Cannot be told: one element is far beyond all others", numbers)
    step, c = last["step"], last["c"]
    word = _heaviness(last)
    headline = f"{word.capitalize()} in the top tenth: ξ = {_signed(c)}"
    numbers = f"Top tenth, step {step}: {_interval(last, 'c')}"
    normalised = [r for r in rows if r["layer"] == "normalised" and r["step"] == step]
    if len(measured.source.layers) > 1 and normalised:
        own = normalised[0]
        numbers += f"; with every layer divided by its mean {_interval(own, 'c')}"
        if word == "heavy":
            # half of the shape or more gone once each layer has its own scale
            mixed = own["c"] < c / 2
            headline += (
                ", most of it from layers of different scale" if mixed else ", in the layers too"
            )
    further = [r for r in _of(measured.peaks, kind) if r["step"] == step and r["ratio"] < 0.1]
    further = [r for r in further if r["n"] >= FEWEST and math.isfinite(r["c_low"])]
    if further:
        least = further[-1]
        headline += f"; {_heaviness(least)} in the top {_share(least)}: {_signed(least['c'])}"
        shares = ", ".join(f"{_interval(r, 'c')} in the top {_share(r)}" for r in further)
        numbers += f". Other shares have other shapes: {shares}"
    # ratios are of all elements, the tenth is of those that are not zero: alike where few are zero
    design = _designs(measured, kind, step).get(_TENTH, math.nan)
    if design >= 1.5 and math.isfinite(last["c_low"]):
        ends = widened_interval(c, last["c_low"], last["c_high"], design)
        # a word that the wider interval does not bear out would be read as sure
        doubt = (
            ", which does not exclude 0" if word != "exponential" and ends[0] < 0 < ends[1] else ""
        )
        numbers += (
            f". These intervals are of independent elements; by the design effect of {design:.3g} that of the top "
            f"tenth is {_signed(ends[0])} to {_signed(ends[1])}{doubt}"
        )
    if len(pooled) > 1:
        before = ", ".join(f"{_signed(r['c'])} at step {r['step']}" for r in pooled[:-1])
        numbers += f". Pooled, {before}"
    return Verdict(headline, numbers + ". An exponential tail has ξ = 0.")


def _heaviness(record: dict[str, Any]) -> str:
    """Return what the interval of a shape says of the tail."""
    # without an interval a shape above −½ cannot be told from that of an exponential tail
    if record["c_low"] <= 0 <= record["c_high"] or (
        math.isnan(record["c_low"]) and record["c"] > -0.5
    ):
        return "exponential"
    return "heavy" if record["c"] > 0 else "short"


def _share(record: dict[str, Any]) -> str:
    return f"{100 * record['ratio']:g}\N{NO-BREAK SPACE}%"


def _interval(record: dict[str, Any], name: str) -> str:
    middle, low, high = (_signed(record[f"{name}{end}"]) for end in ("", "_low", "_high"))
    if math.isnan(record[f"{name}_low"]):
        return f"{middle} (no interval: below −½ likelihood has none)"
    return f"{middle} ({low} to {high})"


def _many(n: int, name: str) -> str:
    return f"{n:,} {name}{'s' * (n != 1)}"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def _signed(value: float) -> str:
    # adding 0.0 makes a negative zero plain
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def _compressible(measured: Measured, kind: Kind) -> Verdict:
    """Say at which steps the sorted magnitudes fall fast enough, and whether a control does."""
    return decay_shown(_of(measured.decay, kind), [r for r in measured.decay if r["step"] is None])


def _model(measured: Measured, kind: Kind) -> Verdict:
    """Say which law is closest, and what a test can see."""
    step = measured.shown[-1]
    verdict = closest_law(_of(measured.laws, kind))
    rows = [r for r in _of(measured.fits, kind) if r["step"] == step]
    designs = _designs(measured, kind, step)
    return replace(verdict, numbers=f"{verdict.numbers} {tail_tests(rows, designs)}".strip())


def _designs(measured: Measured, kind: Kind, step: int) -> dict[float, float]:
    """Return the design effect of the elements beyond each ratio at a step, where it is known."""
    return {
        r["ratio"]: r["design"]
        # the design effect is the gradient's, the same in every rule's record
        for r in _of(measured.series, kind)
        if (r["rank"], r["step"], r["estimator"]) == (measured.rank, step, "exact")
        and math.isfinite(r["design"])
    }


def _threshold(measured: Measured, kind: Kind) -> Verdict:
    """Say which estimating rule hits k at all ratios, and that rules that count do."""
    rows = _of(measured.series, kind)
    verdict = which_rule(judged_rules(rows))
    return replace(verdict, numbers=(verdict.numbers + counting_rules(rows)).strip())


def _training(measured: Measured, kind: Kind) -> Verdict:
    """Say how the scale moves over the steps."""
    rows = {r["quantity"]: r for r in _of(measured.drift, kind)}
    if len(measured.steps) < 2:
        return Verdict("One step only", "Nothing to compare.")
    if "mean" not in rows:
        return Verdict("Nothing to follow", "No step has a finite non-zero element.")
    series = measured.training["mean"].sel(kind=kind, layer="all").isel(rank=0).dropna("step")
    means, steps = series.values, series["step"].values
    if means.size < 2:
        return Verdict("Nothing to follow", "Only one step has a finite non-zero element.")
    headline = (
        f"Mean magnitude × {means[-1] / means[0]:.2g}"  # of few steps there is no more to say
    )
    numbers = f"Step {steps[0]} to {steps[-1]}, between {min(means):.2g} and {max(means):.2g}. "
    slope = rows["mean"]["slope"]
    if math.isnan(slope):
        numbers += f"Trend tests take {FEWEST_STEPS} steps; {means.size} have no power."
    else:
        headline = movement(rows["mean"]).replace("mean", "Mean magnitude", 1)
        low, high = rows["mean"]["slope_low"], rows["mean"]["slope_high"]
        interval = f"{100 * low:+.1f} to {100 * high:+.1f}"
        if math.isnan(low):
            interval = "no interval: what is left wanders like a random walk"
        numbers += f"Per 100 steps {100 * slope:+.1f} % ({interval})."
    return Verdict(headline, numbers)


SHOULD = "Should I compress?"
"""The first question, which is answered once for a source."""
QUESTIONS: dict[str, Callable[[Measured, Kind], Verdict]] = {
    "What did the compressor do?": _live,
    "Is the data sound?": _data,
    "How uneven is it?": _spread,
    "How heavy is its tail?": _tail,
    "Is it compressible?": _compressible,
    "Which model is closest?": _model,
    "Which estimate hits k?": _threshold,
    "Does it move?": _training,
}
"""Questions that the first screen answers for every gradient, after whether to compress."""
