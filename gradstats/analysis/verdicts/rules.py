"""Which rule hits k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradstats.analysis.quality import EMPTY, INFINITE
from gradstats.analysis.rules import COUNTING, TOLERANCE
from gradstats.analysis.verdicts.verdict import FAR, Verdict, joined, listed, percent
from gradstats.tables import format_short

__all__ = ["counting_rules", "left_out", "which_rule"]

_EXACT = 0.01
"""|ln k̂/k| up to which a rule that counts elements has done so."""


def which_rule(rules: Sequence[Mapping[str, Any]]) -> Verdict:
    """Say which estimating rule hits k at all ratios.

    Parameters
    ----------
    rules : sequence of dict
        Records of :func:`gradstats.analysis.rules.judged_rules` of one trace, kind and layer, the nearest first.

    Returns
    -------
    Verdict
        The rule's name or none, with the mean of k̂/k over the ratios.
    """
    estimating = [r for r in rules if r["estimator"] not in COUNTING]
    known = [r for r in estimating if r["mean"]]
    unknown: dict[str, list[str]] = {}
    for r in estimating:
        if not r["mean"]:
            unknown.setdefault(r["reason"], []).append(r["estimator"])
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in unknown.items()]
    if len(unknown) == 1 and not known:
        reasons = [*unknown]
    missing = f" Not judged: {'; '.join(reasons)}." if reasons else ""
    if not known:
        return Verdict("No estimating rule is judged", missing.strip())
    hitting = [r for r in known if r["hits"]]
    # one that is more than twofold off in the mean is named for that, however few the gradients
    unsure = [r for r in known if r["hits"] is None and r["far"] <= FAR]
    # records come nearest first; a rule known to hit k beats a nearer one that is not
    best = (hitting or known)[0]
    span = f"k̂/k = {_span(best)}"
    ratios = listed(best["mean"])
    headline = f"{best['estimator']}: {span}"
    if not hitting:
        word = "Not decided" if best["hits"] is None else "None"
        headline = f"{word}; the nearest, {best['estimator']}, has {span}"
    gradients = (
        f"Geometric means over {best['n']} gradients" if best["n"] > 1 else "Of one gradient"
    )
    what = (
        "95 % interval"
        if best["interval"]
        else "range, widened by what chance does to one gradient,"
    )
    numbers = f"{gradients}, at {ratios}. A rule hits k if its {what} is within a factor of "
    numbers += f"{TOLERANCE:g} of 1 at every ratio."
    if best["empty"]:
        some = "one gradient" if best["empty"] == 1 else f"{best['empty']} gradients"
        numbers += f" Left out: {some} of which {EMPTY}."
    if best["ranks"]:
        missed = [f"rank {rank} at {ratio:g}" for ratio, rank in best["ranks"].items()]
        numbers += (
            f" The numbers are of {joined(missed)}, which misses k: a mean over all ranks hides it."
        )
    if len(hitting) > 1:
        numbers += f" These hit k, too: {', '.join(r['estimator'] for r in hitting[1:])}."
    if best in unsure:
        doubts = [
            f"{_interval(best, r)} at ratio {r:g}" for r in best["mean"] if _undecided(best, r)
        ]
        if doubts:
            name = "interval" if best["interval"] else "widened range"
            numbers += f" The {name} of {best['estimator']} is {', '.join(doubts)}."
    untold = [r["estimator"] for r in unsure if r is not best]
    if untold:
        numbers += f" Cannot be told: {', '.join(untold)}."
    empty = [f"{r['estimator']} ({_nothing(r)})" for r in known if any(r["nothing"].values())]
    if empty:
        numbers += f" Kept nothing: {', '.join(empty)}."
    # by the worst ratio: means over ratios may cancel
    worst = max(known, key=lambda r: max(abs(math.log(m)) for m in r["mean"].values()))
    if worst is not best:
        numbers += f" Farthest off: {worst['estimator']}, {_span(worst)}."
    return Verdict(headline, numbers + missing)


def counting_rules(series: Sequence[Mapping[str, Any]]) -> str:
    """Say how near rules that count elements come to k, and what keeps them from it.

    Parameters
    ----------
    series : sequence of dict
        Records of :func:`gradstats.quality_series` of one trace and kind.
    """
    # ln 0 is not defined: records that kept nothing are said elsewhere
    rows = [r for r in series if r["estimator"] in COUNTING and r["k"] >= 1 and r["selected"]]
    # not the rule's doing
    rows = [r for r in rows if r.get("status") != INFINITE]
    short: list[Mapping[str, Any]] = []
    rest: list[Mapping[str, Any]] = []
    for r in rows:
        # a threshold of 0 keeps all that is not zero, and it is still fewer than k
        (short if r["selected"] < r["k"] and r["threshold"] == 0 else rest).append(r)
    shortage = ""
    if short:
        ratios = {r["ratio"]: None for r in short}
        shortage = (
            f" There are fewer non-zero elements than k at {listed([*ratios])}: all are kept."
        )
    if not rest:
        return shortage
    off = max(abs(math.log(r["quality"])) for r in rest)
    if off == 0:
        return f"{shortage} Rules that count elements keep k exactly."
    worst = max(rest, key=lambda r: abs(math.log(r["quality"])))
    of = "" if worst["k"] >= 100 else f" (k = {worst['k']})"
    # exact counts to k, so only ties can make it more
    if worst["estimator"] == "exact":
        return f"{shortage} Even rules that count elements are up to {percent(off)} off{of}: magnitudes are tied."
    return f"{shortage} Rules that count elements keep within {percent(off)} of k{of}."


def left_out(rules: Sequence[Mapping[str, Any]]) -> tuple[list[str], str]:
    """Return the rules that a short table leaves out, and why: those that count elements, and those far off.

    Parameters
    ----------
    rules : sequence of dict
        Records of :func:`gradstats.analysis.rules.judged_rules` of one trace, kind and layer.
    """
    exact = [r for r in rules if r["estimator"] in COUNTING and r["far"] <= _EXACT]
    far = [r for r in rules if r["estimator"] not in COUNTING and r["far"] > FAR]
    if len(exact) + len(far) == len(rules):  # a table has to have something
        return [], ""
    sentences = []
    if exact:
        sentences.append(f"Not shown, for they count: {', '.join(_names(exact))}.")
    if far:
        sentences.append(f"More than twofold off: {', '.join(_names(far))}.")
    if sentences:
        sentences.append("--all shows them.")
    return _names([*exact, *far]), " ".join(sentences)


def _undecided(rule: Mapping[str, Any], ratio: float) -> bool:
    """Return whether the interval of a rule's mean is neither within the tolerance nor outside."""
    low, high = rule["low"][ratio], rule["high"][ratio]
    return bool(
        (low < 1 / TOLERANCE or high > TOLERANCE) and low <= TOLERANCE and high >= 1 / TOLERANCE
    )


def _interval(rule: Mapping[str, Any], ratio: float) -> str:
    return f"{_short(rule['low'][ratio])} to {_short(rule['high'][ratio])}"


def _names(rules: Sequence[Mapping[str, Any]]) -> list[str]:
    return [r["estimator"] for r in rules]


def _span(rule: Mapping[str, Any]) -> str:
    # nothing in every gradient: the half element of the mean was only for the logarithm
    means = [0.0 if rule["nothing"][r] == rule["n"] else m for r, m in rule["mean"].items()]
    low, high = min(means), max(means)
    ends = [_short(low), _short(high)]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _nothing(rule: Mapping[str, Any]) -> str:
    worst = max(rule["nothing"], key=lambda ratio: rule["nothing"][ratio])
    return f"{rule['nothing'][worst]} of {rule['n']} gradients at {worst:g}"


def _short(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= value < 10 else format_short(value)
