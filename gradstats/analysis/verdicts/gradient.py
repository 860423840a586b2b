"""What a gradient is like: sound or not, even or not, with a heavy tail or not; and what was done to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradstats.analysis.verdicts.verdict import Verdict, signed
from gradstats.statistics.pot import FEWEST
from gradstats.statistics.tails import widened_interval

__all__ = ["compressor_did", "largest_tie", "sound_elements", "spiky", "tail_weight", "uneven"]

_SOUND = 0.01
"""Share of zeros from which on the first screen warns."""
_TIED = 0.001
"""Share of elements of one magnitude from which on the first screen warns."""
_SPIKE = 100
"""Quotient of the two largest magnitudes from which on the first screen warns; of a Pareto tail with ξ = 0.8, in 3 of
1,000 gradients."""
_CLOSE = 0.25
"""Distance of k̂/k from 1 up to which a model fits, and a rule hits k, where chance alone does not make it farther."""


def compressor_did(
    live: Sequence[Mapping[str, Any]], compressor: str | None, numel: int
) -> Verdict:
    """Say what the compressor of a run did.

    Parameters
    ----------
    live : sequence of dict
        Records of :func:`gradstats.compression`.
    compressor : str or None
        The run's compressor in words, if it is known.
    numel : int
        Elements of the gradient.
    """
    if not live:
        return Verdict(
            "Not recorded",
            f"The run had {compressor}." if compressor else "No compressor is known.",
        )
    # NaN means that nothing was recorded
    known = [r["quality"] for r in live if math.isfinite(r["quality"])]
    headline = f"{compressor or 'The compressor'}"
    if known:
        headline += f": k̂/k = {np.mean(known):.2f} ({min(known):.2f} to {max(known):.2f})"
    numbers = f"{len(live)} steps and ranks"
    for name, text, unit in (
        ("bytes", "{:,.0f} bytes a step, for 4 d = " + f"{4 * numel:,}", 1),
        ("build_up", "union of the ranks {:.2f} k", 1),
        ("select", "select {:.3g} ms", 1000),
        ("communicate", "communicate {:.3g} ms", 1000),
    ):
        values = [r[name] for r in live if math.isfinite(r[name])]
        # medians: single slow steps say nothing of the usual one
        numbers += f"; {text.format(unit * np.median(values))}" if values else ""
    # of the mean: single steps may be far off by chance
    far = bool(known) and abs(float(np.mean(known)) - 1) > _CLOSE
    return Verdict(headline, numbers + ".", far)


def spiky(ledger: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether one element is so large that what is said of all may be about it alone.

    Parameters
    ----------
    ledger : sequence of dict
        Oddities of one kind, a record for each rank.
    """
    return any((r["gap"] or 0) >= _SPIKE for r in ledger)


def largest_tie(ledger: Sequence[Mapping[str, Any]]) -> int:
    """Return how many elements of one magnitude there are at most in a step.

    Parameters
    ----------
    ledger : sequence of dict
        Oddities of one kind, a record for each rank.
    """
    return max((r["largest_tie"] or 0 for r in ledger), default=0)


