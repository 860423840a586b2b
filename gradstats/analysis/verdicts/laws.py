"""Which law is closest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradstats.analysis.verdicts.verdict import FAR, FITS, Verdict, listed, off_by, percent
from gradstats.statistics.laws import LAWS
from gradstats.statistics.tails import TailTest, widened
from gradstats.tables import format_short

__all__ = ["closest_law", "named_law", "tail_tests"]

_POWERLESS = math.log(1.2)
"""What chance may do to exact thresholds before they cannot tell laws apart."""


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
    # laws without a fit in most pairs have an infinite error
    known = [r for r in laws if math.isfinite(r["tail_error"])]
    # what is farther off than chance is refused, however few the elements are; a law that is near all the same, where
    # others are refused, is told apart from them
    is_distinct = best["tail_error"] <= FITS and len(fitting) < len(known)
    if chance > _POWERLESS and fitting and not is_distinct:
        numbers = (
            f"Chance alone moves the exact threshold of {best['k']:,} elements by {percent(chance)}: only "
            "laws that are farther off can be refused."
        )
        return Verdict("Too few elements to tell laws apart", numbers)
    off = f"{percent(best['tail_error'])}"
    if best["pairs"] > 1:
        off += f" (worst {percent(best['worst'])})"
    headline = f"{_name(best)}: thresholds within {off}"
    if not fitting:
        tried = len({r["model"] for r in laws})
        of = f" of {tried}" if tried > 1 else ""
        headline = f"None{of}; the nearest, {_name(best)}, is {off} off"
    numbers = _how(best)
    if not fitting:
        numbers += f" {_why_not(best)}"
    others = [r for r in fitting or known if _name(r) != _name(best)]
    listed = dict.fromkeys(f"{_name(r)} {percent(r['tail_error'])}" for r in others)
    if listed:
        numbers += f" {'These fit, too' if fitting else 'Next'}: {', '.join([*listed][:3])}."
    bound = percent(FITS)
    if chance > FITS:
        bound += f", or within {percent(chance)}, the error of chance with {best['k']:,} elements"
    return Verdict(headline, f"{numbers} To fit is to be within {bound}.", best["tail_error"] > FAR)


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
    ratios = listed(law["ratios"])
    if law["predictive"]:
        many = f"{law['pairs']} pairs" if law["pairs"] > 1 else "one pair"
        return (
            f"Fitted at one captured step and judged at the next ({many}), by the largest error of the thresholds at "
            f"{ratios}."
        )
    return f"Judged on the gradient that it was fitted to, by the largest error of the thresholds at {ratios}."


def _why_not(law: Mapping[str, Any]) -> str:
    """Say at which ratio and step the nearest law is farthest off, and what that spoils."""
    if law["off"] == -math.inf:
        error = "0, which keeps everything"
    elif law["off"] == math.inf:
        error = "infinite, which keeps nothing"
    else:
        error = off_by(law["off"])
    at = f"at step {law['off_judged']}"
    if law["predictive"]:
        at += f", fitted at step {law['off_fitted']}"
    reason = f"Farthest off: its threshold at ratio {law['off_ratio']:g} is {error} {at}."
    allowed = max(FITS, law["chance"])
    if law["tail_error"] <= allowed:  # the median is near enough, and one pair is not
        reason += f" In no pair may a law be more than {percent(2 * allowed)} off."
    return reason


def _parameters(law: Mapping[str, Any]) -> tuple[bool, int, bool, float]:
    is_default = law["method"] == LAWS[law["model"]].default_method
    return law["by_layer"], len(LAWS[law["model"]].parameters), not is_default, law["tail_error"]


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
    excess = (
        f"{100 * visible:.0f}\N{NO-BREAK SPACE}% more than k"
        if visible < 3
        else f"{format_short(1 + visible)} k"
    )
    how = f"; design effect {design:.3g}" if design >= 1.5 else ""
    text = f"A test of what the thresholds keep at ratio {ratio:g} (k = {k:,}{how}) sees {excess} with probability 0.8"
    named = ", ".join(LAWS[model].label for model in rejected)
    if len(rejected) == len(tests) > 1:
        named = f"all {len(tests)} laws"
    return f"{text}, and rejects {named or 'none of them'}."
