"""Conclusions from records, in sentences: which law is closest, and which rule hits k.

Report, terminal and notebooks print what is said here, so that they cannot say different things.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradstats.analysis.rules import COUNTING, TOLERANCE
from gradstats.statistics.compressibility import Ruling
from gradstats.statistics.laws import LAWS
from gradstats.statistics.tails import TailTest, widened

__all__ = [
    "FITS",
    "Verdict",
    "closest_law",
    "counting_rules",
    "decay_shown",
    "left_out",
    "named_law",
    "tail_tests",
    "which_rule",
]

FITS = math.log(1.05)
"""Median |ln| of a law's thresholds over the exact ones up to which it fits, where these are known that well."""
_EXACT = 0.01
"""|ln k̂/k| up to which a rule that counts elements has done so."""
_FAR = math.log(2)
"""|ln| of a law's thresholds, or of a rule's k̂/k, from which on it is warned of, or left out of a short table."""
_LEAST = 1e-4
"""Smallest error of a logarithm that is written out."""
_POWERLESS = math.log(1.2)
"""What chance may do to exact thresholds before they cannot tell laws apart."""


_CONTROLS = {"uniform": "uniform", "halfnorm": "half-normal", "laplace": "Laplace"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer on the first screen.

    Attributes
    ----------
    headline : str
        Answer in a few words.
    numbers : str
        Numbers behind it, in sentences.
    warn : bool
        Whether something is wrong.
    """

    headline: str
    numbers: str
    warn: bool = False

    def __str__(self) -> str:
        """Return it as text."""
        return f"{self.headline}. {self.numbers}"


def closest_law(laws: Sequence[Mapping[str, Any]]) -> Verdict:
    """Say which law is closest to a gradient, and whether it fits.

    The criterion is the largest error of a law's thresholds over the ratios in use, at captured steps other than those
    that it was fitted to. A law fits if the median error is at most :data:`FITS` and the worst twice that, or what
    chance does to the exact thresholds. Of several laws that fit, the one with the fewest parameters is named.

    Parameters
    ----------
    laws : sequence of dict
        Records of :func:`gradstats.analysis.closest.closest_laws` of one trace and kind, the closest first.

    Returns
    -------
    Verdict
        The law's name or none, with its errors.
    """
    best, fitting = named_law(laws)
    if not best:
        numbers = "It takes a ratio that asks for ten elements or more, and for no more than are not zero."
        return Verdict("No law can be judged", numbers)
    chance = best["chance"]
    if chance > _POWERLESS:
        numbers = f"Chance alone moves the exact threshold of {best['k']:,} elements by {_percent(chance)}."
        return Verdict("Too few elements to tell laws apart", numbers)
    # laws without a fit in most pairs have an infinite error
    known = [r for r in laws if math.isfinite(r["tail_error"])]
    off = f"{_percent(best['tail_error'])}"
    if best["pairs"] > 1:
        off += f" (worst {_percent(best['worst'])})"
    headline = f"{_name(best)}: thresholds within {off}"
    if not fitting:
        headline = f"None; the nearest, {_name(best)}, is {off} off"
    numbers = _how(best)
    if not fitting:
        numbers += f" {_why_not(best)}"
    others = [r for r in fitting or known if _name(r) != _name(best)]
    listed = dict.fromkeys(f"{_name(r)} {_percent(r['tail_error'])}" for r in others)
    if listed:
        numbers += f" {'These fit, too' if fitting else 'Next'}: {', '.join([*listed][:3])}."
    bound = _percent(FITS)
    if chance > FITS:
        bound += f", or {_percent(chance)}, which chance does to {best['k']:,} elements"
    return Verdict(headline, f"{numbers} A law fits within {bound}.", best["tail_error"] > _FAR)


def named_law(
    laws: Sequence[Mapping[str, Any]],
) -> tuple[Mapping[str, Any] | None, list[Mapping[str, Any]]]:
    """Return the law that :func:`closest_law` names, or None if no law can be judged, and those that fit.

    Parameters
    ----------
    laws : sequence of dict
        Records of :func:`gradstats.analysis.closest.closest_laws` of one trace and kind, the closest first.
    """
    known = [r for r in laws if math.isfinite(r["tail_error"])]
    if not known:
        return None, []
    # nothing can be judged finer than chance lets exact thresholds be known
    allowed = max(FITS, known[0]["chance"])
    fitting = [r for r in known if r["tail_error"] <= allowed and r["worst"] <= 2 * allowed]
    # one law for all before one a layer, fewer parameters before more, a law's own method before another
    return (min(fitting, key=_parameters) if fitting else known[0]), fitting


def _how(law: Mapping[str, Any]) -> str:
    """Say what laws were judged by."""
    ratios = _listed(law["ratios"])
    if law["predictive"]:
        many = f"{law['pairs']} pairs" if law["pairs"] > 1 else "one pair"
        return (
            f"Fitted at one captured step and judged at the next ({many}), by the largest error of the thresholds at "
            f"{ratios}."
        )
    return f"Judged on the gradient that it was fitted to, by the largest error of the thresholds at {ratios}."


def _why_not(law: Mapping[str, Any]) -> str:
    """Say at which ratio and step the nearest law is farthest off, and what that spoils."""
    error = f"{_percent(abs(law['off']))} too {'high' if law['off'] > 0 else 'low'}"
    if law["off"] == -math.inf:
        error = "0, which keeps everything"
    elif law["off"] == math.inf:
        error = "infinite, which keeps nothing"
    at = f"at step {law['off_judged']}"
    if law["predictive"]:
        at += f", fitted at step {law['off_fitted']}"
    said = f"Farthest off: its threshold at ratio {law['off_ratio']:g} is {error} {at}."
    allowed = max(FITS, law["chance"])
    if law["tail_error"] <= allowed:  # the median is near enough, and one pair is not
        said += f" In no pair may a law be more than {_percent(2 * allowed)} off."
    return said


def _parameters(law: Mapping[str, Any]) -> tuple[bool, int, bool, float]:
    own = law["method"] == LAWS[law["model"]].default_method
    return law["by_layer"], len(LAWS[law["model"]].parameters), not own, law["tail_error"]


def _name(law: Mapping[str, Any]) -> str:
    label = LAWS[law["model"]].label
    if law["method"] != LAWS[law["model"]].default_method:
        label += f" ({law['method']})"
    return f"{label}, one a layer" if law["by_layer"] else label


def tail_tests(fits: Sequence[Mapping[str, Any]], designs: Mapping[float, float]) -> str:
    """Say which laws a test of the tail rejects at the smallest ratio in use, and what it can see.

    Parameters
    ----------
    fits : sequence of dict
        Records of :func:`gradstats.analysis.fits.fit_records` of one gradient.
    designs : mapping of float to float
        By ratio, the design effect of the elements beyond it, where it is known.
    """
    # controls are known to be wrong
    judged = [r for r in fits if math.isfinite(r["p_tail"]) and not LAWS[r["model"]].control]
    if not judged:
        return ""
    ratio, k = judged[0]["tail_ratio"], judged[0]["tail_k"]
    # a design effect below 1 makes no test sharper
    design = max(designs.get(ratio, 1.0), 1.0)
    tests = {}
    for r in judged:
        test = TailTest(ratio, k, r["p_tail"], r["visible"])
        tests[r["model"]] = widened(test, r["quality"][ratio], design)
    rejected = [model for model, test in tests.items() if test.p_value <= 0.05]
    visible = min(test.visible for test in tests.values())
    seen = (
        f"{100 * visible:.0f}\N{NO-BREAK SPACE}% more than k"
        if visible < 3
        else f"{1 + visible:.2g} k"
    )
    how = f"; design effect {design:.3g}" if design >= 1.5 else ""
    text = f"A test of what the thresholds keep at ratio {ratio:g} (k = {k:,}{how}) sees {seen} with probability 0.8"
    named = ", ".join(LAWS[model].label for model in rejected)
    if len(rejected) == len(tests) > 1:
        named = f"all {len(tests)} laws"
    return f"{text}, and rejects {named or 'none of them'}."


def decay_shown(
    decay: Sequence[Mapping[str, Any]], controls: Sequence[Mapping[str, Any]]
) -> Verdict:
    """Say at which steps the sorted magnitudes fall fast enough, and whether a control does.

    Parameters
    ----------
    decay : sequence of dict
        Records of :func:`gradstats.analysis.decay.compressibility_records` of one trace, rank and kind.
    controls : sequence of dict
        Those of the controls.
    """
    rows = [r for r in decay if math.isfinite(r["p"])]
    if not rows:
        return Verdict("No power", "Fewer ranks than an exponent takes.")
    # too few or too wide a window is no verdict of the data
    judged = [r for r in rows if r["reason"] not in (Ruling.TOO_FEW, Ruling.TOO_WIDE)]
    if not judged:
        return Verdict("No power", f"No verdict: {rows[0]['reason']}.")
    yes = sum(r["compressible"] is True for r in rows)
    headline = "Not shown at any step" if len(rows) > 1 else "Not shown"
    if yes:
        headline = f"Shown at {yes} of {len(rows)} steps" if len(rows) > 1 else "Shown"
    ends = rows if len(rows) < 3 else [rows[0], rows[-1]]
    at = ", ".join(f"{_between(r, 'p')} at step {r['step']}" for r in ends)
    last = int(rows[0]["window"].split("-")[1])
    numbers = (
        f"p = {at}, of the largest {last:,}. Shown means p above ½ in every window, by Hill's estimate and by σ_k too, "
        "and a power law likelier than a log-normal. "
    )
    unsure = [r for r in rows if r["compressible"] is None]
    reasons: dict[str, list[Mapping[str, Any]]] = {}
    for r in unsure:
        reasons.setdefault(r["reason"], []).append(r)
    for reason, those in reasons.items():
        at = f"Step {those[0]['step']}" if len(those) == 1 else f"{len(those)} of {len(rows)} steps"
        of = "" if len(those) == 1 else f"at step {those[-1]['step']} "
        numbers += f"{at}: {reason} ({of}p = {_by_window(those[-1])}). "
    # a control that passes means that the test does not reject what it must
    passing = [r["kind"] for r in controls if r["compressible"]]
    listed = ", ".join(f"{_CONTROLS.get(r['kind'], r['kind'])} {r['p']:.2f}" for r in controls)
    numbers += f"Controls: {listed}"
    numbers += ": passes what it must reject!" if passing else ", rejected."
    return Verdict(headline, numbers, bool(passing))


def _by_window(record: Mapping[str, Any]) -> str:
    """Return p by the last rank of the window, from a record of a decay."""
    shown = (
        f"{p:.2f} to rank {int(ranks.split('-')[1]):,}" for ranks, p in record["windows"].items()
    )
    return ", ".join(shown)


def _between(record: Mapping[str, Any], name: str) -> str:
    middle, low, high = (_rounded(record[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return f"{middle} ({low} to {high})"


def _rounded(value: float) -> str:
    # adding 0.0 makes a negative zero plain
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


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
    unsure = [r for r in known if r["hits"] is None and r["far"] <= _FAR]
    # records come nearest first; a rule known to hit k beats a nearer one that is not
    best = (hitting or known)[0]
    span = f"k̂/k = {_span(best)}"
    ratios = _listed(best["mean"])
    headline = f"{best['estimator']}: {span}"
    if not hitting:
        word = "Not decided" if best["hits"] is None else "None"
        headline = f"{word}; the nearest, {best['estimator']}, has {span}"
    gradients = f"{best['n']} gradients" if best["n"] > 1 else "one gradient"
    numbers = f"Means over {gradients}, at {ratios}. A rule hits k if the 95 % interval of its mean is within a factor "
    numbers += f"of {TOLERANCE:g} of 1 at every ratio."
    if len(hitting) > 1:
        numbers += f" These hit k, too: {', '.join(r['estimator'] for r in hitting[1:])}."
    if best in unsure:
        doubts = [
            f"{_interval(best, r)} at ratio {r:g}" for r in best["mean"] if _undecided(best, r)
        ]
        if doubts:
            numbers += f" The interval of {best['estimator']} is {', '.join(doubts)}."
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
    short: list[Mapping[str, Any]] = []
    rest: list[Mapping[str, Any]] = []
    for r in rows:
        # a threshold of 0 keeps all that is not zero, and it is still fewer than k
        (short if r["selected"] < r["k"] and r["threshold"] == 0 else rest).append(r)
    said = ""
    if short:
        ratios = {r["ratio"]: None for r in short}
        said = f" There are fewer non-zero elements than k at {_listed([*ratios])}: all are kept."
    if not rest:
        return said
    off = max(abs(math.log(r["quality"])) for r in rest)
    if off == 0:
        return f"{said} Rules that count elements keep k exactly."
    worst = max(rest, key=lambda r: abs(math.log(r["quality"])))
    of = "" if worst["k"] >= 100 else f" (k = {worst['k']})"
    # exact counts to k, so only ties can make it more
    if worst["estimator"] == "exact":
        return f"{said} Even rules that count elements are up to {_percent(off)} off{of}: magnitudes are tied."
    return f"{said} Rules that count elements keep within {_percent(off)} of k{of}."


def left_out(rules: Sequence[Mapping[str, Any]]) -> tuple[list[str], str]:
    """Return the rules that a short table leaves out, and why: those that count elements, and those far off.

    Parameters
    ----------
    rules : sequence of dict
        Records of :func:`gradstats.analysis.rules.judged_rules` of one trace, kind and layer.
    """
    exact = [r for r in rules if r["estimator"] in COUNTING and r["far"] <= _EXACT]
    far = [r for r in rules if r["estimator"] not in COUNTING and r["far"] > _FAR]
    if len(exact) + len(far) == len(rules):  # a table has to have something
        return [], ""
    said = []
    if exact:
        said.append(f"Not shown, for they count: {', '.join(_names(exact))}.")
    if far:
        said.append(f"More than twofold off: {', '.join(_names(far))}.")
    if said:
        said.append("--all shows them.")
    return _names([*exact, *far]), " ".join(said)


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
    return (
        f"{value:.2f}" if 0.1 <= value < 10 else f"{value:.2g}" if value < 100 else f"{value:.0f}"
    )


def _percent(error: float) -> str:
    """Return an error of a logarithm in per cent."""
    # e⁵ is 148; an infinite error is said so, too
    if error > 5:
        return "more than 100-fold"
    if error > _FAR:
        return f"{math.exp(error):.2g}-fold"
    return f"{100 * math.expm1(max(error, _LEAST)):.2g}\N{NO-BREAK SPACE}%"


def _listed(ratios: Sequence[float] | Mapping[float, Any]) -> str:
    texts = [f"{ratio:g}" for ratio in ratios]
    if len(texts) == 1:
        return f"ratio {texts[0]}"
    return f"ratios {', '.join(texts[:-1])} and {texts[-1]}"