def sound_elements(
    ledger: Sequence[Mapping[str, Any]], numel: int, layers: int, absent: Sequence[int], world: int
) -> Verdict:
    """Say whether the elements themselves are sound.

    Parameters
    ----------
    ledger : sequence of dict
        Oddities of one kind, a record for each rank: zeros and nonfinite (of the worst step), nonfinite_steps,
        largest_tie, constant (names of layers), gap (quotient of the two largest magnitudes), steps (their number).
    numel : int
        Elements of the gradient.
    layers : int
        Number of its layers.
    absent : sequence of int
        Ranks of the run that were not captured.
    world : int
        Number of ranks of the run.
    """
    defects: list[str] = []
    harmless: list[str] = []
    # any NaN is bad; zeros are usual in small numbers
    for name, text, bad in (("nonfinite", "NaN or infinite", 0.0), ("zeros", "zero", _SOUND)):
        most = max(r[name] for r in ledger)
        if most:
            oddity = (
                f"{_many(most, 'element')} {text} in the worst step ({_percent(most / numel, 2)})"
            )
            if name == "nonfinite":
                oddity += (
                    f", with any in {_many(sum(r['nonfinite_steps'] for r in ledger), 'gradient')}"
                )
            (defects if most >= bad * numel else harmless).append(oddity)
    # two elements of one magnitude are usual: float32 alone ties some
    tie = largest_tie(ledger)
    if tie > max(1, _TIED * numel):
        defects.append(f"{tie:,} elements of one magnitude: no threshold lies between them")
    constant = {name for r in ledger for name in r["constant"]}
    if constant:
        defects.append(f"{len(constant)} constant layer{'s' * (len(constant) > 1)}")
    if spiky(ledger):
        defects.append("the largest magnitude is a hundred times the next or more")
    # the ledger has a row for each rank
    counts = {r["steps"] for r in ledger}
    if len(counts) > 1:
        defects.append(f"ranks have {min(counts)} to {max(counts)} steps")
    numbers = f"{_many(numel, 'element')} in {_many(layers, 'layer')}; "
    numbers += _many(max(counts), "step")
    if absent:
        numbers += f"; rank {', '.join(map(str, absent))} of {world} not captured"
    numbers = "; ".join([*harmless, numbers])
    limits = f" Warned of: any NaN or infinity, zeros from {_percent(_SOUND)}, ties above {_percent(_TIED, 1)}."
    if defects:
        return Verdict("; ".join(defects), f"{numbers}.{limits}", True)
    return Verdict("Yes", f"{numbers}.{limits}")


def uneven(shares: Mapping[int, float], ratio: float, even: float, numel: int) -> Verdict:
    """Say how much of the energy the largest elements hold.

    Parameters
    ----------
    shares : mapping of int to float
        Share of Σg² that they hold, by step.
    ratio : float
        Share of the elements that they are.
    even : float
        Share of Σg² that they would hold of a normal vector.
    numel : int
        Elements of the gradient.
    """
    if not shares:
        return Verdict("Too few elements to say", f"{_many(numel, 'element')}.")
    at = ", ".join(f"{_percent(share)} at step {step}" for step, share in shares.items())
    numbers = f"Share of Σg²: {at}. Of a normal vector: {_percent(even)}."
    return Verdict(
        f"The largest {_percent(ratio)} hold {_percent([*shares.values()][-1])} of its energy",
        numbers,
    )


def tail_weight(
    tails: Sequence[Mapping[str, Any]],
    peaks: Sequence[Mapping[str, Any]],
    *,
    spike: bool,
    layers: int,
    designs: Mapping[int, float],
    tied: bool = False,
) -> Verdict:
    """Say how heavy the tail is, and whether the layers' scales make it so.

    Parameters
    ----------
    tails : sequence of dict
        Records of :func:`gradstats.analysis.peaks.mixture_records` of one kind, of the top tenth, in the order of
        steps.
    peaks : sequence of dict
        Records of :func:`gradstats.analysis.peaks.pot_records` of the same kind.
    spike : bool
        Whether at some step the largest magnitude is far beyond all others.
    layers : int
        Number of layers.
    designs : mapping of int to float
        Design effect of the top tenth by step, where it is known.
    tied : bool
        Whether a tenth of the elements or more have one magnitude.
    """
    every = [r for r in tails if r["layer"] == "pooled"]
    pooled = [r for r in every if math.isfinite(r["c"])]
    # a likelihood of ties has no shape; where they begin below the largest tenth it may still have one
    if tied and (not pooled or pooled[-1]["n"] < FEWEST):
        return Verdict(
            "Cannot be told: magnitudes are tied",
            "A tenth of the elements or more have one magnitude: what lies beyond a threshold has no law to fit.",
        )
    if not pooled and every and every[-1]["n"] >= FEWEST:
        # of so many elements no other tail is without an estimate
        return Verdict(
            "Short in the top tenth: ξ is −1 or below",
            f"Likelihood has no estimate there (step {every[-1]['step']}): towards the largest magnitude elements do "
            "not become fewer. An exponential tail has ξ = 0.",
        )
    if not pooled or pooled[-1]["n"] < FEWEST:
        return Verdict("Too few elements for a tail", f"It takes {FEWEST} in the largest tenth.")
    last = pooled[-1]
    # one spike decides the shape of any tail that it is in
    if spike:
        numbers = (
            f"Of the top tenth of what is not zero, step {last['step']}: {_interval(last, 'c')}."
        )
        return Verdict(
            "Cannot be told: at some step the largest magnitude is far beyond all others", numbers
        )
    step, c = last["step"], last["c"]
    word = _heaviness(last)
    headline = f"{word.capitalize()} in the top tenth: ξ = {signed(c)}"
    numbers = f"Top tenth of what is not zero, step {step}: {_interval(last, 'c')}"
    normalised = [r for r in tails if r["layer"] == "normalised" and r["step"] == step]
    if layers > 1 and normalised:
        layer_tail = normalised[0]
        numbers += f"; with every layer divided by its mean {_interval(layer_tail, 'c')}"
        if word == "heavy":
            # half of the shape or more gone once each layer has its own scale
            mixed = layer_tail["c"] < c / 2
            headline += (
                ", most of it from layers of different scale" if mixed else ", in the layers too"
            )
    further = [r for r in peaks if r["step"] == step and r["ratio"] < 0.1]
    further = [r for r in further if r["n"] >= FEWEST and math.isfinite(r["c_low"])]
    if further:
        least = further[-1]
        headline += f"; {_heaviness(least)} in the top {_share(least)}: {signed(least['c'])}"
        shares = ", ".join(f"{_interval(r, 'c')} in the top {_share(r)}" for r in further)
        numbers += f". Other shares have other shapes: {shares}"
    design = designs.get(step, math.nan)
    if design >= 1.5 and math.isfinite(last["c_low"]):
        ends = widened_interval(c, last["c_low"], last["c_high"], design)
        # a word that the wider interval does not bear out would be read as sure
        doubt = (
            ", which does not exclude 0" if word != "exponential" and ends[0] < 0 < ends[1] else ""
        )
        numbers += (
            f". These intervals are of independent elements; by the design effect of {design:.3g} that of the top "
            f"tenth is {signed(ends[0])} to {signed(ends[1])}{doubt}"
        )
    if len(pooled) > 1:
        before = ", ".join(f"{signed(r['c'])} at step {r['step']}" for r in pooled[:-1])
        numbers += f". Pooled, {before}"
    return Verdict(headline, numbers + ". An exponential tail has ξ = 0.")


def _heaviness(record: Mapping[str, Any]) -> str:
    """Return what the interval of a shape says of the tail."""
    # without an interval a shape above −½ cannot be told from that of an exponential tail
    if record["c_low"] <= 0 <= record["c_high"] or (
        math.isnan(record["c_low"]) and record["c"] > -0.5
    ):
        return "exponential"
    return "heavy" if record["c"] > 0 else "short"


def _share(record: Mapping[str, Any]) -> str:
    return f"{100 * record['ratio']:g}\N{NO-BREAK SPACE}%"


def _interval(record: Mapping[str, Any], name: str) -> str:
    middle, low, high = (signed(record[f"{name}{end}"]) for end in ("", "_low", "_high"))
    if math.isnan(record[f"{name}_low"]):
        return f"{middle} (no interval: below −½ likelihood has none)"
    return f"{middle} ({low} to {high})"


def _many(n: int, name: str) -> str:
    return f"{n:,} {name}{'s' * (n != 1)}"


def _percent(share: float, digits: int = 0) -> str:
    percentage, step = f"{100 * share:.{digits}f}", 10.0**-digits
    # neither none nor all where it is not
    if share > 0 and float(percentage) == 0:
        percentage = f"less than {step:g}"
    elif share < 1 and float(percentage) == 100:
        percentage = f"more than {100 - step:g}"
    return f"{percentage}\N{NO-BREAK SPACE}%"
